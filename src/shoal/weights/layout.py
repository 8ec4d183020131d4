"""How a parameter lies on devices and in files, the windows in which it passes between the two, and
its way from files that several hosts read to all of their devices.

A file holds a parameter as `layers` tensors [rows, columns]; the array is [layers, rows, columns],
or [layers, columns, rows] if the kernel is transposed, without `layers` if it belongs to none. A
window is some rows of some layers. It is spread over the devices as runs of rows, one run for each
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shoal.mesh import Role
from shoal.model.parameters import ParamSpec
from shoal.weights.tensor_files import StoredParameter

WINDOW_BYTES = 32 << 20
"""Bytes of the files in one window of a process. A window is cast and moved, so about ten copies of
it exist at once."""


@dataclass(frozen=True)
class ParamLayout:
    """The layout of one parameter on devices. Compiled programs are cached by it."""

    mesh: Mesh
    spec: PartitionSpec
    declared: ParamSpec

    @classmethod
    def of(cls, declared: ParamSpec, role: Role) -> ParamLayout:
        """Returns the layout of a parameter on a role's devices."""
        return cls(role.mesh, declared.sharding(role).spec, declared)

    @classmethod
    def on(cls, array: jax.Array, declared: ParamSpec) -> ParamLayout:
        """Returns the layout that an array has now."""
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding):  # one device
            devices = np.asarray(list(array.devices()))
            sharding = NamedSharding(Mesh(devices, ("data",)), PartitionSpec())
        assert isinstance(sharding.mesh, Mesh)
        num_dims = len(declared.shape)
        entries = list(sharding.spec)
        entries.extend([None] * (num_dims - len(entries)))
        return cls(sharding.mesh, PartitionSpec(*entries), declared)

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec)

    @property
    def stacked(self) -> bool:
        return self.declared.stacked

    @property
    def row_dim(self) -> int:
        """The dimension of the array that corresponds to the rows of its files."""
        if self.declared.transposed:
            return len(self.spec) - 1
        return int(self.stacked)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the rows of the files."""
        return self._mesh_axes(self.row_dim)

    @property
    def column_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the columns of the files."""
        axes: tuple[str, ...] = ()
        for dim in range(int(self.stacked), len(self.spec)):
            if dim != self.row_dim:
                axes += self._mesh_axes(dim)
        return axes

    @property
    def copy_axes(self) -> tuple[str, ...]:
        """Mesh axes of more than one device that split neither the rows nor the columns of the
        files: all devices along them hold the same."""
        splitting = self.row_axes + self.column_axes
        return tuple(
            axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in splitting
        )

    @property
    def runs(self) -> PartitionSpec:
        """How a window [layers, rows, columns] is split into runs of rows, one for each device:
        first into the parts of `row_axes`, each of these into runs for `column_axes`, each of these
        into runs for `copy_axes`."""
        axes = self.row_axes + self.column_axes + self.copy_axes
        return PartitionSpec(None, axes or None, None)

    def _mesh_axes(self, dim: int) -> tuple[str, ...]:
        """Mesh axes that split a dimension of the array, without those of size 1."""
        entry = self.spec[dim]
        if entry is None:
            return ()
        names = (entry,) if isinstance(entry, str) else tuple(entry)
        return tuple(name for name in names if self.mesh.shape[name] > 1)

    def parts(self, axes: tuple[str, ...]) -> int:
        """Returns the number of devices along these axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def starts(self, layer: Any, row: Any) -> list[Any]:
        """Returns the index at which a window begins in a device's part of the array."""
        starts: list[Any] = [0] * len(self.spec)
        starts[self.row_dim] = row
        if self.stacked:
            starts[0] = layer
        return starts

    def sizes(self, height: int, shape: tuple[int, ...]) -> list[int]:
        """Returns the sizes of a window with one layer and `height` rows, in an array of this
        shape."""
        sizes = list(shape)
        sizes[self.row_dim] = height
        if self.stacked:
            sizes[0] = 1
        return sizes

    def windows(self, itemsize: int) -> Iterator[tuple[slice, slice]]:
        """Yields (layers, rows) of each window. Rows are counted within each of the parts that
        `row_axes` split them into; a window has the same rows of every part, so that a device
        writes only into its own part."""
        num_layers, num_rows, num_columns = self.declared.file_shape
        part_rows = num_rows // self.parts(self.row_axes)
        tensor_bytes = num_rows * num_columns * itemsize
        processes = {device.process_index for device in self.mesh.devices.flat}
        window_bytes = WINDOW_BYTES * len(processes)
        layer_step = 1
        if tensor_bytes <= window_bytes:
            layer_step = _even_step(num_layers, min(num_layers, window_bytes // tensor_bytes))
        windows_of_tensor = math.ceil(tensor_bytes / window_bytes)
        row_step = _even_step(part_rows, math.ceil(part_rows / windows_of_tensor))
        for layer in range(0, num_layers, layer_step):
            layers = slice(layer, min(layer + layer_step, num_layers))
            for row in range(0, part_rows, row_step):
                yield layers, slice(row, min(row + row_step, part_rows))


def _even_step(size: int, most: int) -> int:
    """Returns a step of at most `most` that divides `size`, unless all such steps are small: fewer
    sizes of windows mean fewer programs to compile."""
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
    """Returns the type in which values of `dtype` are moved: 16-bit floats as integers on CPU,
    where XLA would widen bfloat16 to float32 even to move it: a whole array to write a part of it
    (525 MB: 220 ms, as integers 3), and all that devices exchange (five times the cost)."""
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
    """Reads a parameter from files, and returns it as `dtype` in its layout."""
    dtype = np.dtype(dtype)
    shape = layout.declared.shape
    if is_small(layout, stored.dtype.itemsize):
        num_layers, num_rows, _ = stored.shape
        all_layers = slice(0, num_layers)
        all_rows = slice(0, num_rows)
        # What was read gets no name: it would be a second copy in memory while the array is made.
        values = layout.declared.from_file(stored.read(all_layers, all_rows)).astype(dtype)

        def shard(index: Any) -> np.ndarray:
            return values[index]

        return jax.make_array_from_callback(shape, layout.sharding, shard)
    array = zeros(shape, transfer_dtype(dtype, layout.mesh), layout.sharding)
    windows = list(layout.windows(stored.dtype.itemsize))
    # One window is read while the one before is moved; in a thread, because reading holds no lock.
    with ThreadPoolExecutor(1) as reader:

        def begin_reading(number: int) -> Future[jax.Array]:
            layers, rows = windows[number]
            return reader.submit(_put_rows, stored, layout, layers, rows)

        ahead = begin_reading(0)
        for number, (layers, rows) in enumerate(windows):
            window = ahead.result()
            if number + 1 < len(windows):
                ahead = begin_reading(number + 1)
            moved = _move(window, layout, rows.stop - rows.start, stored.dtype, dtype)
            array = _write(array, moved, layers.start, rows.start, layout)
            del window, moved
            array.block_until_ready()  # else windows, and steps with collectives, would queue up
    return finished(array, layout.sharding, dtype)


def finished(array: jax.Array, sharding: NamedSharding, dtype: np.dtype) -> jax.Array:
    """Returns an array that was moved in `transfer_dtype` as `dtype`, in the same memory."""
    parts = [shard.data for shard in array.addressable_shards]
    if array.dtype != dtype:
        # By NumPy's views, because a compiled cast would need the memory twice.
        parts = [jax.device_put(np.asarray(part).view(dtype), part.sharding) for part in parts]
    # Compiled programs leave mesh axes of size 1 out of a sharding, which is then spelled
    # differently, and programs would be compiled again for it.
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts, dtype=dtype)


def _put_rows(
    stored: StoredParameter, layout: ParamLayout, layers: slice, rows: slice
) -> jax.Array:
    """Reads a window to the devices in the file's form, one run of rows for each device; the last
    runs are filled up."""
    _, all_rows, num_columns = stored.shape
    num_parts = layout.parts(layout.row_axes)
    part_rows = all_rows // num_parts
    height = rows.stop - rows.start
    devices_of_part = layout.mesh.size // num_parts
    run_rows = -(-height // devices_of_part)
    padded_height = run_rows * devices_of_part
    moved_dtype = transfer_dtype(stored.dtype, layout.mesh)

    def read(index: Any) -> np.ndarray:
        """Reads the run of one device."""
        start, stop, _ = index[1].indices(num_parts * padded_height)
        part, first = divmod(start, padded_height)
        last = first + stop - start
        origin = part * part_rows + rows.start
        wanted = slice(origin + min(first, height), origin + min(last, height))
        # The values are never used again, because JAX on CPU may keep this memory as the array.
        values = stored.read(layers, wanted).view(moved_dtype)
        num_missing = stop - start - values.shape[1]
        if not num_missing:
            return values
        return np.pad(values, ((0, 0), (0, num_missing), (0, 0)))

    shape = (layers.stop - layers.start, num_parts * padded_height, num_columns)
    sharding = NamedSharding(layout.mesh, layout.runs)
    return jax.make_array_from_callback(shape, sharding, read, moved_dtype)


@partial(jax.jit, static_argnums=(0, 1, 2))
def zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """Returns an array of zeros in a sharding."""
    return lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _move(
    block: jax.Array, layout: ParamLayout, height: int, stored: np.dtype, dtype: np.dtype
) -> jax.Array:
    """Moves a window from runs of rows to the array's layout, transposed and cast."""

    def local(x: jax.Array) -> jax.Array:
        """Converts one device's run to the device's part of the window."""
        if layout.copy_axes:
            x = lax.all_gather(x, layout.copy_axes, axis=1, tiled=True)
        if layout.column_axes:
            # The parts get a separate dimension: splitting within one dimension takes three times
            # as long on CPU.
            num_layers, num_rows, _ = x.shape
            by_part = x.reshape(num_layers, num_rows, layout.parts(layout.column_axes), -1)
            x = lax.all_to_all(by_part, layout.column_axes, split_axis=2, concat_axis=1, tiled=True)
            x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = lax.bitcast_convert_type(layout.declared.from_file(x[:, :height]), stored).astype(dtype)
        return lax.bitcast_convert_type(x, transfer_dtype(dtype, layout.mesh))

    return jax.shard_map(
        local, mesh=layout.mesh, in_specs=layout.runs, out_specs=layout.spec, check_vma=False
    )(block)


# A separate program, because in one with the transposition XLA writes element by element on CPU (81
# ms for 16 MiB; separately 12).
@partial(jax.jit, static_argnums=4, donate_argnums=0)
def _write(
    array: jax.Array, moved: jax.Array, layer: Any, row: Any, layout: ParamLayout
) -> jax.Array:
    """Writes a window into the array, whose buffer is donated, at the given layer and row."""

    def local(array: jax.Array, moved: jax.Array, layer: jax.Array, row: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(array, moved, layout.starts(layer, row))

    everywhere = PartitionSpec()
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec, layout.spec, everywhere, everywhere),
        out_specs=layout.spec,
        check_vma=False,
    )(array, moved, layer, row)


# Files in parts of another form to devices


Part = tuple[tuple[slice, ...], Callable[[], np.ndarray]]
"""(index of a part in an array, function that reads the part)."""


def assemble(
    parts: Iterable[Part], sharding: NamedSharding, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Returns the array that consists of these parts, which have the array's own dimensions. A
    process reads only the parts that its devices hold some of, each once; if the array is small,
    all parts."""
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
    return finished(assembled, sharding, dtype)


def _with_bounds(index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns an index with numbers as its bounds, in place of None."""
    return tuple(slice(*cut.indices(size)) for cut, size in zip(index, shape, strict=True))


def _intersection(first: Sequence[slice], second: Sequence[slice]) -> tuple[slice, ...] | None:
    """Returns the index of what two parts of an array share; None if they share nothing."""
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
    array."""
    return tuple(
        slice(cut.start - around.start, cut.stop - around.start)
        for cut, around in zip(index, outer, strict=True)
    )


@partial(jax.jit, donate_argnums=0)
def _paste(array: jax.Array, part: jax.Array, starts: list[Any]) -> jax.Array:
    """Writes a part into an array, whose buffer is donated."""
    return lax.dynamic_update_slice(array, part, starts)


# Devices to files


def collect(
    array: Any, layout: ParamLayout, layer: int, dtype: Any
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields one layer of a parameter in the file's form, in runs of rows: (number of the first
    row, values [rows, columns]). `dtype` is the type of the values."""
    if is_small(layout, array.dtype.itemsize):
        yield 0, layout.declared.to_file(np.asarray(array))[layer]
        return
    _, all_rows, _ = layout.declared.file_shape
    num_parts = layout.parts(layout.row_axes)
    devices_of_part = layout.parts(layout.column_axes)
    part_rows = all_rows // num_parts
    dtype = np.dtype(dtype)
    for layers, rows in layout.windows(max(array.dtype.itemsize, dtype.itemsize)):
        if not layers.start <= layer < layers.stop:
            continue
        height = rows.stop - rows.start
        window = _take(array, layer, rows.start, layout, height, dtype)
        padded_height = window.shape[1] // num_parts
        run_rows = padded_height // devices_of_part
        for shard in window.addressable_shards:
            if shard.replica_id:
                continue
            part, first = divmod(shard.index[1].start or 0, padded_height)
            last = min(first + run_rows, height)
            if first < last:
                row = part * part_rows + rows.start + first
                yield row, np.asarray(shard.data)[0, : last - first]


@partial(jax.jit, static_argnums=(3, 4, 5))
def _take(
    array: jax.Array, layer: Any, row: Any, layout: ParamLayout, height: int, dtype: np.dtype
) -> jax.Array:
    """Returns a window of one layer as runs of rows, split over `row_axes`, and each part over
    `column_axes`."""

    def local(array: jax.Array, layer: jax.Array, row: jax.Array) -> jax.Array:
        """Converts the window in one device's part of the array to the device's run."""
        part = lax.dynamic_slice(
            array, layout.starts(layer, row), layout.sizes(height, array.shape)
        )
        x = layout.declared.to_file(part).astype(dtype)
        if layout.column_axes:
            parts = layout.parts(layout.column_axes)
            x = lax.bitcast_convert_type(x, transfer_dtype(dtype, layout.mesh))
            x = jnp.pad(x, ((0, 0), (0, -height % parts), (0, 0)))
            x = x.reshape(1, parts, -1, x.shape[-1])
            x = lax.all_to_all(x, layout.column_axes, split_axis=1, concat_axis=3, tiled=True)
            x = lax.bitcast_convert_type(x.reshape(1, -1, x.shape[-1]), dtype)
        return x

    everywhere = PartitionSpec()
    split_axes = layout.row_axes + layout.column_axes
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec, everywhere, everywhere),
        out_specs=PartitionSpec(None, split_axes or None, None),
        check_vma=False,
    )(array, layer, row)
