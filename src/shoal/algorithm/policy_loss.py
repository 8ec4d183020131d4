"""Policy losses: from the ratio of a token, its log-prob and its advantage to its loss; pure and differentiable.

A loss is a function of arrays of [R, T] in nats, and of the settings that its row in
`shoal.config.algorithm_parts` names as keywords:

    loss(log_ratio, lp, advantage, mask, segment, **settings)
        -> (token loss, bool: the lower bound is active, bool: the upper bound is active)

`lp` are the log-probs of the policy that is trained, `log_ratio` their logarithmic ratio to those from before the first
update on this batch (`policy_log_ratio`, at the level of the row); if a batch gets one update only, it is 0 with the
gradient of `lp`, and clipping never acts. `mask` is True at tokens that the model sampled; `segment` numbers the
prompts and completions within a row from 1, 0 is padding. Only `policy_loss` calls a loss: outside the mask it gives 0
for `lp` and `advantage`, and drops what comes back.

The loss of an update is `sum(weight * token_loss)`, weights from `aggregation`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from shoal.algorithm.segments import segment_mean

Metrics: TypeAlias = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
"""Name -> (sum, count): the value is sum / count, after sums and counts of all micro-batches are added."""

Tokens = Float[Array, "R T"]
Mask = Bool[Array, "R T"]
Segments = Int[Array, "R T"]


def policy_log_ratio(level: str, lp: Tokens, old_logprobs: Tokens, mask: Mask, segment: Segments) -> Tokens:
    """The logarithm of the ratio of policy and old policy, 0 outside the mask at the level of tokens.

    `token`: lp - old. `sequence`: its mean over the completion's sampled tokens, GSPO, arXiv 2507.18071, eqs. 5 to 7.
    `sequence-token`: the same in value, with the gradient of the token's own: sg(mean) + lp - sg(lp), GSPO-token, eqs.
    13 and 14.
    """
    # Before the maths, not only after: the derivative of exp at infinity times 0 would be NaN.
    lp, old_logprobs = jnp.where(mask, lp, 0), jnp.where(mask, old_logprobs, 0)
    if level == "token":
        return lp - old_logprobs
    mean = segment_mean(lp - old_logprobs, segment, mask)
    return mean if level == "sequence" else lp - jax.lax.stop_gradient(lp) + jax.lax.stop_gradient(mean)


def policy_loss(loss: Callable[..., Any], log_ratio: Tokens, lp: Tokens, advantage: Tokens, mask: Mask,
                segment: Segments, **settings: Any) -> tuple[Tokens, Metrics]:
    """The token losses of one of the functions below, and its metrics.

    Where `mask` is False, loss and gradient are exactly 0 whatever the inputs hold. Where it is True nothing is
    guarded: a log-prob that is not finite shows in the loss.
    """
    lp, advantage = jnp.where(mask, lp, 0), jnp.where(mask, advantage, 0)
    token_loss, low, high = loss(log_ratio, lp, advantage, mask, segment, **settings)
    low, high, ratio = mask & low, mask & high, jnp.exp(jax.lax.stop_gradient(log_ratio))
    count = mask.sum(dtype=ratio.dtype)
    metrics = {"clip/fraction": low | high, "clip/low": low, "clip/high": high, "ratio/mean": jnp.where(mask, ratio, 0)}
    return jnp.where(mask, token_loss, 0), {
        name: (value.sum(dtype=ratio.dtype), count) for name, value in metrics.items()}


def clipped(log_ratio: Tokens, lp: Tokens, advantage: Tokens, mask: Mask, segment: Segments, *, clip_low: float,
            clip_high: float, clip_dual: float) -> tuple[Tokens, Mask, Mask]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A): the loss of GRPO with the token's ratio, of GSPO with the
    completion's.

    PPO, arXiv 1707.06347, eq. 7, as in GRPO: DeepSeekMath, arXiv 2402.03300, eq. 3 (without its KL term, which is
    `kl`). With high > low it is the clip-higher of DAPO, arXiv 2503.14476, eq. 10. GSPO's paper clips at 3e-4 below
    and 4e-4 above: a completion's ratio moves far less than a token's does. With `clip_dual` c, where A < 0 the loss is
    at most -c A: arXiv 1912.09729, eq. 5; 0 turns it off.

    Where the clipped loss is strictly above the unclipped one its gradient is 0; at a tie the gradient is whole.
    """
    # Not jnp.minimum and jnp.clip: at a tie, the common case of ratio 1, both would halve the gradient.
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    constant, unclipped = -jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage, -ratio * advantage
    active = constant > unclipped
    high, low = active & (ratio > 1), active & (ratio < 1)
    if clip_dual:
        capped = (advantage < 0) & (jnp.where(active, constant, unclipped) > -clip_dual * advantage)
        constant, active = jnp.where(capped, -clip_dual * advantage, constant), active | capped
        high = high | capped
    # Where a bound is active the exponent is 0, so that a ratio of inf leaves no NaN in the gradient.
    live = -jnp.exp(jnp.where(active, 0, log_ratio)) * advantage
    return jnp.where(active, constant, live), low, high


