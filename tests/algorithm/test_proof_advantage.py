"""Every advantage: numbers worked by hand, a float64 oracle, and what must hold for any rewards."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracle_advantage
import pytest

from shoal.config.choices import ADVANTAGES
from shoal.config.sections.algorithm import AlgorithmSection

NAMES = sorted(name for name, row in ADVANTAGES.items() if row.function)
"""Without `gae`, which is of time steps: test_gae.py."""
WITHIN = ("grpo", "dr_grpo", "rloo", "maxrl")
"""Forms in which nothing but the group has a part."""
WHITENED = ("reinforce++", "reinforce++-baseline", "gdpo")
"""Forms that whiten over the step's completions, or over their tokens."""


def advantages(
    name: str,
    rewards: Any,
    valid: Any = None,
    ddof: int = 1,
    eps: float = 0.0,
    eps_mode: str = "add",
    parts: Any = None,
    weights: Any = None,
    lengths: Any = None,
) -> np.ndarray:
    rewards = np.array(rewards, np.float64)
    valid = np.ones(rewards.shape, bool) if valid is None else np.array(valid)
    components = None if parts is None else np.array(parts, np.float64)
    a = AlgorithmSection(
        std_ddof=ddof,
        std_eps=eps,
        std_eps_mode=eps_mode,  # type: ignore[arg-type]
        whiten_over="completions" if lengths is None else "tokens",
    )
    return ADVANTAGES[name].load()(
        rewards,
        valid,
        components=components,
        weights=None if weights is None else np.array(weights, np.float64),
        lengths=None if lengths is None else np.array(lengths),
        **ADVANTAGES[name].settings(a),
    )


# Two groups, (0, 2) and (4, 6): means 1 and 5, squares 1 + 1 each; over all: mean 3, squares 9 + 1
# + 1 + 9 = 20.
REWARDS = [[0, 2], [4, 6]]


