"""The task of a run for `shoal eval model=RUN`: what the run was trained on is what its model is
evaluated on."""

from __future__ import annotations

from dataclasses import replace

from shoal.config.commands import EvalConfig
from shoal.config.merge import FROM_PYTHON, PYTHON_OBJECTS, Resolved, load
from shoal.config.stored import difference_from_defaults
from shoal.config.words import Entry
from shoal.files import find_input
from shoal.records import ShoalError
from shoal.runs.layout import is_run
from shoal.runs.reader import read_config
from shoal.tasks.task import ROWS
from shoal.weights.checkpoints import find_checkpoint

SECTIONS = ("task.", "reward.", "environment.", "sampling.")
"""Sections of a run's settings that decide what its model is asked, what it may call, and how that
is scored."""
REWARD = ("reward.functions", "reward.weights")
PLAYS = tuple(f"environment.{name}" for name in ("tools", "factory", "rollout", "agent"))
"""Of each of these the keys that are given replace all that the run has."""


def config_for_eval_of_run(
    config: EvalConfig, resolved: Resolved, has_functions: bool = False
) -> tuple[EvalConfig, Resolved]:
    """The configuration with the task, rewards, environment and lengths of the run in `model.path`
    beneath the user's keys, unless another task is named; unchanged for a model that is no run.
    `has_functions`: reward functions were given from Python."""
    path = config.model.path
    found = None if config.responses else find_checkpoint(find_input(path, "model.path"))
    if not (found and is_run(run := found[0])):
        return config, resolved
    stored = read_config(run)
    if "task.name" in resolved.origins and config.task.name != stored.task.name:
        return config, resolved
    given = has_functions or "reward.functions" in resolved.origins
    replaced = REWARD * given + PLAYS * any(key in resolved.origins for key in PLAYS)
    settings = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in difference_from_defaults(stored).items()
        if key.startswith(SECTIONS) and key not in replaced
    }
    own = stored.reward.functions
    if stored.task.name == ROWS or (
        not given and any(spec.startswith(FROM_PYTHON) for spec in own)
    ):
        what, rows = ("task", "task=rows, ") if stored.task.name == ROWS else ("reward", "")
        raise ShoalError(
            f"model={path}: the {what} of this run came from Python: give it again there, "
            f"shoal.evaluate("
            f"model=RUN, {rows}reward=f), or name another task, task=NAME"
        )
    plays = {key: value for key, value in settings.items() if key in PLAYS}
    for key, value in plays.items():
        for name in value if isinstance(value, list) else [value]:
            if name.startswith(FROM_PYTHON) and name not in PYTHON_OBJECTS:
                raise ShoalError(
                    f"model={path}: {key}={name} of this run came from Python: give it again "
                    f"there, "
                    f"shoal.evaluate(model=RUN, "
                    f"{key.partition('.')[2].replace('factory', 'environment')}="
                    f"...), or as file.py:NAME",
                    key,
                )
    entries = tuple(Entry(key, value, f"{run}") for key, value in settings.items())
    # The same task named again must not set its preset's lengths over those of the run.
    asked = [
        entry for entry in resolved.arguments.entries if entry.name not in ("task", "task.name")
    ]
    config, resolved = load(
        EvalConfig, replace(resolved.arguments, entries=tuple(asked), beneath=entries)
    )
    data = f"{config.task.name}, {config.task.path}" if config.task.path else config.task.name
    line = (
        f"{path}: evaluates its own task ({data}), reward{', environment' * bool(plays)} and "
        f"lengths; task=NAME "
        "for another"
    )
    return config, replace(resolved, notes=(line, *resolved.notes))
