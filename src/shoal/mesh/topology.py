"""The devices of a machine that is not here: what `topology=` names, and JAX's description of it
for a compiler.

    v5p-256  v5p:4x4x8  v6e-8  v6e:4x8@2 (two slices)  h100:8  h200:8x8 (eight machines of eight)

TPU names count what their maker counts: cores for v4, v5p and TPU7x (two a chip), chips for v5e and
v6e.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.mesh.accelerators import ACCELERATORS, Accelerator
from shoal.records import ShoalError
from shoal.text import nearest

_SMALL = {
    2: {
        1: (1, 1),
        4: (2, 2),
        8: (2, 4),
        16: (4, 4),
        32: (4, 8),
        64: (8, 8),
        128: (8, 16),
        256: (16, 16),
    },
    3: {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)},
}
"""Dimensions of the torus -> chips -> the shape of the slice. From 64 chips on a torus of three
dimensions is made of cubes of 4x4x4, which are joined to the shape that is nearest to a cube."""

_LONGEST = 256
"""Chips along one dimension of a slice that are not offered any more."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
}
"""What a process that compiles for other devices needs: without it libtpu looks for a TPU and asks
the cloud about it, and takes a lock that a run on the same machine needs. JAX's cache keeps nothing
for devices that are not there. XLA's own products for GPUs are chosen by trials on one: without a
GPU their compilation can fail, cuBLAS's cannot."""


