"""Replaces other systems' flags by settings of Shoal's keys (a setting is a name with its value):
`translate` takes layers as they were typed and returns layers in which only keys of Shoal are
named.

layers as typed  ->  the use of each flag in its highest layer
    ->  settings in its place               from the flag alone, or from a group of flags that are
                                            read together
    ->  settings that depend on other keys  from rules, applied in their order; each rule sees the
                                            values that the rules before it made
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.compat import maxtext, torchrl, trl, verl
from shoal.compat.rules import CHECKS, RULES
from shoal.config.arguments import NO_VALUE, Layer, Setting
from shoal.config.foreign import (
    INSTEAD,
    NOTHING,
    OFF,
    Flag,
    FlagLine,
    FlagTexts,
    Group,
    IdleKeys,
    KeyValues,
    Rule,
    Translation,
    Yielding,
)
from shoal.config.key import keys_of, shown, text_of
from shoal.config.merge import PACKAGED, Merged, Resolved, with_origins
from shoal.config.names import names_of
from shoal.config.token import HUB_TOKEN_KEY
from shoal.records import ShoalError

if TYPE_CHECKING:
    from shoal.report.console import Console


def _rows_of(system: str, flags: Sequence[Flag]) -> list[Flag]:
    return [replace(flag, system=system) for flag in flags]


SYSTEMS: Mapping[str, Sequence[Flag]] = {
    "TRL": _rows_of("TRL", trl.FLAGS),
    "verl": _rows_of("verl", verl.FLAGS),
    "MaxText": _rows_of("MaxText", maxtext.FLAGS),
    "TorchRL": _rows_of("TorchRL", torchrl.FLAGS),
    "Tunix": _rows_of("Tunix", maxtext.TUNIX_FLAGS),
}
"""The tables of flags by system. If several systems have a flag of one name, the first system here
counts, unless most other names in the layer are another system's."""

_EXACT: dict[str, dict[str, Flag]] = {}
"""For each system its rows by name, without patterns."""

_PATTERNS: dict[str, list[Flag]] = {}
"""For each system its rows whose names are patterns, like `sa_*`."""

for _system, _flags in SYSTEMS.items():
    _EXACT[_system] = {flag.name: flag for flag in _flags if not flag.is_pattern}
    _PATTERNS[_system] = [flag for flag in _flags if flag.is_pattern]


# ---- rows of the tables


ENOUGH = 3
"""Number of flags of one system in a file, or on the command line, from which on that system's
patterns of names are matched there, too."""


def find_flag(
    config_type: type, name: str, value: Any = None, among: Sequence[str] = ()
) -> Flag | None:
    """Returns the flag of another system that a name stands for, None if there is none that the
    command accepts. For a name that Shoal has too, `value` decides whose name it is; without a
    value (None) it is Shoal's. `among`: the names in the layer, on a command line also
    `recipe=verl` and the like; they choose between systems. With enough names of one system (ENOUGH
    of them, or its recipe) its patterns count, too, but only for a name with a dot."""
    likely, is_sure = likely_system(among)
    # Patterns are not tried for a name without a dot: it may be a misspelled key.
    return find_row(config_type, name, value, likely, patterns=is_sure and "." in name)


def find_row(
    config_type: type, name: str, value: Any, likely: str = "", patterns: bool = False
) -> Flag | None:
    """Returns the row of the tables for a name, None if there is none that the command accepts. For
    a name that Shoal has too, `value` decides whose name it is; without a value (None) it is
    Shoal's. If several systems have the name, the row of the system `likely` is preferred ('' for
    no preference). `patterns`: also match that system's patterns. A dotted name that is not in the
    tables has a row if one of its parents is idle or refused (`_rows_above`)."""
    order = sorted(SYSTEMS, key=lambda system: system != likely)  # `likely` first: False is least
    rows = [_EXACT[system][name] for system in order if name in _EXACT[system]]
    if patterns and likely:
        rows += _rows_above([likely], name)  # a parent's own name says more than a pattern
        rows += [flag for flag in _PATTERNS[likely] if flag.matches(name)]
    rows += _rows_above(order, name)
    is_ours = name in names_of(config_type)
    for flag in rows:
        if flag.value_filter is None:
            is_theirs = not is_ours
        else:
            is_theirs = value is not None and flag.value_filter(text_of(value))
        if is_theirs and flag.fits(config_type):
            return flag
    return None


def _rows_above(order: Sequence[str], name: str) -> list[Flag]:
    """Returns rows for a dotted name whose parent is in the tables as a mapping, as a flag without
    effect or as a refused one: `accelerator_config.split_batches` is without effect because
    `accelerator_config` is. Each row is the parent's. Its `name` is the parent's too, but for an
    entry of a mapping, which is read by its own. Below a refused mapping only empty values are
    accepted. `order`: the systems, the preferred one first. Rows of the nearest parent come first;
    [] if there are none."""
    rows = []
    head = name.rpartition(".")[0]
    while head:
        for system in order:
            flag = _EXACT[system].get(head)
            if flag and flag.is_mapping:
                rows.append(replace(flag, name=name))
            elif flag and (flag.idle or flag.refused):
                rows.append(replace(flag, accepts=NOTHING, expected=""))
        head = head.rpartition(".")[0]
    return rows


