"""How fast the devices of a mesh exchange: along which of its axes, over which links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.mesh.accelerators import Accelerator
from shoal.mesh.topology import Topology


def axes_of(mesh: Any, group: Sequence[int]) -> str:
    """The axes of a mesh along which a group of its devices lies, as `fsdp` or `data+fsdp`; `?` for no group."""
    if not group:
        return "?"
    places = np.array([np.unravel_index(number, mesh.devices.shape) for number in group])
    return "+".join(axis for number, axis in enumerate(mesh.axis_names) if len(set(places[:, number])) > 1)


def axis_links(topology: Topology | None, kind: Accelerator | None, mesh: Any) -> dict[str, float]:
    """Axis -> bytes a second that each device can receive from the others along it; of axes longer than one."""
    if kind is None:
        return {}
    numbers, found = np.arange(mesh.size).reshape(mesh.devices.shape), {}
    for place, axis in enumerate(mesh.axis_names):
        if mesh.shape[axis] > 1:
            group = np.moveaxis(numbers, place, 0).reshape(mesh.shape[axis], -1)[:, 0].tolist()
            found[axis] = bandwidth(topology, kind, mesh, group)
    return found


def bandwidth(topology: Topology | None, kind: Accelerator | None, mesh: Any, group: Sequence[int]) -> float:
    """Bytes a second that each device of a group can receive from the others."""
    if kind is None or len(group) < 2:
        return math.inf
    devices = [mesh.devices.flat[number] for number in group]
    slices = {getattr(device, "slice_index", None) or 0 for device in devices}
    places = np.array([getattr(device, "coords", None) or (0, 0, device.id) for device in devices])
    varying = [axis for axis in range(places.shape[1]) if len(set(places[:, axis])) > 1]
    if len(slices) > 1 or (not kind.is_tpu and topology and 0 in varying):
        return kind.dcn
    if not kind.is_tpu:
        return kind.link
    shape = topology.shape if topology else ()
    # The ends of a dimension are joined: a group that spans all of it exchanges both ways round, a part of it does not.
    ways = sum(2 if _wraps(kind, shape, axis) and len(set(places[:, axis])) == shape[axis] else 1 for axis in varying)
    return kind.link * ways if ways else kind.hbm / 2  # two devices of one chip


def _wraps(kind: Accelerator, shape: Sequence[int], axis: int) -> bool:
    """True where the ends of a dimension are joined."""
    if axis >= len(shape):
        return False
    return shape[axis] == 16 if kind.torus == 2 else all(size % 4 == 0 for size in shape)
