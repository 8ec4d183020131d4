"""The compiled update: a shared prompt equals the flattened computation, any split gives the same gradient, no buffer
of all tokens x vocabulary exists, a gradient that is not finite changes nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    FULLEST,
    ON_POLICY,
    PLAINEST,
    QWEN3,
    batches,
    learner,
    random_groups,
    random_parameters,
    relative,
    roles,
)
from tiny_runs import forget_programs

from shoal.algorithm.policy_loss import clipped
from shoal.config.schema import AlgorithmSection, OptimizerSection
from shoal.model.transformer import Architecture, Model
from shoal.trainer.batch import LearnerBatch, Shape, choose_shape, pack
from shoal.trainer.loss import Objective, batch_loss
from shoal.trainer.step import Learner

pytestmark = pytest.mark.compile_quickly

BY_TOKEN = ("slots", "loss_mask", "weight", "advantage", "sampler_logprobs", "old_logprobs", "ref_logprobs")


def flattened(batch: LearnerBatch) -> LearnerBatch:
    """The same tokens with every prompt in every completion's own row, as a segment without shared prefix: row r of
    prompt length p and completion c becomes one slot of p + c tokens after a prefix of one token."""
    rows, slots, size = batch.slots.shape
    longest = batch.prefix.shape[1]
    total = rows * slots
    out = {name: np.zeros((total, 1, longest - 1 + size), getattr(batch, name).dtype)
           for name in ("segment", *BY_TOKEN)}
    prefix, prefix_len = np.zeros((total, 1), np.int32), np.zeros(total, np.int32)
    for row in range(rows):
        length = int(batch.prefix_len[row])
        for slot in range(slots):
            n, at = int((batch.segment[row, slot] > 0).sum()), row * slots + slot
            if not n:
                continue
            prefix[at, 0], prefix_len[at] = batch.prefix[row, 0], 1
            out["slots"][at, 0, : length - 1] = batch.prefix[row, 1:length]
            out["segment"][at, 0, : length - 1 + n] = 1
            for name in BY_TOKEN:
                out[name][at, 0, length - 1 : length - 1 + n] = getattr(batch, name)[row, slot, :n]
    return LearnerBatch(prefix, prefix_len, temperature=batch.temperature, **out)


def own(values, batch: LearnerBatch) -> np.ndarray:
    return np.asarray(values)[np.asarray(batch.loss_mask)]


@cache
def gradient_program(a: Architecture, dtype: Any, remat: str) -> Any:
    model = Model(a, roles().trainer, dtype, remat=remat)


    def loss_and_logprobs(parameters, batch):
        loss, (_, _, lp) = batch_loss(model, ON_POLICY, parameters, batch)
        return loss, lp

    return jax.jit(jax.value_and_grad(loss_and_logprobs, has_aux=True))


def gradient(a, parameters, batch, dtype=jnp.float32, remat="dots"):
    (loss, _), gradient = gradient_program(a, dtype, remat)(parameters, batch)
    return loss, gradient


@pytest.mark.parametrize("a", [PLAINEST, FULLEST], ids=["plainest", "fullest"])
def test_a_shared_prompt_equals_the_flattened_computation(a):
    parameters = random_parameters(a)
    (batch,) = batches(random_groups(a, 3, 4, 40, 30), temperature=0.7)
    flat_batch = flattened(batch)
    ((loss, lp), shared), ((flat_loss, flat_lp), flat) = (
        gradient_program(a, jnp.float32, "dots")(parameters, one) for one in (batch, flat_batch))
    assert np.abs(own(lp, batch) - own(flat_lp, flat_batch)).max() < 1e-5
    assert abs(loss - flat_loss) < 1e-5 * max(1, abs(flat_loss))
    for ours, theirs in zip(jax.tree.leaves(shared), jax.tree.leaves(flat), strict=True):
        assert relative(ours, theirs) < 1e-5


def test_in_bfloat16_sharing_costs_no_accuracy():
    a = FULLEST
    parameters = random_parameters(a, scale=4.0)
    (batch,) = batches(random_groups(a, 3, 4, 40, 30))
    exact = gradient(a, parameters, batch)[1]
    shared = gradient(a, parameters, batch, jnp.bfloat16)[1]
    flat = gradient(a, parameters, flattened(batch), jnp.bfloat16)[1]
    total = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]) for g in (shared, flat, exact)]
    assert 0 < relative(total[0], total[2]) <= 1.5 * relative(total[1], total[2])


def test_any_split_into_micro_batches_gives_the_same_update():
    a, groups = QWEN3, random_groups(QWEN3, 5, 4, 20, 20)
    one = learner(a)
    state = one.init(random_parameters(a))
    results = []
    for shape in (choose_shape(groups, 5, 4, 10**9, 1), Shape(4, 24, 2, 24)):  # all together; 4 rows, half a group each
        total = None
        for batch in batches(groups, shape):
            total, _ = one.accumulate(total, state, batch)
        results.append((shape, total))
    (one_shape, whole), (_, split) = results
    assert one_shape.rows == 5 and one_shape.slots == 4
    assert abs(float(split.loss - whole.loss)) < 1e-5
    for ours, theirs in zip(jax.tree.leaves(split.gradient), jax.tree.leaves(whole.gradient), strict=True):
        assert relative(ours, theirs) < 1e-5
    for name, (value, count) in whole.sums.items():
        assert np.allclose(split.sums[name][0], value, rtol=1e-4) and split.sums[name][1] == count, name


def test_several_completions_in_a_slot_equal_one_in_each():
    """The contract's packing: segments see their own tokens and the prompt, nothing of each other."""
    a = QWEN3
    (separate,) = batches(random_groups(a, 1, 2, 9, 8), Shape(2, 16, 2, 16))
    lengths = [int((separate.segment[0, s] > 0).sum()) for s in range(2)]
    assert sum(lengths) <= 16
    merged = {}
    for name in ("segment", *BY_TOKEN):
        value = np.asarray(getattr(separate, name))
        joined = np.concatenate([value[0, s, : lengths[s]] * (s + 1 if name == "segment" else 1) for s in range(2)])
        merged[name] = np.zeros_like(value)
        merged[name][0, 0, : sum(lengths)] = joined
    together = replace(separate, **merged)
    parameters = random_parameters(a)
    (loss, ours), (same, theirs) = gradient(a, parameters, together), gradient(a, parameters, separate)
    assert abs(loss - same) < 1e-5
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert relative(x, y) < 1e-5


