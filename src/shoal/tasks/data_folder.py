"""Finds the files of a data set's splits: in a folder, or on the Hugging Face hub, whose files are
downloaded. Follows what the data set's README declares.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.buckets import fetch_matching, is_bucket
from shoal.config.sections.task import TaskSection
from shoal.files import from_hub
from shoal.records import ShoalError
from shoal.tasks.data_files import SUFFIXES
from shoal.text import first_line

_TRAIN = "train"


_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
"""Usual names of splits to evaluate on."""


_CONVERTED = "refs/convert/parquet"
"""The branch of a hub's data set that holds it as parquet, in folders SUBSET/SPLIT."""


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
        """Returns the files of `task.split` (or the files that `task.files` names), the files of
        `task.eval_split` that are not among them, and notes for the user. ShoalError if there are
        no files to train on. A note names another split to evaluate on if that of `task.eval_split`
        is missing. The files to evaluate on are [] if there are none."""
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
        """Returns the error for a folder without files of `task.split`. It lists the files and
        subsets that exist."""
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
        there are none. Follows the README's declaration, else tries the usual names: the first
        folder and pattern that match any file decide. If the README declares the subset's files,
        other splits have none."""
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
        for mark in "-_/":  # shards: train-00000-of-00002.parquet, train_1.jsonl, train/a.csv
            for suffix in SUFFIXES:
                patterns.append(f"{split}{mark}*{suffix}")
        for base in bases:
            for pattern in patterns:
                files = _matching(self.path, [base + pattern])
                if files:
                    return files
        return []

    def _subset_in_split(self, task: TaskSection) -> tuple[TaskSection, list[str]]:
        """Returns the settings, corrected if `task.split` names a subset of the data set, and a
        list with a note if they were; else the settings themselves and []. They are corrected only
        if `task.subset` is empty, and if the README declares such a subset (and no such split), or,
        without declarations, if there are files of `task.split` as a subset. Then the subset is
        `task.split`, and the split is the word in `task.files`, or `train`. MaxText's settings are
        of this form: `hf_data_split=main hf_data_files=train`."""
        files_are_a_split = len(task.files) == 1 and re.fullmatch(r"[\w-]+", task.files[0])
        split = task.files[0] if files_are_a_split else _TRAIN
        if self.declared:
            names_subset = (
                task.split in self.declared
                and task.split not in self.declared.get("", Subset()).splits
            )
        else:
            # Without declarations subsets are folders.
            names_subset = bool(self.split_files(task.split, split))
        if task.subset or split == task.split or not names_subset:
            return task, []
        note = (
            f"{self.published.task}: task.split={task.split} names a subset of the data set, so it "
            f"is the subset, and the split is {split}"
        )
        files = () if files_are_a_split else task.files
        return replace(task, subset=task.split, split=split, files=files), [note]


def named_files(
    names: Sequence[str],
    folder: Path | None = None,
    files_of: Callable[[str], list[Path]] | None = None,
) -> list[Path]:
    """Returns the files that the entries of `task.files` name, in the order of the entries. A file
    that several entries name is there once, unless the entries are equal: one that is listed twice
    is there twice, so that its rows count twice.

    An entry is a pattern in `folder` (None: in the current directory), an absolute pattern, or an
    address in a bucket, whose files are downloaded. A folder that matches stands for the data files
    in it. An entry that matches no file may be the name of a split, whose files `files_of` returns
    ([] if there is no such split). ShoalError for an entry that names no file."""
    all_files: list[Path] = []
    first_entries: dict[Path, str] = {}  # file -> the first entry that names it

    def add(files: Sequence[Path], name: str) -> None:
        """Adds the files of an entry, without those that another entry has named before."""
        for file in files:
            if first_entries.setdefault(file, name) == name:
                all_files.append(file)

    for name in names:
        if is_bucket(name):
            files_of_bucket: list[Path] = []
            for path in fetch_matching(name, "task.files"):
                files_of_bucket += _files_at(path)
            add(list(dict.fromkeys(files_of_bucket)), name)
            continue
        path = Path(name).expanduser()
        base = folder or Path()
        if path.anchor:
            base = Path(path.anchor)
        files: list[Path] = []
        # A blank entry is no pattern.
        if name.strip():
            # `glob` takes no absolute pattern: what follows the root. A relative one stays as it
            # is.
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
                f"task.files: there is no file {name!r}; without task.path, patterns are "
                "relative to this folder"
            )
        add(files, name)
    return all_files


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Returns the files of a folder that match the patterns, each once, in the order of the
    patterns and then of their names. For a folder that matches: the data files in it. ShoalError
    for a text that is no pattern of files."""
    files: list[Path] = []
    for pattern in patterns:
        try:
            entries = sorted(folder.glob(pattern))
        except (ValueError, NotImplementedError) as error:
            raise ShoalError(
                f"{folder}: {pattern!r} cannot be read as a name or pattern of files: {error}"
            ) from error
        for entry in entries:
            files += _files_at(entry)
    return list(dict.fromkeys(files))


