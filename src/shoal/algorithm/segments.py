"""Sums and means over the segments of a row (prompts, completions); `segment` numbers them from 1, 0 is padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def segment_sum(x: Float[Array, "*rows T"], segment: Int[Array, "*rows T"]) -> Float[Array, "*rows T"]:
    """The sum of `x` over a token's segment, at each of its tokens, in x's type. Segment numbers are at most T."""

    def in_row(x: jax.Array, segment: jax.Array) -> jax.Array:
        # Number 0, padding, has a bucket of its own: its sum is computed and read by nobody.
        return jax.ops.segment_sum(x, segment, num_segments=segment.shape[0] + 1)[segment]

    # A matrix of which token belongs to which segment would be T x T a row: 64 MiB at 4,096 tokens, for each row.
    return jnp.vectorize(in_row, signature="(t),(t)->(t)")(x, segment)


def segment_mean(
    x: Float[Array, "*rows T"], segment: Int[Array, "*rows T"], mask: Bool[Array, "*rows T"]
) -> Float[Array, "*rows T"]:
    """The mean of `x` over the tokens of a segment where `mask` is True, at each token of the segment (masked-out ones
    too); 0 where the mask has none."""
    total = segment_sum(jnp.where(mask, x, 0), segment)
    return total / jnp.maximum(segment_sum(mask.astype(x.dtype), segment), 1)
