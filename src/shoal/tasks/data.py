"""Reads a task's rows from files, folders or the Hugging Face hub, and splits them into training
rows and held-out rows.

The rules are the same for rows from Python (`examples.py`): if there are no rows to evaluate on,
the last ones are held out; and no held-out row is trained on, unless that was asked for.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from shoal.buckets import address, area_of, fetch, fetch_matching, is_bucket
from shoal.config.sections.task import TaskSection
from shoal.files import find_input, from_hub, within
from shoal.records import ShoalError
from shoal.tasks.task import DataReport
from shoal.text import did_you_mean

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
    """The training rows and the held-out rows of a task, in whatever form, with notes on how they
    came about."""

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

    def divide(self, source: str, num_questions: int, spread: bool = False) -> None:
        """Holds out a tenth of the rows in `train`, if the data has no other split: the last rows,
        at most `num_questions` (0: no limit), or with `spread` every tenth row. Inside
        `evaluating()` all rows are held out. ShoalError if there is only one row."""
        rows = self.train
        total = len(rows)
        files = self.data.train_files
        begin = f"{self.task}: {source} has no other split to evaluate on; "
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
                f"rows, or evaluate on the row that is trained on, {self.on_purpose}"
            )
        if spread:
            held = range(_HELD_OUT_SHARE - 1, total, _HELD_OUT_SHARE) or range(total - 1, total)
            self.notes.append(f"{begin}every tenth row of it is held out, {len(held)} of {total}")
        else:
            num_held = max(1, total // _HELD_OUT_SHARE)
            if num_questions:
                num_held = min(num_held, num_questions)
            held = range(total - num_held, total)
            self.notes.append(f"{begin}its last {len(held)} of {total} rows are held out")
        self.train = []
        self.held_out = []
        for number, row in enumerate(rows):
            if number in held:
                self.held_out.append(row)
            else:
                self.train.append(row)
        self.data = DataReport()
        first = 0
        for file, num_rows in files.items():
            num_held = sum(number in held for number in range(first, first + num_rows))
            self.data.train_files[file] = num_rows - num_held
            if num_held:
                self.data.held_out_files[file] = num_held
            first += num_rows

    def share(self) -> None:
        """Makes the training rows the held-out rows too."""
        self.held_out, self.shared = self.train, True
        self.data = DataReport(self.data.train_files, self.data.train_files)
        self.notes.append(
            f"{self.task}: {self.on_purpose}: evaluated on the rows that are trained on"
        )

    def keep(self, test: Callable[[Any], bool], expected: str, reason: str) -> None:
        """Drops the rows of both splits that fail a test, and notes how many; ShoalError if a split
        would be left empty. `expected` says what a row must have, `reason` what is wrong with the
        dropped ones."""
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
        """Drops the training rows whose `key` a held-out row has too. `noun` says what a row asks,
        for messages. ShoalError if no training row is left."""
        if self.shared:
            return
        held_out_keys = {key(row) for row in self.held_out}
        kept = [row for row in self.train if key(row) not in held_out_keys]
        if self.train and not kept and not is_evaluating():
            raise ShoalError(
                f"task {self.task}: every training {noun} is held out too: give other data, or "
                f"evaluate on the rows that are trained on, {self.on_purpose}"
            )
        self._drop(kept, f"{noun} held out too")

    def _drop(self, kept: list[Any], reason: str) -> None:
        """Replaces the training rows by those kept, and counts the others under the reason."""
        if len(kept) < len(self.train):
            self.data.dropped[reason] = len(self.train) - len(kept)
        self.train = kept


def asked_rows(total: int, num_questions: int) -> str:
    """Returns a text that says how many of `total` rows are evaluated on: at most `num_questions`
    (0: no limit)."""
    if 0 < num_questions < total:
        return f"the first {num_questions} of {total} rows"
    return f"all {total} rows"


# ---- the files


def read_splits(
    task: TaskSection, published: Published, make: Make, spread: bool = False
) -> Splits:
    """Reads the training and the held-out rows of a task: what `make` returns for each row, after
    its columns are renamed as `task.columns` says.

    A single file is the training split, unless its folder has a file of the other split. If there
    are no rows to evaluate on, some training rows are held out (`Splits.divide`, with `spread`).
    Raises `ShoalError` for data that is missing, empty or unreadable.
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
    """Returns the files to train on, the files to evaluate on (may be empty), and notes. Downloads
    the files of a data set of the hub."""
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
    if task.path and path.is_file():
        notes = []
        for key in ("subset", "files"):
            if getattr(task, key):
                notes.append(f"{name}: task.{key} has no effect, since {path.name} is one file")
        train, held_out = _siblings(path, task)
        return train, held_out, notes
    if task.files and not task.path:
        are_no_files_of_hub = not published.hub_id or all(is_bucket(file) for file in task.files)
        if are_no_files_of_hub:
            train, held_out = named_files(task.files), []
            if len(train) == 1:
                train, held_out = _siblings(train[0], task)
            return train, held_out, []
    if task.path and path.is_dir():
        folder = open_folder(path, published)
    else:
        folder = fetch_folder(task, published)
    return folder.find_splits(task)


