"""Attention of rows of several sequences without a kernel: each block of queries with the blocks of
keys that it reads.

A block of queries goes through the list of its blocks of keys; what lies between, other groups and
other completions, is never computed. Memory grows with the number of tokens, not with its square:
one softmax is gathered over blocks (Milakov and Gimelshein 2018, arXiv 1805.02867), and the
backward pass computes the scores again from the log-sum-exp (FlashAttention-2, Dao 2023, arXiv
2307.08691, algorithm 2). `reference.attend` is what it is tested against.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shoal.model.attention import softmax
from shoal.model.attention.rule import Blocks, BlockTokens, reads
from shoal.model.attention.softmax import (
    NO_KEY,
    PLAIN,
    RunningSoftmax,
    Scoring,
    before_cap,
    by_key_head,
    capped,
    einsum32,
    largest_block,
    masked,
)

BLOCK = {"cpu": 64, "gpu": 256, "tpu": 512}
"""Most tokens of a block, of queries and of keys, by platform. On CPU 32 and 128 take longer
(docs/LOG.md)."""


SCORES_AT_ONCE = 2**18
"""Scores that one pass over blocks computes at once on CPU: 1 MiB, beyond which each operation on
them would leave the cache."""


def block_size(size: int, platform: str) -> int:
    """Returns the tokens of a block for rows of `size` tokens."""
    return largest_block(size, BLOCK[platform])


def attend_by_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: Blocks,
    at_once: int = 0,
    scoring: Scoring = PLAIN,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax attention of q[R, T, H, A] to k, v[R, S, K, A] -> [R, T, H, A]; for whole
    rows S is T. `blocks` are the lists of `blocks_of`, by blocks of queries; made with the window
    of `scoring` they leave out what is before it.

    A query reads the keys at or before it in its own segment and in its prompt's, and within the
    window of `scoring`. A query of segment 0, padding, reads none: its result and its gradient are
    0. Scores are scaled by 1/sqrt(A) and capped as `scoring` says; they and all sums are float32.
    sinks[H] are those of `reference.attend`. Up to `at_once` blocks of queries are computed
    together, the largest divisor of their number (0: all).
    """
    key_heads, head_dim = k.shape[-2:]
    count, block = blocks.own.segment.shape
    queries = by_key_head(q, key_heads)
    queries = queries.reshape(count, block, key_heads, -1, head_dim)
    keys = k.reshape(-1, block, key_heads, head_dim)
    values = v.reshape(-1, block, key_heads, head_dim)
    blocks_at_once = largest_block(count, at_once or count)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(queries.shape[2:4])  # [K, g]
    out: Any = _attend(blocks_at_once, scoring, queries, keys, values, blocks, sinks)
    return out.reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    at_once: int,
    scoring: Scoring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: Blocks,
    sinks: jax.Array | None,
) -> jax.Array:
    return _forward(at_once, scoring, q, k, v, blocks, sinks)[0]


