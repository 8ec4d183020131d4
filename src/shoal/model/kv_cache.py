"""The keys and values of sampling: a prompt's once a row, a completion's in its own slot; one cache
a layer.

Attention over them: of a token a slot in decoding, and of a piece of a long prompt in prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.mesh import listed
from shoal.model.attention import Keys, online_softmax
from shoal.model.transformer import AttentionFn, Model
from shoal.types import ShoalError

KEY_BLOCK = 64
"""The sizes of caches are multiples of it."""

PAGE = 128
"""Keys of a completion that a page holds. On TPUs, whose kernel reads pages, sizes of caches are
multiples of it."""

NO_PAGE = 2**31 - 1
"""In a table: past the end of any pool, so nothing is written."""

MOST_SIBLINGS = 32
"""Slots of a row on TPUs: of all the kernel holds a page at once in on-chip memory."""


def keys_at_once(platform: str, keys: int) -> int:
    """Keys in one block of decoding's online softmax over a cache of so many. One block is read
    without a loop.

    By the TPU compiler's cycles a token of 70B (8 v5p chips, 512 keys) takes 14.9 ms without a loop
    and 16.5 with two blocks of 256. On CPU a loop copies each block, but reads no keys that nobody
    has: there blocks are short.
    """
    if platform == "cpu":
        return KEY_BLOCK if keys <= 4 * KEY_BLOCK else 2 * KEY_BLOCK
    return 8 * KEY_BLOCK


def cache_size(tokens: int, platform: str, parts: int = 1) -> int:
    """Keys of a cache for so many tokens: whole pages on a TPU, else in each part few blocks of
    equal size, each at most `keys_at_once`.

    >>> cache_size(200, "cpu"), cache_size(320, "gpu")
    (256, 320)
    >>> cache_size(1600, "gpu"), cache_size(1600, "tpu")
    (1792, 1664)
    """
    if platform == "tpu" and parts == 1:
        return PAGE * -(-tokens // PAGE)
    tokens = -(-tokens // parts)
    blocks = -(-tokens // keys_at_once(platform, tokens))
    return parts * blocks * KEY_BLOCK * -(-tokens // (blocks * KEY_BLOCK))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values for N rows of W siblings: of prompts [N, K, Tp, A], of
    completions [N, W, K, C, A].

    Heads before positions, as attention reads them: else all keys would be transposed before each
    product. Where a head is on several devices (`Model.key_parts`), K counts its parts, and
    position p is the one at p // parts of part p % parts: all parts grow alike.

    Where decoding reads by pages (`by_pages`), values stand beside their keys, [.., 2 A], in
    prefix_k and own_k, and prefix_v and own_v are None; own_k is a pool of pages for all slots, [P,
    K, PAGE, 2 A]. Which are whose says a table int32[N, W, C / PAGE] of the host's. Of rows that
    were saved it is [N, W, C / PAGE, K, PAGE, 2 A].
    """

    prefix_k: Any
    prefix_v: Any
    own_k: Any
    own_v: Any


