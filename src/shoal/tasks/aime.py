"""The tasks `aime24` and `aime25`: the 30 problems each of the American Invitational Mathematics
Examination of 2024 and 2025, whose answers are integers from 0 to 999.

A row has `problem` and `answer`. The prompt is that of DeepSeek-R1's evaluation (arXiv:2501.12948),
and answers are checked as those of the task `math`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.config.sections.task import TaskSection
from shoal.records import Example, RewardFunction, ShoalError
from shoal.tasks import math
from shoal.tasks.data_folder import Published
from shoal.tasks.examples import has_answer, prompt_key
from shoal.tasks.graders.answer import last_boxed
from shoal.tasks.splits import read_splits, with_rows
from shoal.tasks.task import Task

PUBLISHED = Published(
    "aime24",
    "HuggingFaceH4/aime_2024",
    ("problem", "answer"),
    ("aime24_{split}", "{split}", "aime24"),
    texts=("problem", "answer"),
    numbers=("answer",),
)
AIME25 = replace(
    PUBLISHED,
    task="aime25",
    hub_id="math-ai/aime25",
    stems=("aime25_{split}", "{split}", "aime25"),
)
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
# Two published answers have a degree sign, of which the question asks for the number alone.
_INTEGER = re.compile(r"\s*\$?\s*0*([0-9]{1,3})\s*(?:\^\s*\{?\s*\\circ\s*\}?)?\s*\$?\s*")


def load(task: TaskSection) -> Task:
    """Loads the task `aime24` or `aime25`, as `task.name` says; `task.path` is a file, a folder, a
    hub id, or "" for the published rows on the hub.

    Rows whose answer is no integer from 0 to 999 are dropped. In an evaluation all rows are
    evaluated on; for training, of a single split every tenth row is held out. Raises `ShoalError`
    for data that is missing or unreadable, and if math-verify is not installed.
    """
    empty = blank(task)
    published = AIME25 if task.name == AIME25.task else PUBLISHED
    splits = read_splits(task, published, _make, spread=True)
    splits.note_benchmark(task.num_eval_questions)
    expected = "an `answer` that is an integer from 0 to 999"
    splits.keep(has_answer, expected, "no answer from 0 to 999")
    splits.drop_held_out(prompt_key, "problem")
    return with_rows(empty, splits)


def blank(task: TaskSection) -> Task:
    """Returns the task without rows, to judge answers that were made elsewhere: its `of_row` makes
    the example of a published row. ShoalError if math-verify is not installed."""
    correct = RewardFunction("correct", math.correct_reward, 1.0, runs_in_process=True)
    return replace(
        math.blank(task),
        name=task.name,
        rewards=(correct,),
        well_formed=has_box,
        of_row=_of_row,
    )


def has_box(text: str) -> bool:
    """True if a text has a closed `\\boxed{}` with something in it."""
    return bool(last_boxed(text))


def gold(answer: str) -> str | None:
    """Returns an answer as an integer from 0 to 999 without leading zeros; None if it is none.

    >>> gold("033"), gold("336^\\\\circ"), gold("1000")
    ('33', '336', None)
    """
    found = _INTEGER.fullmatch(answer)
    return None if found is None else str(int(found[1]))


def _make(number: int, place: str, row: Mapping[str, Any]) -> Example:
    """Returns the example of a row. Its column `answer` is None if the row has no answer."""
    problem = row["problem"]
    prompt = [{"role": "user", "content": f"{problem}\n{INSTRUCTION}"}]
    return Example(number, prompt, {"problem": problem, "answer": gold(row["answer"])}, place)


def _of_row(number: int, row: Mapping[str, Any]) -> Example:
    """Returns the example of a published row; ShoalError if it has no answer."""
    answer = str(row.get("answer", ""))
    if gold(answer) is None:
        raise ShoalError(f"row {number} has no `answer` that is an integer from 0 to 999")
    return _make(number, "", {"problem": str(row.get("problem", "")), "answer": answer})
