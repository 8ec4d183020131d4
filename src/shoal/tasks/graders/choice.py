"""Finds the letter that a text chooses among the options of a question, as the published harness of
each data set does. All searches are linear in the text's length."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal.records import Example, RewardFunction
from shoal.tasks.graders.answer import reward_of

LETTERS = "ABCDEFGHIJ"
"""The letters of options, in their order; a question has at most as many options."""

FindLetter: TypeAlias = "Callable[[str], str | None]"
"""A completion's text -> the letter that it chooses; None if it chooses none."""

_ANSWER_LINE = re.compile(r"answer[ \t]*:[ \t]*\$?([A-D])\$?", re.IGNORECASE)
_ANSWER_SENTENCE = re.compile(r"answer is \(?([A-J])\)?")
# Looked at, not consumed: the A of the second `Answer:` in `Answer:Answer:J` is a letter too.
_ANSWER_LABEL = re.compile(r"(?=[aA]nswer:\s*([A-J]))")
_LONE_LETTER = re.compile(r"\b[A-J]\b")


def letter_in_answer_line(text: str) -> str | None:
    """Returns the letter A to D after the first `Answer:` that one follows; None if there is none.
    That is how simple-evals grades GPQA: a lower-case letter is found, but is no option's.

    >>> letter_in_answer_line("The second is right.\\nAnswer: B")
    'B'
    """
    found = _ANSWER_LINE.search(text)
    return None if found is None else found[1]


def letter_in_answer_sentence(text: str) -> str | None:
    """Returns the letter A to J in the first `answer is (X)`; without one, that of the last
    `Answer: X` in the first line that has any; without one, the last letter that stands alone.
    None if there is none of these. `**` does not count. That is how MMLU-Pro's own script grades.

    >>> letter_in_answer_sentence("So the answer is (H).")
    'H'
    >>> letter_in_answer_sentence("Either D or, rather, E")
    'E'
    """
    text = text.replace("**", "")
    found = _ANSWER_SENTENCE.search(text)
    if found is not None:
        return found[1]
    labelled = _last_in_first_line(_ANSWER_LABEL, text)
    if labelled is not None:
        return labelled[1]
    alone = _LONE_LETTER.findall(text)
    return alone[-1] if alone else None


def _last_in_first_line(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Returns the last match that begins in the first line in which any match begins; None if there
    is no match. It is what the pattern `.*PATTERN` finds, which takes quadratic time."""
    last = None
    for match in pattern.finditer(text):
        if last is not None and "\n" in text[last.start() : match.start()]:
            break
        last = match
    return last


@dataclass(frozen=True)
class ChoiceGrader:
    """Grades texts by the letter that `find` finds in them; the right one is the row's column
    `answer`. A task has `is_correct` and `verdict` as its own."""

    find: FindLetter

    @property
    def reward(self) -> RewardFunction:
        """The reward function `correct`: 1.0 for a completion that chooses the right letter, else
        0.0."""

        def is_chosen(text: str, answer: str) -> bool:
            return self.find(text) == answer

        return reward_of("correct", is_chosen)

    def is_correct(self, text: str, example: Example) -> bool:
        """True if the text chooses the right option."""
        return self.find(text) == example.columns["answer"]

    def verdict(self, text: str, example: Example) -> dict[str, Any]:
        """Returns the verdict on a text: `answer`, the letter that it chooses (None: none), and
        `correct`, whether that is the right one."""
        letter = self.find(text)
        return {"correct": letter == example.columns["answer"], "answer": letter}


def has_options(options: Any, answer: Any) -> bool:
    """True if `options` is a list of two to ten texts, and `answer` the letter of one of them."""
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        return False
    if not 2 <= len(options) <= len(LETTERS):
        return False
    return isinstance(answer, str) and answer in list(LETTERS[: len(options)])


def lettered(options: Sequence[str], mark: str) -> str:
    """Returns a line for each option, with its letter and `mark` in front.

    >>> lettered(["one", "two"], ")")
    'A) one\\nB) two'
    """
    lines = []
    for letter, option in zip(LETTERS, options, strict=False):
        lines.append(f"{letter}{mark} {option}")
    return "\n".join(lines)
