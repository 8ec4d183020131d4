"""Attention of rows of several sequences on CPU, by spans: each block of queries with the two spans
of keys that hold what it reads, a tile of keys at a time.

Sequences lie in a row one after the other. What a block of queries reads lies in two spans of that
row, its prompt and its own completion up to the block's end:

    row:     prompt | completion 1 | completion 2    | completion 3 ...
    queries:                              bbbb
    spans:   xxxxxx                  yyyyyyyyy

`rule.spans_of` finds them. Each span is cut into tiles of TILE keys. A tile is a slice of the row,
so keys are not gathered and their gradients are not scattered; and each block takes only as many
tiles as its own spans have, about the causal half of a long completion.

The maths is that of `blocked.attend_by_blocks`, which takes lists of blocks in place of spans: one
softmax over all tiles, and a backward pass that computes the scores again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shoal.model.attention import softmax
from shoal.model.attention.rule import Spans, Tokens, reads
from shoal.model.attention.softmax import (
    NO_KEY,
    PLAIN,
    RunningSoftmax,
    Scoring,
    before_cap,
    by_key_head,
    capped,
    einsum32,
    masked,
)

QUERIES = 64
"""Most tokens of a block of queries. 32 and 128 take longer (docs/LOG.md)."""


TILE = 64
"""Keys of a tile. 128 and more take longer (docs/LOG.md): the scores of a block and a tile should
stay in a core's cache."""


