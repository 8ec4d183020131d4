"""The critic: a second model that is trained with the policy, and what follows from its values of a
step's tokens.

    values of tokens -> time steps (tokens, or turns) -> advantages for the policy
                                                      -> returns, which the critic learns

A critic is a `Learner` whose model has a value head. Its state is in the policy's
(`TrainState.critic`), so that both are saved and resumed together. A critic that shares the
policy's layers (`critic.shared`) has nothing of its own but the head: the policy's update computes
the gradient of both losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from shoal.algorithm.advantage import gae, length_adaptive_lambda, whitened
from shoal.algorithm.value_loss import ValueObjective
from shoal.config.choices import ADVANTAGES
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.critic import CriticSection
from shoal.config.sections.optimizer import OptimizerSection
from shoal.config.train import Config
from shoal.model.architecture import Architecture
from shoal.model.parameters import joined
from shoal.model.transformer import Model
from shoal.protocols import Printer
from shoal.records import Group, Params, ShoalError
from shoal.runs.metrics import MetricSet
from shoal.trainer.batch import LearnerBatch, TokenValues, ValueTargets
from shoal.trainer.loss import VALUES
from shoal.trainer.step import GradientSum, Learner, TrainState
from shoal.trainer.step_table import StepTable
from shoal.weights.source import ModelSource, open_model, section_of

_COMPARED = {field.name for field in fields(Architecture) if field.compare}
"""Sizes and switches in which a critic must be like the policy."""


def find_critic(config: Config, policy: ModelSource, console: Printer | None) -> ModelSource:
    """Returns the source of the model that `critic.path` names; its weights are not read yet.
    Prints notes about it to `console`. ShoalError if its layers or its vocabulary are not the
    policy's, or its files do not fit."""
    named = f"critic.path={config.critic.path}"
    critic = open_model(section_of(config.model, config.critic.path), console)
    if critic.architecture.adapter:
        raise ShoalError(
            f"{named}: it is an adapter, and the critic begins with whole weights; export them "
            "(shoal export)",
            "critic.path",
        )
    if critic.tokenizer.vocabulary() != policy.tokenizer.vocabulary():
        raise ShoalError(
            f"{named}: its vocabulary is not that of the model {config.model.path}, so it would "
            "read other words; give one of the same family",
            "critic.path",
        )
    # The head is not used, so it may be tied to the embedding or not.
    own = replace(critic.architecture, tie_embeddings=False, quantised="")
    wanted = replace(policy.architecture.base, tie_embeddings=False, quantised="")
    differences = []
    for name, value in vars(own).items():
        if name in _COMPARED and value != getattr(wanted, name):
            differences.append(f"{name} {value} for {getattr(wanted, name)}")
    if differences:
        raise ShoalError(
            f"{named}: its layers are not those of the model {config.model.path} "
            f"({', '.join(differences)}), with which it shares rows and devices; give one of the "
            "same architecture, or leave it out",
            "critic.path",
        )
    # Called for its error alone.
    critic.check()
    return critic


def critic_architecture(policy: Architecture, shared: bool = False) -> Architecture:
    """Returns the architecture of a policy's critic: the same layers, with a value head. `shared`:
    the layers are the policy's own."""
    return replace(policy, value_head=True, shares_layers=shared)


@dataclass(frozen=True)
class Critic:
    """The critic of a run."""

    learner: Learner
    section: CriticSection

    @classmethod
    def of(
        cls,
        policy: Model,
        section: CriticSection,
        optimizer: OptimizerSection,
        num_updates: int,
        seed: int,
    ) -> Critic:
        """Makes the critic of a policy, on its devices. `optimizer` are the policy's settings, of
        which all but the learning rate hold for both. The others are those of `Learner`."""
        architecture = critic_architecture(policy.architecture, section.shared)
        learner = Learner(
            replace(policy, architecture=architecture),
            ValueObjective(section.value_clip),
            replace(optimizer, lr=section.lr or optimizer.lr),
            num_updates,
            seed,
        )
        return cls(learner, section)

    @property
    def shares_layers(self) -> bool:
        """True if the critic's layers are the policy's own."""
        return self.section.shared

    def parameters(self, state: TrainState) -> Params:
        """Returns all parameters that the critic computes with, in a state of the trainer."""
        assert state.critic is not None, "a run with a critic has its state"
        if self.shares_layers:
            return joined(state.critic.trainable, state.parameters)
        return state.critic.parameters

    def read(self, batch: LearnerBatch) -> LearnerBatch:
        """Returns a micro-batch as the critic reads it."""
        if self.shares_layers:
            # The policy's layers send tokens to the experts that the sampler sent them to.
            return replace(batch, support_ids=None)
        return batch.of_critic()

    def sum_of_head(self, state: TrainState, total: GradientSum) -> GradientSum:
        """Returns the sum of a critic that shares the policy's layers, as `Learner.accumulate` of
        one that does not would give it: the part of the policy's `total` that is the head's."""
        assert state.critic is not None, "a run with a critic has its state"
        # All but the head is None, in the gradient as in the state.
        gradient = replace(state.critic.trainable, lm_head=total.value_head)
        loss, sums = total.sums[VALUES]
        return GradientSum(gradient, loss, sums, maxima={})

    def lam_of_returns(self, a: AlgorithmSection) -> float:
        """Returns the lambda of the returns that the critic learns."""
        return a.lam if self.section.lam == -1 else self.section.lam

    def ends_warmup(self, step: int, num_updates: int, explained: float | None) -> bool:
        """True if the policy is updated in this step: the warm-up is over since it has lasted as
        long as it may, since the policy has been updated before (`num_updates`), or because the
        critic explains enough of this step's returns."""
        if step >= self.section.warmup_steps or num_updates > 0:
            return True
        return explained is not None and explained >= self.section.warmup_until


