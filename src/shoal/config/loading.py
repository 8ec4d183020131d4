"""From what a user gave to the frozen dataclass: one chain, later layers over earlier ones.

    defaults < preset < file < command line

A task, a recipe or an algorithm that a layer names is a preset that lies directly beneath that layer. A file lies over
the files that its `defaults` name. Names of other systems become keys before the layers are merged (translator.py);
what needs other keys' values (`Late`, `${...}`) is computed after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config.arguments import COMMA_LISTS, Arguments, find_key, key_of, names_of, read_arguments, split_list
from shoal.config.files import find_file, interpolate, is_interpolated, is_packaged, packaged, presets_of, read_files
from shoal.config.keys import command_of, dataclass_of, keys_of, sections_of
from shoal.config.schema import Config
from shoal.config.text import difference_from_defaults, texts_of
from shoal.config.translator import COMMAND_LINE, PYTHON, Entry, Late, Report, Setting, make_entry, translator
from shoal.config.values import build, convert_value, get_value, leaves_of, shown, text_of
from shoal.text import nearest
from shoal.types import ShoalError

PACKAGED: Mapping[str, str] = {"recipe": "recipe", "algorithm.name": "algorithm"}
"""Key that names a packaged set of settings -> the folder of presets that holds them, a file each."""

EITHER = ("batch.prompts_per_step", "batch.prompts_per_device")
"""Two keys for one thing: setting one takes the other back."""


@dataclass(frozen=True)
class Layer:
    """One file's entries, or the command line's. `label`: what its settings come from, empty where each has a line
    or a flag of its own."""

    entries: Sequence[Entry]
    label: str = ""
    file: Path | None = None

    @property
    def is_ordered(self) -> bool:
        """True for a command line: the later of two names stands."""
        return self.file is None

    @property
    def is_users(self) -> bool:
        return self.file is None or not is_packaged(self.file)


@dataclass(frozen=True)
class Resolved:
    """Where a configuration came from, and its text for the run folder."""

    config_name: str  # the preset or file that was loaded; empty for none
    notes: tuple[str, ...]  # lines for the start: what presets set, which keys were passed over
    text: str  # every key, as YAML that loads as the same configuration
    difference: str  # the keys that differ from the defaults, likewise
    arguments: Arguments  # what the user gave
    became: tuple[str, ...] = ()  # a line for each flag of another system that was given
    origins: Mapping[str, str] = field(default_factory=dict)  # key -> `command line`, `mine.yml:4`, `recipe trl`

    def explain(self, message: str) -> str:
        """An error's text, with the flag or the file's line from which each key in it came."""
        return _with_origins(message, self.origins)


@dataclass
class Chain:
    """Layers as settings by key, lowest first, and what there is to say about them."""

    layers: list[Layer]
    settings: list[dict[str, Setting]]
    reports: list[tuple[int, Report]]
    errors: list[str]
    notes: list[str]
    lowest: dict[str, Setting]
    conflicts: list[tuple[Setting, str]]  # two names of one key in a file: an error unless a higher layer decides

    def merged(self, start: int = 0) -> dict[str, Setting]:
        """Key -> the setting that stands; of the layers from `start` on."""
        found = dict(self.lowest) if start == 0 else {}
        for settings in self.settings[start:]:
            if EITHER[0] in settings and EITHER[1] not in settings:
                found.pop(EITHER[1], None)
            found |= settings
        return found


# ---- entry points


def compose(command: str | type, argv: Sequence[str] = ()) -> tuple[Any, Resolved]:
    """A command's configuration from its command line (without the command); raises ShoalError.

    >>> config, resolved = compose("train", ["task=gsm8k", "optimizer.lr=1e-5"])

    If no preset is named, the one with the task's name lies under the user's own keys.
    """
    config_type = dataclass_of(command)
    return load(config_type, read_arguments(config_type, argv))


def recompose(config_type: type, file: Path, arguments: Arguments) -> tuple[Any, Resolved]:
    """A stored configuration with the user's own keys over it; the preset or file that they named is left out.

    >>> config, resolved = recompose(Config, run / "config.yaml", resolved.arguments)
    """
    return load(config_type, arguments, file.absolute())


def from_overrides(config_type: type, /, **overrides: Any) -> tuple[Any, Resolved, tuple[Callable[..., Any], ...]]:
    """The same from Python: (configuration, where it came from, reward functions given as callables).

    >>> from_overrides(Config, model="tiny", optimizer={"lr": 1e-5}, batch__group_size=4, reward=my_reward)

    Keys may be nested dicts, joined by `__` or by dots, or short forms; `config_name` names a preset or a file.
    """
    config_name = str(overrides.pop("config_name", ""))
    entries, functions = [], ()
    for name, value in leaves_of(config_type, nested_names(overrides)):
        key = key_of(config_type, name)
        if key and key.name in COMMA_LISTS and isinstance(value, str):
            value = split_list(key, value)
        if key and key.name == "reward.functions":
            value, functions = _take_callables(value)
        value = list(value) if isinstance(value, tuple) else value
        if key and key.is_list:
            value = [str(item) for item in (value if isinstance(value, list) else [value])]
        entries.append(make_entry(name, value if isinstance(value, str | list) else str(value), PYTHON))
    return *load(config_type, Arguments(config_name, tuple(entries))), functions


def nested_names(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`a__b` as `a.b`, at any depth."""
    return {str(name).replace("__", "."): nested_names(value) if isinstance(value, Mapping) else value
            for name, value in overrides.items()}


