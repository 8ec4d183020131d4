"""Sessions of tools and environments: what they answer, their limits, and that nothing is left
behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import descendants, gone

from shoal.config.sections.task import EnvironmentSection
from shoal.records import ShoalError
from shoal.workers import pool, process
from shoal.workers.environments import EnvironmentKind
from shoal.workers.sessions import SHARED, Reply, Sessions


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def attempt(what: str, number: int = 0) -> Any:
    """Does what a tool may do."""
    if what == "raise":
        raise ValueError("no such\nthing")
    if what == "exit":
        sys.exit(3)
    if what == "die":
        os._exit(3)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(1000)
    if what == "flood":
        return "ü" * number
    if what == "recurse":
        return attempt("recurse", number) if number else None
    if what == "nest":
        return functools.reduce(lambda inner, _: [inner], range(100_000), "x")
    if what == "allocate":
        return len(bytearray(4 << 30))
    if what == "spoil":
        return spoil(b"\0\0\0\2\0\0\0\0\xff\xfe")
    if what == "spoil deep":
        text = b"[" * 100_000
        return spoil(struct.pack(">II", len(text), 0) + text)
    if what == "spoil long":
        return spoil(struct.pack(">II", 1 << 31, 1 << 31))
    if what == "family":
        result = []
        for alone in (False, True):
            result.append(subprocess.Popen(["sleep", "1000"], start_new_session=alone).pid)
        return result
    return {
        "bytes": b"\xff\x00",
        "surrogate": "a\ud800b",
        "none": None,
        "parts": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
        "list": [1, 2],
    }[what]


def spoil(data: bytes) -> list[int]:
    """Writes to all sockets; those that an earlier test has left may have no other end."""
    written = []
    for number in sockets():
        with contextlib.suppress(OSError):
            written.append(os.write(number, data))
    return written


def sockets() -> list[int]:
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        if path.exists():
            found[int(path.name)] = os.readlink(path)
    result = []
    for number, target in found.items():
        if target.startswith("socket:") and number > 2:
            result.append(number)
    return result


def kill_parent(number: int) -> None:
    """Kills the process that started this one."""
    os.kill(os.getppid(), number)
    time.sleep(1000)


async def later(seconds: float = 0.0) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "later"


class Game:
    """An environment in a process of its own."""

    def reset(self, answer: int = 0, **columns: Any) -> str | None:
        self.answer, self.guesses, self._secret = answer, [], object()
        self.resets = getattr(self, "resets", 0) + 1
        self.array, self.lock = np.arange(2), threading.Lock()
        self.deep = functools.reduce(lambda inner, _: [inner], range(500), 1)
        return columns.get("first")

    def guess(self, number: int) -> str:
        self.guesses.append(number)
        return "right" if number == self.answer else "wrong"

    def process(self) -> int:
        return os.getpid()

    def attempt(self, what: str, number: int = 0) -> Any:
        return attempt(what, number)

    async def wait(self) -> str:
        return await later()

    def sockets(self) -> str:
        return json.dumps([os.readlink(f"/proc/self/fd/{number}") for number in sockets()])

    def respond(self, message: str) -> str | None:
        return {"bye": None, "odd": 5}.get(message, message.upper())  # type: ignore

    def get_reward(self) -> float:
        return len(self.guesses) / 2

    def _hidden(self) -> None:
        raise AssertionError


class Own(Game):
    """A game beside a tool `attempt`."""

    act = Game.attempt
    attempt = None  # type: ignore


class AsyncGame:
    """An environment that shares a process."""

    async def reset(self, answer: int = 0) -> None:
        self.answer = answer

    async def guess(self, number: int) -> str:
        await asyncio.sleep(0.01)
        return "right" if number == self.answer else "wrong"

    async def process(self) -> int:
        return os.getpid()

    async def hang(self) -> None:
        await asyncio.sleep(1000)

    async def block(self) -> None:
        time.sleep(1000)

    async def swallow(self) -> None:
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(1000)

    async def get_reward(self) -> float:
        return 1.0


class Player:
    """Asks sessions and waits for the answers."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions

    def wait(self, number: int = 1) -> list[Reply]:
        found: list[Reply] = []
        deadline = time.monotonic() + 120
        while len(found) < number and time.monotonic() < deadline:
            found += self.sessions.collect(1.0)
        assert len(found) == number, found
        return found

    def open(self, rollout: Any, **columns: Any) -> Reply:
        self.sessions.open(rollout, columns)
        return self.wait()[0]

    def call(self, rollout: Any, name: str, **arguments: Any) -> Reply:
        self.sessions.call(rollout, name, arguments)
        return self.wait()[0]

    def end(self, rollout: Any) -> Reply:
        self.sessions.end(rollout)
        return self.wait()[0]