def _siblings(path: Path, task: TaskSection) -> tuple[list[Path], list[Path]]:
    """Returns the files to train on and to evaluate on if only one file was given. If the file's
    name contains the name of a split, the file is that split, and a file next to it with the other
    split's name is the other one; else the file is the training split."""
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


# ---- reading


def _read(
    files: Sequence[Path], renames: Mapping[str, str], published: Published, make: Make
) -> tuple[list[Any], dict[str, int]]:
    """Returns what `make` returns for all rows of the files, and the number of rows of each file.
    ShoalError for a row without the required columns, and if there are no rows."""
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
            "needed"
        )
    return rows, counts


def _columns(published: Published) -> str:
    """Returns the names of the required columns, for messages."""
    return " and ".join(f"`{column}`" for column in published.columns) or "columns"


def _checked(
    row: Any, place: str, renames: Mapping[str, str], published: Published
) -> dict[str, Any]:
    """Returns a row with its columns renamed; ShoalError if a required column is missing or is not
    text. Numbers in columns that allow them become text, 18.0 becomes `18`."""
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
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return False
    return math.isfinite(value)


def renames_of(entries: Iterable[str]) -> dict[str, str]:
    """Returns entries `wanted=theirs` as a dict theirs -> wanted. ShoalError if a name occurs
    twice.

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
    """Returns a row with its columns renamed; ShoalError if one is missing, or if a name is
    taken."""
    for theirs, wanted in renames.items():
        if theirs not in row:
            raise ShoalError(
                f"task.columns: {wanted}={theirs}: {place} has no column {theirs!r}"
                f"{did_you_mean(theirs, row, lists_all=True)}"
            )
        if wanted in row and wanted not in renames:
            raise ShoalError(
                f"task.columns: {wanted}={theirs}: {place} has a column {wanted!r} too; rename "
                f"that as well, OTHER={wanted}"
            )
    return {renames.get(column, column): value for column, value in row.items()}


SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


_BATCH_ROWS = 1000


_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


_TRAIN = "train"


_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
"""Usual names of splits to evaluate on."""


_CONVERTED = "refs/convert/parquet"
"""The branch of a hub's data set that holds it as parquet, in folders SUBSET/SPLIT."""


PlacedRows: TypeAlias = "Iterator[tuple[str, Any]]"
"""Yields (place, row); the place is a text like `FILE, line 3`."""


# ---- the rows of a file


