"""A task: questions to train on, questions held out, and the functions that judge completions."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.config.schema import RewardSection, TaskSection
from shoal.task.reward import RewardFunction, load_functions, name_functions
from shoal.types import Example, Prompt, ShoalError

TASKS = {"words": "shoal.task.words", "gsm8k": "shoal.task.gsm8k"}
"""Name -> module with `load(TaskSection) -> Task`."""

ROWS = "rows"
"""The name of a task whose data was given from Python."""

FROM_PYTHON = "python:"
"""Begins the name of a reward function that was given from Python, where the configuration is stored."""


@dataclass(frozen=True)
class Task:
    """What a run trains on and is measured by.

    `train[i].row == i`. `evaluations` come in order: the first is the main held-out set, others are reported apart;
    their rows differ, so that no two questions of one evaluation share their noise.
    """

    name: str
    train: Sequence[Example]
    evaluations: Mapping[str, Sequence[Example]]
    rewards: tuple[RewardFunction, ...]
    correct: Callable[[str, Example], bool] | None = None
    """Whether a completion's text solves its example; None: the mean reward stands in for accuracy."""
    well_formed: Callable[[str], bool] | None = None
    """Whether a completion's text has the asked form, right or wrong."""
    pretrain_example: Callable[[int], tuple[Prompt, str]] | None = None
    """Row -> (prompt, completion without a fault) for supervised training; row is 0 or more."""
    notes: tuple[str, ...] = ()
    """Lines that the run prints: what was dropped or derived when the data was read."""


def load_task(task: TaskSection, reward: RewardSection | None = None,
              functions: Sequence[Callable[..., Any]] = ()) -> Task:
    """Loads a task by name; functions given (`reward.functions` first, then `functions`) replace its own rewards.

    Every evaluation is cut to its first `task.num_questions` (0: all). Raises `ShoalError` for an unknown task, and
    whatever the task's data or the functions' files lack.
    """
    reward = reward or RewardSection()
    if task.name == ROWS:
        raise ShoalError("task.name='rows': the data of this run came from Python, give it again there with its "
                         "reward: shoal.train(resume=FOLDER, task=rows, reward=f)")
    if task.name not in TASKS:
        close = difflib.get_close_matches(task.name, TASKS, n=1, cutoff=0.0)[0]
        raise ShoalError(f"task.name={task.name!r}: there is no such task; did you mean {close!r}? "
                         f"Tasks: {', '.join(TASKS)}")
    return with_rewards(importlib.import_module(TASKS[task.name]).load(task), task, reward, functions)


def with_rewards(loaded: Task, task: TaskSection, reward: RewardSection,
                 functions: Sequence[Callable[..., Any]] = ()) -> Task:
    """A task as a run uses it: evaluations cut to `task.num_questions`, judged by the functions that were given."""
    files = [spec for spec in reward.functions if not spec.startswith(FROM_PYTHON)]
    if len(files) < len(reward.functions) and not functions:
        names = ", ".join(spec.removeprefix(FROM_PYTHON) for spec in reward.functions)
        raise ShoalError(f"reward.functions={list(reward.functions)}: this reward came from Python; give it again "
                         f"there, shoal.train(resume=FOLDER, reward={names}), or name a file, reward=file.py:function")
    given = [*load_functions(files), *functions]
    count = task.num_questions or None
    return replace(loaded, evaluations={name: rows[:count] for name, rows in loaded.evaluations.items()},
                   rewards=name_functions(given, reward.weights) if given else _weigh(loaded.rewards, reward.weights))


def _weigh(own: tuple[RewardFunction, ...], weights: Sequence[float]) -> tuple[RewardFunction, ...]:
    if weights and len(weights) != len(own):
        raise ShoalError(f"reward.weights: expected {len(own)} numbers, one for each of the task's own functions "
                         f"({', '.join(one.name for one in own)}), got {len(weights)}")
    return tuple(replace(one, weight=float(w)) for one, w in zip(own, weights, strict=True)) if weights else own
