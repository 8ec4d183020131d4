"""The mathematics: numbers worked by hand, masks, signatures. (`test_proof.py` holds all of it
against an oracle.)"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle_advantage
import pytest
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError, jaxtyped
from proof_data import loss_by_name

from shoal.algorithm.advantage import grpo as grpo_advantage
from shoal.algorithm.advantage import nonzero_std
from shoal.algorithm.aggregation import token_weights
from shoal.algorithm.logprobs import chunk_size, sliced_logprobs, token_logprobs
from shoal.algorithm.loss import correction_weights, k3, policy_loss, segment_mean, token_kl
from shoal.config.choices import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.model.head import head_slices

CLIPPED = ["grpo", "gspo", "gspo-token"]
CLIPS = [(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4)]


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# ---- advantages


def advantages(rewards: Any, valid: Any = None, ddof: int = 1, eps: float = 0.0) -> np.ndarray:
    rewards = np.atleast_2d(np.array(rewards, dtype=np.float64))
    valid = np.ones(rewards.shape, bool) if valid is None else np.atleast_2d(valid)
    return grpo_advantage(rewards, valid, std_ddof=ddof, std_eps=eps)


def test_advantages_worked_by_hand() -> None:
    # (0, 1): mean 1/2, squares 1/4 + 1/4; std sqrt(1/2) with ddof 1, 1/2 with ddof 0.
    np.testing.assert_allclose(advantages([0, 1], ddof=1), [[-(0.5**0.5), 0.5**0.5]], rtol=1e-15)
    np.testing.assert_allclose(advantages([0, 1], ddof=0), [[-1, 1]], rtol=1e-15)
    # (1, 2, 3): mean 2, std sqrt(2 / 2) = 1; eps 1 doubles the divisor.
    np.testing.assert_allclose(advantages([1, 2, 3]), [[-1, 0, 1]], rtol=1e-15)
    np.testing.assert_allclose(advantages([1, 2, 3], eps=1.0), [[-0.5, 0, 0.5]], rtol=1e-15)
    assert advantages([0, 1]).dtype == np.float64


@pytest.mark.parametrize("nothing", [np.nan, np.inf, -np.inf, 1e300])
def test_an_invalid_sibling_leaves_mean_and_std(nothing: float) -> None:
    # What is left is (0, 1), as above; an invalid reward taken for 0 would give mean 1/3.
    got = advantages(
        [[0, nothing, 1], [nothing, 5, nothing]],
        [[True, False, True], [False, True, False]],
        ddof=0,
    )
    np.testing.assert_array_equal(got, [[-1, 0, 1], [0, 0, 0]])


def test_a_group_without_variance_has_advantage_exactly_0() -> None:
    rewards = np.array([[0.1] * 3, [0.1, 0.1, 0.7], [np.nan] * 3, [0.3, 0.9, np.nan]])
    valid = np.array([[True] * 3, [True, True, False], [False] * 3, [True, True, False]])
    assert (np.mean([0.1] * 3) - 0.1) != 0  # so it does not come about by itself
    got = advantages(rewards, valid)
    assert (got[:3] == 0).all() and (got[3, :2] != 0).all()
    np.testing.assert_array_equal(nonzero_std(rewards, valid), [False, False, False, True])


def test_a_nan_reward_at_a_valid_place_is_not_hidden() -> None:
    assert np.isnan(advantages([[0, np.nan], [0, 1]])[0]).all()
    assert np.isfinite(advantages([[0, np.nan], [0, 1]])[1]).all()
    # alone it has nothing to be compared with
    assert (advantages([0, np.nan], [False, True]) == 0).all()


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=8), st.sampled_from([0, 1]), st.data())
@settings(max_examples=60, deadline=None)
def test_advantages_of_any_group(rewards: list[int], ddof: int, data: st.DataObject) -> None:
    values = np.array([r / 8 for r in rewards])
    got = advantages(values, ddof=ddof, eps=1e-4)[0]
    if len(set(rewards)) == 1:
        assert (got == 0).all()
    else:
        want = oracle_advantage.advantages("grpo", [list(values)], ddof, 1e-4)[0]
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
        assert nonzero_std(values[None], np.ones((1, len(values)), bool)).all()
    order = data.draw(st.permutations(range(len(rewards))))
    np.testing.assert_allclose(
        advantages(values[order], ddof=ddof, eps=1e-4)[0], got[order], rtol=1e-12, atol=1e-14
    )
    padded = advantages([*values, np.nan], [[True] * len(values) + [False]], ddof, 1e-4)[0]
    np.testing.assert_allclose(padded, [*got, 0.0], rtol=1e-12, atol=1e-14)


# ---- policy losses: one slot, by hand


def slot(*rows: Sequence[float]) -> list[jax.Array]:
    result = []
    for row in rows:
        result.append(jnp.asarray(np.array(row, dtype=np.float32)[None, None]))
    return result


def in_slot(
    name: str,
    ratio: Any,
    advantage: Any,
    segment: Any = None,
    mask: Any = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Any:
    """Token losses, their own gradients and metrics, for tokens of one slot with given ratios."""
    old_logprobs, policy_log_ratio, advantage = slot([-1.5] * len(ratio), np.log(ratio), advantage)
    segment = jnp.asarray(np.array(segment or [1] * len(ratio))[None, None])
    mask = jnp.asarray(np.array(mask or [True] * len(ratio))[None, None])
    call = partial(
        loss_by_name,
        name,
        old_logprobs=old_logprobs,
        advantage=advantage,
        mask=mask,
        segment=segment,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    loss, metrics = jax.jit(call)(old_logprobs + policy_log_ratio)
    gradient = jax.jit(jax.grad(lambda lp: call(lp)[0].sum()))(old_logprobs + policy_log_ratio)
    return loss[0, 0], gradient[0, 0], {k: (float(a), float(b)) for k, (a, b) in metrics.items()}


def test_grpo_loss_worked_by_hand() -> None:
    loss, gradient, metrics = in_slot("grpo", [1.5, 1.5, 0.5, 0.5, 1.0], [2, -2, 2, -2, 2])
    # -min(3, 2.4)   -min(-3, -2.4)   -min(1, 1.6)   -min(-1, -1.6)   -min(2, 2)
    np.testing.assert_allclose(loss, [-2.4, 3.0, -1.0, 1.6, -2.0], rtol=1e-6)
    # clipped: 0     -ratio A = 3     -ratio A = -1  clipped: 0       -A
    np.testing.assert_allclose(gradient, [0.0, 3.0, -1.0, 0.0, -2.0], rtol=1e-6)
    # Ratios of 4 of 5 tokens are outside [0.8, 1.2]; only for 2 of them is the clipped term the
    # active one.
    assert metrics["clip/fraction"] == (2, 5)
    assert metrics["clip/low"] == (1, 5) and metrics["clip/high"] == (1, 5)
    assert metrics["ratio/mean"] == (pytest.approx(1.5 + 1.5 + 0.5 + 0.5 + 1.0), 5)


def test_grpo_clips_high_and_low_apart() -> None:
    loss, _, metrics = in_slot("grpo", [1.25, 1.25, 0.75], [1, 1, -1], clip_low=0.1, clip_high=0.3)
    # 1.25 < 1.3 is free, 0.75 < 0.9 is not
    np.testing.assert_allclose(loss, [-1.25, -1.25, 0.9], rtol=1e-6)
    assert metrics["clip/fraction"] == metrics["clip/low"] == (1, 3)


def test_gspo_token_loss_worked_by_hand() -> None:
    # Segment 1: ratios 2 and 8, s = sqrt(16) = 4. Segment 2: 1/4 and 1, s = 1/2; its third token
    # was not drawn.
    given_ = {
        "ratio": [2, 8, 0.25, 1, 100],
        "advantage": [1, 1, 2, 2, 2],
        "segment": [1, 1, 2, 2, 2],
        "mask": [True, True, True, True, False],
    }
    loss, gradient, metrics = in_slot("gspo-token", **given_, clip_low=0.6, clip_high=5.0)
    np.testing.assert_allclose(loss, [-4, -4, -1, -1, 0], rtol=1e-6)
    # by token s A: not the mean's s A / 2
    np.testing.assert_allclose(gradient, [-4, -4, -1, -1, 0], rtol=1e-6)
    assert metrics["clip/fraction"] == (0, 4) and metrics["ratio/mean"] == (
        pytest.approx(4 + 4 + 0.5 + 0.5),
        4,
    )
    loss, gradient, metrics = in_slot("gspo-token", **given_, clip_low=0.2, clip_high=0.2)
    # A > 0: s = 4 is clipped, s = 1/2 is not
    np.testing.assert_allclose(loss, [-1.2, -1.2, -1, -1, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 0, -1, -1, 0], rtol=1e-6)
    assert metrics["clip/high"] == metrics["clip/fraction"] == (2, 4)


@pytest.mark.slow
def test_segment_mean_worked_by_hand() -> None:
    x = jnp.array([[1.0, 3.0, 100.0, 5.0, 7.0, jnp.nan], [2.0, 4.0, 6.0, 8.0, 0.0, 0.0]])
    segment = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 3, 0]])
    mask = jnp.array(
        [[True, True, False, True, True, False], [True, True, True, True, False, False]]
    )
    want = [[2, 2, 2, 6, 6, 0], [3, 3, 7, 7, 0, 0]]
    np.testing.assert_array_equal(segment_mean(x, segment, mask), want)
    # any leading dims
    np.testing.assert_array_equal(segment_mean(x[0], segment[0], mask[0]), want[0])
    # As many segments as tokens: none is lost.
    np.testing.assert_array_equal(segment_mean(x[1], jnp.arange(1, 7), jnp.ones(6, bool)), x[1])


@pytest.mark.parametrize("name", ["grpo", "gspo-token"])
@pytest.mark.parametrize("clip", [*CLIPS, (0.0, 0.0)])
def test_on_policy_value_and_gradient_are_exactly_minus_a(
    name: str, clip: tuple[float, float]
) -> None:
    lp, advantage = slot([-0.3, -2.7, -1.1], [1.7, -0.3, 0.0])
    mask, segment = jnp.ones(lp.shape, bool), jnp.ones(lp.shape, int)

    def loss(lp: jax.Array) -> tuple[jax.Array, Any]:
        tokens, metrics = loss_by_name(
            name,
            lp,
            jax.lax.stop_gradient(lp),
            advantage,
            mask,
            segment,
            clip_low=clip[0],
            clip_high=clip[1],
        )
        return (0.25 * tokens).sum(), (tokens, metrics)

    gradient, (tokens, metrics) = jax.jit(jax.grad(loss, has_aux=True))(lp)
    np.testing.assert_array_equal(tokens, -advantage)
    np.testing.assert_array_equal(gradient, -0.25 * advantage)
    assert metrics["clip/fraction"][0] == 0 and metrics["ratio/mean"] == (3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPPED)
def test_a_clipped_ratio_that_overflows_still_has_gradient_0(name: str) -> None:
    lp, old_logprobs, good, bad = slot([0.0], [-1000.0], [2.0], [-2.0])
    call = partial(
        loss_by_name, name, mask=jnp.ones((1, 1, 1), bool), segment=jnp.ones((1, 1, 1), int)
    )
    assert call(lp, old_logprobs, good)[0].item() == pytest.approx(-2.4)
    assert jax.grad(lambda lp: call(lp, old_logprobs, good)[0].sum())(lp).item() == 0
    assert np.isinf(call(lp, old_logprobs, bad)[0].item())  # where nothing clips, nothing hides it


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_soft_gate_is_shut_where_the_ratio_overflows(sign: float) -> None:
    lp, old_logprobs, advantage = slot([-1.0, -1.0], [-95.0, -1000.0], [sign, sign])
    mask, segment = jnp.ones(lp.shape, bool), jnp.ones(lp.shape, int)

    def loss(lp: jax.Array) -> jax.Array:
        return loss_by_name("sapo", lp, old_logprobs, advantage, mask, segment)[0].sum()

    value, gradient = jax.value_and_grad(loss)(lp)
    assert value == pytest.approx(-8 * sign / (1.0 if sign > 0 else 1.05)) and (gradient == 0).all()


# ---- k3


def test_k3_worked_by_hand() -> None:
    # reference / policy = 1/2: 1/2 + log 2 - 1, slope 1 - 1/2. 2: 2 - log 2 - 1, slope 1 - 2.
    # Equal: 0, slope 0.
    lp = jnp.log(jnp.array([0.5, 0.25, 0.5]))
    ref_logprobs = jnp.log(jnp.array([0.25, 0.5, 0.5]))
    np.testing.assert_allclose(k3(ref_logprobs - lp), [0.19314718, 0.30685282, 0], rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda lp: k3(ref_logprobs - lp).sum())(lp), [0.5, -1, 0], rtol=1e-6
    )


def test_k3_keeps_its_digits_near_0() -> None:
    # x^2 / 2 at x = 1e-3, next term x^3 / 6; exp(x) - x - 1 in float32 is off by several per cent.
    got = float(k3(jnp.float32(1e-3)))
    assert got == pytest.approx(5.0017e-7, rel=2e-3)


@given(st.floats(-5, 5))
@settings(max_examples=50, deadline=None)
def test_k3_is_not_negative(x: float) -> None:
    assert float(k3(jnp.float32(x))) >= 0


def test_k3_estimates_the_divergence() -> None:
    rng = np.random.default_rng(0)
    policy, reference = rng.dirichlet(np.ones(6), size=2)
    # The exact expectation over what the policy draws, not a sample of it.
    got = policy @ np.asarray(k3(jnp.log(reference) - jnp.log(policy)))
    assert got == pytest.approx(policy @ np.log(policy / reference), rel=1e-5)


# ---- weights


def weights_of(mode: str, *arrays: np.ndarray) -> np.ndarray:
    return token_weights(AGGREGATIONS[mode].load(), *arrays)


@pytest.mark.parametrize(("mode", "counted_all", "counted_first"), [
    # lengths (1, 3) and (2, 2): 8 tokens, 4 completions; of the first group alone 4 tokens, 2
    # completions
    ("token-mean", [[1 / 8, 1 / 8], [1 / 8, 1 / 8]], [[1 / 4, 1 / 4], [0, 0]]),
    ("seq-mean-token-mean", [[1 / 4, 1 / 12], [1 / 8, 1 / 8]], [[1 / 2, 1 / 6], [0, 0]]),
    ("seq-mean-token-sum", [[1 / 4, 1 / 4], [1 / 4, 1 / 4]], [[1 / 2, 1 / 2], [0, 0]]),
])  # fmt: skip
def test_weights_worked_by_hand(mode: str, counted_all: Any, counted_first: Any) -> None:
    lengths, every = np.array([[1, 3], [2, 2]]), np.ones((2, 2), bool)
    first = np.array([[True, True], [False, False]])
    np.testing.assert_allclose(weights_of(mode, lengths, every, every), counted_all, rtol=1e-15)
    np.testing.assert_allclose(weights_of(mode, lengths, every, first), counted_first, rtol=1e-15)
    np.testing.assert_allclose(weights_of(mode, lengths, first, every), counted_first, rtol=1e-15)
    assert (weights_of(mode, lengths, every, ~every) == 0).all()
    assert (weights_of(mode, 0 * lengths, every, every) == 0).all()


def test_an_empty_completion_is_still_a_completion() -> None:
    lengths, every = np.array([[0, 2]]), np.ones((1, 2), bool)
    np.testing.assert_array_equal(weights_of("token-mean", lengths, every, every), [[0, 1 / 2]])
    np.testing.assert_array_equal(
        weights_of("seq-mean-token-mean", lengths, every, every), [[0, 1 / 4]]
    )
    np.testing.assert_array_equal(
        weights_of("seq-mean-token-sum", lengths, every, every), [[0, 1 / 2]]
    )


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans(), st.booleans()), min_size=1, max_size=12)
)
@settings(max_examples=60, deadline=None)
def test_weights_of_a_mean_add_up_to_1(rows: list[tuple[int, bool, bool]]) -> None:
    lengths, valid, counts = (np.array([column]) for column in zip(*rows, strict=True))
    want = 1.0 if (valid & counts).any() else 0.0
    for mode in ("token-mean", "seq-mean-token-mean"):
        weights = weights_of(mode, lengths, valid, counts)
        assert (weights * lengths).sum() == pytest.approx(want, abs=1e-12)
        assert (weights[~(valid & counts)] == 0).all()


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_any_packing_has_the_same_sequence_means(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, drawn = rng.standard_normal(24), rng.random(24) < 0.7
    segment = np.zeros(24, int)
    bounds = [0, *itertools.accumulate(lengths)]
    want = np.zeros(24)
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        segment[a:b] = i + 1
        want[a:b] = x[a:b][drawn[a:b]].mean() if drawn[a:b].any() else 0.0
    drawn &= segment > 0
    np.testing.assert_allclose(
        segment_mean(jnp.asarray(x), jnp.asarray(segment), jnp.asarray(drawn)), want, atol=1e-12
    )


# ---- the registries and their signature


@pytest.mark.slow
def test_annotations_hold() -> None:
    """Each function takes exactly the settings that its row names, and arrays of one shape."""
    checked, a = partial(jaxtyped, typechecker=beartype), AlgorithmSection()
    rewards, valid, lengths = np.array([[0.0, 1.0]]), np.ones((1, 2), bool), np.array([[3, 4]])
    for part in (part for part in ADVANTAGES.values() if part.function):
        checked(part.load())(rewards, valid, **part.settings(a))
        with pytest.raises(TypeCheckError):
            checked(part.load())(rewards, valid[:, :1], **part.settings(a))
    for part in AGGREGATIONS.values():
        checked(token_weights)(part.load(), lengths, valid, valid, 10)
        checked(part.load())(lengths, valid, 10)
    x, mask, segment = jnp.zeros((2, 4)), jnp.ones((2, 4), bool), jnp.ones((2, 4), int)
    for part in POLICY_LOSSES.values():
        checked(policy_loss)(part.load(), x, x, x, mask, segment, **part.settings(a))
        checked(part.load())(x, x, x, mask, segment, **part.settings(a))
        with pytest.raises(TypeCheckError):
            checked(part.load())(x, x, x[:, :1], mask, segment, **part.settings(a))
    checked(segment_mean)(x, segment, mask)
    checked(token_kl)(k3, x, x, mask)
    for part in KL_ESTIMATORS.values():
        checked(part.load())(x)
    for name in CORRECTIONS.keys() - {"none", "auto", "direct"}:
        checked(correction_weights)(
            CORRECTIONS[name].load(), "sequence", x, x, mask, segment, 2.0, 0.5
        )


def test_chunks_of_tokens_are_equal():
    """4,352 tokens of which 2,093 fit: three chunks of those would be a third padding."""
    assert chunk_size(1, 4352, 128256, 2**28) == 1451
    assert chunk_size(2, 100, 10, 10**6) == 100 and chunk_size(2, 100, 10**6, 1) == 8


@pytest.mark.slow
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_slices_of_the_vocabulary_give_what_chunks_of_tokens_give(entropy_gradient: bool) -> None:
    """In float32, with positions whose sampler chose from a few tokens, and a last slice that is
    partly filled up. And so do chunks in the form for GPUs."""
    rng = np.random.default_rng(0)
    hidden, head = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 12, 8), (8, 300))
    )
    targets = jnp.asarray(rng.integers(0, 300, (2, 12)))
    support = np.full((2, 12, 5), -1, np.int32)
    support[:, ::2, 0], support[:, ::2, 1:4] = targets[:, ::2], rng.integers(0, 300, (2, 6, 3))
    weights = jnp.asarray(rng.standard_normal((2, 2, 12)), jnp.float32)

    def by_chunks(hidden: jax.Array, head: jax.Array, dense: bool = False) -> Any:
        return token_logprobs(
            hidden,
            targets,
            jnp.float32(0.7),
            lambda x: x @ head,
            5,
            support,
            entropy_gradient,
            dense,
        )[:2]

    def by_slices(hidden: jax.Array, head: jax.Array) -> Any:
        return sliced_logprobs(
            hidden,
            targets,
            jnp.float32(0.7),
            lambda one, x: x @ one,
            head_slices(head, 150),
            300,
            support,
            entropy_gradient,
        )

    def loss(function: Any, *inputs: jax.Array) -> jax.Array:
        return (jnp.stack(function(*inputs)) * weights).sum()

    assert head_slices(head, 150).shape == (2, 8, 256)
    others = by_slices, partial(by_chunks, dense=True)
    for one, other in zip(
        (x for function in others for x in function(hidden, head)),
        2 * by_chunks(hidden, head),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)
    *gradients, right = (
        jax.grad(partial(loss, function), (0, 1))(hidden, head) for function in (*others, by_chunks)
    )
    for one, other in zip((x for pair in gradients for x in pair), 2 * right, strict=True):
        assert np.abs(one - other).max() < 2e-6 * np.abs(other).max()
