"""The layers of a configuration, lowest first, and their merge: the highest setting of a key
counts.

    defaults < preset < file < command line

    entries  ->  settings (other systems' names by the translator)  ->  one a key
             ->  values in their types

The preset of a task, recipe or algorithm lies directly beneath the layer that names it, the files
of `defaults` beneath their file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.config.arguments import Arguments, UnknownKey, find_key, names_of
from shoal.config.files import find_file, is_packaged, packaged, presets_of, read_files
from shoal.config.foreign import (
    COMMAND_LINE,
    PYTHON,
    STORED,
    Entry,
    Layer,
    Setting,
    Translation,
    translator,
)
from shoal.config.keys import command_of, keys_of, sections_of
from shoal.config.schema import Config
from shoal.config.values import convert_value, text_of
from shoal.text import did_you_mean
from shoal.types import ShoalError

PACKAGED: Mapping[str, str] = {"recipe": "recipe", "algorithm.name": "algorithm"}
"""Key that names a packaged preset -> the folder of these presets."""

PROMPT_KEYS = ("batch.prompts_per_step", "batch.prompts_per_device")
"""Two keys for one number: the first unsets the second of lower layers; on a command line the later
of them stands."""


# ---- from arguments to layers


def layers_of(
    config_type: type,
    arguments: Arguments,
    stored: Path | None = None,
    open_keys: Container[str] = (),
) -> tuple[list[Layer], Path | None]:
    """The user's layers, beneath each the presets that it names; and the preset or file that was
    loaded. `stored`: a run's configuration in place of presets and files, of which `open_keys` are
    not read."""
    layers, file = users_layers(config_type, arguments, stored)
    if stored:
        layers = [
            replace(
                layer, entries=[entry for entry in layer.entries if entry.name not in open_keys]
            )
            if layer.label == STORED
            else layer
            for layer in layers
        ]
    line = len(layers) - 1
    beneath: dict[int, list[Layer]] = {}
    by_line = (
        {} if file else merge(config_type, [layers[line]])[0].top
    )  # perhaps by another system's flag
    task = text_of(by_line["task.name"].value) if "task.name" in by_line else ""
    if preset := preset_of_task(command_of(config_type), task):
        file = preset
        beneath[line] = file_layers(config_type, preset, f"task {task}")
    for key in [key for key in PACKAGED if key in keys_of(config_type)]:
        named = [
            (number, text_of(entry.value), f"{entry.origin}: " if layer.file else "")
            for number, layer in enumerate(layers)
            for entry in layer.entries
            if names_of(config_type).get(entry.name) == key
        ]
        if named and named[-1][1]:
            place, name, where = named[-1]
            while (
                place > 0 and layers[place - 1].label == layers[place].label
            ):  # beneath a file's `defaults`, too
                place -= 1
            beneath.setdefault(place, []).extend(named_layers(config_type, key, name, where))
    return [
        one for number, layer in enumerate(layers) for one in (*beneath.get(number, ()), layer)
    ], file


def preset_of_task(command: str, name: str) -> Path | None:
    """The file of a task's preset: data from Python has that of data from files."""
    return packaged(command, "custom" if name == "rows" else name)


def users_layers(
    config_type: type, arguments: Arguments, stored: Path | None = None
) -> tuple[list[Layer], Path | None]:
    """The layers of `--preset`, of the file and of the command line; and the file."""
    command, name = command_of(config_type), arguments.config_name
    layers = [Layer(arguments.beneath, "run")] if arguments.beneath else []
    if command == "sft" and not stored:  # it is `shoal train` with these
        values = {"algorithm.name": "sft", "task.name": "custom"}
        layers.append(
            Layer([Entry(key, value, "shoal sft") for key, value in values.items()], "shoal sft")
        )
    file = stored or (find_file(command, name) if name else None)
    if arguments.preset and not stored and (file is None or not is_packaged(file)):
        below = find_file(command, arguments.preset)
        layers += file_layers(config_type, below, f"preset {below.stem}")
        file = file or below
    if file and not (layers and file == layers[-1].file):
        label = STORED if stored else f"preset {file.stem}" if is_packaged(file) else ""
        layers += file_layers(config_type, file, label)
    return [*layers, Layer(arguments.entries)], file


def named_layers(config_type: type, key: str, name: str, where: str = "") -> list[Layer]:
    """The layers of a packaged recipe or algorithm. `where`: a file's line before an error."""
    folder = PACKAGED[key]
    file, known = packaged(folder, name), presets_of(folder)
    if file is None:
        near = did_you_mean(name, known) or "."
        raise ShoalError(
            f"{where}{folder}={name}: there is no such {folder}{near} There are: {', '.join(known)}"
        )
    return file_layers(config_type, file, f"{folder} {name}")