def flags_of(config_type: type) -> Mapping[str, Sequence[Flag]]:
    """Returns all flags that a command accepts, by name; for each name one row for each system that
    has the flag, in the order of SYSTEMS. Patterns are not included."""
    flags: dict[str, list[Flag]] = {}
    for rows in _EXACT.values():
        for name, flag in rows.items():
            if flag.fits(config_type):
                flags.setdefault(name, []).append(flag)
    return flags


def likely_system(names: Iterable[str]) -> tuple[str, bool]:
    """Returns (system, is_sure): the system that has most of these names (of several the first of
    SYSTEMS), '' if none has one, and whether the names suffice for its patterns to count, which is
    ENOUGH names. If they do not, an argument like `recipe=verl` among them decides, of several the
    last of SYSTEMS, and is sure."""
    names = list(names)
    votes: Counter[str] = Counter()
    for system, rows in _EXACT.items():
        votes[system] = sum(name in rows for name in names)
    likely = ""
    if any(votes.values()):
        likely = max(SYSTEMS, key=lambda system: votes[system])
    of_recipes = [system for system in SYSTEMS if f"recipe={system.lower()}" in names]
    if of_recipes and votes[likely] < ENOUGH:
        return of_recipes[-1], True
    return likely, votes[likely] >= ENOUGH


# ---- from flags to settings of our keys


@dataclass(frozen=True, eq=False)
class FlagUse:
    """One use of a flag: its row in the tables, the setting as typed, the index of the layer, and
    the index of the setting in that layer."""

    flag: Flag
    setting: Setting
    layer: int
    index: int

    @property
    def name(self) -> str:
        return self.setting.name

    @property
    def text(self) -> str:
        return text_of(self.setting.value)

    @property
    def where(self) -> str:
        """Returns `file:line: ` as prefix of an error; '' on a command line, because the error
        names the flag."""
        return f"{self.setting.origin}: " if ":" in self.setting.origin else ""


REWARDS = ("reward.functions",)
"""The key of a flag that is given reward functions."""

LOWEST = -1
"""Index of an additional layer beneath all others, for settings that yield to everything else."""


@dataclass(eq=False)
class PlacedSetting:
    """A setting of Shoal's keys, with the layer and index of the flag that it replaces."""

    setting: Setting
    layer: int
    index: int
    is_above: bool = False  # True: in a layer of its own, directly above that layer


@dataclass(eq=False)
class Effect:
    """What one flag, or several flags read together, became: the settings that replace them, and
    the parts of the line about them that --dry-run shows. With `has_line` the line is also shown at
    the start of a run."""

    flags: FlagTexts  # name -> text, as the line shows them
    last: tuple[int, int]  # the layer and the index of the last of the flags
    system: str = ""  # the system of the flags, like `TRL`
    meaning: str = ""
    has_line: bool = False
    settings: list[PlacedSetting] = field(default_factory=list)
    rule: Rule | None = None
    # Only for a rule: its sentence about the values, and False if higher settings set all its keys.
    reason: str | None = None
    applies: bool = True
    is_shown: bool = True  # False if there is no line about the flags
    where: str = ""  # of a rule in CHECKS: `file:line: ` of its last flag, '' on a command line


def translate(config_type: type, layers: Sequence[Layer]) -> Translation:
    """Replaces the flags of other systems in layers (lowest first) by settings of Shoal's keys. Of
    a flag that is given several times only the highest use counts. A flag whose text is one of
    NOTHING, in any case, sets nothing, unless its row has `keeps_nothing`. Errors do not raise:
    they are collected in the Translation, whose `became` is empty if there are any. The layers that
    were passed are not changed."""
    draft = Draft(config_type, layers)
    groups: dict[Group, list[FlagUse]] = {}
    by_rule: dict[Rule, list[FlagUse]] = {}
    for use in draft.uses:
        flag = use.flag
        has_default = not (flag.keeps_nothing or flag.idle or flag.refused)
        # An empty list of reward functions stands for functions that were given from Python.
        is_of_functions = flag.keys == REWARDS and use.setting.value == []
        if is_of_functions:
            draft.add_single(use)
            draft.effects[-1].is_shown = False
        elif has_default and use.text.lower() in NOTHING:
            effect = draft.add_effect([use], meaning="it stays at its default")
            effect.flags = {use.name: use.text or "empty"}
        elif flag.as_here and use.text == flag.as_here:
            draft.add_effect([use], flag.meaning)
        elif flag.group or flag.rule:
            # With both, rules before its own read the keys that the group sets.
            if flag.group:
                groups.setdefault(flag.group, []).append(use)
            if flag.rule:
                by_rule.setdefault(flag.rule, []).append(use)
        else:
            try:
                draft.add_single(use)
            except ShoalError as error:
                draft.errors.append(f"{use.where}{error}")
    for read, uses in groups.items():
        try:
            draft.add_group(read, uses)
        except ShoalError as error:
            draft.errors.append(f"{uses[-1].where}{error}")
    effects = [draft.add_rule(rule, by_rule[rule]) for rule in RULES if rule in by_rule]

    merged = Merged(config_type, draft.layers())
    errors = [*draft.errors, *merged.errors]
    merged, errors_of_rules = _apply_rules(draft, merged, effects)
    errors += errors_of_rules

    became: list[FlagLine | IdleKeys] = []
    notes = _recipe_notes(config_type, layers, draft.uses)
    values, errors_of_values = merged.values_and_errors()
    if not errors and not errors_of_values:
        became = _became(draft, merged, values)
        notes += _group_size_notes(merged)
    return Translation(merged.layers, errors, notes, became)


