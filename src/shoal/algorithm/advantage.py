"""Rewards of a group to advantages: float64 on the host, before anything is packed.

Each function has the signature of `Advantage` and stands in `ADVANTAGES` under the name that a user sets. `valid[P, G]`
is False where a sibling is missing or unscorable: whatever its reward holds, NaN included, it has no part in any mean
or deviation, and advantage 0. A NaN at a valid place is not hidden: it spreads over its group (in `gdpo`, a function's
own NaN says that it could not judge).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float

from shoal.config.sections import AlgorithmSection

Rewards = Float[np.ndarray, "P G"]
Valid = Bool[np.ndarray, "P G"]


class Advantage(Protocol):
    """rewards[P, G], valid[P, G] -> float64[P, G]; settings that a form does not need are taken and left unread.

    `components[F, P, G]` are the reward functions' own values, NaN where one could not judge, and `weights[F]` theirs.
    """

    def __call__(
        self, rewards: Rewards, valid: Valid, *, std_ddof: int, std_eps: float, std_eps_mode: str = "add",
        components: Float[np.ndarray, "F P G"] | None = None, weights: Float[np.ndarray, "F"] | None = None,
    ) -> Float[np.ndarray, "P G"]: ...


def nonzero_std(rewards: Rewards, valid: Valid) -> Bool[np.ndarray, "P"]:
    """Whether a group has anything to compare: two valid siblings or more, whose rewards are not all the same.

    Exact comparison of the largest and the smallest: a standard deviation of equal rewards need not round to 0.
    """
    top = np.where(valid, rewards, -np.inf).max(axis=1)
    bottom = np.where(valid, rewards, np.inf).min(axis=1)
    return (valid.sum(axis=1) >= 2) & ~(top == bottom)


def grpo(rewards: Rewards, valid: Valid, *, std_ddof: int, std_eps: float, std_eps_mode: str = "add",
         **unread: object) -> Rewards:
    """(r - mean) / (std + std_eps) within each group; `std_eps_mode="max"`: / max(std, std_eps).

    `std_ddof` is taken off the number of valid siblings. DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome
    supervision).
    """
    centred = _centred(rewards, valid)
    return centred / _divisor(_std(centred, valid, std_ddof, axis=1), std_eps, std_eps_mode)


def dr_grpo(rewards: Rewards, valid: Valid, **unread: object) -> Rewards:
    """r - mean: no deviation, which would weigh easy and hard prompts up. Dr. GRPO, arXiv 2503.20783, section 3.2."""
    return _centred(rewards, valid)


def rloo(rewards: Rewards, valid: Valid, **unread: object) -> Rewards:
    """r - mean of the other valid siblings. Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for
    Free!" (2019); for language models RLOO, arXiv 2402.14740."""
    number = valid.sum(axis=1, keepdims=True)
    return _centred(rewards, valid) * (number / np.maximum(number - 1, 1))


def batch_std(rewards: Rewards, valid: Valid, *, std_ddof: int, std_eps: float, std_eps_mode: str = "add",
              **unread: object) -> Rewards:
    """(r - mean of the group) / (std of all valid rewards of the step + std_eps). "Tricks or Traps", arXiv 2508.08221;
    TRL's scale_rewards="batch"."""
    spread = _std(_centred_over(rewards, valid, axis=None), valid, std_ddof, axis=None)
    return _centred(rewards, valid) / _divisor(spread, std_eps, std_eps_mode)


def reinforce_pp(rewards: Rewards, valid: Valid, *, std_ddof: int, std_eps: float, std_eps_mode: str = "add",
                 **unread: object) -> Rewards:
    """(r - mean) / (std + std_eps) over all valid rewards of the step: groups have no part. REINFORCE++, arXiv
    2501.03262."""
    return _whitened(rewards, valid, std_ddof, std_eps, std_eps_mode)


def reinforce_pp_baseline(rewards: Rewards, valid: Valid, *, std_ddof: int, std_eps: float, std_eps_mode: str = "add",
                          **unread: object) -> Rewards:
    """r - mean of the group, then whitened over the step. REINFORCE++-baseline, arXiv 2501.03262."""
    return _scaled(_centred(rewards, valid), valid, std_ddof, std_eps, std_eps_mode)


