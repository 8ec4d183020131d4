"""A run folder read back: its settings, metrics and groups, whole or while the run is still going on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.schema import Config
from shoal.report.folder import CONFIG, SUMMARY, parts_of
from shoal.report.groups import StoredGroup, read_record
from shoal.report.lines import read_lines
from shoal.types import Group, ShoalError

FORMATS = ("jsonl", "parquet")


def read_config(run: Path) -> Config:
    """The settings that the run was made with."""
    from shoal.config.loading import compose

    return compose(Config, [str(run / CONFIG)])[0]


def read_parts(run: Path) -> dict[int, Config]:
    """The settings of each part of a run, by the version that it began with; config.yaml, the newest, where the run
    kept none for its parts. `at_version` finds the part of a version."""
    from shoal.config.loading import compose

    kept = {number: compose(Config, [str(file)])[0] for number, file in parts_of(run).items()}
    first = {} if 0 in kept else {0: read_config(run)}
    return dict(sorted((first | kept).items()))


def at_version(parts: Mapping[int, Config], version: int) -> Config:
    """The settings under which the step from `version` to the next was made."""
    return parts[max(start for start in parts if start <= max(version, 0))]


def is_finished(run: Path) -> bool:
    """The run came to its end; else it is still running, or was stopped."""
    return (run / SUMMARY).is_file()


# ---- metrics


@dataclass(frozen=True)
class StoredMetrics:
    """metrics.jsonl by step. `torn`: its last line is not whole, as a killed process leaves it, and is left out."""

    steps: dict[int, dict[str, Any]]
    torn: bool = False


def read_metrics(run: Path) -> StoredMetrics:
    """ShoalError, naming the line, where anything but the end of the file is damaged; empty without the file."""
    path = run / "metrics.jsonl"
    rows = read_lines(path)
    steps = {}
    for number, row in enumerate(rows, 1):
        try:
            steps[int(row["step"])] = row
        except (ValueError, KeyError, TypeError) as error:
            raise ShoalError(f"{path}, line {number} is damaged ({error}): take the file from a backup, or remove the "
                             "line") from error
    return StoredMetrics(steps, _num_lines(path) > len(rows))


def read_evaluations(run: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """evaluations.jsonl: (version, data set) -> figures."""
    return {(line["step"], line["name"]): {name: value for name, value in line.items() if name not in ("step", "name")}
            for line in read_lines(run / "evaluations.jsonl")}


def _num_lines(path: Path) -> int:
    return sum(map(bool, path.read_bytes().split(b"\n"))) if path.is_file() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror or error}") from error


# ---- groups


def group_files(run: Path, name: str = "step") -> dict[int, Path]:
    """The files `groups/<name>_<step>`, by step."""
    found = {}
    for path in sorted((run / "groups").glob(f"{name}_*")):
        matched = re.fullmatch(rf"{re.escape(name)}_(\d+)", path.stem)
        if matched and path.suffix[1:] in FORMATS:
            found[int(matched[1])] = path
    return dict(sorted(found.items()))


def require_groups(run: Path, name: str = "step") -> dict[int, Path]:
    """`group_files`; ShoalError where there is none, which says why."""
    files = group_files(run, name)
    if files:
        return files
    if not read_config(run).report.groups:
        raise ShoalError(f"{run} has no groups: it was made with report.groups=false; run it again with "
                         "report.groups=true")
    raise ShoalError(f"{run / 'groups'} holds no file {name}_*: the run did not get through its first step"
                     if name == "step" else f"{run / 'groups'} holds no file {name}_*")


def read_groups(run: Path, step: int, name: str = "step") -> list[Group]:
    """The groups of `groups/<name>_<step>`, to the bit those that were written."""
    return [stored.group for stored in read_stored(run, step, name)]


def read_stored(run: Path, step: int, name: str = "step") -> list[StoredGroup]:
    """The same with what was stored beside them: advantages, the trainer's log-probs.

    ShoalError where there is no such step (it says which there are), or the file is damaged."""
    files = require_groups(run, name)
    if step not in files:
        going = "" if is_finished(run) else ", which has not ended"
        raise ShoalError(f"step={step}: there are no groups of it in {run}{going}; there are those of steps "
                         f"{ranges(files)}")
    return read_file(files[step])


def read_file(path: Path) -> list[StoredGroup]:
    """The groups of one file, jsonl or parquet; ShoalError, naming it, where it is damaged."""
    records = _parquet_records(path) if path.suffix == ".parquet" else _jsonl_records(path)
    found = []
    for number, record in enumerate(records):
        try:
            found.append(read_record(record, number))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _damaged(path, f"group {number}: {type(error).__name__}: {error}") from error
    return found


def _jsonl_records(path: Path) -> list[Any]:
    records = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        try:
            if line:
                records.append(json.loads(line))
        except ValueError as error:
            raise _damaged(path, f"line {number}: {error}") from error
    return records


def _parquet_records(path: Path) -> list[dict[str, Any]]:
    from pyarrow import ArrowException

    from shoal.report.groups_table import from_parquet

    try:
        return from_parquet(path.read_bytes())
    except (ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _damaged(path: Path, reason: str) -> ShoalError:
    return ShoalError(f"{path} is damaged ({' '.join(reason.split())[:200]}): take it from a backup, or leave out this "
                      "step")


def ranges(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as `1-3, 7`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def figure(value: Any, digits: int = 4) -> str:
    """A figure as tables show it; `-` for none."""
    return "-" if value is None else f"{value:.{digits}g}" if isinstance(value, float) else str(value)
