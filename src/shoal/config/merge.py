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
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config.commands import command_of, dataclass_of
from shoal.config.key import (
    build,
    convert_value,
    get_value,
    keys_of,
    leaves_of,
    overridden_keys,
    sections_of,
    shown,
    text_of,
)
from shoal.config.stored import to_yaml
from shoal.config.train import Config
from shoal.config.words import (
    COMMA_LISTS,
    COMMAND_LINE,
    PYTHON,
    STORED,
    Arguments,
    Entry,
    Layer,
    Setting,
    Translation,
    UnknownKey,
    find_file,
    find_key,
    is_packaged,
    key_of,
    make_entry,
    names_of,
    packaged,
    presets_of,
    read_arguments,
    read_files,
    split_list,
    translator,
)
from shoal.records import ShoalError
from shoal.text import count, did_you_mean, shorten

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
) -> tuple[list[Layer], Path | None]:
    """The user's layers, beneath each the presets that it names; and the preset or file that was
    loaded. `stored`: a run's configuration in place of presets and files."""
    layers, file = users_layers(config_type, arguments, stored)
    line = len(layers) - 1
    beneath: dict[int, list[Layer]] = {}
    task = ""
    if not file:
        # Merged, as another system's flag may name the task.
        by_line, _ = merge(config_type, [layers[line]])
        if "task.name" in by_line.top:
            task = text_of(by_line.top["task.name"].value)
    preset = preset_of_task(command_of(config_type), task)
    if preset:
        file = preset
        beneath[line] = file_layers(config_type, preset, f"task {task}")
    names = names_of(config_type)
    for key in PACKAGED:
        if key not in keys_of(config_type):
            continue
        number, name, where = 0, "", ""  # of the highest entry of the key
        for layer_number, layer in enumerate(layers):
            for entry in layer.entries:
                if names.get(entry.name) == key:
                    number = layer_number
                    name = text_of(entry.value)
                    where = f"{entry.origin}: " if layer.file else ""
        if not name:
            continue
        # The files of a file's `defaults` have its label: the preset lies beneath them, too.
        while number > 0 and layers[number - 1].label == layers[number].label:
            number -= 1
        beneath.setdefault(number, []).extend(named_layers(config_type, key, name, where))
    ordered: list[Layer] = []
    for number, layer in enumerate(layers):
        ordered += beneath.get(number, [])
        ordered.append(layer)
    return ordered, file


def preset_of_task(command: str, name: str) -> Path | None:
    """The file of a task's preset: data from Python has that of data from files."""
    return packaged(command, "custom" if name == "rows" else name)


def users_layers(
    config_type: type, arguments: Arguments, stored: Path | None = None
) -> tuple[list[Layer], Path | None]:
    """The layers of `--preset`, of the file and of the command line; and the file."""
    command = command_of(config_type)
    layers = []
    if arguments.beneath:
        layers.append(Layer(arguments.beneath, "run"))
    if command == "sft" and not stored:  # it is `shoal train` with these
        entries = [
            Entry("algorithm.name", "sft", "shoal sft"),
            Entry("task.name", "custom", "shoal sft"),
        ]
        layers.append(Layer(entries, "shoal sft"))
    file = stored
    if not file and arguments.config_name:
        file = find_file(command, arguments.config_name)
    if arguments.preset and not stored and (file is None or not is_packaged(file)):
        below = find_file(command, arguments.preset)
        layers += file_layers(config_type, below, f"preset {below.stem}")
        file = file or below
    if file and not (layers and file == layers[-1].file):
        label = ""
        if stored:
            label = STORED
        elif is_packaged(file):
            label = f"preset {file.stem}"
        layers += file_layers(config_type, file, label)
    return [*layers, Layer(arguments.entries)], file


def named_layers(config_type: type, key: str, name: str, where: str = "") -> list[Layer]:
    """The layers of a packaged recipe or algorithm. `where`: a file's line before an error."""
    folder = PACKAGED[key]
    file = packaged(folder, name)
    if file is None:
        known = presets_of(folder)
        near = did_you_mean(name, known) or "."
        raise ShoalError(
            f"{where}{folder}={name}: there is no such {folder}{near} There are: {', '.join(known)}"
        )
    return file_layers(config_type, file, f"{folder} {name}")


