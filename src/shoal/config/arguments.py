"""Reads the arguments of a command line into settings. A `Setting` is a name with its value as
typed; a `Layer` has the settings of one source, like a file or the command line.

    --run-name=a,b   model=X   --report.groups   gsm8k.yml   --config-name gsm8k

Values stay texts here; the key's type decides later what they become: `run_name=123` is text,
`steps=123` a number."""

from __future__ import annotations

import itertools
import json
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
from shoal.config.token import HUB_TOKEN_KEY, take_token
from shoal.records import ShoalError
from shoal.text import did_you_mean

SWITCHES = ("dryrun", "plan", "multirun")


def switch_of(argument: str) -> str:
    """Returns the switch that an argument is: `dryrun` for `--dry-run` in any spelling (`--dryrun`,
    `--dry_run`), `plan` for `--plan`, `multirun` for `--multirun` and `-m`; '' for any other
    argument. `=true` may follow a name with `--`; with another value it is no switch, and the
    result is ''."""
    if argument == "-m":
        return "multirun"
    if not argument.startswith("--"):
        return ""
    # This removes the two dashes at the start, too.
    name = re.sub("[-_]", "", argument.removesuffix("=true"))
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


COMMA_LISTS = frozenset(
    {"reward.functions", "environment.tools", "reward.weights", "groups", "tags"}
)
"""Keys of lists whose items contain no commas, so that `a,b` without brackets is two items. For
other lists, like `sampling.stop`, `a,b` is one item."""


COMMAND_LINE = "command line"
PYTHON = "Python"
STORED = "the run"
"""Origins of settings whose names are Shoal's own keys: typed on the command line, given from
Python, or read from a run's stored configuration."""


@dataclass(frozen=True)
class Setting:
    """A name with its value as typed; or, after `translate`, a key of Shoal with the value that
    flags of another system gave it.

    >>> Setting("learning_rate", "3e-6", "--learning_rate")
    """

    name: str  # as typed: a key, a short form, or another system's flag
    value: Any  # a text, a list of texts, a value of YAML, or NO_VALUE
    origin: str  # `command line`, `mine.yml:4`, `recipe trl`
    # Only for a setting that replaces flags of another system:
    key: str = ""  # the key that is set
    flags: tuple[str, ...] = ()  # the names of all flags that the value was computed from
    of_rule: bool = False  # True if the value was computed from other keys, too
    yields: bool = False  # True if another setting of the same key in the same layer wins


NO_VALUE = object()
"""The value of a setting that names a key without setting it: a rule of `compat` mentions the key
but leaves it to lower layers."""


@dataclass(frozen=True)
class Layer:
    """The settings of one source: a file, or the command line."""

    # If two settings have one key, the later one counts; settings that yield come first.
    settings: Sequence[Setting]
    label: str = ""  # `preset gsm8k`, `recipe trl`, or the user's file
    file: Path | None = None  # None for the command line
    is_users: bool = True  # True for the command line and the user's own files, False for presets
    skipped: Sequence[str] = ()  # keys in the file that were left out: only training reads them
    about: Any = None  # the section of a recipe (`recipe_files`); None if the file has none
    typed: Sequence[Setting] = ()  # `settings` before `translate` replaced flags; () until then


@dataclass(frozen=True)
class Arguments:
    """The parsed arguments of a command, from a command line or from keywords in Python.

    >>> read_arguments("train", ["gsm8k.yml", "--steps=5"])
    Arguments(config_name='gsm8k.yml', settings=(Setting('steps', '5', 'command line'),))
    """

    config_name: str = ""  # the name of a preset or a file; '' if none was named
    settings: tuple[Setting, ...] = ()
    preset: str = ""  # the name of the preset beneath the file; '' if none was named


def make_setting(name: str, value: Any, origin: str) -> Setting:
    """Returns a setting with these fields. If `name` is HUB_TOKEN_KEY, the token of the Hugging
    Face hub, the setting's value is '' and a token that is not empty goes into the environment
    (HF_TOKEN), so that no record of the settings has it."""
    if name == HUB_TOKEN_KEY:
        take_token(text_of(value))
        value = ""
    return Setting(name, value, origin)


