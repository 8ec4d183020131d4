"""Curves of a run: metrics by step, thinned to what a screen can show and sorted into topics; and
the steps at which metrics jump (spikes)."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.runs.lines import StepLine, rounded
from shoal.runs.metrics import metric
from shoal.runs.reader import LineReader, StoredRun

MAX_ROWS, MAX_NAMES, MAX_POINTS = 100_000, 400, 1500
"""The most steps and metrics that are kept in memory, and the most points of a curve that are sent
to the page."""

AXES = {"time": "time/step_seconds", "tokens": "tokens/sampled"}
"""Alternatives to the step as the horizontal axis of curves -> the metric whose sum is that
axis."""


class Curves:
    """The metrics of one run: one column of values for each name, one row for each step. In a very
    long run only every 2nd, 4th, ... step is kept, so that there are fewer than MAX_ROWS rows.

    `steps`: the step of each row. `columns`: metric -> its value in each row, NaN where it is
    missing. Nothing is read until `read`."""

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self._lines = LineReader(run, StepLine)
        self._forget()

    def _forget(self) -> None:
        """Drops everything that was read, because the file of metrics was replaced."""
        self.steps = array("d")
        self.columns: dict[str, array[float]] = {}
        self.stride = 1
        # Every `stride`-th step is kept, counted by `revision`.
        self.revision = 0  # how many steps were read, also those that are not kept
        # "step" and all metrics of the newest step, also if it is not kept; {} before the first
        self.last: dict[str, float] = {}
        # Sums over all steps so far, and the sums up to each of `steps`.
        self.totals = dict.fromkeys(AXES, 0.0)
        self.axes = {name: array("d") for name in AXES}

    @property
    def complete(self) -> bool:
        """True if the file of metrics has been read to its end."""
        return self._lines.complete

    def read(self, seconds: float = 0.3) -> None:
        """Adds the metrics that the run has written since the last call, reading for at most this
        many seconds (`complete` then says whether all were read). Starts over if the run was
        resumed and its file replaced."""
        restarted, lines = self._lines.read_new(seconds)
        if restarted:
            self._forget()
        for line in lines:
            self._add(line)

    def _add(self, line: StepLine) -> None:
        """Adds the metrics of one step: a row of the columns, if the step is one of those that are
        kept (`stride`), and its part of the sums over all steps. Values that are no numbers, or
        beyond 1e300, are left out, and so are new metrics after MAX_NAMES, which is a problem of
        the run."""
        step = float(line.step)
        values = {}
        for name, value in line.metrics.items():
            if isinstance(value, int | float) and abs(value) < 1e300:
                values[name] = float(value)
        self.last = {"step": step, **values}
        self.revision += 1
        for axis, name in AXES.items():
            self.totals[axis] += values.get(name, 0.0)
        if self.revision % self.stride:
            return  # not one of the steps that are kept
        for name in values.keys() - self.columns.keys():  # metrics that no step had before
            if len(self.columns) >= MAX_NAMES:
                self.run.add_problem(
                    StepLine.FILE, f"has more than {MAX_NAMES} names: the others are not shown"
                )
                break
            self.columns[name] = array("d", [math.nan]) * len(self.steps)
        self.steps.append(step)
        for axis, totals in self.axes.items():
            totals.append(self.totals[axis])
        for name, column in self.columns.items():
            column.append(values.get(name, math.nan))
        if len(self.steps) >= MAX_ROWS:
            self._halve()

    def _halve(self) -> None:
        """Drops every second row (the 2nd, 4th, ...), and doubles `stride`, so that half as many of
        the next steps are kept."""
        self.stride *= 2
        self.steps = self.steps[::2]
        self.columns = {name: column[::2] for name, column in self.columns.items()}
        self.axes = {name: totals[::2] for name, totals in self.axes.items()}

    def thinned(self, first: float = -math.inf, last: float = math.inf) -> dict[str, Any]:
        """Returns the curves between the steps `first` and `last` with at most MAX_POINTS points,
        as lists of equal length: `x`, the steps; `time` and `tokens`, seconds and sampled tokens up
        to each step (each left out if the run has no such metric); `y`, metric -> its values, None
        where it is missing.

        If there are more steps, they are divided into stretches, each with two points: its first
        and last step, with the smallest and the largest value of each metric in it, so that a spike
        of one step is never lost."""
        rows = [row for row, step in enumerate(self.steps) if first <= step <= last]
        stretches = []
        if len(rows) > MAX_POINTS:
            size = math.ceil(2 * len(rows) / MAX_POINTS)
            stretches = [rows[start : start + size] for start in range(0, len(rows), size)]
            rows = []
            for stretch in stretches:
                rows += [stretch[0], stretch[-1]]
        columns = {}
        for name, column in self.columns.items():
            values = []
            for stretch in stretches:
                values += _extremes(column, stretch)
            if not stretches:
                values = [column[row] for row in rows]
            columns[name] = [rounded(value) for value in values]
        thinned: dict[str, Any] = {"x": [self.steps[row] for row in rows]}
        for name, totals in self.axes.items():
            if self.totals[name]:
                thinned[name] = [rounded(totals[row]) for row in rows]
        thinned["y"] = columns
        return thinned

    @property
    def step_seconds(self) -> float | None:
        """Returns the seconds that a step lately took: the median of those of the last 20 steps
        that compiled nothing. None if all of them compiled, if no step has a time, or if there is
        no step yet."""
        seconds = self.columns.get("time/step_seconds", ())[-20:]
        known = []
        for value, has_compiled in zip(seconds, self.compiled[-20:], strict=False):
            if not has_compiled and not math.isnan(value):
                known.append(value)
        return statistics.median(known) if known else None

    @property
    def compiled(self) -> np.ndarray:
        """Returns bool[steps]: True for a step that compiled a program, because the count of
        compilations changed (it restarts at 0 in a new process). All False if no step has the
        count."""
        numbers = self.columns.get("compilations", np.zeros(len(self.steps)))
        return np.diff(numbers, prepend=0) != 0


def _extremes(column: Sequence[float], rows: Sequence[int]) -> tuple[float, float]:
    """Returns the smallest and the largest value among some rows of a column (`rows`: their
    indices), in the order in which they are in the column; twice the same value if it is the only
    one; (NaN, NaN) if all of these rows are NaN."""
    known = [(column[row], row) for row in rows if not math.isnan(column[row])]
    if not known:
        return math.nan, math.nan
    low, low_row = min(known)
    high, high_row = max(known)
    return (low, high) if low_row <= high_row else (high, low)


# ---- topics

TOPICS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean", "reward/std", "reward/min", "reward/max", "rewards/", "advantage/")),
    ("Evaluation", ("evaluate/",)),
    ("Groups", ("groups/",)),
    ("Length and truncation", ("completions/", "prompts/")),
    (
        "Policy",
        (
            "kl",
            "teacher/",
            "entropy",
            "context/",
            "clip/",
            "ratio/",
            "loss",
            "grad_norm",
            "lr",
            "update/",
        ),
    ),
    ("Critic", ("critic/",)),
    ("Sampler and trainer", ("sampler_gap/", "correction/", "staleness", "version")),
    (
        "Speed and memory",
        (
            "throughput/",
            "time/",
            "cost/",
            "mfu",
            "memory/",
            "tokens/",
            "sampler/",
            "compilations",
        ),
    ),
)
"""Topics with the names, or beginnings of names, of their metrics, in the order in which they are
shown."""


def by_topic(names: Sequence[str]) -> list[dict[str, Any]]:
    """Sorts names of metrics into topics, and returns a record for each that has any, with its
    `title` and its `metrics`, in the order of TOPICS. A last one, `Others`, has the names that
    belong to no topic. Within a topic metrics have the order of the topic's beginnings, and of
    `names`; each metric belongs to the first topic that fits."""
    rest = list(names)
    topics = []
    for title, beginnings in TOPICS:
        own: list[str] = []
        for beginning in beginnings:
            folder = f"{beginning.rstrip('/')}/"  # "loss" has loss itself and loss/...
            for name in rest:
                if (name == beginning or name.startswith(folder)) and name not in own:
                    own.append(name)
        rest = [name for name in rest if name not in own]
        if own:
            topics.append({"title": title, "metrics": own})
    if rest:
        topics.append({"title": "Others", "metrics": rest})
    return topics


_EVALUATED = {
    "/accuracy": ("share", "right answers, and the 95% interval of that"),
    "/mean_reward": ("reward", "mean reward of the answers, and the 95% interval of that"),
}


def about(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns metric -> {"unit", "meaning"}, two texts that the page shows next to its name;
    unknown metrics are left out."""
    meanings = {}
    for name in names:
        unit, meaning = _unit_and_meaning(name)
        if meaning:
            meanings[name] = {"unit": unit, "meaning": meaning}
    return meanings


