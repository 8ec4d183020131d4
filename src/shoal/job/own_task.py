"""Finds the settings that `shoal eval model=RUN` uses by default: a run's model is evaluated on the
task that it was trained on."""

from __future__ import annotations

from dataclasses import replace

from shoal.config.commands import EvalConfig
from shoal.config.keywords import FROM_PYTHON, PYTHON_OBJECTS
from shoal.config.merge import Resolved, load
from shoal.config.stored import difference_from_defaults
from shoal.config.train import Config
from shoal.config.words import Layer, Word
from shoal.files import find_input
from shoal.records import ShoalError
from shoal.runs.layout import is_run
from shoal.runs.reader import read_requested
from shoal.tasks.task import ROWS
from shoal.weights.checkpoints import find_checkpoint

SECTIONS = ("task.", "reward.", "environment.", "sampling.")
"""Sections of a run's settings that decide which questions its model gets, which tools it may call,
and how answers are scored."""
REWARD = ("reward.functions", "reward.weights")
ENVIRONMENT = (
    "environment.tools",
    "environment.factory",
    "environment.rollout",
    "environment.agent",
)
"""If the user gives one key of REWARD, or one of ENVIRONMENT, the run's values for all keys of that
list are ignored."""


def config_for_eval_of_run(
    config: EvalConfig, resolved: Resolved, has_functions: bool = False
) -> tuple[EvalConfig, Resolved]:
    """Returns the configuration with the task, rewards, environment and lengths of the run in
    `model.path` beneath the user's own keys. Returns it unchanged if the model is no run, or if
    another task is named. `has_functions`: reward functions were passed from Python. ShoalError if
    the run used Python objects that are not given again."""
    path = config.model.path
    if config.responses:
        return config, resolved
    checkpoint = find_checkpoint(find_input(path, "model.path"))
    if checkpoint is None:
        return config, resolved
    run, _ = checkpoint
    if not is_run(run):
        return config, resolved
    stored = read_requested(run)
    if "task.name" in resolved.origins and config.task.name != stored.task.name:
        return config, resolved

    replaced: list[str] = []
    has_rewards = has_functions or "reward.functions" in resolved.origins
    if has_rewards:
        replaced.extend(REWARD)
    if any(key in resolved.origins for key in ENVIRONMENT):
        replaced.extend(ENVIRONMENT)
    _require_from_python(path, stored, has_rewards)
    settings = {}
    for key, value in difference_from_defaults(stored).items():
        if key.startswith(SECTIONS) and key not in replaced:
            settings[key] = list(value) if isinstance(value, tuple) else value
    has_environment = False
    for key in ENVIRONMENT:
        if key in settings:
            has_environment = True
            _require_objects(path, key, settings[key])

    beneath = Layer([Word(key, value, f"{run}") for key, value in settings.items()], "run")
    # The same task named again must not set its preset's lengths over those of the run.
    words = [word for word in resolved.arguments.words if word.name not in ("task", "task.name")]
    arguments = replace(resolved.arguments, words=tuple(words))
    config, resolved = load(EvalConfig, arguments, beneath=beneath)
    data = config.task.name
    if config.task.path:
        data += f", {config.task.path}"
    parts = "reward, environment" if has_environment else "reward"
    line = f"{path}: evaluates its own task ({data}), {parts} and lengths; task=NAME for another"
    return config, replace(resolved, notes=(line, *resolved.notes))


def _require_from_python(path: str, stored: Config, has_rewards: bool) -> None:
    """Raises ShoalError if the run's rows came from Python, or its rewards did and no others are
    given."""
    if stored.task.name == ROWS:
        what, rows = "task", "task=rows, "
    elif not has_rewards and any(spec.startswith(FROM_PYTHON) for spec in stored.reward.functions):
        what, rows = "reward", ""
    else:
        return
    raise ShoalError(
        f"model={path}: the {what} of this run came from Python: give it again there, "
        f"shoal.evaluate(model=RUN, {rows}reward=f), or name another task, task=NAME"
    )


def _require_objects(path: str, key: str, value: str | list[str]) -> None:
    """Raises ShoalError if tools or an environment of the run came from Python and were not given
    again."""
    for name in value if isinstance(value, list) else [value]:
        if name.startswith(FROM_PYTHON) and name not in PYTHON_OBJECTS:
            argument = key.partition(".")[2].replace("factory", "environment")
            raise ShoalError(
                f"model={path}: {key}={name} of this run came from Python: give it again there, "
                f"shoal.evaluate(model=RUN, {argument}=...), or as file.py:NAME",
                key,
            )
