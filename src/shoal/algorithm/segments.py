"""Sums and means over the completions that share a slot; `segment` numbers them from 1, 0 is padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def segment_sum(x: Float[Array, "*rows C"], segment: Int[Array, "*rows C"]) -> Float[Array, "*rows C"]:
    """The sum of `x` over a token's segment, at each of its tokens, in x's type. Segment numbers are at most C."""

    def in_slot(x: jax.Array, segment: jax.Array) -> jax.Array:
        # Number 0, padding, has a bucket of its own: its sum is computed and read by nobody.
        return jax.ops.segment_sum(x, segment, num_segments=segment.shape[0] + 1)[segment]

    # A matrix of which token belongs to which segment would be C x C a slot: 64 MiB at 4,096 tokens, for each slot.
    return jnp.vectorize(in_slot, signature="(c),(c)->(c)")(x, segment)


def segment_mean(
    x: Float[Array, "*rows C"], segment: Int[Array, "*rows C"], mask: Bool[Array, "*rows C"]
) -> Float[Array, "*rows C"]:
    """The mean of `x` over the tokens of a segment where `mask` is True, at each token of the segment (masked-out ones
    too); 0 where the mask has none."""
    total = segment_sum(jnp.where(mask, x, 0), segment)
    return total / jnp.maximum(segment_sum(mask.astype(x.dtype), segment), 1)