@pytest.mark.parametrize(
    ("name", "settings", "want"),
    [
        ("grpo", {"ddof": 1}, [[-(0.5**0.5), 0.5**0.5]] * 2),  # std sqrt(2 / 1)
        ("grpo", {"ddof": 0}, [[-1, 1]] * 2),  # std sqrt(2 / 2)
        ("grpo", {"ddof": 0, "eps": 1.0}, [[-0.5, 0.5]] * 2),
        ("grpo", {"ddof": 0, "eps": 4.0, "eps_mode": "max"}, [[-0.25, 0.25]] * 2),  # max(1, 4)
        ("grpo", {"ddof": 0, "eps": 0.5, "eps_mode": "max"}, [[-1, 1]] * 2),  # max(1, 0.5)
        ("dr_grpo", {}, [[-1, 1]] * 2),
        ("rloo", {}, [[-2, 2]] * 2),
        ("batch_std", {"ddof": 0}, [[-(5**-0.5), 5**-0.5]] * 2),  # std sqrt(20 / 4)
        ("batch_std", {"ddof": 1, "eps": 10.0, "eps_mode": "max"}, [[-0.1, 0.1]] * 2),
        ("reinforce++", {"ddof": 0}, [[-3 * 5**-0.5, -(5**-0.5)], [5**-0.5, 3 * 5**-0.5]]),
        ("reinforce++-baseline", {"ddof": 0}, [[-1, 1]] * 2),  # -1, 1, -1, 1: mean 0, std 1
        ("reinforce++-baseline", {"ddof": 0, "eps": 1.0}, [[-0.5, 0.5]] * 2),
        ("maxrl", {}, [[-1, 1], [-0.2, 0.2]]),
        # First function: (-1, 1) and nothing to compare; second, scaled by 10: (-1, 1) and (1, -1).
        # Sums with weights 1 and 1/2: -3/2, 3/2, 1/2, -1/2, of mean 0 and variance (9 + 9 + 1 + 1)
        # / 16 = 5/4.
        (
            "gdpo",
            {"ddof": 0, "parts": [[[0, 1], [0, 0]], [[0, 10], [10, 0]]], "weights": [1, 0.5]},
            np.array([[-1.5, 1.5], [0.5, -0.5]]) / 1.25**0.5,
        ),
        # Lengths 1, 3, 2, 2: mean (0 + 6 + 8 + 12) / 8 = 13/4, squares less the mean's (0 + 12 + 32
        # + 72) / 8 - 169/16.
        (
            "reinforce++",
            {"ddof": 0, "lengths": [[1, 3], [2, 2]]},
            (np.array([[0, 2], [4, 6]]) - 3.25) / (14.5 - 169 / 16) ** 0.5,
        ),
        (
            "reinforce++",
            {"ddof": 1, "eps": 1.0, "lengths": [[1, 3], [2, 2]]},
            (np.array([[0, 2], [4, 6]]) - 3.25) / (((14.5 - 169 / 16) * 8 / 7) ** 0.5 + 1),
        ),
        # Centred -1, 1, -1, 1 with lengths 1, 3, 2, 2: mean (-1 + 3 - 2 + 2) / 8 = 1/4, variance 1
        # - 1/16.
        (
            "reinforce++-baseline",
            {"ddof": 0, "lengths": [[1, 3], [2, 2]]},
            (np.array([[-1, 1], [-1, 1]]) - 0.25) / (15 / 16) ** 0.5,
        ),
        # A completion without a token is not counted, and has no advantage: 2 and 4, twice each.
        ("reinforce++", {"ddof": 0, "lengths": [[0, 2], [2, 0]]}, [[0, -1], [1, 0]]),
        (
            "gdpo",
            {
                "ddof": 0,
                "parts": [[[0, 1], [0, 0]], [[0, 10], [10, 0]]],
                "weights": [1, 0.5],
                "lengths": [[1, 1], [2, 4]],
            },
            # -3/2, 3/2, 1/2 twice, -1/2 four times: mean -1/8, squares (9/4 x 2 + 6/4) / 8 = 3/4.
            (np.array([[-1.5, 1.5], [0.5, -0.5]]) + 0.125) / (0.75 - 1 / 64) ** 0.5,
        ),
        # no form within groups reads lengths
        ("grpo", {"ddof": 0, "lengths": [[1, 3], [2, 2]]}, [[-1, 1]] * 2),
        ("none", {}, [[0, 0]] * 2),
        ("sft", {}, [[1, 1]] * 2),
    ],
)
def test_worked_by_hand(name: str, settings: dict[str, Any], want: Any):
    got = advantages(name, REWARDS, **settings)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-14)


def test_maxrl_is_for_rewards_of_0_or_more():
    np.testing.assert_array_equal(advantages("maxrl", [[-1, 1], [-3, 1], [0, 0]]), np.zeros((3, 2)))
    # A mean of nearly 0, or above it, with a reward below 0: no quotient of any size.
    np.testing.assert_array_equal(
        advantages("maxrl", [[0.1, 0.2, -0.3], [-1, 9, 9]]), np.zeros((2, 3))
    )
    # What an invalid sibling holds has no part.
    np.testing.assert_allclose(
        advantages("maxrl", [[-5, 1, 3]], [[False, True, True]]), [[0, -0.5, 0.5]]
    )
    many = advantages("maxrl", np.random.default_rng(0).exponential(size=(50, 4)) ** 9)
    assert many.max() > 2.9 and np.abs(many).max() <= 3
    # One success among four: mean 1/4, so 3 for it and -1 for the rest.
    np.testing.assert_allclose(advantages("maxrl", [[1, 0, 0, 0]]), [[3, -1, -1, -1]])