@dataclass(frozen=True)
class StepValues:
    """Advantages and returns of a step, from a critic's values. Keys are (group, completion), of
    the completions that the critic gave values of."""

    advantages: TokenValues  # of each token, 0 at words of tools and environments
    # `weight` is 1 at each token that begins a time step
    targets: dict[tuple[int, int], ValueTargets]
    table: StepTable  # with the advantages of completions, or of turns
    # Share of the variance of returns that the values explain; None if all returns are the same.
    explained: float | None

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        table: StepTable,
        token_values: TokenValues,
        a: AlgorithmSection,
        critic_lam: float,
        penalty: np.ndarray | None = None,
    ) -> StepValues:
        """Computes the advantages and returns of a step. `token_values` are the critic's, of what
        is before each token. A completion's reward, less its `penalty`[P, G], is that of its last
        time step; with credit by turn each turn has its own. A truncated completion ends like
        others."""
        keys = sorted(token_values)
        steps = TimeSteps.of(groups, keys, by_turn=a.credit == "turn")
        rewards = _rewards_of_steps(groups, table, keys, steps, penalty)
        values = np.zeros(steps.lengths.shape)  # [N, K]
        for row, key in enumerate(keys):
            own = steps.first_tokens(row)
            values[row, : len(own)] = token_values[key][own]
        lam: float | np.ndarray = a.lam
        if a.lam_alpha:
            lam = length_adaptive_lambda(steps.counts, a.lam_alpha)
        advantages = gae(rewards, values, a.discount, lam)
        returns = gae(rewards, values, a.discount, critic_lam) + values
        if a.whiten:
            advantages = whitened(advantages, steps.lengths, **ADVANTAGES[a.advantage].settings(a))
        token_advantages: TokenValues = {}
        targets = {}
        for row, key in enumerate(keys):
            group, index = key
            sampled = groups[group].completions[index].loss_mask
            token_advantages[key] = steps.to_sampled_tokens(row, advantages[row], sampled)
            num_tokens = len(sampled)
            targets[key] = ValueTargets(
                values=np.asarray(token_values[key], np.float32),
                returns=steps.to_first_tokens(row, returns[row], num_tokens),
                weight=steps.to_first_tokens(row, np.ones(len(returns[row])), num_tokens),
            )
        is_step = steps.lengths > 0
        return cls(
            advantages=token_advantages,
            targets=targets,
            table=_with_advantages(table, keys, steps, advantages),
            explained=explained_variance(values[is_step], returns[is_step]),
        )

    def weighted(self, members: Iterable[int]) -> dict[tuple[int, int], ValueTargets]:
        """Returns the targets of the groups `members`, the update's, with weights of a mean over
        all of their time steps."""
        chosen = set(members)
        own = {key: target for key, target in self.targets.items() if key[0] in chosen}
        total = sum(float(target.weight.sum()) for target in own.values())
        weighted = {}
        for key, target in own.items():
            weighted[key] = replace(target, weight=target.weight / np.float32(max(total, 1)))
        return weighted

    def add_metrics(self, metrics: MetricSet) -> None:
        """Adds the metrics of the step's values and returns, as they were before its updates."""
        for target in self.targets.values():
            is_step = target.weight > 0
            for name, array in (("values", target.values), ("returns", target.returns)):
                of_steps = array[is_step].astype(np.float64)
                if of_steps.size:
                    metrics.add(f"critic/{name}/mean", of_steps.sum(), of_steps.size)
                    metrics.add(f"critic/{name}/min", of_steps.min())
                    metrics.add(f"critic/{name}/max", of_steps.max())
        if self.explained is not None:
            metrics.add("critic/vf_explained_var", self.explained)


