"""Environments as TRL has them, and what the processes of sessions do with them: reset, tools,
reward, state."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from shoal.records import ShoalError
from shoal.text import describe_error, shorten
from shoal.workers.process import Blocked, Header, children, end_copies_of_loop, ends_copies
from shoal.workers.rollout_function import RolloutCall

NOT_TOOLS = ("reset", "respond", "get_reward", "close")
OPTIONAL_COLUMNS = ("prompt", "environment", "row")
"""Given to a `reset` that takes them; every other column of the data is given to each."""
STATE_BYTES = 1 << 20
"""Of an environment's attributes, as JSON, that reward functions get; what is beyond is left
out."""


@dataclass(frozen=True, eq=False)
class EnvironmentKind:
    """What makes environments, and the class that they are of."""

    name: str  # in the mapping of environments
    factory: Callable[[], Any]
    type: type
    tools: Mapping[str, Callable[..., Any]]  # its public methods in TRL's order
    shares: bool  # its methods are all async

    @staticmethod
    @functools.cache
    def of(name: str, factory: Callable[[], Any]) -> EnvironmentKind:
        """Finds the class; a factory that is a function is called once for it. ShoalError for what
        is no factory."""
        made: type = factory if inspect.isclass(factory) else object
        if made is object:
            try:
                with ends_copies():
                    made = type(instance := factory())
                    getattr(instance, "close", lambda: None)()
            except Exception as error:
                raise ShoalError(
                    f"environment.factory {name_of(factory)!r} raised {describe_error(error)}: it "
                    "must make an environment, without arguments",
                    "environment.factory",
                ) from error
        if not callable(getattr(made, "reset", None)):
            raise ShoalError(
                f"environment.factory {name_of(factory)!r}: {made.__name__} has no method "
                "reset(**columns), which begins a rollout",
                "environment.factory",
            )
        methods = inspect.getmembers(made, inspect.isroutine)
        tools = {
            key: one for key, one in methods if not key.startswith("_") and key not in NOT_TOOLS
        }
        acts = [*tools.values(), *(one for key, one in methods if key in ("reset", "respond"))]
        return EnvironmentKind(
            name, factory, made, tools, all(map(inspect.iscoroutinefunction, acts))
        )

    @property
    def responds(self) -> bool:
        """True if it answers in words."""
        return hasattr(self.type, "respond")

    @property
    def asks(self) -> bool:
        """True for a rollout function, whose words are requests."""
        return issubclass(self.type, RolloutCall)

    def arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that `reset` is called with."""
        parameters = inspect.signature(self.type.reset).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        return {
            name: value
            for name, value in columns.items()
            if takes_all or name in parameters or name not in OPTIONAL_COLUMNS
        }


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


