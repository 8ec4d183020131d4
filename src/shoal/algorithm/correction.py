"""Importance weights w = exp(old - sampler) that correct for the difference of sampler and trainer, without gradient.

They multiply the policy term alone. Each kind is a pure function of w, with a row in `shoal.config.algorithm_parts`.
`cap=inf` and `floor=0` are no bounds.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from shoal.algorithm.segments import segment_mean, segment_sum


def tis(w: Float[Array, "*tokens"], cap: float, floor: float) -> Float[Array, "*tokens"]:
    """w clipped to [floor, cap]: truncated importance sampling. F. Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (2025); the lower bound is TRL's."""
    return jnp.clip(w, floor, cap)


def mis(w: Float[Array, "*tokens"], cap: float, floor: float) -> Float[Array, "*tokens"]:
    """w where floor <= w <= cap, else 0: masked importance sampling. J. Liu et al., "When Speed Kills Stability"
    (2025), without a floor; with one it is IcePop, in "Every Step Evolves", arXiv 2510.18855."""
    return jnp.where((w >= floor) & (w <= cap), w, 0)


def correction_weights(
    kind: Callable[[Array, float, float], Array], level: str, old_logprobs: Float[Array, "R T"],
    sampler_logprobs: Float[Array, "R T"], mask: Bool[Array, "R T"], segment: Int[Array, "R T"], cap: float,
    floor: float,
) -> Float[Array, "R T"]:
    """The weight of each token where `mask` is True, 0 elsewhere.

    `level`: `token`, the token's own ratio; `sequence`, the product over the sampled tokens of its completion;
    `geometric`, their geometric mean (GSPO's ratio, which does not grow with length).
    """
    log_ratio = jax.lax.stop_gradient(jnp.where(mask, old_logprobs, 0) - jnp.where(mask, sampler_logprobs, 0))
    # TRL calls its `sequence_*` modes what `sequence` is here, the product; papers on GSPO mean `geometric`.
    if level == "sequence":
        log_ratio = segment_sum(log_ratio, segment)
    elif level == "geometric":
        log_ratio = segment_mean(log_ratio, segment, mask)
    # Completions that a correction drops keep their place in every denominator, as in verl and TRL.
    return jnp.where(mask, kind(jnp.exp(log_ratio), cap, floor), 0)
