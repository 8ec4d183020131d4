"""`${...}` in files: the value of another name, as in Hydra's files of verl and TorchRL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from shoal.config.values import text_of
from shoal.types import ShoalError

_REFERENCE = re.compile(r"(\\*)\$\{(?:([^${}]*)\})?")


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
