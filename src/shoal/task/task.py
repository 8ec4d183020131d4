"""A task: questions to train on, questions held out, and the functions that judge completions."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.config.schema import RewardSection, TaskSection
from shoal.task.reward import RewardFunction, load_functions, name_functions
from shoal.types import Example, Prompt, ShoalError

TASKS = {name: f"shoal.task.{name}" for name in ("words", "gsm8k", "math", "ifeval", "countdown", "custom")}
"""Name -> module with `load(TaskSection) -> Task`; one that takes `reward` too is given the RewardSection."""

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
    """Whether a completion's text solves its example; None: there is no accuracy, only the mean reward."""
    well_formed: Callable[[str], bool] | None = None
    """Whether a completion's text has the asked form, right or wrong."""
    extract: Callable[[str], str | None] | None = None
    """The answer in a completion's text, for maj@k; None where there is none."""
    verdict: Callable[[str, Example], Mapping[str, Any]] | None = None
    """How an answer made elsewhere, of whatever form, does: plain values, `correct` (bool) among them."""
    figures: Callable[[Sequence[Mapping[str, Any]]], dict[str, float]] | None = None
    """Further figures of an evaluation, from the verdicts of its answers; None: accuracy alone."""
    question: str = "question"
    """The column of the published rows by which an answer made elsewhere names its question."""
    of_row: Callable[[int, Mapping[str, Any]], Example] | None = None
    """(number, a row as published) -> its example; None where rows are made here."""
    pretrain_example: Callable[[int], tuple[Prompt, str]] | None = None
    """Row -> (prompt, completion without a fault) for supervised training; row is 0 or more."""
    notes: tuple[str, ...] = ()
    """Lines that the run prints: what was dropped or derived when the data was read."""


def _unrewarded(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def load_task(task: TaskSection, reward: RewardSection | None = None,
              functions: Sequence[Callable[..., Any]] = (), needs_reward: bool = True) -> Task:
    """Loads a task by name; functions given (`reward.functions` first, then `functions`) replace its own rewards.

    Every evaluation is cut to its first `task.num_questions` (0: all). Raises `ShoalError` for an unknown task, and
    whatever the task's data or the functions' files lack. Where nothing `needs_reward` (a teacher alone teaches), data
    without a function is rewarded with 0.
    """
    judged, reward = reward is not None, reward or RewardSection()
    if task.name == ROWS:
        raise ShoalError("task.name='rows': the data of this run came from Python, give it again there with its "
                         "reward: shoal.train(resume=FOLDER, task=rows, reward=f)")
    if task.name not in TASKS:
        close = difflib.get_close_matches(task.name, TASKS, n=1, cutoff=0.0)[0]
        raise ShoalError(f"task.name={task.name!r}: there is no such task; did you mean {close!r}? "
                         f"Tasks: {', '.join(TASKS)}")
    loaded = with_rewards(_load(task, reward), task, reward, functions)
    if not needs_reward and not loaded.rewards:
        return replace(loaded, rewards=(RewardFunction("unrewarded", _unrewarded, own=True),))
    if judged and not loaded.rewards:
        raise ShoalError(f"task {task.name}: own data needs a function that judges it, reward=file.py:function with "
                         "function(completions, **columns) -> list of numbers")
    return loaded


def _load(task: TaskSection, reward: RewardSection) -> Task:
    """The task as its module makes it, given the rewards' settings where it takes them."""
    load = importlib.import_module(TASKS[task.name]).load
    if "reward" in inspect.signature(load).parameters:
        return load(task, reward)
    loaded = load(task)
    if reward.preset == RewardSection.preset:
        return loaded
    note = f"{task.name}: reward.preset={reward.preset} has no effect: it is for task=gsm8k"
    return replace(loaded, notes=(*loaded.notes, note))


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
