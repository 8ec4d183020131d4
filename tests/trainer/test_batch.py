"""Groups to rows and back: every valid completion once, its numbers at its tokens, one shape
whatever the lengths."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.records import Branch, Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.trainer.batch import (
    BatchLayout,
    Shape,
    TokenTerms,
    TokenValues,
    fill_rows,
    pack,
    row_shapes,
    unpack,
)

LONGEST = 30 + 40


def make_groups(
    seed: int, prompts: int, siblings: int, longest_prompt: int = 30, longest: int = 40
) -> list[Group]:
    """Ragged groups, some completions not valid, some empty, some with tokens that the model did
    not draw, some with branches that follow prompts of their own."""
    rng = np.random.default_rng(seed)
    groups = []
    for row in range(prompts):
        completions = []
        for index in range(siblings):
            n = int(rng.integers(0 if rng.random() < 0.1 else 1, longest + 1))
            starts = sorted(rng.integers(1, n + 1, rng.integers(0, 3) if n else 0).tolist())
            completions.append(
                Completion(
                    row,
                    index,
                    rng.integers(1, 99, n).astype(np.int32),
                    rng.normal(size=n).astype(np.float32),
                    rng.random(n) < 0.8,
                    np.zeros(n, np.int32),
                    StopReason.EOS,
                    branches=tuple(
                        Branch(start, rng.integers(1, 99, 1 + start % 7).astype(np.int32))
                        for start in starts
                    ),
                )
            )
        rewards = rng.integers(0, 2, siblings).astype(float)
        groups.append(
            Group(
                Purpose.TRAIN,
                0,
                0,
                Example(row, "q"),
                rng.integers(1, 99, rng.integers(1, longest_prompt + 1)).astype(np.int32),
                tuple(completions),
                ("",) * siblings,
                rewards,
                {},
                rng.random(siblings) < 0.8,
            )
        )
    return groups


def packed(
    groups: list[Group],
    shapes: tuple[Shape, ...],
    include=None,
    route_shape: tuple[int, int] | None = None,
    old_logprobs: TokenValues | None = None,
    ref_logprobs: TokenValues | None = None,
):
    rng = np.random.default_rng(1)
    size = (len(groups), groups[0].size)
    advantages, weights = rng.normal(size=size), rng.uniform(0.1, 1, size)
    include = range(len(groups)) if include is None else include
    terms = TokenTerms(advantages, weights, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    layout = BatchLayout(shapes, 0.7, route_shape=route_shape)
    return advantages, weights, pack(groups, include, terms, layout)


sizes = {
    "seed": st.integers(0, 2**32 - 1),
    "prompts": st.integers(1, 6),
    "siblings": st.integers(1, 5),
    "micro_tokens": st.sampled_from([1, 100, 400, 10**6]),
    "shards": st.sampled_from([1, 2, 8]),
}


def shapes_for(prompts: int, siblings: int, micro_tokens: int, shards: int) -> tuple[Shape, ...]:
    return row_shapes(LONGEST, prompts * siblings * LONGEST, micro_tokens, shards, 4)


@settings(deadline=None, max_examples=60)
@given(**sizes)
def test_every_valid_completion_lands_once_with_its_numbers(
    seed, prompts, siblings, micro_tokens, shards
):
    groups = make_groups(seed, prompts, siblings)
    shapes = shapes_for(prompts, siblings, micro_tokens, shards)
    advantages, weights, batches = packed(groups, shapes)
    seen = set()
    for batch in batches:
        b, used = batch.arrays, np.zeros(batch.arrays.tokens.shape, bool)
        assert Shape(*b.tokens.shape) in shapes and b.temperature == np.float32(0.7)
        for (g, i, start), (row, tokens) in batch.positions.items():
            at, group, completion = (row, tokens), groups[g], groups[g].completions[i]
            assert (g, i, start) not in seen and group.valid[i] and not used[at].any()
            seen.add((g, i, start))
            prompt_ids, own = next(
                one for one in group.branches_of(i) if one[1].start == start and one[1].stop > start
            )
            used[at] = True
            # Its sequence, walked backwards from its last token, is its prompt and itself.
            place, walked = tokens.stop - 1, []
            while b.position[row, place]:
                walked.append(place)
                place = b.before[row, place]
            walked.append(place)
            whole = [*prompt_ids, *completion.token_ids[own]]
            assert b.tokens[row, walked[::-1]].tolist() == whole
            assert b.position[row, walked[::-1]].tolist() == list(range(len(whole)))
            number, prompt = b.segment[at][0], b.prompt[at][0]
            assert (b.segment[row] == number).sum() == len(whole) - len(prompt_ids)
            assert (b.segment[at] == number).all()
            assert (b.prompt[at] == prompt).all() and (b.segment[row] == prompt).sum() == len(
                prompt_ids
            )
            used[row, b.segment[row] == prompt] = True
            assert (b.loss_mask[at] == completion.loss_mask[own]).all()
            assert (
                b.weight[at] == np.where(completion.loss_mask[own], np.float32(weights[g, i]), 0)
            ).all()
            assert (b.advantage[at] == np.float32(advantages[g, i])).all()
            assert (b.sampler_logprobs[at] == completion.logprobs[own]).all()
        assert ((b.segment > 0) == used).all() and batch.num_tokens == used.sum()
        for row, numbers in zip(used, b.segment, strict=True):
            filled = int(row.sum())  # without gaps; numbers never decrease
            assert row[:filled].all() and (np.diff(numbers[:filled]) >= 0).all()
        outside = b.segment == b.prompt
        for name in (
            "loss_mask",
            "weight",
            "advantage",
            "sampler_logprobs",
            "old_logprobs",
            "ref_logprobs",
        ):
            assert not getattr(b, name)[outside].any(), name
    assert seen == {
        (g, i, own.start)
        for g, group in enumerate(groups)
        for i in range(siblings)
        if group.valid[i]
        for _, own in group.branches_of(i)
        if own.stop > own.start
    }


@settings(deadline=None, max_examples=40)
@given(**sizes)
def test_values_come_back_to_their_completions(seed, prompts, siblings, micro_tokens, shards):
    groups = make_groups(seed, prompts, siblings)
    old_logprobs = {}
    for g, group in enumerate(groups):
        for i, c in enumerate(group.completions):
            old_logprobs[(g, i)] = -np.arange(len(c), dtype=np.float32) - 100 * g - 1000 * i - 1
    ref_logprobs = {key: value - 0.5 for key, value in old_logprobs.items()}
    batches = packed(
        groups,
        shapes_for(prompts, siblings, micro_tokens, shards),
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
    )[2]
    found = unpack(batches, [batch.arrays.old_logprobs for batch in batches])
    there = unpack(batches, [batch.arrays.ref_logprobs for batch in batches])
    assert (found and found.keys() == there.keys()) or not any(
        group.valid[i] and len(c) for group in groups for i, c in enumerate(group.completions)
    )
    for key, value in found.items():
        assert (
            value.tolist() == old_logprobs[key].tolist()
            and there[key].tolist() == ref_logprobs[key].tolist()
        )


def test_only_the_groups_that_are_included_are_packed():
    groups, shapes = make_groups(3, 6, 4), shapes_for(6, 4, 300, 2)
    for include in (range(6), [0], [5, 2], []):
        batches = packed(groups, shapes, include)[2]
        assert batches  # an update without rows has one, empty
        assert {g for batch in batches for g, _, _ in batch.positions} <= set(include)
    assert (
        not batches[0].arrays.segment.any() and Shape(*batches[0].arrays.tokens.shape) == shapes[-1]
    )


def test_shapes_follow_from_settings():
    assert row_shapes(320, 10**6, 2048, 1, 4) == (
        Shape(1, 2048),
        Shape(1, 512),
        Shape(1, 128),
        Shape(1, 32),
    )
    assert row_shapes(320, 10**6, 2048, 8, 1) == (Shape(8, 2048),)  # tokens are counted a device
    # never less than a prompt with its completion
    assert row_shapes(5000, 10**6, 2048, 1, 2)[0].length >= 5000
    # what an update can have, in one
    assert row_shapes(70, 700, 10**9, 1, 1)[0].length in range(700, 764)
    assert row_shapes(768, 64 * 4352, 16384, 64, 1) == (Shape(64, 4352),)  # a group for each device
    # never more than micro_tokens
    assert row_shapes(768, 64 * 4352, 4351, 64, 1) == (Shape(64, 4096),)
    assert row_shapes(320, 10**9, 139264, 2, 1) == (Shape(2, 139264),)
    # Two rows of eight devices, four of them a row: no device has more tokens than without.
    assert row_shapes(65536, 10**9, 16384, 8, 4, context=4) == tuple(
        Shape(2, length) for length in (65536, 16384, 4096, 1024)
    )
    # each part a multiple of 16
    assert row_shapes(70, 10**6, 16, 2, 1, context=2) == (Shape(1, 96),)
    assert row_shapes(10, 40, 1, 1, 4) == (Shape(1, 16),)


@pytest.mark.parametrize(("median", "cap"), [(300, 1024), (500, 4096), (1500, 8192)])
def test_little_is_padding_whatever_the_lengths(median, cap):
    """64 prompts of up to 256 tokens, 8 completions of lognormal lengths each, micro-batches of
    16k: computed tokens over real ones, prompts that a second row computes again included."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(median), 1.0, (64, 8)), 1, cap).astype(int)
    sizes = {}
    for n, own in enumerate(lengths):
        sizes[n] = (int(rng.integers(64, 257)), dict(enumerate(own.tolist())))
    whole = row_shapes(256 + cap, 10**9, 16384, 1, 4)[0]
    rows = fill_rows(sizes, whole.length)
    real = lengths.sum() + sum(prompt for prompt, _ in sizes.values())
    assert len(rows) * whole.length / real < 1.1
    for row in rows:
        assert row.free >= 0
    assert sorted((n, i) for row in rows for n, members in row.parts for i in members) == [
        (n, i) for n in range(64) for i in range(8)
    ]


