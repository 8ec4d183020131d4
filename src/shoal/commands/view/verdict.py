"""The verdict on a run in one sentence, and how much each reward function contributes to the change
of the reward.

    drivers(columns, weights)        how much each reward function adds to the change of the reward
    accuracy_change, reward_change   changes with their confidence intervals
    verdict(...)                     learns, learns nothing, looks hacked, or too early to say

Changes are differences between the means of the first and the last steps, with intervals. Bounds of
warnings that `runs/diagnosis.py` has a row for are those of the row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.runs.diagnosis import Figure, row_named
from shoal.runs.lines import rounded
from shoal.runs.metrics import known_mean
from shoal.text import count, number_text

PART_STEPS, STUDENT = 5, 3.36
"""PART_STEPS: the fewest steps at each end of a run that are compared. STUDENT: Student's t for two
samples of that size, at 99% and not 95%, because an open page tests again at every step and would
otherwise find a change in noise sooner or later."""

LITTLE = 0.1
"""A gain of accuracy. If the interval excludes even this gain, the verdict says that accuracy
hardly changed."""

GONE, STUCK = 0.1, 0.9
"""GONE: a reward function counts as lost if its mean falls below this share of its mean at the
start. STUCK: a run counts as stuck if, at its end, more than this share of completions is cut off,
or more than this share of groups has equal rewards."""


# ---- changes and their intervals


@dataclass(frozen=True)
class Change:
    """A figure before and after, and the ends `low` and `high` of the confidence interval of the
    difference `after - before`."""

    before: float
    after: float
    low: float  # of the difference, not of the figure
    high: float

    @property
    def sign(self) -> int:
        """Returns 1 if the figure has risen, -1 if it has fallen, 0 if the interval contains 0."""
        return int(self.low > 0) - int(self.high < 0)

    @property
    def shares(self) -> str:
        """Returns the figure before and after in percent, as the terminal prints it: not the
        difference, but `12.0% → 34.5%`."""
        return f"{100 * self.before:.1f}% → {100 * self.after:.1f}%"

    @property
    def numbers(self) -> str:
        """Returns the figure before and after, like `0.12 → 0.345`, not the difference."""
        return f"{number_text(self.before)} → {number_text(self.after)}"


def ends(size: int) -> int:
    """Returns how many steps at each end of `size` steps are compared: a tenth (rounded down), but
    at least PART_STEPS, and at most half; never fewer than 1."""
    return max(1, min(size // 2, max(PART_STEPS, size // 10)))


def accuracy_change(
    curve: Mapping[str, Sequence[Any]], first: int = 0, last: int = -1
) -> Change | None:
    """Returns the change between two evaluations with its 95% interval; None if there are not two,
    or if one of these two has no interval. `curve`: lists x, y, low and high
    (`Evaluations.curves`); `first`, `last`: positions in them, by default of the first and the
    newest evaluation.

    The interval of the difference of two shares follows from the intervals of both: Newcombe
    (1998), method 10. A curve of mean rewards is treated likewise."""
    if len(curve.get("x", ())) < 2:
        return None
    if curve["low"][first] is None or curve["low"][last] is None:
        return None
    # In the paper's letters: p is the share before, q the one after.
    p, p_low, p_high = (curve[key][first] for key in ("y", "low", "high"))
    q, q_low, q_high = (curve[key][last] for key in ("y", "low", "high"))
    difference = q - p
    low = difference - math.hypot(q - q_low, p_high - p)
    high = difference + math.hypot(q_high - q, p - p_low)
    return Change(p, q, low, high)


def reward_change(values: Sequence[float]) -> Change | None:
    """Returns the change between the means of the first and the last steps (as many as `ends`
    says), with Welch's 99% interval; None if there are too few steps for PART_STEPS at each end.
    `values`: one a step; NaN are left out first, and do not count as steps."""
    known = np.array(values)
    known = known[~np.isnan(known)]
    part = ends(len(known))
    if part < PART_STEPS:
        return None
    first = known[:part]
    last = known[-part:]
    half = STUDENT * math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / part)
    before = float(first.mean())
    after = float(last.mean())
    difference = float(last.mean() - first.mean())
    # 1e-6, because means of equal rewards differ by rounding.
    return Change(before, after, difference - half - 1e-6, difference + half + 1e-6)


# ---- what moves the reward


def drivers(
    columns: Mapping[str, Sequence[float]], weights: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Returns what moved the reward: a row for the reward itself, then one for each reward function
    (`_driver`), those first whose change adds most to that of the reward or takes most from it.
    Returns [] if there are fewer than 4 steps or no reward functions.

    `columns`: metrics by step; `weights`: function -> weight, as stored with the groups."""
    size = len(columns.get("reward/mean", ()))
    names = []
    for name in columns:
        is_function = name.startswith("rewards/")
        if is_function and not name.startswith(("rewards/failed", "rewards/logged")):
            names.append(name)
    if size < 4 or not names:
        return []
    rows = []
    for name in names:
        function = name.removeprefix("rewards/")
        rows.append(_driver(function, columns[name], weights.get(function), ends(size)))
    rows.sort(key=lambda row: -abs(row["adds"] or 0))  # without a weight: last
    return [_driver("reward", columns["reward/mean"], 1.0, ends(size)), *rows]


