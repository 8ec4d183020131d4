"""Reads the words of a command line, YAML files and Python keywords into entries.

    --run-name=a,b   model=X   --report.groups   gsm8k.yml   --config-name gsm8k

Values stay texts; the schema gives them their types: `run_name=123` is text, `steps=123` a number.
A package that knows other systems registers its translator here (`register`).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shoal.config.commands import COMMANDS, command_of, dataclass_of
from shoal.config.key import Key, keys_of, sections_of
from shoal.config.sections.task import DATA_SUFFIXES
from shoal.config.train import Config
from shoal.records import ShoalError
from shoal.text import did_you_mean, nearest, nearness


@dataclass(frozen=True)
class Alias:
    """A short form of a key: the key, the commands that accept it (empty: all that have it), a note
    for the help."""

    key: str
    commands: tuple[str, ...] = ()
    note: str = ""


_SAMPLING = ("eval", "generate", "serve")


ALIASES: Mapping[str, Alias] = {
    "model": Alias("model.path"),
    "task": Alias("task.name", note="loads the preset of that name, under your own keys"),
    "reward": Alias("reward.functions", note="file.py:function, several with commas"),
    "tools": Alias("environment.tools", note="file.py:f,g: functions that the model may call"),
    "environment": Alias("environment.factory", note="file.py:Factory"),
    "rollout": Alias("environment.rollout", note="file.py:f, in TRL's convention"),
    "agent": Alias("environment.agent", note="a program that asks OPENAI_BASE_URL, or file.py:f"),
    "algorithm": Alias("algorithm.name", note="a paper's settings, under your own keys"),
    "checkpoint_period": Alias("checkpoint.every"),
    "max_staleness": Alias("train.max_staleness"),
    "temperature": Alias("sampling.temperature", _SAMPLING),
    "max_new_tokens": Alias("sampling.max_completion_tokens", _SAMPLING),
    "max_prompt_tokens": Alias("sampling.max_prompt_tokens", _SAMPLING),
    "top_k": Alias("sampling.top_k", _SAMPLING),
    "top_p": Alias("sampling.top_p", _SAMPLING),
    "min_p": Alias("sampling.min_p", _SAMPLING),
    "stop": Alias("sampling.stop", _SAMPLING, note="several as [a,b]"),
    "from": Alias("source", ("export", "convert")),
    "MODE": Alias("mode", ("launch",), note="as MaxText's scripts"),
    "CLOUD_IMAGE_NAME": Alias("push", ("launch",), note="as MaxText's scripts"),
}
"""Short forms of our own keys."""


SWITCHES = ("dryrun", "plan", "multirun")


def switch_of(word: str) -> str:
    """`dryrun` for `--dry-run` in any spelling, `plan` for `--plan`, `multirun` for `--multirun`
    and `-m`; empty for any other word."""
    if word == "-m":
        return "multirun"
    if not word.startswith("--"):
        return ""
    name = re.sub("[-_]", "", word.removesuffix("=true"))
    return name if name in SWITCHES else ""


OURS_FIRST = 0.1
"""How much nearer to a misspelled name another system's flag must be to be named in place of a key
of ours."""


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


@dataclass(frozen=True)
class Arguments:
    """The arguments of a command: a command line, or keywords in Python.

    >>> read_arguments("train", ["gsm8k.yml", "--steps=5"])
    Arguments(config_name='gsm8k.yml', entries=(Entry('steps', '5', 'command line'),))
    """

    config_name: str = ""  # a preset or a file; empty for none
    entries: tuple[Entry, ...] = field(default_factory=tuple)
    preset: str = ""  # the preset beneath a file
    beneath: tuple[Entry, ...] = ()  # of a run whose model is used, beneath all that the user gave


@functools.cache
def aliases_of(config_type: type) -> dict[str, Alias]:
    """The short forms that a command accepts."""
    keys = keys_of(config_type)
    command = command_of(config_type)
    aliases = {}
    for name, alias in ALIASES.items():
        is_accepted = not alias.commands or command in alias.commands
        if is_accepted and alias.key in keys:
            aliases[name] = alias
    return aliases


@functools.cache
def names_of(config_type: type) -> dict[str, str]:
    """Every name of ours that a command accepts -> its dotted key; full names first."""
    names = {name: name for name in keys_of(config_type)}
    for name, alias in aliases_of(config_type).items():
        names[name] = alias.key
    return names


class UnknownKey(ShoalError):
    """Raised for a name that is no key of a command."""

    @classmethod
    def of_all(cls, errors: Sequence[str], config_type: type) -> UnknownKey:
        """One error for all unknown names, with one hint at its end."""
        return cls(f"{'; '.join(errors)} (`shoal {command_of(config_type)} --help` lists all keys)")


def find_key(config_type: type, name: str) -> Key:
    """The key of one of our names; raises ShoalError with the nearest name if there is none."""
    names = names_of(config_type)
    if name in names:
        return keys_of(config_type)[names[name]]
    for section in sections_of(config_type):
        if name in (section, section.rpartition(".")[2]):
            inside = next(key for key in names if key.startswith(f"{section}."))
            raise ShoalError(
                f"{name}: that is a section of keys, not a key; set one of its keys, such as "
                f"{inside}"
            )
    if name in names_of(Config) or translator().find(Config, name):
        raise ShoalError(
            f"{name}: shoal {command_of(config_type)} has no use for it, shoal train does"
            f"{did_you_mean(name, names) or ': leave it out here'}"
        )
    keys_by_name = {}  # of ours and of other systems' flags
    for flag, row in translator().flags(config_type).items():
        if row.keys:
            keys_by_name[flag] = ", ".join(row.keys)
    keys_by_name.update(names)
    meant = nearest(name, keys_by_name)
    ours = nearest(name, names)
    if nearness(name, ours) >= nearness(name, meant) - OURS_FIRST:
        meant = ours
    shown_as = {}
    for known, key in keys_by_name.items():
        shown_as[known] = known if known == key else f"{known} ({key})"
    reason = f"there is no such key{did_you_mean(name, [meant], shown_as)}"
    # mesh.data is near to `dataset`, and never meant.
    if name == "dataset" or not did_you_mean(name, names):
        reason = translator().unsupported(name) or reason
    raise UnknownKey(f"{name}: {reason}")


def key_of(config_type: type, name: str) -> Key | None:
    """The key of a name, ours or another system's; None if there is none."""
    flag = translator().find(config_type, name)
    key = names_of(config_type).get(name, "")
    if not key and flag and flag.is_rename:
        key = flag.keys[0]
    return keys_of(config_type).get(key)


