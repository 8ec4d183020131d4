"""Attention of sampling over caches.

    SlotAttention           of one token in each slot: decoding
    PrefillChunkAttention   of a chunk of long prompts, after the chunks before it: prefill
    ContextAttention        of tokens of context after completions

`online_softmax` is the form without a kernel: one softmax over the prompt's keys and the
completion's own, gathered over fixed blocks of keys in order. So a row's result does not depend, to
the bit, on how far the caches are padded or on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.model.architecture import Layer
from shoal.model.attention import softmax
from shoal.model.attention.caches import (
    ChunkedCache,
    ExtendedRing,
    KeyCache,
    PagedCache,
    PrefillChunkKeys,
    SlotKeys,
    TokenKeys,
    keys_at_once,
    on_tensor_devices,
)
from shoal.model.attention.rule import cache_masks
from shoal.model.attention.selector import decodes_by_kernel, scoring_of
from shoal.model.attention.softmax import (
    LOWEST,
    PLAIN,
    RunningSoftmax,
    Scoring,
    by_key_head,
    capped,
    einsum32,
    largest_block,
    masked,
)
from shoal.model.transformer import Model


class Keys(NamedTuple):
    """A cache's keys and values, and a mask which of them each slot reads."""

    k: jax.Array  # [R, K, T, A] if all slots of a row share them, else [R, S, K, T, A]
    v: jax.Array  # as k
    mask: jax.Array  # bool[R, S, T], or bool[R, 1, T] if all slots of a row read the same keys
    is_chunk: bool = False  # a chunk of a `ChunkedCache`, read as a whole: k is [.., K, A, T]

    @property
    def size(self) -> int:
        """T, the number of keys."""
        return self.v.shape[-2]


def read_keys(
    cache: TokenKeys | ExtendedRing,
    prefix_len: jax.Array,
    position: jax.Array,
    window: int,
    part: jax.Array | None = None,
) -> tuple[Keys, list[Keys]]:
    """Returns the keys of prompts and those of completions in a cache, the latter chunk by chunk if
    it has chunks, for the tokens at position[R, S] of completions after prompts of prefix_len[R]
    tokens. `window` is that of the layer, `part` as in `SlotKeys.own_index`."""
    prompt_mask, own_mask = cache_masks(
        prefix_len,
        position,
        cache.prefix_places(prefix_len, part),
        cache.own_places(position, part),
        window,
    )
    prompt = Keys(cache.prefix_k, cache.prefix_v, prompt_mask)
    if not isinstance(cache, ChunkedCache):
        return prompt, [Keys(cache.own_k, cache.own_v, own_mask)]
    masks = jnp.split(own_mask, len(cache.own_k), axis=-1)
    chunks = []
    for k, v, mask in zip(cache.own_k, cache.own_v, masks, strict=True):
        chunks.append(Keys(k, v, mask, is_chunk=True))
    return prompt, chunks


Merge = Callable[[RunningSoftmax], RunningSoftmax]
"""Joins the sums [R, S, K, g] of devices that share a key head, before the division."""


