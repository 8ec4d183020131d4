"""Compares two answers in mathematics: by text and value, else by math-verify.

The rules of text and value are here; `math_worker.py` asks math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from shoal.tasks.graders import math_worker
from shoal.tasks.graders.answer import closing_place

MAX_CHARS = 1000
"""A longer answer is wrong without a check."""
MAX_DEPTH = 25
"""So is one with more brackets inside one another."""

_NUMBER = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.([0-9]+))?")
_RATIO = re.compile(r"([+-]?)(?:\\frac\{([+-]?[0-9]{1,30})\}\{([0-9]{1,30})\}|([0-9]{1,30})/([0-9]{1,30}))")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
_LARGE_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac([0-9])([0-9])(?![0-9])")
_OPTION = re.compile(r"\(([A-Za-z])\)")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_ROOT = re.compile(r"√\s*|(?<![\\A-Za-z])sqrt\s*(?=[({])")
_RADICAND = re.compile(r"[0-9]+(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z])|\\pi(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SIGNS = {"−": "-", "π": "\\pi ", "∞": "\\infty ", "×": "\\times ", "÷": "/", "·": "\\cdot ", "≤": "\\leq ",
          "≥": "\\geq ", "°": "^\\circ ", "²": "^2", "³": "^3", "∪": "\\cup "}
_SPACING = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|(?<![0-9])\s+|\s+(?![0-9])")
_DROPPED = ("^\\circ", "^{\\circ}", "\\$", "$", "\\%", "%")


def same(gold: str, answer: str) -> bool | None:
    """True if they are the same answer; None where the check was ended at its limit, which counts as wrong."""
    return same_all([(gold, answer)])[0]


def same_all(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """`same` for pairs (gold, answer), several at a time."""
    found: list[bool | None] = [at_a_glance(gold, answer) for gold, answer in pairs]
    asked = [i for i, (_, answer) in enumerate(pairs) if found[i] is None and _is_readable(answer)]
    if asked:
        checked = math_worker.checker().ask([(latex(pairs[i][0]), latex(pairs[i][1])) for i in asked])
        for i, one in zip(asked, checked, strict=True):
            found[i] = one
    return found


def at_a_glance(gold: str, answer: str) -> bool | None:
    """True or False where the text or value of two answers decides; None where math-verify has to.

    >>> at_a_glance("\\\\frac{1}{2}", "0.5"), at_a_glance("7", "8"), at_a_glance("x^2", "x x")
    (True, False, None)
    """
    if not answer.strip():
        return False
    if len(answer) > MAX_CHARS:
        return None
    wanted, came = plain(gold), plain(answer)
    if wanted == came:
        return True
    if _WRAPPED.fullmatch(gold.strip()) and wanted.isalpha() and len(wanted) > 1:
        return wanted.casefold() == came.casefold()
    first, second = value(wanted), value(came)
    if first is None or second is None:
        return None
    if first == second:
        return True
    return False if first.denominator == second.denominator == 1 else None


def _is_readable(answer: str) -> bool:
    depth = most = 0
    for character in answer[:MAX_CHARS + 1]:
        depth += (character in "([{") - (character in ")]}")
        most = max(most, depth)
    return len(answer) <= MAX_CHARS and most <= MAX_DEPTH


def is_whole(gold: str) -> bool:
    """True if a gold answer can be read: it is not too long, and its braces come in pairs. For a large data set
    math-verify would take minutes."""
    depth = 0
    for brace in _BRACE.findall(gold[:MAX_CHARS + 1]):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0 and len(gold) <= MAX_CHARS


def latex(answer: str) -> str:
    """An answer with signs and names of plain text in LaTeX: `π/2`, `sqrt(2)`, `√10`."""
    for sign, command in _SIGNS.items():
        answer = answer.replace(sign, command)
    return _with_roots(_PI.sub(r"\\pi ", answer))


def _with_roots(text: str) -> str:
    """Roots of brackets, of a run of digits or of one letter as LaTeX has them; the inner ones first."""
    for match in reversed(list(_ROOT.finditer(text))):
        begin = end = match.end()
        root = "\\sqrt "
        if text[begin:begin + 1] in ("(", "{"):
            if (closing := closing_place(text, begin)) >= 0:
                root, end = f"\\sqrt{{{text[begin + 1:closing]}}}", closing + 1
        elif found := _RADICAND.match(text, begin):
            root, end = f"\\sqrt{{{found[0]}}}", found.end()
        text = text[:match.start()] + root + text[end:]
    return text


def plain(answer: str) -> str:
    """An answer without spacing, dollars, degrees, percent signs and words' wrapping, fractions in one spelling."""
    text = _LARGE_FRACTION.sub(r"\\frac", answer.strip().removesuffix(".").replace("{,}", ","))
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    text = _SPACING.sub("", _WRAPPED.sub(r"\1", text))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    option = _OPTION.fullmatch(text)
    return option[1] if option else text


def value(text: str) -> Fraction | None:
    """The number that a plain answer is; None for anything else."""
    if len(text) > 60:
        return None
    if match := _RATIO.fullmatch(text):
        above, below = int(match[2] or match[4]), int(match[3] or match[5])
        return None if below == 0 else Fraction(-above if match[1] == "-" else above, below)
    match = _NUMBER.fullmatch(text)
    return Fraction(text.replace(",", "")) if match and (match[2] or match[3]) else None
