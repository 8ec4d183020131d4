"""Reading a task's rows, from files, folders or the hub: training rows, held-out rows, notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from shoal.config.schema import TaskSection
from shoal.tasks.data_file import SUFFIXES, read_file
from shoal.tasks.data_folder import Published, declared_subsets, fetch_folder, files_in_folder, named_files
from shoal.text import suggest
from shoal.types import ShoalError

_READERS = ("json", "parquet", "csv", "arrow")
"""Given as task.path, these say of what kind the files in task.files are; they stand for no data set."""
_EVALUATING: ContextVar[bool] = ContextVar("evaluating", default=False)

Row = TypeVar("Row")

Rows = list[tuple[str, dict[str, Any]]]
"""Each row with its place: `FILE, line 3`."""


@contextmanager
def evaluating() -> Iterator[None]:
    """Within, nothing is trained on: data of one split is evaluated on whole, and there are no training rows."""
    token = _EVALUATING.set(True)
    try:
        yield
    finally:
        _EVALUATING.reset(token)


def is_evaluating() -> bool:
    return _EVALUATING.get()


def read_splits(task: TaskSection, published: Published
                ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Training rows, held-out rows, notes; columns renamed as `task.columns` says.

    A file alone is the training split, with the other split looked for beside it; without a split to evaluate on, the
    last rows are held out, or all where nothing is trained (`evaluating`), which the notes say. Raises `ShoalError` for
    data that is missing, empty or unreadable.
    """
    train, held_out, notes = place_splits(task, published)
    return [row for _, row in train], [row for _, row in held_out], notes


def place_splits(task: TaskSection, published: Published) -> tuple[Rows, Rows, list[str]]:
    """`read_splits`, each row with its place."""
    if task.template:
        raise ShoalError(f"task.template has no effect on the task {published.task}, which makes its own prompts: "
                         "leave it out, or choose task=custom")
    for key in ("split", "eval_split"):
        if not getattr(task, key).strip():
            raise ShoalError(f"task.{key}= is empty: expected the name of a split, such as {getattr(TaskSection, key)}")
    renames = renames_of(task.columns)
    path = Path(task.path).expanduser()
    if task.path and path.is_file():
        (train, held_out), notes = _siblings(path, task), _unused(task, published, path)
    elif task.files and (not (task.path or published.hub_id) or (task.path in _READERS and not path.is_dir())):
        train, held_out, notes = named_files(None, task, lambda split: []), [], []
        if len(train) == 1:
            train, held_out = _siblings(train[0], task)
    else:
        if task.path and path.is_dir():
            folder, declared = path, declared_subsets(path)
        else:
            folder, declared = fetch_folder(task, published)
        train, held_out, notes = files_in_folder(folder, declared, task, published)
    rows = _read(train, renames, published)
    if held_out and held_out != train:
        return rows, _read(held_out, renames, published), notes
    return _hold_out(rows, train[0], task.num_questions, published.task, notes)


