"""The files of a data set's splits: in a folder, or on the hub, whose data sets are folders too, once fetched.

A folder has its splits where its README declares them under `configs`, else in files named after them: `train.jsonl`,
`train-00000-of-00002.parquet`, either of them under `data/` or a subset's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shoal.config.schema import TaskSection
from shoal.tasks.data_file import SUFFIXES
from shoal.text import suggest
from shoal.types import ShoalError

_TRAIN = "train"
_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
"""What splits to evaluate on are called."""

_CONVERTED = "refs/convert/parquet"
"""The branch of a hub's data set that holds it as parquet, in folders SUBSET/SPLIT."""


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


@dataclass(frozen=True)
class Subset:
    """What a README declares of a subset: the folder it lies in and, where it says so, the files of each split."""

    folder: str = ""
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class DataFolder:
    """A folder with the files of a data set."""

    path: Path
    published: Published
    declared: Mapping[str, Subset]  # by name; the default one under the empty name too

    def find_splits(self, task: TaskSection) -> tuple[list[Path], list[Path], list[str]]:
        """The files of training and of evaluation, notes."""
        name = self.published.task
        task, notes = self._subset_in_split(task)

        def files_of(split: str) -> list[Path]:
            return self.split_files(task.subset, split)

        train = named_files(task.files, self.path, files_of) if task.files else files_of(task.split)
        if not train:
            self._check_subset(task)
            wanted = ", ".join(f"{stem.format(split=task.split)}.jsonl" for stem in reversed(self.published.stems))
            raise ShoalError(f"task {name}: {self.path} holds no {wanted} or parquet file of the split {task.split!r}; "
                             f"it holds {_listed(data_files(self.path))} (task.files names others)")
        held_out = [file for file in files_of(task.eval_split) if file not in train]
        others = [split for split in _HELD_OUT if set(files_of(split)) - set(train)]
        if others and not held_out and task.eval_split != task.split:
            notes.append(f"{name}: there is no split {task.eval_split} to evaluate on, but {' and '.join(others)}: "
                         f"task.eval_split={others[0]} takes it")
        return train, held_out, notes

    def split_files(self, subset: str, split: str) -> list[Path]:
        """The files of a split, shards in order; empty where there are none."""
        own = self.published.subset
        found = self.declared.get(subset or (own if own in self.declared else ""))
        if found and found.splits:
            return _matching(self.path, *found.splits.get(split, ()))
        if found and found.folder:
            bases = [f"{found.folder}/"]
        else:
            bases = [f"{subset}/"] if subset else ["", "data/", "default/", *([f"{own}/"] if own else [])]
        stems = [stem.format(split=split) for stem in self.published.stems]
        names = [*(stem + suffix for suffix in SUFFIXES for stem in stems),
                 *(f"{split}{mark}*{suffix}" for mark in "-_/" for suffix in SUFFIXES)]
        matches = (_matching(self.path, base + name) for base in bases for name in names)
        return next(filter(None, matches), [])

    def _subset_in_split(self, task: TaskSection) -> tuple[TaskSection, list[str]]:
        """The task as it is, or with the subset that its `split` really names and the split that its `files` name."""
        named = len(task.files) == 1 and re.fullmatch(r"[\w-]+", task.files[0])
        split = task.files[0] if named else _TRAIN
        if self.declared:
            names_subset = task.split in self.declared and task.split not in self.declared.get("", Subset()).splits
        else:
            names_subset = bool(self.split_files(task.split, split))
        if task.subset or split == task.split or not names_subset:
            return task, []
        note = (f"{self.published.task}: task.split={task.split} names a subset of the data set, so it is the subset, "
                f"and the split is {split}")
        return replace(task, subset=task.split, split=split, files=() if named else task.files), [note]

    def _check_subset(self, task: TaskSection) -> None:
        """ShoalError where the subset is what is wrong: unknown, or one of several to choose from."""
        subsets = [name for name in self.declared if name] or sorted(
            {entry.name for entry in self.path.iterdir() if data_files(entry)} if self.path.is_dir() else ())
        if task.subset and task.subset not in subsets:
            raise ShoalError(f"task.subset={task.subset!r}: {self.path} has no such subset"
                             f"{suggest(task.subset, subsets)}")
        found = [name for name in subsets if self.split_files(name, task.split)]
        if found and not task.subset:
            raise ShoalError(f"task {self.published.task}: {self.path} has the split {task.split!r} in "
                             f"{', '.join(found)}; choose one, task.subset={found[0]}")


def named_files(names: Sequence[str], folder: Path | None = None,
                files_of: Callable[[str], list[Path]] = lambda split: []) -> list[Path]:
    """The files that `task.files` names, by pattern (without a folder: from the current one) or by split."""
    found: dict[Path, None] = {}
    for name in names:
        if not name.strip():
            raise ShoalError(f"task.files={list(names)}: an empty name; expected the names or patterns of files")
        path = Path(name).expanduser()
        base = Path(path.anchor) if path.anchor else folder or Path()
        files = _matching(base, str(path.relative_to(path.anchor))) or files_of(name)
        if not files:
            if folder is None:
                raise ShoalError(f"task.files: there is no file {name!r}; without task.path, patterns count from here")
            raise ShoalError(f"task.files: {folder} holds no file {name!r}, nor is it a split; it holds "
                             f"{_listed(data_files(folder))}")
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
            found |= dict.fromkeys(data_files(entry) if entry.is_dir() else [entry])
    return list(found)


