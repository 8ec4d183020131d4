"""Importance weights for what sampler and trainer disagree on: w = exp(old - sampler), under stop-gradient.

They multiply the policy term alone. Each kind is a pure function of the weight and stands in `CORRECTIONS` under the
name that a user sets.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from shoal.algorithm.segments import segment_mean, segment_sum


def tis(w: Float[Array, "*tokens"], cap: float, floor: float) -> Float[Array, "*tokens"]:
    """min(w, cap): truncated importance sampling. F. Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (2025)."""
    return jnp.minimum(w, cap)


def mis(w: Float[Array, "*tokens"], cap: float, floor: float) -> Float[Array, "*tokens"]:
    """w where it is at most cap, else 0: masked importance sampling. J. Liu et al., "When Speed Kills Stability"
    (2025)."""
    return jnp.where(w <= cap, w, 0)


def icepop(w: Float[Array, "*tokens"], cap: float, floor: float) -> Float[Array, "*tokens"]:
    """w where floor <= w <= cap, else 0. IcePop, in "Every Step Evolves", arXiv 2510.18855."""
    return jnp.where((w >= floor) & (w <= cap), w, 0)


CORRECTIONS: dict[str, Callable[[Array, float, float], Array]] = {"tis": tis, "mis": mis, "icepop": icepop}
"""By the names of `algorithm.correction`; `none` is no weight at all."""


def correction_weights(
    kind: str, level: str, old_logprobs: Float[Array, "R S C"], sampler_logprobs: Float[Array, "R S C"], mask: Bool[Array, "R S C"],
    segment: Int[Array, "R S C"], cap: float, floor: float,
) -> Float[Array, "R S C"]:
    """The weight of each masked-in token, 0 elsewhere.

    `level`: `token`, each its own; `sequence`, the product over the drawn tokens of its completion; `geometric`, their
    geometric mean (GSPO's ratio: it does not grow with length).
    """
    log_ratio = jax.lax.stop_gradient(jnp.where(mask, old_logprobs, 0) - jnp.where(mask, sampler_logprobs, 0))
    if level == "sequence":
        log_ratio = segment_sum(log_ratio, segment)
    elif level == "geometric":
        log_ratio = segment_mean(log_ratio, segment, mask)
    return jnp.where(mask, CORRECTIONS[kind](jnp.exp(log_ratio), cap, floor), 0)
