"""The compiled update: a shared prompt equals the flattened computation, any split gives the same
gradient, no buffer of all tokens x vocabulary exists, a gradient that is not finite changes
nothing."""

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
    SHARED_KEYS,
    batches,
    learner,
    num_compiled,
    random_groups,
    random_parameters,
    relative,
    roles,
    whole,
)
from tiny_runs import forget_programs

from shoal.algorithm.loss import clipped
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.optimizer import OptimizerSection
from shoal.mesh import Role
from shoal.model.architecture import Architecture
from shoal.model.linear import broadcast
from shoal.model.parameters import shardings
from shoal.model.transformer import Model
from shoal.trainer.batch import BatchLayout, LearnerBatch, MicroBatch, Shape, TokenTerms, pack
from shoal.trainer.loss import batch_loss, make_objective
from shoal.trainer.step import Learner, TrainState

BY_TOKEN = ("loss_mask", "weight", "advantage", "sampler_logprobs", "old_logprobs", "ref_logprobs")


def flattened(batch: LearnerBatch) -> LearnerBatch:
    """The same tokens with a row for each completion: the prompt's first token, then one segment of
    all others."""
    segment, prompt = np.asarray(batch.segment), np.asarray(batch.prompt)
    completions = []
    for row in range(len(segment)):
        for number in np.unique(segment[row][segment[row] != prompt[row]]):
            completions.append((row, number))
    out = MicroBatch.empty(Shape(len(completions), 80), float(batch.temperature)).arrays
    for at, (row, number) in enumerate(completions):
        own = np.flatnonzero(segment[row] == number)
        shared = np.flatnonzero(segment[row] == prompt[row, own[0]])
        n, p = len(own) + len(shared), len(shared)
        out.tokens[at, :n] = batch.tokens[row, [*shared, *own]]
        out.position[at, :n], out.before[at, 1:n] = np.arange(n), np.arange(n - 1)
        out.prompt[at, :n], out.segment[at, 0], out.segment[at, 1:n] = 1, 1, 2
        for name in BY_TOKEN:
            getattr(out, name)[at, p:n] = getattr(batch, name)[row, own]
    return out


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


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(PLAINEST, id="plainest"),
        pytest.param(FULLEST, id="fullest", marks=pytest.mark.slow),
        pytest.param(SHARED_KEYS, id="shared keys", marks=pytest.mark.slow),
    ],
)
def shared_and_flattened(request):
    """A batch and the same flattened, each with its loss, log-probs and gradient."""
    parameters = random_parameters(request.param)
    (batch,) = batches(random_groups(request.param, 3, 4, 40, 30), temperature=0.7)
    program = gradient_program(request.param, jnp.float32, "dots")
    result = []
    for one in (batch, flattened(batch)):
        result.append((one, program(parameters, one)))
    return result


def test_a_shared_prompt_equals_the_flattened_computation(shared_and_flattened, request):
    model = request.node.callspec.params["shared_and_flattened"]
    # Scores that are not divided by the root of head_dim are larger, and so is their rounding.
    bound = 2e-5 if model is SHARED_KEYS else 1e-5
    batch, ((loss, lp), shared) = shared_and_flattened[0]
    flat_batch, ((flat_loss, flat_lp), flat) = shared_and_flattened[1]
    assert np.abs(own(lp, batch) - own(flat_lp, flat_batch)).max() < 1e-5
    assert abs(loss - flat_loss) < 1e-5 * max(1, abs(flat_loss))
    for ours, theirs in zip(jax.tree.leaves(shared), jax.tree.leaves(flat), strict=True):
        assert relative(ours, theirs) < bound


@pytest.mark.slow
def test_in_bfloat16_sharing_costs_no_accuracy():
    a = FULLEST
    parameters = random_parameters(a, scale=4.0)
    (batch,) = batches(random_groups(a, 3, 4, 40, 30))
    exact = gradient(a, parameters, batch)[1]
    shared = gradient(a, parameters, batch, jnp.bfloat16)[1]
    flat = gradient(a, parameters, flattened(batch), jnp.bfloat16)[1]
    total = []
    for g in (shared, flat, exact):
        total.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]))
    assert 0 < relative(total[0], total[2]) <= 1.5 * relative(total[1], total[2])


