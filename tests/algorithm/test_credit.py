"""Credit by turn: numbers worked by hand, and games that are enumerated, in which the mean of the
estimator over all groups is compared with the exact policy gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from shoal.algorithm.advantage import by_state, by_turn, grpo, returns_to_go, rloo

# ---- worked by hand


def test_returns_to_go():
    rewards = np.array([[[1.0, 2.0, 4.0], [8.0, 0.0, 0.0]]])
    np.testing.assert_array_equal(returns_to_go(rewards, 1.0), [[[7, 6, 4], [8, 0, 0]]])
    # 1 + (2 + 4 / 2) / 2
    np.testing.assert_array_equal(returns_to_go(rewards, 0.5), [[[3, 4, 4], [8, 0, 0]]])
    np.testing.assert_array_equal(returns_to_go(rewards, 0.0), rewards)


RETURNS = np.array([[[6.0, 4.0, 1.0], [3.0, 2.0, 0.0], [0.0, 0.0, 0.0]]])
TURNS = np.array([[[True, True, True], [True, True, False], [True, False, False]]])


def test_each_turn_is_compared_with_the_others_that_have_it():
    # Turn 1: 6 - (3 + 0) / 2, 3 - (6 + 0) / 2, 0 - (6 + 3) / 2. Turn 2: 4 - 2 and 2 - 4. Turn 3 is
    # of one completion alone, which is compared with 0.
    want = [[[4.5, 2, 1], [0, -2, 0], [-4.5, 0, 0]]]
    np.testing.assert_allclose(by_turn(RETURNS, TURNS, divided=False), want, rtol=1e-15)
    # squares 20.25 + 4 + 1 + 4 + 20.25 of six turns
    size = (49.5 / 5) ** 0.5
    divided = by_turn(RETURNS, TURNS, divided=True, std_ddof=1)
    np.testing.assert_allclose(divided, np.array(want) / size, rtol=1e-15)
    added = by_turn(RETURNS, TURNS, divided=True, std_ddof=1, std_eps=1.0)
    np.testing.assert_allclose(added, np.array(want) / (size + 1), rtol=1e-15)


def test_equal_returns_have_no_advantage_to_the_bit():
    returns = np.full((1, 3, 2), 0.1)
    turns = np.ones(returns.shape, bool)
    assert not by_turn(returns, turns, divided=False).any()
    assert not by_turn(returns, turns, divided=True, std_eps=1e-4).any()


def test_what_is_no_turn_has_no_part_whatever_it_holds():
    held = np.where(TURNS, RETURNS, np.nan)
    np.testing.assert_array_equal(
        by_turn(held, TURNS, divided=False), by_turn(RETURNS, TURNS, divided=False)
    )
    none = np.zeros((1, 2, 0))
    assert by_turn(none, none.astype(bool), divided=False).shape == (1, 2, 0)


@pytest.mark.parametrize("seed", range(5))
def test_completions_of_one_turn_are_compared_as_completions(seed: int):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(4, 6))
    valid = rng.random((4, 6)) < 0.8
    valid[:, :2] = True
    turns = by_turn(rewards[:, :, None], valid[:, :, None], divided=False)
    np.testing.assert_allclose(turns[:, :, 0], rloo(rewards, valid), rtol=1e-14)
    divided = by_turn(rewards[:, :, None], valid[:, :, None], divided=True, std_ddof=1)
    want = grpo(rewards, valid, std_ddof=1, std_eps=0.0)
    np.testing.assert_allclose(divided[:, :, 0], want, rtol=1e-12)


def test_gigpo_adds_what_turns_from_equal_states_differ_by():
    rewards = np.array([[1.0, 0.0]])
    valid = np.array([[True, True]])
    returns = np.array([[[1.0, 1.0], [0.0, 0.0]]])
    turns = np.ones((1, 2, 2), bool)
    # Both begin in state 0; of the second turns each has a state of its own.
    states = np.array([[[0, 1], [0, 2]]])
    settings = {"std_ddof": 0, "std_eps": 0.0}
    got = by_state(rewards, valid, returns, turns, states, grpo, settings)
    np.testing.assert_allclose(got, [[[1 + 1, 1 + 0], [-1 - 1, -1 + 0]]])
    # All second turns in one state too, and one of them not there.
    turns[0, 1, 1] = False
    got = by_state(rewards, valid, returns, turns, np.array([[[0, 0], [0, 9]]]), grpo, settings)
    # of returns 1, 1, 0: mean 2/3, deviation sqrt(2)/3
    step = np.array([[1, 1], [-2, 0]]) / 3 / (2**0.5 / 3)
    np.testing.assert_allclose(got, [[[1 + step[0, 0], 1 + step[0, 1]], [-1 + step[1, 0], 0]]])


# ---- games


@dataclass(frozen=True)
class Play:
    """One way in which a game can go: its actions' probability, their scores and rewards."""

    probability: float
    scores: np.ndarray  # [K, S]: gradient of each turn's log-probability by the policy's logits
    rewards: np.ndarray  # [K]


