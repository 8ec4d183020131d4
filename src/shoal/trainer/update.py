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

from shoal.algorithm.advantage import nonzero_std, step_advantages
from shoal.algorithm.aggregation import token_weights
from shoal.algorithm.kl import token_kl
from shoal.config.schema import AlgorithmSection, BatchSection
from shoal.report.metrics import MetricSet
from shoal.trainer.batch import MicroBatch, Shape, TokenValues, choose_shape, pack
from shoal.trainer.step import Applied, Learner, Objective, ParameterScorer, TrainState
from shoal.types import Address, Group, Scorer, StopReason, StopSignal

PATIENCE_SECONDS = 5.0
"""What the updates of a step that follow its first may take after a request to stop. The first one spent the moments
that the step began with, so a step that is given up then goes back to the newest checkpoint."""


def needs_all_groups(a: AlgorithmSection, has_teacher: bool) -> bool:
    """Whether more than the advantage acts on a group: a divergence, an entropy bonus, a teacher (`has_teacher`)."""
    return a.kl_coef > 0 or a.entropy_coef > 0 or has_teacher


def needs_old_logprobs(a: AlgorithmSection, has_teacher: bool) -> bool:
    """Whether `old` takes a pass of its own: several updates read it, or a divergence in the reward, or a teacher."""
    return Objective.of(a).use_old or (a.kl_placement == "reward" and a.kl_coef > 0) or has_teacher


def num_scorings(a: AlgorithmSection, has_teacher: bool) -> int:
    """Passes over a step's batch beside the updates: for `old`, for the reference, for a teacher."""
    return needs_old_logprobs(a, has_teacher) + (a.kl_coef > 0) + has_teacher


@dataclass(frozen=True)
class StepTable:
    """A step's groups as arrays, [P, G]."""

    rewards: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray  # drawn tokens
    cut: np.ndarray  # the completion reached the limit
    advantages: np.ndarray
    nonzero_std: np.ndarray  # [P]

    @classmethod
    def of(cls, groups: Sequence[Group], a: AlgorithmSection, penalty: np.ndarray | None = None) -> StepTable:
        """`penalty[P, G]` is taken off the rewards before they become advantages; not for `gdpo`, which takes the
        functions' own values."""
        rewards = np.stack([group.rewards for group in groups])
        valid = np.stack([group.valid for group in groups])
        lengths = np.array([[int(c.loss_mask.sum()) for c in group.completions] for group in groups])
        cut = np.array([[c.stop_reason == StopReason.LENGTH for c in group.completions] for group in groups])
        components = [group.reward_components for group in groups]
        judged = rewards if penalty is None else rewards - penalty
        advantages = step_advantages(a, judged, valid, components, groups[0].reward_weights)
        return cls(rewards, valid, lengths, cut, advantages, nonzero_std(rewards, valid))


@dataclass
class UpdateResult:
    """What learning from one step's groups gave: metrics, and the trainer's log-probs before its first update, by
    (group, completion)."""

    table: StepTable
    metrics: MetricSet
    logprobs: TokenValues = field(default_factory=dict)
    correction: np.ndarray = field(default_factory=lambda: np.zeros(3))  # sums of w, 1 and w^2, w = exp(old - sampler)


@dataclass(frozen=True)
class PrecomputedLogprobs:
    """Log-probs from before the first update, by (group, completion); None where nothing reads them."""

    old_logprobs: TokenValues | None = None
    ref_logprobs: TokenValues | None = None
    teacher: TokenValues | None = None


