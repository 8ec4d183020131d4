"""Reads a run folder: its settings, metrics, evaluations and groups, of a finished run or of one in progress."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.schema import Config
from shoal.report.folder import CONFIG, SUMMARY, parts_of
from shoal.report.groups import StoredGroup, read_file
from shoal.report.lines import read_lines
from shoal.types import Group, ShoalError


def read_config(run: Path) -> Config:
    """The resolved settings of a run; of its newest segment, if it was resumed with others."""
    from shoal.config.loading import compose

    return compose(Config, [str(run / CONFIG)])[0]


def read_segments(run: Path) -> dict[int, Config]:
    """The settings of each segment of a run, by the version that it started at.

    A run that was never resumed with other settings has one segment, with those of config.yaml."""
    from shoal.config.loading import compose

    segments = {number: compose(Config, [str(file)])[0] for number, file in parts_of(run).items()}
    if 0 not in segments:
        segments[0] = read_config(run)
    return dict(sorted(segments.items()))


def at_version(segments: Mapping[int, Config], version: int) -> Config:
    """The settings of the step from `version` to the next."""
    return segments[max(start for start in segments if start <= max(version, 0))]


def is_finished(run: Path) -> bool:
    """True if the run has made all its steps; False while it is running, or if it was stopped."""
    return (run / SUMMARY).is_file()


# ---- metrics


@dataclass(frozen=True)
class StoredMetrics:
    """metrics.jsonl by step. `torn`: the last line is incomplete, as a killed process leaves it, and was skipped."""

    steps: dict[int, dict[str, Any]]
    torn: bool = False


def read_metrics(run: Path) -> StoredMetrics:
    """The metrics of every step; ShoalError, naming the line, if any but the last is damaged."""
    path = run / "metrics.jsonl"
    rows = read_lines(path)
    steps = {}
    for number, row in enumerate(rows, 1):
        try:
            steps[int(row["step"])] = row
        except (ValueError, KeyError, TypeError) as error:
            raise ShoalError(f"{path}, line {number} is damaged ({error}): restore the file from a backup, or remove "
                             "the line") from error
    num_lines = sum(map(bool, path.read_bytes().split(b"\n"))) if path.is_file() else 0
    return StoredMetrics(steps, num_lines > len(rows))


def read_evaluations(run: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """evaluations.jsonl: (version, data set) -> figures."""
    return {(line["step"], line["name"]): {name: value for name, value in line.items() if name not in ("step", "name")}
            for line in read_lines(run / "evaluations.jsonl")}


# ---- groups


def group_files(run: Path, name: str = "step") -> dict[int, Path]:
    """The files `groups/<name>_<step>`, by step."""
    found = {}
    for path in sorted((run / "groups").glob(f"{name}_*")):
        matched = re.fullmatch(rf"{re.escape(name)}_(\d+)", path.stem)
        if matched and path.suffix == ".parquet":
            found[int(matched[1])] = path
    return dict(sorted(found.items()))


def require_groups(run: Path, name: str = "step") -> dict[int, Path]:
    """`group_files`; ShoalError if there are none, with the reason."""
    files = group_files(run, name)
    if files:
        return files
    if not read_config(run).report.groups:
        raise ShoalError(f"{run} has no groups: it was made with report.groups=false; run it again with "
                         "report.groups=true")
    reason = ": the run did not finish its first step" if name == "step" else ""
    raise ShoalError(f"{run / 'groups'} holds no file {name}_*{reason}")


def read_groups(run: Path, step: int, name: str = "step") -> list[Group]:
    """The groups of `groups/<name>_<step>`, bit for bit as they were written."""
    return [stored.group for stored in read_stored(run, step, name)]


def read_stored(run: Path, step: int, name: str = "step") -> list[StoredGroup]:
    """The groups of one step with their advantages and the trainer's log-probs.

    ShoalError if the step has none (it lists those that have), or if the file is damaged."""
    files = require_groups(run, name)
    if step not in files:
        running = "" if is_finished(run) else ", which has not finished"
        raise ShoalError(f"step={step}: {run}{running} has no groups of this step; it has those of steps "
                         f"{ranges(files)}")
    return read_file(files[step])


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
