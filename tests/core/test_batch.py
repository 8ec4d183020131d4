"""Groups to rows and back: every valid completion once, its numbers at its tokens, shapes from few buckets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.trainer.batch import Shape, bucket, choose_shape, pack
from shoal.types import Completion, Example, Group, Purpose, StopReason


def make_groups(seed: int, prompts: int, siblings: int, longest_prompt: int = 30, longest: int = 40) -> list[Group]:
    """Ragged groups, some completions not valid, some empty, some with tokens that the model did not draw."""
    rng = np.random.default_rng(seed)
    groups = []
    for row in range(prompts):
        completions = []
        for index in range(siblings):
            n = int(rng.integers(0 if rng.random() < 0.1 else 1, longest + 1))
            completions.append(Completion(row, index, rng.integers(1, 99, n).astype(np.int32),
                                          rng.normal(size=n).astype(np.float32), rng.random(n) < 0.8,
                                          np.zeros(n, np.int32), StopReason.EOS))
        rewards = rng.integers(0, 2, siblings).astype(float)
        groups.append(Group(Purpose.TRAIN, 0, 0, Example(row, "q"),
                            rng.integers(1, 99, rng.integers(1, longest_prompt + 1)).astype(np.int32),
                            tuple(completions), ("",) * siblings, rewards, {}, rng.random(siblings) < 0.8))
    return groups


def packed(groups: list[Group], shape: Shape, include=None, **values):
    rng = np.random.default_rng(1)
    size = (len(groups), groups[0].size)
    advantages, weights = rng.normal(size=size), rng.uniform(0.1, 1, size)
    include = range(len(groups)) if include is None else include
    return advantages, weights, pack(groups, include, advantages, weights, shape, 0.7, **values)


sizes = {"seed": st.integers(0, 2**32 - 1), "prompts": st.integers(1, 6), "siblings": st.integers(1, 5),
         "micro_tokens": st.sampled_from([1, 100, 400, 10**6]), "shards": st.sampled_from([1, 2, 8])}


@settings(deadline=None, max_examples=60)
@given(**sizes)
def test_every_valid_completion_lands_once_with_its_numbers(seed, prompts, siblings, micro_tokens, shards):
    groups = make_groups(seed, prompts, siblings)
    shape = choose_shape(groups, prompts, siblings, micro_tokens, shards)
    assert shape.rows % shards == 0 and shape.rows * shape.slots >= 1
    advantages, weights, batches = packed(groups, shape)
    seen, used = set(), np.zeros((len(batches), shape.rows, shape.slots), bool)
    for number, batch in enumerate(batches):
        b = batch.arrays
        assert b.slots.shape == b.segment.shape == (shape.rows, shape.slots, shape.length)
        assert b.prefix.shape == (shape.rows, shape.prefix) and b.temperature == np.float32(0.7)
        for (g, i), (row, slot, segment) in batch.positions.items():
            group, completion = groups[g], groups[g].completions[i]
            n, p = len(completion), len(group.prompt_ids)
            at = (row, slot, slice(0, n))
            assert (g, i) not in seen and group.valid[i] and not used[number, row, slot] and segment == 1
            seen.add((g, i))
            used[number, row, slot] = True
            assert (b.prefix[row, :p] == group.prompt_ids).all() and b.prefix_len[row] == p
            assert (b.prefix[row, p:] == 0).all() and (b.segment[row, slot, n:] == 0).all()
            assert (b.slots[at] == completion.token_ids).all() and (b.loss_mask[at] == completion.loss_mask).all()
            assert (b.weight[at] == np.where(completion.loss_mask, np.float32(weights[g, i]), 0)).all()
            assert (b.advantage[at] == np.float32(advantages[g, i])).all() and (b.sampler_logprobs[at] == completion.logprobs).all()
        outside = b.segment == 0
        for name in ("slots", "loss_mask", "weight", "advantage", "sampler_logprobs", "old_logprobs", "ref_logprobs"):
            assert not getattr(b, name)[outside].any(), name
        assert (outside.all(-1) == ~used[number]).all()
        assert (b.prefix_len[~used[number].any(-1)] == 0).all()
    assert seen == {(g, i) for g, group in enumerate(groups) for i in range(siblings)
                    if group.valid[i] and len(group.completions[i])}


@settings(deadline=None, max_examples=40)
@given(**sizes)
def test_values_come_back_to_their_completions(seed, prompts, siblings, micro_tokens, shards):
    groups = make_groups(seed, prompts, siblings)
    shape = choose_shape(groups, prompts, siblings, micro_tokens, shards)
    old_logprobs = {(g, i): -np.arange(len(c), dtype=np.float32) - 100 * g - 1000 * i - 1
           for g, group in enumerate(groups) for i, c in enumerate(group.completions)}
    ref_logprobs = {key: value - 0.5 for key, value in old_logprobs.items()}
    found, there = {}, {}
    for batch in packed(groups, shape, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)[2]:
        found |= batch.unpack(batch.arrays.old_logprobs)
        there |= batch.unpack(batch.arrays.ref_logprobs)
    assert (found and found.keys() == there.keys()) or not any(
        group.valid[i] and len(c) for group in groups for i, c in enumerate(group.completions))
    for key, value in found.items():
        assert value.tolist() == old_logprobs[key].tolist() and there[key].tolist() == ref_logprobs[key].tolist()


def test_two_completions_in_one_slot_come_back_apart():
    groups = make_groups(0, 1, 2, longest=6)
    batch = packed(groups, Shape(1, 32, 1, 8))[2][0]
    segment = np.array([[[1, 1, 1, 2, 2, 0, 0, 0]]])
    merged = type(batch)(type(batch.arrays)(**{**vars(batch.arrays), "segment": segment}),
                         {(0, 0): (0, 0, 1), (0, 1): (0, 0, 2)})
    taken = merged.unpack(np.arange(8.0).reshape(1, 1, 8))
    assert taken[0, 0].tolist() == [0, 1, 2] and taken[0, 1].tolist() == [3, 4]


def test_bucket_is_the_least_that_holds():
    allowed = sorted({top * part // 4 for top in (16, 32, 64, 128, 256, 512, 1024) for part in (3, 4)} - {12})
    assert allowed[:7] == [16, 24, 32, 48, 64, 96, 128]
    for size in range(1024):
        assert bucket(size) == min(b for b in allowed if b >= size)
    values = [bucket(size) for size in range(1024)]
    assert values == sorted(values)
    assert all(b <= 1.5 * size for size, b in enumerate(values) if size > 16)


def test_shapes_do_not_depend_on_which_groups_are_included():
    groups = make_groups(3, 6, 4)
    shape = choose_shape(groups, 6, 4, 300, 2)
    for include in (range(6), [0], [5, 2], []):
        batches = packed(groups, shape, include)[2]
        assert batches  # an update without rows has one, empty
        for batch in batches:
            assert batch.arrays.slots.shape == (shape.rows, shape.slots, shape.length)
            assert {g for g, _ in batch.positions} <= set(include)
    assert not packed(groups, shape, [])[2][0].arrays.segment.any()


def test_shape_fits_the_tokens_allowed():
    """Prompts of 30 (bucket 32) and completions of 40 (bucket 48): P = 4, G = 4."""
    groups = make_groups(0, 4, 4, longest_prompt=30, longest=40)
    full = Completion(0, 0, np.ones(40, np.int32), np.zeros(40, np.float32), np.ones(40, bool), np.zeros(40, np.int32),
                      StopReason.LENGTH)
    groups[0] = Group(Purpose.TRAIN, 0, 0, Example(0, "q"), np.ones(30, np.int32), (full,) * 4, ("",) * 4, np.zeros(4),
                      {}, np.ones(4, bool))
    assert choose_shape(groups, 4, 4, 10**6, 1) == Shape(4, 32, 4, 48)  # no more rows than there are
    assert choose_shape(groups, 4, 4, 2 * (32 + 4 * 48), 1) == Shape(2, 32, 4, 48)
    assert choose_shape(groups, 4, 4, 32 + 2 * 48, 1) == Shape(1, 32, 2, 48)  # a group takes two rows
    assert choose_shape(groups, 4, 4, 1, 1) == Shape(1, 32, 1, 48)  # never less than a completion
    assert choose_shape(groups, 4, 4, 10**6, 8) == Shape(8, 32, 4, 48)  # a row for each of 8 devices
    assert choose_shape(groups, 4, 4, 32 + 4 * 48, 2) == Shape(2, 32, 4, 48)  # tokens are counted a device
    assert Shape(2, 32, 4, 48).tokens == 2 * (32 + 4 * 48)


def test_a_group_over_several_rows_repeats_its_prompt():
    groups = make_groups(0, 1, 5)
    groups[0].valid[:] = True
    batches = packed(groups, Shape(4, 32, 2, 48))[2]
    assert len(batches) == 1 and batches[0].arrays.prefix_len.tolist() == [len(groups[0].prompt_ids)] * 3 + [0]
    assert (batches[0].arrays.prefix[0] == batches[0].arrays.prefix[2]).all()
