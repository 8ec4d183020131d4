"""What a user types, rewritten into overrides that Hydra reads as they were meant.

    --run-name=a,b   model=X   --groups   stop=</answer>   gsm8k.yml   --config-name gsm8k
    ->  ++run_name='a,b'   ++model.path='X'   ++report...   ++sampling.stop=['</answer>']

Every value travels as quoted text and gets its type from the schema, so that neither Hydra's grammar nor YAML guesses
one: `run_name=123` is text, `steps=123` a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config.aliases import FOREIGN, foreign_of
from shoal.config.foreign import NOTHING, TOKEN, Became, Foreign, became, blank_token, take_token, text_of
from shoal.config.keys import (
    Key,
    UnknownKey,
    command_of,
    dataclass_of,
    is_misspelt,
    keys_of,
    sections_of,
    unknown_key,
)
from shoal.config.schema import Config
from shoal.types import ShoalError


@dataclass(frozen=True)
class Alias:
    """Another name of a key: the key, the commands that take it (none named: all that have the key), a note."""

    key: str
    commands: tuple[str, ...] = ()
    note: str = ""


_ASKING = ("eval", "generate")

ALIASES: Mapping[str, Alias] = {
    "model": Alias("model.path"),
    "task": Alias("task.name", note="brings the preset of that name, under your own keys"),
    "reward": Alias("reward.functions", note="file.py:function, several with commas"),
    "algorithm": Alias("algorithm.name", note="a paper's settings, under your own keys"),
    "checkpoint_period": Alias("checkpoint.every"),
    "temperature": Alias("sampling.temperature", _ASKING),
    "max_new_tokens": Alias("sampling.max_completion_tokens", _ASKING),
    "max_prompt_tokens": Alias("sampling.max_prompt_tokens", _ASKING),
    "top_k": Alias("sampling.top_k", _ASKING),
    "top_p": Alias("sampling.top_p", _ASKING),
    "min_p": Alias("sampling.min_p", _ASKING),
    "stop": Alias("sampling.stop", _ASKING, note="several as [a,b]"),
    "from": Alias("source", ("export", "convert")),
}
"""Short form -> what it stands for: the one table of names that are not the schema's own."""

CONFIG_NAMES = ("--config-name", "--config_name", "-cn", "--config-file", "--config_file")
"""Options that name a preset or a file; also `config_file=X`."""

WORDS: Mapping[str, tuple[str, ...]] = {
    "groups": ("run",), "replay": ("run",), "rescore": ("run",), "diff": ("run", "other"), "export-rollouts": ("run",),
}
"""Command -> the keys that words without `=` fill, in this order: `shoal diff A B` is `run=A other=B`."""

COMMA_LISTS = frozenset({"reward.functions", "reward.weights"})
"""Lists whose items cannot hold a comma: `a,b` is two items there, but one stop string."""


@dataclass(frozen=True)
class Arguments:
    """A command line, rewritten.

    >>> rewrite("train", ["gsm8k.yml", "--steps=5"])
    Arguments(config_name='gsm8k.yml', values={'steps': '5'}, overrides=("++steps='5'",))
    """

    config_name: str  # a preset or a file; empty for none
    values: Mapping[str, str | list[str]]  # by dotted key, the last of several
    overrides: tuple[str, ...]  # in Hydra's grammar
    derived: Mapping[str, str] = field(default_factory=dict)  # other systems' flags that need other settings, too
    became: tuple[Became, ...] = ()  # what all other flags of theirs became
    notes: tuple[str, ...] = ()  # keys that were set twice, under two names

    @property
    def settled(self) -> Mapping[str, str | list[str]]:
        return self.values


def aliases_of(config_type: type) -> dict[str, Alias]:
    """The aliases that a command takes."""
    keys, command = keys_of(config_type), command_of(config_type)
    return {name: alias for name, alias in ALIASES.items()
            if alias.key in keys and (not alias.commands or command in alias.commands)}


def names_of(config_type: type) -> dict[str, str]:
    """Every name that a command takes -> its dotted key; the schema's own names first."""
    return {**{name: name for name in keys_of(config_type)},
            **{name: alias.key for name, alias in aliases_of(config_type).items()}}


def find_key(config_type: type, name: str) -> Key:
    """The key that a name stands for; ShoalError with the nearest name where there is none."""
    names = names_of(config_type)
    if name not in names:
        if name in sections_of(config_type):
            inside = next(key for key in names if key.startswith(f"{name}."))
            raise ShoalError(f"{name}: that is a section of keys, not a key; set one of its keys, such as {inside}")
        theirs_too = name in FOREIGN and FOREIGN[name].fits(Config)
        if theirs_too or (name in names_of(Config) and not is_misspelt(name, names)):
            raise ShoalError(f"{name}: shoal {command_of(config_type)} has no use for it, shoal train does: leave it "
                             "out here")
        theirs = {row.name: ", ".join(row.keys) for row in FOREIGN.values() if row.keys and row.fits(config_type)}
        raise unknown_key(name, config_type, {**names, **{one: theirs[one] for one in theirs if one not in names}})
    return keys_of(config_type)[names[name]]


