"""The task `words`: generated arithmetic word problems of several steps, in GSM8K's form.

A problem is a chain of operations on a quantity; every value on the way is a whole number from 1 to
`task.max_value`. Whether a problem is held out depends on nothing but its operations and numbers:
one in sixteen is, by a hash. So training shares none of the held-out problems, whatever the names,
objects, sentences, settings or seed.
"""

from __future__ import annotations

import enum
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config.sections.task import TaskSection
from shoal.records import Example
from shoal.tasks.generated import Problems, generated_task, pick
from shoal.tasks.graders.answer import (
    FORMAT,
    extract_answer,
    reward_of,
    single_answer,
    well_formed,
)
from shoal.tasks.graders.numbers import answer_key, same_number
from shoal.tasks.task import Task

__all__ = ["Operation", "Problem", "Step", "extract_answer", "load", "numeric_form", "well_formed"]


class Operation(enum.StrEnum):
    ADD = "+"
    SUBTRACT = "-"
    MULTIPLY = "*"
    DIVIDE = "/"


_APPLY = {
    Operation.ADD: operator.add,
    Operation.SUBTRACT: operator.sub,
    Operation.MULTIPLY: operator.mul,
    Operation.DIVIDE: operator.floordiv,
}

SHE = (
    "Amy",
    "Bella",
    "Clara",
    "Dora",
    "Emma",
    "Fay",
    "Gina",
    "Hana",
    "Ida",
    "Jane",
    "Kate",
    "Lucy",
)
HE = ("Adam", "Ben", "Carl", "Dan", "Eric", "Finn", "Gus", "Hugo", "Ivan", "Jack", "Karl", "Tom")
OBJECTS = (
    "apples",
    "marbles",
    "books",
    "coins",
    "cards",
    "stickers",
    "pencils",
    "shells",
    "buttons",
    "stamps",
    "balloons",
    "cookies",
    "beads",
    "toys",
    "stones",
    "keys",
    "cups",
    "candles",
    "oranges",
    "flowers",
    "ribbons",
    "badges",
    "crayons",
    "peaches",
)

# Part of a problem -> templates of sentences. Those of UNSEEN never occur in training.
SEEN: dict[str, tuple[str, ...]] = {
    "opening": (
        "{name} has {n} {objects}.",
        "{name} starts with {n} {objects}.",
        "{name} owns {n} {objects}.",
        "On Sunday {name} has {n} {objects}.",
        "{name} keeps {n} {objects} at home.",
        "{name} counts {n} {objects}.",
    ),
    "+": (
        "{He} buys {n} more.",
        "Then {friend} gives {him} {n} more.",
        "{He} finds {n} more {objects}.",
        "Later {he} wins {n} {objects}.",
        "{His} aunt sends {him} {n} more.",
        "Next {he} picks up {n} more.",
        "{friend} brings {him} {n} {objects}.",
        "{He} then gets {n} new ones.",
    ),
    "-": (
        "{He} gives {n} to {friend}.",
        "Then {he} loses {n} of them.",
        "{He} sells {n} {objects}.",
        "{friend} takes {n} of them.",
        "Later {he} throws {n} away.",
        "Then {n} of them go missing.",
        "{He} trades away {n} {objects}.",
        "Next {he} leaves {n} on a bus.",
    ),
    "*": (
        "Soon {he} has {times} as many.",
        "By Monday {he} has {times} as many.",
        "After a game {he} holds {times} as many.",
        "A week later {he} has {times} as many {objects}.",
        "{friend} helps {him} reach {times} as many.",
        "{He} works until {he} has {times} as many.",
        "Then {he} owns {times} as many {objects}.",
        "Good luck leaves {him} with {times} as many.",
    ),
    "/": (
        "{He} splits them into {n} equal boxes and keeps one.",
        "Then {he} makes {n} equal piles and keeps one pile.",
        "{He} fills {n} bags equally and keeps one bag.",
        "{He} shares them equally among {n} jars and keeps one.",
        "Later {he} packs {n} equal bags and sells all but one.",
        "Next {he} lays {n} equal rows and saves one row.",
        "{He} forms {n} equal groups and keeps a single group.",
        "Then {friend} makes {n} equal parts and leaves {him} one.",
    ),
    "question": (
        "How many {objects} does {name} have now?",
        "How many {objects} does {he} have now?",
        "How many {objects} does {name} have in the end?",
        "How many {objects} does {he} end up with?",
        "How many does {name} have now?",
        "How many {objects} are left with {name}?",
    ),
}
UNSEEN: dict[str, tuple[str, ...]] = {
    "opening": (
        "A shelf of {name}'s holds {n} {objects}.",
        "At first there are {n} {objects} in {name}'s bag.",
        "{name} was given {n} {objects} for {his} birthday.",
    ),
    "+": (
        "A neighbour adds {n} to the collection.",
        "The mail brings another {n} {objects}.",
        "{His} total grows by {n}.",
    ),
    "-": (
        "A dog runs off with {n}.",
        "{n} {objects} are handed over to {friend}.",
        "{His} total shrinks by {n}.",
    ),
    "*": (
        "The collection becomes {times} as large.",
        "Within a year {his} total is {times} what it was.",
        "Every one is swapped for {n} others.",
    ),
    "/": (
        "With {n} people sharing equally, {he} gets one share.",
        "Only one out of every {n} stays with {him}.",
        "One of {n} equal crates is all {he} takes home.",
    ),
    "question": (
        "What number of {objects} does {name} own at last?",
        "Can you tell how many {objects} {name} has?",
        "So what is {name}'s count of {objects}?",
    ),
}