def _unit_and_meaning(name: str) -> tuple[str, str]:
    """Returns (unit, meaning) of a metric, or of a figure of an evaluation in _EVALUATED; both ''
    if it is unknown."""
    try:
        row = metric(name)
    except ValueError:
        for end, known in _EVALUATED.items():
            if name.endswith(end):
                return known
        return "", ""
    return row.unit, row.meaning


# ---- spikes

_WATCHED = (
    "grad_norm",
    "kl",
    "entropy",
    "reward/mean",
    "completions/length_mean",
    "sampler_gap/logprob_mean",
    "clip/fraction",
    "time/step_seconds",
)

SPIKE_DEVIATIONS, SPIKE_BEFORE, MOST_SPIKES, MOST_STEPS = 10.0, 20, 12, 20_000
"""How far a jump is, in median deviations; from how many values before; the most events; and in how
many of the last rows jumps are looked for."""

SPIKE_GAP, COLLAPSE_STEPS = 3, 3
"""The most rows from one jump of an event to the next, and the fewest rows of a collapse."""


@dataclass(frozen=True)
class Move:
    """One metric that is, at one step, far from its values in the steps before."""

    row: int  # index of the step in the columns of Curves
    deviations: float  # the distance from the median before, in median deviations
    metric: str
    text: str  # the value and the median before, in words
    has_fallen: bool  # True if the value is below the median before


