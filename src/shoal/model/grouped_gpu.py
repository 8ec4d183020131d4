"""Products by groups on NVIDIA GPUs, by kernels in Pallas for Triton.

Rows are sorted by group, and each group has a matrix of its own: an expert's. XLA for GPU would
multiply all rows by all matrices. Here the rows of a group are cut into tiles, whose list
(`tiles_of`) is computed on the device once for all products of a layer. A program takes one tile
and some columns of the result: it reads the number of the tile's group from the list, and then
that group's matrix alone. A tile is not filled up in memory: a program masks the rows that are
beyond the end of its group, which belong to another tile.

The gradient of the rows is the same product with the transposed matrices. That of a matrix is the
sum over its group's rows, of which a program computes one part in float32: no two programs add to
the same numbers, so that a run has the same bits each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shoal.model.attention.trials import Pairs, fault_of, name_results

MIN_ROWS, MAX_ROWS = 16, 128
"""Least and most rows of a tile. A product of Triton's has at least 16 rows, and with more than 128
its sums do not fit the registers."""


class Sides(NamedTuple):
    """Sides of the parts of matrices that a program computes and goes through."""

    columns: int  # of the result, at once
    depth: int  # of the contracted dimension, in one turn of the loop
    warps: int


def _sides(rows: int, dtype: Any) -> Sides:
    """Returns the sides for tiles of so many rows. An H200 loads 128 rows by 128 columns and 64 in
    depth three times ahead: 96 KiB of its shared memory for each of two programs, and as much as an
    L4 has for one."""
    if dtype == jnp.float32:
        return Sides(64, 32, 4)
    return Sides(128, 64, 8 if rows > 64 else 4)


STAGES = 3
"""Turns of a loop for which Triton loads ahead."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """The sorted rows of E groups, cut into N tiles of at most `size` rows. Tiles beyond the last
    one that is used have no rows."""

    sizes: jax.Array  # int32[E]: the rows of each group
    groups: jax.Array  # int32[N]: the group of each tile
    starts: jax.Array  # int32[N]: its first row
    ends: jax.Array  # int32[N]: the row after its last
    size: int = field(metadata={"static": True})
    # Runs the kernels as plain JAX, on any device, for tests.
    interpret: bool = field(default=False, metadata={"static": True})


def tile_rows(num_rows: int, num_groups: int) -> int:
    """Returns the rows of a tile, a power of two: at least twice a group's average if that is
    small, as in decoding, so that most groups are one tile and their matrices are read once; for
    large groups at most a quarter, so that few of a last tile's rows are empty."""
    average = num_rows / num_groups
    size = MIN_ROWS
    while size < 64 and size < 2 * average:
        size *= 2
    while size < MAX_ROWS and size < average / 4:
        size *= 2
    return size


