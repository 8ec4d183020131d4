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
from shoal.tasks.data_folder import Published, fetch_folder, named_files, open_folder
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
    """`place_splits` without the rows' places."""
    train, held_out, notes = place_splits(task, published)
    return [row for _, row in train], [row for _, row in held_out], notes


def place_splits(task: TaskSection, published: Published) -> tuple[Rows, Rows, list[str]]:
    """Training rows, held-out rows, each with its place, and notes; columns renamed as `task.columns` says.

    A file alone is the training split, unless its folder has a file of the other split; without a split to evaluate
    on, the last rows are held out, or all where nothing is trained (`evaluating`), which the notes say. Raises
    `ShoalError` for data that is missing, empty or unreadable.
    """
    name = published.task
    if task.template:
        raise ShoalError(f"task.template has no effect on the task {name}, which makes its own prompts: leave it out, "
                         "or choose task=custom")
    for key in ("split", "eval_split"):
        if not getattr(task, key).strip():
            raise ShoalError(f"task.{key}= is empty: expected the name of a split, such as {getattr(TaskSection, key)}")
    renames = renames_of(task.columns)
    path = Path(task.path).expanduser()
    notes = []
    if task.path and path.is_file():
        train, held_out = _siblings(path, task)
        notes = [f"{name}: task.{key} has no effect, since {path.name} is one file"
                 for key in ("subset", "files") if getattr(task, key)]
    elif task.files and (not (task.path or published.hub_id) or (task.path in _READERS and not path.is_dir())):
        train, held_out = named_files(task.files), []
        if len(train) == 1:
            train, held_out = _siblings(train[0], task)
    else:
        folder = open_folder(path, published) if task.path and path.is_dir() else fetch_folder(task, published)
        train, held_out, notes = folder.find_splits(task)
    rows = _read(train, renames, published)
    if held_out and held_out != train:
        return rows, _read(held_out, renames, published), notes
    if is_evaluating():
        notes.append(f"{name}: {train[0].name} has no other split to evaluate on; all its {len(rows)} rows are "
                     "evaluated on, those too that a run on this data learned from")
        return [], rows, notes
    if len(rows) < 2:
        raise ShoalError(f"task {name}: {train[0]} has 1 row and no other split to evaluate on; 2 or more rows are "
                         "needed")
    count = min(max(1, len(rows) // 10), task.num_questions or len(rows))
    notes.append(f"{name}: {train[0].name} has no other split to evaluate on; its last {count} of {len(rows)} rows "
                 "are held out")
    return rows[:-count], rows[-count:], notes


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


def _siblings(path: Path, task: TaskSection) -> tuple[list[Path], list[Path]]:
    """The files of training and of evaluation where one file is given: if it is named after a split, it is that split,
    and a file in its folder with the other's name is the other one."""
    for mine, other in ((task.split, task.eval_split), (task.eval_split, task.split)):
        before, found, after = path.name.rpartition(mine)
        sibling = path.with_name(f"{before}{other}{after}")
        if found and mine != other and sibling.is_file():
            return ([path], [sibling]) if mine == task.split else ([sibling], [path])
    return [path], []


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


def _columns(published: Published) -> str:
    return " and ".join(f"`{column}`" for column in published.columns) or "columns"


def _checked(row: Any, place: str, renames: Mapping[str, str], published: Published) -> dict[str, Any]:
    at = f"task {published.task}: {place}"
    if not isinstance(row, dict):
        raise ShoalError(f"{at} is a {type(row).__name__}; an object with {_columns(published)} is needed")
    row = _renamed(row, place, renames)
    for column in published.columns:
        if column not in row:
            raise ShoalError(f"{at} has no column {column!r}; its columns: {', '.join(map(str, row)) or 'none'} "
                             f"(task.columns=[{column}=OTHER] takes another)")
        if column in published.numbers:
            row[column] = _number_as_text(row[column])
        if column in published.texts and not isinstance(row[column], str):
            raise ShoalError(f"{at}: {column!r} is a {type(row[column]).__name__}; text is needed")
    return row


def _number_as_text(value: Any) -> Any:
    """`18` for 18 and 18.0; what is no number as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or not math.isfinite(value):
        return value
    return f"{value:f}" if isinstance(value, Decimal) else str(int(value) if value == int(value) else value)


def keep_labelled(rows: Sequence[dict[str, Any]], gold: Callable[[dict[str, Any]], Any], task: str, kind: str,
                  expected: str, label: str, notes: list[str]) -> list[dict[str, Any]]:
    """The rows that have a right answer, as their column `gold`; how many lack one is noted, ShoalError for all.

    `kind`: training or held-out; `expected`: what a row must have; `label`: what the others lack."""
    found = [row | {"gold": answer} for row in rows if (answer := gold(row)) is not None]
    if rows and not found:
        raise ShoalError(f"task {task}: none of the {len(rows)} {kind} rows has {expected}")
    if len(found) < len(rows):
        notes.append(f"{task}: {len(rows) - len(found)} of {len(rows)} {kind} rows have no {label} and were dropped")
    return found


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
