"""How a parameter lies on devices and in files, and the windows in which it passes between them.

A file holds a parameter as `layers` tensors [rows, columns]; the array is [layers, columns, rows]
where the kernel is transposed, without `layers` where it has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shoal.mesh import Role
from shoal.model.parameters import ParamSpec

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