def _apply_rules(
    draft: Draft, merged: Merged, effects: Sequence[Effect]
) -> tuple[Merged, list[str]]:
    """Calls the rules of these effects in their order, and puts the values that a rule returns into
    the settings of its effect. A rule is not called if higher settings set all its keys, unless it
    is one of CHECKS, which set none. Returns
    (the layers merged with these values, the messages of rules that raised ShoalError). `merged`:
    the layers of `draft`, merged before any rule."""
    errors = []
    for effect in effects:
        positions = _positions(merged)
        # Keys of the rule that no higher setting sets -> the origin of the rule's setting.
        free = {}
        for placed in effect.settings:
            key = placed.setting.key
            position = positions[id(placed.setting)]
            if key not in merged.in_effect or merged.in_effect[key] < position:
                free[key] = placed.setting.origin
        assert effect.rule is not None
        if not free and effect.rule not in CHECKS:
            continue
        try:
            values, effect.reason = effect.rule(effect.flags, merged.get)
            for placed in effect.settings:
                value = values.get(placed.setting.key, NO_VALUE)
                placed.setting = replace(placed.setting, value=value)
            effect.applies = True
            # Merged again, because the next rule reads the final values of keys.
            merged = Merged(draft.config_type, draft.layers())
        except ShoalError as error:
            errors.append(effect.where + with_origins(str(error), merged.origins | free))
    return merged, errors


def _positions(merged: Merged) -> dict[int, int]:
    """Returns for each setting, by its id(), its index in `merged.settings`."""
    return {id(setting): position for position, (_, setting) in enumerate(merged.settings)}


def _is_meant(flag: Flag, layer_names: Collection[str], all_names: Collection[str]) -> bool:
    """True if a name that is a flag's means the flag and not Shoal's own key of that name. False if
    Shoal has the name too and one of the flag's keys is in the same layer (`layer_names`), or if
    another flag that must be given, `requires_flag`, is in no layer (`all_names`)."""
    if flag.value_filter and any(key in layer_names for key in flag.keys):
        return False
    return not flag.requires_flag or flag.requires_flag in all_names