@dataclass(frozen=True)
class Updater:
    """Makes a step's updates. `reference` scores what the KL term refers to; None where its weight is 0. `teacher`
    scores whose log-prob minus the policy's, times `teacher_coef`, is added to each token's advantage. `max_tokens`:
    the longest completion. `max_support`: K of `pack`."""

    learner: Learner
    algorithm: AlgorithmSection
    batch: BatchSection
    temperature: float
    seed: int
    reference: Scorer | None = None
    teacher: Scorer | None = None
    teacher_coef: float = 1.0
    max_tokens: int = 1
    max_support: int = 0
    stop: StopSignal = field(default_factory=StopSignal)

    def update(self, state: TrainState, groups: Sequence[Group], step: int) -> tuple[TrainState, UpdateResult]:
        started, begun = time.perf_counter(), state
        shards = self.learner.model.role.row_shards
        prompts = -(-self.batch.prompts_per_step // self.algorithm.num_minibatches)
        shape = choose_shape(groups, prompts, self.batch.group_size, self.batch.micro_tokens,
                             shards)
        metrics, table = MetricSet(), StepTable.of(groups, self.algorithm)
        precomputed = self._given(state, groups, table, shape)
        if (penalty := self._penalty(groups, table, precomputed, shape, metrics)) is not None:
            table = StepTable.of(groups, self.algorithm, penalty)
        outcome = UpdateResult(table, metrics)
        teacher_bonus = self._teacher_bonus(groups, precomputed, metrics)
        old_logprobs = precomputed.old_logprobs if self.learner.objective.use_old else None
        outcome.logprobs |= precomputed.old_logprobs or {}
        trained = 0
        for epoch in range(self.algorithm.num_epochs):
            for members in self._minibatches(len(groups), step, epoch):
                batches = self._pack(groups, table, members, shape, old_logprobs, precomputed.ref_logprobs, teacher_bonus)
                state = self._one(state, batches, outcome, keep=precomputed.old_logprobs is None,
                                  patience_seconds=0.0 if state is begun else PATIENCE_SECONDS)
                trained += sum(int((batch.arrays.segment > 0).sum() + batch.arrays.prefix_len.sum())
                               for batch in batches)
                self._saved(batches, outcome.metrics)
        w, count, squares = outcome.correction
        if count:
            outcome.metrics.add("sampler_gap/ess", w**2 / (count * squares))
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

    def _pack(self, groups: Sequence[Group], table: StepTable, members: np.ndarray, shape: Shape,
              old_logprobs: TokenValues | None, ref_logprobs: TokenValues | None, teacher_bonus: TokenValues | None) -> list[MicroBatch]:
        """Micro-batches of one update. By `zero_std_groups`, groups that teach nothing count in the denominator, or do not.
        Completions that were cut count as completions, none of their tokens does, where `mask_truncated` says so."""
        a, included = self.algorithm, self._included(table, members)
        counts = np.ones_like(table.valid)
        if a.zero_std_groups == "exclude":
            counts &= np.isin(np.arange(len(groups)), included)[:, None]
        lengths = np.where(table.cut, 0, table.lengths) if a.mask_truncated else table.lengths
        weights = np.zeros(table.valid.shape)
        weights[members] = token_weights(a.aggregation, lengths[members], table.valid[members], counts[members],
                                         a.aggregation_tokens or self.max_tokens)
        return pack(groups, included, table.advantages, weights, shape, self.temperature, old_logprobs,
                    ref_logprobs, teacher_bonus, self.max_support)

    def _included(self, table: StepTable, members: np.ndarray) -> list[int]:
        """Groups to compute: those whose advantages are all 0 stay out where nothing else acts on them."""
        everyone = needs_all_groups(self.algorithm, self.teacher is not None)
        return [int(n) for n in members if everyone or (table.advantages[n] != 0).any()]

    def _given(self, state: TrainState, groups: Sequence[Group], table: StepTable, shape: Shape) -> PrecomputedLogprobs:
        """What needs a pass of its own before the first update."""
        scored = needs_old_logprobs(self.algorithm, self.teacher is not None)
        own = ParameterScorer(self.learner, state.trainable) if scored else None
        wanted = (own, self.reference, self.teacher)
        if wanted == (None, None, None):
            return PrecomputedLogprobs()
        nothing = np.zeros_like(table.advantages)
        batches = pack(groups, self._included(table, np.arange(len(groups))), nothing, nothing, shape,
                       self.temperature, max_support=self.max_support)
        return PrecomputedLogprobs(*(None if scorer is None else self._scores(scorer, batches) for scorer in wanted))

    def _penalty(self, groups: Sequence[Group], table: StepTable, precomputed: PrecomputedLogprobs, shape: Shape,
                 metrics: MetricSet) -> np.ndarray | None:
        """What a divergence in the reward takes off it, [P, G]: the sum over a completion's drawn tokens. The metric is
        over those that are trained on."""
        a = self.algorithm
        if a.kl_placement == "loss" or precomputed.ref_logprobs is None or precomputed.old_logprobs is None:
            return None
        old_logprobs, ref_logprobs = (np.zeros((len(groups), groups[0].size, shape.length), np.float32) for _ in range(2))
        loss_mask = np.zeros(old_logprobs.shape, bool)
        for (group, index), values in precomputed.old_logprobs.items():
            at = (group, index, slice(0, len(values)))
            old_logprobs[at], ref_logprobs[at], loss_mask[at] = values, precomputed.ref_logprobs[group, index], groups[group].completions[index].loss_mask
        trained = loss_mask & ~table.cut[..., None] if a.mask_truncated else loss_mask
        log_ratio = np.stack([
            np.asarray(token_kl(a.kl, *map(jnp.asarray, arrays), clamp_input=a.kl_clamp_input,
                                clamp_value=a.kl_clamp_value), np.float64)
            for arrays in zip(old_logprobs, ref_logprobs, loss_mask, strict=True)])  # a group at a time: one shape, little memory
        metrics.add("kl", log_ratio[trained].sum(), trained.sum())
        return a.kl_coef * log_ratio.sum(axis=-1)

    def _teacher_bonus(self, groups: Sequence[Group], precomputed: PrecomputedLogprobs, metrics: MetricSet) -> TokenValues | None:
        """The teacher's part of each token's advantage: minus the reverse divergence from it, by one sample."""
        if precomputed.teacher is None or precomputed.old_logprobs is None:
            return None
        log_ratio = {key: precomputed.teacher[key] - old_logprobs for key, old_logprobs in precomputed.old_logprobs.items()}
        for (group, index), values in log_ratio.items():
            loss_mask = groups[group].completions[index].loss_mask
            metrics.add("teacher/kl", -values[loss_mask].sum(), loss_mask.sum())
        return {key: np.float32(self.teacher_coef) * values for key, values in log_ratio.items()}

    def _scores(self, scorer: Scorer, batches: Sequence[MicroBatch]) -> TokenValues:
        values = []
        for batch in batches:
            self.stop.check()
            values.append(scorer.score(batch.arrays))
        found: TokenValues = {}
        for batch, value in zip(batches, values, strict=True):
            found |= batch.take(np.asarray(value))
        return found

    def _one(self, state: TrainState, batches: Sequence[MicroBatch], outcome: UpdateResult, keep: bool,
             patience_seconds: float) -> TrainState:
        """One update from its micro-batches; their log-probs are kept where they are those before the first update."""
        total, lps = None, []
        for batch in batches:
            self.stop.check(patience_seconds)
            total, lp = self.learner.accumulate(total, state, batch.arrays)
            lps.append(lp)
        assert total is not None
        sums, maxima = total.sums, total.maxima
        state, applied = self.learner.apply(state, total)
        sums, maxima, applied, values = jax.device_get((sums, maxima, applied, lps if keep else []))
        outcome.correction += [float(x) for x in (*sums.pop("sampler_gap/w"), sums.pop("sampler_gap/w2")[0])]
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
    if sums["sampler_gap/logprob_mean"][1]:
        metrics.add("sampler_gap/logprob_max", float(maxima["sampler_gap/logprob_max"]))
    metrics.add("loss", float(applied.loss))
    metrics.add("grad_norm", float(applied.grad_norm))
    metrics.add("lr", float(applied.lr))
    metrics.add("update/skipped", int(applied.skipped))
    metrics.add("update/count", 1 - int(applied.skipped))


