"""The fleet: groups in the order asked whatever hosts do, lost hosts, wrong answers, newest
weights, own devices."""

from __future__ import annotations

import errno
import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import PLAINEST, random_parameters, roles
from tiny_runs import Workshop, checkpoints, metrics, read_lines

from shoal import cli
from shoal.commands.replay import replay
from shoal.config.commands import ReplayConfig
from shoal.config.sections.reward import RewardSection
from shoal.mesh import Program, programs
from shoal.model.transformer import Model
from shoal.protocols import (
    GroupRequest,
    HostProgress,
    Load,
    Message,
    SampleRequest,
    Submit,
    Version,
)
from shoal.records import (
    Completion,
    Example,
    HostLost,
    HostRefused,
    NoiseKey,
    Purpose,
    RewardFunction,
    SamplingParams,
    ShoalError,
    StopReason,
)
from shoal.report.timeline import Timeline
from shoal.rewards.pool import RewardPool
from shoal.rollout import host_health
from shoal.rollout.fleet import Fleet
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.host_health import HostHealth, wrong_answer
from shoal.rollout.ledger import GroupRewards, GroupState
from shoal.sampler.engine import Engine
from shoal.tasks.task import Task
from shoal.trainer.update import Updater
from shoal.weights.store import MemoryStore

PARAMS = SamplingParams(max_tokens=3)
TOKENS = 4 * 3
"""Of a group."""
NOTHING = {"hosts": 2, "lost": 0, "tokens_lost": 0, "asked_again": 0, "duplicates": 0, "refused": 0}
TASK = Task(
    "t",
    (),
    {},
    (RewardFunction("sum", lambda completions, **_: [float(text) for text in completions]),),
)


def answer(request: SampleRequest, version: int | None = None) -> list[Completion]:
    """What a host gives: a token of the row and the completion, by the address alone."""
    size = request.params.max_tokens
    result = []
    for index in range(request.num_completions):
        result.append(
            Completion(
                request.id,
                index,
                np.full(size, (request.noise_key.row + index) % 8, np.int32),
                np.full(size, -0.5, np.float32),
                np.ones(size, bool),
                np.full(size, request.version if version is None else version, np.int32),
                StopReason.LENGTH,
            )
        )
    return result


class FakeHost:
    """Answers what it has, the last first, a group at a call; `fault` is asked first."""

    def __init__(
        self, fault: Callable[[FakeHost], Any] = lambda host: None, capacity: int = 8
    ) -> None:
        self.fault, self.capacity = fault, capacity
        self.queued: list[SampleRequest] = []
        self.versions: list[int] = []
        self.answered, self.closed, self.preparing = 0, False, False
        self.tokens = 0
        self.differs = False

    def handle(self, message: Message) -> None:
        match message:
            case Load(version):
                self.load(version)
            case Submit(requests):
                self.submit(requests)
            case _:
                raise AssertionError(f"not of groups without turns: {message}")

    def load(self, version: Version) -> None:
        assert version.exists
        self.versions.append(version.version)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for one in requests:
            assert one.version in self.versions
        self.queued.extend(requests)
        assert sum(one.num_completions for one in self.queued) <= self.capacity + 3

    def poll(self) -> dict[int, list[Completion]]:
        if (wrong := self.fault(self)) is not None:
            return wrong
        if not self.queued:
            return {}
        return self.answer_last()

    def answer_last(self, position: int = -1) -> dict[int, list[Completion]]:
        self.answered += 1
        self.tokens += TOKENS
        request = self.queued.pop(position)
        return {request.id: answer(request)}

    def progress(self) -> HostProgress:
        return HostProgress(
            max(self.versions, default=-1),
            capacity=self.capacity,
            counters=Counter(tokens=self.tokens),
            dispatches=self.answered,
            preparing=self.preparing,
            differs=self.differs,
        )

    def close(self) -> None:
        self.closed = True


@contextmanager
def fleet(hosts: dict[str, Any], in_thread: bool = True, **options: Any) -> Iterator[Fleet]:
    model = Model(PLAINEST, roles().sampler)
    rewards = GroupRewards(
        TASK, RewardPool(TASK.rewards, RewardSection(workers=0)), lambda ids: str(sum(ids))
    )
    with closing(
        Fleet(MemoryStore(model), hosts, rewards, seed=0, in_background=in_thread, **options)
    ) as made:
        made.in_background = True  # hosts are polled whenever groups are taken, and all is counted
        made.publish(0, random_parameters(PLAINEST))
        yield made


def requests(
    rows: Sequence[int], step: int = 0, version: int = 0, exact: bool = True
) -> list[GroupRequest]:
    result = []
    for row in rows:
        result.append(
            GroupRequest(
                Purpose.TRAIN,
                step,
                version,
                Example(row, "q"),
                np.array([1, 2]),
                4,
                PARAMS,
                exact=exact,
            )
        )
    return result


def rows_of(source: Fleet, step: int = 0) -> list[int]:
    return [group.example.row for group in source.take(Purpose.TRAIN, step)]


def test_groups_come_in_the_order_asked_from_hosts_that_answer_in_any():
    hosts = {
        "a": FakeHost(),
        "b": FakeHost(lambda host: {} if time.monotonic() % 0.02 < 0.01 else None),
    }
    with fleet(hosts) as source:
        source.request(requests(range(20)))
        source.request(requests(range(20, 30), step=1))
        assert rows_of(source) == list(range(20)) and rows_of(source, 1) == list(range(20, 30))
        assert (
            sum(host.answered for host in hosts.values()) == 30
            and min(h.answered for h in hosts.values()) > 0
        )
        assert not source.ledger.entries
        stats = source.read_stats(Purpose.TRAIN)
        assert stats.tokens == stats.counters["tokens"] == 30 * TOKENS and stats.fleet == NOTHING
        assert stats.queue == {"waiting": 0, "running": 0, "sampled": 0}
    for host in hosts.values():
        assert host.closed


