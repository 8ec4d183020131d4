"""The front end for other systems' flags: `translate` makes layers of words of our keys from layers
as they were typed.

layers as typed  ->  the highest use of each flag
    ->  words in its place                   of a flag alone, or of several read together
    ->  words that follow from other keys    by the rules, in their order, each with the values of
                                             all that stands before it
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.compat import maxtext, torchrl, trl, verl
from shoal.compat.rules import RULES
from shoal.config.foreign import (
    INSTEAD,
    NOTHING,
    OFF,
    Flag,
    Given,
    Group,
    Rule,
    Translation,
    Values,
    Yielding,
)
from shoal.config.key import keys_of, shown, text_of
from shoal.config.merge import Merged, Resolved, with_origins
from shoal.config.names import names_of
from shoal.config.token import TOKEN
from shoal.config.words import NO_VALUE, Layer, Word
from shoal.records import ShoalError
from shoal.text import count


def _rows_of(system: str, flags: Sequence[Flag]) -> list[Flag]:
    return [replace(flag, system=system) for flag in flags]


SYSTEMS: Mapping[str, Sequence[Flag]] = {
    "TRL": _rows_of("TRL", trl.FLAGS),
    "verl": _rows_of("verl", verl.FLAGS),
    "MaxText": _rows_of("MaxText", maxtext.FLAGS),
    "TorchRL": _rows_of("TorchRL", torchrl.FLAGS),
    "Tunix": _rows_of("Tunix", maxtext.TUNIX_FLAGS),
}
"""Of a name that several systems have, the first row counts, unless a layer's other names are
another system's."""

_EXACT: dict[str, dict[str, Flag]] = {}
"""System -> name -> row."""

_PATTERNS: dict[str, list[Flag]] = {}
"""System -> rows whose names are patterns."""

for _system, _flags in SYSTEMS.items():
    _EXACT[_system] = {flag.name: flag for flag in _flags if not flag.is_pattern}
    _PATTERNS[_system] = [flag for flag in _flags if flag.is_pattern]


# ---- rows of the tables


ENOUGH = 3
"""Flags of one system in a file, or on the command line, from which its patterns of names count
there."""


def find_flag(
    config_type: type, name: str, value: Any = None, among: Sequence[str] = ()
) -> Flag | None:
    """The flag of a name that a command accepts; for some names the value decides whether it is
    ours. Beside enough names of one system, `among`, its patterns of names count too."""
    likely, is_sure = likely_system(among)
    # A name without a dot may be a mistake.
    return find_row(config_type, name, value, likely, patterns=is_sure and "." in name)


def find_row(
    config_type: type, name: str, value: Any, likely: str = "", patterns: bool = False
) -> Flag | None:
    """The row of a name that a command accepts; of several the likely system's."""
    order = sorted(SYSTEMS, key=lambda system: system != likely)
    rows = [_EXACT[system][name] for system in order if name in _EXACT[system]]
    if patterns and likely:
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
    """Rows of a mapping in which the name lies, as `accelerator_config.split_batches` in one
    without effect. Where the mapping is refused, so is all that it sets."""
    rows = []
    head = name.rpartition(".")[0]
    while head:
        for system in order:
            flag = _EXACT[system].get(head)
            if flag and (flag.idle or flag.refused):
                rows.append(replace(flag, accepts=NOTHING, expected=""))
        head = head.rpartition(".")[0]
    return rows


def flags_of(config_type: type) -> Mapping[str, Sequence[Flag]]:
    """The flags that a command accepts, by name: a row for each system that has it."""
    flags: dict[str, list[Flag]] = {}
    for rows in _EXACT.values():
        for name, flag in rows.items():
            if flag.fits(config_type):
                flags.setdefault(name, []).append(flag)
    return flags


def likely_system(names: Iterable[str]) -> tuple[str, bool]:
    """The system that has most of the names, and whether it has enough of them for its patterns to
    count. Among fewer a recipe, as `recipe=verl`, says the system."""
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


# ---- from flags to words of our keys


@dataclass(frozen=True, eq=False)
class FlagUse:
    """One use of a flag: its row in the table, the word, and the numbers of its layer and of it
    there."""

    flag: Flag
    word: Word
    layer: int
    index: int

    @property
    def name(self) -> str:
        return self.word.name

    @property
    def text(self) -> str:
        return text_of(self.word.value)

    @property
    def where(self) -> str:
        """A file's line before an error; nothing for a command line, whose flag the error names."""
        return f"{self.word.origin}: " if ":" in self.word.origin else ""