@pytest.fixture
def make() -> Iterator[Callable[..., Player]]:
    """Makes players; at the end as many processes and open files are there as at the start."""
    processes, files = descendants(), len(os.listdir("/proc/self/fd"))
    made: list[Sessions] = []

    def make(tools: Any = (), environments: Any = None, **keys: Any) -> Player:
        section = EnvironmentSection(**{"timeout_seconds": 20.0, "memory_gib": 0.5, **keys})
        made.append(Sessions(tools, environments or {}, section))
        return Player(made[-1])

    yield make
    for sessions in made:
        sessions.close()
    for pid in descendants() - processes:
        assert gone(pid)
    assert len(os.listdir("/proc/self/fd")) == files


# ---- what is answered


def test_a_rollout_with_an_environment_from_its_reset_to_its_reward(
    make: Callable[..., Player],
) -> None:
    player = make([add], {"game": Game})
    assert player.open("r", answer=7, first="Guess.", prompt="p", environment="e").value == "Guess."
    assert [player.call("r", "guess", number=number).value for number in (3, 7)] == [
        "wrong",
        "right",
    ]
    assert player.call("r", "add", a=2, b=3).value == "5"
    assert player.call("r", "wait").value == "later"
    player.sessions.respond("r", "more")
    player.sessions.respond("r", "bye")
    assert [(reply.what, reply.value, reply.kind) for reply in player.wait(2)] == [
        ("respond", "MORE", ""),
        ("respond", None, ""),
    ]
    ended = player.end("r")
    assert ended.value == {
        "reward": 1.0,
        "state": {"answer": 7, "guesses": [3, 7], "resets": 1, "array": [0, 1]},
    }


def test_the_environment_and_its_process_are_used_again_after_a_reset(
    make: Callable[..., Player],
) -> None:
    player = make((), {"game": Game})
    seen = []
    for rollout in range(3):
        player.open(rollout)
        seen.append(player.call(rollout, "process").value)
        assert player.end(rollout).value["state"]["resets"] == rollout + 1
    assert len(set(seen)) == 1
    for rollout in range(2):
        player.open(rollout)
    assert player.call(0, "process").value != player.call(1, "process").value


def test_tools_without_an_environment_need_no_process_to_begin_and_to_end(
    make: Callable[..., Player],
) -> None:
    player = make([add, later])
    assert player.open("r", question="?").value is None
    for _ in range(3):
        player.sessions.call("r", "add", {"a": 1, "b": 1})
    player.sessions.call("r", "later", {})
    assert [reply.value for reply in player.wait(4)] == ["2", "2", "2", "later"]
    assert player.end("r").value == {"reward": None, "state": {}}
    assert player.sessions.collect(60.0) == []  # nothing is to come, so it does not wait


def test_async_environments_share_processes(make: Callable[..., Player]) -> None:
    player = make((), {"game": AsyncGame})
    for rollout in range(SHARED + 1):
        player.sessions.open(rollout, {"answer": rollout})
    player.wait(SHARED + 1)
    for rollout in range(SHARED + 1):
        player.sessions.call(rollout, "process", {})
        player.sessions.call(rollout, "guess", {"number": rollout})
    replies = player.wait(2 * (SHARED + 1))
    assert {reply.value for reply in replies if reply.name == "guess"} == {"right"}
    assert len({reply.value for reply in replies if reply.name == "process"}) == 2
    assert player.end(0).value == {"reward": 1.0, "state": {"answer": 0}}


