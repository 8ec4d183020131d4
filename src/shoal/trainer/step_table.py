"""The groups of a step as arrays, and their advantages by the settings of `algorithm`. Does not
load JAX, so that `shoal rescore` starts fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.algorithm.advantage import nonzero_std
from shoal.config.choices import ADVANTAGES
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.records import Group, StopReason


@dataclass(frozen=True)
class StepTable:
    """The groups of a step as arrays, [P, G] each: P prompts, G completions."""

    rewards: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray  # number of tokens that the model sampled
    truncated: np.ndarray  # True if the completion reached the limit
    advantages: np.ndarray
    nonzero_std: np.ndarray  # [P]

    @classmethod
    def of(
        cls, groups: Sequence[Group], a: AlgorithmSection, penalty: np.ndarray | None = None
    ) -> StepTable:
        """Makes the table of a step's groups, advantages included. `penalty[P, G]` is subtracted
        from the rewards before they become advantages; `gdpo` ignores it, since it reads the reward
        functions' own values. There must be at least one group."""
        rewards = np.stack([group.rewards for group in groups])
        valid = np.stack([group.valid for group in groups])
        components = [group.reward_components for group in groups]
        lengths = np.zeros(rewards.shape, np.int64)
        truncated = np.zeros(rewards.shape, bool)
        for row, group in enumerate(groups):
            for column, completion in enumerate(group.completions):
                lengths[row, column] = completion.loss_mask.sum()
                truncated[row, column] = completion.stop_reason == StopReason.LENGTH
        weights = groups[0].reward_weights
        penalised = rewards
        if penalty is not None:
            penalised = rewards - penalty
        advantages = step_advantages(
            a=a,
            rewards=penalised,
            valid=valid,
            lengths=lengths,
            components=components,
            weights=weights,
        )
        return cls(rewards, valid, lengths, truncated, advantages, nonzero_std(rewards, valid))


def step_advantages(
    a: AlgorithmSection,
    rewards: np.ndarray,
    valid: np.ndarray,
    lengths: np.ndarray,
    components: Sequence[Mapping[str, np.ndarray]] = (),
    weights: Mapping[str, float] | None = None,
) -> np.ndarray:
    """Computes advantages float64[P, G] from the rewards[P, G] of one step; `lengths[P, G]` are
    numbers of sampled tokens.

    `components` are each group's rewards by function and `weights` the functions' weights, for the
    estimator that normalises the functions separately (`gdpo`). If one of the two is empty, the
    estimator gets None for both; other estimators ignore them.
    """
    stacked = None  # [functions, P, G]
    function_weights = None
    if weights and components:
        by_function = []
        for name in weights:
            by_function.append([group[name] for group in components])
        stacked = np.array(by_function)
        function_weights = np.array(list(weights.values()))
    estimator = ADVANTAGES[a.advantage]
    advantages = estimator.load()
    return advantages(
        rewards,
        valid,
        components=stacked,
        weights=function_weights,
        lengths=lengths,
        **estimator.settings(a),
    )