def lists(values: np.ndarray, there: np.ndarray) -> list[list[float | None]]:
    result = []
    for a, b in zip(values, there, strict=True):
        result.append([float(v) if t else None for v, t in zip(a, b, strict=True)])
    return result


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("eps", "eps_mode"), [(1e-4, "add"), (1e-6, "add"), (0.3, "max"), (0.0, "add")]
)
def test_against_the_oracle(name: str, eps: float, eps_mode: str):
    """Continuous, binary and constant rewards; siblings missing, alone, all missing; parts that
    could not judge."""
    rng = np.random.default_rng(5)
    for ddof, draw in itertools.product((0, 1), range(8)):
        if draw % 2:
            parts = 4 + rng.standard_normal((3, 4, 5))
        else:
            parts = rng.integers(0, 2, (3, 4, 5)).astype(float)
        if draw > 5:
            parts[:, 0] -= 4 if draw == 6 else 0.5  # rewards below 0 too
        parts[:, 1] = 1.0  # a group without variance
        weights = [1.0, 0.25, 2.0]
        rewards = np.tensordot(weights, parts, 1)
        valid = rng.random((4, 5)) < (0.7 if draw > 1 else 2)
        valid[3] = [[True] * 5, [True, *[False] * 4], [False] * 5][draw % 3]
        judged = valid & (rng.random((3, 4, 5)) < (0.8 if draw > 3 else 2))
        garbage = np.where(valid, rewards, [np.nan, np.inf, 1e300][draw % 3])
        lengths = rng.integers(0, 7, (4, 5)) if name in WHITENED and draw % 4 > 1 else None
        got = advantages(
            name,
            garbage,
            valid,
            ddof,
            eps,
            eps_mode,
            np.where(judged, parts, np.nan),
            weights,
            lengths,
        )
        listed = []
        for part, there in zip(parts, judged, strict=True):
            listed.append(lists(part, there))
        tokens = None if lengths is None else lengths.tolist()
        want = oracle_advantage.advantages(
            name, lists(rewards, valid), ddof, eps, eps_mode, listed, weights, tokens
        )
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
        assert (got[~valid] == 0).all()
        if name != "none" and valid[0].sum() > 1 and draw % 2 and draw < 6 and lengths is None:
            assert (got[0][valid[0]] != 0).all()


@pytest.mark.parametrize("name", sorted({*NAMES} - {"sft"}))
def test_constant_rewards_give_exactly_0(name: str):
    """Exactly: 0.1 x 3 has a mean that is not 0.1. Over the batch for the forms that look beyond
    the group."""
    for value in (0.1, 1.0, 0.0, -0.7):
        rewards = np.full((4, 3), value)
        assert (
            advantages(name, rewards, parts=[rewards, rewards / 3], weights=[0.3, 0.1]) == 0
        ).all()
    mixed = np.array([[0.1] * 3, [0.0, 1.0, 0.5]])
    if name in (*WITHIN, "batch_std"):
        got = advantages(name, mixed)
        assert (got[0] == 0).all() and (got[1] != 0).any()


@pytest.mark.parametrize("name", NAMES)
def test_order_missing_siblings_and_other_groups(name: str):
    rng = np.random.default_rng(8)
    rewards = rng.standard_normal((3, 4)) + 2
    parts, settings = np.stack([rewards, rewards**2]), {"eps": 1e-4, "weights": [1.0, 0.5]}
    first = advantages(name, rewards, parts=parts, **settings)
    order = [2, 0, 3, 1]
    moved = advantages(name, rewards[:, order], parts=parts[:, :, order], **settings)
    np.testing.assert_allclose(moved, first[:, order], rtol=1e-12)
    swapped = advantages(name, rewards[::-1], parts=parts[:, ::-1], **settings)
    np.testing.assert_allclose(swapped, first[::-1], rtol=1e-12)
    wider = np.pad(rewards, ((0, 1), (0, 1)), constant_values=np.nan)
    wide = advantages(
        name, wider, ~np.isnan(wider), parts=np.pad(parts, ((0, 0), (0, 1), (0, 1))), **settings
    )
    np.testing.assert_allclose(wide[:3, :4], first, rtol=1e-12)
    other = rewards.copy()
    other[2] *= 5
    changed = advantages(name, other, parts=np.stack([other, other**2]), **settings)
    assert np.allclose(changed[:2], first[:2], rtol=1e-12) == (name in (*WITHIN, "none", "sft"))
    if name not in ("maxrl", "gdpo"):  # a constant added to all rewards is no information
        np.testing.assert_allclose(
            advantages(name, rewards + 7, **settings), first, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("none", "sft", "gdpo")])
def test_a_nan_reward_at_a_valid_place_is_not_hidden(name: str):
    """(gdpo takes a NaN for a function that could not judge.)"""
    got = advantages(name, [[0.0, np.nan], [0.0, 1.0]])
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all() == (name in WITHIN)
