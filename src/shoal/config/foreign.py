"""The interface to other systems' flags, as the configuration sees it: `Flag`, a row of another
system's table, and `FrontEnd`, the registered module that finds rows and replaces flags by settings
of Shoal's keys.

The tables are in `compat`, a higher layer, which is loaded when it is first needed."""

from __future__ import annotations

import fnmatch
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from shoal.config.commands import command_of
from shoal.config.key import keys_of
from shoal.text import count

if TYPE_CHECKING:
    from shoal.config.arguments import Layer

T = TypeVar("T")

KeyValues = Mapping[str, Any]
"""Dotted key -> its value: a text, a list of texts, or one of these in a Yielding."""

FlagTexts = Mapping[str, str]
"""Names of flags -> their texts, for those flags of a group that were given."""

GetValue = Callable[[str], Any]
"""A function that returns the final value of a key of Shoal, in the key's type."""

Reader = Callable[[str, str], KeyValues]
"""A function that reads one flag: (name, text) -> values of keys."""

Group = Callable[[FlagTexts], KeyValues]
"""A function that reads several flags together: name -> text of those given, to values of keys."""

Sentence = str
"""What to show at the start of a run about the values of some flags; '' for nothing."""

Rule = Callable[[FlagTexts, GetValue], tuple[KeyValues, Sentence]]
"""A function for flags whose values depend on other keys: (flags, a function that returns a key's
final value) -> (values, a sentence on them)."""

NOTHING = ("", "none", "null", "{}", "[]")
"""Texts of a flag that mean that it is left at its default."""

OFF = (*NOTHING, "false", "no", "off", "0", "0.0", "-1", "disabled")
"""Texts of a flag that mean that it is off."""

COMMANDS = ("train", "sft", "doctor", "plan", "eval", "generate", "convert")
"""Commands that accept flags which set no key, because they have no effect or are refused."""

INSTEAD: Mapping[str, str] = {"model.path": "source", "model.tokenizer": "tokenizer"}
"""Keys of other commands -> the name that `shoal convert` has for them."""


@dataclass(frozen=True)
class Yielding:
    """A value that counts only if nothing else in its layer (with `to_all`: in any layer; with
    `to_users`: in any layer but the packaged presets beneath it) sets the key."""

    value: Any
    to_all: bool = False
    to_users: bool = False


@dataclass(frozen=True)
class Flag:
    """A row of another system's table: a flag (or a pattern of names, `sa_*`) and what it becomes.

    >>> Flag("num_generations", ("batch.group_size",))
    """

    name: str
    keys: tuple[str, ...] = ()  # the keys that the flag sets
    default_only: tuple[str, ...] = ()  # with `rule`: keys that it sets only if nothing else does
    low_priority: bool = False  # with `rule`: a key given by its own name in the same layer wins
    meaning: str = ""  # in words, what the flag becomes, if it is more than another name of a key
    read: Reader | None = None  # reads the flag alone
    group: Group | None = None  # reads the flag together with others that have the same `group`
    # Reads the flag with values of other keys; with `group` too, after it.
    rule: Rule | None = None
    idle: bool = False  # True if the flag has no effect in Shoal
    refused: bool = False  # True if the flag is an error, unless its text is in `accepts`
    accepts: tuple[str, ...] = OFF  # with `refused`: texts that are no error
    expected: str = ""  # with `refused`: what the error says that Shoal expects
    as_here: str = ""  # with `rule`: the text that asks for what happens here without the flag
    is_mapping: bool = False  # True if its entries may be given one by one, as `name.entry=value`
    item: Callable[[str], str] | None = None  # for a renamed list: converts each item
    is_switch: bool = False  # True if `--name` without a value means true
    takes_several: bool = False  # True if all values behind `--name` are its own
    is_quiet: bool = True  # True if the start of a run shows no line about the flag
    has_tail: bool = True  # True if the line about the flag ends with `meaning`
    keeps_nothing: bool = False  # True if `none` is a value, instead of leaving the default
    # For a name that Shoal has, too: True for texts that only the other system's flag can have;
    # and another flag that must be given, or else the name is Shoal's.
    value_filter: Callable[[str], bool] | None = None
    requires_flag: str = ""
    system: str = ""  # the system's name, like `TRL`; set when tables are loaded

    @property
    def is_rename(self) -> bool:
        """True if the flag is only another name of one key."""
        return not (self.read or self.group or self.rule or self.idle or self.refused)

    @property
    def may_stand_bare(self) -> bool:
        """True if `--name` without a value means true."""
        return self.is_switch or self.idle

    @property
    def is_pattern(self) -> bool:
        """True if the name is a pattern, like `sa_*`."""
        return "*" in self.name

    def matches(self, name: str) -> bool:
        """True if a name is this flag's, or matches its pattern."""
        return self.name == name or (self.is_pattern and fnmatch.fnmatchcase(name, self.name))

    def fits(self, config_type: type) -> bool:
        """True if a command accepts this flag, because it has one of the keys that the flag sets. A
        flag that sets none is accepted by COMMANDS. `config_type`: the command's configuration
        class. `shoal convert` also accepts the flags of keys in INSTEAD."""
        command = command_of(config_type)
        if not self.keys:
            return command in COMMANDS
        keys = keys_of(config_type)
        return any(key in keys or (command == "convert" and key in INSTEAD) for key in self.keys)


MANY = 8
FEW = 3
"""If a preset sets more than MANY values, or if more than MANY keys of a file change nothing, the
line at the start of a run shows only the first FEW of them."""


