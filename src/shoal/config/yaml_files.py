"""Reads YAML files into settings (names with values), each with its line, and replaces `${...}` in
values, which refers to other names like in Hydra's files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.config.arguments import Setting, make_setting
from shoal.config.key import text_of
from shoal.config.preset_files import packaged, preset_of_own_file, presets_of
from shoal.records import ShoalError


def read_files(
    command: str, file: Path, is_key: Callable[[str], bool], above: tuple[Path, ...] = ()
) -> list[tuple[Path, list[Setting]]]:
    """Returns (file, its settings) for the files in the `defaults` of a file and for the file
    itself, lowest first. `_self_` in `defaults` is the place of the file itself, by default the
    last; entries `override ...` are skipped. An entry is a file in the same folder, with or without
    its ending, or else a preset of the command; the own file of another system
    (`preset_of_own_file`) is the preset that has its settings, which is listed once, and is skipped
    if the command has no such preset. A mapping, `actor@actor_rollout_ref.actor: dp_actor`, is read
    as `actor/dp_actor` if that is such an own file, else skipped. The origin of each setting is
    `FILE:LINE`. Another file that two `defaults` lead to is listed twice.

    `is_key`: True for the name of a key, whose value may be a mapping; `above`: the files whose
    `defaults` led here, to find circles. Raises ShoalError if a file is missing or cannot be read,
    or leads back to itself."""
    if file in above:
        through = ""
        if above[-1] != file:
            through = f" through {above[-1]}"
        raise ShoalError(f"{file}: its `defaults` lead back to itself{through}; remove that name")
    own: list[Setting] = []
    order = ["_self_"]
    for name, value, line in _leaves(file, is_key):
        origin = f"{file.name}:{line}"
        if name == "defaults":
            order = []
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    order += _own_files_in(item)
                elif isinstance(item, str) and not item.startswith("override "):
                    order.append(item)
        else:
            own.append(make_setting(name, value, origin))
    if "_self_" not in order:
        order.append("_self_")
    files: list[tuple[Path, list[Setting]]] = []
    for item in order:
        if item == "_self_":
            files.append((file, own))
            continue
        lower = _file_beside(file, item) or packaged(command, item)
        preset = preset_of_own_file(item)
        if lower is None and preset:
            lower = packaged(command, preset)
            if lower is None or lower in [path for path, _ in files]:
                continue
        if lower is None:
            presets = ", ".join(presets_of(command)) or "none"
            raise ShoalError(
                f"{file}: its `defaults` name {item}, which is not a file in {file.parent} and no "
                f"preset of {command or 'this command'}: put the file there, or remove the entry; "
                f"the presets are {presets}"
            )
        files += read_files(command, lower, is_key, (*above, file))
    return files


def _own_files_in(entry: Mapping[Any, Any]) -> list[str]:
    """Returns the own files of other systems (`preset_of_own_file`) that a mapping in `defaults`
    names; [] if there are none.

    >>> _own_files_in({"actor@actor_rollout_ref.actor": "dp_actor"})
    ['actor/dp_actor']
    """
    names = []
    for group, option in entry.items():
        words = str(group).removeprefix("override ").removeprefix("optional ")
        name = f"{words.partition('@')[0]}/{option}"
        if preset_of_own_file(name):
            names.append(name)
    return names


def _file_beside(file: Path, name: str) -> Path | None:
    """Returns the file of this name in the folder of another file: with the name as it is, else
    with .yaml, else with .yml; None if there is none."""
    for ending in ("", ".yaml", ".yml"):
        path = file.parent / f"{name}{ending}"
        if path.is_file():
            return path
    return None


def flat_values(file: Path, whole: Collection[str] = ()) -> dict[str, Any]:
    """Returns a file's values by dotted name, in YAML's types; {} if it is empty. Non-empty
    mappings are flattened, but for those whose names are in `whole`. Raises ShoalError if the file
    does not exist or is not YAML of names and values."""
    try:
        is_empty = not file.read_bytes().strip()
    except OSError as error:
        raise ShoalError(f"{file} cannot be read: {error.strerror}") from error
    if is_empty:
        return {}
    return {name: value for name, value, _ in _leaves(file, whole.__contains__)}


def _leaves(file: Path, is_key: Callable[[str], bool]) -> list[tuple[str, Any, int]]:
    """Returns (dotted name, value, line) for every value in a YAML file; lines count from 1. The
    value of a key (`is_key` is true for its name) may be a mapping; other mappings are flattened
    unless they are empty. Raises ShoalError if the file is empty or cannot be read, or sets a name
    twice."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        try:  # libyaml's loader takes a tenth of the time; the other one has better messages
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
            node = loader.get_single_node()
        except yaml.YAMLError:
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            fault = "is empty" if node is None else "cannot be read"
            raise ShoalError(f"{file} {fault}: expected keys with values, as in `steps: 3`")
        return list(_walk(loader, node, "", is_key, {}))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ShoalError(f"{file} cannot be read: {line}{error.problem}") from error
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise ShoalError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    except (LookupError, AttributeError, TypeError) as error:
        # PyYAML raises these for `!!int ""` or `!!bool foo`.
        raise ShoalError(
            f"{file} cannot be read: a value is not what its tag `!!...` says: leave tags out"
        ) from error


