"""Composes a configuration from layers of settings. A layer is one source of settings (a preset, a
file, the command line); a setting is a name with its value. For each key the setting of the highest
layer counts.

    defaults < preset < file < command line

    arguments  ->  layers as typed
               ->  layers that name only Shoal's keys  (`foreign` replaces other systems' flags)
               ->  one setting for each key            (`Merged`)
               ->  values in their types  ->  Config

The preset of a task or an algorithm is the layer directly beneath the layer that names it; the
files that a file lists under `defaults` are layers beneath that file. A recipe is a set of
defaults, so it lies beneath the user's file wherever it is named."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.config.arguments import (
    COMMAND_LINE,
    NO_VALUE,
    PYTHON,
    STORED,
    Arguments,
    Layer,
    Setting,
    read_arguments,
)
from shoal.config.commands import command_of, dataclass_of
from shoal.config.foreign import (
    FEW,
    MANY,
    FlagLine,
    IdleKeys,
    Translation,
    data_read_once,
    front_end,
)
from shoal.config.key import (
    build,
    convert_value,
    get_value,
    keys_of,
    overridden_keys,
    sections_of,
    shown,
    text_of,
)
from shoal.config.keywords import read_keywords
from shoal.config.names import UnknownKey, find_key, names_of
from shoal.config.preset_files import find_file, is_packaged, packaged, presets_of
from shoal.config.recipe_files import ABOUT, Recipe, read_recipe
from shoal.config.stored import to_yaml
from shoal.config.train import Config
from shoal.config.yaml_files import interpolate, read_files
from shoal.records import ShoalError
from shoal.text import count, did_you_mean

PACKAGED: Mapping[str, str] = {"recipe": "recipe", "algorithm.name": "algorithm"}
"""Key that names a packaged preset -> the folder of these presets."""


PROMPT_KEYS = ("batch.prompts_per_step", "batch.prompts_per_device")
"""Two keys that set the same quantity, the prompts of a step. In a higher layer the first unsets
the second; on one command line the later of the two counts."""


# ---- from arguments to layers


def layers_of(
    config_type: type,
    arguments: Arguments,
    stored: Path | None = None,
    beneath: Layer | None = None,
) -> tuple[list[Layer], Path | None]:
    """Returns all layers of a command, lowest first, as typed (flags of other systems are not
    replaced yet), and the path of the preset or file that was loaded (None if none was). Beneath
    each layer of the user are the presets that it names, but a recipe that the command line names
    is beneath the user's file; a task's preset is loaded only if no preset or file is named.
    ShoalError if there is no such preset or file. `stored`: the file of a run's configuration, read
    in place of presets and files (recipes and algorithms that it names are still read); `beneath`:
    a layer beneath everything that the user gave."""
    layers, file = users_layers(config_type, arguments, stored, beneath)
    line = len(layers) - 1  # index of the command line's layer
    presets: dict[int, list[Layer]] = {}  # index of a layer -> the presets directly beneath it
    task = ""
    if not file:
        # The line is merged because a flag of another system may name the task.
        of_line = merge_typed(config_type, [layers[line]])
        if "task.name" in of_line.in_effect:
            task = text_of(of_line.setting_of("task.name").value)
    preset = preset_of_task(command_of(config_type), task)
    if preset:
        file = preset
        presets[line] = file_layers(config_type, preset, f"task {task}")
    names = names_of(config_type)
    for key in PACKAGED:
        if key not in keys_of(config_type):
            continue
        # Of the highest setting of the key: the index of its layer, its value, and the prefix of an
        # error about it.
        highest_layer, preset_name, where = 0, "", ""
        for layer_index, layer in enumerate(layers):
            for setting in layer.settings:
                if names.get(setting.name) == key:
                    highest_layer = layer_index
                    preset_name = text_of(setting.value)
                    where = f"{setting.origin}: " if layer.file else ""
        if not preset_name:
            continue
        lowest = highest_layer
        if key == "recipe" and highest_layer == line and file and not is_packaged(file):
            lowest = line - 1  # the layer of the user's file, which wins over a recipe
        # Files in the `defaults` of a file have the same label; the preset goes beneath them all.
        while lowest > 0 and layers[lowest - 1].label == layers[lowest].label:
            lowest -= 1
        presets.setdefault(lowest, []).extend(named_layers(config_type, key, preset_name, where))
    ordered: list[Layer] = []
    for layer_index, layer in enumerate(layers):
        ordered += presets.get(layer_index, [])
        ordered.append(layer)
    return ordered, file


def preset_of_task(command: str, name: str) -> Path | None:
    """Returns the file of a task's preset for a command, None if there is none. `name`: the task's
    name; '' has no preset. Rows given from Python (task `rows`) use the preset of task `custom`."""
    return packaged(command, "custom" if name == "rows" else name)


def users_layers(
    config_type: type,
    arguments: Arguments,
    stored: Path | None = None,
    beneath: Layer | None = None,
) -> tuple[list[Layer], Path | None]:
    """Returns the layers of `--preset`, of the file and of the command line, lowest first, and the
    path of the file (without a file, of the preset; None without both). The last layer is always
    the command line; the first are `beneath`, if it is given, and the two settings that make `shoal
    sft` of `shoal train`. Other presets that these layers name are not included; `layers_of` adds
    them.

    `stored`: the file of a run's configuration; with it, `--preset` and the file that the arguments
    name are not read. `--preset` is ignored also if the file itself is a packaged preset.
    ShoalError if there is no such preset or file."""
    command = command_of(config_type)
    layers = []
    if beneath:
        layers.append(beneath)
    if command == "sft" and not stored:  # `shoal sft` is `shoal train` with these two settings
        settings = [
            Setting("algorithm.name", "sft", "shoal sft"),
            Setting("task.name", "custom", "shoal sft"),
        ]
        layers.append(Layer(settings, "shoal sft"))
    file = stored
    if not file and arguments.config_name:
        file = find_file(command, arguments.config_name)
    if arguments.preset and not stored and (file is None or not is_packaged(file)):
        preset = find_file(command, arguments.preset)
        layers += file_layers(config_type, preset, f"preset {preset.stem}")
        file = file or preset
    is_loaded = bool(layers) and file == layers[-1].file  # by `--preset`
    if file and not is_loaded:
        label = ""
        if stored:
            label = STORED
        elif is_packaged(file):
            label = f"preset {file.stem}"
        layers += file_layers(config_type, file, label, arguments.settings)
    return [*layers, Layer(_without_references(config_type, arguments.settings, layers))], file


def _without_references(
    config_type: type, settings: Sequence[Setting], lower: Sequence[Layer]
) -> list[Setting]:
    """Returns the settings of a command line with `${name}` replaced, as Hydra does it, in the
    values of other systems' flags that set a key: by the value of that name on the line, else in
    the layers `lower`. Values of Shoal's own keys stay as they are typed. ShoalError for a name
    that none of them sets, and for one that refers to itself."""
    values: dict[str, Any] = {}
    for layer in lower:
        values.update((setting.name, setting.value) for setting in layer.settings)
    values.update((setting.name, setting.value) for setting in settings)
    names = names_of(config_type)
    replaced = []
    for setting in settings:
        value = setting.value
        if is_interpolated(value) and setting.name not in names:
            flag = front_end().find_flag(config_type, setting.name, value, list(values))
            if flag and flag.keys:
                value = _resolved(setting.name, values)
        replaced.append(replace(setting, value=value))
    return replaced


def _resolved(name: str, values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Any:
    """Returns the value of a name with its references replaced, and those of the values that it
    refers to. `values`: the value of each name, as written; `above`: the names that led here.
    ShoalError for a name that has no value, and for one that refers to itself."""
    value = values[name]
    if not is_interpolated(value):
        return value
    if name in above:
        raise ShoalError(f"{name}={text_of(value)} refers to itself")
    return interpolate(name, value, lambda other: _resolved(other, values, (*above, name)))


def named_layers(config_type: type, key: str, name: str, where: str = "") -> list[Layer]:
    """Returns the layers of the packaged preset of a recipe or an algorithm, lowest first. `key`:
    `recipe` or `algorithm.name`; `name`: its value; `where`: prefix of an error, the line of the
    file that names the preset. Raises ShoalError if there is no such preset."""
    folder = PACKAGED[key]
    file = packaged(folder, name)
    if file is None:
        known = presets_of(folder)
        near = did_you_mean(name, known) or "."
        raise ShoalError(
            f"{where}{folder}={name}: there is no such {folder}{near} There are: {', '.join(known)}"
        )
    return file_layers(config_type, file, f"{folder} {name}")


def file_layers(
    config_type: type, file: Path, label: str, line: Sequence[Setting] = ()
) -> list[Layer]:
    """Reads a YAML file and the files in its `defaults` into layers, lowest first. Layers of
    packaged presets have `is_users` False. Leaves out empty sections and, for other commands than
    training, the keys that only training reads; these are listed in `Layer.skipped`. `label`: the
    label of all layers and the origin of all settings, like `recipe trl`. If it is empty, the
    layers have the path of `file` as label, and the origin of each setting is its file and line.
    `line`: the settings of the command line, whose values the files' references get as well.
    Raises ShoalError if a file is missing or cannot be read."""
    layers = []
    keys = {ABOUT, *keys_of(config_type)}
    sections = sections_of(config_type) | sections_of(Config)
    files = read_files(command_of(config_type), file, keys.__contains__)
    values: dict[str, Any] = {}  # of each name the highest
    for _, settings in files:
        values.update((setting.name, setting.value) for setting in settings)
    values.update((setting.name, setting.value) for setting in line)
    for path, settings in files:
        kept = []
        skipped = []
        about = None
        for setting in settings:
            if setting.name == ABOUT:
                about = setting.value
                continue
            if setting.value is None and setting.name in sections:
                continue
            for_training = _names_for_training(config_type, setting)
            if for_training:
                skipped += for_training
                continue
            value = setting.value
            # References are replaced here only in other systems' flags; in values of Shoal's keys
            # `Merged.get` replaces them.
            if is_interpolated(value) and setting.name not in names_of(config_type):
                with contextlib.suppress(ShoalError):  # refused later, if the flag has an effect
                    value = _resolved(setting.name, {**values, setting.name: value})
            kept.append(Setting(setting.name, value, label or setting.origin))
        is_users = not is_packaged(path)
        layers.append(Layer(kept, label or str(file), path, is_users, skipped, about))
    return layers


def _names_for_training(config_type: type, setting: Setting) -> list[str]:
    """Returns the keys in a setting that training knows and this command does not: its name, or the
    dotted keys inside of its value if that is a mapping and training knows all of them. Empty if
    this command knows the name too, or if training does not know it, or if this command is a form
    of training."""
    if issubclass(config_type, Config):
        return []

    def is_known(config_type: type, name: str, value: Any) -> bool:
        """True if a name is a key of a command, or a flag of another system that the command
        accepts."""
        if name in names_of(config_type):
            return True
        return front_end().find_flag(config_type, name, value) is not None

    name = setting.name
    value = setting.value
    # One name can be a key of this command and a section of training, like `batch`.
    if isinstance(value, Mapping) and name in sections_of(Config):
        inside = [f"{name}.{part}" for part in value]
        if all(is_known(Config, inside_name, None) for inside_name in inside):
            return inside
        return []
    if is_known(Config, name, value) and not is_known(config_type, name, value):
        return [name]
    return []


def is_interpolated(value: Any) -> bool:
    """True if a value is a text, or a list with a text, that contains `${`, a reference to another
    name. An escaped `\\${` counts too."""
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, str) and "${" in item for item in items)


# ---- from layers to values


class Merged:
    """The settings of some layers (lowest first), and for each key which of them is in effect.
    Computes the values of keys. Flags of other systems must have been replaced in the layers.
    Unknown names do not raise: their errors are collected in `errors`."""

    def __init__(self, config_type: type, layers: Sequence[Layer]) -> None:
        """Merges the layers. `config_type`: the configuration class of a command; the last layer is
        the command line."""
        self.config_type = config_type
        self.layers = layers  # without flags of other systems
        # (index of the setting's layer, setting), lowest first.
        self.settings: list[tuple[int, Setting]] = []
        self.errors: list[str] = []
        self._add_settings()
        # Each key that is set -> the index in `settings` of the one in effect; indices ascend.
        self.in_effect = _find_in_effect(self.settings, line=len(layers) - 1)
        self._values: dict[str, Any] = {}
        self._pending: list[str] = []  # keys whose values are being computed, to find circles

    def _add_settings(self) -> None:
        """Fills `settings` with the settings of all layers, each with the key that its name stands
        for. Leaves out names that are no key, and adds to `errors` one message for all unknown
        names and one for each other name, like a section's."""
        unknown = []
        for layer_index, layer in enumerate(self.layers):
            for setting in layer.settings:
                if setting.key:  # the setting replaces a flag, and its name is the flag's
                    self.settings.append((layer_index, setting))
                    continue
                where = f"{setting.origin}: " if layer.file else ""
                try:
                    key = find_key(self.config_type, setting.name)
                except UnknownKey as error:
                    unknown.append(f"{where}{error}")
                except ShoalError as error:
                    self.errors.append(f"{where}{error}")
                else:
                    self.settings.append((layer_index, replace(setting, key=key.name)))
        if unknown:
            self.errors.append(str(UnknownKey.of_all(unknown, self.config_type)))

    def setting_of(self, key: str) -> Setting:
        """Returns the setting in effect for a key; KeyError if no layer sets the key."""
        _, setting = self.settings[self.in_effect[key]]
        return setting

    def layer_index(self, key: str) -> int:
        """Returns the index in `layers` of the layer whose setting for a key is in effect; KeyError
        if no layer sets the key."""
        layer_index, _ = self.settings[self.in_effect[key]]
        return layer_index

    def get(self, key: str) -> Any:
        """Returns the final value of a key in its type: the default if no layer sets it, '' if the
        command has no such key. Raises ShoalError if the value is invalid or refers to itself."""
        keys = keys_of(self.config_type)
        if key not in self.in_effect:
            return keys[key].default if key in keys else ""
        if key in self._pending:
            raise ShoalError(f"{self.setting_of(key).origin}: {key} refers to itself")
        if key not in self._values:
            self._pending.append(key)
            try:
                self._values[key] = self._convert(key)
            finally:
                self._pending.pop()
        return self._values[key]

    def _convert(self, key: str) -> Any:
        """Computes the value of a key that is set, in the key's type. In a value from a file, each
        `${name}` is replaced by the final value of the key with this name, or, if it is no key, by
        the value of that name in the file. Raises ShoalError if the value does not fit or a
        reference has no value."""
        setting = self.setting_of(key)
        layer = self.layers[self.layer_index(key)]
        value = setting.value
        # The texts of flags had their references replaced when the file was read (`file_layers`).
        if layer.file and is_interpolated(value) and not setting.flags:
            names = names_of(self.config_type)
            typed = {other.name: other.value for other in layer.typed}

            def value_of_name(name: str) -> Any:
                if name in names:
                    return self.get(names[name])
                return typed[name]  # `interpolate` makes a ShoalError of a KeyError

            value = interpolate(setting.name, value, value_of_name)
        return convert_value(keys_of(self.config_type)[key], value)

    @property
    def origins(self) -> dict[str, str]:
        """Returns for each key that is set where its value comes from: `command line`,
        `--learning_rate`, `mine.yml:4`, `recipe trl`."""
        return {key: self.setting_of(key).origin for key in self.in_effect}

    def values_and_errors(self) -> tuple[dict[str, Any], list[str]]:
        """Returns (values, errors): the final values, by dotted key, of the keys that are set and
        have a valid value, and an error message for each key that is set and has none. Keys that no
        layer sets are left out. Does not raise for an invalid value."""
        values = {}
        errors = []
        for key in self.in_effect:
            try:
                values[key] = self.get(key)
            except ShoalError as error:
                errors.append(with_origins(str(error), self.origins))
        return values, errors