def plays_of(rng: np.random.Generator) -> list[Play]:
    """A game of three turns at most with two actions, of which the second may end it; logits,
    rewards and endings at random. All ways in which it can go."""
    histories: list[tuple[int, ...]] = []
    for n in range(3):
        histories += itertools.product((0, 1), repeat=n)
    ends: list[tuple[int, ...]] = [*histories[1:], *itertools.product((0, 1), repeat=3)]
    logit = dict(zip(histories, rng.normal(size=len(histories)), strict=True))
    reward = {history: rng.normal() + len(history) for history in ends}
    plays = []

    def go_on(history: tuple[int, ...], probability: float, scores: list, rewards: list) -> None:
        number = histories.index(history)
        p = 1 / (1 + np.exp(-logit[history]))  # of action 1
        for action in (0, 1):
            of_turn = np.zeros(len(histories))
            of_turn[number] = action - p
            after = (*history, action)
            chance = probability * (p if action else 1 - p)
            now = ([*scores, of_turn], [*rewards, reward[after]])
            if action == 1 or len(after) == 3:
                plays.append(Play(chance, np.array(now[0]), np.array(now[1])))
            else:
                go_on(after, chance, *now)

    go_on((), 1.0, [], [])
    assert sum(play.probability for play in plays) == pytest.approx(1)
    assert {len(play.rewards) for play in plays} == {1, 2, 3}
    return plays


def exact_gradient(plays: Sequence[Play], discount: float = 1.0) -> np.ndarray:
    """The sum over all plays of p times, for each turn, its score times the return from it on; with
    a discount of 1 the gradient of the mean reward."""
    total = np.zeros(plays[0].scores.shape[1])
    for play in plays:
        for k in range(len(play.rewards)):
            later = play.rewards[k:]
            total += (
                play.probability
                * play.scores[k]
                * (later * discount ** np.arange(len(later))).sum()
            )
    return total


Estimator = Callable[[np.ndarray, np.ndarray], np.ndarray]


def mean_of(estimator: Estimator, plays: Sequence[Play], group_size: int) -> np.ndarray:
    """The mean, over all groups of plays by their probability, of the gradient by an estimator of
    advantages (rewards[P, G, 3], turns[P, G, 3]) -> [P, G, 3]."""
    size = len(plays)
    rewards = np.zeros((size, 3))
    turns = np.zeros((size, 3), bool)
    scores = np.zeros((size, 3, plays[0].scores.shape[1]))
    for number, play in enumerate(plays):
        rewards[number, : len(play.rewards)] = play.rewards
        turns[number, : len(play.rewards)] = True
        scores[number, : len(play.rewards)] = play.scores
    members = np.array(list(itertools.product(range(size), repeat=group_size)))  # [P, G]
    chance = np.array([play.probability for play in plays])[members].prod(axis=1)
    advantages = estimator(rewards[members], turns[members])
    return np.einsum("p,pgk,pgks->s", chance, advantages, scores[members]) / group_size


def ours(rewards: np.ndarray, turns: np.ndarray) -> np.ndarray:
    return by_turn(returns_to_go(rewards, 1.0), turns, divided=False)


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_estimator_is_the_gradient_of_a_game_that_may_stop(seed: int, group_size: int):
    plays = plays_of(np.random.default_rng(seed))
    exact = exact_gradient(plays)
    assert np.abs(exact).max() > 0.05
    np.testing.assert_allclose(mean_of(ours, plays, group_size), exact, atol=1e-6, rtol=0)


@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_a_discount_is_of_the_returns_alone(discount: float):
    plays = plays_of(np.random.default_rng(7))

    def discounted(rewards: np.ndarray, turns: np.ndarray) -> np.ndarray:
        return by_turn(returns_to_go(rewards, discount), turns, divided=False)

    got = mean_of(discounted, plays, 3)
    np.testing.assert_allclose(got, exact_gradient(plays, discount), atol=1e-6, rtol=0)


def test_the_exact_gradient_is_that_of_the_mean_reward():
    """By differences of the mean reward of the game of seed 0, at its logits and beside them."""
    plays = plays_of(np.random.default_rng(0))
    # The score of an action is 1 - p or -p, so that a logit's change changes p by p (1 - p).
    exact = exact_gradient(plays)
    step = 1e-6
    for state in range(len(exact)):
        means = []
        for change in (step, -step):
            mean = 0.0
            for play in plays:
                factor = 1.0
                for score in play.scores[:, state]:
                    if score:
                        p = -score if score < 0 else 1 - score
                        moved = 1 / (1 + (1 - p) / p * np.exp(-change))
                        factor *= moved / p if score > 0 else (1 - moved) / (1 - p)
                mean += play.probability * factor * play.rewards.sum()
            means.append(mean)
        assert exact[state] == pytest.approx((means[0] - means[1]) / (2 * step), abs=1e-6)


