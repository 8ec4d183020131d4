"""Environments in TRL's convention, and what a worker process of a session does with them: reset,
call tools, read reward and state."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import numbers
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from shoal.records import ShoalError
from shoal.text import describe_error, shorten
from shoal.workers.process import Blocked, Header, children, end_copies_of_loop, exit_forked_copies
from shoal.workers.rollout_function import RolloutCall

NOT_TOOLS = ("reset", "respond", "get_reward", "close")
OPTIONAL_COLUMNS = ("prompt", "environment", "row")
"""Columns that only a `reset` with such a parameter gets; every `reset` gets all other columns."""
STATE_BYTES = 1 << 20
"""The most bytes of an environment's attributes, as JSON, that reward functions get; attributes
beyond that are left out."""


@dataclass(frozen=True, eq=False)
class EnvironmentKind:
    """One entry of the mapping of environments: what makes its environments, and their class."""

    name: str  # its key in the mapping of environments
    factory: Callable[[], Any]
    type: type
    tools: Mapping[str, Callable[..., Any]]  # its public methods in TRL's order
    shares: bool  # its methods are all async

    @staticmethod
    @functools.cache
    def of(name: str, factory: Callable[[], Any]) -> EnvironmentKind:
        """Returns the kind of the environments that a factory makes; `name` is its key in the
        mapping of environments. The factory is a class, or a function that is called once here to
        find the class. Its tools are all public methods but NOT_TOOLS, sorted by name; `shares` is
        True if `reset`, `respond` and all tools are `async`. ShoalError if the factory raises, or
        if the class has no `reset`. Cached."""
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
        """True if the environment has `respond`: it answers the model's turns in words."""
        return hasattr(self.type, "respond")

    @property
    def is_rollout_function(self) -> bool:
        """True if the environment is a `RolloutCall`, which runs a rollout function: what it
        returns are requests to the sampler."""
        return issubclass(self.type, RolloutCall)

    def arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns of a row that `reset` is called with: all, but OPTIONAL_COLUMNS only
        if `reset` has such a parameter or takes any keyword. The values are not copied."""
        parameters = inspect.signature(self.type.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        arguments = {}
        for name, value in columns.items():
            if takes_all or name in parameters or name not in OPTIONAL_COLUMNS:
                arguments[name] = value
        return arguments


def _type_made_by(factory: Callable[[], Any]) -> type:
    """Returns the class of the environments that a factory makes; calls the factory once unless it
    is a class. ShoalError if it raises. An environment that was made is closed if it has `close`.
    An `async` close is called, but not awaited."""
    if inspect.isclass(factory) and factory is not object:
        return factory
    try:
        with exit_forked_copies():
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
    """Returns the `__name__` of a function, else the name of its class."""
    return getattr(function, "__name__", type(function).__name__)


class Environments:
    """The environments that live in one worker process, and the tools that this process calls."""

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        kinds: Mapping[str, EnvironmentKind],
        result_bytes: int,
    ) -> None:
        """`tools` maps names to functions, `kinds` names to kinds of environments. `result_bytes`
        is the most bytes of a tool's text that a reply has. Makes no environment yet."""
        self.tools = tools
        self.kinds = kinds
        self.result_bytes = result_bytes
        self.environments: dict[int, Any] = {}  # environments by session
        self.spare: dict[str, list[Any]] = {}  # name of a kind -> environments to use again
        # Time limits of the calls that share this process's loop -> their length in seconds.
        self.scopes: dict[asyncio.Timeout, float] = {}
        self.runner: asyncio.Runner | None = None

    def call(self, header: Header, body: bytes) -> Header:
        """Runs one call in a worker that runs one call at a time, and returns the reply, also if
        the call fails. If no session uses the worker and it has child processes, the reply asks the
        supervisor to replace the worker (`spent`). The header has `what` (open, call, respond or
        end), the tool's `name`, `session`, `kind` and `seconds` (not used here). The reply also has
        the `seconds` that the call took."""
        began = time.perf_counter()
        try:
            value = self._perform(header, body)
            if inspect.iscoroutine(value):
                if self.runner is None:
                    self.runner = asyncio.Runner()
                    end_copies_of_loop(self.runner.get_loop())
                value = self.runner.run(value)
            reply = self._reply_to(header, value)
        except BaseException as error:
            reply = self._reply_to_failure(header, error)
        if not self.environments and children():
            reply["spent"] = True
        return {**reply, "seconds": time.perf_counter() - began}

    async def call_async(self, header: Header, body: bytes) -> Header:
        """Runs one call on the event loop that it shares with other calls, with the time limit in
        its header (`seconds`; the other entries are those of `call`), and returns the reply, also
        if the call fails. The reply also has the `seconds` that the call took."""
        began = time.perf_counter()
        scope = asyncio.timeout(header["seconds"])
        try:
            async with scope:
                self.scopes[scope] = header["seconds"]
                value = self._perform(header, body)
                if inspect.isawaitable(value):
                    value = await value
            reply = self._reply_to(header, value)
        except BaseException as error:  # a KeyboardInterrupt here is the call's own
            reply = self._reply_to_failure(header, Blocked() if scope.expired() else error)
            # While a call blocked the loop the others could not end in time: their limits restart.
            if isinstance(error, Blocked):
                now = asyncio.get_running_loop().time()
                for other, seconds in self.scopes.items():
                    if other is not scope and not other.expired():
                        other.reschedule(now + seconds)
        self.scopes.pop(scope, None)
        return {**reply, "seconds": time.perf_counter() - began}

    def _perform(self, header: Header, body: bytes) -> Any:
        """Performs a call and returns its result, which may be an awaitable. The header's `what` is
        the call. `open`: takes an environment that an earlier session used, or makes one, and
        resets it. `end`: gets its reward (None if it has none). Else calls a method of the
        environment, or a tool, named `name` (`respond` has none). `session` is the session's
        number, 0 for a tool that is a function; `kind` names the kind of environment. The body has
        the arguments, pickled for `open`, else in JSON. KeyError if the session has no environment
        any more."""
        what, session, kind = header["what"], header["session"], header["kind"]
        if what == "open":
            columns = ForkingPickler.loads(body)  # pyright: ignore[reportAttributeAccessIssue]
            spare = self.spare.get(kind)
            environment = spare.pop() if spare else self.kinds[kind].factory()
            self.environments[session] = environment
            return environment.reset(**columns)
        arguments = json.loads(body)
        if isinstance(arguments, str):  # the message of `Sessions.call` that they cannot be sent
            raise ValueError(arguments)
        if what == "end":
            environment = self.environments[session]
            return environment.get_reward() if hasattr(environment, "get_reward") else None
        # `respond` has no name: it is itself the method.
        name = header["name"] or what
        if session:
            return getattr(self.environments[session], name)(**arguments)
        return self.tools[name](**arguments)

    def _reply_to(self, header: Header, value: Any) -> Header:
        """Returns the reply to a call whose result is `value`: text (of any other value its `str`)
        as `value`, cut at `environment.result_bytes`, with the number of bytes that were cut as
        `cut`, and the turn's `reward` if there is one. For `end`, `value` is a dict of `reward` and
        `state`, and the environment is kept for a later session. TypeError if `reset` or `respond`
        returned neither text nor None, or `get_reward` neither a finite number nor None (ValueError
        for text that is no number)."""
        what, session = header["what"], header["session"]
        if what == "end":
            if value is not None:
                value = float(value)
                if not math.isfinite(value):
                    raise TypeError(
                        f"get_reward returned {value}: expected a finite number or None"
                    )
            environment = self.environments.pop(session)
            self.spare.setdefault(header["kind"], []).append(environment)
            return {"value": {"reward": value, "state": state_of(environment)}}
        if what != "call" and not (value is None or isinstance(value, str)):
            method = "reset" if what == "open" else "respond"
            raise TypeError(f"{method} returned {shorten(repr(value))}: expected a text or None")
        if what != "call" and value is None:
            return {"value": None, **self._turn_reward(session)}
        if _are_parts_of_a_message(value):
            parts: Any = value
            text = "".join(str(part["text"]) for part in parts)
        else:
            text = str(value)
        data = text.encode("utf-8", "replace")
        most_bytes = self.result_bytes
        # What a rollout function says is a request, no text for the model: it is not cut.
        if isinstance(self.environments.get(session), RolloutCall):
            most_bytes = len(data)
        return {
            "value": data[:most_bytes].decode("utf-8", "ignore"),
            "cut": max(0, len(data) - most_bytes),
            **self._turn_reward(session),
        }

    def _turn_reward(self, session: int) -> Header:
        """Returns `{"reward": ...}` for a reply: the attribute `reward` of the session's
        environment, as the reward of this turn. {} if that is no number, of Python or numpy. NaN
        and infinity are passed on: they are the rollout's failure where turns earn rewards. Only an
        attribute of the instance counts; a bool counts as 1 or 0."""
        environment = self.environments.get(session)  # None in a call of a tool that is a function
        value = getattr(environment, "__dict__", {}).get("reward")
        if isinstance(value, numbers.Real):
            return {"reward": float(value)}
        return {}

    def _reply_to_failure(self, header: Header, error: BaseException) -> Header:
        """Returns the reply to a call that raised `error`: `kind` ("raised", "timed out" or
        "died"), `text`, and `spent` (whether the worker is to be replaced, after a MemoryError).
        Drops the session's environment, unless a tool raised an ordinary exception. A dropped
        environment is not closed."""
        what, session = header["what"], header["session"]
        kind, text = "raised", shorten(describe_error(error), 300)
        spent = isinstance(error, MemoryError)
        # An earlier call of the session dropped the environment while this one waited.
        has_no_environment = what != "open" and session and session not in self.environments
        if isinstance(error, Blocked):
            kind = "timed out"
        elif has_no_environment:
            kind, text = "died", "while it waited"
        elif spent:
            kind, text = "died", "MemoryError (environment.memory_gib is the limit)"
        if what != "call" or kind != "raised":
            self.environments.pop(session, None)
        return {"kind": kind, "text": text, "spent": spent}


def _are_parts_of_a_message(value: Any) -> bool:
    """True for a list of parts of a message, such as `[{"type": "text", "text": "..."}, ...]`. Each
    part is a dict with a `text`. False for an empty list."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(part, Mapping) and "text" in part for part in value)


def _is_deep(value: Any, most: int = 32) -> bool:
    """True if a value is nested deeper than `most` levels: JSON parsers of the processes that the
    reply passes could fail on it. Only dicts, lists and tuples count as levels."""
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
    """Returns an environment's public attributes as plain values, arrays as lists. Leaves out
    values that JSON cannot hold, that are nested too deep, or that do not fit into STATE_BYTES with
    those before them. Values are as JSON gives them back: tuples become lists, and keys text."""
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