# ---- the command line


def read_arguments(command: str | type, argv: Sequence[str]) -> Arguments:
    """Parses the arguments that follow a command's name; `command` is the name, or the command's
    configuration class. Positional arguments become settings of their keys. The name of a setting
    is the dotted key, also if a short form was typed. The value of a setting is a text, or for a
    list's key a list of texts. An argument that is a flag of another system becomes a setting with
    the flag's name, and with the flag as its origin (`--learning_rate`).

    Raises one ShoalError for all unknown names, and for another mistake a ShoalError at the
    first.

    `config_name` and `preset` of the result are as typed, but with an option for a folder
    `config_name` is the path of the file there. Other files are not looked for here."""
    config_type = dataclass_of(command)
    config_name, preset, arguments = _take_options(join_values(config_type, argv))
    arguments = _name_positionals(config_type, arguments)
    arguments = [part for each in arguments for part in _entries_of_object(config_type, each)]
    settings: list[Setting] = []
    unknown: list[str] = []
    among = []  # all names on the line: together they show which system's flags these are
    for argument in arguments:
        among.append(_option_name(argument.partition("=")[0]))
        if argument.lstrip("-").startswith("recipe="):
            among.append(argument.lstrip("-"))  # with its value, which names a system
    for argument in arguments:
        try:
            name, text = read_argument(config_type, argument, among)
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
        settings.append(make_setting(name, value, origin))
    if unknown:
        raise UnknownKey.of_all(unknown, config_type)
    return Arguments(config_name, tuple(settings), preset)


