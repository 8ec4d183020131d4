"""Plain values as the types that the schema has: text from a command line, numbers and lists from YAML or Python."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from shoal.config.arguments import find_key
from shoal.config.keys import Key, keys_of, sections_of
from shoal.types import ShoalError


def convert(config_type: type, values: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Any:
    """Plain nested values, with `own` by dotted key over them, as the frozen dataclass.

    Raises ShoalError naming the key, what came and what is allowed.
    """
    flat = {find_key(config_type, name).name: value for name, value in leaves_of(config_type, values)} | dict(own or {})
    keys = keys_of(config_type)
    return build(config_type, {name: convert_value(keys[name], value) for name, value in flat.items()})


def leaves_of(config_type: type, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted name; sections are entered."""
    keys, sections = keys_of(config_type), sections_of(config_type)
    for part, value in values.items():
        name = f"{prefix}{part}"
        if isinstance(value, Mapping) and name not in keys and (value or name in sections):
            yield from leaves_of(config_type, value, f"{name}.")
        elif value is not None or name not in sections:
            yield name, value


def build(config_type: type, values: Mapping[str, Any]) -> Any:
    """The dataclass from values by dotted key; what is not given takes its default."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):
        if field.name in values:
            arguments[field.name] = values[field.name]
        elif dataclasses.is_dataclass(field.default_factory):
            head = f"{field.name}."
            inside = {name.removeprefix(head): value for name, value in values.items() if name.startswith(head)}
            arguments[field.name] = build(field.default_factory, inside)  # type: ignore[arg-type]
    return config_type(**arguments)


def convert_value(key: Key, value: Any) -> Any:
    """A value as the type of its key."""
    if not key.is_list:
        return _convert_scalar(key, key.type, value)
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_convert_scalar(key, get_args(key.type)[0], item) for item in items)


def _convert_scalar(key: Key, wanted: Any, value: Any) -> Any:
    if get_origin(wanted) is Literal:
        allowed = get_args(wanted)
        if value in allowed and isinstance(value, str):
            return value
        raise _wrong_type(key, value, f"one of {', '.join(allowed)}")
    try:
        return _CONVERTERS[wanted](value)
    except (ValueError, OverflowError):
        raise _wrong_type(key, value, _WANTED[wanted]) from None


def _wrong_type(key: Key, value: Any, wanted: str) -> ShoalError:
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return ShoalError(f"{key.name}={shown}: expected {wanted}")


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
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_CONVERTERS: Mapping[Any, Callable[[Any], Any]] = {str: _to_text, bool: _to_bool, int: _to_int, float: _to_float}
_WANTED: Mapping[Any, str] = {str: "text (in YAML, put it in quotes)", bool: "true or false", int: "a whole number",
                              float: "a finite number"}
