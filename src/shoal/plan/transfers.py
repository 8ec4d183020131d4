"""Computes what moves between devices: which devices exchange in a collective operation, along
which axes of the mesh, and over which links."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.budget.budget import Transfers
from shoal.mesh.accelerators import Accelerator
from shoal.mesh.topology import Topology

HOP_SECONDS, MACHINE_SECONDS, NETWORK_SECONDS = 1e-6, 1e-5, 3e-5
"""Seconds, assumed, that a transfer takes before its first byte: for each chip that it passes
between TPUs (jax-ml.github.io/scaling-book says about 1 us), by NCCL within a machine, and between
machines or slices."""

if TYPE_CHECKING:
    from shoal.plan.hlo import Collective


def transfer_rows(
    collectives: Sequence[Collective],
    topology: Topology | None,
    accelerator: Accelerator | None,
    mesh: Any,
) -> list[Transfers]:
    """Returns the transfers of a program: its collectives summed up by kind, mesh axes and source,
    the most bytes first. Each has the bytes of the whole arrays and the seconds that the links need
    for them. Times, bytes and seconds are those of one run. `topology`: None for devices here;
    `accelerator`: the kind of devices; None if it is unknown, for 0 seconds. `mesh`: the mesh of
    the program's role, by whose order devices are numbered."""
    rows: dict[tuple[str, str, str], Transfers] = {}
    links: dict[tuple[str, bool], GroupLink] = {}
    for collective in collectives:
        # If all devices of a group get or sum up the same array, each device of a machine receives
        # only a part of it from other machines.
        in_parts = collective.kind in ("all-gather", "all-reduce", "reduce-scatter")
        key = (collective.groups, in_parts)
        if key not in links:
            links[key] = _group_link(collective, topology, accelerator, mesh, in_parts)
        link = links[key]
        row_key = (collective.kind, link.axes, collective.source)
        if row_key not in rows:
            rows[row_key] = Transfers(
                collective.kind, link.axes, collective.source, times=0.0, bytes=0.0, seconds=0.0
            )
        row = rows[row_key]
        moving = _moved(collective.kind, collective.total, link.size) / link.rate
        waiting = collective.times * link.latency
        if collective.kind == "all-reduce":
            waiting *= 2  # an all-reduce is two transfers: it scatters, then gathers
        rows[row_key] = replace(
            row,
            times=row.times + collective.times,
            bytes=row.bytes + collective.total,
            seconds=row.seconds + moving + waiting,
        )
    return sorted(rows.values(), key=attrgetter("bytes"), reverse=True)


@dataclass(frozen=True)
class GroupLink:
    """How the devices of a group exchange: along the mesh axes `axes`, at `rate` bytes a second for
    each device, with `latency` seconds before the first byte, in groups of `size` devices."""

    axes: str
    rate: float
    latency: float
    size: int


def _group_link(
    collective: Collective,
    topology: Topology | None,
    accelerator: Accelerator | None,
    mesh: Any,
    in_parts: bool,
) -> GroupLink:
    """Returns how the groups of devices of a collective exchange. `in_parts`: True if what comes
    from other machines or slices is sent once, a part to each device of a group, instead of whole
    to each. The first group stands for all, except that of pairs the slowest counts. Groups of an
    unknown form, or with numbers that the mesh does not have, get the axes `?` and no time (an
    infinite rate, latency 0); the size still follows from the text."""
    unknown: list[list[int]] = [[]]
    groups = device_groups(collective.groups) or unknown  # one group without a device
    highest = max((max(group) for group in groups if group), default=0)
    if highest >= mesh.size:
        groups = unknown
    # Groups are alike, so one is enough; pairs are not, and the slowest one counts.
    measured = groups[:1]
    if collective.kind == "collective-permute":
        measured = groups
    rates = []
    latencies = []
    for group in measured:
        rate, latency = link_of(topology, accelerator, mesh, group, in_parts)
        rates.append(rate)
        latencies.append(latency)
    size = group_size(collective.groups)
    return GroupLink(axes_of(mesh, groups[0]), min(rates), max(latencies), size)


def _moved(kind: str, size: float, devices: int) -> float:
    """Returns the bytes that one device receives in a collective: with n devices (n - 1) / n of the
    whole array; twice that for `all-reduce`; all of it for `collective-permute`. `kind`: one of
    XLA's names, such as `all-gather`; `size`: the bytes of the whole array; `devices`: how many
    devices a group has, at least 1."""
    share = (devices - 1) / devices
    if kind == "all-reduce":
        return 2 * share * size
    if kind == "collective-permute":
        return size
    return share * size


