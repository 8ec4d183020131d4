"""Attention of sampling over caches: of one token in each slot in decoding, and of a piece of a
long prompt in prefill.

`online_softmax` is the form without a kernel: one softmax over two sets of keys, the prompt's and
the completion's own, gathered over fixed blocks of keys in order. So a row's result does not
depend, to the bit, on how far the caches are padded or on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.model.architecture import Layer
from shoal.model.attention import softmax
from shoal.model.attention.caches import (
    PAGE,
    LayerCache,
    is_ring,
    keys_at_once,
    on_tensor_devices,
)
from shoal.model.attention.rule import cache_masks, places, ring_places
from shoal.model.attention.selector import by_pages, decodes_by_kernel, scoring_of
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
from shoal.model.block import AttentionFn
from shoal.model.transformer import Model


class Keys(NamedTuple):
    """A cache's keys and values, and a mask which of them each slot reads."""

    k: jax.Array  # [R, K, T, A] if all slots of a row share them, else [R, S, K, T, A]
    v: jax.Array  # as k
    mask: jax.Array  # bool[R, S, T], or bool[R, 1, T] if all slots of a row read the same keys


Merge = Callable[[RunningSoftmax], RunningSoftmax]
"""Joins the sums [R, S, K, g] of devices that share a key head, before the division."""


