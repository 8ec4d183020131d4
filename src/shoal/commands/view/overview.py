"""What the Run view says of a run beside its curves: progress, before and after, events, settings, what drives it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.commands.view.curves import NEEDS_SAME_TASK, Curves, about, by_topic
from shoal.config.keys import keys_of
from shoal.config.schema import Config
from shoal.report.figures import summary_rows
from shoal.report.lines import json_ready
from shoal.runs.bounded import one_line, rounded
from shoal.runs.stored_run import MAX_LOG_BYTES, Evaluations, StoredRun

MAX_EVENTS, IDLE_SECONDS = 500, 900
SAME_TASK = ("task.name", "task.path", "task.split", "task.columns", "reward.functions", "reward.weights")
"""Keys that must be equal for rewards, accuracies and lengths of two runs to be comparable."""


def overview(run: StoredRun, curves: Curves, evaluations: Evaluations, weights: Mapping[str, float],
             settings: Mapping[str, Any]) -> dict[str, Any]:
    """All of it but the progress as one record."""
    names = [*curves.columns, *evaluations.curves()]
    topics = by_topic(names)
    return {
        "name": run.name, "path": str(run.path),
        "table": before_after(run, evaluations), "topics": topics, "about": about(names),
        "events": sorted(events(run, curves, evaluations), key=lambda event: event["step"])[:MAX_EVENTS],
        "settings": settings_rows(settings),
        "drivers": drivers(curves, weights), "problems": sorted(run.problems.values()),
        "evaluations": evaluations.curves(), "revision": curves.revision, "checkpoints": run.checkpoints(),
    }


def progress(run: StoredRun, curves: Curves, settings: Mapping[str, Any], is_finished: bool) -> dict[str, Any]:
    """How far the run is; `state` is finished, running or stopped (nothing written for a quarter of an hour)."""
    steps, done = settings.get("steps"), int(curves.last.get("step", 0))
    spent, lately = curves.seconds()
    path = run.file("metrics.jsonl")
    idle = time.time() - path.stat().st_mtime if path else math.inf
    patience = max(IDLE_SECONDS, 10 * (lately or 0))
    state = "finished" if is_finished else "running" if idle < patience else "stopped"
    total = steps if isinstance(steps, int) else None
    left = (total - done) * lately if state == "running" and total and lately and done < total else None
    return {"state": state, "step": done, "steps": total, "seconds": rounded(spent), "seconds_left": left,
            "step_seconds": lately, "reading": not curves.complete}


def before_after(run: StoredRun, evaluations: Evaluations) -> list[list[str]]:
    """The rows of the table that a run prints at its end; of an unfinished one, up to its newest evaluation."""
    before, after = evaluations.before_after(run.summary())
    try:
        return [list(row) for row in summary_rows(before, after)] if before else []
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        run.problem("evaluations", f"cannot be shown as a table ({error})")
        return []


# ---- what happened, and when

_STEP = re.compile(r"step (\d{1,9})/\d")


def events(run: StoredRun, curves: Curves, evaluations: Evaluations) -> Iterator[dict[str, Any]]:
    """Warnings and failures of log.txt, at the step that was printed before them; spikes; resumptions."""
    step = 0
    for line in run.text("log.txt", MAX_LOG_BYTES).splitlines():
        if found := _STEP.match(line):
            step = int(found[1])
        level = next((level for start, level in (("warning:", "warning"), ("WRONG", "error"), ("error:", "error"),
                                                 ("resumed", "note")) if line.startswith(start)), "")
        if level:
            yield {"step": step, "level": level, "text": one_line(line.removeprefix("warning: "))}
    yield from spikes(curves)
    for path in sorted(run.root.glob("config_[1-9]*.yaml"))[:50]:
        if (at := path.stem.removeprefix("config_")).isdecimal() and len(at) < 10:
            yield {"step": int(at), "level": "note", "text": f"resumed with other settings ({path.name})"}
    for step in sorted({row["step"] for row in evaluations.rows}):
        yield {"step": step, "level": "evaluation", "text": f"evaluation of version {step}"}


_WATCHED = ("grad_norm", "kl", "entropy", "reward/mean", "completions/length_mean", "sampler_gap/logprob_mean",
            "clip/fraction", "time/step_seconds")
SPIKE_DEVIATIONS, SPIKE_AROUND, MOST_SPIKES, MOST_STEPS = 10.0, 15, 12, 20_000


def spikes(curves: Curves) -> list[dict[str, Any]]:
    """Steps at which metrics leave what they were around them by far: by 10 median deviations. Metrics that do so at
    the same step are named together, since one explains another."""
    by_step: dict[int, list[tuple[float, str, str]]] = {}  # how far, the metric, in words
    for name in _WATCHED:
        values = np.array(curves.columns.get(name, ())[-MOST_STEPS:])
        if np.isfinite(values).sum() < SPIKE_AROUND or np.isnan(values).any():
            continue
        around = np.lib.stride_tricks.sliding_window_view(np.pad(values, SPIKE_AROUND, mode="reflect"),
                                                          2 * SPIKE_AROUND + 1)
        middle = np.median(around, axis=1)
        usual = np.maximum(np.median(np.abs(around - middle[:, None]), axis=1), np.maximum(0.03 * abs(middle), 1e-9))
        far = np.abs(values - middle) / usual
        first = 5 if name == "time/step_seconds" else 0  # the first steps compile
        for place in np.flatnonzero(far > SPIKE_DEVIATIONS):
            if place >= first:
                step = int(curves.steps[len(curves.steps) - len(values) + place])
                by_step.setdefault(step, []).append(
                    (far[place], name, f"{name} {values[place]:.3g} where {middle[place]:.3g} is usual"))
    strongest = sorted(by_step, key=lambda step: -max(by_step[step])[0])[:MOST_SPIKES]
    return [{"step": step, "level": "spike", "metrics": [name for _, name, _ in by_step[step]],
             "text": "; ".join(text for _, _, text in sorted(by_step[step], reverse=True))}
            for step in sorted(strongest)]


# ---- settings, and what moves the reward


def settings_rows(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every key with its value and default; `differs` where they are not the same."""
    known, rows = keys_of(Config), []
    for key, value in settings.items():
        value = json_ready(value)
        if key not in known:
            rows.append({"key": key, "value": value, "default": None, "differs": True,
                         "help": "unknown to this version"})
            continue
        default = json_ready(known[key].default)
        rows.append({"key": key, "value": value, "default": default, "help": known[key].help,
                     "differs": value != default and not (value is None and default in ("", []))})
    return rows


