"""Layers in other stacks than those of a checkpoint.

A program stacks layers as `Architecture.scan_groups` says, and a checkpoint keeps the stacks of the
program that saved it. Here its arrays are put into the stacks of the program that reads it:

    saved                              wanted
    stack of layers 0, 2, 4            stack of layers 0, 2
    stack of layers 1, 3               stack of layers 1, 3      the same arrays
                                       stack of layer 4

The first dimension of an array, that of the layers, is split over no devices, so each device joins
the parts that it has, and no array is whole on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.mesh import PINNED_HOST, dispatching
from shoal.model.architecture import Architecture, StackLayers, repeating_patterns
from shoal.model.layers import Join, restacked
from shoal.model.parameters import Block, Parameters, Stacks
from shoal.weights.tensor_files import LazyArray


def saved_stacks(entry: Any, a: Architecture) -> StackLayers:
    """Returns the layers of each stack in a checkpoint, from the entry `stacks` of its JSON."""
    if entry:
        return tuple(tuple(numbers) for numbers in entry)
    # Checkpoints of earlier versions do not have it. Their stacks are these, whatever
    # `Architecture.scan_groups` may be today.
    stacks = []
    for group in repeating_patterns(a.marked_layers):
        stacks.extend(tuple(numbers) for numbers in group)
    return tuple(stacks)


def restacked_shapes(tree: Any, stacks: StackLayers) -> Any:
    """Returns a tree of shapes, such as a trainer's state, with the layers of parameters and
    moments in these stacks. The same tree if its layers are others."""

    def change(node: Any) -> Any:
        return _restacked(node, stacks, _join_shapes)

    try:
        return jax.tree.map(change, tree, is_leaf=_is_parameters)
    except ValueError:
        return tree


def restacked_arrays(tree: Any, stacks: StackLayers) -> Any:
    """Returns a tree of arrays with the layers of parameters and moments in these stacks. Arrays in
    whose place there are others are deleted, so that there are never two copies of all."""

    def change(node: Any) -> Any:
        new = _restacked(node, stacks, _join_arrays)
        kept = {id(leaf) for leaf in jax.tree.leaves(new)}
        for leaf in jax.tree.leaves(node):
            if id(leaf) not in kept and isinstance(leaf, jax.Array):
                leaf.delete()
        return new

    return jax.tree.map(change, tree, is_leaf=_is_parameters)


def _is_parameters(node: Any) -> bool:
    return isinstance(node, Parameters)


def _restacked(node: Any, stacks: StackLayers, join: Join) -> Any:
    """Returns parameters with their layers in these stacks; all else stays, like counters, and
    parameters of a sampler that has arrays for each layer."""
    if not _is_parameters(node) or not isinstance(node.blocks, Block | Stacks):
        return node
    return replace(node, blocks=restacked(node.blocks, stacks, join))


def _join_shapes(
    shapes: Sequence[jax.ShapeDtypeStruct], rows: Sequence[tuple[int, int]]
) -> jax.ShapeDtypeStruct:
    """`Join` of shapes. Layers are split over no devices, so all have one sharding."""
    first = shapes[0]
    return jax.ShapeDtypeStruct((len(rows), *first.shape[1:]), first.dtype, sharding=first.sharding)


def _join_arrays(arrays: Sequence[Any], rows: Sequence[tuple[int, int]]) -> Any:
    """`Join` of arrays, wherever they are. Each device joins its parts."""
    first = arrays[0]
    if isinstance(first, LazyArray):
        return _join_lazily(arrays, rows)
    on_devices = list(arrays)
    sharding = first.sharding
    if sharding.memory_kind == PINNED_HOST:
        sharding = sharding.with_memory_kind("device")
        on_devices = jax.device_put(on_devices, sharding)

    def join(arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate([arrays[index][row : row + 1] for index, row in rows])

    with dispatching(sharding.device_set):
        joined = jax.jit(join, out_shardings=sharding)(on_devices)
        return jax.device_put(joined, first.sharding)


def _join_lazily(arrays: Sequence[LazyArray], rows: Sequence[tuple[int, int]]) -> LazyArray:
    """`Join` of arrays that are read when they are used."""

    def read(part: tuple[slice, ...]) -> np.ndarray:
        of_layers, *others = part
        values = []
        for index, row in rows[of_layers]:
            values.append(arrays[index].read((slice(row, row + 1), *others)))
        return np.concatenate(values)

    return LazyArray((len(rows), *arrays[0].shape[1:]), arrays[0].dtype, read)