class Draft:
    """The layers of a configuration while flags in them are being replaced by settings. Collects
    effects and errors."""

    def __init__(self, config_type: type, layers: Sequence[Layer]) -> None:
        """Finds the flags in the layers (lowest first), which are not changed."""
        self.config_type = config_type
        self.typed = layers
        # The index of the layer and of the setting in it, for each setting that is a flag.
        self.taken: set[tuple[int, int]] = set()
        self.uses = self._highest_uses()
        self.effects: list[Effect] = []
        self.errors: list[str] = []

    def _highest_uses(self) -> list[FlagUse]:
        """Returns for each flag its use in the highest layer, of several in one layer the last. The
        uses are ordered by layer, lowest first, and by their places in it. Adds all uses of flags,
        also lower ones, to `taken`. Settings whose names mean Shoal's own keys are left out."""
        highest: dict[str, FlagUse] = {}
        all_names = set()
        recipes = []
        for layer in self.typed:
            for setting in layer.settings:
                all_names.add(setting.name)
                if setting.name == "recipe":
                    recipes.append(f"recipe={text_of(setting.value)}")
        for layer_index, layer in enumerate(self.typed):
            layer_names = dict.fromkeys(setting.name for setting in layer.settings)
            likely, is_sure = likely_system([*layer_names, *recipes])
            for setting_index, setting in enumerate(layer.settings):
                # On a command line a name without a dot may be a misspelled key.
                may_match_pattern = bool(layer.file or "." in setting.name)
                patterns = is_sure and layer.is_users and may_match_pattern
                flag = find_row(self.config_type, setting.name, setting.value, likely, patterns)
                if flag is None or not _is_meant(flag, layer_names, all_names):
                    continue
                self.taken.add((layer_index, setting_index))
                # Removed and added again, so that the dict is ordered by the highest uses.
                highest.pop(setting.name, None)
                highest[setting.name] = FlagUse(flag, setting, layer_index, setting_index)
        return list(highest.values())

    def layers(self) -> list[Layer]:
        """Returns copies of the layers, lowest first, with flags replaced by settings; in each
        layer the settings that yield come first, because of two settings in a layer the later
        counts. Settings that yield to everything make up an additional layer at the bottom, those
        that yield to all but a packaged preset one above that preset. `typed` of each copy has the
        settings as typed."""
        by_layer: dict[int, list[PlacedSetting]] = {}
        for effect in self.effects:
            for placed in effect.settings:
                by_layer.setdefault(placed.layer, []).append(placed)
        for placed_settings in by_layer.values():
            placed_settings.sort(key=lambda placed: placed.index)
        layers = []
        if LOWEST in by_layer:
            layers.append(Layer([placed.setting for placed in by_layer[LOWEST]]))
        for layer_index, layer in enumerate(self.typed):
            yielding = []
            above = []
            in_place: dict[int, list[Setting]] = {}  # index of a flag -> settings in its place
            for placed in by_layer.get(layer_index, ()):
                if placed.is_above:
                    above.append(placed.setting)
                elif placed.setting.yields:
                    yielding.append(placed.setting)
                else:
                    in_place.setdefault(placed.index, []).append(placed.setting)
            settings = yielding
            for index, setting in enumerate(layer.settings):
                if (layer_index, index) in self.taken:
                    settings += in_place.get(index, ())
                else:
                    settings.append(setting)
            layers.append(replace(layer, settings=settings, typed=layer.settings))
            if above:
                layers.append(Layer(above))
        return layers

    def add_effect(self, uses: Sequence[FlagUse], meaning: str, has_line: bool = False) -> Effect:
        """Adds to `effects` and returns a new effect of these flags, without settings. The line
        about it is sorted by the layer and index of the last flag. `meaning`: what the line says
        that the flags mean, '' for nothing; `has_line`: True if the line is also shown at the start
        of a run."""
        last = max((use.layer, use.index) for use in uses)
        flags = {use.name: use.text for use in uses}
        effect = Effect(flags, last, uses[-1].flag.system, meaning, has_line)
        self.effects.append(effect)
        return effect

    def add_single(self, use: FlagUse) -> None:
        """Adds the effect of a flag whose value is read without other flags or keys, with its
        settings; a flag that changes nothing here has none. Raises ShoalError for a flag, or a
        value of it, that Shoal refuses."""
        flag, text, name = use.flag, use.text, use.name
        if flag.refused:
            if text.lower() not in flag.accepts:
                expected = f"expected {flag.expected}; " if flag.expected else ""
                # A meaning that is no sentence gets one before it: `NAME=VALUE is not supported:
                # MEANING`.
                is_sentence = expected or "not supported" in flag.meaning
                colon = ":" if is_sentence else " is not supported:"
                raise ShoalError(f"{name}={text}{colon} {expected}{flag.meaning}")
            self.add_effect([use], flag.meaning)
            return
        if flag.idle:
            # `where` is '' on a command line.
            is_off_in_file = bool(use.where) and (flag.is_quiet or text.lower() in OFF)
            effect = self.add_effect([use], flag.meaning, has_line=not is_off_in_file)
            is_secret = name in (HUB_TOKEN_KEY, "hub_token")
            effect.flags = {name: "..." if is_secret else text}
            return
        values = self._read_alone(use)
        # A quiet flag that sets nothing has a line too, with the reason.
        has_line = not flag.is_quiet or not values
        has_meaning = flag.has_tail and has_line
        effect = self.add_effect([use], flag.meaning if has_meaning else "", has_line)
        for key, value in values.items():
            self._add_setting(effect, use, key, value)

    def _read_alone(self, use: FlagUse) -> KeyValues:
        """Returns the values of keys, by dotted key, that a flag has by its own `item` or `read`,
        or, if it only renames a key, its value for this key. Raises ShoalError if `item` or `read`
        refuses the value."""
        flag, value = use.flag, use.setting.value
        if flag.item and isinstance(value, list):
            items = [flag.item(item) if isinstance(item, str) else item for item in value]
            return {flag.keys[0]: items}
        if flag.read:
            return flag.read(use.name, use.text)
        keys = keys_of(self.config_type)
        is_list = all(keys[key].is_list for key in flag.keys if key in keys)
        return {flag.keys[0]: value if is_list else use.text}

    def add_group(self, read: Group, uses: Sequence[FlagUse]) -> None:
        """Adds the effect of flags that `read` reads together. A flag in a low layer no longer
        counts together with those of the highest layer if a layer in between, such as the preset of
        an algorithm on the command line, sets its key; the flags of lower layers are then also read
        by themselves, as an effect before this one. Raises ShoalError if `read` refuses the
        flags."""
        top = max(use.layer for use in uses)
        counting = []  # the flags that are read together
        for use in uses:
            if not any(use.layer < layer < top for layer in self._layers_that_set(use)):
                counting.append(use)
        if len(counting) < len(uses):
            self.add_group(read, [use for use in uses if use.layer < top])
        values = _read(read, counting)
        values_without = {use: _read_without(read, counting, use) for use in counting}
        owners = {}  # key -> the flag in whose place the key is set
        for key, value in values.items():
            # The flags without which the key has another value, or that give it this one by name.
            deciding = []
            for use in counting:
                is_own = use.flag.keys[:1] == (key,) and use.text == value
                if is_own or (key in use.flag.keys and values_without[use].get(key) != value):
                    deciding.append(use)
            owners[key] = _owner(deciding or counting, key)
        effect = self._add_effect_of_several(counting, bool(values))
        effect.is_shown = not any(use.flag.rule for use in counting)  # their line is the rule's
        for key, value in values.items():
            self._add_setting(effect, owners[key], key, value)

    def add_rule(self, rule: Rule, uses: Sequence[FlagUse]) -> Effect:
        """Adds and returns the effect of flags whose values depend on other keys. It contains a
        setting for each key that the rule may set, with NO_VALUE until `translate` applies the
        rule. Its `applies` is False until then if there are such keys. The rule is not called
        here."""
        keys: dict[str, None] = {}
        for use in uses:
            keys.update(dict.fromkeys((*use.flag.keys, *use.flag.default_only)))
        effect = self._add_effect_of_several(uses, bool(keys) or rule in CHECKS)
        effect.rule = rule
        if rule in CHECKS:
            effect.where = uses[-1].where
        effect.applies = not keys
        for key in keys:
            owner = _owner(uses, key)
            value: Any = NO_VALUE
            if key not in owner.flag.keys:  # it is in `default_only`
                value = Yielding(NO_VALUE, to_all=True)
            elif owner.flag.low_priority:
                value = Yielding(NO_VALUE)
            # A flag on the command line may only have a say in the value that another flag of the
            # user's, whose own key this is, has set in a file.
            setting_it = []
            for use in uses:
                if use.flag.keys[:1] == (key,) and self.typed[use.layer].is_users:
                    setting_it.append(use)
            source = _owner(setting_it, key) if setting_it else owner
            self._add_setting(effect, owner, key, value, source.setting.origin)
        return effect

    def _layers_that_set(self, use: FlagUse) -> set[int]:
        """Returns the indices of the layers that set the first key of a flag by the key's own name,
        or by another flag that is read alone. The flag must set a key."""
        names = names_of(self.config_type)
        first_key = use.flag.keys[0]
        layer_indices = set()
        for layer_index, layer in enumerate(self.typed):
            for index, setting in enumerate(layer.settings):
                is_flag = (layer_index, index) in self.taken
                if not is_flag and names.get(setting.name) == first_key:
                    layer_indices.add(layer_index)
        for other in self.uses:
            is_read_alone = not (other.flag.group or other.flag.rule)
            if is_read_alone and other.flag.keys[:1] == (first_key,):
                layer_indices.add(other.layer)
        return layer_indices

    def _add_effect_of_several(self, uses: Sequence[FlagUse], has_keys: bool) -> Effect:
        """Adds and returns an effect of several flags, without settings; its meaning is that of the
        first flag that is not quiet, '' if all are quiet. `has_keys`: True if the flags set keys;
        without keys the effect has a line even if all flags are quiet."""
        loud = [use for use in uses if not use.flag.is_quiet]
        meaning = loud[0].flag.meaning if loud else ""
        return self.add_effect(uses, meaning, has_line=bool(loud) or not has_keys)

    def _add_setting(
        self, effect: Effect, use: FlagUse, key: str, value: Any, origin: str = ""
    ) -> None:
        """Adds to an effect a setting that sets a key, in the place of a flag, with the origin
        `origin` (empty: that of the flag). A value in a Yielding makes the setting yield, with
        `to_all` in the lowest layer, with `to_users` above the presets that set the key. If the
        command does not have the key, the setting sets the key INSTEAD of it; without such a key
        nothing is added."""
        keys = keys_of(self.config_type)
        own_key = key if key in keys else INSTEAD.get(key, "")
        if own_key not in keys:
            return
        yields = self._yields_to_narrower(use, key)
        layer = use.layer
        is_above = False
        if isinstance(value, Yielding):
            yields = True
            if value.to_all:
                layer = LOWEST
            elif value.to_users:
                layer = self._preset_beneath(use, own_key)
                is_above = layer != LOWEST
            value = value.value
        setting = Setting(
            use.name,
            value,
            origin or use.setting.origin,
            own_key,
            flags=tuple(effect.flags),
            of_rule=effect.rule is not None,
            yields=yields,
        )
        effect.settings.append(PlacedSetting(setting, layer, use.index, is_above))

    def _preset_beneath(self, use: FlagUse, key: str) -> int:
        """Returns the index of the highest packaged preset beneath the layer of a flag that sets a
        key by its own name; LOWEST if there is none."""
        names = names_of(self.config_type)
        for layer_index in reversed(range(use.layer)):
            layer = self.typed[layer_index]
            if layer.is_users:
                continue
            if any(names.get(setting.name) == key for setting in layer.settings):
                return layer_index
        return LOWEST

    def _yields_to_narrower(self, use: FlagUse, key: str) -> bool:
        """True if in the same layer another system's flag sets this key, and sets fewer keys than
        this flag, all of them among its keys. The other, narrower flag then wins, whatever their
        order. Flags of one system are not compared: their rows say which of them yields."""
        for other in self.uses:
            if other.layer != use.layer or other.flag.system == use.flag.system:
                continue
            if other.text.lower() in NOTHING or key not in other.flag.keys:
                continue
            if set(other.flag.keys) < set(use.flag.keys):
                return True
        return False


