"""From presets and overrides to the frozen dataclasses, and back to YAML.

    argv -> arguments.rewrite -> Hydra (presets, overrides, interpolations) -> plain values -> convert -> Config

Hydra composes untyped YAML only; types, unknown keys and ranges are this package's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.config.aliases import FOREIGN, foreign_of
from shoal.config.arguments import (
    ALIASES,
    COMMA_LISTS,
    EITHER,
    Arguments,
    Gathered,
    aliases_of,
    escape_interpolation,
    key_of,
    names_of,
    quote,
    rewrite,
    split_list,
)
from shoal.config.convert import build, convert_value, leaves_of
from shoal.config.convert import convert as convert
from shoal.config.derivations import DERIVATIONS
from shoal.config.foreign import Became, Values, text_of
from shoal.config.help import shown
from shoal.config.keys import command_of, dataclass_of, keys_of, sections_of
from shoal.config.schema import Config
from shoal.text import nearest
from shoal.types import ShoalError

PRESETS = Path(__file__).parent / "presets"
"""A folder a command, a YAML file a preset."""

PRESET_FOLDERS: Mapping[str, str] = {"doctor": "train"}
"""Commands that take the presets of another."""


class Layer(Protocol):
    """What lies over and under other settings: values by key, and flags of other systems that need other settings."""

    @property
    def settled(self) -> Mapping[str, Any]: ...
    @property
    def derived(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Resolved:
    """Where a configuration came from, and its text for the run folder."""

    config_name: str  # the preset or file that was composed; empty for none
    overrides: tuple[str, ...]  # in Hydra's grammar
    notes: tuple[str, ...]  # lines to show: what a task's preset set, what a file's keys were passed over
    text: str  # every key, as YAML that composes to the same configuration
    difference: str  # the keys that differ from the defaults, likewise
    arguments: Arguments  # what the user gave
    became: tuple[str, ...] = ()  # a line for each flag of another system that was given


def compose(command: str | type, argv: Sequence[str] = ()) -> tuple[Any, Resolved]:
    """A command's configuration from its command line (without the command); raises ShoalError.

    >>> config, resolved = compose("train", ["task=gsm8k", "optimizer.lr=1e-5"])

    Where no preset is named, the one with the task's name is composed first, under the user's own keys.
    """
    config_type = dataclass_of(command)
    return compose_arguments(config_type, rewrite(config_type, argv))


def compose_arguments(config_type: type, arguments: Arguments) -> tuple[Any, Resolved]:
    """The same from a command line that is rewritten already."""
    return _compose(config_type, arguments)


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
    gathered, functions = Gathered(config_type), ()
    for name, value in leaves_of(config_type, nested_names(overrides)):
        key = key_of(config_type, name)
        if key and key.name in COMMA_LISTS and isinstance(value, str):
            value = split_list(key, value)
        if key and key.name == "reward.functions":
            value, functions = _take_callables(value)
        gathered.add(name, _texts(value) if key and key.is_list else _text(value))
    return *_compose(config_type, gathered.arguments(str(config_name))), functions


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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _texts(value: Any) -> list[str]:
    return [_text(item) for item in value] if isinstance(value, list | tuple) else [_text(value)]


def _compose(config_type: type, arguments: Arguments, file: Path | None = None) -> tuple[Any, Resolved]:
    """Defaults < a task's preset < recipe < algorithm < file < own keys; a recipe or algorithm that is named among the
    own keys lies over the file. Then what other systems' flags become of all that."""
    command, name, task_preset, own = command_of(config_type), arguments.config_name, None, arguments.values
    if not name and not file:
        own_data = "custom" if "data.train_files" in arguments.derived else ""
        task_preset = _preset(command, str(own.get("task.name", own_data)))
    file = file or task_preset or (find_preset(command, name) if name else None)
    values, passed = _pass_over(config_type, compose_values(command, file, arguments.overrides))
    layer = _layer(config_type, values, own, file)
    named = {key: str(source.get(key) or "") for key in PACKAGED if key in keys_of(config_type)
             for source in ([own] if key in own else [layer.settled])}
    packaged = {key: _packaged(config_type, key, chosen) for key, chosen in named.items() if chosen}
    under = [packaged[key] for key in packaged if key not in own and not task_preset]
    over = [packaged[key] for key in packaged if key in own or task_preset]
    layers = [*under, layer, *over, arguments]
    flat = _merge([one.settled for one in layers])
    derived = _derive(config_type, flat, layers)
    config = build(config_type, {key: convert_value(keys_of(config_type)[key], value) for key, value in flat.items()})
    notes = [*_passed_notes(file, passed), *_task_notes(command, config, layer.settled, own, file, task_preset)]
    if task_preset:
        above = _merge([one.settled for one in (*over, arguments)])
        notes += _preset_notes(task_preset.stem, convert(config_type, _nest(layer.settled)), above)
    for key, one in packaged.items():
        place = layers.index(one)
        higher = _merge([later.settled for later in layers[place + 1:]])
        theirs = [values for found, values, _ in derived if found == place]
        notes += _packaged_notes(key, named[key], config, _merge([one.settled, *theirs]), higher)
    users = (arguments,) if file and file.is_relative_to(PRESETS) else (layer, arguments)
    told = [*(one for theirs in users for one in theirs.became),
            *(one for place, _, one in derived if layers[place] in users)]
    mine = [left for one in told if (left := _standing(one, flat))]
    notes += [*arguments.notes, *(one.line for one in mine if one.said)]
    return config, Resolved(str(file.stem if file else ""), arguments.overrides, tuple(notes), to_yaml(config),
                            to_yaml(_nest(difference_from_defaults(config))), arguments,
                            tuple(one.line for one in mine))