OPTIONAL = ("steps_per_generation", "epsilon_high", "data.train_files")
"""Flags whose derivation says what nothing means for them."""

EITHER = ("batch.prompts_per_step", "batch.prompts_per_device")
"""Two keys for one thing: who sets one sets the other back."""


_LATER = object()
"""Stands for a value that is made of other settings in the end."""


class Gathered:
    """What is set, one name after the other; of two for one key the later stands, and is said where the names differ.

    `place`: the file that is read; two names in one file have no order, so different values are an error."""

    def __init__(self, config_type: type, place: str = ""):
        self.config_type, self.place = config_type, place
        self.values: dict[str, Any] = {}
        self.derived: dict[str, str] = {}
        self._became: dict[str, Became] = {}
        self.notes: list[str] = []
        self._names: dict[str, str] = {}  # key -> the name that set it
        self._yielding: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """One name with its value: text, or what YAML or Python gave. Another system's flag that is given nothing
        stays at its default."""
        row = foreign_of(self.config_type, name, text_of(value))
        if row is None or (name in names_of(self.config_type) and row.only is None):
            self._set(find_key(self.config_type, name).name, value, name)
        elif row.kind in ("same", "derived") and row.name not in OPTIONAL and text_of(value).lower() in NOTHING:
            self._became[name] = Became(name, text_of(value) or "empty", {}, "it stays at its default")
        elif row.name == TOKEN:
            take_token(text_of(value))
            self._became[name] = Became(name, "...", {}, row.meaning, said=True)
        elif row.kind == "derived":
            for key in row.keys:
                self._set(key, _LATER, name)
                del self.values[key]
            self.derived.pop(name, None)
            self.derived[name] = text_of(value)
        else:
            self._turn(row, value)

    def _turn(self, row: Foreign, value: Any) -> None:
        found = row.becomes(value, self.config_type)
        if row.kind == "missing":
            return
        for key, text in found.items():
            if row.kind == "same" or key in row.keys or not row.keys:
                self._set(key, text, row.name)
            else:
                self._yielding[key] = text
        self._became.pop(row.name, None)
        self._became[row.name] = became(row, value, found)

    def _set(self, key: str, value: Any, name: str) -> None:
        for other in EITHER if key in EITHER and not self.place and text_of(value) != "0" else ():
            if other != key:
                self.values.pop(other, None)
                earlier = self._names.pop(other, name)
                if {earlier, name} & set(FOREIGN) and not _together(earlier, name):
                    self.notes.append(f"{earlier} and {name} both set how many prompts a step has: the later one "
                                      f"stands, {name}")
        before, old = self._names.get(key, name), self.values.pop(key, _LATER)
        self._names[key] = name
        if {before, name} & set(FOREIGN) and text_of(old) != text_of(value) and not _together(before, name):
            if self.place:
                raise ShoalError(f"{self.place}: {before} and {name} both set {key}; write one of them")
            self.notes.append(f"{before} and {name} both set {key}: the later one stands, {name}")
        self.values[key] = value

    @property
    def became(self) -> tuple[Became, ...]:
        return tuple(self._became.values())

    @property
    def settled(self) -> dict[str, Any]:
        """Every value, by dotted key."""
        return {**{key: text for key, text in self._yielding.items() if key not in self.values}, **self.values}

    def arguments(self, config_name: str = "") -> Arguments:
        """Of a line, whose values are texts."""
        overrides = tuple(f"++{key}={quote(value)}" for key, value in self.settled.items())
        return Arguments(config_name, self.settled, overrides, self.derived, self.became, tuple(self.notes))


def _together(one: str, other: str) -> bool:
    """Whether two flags are one, or parts of one derivation."""
    return one == other or (one in FOREIGN and other in FOREIGN and FOREIGN[one].group == FOREIGN[other].group != "")


def rewrite(command: str | type, argv: Sequence[str]) -> Arguments:
    """Reads `key=value`, `--key=value`, `--flag`, a command's WORDS, `--config-name X` and a leading `X.yml`; raises
    ShoalError."""
    config_type = dataclass_of(command)
    config_name, words = _take_config_name(blank_token(argv))
    gathered = Gathered(config_type)
    unknown: list[UnknownKey] = []
    for word in _named(config_type, joined(config_type, words)):
        try:
            name, value = read_word(config_type, word)
        except UnknownKey as error:
            unknown.append(error)
            continue
        key = key_of(config_type, name)
        gathered.add(name, split_list(key, value) if key and key.is_list else value)
    if len(unknown) > 1:
        raise ShoalError(f"{', '.join(error.name for error in unknown)}: there are no such keys; the first: "
                         f"{unknown[0]}")
    for error in unknown:
        raise error
    return gathered.arguments(config_name)


def key_of(config_type: type, name: str) -> Key | None:
    """The key that a name of ours, or another system's name for it, stands for."""
    names, row = names_of(config_type), FOREIGN.get(name)
    same = row.keys[0] if row and row.kind == "same" and name not in names else names.get(name, "")
    return keys_of(config_type).get(same)


