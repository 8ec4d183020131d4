"""Fewer bits: float16 with a loss scale that adapts, and moments in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    ON_POLICY,
    QWEN3,
    batches,
    learner,
    random_groups,
    random_parameters,
    relative,
    roles,
)
from test_bfloat16 import largest_gap
from tiny_runs import by_path, same_bits

from shoal.config.sections.optimizer import OptimizerSection
from shoal.model.transformer import Model
from shoal.records import ShoalError
from shoal.trainer.batch import LearnerBatch, Shape
from shoal.trainer.optimizer import (
    FIRST_SCALE,
    GROWTH_INTERVAL,
    LARGEST_SCALE,
    LossScale,
    make_optimizer,
    round_at_random,
)
from shoal.trainer.step import GradientSum, Learner, TrainState
from shoal.weights.checkpoints import Checkpoints, restore


def batch_of(weight: float = 1.0) -> LearnerBatch:
    """One micro-batch, whose loss is multiplied by `weight`."""
    (batch,) = batches(random_groups(QWEN3, 3, 4, 20, 20))
    factor = np.where(batch.weight == 0, 1, np.float32(weight))  # infinity times 0 is no number
    return replace(batch, weight=batch.weight * factor)


def begun(dtype, scale: float = FIRST_SCALE) -> tuple[Learner, TrainState]:
    one = learner(QWEN3, dtype=dtype)
    state = one.init(random_parameters(QWEN3))
    if state.loss_scale:
        state = replace(state, loss_scale=replace(state.loss_scale, value=jnp.float32(scale)))
    return one, state


def scale_of(state: TrainState) -> tuple[float, int]:
    """The loss scale, and the good updates since it changed."""
    assert state.loss_scale is not None
    return float(state.loss_scale.value), int(state.loss_scale.good)


def accumulated(
    dtype, batch: LearnerBatch, scale: float = FIRST_SCALE
) -> tuple[Learner, TrainState, GradientSum]:
    one, state = begun(dtype, scale)
    return one, state, one.accumulate(None, state, batch)[0]


def flat(gradient) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)])


# ---- float16


@pytest.mark.slow
def test_sampler_and_trainer_agree_better_than_in_bfloat16():
    (largest, mean), (_, rough) = largest_gap(jnp.float16), largest_gap(jnp.bfloat16)
    assert largest < 0.0125 and 0 < mean < rough / 4


@pytest.mark.slow
def test_the_scale_keeps_small_gradients_which_float16_alone_loses():
    small = batch_of(1e-6)
    exact = flat(accumulated(jnp.float32, small)[2].gradient)
    scaled, plain = (
        flat(accumulated(jnp.float16, small, scale)[2].gradient) / scale
        for scale in (FIRST_SCALE, 1.0)
    )
    assert relative(scaled, exact) < 0.01 and relative(plain, exact) > 0.1


@pytest.mark.slow
def test_metrics_and_the_update_are_those_of_the_gradient_without_its_scale():
    """Of two micro-batches too: one scale an update, and the norm, by which it is clipped, is
    unscaled."""
    groups = random_groups(QWEN3, 5, 4, 20, 20)
    ends = []
    for dtype in (jnp.float32, jnp.float16):
        one, state = begun(dtype)
        total, parts = None, batches(groups, Shape(2, 96))
        for batch in parts:
            total, lp = one.accumulate(total, state, batch)
            assert lp.dtype == jnp.float32
        assert len(parts) > 1 and total is not None
        loss = float(total.loss)
        after, applied = one.apply(state, total)
        assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {
            np.dtype("float32"),
            np.dtype("int32"),
        }
        ends.append((loss, float(applied.grad_norm), int(applied.skipped), flat(after.optimizer)))
    (loss, norm, _, moments), (half_loss, half_norm, skipped, half_moments) = ends
    assert (
        abs(half_loss - loss) < 0.01 * abs(loss)
        and abs(half_norm - norm) < 0.01 * norm
        and not skipped
    )
    assert relative(half_moments, moments) < 0.01


@pytest.mark.slow
def test_an_overflow_halves_the_scale_and_changes_nothing_else():
    batch = batch_of(3e4)  # at 2^16 the gradient overflows, a few halvings later it does not
    one, state = begun(jnp.float16)
    overflows = 0
    while True:
        before = jax.tree.map(np.array, replace(state, loss_scale=None))
        state, applied = one.apply(state, one.accumulate(None, state, batch)[0])
        assert float(applied.loss_scale) == FIRST_SCALE / 2**overflows
        if not int(applied.skipped):
            break
        overflows += 1
        assert int(applied.overflow) == 1 and scale_of(state) == (FIRST_SCALE / 2**overflows, 0)
        assert same_bits(by_path(replace(state, loss_scale=None)), by_path(before))
    assert 2 < overflows < 16 and int(applied.overflow) == 0 and int(state.updates) == 1
    assert scale_of(state) == (FIRST_SCALE / 2**overflows, 1) and np.isfinite(
        float(applied.grad_norm)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight", "scale"), [(np.inf, FIRST_SCALE), (1e12, 1.0)], ids=["loss", "gradient"]
)
def test_what_no_smaller_scale_solves_is_no_overflow(weight, scale):
    one, state, total = accumulated(jnp.float16, batch_of(weight), scale)
    assert np.isfinite(float(total.loss)) == (scale == 1)
    after, applied = one.apply(state, total)
    assert int(applied.skipped) == 1 and int(applied.overflow) == 0 and int(after.updates) == 0
    assert scale_of(after) == (max(1.0, scale / 2), 0)


def test_the_scale_doubles_after_so_many_good_updates_and_has_limits():
    yes, no = jnp.asarray(True), jnp.asarray(False)

    def after(value: float, good: int, finite) -> tuple[float, int]:
        scale = LossScale(jnp.float32(value), jnp.int32(good)).after(finite)
        return float(scale.value), int(scale.good)

    assert after(8, GROWTH_INTERVAL - 2, yes) == (8, GROWTH_INTERVAL - 1)
    assert after(8, GROWTH_INTERVAL - 1, yes) == (16, 0)
    assert after(8, GROWTH_INTERVAL - 1, no) == (4, 0)
    assert after(1, 5, no) == (1, 0) and after(LARGEST_SCALE, GROWTH_INTERVAL - 1, yes) == (
        LARGEST_SCALE,
        0,
    )


@pytest.mark.slow
def test_a_checkpoint_holds_the_scale_and_is_of_float16_alone(tmp_path: Path):
    one, state = begun(jnp.float16)
    for weight in (1e8, 1.0):  # an overflow, then a good update
        state, _ = one.apply(state, one.accumulate(None, state, batch_of(weight))[0])
    other, plain = begun(jnp.bfloat16)
    assert plain.loss_scale is None
    for name, saved in (("half", state), ("plain", plain)):
        checkpoints = Checkpoints(tmp_path / name / "checkpoints", keep_last=1)
        checkpoints.save(2, saved, {})
        checkpoints.close()
    found = restore(tmp_path / "half", 2, QWEN3, one.shapes()).state
    assert same_bits(by_path(found), by_path(state))
    assert scale_of(found) == (FIRST_SCALE / 2, 1)
    assert same_bits(
        by_path(restore(tmp_path / "plain", 2, QWEN3, learner(QWEN3).shapes()).state),
        by_path(plain),
    )
    for name, reader in (("half", other), ("plain", one)):
        with pytest.raises(ShoalError, match=r"model\.dtype, float16 or not"):
            restore(tmp_path / name, 2, QWEN3, reader.shapes())


def test_a_tpu_is_refused():
    role = SimpleNamespace(platform="tpu")
    with pytest.raises(
        ShoalError, match=r"model\.dtype=float16: a TPU has no products of float16; use bfloat16"
    ):
        Model(QWEN3, role, jnp.float16)  # type: ignore[arg-type]


# ---- moments in bfloat16


@pytest.mark.slow
def test_rounding_at_random_gives_one_of_the_two_next_and_the_value_as_the_mean():
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [rng.standard_normal(60) * 10.0 ** rng.uniform(-30, 30, 60), [0.0, 1.0, -3.5, 1.00390625]]
    )
    values = values.astype(np.float32)
    count = 4096
    keys = jax.random.split(jax.random.key(1), count)
    found = np.asarray(jax.vmap(round_at_random, (None, 0))(jnp.asarray(values), keys)).astype(
        np.float64
    )
    low = (values.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    high = ((values.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32).astype(np.float64)
    assert ((found == low) | (found == high)).all()
    exact = low == values
    assert exact.sum() == 3 and (found[:, exact] == values[exact]).all()  # 0, 1 and -3.5
    share, step = (values - low)[~exact] / (high - low)[~exact], (high - low)[~exact]
    error = (found[:, ~exact].mean(0) - values[~exact].astype(np.float64)) / step
    assert np.abs(error / np.sqrt(share * (1 - share) / count)).max() < 5  # standard errors


@pytest.mark.slow
def test_a_moment_that_changes_slowly_is_right_in_the_mean():
    """A second moment without gradient: rounded to the nearest it would never leave 1."""
    section = OptimizerSection(moments="bfloat16", beta2=0.999, clip_grad_norm=0)
    adamw = make_optimizer(section, lambda update: 0.0, None, seed=5)
    still = jnp.zeros(4096)

    @jax.jit
    def after(state, number):
        return adamw.update(still, state, still, number=number)[1]

    state = adamw.init(still)
    state = jax.tree.map(
        lambda leaf: jnp.ones_like(leaf) if leaf.dtype == jnp.bfloat16 else leaf, state
    )
    for number in range(200):
        state = after(state, number)
    first, second = (leaf for leaf in jax.tree.leaves(state) if leaf.shape)
    assert first.dtype == second.dtype == jnp.bfloat16
    assert np.asarray(second, np.float64).mean() == pytest.approx(0.999**200, rel=2e-3)
    assert np.asarray(second).astype(np.float64).std() > 0  # of elements with equal gradients
    assert jnp.bfloat16(0.999 * 1.0) == 1.0


@pytest.mark.slow
def test_the_bits_follow_from_seed_update_and_leaf():
    (batch,) = batches(random_groups(QWEN3, 3, 4, 20, 20))

    def moments(seed: int, updates: int, kind: str = "bfloat16") -> list[np.ndarray]:
        section = OptimizerSection(moments=kind, warmup_steps=0)  # type: ignore[arg-type]
        one = Learner(Model(QWEN3, roles().trainer), ON_POLICY, section, 10, seed)
        state = replace(one.init(random_parameters(QWEN3)), updates=jnp.int32(updates))
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), one.shapes()
        )
        after, _ = one.apply(state, one.accumulate(None, state, batch)[0])
        for leaf in jax.tree.leaves(after.trainable):
            assert leaf.dtype == jnp.float32
        result = []
        for leaf in jax.tree.leaves(after.optimizer):
            if leaf.size > 1:
                result.append(np.asarray(leaf).astype(np.float32))
        return result

    found = moments(1, 4)
    exact = moments(1, 4, "float32")
    for pair in zip(found, exact, strict=True):
        assert 0 < relative(*pair) < 0.01
    assert all((one == other).all() for one, other in zip(found, moments(1, 4), strict=True))
    for other in (moments(2, 4), moments(1, 5)):
        assert not any((one == two).all() for one, two in zip(found, other, strict=True))
    ups = [
        (one > other).ravel()[:64]
        for one, other in zip(found, exact, strict=True)
        if one.size >= 64
    ]
    assert len({up.tobytes() for up in ups}) == len(ups)  # each leaf's own


@pytest.mark.slow
def test_they_do_not_depend_on_how_an_array_is_split():
    role = roles(fsdp=4, tensor=2).trainer
    values = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    split = jax.device_put(values, role.sharding(("embed", "mlp"), values.shape))
    one, other = (jax.jit(round_at_random)(x, jax.random.key(3)) for x in (values, split))
    assert not other.sharding.is_fully_replicated and same_bits({"": one}, {"": other})
