"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): from a local jsonl or parquet file, a folder of them, or the hub.

A row holds `question` and `answer`, the latter ending in `#### <number>` or `A: <number>`, or just a number. How
questions are put and rewarded is chosen by `reward.preset` (`gsm8k_rewards.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.schema import RewardSection, TaskSection
from shoal.tasks.data import Published, read_splits
from shoal.tasks.graders.answer import final_number, parse_number, shown
from shoal.tasks.gsm8k_rewards import answer_key, load_reward_preset
from shoal.tasks.rows import has_answer, prompt_key, with_rows
from shoal.tasks.task import Task
from shoal.types import Example, ShoalError

PUBLISHED = Published("gsm8k", "openai/gsm8k", ("question", "answer"), ("gsm8k_{split}", "{split}"), subset="main",
                      texts=("question", "answer"), numbers=("answer",))


def load(task: TaskSection, reward: RewardSection | None = None) -> Task:
    """Loads the task; `task.path` is a file, a folder, a hub id, or empty for the hub's own copy.

    A file alone is the training split, unless its folder has the other split, else its last rows are held out.

    Raises `ShoalError` for data that is missing, empty, unreadable or without the two columns.
    """
    empty = blank(task, reward)
    prompt = load_reward_preset((reward or RewardSection()).preset).prompt

    def make(number: int, place: str, row: dict[str, Any]) -> Example:
        return Example(number, prompt(row["question"]), {"answer": gold(row["answer"]), "solution": row["answer"]})

    splits = read_splits(task, PUBLISHED, make)
    splits.keep(has_answer, "an answer that is a number or ends in `#### <number>`", "no `#### <number>`")
    splits.drop_held_out(prompt_key, "question")
    return with_rows(empty, splits)


def blank(task: TaskSection, reward: RewardSection | None = None) -> Task:
    """The task without data, for rows that hold their answer."""
    preset = load_reward_preset((reward or RewardSection()).preset)

    def of_row(number: int, row: Mapping[str, Any]) -> Example:
        answer = gold(str(row.get("answer", "")))
        if answer is None:
            raise ShoalError(f"task gsm8k: row {number} has no `answer` that is a number or ends in `#### <number>`")
        columns = {"answer": answer, "solution": str(row["answer"])}
        return Example(number, preset.prompt(str(row.get("question", ""))), columns)

    return Task(
        name="gsm8k",
        train=(),
        evaluations={},
        rewards=preset.rewards,
        correct=lambda text, example: preset.right(preset.answer(text), example.columns["answer"]),
        well_formed=preset.well_formed,
        extract=lambda text: answer_key(preset.answer(text)) or None,
        verdict=verdict,
        of_row=of_row,
    )


def gold(answer: str) -> str | None:
    """The number after the last `####`, else after `A:` in the last line, else the number that is all of it; commas,
    spaces and `$` removed. None where there is none.

    >>> gold("He has 1000 + 200.\\n#### 1,200")
    '1200'
    """
    _, hashes, number = answer.rpartition("####")
    last = answer.strip().rpartition("\n")[2].strip()
    number = number if hashes else last.removeprefix("A:") if last.startswith("A:") else answer
    number = number.strip().replace(",", "").replace("$", "")
    return "".join(number.split()) if parse_number(number) is not None else None


def verdict(text: str, example: Example) -> dict[str, Any]:
    """The verdict on a solution of whatever form: `correct`, and the number that it ends with as `answer`."""
    found, wanted = final_number(text), final_number(f"#### {example.columns['answer']}")
    return {"correct": found is not None and found == wanted, "answer": shown(found)}
