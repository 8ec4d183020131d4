"""The Run view: a run's curves, thinned to what a screen can show; how far it is; before and after;
what happened when; its settings; and what of several runs can be compared."""

from __future__ import annotations

import bisect
import math
import shlex
import statistics
import time
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.commands.view.verdict import accuracy_change, drivers, verdict
from shoal.config.key import keys_of
from shoal.config.train import FOLDER_KEYS, Config
from shoal.runs.compare import automatic_keys, incomparable, settings_difference
from shoal.runs.layout import parts_of
from shoal.runs.lines import EventLine, StepLine, bounded_line, json_ready, rounded
from shoal.runs.metrics import metric
from shoal.runs.reader import Evaluations, LineReader, StoredRun
from shoal.runs.summary import version_text

# ---- curves

MAX_ROWS, MAX_NAMES, MAX_POINTS = 100_000, 400, 1500


TOPICS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean", "reward/std", "reward/min", "reward/max", "rewards/", "advantage/")),
    ("Evaluation", ("evaluate/",)),
    ("Groups", ("groups/",)),
    ("Length and truncation", ("completions/", "prompts/")),
    (
        "Policy",
        ("kl", "teacher/kl", "entropy", "clip/", "ratio/", "loss", "grad_norm", "lr", "update/"),
    ),
    ("Sampler and trainer", ("sampler_gap/", "correction/", "staleness", "version")),
    (
        "Speed and memory",
        ("throughput/", "time/", "mfu", "memory/", "tokens/", "sampler/", "compilations"),
    ),
)
"""Topic -> metrics, or their beginnings, in the order in which they are shown."""


class Curves:
    """The metrics of one run, a column a name. Of a very long run every 2nd, 4th, ... step is
    kept."""

    def __init__(self, run: StoredRun) -> None:
        self.run, self._lines = run, LineReader(run, StepLine)
        self._forget()

    def _forget(self) -> None:
        self.steps, self.columns = array("d"), {}
        self.stride, self._seen, self.revision = 1, 0, 0
        self.last: dict[str, float] = {}  # the newest row, whole
        self.totals = {"time": 0.0, "tokens": 0.0}  # seconds of all steps so far, tokens sampled
        self.axes = {name: array("d") for name in self.totals}  # the totals at each of `steps`

    @property
    def complete(self) -> bool:
        return self._lines.complete

    def read(self, seconds: float = 0.3) -> None:
        """Reads what is new, for at most so long."""
        restarted, lines = self._lines.new(seconds)
        if restarted:
            self._forget()
        for line in lines:
            self._add(line)

    def _add(self, line: StepLine) -> None:
        step = float(line.step)
        values = {}
        for name, value in line.metrics.items():
            if isinstance(value, int | float) and abs(value) < 1e300:
                values[name] = float(value)
        self.last = {"step": step, **values}
        self.revision += 1
        self._seen += 1
        for total, name in (("time", "time/step_seconds"), ("tokens", "tokens/sampled")):
            self.totals[total] += values.get(name, 0.0)
        if self._seen % self.stride:
            return
        for name in values.keys() - self.columns.keys():
            if len(self.columns) >= MAX_NAMES:
                self.run.problem(
                    "metrics.jsonl", f"has more than {MAX_NAMES} names: the others are not shown"
                )
                break
            self.columns[name] = array("d", [math.nan]) * len(self.steps)
        self.steps.append(step)
        for total, axis in self.axes.items():
            axis.append(self.totals[total])
        for name, column in self.columns.items():
            column.append(values.get(name, math.nan))
        if len(self.steps) >= MAX_ROWS:
            self.steps, self.stride = self.steps[::2], self.stride * 2
            self.columns, self.axes = (
                {name: column[::2] for name, column in held.items()}
                for held in (self.columns, self.axes)
            )

    def thinned(self, first: float = -math.inf, last: float = math.inf) -> dict[str, Any]:
        """Steps `x`, `time` in seconds and `tokens` up to each, and columns `y` within a range, at
        most MAX_POINTS of them. Of each stretch its smallest and its largest value are kept, so
        that a spike of one step is never lost."""
        kept = places = [place for place, step in enumerate(self.steps) if first <= step <= last]
        columns = {
            name: [column[place] for place in places] for name, column in self.columns.items()
        }
        if len(places) > MAX_POINTS:
            size = math.ceil(2 * len(places) / MAX_POINTS)
            parts = [places[start : start + size] for start in range(0, len(places), size)]
            kept = [place for part in parts for place in (part[0], part[-1])]
            columns = {
                name: [value for part in parts for value in _extremes(column, part)]
                for name, column in self.columns.items()
            }
        axes = {
            name: [rounded(axis[place]) for place in kept]
            for name, axis in self.axes.items()
            if self.totals[name]
        }
        return {
            "x": [self.steps[place] for place in kept],
            **axes,
            "y": {name: list(map(rounded, column)) for name, column in columns.items()},
        }

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step lately: the median of 20 that compiled nothing; None where all of them
        did."""
        known = [
            value
            for value, compiled in zip(
                self.columns.get("time/step_seconds", ())[-20:], self.compiled[-20:], strict=False
            )
            if not (compiled or math.isnan(value))
        ]
        return statistics.median(known) if known else None

    @property
    def compiled(self) -> np.ndarray:
        """True for each step that compiled a program: their number has risen, or began anew with a
        process."""
        numbers = self.columns.get("compilations", np.zeros(len(self.steps)))
        return np.diff(numbers, prepend=0) != 0


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
        own = list(
            dict.fromkeys(
                name
                for start in beginnings
                for name in rest
                if name == start or name.startswith(f"{start.rstrip('/')}/")
            )
        )
        rest = [name for name in rest if name not in own]
        if own:
            found.append({"title": title, "metrics": own})
    return found + ([{"title": "Others", "metrics": rest}] if rest else [])


_EVALUATED = {
    "/accuracy": ("share", "questions answered right, and the 95% interval of that"),
    "/mean_reward": ("reward", "mean reward of the answers, and the 95% interval of that"),
}


def about(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Unit and meaning of each metric that the table has."""
    found = {}
    for name in names:
        try:
            row = metric(name)
            found[name] = {"unit": row.unit, "meaning": row.meaning}
        except ValueError:
            unit, meaning = next(
                (known for end, known in _EVALUATED.items() if name.endswith(end)), ("", "")
            )
            if meaning:
                found[name] = {"unit": unit, "meaning": meaning}
    return found


