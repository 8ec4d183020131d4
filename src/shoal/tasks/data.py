"""Where a task's rows are, and reading them: a file, a folder of files, or a data set on the hub.

A folder (the hub's are folders too, once fetched) has its splits where its README declares them under `configs`, else
in files named after them: `train.jsonl`, `train-00000-of-00002.parquet`, either of them under `data/` or a subset's
name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from shoal.config.schema import TaskSection
from shoal.tasks.data_file import SUFFIXES, read_file
from shoal.text import suggest
from shoal.types import ShoalError

_TRAIN = "train"
_READERS = ("json", "parquet", "csv", "arrow")
"""Given as task.path, these say of what kind the files in task.files are; they stand for no data set."""
_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
"""What splits to evaluate on are called."""

_CONVERTED = "refs/convert/parquet"
"""The branch of a hub's data set that holds it as parquet, in folders SUBSET/SPLIT."""

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


@dataclass(frozen=True)
class Published:
    """Where a task's rows come from, and what they must hold.

    >>> Published("gsm8k", "openai/gsm8k", ("question", "answer"), ("gsm8k_{split}", "{split}"), subset="main")
    """

    task: str
    hub_id: str = ""  # the data set where task.path names none; empty: there is none
    columns: tuple[str, ...] = ()  # every row has them
    stems: tuple[str, ...] = ("{split}",)  # names of the files of a split, without suffix, tried in order
    subset: str = ""  # of the hub's data set, where task.subset names none
    texts: tuple[str, ...] = ()  # those of `columns` that must be text
    numbers: tuple[str, ...] = ()  # those of `texts` that may be numbers, taken as text


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
        train, held_out, notes = _named_files(None, task, lambda split: []), [], []
        if len(train) == 1:
            train, held_out = _siblings(train[0], task)
    else:
        if task.path and path.is_dir():
            folder, declared = path, _declared(path)
        else:
            folder, declared = _fetch(task, published)
        train, held_out, notes = _in_folder(folder, declared, task, published)
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
        raise ShoalError(f"task {task}: {file} has 1 row and no split beside it to evaluate on; 2 or more are needed")
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


# ---- a folder


@dataclass(frozen=True)
class _Subset:
    """What a README declares of a subset: the folder it lies in and, where it says so, the files of each split."""

    folder: str = ""
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict)


_Declared = Mapping[str, _Subset]
"""Name -> subset; the default one under the empty name too."""


def _in_folder(folder: Path, declared: _Declared, task: TaskSection, published: Published
               ) -> tuple[list[Path], list[Path], list[str]]:
    """The files of training and of evaluation, notes."""
    task, notes = _subset_in_split(folder, declared, task, published)

    def files_of(split: str) -> list[Path]:
        return _split_files(folder, declared, task.subset, split, published)

    train = _named_files(folder, task, files_of) if task.files else files_of(task.split)
    if not train:
        _check_subset(folder, declared, task, published)
        wanted = ", ".join(f"{stem.format(split=task.split)}.jsonl" for stem in reversed(published.stems))
        raise ShoalError(f"task {published.task}: {folder} holds no {wanted} or parquet file of the split "
                         f"{task.split!r}; it holds {_listed(_data_files(folder))} (task.files names others)")
    held_out = [file for file in files_of(task.eval_split) if file not in train]
    if not held_out and (others := [split for split in _HELD_OUT if set(files_of(split)) - set(train)]):
        notes.append(f"{published.task}: there is no split {task.eval_split} to evaluate on, but "
                     f"{' and '.join(others)}: task.eval_split={others[0]} takes it")
    return train, held_out, notes


def _subset_in_split(folder: Path, declared: _Declared, task: TaskSection, published: Published
                     ) -> tuple[TaskSection, list[str]]:
    """The task as it is, or with the subset that its `split` really names and the split that its `files` name."""
    named = len(task.files) == 1 and re.fullmatch(r"[\w-]+", task.files[0])
    split = task.files[0] if named else _TRAIN
    default = declared.get("", _Subset())
    names_subset = task.split in declared and task.split not in default.splits if declared else \
        bool(_split_files(folder, declared, task.split, split, published))
    if task.subset or split == task.split or not names_subset:
        return task, []
    note = (f"{published.task}: task.split={task.split} names a subset of the data set, so it is the subset, and the "
            f"split is {split}")
    return replace(task, subset=task.split, split=split, files=() if named else task.files), [note]