def test_a_slow_host_gets_less_unless_others_are_full():
    hosts = {name: FakeHost(lambda host: {}, capacity=32) for name in "abc"}
    with fleet(hosts) as source:
        with source._ledger_lock:
            for name, seconds in zip("abc", (1.0, 0.1, 0.1), strict=True):
                source.members[name]._seconds.extend([seconds] * 9)
        source.request(requests(range(8)))
        wait_for(lambda: sum(len(host.queued) for host in hosts.values()) == 8)
        assert [len(host.queued) for host in hosts.values()] == [0, 4, 4]
        source.request(requests(range(8, 30), step=1))
        wait_for(lambda: sum(len(host.queued) for host in hosts.values()) == 24)
        assert [len(host.queued) for host in hosts.values()] == [8, 8, 8]
        for host in hosts.values():
            host.fault = lambda host: None
        assert rows_of(source) == list(range(8)) and rows_of(source, 1) == list(range(8, 30))


def test_a_second_answer_is_dropped_and_counted():
    seen: list[SampleRequest] = []

    def twice(host: FakeHost) -> dict[int, list[Completion]] | None:
        if seen:
            request = seen.pop()
            return {request.id: answer(request)}
        seen.extend(host.queued[-1:])
        return None

    with fleet({"a": FakeHost(twice)}) as source:
        source.request(requests(range(6)))
        assert rows_of(source) == list(range(6))
        deadline = time.monotonic() + 10
        while seen and time.monotonic() < deadline:
            time.sleep(0.01)
            source.woken.set()
        assert source.read_stats(Purpose.TRAIN).fleet["duplicates"] > 0


def dies(after: int) -> Callable[[FakeHost], None]:
    def fault(host: FakeHost) -> None:
        if host.answered >= after and host.queued:
            raise HostLost("its process was killed")

    return fault


def test_the_groups_of_a_lost_host_are_asked_again_elsewhere_and_it_is_made_anew(monkeypatch):
    monkeypatch.setattr(host_health, "MOST_PAUSE_SECONDS", 0.01)
    said, made = [], []

    def restart(name: str) -> FakeHost:
        made.append(FakeHost())
        return made[-1]

    first = FakeHost(dies(2))
    first.tokens = 5  # of what it will not end
    with fleet(
        {"a": first, "b": FakeHost(lambda host: time.sleep(0.002))},
        restart=restart,
        on_note=said.append,
    ) as source:
        source.request(requests(range(40)))
        assert rows_of(source) == list(range(40))
        stats = source.read_stats(Purpose.TRAIN)
        source.request(requests(range(5), step=1))
        assert rows_of(source, 1) == list(range(5))
    assert first.closed and len(made) == 1 and made[0].versions == [0]
    assert stats.fleet["lost"] == 1 and stats.fleet["asked_again"] >= 1
    assert (stats.fleet["tokens_lost"], stats.counters["tokens"], stats.tokens) == (
        5,
        40 * TOKENS + 5,
        40 * TOKENS,
    )
    assert said == [
        f"sampler host a is lost: its process was killed; {stats.fleet['asked_again']} groups "
        "requested again"
    ]


@pytest.mark.slow
def test_with_no_host_left_the_run_ends_with_one_error(monkeypatch):
    monkeypatch.setattr(host_health, "MOST_PAUSE_SECONDS", 0.0)
    made = []

    def restart(name: str) -> FakeHost:
        made.append(name)
        return FakeHost(dies(0))

    with fleet({"a": FakeHost(dies(1))}, restart=restart, restarts=2) as source:
        source.request(requests(range(9)))
        with pytest.raises(
            ShoalError,
            match="no sampler host is left: sampler host a is lost: its process was killed",
        ):
            source.take(Purpose.TRAIN, 0)
    assert made == ["a", "a"]


@pytest.mark.slow
def test_restarts_are_earned_back_by_steps_with_answers(monkeypatch):
    """Two losses in 340 steps took a worker's restarts away for good."""
    monkeypatch.setattr(host_health, "MOST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(host_health, "HEALTHY_STEPS", 3)

    def restart(name: str) -> FakeHost:
        return FakeHost(dies(4))

    with fleet({"a": FakeHost(dies(4))}, restart=restart, restarts=1) as source:
        for step in range(12):  # a loss every fourth step
            source.request(requests([0], step=step))
            assert rows_of(source, step) == [0]
        assert source.members["a"].restarts == 1
        lost = source.members["a"]
        lost.lose(0.0)
        for _ in range(5):  # steps of others, or without an answer of this one, earn nothing
            lost.count_step()
        assert (lost.restarts, lost.losses) == (0, 1)
    own = HostHealth("here", FakeHost())
    own.count_step()
    assert own.restarts is None


class Scripted(FakeHost):
    """Does what comes next of a script that all hosts share; it answers once that is at its end."""

    def __init__(self, script: Iterator[str], all_hosts: list[Scripted]) -> None:
        super().__init__()
        self.script, self.begun, self.used, self.repeated, self.dead = script, 0, 0, {}, False
        all_hosts.append(self)

    def poll(self) -> dict[int, list[Completion]]:
        act = next(self.script, "answer") if self.queued else "nothing"
        if act == "draw" and self.begun < TOKENS:
            self.tokens, self.begun = self.tokens + 1, self.begun + 1
        elif act == "die":
            raise HostLost("its process was killed")
        elif act == "repeat":
            return dict(self.repeated)
        elif act in ("answer", "wrong", "answer and die"):
            self.tokens, self.begun = self.tokens - self.begun, 0
            self.repeated = self.answer_last()
            if act == "wrong":
                return {id: one[1:] for id, one in self.repeated.items()}
            self.used, self.dead = self.used + TOKENS, act != "answer"
            return dict(self.repeated)
        return {}

    def progress(self) -> HostProgress:
        if self.dead:
            raise HostLost("its process was killed")
        return super().progress()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["draw", "draw", "answer", "answer", "repeat", "wrong", "die", "answer and die"]
        ),
        max_size=60,
    )
)
def test_the_account_of_tokens_is_closed_whatever_hosts_do(script):
    """Sampled = taken + lost with hosts + not taken, each counted by the hosts themselves, too."""
    acts, made = iter(script), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_health, "MOST_PAUSE_SECONDS", 0.0)
        with fleet(
            {name: Scripted(acts, made) for name in "ab"},
            in_thread=False,
            restarts=10**6,
            restart=lambda name: Scripted(acts, made),
        ) as source:
            source.request(requests(range(6)))
            source.request(requests(range(6, 9), step=1))
            assert rows_of(source) == list(range(6))
            untaken = sum(
                len(one) for entry in source.ledger.entries.values() for one in entry.completions
            )
            stats = source.read_stats(Purpose.TRAIN)
            working = [one.host for one in source.members.values()]
    lost = sum(host.tokens - host.used for host in made if host not in working)
    unended = sum(host.tokens - host.used for host in made if host in working)
    assert stats.counters["tokens"] == sum(host.tokens for host in made)
    assert (stats.tokens, stats.fleet["tokens_lost"]) == (6 * TOKENS, lost)
    assert stats.counters["tokens"] == stats.tokens + lost + untaken + unended