def maxrl(rewards: Rewards, valid: Valid, **unread: object) -> Rewards:
    """(r - mean) / mean of the group: with rewards 0 and 1 the gradient's mean is one of a truncated log-likelihood of
    success. For rewards of 0 or more, where it is at most G - 1: groups with one below 0, or with none above, have
    advantage 0. MaxRL, arXiv 2602.02710."""
    number = np.maximum(valid.sum(axis=1, keepdims=True), 1)
    mean = np.where(valid, rewards, 0.0).sum(axis=1, keepdims=True) / number
    outside = (mean <= 0) | (np.where(valid, rewards, 0.0) < 0).any(axis=1, keepdims=True)
    centred = _centred(rewards, valid)
    return np.divide(centred, mean, out=np.zeros_like(centred), where=~outside)


def gdpo(rewards: Rewards, valid: Valid, *, std_ddof: int, std_eps: float, std_eps_mode: str = "add",
         components: Float[np.ndarray, "F P G"] | None = None,
         weights: Float[np.ndarray, "F"] | None = None) -> Rewards:
    """Each reward function's values normalised within their groups as by `grpo`, summed by weight, whitened over the
    step: rewards of other spread do not drown each other. GDPO, arXiv 2601.05242."""
    parts = rewards[None] if components is None else components
    scale = np.ones(len(parts)) if weights is None else weights
    total = np.zeros(rewards.shape)
    for part, weight in zip(parts, scale, strict=True):
        judged = valid & ~np.isnan(part)
        total += weight * grpo(part, judged, std_ddof=std_ddof, std_eps=std_eps, std_eps_mode=std_eps_mode)
    return _scaled(total, valid, std_ddof, std_eps, std_eps_mode)


def none(rewards: Rewards, valid: Valid, **unread: object) -> Rewards:
    """0 everywhere: the rewards have no part, a teacher alone teaches."""
    return np.zeros(rewards.shape)


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "batch_std": batch_std,
    "reinforce++": reinforce_pp,
    "reinforce++-baseline": reinforce_pp_baseline,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "none": none,
}
"""By the names of `algorithm.advantage`."""


def step_advantages(a: AlgorithmSection, rewards: np.ndarray, valid: np.ndarray,
                    components: Sequence[Mapping[str, np.ndarray]] = (),
                    weights: Mapping[str, float] | None = None) -> np.ndarray:
    """Advantages float64[P, G] of one step's rewards[P, G]. `components`: each group's rewards by function, and their
    `weights`, for the form that takes the functions apart."""
    names = list(weights or {})
    stacked = np.array([[group[name] for group in components] for name in names]) if names and components else None
    scale = np.array([weights[name] for name in names]) if stacked is not None and weights else None
    return ADVANTAGES[a.advantage](rewards, valid, std_ddof=a.std_ddof, std_eps=a.std_eps, std_eps_mode=a.std_eps_mode,
                                   components=stacked, weights=scale)


def _centred(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """r - mean of the group; exactly 0 in a group that is not `nonzero_std`."""
    return _centred_over(rewards, valid & nonzero_std(rewards, valid)[:, None], axis=1)


def _centred_over(rewards: np.ndarray, members: np.ndarray, axis: int | None) -> np.ndarray:
    kept = np.where(members, rewards, 0.0).astype(np.float64)
    mean = kept.sum(axis=axis, keepdims=True) / np.maximum(members.sum(axis=axis, keepdims=True), 1)
    return np.where(members, kept - mean, 0.0)


def _std(centred: np.ndarray, members: np.ndarray, ddof: int, axis: int | None) -> np.ndarray:
    number = members.sum(axis=axis, keepdims=True)
    return np.sqrt((centred**2).sum(axis=axis, keepdims=True) / np.maximum(number - ddof, 1))


def _divisor(std: np.ndarray, eps: float, eps_mode: str) -> np.ndarray:
    """What to divide by; 1 where it would be 0 (only zeros stand above it)."""
    size = np.maximum(std, eps) if eps_mode == "max" else std + eps
    return np.where(size == 0, 1.0, size)


def _scaled(values: np.ndarray, valid: np.ndarray, ddof: int, eps: float, eps_mode: str) -> np.ndarray:
    """Values whose mean is 0 within each group, over their deviation in the step: what is exactly 0 stays so."""
    return values / _divisor(_std(_centred_over(values, valid, axis=None), valid, ddof, axis=None), eps, eps_mode)


def _whitened(values: np.ndarray, valid: np.ndarray, ddof: int, eps: float, eps_mode: str) -> np.ndarray:
    """(x - mean) / (std + eps) over all valid ones of the step; exactly 0 where they are all the same."""
    if not nonzero_std(values.reshape(1, -1), valid.reshape(1, -1))[0]:
        return np.zeros(values.shape)
    centred = _centred_over(values, valid, axis=None)
    return centred / _divisor(_std(centred, valid, ddof, axis=None), eps, eps_mode)
