"""Moves an array from one layout of some devices to another, by all-to-all, gather, slice and
exchange alone.

XLA's partitioner replicates an array as a last resort where the two layouts cut the devices
differently: a whole stacked weight on each device. Here no more than the part of one of the two
layouts stands on a device, but for a dimension that both split in different orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shoal.mesh.devices import as_mesh

Layout = list[list[str]]
"""For each dimension the axes that split it, the outermost first."""


def reshard(array: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
    """Inside a compiled function: an array that is laid out as `source`, laid out as `target` on
    the same devices.

    Both meshes list the devices in one order. Where their sizes do not divide each other the
    partitioner moves it.
    """
    mesh = _common_mesh(source.mesh, target.mesh)
    if mesh is None:
        return jax.lax.with_sharding_constraint(array, target)
    before, after = (_layout(mesh, sharding, array.ndim) for sharding in (source, target))

    def move(part: jax.Array) -> jax.Array:
        for kind, axis, where, to in _moves(before, after):
            if kind == "move":
                part = jax.lax.all_to_all(part, axis, split_axis=to, concat_axis=where, tiled=True)
            elif kind == "gather":
                part = jax.lax.all_gather(part, axis, axis=where, tiled=True)
            else:
                size = part.shape[where] // mesh.shape[axis]
                part = jax.lax.dynamic_slice_in_dim(
                    part, jax.lax.axis_index(axis) * size, size, where
                )
        return part

    def spec(layout: Layout) -> PartitionSpec:
        return PartitionSpec(*(tuple(axes) or None for axes in layout))

    moved = jax.shard_map(
        move, mesh=mesh, in_specs=spec(before), out_specs=spec(after), check_vma=False
    )
    return jax.lax.with_sharding_constraint(moved(array), target)


def in_order_of(source: NamedSharding, target: NamedSharding) -> NamedSharding:
    """The layout `source` with the devices in the order of `target`; itself where these are
    others."""
    before, after = np.asarray(source.mesh.devices), np.asarray(target.mesh.devices)
    if set(before.flat) != set(after.flat) or list(before.flat) == list(after.flat):
        return source
    return NamedSharding(as_mesh(after.reshape(before.shape), source.mesh.axis_names), source.spec)


def exchange_parts(array: jax.Array, source: NamedSharding, ordered: NamedSharding) -> jax.Array:
    """Inside a compiled function: the part of each device that it has in the layout `ordered`,
    which is `source` with the devices in another order. A program knows one order, so its output is
    the parts in a row along the first dimension; as arrays of single devices they make the array in
    `ordered`."""
    before, after = (list(np.asarray(sharding.mesh.devices).flat) for sharding in (source, ordered))
    names, moves = (
        source.mesh.axis_names,
        [(sender, before.index(device)) for sender, device in enumerate(after)],
    )
    exchange = jax.shard_map(
        lambda part: jax.lax.ppermute(part, names, moves),
        mesh=source.mesh,
        check_vma=False,
        in_specs=source.spec,
        out_specs=PartitionSpec(names),
    )
    return exchange(array)


def _common_mesh(a: Any, b: Any) -> Mesh | None:
    """A mesh whose axes are parts of both's; None where one's axes cut the other's."""
    cuts = sorted({cut for mesh in (a, b) for cut in _cuts(mesh)})
    if any(high % low for low, high in pairwise(cuts)):
        return None
    sizes = [high // low for low, high in pairwise(cuts)][::-1]
    return as_mesh(
        np.asarray(a.devices).reshape(sizes or [1]),
        [f"a{cut}" for cut in cuts[:-1][::-1]] or ["a1"],
    )


def _cuts(mesh: Any) -> list[int]:
    """Products of the sizes of the innermost axes, from 1 to all."""
    sizes = list(mesh.shape.values())
    return [math.prod(sizes[axis:]) for axis in range(len(sizes) + 1)]


def _layout(common: Mesh, sharding: NamedSharding, ndim: int) -> Layout:
    """The axes of a common mesh that split each dimension of an array with this sharding."""
    mesh, cuts = sharding.mesh, _cuts(sharding.mesh)
    ranges = {name: (cuts[axis + 1], cuts[axis]) for axis, name in enumerate(mesh.axis_names)}
    parts = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))

    def axes(part: str | Sequence[str] | None) -> Iterator[str]:
        for name in (part,) if isinstance(part, str) else (part or ()):
            low, high = ranges[name]
            yield from (axis for axis in common.axis_names if low <= int(axis[1:]) < high)

    return [list(axes(part)) for part in parts]


def _moves(before: Layout, after: Layout) -> Iterator[tuple[str, str, int, int]]:
    """(move, gather or slice; axis; dimension; for a move the dimension that it then splits), in
    order."""
    now = [list(axes) for axes in before]

    def is_prefix(dim: int) -> bool:
        return now[dim] == after[dim][: len(now[dim])]

    while now != after:
        open_ends = {
            after[dim][len(now[dim])]: dim
            for dim in range(len(now))
            if is_prefix(dim) and len(now[dim]) < len(after[dim])
        }
        wrong = [dim for dim in range(len(now)) if not is_prefix(dim)]
        moved = next(((now[dim][-1], dim) for dim in wrong if now[dim][-1] in open_ends), None)
        free = next((axis for axis in open_ends if not any(axis in axes for axes in now)), None)
        if moved:
            axis, dim = moved
            now[dim].pop()
            now[open_ends[axis]].append(axis)
            yield "move", axis, dim, open_ends[axis]
        elif free:
            now[open_ends[free]].append(free)
            yield "slice", free, open_ends[free], -1
        else:
            # First where the target splits too: what is gathered there is split again before more
            # is gathered.
            dim = min(wrong, key=lambda dim: not after[dim])
            yield "gather", now[dim].pop(), dim, -1
