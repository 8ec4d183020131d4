"""An update's loss once more, in float64 NumPy, one completion at a time, written from the papers'
definitions alone.

Nothing of shoal is called here. Forms differ from shoal's on purpose: clipped minima are written
out by the sign of the advantage, sequence ratios are geometric means of ratios, a denominator is
counted where shoal weighs tokens. What stands under a stop-gradient is taken at `Completion.lp`,
everything else at the argument `lp`, which may be complex: gradients come from an imaginary step,
exact to rounding, of the value itself. (`test_proof.py` holds them against finite differences.)
Advantages are in `oracle_advantage.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

STEP = 1e-40


@dataclass(frozen=True)
class Completion:
    """T tokens of one completion; those outside `loss_mask` are context, never loss."""

    lp: np.ndarray  # float64[T]
    old_logprobs: np.ndarray  # float64[T]
    ref_logprobs: np.ndarray  # float64[T]
    # bool[T]; nowhere True: masked out of the loss, still one of the completions
    loss_mask: np.ndarray
    advantage: float | np.ndarray  # of all tokens, or of each
    sampler_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64[T]
    prompt: int = 0
    # bool[T]: context that is learned, where `context_coef` says how much; None: none
    context: np.ndarray | None = None

    @property
    def advantages(self) -> np.ndarray:
        return np.broadcast_to(np.asarray(self.advantage, np.float64), self.lp.shape)


@dataclass(frozen=True)
class Settings:
    """What is minimised."""

    loss: str = "grpo"
    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0
    cispo: str = "paper"
    positive: float = 1.0
    negative: float = 1.05
    kl: str = "k3"
    kl_coef: float = 0.0
    clamp_input: float = 0.0
    clamp_value: float = 0.0
    weighted: bool = False
    entropy_coef: float = 0.0
    aggregation: str = "token-mean"
    constant: int = 0
    correction: str = "none"
    level: str = "token"
    cap: float = 2.0
    floor: float = 0.5
    rejection: str = "none"
    # of the ratio with k1; else the second is of the estimate
    rejection_bounds: tuple[float, float] = (0.5, 2.0)
    context_coef: float = 0.0


# ---- token losses


def geometric_mean(values: np.ndarray) -> complex | float:
    return np.prod(values) ** (1 / len(values)) if len(values) else 1.0


def ratios(s: Settings, c: Completion, lp: np.ndarray) -> np.ndarray:
    """What is clipped, at each token, as a function of `lp`."""
    own = np.exp(lp) / np.exp(c.old_logprobs)
    if s.loss == "gspo":
        return np.full(len(lp), geometric_mean(own[c.loss_mask]))
    if s.loss == "gspo-token":
        fixed = geometric_mean((np.exp(c.lp) / np.exp(c.old_logprobs))[c.loss_mask])
        return fixed * np.exp(lp) / np.exp(c.lp)
    if s.loss == "gmpo":
        clipped = []
        for r, a in zip(own, c.advantages, strict=True):
            clipped.append(bounded(r, a, math.exp(-s.low), math.exp(s.high)))
        return np.full(len(lp), geometric_mean(np.array(clipped)[c.loss_mask]))
    return own


def bounded(ratio: complex, advantage: float, least: float, most: float) -> complex:
    """Where the advantage is positive a ratio may earn no more than `most`; where it is negative it
    costs no less than `least`."""
    if advantage > 0:
        return ratio if ratio.real <= most else most
    return ratio if ratio.real >= least else least


def dropped(s: Settings, c: Completion, t: int) -> bool:
    """Whether DPPO drops a token: its probability moved too far in the advantage's direction."""
    grown = math.exp(c.lp[t]) - math.exp(c.old_logprobs[t])
    return grown > s.high if c.advantages[t] > 0 else c.advantages[t] < 0 and grown < -s.low


def token_losses(s: Settings, c: Completion, lp: np.ndarray) -> np.ndarray:
    """The policy term of each token, 0 where it was not drawn."""
    values = np.zeros(len(lp), lp.dtype)
    for t, (ratio, advantage) in enumerate(zip(ratios(s, c, lp), c.advantages, strict=True)):
        if not c.loss_mask[t]:
            continue
        if s.loss == "cispo":
            weight = math.exp(c.lp[t]) / math.exp(c.old_logprobs[t])
            weight = min(weight, s.high if s.cispo == "absolute" else 1 + s.high)
            values[t] = (
                -(max(weight, 1 - s.low) if s.cispo == "both" else weight) * advantage * lp[t]
            )
        elif s.loss == "reinforce":
            values[t] = -advantage * lp[t]
        elif s.loss == "gmpo":
            values[t] = -advantage * ratio
        elif s.loss == "dppo":
            values[t] = 0.0 if dropped(s, c, t) else -advantage * ratio
        elif s.loss == "sapo":
            tau = s.positive if advantage > 0 else s.negative
            values[t] = -advantage * (4 / tau) / (1 + np.exp(-tau * (ratio - 1)))
        else:
            kept = bounded(ratio, advantage, 1 - s.low, 1 + s.high)
            if s.dual and advantage < 0 and kept.real > s.dual:
                kept = s.dual
            values[t] = -advantage * kept
    return values


