"""Policy losses: log-probs, advantages and masks in, one loss for each token out; pure and differentiable in `lp`.

Each function has the signature of `PolicyLoss` and stands in `POLICY_LOSSES` under the name that a user sets. The
loss of an update is `sum(weight * token_loss)`, weights from `aggregation`. `lp` are the log-probs of the policy that
is trained, `old_logprobs` those from before the first update on this batch; if a batch gets one update only,
`old_logprobs` is `stop_gradient(lp)`: the ratio is then 1, and clipping never acts.

Where `mask` is False, loss and gradient are exactly 0 whatever the inputs hold. Where it is True nothing is guarded: a
log-prob that is not finite shows in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from shoal.algorithm.segments import segment_mean

Metrics: TypeAlias = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
"""Name -> (sum, count): the value is sum / count, after sums and counts of all micro-batches are added."""

Tokens = Float[Array, "R S C"]
Mask = Bool[Array, "R S C"]
Segments = Int[Array, "R S C"]


@dataclass(frozen=True)
class Bounds:
    """Limits of the ratio; each loss reads those that it needs.

    `low` and `high` are distances from 1. `dual` bounds the loss at negative advantages, 0 turns it off. `cispo` is
    the form of CISPO's bound; `positive` and `negative` are SAPO's temperatures by the sign of the advantage.
    """

    low: float
    high: float
    dual: float = 0.0
    cispo: str = "paper"
    positive: float = 1.0
    negative: float = 1.05


class PolicyLoss(Protocol):
    """Arrays of [R, S, C] in nats -> (token loss of the same shape, metrics).

    `mask` is True at tokens that the model sampled; `segment` numbers the completions within a slot from 1, 0 is
    padding.
    """

    def __call__(self, lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Mask, segment: Segments,
                 bounds: Bounds) -> tuple[Tokens, Metrics]: ...


def grpo(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Mask, segment: Segments,
         bounds: Bounds) -> tuple[Tokens, Metrics]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) with ratio = exp(lp - old) of each token.

    PPO, arXiv 1707.06347, eq. 7, as in GRPO: DeepSeekMath, arXiv 2402.03300, eq. 3 (without its KL term, which is
    `kl`). With high > low it is the clip-higher of DAPO, arXiv 2503.14476, eq. 10. With `dual` c, where A < 0 the loss
    is at most -c A: arXiv 1912.09729, eq. 5.
    """
    return _clipped(policy_log_ratio("grpo", lp, old_logprobs, mask, segment), advantage, mask, bounds)


def gspo(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Mask, segment: Segments,
         bounds: Bounds) -> tuple[Tokens, Metrics]:
    """As `grpo`, with one ratio for a completion, s = exp(mean of lp - old over its sampled tokens); gradient through
    s.

    Every token has its completion's loss. The paper clips at 3e-4 below and 4e-4 above: s moves far less than a
    token's ratio does. GSPO, arXiv 2507.18071, eqs. 5 to 7.
    """
    return _clipped(policy_log_ratio("gspo", lp, old_logprobs, mask, segment), advantage, mask, bounds)


def gspo_token(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Mask, segment: Segments,
               bounds: Bounds) -> tuple[Tokens, Metrics]:
    """As `gspo` in value, with a gradient at each token: sg(s) exp(lp - sg(lp)). GSPO-token, arXiv 2507.18071,
    eqs. 13 and 14."""
    return _clipped(policy_log_ratio("gspo-token", lp, old_logprobs, mask, segment), advantage, mask, bounds)


def cispo(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Mask, segment: Segments,
          bounds: Bounds) -> tuple[Tokens, Metrics]:
    """-sg(bounded ratio) A lp: the weight is bounded, and no token loses its gradient. MiniMax-M1, arXiv 2506.13585,
    eqs. 4 and 5.

    `bounds.cispo`: `paper`, at most 1 + high; `absolute`, at most high (TRL); `both`, also at least 1 - low (verl). The
    clip metrics count the tokens whose weight was bounded.
    """
    lp, old_logprobs, advantage = _zero_outside(mask, lp, old_logprobs, advantage)
    # Without the stop-gradient the bounded tokens would have none at all: the fault of a port that clips the ratio
    # and forgets the log-prob.
    ratio = jax.lax.stop_gradient(jnp.exp(lp - old_logprobs))
    top = bounds.high if bounds.cispo == "absolute" else 1 + bounds.high
    weight = jnp.clip(ratio, 1 - bounds.low if bounds.cispo == "both" else None, top)
    return jnp.where(mask, -weight * advantage * lp, 0), _metrics(ratio, weight < ratio, weight > ratio, mask)