def _read(read: Group, uses: Sequence[FlagUse]) -> KeyValues:
    """Calls the reader of a group with the names and texts of these flags; returns its values."""
    return read({use.name: use.text for use in uses})


def _read_without(read: Group, uses: Sequence[FlagUse], use: FlagUse) -> KeyValues:
    """Returns the values that a group of flags has if one of them, `use`, is left out; {} if it
    cannot be left out, because it is the only one or the others are refused without it."""
    if len(uses) == 1:
        return {}
    try:
        return _read(read, [other for other in uses if other is not use])
    except ShoalError:
        return {}


def _owner(uses: Sequence[FlagUse], key: str) -> FlagUse:
    """Returns the flag in whose place the setting for a key is put: the one in the highest layer
    that names the key, within a layer one without `low_priority`, of these the one that names the
    fewest keys, and of several such the last. If none has the key among its `keys`, those with it
    in `default_only` are compared, else all."""
    naming = [use for use in uses if key in use.flag.keys]
    if not naming:
        naming = [use for use in uses if key in use.flag.default_only]

    def precedence(use: FlagUse) -> tuple[int, bool, int, int]:
        num_keys = len(use.flag.keys) or 99  # a flag without keys of its own comes last
        return use.layer, not use.flag.low_priority, -num_keys, use.index

    return max(naming or uses, key=precedence)