# ---- groups of devices

GROUP_FORMS = (
    r"replica_groups=(mesh\[[^\]]*\](?:, "
    r"device_ids=\([^)]*(?:\([^)]*\)[^)]*)?\))?\s*\{[^}]*\})",
    r"replica_groups=(\{\{[\d,{}]*\}\})",
    r"replica_groups=(\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?)",
    r"source_target_pairs=(\{[\d,{}]*\})",
)
"""Patterns of the attributes in which XLA writes which devices exchange."""


def groups_text(attributes: str) -> str:
    """Returns the part of an operation's attributes that says which devices exchange, such as
    `{{0,1},{2,3}}` or `[2,2]<=[4]`; "" if there is none."""
    for pattern in GROUP_FORMS:
        match = re.search(pattern, attributes)
        if match:
            return match[1]
    return ""


def device_groups(text: str) -> list[list[int]]:
    """Returns the groups of devices that exchange, as lists of their numbers, parsed from any of
    the forms in which XLA writes them; empty if the form is unknown. Pairs (sender, receiver) are
    groups of two.

    >>> device_groups("[2,2]<=[2,2]T(1,0)"), device_groups("mesh['a'=2,'b'=2] {'b'}")
    ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    """
    if text.startswith("{{"):
        groups = []
        for group in re.findall(r"\{([\d,]*)\}", text[1:-1]):
            groups.append(_numbers(group))
        return groups
    iota = re.fullmatch(r"\[([\d,]*)\]<=(\[[\d,]*\](?:T\([\d,]*\))?)", text)
    if iota:
        return _order(iota[2]).reshape(_numbers(iota[1])).tolist()
    return _mesh_groups(text)


def _numbers(text: str) -> list[int]:
    """Returns the whole numbers in a text."""
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _order(text: str) -> np.ndarray:
    """Returns the numbers of devices in the order that a text such as `[2,4]T(1,0)` describes: they
    are counted row by row in a grid of these sizes, which is then transposed. A flat array; without
    `T(...)` the numbers from 0 in order."""
    dims, _, order = text.partition("T")
    shape = _numbers(dims)
    grid = np.arange(math.prod(shape)).reshape(shape)
    if order:
        grid = grid.transpose(_numbers(order))
    return grid.reshape(-1)


