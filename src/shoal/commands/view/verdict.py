"""One sentence on a run: whether it learns, what drives the reward, whether the reward is being
hacked.

It follows from intervals: a change of accuracy from the number of questions of both evaluations, a
change of the reward from the spread of the steps at both ends of the run. What lies within an
interval is no change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.report.figures import number_text
from shoal.report.watch import RARE
from shoal.text import count

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
            f"differ"
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
                f"{accuracy.shares} "
                "is within noise"
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
        f"noise",
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