def online_softmax(
    q: jax.Array,
    prefix: Keys,
    own: Keys,
    num_prefix: jax.Array,
    num_own: jax.Array,
    blocks: tuple[int, int],
    merge: Merge | None = None,
    scoring: Scoring = PLAIN,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes attention of one token in each slot, q[R, S, 1, H, A] -> the same shape, as an
    online softmax over fixed blocks of keys: first those of the row's prompt (`prefix`), then the
    slot's `own`. If several tokens of a sequence are computed at once, each is a slot here.

    Only the first `num_prefix` and the first `num_own` keys (int32 scalars) are read, rounded up to
    blocks; keys beyond them must be masked. A wholly masked block changes no bit of a row that
    already has a key, so neither the padding of a row nor the other rows of the batch affect its
    result. `blocks` are the most keys of a block of the prompt's and of the own keys: the block is
    the largest divisor of the number of keys up to that. Scores are scaled and capped as `scoring`
    says; its window is not read, since the masks have it. There is no gradient. `merge` is called
    with the sums before the division; None if each device has whole heads. sinks[H] are those of
    `reference.attend`, of the heads that are left after `merge`: they are added once, after it.
    """
    prefix_block, own_block = blocks
    q = by_key_head(q, own.k.shape[-3], scoring.scale)[:, :, 0]  # [R, S, K, g, A]
    rows, slots, key_heads, share, head_dim = q.shape
    # The slots of a row are the queries of one product with the prompt's keys and values.
    of_row = jax.lax.collapse(q.swapaxes(1, 2), 2, 4)  # [R, K, S * g, A]
    # LOWEST, not NO_KEY: each slot has a key, its own token.
    running = softmax.start(of_row.shape[:-1], of_row.shape, LOWEST)
    prefix_mask = prefix.mask
    if prefix_mask.shape[1] > 1:  # slots read different keys: each row of the mask is for g queries
        prefix_mask = jnp.repeat(prefix_mask, share, axis=1)
    prefix = prefix._replace(mask=prefix_mask[:, None])  # [R, 1, 1 or S * g, T]
    running = _add_keys(running, of_row, prefix, num_prefix, prefix_block, scoring.cap)

    def by_slot(x: jax.Array) -> jax.Array:
        """Separates the slots again: [R, K, S * g, ...] -> [R, S, K, g, ...]."""
        by_query = x.reshape((rows, key_heads, slots, share, *x.shape[3:]))
        return by_query.swapaxes(1, 2)

    running = RunningSoftmax(by_slot(running.top), by_slot(running.total), by_slot(running.out))
    own = own._replace(mask=own.mask[:, :, None, None])
    running = _add_keys(running, q, own, num_own, own_block, scoring.cap)
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
) -> RunningSoftmax:
    """Adds the first `num_keys` of keys[..., K, T, A] to the softmax of queries q[..., K, M, A], in
    blocks of at most `most` keys. The keys' mask has a shape that broadcasts against the scores
    [..., K, M, T], which have the soft cap `cap` (0: none). Returns the new state."""
    count = keys.k.shape[-2]
    size = largest_block(count, most)

    def add(k: jax.Array, v: jax.Array, mask: jax.Array, running: RunningSoftmax) -> RunningSoftmax:
        """Adds one block of keys."""
        scores = capped(einsum32("...ma,...ta->...mt", q, k), cap)
        scores = masked(scores, mask)

        def weigh_values(weights: jax.Array) -> jax.Array:
            return einsum32("...mt,...ta->...ma", weights.astype(v.dtype), v)

        return softmax.add_block(running, scores, weigh_values, jnp.exp)

    if size == count:
        # A slice even of all keys would be copied before its product.
        return add(keys.k, keys.v, keys.mask, running)

    def add_block(number: jax.Array, running: RunningSoftmax) -> RunningSoftmax:
        """Adds block `number` of the keys."""

        def block(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, number * size, size, x.ndim + axis)

        return add(block(keys.k, -2), block(keys.v, -2), block(keys.mask, -1), running)

    num_blocks = -(-num_keys // size)
    return jax.lax.fori_loop(0, num_blocks, add_block, running)


@dataclass(frozen=True)
class SlotKernel:
    """The `AttentionFn` of decoding by the kernel for GPUs. It is a class because it rotates q and
    k itself, which `block` reads from `rotates`."""

    model: Model
    prefix_len: jax.Array
    position: jax.Array
    rotates = True

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, rope: Any
    ) -> tuple[jax.Array, LayerCache]:
        cos, sin = rope
        slots = cos[:, :, 0], sin[:, :, 0], self.prefix_len, self.position
        return _attend_on_each_device(self.model, _attend_slots, q, k, v, cache, slots=slots)


def _attend_slots(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, slots: tuple[jax.Array, ...]
) -> tuple[jax.Array, LayerCache]:
    """Calls the kernel for GPUs on one device's heads. The kernel also rotates q and k, and writes
    the new keys and values. Returns (out, new cache). `slots` are cos, sin, prefix_len and
    position. q, k and v are [N, W, heads, A] without rotary positions."""
    from shoal.model.attention.decode_gpu import attend_slots  # Pallas takes a second to import

    cos, sin, prefix_len, position = slots
    keys = cache.prefix_k, cache.prefix_v, cache.own_k, cache.own_v
    # If q, k and v are slices of one product, XLA sees that they are adjacent, and does not copy.
    heads = jnp.concatenate([q, k, v], -2)
    out, own_k, own_v = attend_slots(heads, cos, sin, keys, prefix_len, position)
    return out, replace(cache, own_k=own_k, own_v=own_v)


def _attend_pages(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: LayerCache,
    slots: tuple[jax.Array, ...],
) -> tuple[jax.Array, LayerCache]:
    """Writes the new keys and values, if they are not None, into their pages, then calls the kernel
    for TPUs on one device's heads. Returns (out, new cache). `slots` are live, prefix_len, position
    and the table of pages."""
    from shoal.model.attention.decode_tpu import attend_pages  # Pallas takes a second to import

    live, prefix_len, position, pages = slots
    own = cache.own_k
    if k is not None and v is not None:
        # Slots that sample nothing write past the end, each to another place: XLA compiles a
        # scatter whose places might coincide to a loop.
        num_pages = len(own)
        past_end = num_pages + jnp.arange(live.size, dtype=jnp.int32).reshape(live.shape)
        page = jnp.take_along_axis(pages, position[..., None] // PAGE, 2)
        page = jnp.where(live[..., None], page, past_end[..., None])
        new = jnp.concatenate([k, v], -1)
        own = own.at[page, jnp.arange(k.shape[2]), position[..., None] % PAGE].set(
            new, unique_indices=True, mode="drop"
        )
    num_prefix = jnp.where(live.any(1), prefix_len, 0)
    num_own = jnp.where(live, position + 1, 0)
    out = attend_pages(q, cache.prefix_k, own, num_prefix, num_own, pages)
    return out, replace(cache, own_k=own)


def _attend_on_each_device(
    model: Model,
    attend: Callable,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: LayerCache,
    sinks: jax.Array | None = None,
    *,
    slots: tuple,
    parts: int = 1,
) -> Any:
    """Calls attend(q, k, v, cache, slots) on each device, and returns its (out, new cache); with
    sinks[H] also the keyword `sinks`, of the device's heads.

    A device gets its heads of q, k, v [N, W, heads, A] and of the layer's cache, and all of
    `slots`, a tuple of arrays by row or slot. If a key head's positions are split over devices
    (`parts`, see `Model.key_parts_of`, is above 1), `attend` gets one more argument: the number of
    the device's part, int32[1]. On a single device `attend` is called as it is.
    """
    given = {} if sinks is None else {"sinks": sinks}
    if model.role.mesh.size == 1:
        return attend(q, k, v, cache, slots, **given)
    heads = PartitionSpec(None, None, "tensor")

    def by_head(keys: jax.Array) -> PartitionSpec:
        """The split of a cache [.., heads, positions, A]."""
        leading = (None,) * (keys.ndim - 3)
        return PartitionSpec(*leading, "tensor")

    def on_device(given: dict[str, jax.Array], *args: Any) -> Any:
        return attend(*args, **given)

    of_cache = jax.tree.map(by_head, cache)
    return on_tensor_devices(
        model,
        on_device,
        (PartitionSpec("tensor"), heads, heads, heads, of_cache, PartitionSpec()),
        (heads, of_cache),
        given,
        q,
        k,
        v,
        cache,
        slots,
        parts=parts,
    )


def decode_attention(
    model: Model,
    layer: Layer,
    prefix_len: jax.Array,
    position: jax.Array,
    num_prefix: jax.Array,
    num_own: jax.Array,
    live: jax.Array,
    pages: jax.Array | None = None,
) -> AttentionFn:
    """Returns the `AttentionFn` of decoding for a kind of layer: one token for each of [N, W]
    slots.

    The token's key and value are written at position[N, W] of its slot, unless they are there
    already (k and v are None); it then attends to its row's prompt and to its slot. `num_prefix`
    and `num_own` are upper bounds of the number of keys that any slot has. prefix_len[N] are the
    lengths of the rows' prompts. Results of slots that are not live[N, W] mean nothing, and the
    kernel for TPUs neither reads nor writes their keys. `pages` is that kernel's table of pages;
    without that kernel it is not read, and may be None."""
    if by_pages(model, layer):
        slots = live, prefix_len, position, pages
        return partial(_attend_on_each_device, model, _attend_pages, slots=slots)
    if decodes_by_kernel(model, layer):
        return SlotKernel(model, prefix_len, position)
    slots = prefix_len, position, num_prefix, num_own
    if model.role.tensor == 1:

        def attend_here(
            q: jax.Array, k: Any, v: Any, cache: LayerCache, sinks: Any = None
        ) -> tuple[jax.Array, LayerCache]:
            return _attend_caches(model, layer, q, k, v, cache, slots, sinks=sinks)

        return attend_here
    # On each device, even if key heads are not split: otherwise the partitioner gathers for each
    # device what all devices of a replica write.
    parts = model.key_parts_of(layer)
    attend = partial(_attend_part if parts > 1 else _attend_caches, model, layer)
    return partial(_attend_on_each_device, model, attend, slots=slots, parts=parts)


def _attend_caches(
    model: Model,
    layer: Layer,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: LayerCache,
    slots: tuple[jax.Array, ...],
    part: jax.Array | None = None,
    merge: Merge | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, LayerCache]:
    """Writes the key and value of each slot's token into a cache, if they are not None, and attends
    to the cache's keys without a kernel. Returns (out, new cache). `slots` are prefix_len,
    position, num_prefix and num_own. If a key head's positions are split (`Model.key_parts_of`),
    `part` says which of them this device has, and `merge` joins the sums of all parts."""
    prefix_len, position, num_prefix, num_own = slots
    prompt_size = cache.prefix_k.shape[2]
    own_size = cache.own_k.shape[3]
    index = position[..., None]
    # No index is checked: a position is always within its cache.
    mode = "promise_in_bounds"
    parts = model.key_parts_of(layer)
    if part is not None:  # the other parts write past the end
        index = jnp.where(index % parts == part, index // parts, own_size)
        mode = "drop"
    prompt_place = places(prompt_size, parts, part)
    own_place = places(own_size, parts, part)
    if is_ring(model, layer):
        index = index % own_size
        prompt_place = ring_places(prefix_len - 1, prompt_size)[:, None]
        own_place = ring_places(position, own_size)
        num_prefix = jnp.minimum(num_prefix, prompt_size)
        num_own = jnp.minimum(num_own, own_size)

    def write(keys: jax.Array, new: jax.Array) -> jax.Array:
        row, slot, head = jnp.indices(new.shape[:3], sparse=True)
        # XLA for TPU compiles a scatter to a loop over slots if two of them might coincide. If all
        # heads were written at once, XLA would transpose the whole cache at both ends of every
        # dispatch.
        return keys.at[row, slot, head, index].set(
            new, unique_indices=True, indices_are_sorted=True, mode=mode
        )

    if k is not None and v is not None:
        cache = replace(cache, own_k=write(cache.own_k, k), own_v=write(cache.own_v, v))
    prompt_mask, own_mask = cache_masks(prefix_len, position, prompt_place, own_place, layer.window)
    prompt = Keys(cache.prefix_k, cache.prefix_v, prompt_mask)
    own = Keys(cache.own_k, cache.own_v, own_mask)
    platform = model.role.platform
    blocks = keys_at_once(platform, prompt_size), keys_at_once(platform, own_size)
    out = online_softmax(
        q[:, :, None],
        prompt,
        own,
        num_prefix,
        num_own,
        blocks,
        merge,
        scoring_of(model.architecture, layer),
        sinks,
    )
    return out[:, :, 0], cache


def _attend_part(
    model: Model,
    layer: Layer,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: LayerCache,
    slots: tuple[jax.Array, ...],
    part: jax.Array,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, LayerCache]:
    """Writes each slot's key and value and attends, if a key head's positions are split over
    several devices. Returns (out, new cache): this device computes all queries of the head against
    its part of the keys, exchanges the sums with the others, and returns the output of its own
    queries."""
    key_heads = model.key_heads_of(layer)
    parts = model.key_parts_of(layer)
    # devices next to each other share a head
    groups = [list(range(first, first + parts)) for first in range(0, key_heads, parts)]
    q = jax.lax.all_gather(q, "tensor", axis=2, axis_index_groups=groups, tiled=True)
    prefix_len, position, num_prefix, num_own = slots
    slots = prefix_len, position, -(-num_prefix // parts), -(-num_own // parts)
    merge = partial(_merge_parts, parts, groups)
    return _attend_caches(model, layer, q, k, v, cache, slots, part, merge, sinks)


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
    share = jnp.exp(top - largest)  # 0 of a part that holds no key: its maximum is LOWEST
    total = (packed[..., 1:2] * share[..., None]).sum(3)
    out = (packed[..., 2:] * share[..., None]).sum(3)
    return RunningSoftmax(largest[:, :, :, 0], total[..., 0], out)


def piece_attention(
    model: Model, layer: Layer, start: jax.Array, longest: jax.Array, block: int
) -> AttentionFn:
    """Returns the `AttentionFn` of a piece of R prompts for a kind of layer: C tokens of each, from
    position `start` on. `longest` is the length of the longest prompt. `block`, a divisor of C, is
    how many queries are computed at once.

    The cache holds the keys of the pieces before, [R, K, T, A], and afterwards those of this piece,
    too; before it if k and v are None. A token reads its prompt up to itself. Results beyond the
    longest prompt mean nothing. T must have room for start + C tokens."""
    scoring = scoring_of(model.architecture, layer)

    def attention(
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: LayerCache,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Writes the piece's keys and values into the cache, and attends to all keys up to each
        token."""

        def write(before: jax.Array, new: jax.Array | None) -> jax.Array:
            if new is None:
                return before
            return jax.lax.dynamic_update_slice_in_dim(before, new.swapaxes(1, 2), start, 2)

        prefix_k = write(cache.prefix_k, k)
        prefix_v = write(cache.prefix_v, v)

        def attend_block(queries: tuple[jax.Array, jax.Array]) -> jax.Array:
            """Computes the attention of one block of the piece's queries."""
            q, first = queries  # [R, b, H, A], and the position of the first
            rows = len(q)
            own_k = jax.lax.dynamic_slice_in_dim(prefix_k, first, block, 2)[:, None]
            own_v = jax.lax.dynamic_slice_in_dim(prefix_v, first, block, 2)[:, None]
            # The block is read as a completion is, and what comes before it as its prompt.
            num_tokens = jnp.broadcast_to(first, (rows,))
            position = jnp.broadcast_to(jnp.arange(block), (rows, block))
            mask_before, own_mask = cache_masks(
                num_tokens,
                position,
                places(prefix_k.shape[2]),
                places(block),
                layer.window,
            )
            before = Keys(prefix_k, prefix_v, mask_before)
            own = Keys(own_k, own_v, own_mask)
            num_before = jnp.where(first < longest, first, 0)  # padding reads its own block alone
            num_own = jnp.int32(block)
            blocks = block, block
            out = online_softmax(
                q[:, :, None], before, own, num_before, num_own, blocks, None, scoring, sinks
            )
            return out[:, :, 0]

        # By blocks of queries, which do not compute keys after their own block: half of all pairs,
        # and few scores at once.
        rows, _, heads, head_dim = q.shape
        queries = jnp.moveaxis(q.reshape(rows, -1, block, heads, head_dim), 1, 0)
        first = start + block * jnp.arange(len(queries))
        out = jax.lax.map(attend_block, (queries, first))
        keys = replace(cache, prefix_k=prefix_k, prefix_v=prefix_v)
        return jnp.moveaxis(out, 0, 1).reshape(q.shape), keys

    return attention


def context_attention(
    model: Model, layer: Layer, prefix_len: jax.Array, start: jax.Array, count: jax.Array
) -> AttentionFn:
    """Returns the `AttentionFn` of C tokens of context for each of M completions, after start[M]
    tokens of the completion, for a kind of layer. The first count[M] of them are real: without
    delta nets all C are.

    The cache holds the prompts of their rows, [M, K, Tp, A], of prefix_len[M] tokens, and their own
    keys, [M, K, T, A]. A token reads its prompt, and its completion up to itself. T must have room
    for start + count tokens, unless it is a ring. The new cache has the new keys, too: behind the
    others if it is a ring ([M, K, T + C, A]), else in their places. `kept_of_context` returns what
    stays of it. If k and v are None, the cache is such a one already.
    """
    in_ring = is_ring(model, layer)

    def attention(
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: LayerCache,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Appends the context's keys and values to the completions' own, and attends to prompt and
        completion."""
        size = q.shape[1]
        if k is not None and v is not None:
            # A ring may be shorter than the context: its keys are read beside the new ones.
            append: Any = _beside
            if not in_ring:
                # Tokens past the end would be moved back over older keys: if not all are real, they
                # get room there, which is cut off again.
                room = size if model.architecture.delta_net else 0
                append = partial(_appended, start=start, room=room)
            # [M, C, K, A] -> [M, K, C, A], in the cache's order
            own_k = append(cache.own_k, k.swapaxes(1, 2))
            own_v = append(cache.own_v, v.swapaxes(1, 2))
            cache = replace(cache, own_k=own_k, own_v=own_v)
        position = start[:, None] + jnp.arange(size)  # [M, C]
        prompt_size = cache.prefix_k.shape[2]
        own_size = cache.own_k.shape[2]
        if in_ring:
            of_ring = ring_places(start - 1, own_size - size)
            own_place = jnp.concatenate([of_ring, position], axis=1)[:, None]
            prompt_place = ring_places(prefix_len - 1, prompt_size)[:, None]
            num_prefix = jnp.minimum(prefix_len.max(), prompt_size)
            num_own = jnp.int32(own_size)
        else:
            own_place = places(own_size)
            prompt_place = places(prompt_size)
            num_prefix = prefix_len.max()
            num_own = position.max() + 1
        prompt_mask, own_mask = cache_masks(
            prefix_len, position, prompt_place, own_place, layer.window
        )
        prompt = Keys(cache.prefix_k, cache.prefix_v, prompt_mask)
        # A completion is a row, and its C tokens are the slots, which share one set of own keys:
        # [M, 1, K, T, A]. Queries are [M, C, 1, H, A].
        own = Keys(cache.own_k[:, None], cache.own_v[:, None], own_mask)
        platform = model.role.platform
        blocks = keys_at_once(platform, prompt_size), keys_at_once(platform, own_size)
        scoring = scoring_of(model.architecture, layer)
        out = online_softmax(
            q[:, :, None], prompt, own, num_prefix, num_own, blocks, None, scoring, sinks
        )
        return out[:, :, 0], cache

    return attention


def kept_of_context(
    model: Model, layer: Layer, cache: LayerCache, start: jax.Array, count: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and values [M, K, T, A] that stay of completions in a cache that
    `context_attention` returned, after `size` tokens of context of which the first count[M] are
    real; start[M] tokens were before it."""
    if not is_ring(model, layer):
        return cache.own_k, cache.own_v
    newest = start + count - 1

    def in_ring(both: jax.Array) -> jax.Array:
        ring, new = jnp.split(both, [both.shape[2] - size], axis=2)
        return _in_ring(ring, new, start, newest)

    return in_ring(cache.own_k), in_ring(cache.own_v)


def _beside(own: jax.Array, new: jax.Array) -> jax.Array:
    """Returns keys or values own[M, K, T, A] with new[M, K, C, A] behind them."""
    return jnp.concatenate([own, new], axis=2)


def _appended(own: jax.Array, new: jax.Array, start: jax.Array, room: int) -> jax.Array:
    """Returns keys or values own[M, K, T, A] with new[M, K, C, A] at positions start[M] to start +
    C - 1; those past T, of which there are at most `room`, are dropped."""
    append = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=1))
    if not room:
        return append(own, new, start)
    longer = jnp.pad(own, ((0, 0), (0, 0), (0, room), (0, 0)))
    return append(longer, new, start)[:, :, : own.shape[2]]


def _in_ring(ring: jax.Array, new: jax.Array, start: jax.Array, newest: jax.Array) -> jax.Array:
    """Writes the first of new[M, K, C, A] at positions start[M] to newest[M] of rings [M, K, T, A],
    and returns the rings. If these are more than T, the last T are kept."""
    size = new.shape[2]
    place = ring_places(newest, ring.shape[2])  # [M, T]
    is_new = place >= start[:, None]
    index = jnp.clip(place - start[:, None], 0, size - 1)
    at_place = jnp.take_along_axis(new, index[:, None, :, None], axis=2)
    return jnp.where(is_new[:, None, :, None], at_place, ring)
