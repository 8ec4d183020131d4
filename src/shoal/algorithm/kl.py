"""Estimators of the divergence KL(policy || reference) from the tokens that the policy drew, in nats.

Each is a pure function of the difference of two log-probs and stands in `KL_ESTIMATORS` under the name that a user
sets: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def k1(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """lp - ref: unbiased, of either sign. Taken off the reward it regularises; as a term of the loss its on-policy
    gradient is zero in expectation. `apart` is ref - lp, here and below."""
    return -log_ratio


def k2(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """(lp - ref)^2 / 2: biased, but as a term of the loss its on-policy gradient is that of the divergence."""
    return log_ratio**2 / 2


def k3(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """exp(ref - lp) - (ref - lp) - 1: unbiased, never negative, 0 with gradient 0 where both agree.

    DeepSeekMath, arXiv 2402.03300, eq. 4. Written with expm1: near 0, in float32, exp(x) - 1 would leave only
    rounding.
    """
    return jnp.expm1(log_ratio) - log_ratio


KL_ESTIMATORS: dict[str, Callable[[Array], Array]] = {"k1": k1, "k2": k2, "k3": k3}
"""By the names of `algorithm.kl`."""


def token_kl(
    name: str, lp: Float[Array, "*tokens"], ref_logprobs: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"],
    clamp_input: float = 0.0, clamp_value: float = 0.0,
) -> Float[Array, "*tokens"]:
    """The named estimator at masked-in tokens; elsewhere value and gradient are exactly 0, whatever is there.

    Above 0, `clamp_input` limits the size of ref - lp, `clamp_value` that of the estimate; beyond them the gradient
    is 0.
    """
    log_ratio = jnp.where(mask, ref_logprobs, 0) - jnp.where(mask, lp, 0)
    if clamp_input:
        log_ratio = jnp.clip(log_ratio, -clamp_input, clamp_input)
    value = KL_ESTIMATORS[name](log_ratio)
    if clamp_value:
        value = jnp.clip(value, -clamp_value, clamp_value)
    return jnp.where(mask, value, 0)
