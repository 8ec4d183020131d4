"""The task `countdown`: generated problems of numbers, and a target to reach with + - * / and
brackets, using each number once.

A row gives the same problem on every machine, and each problem has a solution. No held-out problem
has the same numbers and target as a training problem. A small parser reads the answers
(`graders/arithmetic.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from shoal.config.sections.task import TaskSection
from shoal.records import Example
from shoal.tasks.generated import Problems, generated_task, pick
from shoal.tasks.graders import arithmetic
from shoal.tasks.graders.answer import extract_answer, reward_of, single_answer
from shoal.tasks.task import Task

SYSTEM_PROMPT = (
    "Reach the target with the given numbers and + - * / and brackets; use every number exactly "
    "once. Think between <reasoning> and </reasoning>, then write only the expression, without an "
    "equals sign, between <answer> and </answer>."
)


@dataclass(frozen=True)
class Puzzle:
    """A problem: numbers in the order in which they are shown, the target, and an expression that
    reaches it.

    >>> problem.numbers, problem.target, problem.solution
    ((3, 25, 5), 60, '(25 - 5) * 3')
    """

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def normal_form(self) -> str:
        """A text that is equal for problems that differ only in the order of their numbers."""
        return f"{sorted(self.numbers)} {self.target}"

    @property
    def question(self) -> str:
        return f"Numbers: {', '.join(map(str, self.numbers))}. Target: {self.target}."


# ---- problems


def _draw(rng: Random, task: TaskSection) -> Puzzle:
    """Draws a problem: `task.num_numbers` numbers from 1 to `task.max_value`. Two of them are
    replaced by the result of an operation on both, until one number is left, the target. No result
    is larger than `task.max_value`. The solution has no brackets around all of it."""
    numbers = []
    for _ in range(task.num_numbers):
        numbers.append(pick(rng, range(1, task.max_value + 1)))
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        # Two different parts, each taken out.
        first = parts.pop(pick(rng, range(len(parts))))
        second = parts.pop(pick(rng, range(len(parts))))
        parts.append(
            # Pairs are compared by their values, and equal ones by their texts.
            pick(rng, _possible_joins(max(first, second), min(first, second), task.max_value))
        )
    value, solution = parts[0]
    # The last join has put brackets around all of it; of a lone number there are none.
    return Puzzle(tuple(numbers), value, solution.removeprefix("(").removesuffix(")"))


def _possible_joins(
    large: tuple[int, str], small: tuple[int, str], most: int
) -> list[tuple[int, str]]:
    """Returns the results of + - * / on two expressions, given as (value, text), that are whole
    numbers from 1 to `most`, also as (value, text). `large` has the larger value, or both have the
    same. There is always one. The texts have brackets around them. Subtraction and division take
    `large` first."""
    (a, left), (b, right) = large, small
    values = {"+": a + b, "-": a - b, "*": a * b}
    if a % b == 0:
        values["/"] = a // b
    joined = []
    for sign, value in values.items():
        if 1 <= value <= most:
            joined.append((value, f"({left} {sign} {right})"))
    return joined


def _key(problem: Puzzle) -> str:
    return f"countdown {problem.normal_form}"


PROBLEMS = Problems("countdown", _draw, _key, ("num_numbers", "max_value"))


# ---- the task


def load(task: TaskSection) -> Task:
    """Loads the task with the settings `task.num_numbers` and `task.max_value`; with
    `task.num_eval_questions` 0 it holds out 500 problems. ShoalError if `task.path` is set. Its
    rows have `numbers`, `target` and `solution`."""
    empty = Task(
        name="countdown",
        rewards=(
            reward_of("correct", solves_in_tag, 0.9, ("numbers", "target")),
            reward_of("answered", is_answered, 0.1, ()),
        ),
        correct=is_correct,
        well_formed=is_answered,
        extract=extract,
    )
    return generated_task(task, empty, PROBLEMS, _example)


def solves(answer: str | None, numbers: Sequence[int], target: int) -> bool:
    """True if an answer is an expression that uses exactly these numbers, each once, and equals the
    target. False for None, which stands for a missing answer.

    >>> solves("(3 + 4) * 2", [2, 3, 4], 14), solves("3 + 4", [3, 4, 2], 7)
    (True, False)
    """
    if not answer:
        return False
    expression = arithmetic.parse_expression(answer)
    if expression is None or expression.value != target:
        return False
    return sorted(expression.numbers) == sorted(numbers)


def solves_in_tag(text: str, numbers: Sequence[int], target: int) -> bool:
    """True if the text has exactly one `<answer>`, and its expression solves the problem."""
    return solves(single_answer(text), numbers, target)


def is_correct(text: str, example: Example) -> bool:
    return solves_in_tag(text, example.columns["numbers"], example.columns["target"])


def extract(text: str) -> str | None:
    """Returns the text of the only `<answer>`; None if there is none, if it is empty, or if either
    tag occurs more than once."""
    return single_answer(text) or None


def is_answered(text: str) -> bool:
    """True if the text has an `<answer>` that is not empty. With several, the last one counts."""
    return bool(extract_answer(text))


def _example(row: int, problem: Puzzle) -> Example:
    """Returns the example of a problem."""
    columns = {
        "numbers": list(problem.numbers),
        "target": problem.target,
        "solution": problem.solution,
    }
    prompt = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem.question},
    ]
    return Example(row, prompt, columns)