def drivers(curves: Curves, weights: Mapping[str, float]) -> list[dict[str, Any]]:
    """For each reward function its mean over the first and the last tenth of the steps (5 at least), and what the
    change adds to the reward by the function's weight, as groups have it."""
    size = len(curves.steps)
    names = [name for name in curves.columns if name.startswith("rewards/")
             and not name.startswith(("rewards/failed", "rewards/logged"))]
    if size < 4 or not names:
        return []
    part = max(1, min(size // 2, max(5, size // 10)))
    rows = []
    for name in ("reward/mean", *names):
        column = curves.columns.get(name)
        if column is None:
            continue
        first, last = (_mean(column[:part]), _mean(column[-part:]))
        function = name.removeprefix("rewards/")
        weight = 1.0 if name == "reward/mean" else weights.get(function)
        change = None if first is None or last is None else last - first
        rows.append({"function": function if name != "reward/mean" else "reward", "first": first, "last": last,
                     "weight": weight, "over": part,
                     "adds": None if change is None or weight is None else rounded(weight * change)})
    return rows[:1] + sorted(rows[1:], key=lambda row: -abs(row["adds"] or 0))


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return rounded(sum(known) / len(known)) if known else None


# ---- several runs


def comparison(records: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Keys in which runs differ, and what of them cannot be compared. `records`: name and settings of each run."""
    keys = list(dict.fromkeys(key for _, settings in records for key in settings))
    rows = [{"key": key, "values": [json_ready(settings.get(key)) for _, settings in records]} for key in keys]
    differing = [row for row in rows if any(value != row["values"][0] for value in row["values"])]
    other_task = [row["key"] for row in differing if row["key"] in SAME_TASK]
    text = ""
    if other_task:
        text = (f"these runs differ in {', '.join(other_task)}: their rewards, accuracies, groups and lengths are of "
                "different questions or scores and cannot be compared; the other curves can")
    return {"differing": differing, "warning": text, "not_comparable": list(NEEDS_SAME_TASK) if other_task else []}