def rows_by_definition(sizes: dict, length: int) -> list[tuple[int, list]]:
    """`fill_rows` as its docstring says it, looking at every row for every piece."""

    def fitting(members: dict, room: int) -> dict:
        taken = {}
        for index, size in members.items():
            if size <= room - sum(taken.values()):
                taken[index] = size
        return taken

    rows: list[list] = []  # free tokens, parts
    for number in sorted(sizes, key=lambda n: (-sizes[n][0] - sum(sizes[n][1].values()), n)):
        prompt = sizes[number][0]
        rest = dict(sorted(sizes[number][1].items(), key=lambda entry: (-entry[1], entry[0])))
        while rest:
            row = min(
                (row for row in rows if row[0] >= prompt + sum(rest.values())),
                key=lambda row: row[0],
                default=None,
            )
            if row is None:
                row = max(
                    rows, key=lambda row: sum(fitting(rest, row[0] - prompt).values()), default=None
                )
                if row is None or sum(fitting(rest, row[0] - prompt).values()) <= prompt:
                    rows.append(row := [length, []])
            taken = fitting(rest, row[0] - prompt)
            row[0] -= prompt + sum(taken.values())
            row[1].append((number, sorted(taken)))
            rest = {index: size for index, size in rest.items() if index not in taken}
    return [(free, parts) for free, parts in rows]


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 50), min_size=1, max_size=6)),
        max_size=30,
    ),
    st.integers(90, 300),
)
def test_rows_are_filled_as_defined(groups, length):
    sizes = {}
    for n, (prompt, members) in enumerate(groups):
        sizes[n] = (prompt, dict(enumerate(members)))
    assert [(row.free, row.parts) for row in fill_rows(sizes, length)] == rows_by_definition(
        sizes, length
    )


