"""The task `gsm8k` (Cobbe et al. 2021, arXiv:2110.14168): from a local jsonl or parquet file, a
folder of such files, or the hub.

A row has `question` and `answer`; the answer ends in `#### <number>` or `A: <number>`, or is just a
number. `reward.preset` chooses how questions are put and rewarded: this module has the form of a
preset, and the preset `shoal`. All searches in a text are linear in its length.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.config.sections.reward import REWARD_PRESETS, RewardSection
from shoal.config.sections.task import TaskSection
from shoal.records import Example, Messages, RewardFunction, ShoalError
from shoal.tasks.data_folder import Published
from shoal.tasks.examples import has_answer, prompt_key
from shoal.tasks.graders.answer import (
    FORMAT,
    extract_answer,
    final_number,
    reward_of,
    well_formed,
)
from shoal.tasks.graders.numbers import (
    answer_key,
    ascii_numbers,
    parse_number,
    same_number,
    write_number,
)
from shoal.tasks.splits import read_splits, with_rows
from shoal.tasks.task import Task

SYSTEM_PROMPT = (
    "Solve the user's problem. Think step by step between <reasoning> and </reasoning>, "
    "then write only the final number between <answer> and </answer>."
)


@dataclass(frozen=True)
class RewardPreset:
    """How a system puts a question and judges completions.

    `answer` returns what counts as a text's answer, None if the text has none; `right` returns
    whether that is the gold number, for the accuracy.
    """

    prompt: Callable[[str], Messages]
    rewards: tuple[RewardFunction, ...]
    answer: Callable[[str], str | None]
    well_formed: Callable[[str], bool]
    right: Callable[[str | None, str], bool]


def load_reward_preset(name: str) -> RewardPreset:
    """Imports the module of a reward preset and returns the preset of this name. KeyError for an
    unknown name. `name` is a key of REWARD_PRESETS."""
    module, _, preset = REWARD_PRESETS[name].partition(":")
    return getattr(importlib.import_module(module), preset)


def user_prompt(instructions: str, question: str) -> Messages:
    """Returns the messages of a question whose instructions are in the user's message."""
    return [{"role": "user", "content": f"{instructions}\n\n{question}"}]


def system_prompt(instructions: str, question: str) -> Messages:
    """Returns the messages of a question whose instructions are in a system message."""
    return [{"role": "system", "content": instructions}, {"role": "user", "content": question}]


def _is_tagged_gold(text: str, gold: str) -> bool:
    """True if the number in the last answer tag is the gold number."""
    return same_number(extract_answer(text), gold)


SHOAL = RewardPreset(
    prompt=partial(system_prompt, SYSTEM_PROMPT),
    rewards=(reward_of("correct", _is_tagged_gold), FORMAT),
    answer=extract_answer,
    well_formed=well_formed,
    right=same_number,
)


PUBLISHED = Published(
    "gsm8k",
    "openai/gsm8k",
    ("question", "answer"),
    ("gsm8k_{split}", "{split}"),
    subset="main",
    texts=("question", "answer"),
    numbers=("answer",),
)


def load(task: TaskSection, reward: RewardSection | None = None) -> Task:
    """Loads the task; `task.path` is a file, a folder, a hub id, or "" for GSM8K on the hub.

    Rows without a gold number are dropped. Of a single file the last rows are held out, unless its
    folder has a file of the other split. Raises `ShoalError` for data that is missing, empty,
    unreadable or without the two columns. Training rows with a held-out question are dropped too.
    Rows have the columns `answer`, the gold number as text, and `solution`. `reward.preset` chooses
    the prompts and the rewards; without `reward` it is the default.
    """
    empty = blank(task, reward)
    prompt = load_reward_preset((reward or RewardSection()).preset).prompt

    def make(number: int, place: str, row: dict[str, Any]) -> Example:
        """Makes the example of a row; its `answer` is None if the row has no gold number."""
        return Example(
            number,
            prompt(row["question"]),
            {"answer": gold(row["answer"]), "solution": row["answer"]},
        )

    splits = read_splits(task, PUBLISHED, make)
    splits.keep(
        has_answer, "an answer that is a number or ends in `#### <number>`", "no `#### <number>`"
    )
    splits.drop_held_out(prompt_key, "question")
    return with_rows(empty, splits)


def blank(task: TaskSection, reward: RewardSection | None = None) -> Task:
    """Returns the task without rows, to judge answers that were made elsewhere: its `of_row` makes
    the example of a published row, or raises ShoalError if that has no gold number. `task` is not
    used. `reward.preset` chooses the prompts and the rewards; without `reward` it is the
    default."""
    preset = load_reward_preset((reward or RewardSection()).preset)

    def of_row(number: int, row: Mapping[str, Any]) -> Example:
        """Makes the example of a published row; ShoalError if it has no gold number."""
        answer = gold(str(row.get("answer", "")))
        if answer is None:
            raise ShoalError(
                f"task gsm8k: row {number} has no `answer` that is a number or ends in `#### "
                "<number>`"
            )
        columns = {"answer": answer, "solution": str(row["answer"])}
        return Example(number, preset.prompt(str(row.get("question", ""))), columns)

    def is_correct(text: str, example: Example) -> bool:
        return preset.right(preset.answer(text), example.columns["answer"])

    def extract(text: str) -> str | None:
        return answer_key(preset.answer(text)) or None

    return Task(
        name="gsm8k",
        rewards=preset.rewards,
        correct=is_correct,
        well_formed=preset.well_formed,
        extract=extract,
        verdict=verdict,
        of_row=of_row,
    )


def gold(answer: str) -> str | None:
    """Returns the gold number of a row's answer as text, without commas, spaces and `$`, and with
    `-` as its minus sign. It is what follows the last `####`, else `A:` in the last line, else the
    whole answer. None if that is not a number.

    >>> gold("He has 1000 + 200.\\n#### 1,200")
    '1200'
    """
    last_line = answer.strip().rpartition("\n")[2].strip()
    if "####" in answer:
        text = answer.rpartition("####")[2]
    elif last_line.startswith("A:"):
        text = last_line.removeprefix("A:")
    else:
        text = answer
    text = text.strip().replace(",", "").replace("$", "")
    if parse_number(text) is None:
        return None
    return "".join(ascii_numbers(text).split())


def verdict(text: str, example: Example) -> dict[str, Any]:
    """Returns the verdict on a solution in any form, such as another model's: `answer` is the
    number that it ends with (`final_number`) as text, and `correct` says whether that is the gold
    number. `answer` is None if the solution has no number."""
    number = final_number(text)
    # Read like the number of a solution, so that both are exact values.
    gold_number = final_number(f"#### {example.columns['answer']}")
    is_right = number is not None and number == gold_number
    return {"correct": is_right, "answer": write_number(number)}
