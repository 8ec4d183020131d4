"""From presets and overrides to the frozen dataclasses, and back to YAML.

    argv -> arguments.rewrite -> Hydra (presets, overrides, interpolations) -> plain values -> convert -> Config

Hydra composes untyped YAML only; types, unknown keys and ranges are this package's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from shoal.config.arguments import (
    ALIASES,
    Arguments,
    aliases_of,
    escape_interpolation,
    find_key,
    names_of,
    quote,
    rewrite,
)
from shoal.config.keys import Key, command_of, dataclass_of, keys_of, nearest, sections_of
from shoal.config.schema import Config
from shoal.types import ShoalError

PRESETS = Path(__file__).parent / "presets"
"""A folder a command, a YAML file a preset."""

PRESET_FOLDERS: Mapping[str, str] = {"doctor": "train"}
"""Commands that take the presets of another."""


@dataclass(frozen=True)
class Resolved:
    """Where a configuration came from, and its text for the run folder."""

    config_name: str  # the preset or file that was composed; empty for none
    overrides: tuple[str, ...]  # in Hydra's grammar
    notes: tuple[str, ...]  # lines to show: what a task's preset set, what a file's keys were passed over
    text: str  # every key, as YAML that composes to the same configuration
    difference: str  # the keys that differ from the defaults, likewise
    arguments: Arguments  # what the user gave


def compose(command: str | type, argv: Sequence[str] = ()) -> tuple[Any, Resolved]:
    """A command's configuration from its command line (without the command); raises ShoalError.

    >>> config, resolved = compose("train", ["task=gsm8k", "optimizer.lr=1e-5"])

    Where no preset is named, the one with the task's name is composed first, under the user's own keys.
    """
    config_type = dataclass_of(command)
    return _compose(config_type, rewrite(config_type, argv))


def recompose(config_type: type, file: Path, arguments: Arguments) -> tuple[Any, Resolved]:
    """A stored configuration with the user's own keys over it; the preset or file that they named is left out.

    >>> config, resolved = recompose(Config, run / "config.yaml", resolved.arguments)
    """
    return _compose(config_type, arguments, file.absolute())


def from_overrides(config_type: type, /, **overrides: Any) -> tuple[Any, Resolved, tuple[Callable[..., Any], ...]]:
    """The same from Python: (configuration, where it came from, reward functions given as callables).

    >>> from_overrides(Config, model="tiny", optimizer={"lr": 1e-5}, batch__group_size=4, reward=my_reward)

    Keys may be nested dicts, joined by `__` or by dots, or aliases; `config_name` names a preset or a file.
    """
    config_name = overrides.pop("config_name", "")
    values, functions = {}, ()
    for key, value in _flatten(config_type, _nested_names(overrides)):
        if key.name == "reward.functions":
            value, functions = _take_callables(value)
        values.pop(key.name, None)
        values[key.name] = _texts(value) if key.is_list else _text(value)
    words = tuple(f"++{key}={quote(value)}" for key, value in values.items())
    return *_compose(config_type, Arguments(str(config_name), values, words)), functions


def _nested_names(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`a__b` as `a.b`, at any depth."""
    return {str(name).replace("__", "."): _nested_names(value) if isinstance(value, Mapping) else value
            for name, value in overrides.items()}


def _take_callables(value: Any) -> tuple[list[Any], tuple[Callable[..., Any], ...]]:
    items = list(value) if isinstance(value, list | tuple) else [value]
    functions = tuple(item for item in items if callable(item))
    if functions and len(functions) < len(items):
        raise ShoalError(f"reward={value!r}: expected functions, or names of the form file.py:function, not both: "
                         "import the named ones and give them as functions")
    return ([], functions) if functions else (items, ())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _texts(value: Any) -> list[str]:
    return [_text(item) for item in value] if isinstance(value, list | tuple) else [_text(value)]


def _compose(config_type: type, arguments: Arguments, file: Path | None = None) -> tuple[Any, Resolved]:
    command, name, task_preset = command_of(config_type), arguments.config_name, None
    if not name and not file:
        task_preset = _preset(command, str(arguments.values.get("task.name", "")))
    file = file or task_preset or (find_preset(command, name) if name else None)
    values, passed = _pass_over(config_type, compose_values(command, file, arguments.overrides))
    config = convert(config_type, values, arguments.values)
    notes = _passed_notes(file, passed)
    if task_preset:
        preset = convert(config_type, compose_values(command, task_preset))
        notes += _preset_notes(task_preset.stem, preset, arguments.values)
    return config, Resolved(str(file.stem if file else ""), arguments.overrides, notes, to_yaml(config),
                            to_yaml(_nest(difference_from_defaults(config))), arguments)


