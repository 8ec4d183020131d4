"""The chain of layers: presets, files and the command line, lowest first, as settings by key; and their merge.

    presets and files (files.py), the command line (arguments.py)  ->  layers of entries
    ->  every name as a key, other systems' names by the translator  ->  merged  ->  late values computed
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.config.arguments import OPTIONS, Arguments, find_key, names_of, options_key
from shoal.config.files import find_file, interpolate, is_interpolated, is_packaged, packaged, presets_of, read_files
from shoal.config.keys import command_of, keys_of, sections_of
from shoal.config.schema import Config
from shoal.config.translator import COMMAND_LINE, PYTHON, Entry, Late, Report, Setting, translator
from shoal.config.values import convert_value, text_of
from shoal.text import did_you_mean
from shoal.types import ShoalError

PACKAGED: Mapping[str, str] = {"recipe": "recipe", "algorithm.name": "algorithm"}
"""Key that names a packaged preset -> the folder of these presets."""

PROMPT_KEYS = ("batch.prompts_per_step", "batch.prompts_per_device")
"""Two keys for one number: setting one unsets the other."""


LateValues = dict[Late, tuple[Mapping[str, Any], str]]
"""What late values were computed to: their keys, and the reason."""


@dataclass(frozen=True)
class Layer:
    """The entries of one file, or of the command line."""

    entries: Sequence[Entry]
    label: str = ""  # `preset gsm8k`, `recipe trl`, or the user's file
    file: Path | None = None  # None for the command line, where the later of two names wins
    skipped: Sequence[str] = ()  # keys in the file that only training reads

    @property
    def is_users(self) -> bool:
        """True for the command line and for the user's own files."""
        return self.file is None or not is_packaged(self.file)