def join_values(config_type: type, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with each option joined to the values after it; other arguments stay in
    their places unchanged.

        --name VALUE           becomes `--name=VALUE`
        --name VALUE VALUE     becomes `--name=["VALUE","VALUE"]` if the key is a list
        --no_name              becomes `--name=false` if `name` is another system's switch

    An option without a value after it stays `--name`. For a command in POSITIONALS a switch takes
    only `true` or `false` as its value, and a list takes only one value, because what follows may
    be a positional argument.

    A value is an argument that neither begins with `--` nor is `key=value`; so `-1` is one. An
    option whose key is a text or a list of texts also takes one argument with `=`, if what is
    before `=` names no key. If the key is no list, only the first value is joined, and the
    arguments after it stay."""
    rest = list(arguments)
    joined = []
    has_positionals = command_of(config_type) in POSITIONALS
    while rest:
        argument = _without_no(config_type, rest.pop(0))
        key = key_of(config_type, _option_name(argument))
        flag = front_end().find_flag(config_type, _option_name(argument))
        values: list[str] = []  # the arguments after an option that are its values
        if argument.startswith("-") and "=" not in argument:
            values = list(itertools.takewhile(_is_value, rest))
            takes_text = key is not None and key.type in (str, tuple[str, ...])
            if not values and rest and takes_text and _is_text_with_equals(config_type, rest[0]):
                values = rest[:1]
        is_list = key is not None and key.is_list
        takes_several = is_list or (flag is not None and flag.takes_several)
        if has_positionals or not takes_several:
            del values[1:]
        if values and has_positionals and _is_switch(key, flag):
            # Any other argument after a switch is a positional argument of the command.
            if values[0].lower() not in ("true", "false"):
                values = []
        if values:
            del rest[: len(values)]
            text = values[0]
            if key and len(values) > 1:
                items = []
                for value in values:
                    items += split_list(key, value)
                if items:  # none if all values are empty texts
                    text = _list_text(items)
            elif len(values) > 1:
                text = _list_text(values)
            argument = f"{argument}={text}"
        joined.append(argument)
    return joined


def _without_no(config_type: type, argument: str) -> str:
    """Returns `--name=false` for `--no_name` or `--no-name` if `name` is another system's flag that
    may stand without a value, as parsers of transformers name a switch that is on by default; any
    other argument unchanged."""
    name = _option_name(argument)
    if not argument.startswith("--") or not name.startswith("no_"):
        return argument
    find_flag = front_end().find_flag
    positive = name.removeprefix("no_")
    is_known = key_of(config_type, name) is not None or find_flag(config_type, name) is not None
    flag = find_flag(config_type, positive)
    if is_known or flag is None or not flag.may_stand_bare:
        return argument
    return f"--{positive}=false"


def _entries_of_object(config_type: type, argument: str) -> list[str]:
    """Returns `name.entry=VALUE` for each entry of the JSON object in `name={"entry": VALUE}`, if
    one of these names is another system's flag; any other argument alone, unchanged.

    >>> _entries_of_object(Config, 'generation_kwargs={"top_k": 5, "stop_strings": ["."]}')
    ['generation_kwargs.top_k=5', 'generation_kwargs.stop_strings=["."]']
    """
    name, _, text = argument.partition("=")
    if not text.startswith("{"):
        return [argument]
    try:
        entries = json.loads(text)
    except ValueError:
        return [argument]
    base = _option_name(name)
    if not any(front_end().find_flag(config_type, f"{base}.{entry}") for entry in entries):
        return [argument]
    arguments = []
    for entry, value in entries.items():
        value_text = value if isinstance(value, str) else json.dumps(value)
        arguments.append(f"{name}.{entry}={value_text}")
    return arguments


def _is_switch(key: Key | None, flag: Flag | None) -> bool:
    """True if `--name` without a value means true. `flag`: the other system's flag of this name,
    None if there is none; it must allow this. `key`: counts only if `flag` is None, and must then
    be a key that is true or false."""
    if flag:
        return flag.may_stand_bare
    return key is not None and key.type is bool


def _is_value(argument: str) -> bool:
    """True if an argument can be the value of the option before it: it is not a flag and not
    key=value. An argument with one dash, like `-1`, is a value; so is a call `f(key=value)`, and a
    text like `Solve x=1: {q}`, because names have no spaces."""
    if argument.startswith("--"):
        return False
    name, equals, _ = argument.partition("=")
    return not equals or "(" in name or " " in name.strip()


def _is_text_with_equals(config_type: type, argument: str) -> bool:
    """True if an argument with `=`, like `x={q}` or `a.b={q}`, is the text value of the option
    before it, and not `key=value`: the part before `=` is no key and no flag, and, if it has a dot,
    neither in a section of keys nor similar to a key. False if it begins with `--`. `argument`: one
    that `_is_value` refuses."""
    if argument.startswith("--"):
        return False
    name = _option_name(argument.partition("=")[0]).lstrip("+").rstrip()
    names = names_of(config_type)
    if name in names or front_end().find_flag(config_type, name) is not None:
        return False
    if "." not in name:
        return True
    is_in_section = name.partition(".")[0] in sections_of(config_type)
    return not is_in_section and not did_you_mean(name, names)


def is_file_option(argument: str) -> bool:
    """True if an argument is an option that names a preset or a file: `--config-name X`,
    `config_file=X`, `--preset=X`."""
    return _is_option(argument, FILE_OPTIONS)


def is_folder_option(argument: str) -> bool:
    """True if an argument is one of Hydra's options for a folder: `--config-path X`,
    `--config-dir=X`, `-cp X`."""
    return _is_option(argument, FOLDER_OPTIONS)


def _is_option(argument: str, options: Sequence[str]) -> bool:
    """True if an argument is one of these options: `--name` (its value may follow), or
    `name=VALUE` with or without dashes."""
    name, equals, _ = argument.partition("=")
    return _option_name(name) in options and bool(equals or name.startswith("-"))


def _option_name(name: str) -> str:
    """Returns the name of an option without dashes at its start and with underscores: `config_name`
    for `--config-name`."""
    return name.lstrip("-").replace("-", "_")


def is_file_argument(argument: str) -> bool:
    """True if an argument is the name of a YAML file: it ends with `.yml` or `.yaml`. Without `=`
    in it the file need not exist. If it contains `=`, which a path may, the file must exist."""
    if not argument.endswith((".yml", ".yaml")):
        return False
    return "=" not in argument or Path(argument).is_file()


def _take_options(arguments: Sequence[str]) -> tuple[str, str, list[str]]:
    """Splits off the options that name presets, files and folders, and YAML files without an
    option. Returns (name or path of the preset or file, name of the preset beneath it, the other
    arguments); the first two are '' if not given. `arguments`: options are joined to their values
    by `=` (`join_values`). The option for a folder becomes a part of the path. Of several
    `--preset`, and of several folders, the last counts. ShoalError if two files or presets are
    named in other ways than by `--preset`, if an option has no value, or if `_in_folder` refuses
    the folder."""
    files = []
    preset = ""
    folder_option, folder = "", ""
    rest = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if is_file_argument(argument):
            files.append(argument)
        elif not (is_file_option(argument) or is_folder_option(argument)):
            rest.append(argument)
        elif not value:
            raise ShoalError(
                f"{name}: expected the name of a preset or a YAML file after it, and there is "
                "nothing"
            )
        elif is_folder_option(argument):
            folder_option, folder = name, value
        elif _option_name(name) == "preset":
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
    """Returns the path of a preset's file in a folder. `option`, `folder`: the option as typed,
    like `--config-path`, and its value. `name`: the value of --config-name, with or without ending;
    without one it is NAME.yaml.

    Returns `name` unchanged if `folder` is '', or if the file is not in the folder of --config-dir
    (or -cd), because other folders are searched then. With --config-path (or -cp) it is a
    ShoalError if the file is missing in the folder, or if `name` is ''."""
    if not folder:
        return name
    file_name = name if name.endswith((".yml", ".yaml")) else f"{name}.yaml"
    file = Path(folder).expanduser() / file_name
    may_be_missing = _option_name(option) in ("config_dir", "cd")
    if may_be_missing and not file.is_file():
        return name
    if not name:
        raise ShoalError(
            f"{option}={folder}: expected --config-name NAME with it, the name of a file in that "
            "folder"
        )
    if not file.is_file():
        raise ShoalError(
            f"{option}={folder}: there is no {file}; expected the folder, from here, that has the "
            f"file {file_name}, or leave {option} and --config-name out for the defaults"
        )
    return str(file)


def _name_positionals(config_type: type, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with positional ones written as `key=value`. The command's row in
    POSITIONALS has the keys in the order of the positional arguments. Without a row, the arguments
    are returned unchanged.

    If the first key is a list, it takes all positional arguments, as one argument at the end: `a b`
    becomes `runs=["a","b"]`. Otherwise each takes the next key, and they come first. ShoalError if
    there are more of them than keys."""
    command = command_of(config_type)
    names = names_of(config_type)
    keys = POSITIONALS.get(command, ())
    if not keys:
        return list(arguments)

    def is_positional(argument: str) -> bool:
        """True if an argument is no option, no key and no key=value. An existing path with `=` in
        it is positional too."""
        name, equals, _ = argument.partition("=")
        # Hydra writes `+key=value` for a key that is added, and `++key=value`.
        if argument.startswith("-") or name.lstrip("+") in names:
            return False
        return not equals or Path(argument).exists()

    positionals = []
    rest = []
    for argument in arguments:
        if is_positional(argument):
            positionals.append(argument)
        else:
            rest.append(argument)
    if positionals and keys_of(config_type)[keys[0]].is_list:
        return [*rest, f"{keys[0]}={_list_text(positionals)}"]
    if len(positionals) > len(keys):
        raise ShoalError(
            f"{positionals[-1]}: one word too many, expected `shoal {command} "
            f"{positionals_text(command)}` and keys as key=value"
        )
    # strict=False: the last keys may have no positional argument.
    pairs = zip(keys, positionals, strict=False)
    with_keys = [f"{key}={argument}" for key, argument in pairs]
    return with_keys + rest


def positionals_text(command: str) -> str:
    """Returns a command's positional arguments as its usage shows them: `RUN OTHER`, or `[RUN ...]`
    for a list; '' if the command has none."""
    texts = []
    for key in POSITIONALS.get(command, ()):
        if keys_of(COMMANDS[command])[key].is_list:
            # Each argument is one of them: `runs` is shown as `[RUN ...]`.
            texts.append(f"[{key.upper().removesuffix('S')} ...]")
        else:
            texts.append(key.upper())
    return " ".join(texts)


def read_argument(config_type: type, argument: str, among: Sequence[str] = ()) -> tuple[str, str]:
    """Splits one argument into its name and the text of its value. The name is Shoal's dotted key,
    also for a short form (`lr=1` -> ("optimizer.lr", "1")), or another system's flag; a switch
    without a value gets `true`. Dashes or Hydra's `+` before the name are left out; in a name with
    dashes before it, other dashes become `_`. Raises UnknownKey (a ShoalError) if the name is
    unknown; another ShoalError if it is a section's or of use to `shoal train` alone, if the value
    is missing, or if the argument is no `key=value`. `among`: all names on the line, which help to
    tell whose flag the name is."""
    name, equals, value = argument.partition("=")
    if name.startswith("-"):
        name = _option_name(name)
    name = name.lstrip("+").rstrip()
    if re.match(r"~[^\W\d]", name):  # Hydra's way to remove a name that its files set
        raise ShoalError(
            f"{argument}: Hydra's ~ is not read: leave {name[1:]} out where it is set, or, for a "
            f"flag of another system, write {name[1:]}=null, which keeps its default"
        )
    flag = front_end().find_flag(config_type, name, value, among) if name else None
    is_option = bool(equals or flag or argument.startswith("-") or name in names_of(config_type))
    if not name or not is_option:
        meant = suggest_argument(command_of(config_type), argument)
        # Another word that begins with a letter may be a misspelled key: `find_key` below suggests
        # one.
        if meant or not re.match(r"[^\W\d]", name):
            hint = f"; did you mean {meant}?" if meant else ""
            raise ShoalError(f"{argument!r}: expected key=value, without spaces{hint}")
    key = None
    if not flag:
        key = find_key(config_type, name)
        name = key.name
    if not equals and not _is_switch(key, flag):
        wanted = "expected a value"
        if key:
            wanted += f" ({key.type_text})"
        raise ShoalError(f"{argument}: {wanted}: write {name}=VALUE")
    if not equals:
        value = "true"
    return name, value


def suggest_argument(command: str, typed: str) -> str:
    """Returns the argument that a user probably meant by a word without `key=`, for hints in
    errors; '' if no guess is likely. `typed`: the word; a preset, a data file, a YAML file, or a
    model's folder or `owner/name` is recognised. A preset of Shoal's own is taken for a task's; one
    of another system becomes `--config-name`.

    >>> suggest_argument("train", "gsm8k")
    'task=gsm8k'
    """
    file = packaged(command, typed)
    names = names_of(COMMANDS[command])
    if file and file.is_relative_to(PRESETS):
        return f"task={typed}"
    if file:
        return f"--config-name {typed}"
    if "task" in names and typed.endswith(DATA_SUFFIXES):
        return f"task=custom task.path={typed}"
    if typed.endswith((".yml", ".yaml")):
        return typed
    if command in ("export", "convert"):
        key = "from"
    elif "model" in names:
        key = "model"
    else:
        return ""
    if "/" in typed or Path(typed).is_dir():
        return f"{key}={typed}"
    return ""


# ---- lists

# An item in double quotes, in single quotes, or plain, up to the comma after it or the end.
_ITEM = re.compile(
    r"""\s*(?:"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'|([^,"']*?))\s*(,|\Z)""", re.DOTALL
)


def split_list(key: Key, text: str) -> list[str]:
    """Splits the text of a list into its items: `[a,b]`, with or without quotes around items. A
    text without brackets is one item, or several for a key in COMMA_LISTS; an empty text or `[]` is
    no item. White space around items is removed; it is kept in quotes, and in a text without
    brackets that is one item because its key is not in COMMA_LISTS. In quotes a backslash makes the
    next character plain. `key`: decides about commas, and gives the name for the error. ShoalError
    if a quote is not closed or is inside an item."""
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
        double, single, plain, _ = match.groups()  # the two that did not match are None
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
