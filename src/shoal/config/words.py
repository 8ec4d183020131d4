"""Words: names with their values as typed, and layers of words (a layer is one source, like a file
or the command line). This module reads the words of a command line.

    --run-name=a,b   model=X   --report.groups   gsm8k.yml   --config-name gsm8k

Values stay texts here; the key's type decides later what they become: `run_name=123` is text,
`steps=123` a number."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.commands import COMMANDS, command_of, dataclass_of
from shoal.config.foreign import Flag, front_end
from shoal.config.key import Key, keys_of, sections_of, text_of
from shoal.config.names import UnknownKey, find_key, key_of, names_of
from shoal.config.preset_files import PRESETS, packaged
from shoal.config.sections.task import DATA_SUFFIXES
from shoal.config.token import TOKEN, take_token
from shoal.records import ShoalError
from shoal.text import did_you_mean

SWITCHES = ("dryrun", "plan", "multirun")


def switch_of(word: str) -> str:
    """Returns the switch that an argument is: `dryrun` for `--dry-run` in any spelling, `plan` for
    `--plan`, `multirun` for `--multirun` and `-m`; '' for any other argument."""
    if word == "-m":
        return "multirun"
    if not word.startswith("--"):
        return ""
    name = re.sub("[-_]", "", word.removesuffix("=true"))
    if name not in SWITCHES:
        return ""
    return name


FILE_OPTIONS = ("config_name", "cn", "config_file", "config", "preset")
"""Options whose value names a preset or a file: `--config-name X`, `config_file=X`; `preset` names
a preset that lies beneath the file."""


FOLDER_OPTIONS = ("config_path", "cp", "config_dir", "cd")
"""Hydra's options for the folder in which `--config-name X` is looked up: the only folder for
config_path and cp; for config_dir and cd the folder that is searched first."""


POSITIONALS: Mapping[str, tuple[str, ...]] = {
    "groups": ("run",),
    "replay": ("run",),
    "rescore": ("run",),
    "diff": ("run", "other"),
    "view": ("runs",),
    "compat": ("to",),
}
"""For each command the keys of its positional arguments: `shoal diff A B` is `run=A other=B`. If
the first key is a list, it takes all positional arguments."""


COMMA_LISTS = frozenset({"reward.functions", "environment.tools", "reward.weights", "groups"})
"""Keys of lists whose items contain no commas, so that `a,b` without brackets is two items. For
other lists, like `sampling.stop`, `a,b` is one item."""


COMMAND_LINE = "command line"
PYTHON = "Python"
STORED = "the run"
"""Origins of words whose names are Shoal's own keys: typed on the command line, given from Python,
or read from a run's stored configuration."""


@dataclass(frozen=True)
class Word:
    """A name with its value as typed; or, after `translate`, a key of Shoal with the value that
    flags of another system gave it.

    >>> Word("learning_rate", "3e-6", "--learning_rate")
    """

    name: str  # as typed: a key, a short form, or another system's flag
    value: Any  # a text, a list of texts, a value of YAML, or NO_VALUE
    origin: str  # `command line`, `mine.yml:4`, `recipe trl`
    # Only for a word that replaces flags of another system:
    key: str = ""  # the key that the word sets
    flags: tuple[str, ...] = ()  # the names of all flags that the value was computed from
    of_rule: bool = False  # True if the value was computed from other keys, too
    yields: bool = False  # True if another word for the same key in the same layer wins


NO_VALUE = object()
"""The value of a word that names a key without setting it: a rule of `compat` mentions the key but
leaves it to lower layers."""


@dataclass(frozen=True)
class Layer:
    """The words of one source: a file, or the command line."""

    words: Sequence[Word]  # of two for one key the later counts, so those that yield come first
    label: str = ""  # `preset gsm8k`, `recipe trl`, or the user's file
    file: Path | None = None  # None for the command line
    is_users: bool = True  # True for the command line and the user's own files, False for presets
    skipped: Sequence[str] = ()  # keys in the file that were left out: only training reads them
    typed: Sequence[Word] = ()  # the words before `translate` replaced flags; empty until then


