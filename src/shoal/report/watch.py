"""Warnings of how training goes: figures of each step and evaluation for `runs/diagnosis.py`, and
which of its findings were given already.

Each is given once, with the key that helps; some say that the run is hopeless. `train.on_warning`
acts on them all, so a warning about rewards, completions, updates or accuracy is a row of that
table: one whose figure is a metric of a step needs nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.findings import Finding, Level
from shoal.records import Failure, Group
from shoal.runs.diagnosis import ROWS, Figure, Row, diagnose
from shoal.runs.metrics import ENVIRONMENT


def step_figures(metrics: Mapping[str, float]) -> dict[str, Figure]:
    """A step's metrics as figures by name, and those that say more than one metric does."""
    figures = {}
    for name, value in metrics.items():
        if value is not None:  # nothing was measured: no reward judged, for one
            figures[name] = Figure(name, value)
    skipped = metrics.get("update/skipped", 0)
    # A smaller loss scale is to solve these: float16 begins with a few.
    not_finite = skipped - metrics.get("update/overflows", 0)
    derived = [Figure("skipped_not_finite", not_finite)]
    if metrics.get("update/count", 0) == 0:
        derived.append(Figure("skipped_without_an_update", not_finite, steps=not_finite))
    else:
        unchanged = metrics.get("version/unchanged", 0)
        derived.append(Figure("unchanged_after_an_update", unchanged))
    if not skipped and "completions/truncated" in metrics:
        derived.append(Figure("truncated_where_updated", metrics["completions/truncated"]))
    for figure in derived:
        figures[figure.name] = figure
    return figures


@dataclass
class Watch:
    """Reads each step's metrics and groups, and each evaluation; returns what is to be warned of,
    each once."""

    # Row -> steps in a row in which it held, and the first of them.
    in_a_row: dict[str, list[float]] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)  # warnings that were given already
    # Function -> min, max, steps, completions, completions that are not 0.
    rewards: dict[str, list[float]] = field(default_factory=dict)

    def step(
        self, number: int, metrics: Mapping[str, float], groups: Sequence[Group]
    ) -> list[Finding]:
        """The warnings that step `number` (from 1) brings; `wrong` where training cannot
        recover."""
        findings = []
        figures = step_figures(metrics)
        for row in ROWS:
            figure = figures.get(row.figure)
            if figure is None or not row.is_passed(figure.value):
                self.in_a_row.pop(row.name, None)
                continue
            steps_before, first = self.in_a_row.get(row.name, [0, number])
            steps = steps_before + figure.steps
            self.in_a_row[row.name] = [steps, first]
            if steps >= row.steps:
                findings += self._once(row, figure)
        functions = {name for group in groups for name in group.reward_components}
        for function in sorted(functions):
            values = [group.reward_components[function] for group in groups]
            findings += self._reward(function, np.concatenate(values))
        return findings

    def _reward(self, function: str, values: np.ndarray) -> list[Finding]:
        """Adds a step's values of a reward function, and returns what all of them show."""
        low, high, steps, count, others = self.rewards.get(function, [np.inf, -np.inf, 0, 0, 0])
        known = values[~np.isnan(values)]
        if known.size:
            low = min(low, float(known.min()))
            high = max(high, float(known.max()))
            steps += 1
            count += known.size
            others += np.count_nonzero(known)
        self.rewards[function] = [low, high, steps, count, int(others)]
        if not count:
            return []
        words = {"low": low, "zeros": count - others}
        figures = [Figure("function_range", high - low, steps, 0, int(count), function, words)]
        if low == 0:  # not a penalty, below 0
            share = others / count
            figures.append(
                Figure("function_share_above_0", share, steps, 0, int(count), function, words)
            )
        return self._findings(figures)

    def failures(self, failures: Sequence[Failure]) -> list[Finding]:
        """Warns with the first example of each way in which a reward function, or an environment,
        failed."""
        findings = []
        for failure in failures:
            name = f"failed {failure.function}: {failure.kind}"
            if name in self.given:
                continue
            self.given.add(name)
            key = "reward.on_error"
            if failure.function == ENVIRONMENT:
                key = "environment.on_error"
            findings.append(Finding("training", "warning", failure.text, key))
        return findings

    def evaluation(
        self, version: int, first: Mapping[str, Any], now: Mapping[str, Any]
    ) -> list[Finding]:
        """Warns where accuracy on a set has fallen below the 95% interval that it had before
        training; that of other questions, as in a quick evaluation, where its whole interval
        has."""
        low_before = (first.get("accuracy_interval") or [None])[0]
        accuracy = now.get("accuracy")
        highest = accuracy
        if first.get("num_questions") != now.get("num_questions"):
            highest = (now.get("accuracy_interval") or (None, None))[1]
        if low_before is None or accuracy is None or highest is None:
            return []
        name = "accuracy_below_first"
        reward_before = first.get("mean_reward")
        reward = now.get("mean_reward")
        # None: no reward judged.
        if reward is not None and reward_before is not None and reward > reward_before:
            name = "accuracy_below_first_while_reward_rises"
        words = {"version": version, "accuracy": accuracy, "low": low_before}
        return self._findings([Figure(name, low_before - highest, words=words)])

    def _findings(self, figures: Sequence[Figure]) -> list[Finding]:
        findings = []
        for diagnosis in diagnose(figures):
            findings += self._once(diagnosis.row, diagnosis.figure)
        return findings

    def _once(self, row: Row, figure: Figure) -> list[Finding]:
        name = f"{row.name} {figure.subject}".strip()
        if name in self.given:
            return []
        if row.level != "wrong":  # a run that was resumed ends again
            self.given.add(name)
        level: Level = "wrong" if row.level == "wrong" else "warning"
        return [Finding("training", level, row.sentence(figure), row.key)]

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON."""
        return {
            "in_a_row": dict(self.in_a_row),
            "given": sorted(self.given),
            "rewards": dict(self.rewards),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.in_a_row = dict(state["in_a_row"])
        self.given = set(state["given"])
        self.rewards = {name: list(values) for name, values in state["rewards"].items()}
