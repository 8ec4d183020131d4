"""The card of an exported model: what it was trained from, on what and how, and what that gave."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import metadata, version
from typing import Any

import yaml

from shoal.config.key import shown
from shoal.config.stored import difference_from_defaults
from shoal.config.train import Config
from shoal.files import HUB_ID
from shoal.runs.reader import StoredRun, read_requested
from shoal.text import count, figure_text

_MOST_POINTS = 10
"""Steps of the reward's curve that the card has."""
_NOT_OF_THE_RECIPE = ("run_name", "base_output_directory", "resume")
"""Keys that say where a run is, which are left out of its command."""


def model_card(run: StoredRun, step: int, adapter: bool) -> str:
    """Returns the card of a run's weights in Markdown, with the header that model hubs read.

    `step`: the number of steps that the weights have made; what was measured later is left out.
    `adapter`: the files are an adapter alone. ShoalError if the run's files cannot be read.
    """
    config = run.config
    is_last = step >= max(run.metrics(), default=0)
    parts = [
        _header(config, adapter),
        f"# {config.model.path} after {count(step, 'step')} of reinforcement learning",
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
    parts += ["## Command", f"```bash\n{_command(read_requested(run.path))}\n```", _versions()]
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


def _summary(config: Config, step: int, adapter: bool) -> str:
    batch = config.batch
    task = config.task.path or config.task.name
    prompts = batch.prompts_per_step
    what = "An adapter (LoRA) on" if adapter else "Weights of"
    text = (
        f"{what} `{config.model.path}`, trained on `{task}` with the loss "
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


def _command(requested: Config) -> str:
    """Returns the command line that asks for such a run: the keys that differ from the defaults."""
    words = ["shoal", "train"]
    for name, value in difference_from_defaults(requested).items():
        if name not in _NOT_OF_THE_RECIPE:
            words.append(f"{name}={shown(value)}")
    return shlex.join(words)


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
