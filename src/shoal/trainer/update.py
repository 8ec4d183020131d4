"""All updates of one step: from its groups to new weights and the step's metrics.

groups -> log-probs computed beforehand (old, reference, teacher), values of a critic
       -> advantages[P, G], with a critic of each token
       -> for each epoch, each mini-batch: token weights -> micro-batches
       -> for each: what the teacher says of it, accumulate; then apply; the same of the critic
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from shoal.algorithm.aggregation import token_weights
from shoal.algorithm.loss import token_kl
from shoal.config.choices import AGGREGATIONS, KL_ESTIMATORS
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.critic import CriticSection
from shoal.config.sections.model import TeacherSection
from shoal.config.sections.optimizer import BatchSection
from shoal.protocols import Scorer
from shoal.records import Group, NoiseKey, Params
from shoal.runs.metrics import MetricSet
from shoal.stop import StopSignal
from shoal.trainer.batch import (
    BatchLayout,
    MicroBatch,
    Shape,
    TokenTerms,
    TokenValues,
    pack,
    row_shapes,
    unpack,
)
from shoal.trainer.critic import Critic, StepValues
from shoal.trainer.loss import LOAD, REROUTED, VALUES, make_objective
from shoal.trainer.own_advantage import OwnAdvantage
from shoal.trainer.scorers import ParameterScorer
from shoal.trainer.step import GradientSum, Learner, TrainState, UpdateMetrics
from shoal.trainer.step_table import StepTable
from shoal.trainer.teachers import Teachers

ROUTES_MEASURED_EVERY = 10
"""Steps after which the effect of using the recorded experts again is measured once more, by
scoring a micro-batch without them."""

POLICY_METRICS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "skipped": "update/skipped",
}
CRITIC_METRICS = {
    "loss": "critic/vf_loss",
    "grad_norm": "critic/grad_norm",
    "lr": "critic/lr",
    "skipped": "critic/skipped",
}
"""Field of `UpdateMetrics` -> name of its metric, for updates of the policy and of a critic."""

PATIENCE_SECONDS = 5.0
"""Seconds that a requested stop waits for the updates of a step after its first. The first update
consumes the moments that the step began with, so a step that is dropped after it falls back to the
newest checkpoint."""


def needs_all_groups(a: AlgorithmSection, has_teacher: bool) -> bool:
    """True if a KL, entropy, context or teacher term gives a gradient even to groups whose
    advantages are all 0, or if a critic learns from all groups."""
    coefficients = (a.kl_coef, a.kl_sampler_coef, a.entropy_coef, a.context_coef)
    return has_teacher or a.has_critic or max(coefficients) > 0


def needs_old_logprobs(a: AlgorithmSection, scores_samples: bool) -> bool:
    """True if the trainer's log-probs are needed before the first update: because a step has
    several updates, because the reward includes a KL, or because a teacher scores the samples."""
    several_updates = make_objective(a).use_old
    kl_in_reward = a.kl_placement == "reward" and a.kl_coef > 0
    return several_updates or kl_in_reward or scores_samples


def critic_epochs(a: AlgorithmSection, critic: CriticSection) -> int | None:
    """Returns how many epochs of its own a critic has: 0 if the policy's update trains it too,
    because it shares the policy's layers; None without a critic."""
    if not a.has_critic:
        return None
    return 0 if critic.shared else a.num_epochs


def num_scorings(a: AlgorithmSection, teacher: TeacherSection) -> int:
    """Returns how many forward passes over a step's batch there are besides the updates: one each
    for old, reference and teacher log-probs, if they are needed; with distributions of the teacher
    one in each epoch."""
    of_teacher = 0
    is_here = not teacher.address  # a server's own devices compute what it says
    if is_here and teacher.gives_distributions:
        of_teacher = a.num_epochs
    elif is_here and teacher.scores_samples:
        of_teacher = 1
    return needs_old_logprobs(a, teacher.scores_samples) + a.scores_reference + of_teacher


