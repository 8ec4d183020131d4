"""The data of the Run view: the overview of a run, its progress, its table before and after
training, its events and settings, its row in the list of runs, and the settings in which several
runs differ."""

from __future__ import annotations

import bisect
import math
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.commands.view.curves import Curves, about, by_topic, spikes
from shoal.commands.view.verdict import Change, accuracy_change, drivers, verdict
from shoal.config.key import keys_of
from shoal.config.train import FOLDER_KEYS, LABEL_KEYS, Config
from shoal.runs.compare import (
    SettingDifference,
    automatic_keys,
    chosen_differences,
    incomparable,
)
from shoal.runs.group_table import Added
from shoal.runs.layout import parts_of
from shoal.runs.lines import EventLine, StepLine, Summary, bounded_line, json_ready, rounded
from shoal.runs.reader import Evaluations, StoredRun
from shoal.runs.summary import version_text

# ---- the run

MAX_EVENTS, IDLE_SECONDS = 500, 900
"""The most events that the page shows, and the seconds without a new step after which a run counts
as stopped."""


def overview(
    run: StoredRun,
    curves: Curves,
    evaluations: Evaluations,
    events: Sequence[EventLine],
    weights: Mapping[str, float],
    settings: Mapping[str, Any],
    paired: Change | None = None,
    partial: Mapping[str, Mapping[int, Added]] | None = None,
) -> dict[str, Any]:
    """Returns the whole record of the Run view except the progress: name, verdict, table, topics of
    metrics, events (the first MAX_EVENTS by step), settings, reward functions (`drivers`),
    problems, evaluations, checkpoints. `main` lists the curves that are shown first. `weights`: the
    weight of each reward function; `settings`: the run's values by dotted key; `paired`: the change
    of the evaluations' main figure, if it is a mean reward (`paired_change`); `partial`: what the
    functions add that do not score all completions (`GroupTable.partial_functions`). Rewards are
    compared only over the steps since a resume last changed what acts on them, in `drivers` too:
    after version `reward_since`."""
    changes = run.reward_changes
    since = changes.reward
    evaluated = evaluations.curves()
    main_figure, main_curve = evaluations.main_curve(changes)
    names = list(curves.columns) + list(evaluated)
    shown_events = list(happened(run, events, curves, evaluations))
    shown_events.sort(key=lambda event: event["step"])
    del shown_events[MAX_EVENTS:]
    columns = _columns_since(curves, since)
    steps = curves.steps[bisect.bisect(curves.steps, since) :]
    added = {}
    for function, by_step in (partial or {}).items():
        added[function] = [by_step.get(int(step)) for step in steps]
    functions = drivers(columns, weights, added)
    if len(functions) == 2:
        # A single function moves the reward alone: its figures are those of the reward.
        shown_functions: list[dict[str, Any]] = []
    else:
        shown_functions = functions
    main = ["reward/mean"]
    if main_figure:
        main.append(main_figure)
    return {
        "name": run.name,
        "path": str(run.path),
        "main": main,
        "verdict": _verdict(
            curves=curves,
            main_figure=main_figure,
            main_curve=main_curve,
            paired=paired,
            since=since,
            functions=functions,
            shown_events=shown_events,
            settings=settings,
        ),
        "table": before_after(run, evaluations, paired),
        "topics": by_topic(names),
        "about": about(names),
        "events": shown_events,
        "settings": settings_rows(settings, run.decided_keys),
        "drivers": shown_functions,
        "reward_since": since,
        "problems": sorted(run.problems.values()),
        "evaluations": evaluated,
        "checkpoints": run.checkpoints(),
    }


def recipe_band(run: StoredRun) -> dict[str, Any] | None:
    """Returns the band of the recipe that the run follows: name, metric, number of seeds, steps (x)
    with their lowest and highest values, and `apart`, what makes it mean less for this run. None if
    the run follows none, or none that its evaluations are held against."""
    recipe = run.recipe()
    if recipe is None or recipe.band is None or not recipe.holds:
        return None
    ends = recipe.band.steps.values()
    return {
        "name": bounded_line(recipe.name),
        "metric": recipe.band.metric,
        "seeds": recipe.band.seeds,
        "x": list(recipe.band.steps),
        "low": [rounded(low) for low, _ in ends],
        "high": [rounded(high) for _, high in ends],
        "apart": bounded_line(recipe.apart),
    }


