"""The flags among what a user gave, as settings of our keys.

entries of every layer  ->  the highest of each flag
    ->  settings at its place           from what was given alone
        rules with claims at its place  once all layers are merged
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.compat import maxtext, torchrl, trl, verl
from shoal.compat.flags import (
    INSTEAD,
    NOTHING,
    OFF,
    UNSUPPORTED,
    Derivation,
    Flag,
    Given,
    Group,
    Values,
    Yielding,
)
from shoal.compat.rules import RULES
from shoal.compat.token import TOKEN, take_token
from shoal.config.key import keys_of, shown, text_of
from shoal.config.merge import Resolved, with_origins
from shoal.config.words import (
    Entry,
    ForeignFlag,
    Get,
    Layer,
    Place,
    Rule,
    Setting,
    Translation,
    names_of,
)
from shoal.records import ShoalError
from shoal.text import count

SYSTEMS: Mapping[str, Sequence[Flag]] = {
    "TRL": trl.FLAGS,
    "verl": verl.FLAGS,
    "MaxText": maxtext.FLAGS,
    "TorchRL": torchrl.FLAGS,
    "Tunix": maxtext.TUNIX_FLAGS,
}
"""Of a name that several systems have, the first row counts, unless a layer's other names are
another system's."""

_EXACT = {
    system: {flag.name: flag for flag in flags if not flag.is_pattern}
    for system, flags in SYSTEMS.items()
}
_PATTERNS = {
    system: [flag for flag in flags if flag.is_pattern] for system, flags in SYSTEMS.items()
}


@dataclass(frozen=True, eq=False)
class FlagUse:
    """One use of a flag: its row in the table, its system, its entry, and the layer and index of
    that."""

    flag: Flag
    system: str
    entry: Entry
    layer: int
    index: int

    @property
    def text(self) -> str:
        return text_of(self.entry.value)

    @property
    def where(self) -> str:
        """A file's line before an error; nothing for a command line, whose flag the error names."""
        return f"{self.entry.origin}: " if ":" in self.entry.origin else ""

    def setting(self, key: str, value: Any, flags: FlagEffect) -> Setting:
        """The setting of a key at the flag's place; a value that yields lies beneath its layer, or
        all layers."""
        place: Place = (self.layer, 1, self.index)
        if isinstance(value, Yielding):
            place, value = (-1 if value.to_all else self.layer, 0, self.index), value.value
        return Setting(key, value, self.entry.origin, self.entry.name, place, flags)


@dataclass(eq=False)
class FlagEffect:
    """What flags became, for --dry-run; with `has_line` also for a line at the start."""

    flags: Given
    place: tuple[int, int]  # the layer and index of the last of them
    meaning: str = ""
    has_line: bool = False
    claims: Sequence[Setting] = ()  # the keys that the flags name
    settings: Sequence[Setting] = ()  # those that got a value
    reason: str | None = None  # of a rule's values
    applies: bool = True  # False for a rule that higher settings left nothing to do

    def apply(self, derive: Derivation, get: Get) -> Sequence[Setting]:
        """The settings of a rule, whose keys were claims so far."""
        values, self.reason = derive(self.flags, get)
        self.settings = [
            replace(one, value=values[one.key]) for one in self.claims if one.key in values
        ]
        self.applies = True
        return self.settings


ENOUGH = 3
"""Flags of one system in a file, or on the command line, from which its patterns of names count
there."""


def find_flag(
    config_type: type, name: str, value: Any, likely: str = "", patterns: bool = False
) -> tuple[str, Flag] | None:
    """The system and the row of a name that a command accepts; of several the likely system's."""
    order = sorted(SYSTEMS, key=lambda one: one != likely)
    rows = [(one, _EXACT[one][name]) for one in order if name in _EXACT[one]]
    rows += [
        (likely, flag) for flag in _PATTERNS.get(likely, ()) if patterns and flag.matches(name)
    ]
    rows += _rows_above(order, name)
    is_ours = name in names_of(config_type)
    return next(
        (
            (one, flag)
            for one, flag in rows
            if flag.fits(config_type)
            and (
                not is_ours
                if flag.only is None
                else value is not None and flag.only(text_of(value))
            )
        ),
        None,
    )


