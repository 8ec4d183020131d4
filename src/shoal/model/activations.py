"""What a gated feed-forward part computes between its products, (gate[..., F], up[..., F]) ->
[..., F], by the names of `Architecture.activation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array, jax.Array], jax.Array]


def silu_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
    return jax.nn.silu(gate) * up


def gelu_tanh_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes gelu(gate) * up, with gelu approximated by tanh: Gemma's."""
    return jax.nn.gelu(gate, approximate=True) * up


SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


def clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up within -7 and 7:
    gpt-oss's, with the values of every `swiglu_alpha` and `swiglu_limit` that was published."""
    gate = jnp.minimum(gate, SWIGLU_LIMIT)
    up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": silu_gated,
    "gelu_tanh": gelu_tanh_gated,
    "clamped_swiglu": clamped_swiglu,
}
