"""Finds what `shoal eval model=RUN` takes from the run: its task, on which its model is evaluated
by default, and the rows that it was trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shoal.config.arguments import Arguments, Layer, Setting
from shoal.config.commands import EvalConfig
from shoal.config.key import get_value, keys_of
from shoal.config.keywords import FROM_PYTHON, PYTHON_OBJECTS, ROWS, names_object
from shoal.config.merge import Resolved, given_values, load
from shoal.config.sections.task import GENERATED_TASKS
from shoal.config.stored import difference_from_defaults
from shoal.config.train import Config
from shoal.job.task import load_questions
from shoal.records import Example, ShoalError
from shoal.report.console import Console
from shoal.runs.layout import is_run, with_last_runs
from shoal.runs.reader import read_requested
from shoal.weights.checkpoints import checkpoint_named

SECTIONS = ("task", "reward", "environment", "sampling", "evaluation")
"""Sections that `shoal eval` takes from a run: which questions its model gets, which tools it may
call, how and how long it answers, and how answers are scored. The other sections that both commands
have are about the model, which the user names, and about the devices of this machine."""

OF_ANSWERS = (
    "sampling.max_completion_tokens",
    "sampling.max_prompt_tokens",
    "sampling.stop",
    *(f"sampling.{name}" for name in ("temperature", "top_k", "top_p", "min_p")),
    *(f"evaluation.{name}" for name in ("samples", "temperature", "top_k", "top_p", "min_p")),
)
"""Keys that it takes from a run also for other questions than the run's own: how and how long its
model answers."""


def config_for_eval_of_run(
    config: EvalConfig, resolved: Resolved, has_functions: bool = False, has_rows: bool = False
) -> tuple[EvalConfig, Resolved]:
    """Returns (configuration, where its values come from) with the task, rewards, environment and
    lengths of the run in `model.path` as defaults: the user's own keys have precedence over them.
    If the user names another task, only the lengths and settings of sampling are those of the run
    (`_with_answers_as`). A note that tells the user so is put first in `Resolved.notes`. Returns
    the arguments unchanged if the model is no run, or if stored responses are scored.
    `has_functions`, `has_rows`: True if reward functions, or rows, were passed from Python.
    ShoalError if the run used Python objects that are not given again."""
    path = config.model.path
    if config.responses:
        return config, resolved
    checkpoint = checkpoint_named(path, "model.path")
    if checkpoint is None:
        return config, resolved
    run, _ = checkpoint
    if not is_run(run):
        return config, resolved
    stored = read_requested(run)
    if "task.name" in resolved.origins and config.task.name != stored.task.name:
        return _with_answers_as(stored, config, resolved)

    keys = keys_of(EvalConfig)
    given_code = {keys[name].names_code for name in resolved.origins if name in keys}
    if has_functions:
        given_code.add("rewards")
    _require_from_python(path, stored, "rewards" in given_code, has_rows)
    settings = []
    has_environment = False
    for name, value in difference_from_defaults(stored).items():
        if name.partition(".")[0] not in SECTIONS:
            continue
        names_code = keys[name].names_code
        # A user who names one function of a kind replaces all of the run's of that kind.
        if names_code and names_code in given_code:
            continue
        if name == "reward.weights" and "rewards" in given_code:
            continue  # a weight for each of the run's functions
        if names_code == "environment":
            has_environment = True
            _require_objects(path, name, value)
        if isinstance(value, tuple):
            value = list(value)
        settings.append(Setting(name, value, str(run)))

    # The same task named again must not set its preset's lengths over those of the run.
    given = []
    for setting in resolved.arguments.settings:
        if setting.name not in ("task", "task.name"):
            given.append(setting)
    arguments = replace(resolved.arguments, settings=tuple(given))
    notes = []
    if _asks_for_greedy(stored, arguments):
        settings = [setting for setting in settings if setting.name != "evaluation.samples"]
        notes.append(_one_greedy_answer(path, stored))
    beneath = Layer(settings, "run")
    config, resolved = with_last_runs(*load(EvalConfig, arguments, beneath=beneath))
    data = config.task.name
    if config.task.path:
        data += f", {config.task.path}"
    parts = "reward, environment" if has_environment else "reward"
    line = f"{path}: evaluates its own task ({data}), {parts} and lengths; task=NAME for another"
    if has_rows:
        line = f"{path}: evaluates the rows that are given, with the lengths of the run"
    return config, replace(resolved, notes=(line, *notes, *resolved.notes))


def _asks_for_greedy(stored: Config, arguments: Arguments) -> bool:
    """True if the user asks for greedy answers of a run whose evaluations take several samples of a
    question, and says nothing of their number. `stored`: the run's configuration; `arguments`: the
    user's."""
    given = given_values(EvalConfig, arguments, "evaluation.samples", "evaluation.temperature")
    is_greedy = given.get("evaluation.temperature") == 0
    return is_greedy and stored.evaluation.samples > 1 and "evaluation.samples" not in given


def _one_greedy_answer(path: str, stored: Config) -> str:
    """Returns a line that says that each question gets one greedy answer, where the run in `path`
    took several samples."""
    return (
        f"{path}: evaluation.temperature=0 takes one greedy answer a question; the run took "
        f"evaluation.samples={stored.evaluation.samples}"
    )


