"""Words: names with values, as they were typed, and layers of them. Reads those of a command line.

    --run-name=a,b   model=X   --report.groups   gsm8k.yml   --config-name gsm8k

Values stay texts; the schema gives them their types: `run_name=123` is text, `steps=123` a number.
"""

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
    """`dryrun` for `--dry-run` in any spelling, `plan` for `--plan`, `multirun` for `--multirun`
    and `-m`; empty for any other word."""
    if word == "-m":
        return "multirun"
    if not word.startswith("--"):
        return ""
    name = re.sub("[-_]", "", word.removesuffix("=true"))
    if name not in SWITCHES:
        return ""
    return name


FILE_OPTIONS = ("config_name", "cn", "config_file", "config", "preset")
"""Options that name a preset or a file: `--config-name X`, `config_file=X`; `preset` is the one
beneath a file."""


FOLDER_OPTIONS = ("config_path", "cp", "config_dir", "cd")
"""Hydra's options for the folder of `--config-name X`: of its own files, or one that is searched
first."""


POSITIONALS: Mapping[str, tuple[str, ...]] = {
    "groups": ("run",),
    "replay": ("run",),
    "rescore": ("run",),
    "diff": ("run", "other"),
    "view": ("runs",),
    "compat": ("to",),
}
"""Command -> the keys of its positional arguments: `shoal diff A B` is `run=A other=B`. A list
takes all words."""


COMMA_LISTS = frozenset({"reward.functions", "environment.tools", "reward.weights", "groups"})
"""Lists whose items contain no commas: `a,b` is two items (of `sampling.stop` it is one)."""


COMMAND_LINE = "command line"
PYTHON = "Python"
STORED = "the run"
"""Origins of words that were typed under the names of their keys."""


@dataclass(frozen=True)
class Word:
    """A name with its value, as typed, or one of our keys that flags of another system stand for.

    >>> Word("learning_rate", "3e-6", "--learning_rate")
    """

    name: str  # as typed: a key, a short form, or another system's flag
    value: Any  # text, a list of texts, or what YAML gave; NO_VALUE
    origin: str  # `command line`, `mine.yml:4`, `recipe trl`
    # Of a word that flags were replaced by:
    key: str = ""  # the key that it sets
    flags: tuple[str, ...] = ()  # the names of all flags that it follows from
    of_rule: bool = False  # it follows from other keys, too
    yields: bool = False  # it gives way to the other words of its layer


NO_VALUE = object()
"""The value of a word by which a rule names a key without setting it: what lies beneath counts."""


@dataclass(frozen=True)
class Layer:
    """The words of one source: of a file, or of the command line."""

    words: Sequence[Word]  # the later of two of one key counts; first those that yield
    label: str = ""  # `preset gsm8k`, `recipe trl`, or the user's file
    file: Path | None = None  # None for the command line
    is_users: bool = True  # the command line and the user's own files
    skipped: Sequence[str] = ()  # keys in the file that only training reads
    typed: Sequence[Word] = ()  # the words before flags were replaced, once that is done


@dataclass(frozen=True)
class Arguments:
    """The arguments of a command: a command line, or keywords in Python.

    >>> read_arguments("train", ["gsm8k.yml", "--steps=5"])
    Arguments(config_name='gsm8k.yml', words=(Word('steps', '5', 'command line'),))
    """

    config_name: str = ""  # a preset or a file; empty for none
    words: tuple[Word, ...] = ()
    preset: str = ""  # the preset beneath a file


def make_word(name: str, value: Any, origin: str) -> Word:
    """A word as it was typed. The hub's token goes into the environment and is not kept."""
    if name == TOKEN:
        take_token(text_of(value))
        value = ""
    return Word(name, value, origin)


# ---- words


def read_arguments(command: str | type, argv: Sequence[str]) -> Arguments:
    """Parses the words after a command; raises one ShoalError for all unknown names."""
    config_type = dataclass_of(command)
    config_name, preset, words = _take_options(joined(config_type, argv))
    words = _with_keys(config_type, words)
    read: list[Word] = []
    unknown: list[str] = []
    among = []  # the names on the line, which say whose flags they are
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
    """The words, with `--name VALUE` as `--name=VALUE`, and all words behind a list's name as its
    items. For a command of POSITIONALS only `true` or `false` is the value of a switch, and a list
    takes one word: another one is an argument."""
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
            # Any other word is an argument of the command.
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
    """True for a name of which `--name` alone means true."""
    if flag:
        return flag.may_stand_bare
    return key is not None and key.type is bool


def _is_value(word: str) -> bool:
    """True for a word that can be the value of the option before it: no flag, no key=value, perhaps
    a call `f(key=value)` or a text as `Solve x=1: {q}`, since no name has a space."""
    if word.startswith("--"):
        return False
    name, equals, _ = word.partition("=")
    return not equals or "(" in name or " " in name.strip()


def _is_text(config_type: type, word: str) -> bool:
    """True for a word such as `x={q}` or `a.b={q}` behind an option that wants a text: it names no
    key and no flag, nor, with a dot, something that is near to a key."""
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
    """True for `--config-name X`, `config_file=X`, `--preset=X`: a word that names a preset or a
    file."""
    return _is_option(word, FILE_OPTIONS)


def is_folder_option(word: str) -> bool:
    """True for `--config-path X`, `--config-dir=X`, `-cp X`."""
    return _is_option(word, FOLDER_OPTIONS)


def _is_option(word: str, options: Sequence[str]) -> bool:
    name, equals, _ = word.partition("=")
    return _plain(name) in options and bool(equals or name.startswith("-"))


def _plain(name: str) -> str:
    """The name of an option: `--config-name` is `config_name`."""
    return name.lstrip("-").replace("-", "_")


def is_file_word(word: str) -> bool:
    """True for a word that is a YAML file; a path may contain a `=`."""
    return word.endswith((".yml", ".yaml")) and ("=" not in word or Path(word).is_file())


def _take_options(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """The name of the preset or file, the preset beneath it, and the other words."""
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
    """The file of that name in the folder of an option, if there is one; in that of --config-dir it
    may be missing."""
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
    """The words, those without a key as `key=word` by the command's POSITIONALS."""
    command = command_of(config_type)
    names = names_of(config_type)
    keys = POSITIONALS.get(command, ())
    if not keys:
        return list(words)

    def is_bare(word: str) -> bool:
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
    """A command's positional arguments as its usage shows them: `RUN OTHER`, or `[RUN ...]` for a
    list."""
    texts = []
    for key in POSITIONALS.get(command, ()):
        if keys_of(COMMANDS[command])[key].is_list:
            texts.append(f"[{key.upper().removesuffix('S')} ...]")
        else:
            texts.append(key.upper())
    return " ".join(texts)


def read_word(config_type: type, word: str, among: Sequence[str] = ()) -> tuple[str, str]:
    """The name (our dotted key, or another system's flag) and the text of the value of one
    argument."""
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
    """The argument that a word without a key stands for: `task=gsm8k` for `gsm8k`; empty if none is
    likely."""
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
    """The items of a list's text: `[a,b]` with optional quotes, nothing, or one item unchanged."""
    is_list = text.startswith("[") and text.endswith("]") and len(text) > 1
    inside = text
    if is_list:
        inside = text[1:-1]
    has_quotes = is_list and re.search("[\"']", text)
    if inside and key.name in COMMA_LISTS and not has_quotes:
        # No comma within a call's parentheses parts items.
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
    """The items of a list as `split_list` reads them."""
    escaped = [re.sub(r'(["\\])', r"\\\1", item) for item in items]
    return "[" + ",".join(f'"{item}"' for item in escaped) + "]"