@dataclass(frozen=True)
class TimeSteps:
    """The time steps of N completions, of at most K each: the tokens that the model sampled, or
    with credit by turn its turns."""

    starts: np.ndarray  # int64[N, K]: index of a step's first token in its completion
    lengths: np.ndarray  # int64[N, K]: tokens of a step; 0 behind the last step
    counts: np.ndarray  # int64[N]: number of steps of a completion

    @classmethod
    def of(
        cls, groups: Sequence[Group], keys: Sequence[tuple[int, int]], by_turn: bool
    ) -> TimeSteps:
        """Finds the time steps of the completions `keys`, (group, completion) each."""
        starts_of = []
        lengths_of = []
        for group, index in keys:
            completion = groups[group].completions[index]
            starts = np.flatnonzero(completion.loss_mask)
            lengths = np.ones(len(starts), np.int64)
            if by_turn:
                starts = np.array([turn.start for turn in completion.turns], np.int64)
                lengths = np.array([turn.stop - turn.start for turn in completion.turns], np.int64)
            starts_of.append(starts)
            lengths_of.append(lengths)
        counts = np.array([len(starts) for starts in starts_of], np.int64)
        shape = (len(keys), int(counts.max(initial=0)))
        steps = cls(np.zeros(shape, np.int64), np.zeros(shape, np.int64), counts)
        for row, count in enumerate(counts):
            steps.starts[row, :count] = starts_of[row]
            steps.lengths[row, :count] = lengths_of[row]
        return steps

    def first_tokens(self, row: int) -> np.ndarray:
        """Returns the index of the first token of each step of a completion."""
        return self.starts[row, : self.counts[row]]

    def to_first_tokens(self, row: int, of_steps: np.ndarray, num_tokens: int) -> np.ndarray:
        """Returns float32[num_tokens] with the values `of_steps`[K] of a completion at the first
        token of each step, and 0 elsewhere."""
        of_tokens = np.zeros(num_tokens, np.float32)
        of_tokens[self.first_tokens(row)] = of_steps[: self.counts[row]]
        return of_tokens

    def to_sampled_tokens(self, row: int, of_steps: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Returns float32 with the values `of_steps`[K] of a completion at every token of each
        step, and 0 elsewhere. `sampled` is True for the tokens that the model sampled, each of
        which is in one step."""
        count = self.counts[row]
        of_tokens = np.zeros(len(sampled), np.float32)
        of_tokens[sampled] = np.repeat(of_steps[:count], self.lengths[row, :count])
        return of_tokens


def _rewards_of_steps(
    groups: Sequence[Group],
    table: StepTable,
    keys: Sequence[tuple[int, int]],
    steps: TimeSteps,
    penalty: np.ndarray | None,
) -> np.ndarray:
    """Returns the reward of each time step [N, K]: of turns their own, of tokens 0 but for the
    last, which has the completion's, less its `penalty`[P, G]."""
    rewards = np.zeros(steps.lengths.shape)
    for row, (group, index) in enumerate(keys):
        count = steps.counts[row]
        if table.turns is not None:
            # The penalty is in them already.
            rewards[row, :count] = table.turns.rewards[group, index, :count]
        elif count:
            rewards[row, count - 1] = groups[group].rewards[index]
            if penalty is not None:
                rewards[row, count - 1] -= penalty[group, index]
    return rewards


def _with_advantages(
    table: StepTable, keys: Sequence[tuple[int, int]], steps: TimeSteps, advantages: np.ndarray
) -> StepTable:
    """Returns the table with the advantages of time steps: of each turn, or of each completion the
    mean over its tokens. `advantages`[N, K] are those of `keys`. That the rewards of a group are
    the same says nothing then, so `nonzero_std` is None."""
    shown = np.zeros(table.advantages.shape)
    for row, key in enumerate(keys):
        count = steps.counts[row]
        if table.turns is not None:
            shown[key][:count] = advantages[row, :count]
        elif count:
            shown[key] = advantages[row, :count].mean()
    return replace(table, advantages=shown, nonzero_std=None)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float | None:
    """Returns 1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for one whose
    values are all the same, below 0 for a worse one. None if all returns are the same, or none is
    there."""
    variance = returns.var() if returns.size else 0.0
    if variance == 0:
        return None
    return float(1 - (returns - values).var() / variance)
