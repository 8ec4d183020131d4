"""What a critic computes: advantages of time steps worked by hand, in float64 once more, and as
verl computed them; games that are enumerated; the loss of its values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_credit import Play, exact_gradient, plays_of

from shoal.algorithm.advantage import gae, length_adaptive_lambda, whitened
from shoal.algorithm.value_loss import ValueObjective, value_losses, value_metric_shapes

VERL = json.loads((Path(__file__).parent / "verl_critic.json").read_text(encoding="utf-8"))
"""What `benchmarks/verl_critic.py` recorded."""

# ---- advantages


def test_advantages_worked_by_hand():
    rewards = np.array([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]])
    values = np.array([[0.5, 0.25, 0.75], [1.0, 0.0, 0.0]])
    # The return from each step on, minus its value.
    np.testing.assert_array_equal(gae(rewards, values, 1.0, 1.0), [[0.5, 0.75, 0.25], [1, 0, 0]])
    # r + V' - V
    np.testing.assert_array_equal(gae(rewards, values, 1.0, 0.0), [[-0.25, 0.5, 0.25], [1, 0, 0]])
    # 0.25; 0.5 + 0.25 / 2; -0.25 + 0.625 / 2
    halves = gae(rewards, values, 1.0, 0.5)
    np.testing.assert_array_equal(halves, [[0.0625, 0.625, 0.25], [1, 0, 0]])
    # d = 1/2: deltas 0 + 0.125 - 0.5, 0 + 0.375 - 0.25, 0.25; then -0.375 + (0.125 + 0.25 / 2) / 2
    discounted = gae(rewards, values, 0.5, 1.0)
    np.testing.assert_array_equal(discounted, [[-0.25, 0.25, 0.25], [1, 0, 0]])
    # Each completion by a lambda of its own.
    both = gae(rewards, values, 1.0, np.array([0.5, 1.0]))
    np.testing.assert_array_equal(both, [[0.0625, 0.625, 0.25], [1, 0, 0]])


@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_sums_of_deltas(seed: int):
    """By the definition: a sum over all later deltas, of each step by itself."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(3, 7))
    values = rng.normal(size=(3, 7))
    for row, length in enumerate((7, 4, 1)):
        rewards[row, length:] = values[row, length:] = 0
    discount, lam = rng.random(2)
    want = np.zeros(rewards.shape)
    for row, length in enumerate((7, 4, 1)):
        deltas = []
        for step in range(length):
            next_value = values[row, step + 1] if step + 1 < length else 0.0
            deltas.append(rewards[row, step] + discount * next_value - values[row, step])
        for step in range(length):
            terms = [(discount * lam) ** n * delta for n, delta in enumerate(deltas[step:])]
            want[row, step] = sum(terms)
    np.testing.assert_allclose(gae(rewards, values, discount, lam), want, atol=1e-13)


def test_lambda_by_length():
    got = length_adaptive_lambda(np.array([1, 10, 20, 40, 2000]), 0.05)
    np.testing.assert_allclose(got, [0, 0, 0, 0.5, 0.99], atol=1e-15)