def _driver(
    function: str, values: Sequence[float], weight: float | None, part: int
) -> dict[str, Any]:
    """Returns the row of one reward function (`function`, its name): its means over the `first` and
    the `last` steps (of each end `part` steps, `over` in the row), its `weight`, the `sign` of the
    change (0 within noise), and `adds`, the change times the weight. A mean, weight or `adds` that
    is unknown is None."""
    first = _rounded_mean(values[:part])
    last = _rounded_mean(values[-part:])
    change = None
    if first is not None and last is not None:
        change = last - first
    adds = None
    if change is not None and weight is not None:
        adds = rounded(weight * change)
    interval = reward_change(values)
    sign = 0
    if interval and change:
        sign = interval.sign
    return {
        "function": function,
        "first": first,
        "last": last,
        "weight": weight,
        "over": part,
        "sign": sign,
        "adds": adds,
    }


def _rounded_mean(values: Sequence[float]) -> float | None:
    mean = known_mean(values)
    return rounded(mean) if mean else mean


# ---- the verdict


def verdict(
    figure: str,
    curve: Mapping[str, Sequence[Any]],
    columns: Mapping[str, Sequence[float]],
    drivers: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    steps: int,
    total: int | None,
) -> dict[str, str]:
    """Returns the verdict on a run: `level` (good, note, warning, bad or none), `text` (the
    sentence), and `detail` (the intervals as text, "" if none is known).

    The sentence has one figure before and after, which is that of the table before and after
    training: the accuracy, else the mean reward of the evaluations. Only of a run that was not
    evaluated twice it has the reward in training, at the first and at the last steps.

    `figure`, `curve`: name and curve of the evaluations' main figure; `columns`: metrics by step;
    `drivers`: the result of the function `drivers`; `events`: records of spikes, warnings and the
    like; `steps`: the number made so far, of `total` (None if unknown)."""
    # Each is None if there is too little to tell.
    accuracy = accuracy_change(curve)
    reward = reward_change(columns.get("reward/mean", ()))
    # If accuracy was measured before training, the next evaluation says more than rewards do.
    is_awaited = len(curve.get("x", ())) == 1 and curve["low"][0] is not None
    # Early in a run, the compared ends have few steps, and may both lie within one jump. Without
    # `total` only the next condition decides.
    is_early = steps <= (total or 0) / (2 if is_awaited else 4)
    if accuracy is None and steps < 4 * PART_STEPS:
        is_early = True
    lost = _lost(columns, drivers)
    made = count(steps, "step")
    level, text = _sentence(figure, curve, accuracy, reward, drivers, lost, made, is_early)
    if level == "bad":
        text += _collapse(events)
    if text.startswith(("does not learn", "too early")):
        text += _few_mixed_groups(columns)
    if level != "good":
        unrewarded = _unrewarded(columns, drivers)
        if unrewarded:
            level = "bad" if level == "bad" else "warning"
            text += f"; {unrewarded}"
    intervals = []
    if accuracy:
        intervals.append(f"accuracy {100 * accuracy.low:+.1f} to {100 * accuracy.high:+.1f} points")
    if reward:
        intervals.append(f"reward {reward.low:+.2g} to {reward.high:+.2g} (99%)")
    detail = ""
    if intervals:
        detail = f"Intervals of the change: {', '.join(intervals)}."
    return {"level": level, "text": text, "detail": detail}


