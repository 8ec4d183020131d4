"""Caches of sampling, one for each layer: a prompt's once for its row, a completion's in its own
slot.

    LayerCache    keys and values: of all tokens, or of a window's last ones, as a ring
    StateCache    the states of a delta net

A kind of layer without keys of its own has no cache, None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.model.architecture import Layer
from shoal.model.attention.rule import ring_places
from shoal.model.attention.selector import by_pages
from shoal.model.recurrence import StateCache, empty_state
from shoal.model.transformer import Model

KEY_BLOCK = 64
"""Sizes of caches are multiples of so many keys."""


PAGE = 128
"""Keys of a completion that one page holds. On TPUs, whose kernel reads pages, sizes of caches are
multiples of it."""


NO_PAGE = 2**31 - 1
"""A page number in a table that is past the end of any pool: nothing is written there."""


RING_SLACK = 128
"""Keys of a completion that a ring holds beyond its window. Tokens that were sampled after the end
of a turn, before the host saw that end, are dropped, but have been written: these are fewer (the
sampler asserts it), so the keys that they replaced lie before the window."""


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

    A layer with a window keeps only the last keys if that is less (`ring_size`): position p is at p
    % Tp of a prompt, at p % C of a completion.

    If decoding reads by pages (`by_pages`), values stand next to their keys, [.., 2 A], in prefix_k
    and own_k, and prefix_v and own_v are None; own_k is then a pool of pages for all slots, [P, K,
    PAGE, 2 A]. A table int32[N, W, C / PAGE] on the host says which pages are whose. For rows that
    were saved, own_k is [N, W, C / PAGE, K, PAGE, 2 A].
    """

    prefix_k: Any
    prefix_v: Any
    own_k: Any
    own_v: Any


Cache = LayerCache | StateCache | None
"""The cache of one layer; None of a layer that reads the keys of another one."""