def _rows_above(order: Sequence[str], name: str) -> list[tuple[str, Flag]]:
    """Rows of a mapping in which the name lies, as `accelerator_config.split_batches` in one
    without effect. Where the mapping is refused, so is all that it sets."""
    rows = []
    head = name.rpartition(".")[0]
    while head:
        for system in order:
            flag = _EXACT[system].get(head)
            if flag and (flag.idle or flag.refused):
                rows.append((system, replace(flag, accepts=NOTHING, expected="")))
        head = head.rpartition(".")[0]
    return rows


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
                    found[name] = (
                        replace(first, systems=(*first.systems, system))
                        if first
                        else flag.described(system)
                    )
        return found

    def find(
        self, config_type: type, name: str, value: Any = None, among: Sequence[str] = ()
    ) -> ForeignFlag | None:
        likely, is_theirs = likely_system(among)
        found = find_flag(
            config_type, name, value, likely, is_theirs and "." in name
        )  # a flat one may be a mistake
        return found[1].described(found[0]) if found else None

    def redact(self, name: str, value: Any) -> Any:
        """A value to keep: the hub's token goes into the environment and is not kept."""
        if name != TOKEN:
            return value
        take_token(text_of(value))
        return ""

    def unsupported(self, name: str) -> str:
        return next(
            (text for part, text in UNSUPPORTED.items() if re.search(part, name.lower())), ""
        )

    def interpolate(self, name: str, value: Any, get: Get) -> Any:
        return interpolate(name, value, get)

    def translate(self, config_type: type, layers: Sequence[Layer]) -> Translation:
        found = FlagSettings(config_type, layers)
        groups: dict[Group, list[FlagUse]] = {}
        derived: dict[Derivation, list[FlagUse]] = {}
        for one in found.given:
            if one.text.lower() in NOTHING and not (
                one.flag.keeps_nothing or one.flag.idle or one.flag.refused
            ):
                found.effect([one], meaning="it stays at its default").flags = {
                    one.entry.name: one.text or "empty"
                }
            elif one.flag.group:
                groups.setdefault(one.flag.group, []).append(one)
            elif one.flag.late:
                derived.setdefault(one.flag.late, []).append(one)
            else:
                found.attempt(one, lambda one=one: found.add_single(one))
        for read, members in groups.items():
            found.attempt(
                members[-1], lambda read=read, members=members: found.add_group(read, members)
            )
        for derive in RULES:
            if derive in derived:
                found.add_rule(derive, derived[derive])
        found.translation.lines = found.lines
        return found.translation


