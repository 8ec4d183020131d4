"""Writes a configuration as nested plain values, or as YAML that loads as the same
configuration."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Container
from typing import Any

from shoal.config.key import get_value, keys_of, nest
from shoal.config.train import Config
from shoal.config.words import aliases_of
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


@functools.cache
def open_keys() -> tuple[str, ...]:
    """Keys that a run decides itself where they have their default, which leaves them open."""
    return tuple(name for name, key in keys_of(Config).items() if key.decided)


def texts_of(config: Any, decided: Container[str] = ()) -> tuple[str, str]:
    """A configuration as YAML: every key, and the keys that were set to something else than their
    default.

    `decided`: the keys of `open_keys` that the run chose. They are left out of the second text,
    which tells them from what somebody set (`decided_keys` in `runs/reader.py`)."""
    given = {
        key: value for key, value in difference_from_defaults(config).items() if key not in decided
    }
    return to_yaml(config), to_yaml(nest(given))


def decided_between(given: Any, config: Any) -> list[str]:
    """The keys that `given` leaves open and `config` has decided."""
    default = keys_of(type(config))
    return [
        key
        for key in open_keys()
        if get_value(given, key) == default[key].default != get_value(config, key)
    ]


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
