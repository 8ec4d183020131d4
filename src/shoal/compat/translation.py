"""The flags among what a user gave, as settings of our keys: from what was given alone, before anything is merged.

    entries of every layer  ->  the topmost of each flag  ->  settings in its place, and a report of what it became
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.compat import maxtext, torchrl, trl, tunix, verl
from shoal.compat.flags import INSTEAD, NOTHING, UNSUPPORTED, Flag, Values, Yielding
from shoal.compat.token import TOKEN, take_token
from shoal.config.arguments import names_of
from shoal.config.keys import keys_of
from shoal.config.translator import Entry, ForeignFlag, Late, Report, Setting, Translation
from shoal.config.values import text_of
from shoal.types import ShoalError

SYSTEMS: Mapping[str, Sequence[Flag]] = {
    "TRL": trl.FLAGS, "verl": verl.FLAGS, "MaxText": maxtext.FLAGS, "TorchRL": torchrl.FLAGS, "Tunix": tunix.FLAGS}
"""Of a name that several systems have, the first row counts, unless a layer's other names are another system's."""

_EXACT = {system: {flag.name: flag for flag in flags if not flag.is_pattern} for system, flags in SYSTEMS.items()}
_PATTERNS = {system: [flag for flag in flags if flag.is_pattern] for system, flags in SYSTEMS.items()}


@dataclass(frozen=True)
class FlagUse:
    """One use of a flag: its row in the table, its system, its entry and place in the layers."""

    flag: Flag
    system: str
    entry: Entry
    place: tuple[int, int]

    @property
    def text(self) -> str:
        return text_of(self.entry.value)

    @property
    def where(self) -> str:
        """A file's line before an error; nothing for a command line, whose flag the error names."""
        return f"{self.entry.origin}: " if ":" in self.entry.origin else ""


ENOUGH = 3
"""Flags of one system in a file from which its patterns of names count there."""


def find_flag(config_type: type, name: str, value: Any, likely: str = "", patterns: bool = False) -> (
        tuple[str, Flag] | None):
    """The system and the row of a name that a command accepts; of several the likely system's."""
    order = sorted(SYSTEMS, key=lambda one: one != likely)
    rows = [(one, _EXACT[one][name]) for one in order if name in _EXACT[one]]
    rows += [(likely, flag) for flag in _PATTERNS.get(likely, ()) if patterns and flag.matches(name)]
    is_ours = name in names_of(config_type)
    return next(((one, flag) for one, flag in rows if flag.fits(config_type) and (
        not is_ours if flag.only is None else value is not None and flag.only(text_of(value)))), None)


class Translator:
    """config/'s view of this package."""

    presets = Path(__file__).parent / "presets"

    def flags(self, config_type: type) -> Mapping[str, ForeignFlag]:
        """The flags that a command accepts, by name; those of several systems name all of them."""
        found: dict[str, ForeignFlag] = {}
        for system, rows in _EXACT.items():
            for name, flag in rows.items():
                if flag.fits(config_type):
                    first = found.get(name)
                    found[name] = replace(first, systems=(*first.systems, system)) if first else flag.described(system)
        return found

    def find(self, config_type: type, name: str, value: Any = None) -> ForeignFlag | None:
        found = find_flag(config_type, name, value)
        return found[1].described(found[0]) if found else None

    def redact(self, name: str, value: Any) -> Any:
        """A value to keep: the hub's token goes into the environment and is not kept."""
        if name != TOKEN:
            return value
        take_token(text_of(value))
        return ""

    def unsupported(self, name: str) -> str:
        return next((text for part, text in UNSUPPORTED.items() if re.search(part, name.lower())), "")

    def translate(self, config_type: type, layers: Sequence[Sequence[Entry]]) -> Translation:
        given = _topmost(config_type, layers)
        found: dict[tuple[int, int], list[Setting]] = {}
        reports: list[tuple[tuple[int, int], Report]] = []
        errors: list[str] = []
        groups: dict[Callable, list[FlagUse]] = {}
        for places, one in given.values():
            found |= {place: [] for place in places}
            flag = one.flag
            text = one.text.lower()
            if text in NOTHING and not (flag.keeps_nothing or flag.idle or flag.refused):
                meaning = "it stays at its default"
                reports.append((one.place, Report({flag.name: one.text or "empty"}, meaning=meaning)))
            elif flag.group or flag.late:
                groups.setdefault(flag.group or flag.late, []).append(one)  # type: ignore[arg-type]
            else:
                _attempt(errors, one, lambda one=one: _alone(config_type, one, found, reports))  # noqa: B023
        for rule, members in groups.items():
            _attempt(errors, members[-1], lambda rule=rule, members=members: _together(
                config_type, rule, members, found, reports))
        reports.sort(key=lambda pair: pair[0])
        notes = _recipe_notes(config_type, layers, [one for _, one in given.values()])
        return Translation(found, [(place[0], report) for place, report in reports], errors, notes)


