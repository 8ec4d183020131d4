"""The keys and values of sampling: a prompt's once a row, a completion's in its own slot; one cache a layer.

Attention over them: of a token a slot in decoding, and of a piece of a long prompt in prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shoal.model.attention import Keys, online_softmax
from shoal.model.transformer import AttentionFn, Model

KEY_BLOCK = 64
"""The sizes of caches are multiples of it."""


def keys_at_once(platform: str, keys: int) -> int:
    """Keys in one block of decoding's online softmax over a cache of so many. One block is read without a loop.

    By the TPU compiler's cycles a token of 70B (8 v5p chips, 512 keys) takes 14.9 ms without a loop and 16.5 with two
    blocks of 256. On CPU a loop copies each block, but reads no keys that nobody has: there blocks are short.
    """
    if platform == "cpu":
        return KEY_BLOCK if keys <= 4 * KEY_BLOCK else 2 * KEY_BLOCK
    return 8 * KEY_BLOCK


def cache_size(tokens: int, platform: str) -> int:
    """Keys of a cache for so many tokens: few blocks of equal size, each at most `keys_at_once`.

    >>> cache_size(200, "cpu"), cache_size(200, "tpu"), cache_size(320, "tpu"), cache_size(1600, "tpu")
    (256, 256, 320, 1792)
    """
    blocks = -(-tokens // keys_at_once(platform, tokens))
    return blocks * KEY_BLOCK * -(-tokens // (blocks * KEY_BLOCK))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values for N rows of W siblings: of prompts [N, K, Tp, A], of completions [N, W, K, C, A].

    Heads before positions, as attention reads them: else all keys would be transposed before each product.
    """

    prefix_k: Any
    prefix_v: Any
    own_k: Any
    own_v: Any


def empty(model: Model, rows: int, siblings: int, prefix: int, own: int) -> tuple[LayerCache, ...]:
    """One cache of zeros for each layer, in the type of the computation."""
    a, dtype = model.architecture, model.dtype
    heads = model.key_heads

    def layer() -> LayerCache:
        of_row, of_slot = (rows, heads, prefix, a.head_dim), (rows, siblings, heads, own, a.head_dim)
        return LayerCache(*(jnp.zeros(shape, dtype) for shape in (of_row, of_row, of_slot, of_slot)))

    return tuple(layer() for _ in range(a.num_layers))


def write_prefixes(caches: tuple[LayerCache, ...], keys: Sequence[tuple[jax.Array, jax.Array]],
                   rows: jax.Array) -> tuple[LayerCache, ...]:
    """Writes prompts' keys and values, (k, v) a layer [R, T, K, A], to rows[R]; a row past the end is dropped.

    T may be padded beyond the size of the caches; what is beyond is padding and not written.
    """
    # The buckets of prompts are 64 x 2^n and may exceed the caches, which are sized by max_prompt_tokens.
    size = min(keys[0][0].shape[1], caches[0].prefix_k.shape[2])

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[rows, :, :size].set(new[:, :size].swapaxes(1, 2), mode="drop")

    return tuple(LayerCache(write(cache.prefix_k, k), write(cache.prefix_v, v), cache.own_k, cache.own_v)
                 for cache, (k, v) in zip(caches, keys, strict=True))


def copy_prefixes(caches: tuple[LayerCache, ...], sources: jax.Array, rows: jax.Array) -> tuple[LayerCache, ...]:
    """Copies prompts' keys and values from sources[M] to rows[M]; a row past the end is dropped."""

    def copy(cache: jax.Array) -> jax.Array:
        return cache.at[rows].set(cache[sources], mode="drop")

    return tuple(replace(cache, prefix_k=copy(cache.prefix_k), prefix_v=copy(cache.prefix_v)) for cache in caches)


def decode_attention(prefix_len: jax.Array, position: jax.Array, num_prefix: jax.Array, num_own: jax.Array,
                     platform: str) -> AttentionFn:
    """The `AttentionFn` of decoding: one token for each of [N, W] slots.

    The token's key and value are written at position[N, W] of its slot; it then attends to its row's prompt and to
    its slot. `num_prefix` and `num_own` are upper bounds of the keys that any slot has.
    """

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        row, slot, head = jnp.indices(k.shape[:3], sparse=True)

        def write(keys: jax.Array, new: jax.Array) -> jax.Array:
            # XLA for TPU compiles a scatter to a loop over slots where two of them might coincide. Written with all
            # heads at once, it transposes the whole cache at both ends of every dispatch.
            return keys.at[row, slot, head, position[..., None]].set(
                new, unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds")

        cache = LayerCache(cache.prefix_k, cache.prefix_v, write(cache.own_k, k), write(cache.own_v, v))
        prefix_mask = jnp.arange(cache.prefix_k.shape[2]) < prefix_len[:, None]
        blocks = keys_at_once(platform, cache.prefix_k.shape[2]), keys_at_once(platform, cache.own_k.shape[3])
        # Up to and with the token itself; what an earlier completion left behind lies beyond and stays masked.
        own_mask = jnp.arange(cache.own_k.shape[3]) <= position[..., None]
        out = online_softmax(q[:, :, None], Keys(cache.prefix_k, cache.prefix_v, prefix_mask),
                             Keys(cache.own_k, cache.own_v, own_mask), num_prefix, num_own, blocks)
        return out[:, :, 0], cache

    return attention


def piece_attention(start: jax.Array, longest: jax.Array, block: int) -> AttentionFn:
    """The `AttentionFn` of a piece of R prompts: C tokens of each, from `start` on, of at most `longest`.

    The cache holds the keys of the pieces before, [R, K, T, A]. A token reads its prompt's up to its own, as a slot
    does in decoding. Returned are the piece's own, [R, K, C, A].
    """

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        new = LayerCache(k.swapaxes(1, 2), v.swapaxes(1, 2), None, None)
        keys = add_piece(cache, new, start)

        def read(queries: tuple[jax.Array, jax.Array]) -> jax.Array:
            q, first = queries  # [R, b, H, A], and the place of the first
            own_k, own_v = (jax.lax.dynamic_slice_in_dim(x, first, block, 2)[:, None]
                            for x in (keys.prefix_k, keys.prefix_v))
            before = Keys(keys.prefix_k, keys.prefix_v, jnp.ones((len(q), keys.prefix_k.shape[2]), bool))
            among = jnp.broadcast_to(jnp.tri(block, dtype=bool), (len(q), block, block))
            num_before = jnp.where(first < longest, first, 0)  # padding reads its own block alone
            return online_softmax(q[:, :, None], before, Keys(own_k, own_v, among), num_before, jnp.int32(block),
                                  (block, block))[:, :, 0]

        # By blocks of queries, none of which reads keys beyond its own: half of all pairs, and few scores at once.
        queries = jnp.moveaxis(q.reshape(len(q), -1, block, *q.shape[2:]), 1, 0)
        out = jax.lax.map(read, (queries, start + block * jnp.arange(len(queries))))
        return jnp.moveaxis(out, 0, 1).reshape(q.shape), new

    return attention


def add_piece(keys: Any, new: Any, start: jax.Array) -> Any:
    """Keys and values [..., T, A] with those of a piece from `start` on."""
    return jax.tree.map(lambda old, own: jax.lax.dynamic_update_slice_in_dim(old, own, start, old.ndim - 2), keys, new)