class Environments:
    """The environments that a process of sessions holds, and the tools that it calls."""

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        kinds: Mapping[str, EnvironmentKind],
        result_bytes: int,
    ) -> None:
        self.tools, self.kinds, self.result_bytes = tools, kinds, result_bytes
        self.live: dict[int, Any] = {}  # environments by session
        self.spare: dict[str, list[Any]] = {}  # to be reset
        self.scopes: dict[
            asyncio.Timeout, float
        ] = {}  # limits of the calls that share this process's loop
        self.runner: asyncio.Runner | None = None

    def call(self, header: Header, body: bytes) -> Header:
        """One call in a process of its own, which is not used again if it has children when no
        session needs it."""
        began = time.perf_counter()
        try:
            value = self._act(header, body)
            if inspect.iscoroutine(value):
                if self.runner is None:
                    self.runner = asyncio.Runner()
                    end_copies_of_loop(self.runner.get_loop())
                value = self.runner.run(value)
            reply = self._reply(header, value)
        except BaseException as error:
            reply = self._failed(header, error)
        if not self.live and children():
            reply["spent"] = True
        return {**reply, "seconds": time.perf_counter() - began}

    async def call_async(self, header: Header, body: bytes) -> Header:
        """One call on an event loop that others share."""
        began, scope = time.perf_counter(), asyncio.timeout(header["seconds"])
        try:
            async with scope:
                self.scopes[scope] = header["seconds"]
                value = self._act(header, body)
                value = await value if inspect.isawaitable(value) else value
            reply = self._reply(header, value)
        except BaseException as error:  # a KeyboardInterrupt here is the call's own
            reply = self._failed(header, Blocked() if scope.expired() else error)
            if isinstance(error, Blocked):  # the others could not end in time
                for other in [one for one in self.scopes if one is not scope and not one.expired()]:
                    other.reschedule(asyncio.get_running_loop().time() + self.scopes[other])
        self.scopes.pop(scope, None)
        return {**reply, "seconds": time.perf_counter() - began}

    def _act(self, header: Header, body: bytes) -> Any:
        """What the call returns, perhaps an awaitable."""
        what, session, kind = header["what"], header["session"], header["kind"]
        if what == "open":
            columns = ForkingPickler.loads(body)  # pyright: ignore[reportAttributeAccessIssue]
            spare = self.spare.get(kind)
            environment = self.live[session] = spare.pop() if spare else self.kinds[kind].factory()
            return environment.reset(**columns)
        if isinstance(arguments := json.loads(body), str):
            raise ValueError(arguments)
        if what == "end":
            return getattr(self.live[session], "get_reward", lambda: None)()
        name = header["name"] or what
        return (getattr(self.live[session], name) if session else self.tools[name])(**arguments)

    def _reply(self, header: Header, value: Any) -> Header:
        """The reply with what a call returned. TypeError for what it may not return."""
        what, session = header["what"], header["session"]
        if what == "end":
            if not (value is None or math.isfinite(value := float(value))):
                raise TypeError(f"get_reward returned {value}: expected a finite number or None")
            environment = self.live.pop(session)
            self.spare.setdefault(header["kind"], []).append(environment)
            return {"value": {"reward": value, "state": state_of(environment)}}
        if what != "call" and not (value is None or isinstance(value, str)):
            raise TypeError(
                f"{'reset' if what == 'open' else 'respond'} returned {shorten(repr(value))}: "
                "expected a text or None"
            )
        if what != "call" and value is None:
            return {"value": None} | self._reward(session)
        if (
            isinstance(value, list)
            and value
            and all(isinstance(one, Mapping) and "text" in one for one in value)
        ):
            value = "".join(str(one["text"]) for one in value)  # parts of a message
        data = str(value).encode("utf-8", "replace")
        most = len(data) if isinstance(self.live.get(session), RolloutCall) else self.result_bytes
        return {
            "value": data[:most].decode("utf-8", "ignore"),
            "cut": max(0, len(data) - most),
        } | self._reward(session)

    def _reward(self, session: int) -> Header:
        """The turn's reward: the environment's attribute `reward`, where it has one."""
        value = getattr(self.live.get(session), "__dict__", {}).get("reward")
        return (
            {"reward": float(value)}
            if isinstance(value, int | float) and math.isfinite(value)
            else {}
        )

    def _failed(self, header: Header, error: BaseException) -> Header:
        kind, text, spent = (
            "raised",
            shorten(describe_error(error), 300),
            isinstance(error, MemoryError),
        )
        if isinstance(error, Blocked):
            kind = "timed out"
        elif header["what"] != "open" and header["session"] and header["session"] not in self.live:
            kind, text = "died", "while it waited"
        elif spent:
            kind, text = "died", "MemoryError (environment.memory_gib is the limit)"
        if header["what"] != "call" or kind != "raised":
            self.live.pop(header["session"], None)
        return {"kind": kind, "text": text, "spent": spent}


def _is_deep(value: Any, most: int = 32) -> bool:
    """True for what nests deeper than the processes between here and the trainer can read."""
    inner = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return not most or any(_is_deep(one, most - 1) for one in inner)


def state_of(environment: Any) -> dict[str, Any]:
    """An environment's attributes without `_`, as far as JSON holds them, arrays as lists."""
    found, left = {}, STATE_BYTES
    for name, value in getattr(environment, "__dict__", {}).items():
        try:
            text = json.dumps(value, default=lambda one: one.tolist())
        except (TypeError, ValueError, AttributeError, RecursionError):
            continue
        if not name.startswith("_") and len(text) <= left and not _is_deep(value):
            found[name], left = json.loads(text), left - len(text)
    return found