def cispo(log_ratio: Tokens, lp: Tokens, advantage: Tokens, mask: Mask, segment: Segments, *, clip_low: float,
          clip_high: float, cispo_bound: str) -> tuple[Tokens, Mask, Mask]:
    """-sg(bounded ratio) A lp: the weight is bounded, and no token loses its gradient. MiniMax-M1, arXiv 2506.13585,
    eqs. 4 and 5.

    `cispo_bound`: `paper`, at most 1 + high; `absolute`, at most high (TRL); `both`, also at least 1 - low (verl). A
    bound is active where it changed the weight.
    """
    # Without the stop-gradient the bounded tokens would have none at all: the fault of a port that clips the ratio
    # and forgets the log-prob.
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    top = clip_high if cispo_bound == "absolute" else 1 + clip_high
    weight = jnp.clip(ratio, 1 - clip_low if cispo_bound == "both" else None, top)
    return -weight * advantage * lp, weight > ratio, weight < ratio


def gmpo(log_ratio: Tokens, lp: Tokens, advantage: Tokens, mask: Mask, segment: Segments, *, clip_low: float,
         clip_high: float) -> tuple[Tokens, Mask, Mask]:
    """-A times the geometric mean over a completion of its tokens' clipped ratios, gradient through those not clipped.

    Ratios are clipped in logarithms, from above at `clip_high` where A > 0, from below at -`clip_low` where A < 0; the
    paper has 0.4 for both. Every token has its completion's loss. GMPO, arXiv 2507.20673.
    """
    # The bounds are decided by the value: a comparison has no gradient, but a clipped term must not carry one either.
    value = jax.lax.stop_gradient(log_ratio)
    above, below = (advantage > 0) & (value > clip_high), (advantage < 0) & (value < -clip_low)
    clipped = jnp.where(above, clip_high, jnp.where(below, -clip_low, log_ratio))
    return -advantage * jnp.exp(segment_mean(clipped, segment, mask)), below, above


def sapo(log_ratio: Tokens, lp: Tokens, advantage: Tokens, mask: Mask, segment: Segments, *, sapo_positive: float,
         sapo_negative: float) -> tuple[Tokens, Mask, Mask]:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A, tau by the sign of the advantage: in place of a clip, a gate that closes
    smoothly on both sides. SAPO, arXiv 2511.20347."""
    # Above exp(88) the ratio is inf in float32, and its slope times that of the closed gate, 0, would be NaN.
    ratio = jnp.exp(jnp.minimum(log_ratio, 80.0))
    tau = jnp.where(advantage > 0, sapo_positive, sapo_negative)
    never = jnp.zeros_like(mask)
    return -4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantage, never, never
