"""The interface to `compat`, which turns other systems' flags into keys, and the records that both
sides share.

shoal/__init__.py  ->  register(...)     says where the translator is
loading.py         ->  translator()      flags of all layers as settings of keys, before the merge;
                                         after it, the rules that need other keys
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

COMMAND_LINE, PYTHON, STORED = "command line", "Python", "the run"

Get = Callable[[str], Any]
"""The value of one of our keys, in its type."""

Place = tuple[int, int, int]
"""Where a setting stands: its layer, 0 if it yields to the layer's others (else 1), its index. The
highest place of a key counts."""


@dataclass(frozen=True)
class Entry:
    """A name and its value, not parsed yet.

    >>> Entry("learning_rate", "3e-6", "--learning_rate")
    """

    name: str
    value: Any  # text, a list of texts, or what YAML gave
    origin: str  # `command line`, `mine.yml:4`, `recipe trl`


@dataclass(frozen=True)
class Layer:
    """The entries of one file, or of the command line."""

    entries: Sequence[Entry]
    label: str = ""  # `preset gsm8k`, `recipe trl`, or the user's file
    file: Path | None = None  # None for the command line, where the later of two names wins
    is_users: bool = True  # the command line and the user's own files
    skipped: Sequence[str] = ()  # keys in the file that only training reads


@dataclass(frozen=True, eq=False)
class Setting:
    """A key's value, with where it came from."""

    key: str
    value: Any  # as in Entry
    origin: str
    name: str  # as typed: the key, a short form, or another system's flag
    place: Place
    flags: object = None  # one object for all settings that the same flags made


@dataclass(frozen=True)
class Rule:
    """Flags whose keys need the values of other keys, known once all layers are merged."""

    claims: Sequence[
        Setting
    ]  # the keys that the flags name, each at its flag's place, without values
    apply: Callable[
        [Get], Sequence[Setting]
    ]  # their settings; a key without one keeps what is beneath it


@dataclass
class Translation:
    """What the flags of other systems in some layers become."""

    taken: set[tuple[int, int]] = field(
        default_factory=set
    )  # layer and index of each entry that is such a flag
    settings: list[Setting] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)  # each may need what earlier ones set
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # lines for the start
    lines: Callable[
        [Sequence[Setting], Mapping[str, Setting], Mapping[str, Any]], list[tuple[str, bool]]
    ] = lambda settings, top, values: []
    """(all settings, lowest first; those in effect; their values) -> a line for each of the user's
    flags, and whether it is a note at the start."""


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of another system, for the help and the command line."""

    name: str
    systems: tuple[str, ...]
    keys: tuple[str, ...] = ()  # what it sets
    meaning: str = ""  # what it becomes, where it is more than another name
    is_switch: bool = False  # `--name` alone means true
    is_rename: bool = False  # another name of its one key


class Translator(Protocol):
    """Knows other systems' flags."""

    presets: Path
    """More presets: a folder for each command, and `recipe`."""

    def flags(self, config_type: type) -> Mapping[str, ForeignFlag]:
        """The flags that a command accepts, by name."""
        ...

    def find(
        self, config_type: type, name: str, value: Any = None, among: Sequence[str] = ()
    ) -> ForeignFlag | None:
        """The flag of a name that a command accepts; for some names the value decides whether it is
        ours. Beside enough names of one system, `among`, its patterns of names count too."""
        ...

    def redact(self, name: str, value: Any) -> Any:
        """The value to store of a name's value: empty for a secret."""
        ...

    def unsupported(self, name: str) -> str:
        """Why a name that is no key or flag has none yet; empty where nothing is known of it."""
        ...

    def translate(self, config_type: type, layers: Sequence[Layer]) -> Translation:
        """All flags in the layers, lowest layer first."""
        ...

    def interpolate(self, name: str, value: Any, get: Get) -> Any:
        """A file's value with `${...}` replaced; `get` raises KeyError for a name that does not
        exist."""
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
