"""The layers of a configuration, lowest first: presets, files and the command line.

    defaults < preset < file < command line

The preset of a task, recipe or algorithm lies directly beneath the layer that names it, the files of `defaults`
beneath their file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.config.arguments import OPTIONS, Arguments, names_of, options_key
from shoal.config.files import find_file, is_packaged, packaged, presets_of, read_files
from shoal.config.foreign import Entry, Layer, translator
from shoal.config.keys import command_of, keys_of, sections_of
from shoal.config.merge import is_interpolated, merge
from shoal.config.schema import Config
from shoal.config.values import text_of
from shoal.text import did_you_mean
from shoal.types import ShoalError

PACKAGED: Mapping[str, str] = {"recipe": "recipe", "algorithm.name": "algorithm"}
"""Key that names a packaged preset -> the folder of these presets."""


def layers_of(config_type: type, arguments: Arguments, stored: Path | None = None) -> tuple[list[Layer], Path | None]:
    """The user's layers, beneath each the presets that it names; and the preset or file that was loaded. `stored`: a
    run's configuration in place of presets and files."""
    layers, file = users_layers(config_type, arguments, stored)
    line = len(layers) - 1
    beneath: dict[int, list[Layer]] = {}
    by_line = {} if file else merge(config_type, [layers[line]])[0].top  # perhaps by another system's flag
    task = text_of(by_line["task.name"].value) if "task.name" in by_line else ""
    if preset := preset_of_task(command_of(config_type), task):
        file = preset
        beneath[line] = file_layers(config_type, preset, f"task {task}")
    for key in [key for key in PACKAGED if key in keys_of(config_type)]:
        named = [(number, text_of(entry.value), f"{entry.origin}: " if layer.file else "")
                 for number, layer in enumerate(layers) for entry in layer.entries
                 if names_of(config_type).get(entry.name) == key]
        if named and named[-1][1]:
            place, name, where = named[-1]
            while place > 0 and layers[place - 1].label == layers[place].label:  # beneath a file's `defaults`, too
                place -= 1
            beneath.setdefault(place, []).extend(named_layers(config_type, key, name, where))
    return [one for number, layer in enumerate(layers) for one in (*beneath.get(number, ()), layer)], file


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
    return [*layers, Layer(_with_options(arguments.entries))], file


def named_layers(config_type: type, key: str, name: str, where: str = "") -> list[Layer]:
    """The layers of a packaged recipe or algorithm. `where`: a file's line before an error."""
    folder = PACKAGED[key]
    file, known = packaged(folder, name), presets_of(folder)
    if file is None:
        near = did_you_mean(name, known) or "."
        raise ShoalError(f"{where}{folder}={name}: there is no such {folder}{near} There are: {', '.join(known)}")
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
        found.append(Layer(_with_options(kept), label or str(file), place, not is_packaged(place), skipped))
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
        return entry.value  # a key of ours refers to final values
    try:
        return translator().interpolate(entry.name, entry.value, lambda name: raw[name])
    except ShoalError:
        return entry.value  # refused later, if the flag has an effect


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