# ---- problems


@dataclass(frozen=True)
class Step:
    operation: Operation
    operand: int


@dataclass(frozen=True)
class Problem:
    """A quantity, the operations on it, and the words that tell them.

    >>> problem.question
    'Tom has 12 apples. He buys 7 more. Then he loses 5 of them. How many apples does Tom have now?'
    >>> problem.solution
    '<reasoning>12 + 7 = 19. 19 - 5 = 14.</reasoning><answer>14</answer>'
    """

    start: int
    steps: tuple[Step, ...]
    templates: tuple[int, ...]  # number of each sentence's template: opening, steps, question
    unseen: bool  # True if the templates are those of UNSEEN, which training never uses
    name: str
    friend: str
    objects: str

    @property
    def values(self) -> tuple[int, ...]:
        """The quantity at the start and after every step. One number more than there are steps; the
        last is the answer."""
        values = [self.start]
        for step in self.steps:
            values.append(_APPLY[step.operation](values[-1], step.operand))
        return tuple(values)

    @property
    def answer(self) -> int:
        return self.values[-1]

    @property
    def sentence_kinds(self) -> tuple[str, ...]:
        """What each sentence of the problem tells, in order: keys of SEEN and UNSEEN."""
        return _sentence_kinds(self.steps)

    @property
    def question(self) -> str:
        """The text of the problem: its sentences, filled with numbers, names and objects."""
        templates = UNSEEN if self.unseen else SEEN
        numbers = [self.start]
        for step in self.steps:
            numbers.append(step.operand)
        numbers.append(0)  # the question has none
        sentences = []
        for part, index, number in zip(self.sentence_kinds, self.templates, numbers, strict=True):
            template = templates[part][index]
            sentences.append(template.format_map(self._words(number)))
        return " ".join(sentences)

    def _words(self, number: int) -> dict[str, Any]:
        """Returns the values for the placeholders of a sentence's template. `number` is the number
        that the sentence tells, 0 if it tells none. `times` is `twice` for 2, else like `3
        times`."""
        he, him, his = ("she", "her", "her") if self.name in SHE else ("he", "him", "his")
        return {
            "name": self.name,
            "friend": self.friend,
            "objects": self.objects,
            "n": number,
            "times": "twice" if number == 2 else f"{number} times",
            "he": he,
            "He": he.title(),
            "him": him,
            "his": his,
            "His": his.title(),
        }

    @property
    def solution(self) -> str:
        """The worked text: one equation for each step, then the answer."""
        values = self.values
        lines = []
        for number, step in enumerate(self.steps):
            before, after = values[number], values[number + 1]
            lines.append(f"{before} {step.operation} {step.operand} = {after}.")
        return f"<reasoning>{' '.join(lines)}</reasoning><answer>{self.answer}</answer>"


def _sentence_kinds(steps: Sequence[Step]) -> tuple[str, ...]:
    """Returns what each sentence of a problem tells: `opening`, then the signs of the operations,
    then `question`."""
    parts = ["opening"]
    for step in steps:
        parts.append(step.operation.value)
    parts.append("question")
    return tuple(parts)


