"""Root mean square norms (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from shoal.model.linear import broadcast

if TYPE_CHECKING:
    from shoal.model.transformer import Model


def layer_norm(model: Model, x: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Computes a norm of the model's kind (`Architecture.norm`) over the last dimension of x, in
    x's type; without a weight if that is None."""
    a = model.architecture
    if weight is None:
        return _normalised(x, a.norm_eps).astype(x.dtype)
    if a.norm == "weight":
        return rms_norm(x, weight, a.norm_eps)
    offset = 1.0 if a.norm == "one_plus_weight" else 0.0
    # Multiplied in float32, as the RMS norms of transformers' Gemma and Qwen3.5 do.
    wide = _normalised(x, a.norm_eps)
    return (wide * (broadcast(weight.astype(jnp.float32), wide) + offset)).astype(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension; mean and division are in
    float32. The quotient is rounded to x's type, which the result has, before the weight multiplies
    it."""
    # Rounded before the weight, as transformers' LlamaRMSNorm does: parity in bfloat16 needs the
    # same order.
    return broadcast(weight, x) * _normalised(x, eps).astype(x.dtype)


def _normalised(x: jax.Array, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps) over the last dimension, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