def _take_callables(value: Any) -> tuple[list[Any], tuple[Callable[..., Any], ...]]:
    items = list(value) if isinstance(value, list | tuple) else [value]
    functions = tuple(item for item in items if callable(item))
    if functions and len(functions) < len(items):
        raise ShoalError(f"reward={value!r}: expected functions, or names of the form file.py:function, not both: "
                         "import the named ones and give them as functions")
    return ([], functions) if functions else (items, ())


def load(config_type: type, arguments: Arguments, stored: Path | None = None) -> tuple[Any, Resolved]:
    """The configuration of what a user gave; `stored`: a run's own configuration in place of presets and files."""
    chain, file, passed = _chain(config_type, arguments, stored)
    settings = chain.merged()
    values, late = _values(config_type, settings, chain.errors)
    origins = {key: _origin(config_type, setting) for key, setting in settings.items()}
    chain.errors += [message for setting, message in chain.conflicts if settings.get(setting.key) is setting]
    if chain.errors:
        raise ShoalError("; ".join(dict.fromkeys(chain.errors)))
    try:
        config = build(config_type, values)
    except ShoalError as error:
        raise ShoalError(_with_origins(str(error), origins)) from None
    became = list(_report_lines(config_type, chain, settings, values, late))
    notes = _notes(config, chain, settings, file, passed, bool(arguments.preset))
    text, difference = texts_of(config)
    name = file.stem if file else ""
    return config, Resolved(name, (*notes, *chain.notes, *(line for line, has_line in became if has_line)), text,
                            difference, arguments, tuple(line for line, _ in became), origins)


def given_values(config_type: type, arguments: Arguments, *names: str) -> dict[str, Any]:
    """The values of some keys as the user's own file and command line give them, before presets are looked at."""
    layers, _, _ = _users_layers(config_type, arguments, None)
    settings = _settle(config_type, [layer for layer in layers if layer.is_users]).merged()
    keys = keys_of(config_type)
    return {name: convert_value(keys[name], settings[name].value) for name in names if name in settings}


def packaged_values(config: Any) -> dict[str, Any]:
    """What the recipe and the algorithm that a configuration names set, by dotted key."""
    layers = [layer for key in PACKAGED for layer in _named_layers(type(config), key, get_value(config, key))]
    settings = _settle(type(config), layers).merged()
    return _values(type(config), settings, [])[0]


# ---- layers


def _chain(config_type: type, arguments: Arguments, stored: Path | None) -> tuple[Chain, Path | None, list[str]]:
    """Every layer: the user's own, and beneath each the presets that it names."""
    layers, file, passed = _users_layers(config_type, arguments, stored)
    command, chain = command_of(config_type), _settle(config_type, layers)
    line = len(layers) - 1
    beneath: dict[int, list[Layer]] = {}
    task = chain.settings[line].get("task.name") or chain.lowest.get("task.name")
    if file is None and task and (preset := packaged(command, text_of(task.value))):
        file = preset
        beneath[line] = _file_layers(config_type, preset, f"task {preset.stem}", [])
    for key in [key for key in PACKAGED if key in keys_of(config_type)]:
        places = [number for number, found in enumerate(chain.settings) if key in found]
        if places and (name := text_of(chain.settings[places[-1]][key].value)):
            start = places[-1] if layers[places[-1]].is_ordered else _first_of_unit(layers, places[-1])
            beneath.setdefault(start, []).extend(_named_layers(config_type, key, name))
    whole = [one for number, layer in enumerate(layers) for one in (*beneath.get(number, ()), layer)]
    return _settle(config_type, whole), file, passed


