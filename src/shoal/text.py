"""Text for people: the nearest of some names, a number with its noun, one line of a long text."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping

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