def file_layers(config_type: type, file: Path, label: str) -> list[Layer]:
    """The layers of a file and of its `defaults`, without empty sections and, for a command other
    than training, without the keys that only training reads. Without `label` each setting's origin
    is its line."""
    layers = []
    is_key = keys_of(config_type).__contains__
    sections = sections_of(config_type) | sections_of(Config)
    for path, entries in read_files(command_of(config_type), file, is_key):
        raw = {entry.name: entry.value for entry in entries}
        kept = []
        skipped = []
        for entry in entries:
            if entry.value is None and entry.name in sections:
                continue
            for_training = _names_for_training(config_type, entry)
            if for_training:
                skipped += for_training
                continue
            value = entry.value
            # Those of our own keys are replaced by final values, in `Merged.value_of`.
            if is_interpolated(value) and entry.name not in names_of(config_type):
                with contextlib.suppress(ShoalError):  # refused later, if the flag has an effect
                    value = translator().interpolate(entry.name, value, raw.__getitem__)
            kept.append(Entry(entry.name, value, label or entry.origin))
        layers.append(Layer(kept, label or str(file), path, not is_packaged(path), skipped))
    return layers


def _names_for_training(config_type: type, entry: Entry) -> list[str]:
    """The keys of an entry that training reads and this command does not."""
    if issubclass(config_type, Config):
        return []

    def is_known(config_type: type, name: str, value: Any) -> bool:
        if name in names_of(config_type):
            return True
        return translator().find(config_type, name, value) is not None

    name = entry.name
    value = entry.value
    # `batch` is a key here, a section in training.
    if isinstance(value, Mapping) and name in sections_of(Config):
        inside = [f"{name}.{part}" for part in value]
        if all(is_known(Config, inside_name, None) for inside_name in inside):
            return inside
        return []
    if is_known(Config, name, value) and not is_known(config_type, name, value):
        return [name]
    return []


def is_interpolated(value: Any) -> bool:
    """True for a text, or a list with one, that refers to other names."""
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, str) and "${" in item for item in items)


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
        self.settings = sorted(self.settings, key=operator.attrgetter("place"))
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

    def value_of(self, setting: Setting) -> Any:
        """A setting's value in its type; a file's with `${...}` replaced by final values of keys,
        or by other names of the file."""
        layer = self.layers[setting.place[0]]
        value = setting.value
        if layer.file and is_interpolated(value) and not setting.flags:
            names = names_of(self.config_type)
            raw = {entry.name: entry.value for entry in layer.entries}

            def value_of_name(name: str) -> Any:
                if name in names:
                    return self.get(names[name])
                return raw[name]

            value = translator().interpolate(setting.name, value, value_of_name)
        return convert_value(keys_of(self.config_type)[setting.key], value)

    @property
    def origins(self) -> dict[str, str]:
        """Key -> `command line`, `--learning_rate`, `mine.yml:4`, `recipe trl`."""
        return {key: setting.origin for key, setting in self.top.items()}

    def values(self) -> tuple[dict[str, Any], list[str]]:
        """Key -> its value, of the keys that are set; and the errors of those that cannot be."""
        values = {}
        errors = []
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
    settings = list(translation.settings)
    errors = list(translation.errors)
    unknown = []
    for number, layer in enumerate(layers):
        for index, entry in enumerate(layer.entries):
            if (number, index) in translation.taken:
                continue
            where = f"{entry.origin}: " if layer.file else ""
            try:
                key = find_key(config_type, entry.name).name
            except UnknownKey as error:
                unknown.append(f"{where}{error}")
                continue
            except ShoalError as error:
                errors.append(f"{where}{error}")
                continue
            place = (number, 1, index)
            settings.append(Setting(key, entry.value, entry.origin, entry.name, place))
    if unknown:
        errors.append(str(UnknownKey.of_all(unknown, config_type)))
    merged = Merged(config_type, layers, settings, translation)
    for rule in translation.rules:
        free = {}  # the keys of the rule that no higher setting has
        for claim in rule.claims:
            if claim.key not in merged.top or merged.top[claim.key].place < claim.place:
                free[claim.key] = claim.origin
        if not free:
            continue
        try:
            settings = [*merged.settings, *rule.apply(merged.get)]
            merged = Merged(config_type, layers, settings, translation)
        except ShoalError as error:
            errors.append(with_origins(str(error), merged.origins | free))
    return merged, errors


