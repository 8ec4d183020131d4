"""Sessions of rollouts: their tools and environments, which run in supervised worker processes and
are asked without waiting.

    player --open, call, respond, end--> Sessions --> supervisor
                                                  --> a process of the environment, or any for a
                                                      tool
    player <----------collect----------- Reply

An environment has a process to itself while a rollout uses it; if all its methods are `async`,
`SHARED` environments share one process. Process and environment are used again by later rollouts,
after a reset. Tools that are functions hold no state, so any process runs them.
"""

from __future__ import annotations

import inspect
import json
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.config.sections.task import EnvironmentSection
from shoal.records import ShoalError
from shoal.text import did_you_mean, exact, failed_call, shorten
from shoal.workers.environments import EnvironmentKind, Environments, name_of
from shoal.workers.pool import Limits, WorkerPool, WorkersLost
from shoal.workers.process import AsyncHandler, Handler, Header, pickled

SHARED = 16
"""How many environments share a process if all their methods are `async`."""


@dataclass(frozen=True)
class Reply:
    """The reply to one call of a rollout. The calls of a rollout run one after the other, in the
    order in which they were queued.

    >>> Reply(
    ...     "r1", "call", "add", value='{"error": "TypeError: ..."}', kind="raised",
    ...     error="TypeError: ...",
    ... )
    """

    rollout: Hashable
    what: str  # open, call, respond or end
    name: str = ""  # of the tool
    # open, respond: str | None; call: the tool's text; end: {"reward": float | None, "state": dict}
    value: Any = None
    # How the call failed: "raised", "unknown tool", "timed out" or "died"; "" if it returned.
    kind: str = ""
    error: str = ""  # one line
    fatal: bool = False  # the session is over: nothing more may be asked of it
    cut: int = 0  # bytes of the tool's text that were cut, beyond environment.result_bytes
    seconds: float = 0.0  # how long the call took
    reward: float | None = None  # reward of this turn, if the environment gave one


def supervisor_settings(
    tools: Mapping[str, Callable[..., Any]],
    kinds: Mapping[str, EnvironmentKind],
    section: EnvironmentSection,
) -> tuple[Handler, Limits, AsyncHandler]:
    """Returns what a `Supervisor` of sessions is made with: the handler of calls, the limits of
    workers, and the handler of calls on a shared event loop. `tools` maps names to functions,
    `kinds` names to kinds of environments. The limits are `environment.workers` processes for tools
    that are functions, `environment.timeout_seconds` for a call, and `environment.memory_gib` for a
    worker. Starts nothing."""
    held = Environments(tools, kinds, section.result_bytes)
    limits = Limits(section.workers, section.timeout_seconds, int(section.memory_gib * 2**30))
    return held.call, limits, held.call_async


@dataclass(eq=False)
class _Session:
    """The session of one rollout, with its calls that wait and the one that runs."""

    rollout: Hashable
    kind: EnvironmentKind | None
    number: int
    seat: int = 0  # number of the environment's process; 0 without an environment
    # Calls that wait: what is called, the tool's name, the body.
    queue: deque[tuple[str, str, bytes]] = field(default_factory=deque)
    # The running call: what is called, the tool's name, its limit in seconds.
    call: tuple[str, str, float] | None = None
    seconds: float = 0.0  # that the session's calls have taken so far
    dropped: bool = False