def read_file(file: Path, prefix: str = "") -> PlacedRows:
    """Yields each row of a file, with its place. Reads csv, parquet, and json or jsonl that holds a
    list of objects or one object on each line. Raises ShoalError, whose message begins with
    `prefix`, if the file cannot be read."""
    name = f"{prefix}{file}"
    if file.suffix not in SUFFIXES:
        raise ShoalError(
            f"{name} is of a kind that is not read: unpack or convert it; expected "
            f"{', '.join(SUFFIXES)}"
        )
    read = {".csv": _read_table, ".parquet": _read_parquet}.get(file.suffix, _read_json)
    try:
        for place, row in read(file, name):
            yield f"{file}, {place}", row
    except OSError as error:
        raise ShoalError(f"{name} cannot be read: {error.strerror or error}") from error


def _read_json(file: Path, name: str) -> PlacedRows:
    """Yields the rows of a file that holds a JSON list, or a JSON object on each line."""
    with file.open("rb") as lines:
        is_list = lines.read(1000).decode("utf-8-sig", "replace").lstrip().startswith("[")
        lines.seek(0)
        if is_list:
            rows = _parse_json(lines.read(), f"{name} is no JSON list of objects")
            for number, row in enumerate(rows):
                yield f"row {number}", row
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = _parse_json(line, f"{name}, line {number} is no JSON object")
                yield f"line {number}", row


