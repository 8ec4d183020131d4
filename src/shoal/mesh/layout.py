"""How devices are ordered into a mesh: neighbours on the network are neighbours on an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from shoal.config.schema import MeshSection
from shoal.types import ShoalError

AXES = ("data", "fsdp", "tensor")


def make_mesh(section: MeshSection, devices: Sequence[Any]) -> Mesh:
    """The trainer's mesh `data x fsdp x tensor` over the first devices; fsdp=-1 takes all that the others leave.

    `mesh.dcn_data` and `mesh.dcn_fsdp` slices (or hosts) multiply their axes. ShoalError for a size that does not
    divide the devices: the rest would stay idle.
    """
    slices = (section.dcn_data, section.dcn_fsdp, 1)
    count = math.prod(slices)
    if len(devices) % count:
        raise ShoalError(f"mesh.dcn_data={section.dcn_data} x mesh.dcn_fsdp={section.dcn_fsdp} does not divide "
                         f"{_devices(len(devices))} into {count} slices of one size")
    # fsdp last: it takes what the others leave.
    sizes = {"data": section.data, "tensor": section.tensor, "fsdp": section.fsdp}
    left = each = len(devices) // count
    for axis, size in sizes.items():
        if size == -1:
            sizes[axis] = size = left
        if left % size:
            place = _devices(left) if left == each else f"the {left} of {each} devices that the other axes leave"
            within = " of a slice" if count > 1 else ""
            raise ShoalError(f"mesh.{axis}={size} does not divide {place}{within}; use {listed_divisors(left)}")
        left //= size
    shape = tuple(sizes[axis] for axis in AXES)
    return as_mesh(arrange(devices[: math.prod(shape) * count], shape, slices), AXES)


def as_mesh(grid: np.ndarray, axes: Sequence[str]) -> Mesh:
    # Auto: the compiler propagates shardings between the few constraints of the model; explicit axes would need one at
    # every operation.
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def arrange(devices: Sequence[Any], shape: Sequence[int], slices: Sequence[int]) -> np.ndarray:
    """Devices as an array of `shape` times `slices`, the slices outermost within each axis."""
    count = math.prod(slices)
    if devices[0].platform == "tpu":
        found = len({getattr(device, "slice_index", 0) for device in devices})
        if found != count:
            raise ShoalError(f"these {len(devices)} devices are {found} slices, but mesh.dcn_data x mesh.dcn_fsdp is "
                             f"{count}: set mesh.dcn_data={found} (the slices exchange gradients alone) or "
                             f"mesh.dcn_fsdp={found}")
        try:
            if count > 1:
                return mesh_utils.create_hybrid_device_mesh(shape, slices, devices, allow_split_physical_axes=True)
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        except (AssertionError, NotImplementedError, ValueError):
            pass  # a part of a slice that is no box: in the order of the devices
    axes = len(shape)
    grid = np.asarray(devices).reshape(*slices, *shape)
    order = [position for axis in range(axes) for position in (axis, axes + axis)]
    return grid.transpose(order).reshape([one * many for one, many in zip(shape, slices, strict=True)])


def listed_divisors(*numbers: int) -> str:
    """The sizes that divide all of some numbers, as text.

    >>> listed_divisors(8), listed_divisors(12, 8)
    ('1, 2, 4 or 8', '1, 2 or 4')
    """
    common = math.gcd(*numbers)
    *most, last = (str(size) for size in range(1, common + 1) if common % size == 0)
    return f"{', '.join(most)} or {last}" if most else last


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"