def attend_by_spans(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: Spans,
    tile: int,
    scoring: Scoring = PLAIN,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax attention of q[R, T, H, A] to k, v[R, S, K, A] -> [R, T, H, A]; for whole
    rows S is T. `spans` are those of `spans_of`, made with this `tile`, the keys of a tile, at most
    S, and with the window of `scoring`.

    Which keys a query reads, scores and sinks are as in `blocked.attend_by_blocks`."""
    rows, size, heads, head_dim = q.shape
    key_heads = k.shape[2]
    count = spans.first.shape[1]  # blocks of queries in a row
    block = size // count
    queries = by_key_head(q, key_heads).reshape(rows * count, block, key_heads, -1, head_dim)
    queries = jnp.moveaxis(queries, 1, 3)  # [N, K, g, c, A]
    keys = jnp.moveaxis(k, 2, 1)  # [R, K, S, A]: a head's keys follow each other
    values = jnp.moveaxis(v, 2, 1)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(key_heads, -1)  # [K, g]
    out: Any = _attend(tile, scoring, queries, keys, values, spans, sinks)
    return jnp.moveaxis(out, 3, 1).reshape(rows, size, heads, head_dim)


class _Block(NamedTuple):
    """A block of queries: its row, its tokens, and its spans as in `Spans`."""

    row: jax.Array  # int32[]
    tokens: Tokens  # arrays [c]
    first: jax.Array  # int32[2]
    end: jax.Array  # int32[2]

    def num_tiles(self, size: int) -> tuple[jax.Array, jax.Array]:
        """Returns how many tiles of `size` keys the first and the second span take."""
        lengths = self.end - self.first
        first, second = -(-lengths // size)  # rounded up
        return first, second


def _blocks(spans: Spans) -> _Block:
    """Returns all blocks of queries, as arrays [N, ...]."""
    rows, count, _ = spans.first.shape

    def by_block(x: jax.Array) -> jax.Array:
        return x.reshape(rows * count, -1)

    row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), count)
    tokens = jax.tree.map(by_block, spans.query)
    return _Block(row, tokens, by_block(spans.first), by_block(spans.end))


class _Tile(NamedTuple):
    """A tile of keys that a block of queries reads."""

    row: jax.Array  # int32[]
    start: jax.Array  # int32[]: position in the row of its first key
    mask: jax.Array  # bool[c, t]: which queries of the block read which keys of the tile

    def of(self, keys: jax.Array) -> jax.Array:
        """Returns the part [K, t, A] of keys or values [R, K, S, A] that lies in the tile."""
        _, heads, _, head_dim = keys.shape
        size = self.mask.shape[1]
        tile = jax.lax.dynamic_slice(keys, self._corner, (1, heads, size, head_dim))
        return tile[0]

    def add(self, total: jax.Array, part: jax.Array) -> jax.Array:
        """Adds [K, t, A] to the tile's part of [R, K, S, A]."""
        new = self.of(total) + part
        return jax.lax.dynamic_update_slice(total, new[None], self._corner)

    @property
    def _corner(self) -> tuple[Any, ...]:
        """Where the tile begins in an array [R, K, S, A]."""
        return self.row, 0, self.start, 0


def _tile_of_turn(spans: Spans, block: _Block, turn: jax.Array, size: int, window: int) -> _Tile:
    """Returns the tile of `size` keys with index `turn` among those of a block's two spans, the
    first span's tiles before the second's."""
    num_first, _ = block.num_tiles(size)
    is_second = turn >= num_first
    turn_in_span = jnp.where(is_second, turn - num_first, turn)
    first = jnp.where(is_second, block.first[1], block.first[0]) + size * turn_in_span
    end = jnp.where(is_second, block.end[1], block.end[0])
    # A tile that would reach beyond the row's end is moved back; what it then holds before `first`
    # belonged to the tile before it, and is masked here.
    start = jnp.minimum(first, spans.key.segment.shape[1] - size)

    def of_tile(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(x, (block.row, start), (1, size))[0]

    key = jax.tree.map(of_tile, spans.key)
    is_in_span = (key.position >= first) & (key.position < end)
    is_read = reads(block.tokens.to_meet(1), key.to_meet(0), window)
    return _Tile(block.row, start, is_read & is_in_span)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    size: int,
    scoring: Scoring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: Spans,
    sinks: jax.Array | None,
) -> jax.Array:
    return _forward(size, scoring, q, k, v, spans, sinks)[0]


def _forward(
    size: int,
    scoring: Scoring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: Spans,
    sinks: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Returns the output [N, K, g, c, A], and what the backward pass reads: the inputs, the output,
    and the log-sum-exp of each query."""

    # Letters: k key heads, g query heads of each, c queries of a block, t keys of a tile, a
    # dimensions.
    def attend_one(inputs: tuple[jax.Array, _Block]) -> tuple[jax.Array, jax.Array]:
        """Returns output [K, g, c, A] and log-sum-exp [K, g, c] of a block of queries."""
        q, block = inputs

        def add(turn: jax.Array, running: RunningSoftmax) -> RunningSoftmax:
            """Adds the tile with index `turn`."""
            tile = _tile_of_turn(spans, block, turn, size, scoring.window)
            scores = capped(einsum32("kgca,kta->kgct", q, tile.of(k)), scoring.cap)
            values = tile.of(v)

            def weigh_values(weights: jax.Array) -> jax.Array:
                return einsum32("kgct,kta->kgca", weights.astype(v.dtype), values)

            return softmax.add_block(running, masked(scores, tile.mask), weigh_values, jnp.exp)

        start = softmax.start(q.shape[:-1], q.shape, NO_KEY)
        running = jax.lax.fori_loop(0, sum(block.num_tiles(size)), add, start)
        if sinks is not None:
            running = softmax.add_sinks(running, sinks[..., None], jnp.exp)
        out, lse = softmax.finish(running, jnp.log)
        return out.astype(q.dtype), lse

    out, lse = jax.lax.map(attend_one, (q, _blocks(spans)))
    out = checkpoint_name(out, "kernel")  # see REMAT
    lse = checkpoint_name(lse, "kernel")
    return out, (q, k, v, spans, sinks, out, lse)


def _backward(size: int, scoring: Scoring, residuals: Any, d_out: jax.Array) -> tuple:
    """Returns the gradients of q, k, v and sinks; scores are computed again, a tile at a time.
    `residuals` is what `_forward` returned for it. `spans` has no gradient."""
    q, k, v, spans, sinks, out, lse = residuals
    # Softmax's gradient: p * (dp - delta), with delta the sum of out * d_out over a head's
    # dimensions.
    delta = einsum32("nkgca,nkgca->nkgc", out, d_out)

    def add_one(d_keys: tuple, inputs: tuple) -> tuple[tuple, jax.Array]:
        """Adds the gradients of keys and values from a block of queries, and returns the gradient
        of these queries."""
        q, d_out, lse, delta, block = inputs

        def add(turn: jax.Array, carry: tuple) -> tuple:
            """Adds the gradients from the tile with index `turn`."""
            d_q, d_k, d_v = carry
            tile = _tile_of_turn(spans, block, turn, size, scoring.window)
            keys = tile.of(k)
            scores = capped(einsum32("kgca,kta->kgct", q, keys), scoring.cap)
            p = jnp.where(tile.mask, jnp.exp(scores - lse[..., None]), 0.0)
            d_p = einsum32("kgca,kta->kgct", d_out, tile.of(v))
            d_scores = before_cap(p * (d_p - delta[..., None]), scores, scoring.cap)
            d_scores = d_scores.astype(q.dtype)
            d_q += einsum32("kgct,kta->kgca", d_scores, keys)
            d_k = tile.add(d_k, einsum32("kgct,kgca->kta", d_scores, q))
            d_v = tile.add(d_v, einsum32("kgct,kgca->kta", p.astype(q.dtype), d_out))
            return d_q, d_k, d_v

        d_k, d_v = d_keys
        start = jnp.zeros(q.shape, jnp.float32), d_k, d_v
        d_q, d_k, d_v = jax.lax.fori_loop(0, sum(block.num_tiles(size)), add, start)
        return (d_k, d_v), d_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    inputs = q, d_out, lse, delta, _blocks(spans)
    (d_k, d_v), d_q = jax.lax.scan(add_one, (zeros, zeros), inputs)
    d_sinks = None
    if sinks is not None:
        # As of a key whose value is 0, and so its dp. A query without any key has delta 0.
        p = jnp.exp(sinks[..., None] - lse)
        d_sinks = -(p * delta).sum((0, 3))
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, d_sinks


_attend.defvjp(_forward, _backward)
