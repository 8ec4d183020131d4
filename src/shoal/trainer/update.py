"""What one step's groups do to the weights: advantages, weights, mini-batches, log-probs, updates, metrics.

    groups -> advantages[P, G] -> for each epoch, each mini-batch: token weights -> micro-batches -> accumulate, apply
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from shoal.algorithm.advantage import ADVANTAGES, informative
from shoal.algorithm.aggregation import token_weights
from shoal.config.schema import AlgorithmSection, BatchSection
from shoal.report.metrics import MetricSet
from shoal.trainer.batch import MicroBatch, Shape, choose_shape, pack
from shoal.trainer.step import Applied, Learner, ParameterScorer, TrainState
from shoal.types import Address, Group, Scorer

Key = tuple[int, int]
"""(group, completion)"""


@dataclass(frozen=True)
class Table:
    """A step's groups as arrays, [P, G]."""

    rewards: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray  # drawn tokens
    advantages: np.ndarray
    informative: np.ndarray  # [P]

    @classmethod
    def of(cls, groups: Sequence[Group], a: AlgorithmSection) -> Table:
        rewards = np.stack([group.rewards for group in groups])
        valid = np.stack([group.valid for group in groups])
        lengths = np.array([[int(c.drawn.sum()) for c in group.completions] for group in groups])
        advantages = ADVANTAGES[a.advantage](rewards, valid, std_ddof=a.std_ddof, std_eps=a.std_eps)
        return cls(rewards, valid, lengths, advantages, informative(rewards, valid))


@dataclass
class Outcome:
    """What learning from one step's groups gave: metrics, and the trainer's log-probs before its first update, by
    (group, completion)."""

    table: Table
    metrics: MetricSet
    logprobs: dict[Key, np.ndarray] = field(default_factory=dict)
    correction: np.ndarray = field(default_factory=lambda: np.zeros(3))  # sums of w, 1 and w^2, w = exp(old - beh)