def file_layers(config_type: type, file: Path, label: str) -> list[Layer]:
    """The layers of a file and of its `defaults`, without empty sections and, for a command other
    than training, without the keys that only training reads. Without `label` each setting's origin
    is its line."""
    found = []
    keys, sections = keys_of(config_type), sections_of(config_type) | sections_of(Config)
    for place, entries in read_files(command_of(config_type), file, lambda name: name in keys):
        raw = {entry.name: entry.value for entry in entries}
        kept, skipped = [], []
        for entry in entries:
            if entry.value is None and entry.name in sections:
                continue
            if names := _names_for_training(config_type, entry):
                skipped += names
                continue
            value = entry.value
            if is_interpolated(value) and entry.name not in names_of(
                config_type
            ):  # a key of ours: by final values
                with contextlib.suppress(ShoalError):  # refused later, if the flag has an effect
                    value = translator().interpolate(
                        entry.name, value, lambda name, raw=raw: raw[name]
                    )
            kept.append(Entry(entry.name, value, label or entry.origin))
        found.append(Layer(kept, label or str(file), place, not is_packaged(place), skipped))
    return found


def _names_for_training(config_type: type, entry: Entry) -> list[str]:
    """The keys of an entry that training reads and this command does not."""
    if issubclass(config_type, Config):
        return []

    def is_known(kind: type, name: str, value: Any) -> bool:
        return name in names_of(kind) or translator().find(kind, name, value) is not None

    name, value = entry.name, entry.value
    if isinstance(value, Mapping) and name in sections_of(
        Config
    ):  # `batch` is a key here, a section in training
        inside = [f"{name}.{part}" for part in value]
        return inside if all(is_known(Config, one, None) for one in inside) else []
    return (
        [name] if is_known(Config, name, value) and not is_known(config_type, name, value) else []
    )


def is_interpolated(value: Any) -> bool:
    """True for a text, or a list with one, that refers to other names."""
    return any(
        "${" in item
        for item in (value if isinstance(value, list) else [value])
        if isinstance(item, str)
    )


# ---- from layers to values


@dataclass
class Merged:
    """The settings of some layers, and those of them that are in effect."""

    config_type: type
    layers: Sequence[Layer]
    settings: Sequence[Setting]  # lowest first
    translation: Translation
    top: Mapping[str, Setting] = field(init=False)
    _values: dict[str, Any] = field(default_factory=dict)
    _pending: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = sorted(self.settings, key=lambda one: one.place)
        self.top = _in_effect(self.settings, line=len(self.layers) - 1)

    def get(self, key: str) -> Any:
        """The value of a key in its type; empty for one that the command has not."""
        keys = keys_of(self.config_type)
        if key not in self.top:
            return keys[key].default if key in keys else ""
        if key in self._pending:
            raise ShoalError(f"{self.top[key].origin}: {key} refers to itself")
        if key not in self._values:
            self._pending.append(key)
            try:
                self._values[key] = self.value_of(self.top[key])
            finally:
                self._pending.pop()
        return self._values[key]

    def value_of(self, one: Setting) -> Any:
        """A setting's value in its type; a file's with `${...}` replaced by final values of keys,
        or by other names of the file."""
        layer, value = self.layers[one.place[0]], one.value
        if layer.file and is_interpolated(value) and not one.flags:
            names, raw = (
                names_of(self.config_type),
                {entry.name: entry.value for entry in layer.entries},
            )
            value = translator().interpolate(
                one.name, value, lambda name: self.get(names[name]) if name in names else raw[name]
            )
        return convert_value(keys_of(self.config_type)[one.key], value)

    @property
    def origins(self) -> dict[str, str]:
        """Key -> `command line`, `--learning_rate`, `mine.yml:4`, `recipe trl`."""
        return {key: one.origin for key, one in self.top.items()}

    def values(self) -> tuple[dict[str, Any], list[str]]:
        """Key -> its value, of the keys that are set; and the errors of those that cannot be."""
        values, errors = {}, []
        for key in self.top:
            try:
                values[key] = self.get(key)
            except ShoalError as error:
                errors.append(with_origins(str(error), self.origins))
        return values, errors


