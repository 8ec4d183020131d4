"""Reads keyword arguments from Python into settings (names with values). Functions and objects are
replaced by names that stand for them, because settings, like the values in a file, are only
texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shoal.config.arguments import COMMA_LISTS, PYTHON, Arguments, Setting, make_setting, split_list
from shoal.config.key import get_value, keys_of, leaves_of
from shoal.config.names import key_of, names_of
from shoal.config.sections.task import TaskSection
from shoal.records import ShoalError
from shoal.text import shorten


def read_keywords(
    config_type: type, overrides: Mapping[str, Any]
) -> tuple[Arguments, tuple[Callable[..., Any], ...]]:
    """Returns keyword arguments as Arguments, and the reward functions that were given as
    callables, () if there are none. If all are callables, the setting of `reward` is an empty list.
    Values become texts or lists of texts, and None stays None; dotted names, names joined by `__`
    and nested dicts mean the same. `config_name` becomes a field of Arguments. Tools, environments
    and rollout functions are registered in PYTHON_OBJECTS, for which a new call begins. Raises
    ShoalError for a value that `python_leaves` refuses."""
    overrides = dict(overrides)
    config_name = str(overrides.pop("config_name", None) or "")
    settings: list[Setting] = []
    functions: tuple[Callable[..., Any], ...] = ()
    PYTHON_OBJECTS.begin_call()
    for name, value in python_leaves(config_type, overrides):
        key = key_of(config_type, name)
        if key and key.name in COMMA_LISTS and isinstance(value, str):
            value = split_list(key, value)
        if key and key.names_code == "rewards":
            value, functions = _take_callables(value)
        if key and key.names_code in ("environment", "advantage"):
            if isinstance(value, list | tuple):
                value = [register_object(item) for item in value]
            else:
                value = register_object(value)
        if isinstance(value, tuple):
            value = list(value)
        is_of_list = key is not None and key.is_list
        if is_of_list and not isinstance(value, list):
            value = [value]
        if is_of_list:
            value = [text_given(item) for item in value]
        elif value is not None and not isinstance(value, list):
            value = text_given(value)
        origin = PYTHON
        if name not in names_of(config_type):
            origin = f"{PYTHON} {name}"
        settings.append(make_setting(name, value, origin))
    return Arguments(config_name, tuple(settings)), functions


def text_given(value: Any) -> str:
    """Returns a value from Python as text, as `str` writes it. For a subclass of str, like an
    Enum's or NumPy's, it is the plain text that the value holds, because YAML has no other form of
    it."""
    if isinstance(value, str):
        return str.__str__(value)
    return str(value)


def python_leaves(config_type: type, overrides: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) for every keyword from Python, with nested dicts flattened and
    the values unchanged. Leaves out keys of Shoal whose value is None, which functions often have
    as default; a flag of another system that is None is kept, like `null` in a file.

    Raises ShoalError in three cases. A value can be iterated over but is no text, list, tuple or
    dict: a set, an array or a generator, unless it can be called or its key takes objects. A value
    or an item of a list is bytes. An item of a list is None."""
    for name, value in leaves_of(config_type, nested_names(overrides)):
        is_list = isinstance(value, list | tuple)
        key = key_of(config_type, name)
        may_be_object = key is not None and key.names_code == "environment"
        is_object = callable(value) or may_be_object
        is_value = is_list or is_object or isinstance(value, str | bytes | Mapping)
        if isinstance(value, Iterable) and not is_value:  # a set, an array, a generator
            raise ShoalError(
                f"{name}={shorten(repr(value), 100)}: expected a value, or a list of such; "
                f"give list(...) of the {type(value).__name__}"
            )
        items = value if is_list else [value]
        for item in items:
            is_missing = is_list and item is None
            if is_missing or isinstance(item, bytes):
                raise ShoalError(
                    f"{name}={value!r}: expected text, numbers or functions, without {item!r}"
                )
        if value is not None or key is None:
            yield name, value


