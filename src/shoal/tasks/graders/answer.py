"""The answer in a completion: its tags, its number, its format. Nothing that a model wrote is ever evaluated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_TAGGED = r"<{0}>(?:(?!</?(?:reasoning|answer)>).)+</{0}>"
_WELL_FORMED = re.compile(_TAGGED.format("reasoning") + r"\s*" + _TAGGED.format("answer"), re.DOTALL)
_SPACE = "[ \u00a0\u2009\u202f]"
_NUMBER = re.compile(rf"([+-]?)[\s$]*((?:[0-9]+|[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+)?"
                     r"(?:\.[0-9]+)?)")
_MARKS = "$% \t\n\r\f\v\u00a0\u2009\u202f"


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion in TRL's two styles: plain text, or messages (the last one's content)."""
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
    """What stands in the only `<answer>...</answer>`; None where there is none, or more than one tag of a kind."""
    once = text.count("<answer>") == 1 and text.count("</answer>") == 1
    return extract_answer(text) if once else None


def closing_place(text: str, begin: int) -> int:
    """The place of the bracket that closes the one at `begin`; -1 where none does.

    >>> closing_place("f{a{b}}", 1)
    6
    """
    opening, depth = text[begin], 0
    closing = {"(": ")", "{": "}"}[opening]
    for at in range(begin, len(text)):
        depth += (text[at] == opening) - (text[at] == closing)
        if depth == 0:
            return at
    return -1


def parse_number(text: str | None) -> Decimal | None:
    """A number as people write it: sign, groups of three digits by commas or spaces, `$` and `%` around it, a final
    period; None for anything else.

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
    """True if the whole text is one `<reasoning>...</reasoning>` and then one `<answer>...</answer>`, neither empty.

    White space around and between the two is allowed.
    """
    return _WELL_FORMED.fullmatch(text.strip()) is not None


def format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """1.0 for each well-formed completion, else 0.0 (TRL's convention)."""
    return [float(well_formed(completion_text(completion))) for completion in completions]
