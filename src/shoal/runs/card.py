"""The card of an exported model: what it was trained from, on what and how, and what that gave."""

from __future__ import annotations

import keyword
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import metadata, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from shoal.config.key import get_value, keys_of, shown, values_of
from shoal.config.keywords import (
    FROM_PYTHON,
    HELD_OUT_ROWS,
    ROWS,
    came_from_python,
    names_object,
)
from shoal.config.merge import compose
from shoal.config.stored import difference_from_defaults
from shoal.config.train import FOLDER_KEYS, LABEL_KEYS, Config
from shoal.files import HUB_ID
from shoal.records import ShoalError
from shoal.runs.compare import setting_differences
from shoal.runs.layout import CONFIG, parts_of
from shoal.runs.reader import StoredRun, read_requested
from shoal.text import count, figure_text, shorten

_MOST_POINTS = 10
"""Steps of the reward's curve that the card has."""
_LONGEST_SETTING = 200
"""Characters of an earlier setting that the card has."""
_NOT_OF_THE_RECIPE = (*FOLDER_KEYS, *LABEL_KEYS)
"""Keys that say where a run is, which are left out of its command."""
_KEYWORDS = {
    "reward.functions": "reward",
    "environment.tools": "tools",
    "environment.factory": "environment",
    "environment.rollout": "rollout",
}
"""Key -> the keyword of `shoal.train` that takes objects for it."""