@dataclass(frozen=True)
class Arguments:
    """The parsed arguments of a command, from a command line or from keywords in Python.

    >>> read_arguments("train", ["gsm8k.yml", "--steps=5"])
    Arguments(config_name='gsm8k.yml', words=(Word('steps', '5', 'command line'),))
    """

    config_name: str = ""  # the name of a preset or a file; '' if none was named
    words: tuple[Word, ...] = ()
    preset: str = ""  # the name of the preset beneath the file; '' if none was named


def make_word(name: str, value: Any, origin: str) -> Word:
    """Creates a word. If it is the Hugging Face hub's token, puts the token into the environment
    (HF_TOKEN) and drops it from the word."""
    if name == TOKEN:
        take_token(text_of(value))
        value = ""
    return Word(name, value, origin)


# ---- words


def read_arguments(command: str | type, argv: Sequence[str]) -> Arguments:
    """Parses the arguments that follow a command's name. Raises one ShoalError for all unknown
    names."""
    config_type = dataclass_of(command)
    config_name, preset, words = _take_options(joined(config_type, argv))
    words = _with_keys(config_type, words)
    read: list[Word] = []
    unknown: list[str] = []
    among = []  # all names on the line: together they show which system's flags these are
    for word in words:
        among.append(_plain(word.partition("=")[0]))
        if word.lstrip("-").startswith("recipe="):
            among.append(word.lstrip("-"))
    for word in words:
        try:
            name, text = read_word(config_type, word, among)
        except UnknownKey as error:
            unknown.append(str(error))
            continue
        key = key_of(config_type, name)
        value: str | list[str] = text
        if key and key.is_list:
            value = split_list(key, text)
        origin = COMMAND_LINE
        if front_end().find_flag(config_type, name, text, among):
            origin = f"--{name}"
        read.append(make_word(name, value, origin))
    if unknown:
        raise UnknownKey.of_all(unknown, config_type)
    return Arguments(config_name, tuple(read), preset)


def joined(config_type: type, words: Sequence[str]) -> list[str]:
    """Joins each `--name VALUE` to `--name=VALUE`, and all values that follow the name of a list to
    one list. For a command in POSITIONALS a switch takes only `true` or `false` as its value, and a
    list takes only one value, because what follows may be a positional argument."""
    rest = list(words)
    whole = []
    has_positionals = command_of(config_type) in POSITIONALS
    while rest:
        word = rest.pop(0)
        key = key_of(config_type, _plain(word))
        flag = front_end().find_flag(config_type, _plain(word))
        values: list[str] = []
        if word.startswith("-") and "=" not in word:
            values = list(itertools.takewhile(_is_value, rest))
            takes_text = key is not None and key.type in (str, tuple[str, ...])
            if not values and rest and takes_text and _is_text(config_type, rest[0]):
                values = rest[:1]
        if key is None or not key.is_list or has_positionals:
            del values[1:]
        if values and has_positionals and _is_switch(key, flag):
            # Any other word after a switch is a positional argument of the command.
            if values[0].lower() not in ("true", "false"):
                values = []
        if values:
            del rest[: len(values)]
            text = values[0]
            if key and len(values) > 1:
                items = []
                for value in values:
                    items += split_list(key, value)
                if items:
                    text = _list_text(items)
            word = f"{word}={text}"
        whole.append(word)
    return whole


def _is_switch(key: Key | None, flag: Flag | None) -> bool:
    """True if `--name` without a value means true."""
    if flag:
        return flag.may_stand_bare
    return key is not None and key.type is bool


def _is_value(word: str) -> bool:
    """True if an argument can be the value of the option before it: it is not a flag and not
    key=value. A call `f(key=value)` and a text like `Solve x=1: {q}` are values too, because names
    have no spaces."""
    if word.startswith("--"):
        return False
    name, equals, _ = word.partition("=")
    return not equals or "(" in name or " " in name.strip()


def _is_text(config_type: type, word: str) -> bool:
    """True if an argument with `=`, like `x={q}` or `a.b={q}`, is the text that the option before
    it takes: the part before `=` is no key and no flag, and, if it has a dot, neither in a section
    of keys nor similar to a key."""
    if word.startswith("--"):
        return False
    name = _plain(word.partition("=")[0]).lstrip("+").rstrip()
    names = names_of(config_type)
    if name in names or front_end().find_flag(config_type, name) is not None:
        return False
    if "." not in name:
        return True
    is_in_section = name.partition(".")[0] in sections_of(config_type)
    return not is_in_section and not did_you_mean(name, names)