LOWEST = -1
"""The number of a layer beneath all others: of words that yield to all else."""


@dataclass(eq=False)
class PlacedWord:
    """A word of our keys, and the layer and the index of the flag in whose place it stands."""

    word: Word
    layer: int
    index: int


@dataclass(eq=False)
class Effect:
    """What flags became, for the words that replace them and for a line on it in --dry-run; with
    `has_line` also for one at the start."""

    flags: Given  # as the line shows them
    last: tuple[int, int]  # the layer and the index of the last of them
    meaning: str = ""
    has_line: bool = False
    words: list[PlacedWord] = field(default_factory=list)
    rule: Rule | None = None
    # Of a rule: what it says of its values, and whether higher words left it something to do.
    reason: str | None = None
    applies: bool = True


def translate(config_type: type, layers: Sequence[Layer]) -> Translation:
    """The layers, lowest first, with their flags replaced by words of our keys."""
    draft = Draft(config_type, layers)
    groups: dict[Group, list[FlagUse]] = {}
    by_rule: dict[Rule, list[FlagUse]] = {}
    for use in draft.uses:
        flag = use.flag
        has_default = not (flag.keeps_nothing or flag.idle or flag.refused)
        if has_default and use.text.lower() in NOTHING:
            effect = draft.add_effect([use], meaning="it stays at its default")
            effect.flags = {use.name: use.text or "empty"}
        elif flag.group:
            groups.setdefault(flag.group, []).append(use)
        elif flag.rule:
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

    # A rule reads final values: each is applied to what those before it made.
    merged = Merged(config_type, draft.layers())
    errors = [*draft.errors, *merged.errors]
    for effect in effects:
        positions = _positions(merged)
        free = {}  # the keys of the rule that no higher word has, with their origins
        for placed in effect.words:
            word = placed.word
            if word.key not in merged.top or merged.top[word.key] < positions[id(word)]:
                free[word.key] = word.origin
        if not free:
            continue
        assert effect.rule is not None
        try:
            values, effect.reason = effect.rule(effect.flags, merged.get)
            for placed in effect.words:
                value = values.get(placed.word.key, NO_VALUE)
                placed.word = replace(placed.word, value=value)
            effect.applies = True
            merged = Merged(config_type, draft.layers())
        except ShoalError as error:
            errors.append(with_origins(str(error), merged.origins | free))

    became: list[tuple[str, bool]] = []
    values, errors_of_values = merged.values()
    if not errors and not errors_of_values:
        became = _became(draft, merged, values)
    return Translation(
        merged.layers, errors, _recipe_notes(config_type, layers, draft.uses), became
    )


def _positions(merged: Merged) -> dict[int, int]:
    """Identity of a word -> its position."""
    return {id(word): position for position, (_, word) in enumerate(merged.words)}


