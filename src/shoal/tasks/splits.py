"""A task's training rows and held-out rows: reads both from the data at `task.path`, and holds out
training rows if the data has no other split.

The rules are the same for rows from Python (`custom.py`): if there are no rows to evaluate on, the
last ones are held out; and no held-out row is trained on, unless that was asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from shoal.buckets import address, area_of, fetch, is_bucket
from shoal.config.sections.task import TaskSection, names_file
from shoal.files import find_input, within
from shoal.records import Example, ShoalError
from shoal.tasks.data_files import read_file
from shoal.tasks.data_folder import Published, fetch_folder, named_files, open_folder
from shoal.tasks.task import HELD_OUT, HELD_OUT_TOO, DataReport, Task
from shoal.text import did_you_mean

ASSETS = Path(__file__).parents[1] / "assets" / "data"
PACKAGED = ("short_questions",)
"""Names in `task.path` that mean rows which come with the package, unless a file or folder has the
name: 88 questions that a few words answer."""


NO_EVALUATION = "task.hold_out=false train.evaluate_every=-1"
"""The settings of a run that trains on all rows and evaluates on none, for messages."""


_HELD_OUT_SHARE = 10
"""If the data has no rows to evaluate on, one of this many is held out."""


_EVALUATING: ContextVar[bool] = ContextVar("evaluating", default=False)


Make: TypeAlias = "Callable[[int, str, dict[str, Any]], Any]"
"""(number, place, row) -> what is kept of the row, such as an `Example`; the place is a text like
`FILE, line 3`."""


def evaluating() -> AbstractContextManager[None]:
    """Returns a context in which data is read for an evaluation alone: a data set of one split is
    evaluated on as a whole, and there are no training rows."""
    return within(_EVALUATING)


def is_evaluating() -> bool:
    """True inside of an `evaluating()` context."""
    return _EVALUATING.get()


@dataclass
class Splits:
    """A task's training rows and held-out rows, with notes for the user on how they were split. A
    row is whatever the task's `make` returned for it, usually an `Example`."""

    task: str
    train: list[Any]
    held_out: list[Any]
    on_purpose: str  # the setting that makes a run evaluate on its training rows, for messages
    notes: list[str] = field(default_factory=list)
    data: DataReport = field(default_factory=DataReport)
    one_split: bool = False  # the data had no rows to evaluate on
    shared: bool = False  # the held-out rows are the training rows, as asked for
    # True: held-out examples keep their row numbers in the data; False: they count from 0.
    keeps_row_numbers: bool = False

    @property
    def all_rows(self) -> list[Any]:
        """Training rows and held-out rows, each once."""
        return self.train if self.shared else self.train + self.held_out

    def divide(
        self,
        source: str,
        num_questions: int,
        spread: bool = False,
        hold_out: bool = True,
        split: str = TaskSection.eval_split,
    ) -> None:
        """Moves a tenth of `train` to `held_out`; called if the data has no split to evaluate on.
        Moves the last rows, at least one and at most `num_questions` (0: no limit), or with
        `spread` every tenth row, without a limit. Moves none if `hold_out` is False. Inside
        `evaluating()` moves all rows. Changes the report of files and adds a note. `source` names
        the data and `split` the split that it lacks, for messages. ShoalError if there is only one
        row to divide, except inside `evaluating()`."""
        rows = self.train
        total = len(rows)
        files = self.data.train_files
        begin = f"{self.task}: {source} has no other split to evaluate on; "
        if split != TaskSection.eval_split:
            begin = f"{self.task}: {source} has no split {split!r} to evaluate on; "
        if not (hold_out or is_evaluating()):
            self.notes.append(f"{begin}none of its {total} rows is held out (task.hold_out=false)")
            return
        self.one_split = True
        if is_evaluating():
            self.train = []
            self.held_out = rows
            self.data = DataReport({}, files)
            self.notes.append(
                f"{begin}{asked_rows(total, num_questions)} are evaluated on, those too that a run "
                "on this data learned from"
            )
            return
        if total < 2:
            raise ShoalError(
                f"task {self.task}: {source} has 1 row and no other split to evaluate on: add "
                f"rows, evaluate on the row that is trained on, {self.on_purpose}, or on none, "
                f"{NO_EVALUATION}"
            )
        if spread:
            # The last row if there are fewer than ten.
            held = range(_HELD_OUT_SHARE - 1, total, _HELD_OUT_SHARE) or range(total - 1, total)
            self.notes.append(f"{begin}every tenth row of it is held out, {len(held)} of {total}")
        else:
            # At least one row is evaluated on.
            num_held = max(1, total // _HELD_OUT_SHARE)
            if num_questions:
                num_held = min(num_held, num_questions)
            held = range(total - num_held, total)
            self.notes.append(
                f"{begin}its last {len(held)} of {total} rows are held out; if the rows are "
                "sorted, shuffle them first"
            )
        self.train = []
        self.held_out = []
        for number, row in enumerate(rows):
            if number in held:
                self.held_out.append(row)
            else:
                self.train.append(row)
        self.data = DataReport()
        first = 0  # the number of the file's first row among all rows
        for file, num_rows in files.items():
            num_held = sum(number in held for number in range(first, first + num_rows))
            self.data.train_files[file] = num_rows - num_held
            if num_held:
                self.data.held_out_files[file] = num_held
            first += num_rows

    def share(self, setting: str, num_questions: int) -> None:
        """Makes the held-out rows the training rows: the user asked to evaluate on these, by
        `setting`. Adds a note: of a run, that it trains on them; inside `evaluating()`, where
        nothing is trained, which rows they are. `num_questions`: the limit of questions (0: none).
        `shared` becomes True. Both are then one list."""
        self.held_out, self.shared = self.train, True
        self.data = DataReport(self.data.train_files, self.data.train_files)
        if is_evaluating():
            rows = asked_rows(len(self.train), num_questions)
            self.notes.append(f"{self.task}: {setting}: {rows} are evaluated on")
        else:
            self.notes.append(f"{self.task}: {setting}: evaluated on the rows that are trained on")

    def note_benchmark(self, num_questions: int) -> bool:
        """Adds a note on what it means that the data set was published to evaluate on, and returns
        True if all its rows are evaluated on: in an evaluation, and where the user asked for the
        rows that are trained on. Called after `read_splits`; `num_questions` is the limit of
        questions (0: none). The note then takes the place of the last one, on how rows were
        split."""
        if self.shared or (self.one_split and is_evaluating()):
            self.notes[-1] = (
                f"{self.task}: {asked_rows(len(self.held_out), num_questions)} are evaluated on; a "
                "training run with these keys would be measured on rows that it learned from"
            )
            return True
        if self.one_split:
            self.notes.append(
                f"{self.task}: an evaluation set: a model that trained on some of its rows no "
                "longer has fair figures on it, not even on those held out"
            )
        return False

    def keep(self, test: Callable[[Any], bool], expected: str, reason: str) -> None:
        """Drops the rows of both splits for which `test` is False. The report counts the dropped
        training rows under `reason`; a note counts the held-out ones. ShoalError if a split that
        had rows would be left empty; its message says that no row has `expected`."""
        train = [row for row in self.train if test(row)]
        held_out = [row for row in self.held_out if test(row)]
        for split, rows, kept in (
            ("training", self.train, train),
            ("held-out", self.held_out, held_out),
        ):
            if rows and not kept:
                raise ShoalError(
                    f"task {self.task}: none of the {len(rows)} {split} rows has {expected}"
                )
        if len(held_out) < len(self.held_out):
            self.notes.append(
                f"{self.task}: {len(self.held_out) - len(held_out)} of {len(self.held_out)} "
                f"held-out rows were dropped: {reason}"
            )
        self._drop(train, reason)
        self.held_out = held_out

    def drop_held_out(self, key: Callable[[Any], Any], noun: str) -> None:
        """Drops the training rows that have the same `key` as a held-out row, unless the training
        rows are the held-out rows on purpose. The report counts the dropped rows. `noun` names what
        is compared, such as `prompt`, for messages. ShoalError if no training row is left, except
        inside `evaluating()`."""
        if self.shared:
            return
        held_out_keys = {key(row) for row in self.held_out}
        kept = [row for row in self.train if key(row) not in held_out_keys]
        if self.train and not kept and not is_evaluating():
            if len(held_out_keys) == 1:
                raise ShoalError(
                    f"task {self.task}: all rows have the same {noun}, so none is left to train on "
                    "once some are held out: give other data, evaluate on the rows that are "
                    f"trained on, {self.on_purpose}, or on none, {NO_EVALUATION}"
                )
            raise ShoalError(
                f"task {self.task}: every training {noun} is held out too: give other data, or "
                f"evaluate on the rows that are trained on, {self.on_purpose}"
            )
        self._drop(kept, f"{noun} {HELD_OUT_TOO}")

    def _drop(self, kept: list[Any], reason: str) -> None:
        """Replaces the training rows by `kept`. The report counts the dropped rows under the
        reason."""
        if len(kept) < len(self.train):
            self.data.dropped[reason] = len(self.train) - len(kept)
        self.train = kept


def asked_rows(total: int, num_questions: int) -> str:
    """Returns which of `total` rows are evaluated on, as a text: `the first 500 of 1319 rows`, or
    `all 200 rows`. `num_questions` is the limit; 0: none."""
    if 0 < num_questions < total:
        return f"the first {num_questions} of {total} rows"
    return f"all {total} rows"


def with_rows(task: Task, splits: Splits) -> Task:
    """Returns the task with the examples, notes and report of `splits`. Each split's examples are
    numbered from 0; with `keeps_row_numbers` the held-out ones keep their numbers. If no row is
    held out, the task has no evaluation sets."""
    held_out = splits.held_out
    if not splits.keeps_row_numbers:
        held_out = _numbered(held_out)
    return replace(
        task,
        train=_numbered(splits.train),
        evaluations={HELD_OUT: held_out} if held_out else {},
        notes=tuple(splits.notes),
        data=splits.data,
    )


def _numbered(examples: Sequence[Example]) -> list[Example]:
    """Returns the examples with `row` set to their position in the list. The examples given are not
    changed."""
    numbered = []
    for number, example in enumerate(examples):
        if example.row != number:
            example = replace(example, row=number)
        numbered.append(example)
    return numbered


# ---- reading


def read_splits(
    task: TaskSection, published: Published, make: Make, spread: bool = False
) -> Splits:
    """Reads the training and the held-out rows of a task from the files at `task.path`, or from its
    published data set if that is empty. Renames columns as `task.columns` says, then calls `make`
    for each row; its results are the rows of the splits.

    A single file is the training split, unless the file next to it is the other split
    (`gsm8k_train.jsonl` next to `gsm8k_test.jsonl`). The held-out rows come from the files that
    `task.eval_split` names by their paths, or from the split of that name. If `task.eval_split` is
    `task.split`, or names the training files, the training rows are also held out. If there are no
    rows to evaluate on, some training rows are held out: the last tenth, at most
    `task.num_eval_questions` (0: no limit), or with `spread` every tenth row; with
    `task.hold_out=false` none; inside `evaluating()` all of them. Raises `ShoalError` for data that
    is missing, empty or unreadable.
    """
    eval_paths = paths_to_evaluate(task)
    if eval_paths:
        # No other split is looked for.
        train, _, notes = _find_files(replace(task, eval_split=task.split), published)
        held_out = _eval_files(eval_paths)
    else:
        train, held_out, notes = _find_files(task, published)
    renames = renames_of(task.columns)
    rows, counts = _read(train, renames, published, make)
    splits = Splits(
        task=published.task,
        train=rows,
        held_out=[],
        on_purpose=f"task.eval_split={task.split}",
        notes=notes,
        data=DataReport(counts),
    )
    if held_out and held_out != train:
        splits.held_out, counts = _read(held_out, renames, published, make)
        splits.data.held_out_files.update(counts)
    elif task.eval_split == task.split or eval_paths:
        splits.share(f"task.eval_split={task.eval_split}", task.num_eval_questions)
    else:
        splits.divide(
            train[0].name, task.num_eval_questions, spread, task.hold_out, task.eval_split
        )
    return splits


def paths_to_evaluate(task: TaskSection) -> list[str]:
    """Returns the paths of files that `task.eval_split` names: the path of a file of data, or
    several with commas between them. [] if it is the name of a split. Whether there are such files
    is not checked."""
    paths = [path.strip() for path in task.eval_split.split(",")]
    return paths if any(map(names_file, paths)) else []


def _eval_files(paths: Sequence[str]) -> list[Path]:
    """Returns the files at the paths in `task.eval_split`. Files in buckets are downloaded.
    ShoalError if there is no such file."""
    files = []
    for path in paths:
        file = find_input(path, "task.eval_split")
        if not file.is_file():
            raise ShoalError(
                f"task.eval_split={path}: there is no such file; give the path of a file with rows "
                "to evaluate on, or the name of a split",
                "task.eval_split",
            )
        files.append(file)
    return files


def _find_files(
    task: TaskSection, published: Published
) -> tuple[list[Path], list[Path], list[str]]:
    """Returns the files to train on, the files to evaluate on ([] if there are none), and notes for
    the user. `task.path` may be a file, a folder, a name of PACKAGED, a hub id or an address in a
    bucket; files of the hub and of buckets are downloaded. Without a path, `task.files` are
    patterns from the current directory if the task has no data set on the hub. ShoalError for data
    that is not found, an empty name of a split, and a `task.template`, which only `custom` can
    use."""
    name = published.task
    if task.template:
        raise ShoalError(
            f"task.template has no effect on the task {name}, which makes its own prompts: leave "
            "it out, or choose task=custom"
        )
    for key in ("split", "eval_split"):
        if not getattr(task, key).strip():
            raise ShoalError(
                f"task.{key}= is empty: expected the name of a split, such as "
                f"{getattr(TaskSection, key)}"
            )
    path = find_input(task.path, "task.path", weights=True, groups=True)
    if task.path in PACKAGED and not path.exists():
        return [ASSETS / f"{task.path}.jsonl"], [], []
    if task.path and path.is_file():
        notes = []
        for key in ("subset", "files"):
            if getattr(task, key):
                notes.append(f"{name}: task.{key} has no effect, since {path.name} is one file")
        train, held_out = _siblings(path, task)
        return train, held_out, notes + _note_of_sibling(path, held_out)
    if task.files and not task.path:
        are_no_files_of_hub = not published.hub_id or all(is_bucket(file) for file in task.files)
        if are_no_files_of_hub:
            train, held_out = named_files(task.files), []
            notes = []
            if len(train) == 1:
                [path] = train
                train, held_out = _siblings(path, task)
                notes = _note_of_sibling(path, held_out)
            return train, held_out, notes
    if task.path and path.is_dir():
        folder = open_folder(path, published)
    else:
        folder = fetch_folder(task, published)
    return folder.find_splits(task)


def _siblings(path: Path, task: TaskSection) -> tuple[list[Path], list[Path]]:
    """Returns the files to train on and to evaluate on if only one file was given. If the file's
    name contains the name of a split, and a file next to it has the other split's name in its
    place, each file is its split: `gsm8k_test.jsonl` -> (`[gsm8k_train.jsonl]`,
    `[gsm8k_test.jsonl]`). Else the file is the training split, and none is evaluated on. In a
    bucket the other file is downloaded if it is there."""
    for mine, other in ((task.split, task.eval_split), (task.eval_split, task.split)):
        before, name_of_split, after = path.name.rpartition(mine)
        sibling = path.with_name(f"{before}{other}{after}")
        if area_of(path):
            fetch(address(sibling), "task.path", may_be_empty=True)
        if name_of_split and mine != other and sibling.is_file():
            if mine == task.split:
                return [path], [sibling]
            return [sibling], [path]
    return [path], []


def _note_of_sibling(path: Path, held_out: Sequence[Path]) -> list[str]:
    """Returns a note, as a list, which says that the held-out rows are of a file that nobody named,
    since it lies next to the training file at `path`; [] if that is not so, and if all rows are
    evaluated on anyway (`evaluating`)."""
    if is_evaluating() or not held_out or path in held_out:
        return []
    [sibling] = held_out
    return [
        f"held out: {sibling.name}, which lies next to {path.name}; task.eval_split=FILE names "
        "another"
    ]


def _read(
    files: Sequence[Path], renames: Mapping[str, str], published: Published, make: Make
) -> tuple[list[Any], dict[str, int]]:
    """Returns `make`'s results for all rows of the files, numbered from 0 through all files, and
    file -> number of its rows. The file is named by its path if another one has its name, and with
    a number if it is there several times. ShoalError for a row without the required columns, and if
    there are no rows."""
    rows: list[Any] = []
    counts: dict[str, int] = {}
    names = [file.name for file in dict.fromkeys(files)]
    times_read: Counter[Path] = Counter()
    for file in files:
        before = len(rows)
        for place, row in read_file(file, f"task {published.task}: "):
            rows.append(make(len(rows), place, _checked(row, place, renames, published)))
        name = file.name if names.count(file.name) == 1 else str(file)
        times_read[file] += 1
        if times_read[file] > 1:
            name += f" (time {times_read[file]})"
        counts[name] = len(rows) - before
    if not rows:
        raise ShoalError(
            f"task {published.task}: {files[0]} is empty; rows with {_columns(published)} are "
            "needed"
        )
    return rows, counts


def _columns(published: Published) -> str:
    """Returns the names of the required columns, for messages."""
    return " and ".join(f"`{column}`" for column in published.columns) or "columns"


def _checked(
    row: Any, place: str, renames: Mapping[str, str], published: Published
) -> dict[str, Any]:
    """Returns a row with its columns renamed. Numbers in the columns `published.numbers` become
    text, 18.0 becomes `18`; `row` itself is changed if nothing is renamed. ShoalError if a required
    column is missing, or if one of `published.texts` is not text. `renames` maps the data's names
    to the task's. Columns that are not required may be missing, and are not checked."""
    if not isinstance(row, dict):
        raise ShoalError(
            f"task {published.task}: {place} is a {type(row).__name__}; an object with "
            f"{_columns(published)} is needed"
        )
    if renames:
        row = _renamed(row, place, renames)
    for column in published.columns:
        if column not in row:
            raise ShoalError(
                f"task {published.task}: {place} has no column {column!r}; its columns: "
                f"{', '.join(map(str, row)) or 'none'} (task.columns=[{column}=OTHER] takes "
                "another)",
                "task.columns",
            )
        value = row[column]
        if column in published.numbers and _is_finite_number(value):
            is_whole = value == int(value)
            row[column] = str(int(value) if is_whole else value)  # `18` for 18.0
        elif column in published.texts and not isinstance(value, str):
            raise ShoalError(
                f"task {published.task}: {place}: {column!r} is a {type(value).__name__}; text is "
                "needed"
            )
    return row


def _is_finite_number(value: Any) -> bool:
    """True for an int, float or Decimal that is neither infinite nor NaN; False for a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return False
    return math.isfinite(value)


# ---- renamed columns


def renames_of(entries: Iterable[str]) -> dict[str, str]:
    """Returns entries `wanted=theirs` as a dict theirs -> wanted. Each entry has an `=`. ShoalError
    if a name occurs twice. Spaces around names are dropped.

    >>> renames_of(["prompt=question"])
    {'question': 'prompt'}
    """
    renames: dict[str, str] = {}
    for entry in entries:
        wanted, theirs = entry.split("=", 1)
        wanted, theirs = wanted.strip(), theirs.strip()
        if wanted in renames.values() or theirs in renames:
            twice = wanted if wanted in renames.values() else theirs
            raise ShoalError(
                f"task.columns={list(entries)}: {twice!r} is named twice; each column has one name"
            )
        renames[theirs] = wanted
    return renames


def _renamed(row: Mapping[str, Any], place: str, renames: Mapping[str, str]) -> dict[str, Any]:
    """Returns a row with its columns renamed by `renames` (theirs -> wanted), in the same order.
    ShoalError, which names `place`, if the row lacks a column that is renamed, or has a column of a
    wanted name that is not renamed itself."""
    for theirs, wanted in renames.items():
        if theirs not in row:
            raise ShoalError(
                f"task.columns: {wanted}={theirs}: {place} has no column {theirs!r}"
                f"{did_you_mean(theirs, row, lists_all=True)}"
            )
        if wanted in row and wanted not in renames:
            raise ShoalError(
                f"task.columns: {wanted}={theirs}: {place} has a column {wanted!r} too; rename "
                f"that as well, task.columns=[{wanted}={theirs},OTHER={wanted}]"
            )
    return {renames.get(column, column): value for column, value in row.items()}