def test_a_host_that_draws_otherwise_is_not_made_anew():
    def refuses(host: FakeHost) -> None:
        raise HostRefused("it samples other tokens")

    hosts, said = {"a": FakeHost(refuses), "b": FakeHost()}, []
    hosts["b"].differs = True
    with fleet(hosts, restart=lambda name: pytest.fail("made anew"), on_note=said.append) as source:
        source.request(requests(range(4)))
        assert rows_of(source) == list(range(4))
        stats = source.read_stats(Purpose.TRAIN).fleet
        assert (stats["hosts"], stats["lost"], stats["refused"]) == (1, 0, 2)
        hosts["b"].fault = refuses
        source.request(requests([5], step=1))
        with pytest.raises(
            ShoalError,
            match="no sampler host is left: sampler host b is refused: it samples other tok",
        ):
            source.take(Purpose.TRAIN, 1)
    assert [text[:22] for text in said] == ["sampler host a is refu", "sampler host b is refu"]


def test_a_long_wait_is_said_with_what_it_waits_for(monkeypatch):
    monkeypatch.setattr("shoal.rollout.fleet.LONG_WAIT_SECONDS", 1e-3)
    said: list[str] = []
    host = FakeHost(lambda host: None if said else {})
    with fleet({"a": host}, on_note=said.append) as source:
        source.request(requests(range(3)))
        wait_for(lambda: len(host.queued) == 2)
        assert rows_of(source) == [0, 1, 2]
    assert re.fullmatch(
        r"waiting for the groups of step 1 since \d\d:\d\d:\d\d, 0 s: 0 of 3 groups have arrived, "
        r"2 at a \(weights before training\), 1 waiting, attempt 1",
        said[0],
    )


def test_a_fault_in_a_host_of_this_process_is_raised_by_take():
    def fault(host: FakeHost) -> None:
        raise ZeroDivisionError("a bug")

    with fleet({"a": FakeHost(fault)}) as source:
        source.request(requests([1]))
        with pytest.raises(ZeroDivisionError, match="a bug"):
            source.take(Purpose.TRAIN, 0)


ONE = SampleRequest(4, np.array([1]), 2, NoiseKey(0, "train", 0, 0), PARAMS, version=3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: one[:1], "1 completions instead of 2"),
        (lambda one: one[::-1], "2 completions instead of 2"),
        (lambda one: [replace(one[0], logprobs=one[0].logprobs[:2]), one[1]], "different lengths"),
        (
            lambda one: [replace(one[0], extra={"experts": np.zeros((2, 4, 8))}), one[1]],
            "different lengths",
        ),
        (
            lambda one: [replace(one[0], token_ids=np.array([1, 2, 99])), one[1]],
            "not in the vocabulary",
        ),
        (
            lambda one: [replace(one[0], token_ids=np.array([1, -2, 9])), one[1]],
            "not in the vocabulary",
        ),
        (lambda one: [replace(one[0], logprobs=np.array([-1, np.nan, 0])), one[1]], "finite"),
        (lambda one: [replace(one[0], logprobs=np.array([-1, 0.5, 0])), one[1]], "at most 0"),
        (lambda one: [one[0], replace(one[1], versions=np.array([3, 3, 4]))], "version 4, not 3"),
        (lambda one: [one[0], replace(one[1], versions=np.array([2, 3, 3]))], "version 2, not 3"),
        (
            lambda one: [
                replace(
                    part,
                    token_ids=part.token_ids[:0],
                    logprobs=part.logprobs[:0],
                    versions=part.versions[:0],
                    loss_mask=part.loss_mask[:0],
                )
                for part in one
            ],
            "0 tokens",
        ),
    ],
)
def test_a_wrong_answer_is_found(change, reason):
    right = answer(ONE)
    assert wrong_answer(ONE, right, 10, newest=4) == ""
    assert reason in wrong_answer(ONE, change(right), 10, newest=4)


def test_newest_weights_are_bounded_on_both_sides():
    request = replace(ONE, exact=False)

    def of(*versions: int) -> str:
        completions = []
        for one in answer(request):
            completions.append(replace(one, versions=np.array(versions)))
        return wrong_answer(request, completions, 10, newest=5)

    assert of(3, 4, 5) == of(5, 5, 5) == ""
    assert of(2, 3, 3) and of(4, 5, 6)


