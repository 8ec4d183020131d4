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

AXES = ("data", "fsdp", "context", "tensor")


def make_mesh(section: MeshSection, devices: Sequence[Any]) -> Mesh:
    """The trainer's mesh `data x fsdp x context x tensor` over the first devices; fsdp=-1 takes all
    that the others leave.

    `mesh.dcn_data` and `mesh.dcn_fsdp` slices (or hosts) multiply their axes, with as many devices
    of each. ShoalError for a size that does not divide the devices: the rest would stay idle.
    """
    slices = (section.dcn_data, section.dcn_fsdp, 1, 1)
    count, parts = math.prod(slices), by_slice(devices)
    if count != len(parts):
        if len(devices) % count:
            raise ShoalError(
                f"mesh.dcn_data={section.dcn_data} x mesh.dcn_fsdp={section.dcn_fsdp} does not "
                f"divide "
                f"{_devices(len(devices))} into {count} slices of one size"
            )
        parts = np.reshape(
            np.asarray(devices), (count, -1)
        ).tolist()  # hosts, which have no number of a slice
    # fsdp last: it takes what the others leave.
    sizes = {
        "data": section.data,
        "tensor": section.tensor,
        "context": section.context,
        "fsdp": section.fsdp,
    }
    left = each = min(map(len, parts))
    for axis, size in sizes.items():
        if size == -1:
            sizes[axis] = size = left
        if left % size:
            among = (
                _devices(left)
                if left == each
                else f"the {left} of {each} devices that the other axes leave"
            )
            within = " of a slice" if count > 1 else ""
            raise ShoalError(
                f"mesh.{axis}={size} does not divide {among}{within}; use {listed_divisors(left)}",
                f"mesh.{axis}",
            )
        left //= size
    shape = tuple(sizes[axis] for axis in AXES)
    parts = [part[: math.prod(shape)] for part in parts]
    _check_slices(parts)
    grid = np.stack([arrange(part, shape) for part in parts]).reshape(*slices, *shape)
    order = [position for axis in range(len(shape)) for position in (axis, len(shape) + axis)]
    sizes_with_slices = [size * count for size, count in zip(shape, slices, strict=True)]
    return as_mesh(grid.transpose(order).reshape(sizes_with_slices), AXES)


def as_mesh(grid: np.ndarray, axes: Sequence[str]) -> Mesh:
    # Auto: the compiler propagates shardings between the few constraints of the model; explicit
    # axes would need one at every operation.
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def arrange(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Devices of one slice as an array of `shape`."""
    if devices[0].platform == "tpu":
        try:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        except (AssertionError, NotImplementedError, ValueError):
            pass  # a part of a slice that is no box: in the order of the devices
    return np.reshape(np.asarray(devices), shape)


def arrange_copies(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Devices as copies of `shape`, each within a slice where the slices' sizes allow it: copies
    exchange nothing."""
    size, parts = math.prod(shape), by_slice(devices)
    if any(len(part) % size for part in parts):
        parts = [list(devices)]
    return np.concatenate([arrange(part, (len(part) // size, *shape)) for part in parts])


def by_slice(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each slice, as JAX numbers them, in their order; those without a number are of
    one."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    return [slices[number] for number in sorted(slices)]


def by_host(devices: np.ndarray, size: int) -> np.ndarray:
    """Devices as rows of `size`: in their order, or host by host where only so each row lies within
    a host."""

    def within_hosts(grid: np.ndarray) -> bool:
        return all(len({device.process_index for device in row}) == 1 for row in grid)

    grid = devices.reshape(-1, size)
    grouped = np.asarray(sorted(devices.flat, key=lambda device: device.process_index)).reshape(
        -1, size
    )
    return grouped if within_hosts(grouped) and not within_hosts(grid) else grid


def _check_slices(parts: Sequence[Sequence[Any]]) -> None:
    """ShoalError unless each part is a TPU slice's, and each of another."""
    devices = [device for part in parts for device in part]
    number, count = len(by_slice(devices)), len(parts)
    if devices[0].platform == "tpu" and not number == count == sum(
        len(by_slice(part)) for part in parts
    ):
        cure = (
            f"set mesh.dcn_data={number} mesh.dcn_fsdp=1 (the slices exchange gradients alone) or "
            f"mesh.dcn_data=1 "
            f"mesh.dcn_fsdp={number}"
            if number > 1
            else "leave both out"
        )
        raise ShoalError(
            f"these {len(devices)} devices are {number} slice{'s' * (number > 1)}, but "
            f"mesh.dcn_data x "
            f"mesh.dcn_fsdp is {count}: {cure}"
        )


def listed_divisors(*numbers: int) -> str:
    """The sizes that divide all of some numbers, as text.

    >>> listed_divisors(8), listed_divisors(12, 8)
    ('1, 2, 4 or 8', '1, 2 or 4')
    """
    common = math.gcd(*numbers)
    return listed([size for size in range(1, common + 1) if common % size == 0])


def listed(sizes: Sequence[int]) -> str:
    """`1, 2 or 4`"""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"
