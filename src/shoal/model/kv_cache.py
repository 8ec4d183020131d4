"""Keys and values that sampling keeps: the prompt's once a group, each completion's its own; one pair a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shoal.model.attention import Keys, attend_blocks
from shoal.model.transformer import Architecture, AttentionFn

KEY_BLOCK = 64
"""Keys that one step of decoding's online softmax takes; caches are multiples of it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values for N groups of G: of prompts [N, Tp, K, A], of completions [N, G, C, K, A]."""

    prefix_k: Any
    prefix_v: Any
    own_k: Any
    own_v: Any


def empty(a: Architecture, groups: int, siblings: int, prefix: int, own: int, dtype: Any) -> tuple[LayerCache, ...]:
    """A cache a layer, all zeros."""
    heads = (a.num_kv_heads, a.head_dim)

    def layer() -> LayerCache:
        shared, single = (groups, prefix, *heads), (groups, siblings, own, *heads)
        return LayerCache(*(jnp.zeros(shape, dtype) for shape in (shared, shared, single, single)))

    return tuple(layer() for _ in range(a.num_layers))


def write_prefixes(caches: tuple[LayerCache, ...], keys: Any, groups: jax.Array) -> tuple[LayerCache, ...]:
    """Puts prompts' keys and values (k, v), each [L, R, T, K, A], at groups[R]; a group past the end is dropped.

    Where T is padded beyond the caches, that padding is left out."""
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


def decode_attention(prefix_len: jax.Array, position: jax.Array, num_prefix: jax.Array, num_own: jax.Array) -> AttentionFn:
    """The `Mix` of decoding: one token for each of [N, G] slots, written at place[N, G] of its own keys, which then
    attends to its group's prompt and to its own tokens. `num_*` bound the keys that anybody has."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        put = jax.vmap(jax.vmap(lambda keys, new, at: jax.lax.dynamic_update_slice(keys, new[None], (at, 0, 0))))
        cache = LayerCache(cache.prefix_k, cache.prefix_v, put(cache.own_k, k, position), put(cache.own_v, v, position))
        prefix_mask = jnp.arange(cache.prefix_k.shape[1]) < prefix_len[:, None]
        own_mask = (jnp.arange(cache.own_k.shape[2]) <= position[..., None])[:, :, None]
        prefix = Keys(cache.prefix_k, cache.prefix_v, prefix_mask)
        own = Keys(cache.own_k, cache.own_v, own_mask)
        out = attend_blocks(q[:, :, None], prefix, own, num_prefix, num_own, KEY_BLOCK)
        return out[:, :, 0], cache

    return attention
