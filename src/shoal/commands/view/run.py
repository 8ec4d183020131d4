"""The Run view: a run's curves, thinned to what a screen can show; how far it is; before and after;
what happened when; what moves the reward; what looks wrong; the verdict; its settings; and what of
several runs can be compared."""

from __future__ import annotations

import bisect
import contextlib
import math
import shlex
import statistics
import threading
import time
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.config.key import keys_of
from shoal.config.train import FOLDER_KEYS, Config
from shoal.report.watch import RARE
from shoal.runs.compare import automatic_keys, incomparable, settings_difference
from shoal.runs.group_table import GroupFile, GroupTable, column_sql
from shoal.runs.layout import parts_of
from shoal.runs.lines import EventLine, StepLine, bounded_line, json_ready, rounded
from shoal.runs.metrics import known_mean, metric
from shoal.runs.reader import Evaluations, LineReader, StoredRun
from shoal.runs.summary import version_text
from shoal.tasks.graders.answer import extract_answer
from shoal.text import count, number_text

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


# ---- settings, and what moves the reward


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


def drivers(
    columns: Mapping[str, Sequence[float]], weights: Mapping[str, float]
) -> list[dict[str, Any]]:
    """For each reward function its mean over the first and the last tenth of the steps (5 at
    least), and what the change adds to the reward by the function's weight, as groups have it."""
    size = len(columns.get("reward/mean", ()))
    names = [
        name
        for name in columns
        if name.startswith("rewards/") and not name.startswith(("rewards/failed", "rewards/logged"))
    ]
    if size < 4 or not names:
        return []
    part = ends(size)
    rows = []
    for name in ("reward/mean", *names):
        first, last = (
            known and rounded(known)
            for known in (known_mean(columns[name][:part]), known_mean(columns[name][-part:]))
        )
        function = name.removeprefix("rewards/")
        weight = 1.0 if name == "reward/mean" else weights.get(function)
        change = None if first is None or last is None else last - first
        known = reward_change(columns[name])
        rows.append(
            {
                "function": function if name != "reward/mean" else "reward",
                "first": first,
                "last": last,
                "weight": weight,
                "over": part,
                "sign": known.sign if known and change else 0,
                "adds": None if change is None or weight is None else rounded(weight * change),
            }
        )
    return rows[:1] + sorted(rows[1:], key=lambda row: -abs(row["adds"] or 0))


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


PART_STEPS, STUDENT = 5, 3.36
"""At least so many steps at each end are compared. Student's t of two such parts, at 99% and not
95: a page that is open looks again at every step, and would otherwise find a change in noise sooner
or later."""


LITTLE = 0.1
"""A gain of accuracy that the interval must exclude for the verdict that there is hardly any."""


FEW_MIXED = 0.3
"""Below this share of groups whose rewards differ, that is why nothing is learned."""


GONE, STUCK = 0.1, 0.9
"""A function that falls to less than this part of what it was; at the end so many completions are
cut off, or so many groups have one reward for all."""


