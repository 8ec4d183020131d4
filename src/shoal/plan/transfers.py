"""What moves between devices: which of them exchange in a collective, along which axes, and over
which links."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.mesh.accelerators import Accelerator
from shoal.mesh.topology import Topology

HOP_SECONDS, MACHINE_SECONDS, NETWORK_SECONDS = 1e-6, 1e-5, 3e-5
"""What a transfer takes before its bytes, assumed: for each chip on the way of a TPU's
(jax-ml.github.io/scaling-book says about 1 us), for NCCL's within a machine, and for one between
machines or slices."""

if TYPE_CHECKING:
    from shoal.plan.hlo import Collective


def transfer_rows(
    collectives: Sequence[Collective],
    topology: Topology | None,
    kind: Accelerator | None,
    mesh: Any,
) -> list[dict[str, Any]]:
    """Collectives by kind, mesh axes and source, with bytes of the whole arrays, and seconds by the
    links."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = defaultdict(
        lambda: {"times": 0.0, "bytes": 0.0, "seconds": 0.0}
    )
    places: dict[tuple[str, bool], tuple[str, float, float, int]] = {}
    for one in collectives:
        # Of an array that all of a group get or sum up, a machine's devices take a part each from
        # other machines.
        place = one.groups, one.kind in ("all-gather", "all-reduce", "reduce-scatter")
        if place not in places:
            groups = device_groups(one.groups) or [[]]
            groups = (
                groups if all(number < mesh.size for group in groups for number in group) else [[]]
            )
            # Of pairs the farthest are waited for.
            some = groups if one.kind == "collective-permute" else groups[:1]
            rates, latencies = zip(
                *(link_of(topology, kind, mesh, group, place[1]) for group in some), strict=True
            )
            places[place] = (
                axes_of(mesh, groups[0]),
                min(rates),
                max(latencies),
                group_size(one.groups),
            )
        axes, rate, latency, size = places[place]
        row = rows[one.kind, axes, one.source]
        row["times"] += one.times
        row["bytes"] += one.total
        row["seconds"] += _moved(one.kind, one.total, size) / rate
        row["seconds"] += (
            one.times * latency * (2 if one.kind == "all-reduce" else 1)
        )  # which scatters, then gathers
    found = [
        {"kind": kind, "axis": axes, "source": source, **row}
        for (kind, axes, source), row in rows.items()
    ]
    return sorted(found, key=lambda row: -row["bytes"])


def _moved(kind: str, size: float, devices: int) -> float:
    """Bytes that a device receives."""
    share = (devices - 1) / devices
    return {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share) * size


# ---- groups of devices


def groups_text(attributes: str) -> str:
    """Which devices exchange, as the attributes of an operation say it."""
    for pattern in (
        r"replica_groups=(mesh\[[^\]]*\](?:, "
        r"device_ids=\([^)]*(?:\([^)]*\)[^)]*)?\))?\s*\{[^}]*\})",
        r"replica_groups=(\{\{[\d,{}]*\}\})",
        r"replica_groups=(\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?)",
        r"source_target_pairs=(\{[\d,{}]*\})",
    ):
        if found := re.search(pattern, attributes):
            return found[1]
    return ""


def device_groups(text: str) -> list[list[int]]:
    """The groups of devices that exchange, from any of the forms in which XLA writes them; empty if
    it is another.

    >>> device_groups("[2,2]<=[2,2]T(1,0)"), device_groups("mesh['a'=2,'b'=2] {'b'}")
    ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    """
    if text.startswith("{{"):
        return [
            [int(n) for n in group.split(",") if n]
            for group in re.findall(r"\{([\d,]*)\}", text[1:-1])
        ]
    if found := re.fullmatch(r"\[([\d,]*)\]<=(\[[\d,]*\](?:T\([\d,]*\))?)", text):
        return _order(found[2]).reshape([int(n) for n in found[1].split(",")]).tolist()
    return _mesh_groups(text)


def _order(text: str) -> np.ndarray:
    """The numbers of devices in the order of `[2,4]T(1,0)`: counted in a grid that is then
    transposed."""
    dims, _, order = text.partition("T")
    grid = np.arange(math.prod(map(int, re.findall(r"\d+", dims)))).reshape(
        [*map(int, re.findall(r"\d+", dims))]
    )
    return (grid.transpose([*map(int, re.findall(r"\d+", order))]) if order else grid).reshape(-1)


