"""The answer in a completion: its tags, its number, its format. Nothing that a model wrote is ever
evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

from shoal.records import RewardFunction

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_TAGGED = r"<{0}>(?:(?!</?(?:reasoning|answer)>).)+</{0}>"
_WELL_FORMED = re.compile(
    _TAGGED.format("reasoning") + r"\s*" + _TAGGED.format("answer"), re.DOTALL
)
_SPACE = "[ \u00a0\u2009\u202f]"
_NUMBER = re.compile(
    rf"([+-]?)[\s$]*((?:[0-9]+|[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+)?"
    r"(?:\.[0-9]+)?)"
)
_MARKS = "$% \t\n\r\f\v\u00a0\u2009\u202f"


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion in TRL's two styles: plain text, or messages (the last one's
    content)."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def extract_answer(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`, stripped; None where there is none.

    >>> extract_answer("<answer>3</answer> no: <answer> 4 </answer>")
    '4'
    """
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def single_answer(text: str) -> str | None:
    """What stands in the only `<answer>...</answer>`; None where there is none, or more than one
    tag of a kind."""
    once = text.count("<answer>") == 1 and text.count("</answer>") == 1
    return extract_answer(text) if once else None


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` (or `\\fbox{...}`); None where there is none, or it is
    not closed.

    >>> last_boxed("\\\\boxed{1} or \\\\boxed{\\\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    begin, depth = text.find("{", start), 0
    for at in range(begin, len(text)) if start >= 0 else ():
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[begin + 1 : at].strip()
    return None


def solution_of(text: str) -> str:
    """A text without the thoughts before it, and without the next question behind it, that a model
    asks itself.

    >>> solution_of("<think>5?</think> It is 6.\\n\\nQuestion: and 7?")
    ' It is 6.\\n\\n'
    """
    end = max(
        text.rfind(tag) + len(tag) if tag in text else 0 for tag in ("</think>", "</reasoning>")
    )
    text = text[end:] if text[end:].strip() else text
    asked = _NEXT_QUESTION.search(text)
    return text[: asked.start()] if asked and _has_digit(text[: asked.start()]) else text


def parse_number(text: str | None) -> Decimal | None:
    """A number as people write it: sign, groups of three digits by commas or spaces, `$` and `%`
    around it, a final period; None for anything else.

    >>> parse_number("$1,234.50."), parse_number("12 apples"), parse_number("4 2")
    (Decimal('1234.50'), None, None)
    """
    match = _NUMBER.fullmatch((text or "").strip(_MARKS).removesuffix(".").strip(_MARKS))
    return Decimal(match[1] + re.sub(rf"{_SPACE}|,", "", match[2])) if match and match[2] else None


def same_number(text: str | None, gold: str) -> bool:
    """True if both are numbers, and equal: `7`, `7.0` and `$7` are."""
    number = parse_number(text)
    return number is not None and number == parse_number(gold)


def well_formed(text: str) -> bool:
    """True if the whole text is one `<reasoning>...</reasoning>` and then one
    `<answer>...</answer>`, neither empty.

    White space around and between the two is allowed.
    """
    return _WELL_FORMED.fullmatch(text.strip()) is not None


def reward_of(
    name: str,
    points: Callable[..., float],
    weight: float = 1.0,
    columns: Sequence[str] = ("answer",),
) -> RewardFunction:
    """A function of a text and the values of these columns as one in TRL's convention, run in the
    caller's process."""

    def reward(completions: Sequence[Any], **given: Any) -> list[float]:
        texts = [completion_text(completion) for completion in completions]
        return [
            float(points(*values))
            for values in zip(texts, *map(given.__getitem__, columns), strict=True)
        ]

    reward.__name__ = name
    return RewardFunction(name, reward, weight, runs_in_process=True)


FORMAT = reward_of("format", well_formed, 0.1, columns=())
"""1.0 for a well-formed text, else 0.0."""


# ---- numbers in solutions of whatever form: of MaxText's answers, and of those that were made
# elsewhere

MAX_NUMBER_CHARS = 100
"""A longer run of digits is no number."""
_MAX_CHARS = 1000
"""The number of a longer text is read from its last characters."""
_MAX_SAID = 20
"""So many last places with "the answer is" are read."""

_GROUPED = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}"
    r"|(?<![0-9.,] )(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9/]))(?![0-9])"
)
_DIGITS = rf"(?:{_GROUPED}|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z])\.[0-9]+"
_SIGNED = re.compile(
    rf"(?P<minus>(?<![0-9A-Za-z)\]}}.])-)?(?:\$\s?(?P<second>-)?)?(?P<number>{_DIGITS})"
    rf"(?:(?P<mixed>\s[0-9]{{1,9}})?\s?/\s?(?P<below>[0-9]{{1,9}})(?![0-9./]))?"
)
_UNITS = r"(?:[\s*]*(?:[^\W\d_][\w'./^²³-]{0,20}|[%°]))"
_BARE = re.compile(
    rf"[~≈\s]*(?:about\s|approximately\s)?-?\s?\$?(?:{_DIGITS})"
    rf"(?:\s?[0-9]{{0,9}}\s?/\s?[0-9]{{1,9}})?{_UNITS}{{0,3}}[\s.!*]*",
    re.IGNORECASE,
)
_WRAPS = str.maketrans("", "", '$*\\()[]{}`"')
_FRACTION = re.compile(
    r"([0-9]\s?)?\\[dt]?frac\s?(?:\{\s?(-?[0-9]{1,9})\s?\}|([0-9]))"
    r"\s?(?:\{\s?([0-9]{1,9})\s?\}|([0-9]))"
)
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_PLAIN = {
    "−": "-",
    "–": "-",
    "\\$": "$",
    "\\%": "%",
    "{,}": ",",
    "\\!": "",
    "\\,": "",
    "\\;": " ",
    "\\ ": " ",
    "~": " ",
    "\\left": "",
    "\\right": "",
    "&nbsp;": " ",
    "\u00a0": " ",
    "\u202f": " ",
    "€": "$",
    "£": "$",
}