def _first_of_unit(layers: Sequence[Layer], number: int) -> int:
    """The lowest layer of those that a file and its `defaults` make."""
    while number > 0 and layers[number - 1].label == layers[number].label:
        number -= 1
    return number


def _users_layers(config_type: type, arguments: Arguments, stored: Path | None) -> tuple[
        list[Layer], Path | None, list[str]]:
    """The layers of the preset beneath, of the file, and of the command line; the file; keys that were passed over."""
    command, passed, layers = command_of(config_type), [], []
    name = arguments.config_name
    file = stored or (find_file(command, name) if name else None)
    if arguments.preset and not stored and (file is None or not is_packaged(file)):
        below = find_file(command, arguments.preset)
        layers += _file_layers(config_type, below, f"preset {below.stem}", passed)
        file = file or below
    if file and (not layers or file != layers[-1].file):
        layers += _file_layers(config_type, file, f"preset {file.stem}" if is_packaged(file) else "", passed)
    return [*layers, Layer(arguments.entries)], file, passed


def _named_layers(config_type: type, key: str, name: str) -> list[Layer]:
    """The layers of a packaged recipe or algorithm."""
    folder = PACKAGED[key]
    if not name:
        return []
    file, known = packaged(folder, name), presets_of(folder)
    if file is None:
        near = f", did you mean {nearest(name, known)}?" if known else ";"
        raise ShoalError(f"{folder}={name}: there is no such {folder}{near} There are: {', '.join(known) or 'none'}")
    return _file_layers(config_type, file, f"{folder} {name}", [])


def _file_layers(config_type: type, file: Path, label: str, passed: list[str]) -> list[Layer]:
    """A file's layers, without the keys that only training reads if another command reads it."""
    found = []
    keys = keys_of(config_type)
    for place, entries in read_files(command_of(config_type), file, lambda name: name in keys):
        raw = {entry.name: entry.value for entry in entries}
        own = [_resolve_foreign(config_type, entry, raw) for entry in entries
               if not _is_passed_over(config_type, entry, passed)]
        if label:
            own = [Entry(entry.name, entry.value, label) for entry in own]
        found.append(Layer(own, label or str(file), place))
    return found


def _is_passed_over(config_type: type, entry: Entry, passed: list[str]) -> bool:
    """True for an empty section and, for a command that is not training, for a key that only training reads."""
    name, value = entry.name, entry.value
    if value is None and (name in sections_of(config_type) or name in sections_of(Config)):
        return True
    if issubclass(config_type, Config):
        return False
    if isinstance(value, Mapping) and name in sections_of(Config):  # `batch` is a key there, a section in training
        inside = [f"{name}.{part}" for part in value]
        if inside and all(_is_known(Config, one, None) for one in inside):
            passed += inside
            return True
        return False
    if not _is_known(config_type, name, value) and _is_known(Config, name, value):
        passed.append(name)
        return True
    return False


def _is_known(config_type: type, name: str, value: Any) -> bool:
    return name in names_of(config_type) or translator().find(config_type, name, value) is not None


def _resolve_foreign(config_type: type, entry: Entry, raw: Mapping[str, Any]) -> Entry:
    """An entry under another system's name, with its `${...}` from the same file; one of ours is resolved late."""
    if not is_interpolated(entry.value) or entry.name in names_of(config_type):
        return entry
    try:
        value = interpolate(entry.name, entry.value, lambda name: raw[name])
    except ShoalError:
        value = entry.value  # a flag that acts refuses it
    return Entry(entry.name, value, entry.origin)


# ---- settings


def _settle(config_type: type, layers: Sequence[Layer]) -> Chain:
    """The layers with every name as a key: ours as they are, other systems' translated."""
    translation = translator().translate(config_type, [layer.entries for layer in layers])
    chain = Chain(list(layers), [], list(translation.reports), list(translation.errors), [], {}, [])
    for number, layer in enumerate(layers):
        found: dict[str, Setting] = {}
        weak: dict[str, Setting] = {}
        for place, entry in enumerate(layer.entries):
            settings = translation.settings.get((number, place))
            if settings is None:
                settings = _own_setting(config_type, layer, entry, chain.errors)
            for setting in settings:
                if setting.rank == "own":
                    _put(config_type, layer, found, setting, chain)
                else:
                    (weak if setting.rank == "weak" else chain.lowest)[setting.key] = setting
        chain.settings.append({**{key: one for key, one in weak.items() if key not in found}, **found})
    return chain


