"""The loop, in life-cycle order: evaluate, then at each step take groups, learn, publish; evaluate again.

Synchronous is asynchronous with zero staleness: each step's groups are asked for at a named version as soon as that
version is published (`lag` steps ahead), and the loop never knows where the tokens come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.config.schema import Config, SamplingSection
from shoal.report.console import Console
from shoal.report.folder import RunFolder
from shoal.trainer.checkpoint import Checkpoints
from shoal.trainer.evaluation import Evaluator
from shoal.trainer.prompts import PromptStream
from shoal.trainer.record import Recorder
from shoal.trainer.step import TrainState
from shoal.trainer.update import Updater
from shoal.types import Group, GroupRequest, Params, Purpose, RolloutSource, SamplingParams


@dataclass(frozen=True)
class Schedule:
    """Which version each step samples from: `publish_every * floor(max(0, step - lag) / publish_every)`."""

    lag: int = 0
    publish_every: int = 1

    def version(self, step: int) -> int:
        return self.publish_every * (max(0, step - self.lag) // self.publish_every)

    def publishes(self, version: int) -> bool:
        return version % self.publish_every == 0


@dataclass
class Run:
    """Everything that a run is made of, and `train`, which makes it go."""

    config: Config
    parameters: Params | None
    updater: Updater
    source: RolloutSource
    prompts: PromptStream
    evaluator: Evaluator
    folder: RunFolder
    console: Console
    checkpoints: Checkpoints
    recorder: Recorder
    schedule: Schedule = field(default_factory=Schedule)
    after_step: Callable[[int, dict[str, float]], None] | None = None
    asked: int = 0  # steps whose groups have been asked for

    def train(self) -> dict[str, Any]:
        state = self.updater.learner.init(self.parameters)
        self.parameters = None  # the first weights must not outlive their use
        self.source.publish(0, state.trainable)
        before, answers_before = self.evaluate(0, ends=True)
        self.recorder.begin_training()
        for step in range(self.config.steps):
            started = time.perf_counter()
            self.ask(published=step)
            groups = self.source.take(Purpose.TRAIN, step)
            state, outcome = self.updater.update(state, groups, step)
            if self.publication_due(step + 1):
                self.source.publish(step + 1, state.trainable)
            metrics = self.recorder.step(step, groups, outcome, time.perf_counter() - started)
            self.save(step + 1, state)
            if self.after_step:
                self.after_step(step, metrics)
            if self.evaluation_due(step + 1):
                self.evaluate(step + 1)
        after, answers_after = self.evaluate(self.config.steps, ends=True)
        return self.recorder.finish(before, after, answers_before, answers_after)

    def ask(self, published: int) -> None:
        """Asks for the groups of every step whose version exists by now."""
        while self.asked < self.config.steps and self.schedule.version(self.asked) <= published:
            step, size = self.asked, self.config.batch.group_size
            self.source.request([
                GroupRequest(Purpose.TRAIN, step, self.schedule.version(step), prompt.example, prompt.prompt_ids, size,
                             sampling_params(self.config.sampling))
                for prompt in self.prompts.next(self.config.batch.prompts_per_step)
            ])
            self.asked += 1

    def publication_due(self, version: int) -> bool:
        """On schedule, and where the version is to be evaluated."""
        return self.schedule.publishes(version) or self.evaluation_due(version) or version == self.config.steps

    def evaluation_due(self, version: int) -> bool:
        every = self.config.train.evaluate_every
        return every > 0 and version % every == 0 and version < self.config.steps

    def evaluate(self, version: int, ends: bool = False) -> tuple[dict[str, dict[str, Any]], list[Group]]:
        """Figures of one version by data set, and its greedy answers; pass@k only at the run's ends."""
        started = time.perf_counter()
        figures, groups = self.evaluator.evaluate(self.source, version, version, sampled=ends)
        self.recorder.evaluation(version, figures, groups, time.perf_counter() - started)
        return figures, groups

    def save(self, version: int, state: TrainState) -> None:
        period = self.config.checkpoint.checkpoint_period
        if version == self.config.steps or (period and version % period == 0):
            started = time.perf_counter()
            self.checkpoints.save(version, state, {"cursor": self.prompts.cursor, "source": self.source.state()})
            self.recorder.spent("checkpoint", time.perf_counter() - started)


def sampling_params(s: SamplingSection) -> SamplingParams:
    return SamplingParams(s.temperature, s.top_k, s.top_p, s.min_p, s.max_completion_tokens, s.stop)