@pytest.mark.slow
def test_any_split_into_micro_batches_gives_the_same_update():
    a, groups = QWEN3, random_groups(QWEN3, 5, 4, 20, 20)
    one = learner(a)
    state = one.init(random_parameters(a))
    results = []
    for shape in (None, Shape(1, 64)):  # all together; rows that hold half a group
        total, parts = None, batches(groups, shape)
        for batch in parts:
            total, _ = one.accumulate(total, state, batch)
        results.append((len(parts), total))
    (first, whole), (several, split) = results
    assert first == 1 and several > 4
    assert abs(float(split.loss - whole.loss)) < 1e-5
    for ours, theirs in zip(
        jax.tree.leaves(split.gradient), jax.tree.leaves(whole.gradient), strict=True
    ):
        assert relative(ours, theirs) < 1e-5
    for name, (value, count) in whole.sums.items():
        assert (
            np.allclose(split.sums[name][0], value, rtol=1e-4) and split.sums[name][1] == count
        ), name


@pytest.mark.slow
def test_several_groups_in_a_row_equal_fewer_in_each():
    """Segments see their own tokens and their prompt, nothing of each other, whatever row they
    stand in."""
    a, groups = QWEN3, random_groups(QWEN3, 3, 2, 9, 8)
    parameters = random_parameters(a)
    (together,), alone = batches(groups), batches(groups, Shape(1, 32))
    assert len(alone) > 1 and len(np.unique(together.prompt)) == 4  # three prompts, and padding
    loss, ours = gradient(a, parameters, together)
    parts = [gradient(a, parameters, batch) for batch in alone]
    assert abs(loss - sum(part for part, _ in parts)) < 1e-5
    theirs = jax.tree.map(lambda *leaves: sum(leaves), *(part for _, part in parts))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert relative(x, y) < 1e-5


@pytest.mark.slow
def test_empty_rows_change_nothing_and_their_gradient_is_finite():
    a, groups = QWEN3, random_groups(QWEN3, 2, 2, 9, 8)
    shape = whole(groups)
    (full,), (padded,) = batches(groups, shape), batches(groups, replace(shape, rows=5))
    parameters = random_parameters(a)
    (loss, ours), (same, theirs) = gradient(a, parameters, padded), gradient(a, parameters, full)
    assert abs(loss - same) < 1e-6
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.isfinite(x).all() and relative(x, y) < 1e-5


@pytest.mark.slow
def test_an_update_without_rows_applies_a_zero_gradient():
    a = QWEN3
    empty = pack(
        [], [], TokenTerms(np.zeros((0, 2)), np.zeros((0, 2))), BatchLayout([Shape(2, 32)], 1.0)
    )
    one = learner(a)
    state = one.init(random_parameters(a))
    total, _ = one.accumulate(None, state, empty[0].arrays)
    after, applied = one.apply(state, total)
    assert float(applied.grad_norm) == 0 and int(applied.skipped) == 0 and int(after.updates) == 1
    for x, y in zip(
        jax.tree.leaves(after.trainable), jax.tree.leaves(state.trainable), strict=True
    ):
        assert (np.asarray(x) == np.asarray(y)).all()


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    a = QWEN3
    one = learner(a)
    state = one.init(random_parameters(a))
    (batch,) = batches(random_groups(a, 2, 2, 9, 8))
    weight = np.array(batch.weight)
    weight[0, np.flatnonzero(batch.loss_mask[0])[0]] = np.inf
    total, _ = one.accumulate(None, state, replace(batch, weight=weight))
    moments = jax.tree.map(np.array, state.optimizer)
    after, applied = one.apply(state, total)
    assert int(applied.skipped) == 1 and int(after.updates) == 0
    for x, y in zip(
        jax.tree.leaves((after.trainable, after.optimizer)),
        jax.tree.leaves((state.trainable, moments)),
        strict=True,
    ):
        assert (np.asarray(x) == np.asarray(y)).all()


@pytest.mark.parametrize(("schedule", "shared"), [("constant", True), ("linear", False)])
def test_a_run_of_another_length_has_the_same_programs_unless_its_schedule_ends_with_it(
    schedule, shared
):
    model = Model(QWEN3, roles().trainer)
    one, other = (
        Learner(model, ON_POLICY, OptimizerSection(schedule=schedule), updates)
        for updates in (10, 20)
    )
    assert (one.programs["apply"] is other.programs["apply"]) == shared


@pytest.mark.slow
def test_a_second_learner_compiles_nothing_and_another_loss_by_the_same_name_is_taken(monkeypatch):
    forget_programs()
    parameters = random_parameters(QWEN3)
    (batch,) = batches(random_groups(QWEN3, 2, 2, 9, 8))

    def norm() -> tuple[float, int]:
        one = learner(QWEN3, make_objective(AlgorithmSection()))
        state = one.init(parameters)
        total, _ = one.accumulate(None, state, batch)
        _, applied = one.apply(state, total)
        return float(applied.grad_norm), num_compiled(one.programs["accumulate"])

    first = norm()
    assert norm() == first == (first[0], 1)

    def doubled(*arguments, **settings):
        token_loss, low, high = clipped(*arguments, **settings)
        return 2 * token_loss, low, high

    monkeypatch.setattr("shoal.algorithm.loss.clipped", doubled)
    assert norm()[0] == pytest.approx(2 * first[0], rel=1e-6)