def test_the_column_environment_chooses_among_several(make: Callable[..., Player]) -> None:
    player = make((), {"one": Game, "two": AsyncGame})
    player.open("a", environment="one")
    player.open("b", environment="two")
    assert [*player.sessions.functions({"environment": "one"})] == [
        "attempt",
        "guess",
        "process",
        "sockets",
        "wait",
    ]
    assert player.call("b", "attempt", what="none").kind == "unknown tool"
    with pytest.raises(
        ShoalError, match="column 'environment' holds 'three': expected one of one, two"
    ):
        player.sessions.open("c", {"environment": "three"})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"what": "bytes"}, r"b'\xff\x00'"),
        ({"what": "surrogate"}, "a?b"),
        ({"what": "none"}, "None"),
        ({"what": "parts"}, "one two"),
        ({"what": "list"}, "[1, 2]"),
    ],
)
@pytest.mark.parametrize("owner", ["tool", "environment"])
def test_a_result_is_text_as_trl_writes_it(
    make: Callable[..., Player], owner: str, arguments: Any, text: str
) -> None:
    player = make([attempt]) if owner == "tool" else make((), {"game": Game})
    player.open("r")
    assert player.call("r", "attempt", **arguments).value == text


def test_a_process_holds_no_socket_of_another(make: Callable[..., Player]) -> None:
    """Those that start at the same time, too: else one could write into what another answers."""
    player = make((), {"game": Game})
    for rollout in range(6):
        player.sessions.open(rollout, {})
    player.wait(6)
    for rollout in range(6):
        player.sessions.call(rollout, "sockets", {})
    held = [set(json.loads(reply.value)) for reply in player.wait(6)]
    common = set.intersection(*held)
    assert [len(one - common) for one in held] == [1] * 6


# ---- what fails, and whom it harms


NOT_FATAL = [
    ({"what": "raise"}, "raised", "ValueError: no such thing"),
    ({"what": "exit"}, "raised", "SystemExit: 3"),
    ({"wat": 1}, "raised", "TypeError: .*unexpected keyword argument 'wat'"),
    ({"what": "recurse", "number": 1}, "raised", "RecursionError"),
    ({"what": "nest"}, "raised", "Recursion"),
]
DEADLY = [
    ({"what": "die"}, "died", "exit code 3"),
    ({"what": "killed"}, "died", "SIGKILL"),
    ({"what": "hang"}, "timed out", "longer than environment.timeout_seconds=0.5"),
    ({"what": "spoil"}, "died", ""),
    ({"what": "spoil deep"}, "died", ""),
    ({"what": "spoil long"}, "died", ""),
    ({"what": "allocate"}, "died", "environment.memory_gib is the limit"),
]


@pytest.mark.parametrize("owner", ["tool", "environment"])
def test_a_call_that_fails_is_answered_and_its_rollout_goes_on(
    make: Callable[..., Player], owner: str
) -> None:
    player = make([attempt, add]) if owner == "tool" else make([add], {"game": Game})
    player.open("r")
    for arguments, kind, text in NOT_FATAL:
        reply = player.call("r", "attempt", **arguments)
        assert (reply.kind, reply.fatal) == (kind, False)
        assert (
            list(json.loads(reply.value)) == ["error"]
            and json.loads(reply.value)["error"] == reply.error
        )
        assert "\n" not in reply.error and re.match(text, reply.error)
    unknown = player.call("r", "attemt")
    assert (unknown.kind, unknown.value) == (
        "unknown tool",
        '{"error": "there is no tool \'attemt\', did you mean attempt?"}',
    )
    assert player.call("r", "add", a=1, b=1).value == "2"
    assert not player.end("r").kind


