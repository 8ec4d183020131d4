"""Estimators of KL(policy || reference) from tokens that the policy sampled, in nats.

Each is a pure function of log_ratio = ref - lp, with a row in `shoal.config.algorithm_parts`:
J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def k1(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """lp - ref: unbiased, of either sign. Subtracted from the reward it regularises; as a term of the loss its
    on-policy gradient is zero in expectation."""
    return -log_ratio


def k2(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """(lp - ref)^2 / 2: biased, but as a term of the loss its on-policy gradient is that of the true KL."""
    # The score function's part of KL's gradient is E[(lp - ref) grad lp]: exactly this value's own derivative.
    return log_ratio**2 / 2


def k3(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """exp(ref - lp) - (ref - lp) - 1: unbiased, never negative, 0 with gradient 0 where both agree.

    DeepSeekMath, arXiv 2402.03300, eq. 4.
    """
    # Near 0, where policy and reference are for most of a run, exp(x) - 1 in float32 would be rounding only.
    return jnp.expm1(log_ratio) - log_ratio


def token_kl(
    estimator: Callable[[Array], Array], lp: Float[Array, "*tokens"], ref_logprobs: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"], clamp_input: float = 0.0, clamp_value: float = 0.0,
) -> Float[Array, "*tokens"]:
    """The estimate where `mask` is True; elsewhere value and gradient are exactly 0, whatever the inputs hold.

    `clamp_input` limits |ref - lp| and `clamp_value` the size of the estimate (verl: 20 and 10); 0 sets no limit.
    Beyond a limit the gradient is 0.
    """
    # Each side is masked before the difference: -inf minus -inf at padding would be NaN, and 0 * NaN stays NaN.
    log_ratio = jnp.where(mask, ref_logprobs, 0) - jnp.where(mask, lp, 0)
    if clamp_input:
        log_ratio = jnp.clip(log_ratio, -clamp_input, clamp_input)
    value = estimator(log_ratio)
    if clamp_value:
        value = jnp.clip(value, -clamp_value, clamp_value)
    return jnp.where(mask, value, 0)