@dataclass
class Chain:
    """Layers as settings by key, lowest first, with their reports and errors."""

    layers: Sequence[Layer]
    reports: Sequence[tuple[int, Report]]  # with the layer's number
    errors: list[str]
    settings: list[dict[str, Setting]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lowest: dict[str, Setting] = field(default_factory=dict)  # they yield to those of every layer
    # two names of one key in a file: an error unless a higher layer sets the key
    conflicts: list[tuple[Setting, str]] = field(default_factory=list)
    file: Path | None = None  # the preset or file that was loaded
    beneath: dict[Setting, Setting] = field(default_factory=dict)  # a late one -> that of a lower layer

    def merged(self) -> dict[str, Setting]:
        """Key -> the setting in effect."""
        found = dict(self.lowest)
        for settings in self.settings:
            if PROMPT_KEYS[0] in settings and PROMPT_KEYS[1] not in settings:
                found.pop(PROMPT_KEYS[1], None)
            self.beneath |= {one: found[key] for key, one in settings.items()
                             if isinstance(one.value, Late) and key in found}
            found |= settings
        return found

    def settled(self, one: Setting, late: LateValues) -> Setting:
        """The setting itself; beneath a late one that gave its key no value, the next lower that has one."""
        lower = self.beneath.get(one)
        if lower is None or one.value not in late or one.key in late[one.value][0]:
            return one
        return self.settled(lower, late)


# ---- layers


def build_chain(config_type: type, arguments: Arguments, stored: Path | None) -> Chain:
    """The user's layers, and beneath each the presets that it names."""
    layers, file = users_layers(config_type, arguments, stored)
    command, chain = command_of(config_type), make_chain(config_type, layers)
    line = len(layers) - 1
    beneath: dict[int, list[Layer]] = {}
    task = chain.settings[line].get("task.name") or chain.lowest.get("task.name")
    if file is None and task and (preset := preset_of_task(command, text_of(task.value))):
        file = preset
        beneath[line] = file_layers(config_type, preset, f"task {text_of(task.value)}")
    for key in [key for key in PACKAGED if key in keys_of(config_type)]:
        places = [number for number, found in enumerate(chain.settings) if key in found]
        if places and (name := text_of(chain.settings[places[-1]][key].value)):
            place = places[-1]
            while place > 0 and layers[place - 1].label == layers[place].label:  # beneath a file's `defaults`, too
                place -= 1
            beneath.setdefault(place, []).extend(named_layers(config_type, key, name))
    whole = [one for number, layer in enumerate(layers) for one in (*beneath.get(number, ()), layer)]
    return replace(make_chain(config_type, whole), file=file)


def preset_of_task(command: str, name: str) -> Path | None:
    """The file of a task's preset: data from Python has that of data from files."""
    return packaged(command, "custom" if name == "rows" else name)


def users_layers(config_type: type, arguments: Arguments, stored: Path | None = None) -> tuple[
        list[Layer], Path | None]:
    """The layers of `--preset`, of the file and of the command line; and the file."""
    command, name = command_of(config_type), arguments.config_name
    layers = [Layer(arguments.beneath, "run")] if arguments.beneath else []
    file = stored or (find_file(command, name) if name else None)
    if arguments.preset and not stored and (file is None or not is_packaged(file)):
        below = find_file(command, arguments.preset)
        layers += file_layers(config_type, below, f"preset {below.stem}")
        file = file or below
    if file and not (layers and file == layers[-1].file):
        layers += file_layers(config_type, file, f"preset {file.stem}" if is_packaged(file) else "")
    return [*layers, Layer(arguments.entries)], file


def named_layers(config_type: type, key: str, name: str) -> list[Layer]:
    """The layers of a packaged recipe or algorithm."""
    folder = PACKAGED[key]
    file, known = packaged(folder, name), presets_of(folder)
    if file is None:
        near = did_you_mean(name, known) or ";"
        raise ShoalError(f"{folder}={name}: there is no such {folder}{near} There are: {', '.join(known)}")
    return file_layers(config_type, file, f"{folder} {name}")


def file_layers(config_type: type, file: Path, label: str) -> list[Layer]:
    """The layers of a file and of its `defaults`, without empty sections and, for a command other than training,
    without the keys that only training reads. Without `label` each setting's origin is its line."""
    found = []
    keys = keys_of(config_type)
    for place, entries in read_files(command_of(config_type), file, lambda name: name in keys):
        raw = {entry.name: entry.value for entry in entries}
        kept, skipped = [], []
        for entry in entries:
            names = _names_for_training(config_type, entry)
            skipped += names
            if not names and not (entry.value is None and entry.name in _sections(config_type)):
                value = _foreign_value(config_type, entry, raw)
                kept.append(Entry(entry.name, value, label or entry.origin))
        found.append(Layer(kept, label or str(file), place, skipped))
    return found


def _sections(config_type: type) -> frozenset[str]:
    return sections_of(config_type) | sections_of(Config)


def _names_for_training(config_type: type, entry: Entry) -> list[str]:
    """The keys of an entry that training reads and this command does not."""
    name, value = entry.name, entry.value
    if issubclass(config_type, Config) or (value is None and name in _sections(config_type)):
        return []
    if isinstance(value, Mapping) and name in sections_of(Config):  # `batch` is a key here, a section in training
        inside = [f"{name}.{part}" for part in value]
        return inside if all(_is_known(Config, one, None) for one in inside) else []
    return [name] if _is_known(Config, name, value) and not _is_known(config_type, name, value) else []


def _is_known(config_type: type, name: str, value: Any) -> bool:
    return name in names_of(config_type) or translator().find(config_type, name, value) is not None


def _foreign_value(config_type: type, entry: Entry, raw: Mapping[str, Any]) -> Any:
    """An entry's value; under another system's name with `${...}` replaced by the file's own values."""
    if not is_interpolated(entry.value) or entry.name in names_of(config_type):
        return entry.value  # `${...}` under our names is computed late
    try:
        return interpolate(entry.name, entry.value, lambda name: raw[name])
    except ShoalError:
        return entry.value  # refused later, if the flag has an effect


# ---- settings


def make_chain(config_type: type, layers: Sequence[Layer]) -> Chain:
    """The chain of layers with every name as a key, other systems' names translated."""
    layers = [replace(layer, entries=_with_options(layer.entries)) for layer in layers]
    translation = translator().translate(config_type, [layer.entries for layer in layers])
    chain = Chain(layers, translation.reports, list(translation.errors), notes=list(translation.notes))
    for number, layer in enumerate(layers):
        found: dict[str, Setting] = {}
        weak: dict[str, Setting] = {}
        given: dict[str, str] = {}
        for place, entry in enumerate(layer.entries):
            settings, name = translation.settings.get((number, place)), entry.name
            if settings is None:
                settings = _own_setting(config_type, layer, entry, chain.errors)
                name = names_of(config_type).get(name, name)
            if layer.file is None and given.setdefault(name, text_of(entry.value)) != text_of(entry.value):
                given[name] = text_of(entry.value)
                chain.notes.append(f"{name} is given more than once: the last one stands, {given[name]}")
            for setting in settings:
                if setting.rank == "own":
                    _add(config_type, layer, found, setting, chain)
                else:
                    (weak if setting.rank == "weak" else chain.lowest)[setting.key] = setting
        chain.settings.append({**{key: one for key, one in weak.items() if key not in found}, **found})
    return chain


def _with_options(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with all `mesh.compiler_options.NAME=VALUE`, and a file's section of them, as one list; likewise for
    the other keys of OPTIONS."""
    named: dict[str, dict[str, Entry]] = {key: {} for key in OPTIONS}
    others = []
    for entry in entries:
        if key := options_key(entry.name):
            named[key][entry.name.removeprefix(f"{key}.")] = entry
        elif entry.name in OPTIONS and isinstance(entry.value, Mapping):
            named[entry.name] |= {name: replace(entry, value=value) for name, value in entry.value.items()}
        else:
            others.append(entry)
    return [*others, *(Entry(key, [f"{name}={text_of(entry.value)}" for name, entry in found.items()],
                             next(iter(found.values())).origin) for key, found in named.items() if found)]


def _own_setting(config_type: type, layer: Layer, entry: Entry, errors: list[str]) -> list[Setting]:
    """The setting of an entry under one of our names; none if there is no such key."""
    try:
        key = find_key(config_type, entry.name).name
    except ShoalError as error:
        errors.append(f"{entry.origin}: {error}" if layer.file else str(error))
        return []
    names, raw = names_of(config_type), {one.name: one.value for one in layer.entries}

    def compute(get: Callable[[str], Any]) -> tuple[Mapping[str, Any], str]:
        """The value with `${...}` replaced: by final values of keys, or by other names of the file."""
        value = interpolate(entry.name, entry.value, lambda name: get(names[name]) if name in names else raw[name])
        return {key: list(value) if isinstance(value, tuple) else value}, ""

    value = Late(compute) if layer.file and is_interpolated(entry.value) else entry.value
    return [Setting(key, value, entry.origin, entry.name)]


def _add(config_type: type, layer: Layer, found: dict[str, Setting], setting: Setting, chain: Chain) -> None:
    """Adds a setting to its layer's. Of two names for one key the later wins on a command line, with a note; a file
    has no order, so there they are an error."""
    ours = names_of(config_type)

    def conflicts(before: Setting) -> bool:
        return before.name != setting.name and not (before.group and before.group == setting.group)

    def note(before: Setting, what: str) -> None:
        if conflicts(before) and not {before.name, setting.name} <= ours.keys():
            chain.notes.append(f"{before.name} and {setting.name} both set {what}: the later one stands, "
                               f"{setting.name}")

    if setting.key in PROMPT_KEYS and layer.file is None and text_of(setting.value) != "0" and (
            other := found.get(PROMPT_KEYS[1 - PROMPT_KEYS.index(setting.key)])) and (
            not setting.group or other.group != setting.group):
        del found[other.key]
        note(other, "how many prompts a step has")
    before = found.pop(setting.key, None)
    found[setting.key] = setting
    if before is None or text_of(before.value) == text_of(setting.value):
        return
    if layer.file and conflicts(before):
        chain.conflicts.append((setting, f"{layer.file}: {before.name} and {setting.name} both set {setting.key}; "
                                "write one of them"))
    else:
        note(before, setting.key)


def values_of(config_type: type, chain: Chain, settings: Mapping[str, Setting]) -> tuple[dict[str, Any], LateValues]:
    """Key -> its value, converted, of a chain's merged settings; and the results of late values. Errors are appended to
    the chain's."""
    keys = keys_of(config_type)
    values: dict[str, Any] = {}
    late: LateValues = {}
    pending: list[str] = []

    def get(key: str) -> Any:
        if key in values or key not in settings:
            return values.get(key, keys[key].default) if key in keys else ""
        if key in pending:
            raise ShoalError(f"{settings[key].origin}: {key} refers to itself")
        pending.append(key)
        one = settings[key]
        while isinstance(one.value, Late) and one.value not in late:
            late[one.value] = one.value.compute(get)
            one = chain.settled(settings[key], late)
        value = late[one.value][0].get(key, keys[key].default) if isinstance(one.value, Late) else one.value
        values[key] = convert_value(keys[key], value)
        pending.pop()
        return values[key]

    for key in settings:
        try:
            get(key)
        except ShoalError as error:
            pending.clear()
            chain.errors.append(with_origins(str(error), origins_of(settings)))
    return values, late


# ---- origins


def origins_of(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Key -> `command line`, `--learning_rate`, `mine.yml:4`, `recipe trl`."""
    return {key: setting.origin for key, setting in settings.items()}


def with_origins(message: str, origins: Mapping[str, str]) -> str:
    """A message with the origin of each key in it that was not typed under its own name."""
    mentioned = [f"{key}: {origin}" for key, origin in origins.items() if origin not in (COMMAND_LINE, PYTHON)
                 and re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", message)]
    return f"{message} ({', '.join(mentioned)})" if mentioned else message
