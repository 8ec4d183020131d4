"""Reads JSON and YAML that another program may have written: depth, digits and values are bounded,
text is one line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from shoal.report import figures

MAX_NESTING, MAX_DIGITS, MAX_VALUES = 40, 40, 10_000


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: 50 runs are listed in a third of the time."""


class _BoundedLoader(_Loader):
    """YAML whose numbers have few digits."""

    def construct_number(self, node: Any) -> int | float:
        if len(node.value) > MAX_DIGITS:
            raise ValueError(f"it has a number of more than {MAX_DIGITS} digits")
        return (
            self.construct_yaml_int(node)
            if node.tag.endswith(":int")
            else self.construct_yaml_float(node)
        )


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _BoundedLoader.add_constructor(_tag, _BoundedLoader.construct_number)


def flat_yaml(text: str) -> dict[str, Any]:
    """YAML of nested mappings as dotted key -> value; ValueError for anything else, for what is
    deeper or larger than the bounds, and for aliases, with which a small file can stand for
    billions of values."""
    depth = values = 0
    try:
        for event in yaml.parse(text, _BoundedLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            values += isinstance(event, yaml.NodeEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases")
            if depth > MAX_NESTING or values > MAX_VALUES:
                raise ValueError(
                    f"it is nested more than {MAX_NESTING} deep, or has more than {MAX_VALUES:,} "
                    f"values"
                )
        found = yaml.load(text, _BoundedLoader)
    except yaml.YAMLError as error:
        raise ValueError(one_line(str(error))[:200]) from error
    except (
        LookupError,
        AttributeError,
        TypeError,
    ) as error:  # PyYAML's, of `!!int ""` or `!!bool foo`
        raise ValueError("a value is not what its tag says") from error
    if not isinstance(found, Mapping):
        raise ValueError("it holds no settings")
    return dict(leaves(found))


def bounded_json(text: str | bytes) -> Any:
    """JSON of another program; ValueError for what is none, is nested too deep or has an integer of
    too many digits, which neither a float nor a database holds."""
    try:
        found = json.loads(text, parse_int=_bounded_int)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    level = [found]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return found
    raise ValueError(f"it is nested more than {MAX_NESTING} deep")


def _bounded_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it has a number of more than {MAX_DIGITS} digits")
    return int(text)


def leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted key and value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def one_line(text: object) -> str:
    """The beginning of a text that may be of any length, in one line."""
    return figures.one_line(text)[:400]


def reason(error: BaseException) -> str:
    """What an error says, in one short line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return one_line(text)[:160]


def rounded(value: float) -> float | None:
    """Six digits, which is more than a screen shows; None for NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
