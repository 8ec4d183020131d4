"""GSM8K as MaxText, Tunix, TorchRL and verl put it: prompt, rewards and the place of the answer, by
`reward.preset`.

The tags and the points are each system's own, the prompts say the same in other words.
"""

from __future__ import annotations

import re
from fractions import Fraction

from shoal.tasks.graders import arithmetic
from shoal.tasks.graders.answer import extract_answer, last_boxed, reward_of
from shoal.tasks.graders.numbers import (
    is_bare,
    number_in,
    parse_float,
    parse_number,
    same_number,
)
from shoal.tasks.gsm8k import RewardPreset, system_prompt, user_prompt

_REASONING = (
    "You get a problem. Work it out step by step between <reasoning> and </reasoning>. After that, "
    "give the final answer, one number and nothing else, between <answer> and </answer>."
)
_THINK = (
    "The user asks a question and you solve it. First think it through between <think> and "
    "</think>, then give the answer between <answer> and </answer>: <think>your thoughts</think> "
    "<answer>your answer</answer>."
)
_HASHES = 'Think step by step, and write the final answer after "####".'
_TAIL_CHARS = 300
"""verl looks for the answer in so many last characters."""

_DIGITS = re.compile(r"[\d.]+")  # of any script, as `float` reads them
_AFTER_HASHES = re.compile(r"#### (-?[0-9.,]+)")

# ---- maxtext: 1.0 for the answer, by text or by value, and 0.1 for the format


def has_reasoning_and_answer(text: str) -> bool:
    """Whether there is `<reasoning>...</reasoning>` and later an `<answer>...</answer>` that is not
    empty."""
    _, found = _after(text, 0, "<reasoning>", "</reasoning>", 0)
    return found >= 0 and _after(text, found, "<answer>", "</answer>")[1] >= 0


def tagged_or_boxed(text: str) -> str | None:
    """What stands in the last `<answer>`; where there is none, in the last box."""
    tagged = extract_answer(text)
    return last_boxed(text) if tagged is None else tagged


def same_value(answer: str | None, gold: str) -> bool:
    """Whether an answer is the gold text, or has its value: one number with units, or an expression
    of numbers."""
    if answer is None:
        return False
    if answer.strip() == gold.strip():
        return True
    boxed = last_boxed(answer)
    content = (answer if boxed is None else boxed).rpartition("=")[2].strip()
    wanted = parse_number(gold)
    if wanted is None:
        return False
    expression = arithmetic.read(content)
    if expression is not None:
        return expression.value == Fraction(wanted)
    content = content.removeprefix("+").rstrip(" ,")
    return is_bare(content) and number_in(content) == Fraction(wanted)


def _after(text: str, start: int, opening: str, closing: str, least: int = 1) -> tuple[int, int]:
    """Where the first `opening` from `start` on has its content, and the end of the first `closing`
    behind a content of `least` characters or more; -1 for what is not there."""
    begin = text.find(opening, start)
    if begin < 0:
        return -1, -1
    begin += len(opening)
    end = text.find(closing, begin + least)
    return begin, -1 if end < 0 else end + len(closing)


# ---- tunix: 9.5 points, 5 of them for the format


def exact_answer(text: str) -> str | None:
    """The answer of a text in Tunix's format, `<reasoning>...</reasoning>` and later `<answer>`:
    what stands up to `</answer>` or the end of its line, one character or more. None for another
    text."""
    _, found = _after(text, 0, "<reasoning>", "</reasoning>")
    opened = text.find("<answer>", found) + len("<answer>") if found >= 0 else 0
    if opened < len("<answer>") or opened >= len(text):
        return None
    ends = (text.find(end, opened + 1) for end in ("</answer>", "\n"))
    return text[opened : min((end for end in ends if end >= 0), default=len(text))]


def exact_or_tagged(text: str) -> str | None:
    """The answer of a text in the format, else what stands in the first `<answer>...</answer>`."""
    answer = exact_answer(text)
    return _first_tagged(text) if answer is None else answer.strip()