@dataclass(frozen=True)
class Topology:
    """Slices of a TPU pod, or machines with GPUs.

    >>> parse_topology("v5p-256")
    Topology(kind='v5p', shape=(4, 4, 8), slices=1)
    """

    kind: str  # a name of ACCELERATORS
    shape: tuple[int, ...]  # chips by dimension of a slice; machines, and GPUs of each
    slices: int = 1

    def __str__(self) -> str:
        """`v5p:4x4x8@2`, as `parse_topology` reads it."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}" + (
            f"@{self.slices}" if self.slices > 1 else ""
        )

    @property
    def accelerator(self) -> Accelerator:
        return ACCELERATORS[self.kind]

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.accelerator.devices

    @property
    def machines(self) -> int:
        """Slices, or machines with GPUs: what a slower network joins."""
        return self.slices if self.accelerator.is_tpu else self.shape[0]

    @property
    def num_hosts(self) -> int:
        """Machines with processes of their own: those of four chips, of eight v5e or v6e, or with
        GPUs."""
        chips = math.prod(self.shape)
        if not self.accelerator.is_tpu:
            return self.shape[0]
        return self.slices * (
            1 if self.accelerator.torus == 2 and chips <= 8 else max(1, chips // 4)
        )

    def describe(self) -> str:
        """`128 v5p chips (4x4x8)`"""
        shape, a = "x".join(map(str, self.shape)), self.accelerator
        if not a.is_tpu:
            machines = f" ({shape.replace('x', ' machines of ')})" * (self.shape[0] > 1)
            return f"{self.num_devices} {self.kind.upper()}{machines}"
        text = (
            f"{self.num_chips} {self.kind} chips "
            f"({f'{self.slices} slices of ' * (self.slices > 1)}{shape})"
        )
        return text + f", {self.num_devices} devices" * (a.devices > 1)

    def hosts(self, devices: Sequence[Any]) -> dict[Any, int]:
        """The host of each of the topology's devices, as a run's processes would have them."""
        a = self.accelerator
        if a.is_tpu and not (a.torus == 2 and math.prod(self.shape) <= 8):
            return {device: device.process_index for device in devices}
        # JAX takes a GPU that is not here for a host of its own, and eight chips of v5e or v6e,
        # which one host has, for two hosts.
        each = len(devices) // (self.slices if a.is_tpu else self.shape[0])
        return {device: number // each for number, device in enumerate(devices)}


def parse_topology(text: str) -> Topology:
    """The topology that a text names; ShoalError with the nearest for one that does not exist."""
    match = re.fullmatch(
        r"(?i)([a-z0-9]+?(?:-\d+gb)?)(?:-(?P<count>\d+)|:(?P<shape>\d+(?:x\d+)*))"
        r"(?:@(?P<slices>0*[1-9]\d*))?",
        text,
    )
    kind = match[1].lower().replace("v5litepod", "v5e") if match else ""
    if not match or kind not in ACCELERATORS:
        name = re.split("[-:@]", text)[0].lower()
        slices = re.fullmatch(r"(?i)(v[^-]+-\d+)x(\d+)", text)
        if slices and name.replace("v5litepod", "v5e") in ACCELERATORS:
            raise ShoalError(
                f"topology={text}: {slices[2]} slices are written {slices[1]}@{slices[2]}"
            )
        meant = nearest(name, ACCELERATORS)
        raise ShoalError(
            f"topology={text}: there is no such topology, did you mean {example(meant)}? Kinds: "
            f"{', '.join(ACCELERATORS)}; written as v5p-256, v5p:4x4x8, v6e:4x8@2 (two slices), "
            "h200:8x8 (eight machines of eight)"
        )
    slices = int(match["slices"] or 1)
    if not ACCELERATORS[kind].is_tpu:
        sizes = [int(size) for size in (match["shape"] or match["count"]).split("x")]
        if len(sizes) > 2 or 0 in sizes or slices != 1:
            raise ShoalError(
                f"topology={text}: expected {kind}:GPUS of one machine or {kind}:MACHINESxGPUS, "
                f"such as {example(kind)}"
            )
        return Topology(kind, (1, *sizes) if len(sizes) == 1 else tuple(sizes))
    if match["count"]:
        return Topology(kind, _named_shape(text, kind, int(match["count"])), slices)
    shape = tuple(map(int, match["shape"].split("x")))
    _check_shape(text, kind, shape)
    return Topology(kind, shape, slices)


def example(kind: str) -> str:
    return f"{kind}-{8}" if ACCELERATORS[kind].is_tpu else f"{kind}:8"


def slice_shape(kind: str, chips: int) -> tuple[int, ...] | None:
    """The shape of a slice of so many chips; None if there is none."""
    torus = ACCELERATORS[kind].torus
    if chips in _SMALL[torus]:
        return _SMALL[torus][chips]
    if torus == 2 or chips % 64 or chips > ACCELERATORS[kind].largest:
        return None
    cubes = chips // 64
    shapes = [
        (a, b, cubes // a // b)
        for a in range(1, cubes + 1)
        if cubes % a == 0
        for b in range(a, cubes // a + 1)
        if cubes // a % b == 0 and b <= cubes // a // b
    ]
    best = min(shapes, key=lambda shape: (shape[2], shape[1]))
    return tuple(4 * size for size in best) if 4 * best[2] < _LONGEST else None


def slice_names(kind: str) -> Iterator[str]:
    """The names of all slices of a kind: v5p-8, v5p-16, ..."""
    a = ACCELERATORS[kind]
    for chips in (*_SMALL[a.torus], *range(64, (a.largest if a.torus == 3 else 0) + 1, 64)):
        if slice_shape(kind, chips):
            yield f"{kind}-{chips * a.cores}"


def _named_shape(text: str, kind: str, counted: int) -> tuple[int, ...]:
    a = ACCELERATORS[kind]
    shape = None if counted % a.cores else slice_shape(kind, counted // a.cores)
    if shape is None:
        raise _no_slice(text, kind, counted / a.cores, str)
    return shape


def _check_shape(text: str, kind: str, shape: tuple[int, ...]) -> None:
    a = ACCELERATORS[kind]
    hosts = (2, 2, 1)[: a.torus]  # a host has four chips
    fits = (
        len(shape) == a.torus
        and 0 not in shape
        and math.prod(shape) <= a.largest
        and (
            math.prod(shape) == 1
            or all(size % host == 0 for size, host in zip(shape, hosts, strict=False))
        )
    )
    if not fits:
        raise _no_slice(text, kind, math.prod(shape), lambda name: str(parse_topology(name)))


def _no_slice(text: str, kind: str, chips: float, show: Callable[[str], str]) -> ShoalError:
    """The error for a slice that does not exist, with the nearest ones, as `show` writes their
    names."""
    a = ACCELERATORS[kind]
    nearest_two = sorted(
        slice_names(kind), key=lambda name: abs(int(name.partition("-")[2]) / a.cores - chips)
    )[:2]
    names = sorted(nearest_two, key=lambda name: int(name.partition("-")[2]))
    counts = "cores, two a chip" if a.cores == 2 else "chips"
    return ShoalError(
        f"topology={text}: there is no such slice, the nearest are {' or '.join(map(show, names))} "
        f"({kind} counts {counts}); a shape is written as {kind}:{'x'.join(['4'] * a.torus)}, of "
        f"{a.torus} dimensions and whole hosts of 2x2 chips"
    )


def topology_devices(topology: Topology) -> list[Any]:
    """JAX's devices of a topology, for a compiler: nothing can run on them. ShoalError where the
    compiler is not installed. The process's environment is to be ENVIRONMENT, from before JAX was
    imported."""
    from importlib.util import find_spec

    from jax.experimental.topologies import get_topology_desc

    a = topology.accelerator
    needed = "libtpu" if a.is_tpu else "jax_cuda13_plugin"
    if find_spec(needed) is None and (a.is_tpu or find_spec("jax_cuda12_plugin") is None):
        raise ShoalError(
            f"topology={topology}: compiling for {'a TPU' if a.is_tpu else 'a GPU'} needs "
            f"{needed}: pip install '.[plan]'"
        )
    shape = "x".join(map(str, topology.shape))
    if not a.is_tpu:
        return list(
            get_topology_desc(
                platform="cuda", target_config=gpu_target(topology.kind), topology=f"{shape}x1"
            ).devices
        )
    options: dict[str, Any] = {"chip_config_name": "megacore"} if topology.kind == "v4" else {}
    if topology.num_chips == topology.slices:  # a host of one chip
        options["chips_per_host_bounds"] = [1] * 3
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    return list(get_topology_desc(f"{topology.kind}:{shape}", platform="tpu", **options).devices)


DEVICE_KINDS = {
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}
"""Kind of a topology -> JAX's `device_kind`; a GPU's is its maker's name."""


