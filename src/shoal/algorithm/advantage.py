"""Rewards of a group to advantages: float64 on the host, before anything is packed.

Each function has the signature of `Advantage` and stands in `ADVANTAGES` under the name that a user sets.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float


class Advantage(Protocol):
    """rewards[P, G], valid[P, G] -> float64[P, G]; settings that a form does not need are taken and left unread."""

    def __call__(
        self, rewards: Float[np.ndarray, "P G"], valid: Bool[np.ndarray, "P G"], *, std_ddof: int, std_eps: float
    ) -> Float[np.ndarray, "P G"]: ...


def informative(rewards: Float[np.ndarray, "P G"], valid: Bool[np.ndarray, "P G"]) -> Bool[np.ndarray, "P"]:
    """Whether a group has anything to compare: two valid siblings or more, whose rewards are not all the same.

    Exact comparison of the largest and the smallest: a standard deviation of equal rewards need not round to 0.
    """
    top = np.where(valid, rewards, -np.inf).max(axis=1)
    bottom = np.where(valid, rewards, np.inf).min(axis=1)
    return (valid.sum(axis=1) >= 2) & ~(top == bottom)


def grpo(
    rewards: Float[np.ndarray, "P G"], valid: Bool[np.ndarray, "P G"], *, std_ddof: int, std_eps: float
) -> Float[np.ndarray, "P G"]:
    """(r - mean) / (std + std_eps), mean and std over the valid siblings of each group.

    `valid[P, G]` is False where a sibling is missing or unscorable: whatever its reward holds, NaN included, it has
    no part in mean and std, and advantage 0. A group that is not `informative` has advantage exactly 0. A NaN at a
    valid place is not hidden: it spreads over its group. `std_ddof` is taken off the number of valid siblings.

    DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).
    """
    useful = informative(rewards, valid)[:, None]
    number = np.where(useful, valid.sum(axis=1, keepdims=True), 2)  # any number above ddof where nothing is useful
    kept = np.where(valid & useful, rewards, 0.0).astype(np.float64)
    mean = kept.sum(axis=1, keepdims=True) / number
    centred = np.where(valid & useful, kept - mean, 0.0)
    std = np.sqrt((centred**2).sum(axis=1, keepdims=True) / (number - std_ddof))
    return np.divide(centred, std + std_eps, out=np.zeros_like(centred), where=valid & useful)


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo}
"""By the names of `algorithm.advantage`."""
