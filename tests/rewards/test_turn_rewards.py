"""Rewards by turn: a function that returns a list for a completion, and environments that pay."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from shoal.config.sections.reward import RewardSection
from shoal.records import Example, Failure, RewardFunction, ShoalError
from shoal.rewards.ended_environment import EndedEnvironment, environment_rewards
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores, with_failed_environments

EXAMPLE = Example(17, [{"role": "user", "content": "Guess."}], {"answer": "5"})
TURNS = [[2, 1]]
"""The model's turns of the two completions."""


def scored(
    *returned: Any, workers: int = 0, weights: tuple[float, ...] = (), **given: Any
) -> Scores:
    """The scores of two completions by functions that return these values."""
    functions = []
    for number, values in enumerate(returned):
        function = values if callable(values) else lambda values=values, **columns: values
        weight = weights[number] if weights else 1.0
        functions.append(RewardFunction(f"f{number}", function, weight))
    given = {"num_turns": TURNS} | given
    on_error = given.pop("on_error", "error")
    section = RewardSection(workers=workers, on_error=on_error, timeout_seconds=20.0)
    with closing(RewardPool(functions, section)) as pool:
        pool.submit(0, [EXAMPLE], [["a", "b"]], [[[1, 2], [3]]], 3, **given)
        [(_, scores)] = pool.collect(wait=True)
    return scores