def merge_typed(config_type: type, layers: Sequence[Layer]) -> Merged:
    """Merges layers as they were typed (lowest first; the last counts as the command line):
    replaces flags of other systems, then makes a Merged. Errors about the flags are dropped; those
    about unknown names are in `errors` of the result."""
    return Merged(config_type, front_end().translate(config_type, layers).layers)


def _find_in_effect(settings: Sequence[tuple[int, Setting]], line: int) -> dict[str, int]:
    """Returns for each key that has a value the index in `settings` of the setting in effect: the
    last one with a value; indices ascend. `settings`: (index of the layer, setting), lowest first.
    `line`: the index of the command line's layer.

    The two PROMPT_KEYS compete. On the command line the later one that is not 0 counts, and the
    other before it has no effect. In a higher layer batch.prompts_per_step unsets
    batch.prompts_per_device."""
    # The last of PROMPT_KEYS on the command line that is not 0, and its index in `settings`.
    last_prompts: Setting | None = None
    last_index = 0
    for index, (layer_index, setting) in enumerate(settings):
        if layer_index != line or setting.key not in PROMPT_KEYS or setting.value is NO_VALUE:
            continue
        if text_of(setting.value) != "0":
            last_prompts = setting
            last_index = index
    in_effect: dict[str, int] = {}
    for index, (layer_index, setting) in enumerate(settings):
        if setting.value is NO_VALUE:
            continue
        if last_prompts and layer_index == line and setting.key in PROMPT_KEYS:
            if setting.key != last_prompts.key and index < last_index:
                continue
        # The prompts of a step in a higher layer unset those of a device in a lower one.
        if setting.key == "batch.prompts_per_step" and "batch.prompts_per_device" in in_effect:
            layer_of_other, _ = settings[in_effect["batch.prompts_per_device"]]
            if layer_of_other < layer_index:
                del in_effect["batch.prompts_per_device"]
        # Removed and added again, so that the dict stays ordered by index.
        in_effect.pop(setting.key, None)
        in_effect[setting.key] = index
    return in_effect


