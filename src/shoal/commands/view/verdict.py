"""The verdict on a run in one sentence, and how much each reward function contributes to the change
of the reward.

    drivers(columns, weights, ...)   how much each reward function adds to the change of the reward
    accuracy_change, paired_change   changes in evaluations, with their confidence intervals
    reward_change                    that of the reward in training
    verdict(...)                     learns, learns nothing, looks hacked, or too early to say

Changes in training are differences between the means of the first and the last steps. Bounds of
warnings that `runs/diagnosis.py` has a row for are those of the row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shoal.runs.diagnosis import Figure, row_named
from shoal.runs.group_table import Added
from shoal.runs.lines import rounded
from shoal.runs.metrics import (
    FEWEST_PAIRS,
    known_mean,
    paired_interval,
    share_change_interval,
)
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
    size: int = 0  # number of questions, or of steps at each end, that it rests on

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
    newest evaluation."""
    if len(curve.get("x", ())) < 2:
        return None
    if curve["low"][first] is None or curve["low"][last] is None:
        return None
    before = (curve["y"][first], curve["low"][first], curve["high"][first])
    after = (curve["y"][last], curve["low"][last], curve["high"][last])
    low, high = share_change_interval(before, after)
    return Change(before[0], after[0], low, high)


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
    return Change(before, after, difference - half - 1e-6, difference + half + 1e-6, part)


def paired_change(before: Mapping[int, float], after: Mapping[int, float]) -> Change | None:
    """Returns the change of the mean reward over the questions that two evaluations have in common,
    with its 99% interval (`paired_interval`), which is of the change of each question: questions
    that are hard before and after add no noise. None if there are fewer than FEWEST_PAIRS.
    `before`, `after`: row of the data -> reward."""
    questions = sorted(before.keys() & after.keys())
    interval = paired_interval([after[row] - before[row] for row in questions])
    if interval is None:
        return None
    size = len(questions)
    mean_before = math.fsum(before[row] for row in questions) / size
    mean_after = math.fsum(after[row] for row in questions) / size
    return Change(mean_before, mean_after, *interval, size)


# ---- what moves the reward


def drivers(
    columns: Mapping[str, Sequence[float]],
    weights: Mapping[str, float],
    added: Mapping[str, Sequence[Added | None]] | None = None,
) -> list[dict[str, Any]]:
    """Returns what moved the reward: a row for the reward itself, then one for each reward function
    (`_driver`), those first whose change adds most to that of the reward or takes most from it.
    Returns [] if there are fewer than 4 steps or no reward functions.

    `columns`: metrics by step; `weights`: function -> weight, as stored with the groups. `added`:
    for each function that does not score all completions what it adds, by step, None where that is
    unknown. Its metric is a mean over those that it scored, which moves apart from what it adds."""
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
        weight = weights.get(function)
        of_function = (added or {}).get(function)
        rows.append(_driver(function, columns[name], weight, ends(size), of_function))
    rows.sort(key=lambda row: -abs(row["adds"] or 0))  # without a weight: last
    return [_driver("reward", columns["reward/mean"], 1.0, ends(size)), *rows]


def _driver(
    function: str,
    values: Sequence[float],
    weight: float | None,
    part: int,
    added: Sequence[Added | None] | None = None,
) -> dict[str, Any]:
    """Returns the row of one reward function (`function`, its name): its means over the `first` and
    the `last` steps (of each end `part` steps, `over` in the row), its `weight`, the `sign` of the
    change (0 within noise), and `adds`, the change times the weight. A mean, weight or `adds` that
    is unknown is None.

    With `added` the change is that of the mean over all completions, with 0 where the function
    returned None, and `scored` has the shares that it scored at both ends; else `scored` is
    None."""
    first = _rounded_mean(values[:part])
    last = _rounded_mean(values[-part:])
    before = first
    after = last
    scored = None
    if added is not None:
        values = [step.mean if step else math.nan for step in added]
        before = known_mean(values[:part])
        after = known_mean(values[-part:])
        shares = [step.scored if step else math.nan for step in added]
        scored = [_rounded_mean(shares[:part]), _rounded_mean(shares[-part:])]
    change = None
    if before is not None and after is not None:
        change = after - before
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
        "scored": scored,
    }


def _rounded_mean(values: Sequence[float]) -> float | None:
    mean = known_mean(values)
    return rounded(mean) if mean else mean


# ---- the verdict