def merge(config_type: type, layers: Sequence[Layer]) -> tuple[Merged, list[str]]:
    """The settings of layers, lowest first, and what is wrong with them. The rules of other
    systems' flags come last: a rule's settings stand at the places of its flags, so none replaces
    what lies above."""
    translation = translator().translate(config_type, layers)
    settings, errors, unknown = [*translation.settings], [*translation.errors], []
    for number, layer in enumerate(layers):
        for index, entry in enumerate(layer.entries):
            if (number, index) in translation.taken:
                continue
            try:
                key = find_key(config_type, entry.name).name
                settings.append(
                    Setting(key, entry.value, entry.origin, entry.name, (number, 1, index))
                )
            except ShoalError as error:
                where = f"{entry.origin}: " if layer.file else ""
                (unknown if isinstance(error, UnknownKey) else errors).append(f"{where}{error}")
    errors += [str(UnknownKey.of_all(unknown, config_type))] if unknown else []
    merged = Merged(config_type, layers, settings, translation)
    for rule in translation.rules:
        free = {
            one.key: one.origin
            for one in rule.claims
            if one.key not in merged.top or merged.top[one.key].place < one.place
        }
        try:
            if free:
                merged = Merged(
                    config_type, layers, [*merged.settings, *rule.apply(merged.get)], translation
                )
        except ShoalError as error:
            errors.append(with_origins(str(error), merged.origins | free))
    return merged, errors


def _in_effect(settings: Sequence[Setting], line: int) -> dict[str, Setting]:
    """Key -> its highest setting, in the order of places. `line`: the number of the command line's
    layer."""
    given = [
        one
        for one in settings
        if one.place[0] == line and one.key in PROMPT_KEYS and text_of(one.value) != "0"
    ]
    found: dict[str, Setting] = {}
    for one in settings:
        if (
            given
            and one.place[0] == line
            and one.key in PROMPT_KEYS
            and (one.key != given[-1].key and one.place < given[-1].place)
        ):
            continue
        other = found.get(PROMPT_KEYS[1])
        if one.key == PROMPT_KEYS[0] and other and other.place[0] < one.place[0]:
            del found[other.key]
        found.pop(one.key, None)
        found[one.key] = one
    return found


def check_names(merged: Merged) -> tuple[list[str], list[str]]:
    """Two names in one layer that give a key different values: notes of those on the command line,
    where the later stands, and errors of those in a file, which has no order, unless a higher layer
    sets the key, and of `steps` beside a flag that counts batches.

    PROMPT_KEYS count as one key. A file with most of the keys is a run's own and may have both:
    there `batch.prompts_per_step` followed from the other."""
    notes, errors = [], []
    claims = [one for rule in merged.translation.rules for one in rule.claims]
    made = {(one.flags, one.key) for one in claims}
    settings = sorted(
        [*claims, *(one for one in merged.settings if (one.flags, one.key) not in made)],
        key=lambda one: one.place,
    )
    for number, layer in enumerate(merged.layers):
        found: dict[str, Setting] = {}
        is_whole = 2 * len(layer.entries) > len(keys_of(merged.config_type))
        for one in (one for one in settings if one.place[:2] == (number, 1)):
            is_number = one.key in PROMPT_KEYS and not is_whole and text_of(one.value) != "0"
            key = PROMPT_KEYS[0] if is_number else one.key
            before = found.get(key)
            found[key] = one
            if before is None or not _are_two(before, one):
                continue
            what = "how many prompts a step has" if before.key != one.key else one.key
            if layer.file is None and not (one.key == "steps" and {before, one} & {*claims}):
                notes.append(
                    f"{before.name} and {one.name} both set {what}: the later one stands, "
                    f"{one.name}"
                )
            elif all(
                key not in merged.top or merged.top[key].place[0] <= number
                for key in (before.key, one.key)
            ):
                where = f"{layer.file}: " if layer.file else ""
                errors.append(
                    f"{where}{before.name} and {one.name} both set {what}; write one of them"
                )
    return notes, errors


def _are_two(before: Setting, one: Setting) -> bool:
    """True for two names that give a key different values."""
    is_same = (
        before.key == one.key
        and before.value is not None
        and text_of(before.value) == text_of(one.value)
    )
    return (
        not is_same and before.name != one.name and not (before.flags and before.flags is one.flags)
    )


# ---- origins


def origin_text(origin: str) -> str:
    """An origin as a user reads it: `set by the preset of task=custom` for `task custom`."""
    kind, _, name = origin.partition(" ")
    if kind == "task":
        return f"set by the preset of task={name}"
    return f"set by {kind}={name}" if kind in PACKAGED.values() else origin


def with_origins(message: str, origins: Mapping[str, str]) -> str:
    """A message with the origin of each key in it that was not typed under its own name."""
    mentioned = [
        f"{key}: {origin_text(origin)}"
        for key, origin in origins.items()
        if origin not in (COMMAND_LINE, PYTHON, STORED)
        and re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", message)
    ]
    return f"{message} ({', '.join(mentioned)})" if mentioned else message