def check_names(merged: Merged) -> tuple[list[str], list[str]]:
    """Looks for two names in one layer that give one key different values, like `lr=1` and
    `optimizer.lr=2`. Returns (notes, errors): a note for two names on the command line, where the
    later one counts; an error for two names in a file, which has no order, unless a higher layer
    sets the key (or, of two keys, one of them). Settings that yield, and those that set nothing,
    are not compared. It is an error also on the command line if one of the two is `steps` and the
    other a flag that counts batches.

    PROMPT_KEYS count as one key. A file that sets more than half of all keys is a stored run's
    configuration and may have both, because the run then computed `batch.prompts_per_step` from the
    other key."""
    notes = []
    errors = []
    for layer_index, layer in enumerate(merged.layers):
        latest: dict[str, Setting] = {}  # key -> its last setting so far in this layer
        is_stored_run = 2 * len(layer.typed) > len(keys_of(merged.config_type))
        for layer_of_setting, setting in merged.settings:
            if layer_of_setting != layer_index or setting.yields or setting.value is NO_VALUE:
                continue
            key = setting.key
            # A typed 0 leaves its own key open, so it does not contradict the other of PROMPT_KEYS.
            is_unset = not setting.of_rule and text_of(setting.value) == "0"
            if key in PROMPT_KEYS and not is_stored_run and not is_unset:
                key = PROMPT_KEYS[0]  # so that the two are compared
            before = latest.get(key)
            latest[key] = setting
            if before is None or not _differ(before, setting):
                continue
            what = setting.key if before.key == setting.key else "how many prompts a step has"
            counts_batches = setting.key == "steps" and (before.of_rule or setting.of_rule)
            if layer.file is None and not counts_batches:  # the command line
                notes.append(
                    f"{before.name} and {setting.name} both set {what}: the later one counts, "
                    f"{setting.name}"
                )
                continue
            if not _are_set_above(merged, (before.key, setting.key), layer_index):
                where = f"{layer.file}: " if layer.file else ""
                errors.append(
                    f"{where}{before.name} and {setting.name} both set {what}; write one of them"
                )
    return notes, errors


