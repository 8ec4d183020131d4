"""Finds the answer in a completion, and checks the completion's format. Nothing that a model wrote
is ever evaluated; `numbers.py` reads the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from shoal.records import RewardFunction
from shoal.tasks.graders.numbers import MINUS_SIGNS, has_digit, is_bare, number_in

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_TAGGED = r"<{0}>(?:(?!</?(?:reasoning|answer)>).)+</{0}>"
_WELL_FORMED = re.compile(
    _TAGGED.format("reasoning") + r"\s*" + _TAGGED.format("answer"), re.DOTALL
)


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """Returns the text of a completion in either of TRL's two styles: the text itself, or the
    content of the last message, "" if there is none. The roles of messages do not matter."""
    if isinstance(completion, str):
        return completion
    if not completion:
        return ""
    return str(completion[-1].get("content") or "")


def extract_answer(text: str) -> str | None:
    """Returns the text in the last `<answer>...</answer>`, stripped; None if there is none.

    >>> extract_answer("<answer>3</answer> no: <answer> 4 </answer>")
    '4'
    """
    contents = _ANSWER.findall(text)
    return contents[-1].strip() if contents else None


def single_answer(text: str) -> str | None:
    """Returns the text in the only `<answer>...</answer>`; None if there is none, or if either tag
    occurs more than once. None also if the closing tag comes first. The text is stripped, and may
    be ""."""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    return extract_answer(text)


def last_boxed(text: str) -> str | None:
    """Returns the text in the last `\\boxed{...}` (or `\\fbox{...}`); None if there is none, or if
    its brace is not closed. The text is stripped.

    >>> last_boxed("\\\\boxed{1} or \\\\boxed{\\\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    opening = text.find("{", start)
    end = end_of_bracket(text, opening)
    if end == opening:
        return None
    return text[opening + 1 : end - 1].strip()


def end_of_bracket(text: str, start: int) -> int:
    """Returns the position after the bracket that closes the one at `start`; `start` if it is never
    closed. A bracket is one of `([{`."""
    opening = text[start]
    closing = {"(": ")", "[": "]", "{": "}"}[opening]
    depth = 0
    for end in range(start, len(text)):
        if text[end] == opening:
            depth += 1
        elif text[end] == closing:
            depth -= 1
        if depth == 0:
            return end + 1
    return start


def solution_of(text: str) -> str:
    """Returns the part of a text that is the solution. Drops the thoughts up to the last `</think>`
    or `</reasoning>`, unless nothing follows. Drops a line that begins with `Question:` or `Q:` and
    what follows it, since base models invent the next task, unless no digit is before that line.
    Nothing is stripped.

    >>> solution_of("<think>5?</think> It is 6.\\n\\nQuestion: and 7?")
    ' It is 6.\\n\\n'
    """
    end_of_thoughts = 0
    for tag in ("</think>", "</reasoning>"):
        if tag in text:
            end_of_thoughts = max(end_of_thoughts, text.rfind(tag) + len(tag))
    if text[end_of_thoughts:].strip():
        text = text[end_of_thoughts:]
    next_question = _NEXT_QUESTION.search(text)
    if next_question:
        before_it = text[: next_question.start()]
        if has_digit(before_it):
            return before_it
    return text


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
    """Returns the reward function `name` in TRL's convention. For each completion it returns
    `points(text, *values)`, with the row's values of `columns`. It runs in the run's own process.
    Nothing is called here. The reward function raises KeyError if the data has no such column."""

    def reward(completions: Sequence[Any], **given: Any) -> list[float]:
        """Returns `points` of each completion's text and its row's values, as floats."""
        texts = [completion_text(completion) for completion in completions]
        arguments = [texts]
        for column in columns:
            arguments.append(given[column])
        return [float(points(*values)) for values in zip(*arguments, strict=True)]

    reward.__name__ = name
    return RewardFunction(name, reward, weight, runs_in_process=True)


FORMAT = reward_of("format", well_formed, 0.1, columns=())
"""1.0 for a well-formed text, else 0.0."""


# ---- numbers in solutions of any form: answers in MaxText's format, or files made elsewhere

_MAX_SENTENCE_CHARS = 1000
_MAX_SAID = 20
"""How many occurrences of "the answer is" are read, from the last one on."""

_ANNOTATION = re.compile(r"<<[^<>\n]*(?:>>|\Z)")
_NEXT_QUESTION = re.compile(r"^[^\S\n]*\**(?:Q|Question)\**:", re.MULTILINE)
# The hashes before a number. Not those of a heading, `#### 1. Eggs`.
_HASHES = re.compile(
    r"#### ?[*$\\ ]*(?![0-9]+[.)][^\S\n]+[^\s*])"
    rf"(?=[-{''.join(MINUS_SIGNS)}]?\$?\.?[0-9])"
)
_SAID = re.compile(r"\bans(?:wer)?\b[^.:=\n]{0,60}?(?:\bis\b|:|=)[\s:*]{0,20}", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!?](?=\s|\Z)")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")


def num_behind_hashes(text: str) -> int:
    """Returns how many numbers of a text stand behind `####`.

    >>> num_behind_hashes("#### 1. Eggs\\n3 + 4 = 7\\n#### 7\\n#### 12")
    2
    """
    return len(_HASHES.findall(text))


def final_number(text: str) -> Fraction | None:
    """Returns the number that a solution ends with; None if it has no number. Every search is
    linear in the text's length. The first of these places that is there decides:

    * behind the first `####`
    * in the last box (inside of the last answer tag, if there is one), or in the last answer tag
    * behind the last "the answer is" or "Answer:", if a number is there alone, or if the last
      number of the text is in that line
    * in the last line with a number: the last in bold, else behind the last `=`, else the last one

    >>> final_number("She sells 48/2 = <<48/2=24>>24 clips.\\n#### 24")
    Fraction(24, 1)
    >>> final_number("So the answer is **$1,234.50**.")
    Fraction(2469, 2)
    """
    text = solution_of(_ANNOTATION.sub("", text))
    hashes = _HASHES.search(text)
    if hashes:
        return number_in(text[hashes.end() :].partition("\n")[0])
    tagged = extract_answer(text)
    boxed = last_boxed(text if tagged is None else tagged)
    if boxed is not None:
        return number_in(boxed)
    if tagged is not None:
        return number_in(tagged)

    last_digit = max(text.rfind(digit) for digit in "0123456789")
    sayings = list(_SAID.finditer(text))[-_MAX_SAID:]
    for said in reversed(sayings):
        rest_of_line = text[said.end() :].partition("\n")[0]
        sentence = _SENTENCE.split(rest_of_line[:_MAX_SENTENCE_CHARS], maxsplit=1)[0]
        if is_bare(sentence):
            return number_in(sentence)
        if said.end() <= last_digit < said.end() + len(rest_of_line):
            return number_in(rest_of_line)

    start_of_line = text[: last_digit + 1].rpartition("\n")[2]
    end_of_line = text[last_digit + 1 :].partition("\n")[0]
    line = start_of_line + end_of_line
    in_bold = [bold for bold in _BOLD.findall(line) if has_digit(bold)]
    if in_bold:
        return number_in(in_bold[-1])
    return number_in(f"last: {line}")  # behind words the last of several numbers is read
