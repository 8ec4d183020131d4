"""A task: questions to train on, questions held out, and the functions that score completions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.records import Example, RewardFunction, ShoalError
from shoal.text import nearest

CUSTOM = "custom"
ROWS = "rows"
OWN_DATA = (CUSTOM, ROWS)
"""The names of the one task of a user's own rows: read from files, or given from Python."""

TASKS = {
    "words": "shoal.tasks.words",
    "calculator": "shoal.tasks.calculator",
    "guess": "shoal.tasks.guess",
    "gsm8k": "shoal.tasks.gsm8k",
    "math": "shoal.tasks.math",
    "ifeval": "shoal.tasks.ifeval",
    "countdown": "shoal.tasks.countdown",
    "code": "shoal.tasks.code",
    CUSTOM: "shoal.tasks.examples",
    "environment": "shoal.tasks.openenv",
}
"""Name -> module with `load(TaskSection) -> Task`, or `load(TaskSection, reward:
RewardSection)`."""


@dataclass(frozen=True)
class DataReport:
    """What was read for a task, and which training rows were left out. Empty where questions are
    generated.

    >>> DataReport(
    ...     {"gsm8k_train.jsonl": 7473}, {"gsm8k_test.jsonl": 1319}, {"no `#### <number>`": 12}
    ... )
    """

    train_files: dict[str, int] = field(default_factory=dict)
    """File -> rows read from it to train on."""
    held_out_files: dict[str, int] = field(default_factory=dict)
    """File -> rows to evaluate on; a file may be in both."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> training rows left out."""


@dataclass(frozen=True)
class Task:
    """What a run trains on and is measured by.

    `train[i].row == i`. `evaluations` come in order: the first is the main held-out set, each other
    one is reported under its name; their rows differ, so that no two questions of one evaluation
    share their noise.
    """

    name: str
    train: Sequence[Example] = ()
    evaluations: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    rewards: tuple[RewardFunction, ...] = ()
    correct: Callable[[str, Example], bool] | None = None
    """True if a completion's text solves its example. None: there is no accuracy, only the mean
    reward."""
    correct_by: str = ""
    """The reward function that gives 1 to what is correct, in place of `correct`, where judging
    twice would be slow."""
    well_formed: Callable[[str], bool] | None = None
    """True if a completion's text has the requested form, right or wrong."""
    extract: Callable[[str], str | None] | None = None
    """The answer in a completion's text, for maj@k; None where there is none."""
    verdict: Callable[[str, Example], Mapping[str, Any]] | None = None
    """The verdict on a text of whatever form, such as another model's answer: plain values, one of
    them `correct`."""
    figures: Callable[[Sequence[Mapping[str, Any]]], dict[str, float]] | None = None
    """Further figures of an evaluation, from the verdicts of its answers; None: accuracy alone."""
    tools: tuple[Callable[..., Any], ...] = ()
    """Functions that the model may call, stateless, with type hints and a Google docstring."""
    environments: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Name -> what makes the environment of a rollout. With several, the column `environment` names
    a row's."""
    question: str = "question"
    """The column of the published rows by which an answer made elsewhere names its question."""
    of_row: Callable[[int, Mapping[str, Any]], Example] | None = None
    """(number, a row as published) -> its example; None where rows are made here."""
    notes: tuple[str, ...] = ()
    """Lines that the run prints: what was derived when the data was read."""
    data: DataReport = field(default_factory=DataReport)
    """The files that were read, with their rows, and the training rows that were dropped."""


def load_by_name(task: TaskSection, reward: RewardSection) -> Task:
    """The task of a name, with its own rewards and every question. Raises ShoalError for an unknown
    name, and for what the task's data lacks."""
    if task.name not in TASKS:
        raise ShoalError(
            f"task.name={task.name!r}: there is no such task; did you mean "
            f"{nearest(task.name, TASKS)!r}? Tasks: {', '.join(TASKS)}"
        )
    load = importlib.import_module(TASKS[task.name]).load
    if "reward" in inspect.signature(load).parameters:
        return load(task, reward)
    loaded = load(task)
    if reward.preset == RewardSection.preset:
        return loaded
    note = f"{task.name}: reward.preset={reward.preset} has no effect: it is for task=gsm8k"
    return replace(loaded, notes=(*loaded.notes, note))


def no_reward(task: TaskSection) -> ShoalError:
    """The error of a task without a reward of its own, where no function was given."""
    more = ""
    if task.name == CUSTOM:
        more = (
            ". Where rows have no column `prompt`, give task.template='{COLUMN}' or "
            "task.columns=[prompt=COLUMN], too; where no split is called test, task.eval_split=NAME"
        )
    return ShoalError(
        f"task {task.name}: it has no reward of its own; give a function that judges completions, "
        f"reward=file.py:function with function(completions, **columns) -> list of numbers{more}"
    )
