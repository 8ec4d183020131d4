"""Attention over a shared prompt and a completion's own tokens, by blocks of queries and keys.

Scores exist for one pair of blocks at a time, so memory grows with tokens, not with their square. Both sets of keys go
into one online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867); the backward pass computes the scores again
from the log-sum-exp over both (FlashAttention-2, Dao 2023, arXiv 2307.08691, algorithm 2). `attend` is its reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shoal.model.attention import LOWEST, by_key_head, einsum32, largest_block

BLOCK = 512
"""Queries, and keys, of a block on accelerators."""

CACHED_BYTES = 2**20
"""Scores of a pair of blocks on CPU: beyond, each pass over them leaves the cache."""

def block_size(platform: str, slots: int, heads: int) -> int:
    """Queries, and keys, of a block for one row.

    >>> block_size("cpu", 8, 8), block_size("cpu", 1, 8), block_size("gpu", 1, 8)
    (64, 128, 512)
    """
    if platform != "cpu":
        return BLOCK
    return next(size for size in (BLOCK, 256, 128, 64, 32) if 4 * slots * heads * size**2 <= CACHED_BYTES or size == 32)


class KeyValues(NamedTuple):
    """k, v: [R, T, K, A] where all slots of a row share them, [R, S, T, K, A] where each has its own."""

    k: jax.Array
    v: jax.Array


def attend_by_blocks(q: jax.Array, prefix: tuple[KeyValues, jax.Array] | None, own: KeyValues, segment: jax.Array,
                     block: int = BLOCK) -> jax.Array:
    """Softmax attention of q[R, S, C, H, A] -> [R, S, C, H, A].

    `prefix` is a prompt's keys and values with `prefix_len[R]`, the number of keys that each query of a row reads. Of
    its own keys a query reads those of its segment up to itself (`segment[R, S, C]`; a query of segment 0, padding,
    none). Without any key the result is 0, and so is the gradient. Scores and sums are float32.
    """
    grouped, rows = by_key_head(q, own.k.shape[-2]), len(q)
    shared, prefix_len = prefix or (KeyValues(own.k[:, 0, :0], own.v[:, 0, :0]), jnp.zeros(rows, jnp.int32))
    out: Any = _attend(block, grouped, shared, own, prefix_len, segment)  # of a custom_vjp the type is not known
    return out.reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(block: int, q: jax.Array, prefix: KeyValues, own: KeyValues, prefix_len: jax.Array,
            segment: jax.Array) -> jax.Array:
    return _forward(block, q, prefix, own, prefix_len, segment)[0]


def _forward(block: int, q: jax.Array, prefix: KeyValues, own: KeyValues, prefix_len: jax.Array,
             segment: jax.Array) -> tuple[jax.Array, Any]:
    def add(carry: tuple, one: _Pair) -> tuple:
        top, total, out = (one.of_queries(x, 4) for x in carry)
        scores = jnp.where(one.mask, einsum32(f"rsckga,{one.form}->rskgct", one.of_queries(q, 2), one.keys.k), LOWEST)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp(top - new_top)
        p = jnp.where(one.mask, jnp.exp(scores - new_top[..., None]), 0.0)
        part = einsum32(f"rskgct,{one.form}->rskgca", p.astype(one.keys.v.dtype), one.keys.v)
        out = out * shrink[..., None] + part
        new = new_top, total * shrink + p.sum(-1), out
        return tuple(one.put_queries(x, part, 4) for x, part in zip(carry, new, strict=True))

    shape = q.shape[:2] + q.shape[3:5] + q.shape[2:3]  # [R, S, K, g, C]
    start = (jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32),
             jnp.zeros((*shape, q.shape[-1]), jnp.float32))
    top, total, out = _over_pairs(add, start, block, q, prefix, own, prefix_len, segment)
    # Divided once, after both sets are summed. A query without keys: 0, and a log-sum-exp that makes no NaN.
    known = jnp.where(total == 0.0, 1.0, total)
    out, lse = jnp.moveaxis(out / known[..., None], 4, 2).astype(q.dtype), top + jnp.log(known)
    out, lse = (checkpoint_name(x, "kernel") for x in (out, lse))
    return out, (q, prefix, own, prefix_len, segment, out, lse)


def _backward(block: int, residuals: Any, d_out: jax.Array) -> tuple:
    q, prefix, own, prefix_len, segment, out, lse = residuals
    # Softmax's gradient: p * (dp - delta), with delta the sum of out * d_out over a head's dimensions.
    delta = jnp.moveaxis(einsum32("rsckga,rsckga->rsckg", out, d_out), 2, 4)

    def add(carry: tuple, one: _Pair) -> tuple:
        d_q, *d_keys = carry
        queries, d_queries = one.of_queries(q, 2), one.of_queries(d_out, 2)
        known, subtracted = (one.of_queries(x, 4)[..., None] for x in (lse, delta))
        scores = einsum32(f"rsckga,{one.form}->rskgct", queries, one.keys.k)
        p = jnp.where(one.mask, jnp.exp(scores - known), 0.0)
        d_p = einsum32(f"rsckga,{one.form}->rskgct", d_queries, one.keys.v)
        d_scores = (p * (d_p - subtracted)).astype(q.dtype)
        part = einsum32(f"rskgct,{one.form}->rsckga", d_scores, one.keys.k)
        d_q = one.put_queries(d_q, one.of_queries(d_q, 2) + part, 2)
        new = KeyValues(einsum32(f"rskgct,rsckga->{one.form}", d_scores, queries),
                        einsum32(f"rskgct,rsckga->{one.form}", p.astype(q.dtype), d_queries))
        d_keys[one.set] = KeyValues(*(one.add_keys(x, x_new) for x, x_new in zip(d_keys[one.set], new, strict=True)))
        return d_q, *d_keys

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (q, prefix, own))
    sums = _over_pairs(add, start, block, q, prefix, own, prefix_len, segment)
    d_q, d_prefix, d_own = jax.tree.map(lambda total, x: total.astype(x.dtype), sums, (q, prefix, own))
    return d_q, d_prefix, d_own, None, None


_attend.defvjp(_forward, _backward)


class _Pair(NamedTuple):
    """A block of queries, and a block of the prompt's keys (set 0) or of their own (set 1)."""

    set: int
    keys: KeyValues
    mask: jax.Array  # bool, ready to meet scores [R, S, K, g, c, t]
    first_query: jax.Array
    num_queries: int
    first_key: jax.Array

    @property
    def form(self) -> str:
        return ("rtka", "rstka")[self.set]

    def of_queries(self, x: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, self.first_query, self.num_queries, axis)

    def put_queries(self, x: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.first_query, axis)

    def add_keys(self, x: jax.Array, part: jax.Array) -> jax.Array:
        axis = self.set + 1
        before = jax.lax.dynamic_slice_in_dim(x, self.first_key, part.shape[axis], axis)
        return jax.lax.dynamic_update_slice_in_dim(x, before + part, self.first_key, axis)


