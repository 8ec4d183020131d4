"""What a run leaves behind and shows: each step's metrics and groups, evaluations, the summary."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.report.console import Console, SolvedProblem
from shoal.report.folder import RunFolder
from shoal.report.metrics import MetricSet
from shoal.trainer.prompts import PromptStream
from shoal.trainer.update import Outcome
from shoal.types import Group, StopReason

Figures = Mapping[str, Mapping[str, Any]]


@dataclass
class Recorder:
    """Turns what happened into metrics, files and lines on the screen.

    `read_clock` gives the sampler's seconds and tokens since last asked, `compilations` the programs compiled so far.
    """

    folder: RunFolder
    console: Console
    prompts: PromptStream
    steps: int
    keep_groups: bool
    read_clock: Callable[[], Any]
    compilations: Callable[[], int]
    peak_bytes: Callable[[], int]
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    started: float = field(default_factory=time.perf_counter)
    _dropped: int = 0

    def begin_training(self) -> None:
        if self.steps:
            self.console.heading(f"training, {self.steps} steps")

    def spent(self, phase: str, seconds: float) -> None:
        self.seconds[phase] += seconds

    def step(self, step: int, groups: Sequence[Group], outcome: Outcome, seconds: float) -> dict[str, float]:
        """Files the step under `step + 1`: the number of updates made."""
        metrics, clock = outcome.metrics, self.read_clock()
        group_metrics(groups, outcome, metrics)
        metrics.add("version", step + 1)
        metrics.add("prompts/dropped", self.prompts.dropped - self._dropped)
        self._dropped = self.prompts.dropped
        for name, values in clock.logged.items():
            metrics.add(f"rewards/logged/{name}", sum(values), len(values))
        metrics.add("tokens/sampled", clock.tokens)
        metrics.add("time/sample_seconds", clock.sample_seconds)
        metrics.add("time/reward_seconds", clock.reward_seconds)
        metrics.add("throughput/sample_tokens_per_second", clock.tokens, clock.sample_seconds)
        metrics.add("time/step_seconds", seconds)
        metrics.add("memory/peak_bytes", self.peak_bytes())
        metrics.add("compilations", self.compilations())
        result = metrics.result()
        self._sum_up(result, seconds)
        started = time.perf_counter()
        self.folder.write_metrics(step + 1, result)
        if self.keep_groups:
            self.folder.write_groups(step + 1, groups, outcome.table.advantages, token_arrays(groups, outcome))
        self.spent("record", time.perf_counter() - started)
        self.console.step(step + 1, self.steps, result)
        self._warn(result, step + 1)
        return result

    def _sum_up(self, result: Mapping[str, float], seconds: float) -> None:
        for phase in ("sample", "reward", "update"):
            self.seconds[phase] += result[f"time/{phase}_seconds"]
        self.seconds["training"] += seconds
        for name in ("tokens/sampled", "tokens/trained"):
            self.totals[name] += result[name]

    def _warn(self, result: Mapping[str, float], step: int) -> None:
        if result.get("update/skipped"):
            self.console.warning("an update was skipped: its gradient was not finite (metric update/skipped)")
        if result.get("groups/invalid"):
            self.console.warning("groups without two scorable completions were met (metric groups/invalid)")

    def evaluation(self, version: int, figures: Figures, groups: Sequence[Group], seconds: float) -> None:
        self.spent("evaluate", seconds)
        self.read_clock()  # an evaluation's tokens are not the next step's
        self.console.heading(f"evaluation of version {version}")
        for subset, values in figures.items():
            self.console.evaluation(subset, values)
            self.folder.write_evaluation(version, subset, values)
            if self.keep_groups:
                self.folder.write_groups(version, [group for group in groups if group.subset == subset])

    def finish(self, before: Figures, after: Figures, answers_before: Sequence[Group],
               answers_after: Sequence[Group]) -> dict[str, Any]:
        main = next(iter(after), None)
        phases = dict(self.seconds)
        training = phases.pop("training", 0.0)
        summary = {
            "accuracy_before": before[main].get("accuracy") if main else None,
            "accuracy_after": after[main].get("accuracy") if main else None,
            "num_questions": after[main]["num_questions"] if main else 0,
            "protocol": after[main]["protocol"] if main else None,
            "steps": self.steps,
            "before": before,
            "after": after,
            "seconds_total": time.perf_counter() - self.started,
            "seconds_by_phase": phases,
            "seconds_training": training,
            "sample_tokens_per_second": _ratio(self.totals["tokens/sampled"], phases.get("sample", 0.0)),
            "train_tokens_per_second": _ratio(self.totals["tokens/trained"], phases.get("update", 0.0)),
            "num_compilations": self.compilations(),
            "prompts_dropped": self.prompts.dropped,
            "run_folder": str(self.folder.path),
        }
        facts = {name: summary[name] for name in
                 ("seconds_total", "sample_tokens_per_second", "train_tokens_per_second", "num_compilations")}
        self.console.heading("before and after")
        self.console.summary(before, after, solved_problem(answers_before, answers_after), facts)
        self.folder.write_summary(summary)
        return summary


def group_metrics(groups: Sequence[Group], outcome: Outcome, metrics: MetricSet) -> None:
    """Rewards, lengths, ends and staleness of a step's groups."""
    table = outcome.table
    valid = table.valid
    metrics.add("reward/mean", table.rewards[valid].sum(), valid.sum())
    for rewards, mask in zip(table.rewards, valid, strict=True):
        if mask.any():
            metrics.add("reward/std", rewards[mask].std())
    for group in groups:
        for name, values in group.reward_components.items():
            known = ~np.isnan(values)
            metrics.add(f"rewards/{name}", values[known].sum(), known.sum())
    metrics.add("groups/informative", table.informative.sum(), len(groups))
    metrics.add("groups/invalid", int((valid.sum(1) < 2).sum()))
    metrics.add("advantage/abs_mean", np.abs(table.advantages[valid]).sum(), valid.sum())
    completions = [completion for group in groups for completion in group.completions]
    for completion in completions:
        for name in ("length_mean", "length_min", "length_max"):
            metrics.add(f"completions/{name}", len(completion))
        metrics.add("completions/cut", completion.stop_reason == StopReason.LENGTH)
        for reason in (StopReason.EOS, StopReason.STOP, StopReason.LENGTH):
            metrics.add(f"completions/stop_{reason.value}", completion.stop_reason == reason)
    metrics.add("prompts/length_mean", sum(len(group.prompt_ids) for group in groups), len(groups))
    stale = [group.step - int(version) for group in groups for c in group.completions for version in c.versions]
    metrics.add("staleness", sum(stale), len(stale))


def token_arrays(groups: Sequence[Group], outcome: Outcome) -> list[list[dict[str, Any] | None]]:
    """The trainer's log-probs by group and completion; None where a completion did not enter the update."""

    def of(group: int, index: int) -> dict[str, Any] | None:
        values = outcome.logprobs.get((group, index))
        return None if values is None else {"trainer_logprobs": values}

    return [[of(number, index) for index in range(group.size)] for number, group in enumerate(groups)]


def solved_problem(before: Sequence[Group], after: Sequence[Group]) -> SolvedProblem | None:
    """The first question that was answered wrongly before and rightly after."""
    for old, new in zip(before, after, strict=True):
        if old.correct is not None and new.correct is not None and not old.correct[0] and new.correct[0]:
            return SolvedProblem(new.example.prompt, old.texts[0], new.texts[0])
    return None


def _ratio(value: float, seconds: float) -> float | None:
    return value / seconds if seconds else None