def _columns_since(curves: Curves, since: int) -> dict[str, Sequence[float]]:
    """Returns metric -> its values in the steps after version `since`, which are those that began
    from it or a later one; all steps if it is 0."""
    first = bisect.bisect(curves.steps, since)  # row of the first step above `since`
    return {name: column[first:] for name, column in curves.columns.items()}


def _verdict(
    curves: Curves,
    main_figure: str,
    main_curve: Mapping[str, Sequence[Any]],
    paired: Change | None,
    since: int,
    functions: Sequence[Mapping[str, Any]],
    shown_events: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> dict[str, str]:
    """Returns the verdict on a run (`verdict`). `main_figure`, `main_curve`: of the evaluations;
    `paired`: the change of that figure, if it is a mean reward; `functions`: the result of
    `drivers`; `since`: rewards are compared only over the steps after this version; `shown_events`:
    records of events, by step."""
    columns = _columns_since(curves, since)
    made = int(curves.last.get("step", 0))
    total = _steps_of(settings)
    return verdict(main_figure, main_curve, paired, columns, functions, shown_events, made, total)


def _steps_of(settings: Mapping[str, Any]) -> int | None:
    """Returns the number of steps that a run is to make; None if its settings do not say."""
    steps = settings.get("steps")
    return steps if isinstance(steps, int) else None


MAX_SPARK = 60
"""The most points that the small curve of a run has in the list of runs."""


def home_row(
    run: StoredRun,
    curves: Curves,
    evaluations: Evaluations,
    settings: Mapping[str, Any],
    paired: Change | None = None,
) -> dict[str, Any]:
    """Returns the row of a run in the list of runs.

    began: seconds since the epoch
    gain: the row of the main figure in the table before and after training (`before_after`), None
        if there is none
    figure, newest: name of the main figure of the evaluations ("" if there is none), and its newest
        point with its interval (None if there is none)
    curve, of: a small curve and what it shows: the main figure if there are more than two
        evaluations, else the reward
    verdict: from the curves and `paired` (as in `overview`), without events and weights
    """
    changes = run.reward_changes
    since = changes.reward
    figure, curve = evaluations.main_curve(changes)
    num_points = len(curve.get("x", ()))
    if num_points > 2:
        shown_curve = curve
        shown_figure = figure.rpartition("/")[2]
    else:
        shown_curve = _reward_curve(curves)
        shown_figure = "reward"
    newest = None
    if num_points:
        newest = {key: values[-1] for key, values in curve.items()}
    functions = drivers(_columns_since(curves, since), {})
    return {
        "began": run.began,
        "gain": _gain(before_after(run, evaluations, paired), figure),
        "figure": figure,
        "newest": newest,
        "verdict": _verdict(
            curves=curves,
            main_figure=figure,
            main_curve=curve,
            paired=paired,
            since=since,
            functions=functions,
            shown_events=(),
            settings=settings,
        ),
        "curve": shown_curve,
        "of": shown_figure,
    }


def _gain(rows: Sequence[list[Any]], figure: str) -> list[Any] | None:
    """Returns the row of a figure, such as "evaluate/held_out/accuracy", in the table before and
    after training (`rows`); None if it has none."""
    data_set, _, name = figure.removeprefix("evaluate/").rpartition("/")
    title = f"{data_set} {name.replace('_', ' ')}"
    for row in rows:
        # The title goes on with how the figure was measured.
        if row[0].partition(" (")[0] == title:
            return row
    return None


def _reward_curve(curves: Curves) -> dict[str, list[Any]]:
    """Returns the mean reward of at most MAX_SPARK equally long stretches of steps (the last may be
    shorter) as points: `x`, the number of the stretch from 0, and `y`. Steps without a reward are
    left out."""
    rewards = [value for value in curves.columns.get("reward/mean", ()) if not math.isnan(value)]
    size = math.ceil(len(rewards) / MAX_SPARK) or 1  # 1: there are no rewards
    means = []
    for start in range(0, len(rewards), size):
        stretch = rewards[start : start + size]
        means.append(rounded(sum(stretch) / len(stretch)))
    return {"x": list(range(len(means))), "y": means}


def failure(events: Sequence[EventLine]) -> str:
    """Returns, in one line, the error that ended a run: the text of its last event that is no
    warning, if that is of level "error". Returns "" if it is of another level, because the run then
    went on after an earlier error, or if there is no event."""
    for event in reversed(events):
        if event.level == "error":
            return bounded_line(event.text)
        if event.level != "warning":  # a warning, such as of closing a file, may follow the error
            break
    return ""


def progress(
    run: StoredRun,
    curves: Curves,
    settings: Mapping[str, Any],
    summary: Summary | None,
    cause: str,
) -> dict[str, Any]:
    """Returns a record on how far a run is: the `step` made last of `steps` (None: unknown), the
    `seconds` of all steps, `step_seconds` of one and `seconds_left` (None: unknown, or it is not
    running), the newest checkpoint (`saved`, 0 if none), the `cause` of a failure, who stopped it
    (`stopped_by`, such as `the callback NAME`; "" if nobody did), whether it has come to its end
    (`has_ended`: it has written its `summary`), the command that continues it (`resume`, "" if it
    is finished or running) and its `state`:

    finished: it has come to its end
    failed: an error ended it (`cause`)
    killed: its process is gone, and steps after the last checkpoint are lost
    stopped: it was ended before its last step (`stopped_by`), its process is gone after a
        checkpoint, or nothing was written for IDLE_SECONDS or ten steps, whichever is longer
    running: none of these
    """
    total = _steps_of(settings)
    done = int(curves.last.get("step", 0))
    saved = max(run.checkpoints(), default=0)
    step_seconds = curves.step_seconds
    stopped_by = bounded_line(summary.stopped_by) if summary else ""
    if stopped_by:
        state = "stopped"
    elif summary:
        state = "finished"
    elif cause:
        state = "failed"
    elif run.process_has_ended:
        state = "killed" if done > saved else "stopped"
    elif _seconds_idle(run) > max(IDLE_SECONDS, 10 * (step_seconds or 0)):
        state = "stopped"
    else:
        state = "running"
    seconds_left = None
    if state == "running" and total and step_seconds and done < total:
        seconds_left = (total - done) * step_seconds
    resume = ""
    if state not in ("finished", "running"):
        resume = f"shoal train resume={shlex.quote(str(run.path))}"
    return {
        "state": state,
        "step": done,
        "steps": total,
        "seconds": rounded(curves.totals["time"]),
        "seconds_left": seconds_left,
        "step_seconds": step_seconds,
        "saved": saved,
        "cause": cause if state == "failed" else "",
        "stopped_by": stopped_by,
        "has_ended": summary is not None,
        "resume": resume,
    }


def _seconds_idle(run: StoredRun) -> float:
    """Returns the seconds since metrics.jsonl was last written; infinity if there is no such
    file."""
    path = run.file(StepLine.FILE)
    return time.time() - path.stat().st_mtime if path else math.inf


def before_after(
    run: StoredRun, evaluations: Evaluations, paired: Change | None = None
) -> list[list[Any]]:
    """Returns the rows (figure, before training, after it, change: texts) of the table of a run
    (`StoredRun.before_after`), each with one more cell: 1 or -1 if the figure has risen or fallen
    between the first and the newest evaluation, 0 if the interval of the change contains 0 or is
    unknown. `paired`: the change of the main figure, if that is a mean reward. Returns [], and adds
    a problem to the run, if the evaluations are damaged."""
    curves = evaluations.curves()
    main_figure, _ = evaluations.main_curve(run.reward_changes)
    rows: list[list[Any]] = []
    try:
        for row in run.before_after(evaluations, run.summary()):
            # row[0] is a title such as "held_out mean reward (greedy, 500 questions)"
            data_set, figure, *_ = row[0].replace("mean reward", "mean_reward").split()
            name = f"evaluate/{data_set}/{figure}"
            if not row[3]:  # not comparable, or one of the two is lacking
                change = None
            elif name == main_figure and figure == "mean_reward":
                change = paired
            else:
                change = accuracy_change(curves.get(name, {}))
            cells: list[Any] = list(row)
            cells.append(change.sign if change else 0)
            rows.append(cells)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        run.add_problem("evaluations", f"cannot be shown as a table ({error})")
        return []
    return rows


# ---- what happened, and when

_SHOWN_LEVELS = {"note": "note", "warning": "warning", "wrong": "error", "error": "error"}
"""Level of an event -> how the page shows it. Events of other levels, such as phases of the run,
are not shown."""


def happened(
    run: StoredRun, events: Sequence[EventLine], curves: Curves, evaluations: Evaluations
) -> Iterator[dict[str, Any]]:
    """Yields the events that the page shows, in no particular order: warnings, errors and notes,
    spikes of metrics (`spikes`), the first 50 resumptions with other settings, and evaluations.
    Each is a record with `step`, `level` and `text`; of an evaluation the step is the version."""
    for event in events:
        if event.level in _SHOWN_LEVELS:
            level = _SHOWN_LEVELS[event.level]
            yield {"step": event.step, "level": level, "text": bounded_line(event.text)}
    yield from spikes(curves)
    # filter: without part 0, with which the run began.
    for version in sorted(filter(None, parts_of(run.root)))[:50]:
        yield {
            "step": version,
            "level": "note",
            "text": f"resumed with other settings (config_{version}.yaml)",
        }
    for step in sorted({line.step for line in evaluations.lines}):
        yield {"step": step, "level": "evaluation", "text": f"evaluated {version_text(step)}"}


# ---- settings


def settings_rows(
    settings: Mapping[str, Any], decided: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Returns a row for each setting of a run: key, value, default, help text, and `differs`, which
    is True if somebody chose another value than the default. None counts as the default if that is
    "" or an empty list.

    `settings`: dotted key -> value; a key that this version does not know has no default, and
    differs. `decided`: the keys whose values the run decided itself; they never differ."""
    keys = keys_of(Config)
    automatic = automatic_keys(settings, decided)
    rows = []
    for name, stored in settings.items():
        value = json_ready(stored)
        default = None
        is_default = False
        help_text = "unknown to this version"
        if name in keys:
            default = json_ready(keys[name].default)
            is_default = value == default or (value is None and default in ("", []))
            help_text = keys[name].help
        rows.append(
            {
                "key": name,
                "value": value,
                "default": default,
                "differs": not is_default and name not in automatic,
                "help": help_text,
            }
        )
    return rows


# ---- several runs


def shown_differences(
    settings: Sequence[Mapping[str, Any]],
    decided: Sequence[Collection[str]] = (),
    started_in: Sequence[Path] = (),
) -> list[SettingDifference]:
    """Returns the settings in which runs differ, except their folders, their tags and notes, and
    what no run chose.

    `settings`: for each run dotted key -> value. `decided`: for each run the keys whose values it
    decided itself; none if it is left out. `started_in`: as in `chosen_differences`."""
    differing = []
    for difference in chosen_differences(settings, decided, started_in):
        if difference.key not in (*FOLDER_KEYS, *LABEL_KEYS):
            differing.append(difference)
    return differing


def distinguishing_settings(
    differing: Sequence[SettingDifference], num_runs: int
) -> list[list[tuple[str, Any]]]:
    """Returns for each run the (key, value) pairs among the settings in which the runs differ,
    without values that are the key's default, or that the run does not have ([] if none is left).
    `differing`: the differences of these runs, with values in their order; `num_runs`: how many
    runs there are."""
    keys = keys_of(Config)
    by_run = []
    for run_index in range(num_runs):
        own = []
        for difference in differing:
            value = json_ready(difference.values[run_index])
            default = None
            if difference.key in keys:
                default = json_ready(keys[difference.key].default)
            if value is not None and value != default:
                own.append((difference.key, value))
        by_run.append(own)
    return by_run


def comparison(differing: Sequence[SettingDifference]) -> dict[str, Any]:
    """Returns the record of the settings in which runs differ (`differing`: rows of key, the value
    of each run, help text), and of what cannot be compared because of them (`warning`, a sentence,
    or "" if everything can): nearly nothing if the tasks differ, all but rewards if only the reward
    functions differ."""
    keys = keys_of(Config)
    rows = []
    for difference in differing:
        help_text = ""
        if difference.key in keys:
            help_text = keys[difference.key].help
        values = json_ready(difference.values)
        rows.append({"key": difference.key, "values": values, "help": help_text})
    return {"differing": rows, "warning": incomparable(differing)}
