"""Rollouts of an environment that owns its data: its `reset` says what is asked."""

from __future__ import annotations

from shoal.config.schema import TaskSection
from shoal.tasks.generated import NUM_HELD_OUT, NUM_TRAIN, MadeRows, refuse_path
from shoal.tasks.task import Task
from shoal.types import Example


def load(task: TaskSection) -> Task:
    """The task; prompts are empty before `reset(row, **columns)` returns the user's words. No two
    rows have one number, and those that are held out begin at a million."""
    refuse_path(task, "environment")
    held_out = [
        _example(row, NUM_TRAIN + row) for row in range(task.num_eval_questions or NUM_HELD_OUT)
    ]
    return Task(
        "environment",
        train=MadeRows(lambda row: _example(row, row), NUM_TRAIN),
        evaluations={"held_out": held_out},
    )


def _example(row: int, number: int) -> Example:
    return Example(row, [{"role": "user", "content": ""}], {"row": number})
