"""Loads the configuration of a command: from a command line, from Python, over a stored one; and
says what presets set.

Names of other systems become keys before the layers are merged (`compat`, behind foreign.py);
`${...}` in a file is the final value of another key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config.arguments import (
    COMMA_LISTS,
    Arguments,
    key_of,
    names_of,
    read_arguments,
    split_list,
)
from shoal.config.files import is_packaged
from shoal.config.foreign import PYTHON, make_entry
from shoal.config.keys import command_of, dataclass_of, keys_of
from shoal.config.layers import (
    PACKAGED,
    Merged,
    check_names,
    file_layers,
    layers_of,
    merge,
    named_layers,
    preset_of_task,
    users_layers,
    with_origins,
)
from shoal.config.text import to_yaml
from shoal.config.values import build, get_value, leaves_of, shown, text_of, without_effect
from shoal.text import count, shorten
from shoal.types import ShoalError

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
    GIVEN.begin_call()
    for name, value in python_leaves(config_type, overrides):
        key = key_of(config_type, name)
        if key and key.name in COMMA_LISTS and isinstance(value, str):
            value = split_list(key, value)
        if key and key.name == "reward.functions":
            value, functions = _take_callables(value)
        if key and key.name in OBJECT_KEYS:
            value = (
                [name_given(one) for one in value]
                if isinstance(value, list | tuple)
                else name_given(value)
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


GIVEN = GivenObjects()


def name_given(value: Any, name: str = "") -> Any:
    """The name that stands for what a file could have defined; a text as it is."""
    if isinstance(value, str):
        return value
    return GIVEN.add(
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
            and (key not in without_effect(config))
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
