"""The runs that a page shows: found by name, and each file of theirs opened only where it lies within its run.

A run may be under way, damaged or hostile. What cannot be read becomes one line in `problems`, never an exception.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shoal.report import figures
from shoal.report.folder import CONFIG, LAST, SUMMARY, find_run, is_run
from shoal.text import count
from shoal.types import ShoalError

MAX_RUNS, MAX_DEPTH, MAX_FOLDERS = 64, 4, 20_000
MAX_CONFIG_BYTES, MAX_SUMMARY_BYTES, MAX_LOG_BYTES = 128 << 10, 4 << 20, 8 << 20
MAX_PROBLEMS = 100
MAX_NESTING, MAX_DIGITS, MAX_VALUES = 40, 40, 10_000


@dataclass
class Run:
    """One run folder. `name` is unique among the runs of a page, and is all that an address says of a run."""

    name: str
    path: Path
    problems: dict[str, str] = field(default_factory=dict)  # what it is about -> one line
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.root = self.path.resolve()

    def file(self, *parts: str) -> Path | None:
        """A file of the run, links resolved; None without it, or where a link leads out of the run."""
        try:
            found = self.root.joinpath(*parts).resolve(strict=True)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, a name with a zero byte
            self.problem("/".join(parts), f"cannot be opened ({_reason(error)})")
            return None
        if not found.is_relative_to(self.root):
            self.problem("/".join(parts), "is a link that leads out of the run: it is not read")
            return None
        if not found.is_file():
            return None
        return found

    def problem(self, about: str, text: str) -> None:
        with self.lock:
            if about in self.problems or len(self.problems) < MAX_PROBLEMS:
                self.problems[about] = one_line(f"{about}: {text}")

    def text(self, name: str, most: int) -> str:
        """A file as text, bytes that are no UTF-8 as escapes; empty without it. Of a larger one the first `most`."""
        path = self.file(name)
        if path is None:
            return ""
        try:
            with path.open("rb") as file:
                data = file.read(most + 1)
        except OSError as error:
            self.problem(name, f"cannot be read ({_reason(error)})")
            return ""
        if len(data) > most:
            self.problem(name, f"has more than {most >> 10:,} KiB: only its beginning is read")
        return data[:most].decode("utf-8", "backslashreplace")

    def summary(self) -> dict[str, Any]:
        """summary.json; empty without it, or where it is damaged."""
        text = self.text(SUMMARY, MAX_SUMMARY_BYTES)
        try:
            found = bounded_json(text) if text else {}
            return found if isinstance(found, dict) else {}
        except ValueError as error:
            self.problem(SUMMARY, f"is damaged ({_reason(error)})")
            return {}

    def settings(self) -> dict[str, Any]:
        """config.yaml as dotted key -> value. It is plain data here: what it names, presets or files, is not read."""
        text = self.text(CONFIG, MAX_CONFIG_BYTES)
        try:
            return flat_yaml(text)
        except ValueError as error:
            self.problem(CONFIG, f"is damaged ({_reason(error)})")
            return {}


class _BoundedLoader(yaml.SafeLoader):
    """YAML whose depth, values and digits are bounded, without aliases, with which a small file can stand for billions
    of values."""

    _depth = _values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has aliases")
        self._depth, self._values = self._depth + 1, self._values + 1
        if self._depth > MAX_NESTING:
            raise ValueError(f"it is nested more than {MAX_NESTING} deep")
        if self._values > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} keys and values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_number(self, node: Any) -> int | float:
        if len(node.value) > MAX_DIGITS:
            raise ValueError(f"it has a number of more than {MAX_DIGITS} digits")
        return self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _BoundedLoader.add_constructor(_tag, _BoundedLoader.construct_number)


def flat_yaml(text: str) -> dict[str, Any]:
    """YAML of nested mappings as dotted key -> value; ValueError for anything else, and beyond the bounds of
    `_BoundedLoader`."""
    try:
        found = yaml.load(text, _BoundedLoader)
    except yaml.YAMLError as error:
        raise ValueError(one_line(str(error))[:200]) from error
    if not isinstance(found, Mapping):
        raise ValueError("it holds no settings")
    return dict(_leaves(found, ""))


def bounded_json(text: str | bytes) -> Any:
    """JSON of another program; ValueError for what is none, is nested too deep or has an integer of too many digits,
    which neither a float nor a database holds."""
    try:
        found = json.loads(text, parse_int=_bounded_int)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    level = [found]
    for _ in range(MAX_NESTING):
        level = [inner for value in level if isinstance(value, dict | list)
                 for inner in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return found
    raise ValueError(f"it is nested more than {MAX_NESTING} deep")


def _bounded_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it has a number of more than {MAX_DIGITS} digits")
    return int(text)


def _leaves(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def one_line(text: object) -> str:
    """The beginning of a text that may be of any length, in one line."""
    return figures.one_line(text)[:400]


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return one_line(text)[:160]


# ---- finding them


def open_runs(words: Sequence[str], base: str = "outputs") -> list[Run]:
    """The runs that words name: a run folder, `last`, or a folder with runs below it; without words the newest.

    ShoalError for a word that names none, with what it is instead."""
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
    return [Run(name, path) for name, path in zip(_names(unique), unique, strict=True)]


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
