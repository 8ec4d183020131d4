"""The ledger: whatever hosts answer, lose or repeat, every group is handed over once, in the order
asked."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocols import GroupRequest
from shoal.records import Completion, Example, Group, Purpose, SamplingParams, StopReason
from shoal.rewards.scores import Scores
from shoal.rollout.ledger import TRANSITIONS, GroupState, Ledger, PendingGroup, make_group
from shoal.tasks.task import Task

HOSTS = ("a", "b", "c")


def request_of(step: int, row: int = 0, purpose: Purpose = Purpose.TRAIN) -> GroupRequest:
    return GroupRequest(
        purpose, step, step, Example(row, "q"), np.array([1]), 1, SamplingParams(max_tokens=1)
    )


def answer_of(id: int) -> list[Completion]:
    """A host's answer, whose token is the id."""
    return [
        Completion(
            id,
            0,
            np.array([id]),
            np.zeros(1),
            np.ones(1, bool),
            np.zeros(1, int),
            StopReason.LENGTH,
        )
    ]


def group_of(entry: PendingGroup) -> Group:
    request = entry.request
    return Group(
        request.purpose,
        request.step,
        request.version,
        request.example,
        request.prompt_ids,
        tuple(entry.completions),
        ("",),
        np.zeros(1),
        {},
        np.ones(1, bool),
    )


