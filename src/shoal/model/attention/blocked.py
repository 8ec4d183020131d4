"""Attention of rows of several sequences, by blocks of queries and the blocks of keys that they
read.

A block of queries goes through the list of its blocks of keys; what lies between, other groups and
other completions, is never computed. Memory grows with tokens, not with their square: one softmax
gathered over blocks (Milakov and Gimelshein 2018, arXiv 1805.02867), whose scores the backward pass
computes again from the log-sum-exp (FlashAttention-2, Dao 2023, arXiv 2307.08691, algorithm 2).
`attend` is its reference.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shoal.model.attention.rule import Blocks, BlockTokens, reads
from shoal.model.attention.softmax import LOWEST, by_key_head, einsum32, largest_block

BLOCK = {"cpu": 64, "gpu": 256, "tpu": 512}
"""Queries, and keys, of a block. On CPU 32 and 128 take longer (docs/LOG.md)."""


SCORES_AT_ONCE = 2**18
"""Scores of a pass over blocks on CPU: 1 MiB, beyond which each operation on them would leave the
cache."""


def block_size(size: int, platform: str) -> int:
    """Tokens of a block of rows of `size` tokens."""
    return largest_block(size, BLOCK[platform])


def attend_by_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, blocks: Blocks, at_once: int = 0
) -> jax.Array:
    """Softmax attention of q[R, T, H, A] to k, v[R, S, K, A] -> [R, T, H, A]; in whole rows S is T.

    A query reads the keys at or before it of its own segment and of its prompt's; a query of
    segment 0, padding, none: its result is 0, and so is its gradient. Scores and sums are float32.
    `at_once` blocks of queries are computed together (0: all).
    """
    heads, (count, block) = k.shape[-2], blocks.own.segment.shape
    grouped = by_key_head(q, heads).reshape(count, block, heads, -1, q.shape[-1])
    keys, values = (x.reshape(-1, block, heads, q.shape[-1]) for x in (k, v))
    out: Any = _attend(largest_block(count, at_once or count), grouped, keys, values, blocks)
    return out.reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(at_once: int, q: jax.Array, k: jax.Array, v: jax.Array, blocks: Blocks) -> jax.Array:
    return _forward(at_once, q, k, v, blocks)[0]


def _forward(
    at_once: int, q: jax.Array, k: jax.Array, v: jax.Array, blocks: Blocks
) -> tuple[jax.Array, Any]:
    """Output, and what the backward pass reads: output and log-sum-exp of each query beside the
    inputs."""

    def some(inputs: tuple[jax.Array, tuple]) -> tuple[jax.Array, jax.Array]:
        q, mine = inputs

        def add(turn: jax.Array, carry: tuple) -> tuple:
            top, total, out = carry
            number, mask = _turn(blocks.other, mine, turn)
            scores = jnp.where(mask, einsum32("nckga,ntka->nkgct", q, k[number]), LOWEST)
            new_top = jnp.maximum(top, scores.max(-1))
            shrink = jnp.exp(top - new_top)
            p = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
            part = einsum32("nkgct,ntka->nkgca", p.astype(v.dtype), v[number])
            return new_top, total * shrink + p.sum(-1), out * shrink[..., None] + part

        zeros = jnp.zeros((*q.shape[:1], *q.shape[2:4], q.shape[1]), jnp.float32)  # [n, K, g, c]
        start = zeros + LOWEST, zeros, jnp.zeros((*zeros.shape, q.shape[-1]), jnp.float32)
        top, total, out = jax.lax.fori_loop(0, mine[-1].max(), add, start)
        # A query without keys: 0, and a log-sum-exp that makes no NaN.
        known = jnp.where(total == 0.0, 1.0, total)
        return jnp.moveaxis(out / known[..., None], 3, 1).astype(q.dtype), top + jnp.log(known)

    out, lse = _joined(jax.lax.map(some, _parts((q, _own(blocks)), at_once)))
    out, lse = (checkpoint_name(x, "kernel") for x in (out, lse))  # see REMAT
    return out, (q, k, v, blocks, out, lse)


def _backward(at_once: int, residuals: Any, d_out: jax.Array) -> tuple:
    """Gradients of q, k and v; scores are computed again, a pair of blocks at a time."""
    q, k, v, blocks, out, lse = residuals
    # Softmax's gradient: p * (dp - delta), with delta the sum of out * d_out over a head's
    # dimensions.
    delta = jnp.moveaxis(einsum32("nckga,nckga->nckg", out, d_out), 1, 3)

    def some(d_keys: tuple, inputs: tuple) -> tuple[tuple, jax.Array]:
        q, d_out, lse, delta, mine = inputs

        def add(turn: jax.Array, carry: tuple) -> tuple:
            d_q, d_k, d_v = carry
            number, mask = _turn(blocks.other, mine, turn)
            keys, values = k[number], v[number]
            p = jnp.where(
                mask, jnp.exp(einsum32("nckga,ntka->nkgct", q, keys) - lse[..., None]), 0.0
            )
            d_p = einsum32("nckga,ntka->nkgct", d_out, values)
            d_scores = (p * (d_p - delta[..., None])).astype(q.dtype)
            d_q += einsum32("nkgct,ntka->nckga", d_scores, keys)
            # Several blocks of queries read one block of keys.
            d_k = d_k.at[number].add(einsum32("nkgct,nckga->ntka", d_scores, q))
            return (
                d_q,
                d_k,
                d_v.at[number].add(einsum32("nkgct,nckga->ntka", p.astype(q.dtype), d_out)),
            )

        start = jnp.zeros(q.shape, jnp.float32), *d_keys
        d_q, d_k, d_v = jax.lax.fori_loop(0, mine[-1].max(), add, start)
        return (d_k, d_v), d_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    (d_k, d_v), d_q = jax.lax.scan(
        some, (zeros, zeros), _parts((q, d_out, lse, delta, _own(blocks)), at_once)
    )
    return _joined(d_q), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _own(blocks: Blocks) -> tuple[BlockTokens, jax.Array, jax.Array]:
    return blocks.own, blocks.lists, blocks.counts


def _turn(keys: BlockTokens, mine: tuple, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks of keys that some blocks of queries read in this turn [n], and which of their keys
    [n, 1, 1, c, t]."""
    own, lists, counts = mine
    number = lists[:, turn]
    mask = reads(own.tokens.to_meet(2), BlockTokens(*(x[number] for x in keys)).tokens.to_meet(1))
    return number, (mask & (turn < counts)[:, None, None])[:, None, None]


def _parts(tree: Any, at_once: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), tree)


def _joined(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