def _mesh_groups(text: str) -> list[list[int]]:
    """Returns the groups that a text such as `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0))
    {'b':(2)2}` describes: a grid of devices in this order, whose devices exchange along the named
    axes, or along parts of axes (here a part of size 2, after one of size 2). Empty if the text has
    another form."""
    match = re.fullmatch(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))?\s*\{([^}]*)\}", text)
    if match is None:
        return []
    mesh_text, ids_text, axes_text = match.groups()
    sizes = {}
    for name, size in re.findall(r"'([^']*)'=(\d+)", mesh_text):
        sizes[name] = int(size)
    parts = {}  # axis -> (devices before the part, devices of the part)
    for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes_text):
        if name in sizes:
            parts[name] = (int(before or 1), int(size or sizes[name]))
    # Splits each axis into three: what is before the part, the part, what is after it.
    shape = []
    inside = []
    for name, size in sizes.items():
        before, part = parts.get(name, (size, 1))  # an axis that is not named: a part of size 1
        shape += [before, part, size // before // part]
        inside.append(len(shape) - 2)  # the second of the three: the part
    outside = sorted(set(range(len(shape))) - set(inside))
    if not ids_text:
        numbers = np.arange(math.prod(shape))
    elif ids_text.startswith("["):
        numbers = _order(ids_text)
    else:
        numbers = np.array(_numbers(ids_text))
    # The devices of a group differ in the dimensions `inside`, which come last.
    grid = numbers.reshape(shape).transpose(outside + inside)
    size_of_group = math.prod(shape[dim] for dim in inside)
    return grid.reshape(-1, size_of_group).tolist()


def group_size(text: str) -> int:
    """Returns how many devices exchange with one another, from the text of their groups: the size
    of the first group. If the text lists pairs (sender, receiver), it is the number of devices that
    the first pair and those that follow from it connect. 1 for a text without groups.

    >>> group_size("[4,2]<=[8]"), group_size("{{0,1},{1,2},{2,0}}"), group_size("{{0,1},{1,0}}")
    (2, 3, 2)
    """
    groups = device_groups(text)
    if not groups:
        return 1
    are_pairs = text.startswith("{{") and all(len(group) == 2 for group in groups)
    if not are_pairs:
        return len(groups[0])
    # Lists of groups of two pass through here too: no device is in two, so the first one counts.
    receiver_of: dict[int, int] = {}
    for sender, receiver in groups:
        receiver_of[sender] = receiver
    device = groups[0][0]
    connected = {device}
    while device in receiver_of and receiver_of[device] not in connected:
        device = receiver_of[device]
        connected.add(device)
    return len(connected)


# ---- links


def axes_of(mesh: Any, group: Sequence[int]) -> str:
    """Returns the axes of a mesh along which a group of its devices lies, in the mesh's order,
    `fsdp` or `data+fsdp`; "" for a single device, `?` for an empty group. `group`: numbers of
    devices, counted row by row through `mesh.devices` from 0."""
    if not group:
        return "?"
    # [devices of the group, axes of the mesh]
    coordinates = np.array([np.unravel_index(device, mesh.devices.shape) for device in group])
    axes = []
    for column, axis in enumerate(mesh.axis_names):
        if len(set(coordinates[:, column])) > 1:
            axes.append(axis)
    return "+".join(axes)


def link_of(
    topology: Topology | None,
    accelerator: Accelerator | None,
    mesh: Any,
    group: Sequence[int],
    in_parts: bool = True,
) -> tuple[float, float]:
    """Returns (bytes a second that each device of a group can receive from the others, seconds
    until the first byte arrives); (infinity, 0) for fewer than two devices and for an unknown kind
    (`accelerator` None). `topology`: None for devices here. `group`: numbers of devices, counted
    row by row through `mesh.devices`. `in_parts`: True if what comes from other machines or slices
    is sent once, a part to each of the group's devices here, instead of whole to each."""
    if accelerator is None or len(group) < 2:
        return math.inf, 0.0
    devices = [mesh.devices.flat[number] for number in group]
    slices = {getattr(device, "slice_index", None) or 0 for device in devices}  # 0: only one
    coordinates = np.array(
        [getattr(device, "coords", None) or (0, 0, device.id) for device in devices]
    )  # [devices of the group, dimensions]
    sizes = {}  # dimension -> at how many places along it the group has devices
    for axis in range(coordinates.shape[1]):
        sizes[axis] = len(set(coordinates[:, axis]))
    num_parts = len(slices)
    if topology and not accelerator.is_tpu:
        num_parts = sizes[0]  # a described GPU's first coordinate is its machine
    within, latency = _within(topology, accelerator, sizes, len(group))
    if num_parts == 1:
        return within, latency
    receivers = 1
    if in_parts:
        receivers = len(group) // num_parts
    return min(within, accelerator.dcn * receivers), NETWORK_SECONDS


def _within(
    topology: Topology | None, accelerator: Accelerator, sizes: Mapping[int, int], count: int
) -> tuple[float, float]:
    """Returns (bytes a second that each device of a group can receive from the others, seconds
    until the first byte arrives) for a group of `count` devices within one machine or slice.
    `sizes`: dimension of the torus -> at how many places along it the group has devices. The
    dimensions matter for a TPU alone: a GPU's machine has one rate. `topology`: None for devices
    here, of which no dimension counts as a ring."""
    if not accelerator.is_tpu:
        return accelerator.link or accelerator.hbm / 2, MACHINE_SECONDS  # or devices in one memory
    shape = topology.shape if topology else ()
    ways = 0
    hops = 0
    for axis, size in sizes.items():
        # If the ends of a dimension are connected, a group that spans all of it exchanges in both
        # directions; a group in a part of it does not.
        is_ring = _wraps(accelerator, shape, axis) and size == shape[axis]
        if size > 1:
            ways += 2 if is_ring else 1
        hops += size // 2 if is_ring else size - 1
    if ways == 0:  # two devices of one chip
        return accelerator.hbm / 2, 0.0
    if count == 2:  # two chips exchange along a single path, even if it turns
        ways = 1
    return accelerator.link * ways, HOP_SECONDS * hops


def _wraps(accelerator: Accelerator, shape: Sequence[int], axis: int) -> bool:
    """True if the two ends of a torus's dimension are connected: in a torus of two dimensions if
    this one has all 16 chips, in one of three if each dimension of the slice is a multiple of 4.
    `shape`: the slice's, in chips; () if it is unknown, for False. `axis`: the dimension's index in
    it; False for one that it does not have."""
    if axis >= len(shape):
        return False
    if accelerator.torus == 2:
        return shape[axis] == 16  # v5e and v6e: a side of the whole pod
    return all(size % 4 == 0 for size in shape)
