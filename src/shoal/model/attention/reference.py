"""Attention with all scores of a row at once and ordinary autodiff: what the other forms are tested
against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shoal.model.attention.rule import Tokens, reads
from shoal.model.attention.softmax import (
    LOWEST,
    PLAIN,
    Scoring,
    by_key_head,
    capped,
    einsum32,
    masked,
)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    scoring: Scoring = PLAIN,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax attention of q[R, C, H, A] to those k, v[R, T, K, A] for which mask[R, C, T]
    is True -> [R, C, H, A].

    H is a multiple of K; each key/value head serves H // K consecutive query heads. Scores are
    scaled by 1/sqrt(A) and capped as `scoring` says; its window is not read, since the mask has it.
    Scores and all sums are float32. sinks[H] enter the sum of weights as a key's score does,
    unscaled and uncapped, and have no value. A query without any key gives 0, and no gradient.
    """
    # Letters: r rows, c queries, t keys, k key heads, g query heads of each, a dimensions.
    q = by_key_head(q, k.shape[-2])  # [R, C, K, g, A]
    scores = capped(einsum32("rckga,rtka->rkgct", q, k), scoring.cap)
    scores = masked(scores, mask[:, None, None])
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(*q.shape[2:4], 1, 1)  # [K, g, 1, 1]
        top = jnp.maximum(top, sinks)
    # The maximum cancels in the quotient, so it needs no gradient.
    top = jax.lax.stop_gradient(top)
    # exp alone is not enough: in a row without keys all scores equal the maximum, and exp(0) would
    # give padding the weight 1.
    p = jnp.where(scores > LOWEST, jnp.exp(scores - top), 0.0)
    total = p.sum(-1)
    if sinks is not None:
        total += jnp.exp(sinks - top)[..., 0]
    total = jnp.where(total == 0.0, 1.0, total)
    # Divided after the product, in float32: normalised weights would be rounded in bfloat16.
    out = einsum32("rkgct,rtka->rckga", p.astype(v.dtype), v) / jnp.moveaxis(total, 3, 1)[..., None]
    rows, queries, _, _, head_dim = out.shape
    return out.reshape(rows, queries, -1, head_dim).astype(q.dtype)


def attend_at_once(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query: Tokens,
    key: Tokens,
    scoring: Scoring = PLAIN,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes `attend` for rows of several sequences, or for queries that are a part of each row,
    with the mask of `reads`: q[R, C, H, A] of the tokens `query`, k and v[R, T, K, A] of the tokens
    `key` -> [R, C, H, A]. It is the reference of blocks and kernels."""
    mask = reads(query.to_meet(2), key.to_meet(1), scoring.window)
    return attend(q, k, v, mask, scoring, sinks)
