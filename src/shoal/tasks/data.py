"""Reading a task's rows, from files, folders or the hub, into training rows and held-out rows.

The rules are the same for rows from Python (`rows.py`): without rows to evaluate on the last ones
are held out, and no row that is held out is trained on, unless that was asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from shoal.buckets import address, area_of, fetch, is_bucket
from shoal.config.schema import TaskSection
from shoal.files import find_input, within
from shoal.tasks.data_files import Published, fetch_folder, named_files, open_folder, read_file
from shoal.tasks.task import DataReport
from shoal.text import did_you_mean
from shoal.types import ShoalError

_HELD_OUT_SHARE = 10
"""Without rows to evaluate on, one in this many is held out."""
_EVALUATING: ContextVar[bool] = ContextVar("evaluating", default=False)

Make: TypeAlias = "Callable[[int, str, dict[str, Any]], Any]"
"""(number, place, row) -> what is kept of a row; its place is `FILE, line 3`."""


def evaluating() -> AbstractContextManager[None]:
    """Within, nothing is trained on: data of one split is evaluated on whole, and there are no
    training rows."""
    return within(_EVALUATING)


def is_evaluating() -> bool:
    return _EVALUATING.get()


@dataclass
class Splits:
    """The rows to train on and those held out, in whatever form, and what was done to get them."""

    task: str
    train: list[Any]
    held_out: list[Any]
    on_purpose: str  # what makes a run evaluate on the rows that it trains on
    notes: list[str] = field(default_factory=list)
    data: DataReport = field(default_factory=DataReport)
    one_split: bool = False  # there were no rows to evaluate on
    shared: bool = False  # the rows held out are those that are trained on, on purpose

    def divide(self, source: str, num_questions: int, spread: bool = False) -> None:
        """Holds out a tenth of data without another split: its last rows, at most `num_questions`
        (0: no limit), or every tenth one; all of them where nothing is trained."""
        rows, total, files = self.train, len(self.train), self.data.train_files
        begin = f"{self.task}: {source} has no other split to evaluate on; "
        self.one_split = True
        if is_evaluating():
            self.train, self.held_out, self.data = [], rows, DataReport({}, files)
            self.notes.append(
                f"{begin}{asked_rows(total, num_questions)} are evaluated on, those too that a run "
                f"on "
                "this data learned from"
            )
            return
        if total < 2:
            raise ShoalError(
                f"task {self.task}: {source} has 1 row and no other split to evaluate on: add "
                f"rows, or "
                f"evaluate on the row that is trained on, {self.on_purpose}"
            )
        if spread:
            held = range(_HELD_OUT_SHARE - 1, total, _HELD_OUT_SHARE) or range(total - 1, total)
            self.notes.append(f"{begin}every tenth row of it is held out, {len(held)} of {total}")
        else:
            held = range(
                total - min(max(1, total // _HELD_OUT_SHARE), num_questions or total), total
            )
            self.notes.append(f"{begin}its last {len(held)} of {total} rows are held out")
        self.train, self.held_out = (
            [row for at, row in enumerate(rows) if at not in held],
            [rows[at] for at in held],
        )
        begins = itertools.accumulate(files.values(), initial=0)
        counts = {
            file: sum(at in held for at in range(first, first + files[file]))
            for file, first in zip(files, begins, strict=False)
        }
        self.data = DataReport(
            {file: files[file] - number for file, number in counts.items()},
            {file: number for file, number in counts.items() if number},
        )

    def share(self) -> None:
        """Evaluates on the rows that are trained on."""
        self.held_out, self.shared = self.train, True
        self.data = DataReport(self.data.train_files, self.data.train_files)
        self.notes.append(
            f"{self.task}: {self.on_purpose}: evaluated on the rows that are trained on"
        )

    def keep(self, test: Callable[[Any], bool], expected: str, reason: str) -> None:
        """Drops the rows that fail a test; ShoalError where no other is left. `expected`: what a
        row must have; `reason`: what the dropped ones have."""
        train, held_out = list(filter(test, self.train)), list(filter(test, self.held_out))
        for kind, rows, kept in (
            ("training", self.train, train),
            ("held-out", self.held_out, held_out),
        ):
            if rows and not kept:
                raise ShoalError(
                    f"task {self.task}: none of the {len(rows)} {kind} rows has {expected}"
                )
        if len(held_out) < len(self.held_out):
            self.notes.append(
                f"{self.task}: {len(self.held_out) - len(held_out)} of {len(self.held_out)} "
                f"held-out "
                f"rows were dropped: {reason}"
            )
        self._drop(train, reason)
        self.held_out = held_out

    def drop_held_out(self, key: Callable[[Any], Any], noun: str) -> None:
        """Leaves out the training rows whose `key` a held-out row has. `noun`: what a row asks."""
        if self.shared:
            return
        known = {key(one) for one in self.held_out}
        kept = [one for one in self.train if key(one) not in known]
        if self.train and not kept and not is_evaluating():
            raise ShoalError(
                f"task {self.task}: every training {noun} is held out too: give other data, or "
                f"evaluate "
                f"on the rows that are trained on, {self.on_purpose}"
            )
        self._drop(kept, f"{noun} held out too")

    def _drop(self, kept: list[Any], reason: str) -> None:
        if len(kept) < len(self.train):
            self.data.dropped[reason] = len(self.train) - len(kept)
        self.train = kept


def asked_rows(total: int, num_questions: int) -> str:
    """How many rows of a data set are evaluated on, at most `num_questions` (0: no limit)."""
    return (
        f"the first {num_questions} of {total} rows"
        if 0 < num_questions < total
        else f"all {total} rows"
    )


# ---- the files


def read_splits(
    task: TaskSection, published: Published, make: Make, spread: bool = False
) -> Splits:
    """What `make` keeps of the rows, with columns renamed as `task.columns` says; `spread` as in
    `Splits.divide`.

    A file alone is the training split, unless its folder has a file of the other split. Raises
    `ShoalError` for data that is missing, empty or unreadable.
    """
    train, held_out, notes = _find_files(task, published)
    renames = renames_of(task.columns)
    rows, counts = _read(train, renames, published, make)
    splits = Splits(
        published.task, rows, [], f"task.eval_split={task.split}", notes, DataReport(counts)
    )
    if held_out and held_out != train:
        splits.held_out, counts = _read(held_out, renames, published, make)
        splits.data.held_out_files.update(counts)
    elif task.eval_split == task.split:
        splits.share()
    else:
        splits.divide(train[0].name, task.num_eval_questions, spread)
    return splits


def _find_files(
    task: TaskSection, published: Published
) -> tuple[list[Path], list[Path], list[str]]:
    """The files of training and of evaluation, and notes."""
    name = published.task
    if task.template:
        raise ShoalError(
            f"task.template has no effect on the task {name}, which makes its own prompts: leave "
            f"it out, "
            "or choose task=custom"
        )
    for key in ("split", "eval_split"):
        if not getattr(task, key).strip():
            raise ShoalError(
                f"task.{key}= is empty: expected the name of a split, such as "
                f"{getattr(TaskSection, key)}"
            )
    path = find_input(task.path, "task.path", weights=True, groups=True)
    if task.path and path.is_file():
        return *_siblings(path, task), [
            f"{name}: task.{key} has no effect, since {path.name} is one file"
            for key in ("subset", "files")
            if getattr(task, key)
        ]
    if task.files and not task.path and (not published.hub_id or all(map(is_bucket, task.files))):
        train, held_out = named_files(task.files), []
        if len(train) == 1:
            train, held_out = _siblings(train[0], task)
        return train, held_out, []
    folder = (
        open_folder(path, published)
        if task.path and path.is_dir()
        else fetch_folder(task, published)
    )
    return folder.find_splits(task)


def _siblings(path: Path, task: TaskSection) -> tuple[list[Path], list[Path]]:
    """The files of training and of evaluation where one file is given: if it is named after a
    split, it is that split, and a file in its folder with the other's name is the other one."""
    for mine, other in ((task.split, task.eval_split), (task.eval_split, task.split)):
        before, found, after = path.name.rpartition(mine)
        sibling = path.with_name(f"{before}{other}{after}")
        if area_of(path):
            fetch(address(sibling), "task.path", may_be_empty=True)
        if found and mine != other and sibling.is_file():
            return ([path], [sibling]) if mine == task.split else ([sibling], [path])
    return [path], []


