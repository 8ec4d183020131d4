"""Reads YAML files as entries with their lines: nested keys get dotted names.

optimizer:          Entry("optimizer.lr", "1e-4", "mine.yml:2")
  lr: 1e-4
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.config.foreign import Entry, make_entry, translator
from shoal.text import did_you_mean
from shoal.types import ShoalError

PRESETS = Path(__file__).parent / "presets"
"""Presets as YAML files: a folder for each command, and one for algorithms."""

COMMAND_OF_PRESETS: Mapping[str, str] = {"doctor": "train", "plan": "train"}
"""Command -> the command whose presets it shares."""


def preset_folders(folder: str) -> tuple[Path, Path]:
    """The folders of a command's presets, or of those that a key names: ours, and the
    translator's."""
    folder = COMMAND_OF_PRESETS.get(folder, folder)
    return PRESETS / folder, translator().presets / folder


def presets_of(folder: str) -> list[str]:
    """Names of the packaged presets of a command, or of `recipe` or `algorithm`."""
    return (
        sorted(file.stem for place in preset_folders(folder) for file in place.glob("*.yaml"))
        if folder
        else []
    )


def packaged(folder: str, name: str) -> Path | None:
    """The file of a packaged preset."""
    places = (place / f"{name}.yaml" for place in preset_folders(folder)) if folder and name else ()
    return next((file for file in places if "/" not in name and file.is_file()), None)


def is_packaged(file: Path) -> bool:
    """True for a preset of ours or the translator's."""
    return file.is_relative_to(PRESETS) or file.is_relative_to(translator().presets)


def find_file(command: str, name: str) -> Path:
    """The file of `--config-name X` or of a word `X.yml`: an existing file, else the preset of that
    base name."""
    path = Path(name)
    is_yaml = path.suffix in (".yml", ".yaml")
    if is_yaml and path.is_file():
        return path.absolute()
    if found := packaged(command, path.stem if is_yaml else name):
        return found
    known = presets_of(command)
    if not known:
        raise ShoalError(
            f"{name}: expected a YAML file that exists; {command or 'this command'} has no presets"
        )
    raise ShoalError(
        f"{name}: no preset or YAML file has this name{did_you_mean(path.stem, known) or '.'} "
        f"Presets: {', '.join(known)}"
    )


def read_files(
    command: str, file: Path, is_key: Callable[[str], bool], above: tuple[Path, ...] = ()
) -> list[tuple[Path, list[Entry]]]:
    """A file's entries, and those of the files in its `defaults`, lowest first."""
    if file in above:
        through = f" through {above[-1]}" if above[-1] != file else ""
        raise ShoalError(f"{file}: its `defaults` lead back to itself{through}; remove that name")
    own, order = (file, []), ["_self_"]
    for name, value, line in _leaves(file, is_key):
        origin = f"{file.name}:{line}"
        if name == "defaults":
            order = [
                item
                for item in (value if isinstance(value, list) else [value])
                if isinstance(item, str) and not item.startswith("override ")
            ]
        else:
            own[1].append(make_entry(name, value, origin))
    found = []
    for item in order if "_self_" in order else [*order, "_self_"]:
        if item == "_self_":
            found.append(own)
            continue
        beside = next(
            (
                place
                for place in (file.parent / f"{item}{end}" for end in ("", ".yaml", ".yml"))
                if place.is_file()
            ),
            None,
        )
        lower = beside or packaged(command, item)
        if lower is None:
            raise ShoalError(
                f"{file}: its `defaults` name {item}, which is no file in {file.parent} and no "
                f"preset of "
                f"{command or 'this command'}: {', '.join(presets_of(command)) or 'it has none'}"
            )
        found += read_files(command, lower, is_key, (*above, file))
    return found


def flat_values(file: Path) -> dict[str, Any]:
    """A file's values by dotted name, none of an empty one. ShoalError where it is not there or is
    no YAML of names and values."""
    try:
        is_empty = not file.read_bytes().strip()
    except OSError as error:
        raise ShoalError(f"{file} cannot be read: {error.strerror}") from error
    return {} if is_empty else {name: value for name, value, _ in _leaves(file, lambda _: False)}


def _leaves(file: Path, is_key: Callable[[str], bool]) -> list[tuple[str, Any, int]]:
    """Every value with its dotted name and its line."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        try:  # libyaml's takes a tenth of the time; what is wrong the other says better
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
            node = loader.get_single_node()
        except yaml.YAMLError:
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            reason = "expected keys with values, as in `steps: 3`"
            raise ShoalError(
                f"{file} is empty: {reason}" if node is None else f"{file} cannot be read: {reason}"
            )
        return list(_walk(loader, node, "", is_key, {}))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ShoalError(f"{file} cannot be read: {line}{error.problem}") from error
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise ShoalError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    except (
        LookupError,
        AttributeError,
        TypeError,
    ) as error:  # PyYAML's, of `!!int ""` or `!!bool foo`
        raise ShoalError(
            f"{file} cannot be read: a value is not what its tag `!!...` says: leave tags out"
        ) from error


def _walk(
    loader: Any, node: Any, head: str, is_key: Callable[[str], bool], lines: dict[str, int]
) -> Any:
    import yaml

    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        name, line = f"{head}{loader.construct_object(key_node)}", key_node.start_mark.line + 1
        if name in lines:
            raise ValueError(f"lines {lines[name]} and {line} both set {name}")
        lines[name] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value and not is_key(name):
            yield from _walk(loader, value_node, f"{name}.", is_key, lines)
        else:
            yield name, loader.construct_object(value_node, deep=True), line
