"""A task: questions to train on, questions held out for evaluation, and the functions that score
completions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.config.keywords import ROWS
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.records import Example, RewardFunction, ShoalError
from shoal.text import nearest

CUSTOM = "custom"
OWN_DATA = (CUSTOM, ROWS)
"""The two names of the task of a user's own rows: `custom` if read from files, `rows` if given from
Python."""

TASKS = {
    "words": "shoal.tasks.words",
    "calculator": "shoal.tasks.calculator",
    "guess": "shoal.tasks.guess",
    "gsm8k": "shoal.tasks.gsm8k",
    "math": "shoal.tasks.math",
    "ifeval": "shoal.tasks.ifeval",
    "countdown": "shoal.tasks.countdown",
    "code": "shoal.tasks.code",
    "aime24": "shoal.tasks.aime",
    "aime25": "shoal.tasks.aime",
    "gpqa": "shoal.tasks.gpqa",
    "mmlu_pro": "shoal.tasks.mmlu_pro",
    "livecodebench": "shoal.tasks.livecodebench",
    CUSTOM: "shoal.tasks.custom",
    "environment": "shoal.tasks.openenv",
}
"""Name -> module with `load(TaskSection) -> Task`, or `load(TaskSection, reward:
RewardSection)`."""


HELD_OUT = "held_out"
"""The name of the main evaluation set of a task that gives it none of its own."""

HELD_OUT_TOO = "held out too"
"""Ends the reason in `DataReport.dropped` for training rows that are evaluated on."""


@dataclass(frozen=True)
class DataReport:
    """What was read for a task: the files with their numbers of rows, and which training rows were
    left out. Empty if the questions are generated.

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

    @property
    def dropped_as_held_out(self) -> int:
        """Number of training rows left out because rows to evaluate on have their question."""
        return sum(
            number for reason, number in self.dropped.items() if reason.endswith(HELD_OUT_TOO)
        )


@dataclass(frozen=True)
class Task:
    """What a run trains on and is measured by: examples, evaluations, rewards and graders.

    `train[i].row == i`. The first of `evaluations` is the main held-out set; each further one is
    reported under its name. No two questions of the evaluations have the same row number, so that
    they do not share their sampling noise.
    """

    name: str
    train: Sequence[Example] = ()
    evaluations: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    rewards: tuple[RewardFunction, ...] = ()
    correct: Callable[[str, Example], bool] | None = None
    """True if a completion's text solves its example. None: there is no accuracy, only the mean
    reward."""
    correct_by: str = ""
    """Name of the reward function whose value 1 means that a completion is correct. It replaces
    `correct` in tasks in which judging twice would be slow; "" if there is none."""
    well_formed: Callable[[str], bool] | None = None
    """True if a completion's text has the requested form, right or wrong."""
    extract: Callable[[str], str | None] | None = None
    """Returns the answer in a completion's text, for maj@k; None if the text has no answer."""
    verdict: Callable[[str, Example], Mapping[str, Any]] | None = None
    """Returns the verdict on an answer of any form, such as one by another model: plain values, one
    of them `correct`."""
    figures: Callable[[Sequence[Mapping[str, Any]]], dict[str, float]] | None = None
    """Computes further figures of an evaluation from the verdicts on its answers; None: there is
    only the accuracy."""
    tools: tuple[Callable[..., Any], ...] = ()
    """Functions that the model may call, stateless, with type hints and a Google docstring."""
    environments: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Name -> factory of a rollout's environment. With several, each row's column `environment`
    names its own."""
    question: str = "question"
    """The column of the published data set that identifies a question; files of answers that were
    made elsewhere name their questions by it."""
    of_row: Callable[[int, Mapping[str, Any]], Example] | None = None
    """(number, a row of the published data set) -> its example; None if the task generates its
    rows."""
    notes: tuple[str, ...] = ()
    """Lines that the run prints about how the data was read, such as which rows are held out."""
    data: DataReport = field(default_factory=DataReport)
    """The files that were read, with their rows, and the training rows that were dropped."""
    unused_evaluations: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    """The evaluation sets of a run that does not evaluate, whose `evaluations` are empty. The
    digest of the run's data covers them."""

    @property
    def judges(self) -> bool:
        """True if the task says which answers are right, so that there is an accuracy."""
        by_reward = any(reward.name == self.correct_by for reward in self.rewards)
        return self.correct is not None or by_reward


def load_by_name(task: TaskSection, reward: RewardSection) -> Task:
    """Loads the task that `task.name` names, with its built-in rewards and all its questions.
    Raises ShoalError for an unknown name, and for missing or unusable data. A task that has no use
    for `reward.preset` does not read it."""
    if task.name not in TASKS:
        raise ShoalError(
            f"task.name={task.name!r}: there is no such task; did you mean "
            f"{nearest(task.name, TASKS)!r}? Tasks: {', '.join(TASKS)}"
        )
    load = importlib.import_module(TASKS[task.name]).load
    takes_reward = "reward" in inspect.signature(load).parameters
    loaded = load(task, reward) if takes_reward else load(task)
    return with_fewer_rows(loaded, task)


def with_fewer_rows(loaded: Task, task: TaskSection) -> Task:
    """Returns the task with its first `task.num_train_questions` training rows (0: all); its data
    report counts the others as dropped. The given task is not changed."""
    limit = task.num_train_questions
    num_others = len(loaded.train) - limit
    if limit == 0 or num_others <= 0:
        return loaded
    dropped = {**loaded.data.dropped, f"task.num_train_questions={limit}": num_others}
    return replace(loaded, train=loaded.train[:limit], data=replace(loaded.data, dropped=dropped))


def no_reward(task: TaskSection) -> ShoalError:
    """Returns the error for a task without built-in reward if the user gave no reward function. The
    error is returned, not raised."""
    more = ""
    if task.name == CUSTOM:
        more = (
            ". Where rows have no column `prompt`, give task.template='{COLUMN}' or "
            "task.columns=[prompt=COLUMN], too; where no split is called test, "
            "task.eval_split=NAME. For rows that verl prepared of GSM8K, MATH or DAPO's data there "
            "is reward=verl_reward"
        )
    return ShoalError(
        f"task {task.name}: it has no reward of its own; give a function that judges completions, "
        f"reward=file.py:function with function(completions, **columns) -> list of numbers{more}"
    )