def test_a_host_that_answers_wrongly_is_lost(monkeypatch):
    monkeypatch.setattr(host_health, "MOST_PAUSE_SECONDS", 0.0)

    def rubbish(host: FakeHost) -> dict[int, list[Completion]] | None:
        return {host.queued[-1].id: answer(host.queued[-1], version=7)} if host.queued else None

    said: list[str] = []
    with fleet(
        {"a": FakeHost(rubbish)}, restart=lambda name: FakeHost(), on_note=said.append
    ) as source:
        source.request(requests(range(3)))
        assert rows_of(source) == [0, 1, 2]
    assert "it answered with tokens of version 7, not 0" in said[0]


def test_an_answer_from_newest_weights_may_come_while_the_next_are_published(monkeypatch):
    go = threading.Event()
    host = FakeHost(lambda host: None if go.is_set() else {})
    with fleet({"a": host}) as source:
        publish = source.store.put

        def slow(version: int, params: Any) -> Any:
            assert not source.store.versions  # released, as both may not fit
            go.set()
            groups_come(source)
            return publish(version, params)

        source.request(requests(range(2), exact=False))
        while len(host.queued) < 2:
            time.sleep(0.01)
        monkeypatch.setattr(source.store, "put", slow)
        source.publish(1, random_parameters(PLAINEST))
        assert rows_of(source) == [0, 1] and source.members["a"].host is host


def groups_come(source: Fleet) -> None:
    deadline = time.monotonic() + 20
    while source.ledger.count(GroupState.REWARDED) < 2:
        assert time.monotonic() < deadline and source._failure is None, source._failure
        time.sleep(0.01)


def test_health_is_progress_and_not_life():
    host = FakeHost()
    one = HostHealth("a", host, restarts=1, assigned={1: requests([0])[0]})  # type: ignore[arg-type]
    start = time.monotonic()
    # the first step compiles
    assert not one.stalled_seconds(start + 500) and one.stalled_seconds(start + 700)
    for number in range(5):
        host.answered += 1
        one.update_progress(start + 3.0 * number)
    # 20 medians of 3 s
    assert not one.stalled_seconds(start + 12 + 59) and one.stalled_seconds(start + 12 + 61)
    one.assigned.clear()
    assert not one.stalled_seconds(start + 1e6)
    one.update_progress(start + 1e6)
    one.assigned[2] = requests([0])[0]
    assert not one.stalled_seconds(start + 1e6 + 59)  # counted from when it had work again
    host.preparing = True  # a program of other shapes, or weights of a network
    one.update_progress(start + 1e6 + 59)
    assert not one.stalled_seconds(start + 1e6 + 59 + 500) and one.stalled_seconds(
        start + 1e6 + 59 + 700
    )
    host.preparing = False
    one.update_progress(start + 1e6 + 500)
    assert not one.stalled_seconds(start + 1e6 + 559)  # counted from its end
    one.stall_seconds = 5
    assert one.stalled_seconds(start + 1e6 + 559)


@pytest.mark.parametrize("stall_seconds", [0, 5])
def test_a_host_that_compiles_or_reads_weights_has_not_stalled_while_it_is_heard_of(stall_seconds):
    """Also before it is ready, when it has no groups yet; one that is stopped meanwhile is heard of
    no more."""
    tells = HostProgress(preparing=True)

    def progress():
        return replace(tells)

    host: Any = SimpleNamespace(progress=progress)
    for groups in ({}, {1: requests([0])[0]}):
        one = HostHealth("a", host, restarts=1, stall_seconds=stall_seconds, assigned=groups)
        now = time.monotonic()
        for _ in range(1000):
            now, tells.reports = now + 3.0, tells.reports + 1
            one.update_progress(now)
            assert not one.stalled_seconds(now)
        one.update_progress(now + 601)
        assert one.stalled_seconds(now + 601)


def test_a_host_that_says_how_long_it_may_be_silent_is_lost_then_before_its_first_token():
    progress = HostProgress(silence_seconds=60.0)
    host: Any = SimpleNamespace(progress=lambda: replace(progress))
    one, start = HostHealth("a", host, restarts=1, assigned={1: requests([0])[0]}), time.monotonic()
    for second in range(500):  # it computes prompts
        progress.reports += 1
        one.update_progress(start + second)
        assert not one.stalled_seconds(start + second)
    assert not one.stalled_seconds(start + 499 + 59) and one.stalled_seconds(start + 499 + 61)
    progress.reports += 1
    one.update_progress(start + 599)
    # it answers, and samples nothing
    assert not one.stalled_seconds(start + 599) and one.stalled_seconds(start + 601)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_no_group_starts_on_a_version_before_its_host_was_given_it():
    """A version is published, and has not reached the hosts."""
    host = FakeHost()
    with fleet({"a": host}) as source:
        publish, waiting = source.store.put, []

        def slow(version: int, params: Any) -> Any:
            published = publish(version, params)
            for _ in range(5):
                source.woken.set()
                time.sleep(0.02)
            waiting.append(source.ledger.count(GroupState.WAITING))
            return published

        source.store.put = slow
        source.request(requests([0, 1], version=1))
        source.publish(1, random_parameters(PLAINEST))
        assert waiting == [2] and rows_of(source) == [0, 1]


@pytest.mark.slow
def test_training_goes_before_an_evaluation_which_has_a_share_of_each_host():
    """An evaluation of 40 questions at one version; then the groups of a step at the next."""
    host = FakeHost(lambda host: {}, capacity=32)
    questions = []
    for one in requests(range(40)):
        questions.append(replace(one, purpose=Purpose.EVALUATE))
    with fleet({"a": host}) as source:

        def queued() -> list[Purpose]:
            return [one.purpose for one in host.queued]

        source.request(requests(range(3), version=0))
        source.request(questions)
        wait_for(lambda: len(host.queued) == 5)
        assert queued() == [Purpose.TRAIN] * 3 + [Purpose.EVALUATE] * 2  # 8 of 32 completions
        source.publish(1, random_parameters(PLAINEST))
        source.request(requests(range(9), step=1, version=1))
        wait_for(lambda: len(host.queued) == 8)
        assert queued()[5:] == [Purpose.TRAIN] * 3
        host.fault = lambda host: None if Purpose.TRAIN in queued() else {}
        host.answer_last = lambda: FakeHost.answer_last(host, 0)  # type: ignore[method-assign]
        assert rows_of(source) == [0, 1, 2] and rows_of(source, 1) == list(range(9))
        assert 4 <= 40 - source.ledger.count(GroupState.WAITING, GroupState.RUNNING) < 20
        host.fault = lambda host: None
        assert len(source.take(Purpose.EVALUATE, 0)) == 40


