"""Settings on disk: a configuration as nested plain values or YAML that loads as the same, and a
run's two files, config.yaml (what was requested) and decided.yaml (what the run decided)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.key import build, convert_value, get_value, keys_of, nest, with_values
from shoal.config.names import aliases_of
from shoal.config.train import Config
from shoal.records import ShoalError


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as nested plain values, for JSON and YAML; `convert` is the inverse."""
    values = {}
    for name in keys_of(type(config)):
        values[name] = get_value(config, name)
    return nest(values)


def difference_from_defaults(config: Any) -> dict[str, Any]:
    """Dotted key -> value, of the keys that are not at their default."""
    changed = {}
    for name, key in keys_of(type(config)).items():
        value = get_value(config, name)
        if value != key.default:
            changed[name] = value
    return changed


def to_yaml(config: Any) -> str:
    """A configuration, or plain nested values, as YAML that loads as the same."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Escapes `${`, which would refer to another key."""

    def represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        # Unquoted, PyYAML writes the line end U+0085 as it is and reads a space.
        style = '"' if "\x85" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", escape(value), style=style)

    Dumper.add_representer(str, represent_text)
    values = to_dict(config) if dataclasses.is_dataclass(config) else config
    if not values:
        return ""
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)


@dataclass(frozen=True)
class Decision:
    """What a run decided for a key that was left open: the value, and the keys and facts that it
    followed from, each with what it was then."""

    value: Any
    sources: Mapping[str, Any]


def texts_of(requested: Any, decisions: Mapping[str, Decision] | None = None) -> tuple[str, str]:
    """config.yaml and decided.yaml of a run: every key as it was requested, where what was left
    open stays open; and what the run decided for these."""
    decided = {}
    for name, decision in (decisions or {}).items():
        decided[name] = {"value": decision.value, "from": dict(decision.sources)}
    return to_yaml(requested), to_yaml(decided)


def config_of(values: Mapping[str, Any]) -> Config:
    """The configuration of a stored run, from its values by dotted key as `texts_of` wrote
    them. No preset, recipe or word of another system is read. ShoalError for an unknown key."""
    known = keys_of(Config)
    converted = {}
    for name, value in values.items():
        if name not in known:
            raise ShoalError(f"there is no key {name}")
        converted[name] = convert_value(known[name], _unescaped(value))
    return build(Config, converted)


def decisions_of(stored: Mapping[str, Any]) -> dict[str, Decision]:
    """The decisions of a run, from decided.yaml's values; ShoalError for another form."""
    known = keys_of(Config)
    decisions = {}
    for name, written in stored.items():
        if name not in known or not isinstance(written, Mapping) or "value" not in written:
            raise ShoalError(f"{name} is no decision of a key")
        sources = written.get("from") or {}
        if not isinstance(sources, Mapping):
            raise ShoalError(f"what {name} follows from is no mapping")
        value = convert_value(known[name], _unescaped(written["value"]))
        then = {source: _unescaped(sources[source]) for source in sources}
        decisions[name] = Decision(value, then)
    return decisions


def resolved(requested: Config, decisions: Mapping[str, Decision]) -> Config:
    """The configuration that a run works with: as requested, with what it decided."""
    return with_values(requested, {name: decisions[name].value for name in decisions})


def _unescaped(value: Any) -> Any:
    """The inverse of `escape`, in texts and lists of them."""
    if isinstance(value, list | tuple):
        return [_unescaped(item) for item in value]
    if not isinstance(value, str):
        return value

    def halved(match: re.Match[str]) -> str:
        backslashes = match[1]
        return backslashes[: len(backslashes) // 2] + "${"

    return re.sub(r"(\\*)\\\$\{", halved, value)


def escape(text: str) -> str:
    """Text in which a file's `${` refers to nothing."""

    def doubled(match: re.Match[str]) -> str:
        backslashes = match[1]
        return backslashes * 2 + "\\${"

    return re.sub(r"(\\*)\$\{", doubled, text)


def require_given(config: Any, *keys: str) -> None:
    """Raises ShoalError for the first of these keys that is empty, with its help text."""
    short_forms = {alias.key: name for name, alias in aliases_of(type(config)).items()}
    for key in keys:
        if not get_value(config, key):
            name = short_forms.get(key, key)
            raise ShoalError(
                f"{name} is not given: write {name}=... ({meaning_of(type(config), key)})"
            )


def meaning_of(config_type: type, key: str) -> str:
    """A key's help text as the end of a sentence."""
    text = keys_of(config_type)[key].help.rstrip(".")
    return text[:1].lower() + text[1:]