# ---- words


def read_arguments(command: str | type, argv: Sequence[str]) -> Arguments:
    """Parses the words after a command; raises one ShoalError for all unknown names."""
    config_type = dataclass_of(command)
    config_name, preset, words = _take_options(joined(config_type, argv))
    entries: list[Entry] = []
    unknown: list[str] = []
    words = _with_keys(config_type, words)
    among = [_plain(word.partition("=")[0]) for word in words]
    among += [word.lstrip("-") for word in words if word.lstrip("-").startswith("recipe=")]
    for word in words:
        try:
            name, text = read_word(config_type, word, among)
        except UnknownKey as error:
            unknown.append(str(error))
            continue
        key = key_of(config_type, name)
        foreign = translator().find(config_type, name, text, among)
        value = split_list(key, text) if key and key.is_list else text
        origin = f"--{name}" if foreign else COMMAND_LINE
        entries.append(make_entry(name, value, origin))
    if unknown:
        raise UnknownKey.of_all(unknown, config_type)
    return Arguments(config_name, tuple(entries), preset)


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
        flag = translator().find(config_type, _plain(word))
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


def _is_switch(key: Key | None, flag: ForeignFlag | None) -> bool:
    """True for a name of which `--name` alone means true."""
    if flag:
        return flag.is_switch
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
    if name in names or translator().find(config_type, name) is not None:
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
    file = files[0] if files else ""
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
    if not (name and file.is_file()):
        missing = file if name else "NAME"
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

    bare = [word for word in words if is_bare(word)]
    rest = [word for word in words if word not in bare]
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
    flag = translator().find(config_type, name, value, among) if name else None
    is_option = bool(equals or flag or word.startswith("-") or name in names_of(config_type))
    if not name or not is_option:
        meant = argument_for(command_of(config_type), word)
        if meant or not re.match(r"[^\W\d]", name):
            hint = f"; did you mean {meant}?" if meant else ""
            raise ShoalError(f"{word!r}: expected key=value, without spaces{hint}")
    key = None if flag else find_key(config_type, name)
    name = key.name if key else name
    if not equals and not _is_switch(key, flag):
        type_text = f" ({key.type_text})" if key else ""
        raise ShoalError(f"{word}: expected a value{type_text}: write {name}=VALUE")
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
    inside = text[1:-1] if is_list else text
    has_quotes = is_list and re.search("[\"']", text)
    if inside and key.name in COMMA_LISTS and not has_quotes:
        # No comma within a call's parentheses parts items.
        return [item.strip() for item in re.split(r",(?![^(]*\))", inside)]
    if not is_list:
        return [text] if text else []
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
        quoted = double if double is not None else single
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


PRESETS = Path(__file__).parent / "presets"
"""Presets as YAML files: a folder for each command, and one for algorithms."""


COMMAND_OF_PRESETS: Mapping[str, str] = {"doctor": "train", "plan": "train"}
"""Command -> the command whose presets it shares."""


def preset_folders(folder: str) -> tuple[Path, Path]:
    """The folders of a command's presets, or of those that a key names: ours, and the
    translator's."""
    folder = COMMAND_OF_PRESETS.get(folder, folder)
    return PRESETS / folder, translator().presets / folder


def presets_of(folder: str) -> list[str]:
    """Names of the packaged presets of a command, or of `recipe` or `algorithm`."""
    if not folder:
        return []
    names = []
    for path in preset_folders(folder):
        names += [file.stem for file in path.glob("*.yaml")]
    return sorted(names)


