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
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


MANY, FEW = 8, 3
"""Of more values than MANY that a preset sets, the line at the start shows FEW."""


@dataclass(frozen=True)
class Resolved:
    """A configuration, with where its values came from."""

    config: Any
    config_name: str  # the preset or file that was loaded; empty for none
    notes: tuple[str, ...]  # lines for the start: values set by presets, keys that were skipped
    arguments: Arguments
    became: tuple[str, ...] = ()  # a line for each flag of another system that was given
    origins: Mapping[str, str] = field(
        default_factory=dict
    )  # key -> `command line`, `mine.yml:4`, `recipe trl`

    @property
    def start_lines(self) -> list[str]:
        """The notes, and in one line what the other flags of other systems became."""
        rest = [line for line in self.became if line not in self.notes]
        return [*self.notes, *(["flags: " + "; ".join(rest)] if rest else [])]

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
    open_keys: Container[str] = (),
    /,
    **overrides: Any,
) -> tuple[Any, Resolved, tuple[Callable[..., Any], ...]]:
    """A configuration from keywords in Python: (configuration, its origins, reward functions given
    as callables).

    >>> from_overrides(
    ...     Config, model="tiny", optimizer={"lr": 1e-5}, batch__group_size=4, reward=my_reward
    ... )

    Keys may be nested dicts, joined by `__` or by dots, or short forms; `config_name` names a
    preset or a file. `stored`, `open_keys`: as in `load`.
    """
    config_name = str(overrides.pop("config_name", None) or "")
    entries, functions = [], ()
    PYTHON_OBJECTS.begin_call()
    for name, value in python_leaves(config_type, overrides):
        key = key_of(config_type, name)
        if key and key.name in COMMA_LISTS and isinstance(value, str):
            value = split_list(key, value)
        if key and key.name == "reward.functions":
            value, functions = _take_callables(value)
        if key and key.name in OBJECT_KEYS:
            value = (
                [register_object(one) for one in value]
                if isinstance(value, list | tuple)
                else register_object(value)
            )
        value = list(value) if isinstance(value, tuple) else value
        if key and key.is_list:
            value = [text_given(item) for item in (value if isinstance(value, list) else [value])]
        origin = PYTHON if name in names_of(config_type) else f"{PYTHON} {name}"
        value = value if value is None or isinstance(value, list) else text_given(value)
        entries.append(make_entry(name, value, origin))
    arguments = Arguments("" if stored else config_name, tuple(entries))
    return *load(config_type, arguments, stored, open_keys), functions


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
        is_object = callable(value) or may_be_object or isinstance(value, str | bytes | Mapping)
        if isinstance(value, Iterable) and not (
            is_list or is_object
        ):  # a set, an array, a generator
            raise ShoalError(
                f"{name}={shorten(repr(value), 100)}: expected a value, or a list of such; "
                f"give list(...) of the {type(value).__name__}"
            )
        items = value if is_list else [value]
        for item in items:
            if isinstance(item, bytes) or (item is None and items is value):
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
        return name in self._of_this_call or (name in self._objects and name not in self._ambiguous)

    def __getitem__(self, name: str) -> Any:
        return self._objects[name]


def _is_same_object(one: Any, other: Any) -> bool:
    """True also for a method that was taken from its object twice."""
    return one is other or (inspect.ismethod(one) and inspect.ismethod(other) and one == other)


PYTHON_OBJECTS = GivenObjects()


def register_object(value: Any, name: str = "") -> Any:
    """The name that stands for what a file could have defined; a text as it is."""
    if isinstance(value, str):
        return value
    return PYTHON_OBJECTS.add(
        value, f"{FROM_PYTHON}{name or getattr(value, '__name__', type(value).__name__)}"
    )


