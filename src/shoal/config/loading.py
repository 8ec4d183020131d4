"""Loads the configuration of a command: one chain of layers, the later over the earlier.

    defaults < preset < file < command line

The preset of a task, recipe or algorithm lies directly beneath the layer that names it, the files of `defaults`
beneath their file. Names of other systems become keys before the layers are merged (translator.py); values that need
other keys (`Late`, `${...}`) are computed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config.arguments import COMMA_LISTS, Arguments, key_of, names_of, read_arguments, split_list
from shoal.config.chain import (
    PACKAGED,
    Chain,
    build_chain,
    file_layers,
    make_chain,
    named_layers,
    origins_of,
    preset_of_task,
    users_layers,
    values_of,
    with_origins,
)
from shoal.config.files import is_packaged
from shoal.config.keys import command_of, dataclass_of, keys_of
from shoal.config.text import texts_of
from shoal.config.translator import PYTHON, Late, Setting, make_entry
from shoal.config.values import build, convert_value, get_value, leaves_of, shown, without_effect
from shoal.types import ShoalError

MANY, FEW = 8, 3
"""Of more values than MANY that a preset sets, the line at the start shows FEW."""


@dataclass(frozen=True)
class Resolved:
    """The origins of a configuration, and its text for the run folder."""

    config_name: str  # the preset or file that was loaded; empty for none
    notes: tuple[str, ...]  # lines for the start: values set by presets, keys that were skipped
    text: str  # every key, as YAML that loads as the same configuration
    difference: str  # the keys that differ from the defaults, likewise
    arguments: Arguments
    became: tuple[str, ...] = ()  # a line for each flag of another system that was given
    origins: Mapping[str, str] = field(default_factory=dict)  # key -> `command line`, `mine.yml:4`, `recipe trl`

    @property
    def start_lines(self) -> list[str]:
        """The notes, and in one line what the other flags of other systems became."""
        rest = [line for line in self.became if line not in self.notes]
        return [*self.notes, *(["flags: " + "; ".join(rest)] if rest else [])]

    def explain(self, message: str) -> str:
        """An error's text with the origin of each key in it: a flag, or a file's line."""
        return with_origins(message, self.origins)


# ---- entry points


def compose(command: str | type, argv: Sequence[str] = ()) -> tuple[Any, Resolved]:
    """A command's configuration from its command line (without the command); raises ShoalError.

    >>> config, resolved = compose("train", ["task=gsm8k", "optimizer.lr=1e-5"])

    Without a named preset, the task's preset lies beneath the command line.
    """
    config_type = dataclass_of(command)
    return load(config_type, read_arguments(config_type, argv))


def recompose(config_type: type, file: Path, arguments: Arguments) -> tuple[Any, Resolved]:
    """A stored configuration with the user's keys over it; a preset or file among the arguments is ignored.

    >>> config, resolved = recompose(Config, run / "config.yaml", resolved.arguments)
    """
    return load(config_type, arguments, file.absolute())


def from_overrides(config_type: type, /, **overrides: Any) -> tuple[Any, Resolved, tuple[Callable[..., Any], ...]]:
    """A configuration from keywords in Python: (configuration, its origins, reward functions given as callables).

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
        origin = PYTHON if name in names_of(config_type) else f"{PYTHON} {name}"
        entries.append(make_entry(name, value if isinstance(value, str | list) else str(value), origin))
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
    """The configuration of the arguments; `stored`: a run's configuration in place of presets and files."""
    chain = build_chain(config_type, arguments, stored)
    settings = chain.merged()
    values, late = values_of(config_type, chain, settings)
    origins = origins_of({key: chain.settled(one, late) for key, one in settings.items()})
    chain.errors += [message for setting, message in chain.conflicts if settings.get(setting.key) is setting]
    if chain.errors:
        raise ShoalError("; ".join(dict.fromkeys(chain.errors)))
    try:
        config = build(config_type, values)
    except ShoalError as error:
        raise ShoalError(with_origins(str(error), origins)) from None
    became = list(_report_lines(config_type, chain, settings, values, late))
    notes = _notes(config, chain, settings, bool(arguments.preset))
    text, difference = texts_of(config)
    name = chain.file.stem if chain.file else ""
    return config, Resolved(name, (*notes, *chain.notes, *(line for line, has_line in became if has_line)), text,
                            difference, arguments, tuple(line for line, _ in became), origins)


def given_values(config_type: type, arguments: Arguments, *names: str) -> dict[str, Any]:
    """The values of some keys in the user's own file and command line, without presets."""
    layers, _ = users_layers(config_type, arguments)
    settings = make_chain(config_type, [layer for layer in layers if layer.is_users]).merged()
    keys = keys_of(config_type)
    return {name: convert_value(keys[name], settings[name].value) for name in names if name in settings}


