"""The task `calculator`: generated sums and products that a small model cannot compute, and a tool
that can, `calculate`.

No held-out problem has the same expression as a training problem.
"""

from __future__ import annotations

from random import Random

from shoal.config.sections.task import TaskSection
from shoal.records import Example
from shoal.tasks.countdown import is_answered
from shoal.tasks.generated import Problems, generated_task, pick
from shoal.tasks.graders import arithmetic
from shoal.tasks.graders.answer import reward_of
from shoal.tasks.task import Task
from shoal.tasks.words import extract, gives_answer, is_correct

QUESTIONS = ("What is {}?", "How much is {}?", "Do you know {}?", "And {}?")


def calculate(expression: str) -> str:
    """Computes the value of an arithmetic expression.

    Args:
        expression: Whole numbers joined by + - * / and brackets, such as 12 * (3 + 4).

    Raises:
        ValueError: The text is no such expression, is too long or nested too deep, or divides by 0.

    The schema that a model reads ends above `Raises:`. The result is text: `84`, or a fraction in
    lowest terms, `7/2`.
    """
    parsed = arithmetic.parse_expression(expression)
    if parsed is None:
        raise ValueError(
            f"{expression!r:.80} is no expression of whole numbers, + - * / and brackets"
        )
    return str(parsed.value)


def _draw(rng: Random, section: TaskSection) -> tuple[str, str]:
    """Returns a question and its expression: two or three numbers of three digits, joined by + - *.
    The numbers are from 100 to 999, and there are no brackets."""
    expression = str(pick(rng, range(100, 1000)))
    for _ in range(pick(rng, (1, 2))):
        expression += f" {pick(rng, '+-*')} {pick(rng, range(100, 1000))}"
    return pick(rng, QUESTIONS).format(expression), expression


def _key(problem: tuple[str, str]) -> str:
    """Returns a text that is equal for two problems with the same expression."""
    return f"calculator {problem[1]}"


PROBLEMS = Problems("calculator", _draw, _key)
"""Problems of a question, such as `And 414 + 349 * 340?`, and its expression. No expression is both
in training and held out."""


def load(task: TaskSection) -> Task:
    """Loads the task; with `task.num_eval_questions` 0 it holds out 500 problems. ShoalError if
    `task.path` is set. Its rows have the column `answer`."""
    empty = Task(
        name="calculator",
        rewards=(reward_of("correct", gives_answer), reward_of("format", is_answered, 0.1, ())),
        correct=is_correct,
        well_formed=is_answered,
        extract=extract,
        tools=(calculate,),
    )
    return generated_task(task, empty, PROBLEMS, _example)


def _example(row: int, problem: tuple[str, str]) -> Example:
    question, expression = problem
    return Example(row, [{"role": "user", "content": question}], {"answer": calculate(expression)})