def _in_effect(settings: Sequence[Setting], line: int) -> dict[str, Setting]:
    """Key -> its highest setting, in the order of places. `line`: the number of the command line's
    layer."""
    last_number: Setting | None = None  # the command line's last number of prompts
    for setting in settings:
        is_number = setting.key in PROMPT_KEYS and text_of(setting.value) != "0"
        if is_number and setting.place[0] == line:
            last_number = setting
    top: dict[str, Setting] = {}
    for setting in settings:
        if last_number and setting.place[0] == line and setting.key in PROMPT_KEYS:
            is_other = setting.key != last_number.key
            if is_other and setting.place < last_number.place:
                continue
        by_device = top.get("batch.prompts_per_device")
        if setting.key == "batch.prompts_per_step" and by_device:
            if by_device.place[0] < setting.place[0]:
                del top[by_device.key]
        # Removed first: the order is that of the places.
        top.pop(setting.key, None)
        top[setting.key] = setting
    return top


def check_names(merged: Merged) -> tuple[list[str], list[str]]:
    """Two names in one layer that give a key different values: notes of those on the command line,
    where the later stands, and errors of those in a file, which has no order, unless a higher layer
    sets the key, and of `steps` beside a flag that counts batches.

    PROMPT_KEYS count as one key. A file with most of the keys is a run's own and may have both:
    there `batch.prompts_per_step` followed from the other."""
    notes = []
    errors = []
    claims = [claim for rule in merged.translation.rules for claim in rule.claims]
    # A claim stands in place of the settings that its rule made, which have the same flags.
    claimed = {(claim.flags, claim.key) for claim in claims}
    settings = list(claims)
    for setting in merged.settings:
        if (setting.flags, setting.key) not in claimed:
            settings.append(setting)
    settings.sort(key=operator.attrgetter("place"))
    for number, layer in enumerate(merged.layers):
        latest: dict[str, Setting] = {}
        is_whole = 2 * len(layer.entries) > len(keys_of(merged.config_type))
        for setting in settings:
            if setting.place[:2] != (number, 1):
                continue
            key = setting.key
            if key in PROMPT_KEYS and not is_whole and text_of(setting.value) != "0":
                key = PROMPT_KEYS[0]
            before = latest.get(key)
            latest[key] = setting
            if before is None or not _are_two(before, setting):
                continue
            what = setting.key if before.key == setting.key else "how many prompts a step has"
            counts_batches = setting.key == "steps" and (before in claims or setting in claims)
            if layer.file is None and not counts_batches:
                notes.append(
                    f"{before.name} and {setting.name} both set {what}: the later one stands, "
                    f"{setting.name}"
                )
                continue
            is_set_above = False
            for two_names_key in (before.key, setting.key):
                top = merged.top.get(two_names_key)
                if top is not None and top.place[0] > number:
                    is_set_above = True
            if not is_set_above:
                where = f"{layer.file}: " if layer.file else ""
                errors.append(
                    f"{where}{before.name} and {setting.name} both set {what}; write one of them"
                )
    return notes, errors


def _are_two(before: Setting, setting: Setting) -> bool:
    """True for two names that give a key different values."""
    if before.name == setting.name:
        return False
    if before.flags and before.flags is setting.flags:
        return False
    if before.key == setting.key and before.value is not None:
        return text_of(before.value) != text_of(setting.value)
    return True


# ---- origins


def origin_text(origin: str) -> str:
    """An origin as a user reads it: `set by the preset of task=custom` for `task custom`."""
    kind, _, name = origin.partition(" ")
    if kind == "task":
        return f"set by the preset of task={name}"
    if kind in PACKAGED.values():
        return f"set by {kind}={name}"
    return origin