def joined(config_type: type, words: Sequence[str]) -> list[str]:
    """The words, with `--name VALUE` as `--name=VALUE`; where words of WORDS may follow, a switch takes true or false
    only."""
    rest, whole, alone = list(words), [], command_of(config_type) in WORDS
    while rest:
        word = rest.pop(0)
        name = word.lstrip("-").replace("-", "_")
        behind = rest[0] if rest and "=" not in rest[0] and not rest[0].startswith("--") else None
        if word.startswith("--") and "=" not in word and behind is not None:
            key, row = key_of(config_type, name), FOREIGN.get(name)
            switch = row.flag if row else key is not None and key.type is bool
            if not (switch and alone) or behind.lower() in ("true", "false"):
                word = f"{word}={rest.pop(0)}"
        whole.append(word)
    return whole


def _take_config_name(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The preset's name or file, and what is left."""
    words, found = list(argv), []
    if words and words[0].endswith((".yml", ".yaml")) and ("=" not in words[0] or Path(words[0]).is_file()):
        found.append(words.pop(0))
    rest = []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in CONFIG_NAMES and not (equals and name == "config_file"):
            rest.append(word)
            continue
        if not equals:
            value = words.pop(0) if words else ""
        if not value:
            raise ShoalError(f"{name}: expected the name of a preset or a YAML file after it, nothing came")
        found.append(value)
    if len(found) > 1:
        raise ShoalError(f"two presets were named, {found[0]} and {found[1]}: name one, a file may build on others "
                         "by its `defaults` list")
    return (found[0] if found else ""), rest


def _named(config_type: type, words: Sequence[str]) -> Iterator[str]:
    """The words, each that stands alone with the key of its place."""
    command = command_of(config_type)
    keys, alone = WORDS.get(command, ()), 0
    for word in words:
        if not keys or not _stands_alone(config_type, word):
            yield word
            continue
        if alone == len(keys):
            raise ShoalError(f"{word}: one word too many, expected `shoal {command} {words_text(command)}` and keys as "
                             "key=value")
        yield f"{keys[alone]}={word}"
        alone += 1


def _stands_alone(config_type: type, word: str) -> bool:
    """Whether a word is no key: neither a flag nor key=value; a path may hold a `=`."""
    name, equals, _ = word.partition("=")
    if word.startswith("-") or name.lstrip("+") in names_of(config_type):
        return False
    return not equals or Path(word).exists()


def words_text(command: str) -> str:
    """A command's WORDS as its usage shows them: `RUN OTHER`."""
    return " ".join(key.upper() for key in WORDS.get(command, ()))


def read_word(config_type: type, word: str) -> tuple[str, str]:
    """One argument as a name that the command takes, ours (dotted) or another system's, and the text of its value."""
    name, equals, value = word.partition("=")
    if name.startswith("-"):
        name = name.lstrip("-").replace("-", "_")
    name = name.lstrip("+")
    if not name:
        raise ShoalError(f"{word!r}: expected key=value")
    row = foreign_of(config_type, name, value)
    if row and (name not in names_of(config_type) or row.only):
        if not equals and not row.flag:
            raise ShoalError(f"{word}: expected a value: write {name}=VALUE")
        return name, value if equals else "true"
    key = find_key(config_type, name)
    if equals:
        return key.name, value
    if key.type is not bool:
        raise ShoalError(f"{word}: expected a value ({key.type_text}): write {name}=VALUE")
    return key.name, "true"


def split_list(key: Key, text: str) -> list[str]:
    """The items of a list's text: `[a,b]` with optional quotes, nothing, or one item as it stands."""
    if not text:
        return []
    if text.startswith("[") and text.endswith("]") and len(text) > 1:
        return _split_brackets(key, text)
    return [item.strip() for item in text.split(",")] if key.name in COMMA_LISTS else [text]


_ITEM = re.compile(r"""\s*(?:"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'|([^,"']*?))\s*(,|\Z)""", re.DOTALL)


def _split_brackets(key: Key, text: str) -> list[str]:
    inside, place, items = text[1:-1], 0, []
    while place < len(inside):
        match = _ITEM.match(inside, place)
        if match is None:
            raise ShoalError(f"{key.name}={text}: the list cannot be read after {inside[:place]!r}; put each item "
                             "that holds a comma or a quote in quotes")
        double, single, plain, _ = match.groups()
        quoted = double if double is not None else single
        items.append(plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL))
        place = match.end()
    return items


def quote(value: str | Iterable[str]) -> str:
    """Text, or a list of texts, as Hydra's grammar reads it back unchanged, interpolations included."""
    if not isinstance(value, str):
        return "[" + ",".join(quote(item) for item in value) + "]"
    text = escape_interpolation(value)
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


def escape_interpolation(text: str) -> str:
    """Text in which OmegaConf sees no `${...}` to replace."""
    return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + "\\${", text)