class FlagSettings:
    """The settings that the flags of some layers become, while they are collected."""

    def __init__(self, config_type: type, layers: Sequence[Layer]) -> None:
        self.config_type, self.layers = config_type, layers
        self.translation = Translation()
        self.given = self._highest()
        self.effects: list[FlagEffect] = []
        self.translation.notes += _recipe_notes(config_type, layers, self.given)

    def _highest(self) -> list[FlagUse]:
        """The highest use of each flag; all uses are taken."""
        found: dict[str, FlagUse] = {}
        everywhere = {entry.name for layer in self.layers for entry in layer.entries}
        recipes = [
            f"recipe={text_of(entry.value)}"
            for layer in self.layers
            for entry in layer.entries
            if entry.name == "recipe"
        ]
        for number, layer in enumerate(self.layers):
            names = {entry.name: None for entry in layer.entries}
            likely, is_theirs = likely_system([*names, *recipes])
            for index, entry in enumerate(layer.entries):
                row = find_flag(
                    self.config_type,
                    entry.name,
                    entry.value,
                    likely,
                    is_theirs and layer.is_users and bool(layer.file or "." in entry.name),
                )
                if row is None:
                    continue
                system, flag = row
                is_ours = flag.only and {*names} & {
                    *flag.keys
                }  # beside its own key, a name of ours is ours
                if not is_ours and (not flag.only_with or flag.only_with in everywhere):
                    self.translation.taken.add((number, index))
                    found.pop(entry.name, None)
                    found[entry.name] = FlagUse(flag, system, entry, number, index)
        return [*found.values()]

    def attempt(self, one: FlagUse, act: Callable[[], None]) -> None:
        try:
            act()
        except ShoalError as error:
            self.translation.errors.append(f"{one.where}{error}")

    def effect(self, members: Sequence[FlagUse], **more: Any) -> FlagEffect:
        """What flags become, said at the place of the last of them."""
        last = max((one.layer, one.index) for one in members)
        self.effects.append(FlagEffect({one.entry.name: one.text for one in members}, last, **more))
        return self.effects[-1]

    def add_single(self, one: FlagUse) -> None:
        """A flag whose own value says all."""
        flag, text, name = one.flag, one.text, one.entry.name
        if flag.refused:
            if text.lower() not in flag.accepts:
                expected = f"expected {flag.expected}; " if flag.expected else ""
                colon = ":" if expected or "not supported" in flag.meaning else " is not supported:"
                raise ShoalError(f"{name}={text}{colon} {expected}{flag.meaning}")
            self.effect([one], meaning=flag.meaning)
            return
        if flag.idle:
            made = self.effect(
                [one],
                meaning=flag.meaning,
                has_line=not (one.where and (flag.is_quiet or text.lower() in OFF)),
            )
            made.flags = {name: "..." if name == TOKEN else text}
            return
        is_list = all(
            keys_of(self.config_type)[key].is_list
            for key in flag.keys
            if key in keys_of(self.config_type)
        )
        values: Values = (
            flag.read(name, text)
            if flag.read
            else {flag.keys[0]: one.entry.value if is_list else text}
        )
        if flag.item and isinstance(one.entry.value, list):
            items = one.entry.value
            values = {
                flag.keys[0]: [flag.item(item) if isinstance(item, str) else item for item in items]
            }
        made = self.effect(
            [one],
            has_line=not flag.is_quiet,
            meaning=flag.meaning if flag.has_tail and not flag.is_quiet else "",
        )
        self._add(made, [(one, key, value) for key, value in values.items()])

    def add_group(self, read: Group, members: Sequence[FlagUse]) -> None:
        """Flags that are read together. What lies between a file's flag and a higher one of the
        group, as a recipe on the command line, may replace it: it then counts beneath that
        alone."""
        top = max(one.layer for one in members)
        counting = [
            one
            for one in members
            if not any(one.layer < layer < top for layer in self._set_in(one))
        ]
        if len(counting) < len(members):
            self.add_group(read, [one for one in members if one.layer < top])
        values, without = (
            _read(read, counting),
            {one: _read_without(read, counting, one) for one in counting},
        )
        settings = []
        for key, value in values.items():
            deciding = [
                one for one in counting if key in one.flag.keys and without[one].get(key) != value
            ]
            settings.append((_owner(deciding or counting, key), key, value))
        self._add(self._effect_of(counting, bool(values)), settings)

    def add_rule(self, derive: Derivation, members: Sequence[FlagUse]) -> None:
        """Flags whose values need other keys: a rule that claims the keys which they name."""
        claims = []
        for key in dict.fromkeys(
            key for one in members for key in (*one.flag.keys, *one.flag.lowest)
        ):
            one = _owner(members, key)
            is_lowest = key not in one.flag.keys
            claims.append(
                (one, key, Yielding(None, is_lowest) if one.flag.yields or is_lowest else None)
            )
        made = self._effect_of(members, bool(claims))
        made.applies = not claims
        self._add(made, claims)
        if claims:
            self.translation.rules.append(Rule(made.claims, partial(made.apply, derive)))

    def _set_in(self, one: FlagUse) -> set[int]:
        """The layers in which a flag's first key is set by its own name, or by a flag that stands
        for itself."""
        names, first = names_of(self.config_type), one.flag.keys[0]
        own = {
            number
            for number, layer in enumerate(self.layers)
            for index, entry in enumerate(layer.entries)
            if (number, index) not in self.translation.taken and names.get(entry.name) == first
        }
        return own | {
            other.layer
            for other in self.given
            if other.flag.keys[:1] == (first,) and not (other.flag.group or other.flag.late)
        }

    def _effect_of(self, members: Sequence[FlagUse], has_keys: bool) -> FlagEffect:
        return self.effect(
            members,
            has_line=not has_keys or any(not one.flag.is_quiet for one in members),
            meaning=next((one.flag.meaning for one in members if not one.flag.is_quiet), ""),
        )

    def _add(self, effect: FlagEffect, values: Sequence[tuple[FlagUse, str, Any]]) -> None:
        """Settings of the keys that the command has; a rule's are claims for now."""
        keys = keys_of(self.config_type)
        made = [
            one.setting(
                key if key in keys else INSTEAD.get(key, ""),
                Yielding(value)
                if self._is_wide(one, key) and not isinstance(value, Yielding)
                else value,
                effect,
            )
            for one, key, value in values
            if (key if key in keys else INSTEAD.get(key, "")) in keys
        ]
        effect.claims = made
        if effect.applies:
            effect.settings = made
            self.translation.settings += made

    def _is_wide(self, one: FlagUse, key: str) -> bool:
        """True if another system's flag in the layer names this key and only some of the flag's
        others: the narrower one stands, whatever the order. Flags of one system say by themselves
        which of them stands."""
        return any(
            other.layer == one.layer
            and other.system != one.system
            and other.text.lower() not in NOTHING
            and key in other.flag.keys
            and {*other.flag.keys} < {*one.flag.keys}
            for other in self.given
        )

    def lines(
        self, settings: Sequence[Setting], top: Mapping[str, Setting], values: Mapping[str, Any]
    ) -> list[tuple[str, bool]]:
        """A line for each flag of the user's that is in effect, and whether it is a note of its
        own; the flags of a file that change nothing share one line."""
        found, idle = [], dict[int, list[str]]()
        for effect in sorted(self.effects, key=lambda one: one.place):
            layer = self.layers[effect.place[0]]
            made = {one.key: one for one in effect.settings}
            overruled = [
                one
                for one in effect.claims
                if (one.key in top and top[one.key].place > one.place)
                or (one.key in made and top.get(one.key) is not made[one.key])
            ]
            if (
                not layer.is_users
                or not effect.applies
                or (effect.claims and len(overruled) == len(effect.claims))
            ):
                continue
            if not effect.claims and layer.file and not effect.has_line:
                idle.setdefault(effect.place[0], []).extend(effect.flags)
                continue
            became = [
                f"{one.key}={shown(values[one.key]) or repr('')}"
                for one in effect.settings
                if top.get(one.key) is one and _is_said(one, settings, values, self.config_type)
            ]
            is_whole = not any(
                one.place[1] for one in overruled
            )  # else the reason names keys without effect
            reason = effect.meaning if effect.reason is None or not is_whole else effect.reason
            flags = ", ".join(f"{name}={text}" for name, text in effect.flags.items())
            said = f"became {', '.join(became)}" if became else "changes nothing here"
            found.append(
                (
                    f"{flags} {said}" + (f": {reason}" if reason else ""),
                    effect.has_line or (bool(reason) and not effect.meaning),
                )
            )
        for number, names in idle.items():
            file = self.layers[number].file
            assert file is not None
            said = f"{count(len(names), 'key')} that change{'s' * (len(names) == 1)} nothing here"
            found.append((f"{file.name}: {said}: {', '.join(names)}", True))
        return found