# ---- lines on what flags became


def _became(draft: Draft, merged: Merged, values: Mapping[str, Any]) -> list[FlagLine | IdleKeys]:
    """Returns a line for each flag of the user's layers that has an effect: what it became. The
    lines are in the order of the flags. Left out are flags all of whose settings are overruled by
    higher ones, and flags whose rule was not called. Flags that change nothing for the same reason
    share a line; those of a file that change nothing, and need not be known at the start of a run,
    share one at the end. `values`: key -> final value."""
    positions = _positions(merged)
    lines: list[FlagLine] = []
    idle_names: dict[int, list[str]] = {}  # index of a file's layer -> flags that change nothing
    for effect in sorted(draft.effects, key=lambda effect: effect.last):
        layer_index, _ = effect.last
        layer = draft.typed[layer_index]
        if not (layer.is_users and effect.is_shown):
            continue
        if not effect.applies:
            lines += _overruled_lines(effect, merged, positions)
        elif layer.file and not effect.settings and not effect.has_line:
            idle_names.setdefault(layer_index, []).extend(effect.flags)
        else:
            lines += _effect_lines(effect, merged, positions, values)
    idle_keys = []
    for layer_index, names in idle_names.items():
        file = draft.typed[layer_index].file
        assert file is not None
        idle_keys.append(IdleKeys(file.name, names))
    return [*_share_lines(lines), *idle_keys]


