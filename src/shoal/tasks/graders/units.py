"""Units of measurement behind an answer in mathematics: `5 cm` is not `5 m`. A unit on one side
alone decides nothing.

Published graders of MATH leave units out, since only some gold answers have them. Here, if both
answers have a known unit and the two are different, the answers differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from shoal.tasks.graders.numbers import DECIMAL

_NAMES = {
    "mm": "millimeter", "cm": "centimeter", "dm": "decimeter", "m": "meter mtr", "km": "kilometer",
    "in": "inch", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "mg": "milligram", "g": "gram gm", "kg": "kilogram kilo", "lb": "pound", "oz": "ounce",
    "ton": "tonne",
    "ms": "millisecond", "s": "second sec", "min": "minute", "h": "hour hr", "day": "",
    "week": "wk", "month": "",
    "year": "yr", "ml": "milliliter", "l": "liter lt", "gal": "gallon", "qt": "quart", "pt": "pint",
    "cent": "", "dollar": "", "deg": "degree", "rad": "radian", "am": "", "pm": "",
    "mi/h": "mph", "km/h": "kmh kmph kph",
}  # fmt: skip
_UNITS: dict[str, str] = {}
for _name, _aliases in _NAMES.items():
    _UNITS[_name] = _name
    for _alias in _aliases.split():
        _UNITS[_alias] = _name
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_FINAL_UNIT = re.compile(
    r"(?:(?<=[0-9})\]])|(?<=\s))(?P<circ>\^\s*\{?\s*\\circ\s*\}?)?(?P<words>[A-Za-z ./]{0,40})"
    r"(?:\^\s*\{?\s*(?P<power>[0-9])\s*\}?)?[\s.]*\Z"
)
"""Matches the words at the end of a text that may be a unit, `cm` in `5 cm`; with `^\\circ` before
them, or a power after them."""
_NUMBER_WITH_BASE = re.compile(
    r"(?P<digits>\s*-?[0-9A-Z.]+)\s*_\s*\{?\s*(?P<base>[0-9]{1,2})\s*\}?\s*"
)
"""Matches a number with its base, `52_8`."""
_MEASURE = re.compile(
    rf"[\s,]*(?:and\s+)?(?P<number>{DECIMAL})(?P<words>\s*[A-Za-z. ]{{1,40}}?)?"
    r"(?=\s*\Z|[\s,]+(?:and\s+)?[0-9])"
)
"""Matches one measure, `3 hours` in `3 hours and 20 minutes`."""
_NAMED = re.compile(r"\s*[A-Za-z]\s*=")
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")


@dataclass(frozen=True)
class Unit:
    """A unit of measurement with its power: `5 cm^2` has Unit("cm", 2)."""

    name: str
    power: int = 1


def unit_of(text: str) -> Unit | None:
    """Returns the unit at the end of a text without LaTeX commands; None if there is none, or if
    the unit is not known.

    >>> unit_of("5 cm ^2"), unit_of("5 square centimeters")
    (Unit(name='cm', power=2), Unit(name='cm', power=2))
    >>> unit_of("3 miles per hour"), unit_of("5 apples")
    (Unit(name='mi/h', power=1), None)
    """
    return quantity_of(text)[1]


def quantity_of(text: str, variables: Collection[str] = ()) -> tuple[str, Unit | None]:
    """Splits a text into (text before its final unit, the unit). A letter in `variables` is not a
    unit. The base of a number (`52_8`) counts as a unit. Without a final unit that is known, a text
    with `\\$` has the unit dollar and stays whole; for any other text returns (whole text, None).

    >>> quantity_of("5 m"), quantity_of("5 m", {"m"}), quantity_of("52_8")
    (('5', Unit(name='m', power=1)), ('5 m', None), ('52', Unit(name='base 8', power=1)))
    >>> quantity_of("\\\\$5")
    ('\\\\$5', Unit(name='dollar', power=1))
    """
    numeral = _NUMBER_WITH_BASE.fullmatch(text)
    if numeral is not None:
        return numeral["digits"].strip(), Unit(f"base {numeral['base']}")
    match = _FINAL_UNIT.search(text)
    if match is not None and match["words"].strip() not in variables:
        unit = _unit_of_words(match)
        if unit is not None:
            return text[: match.start()].strip(), unit
    if "\\$" in text:
        # The sign is before the number, not at the end; the comparison of texts drops it.
        return text, Unit("dollar")
    return text, None


def variables_of(text: str) -> set[str]:
    """Returns the single letters in a text, except its final unit and a name before `=`. In `3m +
    2s` the m is a variable, and s is taken for a unit."""
    expression = _NAMED.sub("", quantity_of(text)[0], count=1)
    return set(_LETTER.findall(expression))


def measures_of(text: str) -> list[tuple[str, int, Fraction]]:
    """Returns the measures in a text that is a list of them, as sorted (unit, power, number). The
    unit of a number without unit is "". [] if the text has anything else, an unknown unit, or
    several numbers one of which has no unit.

    >>> measures_of("5 ft 6 in")
    [('ft', 1, Fraction(5, 1)), ('in', 1, Fraction(6, 1))]
    >>> measures_of("12 cm, 5 cm") == measures_of("5 cm and 12 cm")
    True
    >>> measures_of("5, 6"), measures_of("5 ft x")
    ([], [])
    """
    measures: list[tuple[str, int, Fraction]] = []
    end = 0
    match = _MEASURE.match(text)
    while match is not None:
        unit = unit_of(match[0])
        has_words = bool((match["words"] or "").strip(" ."))
        if has_words and unit is None:
            return []
        if unit is None:
            unit = Unit("")
        measures.append((unit.name, unit.power, Fraction(match["number"])))
        end = match.end()
        match = _MEASURE.match(text, end)
    has_rest = bool(text[end:].strip(" ."))
    if has_rest:
        return []
    has_units = all(name for name, _, _ in measures)
    if not has_units and len(measures) > 1:
        return []
    return sorted(measures)


def _unit_of_words(match: re.Match[str]) -> Unit | None:
    """Returns the unit that a match of `_FINAL_UNIT`, the words at the end of a text, names; None
    if any of the words is unknown."""
    words = match["words"].replace(".", " ").lower().split()
    if match["circ"] and words in ([], ["c"], ["f"]):  # 90^\circ, 20^\circ C
        return Unit(f"deg{''.join(words)}")
    power = int(match["power"] or 1)
    if words and words[0] in _POWERS:
        power = _POWERS[words.pop(0)]
    if words in (["a", "m"], ["p", "m"]):  # 5 a.m.
        words = ["".join(words)]
    names = []
    # Without words there is one part, "", which is no unit.
    for part in " ".join(words).replace(" per ", "/").split("/"):
        name = _name_of(part.strip())
        if name is None:
            return None
        names.append(name)
    return Unit("/".join(names), power)


def _name_of(word: str) -> str | None:
    """Returns the short name of a unit: `cm` for `centimetres`; None if it is not known. Plurals
    and British spellings are known too."""
    word = word.replace("metre", "meter").replace("litre", "liter")
    for singular in (word, word.removesuffix("s"), word.removesuffix("es")):
        if singular in _UNITS:
            return _UNITS[singular]
    return None


def units_differ(first: Unit | None, second: Unit | None) -> bool:
    """True if both units are known (not None) and are different. A degree sign without C or F
    equals any kind of degrees. False if either is None."""
    if first is None or second is None or first == second:
        return False
    names = first.name, second.name
    return not ("deg" in names and all(name.startswith("deg") for name in names))
