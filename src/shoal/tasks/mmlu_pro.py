"""The task `mmlu_pro` (Wang et al. 2024, arXiv:2406.01574): 12,032 questions of 14 categories with
up to ten options.

A row has `question`, `options`, `answer` (a letter) and `category`. The prompt begins with five
worked examples of the category, the rows of the split `validation` that have `cot_content`. Prompt
and grader are those of the authors' script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config.sections.task import TaskSection
from shoal.records import Example, ShoalError
from shoal.tasks.data_folder import Published
from shoal.tasks.graders.choice import (
    ChoiceGrader,
    has_options,
    letter_in_answer_sentence,
    lettered,
)
from shoal.tasks.splits import is_evaluating, read_splits, with_rows
from shoal.tasks.task import Task

PUBLISHED = Published(
    "mmlu_pro",
    "TIGER-Lab/MMLU-Pro",
    ("question", "options", "answer", "category"),
    ("mmlu_pro_{split}", "{split}"),
    texts=("question", "answer", "category"),
)
NUM_SHOTS = 5
_NO_OPTION = "N/A"
_THOUGHT = "Let's think step by step."


@dataclass(frozen=True)
class PlacedRow:
    """A row of the published data, before the worked examples of its category are known."""

    number: int
    place: str
    row: Mapping[str, Any]


GRADER = ChoiceGrader(letter_in_answer_sentence)


def load(task: TaskSection) -> Task:
    """Loads the task; `task.path` is a file, a folder, a hub id, or "" for MMLU-Pro on the hub.

    The training rows that have `cot_content` are the worked examples of the held-out questions;
    the presets choose the published splits, `validation` and `test`. Without any, there are no
    worked examples, and a note says so. Raises `ShoalError` for data that is missing or unreadable,
    and for a row whose options or answer cannot be used.
    """
    splits = read_splits(task, PUBLISHED, PlacedRow, spread=True)
    splits.note_benchmark(task.num_eval_questions)
    splits.drop_held_out(_question_of, "question")
    shots = worked_examples([] if splits.shared else splits.train)
    if not shots:
        splits.notes.append(
            "mmlu_pro: no rows with `cot_content` besides the questions, so prompts have no worked "
            "examples; published figures have five, of the split validation"
        )
    splits.train = _examples(splits.train, shots)
    splits.held_out = splits.train if splits.shared else _examples(splits.held_out, shots)
    if splits.train and not (splits.one_split or splits.shared or is_evaluating()):
        splits.notes.append(
            "mmlu_pro: an evaluation set: the worked examples in the prompts of held-out questions "
            "are rows that are trained on, so its figures are not the published ones"
        )
    return with_rows(blank(task), splits)


def blank(task: TaskSection) -> Task:
    """Returns the task without rows, to judge answers that were made elsewhere: its `of_row` makes
    the example of a published row. `task` is not used."""
    return Task(
        name="mmlu_pro",
        rewards=(GRADER.reward,),
        correct=GRADER.is_correct,
        well_formed=has_sentence,
        extract=GRADER.find,
        verdict=GRADER.verdict,
        of_row=_of_row,
    )


def has_sentence(text: str) -> bool:
    """True if a text says `answer is`, as the prompt asks."""
    return "answer is " in text


# ---- rows


def worked_examples(rows: Sequence[PlacedRow]) -> dict[str, list[PlacedRow]]:
    """Returns category -> its first rows that have a worked solution; one more than NUM_SHOTS, so
    that enough are left for a row that is among them itself. {} if no row has one."""
    by_category: dict[str, list[PlacedRow]] = {}
    for placed in rows:
        if str(placed.row.get("cot_content") or "").strip():
            of_category = by_category.setdefault(placed.row["category"], [])
            if len(of_category) <= NUM_SHOTS:
                of_category.append(placed)
    return by_category


def _question_of(placed: PlacedRow) -> tuple[str, tuple[str, ...]]:
    """Returns what makes two questions the same; options that cannot be used are refused later."""
    options = placed.row["options"]
    is_list = isinstance(options, list)
    return placed.row["question"], tuple(map(str, options)) if is_list else ()


def _examples(rows: Sequence[PlacedRow], shots: Mapping[str, Sequence[PlacedRow]]) -> list[Example]:
    """Returns the rows' examples, with the worked examples of their categories in the prompts."""
    examples = []
    for placed in rows:
        of_category = [shot for shot in shots.get(placed.row["category"], ()) if shot is not placed]
        examples.append(_example(placed, of_category[:NUM_SHOTS]))
    return examples


def _example(placed: PlacedRow, shots: Sequence[PlacedRow]) -> Example:
    """Returns the example of a row, with `shots` worked out in its prompt. ShoalError if its
    options or its answer cannot be used."""
    row = placed.row
    parts = [
        "The following are multiple choice questions (with answers) about "
        f"{row['category']}. Think step by step and then output the answer in the format of "
        '"The answer is (X)" at the end.\n\n'
    ]
    for shot in shots:
        parts.append(_written(shot, str(shot.row["cot_content"]).removeprefix("A: ")))
    parts.append(_written(placed, _THOUGHT))
    columns = {
        "question": row["question"],
        "options": _options_of(placed),
        "answer": row["answer"],
        "category": row["category"],
    }
    prompt = [{"role": "user", "content": "".join(parts)}]
    return Example(placed.number, prompt, columns, placed.place)


def _written(placed: PlacedRow, thought: str) -> str:
    """Returns a question with its options, and how its answer begins, or all of it."""
    options = lettered(_options_of(placed), ".")
    return f"Question: {placed.row['question']}\nOptions: {options}\nAnswer: {thought}\n\n"


def _options_of(placed: PlacedRow) -> list[str]:
    """Returns the options of a row, without those that stand for none. ShoalError if they are not
    two to ten texts, or if the answer is not the letter of one."""
    options = placed.row["options"]
    if isinstance(options, list):
        options = [option for option in options if option != _NO_OPTION]
    answer = placed.row["answer"]
    if not has_options(options, answer):
        raise ShoalError(
            f"task mmlu_pro: {placed.place}: `options` is {str(options)[:60]!r} with the answer "
            f"{str(answer)[:20]!r}; expected a list of two to ten texts and the letter of one"
        )
    return options


def _of_row(number: int, row: Mapping[str, Any]) -> Example:
    """Returns the example of a published row, without worked examples; ShoalError if it lacks a
    column, or its options cannot be used."""
    for column in PUBLISHED.columns:
        if column not in row:
            raise ShoalError(f"task mmlu_pro: row {number} has no `{column}`")
    return _example(PlacedRow(number, f"row {number}", row), ())
