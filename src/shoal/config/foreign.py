"""Flags of other systems, as far as the configuration knows them: a row of one of their tables, and
the registered front end that finds rows and replaces flags by words of our keys.

The tables are in `compat`, which is above this package and is loaded at its first use.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shoal.config.commands import command_of
from shoal.config.key import keys_of

if TYPE_CHECKING:
    from shoal.config.words import Layer

Values = Mapping[str, Any]
"""Dotted key -> text, or list of texts, or one of them as Yielding."""

Given = Mapping[str, str]
"""The flags of a group that were given -> their texts."""

Get = Callable[[str], Any]
"""The value of one of our keys, in its type."""

Reader = Callable[[str, str], Values]
"""(name, text) of one flag -> values."""

Group = Callable[[Given], Values]
"""The texts of several flags that are read together -> values."""

Rule = Callable[[Given, Get], tuple[Values, str]]
"""(flags, the final value of any key) -> (values, a sentence for the start)."""

NOTHING = ("", "none", "null", "{}", "[]")
"""Texts of a flag that is left at its default."""

OFF = (*NOTHING, "false", "no", "off", "0", "0.0", "-1", "disabled")
"""Texts of a flag that is not switched on."""

COMMANDS = ("train", "sft", "doctor", "plan", "eval", "generate", "convert")
"""Commands that accept a flag which becomes no key."""

INSTEAD: Mapping[str, str] = {"model.path": "source", "model.tokenizer": "tokenizer"}
"""Keys that `shoal convert` has under another name."""


@dataclass(frozen=True)
class Yielding:
    """A reader's value that yields to all else that is given in its layer, or in any layer."""

    value: Any
    to_all: bool = False


@dataclass(frozen=True)
class Flag:
    """A flag of another system (or a pattern of names, `sa_*`) and what it becomes.

    >>> Flag("num_generations", ("batch.group_size",))
    """

    name: str
    keys: tuple[str, ...] = ()  # those that it sets
    default_only: tuple[str, ...] = ()  # of a rule: keys that it sets where nothing else does
    low_priority: bool = False  # of a rule: its keys yield to their own names in the same layer
    meaning: str = ""  # what it becomes, where it is more than another name
    read: Reader | None = None
    group: Group | None = None
    rule: Rule | None = None
    idle: bool = False
    refused: bool = False
    accepts: tuple[str, ...] = OFF  # refused: texts that are no error
    expected: str = ""  # refused: the texts that say what happens here
    item: Callable[[str], str] | None = None  # rename of a list: what an item becomes
    is_switch: bool = False  # may stand bare
    is_quiet: bool = True  # not worth a line at the start
    has_tail: bool = True  # its line ends with its meaning
    keeps_nothing: bool = False  # None is a value of its own
    # A name that is ours, too: the texts that are theirs, and the flag without which it is ours.
    value_filter: Callable[[str], bool] | None = None
    requires_flag: str = ""
    system: str = ""  # `TRL`

    @property
    def is_rename(self) -> bool:
        """True for another name of one key."""
        return not (self.read or self.group or self.rule or self.idle or self.refused)

    @property
    def may_stand_bare(self) -> bool:
        """True if `--name` alone means true."""
        return self.is_switch or self.idle

    @property
    def is_pattern(self) -> bool:
        return "*" in self.name

    def matches(self, name: str) -> bool:
        return self.name == name or (self.is_pattern and fnmatch.fnmatchcase(name, self.name))

    def fits(self, config_type: type) -> bool:
        """True if a command accepts it."""
        command = command_of(config_type)
        if not self.keys:
            return command in COMMANDS
        keys = keys_of(config_type)
        return any(key in keys or (command == "convert" and key in INSTEAD) for key in self.keys)


@dataclass(frozen=True)
class Translation:
    """Layers without flags of other systems, and what there is to say about the flags."""

    layers: Sequence[Layer]
    errors: Sequence[str]  # of all words, those of our own keys included
    notes: Sequence[str] = ()  # lines for the start
    became: Sequence[tuple[str, bool]] = ()
    """Without errors: a line for each of the user's flags, and whether it is a note at the
    start."""


class FrontEnd(Protocol):
    """The module that knows other systems' flags."""

    def find_flag(
        self, config_type: type, name: str, value: Any = None, among: Sequence[str] = ()
    ) -> Flag | None:
        """The flag of a name that a command accepts; for some names the value decides whether it is
        ours. Beside enough names of one system, `among`, its patterns of names count too."""
        ...

    def flags_of(self, config_type: type) -> Mapping[str, Sequence[Flag]]:
        """The flags that a command accepts, by name: a row for each system that has it."""
        ...

    def translate(self, config_type: type, layers: Sequence[Layer]) -> Translation:
        """The layers, lowest first, with their flags replaced by words of our keys."""
        ...


_registered: list[str] = []


def register(module: str) -> None:
    """Registers the module that is the front end; it is loaded at its first use."""
    _registered[:] = [module]


@functools.cache
def front_end() -> FrontEnd:
    """The registered front end."""
    module: Any = importlib.import_module(_registered[0])
    return module