def clipped_tokens(s: Settings, c: Completion) -> tuple[int, int]:
    """Numbers of drawn tokens where the bound from below, and from above, is what the loss goes
    by."""
    low = high = 0
    own = np.exp(c.lp - c.old_logprobs)
    for t, advantage in enumerate(c.advantages):
        if not c.loss_mask[t] or s.loss in ("sapo", "reinforce"):
            continue
        if s.loss == "cispo":
            low += s.cispo == "both" and own[t] < 1 - s.low
            high += own[t] > (s.high if s.cispo == "absolute" else 1 + s.high)
        elif s.loss == "dppo":
            low += advantage < 0 and dropped(s, c, t)
            high += advantage > 0 and dropped(s, c, t)
        elif s.loss == "gmpo":
            low += advantage < 0 and own[t] < math.exp(-s.low)
            high += advantage > 0 and own[t] > math.exp(s.high)
        else:
            ratio = ratios(s, c, c.lp)[t]
            low += advantage < 0 and ratio < 1 - s.low
            high += (advantage > 0 and ratio > 1 + s.high) or bool(
                s.dual and advantage < 0 and ratio > s.dual
            )
    return int(low), int(high)


def reported_ratios(s: Settings, c: Completion) -> np.ndarray:
    """The ratio of each sampled token as the metrics have it: before it is bounded."""
    return (
        ratios(s, c, c.lp) if s.loss.startswith("gspo") else np.exp(c.lp) / np.exp(c.old_logprobs)
    )[c.loss_mask]


# ---- divergence, corrections


def token_kls(s: Settings, c: Completion, lp: np.ndarray) -> np.ndarray:
    """The estimate at each drawn token, times the ratio (GSPO's own for its forms) where
    `weighted`; 0 elsewhere."""
    weights = ratios(s, c, lp) if s.loss.startswith("gspo") else np.exp(lp) / np.exp(c.old_logprobs)
    values = np.zeros(len(lp), lp.dtype)
    for t in np.flatnonzero(c.loss_mask):
        log_r = c.ref_logprobs[t] - lp[t]
        if s.clamp_input and abs(log_r.real) > s.clamp_input:
            log_r = math.copysign(s.clamp_input, log_r.real)
        value = {"k1": -log_r, "k2": log_r * log_r / 2, "k3": np.exp(log_r) - 1 - log_r}[s.kl]
        if s.clamp_value and abs(value.real) > s.clamp_value:
            value = math.copysign(s.clamp_value, value.real)
        values[t] = value * (weights[t] if s.weighted else 1.0)
    return values


def corrections(s: Settings, c: Completion) -> np.ndarray:
    """The weight of each drawn token's policy term; 0 elsewhere."""
    if s.correction == "none":
        return c.loss_mask.astype(np.float64)
    own = np.exp(c.old_logprobs) / np.exp(c.sampler_logprobs)
    if s.level == "sequence":
        own = np.full(len(own), np.prod(own[c.loss_mask]))
    elif s.level == "geometric":
        own = np.full(len(own), geometric_mean(own[c.loss_mask]))
    rule: Callable[[float], float] = {
        "tis": lambda w: max(min(w, s.cap), s.floor),
        "mis": lambda w: w if s.floor <= w <= s.cap else 0.0,
        "icepop": lambda w: w if s.floor <= w <= s.cap else 0.0,
    }[s.correction]
    return np.array([rule(float(w)) if d else 0.0 for w, d in zip(own, c.loss_mask, strict=True)])