def _split_files(folder: Path, declared: _Declared, subset: str, split: str, published: Published) -> list[Path]:
    """The files of a split, shards in order; empty where there are none."""
    found = declared.get(subset or (published.subset if published.subset in declared else ""))
    if found and found.splits:
        return _matching(folder, *found.splits.get(split, ()))
    if found and found.folder:
        bases = [f"{found.folder}/"]
    else:
        others = ("", "data/", "default/", *([f"{published.subset}/"] if published.subset else []))
        bases = [f"{subset}/"] if subset else others
    patterns = (base + name for base in bases for name in _names(split, published))
    return next((files for pattern in patterns if (files := _matching(folder, pattern))), [])


def _names(split: str, published: Published) -> list[str]:
    """Patterns of what the files of a split are called, the likeliest first."""
    stems = [stem.format(split=split) for stem in published.stems]
    return [*(stem + suffix for suffix in SUFFIXES for stem in stems),
            *(f"{split}{mark}*{suffix}" for mark in "-_/" for suffix in SUFFIXES)]


def _named_files(folder: Path | None, task: TaskSection, files_of: Callable[[str], list[Path]]) -> list[Path]:
    """The files that `task.files` names, by pattern (without a folder: from where we are) or by split."""
    found: dict[Path, None] = {}
    for name in task.files:
        if not name.strip():
            raise ShoalError(f"task.files={list(task.files)}: an empty name; expected the names or patterns of files")
        path = Path(name).expanduser()
        base = Path(path.anchor) if path.anchor else folder or Path()
        files = _matching(base, str(path.relative_to(path.anchor))) or files_of(name)
        if not files:
            if folder is None:
                raise ShoalError(f"task.files: there is no file {name!r}; without task.path, patterns count from here")
            raise ShoalError(f"task.files: {folder} holds no file {name!r}, nor is it a split; it holds "
                             f"{_listed(_data_files(folder))}")
        found |= dict.fromkeys(files)
    return list(found)


