"""Sums and means over the completions that lie in slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def segment_sum(x: Float[Array, "*rows C"], segment: Int[Array, "*rows C"]) -> Float[Array, "*rows C"]:
    """Each token gets the sum of `x` over its segment of its slot. Segment numbers are at most C; sums in x's type."""

    def in_slot(x: jax.Array, segment: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, segment, num_segments=segment.shape[0] + 1)[segment]

    return jnp.vectorize(in_slot, signature="(c),(c)->(c)")(x, segment)


def segment_mean(
    x: Float[Array, "*rows C"], segment: Int[Array, "*rows C"], mask: Bool[Array, "*rows C"]
) -> Float[Array, "*rows C"]:
    """Each token gets the mean of `x` over the masked-in tokens of its segment; 0 where there are none.

    Tokens of a segment that are themselves masked out get it too.
    """
    total = segment_sum(jnp.where(mask, x, 0), segment)
    return total / jnp.maximum(segment_sum(mask.astype(x.dtype), segment), 1)
