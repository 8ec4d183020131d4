"""Converts text from a command line, and numbers and lists from YAML or Python, to the types of the
schema."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from shoal.config.keys import Key, choices_of, keys_of, sections_of
from shoal.text import exact
from shoal.types import ShoalError

UNBOUNDED = ("algorithm.correction_cap", "algorithm.rejection_cap")
"""Numbers for which `inf` means no bound."""


def text_of(value: Any) -> str:
    """A plain value as a user types it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text_of, value)) + "]"
    return "null" if value is None else str(value)


def shown(value: Any) -> str:
    """A configuration's value as a user types it, numbers in short but not rounded: it may be typed
    again."""
    if isinstance(value, tuple):
        return f"[{','.join(map(shown, value))}]"
    return exact(value) if isinstance(value, float) else text_of(value)


def get_value(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def without_effect(config: Any) -> frozenset[str]:
    """Keys in whose place others decide: with `batch.prompts_per_device`, the prompts of a step."""
    batch = getattr(config, "batch", None)
    return frozenset({"batch.prompts_per_step"} if getattr(batch, "prompts_per_device", 0) else ())


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name as nested dicts, tuples as lists."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = list(value) if isinstance(value, tuple) else value
    return nested


def leaves_of(
    config_type: type, values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Every value with its dotted name."""
    keys, sections = keys_of(config_type), sections_of(config_type)
    for part, value in values.items():
        name = f"{prefix}{part}"
        if isinstance(value, Mapping) and name not in keys and (value or name in sections):
            yield from leaves_of(config_type, value, f"{name}.")
        elif value is not None or name not in sections:
            yield name, value


def build(config_type: type, values: Mapping[str, Any]) -> Any:
    """The dataclass of values by dotted key; other keys have their defaults."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):
        if field.name in values:
            arguments[field.name] = values[field.name]
        elif dataclasses.is_dataclass(field.default_factory):
            head = f"{field.name}."
            inside = {
                name.removeprefix(head): value
                for name, value in values.items()
                if name.startswith(head)
            }
            arguments[field.name] = build(field.default_factory, inside)  # type: ignore[arg-type]
    return config_type(**arguments)


def convert_value(key: Key, value: Any) -> Any:
    """A value converted to the type of its key."""
    if not key.is_list:
        return _convert_scalar(key, key.type, value)
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_convert_scalar(key, get_args(key.type)[0], item) for item in items)


def _convert_scalar(key: Key, wanted: Any, value: Any) -> Any:
    if allowed := choices_of(wanted):
        if isinstance(value, str) and value in allowed:
            return value
        raise _wrong_type(key, value, f"one of {', '.join(filter(None, allowed))}")
    try:
        converted = _CONVERTERS[wanted](value)
        if (
            wanted is float
            and not math.isfinite(converted)
            and not (converted > 0 and key.name in UNBOUNDED)
        ):
            raise ValueError
    except (ValueError, OverflowError):
        several = "; for a run with each: shoal train --multirun" if "," in str(value) else ""
        raise _wrong_type(key, value, _WANTED[wanted] + several) from None
    return converted


def _wrong_type(key: Key, value: Any, wanted: str) -> ShoalError:
    typed = text_of(value) if value is None or isinstance(value, bool) else repr(value)
    return ShoalError(f"{key.name}={typed}: expected {wanted}")


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    raise ValueError


def _to_int(value: Any) -> int:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    number = _to_float(value)
    if not number.is_integer():
        raise ValueError
    return value if isinstance(value, int) else int(number)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    return float(value)


_BOOLS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_CONVERTERS: Mapping[Any, Callable[[Any], Any]] = {
    str: _to_text,
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
}
_WANTED: Mapping[Any, str] = {
    str: "text (in YAML, put it in quotes)",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
}