def _are_set_above(merged: Merged, keys: Iterable[str], layer_index: int) -> bool:
    """True if a higher layer than that of `layer_index` sets one of these keys."""
    for key in keys:
        if key in merged.in_effect and merged.layer_index(key) > layer_index:
            return True
    return False


def _differ(before: Setting, setting: Setting) -> bool:
    """True if two settings have different names and give one key different values. A value that a
    rule computed counts as different, because it also depends on other keys; so do a value of None
    and values of two keys. False if the same flags of another system became both settings.
    `before`: the earlier of the two."""
    if before.name == setting.name:
        return False
    if before.flags and before.flags == setting.flags:
        return False
    can_be_compared = before.key == setting.key and not before.of_rule and before.value is not None
    if not can_be_compared:
        return True
    return setting.of_rule or text_of(before.value) != text_of(setting.value)


# ---- origins


def origin_text(origin: str) -> str:
    """Returns an origin as a user reads it: `set by the preset of task=custom` for `task custom`,
    `set by recipe=trl` for `recipe trl`, `the argument max_steps` for `Python max_steps`. Other
    origins are returned unchanged."""
    kind, _, name = origin.partition(" ")
    if kind == PYTHON and name:
        return f"the argument {name}"
    if kind == "task":
        return f"set by the preset of task={name}"
    if kind in PACKAGED.values():
        return f"set by {kind}={name}"
    return origin