def _effect_lines(
    effect: Effect, merged: Merged, positions: Mapping[int, int], values: Mapping[str, Any]
) -> list[FlagLine]:
    """Returns the line about an effect, as a list; [] if higher settings overrule all its settings.
    `positions`: as `_positions` returns them; `values`: key -> final value."""
    overruled = []
    settings = []
    texts = set()  # of the values in `settings`, as set
    for placed in effect.settings:
        setting = placed.setting
        position = positions[id(setting)]
        highest = merged.in_effect.get(setting.key, -1)  # -1: no setting has a value
        is_set = setting.value is not NO_VALUE
        # A lower setting counts only for PROMPT_KEYS, or if this one has no value.
        if highest > position or (is_set and highest != position):
            overruled.append(setting)
        elif is_set and _is_mentioned(position, merged, values):
            texts.add(text_of(setting.value))
            settings.append(f"{setting.key}={shown(values[setting.key]) or repr('')}")
    if effect.settings and len(overruled) == len(effect.settings):
        return []
    # A rule's sentence is about all its keys, so it is used only if all settings count.
    reason = effect.meaning
    if effect.reason is not None and all(setting.yields for setting in overruled):
        reason = effect.reason
    is_unexplained = not settings and not reason
    at_start = effect.has_line or is_unexplained or (bool(reason) and not effect.meaning)
    if is_unexplained and effect.settings:
        reason = "it is so anyway"  # its keys have the same values without it
    line = FlagLine(
        flags=tuple(f"{name}={text}" for name, text in effect.flags.items()),
        settings=tuple(settings),
        reason=reason,
        at_start=at_start,
        is_on_page=effect.reason is None,
        system=effect.system,
        has_same_values=texts == set(effect.flags.values()),
    )
    return [line]


def _share_lines(lines: Sequence[FlagLine]) -> list[FlagLine]:
    """Returns the lines, with one in place of several that change nothing for the same reason."""
    shared: list[FlagLine] = []
    places: dict[tuple[str, bool], int] = {}  # (reason, at_start) -> index of the line
    for line in lines:
        if line.settings or not line.reason:
            shared.append(line)
            continue
        place = places.setdefault((line.reason, line.at_start), len(shared))
        if place == len(shared):
            shared.append(line)
        else:
            first = shared[place]
            shared[place] = replace(first, flags=first.flags + line.flags)
    return shared


def _overruled_lines(
    effect: Effect, merged: Merged, positions: Mapping[int, int]
) -> list[FlagLine]:
    """Returns a line, as a list, on a flag that changes nothing because its key is also given by a
    name that counts before it in the same file or on the same command line: total_epochs next to
    total_training_steps. [] for a flag that gives way to none in its layer (`low_priority`), or to
    one in a higher layer. `effect`: of a rule that was not called; `positions`: as `_positions`
    returns them."""
    setting = effect.settings[0].setting
    layer_index, _ = merged.settings[positions[id(setting)]]
    other = merged.setting_of(setting.key)  # there is one: else the rule would have been called
    is_beside = layer_index == merged.layer_index(setting.key) and other.name not in effect.flags
    if not (setting.yields and is_beside):
        return []
    if setting.key == "resume":
        return []  # the other is the folder that the flag was resolved to (`config_for_resume`)
    flags = tuple(f"{name}={text}" for name, text in effect.flags.items())
    source = "" if other.name == setting.key else f", from {other.name},"
    reason = f"{setting.key}={text_of(other.value)}{source} counts"
    return [FlagLine(flags, reason=reason, at_start=True)]


def _is_mentioned(position: int, merged: Merged, final_values: Mapping[str, Any]) -> bool:
    """True if the line about a flag should mention this setting, the one at `position` in
    `merged.settings`. False if it yields (the flag is mainly about other keys) and the key would
    have the same value without it, from the highest setting below or by default. `final_values`:
    key -> final value; a value from below is compared with it as it was typed."""
    _, setting = merged.settings[position]
    if not setting.yields:
        return True
    value_without = keys_of(merged.config_type)[setting.key].default
    for _, lower_setting in merged.settings[:position]:  # lowest first, so the last one counts
        if lower_setting.key == setting.key and lower_setting.value is not NO_VALUE:
            value_without = lower_setting.value
    return value_without != final_values[setting.key]


def _recipe_notes(config_type: type, layers: Sequence[Layer], uses: Sequence[FlagUse]) -> list[str]:
    """Returns at most one line of advice about recipes, as a list: if two or more flags of a system
    (`_systems_of_flags`) are given without a recipe or a preset, or if the user's file has ENOUGH
    names of another system than that of the recipe in use. `layers`: as typed; `uses`: the flags in
    them."""
    recipe = ""
    has_preset = False
    for layer in layers:
        for setting in layer.settings:
            has_preset = has_preset or setting.origin.startswith("preset ")
            if setting.name == "recipe" and setting.value and not recipe:  # the lowest layer's
                recipe = str(setting.value)
    if recipe in [system.lower() for system in SYSTEMS]:
        for layer in layers:
            likely, is_sure = likely_system(setting.name for setting in layer.settings)
            if layer.file and layer.is_users and is_sure and likely.lower() != recipe:
                return [
                    f"{layer.file} is {likely}'s, and settings that it does not name are as in "
                    f"{recipe}: recipe={likely.lower()} sets {likely}'s defaults"
                ]
    if recipe or has_preset or "recipe" not in keys_of(config_type):
        return []
    systems = _systems_of_flags(uses)
    if not systems:
        return []
    whose = " or ".join(f"{system}'s" for system in systems)
    recipes = " or ".join(f"recipe={system.lower()}" for system in systems)
    which = f"{systems[0]}'s" if len(systems) == 1 else "that system's"
    return [
        f"{whose} flags change only what they name; all else has Shoal's defaults, and {recipes} "
        f"sets {which} instead"
    ]