def _with_answers_as(
    stored: Config, config: EvalConfig, resolved: Resolved
) -> tuple[EvalConfig, Resolved]:
    """Returns the configuration of an evaluation of a run on another task than its own, and where
    its values come from, with the values of OF_ANSWERS that the run had and that the user did not
    give; and a note that says how long answers may be. A published benchmark keeps the values of
    its own protocol. `stored`: the run's configuration."""
    path, task = config.model.path, config.task.name
    if task not in (*GENERATED_TASKS, "custom", ROWS):
        line = f"{path}: evaluates {task} with {_length(config)}"
        if _length(config) != _length(stored):
            line += f", of the benchmark's own protocol; the run had {_length(stored)}"
        return config, replace(resolved, notes=(line, *resolved.notes))
    given = given_values(EvalConfig, resolved.arguments, *OF_ANSWERS)
    taken = [name for name in OF_ANSWERS if name not in given]
    notes = []
    if _asks_for_greedy(stored, resolved.arguments):
        taken.remove("evaluation.samples")
        notes.append(_one_greedy_answer(path, stored))
    settings = []
    for name in taken:
        value = get_value(stored, name)
        if name == "sampling.max_prompt_tokens":  # a limit for other prompts than the run's
            value = max(value, config.sampling.max_prompt_tokens)
        settings.append(Setting(name, list(value) if name == "sampling.stop" else value, path))
    # On the command line, because the preset of the task is directly beneath it.
    arguments = replace(resolved.arguments, settings=(*settings, *resolved.arguments.settings))
    config, resolved = with_last_runs(*load(EvalConfig, arguments))
    line = f"{path}: evaluates {task} with {_length(config)}"
    if _length(config) == _length(stored):
        line += ", as the run had"
    return config, replace(resolved, notes=(line, *notes, *resolved.notes))


def _length(config: Config | EvalConfig) -> str:
    """Returns a configuration's longest completion, as the key with its value."""
    return f"sampling.max_completion_tokens={config.sampling.max_completion_tokens}"


def rows_trained_on(path: str, console: Console) -> list[Example] | None:
    """Returns the rows that a model was trained on if `path`, the model's, is a run or one of its
    checkpoints: those of the run, and of the runs that it began from. None for any other model, and
    if all these runs generated their questions. Rows that cannot be read again, or came from
    Python, are left out, with a note."""
    rows: list[Example] = []
    is_known = False
    seen: set[Path] = set()
    run = _run_at(path)
    while run is not None and run not in seen:
        seen.add(run)
        stored = read_requested(run)
        if stored.task.name == ROWS:
            console.note(
                f"it is not known whether {run} was trained on the evaluated questions: its rows "
                "came from Python, and a run does not keep them; of a run on a file of rows "
                "(task.path=FILE) they are compared"
            )
        elif stored.task.name not in GENERATED_TASKS:
            try:
                rows.extend(load_questions(stored.task, stored.reward).train)
                is_known = True
            except ShoalError as error:
                console.note(
                    f"it is not known whether {run} was trained on the evaluated questions: {error}"
                )
        run = _run_at(stored.model.path)
    return rows if is_known else None


def _run_at(path: str) -> Path | None:
    """Returns the folder of the run that a model's path names, with or without a checkpoint; None
    if it is no run, or has no checkpoint."""
    try:
        checkpoint = checkpoint_named(path, "model.path")
    except ShoalError:  # no checkpoint, or nothing at an address in a bucket
        return None
    if checkpoint is None or not is_run(checkpoint[0]):
        return None
    return checkpoint[0]


def _require_from_python(path: str, stored: Config, has_rewards: bool, has_rows: bool) -> None:
    """Raises ShoalError if the run's rows or its rewards came from Python, and none are given.
    `stored`: the run's configuration; `has_rewards`, `has_rows`: True if some are given; `path`:
    the model's, for the error."""
    if stored.task.name == ROWS and not has_rows:
        what, rows = "task", "task=rows, "
    elif not has_rewards and names_object(stored.reward.functions):
        what, rows = "reward", ""
    else:
        return
    raise ShoalError(
        f"model={path}: the {what} of this run came from Python: pass it again in Python, "
        f"shoal.evaluate(model=RUN, {rows}reward=f), or name another task, task=NAME"
    )


def _require_objects(path: str, key: str, value: str | tuple[str, ...]) -> None:
    """Raises ShoalError if tools or an environment of the run came from Python and were not given
    again. `value`: the run's value of `key`, which names them. `path`: the model's, for the
    error."""
    names = (value,) if isinstance(value, str) else value
    for name in names:
        if name.startswith(FROM_PYTHON) and name not in PYTHON_OBJECTS:
            # the argument of shoal.evaluate that stands for the key
            argument = key.partition(".")[2].replace("factory", "environment")
            raise ShoalError(
                f"model={path}: {key}={name} of this run came from Python: pass it again in "
                f"Python, shoal.evaluate(model=RUN, {argument}=...), or as file.py:NAME",
                key,
            )
