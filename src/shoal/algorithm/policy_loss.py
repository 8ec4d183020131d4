"""Policy losses: log-probs, advantages and masks in, one loss a token out. Pure, fixed shapes, differentiable in `lp`.

Each function has the signature of `PolicyLoss` and stands in `POLICY_LOSSES` under the name that a user sets. The
loss of an update is `sum(weight * token_loss)`, weights from `aggregation`. `lp` are the log-probs of the policy that
is trained, `old` those from before the first update on this batch; where only one update is made `old` is
`stop_gradient(lp)`: the ratio is then 1, and clipping never acts.

What stands where `mask` is False is never read: there loss and gradient are exactly 0, whatever `lp` and `old` hold.
At masked-in tokens nothing is guarded: a log-prob that is not finite shows in the loss.
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


@dataclass(frozen=True)
class Bounds:
    """How far the ratio may go: `low` and `high` around 1, `dual` times the advantage's size (0: off), the form of
    CISPO's bound, SAPO's temperatures for advantages above and below 0. A loss reads what it needs."""

    low: float
    high: float
    dual: float = 0.0
    cispo: str = "paper"
    positive: float = 1.0
    negative: float = 1.05


class PolicyLoss(Protocol):
    """Arrays of [R, S, C] in nats -> (token loss of the same shape, metrics).

    `mask` is True at tokens that the model drew; `segment` numbers the completions within a slot from 1, 0 is padding.
    """

    def __call__(
        self, lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Bool[Array, "R S C"], segment: Int[Array, "R S C"],
        bounds: Bounds,
    ) -> tuple[Tokens, Metrics]: ...


def grpo(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Bool[Array, "R S C"], segment: Int[Array, "R S C"],
         bounds: Bounds) -> tuple[Tokens, Metrics]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A), ratio = exp(lp - old) of each token.

    PPO, arXiv 1707.06347, eq. 7, as in GRPO: DeepSeekMath, arXiv 2402.03300, eq. 3 (without its KL term, which is
    `kl`). With high > low it is the clip-higher of DAPO, arXiv 2503.14476, eq. 10. With `dual` c, where A < 0 the loss
    is at most -c A: arXiv 1912.09729, eq. 5.
    """
    return _clipped(policy_log_ratio("grpo", lp, old_logprobs, mask, segment), advantage, mask, bounds)


def gspo(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Bool[Array, "R S C"], segment: Int[Array, "R S C"],
         bounds: Bounds) -> tuple[Tokens, Metrics]:
    """As `grpo`, with one ratio for a completion, s = exp(mean of lp - old over its drawn tokens), gradient through s.

    Each token carries its completion's loss. The paper clips at 3e-4 below and 4e-4 above: s moves far less than a
    token's ratio does. GSPO, arXiv 2507.18071, eqs. 5 to 7.
    """
    return _clipped(policy_log_ratio("gspo", lp, old_logprobs, mask, segment), advantage, mask, bounds)


def gspo_token(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Bool[Array, "R S C"], segment: Int[Array, "R S C"],
               bounds: Bounds) -> tuple[Tokens, Metrics]:
    """As `gspo` in value, with a gradient at each token: sg(s) exp(lp - sg(lp)). GSPO-token, arXiv 2507.18071,
    eqs. 13 and 14."""
    return _clipped(policy_log_ratio("gspo-token", lp, old_logprobs, mask, segment), advantage, mask, bounds)


def cispo(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Bool[Array, "R S C"], segment: Int[Array, "R S C"],
          bounds: Bounds) -> tuple[Tokens, Metrics]:
    """-sg(bounded ratio) A lp: the weight is bounded, no token loses its gradient. MiniMax-M1, arXiv 2506.13585,
    eqs. 4 and 5.

    `bounds.cispo`: `paper`, at most 1 + high; `absolute`, at most high; `both`, also at least 1 - low. The clip metrics
    count the tokens whose weight was bounded.
    """
    lp, old_logprobs, advantage = _zero_outside(mask, lp, old_logprobs, advantage)
    ratio = jax.lax.stop_gradient(jnp.exp(lp - old_logprobs))
    top = bounds.high if bounds.cispo == "absolute" else 1 + bounds.high
    weight = jnp.clip(ratio, 1 - bounds.low if bounds.cispo == "both" else None, top)
    return jnp.where(mask, -weight * advantage * lp, 0), _metrics(ratio, weight < ratio, weight > ratio, mask)