@dataclass(frozen=True)
class Quantity:
    """A quantity that has changed, as the page names it."""

    name: str  # "accuracy", "held_out mean reward" or "reward in training"
    change: Change
    sample: str  # what the interval rests on: "500 questions"
    confidence: int = 99  # of the interval, in percent

    @property
    def is_accuracy(self) -> bool:
        return self.name == "accuracy"

    @property
    def figures(self) -> str:
        """Returns name and figure before and after, like `held_out mean reward 0.12 → 0.345`."""
        change = self.change
        return f"{self.name} {change.shares if self.is_accuracy else change.numbers}"

    @property
    def interval(self) -> str:
        """Returns name and interval of the change: `accuracy +5.0 to +12.1 points (95%, ...)`."""
        change = self.change
        if self.is_accuracy:
            ends = f"{100 * change.low:+.1f} to {100 * change.high:+.1f} points"
        else:
            ends = f"{change.low:+.2g} to {change.high:+.2g}"
        return f"{self.name} {ends} ({self.confidence}%, {self.sample})"

    @property
    def may_have_gained(self) -> bool:
        """True if the interval is so wide that a gain that matters is possible: LITTLE of accuracy,
        half of a reward."""
        change = self.change
        if self.is_accuracy:
            return change.high >= LITTLE
        return change.high > max(abs(change.before) / 2, abs(change.after) / 2, 1e-5)


def evaluated_quantity(
    figure: str, curve: Mapping[str, Sequence[Any]], paired: Change | None
) -> Quantity | None:
    """Returns how the main figure of the evaluations has changed: the accuracy, else the mean
    reward. None if that is unknown. `figure`, `curve`: its name and curve; `paired`: the change of
    a mean reward (`paired_change`)."""
    if figure.endswith("/accuracy"):
        change = accuracy_change(curve)
        if change is None:
            return None
        return Quantity("accuracy", change, _questions(curve["n"][-1]), confidence=95)
    if paired is None:
        return None
    data_set = figure.removeprefix("evaluate/").removesuffix("/mean_reward")
    sample = f"{_questions(paired.size)}, each before and after"
    return Quantity(f"{data_set} mean reward", paired, sample)


def _questions(number: float | None) -> str:
    """Returns the number of questions of an evaluation as text."""
    if number is None or not math.isfinite(number):
        return "an unknown number of questions"
    return count(int(number), "question")


def _trained_quantity(rewards: Sequence[float]) -> Quantity | None:
    """Returns how the reward in training has changed (`reward_change`); None if unknown."""
    change = reward_change(rewards)
    if change is None:
        return None
    return Quantity("reward in training", change, f"first and last {count(change.size, 'step')}")


def verdict(
    figure: str,
    curve: Mapping[str, Sequence[Any]],
    paired: Change | None,
    columns: Mapping[str, Sequence[float]],
    drivers: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    steps: int,
    total: int | None,
) -> dict[str, str]:
    """Returns the verdict on a run: `level` (good, note, warning, bad or none), `text` (the
    sentence), and `detail` (the intervals as text, "" if none is known).

    One quantity decides, and the sentence names it and has its figures before and after: that of
    the evaluations, if its interval is known (`evaluated_quantity`), else the reward in training,
    at the first and at the last steps. If the evaluations cannot tell, the sentence may also give
    the reward in training. The detail has the intervals of what the sentence names.

    `figure`, `curve`: name and curve of the evaluations' main figure; `paired`: the change of that,
    if it is a mean reward (`paired_change`); `columns`: metrics by step; `drivers`: the result of
    the function `drivers`; `events`: records of spikes, warnings and the like; `steps`: the number
    made so far, of `total` (None if unknown)."""
    # Each is None if there is too little to tell.
    evaluated = evaluated_quantity(figure, curve, paired)
    trained = _trained_quantity(columns.get("reward/mean", ()))
    # Early in a run, the compared ends have few steps, and may both lie within one jump. Without
    # `total` only the next condition decides.
    is_early = steps <= (total or 0) / (2 if _is_awaited(figure, curve) else 4)
    if evaluated is None and steps < 4 * PART_STEPS:
        is_early = True
    lost = _lost(columns, drivers)
    made = count(steps, "step")
    level, text, quantities = _sentence(curve, evaluated, trained, drivers, lost, made, is_early)
    if level == "bad":
        text += _collapse(events)
    if text.startswith(("does not learn", "too early")):
        text += _few_mixed_groups(columns)
    if level != "good":
        unrewarded = _unrewarded(columns, drivers)
        if unrewarded:
            level = "bad" if level == "bad" else "warning"
            text += f"; {unrewarded}"
    intervals = [quantity.interval for quantity in quantities if quantity]
    detail = ""
    if intervals:
        detail = f"Interval of the change: {', '.join(intervals)}."
    return {"level": level, "text": text, "detail": detail}


def _is_awaited(figure: str, curve: Mapping[str, Sequence[Any]]) -> bool:
    """True if there is one evaluation, and the next one will say more than rewards in training do,
    because it has enough questions."""
    if len(curve.get("x", ())) != 1:
        return False
    if figure.endswith("/accuracy"):
        return curve["low"][0] is not None
    return (curve["n"][0] or 0) >= FEWEST_PAIRS