_ANNOTATION = re.compile(r"<<[^<>\n]*(?:>>|\Z)")
_NEXT_QUESTION = re.compile(r"^[^\S\n]*\**(?:Q|Question)\**:", re.MULTILINE)
# Not a heading, `#### 1. Eggs`.
_HASHES = re.compile(r"#### ?[*$\\ ]*(?![0-9]+[.)][^\S\n]+[^\s*])([-−–]?\$?\.?[0-9][^\n]*)")
_SAID = re.compile(r"\bans(?:wer)?\b[^.:=\n]{0,60}?(?:\bis\b|:|=)[\s:*]{0,20}", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!?](?=\s|\Z)")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")


def final_number(text: str) -> Fraction | None:
    """The number that a solution ends with: behind the first `####`, in the last tag or box, behind
    the last "the answer is" or "Answer:" where it stands alone or nothing follows, else in the last
    line with one, in bold, behind `=`, or the last of all. None without one. Every search is linear
    in the text's length.

    >>> final_number("She sells 48/2 = <<48/2=24>>24 clips.\\n#### 24")
    Fraction(24, 1)
    >>> final_number("So the answer is **$1,234.50**.")
    Fraction(2469, 2)
    """
    text = solution_of(_ANNOTATION.sub("", text))
    marked = _HASHES.search(text)
    if marked:
        return number_in(marked[1])
    tagged = extract_answer(text)
    boxed = last_boxed(text if tagged is None else tagged)
    if tagged is not None or boxed is not None:
        return number_in(boxed if boxed is not None else tagged or "")
    last_digit = max(map(text.rfind, "0123456789"))
    for said in reversed(list(_SAID.finditer(text))[-_MAX_SAID:]):
        rest = text[said.end() :].partition("\n")[0]
        first = _SENTENCE.split(rest[:_MAX_CHARS], maxsplit=1)[0]
        if is_bare(first) or said.end() <= last_digit < said.end() + len(rest):
            return number_in(first if is_bare(first) else rest)
    line = text[: last_digit + 1].rpartition("\n")[2] + text[last_digit + 1 :].partition("\n")[0]
    bold = list(filter(_has_digit, _BOLD.findall(line)))
    return number_in(bold[-1] if bold else "last: " + line)


def is_bare(text: str) -> bool:
    """True if a text is one number and at most three words of units."""
    return _BARE.fullmatch(_plain(text[:_MAX_CHARS]).translate(_WRAPS)) is not None


def number_in(text: str) -> Fraction | None:
    """The number in a short text: alone, with units, as `a/b` or `\\frac{a}{b}`, behind the last
    `=`; of several the first where the text begins with one, else the last.

    >>> number_in("$42.00 per day"), number_in("x = 7/2"), number_in("none")
    (Fraction(42, 1), Fraction(7, 2), None)
    """
    text = _plain(text[-_MAX_CHARS:])
    behind = text.rpartition("=")[2]
    text = behind if _has_digit(behind) else text
    text = re.sub(r"^([\s$({]*-)\s+(?=[$0-9.])", r"\1", text)
    found = list(_SIGNED.finditer(text))
    if not found:
        return None
    begins = not text[: found[0].start()].strip(" \t\n$*({[\\`\"'~≈:")
    return _value(found[0] if begins else found[-1])


def shown(number: Fraction | None) -> str | None:
    """A number as people write it: `42`, `2.5`, else `7/3`."""
    if number is None:
        return None
    below = number.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    if below > 1:
        return str(number)
    with localcontext(prec=4 * MAX_NUMBER_CHARS):
        return f"{Decimal(number.numerator) / Decimal(number.denominator):f}"


def answer_key(text: str | None) -> str | None:
    """An answer in one spelling, for maj@k: `$1,200.0` as `1200`; what is no number as it is.

    >>> answer_key("$1,200.0"), answer_key("twelve")
    ('1200', 'twelve')
    """
    number = parse_number(text) if text is None or len(text) <= MAX_NUMBER_CHARS else None
    return text if number is None else shown(Fraction(number))


def _plain(text: str) -> str:
    """Signs, fractions and words of LaTeX as people type them."""
    for given, plain in _PLAIN.items():
        text = text.replace(given, plain)
    return _WORDS.sub(r" \1 ", _FRACTION.sub(_fraction, text))


def _fraction(match: re.Match[str]) -> str:
    whole, *parts = match.groups()
    above, below = parts[0] or parts[1], parts[2] or parts[3]
    return f"{whole.strip()} {above}/{below} " if whole else f"{above}/{below} "


def _value(match: re.Match[str]) -> Fraction | None:
    number = match["number"].replace(",", "").replace(" ", "")
    if len(number) > MAX_NUMBER_CHARS:
        return None
    value = Fraction(number)
    if match["below"] is not None:
        below = int(match["below"])
        if below == 0:
            return None
        value = value + Fraction(int(match["mixed"]), below) if match["mixed"] else value / below
    return -value if match["minus"] or match["second"] else value


def _has_digit(text: str) -> bool:
    return any(character in "0123456789" for character in text)
