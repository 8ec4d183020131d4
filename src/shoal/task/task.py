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
    if task.name not in TASKS:
        close = difflib.get_close_matches(task.name, TASKS, n=1, cutoff=0.0)[0]
        raise ShoalError(f"task.name={task.name!r}: there is no such task; did you mean {close!r}? "
                         f"Tasks: {', '.join(TASKS)}")
    given = [*load_functions(reward.functions), *functions]
    loaded: Task = importlib.import_module(TASKS[task.name]).load(task)
    count = task.num_questions or None
    return replace(loaded, evaluations={name: rows[:count] for name, rows in loaded.evaluations.items()},
                   rewards=name_functions(given, reward.weights) if given else _weigh(loaded.rewards, reward.weights))


def _weigh(own: tuple[RewardFunction, ...], weights: Sequence[float]) -> tuple[RewardFunction, ...]:
    if weights and len(weights) != len(own):
        raise ShoalError(f"reward.weights: expected {len(own)} numbers, one for each of the task's own functions "
                         f"({', '.join(one.name for one in own)}), got {len(weights)}")
    return tuple(replace(one, weight=float(w)) for one, w in zip(own, weights, strict=True)) if weights else own
