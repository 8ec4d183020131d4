"""Caches of the keys and values of sampling, one for each layer: a prompt's once for its row, a
completion's in its own slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.model.attention.selector import by_pages
from shoal.model.transformer import Model

KEY_BLOCK = 64
"""Sizes of caches are multiples of so many keys."""


PAGE = 128
"""Keys of a completion that one page holds. On TPUs, whose kernel reads pages, sizes of caches are
multiples of it."""


NO_PAGE = 2**31 - 1
"""A page number in a table that is past the end of any pool: nothing is written there."""


MOST_SIBLINGS = 32
"""Most slots of a row on TPUs: the kernel holds a page of each in on-chip memory at once."""


def keys_at_once(platform: str, keys: int) -> int:
    """Returns the keys in one block of decoding's online softmax over a cache of `keys` keys. If
    one block holds all, it is read without a loop.

    By the TPU compiler's cycles a token of 70B (8 v5p chips, 512 keys) takes 14.9 ms without a loop
    and 16.5 with two blocks of 256. On CPU a loop copies each block, but does not read keys beyond
    the longest slot: there blocks are short.
    """
    if platform == "cpu":
        return KEY_BLOCK if keys <= 4 * KEY_BLOCK else 2 * KEY_BLOCK
    return 8 * KEY_BLOCK


def cache_size(tokens: int, platform: str, parts: int = 1) -> int:
    """Returns how many keys a cache has room for that must hold `tokens` tokens: whole pages on a
    TPU; else as few blocks of at most `keys_at_once` keys as possible, all of the same size, in
    each of `parts` parts (`Model.key_parts`).

    >>> cache_size(200, "cpu"), cache_size(320, "gpu")
    (256, 320)
    >>> cache_size(1600, "gpu"), cache_size(1600, "tpu")
    (1792, 1664)
    """
    if platform == "tpu" and parts == 1:
        return PAGE * -(-tokens // PAGE)
    # -(-a // b) is a / b rounded up, here and below.
    tokens_of_part = -(-tokens // parts)
    blocks = -(-tokens_of_part // keys_at_once(platform, tokens_of_part))
    # The tokens are divided equally over the blocks, in multiples of KEY_BLOCK.
    block = KEY_BLOCK * -(-tokens_of_part // (blocks * KEY_BLOCK))
    return parts * blocks * block


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values for N rows of W siblings: of prompts [N, K, Tp, A], of
    completions [N, W, K, C, A].

    Heads come before positions, as attention reads them: otherwise all keys would be transposed
    before each product. If a head is on several devices (`Model.key_parts`), K counts parts of
    heads, and part p % parts holds position p at p // parts: all parts grow alike.

    If decoding reads by pages (`by_pages`), values stand next to their keys, [.., 2 A], in prefix_k
    and own_k, and prefix_v and own_v are None; own_k is then a pool of pages for all slots, [P, K,
    PAGE, 2 A]. A table int32[N, W, C / PAGE] on the host says which pages are whose. For rows that
    were saved, own_k is [N, W, C / PAGE, K, PAGE, 2 A].
    """

    prefix_k: Any
    prefix_v: Any
    own_k: Any
    own_v: Any


