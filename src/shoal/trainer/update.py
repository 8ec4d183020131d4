"""What one step's groups do to the weights: advantages, weights, mini-batches, log-probs, updates, metrics.

    groups -> log-probs given beforehand (old, ref, teacher) -> advantages[P, G]
           -> for each epoch, each mini-batch: token weights -> micro-batches -> accumulate, apply
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from shoal.algorithm.advantage import informative, step_advantages
from shoal.algorithm.aggregation import token_weights
from shoal.algorithm.kl import token_kl
from shoal.config.schema import AlgorithmSection, BatchSection
from shoal.report.metrics import MetricSet
from shoal.trainer.batch import MicroBatch, Shape, TokenValues, choose_shape, pack
from shoal.trainer.step import Applied, Learner, Objective, ParameterScorer, TrainState
from shoal.types import Address, Group, Scorer, StopReason


def takes_every_group(a: AlgorithmSection, taught: bool) -> bool:
    """Whether more than the advantage acts on a group: a divergence, an entropy bonus, a teacher (`taught`)."""
    return a.kl_coef > 0 or a.entropy_coef > 0 or taught


def scores_old(a: AlgorithmSection, taught: bool) -> bool:
    """Whether `old` takes a pass of its own: several updates read it, or a divergence in the reward, or a teacher."""
    return Objective.of(a).use_old or (a.kl_in == "reward" and a.kl_coef > 0) or taught


def num_scorings(a: AlgorithmSection, taught: bool) -> int:
    """Passes over a step's batch beside the updates: for `old`, for the reference, for a teacher."""
    return scores_old(a, taught) + (a.kl_coef > 0) + taught


@dataclass(frozen=True)
class Table:
    """A step's groups as arrays, [P, G]."""

    rewards: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray  # drawn tokens
    cut: np.ndarray  # the completion reached the limit
    advantages: np.ndarray
    informative: np.ndarray  # [P]

    @classmethod
    def of(cls, groups: Sequence[Group], a: AlgorithmSection, penalty: np.ndarray | None = None) -> Table:
        """`penalty[P, G]` is taken off the rewards before they become advantages; not for `gdpo`, which takes the
        functions' own values."""
        rewards = np.stack([group.rewards for group in groups])
        valid = np.stack([group.valid for group in groups])
        lengths = np.array([[int(c.drawn.sum()) for c in group.completions] for group in groups])
        cut = np.array([[c.stop_reason == StopReason.LENGTH for c in group.completions] for group in groups])
        components = [group.reward_components for group in groups]
        judged = rewards if penalty is None else rewards - penalty
        advantages = step_advantages(a, judged, valid, components, groups[0].reward_weights)
        return cls(rewards, valid, lengths, cut, advantages, informative(rewards, valid))


@dataclass
class Outcome:
    """What learning from one step's groups gave: metrics, and the trainer's log-probs before its first update, by
    (group, completion)."""

    table: Table
    metrics: MetricSet
    logprobs: TokenValues = field(default_factory=dict)
    correction: np.ndarray = field(default_factory=lambda: np.zeros(3))  # sums of w, 1 and w^2, w = exp(old - beh)


@dataclass(frozen=True)
class Given:
    """Log-probs from before the first update, by (group, completion); None where nothing reads them."""

    old: TokenValues | None = None
    ref: TokenValues | None = None
    teacher: TokenValues | None = None


