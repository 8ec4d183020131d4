"""Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): how many groups to ask for, and which of them
to learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shoal.algorithm.advantage import has_variance
from shoal.config.choices import ADVANTAGES
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.records import Group
from shoal.rewards.scores import weighted_sum

MOST_AHEAD = 3
"""At most so many times the groups of a step are asked for before anything of it is known."""


def num_extra(wanted: int, useful_share: float) -> int:
    """Groups to ask for beyond `wanted` where that is before the step's turn: as many as it takes
    at the share of the newest step learnt by then. A further round would have to be waited for."""
    return min(MOST_AHEAD * wanted, -int(-wanted // max(useful_share, 1e-9))) - wanted


def missing(groups: Sequence[Group], wanted: int, is_useful: Callable[[Group], bool]) -> int:
    """Further groups to ask for, 0 once there are enough: as many as the share of useful groups so
    far asks for, so that one more round mostly suffices."""
    useful = sum(map(is_useful, groups))
    return min(wanted, -(-max(0, wanted - useful) * len(groups) // max(useful, 1)))


def divide(
    groups: Sequence[Group], wanted: int, is_useful: Callable[[Group], bool]
) -> tuple[list[Group], list[Group]]:
    """(the groups of the step, those that are discarded): useful ones first, in the order of the
    prompts, since the choice must not depend on which finished first."""
    order = sorted(range(len(groups)), key=lambda n: (not is_useful(groups[n]), n))
    chosen = sorted(order[:wanted])
    return [groups[n] for n in chosen], [group for n, group in enumerate(groups) if n not in chosen]


def has_signal(group: Group, a: AlgorithmSection, penalty: str = "") -> bool:
    """True if dynamic sampling keeps the group: its completions differ in what
    `dynamic_sampling_by` names.

    That is the task's verdict of right or wrong; without a verdict the reward less the function
    called `penalty`; or the whole reward. Where the advantage normalises each function separately,
    a single one that has a weight is enough.
    """
    if a.dynamic_sampling_by == "correct" and group.correct is not None:
        return has_variance(group.valid, group.correct[None].astype(float))
    left_out = penalty if a.dynamic_sampling_by == "correct" else ""
    weights = {
        name: group.reward_weights.get(name, 1.0)
        for name in group.reward_components
        if name != left_out
    }
    values = np.array([group.reward_components[name] for name in weights]).reshape(
        len(weights), len(group.rewards)
    )
    reward = weighted_sum(list(weights.values()), values) if left_out else group.rewards
    counted = [values[n] for n, weight in enumerate(weights.values()) if weight]
    return has_variance(
        group.valid, np.stack([reward, *(counted if ADVANTAGES[a.advantage].by_function else ())])
    )
