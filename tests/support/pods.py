"""Devices of TPU slices and of hosts with GPUs that are not here, as JAX numbers them: enough to
make meshes of."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

KINDS = {"v5p": "TPU v5", "v6e": "TPU v6 lite", "h200": "NVIDIA H200", "l4": "NVIDIA L4"}


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int = 0
    coords: tuple[int, int, int] = (0, 0, 0)
    device_kind: str = "TPU v5"
    platform: str = "tpu"
    core_on_chip: int = 0


def tpu(kind: str, x: int, y: int, z: int = 1, slices: int = 1) -> list[Device]:
    """Slices of x x y x z chips, host by host: a host has 2 x 2 of them, or the one that there
    is."""
    wide, high = min(2, x), min(2, y)
    hosts = itertools.product(range(slices), range(z), range(0, y, high), range(0, x, wide))
    chips = (
        (host, (number, (left + right, top + down, depth)))
        for host, (number, depth, top, left) in enumerate(hosts)
        for down, right in itertools.product(range(high), range(wide))
    )
    result = []
    for id, (host, (number, coords)) in enumerate(chips):
        result.append(Device(id, host, number, coords, KINDS[kind]))
    return result


def gpu(kind: str, hosts: int, each: int) -> list[Device]:
    result = []
    for id in range(hosts * each):
        result.append(Device(id, id // each, device_kind=KINDS[kind], platform="gpu"))
    return result
