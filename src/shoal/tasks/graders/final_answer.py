"""The final answer in a solution of whatever form, as a number: for answers that were made elsewhere.

Thoughts before the last `</think>` or `</reasoning>` and a next question that the model asks itself are left out. The
first of these decides: `#### 42` (the first one, as the published labels have it, but no heading `#### 1. Find it`), a
last line `A: 42`, `<answer>42</answer>`, `\\boxed{42}`, "the answer is 42" or "Answer: 42" where a number is all that
follows, or no later line has one; else what stands in bold or behind `=` in the last line with a number, else the last
number. Every search is linear in the text's length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction

from shoal.tasks.graders.answer import closing_place, extract_answer

MAX_NUMBER_CHARS = 100
"""A longer run of digits is no number."""
_MAX_CHARS = 1000
"""The number of a longer text is read from its last characters."""
_MAX_SAID = 20
"""So many last places with "the answer is" are read."""

_GROUPED = (r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}"
            r"|(?<![0-9.,] )(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9/]))(?![0-9])")
_NUMBER = rf"(?:{_GROUPED}|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z])\.[0-9]+"
_SIGNED = re.compile(rf"(?P<minus>(?<![0-9A-Za-z)\]}}.])-)?(?:\$\s?(?P<second>-)?)?(?P<number>{_NUMBER})"
                     rf"(?:(?P<mixed>\s[0-9]{{1,9}})?\s?/\s?(?P<below>[0-9]{{1,9}})(?![0-9./]))?")
_PUBLISHED = re.compile(r"#### (-?[0-9.,]+)([^\n]*)")
_HASHES = re.compile(r"#### ?[*$\\ ]*([-−–]?\$?(?:[0-9]|\.[0-9])[^\n]*)")
_HEADING = re.compile(r"[-0-9,]*[0-9](?:[.)][^\S\n]+[^\s*]|\**[A-Za-z])")
_LAST_LINE = re.compile(r"\s*A:(.*)")
_SAID = re.compile(r"\banswer\b(?:\s{1,3}to\b[^.:=\n]{0,100}?)?\**\s{0,3}"
                   r"(?:(?P<is>\b(?:is|would be|will be|should be)\b"
                   r"(?!\s{1,3}(?:found|obtained|calculated|computed|determined|derived|not)\b))|:|=)"
                   r"[\s:*]{0,20}|\bans\s?[:=][\s*]{0,20}", re.IGNORECASE)
_UNITS = r"(?:[\s*]*(?:[^\W\d_][\w'./^²³-]{0,20}|[%°]))"
_NOTHING = re.compile(r"[\s.,:;!?…*_]*")
_BARE = re.compile(rf"[~≈\s]*(?:about\s|approximately\s)?-?\s?\$?(?P<number>{_NUMBER})"
                   rf"(?:\s?[0-9]{{0,9}}\s?/\s?[0-9]{{1,9}})?(?P<units>{_UNITS}{{0,3}})[\s.!*]*", re.IGNORECASE)
_ALONE = re.compile(r"\$[^$\n]+\$|\*\*[^*\n]+\*\*|\\\([^\n]+?\\\)|(?:[A-Za-z]\s?=\s?)?[^\s=]+")
_WRAPS = str.maketrans("", "", "$*\\()[]{}`\"")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_CUT_ANNOTATION = re.compile(r"<<[^<>\n]*\Z")
_NEXT_QUESTION = re.compile(r"^[^\S\n]*\**(?:Q|Question)\**:", re.MULTILINE)
_BULLET = re.compile(r"\s*[-•]\s+")
_SENTENCE = re.compile(r"[.!?](?=\s|\Z)")
_FRACTION = re.compile(r"([0-9]\s?)?\\[dt]?frac\s?(?:\{\s?(-?[0-9]{1,9})\s?\}|([0-9]))"
                       r"\s?(?:\{\s?([0-9]{1,9})\s?\}|([0-9]))")
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_OPERATION = re.compile(r"[0-9)%]\s{0,2}[A-Za-z]{0,12}\s{0,2}(?:[-+*/×·÷x]|\\times|\\cdot|\\div)"
                        r"\s{0,2}[$(]?\s{0,2}[0-9]")
_ENDS_IN_NUMBER = re.compile(rf"(?:^|[^-+*/×·÷0-9.,\s])\s?(-?\$?(?:{_NUMBER}))\s?[A-Za-z]{{0,12}}\s?\Z")
_SHARE_OF = re.compile(r"\W{0,9}[0-9][0-9./]{0,20}\s?(?:%|percent)?\s?of\b[^\n]{1,200}?\b(?:which|that) is\b")
_PLAIN = {"−": "-", "–": "-", "\\$": "$", "\\%": "%", "{,}": ",", "\\!": "", "\\,": "", "\\;": " ", "\\ ": " ",
          "~": " ", "\\left": "", "\\right": "", "&nbsp;": " ", "\u00a0": " ", "\u202f": " ", "€": "$", "£": "$"}


def final_number(text: str) -> Fraction | None:
    """The number that a solution ends with; None where it has none.

    >>> final_number("She sells 48/2 = <<48/2=24>>24 clips.\\n#### 24"), final_number("So the answer is **$1,234.50**.")
    (Fraction(24, 1), Fraction(2469, 2))
    """
    text = solution_of(_CUT_ANNOTATION.sub("", _ANNOTATION.sub("", text)))
    if (marked := behind_hashes(text)) is not None:
        return number_in(marked)
    last = _LAST_LINE.match(text.rstrip().rpartition("\n")[2])
    if last and is_bare(last[1]):
        return number_in(last[1])
    tagged = extract_answer(text)
    if tagged is not None:
        inner = last_boxed(tagged)
        return number_in(tagged if inner is None else inner)
    boxed = last_boxed(text)
    if boxed is not None:
        return number_in(boxed)
    numbers = (number_in(clause) for clause in _clauses(text))
    found = next((number for number in numbers if number is not None), None)
    if found is None and last and len(_SENTENCE.split(last[1].strip())) <= 2:
        found = number_in(last[1])
    return _at_the_end(text) if found is None else found


def solution_of(text: str) -> str:
    """A text without the thoughts before it, and without the next question behind it.

    >>> solution_of("<think>5?</think> It is 6.\\n\\nQuestion: and 7?")
    ' It is 6.\\n\\n'
    """
    end = max(text.rfind(tag) + len(tag) if tag in text else 0 for tag in ("</think>", "</reasoning>"))
    text = text[end:] if text[end:].strip() else text
    asked = next((one.start() for one in _NEXT_QUESTION.finditer(text)), 0)
    return text[:asked] if _has_digit(text[:asked]) else text


def said_answer(text: str) -> str | None:
    """What the last "the answer is" or "Answer:" that counts is followed by, up to the sentence's end; None where
    there is none."""
    return next(filter(None, _clauses(text)), None)


def _clauses(text: str) -> Iterator[str]:
    """The text that is given as the answer, the last place first: where a number or a formula is all that follows in
    its line, or no later line has a digit."""
    last_digit = max(map(text.rfind, "0123456789"))
    for match in reversed(list(_SAID.finditer(text))[-_MAX_SAID:]):
        end = text.find("\n", match.end())
        end = len(text) if end < 0 else end
        line = text[match.end():min(end, match.end() + _MAX_CHARS)].strip()
        line = "" if _NOTHING.fullmatch(line) else line
        first, *others = [part.strip() for part in _SENTENCE.split(line) if part.strip()] or [""]
        if _is_alone(line) or (others and match["is"] and _is_alone(first)):
            yield line.rstrip(" .*").lstrip(" *") if _is_alone(line) else first.strip(" *")
        elif last_digit < end:
            begins = (found := _BARE.fullmatch(first)) and len(found["units"].split()) <= 1
            if others and not match["is"] and not begins:
                first = next(filter(_has_digit, reversed(others)), first if _has_digit(first) else "")
            yield first.strip(" *")


def is_bare(text: str) -> bool:
    """True if a text is one number and at most three words of units."""
    return _BARE.fullmatch(_plain(text[:_MAX_CHARS]).translate(_WRAPS)) is not None


def _is_alone(text: str) -> bool:
    """True if a text is a number with units, a formula or a word, and nothing else."""
    return is_bare(text) or _ALONE.fullmatch(text.strip(" .")) is not None


def behind_hashes(text: str) -> str | None:
    """What stands behind the first `####` that a number follows, if it is no heading."""
    for match in _PUBLISHED.finditer(text):
        number, rest = match[1].rstrip(".,"), match[2]
        if _has_digit(number) and not _HEADING.match(match[1] + rest):
            return number + rest if re.match(r"\s?/\s?[0-9]", rest) else number
    lines = (match[1] for match in _HASHES.finditer(text))
    return next((line for line in lines if not _HEADING.match(line)), None)


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


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` (or `\\fbox{...}`); None where there is none, or it is not closed.

    >>> last_boxed("\\\\boxed{1} or \\\\boxed{\\\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start)
    end = closing_place(text, begin)
    return text[begin + 1:end].strip() if end >= 0 else None


def number_in(text: str) -> Fraction | None:
    """The number in a short text: alone, with units, as `a/b` or `\\frac{a}{b}`, behind the last `=` (before it, where
    a sum stands behind it); of several the first where the text begins with one, else the last.

    >>> number_in("$42.00 per day"), number_in("x = 7/2"), number_in("20 = 5*4"), number_in("none")
    (Fraction(42, 1), Fraction(7, 2), Fraction(20, 1), None)
    """
    text = _plain(text[-_MAX_CHARS:])
    head = text.partition(" (")[0]
    text = head if _BARE.fullmatch(head) else text
    before, equals, text = text.rpartition("=")
    if equals and _OPERATION.search(text) and (left := _ENDS_IN_NUMBER.search(before)):
        text = left[1]
    if equals or text.lstrip(" $({").startswith("-"):
        text = re.sub(r"^([\s$({]*-)\s+(?=[$0-9.])", r"\1", text)
    if share := _SHARE_OF.match(text):
        text = text[share.end():]
    found = list(_SIGNED.finditer(text))
    if not found:
        return None
    begins = not text[:found[0].start()].strip(" \t\n$*({[\\`\"'~≈:")
    return _value(found[0] if begins else found[-1])


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


def _at_the_end(text: str) -> Fraction | None:
    """The number of the last line that has one: in bold, behind `=`, or the last."""
    line = next((line for line in reversed(text.split("\n")) if _has_digit(line)), "")
    line = _BULLET.sub("", line, count=1) if _BULLET.match(line) else line
    for bold in reversed(_BOLD.findall(line)):
        if (found := number_in(bold)) is not None:
            return found
    _, equals, behind = line.rpartition("=")
    found = number_in(line) if equals and _has_digit(behind) else None
    return found if found is not None else number_in("last: " + line)


def _has_digit(text: str) -> bool:
    return any(character in "0123456789" for character in text)
