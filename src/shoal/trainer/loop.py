"""The training loop, in the order of a run's life: evaluate the first weights; at each step take
groups, update the weights, publish and record them; evaluate again.

Steps are numbered from 0, versions of the weights too: step s trains version s into version s + 1,
and is shown to people as step s + 1.

Synchronous is asynchronous with zero staleness: each step's groups are requested at a named version
as soon as that version is published (up to `lookahead.steps` steps ahead), and the loop never knows
where the tokens come from.

Until its first update begins, a step that is given up leaves no trace: state, prompts and pending
requests are then what they were when the step began, and are saved so. Later the run falls back to
its last checkpoint, because an update consumes the state that it begins with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.config.key import values_of
from shoal.config.stored import to_dict
from shoal.config.train import Config
from shoal.protocols import GroupRequest, RolloutSource
from shoal.records import Group, Params, Purpose, ShoalError
from shoal.report.recorder import Recorder, StepRecord
from shoal.report.timeline import Timeline, timed
from shoal.runs.lines import Summary, leaves
from shoal.runs.summary import version_text
from shoal.stop import StopRequested, StopSignal
from shoal.tasks.builtin_rewards import PENALTY
from shoal.trainer import dynamic_sampling
from shoal.trainer.callbacks import Callbacks
from shoal.trainer.evaluation import Evaluator
from shoal.trainer.prompts import DataExhausted, PromptStream, TokenizedExample
from shoal.trainer.schedule import Lookahead, Schedule
from shoal.trainer.step import TrainState, is_intact
from shoal.trainer.update import Updater, UpdateResult
from shoal.weights.checkpoints import Checkpoints, Restored
from shoal.weights.checksum import weights_text

NOTHING_KEPT = "nothing was kept, as the run has no checkpoint yet"


@dataclass(frozen=True)
class RequestedEvaluation:
    """An evaluation whose answers were requested, and are not recorded yet."""

    started: float  # time of the request
    full: bool  # True if all questions are asked


@dataclass
class Run:
    """One training run: its configuration, its parts, and its progress.

    `train` runs the steps that remain. The run owns the state of the loop itself (`requested`,
    `pending`, `evaluating`, `saved`, `useful_share`, `lookahead`); weights and moments are local to
    `run_steps`, so that nothing else keeps them alive. Each part owns what it holds, and the run
    closes none of the parts. Steps are numbered from 0, and version N of the weights is the one
    after N steps.
    """

    config: Config
    parameters: Params | None  # the first weights; None if `restored` has others
    updater: Updater
    source: RolloutSource
    prompts: PromptStream
    evaluator: Evaluator
    checkpoints: Checkpoints
    recorder: Recorder
    schedule: Schedule = field(default_factory=Schedule)
    restored: Restored | None = None
    # Facts about machine and data, which are stored in each checkpoint.
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    stop: StopSignal = field(default_factory=StopSignal)
    resume_command: str = ""
    # (step + 1) -> a context around taking, updating and recording a step: the profiler's
    around_step: Callable[[int], AbstractContextManager[Any]] = lambda step: nullcontext()
    # (step, metrics), at the end of each step, counted from 0; only tests set it
    after_step: Callable[[int, dict[str, float]], None] | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    # (version), once a checkpoint was given to be written
    after_save: Callable[[int], None] = lambda version: None
    # Stores the settings of a resumed run for later resumes; None for a new run.
    store_settings: Callable[[], None] | None = None
    requested: int = 0  # the first step whose groups have not been requested yet
    # Step -> rows of the data that were requested for the step and not trained on yet.
    pending: dict[int, list[int]] = field(default_factory=dict)
    # by version
    evaluating: dict[int, RequestedEvaluation] = field(default_factory=dict)
    # share of the newest step's groups that had signal, with dynamic sampling
    useful_share: float = 1.0
    timeline: Timeline = field(default_factory=Timeline)
    saved: int = -1  # the newest version that has a checkpoint
    critic_parameters: Params | None = None  # the first weights of the critic, if there is one

    def __post_init__(self) -> None:
        self.lookahead = Lookahead(self.schedule)

    def train(self) -> Summary:
        """Runs all steps that remain, and returns the run's summary. Raises KeyboardInterrupt,
        whose text says how to resume, if somebody asked the run to stop. Any other interrupt or
        error passes through unchanged. At an interrupt a resumed run's new settings are stored;
        after a requested stop or an error it is printed where the run is, how to look at it and, if
        it has a checkpoint after a step, how to export its weights."""
        try:
            summary = self.run_steps()
        except KeyboardInterrupt as stop:
            # An interrupt says nothing against the new settings, so they are stored: the command
            # for resuming that is printed does not repeat them.
            self.store_resume_settings()
            if not isinstance(stop, StopRequested):
                raise
            self.recorder.stop()
            self.checkpoints.finish()
            self.recorder.print_next_steps(self.saved > 0)
            raise KeyboardInterrupt(self.stopped_text()) from None
        except Exception:
            self.recorder.print_next_steps(self.saved > 0)
            raise
        # Once the summary is written: a callback that fails here leaves a finished run.
        self.callbacks.end()
        return summary

    def run_steps(self) -> Summary:
        """Runs the loop itself: begins or restores the run, runs each step, and returns the summary
        after the last evaluation. Errors and stops pass through; `train` handles them. Ends early,
        with a checkpoint, if the data is exhausted or a callback asks for the end. Raises
        RuntimeError if a group's tokens are older than the schedule allows, or the frozen weights
        have changed."""
        # Begun here: a caller that held this state would keep the first weights in memory for all
        # of the run.
        state, first = self.begin()
        self.recorder.begin_training(first)
        # the version that the run ends with; an earlier one if the data is exhausted or a callback
        # stops the run
        last = self.config.steps
        for step in range(first, self.config.steps):
            # Weights of version `step` are trained into `version`: `state` has version `step` until
            # the update, and `version` after it.
            version = step + 1
            if self.callbacks.stopped_by:
                last = step
                self.recorder.end_early(f"the callback {self.callbacks.stopped_by}", last)
                break
            started = time.perf_counter()
            self.recorder.begin_step(version)
            with self.saved_if_given_up(step, state):
                self.stop.check()
            self.call_back(step, state, self.callbacks.begin_step)
            # The groups of the first step; those of later steps were requested in the step before.
            self.request_published(step)
            if step not in self.pending:  # the data is exhausted
                last = step
                break
            with self.around_step(version):
                with self.saved_if_given_up(step, state):
                    groups, discarded = self.take(step)
                    self.schedule.check(groups)
                    waited = time.perf_counter() - started
                    self.stop.announce_wait(f"the update of step {version}")
                    with self.timeline.span("trainer", "update"):
                        state, result = self.updater.update(state, groups, step)
                # After the update: a step that is given up before has changed neither pending
                # requests nor pass rates.
                self.step_done(step, groups, discarded)
                if self.publication_due(version):
                    try:
                        self.publish(version, state.trainable)
                    # A full disk, for example: the update is saved, and its metrics with it.
                    except ShoalError:
                        seconds = time.perf_counter() - started
                        self.record(step, groups, discarded, result, seconds)
                        # Raised again inside, so that the update is saved.
                        with self.saved_if_given_up(version, state):
                            raise
                self.lookahead.note(waited, time.perf_counter() - started)
                self.request_published(version)
                seconds = time.perf_counter() - started
                metrics = self.record(step, groups, discarded, result, seconds)
                with self.saved_if_given_up(version, state):
                    # Called for its error alone; the update is saved before the run ends with it.
                    self.source.check_logprobs(groups, result.logprobs, version=step)
            self.store_resume_settings()
            self.call_back(version, state, self.callbacks.end_step, metrics, groups)
            is_evaluated = self.evaluation_due(version) or self.callbacks.asks_evaluation
            if is_evaluated and not self.ends_at(version):
                if not self.publication_due(version):  # it was not known that it is evaluated
                    self.publish(version, state.trainable)
                self.evaluate(version, state)
            self.record_finished_evaluations(version, state)
            self.end_if_warned(version, state)
            if self.save_due(version) or self.callbacks.asks_save:
                self.save(version, state)
                self.call_back_after_save(version, state)
            if self.after_step:
                self.after_step(step, metrics)
        return self.finish(last, state)

    def begin(self) -> tuple[TrainState, int]:
        """Returns the trainer's state and the first step to run, of a new or a resumed run, once
        the weights are published. Afterwards `parameters` and `restored` are None, so that the run
        keeps no other copy of the weights alive."""
        if self.restored is None:
            return self.begin_new(), 0
        return self.begin_resumed()

    def begin_new(self) -> TrainState:
        """Returns the state of a new run, after publishing version 0 and evaluating it, unless
        `train.evaluate_first` is False or there is no step. Nothing is requested before: the
        figures of version 0 are those that training starts from."""
        state = self.updater.first_state(self.parameters, self.critic_parameters)
        # The first weights must not outlive their use.
        self.parameters = None
        self.critic_parameters = None
        self.publish_frozen(state)
        self.publish(0, state.trainable)
        self.begin_callbacks(0, state)
        # A run without steps has one evaluation, at its end.
        if self.config.train.evaluate_first and self.config.steps:
            self.evaluate(0, state, complete=True)
        return state

    def begin_resumed(self) -> tuple[TrainState, int]:
        """Returns the state and the first step of a resumed run as its checkpoint has them, after
        publishing their weights and requesting the pending groups and evaluations again. Evaluates
        the resumed version if that is due and was not done."""
        assert self.restored is not None
        version = self.restored.version
        state = self.restored.state
        extra = self.restored.extra
        self.publish_frozen(state)
        self.prompts.restore(extra["prompts"])
        self.useful_share = extra.get("useful_share", 1.0)
        # The checkpoint may hold versions that the present schedule would not ask for.
        restored_versions = sorted(self.restored.published)
        restored_versions.append(version)
        self.schedule = replace(self.schedule, restored_versions=tuple(restored_versions))
        self.pending.update(extra["pending"])
        # In order: the same addresses give the same tokens.
        for step, rows in self.pending.items():
            prompts = [self.prompts.of_row(row) for row in rows]
            self.source.request(self.group_requests(step, prompts))
        self.requested = version + len(self.pending)
        self.saved = version
        # Before publication, which drops the weights that nobody has requested.
        for older_version in extra.get("evaluating", ()):
            if older_version in self.restored.published:
                # The clock of an unfinished evaluation starts again. One that a checkpoint knows
                # was requested during training, so it is a quick one.
                requested = RequestedEvaluation(time.perf_counter(), full=False)
                self.evaluating[older_version] = requested
        for older_version in self.evaluating:
            self.evaluator.request_answers(
                self.source, step=older_version, version=older_version, full=False
            )
        for older_version, params in self.restored.published.items():
            # The step that the run resumes at decides what is kept.
            self.publish(older_version, params, step=version)
        # Decided by the present settings: `train.evaluate_every` may have changed, and with it what
        # must be published.
        if self.publication_due(version):
            self.publish(version, state.trainable)
        evaluated_again = set(self.evaluating)
        if self.is_evaluated_again(version, extra["evaluated"]):
            evaluated_again.add(version)
        self.recorder.restore(
            extra["recorder"],
            version,
            evaluated=extra["evaluated"],
            again=evaluated_again,
            data_sets=self.evaluator.sets,
            stored_settings=dict(leaves(extra["config"])),
            settings=values_of(self.config),
        )
        self.note_incomparable_scores(version)
        self.restored = None
        self.begin_callbacks(version, state)
        lacks_evaluation = self.evaluation_due(version) and version not in self.recorder.evaluations
        if lacks_evaluation and not self.ends_at(version):
            self.evaluate(version, state)
        return state, version

    def finish(self, last: int, state: TrainState) -> Summary:
        """Ends the run at the version `last`, which `state` has: saves it if it is earlier than the
        configuration says, evaluates it, waits until all is written, and returns the summary.
        RuntimeError if the frozen weights have changed."""
        if last < self.config.steps:
            # Saved before it is published, as the run ends here and its weights must not be lost.
            if self.saved != last:
                self.save(last, state)
                self.call_back_after_save(last, state)
            self.publish(last, state.trainable)
        # The last version is saved already: a kill from here on loses this evaluation alone.
        if self.callbacks.stopped_by and self.evaluation_requested(last):
            # An evaluation made a callback stop the run: it stays the one of this version.
            self.record_finished_evaluations(last, state, complete=True)
        else:
            self.evaluate(last, state, complete=True)
        self.store_resume_settings()
        self.checkpoints.finish()
        self.check_frozen(state)
        best = None
        if self.config.checkpoint.keep_best:
            ranked = self.checkpoints.ranked(self.recorder.scores())  # the best last
            best = ranked[-1] if ranked else None
        return self.recorder.finish(last, best)

    def note_incomparable_scores(self, version: int) -> None:
        """Prints a line if the run, resumed from the checkpoint of `version` with another reward,
        keeps the best checkpoints, and no evaluation so far counts for that any more."""
        if not self.config.checkpoint.keep_best or not self.recorder.evaluations:
            return
        if self.recorder.reward_changes.reward == version and not self.recorder.scores():
            self.recorder.console.note(
                f"checkpoint.keep_best: the evaluations up to step {version} are of another "
                "reward, so only later ones count; a checkpoint that was kept as the best of them "
                "is deleted when the next is saved, unless checkpoint.keep_last keeps it"
            )

    def is_evaluated_again(self, version: int, evaluated: bool) -> bool:
        """True if the run, resumed from the checkpoint of `version`, makes an evaluation of this
        version itself. `evaluated`: True if the checkpoint was saved after a complete evaluation of
        it. A version that was the last one of a run which now gets more steps is evaluated again
        only if `evaluate_every` asks for it."""
        if self.ends_at(version):
            return True  # the last version's evaluation is made after the last step
        return self.evaluation_due(version) and not evaluated

    def store_resume_settings(self) -> None:
        """Stores a resumed run's new settings, once: after a step succeeded, or at an interrupt.

        Not earlier: settings that end the run would end every later resume, too."""
        if self.store_settings:
            self.store_settings()
            self.store_settings = None

    @contextmanager
    def saved_if_given_up(self, version: int, state: TrainState) -> Iterator[None]:
        """Saves a checkpoint of `state`, which has this version, if the body raises ShoalError or
        StopRequested (a reward raises, somebody asks the run to stop); then raises that exception
        again. The step or evaluation in the body can then start again from the checkpoint. Saves
        nothing if an update has consumed `state`; version 0 is saved only by a stop after its
        evaluation. With dynamic sampling, the prompts are first set back to where the body began.
        If a ShoalError led to a checkpoint, its text gets the command for resuming."""
        # Prompts are read inside the block only to replace groups, which dynamic sampling does.
        prompts = self.prompts.state() if self.config.algorithm.dynamic_sampling else None
        try:
            yield
        # Any other exception is a fault of the program, and the state that it leaves is not worth a
        # checkpoint.
        except (ShoalError, StopRequested) as reason:
            if prompts is not None:
                self.prompts.restore(prompts)
            is_evaluated = version in self.recorder.evaluations
            stopped_before_first = isinstance(reason, StopRequested) and is_evaluated
            # The first update of a step donates the moments: from then on there is nothing left to
            # save.
            if (version > 0 or stopped_before_first) and is_intact(state):
                self.save(version, state)
                if isinstance(reason, ShoalError):
                    raise ShoalError(f"{reason}; {self.stopped_text()}") from reason
            raise

    def begin_callbacks(self, version: int, state: TrainState) -> None:
        """Tells the callbacks that training begins after `version` steps, with what a resumed run
        has recorded of them."""
        if self.callbacks.objects:
            steps = self.recorder.folder.read_steps() if version else {}
            self.call_back(version, state, self.callbacks.begin, steps, self.recorder.evaluations)

    def call_back(
        self, version: int, state: TrainState, event: Callable[..., None], *arguments: Any
    ) -> None:
        """Calls `event(version, *arguments)`, a method of `callbacks`, if there are any. If one
        fails, or somebody asks the run to stop meanwhile, a checkpoint of `state`, which has this
        version, is saved before the exception passes through."""
        if not self.callbacks.objects:
            return
        with self.saved_if_given_up(version, state), self.stop.raising_at_once():
            event(version, *arguments)

    def call_back_after_save(self, version: int, state: TrainState) -> None:
        """Calls the callbacks once the checkpoint of `version` is complete on disk, for which the
        run waits only if there is a callback that wants to know."""
        if self.callbacks.wants("on_save"):
            self.checkpoints.finish()
        self.call_back(version, state, self.callbacks.saved)

    def end_if_warned(self, version: int, state: TrainState) -> None:
        """Raises ShoalError in two cases: if a warning since the last step is hopeless; or if there
        is any warning and train.on_warning is "stop". Only in the second case a checkpoint is saved
        first. A warning is hopeless if its level is "wrong". Clears the recorder's list of
        warnings."""
        warned = self.recorder.warned
        self.recorder.warned = []
        hopeless = [finding for finding in warned if finding.level == "wrong"]
        if hopeless:
            good = self.last_good()
            if good is None:
                way_back = "no checkpoint is from before"
            else:
                path = self.checkpoints.folder / str(good)
                way_back = (
                    f"the last good checkpoint is of step {good}: shoal train model={path} ..."
                )
            raise ShoalError(f"stopped after step {version}: {hopeless[0].text} ({way_back})")
        if warned and self.config.train.on_warning == "stop":
            self.save(version, state)
            key = warned[0].key
            override = f" {key}=..., or" if key else ""
            text = "; ".join(finding.text for finding in warned)
            raise ShoalError(
                f"stopped after step {version} by train.on_warning=stop: {text}; resume: "
                f"{self.resume_command}{override} train.on_warning=continue"
            )

    def last_good(self) -> int | None:
        """Returns the newest checkpoint from before the updates that are being skipped; None if no
        update was skipped in the last step, or there is no such checkpoint. The weights that the
        first skipped update began with were bad already."""
        first_skipped = self.recorder.watch.first_skipped_step
        if first_skipped is None:
            return None
        # The watch counts steps from 1: this is the version that the skipped update began with.
        first_bad = first_skipped - 1
        good = [number for number in self.checkpoints.versions() if number < first_bad]
        return max(good, default=None)

    def stopped_text(self) -> str:
        """Returns the sentence that tells the user what was saved: nothing (then with the command
        that starts again), version 0 with its evaluation, or the newest saved step. The last two
        come with the command that resumes."""
        if self.saved < 0:
            return f"stopped: {NOTHING_KEPT}; start again: {self.resume_command}"
        if self.saved == 0:
            return (
                "stopped before the first step, with its evaluation saved; resume: "
                f"{self.resume_command}"
            )
        return (
            f"stopped after step {self.saved} of {self.config.steps}, which is saved; resume: "
            f"{self.resume_command}"
        )

    def request_published(self, version: int) -> None:
        """Requests the groups of the steps up to `lookahead.steps` after step `version`, as far as
        the versions that they sample from are no newer than `version`, the newest that is
        published. Requests nothing more once the data is exhausted, and tells the recorder so. Puts
        the rows of each requested step into `pending`, and counts the step in `requested`."""
        prompts_per_step = self.config.batch.prompts_per_step
        end = min(self.config.steps, version + self.lookahead.steps + 1)
        while self.requested < end and self.schedule.version(self.requested) <= version:
            try:
                prompts = self.prompts.next(prompts_per_step)
            except DataExhausted as exhausted:
                self.recorder.data_exhausted(str(exhausted))
                return
            # A step that samples ahead requests the expected replacements at once.
            if self.schedule.lag:
                most_extra = self.config.algorithm.max_sampling_rounds * prompts_per_step
                num_extra = dynamic_sampling.num_extra(prompts_per_step, self.useful_share)
                num_extra = min(num_extra, most_extra)
                if num_extra:
                    taken_rows = {prompt.example.row for prompt in prompts}
                    prompts += self.prompts.more(num_extra, taken_rows)
            self.pending[self.requested] = [prompt.example.row for prompt in prompts]
            self.source.request(self.group_requests(self.requested, prompts))
            self.requested += 1

    def ends_at(self, version: int) -> bool:
        """True if no step follows `version`, so that the final evaluation is of this version: it is
        the last one, a callback has stopped the run, or the data is exhausted, which it never is if
        the curriculum is off (`train.retire_above` 1)."""
        if version == self.config.steps or self.callbacks.stopped_by:
            return True
        return version not in self.pending and self.prompts.is_exhausted(
            self.config.batch.prompts_per_step
        )

    def group_requests(self, step: int, prompts: Sequence[TokenizedExample]) -> list[GroupRequest]:
        """Returns the requests for a step's groups, one for each prompt; sends nothing. Unless the
        schedule takes the newest weights, they accept tokens of the step's version alone
        (`exact`)."""
        group_size = self.config.batch.group_size
        params = self.config.sampling.params
        version = self.schedule.version(step)
        exact = not self.schedule.takes_newest
        requests = []
        for prompt in prompts:
            request = GroupRequest(
                purpose=Purpose.TRAIN,
                step=step,
                version=version,
                example=prompt.example,
                prompt_ids=prompt.prompt_ids,
                num_completions=group_size,
                params=params,
                exact=exact,
            )
            requests.append(request)
        return requests

    @timed("trainer", "wait for groups")
    def take(self, step: int) -> tuple[list[Group], list[Group]]:
        """Waits for the step's groups and returns (groups to train on, groups that were discarded).
        Without dynamic sampling no group is discarded. With it, groups without variance are
        replaced: more prompts are requested at the same version, in the order of the prompts, until
        the step is full, `max_sampling_rounds` is reached or no prompt is left. If there are still
        too few useful groups then, others fill up; with `on_too_few_groups=stop` the groups are
        written as discarded ones, and ShoalError is raised."""
        self.stop.announce_wait(f"the completions of step {step + 1}")
        a = self.config.algorithm
        prompts_per_step = self.config.batch.prompts_per_step
        groups = self.source.take(Purpose.TRAIN, step)
        if not a.dynamic_sampling:
            return groups, []
        most_prompts = (1 + a.max_sampling_rounds) * prompts_per_step
        while True:
            num_missing = dynamic_sampling.num_missing(groups, prompts_per_step, self.is_useful)
            num_allowed = most_prompts - len(groups)
            if num_missing == 0 or num_allowed <= 0:
                break
            taken_rows = {group.example.row for group in groups}
            prompts = self.prompts.more(min(num_missing, num_allowed), taken_rows)
            if not prompts:
                break
            self.source.request(self.group_requests(step, prompts))
            groups += self.source.take(Purpose.TRAIN, step)
        if num_missing and a.on_too_few_groups == "stop":
            self.recorder.keep_discarded(step, groups)
            text = dynamic_sampling.too_few_text(step, groups, prompts_per_step, self.is_useful, a)
            if self.config.report.groups:
                text += f"; `shoal groups RUN step={step + 1} filter=set=discarded` prints them"
            raise ShoalError(text, "algorithm.max_sampling_rounds")
        return dynamic_sampling.select(groups, prompts_per_step, self.is_useful)

    def is_useful(self, group: Group) -> bool:
        """True if dynamic sampling keeps the group, because its completions differ in what
        `algorithm.dynamic_sampling_by` names: the verdict of right or wrong, the reward, or a
        number that a reward function logged."""
        # "" leaves no reward function out
        penalty = PENALTY if self.config.reward.overlong_buffer_tokens else ""
        return dynamic_sampling.has_signal(group, self.config.algorithm, penalty)

    def step_done(self, step: int, groups: Sequence[Group], discarded: Sequence[Group]) -> None:
        """Notes that a step's groups were used: removes the step from the pending requests, and
        updates the pass rates of prompts and, with dynamic sampling, the share of useful groups."""
        del self.pending[step]
        sampled = [*groups, *discarded]
        if self.config.algorithm.dynamic_sampling:
            num_useful = sum(map(self.is_useful, sampled))
            self.useful_share = num_useful / len(sampled)
        self.prompts.rates.add(sampled)

    def publish_frozen(self, state: TrainState) -> None:
        if state.frozen is not None:
            self.source.publish_frozen(state.frozen)

    def check_frozen(self, state: TrainState) -> None:
        """Raises RuntimeError if the bits of the frozen weights have changed since the run's start:
        their checksum is compared with the one in `fingerprint`. Does nothing if all weights are
        trained."""
        if state.frozen is None:
            return
        at_start = self.fingerprint["base"]
        now = weights_text(state.frozen)
        if now != at_start:
            raise RuntimeError(
                f"the frozen weights have changed since the start (checksum {at_start} then, {now} "
                "now), so the checkpoints of this run belong to no known model: a memory or a "
                "device is faulty"
            )

    @timed("publication", "publish")
    def publish(self, version: int, params: Params, step: int | None = None) -> None:
        """Publishes trained weights as `version`, before `step` begins (None: the step that starts
        from this version). The version that this step samples from is kept, since the step may ask
        for more groups, or be given up and start again."""
        if step is None:
            step = version
        self.source.publish(version, params, keep_from=self.schedule.keep_from(step))

    def publication_due(self, version: int) -> bool:
        """True for a version that a step samples from, that is evaluated, or that is the last."""
        return (
            self.schedule.publishes(version)
            or self.evaluation_due(version)
            or version == self.config.steps
        )

    def evaluation_due(self, version: int) -> bool:
        """True if `evaluate_every` asks for an evaluation of this version during training; the last
        version's evaluation does not count, since it is always made."""
        every = self.config.evaluate_every
        return every > 0 and version % every == 0 and version < self.config.steps

    def evaluation_requested(self, version: int) -> bool:
        """True if the evaluation of this version was requested, whether it is recorded or not."""
        return version in self.evaluating or version in self.recorder.evaluations

    @timed("trainer", "evaluate")
    def evaluate(self, version: int, state: TrainState, complete: bool = False) -> None:
        """Requests the figures of one version by data set.

        `complete`: all questions are asked, and their answers are waited for, as before the first
        step and after the last. Else they are recorded once they are there: in a later step if
        hosts sample in the background; at once, waiting for them, if they sample only while the
        caller waits (`RolloutSource.is_busy_with`)."""
        with self.saved_if_given_up(version, state):
            self.stop.check()
            self.stop.announce_wait(f"the evaluation {version_text(version)}")
            self.recorder.begin_evaluation(version, self.evaluator.num_completions(full=complete))
            self.evaluator.request_answers(
                self.source, step=version, version=version, full=complete
            )
        self.evaluating[version] = RequestedEvaluation(time.perf_counter(), complete)
        self.record_finished_evaluations(version, state, complete)

    def record_finished_evaluations(
        self, current_version: int, state: TrainState, complete: bool = False
    ) -> None:
        """Records the evaluations whose answers are there; with `complete` all that were requested,
        waiting for their answers. `current_version` is the version of `state`, which is saved if a
        reward raises or a stop is requested meanwhile. A recorded evaluation is removed from
        `evaluating`, and passed to the callbacks."""
        for version, requested in list(self.evaluating.items()):
            if not complete and self.source.is_busy_with(Purpose.EVALUATE, version):
                continue
            with self.saved_if_given_up(current_version, state):
                collected = self.evaluator.collect(self.source, version, requested.full)
                figures, groups = self.evaluator.score(collected)
                self.recorder.evaluation(
                    version,
                    figures,
                    groups,
                    self.evaluator.num_completions(requested.full),
                    time.perf_counter() - requested.started,
                )
                del self.evaluating[version]
            if figures:
                self.call_back(current_version, state, self.callbacks.evaluated, version, figures)

    @timed("trainer", "record")
    def record(
        self,
        step: int,
        groups: Sequence[Group],
        discarded: Sequence[Group],
        result: UpdateResult,
        seconds: float,
    ) -> dict[str, float]:
        """Records one step in metrics, files and terminal, and returns its metrics by name.
        `seconds` is the time of the whole step, with the waiting."""
        table = result.table
        num_filled = 0
        if self.config.algorithm.dynamic_sampling:
            num_filled = sum(not self.is_useful(group) for group in groups)
        record = StepRecord(
            step=step,
            groups=groups,
            advantages=table.completion_advantages,
            turn_advantages=table.turn_advantages,
            nonzero_std=table.nonzero_std,
            logprobs=result.logprobs,
            metrics=result.metrics,
            seconds=seconds,
            discarded=discarded,
            num_filled=num_filled,
            masks_truncated=self.config.algorithm.mask_truncated,
            prompts_dropped=self.prompts.dropped,
            prompts_retired=len(self.prompts.rates.retired()),
        )
        return self.recorder.step(record)

    def save_due(self, version: int) -> bool:
        """True if a checkpoint of this version is due: after each `checkpoint.every` steps, at the
        end, or because it may be the best: it is evaluated, and `checkpoint.keep_best` is set."""
        c = self.config.checkpoint
        on_schedule = c.every > 0 and version % c.every == 0
        may_be_best = c.keep_best > 0 and self.evaluation_due(version)
        return version == self.config.steps or may_be_best or on_schedule

    @timed("trainer", "save")
    def save(self, version: int, state: TrainState) -> None:
        """Saves a checkpoint of `state` as this version; does nothing if the newest checkpoint
        already is of this version. Groups and metrics of the steps before are written to disk
        first. The checkpoint also holds the older published versions that later steps or unfinished
        evaluations need. Calls `after_save` at the end."""
        if version == self.saved:
            return
        started = time.perf_counter()
        self.stop.announce_wait(f"the checkpoint of step {version}")
        # Groups and metrics of the covered steps are written to disk first, so that a kill between
        # the two loses nothing.
        self.recorder.sync(self.prompts.rates.record())
        published = self.source.published()
        extra = {
            "version": version,
            "prompts": self.prompts.state(),
            "pending": sorted(self.pending.items()),
            "useful_share": self.useful_share,
            "evaluated": version in self.recorder.evaluations,
            "evaluating": sorted(self.evaluating),
            "recorder": self.recorder.state(),
            "config": to_dict(self.config),
            "facts": dict(self.fingerprint),
        }
        # this checkpoint is never deleted, however old it gets; None protects nothing
        self.checkpoints.protected = self.last_good()
        older: dict[int, Params] = {}
        # The same version may be in both lists: as a key of `older` it is stored once.
        for number in self.schedule.older_versions(version) + list(self.evaluating):
            if number in published and number != version:
                older[number] = published[number]
        self.checkpoints.save(version, state, extra, older, self.recorder.scores())
        self.saved = version
        self.after_save(version)
        self.recorder.spent("checkpoint", time.perf_counter() - started)
