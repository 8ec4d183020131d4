"""Policy losses: log-probs, advantages and masks in, one loss a token out. Pure, fixed shapes, differentiable in `lp`.

Each function has the signature of `PolicyLoss` and stands in `POLICY_LOSSES` under the name that a user sets. The
loss of an update is `sum(weight * token_loss)`, weights from `aggregation`. `lp` are the log-probs of the policy that
is trained, `old` those from before the first update on this batch; where only one update is made `old` is
`stop_gradient(lp)`, and value and gradient are then exactly -A.

What stands where `mask` is False is never read: there loss and gradient are exactly 0, whatever `lp` and `old` hold.
At masked-in tokens nothing is guarded: a log-prob that is not finite shows in the loss.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Metrics: TypeAlias = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
"""Name -> (sum, count): the value is sum / count, after sums and counts of all micro-batches are added."""


class PolicyLoss(Protocol):
    """Arrays of [R, S, C] in nats -> (token loss of the same shape, metrics).

    `mask` is True at tokens that the model drew; `segment` numbers the completions within a slot from 1, 0 is padding.
    """

    def __call__(
        self,
        lp: Float[Array, "R S C"],
        old: Float[Array, "R S C"],
        advantage: Float[Array, "R S C"],
        mask: Bool[Array, "R S C"],
        segment: Int[Array, "R S C"],
        *,
        clip_low: float,
        clip_high: float,
    ) -> tuple[Float[Array, "R S C"], Metrics]: ...


def grpo(
    lp: Float[Array, "R S C"],
    old: Float[Array, "R S C"],
    advantage: Float[Array, "R S C"],
    mask: Bool[Array, "R S C"],
    segment: Int[Array, "R S C"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "R S C"], Metrics]:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(lp - old) of each token.

    PPO, arXiv 1707.06347, eq. 7, as in GRPO: DeepSeekMath, arXiv 2402.03300, eq. 3 (without its KL term, which is
    `kl`). With clip_high > clip_low it is the clip-higher of DAPO, arXiv 2503.14476, eq. 10.
    """
    lp, old, advantage = _zero_outside(mask, lp, old, advantage)
    return _clipped(lp - old, advantage, mask, clip_low, clip_high)


def gspo_token(
    lp: Float[Array, "R S C"],
    old: Float[Array, "R S C"],
    advantage: Float[Array, "R S C"],
    mask: Bool[Array, "R S C"],
    segment: Int[Array, "R S C"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "R S C"], Metrics]:
    """As `grpo`, with ratio = s of the completion in value, and a gradient at each token: sg(s) exp(lp - sg(lp)).

    s = exp(mean of lp - old over the completion's drawn tokens). The paper clips at 3e-4 below and 4e-4 above: s moves
    far less than a token's ratio does.

    GSPO, arXiv 2507.18071: s is eq. 7, GSPO-token eqs. 13 and 14.
    """
    lp, old, advantage = _zero_outside(mask, lp, old, advantage)
    log_s = jax.lax.stop_gradient(segment_mean(lp - old, segment, mask))
    return _clipped(lp - jax.lax.stop_gradient(lp) + log_s, advantage, mask, clip_low, clip_high)


POLICY_LOSSES: dict[str, PolicyLoss] = {"grpo": grpo, "gspo-token": gspo_token}
"""By the names of `algorithm.loss`."""


def segment_mean(
    x: Float[Array, "*rows C"], segment: Int[Array, "*rows C"], mask: Bool[Array, "*rows C"]
) -> Float[Array, "*rows C"]:
    """Each token gets the mean of `x` over the masked-in tokens of its segment of its slot; 0 where there are none.

    Segment numbers are at most C. Sums are in x's type. Tokens of a segment that are themselves masked out get it too.
    """
    total = _segment_sum(jnp.where(mask, x, 0), segment)
    return total / jnp.maximum(_segment_sum(mask.astype(x.dtype), segment), 1)


def _segment_sum(x: jax.Array, segment: jax.Array) -> jax.Array:
    def in_slot(x: jax.Array, segment: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, segment, num_segments=segment.shape[0] + 1)[segment]

    return jnp.vectorize(in_slot, signature="(c),(c)->(c)")(x, segment)


def _zero_outside(mask: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    # Before the maths, not only after: the derivative of exp at infinity times 0 would be NaN.
    return tuple(jnp.where(mask, array, 0) for array in arrays)


def _clipped(
    log_ratio: jax.Array, advantage: jax.Array, mask: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, Metrics]:
    """The clipped surrogate of PPO. Only a clipped loss strictly above the free one is `active`, and has gradient 0;
    at a tie the gradient is whole, where that of `jnp.minimum` and `jnp.clip` would be halved."""
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    clipped = -jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage
    active = mask & (clipped > -ratio * advantage)
    free = -jnp.exp(jnp.where(active, 0, log_ratio)) * advantage
    token_loss = jnp.where(mask, jnp.where(active, clipped, free), 0)
    return token_loss, _metrics(ratio, active, mask)


def _metrics(ratio: jax.Array, active: jax.Array, mask: jax.Array) -> Metrics:
    count = mask.sum(dtype=ratio.dtype)
    values = {
        "clip_fraction": active,
        "clip_low_fraction": active & (ratio < 1),
        "clip_high_fraction": active & (ratio > 1),
        "ratio": jnp.where(mask, ratio, 0),
    }
    return {name: (value.sum(dtype=ratio.dtype), count) for name, value in values.items()}