@dataclass(frozen=True)
class Updater:
    """Makes a step's updates. `reference` scores what the KL term refers to; None where its weight is 0. `teacher`
    scores whose log-prob minus the policy's, times `teacher_coef`, is added to each token's advantage. `max_tokens`:
    the longest completion. `num_kept`: K of `pack`."""

    learner: Learner
    algorithm: AlgorithmSection
    batch: BatchSection
    temperature: float
    seed: int
    reference: Scorer | None = None
    teacher: Scorer | None = None
    teacher_coef: float = 1.0
    max_tokens: int = 1
    num_kept: int = 0

    def update(self, state: TrainState, groups: Sequence[Group], step: int) -> tuple[TrainState, Outcome]:
        started = time.perf_counter()
        shards = self.learner.model.role.row_shards
        prompts = -(-self.batch.prompts_per_step // self.algorithm.num_minibatches)
        shape = choose_shape(groups, prompts, self.batch.group_size, self.batch.micro_tokens,
                             shards)
        metrics, table = MetricSet(), Table.of(groups, self.algorithm)
        given = self._given(state, groups, table, shape)
        if (penalty := self._penalty(groups, table, given, shape, metrics)) is not None:
            table = Table.of(groups, self.algorithm, penalty)
        outcome = Outcome(table, metrics)
        shift = self._shift(groups, given, metrics)
        old = given.old if self.learner.objective.use_old else None
        outcome.logprobs |= given.old or {}
        trained = 0
        for epoch in range(self.algorithm.num_epochs):
            for members in self._minibatches(len(groups), step, epoch):
                batches = self._pack(groups, table, members, shape, old, given.ref, shift)
                state = self._one(state, batches, outcome, keep=given.old is None)
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
              old: TokenValues | None, ref: TokenValues | None, shift: TokenValues | None) -> list[MicroBatch]:
        """Micro-batches of one update. By `degenerate`, groups that teach nothing count in the denominator, or do not.
        Completions that were cut count as completions, none of their tokens does, where `mask_cut` says so."""
        a, included = self.algorithm, self._included(table, members)
        counts = np.ones_like(table.valid)
        if a.degenerate == "renormalise":
            counts &= np.isin(np.arange(len(groups)), included)[:, None]
        lengths = np.where(table.cut, 0, table.lengths) if a.mask_cut else table.lengths
        weights = np.zeros(table.valid.shape)
        weights[members] = token_weights(a.aggregation, lengths[members], table.valid[members], counts[members],
                                         a.aggregation_tokens or self.max_tokens)
        return pack(groups, included, table.advantages, weights, shape, self.temperature, old,
                    ref, shift, self.num_kept)

    def _included(self, table: Table, members: np.ndarray) -> list[int]:
        """Groups to compute: those whose advantages are all 0 stay out where nothing else acts on them."""
        everyone = takes_every_group(self.algorithm, self.teacher is not None)
        return [int(n) for n in members if everyone or (table.advantages[n] != 0).any()]

    def _given(self, state: TrainState, groups: Sequence[Group], table: Table, shape: Shape) -> Given:
        """What needs a pass of its own before the first update."""
        scored = scores_old(self.algorithm, self.teacher is not None)
        own = ParameterScorer(self.learner, state.trainable) if scored else None
        wanted = (own, self.reference, self.teacher)
        if wanted == (None, None, None):
            return Given()
        nothing = np.zeros_like(table.advantages)
        batches = pack(groups, self._included(table, np.arange(len(groups))), nothing, nothing, shape,
                       self.temperature, num_kept=self.num_kept)
        return Given(*(None if scorer is None else self._scores(scorer, batches) for scorer in wanted))

    def _penalty(self, groups: Sequence[Group], table: Table, given: Given, shape: Shape,
                 metrics: MetricSet) -> np.ndarray | None:
        """What a divergence in the reward takes off it, [P, G]: the sum over a completion's drawn tokens. The metric is
        over those that are trained on."""
        a = self.algorithm
        if a.kl_in == "loss" or given.ref is None or given.old is None:
            return None
        old, ref = (np.zeros((len(groups), groups[0].size, shape.length), np.float32) for _ in range(2))
        drawn = np.zeros(old.shape, bool)
        for (group, index), values in given.old.items():
            at = (group, index, slice(0, len(values)))
            old[at], ref[at], drawn[at] = values, given.ref[group, index], groups[group].completions[index].drawn
        trained = drawn & ~table.cut[..., None] if a.mask_cut else drawn
        apart = np.stack([
            np.asarray(token_kl(a.kl, *map(jnp.asarray, arrays), clamp_input=a.kl_clamp_input,
                                clamp_value=a.kl_clamp_value), np.float64)
            for arrays in zip(old, ref, drawn, strict=True)])  # a group at a time: one shape, little memory
        metrics.add("kl", apart[trained].sum(), trained.sum())
        return a.kl_coef * apart.sum(axis=-1)

    def _shift(self, groups: Sequence[Group], given: Given, metrics: MetricSet) -> TokenValues | None:
        """The teacher's part of each token's advantage: minus the reverse divergence from it, by one sample."""
        if given.teacher is None or given.old is None:
            return None
        apart = {key: given.teacher[key] - old for key, old in given.old.items()}
        for (group, index), values in apart.items():
            drawn = groups[group].completions[index].drawn
            metrics.add("teacher/kl", -values[drawn].sum(), drawn.sum())
        return {key: np.float32(self.teacher_coef) * values for key, values in apart.items()}

    def _scores(self, scorer: Scorer, batches: Sequence[MicroBatch]) -> TokenValues:
        values = [scorer.score(batch.arrays) for batch in batches]
        found: TokenValues = {}
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