def compact(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The values where the mask is True, moved to the left in each row; 0 behind."""
    out = np.zeros(values.shape)
    for row in range(len(values)):
        own = values[row][mask[row]]
        out[row, : len(own)] = own
    return out


@pytest.mark.parametrize("number", range(len(VERL["estimates"])))
def test_advantages_and_returns_are_verls(number: int):
    estimate = VERL["estimates"][number]
    mask = np.array(VERL["mask"])
    values = compact(np.array(VERL["values"]), mask)
    rewards = compact(np.array(VERL["rewards"]), mask)
    advantages = gae(rewards, values, estimate["gamma"], estimate["lam"])
    lengths = np.zeros(mask.shape, int)
    for row, length in enumerate(mask.sum(axis=1)):
        lengths[row, :length] = 1
    returns = np.where(lengths, advantages + values, 0)
    np.testing.assert_allclose(returns, compact(np.array(estimate["returns"]), mask), atol=1e-12)
    # verl adds 1e-8 to variance and number.
    got = whitened(advantages, lengths)
    np.testing.assert_allclose(got, compact(np.array(estimate["advantages"]), mask), atol=1e-6)


def test_whitened_steps_count_once_for_each_of_their_tokens():
    advantages = np.array([[1.0, 4.0], [2.0, 0.0]])
    lengths = np.array([[2, 1], [3, 0]])
    tokens = np.array([1.0, 1.0, 4.0, 2.0, 2.0, 2.0])
    size = tokens.std(ddof=1)
    want = (advantages - tokens.mean()) / size
    want[1, 1] = 0
    np.testing.assert_allclose(whitened(advantages, lengths), want, rtol=1e-14)
    assert not whitened(np.full((2, 2), 0.1), lengths).any()


# ---- games


def values_of(plays: list[Play]) -> np.ndarray:
    """The value of each state of the game by its own policy: the mean return over all plays that
    reach it. [states]"""
    size = plays[0].scores.shape[1]
    total, reached = np.zeros(size), np.zeros(size)
    for play in plays:
        for k in range(len(play.rewards)):
            state = int(np.flatnonzero(play.scores[k])[0])
            total[state] += play.probability * play.rewards[k:].sum()
            reached[state] += play.probability
    # States behind the end of the game are reached by none.
    return total / np.where(reached > 0, reached, 1)


def mean_by_critic(plays: list[Play], values: np.ndarray, lam: float) -> np.ndarray:
    """The mean gradient over all plays by their probability, of groups of one: with a value for
    each state of the game."""
    rewards, said = np.zeros((len(plays), 3)), np.zeros((len(plays), 3))
    for number, play in enumerate(plays):
        steps = len(play.rewards)
        rewards[number, :steps] = play.rewards
        said[number, :steps] = [values[np.flatnonzero(score)[0]] for score in play.scores]
    advantages = gae(rewards, said, 1.0, lam)
    total = np.zeros(plays[0].scores.shape[1])
    for play, own in zip(plays, advantages, strict=True):
        total += play.probability * own[: len(play.rewards)] @ play.scores
    return total


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_is_the_gradient_of_a_game_that_may_stop(seed: int):
    plays = plays_of(np.random.default_rng(seed))
    exact = exact_gradient(plays)
    perfect = values_of(plays)
    wrong = perfect + np.random.default_rng(9).normal(size=len(perfect))
    for lam in (0.0, 0.5, 1.0):  # with a perfect critic whatever lambda is
        np.testing.assert_allclose(mean_by_critic(plays, perfect, lam), exact, atol=1e-6)
    # With a lambda of 1 whatever the critic says; below 1 its errors go into the gradient.
    np.testing.assert_allclose(mean_by_critic(plays, wrong, 1.0), exact, atol=1e-6)
    assert np.abs(mean_by_critic(plays, wrong, 0.5) - exact).max() > 1e-3


def test_a_perfect_critic_lowers_the_variance():
    plays = plays_of(np.random.default_rng(0))
    perfect = values_of(plays)

    def variance(values: np.ndarray) -> float:
        exact = exact_gradient(plays)
        total = 0.0
        for play in plays:
            own = mean_by_critic([Play(1.0, play.scores, play.rewards)], values, 1.0)
            total += play.probability * ((own - exact) ** 2).sum()
        return total

    assert variance(perfect) < 0.5 * variance(np.zeros(len(perfect)))


# ---- the loss of values


def loss_of(o: ValueObjective, **arrays: Any) -> tuple[float, np.ndarray, dict]:
    """(loss, its gradient by the values, metrics)"""
    values = arrays.pop("values")

    def total(values: jax.Array) -> Any:
        losses, sums = value_losses(o, values, **arrays)
        return (arrays["weight"] * losses).sum(), sums

    (loss, sums), gradient = jax.value_and_grad(total, has_aux=True)(values)
    return float(loss), np.asarray(gradient), sums


def test_the_loss_worked_by_hand():
    arrays = {
        "values": jnp.array([[1.0, 3.0, 0.0, 9.0]]),
        "old_values": jnp.array([[0.8, 1.0, 1.0, 9.0]]),
        "returns": jnp.array([[2.0, 0.0, 5.0, 9.0]]),
        "weight": jnp.array([[0.5, 0.5, 1.0, 0.0]]),
    }
    # Without a bound: 1, 9 and 25 by halves.
    loss, gradient, _ = loss_of(ValueObjective(), **arrays)
    assert loss == pytest.approx((0.5 * 1 + 0.5 * 9 + 25) / 2)
    np.testing.assert_allclose(gradient, [[0.5 * -1, 0.5 * 3, -5, 0]])
    # Within 0.5 of 1 the second would be 1.5, nearer its return than 3: not taken. The third moved
    # away from its return, which is worse than having moved by 0.5 at most: not taken either.
    loss, gradient, sums = loss_of(ValueObjective(clip=0.5), **arrays)
    assert loss == pytest.approx((0.5 * 1 + 0.5 * 9 + 25) / 2)
    assert float(sums["critic/vf_clipfrac"][0]) == 0
    assert [float(x) for x in sums["critic/vpred_mean"]] == [4, 3]
    # Moved towards its return by more than the bound: held where the bound is, without a gradient.
    arrays["values"] = jnp.array([[1.0, 0.0, 4.0, 9.0]])
    loss, gradient, sums = loss_of(ValueObjective(clip=0.5), **arrays)
    assert loss == pytest.approx((0.5 * 1 + 0.5 * 0.5**2 + 3.5**2) / 2)
    np.testing.assert_allclose(gradient, [[-0.5, 0, 0, 0]])
    assert [float(x) for x in sums["critic/vf_clipfrac"]] == [2, 3]


def test_what_is_no_step_has_no_part_whatever_it_holds():
    step, none = jnp.array([[2.0, 0.0]]), jnp.array([[jnp.inf, jnp.nan]])
    for garbage in (none[:, ::-1], none):
        values = jnp.where(jnp.array([[True, False]]), step, garbage)
        loss, gradient, _ = loss_of(
            ValueObjective(clip=0.2),
            values=values,
            old_values=values,
            returns=jnp.where(jnp.array([[True, False]]), 1.0, garbage),
            weight=jnp.array([[1.0, 0.0]]),
        )
        assert loss == 0.5
        np.testing.assert_array_equal(gradient, [[1, 0]])


@pytest.mark.parametrize("number", range(len(VERL["losses"])))
def test_the_loss_is_verls(number: int):
    record = VERL["losses"][number]
    mask = np.array(VERL["mask"])
    with jax.enable_x64(True):
        loss, gradient, sums = loss_of(
            ValueObjective(clip=record["clip"]),
            values=jnp.array(VERL["predicted"]),
            old_values=jnp.array(VERL["values"]),
            returns=jnp.array(VERL["estimates"][1]["returns"]),
            weight=jnp.array(mask / mask.sum()),
        )
        clipped, count = sums["critic/vf_clipfrac"]
        assert float(clipped) / float(count) == pytest.approx(record["clipped"], abs=1e-7)
    assert loss == pytest.approx(record["loss"], abs=1e-12)
    np.testing.assert_allclose(gradient, record["gradient"], atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_value(seed: int):
    """In float64 from the definition: min and max written out, an imaginary step."""
    rng = np.random.default_rng(seed)
    old, returns = rng.normal(size=(2, 8))
    values = old + rng.normal(size=8)
    weight = np.where(np.arange(8) == 3, 0.0, rng.random(8))

    def total(moving: np.ndarray) -> complex:
        result = 0.0
        for value, before, target, w in zip(moving, old, returns, weight, strict=True):
            low, high = before - 0.4, before + 0.4
            held = low if value.real < low else high if value.real > high else value
            far, near = (value - target) ** 2, (held - target) ** 2
            result = result + w * (near if near.real > far.real else far) / 2
        return result

    with jax.enable_x64(True):
        loss, gradient, _ = loss_of(
            ValueObjective(clip=0.4),
            values=jnp.array(values[None]),
            old_values=jnp.array(old[None]),
            returns=jnp.array(returns[None]),
            weight=jnp.array(weight[None]),
        )
    assert loss == pytest.approx(total(values.astype(complex)).real, rel=1e-12)
    np.testing.assert_allclose(gradient[0], oracle.derivative(total, values), atol=1e-12)


def test_shapes_of_metrics():
    assert sorted(value_metric_shapes(ValueObjective(0.2))) == [
        "critic/vf_clipfrac",
        "critic/vpred_mean",
    ]
