"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): from a local jsonl or parquet file, a folder of them, or the hub.

A row holds `question` and `answer`, the latter ending in `#### <number>` or `A: <number>`, or just a number. How
questions are put and rewarded is chosen by `reward.preset` (`gsm8k_presets.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.config.schema import RewardSection, TaskSection
from shoal.tasks.data import Published, read_splits, without_held_out
from shoal.tasks.graders.answer import parse_number
from shoal.tasks.graders.final_answer import final_number, shown
from shoal.tasks.gsm8k_presets import Preset, load_preset
from shoal.tasks.gsm8k_rewards import answer_key
from shoal.tasks.task import Task
from shoal.types import Example, ShoalError

PUBLISHED = Published("gsm8k", "openai/gsm8k", ("question", "answer"), ("gsm8k_{split}", "{split}"), subset="main",
                      texts=("question", "answer"), numbers=("answer",))


def load(task: TaskSection, reward: RewardSection | None = None) -> Task:
    """Loads the task; `task.path` is a file, a folder, a hub id, or empty for the hub's own copy.

    Where a file stands alone, the split to evaluate on is looked for beside it, else its last rows are held out; what
    was dropped or held out is in the task's `notes`.

    Raises `ShoalError` for data that is missing, empty, unreadable or without the two columns.
    """
    preset = load_preset((reward or RewardSection()).preset)
    train, held_out, notes = read_splits(task, PUBLISHED)
    train = _gold(train, notes, "training") if train else []
    held_out = _gold(held_out, notes, "held-out")
    kept = without_held_out(train, held_out, lambda row: row["question"], "gsm8k", "question", notes)
    return _task(preset, _examples(kept, preset), {"held_out": _examples(held_out, preset)}, notes)


def blank(task: TaskSection, reward: RewardSection | None = None) -> Task:
    """The task without data, to judge rows that hold their answer."""
    return _task(load_preset((reward or RewardSection()).preset), (), {}, ())


def _task(preset: Preset, train: Sequence[Example], evaluations: Mapping[str, Sequence[Example]],
          notes: Sequence[str]) -> Task:
    return Task(
        name="gsm8k",
        train=train,
        evaluations=evaluations,
        rewards=preset.rewards,
        correct=lambda text, example: preset.right(preset.answer(text), example.columns["answer"]),
        well_formed=preset.well_formed,
        extract=lambda text: answer_key(preset.answer(text)) or None,
        verdict=verdict,
        of_row=_maker(preset),
        notes=tuple(notes),
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
    """Whether a solution of whatever form ends with the gold number, and the number that it was taken to end with."""
    found, wanted = final_number(text), final_number(f"#### {example.columns['answer']}")
    return {"correct": found is not None and found == wanted, "answer": shown(found)}


def _examples(rows: Sequence[Mapping[str, str]], preset: Preset) -> tuple[Example, ...]:
    return tuple(Example(i, preset.prompt(row["question"]), {"answer": row["gold"], "solution": row["answer"]})
                 for i, row in enumerate(rows))


def _maker(preset: Preset) -> Callable[[int, Mapping[str, Any]], Example]:
    """(number, row as published) -> its example; ShoalError for a row without a gold number."""

    def make(number: int, row: Mapping[str, Any]) -> Example:
        answer = gold(str(row.get("answer", "")))
        if answer is None:
            raise ShoalError(f"task gsm8k: row {number} has no `answer` that is a number or ends in `#### <number>`")
        columns = {"answer": answer, "solution": str(row["answer"])}
        return Example(number, preset.prompt(str(row.get("question", ""))), columns)

    return make


def _gold(rows: Sequence[dict[str, str]], notes: list[str], kind: str) -> list[dict[str, str]]:
    """Adds the column `gold`; rows without are dropped, which is noted."""
    found = [row | {"gold": number} for row in rows if (number := gold(row["answer"])) is not None]
    if not found:
        raise ShoalError(f"task gsm8k: none of the {len(rows)} {kind} rows has an answer that is a number or ends in "
                         "`#### <number>`")
    if len(found) < len(rows):
        notes.append(f"gsm8k: {len(rows) - len(found)} of {len(rows)} {kind} rows have no `#### <number>` and were "
                     f"dropped")
    return found
