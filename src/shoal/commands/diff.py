"""`shoal diff`: two run folders compared, from the settings to the first token that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.commands import DiffConfig
from shoal.report.console import Console
from shoal.runs.compare import act_on_steps, compare
from shoal.runs.layout import find_run
from shoal.runs.reader import StoredRun, short_name
from shoal.runs.summary import version_text
from shoal.text import count, figure

FLOAT32_MAX = float(np.finfo(np.float32).max)


def diff(config: DiffConfig, console: Console | None = None) -> dict[str, Any]:
    """Compares two runs and prints what differs and the likely cause."""
    with console or Console() as console:
        result = compare(*(StoredRun(find_run(name)) for name in (config.run, config.other)))
        _report(result, console)
    return result


def _report(result: dict[str, Any], console: Console) -> None:
    runs = [Path(result[name]) for name in ("run", "other")]
    names = [short_name(run, runs) for run in runs]

    def table(head: str, values: Mapping[str, Sequence[Any]]) -> None:
        console.table(
            (head, *names), [(name, *map(exact_figure, both)) for name, both in values.items()]
        )

    console.heading(
        f"{result['run']} and {result['other']}, steps {result['steps_compared'] or 'none'}"
    )
    if result["num_steps"][0] != result["num_steps"][1]:
        console.note(
            "they have {} and {}: those of both are compared".format(
                *(count(number, "step") for number in result["num_steps"])
            )
        )
    for name, finished in zip(names, result["finished"], strict=True):
        if not finished:
            console.note(f"{name} has not finished: it is running, or was stopped")
    if result["evaluations_compared"] < max(result["num_evaluations"]):
        console.note(
            "they have {} and {} evaluations (of a version, on a data set): ".format(
                *result["num_evaluations"]
            )
            + f"the {result['evaluations_compared']} of both are compared"
        )
    if not result["group_steps_compared"]:
        console.note(
            "no step has stored groups in both runs (report.groups): metrics alone are compared"
        )
    if result["config"]:
        table("key", {key: list(map(str, values)) for key, values in result["config"].items()})
    else:
        console.text("no key differs")
    if first := result["first_metrics"]:
        table(f"step {first['step']}", first["metrics"])
    if first := result["first_group_difference"]:
        where = ", ".join(
            f"{name} {first[name]}"
            for name in ("group", "completion", "token")
            if first[name] is not None
        )
        one, other = map(exact_figure, first["values"])
        console.text(
            f"step {first['step']}, {where}: {first['what']} is {one} in {names[0]}, {other} in "
            f"{names[1]}"
        )
    if first := result["first_evaluation"]:
        table(f"{version_text(first['version'])}, {first['name']}", first["figures"])
    console.text(describe_difference(result), "bold")


def exact_figure(value: Any) -> str:
    """A figure with the fewest digits that tell it from every other, of a float32 9 at most; of a
    float64 9."""
    if isinstance(value, (list, tuple)):  # an interval
        return " to ".join(map(exact_figure, value))
    if isinstance(value, float) and abs(value) < FLOAT32_MAX and float(np.float32(value)) == value:
        value = float(str(np.float32(value)))
    return figure(value, 9)


def describe_difference(result: dict[str, Any]) -> str:
    """The result in a sentence, with the likely cause."""
    if result["identical"]:
        return (
            f"identical over steps {result['steps_compared']} and "
            f"{count(result['evaluations_compared'], 'evaluation')}, clocks aside"
        )
    if result["divergence"] is None:
        return "nothing can be compared: no step is in both runs"
    if result["likely_keys"]:
        first, *others = result["likely_keys"]
        cause = f"the likeliest cause is {first}" + (f" (or {', '.join(others)})" if others else "")
    elif act_on_steps(result["config"]):
        cause = (
            "no key that differs acts there: the cause is another key, other files (data, model, "
            "rewards), "
            "another machine or other versions"
        )
    else:
        cause = (
            "no key is the cause: other files (data, model, rewards), another machine, threads or "
            "versions"
        )
    return f"{result['divergence']['sentence']}; {cause}"