def _sentence(
    figure: str,
    curve: Mapping[str, Sequence[Any]],
    accuracy: Change | None,
    reward: Change | None,
    drivers: Sequence[Mapping[str, Any]],
    lost: str,
    made: str,
    is_early: bool,
) -> tuple[str, str]:
    """Returns (level, text) of the verdict from the changes of accuracy and reward (None: unknown).
    The accuracy decides if it has changed beyond noise, else the reward does, else
    `_without_a_change`. `lost`: the result of `_lost`. `made`: the number of steps so far, as text.
    `is_early`: True if too few steps were made to say that a run does not learn."""
    name = _strongest_driver(drivers)
    driven = f", driven by {name}" if name else ""
    rise = f"reward {reward.after - reward.before:+.2f}" if reward else ""
    if accuracy and accuracy.sign > 0:
        measured = _measured_over(curve)
        # Position of the evaluation whose interval has the highest lower end.
        best = max(range(len(curve["x"])), key=lambda position: curve["low"][position] or 0)
        # An earlier evaluation was better than the newest beyond the noise of both.
        if (curve["low"][best] or 0) > curve["high"][-1]:
            return "warning", (
                f"learned and lost again: accuracy {accuracy.shares} in {measured}, but "
                f"{curve['y'][best]:.1%} at step {curve['x'][best]}"
            )
        return "good", f"learns: accuracy {accuracy.shares} in {measured}{driven}"
    if accuracy and accuracy.sign < 0:
        if reward and reward.sign > 0:
            points = f"{100 * (accuracy.after - accuracy.before):+.1f} points"
            by_driver = f" by {name}" if name else ""
            return "bad", f"{rise}, accuracy {points}: looks hacked{by_driver}"
        measured = _measured_over(curve)
        return "bad", f"gets worse: accuracy {accuracy.shares} in {measured}"
    evaluated = _evaluated_reward(figure, curve)
    if reward and reward.sign > 0:
        if lost and name:
            return "bad", f"{rise} in {made}, {lost}: looks hacked by {name}"
        if accuracy and accuracy.high < LITTLE:
            return "warning", (
                f"{rise} in {made}{driven}, but hardly more right answers: accuracy "
                f"{accuracy.shares} is within noise"
            )
        if accuracy:
            return "note", (
                f"the reward rises in {made}{driven}; accuracy {accuracy.shares}, from too few "
                "questions to tell"
            )
        if evaluated and evaluated.after <= evaluated.before:
            return "warning", (
                f"{rise} in {made} of training{driven}, but not in evaluations: mean reward "
                f"{evaluated.numbers}"
            )
        if evaluated:
            measured = _measured_over(curve)
            text = f"mean reward {evaluated.numbers} in {measured}"
        else:
            text = f"{reward.numbers} in {made} of training"
        return "note", f"the reward rises: {text}{driven}; accuracy is not measured"
    if reward and reward.sign < 0:
        if accuracy:
            return "bad", f"gets worse: {rise} in {made}; accuracy {accuracy.shares}"
        if evaluated:
            return "bad", f"gets worse: {rise} in {made}; mean reward {evaluated.numbers}"
        return "bad", f"gets worse: reward {reward.numbers} in {made} of training"
    return _without_a_change(accuracy, evaluated, reward, made, is_early)


def _measured_over(curve: Mapping[str, Sequence[Any]]) -> str:
    """Returns how many steps are between the first and the newest evaluation, like `40 steps`. The
    first may be of a later version than 0 (train.evaluate_first)."""
    return count(curve["x"][-1] - curve["x"][0], "step")


@dataclass(frozen=True)
class EvaluatedReward:
    """The mean reward of the first and of the newest evaluation. Its interval is unknown."""

    before: float
    after: float

    @property
    def numbers(self) -> str:
        """Returns the mean reward before and after, like `0.12 → 0.345`."""
        return f"{number_text(self.before)} → {number_text(self.after)}"


def _evaluated_reward(figure: str, curve: Mapping[str, Sequence[Any]]) -> EvaluatedReward | None:
    """Returns the mean reward of the first and of the newest evaluation; None if the main figure of
    the evaluations is not the mean reward, or if there are not two."""
    if not figure.endswith("/mean_reward") or len(curve["x"]) < 2:
        return None
    return EvaluatedReward(curve["y"][0], curve["y"][-1])