@dataclass(frozen=True)
class PlaceholderDevice:
    """A device of a topology without its compiler: roles can be given it, and nothing can be
    compiled for it."""

    id: int
    platform: str
    slice_index: int = 0
    device_kind: str = ""
    process_index: int = 0

    @property
    def coords(self) -> tuple[int, ...]:
        raise NotImplementedError(
            "only the compiler knows its place in the torus"
        )  # meshes then take devices in order

    def memory_stats(self) -> None:
        """As of a compiler's device: nothing is in its memory."""


def placeholder_devices(topology: Topology) -> list[PlaceholderDevice]:
    """As many devices as a topology has, for estimates and for a check of meshes, which need no
    compiler."""
    platform, each = (
        "tpu" if topology.accelerator.is_tpu else "gpu",
        topology.num_devices // topology.slices,
    )
    kind = DEVICE_KINDS.get(topology.kind, f"NVIDIA {topology.kind.upper()}")
    of_host = topology.num_devices // topology.num_hosts
    return [
        PlaceholderDevice(number, platform, number // each, kind, number // of_host)
        for number in range(topology.num_devices)
    ]


def gpu_target(kind: str) -> str:
    """The description of a GPU that XLA's compiler takes in place of one."""
    a = ACCELERATORS[kind]
    assert a.target is not None
    target = dict(a.target)
    major, shared = target.pop("capability"), target["shared_memory_per_core"]
    feature = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    lines = {
        **target,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_block_optin": shared - 1024,
        "memory_bandwidth": int(a.hbm),
        "device_memory_size": a.hbm_bytes,
        "threads_per_block_limit": 1024,
        "threads_per_core_limit": 2048,
        "threads_per_warp": 32,
        "fpus_per_core": 64 if major == 8 else 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    inside = "".join(f"  {name}: {value}\n" for name, value in lines.items())
    versions = "".join(
        f'  {name}: "{version}"\n'
        for name, version in (
            ("driver_version", "13.0.0"),
            ("runtime_version", "13.0.0"),
            ("compile_time_toolkit_version", "13.0.0"),
            ("dnn_version", "9.10.0"),
        )
    )
    name = f"NVIDIA {kind.upper()}"
    return (
        f'gpu_device_info {{\n{inside}{versions}  name: "{name}"\n  device_vendor: "NVIDIA '
        f'Corporation"\n'
        f"  cuda_compute_capability {{ major: {major}{feature} }}\n"
        "  device_interconnect_info { active_links: 18 }\n}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 }\n'
        f'device_description_str: "{name}"\n'
    )
