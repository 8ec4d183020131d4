"""Errors of a run in the names that its user typed: another system's flags beside our keys."""

from __future__ import annotations

import re

from shoal.compat.token import TOKEN
from shoal.compat.translation import SYSTEMS, find_flag
from shoal.config.keys import dataclass_of
from shoal.config.loading import Resolved
from shoal.config.schema import Config


def in_their_names(message: str, resolved: Resolved) -> str:
    """The message with the flag or the file's line of each key in it; where the user typed flags of one system, also
    with that system's names of the other keys.

    >>> in_their_names("set batch.group_size lower", resolved)
    'set batch.group_size lower (batch.group_size: --num_generations)'
    """
    given = [entry.name for entry in resolved.arguments.entries]
    found = [row[0] for name in given if (row := find_flag(dataclass_of(Config), name, ""))]
    system = max(set(found), key=found.count) if found else ""
    explained = resolved.explain(message)
    named: dict[str, str] = {}
    for flag in SYSTEMS.get(system, ()):
        for key in flag.keys:
            if key not in resolved.origins and not flag.is_pattern and re.search(
                    rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", message):
                named.setdefault(key, flag.name)
    if "HF_TOKEN" in message and system == "MaxText":
        named["HF_TOKEN"] = TOKEN
    tail = ", ".join(f"{key} is {name}" for key, name in named.items())
    return f"{explained} (in {system}: {tail})" if tail else explained
