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
    return nest({name: get_value(config, name) for name in keys_of(type(config))})


def difference_from_defaults(config: Any) -> dict[str, Any]:
    """Dotted key -> value, of the keys that are not at their default."""
    return {
        name: get_value(config, name)
        for name, key in keys_of(type(config)).items()
        if get_value(config, name) != key.default
    }


def to_yaml(config: Any) -> str:
    """A configuration, or plain nested values, as YAML that loads as the same."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Escapes `${`, which would refer to another key."""

    # Unquoted, PyYAML writes the line end U+0085 as it is and reads a space.
    Dumper.add_representer(
        str,
        lambda dumper, value: dumper.represent_scalar(
            "tag:yaml.org,2002:str", escape(value), style='"' if "\x85" in value else None
        ),
    )
    values = to_dict(config) if dataclasses.is_dataclass(config) else config
    return (
        yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
        if values
        else ""
    )


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
    """The configuration of a stored run, of its values by dotted key as `texts_of` wrote them. No
    preset, recipe or word of another system is read. ShoalError for a key that there is none of."""
    known = keys_of(Config)
    converted = {}
    for name, value in values.items():
        if name not in known:
            raise ShoalError(f"there is no key {name}")
        converted[name] = convert_value(known[name], _unescaped(value))
    return build(Config, converted)


def decisions_of(stored: Mapping[str, Any]) -> dict[str, Decision]:
    """The decisions of a run, of decided.yaml as nested values; ShoalError for another form."""
    known = keys_of(Config)
    decisions = {}
    for name, written in stored.items():
        if name not in known or not isinstance(written, Mapping) or "value" not in written:
            raise ShoalError(f"{name} is no decision of a key")
        sources = written.get("from") or {}
        if not isinstance(sources, Mapping):
            raise ShoalError(f"what {name} follows from is no mapping")
        value = convert_value(known[name], _unescaped(written["value"]))
        decisions[name] = Decision(value, {key: _unescaped(sources[key]) for key in sources})
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
    return re.sub(r"(\\*)\\\$\{", lambda match: match[1][: len(match[1]) // 2] + "${", value)


def escape(text: str) -> str:
    """Text in which a file's `${` refers to nothing."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)


def require_given(config: Any, *keys: str) -> None:
    """Raises ShoalError for the first of these keys that is empty, with its help text."""
    short = {alias.key: name for name, alias in aliases_of(type(config)).items()}
    for key in keys:
        if not get_value(config, key):
            name = short.get(key, key)
            raise ShoalError(
                f"{name} is not given: write {name}=... ({meaning_of(type(config), key)})"
            )


def meaning_of(config_type: type, key: str) -> str:
    """A key's help text as the end of a sentence."""
    text = keys_of(config_type)[key].help.rstrip(".")
    return text[:1].lower() + text[1:]