def packaged_values(config: Any) -> dict[str, Any]:
    """The values that a configuration's recipe and algorithm set, by dotted key."""
    layers = [layer for key in PACKAGED if (name := get_value(config, key))
              for layer in named_layers(type(config), key, name)]
    chain = make_chain(type(config), layers)
    return values_of(type(config), chain, chain.merged())[0]


# ---- notes


def _report_lines(config_type: type, chain: Chain, settings: Mapping[str, Setting], values: Mapping[str, Any],
                  late: Mapping[Late, tuple[Mapping[str, Any], str]]) -> Iterator[tuple[str, bool]]:
    """A line for each flag of another system among the user's own that is in effect, and whether it is a note of its
    own; the flags of a file that change nothing share one line."""
    idle: dict[int, list[str]] = {}
    keys = keys_of(config_type)
    for number, report in chain.reports:
        layer = chain.layers[number]
        in_effect = [one for one in report.settings if settings.get(one.key) is one and one.key in values]
        if not layer.is_users or (report.settings and not in_effect):
            continue
        if not report.settings and layer.file and not report.has_line:
            idle.setdefault(number, []).extend(report.flags)
            continue
        reason = report.meaning
        if len(in_effect) >= sum(one.rank == "own" for one in report.settings):  # else it names keys without effect
            reason = next((late[one.value][1] for one in in_effect if isinstance(one.value, Late)), reason)
        became = []
        for one in in_effect:
            before = next((found[one.key].value for found in reversed(chain.settings[:number]) if one.key in found),
                          keys[one.key].default)
            if isinstance(one.value, Late) and one.key not in late[one.value][0]:
                continue
            if one.rank == "own" or before != values[one.key]:
                text = shown(values[one.key]) or "''"
                became.append(f"{one.key}={text}")
        flags = ", ".join(f"{name}={text}" for name, text in report.flags.items())
        effect = f"became {', '.join(became)}" if became else "changes nothing here"
        yield f"{flags} {effect}" + (f": {reason}" if reason else ""), (
            report.has_line or (bool(reason) and not report.meaning))
    for number, names in idle.items():
        file = chain.layers[number].file
        assert file is not None
        yield f"{file.name}: {_count(names)} that change nothing here: {', '.join(names)}", True


def _count(names: Sequence[str]) -> str:
    return "1 key" if len(names) == 1 else f"{len(names)} keys"


def _notes(config: Any, chain: Chain, settings: Mapping[str, Setting], has_preset: bool) -> Iterator[str]:
    """Lines for the start: keys of a file that were skipped, a task's preset that was not loaded, and the values of
    presets in effect that differ from Shoal's defaults."""
    config_type, file = type(config), chain.file
    if file and (skipped := [name for layer in chain.layers for name in layer.skipped]):
        yield (f"{file} holds {_count(skipped)} that only training reads, passed over: {', '.join(skipped[:3])}"
               + (", ..." if len(skipped) > 3 else ""))
    if file and not is_packaged(file) and not has_preset and "task.name" in settings:
        preset = preset_of_task(command_of(config_type), config.task.name)
        beneath = make_chain(config_type, file_layers(config_type, preset, "")).merged() if preset else {}
        if preset and (left := [key for key in beneath if key not in settings]):
            yield (f"{file.name} does not load the preset of task={config.task.name} ({left[0]} and {len(left) - 1} "
                   f"more keep their defaults): `defaults: [{preset.stem}, _self_]` in the file loads it")
    keys = keys_of(config_type)
    changed: dict[str, list[str]] = {}
    for layer, found in zip(chain.layers, chain.settings, strict=True):
        folder = layer.label.partition(" ")[0]
        if layer.is_users or folder not in ("task", *PACKAGED.values()):
            continue
        for key, setting in found.items():
            value, default = get_value(config, key), keys[key].default
            if settings.get(key) is setting and value != default and key not in without_effect(config):
                ours = "" if folder == "task" else f" (ours: {shown(default) or 'empty'})"
                changed.setdefault(layer.label, []).append(f"{key}={shown(value)}{ours}")
    for label, texts in changed.items():
        folder, _, name = label.partition(" ")
        verb = "loads its preset" if folder == "task" else "differs from Shoal's defaults in"
        more = f" and {len(texts) - FEW} more keys (--dry-run lists them)" if len(texts) > MANY else ""
        yield f"{folder}={name} {verb}: {', '.join(texts[:FEW] if more else texts)}{more}"