def _systems_of_flags(uses: Sequence[FlagUse]) -> list[str]:
    """Returns the systems whose command line the used flags are likely to be from; [] if they are
    fewer than two. It is the one system with the most flags that no other has; without such flags,
    all systems that have every flag."""
    shared: Counter[str] = Counter()  # system -> number of used flags that it has
    own: Counter[str] = Counter()  # system -> number of used flags that it alone has
    num_flags = 0
    for use in uses:
        systems = [system for system, rows in _EXACT.items() if use.flag.name in rows]
        if not use.flag.keys or not systems:
            continue
        num_flags += 1
        shared.update(systems)
        if len(systems) == 1:
            own.update(systems)
    if own:
        [(system, _)] = own.most_common(1)
        likely = [system]
    else:
        likely = [system for system, number in shared.items() if number == num_flags]
    return [system for system in likely if shared[system] > 1]


def _group_size_notes(merged: Merged) -> list[str]:
    """Returns a line, as a list, if a run with verl's defaults compares completions of a prompt and
    the user did not say how many: verl's default is one, which the recipe does not set. Else
    []."""
    key = "batch.group_size"
    if key not in keys_of(merged.config_type) or merged.get("recipe") != "verl":
        return []
    origin = merged.origins.get(key, "")
    is_typed = origin and origin.partition(" ")[0] not in ("task", *PACKAGED.values())
    if is_typed or merged.get("algorithm.advantage") == "gae":
        return []
    return [
        f"actor_rollout_ref.rollout.n is not given: {key}={merged.get(key)} completions of each "
        "prompt here, 1 in verl"
    ]


# ---- errors in a system's names


def typed_names_adder(resolved: Resolved) -> Callable[[str], str]:
    """Returns a function that adds to a message the flags of another system that set the keys which
    it mentions, like `add_typed_names`. If no such flags were typed, it returns the message
    unchanged."""
    if not resolved.became:
        return str
    return partial(add_typed_names, resolved=resolved)


def print_notes(resolved: Resolved, console: Console) -> None:
    """Prints the notes about a configuration, and what flags of other systems became. From here on
    the console adds the names of such flags to its messages (`typed_names_adder`)."""
    for note in resolved.notes:
        console.note(note)
    console.block("flags of other systems:", resolved.flag_lines)
    console.add_typed_names = typed_names_adder(resolved)


def add_typed_names(message: str, resolved: Resolved) -> str:
    """Returns a message with, for each key that it mentions, the flag or the line of a file that
    set the key. If one system has more of the names that the user typed than any other, its names
    for the other keys mentioned are added. Unchanged if there is nothing to add.

    >>> add_typed_names("set batch.group_size lower", resolved)
    'set batch.group_size lower (batch.group_size: --num_generations)'
    """
    typed = {setting.name for setting in resolved.arguments.settings}
    votes = sorted((len(typed & rows.keys()), system) for system, rows in _EXACT.items())
    system = ""
    if votes[-1][0] > votes[-2][0]:  # not if two systems are equally likely
        system = votes[-1][1]
    named: dict[str, str] = {}
    precedences: dict[str, tuple[bool, bool]] = {}  # key -> that of the flag in `named`
    for flag in SYSTEMS.get(system, ()):
        if flag.is_pattern:
            continue
        for key in flag.keys:
            # The whole dotted name, not a part of a longer one.
            is_mentioned = re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", message)
            # A name that the user did not type: the key is at its default, or a recipe's.
            origin = resolved.origins.get(key, "")
            is_typed = origin and origin.partition(" ")[0] not in PACKAGED.values()
            if is_typed or not is_mentioned:
                continue
            # Of several flags the one with the key's own name, like `warmup_steps`, else the first
            # that is mainly about this key.
            precedence = (flag.name == key.rpartition(".")[2], flag.keys[0] == key)
            if key not in named or precedence > precedences[key]:
                named[key] = flag.name
                precedences[key] = precedence
    for setting, theirs in trl.SETTINGS.items() if system == "TRL" else ():
        key = setting.partition("=")[0]
        if key in named and setting in message:
            del named[key]
            named[setting] = theirs
    if "HF_TOKEN" in message and system == "MaxText":
        named["HF_TOKEN"] = HUB_TOKEN_KEY
    explained = with_origins(message, resolved.origins)
    if not named:
        return explained
    if "resume=" in message and named.get("resume") == "trainer.resume_mode":
        # verl's flag names how to resume; another flag names the run.
        named["resume"] = "trainer.resume_mode=resume_path trainer.resume_from_path=FOLDER"
    tail = ", ".join(f"{key} is {name}" for key, name in named.items())
    return f"{explained} (in {system}: {tail})"
