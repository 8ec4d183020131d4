"""The interface to a translator of other systems' flags into keys, and its records.

    shoal/__init__.py  ->  register(...)         registers the translator
    chain.py           ->  translator()          translates names before the chain is merged
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
    """A name and its value, not parsed yet.

    >>> Entry("learning_rate", "3e-6", "--learning_rate")
    """

    name: str
    value: Any  # text, a list of texts, or what YAML gave
    origin: str  # `command line`, `mine.yml:4`, `recipe trl`


@dataclass(frozen=True, eq=False)
class Late:
    """A value computed from the final values of other keys: `compute` returns the keys it sets, and the reason. A key
    that it leaves out keeps what lower layers say."""

    compute: Callable[[Get], tuple[Mapping[str, Any], str]]


@dataclass(frozen=True, eq=False)
class Setting:
    """The value of a key, with its origin."""

    key: str
    value: Any  # as in Entry, or Late
    origin: str
    name: str  # as typed: the key, a short form, or another system's flag
    rank: Literal["own", "weak", "lowest"] = "own"  # weak yields to its layer's others, lowest to every layer
    group: str = ""  # settings of one group were made from several flags together


@dataclass(frozen=True, eq=False)
class Report:
    """The keys that a flag of another system set, for --dry-run; with `has_line` also for a line at the start."""

    flags: Mapping[str, str]  # name -> text
    settings: tuple[Setting, ...] = ()
    meaning: str = ""
    has_line: bool = False
    system: str = ""


@dataclass(frozen=True)
class Translation:
    """The settings that other systems' names in some layers become."""

    settings: Mapping[tuple[int, int], Sequence[Setting]]  # by layer and place in it, of each name that is not ours
    reports: Sequence[tuple[int, Report]]  # with the layer
    errors: Sequence[str]
    notes: Sequence[str] = ()  # lines for the start


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of another system, for the help and the command line."""

    name: str
    systems: tuple[str, ...]
    keys: tuple[str, ...] = ()  # what it sets
    meaning: str = ""  # what it becomes, where it is more than another name
    is_switch: bool = False  # `--name` alone means true
    is_rename: bool = False  # another name of its one key
    key: str = ""  # the key whose value it gives as it is, perhaps with other flags


class Translator(Protocol):
    """Translates other systems' names into keys, before layers are merged."""

    presets: Path
    """More presets: a folder for each command, and `recipe`."""

    def flags(self, config_type: type) -> Mapping[str, ForeignFlag]:
        """The flags that a command accepts, by name."""
        ...

    def find(self, config_type: type, name: str, value: Any = None) -> ForeignFlag | None:
        """The flag of a name that a command accepts; for some names the value decides whether it is ours."""
        ...

    def redact(self, name: str, value: Any) -> Any:
        """The value to store of a name's value: empty for a secret."""
        ...

    def unsupported(self, name: str) -> str:
        """Why a name that is no key or flag has none yet; empty where nothing is known of it."""
        ...

    def translate(self, config_type: type, layers: Sequence[Sequence[Entry]]) -> Translation:
        """The settings of all flags in the layers, lowest layer first."""
        ...


def make_entry(name: str, value: Any, origin: str) -> Entry:
    """An entry whose value is stored without secrets."""
    return Entry(name, translator().redact(name, value), origin)


_registered: list[Callable[[], Translator]] = []


def register(load: Callable[[], Translator]) -> None:
    """Registers the translator, which is loaded at its first use."""
    _registered[:] = [load]


@functools.cache
def translator() -> Translator:
    """The registered translator."""
    return _registered[0]()
