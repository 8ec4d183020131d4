"""Finds the run folders that words name: one run, the newest, or all runs below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shoal.report.folder import CONFIG, LAST, find_run, is_run
from shoal.runs.stored_run import StoredRun
from shoal.text import count
from shoal.types import ShoalError

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