def _files_at(path: Path) -> list[Path]:
    """Returns the path itself, or the data files of a folder. Whether the path exists is not
    checked; of a file the suffix is not either."""
    return data_files(path) if path.is_dir() else [path]


def data_files(folder: Path) -> list[Path]:
    """Returns all files in a folder and its subfolders whose suffix is one of SUFFIXES, sorted by
    path; [] if `folder` is no folder."""
    if not folder.is_dir():
        return []
    return [file for file in sorted(folder.rglob("*")) if file.suffix in SUFFIXES]


def _listed(files: Sequence[Path]) -> str:
    """Returns the names of files as a text. Their folders are left out; of more than 12 names the
    others are counted."""
    return _some([file.name for file in files])


def _some(names: Sequence[str], limit: int = 12) -> str:
    """Returns names as a text, at most `limit` of them and the number of the others; `nothing` if
    there are none."""
    if not names:
        return "nothing"
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text


# ---- what a README declares


def open_folder(path: Path, published: Published) -> DataFolder:
    """Returns a `DataFolder` of a path, which is not checked, with the subsets that its README
    declares in `configs` of the YAML at its head. Declarations that cannot be read are ignored. The
    default subset is the one marked so, the only one, or the one called `default`. `published` has
    the names that files of splits may have."""
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
    """Returns the subset that one entry of `configs` in a README declares. Files that are declared
    without a split are those of `train`. Paths that lead out of the data set are left out. Patterns
    begin with the subset's folder, if it has one."""
    folder = str(entry.get("data_dir") or "").strip("/")
    if not _is_inside(folder):
        folder = ""
    base = f"{folder}/" if folder else ""
    files = entry.get("data_files") or {}
    # `files` is [{"split": ..., "path": ...}, ...], {split: path or paths}, or a path or paths.
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
    is a file or folder of that name is checked elsewhere. False if it ends like a data file."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not path.endswith(SUFFIXES)


def fetch_folder(task: TaskSection, published: Published) -> DataFolder:
    """Downloads files of a data set from the hub and returns their folder in the hub's cache: the
    files that the README declares for the splits of the settings, else all files of the subset. If
    none has a format that is read, downloads the hub's own conversion to parquet. The data set is
    `task.path`, or the published one if that is empty. ShoalError if there is neither, or if the
    download fails."""
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
    # `task.split` may name a subset (`_subset_in_split`); "" is the default one.
    for name in (task.subset, task.split, published.subset, ""):
        if name in declared:
            splits = declared[name].splits
            break
    patterns: list[str] = []
    for split in (task.split, task.eval_split, *task.files, _TRAIN):
        patterns += splits.get(split, ())
    patterns = list(dict.fromkeys(patterns))
    named = [file for file in task.files if file.endswith(SUFFIXES)]
    if patterns:
        # Files that are named by themselves, besides the splits.
        patterns += named
    elif named and task.split == task.eval_split:  # no other split is evaluated on
        patterns = named
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
        # What the README declares are the files of the other format.
        declared = {}
    return DataFolder(folder, published, declared)


def _download(path: str, published: Published, patterns: list[str], **options: Any) -> Path:
    """Downloads the files of a data set that match patterns, and returns their folder. The data set
    is `path`, or the published one if that is empty. ShoalError if the download fails. `options`
    are passed to `from_hub`, such as `revision`."""
    from huggingface_hub.errors import GatedRepoError

    name = path or published.hub_id
    try:
        return from_hub(name, repo_type="dataset", allow_patterns=patterns, **options)
    except GatedRepoError as error:
        raise ShoalError(
            f"task {published.task}: the data set {name} is gated: accept its terms at "
            f"https://huggingface.co/datasets/{name}, and put a token of that account into "
            "HF_TOKEN; or give a local copy, task.path=FOLDER"
        ) from error
    # No network, no such data set, no permission: a local copy cures them all.
    except Exception as error:
        what = f"task {published.task}:"
        if path:
            what = f"task.path={path!r}: there is no such file or folder here, and"
        raise ShoalError(
            f"{what} the data set {name} could not be fetched ({first_line(error)}); give a "
            "local jsonl file or folder: task.path=FOLDER"
        ) from error
