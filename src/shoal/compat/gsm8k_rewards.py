"""GSM8K as in MaxText, Tunix, TorchRL and verl: their prompts, their rewards and where the answer
stands, for `reward.preset`.

The tags and the points are each system's own; the prompts say the same in other words."""

from __future__ import annotations

import re
from fractions import Fraction

from shoal.records import Messages
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
"""verl looks for the answer in this many characters at the end."""

_DIGITS = re.compile(r"[\d.]+")  # digits of any script, because `float` reads them all
_AFTER_HASHES = re.compile(r"#### (-?[0-9.,]+)")

# ---- maxtext: 1.0 for the answer, by text or by value, and 0.1 for the format


def has_reasoning_and_answer(text: str) -> bool:
    """True if a text has `<reasoning>...</reasoning>`, which may be empty, and later an
    `<answer>...</answer>` that is not empty. The first tags of each kind count."""
    # From position 0 on; the last 0: nothing need be between the tags.
    _, end_of_reasoning = _ends_of_tags(text, 0, "<reasoning>", "</reasoning>", 0)
    if end_of_reasoning < 0:
        return False
    _, end_of_answer = _ends_of_tags(text, end_of_reasoning, "<answer>", "</answer>")
    return end_of_answer >= 0


def tagged_or_boxed(text: str) -> str | None:
    """Returns the content of the last `<answer>...</answer>`, stripped; if there is none, that of
    the last box (`\\boxed{...}`); None if there is neither."""
    tagged = extract_answer(text)
    if tagged is None:
        return last_boxed(text)
    return tagged


def same_value(answer: str | None, gold: str) -> bool:
    """True if an answer is the same text as `gold`, the right answer, or has its value: the answer
    (the text after the last `=`, or in a box) is one number, perhaps with units, or an expression
    of numbers. White space around either text does not count. False if `answer` is None, or if the
    texts differ and `gold` is no number."""
    if answer is None:
        return False
    if answer.strip() == gold.strip():
        return True
    boxed = last_boxed(answer)
    content = (answer if boxed is None else boxed).rpartition("=")[2].strip()
    wanted = parse_number(gold)
    if wanted is None:
        return False
    expression = arithmetic.parse_expression(content)
    if expression is not None:
        return expression.value == Fraction(wanted)
    content = content.removeprefix("+").rstrip(" ,")
    # Bare: one number, perhaps with units.
    return is_bare(content) and number_in(content) == Fraction(wanted)


def _ends_of_tags(
    text: str, start: int, opening: str, closing: str, least: int = 1
) -> tuple[int, int]:
    """Searches from position `start` on. Returns (the position after the first tag `opening`, the
    position after the first tag `closing` that follows it with at least `least` characters in
    between); (-1, -1) without an opening tag, (position, -1) without a closing one."""
    begin = text.find(opening, start)
    if begin < 0:
        return -1, -1
    begin += len(opening)
    end = text.find(closing, begin + least)
    if end < 0:
        return begin, -1
    return begin, end + len(closing)


# ---- tunix: 9.5 points, 5 of them for the format


def exact_answer(text: str) -> str | None:
    """Returns the answer of a text in Tunix's format, which is `<reasoning>...</reasoning>` (at
    least one character in it) and later `<answer>`: the text from there to `</answer>`, the end of
    the line or of the text, at least one character, not stripped. None for a text in another
    format."""
    _, end_of_reasoning = _ends_of_tags(text, 0, "<reasoning>", "</reasoning>")
    if end_of_reasoning < 0:
        return None
    tag = text.find("<answer>", end_of_reasoning)
    if tag < 0:
        return None
    begin = tag + len("<answer>")
    if begin >= len(text):
        return None
    ends = [len(text)]
    for mark in ("</answer>", "\n"):
        end = text.find(mark, begin + 1)  # the first character belongs to the answer in any case
        if end >= 0:
            ends.append(end)
    return text[begin : min(ends)]


def exact_or_tagged(text: str) -> str | None:
    """Returns the answer of a text in Tunix's format, otherwise the content of the first
    `<answer>...</answer>`, stripped in both cases; None if there is neither."""
    answer = exact_answer(text)
    if answer is None:
        return _first_tagged(text)
    return answer.strip()


def tag_points(text: str) -> float:
    """Returns 0.5 for each of the four tags (`<reasoning>`, `<answer>` and their ends) that occurs
    exactly once and -0.5 for each that does not, summed up: -2 to 2."""
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    points = 0.0
    for tag in tags:
        points += 0.5 if text.count(tag) == 1 else -0.5
    return points


