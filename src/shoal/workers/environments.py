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
        environment_type = _type_made_by(factory)
        if not callable(getattr(environment_type, "reset", None)):
            raise ShoalError(
                f"environment.factory {name_of(factory)!r}: {environment_type.__name__} has no "
                "method reset(**columns), which begins a rollout",
                "environment.factory",
            )
        tools: dict[str, Callable[..., Any]] = {}
        are_async = True
        for key, method in inspect.getmembers(environment_type, inspect.isroutine):
            is_tool = not key.startswith("_") and key not in NOT_TOOLS
            if is_tool:
                tools[key] = method
            if is_tool or key in ("reset", "respond"):
                are_async = are_async and inspect.iscoroutinefunction(method)
        return EnvironmentKind(name, factory, environment_type, tools, shares=are_async)

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
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        arguments = {}
        for name, value in columns.items():
            if takes_all or name in parameters or name not in OPTIONAL_COLUMNS:
                arguments[name] = value
        return arguments


def _type_made_by(factory: Callable[[], Any]) -> type:
    if inspect.isclass(factory) and factory is not object:
        return factory
    try:
        with ends_copies():
            environment: Any = factory()
            if hasattr(environment, "close"):
                environment.close()
            return type(environment)
    except Exception as error:
        raise ShoalError(
            f"environment.factory {name_of(factory)!r} raised {describe_error(error)}: it must "
            "make an environment, without arguments",
            "environment.factory",
        ) from error


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
        self.tools = tools
        self.kinds = kinds
        self.result_bytes = result_bytes
        self.live: dict[int, Any] = {}  # environments by session
        self.spare: dict[str, list[Any]] = {}  # to be reset
        # Limits of the calls that share this process's loop, with their seconds.
        self.scopes: dict[asyncio.Timeout, float] = {}
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
        began = time.perf_counter()
        scope = asyncio.timeout(header["seconds"])
        try:
            async with scope:
                self.scopes[scope] = header["seconds"]
                value = self._act(header, body)
                if inspect.isawaitable(value):
                    value = await value
            reply = self._reply(header, value)
        except BaseException as error:  # a KeyboardInterrupt here is the call's own
            reply = self._failed(header, Blocked() if scope.expired() else error)
            if isinstance(error, Blocked):  # the others could not end in time
                now = asyncio.get_running_loop().time()
                for other, seconds in self.scopes.items():
                    if other is not scope and not other.expired():
                        other.reschedule(now + seconds)
        self.scopes.pop(scope, None)
        return {**reply, "seconds": time.perf_counter() - began}

    def _act(self, header: Header, body: bytes) -> Any:
        """What the call returns, perhaps an awaitable."""
        what, session, kind = header["what"], header["session"], header["kind"]
        if what == "open":
            columns = ForkingPickler.loads(body)  # pyright: ignore[reportAttributeAccessIssue]
            spare = self.spare.get(kind)
            environment = spare.pop() if spare else self.kinds[kind].factory()
            self.live[session] = environment
            return environment.reset(**columns)
        arguments = json.loads(body)
        if isinstance(arguments, str):  # why they could not be sent
            raise ValueError(arguments)
        if what == "end":
            environment = self.live[session]
            return environment.get_reward() if hasattr(environment, "get_reward") else None
        name = header["name"] or what
        if session:
            return getattr(self.live[session], name)(**arguments)
        return self.tools[name](**arguments)

    def _reply(self, header: Header, value: Any) -> Header:
        """The reply with what a call returned. TypeError for what it may not return."""
        what, session = header["what"], header["session"]
        if what == "end":
            if value is not None:
                value = float(value)
                if not math.isfinite(value):
                    raise TypeError(
                        f"get_reward returned {value}: expected a finite number or None"
                    )
            environment = self.live.pop(session)
            self.spare.setdefault(header["kind"], []).append(environment)
            return {"value": {"reward": value, "state": state_of(environment)}}
        if what != "call" and not (value is None or isinstance(value, str)):
            method = "reset" if what == "open" else "respond"
            raise TypeError(f"{method} returned {shorten(repr(value))}: expected a text or None")
        if what != "call" and value is None:
            return {"value": None, **self._reward(session)}
        if _are_parts_of_a_message(value):
            parts: Any = value
            text = "".join(str(part["text"]) for part in parts)
        else:
            text = str(value)
        data = text.encode("utf-8", "replace")
        most = self.result_bytes
        if isinstance(self.live.get(session), RolloutCall):  # what it says is no text for the model
            most = len(data)
        return {
            "value": data[:most].decode("utf-8", "ignore"),
            "cut": max(0, len(data) - most),
            **self._reward(session),
        }

    def _reward(self, session: int) -> Header:
        """The turn's reward: the environment's attribute `reward`, where it has one."""
        value = getattr(self.live.get(session), "__dict__", {}).get("reward")
        if isinstance(value, int | float) and math.isfinite(value):
            return {"reward": float(value)}
        return {}

    def _failed(self, header: Header, error: BaseException) -> Header:
        what, session = header["what"], header["session"]
        kind, text = "raised", shorten(describe_error(error), 300)
        spent = isinstance(error, MemoryError)
        has_no_environment = what != "open" and session and session not in self.live
        if isinstance(error, Blocked):
            kind = "timed out"
        elif has_no_environment:
            kind, text = "died", "while it waited"
        elif spent:
            kind, text = "died", "MemoryError (environment.memory_gib is the limit)"
        if what != "call" or kind != "raised":
            self.live.pop(session, None)
        return {"kind": kind, "text": text, "spent": spent}


def _are_parts_of_a_message(value: Any) -> bool:
    """True for `[{"type": "text", "text": "..."}, ...]`."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(part, Mapping) and "text" in part for part in value)


def _is_deep(value: Any, most: int = 32) -> bool:
    """True for what nests deeper than the processes between here and the trainer can read."""
    if most == 0:
        return True
    if isinstance(value, dict):
        return any(_is_deep(item, most - 1) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_is_deep(item, most - 1) for item in value)
    return False


def _as_list(array: Any) -> Any:
    return array.tolist()


def state_of(environment: Any) -> dict[str, Any]:
    """An environment's attributes without `_`, as far as JSON holds them, arrays as lists."""
    state = {}
    bytes_left = STATE_BYTES
    for name, value in getattr(environment, "__dict__", {}).items():
        if name.startswith("_"):
            continue
        try:
            text = json.dumps(value, default=_as_list)
        except (TypeError, ValueError, AttributeError, RecursionError):
            continue
        if len(text) <= bytes_left and not _is_deep(value):
            state[name] = json.loads(text)
            bytes_left -= len(text)
    return state
