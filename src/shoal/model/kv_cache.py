"""The keys and values of sampling: a prompt's once a group, a completion's in its own slot; one cache a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shoal.model.attention import Keys, online_softmax
from shoal.model.transformer import AttentionFn, Model

KEY_BLOCK = 64
"""Keys in one block of decoding's online softmax; the sizes of caches are multiples of it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values for N groups of G: of prompts [N, Tp, K, A], of completions [N, G, C, K, A]."""

    prefix_k: Any
    prefix_v: Any
    own_k: Any
    own_v: Any


def empty(model: Model, groups: int, siblings: int, prefix: int, own: int) -> tuple[LayerCache, ...]:
    """One cache of zeros for each layer, in the type of the computation."""
    a, dtype = model.architecture, model.dtype
    heads = (model.key_heads, a.head_dim)

    def layer() -> LayerCache:
        of_group, of_slot = (groups, prefix, *heads), (groups, siblings, own, *heads)
        return LayerCache(*(jnp.zeros(shape, dtype) for shape in (of_group, of_group, of_slot, of_slot)))

    return tuple(layer() for _ in range(a.num_layers))


def write_prefixes(caches: tuple[LayerCache, ...], keys: Any, groups: jax.Array) -> tuple[LayerCache, ...]:
    """Writes prompts' keys and values (k, v), each [L, R, T, K, A], to groups[R]; a group past the end is dropped.

    T may be padded beyond the size of the caches; what is beyond is padding and not written.
    """
    # The buckets of prompts are 64 x 2^n and may exceed the caches, which are sized by max_prompt_tokens.
    k, v = (x[:, :, : caches[0].prefix_k.shape[1]] for x in keys)
    size = k.shape[2]
    return tuple(
        LayerCache(
            cache.prefix_k.at[groups, :size].set(k[layer], mode="drop"),
            cache.prefix_v.at[groups, :size].set(v[layer], mode="drop"),
            cache.own_k,
            cache.own_v,
        )
        for layer, cache in enumerate(caches)
    )


def decode_attention(prefix_len: jax.Array, position: jax.Array, num_prefix: jax.Array,
                     num_own: jax.Array) -> AttentionFn:
    """The `AttentionFn` of decoding: one token for each of [N, G] slots.

    The token's key and value are written at position[N, G] of its slot; it then attends to its group's prompt and to
    its slot. `num_prefix` and `num_own` are upper bounds of the keys that any slot has.
    """

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        # A slice for each slot, since each is at its own position. XLA for TPU compiles this to a loop over slots.
        write = jax.vmap(jax.vmap(lambda keys, new, at: jax.lax.dynamic_update_slice(keys, new[None], (at, 0, 0))))
        cache = LayerCache(cache.prefix_k, cache.prefix_v, write(cache.own_k, k, position),
                           write(cache.own_v, v, position))
        prefix_mask = jnp.arange(cache.prefix_k.shape[1]) < prefix_len[:, None]
        # Up to and with the token itself; what an earlier completion left behind lies beyond and stays masked.
        own_mask = (jnp.arange(cache.own_k.shape[2]) <= position[..., None])[:, :, None]
        prefix = Keys(cache.prefix_k, cache.prefix_v, prefix_mask)
        own = Keys(cache.own_k, cache.own_v, own_mask)
        out = online_softmax(q[:, :, None], prefix, own, num_prefix, num_own, KEY_BLOCK)
        return out[:, :, 0], cache

    return attention
