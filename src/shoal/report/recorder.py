"""Records a run: turns each step's groups and metrics, evaluations and the end into files and into
lines on the screen."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from shoal.buckets import address
from shoal.config.yaml_files import flat_values
from shoal.findings import Finding
from shoal.protocols import RolloutStats
from shoal.records import Failure, Group, Purpose, StopReason
from shoal.report.console import Console
from shoal.report.sinks import Background, GroupWriter, completion_rows
from shoal.report.watch import Watch
from shoal.runs.groups import TokenLogprobs, TurnAdvantages
from shoal.runs.layout import parts_of
from shoal.runs.lines import Summary, evaluation_scalars
from shoal.runs.metrics import ENVIRONMENT, MetricSet, logged_name
from shoal.runs.recipe import Followed
from shoal.runs.reward_changes import RewardChanges, rewards_differ
from shoal.runs.summary import (
    account_text,
    curve_text,
    main_figure,
    summary_facts,
    version_text,
)
from shoal.runs.writer import RunWriter
from shoal.text import FAILED_CALL, count, duration

EvaluationFigures: TypeAlias = "Mapping[str, Mapping[str, Any]]"
"""Data set -> figure -> value, of one evaluation."""

MOST_TURNS = 32
"""Most turns that get metrics of their own."""
MOST_TOOLS = 20
"""Most tools that get metrics of their own."""
SECONDS_TO_STOP = 3.0
"""Time that a service for metrics may take to end if somebody asked the run to stop."""


@dataclass(frozen=True)
class StepRecord:
    """One step as the recorder gets it: P groups (at least one) of G completions, and what the
    updates computed."""

    step: int  # from 0
    groups: Sequence[Group]
    advantages: np.ndarray  # [P, G]
    # [P]: 1 for a group whose rewards differ, else 0; None with a critic
    nonzero_std: np.ndarray | None
    logprobs: TokenLogprobs  # the trainer's log-probs, from before the step's first update
    metrics: MetricSet  # metrics that the updates measured
    seconds: float
    # by group, completion and turn; empty if advantages are of whole completions
    turn_advantages: TurnAdvantages = ()
    discarded: Sequence[Group] = ()  # groups that dynamic sampling discarded; no update used them
    # number of `groups` that dynamic sampling rejects, and that filled the step nevertheless
    num_filled: int = 0
    masks_truncated: bool = False  # algorithm.mask_truncated
    prompts_dropped: int = 0  # number since the run began
    prompts_retired: int = 0


@dataclass
class Recorder:
    """Turns what happened in a run into metrics, files and lines on the screen. A thread writes the
    groups; `close` ends it, and closes neither `folder` nor `sinks`.

    `steps`: the number of steps in the settings. `keep_groups`: True writes the groups of steps and
    evaluations. `read_stats` returns the source's figures since the last call. `compilations`
    returns the number of programs compiled so far. `peak_bytes` returns the most bytes of memory
    that were in use so far. `mfu` returns the share of the devices' peak rate that a step used; its
    arguments are the groups, the (group, completion) that were trained on, and seconds."""

    folder: RunWriter
    console: Console
    steps: int
    keep_groups: bool
    read_stats: Callable[[Purpose], RolloutStats]
    compilations: Callable[[], int]
    peak_bytes: Callable[[], int]
    sinks: Sequence[Background] = ()
    mfu: Callable[[Sequence[Group], Container[tuple[int, int]], float], float] | None = None
    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by phase
    # number of tokens, by metric
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    evaluations: dict[int, EvaluationFigures] = field(default_factory=dict)  # by version
    # number of tokens that hosts sampled, and what became of them; see `token_account`
    account: Counter[str] = field(default_factory=Counter)
    # number of failures, by (function, kind)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    prompts_dropped: int = 0  # number dropped up to the last recorded step
    watch: Watch = field(default_factory=Watch)
    # True with train.on_warning=stop: a warning then ends the run as its error, and is printed only
    # as that
    warnings_stop: bool = False
    warned: list[Finding] = field(default_factory=list)  # findings since the loop last read them
    # number of steps between answers in the terminal, and tables of them for the sinks; 0: none
    completions_every: int = 0
    followed: Followed | None = None  # the recipe whose band evaluations are held against
    price_per_hour: float = 0.0  # of all devices of the run; 0: not known
    # by resumes, the one of this process included
    reward_changes: RewardChanges = field(default_factory=RewardChanges)
    _exhausted: bool = False
    _stopped_by: str = ""  # who ended the run before its last step; "" if nobody did
    # seconds per completion of the last evaluation in which nothing was compiled
    _evaluation_rate: float | None = None
    # number of compiled programs when the newest evaluation began; -1 before this process's first
    # one
    _compiled_before: int = -1

    def __post_init__(self) -> None:
        self._groups = GroupWriter(self.folder.write_groups, self.folder.path)
        self._process_started = self.started  # `restore` moves `started`
        self._cost_before = 0.0  # of the processes before this one

    # -- steps

    def begin_training(self, first: int) -> None:
        """Begins the events of step `first` + 1 (from 1), and prints and records that training
        begins there, after `first` steps; prints and records nothing if no step is left."""
        self.begin_step(first + 1)
        if self.steps > first:
            begin = f", from step {first + 1} on" if first else ""
            self._begin_phase(
                f"training, {count(self.steps, 'step')}{begin}; the first ones compile programs"
            )

    def begin_step(self, number: int) -> None:
        """Notes that step `number` (from 1) begins: events from now on belong to it, and are
        removed if the run resumes before it."""
        self.folder.begin("training", number)

    def _begin_phase(self, text: str) -> None:
        """Prints a heading, and writes it to events.jsonl as an event of level "phase". The phase
        and step of the event are those set before (`RunWriter.begin`)."""
        self.console.heading(text)
        self.folder.write_event("phase", text)

    def step(self, record: StepRecord) -> dict[str, float]:
        """Records a step: completes its metrics (adding to `record.metrics`), writes them to
        metrics.jsonl and to the sinks, queues its groups, also the discarded ones, for the thread
        that writes them, and prints the step's line. Returns the metrics by name. Takes the
        source's figures since the last call of `read_stats`, so call it once a step, in order.

        Files, screen and warnings number steps from 1: step 0 of the record is step 1 there.
        Findings of `Watch` are printed as warnings and kept in `warned`, on which the loop acts;
        nothing is raised for them here."""
        number = record.step + 1
        metrics = record.metrics
        stats = self.read_stats(Purpose.TRAIN)
        started = time.perf_counter()
        _add_group_metrics(metrics, record.groups, record.advantages, record.nonzero_std)
        _add_turn_metrics(metrics, record.groups)
        if record.turn_advantages or any(group.turn_rewards for group in record.groups):
            _add_metrics_by_turn(metrics, record.groups)
        _add_age_metrics(metrics, record.groups, record.logprobs)
        metrics.add("groups/discarded", len(record.discarded))
        metrics.add("groups/filled", record.num_filled)
        metrics.add("version", number)
        metrics.add("prompts/dropped", record.prompts_dropped - self.prompts_dropped)
        metrics.add("prompts/retired", record.prompts_retired)
        self.prompts_dropped = record.prompts_dropped
        self._add_failures(metrics, stats)
        self._account_for_step(record, stats)
        if self.mfu:
            metrics.add("mfu", self.mfu(record.groups, record.logprobs, record.seconds))
        metrics.add("version/unchanged", stats.unchanged)
        for name, value in stats.publish.items():
            metrics.add(f"publish/{name}", value)
        metrics.add("tokens/sampled", stats.tokens)
        self._add_counters(metrics, stats)
        metrics.add("time/sample_seconds", stats.sample_seconds)
        metrics.add("time/reward_seconds", stats.reward_seconds)
        metrics.add("throughput/sample_tokens_per_second", stats.tokens, stats.busy_seconds)
        metrics.add("time/step_seconds", record.seconds)
        if self.price_per_hour:
            metrics.add("cost/step", self.price_per_hour * record.seconds / 3600)
            metrics.add("cost/run", self.cost)
        if stats.sampler_idle is not None:  # the samplers have devices of their own
            trainer_idle = (stats.sample_seconds + stats.reward_seconds) / record.seconds
            metrics.add("idle/trainer", min(1.0, trainer_idle))
            metrics.add("idle/sampler", stats.sampler_idle)
            for name, value in stats.queue.items():
                metrics.add(f"queue/{name}", value)
            for name, value in stats.fleet.items():
                metrics.add(f"fleet/{name}", value)
        metrics.add("memory/peak_bytes", self.peak_bytes())
        metrics.add("compilations", self.compilations())
        result = metrics.result()
        # The seconds of the update, and tokens/trained, are among the record's own metrics.
        for phase in ("sample", "reward", "update"):
            self.seconds[phase] += result[f"time/{phase}_seconds"]
        self.seconds["training"] += record.seconds
        for name in ("tokens/sampled", "tokens/trained"):
            self.totals[name] += result[name]
        self.folder.write_metrics(number, result)
        rows = []
        if self.completions_every and number % self.completions_every == 0:
            rows = completion_rows(record.groups, record.advantages)
        for sink in self.sinks:
            sink.write_completions(number, rows)
            sink.write(number, result)
        if self.keep_groups:
            self._groups.put(
                number, record.groups, record.advantages, record.logprobs, record.turn_advantages
            )
            if record.discarded:
                self.keep_discarded(record.step, record.discarded)
        self.spent("record", time.perf_counter() - started)
        self.console.step(number, self.steps, result)
        self.console.answers(number, rows)
        self._warn(self.watch.step(number, result, record.groups))
        return result

    def keep_discarded(self, step: int, groups: Sequence[Group]) -> None:
        """Queues groups of a step (from 0) that no update uses for the thread that writes them;
        does nothing if groups are not kept."""
        if self.keep_groups:
            # They have neither advantages nor the trainer's log-probs.
            self._groups.put(step + 1, groups, None, None, (), True)

    @property
    def cost(self) -> float:
        """What the run's devices have cost until now, with the start, evaluations and checkpoints;
        of earlier processes of the run up to the checkpoint that it was resumed from. 0 if the
        price is not known."""
        hours = (time.perf_counter() - self._process_started) / 3600
        return self._cost_before + self.price_per_hour * hours

    def _add_counters(self, metrics: MetricSet, stats: RolloutStats) -> None:
        """Adds the counters of the samplers' engines as metrics `sampler/{counter}`, none for a
        counter that is 0, and the share of slots that sampled as `sampler/places_drawing`. Leaves
        `stats` as it is."""
        counters = stats.counters.copy()
        # `_add_tokens` counts them. A Counter ignores a `del` of what it does not have.
        del counters["tokens"]
        active_slots = counters.pop("active_slots", 0)
        metrics.add("sampler/places_drawing", active_slots, counters.pop("total_slots", 0))
        for name, value in counters.items():
            if value:
                metrics.add(f"sampler/{name}", value)

    def _account_for_step(self, record: StepRecord, stats: RolloutStats) -> None:
        """Adds to the run's token account (`token_account`) the tokens sampled since the last step,
        by what became of them in this step."""
        if not stats.tokens:  # nothing was sampled, because the tokens come from the data
            self._add_tokens(stats)
            return
        of_groups = 0  # number of tokens sampled for the groups of this step
        for group in record.groups:
            of_groups += sum(completion.num_sampled for completion in group.completions)
        in_update = 0  # number of these in completions that were trained on
        masked = 0  # number of these in completions that the loss leaves out
        without_advantage = 0  # number of the others in groups whose advantages are all 0
        for group_index, completion_index in record.logprobs:
            completion = record.groups[group_index].completions[completion_index]
            in_update += completion.num_sampled
            if record.masks_truncated and completion.stop_reason == "length":
                masked += completion.num_sampled
            elif not record.advantages[group_index].any():
                without_advantage += completion.num_sampled
        self._add_tokens(
            stats,
            trained=in_update - masked - without_advantage,
            masked=masked,
            other_terms=without_advantage,
            no_gradient=of_groups - in_update,
            discarded=stats.tokens - of_groups,
        )

    def _add_tokens(self, stats: RolloutStats, **used: int) -> None:
        """Adds to the run's token account (`token_account`) the tokens that hosts sampled and lost,
        and those that were `used`, under the name of their entry there: `trained=12`."""
        lost = stats.fleet.get("tokens_lost", 0)
        self.account.update(sampled=stats.counters["tokens"], lost=lost, **used)

    def _add_failures(self, metrics: MetricSet, stats: RolloutStats) -> None:
        """Adds the number of completions for which a reward function or an environment failed, in
        all and by function. Counts all failures for the summary, and warns of new ones."""
        failed = [failure for failure in stats.failures if failure.completion is not None]
        metrics.add("rewards/failed", len(failed))
        for failure in failed:
            metrics.add(f"rewards/failed/{failure.function}", 1)
        self._count_failures(stats.failures)

    def _count_failures(self, failures: Sequence[Failure]) -> None:
        """Counts failures of reward functions and environments for the summary, and warns of each
        (function, kind) that did not fail so before in this run."""
        self.failures.update((failure.function, failure.kind) for failure in failures)
        self._warn(self.watch.failures(failures))

    def _warn(self, findings: Sequence[Finding]) -> None:
        """Keeps findings in `warned`, which the loop reads, and prints those of level "warning".
        With `warnings_stop` prints none, because the loop then raises them as the run's error."""
        self.warned += findings
        if not self.warnings_stop:
            self._print_warnings(findings)

    def _print_warnings(self, findings: Sequence[Finding]) -> None:
        """Prints the findings of level "warning". One of level "wrong" is not printed here, because
        the loop raises it as the run's error."""
        for finding in findings:
            if finding.level == "warning":
                self.console.warning(finding.text, finding.key)

    def spent(self, phase: str, seconds: float) -> None:
        """Adds seconds to a phase of the run, such as "record"; the summary shows the sum by
        phase."""
        self.seconds[phase] += seconds

    # -- evaluations

    def begin_evaluation(self, version: int, num_completions: int) -> None:
        """Prints and records that the evaluation of a version begins, how many completions it
        samples, and about how long it takes, if an earlier evaluation of this process compiled
        nothing and therefore tells; of this process's first one, that programs are compiled. Does
        nothing if it samples none. `version` 0: before training."""
        if not num_completions:
            return
        rate = self._evaluation_rate
        about = ""
        if rate is not None:
            about = f", about {duration(rate * num_completions)}"
        elif self._compiled_before < 0:
            about = "; programs are compiled first"
        self._compiled_before = self.compilations()
        with self.folder.during("evaluation", version):
            self._begin_phase(
                f"evaluation {version_text(version)}, {count(num_completions, 'completion')}{about}"
            )

    def evaluation(
        self,
        version: int,
        figures: EvaluationFigures,
        groups: Sequence[Group],
        num_completions: int,
        seconds: float,
    ) -> None:
        """Records the evaluation of a version: prints its figures, writes them to evaluations.jsonl
        and to the sinks, queues `groups`, its answers, to be written, and warns if it is
        worse than the evaluation before training.

        `figures`: data set -> figure -> value; the accuracy on the first data set is what is
        compared. `num_completions` were sampled, in `seconds`."""
        self.spent("evaluate", seconds)
        # A rate from an evaluation that compiled programs would be too slow.
        if num_completions and self.compilations() == self._compiled_before:
            self._evaluation_rate = seconds / num_completions
        stats = self.read_stats(Purpose.EVALUATE)
        self._add_tokens(stats, evaluated=stats.tokens)
        with self.folder.during("evaluation", version):
            self._count_failures(stats.failures)
        for subset, values in figures.items():
            self.console.evaluation(subset, values)
            self.folder.write_evaluation(version, subset, values)
            for sink in self.sinks:
                sink.write(version, evaluation_scalars(subset, values))
            if self.keep_groups:
                self._groups.put(version, [group for group in groups if group.subset == subset])
        self.evaluations[version] = figures
        main = next(iter(figures), "")  # the first data set; "" if there is none
        before = self._first_comparable(main, figures.get(main, {}))
        with self.folder.during("evaluation", version):
            self._warn(self.watch.evaluation(version, before, figures.get(main, {})))
            if "accuracy" not in figures.get(main, {}):
                answers = [group for group in groups if group.subset == main]
                self._warn(self.watch.answers(version, answers))
            position = self.followed.position(version, figures) if self.followed else None
            if position:
                self.console.note(position.text)
                self._warn(self.watch.recipe(position))

    def _first_comparable(self, data_set: str, figures: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the figures of a data set in the evaluation before training, or, if the reward
        functions that say which answers are right were changed since, in the first evaluation after
        that; {} if there is none. `figures`: those of the newest evaluation."""
        first = 0
        since = self.reward_changes.comparable_since("accuracy", figures)
        if since:
            later = [version for version in self.evaluations if version > since]
            if not later:
                return {}
            first = min(later)
        return self.evaluations.get(first, {}).get(data_set, {})

    def scores(self) -> dict[int, float]:
        """Returns version -> its score, by which checkpoints are compared: the accuracy on the
        first data set, or its mean reward if there is no accuracy. Left out are evaluations without
        either figure, and those before a change of the reward that the figure depends on. Of the
        others, those on fewer questions than the largest one are left out too, because their scores
        are less certain."""
        scored: dict[int, tuple[float, int]] = {}  # version -> (score, number of questions)
        for version, figures in self.evaluations.items():
            main = next(iter(figures.values()), {})
            name = main_figure(main)
            score = main.get(name)
            is_comparable = self.reward_changes.is_comparable(version, name, main)
            if score is not None and is_comparable:
                scored[version] = (score, main.get("num_questions", 0))
        most_questions = max((number for _, number in scored.values()), default=0)
        scores = {}
        for version, (score, number) in scored.items():
            if number == most_questions:
                scores[version] = score
        return scores

    # -- checkpoints and resumption

    def sync(self, pass_rates: Sequence[Mapping[str, Any]]) -> None:
        """Waits until everything recorded so far would survive a power cut, then writes the current
        pass rates of the prompts (a record for each prompt). Called before a checkpoint is saved.
        Saves no checkpoint. Raises the error with which the writing of groups has failed;
        ShoalError if a file cannot be written."""
        self._groups.flush()
        self.folder.sync()
        self.folder.write_pass_rates(pass_rates)

    def state(self) -> dict[str, Any]:
        """Returns the sums and warnings so far, which a checkpoint stores for `restore`, as
        JSON."""
        failures = []
        for (function, kind), number in self.failures.items():
            failures.append([function, kind, number])
        return {
            "dropped": self.prompts_dropped,
            "failures": failures,
            "seconds": dict(self.seconds),
            "totals": dict(self.totals),
            "account": dict(self.account),
            "watch": self.watch.state(),
            "seconds_total": time.perf_counter() - self.started,
            "cost": self.cost,
        }

    def restore(
        self,
        state: Mapping[str, Any],
        version: int,
        evaluated: bool,
        again: Collection[int] = (),
        data_sets: Collection[str] = (),
        stored_settings: Mapping[str, Any] = {},
        settings: Mapping[str, Any] = {},
    ) -> None:
        """Continues a run after `version`: sets the recorder to the state that the checkpoint of
        this version holds, and rewinds the run's files to it.

        Removed from the files are all later steps, the evaluation of `version` unless it is
        complete, and the evaluations of the versions in `again`, which the run will repeat. The
        evaluation of `version` is complete if it was so when the checkpoint was saved
        (`evaluated`), or if there are figures of each of `data_sets` now: the last version of a run
        is evaluated after its checkpoint. Warns if lines of earlier steps are missing. `state`:
        what the method `state` returned. `stored_settings`, `settings`: those of the checkpoint and
        those of now, each dotted key -> value, which tell whether the reward changes here. This
        recorder must be new, because some sums are added to its own, others replace them."""
        self.prompts_dropped = state["dropped"]
        self.failures.update({(name, kind): number for name, kind, number in state["failures"]})
        self.seconds.update(state["seconds"])
        self.totals.update(state["totals"])
        self.account.update(state.get("account", {}))
        # Tokens that were under way when the trainer ended are lost.
        self.account["lost"] += token_account(self.account)["unused"]
        self.watch.restore(state["watch"])
        self._note_changes_of_reward(version, stored_settings, settings)
        self.started -= state["seconds_total"]  # the time of earlier processes counts, too
        # The price and the number of devices may be others now. Where no price was known before,
        # the present one stands for it.
        known = state.get("cost", 0.0)
        self._cost_before = known or self.price_per_hour * state["seconds_total"] / 3600
        figures = self.folder.read_evaluations().get(version, {})
        is_complete = evaluated or (bool(figures) and set(data_sets) <= set(figures))
        self.folder.rewind(version, is_complete and version not in again, again)
        missing = self.folder.missing_steps(version)
        if missing:
            self.console.warning(
                f"metrics.jsonl lacks {count(len(missing), 'step')} up to {version}, the first is "
                f"{missing[0]}: they were lost, as in a power cut; the weights are not affected"
            )
        self.evaluations.update(self.folder.read_evaluations())

    def _note_changes_of_reward(
        self, version: int, stored_settings: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        """Sets `reward_changes` for a run that is resumed from `version`, and forgets the answers
        of the first evaluation if the reward changes here, because later ones are not comparable
        with them. `stored_settings`, `settings`: as in `restore`."""
        # The settings of now are stored after the first step, and only by the first process; so
        # they are compared here. A part that began at this version or later is lost.
        parts = {}
        for number, file in parts_of(self.folder.path).items():
            if number < version:
                parts[number] = flat_values(file)
        earlier = RewardChanges.of_parts(parts)
        self.reward_changes = earlier.with_resume(version, stored_settings, settings)
        if rewards_differ(stored_settings, settings):
            self.watch.first_answers = {}

    # -- the end

    def data_exhausted(self, text: str) -> None:
        """Says on the screen, once, that training ends because the data is exhausted; `text` says
        what is, and begins the line. Ends nothing itself."""
        if not self._exhausted:
            self._exhausted = True
            self.console.note(f"{text}; training ends here")

    def end_early(self, stopped_by: str, last: int) -> None:
        """Says on the screen that the run ends after step `last`, and notes for the summary who
        stopped it (`stopped_by`: a noun). Ends nothing itself."""
        self._stopped_by = stopped_by
        self.console.note(f"stopped by {stopped_by} after step {last} of {self.steps}")

    def stop(self) -> None:
        """Shortens the time that each sink may take to close to SECONDS_TO_STOP, because somebody
        asked the run to stop. Closes and stops nothing."""
        for sink in self.sinks:
            sink.seconds_to_close = SECONDS_TO_STOP

    def finish(self, last: int, best: int | None = None) -> Summary:
        """Ends a run after step `last` (from 1): waits until its groups are written, prints the
        table before and after training, facts and failures, writes summary.json, waits until the
        bucket (if any) has everything, prints how to go on, and returns the summary. Does not close
        the files (`close`). `best`: the checkpoint with the best evaluation, which is printed too;
        None: the run does not compare them."""
        self.folder.begin("end", last)
        self._groups.flush()
        self._add_tokens(self.read_stats(Purpose.TRAIN))  # tokens sampled since the last step
        # warnings of the last evaluation, which come too late to end the run
        if self.warnings_stop:
            self._print_warnings(self.warned)
        summary = self._summary(last)
        solved = None
        if summary.after:
            self.console.heading("before and after")
            if self.keep_groups:
                solved = self.folder.solved_question(next(iter(summary.after)), last)
        facts = [
            curve_text(self.evaluations, self.reward_changes),
            summary_facts(summary),
            account_text(summary.tokens),
        ]
        self.console.summary(summary.before, summary.after, solved, facts, self.reward_changes)
        for failed, number in summary.reward_failures.items():
            # A key of `reward_failures` is "function: kind"; an environment is no reward function.
            what = "" if failed.startswith(f"{ENVIRONMENT}: ") else "reward function "
            self.console.warning(f"{what}{failed} for {count(number, 'completion')}")
        self.folder.write_summary(summary)
        self.folder.flush()
        self.print_next_steps(has_weights=True)
        if best is not None:
            checkpoint = address(self.folder.checkpoints_path / str(best))
            self.console.text(
                f"the best evaluation of a checkpoint is that of step {best}: `shoal export "
                f"from={checkpoint} to=FOLDER` writes its weights"
            )
        return summary

    def print_next_steps(self, has_weights: bool) -> None:
        """Prints where the run is and how to look at it; with `has_weights` also how to export its
        weights."""
        where = address(self.folder.path)
        self.console.text(f"the run is in {where}: `shoal view {where}` shows every completion")
        if has_weights:
            self.console.text(
                f"`shoal export from={where} to=FOLDER` writes the weights in Hugging Face's format"
            )

    def _summary(self, last: int) -> Summary:
        """Returns the content of summary.json for a run that ended after step `last`. The figures
        after training are those of the evaluation of `last`; without one they are empty."""
        before = self.evaluations.get(0, {})
        after = self.evaluations.get(last, {})
        main = next(iter(after), "")
        main_before = before.get(main, {})
        main_after = after.get(main, {})
        phases = {name: value for name, value in self.seconds.items() if name != "training"}

        def speed(total: str, phase: str) -> float | None:
            """Returns tokens per second of a phase; None if no time was spent in it. `total`: the
            metric in `totals` that counts the tokens."""
            if not phases.get(phase):
                return None
            return self.totals[total] / phases[phase]

        reward_failures = {}
        for (name, kind), number in sorted(self.failures.items()):
            reward_failures[f"{name}: {kind}"] = number
        return Summary(
            accuracy_before=main_before.get("accuracy"),
            accuracy_after=main_after.get("accuracy"),
            mean_reward_before=main_before.get("mean_reward"),
            mean_reward_after=main_after.get("mean_reward"),
            num_questions=main_after.get("num_questions", 0),
            protocol=main_after.get("protocol"),
            before=before,
            after=after,
            seconds_total=time.perf_counter() - self.started,
            seconds_by_phase=phases,
            seconds_training=self.seconds.get("training", 0.0),
            sample_tokens_per_second=speed("tokens/sampled", "sample"),
            train_tokens_per_second=speed("tokens/trained", "update"),
            steps=self.steps,
            steps_made=last,
            stopped_by=self._stopped_by,
            tokens=token_account(self.account),
            num_compilations=self.compilations(),
            prompts_dropped=self.prompts_dropped,
            reward_failures=reward_failures,
            run_folder=address(self.folder.path),
            cost=self.cost if self.price_per_hour else None,
        )

    def close(self) -> None:
        self._groups.close()


def token_account(counts: Mapping[str, int]) -> dict[str, int]:
    """Returns how many tokens hosts `sampled`, and what became of them; the other entries sum to
    it.

    trained: of groups with an advantage, in an update
    masked: of completions in an update that were cut off, which `algorithm.mask_truncated` leaves
        out of its loss
    other_terms: of groups whose advantages are all 0, in an update because of a KL, entropy,
        context or teacher term
    no_gradient: of the step's groups, but in no update
    discarded: of groups that dynamic sampling replaced
    evaluated: in evaluations
    lost: with a host, or with a trainer that was resumed from a checkpoint
    unused: all others, which were under way at the end

    `counts`: the same entries without `unused`; a missing one is 0.
    """
    account = {"sampled": counts.get("sampled", 0)}
    unused = account["sampled"]
    for name in (
        "trained",
        "masked",
        "other_terms",
        "no_gradient",
        "discarded",
        "evaluated",
        "lost",
    ):
        account[name] = counts.get(name, 0)
        unused -= account[name]
    account["unused"] = unused
    return account


def _add_group_metrics(
    metrics: MetricSet,
    groups: Sequence[Group],
    advantages: np.ndarray,
    nonzero_std: np.ndarray | None,
) -> None:
    """Adds the metrics on rewards, lengths and staleness of P groups (at least one) of G
    completions. Without reward functions, like in supervised training, those on rewards are left
    out; without a sampled token those on staleness.

    `advantages[P, G]`; `nonzero_std[P]`: 1 for a group whose rewards differ, else 0; None leaves
    its metric out. Lengths are of sampled tokens alone, without those of tools."""
    if groups[0].reward_components:  # otherwise the data's own answers are learned, without rewards
        rewards = np.stack([group.rewards for group in groups])  # [P, G]
        valid = np.stack([group.valid for group in groups])  # [P, G]
        metrics.add("reward/mean", rewards[valid].sum(), valid.sum())
        for values, mask in zip(rewards, valid, strict=True):
            if mask.any():
                metrics.add("reward/std", values[mask].std())
                metrics.add("reward/min", values[mask].min())
                metrics.add("reward/max", values[mask].max())
        for group in groups:
            for name, values in group.reward_components.items():
                known = ~np.isnan(values)
                metrics.add(f"rewards/{name}", values[known].sum(), known.sum())
            for name, numbers in group.logged.items():
                metrics.add(logged_name(name), sum(numbers), len(numbers))
        if nonzero_std is not None:
            metrics.add("groups/nonzero_std", nonzero_std.sum(), len(groups))
        # A group of one has nothing to be compared with: a critic judges it.
        least_valid = min(2, valid.shape[1])
        metrics.add("groups/unscorable", (valid.sum(axis=1) < least_valid).sum())
        metrics.add("advantage/abs_mean", np.abs(advantages[valid]).sum(), valid.sum())
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([completion.num_sampled for completion in completions])
    reasons = np.array([completion.stop_reason.value for completion in completions])
    truncated = reasons == StopReason.LENGTH.value
    metrics.add("completions/length_mean", lengths.sum(), len(lengths))
    metrics.add("completions/length_min", lengths.min())
    metrics.add("completions/length_max", lengths.max())
    metrics.add("completions/length_ended_mean", lengths[~truncated].sum(), (~truncated).sum())
    metrics.add("completions/truncated", truncated.sum(), len(lengths))
    for reason in (StopReason.EOS, StopReason.STOP, StopReason.LENGTH):
        num_ended = (reasons == reason.value).sum()
        metrics.add(f"completions/ended_by_{reason.value}", num_ended, len(lengths))
    prompt_tokens = sum(len(group.prompt_ids) for group in groups)
    metrics.add("prompts/length_mean", prompt_tokens, len(groups))
    ages = []
    for group in groups:
        ages += [group.step - completion.sampled_versions for completion in group.completions]
    staleness = np.concatenate(ages)
    if len(staleness):
        metrics.add("staleness", staleness.sum(), len(staleness))
        metrics.add("staleness/max", staleness.max())


def _add_turn_metrics(metrics: MetricSet, groups: Sequence[Group]) -> None:
    """Adds the metrics on turns, tools and environments. Adds none if every rollout is one turn
    without tools: no messages, no branches, no context tokens."""
    rollouts = [rollout for group in groups for rollout in group.completions]
    has_turns = False
    for rollout in rollouts:
        if rollout.messages or rollout.branches or not rollout.loss_mask.all():
            has_turns = True
            break
    if not has_turns:
        return
    for rollout in rollouts:
        metrics.add("turns/mean", len(rollout.turns))
        metrics.add("turns/max", len(rollout.turns))
        metrics.add("turns/branches", len(rollout.branches))
        metrics.add("tokens/context", len(rollout) - rollout.num_sampled)
    for reason in (StopReason.MAX_TURNS, StopReason.ENVIRONMENT, StopReason.FAILED):
        num_ended = sum(rollout.stop_reason is reason for rollout in rollouts)
        metrics.add(f"completions/ended_by_{reason.value}", num_ended, len(rollouts))
    num_own_prompts = 0  # of groups whose completions do not all have the same prompt
    for group in groups:
        num_prompts = len(group.by_prompt())
        if num_prompts > 1:
            num_own_prompts += num_prompts
    metrics.add("prompts/own", num_own_prompts)
    messages = [message for rollout in rollouts for message in rollout.messages]
    truncated_bytes = sum(message.get("truncated_bytes", 0) for message in messages)
    metrics.add("tools/truncated_bytes", truncated_bytes)
    answers = [message for message in messages if message["role"] == "tool"]
    # A model may call any name, also one that is no tool. Only the names that are called most get
    # metrics of their own; among names that are called equally often, the first by alphabet.
    names = [message["name"] for message in answers]
    names = sorted(name for name in names if re.fullmatch(r"[\w.-]{1,64}", name))
    _add_call_metrics(metrics, "", answers, len(rollouts))
    for name, _ in Counter(names).most_common(MOST_TOOLS):
        of_tool = [message for message in answers if message["name"] == name]
        _add_call_metrics(metrics, f"/{name}", of_tool, len(rollouts))


def _add_metrics_by_turn(metrics: MetricSet, groups: Sequence[Group]) -> None:
    """Adds the metrics of each of the first MOST_TURNS turns, counted from 1, over valid
    completions: the share of these that have such a turn, its mean length, and its mean reward if
    rewards are by turn."""
    num_valid = sum(int(group.valid.sum()) for group in groups)
    num_alive = Counter[int]()
    for group in groups:
        for index in np.flatnonzero(group.valid):
            for turn, tokens in enumerate(group.completions[index].turns[:MOST_TURNS]):
                num_alive[turn] += 1
                metrics.add(f"turns/length/{turn + 1}", tokens.stop - tokens.start)
                if group.turn_rewards:
                    metrics.add(f"turns/reward/{turn + 1}", group.turn_rewards[index][turn])
    for turn, number in num_alive.items():
        metrics.add(f"turns/share/{turn + 1}", number, num_valid)


def _add_call_metrics(
    metrics: MetricSet, ending: str, answers: Sequence[Mapping[str, Any]], num_rollouts: int
) -> None:
    """Adds the mean number of tool calls of a rollout, and the share of calls that failed, which is
    left out if there was no call.

    `answers`: the messages that answer the calls. `ending`: the end of both metrics' names, such as
    "/search" for the calls of one tool, or ""."""
    num_failed = sum(message["content"].startswith(FAILED_CALL) for message in answers)
    metrics.add(f"tools/call_frequency{ending}", len(answers), num_rollouts)
    metrics.add(f"tools/failure_frequency{ending}", num_failed, len(answers))


def _add_age_metrics(metrics: MetricSet, groups: Sequence[Group], logprobs: TokenLogprobs) -> None:
    """Adds the metrics `age/ess/<age>`, `age/weight_max/<age>` and `age/logprob_mean/<age>`, which
    show how far samplers and trainer differ by age: how many versions before this step's the oldest
    token of a completion was sampled. Adds none if all completions are of age 0.

    They are computed from w = exp(trainer's log-prob - sampler's log-prob) of each sampled token.
    `logprobs`: the trainer's, by (index of the group, index of the completion), of the completions
    that were trained on; the others are left out."""
    differences: dict[int, list[np.ndarray]] = {}
    for number, group in enumerate(groups):
        for completion in group.completions:
            trainer_logprobs = logprobs.get((number, completion.index))
            if not completion.num_sampled or trainer_logprobs is None:
                continue
            age = int(group.step - completion.sampled_versions.min())
            difference = (trainer_logprobs - completion.logprobs)[completion.loss_mask]
            differences.setdefault(age, []).append(difference)
    if max(differences, default=0) == 0:
        return
    for age, parts in differences.items():
        difference = np.concatenate(parts).astype(np.float64)
        w = np.exp(difference)
        # The effective sample size as a share: 1 if all weights are equal, near 0 if one has all.
        ess = w.sum() ** 2 / max(len(w) * (w**2).sum(), 1e-300)
        metrics.add(f"age/ess/{age}", ess, len(w) > 0)  # count 0 if there is no token: not added
        metrics.add(f"age/weight_max/{age}", w.max(initial=0.0))
        metrics.add(f"age/logprob_mean/{age}", np.abs(difference).sum(), len(w))