def test_an_evaluation_has_its_share_where_a_group_is_larger():
    """16 completions in groups of 8, while training always has more."""
    host = FakeHost(lambda host: {}, capacity=16)
    groups = [replace(one, num_completions=8) for one in requests(range(6))]
    with fleet({"a": host}) as source:
        source.request(groups)
        source.request([replace(one, purpose=Purpose.EVALUATE) for one in groups])
        wait_for(lambda: len(host.queued) == 2)
        assert [one.purpose for one in host.queued] == [Purpose.TRAIN, Purpose.EVALUATE]
        host.fault = lambda host: None
        assert len(source.take(Purpose.EVALUATE, 0)) == len(source.take(Purpose.TRAIN, 0)) == 6


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    capacity=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    ends=st.lists(st.booleans(), max_size=30),
    alone=st.booleans(),
)
def test_of_training_and_evaluation_none_starves_on_a_host(capacity, sizes, ends, alone):
    """Groups of both wait always, perhaps after training had the host alone; each that ends is
    followed at once, training first."""
    host = HostHealth("a", FakeHost(), progress=HostProgress(capacity=capacity))
    train = replace(requests([0])[0], num_completions=sizes[0])
    evaluation = replace(train, purpose=Purpose.EVALUATE, num_completions=sizes[1])
    ids = iter(range(10**6))

    def assign(is_shared: bool) -> None:
        for one in (train, evaluation)[: 1 + is_shared]:
            while host.has_room(one.num_completions, one is train, is_shared):
                host.assigned[next(ids)] = one

    def oldest(one: GroupRequest) -> int | None:
        return next((id for id, other in host.assigned.items() if other is one), None)

    if alone:
        assign(False)
        assert capacity <= host.num_completions(Purpose.TRAIN) < capacity + sizes[0]
    assign(True)
    while oldest(evaluation) is None:  # until what training had alone has ended as far as it must
        count = len(host.assigned)
        del host.assigned[oldest(train)]
        assign(True)
        assert len(host.assigned) < count or oldest(evaluation) is not None
    for is_train in ends:
        if (id := oldest(train if is_train else evaluation)) is not None:
            del host.assigned[id]
            assign(True)
        assert oldest(train) is not None and oldest(evaluation) is not None
        assert host.num_completions() <= max(capacity, *sizes) + max(sizes)


def test_with_newest_weights_hosts_go_on_while_others_are_copied():
    """The old version is released before the new one is there; groups end in between."""
    copying: list[int] = []
    host = FakeHost(lambda host: None if copying else {})
    with fleet({"a": host}) as source:
        publish = source.store.put

        def slowly(version: int, params: Any) -> Any:
            assert not source.store.versions
            copying.append(version)
            wait_for(
                lambda: not source.ledger.count(GroupState.RUNNING) or source._failure is not None
            )
            return publish(version, params)

        source.store.put = slowly
        source.request(requests([0, 1], exact=False))
        wait_for(lambda: len(host.queued) == 2)
        source.publish(1, random_parameters(PLAINEST), keep_from=1)
        assert rows_of(source) == [0, 1]


def test_a_lost_host_closes_without_a_word():
    class Dead(FakeHost):
        def close(self) -> None:
            raise HostLost("its process was killed")

    with fleet({"a": Dead()}) as source:
        source.request(requests([3]))
        assert rows_of(source) == [3]


def test_the_lane_of_a_host_elsewhere_shows_what_it_tells(tmp_path, monkeypatch):
    """Also of the next host of that name; no event begins before the last one's end."""
    now, tells = [100.0], HostProgress()

    def time():
        return now[0]

    monkeypatch.setattr("shoal.report.timeline.time.time", time)
    one = HostHealth("worker 0", SimpleNamespace(progress=lambda: replace(tells)), restarts=1)
    with closing(Timeline(tmp_path / "timeline.json", print)) as timeline:
        one.timeline = timeline
        for now[0], tells.busy_seconds in ((101.0, 0.5), (101.3, 0.5), (102.0, 1.75)):
            one.update_progress(now[0])
        one.lose(now[0])

        def progress():
            return HostProgress(busy_seconds=0.25)

        one.restart_with(SimpleNamespace(progress=progress), now[0])
        now[0] = 103.0
        one.update_progress(now[0])
    events = json.loads((tmp_path / "timeline.json").read_text().rstrip().rstrip(",") + "]")
    assert events[0]["args"] == {"name": "worker 0"}
    assert [(event["ts"] / 1e6, event["dur"] / 1e6) for event in events[1:]] == [
        (100.5, 0.5),
        (101, 1),
        (102.75, 0.25),
    ]