def tiles_of(sizes: jax.Array, num_rows: int, interpret: bool = False) -> Tiles:
    """Cuts groups into tiles: the first sizes[0] of `num_rows` sorted rows are those of group 0,
    the next sizes[1] those of group 1, and so on. The sizes, int32[E], may sum up to less."""
    num_groups = len(sizes)
    size = tile_rows(num_rows, num_groups)
    # Each tile has a row, and each group at most one tile that is not full.
    num_tiles = min(num_rows, num_rows // size + num_groups)
    row_ends = jnp.cumsum(sizes)
    tiles_of_group = -(-sizes // size)
    tile_ends = jnp.cumsum(tiles_of_group)
    numbers = jnp.arange(num_tiles, dtype=jnp.int32)
    # Counted: a search would be a loop, whose turns a GPU launches one by one.
    groups = (tile_ends <= numbers[:, None]).sum(1, dtype=jnp.int32)
    # A tile beyond the last one counts as one of the last group, after its end.
    groups = jnp.minimum(groups, num_groups - 1)
    number_in_group = numbers - (tile_ends - tiles_of_group)[groups]
    starts = (row_ends - sizes)[groups] + number_in_group * size
    ends = jnp.minimum(starts + size, row_ends[groups])
    return Tiles(sizes, groups, starts, ends, size, interpret)


def product(x: jax.Array, matrices: jax.Array, tiles: Tiles, out_dtype: Any) -> jax.Array:
    """Computes the rows of x[M, in] times the matrices of their groups, matrices[E, in, out] ->
    [M, out] of `out_dtype`. Rows that are in no group have undefined results. Matrices of 8 bits
    are widened to x's type after a part of them is loaded."""
    return _product(x, matrices, tiles, out_dtype, transposed=False)


def transposed_product(x: jax.Array, matrices: jax.Array, tiles: Tiles) -> jax.Array:
    """Computes `product` with the transposes: x[M, out] and matrices[E, in, out] -> [M, in], of x's
    type."""
    return _product(x, matrices, tiles, x.dtype, transposed=True)


def _product(
    x: jax.Array, matrices: jax.Array, tiles: Tiles, out_dtype: Any, transposed: bool
) -> jax.Array:
    """Computes `product` or, if `transposed`, `transposed_product`."""
    num_rows, depth = x.shape
    columns = matrices.shape[1] if transposed else matrices.shape[2]
    sides = _fitting(_sides(tiles.size, x.dtype), columns, depth)
    return pl.pallas_call(
        partial(_product_kernel, tiles.size, sides, transposed),
        jax.ShapeDtypeStruct((num_rows, columns), out_dtype),
        # Programs that run at the same time have the columns of few tiles, whose rows and matrices
        # then stay in the second-level cache.
        grid=(pl.cdiv(columns, sides.columns), len(tiles.groups)),
        interpret=tiles.interpret,
        name="grouped_product",
        compiler_params=triton.CompilerParams(num_warps=sides.warps, num_stages=STAGES),
        cost_estimate=_cost(num_rows, depth, columns),
    )(x, matrices, tiles.groups, tiles.starts, tiles.ends)


def outer_product(x: jax.Array, y: jax.Array, tiles: Tiles, out_dtype: Any) -> jax.Array:
    """Computes for each group the sum of its rows' outer products, x[M, in] and y[M, out] -> [E,
    in, out] of `out_dtype`, summed in float32. Rows that are in no group are not read."""
    num_rows, height = x.shape
    columns = y.shape[1]
    num_groups = len(tiles.sizes)
    rows_at_once = 16 if num_rows < 64 * num_groups else 64
    if x.dtype == jnp.float32:
        rows_at_once = min(32, rows_at_once)
    # Here rows are the contracted dimension, and x's columns those of the result's rows.
    sides = _fitting(_sides(MAX_ROWS, x.dtype), columns, rows_at_once)
    side = _part(height, sides.columns)
    ends = jnp.cumsum(tiles.sizes)
    return pl.pallas_call(
        partial(_outer_kernel, rows_at_once, side, sides.columns),
        jax.ShapeDtypeStruct((num_groups, height, columns), out_dtype),
        grid=(pl.cdiv(columns, sides.columns), pl.cdiv(height, side), num_groups),
        interpret=tiles.interpret,
        name="grouped_outer_product",
        compiler_params=triton.CompilerParams(num_warps=sides.warps, num_stages=STAGES),
        cost_estimate=_cost(num_rows, height, columns),
    )(x, y, ends - tiles.sizes, ends)


def _fitting(sides: Sides, columns: int, depth: int) -> Sides:
    """Returns sides that are not larger than they have to be for matrices of this size."""
    return sides._replace(columns=_part(columns, sides.columns), depth=_part(depth, sides.depth))


def _part(size: int, most: int) -> int:
    """Returns the side of a part of a matrix's side of `size`: a power of two, at least 16 as
    Triton's products need it, at most `most`."""
    return min(most, max(16, pl.next_power_of_2(size)))


def _cost(num_rows: int, depth: int, columns: int) -> pl.CostEstimate:
    """Returns the cost of a product by groups: that of the rows alone, without empty ones."""
    return pl.CostEstimate(
        flops=2 * num_rows * depth * columns, transcendentals=0, bytes_accessed=0
    )


def _product_kernel(
    size: int,
    sides: Sides,
    transposed: bool,
    x_ref: Any,
    matrices_ref: Any,
    groups_ref: Any,
    starts_ref: Any,
    ends_ref: Any,
    out_ref: Any,
) -> None:
    """Computes some columns of one tile of `size` rows, and writes them to `out_ref`."""
    first_column = pl.program_id(0) * sides.columns
    tile = pl.program_id(1)
    group = groups_ref[tile]
    start = starts_ref[tile]
    end = ends_ref[tile]
    num_columns = out_ref.shape[1]
    depth = x_ref.shape[1]

    def compute() -> None:
        def add(turn: jax.Array, total: jax.Array) -> jax.Array:
            """Adds what a part of the contracted dimension gives."""
            first = turn * sides.depth
            x = _load(x_ref, (start, size, end), (first, sides.depth, depth))
            columns = first_column, sides.columns, num_columns
            contracted = first, sides.depth, depth
            if transposed:
                part = _load(matrices_ref, columns, contracted, group).astype(x.dtype).T
            else:
                part = _load(matrices_ref, contracted, columns, group).astype(x.dtype)
            return total + jnp.dot(x, part, preferred_element_type=jnp.float32)

        zeros = jnp.zeros((size, sides.columns), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(depth, sides.depth), add, zeros)
        _store(out_ref, total, (start, size, end), (first_column, sides.columns, num_columns))

    # The last tiles may have no rows.
    pl.when(start < end)(compute)


def _outer_kernel(
    rows_at_once: int,
    height: int,
    width: int,
    x_ref: Any,
    y_ref: Any,
    starts_ref: Any,
    ends_ref: Any,
    out_ref: Any,
) -> None:
    """Computes a part of one group's sum of outer products, of so many rows and columns, and writes
    it to `out_ref`: zeros if the group has no rows."""
    first_column = pl.program_id(0) * width
    first_row = pl.program_id(1) * height
    group = pl.program_id(2)
    start = starts_ref[group]
    end = ends_ref[group]
    _, num_rows, num_columns = out_ref.shape

    def add(turn: jax.Array, total: jax.Array) -> jax.Array:
        """Adds the outer products of some of the group's rows."""
        rows = start + turn * rows_at_once, rows_at_once, end
        x = _load(x_ref, rows, (first_row, height, num_rows))
        y = _load(y_ref, rows, (first_column, width, num_columns))
        return total + jnp.dot(x.T, y, preferred_element_type=jnp.float32)

    zeros = jnp.zeros((height, width), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(end - start, rows_at_once), add, zeros)
    rows = first_row, height, num_rows
    _store(out_ref, total, rows, (first_column, width, num_columns), group)


def _load(ref: Any, rows: tuple, columns: tuple, *group: jax.Array) -> jax.Array:
    """Loads a part of a matrix: `rows` and `columns` are each (the first one, how many, the end of
    those that are read). Beyond an end there are zeros. `group`: the number of the matrix, if
    `ref` has several."""
    part = _part_at(ref, rows, columns, *group)
    mask = _mask(rows, columns)
    if mask is None:
        return triton.load(part)
    return triton.load(part, mask=mask, other=0)


def _store(ref: Any, values: jax.Array, rows: tuple, columns: tuple, *group: jax.Array) -> None:
    """Stores values in a part of a matrix, in its type; the arguments are those of `_load`. Nothing
    is written beyond an end."""
    part = _part_at(ref, rows, columns, *group)
    triton.store(part, values.astype(ref.dtype), mask=_mask(rows, columns))


def _part_at(ref: Any, rows: tuple, columns: tuple, *group: jax.Array) -> Any:
    first_row, height, _ = rows
    first_column, width, _ = columns
    return ref.at[(*group, pl.ds(first_row, height), pl.ds(first_column, width))]


def _mask(rows: tuple, columns: tuple) -> Any:
    """Returns bool[rows, columns]: which elements are before the ends; None if it is known that all
    are: if the end is a multiple of the part's side."""
    first_row, height, row_end = rows
    first_column, width, column_end = columns
    mask = None
    if not _divides(height, row_end):
        mask = (first_row + jnp.arange(height) < row_end)[:, None]
        mask = jnp.broadcast_to(mask, (height, width))
    if not _divides(width, column_end):
        in_columns = (first_column + jnp.arange(width) < column_end)[None]
        in_columns = jnp.broadcast_to(in_columns, (height, width))
        mask = in_columns if mask is None else mask & in_columns
    return mask


def _divides(side: int, end: Any) -> bool:
    """True if a matrix's side that ends at `end` consists of whole parts; an end that is known on
    the device alone may be any."""
    return isinstance(end, int) and end % side == 0


@lru_cache
def fault_on(device: Any, dtype: str, frozen: str, interpret: bool = False) -> str:
    """Returns what is wrong with the kernels on a device, for rows of type `dtype` and matrices of
    type `dtype` or `frozen`, such as int8; "" if nothing is. Takes seconds, once a process:
    compares products of random numbers with NumPy's, for rows that are in groups. `interpret` runs
    the kernels as plain JAX, on any device, for tests."""
    # No rows, rows of several tiles, a single row, some; and 9 that are in no group.
    group_sizes = [0, 150, 1, 40]
    count = sum(group_sizes)
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jax.device_put(jnp.asarray(rng.standard_normal(shape), dtype), device)

    x = draw(count + 9, 96)
    y = draw(count + 9, 144)
    matrices = draw(len(group_sizes), 96, 144)
    narrow = (8 * matrices).astype(frozen)

    def by_kernels(x: jax.Array, y: jax.Array, matrices: jax.Array, narrow: jax.Array) -> tuple:
        tiles = tiles_of(jnp.asarray(group_sizes, jnp.int32), len(x), interpret)
        return (
            product(x, matrices, tiles, x.dtype)[:count],
            product(x, narrow, tiles, x.dtype)[:count],
            transposed_product(y, matrices, tiles)[:count],
            outer_product(x, y, tiles, jnp.float32),
        )

    def by_numpy(x: np.ndarray, y: np.ndarray, matrices: np.ndarray, narrow: np.ndarray) -> tuple:
        groups = np.repeat(np.arange(len(group_sizes)), group_sizes)
        is_of_group = np.eye(len(group_sizes))[groups]  # [rows, groups]
        x, y = x[:count], y[:count]
        return (
            np.einsum("mi,mio->mo", x, matrices[groups]),
            np.einsum("mi,mio->mo", x, narrow[groups]),
            np.einsum("mo,mio->mi", y, matrices[groups]),
            np.einsum("me,mi,mo->eio", is_of_group, x, y, optimize=True),
        )

    def trial() -> Pairs:
        arrays = x, y, matrices, narrow
        wide = [np.asarray(array, np.float64) for array in arrays]
        exact = by_numpy(*wide)
        names = "products", "products of frozen matrices", "gradients of rows", "of matrices"
        return name_results(names, jax.jit(by_kernels)(*arrays), exact)

    return fault_of(trial, dtype)