# ---- the run

MAX_EVENTS, IDLE_SECONDS = 500, 900


def overview(
    run: StoredRun,
    curves: Curves,
    evaluations: Evaluations,
    events: Sequence[EventLine],
    weights: Mapping[str, float],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """All of it but the progress as one record. Rewards are compared since the last reward function
    was given."""
    evaluated, (main, curve) = evaluations.curves(), evaluations.main_curve(run.reward_since)
    names = [*curves.columns, *evaluated]
    shown_events = sorted(
        happened(run, events, curves, evaluations), key=lambda event: event["step"]
    )[:MAX_EVENTS]
    said, functions = judged(curves, curve, run.reward_since, weights, shown_events, settings)
    return {
        "name": run.name,
        "path": str(run.path),
        "main": ["reward/mean", *([main] if main else [])],
        "verdict": said,
        "table": before_after(run, evaluations),
        "topics": by_topic(names),
        "about": about(names),
        "events": shown_events,
        "settings": settings_rows(settings, run.decided_keys),
        "drivers": functions,
        "problems": sorted(run.problems.values()),
        "evaluations": evaluated,
        "checkpoints": run.checkpoints(),
    }


def judged(
    curves: Curves,
    curve: Mapping[str, Sequence[Any]],
    since: int,
    weights: Mapping[str, float],
    shown_events: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> tuple[dict[str, str], list[Any]]:
    """The verdict, and what moves the reward; `since`: the version after which rewards are
    compared."""
    columns = {
        name: column[bisect.bisect(curves.steps, since) :]
        for name, column in curves.columns.items()
    }
    functions, total = drivers(columns, weights), settings.get("steps")
    return verdict(
        curve,
        columns,
        functions,
        shown_events,
        int(curves.last.get("step", 0)),
        total if isinstance(total, int) else None,
    ), functions


MAX_SPARK = 60


def home_row(
    run: StoredRun, curves: Curves, evaluations: Evaluations, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A run in the list of runs: when it began, a small curve (of the evaluations, else of the
    reward), the first and the newest evaluation with their intervals, whether they differ, and the
    verdict as far as curves alone say it."""
    since = run.reward_since
    name, curve = evaluations.main_curve(since)
    points, change = list(zip(*curve.values(), strict=True)), accuracy_change(curve)
    rewards = [value for value in curves.columns.get("reward/mean", ()) if not math.isnan(value)]
    stretch = math.ceil(len(rewards) / MAX_SPARK) or 1
    means = [
        sum(part) / len(part)
        for part in (rewards[at : at + stretch] for at in range(0, len(rewards), stretch))
    ]
    return {
        "began": run.began,
        "figure": name,
        "verdict": judged(curves, curve, since, {}, (), settings)[0],
        "curve": curve
        if len(points) > 2
        else {"x": [*range(len(means))], "y": list(map(rounded, means))},
        "of": name.rpartition("/")[2] if len(points) > 2 else "reward",
        "change": change and change.sign,
        "ends": [dict(zip(curve, point, strict=True)) for point in points[:1] + points[1:][-1:]],
    }


def failure(events: Sequence[EventLine]) -> str:
    """The error that ended a run, in one line; empty where it ended otherwise, or goes on."""
    for event in reversed(events):
        if event.level == "error":
            return bounded_line(event.text)
        if event.level != "warning":  # a file of metrics that cannot be closed warns after it
            break
    return ""


def progress(
    run: StoredRun, curves: Curves, settings: Mapping[str, Any], is_finished: bool, cause: str
) -> dict[str, Any]:
    """How far the run is. `state` is finished, failed (by the error `cause`), running, killed (its
    process is gone, and what it made after its last checkpoint with it), or stopped: after a
    checkpoint, or nothing was written for a quarter of an hour."""
    steps, done = settings.get("steps"), int(curves.last.get("step", 0))
    lately, saved = curves.step_seconds, max(run.checkpoints(), default=0)
    path = run.file("metrics.jsonl")
    idle = time.time() - path.stat().st_mtime if path else math.inf
    is_idle = idle > max(IDLE_SECONDS, 10 * (lately or 0))
    state = (
        "finished"
        if is_finished
        else "failed"
        if cause
        else "killed"
        if run.process_has_ended and done > saved
        else "stopped"
        if is_idle or run.process_has_ended
        else "running"
    )
    total = steps if isinstance(steps, int) else None
    left = (
        (total - done) * lately
        if state == "running" and total and lately and done < total
        else None
    )
    return {
        "state": state,
        "step": done,
        "steps": total,
        "seconds": rounded(curves.totals["time"]),
        "seconds_left": left,
        "step_seconds": lately,
        "saved": saved,
        "cause": cause if state == "failed" else "",
        "resume": ""
        if state in ("finished", "running")
        else f"shoal train resume={shlex.quote(str(run.path))}",
    }


def before_after(run: StoredRun, evaluations: Evaluations) -> list[list[Any]]:
    """The rows of `StoredRun.before_after`, each with the sign of its change, 0 where no interval
    excludes that it is noise; none of evaluations that are damaged."""
    curves = evaluations.curves()
    try:
        rows = run.before_after(evaluations, run.summary())
        names = [row[0].replace("mean reward", "mean_reward").split() for row in rows]
        changes = [
            accuracy_change(curves.get(f"evaluate/{data_set}/{name}", {}))
            for data_set, name, *_ in names
        ]
        return [
            [*row, change.sign if change else 0] for row, change in zip(rows, changes, strict=True)
        ]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        run.problem("evaluations", f"cannot be shown as a table ({error})")
        return []


# ---- what happened, and when

_SHOWN_LEVELS = {"note": "note", "warning": "warning", "wrong": "error", "error": "error"}
"""Level of an event -> how the page shows it; phases are not shown, but for evaluations."""


def happened(
    run: StoredRun, events: Sequence[EventLine], curves: Curves, evaluations: Evaluations
) -> Iterator[dict[str, Any]]:
    """Warnings, errors and resumptions, each at its step; spikes; evaluations."""
    for event in events:
        if event.level in _SHOWN_LEVELS:
            level = _SHOWN_LEVELS[event.level]
            yield {"step": event.step, "level": level, "text": bounded_line(event.text)}
    yield from spikes(curves)
    for version in sorted(filter(None, parts_of(run.root)))[:50]:
        yield {
            "step": version,
            "level": "note",
            "text": f"resumed with other settings (config_{version}.yaml)",
        }
    for step in sorted({line.step for line in evaluations.lines}):
        yield {"step": step, "level": "evaluation", "text": f"evaluated {version_text(step)}"}


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


SPIKE_GAP, COLLAPSE_STEPS = 3, 3


def spikes(curves: Curves) -> list[dict[str, Any]]:
    """Steps at which metrics leave what they were in the SPIKE_BEFORE steps before by far: by 10
    median deviations. Metrics that do so at the same step are named together, since one explains
    another; steps with fewer than SPIKE_GAP between them are one event, of the metrics in the order
    in which they moved."""
    moves: list[
        tuple[int, float, str, str, bool]
    ] = []  # row of the curves, how far, metric, in words, whether it fell
    compiled = curves.compiled
    for name in _WATCHED:
        values = np.array(curves.columns.get(name, ())[-MOST_STEPS:])
        if len(values) <= SPIKE_BEFORE or np.isnan(values).any():
            continue
        before = np.lib.stride_tricks.sliding_window_view(values[:-1], SPIKE_BEFORE)
        middle, values = np.median(before, axis=1), values[SPIKE_BEFORE:]
        usual = np.maximum(
            np.median(np.abs(before - middle[:, None]), axis=1),
            np.maximum(0.03 * abs(middle), 1e-9),
        )
        far = np.abs(values - middle) / usual
        moves += [
            (
                len(curves.steps) - len(values) + int(place),
                float(far[place]),
                name,
                f"{name} {values[place]:.3g} after {middle[place]:.3g}",
                bool(values[place] < middle[place]),
            )
            for place in np.flatnonzero(far > SPIKE_DEVIATIONS)
            if not (name == "time/step_seconds" and compiled[int(place) - len(far)])
        ]
    events: list[list[tuple[int, float, str, str, bool]]] = []
    for move in sorted(moves, key=lambda move: (move[0], -move[1])):
        if events and move[0] - events[-1][-1][0] <= SPIKE_GAP:
            events[-1].append(move)
        else:
            events.append([move])
    strongest = sorted(events, key=lambda event: -max(far for _, far, *_ in event))[:MOST_SPIKES]
    return [_spike(event, curves.steps) for event in sorted(strongest)]


def _spike(
    moves: Sequence[tuple[int, float, str, str, bool]], steps: Sequence[float]
) -> dict[str, Any]:
    first, last = moves[0][0], moves[-1][0]
    text = "; ".join(text for row, _, _, text, _ in moves if row == first)
    order: dict[str, int] = {}
    for row, _, name, _, _ in moves:
        order.setdefault(name, row)
    later = [f"{name} from step {steps[row]:.0f}" for name, row in order.items() if row > first]
    text += f"; then {', '.join(later)}" if later else ""
    text += f"; so until step {steps[last]:.0f}" if last > first else ""
    fell = any(fallen and name in ("reward/mean", "entropy") for _, _, name, _, fallen in moves)
    return {
        "step": int(steps[first]),
        "last_step": int(steps[last]),
        "metrics": list(order),
        "text": text,
        "level": "collapse" if fell and last - first >= COLLAPSE_STEPS - 1 else "spike",
    }


# ---- settings


def settings_rows(
    settings: Mapping[str, Any], decided: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Every key with its value and default; `differs` where they are not the same and the run did
    not choose it. `decided`: the keys that it did."""
    known, automatic, rows = keys_of(Config), automatic_keys(settings, decided), []
    for key, value in settings.items():
        value, default = json_ready(value), json_ready(known[key].default) if key in known else None
        is_default = key in known and (value == default or (value is None and default in ("", [])))
        rows.append(
            {
                "key": key,
                "value": value,
                "default": default,
                "differs": not is_default and key not in automatic,
                "help": known[key].help if key in known else "unknown to this version",
            }
        )
    return rows


# ---- several runs


def differing_settings(
    settings: Sequence[Mapping[str, Any]], decided: Sequence[Collection[str]] = ()
) -> list[list[tuple[str, Any]]]:
    """For each run its keys and values that are not the default, among those in which the runs
    differ. `decided`: the keys that each chose itself."""
    defaults = {key: json_ready(known.default) for key, known in keys_of(Config).items()}
    differing = comparison(settings, decided)["differing"]
    return [
        [
            (row["key"], row["values"][place])
            for row in differing
            if row["values"][place] not in (None, defaults.get(row["key"]))
        ]
        for place in range(len(settings))
    ]


def comparison(
    settings: Sequence[Mapping[str, Any]], decided: Sequence[Collection[str]] = ()
) -> dict[str, Any]:
    """Keys in which runs of these settings differ, and a `warning` of what cannot be compared: of
    other tasks nearly nothing, of other rewards the rewards alone. `decided`: the keys that each
    run chose itself."""
    known = keys_of(Config)
    differing = [
        {"key": key, "values": json_ready(values), "help": known[key].help if key in known else ""}
        for key, values in settings_difference(settings, decided).items()
        if key not in FOLDER_KEYS
    ]
    return {"differing": differing, "warning": incomparable(row["key"] for row in differing)}