@pytest.mark.parametrize(("arguments", "kind", "text"), DEADLY)
def test_what_ends_its_process_ends_one_session_of_an_environment_and_none_of_a_tool(
    make: Callable[..., Player], arguments: Any, kind: str, text: str
) -> None:
    player = make([attempt], {"game": Own}, timeout_seconds=0.5, memory_gib=0.5)
    player.open("bad")
    player.open("good", answer=4)
    reply = player.call("good", "attempt", **arguments)
    assert (reply.kind, reply.fatal) == (kind, False)
    assert text in reply.error
    reply = player.call("bad", "act", **arguments)
    assert (reply.kind, reply.fatal) == (kind, True)
    assert text in reply.error
    assert player.call("good", "guess", number=4).value == "right"
    player.open("bad")  # anew
    assert player.end("bad").value["state"]["resets"] == 1
    assert player.end("good").value["reward"] == 0.5


def test_a_process_that_is_killed_while_it_waits_ends_its_session(
    make: Callable[..., Player],
) -> None:
    player = make((), {"game": Game})
    player.open("r")
    os.kill(pid := int(player.call("r", "process").value), signal.SIGKILL)
    assert gone(pid)
    reply = player.call("r", "guess", number=1)
    assert (reply.kind, reply.fatal) == ("died", True)
    assert player.open("r").kind == ""


@pytest.mark.slow
def test_an_async_environment_that_hangs_or_blocks_its_process_harms_no_other(
    make: Callable[..., Player],
) -> None:
    player = make((), {"game": AsyncGame}, timeout_seconds=1.5)
    for rollout in ("hang", "block", "good"):
        player.open(rollout)
    process = player.call("good", "process").value
    for rollout in ("hang", "block"):
        player.sessions.call(rollout, rollout, {})
    player.sessions.call("good", "guess", {"number": 0})
    kinds = {}
    for reply in player.wait(3):
        kinds[reply.rollout] = (reply.kind, reply.fatal)
    assert kinds == {"hang": ("timed out", True), "block": ("timed out", True), "good": ("", False)}
    assert player.call("good", "process").value == process


@pytest.mark.slow
def test_an_async_environment_that_never_gives_way_ends_with_its_process(
    make: Callable[..., Player],
) -> None:
    player = make((), {"game": AsyncGame}, timeout_seconds=0.5)
    player.open("bad")
    reply = player.call("bad", "swallow")
    assert (reply.kind, reply.fatal) == ("died", True)
    assert "a call blocked the event loop that it shares" in reply.error
    assert player.open("bad").kind == ""


def test_a_flood_is_cut_in_the_process_of_the_call(make: Callable[..., Player]) -> None:
    player = make([attempt], result_bytes=1001)
    player.open("r")
    reply = player.call("r", "attempt", what="flood", number=50_000_000)
    assert reply.value == "ü" * 500  # no half of a letter
    assert reply.cut == 100_000_000 - 1001


@pytest.mark.parametrize("owner", ["tool", "environment"])
def test_children_that_are_left_end_with_the_rollout(
    make: Callable[..., Player], owner: str
) -> None:
    player = make([attempt]) if owner == "tool" else make((), {"game": Game})
    player.open("r")
    children = json.loads(player.call("r", "attempt", what="family").value)
    assert len(children) == 2
    if owner == "environment":  # they may belong to it, as a browser
        for pid in children:
            assert Path(f"/proc/{pid}").exists()
    player.end("r")
    for pid in children:
        assert gone(pid)


@pytest.mark.slow
def test_an_episode_has_a_limit_of_its_own(make: Callable[..., Player]) -> None:
    player = make([attempt], {"game": AsyncGame}, episode_seconds=0.4)
    player.open("r")
    reply = player.call("r", "hang")
    assert (reply.kind, reply.fatal) == ("timed out", True)
    assert reply.error == "it took longer than environment.episode_seconds=0.4"
    player.open("s")
    assert player.call("s", "attempt", what="hang").fatal  # though a tool
    assert player.open("t").kind == ""