def lists(scores: Scores) -> list[list[float]]:
    return [values.tolist() for values in scores.turn_rewards[0]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_list_a_completion_is_its_turns_and_their_sum_its_reward(workers: int):
    scores = scored([[0.25, 1.0], [0.5]], workers=workers)
    np.testing.assert_array_equal(scores.rewards, [[1.25, 0.5]])
    np.testing.assert_array_equal(scores.components["f0"], [[1.25, 0.5]])
    assert lists(scores) == [[0.25, 1.0], [0.5]]


def test_a_number_is_earned_by_the_last_turn_and_weights_are_of_functions():
    # The third cannot judge the first completion; arrays and tuples are lists too.
    scores = scored(
        [np.array([1.0, 2.0]), (4.0,)], [10.0, 20.0], [None, 100.0], weights=(2.0, 0.5, 1.0)
    )
    assert lists(scores) == [[2.0, 4.0 + 5.0], [8.0 + 10.0 + 100.0]]
    np.testing.assert_array_equal(scores.rewards, [[11.0, 118.0]])


def test_numbers_alone_are_not_by_turn():
    assert scored([1.0, np.float32(2)], [True, None]).turn_rewards == []


FAULTS = [
    ([[1.0], [0.5]], "returned 1 reward for 2 turns for data row 17, completion 0"),
    ([[1.0, 2.0, 3.0], [0.5]], "returned 3 rewards for 2 turns for data row 17, completion 0"),
    ([[], [0.5]], "returned 0 rewards for 2 turns"),
    ([[1.0, math.nan], [0.5]], "returned nan among the rewards of turns for data row 17"),
    ([[1.0, math.inf], [0.5]], "returned inf among the rewards of turns"),
    ([[1.0, None], [0.5]], "returned None among the rewards of turns"),
    ([["1", 2.0], [0.5]], "returned '1' among the rewards of turns"),
]


@pytest.mark.parametrize(("returned", "message"), FAULTS)
def test_a_wrong_list_is_the_completions_reward_error(returned: list, message: str):
    with pytest.raises(ShoalError, match=message):
        scored(returned)
    zero = scored(returned, [1.0, 1.0], on_error="zero")
    assert [failure.completion for failure in zero.failures] == [0]
    np.testing.assert_array_equal(zero.rewards, [[1.0, 1.5]])
    assert lists(zero) == [[0.0, 1.0], [1.5]]
    skip = scored(returned, on_error="skip")
    np.testing.assert_array_equal(skip.valid, [[False, True]])
    assert np.isnan(skip.turn_rewards[0][0]).all() and lists(skip)[1] == [0.5]


def test_without_turns_a_completion_is_one():
    assert lists(scored([[0.25], [0.5]], num_turns=())) == [[0.25], [0.5]]


def test_an_error_speaks_of_turns_only_where_there_are_some():
    message = "returned 1 reward for 2 turns .*: expected a finite number, one for each turn, or"
    with pytest.raises(ShoalError, match=message):
        scored([(1.0,), (0.5,)])
    message = r"returned \(1\.0, 0\.5\) for .*: expected a finite number, or None to abstain"
    with pytest.raises(ShoalError, match=message):
        scored([(1.0, 0.5), (0.5,)], num_turns=())


@pytest.mark.parametrize(("policy", "want"), [("zero", [0.0, 0.0]), ("skip", [math.nan] * 2)])
def test_a_failed_environment_takes_the_rewards_of_all_turns(policy: Any, want: list):
    scores = scored([[0.25, 1.0], [0.5]])
    failure = Failure("environment", 17, 0, "died", "an environment failed")
    changed = with_failed_environments(scores, [failure], policy)
    np.testing.assert_array_equal(changed.turn_rewards[0][0], want)
    assert lists(changed)[1] == [0.5] and lists(scores)[0] == [0.25, 1.0]


# ---- environments


class Pays:
    def reset(self, **columns: object) -> None: ...

    def get_reward(self) -> float:
        return 1.0


class PaysTurnsAlone:
    def reset(self, **columns: object) -> None: ...


def said(*paid: float | None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, reward in enumerate(paid):
        messages += [{"role": "user", "content": "no"}] if number else []
        messages.append({"role": "assistant", "content": "5"})
        messages[-1] |= {} if reward is None else {"reward": reward}
    return messages


def paid(kinds: dict[str, type], by_turn: bool, *rollouts: Any) -> Scores:
    """The scores of two rollouts: (the environment's kind, its reward in the end, its payments)."""
    functions = environment_rewards(kinds, by_turn=by_turn)
    environments = [EndedEnvironment(kind, {}, total) for kind, total, _ in rollouts]
    messages = [said(*payments) for _, _, payments in rollouts]
    turns = [len(payments) for _, _, payments in rollouts]
    with closing(RewardPool(functions, RewardSection(workers=0))) as pool:
        pool.submit(
            0,
            [EXAMPLE],
            [["a", "b"]],
            [[[1, 2], [3]]],
            3,
            messages=[messages],
            environments=[environments],
            num_turns=[turns],
        )
        [(_, scores)] = pool.collect(wait=True)
    return scores


def test_what_an_environment_paid_is_part_of_its_reward():
    rollouts = (("Pays", 1.0, (0.25, None, 0.5)), ("Pays", 0.0, (0.25, 0.125)))
    by_turn = paid({"Pays": Pays}, True, *rollouts)
    # The rest of the reward is the last turn's, whatever that was paid.
    assert lists(by_turn) == [[0.25, 0.0, 0.75], [0.25, -0.25]]
    np.testing.assert_array_equal(by_turn.rewards, [[1.0, 0.0]])
    whole = paid({"Pays": Pays}, False, *rollouts)
    assert whole.turn_rewards == []
    np.testing.assert_array_equal(whole.rewards, by_turn.rewards)


def test_without_get_reward_what_was_paid_is_all():
    kinds = {"alone": PaysTurnsAlone}
    assert environment_rewards(kinds) == ()
    scores = paid(kinds, True, ("alone", None, (0.5, 0.25)), ("alone", None, (1.0,)))
    assert lists(scores) == [[0.5, 0.25], [1.0]]
    np.testing.assert_array_equal(scores.components["PaysTurnsAlone"], [[0.75, 1.0]])


def test_where_nothing_was_paid_the_reward_is_one_number():
    scores = paid({"Pays": Pays}, True, ("Pays", 1.0, (None, None)), ("Pays", 0.0, (0.5, None)))
    assert lists(scores) == [[0.0, 1.0], [0.5, -0.5]]
    scores = paid({"Pays": Pays}, True, ("Pays", 1.0, (None, None)), ("Pays", 0.0, (None,)))
    assert scores.turn_rewards == []


def test_rollouts_that_earned_the_same_have_the_same_reward_to_the_bit():
    """In floats a sum and what 1 leaves of it do not always add up to 1."""
    payments = ((0.36, 0.47, 0.21, None), (0.5, 0.25, 0.25, None))
    rest = 1.0 - math.fsum([0.36, 0.47, 0.21])
    assert math.fsum([0.36, 0.47, 0.21, rest]) != 1.0
    rollouts = [("Pays", 1.0, of_one) for of_one in payments]
    scores = paid({"Pays": Pays}, True, *rollouts)
    assert scores.rewards.tolist() == [[1.0, 1.0]]
    np.testing.assert_allclose([sum(values) for values in lists(scores)], [1.0, 1.0])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_payment_that_is_no_finite_number_is_that_rollouts_failure(wrong: float):
    rollouts = (("Pays", 1.0, (wrong, 0.5)), ("Pays", 0.0, (0.25, None)))
    with pytest.raises(ShoalError, match=f"'Pays' after step 3 returned {wrong} among"):
        paid({"Pays": Pays}, True, *rollouts)
    # Where turns earn nothing it is not read.
    np.testing.assert_array_equal(paid({"Pays": Pays}, False, *rollouts).rewards, [[1.0, 0.0]])