class Sessions:
    """The sessions of all rollouts. It is used from one thread, which polls it for replies.

    >>> sessions.open("r1", {"question": "2 + 3?"})
    >>> sessions.call("r1", "add", {"a": 2, "b": 3})
    >>> [reply.value for reply in sessions.collect(1.0)]
    [None, '5']

    If a tool raises, is unknown or hangs, the reply is `{"error": ...}` and the rollout goes on. If
    an environment hangs, dies, or raises elsewhere than in a tool, its session is over:
    `Reply.fatal`. If a tool or the system kills the supervisor, it is replaced: calls of tools that
    are running fail, and sessions of environments are over.

    Whoever makes the sessions closes them, after the fleet that uses them: in a run the `Job`.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        environments: Mapping[str, Callable[[], Any]],
        section: EnvironmentSection,
        exec_supervisor: Callable[[socket.socket], Any] | None = None,
    ) -> None:
        """Forks the supervisor, best before JAX starts its threads. `environments` maps names to
        factories; a factory that is not a class is called once here, to find the class.
        `exec_supervisor` is called in the forked process with its socket to this one, and executes
        another program that runs the supervisor, such as one in a sandbox; None: the forked process
        runs it. ShoalError for two tools of the same name, and for an object that is not an
        environment."""
        self.section = section
        self.tools = {name_of(tool): tool for tool in tools}
        self.kinds: dict[str, EnvironmentKind] = {}
        for name, factory in environments.items():
            self.kinds[name] = EnvironmentKind.of(name, factory)
        tool_names = [name_of(tool) for tool in tools]
        _require_distinct(tool_names)
        for kind in self.kinds.values():
            _require_distinct(tool_names + list(kind.tools))
        self._sessions: dict[Hashable, _Session] = {}
        self._calls: dict[int, _Session] = {}
        self._seats: dict[EnvironmentKind, list[int]] = {kind: [] for kind in self.kinds.values()}
        self._load: Counter[int] = Counter()  # seat -> number of its open sessions
        self._done: list[Reply] = []
        self._numbers = 0  # the last number given to a call, session or seat
        handle, limits, handle_async = supervisor_settings(self.tools, self.kinds, section)
        self._pool = WorkerPool(
            handle, limits, handle_async, exec_supervisor=exec_supervisor, restarts=True
        )

    def close(self) -> None:
        """Ends all processes, and everything that they started."""
        self._pool.close()

    def kind_of(self, columns: Mapping[str, Any]) -> EnvironmentKind | None:
        """Returns the kind of environment for a data row; None if the task has no environments. If
        there are several, the row's column `environment` names its kind; ShoalError if it names
        none of them. If there is only one, the column is not read."""
        if not self.kinds:
            return None
        if len(self.kinds) == 1:
            (kind,) = self.kinds.values()
            return kind
        name = columns.get("environment")
        if name not in self.kinds:
            raise ShoalError(
                f"column 'environment' holds {name!r}: expected one of {', '.join(self.kinds)}",
                "environment.factory",
            )
        return self.kinds[name]

    def functions(self, columns: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
        """Returns name -> function of the tools that rollouts of a row may call: the task's tools,
        then the methods of the row's environment, as functions of its class. ShoalError if there
        are several environments and the row names none of them."""
        functions = dict(self.tools)
        environment_kind = self.kind_of(columns)
        if environment_kind is not None:
            functions.update(environment_kind.tools)
        return functions

    def open(self, rollout: Hashable, columns: Mapping[str, Any]) -> None:
        """Begins a rollout's session: queues the call `reset(**columns)` of its environment, whose
        result `collect` returns as a `Reply` (None without an environment). ShoalError for a column
        that cannot be sent to another process, ValueError if the session is open. ShoalError also
        if there are several environments and `columns` names none of them."""
        if rollout in self._sessions:
            raise ValueError(f"the session of {rollout!r} is open")
        kind = self.kind_of(columns)
        session = _Session(rollout, kind, self._new_number())
        body = b""
        if kind is not None:
            arguments = kind.arguments(columns)
            parts = [(f"column {name!r}", value) for name, value in arguments.items()]
            body = pickled(arguments, parts, "leave it out")
            session.seat = self._free_seat(kind)
            self._load[session.seat] += 1
        self._sessions[rollout] = session
        self._queue_call(session, "open", "", body)

    def _free_seat(self, kind: EnvironmentKind) -> int:
        """Returns the seat (a number; all calls of a seat go to one worker process) of a worker
        process for one more environment of this kind: one that has room, else a new one."""
        most = SHARED if kind.shares else 1
        for seat in self._seats[kind]:
            if self._load[seat] < most:
                return seat
        seat = self._new_number()
        self._seats[kind].append(seat)
        return seat

    def call(self, rollout: Hashable, name: str, arguments: Mapping[str, Any]) -> None:
        """Queues a call of a tool by its name; `collect` returns the `Reply`. If JSON cannot hold
        the arguments, the reply says that the call failed. KeyError if the rollout has no open
        session. An unknown tool is no error here either: the `Reply` has the kind "unknown
        tool"."""
        try:
            body = json.dumps(dict(arguments))
        except (TypeError, ValueError, RecursionError) as error:
            # A text in place of a dict: the worker raises it, so the call fails.
            body = json.dumps(f"the arguments cannot be sent: {type(error).__name__}")
        self._queue_call(self._sessions[rollout], "call", name, body.encode())

    def respond(self, rollout: Hashable, message: str) -> None:
        """Queues the call `respond(message)` of the environment, with the model's text. The value
        of its `Reply` is the environment's answer, None if the rollout is over. KeyError if the
        rollout has no open session. Without an environment it is None too. An environment without
        `respond` fails the call."""
        body = json.dumps({"message": message}).encode()
        self._queue_call(self._sessions[rollout], "respond", "", body)

    def end(self, rollout: Hashable) -> None:
        """Queues the end of a session. The value of its `Reply` has the environment's `reward`
        (None if it has none) and `state`. KeyError if the rollout has no open session. Without an
        environment the reward is None and the state {}."""
        self._queue_call(self._sessions[rollout], "end")

    def drop(self, rollout: Hashable) -> None:
        """Ends a session without a `Reply`, if it is open: its queued calls are not made. The
        rollout may be opened again at once."""
        session = self._sessions.pop(rollout, None)
        if session is not None:
            session.dropped = True
            session.queue.clear()
            # Its environment is freed for later rollouts; the reply is thrown away.
            self._queue_call(session, "end")

    def collect(self, seconds: float = 0.0) -> list[Reply]:
        """Returns the replies that have arrived, each once. Waits at most `seconds` for the first,
        and not at all if no call is running. ShoalError if the supervisor has ended or is stuck."""
        deadline = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            seconds_left = 0.0
            if self._calls and not self._done:
                seconds_left = max(0.0, deadline - now)
            try:
                replies = self._pool.wait(seconds_left)
            except WorkersLost as lost:
                raise _error_of_lost(lost) from None
            for call, reply in replies:
                self._enter_reply(self._calls.pop(call), reply)
            if self._done or not self._calls or now >= deadline:
                done, self._done = self._done, []
                return done

    # ---- calls

    def _new_number(self) -> int:
        """Returns a number for a call, a session or a seat that no other has."""
        self._numbers += 1
        return self._numbers

    def _queue_call(
        self, session: _Session, what: str, name: str = "", body: bytes = b"{}"
    ) -> None:
        """Queues a call of a session, and sends it if the session has no other call running. `what`
        is open, call, respond or end, `name` that of the tool ("" for the others); `body` has the
        arguments, pickled for `open`, else in JSON."""
        session.queue.append((what, name, body))
        self._send_next(session)

    def _send_next(self, session: _Session) -> None:
        """Sends the next queued call of a session, unless one is running. Replies itself to calls
        that need no process: of an unknown tool, beyond the session's time limit, or of a session
        without an environment."""
        if session.call or not session.queue:
            return
        what, name, body = session.queue.popleft()
        kind = session.kind
        seconds = self.section.timeout_seconds
        if what != "end":
            seconds = min(seconds, self.section.episode_seconds - session.seconds)
        session.call = what, name, seconds
        names = list(self.tools)
        if kind is not None:
            names += kind.tools
        if what == "call" and name not in names:
            near = did_you_mean(name, names, lists_all=True)
            text = f"there is no tool {shorten(name)!r}{near}"
            self._enter_reply(session, {"kind": "unknown tool", "text": text})
        elif seconds <= 0:
            self._enter_reply(session, {"kind": "timed out"})
        elif kind is None and not name:  # open, respond or end without an environment
            value = {"reward": None, "state": {}} if what == "end" else None
            self._enter_reply(session, {"value": value})
        else:
            self._submit(session, what, name, body, seconds)

    def _submit(self, session: _Session, what: str, name: str, body: bytes, seconds: float) -> None:
        """Submits a session's call to the pool. A tool that is a function runs in any worker, all
        else in the process of the session's environment. `what` is open, call, respond or end,
        `name` that of the tool ("" for the others), `seconds` is the time limit."""
        kind = session.kind
        header = {"what": what, "name": name, "seconds": seconds, "kind": kind and kind.name}
        if name in self.tools:  # a function without state: any process can run it
            header["session"] = seat = 0
            together = inspect.iscoroutinefunction(self.tools[name])
        else:
            header["session"] = session.number
            seat = session.seat
            together = kind is not None and kind.shares
        call = self._new_number()
        self._calls[call] = session
        try:
            self._pool.submit(call, header, body, together, seat, seconds)
        except WorkersLost as lost:
            raise _error_of_lost(lost) from None

    def _enter_reply(self, session: _Session, reply: Header) -> None:
        """Handles the pool's reply to the running call of a session: makes the `Reply` that
        `collect` returns, removes the session if it is over, and sends its next call. `reply` has
        `value`, or `kind` and `text` if the call failed, and `seconds`. Adds the call's seconds to
        the session's."""
        assert session.call
        what, name, limit = session.call
        session.call = None
        failure, error, value = reply.get("kind", ""), reply.get("text", ""), reply.get("value")
        timed_out = failure == "timed out"
        seconds = reply.get("seconds", limit if timed_out else 0.0)
        session.seconds += seconds
        # The limit is shorter than that of a call if it is the rest of the episode's time.
        episode_is_over = timed_out and limit < self.section.timeout_seconds
        if timed_out:
            key = "episode_seconds" if episode_is_over else "timeout_seconds"
            error = f"it took longer than environment.{key}={exact(getattr(self.section, key))}"
        elif failure == "died":
            error = f"it ended its process: {error}"
        if failure and what == "call":
            value = failed_call(error)
        # A tool that is a function holds nothing of the session: its failure ends no session.
        ended_environment = failure in ("timed out", "died") and name not in self.tools
        fatal = bool(failure) and (what != "call" or episode_is_over or ended_environment)
        if not session.dropped:
            self._done.append(
                Reply(
                    session.rollout,
                    what,
                    name,
                    value=value,
                    kind=failure,
                    error=error,
                    fatal=fatal,
                    cut=reply.get("cut", 0),
                    seconds=seconds,
                    reward=reply.get("reward"),
                )
            )
        if fatal or what == "end":
            session.queue.clear()
            # Seat 0, of sessions without an environment, is never filled: its number means nothing.
            self._load[session.seat] -= 1
            if self._sessions.get(session.rollout) is session:
                del self._sessions[session.rollout]
        self._send_next(session)


def _require_distinct(tool_names: Sequence[str]) -> None:
    """Raises ShoalError if two tools have the same name."""
    for name, number in Counter(tool_names).items():
        if number > 1:
            raise ShoalError(
                f"environment.tools: there are two tools of the name {name!r}; rename one",
                "environment.tools",
            )


def _error_of_lost(lost: WorkersLost) -> ShoalError:
    """Returns the error for a supervisor that answers no more: it ended before it began its work,
    or it has been silent for `lost.seconds`."""
    if lost.has_ended:
        return ShoalError(
            "the process that starts sessions of environments ends as it starts, killed from "
            "outside or because memory ran out; free some, or use fewer environment.rollouts"
        )
    return ShoalError(
        "the process that starts sessions of environments has not answered for "
        f"{lost.seconds:.0f} s: it is stopped or stuck; resume the run"
    )
