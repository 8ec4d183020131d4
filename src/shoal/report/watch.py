"""Warnings while a run trains: computes figures of each step and evaluation for
`runs/diagnosis.py`, and notes which of its findings were given already.

Each warning is given once, with the key that helps; some say that the run is hopeless.
`train.on_warning` acts on all of them, so a warning about rewards, completions, updates or accuracy
should be a row of that table. If the row's figure is a metric of a step, nothing is needed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.findings import Finding, Level
from shoal.records import Failure, Group
from shoal.runs.diagnosis import ROWS, SKIPPED_UPDATES, SYMPTOMS, Figure, Row, diagnose
from shoal.runs.metrics import (
    ENVIRONMENT,
    known_mean,
    paired_interval,
    share_change_interval,
)
from shoal.runs.recipe import Position
from shoal.text import count


def step_figures(metrics: Mapping[str, float]) -> dict[str, Figure]:
    """Returns name -> figure for one step: each of its metrics that is not None, and the figures
    that ROWS judge but that are no metrics. Those that are of some steps only are absent in others.

    skipped_not_finite: number of skipped updates, without those that only halve the loss scale
    skipped_without_an_update: the same, in a step of which no update was applied
    unchanged_after_an_update: number of publications without new weights, after an update
    truncated_where_updated: share of truncated completions, in a step without skipped updates
    gradient_of_differing_rewards: norm of the gradient, in a step with such groups
    """
    figures = {}
    for name, value in metrics.items():
        # None: nothing was measured, for example because there are no rewards
        if value is not None:
            figures[name] = Figure(name, value)
    skipped = metrics.get("update/skipped", 0)
    # Overflows are not counted: a smaller loss scale solves them, and float16 begins with a few.
    not_finite = skipped - metrics.get("update/overflows", 0)
    derived = [Figure("skipped_not_finite", not_finite)]
    if metrics.get("update/count", 0) == 0:
        derived.append(Figure("skipped_without_an_update", not_finite, steps=not_finite))
    else:
        unchanged = metrics.get("version/unchanged", 0)
        derived.append(Figure("unchanged_after_an_update", unchanged))
    if not skipped and "completions/truncated" in metrics:
        derived.append(Figure("truncated_where_updated", metrics["completions/truncated"]))
    if metrics.get("groups/nonzero_std") and metrics.get("grad_norm") is not None:
        derived.append(Figure("gradient_of_differing_rewards", metrics["grad_norm"]))
    for figure in derived:
        figures[figure.name] = figure
    return figures


@dataclass
class Watch:
    """Reads each step's metrics and groups, and each evaluation, and returns new warnings, each
    once."""

    # name of a row -> [number of successive steps in which its bound was passed, the first of them]
    streaks: dict[str, list[float]] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)  # names of warnings that were given already
    # name of a reward function -> [min, max, steps, completions, completions that are not 0]
    rewards: dict[str, list[float]] = field(default_factory=dict)
    # row of the data -> mean reward of its answers in the first evaluation; {} if there was none,
    # or if the task has an accuracy
    first_answers: dict[int, float] = field(default_factory=dict)

    @property
    def first_skipped_step(self) -> int | None:
        """The step in which the current series of skipped updates began; None if the update of the
        last step was applied, or only halved the loss scale."""
        streak = self.streaks.get(SKIPPED_UPDATES)
        if streak is None:
            return None
        _, first = streak
        return int(first)

    def step(
        self, number: int, metrics: Mapping[str, float], groups: Sequence[Group]
    ) -> list[Finding]:
        """Reads step `number` (from 1), and returns the findings that it gives for the first time:
        those of rows that now apply for enough steps in a row, and those on each reward function.
        For a row whose figure the step lacks, or whose bound it does not pass, the steps in a row
        begin again. The findings' level is "wrong" if training cannot recover, else "warning"."""
        findings = []
        figures = step_figures(metrics)
        for row in ROWS:
            figure = figures.get(row.figure)
            if figure is None or not row.is_beyond_bound(figure.value):
                self.streaks.pop(row.name, None)
                continue
            # A figure counts as `figure.steps` steps: skipped updates count one by one.
            steps_before, first = self.streaks.get(row.name, [0, number])
            steps = steps_before + figure.steps
            self.streaks[row.name] = [steps, first]
            if steps >= row.steps:
                findings += self._once(row, figure)
        functions = {name for group in groups for name in group.reward_components}
        for function in sorted(functions):
            values = [group.reward_components[function] for group in groups]
            valid = [group.valid for group in groups]
            findings += self._reward(function, np.concatenate(values), np.concatenate(valid))
        return findings

    def _reward(self, function: str, values: np.ndarray, valid: np.ndarray) -> list[Finding]:
        """Adds a step's values of a reward function (NaN: not scored) to what is known of it, and
        returns the new findings that all its values so far show. `valid`: False for a completion
        that has no reward, from any function."""
        low, high, steps, count, nonzero = self.rewards.get(function, [np.inf, -np.inf, 0, 0, 0])
        known = values[~np.isnan(values)]
        if known.size:
            low = min(low, float(known.min()))
            high = max(high, float(known.max()))
            steps += 1
            count += known.size
            nonzero += np.count_nonzero(known)
        if np.isnan(values[valid]).any():  # it adds 0 to the reward of those that others scored
            low = min(low, 0.0)
            high = max(high, 0.0)
        self.rewards[function] = [low, high, steps, count, int(nonzero)]
        if not count:
            return []
        words = {"low": low, "zeros": count - nonzero}
        figures = [
            Figure(
                name="function_range",
                value=high - low,
                steps=steps,
                groups=0,
                completions=int(count),
                subject=function,
                words=words,
            )
        ]
        if low == 0:  # not for a penalty, which is below 0
            share = nonzero / count
            figures.append(
                Figure(
                    name="function_share_above_0",
                    value=share,
                    steps=steps,
                    groups=0,
                    completions=int(count),
                    subject=function,
                    words=words,
                )
            )
        return self._findings(figures)

    def failures(self, failures: Sequence[Failure]) -> list[Finding]:
        """Returns a warning, with the first example, for each new way (function and kind) in which
        a reward function or an environment failed; each is given once in a run."""
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
        """Returns a list with a warning if accuracy on a data set is lower than in the first
        evaluation, beyond the 95% interval of the difference (`share_change_interval`), from which
        the page of the run judges too; else [], and [] if that was warned of before, or if one of
        the evaluations has no interval. `first`, `now`: the figures of version 0 and of
        `version`."""
        shares = []
        for figures in (first, now):
            interval = figures.get("accuracy_interval")
            accuracy = figures.get("accuracy")
            if accuracy is None or not interval:
                return []
            shares.append((accuracy, interval[0], interval[1]))
        before, after = shares
        _, high = share_change_interval(before, after)
        name = "accuracy_below_first"
        reward_before = first.get("mean_reward")
        reward = now.get("mean_reward")
        # None: there are no rewards.
        if reward is not None and reward_before is not None and reward > reward_before:
            name = "accuracy_below_first_while_reward_rises"
        words = {"version": version, "before": before[0], "after": after[0]}
        words["points"] = -100 * high
        return self._findings([Figure(name, -high, words=words)])

    def answers(self, version: int, answers: Sequence[Group]) -> list[Finding]:
        """Returns a list with a warning if the mean reward of the questions of a data set is lower
        than in the first evaluation, beyond the noise of the change of each (`paired_interval`);
        else [], and [] if that was warned of before. The first call only notes the answers.

        `answers`: a group for each question, with the answers of `version`, of a task that has no
        accuracy: of one that has, `evaluation` judges that."""
        rewards = {}
        for group in answers:
            mean = known_mean(group.rewards[group.valid])
            if mean is not None:
                rewards[group.example.row] = mean
        if not self.first_answers:
            self.first_answers = rewards
            return []
        questions = sorted(rewards.keys() & self.first_answers.keys())
        interval = paired_interval([rewards[row] - self.first_answers[row] for row in questions])
        if interval is None:
            return []
        _, high = interval
        words = {
            "version": version,
            "questions": count(len(questions), "question"),
            "before": known_mean(self.first_answers[row] for row in questions),
            "after": known_mean(rewards[row] for row in questions),
        }
        return self._findings([Figure("mean_reward_drop", -high, words=words)])

    def recipe(self, position: Position) -> list[Finding]:
        """Returns a list with a warning if an evaluation lies below the band of the run's recipe;
        else [], and [] if that was warned of before."""
        words = {"text": position.text, "differs": position.differs}
        return self._findings([Figure("recipe_shortfall", position.shortfall, words=words)])

    def _findings(self, figures: Sequence[Figure]) -> list[Finding]:
        """Returns the findings that these figures show, in the order of ROWS, without those that
        were given before; one of level "wrong" is returned each time."""
        findings = []
        for diagnosis in diagnose(figures):
            findings += self._once(diagnosis.row, diagnosis.figure)
        return findings

    def _once(self, row: Row, figure: Figure) -> list[Finding]:
        """Returns a list with the finding of a row on a figure, and notes that it was given; [] if
        it was given before. A finding of level "wrong" is always returned, and not noted; any other
        has the level "warning"."""
        name = f"{row.name} {figure.subject}".strip()
        if name in self.given:
            return []
        if row.level != "wrong":  # not noted, so that a resumed run ends again
            self.given.add(name)
        level: Level = "wrong" if row.level == "wrong" else "warning"
        text = row.sentence(figure)
        if row.symptom:
            text += f" (docs/{SYMPTOMS}#{row.symptom})"
        return [Finding("training", level, text, row.key)]

    def state(self) -> dict[str, Any]:
        """Returns what was seen and given so far, which a checkpoint stores for `restore`, as
        JSON."""
        return {
            "in_a_row": dict(self.streaks),
            "given": sorted(self.given),
            "rewards": dict(self.rewards),
            "first_answers": list(self.first_answers.items()),  # JSON has no numbers as keys
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets the state from a checkpoint (`state`); what was seen before is dropped."""
        self.streaks = dict(state["in_a_row"])
        self.given = set(state["given"])
        self.rewards = {name: list(values) for name, values in state["rewards"].items()}
        self.first_answers = dict(state.get("first_answers", ()))