def empty(
    model: Model, rows: int, siblings: int, prefix: int, own: int, pages: int = 0
) -> tuple[LayerCache, ...]:
    """Returns one cache of zeros for each layer, in the type of the computation, for `rows` rows of
    `siblings` slots. `prefix` and `own` are how many keys of a prompt and of a slot it holds, over
    all parts of a head. If decoding reads by pages (`by_pages`), all slots share a pool of `pages`
    pages; with `pages` 0 each slot has pages of its own, as saved rows have."""
    if by_pages(model):
        # The dimensions in front of a page: of one pool, or of each slot's own pages.
        pool = (pages,) if pages else (rows, siblings, own // PAGE)
        make_layer = partial(_empty_of_pages, model, rows, prefix, pool)
    else:
        parts = model.key_parts
        make_layer = partial(_empty_of_slots, model, rows, siblings, prefix // parts, own // parts)
    return tuple(make_layer() for _ in range(model.architecture.num_layers))


def _empty_of_slots(model: Model, rows: int, siblings: int, prefix: int, own: int) -> LayerCache:
    """Returns a cache of zeros of one layer, without pages; `prefix` and `own` are the keys of one
    part of a head."""
    heads = model.key_heads
    head_dim = model.architecture.head_dim
    of_row = (rows, heads, prefix, head_dim)
    of_slot = (rows, siblings, heads, own, head_dim)
    return LayerCache(
        prefix_k=jnp.zeros(of_row, model.dtype),
        prefix_v=jnp.zeros(of_row, model.dtype),
        own_k=jnp.zeros(of_slot, model.dtype),
        own_v=jnp.zeros(of_slot, model.dtype),
    )


def _empty_of_pages(model: Model, rows: int, prefix: int, pool: tuple[int, ...]) -> LayerCache:
    """Returns a cache of zeros of one layer whose own keys are in pages: `pool` are the dimensions
    in front of each page's."""
    heads = model.key_heads
    width = 2 * model.architecture.head_dim  # keys and values
    return LayerCache(
        prefix_k=jnp.zeros((rows, heads, prefix, width), model.dtype),
        prefix_v=None,
        own_k=jnp.zeros((*pool, heads, PAGE, width), model.dtype),
        own_v=None,
    )


def write_prefixes(
    model: Model,
    caches: tuple[LayerCache, ...],
    keys: Sequence[tuple[jax.Array, jax.Array]],
    rows: jax.Array,
) -> tuple[LayerCache, ...]:
    """Writes prompts' keys and values, (k, v) a layer [R, T, K, A], to rows[R] of the caches, and
    returns the new caches. A row number past the end is dropped.

    T may be padded beyond the size of the caches; what is beyond is padding and not written. Keys
    beyond T keep their old values.
    """
    if model.key_parts > 1:
        heads = PartitionSpec(None, None, "tensor")
        keys = on_tensor_devices(
            model, partial(_select_part, model.key_parts), (heads,), heads, keys
        )
    # The buckets of prompts are 64 x 2^n and may exceed the caches, which are sized by
    # max_prompt_tokens.
    first_k, _ = keys[0]
    size = min(first_k.shape[1], caches[0].prefix_k.shape[2])

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[rows, :, :size].set(new[:, :size].swapaxes(1, 2), mode="drop")

    written = []
    for cache, (k, v) in zip(caches, keys, strict=True):
        if cache.prefix_v is None:  # beside each other
            prefix_k = write(cache.prefix_k, jnp.concatenate([k, v], -1))
            written.append(replace(cache, prefix_k=prefix_k))
        else:
            prefix_k = write(cache.prefix_k, k)
            prefix_v = write(cache.prefix_v, v)
            written.append(replace(cache, prefix_k=prefix_k, prefix_v=prefix_v))
    return tuple(written)


def _select_part(parts: int, keys: Any, part: jax.Array) -> Any:
    """Returns, of keys and values [R, T, K, A] in a tree, the positions of one part: the number of
    the part is part[0], and position p belongs to part p % `parts`."""

    def positions_of_part(new: jax.Array) -> jax.Array:
        """Returns this part's positions of [R, T, K, A]: [R, T / parts rounded up, K, A]."""
        filled = jnp.pad(new, ((0, 0), (0, -new.shape[1] % parts), (0, 0), (0, 0)))
        rows, _, heads, head_dim = new.shape
        by_part = filled.reshape(rows, -1, parts, heads, head_dim)
        return jax.lax.dynamic_index_in_dim(by_part, part[0], 2, keepdims=False)

    return jax.tree.map(positions_of_part, keys)


def copy_prefixes(
    caches: tuple[LayerCache, ...], sources: jax.Array, rows: jax.Array
) -> tuple[LayerCache, ...]:
    """Copies prompts' keys and values from rows sources[M] to rows[M], and returns the caches. A
    row number past the end in `rows` is dropped. The slots' own keys are not copied."""

    def copy(cache: jax.Array) -> jax.Array:
        return cache.at[rows].set(cache[sources], mode="drop")

    copied = []
    for cache in caches:
        prefix_k, prefix_v = jax.tree.map(copy, (cache.prefix_k, cache.prefix_v))
        copied.append(replace(cache, prefix_k=prefix_k, prefix_v=prefix_v))
    return tuple(copied)


def read_pages(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """Reads the pages with the numbers pages[..] from a pool [P, K, PAGE, 2 A]; returns [.., K,
    PAGE, 2 A]. A number past the end, like NO_PAGE, reads the last page."""

    def read_page(page: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(pool, page, keepdims=False)

    # One page after another: XLA for TPU reads all of a pool if it gathers pages of it.
    read = jax.lax.map(read_page, pages.reshape(-1))
    return read.reshape(pages.shape + pool.shape[1:])


def in_pages(k: jax.Array, v: jax.Array) -> jax.Array:
    """Converts keys and values [.., K, C, A] of slots to pages [.., C / PAGE, K, PAGE, 2 A]. C is a
    multiple of PAGE."""
    both = jnp.concatenate([k, v], -1)
    width = both.shape[-1]
    by_page = both.reshape((*both.shape[:-2], -1, PAGE, width))
    return by_page.swapaxes(-4, -3)


def out_of_pages(cache: LayerCache) -> LayerCache:
    """Returns a cache of saved rows without pages, with keys and values in separate arrays; a cache
    without pages is returned as it is. Keys of completions become [N, W, K, C, A]."""
    if cache.own_v is not None:
        return cache
    own = cache.own_k.swapaxes(-4, -3)  # [N, W, K, C / PAGE, PAGE, 2 A]
    own = jax.lax.collapse(own, own.ndim - 3, own.ndim - 1)  # [N, W, K, C, 2 A]
    prefix_k, prefix_v = jnp.split(cache.prefix_k, 2, -1)
    own_k, own_v = jnp.split(own, 2, -1)
    return LayerCache(prefix_k, prefix_v, own_k, own_v)


def on_tensor_devices(model: Model, function: Callable, specs: tuple, out: Any, *args: Any) -> Any:
    """Calls a function of arrays on each device of `tensor`, and returns its results; `specs` and
    `out` say how `args` and the results are split. If a head's positions are split over devices
    (`Model.key_parts`), the function gets one more argument: the number of the device's part,
    int32[1]."""
    mesh = model.role.mesh
    if model.key_parts > 1:
        part = jnp.arange(model.key_heads) % model.key_parts
        specs += (PartitionSpec("tensor"),)
        args += (part,)
    # All axes that are not manual already: in kernels for TPUs there may be no axis that XLA could
    # split.
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=specs,
        out_specs=out,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(*args)
