"""Sums and products that a small model cannot compute, and a tool that can: `calculate`; made here, endlessly.

A row is a problem, the same on every machine; held-out problems share their expression with none that is trained on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from shoal.config.schema import TaskSection
from shoal.tasks.generated import draw_for_training, draw_held_out, generated_task, generator, pick
from shoal.tasks.graders import arithmetic
from shoal.tasks.graders.answer import answer_key, reward_of, same_number, single_answer
from shoal.tasks.task import Task
from shoal.types import Example

LEAST, MOST = 100, 999
"""The numbers of a problem have three digits."""

QUESTIONS = ("What is {}?", "Compute {}.", "How much is {}?", "Work out {}.")

_WELL_FORMED = re.compile(r"\s*<answer>-?[0-9]+</answer>\s*")


@dataclass(frozen=True)
class Problem:
    """Two or three numbers, joined by + - or *, and the words that ask for their value.

    >>> problem.question, problem.answer
    ('What is 417 * 236 + 108?', 98520)
    """

    expression: str
    words: int

    @property
    def answer(self) -> int:
        value = arithmetic.read(self.expression)
        assert value is not None
        return int(value.value)

    @property
    def question(self) -> str:
        return QUESTIONS[self.words].format(self.expression)


def calculate(expression: str) -> str:
    """Computes the value of an arithmetic expression.

    Args:
        expression: Whole numbers joined by + - * / and brackets, such as 12 * (3 + 4).

    Returns:
        The value.
    """
    found = arithmetic.read(expression)
    if found is None:
        raise ValueError(f"{expression!r} is no expression of whole numbers, + - * / and brackets")
    return str(found.value)


# ---- problems


def train_problem(row: int) -> Problem:
    """The training problem of a row; never one that is held out."""
    rng = generator("calculator", "train", row)
    return draw_for_training(lambda: _draw(rng), _key)


def held_out(count: int) -> tuple[Problem, ...]:
    """`count` different held-out problems, the first n the same for every count."""
    rng = generator("calculator", "held_out", 0)
    return draw_held_out(count, lambda: _draw(rng), _key, lambda problem: problem)


def _key(problem: Problem) -> str:
    return f"calculator {problem.expression}"


def _draw(rng: Random) -> Problem:
    numbers = [str(pick(rng, range(LEAST, MOST + 1))) for _ in range(pick(rng, (2, 3)))]
    signs = [pick(rng, "+-*") for _ in numbers[1:]]
    expression = numbers[0] + "".join(f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True))
    return Problem(expression, pick(rng, range(len(QUESTIONS))))


# ---- the task


def load(task: TaskSection) -> Task:
    """The task; `task.num_eval_questions` 0 holds out 500 problems."""
    empty = Task(
        name="calculator",
        rewards=(reward_of("correct", answers), reward_of("format", is_well_formed, 0.1, ())),
        correct=lambda text, example: answers(text, example.columns["answer"]),
        well_formed=is_well_formed,
        extract=lambda text: answer_key(single_answer(text)) or None,
        tools=(calculate,),
    )
    return generated_task(task, empty, (), {"held_out": held_out}, train_problem, _example)


def answers(text: str, answer: str) -> bool:
    """True if a text has one `<answer>`, and its number is the problem's."""
    return same_number(single_answer(text), answer)


def is_well_formed(text: str) -> bool:
    """True for a text that is an `<answer>` with a whole number, and nothing else."""
    return _WELL_FORMED.fullmatch(text) is not None


def _example(row: int, problem: Problem) -> Example:
    return Example(row, [{"role": "user", "content": problem.question}], {"answer": str(problem.answer)})