def test_arguments_that_are_too_deep_are_answered(make: Callable[..., Player]) -> None:
    player = make([add])
    player.open("r")
    deep = functools.reduce(lambda inner, _: [inner], range(100_000), 1)
    assert (
        player.call("r", "add", a=deep, b=1).error
        == "ValueError: the arguments cannot be sent: RecursionError"
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"reset": lambda self: 5}, "TypeError: reset returned 5: expected a text or None"),
        ({"reset": lambda self: 1 / 0}, "ZeroDivisionError: division by zero"),
        (
            {"reset": lambda self, answer: None},
            "TypeError: .*missing 1 required positional argument: 'answer'",
        ),
        ({"reset": lambda self: None, "__init__": lambda self: 1 / 0}, "ZeroDivisionError"),
    ],
)
def test_an_environment_that_cannot_begin_is_a_fatal_reply(
    make: Callable[..., Player], body: Any, text: str
) -> None:
    player = make((), {"bad": type("Bad", (), body)})
    reply = player.open("r")
    assert (reply.kind, reply.fatal, reply.value) == ("raised", True, None)
    assert re.match(text, reply.error)


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (lambda self: float("nan"), "get_reward returned nan: expected a finite number or None"),
        (lambda self: "high", "could not convert string to float: 'high'"),
        (lambda self: 1 / 0, "division by zero"),
    ],
)
def test_a_reward_that_is_no_number_is_a_fatal_reply(
    make: Callable[..., Player], reward: Any, text: str
) -> None:
    player = make((), {"bad": type("Bad", (Game,), {"get_reward": reward})})
    player.open("r")
    reply = player.end("r")
    assert (reply.kind, reply.fatal) == ("raised", True)
    assert text in reply.error
    assert player.open("r").kind == ""


class Pays(Game):
    def respond(self, message: str) -> str:
        values = {"half": np.float32(0.5), "true": True, "nan": np.nan, "text": "1", "none": None}
        self.reward = values[message]
        return "paid"


def test_the_reward_of_a_turn_is_any_number_of_python_or_numpy(make: Callable[..., Player]) -> None:
    player = make((), {"game": Pays})
    player.open("r")
    rewards = []
    for message in ("half", "true", "nan", "text", "none"):
        player.sessions.respond("r", message)
        rewards += [reply.reward for reply in player.wait()]
    assert rewards[:2] + rewards[3:] == [0.5, 1.0, None, None]
    assert rewards[2] is not None and math.isnan(rewards[2])


def test_words_that_are_no_text_are_a_fatal_reply(make: Callable[..., Player]) -> None:
    player = make((), {"game": Game})
    player.open("r")
    player.sessions.respond("r", "odd")
    (reply,) = player.wait()
    assert (reply.error, reply.fatal) == (
        "TypeError: respond returned 5: expected a text or None",
        True,
    )


@pytest.mark.slow
def test_a_dropped_rollout_is_not_answered_and_can_be_opened_anew(
    make: Callable[..., Player],
) -> None:
    player = make((), {"game": Game}, timeout_seconds=0.5)
    player.open("r")
    player.sessions.call("r", "attempt", {"what": "hang"})
    player.sessions.drop("r")
    player.sessions.drop("never opened")
    assert player.open("r").value is None
    assert player.end("r").what == "end"
    while player.sessions._calls:
        assert player.sessions.collect(1.0) == []
    player.sessions.open("s", {})
    player.sessions.drop("s")
    assert player.sessions.collect(20.0) == []