@dataclass(frozen=True)
class FlagLine:
    """What became of a flag, or of several flags: a line of --dry-run.

    >>> FlagLine(("num_generations=4",), ("batch.group_size=4",)).text
    'num_generations=4 became batch.group_size=4'
    """

    flags: tuple[str, ...]  # as typed, `name=value`
    settings: tuple[str, ...] = ()  # of Shoal's keys, `key=value`; (): the flags change nothing
    reason: str = ""  # what the flags mean, or why they change nothing; "": nothing to explain
    at_start: bool = False  # True if the line is also shown at the start of a run
    # True if the page about the system's flags has the reason, so that the start of a run may leave
    # it out.
    is_on_page: bool = False
    system: str = ""  # the system of the flags, like `TRL`
    has_same_values: bool = False  # True if the values of the settings are those of the flags

    @property
    def text(self) -> str:
        """The whole line."""
        flags = ", ".join(self.flags)
        if self.settings:
            text = f"{flags} became {', '.join(self.settings)}"
        else:
            verb = "changes" if len(self.flags) == 1 else "change"
            text = f"{flags} {verb} nothing here"
        return f"{text}: {self.reason}" if self.reason else text

    @property
    def is_idle(self) -> bool:
        """True if the flags change nothing, for a reason that their page has."""
        return self.is_on_page and not self.settings

    @property
    def sets_keys_alone(self) -> bool:
        """True if the flags set keys, and there is nothing to explain."""
        return bool(self.settings) and not self.reason

    @property
    def short(self) -> str:
        """The line of a flag that sets keys alone: `num_generations=4 (batch.group_size)` if the
        values are the same, else the whole line."""
        if not self.has_same_values:
            return self.text
        keys = ", ".join(setting.partition("=")[0] for setting in self.settings)
        return f"{', '.join(self.flags)} ({keys})"


@dataclass(frozen=True)
class IdleKeys:
    """Keys of a file of another system that change nothing, all in one line."""

    file_name: str
    names: Sequence[str]

    @property
    def text(self) -> str:
        """The whole line."""
        return f"{self._about}: {', '.join(self.names)}"

    @property
    def brief(self) -> str:
        """The line for the start of a run, which leaves out most of many names."""
        if len(self.names) <= MANY:
            return self.text
        return f"{self._about}: {', '.join(self.names[:FEW])} and others (--dry-run names all)"

    @property
    def _about(self) -> str:
        verb = "changes" if len(self.names) == 1 else "change"
        return f"{self.file_name}: {count(len(self.names), 'key')} that {verb} nothing here"


@dataclass(frozen=True)
class Translation:
    """The result of `translate`: layers without flags of other systems, and errors and messages
    about the flags."""

    layers: Sequence[Layer]
    errors: Sequence[str]  # of all settings, also those of Shoal's own keys
    notes: Sequence[str] = ()  # lines to print at the start
    became: Sequence[FlagLine | IdleKeys] = ()
    """If there are no errors: a line for each flag in the user's layers, with what it became."""


class FrontEnd(Protocol):
    """What the module that knows other systems' flags must have (`shoal.compat.front`)."""

    def find_flag(
        self, config_type: type, name: str, value: Any = None, among: Sequence[str] = ()
    ) -> Flag | None:
        """Returns the flag of another system that a name stands for, None if there is none that the
        command accepts. For a name that Shoal has too, `value` decides whose name it is; without a
        value (None) it is Shoal's. `among`: the names in the layer; they choose between systems,
        and with enough names of one system its patterns count, too."""
        ...

    def flags_of(self, config_type: type) -> Mapping[str, Sequence[Flag]]:
        """Returns all flags that a command accepts, by name; for each name one row for each system
        that has the flag."""
        ...

    def translate(self, config_type: type, layers: Sequence[Layer]) -> Translation:
        """Replaces the flags of other systems in layers (lowest first) by settings of Shoal's keys.
        Does not raise for mistakes of the user: they are in `errors` of the result. The layers that
        were passed stay unchanged."""
        ...


class Reading(NamedTuple):
    """What a function has read, and from which values of keys."""

    read: Callable[[GetValue], Any]
    values: Mapping[str, Any]  # of the keys that it asked for
    result: Any


_READINGS: ContextVar[list[Reading] | None] = ContextVar("readings", default=None)
"""What was read inside of `data_read_once`; None outside."""


@contextmanager
def data_read_once() -> Iterator[None]:
    """Context manager, also a decorator, for one command, in which `read_once` reads the same data
    once: a command merges its settings several times, and several flags need the rows. It has no
    effect inside of another one."""
    if _READINGS.get() is not None:
        yield
        return
    token = _READINGS.set([])
    try:
        yield
    finally:
        _READINGS.reset(token)


def read_once(read: Callable[[GetValue], T], get: GetValue) -> T:
    """Returns `read(get)`; inside of `data_read_once` what the function returned before, if all
    keys that it asked for have the same values now."""
    readings = _READINGS.get()
    if readings is None:
        return read(get)
    for earlier in readings:
        if earlier.read is not read:
            continue
        if all(get(key) == value for key, value in earlier.values.items()):
            return earlier.result
    values_asked: dict[str, Any] = {}

    def noting_get(key: str) -> Any:
        values_asked[key] = get(key)
        return values_asked[key]

    result = read(noting_get)
    readings.append(Reading(read, values_asked, result))
    return result


_registered: list[str] = []


def register(module: str) -> None:
    """Sets the module that is the front end, by its name; it is imported when it is first needed.
    Without effect after the first call of `front_end`, which keeps what it returned."""
    _registered[:] = [module]


@functools.cache
def front_end() -> FrontEnd:
    """Returns the registered front end; imports it at the first call. IndexError if none is
    registered."""
    module: Any = importlib.import_module(_registered[0])
    return module