def test_log_probs_are_one_program_whatever_the_type_of_gradients():
    model = Model(QWEN3, roles().trainer, jnp.bfloat16)
    objective = make_objective(AlgorithmSection())
    one, other = (
        Learner(model, objective, OptimizerSection(reduce_dtype=name), 10).programs
        for name in ("float32", "bfloat16")
    )
    assert one["accumulate"] is not other["accumulate"] and one["score"] is other["score"]


@pytest.mark.slow
def test_no_buffer_of_all_tokens_by_vocabulary_in_the_update():
    """V = 1009, 16 tokens a chunk: the compiled update holds logits of a chunk and none of all
    tokens; without chunks it holds them, so the search can find one."""
    a = replace(QWEN3, num_layers=1, vocab_size=1009, tie_embeddings=False)
    groups = random_groups(a, 2, 6, 16, 64)
    (batch,) = batches(groups)

    def largest(chunk_elements: int) -> int:
        objective = replace(ON_POLICY, chunk_elements=chunk_elements)
        model = Model(a, roles().trainer)
        step = jax.jit(jax.value_and_grad(lambda p, b: batch_loss(model, objective, p, b)[0]))
        text = step.lower(random_parameters(a), batch).compile().as_text()
        sizes = []
        for dims in re.findall(r"f32\[([\d,]+)\]", text):
            if "1009" in dims.split(","):
                sizes.append(int(np.prod([int(n) for n in dims.split(",")])))
        return max(sizes)

    assert batch.tokens.size > 200
    assert largest(16 * 1009) <= max(16 * 1009, 32 * 1009)  # a chunk, or the unembedding itself
    assert largest(2**25) >= batch.tokens.size * 1009


@pytest.mark.slow
def test_recomputing_blocks_changes_no_gradient():
    a, groups = QWEN3, random_groups(QWEN3, 2, 2, 9, 8)
    (batch,) = batches(groups)
    parameters = random_parameters(a)

    kept, *others = (
        gradient(a, parameters, batch, remat=remat)[1]
        for remat in ("none", "dots", "attention", "full", "offload")
    )
    for recomputed in others:
        for x, y in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
            assert relative(x, y) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_norms_gradient_is_the_exact_sum_and_in_float32_a_product(dtype):
    """XLA's sums over rows on CPU take eight times as long; in bfloat16 products would round."""
    x = np.random.default_rng(0).normal(size=(64, 8, 16))

    def loss(weight: jax.Array) -> jax.Array:
        return (
            (broadcast(weight, jnp.asarray(x, dtype)) * jnp.asarray(x, dtype))
            .astype(jnp.float32)
            .sum()
        )

    gradient = jax.grad(loss)(jnp.ones(16, jnp.float32))
    assert gradient.dtype == jnp.float32
    exact = np.asarray(jnp.asarray(x, dtype), np.float64).sum((0, 1))
    np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=1e-5)
    assert ("dot_general" in str(jax.make_jaxpr(jax.grad(loss))(jnp.ones(16)))) == (
        dtype == jnp.float32
    )


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [1, 4])
def test_an_update_as_tpus_compute_it_has_the_same_numbers(monkeypatch, fsdp):
    """Products, rotations and the head in their forms for TPUs, here on CPUs, with several slices
    of the vocabulary."""
    a = replace(QWEN3, vocab_size=300)
    (batch,) = batches(random_groups(a, 8, 2, 9, 12), shards=4)
    objective = replace(ON_POLICY, chunk_elements=batch.tokens.shape[1] * 4 // fsdp * 128)
    found = []
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(Role, "platform", platform)
        where = roles(fsdp=fsdp)
        # Named, as kernels would be chosen; other settings, else the programs of the first would be
        # found again.
        attention = "reference" if platform == "tpu" else "auto"
        one = Learner(
            Model(a, where.trainer, attention=attention), objective, OptimizerSection(), 10
        )
        parameters = jax.device_put(random_parameters(a), shardings(a, where.trainer))
        total, lp = one.accumulate(None, TrainState(parameters, None, None), batch)
        found.append((lp, *jax.tree.leaves(total.gradient)))
    for plain, other in zip(*found, strict=True):
        assert relative(other, plain) < 3e-6