def model_card(run: StoredRun, step: int, adapter: bool) -> str:
    """Returns the card of a run's weights in Markdown, with the header that model hubs read.

    `step`: the number of steps that the weights have made; what was measured later is left out.
    `adapter`: the files are an adapter alone. ShoalError if the run's files cannot be read.
    """
    config = run.config_at(step - 1)
    is_last = step >= max(run.metrics(), default=0)
    parts = [
        _header(config, adapter),
        f"# {_name_of(config.model.path)} after {count(step, 'step')} of reinforcement learning",
        _summary(config, step, adapter),
    ]
    if is_last:
        rows = run.before_after(run.evaluations(), run.summary())
        if rows:
            parts += ["## Evaluation", _table(("", "before", "after", "change"), rows)]
            parts += _intervals(run, step)
    curve = _curve(run.metrics(), step)
    if curve:
        parts += ["## Reward while training", _table(("step", "mean reward"), curve)]
    has_accuracy = any("accuracy" in line.figures for line in run.evaluations().lines)
    requested = _requested_parts(run, step)
    newest = requested[max(requested)]
    parts += ["## Command", _changes(requested), _command(newest, has_accuracy), _versions()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(config: Config, adapter: bool) -> str:
    """Returns the YAML between two lines of dashes. Only names that may be hub ids are links."""
    header: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    if HUB_ID.fullmatch(config.model.path):
        header["base_model"] = config.model.path
    if HUB_ID.fullmatch(config.task.path):
        header["datasets"] = [config.task.path]
    header["pipeline_tag"] = "text-generation"
    header["tags"] = ["shoal", "reinforcement-learning", config.algorithm.loss]
    return f"---\n{yaml.safe_dump(header, sort_keys=False)}---"


def _name_of(path: str) -> str:
    """Returns a hub id unchanged, and of a folder's path the folder's own name."""
    return path if HUB_ID.fullmatch(path) else Path(path).name


def _summary(config: Config, step: int, adapter: bool) -> str:
    batch = config.batch
    task = config.task.path or config.task.name
    prompts = batch.prompts_per_step
    what = "An adapter (LoRA) on" if adapter else "Weights of"
    text = (
        f"{what} `{_name_of(config.model.path)}`, trained on `{task}` with the loss "
        f"`{config.algorithm.loss}` and the advantage `{config.algorithm.advantage}`, in "
        f"{count(step, 'step')} of {count(prompts, 'prompt')} x "
        f"{count(batch.group_size, 'completion')}, by {_shoal()}."
    )
    rewards = ", ".join(f"`{name}`" for name in config.reward.functions)
    if rewards:
        text += f" Rewards: {rewards}."
    return text


def _intervals(run: StoredRun, step: int) -> list[str]:
    """Returns a line for each data set whose newest accuracy has a 95% interval."""
    lines = []
    newest = {line.name: line.figures for line in run.evaluations().lines if line.step <= step}
    for name, figures in newest.items():
        interval = figures.get("accuracy_interval")
        if interval:
            low, high = (f"{100 * end:.1f}" for end in interval)
            lines.append(f"95% interval of the accuracy on `{name}`: {low} to {high}%.")
    return lines


def _curve(metrics: Mapping[int, Mapping[str, Any]], step: int) -> list[tuple[str, str]]:
    """Returns (step, mean reward) of at most _MOST_POINTS steps, the first and last among them."""
    steps = [made for made in sorted(metrics) if made <= step and "reward/mean" in metrics[made]]
    if len(steps) > _MOST_POINTS:
        last = len(steps) - 1
        places = {round(last * point / (_MOST_POINTS - 1)) for point in range(_MOST_POINTS)}
        steps = [steps[place] for place in sorted(places)]
    name = "reward/mean"
    return [(str(made), figure_text(name, metrics[made][name])) for made in steps]


def _requested_parts(run: StoredRun, step: int) -> dict[int, Config]:
    """Returns the settings that were requested for each part of the run's first `step` steps, by
    the number of steps that were made when the part began. A run that was never resumed with other
    settings is one part, which begins at 0."""
    files = {0: run.path / CONFIG} | parts_of(run.path)
    parts = {}
    for start, file in sorted(files.items()):
        if start < max(step, 1):
            parts[start] = read_requested(run.path, file.name)
    return parts


def _changes(parts: Mapping[int, Config]) -> str:
    """Returns a line for each part of a run that had other settings than its last part, with these
    settings; "" if there is none. `parts`: as `_requested_parts` returns them."""
    starts = sorted(parts)
    last = values_of(parts[starts[-1]])
    lines = []
    for start, end in pairwise(starts):
        before = values_of(parts[start])
        words = []
        for difference in setting_differences([before, last]):
            if difference.key not in _NOT_OF_THE_RECIPE:
                word = f"{difference.key}={shown(difference.values[0])}"
                words.append(f"`{shorten(word, _LONGEST_SETTING)}`")
        if words:
            steps = f"Step {end}" if end == start + 1 else f"Steps {start + 1} to {end}"
            lines.append(f"{steps} ran with {', '.join(words)}.")
    if lines:
        lines.append(f"The command has the settings of the steps from {starts[-1] + 1} on.")
    return "\n".join(lines)


def _command(requested: Config, has_accuracy: bool = False) -> str:
    """Returns a block of code that asks for such a run, with the keys that it needs: a command
    line, or a call of `shoal.train` if the run's data or functions came from Python.
    `has_accuracy`: True if answers were judged right or wrong."""
    settings = _settings_to_give(requested)
    if came_from_python(requested):
        return f"```python\n{_python_call(settings, has_accuracy)}\n```"
    return f"```bash\n{shlex.join(['shoal', 'train', *_words(settings)])}\n```"


def _settings_to_give(requested: Config) -> dict[str, Any]:
    """Returns the values, by dotted key, that ask for such a run: those that differ from the
    defaults, and those at their default that a preset which they name would change."""
    settings = difference_from_defaults(requested)
    left_out: set[str] = set(_NOT_OF_THE_RECIPE)
    if requested.batch.prompts_per_device:
        # It decides how many prompts a step has, and Shoal warns of both.
        left_out.add("batch.prompts_per_step")
    for name in left_out:
        settings.pop(name, None)
    try:
        composed, _ = compose("train", _words(settings))
    except ShoalError:  # a text that a command line cannot hold
        return settings
    complete = {}
    for name in keys_of(Config):
        value = get_value(requested, name)
        is_changed_by_preset = get_value(composed, name) != value and name not in left_out
        if name in settings or is_changed_by_preset:
            complete[name] = value
    return complete


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings as the words of a command line."""
    return [f"{name}={shown(value)}" for name, value in settings.items()]


def _python_call(settings: Mapping[str, Any], has_accuracy: bool) -> str:
    """Returns the call of `shoal.train` with these settings. Objects from Python are there by their
    names, the data as `rows` and `eval_rows`: the reader has to define them. With `has_accuracy`
    the function that judges answers is among them."""
    arguments = []
    others = []
    for key, value in settings.items():
        if key == "task.name" and value == ROWS:
            arguments.append("    task=rows,  # the data")
            if has_accuracy:
                arguments.append("    # Says which answers are right. Leave it out if your task or")
                arguments.append("    # the `acc` of your reward function does.")
                arguments.append("    correct=correct,")
        elif value == HELD_OUT_ROWS:
            arguments.append("    held_out=eval_rows,  # the data to evaluate on")
        elif key in _KEYWORDS and names_object(value):
            arguments.append(f"    {_KEYWORDS[key]}={_as_python(value)},")
        else:
            others.append(f"        {key!r}: {_as_python(value)},")
    return "\n".join(
        ["import shoal", "", "shoal.train(", *arguments, "    **{", *others, "    },", ")"]
    )


def _as_python(value: Any) -> str:
    """Returns a key's value as Python code. A name of an object is written without quotes, as an
    identifier; infinity, which Python has no word for, as a text."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_python, value))}]"
    if names_object(value):
        name = re.sub(r"\W+", "_", value.removeprefix(FROM_PYTHON)).strip("_")
        return f"{name}_" if keyword.iskeyword(name) else name
    if isinstance(value, float) and not math.isfinite(value):
        return repr(shown(value))
    return repr(value)


def _shoal() -> str:
    """Returns Shoal's name, as a link if the installed package knows the project's address."""
    for entry in metadata("shoal").get_all("Project-URL") or []:
        name, _, address = entry.partition(", ")
        if name == "Repository":
            return f"[Shoal]({address})"
    return "Shoal"


def _versions() -> str:
    names = ("shoal", "jax", "numpy")
    return "Exported with " + ", ".join(f"{name} {version(name)}" for name in names) + "."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
