"""`shoal diff`: compares two run folders, from the settings to the first token that differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.commands import DiffConfig
from shoal.report.console import Console
from shoal.runs.compare import Comparison, SettingDifference, act_on_steps, compare
from shoal.runs.layout import find_run
from shoal.runs.lines import json_ready
from shoal.runs.notes import RunNotes
from shoal.runs.reader import StoredRun, short_name
from shoal.runs.summary import version_text
from shoal.text import count, figure

FLOAT32_MAX = float(np.finfo(np.float32).max)


def diff(config: DiffConfig, console: Console | None = None) -> dict[str, Any]:
    """Compares two runs, prints what differs and the likely cause, and returns the comparison in
    JSON's types: the fields of `Comparison` under their names, but the settings under `config` (key
    -> both values), and the likeliest `stage` in place of the divergence. Runs that differ are no
    error. ShoalError if a run is not found, or a file of it is damaged. `console`: where to print;
    it can be used afterwards. None: stdout."""
    with console or Console() as console:
        run = StoredRun(find_run(config.run))
        other = StoredRun(find_run(config.other))
        comparison = compare(run, other)
        _report(comparison, [run.notes(), other.notes()], console)
    return comparison.to_dict()


def _report(comparison: Comparison, notes: Sequence[RunNotes], console: Console) -> None:
    """Prints a comparison: the `notes` of both runs, what was compared and what could not be, the
    settings that differ, the first metrics, group and evaluation that differ (each only if one
    does), and last the sentence on the likely cause."""
    runs = [Path(comparison.run), Path(comparison.other)]
    names = [short_name(run, runs) for run in runs]

    def table(head: str, values: Mapping[str, Sequence[Any]]) -> None:
        """Prints a table of name -> (value of the run, value of the other)."""
        rows = []
        for name, (of_run, of_other) in json_ready(values).items():
            rows.append((name, exact_figure(of_run), exact_figure(of_other)))
        console.table((head, names[0], names[1]), rows)

    steps = comparison.steps_compared or "none"
    console.heading(f"{comparison.run} and {comparison.other}, steps {steps}")
    for name, of_run in zip(names, notes, strict=True):
        if of_run.text:
            console.note(f"{name}: {of_run.text}")
    steps_of_run, steps_of_other = comparison.num_steps
    if steps_of_run != steps_of_other:
        console.note(
            f"they have {count(steps_of_run, 'step')} and {count(steps_of_other, 'step')}: those "
            "of both are compared"
        )
    for name, is_finished in zip(names, comparison.finished, strict=True):
        if not is_finished:
            console.note(f"{name} has not finished: it is running, or was stopped")
    evaluations_of_run, evaluations_of_other = comparison.num_evaluations
    if comparison.evaluations_compared < max(evaluations_of_run, evaluations_of_other):
        console.note(
            f"they have {evaluations_of_run} and {evaluations_of_other} evaluations, of which "
            f"{comparison.evaluations_compared} of the same step and data set are compared"
        )
    if not comparison.group_steps_compared:
        console.note(
            "no step has stored groups in both runs (report.groups): only metrics are compared"
        )
    if comparison.settings:
        values = {}
        for setting in comparison.settings:
            values[setting.key] = [str(value) for value in setting.values]
        table("key", values)
    else:
        console.text("no key differs")
    if comparison.first_metrics:
        step, metrics = comparison.first_metrics
        table(f"step {step}", metrics)
    if comparison.first_group_difference:
        difference = comparison.first_group_difference
        places = {
            "group": difference.group,
            "completion": difference.completion,
            "token": difference.token,
        }
        where = ", ".join(f"{name} {index}" for name, index in places.items() if index is not None)
        of_run, of_other = json_ready(difference.values)
        console.text(
            f"step {difference.step}, {where}: {difference.what} is {exact_figure(of_run)} in "
            f"{names[0]}, {exact_figure(of_other)} in {names[1]}"
        )
    if comparison.first_evaluation:
        version, name, figures = comparison.first_evaluation
        table(f"{version_text(version)}, {name}", figures)
    console.text(describe_difference(comparison), "bold")


def exact_figure(value: Any) -> str:
    """Returns a figure as text with so many digits that two figures that differ look different: the
    fewest that tell a float32 from all others, at most 9, and 9 for a float64 that is no float32
    (two that differ after these look the same). An interval (a list or tuple) becomes "low to
    high"; a text stays as it is; None becomes `-`."""
    if isinstance(value, (list, tuple)):  # an interval
        return " to ".join(map(exact_figure, value))
    if isinstance(value, float) and abs(value) < FLOAT32_MAX and float(np.float32(value)) == value:
        value = float(str(np.float32(value)))  # numpy writes the fewest digits: 0.1
    return figure(value, 9)


def describe_difference(comparison: Comparison) -> str:
    """Returns the result of a comparison in a sentence: that the runs are identical, that nothing
    can be compared because no step is in both, or what differs first and its likely cause."""
    if comparison.identical:
        evaluations = count(comparison.evaluations_compared, "evaluation")
        return f"identical over steps {comparison.steps_compared} and {evaluations}, clocks aside"
    if comparison.divergence is None:
        return "nothing can be compared: no step is in both runs"
    cause = likely_cause(comparison.likely_keys, comparison.settings)
    return f"{comparison.divergence.sentence}; {cause}"


def likely_cause(likely_keys: Sequence[str], differing: Iterable[SettingDifference]) -> str:
    """Returns the half of a sentence that names the likely cause of a difference: the
    `likely_keys`, the likeliest first; or, if there are none, what else may differ. `differing`:
    all settings that differ; only if one of them acts on steps may the cause be another key."""
    if likely_keys:
        first, *others = likely_keys
        text = f"the likeliest cause is {first}"
        if others:
            text += f" (or {', '.join(others)})"
        return text
    if act_on_steps(differing):
        return (
            "no key that differs acts there: the cause is another key, other files (data, model, "
            "rewards), another machine or other versions"
        )
    return (
        "no key is the cause: other files (data, model, rewards), another machine, threads or "
        "versions"
    )
