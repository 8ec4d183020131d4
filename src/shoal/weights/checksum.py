"""A checksum of parameters that does not depend on how they are split over devices."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.mesh import PINNED_HOST, dispatching
from shoal.model.parameters import Parameters, Stacks
from shoal.weights.tensor_files import grid

POSITIONS = 2**32
"""Number of elements of an array whose positions differ in 32 bits."""
PIECE_BYTES = 2**28
"""Most bytes that are on a device at once of an array outside of any device."""
FOLD = 8
"""Neighbouring elements that a CPU adds first."""
BY_LAYER = " by layer"
"""End of a checksum's text which does not depend on how layers are stacked."""


def checksum(parameters: Any) -> int:
    """Returns a checksum of 32 bits over the bits of every array of a tree; the same however the
    arrays are split over devices. It depends on the arrays' order in the tree, not on their names;
    None counts nothing. NumPy arrays are copied to a device in pieces; `LazyArray`s are read one by
    one, and then likewise; arrays in the host's memory of a device are copied to it one by one."""
    # Computed from the list of leaves: a tree with names that change, such as numbers of versions,
    # would be traced and compiled again.
    leaves = jax.tree.leaves(parameters)
    all_on_devices = True
    for leaf in leaves:
        if not isinstance(leaf, jax.Array) or _is_offloaded(leaf):
            all_on_devices = False
    with dispatching(_devices_of(leaves)):
        if all_on_devices:
            return int(_checksum(leaves))
        return sum(_leaf_sum(leaf, number) for number, leaf in enumerate(leaves)) % 2**32


def _leaf_sum(
    leaf: Any, number: int, whole: tuple[int, ...] | None = None, rows: Sequence[int] = ()
) -> int:
    """Returns what an array, wherever it is, adds to the checksum of a tree; the arguments after
    the first are those of `array_checksum`."""
    rows_array = np.array(rows, np.uint32) if rows else None
    if not isinstance(leaf, jax.Array):
        return host_checksum(np.asarray(leaf), number, whole, rows_array)
    if _is_offloaded(leaf):
        sharding: Any = leaf.sharding
        # one at a time: all of them might not fit on the devices
        leaf = jax.device_put(leaf, sharding.with_memory_kind("device"))
    return int(_array_sum(leaf, np.uint32(number), whole, rows=rows_array))


def _is_offloaded(array: jax.Array) -> bool:
    return array.sharding.memory_kind == PINNED_HOST


