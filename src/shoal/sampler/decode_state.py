"""The state of sampling on the devices, `DecodeState`: its sizes, its layout, and how rows of it
are swapped out to the host's memory and back in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shoal.mesh import Role
from shoal.model.attention import caches as kv_caches
from shoal.model.attention.caches import Cache, entries_at
from shoal.model.transformer import Model
from shoal.sampler.sample_tokens import SAMPLING_TYPES, SamplingArrays

OUT_OF_RANGE_ROW = 2**31 - 1
"""A row that no array has: what is written to it is dropped."""

SWAP_ROWS, SWAP_SHARE = 4, 16
"""Most rows of a replica that are swapped out or in at once, and the inverse of their largest share
of the replica's rows: these rows are on the device twice meanwhile."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """State of all slots [N, W] on the device between steps. The engine owns the only one; each
    step takes it and returns the next (it is donated)."""

    caches: tuple[Cache, ...]
    prefix_len: Any  # int32[N]
    # [N, D]: the hidden state of the prompt's last token, which first tokens are sampled from
    last: Any
    token: Any  # int32[N, W]: the last token sampled, not yet in the cache
    length: Any  # int32[N, W]: tokens sampled
    done: Any  # bool[N, W]
    limit: Any  # int32[N, W]: max_tokens of each completion
    keys: Any  # uint32[N, W, 2]: the address of each completion's noise
    sampling: SamplingArrays  # [N, W] each


class StateSizes(NamedTuple):
    """Sizes of a `DecodeState`."""

    rows: int  # N
    siblings: int  # W, slots per row
    prompt_tokens: int  # keys of a prompt that a row has space for
    completion_tokens: int  # keys of a completion that a slot has space for
    pages: int = 0  # pages of all replicas' pools; 0 if keys are not stored in pages


def idle_state(model: Model, sizes: StateSizes) -> DecodeState:
    """Returns a state whose slots are all done. Lengths are 1, not 0, so that position = length - 1
    and the bounds of keys stay valid for idle slots, which decoding computes along with the
    others."""
    rows, siblings, prompt_tokens, completion_tokens, pages = sizes
    shape = (rows, siblings)
    caches = kv_caches.empty(model, rows, siblings, prompt_tokens, completion_tokens, pages)
    zeros = partial(jnp.zeros, shape)
    return DecodeState(
        caches=caches,
        prefix_len=jnp.ones(rows, jnp.int32),
        last=jnp.zeros((rows, model.architecture.hidden_size), model.dtype),
        token=zeros(jnp.int32),
        length=jnp.ones(shape, jnp.int32),
        done=jnp.ones(shape, bool),
        limit=zeros(jnp.int32),
        keys=jnp.zeros((rows, siblings, 2), jnp.uint32),
        sampling=jax.tree.map(zeros, SAMPLING_TYPES),
    )


@lru_cache(64)
def state_shapes(model: Model, sizes: StateSizes) -> DecodeState:
    """Returns a state's shapes, data types and shardings, as `jax.ShapeDtypeStruct`s; allocates
    nothing. The result is kept for later calls with equal arguments."""
    shapes = jax.eval_shape(partial(idle_state, model, sizes))

    def with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, shapes, _layout(model.role, shapes))


def _layout(role: Role, shapes: DecodeState) -> DecodeState:
    """Returns the shardings of a state's arrays: rows are split over the replicas, and key/value
    heads over the mesh's axis `tensor`."""

    def by_row(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Returns the sharding of one array, whose first axis is rows."""
        axes = ("rows",) + (None,) * (leaf.ndim - 1)
        return role.sharding(axes, leaf.shape)

    def of_axes(leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> NamedSharding:
        return role.sharding(axes, leaf.shape)

    caches = []
    for cache in shapes.caches:
        caches.append(jax.tree.map(of_axes, cache, cache.axes()))
    outside = jax.tree.map(by_row, replace(shapes, caches=()))
    return replace(outside, caches=tuple(caches))


def _on_each_replica(role: Role, function: Callable) -> Callable:
    """Returns a function that calls `function`, whose arguments and result are arrays by row, on
    each replica's rows separately. With one replica this is `function` itself."""
    if role.row_shards == 1:
        return function
    rows = PartitionSpec(role.row_axes)
    return jax.shard_map(
        function,
        mesh=role.mesh,
        in_specs=rows,
        out_specs=rows,
        axis_names=set(role.row_axes),
        check_vma=False,
    )


def swap_out_rows(
    role: Role, state: DecodeState, rows: jax.Array, pages: jax.Array | None = None
) -> DecodeState:
    """Returns what the device holds of rows[M], as arrays of M rows. If keys are stored in pages,
    pages[M, W, T] says which are theirs. Rows are numbered within their replica; unused positions
    of `rows` may hold any row."""
    return _on_each_replica(role, _read_rows)(state, rows, pages)


def _read_rows(state: DecodeState, rows: jax.Array, pages: jax.Array | None) -> DecodeState:
    """Returns what one replica holds of rows[M], as arrays of M rows: `swap_out_rows` for a
    replica. pages[M, W, T]: the pages of the rows' completions; None if keys are not stored in
    pages."""
    caches = tuple(cache.read_rows(rows, pages) for cache in state.caches)
    outside = jax.tree.map(lambda x: entries_at(x, rows), replace(state, caches=()))
    return replace(outside, caches=caches)


def swap_in_rows(
    role: Role,
    state: DecodeState,
    rows: jax.Array,
    swapped: DecodeState,
    pages: jax.Array | None = None,
) -> DecodeState:
    """Returns the state with M swapped-out rows written to rows[M], numbered within their replica,
    and, if keys are stored in pages, to pages[M, W, T]. Drops what has a row or page past the
    end."""
    return _on_each_replica(role, _write_rows)(state, rows, swapped, pages)


def _write_rows(
    state: DecodeState, rows: jax.Array, swapped: DecodeState, pages: jax.Array | None
) -> DecodeState:
    """Returns one replica's state with M swapped-out rows written to rows[M]: `swap_in_rows` for a
    replica. pages[M, W, T]: the pages to write to; None if keys are not stored in pages. Drops what
    has a row or page past the end."""
    caches = []
    for cache, swapped_cache in zip(state.caches, swapped.caches, strict=True):
        caches.append(cache.write_rows(swapped_cache, rows, pages))
    outside = jax.tree.map(
        lambda x, new: x.at[rows].set(new, mode="drop"),
        replace(state, caches=()),
        replace(swapped, caches=()),
    )
    return replace(outside, caches=tuple(caches))