def packaged(folder: str, name: str) -> Path | None:
    """The file of a packaged preset."""
    if not folder or not name or "/" in name:
        return None
    for path in preset_folders(folder):
        file = path / f"{name}.yaml"
        if file.is_file():
            return file
    return None


def is_packaged(file: Path) -> bool:
    """True for a preset of ours or the translator's."""
    return file.is_relative_to(PRESETS) or file.is_relative_to(translator().presets)


def find_file(command: str, name: str) -> Path:
    """The file of `--config-name X` or of a word `X.yml`: an existing file, else the preset of that
    base name."""
    path = Path(name)
    is_yaml = path.suffix in (".yml", ".yaml")
    if is_yaml and path.is_file():
        return path.absolute()
    preset_name = path.stem if is_yaml else name
    preset = packaged(command, preset_name)
    if preset:
        return preset
    known = presets_of(command)
    if not known:
        raise ShoalError(
            f"{name}: expected a YAML file that exists; {command or 'this command'} has no presets"
        )
    raise ShoalError(
        f"{name}: no preset or YAML file has this name{did_you_mean(path.stem, known) or '.'} "
        f"Presets: {', '.join(known)}"
    )


def read_files(
    command: str, file: Path, is_key: Callable[[str], bool], above: tuple[Path, ...] = ()
) -> list[tuple[Path, list[Entry]]]:
    """A file's entries, and those of the files in its `defaults`, lowest first."""
    if file in above:
        through = f" through {above[-1]}" if above[-1] != file else ""
        raise ShoalError(f"{file}: its `defaults` lead back to itself{through}; remove that name")
    own: list[Entry] = []
    order = ["_self_"]
    for name, value, line in _leaves(file, is_key):
        origin = f"{file.name}:{line}"
        if name == "defaults":
            items = value if isinstance(value, list) else [value]
            texts = [item for item in items if isinstance(item, str)]
            order = [item for item in texts if not item.startswith("override ")]
        else:
            own.append(make_entry(name, value, origin))
    if "_self_" not in order:
        order.append("_self_")
    files: list[tuple[Path, list[Entry]]] = []
    for item in order:
        if item == "_self_":
            files.append((file, own))
            continue
        candidates = [file.parent / f"{item}{ending}" for ending in ("", ".yaml", ".yml")]
        lower = next((path for path in candidates if path.is_file()), None)
        if lower is None:
            lower = packaged(command, item)
        if lower is None:
            presets = ", ".join(presets_of(command)) or "it has none"
            raise ShoalError(
                f"{file}: its `defaults` name {item}, which is no file in {file.parent} and no "
                f"preset of {command or 'this command'}: {presets}"
            )
        files += read_files(command, lower, is_key, (*above, file))
    return files


def flat_values(file: Path) -> dict[str, Any]:
    """A file's values by dotted name, none of an empty one. ShoalError where it is not there or is
    no YAML of names and values."""
    try:
        is_empty = not file.read_bytes().strip()
    except OSError as error:
        raise ShoalError(f"{file} cannot be read: {error.strerror}") from error
    if is_empty:
        return {}

    def is_key(_: str) -> bool:
        return False

    return {name: value for name, value, _ in _leaves(file, is_key)}


def _leaves(file: Path, is_key: Callable[[str], bool]) -> list[tuple[str, Any, int]]:
    """Every value with its dotted name and its line."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        try:  # libyaml's takes a tenth of the time; what is wrong the other says better
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
            node = loader.get_single_node()
        except yaml.YAMLError:
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            fault = "is empty" if node is None else "cannot be read"
            raise ShoalError(f"{file} {fault}: expected keys with values, as in `steps: 3`")
        return list(_walk(loader, node, "", is_key, {}))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ShoalError(f"{file} cannot be read: {line}{error.problem}") from error
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise ShoalError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    except (LookupError, AttributeError, TypeError) as error:
        # PyYAML's, of `!!int ""` or `!!bool foo`.
        raise ShoalError(
            f"{file} cannot be read: a value is not what its tag `!!...` says: leave tags out"
        ) from error


def _walk(
    loader: Any, node: Any, head: str, is_key: Callable[[str], bool], lines: dict[str, int]
) -> Any:
    import yaml

    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        name = f"{head}{loader.construct_object(key_node)}"
        line = key_node.start_mark.line + 1
        if name in lines:
            raise ValueError(f"lines {lines[name]} and {line} both set {name}")
        lines[name] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value and not is_key(name):
            yield from _walk(loader, value_node, f"{name}.", is_key, lines)
        else:
            yield name, loader.construct_object(value_node, deep=True), line


COMMAND_LINE = "command line"
PYTHON = "Python"
STORED = "the run"


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

    # the keys that the flags name, each at its flag's place, without values
    claims: Sequence[Setting]
    # their settings; a key without one keeps what is beneath it
    apply: Callable[[Get], Sequence[Setting]]


@dataclass
class Translation:
    """What the flags of other systems in some layers become."""

    # layer and index of each entry that is such a flag
    taken: set[tuple[int, int]] = field(default_factory=set)
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