def remaining(s: Settings, c: Completion) -> Completion:
    """The completion without the drawn tokens that are rejected: with k1 by the ratio of trainer
    and sampler, its product or geometric mean; else by an estimate of their divergence, its sum,
    mean or maximum."""
    if s.rejection == "none":
        return c
    level, _, kl = s.rejection.rpartition("_")
    own = np.exp(c.old_logprobs[c.loss_mask]) / np.exp(c.sampler_logprobs[c.loss_mask])
    low, high = s.rejection_bounds
    if kl == "k1":
        values = {"token": own, "seq_sum": np.prod(own), "seq_mean": geometric_mean(own)}[level]
    else:
        low, own = 0.0, {"k2": np.log(own) ** 2 / 2, "k3": own - 1 - np.log(own)}[kl]
        values = {
            "token": own,
            "seq_sum": sum(own),
            "seq_mean": sum(own) / max(len(own), 1),
            "seq_max": max(own, default=0),
        }[level]
    kept = c.loss_mask.copy()
    kept[c.loss_mask] = (values >= low) & (values <= high)
    return replace(c, loss_mask=kept)


def effective_sample_size(completions: Sequence[Completion]) -> float:
    w = np.concatenate(
        [np.exp(c.old_logprobs - c.sampler_logprobs)[c.loss_mask] for c in completions]
    )
    return w.sum() ** 2 / (len(w) * (w**2).sum())


# ---- one number


def aggregate(
    mode: str, per_token: Sequence[np.ndarray], completions: Sequence[Completion], constant: int = 0
) -> float:
    """One number from the token values of the completions that count."""
    if not completions:
        return 0.0
    sums = []
    for x, c in zip(per_token, completions, strict=True):
        sums.append(x[c.loss_mask].sum())
    lengths = [int(c.loss_mask.sum()) for c in completions]
    if mode == "token-mean":
        return sum(sums) / max(sum(lengths), 1)
    if mode == "seq-mean-token-mean":
        return sum(a / n for a, n in zip(sums, lengths, strict=True) if n) / len(sums)
    if mode == "seq-mean-token-sum":
        return sum(sums) / len(sums)
    if mode == "seq-mean-token-sum-norm":
        return sum(sums) / (len(sums) * constant)
    if mode == "prompt-mean":
        means = []
        for prompt in dict.fromkeys(c.prompt for c in completions):
            members = []
            for i, c in enumerate(completions):
                if c.prompt == prompt:
                    members.append(i)
            means.append(sum(sums[i] for i in members) / max(sum(lengths[i] for i in members), 1))
        return sum(means) / len(means)
    raise KeyError(mode)


def loss(
    s: Settings,
    completions: Sequence[Completion],
    lps: Sequence[np.ndarray] | None = None,
    entropies: Sequence[np.ndarray] | None = None,
) -> float:
    """The whole update's. `entropies` of each token's distribution, where they have a part in
    it."""
    lps = [c.lp for c in completions] if lps is None else lps
    per_token = []
    for i, (c, lp) in enumerate(zip(completions, lps, strict=True)):
        # the weights are of the whole completion, and so are all denominators
        kept = remaining(s, c)
        value = corrections(s, c) * token_losses(s, kept, lp)
        if s.kl_coef:
            value = value + s.kl_coef * token_kls(s, kept, lp)
        if s.entropy_coef and entropies is not None:
            value = value - s.entropy_coef * entropies[i] * kept.loss_mask
        per_token.append(value)
    total = aggregate(s.aggregation, per_token, completions, s.constant)
    if s.context_coef:
        total = total + s.context_coef * context_cross_entropy(completions, lps)
    return total


def context_cross_entropy(completions: Sequence[Completion], lps: Sequence[np.ndarray]) -> float:
    """The mean of -log p over all context that is learned, of all completions together."""
    learned = []
    for c, lp in zip(completions, lps, strict=True):
        if c.context is not None:
            learned += list(lp[c.context])
    return -sum(learned) / max(len(learned), 1)


def derivative(
    function: Callable[[np.ndarray], complex | np.ndarray], at: np.ndarray
) -> np.ndarray:
    """d function / d at, its own dimensions first: the imaginary part of an imaginary step."""
    columns = []
    for place in np.ndindex(at.shape):
        moved = at.astype(np.complex128)
        moved[place] += 1j * STEP
        columns.append(np.imag(function(moved)) / STEP)
    value = np.stack(columns, axis=-1)
    return value.reshape(*value.shape[:-1], *at.shape)


def gradients(s: Settings, completions: Sequence[Completion]) -> list[np.ndarray]:
    """d loss / d lp of each completion's tokens."""
    lps = [c.lp for c in completions]

    def at(i: int) -> Callable[[np.ndarray], complex]:
        return lambda lp: loss(s, completions, [*lps[:i], lp, *lps[i + 1 :]])

    return [derivative(at(i), c.lp) for i, c in enumerate(completions)]
