"""Moves an array from one layout to another on the same devices, by all-to-all, gather, slice and
exchange alone.

XLA's partitioner replicates an array as a last resort if the two layouts cut the devices
differently: a whole stacked weight on each device. Here a device never holds more than its part in
one of the two layouts, except of a dimension that both layouts split in different orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shoal.mesh.devices import as_mesh

Layout = list[list[str]]
"""For each dimension of an array the mesh axes that split it, the outermost first."""


def reshard(array: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
    """Inside a compiled function: returns `array`, which has the layout `source`, in the layout
    `target` on the same devices: the same values, split otherwise.

    Both meshes must list the devices in the same order. If their sizes do not divide each other,
    XLA's partitioner moves the array.
    """
    mesh = _common_mesh(source.mesh, target.mesh)
    if mesh is None:
        return jax.lax.with_sharding_constraint(array, target)
    before = _layout(mesh, source, array.ndim)
    after = _layout(mesh, target, array.ndim)

    def move_part(part: jax.Array) -> jax.Array:
        """Returns a device's part in the layout `after`, from its part in the layout `before`."""
        for step in _steps(before, after):
            axis = step.axis
            dim = step.dim
            if step.kind == "move":
                part = jax.lax.all_to_all(
                    part, axis, split_axis=step.to_dim, concat_axis=dim, tiled=True
                )
            elif step.kind == "gather":
                part = jax.lax.all_gather(part, axis, axis=dim, tiled=True)
            else:
                size = part.shape[dim] // mesh.shape[axis]
                start = jax.lax.axis_index(axis) * size
                part = jax.lax.dynamic_slice_in_dim(part, start, size, dim)
        return part

    moved = jax.shard_map(
        move_part, mesh=mesh, in_specs=_spec(before), out_specs=_spec(after), check_vma=False
    )
    return jax.lax.with_sharding_constraint(moved(array), target)


def in_order_of(source: NamedSharding, target: NamedSharding) -> NamedSharding:
    """Returns the layout `source` with its devices in the order of `target`, for arrays that
    `exchange_parts` has sent there; `source` itself if the order is the same already, or if the two
    have different devices."""
    before = np.asarray(source.mesh.devices)
    after = np.asarray(target.mesh.devices)
    are_others = set(before.flat) != set(after.flat)
    are_in_order = list(before.flat) == list(after.flat)
    if are_others or are_in_order:
        return source
    mesh = as_mesh(after.reshape(before.shape), source.mesh.axis_names)
    return NamedSharding(mesh, source.spec)


def exchange_parts(array: jax.Array, source: NamedSharding, ordered: NamedSharding) -> jax.Array:
    """Inside a compiled function: sends each device of `array`, whose layout is `source`, the part
    that it has in the layout `ordered`: the same with the devices in another order.

    A program knows only one order of devices, so it cannot return an array in the layout `ordered`.
    It returns the parts, one after the other along the first dimension, still over the devices of
    `source`; the caller makes the array from the arrays of the single devices. Both layouts have
    the same devices.
    """
    before = list(np.asarray(source.mesh.devices).flat)
    after = list(np.asarray(ordered.mesh.devices).flat)
    axes = source.mesh.axis_names
    senders_and_receivers = []
    # Part k lies at place k of `source`, and the device `after[k]` is to hold it: the receiver is
    # the place that this device has in `source`.
    for sender, device in enumerate(after):
        senders_and_receivers.append((sender, before.index(device)))

    def send(part: jax.Array) -> jax.Array:
        """Returns the part that this device has in the layout `ordered`, from its own part."""
        return jax.lax.ppermute(part, axes, senders_and_receivers)

    exchange = jax.shard_map(
        send,
        mesh=source.mesh,
        check_vma=False,
        in_specs=source.spec,
        out_specs=PartitionSpec(axes),
    )
    return exchange(array)


