"""How a parameter lies on devices and in files, the windows in which it passes between the two, and
its way from files that several hosts read to all of their devices.

Files hold a tensor for each index in the first dimensions of the array (`ParamSpec.indices`), for
example one for each layer; the dimensions after these are the tensor's own, of which files may have
the last two exchanged (`ParamSpec.transposed`). The first dimension of a tensor in files is its
rows, the others are its columns.

    array                          [layers, in, out]
    tensors in files               layers tensors [out, in]: rows are outputs, columns are inputs
    file order of the array        [layers, out, in]

A window is some rows of some tensors. It is spread over the devices as runs of rows, one run for
each device. Below, "file order" is the array with its dimensions in the order of files.

An example on four devices, of a tensor of 8 rows and 8 columns: the mesh axis "row" splits the rows
of the files, "col" the columns.

    device        read from files (`_put_rows`)    the array's layout (`_move`)
    row 0, col 0  rows 0, 1, all columns           rows 0 to 3, columns 0 to 3
    row 0, col 1  rows 2, 3, all columns           rows 0 to 3, columns 4 to 7
    row 1, col 0  rows 4, 5, all columns           rows 4 to 7, columns 0 to 3
    row 1, col 1  rows 6, 7, all columns           rows 4 to 7, columns 4 to 7

So each row is read once, and devices with the same rows in the end exchange columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shoal.mesh import Role
from shoal.model.parameters import ParamSpec
from shoal.weights.tensor_files import StoredParameter, grid

WINDOW_BYTES = 32 << 20
"""Bytes of the files in one window of a process. A window is cast and moved, so about ten copies of
it exist at once."""


@dataclass(frozen=True)
class ParamLayout:
    """The layout of one parameter on devices. Compiled programs are cached by it."""

    mesh: Mesh
    spec: PartitionSpec  # one entry for each dimension of the array
    declared: ParamSpec  # the parameter's shape, and its tensors in files

    @classmethod
    def of(cls, declared: ParamSpec, role: Role) -> ParamLayout:
        """Returns the layout of a parameter on a role's devices."""
        return cls(role.mesh, declared.sharding(role).spec, declared)

    @classmethod
    def on(cls, array: jax.Array, declared: ParamSpec) -> ParamLayout:
        """Returns the layout of an array that is on devices already. `declared`: the spec of the
        parameter that the array holds. An array without a mesh must be on one device."""
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding):  # one device
            devices = np.asarray(list(array.devices()))
            sharding = NamedSharding(Mesh(devices, ("data",)), PartitionSpec())
        # an array has a mesh of devices, not an abstract one
        assert isinstance(sharding.mesh, Mesh)
        num_dims = len(declared.shape)
        entries = list(sharding.spec)
        entries.extend([None] * (num_dims - len(entries)))
        return cls(sharding.mesh, PartitionSpec(*entries), declared)

    @property
    def by_columns(self) -> ParamLayout:
        """The layout of the same array, for files that have the columns of each tensor as rows."""
        exchanged = replace(self.declared, transposed=not self.declared.transposed)
        return replace(self, declared=exchanged)

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec)

    @property
    def row_dim(self) -> int:
        """The dimension in file order that is the rows of each tensor. The dimensions before it
        number the tensors, those after it are the columns."""
        return len(self.declared.indices)

    @property
    def file_axes(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension in file order the mesh axes that split it, without axes of size 1."""
        axes = []
        for entry in self.declared.in_file_order(tuple(self.spec)):
            names: tuple[str, ...] = ()
            if isinstance(entry, str):
                names = (entry,)
            elif entry is not None:
                names = tuple(entry)
            axes.append(tuple(name for name in names if self.mesh.shape[name] > 1))
        return tuple(axes)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the rows of the files."""
        return self.file_axes[self.row_dim]

    @property
    def split_columns(self) -> list[tuple[int, tuple[str, ...]]]:
        """(dimension in file order, mesh axes that split it) for each dimension of the columns that
        is split."""
        columns = []
        for dim, axes in enumerate(self.file_axes):
            if dim > self.row_dim and axes:
                columns.append((dim, axes))
        return columns

    @property
    def column_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the columns of the files."""
        names: tuple[str, ...] = ()
        for _, axes in self.split_columns:
            names += axes
        return names

    @property
    def copy_axes(self) -> tuple[str, ...]:
        """Mesh axes of more than one device that split no dimension: all devices along them hold
        the same."""
        splitting: set[str] = set()
        for axes in self.file_axes:
            splitting.update(axes)
        return tuple(
            axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in splitting
        )

    @property
    def run_axes(self) -> tuple[str, ...]:
        """Mesh axes over which rows are split if each device has a run of its own: all of them, in
        the order of `runs`."""
        return self.row_axes + self.column_axes + self.copy_axes

    def runs(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns how a window in file order is split into runs of rows: its rows over the mesh
        axes `axes`, and the dimensions that number tensors like those of the array.

        With `row_axes + column_axes + copy_axes`, each device has one run: rows are first split
        into the parts of `row_axes`, each of these into runs for `column_axes`, each of these into
        runs for `copy_axes`. With `row_axes + column_axes`, all devices along `copy_axes` have the
        same run.
        """
        entries: list[Any] = [None] * len(self.file_axes)
        for dim in range(self.row_dim):
            entries[dim] = self.file_axes[dim] or None
        entries[self.row_dim] = axes or None
        return PartitionSpec(*entries)

    def parts(self, axes: tuple[str, ...]) -> int:
        """Returns the number of devices along these axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def window_space(self) -> tuple[int, ...]:
        """Sizes, within the part of the array that a device holds, of the dimensions in which
        windows are cut: those that number tensors, then the rows."""
        shape = self.declared.in_file_order(self.declared.shape)
        sizes = []
        for dim in range(self.row_dim + 1):
            sizes.append(shape[dim] // self.parts(self.file_axes[dim]))
        return tuple(sizes)

    def starts(self, first: Sequence[Any]) -> list[Any]:
        """Returns the position in a device's part of the array at which a window begins, in the
        order of the array's dimensions. `first` is the first index of the window in each dimension
        of `window_space`."""
        in_file_order = [0] * len(self.spec)
        in_file_order[: self.row_dim + 1] = first
        return list(self.declared.in_file_order(in_file_order))

    def sizes(self, height: int, shape: tuple[int, ...]) -> list[int]:
        """Returns the shape of a window of `height` rows of one tensor, in the order of the array's
        dimensions. `shape` is the shape of a device's part of the array."""
        in_file_order = list(self.declared.in_file_order(shape))
        in_file_order[: self.row_dim] = [1] * self.row_dim
        in_file_order[self.row_dim] = height
        return list(self.declared.in_file_order(in_file_order))

    def windows(self, itemsize: int) -> Iterator[tuple[slice, ...]]:
        """Yields the windows that cover the array, each as an index in `window_space`, in order. A
        window has the same tensors and rows of the part of every device, so that a device writes
        only into its own part.

        A window has about WINDOW_BYTES of the files for each process, all devices together: several
        tensors if they are small, else some rows of one. `itemsize`: bytes of a value.
        """
        index_sizes = self.window_space[:-1]
        part_rows = self.window_space[-1]
        # Devices along the axes of the first dimensions hold different tensors.
        num_tensors_at_once = math.prod(self.parts(axes) for axes in self.file_axes[: self.row_dim])
        tensor_bytes = math.prod(self.declared.tensor_shape) * itemsize * num_tensors_at_once
        processes = {device.process_index for device in self.mesh.devices.flat}
        window_bytes = WINDOW_BYTES * len(processes)
        windows_of_tensor = math.ceil(tensor_bytes / window_bytes)
        steps = [_even_step(part_rows, math.ceil(part_rows / windows_of_tensor))]
        most_tensors = max(1, window_bytes // tensor_bytes)
        # From the last dimension on: only a window with all of one takes more of the one before.
        for size in reversed(index_sizes):
            steps.insert(0, _even_step(size, min(size, most_tensors)))
            most_tensors = max(1, most_tensors // size)
        return grid(self.window_space, steps)


def _even_step(size: int, most: int) -> int:
    """Returns the step in which `size` is cut, at most `most`: the largest that divides `size`,
    because fewer sizes of windows mean fewer programs to compile; but `most` itself if that step is
    at most half of it."""
    divisor = most
    while size % divisor:
        divisor -= 1
    if 2 * divisor > most:
        return divisor
    return most


SMALL_BYTES = 32 << 20
"""Largest parameter (in bytes) that one process lays out on the host, so that no program is
compiled for norms and tiny models."""


def transfer_dtype(dtype: Any, mesh: Any) -> np.dtype:
    """Returns the type in which values of `dtype` are moved between devices: uint16 for 16-bit
    floats on a CPU, else `dtype`. XLA for CPU would widen a bfloat16 array to float32 even to write
    a part of it (525 MB: 220 ms, as integers 3) and in exchanges between devices (five times the
    cost)."""
    dtype = np.dtype(dtype)
    if dtype.itemsize == 2 and mesh.devices.flat[0].platform == "cpu":
        return np.dtype(np.uint16)
    return dtype


def is_small(layout: ParamLayout, itemsize: int) -> bool:
    """True for a parameter that one process lays out on the host, without compiled programs."""
    num_bytes = math.prod(layout.declared.shape) * itemsize
    return num_bytes <= SMALL_BYTES and not layout.mesh.is_multi_process


# Files to devices


def load_sharded(stored: StoredParameter, layout: ParamLayout, dtype: Any) -> jax.Array:
    """Reads a parameter from files, and returns the array on devices, in `layout` and of `dtype`.
    Each row is read by one process, and goes from there to the devices, so all processes must call
    it."""
    columns = stored.by_columns
    if columns is not None:
        # A run of rows would be a part of each column, and a run's device would read all columns.
        stored = columns
        layout = layout.by_columns
    dtype = np.dtype(dtype)
    shape = layout.declared.shape
    if is_small(layout, stored.dtype.itemsize):
        everything = [slice(0, size) for size in stored.shape[: layout.row_dim + 1]]
        # What was read gets no name: it would be a second copy in memory while the array is made.
        values = layout.declared.transpose(stored.read(everything)).astype(dtype)

        def shard(index: Any) -> np.ndarray:
            return values[index]

        return jax.make_array_from_callback(shape, layout.sharding, shard)
    array = zeros(shape, transfer_dtype(dtype, layout.mesh), layout.sharding)
    windows = list(layout.windows(stored.dtype.itemsize))
    # One window is read while the one before is moved; in a thread, because reading holds no lock.
    with ThreadPoolExecutor(1) as reader:

        def begin_reading(number: int) -> Future[jax.Array]:
            return reader.submit(_put_rows, stored, layout, windows[number])

        ahead = begin_reading(0)
        for number, cuts in enumerate(windows):
            in_runs = ahead.result()
            if number + 1 < len(windows):
                ahead = begin_reading(number + 1)
            height = cuts[-1].stop - cuts[-1].start
            in_layout = _move(in_runs, layout, height, stored.dtype, dtype)
            array = _write(array, in_layout, [cut.start for cut in cuts], layout)
            del in_runs, in_layout
            array.block_until_ready()  # else windows, and steps with collectives, would queue up
    return in_final_type(array, layout.sharding, dtype)


def in_final_type(array: jax.Array, sharding: NamedSharding, dtype: np.dtype) -> jax.Array:
    """Returns an array that was moved in `transfer_dtype` as an array of `dtype` with this
    sharding. The memory stays the same. An array that has `dtype` already only gets the sharding's
    spelling."""
    parts = [shard.data for shard in array.addressable_shards]
    if array.dtype != dtype:
        # By NumPy's views, because a compiled cast would need the memory twice.
        parts = [jax.device_put(np.asarray(part).view(dtype), part.sharding) for part in parts]
    # Compiled programs leave mesh axes of size 1 out of a sharding, which is then spelled
    # differently, and programs would be compiled again for it.
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts, dtype=dtype)


def _put_rows(stored: StoredParameter, layout: ParamLayout, window: tuple[slice, ...]) -> jax.Array:
    """Reads a window (an index in `window_space`) to the devices, and returns it in file order and
    in `transfer_dtype`, split into one run of rows for each device. If the rows do not divide
    evenly, the last runs end with zeros."""
    row_dim = layout.row_dim
    num_parts = [layout.parts(axes) for axes in layout.file_axes[: row_dim + 1]]
    sizes = [cut.stop - cut.start for cut in window]
    height = sizes[-1]
    # the devices that share a part's rows: each reads one run of them
    runs_of_part = layout.mesh.size // math.prod(num_parts)
    padded_height = -(-height // runs_of_part) * runs_of_part
    moved_dtype = transfer_dtype(stored.dtype, layout.mesh)
    # The sizes of the window, with its rows filled up, in the part of one device, and in all parts.
    padded_sizes = list(sizes)
    padded_sizes[row_dim] = padded_height
    all_sizes = [size * parts for size, parts in zip(padded_sizes, num_parts, strict=True)]

    def read(index: Any) -> np.ndarray:
        """Reads the run of one device; `index`: the run's place in the result."""
        wanted = []
        for dim, cut in enumerate(window):
            start, stop, _ = index[dim].indices(all_sizes[dim])
            # The index counts within the windows of all parts, filled up, one after the other. In
            # the files this part's window begins at `window_start`, and nothing is filled up.
            part, first_in_window = divmod(start, padded_sizes[dim])
            end_in_window = first_in_window + stop - start
            window_start = part * layout.window_space[dim] + cut.start
            first = window_start + min(first_in_window, sizes[dim])
            end = window_start + min(end_in_window, sizes[dim])
            wanted.append(slice(first, end))
        # The values are never used again, because JAX on CPU may keep this memory as the array.
        values = stored.read(wanted).view(moved_dtype)
        start, stop, _ = index[row_dim].indices(all_sizes[row_dim])
        num_missing = stop - start - values.shape[row_dim]
        if not num_missing:
            return values
        padding = [(0, 0)] * values.ndim
        padding[row_dim] = (0, num_missing)
        return np.pad(values, padding)

    shape = tuple(all_sizes) + stored.shape[row_dim + 1 :]
    sharding = NamedSharding(layout.mesh, layout.runs(layout.run_axes))
    return jax.make_array_from_callback(shape, sharding, read, moved_dtype)


@partial(jax.jit, static_argnums=(0, 1, 2))
def zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """Returns a new array of zeros of this shape, type and sharding, made on its devices."""
    return lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _move(
    block: jax.Array, layout: ParamLayout, height: int, stored: np.dtype, dtype: np.dtype
) -> jax.Array:
    """Returns a window in the array's layout, transposed and cast, in the `transfer_dtype` of
    `dtype`. `block`: the window in runs of rows, as `_put_rows` returns it. Devices exchange their
    runs, so all processes must call it. `height`: rows of the window in each part, without what
    fills up the runs. `stored`, `dtype`: types of the values before and after."""
    row_dim = layout.row_dim

    def local(x: jax.Array) -> jax.Array:
        """Converts one device's run to the device's part of the window."""
        if layout.copy_axes:
            x = lax.all_gather(x, layout.copy_axes, axis=row_dim, tiled=True)
        # From the last dimension, because its axes split the runs last.
        for dim, axes in reversed(layout.split_columns):
            # [rows of a run, columns] -> [rows of the runs of all `axes`, columns / parts]. The
            # parts get a separate dimension: splitting within one dimension takes three times as
            # long on CPU.
            x = _split_dimension(x, dim, layout.parts(axes))
            x = lax.all_to_all(x, axes, split_axis=dim, concat_axis=row_dim, tiled=True)
            x = lax.collapse(x, dim, dim + 2)
        x = layout.declared.transpose(lax.slice_in_dim(x, 0, height, axis=row_dim))
        # the bits moved as integers become values again, are cast, and become integers again
        x = lax.bitcast_convert_type(x, stored).astype(dtype)
        return lax.bitcast_convert_type(x, transfer_dtype(dtype, layout.mesh))

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=layout.runs(layout.run_axes),
        out_specs=layout.spec,
        check_vma=False,
    )(block)


def _split_dimension(x: jax.Array, dim: int, parts: int) -> jax.Array:
    """Returns the array with dimension `dim` split into two: the parts, and what each has. `parts`
    must divide its size."""
    shape = list(x.shape)
    shape[dim : dim + 1] = [parts, shape[dim] // parts]
    return x.reshape(shape)


# A separate program, because in one with the transposition XLA writes element by element on CPU (81
# ms for 16 MiB; separately 12).
@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _write(array: jax.Array, moved: jax.Array, first: list[Any], layout: ParamLayout) -> jax.Array:
    """Returns the array, whose buffer is donated (it must not be used again), with a window written
    into it. `moved`: the window, as `_move` returns it, of the array's type. `first`: the first
    index of the window in each dimension of `window_space`; each device writes there in its own
    part, and nothing is exchanged."""

    def local(part: jax.Array, window: jax.Array, first: list[jax.Array]) -> jax.Array:
        """Returns one device's part of the array with its part of the window."""
        return lax.dynamic_update_slice(part, window, layout.starts(first))

    everywhere = PartitionSpec()
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec, layout.spec, everywhere),
        out_specs=layout.spec,
        check_vma=False,
    )(array, moved, first)


# Files in parts of another form to devices


Part = tuple[tuple[slice, ...], Callable[[], np.ndarray]]
"""(index of a part in an array, function that reads the part)."""


def assemble(
    parts: Iterable[Part], sharding: NamedSharding, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Returns the array that consists of `parts`, which have the array's own dimensions and
    together cover the array; their values are cast to `dtype`. That the parts cover the array is
    not checked. A process reads only the parts that its devices need, each once; if the array is
    small (SMALL_BYTES), every process reads all of them."""
    dtype = np.dtype(dtype)
    if math.prod(shape) * dtype.itemsize <= SMALL_BYTES:
        whole = np.empty(shape, dtype)
        for index, read in parts:
            whole[index] = read()

        def shard(index: Any) -> np.ndarray:
            return whole[index]

        return jax.make_array_from_callback(shape, sharding, shard)
    indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
    moved_dtype = transfer_dtype(dtype, sharding.mesh)
    shards: dict[Any, tuple[slice, ...]] = {}
    arrays: dict[Any, jax.Array] = {}
    for device, index in indices.items():
        shards[device] = _with_bounds(index, shape)
        on_device = SingleDeviceSharding(device)
        arrays[device] = zeros(sharding.shard_shape(shape), moved_dtype, on_device)
    for index, read in parts:
        values = None  # read once, and only if a device of this process holds some of them
        pasted = []
        for device, shard_index in shards.items():
            common = _intersection(shard_index, index)
            if common is None:
                continue
            if values is None:
                values = read()
            in_part = _relative_to(common, index)
            in_shard = [cut.start for cut in _relative_to(common, shard_index)]
            data = np.ascontiguousarray(values[in_part], dtype).view(moved_dtype)
            arrays[device] = _paste(arrays[device], jax.device_put(data, device), in_shard)
            pasted.append(arrays[device])
        jax.block_until_ready(pasted)
    assembled = jax.make_array_from_single_device_arrays(
        shape, sharding, list(arrays.values()), dtype=moved_dtype
    )
    return in_final_type(assembled, sharding, dtype)


def _with_bounds(index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns an index with numbers as its bounds, in place of None."""
    return tuple(slice(*cut.indices(size)) for cut, size in zip(index, shape, strict=True))


def _intersection(first: Sequence[slice], second: Sequence[slice]) -> tuple[slice, ...] | None:
    """Returns the index of what two parts of an array have in common; None if they have nothing in
    common."""
    common = []
    for a, b in zip(first, second, strict=True):
        start = max(a.start, b.start)
        stop = min(a.stop, b.stop)
        if start >= stop:
            return None
        common.append(slice(start, stop))
    return tuple(common)


def _relative_to(index: Sequence[slice], outer: Sequence[slice]) -> tuple[slice, ...]:
    """Converts an index in an array to the index of the same values in the part `outer` of the
    array. The index lies within `outer`."""
    return tuple(
        slice(cut.start - around.start, cut.stop - around.start)
        for cut, around in zip(index, outer, strict=True)
    )


@partial(jax.jit, donate_argnums=0)
def _paste(array: jax.Array, part: jax.Array, starts: list[Any]) -> jax.Array:
    """Returns the array, whose buffer is donated, with a part written into it from the index
    `starts` on."""
    return lax.dynamic_update_slice(array, part, starts)


# Devices to files


def collect(
    array: Any, layout: ParamLayout, index: tuple[int, ...], dtype: Any
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields one of a parameter's tensors as files hold it, in runs of rows: (number of the first
    row, values). Each process yields the runs that its devices have, and all must go through all
    runs, because devices exchange them. `index` says which tensor, like the keys of
    `ParamSpec.names_by_index`. The values of a small parameter have the array's own type, the
    others have `dtype`."""
    if is_small(layout, array.dtype.itemsize):
        yield 0, layout.declared.transpose(np.asarray(array))[index]
        return
    row_dim = layout.row_dim
    # If mesh axes split the dimensions that number tensors: which part of each the tensor is in,
    # and its index within that part.
    wanted_parts = []
    first_index = []
    for dim, number in enumerate(index):
        part, number_in_part = divmod(number, layout.window_space[dim])
        wanted_parts.append(part)
        first_index.append(number_in_part)
    num_parts = layout.parts(layout.row_axes)
    runs_of_part = layout.parts(layout.column_axes)
    part_rows = layout.window_space[row_dim]
    dtype = np.dtype(dtype)
    # the wider of both types, because a window is cast from one to the other
    for cuts in layout.windows(max(array.dtype.itemsize, dtype.itemsize)):
        tensor_cuts = cuts[:row_dim]
        rows = cuts[row_dim]
        if not _contains(tensor_cuts, first_index):
            continue
        height = rows.stop - rows.start
        first = list(first_index)
        first.append(rows.start)
        window = _take(array, first, layout, height, dtype)
        padded_height = window.shape[row_dim] // num_parts
        run_rows = padded_height // runs_of_part
        for shard in window.addressable_shards:
            starts = [cut.start or 0 for cut in shard.index[: row_dim + 1]]
            # Skipped: copies of a run, and runs of other tensors (one for each part).
            if shard.replica_id or starts[:-1] != wanted_parts:
                continue
            # which part of the rows the run is in, and where its rows begin in the part's window
            part, first_row = divmod(starts[-1], padded_height)
            last_row = min(first_row + run_rows, height)
            if first_row < last_row:
                row = part * part_rows + rows.start + first_row
                # the run holds one tensor, so its index there is 0 in each dimension
                only_tensor = (0,) * row_dim
                yield row, np.asarray(shard.data)[only_tensor][: last_row - first_row]


def _contains(cuts: Sequence[slice], index: Sequence[int]) -> bool:
    """True if an index lies within a part of an array."""
    return all(cut.start <= number < cut.stop for cut, number in zip(cuts, index, strict=True))


@partial(jax.jit, static_argnums=(2, 3, 4))
def _take(
    array: jax.Array, first: list[Any], layout: ParamLayout, height: int, dtype: np.dtype
) -> jax.Array:
    """Returns a window of `height` rows of one tensor from the part of each device, in file order,
    as runs of rows split over `row_axes`, and each part over `column_axes`; with zeros at the end
    of a part, if its rows do not divide evenly. `first`: the first index of the window in each
    dimension of `window_space`. If mesh axes split a dimension that numbers tensors, the result has
    an index there for each of its parts."""
    row_dim = layout.row_dim

    def local(array: jax.Array, first: list[jax.Array]) -> jax.Array:
        """Converts the window in one device's part of the array to the device's run."""
        part = lax.dynamic_slice(array, layout.starts(first), layout.sizes(height, array.shape))
        x = layout.declared.transpose(part).astype(dtype)
        if layout.column_axes:
            # The exchange of `_move` backwards: [rows of all runs, columns / parts] -> [rows of a
            # run, columns].
            x = lax.bitcast_convert_type(x, transfer_dtype(dtype, layout.mesh))
            padding = [(0, 0)] * x.ndim
            padding[row_dim] = (0, -height % layout.parts(layout.column_axes))
            x = jnp.pad(x, padding)
            for dim, axes in layout.split_columns:
                x = _split_dimension(x, row_dim, layout.parts(axes))
                x = lax.all_to_all(x, axes, split_axis=row_dim, concat_axis=dim + 1, tiled=True)
                x = lax.collapse(x, row_dim, row_dim + 2)
            x = lax.bitcast_convert_type(x, dtype)
        return x

    everywhere = PartitionSpec()
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec, everywhere),
        out_specs=layout.runs(layout.row_axes + layout.column_axes),
        check_vma=False,
    )(array, first)