def _own_setting(config_type: type, layer: Layer, entry: Entry, errors: list[str]) -> list[Setting]:
    """The setting of a name of ours."""
    try:
        key = find_key(config_type, entry.name)
    except ShoalError as error:
        errors.append(f"{entry.origin}: {error}" if layer.file else str(error))
        return []
    value = entry.value
    if layer.file and is_interpolated(value):
        value = _late_reference(config_type, layer, entry)
    return [Setting(key.name, value, entry.origin, entry.name)]


def _late_reference(config_type: type, layer: Layer, entry: Entry) -> Late:
    """A value that refers to other keys' final values, or to other names of its file."""
    raw = {one.name: one.value for one in layer.entries}
    names = names_of(config_type)

    def compute(get: Callable[[str], Any]) -> tuple[Mapping[str, Any], str]:
        value = interpolate(entry.name, entry.value,
                            lambda name: get(names[name]) if name in names else raw[name])
        return {names[entry.name]: list(value) if isinstance(value, tuple) else value}, ""

    return Late(compute)


def _put(config_type: type, layer: Layer, found: dict[str, Setting], setting: Setting, chain: Chain) -> None:
    """Adds one setting to its layer's. Of two names for one key the later stands on a command line, with a note; in a
    file they have no order and are an error."""
    ours = names_of(config_type)

    def is_noted(before: Setting) -> bool:
        return (before.name != setting.name and not (before.group and before.group == setting.group)
                and not {before.name, setting.name} <= ours.keys())

    if setting.key in EITHER and layer.is_ordered and text_of(setting.value) != "0":
        other = found.pop(EITHER[1 - EITHER.index(setting.key)], None)
        if other and is_noted(other):
            chain.notes.append(f"{other.name} and {setting.name} both set how many prompts a step has: the later one "
                               f"stands, {setting.name}")
    before = found.pop(setting.key, None)
    found[setting.key] = setting
    if before is None or text_of(before.value) == text_of(setting.value):
        return
    if layer.file and before.name != setting.name and not (before.group and before.group == setting.group):
        chain.conflicts.append((setting, f"{layer.file}: {before.name} and {setting.name} both set {setting.key}; "
                                "write one of them"))
    elif is_noted(before):
        chain.notes.append(f"{before.name} and {setting.name} both set {setting.key}: the later one stands, "
                           f"{setting.name}")


def _values(config_type: type, settings: Mapping[str, Setting], errors: list[str]) -> tuple[
        dict[str, Any], dict[Late, tuple[Mapping[str, Any], str]]]:
    """Key -> the value of its type, late ones computed; and what each late value gave."""
    keys = keys_of(config_type)
    values: dict[str, Any] = {}
    late: dict[Late, tuple[Mapping[str, Any], str]] = {}
    pending: list[str] = []

    def get(key: str) -> Any:
        if key in values or key not in settings:
            return values.get(key, keys[key].default) if key in keys else ""
        if key in pending:
            raise ShoalError(f"{_origin(config_type, settings[key])}: {key} refers to itself")
        pending.append(key)
        value = settings[key].value
        if isinstance(value, Late):
            if value not in late:
                late[value] = value.compute(get)
            value = late[value][0].get(key, keys[key].default)
        values[key] = convert_value(keys[key], value)
        pending.pop()
        return values[key]

    for key in settings:
        try:
            get(key)
        except ShoalError as error:
            pending.clear()
            origins = {one: _origin(config_type, setting) for one, setting in settings.items()}
            errors.append(_with_origins(str(error), origins))
    return values, late


# ---- origins


def _origin(config_type: type, setting: Setting) -> str:
    """`command line`, `--learning_rate`, `mine.yml:4`, `recipe trl`."""
    is_ours = setting.name in names_of(config_type)
    return f"{setting.origin} {setting.name}" if setting.origin == PYTHON and not is_ours else setting.origin