def _matching(folder: Path, *patterns: str) -> list[Path]:
    """The files of a folder that patterns name, in order; those of a folder that one names."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        try:
            entries = sorted(folder.glob(pattern))
        except (ValueError, NotImplementedError) as error:
            raise ShoalError(f"{folder}: {pattern!r} cannot be read as a name or pattern of files: {error}") from error
        for entry in entries:
            found |= dict.fromkeys(_data_files(entry) if entry.is_dir() else [entry])
    return list(found)


def _data_files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.suffix in SUFFIXES] if folder.is_dir() else []


def _check_subset(folder: Path, declared: _Declared, task: TaskSection, published: Published) -> None:
    """ShoalError where the subset is what is wrong: unknown, or one of several to choose from."""
    subsets = [name for name in declared if name] or sorted(
        {entry.name for entry in folder.iterdir() if entry.is_dir() and _data_files(entry)} if folder.is_dir() else ())
    if task.subset and task.subset not in subsets:
        raise ShoalError(f"task.subset={task.subset!r}: {folder} has no such subset{suggest(task.subset, subsets)}")
    found = [name for name in subsets if _split_files(folder, declared, name, task.split, published)]
    if found and not task.subset:
        raise ShoalError(f"task {published.task}: {folder} has the split {task.split!r} in {', '.join(found)}; choose "
                         f"one, task.subset={found[0]}")


def _listed(files: Sequence[Path], limit: int = 12) -> str:
    names = [file.name for file in files]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "") or "nothing"


# ---- what a README declares


def _declared(folder: Path) -> _Declared:
    """The `configs` of the YAML at the head of a README."""
    import yaml

    file = folder / "README.md"
    head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", file.read_text("utf-8", "replace"), re.DOTALL) \
        if file.is_file() else None
    if not head:
        return {}
    try:
        read = yaml.safe_load(head[1])
    except yaml.YAMLError:
        return {}
    configs = read.get("configs") if isinstance(read, dict) else None
    if configs is not None and not isinstance(configs, list):
        raise ShoalError(f"{file}: `configs` is a {type(configs).__name__}; expected a list of subsets")
    entries = [one for one in configs or () if isinstance(one, dict) and one.get("config_name")]
    declared = {str(one["config_name"]): _subset(one, file) for one in entries}
    default = [str(one["config_name"]) for one in entries if one.get("default") or len(entries) == 1]
    first = next(iter(default), "default")
    return declared | ({"": declared[first]} if first in declared else {})


def _subset(entry: Mapping[str, Any], file: Path) -> _Subset:
    """One entry of `configs`; what points out of the data set is left out."""
    folder = str(entry.get("data_dir") or "").strip("/")
    folder = folder if _inside(folder) else ""
    files = entry.get("data_files") or {}
    if isinstance(files, str) or (isinstance(files, list) and files and isinstance(files[0], str)):
        pairs: list[tuple[Any, Any]] = [(_TRAIN, files)]
    elif isinstance(files, list):
        pairs = [(one.get("split"), one.get("path")) for one in files if isinstance(one, dict)]
    else:
        pairs = list(files.items()) if isinstance(files, dict) else [(_TRAIN, files)]
    for _, paths in pairs:
        if paths is not None and not isinstance(paths, str | list):
            raise ShoalError(f"{file}: `data_files` of {entry['config_name']!r} has a {type(paths).__name__}; expected "
                             "the names or patterns of files")
    base = f"{folder}/" if folder else ""
    return _Subset(folder, {str(split): [base + str(path).removeprefix("./") for path in
                                         ([paths] if isinstance(paths, str) else paths or ()) if _inside(str(path))]
                            for split, paths in pairs})


def _inside(path: str) -> bool:
    return not Path(path).is_absolute() and ".." not in Path(path).parts and "://" not in path


# ---- the hub


def _fetch(task: TaskSection, published: Published) -> tuple[Path, _Declared]:
    """The hub's files of the wanted splits, as a folder in its cache."""
    path = task.path
    if path and (not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.endswith(SUFFIXES)):
        raise ShoalError(f"task.path={path!r}: there is no such file or folder")
    if not (path or published.hub_id):
        raise ShoalError(f"task {published.task} needs task.path: a jsonl or parquet file, a folder of them, or a hub "
                         "id")
    folder = _download(path, published, ["README.md"])
    declared = _declared(folder)
    wanted = _wanted(declared, task, published, path)
    folder = _download(path, published, wanted)
    names = [file.relative_to(folder).as_posix() for file in _data_files(folder)]
    if not any(fnmatch(name, pattern) for name in names for pattern in wanted):
        folder = _download(path, published, [f"*{suffix}" for suffix in SUFFIXES])
    if not _data_files(folder):  # of another format: the hub keeps a copy of public data sets as parquet
        folder, declared = _download(path, published, ["*.parquet"], revision=_CONVERTED), {}
    return folder, declared


def _wanted(declared: _Declared, task: TaskSection, published: Published, path: str) -> list[str]:
    """Patterns of the files to fetch, in which `*` stands for folders too."""
    splits = dict.fromkeys((task.split, task.eval_split, *task.files))
    subset = next((name for name in (task.subset, task.split, published.subset, "") if name in declared), "")
    found = [pattern for split in (*splits, _TRAIN) for pattern in declared[subset].splits.get(split, ())] \
        if subset in declared else []
    if found:
        return [*dict.fromkeys(found), *(file for file in task.files if file.endswith(SUFFIXES))]
    base = task.subset or ("" if path else published.subset)
    return [f"{base + '/' if base else ''}*{split.removesuffix(suffix)}*{suffix}" for split in splits
            for suffix in SUFFIXES]


def _download(path: str, published: Published, patterns: list[str], **options: str) -> Path:
    from huggingface_hub import snapshot_download

    name = path or published.hub_id
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns, **options))
    except Exception as error:  # no network, no such data set, no permission: all are mended by a local copy
        what = f"task.path={path!r}: there is no such file or folder here, and" if path else f"task {published.task}:"
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ShoalError(f"{what} the data set {name} could not be fetched ({cause}); give a local jsonl file or "
                         f"folder: task.path=FOLDER") from error


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