@dataclass(frozen=True)
class Change:
    """A figure at two times and the interval of the difference."""

    before: float
    after: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 if it has risen, -1 if it has fallen, 0 if that cannot be said."""
        return int(self.low > 0) - int(self.high < 0)

    @property
    def shares(self) -> str:
        return " → ".join(f"{number_text(100 * value)}%" for value in (self.before, self.after))

    @property
    def numbers(self) -> str:
        return " → ".join(number_text(value, 2) for value in (self.before, self.after))


def ends(size: int) -> int:
    """Steps at either end of so many that are compared: a tenth, PART_STEPS at least, half at
    most."""
    return max(1, min(size // 2, max(PART_STEPS, size // 10)))


def accuracy_change(
    curve: Mapping[str, Sequence[Any]], first: int = 0, last: int = -1
) -> Change | None:
    """Of two evaluations; the interval of a difference of shares by Newcombe (1998), method 10,
    from those of both.

    None without two evaluations that have intervals."""
    if len(curve.get("x", ())) < 2 or None in (curve["low"][first], curve["low"][last]):
        return None
    (p, low, high), (q, new_low, new_high) = (
        [curve[key][place] for key in ("y", "low", "high")] for place in (first, last)
    )
    return Change(
        p, q, q - p - math.hypot(q - new_low, high - p), q - p + math.hypot(new_high - q, p - low)
    )


def reward_change(values: Sequence[float]) -> Change | None:
    """Of the means of the first and the last steps (Welch); None if they are fewer than
    PART_STEPS."""
    known = np.array(values)[~np.isnan(values)]
    part = ends(len(known))
    if part < PART_STEPS:
        return None
    first, last = known[:part], known[-part:]
    half = STUDENT * math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / part)
    difference = float(last.mean() - first.mean())
    # Equal rewards differ by rounding alone.
    return Change(
        float(first.mean()), float(last.mean()), difference - half - 1e-6, difference + half + 1e-6
    )


def verdict(
    curve: Mapping[str, Sequence[Any]],
    columns: Mapping[str, Sequence[float]],
    drivers: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    steps: int,
    total: int | None,
) -> dict[str, str]:
    """`level` (good, note, warning, bad or none), `text`, and `detail` with the intervals.

    `curve`: the main curve of the evaluations; `columns`: metrics by step; `drivers`: functions and
    what each adds; `steps`: made so far, of `total`."""
    accuracy, reward = accuracy_change(curve), reward_change(columns.get("reward/mean", ()))
    lost = _lost(columns, drivers)
    # Where accuracy was measured before training, the next evaluation says more than rewards do.
    is_awaited = len(curve.get("x", ())) == 1 and curve["low"][0] is not None
    # Few steps may lie in both parts that are compared, or a jump within one of them.
    is_early = steps <= (total or 0) / (2 if is_awaited else 4) or (
        accuracy is None and steps < 4 * PART_STEPS
    )
    level, text = _sentence(curve, accuracy, reward, drivers, lost, count(steps, "step"), is_early)
    if level == "bad" and (
        collapse := next((event for event in events if event["level"] == "collapse"), None)
    ):
        text += f"; from step {collapse['step']} on, `{collapse['metrics'][0]}` first"
    mixed = [value for value in columns.get("groups/nonzero_std", ()) if not math.isnan(value)]
    if (
        text.startswith(("does not learn", "too early"))
        and mixed
        and (share := sum(mixed) / len(mixed)) < FEW_MIXED
    ):
        text += (
            f"; {f'only {share:.0%} of the groups have' if share else 'no group has'} rewards that "
            "differ"
        )
    if level != "good" and (name := _unrewarded(columns, drivers)):
        level, text = (
            "bad" if level == "bad" else "warning",
            f"{text}; `{name}` is 0 on nearly all completions",
        )
    detail = (
        [f"accuracy {100 * accuracy.low:+.1f} to {100 * accuracy.high:+.1f} points"]
        if accuracy
        else []
    )
    detail += [f"reward {reward.low:+.2g} to {reward.high:+.2g} (99%)"] if reward else []
    return {
        "level": level,
        "text": text,
        "detail": f"Intervals of the change: {', '.join(detail)}." if detail else "",
    }


def _sentence(
    curve: Mapping[str, Sequence[Any]],
    accuracy: Change | None,
    reward: Change | None,
    drivers: Sequence[Mapping[str, Any]],
    lost: str,
    made: str,
    is_early: bool,
) -> tuple[str, str]:
    right, scored = (change.sign if change else 0 for change in (accuracy, reward))
    measured = count(curve["x"][-1], "step") if accuracy else ""
    rises = f"reward {reward.after - reward.before:+.2f}" if reward else ""
    driver = max(
        (row for row in drivers[1:] if (row["adds"] or 0) > 0),
        key=lambda row: row["adds"],
        default=None,
    )
    name = f"`{driver['function']}`" if driver else ""
    driven = f", driven by {name}" if name else ""
    if accuracy and right > 0:
        best = max(range(len(curve["x"])), key=lambda place: curve["low"][place] or 0)
        if (curve["low"][best] or 0) > curve["high"][-1]:
            return "warning", (
                f"learned and lost again: accuracy {accuracy.shares} in {measured}, but "
                f"{curve['y'][best]:.0%} at step {curve['x'][best]}"
            )
        return "good", f"learns: accuracy {accuracy.shares} in {measured}{driven}"
    if accuracy and right < 0:
        points = f"{100 * (accuracy.after - accuracy.before):+.1f} points"
        if scored > 0:
            return "bad", f"{rises}, accuracy {points}: looks hacked{f' by {name}' if name else ''}"
        return "bad", f"gets worse: accuracy {accuracy.shares} in {measured}"
    if reward and scored > 0:
        if lost and name:
            return "bad", f"{rises} in {made}, {lost}: looks hacked by {name}"
        if accuracy and accuracy.high < LITTLE:
            return "warning", (
                f"{rises} in {made}{driven}, but hardly more right answers: accuracy "
                f"{accuracy.shares} is within noise"
            )
        known = (
            f"accuracy {accuracy.shares} is too few questions to say"
            if accuracy
            else "accuracy is not measured"
        )
        return "note", f"the reward rises: {reward.numbers} in {made}{driven}; {known}"
    if reward and scored < 0:
        return "bad", f"gets worse: reward {reward.numbers} in {made}"
    figures = [f"accuracy {accuracy.shares}"] if accuracy else []
    # An interval that excludes no gain that matters: of accuracy; where it is not measured of the
    # reward, by half.
    is_wide = (
        accuracy.high >= LITTLE
        if accuracy
        else reward and reward.high > max(abs(reward.before) / 2, abs(reward.after) / 2, 1e-5)
    )
    if reward is None or is_early or is_wide:
        return "none", f"too early to say: {', '.join([made, *figures])}"
    return (
        "warning",
        f"does not learn: {', '.join([*figures, f'reward {reward.numbers}'])} in {made}, within "
        "noise",
    )


def _lost(columns: Mapping[str, Sequence[float]], drivers: Sequence[Mapping[str, Any]]) -> str:
    """The reward function that is all but gone while all completions are cut off, or groups no
    longer differ, in words; empty where none is: one function may well give way to another as long
    as groups teach something."""
    size = ends(len(columns.get("reward/mean", ())))
    cut, mixed = (
        float(np.mean(columns.get(name, (usual,))[-size:]))
        for name, usual in (("completions/truncated", 0), ("groups/nonzero_std", 1))
    )
    found = (
        [
            row
            for row in drivers[1:]
            if row["sign"] * (row["weight"] or 0) < 0 and row["last"] < GONE * row["first"] > 0
        ]
        if cut > STUCK or mixed < 1 - STUCK
        else []
    )
    return "".join(
        f"`{row['function']}` {number_text(row['first'], 2)} → {number_text(row['last'], 2)}"
        for row in found[:1]
    )


def _unrewarded(
    columns: Mapping[str, Sequence[float]], drivers: Sequence[Mapping[str, Any]]
) -> str:
    """A heaviest one of several reward functions that is above 0 on hardly a completion of the run;
    else empty."""
    most = max((row["weight"] or 0 for row in drivers[1:]), default=0)
    for row in drivers[1:]:
        known = np.array(columns[f"rewards/{row['function']}"])
        known = known[~np.isnan(known)]
        if (
            row["weight"] == most
            and len(drivers) > 2
            and len(known) >= PART_STEPS
            and known.min() >= 0
            and known.mean() <= RARE
        ):
            return row["function"]
    return ""


TEXT_FILES, TEXT_COMPLETIONS, MAX_CHARS, EXAMPLES = 40, 16_384, 20_000, 6


STRONG_EFFECT, MANY_CONSTANT, MANY_FLAGGED, LINT_SECONDS = 0.3, 0.5, 0.01, 0.3


REPEATED_CHARS, REPEATED_RATIO = 40, 0.18
"""A text of so many characters that deflate makes so much smaller repeats itself."""


def finding(
    kind: str,
    level: str,
    title: str,
    text: str,
    filter: str = "",
    sort: str = "",
    examples: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """`filter` and `sort`, a column, lead to the groups that show it."""
    return {
        "kind": kind,
        "level": level,
        "title": title,
        "text": text,
        "filter": filter,
        "sort": sort,
        "examples": list(examples),
    }


# ---- by numbers


def number_findings(index: GroupTable) -> list[dict[str, Any]]:
    with index.lock:
        total = index.database.rows(
            _TOTALS.format(
                table=index.table,
                functions="".join(
                    f", avg({column_sql(f'mean/{one}')}) FILTER (step >= late) - "
                    f"avg({column_sql(f'mean/{one}')}) FILTER (step <= early) AS "
                    f"{column_sql(f'rise/{one}')}"
                    for one in index.functions
                ),
            )
        )[0]
        functions = index.database.rows(_FUNCTIONS.format(sums=index.sums))
    if not total["groups"]:
        return []
    weights = index.weights
    rises = {one: (total[f"rise/{one}"] or 0) * weights.get(one, 1) for one in index.functions}
    total["driver"] = max(
        (one for one in rises if rises[one] > 0), key=lambda one: rises[one], default=""
    )
    findings = [
        found
        for check in (_length, _constant, _truncated, _drift)
        for found in check(total, functions)
    ] + _unvarying(functions)
    for found in findings:
        if found["level"] != "ok":
            sort, descending = found["sort"] or "step", "length_effect<" not in found["filter"]
            rows, _ = index.rows(found["filter"], sort, descending, limit=EXAMPLES // 2)
            found["examples"] = [
                {
                    "file": row["file"],
                    "group": row["group"],
                    "completion": None,
                    "reward": row["reward"],
                    "text": row["prompt"],
                }
                for row in rows
                if row["file"]
            ]
    return findings


_TOTALS = """
SELECT count(*) AS groups, avg((spread < 1e-9)::INTEGER) AS constant,
  avg(length_effect) AS effect, count(length_effect) AS with_effect, avg(truncated) AS truncated,
  avg(reward) FILTER (truncated > 0) AS reward_truncated,
  avg(reward) FILTER (truncated = 0) AS reward_whole,
  avg(pass) FILTER (step <= early) AS pass_early, avg(pass) FILTER (step >= late) AS pass_late,
  avg(reward) FILTER (step <= early) AS reward_early,
  avg(reward) FILTER (step >= late) AS reward_late,
  avg(length) FILTER (step <= early) AS length_early,
  avg(length) FILTER (step >= late) AS length_late,
  sqrt(var_samp(reward) FILTER (step <= early) / count(reward) FILTER (step <= early)
    + var_samp(reward) FILTER (step >= late) / count(reward) FILTER (step >= late)) AS reward_error
  {functions}