def _mesh_groups(text: str) -> list[list[int]]:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}`: axes of a grid of devices in this
    order, or parts of axes (after 2, of size 2)."""
    found = re.fullmatch(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))?\s*\{([^}]*)\}", text)
    if found is None:
        return []
    axes = [(name, int(size)) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])]
    taken = {
        name: (int(before or 1), int(size) if size else dict(axes)[name])
        for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", found[3])
        if name in dict(axes)
    }
    shape, inside = [], []
    for name, size in axes:
        before, part = taken.get(name, (size, 1))
        shape += [before, part, size // before // part]
        inside.append(len(shape) - 2)
    order = [n for n in range(len(shape)) if n not in inside] + inside
    numbers = np.arange(math.prod(shape))
    if found[2]:
        numbers = (
            _order(found[2])
            if found[2].startswith("[")
            else np.array([*map(int, found[2].split(","))])
        )
    grid = numbers.reshape(shape).transpose(order)
    return grid.reshape(-1, math.prod(shape[n] for n in inside)).tolist()


def group_size(text: str) -> int:
    """Devices that exchange with one another."""
    groups = device_groups(text)
    if text.startswith("{{") and groups and all(len(pair) == 2 for pair in groups):
        return (
            len(groups[0])
            if len({n for pair in groups for n in pair}) == 2 * len(groups)
            else len(groups)
        )
    return len(groups[0]) if groups else 1


# ---- links


def axes_of(mesh: Any, group: Sequence[int]) -> str:
    """The axes of a mesh along which a group of its devices lies, as `fsdp` or `data+fsdp`; `?` for
    no group."""
    if not group:
        return "?"
    places = np.array([np.unravel_index(number, mesh.devices.shape) for number in group])
    return "+".join(
        axis for number, axis in enumerate(mesh.axis_names) if len(set(places[:, number])) > 1
    )


def link_of(
    topology: Topology | None,
    kind: Accelerator | None,
    mesh: Any,
    group: Sequence[int],
    in_parts: bool = True,
) -> tuple[float, float]:
    """(bytes a second that each device of a group can receive from the others, seconds before the
    bytes). `in_parts`: what comes from other machines or slices comes once, a part to each of the
    group's devices there."""
    if kind is None or len(group) < 2:
        return math.inf, 0.0
    devices = [mesh.devices.flat[number] for number in group]
    slices = {getattr(device, "slice_index", None) or 0 for device in devices}
    places = np.array([getattr(device, "coords", None) or (0, 0, device.id) for device in devices])
    sizes = {axis: len(set(places[:, axis])) for axis in range(places.shape[1])}
    parts = len(slices) if kind.is_tpu or not topology else sizes[0]
    within, latency = _within(topology, kind, sizes, len(group))
    if parts > 1:
        return min(within, kind.dcn * (len(group) // parts if in_parts else 1)), NETWORK_SECONDS
    return within, latency


def _within(
    topology: Topology | None, kind: Accelerator, sizes: Mapping[int, int], count: int
) -> tuple[float, float]:
    """`link_of` for `count` devices of one machine or slice, so many along each dimension."""
    if not kind.is_tpu:
        return kind.link or kind.hbm / 2, MACHINE_SECONDS  # or devices in one memory
    shape, ways, hops = topology.shape if topology else (), 0, 0
    for axis, size in sizes.items():
        # The ends of a dimension are joined: a group that spans all of it exchanges both ways
        # round, a part does not.
        joined = _wraps(kind, shape, axis) and size == shape[axis]
        ways += (2 if joined else 1) * (size > 1)
        hops += size // 2 if joined else size - 1
    ways = (
        min(ways, 1) if count == 2 else ways
    )  # two chips exchange along one way, however it turns
    return (
        (kind.link * ways, HOP_SECONDS * hops) if ways else (kind.hbm / 2, 0.0)
    )  # or two devices of one chip


def _wraps(kind: Accelerator, shape: Sequence[int], axis: int) -> bool:
    """True where the ends of a dimension are joined."""
    if axis >= len(shape):
        return False
    return shape[axis] == 16 if kind.torus == 2 else all(size % 4 == 0 for size in shape)
