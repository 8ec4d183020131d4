"""A run's metrics as curves: read as they are written, thinned to what a screen can show, grouped by topic."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.report.metrics import metric
from shoal.runs.bounded import rounded
from shoal.runs.growing_lines import GrowingLines
from shoal.runs.stored_run import StoredRun

MAX_ROWS, MAX_NAMES, MAX_POINTS = 100_000, 400, 1500

TOPICS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean", "reward/std", "reward/min", "reward/max", "rewards/", "advantage/")),
    ("Evaluation", ("evaluate/",)),
    ("Groups", ("groups/",)),
    ("Length and truncation", ("completions/", "prompts/")),
    ("Policy", ("kl", "teacher/kl", "entropy", "clip/", "ratio/", "loss", "grad_norm", "lr", "update/")),
    ("Sampler and trainer", ("sampler_gap/", "correction/", "staleness", "version")),
    ("Speed and memory", ("throughput/", "time/", "mfu", "memory/", "tokens/", "sampler/", "compilations")),
)
"""Topic -> metrics, or their beginnings, in the order in which they are shown."""

NEEDS_SAME_TASK = ("Reward", "Evaluation", "Groups", "Length and truncation")
"""Topics whose figures say nothing of two runs with different tasks."""


class Curves:
    """The metrics of one run, a column a name. Of a very long run every 2nd, 4th, ... step is kept."""

    def __init__(self, run: StoredRun) -> None:
        self._run, self._lines = run, GrowingLines(run, "metrics.jsonl")
        self._forget()

    def _forget(self) -> None:
        self.steps, self.columns = array("d"), {}
        self.stride, self._seen, self.revision = 1, 0, 0
        self.last: dict[str, float] = {}  # the newest row, whole

    @property
    def complete(self) -> bool:
        return self._lines.complete

    def read(self, seconds: float = 0.3) -> None:
        """Reads what is new, for at most so long."""
        restarted, rows = self._lines.new(seconds)
        if restarted:
            self._forget()
        for row in rows:
            self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        step = row.get("step")
        if not isinstance(step, int | float) or isinstance(step, bool) or not abs(step) <= 1e15:
            self._run.problem("metrics.jsonl", "has a line without a step; it is passed over")
            return
        values = {name: float(value) for name, value in row.items()
                  if name != "step" and isinstance(value, int | float) and abs(value) < 1e300}
        self.last, self.revision, self._seen = {"step": float(step), **values}, self.revision + 1, self._seen + 1
        if self._seen % self.stride:
            return
        for name in values.keys() - self.columns.keys():
            if len(self.columns) >= MAX_NAMES:
                self._run.problem("metrics.jsonl", f"has more than {MAX_NAMES} names: the others are not shown")
                break
            self.columns[name] = array("d", [math.nan]) * len(self.steps)
        self.steps.append(float(step))
        for name, column in self.columns.items():
            column.append(values.get(name, math.nan))
        if len(self.steps) >= MAX_ROWS:
            self.steps, self.stride = self.steps[::2], self.stride * 2
            self.columns = {name: column[::2] for name, column in self.columns.items()}

    def thinned(self, first: float = -math.inf, last: float = math.inf) -> dict[str, Any]:
        """Steps and columns within a range, at most MAX_POINTS of them. Of each stretch its smallest and its largest
        value are kept, so that a spike of one step is never lost."""
        places = [place for place, step in enumerate(self.steps) if first <= step <= last]
        steps = [self.steps[place] for place in places]
        if len(places) <= MAX_POINTS:
            return {"x": steps, "y": {name: [rounded(column[place]) for place in places]
                                      for name, column in self.columns.items()}}
        size = math.ceil(2 * len(places) / MAX_POINTS)
        parts = [places[start:start + size] for start in range(0, len(places), size)]
        kept = [self.steps[place] for part in parts for place in (part[0], part[-1])]
        return {"x": kept, "y": {name: [rounded(value) for part in parts for value in _extremes(column, part)]
                                 for name, column in self.columns.items()}}

    def seconds(self) -> tuple[float, float | None]:
        """Seconds of all steps so far, and of one lately (the median of 20)."""
        known = [value for value in self.columns.get("time/step_seconds", ()) if not math.isnan(value)]
        return self.stride * sum(known), statistics.median(known[-20:]) if known else None


def _extremes(column: Sequence[float], places: Sequence[int]) -> tuple[float, float]:
    known = [(column[place], place) for place in places if not math.isnan(column[place])]
    if not known:
        return math.nan, math.nan
    low, high = min(known), max(known)
    return (low[0], high[0]) if low[1] <= high[1] else (high[0], low[0])


def by_topic(names: Sequence[str]) -> list[dict[str, Any]]:
    """Topics with the metrics of each, in the table's order; names that no topic has come last."""
    rest, found = list(names), []
    for title, beginnings in TOPICS:
        own = [name for start in beginnings for name in rest if name == start or (
            start.endswith("/") and name.startswith(start)) or name.startswith(f"{start}/")]
        own = list(dict.fromkeys(own))
        rest = [name for name in rest if name not in own]
        if own:
            found.append({"title": title, "metrics": own})
    return found + ([{"title": "Others", "metrics": rest}] if rest else [])


def about(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Unit and meaning of each metric that the table has."""
    found = {}
    for name in names:
        try:
            row = metric(name)
        except ValueError:
            continue
        found[name] = {"unit": row.unit, "meaning": row.meaning}
    return found