def spikes(curves: Curves) -> list[dict[str, Any]]:
    """Returns the events at which the metrics in _WATCHED jump (`_moves`), as records sorted by
    step; only the MOST_SPIKES strongest; [] if there are none. A record has `step` and `last_step`,
    `metrics`, `text` and `level`: "spike" or "collapse".

    Jumps of all metrics are joined to one event if at most SPIKE_GAP rows lie from one to the next,
    because one usually explains the others. The event lists its metrics in the order in which they
    jumped."""
    moves: list[Move] = []
    for name in _WATCHED:
        moves += _moves(curves, name)
    moves.sort(key=lambda move: (move.row, -move.deviations))
    events: list[list[Move]] = []
    for move in moves:
        if events and move.row - events[-1][-1].row <= SPIKE_GAP:
            events[-1].append(move)
        else:
            events.append([move])
    events.sort(key=_largest_deviation, reverse=True)
    strongest = sorted(events[:MOST_SPIKES], key=_first_row)
    return [_spike(event, curves.steps) for event in strongest]


def _largest_deviation(event: Sequence[Move]) -> float:
    return max(move.deviations for move in event)


def _first_row(event: Sequence[Move]) -> int:
    return event[0].row


def _moves(curves: Curves, name: str) -> list[Move]:
    """Returns the jumps of one metric within the last MOST_STEPS rows: values further than
    SPIKE_DEVIATIONS median deviations from the median of the SPIKE_BEFORE values before. Returns []
    if the metric is missing at some steps, or if there are too few. A step time that is long
    because of a compilation is no jump."""
    all_values = np.array(curves.columns.get(name, ())[-MOST_STEPS:])
    if len(all_values) <= SPIKE_BEFORE or np.isnan(all_values).any():
        return []
    # Row i of `before` [n, SPIKE_BEFORE] has the values before values[i].
    before = np.lib.stride_tricks.sliding_window_view(all_values[:-1], SPIKE_BEFORE)
    middle = np.median(before, axis=1)
    values = all_values[SPIKE_BEFORE:]
    deviation = np.median(np.abs(before - middle[:, None]), axis=1)
    # A metric that hardly moves must change by a part of its value, not only of its noise.
    least_deviation = np.maximum(0.03 * abs(middle), 1e-9)
    deviations = np.abs(values - middle) / np.maximum(deviation, least_deviation)
    first_row = len(curves.steps) - len(values)  # row of values[0]
    compiled = curves.compiled[-len(values) :]
    moves = []
    for index in np.flatnonzero(deviations > SPIKE_DEVIATIONS).tolist():
        if name == "time/step_seconds" and compiled[index]:
            continue
        moves.append(
            Move(
                first_row + index,
                float(deviations[index]),
                name,
                f"{name} {values[index]:.3g} after {middle[index]:.3g}",
                bool(values[index] < middle[index]),
            )
        )
    return moves


def _spike(moves: Sequence[Move], steps: Sequence[float]) -> dict[str, Any]:
    """Makes the record of one event from its jumps, which are sorted by step: `step` and
    `last_step`, `metrics` in the order in which they jumped, `text`, and `level`, which is
    `collapse` if reward or entropy fell and the event lasts at least COLLAPSE_STEPS rows, else
    `spike`. `steps`: the step of each row."""
    first = moves[0].row
    last = moves[-1].row
    text = "; ".join(move.text for move in moves if move.row == first)
    first_rows: dict[str, int] = {}  # metric -> row of its first jump, in order of the jumps
    for move in moves:
        first_rows.setdefault(move.metric, move.row)
    later = []
    for name, row in first_rows.items():
        if row > first:
            later.append(f"{name} from step {steps[row]:.0f}")
    if later:
        text += f"; then {', '.join(later)}"
    if last > first:
        text += f"; so until step {steps[last]:.0f}"
    has_fallen = False
    for move in moves:
        if move.has_fallen and move.metric in ("reward/mean", "entropy"):
            has_fallen = True
    is_collapse = has_fallen and last - first >= COLLAPSE_STEPS - 1
    return {
        "step": int(steps[first]),
        "last_step": int(steps[last]),
        "metrics": list(first_rows),
        "text": text,
        "level": "collapse" if is_collapse else "spike",
    }
