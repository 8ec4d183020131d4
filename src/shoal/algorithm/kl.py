"""Estimators of the divergence KL(policy || reference) from the tokens that the policy drew, in nats.

Each is a pure function of two log-probs and stands in `KL_ESTIMATORS` under the name that a user sets.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def k3(lp: Float[Array, "*tokens"], ref: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """exp(ref - lp) - (ref - lp) - 1: unbiased, never negative, 0 with gradient 0 where both agree.

    J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html; DeepSeekMath,
    arXiv 2402.03300, eq. 4. Written with expm1: near 0, in float32, exp(x) - 1 would leave only rounding.
    """
    return jnp.expm1(ref - lp) - (ref - lp)


KL_ESTIMATORS: dict[str, Callable[[Array, Array], Array]] = {"k3": k3}
"""By the names of `algorithm.kl`."""


def token_kl(
    name: str, lp: Float[Array, "*tokens"], ref: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"]
) -> Float[Array, "*tokens"]:
    """The named estimator at masked-in tokens; elsewhere value and gradient are exactly 0, whatever is there."""
    value = KL_ESTIMATORS[name](jnp.where(mask, lp, 0), jnp.where(mask, ref, 0))
    return jnp.where(mask, value, 0)