def _read(read: Group, members: Sequence[FlagUse]) -> Values:
    return read({one.entry.name: one.text for one in members})


def _read_without(read: Group, members: Sequence[FlagUse], one: FlagUse) -> Values:
    """What flags are without one of them; nothing where it cannot be missing."""
    try:
        return (
            _read(read, [other for other in members if other is not one])
            if len(members) > 1
            else {}
        )
    except ShoalError:
        return {}


def _owner(members: Sequence[FlagUse], key: str) -> FlagUse:
    """The flag at whose place a key stands: the highest that names it, in one layer the one that
    names fewest keys."""
    naming = (
        [one for one in members if key in one.flag.keys]
        or [one for one in members if key in one.flag.lowest]
        or members
    )
    return max(naming, key=lambda one: (one.layer, -(len(one.flag.keys) or 99), one.index))


def _is_said(
    one: Setting, settings: Sequence[Setting], values: Mapping[str, Any], config_type: type
) -> bool:
    """False for a value that came with another key's flag and is as it was in the layers
    beneath."""
    below = [other.value for other in settings if other.key == one.key and other.place < one.place]
    before = below[-1] if below else keys_of(config_type)[one.key].default
    return one.place[1] == 1 or before != values[one.key]


def _recipe_notes(
    config_type: type, layers: Sequence[Layer], given: Sequence[FlagUse]
) -> list[str]:
    """A line on the recipe of a system, where names that it alone has stand without the recipe or a
    preset, and where a file of the user's is another system's."""
    entries = [entry for layer in layers for entry in layer.entries]
    recipe = next(
        (str(entry.value) for entry in entries if entry.name == "recipe" and entry.value), ""
    )
    for layer in layers if recipe in {*map(str.lower, SYSTEMS)} else ():
        likely, is_sure = likely_system(entry.name for entry in layer.entries)
        if layer.file and layer.is_users and is_sure and likely.lower() != recipe:
            return [
                f"{layer.file} is {likely}'s, and what it does not name is as in {recipe}: "
                f"recipe={likely.lower()} takes {likely}'s defaults"
            ]
    if (
        recipe
        or "recipe" not in keys_of(config_type)
        or any(entry.origin.startswith("preset ") for entry in entries)
    ):
        return []
    own = Counter(
        one.system
        for one in given
        if one.flag.keys and sum(one.flag.name in rows for rows in _EXACT.values()) == 1
    )
    return [
        f"{system}'s flags change only what they name; recipe={system.lower()} sets its other "
        "defaults too"
        for system, number in own.most_common(1)
        if number > 1
    ]