def weights_text(parameters: Any) -> str:
    """Returns the checksum of parameters as text, in the form that a run's records have, like
    `0x0012ab34`. Of a model whose layers are in several stacks it is the same whichever layers are
    stacked, and the text ends with BY_LAYER."""
    if not isinstance(parameters, Parameters) or not isinstance(parameters.blocks, Stacks):
        return f"{checksum(parameters):#010x}"
    stacks = parameters.blocks
    num_layers = sum(map(len, stacks.layers))
    total = checksum(replace(parameters, blocks=None))
    with dispatching(_devices_of(stacks)):
        for block, layers in zip(stacks.blocks, stacks.layers, strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(block):
                # As if one array had the parameter of all layers.
                number = zlib.crc32(jax.tree_util.keystr(path).encode())
                total += _leaf_sum(leaf, number, (num_layers, *leaf.shape[1:]), layers)
    return f"{total % 2**32:#010x}{BY_LAYER}"


def _devices_of(tree: Any) -> set[Any]:
    """Returns the devices that hold any part of a tree's arrays."""
    devices: set[Any] = set()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            devices |= leaf.sharding.device_set
    return devices


def same_weights(text: str, other: str) -> bool | None:
    """Returns whether two texts of `weights_text` are of the same weights; None if that is not
    known, because only one of them is BY_LAYER: earlier versions of Shoal made no such texts."""
    if text.endswith(BY_LAYER) != other.endswith(BY_LAYER):
        return None
    return text == other


def types_text(parameters: Any) -> str:
    """Returns the distinct types of the arrays as text, sorted, like `bfloat16, float32`. Equal
    values of different types have different checksums."""
    return ", ".join(sorted({leaf.dtype.name for leaf in jax.tree.leaves(parameters)}))


def host_checksum(
    array: np.ndarray,
    number: int,
    whole: tuple[int, ...] | None = None,
    rows: np.ndarray | None = None,
) -> int:
    """Returns what a NumPy array adds to the checksum of a tree (`array_checksum`, which has the
    same arguments), in which it has this `number` (from 0), computed piece by piece, because a
    single device might not have room for an array that is usually split over devices."""
    most_elements = PIECE_BYTES // array.dtype.itemsize
    # The last axes are whole, the first that does not fit is cut, and those before it have step 1.
    steps = []
    for axis, size in enumerate(array.shape):
        elements_of_index = math.prod(array.shape[axis + 1 :])
        steps.append(max(1, min(size, most_elements // max(1, elements_of_index))))
    total = 0
    for piece in grid(array.shape, steps):
        start = np.array([cut.start for cut in piece], np.uint32)
        of_piece = None if rows is None else rows[piece[0]]
        values = np.asarray(array[piece])
        total += int(_array_sum(values, np.uint32(number), whole or array.shape, start, of_piece))
    return total % 2**32


@jax.jit
def _checksum(leaves: list[jax.Array]) -> jax.Array:
    """Returns the sum of the `array_checksum` of all leaves."""
    # A function of single arrays, which is traced once for arrays of one shape, for both sums of a
    # checkpoint: that was a sixth of what a tiny run traces.
    total = jnp.uint32(0)
    for number, leaf in enumerate(leaves):
        total = jnp.add(total, _array_sum(leaf, jnp.uint32(number)))
    return total


def array_checksum(
    array: jax.Array,
    number: jax.Array,
    whole: tuple[int, ...] | None = None,
    start: jax.Array | None = None,
    rows: jax.Array | None = None,
) -> jax.Array:
    """Returns what an array adds to the checksum of a tree, in which it has this number (uint32,
    from 0). If `array` is a piece, `whole` is the shape of the whole array and `start` the piece's
    first index in it (uint32, by axis); the result is then what the piece adds. `rows` (uint32) are
    the indices in the whole array of what the piece has along the first axis, if these do not
    follow each other. KeyError unless an element has 1, 2 or 4 bytes.

    Each element's bits are first mixed with its position (one to one), so that any change of one
    element, and any exchange of two, changes the sum. Sums of integers have no rounding, hence do
    not depend on order.
    """

    def index(axis: int) -> jax.Array:
        """Returns each element's index along an axis, in the whole array."""
        if axis == 0 and rows is not None:
            return jax.lax.broadcast_in_dim(rows, array.shape, (0,))
        indices = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        return indices if start is None else indices + start[axis]

    shape = whole or array.shape
    bits_dtype = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, bits_dtype)
    # + 1, because `mixed` keeps 0: array 0 would mix no number into its positions
    number = mixed(number + jnp.uint32(1))
    position = jnp.zeros(array.shape, jnp.uint32)
    # positions begin again at 0, so the index of the first axis is mixed in
    if math.prod(shape) > POSITIONS:
        number = mixed(number + index(0))
    for axis, size in enumerate(shape):
        position = position * jnp.uint32(size) + index(axis)
    terms = mixed(bits.astype(jnp.uint32) ^ mixed(position + number))
    return jax.lax.platform_dependent(terms, cpu=_fold_and_sum, default=jnp.sum)


_array_sum = jax.jit(array_checksum, static_argnames="whole")


def _fold_and_sum(terms: jax.Array) -> jax.Array:
    """Returns the sum of all terms. XLA for CPU sums a whole array element by element, at 2.4 ns
    each; a few neighbours it adds by vectors, at 0.35 ns."""
    size = math.gcd(FOLD, terms.shape[-1]) if terms.ndim else 1
    if size > 1:
        folded = jnp.sum(terms.reshape(*terms.shape[:-1], -1, size), axis=-1)
        terms = jax.lax.optimization_barrier(folded)  # else XLA makes one sum of both
    return jnp.sum(terms)


def mixed(x: jax.Array) -> jax.Array:
    """Mixes bits by the finaliser of MurmurHash3: uint32 -> uint32, one to one, so that each bit of
    the input changes about half of the output's."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