def _pass_over(config_type: type, values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """A file's values without the keys that only training reads, where another command reads it; and these keys."""
    if issubclass(config_type, Config):
        return dict(values), []
    names, sections = names_of(config_type), sections_of(config_type)
    kept, passed = {}, []
    for part, value in values.items():
        name = f"{prefix}{part}"
        if name in sections_of(Config) and (isinstance(value, Mapping) or (value is None and name not in sections)):
            inside, below = _pass_over(config_type, value or {}, f"{name}.")
            passed += below
            if inside or name in sections:
                kept[part] = inside
        elif name in names_of(Config) and name not in names:
            passed.append(name)
        else:
            kept[part] = value
    return kept, passed


def _passed_notes(file: Path | None, passed: Sequence[str]) -> tuple[str, ...]:
    shown = ", ".join(passed[:3]) + (", ..." if len(passed) > 3 else "")
    count = "1 key" if len(passed) == 1 else f"{len(passed)} keys"
    return (f"{file} holds {count} that only training reads, passed over: {shown}",) if passed else ()


def _preset_notes(name: str, preset: Any, own: Mapping[str, Any]) -> tuple[str, ...]:
    """One line naming what a task's preset changes from the defaults, the user's own keys apart."""
    changed = [f"{key}={_shown(value)}" for key, value in difference_from_defaults(preset).items() if key not in own]
    return (f"task={name} brings its preset: {', '.join(changed)}",) if changed else ()


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- presets


def presets_of(command: str) -> list[str]:
    """Names of the packaged presets of a command."""
    return sorted(file.stem for file in _folder(command).glob("*.yaml")) if command else []


def _folder(command: str) -> Path:
    return PRESETS / PRESET_FOLDERS.get(command, command)


def _preset(command: str, name: str) -> Path | None:
    return _folder(command) / f"{name}.yaml" if name in presets_of(command) else None


def find_preset(command: str, name: str) -> Path:
    """The file that `--config-name` or a leading `X.yml` means: one that exists, else a preset by its base name."""
    path = Path(name)
    is_yaml = path.suffix in (".yml", ".yaml")
    if is_yaml and path.is_file():
        return path.absolute()
    if found := _preset(command, path.stem if is_yaml else name):
        return found
    known = presets_of(command)
    if not known:
        raise ShoalError(f"{name}: expected a YAML file that exists; {command or 'this command'} has no presets")
    raise ShoalError(f"{name}: there is no such preset or YAML file, did you mean {nearest(path.stem, known)}? "
                     f"Presets: {', '.join(known)}")


def compose_values(command: str, file: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Hydra's composition of a file; its `defaults` are looked for beside it and among the command's presets."""
    import hydra
    import yaml
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    name = file.stem if file else None
    try:
        with _search_path(command, file) as (folder, options), _hydra(folder):
            if overrides and file:
                options += _short_forms(hydra.compose(name, options))
            composed = hydra.compose(name, [*options, *overrides])
            values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ShoalError(f"{file or 'the overrides'} cannot be composed: {_reason(error)}") from error
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def _short_forms(composed: Any) -> list[str]:
    """Overrides that spell out a file's `model: X`, so that one of `model.dtype` does not replace it."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(values, dict)
    words = []
    for name, value in ((str(name), value) for name, value in values.items()):
        section, _, key = ALIASES[name].key.partition(".") if name in ALIASES else ("", "", "")
        if section == name and value is not None and not isinstance(value, Mapping):
            words.append(f"++{name}={{{key}: {quote(_texts(value) if isinstance(value, list) else str(value))}}}")
    return words


def _reason(error: Exception) -> str:
    """A reader's error in one line, without the folders it looked in."""
    text = " ".join(str(error.__cause__ or error).split())
    return re.sub(r'in "[^"]*", ', "", text).partition(" Config search path")[0]


@contextlib.contextmanager
def _search_path(command: str, file: Path | None) -> Iterator[tuple[Path, list[str]]]:
    """The folder of a file and Hydra's options, so that files may build on presets; Hydra wants the name `.yaml`."""
    if file is None or file.is_relative_to(PRESETS):
        yield (file.parent if file else PRESETS), []
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copyfile(file, folder / f"{file.stem}.yaml")
        places = [f"file://{place}" for place in (file.parent, _folder(command)) if place.is_dir()]
        yield folder, [f"hydra.searchpath={quote(places)}"]


@contextlib.contextmanager
def _hydra(folder: Path) -> Iterator[None]:
    """Hydra on a folder; a Hydra application that calls us finds its own state as it was."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(folder), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


# ---- conversion


def convert(config_type: type, values: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Any:
    """Plain nested values, with `own` by dotted key over them, as the frozen dataclass.

    Raises ShoalError naming the key, what came and what is allowed.
    """
    flat = {key.name: value for key, value in _flatten(config_type, values)} | dict(own or {})
    keys = keys_of(config_type)
    return _build(config_type, {name: convert_value(keys[name], value) for name, value in flat.items()})


def _flatten(config_type: type, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[Key, Any]]:
    """Every value with its key; sections are entered, aliases replaced by what they stand for."""
    keys, sections = keys_of(config_type), sections_of(config_type)
    for part, value in values.items():
        name = f"{prefix}{part}"
        if isinstance(value, Mapping) and name not in keys and (value or name in sections):
            yield from _flatten(config_type, value, f"{name}.")
        elif value is not None or name not in sections:
            yield find_key(config_type, name), value


def _build(config_type: type, values: Mapping[str, Any]) -> Any:
    """The dataclass from values by dotted key; what is not given takes its default."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):
        if field.name in values:
            arguments[field.name] = values[field.name]
        elif dataclasses.is_dataclass(field.default_factory):
            head = f"{field.name}."
            inside = {name.removeprefix(head): value for name, value in values.items() if name.startswith(head)}
            arguments[field.name] = _build(field.default_factory, inside)  # type: ignore[arg-type]
    return config_type(**arguments)


def convert_value(key: Key, value: Any) -> Any:
    """A value as the type of its key."""
    if not key.is_list:
        return _convert_scalar(key, key.type, value)
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_convert_scalar(key, get_args(key.type)[0], item) for item in items)


def _convert_scalar(key: Key, wanted: Any, value: Any) -> Any:
    if get_origin(wanted) is Literal:
        allowed = get_args(wanted)
        if value in allowed and isinstance(value, str):
            return value
        raise _wrong_type(key, value, f"one of {', '.join(allowed)}")
    try:
        return _CONVERTERS[wanted](value)
    except (ValueError, OverflowError):
        raise _wrong_type(key, value, _WANTED[wanted]) from None


def _wrong_type(key: Key, value: Any, wanted: str) -> ShoalError:
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return ShoalError(f"{key.name}={shown}: expected {wanted}")


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    raise ValueError


def _to_int(value: Any) -> int:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    number = _to_float(value)
    if not number.is_integer():
        raise ValueError
    return value if isinstance(value, int) else int(number)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_CONVERTERS: Mapping[Any, Callable[[Any], Any]] = {str: _to_text, bool: _to_bool, int: _to_int, float: _to_float}
_WANTED: Mapping[Any, str] = {str: "text (in YAML, put it in quotes)", bool: "true or false", int: "a whole number",
                              float: "a finite number"}


# ---- back to text


def get_value(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values: what JSON and YAML hold. `convert` makes the same configuration of them."""
    return _nest({name: get_value(config, name) for name in keys_of(type(config))})


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = list(value) if isinstance(value, tuple) else value
    return nested


def difference_from_defaults(config: Any) -> dict[str, Any]:
    """Dotted key -> value, of the keys that are not at their default."""
    return {name: get_value(config, name) for name, key in keys_of(type(config)).items()
            if get_value(config, name) != key.default}


def to_yaml(config: Any) -> str:
    """A configuration, or plain nested values, as YAML that composes to the same."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes also the texts that Hydra's reader, unlike YAML 1.1, takes for numbers: 1e-4."""

    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+.\d][-+.\d_eE]*\Z"), list("-+.0123456789"))
    Dumper.add_representer(str, lambda dumper, value: dumper.represent_scalar(
        "tag:yaml.org,2002:str", escape_interpolation(value)))
    values = to_dict(config) if dataclasses.is_dataclass(config) else config
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000) if values else ""


def texts_of(config: Any) -> tuple[str, str]:
    """A configuration as YAML: every key, and the keys that differ from the defaults."""
    return to_yaml(config), to_yaml(_nest(difference_from_defaults(config)))


def require_given(config: Any, *keys: str) -> None:
    """Raises ShoalError for the first of these keys that is empty, with its meaning."""
    short = {alias.key: name for name, alias in aliases_of(type(config)).items()}
    for key in keys:
        if not get_value(config, key):
            name = short.get(key, key)
            raise ShoalError(f"{name} is not given: write {name}=..., {keys_of(type(config))[key].help}")
