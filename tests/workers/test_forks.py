"""User functions that fork: a copy of a worker answers no call, takes none, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import descendants, gone

from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import EnvironmentSection
from shoal.records import Example
from shoal.rewards.loading import name_functions
from shoal.rewards.pool import RewardPool
from shoal.workers.environments import EnvironmentKind
from shoal.workers.sessions import Sessions

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc"),
    # JAX's, where a test that ran before has started its threads
    pytest.mark.filterwarnings("ignore:os.fork"),
]
EXAMPLES = [Example(row, [{"role": "user", "content": str(row)}], {}) for row in range(2)]


# ---- ways to fork, each of which returns, raises or exits in the copy too


def fork_once() -> None:
    os.fork()


def fork_twice() -> None:
    os.fork()
    os.fork()


def fork_and_raise_in_the_copy() -> None:
    if os.fork() == 0:
        raise ValueError("in the copy")


def fork_and_exit_in_the_copy() -> None:
    if os.fork() == 0:
        raise SystemExit(0)


def fork_and_be_interrupted_in_the_copy() -> None:
    if os.fork() == 0:
        raise KeyboardInterrupt


def fork_and_answer_later() -> None:
    if os.fork() == 0:
        time.sleep(0.3)


def fork_below_python() -> None:
    """No `os.register_at_fork` sees it."""
    ctypes.PyDLL(None).fork()


def fork_in_a_thread() -> None:
    thread = threading.Thread(target=os.fork)
    thread.start()
    thread.join()


def fork_a_daemon() -> None:
    """Twice, as daemons do; the grandchild comes back in a session of its own."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)


def fork_a_pseudoterminal() -> None:
    _, controller = os.forkpty()
    if controller > 2:
        os.close(controller)


WAYS = [
    fork_once,
    fork_twice,
    fork_and_raise_in_the_copy,
    fork_and_exit_in_the_copy,
    fork_and_be_interrupted_in_the_copy,
    fork_and_answer_later,
    fork_below_python,
    fork_in_a_thread,
    fork_a_daemon,
    fork_a_pseudoterminal,
]


# ---- rewards


def contents(completions: Any) -> list[str]:
    return [completion[0]["content"] for completion in completions]


def plain_reward(way: Callable[[], None]) -> Callable[..., Any]:
    def reward(completions: Any, **columns: Any) -> list[float]:
        if "2" in contents(completions):
            way()
        return [float(text) for text in contents(completions)]

    return reward


def async_reward(way: Callable[[], None]) -> Callable[..., Any]:
    async def reward(completions: Any, **columns: Any) -> list[float]:
        if "2" in contents(completions):
            way()
        await asyncio.sleep(0.01)  # the copy comes to the loop that calls share
        return [float(text) for text in contents(completions)]

    return reward


def awaitable_reward(way: Callable[[], None]) -> Callable[..., Any]:
    """A plain function that returns what is awaited, on a loop in a thread."""
    inner = async_reward(way)

    def reward(completions: Any, **columns: Any) -> Awaitable[list[float]]:
        return inner(completions, **columns)

    return reward


def by_tier(cases: list[tuple[Any, ...]], all_ways: Any) -> list[Any]:
    """Cases of which those are slow that fork in a rarer way, but for one kind of call that is
    tried in all ways."""
    sorted_cases = []
    for case in cases:
        is_usual = fork_once in case or fork_and_answer_later in case or all_ways in case
        sorted_cases.append(case if is_usual else pytest.param(*case, marks=pytest.mark.slow))
    return sorted_cases


REWARDS = [
    (make, way, 1) for make in (plain_reward, async_reward, awaitable_reward) for way in WAYS
]
# A copy that Python has not seen shares the loop's wakeup socket until the call is over: no loop in
# a thread bears it.
REWARDS.remove((awaitable_reward, fork_below_python, 1))
REWARDS += [(make, fork_once, 0) for make in (plain_reward, async_reward, awaitable_reward)]


@pytest.mark.parametrize(("make_reward", "way", "workers"), by_tier(REWARDS, plain_reward))
def test_rewards_stay_with_their_completions_though_a_function_forks(
    make_reward: Callable[..., Any], way: Callable[[], None], workers: int
) -> None:
    before = descendants()
    section = RewardSection(workers=workers, timeout_seconds=20.0, memory_gib=0.5)
    with RewardPool(name_functions([make_reward(way)]), section, 10) as pool:
        for step in range(3):
            texts = []
            for p in range(2):
                texts.append([f"{4 * step + 2 * p + g}" for g in range(2)])
            pool.submit(step, EXAMPLES, texts, [[[1], [1]], [[1], [1]]], step=step)
            [(_, scores)] = pool.collect(wait=True)
            np.testing.assert_array_equal(scores.rewards, np.array(texts, np.float64))
            assert not scores.failures
    for pid in descendants() - before:
        assert gone(pid)


# ---- tools and environments


def echo(text: str, way: str = "") -> str:
    """Gives the text back."""
    globals().get(way, lambda: None)()
    return text


async def later(text: str, way: str = "") -> str:
    """Gives the text back."""
    globals().get(way, lambda: None)()
    await asyncio.sleep(0.01)
    return text