def update_shapes(
    longest: int,
    max_tokens: int,
    batch: BatchSection,
    num_minibatches: int,
    row_shards: int,
    context: int,
) -> tuple[Shape, ...]:
    """Returns the shapes of an update's micro-batches, the largest first (`row_shapes`).

    `longest` is the number of tokens of the longest prompt with the longest completion; that
    completion has `max_tokens`. An update has `prompts_per_step / num_minibatches` groups, rounded
    up. `row_shards` and `context` are those of `row_shapes`.
    """
    group_tokens = longest + (batch.group_size - 1) * max_tokens
    most_groups = -(-batch.prompts_per_step // num_minibatches)
    update_tokens = most_groups * group_tokens
    return row_shapes(longest, update_tokens, batch.micro_tokens, row_shards, context=context)


@dataclass
class UpdateResult:
    """What the updates of one step gave. `logprobs` are the trainer's before the first update."""

    table: StepTable
    metrics: MetricSet
    logprobs: TokenValues = field(default_factory=dict)
    # [3]: the sums over tokens of w, 1 and w^2, with w = exp(old - sampler), from which the
    # effective sample size follows.
    ess_sums: np.ndarray = field(default_factory=partial(np.zeros, 3))


@dataclass(frozen=True)
class PrecomputedScores:
    """What scorers say of a step's tokens before its first update: log-probs, and the critic's
    values. None for those that nothing reads."""

    old_logprobs: TokenValues | None = None
    ref_logprobs: TokenValues | None = None
    teacher_logprobs: TokenValues | None = None
    values: TokenValues | None = None


@dataclass(frozen=True)
class Updater:
    """The update phase of a step: from its groups to new weights.

    `update` changes nothing but the state that it returns; its first update consumes the moments of
    the state that was passed. The run owns the updater.

    `reference` scores tokens for the KL term; None if there is no such term. `teachers` give
    on-policy distillation: the log-prob of a group's teacher minus the policy's, times
    `teacher.coef`, is added to each token's advantage, or the divergence from its distributions is
    in the objective.
    `critic` gives each token its advantage (`algorithm.advantage=gae`), and is trained too.
    `own_advantage` is the user's function that `algorithm.advantage` names; None if that is an
    estimator. `max_tokens` is the length of the longest completion, `longest` that of the longest
    prompt with the longest completion, `max_support` that of `BatchLayout`. With
    `replays_routes` the policy sends tokens to the experts that the sampler sent them to; other
    models choose experts of their own.
    """

    learner: Learner
    algorithm: AlgorithmSection
    batch: BatchSection
    temperature: float
    seed: int
    reference: Scorer | None = None
    teachers: Teachers | None = None
    critic: Critic | None = None
    max_tokens: int = 1
    longest: int = 0
    max_support: int = 0
    replays_routes: bool = False
    own_advantage: OwnAdvantage | None = None
    stop: StopSignal = field(default_factory=StopSignal)

    def first_state(self, parameters: Params, critic_parameters: Params | None) -> TrainState:
        """Returns the state of a new run, with these parameters of the policy, and of the critic if
        there is one."""
        state = self.learner.init(parameters)
        if self.critic is None:
            return state
        return replace(state, critic=self.critic.learner.init(critic_parameters))

    def update(
        self, state: TrainState, groups: Sequence[Group], step: int
    ) -> tuple[TrainState, UpdateResult]:
        """Trains on a step's groups: runs all epochs and mini-batches, and returns the new state
        and what the updates gave (metrics, log-probs). A requested stop raises StopRequested
        between micro-batches: at once before the first update, after it once PATIENCE_SECONDS have
        passed."""
        started = time.perf_counter()
        first_state = state
        metrics = MetricSet()
        table = StepTable.of(groups, self.algorithm, own_advantage=self.own_advantage)
        precomputed = self._precompute(state, groups, table)
        # A KL in the reward needs log-probs, which need packed groups: so the table is made twice,
        # first without that KL, then with it.
        penalty = self._kl_penalty(groups, table, precomputed, metrics)
        if penalty is not None:
            table = StepTable.of(groups, self.algorithm, penalty, self.own_advantage)
        step_values = None
        updates_policy = True
        if self.critic is not None and precomputed.values is not None:
            step_values = StepValues.of(
                groups,
                table,
                precomputed.values,
                self.algorithm,
                self.critic.lam_of_returns(self.algorithm),
                penalty,
            )
            step_values.add_metrics(metrics)
            table = step_values.table
            updates_policy = self.critic.ends_warmup(
                step, int(state.updates), step_values.explained
            )
            if not updates_policy:
                metrics.add("critic/warmup", 1)
        result = UpdateResult(table, metrics, dict(precomputed.old_logprobs or {}))
        teacher_bonus = self._teacher_bonus(groups, precomputed, metrics)
        use_old = make_objective(self.algorithm).use_old
        old_logprobs = precomputed.old_logprobs if use_old else None
        num_trained = 0
        is_measured = step % ROUTES_MEASURED_EVERY == 0
        for epoch in range(self.algorithm.num_epochs):
            for group_indices in self._minibatches(len(groups), step, epoch):
                batches = self._pack_update(
                    groups=groups,
                    table=table,
                    group_indices=group_indices,
                    old_logprobs=old_logprobs,
                    ref_logprobs=precomputed.ref_logprobs,
                    teacher_bonus=teacher_bonus,
                    step_values=step_values,
                )
                if self.replays_routes and state is first_state and is_measured:
                    self._measure_own_routes(state, batches[-1], metrics)
                # Before the first update a stop costs nothing: the state can still be saved.
                patience_seconds = 0.0 if state is first_state else PATIENCE_SECONDS
                if updates_policy or self._shares_layers:
                    state = self._update_once(
                        state,
                        batches,
                        result,
                        keep_logprobs=precomputed.old_logprobs is None,
                        patience_seconds=patience_seconds,
                        updates_policy=updates_policy,
                    )
                    patience_seconds = PATIENCE_SECONDS
                if self.critic is not None and not self._shares_layers:
                    state = self._update_critic(
                        self.critic, state, batches, metrics, patience_seconds
                    )
                num_trained += sum(batch.num_tokens for batch in batches)
                _record_packing(metrics, batches)
        # The effective sample size of the whole step, (sum w)^2 / (N sum w^2): a mean of the sizes
        # of micro-batches would differ.
        w, count, squares = result.ess_sums
        if count:
            metrics.add("sampler_gap/ess", w**2 / (count * squares))
        metrics.add("tokens/trained", num_trained)
        seconds = time.perf_counter() - started
        metrics.add("time/update_seconds", seconds)
        metrics.add("throughput/train_tokens_per_second", num_trained, seconds)
        return state, result

    @property
    def _shares_layers(self) -> bool:
        """True if there is a critic whose layers are the policy's own."""
        return self.critic is not None and self.critic.shares_layers

    def _measure_own_routes(self, state: TrainState, batch: MicroBatch, metrics: MetricSet) -> None:
        """Adds the difference of trainer and sampler log-probs that a micro-batch would have if the
        trainer chose the experts itself."""
        arrays = batch.with_own_routes().arrays.of_policy()
        logprobs = np.asarray(self.learner.score(state.parameters, arrays))
        difference = np.abs(logprobs - arrays.sampler_logprobs)[arrays.loss_mask]
        if difference.size:
            name = "sampler_gap/logprob_mean_own_routes"
            metrics.add(name, difference.sum(dtype=np.float64), difference.size)

    def shapes(self, groups: Sequence[Group]) -> tuple[Shape, ...]:
        """Returns the shapes of micro-batches for a step with these groups: the same in every step,
        unless a prompt with its longest completion is longer than `longest`."""
        longest = self.longest
        for group in groups:
            longest_completion = max(map(len, group.completions), default=0)
            longest = max(longest, len(group.prompt_ids) + longest_completion)
        role = self.learner.model.role
        return update_shapes(
            longest=longest,
            max_tokens=self.max_tokens,
            batch=self.batch,
            num_minibatches=self.algorithm.num_minibatches,
            row_shards=role.row_shards,
            context=role.context,
        )

    def _minibatches(self, count: int, step: int, epoch: int) -> list[np.ndarray]:
        """Returns the indices of the groups, from 0 to `count` - 1, in each update of an epoch, one
        array an update; their lengths differ by 1 at most. With several updates the order is
        shuffled by (seed, step, epoch), so a resumed run repeats it."""
        num_minibatches = self.algorithm.num_minibatches
        order = np.arange(count)
        if num_minibatches > 1:
            # The epoch takes the place of a row in the key; its completion, 0, is not used.
            key = NoiseKey(self.seed, "minibatches", step, epoch).key(0)
            order = np.random.default_rng(key.tolist()).permutation(count)
        return np.array_split(order, num_minibatches)

    def _pack_update(
        self,
        groups: Sequence[Group],
        table: StepTable,
        group_indices: np.ndarray,
        old_logprobs: TokenValues | None,
        ref_logprobs: TokenValues | None,
        teacher_bonus: TokenValues | None,
        step_values: StepValues | None = None,
    ) -> list[MicroBatch]:
        """Returns the micro-batches of one update, with the weight of each token. `group_indices`
        are those of the update's groups.

        With `zero_std_groups` "exclude", groups that are left out because nothing gives them a
        gradient do not count in the denominator; else they do. With `mask_truncated`, a truncated
        completion counts as a completion, but none of its tokens does.
        """
        a = self.algorithm
        included = self._included(table, group_indices)
        # bool[P, G]: which completions count in the denominator
        counts = np.ones_like(table.valid)
        if a.zero_std_groups == "exclude":
            counts &= np.isin(np.arange(len(groups)), included)[:, None]
        lengths = table.lengths
        if a.mask_truncated:
            lengths = np.where(table.truncated, 0, lengths)
        weights = np.zeros(table.valid.shape)
        # The denominator is that of the whole mini-batch (`group_indices`), however it is packed
        # into micro-batches.
        weights[group_indices] = token_weights(
            AGGREGATIONS[a.aggregation].load(),
            lengths[group_indices],
            table.valid[group_indices],
            counts[group_indices],
            a.aggregation_tokens or self.max_tokens,
        )
        context_weights = self._context_weights(table, group_indices) if a.context_coef else None
        advantages = table.advantages
        token_advantages = None
        targets = None
        if step_values is not None:
            # With a critic each token has its own advantage; the table has only their means.
            advantages = np.zeros_like(advantages)
            token_advantages = step_values.advantages
            targets = step_values.weighted(included)
        terms = TokenTerms(
            advantages=advantages,
            weights=weights,
            context_weights=context_weights,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            teacher_bonus=teacher_bonus,
            token_advantages=token_advantages,
            targets=targets,
        )
        return self._pack(groups, included, terms)

    def _pack(
        self, groups: Sequence[Group], included: Sequence[int], terms: TokenTerms
    ) -> list[MicroBatch]:
        """Packs the groups with the indices `included` into micro-batches. With teachers, all
        groups of a micro-batch have the same teacher."""
        layout = BatchLayout(
            shapes=self.shapes(groups),
            temperature=self.temperature,
            max_support=self.max_support,
            route_shape=self._route_shape,
        )
        if self.teachers is None:
            return pack(groups, included, terms, layout)
        return self.teachers.pack(groups, included, terms, layout)

    def _context_weights(self, table: StepTable, group_indices: np.ndarray) -> np.ndarray:
        """Returns the weight of each token of context in an update, float[P, G] by completion: 1
        over the number of context tokens in the completions of the groups `group_indices` that have
        a loss. 0 for other completions, and for all if there is no such token."""
        has_loss = np.zeros(table.valid.shape, bool)
        has_loss[group_indices] = table.valid[group_indices]
        if self.algorithm.mask_truncated:
            has_loss &= ~table.truncated
        num_tokens = table.context_lengths[has_loss].sum()
        return has_loss / max(num_tokens, 1)

    def _included(self, table: StepTable, group_indices: np.ndarray) -> list[int]:
        """Returns the indices, out of `group_indices`, of the groups to compute. A group whose
        advantages are all 0 is left out, unless another term gives it a gradient."""
        if needs_all_groups(self.algorithm, self.teachers is not None):
            return [int(n) for n in group_indices]
        return [int(n) for n in group_indices if (table.advantages[n] != 0).any()]

    def _precompute(
        self, state: TrainState, groups: Sequence[Group], table: StepTable
    ) -> PrecomputedScores:
        """Computes the log-probs that need a forward pass before the first update: of the policy,
        the reference and the teacher, and the values of the critic, if they are needed. Those that
        are not needed are None. A group that `_included` leaves out has no entry."""
        teachers = None
        if self.teachers is not None and self.teachers.section.scores_samples:
            teachers = self.teachers
        policy: Scorer | None = None
        if needs_old_logprobs(self.algorithm, teachers is not None):
            policy = ParameterScorer(self.learner, state.parameters)
        critic: Scorer | None = None
        if self.critic is not None:
            critic = ParameterScorer(self.critic.learner, self.critic.parameters(state))
        if all(scorer is None for scorer in (policy, self.reference, teachers, critic)):
            return PrecomputedScores()
        # Scoring reads tokens alone, so advantages and weights are zeros: they are computed once a
        # KL in the reward is known.
        zeros = np.zeros_like(table.advantages)
        included = self._included(table, np.arange(len(groups)))
        batches = self._pack(groups, included, TokenTerms(advantages=zeros, weights=zeros))
        # The recorded experts are those of the policy: other models choose their own.
        reference_batches = [batch.with_own_routes() for batch in batches]
        critic_batches = []
        if self.critic is not None:
            for batch in batches:
                critic_batches.append(replace(batch, arrays=self.critic.read(batch.arrays)))
        return PrecomputedScores(
            old_logprobs=self._scores(policy, batches),
            ref_logprobs=self._scores(self.reference, reference_batches),
            teacher_logprobs=self._teacher_scores(teachers, state, batches),
            values=self._scores(critic, critic_batches),
        )

    @property
    def _route_shape(self) -> tuple[int, int] | None:
        """The (layers with experts, k) of a token's recorded experts; None if they are not used
        again."""
        return self.learner.model.architecture.route_shape if self.replays_routes else None

    def _kl_penalty(
        self,
        groups: Sequence[Group],
        table: StepTable,
        precomputed: PrecomputedScores,
        metrics: MetricSet,
    ) -> np.ndarray | None:
        """Returns the KL in the reward, float[P, G]: `kl_coef` times the KL's sum over a
        completion's sampled tokens. None if the reward includes no KL.

        Adds the metric `kl`, which covers the tokens that are trained on.
        """
        a = self.algorithm
        old = precomputed.old_logprobs
        ref = precomputed.ref_logprobs
        if a.kl_placement == "loss" or not a.kl_coef or ref is None or old is None:
            return None
        longest_completion = max((len(values) for values in old.values()), default=0)
        # [P, G, T]
        shape = (len(groups), groups[0].size, max(self.max_tokens, longest_completion))
        old_logprobs = np.zeros(shape, np.float32)
        ref_logprobs = np.zeros(shape, np.float32)
        loss_mask = np.zeros(shape, bool)
        for (group_index, index), values in old.items():
            tokens = (group_index, index, slice(0, len(values)))
            old_logprobs[tokens] = values
            ref_logprobs[tokens] = ref[group_index, index]
            loss_mask[tokens] = groups[group_index].completions[index].loss_mask
        estimator = KL_ESTIMATORS[a.kl].load()
        kl_by_group = []
        # One group at a time: one compiled shape whatever the number of groups, and little memory.
        for group_index in range(len(groups)):
            group_kl = token_kl(
                estimator,
                jnp.asarray(old_logprobs[group_index]),
                jnp.asarray(ref_logprobs[group_index]),
                jnp.asarray(loss_mask[group_index]),
                clamp_input=a.kl_clamp_input,
                clamp_value=a.kl_clamp_value,
            )
            kl_by_group.append(np.asarray(group_kl, np.float64))
        kl = np.stack(kl_by_group)
        trained = loss_mask
        if a.mask_truncated:
            trained = loss_mask & ~table.truncated[..., None]
        metrics.add("kl", kl[trained].sum(), trained.sum())
        return a.kl_coef * kl.sum(axis=-1)

    def _teacher_bonus(
        self, groups: Sequence[Group], precomputed: PrecomputedScores, metrics: MetricSet
    ) -> TokenValues | None:
        """Returns what the teacher adds to each token's advantage: `teacher.coef` times (the
        teacher's log-prob minus the policy's), which estimates minus the reverse KL from one
        sample. None without a teacher. Adds the metric `teacher/kl`."""
        teacher = precomputed.teacher_logprobs
        old = precomputed.old_logprobs
        if self.teachers is None or teacher is None or old is None:
            return None
        log_ratio = {key: teacher[key] - values for key, values in old.items()}
        for (group_index, index), values in log_ratio.items():
            loss_mask = groups[group_index].completions[index].loss_mask
            metrics.add("teacher/kl", -values[loss_mask].sum(), loss_mask.sum())
        coef = np.float32(self.teachers.section.coef)
        return {key: coef * values for key, values in log_ratio.items()}

    def _teacher_scores(
        self, teachers: Teachers | None, state: TrainState, batches: Sequence[MicroBatch]
    ) -> TokenValues | None:
        """Returns the log-probs of each completion's tokens by the teacher of its group; None
        without teachers."""
        if teachers is None:
            return None
        values = []
        for batch in batches:
            self.stop.check()
            values.append(teachers.score(state.parameters, batch))
        return unpack([batch.of_teacher() for batch in batches], map(np.asarray, values))

    def _scores(self, scorer: Scorer | None, batches: Sequence[MicroBatch]) -> TokenValues | None:
        """Returns the log-probs of each completion's tokens by this scorer; None without a
        scorer."""
        if scorer is None:
            return None
        # All batches are dispatched before the first result is read: reading each at once would
        # leave the device idle in between.
        values = []
        for batch in batches:
            self.stop.check()
            values.append(scorer.score(batch.arrays))
        return unpack(batches, map(np.asarray, values))

    def _update_once(
        self,
        state: TrainState,
        batches: Sequence[MicroBatch],
        result: UpdateResult,
        keep_logprobs: bool,
        patience_seconds: float,
        updates_policy: bool = True,
    ) -> TrainState:
        """Makes one update of the weights from its micro-batches, and adds its metrics to `result`.
        There is at least one micro-batch. The head of a critic that shares the policy's layers is
        updated too; it alone unless `updates_policy`.

        With `keep_logprobs` the log-probs of the micro-batches, which are from before this update,
        are stored in `result`. A requested stop waits up to `patience_seconds` before it
        interrupts.
        """
        total = None
        logprobs = []
        for batch in batches:
            self.stop.check(patience_seconds)
            targets = None
            if self.teachers is not None and self.teachers.section.gives_distributions:
                targets = self.teachers.targets(state.parameters, batch)
            total, lp = self.learner.accumulate(total, state, batch.arrays, targets)
            logprobs.append(lp)
        assert total is not None
        if self.critic is not None and self._shares_layers:
            head_sum = self.critic.sum_of_head(state, total)
            state = self._apply_to_critic(self.critic, state, head_sum, result.metrics)
        if not updates_policy:
            return state
        # `apply` donates the gradient in `total`, so these are taken out first.
        sums = dict(total.sums)
        sums.pop(VALUES, None)
        maxima = total.maxima
        state, applied = self.learner.apply(state, total)
        kept_logprobs = logprobs if keep_logprobs else []
        # One transfer for all: each separate `float(x)` would wait for the device.
        on_host = jax.device_get((sums, maxima, applied, kept_logprobs))
        sums, maxima, applied, kept_logprobs = on_host
        # These two are no metrics of their own: `update` computes sampler_gap/ess of the whole step
        # from their sums.
        w, count = sums.pop("sampler_gap/w")
        squares, _ = sums.pop("sampler_gap/w2")
        result.ess_sums += [float(w), float(count), float(squares)]
        if LOAD in sums:
            _record_loads(result.metrics, *sums.pop(LOAD))
            rerouted, num_given = sums.pop(REROUTED)
            if num_given:
                result.metrics.add("experts/rerouted", rerouted, num_given)
        # The sum alone: the count is no divisor of it.
        result.metrics.add("objective", sums.pop("objective")[0])
        _record_update(result.metrics, sums | maxima, applied, POLICY_METRICS)
        if applied.loss_scale is not None:
            result.metrics.add("loss_scale", float(applied.loss_scale))
            result.metrics.add("update/overflows", int(applied.overflow))
        # A skipped update counts in `update/skipped` alone.
        result.metrics.add("update/count", 1 - int(applied.skipped))
        if keep_logprobs:
            result.logprobs |= unpack(batches, kept_logprobs)
        return state

    def _update_critic(
        self,
        critic: Critic,
        state: TrainState,
        batches: Sequence[MicroBatch],
        metrics: MetricSet,
        patience_seconds: float,
    ) -> TrainState:
        """Makes one update of a critic with layers of its own from the micro-batches of an update,
        and adds its metrics. Returns the state with the critic's new one. A requested stop waits up
        to `patience_seconds` before it interrupts."""
        assert state.critic is not None, "a run with a critic has its state"
        total = None
        for batch in batches:
            self.stop.check(patience_seconds)
            arrays = critic.read(batch.arrays)
            total, _ = critic.learner.accumulate(total, state.critic, arrays)
        assert total is not None
        return self._apply_to_critic(critic, state, total, metrics)

    def _apply_to_critic(
        self, critic: Critic, state: TrainState, total: GradientSum, metrics: MetricSet
    ) -> TrainState:
        """Updates the critic with the sum `total` of an update's micro-batches, which is donated,
        and adds its metrics. Returns the state with the critic's new one."""
        assert state.critic is not None, "a run with a critic has its state"
        sums = total.sums  # taken out first, as `apply` donates what is in `total`
        critic_state, applied = critic.learner.apply(state.critic, total)
        sums, applied = jax.device_get((sums, applied))
        _record_update(metrics, sums, applied, CRITIC_METRICS)
        return replace(state, critic=critic_state)


def _record_packing(metrics: MetricSet, batches: Sequence[MicroBatch]) -> None:
    """Adds two metrics: `tokens/padding`, the share of computed tokens that are padding, and
    `tokens/prompt_saved`, the share of prompt tokens that sharing saved, of those computed if each
    completion had its own copy of the prompt."""
    for batch in batches:
        computed = batch.arrays.tokens.size
        metrics.add("tokens/padding", computed - batch.num_tokens, computed)
        flattened = sum(length * completions for length, completions in batch.prompts)
        shared = sum(length for length, _ in batch.prompts)
        metrics.add("tokens/prompt_saved", flattened - shared, flattened)


def _record_loads(metrics: MetricSet, loads: np.ndarray, num_tokens: float) -> None:
    """Adds the metrics of an update's loads[layers with experts, E], the numbers of tokens that the
    experts had."""
    if num_tokens == 0:  # all groups were left out
        return
    for of_layer in np.asarray(loads, np.float64):
        metrics.add("experts/load_max", of_layer.max() / of_layer.mean())
        metrics.add("experts/unused", np.count_nonzero(of_layer == 0), len(of_layer))


def _record_update(
    metrics: MetricSet, values: dict, applied: UpdateMetrics, names: Mapping[str, str]
) -> None:
    """Adds the metrics of one update, of the policy or of a critic. `values` maps a metric's name
    to (value, count); `names` a field of `applied` to its metric."""
    for name, (value, count) in values.items():
        metrics.add(name, value, count)
    for field_name, name in names.items():
        metrics.add(name, np.asarray(getattr(applied, field_name)).item())