# ---- reading


def _read(
    files: Sequence[Path], renames: Mapping[str, str], published: Published, make: Make
) -> tuple[list[Any], dict[str, int]]:
    """What `make` keeps of all rows of the files, renamed and checked to hold the columns; the rows
    of each file."""
    rows: list[Any] = []
    counts: dict[str, int] = {}
    names = [file.name for file in files]
    for file in files:
        before = len(rows)
        for place, row in read_file(file, f"task {published.task}: "):
            rows.append(make(len(rows), place, _checked(row, place, renames, published)))
        counts[file.name if names.count(file.name) == 1 else str(file)] = len(rows) - before
    if not rows:
        raise ShoalError(
            f"task {published.task}: {files[0]} is empty; rows with {_columns(published)} are "
            f"needed"
        )
    return rows, counts


def _columns(published: Published) -> str:
    return " and ".join(f"`{column}`" for column in published.columns) or "columns"


def _checked(
    row: Any, place: str, renames: Mapping[str, str], published: Published
) -> dict[str, Any]:
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
                f"another)",
                "task.columns",
            )
        value = row[column]
        if (
            column in published.numbers
            and isinstance(value, int | float | Decimal)
            and not isinstance(value, bool)
            and math.isfinite(value)
        ):
            row[column] = str(int(value) if value == int(value) else value)  # `18` for 18.0
        elif column in published.texts and not isinstance(value, str):
            raise ShoalError(
                f"task {published.task}: {place}: {column!r} is a {type(value).__name__}; text is "
                f"needed"
            )
    return row


def renames_of(entries: Iterable[str]) -> dict[str, str]:
    """`wanted=theirs` as theirs -> wanted.

    >>> renames_of(["prompt=question"])
    {'question': 'prompt'}
    """
    renames: dict[str, str] = {}
    for entry in entries:
        wanted, theirs = (part.strip() for part in entry.split("=", 1))
        if wanted in renames.values() or theirs in renames:
            twice = wanted if wanted in renames.values() else theirs
            raise ShoalError(
                f"task.columns={list(entries)}: {twice!r} is named twice; each column has one name"
            )
        renames[theirs] = wanted
    return renames


def _renamed(row: Mapping[str, Any], place: str, renames: Mapping[str, str]) -> dict[str, Any]:
    for theirs, wanted in renames.items():
        if theirs not in row:
            raise ShoalError(
                f"task.columns: {wanted}={theirs}: {place} has no column {theirs!r}"
                f"{did_you_mean(theirs, row, lists_all=True)}"
            )
        if wanted in row and wanted not in renames:
            raise ShoalError(
                f"task.columns: {wanted}={theirs}: {place} has a column {wanted!r} too; rename "
                f"that as "
                f"well, OTHER={wanted}"
            )
    return {renames.get(column, column): value for column, value in row.items()}