def answer_points(text: str, gold: str) -> float:
    """Returns the points for the answer of a text in Tunix's format, compared with the right answer
    `gold`. From both, commas and surrounding white space are removed first.

    3 for the same text or number; for another number by its ratio to the right one 0.5 from 0.9 to
    1.1, 0.25 from 0.8 to 1.2, else -1 (also if the right one is 0); -0.5 if one of them is no
    number; 0 for a text in another format."""
    answer = exact_answer(text)
    if answer is None:
        return 0.0
    answer = answer.strip().replace(",", "")
    gold = gold.strip().replace(",", "")
    value = parse_float(answer)
    wanted = parse_float(gold)
    if answer == gold or (value is not None and value == wanted):
        return 3.0
    if value is None or wanted is None:
        return -0.5
    ratio = value / wanted if wanted else 0.0
    if 0.9 <= ratio <= 1.1:
        return 0.5
    if 0.8 <= ratio <= 1.2:
        return 0.25
    return -1.0


def number_points(text: str, gold: str) -> float:
    """Returns 1.5 if the first digits (and periods) after the first `<answer>` are the gold number,
    else 0. The digits may be anywhere after the tag. Signs and commas of the answer are not read,
    so a negative gold number is never matched; the gold number has its commas removed."""
    tag = text.find("<answer>")
    if tag < 0:
        return 0.0
    digits = _DIGITS.search(text, tag)
    value = parse_float(digits[0]) if digits else None
    if value is None or value != parse_float(gold.strip().replace(",", "")):
        return 0.0
    return 1.5


def _first_tagged(text: str) -> str | None:
    """Returns the stripped content of the first `<answer>...</answer>`, which may be ''; None if
    there is none."""
    begin = text.find("<answer>")
    if begin < 0:
        return None
    end = text.find("</answer>", begin)
    if end < 0:
        return None
    return text[begin + len("<answer>") : end].strip()


# ---- torchrl: 1.0 for the right answer, 0.1 for another one, 0 for none


def bare(answer: str) -> str:
    """Returns an answer without surrounding white space, commas, `$`, `%`, final periods and zeros
    at the end of decimals: `$1,234.50` is `1234.5`."""
    answer = answer.strip().replace(",", "").replace("$", "").replace("%", "").rstrip(".")
    if "." not in answer:
        return answer
    return answer.rstrip("0").rstrip(".")


def same_bare(answer: str | None, gold: str) -> bool:
    """True if an answer and the gold answer are the same text after `bare`; False if the answer is
    None or ''."""
    if not answer:
        return False
    return bare(answer) == bare(gold)


# ---- verl: 1 or 0


def hash_answer(text: str) -> str | None:
    """Returns the number (digits, periods and commas, perhaps with a minus) after the last `####`
    and one space within the last 300 characters, as its text without commas; None if there is none.
    It may be no valid number: `1.2.`."""
    numbers = _AFTER_HASHES.findall(text[-_TAIL_CHARS:])
    if not numbers:
        return None
    return numbers[-1].replace(",", "")


# ---- presets


def _asked_in_user_turn(question: str) -> Messages:
    return user_prompt(_REASONING, question)


def _is_right_for_maxtext(text: str, gold: str) -> bool:
    return same_value(tagged_or_boxed(text), gold)


MAXTEXT = RewardPreset(
    _asked_in_user_turn,
    (
        reward_of("correct", _is_right_for_maxtext),
        reward_of("format", has_reasoning_and_answer, 0.1, columns=()),
    ),
    tagged_or_boxed,
    has_reasoning_and_answer,
    same_value,
)


def _has_exact_answer(text: str) -> bool:
    return exact_answer(text) is not None


def _format_points(text: str) -> float:
    return 3.0 if _has_exact_answer(text) else 0.0


TUNIX = RewardPreset(
    _asked_in_user_turn,
    (
        reward_of("format", _format_points, columns=()),
        reward_of("tags", tag_points, columns=()),
        reward_of("answer", answer_points),
        reward_of("number", number_points),
    ),
    exact_or_tagged,
    _has_exact_answer,
    same_number,
)


def _asked_with_system_turn(question: str) -> Messages:
    return system_prompt(_THINK, question)


def _is_right_for_torchrl(text: str, gold: str) -> bool:
    return same_bare(_first_tagged(text), gold)


def _is_answered(text: str) -> bool:
    return bool(_first_tagged(text))


def _answer_in_tags(text: str) -> str | None:
    return _first_tagged(text) or None


TORCHRL = RewardPreset(
    _asked_with_system_turn,
    (
        reward_of("correct", _is_right_for_torchrl, 0.9),
        reward_of("answered", _is_answered, 0.1, columns=()),
    ),
    _answer_in_tags,
    _is_answered,
    same_bare,
)


def _asked_for_hashes(question: str) -> Messages:
    return [{"role": "user", "content": f"{question} {_HASHES}"}]


def _is_right_for_verl(text: str, gold: str) -> bool:
    return hash_answer(text) == gold


def _has_hash_answer(text: str) -> bool:
    return hash_answer(text) is not None


def _is_same_text(answer: str | None, gold: str) -> bool:
    return answer == gold


VERL = RewardPreset(
    _asked_for_hashes,
    (reward_of("correct", _is_right_for_verl),),
    hash_answer,
    _has_hash_answer,
    _is_same_text,
)
