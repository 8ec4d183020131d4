"""Attention of sampling over caches: of a token a slot in decoding, and of a piece of a long prompt
in prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.model.attention.caches import PAGE, LayerCache, keys_at_once, on_parts
from shoal.model.attention.selector import by_pages, decodes_by_kernel
from shoal.model.attention.softmax import Keys, online_softmax
from shoal.model.block import AttentionFn
from shoal.model.transformer import Model


@dataclass(frozen=True)
class KernelAttention:
    """The `AttentionFn` of `decode_attention` by a kernel. That for GPUs also rotates and writes
    the new keys."""

    model: Model
    prefix_len: jax.Array
    position: jax.Array
    live: jax.Array
    pages: jax.Array | None

    @property
    def rotates(self) -> bool:
        return not by_pages(self.model)

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, rope: Any = None
    ) -> tuple[jax.Array, LayerCache]:
        attend, slots = _attend_pages, (self.live, self.prefix_len, self.position, self.pages)
        if self.rotates:
            attend, slots = (
                _attend_slots,
                (*(x[:, :, 0] for x in rope), self.prefix_len, self.position),
            )
        if self.model.role.mesh.size == 1:
            return attend(q, k, v, cache, slots)
        return _by_heads(self.model, attend, q, k, v, cache, slots)


def _attend_slots(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, slots: tuple
) -> tuple:
    from shoal.model.attention.decode_gpu import attend_slots  # Pallas takes a second to import

    keys = cache.prefix_k, cache.prefix_v, cache.own_k, cache.own_v
    cos, sin, prefix_len, position = slots
    # Of one product, these are slices that XLA sees are beside each other.
    out, own_k, own_v = attend_slots(
        jnp.concatenate([q, k, v], -2), cos, sin, keys, prefix_len, position
    )
    return out, replace(cache, own_k=own_k, own_v=own_v)


def _attend_pages(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, slots: tuple
) -> tuple:
    from shoal.model.attention.decode_tpu import attend_pages  # Pallas takes a second to import

    live, prefix_len, position, pages = slots
    # Slots that sample nothing write past the end, each elsewhere: a scatter whose places might
    # coincide is a loop.
    nowhere = len(cache.own_k) + jnp.arange(live.size, dtype=jnp.int32).reshape(live.shape)
    page = jnp.take_along_axis(pages, position[..., None] // PAGE, 2)
    page = jnp.where(live[..., None], page, nowhere[..., None])
    own = cache.own_k.at[page, jnp.arange(k.shape[2]), position[..., None] % PAGE].set(
        jnp.concatenate([k, v], -1), unique_indices=True, mode="drop"
    )
    out = attend_pages(
        q,
        cache.prefix_k,
        own,
        jnp.where(live.any(1), prefix_len, 0),
        jnp.where(live, position + 1, 0),
        pages,
    )
    return out, replace(cache, own_k=own)


def _by_heads(model: Model, function: Callable, *args: Any) -> Any:
    """An attention of q, k, v [N, W, heads, A], a layer's cache and arrays by slot, on each device
    of its own heads."""
    heads, cache = (
        PartitionSpec(None, None, "tensor"),
        jax.tree.map(lambda keys: PartitionSpec(*(None,) * (keys.ndim - 3), "tensor"), args[3]),
    )
    return on_parts(
        model, function, (heads, heads, heads, cache, PartitionSpec()), (heads, cache), *args
    )


def decode_attention(
    model: Model,
    prefix_len: jax.Array,
    position: jax.Array,
    num_prefix: jax.Array,
    num_own: jax.Array,
    live: jax.Array,
    pages: jax.Array | None = None,
) -> AttentionFn:
    """The `AttentionFn` of decoding: one token for each of [N, W] slots.

    The token's key and value are written at position[N, W] of its slot; it then attends to its
    row's prompt and to its slot. `num_prefix` and `num_own` are upper bounds of the keys that any
    slot has. Of slots that are not live[N, W] the results mean nothing, and the kernel for TPUs
    reads and writes no keys. `pages`: its table of them.
    """
    if decodes_by_kernel(model):
        return KernelAttention(model, prefix_len, position, live, pages)
    parts, platform, slots = (
        model.key_parts,
        model.role.platform,
        (prefix_len, position, num_prefix, num_own),
    )

    def read(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerCache,
        slots: tuple[jax.Array, ...],
        part: Any = 0,
        merge: Callable[[tuple], tuple] = lambda parts: parts,
    ) -> tuple[jax.Array, LayerCache]:
        prefix_len, position, num_prefix, num_own = slots
        row, slot, head = jnp.indices(k.shape[:3], sparse=True)
        index = position[..., None]
        if parts > 1:  # the other parts write past the end
            index = jnp.where(index % parts == part, index // parts, cache.own_k.shape[3])

        def write(keys: jax.Array, new: jax.Array) -> jax.Array:
            # XLA for TPU compiles a scatter to a loop over slots where two of them might coincide.
            # Written with all heads at once, it transposes the whole cache at both ends of every
            # dispatch.
            return keys.at[row, slot, head, index].set(
                new,
                unique_indices=True,
                indices_are_sorted=True,
                mode="drop" if parts > 1 else "promise_in_bounds",
            )

        def positions(keys: jax.Array) -> jax.Array:
            return parts * jnp.arange(keys.shape[-2]) + part

        cache = LayerCache(
            cache.prefix_k, cache.prefix_v, write(cache.own_k, k), write(cache.own_v, v)
        )
        prefix_mask = positions(cache.prefix_k) < prefix_len[:, None]
        blocks = (
            keys_at_once(platform, cache.prefix_k.shape[2]),
            keys_at_once(platform, cache.own_k.shape[3]),
        )
        # Up to and with the token itself; what an earlier completion left behind lies beyond and
        # stays masked.
        own_mask = positions(cache.own_k) <= position[..., None]
        out = online_softmax(
            q[:, :, None],
            Keys(cache.prefix_k, cache.prefix_v, prefix_mask),
            Keys(cache.own_k, cache.own_v, own_mask),
            num_prefix,
            num_own,
            blocks,
            merge,
        )
        return out[:, :, 0], cache

    if model.role.tensor == 1:
        return partial(read, slots=slots)
    groups = [list(range(first, first + parts)) for first in range(0, model.key_heads, parts)]

    def of_part(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerCache,
        slots: tuple[jax.Array, ...],
        part: Any = 0,
    ) -> tuple[jax.Array, LayerCache]:
        """Each device computes all queries of its key head against its part, and merges those of
        its own."""
        if (
            parts == 1
        ):  # here too: else the partitioner gathers for each what all devices of a replica write
            return read(q, k, v, cache, slots)
        q = jax.lax.all_gather(q, "tensor", axis=2, axis_index_groups=groups, tiled=True)
        prefix_len, position, num_prefix, num_own = slots
        slots = prefix_len, position, -(-num_prefix // parts), -(-num_own // parts)
        return read(q, k, v, cache, slots, part, partial(_merge_parts, parts, groups))

    return lambda *args: _by_heads(model, of_part, *args, slots)


def _merge_parts(parts: int, groups: list[list[int]], found: tuple) -> tuple:
    """The maxima, sums and outputs of a device's own queries, from those that each part of their
    keys gave."""
    top, total, out = found
    packed = jnp.concatenate([top[..., None], total[..., None], out], -1)[
        :, :, 0
    ]  # [N, W, g, 2 + A]
    packed = jax.lax.all_to_all(packed, "tensor", 2, 2, axis_index_groups=groups, tiled=True)
    packed = packed.reshape(*packed.shape[:2], 1, parts, -1, packed.shape[-1])
    top = packed[..., 0]
    most = top.max(3, keepdims=True)
    share = jnp.exp(top - most)  # 0 of a part that holds no key: its maximum is LOWEST
    total, out = ((x * share[..., None]).sum(3) for x in (packed[..., 1:2], packed[..., 2:]))
    return most, total[..., 0], out


def piece_attention(start: jax.Array, longest: jax.Array, block: int) -> AttentionFn:
    """The `AttentionFn` of a piece of R prompts: C tokens of each, from `start` on, of at most
    `longest`.

    The cache holds the keys of the pieces before, [R, K, T, A], and then the piece's own too. A
    token reads its prompt's up to its own, as a slot does in decoding.
    """

    def attention(
        q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        prefix_k, prefix_v = (
            jax.lax.dynamic_update_slice_in_dim(before, new.swapaxes(1, 2), start, 2)
            for before, new in ((cache.prefix_k, k), (cache.prefix_v, v))
        )
        keys = replace(cache, prefix_k=prefix_k, prefix_v=prefix_v)

        def read(queries: tuple[jax.Array, jax.Array]) -> jax.Array:
            q, first = queries  # [R, b, H, A], and the place of the first
            own_k, own_v = (
                jax.lax.dynamic_slice_in_dim(x, first, block, 2)[:, None]
                for x in (keys.prefix_k, keys.prefix_v)
            )
            before = Keys(
                keys.prefix_k, keys.prefix_v, jnp.ones((len(q), keys.prefix_k.shape[2]), bool)
            )
            among = jnp.broadcast_to(jnp.tri(block, dtype=bool), (len(q), block, block))
            num_before = jnp.where(first < longest, first, 0)  # padding reads its own block alone
            return online_softmax(
                q[:, :, None],
                before,
                Keys(own_k, own_v, among),
                num_before,
                jnp.int32(block),
                (block, block),
            )[:, :, 0]

        # By blocks of queries, none of which reads keys beyond its own: half of all pairs, and few
        # scores at once.
        queries = jnp.moveaxis(q.reshape(len(q), -1, block, *q.shape[2:]), 1, 0)
        out = jax.lax.map(read, (queries, start + block * jnp.arange(len(queries))))
        return jnp.moveaxis(out, 0, 1).reshape(q.shape), keys

    return attention


def context_attention(platform: str, prefix_len: jax.Array, start: jax.Array) -> AttentionFn:
    """The `AttentionFn` of C tokens of context of each of M completions, after start[M] tokens of
    their own.

    The cache holds their rows' prompts, [M, K, Tp, A], of prefix_len[M] tokens, and their own keys,
    [M, K, T, A]. A token reads its prompt, and its completion up to itself. Returned are the own
    keys and values, with the new ones.
    """

    def attention(
        q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache
    ) -> tuple[jax.Array, tuple]:
        append = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=1))
        own_k, own_v = (
            append(before, new.swapaxes(1, 2), start)
            for before, new in ((cache.own_k, k), (cache.own_v, v))
        )
        place = start[:, None] + jnp.arange(q.shape[1])
        prompt = Keys(
            cache.prefix_k,
            cache.prefix_v,
            jnp.arange(cache.prefix_k.shape[2]) < prefix_len[:, None],
        )
        own = Keys(own_k[:, None], own_v[:, None], jnp.arange(own_k.shape[2]) <= place[..., None])
        blocks = keys_at_once(platform, prompt.k.shape[2]), keys_at_once(platform, own_k.shape[2])
        out = online_softmax(q[:, :, None], prompt, own, prefix_len.max(), place.max() + 1, blocks)
        return out[:, :, 0], (own_k, own_v)

    return attention
