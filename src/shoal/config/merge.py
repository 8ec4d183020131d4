"""Merges layers: every name in them becomes settings of keys, and the highest setting of a key counts.

    layers of entries  ->  settings (other systems' names by the translator)  ->  one a key  ->  values in their types
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.config.arguments import find_key, names_of
from shoal.config.foreign import COMMAND_LINE, PYTHON, Layer, Setting, Translation, translator
from shoal.config.keys import keys_of
from shoal.config.values import convert_value, text_of
from shoal.types import ShoalError

PROMPT_KEYS = ("batch.prompts_per_step", "batch.prompts_per_device")
"""Two keys for one number: the first unsets the second of lower layers; on a command line the later of them stands."""


@dataclass
class Merged:
    """The settings of some layers, and those of them that are in effect."""

    config_type: type
    layers: Sequence[Layer]
    settings: Sequence[Setting]  # lowest first
    translation: Translation
    top: Mapping[str, Setting] = field(init=False)
    _values: dict[str, Any] = field(default_factory=dict)
    _pending: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = sorted(self.settings, key=lambda one: one.place)
        self.top = _in_effect(self.settings, line=len(self.layers) - 1)

    def get(self, key: str) -> Any:
        """The value of a key in its type; empty for one that the command has not."""
        keys = keys_of(self.config_type)
        if key not in self.top:
            return keys[key].default if key in keys else ""
        if key in self._pending:
            raise ShoalError(f"{self.top[key].origin}: {key} refers to itself")
        if key not in self._values:
            self._pending.append(key)
            try:
                self._values[key] = convert_value(keys[key], self._referring(self.top[key]))
            finally:
                self._pending.pop()
        return self._values[key]

    def _referring(self, one: Setting) -> Any:
        """A setting's value; a file's with `${...}` replaced by final values of keys, or by other names of the file."""
        layer = self.layers[one.place[0]]
        if layer.file is None or not is_interpolated(one.value) or one.flags:
            return one.value
        names, raw = names_of(self.config_type), {entry.name: entry.value for entry in layer.entries}
        value = translator().interpolate(
            one.name, one.value, lambda name: self.get(names[name]) if name in names else raw[name])
        return list(value) if isinstance(value, tuple) else value

    def above(self, one: Setting) -> Setting:
        """The setting in effect in place of another, or that one itself."""
        return self.top.get(one.key) or self.top[PROMPT_KEYS[0]]

    def differs(self, one: Setting) -> bool:
        """True if a setting's value is another than the one in effect."""
        try:
            return convert_value(keys_of(self.config_type)[one.key], self._referring(one)) != self.get(one.key)
        except ShoalError:
            return True

    @property
    def origins(self) -> dict[str, str]:
        """Key -> `command line`, `--learning_rate`, `mine.yml:4`, `recipe trl`."""
        return {key: one.origin for key, one in self.top.items()}

    def values(self) -> tuple[dict[str, Any], list[str]]:
        """Key -> its value, of the keys that are set; and the errors of those that cannot be."""
        values, errors = {}, []
        for key in self.top:
            try:
                values[key] = self.get(key)
            except ShoalError as error:
                errors.append(with_origins(str(error), self.origins))
        return values, errors


def merge(config_type: type, layers: Sequence[Layer]) -> tuple[Merged, list[str]]:
    """The settings of layers, lowest first, and what is wrong with them. The rules of other systems' flags come last:
    a rule's settings stand at the places of its flags, so none replaces what lies above."""
    translation = translator().translate(config_type, layers)
    errors = [*translation.errors]
    settings = [*_own_settings(config_type, layers, translation, errors), *translation.settings]
    merged = Merged(config_type, layers, settings, translation)
    for rule in translation.rules:
        free = {one.key: one.origin for one in rule.claims
                if one.key not in merged.top or merged.top[one.key].place < one.place}
        try:
            if free:
                merged = Merged(config_type, layers, [*merged.settings, *rule.apply(merged.get)], translation)
        except ShoalError as error:
            errors.append(with_origins(str(error), merged.origins | free))
    return merged, errors


def is_interpolated(value: Any) -> bool:
    """True for a text, or a list with one, that refers to other names."""
    return any("${" in item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str))