class Draft:
    """Layers while the flags in them are replaced by words."""

    def __init__(self, config_type: type, layers: Sequence[Layer]) -> None:
        self.config_type = config_type
        self.typed = layers
        self.taken: set[tuple[int, int]] = set()  # layer and index of each word that is a flag
        self.uses = self._highest_uses()
        self.effects: list[Effect] = []
        self.errors: list[str] = []

    def _highest_uses(self) -> list[FlagUse]:
        """The highest use of each flag; all uses are taken."""
        highest: dict[str, FlagUse] = {}
        all_names = set()
        recipes = []
        for layer in self.typed:
            for word in layer.words:
                all_names.add(word.name)
                if word.name == "recipe":
                    recipes.append(f"recipe={text_of(word.value)}")
        for number, layer in enumerate(self.typed):
            names = dict.fromkeys(word.name for word in layer.words)
            likely, is_sure = likely_system([*names, *recipes])
            for index, word in enumerate(layer.words):
                has_patterns = is_sure and layer.is_users and bool(layer.file or "." in word.name)
                flag = find_row(self.config_type, word.name, word.value, likely, has_patterns)
                if flag is None:
                    continue
                # Beside its own key, a name of ours is ours.
                if flag.value_filter and any(key in names for key in flag.keys):
                    continue
                if flag.requires_flag and flag.requires_flag not in all_names:
                    continue
                self.taken.add((number, index))
                # Removed first: the order is that of the highest uses.
                highest.pop(word.name, None)
                highest[word.name] = FlagUse(flag, word, number, index)
        return list(highest.values())

    def layers(self) -> list[Layer]:
        """The layers with words in the places of flags, in each first those that yield; beneath
        them, if there are any, the words that yield to all else."""
        by_layer: dict[int, list[PlacedWord]] = {}
        for effect in self.effects:
            for placed in effect.words:
                by_layer.setdefault(placed.layer, []).append(placed)
        for placed_words in by_layer.values():
            placed_words.sort(key=lambda placed: placed.index)
        layers = []
        if LOWEST in by_layer:
            layers.append(Layer([placed.word for placed in by_layer[LOWEST]]))
        for number, layer in enumerate(self.typed):
            yielding = []
            standing: dict[int, list[Word]] = {}  # index of a flag -> words in its place
            for placed in by_layer.get(number, ()):
                if placed.word.yields:
                    yielding.append(placed.word)
                else:
                    standing.setdefault(placed.index, []).append(placed.word)
            words = yielding
            for index, word in enumerate(layer.words):
                if (number, index) in self.taken:
                    words += standing.get(index, ())
                else:
                    words.append(word)
            layers.append(replace(layer, words=words, typed=layer.words))
        return layers

    def add_effect(self, uses: Sequence[FlagUse], meaning: str, has_line: bool = False) -> Effect:
        """A new effect of flags, shown at the place of the last of them."""
        last = max((use.layer, use.index) for use in uses)
        effect = Effect({use.name: use.text for use in uses}, last, meaning, has_line)
        self.effects.append(effect)
        return effect

    def add_single(self, use: FlagUse) -> None:
        """A flag whose own value says all."""
        flag, text, name = use.flag, use.text, use.name
        if flag.refused:
            if text.lower() not in flag.accepts:
                expected = f"expected {flag.expected}; " if flag.expected else ""
                is_sentence = expected or "not supported" in flag.meaning
                colon = ":" if is_sentence else " is not supported:"
                raise ShoalError(f"{name}={text}{colon} {expected}{flag.meaning}")
            self.add_effect([use], flag.meaning)
            return
        if flag.idle:
            is_off_in_file = bool(use.where) and (flag.is_quiet or text.lower() in OFF)
            effect = self.add_effect([use], flag.meaning, has_line=not is_off_in_file)
            effect.flags = {name: "..." if name == TOKEN else text}
            return
        value = use.word.value
        values: Values
        if flag.item and isinstance(value, list):
            items = [flag.item(item) if isinstance(item, str) else item for item in value]
            values = {flag.keys[0]: items}
        elif flag.read:
            values = flag.read(name, text)
        else:
            keys = keys_of(self.config_type)
            is_list = all(keys[key].is_list for key in flag.keys if key in keys)
            values = {flag.keys[0]: value if is_list else text}
        has_meaning = flag.has_tail and not flag.is_quiet
        effect = self.add_effect(
            [use], flag.meaning if has_meaning else "", has_line=not flag.is_quiet
        )
        for key, value in values.items():
            self._add_word(effect, use, key, value)

    def add_group(self, read: Group, uses: Sequence[FlagUse]) -> None:
        """Flags that are read together. What lies between a file's flag and a higher one of the
        group, as a recipe on the command line, may replace it: it then counts beneath that
        alone."""
        top = max(use.layer for use in uses)
        counting = []
        for use in uses:
            if not any(use.layer < layer < top for layer in self._layers_that_set(use)):
                counting.append(use)
        if len(counting) < len(uses):
            self.add_group(read, [use for use in uses if use.layer < top])
        values = _read(read, counting)
        values_without = {use: _read_without(read, counting, use) for use in counting}
        owners = {}
        for key, value in values.items():
            deciding = []  # the flags without which the key has another value
            for use in counting:
                if key in use.flag.keys and values_without[use].get(key) != value:
                    deciding.append(use)
            owners[key] = _owner(deciding or counting, key)
        effect = self._add_effect_of_several(counting, bool(values))
        for key, value in values.items():
            self._add_word(effect, owners[key], key, value)

    def add_rule(self, rule: Rule, uses: Sequence[FlagUse]) -> Effect:
        """Flags whose values need other keys: words of the keys which they name, without values
        before the rule has been applied."""
        keys: dict[str, None] = {}
        for use in uses:
            keys.update(dict.fromkeys((*use.flag.keys, *use.flag.default_only)))
        effect = self._add_effect_of_several(uses, bool(keys))
        effect.rule = rule
        effect.applies = not keys
        for key in keys:
            owner = _owner(uses, key)
            value: Any = NO_VALUE
            if key not in owner.flag.keys:
                value = Yielding(NO_VALUE, to_all=True)
            elif owner.flag.low_priority:
                value = Yielding(NO_VALUE)
            self._add_word(effect, owner, key, value)
        return effect

    def _layers_that_set(self, use: FlagUse) -> set[int]:
        """The layers in which a flag's first key is set by its own name, or by a flag that stands
        for itself."""
        names = names_of(self.config_type)
        first_key = use.flag.keys[0]
        numbers = set()
        for number, layer in enumerate(self.typed):
            for index, word in enumerate(layer.words):
                if (number, index) not in self.taken and names.get(word.name) == first_key:
                    numbers.add(number)
        for other in self.uses:
            stands_for_itself = not (other.flag.group or other.flag.rule)
            if stands_for_itself and other.flag.keys[:1] == (first_key,):
                numbers.add(other.layer)
        return numbers

    def _add_effect_of_several(self, uses: Sequence[FlagUse], has_keys: bool) -> Effect:
        loud = [use for use in uses if not use.flag.is_quiet]
        meaning = loud[0].flag.meaning if loud else ""
        return self.add_effect(uses, meaning, has_line=bool(loud) or not has_keys)

    def _add_word(self, effect: Effect, use: FlagUse, key: str, value: Any) -> None:
        """A word of a key, if the command has it, in the place of a flag."""
        keys = keys_of(self.config_type)
        if key not in keys:
            instead = INSTEAD.get(key, "")
            if instead not in keys:
                return
        else:
            instead = key
        yields = self._is_wide(use, key)
        layer = use.layer
        if isinstance(value, Yielding):
            yields = True
            if value.to_all:
                layer = LOWEST
            value = value.value
        word = Word(
            use.name,
            value,
            use.word.origin,
            instead,
            flags=tuple(effect.flags),
            of_rule=effect.rule is not None,
            yields=yields,
        )
        effect.words.append(PlacedWord(word, layer, use.index))

    def _is_wide(self, use: FlagUse, key: str) -> bool:
        """True if another system's flag in the layer names this key and only some of the flag's
        others: the narrower one stands, whatever the order. Flags of one system say by themselves
        which of them stands."""
        for other in self.uses:
            if other.layer != use.layer or other.flag.system == use.flag.system:
                continue
            if other.text.lower() in NOTHING or key not in other.flag.keys:
                continue
            if set(other.flag.keys) < set(use.flag.keys):
                return True
        return False