def gmpo(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Mask, segment: Segments,
         bounds: Bounds) -> tuple[Tokens, Metrics]:
    """-A times the geometric mean over a completion of its tokens' clipped ratios, gradient through those not clipped.

    Ratios are clipped in logarithms, from above at `high` where A > 0, from below at -`low` where A < 0; the paper has
    0.4 for both. Every token has its completion's loss. GMPO, arXiv 2507.20673.
    """
    lp, old_logprobs, advantage = _zero_outside(mask, lp, old_logprobs, advantage)
    log_ratio = lp - old_logprobs
    # The bounds are decided by the value: a comparison has no gradient, but a clipped term must not carry one either.
    value = jax.lax.stop_gradient(log_ratio)
    above, below = mask & (advantage > 0) & (value > bounds.high), mask & (advantage < 0) & (value < -bounds.low)
    clipped = jnp.where(above, bounds.high, jnp.where(below, -bounds.low, log_ratio))
    token_loss = -advantage * jnp.exp(segment_mean(clipped, segment, mask))
    return jnp.where(mask, token_loss, 0), _metrics(jnp.exp(value), above, below, mask)


def sapo(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Mask, segment: Segments,
         bounds: Bounds) -> tuple[Tokens, Metrics]:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A, tau = `positive` where A > 0, else `negative`: in place of a clip,
    a gate that closes smoothly on both sides. SAPO, arXiv 2511.20347."""
    lp, old_logprobs, advantage = _zero_outside(mask, lp, old_logprobs, advantage)
    # Above exp(88) the ratio is inf in float32, and its slope times that of the closed gate, 0, would be NaN.
    ratio = jnp.exp(jnp.minimum(lp - old_logprobs, 80.0))
    tau = jnp.where(advantage > 0, bounds.positive, bounds.negative)
    token_loss = -4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantage
    never = jnp.zeros_like(mask)
    return jnp.where(mask, token_loss, 0), _metrics(jax.lax.stop_gradient(ratio), never, never, mask)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": grpo, "gspo": gspo, "gspo-token": gspo_token, "cispo": cispo, "gmpo": gmpo, "sapo": sapo,
}
"""By the names of `algorithm.loss`."""


def policy_log_ratio(name: str, lp: Tokens, old_logprobs: Tokens, mask: Mask, segment: Segments) -> Tokens:
    """The logarithm of the ratio that the named loss uses: the token's, or for the two forms of GSPO the
    completion's."""
    lp, old_logprobs = _zero_outside(mask, lp, old_logprobs)
    if name == "gspo":
        return segment_mean(lp - old_logprobs, segment, mask)
    if name == "gspo-token":
        return lp - jax.lax.stop_gradient(lp) + jax.lax.stop_gradient(segment_mean(lp - old_logprobs, segment, mask))
    return lp - old_logprobs


def _zero_outside(mask: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    # Before the maths, not only after: the derivative of exp at infinity times 0 would be NaN.
    return tuple(jnp.where(mask, array, 0) for array in arrays)


def _clipped(log_ratio: jax.Array, advantage: jax.Array, mask: jax.Array, bounds: Bounds) -> tuple[jax.Array, Metrics]:
    """PPO's clipped surrogate; `log_ratio` is finite outside the mask.

    Where the clipped loss is strictly above the unclipped one its gradient is 0; at a tie the gradient is whole.
    """
    # Not jnp.minimum and jnp.clip: at a tie, the common case of ratio 1, both would halve the gradient.
    (advantage,) = _zero_outside(mask, advantage)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    clipped = -jnp.clip(ratio, 1 - bounds.low, 1 + bounds.high) * advantage
    active = mask & (clipped > -ratio * advantage)
    unclipped = -ratio * advantage
    high, low = active & (ratio > 1), active & (ratio < 1)
    constant = jnp.where(active, clipped, 0)
    if bounds.dual:
        capped = mask & (advantage < 0) & (jnp.where(active, clipped, unclipped) > -bounds.dual * advantage)
        constant, active = jnp.where(capped, -bounds.dual * advantage, constant), active | capped
        high = high | capped
    # Where a bound is active the exponent is 0, so that a ratio of inf leaves no NaN in the gradient.
    live = -jnp.exp(jnp.where(active, 0, log_ratio)) * advantage
    token_loss = jnp.where(mask, jnp.where(active, constant, live), 0)
    return token_loss, _metrics(ratio, high, low, mask)


def _metrics(ratio: jax.Array, high: jax.Array, low: jax.Array, mask: jax.Array) -> Metrics:
    """`high` and `low` mark the tokens where the upper or the lower bound is active (the sign of A considered)."""
    high, low = mask & high, mask & low
    count = mask.sum(dtype=ratio.dtype)
    values = {
        "clip_fraction": high | low,
        "clip_low_fraction": low,
        "clip_high_fraction": high,
        "ratio": jnp.where(mask, ratio, 0),
    }
    return {name: (value.sum(dtype=ratio.dtype), count) for name, value in values.items()}
