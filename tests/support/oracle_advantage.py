"""Advantages once more, in plain float64 numbers, written from the papers' definitions alone.

Rewards come as lists of groups; None stands for a sibling that is missing or could not be judged.
Nothing of shoal is called here, and no array arithmetic is shared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Group = Sequence[float | None]
Groups = Sequence[Group]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float], ddof: int) -> float:
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - ddof))


def divisor(std: float, eps: float, eps_mode: str) -> float:
    return max(std, eps) if eps_mode == "max" else std + eps


def there(group: Group) -> list[float]:
    return [r for r in group if r is not None]


def within(group: Group, value: Callable[[float, list[float]], float]) -> list[float]:
    """value(r, the group's rewards) for each sibling; 0 for one that is missing, and where there is
    nothing to compare."""
    rewards = there(group)
    alike = len(set(rewards)) < 2
    return [0.0 if r is None or alike else value(r, rewards) for r in group]


def whiten(
    groups: Groups,
    ddof: int,
    eps: float,
    eps_mode: str,
    lengths: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Over all that are there, each as often as it has tokens where `lengths` are given; 0 where
    all are the same."""
    counts = lengths or [[1] * len(group) for group in groups]
    groups = [
        [r if n else None for r, n in zip(group, row, strict=True)]
        for group, row in zip(groups, counts, strict=True)
    ]
    every = [
        r
        for group, row in zip(groups, counts, strict=True)
        for r, n in zip(group, row, strict=True)
        if r is not None
        for _ in range(n)
    ]
    if len(set(every)) < 2:
        return [[0.0] * len(group) for group in groups]
    size = divisor(deviation(every, ddof), eps, eps_mode)
    result = []
    for group in groups:
        result.append([0.0 if r is None else (r - mean(every)) / size for r in group])
    return result


def masked(values: Groups, groups: Groups) -> list[list[float | None]]:
    result = []
    for a, b in zip(values, groups, strict=True):
        result.append([None if r is None else v for v, r in zip(a, b, strict=True)])
    return result


def advantages(
    name: str,
    groups: Groups,
    ddof: int = 1,
    eps: float = 0.0,
    eps_mode: str = "add",
    parts: Sequence[Groups] | None = None,
    weights: Sequence[float] | None = None,
    lengths: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """`parts` are the reward functions' own values, a list of groups for each; `lengths` are tokens
    to whiten over."""

    def normalised(r: float, rewards: list[float]) -> float:
        return (r - mean(rewards)) / divisor(deviation(rewards, ddof), eps, eps_mode)

    def centred(group: Group) -> list[float]:
        return within(group, lambda r, rewards: r - mean(rewards))

    if name == "grpo":
        return [within(group, normalised) for group in groups]
    if name == "dr_grpo":
        return [centred(group) for group in groups]
    if name == "rloo":
        return [
            within(group, lambda r, rewards: r - (math.fsum(rewards) - r) / (len(rewards) - 1))
            for group in groups
        ]
    if name == "batch_std":
        every = [r for group in groups for r in there(group)]
        if len(set(every)) < 2:
            return [[0.0] * len(group) for group in groups]
        size = divisor(deviation(every, ddof), eps, eps_mode)
        return [[a / size for a in centred(group)] for group in groups]
    if name == "reinforce++":
        return whiten(groups, ddof, eps, eps_mode, lengths)
    if name == "reinforce++-baseline":
        return whiten(
            masked([centred(group) for group in groups], groups), ddof, eps, eps_mode, lengths
        )
    if name == "maxrl":
        return [
            within(
                group,
                lambda r, rewards: (
                    r / mean(rewards) - 1 if min(rewards) >= 0 < mean(rewards) else 0.0
                ),
            )
            for group in groups
        ]
    if name == "gdpo":
        total = [[0.0] * len(group) for group in groups]
        for part, weight in zip(
            parts or [groups], weights or [1.0] * len(parts or [groups]), strict=True
        ):
            for sums, values, rewards in zip(total, part, groups, strict=True):
                judged = [None if r is None else v for v, r in zip(values, rewards, strict=True)]
                for i, a in enumerate(within(judged, normalised)):
                    sums[i] += weight * a
        return whiten(masked(total, groups), ddof, eps, eps_mode, lengths)
    if name == "none":
        return [[0.0] * len(group) for group in groups]
    if name == "sft":
        return [[0.0 if r is None else 1.0 for r in group] for group in groups]
    raise KeyError(name)