def online_softmax(
    q: jax.Array,
    prefix: Keys,
    own: Sequence[Keys],
    num_prefix: jax.Array,
    num_own: jax.Array,
    blocks: tuple[int, int],
    merge: Merge | None = None,
    scoring: Scoring = PLAIN,
    sinks: jax.Array | None = None,
    first_prefix: jax.Array | int = 0,
) -> jax.Array:
    """Computes attention of one token in each slot, q[R, S, 1, H, A] -> the same shape, as an
    online softmax over fixed blocks of keys: first those of the row's prompt (`prefix`), then the
    slot's `own`, which are `Keys` that follow each other. If several tokens of a sequence are
    computed at once, each is a slot here.

    Only the first `num_prefix` and the first `num_own` keys (int32 scalars) are read, or all if
    there are fewer, rounded up to blocks, and of the former none before `first_prefix`, rounded
    down to blocks; keys beyond these bounds must be masked. A wholly masked block changes no bit of
    a row that has a key, so neither the padding of a row nor the other rows of the batch affect its
    result. `blocks` are the most keys of a block of the prompt's and of the own keys: the block is
    the largest divisor of the number of keys up to that. Scores are scaled by 1/sqrt(A) and capped
    as `scoring` says; its window is not read, since the masks have it. There is no gradient.
    `merge` is called with the sums before the division; None if each device has whole heads.
    sinks[H] are those of `reference.attend`, of the heads that are left after `merge`: they are
    added once, after it.
    """
    prefix_block, own_block = blocks
    q = by_key_head(q, prefix.k.shape[-3])[:, :, 0]  # [R, S, K, g, A]
    rows, slots, key_heads, group_size, head_dim = q.shape
    # The slots of a row are the queries of one product with the prompt's keys and values.
    of_row = jax.lax.collapse(q.swapaxes(1, 2), 2, 4)  # [R, K, S * g, A]
    # LOWEST, not NO_KEY: each slot has a key, its own token.
    running = softmax.start(of_row.shape[:-1], of_row.shape, LOWEST)
    prefix_mask = prefix.mask
    if prefix_mask.shape[1] > 1:  # slots read different keys: each row of the mask is for g queries
        prefix_mask = jnp.repeat(prefix_mask, group_size, axis=1)
    prefix = prefix._replace(mask=prefix_mask[:, None])  # [R, 1, 1 or S * g, T]
    running = _add_keys(
        running, of_row, prefix, num_prefix, prefix_block, scoring.cap, first_prefix
    )

    def by_slot(x: jax.Array) -> jax.Array:
        """Separates the slots again: [R, K, S * g, ...] -> [R, S, K, g, ...]."""
        by_query = x.reshape((rows, key_heads, slots, group_size, *x.shape[3:]))
        return by_query.swapaxes(1, 2)

    running = RunningSoftmax(by_slot(running.top), by_slot(running.total), by_slot(running.out))
    first = 0
    for keys in own:
        keys = keys._replace(mask=keys.mask[:, :, None, None])
        add = partial(_add_keys, q=q, keys=keys, most=own_block, cap=scoring.cap)
        if first == 0:
            running = add(running, num_keys=num_own)
        else:
            add_next = partial(add, num_keys=num_own - first)
            running = jax.lax.cond(num_own > first, add_next, lambda running: running, running)
        first += keys.size
    if merge is not None:
        running = merge(running)
    if sinks is not None:
        by_head = sinks.astype(jnp.float32).reshape(running.top.shape[2:])  # [K, g]
        running = softmax.add_sinks(running, by_head, jnp.exp)
    out = softmax.attention_of(running)
    return out.reshape(rows, slots, 1, -1, head_dim).astype(q.dtype)