def _common_mesh(a: Any, b: Any) -> Mesh | None:
    """Returns a mesh over the devices of `a` with finer axes, such that each axis of `a` and of `b`
    is a product of some of them: (4, 2) and (2, 4) -> (2, 2, 2). An axis is called `a` followed by
    the number of devices within one entry of it: `a4`, `a2`, `a1`. None if the sizes do not divide
    each other."""
    cuts = sorted({*_cuts(a), *_cuts(b)})
    sizes = []
    names = []
    for low, high in pairwise(cuts):
        if high % low:
            return None
        sizes.append(high // low)
        names.append(f"a{low}")
    if not sizes:  # a single device
        sizes = [1]
        names = ["a1"]
    # The outermost axis comes first.
    return as_mesh(np.asarray(a.devices).reshape(sizes[::-1]), names[::-1])


def _cuts(mesh: Any) -> list[int]:
    """Returns the products of the sizes of the innermost axes, from all axes down to none: sizes
    (4, 2) -> [8, 2, 1]."""
    sizes = list(mesh.shape.values())
    return [math.prod(sizes[axis:]) for axis in range(len(sizes) + 1)]


def _layout(common: Mesh, sharding: NamedSharding, ndim: int) -> Layout:
    """Returns for each of the `ndim` dimensions of an array with this sharding the list of the axes
    of the common mesh that split it, the outermost first."""
    mesh = sharding.mesh
    cuts = _cuts(mesh)
    layout: Layout = [[] for _ in range(ndim)]
    for dim, part in enumerate(sharding.spec):
        names = (part,) if isinstance(part, str) else (part or ())
        for name in names:
            axis_index = mesh.axis_names.index(name)
            low = cuts[axis_index + 1]
            high = cuts[axis_index]
            # The axis `name` is the product of the common axes between its two cuts.
            for axis in common.axis_names:
                # after the letter: the number of devices within one entry of the axis
                if low <= int(axis[1:]) < high:
                    layout[dim].append(axis)
    return layout


def _spec(layout: Layout) -> PartitionSpec:
    """Returns the PartitionSpec of a layout, with one entry for each dimension: the tuple of its
    axes, or None if the dimension is not split."""
    axes_by_dim = [tuple(axes) or None for axes in layout]
    return PartitionSpec(*axes_by_dim)


@dataclass(frozen=True)
class Step:
    """An exchange between devices over one axis of the mesh. `move`: the axis then splits dimension
    `to_dim` in place of `dim`; `gather`: it no longer splits `dim`; `slice`: it splits `dim` from
    now on."""

    kind: Literal["move", "gather", "slice"]
    axis: str
    dim: int
    to_dim: int = -1


def _steps(before: Layout, after: Layout) -> Iterator[Step]:
    """Yields the exchanges that lead from one layout to the other, in order. Prefers those that
    move least: moving an axis to another dimension, slicing, and only then gathering. The last
    alternative always exists, so every layout is reached."""
    now = [list(axes) for axes in before]
    while now != after:
        next_axes: dict[str, int] = {}  # the axis that a dimension needs next -> the dimension
        wrong = []  # dimensions split by another axis than in the target
        for dim, axes in enumerate(now):
            if axes != after[dim][: len(axes)]:
                wrong.append(dim)
            elif len(axes) < len(after[dim]):
                next_axes[after[dim][len(axes)]] = dim
        step = _move(now, wrong, next_axes) or _slice(now, next_axes) or _gather(now, wrong, after)
        if step.kind != "slice":
            # A move and a gather take the innermost axis of `dim` away.
            now[step.dim].pop()
        if step.kind != "gather":
            split = step.to_dim if step.kind == "move" else step.dim
            now[split].append(step.axis)
        yield step


def _move(now: Layout, wrong: Sequence[int], next_axes: Mapping[str, int]) -> Step | None:
    """Returns the step that moves the innermost axis of a wrongly split dimension to the dimension
    that needs this axis next; None if there is none. `now`: the present layout; `wrong`: the
    wrongly split dimensions; `next_axes`: axis -> the dimension that needs it next."""
    for dim in wrong:
        axis = now[dim][-1]
        if axis in next_axes:
            return Step("move", axis, dim, next_axes[axis])
    return None


def _slice(now: Layout, next_axes: Mapping[str, int]) -> Step | None:
    """Returns the step by which an axis that splits nothing yet splits the dimension that needs it
    next; None if there is none. `now`: the present layout; `next_axes`: axis -> the dimension that
    needs it next."""
    for axis, dim in next_axes.items():
        if not any(axis in axes for axes in now):
            return Step("slice", axis, dim)
    return None


def _gather(now: Layout, wrong: Sequence[int], after: Layout) -> Step:
    """Returns the step that gathers a wrongly split dimension over its innermost axis. It prefers a
    dimension that is split in the target too, because that one is split again before more is
    gathered. `now`: the present layout; `wrong`: the wrongly split dimensions, at least one;
    `after`: the layout that is wanted."""
    dim = wrong[0]
    for candidate in wrong:
        if after[candidate]:
            dim = candidate
            break
    return Step("gather", now[dim][-1], dim)
