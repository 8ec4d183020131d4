"""Reads a run on disk: every file of its folder. Nothing is written here.

    config.yaml, config_40.yaml    config, segments, config_at(version); settings() as plain data
    recipe.yaml                    recipe()
    metrics.jsonl                  steps(), metrics()
    evaluations.jsonl              evaluations()
    events.jsonl                   events()
    groups/step_000012.parquet     group_files(), groups(step)
    groups/discarded_000012.parquet   group_files("discarded"), groups(step, "discarded")
    checkpoints/12                 checkpoints(), checkpoint_records()
    summary.json                   summary()
    notes.json                     notes()

A command reads strictly: a damaged file raises ShoalError. The page reads leniently, because its
runs may be unfinished, damaged or hostile: a file that cannot be read becomes one line in
`problems`, and no link that leads out of the run is followed. `LineReader` reads lines, and can
continue when a file grows; `group_table` does so for groups."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, Generic, TypeVar

from shoal.buckets import address
from shoal.config.recipe_files import ABOUT, Recipe, read_recipe
from shoal.config.stored import Decision, config_of, decisions_of, resolved
from shoal.config.train import Config
from shoal.config.yaml_files import flat_values
from shoal.files import find_input
from shoal.records import ShoalError
from shoal.runs.groups import StoredGroup, read_file
from shoal.runs.layout import (
    CONFIG,
    LAST,
    LOCK,
    RECIPE,
    SUMMARY,
    decided_file,
    find_run,
    is_run,
    last_run,
    parts_of,
    process_start,
)
from shoal.runs.lines import (
    EvaluationLine,
    EventLine,
    StepLine,
    Summary,
    bounded_json,
    bounded_line,
    bounded_yaml,
    evaluation_scalars,
    flat_yaml,
    leaves,
    reason,
    rounded,
)
from shoal.runs.notes import NOTES, RunNotes
from shoal.runs.reward_changes import NO_CHANGES, RewardChanges
from shoal.runs.summary import summary_rows
from shoal.text import count, ranges

# Bounds on what is read of a run that may be hostile.
MAX_CONFIG_BYTES, MAX_SUMMARY_BYTES, MAX_EVENT_BYTES = 128 << 10, 4 << 20, 8 << 20
MAX_NOTES_BYTES = 256 << 10
MAX_PROBLEMS, MAX_PARTS = 100, 50


@dataclass
class StoredRun:
    """One run's folder, to be read; it must exist, and nothing is read until it is asked for.
    `name` is unique among the runs of a page, and is all that an address on the page says of a run.
    `lenient`: what cannot be read becomes an entry of `problems`; otherwise it raises ShoalError.
    `root` is the resolved path, `where` the path or the bucket's address for texts.

    >>> run = StoredRun(find_run("last"))
    >>> run.config.steps, run.metrics()[1]["reward/mean"], run.groups(step=1)[0].group.texts
    """

    path: Path
    name: str = ""
    lenient: bool = False
    # file that cannot be read -> one line that says why; filled by lenient reading only
    problems: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.root, self.where = self.path.resolve(), address(self.path)

    # ---- files

    def file(self, *parts: str) -> Path | None:
        """Returns the path of a file of the run; None if there is no such file, or if it is a
        folder. `parts`: the parts of its path within the run.

        A path that cannot be resolved (a cycle of links) is a problem, and so is, with lenient
        reading, a link that leads out of the run: ShoalError if strict, else None (`add_problem`).

        >>> run.file("groups", "step_000012.parquet")
        """
        try:
            path = self.root.joinpath(*parts).resolve(strict=True)
        except FileNotFoundError:
            return None
        # Such as a cycle of links, or a name with a zero byte.
        except (OSError, RuntimeError, ValueError) as error:
            self.add_problem("/".join(parts), f"cannot be opened ({reason(error)})")
            return None
        if self.lenient and not path.is_relative_to(self.root):
            self.add_problem("/".join(parts), "is a link that leads out of the run: it is not read")
            return None
        return path if path.is_file() else None

    def add_problem(self, about: str, text: str) -> None:
        """Adds to `problems` that a file cannot be read; with strict reading raises ShoalError
        instead. `about`: the file's name within the run; `text`: what is wrong, as a predicate:
        "is damaged". A file has one problem, the newest; those of more than MAX_PROBLEMS files are
        not kept."""
        if not self.lenient:
            raise ShoalError(f"{self.where}/{about} {text}: remove it, or restore it from a backup")
        with self.lock:
            if about in self.problems or len(self.problems) < MAX_PROBLEMS:
                self.problems[about] = bounded_line(f"{about}: {text}")

    def add_damaged_line(self, name: str, number: int, cause: str) -> None:
        """Adds to `problems` that line `number` (from 1) of the file `name` cannot be read, because
        of `cause`; with strict reading raises ShoalError instead. As a file has one problem, only
        its last damaged line is kept."""
        if not self.lenient:
            raise ShoalError(
                f"{self.where}/{name}, line {number} is damaged ({cause}): restore the file from a "
                "backup, or remove the line"
            )
        self.add_problem(name, f"line {number} is damaged ({cause}); it is skipped")

    def text(self, name: str, most: int) -> str:
        """Returns at most the first `most` bytes of a file as text, with bytes that are not UTF-8
        as escapes; "" if there is no such file. A file that is longer, or cannot be read, is a
        problem (`add_problem`), which strict reading raises."""
        path = self.file(name)
        if path is None:
            return ""
        try:
            with path.open("rb") as file:
                data = file.read(most + 1)  # one more shows whether the file is longer
        except OSError as error:
            self.add_problem(name, f"cannot be read ({reason(error)})")
            return ""
        if len(data) > most:
            self.add_problem(name, f"has more than {most >> 10:,} KiB: only its beginning is read")
        return data[:most].decode("utf-8", "backslashreplace")

    # ---- settings

    @cached_property
    def config(self) -> Config:
        """The settings that the run works with, including what it decided itself. If the run was
        resumed with other settings, those of the newest segment. ShoalError if they cannot be read,
        also with lenient reading."""
        return read_config(self.path)

    @cached_property
    def segments(self) -> dict[int, Config]:
        """The settings of each segment, by the version that the segment started at. A run that was
        never resumed with other settings has one segment: 0 -> the settings of config.yaml.
        ShoalError if settings cannot be read, also with lenient reading."""
        segments = {0: self.config}
        for number, file in sorted(parts_of(self.path).items()):
            # Also of 0: config.yaml then has the settings of the newest segment.
            segments[number] = read_config(self.path, file.name)
        return segments

    def config_at(self, version: int) -> Config:
        """Returns the settings of the step that starts from `version`, those of the last segment
        that began at this version or before it; a negative version counts as 0."""
        return self.segments[max(start for start in self.segments if start <= max(version, 0))]

    def settings(self, file: str = CONFIG) -> dict[str, Any]:
        """Returns the settings that the run works with, as dotted key -> value: the requested ones
        of `file` (config.yaml, or config_40.yaml of a segment), with the run's own decisions in
        place of what they leave open. They are plain data, which is not checked; presets or files
        that they name are not read. If the file is missing or damaged: {} and a problem of the run;
        with strict reading ShoalError."""
        values = self.requested(file)
        if values:
            for key, decision in self.decisions(file).items():
                values[key] = decision.value
        return values

    def requested(self, file: str = CONFIG) -> dict[str, Any]:
        """Returns the settings of a file as they were requested, as dotted key -> value. If the
        file is missing or damaged: {} and a problem of the run; with strict reading ShoalError."""
        text = self.text(file, MAX_CONFIG_BYTES)
        try:
            return flat_yaml(text)
        except ValueError as error:
            self.add_problem(file, f"is damaged ({reason(error)})")
            return {}

    def decisions(self, file: str = CONFIG) -> dict[str, Decision]:
        """Returns dotted key -> the decision of the run, for the settings that `file` left open;
        {} if decided.yaml (of a segment: decided_40.yaml) is missing. If it is damaged: {} and a
        problem of the run; with strict reading ShoalError."""
        name = decided_file(self.path / file).name
        if self.file(name) is None:
            return {}
        text = self.text(name, MAX_CONFIG_BYTES)
        try:
            return _decisions_in(text)
        except (ValueError, ShoalError) as error:
            self.add_problem(name, f"is damaged ({reason(error)})")
            return {}

    def recipe(self) -> Recipe | None:
        """Returns the recipe that the run follows, with its settings, from recipe.yaml; None if
        there is none. If the file is damaged: None and a problem of the run; with strict reading
        ShoalError."""
        text = self.text(RECIPE, MAX_CONFIG_BYTES)
        if not text:
            return None
        try:
            values = dict(bounded_yaml(text))
            recipe = read_recipe(values.pop(ABOUT, None), RECIPE, RECIPE)
            return replace(recipe, config=config_of(dict(leaves(values))))
        except (ValueError, ShoalError) as error:
            self.add_problem(RECIPE, f"is damaged ({reason(error)})")
            return None

    @property
    def decided_keys(self) -> frozenset[str]:
        """The keys whose value the run decided itself, because nobody set them."""
        return frozenset(self.decisions())

    @property
    def began(self) -> float:
        """The time when the run began, in seconds since the epoch: from the folder's name, which a
        copy keeps (a local time), else the time when its settings were written; 0 if there are
        none."""
        named = _DATE_AND_TIME.search(self.path.absolute().as_posix())
        if named:
            with contextlib.suppress(ValueError, OverflowError):
                return time.mktime(time.strptime(named[1], "%Y-%m-%d/%H-%M-%S"))
        path = self.path / CONFIG
        return path.stat().st_mtime if path.is_file() else 0

    # ---- figures

    @property
    def is_finished(self) -> bool:
        """True if the run came to its end, after all its steps or because a callback stopped it;
        False while it is running, or if it was interrupted."""
        return (self.path / SUMMARY).is_file()

    def summary(self) -> Summary | None:
        """Returns the content of summary.json; None until the run has finished. If the file is
        damaged: None and a problem of the run; with strict reading ShoalError."""
        text = self.text(SUMMARY, MAX_SUMMARY_BYTES)
        if not text:
            return None
        try:
            return Summary.parse(bounded_json(text))
        except ValueError as error:
            self.add_problem(SUMMARY, f"is damaged ({reason(error)})")
            return None

    def notes(self) -> RunNotes:
        """Returns the note and the tags that people wrote about the run; empty ones if there are
        none. If the file is damaged: empty ones and a problem of the run; with strict reading
        ShoalError."""
        text = self.text(NOTES, MAX_NOTES_BYTES)
        if not text.strip():
            return RunNotes()
        try:
            return RunNotes.parse(bounded_json(text))
        except ValueError as error:
            self.add_problem(NOTES, f"is damaged ({reason(error)})")
            return RunNotes()

    @property
    def process_has_ended(self) -> bool:
        """True if the process that last worked in this folder ran on this machine and no longer
        exists, however it ended. False if it exists, if it ran on another machine, or if the file
        `.lock` does not say which process it was."""
        # The two lines that `Lock` writes: the process and its machine; when the process started.
        holder = re.fullmatch(r"process (\d{1,9}) on (\S+)\s+(\d*)\s*", self.text(LOCK, 400))
        if not holder:
            return False
        pid, machine, start_of_holder = holder.groups()
        if machine != socket.gethostname():
            return False
        try:
            os.kill(int(pid), 0)  # signal 0 asks whether the process exists
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass
        # A process with this id exists. If it started at another time, it is a later process that
        # got the id of the one that has ended.
        start_of_existing = process_start(int(pid))
        if not start_of_existing or not start_of_holder:
            return False
        return start_of_existing != start_of_holder

    @property
    def reward_changes(self) -> RewardChanges:
        """When resumes last changed the reward, by the settings of the first MAX_PARTS segments."""
        parts = sorted(parts_of(self.root).items())[:MAX_PARTS]
        return RewardChanges.of_parts({number: self.requested(path.name) for number, path in parts})

    def steps(self) -> list[StepLine]:
        """Returns the lines of all steps, in order. An incomplete last line is left out, because
        the run may still write it. ShoalError, which names the line, if another one is damaged
        (lenient: a problem, and the line is left out)."""
        return LineReader(self, StepLine).read_all()

    def metrics(self) -> dict[int, Mapping[str, Any]]:
        """Returns the metrics of every step, by step (from 1); of two lines of one step the last
        counts. Errors like `steps`."""
        return {line.step: line.metrics for line in self.steps()}

    def evaluations(self) -> Evaluations:
        """Returns the evaluations so far, in order; errors like `steps`."""
        return Evaluations(LineReader(self, EvaluationLine).read_all())

    def events(self) -> list[EventLine]:
        """Returns phases, notes, warnings and errors so far, in order, from the first
        MAX_EVENT_BYTES of the file; errors like `steps`."""
        return LineReader(self, EventLine, MAX_EVENT_BYTES).read_all()

    def before_after(
        self, evaluations: Evaluations, summary: Summary | None
    ) -> list[tuple[str, str, str, str]]:
        """Returns the rows (figure, before training, after it, change) of the table that a run
        prints at its end. Without a summary, the rows compare the evaluation before the first step
        with the newest. If a resume changed the reward before the newest evaluation, a mean reward
        has no change, "", and neither has an accuracy that a changed reward function judges. [] if
        there is no evaluation."""
        newest = max((line.step for line in evaluations.lines), default=0)
        before, after = evaluations.before_after(summary)
        return summary_rows(before, after, self.reward_changes.before(newest))

    # ---- groups

    def group_files(self, name: str = "step") -> dict[int, Path]:
        """Returns step -> path of the files `groups/<name>_<step>.parquet`, in order of the steps.
        `name`: "step" for training, "discarded" for groups that dynamic sampling discarded,
        `evaluate_<data set>` for an evaluation, whose step is the version. {} if there are none.
        Reads no file."""
        files = {}
        for path in (self.path / "groups").glob(f"{name}_*.parquet"):
            matched = re.fullmatch(rf"{re.escape(name)}_(\d+)", path.stem)
            if matched:
                files[int(matched[1])] = path
        return dict(sorted(files.items()))

    def require_groups(self, name: str = "step") -> dict[int, Path]:
        """Returns step -> path of the files `groups/<name>_<step>.parquet`, like `group_files`.
        ShoalError if there are none, which says why: the run stores no groups, or has not come so
        far."""
        files = self.group_files(name)
        if files:
            return files
        if not self.config.report.groups:
            raise ShoalError(
                f"{self.where} has no groups: it was made with report.groups=false; run it again "
                "with report.groups=true"
            )
        cause = ": the run did not finish its first step" if name == "step" else ""
        raise ShoalError(f"{self.where}/groups holds no file {name}_*{cause}")

    def groups(self, step: int, name: str = "step") -> list[StoredGroup]:
        """Returns the groups of one step (from 1), bit for bit as they were written, with
        advantages and the trainer's log-probs. `name`: "step" for the groups that it trained on,
        "discarded" for those that dynamic sampling discarded, which have no advantages,
        `evaluate_<data set>` for an evaluation, of which `step` is the version.

        ShoalError if the step has no groups (it lists the steps that have), or if the file is
        damaged."""
        files = self.require_groups(name)
        if step not in files:
            running = "" if self.is_finished else ", which has not finished"
            raise ShoalError(
                f"step={step}: {self.where}{running} has no groups of this step; it has those of "
                f"steps {ranges(files)}"
            )
        return read_file(files[step])

    def group(self, step: int, number: int, name: str = "step") -> StoredGroup:
        """Returns group `number` (from 0) of a step (from 1; of an evaluation the version). `name`:
        as in `groups`. ShoalError if the step has
        fewer groups or none, or if its file, all of which is read, is damaged."""
        groups = self.groups(step, name)
        if number >= len(groups):
            raise ShoalError(
                f"group={number}: step {step} of {self.where} has {count(len(groups), 'group')}, 0 "
                f"to {len(groups) - 1}"
            )
        return groups[number]

    # ---- checkpoints

    def checkpoints(self) -> list[int]:
        """Returns the versions that are saved as checkpoints, in order: the folders of
        checkpoints/ whose names are numbers. [] if there is no such folder."""
        try:
            names = os.listdir(self.root / "checkpoints")
        except OSError:
            return []
        return sorted(int(name) for name in names if name.isdecimal() and len(name) < 10)

    def checkpoint_records(self) -> dict[int, dict[str, Any]]:
        """Returns version -> the JSON record that a checkpoint stores in addition to its arrays:
        facts of the process, state of the recorder, pending requests. A checkpoint whose record
        cannot be read, or has no `facts`, is left out."""
        records = {}
        for version in self.checkpoints():
            path = self.root / "checkpoints" / str(version) / "extra" / "metadata"
            try:
                record = bounded_json(path.read_bytes())
            except (OSError, ValueError):
                continue
            if isinstance(record, dict) and "facts" in record:
                records[version] = record
        return records


# ---- evaluations

MAX_ROWS = 5000


class Evaluations:
    """The evaluations of a run, in the order in which they were written: `lines` has one line for
    each version and data set."""

    def __init__(self, lines: Sequence[EvaluationLine] = ()) -> None:
        self.lines = list(lines)

    def read(self, reader: LineReader[EvaluationLine], seconds: float) -> None:
        """Adds the new lines of a file that a run may still be writing, reading for about
        `seconds`. Starts over if the file was replaced. Keeps only the first MAX_ROWS lines, and
        leaves out all later ones."""
        restarted, lines = reader.read_new(seconds)
        if restarted:
            self.lines = []
        self.lines += lines
        del self.lines[MAX_ROWS:]

    def by_version(self) -> dict[tuple[int, str], Mapping[str, Any]]:
        """Returns (version, data set) -> figures; of two lines of the same version and data set
        the last counts."""
        return {(line.step, line.name): line.figures for line in self.lines}

    def before_after(
        self, summary: Summary | None
    ) -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]:
        """Returns (before, after), each as data set -> figures: before the first step and after the
        last, from the summary. Without a summary, or if it has neither, they are the evaluations of
        version 0 ({} if it has none) and of the highest version so far ({} if there is no later
        one)."""
        if summary is not None and (summary.before or summary.after):
            return summary.before, summary.after
        by_step: dict[int, dict[str, Mapping[str, Any]]] = {}
        for (step, name), figures in self.by_version().items():
            by_step.setdefault(step, {})[name] = figures
        newest = max(by_step, default=0)
        after = by_step[newest] if newest > 0 else {}
        return by_step.get(0, {}), after

    def curves(self) -> dict[str, dict[str, list[Any]]]:
        """Returns evaluate/<set>/<figure> -> curve: a dictionary of lists with the versions `x`,
        values `y`, the ends of their 95% intervals `low` and `high` (None if unknown), and the
        number of questions `n`. Figures that qualify another one (`_NO_CURVES`) have no curve."""
        curves: dict[str, dict[str, list[Any]]] = {}
        for (step, data_set), figures in sorted(self.by_version().items()):
            values = evaluation_scalars(data_set, figures)
            questions = values.get(f"evaluate/{data_set}/num_questions")
            for name, value in values.items():
                if not math.isfinite(value) or name.endswith(_NO_CURVES):
                    continue
                standard_error = values.get(f"{name}_error", math.nan)
                low, high = _interval(name, value, standard_error, figures)
                curve = curves.setdefault(name, {"x": [], "y": [], "low": [], "high": [], "n": []})
                curve["x"].append(step)
                curve["y"].append(rounded(value))
                curve["low"].append(_rounded_float(low))
                curve["high"].append(_rounded_float(high))
                curve["n"].append(_rounded_float(questions))
        return curves

    def main_curve(self, changes: RewardChanges = NO_CHANGES) -> tuple[str, dict[str, list[Any]]]:
        """Returns (name, curve) of the accuracy on the first data set or, if no set has one, of the
        mean reward; ("", {}) if there is neither.

        `changes`: when the reward changed. The curve of a figure that depends on what changed
        begins after that, because earlier values are of another reward."""
        curves = self.curves()
        names = [name for name in curves if name.endswith("/accuracy")]
        names += [name for name in curves if name.endswith("/mean_reward")]
        if not names:
            return "", {}
        name = names[0]
        curve = curves[name]
        data_set, _, figure = name.removeprefix("evaluate/").rpartition("/")
        newest = self.by_version()[curve["x"][-1], data_set]
        kept = [changes.is_comparable(step, figure, newest) for step in curve["x"]]
        return name, {key: list(compress(values, kept)) for key, values in curve.items()}


_NO_CURVES = ("_error", "num_questions", "num_responses")
"""Endings of the names of figures that get no curve, because they qualify another figure."""


def _interval(
    name: str, value: float, standard_error: float, figures: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Returns (low, high) of a figure's 95% interval, None for an end that is unknown. An accuracy
    may have a stored interval in `figures`; that of any other figure, or of an accuracy without
    one, follows from its standard error, which is NaN if unknown. `name`:
    "evaluate/<set>/<figure>"."""
    stored = figures.get("accuracy_interval")
    if name.endswith("/accuracy") and isinstance(stored, list):
        # The file may be of another program: a list of any length, with values of any type.
        ends: list[Any] = [None, None]
        for position, end in enumerate(stored[:2]):
            if isinstance(end, int | float):
                ends[position] = end
        return ends[0], ends[1]
    if math.isnan(standard_error):
        return None, None
    half_width = NORMAL_95 * standard_error
    return value - half_width, value + half_width


