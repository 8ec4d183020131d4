"""DAPO's grader of mathematics, as verl has it for `data_source=math_dapo` and `aime...`: the
answer that a completion states is compared with the right one, both in one spelling.

The spelling is Minerva's: Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1. The prompts of
DAPO's data ask for a last line `Answer: ...`.
"""

from __future__ import annotations

import re

from shoal.tasks.graders.answer import end_of_bracket

NUM_CHARS = 300
"""Characters at the end of a completion in which an answer is looked for."""
NUM_CHARS_BOXED = 100
"""Those in which a `\\boxed{}` is looked for, if there is no `Answer:`."""
RIGHT, WRONG = 1.0, -1.0
"""Scores of a right and of any other answer."""

_STATED = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

_SPELLINGS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
"""Text -> what it becomes, one after the other."""

_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples"
)
_REMOVED = (
    *_UNITS.split(),
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)
"""Texts that are removed, one after the other: units, and LaTeX that changes no value."""

_LATEX = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),  # only what is between dollar signs
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),  # \frac12 is \frac{1}{2}
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)
"""Pattern -> what each of its matches becomes, one after the other."""


def spelled(answer: str) -> str:
    """Returns an answer in the spelling in which answers are compared.

    >>> spelled("x = \\\\frac12 \\\\text{ meters}")
    '\\\\frac{1}{2}'
    >>> spelled("$1,234$ dollars")
    '1234'
    """
    text = answer.split("=")[-1]
    for before, after in _SPELLINGS:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    for pattern, after in _LATEX:
        text = pattern.sub(after, text)
    text = text.replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()


def grade(completion: str, truth: str) -> tuple[bool, str | None]:
    """Returns (whether the completion states the right answer, the answer that was read). The last
    `Answer: ...` counts, in the spelling of `spelled`; without one the last `\\boxed{}`, exactly as
    it is written; None if there is neither."""
    end = completion[-NUM_CHARS:]
    stated = _STATED.findall(end)
    if stated:
        answer = spelled(stated[-1])
        return answer == spelled(truth), answer
    boxed = _last_boxed(end[-NUM_CHARS_BOXED:])
    return boxed == truth, boxed


def _last_boxed(text: str) -> str | None:
    """Returns what the last `\\boxed{...}` of a text holds, as it is written; None if there is none
    or its brace is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    opening = start + len("\\boxed")
    end = end_of_bracket(text, opening)
    if end == opening:
        return None
    return text[opening + 1 : end - 1]