def _own_settings(config_type: type, layers: Sequence[Layer], translation: Translation, errors: list[str]) -> Iterator[
        Setting]:
    """The settings under our own names; what is no name at all is an error."""
    for number, layer in enumerate(layers):
        for index, entry in enumerate(layer.entries):
            if (number, index) not in translation.taken:
                try:
                    key = find_key(config_type, entry.name).name
                except ShoalError as error:
                    errors.append(f"{entry.origin}: {error}" if layer.file else str(error))
                else:
                    yield Setting(key, entry.value, entry.origin, entry.name, (number, 1, index))


def _in_effect(settings: Sequence[Setting], line: int) -> dict[str, Setting]:
    """Key -> its highest setting, in the order of places. `line`: the number of the command line's layer."""
    given = [one for one in settings if one.place[0] == line and one.key in PROMPT_KEYS and text_of(one.value) != "0"]
    found: dict[str, Setting] = {}
    for one in settings:
        if given and one.place[0] == line and one.key in PROMPT_KEYS and (
                one.key != given[-1].key and one.place < given[-1].place):
            continue
        other = found.get(PROMPT_KEYS[1])
        if one.key == PROMPT_KEYS[0] and other and other.place[0] < one.place[0]:
            del found[other.key]
        found.pop(one.key, None)
        found[one.key] = one
    return found


# ---- two names for one key


def check_names(merged: Merged) -> tuple[list[str], list[str]]:
    """Notes on names that a command line gives twice, and errors of two names for one key in a file, which has no
    order, unless a higher layer sets the key. On a command line the two PROMPT_KEYS count as one; a file may hold both:
    a run's own does, where batch.prompts_per_device was given."""
    notes, errors = [], []
    claims = [one for rule in merged.translation.rules for one in rule.claims]
    made = {(one.flags, one.key) for one in claims}
    settings = sorted([*claims, *(one for one in merged.settings if (one.flags, one.key) not in made)],
                      key=lambda one: one.place)
    names = names_of(merged.config_type)
    for number, layer in enumerate(merged.layers):
        given: dict[str, str] = {}
        for index, entry in enumerate(layer.entries if layer.file is None else ()):
            name = entry.name if (number, index) in merged.translation.taken else names.get(entry.name, entry.name)
            text = text_of(entry.value)
            if given.setdefault(name, text) != text:
                given[name] = text
                notes.append(f"{name} is given more than once: the last one stands, {text}")
        found: dict[str, Setting] = {}
        for one in (one for one in settings if one.place[:2] == (number, 1)):
            before = found.pop(one.key, None)
            if before and _are_two(before, one):
                if layer.file is None:
                    notes += _twice(names, before, one, one.key)
                elif one.key not in merged.top or merged.top[one.key].place[0] <= number:
                    errors.append(f"{layer.file}: {before.name} and {one.name} both set {one.key}; write one of them")
            if one.key in PROMPT_KEYS and text_of(one.value) != "0":
                what = "how many prompts a step has"
                other = found.pop(PROMPT_KEYS[1 - PROMPT_KEYS.index(one.key)], None)
                if other and layer.file is None:
                    notes += _twice(names, other, one, what)
            found[one.key] = one
    return notes, errors


def _are_two(before: Setting, one: Setting) -> bool:
    """True for two names that give a key different values."""
    is_same = before.value is not None and text_of(before.value) == text_of(one.value)
    return not is_same and before.name != one.name and not (before.flags and before.flags is one.flags)


def _twice(names: Mapping[str, str], before: Setting, one: Setting, what: str) -> list[str]:
    both = f"{before.name} and {one.name} both set {what}: the later one stands, {one.name}"
    return [] if {before.name, one.name} <= names.keys() else [both]


# ---- origins


def with_origins(message: str, origins: Mapping[str, str]) -> str:
    """A message with the origin of each key in it that was not typed under its own name."""
    mentioned = [f"{key}: {origin}" for key, origin in origins.items() if origin not in (COMMAND_LINE, PYTHON)
                 and re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", message)]
    return f"{message} ({', '.join(mentioned)})" if mentioned else message
