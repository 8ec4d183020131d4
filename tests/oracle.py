"""The algorithms once more, in float64 NumPy, one completion at a time, written from the papers' definitions alone.

Nothing of shoal is called here. Forms differ from shoal's on purpose: the clipped minimum is written out by the sign
of the advantage, the sequence ratio is a geometric mean of ratios, gradients are worked by hand (and checked against
finite differences in `test_algorithm.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Completion:
    """T tokens of one completion; those not `drawn` are context, never loss."""

    lp: np.ndarray  # float64[T]
    old: np.ndarray  # float64[T]
    ref: np.ndarray  # float64[T]
    drawn: np.ndarray  # bool[T]
    advantage: float


def advantages(rewards: list[float], ddof: int, eps: float) -> list[float]:
    """Of one group, all of whose siblings are valid."""
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - ddof)
    return [(r - mean) / (math.sqrt(variance) + eps) for r in rewards]


def ratios(loss: str, c: Completion, lp: np.ndarray) -> np.ndarray:
    """The ratio of each token as a function of `lp`, whatever is under a stop-gradient taken at `c.lp`."""
    if loss == "grpo":
        return np.exp(lp) / np.exp(c.old)
    if loss == "gspo-token":
        drawn = (np.exp(c.lp) / np.exp(c.old))[c.drawn]
        s = math.prod(drawn) ** (1 / len(drawn)) if len(drawn) else 1.0
        return s * np.exp(lp) / np.exp(c.lp)
    raise KeyError(loss)


def token_losses(loss: str, c: Completion, low: float, high: float, lp: np.ndarray) -> np.ndarray:
    """A > 0: the ratio may earn no more than 1 + high. A < 0: it may cost no less than 1 - low."""
    values = np.zeros(len(c.lp))
    for t, ratio in enumerate(ratios(loss, c, lp)):
        if c.drawn[t]:
            values[t] = -c.advantage * (min(ratio, 1 + high) if c.advantage > 0 else max(ratio, 1 - low))
    return values


def token_gradients(loss: str, c: Completion, low: float, high: float) -> np.ndarray:
    """d token_loss[t] / d lp[t]; other tokens' lp have no part in it."""
    values = np.zeros(len(c.lp))
    for t, ratio in enumerate(ratios(loss, c, c.lp)):
        clipped = ratio > 1 + high if c.advantage > 0 else ratio < 1 - low
        if c.drawn[t] and not clipped:
            values[t] = -c.advantage * ratio
    return values


def token_kls(c: Completion, lp: np.ndarray) -> np.ndarray:
    """k3: r - 1 - log r with r = reference / policy."""
    r = np.exp(c.ref) / np.exp(lp)
    return np.where(c.drawn, r - 1 - np.log(r), 0.0)


def token_kl_gradients(c: Completion) -> np.ndarray:
    return np.where(c.drawn, 1 - np.exp(c.ref) / np.exp(c.lp), 0.0)


def aggregate(mode: str, per_token: list[np.ndarray], drawn: list[np.ndarray]) -> float:
    """One number from the token values of the completions that count."""
    if not per_token:
        return 0.0
    sums = [math.fsum(x[d]) for x, d in zip(per_token, drawn, strict=True)]
    lengths = [int(d.sum()) for d in drawn]
    if mode == "token-mean":
        return math.fsum(sums) / sum(lengths)
    if mode == "seq-mean-token-mean":
        return math.fsum(s / n for s, n in zip(sums, lengths, strict=True) if n) / len(sums)
    if mode == "seq-mean-token-sum":
        return math.fsum(sums) / len(sums)
    raise KeyError(mode)
