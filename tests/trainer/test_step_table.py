"""The table of a step with credit by turn: advantages of turns, and the tokens
that they are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_batch import make_groups, shapes_for

from shoal.config.sections.algorithm import AlgorithmSection
from shoal.records import Branch, Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.trainer.batch import BatchLayout, TokenTerms, pack, unpack
from shoal.trainer.step_table import StepTable, TurnTable

NAN = np.nan


def completion(
    index: int, tokens: str, context: dict[str, list[int]], branches: tuple[Branch, ...] = ()
) -> Completion:
    """A completion of letters: lower case was sampled, each capital stands for tokens of context
    that `context` has."""
    ids: list[int] = []
    sampled: list[bool] = []
    for letter in tokens:
        said = context.get(letter)
        ids += [ord(letter)] if said is None else said
        sampled += [True] if said is None else [False] * len(said)
    size = len(ids)
    return Completion(
        0,
        index,
        np.array(ids, np.int32),
        np.zeros(size, np.float32),
        np.array(sampled, bool),
        np.zeros(size, np.int32),
        StopReason.EOS,
        branches=branches,
    )


CONTEXT = {"H": [1, 2], "L": [1, 3]}
"""What the environment says: higher or lower."""


def group(**changes: object) -> Group:
    """Three completions of 3, 2 and 1 turns, of which the second is in a state of the first twice,
    and the third could not be scored."""
    completions = (
        completion(0, "abHcLde", CONTEXT),
        completion(1, "fHg", CONTEXT),
        completion(2, "h", CONTEXT),
    )
    given: dict = {
        "rewards": np.array([3.0, 1.0, NAN]),
        "valid": np.array([True, True, False]),
        "turn_rewards": (np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.0]), np.array([NAN])),
    }
    given |= changes
    return Group(
        Purpose.TRAIN,
        0,
        0,
        Example(0, "q"),
        np.array([5, 6], np.int32),
        completions,
        ("",) * 3,
        given["rewards"],
        {},
        given["valid"],
        turn_rewards=given["turn_rewards"],
    )


def test_turns_are_what_was_sampled_without_a_break():
    assert completion(0, "abHcLde", CONTEXT).turns == (slice(0, 2), slice(4, 5), slice(7, 9))
    assert completion(0, "HH", CONTEXT).turns == ()
    assert completion(0, "", CONTEXT).turns == ()
    prompt = np.array([9], np.int32)
    # A branch begins a turn although no context stands before it.
    assert completion(0, "abc", {}, (Branch(2, prompt),)).turns == (slice(0, 2), slice(2, 3))
    # One that begins after context, or with it, divides nothing.
    after = completion(0, "aHb", CONTEXT, (Branch(3, prompt),))
    assert after.turns == (slice(0, 1), slice(3, 4))
    assert completion(0, "aHb", CONTEXT, (Branch(1, prompt),)).turns == after.turns


def test_the_table_of_turns():
    table = TurnTable.of([group()])
    np.testing.assert_array_equal(table.rewards, [[[0, 1, 2], [1, 0, 0], [0, 0, 0]]])
    np.testing.assert_array_equal(
        table.turns, [[[True, True, True], [True, True, False], [False, False, False]]]
    )
    np.testing.assert_array_equal(table.lengths, [[[2, 1, 2], [1, 1, 0], [1, 0, 0]]])
    # The prompt, "higher" and "lower".
    np.testing.assert_array_equal(table.states, [[[0, 1, 2], [0, 1, 0], [0, 0, 0]]])


def test_without_rewards_by_turn_the_last_turn_has_all():
    table = TurnTable.of([group(turn_rewards=())], penalty=np.array([[0.5, 0.25, 0.0]]))
    np.testing.assert_array_equal(table.rewards, [[[0, 0, 2.5], [0, 0.75, 0], [0, 0, 0]]])


def test_words_of_a_branch_are_its_prompt():
    own = np.array([5, 6, 7], np.int32)
    changed = replace(group(), completions=(
        completion(0, "abcHd", CONTEXT, (Branch(2, np.array([1, 2], np.int32)),)),
        replace(completion(1, "fHg", CONTEXT), prompt_ids=own),
        completion(2, "h", CONTEXT),
    ), turn_rewards=())  # fmt: skip
    # The branch's prompt has the tokens of "higher".
    np.testing.assert_array_equal(
        TurnTable.of([changed]).states, [[[0, 1, 1], [2, 1, 0], [0, 0, 0]]]
    )


def test_advantages_of_turns_reach_the_tokens_of_their_turns_alone():
    a = AlgorithmSection(credit="turn", advantage="rloo")
    table = StepTable.of([group()], a)
    # Returns 3, 3, 2 and 1, 0; the third turn is compared with nobody.
    np.testing.assert_array_equal(table.advantages, [[[2, 3, 2], [-2, -3, 0], [0, 0, 0]]])
    # Of five tokens: 2, 2, 3, 2, 2; of two: -2 and -3.
    np.testing.assert_allclose(table.completion_advantages, [[11 / 5, -2.5, 0]])
    turns = table.turn_advantages
    assert [list(map(float, values)) for values in turns[0]] == [[2, 3, 2], [-2, -3], [0]]
    weights = np.array([[1.0, 2.0, 0.0]])
    batches = pack(
        [group()],
        [0],
        TokenTerms(table.advantages, weights),
        BatchLayout(shapes_for(1, 3, 100, 1), 1.0),
    )
    got = unpack(batches, [batch.arrays.advantage for batch in batches])
    np.testing.assert_array_equal(got[0, 0], [2, 2, 0, 0, 3, 0, 0, 2, 2])
    np.testing.assert_array_equal(got[0, 1], [-2, 0, 0, -3])
    weighted = unpack(batches, [batch.arrays.weight for batch in batches])
    np.testing.assert_array_equal(weighted[0, 0], [1, 1, 0, 0, 1, 0, 0, 1, 1])


def test_a_bonus_by_token_is_added_to_that_of_its_turn():
    a = AlgorithmSection(credit="turn", advantage="rloo", discount=0.5)
    table = StepTable.of([group()], a)
    bonus = {(0, index): np.full(len(one), 10.0) for index, one in enumerate(group().completions)}
    batches = pack(
        [group()],
        [0],
        TokenTerms(table.advantages, np.zeros_like(table.advantages), teacher_bonus=bonus),
        BatchLayout(shapes_for(1, 3, 100, 1), 1.0),
    )
    got = unpack(batches, [batch.arrays.advantage for batch in batches])
    # Returns 0 + (1 + 2 / 2) / 2 and 1: the first turns are equal.
    np.testing.assert_array_equal(got[0, 0], [10, 10, 10, 10, 12, 10, 10, 12, 12])
    assert not any(batch.arrays.weight.any() for batch in batches)


def test_one_number_for_each_turn_that_is_the_same_is_one_for_the_completion():
    groups = make_groups(3, 4, 4)
    values = np.random.default_rng(0).normal(size=(4, 4))
    shapes = shapes_for(4, 4, 400, 1)
    most = max(len(one.turns) for group in groups for one in group.completions)
    assert most > 5
    layout = BatchLayout(shapes, 1.0)
    whole = pack(groups, range(4), TokenTerms(values, values), layout)
    by_turn = np.repeat(values[:, :, None], most, axis=2)
    of_turns = pack(groups, range(4), TokenTerms(by_turn, by_turn), layout)
    for a, b in zip(whole, of_turns, strict=True):
        np.testing.assert_array_equal(a.arrays.weight, b.arrays.weight)
        sampled = a.arrays.loss_mask
        np.testing.assert_array_equal(a.arrays.advantage[sampled], b.arrays.advantage[sampled])


def test_gigpo_compares_completions_and_turns_of_one_state():
    a = AlgorithmSection(credit="state", advantage="dr_grpo")
    table = StepTable.of([group()], a)
    # Completions: 3 and 1, so 1 and -1. The prompt: returns 3 and 1; "higher": 3 and 0.
    np.testing.assert_array_equal(
        table.advantages, [[[1 + 1, 1 + 1.5, 1], [-1 - 1, -1 - 1.5, 0], [0, 0, 0]]]
    )


def test_by_default_nothing_is_by_turn():
    table = StepTable.of([group()], AlgorithmSection())
    assert table.advantages.shape == (1, 3)
    assert table.turns is None and table.turn_advantages == []
    assert table.completion_advantages is table.advantages


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"discount": 0.9}, r"algorithm.discount=0.9: expected 1, or algorithm.credit=turn"),
        ({"credit": "turn", "discount": 1.5}, r"algorithm.discount=1.5: expected a number in"),
        ({"credit": "turn", "advantage": "gdpo"}, r"advantage='?gdpo'?: expected rloo or grpo"),
        ({"credit": "turn", "advantage": "dr_grpo"}, r"dr_grpo'?: expected rloo or grpo"),
        ({"credit": "state", "advantage": "none"}, r"expected grpo or dr_grpo or rloo"),
        ({"credit": "turn", "loss": "gspo"}, r"algorithm.loss='?gspo'?: expected a loss by token"),
    ],
)
def test_settings_that_credit_cannot_have(settings: dict, message: str):
    with pytest.raises(ShoalError, match=message):
        AlgorithmSection(**settings)
