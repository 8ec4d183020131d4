"""Whether a reward function keeps something between its calls: of a worker's copy, nothing comes back.

Looked at are the closure, attributes, defaults and named globals of the function, and of functions and objects of its
own module that it reaches by them. Objects of other modules are left out: clients and parsers change for reasons of
their own.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

MOST_ITEMS, MOST_DEPTH = 100, 4
"""How much of a container is compared, and how far what it holds is followed."""


def state_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function holds, by name, in a form that can be compared with `changed_name`."""
    while isinstance(function, functools.partial):
        function = function.func
    module = function.__module__ if hasattr(function, "__module__") else type(function).__module__
    found = _held(function, module, MOST_DEPTH)
    return found if isinstance(found, dict) else {}


def changed_name(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The first name whose value has changed; empty if none has. What was None, or missing, was made when first needed,
    and is no state."""
    return next((name for name, value in before.items() if _changed(value, after.get(name))), "")


def _changed(before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        return bool(changed_name(before, after))
    return before is not None and before != after


def _held(value: Any, module: str, depth: int) -> Any:
    """Plain data as it is, containers as tuples, functions and objects of `module` by name, the type of all else."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, np.ndarray):
        return value.shape, value.flat[:MOST_ITEMS].tobytes()
    if depth and isinstance(value, list | tuple | set | frozenset | deque | dict):
        items = islice(value.items() if isinstance(value, dict) else value, MOST_ITEMS)
        return len(value), tuple(_held(one, module, depth - 1) for one in items)
    if depth and isinstance(value, types.MethodType):
        return _held(value.__self__, module, depth) if value.__func__.__module__ == module else types.MethodType
    if depth and isinstance(value, types.FunctionType) and value.__module__ == module:
        return {name: _held(one, module, depth - 1) for name, one in _names(value).items()}
    if depth and type(value).__module__ == module and not isinstance(value, type):
        called = _names(call) if isinstance(call := type(value).__call__, types.FunctionType) else {}
        return {name: _held(one, module, depth - 1) for name, one in (called | getattr(value, "__dict__", {})).items()}
    return type(value)


def _names(function: types.FunctionType) -> dict[str, Any]:
    """The globals, defaults, closure and attributes of a function."""
    code, defaults = function.__code__, function.__defaults__ or ()
    found = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    found |= zip(code.co_varnames[code.co_argcount - len(defaults):code.co_argcount], defaults, strict=True)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            found[name] = None
    return found | vars(function)