def data_files(folder: Path) -> list[Path]:
    """All files of a folder, and of those in it, that can hold rows."""
    return [file for file in sorted(folder.rglob("*")) if file.suffix in SUFFIXES] if folder.is_dir() else []


def _listed(files: Sequence[Path], limit: int = 12) -> str:
    names = [file.name for file in files]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "") or "nothing"


# ---- what a README declares


def open_folder(path: Path, published: Published) -> DataFolder:
    """A folder with the subsets that the `configs` in the YAML at the head of its README declare."""
    import yaml

    file = path / "README.md"
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        read = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        read = None
    configs = read.get("configs") if isinstance(read, dict) else None
    if configs is not None and not isinstance(configs, list):
        raise ShoalError(f"{file}: `configs` is a {type(configs).__name__}; expected a list of subsets")
    entries = [one for one in configs or () if isinstance(one, dict) and one.get("config_name")]
    declared = {str(one["config_name"]): _read_subset(one, file) for one in entries}
    default = [str(one["config_name"]) for one in entries if one.get("default") or len(entries) == 1]
    first = next(iter(default), "default")
    return DataFolder(path, published, declared | ({"": declared[first]} if first in declared else {}))


def _read_subset(entry: Mapping[str, Any], file: Path) -> Subset:
    """One entry of `configs`; what points out of the data set is left out."""
    folder = str(entry.get("data_dir") or "").strip("/")
    folder = folder if _is_inside(folder) else ""
    files = entry.get("data_files") or {}
    if isinstance(files, list) and not (files and isinstance(files[0], str)):
        pairs = [(one.get("split"), one.get("path")) for one in files if isinstance(one, dict)]
    else:
        pairs = list(files.items()) if isinstance(files, dict) else [(_TRAIN, files)]
    base = f"{folder}/" if folder else ""
    splits = {}
    for split, paths in pairs:
        if paths is not None and not isinstance(paths, str | list):
            raise ShoalError(f"{file}: `data_files` of {entry['config_name']!r} has a {type(paths).__name__}; expected "
                             "the names or patterns of files")
        paths = [paths] if isinstance(paths, str) else paths or []
        splits[str(split)] = [base + str(one).removeprefix("./") for one in paths if _is_inside(str(one))]
    return Subset(folder, splits)


def _is_inside(path: str) -> bool:
    return not Path(path).is_absolute() and ".." not in Path(path).parts and "://" not in path


# ---- the hub


def is_hub_id(path: str) -> bool:
    """True for what may name a data set of the hub, where there is no file or folder of that name."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not path.endswith(SUFFIXES)


def fetch_folder(task: TaskSection, published: Published) -> DataFolder:
    """The hub's files of the wanted splits, as a folder in its cache."""
    path = task.path
    if path and not is_hub_id(path):
        raise ShoalError(f"task.path={path!r}: there is no such file or folder")
    if not (path or published.hub_id):
        raise ShoalError(f"task {published.task} needs task.path: a jsonl or parquet file, a folder of them, or a hub "
                         "id")
    declared = open_folder(_download(path, published, ["README.md"]), published).declared
    wanted = _wanted(declared, task, published)
    folder = _download(path, published, wanted)
    names = [file.relative_to(folder).as_posix() for file in data_files(folder)]
    if not any(fnmatch(name, pattern) for name in names for pattern in wanted):
        folder = _download(path, published, [f"*{suffix}" for suffix in SUFFIXES])
    if not data_files(folder):  # of another format: the hub keeps a copy of public data sets as parquet
        folder, declared = _download(path, published, ["*.parquet"], revision=_CONVERTED), {}
    return DataFolder(folder, published, declared)


def _wanted(declared: Mapping[str, Subset], task: TaskSection, published: Published) -> list[str]:
    """Patterns of the files to fetch, in which `*` stands for folders too."""
    splits = dict.fromkeys((task.split, task.eval_split, *task.files))
    subset = next((name for name in (task.subset, task.split, published.subset, "") if name in declared), "")
    declared_files = declared.get(subset, Subset()).splits
    found = dict.fromkeys(pattern for split in (*splits, _TRAIN) for pattern in declared_files.get(split, ()))
    if found:
        return [*found, *(file for file in task.files if file.endswith(SUFFIXES))]
    base = task.subset or ("" if task.path else published.subset)
    return [f"{base + '/' if base else ''}*{split.removesuffix(suffix)}*{suffix}" for split in splits
            for suffix in SUFFIXES]


def _download(path: str, published: Published, patterns: list[str], **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    name = path or published.hub_id
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns, **options))
    except Exception as error:  # no network, no such data set, no permission: a local copy cures them all
        what = f"task.path={path!r}: there is no such file or folder here, and" if path else f"task {published.task}:"
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ShoalError(f"{what} the data set {name} could not be fetched ({cause}); give a local jsonl file or "
                         f"folder: task.path=FOLDER") from error
