"""The task `guess`: a number from 1 to 100 is to be guessed in at most 20 questions, which an
environment answers in words. Riddles are generated.

The environment says whether the number is higher or lower, and ends the rollout once the number was
named. It pays each question for the numbers that its answer rules out. A riddle is a number
together with the words that ask for it, which say nothing about the number; held-out riddles are
such pairs.
"""

from __future__ import annotations

import math
import re
from random import Random

from shoal.config.sections.task import TaskSection
from shoal.records import Example
from shoal.tasks.generated import Problems, generated_task, pick
from shoal.tasks.graders.answer import reward_of
from shoal.tasks.task import Task

MOST, MAX_QUESTIONS = 100, 20
FIRST_WORDS = (
    "I think of a",
    "Guess my",
    "There is a",
    "Find the",
    "I chose a",
    "Name my",
    "I hide a",
    "I have a",
)
LAST_WORDS = (
    "What is it?",
    "Ask.",
    "Which one?",
    "Your guess?",
    "Go.",
    "Try.",
    "Is it easy?",
    "Begin.",
    "I wait.",
    "Tell me.",
    "Well?",
    "Now you.",
)

_NUMBER = re.compile(r"\s*([0-9]{1,3})\s*")


class Guess:
    """The environment of one number that is to be guessed; its reward is 1 once the number was
    named. The attribute `reward` is that of the last question: how much nearer it came to that, by
    the logarithm of the number of numbers that are left. So halving them pays the same at each
    turn, and what all questions up to the right one were paid is 1."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, number: int, **columns: object) -> None:
        self.number, self.questions, self.found = number, 0, False
        self.low, self.high = 1, MOST  # what the answers leave
        self.reward = 0.0

    def respond(self, message: str) -> str | None:
        """Returns the answer to a guess: `higher`, `lower` or `no number`. None if the rollout is
        over, because the guess is right or was the last. A message that is no number from 1 to 100
        counts as a question too."""
        guess = number_of(message)
        num_left = self._num_left()
        self.questions += 1
        self.found = guess == self.number
        if guess is not None and guess < self.number:
            self.low = max(self.low, guess + 1)
        elif guess is not None:
            self.high = min(self.high, guess - 1)
        # One more than are left, as if "not named yet" were one of them.
        self.reward = math.log((num_left + 1) / (self._num_left() + 1)) / math.log(MOST + 1)
        if self.found or self.questions == MAX_QUESTIONS:
            return None
        if guess is None:
            return "no number"
        return "higher" if guess < self.number else "lower"

    def _num_left(self) -> int:
        """The number of numbers that the answers so far do not rule out; 0 once it was named."""
        return 0 if self.found else self.high - self.low + 1

    def get_reward(self) -> float:
        return float(self.found)


def number_of(message: str) -> int | None:
    """Returns the number from 1 to 100 that a message consists of, perhaps with spaces around it;
    None for any other message."""
    match = _NUMBER.fullmatch(message)
    if match is None:
        return None
    number = int(match[1])
    return number if 1 <= number <= MOST else None


def is_correct(text: str, example: Example) -> bool:
    return number_of(text) == example.columns["number"]


def is_number(text: str) -> bool:
    return number_of(text) is not None


def _draw(rng: Random, _: TaskSection) -> tuple[str, int]:
    """Returns the words that ask for a number, and the number."""
    first_words = pick(rng, FIRST_WORDS)
    last_words = pick(rng, LAST_WORDS)
    number = pick(rng, range(1, MOST + 1))
    return f"{first_words} number from 1 to {MOST}. {last_words}", number


RIDDLES = Problems("guess", _draw, str)
"""Riddles of words and a number. No pair of these is both in training and held out."""


def load(task: TaskSection) -> Task:
    """Loads the task; with `task.num_eval_questions` 0 it holds out 500 riddles. ShoalError if
    `task.path` is set. Its rows have the column `number`."""
    empty = Task(
        name="guess",
        rewards=(reward_of("format", is_number, 0.1, ()),),
        correct=is_correct,
        well_formed=is_number,
        environments={"Guess": Guess},
    )
    return generated_task(task, empty, RIDDLES, _example)


def _example(row: int, riddle: tuple[str, int]) -> Example:
    words, number = riddle
    return Example(row, [{"role": "user", "content": words}], {"number": number})