def gmpo(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Bool[Array, "R S C"], segment: Int[Array, "R S C"],
         bounds: Bounds) -> tuple[Tokens, Metrics]:
    """-A times the geometric mean over a completion of its tokens' clipped ratios, gradient through those not clipped.

    Ratios are clipped in logarithms, from above at `high` where A > 0, from below at -`low` where A < 0; the paper has
    0.4 for both. Each token carries its completion's loss. GMPO, arXiv 2507.20673.
    """
    lp, old_logprobs, advantage = _zero_outside(mask, lp, old_logprobs, advantage)
    policy_log_ratio = lp - old_logprobs
    fixed = jax.lax.stop_gradient(policy_log_ratio)
    above, below = mask & (advantage > 0) & (fixed > bounds.high), mask & (advantage < 0) & (fixed < -bounds.low)
    kept = jnp.where(above, bounds.high, jnp.where(below, -bounds.low, policy_log_ratio))
    token_loss = -advantage * jnp.exp(segment_mean(kept, segment, mask))
    return jnp.where(mask, token_loss, 0), _metrics(jnp.exp(fixed), above, below, mask)


def sapo(lp: Tokens, old_logprobs: Tokens, advantage: Tokens, mask: Bool[Array, "R S C"], segment: Int[Array, "R S C"],
         bounds: Bounds) -> tuple[Tokens, Metrics]:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A, tau = `positive` where A > 0, else `negative`: a gate that closes softly
    on both sides. Nothing is clipped; far beyond, the gate is shut. SAPO, arXiv 2511.20347."""
    lp, old_logprobs, advantage = _zero_outside(mask, lp, old_logprobs, advantage)
    ratio = jnp.exp(jnp.minimum(lp - old_logprobs, 80.0))  # the slope of exp at infinity times that of the gate, 0, is NaN
    tau = jnp.where(advantage > 0, bounds.positive, bounds.negative)
    token_loss = -4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantage
    never = jnp.zeros_like(mask)
    return jnp.where(mask, token_loss, 0), _metrics(jax.lax.stop_gradient(ratio), never, never, mask)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": grpo, "gspo": gspo, "gspo-token": gspo_token, "cispo": cispo, "gmpo": gmpo, "sapo": sapo,
}
"""By the names of `algorithm.loss`."""


def policy_log_ratio(name: str, lp: Tokens, old_logprobs: Tokens, mask: Bool[Array, "R S C"],
              segment: Int[Array, "R S C"]) -> Tokens:
    """The logarithm of the ratio that a loss goes by: the token's, or for the two forms of GSPO its completion's."""
    lp, old_logprobs = _zero_outside(mask, lp, old_logprobs)
    if name == "gspo":
        return segment_mean(lp - old_logprobs, segment, mask)
    if name == "gspo-token":
        return lp - jax.lax.stop_gradient(lp) + jax.lax.stop_gradient(segment_mean(lp - old_logprobs, segment, mask))
    return lp - old_logprobs


def _zero_outside(mask: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    # Before the maths, not only after: the derivative of exp at infinity times 0 would be NaN.
    return tuple(jnp.where(mask, array, 0) for array in arrays)


def _clipped(policy_log_ratio: jax.Array, advantage: jax.Array, mask: jax.Array, bounds: Bounds) -> tuple[jax.Array, Metrics]:
    """The clipped surrogate of PPO; log_ratio is finite outside the mask. Only a clipped loss strictly above the free
    one is active, and has gradient 0; at a tie the gradient is whole, where that of `jnp.minimum` and `jnp.clip` would
    be halved."""
    (advantage,) = _zero_outside(mask, advantage)
    ratio = jax.lax.stop_gradient(jnp.exp(policy_log_ratio))
    clipped = -jnp.clip(ratio, 1 - bounds.low, 1 + bounds.high) * advantage
    active = mask & (clipped > -ratio * advantage)
    free = -ratio * advantage
    high, low = active & (ratio > 1), active & (ratio < 1)
    fixed = jnp.where(active, clipped, 0)
    if bounds.dual:
        capped = mask & (advantage < 0) & (jnp.where(active, clipped, free) > -bounds.dual * advantage)
        fixed, active = jnp.where(capped, -bounds.dual * advantage, fixed), active | capped
        high = high | capped
    live = -jnp.exp(jnp.where(active, 0, policy_log_ratio)) * advantage
    token_loss = jnp.where(mask, jnp.where(active, fixed, live), 0)
    return token_loss, _metrics(ratio, high, low, mask)


def _metrics(ratio: jax.Array, high: jax.Array, low: jax.Array, mask: jax.Array) -> Metrics:
    """`high` and `low`: tokens whose clipped term, from above or from below, is the active one."""
    high, low = mask & high, mask & low
    count = mask.sum(dtype=ratio.dtype)
    values = {
        "clip_fraction": high | low,
        "clip_low_fraction": low,
        "clip_high_fraction": high,
        "ratio": jnp.where(mask, ratio, 0),
    }
    return {name: (value.sum(dtype=ratio.dtype), count) for name, value in values.items()}