def likely_system(names: Iterable[str]) -> tuple[str, bool]:
    """The system that has most of the names, and whether it has enough of them for its patterns to
    count. Among fewer a recipe, as `recipe=verl`, says the system."""
    names = [*names]
    votes = Counter(system for name in names for system, rows in _EXACT.items() if name in rows)
    likely = max(SYSTEMS, key=lambda one: votes[one]) if votes else ""
    of_recipes = [system for system in SYSTEMS if f"recipe={system.lower()}" in names]
    if of_recipes and votes[likely] < ENOUGH:
        return of_recipes[-1], True
    return likely, votes[likely] >= ENOUGH


def in_their_names(message: str, resolved: Resolved) -> str:
    """The message with the flag or the file's line of each key in it; where the user typed flags of
    one system, also with that system's names of the other keys.

    >>> in_their_names("set batch.group_size lower", resolved)
    'set batch.group_size lower (batch.group_size: --num_generations)'
    """
    given = {entry.name for entry in resolved.arguments.entries}
    votes = sorted((len(given & rows.keys()), system) for system, rows in _EXACT.items())
    system = votes[-1][1] if votes[-1][0] > votes[-2][0] else ""  # many names are several systems'
    explained = with_origins(message, resolved.origins)
    named: dict[str, str] = {}
    for flag in SYSTEMS.get(system, ()):
        for key in flag.keys:
            if (
                key not in resolved.origins
                and not flag.is_pattern
                and re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", message)
            ):
                named.setdefault(key, flag.name)
    if "HF_TOKEN" in message and system == "MaxText":
        named["HF_TOKEN"] = TOKEN
    tail = ", ".join(f"{key} is {name}" for key, name in named.items())
    return f"{explained} (in {system}: {tail})" if tail else explained


# ---- `${...}` in files: the value of another name, as in Hydra's files of verl and TorchRL

_REFERENCE = re.compile(r"(\\*)\$\{(?:([^${}]*)\})?")


def interpolate(name: str, value: Any, get: Callable[[str], Any]) -> Any:
    """A value with `${other.name}`, `${.sibling}`, `${oc.env:NAME,default}` and
    `${oc.select:name,default}` replaced; `\\${` is a plain `${`. `get` raises KeyError for a name
    that does not exist."""
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