def empty(
    model: Model, rows: int, siblings: int, prefix: int, own: int, pages: int = 0
) -> tuple[Cache, ...]:
    """Returns one cache of zeros for each layer, in the type of the computation, for `rows` rows of
    `siblings` slots. `prefix` and `own` are how many keys of a prompt and of a slot it holds, over
    all parts of a head. If a kind of layer decodes by pages (`by_pages`), all slots share a pool of
    `pages` pages; with `pages` 0 each slot has pages of its own, as saved rows have."""
    # The dimensions in front of a page: of one pool, or of each slot's own pages.
    pool = (pages,) if pages else (rows, siblings, own // PAGE)
    caches = []
    for number in range(model.architecture.num_layers):
        layer = model.architecture.layer(number)
        if layer.keys_of is not None:
            caches.append(None)
        elif layer.mixer == "delta_net":
            caches.append(_empty_states(model, rows, siblings))
        elif by_pages(model, layer):
            caches.append(_empty_of_pages(model, layer, rows, prefix, pool))
        else:
            caches.append(_empty_of_slots(model, layer, rows, siblings, prefix, own))
    return tuple(caches)


def is_ring(model: Model, layer: Layer) -> bool:
    """True if a kind of layer keeps its keys in rings. A layer whose positions are split over
    devices keeps all of them."""
    return layer.window > 0 and model.key_parts_of(layer) == 1


def ring_size(window: int, slack: int, size: int) -> int:
    """Returns the keys of a ring for a window, at most `size`, which has room for all keys."""
    return min(size, KEY_BLOCK * -(-(window + slack) // KEY_BLOCK))


def _empty_of_slots(
    model: Model, layer: Layer, rows: int, siblings: int, prefix: int, own: int
) -> LayerCache:
    """Returns a cache of zeros of one layer, without pages."""
    parts = model.key_parts_of(layer)
    prefix //= parts
    own //= parts
    if is_ring(model, layer):
        prefix = ring_size(layer.window, 0, prefix)
        own = ring_size(layer.window, RING_SLACK, own)
    heads = model.key_heads_of(layer)
    head_dim = model.architecture.head_dim_of(layer)
    of_row = (rows, heads, prefix, head_dim)
    of_slot = (rows, siblings, heads, own, head_dim)
    return LayerCache(
        prefix_k=jnp.zeros(of_row, model.dtype),
        prefix_v=jnp.zeros(of_row, model.dtype),
        own_k=jnp.zeros(of_slot, model.dtype),
        own_v=jnp.zeros(of_slot, model.dtype),
    )


def _empty_of_pages(
    model: Model, layer: Layer, rows: int, prefix: int, pool: tuple[int, ...]
) -> LayerCache:
    """Returns a cache of zeros of one layer whose own keys are in pages: `pool` are the dimensions
    in front of each page's."""
    heads = model.key_heads_of(layer)
    width = 2 * model.architecture.head_dim_of(layer)  # keys and values
    return LayerCache(
        prefix_k=jnp.zeros((rows, heads, prefix, width), model.dtype),
        prefix_v=None,
        own_k=jnp.zeros((*pool, heads, PAGE, width), model.dtype),
        own_v=None,
    )


def _empty_states(model: Model, rows: int, siblings: int) -> StateCache:
    """Returns a cache of zeros of one delta net."""
    sizes = model.architecture.delta_net
    assert sizes is not None, "a pattern with delta nets has their sizes"
    of_rows = empty_state(sizes, (rows,), model.dtype)
    of_slots = empty_state(sizes, (rows, siblings), model.dtype)
    return StateCache(*of_rows, *of_slots)


def is_paged(cache: Cache) -> bool:
    """True for the cache of a layer that decodes by pages."""
    return isinstance(cache, LayerCache) and cache.own_v is None


def axes_of(cache: Cache) -> Cache:
    """Returns the logical axes of a cache's arrays, in the same tree: a tuple for each array. Rows
    come first, also of a pool of pages, and key or value heads are split."""

    def axes(array: Any, heads_from_end: int) -> tuple[str | None, ...]:
        named: list[str | None] = ["rows"] + [None] * (array.ndim - 1)
        if heads_from_end:
            named[-heads_from_end] = "heads"
        return tuple(named)

    if isinstance(cache, StateCache):
        return StateCache(
            axes(cache.prefix_state, 3),
            axes(cache.prefix_tail, 0),
            axes(cache.own_state, 3),
            axes(cache.own_tail, 0),
        )
    # all are [.., K, T, A]
    return jax.tree.map(lambda array: axes(array, 3), cache)


def write_prefixes(
    model: Model,
    caches: tuple[Cache, ...],
    new: Sequence[Any],
    rows: jax.Array,
    length: jax.Array,
    kinds: Sequence[Layer],
) -> tuple[Cache, ...]:
    """Writes what prompts of length[R] left in each layer to rows[R] of the caches, and returns the
    new caches. `new` has for each layer (k, v) [R, T, K, A], or (state, tail) of a delta net;
    `kinds` are the layers' kinds. A row number past the end is dropped.

    T may be padded beyond the size of the caches; what is beyond is padding and not written. Keys
    beyond T keep their old values.
    """
    written = []
    for layer, cache, of_layer in zip(kinds, caches, new, strict=True):
        if cache is None:
            written.append(None)
        elif isinstance(cache, StateCache):
            written.append(_write_states(cache, of_layer, rows))
        else:
            written.append(_write_keys(model, layer, cache, of_layer, rows, length))
    return tuple(written)


def _write_states(
    cache: StateCache, new: tuple[jax.Array, jax.Array], rows: jax.Array
) -> StateCache:
    """Writes prompts' last (state, tail) [R, ...] to rows[R], for the prompt and for each of its
    completions, which begin with them."""

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[rows].set(new.astype(old.dtype), mode="drop")

    def write_to_slots(old: jax.Array, new: jax.Array) -> jax.Array:
        return write(old, jnp.broadcast_to(new[:, None], (len(new), *old.shape[1:])))

    state, tail = new
    return StateCache(
        prefix_state=write(cache.prefix_state, state),
        prefix_tail=write(cache.prefix_tail, tail),
        own_state=write_to_slots(cache.own_state, state),
        own_tail=write_to_slots(cache.own_tail, tail),
    )


def _write_keys(
    model: Model,
    layer: Layer,
    cache: LayerCache,
    new: tuple[jax.Array, jax.Array],
    rows: jax.Array,
    length: jax.Array,
) -> LayerCache:
    """Writes prompts' keys and values [R, T, K, A] to rows[R] of one layer's cache."""
    parts = model.key_parts_of(layer)
    if parts > 1:
        heads = PartitionSpec(None, None, "tensor")
        select = partial(_select_part, parts)
        new = on_tensor_devices(model, select, (heads,), heads, new, parts=parts)
    k, v = new
    # The buckets of prompts are 64 x 2^n and may exceed the caches, which are sized by
    # max_prompt_tokens.
    room = cache.prefix_k.shape[2]
    if is_ring(model, layer) and k.shape[1] > room:
        # The last keys of each prompt, at their places in a ring.
        index = jnp.maximum(ring_places(length - 1, room), 0)[..., None, None]
        k = jnp.take_along_axis(k, index, axis=1)
        v = jnp.take_along_axis(v, index, axis=1)
    size = min(k.shape[1], room)

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[rows, :, :size].set(new[:, :size].swapaxes(1, 2), mode="drop")

    if cache.prefix_v is None:  # beside each other
        return replace(cache, prefix_k=write(cache.prefix_k, jnp.concatenate([k, v], -1)))
    return replace(cache, prefix_k=write(cache.prefix_k, k), prefix_v=write(cache.prefix_v, v))


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
    caches: tuple[Cache, ...], sources: jax.Array, rows: jax.Array
) -> tuple[Cache, ...]:
    """Copies what prompts left from rows sources[M] to rows[M], and returns the caches; the slots
    of these rows begin with their prompt's state. A row number past the end in `rows` is dropped.
    The slots' own keys are not copied."""

    def copy(cache: jax.Array) -> jax.Array:
        return cache.at[rows].set(cache[sources], mode="drop")

    copied = []
    for cache in caches:
        if cache is None:
            copied.append(None)
        elif isinstance(cache, StateCache):
            new = cache.prefix_state[sources], cache.prefix_tail[sources]
            copied.append(_write_states(cache, new, rows))
        else:
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


def on_tensor_devices(
    model: Model, function: Callable, specs: tuple, out: Any, *args: Any, parts: int
) -> Any:
    """Calls a function of arrays on each device of `tensor`, and returns its results; `specs` and
    `out` say how `args` and the results are split. If a head's positions are split over devices
    (`parts`, see `Model.key_parts_of`, is above 1), the function gets one more argument: the number
    of the device's part, int32[1]."""
    mesh = model.role.mesh
    if parts > 1:
        # As many entries as devices, or more heads than devices: each device gets its heads' parts.
        part = jnp.arange(model.role.tensor) % parts
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
