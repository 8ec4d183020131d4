"""What a user gave, as layers of settings by key, lowest first; and what stands of them.

    presets and files (files.py), the command line (arguments.py)  ->  layers of entries
    -> every name a key, other systems' by the translator  ->  merged  ->  late values computed
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.arguments import Arguments, find_key, names_of
from shoal.config.files import find_file, interpolate, is_interpolated, is_packaged, packaged, presets_of, read_files
from shoal.config.keys import command_of, keys_of, sections_of
from shoal.config.schema import Config
from shoal.config.translator import COMMAND_LINE, PYTHON, Entry, Late, Report, Setting, translator
from shoal.config.values import convert_value, text_of
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


# ---- layers


def build_chain(config_type: type, arguments: Arguments, stored: Path | None) -> tuple[Chain, Path | None, list[str]]:
    """Every layer: the user's own, and beneath each the presets that it names."""
    layers, file, passed = users_layers(config_type, arguments, stored)
    command, chain = command_of(config_type), settle(config_type, layers)
    line = len(layers) - 1
    beneath: dict[int, list[Layer]] = {}
    task = chain.settings[line].get("task.name") or chain.lowest.get("task.name")
    if file is None and task and (preset := packaged(command, text_of(task.value))):
        file = preset
        beneath[line] = file_layers(config_type, preset, f"task {preset.stem}", [])
    for key in [key for key in PACKAGED if key in keys_of(config_type)]:
        places = [number for number, found in enumerate(chain.settings) if key in found]
        if places and (name := text_of(chain.settings[places[-1]][key].value)):
            start = places[-1] if layers[places[-1]].is_ordered else _first_of_unit(layers, places[-1])
            beneath.setdefault(start, []).extend(named_layers(config_type, key, name))
    whole = [one for number, layer in enumerate(layers) for one in (*beneath.get(number, ()), layer)]
    return settle(config_type, whole), file, passed


def _first_of_unit(layers: Sequence[Layer], number: int) -> int:
    """The lowest layer of those that a file and its `defaults` make."""
    while number > 0 and layers[number - 1].label == layers[number].label:
        number -= 1
    return number


def users_layers(config_type: type, arguments: Arguments, stored: Path | None) -> tuple[
        list[Layer], Path | None, list[str]]:
    """The layers of the preset beneath, of the file, and of the command line; the file; keys that were passed over."""
    command, passed, layers = command_of(config_type), [], []
    name = arguments.config_name
    file = stored or (find_file(command, name) if name else None)
    if arguments.preset and not stored and (file is None or not is_packaged(file)):
        below = find_file(command, arguments.preset)
        layers += file_layers(config_type, below, f"preset {below.stem}", passed)
        file = file or below
    if file and (not layers or file != layers[-1].file):
        layers += file_layers(config_type, file, f"preset {file.stem}" if is_packaged(file) else "", passed)
    return [*layers, Layer(arguments.entries)], file, passed


def named_layers(config_type: type, key: str, name: str) -> list[Layer]:
    """The layers of a packaged recipe or algorithm."""
    folder = PACKAGED[key]
    if not name:
        return []
    file, known = packaged(folder, name), presets_of(folder)
    if file is None:
        near = f", did you mean {nearest(name, known)}?" if known else ";"
        raise ShoalError(f"{folder}={name}: there is no such {folder}{near} There are: {', '.join(known) or 'none'}")
    return file_layers(config_type, file, f"{folder} {name}", [])


def file_layers(config_type: type, file: Path, label: str, passed: list[str]) -> list[Layer]:
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


def settle(config_type: type, layers: Sequence[Layer]) -> Chain:
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


def values_of(config_type: type, settings: Mapping[str, Setting], errors: list[str]) -> tuple[
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
            raise ShoalError(f"{origin_of(config_type, settings[key])}: {key} refers to itself")
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
            origins = {one: origin_of(config_type, setting) for one, setting in settings.items()}
            errors.append(with_origins(str(error), origins))
    return values, late


# ---- origins


def origin_of(config_type: type, setting: Setting) -> str:
    """`command line`, `--learning_rate`, `mine.yml:4`, `recipe trl`."""
    is_ours = setting.name in names_of(config_type)
    return f"{setting.origin} {setting.name}" if setting.origin == PYTHON and not is_ours else setting.origin


def with_origins(message: str, origins: Mapping[str, str]) -> str:
    """A message with the origin of each key in it that was not typed under its own name."""
    mentioned = [f"{key}: {origin}" for key, origin in origins.items() if origin not in (COMMAND_LINE, PYTHON)
                 and re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", message)]
    return f"{message} ({', '.join(mentioned)})" if mentioned else message
