"""A number from 1 to 100, to be guessed in at most 20 questions that are answered in words; made here.

The environment says whether the number is higher or lower than what was asked, and ends the rollout when it is right.
Riddles that are held out have a number and words together that no training has; the words say nothing of the number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from shoal.config.schema import TaskSection
from shoal.tasks.generated import draw_for_training, draw_held_out, generated_task, generator, pick
from shoal.tasks.graders.answer import reward_of, same_number
from shoal.tasks.task import Task
from shoal.types import Example

MOST = 100
MAX_QUESTIONS = 20
OPENINGS = tuple(f"{first} number from 1 to {MOST}. {last}" for first in (
    "I think of a", "Guess my", "There is a", "Find the", "I chose a", "Name my", "I hide a", "I have a", "Here is a",
    "Look for my") for last in ("What is it?", "Ask.", "Which one?", "Your guess?", "Go.", "Try.", "Is it easy?",
                                "Begin.", "Tell me.", "I wait."))

_NUMBER = re.compile(r"\s*([0-9]{1,3})\s*")


class Guess:
    """One number that is guessed. Its reward is 1 once the number was named."""

    def __init__(self) -> None:
        self.number, self.questions, self.found = 0, 0, False

    def reset(self, number: int, **columns: object) -> None:
        self.number, self.questions, self.found = number, 0, False

    def respond(self, message: str) -> str | None:
        """What is said to a guess; None where there is nothing more to say."""
        guess = number_of(message)
        self.questions += 1
        self.found = guess == self.number
        if self.found or self.questions == MAX_QUESTIONS:
            return None
        if guess is None:
            return "name a number"
        return "higher" if guess < self.number else "lower"

    def get_reward(self) -> float:
        return float(self.found)


@dataclass(frozen=True)
class Riddle:
    """A number, and the words that ask for it."""

    number: int
    opening: str


def number_of(message: str) -> int | None:
    """The number that a message is, from 1 to 100; None for anything else."""
    found = _NUMBER.fullmatch(message)
    return int(found[1]) if found and 1 <= int(found[1]) <= MOST else None


# ---- riddles


def train_riddle(row: int) -> Riddle:
    """The training riddle of a row; never one that is held out."""
    rng = generator("guess", "train", row)
    return draw_for_training(lambda: _draw(rng), _key)


def held_out(count: int) -> tuple[Riddle, ...]:
    """`count` different held-out riddles, the first n the same for every count; fewer where there are no more."""
    rng = generator("guess", "held_out", 0)
    return draw_held_out(count, lambda: _draw(rng), _key, lambda riddle: riddle)


def _key(riddle: Riddle) -> str:
    return f"guess {riddle.number} {riddle.opening}"


def _draw(rng: Random) -> Riddle:
    return Riddle(pick(rng, range(1, MOST + 1)), pick(rng, OPENINGS))


# ---- the task


def load(task: TaskSection) -> Task:
    """The task; `task.num_eval_questions` 0 holds out all that there are."""
    empty = Task(
        name="guess",
        rewards=(reward_of("format", is_number, 0.1, ()),),
        correct=lambda text, example: same_number(text, str(example.columns["number"])),
        well_formed=is_number,
        environments={"Guess": Guess},
    )
    return generated_task(task, empty, (), {"held_out": held_out}, train_riddle, _example)


def is_number(text: str) -> bool:
    """True for a text that is a number from 1 to 100, and nothing else."""
    return number_of(text) is not None


def _example(row: int, riddle: Riddle) -> Example:
    return Example(row, [{"role": "user", "content": riddle.opening}], {"number": riddle.number})
