"""Reads YAML files as entries with their lines: nested keys get dotted names, `${...}` refers to other names.

    optimizer:          Entry("optimizer.lr", "1e-4", "mine.yml:2")
      lr: 1e-4
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.config.translator import Entry, make_entry, translator
from shoal.config.values import text_of
from shoal.text import did_you_mean
from shoal.types import ShoalError

PRESETS = Path(__file__).parent / "presets"
"""Presets as YAML files: a folder for each command, and one for algorithms."""

COMMAND_OF_PRESETS: Mapping[str, str] = {"doctor": "train", "plan": "train"}
"""Command -> the command whose presets it shares."""


def preset_folders(folder: str) -> tuple[Path, Path]:
    """The folders of a command's presets, or of those that a key names: ours, and the translator's."""
    folder = COMMAND_OF_PRESETS.get(folder, folder)
    return PRESETS / folder, translator().presets / folder


def presets_of(folder: str) -> list[str]:
    """Names of the packaged presets of a command, or of `recipe` or `algorithm`."""
    return sorted(file.stem for place in preset_folders(folder) for file in place.glob("*.yaml")) if folder else []


def packaged(folder: str, name: str) -> Path | None:
    """The file of a packaged preset."""
    places = (place / f"{name}.yaml" for place in preset_folders(folder)) if folder and name else ()
    return next((file for file in places if "/" not in name and file.is_file()), None)


def is_packaged(file: Path) -> bool:
    return file.is_relative_to(PRESETS) or file.is_relative_to(translator().presets)


def find_file(command: str, name: str) -> Path:
    """The file of `--config-name X` or of a word `X.yml`: an existing file, else the preset of that base name."""
    path = Path(name)
    is_yaml = path.suffix in (".yml", ".yaml")
    if is_yaml and path.is_file():
        return path.absolute()
    if found := packaged(command, path.stem if is_yaml else name):
        return found
    known = presets_of(command)
    if not known:
        raise ShoalError(f"{name}: expected a YAML file that exists; {command or 'this command'} has no presets")
    raise ShoalError(f"{name}: no preset or YAML file has this name{did_you_mean(path.stem, known) or ';'} "
                     f"Presets: {', '.join(known)}")


def read_files(command: str, file: Path, is_key: Callable[[str], bool], above: tuple[Path, ...] = ()) -> list[
        tuple[Path, list[Entry]]]:
    """A file's entries, and those of the files in its `defaults`, lowest first."""
    if file in above:
        through = f" through {above[-1]}" if above[-1] != file else ""
        raise ShoalError(f"{file}: its `defaults` lead back to itself{through}; remove that name")
    own, order = (file, []), ["_self_"]
    for name, value, line in _leaves(file, is_key):
        origin = f"{file.name}:{line}"
        if name == "defaults":
            order = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)
                     and not item.startswith("override ")]
        else:
            own[1].append(make_entry(name, value, origin))
    found = []
    for item in order if "_self_" in order else [*order, "_self_"]:
        if item == "_self_":
            found.append(own)
            continue
        beside = next((place for place in (file.parent / f"{item}{end}" for end in ("", ".yaml", ".yml"))
                       if place.is_file()), None)
        lower = beside or packaged(command, item)
        if lower is None:
            raise ShoalError(f"{file}: its `defaults` name {item}, which is no file in {file.parent} and no preset of "
                             f"{command or 'this command'}: {', '.join(presets_of(command)) or 'it has none'}")
        found += read_files(command, lower, is_key, (*above, file))
    return found


def _leaves(file: Path, is_key: Callable[[str], bool]) -> list[tuple[str, Any, int]]:
    """Every value with its dotted name and its line."""
    import yaml

    try:
        loader = yaml.SafeLoader(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            reason = "expected keys with values, as in `steps: 3`"
            raise ShoalError(f"{file} is empty: {reason}" if node is None else f"{file} cannot be read: {reason}")
        return list(_walk(loader, node, "", is_key, {}))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        cure = "; indent with spaces, YAML has no tabs" if "'\\t'" in str(error.problem) else ""
        raise ShoalError(f"{file} cannot be read: {line}{error.problem}{cure}") from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError, ValueError) as error:
        raise ShoalError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def _walk(loader: Any, node: Any, head: str, is_key: Callable[[str], bool], lines: dict[str, int]) -> Any:
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


# ---- ${...}

_REFERENCE = re.compile(r"(\\*)\$\{(?:([^${}]*)\})?")


def is_interpolated(value: Any) -> bool:
    return any("${" in item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str))


def interpolate(name: str, value: Any, get: Callable[[str], Any]) -> Any:
    """A value with `${other.name}`, `${.sibling}`, `${oc.env:NAME,default}` and `${oc.select:name,default}` replaced;
    `\\${` is a plain `${`. `get` raises KeyError for a name that does not exist."""
    if isinstance(value, list):
        return [interpolate(name, item, get) for item in value]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole and not whole[1] and whole[2] is not None:
        return _referred(name, whole[2], get)

    def one(match: re.Match[str]) -> str:
        slashes, inside = "\\" * (len(match[1]) // 2), match[2]
        if len(match[1]) % 2 or inside is None:
            return slashes + "${" + ("" if inside is None else inside + "}")
        return slashes + text_of(_referred(name, inside, get))

    return _REFERENCE.sub(one, value)


def _referred(name: str, reference: str, get: Callable[[str], Any]) -> Any:
    resolver, colon, rest = reference.partition(":")
    wanted, comma, default = (part.strip() for part in (rest if colon else resolver).partition(","))
    if resolver == "oc.env" and colon:
        found = os.environ.get(wanted, default if comma else None)
    else:
        if wanted.startswith("."):
            parts, up = name.split("."), len(wanted) - len(wanted.lstrip("."))
            wanted = ".".join([*parts[:-up], wanted.lstrip(".")])
        try:
            found = get(wanted)
        except KeyError:
            found = default if resolver == "oc.select" and comma else None
    if found is None:
        raise ShoalError(f"{name}: ${{{reference}}} refers to nothing that is set")
    return found


def escape(text: str) -> str:
    """Text in which `interpolate` finds nothing to replace."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)