NORMAL_95 = 1.96
"""A normal distribution has 95% of its values within this many standard errors of its mean."""


def _rounded_float(number: Any) -> Any:
    """Returns a float rounded for the screen, and any other value unchanged."""
    return rounded(number) if isinstance(number, float) else number


# ---- lines

PIECE_BYTES, MAX_LINE_BYTES, MAX_FILE_BYTES = 4 << 20, 1 << 20, 2 << 30
"""How much of a file is read at once, and the most of a line and of a file that is read."""

Line = TypeVar("Line", StepLine, EvaluationLine, EventLine)


class LineReader(Generic[Line]):
    """Reads the lines of one of a run's files, in order. `read_new` returns the lines that were
    added since the last call.

    An incomplete last line is left for the next reading. A damaged line is skipped and becomes a
    problem of the run, which a strict reading raises. If the file was replaced by another, because
    the run was resumed, the reading starts again at its beginning."""

    def __init__(
        self, run: StoredRun, line_type: type[Line], most_bytes: int = MAX_FILE_BYTES
    ) -> None:
        """Opens nothing yet. `line_type`: StepLine, EvaluationLine or EventLine, which names the
        file and parses its lines. Lines after the first `most_bytes` of the file are not read,
        which is a problem of the run."""
        self._run, self._type, self._most_bytes = run, line_type, most_bytes
        self._name = line_type.FILE
        self._inode = -1  # inode of the file that was read last; -1: there was no file
        self._restart()
        self.complete = False  # True if the last reading reached the end of the file

    def _restart(self) -> None:
        """Makes the next reading start at the beginning of the file."""
        self._offset = 0
        self._num_lines = 0
        self._rest = b""  # beginning of the last line, whose end has not been read
        self._is_skipping = False  # True until the end of a line that is too long has been read

    def read_all(self) -> list[Line]:
        """Returns all lines that the file has now."""
        _, lines = self.read_new(math.inf)
        return list(lines)

    def read_new(self, seconds: float) -> tuple[bool, Iterator[Line]]:
        """Returns (replaced, lines). `replaced`: True if the lines start at the beginning of the
        file, because this is the first call or the file was replaced or removed since the last one;
        what was read before is then void. Without a file, `lines` is empty, and `replaced` is True
        only if there was one at the last call.

        `lines`: an iterator over the lines that were added. It reads the file while it is used, so
        use it up before the next call. It stops after about `seconds`, which count from this call;
        `complete` then says whether it reached the end."""
        path = self._run.file(self._name)
        if path is None:
            restarted = self._inode >= 0
            self._inode = -1
            self._restart()
            self.complete = True
            return restarted, iter(())
        stat = path.stat()
        restarted = stat.st_ino != self._inode or stat.st_size < self._offset
        if restarted:
            self._inode = stat.st_ino
            self._restart()
        return restarted, self._lines(path, time.monotonic() + seconds)

    def _lines(self, path: Path, until: float) -> Iterator[Line]:
        """Yields the lines from the current position on, until the end of the file, the limit of
        its size (`most_bytes`), or the time `until` (of time.monotonic), which is looked at after
        each piece of PIECE_BYTES. Sets `complete`: False only if the time was what ended it."""
        try:
            with path.open("rb") as file:
                file.seek(self._offset)
                while self._offset < self._most_bytes:
                    piece = file.read(PIECE_BYTES)
                    self._offset += len(piece)
                    self.complete = len(piece) < PIECE_BYTES
                    # What follows the last line end is the beginning of a line.
                    *lines, self._rest = (self._rest + piece).split(b"\n")
                    yield from self._parsed(lines)
                    if len(self._rest) > MAX_LINE_BYTES:
                        self._run.add_problem(
                            self._name, "has a line of more than 1 MiB, which is skipped"
                        )
                        self._rest = b""
                        self._is_skipping = True
                    if self.complete or time.monotonic() > until:
                        return
                self.complete = True
                if os.stat(path).st_size > self._most_bytes:
                    megabytes = self._most_bytes >> 20
                    self._run.add_problem(
                        self._name, f"has more than {megabytes:,} MiB: only its beginning is shown"
                    )
        except OSError as error:
            self.complete = True
            self._run.add_problem(self._name, f"cannot be read ({error.strerror})")

    def _parsed(self, lines: list[bytes]) -> Iterator[Line]:
        """Parses complete lines and yields their records; skips empty lines, and reports damaged
        ones (`add_damaged_line`)."""
        for text in lines:
            self._num_lines += 1
            if self._is_skipping:  # the end of a line that was too long
                self._is_skipping = False
                continue
            if not text.strip():
                continue
            try:
                record = bounded_json(text)
                if not isinstance(record, dict):
                    raise ValueError("it is not a JSON object")
                line = self._type.parse(record)
            except json.JSONDecodeError:
                self._run.add_damaged_line(self._name, self._num_lines, "it is not JSON")
            except ValueError as error:
                self._run.add_damaged_line(self._name, self._num_lines, reason(error))
            else:
                yield line