def _without_a_change(
    accuracy: Change | None,
    evaluated: EvaluatedReward | None,
    reward: Change | None,
    made: str,
    is_early: bool,
) -> tuple[str, str]:
    """Returns (level, text) of the verdict if neither accuracy nor reward has changed beyond noise:
    "too early to say" if a gain may still be hidden in the noise, else "does not learn"."""
    figures = []
    if accuracy:
        figures.append(f"accuracy {accuracy.shares}")
    elif evaluated:
        figures.append(f"mean reward {evaluated.numbers}")
    # True if the interval is so wide that a gain that matters is possible: LITTLE of accuracy, or,
    # if accuracy is not measured, half of the reward.
    is_wide = False
    if accuracy:
        is_wide = accuracy.high >= LITTLE
    elif reward:
        is_wide = reward.high > max(abs(reward.before) / 2, abs(reward.after) / 2, 1e-5)
    if reward is None or is_early or is_wide:
        return "none", f"too early to say: {', '.join([made, *figures])}"
    if not figures:
        figures.append(f"reward {reward.numbers}")
    return "warning", f"does not learn: {figures[0]} in {made}, within noise"


def _strongest_driver(drivers: Sequence[Mapping[str, Any]]) -> str:
    """Returns the name, in backquotes, of the reward function that adds most to the change of the
    reward; '' if none adds to it. `drivers`: the result of `drivers`, whose first row is the reward
    itself."""
    name = ""
    most = 0.0
    for row in drivers[1:]:
        if (row["adds"] or 0) > most:
            name = f"`{row['function']}`"
            most = row["adds"]
    return name


def _collapse(events: Sequence[Mapping[str, Any]]) -> str:
    """Returns the end of a sentence on the first collapse among the events: its step, and the
    metric that jumped first. Returns '' if there was none."""
    for event in events:
        if event["level"] == "collapse":
            return f"; from step {event['step']} on, `{event['metrics'][0]}` first"
    return ""


def _few_mixed_groups(columns: Mapping[str, Sequence[float]]) -> str:
    """Returns the end of a sentence with the share of groups whose rewards differ, over all steps,
    if they are so few that there is little to learn from (the row "constant groups"); else ''."""
    shares = [share for share in columns.get("groups/nonzero_std", ()) if not math.isnan(share)]
    if not shares:
        return ""
    mixed = sum(shares) / len(shares)
    if not row_named("constant groups").holds(Figure("constant_groups", 1 - mixed)):
        return ""
    have = f"only {mixed:.0%} of the groups have" if mixed else "no group has"
    return f"; {have} rewards that differ"


def _lost(columns: Mapping[str, Sequence[float]], drivers: Sequence[Mapping[str, Any]]) -> str:
    """Returns the name of the first reward function that has nearly vanished, with its means before
    and after, as text; '' if there is none. Counts only in a run that is stuck, because nearly all
    completions are cut off or nearly all groups have equal rewards: in others, one function may
    rightly give way to another."""
    size = ends(len(columns.get("reward/mean", ())))
    # A run without these metrics counts as one without cut completions and with mixed groups.
    cut = float(np.mean(columns.get("completions/truncated", (0,))[-size:]))
    mixed = float(np.mean(columns.get("groups/nonzero_std", (1,))[-size:]))
    if not (cut > STUCK or mixed < 1 - STUCK):
        return ""
    for row in drivers[1:]:
        # It adds less to the reward than at the start.
        is_falling = row["sign"] * (row["weight"] or 0) < 0
        if is_falling and row["first"] > 0 and row["last"] < GONE * row["first"]:
            first = number_text(row["first"], 2)
            last = number_text(row["last"], 2)
            return f"`{row['function']}` {first} → {last}"
    return ""


def _unrewarded(
    columns: Mapping[str, Sequence[float]], drivers: Sequence[Mapping[str, Any]]
) -> str:
    """Returns a sentence on the first reward function that no completion earns, though no other one
    has more weight: its mean over the run is near 0 (the row "unrewarded"). A function with values
    below 0 does not count. Returns '' if there is none, or only one function."""
    functions = drivers[1:]
    if len(functions) < 2:
        return ""
    heaviest = max(row["weight"] or 0 for row in functions)
    rule = row_named("unrewarded")
    for row in functions:
        known = np.array(columns[f"rewards/{row['function']}"])
        known = known[~np.isnan(known)]
        if row["weight"] != heaviest or not len(known) or known.min() < 0:
            continue
        mean = float(known.mean())
        figure = Figure("function_mean_by_step", mean, steps=len(known), subject=row["function"])
        if rule.holds(figure):
            return rule.sentence(figure)
    return ""
