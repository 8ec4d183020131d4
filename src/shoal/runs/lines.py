"""Strict JSON, where NaN and infinities are `null`; files that are written atomically, or grow by a
line a step; and reading within bounds what somebody else may have written."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import yaml

from shoal.files import appearing, writing
from shoal.records import ShoalError
from shoal.text import one_line

_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def json_ready(value: Any) -> Any:
    """The value in JSON's own types: arrays as lists, NaN and infinity as None, what JSON lacks as
    text.

    A float narrower than 64 bits becomes the shortest decimal that gives it back: float32(0.1) is
    0.1."""
    if isinstance(value, enum.Enum):
        return json_ready(value.value)
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and not isinstance(value, np.floating):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(json_ready(key)): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_ready(item) for item in value]
    if hasattr(value, "__array__"):
        return _array_ready(np.asarray(value))
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _array_ready(array: np.ndarray) -> Any:
    if array.dtype.kind in "biu":
        return array.tolist()
    if array.ndim:
        return [_array_ready(np.asarray(row)) for row in array]
    if array.dtype.kind in "SUO":
        return json_ready(array.item())
    if array.dtype.kind in "fV":  # V: bfloat16 and its like
        with contextlib.suppress(ValueError):
            return json_ready(float(str(array[()])))
    return str(array[()])


def json_line(record: Any) -> str:
    """One line of strict JSON, without its line end."""
    return json.dumps(json_ready(record), ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)


def open_text(path: Path, mode: str) -> Any:
    # a lone surrogate, which UTF-8 cannot hold, becomes \udcxx: JSON's own escape for it
    return path.open(mode, encoding="utf-8", errors="backslashreplace", newline="\n")


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Writes lines to a file that appears whole or not at all; ShoalError if it cannot be
    written."""
    with appearing(path) as temporary, writing(path), open_text(temporary, "w") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without a last line that a killed process left torn.
    Empty without the file; ShoalError for any other line that is no JSON."""
    if not path.is_file():
        return []
    found, lines = [], path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        try:
            if line:
                found.append(json.loads(line))
        except ValueError as error:
            if number < len(lines) - 1:
                raise ShoalError(
                    f"{path}, line {number + 1}: this is no JSON; remove the line"
                ) from error
    return found


class JsonlSink:
    """Appends a line a step, `step` first, and flushes it: what was written survives a killed
    process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with writing(self.path):
            self._file = open_text(self.path, "a")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        line = json_line(
            {
                "step": int(step),
                **{name: value for name, value in metrics.items() if name != "step"},
            }
        )
        with writing(self.path):
            self._file.write(line + "\n")
            self._file.flush()

    def keep(self, is_kept: Callable[[int], bool]) -> None:
        """Removes the lines whose `step` is not kept."""
        self.close()
        write_atomically(
            self.path, [json_line(line) for line in read_lines(self.path) if is_kept(line["step"])]
        )
        self._file = open_text(self.path, "a")

    def sync(self) -> None:
        """Returns when what was written would survive a power cut."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `write` has raised it before
            self._file.close()


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
    """YAML of nested mappings as dotted key -> value; ValueError as of `bounded_yaml`."""
    return dict(leaves(bounded_yaml(text)))


def bounded_yaml(text: str) -> Mapping[str, Any]:
    """YAML of nested mappings; ValueError for anything else, for what is deeper or larger than the
    bounds, and for aliases, with which a small file can stand for billions of values."""
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
                    "values"
                )
        found = yaml.load(text, _BoundedLoader)
    except yaml.YAMLError as error:
        raise ValueError(bounded_line(str(error))[:200]) from error
    except (
        LookupError,
        AttributeError,
        TypeError,
    ) as error:  # PyYAML's, of `!!int ""` or `!!bool foo`
        raise ValueError("a value is not what its tag says") from error
    if not isinstance(found, Mapping):
        raise ValueError("it holds no settings")
    return found


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


def bounded_line(text: object) -> str:
    """The beginning of a text that may be of any length, in one line."""
    return one_line(text)[:400]


def reason(error: BaseException) -> str:
    """What an error says, in one short line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return bounded_line(text)[:160]


def rounded(value: float) -> float | None:
    """Six digits, which is more than a screen shows; None for NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def evaluation_scalars(name: str, figures: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation's numbers under `evaluate/<name>/<figure>`; its texts and intervals stay in
    evaluations.jsonl.

    >>> evaluation_scalars("held_out", {"accuracy": 0.5, "protocol": "greedy", "num_questions": 4})
    {'evaluate/held_out/accuracy': 0.5, 'evaluate/held_out/num_questions': 4.0}
    """
    return {f"evaluate/{name}/{figure}": value for figure, value in scalars(figures).items()}


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, SupportsFloat) and not isinstance(value, str)
    }
