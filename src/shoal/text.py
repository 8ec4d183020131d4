"""Text for people: numbers, shares, bytes, seconds and durations; the nearest of some names; one
line of a long text."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

CLOSE = 0.75
"""Likeness from which a name is taken for a misspelling."""


BEGINNING = 0.9
"""Likeness of a name to its first letters: `num_gen` means num_generations rather than num_envs."""


def likeness(a: str, b: str) -> float:
    """0 (nothing in common) to 1 (equal but for case); letters that changed places are a slip of
    the fingers."""
    if a.lower() != b.lower() and sorted(a.lower()) == sorted(b.lower()):
        return 0.95
    return difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio()


def nearest(key: str, names: Iterable[str]) -> str:
    """The name most like `key`, as a whole or in the last of its dotted parts; of equals, the
    first."""

    # Of 350 keys a few have so many of the letters that their order is looked at.
    best, most = "", -1.0
    for name in names:
        if nearness(key, name, _at_most) > most and (score := nearness(key, name)) > most:
            best, most = name, score
    return best


def nearness(key: str, name: str, like: Callable[[str, str], float] = likeness) -> float:
    """How like `key` a name is, 0 to 1: as a whole, or in the last of its dotted parts."""
    last, theirs = key.rpartition(".")[2], name.rpartition(".")[2]
    is_beginning = len(last) > 3 and theirs.startswith(last) and theirs != last
    part = BEGINNING if is_beginning else like(last, theirs)
    whole = like(key, name)
    return max(whole, 0.9 * part + 0.1 * whole)


def _at_most(a: str, b: str) -> float:
    """No less than `likeness`, in a tenth of the time: as if all letters in common stood in the
    same order."""
    a, b = a.lower(), b.lower()
    return (
        2 * sum([min(a.count(letter), b.count(letter)) for letter in {*a}]) / len(a + b)
        if a + b
        else 1.0
    )


def exact(number: float) -> str:
    """The shortest decimal that gives a number back. `:g` keeps six digits of it, and names another
    value.

    >>> exact(1e-06), exact(8.0), exact(0.30000001)
    ('1e-06', '8', '0.30000001')
    """
    return repr(float(number)).removesuffix(".0") if isinstance(number, float) else str(number)


def did_you_mean(
    key: str, names: Iterable[str], shown: Mapping[str, str] | None = None, lists_all: bool = False
) -> str:
    """`, did you mean X?` where a name is near, else nothing, or all names. `shown`: names as they
    are written in the text.

    >>> did_you_mean("optimizr.lr", ["optimizer.lr"]), did_you_mean("use_peft", ["task.subset"])
    (', did you mean optimizer.lr?', '')
    >>> did_you_mean("gold", ["answer", "question"], lists_all=True)
    '; there are: answer, question'
    """
    if not (names := list(names)):
        return ""
    name = nearest(key, names)
    last, theirs = key.rpartition(".")[2], name.rpartition(".")[2]
    is_part = min(len(last), len(theirs)) > 3 and (
        theirs.startswith(last) or last.startswith(theirs)
    )
    if is_part or max(likeness(key, name), likeness(last, theirs)) >= CLOSE:
        return f", did you mean {(shown or {}).get(name, name)}?"
    return f"; there are: {', '.join(names)}" if lists_all else ""


def count(number: int, one: str, many: str = "") -> str:
    """A number with its noun, in one or many.

    >>> count(1, "step"), count(1319, "question"), count(2, "entry", "entries")
    ('1 step', '1,319 questions', '2 entries')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def shorten(text: str, limit: int = 80) -> str:
    """One line of at most `limit` characters, the middle left out."""
    line = " ".join(text.split())
    half = (limit - 5) // 2
    return line if len(line) <= limit else f"{line[:half]} ... {line[-half:]}"


def describe_error(error: BaseException) -> str:
    """`ValueError: what it says`."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


FAILED_CALL = '{"error":'
"""How the answer to a tool call begins that could not be read, or whose tool failed (TRL's
form)."""


def failed_call(reason: str) -> str:
    """The answer to a tool call that failed."""
    return json.dumps({"error": reason})


def ranges(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as `1-3, 7`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def one_line(text: object) -> str:
    """The text with every run of white space as one blank."""
    return " ".join(str(text).split())


def number_text(value: float, digits: int = 3) -> str:
    """A number as a person writes it: so many significant digits, no exponent where few zeros do, 0
    for noise.

    >>> [number_text(value) for value in (0.41234, 2.17e-14, 0.00002, 1234.5)]
    ['0.412', '0', '0.00002', '1,234']
    """
    if abs(value) < 1e-9:
        return "0"
    if not 1e-5 <= abs(value) < 1e12:
        return f"{value:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def figure(value: Any, digits: int = 4) -> str:
    """A figure as tables show it; `-` for none."""
    return (
        "-" if value is None else f"{value:.{digits}g}" if isinstance(value, float) else str(value)
    )


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours if any: 0:05, 1:02:03."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def speed_text(value: float | None) -> str:
    if value is None:
        return "-"
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{letter} tokens/s"
    return f"{value:.0f} tokens/s"


def is_share(name: str) -> bool:
    return not name.startswith("rewards/") and (
        name.startswith(("accuracy", "pass", "maj"))
        or name.endswith(
            ("accuracy", "share", "fraction", "well_formed", "truncated", "_strict", "_loose")
        )
    )


def is_number(value: Any) -> bool:
    return (
        not isinstance(value, bool)
        and hasattr(value, "__float__")
        and getattr(value, "ndim", 0) == 0
    )


def figure_text(name: str, value: Any) -> str:
    """One figure as text: shares in percent, seconds with their unit, other numbers in a few
    digits."""
    if value is None:
        return "-"
    if not is_number(value):
        return one_line(value)
    number = float(value)
    if not math.isfinite(number):
        return "not a number"
    if is_share(name):
        return f"{100 * number:.1f}%"
    if name.endswith("tokens_per_second"):
        return speed_text(number)
    if name.endswith("seconds") or name.startswith("seconds"):
        return f"{number:.1f} s"
    return f"{number:.0f}" if number.is_integer() and abs(number) < 1e15 else number_text(number, 4)


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if place == 0 else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def gib(num_bytes: float) -> str:
    """Bytes for reading: 1.2 GiB, 34 MiB."""
    for limit, unit in ((1 << 40, "TiB"), (1 << 30, "GiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:,.1f} {unit}"
    return f"{num_bytes / (1 << 20):.1f} MiB"


def seconds_text(seconds: float) -> str:
    """0.34 s, 12 s, 3.4 min, 5.2 h."""
    for limit, divisor, unit in ((100, 1, "s"), (6000, 60, "min")):
        if seconds < limit:
            return f"{seconds / divisor:.{1 if seconds / divisor >= 1 else 2}f} {unit}"
    return f"{seconds / 3600:.1f} h"