def _parse_json(data: bytes, fault: str) -> Any:
    """Returns the value of JSON text in UTF-8; ShoalError, which begins with `fault`, if it is
    invalid."""
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text)
        if "\\u" in text:  # half a surrogate pair is no text, but JSON can write it
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise ShoalError(
            f"{fault}: it is no text in UTF-8 ({error.reason} at byte {error.start}); save the "
            "file as UTF-8"
        ) from error
    except UnicodeEncodeError as error:
        raise ShoalError(
            f"{fault}: it holds {half_character(error.object)}, half of a character that JSON "
            "writes as two; write both halves, or leave it out"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ShoalError(
            f"{fault}: {error}; expected one object a line, or one list of objects"
        ) from error


def half_character(text: str) -> str:
    """Returns the first half of a surrogate pair that stands alone in a text, written like
    `\\ud83d`; "" if there is none. Neither tokenizers nor files accept such a half."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start]).strip("'")
    return ""


def _read_table(file: Path, name: str) -> PlacedRows:
    """Yields the rows of a csv file with a header. All values stay text, so that the answer `007`
    keeps its zeros."""
    csv.field_size_limit(2**31 - 1)  # the module's own limit of 131,072 characters is a long prompt
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            header = next(reader, [])
            for sign, plural in _OTHER_DELIMITERS.items():
                if len(header) == 1 and sign in header[0]:
                    raise ShoalError(
                        f"{name}: its header, {header[0][:80]!r}, has {plural} between its "
                        "columns; expected commas: save the table with commas"
                    )
            if len(set(header)) < len(header):
                raise ShoalError(
                    f"{name}: two columns of its header have the same name, {', '.join(header)}"
                )
            for values in filter(None, reader):
                if len(values) != len(header):
                    raise ShoalError(
                        f"{name}, line {reader.line_num} has {len(values)} values, the header has "
                        f"{len(header)}: quote a value that holds a comma"
                    )
                yield f"line {reader.line_num}", dict(zip(header, values, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ShoalError(
                f"{name} cannot be read as a table in UTF-8, near line {reader.line_num}: {error}"
            ) from error


def _read_parquet(file: Path, name: str) -> PlacedRows:
    """Yields the rows of a parquet file."""
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist():
                    yield f"row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ShoalError(
            f"{name} cannot be read as parquet: {str(error).splitlines()[0]}"
        ) from error


# ---- the files of a folder


@dataclass(frozen=True)
class Published:
    """Where the rows of a built-in task come from, and which columns they must have.

    >>> Published(
    ...     "gsm8k", "openai/gsm8k", ("question", "answer"), ("gsm8k_{split}", "{split}"),
    ...     subset="main",
    ... )
    """

    task: str
    hub_id: str = ""  # the data set on the hub if task.path is empty; "": there is none
    columns: tuple[str, ...] = ()  # that every row must have
    # Possible names of a split's file, without suffix, tried in order.
    stems: tuple[str, ...] = ("{split}",)
    subset: str = ""  # subset of the hub's data set, unless task.subset names another
    texts: tuple[str, ...] = ()  # those of `columns` that must be text
    numbers: tuple[str, ...] = ()  # those of `texts` that may be numbers, which become text


@dataclass(frozen=True)
class Subset:
    """What the README of a data set declares about one subset: its folder and, if declared, the
    file patterns of each split."""

    folder: str = ""
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class DataFolder:
    """A folder that holds the files of a data set."""

    path: Path
    published: Published
    # Subsets that the README declares, by name; the default one also under "".
    declared: Mapping[str, Subset]

    def find_splits(self, task: TaskSection) -> tuple[list[Path], list[Path], list[str]]:
        """Returns the files to train on, the files to evaluate on (may be empty), and notes.
        ShoalError if there are no files to train on."""
        name = self.published.task
        task, notes = self._subset_in_split(task)

        def files_of(split: str) -> list[Path]:
            return self.split_files(task.subset, split)

        train = named_files(task.files, self.path, files_of) if task.files else files_of(task.split)
        if not train:
            raise self._no_training_files(task)
        held_out = [file for file in files_of(task.eval_split) if file not in train]
        others = [split for split in _HELD_OUT if set(files_of(split)) - set(train)]
        if others and not held_out and task.eval_split != task.split:
            notes.append(
                f"{name}: there is no split {task.eval_split} to evaluate on, but "
                f"{' and '.join(others)}: task.eval_split={others[0]} takes it"
            )
        return train, held_out, notes

    def _no_training_files(self, task: TaskSection) -> ShoalError:
        """Returns the error for a folder without files of the wanted split."""
        files = data_files(self.path)
        names = [f"{stem.format(split=task.split)}.jsonl" for stem in self.published.stems]
        wanted = ", ".join(reversed(names))
        in_subset = f" in the subset {task.subset!r}" if task.subset else ""
        subsets = [subset for subset in self.declared if subset]
        if not subsets:
            subsets = sorted({file.parent.name for file in files if file.parent != self.path})
        advice = f"; task.subset is one of {_some(subsets)}" if subsets else ""
        return ShoalError(
            f"task {self.published.task}: {self.path} holds no {wanted} or parquet file of the "
            f"split {task.split!r}{in_subset}; it holds {_listed(files)} (task.files names others)"
            f"{advice}"
        )

    def split_files(self, subset: str, split: str) -> list[Path]:
        """Returns the files of a split of a subset ("": the default one), shards in order; [] if
        there are none. Follows the README's declaration, else tries the usual names."""
        own = self.published.subset
        name = subset
        if not name and own in self.declared:
            name = own
        declared = self.declared.get(name, Subset())
        if declared.splits:
            return _matching(self.path, declared.splits.get(split, ()))
        folder = declared.folder or subset
        if folder:
            bases = [f"{folder}/"]
        else:
            bases = ["", "data/", "default/"]
            if own:
                bases.append(f"{own}/")
        patterns = []
        for suffix in SUFFIXES:
            for stem in self.published.stems:
                patterns.append(stem.format(split=split) + suffix)
        for mark in "-_/":
            for suffix in SUFFIXES:
                patterns.append(f"{split}{mark}*{suffix}")
        for base in bases:
            for pattern in patterns:
                files = _matching(self.path, [base + pattern])
                if files:
                    return files
        return []

    def _subset_in_split(self, task: TaskSection) -> tuple[TaskSection, list[str]]:
        """Returns the settings with `split` and `subset` corrected, and a note if they were: if
        `task.split` names a subset, it becomes the subset, and `task.files` names the split.
        MaxText's settings are of this form: `hf_data_split=main hf_data_files=train`."""
        named = len(task.files) == 1 and re.fullmatch(r"[\w-]+", task.files[0])
        split = task.files[0] if named else _TRAIN
        if self.declared:
            names_subset = (
                task.split in self.declared
                and task.split not in self.declared.get("", Subset()).splits
            )
        else:
            names_subset = bool(self.split_files(task.split, split))
        if task.subset or split == task.split or not names_subset:
            return task, []
        note = (
            f"{self.published.task}: task.split={task.split} names a subset of the data set, so it "
            f"is the subset, and the split is {split}"
        )
        files = () if named else task.files
        return replace(task, subset=task.split, split=split, files=files), [note]


def named_files(
    names: Sequence[str],
    folder: Path | None = None,
    files_of: Callable[[str], list[Path]] | None = None,
) -> list[Path]:
    """Returns the files that the entries of `task.files` name: a pattern in `folder` (None: from
    the current directory), an address in a bucket, which is fetched, or with `files_of` the name of
    a split. ShoalError for an entry that names no file."""
    all_files: list[Path] = []
    for name in names:
        if is_bucket(name):
            for path in fetch_matching(name, "task.files"):
                all_files += _rows_of(path)
            continue
        path = Path(name).expanduser()
        base = folder or Path()
        if path.anchor:
            base = Path(path.anchor)
        files: list[Path] = []
        if name.strip():
            files = _matching(base, [str(path.relative_to(path.anchor))])
            if not files and files_of is not None:
                files = files_of(name)
        if not files and folder:
            raise ShoalError(
                f"task.files: there is no file {name!r} in {folder}, nor is it a split; it holds "
                f"{_listed(data_files(folder))}"
            )
        if not files:
            raise ShoalError(
                f"task.files: there is no file {name!r}; without task.path, patterns count "
                f"from here"
            )
        all_files += files
    return list(dict.fromkeys(all_files))


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Returns the files of a folder that match patterns, in order; for a matching folder the data
    files in it."""
    files: list[Path] = []
    for pattern in patterns:
        try:
            entries = sorted(folder.glob(pattern))
        except (ValueError, NotImplementedError) as error:
            raise ShoalError(
                f"{folder}: {pattern!r} cannot be read as a name or pattern of files: {error}"
            ) from error
        for entry in entries:
            files += _rows_of(entry)
    return list(dict.fromkeys(files))


def _rows_of(path: Path) -> list[Path]:
    """Returns the path itself, or the data files of a folder."""
    return data_files(path) if path.is_dir() else [path]


def data_files(folder: Path) -> list[Path]:
    """Returns all files in a folder and its subfolders whose suffix is one of SUFFIXES; [] if there
    is no folder."""
    if not folder.is_dir():
        return []
    return [file for file in sorted(folder.rglob("*")) if file.suffix in SUFFIXES]


def _listed(files: Sequence[Path]) -> str:
    """Returns the names of files as a text."""
    return _some([file.name for file in files])


def _some(names: Sequence[str], limit: int = 12) -> str:
    """Returns names as a text, at most `limit` of them."""
    if not names:
        return "nothing"
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text


# ---- what a README declares


def open_folder(path: Path, published: Published) -> DataFolder:
    """Returns a folder with the subsets that its README declares, in `configs` of the YAML at its
    head. Declarations that cannot be understood are ignored."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    file = path / "README.md"
    configs = None
    if file.is_file():
        with contextlib.suppress(ValueError, YAMLError):
            configs = (metadata_load(file) or {}).get("configs")
    entries = []
    if isinstance(configs, list):
        for entry in configs:
            if isinstance(entry, dict) and entry.get("config_name"):
                entries.append(entry)
    declared: dict[str, Subset] = {}
    defaults = []
    for entry in entries:
        name = str(entry["config_name"])
        declared[name] = _read_subset(entry)
        if entry.get("default") or len(entries) == 1:
            defaults.append(name)
    default = defaults[0] if defaults else "default"
    if default in declared:
        declared[""] = declared[default]
    return DataFolder(path, published, declared)


def _read_subset(entry: Mapping[str, Any]) -> Subset:
    """Returns the subset that one entry of `configs` declares, without paths that lead out of the
    data set."""
    folder = str(entry.get("data_dir") or "").strip("/")
    if not _is_inside(folder):
        folder = ""
    base = f"{folder}/" if folder else ""
    files = entry.get("data_files") or {}
    if isinstance(files, list) and isinstance(files[0], dict):
        by_split = {}
        for split_and_path in files:
            if isinstance(split_and_path, dict):
                by_split[split_and_path.get("split")] = split_and_path.get("path")
    elif isinstance(files, dict):
        by_split = files
    else:
        by_split = {_TRAIN: files}
    splits: dict[str, list[str]] = {}
    for split, paths in by_split.items():
        patterns = []
        for path in paths if isinstance(paths, list) else [paths]:
            if path and _is_inside(str(path)):
                patterns.append(base + str(path).removeprefix("./"))
        splits[str(split)] = patterns
    return Subset(folder, splits)


def _is_inside(path: str) -> bool:
    """True if a declared path stays inside of the data set."""
    return not Path(path).is_absolute() and ".." not in Path(path).parts and "://" not in path


# ---- the hub


def is_hub_id(path: str) -> bool:
    """True if a text has the form of the name of a data set on the hub, `owner/name`. Whether there
    is a file or folder of that name is checked elsewhere."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not path.endswith(SUFFIXES)


def fetch_folder(task: TaskSection, published: Published) -> DataFolder:
    """Downloads the files of the wanted splits from the hub, and returns the folder in the hub's
    cache: the files that the README declares, else all of the subset. If the data set has none in a
    readable format, takes the hub's copy as parquet."""
    path = task.path
    if path and not is_hub_id(path):
        at = f" at {Path(path).expanduser()}" if path.startswith("~") else ""
        raise ShoalError(f"task.path={path!r}: there is no such file or folder{at}")
    if not (path or published.hub_id):
        raise ShoalError(
            f"task {published.task} needs task.path: a jsonl or parquet file, a folder of them, or "
            "a hub id"
        )
    declared = open_folder(_download(path, published, ["README.md"]), published).declared
    splits: Mapping[str, Sequence[str]] = {}
    for name in (task.subset, task.split, published.subset, ""):
        if name in declared:
            splits = declared[name].splits
            break
    patterns: list[str] = []
    for split in (task.split, task.eval_split, *task.files, _TRAIN):
        patterns += splits.get(split, ())
    patterns = list(dict.fromkeys(patterns))
    if patterns:
        patterns += [file for file in task.files if file.endswith(SUFFIXES)]
    else:
        base = task.subset
        if not base and not path:
            base = published.subset
        if base:
            base += "/"
        patterns = [f"{base}*{suffix}" for suffix in SUFFIXES]
    folder = _download(path, published, patterns)
    if not data_files(folder):
        # The files have another format, but the hub keeps copies of public data sets as parquet.
        folder = _download(path, published, ["*.parquet"], revision=_CONVERTED)
        declared = {}
    return DataFolder(folder, published, declared)


def _download(path: str, published: Published, patterns: list[str], **options: Any) -> Path:
    """Downloads the files of a data set that match patterns; returns their folder. ShoalError if
    that fails."""
    name = path or published.hub_id
    try:
        return from_hub(name, repo_type="dataset", allow_patterns=patterns, **options)
    # No network, no such data set, no permission: a local copy cures them all.
    except Exception as error:
        what = f"task {published.task}:"
        if path:
            what = f"task.path={path!r}: there is no such file or folder here, and"
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ShoalError(
            f"{what} the data set {name} could not be fetched ({cause}); give a local jsonl file "
            "or folder: task.path=FOLDER"
        ) from error
