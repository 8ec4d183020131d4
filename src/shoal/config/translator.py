"""What config/ knows of other systems: that some names are not ours, and whom to ask about them.

    shoal/__init__.py  ->  register(...)         the outside says who translates
    loading.py         ->  translator()          asked for keys before the chain is merged

Without a translator every name must be a key of the schema.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

COMMAND_LINE, PYTHON = "command line", "Python"

Get = Callable[[str], Any]
"""The final value of one of our keys."""


@dataclass(frozen=True)
class Entry:
    """A name and its value as they were given.

    >>> Entry("learning_rate", "3e-6", "--learning_rate")
    """

    name: str
    value: Any  # text, a list of texts, or what YAML gave
    origin: str  # `command line`, `mine.yml:4`, `recipe trl`


@dataclass(frozen=True, eq=False)
class Late:
    """A value that is computed from other keys when all of them are known: the keys that `compute` sets, and why."""

    compute: Callable[[Get], tuple[Mapping[str, Any], str]]


@dataclass(frozen=True, eq=False)
class Setting:
    """One key's value and where it came from."""

    key: str
    value: Any  # as in Entry, or Late
    origin: str
    name: str  # what was given: the key, a short form, or another system's flag
    rank: Literal["own", "weak", "lowest"] = "own"  # weak yields to its layer's others, lowest to every layer
    group: str = ""  # settings of one group were made from several flags together


@dataclass(frozen=True, eq=False)
class Report:
    """What a flag of another system became, for a line at the start.

    `has_line`: worth a line by itself; all of them are shown by --dry-run."""

    flags: Mapping[str, str]  # name -> text
    settings: tuple[Setting, ...] = ()
    meaning: str = ""
    has_line: bool = False
    system: str = ""


@dataclass(frozen=True)
class Translation:
    """Other systems' names of some layers, translated."""

    settings: Mapping[tuple[int, int], Sequence[Setting]]  # by layer and place in it, of each name that is not ours
    reports: Sequence[tuple[int, Report]]  # with the layer
    errors: Sequence[str]


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of another system, as help and the command line need it."""

    name: str
    systems: tuple[str, ...]
    keys: tuple[str, ...] = ()  # what it sets
    meaning: str = ""  # what it becomes, where it is more than another name
    is_switch: bool = False  # `--name` alone means true
    is_rename: bool = False  # another name of its one key
    key: str = ""  # the key whose value it gives as it is, perhaps with other flags


class Translator(Protocol):
    """Turns other systems' names into keys, from what was given alone."""

    presets: Path
    """A folder of presets beside ours: a folder a command, and `recipe`."""

    def flags(self, config_type: type) -> Mapping[str, ForeignFlag]:
        """The flags that a command takes, by name."""
        ...

    def find(self, config_type: type, name: str, value: Any = None) -> ForeignFlag | None:
        """The flag of that name that a command takes; some names are ours for other values."""
        ...

    def blank(self, name: str, value: Any) -> Any:
        """The value to keep of a name's value: nothing of a secret's."""
        ...

    def translate(self, config_type: type, layers: Sequence[Sequence[Entry]]) -> Translation:
        """The settings that the flags among the entries become; layers in the order of the chain."""
        ...


class NoTranslator:
    """Knows no other system."""

    presets = Path("/nonexistent")

    def flags(self, config_type: type) -> Mapping[str, ForeignFlag]:
        return {}

    def find(self, config_type: type, name: str, value: Any = None) -> ForeignFlag | None:
        return None

    def blank(self, name: str, value: Any) -> Any:
        return value

    def translate(self, config_type: type, layers: Sequence[Sequence[Entry]]) -> Translation:
        return Translation({}, (), ())


def make_entry(name: str, value: Any, origin: str) -> Entry:
    """An entry that holds no secret."""
    return Entry(name, translator().blank(name, value), origin)


_load: Callable[[], Translator] = NoTranslator


def register(load: Callable[[], Translator]) -> None:
    """Names who translates; it is loaded when first asked."""
    global _load
    _load = load
    translator.cache_clear()


@functools.cache
def translator() -> Translator:
    """The translator that is registered."""
    return _load()
