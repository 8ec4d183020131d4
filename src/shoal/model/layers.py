"""How a sampler holds the layers of a model: stacked in one array, or each in its own arrays; and
access to single layers.

A trainer stacks layers of one kind along a first dimension (`Architecture.stacks`). A sampler does
the same if its arrays may be the trainer's own, which costs no copy; or it has separate arrays for
each layer, if its compiler reads those faster (`ffn_chunks` decides). Programs read either form
through `by_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from shoal.mesh import Role
from shoal.mesh.programs import CHUNKED_OPTIONS
from shoal.model.architecture import Architecture, StackLayers
from shoal.model.parameters import Block, Parameters, ParamSpec, Stacks, param_specs

if TYPE_CHECKING:
    from shoal.model.transformer import Model

FFN_CHUNK_BYTES = 16 << 20
"""Most bytes that one array of a TPU's sampler has of a device's part of a feed-forward matrix: as
much is copied into on-chip memory while the product before is computed. A matrix of at most two
such chunks is not split."""


def ffn_chunks(a: Architecture, role: Role, dtype: Any) -> int:
    """Returns how a sampler on these devices holds each feed-forward matrix. 0: all layers are
    stacked; 1: one array a layer; n > 1: each layer's matrix is split into n chunks of columns. It
    is 1 on a GPU and 0 on a CPU; on a TPU it depends on the matrix.

    XLA for GPU copies nearly all of a layer out of stacked weights before its products, at every
    token; XLA for TPU reads them in place, but copies no part of them into on-chip memory ahead. By
    its account, with waits for copies, 70B on 8 v5p takes 10.4 ms a token in 4 chunks, 13.4 with
    separate layers and 14.9 stacked; 8B on one v6e 14.3 in 8 chunks, 17.2 and 18.0 (int8: 10.8 with
    separate layers, 18.7 stacked). Weights that are frozen, or in the trainer's float32, stay
    stacked on TPUs: on one mesh the sampler reads the trainer's array.
    """
    if role.device_kind not in CHUNKED_OPTIONS:
        # 1 on a GPU, 0 on a CPU or an unknown TPU
        return int(role.platform == "gpu")
    if a.quantised and not a.adapter:
        # Quantised arrays are made for the sampler alone. A part of a matrix of 8 bits is not
        # copied ahead.
        return 1
    if a.experts is not None:
        # The kernels that multiply experts read whole arrays: of stacked ones XLA copies all layers
        # out before the loop over tokens, which takes as much memory as the experts once more.
        return 1
    itemsize = jnp.dtype(dtype).itemsize
    widths = set()
    for block in stacked_blocks(param_specs(a).blocks):
        # One array [n, F, D]: not quantised, and without a bias.
        is_one_matrix = isinstance(block.down, ParamSpec)
        # An adapter may be on other matrices alone.
        if not is_one_matrix or a.adapter or itemsize != 2:
            return 0
        widths.add(block.down.shape[1])
    if len(widths) > 1:
        return 0
    hidden_size = a.hidden_size
    # each device's part of the inner features
    width = widths.pop() // role.tensor
    num_chunks = 1
    while hidden_size * width * itemsize > num_chunks * FFN_CHUNK_BYTES:
        num_chunks *= 2
    # Two chunks or fewer are not worth a split, see FFN_CHUNK_BYTES.
    if num_chunks > 2 and width % num_chunks == 0:
        return num_chunks
    return 0


def published_specs(model: Model) -> Parameters:
    """Returns the specs of the parameters as a sampler holds them: `param_specs`, whose block has
    all layers stacked, if `model.ffn_chunks` is 0; else the same with a tuple of L blocks. If it is
    above 1, a feed-forward matrix has a tuple of so many specs, one a chunk."""
    specs = param_specs(model.architecture)
    num_chunks = model.ffn_chunks
    if not num_chunks:
        return specs
    layers = []
    for block in stacked_blocks(specs.blocks):
        layers.append(jax.tree.map(partial(_unstacked_spec, num_chunks=num_chunks), block))
    by_number: dict[int, Any] = {}
    for stack, layer in zip(model.architecture.stacks, layers, strict=True):
        by_number |= dict.fromkeys(stack.numbers, layer)
    return replace(specs, blocks=in_order(by_number))


def _unstacked_spec(spec: ParamSpec, num_chunks: int) -> ParamSpec | tuple[ParamSpec, ...]:
    """Returns the spec of one layer of a stacked parameter. If `num_chunks` is above 1, a
    feed-forward matrix (one with the axis `mlp`) gets a tuple of so many specs, one a chunk.
    `num_chunks` is 1 or more."""
    shape = list(spec.shape[1:])
    axes = spec.axes[1:]
    layer = replace(spec, shape=tuple(shape), axes=axes, indices=spec.indices[1:], layers=range(0))
    if num_chunks == 1 or "mlp" not in axes:
        return layer
    shape[axes.index("mlp")] //= num_chunks
    return (replace(layer, shape=tuple(shape)),) * num_chunks


def split_layers(
    stacked: jax.Array, spec: ParamSpec, num_chunks: int, tensor: int
) -> tuple[Any, ...]:
    """Splits a stacked parameter into a tuple of its L layers. Each is an array; or, if
    `num_chunks` is above 1 and the parameter is a feed-forward matrix (one with the axis `mlp`), a
    tuple of `num_chunks` equal parts of that matrix.

    A chunk is made of an equal share of what each of the `tensor` devices holds, so that devices
    exchange nothing: if two devices hold columns 0 to 3 and 4 to 7 of a matrix, its two chunks are
    columns 0, 1, 4, 5 and 2, 3, 6, 7.
    """
    if num_chunks == 1 or "mlp" not in spec.axes:
        return tuple(stacked)
    mlp_axis = spec.axes.index("mlp")
    before = stacked.shape[:mlp_axis]
    after = stacked.shape[mlp_axis + 1 :]
    # [L, .., F, ..] -> [L, .., devices, chunks, columns, ..]
    by_chunk = stacked.reshape(*before, tensor, num_chunks, -1, *after)
    chunks = []  # of each chunk: a tuple of L arrays
    for number in range(num_chunks):
        # Devices are at `mlp_axis`, chunks at the next one.
        chunk = jax.lax.index_in_dim(by_chunk, number, mlp_axis + 1, keepdims=False)
        chunks.append(tuple(chunk.reshape(*before, -1, *after)))
    # From tuples by chunk to tuples by layer.
    return tuple(zip(*chunks, strict=True))


def unstack_layers(a: Architecture, parameters: Parameters) -> Parameters:
    """Converts parameters with stacked blocks, each leaf of which is a tuple of layers (from
    `split_layers`), to parameters with a tuple of L blocks."""

    def is_split(leaf: Any) -> bool:
        return isinstance(leaf, tuple)

    by_number: dict[int, Block] = {}
    for stack, block in zip(a.stacks, stacked_blocks(parameters.blocks), strict=True):
        for index, number in enumerate(stack.numbers):
            by_number[number] = jax.tree.map(itemgetter(index), block, is_leaf=is_split)
    return replace(parameters, blocks=in_order(by_number))


def stacked_blocks(blocks: Block | Stacks) -> tuple[Block, ...]:
    """Returns the block of each stack of layers, in the order of `Architecture.stacks`."""
    return blocks.blocks if isinstance(blocks, Stacks) else (blocks,)


def stacked_again(blocks: Block | Stacks, new: Sequence[Block]) -> Block | Stacks:
    """Returns the blocks `new`, one a stack, in the form of `blocks`: the inverse of
    `stacked_blocks`."""
    return replace(blocks, blocks=tuple(new)) if isinstance(blocks, Stacks) else new[0]


def layers_of_stacks(blocks: Block | Stacks) -> StackLayers:
    """Returns the numbers of the layers of each stack; () for a single block without leaves."""
    if isinstance(blocks, Stacks):
        return blocks.layers
    leaves = jax.tree.leaves(blocks)
    return (tuple(range(leaves[0].shape[0])),) if leaves else ()


Join = Callable[[Sequence[Any], Sequence[tuple[int, int]]], Any]
"""(leaves of several stacks, (index of the leaf, row in it) of each layer) -> one leaf, which has
these rows."""


def restacked(blocks: Block | Stacks, wanted: StackLayers, join: Join) -> Block | Stacks:
    """Returns the same layers in other stacks: `wanted` has the numbers of the layers of each.
    Stacks that are in both stay as they are. ValueError if these are not the same layers, or if a
    new stack would have layers with different parameters."""
    held = layers_of_stacks(blocks)
    stacks = stacked_blocks(blocks)
    found: dict[int, tuple[int, int]] = {}  # number of a layer -> (its stack, row in that)
    for stack, numbers in enumerate(held):
        for row, number in enumerate(numbers):
            found[number] = stack, row
    if sorted(number for numbers in wanted for number in numbers) != sorted(found):
        raise ValueError(f"stacks of the layers {held} cannot be made stacks of {wanted}")
    new = []
    for numbers in wanted:
        if numbers in held:
            new.append(stacks[held.index(numbers)])
            continue
        sources = sorted({found[number][0] for number in numbers})
        rows = []
        for number in numbers:
            stack, row = found[number]
            rows.append((sources.index(stack), row))

        def join_leaves(*leaves: Any, rows: Sequence[tuple[int, int]] = tuple(rows)) -> Any:
            return join(leaves, rows)

        old_stacks = [stacks[stack] for stack in sources]
        new.append(jax.tree.map(join_leaves, *old_stacks))
    return new[0] if len(new) == 1 else Stacks(tuple(new), wanted)


def by_layer(model: Model, blocks: Any) -> tuple[Block, ...]:
    """Returns the L layers as a tuple of blocks, whether `blocks` is stacked or a tuple of layers
    already."""
    if isinstance(blocks, tuple):
        return blocks
    by_number: dict[int, Block] = {}
    for stack, block in zip(model.architecture.stacks, stacked_blocks(blocks), strict=True):
        by_number |= zip(stack.numbers, unstacked(block, len(stack.numbers)), strict=True)
    return in_order(by_number)


def in_order(by_number: Mapping[int, Any]) -> tuple[Any, ...]:
    """Returns what belongs to each layer, in the order of the layers' numbers, which count from
    0."""
    return tuple(by_number[number] for number in range(len(by_number)))


def unstacked(tree: Any, num_layers: int) -> tuple[Any, ...]:
    """Returns the layers of a tree whose leaves have `num_layers` in front, as a tuple of trees of
    the same form."""
    return tuple(jax.tree.map(itemgetter(number), tree) for number in range(num_layers))
