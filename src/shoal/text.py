"""Text for people: numbers, shares, bytes, seconds and durations; the nearest of some names; one
line of a long text."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

CLOSE = 0.75
"""From this likeness on, a name counts as what a misspelt one means."""


BEGINNING = 0.9
"""Likeness of a name to its first letters: `num_gen` means num_generations rather than num_envs."""


def likeness(a: str, b: str) -> float:
    """Returns how alike two texts are, from 0 (nothing in common) to 1 (equal but for case). Texts
    with the same letters in another order get 0.95, since that is a typing slip."""
    if a.lower() != b.lower() and sorted(a.lower()) == sorted(b.lower()):
        return 0.95
    return difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio()


def nearest(key: str, names: Iterable[str]) -> str:
    """Returns the name that is most like `key`, as a whole or in the last of its dotted parts; the
    first if several are equally like it; "" if there are no names."""
    best, most = "", -1.0  # less than any score
    for name in names:
        # A quick upper bound of the score first: of 350 names only a few have enough letters in
        # common.
        if nearness(key, name, _at_most) <= most:
            continue
        score = nearness(key, name)
        if score > most:
            best, most = name, score
    return best


def nearness(key: str, name: str, like: Callable[[str, str], float] = likeness) -> float:
    """Returns how similar a name is to `key`, from 0 to 1: the similarity of the whole names; or,
    if it is larger, nine tenths of the similarity of their last dotted parts (`lr` in
    `optimizer.lr`) plus one tenth of that of the whole names. A name whose last part begins with
    that of `key` (more than 3 letters) counts there as BEGINNING. 1 if `key` is the name's last
    part, whatever is before it. `like` is the function that compares two texts."""
    key_part = key.rpartition(".")[2]
    name_part = name.rpartition(".")[2]
    if key == name_part:
        return 1.0
    is_beginning = len(key_part) > 3 and name_part.startswith(key_part) and name_part != key_part
    part = BEGINNING if is_beginning else like(key_part, name_part)
    whole = like(key, name)
    return max(whole, 0.9 * part + 0.1 * whole)


def _at_most(a: str, b: str) -> float:
    """Returns an upper bound of `likeness` in a tenth of its time: the value if all letters in
    common stood in the same order."""
    a, b = a.lower(), b.lower()
    if not a and not b:
        return 1.0
    in_common = sum([min(a.count(letter), b.count(letter)) for letter in set(a)])
    return 2 * in_common / len(a + b)


def exact(number: float) -> str:
    """Returns the shortest decimal that gives the number back when it is read. (`:g` would keep six
    digits and so name another value.) An int is written as it is.

    >>> exact(1e-06), exact(8.0), exact(0.30000001)
    ('1e-06', '8', '0.30000001')
    """
    if not isinstance(number, float):
        return str(number)
    return repr(float(number)).removesuffix(".0")


def did_you_mean(
    key: str, names: Iterable[str], shown: Mapping[str, str] | None = None, lists_all: bool = False
) -> str:
    """Returns the end of a message, `, did you mean X?`, if one of the names is near to `key`: at
    least CLOSE, without the sections that both begin with, or with a last part that begins that of
    `key` or is begun by it (both of more than 3 letters; with the same sections before, also by one
    letter more, as `rollout.nn` for `rollout.n`). Else returns "", or with `lists_all` a
    list of all names; "" also if there are no names. `shown`: name -> how the message writes it.

    >>> did_you_mean("optimizr.lr", ["optimizer.lr"]), did_you_mean("use_peft", ["task.subset"])
    (', did you mean optimizer.lr?', '')
    >>> did_you_mean("gold", ["answer", "question"], lists_all=True)
    '; there are: answer, question'
    """
    # read twice below: an iterator could be read only once
    names = list(names)
    if not names:
        return ""
    name = nearest(key, names)
    key_part = key.rpartition(".")[2]
    name_part = name.rpartition(".")[2]
    is_long = min(len(key_part), len(name_part)) > 3
    is_part = is_long and (name_part.startswith(key_part) or key_part.startswith(name_part))
    # Long sections in common, as in `a.b.rate` and `a.b.name`, do not make names alike.
    different = _without_common_sections(key, name)
    shorter, longer = sorted(different, key=len)
    is_slip = different != (key, name) and bool(shorter) and shorter == longer[:-1]
    if is_part or is_slip or max(likeness(*different), likeness(key_part, name_part)) >= CLOSE:
        if shown:
            name = shown.get(name, name)
        return f", did you mean {name}?"
    if lists_all:
        return f"; there are: {', '.join(names)}"
    return ""


def _without_common_sections(a: str, b: str) -> tuple[str, str]:
    """Returns two dotted names without the sections that both begin with; at least the last part of
    each is left."""
    a_parts, b_parts = a.split("."), b.split(".")
    while len(a_parts) > 1 and len(b_parts) > 1 and a_parts[0] == b_parts[0]:
        del a_parts[0], b_parts[0]
    return ".".join(a_parts), ".".join(b_parts)


def count(number: int, one: str, many: str = "") -> str:
    """Returns a number with its noun in singular or plural; `many`: the plural, "" for `one` and an
    s.

    >>> count(1, "step"), count(1319, "question"), count(2, "entry", "entries")
    ('1 step', '1,319 questions', '2 entries')
    """
    noun = one if number == 1 else many or f"{one}s"
    return f"{number:,} {noun}"


def shorten(text: str, limit: int = 80) -> str:
    """Returns a text as one line of at most `limit` characters, with ` ... ` in place of its middle
    if it is longer. Every run of white space becomes one space."""
    line = one_line(text)
    if len(line) <= limit:
        return line
    half = (limit - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"


def describe_error(error: BaseException) -> str:
    """Returns the type and the message of an exception, `ValueError: what it says`; the type alone
    if the message is empty."""
    name = type(error).__name__
    text = str(error)
    return f"{name}: {text}" if text else name


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or the name of its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


FAILED_CALL = '{"error":'
"""The beginning of the answer to a tool call that could not be read, or whose tool failed (TRL's
form)."""


def failed_call(reason: str) -> str:
    """Returns the answer to a tool call that failed, as JSON."""
    return json.dumps({"error": reason})


def ranges(numbers: Iterable[int]) -> str:
    """Returns distinct numbers as text, in ascending order and with runs joined: 7, 1, 2, 3 as
    `1-3, 7`; "" for none."""
    spans: list[list[int]] = []  # first and last of each
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return ", ".join(texts)


def one_line(text: object) -> str:
    """Returns the text with every run of white space replaced by one space."""
    return " ".join(str(text).split())


def number_text(value: float, digits: int = 3) -> str:
    """Returns a number as a person writes it: with `digits` significant digits, without exponent
    between 1e-5 and 1e12, and `0` for a value below 1e-9, which is noise. Zeros at the end of
    decimals are left out.

    >>> [number_text(value) for value in (0.41234, 2.17e-14, 0.00002, 1234.5)]
    ['0.412', '0', '0.00002', '1,234']
    """
    if abs(value) < 1e-9:
        return "0"
    if not 1e-5 <= abs(value) < 1e12:
        return f"{value:.{digits}g}"
    # the power of ten of the first digit decides how many decimals are left
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    if "." not in text:
        return text
    return text.rstrip("0").rstrip(".")


def figure(value: Any, digits: int = 4) -> str:
    """Returns a value as a cell of a table shows it: a float with `digits` significant digits, any
    other value (also an int) as text, `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return str(value)


def duration(seconds: float) -> str:
    """Returns seconds as minutes and seconds, with hours if any: 0:05, 1:02:03. Less than 0 is
    0:00; `?` for infinity or NaN."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def speed_text(value: float | None) -> str:
    """Returns a speed in tokens a second: 1.2M tokens/s, 34.5k tokens/s, 678 tokens/s; `-` for
    None."""
    if value is None:
        return "-"
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{letter} tokens/s"
    return f"{value:.0f} tokens/s"


def is_share(name: str) -> bool:
    """True if a metric of this name is a share from 0 to 1, which is shown in percent: if the name
    begins with `accuracy`, `pass` or `maj`, or ends in `accuracy`, `share`, `fraction`,
    `well_formed`, `truncated`, `_strict` or `_loose`. Never for `rewards/...`."""
    if name.startswith("rewards/"):
        return False
    if name.startswith(("accuracy", "pass", "maj")):
        return True
    return name.endswith(
        ("accuracy", "share", "fraction", "well_formed", "truncated", "_strict", "_loose")
    )


def is_number(value: Any) -> bool:
    """True for a number of Python, NumPy or JAX; False for a bool and for an array of any
    dimension."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return False
    return getattr(value, "ndim", 0) == 0


def figure_text(name: str, value: Any) -> str:
    """Returns the value of a metric as text: shares (`is_share`) in percent, seconds and tokens a
    second with their unit, whole numbers without decimals, other numbers with 4 digits; `-` for
    None, `not a number` for infinity or NaN, any other value as one line."""
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
    if number.is_integer() and abs(number) < 1e15:
        return f"{number:.0f}"
    return number_text(number, 4)


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, with the first column aligned left and the others right, two
    spaces between them. `head`: the titles, which are the first line; each row has as many cells
    (else ValueError)."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def gib(num_bytes: float) -> str:
    """Returns a number of bytes as text, `1.2 GiB` or `34.0 MiB`; TiB if it is that large, MiB if
    it is less than one GiB."""
    for limit, unit in ((1 << 40, "TiB"), (1 << 30, "GiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:,.1f} {unit}"
    return f"{num_bytes / (1 << 20):.1f} MiB"


def seconds_text(seconds: float) -> str:
    """Returns a time as text: 0.34 s, 12.0 s, 3.4 min, 5.2 h. From 100 s on in minutes, from 100
    minutes on in hours."""
    for limit, divisor, unit in ((100, 1, "s"), (6000, 60, "min")):
        if seconds < limit:
            number = seconds / divisor
            digits = 1 if number >= 1 else 2
            return f"{number:.{digits}f} {unit}"
    return f"{seconds / 3600:.1f} h"