def _with_origins(message: str, origins: Mapping[str, str]) -> str:
    """A message with the origin of each key in it that was not typed under its own name."""
    mentioned = [f"{key}: {origin}" for key, origin in origins.items() if origin not in (COMMAND_LINE, PYTHON)
                 and re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", message)]
    return f"{message} ({', '.join(mentioned)})" if mentioned else message


# ---- notes


def _report_lines(config_type: type, chain: Chain, settings: Mapping[str, Setting], values: Mapping[str, Any],
                  late: Mapping[Late, tuple[Mapping[str, Any], str]]) -> Iterator[tuple[str, bool]]:
    """A line for each flag of another system among the user's own that is in effect, and whether it stands by itself;
    those of a file that change nothing share one line."""
    idle: dict[int, list[str]] = {}
    for number, report in chain.reports:
        layer = chain.layers[number]
        standing = [one for one in report.settings if settings.get(one.key) is one and one.key in values]
        if not layer.is_users or (report.settings and not standing):
            continue
        if not report.settings and layer.file and not report.has_line:
            idle.setdefault(number, []).extend(report.flags)
            continue
        flags = ", ".join(f"{name}={text}" for name, text in report.flags.items())
        said = next((late[one.value][1] for one in standing if isinstance(one.value, Late)), report.meaning)
        if len(standing) < len([one for one in report.settings if one.rank == "own"]):
            said = report.meaning  # the sentence would tell of keys that do not stand
        tail = f": {said}" if said else ""
        default = {key: keys_of(config_type)[key].default for key in values}
        became = [f"{one.key}={shown(values[one.key]) or 'empty'}" for one in standing
                  if one.rank == "own" or _beneath(chain, number, one.key, default[one.key]) != values[one.key]]
        yield f"{flags} became {', '.join(became)}{tail}" if became else f"{flags} changes nothing here{tail}", (
            report.has_line or (bool(said) and not report.meaning))
    for number, names in idle.items():
        layer = chain.layers[number]
        assert layer.file is not None
        yield f"{layer.file.name}: {_count(names)} that change nothing here: {', '.join(names)}", True


def _beneath(chain: Chain, number: int, key: str, default: Any) -> Any:
    """The value of a key in the layers beneath one, as text where it is given."""
    given = [settings[key].value for settings in chain.settings[:number] if key in settings]
    return given[-1] if given and not isinstance(given[-1], str) else default if not given else given[-1]


def _count(names: Sequence[str]) -> str:
    return "1 key" if len(names) == 1 else f"{len(names)} keys"


def _notes(config: Any, chain: Chain, settings: Mapping[str, Setting], file: Path | None,
           passed: Sequence[str], has_preset: bool) -> Iterator[str]:
    """What the presets set that stands and is not Shoal's own, and what was left out."""
    config_type = type(config)
    if passed and file:
        yield (f"{file} holds {_count(passed)} that only training reads, passed over: {', '.join(passed[:3])}"
               + (", ..." if len(passed) > 3 else ""))
    if file and not is_packaged(file) and not has_preset:
        yield from _left_out_notes(config, chain, settings, file)
    keys = keys_of(config_type)
    changed: dict[str, list[str]] = {}
    for layer, found in zip(chain.layers, chain.settings, strict=True):
        folder = layer.label.partition(" ")[0]
        if layer.is_users or folder not in ("task", *PACKAGED.values()):
            continue
        standing = [key for key, setting in found.items() if settings.get(key) is setting
                    and get_value(config, key) != keys[key].default]
        shown_ = [f"{key}={shown(get_value(config, key))}" + (
            "" if folder == "task" else f" (ours: {shown(keys[key].default) or 'empty'})") for key in standing]
        changed.setdefault(layer.label, []).extend(shown_)
    for label, texts in changed.items():
        folder, _, name = label.partition(" ")
        said = "brings its preset" if folder == "task" else "differs from Shoal's defaults in"
        if texts:
            yield f"{folder}={name} {said}: {', '.join(texts)}"


def _left_out_notes(config: Any, chain: Chain, settings: Mapping[str, Setting], file: Path) -> Iterator[str]:
    """That the preset of a task is not loaded beneath a user's file, if it would change something."""
    if "task.name" not in settings:
        return
    config_type = type(config)
    preset = packaged(command_of(config_type), config.task.name)
    below = _settle(config_type, _file_layers(config_type, preset, "", [])).merged() if preset else {}
    left = [key for key in below if key not in settings]
    if left:
        yield (f"{file.name} is not laid over the preset of task={config.task.name} ({left[0]} and {len(left) - 1} "
               f"more stay as they are): `defaults: [{config.task.name}, _self_]` in the file loads it")


# ---- back to text


def convert(config_type: type, values: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Any:
    """Plain nested values, with `own` by dotted key over them, as the frozen dataclass.

    Raises ShoalError naming the key, what came and what is allowed.
    """
    flat = {find_key(config_type, name).name: value for name, value in leaves_of(config_type, values)} | dict(own or {})
    keys = keys_of(config_type)
    return build(config_type, {name: convert_value(keys[name], value) for name, value in flat.items()})