def _walk(
    loader: Any, node: Any, head: str, is_key: Callable[[str], bool], lines: dict[str, int]
) -> Iterator[tuple[str, Any, int]]:
    """Yields (dotted name, value, line) for every value below a YAML node; the value of a key may
    be a mapping. `loader`: makes values from nodes; `head`: what to put before each name, '' or
    `section.`; `is_key`: True for the name of a key. `lines`: name -> line so far, which is added
    to; ValueError if a name is set twice. Names that are no texts, like numbers, become texts."""
    import yaml

    loader.flatten_mapping(node)  # puts in place what a YAML merge key, `<<: *anchor`, refers to
    for key_node, value_node in node.value:
        name = f"{head}{loader.construct_object(key_node)}"
        line = key_node.start_mark.line + 1
        if name in lines:
            raise ValueError(f"lines {lines[name]} and {line} both set {name}")
        lines[name] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value and not is_key(name):
            yield from _walk(loader, value_node, f"{name}.", is_key, lines)
        else:
            yield name, loader.construct_object(value_node, deep=True), line


# ---- `${...}`: the value of another name

_REFERENCE = re.compile(r"(\\*)\$\{(?:([^${}]*)\})?")
"""Matches backslashes, `${`, and the reference up to `}`, which is None for a `${` that is not
closed."""


def interpolate(name: str, value: Any, get: Callable[[str], Any]) -> Any:
    """Returns a value with its references replaced: `${other.name}`, `${.sibling}`,
    `${oc.env:NAME,default}` and `${oc.select:name,default}`; `\\${` becomes a plain `${`. A value
    that is one single reference gets the referred value in its own type; in a longer text the value
    becomes text. Of a list the items are replaced; values that are no text are returned unchanged.
    `name`: the dotted name of the value; `get` returns the value of a name and raises KeyError if
    there is none. Raises ShoalError if a reference has no value."""
    if isinstance(value, list):
        return [interpolate(name, item, get) for item in value]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole and not whole[1] and whole[2] is not None:
        return _referred(name, whole[2], get)  # keeps its type, does not become text

    def text_of_reference(match: re.Match[str]) -> str:
        """Returns the text that takes the place of one match: the referred value, or an unescaped
        `${`."""
        backslashes, reference = match[1], match[2]
        kept = "\\" * (len(backslashes) // 2)
        if reference is None:
            return kept + "${"
        is_escaped = len(backslashes) % 2 == 1
        if is_escaped:
            return kept + "${" + reference + "}"
        return kept + text_of(_referred(name, reference, get))

    return _REFERENCE.sub(text_of_reference, value)


def _referred(name: str, reference: str, get: Callable[[str], Any]) -> Any:
    """Returns the value that a reference in the value of `name` stands for; ShoalError if there is
    none, or if it is None, even with a default. `reference`: the text between `${` and `}`; `get`
    returns the value of a name and raises KeyError if there is none. Only `oc.env` and `oc.select`
    may have a default, a text after a comma; after another reference the comma and what follows are
    not read. Another word before `:` is not read either: `${x:name}` is `${name}`."""
    resolver, colon, arguments = reference.partition(":")
    if not colon:  # `${other.name}`
        resolver, arguments = "", reference
    wanted, comma, default = arguments.partition(",")
    wanted = wanted.strip()
    value: Any = None
    if comma and resolver in ("oc.env", "oc.select"):
        value = default.strip()
    if resolver == "oc.env":
        value = os.environ.get(wanted, value)
    else:
        with contextlib.suppress(KeyError):
            value = get(_absolute(wanted, name))
    if value is None:
        raise ShoalError(f"{name}: ${{{reference}}} refers to nothing that is set")
    return value


def _absolute(wanted: str, name: str) -> str:
    """Returns the full name that a relative one means in the value of `name`: `.b` in `x.a` is
    `x.b`, `..b` in `x.y.a` is `x.b`; a name without dots at its start is returned unchanged."""
    relative = wanted.lstrip(".")
    num_dots = len(wanted) - len(relative)
    if num_dots == 0:
        return wanted
    sections = name.split(".")[:-num_dots]
    return ".".join([*sections, relative])
