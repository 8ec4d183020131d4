"""Rollouts of an environment that owns its data: its `reset` says what is asked."""

from __future__ import annotations

from shoal.config.schema import TaskSection
from shoal.tasks.generated import NUM_TRAIN, generated_task
from shoal.tasks.task import Task
from shoal.types import Example


def load(task: TaskSection) -> Task:
    """The task; prompts are empty before `reset(row, **columns)` returns the user's words. No two rows have one number,
    and those that are held out begin at a million."""
    held_out = {"held_out": lambda count: range(NUM_TRAIN, NUM_TRAIN + count)}
    return generated_task(task, Task("environment"), (), held_out, lambda row: row, _example)


def _example(row: int, number: int) -> Example:
    return Example(row, [{"role": "user", "content": ""}], {"row": number})