# ---- finding runs

MAX_DEPTH, MAX_FOLDERS = 4, 20_000
"""How many levels below a folder runs are looked for, and after how many folders no more are."""


def open_runs(
    words: Sequence[str], base: str = "outputs", known: Sequence[StoredRun] = ()
) -> list[StoredRun]:
    """Opens the runs that `words` name, for lenient reading, and gives each a name that no other
    has. Runs in `known` are left out; their names stay taken. A run that is named twice is opened
    once.

    A word is a run's folder, `last` (the newest run below `base`), or a folder with runs below it
    (perhaps none yet), which are named by their paths from there. Without words, opens the newest
    run below `base`. Of the runs only their paths are read. ShoalError if a word names none of
    these; the text says what it names."""
    paths: dict[Path, Path] = {}  # resolved path -> path as it was named
    names: dict[Path, str] = {}  # resolved path -> name, for runs found below a folder
    for word in words or [_newest(base)]:
        name = last_run(word, base) or word
        folder = find_input(name, "runs")
        if not folder.is_dir() or is_run(folder):
            run = find_run(name, groups=False)
            paths[run.resolve()] = run
            continue
        for run in _runs_below(folder):
            paths[run.resolve()] = run
            name = str(run.relative_to(folder))
            if not _NO_NAME.fullmatch(name):
                names[run.resolve()] = _encodable(name)
    known_roots = [run.root for run in known]
    new = {root: path for root, path in paths.items() if root not in known_roots}
    num_uses = Counter(run.name for run in known)
    num_uses.update(names[root] for root in new if root in names)
    runs = []
    for root, path in new.items():
        name = names.get(root, "")
        # A run without a name ("", counted 0 times), or with one that another run has, is named by
        # the end of its path.
        if num_uses[name] != 1:
            roots = list(known_roots) + list(new)
            name = short_name(root, roots)
        runs.append(StoredRun(path, name, lenient=True))
    return runs


