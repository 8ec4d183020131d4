"""Strict JSON, where NaN and infinities are `null`; files that are written atomically, or grow by a
line a step."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.files import appearing, writing
from shoal.types import ShoalError

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