class Echo:
    """An environment in a process of its own."""

    def reset(self, way: str = "", **columns: Any) -> str:
        self.words = []
        return echo("begun", way)

    def say(self, text: str, way: str = "") -> str:
        self.words.append(text)
        return echo(text, way)

    async def wait(self, text: str, way: str = "") -> str:
        return await later(text, way)

    def respond(self, message: str) -> str:
        return echo(message, "fork_once")

    def get_reward(self) -> float:
        os.fork()
        return float(len(self.words))


class SharedEcho:
    """An environment that shares a process."""

    async def reset(self, way: str = "", **columns: Any) -> None:
        await later("begun", way)

    async def say(self, text: str, way: str = "") -> str:
        return await later(text, way)

    async def respond(self, message: str) -> str:
        return await later(message, "fork_once")


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    before = descendants()
    section = EnvironmentSection(timeout_seconds=20.0, memory_gib=0.5, workers=1)
    made = Sessions([echo, later], {"own": Echo, "shared": SharedEcho}, section)
    yield made
    made.close()
    for pid in descendants() - before:
        assert gone(pid)


def answers(sessions: Sessions, number: int) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    deadline = time.monotonic() + 60
    while len(found) < number and time.monotonic() < deadline:
        found += [(reply.rollout, reply.error or reply.value) for reply in sessions.collect(1.0)]
    return sorted(found)


TOOLS = [
    (way, environment, tool)
    for way in WAYS
    for environment, tool in (
        ("own", "echo"),
        ("own", "say"),
        ("own", "wait"),
        ("shared", "later"),
        ("shared", "say"),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "environment", "tool"), by_tier(TOOLS, "echo"))
def test_answers_of_tools_stay_with_their_rollouts_though_a_tool_forks(
    sessions: Sessions, way: Callable[[], None], environment: str, tool: str
) -> None:
    for rollout in ("a", "b"):
        sessions.open(
            rollout, {"environment": environment, "way": "fork_once" if rollout == "a" else ""}
        )
    assert len(answers(sessions, 2)) == 2
    for turn in range(3):
        sessions.call("a", tool, {"text": f"a{turn}", "way": way.__name__ if turn == 1 else ""})
        sessions.call("b", tool, {"text": f"b{turn}"})
        assert answers(sessions, 2) == [("a", f"a{turn}"), ("b", f"b{turn}")]
        sessions.respond("a", f"A{turn}")
        sessions.respond("b", f"B{turn}")
        assert answers(sessions, 2) == [("a", f"A{turn}"), ("b", f"B{turn}")]
    for rollout in ("a", "b"):
        sessions.end(rollout)
    ended = answers(sessions, 2)
    if environment == "own":
        assert [value["reward"] for _, value in ended] == [3.0 if tool == "say" else 0.0] * 2


def test_a_factory_that_forks_makes_no_second_trainer() -> None:
    def factory() -> Echo:
        os.fork()
        return Echo()

    owner = os.getpid()
    before = descendants()
    assert EnvironmentKind.of("forks", factory).type is Echo
    assert os.getpid() == owner
    for pid in descendants() - before:
        assert gone(pid)


# ---- what a worker may write into its socket


def forge(number: Any, reply: Any = None) -> str:
    """Answers a call by itself, into each socket of the process."""
    text = json.dumps({"call": number, "reply": reply or {"value": "forged"}}).encode()
    for name in os.listdir("/proc/self/fd"):
        target = f"/proc/self/fd/{name}"
        if os.path.exists(target) and os.readlink(target).startswith("socket:"):
            with contextlib.suppress(OSError):  # of another's, whose other end is gone
                os.write(int(name), struct.pack(">II", len(text), 0) + text)
    return "honest"


@pytest.mark.parametrize("number", [0, 10**6, "1", None])
def test_an_answer_to_another_call_ends_the_worker_and_reaches_no_rollout(number: Any) -> None:
    sessions = Sessions([forge, echo], {}, EnvironmentSection(timeout_seconds=20.0, workers=1))
    try:
        for rollout in ("a", "b"):
            sessions.open(rollout, {})
        answers(sessions, 2)
        sessions.call("a", "forge", {"number": number})
        [(_, first)] = answers(sessions, 1)
        sessions.call("b", "echo", {"text": "b"})
        assert answers(sessions, 1) == [("b", "b")]
        assert first.startswith("it ended its process")
    finally:
        sessions.close()


@pytest.mark.parametrize("reply", ["text", [1]])
def test_a_reply_that_is_none_ends_its_worker(reply: Any) -> None:
    sessions = Sessions([forge, echo], {}, EnvironmentSection(timeout_seconds=20.0, workers=1))
    try:
        sessions.open("a", {})
        answers(sessions, 1)
        sessions.call("a", "forge", {"number": 2, "reply": reply})
        [(_, first)] = answers(sessions, 1)
        assert first.startswith("it ended its process")
        sessions.call("a", "echo", {"text": "b"})
        assert answers(sessions, 1) == [("a", "b")]
    finally:
        sessions.close()