_NO_NAME = re.compile(r"\d+|\d\d-\d\d-\d\d(-\d+)?")
"""Names that do not identify a run: the number of a sweep's run, and a time without its date."""


def short_name(run: Path, others: Sequence[Path]) -> str:
    """Returns the shortest end of a run's path that no other run's path ends with, and that does
    not begin with a bare number (of a sweep's run) or a time of day; the whole path if there is no
    such end. `others` may contain the run itself.

    >>> short_name(Path("outputs/sweep/0"), [Path("outputs/sweep/0"), Path("outputs/sweep/1")])
    'sweep/0'
    >>> short_name(Path("outputs/2026-07-30/19-29-57"), [])
    '2026-07-30/19-29-57'
    """
    for length in range(1, len(run.parts)):
        end = run.parts[-length:]
        is_taken = any(other != run and other.parts[-length:] == end for other in others)
        if not is_taken and not _NO_NAME.fullmatch(end[0]):
            return _encodable("/".join(end))
    return _encodable("/".join(run.parts))


def _encodable(name: str) -> str:
    """Returns a file's name with bytes that UTF-8 cannot hold as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


_DATE_AND_TIME = re.compile(r"/(\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d)[^/]*$")


def _newest(base: str) -> str:
    """Returns the word "last" if `base` has the file `last`, which names its newest run, else the
    path of the run below `base` that began last. ShoalError if there is no run. Whether the run
    that the file names still exists is not checked."""
    if (Path(base) / LAST).is_file():
        return LAST
    runs = []
    if Path(base).is_dir():
        runs = list(_runs_below(Path(base)))
    if not runs:
        raise ShoalError(
            f"there is no run under {base}: name a run, or the folder that runs are in (their "
            "base_output_directory), `shoal view FOLDER`"
        )
    return str(max(runs, key=lambda path: StoredRun(path).began))


def _runs_below(folder: Path) -> Iterator[Path]:
    """Yields the run folders within a folder (also the folder itself), by name, down to MAX_DEPTH
    levels below it. Links are not followed, and folders within a run are not searched. After
    MAX_FOLDERS folders no further subfolders are."""
    for num_seen, (walked, names, files) in enumerate(os.walk(folder)):
        path = Path(walked)
        # os.walk then visits those of the subfolders that are left in `names`.
        if CONFIG in files:
            names.clear()
            yield path
        elif len(path.relative_to(folder).parts) >= MAX_DEPTH or num_seen > MAX_FOLDERS:
            names.clear()
        names.sort()


def read_requested(run: Path, file: str = CONFIG) -> Config:
    """Returns the settings of a run as they were requested: keys that were left for the run to
    decide are still open. `file`: config.yaml, or that of a segment. ShoalError if they cannot be
    read."""
    try:
        return config_of(flat_values(run / file))
    except ShoalError as error:
        raise ShoalError(
            f"{run}: its settings cannot be read; were they written by another version of Shoal? "
            f"{error}"
        ) from error


def read_decisions(run: Path, file: str = CONFIG) -> dict[str, Decision]:
    """Returns key -> the decision of a run, for the keys that its settings in `file` leave open; {}
    if it has no file of decisions, so that a resume decides again. ShoalError if that file is
    damaged."""
    path = decided_file(run / file)
    try:
        return _decisions_in(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, ShoalError) as error:
        raise ShoalError(
            f"{path} cannot be read ({reason(error)}): remove it, and the run decides again what "
            "its settings leave open"
        ) from error


def _decisions_in(text: str) -> dict[str, Decision]:
    """Returns key -> decision, from the text of decided.yaml; {} for an empty text, if nothing was
    left open. ValueError or ShoalError if the text holds anything else."""
    return decisions_of(bounded_yaml(text)) if text.strip() else {}


def read_config(run: Path, file: str = CONFIG) -> Config:
    """Returns the settings that a run works with: as requested, together with what it decided.
    `file`: config.yaml, or that of a segment. ShoalError if a file cannot be read."""
    return resolved(read_requested(run, file), read_decisions(run, file))


def read_summary(run: Path) -> Summary | None:
    """Returns the summary of a finished run; None if the run has not finished, or the file is
    damaged. Reads a file of any size, so not for runs that may be hostile (`StoredRun.summary`)."""
    try:
        return Summary.parse(json.loads((run / SUMMARY).read_text(encoding="utf-8")))
    # A file that a power cut truncated counts as missing, and is written again.
    except (FileNotFoundError, ValueError, RecursionError):
        return None