def test_a_full_disk_ends_the_timeline_alone(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:  # a file writes what is left
            super().close()
            self.write("")

    warnings: list[str] = []
    with closing(Timeline(tmp_path / "timeline.json", warnings.append)) as timeline:
        timeline._file.close()
        monkeypatch.setattr(timeline, "_file", Full())
        timeline.add("trainer", "update", 1.0)
        timeline.add("trainer", "update", 1.0)
    assert warnings == ["report.timeline: No space left on device; the timeline ends here"]


# ---- engines


def engine_host(**options: Any) -> EngineHost:
    engine = Engine(
        Model(PLAINEST, roles().sampler),
        slots=8,
        group_size=4,
        max_prompt_tokens=8,
        max_completion_tokens=80,
        eos_ids=(0,),
    )
    return EngineHost(lambda purpose, size: engine, **options)


class Weights:
    """A version of given weights."""

    def __init__(self, version: int, params: Any) -> None:
        self.version, self.params, self.exists, self.reads = version, params, True, 0

    def read(self, model: Any, frozen: Any = None) -> Future[Callable[[], Any]]:
        self.reads += 1
        done: Future[Callable[[], Any]] = Future()
        done.set_result(self.give)
        return done

    def give(self) -> Any:
        return self.params


def sample(id: int, version: int, exact: bool, max_tokens: int = 80) -> SampleRequest:
    return SampleRequest(
        id,
        np.array([3, 5]),
        4,
        NoiseKey(0, "x", 0, id),
        SamplingParams(max_tokens=max_tokens),
        Purpose.TRAIN,
        version,
        exact,
    )


def run(
    host: EngineHost, before_poll: Callable[[int], None] = lambda number: None
) -> dict[int, list[Completion]]:
    found: dict[int, list[Completion]] = {}
    for number in range(1000):
        if host.idle:
            return found
        before_poll(number)
        found |= host.poll()
    raise AssertionError("the host never ends")


@pytest.mark.slow
def test_a_host_tells_that_it_reads_weights_or_compiles(monkeypatch):
    host, weights, seen = engine_host(), Weights(0, random_parameters(PLAINEST)), []
    engine = host.make_engine(Purpose.TRAIN, 4)

    def noting(name: str, call: Callable) -> Callable:
        return lambda *args, **keys: (
            seen.append((name, host.progress().preparing)),
            call(*args, **keys),
        )[1]

    for owner, name in ((weights, "give"), (engine, "_gather_oldest")):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    engine.programs = {name: noting(name, program) for name, program in engine.programs.items()}
    host.handle(Load(weights))
    for id in range(2):
        host.handle(Submit([sample(id, 0, exact=True)]))
        run(host)
    assert ("_gather_oldest", True) not in seen and not host.progress().preparing
    calls = {
        name: [preparing for one, preparing in seen if one == name]
        for name in ("give", "prefill", "decode")
    }
    # Those that may compile, not every one: a host that hangs in a later call would have 10
    # minutes.
    assert (calls["give"], calls["prefill"], calls["decode"][:5]) == (
        [True] * 2,
        [True, False],
        [True] + [False] * 4,
    )


def versions(completions: list[Completion]) -> set[int]:
    return set(np.concatenate([one.versions for one in completions]).tolist())


@pytest.mark.slow
def test_an_exact_version_waits_until_others_are_drawn_and_newest_weights_are_taken_on_the_way():
    host = engine_host()
    weights = []
    for seed in range(3):
        weights.append(Weights(seed, random_parameters(PLAINEST, seed=seed)))
    host.handle(Load(weights[0]))
    host.handle(
        Submit(
            [
                sample(0, 0, exact=False),
                sample(1, 0, exact=True),
                sample(2, 0, exact=False),
                sample(3, 1, True),
            ]
        )
    )
    with pytest.raises(RuntimeError, match=r"version 1 is requested, but only \[0\] are published"):
        run(host)
    host.handle(Load(weights[1]))
    found = run(host)
    assert versions(found.get(3, [])) == {1}

    host = engine_host()
    host.handle(Load(weights[0]))
    host.handle(
        Submit(
            [
                sample(0, 0, exact=False),
                sample(1, 0, exact=True, max_tokens=5),
                sample(2, 0, exact=False),
            ]
        )
    )
    found = run(host, lambda number: host.handle(Load(weights[1])) if number == 1 else None)
    assert versions(found[0]) == {0, 1}  # long completions lived through the swap
    for one in found[0]:
        assert (np.diff(one.versions) >= 0).all()
    assert versions(found[1]) == {0} and versions(found[2]) == {1}


@pytest.mark.slow
def test_newest_weights_that_were_released_are_passed_over():
    """A host that was busy while two versions were published finds the first gone; no group starts
    on older weights than it may."""

    class Released(Weights):
        def give(self) -> Any:
            self.exists = False
            raise LookupError("released")

    host, gone = engine_host(), Released(1, None)
    host.handle(Load(Weights(0, random_parameters(PLAINEST))))
    host.handle(Submit([sample(0, 0, exact=False)]))
    found = run(host, lambda number: host.handle(Load(gone)) if number == 1 else None)
    assert versions(found[0]) == {0} and gone.reads == 1
    host.handle(Load(Released(2, None)))
    host.handle(Submit([sample(1, 1, exact=False)]))
    assert host.poll() == {} and not host.idle and host.stuck
    host.handle(Load(Weights(3, random_parameters(PLAINEST, seed=1))))
    assert versions(run(host)[1]) == {3}
    host.handle(Submit([sample(2, 4, exact=False)]))
    with pytest.raises(
        RuntimeError, match=r"version 4 is requested, but only \[0, 3\] are published"
    ):
        host.poll()


@pytest.mark.slow
def test_newest_weights_are_read_while_completions_go_on():
    """Also where newer ones are published before they are there."""

    class Slow(Weights):
        def read(self, model: Any, frozen: Any = None) -> Future[Callable[[], Any]]:
            self.reads += 1
            self.reading: Future[Callable[[], Any]] = Future()
            return self.reading

    def before_poll(number: int) -> None:
        if number in (1, 2):
            host.handle(Load(slow[number - 1]))
        for one in slow:
            if number > one.version + 1 and one.reads and not one.reading.done():
                one.reading.set_result(one.give)

    host = engine_host()
    slow = []
    for seed in (1, 2):
        slow.append(Slow(seed, random_parameters(PLAINEST, seed=seed)))
    host.handle(Load(Weights(0, random_parameters(PLAINEST))))
    host.handle(Submit([sample(number, 0, exact=False) for number in range(6)]))
    found = run(host, before_poll)
    assert set.union(*map(versions, found.values())) == {0, 1, 2} and [
        one.reads for one in slow
    ] == [1, 1]
    assert 0 < host.progress().pause_seconds < host.progress().busy_seconds


def test_a_thread_that_cannot_sample_waits():
    """For weights that the trainer has not published yet: it asks its host no more often than it is
    called."""
    polls, polled = [], threading.Event()

    def poll() -> dict[int, list[Completion]]:
        polls.append(1)
        polled.set()
        return {}

    def handle(message):
        return None

    def close():
        return None

    host: Any = SimpleNamespace(
        idle=False,
        stuck=True,
        poll=poll,
        progress=HostProgress,
        handle=handle,
        close=close,
    )
    with closing(ThreadHost(host, lambda: None, "t")) as thread:
        for number in range(3):
            polled.clear()
            thread.handle(Load(Weights(number, None)))
            assert polled.wait(60)
        time.sleep(0.02)
        assert len(polls) == 3


def test_a_message_that_hosts_do_not_know_reaches_the_engine():
    """A new message is a class and a case in the engine; the hosts around it need no edit."""

    class Unknown:
        pass

    received: list[object] = []
    host = engine_host()
    host._engine = host.make_engine(Purpose.TRAIN, 4)
    with pytest.raises(TypeError, match="an engine does not act on Unknown"):
        host.handle(Unknown())  # type: ignore[arg-type]
    host._engine.handle = received.append  # type: ignore[method-assign]
    with closing(ThreadHost(host, lambda: None, "t")) as thread:
        thread.handle(Unknown())  # type: ignore[arg-type]
        wait_for(lambda: [type(message) for message in received] == [Unknown])


def test_what_an_engine_counts_is_passed_on_by_its_name():
    """A new counter needs no edit between the engine and the table of metrics."""

    def step() -> dict[int, list[Completion]]:
        engine.counters["new_counter"] += 3
        return {}

    engine: Any = SimpleNamespace(
        idle=False, stuck=False, starting=False, version=0, counters=Counter(), step=step
    )
    host = EngineHost(lambda purpose, size: engine)
    host._engine = engine
    seen = HostHealth("a", host)
    host.poll()
    seen.update_progress(0.0)
    first = host.progress()
    host.poll()
    seen.update_progress(1.0)
    assert first.counters == {"new_counter": 3}  # a copy: another thread may read it meanwhile
    assert host.progress().counters == {"new_counter": 6}
    assert seen.total.counters == {"new_counter": 6, "tokens": 0}


@pytest.fixture(scope="module")
def of_the_caller() -> tuple[list[SampleRequest], dict[int, list[Completion]]]:
    """Six requests, and what a host gives that the caller itself drives."""
    wanted = [sample(number, 0, exact=True) for number in range(6)]
    host = engine_host()
    host.handle(Load(Weights(0, random_parameters(PLAINEST))))
    host.handle(Submit(wanted))
    return wanted, run(host)


def test_a_host_in_a_thread_gives_the_same_bits_and_raises_what_goes_wrong(of_the_caller):
    wanted, expected = of_the_caller
    params = Weights(0, random_parameters(PLAINEST))
    found, woken = {}, []
    with closing(
        ThreadHost(engine_host(capacity=16, shares_memory=False), lambda: woken.append(1), "t")
    ) as host:
        host.handle(Load(params))
        host.handle(Submit(wanted[:3]))
        host.handle(Submit(wanted[3:]))
        deadline = time.monotonic() + 60
        while len(found) < 6 and time.monotonic() < deadline:
            found |= host.poll()
            time.sleep(0.005)
        assert woken and host.progress().counters["tokens"] == sum(
            len(one) for group in found.values() for one in group
        )
        assert host.progress().capacity == 16
        for id, group in expected.items():
            for one, other in zip(group, found[id], strict=True):
                assert one.token_ids.tolist() == other.token_ids.tolist()
                assert one.logprobs.tobytes() == other.logprobs.tobytes()
        host.handle(Submit([replace(wanted[0], id=9, prompt_ids=np.zeros(99, np.int32))]))
        with pytest.raises(ShoalError, match="a prompt has 99 tokens"):
            while time.monotonic() < deadline:
                host.poll()
                time.sleep(0.005)


# ---- whole runs, trainer and sampler on devices of their own

LAGGING = (
    "steps=5",
    "train.pass_k=0",
    "train.max_staleness=2",
    "train.evaluate_every=2",
    "checkpoint_period=1",
    "sampling.slots_per_device=8",
    "mesh.trainer=1",
)
CLOCKS = (
    "time/",
    "throughput/",
    "memory/",
    "mfu",
    "compil",
    "sampler/places",
    "idle/",
    "queue/",
    "fleet/",
    "publish/",
)


@pytest.fixture(scope="module")
def together(workshop: Workshop):
    """Trainer and sampler take turns on one device."""
    return workshop.train("together", *LAGGING)


def without_clocks(run: Any) -> list[dict]:
    result = []
    for row in metrics(run):
        result.append({name: value for name, value in row.items() if not name.startswith(CLOCKS)})
    return result


def assert_equal(run: Any, other: Any) -> None:
    assert without_clocks(run) == without_clocks(other)
    assert read_lines(run / "evaluations.jsonl") == read_lines(other / "evaluations.jsonl")
    files = []
    for one in (run, other):
        files.append(sorted(path.name for path in (one / "groups").iterdir()))
    assert files[0] == files[1]
    for name in files[0]:
        assert (run / "groups" / name).read_bytes() == (other / "groups" / name).read_bytes(), name
    sums = []
    for one in (run, other):
        sums.append(
            json.loads((one / "checkpoints" / "5" / "extra" / "metadata").read_text())["checksums"]
        )
    assert sums[0] == sums[1]


@pytest.mark.slow
def test_devices_of_their_own_and_more_hosts_change_no_bit(workshop, together):
    apart = workshop.train("apart", *LAGGING, "mesh.sampler=[1,2]", "report.timeline=true")
    events = json.loads((apart / "timeline.json").read_text().rstrip().rstrip(",") + "]")
    lanes = {}
    for event in events:
        if event["ph"] == "M":
            lanes[event["tid"]] = event["args"]["name"]
    assert {"trainer", "publication", "sampler 0", "sampler 1"} <= set(lanes.values())
    spans = []
    for event in events:
        if event["ph"] == "X":
            spans.append((event["name"], lanes[event["tid"]], event["dur"]))
    assert [name for name, lane, _ in spans].count("update") == 5 and min(
        dur for *_, dur in spans
    ) >= 100
    tokens, same = (
        json.loads((run / "summary.json").read_text())["tokens"] for run in (apart, together)
    )
    assert (
        tokens == same
        and tokens["sampled"] == tokens["trained"] + tokens["evaluated"]
        and not tokens["unused"]
    )
    rows = metrics(apart)
    assert {row["fleet/hosts"] for row in rows} == {2} and "fleet/hosts" not in metrics(together)[0]
    for row in rows:
        assert row["publish/bytes"] > 0 and row["publish/seconds"] > 0
    # the trainer's arrays themselves
    assert {row["publish/bytes"] for row in metrics(together)} == {0}
    for row in rows:
        assert 0 <= row["idle/trainer"] <= 1 and 0 <= row["idle/sampler"] <= 1
    assert_equal(apart, together)


@pytest.mark.slow
def test_programs_of_devices_that_meet_are_dispatched_one_at_a_time(workshop, monkeypatch):
    """Two hosts of two devices decode in threads, while the trainer's thread compares what it
    publishes and scores with the reference on all four: in different orders on two devices,
    programs with collectives wait for each other."""
    dispatch, spans = Program._known_options, []

    def slow(self: Program, call: Callable[[], Any]) -> Any:
        started = time.monotonic()
        time.sleep(0.02)
        result = dispatch(self, call)
        spans.append((started, time.monotonic(), self._in_flight, threading.current_thread().name))
        return result

    monkeypatch.setattr(Program, "_known_options", slow)
    workshop.train(
        "meeting",
        "steps=3",
        "train.pass_k=0",
        "train.max_staleness=1",
        "train.evaluate_every=-1",
        "mesh.trainer=4",
        "mesh.sampler=4",
        "mesh.sampler_tensor=2",
        "algorithm.kl_coef=0.05",
    )
    devices = {id(queue): held for held, queue in programs._in_flight.items()}
    spans = sorted(
        ((start, end, devices[id(queue)], thread) for start, end, queue, thread in spans),
        key=lambda span: span[:2],
    )
    assert {"sampler 0", "sampler 1"} <= {thread for *_, held, thread in spans if len(held) == 2}
    assert "MainThread" in {thread for *_, held, thread in spans if len(held) == 4}
    for number, (_, end, held, thread) in enumerate(spans):
        for start, _, others, other in spans[number + 1 :]:
            if start >= end:
                break
            assert thread == other or held.isdisjoint(others), (thread, other)


@pytest.mark.slow
def test_a_run_that_was_cut_resumes_on_other_hosts_to_the_same_end(workshop, together, monkeypatch):
    class Killed(BaseException):
        pass

    update, calls = Updater.update, []

    def dies(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # an evaluation is under way, and two steps are asked for
            raise Killed
        return update(*args)

    words = workshop.words("cut", *LAGGING, "mesh.sampler=[1,2]")
    before = set(threading.enumerate())
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Updater, "update", dies)
        cli.main(words)
    # another test may have left one that hangs in a reward
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith(("sampler", "fleet"))]
    cut = workshop.runs / "cut"
    assert checkpoints(cut)[-1] == 3
    cli.main(["train", f"resume={cut}", "mesh.sampler=[2]"])
    assert_equal(cut, together)


