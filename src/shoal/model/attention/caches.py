"""The keys and values of sampling: a prompt's once a row, a completion's in its own slot; one cache
a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.model.attention.selector import by_pages
from shoal.model.transformer import Model

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