def with_origins(message: str, origins: Mapping[str, str]) -> str:
    """Returns a message with, in parentheses at its end, the origin of each key that it mentions;
    unchanged if there is none. Keys that were typed under their own names are left out. `origins`:
    key -> origin, like `Merged.origins`."""
    mentioned = []
    for key, origin in origins.items():
        if origin in (COMMAND_LINE, PYTHON, STORED):
            continue
        # The whole dotted name, not a part of a longer one; a full stop may follow it. A name
        # without a dot may be any word, like `steps`: it is the key if `=` follows.
        end = r"(?![\w-]|\.\w)" if "." in key else "="
        if re.search(rf"(?<![\w.-]){re.escape(key)}{end}", message):
            mentioned.append(f"{key}: {origin_text(origin)}")
    if not mentioned:
        return message
    return f"{message} ({', '.join(mentioned)})"


@dataclass(frozen=True)
class Resolved:
    """A configuration together with where each of its values came from."""

    config: Any
    config_name: str  # name, without ending, of the preset or file that was loaded; '' if none
    notes: tuple[str, ...]  # lines to print at the start: values set by presets, skipped keys
    arguments: Arguments
    became: tuple[str, ...] = ()  # for each given flag of another system, a line on what it became
    flag_lines: tuple[str, ...] = ()  # the same for the start of a run, in a few lines
    # key -> `command line`, `mine.yml:4`, `recipe trl`
    origins: Mapping[str, str] = field(default_factory=dict)
    recipe: Recipe | None = None  # of the loaded file, or of the highest file in its `defaults`

    @property
    def start_lines(self) -> list[str]:
        """Returns the lines to print at the start of a run: the notes, then what flags of other
        systems became."""
        return [*self.notes, *self.flag_lines]

    @property
    def text(self) -> str:
        """Returns every key with its value as YAML that loads as the same configuration."""
        return to_yaml(self.config)