Sentence: TypeAlias = "tuple[str, str, Sequence[Quantity | None]]"
"""(level, text, the quantities that the text is about) of a verdict."""


def _sentence(
    curve: Mapping[str, Sequence[Any]],
    evaluated: Quantity | None,
    trained: Quantity | None,
    drivers: Sequence[Mapping[str, Any]],
    lost: str,
    made: str,
    is_early: bool,
) -> Sentence:
    """Returns the verdict from the changes in evaluations and in training (None: unknown). The
    evaluations decide if their figure has changed beyond noise, else the reward in training does,
    else `_without_a_change`. `lost`: the result of `_lost`. `made`: the number of steps so far, as
    text. `is_early`: True if too few steps were made to say that a run does not learn."""
    name = _strongest_driver(drivers)
    driven = f", driven by {name}" if name else ""
    by_driver = f" by {name}" if name else ""
    rise = ""
    has_risen = has_fallen = False
    if trained:
        rise = f"{trained.name} {trained.change.after - trained.change.before:+.2f}"
        has_risen = trained.change.sign > 0
        has_fallen = trained.change.sign < 0
    if evaluated and evaluated.change.sign > 0:
        return _gain(curve, evaluated, driven)
    if evaluated and evaluated.change.sign < 0:
        change = evaluated.change
        if has_risen and evaluated.is_accuracy:
            points = f"{100 * (change.after - change.before):+.1f} points"
            text = f"{rise}, accuracy {points}: looks hacked{by_driver}"
            return "bad", text, (evaluated, trained)
        text = f"got worse: {evaluated.figures} in {_measured_over(curve)}"
        if has_risen:
            return "bad", f"{text}, though {rise}{driven}", (evaluated, trained)
        return "bad", text, (evaluated,)
    if trained and has_risen:
        if lost and name:
            return "bad", f"{rise} in {made}, {lost}: looks hacked by {name}", (trained,)
        rises = f"the reward rises: {trained.figures} in {made}{driven}"
        if evaluated is None:
            return "note", f"{rises}; accuracy is not measured", (trained,)
        if evaluated.may_have_gained:
            text = f"{rises}; {evaluated.figures}, from too few questions to tell"
            return "note", text, (trained, evaluated)
        but = "not in evaluations"
        if evaluated.is_accuracy:
            but = "hardly more right answers"
        text = f"{rise} in {made}{driven}, but {but}: {evaluated.figures} is within noise"
        return "warning", text, (evaluated, trained)
    if trained and has_fallen:
        text = f"got worse: {trained.figures} in {made}"
        if evaluated:
            text += f"; {evaluated.figures} is within noise"
        return "bad", text, (trained, evaluated)
    return _without_a_change(evaluated, trained, made, is_early)


def _gain(curve: Mapping[str, Sequence[Any]], evaluated: Quantity, driven: str) -> Sentence:
    """Returns the verdict on a run whose evaluations have risen beyond noise. `driven`: the end of
    the sentence on what moves the reward, or ""."""
    measured = _measured_over(curve)
    if not evaluated.is_accuracy:
        rises = f"the reward rises: {evaluated.figures} in {measured}{driven}"
        return "note", f"{rises}; accuracy is not measured", (evaluated,)
    # Position of the evaluation whose interval has the highest lower end.
    best = max(range(len(curve["x"])), key=lambda position: curve["low"][position] or 0)
    # An earlier evaluation was better than the newest beyond the noise of both.
    if (curve["low"][best] or 0) > curve["high"][-1]:
        text = (
            f"learned and lost again: {evaluated.figures} in {measured}, but "
            f"{curve['y'][best]:.1%} at step {curve['x'][best]}"
        )
        return "warning", text, (evaluated,)
    return "good", f"learns: {evaluated.figures} in {measured}{driven}", (evaluated,)


def _measured_over(curve: Mapping[str, Sequence[Any]]) -> str:
    """Returns how many steps are between the first and the newest evaluation, like `40 steps`. The
    first may be of a later version than 0 (train.evaluate_first)."""
    return count(curve["x"][-1] - curve["x"][0], "step")


def _without_a_change(
    evaluated: Quantity | None, trained: Quantity | None, made: str, is_early: bool
) -> Sentence:
    """Returns the verdict if nothing has changed beyond noise: "too early to say" if a gain may
    still be hidden in the noise, else "does not learn". It is about the evaluations if their change
    is known, else about the reward in training."""
    quantity = evaluated or trained
    if trained is None or is_early or (quantity and quantity.may_have_gained):
        figures = [evaluated.figures] if evaluated else []
        return "none", f"too early to say: {', '.join([made, *figures])}", (quantity,)
    assert quantity is not None  # `trained` is not
    return "warning", f"does not learn: {quantity.figures} in {made}, within noise", (quantity,)


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
        if row["first"] is None or row["last"] is None:  # it scored nothing there
            continue
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