def _add_keys(
    running: RunningSoftmax,
    q: jax.Array,
    keys: Keys,
    num_keys: jax.Array,
    most: int,
    cap: float = 0.0,
    first_key: jax.Array | int = 0,
) -> RunningSoftmax:
    """Adds the first `num_keys` of keys[..., K, T, A] to the softmax of queries q[..., K, M, A], in
    blocks of at most `most` keys; blocks that end before `first_key` are left out. A chunk of a
    `ChunkedCache` is one block. The keys' mask
    has a shape that broadcasts against the scores [..., K, M, T], which have the soft cap `cap` (0:
    none). Returns the new state."""
    count = keys.size
    size = count if keys.is_chunk else largest_block(count, most)
    product = "...ma,...at->...mt" if keys.is_chunk else "...ma,...ta->...mt"

    def add(k: jax.Array, v: jax.Array, mask: jax.Array, running: RunningSoftmax) -> RunningSoftmax:
        """Adds one block of keys."""
        scores = capped(einsum32(product, q, k), cap)
        scores = masked(scores, mask)

        def weigh_values(weights: jax.Array) -> jax.Array:
            # A cache may have float32 for the same values (`keys_dtype`); the weights are rounded
            # as in training.
            return einsum32("...mt,...ta->...ma", weights.astype(q.dtype), v)

        return softmax.add_block(running, scores, weigh_values, jnp.exp)

    if size == count:
        # A slice even of all keys would be copied before its product.
        return add(keys.k, keys.v, keys.mask, running)

    def add_block(number: jax.Array, running: RunningSoftmax) -> RunningSoftmax:
        """Adds block `number` of the keys."""

        def block(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, number * size, size, x.ndim + axis)

        return add(block(keys.k, -2), block(keys.v, -2), block(keys.mask, -1), running)

    first_block = first_key // size
    # A ring has fewer keys than there are tokens.
    num_blocks = -(-jnp.minimum(num_keys, count) // size)
    return jax.lax.fori_loop(first_block, num_blocks, add_block, running)


class SlotTokens(NamedTuple):
    """The tokens of a step of decoding, one in each of [N, W] slots."""

    prefix_len: jax.Array  # int32[N]: lengths of the rows' prompts
    position: jax.Array  # int32[N, W]: of the token in its completion
    # int32 scalars: upper bounds of the number of keys that any prompt and any slot has
    num_prefix: jax.Array
    num_own: jax.Array
    # bool[N, W]. Results of the other slots mean nothing; the kernel for TPUs neither reads nor
    # writes their keys.
    live: jax.Array
    # int32[N, W, T]: the page table (`PagedCache`); None if keys are not stored in pages
    pages: jax.Array | None = None


@dataclass(frozen=True)
class SlotAttention:
    """The `Attention` of decoding for a kind of layer. It writes the key and value of each slot's
    token, unless they are there already (k and v are None); the token then reads its row's prompt
    and its own slot."""

    model: Model
    layer: Layer
    slots: SlotTokens

    @property
    def rotates(self) -> bool:
        """The kernel for GPUs rotates q and k itself."""
        return self.model.role.platform == "gpu" and decodes_by_kernel(self.model, self.layer)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: TokenKeys | PagedCache,
        *,
        sinks: jax.Array | None = None,
        rope: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Returns (out, the cache with the new keys and values)."""
        model = self.model
        arguments: tuple = (q, k, v, cache, self.slots, sinks, rope)
        if isinstance(cache, PagedCache):
            return _on_each_device(model, _attend_pages, arguments)
        if self.rotates:
            return _on_each_device(model, _attend_by_gpu_kernel, arguments)
        parts = model.key_parts_of(self.layer)
        if parts > 1:
            attend_part = partial(_attend_part, model, self.layer)
            return _on_each_device(model, attend_part, arguments, parts)
        attend = partial(_attend_keys, model, self.layer)
        if model.role.tensor == 1:
            return attend(*arguments)
        # On each device, even if key heads are not split: otherwise the partitioner gathers for
        # each device what all devices of a replica write.
        return _on_each_device(model, attend, arguments)


def _attend_by_gpu_kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: SlotKeys,
    slots: SlotTokens,
    sinks: None,
    rope: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, SlotKeys]:
    """Calls the kernel for GPUs on one device's heads. The kernel also rotates q and k by the
    angles `rope`, and writes the new keys and values. Returns (out, new cache). q, k and v are [N,
    W, heads, A] without rotary positions."""
    from shoal.model.attention.decode_gpu import attend_slots  # Pallas takes a second to import

    cos, sin = rope
    keys = cache.prefix_k, cache.prefix_v, cache.own_k, cache.own_v
    # If q, k and v are slices of one product, XLA sees that they are adjacent, and does not copy.
    heads = jnp.concatenate([q, k, v], -2)
    out, own_k, own_v = attend_slots(
        heads, cos[:, :, 0], sin[:, :, 0], keys, slots.prefix_len, slots.position
    )
    return out, replace(cache, own_k=own_k, own_v=own_v)


def _attend_pages(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: PagedCache,
    slots: SlotTokens,
    sinks: None,
    rope: Any,
) -> tuple[jax.Array, PagedCache]:
    """Writes the new keys and values, if they are not None, into their pages, then calls the kernel
    for TPUs on one device's heads. Returns (out, new cache)."""
    from shoal.model.attention.decode_tpu import attend_pages  # Pallas takes a second to import

    assert slots.pages is not None, "a cache with pages has a table of them"
    live = slots.live
    if k is not None and v is not None:
        cache = cache.write_tokens(k, v, slots.position, live, slots.pages)
    num_prefix = jnp.where(live.any(1), slots.prefix_len, 0)
    num_own = jnp.where(live, slots.position + 1, 0)
    out = attend_pages(q, cache.prefix_kv, cache.own_kv, num_prefix, num_own, slots.pages)
    return out, cache


def _on_each_device(model: Model, attend: Callable, arguments: tuple, parts: int = 1) -> Any:
    """Calls `attend` on each device with (q, k, v, cache, slots, sinks, rope), and returns its
    (out, new cache).

    A device gets its heads of q, k, v [N, W, heads, A], of the layer's cache and of sinks[H], and
    all of `slots` and of the angles `rope`. If a key head's positions are split over devices
    (`parts`, see `Model.key_parts_of`, is above 1), `attend` gets one more argument: the number of
    the device's part, int32[1]. On a single device `attend` is called as it is.
    """
    if model.role.mesh.size == 1:
        return attend(*arguments)
    heads = PartitionSpec(None, None, "tensor")
    whole = PartitionSpec()

    def by_head(keys: jax.Array) -> PartitionSpec:
        """The split of a cache [.., heads, positions, A]."""
        leading = (None,) * (keys.ndim - 3)
        return PartitionSpec(*leading, "tensor")

    cache = arguments[3]
    of_cache = jax.tree.map(by_head, cache)
    return on_tensor_devices(
        model.role,
        attend,
        (heads, heads, heads, of_cache, whole, PartitionSpec("tensor"), whole),
        (heads, of_cache),
        *arguments,
        parts=parts,
    )


def _attend_keys(
    model: Model,
    layer: Layer,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: TokenKeys,
    slots: SlotTokens,
    sinks: jax.Array | None,
    rope: Any,
    *,
    part: jax.Array | None = None,
    merge: Merge | None = None,
) -> tuple[jax.Array, TokenKeys]:
    """Writes the key and value of each slot's token into a cache, if they are not None, and attends
    to the cache's keys without a kernel. Returns (out, new cache). If a key head's positions are
    split (`KeyCache.parts`), `part` says which of them this device has, and `merge` joins the sums
    of all parts."""
    if k is not None and v is not None:
        cache = cache.write_tokens(k, v, slots.position, part)
    scoring = scoring_of(model, layer)
    prompt, own = read_keys(cache, slots.prefix_len, slots.position, scoring.window, part)
    out = online_softmax(
        q[:, :, None],
        prompt,
        own,
        num_prefix=slots.num_prefix,
        num_own=slots.num_own,
        blocks=_block_sizes(model, prompt, own),
        merge=merge,
        scoring=scoring,
        sinks=sinks,
    )
    return out[:, :, 0], cache


def _block_sizes(model: Model, prompt: Keys, own: Sequence[Keys]) -> tuple[int, int]:
    """Returns the most keys of a block in decoding, of a prompt and of a completion."""
    platform = model.role.platform
    return keys_at_once(platform, prompt.size), keys_at_once(platform, own[0].size)


def _attend_part(
    model: Model,
    layer: Layer,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: KeyCache,
    slots: SlotTokens,
    sinks: jax.Array | None,
    rope: Any,
    part: jax.Array,
) -> tuple[jax.Array, TokenKeys]:
    """Writes each slot's key and value and attends, if a key head's positions are split over
    several devices. Returns (out, new cache): this device computes all queries of the head against
    its part of the keys, exchanges the sums with the others, and returns the output of its own
    queries."""
    key_heads = model.key_heads_of(layer)
    parts = cache.parts
    # devices next to each other share a head
    groups = [list(range(first, first + parts)) for first in range(0, key_heads, parts)]
    q = jax.lax.all_gather(q, "tensor", axis=2, axis_index_groups=groups, tiled=True)
    slots = slots._replace(
        num_prefix=-(-slots.num_prefix // parts), num_own=-(-slots.num_own // parts)
    )
    merge = partial(_merge_parts, parts, groups)
    return _attend_keys(model, layer, q, k, v, cache, slots, sinks, rope, part=part, merge=merge)


def _merge_parts(parts: int, groups: list[list[int]], running: RunningSoftmax) -> RunningSoftmax:
    """Exchanges the sums of a softmax between the devices that share a key head, each of which has
    computed all of the head's queries against its part of the keys. Returns the sums of this
    device's own queries over all parts. `groups` are the numbers of the devices that share a head,
    `parts` is how many they are."""
    # One exchange for all: top, total and out side by side.
    packed = jnp.concatenate([running.top[..., None], running.total[..., None], running.out], -1)
    # a device has a part of one key head
    packed = packed[:, :, 0]  # [N, W, g, 2 + A]
    packed = jax.lax.all_to_all(packed, "tensor", 2, 2, axis_index_groups=groups, tiled=True)
    # Of this device's queries, the sums of each part, one part after the other.
    rows, slots, _, width = packed.shape
    packed = packed.reshape(rows, slots, 1, parts, -1, width)
    top = packed[..., 0]  # [N, W, 1, parts, queries]
    largest = top.max(3, keepdims=True)
    # 0 of a part that holds no key: its maximum is LOWEST
    weight = jnp.exp(top - largest)[..., None]
    total = (packed[..., 1:2] * weight).sum(3)
    out = (packed[..., 2:] * weight).sum(3)
    return RunningSoftmax(largest[:, :, :, 0], total[..., 0], out)


@dataclass(frozen=True)
class PrefillChunkAttention:
    """The `Attention` of a chunk of R prompts for a kind of layer: C tokens of each, from position
    `start` on, which read their prompt up to themselves; of the keys before a window no block is
    read. Results beyond the longest prompt mean nothing. The cache must have room for start + C
    tokens."""

    model: Model
    layer: Layer
    start: jax.Array
    longest: jax.Array  # the length of the longest prompt
    block: int  # a divisor of C: how many queries are computed at once

    @property
    def rotates(self) -> bool:
        return False

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: PrefillChunkKeys,
        *,
        sinks: jax.Array | None = None,
        rope: Any = None,
    ) -> tuple[jax.Array, PrefillChunkKeys]:
        """Returns (out, the keys and values of this chunk, too). The cache holds those of the
        chunks before, and of this one if k and v are None."""
        keys = cache
        if k is not None and v is not None:
            keys = cache.write(k, v, self.start)
        # By blocks of queries, which do not compute keys after their own block: half of all pairs,
        # and few scores at once.
        rows, _, heads, head_dim = q.shape
        queries = jnp.moveaxis(q.reshape(rows, -1, self.block, heads, head_dim), 1, 0)
        first = self.start + self.block * jnp.arange(len(queries))
        out = jax.lax.map(partial(self._attend_block, keys, sinks), (queries, first))
        return jnp.moveaxis(out, 0, 1).reshape(q.shape), keys

    def _attend_block(
        self, keys: PrefillChunkKeys, sinks: jax.Array | None, queries: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """Computes the attention of one block of the chunk's queries: `queries` are q[R, b, H, A]
        and the position of the first."""
        q, first = queries
        rows = len(q)
        block = self.block
        scoring = scoring_of(self.model, self.layer)
        # The block is read as a completion is, and what comes before it as its prompt.
        own_k = jax.lax.dynamic_slice_in_dim(keys.k, first, block, 2)[:, None]
        own_v = jax.lax.dynamic_slice_in_dim(keys.v, first, block, 2)[:, None]
        before, own = read_keys(
            KeyCache(keys.k, keys.v, own_k, own_v),
            prefix_len=jnp.broadcast_to(first, (rows,)),
            position=jnp.broadcast_to(jnp.arange(block), (rows, block)),
            window=scoring.window,
        )
        first_read: Any = 0
        if scoring.window:  # by the first query
            first_read = jnp.maximum(first - scoring.window + 1, 0)
        out = online_softmax(
            q[:, :, None],
            before,
            own,
            # padding reads its own block alone
            num_prefix=jnp.where(first < self.longest, first, 0),
            num_own=jnp.int32(block),
            blocks=(block, block),
            scoring=scoring,
            sinks=sinks,
            first_prefix=first_read,
        )
        return out[:, :, 0]


@dataclass(frozen=True)
class ContextAttention:
    """The `Attention` of C tokens of context for each of M completions, for a kind of layer. A
    token reads its prompt, and its completion up to itself."""

    model: Model
    layer: Layer
    prefix_len: jax.Array  # int32[M]: lengths of the completions' prompts
    start: jax.Array  # int32[M]: tokens of the completion before the context

    @property
    def rotates(self) -> bool:
        return False

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: SlotKeys | ExtendedRing,
        *,
        sinks: jax.Array | None = None,
        rope: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Returns (out, the cache with the context's keys and values appended). `cache` is what
        `Cache.read_completions` returned; if k and v are None, what another layer has made of
        it."""
        keys = cache
        if k is not None and v is not None:
            assert isinstance(cache, SlotKeys)
            keys = cache.append(k, v, self.start)
        position = self.start[:, None] + jnp.arange(q.shape[1])  # [M, C]
        scoring = scoring_of(self.model, self.layer)
        prompt, own = read_keys(keys, self.prefix_len, position, scoring.window)
        # A completion is a row, and its C tokens are the slots, which share one set of own keys:
        # [M, 1, K, T, A]. Queries are [M, C, 1, H, A].
        [own_keys] = own
        own = [own_keys._replace(k=own_keys.k[:, None], v=own_keys.v[:, None])]
        num_own = position.max() + 1
        if isinstance(keys, ExtendedRing):  # the new keys follow a ring that may have room
            num_own = jnp.int32(own_keys.size)
        out = online_softmax(
            q[:, :, None],
            prompt,
            own,
            num_prefix=self.prefix_len.max(),
            num_own=num_own,
            blocks=_block_sizes(self.model, prompt, own),
            scoring=scoring,
            sinks=sinks,
        )
        return out[:, :, 0], keys