@pytest.mark.slow
def test_evaluations_that_are_under_way_are_in_the_checkpoint(workshop, together, monkeypatch):
    """None is ready before the end: each is filed under its own version with the answers of that
    version."""

    def is_busy_with(self, purpose, step):
        return True

    monkeypatch.setattr(Fleet, "is_busy_with", is_busy_with)
    late = workshop.train("late", *LAGGING, "mesh.sampler=[1]")
    extra = json.loads((late / "checkpoints" / "5" / "extra" / "metadata").read_text())
    assert extra["evaluating"] == [2, 4]
    assert read_lines(late / "evaluations.jsonl") == read_lines(together / "evaluations.jsonl")
    assert without_clocks(late) == without_clocks(together)


@pytest.mark.slow
def test_newest_weights_stay_within_the_bound(workshop):
    run = workshop.train("newest", *LAGGING, "mesh.sampler=[1,2]", "train.versions=newest")
    rows = metrics(run)
    assert len(rows) == 5 and all(
        0 <= row["staleness"] <= row["staleness/max"] <= 2 for row in rows
    )
    assert rows[-1]["staleness/max"] > 0
    oldest = []
    for row in rows:
        for name in row:
            if name.startswith("age/ess/"):
                oldest.append(int(name.rpartition("/")[2]))
    assert max(oldest) == max(row["staleness/max"] for row in rows)
    for row in rows:
        for name in row:
            if name.startswith("age/ess/"):
                assert 0 < row[name] <= 1 + 1e-6
        for name in row:
            if name.startswith("age/weight_max/"):
                assert row[name] > 0
    for number in range(2):
        # what was sampled before the weights changed is sampled again to the bit
        assert replay(ReplayConfig(run=str(run), step=4, group=number))["identical"]


def test_states_are_words_that_people_read():
    assert [str(state) for state in GroupState] == [
        "waiting",
        "running",
        "sampled",
        "rewarded",
        "handed over",
    ]
