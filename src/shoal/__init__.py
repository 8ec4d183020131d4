"""Shoal post-trains language models by reinforcement learning from verifiable rewards, in JAX.

>>> import shoal
>>> result = shoal.train(
...     model="Qwen/Qwen2.5-0.5B-Instruct", task="gsm8k", reward=my_function, steps=100
... )
>>> result["accuracy_after"], result.metrics["reward/mean"]
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from shoal.job.interrupt import end_on_interrupt, is_command

if is_command():  # so that Ctrl-C during the imports below prints one line, no traceback
    end_on_interrupt()

from shoal.config.foreign import register
from shoal.config.sections.reward import REWARD_PRESETS
from shoal.records import Example, ShoalError

if TYPE_CHECKING:
    from shoal.config.merge import Resolved
    from shoal.records import RewardFunction
    from shoal.runs.result import Result, load_run
    from shoal.tasks.task import Task
    from shoal.workers.rollout_function import generate_rollout_completions

__all__ = [
    "Example",
    "Result",
    "RewardFunction",
    "ShoalError",
    "Task",
    "diff",
    "evaluate",
    "generate_rollout_completions",
    "load_run",
    "train",
]

REWARD_PRESETS.update(
    {
        "maxtext": "shoal.compat.gsm8k_rewards:MAXTEXT",
        "tunix": "shoal.compat.gsm8k_rewards:TUNIX",
        "torchrl": "shoal.compat.gsm8k_rewards:TORCHRL",
        "verl": "shoal.compat.gsm8k_rewards:VERL",
    }
)
register("shoal.compat.front")

_LAZY = {
    "Result": "shoal.runs.result",
    "load_run": "shoal.runs.result",
    "RewardFunction": "shoal.records",
    "Task": "shoal.tasks.task",
    "generate_rollout_completions": "shoal.workers.rollout_function",
}


NOT_GIVEN: Any = ...
"""The default of arguments for data. None is another value: it comes from a function or a look-up
that found no data."""

P = ParamSpec("P")
R = TypeVar("R")


def _with_short_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that does the same, and whose ShoalErrors have no traceback of Shoal's
    inner frames and no earlier error before them: the message says what to change. So have
    interrupts whose message says how to resume."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except ShoalError as error:
            raise error.with_traceback(None) from None
        except KeyboardInterrupt as interrupt:
            if not interrupt.args:  # it may have come at any place, which its traceback shows
                raise
            raise interrupt.with_traceback(None) from None

    return call


@overload
def train(*, dry_run: Literal[True], **overrides: Any) -> dict[str, Any]: ...


@overload
def train(*, dry_run: Literal[False] = False, **overrides: Any) -> Result: ...


@_with_short_errors
def train(
    *,
    task: Any = NOT_GIVEN,
    held_out: Any = None,
    correct: Callable[[str, Example], bool] | None = None,
    train_dataset: Any = NOT_GIVEN,
    eval_dataset: Any = None,
    dry_run: bool = False,
    **overrides: Any,
) -> Result | dict[str, Any]:
    """Evaluates a model, trains it, evaluates it again, and returns the run's Result. Prints like
    `shoal train`; raises ShoalError for a mistake that the user can fix.

    `task`: a name, settings as a dict, or your own data: dicts with `prompt` (text or messages),
    whose other columns are passed to the reward; columns; a table of pandas, polars, arrow or
    datasets; a `shoal.Task`. `held_out`: rows to evaluate on, which are not trained on; a dict of
    several such data sets by name; or "train" to evaluate on the training rows; by default the last
    rows of the data are held out. `train_dataset` and `eval_dataset`, TRL's names, mean the same.
    Of TRL's other objects `peft_config` and `args` are read, a LoraConfig and a GRPOConfig
    (docs/flags-trl.md); with a GRPOConfig all else has TRL's defaults, unless `recipe` is given
    (None: Shoal's). `callbacks`: objects or classes of the form of transformers' TrainerCallback
    (docs/migrating.md).
    `correct(text, example)`: whether a completion solves its example; without it there is no
    accuracy, only the mean reward. `reward`: a function or several, `f(prompts, completions,
    completion_ids, **columns) -> list of numbers`. `tools`, `environment`, `rollout`: functions
    that the model may call, a class of environments, a function that plays rollouts
    (docs/agents.md), or their names. `dry_run=True` trains nothing: it makes the checks of `shoal
    train --dry-run`, prints its notes and warnings, and returns the value of each key by its dotted
    name.
    All other keys are those of `shoal train --help`: nested
    (`optimizer={"lr": 1e-5}`), dotted (`**{"optimizer.lr": 1e-5}`) or with two underscores
    (`optimizer__lr=1e-5`). A key whose value is None counts as not given; but ShoalError if
    `train_dataset` or `task` is None, and nothing else names the data."""
    from shoal.commands.train import train as run
    from shoal.compat.trl_objects import notes_on_arguments, take_callbacks, without_objects
    from shoal.config.keywords import held_out_name
    from shoal.job.cache import cache_by_configuration
    from shoal.job.process import open_console
    from shoal.job.resume import from_overrides_on_run
    from shoal.runs.layout import with_last_runs
    from shoal.runs.result import Result
    from shoal.tasks.custom import given_data, listed

    notes = notes_on_arguments(overrides)
    overrides, callbacks = take_callbacks(overrides)
    overrides = without_objects(overrides)
    none_given = _names_of_none(task=task, train_dataset=train_dataset)
    task = _by_either_name("task", task, "train_dataset", train_dataset)
    held_out = _by_either_name("held_out", held_out, "eval_dataset", eval_dataset)
    named = _named(task, held_out, correct, overrides)
    task, held_out = listed(task, held_out)
    with given_data(task, held_out):  # num_train_epochs counts its rows
        config, resolved, functions = from_overrides_on_run(named)
    _check_data_is_named(none_given, resolved)
    config, resolved = with_last_runs(config, resolved)
    resolved = replace(resolved, notes=(*notes, *resolved.notes))
    config = _with_functions_named(config, functions)
    with _typed_names_in_errors(resolved):
        data = _task_of_data(task, held_out, correct, config, functions)
        config = _with_environments_named(config, data)
        if data is not None:
            eval_split = held_out_name(held_out, config.task)
            config = replace(config, task=replace(config.task, eval_split=eval_split))
        if dry_run:
            return _dry_run(config, resolved, functions, data)
        cache_by_configuration()
        config, console = open_console(config)
        console = _console(resolved, console)
        summary = run(config, functions, console, data, resolved.recipe, callbacks)
    return Result(Path(summary.run_folder), summary)


@_with_short_errors
def evaluate(
    *,
    task: Any = NOT_GIVEN,
    held_out: Any = None,
    correct: Callable[[str, Example], bool] | None = None,
    train_dataset: Any = NOT_GIVEN,
    eval_dataset: Any = None,
    dry_run: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """Evaluates one model and returns its figures for each set of questions, with how they were
    measured; prints like `shoal eval`, and raises ShoalError for a mistake that the user can fix.
    Arguments are like those of `train`, with the keys of `shoal eval --help`. With `responses=FILE`
    it scores answers made elsewhere, also for your own rows.

    If `task` is your own rows, `held_out` is evaluated; without it all rows of `task`, up to
    `task.num_eval_questions`. `held_out` alone will do, too. `train_dataset` and `eval_dataset`,
    TRL's names, mean the same. `dry_run=True` evaluates nothing, like `shoal eval --dry-run`, and
    returns the value of each key by its dotted name."""
    from shoal.compat.trl_objects import without_objects
    from shoal.config.commands import EvalConfig
    from shoal.config.merge import from_overrides
    from shoal.job.cache import cache_by_configuration
    from shoal.job.own_task import config_for_eval_of_run
    from shoal.runs.layout import with_last_runs
    from shoal.tasks.custom import is_data, is_sets
    from shoal.tasks.splits import evaluating

    overrides = without_objects(overrides, EvalConfig)
    none_given = _names_of_none(task=task, train_dataset=train_dataset)
    task = _by_either_name("task", task, "train_dataset", train_dataset)
    held_out = _by_either_name("held_out", held_out, "eval_dataset", eval_dataset)
    if task is None and is_sets(held_out):
        task = next(iter(held_out.values()))  # of which no row is left, as all are held out
    elif task is None and is_data(held_out):
        task, held_out = held_out, None
    config, resolved, functions = from_overrides(
        EvalConfig, **_named(task, held_out, correct, overrides)
    )
    config, resolved = with_last_runs(config, resolved)
    config, resolved = config_for_eval_of_run(config, resolved, bool(functions), is_data(task))
    _check_data_is_named(none_given, resolved)
    config_of_data = config
    if config.responses:
        # 0: all rows, because the responses may belong to any of them
        config_of_data = replace(config, task=replace(config.task, num_eval_questions=0))
    with _typed_names_in_errors(resolved):
        with evaluating():
            data = _task_of_data(task, held_out, correct, config_of_data, functions)
        if dry_run:
            return _dry_run(config, resolved, functions, data)
        if config.responses:
            from shoal.commands.responses import score_responses

            return score_responses(config, functions, _console(resolved), data)
        from shoal.commands.evaluate import evaluate as run  # imports JAX

        cache_by_configuration()
        return run(config, functions, _console(resolved), data)


def diff(run: Any, other: Any) -> dict[str, Any]:
    """Compares two runs, prints what differs and the likely cause, and returns the comparison, like
    `shoal diff`. `run`, `other`: run folders, as paths or texts, or what the command accepts in
    their place, like `last`. Raises ShoalError if there is no such run."""
    from shoal.commands.diff import diff
    from shoal.config.commands import DiffConfig

    return diff(DiffConfig(str(run), str(other)))


def __getattr__(name: str) -> Any:
    """Imports the names in _LAZY when they are first used, and returns their values; AttributeError
    for any other name."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def _names_of_none(**arguments: Any) -> list[str]:
    """Returns the names of the arguments whose value is None."""
    return [name for name, value in arguments.items() if value is None]


def _check_data_is_named(none_given: Sequence[str], resolved: Resolved) -> None:
    """Raises ShoalError if an argument for data is None and nothing names the data: the packaged
    task, which is the default, is not what the caller means. `none_given`: the names of such
    arguments; `resolved`: the Resolved of all arguments."""
    if none_given and not {"task.name", "task.path"} & resolved.origins.keys():
        raise ShoalError(
            f"{none_given[0]} is None: expected rows, a list of dicts or a table; leave it out for "
            "the packaged arithmetic questions"
        )


def _by_either_name(name: str, given: Any, trl_name: str, rows: Any) -> Any:
    """Returns what was given as the argument `name`, or, by TRL's name for it, as rows. None if
    both are NOT_GIVEN or None. Raises ShoalError if both were given, or if TRL's name has no rows
    but a text."""
    from shoal.tasks.custom import is_data, is_sets

    given = None if given is NOT_GIVEN else given
    if rows is None or rows is NOT_GIVEN:
        return given
    if given is not None:
        raise ShoalError(f"{trl_name} and {name} are two names of one thing: give one of them")
    is_empty = isinstance(rows, Mapping) and not rows
    if is_empty or (trl_name == "train_dataset" and is_sets(rows)):
        raise ShoalError(
            f"{trl_name} is a dict of {', '.join(map(str, rows)) or 'nothing'}: expected one data "
            "set, or columns with `prompt` or `messages` among them; eval_dataset may be a dict of "
            "data sets, {NAME: rows}"
        )
    if not is_data(rows):
        raise ShoalError(
            f"{trl_name}={rows!r}: expected rows, a list of dicts or a table; a data set by name "
            "is dataset_name=NAME, and a file is task=custom with task.path=FILE"
        )
    return rows


def _named(task: Any, held_out: Any, correct: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the overrides with the task among them: `task.name` is `rows` if `task` is
    data from Python, else `task` is a name or settings, missing if it is None. Raises ShoalError if
    `held_out` or `correct` is given without data from Python."""
    from shoal.config.keywords import ROWS
    from shoal.tasks.custom import is_data

    if is_data(task):
        return {**overrides, "task.name": ROWS}
    for name, value in (("held_out", held_out), ("correct", correct)):
        if value is not None:
            raise ShoalError(f"{name} is for data of your own, task=rows; task is {task!r}")
    if task is None:
        return dict(overrides)
    return {**overrides, "task": task}


def _task_of_data(
    task: Any, held_out: Any, correct: Any, config: Any, functions: Sequence[Callable]
) -> Task | None:
    """Returns the Task for data given from Python; None if `task` is a name, settings or None.
    `task`: the rows; `held_out`: rows to evaluate on, "train" or None; `correct`: (text, example)
    -> bool, or None. `functions`: the reward functions given from Python. Raises ShoalError if the
    data cannot be used."""
    from shoal.config.train import Config
    from shoal.job.task import task_of_data
    from shoal.tasks.custom import is_data

    if not is_data(task):
        return None
    return task_of_data(
        data=task,
        held_out=held_out,
        correct=correct,
        task=config.task,
        reward=config.reward,
        functions=functions,
        needs_reward=not (isinstance(config, Config) and config.algorithm.learns_from_data),
    )


def _with_functions_named(config: Any, functions: Sequence[Callable]) -> Any:
    """Returns a configuration whose reward.functions are the names of the reward functions given
    from Python, so that the run's folder shows that there were some. Unchanged if there were none,
    or if it names them already, because other functions are given by name."""
    from shoal.config.keywords import FROM_PYTHON
    from shoal.rewards.loading import name_functions

    if not functions or config.reward.functions:
        return config
    names = tuple(f"{FROM_PYTHON}{function.name}" for function in name_functions(functions))
    return replace(config, reward=replace(config.reward, functions=names))


def _with_environments_named(config: Any, task: Task | None) -> Any:
    """Returns a configuration that names the tools and environments of a task given from Python,
    after registering them under these names. Unchanged if the task has none, or if the
    configuration names some already."""
    from shoal.config.keywords import register_object

    if task is None or not (task.tools or task.environments) or config.turns:
        return config
    tools = tuple(register_object(tool) for tool in task.tools)
    factory = ""
    if task.environments:
        factory = register_object(task.environments, "environments")
    environment = replace(config.environment, tools=tools, factory=factory)
    return replace(config, environment=environment)


def _dry_run(
    config: Any, resolved: Resolved, functions: Sequence[Callable], data: Task | None
) -> dict[str, Any]:
    """Prints what the command's `--dry-run` prints, but for the YAML, and returns the value of each
    key by its dotted name; `batch.prompts_per_step` is that of all devices, if `mesh` says how many
    there are. `functions`, `data`: given from Python; `resolved`: the merge that made `config`.
    ShoalError if the command would refuse the configuration."""
    from shoal.commands.help import dry_run
    from shoal.config.derived import trainer_devices
    from shoal.config.key import values_of
    from shoal.config.train import Config

    print(dry_run(config, resolved, functions, data, with_settings=False), end="")
    values = values_of(config)
    if isinstance(config, Config):
        devices = trainer_devices(config.mesh)
        each = config.batch.prompts_per_device
        if each and devices:
            values["batch.prompts_per_step"] = each * devices
    return values


@contextmanager
def _typed_names_in_errors(resolved: Any) -> Iterator[None]:
    """Adds to a ShoalError of the block the arguments, of another system's names, that set the keys
    which it mentions. `resolved`: the Resolved of the arguments."""
    from shoal.compat.front import typed_names_adder

    try:
        yield
    except ShoalError as error:
        raise ShoalError(typed_names_adder(resolved)(str(error)), error.key) from error


def _console(resolved: Any, console: Any = None) -> Any:
    """Prints the notes about a configuration, and what flags of other systems became, to `console`
    (None: to a new one), and returns that console. `resolved`: a Resolved."""
    from shoal.compat.front import print_notes
    from shoal.report.console import Console

    console = console or Console()
    print_notes(resolved, console)
    return console