def with_origins(message: str, origins: Mapping[str, str]) -> str:
    """A message with the origin of each key in it that was not typed under its own name."""
    mentioned = []
    for key, origin in origins.items():
        if origin in (COMMAND_LINE, PYTHON, STORED):
            continue
        if re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", message):
            mentioned.append(f"{key}: {origin_text(origin)}")
    if not mentioned:
        return message
    return f"{message} ({', '.join(mentioned)})"


MANY = 8
FEW = 3
"""Of more values than MANY that a preset sets, the line at the start shows FEW."""


@dataclass(frozen=True)
class Resolved:
    """A configuration, with where its values came from."""

    config: Any
    config_name: str  # the preset or file that was loaded; empty for none
    notes: tuple[str, ...]  # lines for the start: values set by presets, keys that were skipped
    arguments: Arguments
    became: tuple[str, ...] = ()  # a line for each flag of another system that was given
    # key -> `command line`, `mine.yml:4`, `recipe trl`
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def start_lines(self) -> list[str]:
        """The notes, and in one line what the other flags of other systems became."""
        lines = list(self.notes)
        others = [line for line in self.became if line not in self.notes]
        if others:
            lines.append("flags: " + "; ".join(others))
        return lines

    @property
    def text(self) -> str:
        """Every key, as YAML that loads as the same configuration."""
        return to_yaml(self.config)


# ---- entry points


def compose(command: str | type, argv: Sequence[str] = ()) -> tuple[Any, Resolved]:
    """A command's configuration from its command line (without the command); raises ShoalError.

    >>> config, resolved = compose("train", ["task=gsm8k", "optimizer.lr=1e-5"])

    Without a named preset, the task's preset lies beneath the command line.
    """
    config_type = dataclass_of(command)
    return load(config_type, read_arguments(config_type, argv))


def from_overrides(
    config_type: type,
    stored: Path | None = None,
    /,
    **overrides: Any,
) -> tuple[Any, Resolved, tuple[Callable[..., Any], ...]]:
    """A configuration from keywords in Python: (configuration, its origins, reward functions given
    as callables).

    >>> from_overrides(
    ...     Config, model="tiny", optimizer={"lr": 1e-5}, batch__group_size=4, reward=my_reward
    ... )

    Keys may be nested dicts, joined by `__` or by dots, or short forms; `config_name` names a
    preset or a file. `stored`: as in `load`.
    """
    config_name = str(overrides.pop("config_name", None) or "")
    entries = []
    functions: tuple[Callable[..., Any], ...] = ()
    PYTHON_OBJECTS.begin_call()
    for name, value in python_leaves(config_type, overrides):
        key = key_of(config_type, name)
        if key and key.name in COMMA_LISTS and isinstance(value, str):
            value = split_list(key, value)
        if key and key.name == "reward.functions":
            value, functions = _take_callables(value)
        if key and key.name in OBJECT_KEYS:
            if isinstance(value, list | tuple):
                value = [register_object(item) for item in value]
            else:
                value = register_object(value)
        if isinstance(value, tuple):
            value = list(value)
        if key and key.is_list:
            items = value if isinstance(value, list) else [value]
            value = [text_given(item) for item in items]
        if value is not None and not isinstance(value, list):
            value = text_given(value)
        origin = PYTHON if name in names_of(config_type) else f"{PYTHON} {name}"
        entries.append(make_entry(name, value, origin))
    arguments = Arguments("" if stored else config_name, tuple(entries))
    config, resolved = load(config_type, arguments, stored)
    return config, resolved, functions


def text_given(value: Any) -> str:
    """A value from Python as text. Of a kind of text, as an Enum's or NumPy's, plainly what it
    says: YAML has no other form of it."""
    return str.__str__(value) if isinstance(value, str) else str(value)