# ---- entry points


def compose(command: str | type, argv: Sequence[str] = ()) -> tuple[Any, Resolved]:
    """Composes a command's configuration from its command line (the arguments after the command's
    name). Returns (configuration, Resolved); raises ShoalError for a mistake of the user.
    `command`: the name, or the command's configuration class.

    >>> config, resolved = compose("train", ["task=gsm8k", "optimizer.lr=1e-5"])

    If no preset or file is named, the preset of the task is the layer beneath the command line."""
    config_type = dataclass_of(command)
    return load(config_type, read_arguments(config_type, argv))


def from_overrides(
    config_type: type,
    stored: Path | None = None,
    /,
    **overrides: Any,
) -> tuple[Any, Resolved, tuple[Callable[..., Any], ...]]:
    """Composes a configuration from keywords in Python. Returns (configuration, Resolved, reward
    functions that were given as callables). Raises ShoalError for a mistake of the user.

    >>> from_overrides(
    ...     Config, model="tiny", optimizer={"lr": 1e-5}, batch__group_size=4, reward=my_reward
    ... )

    Keys may be nested dicts, names joined by `__` or by dots, or short forms; `config_name` names a
    preset or a file. `stored`: the file of a run's configuration, used in place of presets and
    files; it replaces `config_name`."""
    arguments, functions = read_keywords(config_type, overrides)
    if stored:
        arguments = replace(arguments, config_name="")
    config, resolved = load(config_type, arguments, stored)
    return config, resolved, functions


@data_read_once()
def load(
    config_type: type,
    arguments: Arguments,
    stored: Path | None = None,
    beneath: Layer | None = None,
) -> tuple[Any, Resolved]:
    """Composes the configuration of parsed arguments; returns (configuration, Resolved). Raises one
    ShoalError with all mistakes in names and values; ranges are checked only if there are none, and
    of values out of range the first is named. `stored`: the file of a run's configuration, used in
    place of presets and files; `beneath`: a layer beneath everything that the user gave.

    >>> config, resolved = load(Config, resolved.arguments, run / "config.yaml")
    """
    layers, file = layers_of(config_type, arguments, stored and stored.absolute(), beneath)
    config, merged, translation, notes_on_names = _build(config_type, layers)
    notes = list(_notes(config, merged, file, bool(arguments.preset)))
    notes += translation.notes
    notes += notes_on_names
    resolved = Resolved(
        config=config,
        config_name=file.stem if file else "",
        notes=tuple(notes),
        arguments=arguments,
        became=tuple(line.text for line in translation.became),
        flag_lines=tuple(_flag_lines(translation.became)),
        origins=merged.origins,
        recipe=_recipe_of(config_type, layers),
    )
    return config, resolved


def _flag_lines(became: Sequence[FlagLine | IdleKeys]) -> list[str]:
    """Returns the lines about flags of other systems at the start of a run: one for each flag that
    acts in a way to explain, then one for all that change nothing, then one for all that only set
    keys. A flag that alone changes nothing keeps its reason; of more than MANY flags that set keys
    only their number is left. `became`: a line for each flag."""
    lines = []
    idle = []
    setting_keys = []
    for line in became:
        if isinstance(line, IdleKeys):
            lines.append(line.brief)
        elif line.at_start and line.is_idle:
            idle.append(line)
        elif line.at_start:
            lines.append(line.text)
        elif line.sets_keys_alone:
            setting_keys.append(line)
    if len(idle) == 1:
        lines.append(idle[0].text)
    elif idle:
        flags = [flag for line in idle for flag in line.flags]
        lines.append(f"change nothing here ({_pages(idle)} say why): {', '.join(flags)}")
    if len(setting_keys) > MANY:
        number = sum(len(line.flags) for line in setting_keys)
        lines.append(f"{number} others set keys ({_pages(setting_keys)} say which)")
    elif setting_keys:
        lines.append(f"set keys: {'; '.join(line.short for line in setting_keys)}")
    return lines