def empty(
    model: Model, rows: int, siblings: int, prefix: int, own: int, pages: int = 0
) -> tuple[LayerCache, ...]:
    """One cache of zeros for each layer, in the type of the computation. `prefix` and `own`: of all
    parts. Own keys are by pages: so many, or with 0 each slot's own."""
    a, dtype = model.architecture, model.dtype
    heads, parts = model.key_heads, model.key_parts

    def layer() -> LayerCache:
        if by_pages(model):
            count = (pages,) if pages else (rows, siblings, own // PAGE)
            return LayerCache(
                jnp.zeros((rows, heads, prefix, 2 * a.head_dim), dtype),
                None,
                jnp.zeros((*count, heads, PAGE, 2 * a.head_dim), dtype),
                None,
            )
        of_row, of_slot = (
            (rows, heads, prefix // parts, a.head_dim),
            (rows, siblings, heads, own // parts, a.head_dim),
        )
        return LayerCache(
            *(jnp.zeros(shape, dtype) for shape in (of_row, of_row, of_slot, of_slot))
        )

    return tuple(layer() for _ in range(a.num_layers))


def write_prefixes(
    model: Model,
    caches: tuple[LayerCache, ...],
    keys: Sequence[tuple[jax.Array, jax.Array]],
    rows: jax.Array,
) -> tuple[LayerCache, ...]:
    """Writes prompts' keys and values, (k, v) a layer [R, T, K, A], to rows[R]; a row past the end
    is dropped.

    T may be padded beyond the size of the caches; what is beyond is padding and not written.
    """
    parts = model.key_parts

    def of_part(new: jax.Array, part: jax.Array) -> jax.Array:
        filled = jnp.pad(new, ((0, 0), (0, -new.shape[1] % parts), (0, 0), (0, 0)))
        apart = filled.reshape(len(new), -1, parts, *new.shape[2:])
        return jax.lax.dynamic_index_in_dim(apart, part[0], 2, keepdims=False)

    if parts > 1:
        heads = PartitionSpec(None, None, "tensor")
        keys = on_parts(
            model,
            lambda keys, part: jax.tree.map(lambda new: of_part(new, part), keys),
            (heads,),
            heads,
            keys,
        )
    # The buckets of prompts are 64 x 2^n and may exceed the caches, which are sized by
    # max_prompt_tokens.
    size = min(keys[0][0].shape[1], caches[0].prefix_k.shape[2])

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[rows, :, :size].set(new[:, :size].swapaxes(1, 2), mode="drop")

    return tuple(
        replace(cache, prefix_k=write(cache.prefix_k, jnp.concatenate([k, v], -1)))
        if cache.prefix_v is None
        else replace(cache, prefix_k=write(cache.prefix_k, k), prefix_v=write(cache.prefix_v, v))
        for cache, (k, v) in zip(caches, keys, strict=True)
    )


def copy_prefixes(
    caches: tuple[LayerCache, ...], sources: jax.Array, rows: jax.Array
) -> tuple[LayerCache, ...]:
    """Copies prompts' keys and values from sources[M] to rows[M]; a row past the end is dropped."""

    def copy(cache: jax.Array) -> jax.Array:
        return cache.at[rows].set(cache[sources], mode="drop")

    copied = (jax.tree.map(copy, (cache.prefix_k, cache.prefix_v)) for cache in caches)
    return tuple(
        replace(cache, prefix_k=k, prefix_v=v) for cache, (k, v) in zip(caches, copied, strict=True)
    )


def read_pages(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """The pages[..] of a pool [P, K, PAGE, 2 A], [.., K, PAGE, 2 A]; one past the end means the
    last."""
    # One after another: XLA for TPU reads all of a pool where it gathers pages of it.
    found = jax.lax.map(
        lambda page: jax.lax.dynamic_index_in_dim(pool, page, keepdims=False), pages.reshape(-1)
    )
    return found.reshape(*pages.shape, *pool.shape[1:])


def in_pages(k: jax.Array, v: jax.Array) -> jax.Array:
    """Keys and values [.., K, C, A] of slots as pages [.., C / PAGE, K, PAGE, 2 A]."""
    both = jnp.concatenate([k, v], -1)
    return both.reshape(*both.shape[:-2], -1, PAGE, both.shape[-1]).swapaxes(-4, -3)


def out_of_pages(cache: LayerCache) -> LayerCache:
    """A cache with keys and values apart, and without pages."""
    if cache.own_v is not None:
        return cache
    own = cache.own_k.swapaxes(-4, -3)
    own = own.reshape(*own.shape[:-3], -1, own.shape[-1])
    return LayerCache(*jnp.split(cache.prefix_k, 2, -1), *jnp.split(own, 2, -1))


def on_parts(model: Model, function: Callable, specs: tuple, out: Any, *args: Any) -> Any:
    """A function of arrays on each device of `tensor`, and of the part of its head's positions that
    it holds, where that is not all."""
    mesh, part = (
        model.role.mesh,
        [jnp.arange(model.key_heads) % model.key_parts] * (model.key_parts > 1),
    )
    # All axes that are not split by rows already: kernels for TPUs may not have any that XLA could
    # split.
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(*specs, *[PartitionSpec("tensor")] * len(part)),
        out_specs=out,
        axis_names={*mesh.axis_names} - {*mesh.manual_axes},
        check_vma=False,
    )(*args, *part)


def kernel_refusal(model: Model) -> str:
    """Why decoding's kernel cannot compute a model; empty if it can."""
    platform, width = model.role.platform, model.architecture.head_dim
    if platform == "cpu":
        return f"it is for GPUs and TPUs, and this is a {platform.upper()}"
    if model.key_parts > 1:
        return (
            f"a key head would be on {model.key_parts} devices: it needs mesh.sampler_tensor of at "
            f"most "
            f"{model.architecture.num_kv_heads}, the model's key/value heads"
        )
    if platform == "tpu":
        return (
            f"it needs heads of a multiple of 64, and the model's head_dim is {width}"
            if width % 64
            else ""
        )
    from shoal.model.decode_kernel import HEADS  # Pallas takes a second to import

    if width in HEADS:
        return ""
    return f"it needs heads of {listed(HEADS)} dimensions, and the model's head_dim is {width}"


def decodes_by_kernel(model: Model) -> bool:
    """True if decoding takes the kernel, as `auto` does where it can. ShoalError if it cannot and
    was asked for."""
    reason = kernel_refusal(model)
    if reason and model.attention == "pallas" and model.role.platform != "cpu":
        raise ShoalError(
            f"model.attention=pallas: decoding's kernel cannot compute this model, {reason}; with "
            "model.attention=auto decoding goes without it",
            "model.attention",
        )
    return not reason and model.attention in ("auto", "pallas")


def by_pages(model: Model) -> bool:
    """True if decoding reads own keys by pages, as the kernel for TPUs does."""
    return model.role.platform == "tpu" and decodes_by_kernel(model)


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
    from shoal.model.decode_kernel import attend_slots  # Pallas takes a second to import

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
    from shoal.model.decode_kernel import attend_pages  # Pallas takes a second to import

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