# ---- naive forms, whose mean is another


def mean_with_oneself(rewards: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """A turn's return minus the mean of all that have the turn, with the completion's own."""
    returns = returns_to_go(rewards, 1.0)
    number = np.maximum(turns.sum(axis=1, keepdims=True), 1)
    mean = np.where(turns, returns, 0).sum(axis=1, keepdims=True) / number
    return np.where(turns, returns - mean, 0.0)


def normalised_by_turn_and_summed(rewards: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Each turn's reward normalised by its number in the group, then summed to the end."""
    number = np.maximum(turns.sum(axis=1, keepdims=True), 1)
    mean = np.where(turns, rewards, 0).sum(axis=1, keepdims=True) / number
    centred = np.where(turns, rewards - mean, 0.0)
    std = np.sqrt((centred**2).sum(axis=1, keepdims=True) / number)
    return np.where(turns, returns_to_go(centred / np.where(std > 0, std, 1), 1.0), 0.0)


def divided(rewards: np.ndarray, turns: np.ndarray) -> np.ndarray:
    return by_turn(returns_to_go(rewards, 1.0), turns, divided=True, std_eps=1e-4)


NAIVE = (mean_with_oneself, normalised_by_turn_and_summed, divided)


@pytest.mark.parametrize("estimator", NAIVE)
def test_naive_forms_are_not_even_parallel_to_the_gradient(estimator: Estimator):
    worst = 1.0
    for seed in range(3):
        plays = plays_of(np.random.default_rng(seed))
        exact = exact_gradient(plays)
        got = mean_of(estimator, plays, 4)
        assert np.abs(got - exact).max() > 1e-3
        worst = min(worst, got @ exact / np.linalg.norm(got) / np.linalg.norm(exact))
    assert worst < 0.9999


def test_turns_normalised_by_number_and_summed_may_turn_the_sign():
    # The first completion earns 1 in all, the second 0.9; in the second turn, whose rewards are
    # small, the second is ahead.
    rewards = np.array([[[1.0, 0.0], [0.8, 0.1], [0.79, 0.0], [0.79, 0.0]]])
    turns = np.ones(rewards.shape, bool)
    right = by_turn(returns_to_go(rewards, 1.0), turns, divided=False)[0, :, 0]
    wrong = normalised_by_turn_and_summed(rewards, turns)[0, :, 0]
    assert right[0] > right[1] > 0 > right[2]
    # By its rank in the second turn alone the second is above the first.
    assert wrong[1] > wrong[0]


# ---- what it is for


def return_after(credit: str, seed: int, num_steps: int = 40) -> float:
    """The mean reward of a policy, a table of logits by turn, after steps of the estimator: a game
    of 12 turns with two actions, in which every turn pays 1 for one of them. Completions stop at
    random."""
    rng = np.random.default_rng(seed)
    num_turns, num_prompts, group_size = 12, 1, 4
    right = rng.integers(0, 2, num_turns)
    logits = np.zeros(num_turns)
    for _ in range(num_steps):
        p = 1 / (1 + np.exp(-logits))
        shape = (num_prompts, group_size, num_turns)
        actions = rng.random(shape) < p
        stops = rng.integers(4, num_turns + 1, (*shape[:2], 1))
        turns = np.arange(num_turns) < stops
        rewards = np.where(turns, actions == right, 0.0)
        if credit == "permuted":
            for group, completion in np.ndindex(*shape[:2]):
                there = turns[group, completion]
                rewards[group, completion, there] = rng.permutation(
                    rewards[group, completion, there]
                )
        if credit == "completion":
            whole = rloo(rewards.sum(axis=2), np.ones(shape[:2], bool))
            advantages = np.where(turns, whole[:, :, None], 0.0)
        else:
            advantages = by_turn(returns_to_go(rewards, 0.0), turns, divided=False)
        logits = logits + (advantages * (actions - p)).sum(axis=(0, 1))
    p = 1 / (1 + np.exp(-logits))
    return float(np.where(right, p, 1 - p).mean())


def test_credit_by_turn_learns_faster_and_permuted_turns_lose_the_gain():
    means = {}
    for credit in ("turn", "completion", "permuted"):
        means[credit] = np.mean([return_after(credit, seed) for seed in range(5)])
    assert means["turn"] > 0.95, means
    assert means["completion"] < means["turn"] - 0.08
    assert means["permuted"] < means["completion"]
