"""Settings on disk: writes a configuration as nested plain values or as YAML that loads as the same
configuration, and reads and writes a run's two files, config.yaml (what was requested) and
decided.yaml (what the run decided itself)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.key import (
    build,
    convert_value,
    get_value,
    keys_of,
    nest,
    open_keys,
    with_values,
)
from shoal.config.names import aliases_of
from shoal.config.train import Config
from shoal.records import ShoalError


def to_dict(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested dicts of plain values, for JSON and YAML: every key in the
    order of declaration, lists in place of tuples."""
    values = {}
    for name in keys_of(type(config)):
        values[name] = get_value(config, name)
    return nest(values)


def difference_from_defaults(config: Any) -> dict[str, Any]:
    """Returns the values, by dotted key, that differ from their defaults, in the types of their
    keys."""
    changed = {}
    for name, key in keys_of(type(config)).items():
        value = get_value(config, name)
        if value != key.default:
            changed[name] = value
    return changed


def to_yaml(config: Any) -> str:
    """Returns a configuration, or nested plain values (a dict), as YAML that loads as the same
    values; '' if there are none. `${` in texts is escaped, because the reader would take it for a
    reference."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """A YAML dumper that escapes `${` in texts."""

    def represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        # PyYAML would write the line end U+0085 unquoted, and then read it back as a space.
        style = '"' if "\x85" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", escape(value), style=style)

    Dumper.add_representer(str, represent_text)
    values = to_dict(config) if dataclasses.is_dataclass(config) else config
    if not values:
        return ""
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)


@dataclass(frozen=True)
class Decision:
    """What a run decided for a key that was left open: the value, and the keys and facts that
    determined it, each with its value at that time."""

    value: Any
    sources: Mapping[str, Any]


def texts_of(requested: Any, decisions: Mapping[str, Decision] | None = None) -> tuple[str, str]:
    """Returns the texts of a run's config.yaml and decided.yaml. The first has every key as
    requested, open keys still open; the second has the values that the run decided for open keys,
    each as `key: {value: ..., from: {source: value}}`, and is '' without decisions. `decisions`:
    key -> decision."""
    decided = {}
    for name, decision in (decisions or {}).items():
        decided[name] = {"value": decision.value, "from": dict(decision.sources)}
    return to_yaml(requested), to_yaml(decided)


def config_of(values: Mapping[str, Any]) -> Config:
    """Creates a training configuration from the values, by dotted key, of a stored config.yaml (as
    `texts_of` wrote it); keys that are missing have their defaults. Reads no preset, recipe or flag
    of another system. Raises ShoalError for an unknown key, or a value that does not fit its type
    or range."""
    known = keys_of(Config)
    converted = {}
    for name, value in values.items():
        if name not in known:
            raise ShoalError(f"there is no key {name}")
        converted[name] = convert_value(known[name], _unescaped(value))
    return build(Config, converted)


def decisions_of(stored: Mapping[str, Any]) -> dict[str, Decision]:
    """Returns key -> decision of a run, the values in the types of their keys. `stored`: the
    content of its decided.yaml, key -> {"value": ..., "from": {source: value}}, of which `from` may
    be missing; ShoalError if it has another form or names an unknown key."""
    known = keys_of(Config)
    decisions = {}
    for name, written in stored.items():
        if name not in known or not isinstance(written, Mapping) or "value" not in written:
            raise ShoalError(f"{name} is not a decision about a key")
        sources = written.get("from") or {}
        if not isinstance(sources, Mapping):
            raise ShoalError(f"what {name} follows from is not a mapping")
        value = convert_value(known[name], _unescaped(written["value"]))
        then = {source: _unescaped(sources[source]) for source in sources}
        decisions[name] = Decision(value, then)
    return decisions


def resolved(requested: Config, decisions: Mapping[str, Decision]) -> Config:
    """Returns the configuration that a run uses: the requested one, with the values that the run
    decided in place of open ones. An open key without a decision stays open. A decision for a key
    that is not open is passed over: somebody has given the key since, for example in
    config.yaml."""
    values = {}
    for name in open_keys(requested):
        if name in decisions:
            values[name] = decisions[name].value
    return with_values(requested, values)


def _unescaped(value: Any) -> Any:
    """Undoes `escape` in a text, or in the texts of a list or tuple, which becomes a list; returns
    other values unchanged."""
    if isinstance(value, list | tuple):
        return [_unescaped(item) for item in value]
    if not isinstance(value, str):
        return value

    # `escape` doubled the backslashes before `${` and added one: 2n + 1 become n again.
    def halved(match: re.Match[str]) -> str:
        backslashes = match[1]
        return backslashes[: len(backslashes) // 2] + "${"

    return re.sub(r"(\\*)\\\$\{", halved, value)


def escape(text: str) -> str:
    """Returns a text with each `${` escaped by a backslash, so that a reader of the file does not
    take it for a reference. Backslashes directly before `${` are doubled."""

    def doubled(match: re.Match[str]) -> str:
        backslashes = match[1]
        return backslashes * 2 + "\\${"

    return re.sub(r"(\\*)\$\{", doubled, text)


def require_given(config: Any, *keys: str) -> None:
    """Raises ShoalError, with the key's help text, for the first of these dotted keys whose value
    is empty (or 0 or false). The message has the key's short form, if there is one. Does nothing if
    all have values."""
    short_forms = {alias.key: name for name, alias in aliases_of(type(config)).items()}
    for key in keys:
        if not get_value(config, key):
            name = short_forms.get(key, key)
            raise ShoalError(
                f"{name} is not given: write {name}=... ({meaning_of(type(config), key)})"
            )


def meaning_of(config_type: type, key: str) -> str:
    """Returns a key's help text in a form that can end a sentence: first letter lower case, no full
    stop. KeyError if the class has no such key."""
    text = keys_of(config_type)[key].help.rstrip(".")
    return text[:1].lower() + text[1:]