def _forward(
    at_once: int,
    scoring: Scoring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: Blocks,
    sinks: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Returns the output, and what the backward pass reads: the inputs, the output, and the
    log-sum-exp of each query. `at_once` divides the number of blocks of queries: so many are
    computed together."""

    # Letters: n blocks, c queries and t keys of a block, k key heads, g query heads of each, a
    # dimensions.
    def attend_some(inputs: tuple[jax.Array, KeyLists]) -> tuple[jax.Array, jax.Array]:
        """Returns output and log-sum-exp of some blocks of queries, computed together."""
        q, key_lists = inputs  # n blocks of queries: [n, c, K, g, A]

        def add(turn: jax.Array, running: RunningSoftmax) -> RunningSoftmax:
            """Adds the block of keys with index `turn` in each list. A list that has ended adds
            nothing."""
            number, mask = _keys_of_turn(blocks.other, key_lists, turn, scoring.window)
            scores = capped(einsum32("nckga,ntka->nkgct", q, k[number]), scoring.cap)
            scores = masked(scores, mask)
            values = v[number]

            def weigh_values(weights: jax.Array) -> jax.Array:
                return einsum32("nkgct,ntka->nkgca", weights.astype(v.dtype), values)

            return softmax.add_block(running, scores, weigh_values, jnp.exp)

        count, block, key_heads, share, head_dim = q.shape  # `share` query heads to a key head
        by_query = count, key_heads, share, block
        start = softmax.start(by_query, (count, key_heads, share, block, head_dim), NO_KEY)
        # As many turns as the longest list has; shorter lists are masked in those after their end.
        running = jax.lax.fori_loop(0, key_lists.counts.max(), add, start)
        if sinks is not None:
            running = softmax.add_sinks(running, sinks[..., None], jnp.exp)
        out, lse = softmax.finish(running, jnp.log)
        return jnp.moveaxis(out, 3, 1).astype(q.dtype), lse

    # `at_once` blocks of queries a part; part after part, for little memory.
    parts = _split_blocks((q, _key_lists(blocks)), at_once)
    out, lse = _join_blocks(jax.lax.map(attend_some, parts))
    out = checkpoint_name(out, "kernel")  # see REMAT
    lse = checkpoint_name(lse, "kernel")
    return out, (q, k, v, blocks, sinks, out, lse)


def _backward(at_once: int, scoring: Scoring, residuals: Any, d_out: jax.Array) -> tuple:
    """Returns the gradients of q, k, v and sinks; scores are computed again, for one pair of blocks
    at a time. `residuals` is what `_forward` returned for it. `blocks` has no gradient."""
    q, k, v, blocks, sinks, out, lse = residuals
    # Softmax's gradient: p * (dp - delta), with delta the sum of out * d_out over a head's
    # dimensions.
    delta = jnp.moveaxis(einsum32("nckga,nckga->nckg", out, d_out), 1, 3)

    def add_some(d_keys: tuple, inputs: tuple) -> tuple[tuple, jax.Array]:
        """Adds the gradients of keys and values from some blocks of queries, and returns the
        gradient of these queries."""
        q, d_out, lse, delta, key_lists = inputs
        d_k, d_v = d_keys

        def add(turn: jax.Array, carry: tuple) -> tuple:
            """Adds the gradients from the block of keys with index `turn` in each list."""
            d_q, d_k, d_v = carry
            number, mask = _keys_of_turn(blocks.other, key_lists, turn, scoring.window)
            keys = k[number]
            values = v[number]
            scores = capped(einsum32("nckga,ntka->nkgct", q, keys), scoring.cap)
            p = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0.0)
            d_p = einsum32("nckga,ntka->nkgct", d_out, values)
            d_scores = before_cap(p * (d_p - delta[..., None]), scores, scoring.cap)
            d_scores = d_scores.astype(q.dtype)
            d_q += einsum32("nkgct,ntka->nckga", d_scores, keys)
            # Several blocks of queries read one block of keys.
            d_k = d_k.at[number].add(einsum32("nkgct,nckga->ntka", d_scores, q))
            d_v = d_v.at[number].add(einsum32("nkgct,nckga->ntka", p.astype(q.dtype), d_out))
            return d_q, d_k, d_v

        start = jnp.zeros(q.shape, jnp.float32), d_k, d_v
        d_q, d_k, d_v = jax.lax.fori_loop(0, key_lists.counts.max(), add, start)
        return (d_k, d_v), d_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    parts = _split_blocks((q, d_out, lse, delta, _key_lists(blocks)), at_once)
    (d_k, d_v), d_q = jax.lax.scan(add_some, (zeros, zeros), parts)
    d_sinks = None
    if sinks is not None:
        # As of a key whose value is 0, and so its dp. A query without any key has delta 0.
        p = jnp.exp(sinks[..., None] - lse)
        d_sinks = -(p * delta).sum((0, 3))
    return _join_blocks(d_q), d_k.astype(k.dtype), d_v.astype(v.dtype), None, d_sinks


_attend.defvjp(_forward, _backward)


class KeyLists(NamedTuple):
    """Blocks of queries with the lists of the blocks of keys that each reads: `Blocks` without the
    keys themselves."""

    own: BlockTokens
    lists: jax.Array
    counts: jax.Array


def _key_lists(blocks: Blocks) -> KeyLists:
    return KeyLists(blocks.own, blocks.lists, blocks.counts)


def _keys_of_turn(
    keys: BlockTokens, key_lists: KeyLists, turn: jax.Array, window: int
) -> tuple[jax.Array, jax.Array]:
    """Returns, for the lists of n blocks of c queries, (the numbers [n] of the blocks of keys with
    index `turn`, a mask [n, 1, 1, c, t] which queries read which of these blocks' t keys). The mask
    is False for a list that has ended, and for keys before the `window`. Its two dimensions of size
    1 are those of heads."""
    number = key_lists.lists[:, turn]
    read = jax.vmap(keys.at)(number)
    mask = reads(key_lists.own.tokens.to_meet(2), read.to_meet(1), window)
    has_turn = turn < key_lists.counts  # False for a block of queries whose list has ended
    return number, (mask & has_turn[:, None, None])[:, None, None]


def _split_blocks(tree: Any, at_once: int) -> Any:
    """Puts the N blocks of each array in a tree into groups of `at_once`, a divisor of N: [N, ...]
    -> [N / at_once, at_once, ...]."""

    def split(x: jax.Array) -> jax.Array:
        return x.reshape((-1, at_once, *x.shape[1:]))

    return jax.tree.map(split, tree)


def _join_blocks(tree: Any) -> Any:
    """Joins the first two dimensions of each array in a tree: the inverse of `_split_blocks`."""

    def join(x: jax.Array) -> jax.Array:
        return jax.lax.collapse(x, 0, 2)

    return jax.tree.map(join, tree)