def python_leaves(config_type: type, overrides: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every keyword from Python with its dotted name. A key of ours that is None is not given, as
    an argument that somebody's own function has by default; another system's flag that is None is
    its `null` in a file."""
    for name, value in leaves_of(config_type, nested_names(overrides)):
        is_list = isinstance(value, list | tuple)
        key = key_of(config_type, name)
        may_be_object = key is not None and key.name in OBJECT_KEYS
        is_object = callable(value) or may_be_object
        is_value = is_list or is_object or isinstance(value, str | bytes | Mapping)
        if isinstance(value, Iterable) and not is_value:  # a set, an array, a generator
            raise ShoalError(
                f"{name}={shorten(repr(value), 100)}: expected a value, or a list of such; "
                f"give list(...) of the {type(value).__name__}"
            )
        items = value if is_list else [value]
        for item in items:
            is_missing = is_list and item is None
            if is_missing or isinstance(item, bytes):
                raise ShoalError(
                    f"{name}={value!r}: expected text, numbers or functions, without {item!r}"
                )
        if value is not None or key is None:
            yield name, value


OBJECT_KEYS = (
    "environment.tools",
    "environment.factory",
    "environment.rollout",
    "environment.agent",
)
"""Keys whose values may be objects from Python."""


FROM_PYTHON = "python:"
"""Begins the name of what was given from Python, where the configuration is stored."""


class GivenObjects:
    """Tools, environments and rollout functions that were given from Python, by the name that
    stands for them.

    Two objects of one name, given in one call, get a number each. A name that has meant two objects
    in two calls means neither where a stored configuration has it: it is not known which one the
    run had."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._of_this_call: set[str] = set()
        self._ambiguous: set[str] = set()

    def begin_call(self) -> None:
        self._of_this_call.clear()

    def add(self, value: Any, name: str) -> str:
        """The name that stands for an object from now on."""
        free, number = name, 1
        while free in self._of_this_call and not _is_same_object(self._objects[free], value):
            number += 1
            free = f"{name}-{number}"
        if free in self._objects and not _is_same_object(self._objects[free], value):
            self._ambiguous.add(free)
        self._objects[free] = value
        self._of_this_call.add(free)
        return free

    def __contains__(self, name: str) -> bool:
        if name in self._of_this_call:
            return True
        return name in self._objects and name not in self._ambiguous

    def __getitem__(self, name: str) -> Any:
        return self._objects[name]


def _is_same_object(first: Any, second: Any) -> bool:
    """True also for a method that was taken from its object twice."""
    if inspect.ismethod(first) and inspect.ismethod(second):
        return first == second
    return first is second


PYTHON_OBJECTS = GivenObjects()


def register_object(value: Any, name: str = "") -> Any:
    """The name that stands for what a file could have defined; a text as it is."""
    if isinstance(value, str):
        return value
    if not name:
        name = getattr(value, "__name__", type(value).__name__)
    return PYTHON_OBJECTS.add(value, f"{FROM_PYTHON}{name}")


def nested_names(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`a__b` as `a.b`, at any depth."""
    nested = {}
    for name, value in overrides.items():
        if isinstance(value, Mapping):
            value = nested_names(value)
        nested[str(name).replace("__", ".")] = value
    return nested


def _take_callables(value: Any) -> tuple[list[Any], tuple[Callable[..., Any], ...]]:
    items = list(value) if isinstance(value, list | tuple) else [value]
    functions = tuple(item for item in items if callable(item))
    if functions and len(functions) < len(items):
        raise ShoalError(
            f"reward={value!r}: expected functions, or names of the form file.py:function, not "
            "both: import the named ones and give them as functions"
        )
    if functions:
        return [], functions
    return items, ()


def load(
    config_type: type,
    arguments: Arguments,
    stored: Path | None = None,
) -> tuple[Any, Resolved]:
    """The configuration of the arguments; `stored`: a run's configuration in place of presets and
    files.

    >>> config, resolved = load(Config, resolved.arguments, run / "config.yaml")
    """
    layers, file = layers_of(config_type, arguments, stored and stored.absolute())
    merged, errors = merge(config_type, layers)
    values, not_values = merged.values()
    twice, two_names = check_names(merged)
    errors = [*errors, *not_values, *two_names]
    if errors:
        raise ShoalError("; ".join(dict.fromkeys(errors)))
    try:
        config = build(config_type, values)
    except ShoalError as error:
        raise ShoalError(with_origins(str(error), merged.origins)) from None
    became = merged.translation.lines(merged.settings, merged.top, values)
    notes = list(_notes(config, merged, file, bool(arguments.preset)))
    notes += merged.translation.notes
    notes += twice
    notes += [line for line, is_note in became if is_note]
    resolved = Resolved(
        config,
        file.stem if file else "",
        tuple(notes),
        arguments,
        tuple(line for line, _ in became),
        merged.origins,
    )
    return config, resolved


def given_values(config_type: type, arguments: Arguments, *names: str) -> dict[str, Any]:
    """The values of some keys in the user's own file and command line, without presets."""
    layers, _ = users_layers(config_type, arguments)
    merged, _ = merge(config_type, [layer for layer in layers if layer.is_users])
    return {name: merged.get(name) for name in names if name in merged.top}


def packaged_values(config: Any) -> dict[str, Any]:
    """The values that a configuration's recipe and algorithm set, by dotted key."""
    layers = []
    for key in PACKAGED:
        name = get_value(config, key)
        if name:
            layers += named_layers(type(config), key, name)
    merged, _ = merge(type(config), layers)
    values, _ = merged.values()
    return values


# ---- notes


def _notes(config: Any, merged: Merged, file: Path | None, has_preset: bool) -> Iterator[str]:
    """Lines for the start: keys of a file that were skipped, a task's preset that was not loaded,
    and the values of presets in effect that differ from Shoal's defaults."""
    config_type = type(config)
    keys = keys_of(config_type)
    skipped = [name for layer in merged.layers for name in layer.skipped]
    if file and skipped:
        more = ", ..." if len(skipped) > 3 else ""
        yield (
            f"{file} holds {count(len(skipped), 'key')} that only training reads, passed over: "
            f"{', '.join(skipped[:3])}{more}"
        )
    preset = None
    if file and not is_packaged(file) and not has_preset and "task.name" in merged.top:
        preset = preset_of_task(command_of(config_type), config.task.name)
    if file and preset:
        of_preset, _ = merge(config_type, file_layers(config_type, preset, ""))
        keys_given = set(merged.top)
        for rule in merged.translation.rules:
            keys_given.update(claim.key for claim in rule.claims)
        left = [key for key in of_preset.top if key not in keys_given]
        if left:
            yield (
                f"{file.name} does not load the preset of task={config.task.name} ({left[0]} and "
                f"{len(left) - 1} more keep their defaults): `defaults: [{preset.stem}, _self_]` "
                "in the file loads it"
            )
    yield from _replaced_in_files(merged)
    changed: dict[str, list[str]] = {}
    for key, setting in merged.top.items():
        layer = merged.layers[setting.place[0]]
        folder = layer.label.partition(" ")[0]
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
    """A line for a recipe or an algorithm on the command line that replaces settings of the user's
    file beneath it."""
    values, _ = merged.values()
    for number, layer in enumerate(merged.layers):
        files = [below for below in merged.layers[:number] if below.is_users and below.file]
        is_preset = layer.label.partition(" ")[0] in PACKAGED.values()
        if layer.is_users or not is_preset or not files:
            continue
        of_files, _ = merge(merged.config_type, files)
        values_of_files, _ = of_files.values()
        typed = {}
        for below in files:
            for entry in below.entries:
                typed[entry.name] = text_of(entry.value)
        replaced = {}
        for key, value in values_of_files.items():
            if key not in values or merged.top[key].place[0] != number:
                continue
            if value != values[key]:
                name = of_files.top[key].name
                replaced[name] = typed[name]
        if replaced:
            texts = ", ".join(f"{name}={text}" for name, text in replaced.items())
            file = Path(files[-1].label).name
            yield (
                f"{layer.label.replace(' ', '=', 1)} on the command line lies over {file} and "
                f"replaces there: {texts}; named in the file, it would lie beneath them"
            )