def is_file_option(word: str) -> bool:
    """True if an argument is an option that names a preset or a file: `--config-name X`,
    `config_file=X`, `--preset=X`."""
    return _is_option(word, FILE_OPTIONS)


def is_folder_option(word: str) -> bool:
    """True if an argument is one of Hydra's options for a folder: `--config-path X`,
    `--config-dir=X`, `-cp X`."""
    return _is_option(word, FOLDER_OPTIONS)


def _is_option(word: str, options: Sequence[str]) -> bool:
    name, equals, _ = word.partition("=")
    return _plain(name) in options and bool(equals or name.startswith("-"))


def _plain(name: str) -> str:
    """Returns the name of an option without dashes at its start and with underscores: `config_name`
    for `--config-name`."""
    return name.lstrip("-").replace("-", "_")


def is_file_word(word: str) -> bool:
    """True if an argument is the name of a YAML file. If it contains `=`, which a path may, the
    file must exist."""
    return word.endswith((".yml", ".yaml")) and ("=" not in word or Path(word).is_file())


def _take_options(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """Splits off the options that name presets, files and folders. Returns (name of the preset or
    file, name of the preset beneath it, the other arguments); the names are '' if not given."""
    files = []
    preset = ""
    folder_option, folder = "", ""
    rest = []
    for word in words:
        name, _, value = word.partition("=")
        if is_file_word(word):
            files.append(word)
        elif not (is_file_option(word) or is_folder_option(word)):
            rest.append(word)
        elif not value:
            raise ShoalError(
                f"{name}: expected the name of a preset or a YAML file after it, nothing came"
            )
        elif is_folder_option(word):
            folder_option, folder = name, value
        elif _plain(name) == "preset":
            preset = value
        else:
            files.append(value)
    if len(files) > 1:
        raise ShoalError(
            f"two presets were named, {files[0]} and {files[1]}: name one, a file may build on "
            "others by its `defaults` list"
        )
    file = ""
    if files:
        file = files[0]
    return _in_folder(folder_option, folder, file), preset, rest


def _in_folder(option: str, folder: str, name: str) -> str:
    """Returns the path of the file `name` in the folder that an option names; without a folder,
    `name` itself. ShoalError if the file is missing, except after --config-dir, for which `name` is
    then returned."""
    if not folder:
        return name
    file_name = name if name.endswith((".yml", ".yaml")) else f"{name}.yaml"
    file = Path(folder).expanduser() / file_name
    may_be_missing = _plain(option) in ("config_dir", "cd")
    if may_be_missing and not file.is_file():
        return name
    missing: Path | str = ""
    if not name:
        missing = "NAME"
    elif not file.is_file():
        missing = file
    if missing:
        raise ShoalError(
            f"{option}={folder}: expected --config-name NAME with it, a file in that folder; there "
            f"is no {missing}"
        )
    return str(file)


def _with_keys(config_type: type, words: Sequence[str]) -> list[str]:
    """Returns the arguments with positional ones written as `key=value`, by the command's row in
    POSITIONALS."""
    command = command_of(config_type)
    names = names_of(config_type)
    keys = POSITIONALS.get(command, ())
    if not keys:
        return list(words)

    def is_bare(word: str) -> bool:
        """True if an argument is positional: no option, no key, no key=value."""
        name, equals, _ = word.partition("=")
        if word.startswith("-") or name.lstrip("+") in names:
            return False
        return not equals or Path(word).exists()  # a path may contain a `=`

    bare = []
    rest = []
    for word in words:
        if is_bare(word):
            bare.append(word)
        else:
            rest.append(word)
    if bare and keys_of(config_type)[keys[0]].is_list:
        return [*rest, f"{keys[0]}={_list_text(bare)}"]
    if len(bare) > len(keys):
        raise ShoalError(
            f"{bare[-1]}: one word too many, expected `shoal {command} "
            f"{positionals_text(command)}` and keys as key=value"
        )
    with_keys = [f"{key}={word}" for key, word in zip(keys, bare, strict=False)]
    return with_keys + rest


def positionals_text(command: str) -> str:
    """Returns a command's positional arguments as its usage shows them: `RUN OTHER`, or `[RUN ...]`
    for a list."""
    texts = []
    for key in POSITIONALS.get(command, ()):
        if keys_of(COMMANDS[command])[key].is_list:
            texts.append(f"[{key.upper().removesuffix('S')} ...]")
        else:
            texts.append(key.upper())
    return " ".join(texts)


def read_word(config_type: type, word: str, among: Sequence[str] = ()) -> tuple[str, str]:
    """Splits one argument into its name (Shoal's dotted key, or another system's flag) and the text
    of its value; a switch without a value gets `true`. Raises ShoalError if the name is unknown or
    the value is missing. `among`: all names on the line, which help to tell whose flag the name
    is."""
    name, equals, value = word.partition("=")
    if name.startswith("-"):
        name = _plain(name)
    name = name.lstrip("+").rstrip()
    flag = front_end().find_flag(config_type, name, value, among) if name else None
    is_option = bool(equals or flag or word.startswith("-") or name in names_of(config_type))
    if not name or not is_option:
        meant = argument_for(command_of(config_type), word)
        if meant or not re.match(r"[^\W\d]", name):
            hint = f"; did you mean {meant}?" if meant else ""
            raise ShoalError(f"{word!r}: expected key=value, without spaces{hint}")
    key = None
    if not flag:
        key = find_key(config_type, name)
        name = key.name
    if not equals and not _is_switch(key, flag):
        wanted = "expected a value"
        if key:
            wanted += f" ({key.type_text})"
        raise ShoalError(f"{word}: {wanted}: write {name}=VALUE")
    if not equals:
        value = "true"
    return name, value


def argument_for(command: str, word: str) -> str:
    """Returns the argument that a user probably meant by a word without `key=`: `task=gsm8k` for
    `gsm8k`; '' if no guess is likely. Used for hints in errors."""
    file = packaged(command, word)
    names = names_of(COMMANDS[command])
    if file and file.is_relative_to(PRESETS):
        return f"task={word}"
    if file:
        return f"--config-name {word}"
    if "task" in names and word.endswith(DATA_SUFFIXES):
        return f"task=custom task.path={word}"
    if word.endswith((".yml", ".yaml")):
        return word
    if command in ("export", "convert"):
        key = "from"
    elif "model" in names:
        key = "model"
    else:
        return ""
    if "/" in word or Path(word).is_dir():
        return f"{key}={word}"
    return ""


# ---- lists

_ITEM = re.compile(
    r"""\s*(?:"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'|([^,"']*?))\s*(,|\Z)""", re.DOTALL
)


def split_list(key: Key, text: str) -> list[str]:
    """Splits the text of a list into its items: `[a,b]`, with or without quotes around items. A
    text without brackets is one item, or several for a key in COMMA_LISTS; an empty text is no
    item."""
    is_list = text.startswith("[") and text.endswith("]") and len(text) > 1
    inside = text
    if is_list:
        inside = text[1:-1]
    has_quotes = is_list and re.search("[\"']", text)
    if inside and key.name in COMMA_LISTS and not has_quotes:
        # A comma within parentheses, as in a call, does not separate items.
        return [item.strip() for item in re.split(r",(?![^(]*\))", inside)]
    if not is_list:
        if not text:
            return []
        return [text]
    items = []
    position = 0
    while position < len(inside):
        match = _ITEM.match(inside, position)
        if match is None:
            raise ShoalError(
                f"{key.name}={text}: the list cannot be read after {inside[:position]!r}; put each "
                "item that holds a comma or a quote in quotes"
            )
        double, single, plain, _ = match.groups()
        quoted = single if double is None else double
        if quoted is None:
            items.append(plain)
        else:
            items.append(re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL))
        position = match.end()
    return items


def _list_text(items: Iterable[str]) -> str:
    """Joins items to the text of a list that `split_list` splits into the same items."""
    escaped = [re.sub(r'(["\\])', r"\\\1", item) for item in items]
    return "[" + ",".join(f'"{item}"' for item in escaped) + "]"
