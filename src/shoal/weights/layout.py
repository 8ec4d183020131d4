"""How a parameter lies on devices and in files, the windows in which it passes between them, and
its way from the files of several hosts to all of their devices.

A file holds a parameter as `layers` tensors [rows, columns]; the array is [layers, columns, rows]
where the kernel is transposed, without `layers` where it has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
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
"""Bytes of the files in one window of a process. A window is cast and moved: about ten copies of it
exist at once."""


@dataclass(frozen=True)
class ParamLayout:
    """One parameter on the devices. A key of the compiled programs."""

    mesh: Mesh
    spec: PartitionSpec
    declared: ParamSpec

    @classmethod
    def of(cls, declared: ParamSpec, role: Role) -> ParamLayout:
        return cls(role.mesh, declared.sharding(role).spec, declared)

    @classmethod
    def on(cls, array: jax.Array, declared: ParamSpec) -> ParamLayout:
        """The layout that an array has."""
        sharding, dims = array.sharding, len(declared.shape)
        if not isinstance(sharding, NamedSharding):  # one device
            sharding = NamedSharding(
                Mesh(np.asarray([*array.devices()]), ("data",)), PartitionSpec()
            )
        assert isinstance(sharding.mesh, Mesh)
        spec = PartitionSpec(*sharding.spec, *[None] * (dims - len(sharding.spec)))
        return cls(sharding.mesh, spec, declared)

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec)

    @property
    def stacked(self) -> bool:
        return self.declared.stacked

    @property
    def row_dim(self) -> int:
        """The array's dimension that is the rows of its files."""
        return len(self.spec) - 1 if self.declared.transposed else int(self.stacked)

    @property
    def row_axes(self) -> tuple[str, ...]:
        return self._mesh_axes(self.row_dim)

    @property
    def column_axes(self) -> tuple[str, ...]:
        return tuple(
            axis
            for dim in range(self.stacked, len(self.spec))
            if dim != self.row_dim
            for axis in self._mesh_axes(dim)
        )

    @property
    def copy_axes(self) -> tuple[str, ...]:
        """Mesh axes along which every device holds the same."""
        return tuple(
            axis
            for axis, size in self.mesh.shape.items()
            if size > 1 and axis not in self.row_axes + self.column_axes
        )

    @property
    def runs(self) -> PartitionSpec:
        """A window [layers, rows, columns] split into runs of rows, one a device: the parts of
        `row_axes`, in each of them runs for `column_axes`, in each of these runs for
        `copy_axes`."""
        return PartitionSpec(
            None, (*self.row_axes, *self.column_axes, *self.copy_axes) or None, None
        )

    def _mesh_axes(self, dim: int) -> tuple[str, ...]:
        entry = self.spec[dim]
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(name for name in names if self.mesh.shape[name] > 1)

    def parts(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def starts(self, layer: Any, row: Any) -> list[Any]:
        """Where a window begins in a device's part of the array."""
        return [
            layer if dim == 0 and self.stacked else row if dim == self.row_dim else 0
            for dim in range(len(self.spec))
        ]

    def sizes(self, height: int, shape: tuple[int, ...]) -> list[int]:
        """The sizes of a window of one layer of an array of this shape."""
        return [
            1 if dim == 0 and self.stacked else height if dim == self.row_dim else size
            for dim, size in enumerate(shape)
        ]

    def windows(self, itemsize: int) -> Iterator[tuple[slice, slice]]:
        """Layers and rows of each window; rows are counted within each of the parts that the rows
        are split into, of which a window has the same: so a device writes into its own part
        alone."""
        layers, rows, columns = self.declared.file_shape
        part, tensor = rows // self.parts(self.row_axes), rows * columns * itemsize
        window = WINDOW_BYTES * len({device.process_index for device in self.mesh.devices.flat})
        at_once = _even_step(layers, min(layers, window // tensor)) if tensor <= window else 1
        height = _even_step(part, math.ceil(part / math.ceil(tensor / window)))
        for layer in range(0, layers, at_once):
            for row in range(0, part, height):
                yield (
                    slice(layer, min(layer + at_once, layers)),
                    slice(row, min(row + height, part)),
                )


def _even_step(size: int, most: int) -> int:
    """A step of at most `most` that divides `size` if there is a large one: each size of window is
    compiled."""
    divisor = next(step for step in range(most, 0, -1) if size % step == 0)
    return divisor if 2 * divisor > most else most


SMALL_BYTES = 32 << 20
"""Largest parameter that one process lays out on the host: no program is compiled for norms and
tiny models."""


def transfer_dtype(dtype: Any, mesh: Any) -> np.dtype:
    """The type in which values are moved. On CPU, XLA widens bfloat16 to float32 even for that: a
    whole array to write a part of it (525 MB: 220 ms, as integers 3), and all that devices exchange
    (five times the cost)."""
    dtype = np.dtype(dtype)
    return (
        np.dtype(np.uint16)
        if dtype.itemsize == 2 and mesh.devices.flat[0].platform == "cpu"
        else dtype
    )


def is_small(layout: ParamLayout, itemsize: int) -> bool:
    return (
        math.prod(layout.declared.shape) * itemsize <= SMALL_BYTES
        and not layout.mesh.is_multi_process
    )


# Files to devices


def load_sharded(stored: StoredParameter, layout: ParamLayout, dtype: Any) -> jax.Array:
    """The parameter as `dtype`, in its layout."""
    shape = layout.declared.shape
    if is_small(layout, stored.dtype.itemsize):
        layers, rows = (slice(0, size) for size in stored.shape[:2])
        values = layout.declared.from_file(stored.read(layers, rows)).astype(dtype)
        return jax.make_array_from_callback(shape, layout.sharding, lambda index: values[index])
    array = zeros(shape, transfer_dtype(dtype, layout.mesh), layout.sharding)
    windows = list(layout.windows(stored.dtype.itemsize))
    # One window is read while the one before it is on its way; a thread, because reading holds no
    # lock.
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(_put_rows, stored, layout, *windows[0])
        for number, (layers, rows) in enumerate(windows):
            block = ahead.result()
            if number + 1 < len(windows):
                ahead = reader.submit(_put_rows, stored, layout, *windows[number + 1])
            moved = _move(block, layout, rows.stop - rows.start, stored.dtype, np.dtype(dtype))
            array = _write(array, moved, layers.start, rows.start, layout)
            del block, moved
            array.block_until_ready()  # else windows, and steps with collectives, queue up
    return finished(array, layout.sharding, np.dtype(dtype))


def finished(array: jax.Array, sharding: NamedSharding, dtype: np.dtype) -> jax.Array:
    """An array of a carrier type as what it means, in the same memory."""
    parts = [shard.data for shard in array.addressable_shards]
    if array.dtype != dtype:  # through NumPy's views: a compiled cast would need the memory twice
        parts = [jax.device_put(np.asarray(part).view(dtype), part.sharding) for part in parts]
    # Compiled programs leave mesh axes of size 1 out of a sharding: another spelling, for which
    # others compile again.
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts, dtype=dtype)


def _put_rows(
    stored: StoredParameter, layout: ParamLayout, layers: slice, rows: slice
) -> jax.Array:
    """A window on the devices in the file's form, a run of rows each; the last runs are filled
    up."""
    _, all_rows, columns = stored.shape
    parts = layout.parts(layout.row_axes)
    height, sharers = rows.stop - rows.start, layout.mesh.size // parts
    moved = transfer_dtype(stored.dtype, layout.mesh)
    padded = -(-height // sharers) * sharers

    def read(index: Any) -> np.ndarray:
        start, stop, _ = index[1].indices(parts * padded)
        part, first = divmod(start, padded)
        origin = part * (all_rows // parts) + rows.start
        wanted = slice(origin + min(first, height), origin + min(first + stop - start, height))
        values = stored.read(layers, wanted).view(
            moved
        )  # never used again: JAX on CPU may keep it as the array
        missing = stop - start - values.shape[1]
        return np.pad(values, ((0, 0), (0, missing), (0, 0))) if missing else values

    shape = (layers.stop - layers.start, parts * padded, columns)
    return jax.make_array_from_callback(shape, NamedSharding(layout.mesh, layout.runs), read, moved)


@partial(jax.jit, static_argnums=(0, 1, 2))
def zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> jax.Array:
    return lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _move(
    block: jax.Array, layout: ParamLayout, height: int, stored: np.dtype, dtype: np.dtype
) -> jax.Array:
    """A window from runs of rows to the array's layout, transposed and cast."""

    def local(x: jax.Array) -> jax.Array:
        if layout.copy_axes:
            x = lax.all_gather(x, layout.copy_axes, axis=1, tiled=True)
        if layout.column_axes:
            # A dimension of its own for the parts: split within one, on CPU it takes three times as
            # long.
            apart = x.reshape(*x.shape[:2], layout.parts(layout.column_axes), -1)
            x = lax.all_to_all(apart, layout.column_axes, split_axis=2, concat_axis=1, tiled=True)
            x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = lax.bitcast_convert_type(layout.declared.from_file(x[:, :height]), stored).astype(dtype)
        return lax.bitcast_convert_type(x, transfer_dtype(dtype, layout.mesh))

    return jax.shard_map(
        local, mesh=layout.mesh, in_specs=layout.runs, out_specs=layout.spec, check_vma=False
    )(block)


# A program of its own: in one with the transposition XLA writes element by element on CPU (81 ms
# for 16 MiB; apart 12).
@partial(jax.jit, static_argnums=4, donate_argnums=0)
def _write(
    array: jax.Array, moved: jax.Array, layer: Any, row: Any, layout: ParamLayout
) -> jax.Array:
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
"""The index of a part in an array, and a function that reads it."""


def assemble(
    parts: Iterable[Part], sharding: NamedSharding, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """The array of parts that are laid out as it is. A process reads those that its devices hold,
    each once."""
    dtype = np.dtype(dtype)
    if math.prod(shape) * dtype.itemsize <= SMALL_BYTES:
        whole = np.empty(shape, dtype)
        for index, read in parts:
            whole[index] = read()
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])
    indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
    held = {
        device: [slice(*cut.indices(size)) for cut, size in zip(cuts, shape, strict=True)]
        for device, cuts in indices.items()
    }
    moved = transfer_dtype(dtype, sharding.mesh)
    arrays = {
        device: zeros(sharding.shard_shape(shape), moved, SingleDeviceSharding(device))
        for device in held
    }
    for index, read in parts:
        common = {
            device: [
                slice(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(own, index, strict=True)
            ]
            for device, own in held.items()
        }
        shared = {
            device: cuts
            for device, cuts in common.items()
            if all(cut.start < cut.stop for cut in cuts)
        }
        values = read() if shared else np.empty(0)
        for device, cuts in shared.items():
            within = tuple(
                slice(cut.start - whole.start, cut.stop - whole.start)
                for cut, whole in zip(cuts, index, strict=True)
            )
            starts = [cut.start - own.start for cut, own in zip(cuts, held[device], strict=True)]
            part = np.ascontiguousarray(values[within], dtype).view(moved)
            arrays[device] = _paste(arrays[device], jax.device_put(part, device), starts)
        jax.block_until_ready([arrays[device] for device in shared])
    whole = jax.make_array_from_single_device_arrays(
        shape, sharding, list(arrays.values()), dtype=moved
    )
    return finished(whole, sharding, dtype)


@partial(jax.jit, donate_argnums=0)
def _paste(array: jax.Array, part: jax.Array, starts: list[Any]) -> jax.Array:
    return lax.dynamic_update_slice(array, part, starts)


# Devices to files


def collect(
    array: Any, layout: ParamLayout, layer: int, dtype: Any
) -> Iterator[tuple[int, np.ndarray]]:
    """One layer in the file's form: runs of rows, each with the number of its first row."""
    if is_small(layout, array.dtype.itemsize):
        yield 0, layout.declared.to_file(np.asarray(array))[layer]
        return
    _, all_rows, _ = layout.declared.file_shape
    parts, sharers = layout.parts(layout.row_axes), layout.parts(layout.column_axes)
    for layers, rows in layout.windows(max(array.dtype.itemsize, np.dtype(dtype).itemsize)):
        if not layers.start <= layer < layers.stop:
            continue
        height = rows.stop - rows.start
        block = _take(array, layer, rows.start, layout, height, np.dtype(dtype))
        padded = block.shape[1] // parts
        for shard in block.addressable_shards:
            if shard.replica_id:
                continue
            part, first = divmod(shard.index[1].start or 0, padded)
            last = min(first + padded // sharers, height)
            if first < last:
                yield (
                    part * (all_rows // parts) + rows.start + first,
                    np.asarray(shard.data)[0, : last - first],
                )


@partial(jax.jit, static_argnums=(3, 4, 5))
def _take(
    array: jax.Array, layer: Any, row: Any, layout: ParamLayout, height: int, dtype: np.dtype
) -> jax.Array:
    """A window of one layer as runs of rows, over `row_axes` and in them over `column_axes`."""

    def local(array: jax.Array, layer: jax.Array, row: jax.Array) -> jax.Array:
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

    everywhere, split = PartitionSpec(), (*layout.row_axes, *layout.column_axes)
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec, everywhere, everywhere),
        out_specs=PartitionSpec(None, split or None, None),
        check_vma=False,
    )(array, layer, row)