def _topmost(config_type: type, layers: Sequence[Sequence[Entry]]) -> dict[str, tuple[list[tuple[int, int]], FlagUse]]:
    """By name: every place where a flag was given, and the last."""
    found: dict[str, tuple[list[tuple[int, int]], FlagUse]] = {}
    everywhere = {entry.name for entries in layers for entry in entries}
    for number, entries in enumerate(layers):
        likely, is_theirs = likely_system(entries)
        names = {entry.name for entry in entries}
        for place, entry in enumerate(entries):
            row = find_flag(config_type, entry.name, entry.value, likely, is_theirs and ":" in entry.origin)
            if row is None or (row[1].only and names & {*row[1].keys}):  # beside its own key, a name of ours is ours
                continue
            if row[1].only_with and row[1].only_with not in everywhere:
                continue
            before = found.pop(entry.name, ([], None))[0]
            found[entry.name] = ([*before, (number, place)], FlagUse(row[1], row[0], entry, (number, place)))
    return found


def _recipe_notes(config_type: type, layers: Sequence[Sequence[Entry]], given: Sequence[FlagUse]) -> list[str]:
    """A line on the recipe of a system, where names that it alone has stand without the recipe or a preset."""
    entries = [entry for layer in layers for entry in layer]
    if "recipe" not in keys_of(config_type) or any(
            (entry.name == "recipe" and entry.value) or entry.origin.startswith("preset ") for entry in entries):
        return []
    own = Counter(one.system for one in given
                  if one.flag.keys and sum(one.flag.name in rows for rows in _EXACT.values()) == 1)
    return [f"{system}'s flags change only what they name; recipe={system.lower()} sets its other defaults too"
            for system, number in own.most_common(1) if number > 1]


def likely_system(entries: Sequence[Entry]) -> tuple[str, bool]:
    """The system that has most of the names, and whether it has enough of them for a file of its own."""
    votes = Counter(system for entry in entries for system, rows in _EXACT.items() if entry.name in rows)
    likely = max(SYSTEMS, key=lambda one: votes[one]) if votes else ""
    return likely, votes[likely] >= ENOUGH


def _attempt(errors: list[str], one: FlagUse, act: Callable[[], None]) -> None:
    try:
        act()
    except ShoalError as error:
        errors.append(f"{one.where}{error}")


def _alone(config_type: type, one: FlagUse, found: dict[tuple[int, int], list[Setting]],
           reports: list[tuple[tuple[int, int], Report]]) -> None:
    """A flag whose own value says all."""
    flag, text, name = one.flag, one.text, one.entry.name
    if flag.refused:
        if text.lower() not in flag.accepts:
            expected = f"expected {flag.expected}; " if flag.expected else ""
            colon = ":" if expected or "not supported" in flag.meaning else " is not supported:"
            raise ShoalError(f"{name}={text}{colon} {expected}{flag.meaning}")
        reports.append((one.place, Report({name: text}, (), flag.meaning, False, one.system)))
        return
    if flag.idle:
        shown = "..." if name == TOKEN else text
        reports.append((one.place, Report({name: shown}, (), flag.meaning, not one.where or not flag.is_quiet,
                                          one.system)))
        return
    is_list = all(keys_of(config_type)[key].is_list for key in flag.keys if key in keys_of(config_type))
    values: Values = flag.read(name, text) if flag.read else {flag.keys[0]: one.entry.value if is_list else text}
    if flag.item and isinstance(one.entry.value, list):
        values = {flag.keys[0]: [flag.item(item) for item in one.entry.value]}
    settings = found[one.place] = _settings(config_type, values, one, "")
    tail = flag.meaning if flag.has_tail and not flag.is_quiet else ""
    reports.append((one.place, Report({name: text}, tuple(settings), tail,
                                      not flag.is_quiet, one.system)))


def _together(config_type: type, rule: Callable, members: Sequence[FlagUse],
              found: dict[tuple[int, int], list[Setting]], reports: list[tuple[tuple[int, int], Report]]) -> None:
    """Flags of one rule. A key stands in the place of the flag that names it, of several the one that names fewest."""
    flags = {one.entry.name: one.text for one in members}
    if members[0].flag.late:
        late = Late(lambda get: rule(flags, get))
        values: Mapping[str, Any] = {
            key: Yielding(late) if one.flag.yields else late for one in members for key in one.flag.keys} | {
            key: Yielding(late, "lowest") for one in members for key in one.flag.lowest}
    else:
        values = rule(flags)
    settings = []
    for key, value in values.items():
        naming = [one for one in members if key in one.flag.keys] or list(members)
        owner = min(reversed(naming), key=lambda one: len(one.flag.keys) or 99)
        made = _settings(config_type, {key: value}, owner, rule.__name__)
        found[owner.place] = [*found[owner.place], *made]
        settings += made
    last = max(members, key=lambda one: one.place)
    has_line = any(not one.flag.is_quiet for one in members) or not settings
    meaning = next((one.flag.meaning for one in members if not one.flag.is_quiet), "")
    reports.append((last.place, Report(flags, tuple(settings), meaning, has_line, last.system)))


def _settings(config_type: type, values: Values, one: FlagUse, group: str) -> list[Setting]:
    """A flag's values as settings of the keys that a command has."""
    keys, settings = keys_of(config_type), []
    for key, value in values.items():
        rank, value = (value.rank, value.value) if isinstance(value, Yielding) else ("own", value)
        key = key if key in keys else INSTEAD.get(key, "")
        if key in keys:
            settings.append(Setting(key, value, one.entry.origin, one.entry.name, rank, group))
    return settings