@pytest.mark.parametrize("lengths", [lambda rng: rng.lognormal(np.log(300), 1.0), lambda rng: 512])
def test_rows_of_many_completions_take_less_than_a_second(lengths):
    """1,024 groups of 16 in short rows, most of which cannot take another piece."""
    rng = np.random.default_rng(0)
    sizes = {}
    for n in range(1024):
        sizes[n] = (
            int(rng.integers(64, 257)),
            {i: int(np.clip(lengths(rng), 1, 1024)) for i in range(16)},
        )
    started = time.process_time()
    assert len(fill_rows(sizes, 2048)) > 2000
    assert time.process_time() - started < 1


def test_what_is_left_over_takes_a_shorter_shape_where_that_saves_much():
    def group(row: int) -> Group:
        full = Completion(
            row,
            0,
            np.ones(40, np.int32),
            np.zeros(40, np.float32),
            np.ones(40, bool),
            np.zeros(40, np.int32),
            StopReason.LENGTH,
        )
        return Group(
            Purpose.TRAIN,
            0,
            0,
            Example(row, "q"),
            np.ones(20, np.int32),
            (full,) * 3,
            ("",) * 3,
            np.zeros(3),
            {},
            np.ones(3, bool),
        )

    def lengths(count: int) -> list[int]:
        groups = [group(row) for row in range(count)]
        result = []
        for batch in packed(groups, row_shapes(60, 10**6, 560, 1, 4))[2]:
            result.append(batch.arrays.tokens.shape[1])
        return result

    assert lengths(1) == [128, 128]  # for 140 tokens
    # a fourth group is divided: 60 tokens beside three others, 100 left over
    assert lengths(4) == [512, 128]
    assert set(lengths(41)) == {512}  # a program of its own would save little
    with pytest.raises(
        ValueError, match="a prompt of 20 tokens with a completion of 40 does not fit rows of 48"
    ):
        packed([group(0)], (Shape(1, 48),))


