"""One softmax over blocks of keys, gathered in order, and products in float32.

`online_softmax` serves decoding: the same sum over two sets of keys, the prompt's and the
completion's own, gathered over fixed blocks of keys in order, so that a row's result does not
depend, to the bit, on how far the caches are padded or on who else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
"""GPUs compute powers of two: in their kernels scores, and their log-sum-exp, are exponents in base
2."""


LOWEST = -1e30
"""In place of minus infinity for masked scores: in a row without any key, -inf minus -inf would be
NaN."""


class Keys(NamedTuple):
    """A cache's keys and values, and which of them are read.

    `k, v` are [R, K, T, A], shared by all slots of a row, or [R, S, K, T, A]; `mask` is bool, [R,
    T] or [R, S, T].
    """

    k: jax.Array
    v: jax.Array
    mask: jax.Array


def by_key_head(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Scales by 1/sqrt(A) and splits the heads: [..., H, A] -> [..., K, H // K, A]."""
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return q.reshape(*q.shape[:-2], num_kv_heads, -1, q.shape[-1])


def einsum32(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` with a float32 result, whatever the type of the arrays."""
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


def product32(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of two matrices, in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def masked(scores: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, scores, LOWEST)


def online_softmax(
    q: jax.Array,
    prefix: Keys,
    own: Keys,
    num_prefix: jax.Array,
    num_own: jax.Array,
    blocks: tuple[int, int],
    merge: Callable[[tuple], tuple] = lambda parts: parts,
) -> jax.Array:
    """`attend` for one token a slot: q[R, S, 1, H, A], an online softmax over fixed blocks of keys,
    prompt first.

    Keys and values are [R, K, T, A] and [R, S, K, T, A]. Of each set only the first `num_*` keys
    (int32 scalars) are read, rounded up to blocks; the others must be masked. A wholly masked block
    changes no bit of a row that already has a key, so neither the padding of a row nor the other
    rows of the batch show in its result. A block has the most keys, at most the prompt's and the
    own of `blocks`, that divide T. No gradient. `merge` may change the maxima and sums [R, S, K, g]
    and outputs [R, S, K, g, A] before these are divided.
    """
    q = by_key_head(q, own.k.shape[-3])[:, :, 0]  # [R, S, K, g, A]
    # The slots of a row are queries of one product each with its prompt's keys and values.
    shared = jax.lax.collapse(q.swapaxes(1, 2), 2, 4)  # [R, K, S * g, A]
    start = (
        jnp.full(shared.shape[:-1], LOWEST, jnp.float32),
        jnp.zeros(shared.shape[:-1], jnp.float32),
        jnp.zeros(shared.shape, jnp.float32),
    )
    carry = _over_blocks(shared, prefix, num_prefix, blocks[0], start)
    split = (len(q), q.shape[2], q.shape[1], q.shape[3])  # R, K, S, g
    carry = jax.tree.map(lambda x: x.reshape(*split, *x.shape[3:]).swapaxes(1, 2), carry)
    _, total, out = merge(_over_blocks(q, own, num_own, blocks[1], carry))
    out = out / total[..., None]
    return out.reshape(*out.shape[:2], 1, -1, out.shape[-1]).astype(q.dtype)


def _over_blocks(q: jax.Array, keys: Keys, num_keys: jax.Array, block: int, carry: tuple) -> tuple:
    """Adds the first `num_keys` of keys[..., K, T, A] to the maxima, sums and outputs of queries
    [..., K, M, A]."""
    count = keys.k.shape[-2]
    size = largest_block(count, block)

    def add(number: jax.Array | int, carry: tuple) -> tuple:
        def block_of(x: jax.Array, axis: int) -> jax.Array:
            # A slice even of all keys would be copied before its product.
            return (
                x
                if size == count
                else jax.lax.dynamic_slice_in_dim(x, number * size, size, x.ndim + axis)
            )

        top, total, out = carry
        mask = block_of(keys.mask, -1)[..., None, None, :]
        scores = masked(einsum32("...ma,...ta->...mt", q, block_of(keys.k, -2)), mask)
        # Online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867.
        new_top = jnp.maximum(top, scores.max(-1))
        shrink, p = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
        v = block_of(keys.v, -2)
        out = out * shrink[..., None] + einsum32("...mt,...ta->...ma", p.astype(v.dtype), v)
        return new_top, total * shrink + p.sum(-1), out

    return (
        add(0, carry) if size == count else jax.lax.fori_loop(0, -(-num_keys // size), add, carry)
    )


def largest_block(size: int, most: int) -> int:
    """The largest divisor of `size` that is at most `most`.

    >>> largest_block(384, 256), largest_block(1792, 256)
    (192, 256)
    """
    return next(block for block in range(min(size, most), 0, -1) if size % block == 0)
