"""A run on disk: every file of its folder is read here, and nothing is written.

    config.yaml, config_40.yaml    config, segments, config_at(version); settings() as plain data
    metrics.jsonl                  metrics()
    evaluations.jsonl              evaluations()
    groups/step_000012.parquet     group_files(), groups(step)
    checkpoints/12                 checkpoints(), checkpoint_records()
    summary.json, log.txt          summary(), text("log.txt", ...)

A command reads strictly: a damaged file raises ShoalError. The page reads leniently, since its runs may be under way,
damaged or hostile: what cannot be read becomes one line in `problems`, and no link out of the run is followed. What
grows while it is read is read by `growing_lines` and `group_table`.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.config.schema import Config
from shoal.report.folder import CONFIG, LAST, SUMMARY, find_run, is_run, parts_of, read_config
from shoal.report.groups import StoredGroup, read_file
from shoal.report.lines import read_lines
from shoal.report.sink import evaluation_scalars
from shoal.runs.bounded import bounded_json, flat_yaml, one_line, reason, rounded
from shoal.text import count, ranges
from shoal.types import ShoalError

MAX_CONFIG_BYTES, MAX_SUMMARY_BYTES, MAX_LOG_BYTES = 128 << 10, 4 << 20, 8 << 20
MAX_PROBLEMS = 100


@dataclass(frozen=True)
class StoredMetrics:
    """metrics.jsonl by step. `torn`: the last line is incomplete, as a killed process leaves it, and was skipped."""

    steps: dict[int, dict[str, Any]]
    torn: bool = False


@dataclass
class StoredRun:
    """One run folder. `name` is unique among the runs of a page, and is all that an address says of a run.

    >>> run = StoredRun(find_run("last"))
    >>> run.config.steps, run.metrics().steps[1]["reward/mean"], run.groups(step=1)[0].group.texts
    """

    path: Path
    name: str = ""
    lenient: bool = False
    problems: dict[str, str] = field(default_factory=dict)  # what it is about -> one line; of a lenient reading
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.root = self.path.resolve()

    # ---- files

    def file(self, *parts: str) -> Path | None:
        """A file of the run; None without it. A lenient reading gives none where a link leads out of the run."""
        try:
            found = self.root.joinpath(*parts).resolve(strict=True)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, a name with a zero byte
            self.problem("/".join(parts), f"cannot be opened ({reason(error)})")
            return None
        if self.lenient and not found.is_relative_to(self.root):
            self.problem("/".join(parts), "is a link that leads out of the run: it is not read")
            return None
        return found if found.is_file() else None

    def problem(self, about: str, text: str) -> None:
        """Notes that a file cannot be read; ShoalError in a strict reading."""
        if not self.lenient:
            raise ShoalError(f"{self.path / about} {text}: remove it, or restore it from a backup")
        with self.lock:
            if about in self.problems or len(self.problems) < MAX_PROBLEMS:
                self.problems[about] = one_line(f"{about}: {text}")

    def text(self, name: str, most: int) -> str:
        """A file as text, bytes that are no UTF-8 as escapes; empty without it. Of a larger one the first `most`."""
        path = self.file(name)
        if path is None:
            return ""
        try:
            with path.open("rb") as file:
                data = file.read(most + 1)
        except OSError as error:
            self.problem(name, f"cannot be read ({reason(error)})")
            return ""
        if len(data) > most:
            self.problem(name, f"has more than {most >> 10:,} KiB: only its beginning is read")
        return data[:most].decode("utf-8", "backslashreplace")

    # ---- settings

    @cached_property
    def config(self) -> Config:
        """The resolved settings; of the newest segment, if the run was resumed with others."""
        return read_config(self.path)

    @cached_property
    def segments(self) -> dict[int, Config]:
        """The settings of each segment, by the version that it started at: one segment, with those of config.yaml, if
        the run was never resumed with others."""
        found = {number: read_config(self.path, file.name) for number, file in parts_of(self.path).items()}
        return dict(sorted(({0: self.config} | found).items()))

    def config_at(self, version: int) -> Config:
        """The settings of the step from `version` to the next."""
        return self.segments[max(start for start in self.segments if start <= max(version, 0))]

    def settings(self) -> dict[str, Any]:
        """config.yaml as dotted key -> value. It is plain data here: what it names, presets or files, is not read."""
        text = self.text(CONFIG, MAX_CONFIG_BYTES)
        try:
            return flat_yaml(text)
        except ValueError as error:
            self.problem(CONFIG, f"is damaged ({reason(error)})")
            return {}

    # ---- figures

    @property
    def is_finished(self) -> bool:
        """True if the run has made all its steps; False while it is running, or if it was stopped."""
        return (self.path / SUMMARY).is_file()

    def summary(self) -> dict[str, Any]:
        """summary.json; empty until the run has finished."""
        text = self.text(SUMMARY, MAX_SUMMARY_BYTES)
        try:
            found = bounded_json(text) if text else {}
            return found if isinstance(found, dict) else {}
        except ValueError as error:
            self.problem(SUMMARY, f"is damaged ({reason(error)})")
            return {}

    def metrics(self) -> StoredMetrics:
        """The metrics of every step; ShoalError, naming the line, if any but the last is damaged."""
        path = self.path / "metrics.jsonl"
        rows, steps = read_lines(path), {}
        for number, row in enumerate(rows, 1):
            try:
                steps[int(row["step"])] = row
            except (ValueError, KeyError, TypeError) as error:
                raise ShoalError(f"{path}, line {number} is damaged ({error}): restore the file from a backup, or "
                                 "remove the line") from error
        num_lines = sum(map(bool, path.read_bytes().split(b"\n"))) if path.is_file() else 0
        return StoredMetrics(steps, num_lines > len(rows))

    def evaluations(self) -> Evaluations:
        """The evaluations so far, in order; ShoalError, naming the line, if any but the last is damaged."""
        path = self.path / "evaluations.jsonl"
        rows = read_lines(path)
        for number, row in enumerate(rows, 1):
            if not _is_evaluation(row):
                raise ShoalError(f"{path}, line {number} is damaged (it has no step and name): restore the file from a "
                                 "backup, or remove the line")
        return Evaluations(rows)

    # ---- groups

    def group_files(self, name: str = "step") -> dict[int, Path]:
        """The files `groups/<name>_<step>.parquet`, by step."""
        found = {}
        for path in (self.path / "groups").glob(f"{name}_*.parquet"):
            if matched := re.fullmatch(rf"{re.escape(name)}_(\d+)", path.stem):
                found[int(matched[1])] = path
        return dict(sorted(found.items()))

    def require_groups(self, name: str = "step") -> dict[int, Path]:
        """`group_files`; ShoalError if there are none, with the reason."""
        if files := self.group_files(name):
            return files
        if not self.config.report.groups:
            raise ShoalError(f"{self.path} has no groups: it was made with report.groups=false; run it again with "
                             "report.groups=true")
        cause = ": the run did not finish its first step" if name == "step" else ""
        raise ShoalError(f"{self.path / 'groups'} holds no file {name}_*{cause}")

    def groups(self, step: int, name: str = "step") -> list[StoredGroup]:
        """The groups of one step, bit for bit as they were written, with advantages and the trainer's log-probs.

        ShoalError if the step has none (it lists those that have), or if the file is damaged."""
        files = self.require_groups(name)
        if step not in files:
            running = "" if self.is_finished else ", which has not finished"
            raise ShoalError(f"step={step}: {self.path}{running} has no groups of this step; it has those of steps "
                             f"{ranges(files)}")
        return read_file(files[step])

    def group(self, step: int, number: int, name: str = "step") -> StoredGroup:
        """One group of a step; ShoalError where the step has fewer."""
        found = self.groups(step, name)
        if number >= len(found):
            raise ShoalError(f"group={number}: step {step} of {self.path} has {count(len(found), 'group')}, 0 to "
                             f"{len(found) - 1}")
        return found[number]

    # ---- checkpoints

    def checkpoints(self) -> list[int]:
        """The versions that are saved, in order."""
        try:
            return sorted(int(entry.name) for entry in (self.root / "checkpoints").iterdir()
                          if entry.name.isdecimal() and len(entry.name) < 10)
        except OSError:
            return []

    def checkpoint_records(self) -> dict[int, dict[str, Any]]:
        """The record that each readable checkpoint keeps beside its arrays, by version."""
        found = {}
        for version in self.checkpoints():
            try:
                path = self.root / "checkpoints" / str(version) / "extra" / "metadata"
                found[version] = bounded_json(path.read_bytes())
            except (OSError, ValueError):
                continue
        return {version: record for version, record in found.items() if isinstance(record, dict) and "facts" in record}


# ---- evaluations

MAX_ROWS = 5000


def _is_evaluation(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("name"), str)


class Evaluations:
    """Rows of evaluations.jsonl: `step` (the version), `name` (of the data set) and the figures."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        self.rows = list(rows)

    def add(self, restarted: bool, rows: Iterable[dict[str, Any]]) -> None:
        """Adds what `GrowingLines.new` found; `restarted`: the file is another than before."""
        if restarted:
            self.rows = []
        self.rows += [row for row in rows if _is_evaluation(row)]
        del self.rows[MAX_ROWS:]

    def by_version(self) -> dict[tuple[int, str], dict[str, Any]]:
        """(version, data set) -> figures."""
        return {(row["step"], row["name"]): _figures(row) for row in self.rows}

    def at(self, step: int) -> dict[str, dict[str, Any]]:
        """Data set -> figures of one version."""
        return {row["name"]: _figures(row) for row in self.rows if row["step"] == step}

    def before_after(self, summary: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Data set -> figures before the first step and after the last; of a run without a summary, those of its first
        and its newest evaluation."""
        before, after = summary.get("before"), summary.get("after")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            return before, after
        steps = sorted({row["step"] for row in self.rows})
        return self.at(steps[0]) if steps else {}, self.at(steps[-1]) if len(steps) > 1 else {}

    def curves(self) -> dict[str, dict[str, list[Any]]]:
        """evaluate/<set>/<figure> -> its steps `x` and values `y`."""
        found: dict[str, dict[str, list[Any]]] = {}
        for row in self.rows:
            for name, value in evaluation_scalars(row["name"], _figures(row)).items():
                if math.isfinite(value) and not name.endswith(("_error", "num_questions", "num_responses")):
                    curve = found.setdefault(name, {"x": [], "y": []})
                    curve["x"].append(row["step"])
                    curve["y"].append(rounded(value))
        return found


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("step", "name")}


# ---- finding runs

MAX_RUNS, MAX_DEPTH, MAX_FOLDERS = 64, 4, 20_000


def open_runs(words: Sequence[str], base: str = "outputs") -> list[StoredRun]:
    """The runs that words name: a run folder, `last`, or a folder with runs below it; without words the newest.

    They are read leniently. ShoalError for a word that names none, with what it is instead."""
    paths: list[Path] = []
    for word in words or [_newest(base)]:
        path = Path(word).expanduser()
        if word != LAST and path.is_dir() and not is_run(path):
            below = list(_runs_below(path))
            if not below:
                raise ShoalError(f"{path} is no run folder: it holds no {CONFIG}, and no folder below it does")
            paths += below
        else:
            paths.append(find_run(word, base))
    unique = list({path.resolve(): path for path in paths}.values())
    if len(unique) > MAX_RUNS:
        raise ShoalError(f"{count(len(unique), 'run')} found, at most {MAX_RUNS} fit on a page: name those to show")
    return [StoredRun(path, name, lenient=True) for name, path in zip(_names(unique), unique, strict=True)]


def _newest(base: str) -> str:
    if (Path(base) / LAST).is_file():
        return LAST
    runs = list(_runs_below(Path(base))) if Path(base).is_dir() else []
    if not runs:
        raise ShoalError(f"there is no run under {base}: name a run folder, `shoal view RUN`")
    return str(max(runs, key=lambda path: (path / CONFIG).stat().st_mtime))


def _runs_below(folder: Path) -> Iterator[Path]:
    """Run folders within a folder, by name; links are not followed, and runs are not searched for runs."""
    for seen, (place, names, files) in enumerate(os.walk(folder)):
        path = Path(place)
        if CONFIG in files:
            names.clear()
            yield path
        elif len(path.relative_to(folder).parts) >= MAX_DEPTH or seen > MAX_FOLDERS:
            names.clear()
        names.sort()


def _names(paths: Iterable[Path]) -> list[str]:
    """For each path as many of its last parts as tell it from the others."""
    paths = [path.resolve() for path in paths]
    names = []
    for path in paths:
        parts = 1
        while parts < len(path.parts) and sum(other.parts[-parts:] == path.parts[-parts:] for other in paths) > 1:
            parts += 1
        names.append("/".join(path.parts[-parts:]).encode("utf-8", "backslashreplace").decode())
    return names