def _layer(config_type: type, values: Mapping[str, Any], own: Mapping[str, Any], file: Path | None) -> Gathered:
    """A file's keys (those of `own` apart, which Hydra has put over them) and its flags of other systems."""
    gathered, names = Gathered(config_type, str(file or "")), names_of(config_type)
    leaves = [(name, value) for name, value in leaves_of(config_type, values) if names.get(name) not in own]
    for name, value in sorted(leaves, key=lambda leaf: leaf[0] in names):
        gathered.add(name, value)
    return gathered


def _merge(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Later layers over earlier ones; one that sets prompts a step ends prompts a device."""
    flat: dict[str, Any] = {}
    for layer in layers:
        flat |= layer
        if EITHER[0] in layer and EITHER[1] not in layer and EITHER[1] in flat:
            flat[EITHER[1]] = "0"
    return flat


def _derive(config_type: type, flat: dict[str, Any], layers: Sequence[Layer]) -> list[tuple[int, Values, Became]]:
    """Adds to `flat` what other systems' flags become that need other settings. What they become lies where the
    topmost of them stands: keys of the layers above stay, and on the line those that stand behind them. Returns, for
    each group of flags, that layer's number, what they became, and a line on it."""
    keys, last, told = keys_of(config_type), len(layers) - 1, []

    def get(key: str) -> Any:
        return convert_value(keys[key], flat[key]) if key in flat else keys[key].default

    for group, derivation in DERIVATIONS.items():
        places = [(place, name, text) for place, layer in enumerate(layers) for name, text in layer.derived.items()
                  if FOREIGN[name].group == group]
        given = {name: text for _, name, text in places}
        if not given:
            continue
        top = max(place for place, _, _ in places)
        fixed = {key for layer in layers[min(top + 1, last):] for key in layer.settled}
        fixed |= set(EITHER) if fixed & set(EITHER) else set()
        wanted = [key for name in given for key in FOREIGN[name].keys]
        if wanted and all(key in fixed for key in wanted):
            continue
        found, said = derivation(given, get)
        values = {key: value for key, value in found.items() if key in keys and key not in fixed}
        flat |= _merge([values]) | ({EITHER[1]: "0"} if EITHER[0] in values and EITHER[1] not in values else {})
        *first, (name, text) = given.items()
        joined = "".join(f"{one}={value}, " for one, value in first)
        whole = "" if set(values) < set(found) & set(keys) else said  # else it tells of what does not stand
        told.append((top, values, Became(joined + name, text, values, whole, said=bool(said))))
    return told


def _standing(one: Became, flat: Mapping[str, Any]) -> Became | None:
    """What a flag became, without the values that gave way to another setting; None where all did."""
    left = {key: value for key, value in one.values.items() if text_of(flat.get(key)) == text_of(value)}
    return dataclasses.replace(one, values=left) if left or not one.values else None


PACKAGED: Mapping[str, str] = {"recipe": "recipe", "algorithm.name": "algorithm"}
"""Key that names a packaged set of settings -> the folder of presets that holds them, a file each."""


def _packaged(config_type: type, key: str, name: str) -> Gathered:
    """What a recipe or an algorithm sets."""
    folder = PRESETS / PACKAGED[key]
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in known:
        near = f", did you mean {nearest(name, known)}?" if known else ";"
        raise ShoalError(f"{PACKAGED[key]}={name}: there is no such {PACKAGED[key]}{near} There are: "
                         f"{', '.join(known) or 'none'}")
    file = folder / f"{name}.yaml"
    return _layer(config_type, compose_values("", file), {}, file)


def brought_by_name(config: Any) -> dict[str, Any]:
    """What the recipe and the algorithm that a configuration names set, by dotted key."""
    named = {key: get_value(config, key) for key in PACKAGED}
    return _merge([_packaged(type(config), key, name).settled for key, name in named.items() if name])


def _packaged_notes(key: str, name: str, config: Any, values: Mapping[str, Any],
                    higher: Mapping[str, Any]) -> list[str]:
    """One line on what a recipe or an algorithm sets that differs from the defaults and stands."""
    keys = keys_of(type(config))
    stands = {one: get_value(config, one) for one, value in values.items()
              if one not in higher and get_value(config, one) == convert_value(keys[one], value)}
    changed = [f"{one}={shown(value)} (ours: {shown(keys[one].default) or 'empty'})" for one, value in stands.items()
               if value != keys[one].default]
    return [f"{PACKAGED[key]}={name} differs from Shoal's defaults in: {', '.join(changed)}"] if changed else []


def _pass_over(config_type: type, values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """A file's values without the keys that only training reads, where another command reads it; and these keys."""
    if issubclass(config_type, Config):
        return dict(values), []
    names, sections = names_of(config_type), sections_of(config_type)
    kept, passed = {}, []
    for part, value in values.items():
        name = f"{prefix}{part}"
        section = name in sections_of(Config) or any(known.startswith(f"{name}.") for known in FOREIGN)
        if section and (isinstance(value, Mapping) or (value is None and name not in sections)):
            inside, below = _pass_over(config_type, value or {}, f"{name}.")
            passed += below
            if inside or name in sections:
                kept[part] = inside
        elif name not in names and (name in names_of(Config) or name in FOREIGN) and not foreign_of(
                config_type, name, text_of(value)):
            passed.append(name)
        else:
            kept[part] = value
    return kept, passed


def _passed_notes(file: Path | None, passed: Sequence[str]) -> tuple[str, ...]:
    shown = ", ".join(passed[:3]) + (", ..." if len(passed) > 3 else "")
    count = "1 key" if len(passed) == 1 else f"{len(passed)} keys"
    return (f"{file} holds {count} that only training reads, passed over: {shown}",) if passed else ()


def _task_notes(command: str, config: Any, file_keys: Mapping[str, Any], own: Mapping[str, Any], file: Path | None,
                task_preset: Path | None) -> tuple[str, ...]:
    """That a task's preset is not brought under a user's file, where it would change something."""
    if task_preset or file is None or file.is_relative_to(PRESETS) or "task.name" not in {**file_keys, **own}:
        return ()
    preset = _preset(command, config.task.name)
    values = _layer(type(config), compose_values(command, preset), {}, preset).settled if preset else {}
    left = [key for key in values if key not in file_keys and key not in own]
    if not left:
        return ()
    return (f"{file.name} is not laid over the preset of task={config.task.name} ({left[0]} and {len(left) - 1} more "
            f"stay as they are): `defaults: [{config.task.name}, _self_]` in the file brings it",)


def _preset_notes(name: str, preset: Any, own: Mapping[str, Any]) -> tuple[str, ...]:
    """One line naming what a task's preset changes from the defaults, the user's own keys apart."""
    changed = [f"{key}={shown(value)}" for key, value in difference_from_defaults(preset).items() if key not in own]
    return (f"task={name} brings its preset: {', '.join(changed)}",) if changed else ()


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
        yield (file.parent if file else PRESETS / "train"), []  # a folder beside a key of its name would be a group
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