class Account:
    """A ledger, the calls that a fleet makes, and what must be true of them, kept apart."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.asked: dict[int, list[int]] = {}  # step -> ids, of steps that are not handed over
        self.given: list[int] = []
        self.answered: set[int] = set()
        self.running: dict[int, str] = {}
        self.lost = self.repeated = 0

    def ask(self, number: int) -> None:
        first = step = self.ledger.next_id
        self.ledger.add(request_of(step, row) for row in range(1 + number % 4))
        self.asked[step] = list(range(first, self.ledger.next_id))

    def start(self, number: int) -> None:
        waiting = []
        for id in self.open():
            if id not in self.running and id not in self.answered:
                waiting.append(id)
        found = self.ledger.in_state(GroupState.WAITING)
        assert [entry.id for entry in found] == sorted(waiting)  # the oldest first
        if found:
            self.ledger.start(found[0], HOSTS[number % 3])
            self.running[found[0].id] = HOSTS[number % 3]

    def answer(self, number: int) -> None:
        """Of any group that ever was: one that runs, waits again, was answered or handed over."""
        if not self.ledger.next_id:
            return
        id = number % self.ledger.next_id
        entry = self.ledger.answer(id, answer_of(id))
        fresh = id in self.open() and id not in self.answered
        assert (entry is not None) == fresh
        self.repeated += id in self.answered
        if fresh:
            self.answered.add(id)
            self.running.pop(id, None)

    def lose(self, number: int) -> None:
        lost = []
        for id, host in self.running.items():
            if host == HOSTS[number % 3]:
                lost.append(id)
        assert self.ledger.lose(HOSTS[number % 3]) == len(lost)
        self.lost += len(lost)
        for id in lost:
            del self.running[id]

    def reward(self, number: int) -> None:
        sampled = []
        for one in self.ledger.entries.values():
            if one.state is GroupState.SAMPLED:
                sampled.append(one)
        if sampled:
            entry = sampled[number % len(sampled)]
            entry.move(GroupState.REWARDED)
            entry.group = group_of(entry)

    def hand_over(self, number: int) -> None:
        ready = [
            step
            for step in self.asked
            if all(
                one.state is GroupState.REWARDED
                for one in self.ledger.entries_of(Purpose.TRAIN, step)
            )
        ]
        if ready:
            step = ready[number % len(ready)]
            groups = self.ledger.hand_over(self.ledger.entries_of(Purpose.TRAIN, step))
            ids = [int(group.completions[0].token_ids[0]) for group in groups]
            # all of them, in the order asked, each with its own answer
            assert ids == self.asked.pop(step)
            self.given += ids

    def open(self) -> set[int]:
        return set(itertools.chain.from_iterable(self.asked.values()))

    def check(self) -> None:
        assert list(self.ledger.entries) == sorted(self.open())
        assert self.ledger.asked_again == self.lost and self.ledger.duplicates >= self.repeated
        assert max(Counter(self.given).values(), default=1) == 1

    def finish(self) -> None:
        """Hosts work on until nothing is left."""
        while any(one.state is GroupState.WAITING for one in self.ledger.entries.values()):
            self.start(0)
        for id in sorted(self.running, reverse=True):
            self.answer(id)
        for _ in list(self.ledger.entries):
            self.reward(0)
        for _ in list(self.asked):
            self.hand_over(0)


ACTIONS = (
    Account.ask,
    Account.start,
    Account.start,
    Account.answer,
    Account.lose,
    Account.reward,
    Account.hand_over,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 40)), max_size=60))
def test_under_any_interleaving_every_group_is_handed_over_once_and_in_order(calls):
    account = Account()
    for call, number in calls:
        call(account, number)
        account.check()
    account.finish()
    account.check()
    assert not account.ledger.entries and sorted(account.given) == list(
        range(account.ledger.next_id)
    )


@pytest.mark.parametrize(("before", "after"), list(itertools.product(GroupState, GroupState)))
def test_a_stage_changes_only_as_the_table_says(before, after):
    entry = PendingGroup(3, request_of(5), before)
    if after in TRANSITIONS[before]:
        entry.move(after)
        assert entry.state is after
    else:
        with pytest.raises(
            RuntimeError, match=f"group 3 of train step 5 cannot become {after}: it is {before}"
        ):
            entry.move(after)
        assert entry.state is before


def test_the_table_leads_every_group_to_an_end():
    """From each state a group can be handed over, which alone is final."""
    assert [stage for stage, after in TRANSITIONS.items() if not after] == [GroupState.HANDED_OVER]
    for state in GroupState:
        reached = {state}
        for _ in GroupState:
            reached |= set().union(*(TRANSITIONS[one] for one in reached))
        assert GroupState.HANDED_OVER in reached


def test_a_lost_group_starts_before_what_was_asked_for_later():
    ledger = Ledger()
    ledger.add([request_of(0)])
    ledger.add([request_of(1)])
    first, second = ledger.in_state(GroupState.WAITING)
    ledger.start(first, "a")
    assert ledger.in_state(GroupState.WAITING) == [second]
    assert ledger.lose("a") == 1 and ledger.in_state(GroupState.WAITING) == [first, second]
    ledger.start(first, "b")
    assert (first.attempt, first.host, ledger.asked_again) == (2, "b", 1)


def test_a_purpose_and_a_step_name_what_is_taken():
    ledger = Ledger()
    ledger.add([request_of(4, row) for row in (7, 3)])
    ledger.add([request_of(4, purpose=Purpose.EVALUATE)])
    assert [one.request.example.row for one in ledger.entries_of(Purpose.TRAIN, 4)] == [7, 3]
    assert len(ledger.entries_of(Purpose.EVALUATE, 4)) == 1 and len(ledger.entries) == 3


@pytest.mark.parametrize(
    ("acc", "expected"),
    [
        ([1.0, True, 0, False], [True, True, False, False]),
        ([1, 0.5, None, -1], [True, False, False, False]),  # a share, a failure, another scale
        ([None] * 4, None),
        (["yes", "no", "yes", "no"], None),
        (None, None),
    ],
)
def test_acc_of_a_reward_function_says_which_completions_are_right(acc, expected):
    request = request_of(0)
    completions = [answer_of(0)[0]] * 4
    extra = {} if acc is None else {"acc": [acc]}
    scores = Scores(np.zeros((1, 4)), {"own": np.zeros((1, 4))}, np.ones((1, 4), bool), extra=extra)
    group = make_group(Task("own"), request, completions, "abcd", scores)
    assert (None if group.correct is None else group.correct.tolist()) == expected
    # What the task says comes first.
    judged = Task("own", correct=lambda text, example: text == "d")
    group = make_group(judged, request, completions, "abcd", scores)
    assert group.correct is not None and group.correct.tolist() == [False, False, False, True]
