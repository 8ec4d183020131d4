"""The task `gpqa` (Rein et al. 2023, arXiv:2311.12022): questions of four options that experts
wrote. By default its 198 hardest, GPQA Diamond.

A row has `Question`, `Correct Answer` and `Incorrect Answer 1` to `3`. The prompt and the grader
are those of simple-evals. The data set is gated, and its authors ask that its rows are published
nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from shoal.config.sections.task import TaskSection
from shoal.records import Example, ShoalError
from shoal.tasks.data_folder import Published
from shoal.tasks.examples import prompt_key
from shoal.tasks.graders.choice import (
    LETTERS,
    ChoiceGrader,
    letter_in_answer_line,
    lettered,
)
from shoal.tasks.splits import read_splits, with_rows
from shoal.tasks.task import Task

OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
PUBLISHED = Published(
    "gpqa",
    "Idavidrein/gpqa",
    ("Question", *OPTIONS),
    ("gpqa_{split}", "{split}", "gpqa_diamond"),
    subset="gpqa_diamond",
    texts=("Question", *OPTIONS),
    numbers=OPTIONS,
)
INSTRUCTION = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think "
    "step by step before answering."
)

GRADER = ChoiceGrader(letter_in_answer_line)


def load(task: TaskSection) -> Task:
    """Loads the task; `task.path` is a file, a folder, a hub id, or "" for GPQA on the hub, which
    wants a token. `task.subset` is `gpqa_diamond`, `gpqa_main` or `gpqa_extended`.

    In an evaluation all rows are evaluated on; for training, of a single split every tenth row is
    held out. Raises `ShoalError` for data that is missing or unreadable, and for a row without its
    five columns.
    """
    splits = read_splits(task, PUBLISHED, _make, spread=True)
    splits.note_benchmark(task.num_eval_questions)
    splits.drop_held_out(prompt_key, "question")
    return with_rows(blank(task), splits)


def blank(task: TaskSection) -> Task:
    """Returns the task without rows, to judge answers that were made elsewhere: its `of_row` makes
    the example of a published row. `task` is not used."""
    return Task(
        name="gpqa",
        rewards=(GRADER.reward,),
        correct=GRADER.is_correct,
        well_formed=has_letter,
        extract=GRADER.find,
        verdict=GRADER.verdict,
        question="Question",
        of_row=_of_row,
    )


def has_letter(text: str) -> bool:
    """True if the text chooses an option in the form that the prompt asks for."""
    return letter_in_answer_line(text) is not None


def shuffled(question: str, options: list[str]) -> list[str]:
    """Returns the options in an order that follows from the texts alone, so that a row's letters
    are the same wherever the row is, on every machine and in every version."""

    def key(option: str) -> bytes:
        return hashlib.sha256(f"{question}\n{option}".encode()).digest()

    return sorted(options, key=key)


def _make(number: int, place: str, row: Mapping[str, Any]) -> Example:
    """Returns the example of a row, with the columns `Question`, `options` in the order of their
    letters, and `answer`, the right letter."""
    question = row["Question"].strip()
    given = [row[column].strip() for column in OPTIONS]
    options = shuffled(question, given)
    answer = LETTERS[options.index(given[0])]
    content = f"{INSTRUCTION}\n\n{question}\n\n{lettered(options, ')')}"
    columns = {"Question": row["Question"], "options": options, "answer": answer}
    return Example(number, [{"role": "user", "content": content}], columns, place)


def _of_row(number: int, row: Mapping[str, Any]) -> Example:
    """Returns the example of a published row; ShoalError if one of its columns is no text."""
    for column in PUBLISHED.columns:
        if not isinstance(row.get(column), str):
            raise ShoalError(f"task gpqa: row {number} has no `{column}` that is text")
    return _make(number, "", row)