def _pages(lines: Sequence[FlagLine]) -> str:
    """Returns the places that explain the flags of these lines.

    >>> _pages(lines)
    '--dry-run and docs/flags-verl.md'
    """
    systems = dict.fromkeys(line.system for line in lines)
    return " and ".join(["--dry-run", *(f"docs/flags-{name.lower()}.md" for name in systems)])


def _build(
    config_type: type, layers: Sequence[Layer]
) -> tuple[Any, Merged, Translation, list[str]]:
    """Returns the configuration of some layers, lowest first, as (configuration, merge,
    translation of flags, notes on names). Raises one ShoalError with all mistakes in names and
    values, or with the first value that is out of its range."""
    translation = front_end().translate(config_type, layers)
    merged = Merged(config_type, translation.layers)
    values, errors_of_values = merged.values_and_errors()
    notes_on_names, errors_of_names = check_names(merged)
    errors = list(translation.errors)
    errors += errors_of_values
    errors += errors_of_names
    if errors:
        raise ShoalError("; ".join(dict.fromkeys(errors)))
    try:
        config = build(config_type, values)
    except ShoalError as error:
        raise ShoalError(with_origins(str(error), merged.origins)) from None
    return config, merged, translation, notes_on_names


def _recipe_of(config_type: type, layers: Sequence[Layer]) -> Recipe | None:
    """Returns the recipe of the highest layer that has one, with the settings of its file alone, as
    the command reads it; None if none has. Raises ShoalError if the section is wrong."""
    for layer in reversed(layers):
        if layer.about is None or layer.file is None:
            continue
        recipe = read_recipe(layer.about, layer.file, layer.file.stem)
        type_of_run = config_type if issubclass(config_type, Config) else Config
        alone, _ = layers_of(type_of_run, Arguments(config_name=str(layer.file)))
        config, *_ = _build(type_of_run, alone)
        return replace(recipe, config=config)
    return None


def given_values(config_type: type, arguments: Arguments, *names: str) -> dict[str, Any]:
    """Returns the values, by key, that the user's own file and command line give to the keys
    `names` (dotted names), without those of presets; keys that are not given are missing. Flags of
    other systems count under their keys; the two settings that make `shoal sft` of `shoal train`
    count as given. Raises ShoalError if one of the values is invalid."""
    layers, _ = users_layers(config_type, arguments)
    merged = merge_typed(config_type, [layer for layer in layers if layer.is_users])
    return {name: merged.get(name) for name in names if name in merged.in_effect}


def packaged_values(config: Any) -> dict[str, Any]:
    """Returns the values, by dotted key, that the presets of a configuration's recipe and algorithm
    set; those of the algorithm win over those of the recipe. {} if it names neither. `config`: of a
    command that has both keys, like `shoal train`. Values that are invalid are left out; ShoalError
    if a name has no preset."""
    layers = []
    for key in PACKAGED:
        name = get_value(config, key)
        if name:
            layers += named_layers(type(config), key, name)
    values, _ = merge_typed(type(config), layers).values_and_errors()
    return values


# ---- notes


def _notes(config: Any, merged: Merged, file: Path | None, has_preset: bool) -> Iterator[str]:
    """Yields lines to print at the start: the keys of a file that were skipped because only
    training reads them, a task's preset that was not loaded because of the file, the settings of
    the file that a preset replaces, and the values from presets that are in effect and differ from
    Shoal's defaults. `file`: the file or preset that was loaded, None if none was; `has_preset`:
    True if `--preset` was given."""
    skipped = [name for layer in merged.layers for name in layer.skipped]
    if file and skipped:
        more = ", ..." if len(skipped) > 3 else ""
        yield (
            f"{file} holds {count(len(skipped), 'key')} that only training reads, passed over: "
            f"{', '.join(skipped[:3])}{more}"
        )
    if file and not is_packaged(file) and not has_preset:
        yield from _preset_not_loaded(config, merged, file)
    yield from _replaced_in_files(merged)
    yield from _recipe_without_effect(merged)
    yield from _values_of_presets(config, merged)