def tag_points(text: str) -> float:
    """0.5 for each of the four tags that occurs once, -0.5 for each that does not."""
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    return sum(0.5 if text.count(tag) == 1 else -0.5 for tag in tags)


def answer_points(text: str, gold: str) -> float:
    """For the answer of a text in the format, without commas and white space around: 3 where it is
    the gold number, by text or by value; by its ratio to the gold number 0.5 from 0.9 to 1.1, 0.25
    from 0.8 to 1.2, else -1; -0.5 where it is no number."""
    answer, gold = exact_answer(text), gold.strip().replace(",", "")
    if answer is None:
        return 0.0
    answer = answer.strip().replace(",", "")
    value, wanted = parse_float(answer), parse_float(gold)
    if answer == gold or (value is not None and value == wanted):
        return 3.0
    if value is None or wanted is None:
        return -0.5
    ratio = value / wanted if wanted else 0.0
    return 0.5 if 0.9 <= ratio <= 1.1 else 0.25 if 0.8 <= ratio <= 1.2 else -1.0


def number_points(text: str, gold: str) -> float:
    """1.5 where the first digits after the first `<answer>` are the gold number; signs and commas
    of the answer are not read."""
    opened = text.find("<answer>")
    found = _DIGITS.search(text, opened) if opened >= 0 else None
    value = parse_float(found[0]) if found else None
    return 1.5 if value is not None and value == parse_float(gold.strip().replace(",", "")) else 0.0


def _first_tagged(text: str) -> str | None:
    """What stands in the first `<answer>...</answer>`, stripped."""
    begin = text.find("<answer>")
    end = text.find("</answer>", begin) if begin >= 0 else -1
    return text[begin + len("<answer>") : end].strip() if end >= 0 else None


# ---- torchrl: 1.0 for the right answer, 0.1 for another one, 0 for none


def bare(answer: str) -> str:
    """An answer without commas, `$`, `%`, a final period and zeros behind a decimal point."""
    answer = answer.strip().replace(",", "").replace("$", "").replace("%", "").rstrip(".")
    return answer.rstrip("0").rstrip(".") if "." in answer else answer


def same_bare(answer: str | None, gold: str) -> bool:
    return bool(answer) and bare(answer or "") == bare(gold)


# ---- verl: 1 or 0


def hash_answer(text: str) -> str | None:
    """The number behind the last `####` and one space in the last 300 characters, commas
    removed."""
    found = _AFTER_HASHES.findall(text[-_TAIL_CHARS:])
    return found[-1].replace(",", "") if found else None


# ---- presets

MAXTEXT = RewardPreset(
    lambda question: user_prompt(_REASONING, question),
    (
        reward_of("correct", lambda text, gold: same_value(tagged_or_boxed(text), gold)),
        reward_of("format", lambda text, gold: has_reasoning_and_answer(text), 0.1),
    ),
    tagged_or_boxed,
    has_reasoning_and_answer,
    same_value,
)
TUNIX = RewardPreset(
    lambda question: user_prompt(_REASONING, question),
    (
        reward_of("format", lambda text, gold: 3.0 * (exact_answer(text) is not None)),
        reward_of("tags", tag_points, columns=()),
        reward_of("answer", answer_points),
        reward_of("number", number_points),
    ),
    exact_or_tagged,
    lambda text: exact_answer(text) is not None,
    same_number,
)
TORCHRL = RewardPreset(
    lambda question: system_prompt(_THINK, question),
    (
        reward_of("correct", lambda text, gold: same_bare(_first_tagged(text), gold), 0.9),
        reward_of("answered", lambda text, gold: bool(_first_tagged(text)), 0.1),
    ),
    lambda text: _first_tagged(text) or None,
    lambda text: bool(_first_tagged(text)),
    same_bare,
)
VERL = RewardPreset(
    lambda question: [{"role": "user", "content": f"{question} {_HASHES}"}],
    (reward_of("correct", lambda text, gold: hash_answer(text) == gold),),
    hash_answer,
    lambda text: hash_answer(text) is not None,
    lambda answer, gold: answer == gold,
)