def numeric_form(numbers: tuple[int, tuple[Step, ...]]) -> str:
    """Returns a problem's start and operations as text: `12 +7 -5`. Held-out problems and training
    problems have no such text in common."""
    start, steps = numbers
    text = str(start)
    for step in steps:
        text += f" {step.operation}{step.operand}"
    return text


# ---- drawing them

UNSEEN_TEMPLATES = "unseen_templates"
"""The evaluation with problems in sentences that never occur in training, and its purpose in
`Problems`."""


def _draw_numbers(rng: random.Random, task: TaskSection) -> tuple[int, tuple[Step, ...]]:
    """Draws the start of a problem and `task.num_steps` operations on it, so that every value is
    from 1 to `task.max_value`."""
    start = value = pick(rng, range(2, task.max_value + 1))
    steps = []
    for _ in range(task.num_steps):
        operation, operands = pick(rng, _possible_steps(value, task.max_value))
        steps.append(Step(operation, pick(rng, operands)))
        value = _APPLY[operation](value, steps[-1].operand)
    return start, tuple(steps)


def _possible_steps(value: int, max_value: int) -> list[tuple[Operation, Sequence[int]]]:
    """Returns the operations that are possible on `value`, each with the operands that give a whole
    number from 1 to `max_value`. There is always one. Operands are 2 or more, those of products and
    quotients at most 5."""
    choices: list[tuple[Operation, Sequence[int]]] = [
        (Operation.ADD, range(2, max_value - value + 1)),
        (Operation.SUBTRACT, range(2, value)),
        (Operation.MULTIPLY, [k for k in range(2, 6) if value * k <= max_value]),
        (Operation.DIVIDE, [k for k in range(2, 6) if value % k == 0]),
    ]
    return [(operation, operands) for operation, operands in choices if operands]


def _draw_words(rng: random.Random, numbers: tuple[int, tuple[Step, ...]], purpose: str) -> Problem:
    """Returns the problem of `numbers` (start and steps), with sentences, names and objects drawn
    at random. For the purpose UNSEEN_TEMPLATES its sentences are those that training never
    uses."""
    start, steps = numbers
    unseen = purpose == UNSEEN_TEMPLATES
    sentences = UNSEEN if unseen else SEEN
    templates = []
    for part in _sentence_kinds(steps):
        templates.append(pick(rng, range(len(sentences[part]))))
    name = pick(rng, SHE + HE)
    friend = pick(rng, [other for other in SHE + HE if other != name])
    objects = pick(rng, OBJECTS)
    return Problem(
        start=start,
        steps=steps,
        templates=tuple(templates),
        unseen=unseen,
        name=name,
        friend=friend,
        objects=objects,
    )


PROBLEMS = Problems("words", _draw_numbers, numeric_form, ("num_steps", "max_value"), _draw_words)


# ---- the task


def load(task: TaskSection) -> Task:
    """Loads the task with the settings `task.num_steps` and `task.max_value`. Its evaluations are
    `held_out` and `unseen_templates`; with `task.num_eval_questions` 0 each has 500 problems. Its
    rows have the columns `answer` and `solution`. ShoalError if `task.path` is set."""
    empty = Task(
        name="words",
        rewards=(reward_of("correct", gives_answer), FORMAT),
        correct=is_correct,
        well_formed=well_formed,
        extract=extract,
    )
    return generated_task(task, empty, PROBLEMS, _example, ("held_out", UNSEEN_TEMPLATES))


def gives_answer(text: str, answer: str) -> bool:
    """True if the text has exactly one `<answer>`, and all of it is a number of the value of
    `answer`. The reward `correct`."""
    return same_number(single_answer(text), answer)


def is_correct(text: str, example: Example) -> bool:
    return gives_answer(text, example.columns["answer"])


def extract(text: str) -> str | None:
    """Returns the answer in the only tag in one spelling, under which maj@k counts equal answers
    (`answer_key`); None if there is none."""
    return answer_key(single_answer(text)) or None


def _example(row: int, problem: Problem) -> Example:
    columns = {"answer": str(problem.answer), "solution": problem.solution}
    return Example(row, [{"role": "user", "content": problem.question}], columns)