def _over_pairs(add: Callable[[tuple, _Pair], tuple], carry: tuple, block: int, q: jax.Array, prefix: KeyValues,
                own: KeyValues, prefix_len: jax.Array, segment: jax.Array) -> tuple:
    """`add` for each pair of blocks in which any query of any row reads a key: of the prompt, then of their own."""
    size, prefix_size = largest_block(q.shape[2], block), largest_block(prefix.k.shape[1] or 1, block)
    queries, places = range(0, q.shape[2], size), jnp.arange(size)

    def part(keys: KeyValues, start: jax.Array, count: int, axis: int) -> KeyValues:
        return KeyValues(*(jax.lax.dynamic_slice_in_dim(x, start, count, axis) for x in keys))

    def of_prefix(carry: tuple, starts: jax.Array) -> tuple:
        query, key = starts
        mask = (key + jnp.arange(prefix_size) < prefix_len[:, None])[:, None, None, None, None]
        return add(carry, _Pair(0, part(prefix, key, prefix_size, 1), mask, query, size, key))

    def of_own(carry: tuple, starts: jax.Array) -> tuple:
        query, key = starts
        mine, theirs = (jax.lax.dynamic_slice_in_dim(segment, start, size, 2) for start in (query, key))
        mask = (mine[..., None] == theirs[..., None, :]) & (mine > 0)[..., None]
        mask &= key + places <= (query + places)[:, None]
        return add(carry, _Pair(1, part(own, key, size, 2), mask[:, :, None, None], query, size, key))

    if prefix.k.shape[1]:
        pairs = jnp.asarray([(query, key) for query in queries for key in range(0, prefix.k.shape[1], prefix_size)])
        carry = _loop(of_prefix, carry, pairs, pairs[:, 1] < prefix_len.max())
    pairs = jnp.asarray([(query, key) for query in queries for key in queries if key <= query])
    return _loop(of_own, carry, pairs, _shares_segment(segment, size, pairs // size))


def _shares_segment(segment: jax.Array, size: int, pairs: jax.Array) -> jax.Array:
    """True for each pair of blocks [N, 2] if a segment of some slot has tokens in both; a run's numbers grow."""
    blocks = jnp.asarray(segment).reshape(-1, segment.shape[2] // size, size)
    first = jnp.where(blocks > 0, blocks, segment.shape[2] + 1).min(-1)
    return (first[:, pairs[:, 0]] <= blocks.max(-1)[:, pairs[:, 1]]).any(0)


def _loop(body: Callable[[tuple, jax.Array], tuple], carry: tuple, pairs: jax.Array, is_needed: jax.Array) -> tuple:
    def step(carry: tuple, one: tuple) -> tuple[tuple, None]:
        pair, needed = one
        return jax.lax.cond(needed, lambda carry: body(carry, pair), lambda carry: carry, carry), None

    # Of known length, and each pair decides whether it computes: with a bound by the segments no compiler, and no plan,
    # would know the cost. XLA copies nothing for the pairs that are skipped (CPU: as fast as a loop over the others).
    return jax.lax.scan(step, carry, (pairs, is_needed))[0]