def test_a_group_over_several_rows_repeats_its_prompt():
    groups = make_groups(0, 1, 5)
    completions = tuple(replace(one, branches=()) for one in groups[0].completions)
    groups = [replace(groups[0], completions=completions, valid=np.ones(5, bool))]
    batches = packed(groups, (Shape(1, 80),))[2]
    assert len(batches) > 1 and all(
        batch.prompts[0][0] == len(groups[0].prompt_ids) for batch in batches
    )
    assert sum(completions for batch in batches for _, completions in batch.prompts) == sum(
        len(c) > 0 for c in groups[0].completions
    )


# ---- recorded experts

ROUTES = (2, 3)


def with_experts(group: Group, rng: np.random.Generator) -> Group:
    """The experts of each token, those of a prompt as they were when it was first computed."""
    of_prompt: dict[bytes, np.ndarray] = {}

    def experts(size: int) -> np.ndarray:
        return rng.integers(0, 200, (size, *ROUTES)).astype(np.uint8)

    def experts_of(prompt: np.ndarray) -> np.ndarray:
        return of_prompt.setdefault(prompt.tobytes(), experts(len(prompt)))

    completions = []
    for one in group.completions:
        branches = []
        for branch in one.branches:
            branches.append(branch._replace(experts=experts_of(branch.prompt_ids)))
        recorded = replace(
            one,
            extra={"experts": experts(len(one))},
            prompt_experts=experts_of(group.prompt_ids),
            branches=tuple(branches),
        )
        completions.append(recorded)
    return replace(group, completions=tuple(completions))


@settings(deadline=None, max_examples=40)
@given(**sizes)
def test_every_token_has_the_experts_that_are_recorded_of_it(
    seed, prompts, siblings, micro_tokens, shards
):
    rng = np.random.default_rng(seed)
    groups = [with_experts(group, rng) for group in make_groups(seed, prompts, siblings)]
    shapes = shapes_for(prompts, siblings, micro_tokens, shards)
    _, _, batches = packed(groups, shapes, route_shape=ROUTES)
    for batch in batches:
        b = batch.arrays
        # By place: those that are recorded, and else -1, where the trainer chooses.
        expected = np.full(b.experts.shape, -1)
        for (g, i, start), (row, tokens) in batch.positions.items():
            group, completion = groups[g], groups[g].completions[i]
            prompt_ids, own = next(
                one for one in group.branches_of(i) if one[1].start == start and one[1].stop > start
            )
            # The sampler has not computed the last token.
            computed = slice(tokens.start, tokens.stop - 1)
            expected[row, computed] = completion.extra["experts"][own][:-1]
            is_prompt = b.segment[row] == b.prompt[row, tokens.start]
            expected[row, is_prompt] = group.experts_by_prompt()[prompt_ids.tobytes()]
        np.testing.assert_array_equal(b.experts, expected)
        assert batch.with_own_routes().arrays.experts is None
        np.testing.assert_array_equal(batch.with_own_routes().arrays.tokens, b.tokens)


def test_records_without_experts_or_of_another_model_are_refused():
    groups = make_groups(3, 2, 3)
    shapes = shapes_for(2, 3, 400, 1)
    with pytest.raises(ShoalError, match=r"no record of its tokens' experts.*router_replay=off"):
        packed(groups, shapes, route_shape=ROUTES)
    recorded = [with_experts(group, np.random.default_rng(0)) for group in groups]
    with pytest.raises(ShoalError, match=r"are \(2, 3\) in a completion, \(4, 2\) in the model"):
        packed(recorded, shapes, route_shape=(4, 2))
    # A completion without tokens needs no record.
    empty = replace(recorded[0].completions[0], token_ids=np.zeros(0, np.int32), extra={})
    empty = replace(empty, branches=())
    first = replace(recorded[0], completions=(empty, *recorded[0].completions[1:]))
    first = replace(first, valid=np.ones(3, bool))
    packed([first, recorded[1]], shapes, route_shape=ROUTES)
    _, _, batches = packed(recorded, shapes)  # not used again
    assert all(batch.arrays.experts is None for batch in batches)
