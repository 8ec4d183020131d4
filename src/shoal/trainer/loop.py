"""The loop, in life-cycle order: evaluate, then at each step take groups, learn, publish; evaluate again.

Synchronous is asynchronous with zero staleness: each step's groups are asked for at a named version as soon as that
version is published (`lag` steps ahead), and the loop never knows where the tokens come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from shoal.config.schema import Config, SamplingSection
from shoal.config.text import to_dict
from shoal.rewards.overlong import PENALTY
from shoal.trainer.checkpoint import Checkpoints, Restored
from shoal.trainer.curriculum import DataExhausted, Prepared, PromptStream
from shoal.trainer.evaluation import Evaluator
from shoal.trainer.recorder import Recorder
from shoal.trainer.step import TrainState
from shoal.trainer.step_table import is_useful
from shoal.trainer.update import Updater
from shoal.types import Group, GroupRequest, Params, Purpose, RolloutSource, SamplingParams, ShoalError


@dataclass(frozen=True)
class Schedule:
    """Which version each step samples from: `weight_sync_interval * floor(max(0, step - lag) / weight_sync_interval)`."""

    lag: int = 0
    weight_sync_interval: int = 1

    def version(self, step: int) -> int:
        return self.weight_sync_interval * (max(0, step - self.lag) // self.weight_sync_interval)

    def publishes(self, version: int) -> bool:
        return version % self.weight_sync_interval == 0


@dataclass
class Run:
    """Everything that a run is made of, and `train`, which makes it go."""

    config: Config
    parameters: Params | None  # the first weights; None where `restored` has others
    updater: Updater
    source: RolloutSource
    prompts: PromptStream
    evaluator: Evaluator
    checkpoints: Checkpoints
    recorder: Recorder
    schedule: Schedule = field(default_factory=Schedule)
    restored: Restored | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # what each checkpoint tells of machine and data
    stopping: Callable[[], bool] = lambda: False  # somebody asked the run to stop
    around_step: Callable[[int], AbstractContextManager[Any]] = lambda step: nullcontext()
    after_step: Callable[[int, dict[str, float]], None] | None = None
    asked: int = 0  # steps whose groups have been asked for
    pending: dict[int, list[int]] = field(default_factory=dict)  # step -> rows asked for and not learnt from yet
    saved: int = -1  # the newest version of which there is a checkpoint

    def train(self) -> dict[str, Any]:
        state, first = self.begin()
        self.recorder.begin_training(first)
        last = self.config.steps
        for step in range(first, self.config.steps):
            self.stop_if_asked(step, state)
            started = time.perf_counter()
            self.ask(published=step)
            if step not in self.pending:  # every prompt is learnt
                last = step
                break
            with self.around_step(step + 1):
                with self.saved_on_failure(step, state):
                    groups, discarded = self.take(step)
                state, outcome = self.updater.update(state, groups, step)
                self.step_done(step, groups, discarded)
                if self.publication_due(step + 1):
                    self.publish(step + 1, state.trainable, step + 1)
                metrics = self.recorder.step(step, groups, outcome, time.perf_counter() - started, len(discarded))
            if self.evaluation_due(step + 1) and not self.ends_at(step + 1):
                with self.saved_on_failure(step + 1, state):
                    self.evaluate(step + 1)
            if self.save_due(step + 1):
                self.save(step + 1, state)
            if self.after_step:
                self.after_step(step, metrics)
        self.stop_if_asked(last, state)
        if last < self.config.steps:
            self.save(last, state)
            self.publish(last, state.trainable, last)
        self.evaluate(last, ends=True)
        self.checkpoints.finish()
        return self.recorder.finish(last)

    def begin(self) -> tuple[TrainState, int]:
        """The trainer's state and the first step: of a new run after its first evaluation, or of a checkpoint."""
        if self.restored is None:
            state = self.updater.learner.init(self.parameters)
            self.parameters = None  # the first weights must not outlive their use
            self.publish(0, state.trainable, 0)
            self.evaluate(0, ends=True)
            return state, 0
        version, state, extra = self.restored.version, self.restored.state, self.restored.extra
        self.prompts.restore(extra["prompts"])
        for step, rows in extra["pending"]:
            self.request(step, [self.prompts.of_row(row) for row in rows])
        self.asked, self.saved = version + len(self.pending), version
        for number, params in self.restored.published.items():
            self.publish(number, params, version)
        if extra["version_is_published"] or version == self.config.steps:
            self.publish(version, state.trainable, version)
        self.source.restore(extra["source"])
        self.recorder.restore(extra["recorder"], version, extra["evaluated"])
        self.restored = None
        failed = self.evaluation_due(version) and version not in self.recorder.evaluations
        if failed and not self.ends_at(version):
            self.evaluate(version)
        return state, version

    @contextmanager
    def saved_on_failure(self, version: int, state: TrainState) -> Iterator[None]:
        """Where groups cannot be had (a reward that raises), what was learnt so far is saved."""
        try:
            yield
        except ShoalError:
            if version > 0:
                self.save(version, state)
            raise

    def ask(self, published: int) -> None:
        """Asks for the groups of every step whose version exists by now; of none any more where all is learnt."""
        while self.asked < self.config.steps and self.schedule.version(self.asked) <= published:
            try:
                prompts = self.prompts.next(self.config.batch.prompts_per_step)
            except DataExhausted as exhausted:
                self.recorder.data_exhausted(str(exhausted))
                return
            self.request(self.asked, prompts)
            self.asked += 1

    def ends_at(self, version: int) -> bool:
        """Whether the data is learnt and no step follows: what is evaluated of this version is evaluated at the end."""
        return version not in self.pending and self.prompts.is_exhausted(self.config.batch.prompts_per_step)

    def request(self, step: int, prompts: Sequence[Prepared]) -> None:
        """A step's groups; asked again after a restart, the same addresses give the same tokens."""
        self.pending[step] = [prompt.example.row for prompt in prompts]
        self.source.request(self.group_requests(step, prompts))

    def group_requests(self, step: int, prompts: Sequence[Prepared]) -> list[GroupRequest]:
        size, params = self.config.batch.group_size, sampling_params(self.config.sampling)
        version = self.schedule.version(step)
        return [GroupRequest(Purpose.TRAIN, step, version, prompt.example, prompt.prompt_ids, size, params)
                for prompt in prompts]

    def take(self, step: int) -> tuple[list[Group], list[Group]]:
        """The step's groups; with dynamic sampling, further ones stand in for those without variance, which come second
        (DAPO, arXiv 2503.14476, eq. 11). They are asked for like any others, by address: at the same version, in the
        order of the prompts."""
        a, wanted = self.config.algorithm, len(self.pending[step])
        groups = self.source.take(Purpose.TRAIN, step)
        if not a.dynamic_sampling:
            return groups, []
        before = self.prompts.state()
        try:
            for _ in range(a.max_sampling_rounds):
                useful = sum(map(self.is_useful, groups))
                if useful >= wanted:
                    break
                count = min(wanted, -(-(wanted - useful) * len(groups) // max(useful, 1)))
                if not (prompts := self.prompts.more(count, {group.example.row for group in groups})):
                    break
                self.source.request(self.group_requests(step, prompts))
                groups += self.source.take(Purpose.TRAIN, step)
        except ShoalError:
            self.prompts.restore(before)
            self.ask_again()
            raise
        order = sorted(range(len(groups)), key=lambda n: (not self.is_useful(groups[n]), n))
        chosen = sorted(order[:wanted])
        return [groups[n] for n in chosen], [group for n, group in enumerate(groups) if n not in chosen]

    def is_useful(self, group: Group) -> bool:
        return is_useful(group, self.config.algorithm, PENALTY if self.config.reward.overlong_buffer_tokens else "")

    def ask_again(self) -> None:
        """Puts every pending step as a whole before the source, in order: as a checkpoint will ask for them."""
        for step in self.pending:
            self.source.cancel(Purpose.TRAIN, step)
        for step, rows in sorted(self.pending.items()):
            self.source.request(self.group_requests(step, [self.prompts.of_row(row) for row in rows]))

    def step_done(self, step: int, groups: Sequence[Group], discarded: Sequence[Group]) -> None:
        del self.pending[step]
        self.prompts.rates.add([*groups, *discarded])

    def publish(self, version: int, params: Params, step: int) -> None:
        """Before `step`. What it samples from stays as long as it may ask for further groups; at the run's end too,
        that may be given more steps, or another bound where the data is learnt."""
        ends = step >= self.config.steps or self.prompts.ended is not None
        stays = self.config.algorithm.dynamic_sampling or ends
        self.source.publish(version, params, keep_from=self.schedule.version(step) if stays else None)

    def publication_due(self, version: int) -> bool:
        """On schedule, and where the version is to be evaluated."""
        return self.schedule.publishes(version) or self.evaluation_due(version) or version == self.config.steps

    def evaluation_due(self, version: int) -> bool:
        every = self.config.train.evaluate_every
        return every > 0 and version % every == 0 and version < self.config.steps

    def evaluate(self, version: int, ends: bool = False) -> None:
        """Files the figures of one version by data set, and its greedy answers; pass@k only at the run's ends."""
        started = time.perf_counter()
        self.recorder.begin_evaluation(version)
        figures, groups = self.evaluator.evaluate(self.source, version, version, sampled=ends)
        self.recorder.evaluation(version, figures, groups, time.perf_counter() - started)

    def save_due(self, version: int) -> bool:
        c = self.config.checkpoint
        best = c.keep_best > 0 and self.evaluation_due(version)
        return version == self.config.steps or best or (c.every > 0 and version % c.every == 0)

    def save(self, version: int, state: TrainState) -> None:
        if version == self.saved:
            return
        started = time.perf_counter()
        source = self.source.state()
        published = source.pop("published", {})
        extra = {
            "version": version,
            "version_is_published": version in published,
            "prompts": self.prompts.state(),
            "pending": sorted(self.pending.items()),
            "source": source,
            "evaluated": version in self.recorder.evaluations,
            "recorder": self.recorder.state(),
            "config": to_dict(self.config),
            "facts": dict(self.fingerprint),
        }
        older = {number: params for number, params in published.items() if number != version}
        self.checkpoints.save(version, state, extra, older, self.recorder.scores())
        self.saved = version
        self.recorder.after_save()
        self.recorder.spent("checkpoint", time.perf_counter() - started)

    def stop_if_asked(self, version: int, state: TrainState) -> None:
        """Saves and raises KeyboardInterrupt, whose text says how to go on."""
        if self.stopping():
            self.save(version, state)
            self.checkpoints.finish()
            raise KeyboardInterrupt(self.recorder.stopped(version, self.config))


def sampling_params(s: SamplingSection) -> SamplingParams:
    return SamplingParams(s.temperature, s.top_k, s.top_p, s.min_p, s.max_completion_tokens, s.stop)
