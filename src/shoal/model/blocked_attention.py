"""Attention over a shared prompt and a completion's own tokens, by blocks of queries and keys.

Scores exist for one pair of blocks at a time, so memory grows with tokens, not with their square. Both sets of keys go
into one online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867); the backward pass computes the scores again
from the log-sum-exp over both (FlashAttention-2, Dao 2023, arXiv 2307.08691, algorithm 2). `attend` is its reference.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.model.attention import LOWEST, by_key_head

BLOCK = 512
"""Queries, and keys, of a block."""


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
    out: jax.Array = _attend(block, grouped, shared, own, prefix_len, segment)  # type: ignore[assignment]
    return out.reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(block: int, q: jax.Array, prefix: KeyValues, own: KeyValues, prefix_len: jax.Array,
            segment: jax.Array) -> jax.Array:
    return _forward(block, q, prefix, own, prefix_len, segment)[0]


def _forward(block: int, q: jax.Array, prefix: KeyValues, own: KeyValues, prefix_len: jax.Array,
             segment: jax.Array) -> tuple[jax.Array, Any]:
    blocks = _Blocks.of(block, q, prefix, prefix_len, segment)

    def of_queries(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries = blocks.queries(q, number)
        shape = queries.shape[:2] + queries.shape[3:5] + queries.shape[2:3]  # [R, S, K, g, B]

        def add(keys: KeyValues, form: str, mask: jax.Array, carry: tuple) -> tuple:
            top, total, out = carry
            scores = jnp.where(mask, _einsum(f"rsckga,{form}->rskgct", queries, keys.k), LOWEST)
            new_top = jnp.maximum(top, scores.max(-1))
            shrink = jnp.exp(top - new_top)
            p = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
            out = out * shrink[..., None] + _einsum(f"rskgct,{form}->rskgca", p.astype(keys.v.dtype), keys.v)
            return new_top, total * shrink + p.sum(-1), out

        start = (jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32),
                 jnp.zeros((*shape, q.shape[-1]), jnp.float32))
        top, total, out = blocks.over_keys(add, prefix, own, number, start)
        # Divided once, after both sets are summed. A query without keys: 0, and a log-sum-exp that makes no NaN.
        known = jnp.where(total == 0.0, 1.0, total)
        return jnp.moveaxis(out / known[..., None], 4, 2).astype(q.dtype), top + jnp.log(known)

    out, lse = jax.lax.map(of_queries, jnp.arange(blocks.num_queries))
    out = _joined(out, 2)
    return out, (q, prefix, own, prefix_len, segment, out, _joined(lse, 4))


def _backward(block: int, residuals: Any, d_out: jax.Array) -> tuple:
    q, prefix, own, prefix_len, segment, out, lse = residuals
    blocks = _Blocks.of(block, q, prefix, prefix_len, segment)
    # Softmax's gradient: p * (dp - delta), with delta the sum of out * d_out over a head's dimensions.
    delta = jnp.moveaxis(_einsum("rsckga,rsckga->rsckg", out, d_out), 2, 4)

    def of_queries(sums: tuple, number: jax.Array) -> tuple[tuple, jax.Array]:
        queries, d_queries = blocks.queries(q, number), blocks.queries(d_out, number)
        known, subtracted = (jax.lax.dynamic_slice_in_dim(x, number * blocks.query, blocks.query, 4)[..., None]
                             for x in (lse, delta))

        def add(keys: KeyValues, form: str, mask: jax.Array, carry: tuple) -> tuple:
            d_q, part = carry
            scores = _einsum(f"rsckga,{form}->rskgct", queries, keys.k)
            p = jnp.where(mask, jnp.exp(scores - known), 0.0)
            d_p = _einsum(f"rsckga,{form}->rskgct", d_queries, keys.v)
            d_scores = (p * (d_p - subtracted)).astype(queries.dtype)
            d_q = d_q + _einsum(f"rskgct,{form}->rsckga", d_scores, keys.k)
            return d_q, KeyValues(part.k + _einsum(f"rskgct,rsckga->{form}", d_scores, queries),
                                  part.v + _einsum(f"rskgct,rsckga->{form}", p.astype(d_queries.dtype), d_queries))

        d_q = jnp.zeros(queries.shape, jnp.float32)
        d_q, sums = blocks.over_keys_with_sums(add, prefix, own, number, d_q, sums)
        return sums, d_q.astype(q.dtype)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (prefix, own))
    sums, d_q = jax.lax.scan(of_queries, zeros, jnp.arange(blocks.num_queries))
    d_prefix, d_own = jax.tree.map(lambda total, x: total.astype(x.dtype), sums, (prefix, own))
    return _joined(d_q, 2), d_prefix, d_own, None, None


_attend.defvjp(_forward, _backward)


class _Blocks(NamedTuple):
    """How queries and keys are cut, and which keys a block of queries reads."""

    query: int  # queries, and own keys, of a block
    key: int  # prompt keys of a block
    num_queries: int
    num_prefix: Any  # int32 scalar: prompt blocks that any row has
    prefix_len: jax.Array
    segment: jax.Array

    @classmethod
    def of(cls, block: int, q: jax.Array, prefix: KeyValues, prefix_len: jax.Array, segment: jax.Array) -> _Blocks:
        query, key = math.gcd(q.shape[2], block), math.gcd(prefix.k.shape[1], block)
        num_prefix = -(-prefix_len.max(initial=0) // key) if prefix.k.shape[1] else 0
        return cls(query, key, q.shape[2] // query, num_prefix, prefix_len, segment)

    def queries(self, x: jax.Array, number: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, number * self.query, self.query, 2)

    def over_keys(self, add: Any, prefix: KeyValues, own: KeyValues, number: jax.Array, carry: Any) -> Any:
        """`add` for each block of keys that queries of this block read: the prompt's first, then their own."""

        def of_prefix(index: jax.Array, carry: Any) -> Any:
            return add(self._prefix(prefix, index), "rtka", self._prefix_mask(index), carry)

        def of_own(index: jax.Array, carry: Any) -> Any:
            return add(self._own(own, index), "rstka", self._own_mask(number, index), carry)

        if prefix.k.shape[1]:
            carry = jax.lax.fori_loop(0, self.num_prefix, of_prefix, carry)
        return jax.lax.fori_loop(0, number + 1, of_own, carry)

    def over_keys_with_sums(self, add: Any, prefix: KeyValues, own: KeyValues, number: jax.Array, carry: Any,
                            sums: tuple) -> tuple:
        """The same where `add` also changes what belongs to the block of keys: its part of `sums`."""

        def of(keys: KeyValues, form: str, mask: jax.Array, start: jax.Array, axis: int, carry: Any,
               total: KeyValues) -> tuple:
            size = keys.k.shape[axis]
            part = KeyValues(*(jax.lax.dynamic_slice_in_dim(x, start, size, axis) for x in total))
            carry, part = add(keys, form, mask, (carry, part))
            return carry, KeyValues(*(jax.lax.dynamic_update_slice_in_dim(x, new, start, axis)
                                      for x, new in zip(total, part, strict=True)))

        def of_prefix(index: jax.Array, state: tuple) -> tuple:
            carry, total = of(self._prefix(prefix, index), "rtka", self._prefix_mask(index), index * self.key, 1,
                              state[0], state[1])
            return carry, total, state[2]

        def of_own(index: jax.Array, state: tuple) -> tuple:
            carry, total = of(self._own(own, index), "rstka", self._own_mask(number, index), index * self.query, 2,
                              state[0], state[2])
            return carry, state[1], total

        state = (carry, *sums)
        if prefix.k.shape[1]:
            state = jax.lax.fori_loop(0, self.num_prefix, of_prefix, state)
        carry, *rest = jax.lax.fori_loop(0, number + 1, of_own, state)
        return carry, tuple(rest)

    def _prefix(self, keys: KeyValues, index: jax.Array) -> KeyValues:
        return KeyValues(*(jax.lax.dynamic_slice_in_dim(x, index * self.key, self.key, 1) for x in keys))

    def _own(self, keys: KeyValues, index: jax.Array) -> KeyValues:
        return KeyValues(*(jax.lax.dynamic_slice_in_dim(x, index * self.query, self.query, 2) for x in keys))

    def _prefix_mask(self, index: jax.Array) -> jax.Array:
        """bool[R, 1, 1, 1, 1, t]"""
        places = index * self.key + jnp.arange(self.key)
        return (places < self.prefix_len[:, None])[:, None, None, None, None]

    def _own_mask(self, number: jax.Array, index: jax.Array) -> jax.Array:
        """bool[R, S, 1, 1, c, t]"""
        of_queries, of_keys = (jax.lax.dynamic_slice_in_dim(self.segment, n * self.query, self.query, 2)
                               for n in (number, index))
        places = jnp.arange(self.query)
        earlier = index * self.query + places <= (number * self.query + places)[:, None]
        same = (of_queries[..., None] == of_keys[..., None, :]) & (of_queries > 0)[..., None]
        return (same & earlier)[:, :, None, None]


def _einsum(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


def _joined(x: jax.Array, axis: int) -> jax.Array:
    """[blocks, ...] -> [...], the blocks one after the other on the axis."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