def nested_names(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the keywords with `a__b` written as `a.b`, at any depth of nested dicts. If
    two names become the same, the last one counts."""
    nested = {}
    for name, value in overrides.items():
        if isinstance(value, Mapping):
            value = nested_names(value)
        nested[str(name).replace("__", ".")] = value
    return nested


def _take_callables(value: Any) -> tuple[list[Any], tuple[Callable[..., Any], ...]]:
    """Splits the value of `reward`, of which a single one counts as a list of one, into (names,
    callables). If both kinds are given, the names contain one like `python:f` for each callable, so
    that the order is kept; if all are callables, there are no names."""
    items = [value]
    if isinstance(value, list | tuple):
        items = list(value)
    functions = tuple(item for item in items if callable(item))
    if len(functions) == len(items):
        return [], functions
    names = []
    for item in items:
        names.append(f"{FROM_PYTHON}{_name_of(item)}" if callable(item) else item)
    return names, functions


def _name_of(value: Any) -> str:
    """Returns the name of a function or class; of any other object that of its class."""
    return getattr(value, "__name__", type(value).__name__)


# ---- objects

FROM_PYTHON = "python:"
"""The beginning of names, in a stored configuration, that stand for objects given from Python."""


ROWS = "rows"
"""The name, in a stored configuration, of the task of rows that were given from Python."""


HELD_OUT_ROWS = f"{FROM_PYTHON}held_out"
"""The value of `task.eval_split` in the stored configuration of a run on rows from Python to which
rows to evaluate on were given, too."""


def held_out_name(held_out: Any, task: TaskSection) -> str:
    """Returns the value of `task.eval_split` for the argument `held_out` of a call from Python.

    `held_out`: rows; "train" for the rows that are trained on; or None. For None the value in
    `task`, the present section, stays, unless that refers to rows given to an earlier run: then it
    is the default."""
    if held_out is None:
        is_of_rows = task.eval_split == HELD_OUT_ROWS
        return TaskSection().eval_split if is_of_rows else task.eval_split
    return task.split if isinstance(held_out, str) else HELD_OUT_ROWS


def names_object(value: Any) -> bool:
    """True if the value of a key, or one of its values, names an object that was given from
    Python."""
    values = value if isinstance(value, tuple) else (value,)
    return any(str(one).startswith(FROM_PYTHON) for one in values)


def came_from_python(config: Any) -> bool:
    """True if the rows of a stored configuration, or a function, tool or environment that it names,
    were given from Python, so that a shell alone cannot start such a run."""
    if config.task.name == ROWS:
        return True
    for name, key in keys_of(type(config)).items():
        if key.names_code and names_object(get_value(config, name)):
            return True
    return False


class GivenObjects:
    """Tools, environments and rollout functions that were given from Python, by the names that
    stand for them.

    Two objects of one name in one call get different numbers. If a name meant different objects in
    two calls, it is not found for a stored configuration, because it is unknown which of them that
    run had."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._of_this_call: set[str] = set()
        self._ambiguous: set[str] = set()

    def begin_call(self) -> None:
        """Begins a new call of `train` or `evaluate`: names of earlier calls may be used again."""
        self._of_this_call.clear()

    def add(self, value: Any, name: str) -> str:
        """Registers an object and returns the name that stands for it from now on: `name`, or with
        a number (`name-2`) if another object of this call has it. An object that this call has
        added before under the same `name` gets the same result. If an earlier call used the name
        for another object, this one takes its place and the name becomes ambiguous."""
        chosen, number = name, 1
        while chosen in self._of_this_call and not _is_same_object(self._objects[chosen], value):
            number += 1
            chosen = f"{name}-{number}"
        if chosen in self._objects and not _is_same_object(self._objects[chosen], value):
            self._ambiguous.add(chosen)
        self._objects[chosen] = value
        self._of_this_call.add(chosen)
        return chosen

    def __contains__(self, name: str) -> bool:
        """True if a name stands for an object and it is known which."""
        if name in self._of_this_call:
            return True
        return name in self._objects and name not in self._ambiguous

    def __getitem__(self, name: str) -> Any:
        return self._objects[name]


def _is_same_object(first: Any, second: Any) -> bool:
    """True if two values are one object, or one bound method that was taken from its object
    twice."""
    if inspect.ismethod(first) and inspect.ismethod(second):
        return first == second
    return first is second


PYTHON_OBJECTS = GivenObjects()


def register_object(value: Any, name: str = "") -> Any:
    """Registers an object from Python in PYTHON_OBJECTS and returns the name that stands for it,
    like `python:search`; returns a text unchanged. `name`: by default the object's own `__name__`,
    or if it has none, that of its class."""
    if isinstance(value, str):
        return value
    return PYTHON_OBJECTS.add(value, f"{FROM_PYTHON}{name or _name_of(value)}")
