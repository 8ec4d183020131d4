"""What a run leaves behind and shows: each step's metrics and groups, evaluations, the summary."""

from __future__ import annotations

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.config.schema import Config
from shoal.report.console import Console, SolvedProblem
from shoal.report.folder import RunFolder
from shoal.report.metrics import MetricSet, logged_name
from shoal.report.sink import Sink, evaluation_scalars
from shoal.tasks.task import FROM_PYTHON, ROWS
from shoal.trainer.curriculum import PromptStream
from shoal.trainer.update import UpdateResult
from shoal.trainer.utilisation import Utilisation
from shoal.types import Group, StopReason

Figures = Mapping[str, Mapping[str, Any]]
FirstAnswers = dict[str, dict[int, str]]


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
    sinks: Sequence[Sink] = ()
    utilisation: Utilisation | None = None
    started: float = field(default_factory=time.perf_counter)
    evaluations: dict[int, Figures] = field(default_factory=dict)  # version -> figures by data set
    solved: SolvedProblem | None = None
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # of rewards, by function and kind
    _first_answers: FirstAnswers = field(default_factory=dict)
    _dropped: int = 0
    _learnt: bool = False

    def begin_training(self, first: int) -> None:
        if self.steps > first:
            self.console.heading(f"training, {self.steps} steps" + (f", from step {first + 1} on" if first else ""))

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON."""
        failures = [[*key, count] for key, count in self.failures.items()]
        return {"dropped": self._dropped, "failures": failures, "seconds": dict(self.seconds),
                "totals": dict(self.totals), "seconds_total": time.perf_counter() - self.started}

    def after_save(self) -> None:
        """Files what goes with a checkpoint: the pass rates of its moment."""
        self.folder.sync()
        self.folder.write_pass_rates(self.prompts.rates.record())

    def data_exhausted(self, text: str) -> None:
        """Says once that no further step is asked for."""
        if not self._learnt:
            self._learnt = True
            self.console.note(f"{text}; training ends here")

    def restore(self, state: Mapping[str, Any], version: int, evaluated: bool) -> None:
        """Goes on after `version`: what the folder holds of later steps is taken back, evaluations are read again, that
        of `version` where it was whole."""
        self._dropped = state["dropped"]
        self.failures.update({(name, kind): count for name, kind, count in state["failures"]})
        self.seconds.update(state["seconds"])
        self.totals.update(state["totals"])
        self.started -= state["seconds_total"]
        self.folder.rewind(version, evaluated)
        if missing := self.folder.missing_steps(version):
            self.console.warning(f"metrics.jsonl lacks {len(missing)} steps up to {version}, the first is "
                                 f"{missing[0]}: they were lost, as in a power cut; the weights are as they were")
        self.evaluations.update(self.folder.read_evaluations())
        self._first_answers = self.folder.read_first_answers()

    def scores(self) -> dict[int, float]:
        """Accuracy on the main set by evaluated version; the mean reward where the task defines no right answer."""
        mains = {version: next(iter(figures.values()), {}) for version, figures in self.evaluations.items()}
        scores = {version: main.get("accuracy", main.get("mean_reward")) for version, main in mains.items()}
        return {version: score for version, score in scores.items() if score is not None}

    def stopped(self, version: int, config: Config) -> str:
        """The line that says how to go on."""
        from_python = config.task.name == ROWS or any(name.startswith(FROM_PYTHON) for name in config.reward.functions)
        how = f'shoal.train(resume="{self.folder.path}", ...), with its task and reward' if from_python else \
            f"shoal train {shlex.quote(f'resume={self.folder.path}')}"
        return f"stopped after step {version} of {self.steps}, which is saved; to go on: {how}"

    def spent(self, phase: str, seconds: float) -> None:
        self.seconds[phase] += seconds

    def step(self, step: int, groups: Sequence[Group], outcome: UpdateResult, seconds: float,
             discarded: int = 0) -> dict[str, float]:
        """Files the step under `step + 1`: the number of updates made. `discarded`: groups that others stand in for."""
        metrics, clock = outcome.metrics, self.read_clock()
        metrics.add("groups/discarded", discarded)
        group_metrics(groups, outcome, metrics)
        metrics.add("version", step + 1)
        metrics.add("prompts/dropped", self.prompts.dropped - self._dropped)
        self._dropped = self.prompts.dropped
        for name, values in clock.logged.items():
            metrics.add(logged_name(name), sum(values), len(values))
        blamed = [failure for failure in clock.failures if failure.completion is not None]
        metrics.add("rewards/failed", len(blamed))
        for failure in blamed:
            metrics.add(f"rewards/failed/{failure.function}", 1)
        metrics.add("prompts/retired", len(self.prompts.rates.retired()))
        if self.utilisation:
            metrics.add("mfu", self.utilisation.share(groups, outcome.logprobs, seconds))
        self._show(clock.failures)
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
        for sink in self.sinks:
            sink.write(step + 1, result)
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
        if result.get("groups/unscorable"):
            self.console.warning("groups without two scorable completions were met (metric groups/unscorable)")

    def _show(self, failures: Sequence[Any]) -> None:
        """The first example of each way in which a reward function failed; all are counted."""
        for failure in failures:
            self.failures[failure.function, failure.kind] += 1
            if self.failures[failure.function, failure.kind] == 1:
                self.console.warning(failure.text)

    def begin_evaluation(self, version: int) -> None:
        self.console.heading(f"evaluation of version {version}")

    def evaluation(self, version: int, figures: Figures, groups: Sequence[Group], seconds: float) -> None:
        self.spent("evaluate", seconds)
        self._show(self.read_clock().failures)  # an evaluation's tokens are not the next step's
        if version == 0:
            self._first_answers = first_answers(groups)
            self.folder.write_first_answers(self._first_answers)
        self.solved = solved_problem(self._first_answers, groups)
        for subset, values in figures.items():
            self.console.evaluation(subset, values)
            self.folder.write_evaluation(version, subset, values)
            for sink in self.sinks:
                sink.write(version, evaluation_scalars(subset, values))
            if self.keep_groups:
                self.folder.write_groups(version, [group for group in groups if group.subset == subset])
        self.evaluations[version] = figures

    def finish(self, last: int) -> dict[str, Any]:
        """The summary of a run that ended after step `last`, written and shown."""
        before, after = self.evaluations.get(0, {}), self.evaluations.get(last, {})
        main = next(iter(after), None)
        phases = dict(self.seconds)
        training = phases.pop("training", 0.0)
        summary = {
            "accuracy_before": before[main].get("accuracy") if main else None,
            "accuracy_after": after[main].get("accuracy") if main else None,
            "mean_reward_before": before[main].get("mean_reward") if main else None,
            "mean_reward_after": after[main].get("mean_reward") if main else None,
            "num_questions": after[main]["num_questions"] if main else 0,
            "protocol": after[main]["protocol"] if main else None,
            "steps": self.steps,
            "steps_made": last,
            "before": before,
            "after": after,
            "seconds_total": time.perf_counter() - self.started,
            "seconds_by_phase": phases,
            "seconds_training": training,
            "sample_tokens_per_second": _ratio(self.totals["tokens/sampled"], phases.get("sample", 0.0)),
            "train_tokens_per_second": _ratio(self.totals["tokens/trained"], phases.get("update", 0.0)),
            "num_compilations": self.compilations(),
            "prompts_dropped": self.prompts.dropped,
            "reward_failures": {f"{name}: {kind}": count for (name, kind), count in sorted(self.failures.items())},
            "run_folder": str(self.folder.path),
        }
        facts = {name: summary[name] for name in
                 ("seconds_total", "sample_tokens_per_second", "train_tokens_per_second", "num_compilations")}
        self.console.heading("before and after")
        self.console.summary(before, after, self.solved, facts)
        for failed, count in summary["reward_failures"].items():
            self.console.warning(f"reward function {failed} for {count} completions")
        self.folder.write_summary(summary)
        return summary


def group_metrics(groups: Sequence[Group], outcome: UpdateResult, metrics: MetricSet) -> None:
    """Rewards, lengths, ends and staleness of a step's groups."""
    table = outcome.table
    valid = table.valid
    metrics.add("reward/mean", table.rewards[valid].sum(), valid.sum())
    for rewards, mask in zip(table.rewards, valid, strict=True):
        if mask.any():
            metrics.add("reward/std", rewards[mask].std())
            metrics.add("reward/min", rewards[mask].min())
            metrics.add("reward/max", rewards[mask].max())
    for group in groups:
        for name, values in group.reward_components.items():
            known = ~np.isnan(values)
            metrics.add(f"rewards/{name}", values[known].sum(), known.sum())
    metrics.add("groups/nonzero_std", table.nonzero_std.sum(), len(groups))
    metrics.add("groups/unscorable", int((valid.sum(1) < 2).sum()))
    metrics.add("advantage/abs_mean", np.abs(table.advantages[valid]).sum(), valid.sum())
    completions = [completion for group in groups for completion in group.completions]
    for completion in completions:
        for name in ("length_mean", "length_min", "length_max"):
            metrics.add(f"completions/{name}", len(completion))
        metrics.add("completions/length_ended_mean", len(completion), completion.stop_reason != StopReason.LENGTH)
        metrics.add("completions/truncated", completion.stop_reason == StopReason.LENGTH)
        for reason in (StopReason.EOS, StopReason.STOP, StopReason.LENGTH):
            metrics.add(f"completions/stop_{reason.value}", completion.stop_reason == reason)
    metrics.add("prompts/length_mean", sum(len(group.prompt_ids) for group in groups), len(groups))
    stale = [group.step - int(version) for group in groups for c in group.completions for version in c.versions]
    metrics.add("staleness", sum(stale), len(stale))
    if stale:
        metrics.add("staleness/max", max(stale))


def token_arrays(groups: Sequence[Group], outcome: UpdateResult) -> list[list[dict[str, Any] | None]]:
    """The trainer's log-probs by group and completion; None where a completion did not enter the update."""

    def of(group: int, index: int) -> dict[str, Any] | None:
        values = outcome.logprobs.get((group, index))
        return None if values is None else {"trainer_logprobs": values}

    return [[of(number, index) for index in range(group.size)] for number, group in enumerate(groups)]


def first_answers(groups: Sequence[Group]) -> FirstAnswers:
    """Wrong greedy answers: data set -> row -> text."""
    found: FirstAnswers = {}
    for group in groups:
        if group.correct is not None and not group.correct[0]:
            found.setdefault(group.subset, {})[group.example.row] = group.texts[0]
    return found


def solved_problem(before: FirstAnswers, after: Sequence[Group]) -> SolvedProblem | None:
    """The first question that was answered wrongly before and rightly after."""
    for group in after:
        wrong = before.get(group.subset, {}).get(group.example.row)
        if wrong is not None and group.correct is not None and group.correct[0]:
            return SolvedProblem(group.example.prompt, wrong, group.texts[0])
    return None


def _ratio(value: float, seconds: float) -> float | None:
    return value / seconds if seconds else None