def nested_names(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`a__b` as `a.b`, at any depth."""
    return {
        str(name).replace("__", "."): nested_names(value) if isinstance(value, Mapping) else value
        for name, value in overrides.items()
    }


def _take_callables(value: Any) -> tuple[list[Any], tuple[Callable[..., Any], ...]]:
    items = list(value) if isinstance(value, list | tuple) else [value]
    functions = tuple(item for item in items if callable(item))
    if functions and len(functions) < len(items):
        raise ShoalError(
            f"reward={value!r}: expected functions, or names of the form file.py:function, not "
            f"both: "
            "import the named ones and give them as functions"
        )
    return ([], functions) if functions else (items, ())


def load(
    config_type: type,
    arguments: Arguments,
    stored: Path | None = None,
    open_keys: Container[str] = (),
) -> tuple[Any, Resolved]:
    """The configuration of the arguments; `stored`: a run's configuration in place of presets and
    files, of which `open_keys` are not read: what the run decided itself is decided by its settings
    of now.

    >>> config, resolved = load(Config, resolved.arguments, run / "config.yaml")
    """
    layers, file = layers_of(config_type, arguments, stored and stored.absolute(), open_keys)
    merged, errors = merge(config_type, layers)
    values, not_values = merged.values()
    twice, two_names = check_names(merged)
    if errors := [*errors, *not_values, *two_names]:
        raise ShoalError("; ".join(dict.fromkeys(errors)))
    try:
        config = build(config_type, values)
    except ShoalError as error:
        raise ShoalError(with_origins(str(error), merged.origins)) from None
    became = merged.translation.lines(merged.settings, merged.top, values)
    notes = (
        *_notes(config, merged, file, bool(arguments.preset)),
        *merged.translation.notes,
        *twice,
        *(line for line, is_note in became if is_note),
    )
    return config, Resolved(
        config,
        file.stem if file else "",
        notes,
        arguments,
        tuple(line for line, _ in became),
        merged.origins,
    )


def given_values(config_type: type, arguments: Arguments, *names: str) -> dict[str, Any]:
    """The values of some keys in the user's own file and command line, without presets."""
    merged, _ = merge(
        config_type, [layer for layer in users_layers(config_type, arguments)[0] if layer.is_users]
    )
    return {name: merged.get(name) for name in names if name in merged.top}


def packaged_values(config: Any) -> dict[str, Any]:
    """The values that a configuration's recipe and algorithm set, by dotted key."""
    layers = [
        layer
        for key in PACKAGED
        if (name := get_value(config, key))
        for layer in named_layers(type(config), key, name)
    ]
    return merge(type(config), layers)[0].values()[0]


# ---- notes


def _notes(config: Any, merged: Merged, file: Path | None, has_preset: bool) -> Iterator[str]:
    """Lines for the start: keys of a file that were skipped, a task's preset that was not loaded,
    and the values of presets in effect that differ from Shoal's defaults."""
    config_type, keys = type(config), keys_of(type(config))
    if file and (skipped := [name for layer in merged.layers for name in layer.skipped]):
        yield (
            f"{file} holds {count(len(skipped), 'key')} that only training reads, passed over: "
            f"{', '.join(skipped[:3])}" + (", ..." if len(skipped) > 3 else "")
        )
    if file and not is_packaged(file) and not has_preset and "task.name" in merged.top:
        preset = preset_of_task(command_of(config_type), config.task.name)
        beneath = merge(config_type, file_layers(config_type, preset, ""))[0].top if preset else {}
        given = {
            *merged.top,
            *(one.key for rule in merged.translation.rules for one in rule.claims),
        }
        if preset and (left := [key for key in beneath if key not in given]):
            yield (
                f"{file.name} does not load the preset of task={config.task.name} ({left[0]} and "
                f"{len(left) - 1} "
                f"more keep their defaults): `defaults: [{preset.stem}, _self_]` in the file loads "
                f"it"
            )
    yield from _replaced_in_files(merged)
    changed: dict[str, list[str]] = {}
    for key, setting in merged.top.items():
        layer = merged.layers[setting.place[0]]
        folder, value = layer.label.partition(" ")[0], get_value(config, key)
        if (
            folder in ("task", *PACKAGED.values())
            and not layer.is_users
            and value != keys[key].default
            and (key not in overridden_keys(config))
        ):
            ours = "" if folder == "task" else f" (ours: {shown(keys[key].default) or 'empty'})"
            changed.setdefault(layer.label, []).append(f"{key}={shown(value)}{ours}")
    for label, texts in changed.items():
        folder, _, name = label.partition(" ")
        verb = "loads its preset" if folder == "task" else "differs from Shoal's defaults in"
        more = (
            f" and {len(texts) - FEW} more keys (--dry-run lists them)" if len(texts) > MANY else ""
        )
        yield f"{folder}={name} {verb}: {', '.join(texts[:FEW] if more else texts)}{more}"


def _replaced_in_files(merged: Merged) -> Iterator[str]:
    """A line for a recipe or an algorithm on the command line that replaces settings of the user's
    file beneath it."""
    now = merged.values()[0]
    for number, layer in enumerate(merged.layers):
        files = [below for below in merged.layers[:number] if below.is_users and below.file]
        if layer.is_users or layer.label.partition(" ")[0] not in PACKAGED.values() or not files:
            continue
        alone = merge(merged.config_type, files)[0]
        typed = {entry.name: text_of(entry.value) for below in files for entry in below.entries}
        lost = {
            alone.top[key].name: typed[alone.top[key].name]
            for key, value in alone.values()[0].items()
            if key in now and merged.top[key].place[0] == number and value != now[key]
        }
        if lost:
            texts = ", ".join(f"{name}={text}" for name, text in lost.items())
            file = Path(files[-1].label).name
            yield (
                f"{layer.label.replace(' ', '=', 1)} on the command line lies over {file} and "
                f"replaces there: "
                f"{texts}; named in the file, it would lie beneath them"
            )