def test_empty_rows_change_nothing_and_their_gradient_is_finite():
    a, groups = QWEN3, random_groups(QWEN3, 2, 2, 9, 8)
    shape = choose_shape(groups, 2, 2, 10**9, 1)
    (full,), (padded,) = batches(groups, shape), batches(groups, replace(shape, rows=5))
    parameters = random_parameters(a)
    (loss, ours), (same, theirs) = gradient(a, parameters, padded), gradient(a, parameters, full)
    assert abs(loss - same) < 1e-6
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.isfinite(x).all() and relative(x, y) < 1e-5


def test_an_update_without_rows_applies_a_zero_gradient():
    a = QWEN3
    empty = pack([], [], np.zeros((0, 2)), np.zeros((0, 2)), Shape(2, 16, 2, 16), 1.0)
    one = learner(a)
    state = one.init(random_parameters(a))
    total, _ = one.accumulate(None, state, empty[0].arrays)
    after, applied = one.apply(state, total)
    assert float(applied.grad_norm) == 0 and int(applied.skipped) == 0 and int(after.updates) == 1
    for x, y in zip(jax.tree.leaves(after.trainable), jax.tree.leaves(state.trainable), strict=True):
        assert (np.asarray(x) == np.asarray(y)).all()


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    a = QWEN3
    one = learner(a)
    state = one.init(random_parameters(a))
    (batch,) = batches(random_groups(a, 2, 2, 9, 8))
    weight = np.array(batch.weight)
    weight[0, 0, 0] = np.inf
    total, _ = one.accumulate(None, state, replace(batch, weight=weight))
    moments = jax.tree.map(np.array, state.optimizer)
    after, applied = one.apply(state, total)
    assert int(applied.skipped) == 1 and int(after.updates) == 0
    for x, y in zip(jax.tree.leaves((after.trainable, after.optimizer)),
                    jax.tree.leaves((state.trainable, moments)), strict=True):
        assert (np.asarray(x) == np.asarray(y)).all()


def test_a_second_learner_compiles_nothing_and_another_loss_by_the_same_name_is_taken(monkeypatch):
    forget_programs()
    parameters = random_parameters(QWEN3)
    (batch,) = batches(random_groups(QWEN3, 2, 2, 9, 8))

    def norm() -> tuple[float, int]:
        one = learner(QWEN3, Objective.of(AlgorithmSection()))
        state = one.init(parameters)
        total, _ = one.accumulate(None, state, batch)
        _, applied = one.apply(state, total)
        return float(applied.grad_norm), one.programs["accumulate"].num_compiled

    first = norm()
    assert norm() == first == (first[0], 1)

    def doubled(*arguments, **settings):
        token_loss, low, high = clipped(*arguments, **settings)
        return 2 * token_loss, low, high

    monkeypatch.setattr("shoal.algorithm.policy_loss.clipped", doubled)
    assert norm()[0] == pytest.approx(2 * first[0], rel=1e-6)


def test_log_probs_are_one_program_whatever_the_type_of_gradients():
    model, objective = Model(QWEN3, roles().trainer, jnp.bfloat16), Objective.of(AlgorithmSection())
    one, other = (Learner(model, objective, OptimizerSection(reduce_dtype=name), 10).programs
                  for name in ("float32", "bfloat16"))
    assert one["accumulate"] is not other["accumulate"] and one["score"] is other["score"]


def test_no_buffer_of_all_tokens_by_vocabulary_in_the_update():
    """T = 12 x 64 completion tokens, V = 1009, 8 tokens of each of 2 rows a chunk: the compiled update holds logits of
    a chunk and none of all tokens; without chunks it holds them, so the search can find one."""
    a = replace(QWEN3, num_layers=1, vocab_size=1009, tie_embeddings=False)
    groups = random_groups(a, 2, 6, 16, 64)
    (batch,) = batches(groups)

    def largest(chunk_elements: int) -> int:
        objective = replace(ON_POLICY, chunk_elements=chunk_elements)
        model = Model(a, roles().trainer)
        step = jax.jit(jax.value_and_grad(lambda p, b: batch_loss(model, objective, p, b)[0]))
        text = step.lower(random_parameters(a), batch).compile().as_text()
        sizes = [int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"f32\[([\d,]+)\]", text)
                 if "1009" in dims.split(",")]
        return max(sizes)

    rows, slots, length = batch.slots.shape
    assert (rows, slots * length) == (2, 6 * 64)
    assert largest(2 * 8 * 1009) <= max(2 * 8 * 1009, 32 * 1009)  # a chunk, or the unembedding itself
    assert largest(2**25) >= rows * slots * length * 1009


def test_recomputing_blocks_changes_no_gradient():
    a, groups = QWEN3, random_groups(QWEN3, 2, 2, 9, 8)
    (batch,) = batches(groups)
    parameters = random_parameters(a)

    kept, *others = (gradient(a, parameters, batch, remat=remat)[1] for remat in ("none", "dots", "attention", "full"))
    for recomputed in others:
        for x, y in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
            assert relative(x, y) < 1e-6