@dataclass(frozen=True)
class Updater:
    """Makes a step's updates. `reference` scores what the KL term refers to; None where its weight is 0."""

    learner: Learner
    algorithm: AlgorithmSection
    batch: BatchSection
    temperature: float
    seed: int
    reference: Scorer | None = None

    def update(self, state: TrainState, groups: Sequence[Group], step: int) -> tuple[TrainState, Outcome]:
        started = time.perf_counter()
        table = Table.of(groups, self.algorithm)
        outcome = Outcome(table, MetricSet())
        shards = self.learner.model.role.row_shards
        prompts = -(-self.batch.prompts_per_step // self.algorithm.num_minibatches)
        shape = choose_shape(groups, prompts, self.batch.group_size, self.batch.micro_tokens,
                             shards)
        old, ref = self._given(state, groups, table, shape)
        trained = 0
        outcome.logprobs |= old or {}
        for epoch in range(self.algorithm.num_epochs):
            for members in self._minibatches(len(groups), step, epoch):
                batches = self._pack(groups, table, members, shape, old, ref)
                state = self._one(state, batches, outcome, keep=old is None)
                trained += sum(int((batch.arrays.segment > 0).sum() + batch.arrays.prefix_len.sum())
                               for batch in batches)
                self._saved(batches, outcome.metrics)
        w, count, squares = outcome.correction
        if count:
            outcome.metrics.add("mismatch/ess", w**2 / (count * squares))
        outcome.metrics.add("tokens/trained", trained)
        seconds = time.perf_counter() - started
        outcome.metrics.add("time/update_seconds", seconds)
        outcome.metrics.add("throughput/train_tokens_per_second", trained, seconds)
        return state, outcome

    def _minibatches(self, count: int, step: int, epoch: int) -> list[np.ndarray]:
        """Numbers of the groups in each update of an epoch, in an order of their own."""
        parts = self.algorithm.num_minibatches
        order = np.arange(count)
        if parts > 1:
            key = Address(self.seed, "minibatches", step, epoch).key(0)
            order = np.random.default_rng(key.tolist()).permutation(count)
        return np.array_split(order, parts)

    def _pack(self, groups: Sequence[Group], table: Table, members: np.ndarray, shape: Shape,
              old: dict[Key, np.ndarray] | None, ref: dict[Key, np.ndarray] | None) -> list[MicroBatch]:
        """Micro-batches of one update. Groups without variance stay out where nothing but the advantage acts on
        them; by `degenerate` they still count in the denominator, or do not."""
        counts = np.ones_like(table.valid)
        if self.algorithm.degenerate == "renormalise":
            counts &= table.informative[:, None]
        weights = np.zeros(table.valid.shape)
        weights[members] = token_weights(self.algorithm.aggregation, table.lengths[members], table.valid[members],
                                         counts[members])
        include = [int(n) for n in members if table.informative[n] or self.algorithm.kl_coef > 0]
        return pack(groups, include, table.advantages, weights, shape, self.temperature, old, ref)

    def _given(self, state: TrainState, groups: Sequence[Group], table: Table,
               shape: Shape) -> tuple[dict[Key, np.ndarray] | None, dict[Key, np.ndarray] | None]:
        """Log-probs that need a pass of their own before the first update: `old` where several updates are made,
        `ref` where there is a reference."""
        own = ParameterScorer(self.learner, state.trainable) if self.learner.objective.use_old else None
        wanted = (own, self.reference)
        if wanted == (None, None):
            return None, None
        batches = self._pack(groups, table, np.arange(len(groups)), shape, None, None)
        return tuple(None if scorer is None else self._scores(scorer, batches) for scorer in wanted)  # type: ignore[return-value]

    def _scores(self, scorer: Scorer, batches: Sequence[MicroBatch]) -> dict[Key, np.ndarray]:
        values = [scorer.score(batch.arrays) for batch in batches]
        found: dict[Key, np.ndarray] = {}
        for batch, value in zip(batches, values, strict=True):
            found |= batch.take(np.asarray(value))
        return found

    def _one(self, state: TrainState, batches: Sequence[MicroBatch], outcome: Outcome, keep: bool) -> TrainState:
        """One update from its micro-batches; their log-probs are kept where they are those before the first update."""
        total, lps = None, []
        for batch in batches:
            total, lp = self.learner.accumulate(total, state, batch.arrays)
            lps.append(lp)
        assert total is not None
        sums, maxima = total.sums, total.maxima
        state, applied = self.learner.apply(state, total)
        sums, maxima, applied, values = jax.device_get((sums, maxima, applied, lps if keep else []))
        outcome.correction += [float(x) for x in (*sums.pop("mismatch/w"), sums.pop("mismatch/w2")[0])]
        _record(outcome.metrics, sums, maxima, applied)
        if keep:
            for batch, value in zip(batches, values, strict=True):
                outcome.logprobs |= batch.take(value)
        return state

    def _saved(self, batches: Sequence[MicroBatch], metrics: MetricSet) -> None:
        """Share of prompt tokens that sharing spared: of what one prompt a completion would have cost."""
        for batch in batches:
            lengths = np.asarray(batch.arrays.prefix_len)
            completions = (np.asarray(batch.arrays.segment)[..., 0] > 0).sum(1)
            flattened = float((lengths * completions).sum())
            metrics.add("tokens/prompt_saved", flattened - float(lengths.sum()), flattened)


def _record(metrics: MetricSet, sums: dict, maxima: dict, applied: Applied) -> None:
    for name, (value, number) in sums.items():
        if number:
            metrics.add(name, float(value), float(number))
    if sums["mismatch/logprob_mean"][1]:
        metrics.add("mismatch/logprob_max", float(maxima["mismatch/logprob_max"]))
    metrics.add("loss", float(applied.loss))
    metrics.add("grad_norm", float(applied.grad_norm))
    metrics.add("lr", float(applied.lr))
    metrics.add("update/skipped", int(applied.skipped))
    metrics.add("update/count", 1 - int(applied.skipped))