def _read(read: Group, uses: Sequence[FlagUse]) -> Values:
    return read({use.name: use.text for use in uses})


def _read_without(read: Group, uses: Sequence[FlagUse], use: FlagUse) -> Values:
    """What flags are without one of them; nothing where it cannot be missing."""
    if len(uses) == 1:
        return {}
    try:
        return _read(read, [other for other in uses if other is not use])
    except ShoalError:
        return {}


def _owner(uses: Sequence[FlagUse], key: str) -> FlagUse:
    """The flag at whose place a key stands: the highest that names it, in one layer the one that
    names fewest keys."""
    naming = [use for use in uses if key in use.flag.keys]
    if not naming:
        naming = [use for use in uses if key in use.flag.default_only]
    return max(naming or uses, key=lambda use: (use.layer, -(len(use.flag.keys) or 99), use.index))


# ---- lines on what flags became


def _became(draft: Draft, merged: Merged, values: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """A line for each flag of the user's that is in effect, and whether it is a note of its own;
    the flags of a file that change nothing share one line."""
    positions = _positions(merged)
    lines = []
    idle_names: dict[int, list[str]] = {}  # number of a file's layer -> flags that change nothing
    for effect in sorted(draft.effects, key=lambda effect: effect.last):
        number, _ = effect.last
        layer = draft.typed[number]
        if not layer.is_users or not effect.applies:
            continue
        if not effect.words and layer.file and not effect.has_line:
            idle_names.setdefault(number, []).extend(effect.flags)
            continue
        overruled = []
        became = []
        for placed in effect.words:
            word = placed.word
            position = positions[id(word)]
            highest = merged.top.get(word.key, -1)
            is_set = word.value is not NO_VALUE
            if highest > position or (is_set and highest != position):
                overruled.append(word)
            elif is_set and _is_said(position, merged, values):
                became.append(f"{word.key}={shown(values[word.key]) or repr('')}")
        if effect.words and len(overruled) == len(effect.words):
            continue
        reason = effect.meaning
        # Else the reason names keys without effect.
        is_whole = all(word.yields for word in overruled)
        if effect.reason is not None and is_whole:
            reason = effect.reason
        flags = ", ".join(f"{name}={text}" for name, text in effect.flags.items())
        line = f"{flags} changes nothing here"
        if became:
            line = f"{flags} became {', '.join(became)}"
        if reason:
            line += f": {reason}"
        is_note = effect.has_line or (bool(reason) and not effect.meaning)
        lines.append((line, is_note))
    for number, names in idle_names.items():
        file = draft.typed[number].file
        assert file is not None
        verb = "changes" if len(names) == 1 else "change"
        idle = f"{count(len(names), 'key')} that {verb} nothing here: {', '.join(names)}"
        lines.append((f"{file.name}: {idle}", True))
    return lines


def _is_said(position: int, merged: Merged, values: Mapping[str, Any]) -> bool:
    """False for a value that came with another key's flag and is as it was in the layers
    beneath."""
    _, word = merged.words[position]
    if not word.yields:
        return True
    before = keys_of(merged.config_type)[word.key].default
    for _, below in merged.words[:position]:
        if below.key == word.key and below.value is not NO_VALUE:
            before = below.value
    return before != values[word.key]


def _recipe_notes(config_type: type, layers: Sequence[Layer], uses: Sequence[FlagUse]) -> list[str]:
    """A line on the recipe of a system, where names that it alone has stand without the recipe or a
    preset, and where a file of the user's is another system's."""
    recipe = ""
    has_preset = False
    for layer in layers:
        for word in layer.words:
            has_preset = has_preset or word.origin.startswith("preset ")
            if word.name == "recipe" and word.value and not recipe:
                recipe = str(word.value)
    if recipe in [system.lower() for system in SYSTEMS]:
        for layer in layers:
            likely, is_sure = likely_system(word.name for word in layer.words)
            if layer.file and layer.is_users and is_sure and likely.lower() != recipe:
                return [
                    f"{layer.file} is {likely}'s, and what it does not name is as in {recipe}: "
                    f"recipe={likely.lower()} takes {likely}'s defaults"
                ]
    if recipe or has_preset or "recipe" not in keys_of(config_type):
        return []
    own: Counter[str] = Counter()  # flags that one system alone has, by system
    for use in uses:
        num_systems = sum(use.flag.name in rows for rows in _EXACT.values())
        if use.flag.keys and num_systems == 1:
            own[use.flag.system] += 1
    if not own:
        return []
    [(system, number)] = own.most_common(1)
    if number < 2:
        return []
    return [
        f"{system}'s flags change only what they name; recipe={system.lower()} sets its other "
        "defaults too"
    ]


# ---- errors in a system's names


def in_their_names(message: str, resolved: Resolved) -> str:
    """The message with the flag or the file's line of each key in it; where the user typed flags of
    one system, also with that system's names of the other keys.

    >>> in_their_names("set batch.group_size lower", resolved)
    'set batch.group_size lower (batch.group_size: --num_generations)'
    """
    typed = {word.name for word in resolved.arguments.words}
    votes = sorted((len(typed & rows.keys()), system) for system, rows in _EXACT.items())
    system = ""
    if votes[-1][0] > votes[-2][0]:  # many names are several systems'
        system = votes[-1][1]
    named: dict[str, str] = {}
    for flag in SYSTEMS.get(system, ()):
        if flag.is_pattern:
            continue
        for key in flag.keys:
            is_mentioned = re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", message)
            if key not in resolved.origins and is_mentioned:
                named.setdefault(key, flag.name)
    if "HF_TOKEN" in message and system == "MaxText":
        named["HF_TOKEN"] = TOKEN
    explained = with_origins(message, resolved.origins)
    if not named:
        return explained
    tail = ", ".join(f"{key} is {name}" for key, name in named.items())
    return f"{explained} (in {system}: {tail})"