FROM (SELECT *, (SELECT quantile_cont(step, 0.2) FROM {table} WHERE "set" = 'train') AS early,
  (SELECT quantile_cont(step, 0.8) FROM {table} WHERE "set" = 'train') AS late
  FROM {table} WHERE "set" = 'train')
"""


_FUNCTIONS = """
SELECT function, sum(n) AS n, min(low) AS low, max(high) AS high, count(*) AS steps,
  (sum(n) * sum(xy) - sum(x) * sum(y)) / nullif(sqrt(greatest(sum(n) * sum(xx) - sum(x) * sum(x), 0)
    * greatest(sum(n) * sum(yy) - sum(y) * sum(y), 0)), 0) AS correlation
FROM {sums} GROUP BY function ORDER BY function = 'reward' DESC, function
"""


def _length(
    total: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    effect, number = total["effect"], total["with_effect"]
    overall = {
        row["function"]: row["correlation"] for row in functions if row["correlation"] is not None
    }
    said = ", ".join(f"{name} {value:+.2f}" for name, value in overall.items())
    if effect is None or number < 10:
        return []
    text = (
        f"Within groups whose rewards and lengths differ, they correlate by {effect:+.2f} on "
        f"average, over {count(number, 'group')}. Over all completions: {said}."
    )
    if abs(effect) < STRONG_EFFECT:
        return [finding("length", "ok", "Reward hardly follows length.", text)]
    longer = "longer" if effect > 0 else "shorter"
    return [
        finding(
            "length",
            "warning",
            f"Within a group {longer} completions score better",
            f"{text} Training then makes completions {longer}, whatever else it does.",
            f"set=train length_effect{'>0.7' if effect > 0 else '<-0.7'}",
            "length_effect",
        )
    ]


def _constant(total: Mapping[str, Any], _: Any) -> list[dict[str, Any]]:
    share = total["constant"]
    text = (
        f"{share:.0%} of {count(total['groups'], 'training group')} have one reward for all their "
        "completions."
    )
    if share <= MANY_CONSTANT:
        return [
            finding(
                "constant",
                "ok",
                "Most groups have rewards that differ.",
                text,
                "set=train spread=0",
            )
        ]
    return [
        finding(
            "constant",
            "warning",
            "Most groups teach nothing",
            f"{text} Their advantages are 0: take easier or harder questions, or larger groups.",
            "set=train spread=0",
        )
    ]


def _truncated(total: Mapping[str, Any], _: Any) -> list[dict[str, Any]]:
    share = total["truncated"]
    if not share or share < MANY_FLAGGED:
        return []
    cut, whole = total["reward_truncated"], total["reward_whole"]
    compared = (
        ""
        if cut is None or whole is None
        else f" Groups with such completions have a mean reward of {cut:.3g}, the others of "
        f"{whole:.3g}."
    )
    return [
        finding(
            "truncated",
            "warning" if share > 0.2 else "note",
            f"{share:.1%} of completions are cut off",
            f"They reached the token limit.{compared}",
            "set=train truncated>0",
            "truncated",
        )
    ]


def _drift(total: Mapping[str, Any], _: Any) -> list[dict[str, Any]]:
    """Whether the reward rises while what it stands for does not."""
    before, after = total["reward_early"], total["reward_late"]
    solved, solves = total["pass_early"], total["pass_late"]
    if None in (before, after, solved, solves):
        return []
    text = (
        f"From the first to the last fifth of the steps: reward {before:.3g} to {after:.3g}, pass "
        f"share {solved:.1%} to {solves:.1%}, length {total['length_early']:.0f} to "
        f"{total['length_late']:.0f} tokens."
    )
    if after > before + max(0.02, 2.6 * (total["reward_error"] or 0)) and solves < solved + 0.01:
        driver = total["driver"]
        return [
            finding(
                "hacking",
                "warning",
                "The reward rises, the share of right answers does not",
                f"{text} {driver or 'Something else than right answers'} is what rises: read "
                "groups with high reward and none solved.",
                "set=train pass=0",
                driver or "reward",
            )
        ]
    return [finding("hacking", "ok", "Reward and right answers move together.", text)]


def _unvarying(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        finding(
            "unvarying",
            "warning",
            f"{row['function']} never varies",
            f"It gave {row['low']:g} to each of {row['n']:,.0f} completions: nothing is learned "
            "from it. Check it with `shoal rescore`, or leave it out of reward.functions.",
            "set=train",
        )
        for row in functions
        if row["n"] >= 64 and row["low"] == row["high"] and row["function"] != "reward"
    ]


# ---- by texts


@dataclass
class Flagged:
    """What one check found: how often, with which rewards, and the examples with the most
    reward."""

    number: int = 0
    reward: float = 0.0
    examples: list[dict[str, Any]] = field(default_factory=list)


class TextLint:
    """Reads completions and counts those that look wrong; `findings` at any time."""

    def __init__(self, index: GroupTable, has_tag: bool = True) -> None:
        """`has_tag`: the task is one of those whose answers stand in <answer>; else only prompts
        that ask for it do."""
        self._index, self.has_tag = index, has_tag
        self.completions, self.reward, self.with_answer = 0, 0.0, 0
        self.flags: dict[str, Flagged] = defaultdict(Flagged)
        files = [
            file
            for file in sorted(index.files.values(), key=lambda file: file.stem)
            if file.stem.startswith("step_")
        ]
        places = {
            round(place * (len(files) - 1) / max(1, TEXT_FILES - 1)) for place in range(TEXT_FILES)
        }
        chosen = [files[place] for place in sorted(places)] if files else []
        self._most = max(16, TEXT_COMPLETIONS // max(1, len(chosen)))  # completions of a file
        self.num_files, self._left, self._lock = len(chosen), chosen[::-1], threading.Lock()

    @property
    def num_read(self) -> int:
        return self.num_files - len(self._left)

    def read_on(self) -> None:
        """Reads further files for LINT_SECONDS."""
        until = time.monotonic() + LINT_SECONDS
        with self._lock:
            while self._left and time.monotonic() < until:
                with contextlib.suppress(
                    self._index.database.error
                ):  # replaced or damaged: the table names it
                    self._add(self._left[-1])
                self._left.pop()

    def _add(self, file: GroupFile) -> None:
        rows = self._index.database.rows(
            f"SELECT coalesce(left(text, {MAX_CHARS}), '') AS text, CAST(prompt AS VARCHAR) LIKE "
            f"'%<answer>%' AS tag, "
            'TRY_CAST("group" AS INTEGER) AS "group", TRY_CAST(completion AS INTEGER) AS '
            "completion, "
            "TRY_CAST(reward AS DOUBLE) AS reward, TRY_CAST(correct AS BOOLEAN) AS correct "
            'FROM read_parquet(?) WHERE "group" IS NOT NULL AND completion IS NOT NULL '
            'ORDER BY "group", completion LIMIT ?',
            str(file.path),
            self._most,
        )
        by_group: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_group[row["group"]].append(row)
            self.has_tag = self.has_tag or bool(row["tag"])
        for group, own in by_group.items():
            best = max((row["reward"] for row in own if row["reward"] is not None), default=None)
            right = max(
                (row["reward"] for row in own if row["correct"] and row["reward"] is not None),
                default=None,
            )
            for row in own:
                self.completions += 1
                self.reward += row["reward"] or 0
                self.with_answer += extract_answer(row["text"]) is not None
                for kind in _kinds(row, best, right):
                    self._flag(kind, file, group, row)

    def _flag(self, kind: str, file: GroupFile, group: int, row: Mapping[str, Any]) -> None:
        flag = self.flags[kind]
        flag.number, flag.reward = flag.number + 1, flag.reward + (row["reward"] or 0)
        flag.examples.append(
            {
                "file": file.stem,
                "group": group,
                "completion": row["completion"],
                "reward": row["reward"],
                "text": row["text"][:160],
            }
        )
        flag.examples.sort(
            key=lambda one: -(one["reward"] or 0)
        )  # stable: the first of those with one reward
        del flag.examples[EXAMPLES:]

    def findings(self) -> list[dict[str, Any]]:
        if not self.completions:
            return []
        over = f"{count(self.completions, 'completion')} of {count(self.num_read, 'step')}"
        found = []
        for kind, (title, text) in TEXT_CHECKS.items():
            flag = self.flags.get(kind)
            if (
                kind == "no_answer"
                and (not self.has_tag or self.with_answer < self.completions / 2)
            ) or (kind == "wrong_best" and not self._index.is_measured):
                continue  # answers of this task stand in another form, or nothing is known of them
            if flag is None or not flag.number:
                found.append(finding(kind, "ok", f"No completions {title}.", f"Of {over}."))
                continue
            others = self.completions - flag.number
            rest = "" if not others else f", the others {(self.reward - flag.reward) / others:.3g}"
            share = flag.number / self.completions
            found.append(
                finding(
                    kind,
                    "warning" if share > MANY_FLAGGED else "note",
                    f"{share:.1%} of completions {title} ({flag.number:,})"
                    if share >= 0.001
                    else f"{flag.number:,} of {count(self.completions, 'completion')} {title}",
                    f"Of {over}. {text} Their mean reward is "
                    f"{flag.reward / flag.number:.3g}{rest}.",
                    examples=flag.examples,
                )
            )
        return found


TEXT_CHECKS: Mapping[str, tuple[str, str]] = {
    "no_answer": (
        "score best without giving an answer",
        "They have no <answer>, and no sibling has more reward.",
    ),
    "empty": ("are empty", "They hold fewer than 3 characters."),
    "wrong_best": (
        "are wrong and score as well as a right sibling",
        "The task says that they are wrong, the reward does not.",
    ),
    "repeated": ("repeat themselves", "Their text shrinks to a fifth when compressed."),
    "many_answers": (
        "give several answers",
        "They have more than one <answer>: one of them may be right.",
    ),
}
"""Kind -> what such a completion does, and how it was recognised."""


def _kinds(row: Mapping[str, Any], best: float | None, right: float | None) -> list[str]:
    text, reward = row["text"], row["reward"]
    checks: dict[str, Callable[[], bool]] = {
        "no_answer": lambda: (
            reward is not None and reward == best and reward > 0 and extract_answer(text) is None
        ),
        "empty": lambda: len(text.strip()) < 3,
        "wrong_best": lambda: (
            row["correct"] is False and right is not None and reward is not None and reward >= right
        ),
        "repeated": lambda: len(text) >= REPEATED_CHARS and repeats(text),
        "many_answers": lambda: (
            min(map(text.count, ("<answer>", "</answer>"))) > 1 or text.count("\\boxed{") > 1
        ),
    }
    return [kind for kind, check in checks.items() if check()]


def repeats(text: str) -> bool:
    data = text.encode("utf-8", "replace")
    return len(zlib.compress(data, 1, -15)) < REPEATED_RATIO * len(
        data
    )  # -15: without zlib's header


def lint(index: GroupTable, numbers: Sequence[dict[str, Any]], texts: TextLint) -> dict[str, Any]:
    """All findings, what is wrong first, and of that what rewards other things than right
    answers."""
    order = {"warning": 0, "note": 1, "ok": 2}
    kinds = (
        "hacking",
        "wrong_best",
        "no_answer",
        "length",
        "unvarying",
        "constant",
        *TEXT_CHECKS,
        "truncated",
    )
    found = sorted(
        [*numbers, *texts.findings()],
        key=lambda one: (order[one["level"]], kinds.index(one["kind"])),
    )
    return {
        "findings": found,
        "done": texts.num_read == texts.num_files and not index.waiting,
        "read": texts.num_read,
        "files": texts.num_files,
    }