def _hold_out(rows: Rows, file: Path, num_questions: int, task: str, notes: list[str]) -> tuple[Rows, Rows, list[str]]:
    if is_evaluating():
        note = (f"{task}: no split to evaluate on beside {file.name}; all its {len(rows)} rows are evaluated on, those "
                "too that a run on this data learned from")
        return [], rows, [*notes, note]
    if len(rows) < 2:
        raise ShoalError(f"task {task}: {file} has 1 row and no other split to evaluate on; 2 or more rows are needed")
    count = max(1, len(rows) // 10)
    count = min(count, num_questions) if num_questions else count
    note = f"{task}: no split to evaluate on beside {file.name}; its last {count} of {len(rows)} rows are held out"
    return rows[:-count], rows[-count:], [*notes, note]


def without_held_out(train: Sequence[Row], held_out: Iterable[Row], key: Callable[[Row], Any], task: str, noun: str,
                     notes: list[str]) -> list[Row]:
    """The training rows whose `key` no held-out row has; how many had one is noted. `noun`: what a row asks."""
    known = {key(one) for one in held_out}
    kept = [one for one in train if key(one) not in known]
    if train and not kept:
        raise ShoalError(f"task {task}: every training {noun} is held out too; give other data in task.path")
    if len(kept) < len(train):
        notes.append(f"{task}: {len(train) - len(kept)} training {noun}s are held out too; they were left out")
    return kept


# ---- a file


def _siblings(path: Path, task: TaskSection) -> tuple[list[Path], list[Path]]:
    """A file named after a split is that split, and the other one is looked for beside it."""
    for mine, other in ((task.split, task.eval_split), (task.eval_split, task.split)):
        before, found, after = path.name.rpartition(mine)
        sibling = path.with_name(f"{before}{other}{after}")
        if found and mine != other and sibling.is_file():
            return ([path], [sibling]) if mine == task.split else ([sibling], [path])
    return [path], []


def _unused(task: TaskSection, published: Published, path: Path) -> list[str]:
    """Notes on keys that choose parts of a folder, where one file was given."""
    return [f"{published.task}: task.{key} has no effect, since {path.name} is one file"
            for key in ("subset", "files") if getattr(task, key)]


# ---- reading


def _read(files: Sequence[Path], renames: Mapping[str, str], published: Published) -> Rows:
    """All rows of the files, renamed, checked to hold the columns."""
    rows: Rows = []
    for file in files:
        if file.suffix not in SUFFIXES:
            raise ShoalError(f"task {published.task}: {file} is of a kind that is not read; expected "
                             f"{', '.join(SUFFIXES)}")
        for where, row in read_file(file, published.task):
            place = f"{file}, {where}"
            rows.append((place, _checked(row, place, renames, published)))
    if not rows:
        raise ShoalError(f"task {published.task}: {files[0]} is empty; rows with {_columns(published)} are needed")
    return rows


def _checked(row: Any, place: str, renames: Mapping[str, str], published: Published) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ShoalError(f"task {published.task}: {place} is a {type(row).__name__}; an object with "
                         f"{_columns(published)} is needed")
    row = _renamed(row, place, renames) if renames else row
    there = ", ".join(map(str, row)) or "none"
    for column in published.columns:
        if column not in row:
            raise ShoalError(f"task {published.task}: {place} has no column {column!r}; its columns: {there} "
                             f"(task.columns=[{column}=OTHER] takes another)")
        if column in published.numbers and (number := _number_text(row[column])):
            row = {**row, column: number}
        if column in published.texts and not isinstance(row[column], str):
            raise ShoalError(f"task {published.task}: {place}: {column!r} is a {type(row[column]).__name__}; text is "
                             f"needed")
    return row


def _number_text(value: Any) -> str:
    """A number as text, `18` for 18 and 18.0; empty for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or not math.isfinite(value):
        return ""
    return f"{value:f}" if isinstance(value, Decimal) else str(int(value) if value == int(value) else value)


def _columns(published: Published) -> str:
    return " and ".join(f"`{column}`" for column in published.columns) or "columns"


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
            raise ShoalError(f"task.columns={list(entries)}: {twice!r} is named twice; each column has one name")
        renames[theirs] = wanted
    return renames


def _renamed(row: Mapping[str, Any], place: str, renames: Mapping[str, str]) -> dict[str, Any]:
    for theirs, wanted in renames.items():
        if theirs not in row:
            raise ShoalError(f"task.columns: {wanted}={theirs}: {place} has no column {theirs!r}"
                             f"{suggest(theirs, list(row))}")
        if wanted in row and wanted not in renames:
            raise ShoalError(f"task.columns: {wanted}={theirs}: {place} has a column {wanted!r} too; rename that as "
                             f"well, OTHER={wanted}")
    return {renames.get(column, column): value for column, value in row.items()}