def _preset_not_loaded(config: Any, merged: Merged, file: Path) -> Iterator[str]:
    """Yields one line if the task has a preset that was not loaded because the user's file was, and
    the preset sets keys that are set nowhere; else nothing."""
    config_type = type(config)
    preset = None
    if "task.name" in merged.in_effect:
        preset = preset_of_task(command_of(config_type), config.task.name)
    if preset:
        of_preset = merge_typed(config_type, file_layers(config_type, preset, ""))
        keys_given = set(merged.in_effect)
        for _, setting in merged.settings:
            if setting.of_rule:
                keys_given.add(setting.key)
        keys_given |= overridden_keys(config)
        differences = []
        for key in of_preset.in_effect:
            value, of_preset_value = get_value(config, key), of_preset.get(key)
            if key not in keys_given and value != of_preset_value:
                differences.append(f"{key}={shown(value)} (preset: {shown(of_preset_value)})")
        if differences:
            yield (
                f"{file.name} does not load the preset of task={config.task.name}, so the run has "
                f"{', '.join(differences)}; `defaults: [{preset.stem}, _self_]` in the file loads "
                "the preset"
            )


def _values_of_presets(config: Any, merged: Merged) -> Iterator[str]:
    """Yields a line for each preset of a task, recipe or algorithm with the values from it that are
    in effect and differ from Shoal's defaults; of more than MANY values only the first FEW."""
    keys = keys_of(type(config))
    changed: dict[str, list[str]] = {}  # label of a preset's layer -> its values, as texts
    for key in merged.in_effect:
        layer = merged.layers[merged.layer_index(key)]
        folder = layer.label.partition(" ")[0]  # `recipe` of the label `recipe trl`
        if layer.is_users or folder not in ("task", *PACKAGED.values()):
            continue
        value = get_value(config, key)
        if value == keys[key].default or key in overridden_keys(config):
            continue
        ours = ""
        if folder != "task":
            ours = f" (ours: {shown(keys[key].default) or 'empty'})"
        changed.setdefault(layer.label, []).append(f"{key}={shown(value)}{ours}")
    for label, texts in changed.items():
        folder, _, name = label.partition(" ")
        verb = "loads its preset" if folder == "task" else "differs from Shoal's defaults in"
        more = ""
        if len(texts) > MANY:
            more = f" and {len(texts) - FEW} more keys (--dry-run lists them)"
            texts = texts[:FEW]
        yield f"{folder}={name} {verb}: {', '.join(texts)}{more}"


def _replaced_in_files(merged: Merged) -> Iterator[str]:
    """Yields a line if an algorithm named on the command line replaces settings of the user's file,
    because its preset lies directly beneath the command line and over the file."""
    values, _ = merged.values_and_errors()
    for layer_index, layer in enumerate(merged.layers):
        files = [below for below in merged.layers[:layer_index] if below.is_users and below.file]
        is_preset = layer.label.partition(" ")[0] in PACKAGED.values()
        if layer.is_users or not is_preset or not files:
            continue
        # The values that the files would give by themselves.
        typed_files = [replace(below, settings=below.typed) for below in files]
        of_files = merge_typed(merged.config_type, typed_files)
        values_of_files, _ = of_files.values_and_errors()
        typed = {}  # name in a file -> the text of its value
        for below in files:
            for setting in below.typed:
                typed[setting.name] = text_of(setting.value)
        replaced = {}  # the part of `typed` that this preset replaces
        for key, value in values_of_files.items():
            if key not in values or merged.layer_index(key) != layer_index:
                continue
            if value != values[key]:
                name = of_files.setting_of(key).name
                replaced[name] = typed[name]
        if replaced:
            texts = ", ".join(f"{name}={text}" for name, text in replaced.items())
            file = Path(files[-1].label).name
            yield (
                f"{layer.label.replace(' ', '=', 1)} on the command line lies over {file} and "
                f"replaces there: {texts}; named in the file, it would lie beneath them"
            )


def _recipe_without_effect(merged: Merged) -> Iterator[str]:
    """Yields a line if the command line names a recipe of which nothing is in effect, because a
    file beneath which it lies sets all of its keys, as the configuration of a run does."""
    line = len(merged.layers) - 1
    of_line = [setting for layer_index, setting in merged.settings if layer_index == line]
    if not any(setting.key == "recipe" for setting in of_line):
        return
    layers_in_effect = {merged.layer_index(key) for key in merged.in_effect}
    for layer_index, layer in enumerate(merged.layers):
        folder, _, name = layer.label.partition(" ")
        if layer.is_users or folder != "recipe" or layer_index in layers_in_effect:
            continue
        yield (
            f"recipe={name} changes nothing: it is beneath a file, or the configuration of a run, "
            "that sets all of its keys"
        )