def held_by(pid: int) -> tuple[int, int]:
    """The open files of a process, and its children."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return len(os.listdir(f"/proc/{pid}/fd")), len(found)


@pytest.mark.slow
def test_after_many_faults_the_supervisor_holds_what_it_held_before(
    make: Callable[..., Player],
) -> None:
    player = make([attempt], {"game": Own}, timeout_seconds=2.0, result_bytes=100)
    faults = ["raise", "die", "killed", "flood", "bytes", "nest", "family", "spoil", "none"]
    held, kinds = [], Counter[str]()
    for step in range(8):
        for rollout, fault in enumerate(faults):
            player.sessions.open(rollout, {})
            player.sessions.call(
                rollout, "attempt" if step % 2 else "act", {"what": fault, "number": 1_000_000}
            )
            player.sessions.respond(rollout, "more")
            player.sessions.end(rollout)
        while player.sessions._sessions:
            kinds.update(reply.kind for reply in player.sessions.collect(1.0))
        held.append(held_by(player.sessions._pool.pid))
    assert kinds["died"] == 8 * 3 and kinds["raised"] == 8 * 2 and kinds["timed out"] == 0
    assert held[-1][0] <= held[1][0] + 2 and held[-1][1] <= held[1][1] + 2


# ---- what cannot be


def test_two_tools_of_one_name_are_an_error() -> None:
    with pytest.raises(ShoalError, match="there are two tools of the name 'add'; rename one"):
        Sessions([add, add], {}, EnvironmentSection())
    with pytest.raises(ShoalError, match="there are two tools of the name 'guess'"):
        Sessions([type("guess", (), {})], {"game": Game}, EnvironmentSection())


def test_a_factory_that_is_none_is_an_error() -> None:
    with pytest.raises(
        ShoalError, match=r"'<lambda>' raised ZeroDivisionError: division by zero: it must make an"
    ):
        EnvironmentKind.of("x", lambda: 1 / 0)
    with pytest.raises(ShoalError, match=r"'dict': dict has no method reset\(\*\*columns\)"):
        EnvironmentKind.of("x", dict)
    assert EnvironmentKind.of("x", lambda: Game()).type is Game


def test_a_column_that_cannot_be_sent_is_an_error(make: Callable[..., Player]) -> None:
    player = make((), {"game": Game})
    with pytest.raises(
        ShoalError, match="column 'lock' holds a lock, which cannot be sent to another process"
    ):
        player.sessions.open("r", {"lock": threading.Lock()})
    assert player.open("r").kind == ""


def test_a_supervisor_that_is_killed_is_replaced_and_its_sessions_are_over(
    make: Callable[..., Player],
) -> None:
    player = make([add], {"game": Game})
    player.open("r")
    os.kill(pid := player.sessions._pool.pid, signal.SIGKILL)
    assert gone(pid)
    reply = player.call("r", "guess", number=1)
    assert (reply.kind, reply.fatal) == ("died", True)
    assert "the process that starts workers was killed" in reply.error
    assert player.open("s", answer=3).kind == ""
    assert player.call("s", "guess", number=3).value == "right"
    assert player.call("s", "add", a=1, b=1).value == "2"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_tool_that_kills_its_supervisor_is_answered_and_its_rollout_goes_on(
    make: Callable[..., Player], number: int
) -> None:
    player = make([kill_parent, add])
    for rollout in ("a", "b"):
        player.open(rollout)
    for _ in range(3):
        reply = player.call("a", "kill_parent", number=int(number))
        assert (reply.kind, reply.fatal) == ("died", False)
        assert (
            player.call("a", "add", a=1, b=1).value
            == player.call("b", "add", a=1, b=1).value
            == "2"
        )


def test_a_supervisor_that_ends_as_it_starts_is_an_error() -> None:
    def enter(end):
        return None

    sessions = Sessions([add], {}, EnvironmentSection(), exec_supervisor=enter)
    sessions.open("r", {})
    sessions.collect()
    with pytest.raises(
        ShoalError, match="the process that starts sessions of environments ends as it starts"
    ):
        sessions.call("r", "add", {"a": 1, "b": 1})
        sessions.collect(20.0)
    sessions.close()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sessions]:
    """Sessions whose supervisor lives, but neither reads nor sends."""
    monkeypatch.setattr(pool, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(process, "SEND_SECONDS", 1.0)
    sessions = Sessions([add], {}, EnvironmentSection())
    sessions.open("r", {})
    sessions.collect()
    os.kill(sessions._pool.pid, signal.SIGSTOP)
    yield sessions
    sessions.close()
    assert gone(sessions._pool.pid)


def test_a_supervisor_that_says_nothing_is_stuck(stopped: Sessions) -> None:
    stopped.call("r", "add", {"a": 1, "b": 1})
    with pytest.raises(ShoalError, match="has not answered for 1 s: it is stopped or stuck"):
        stopped.collect(20.0)


def test_a_supervisor_that_reads_nothing_is_stuck_and_has_not_ended(stopped: Sessions) -> None:
    with pytest.raises(ShoalError, match="has not answered for 1 s: it is stopped or stuck"):
        stopped.call("r", "add", {"a": "5" * 10_000_000, "b": 1})
