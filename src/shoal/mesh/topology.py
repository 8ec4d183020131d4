"""The devices of a machine that is not here: reads the texts of `topology=`, and makes JAX's
description of the devices for a compiler.

    v5p-256  v5p:4x4x8  v6e-8  v6e:4x8@2 (two slices)  h100:8  h200:8x8 (eight machines of eight)

TPU names count what their maker counts: cores for v4, v5p and TPU7x (two a chip), chips for v5e and
v6e.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
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
"""Slices with this many chips or more along one dimension are not offered."""

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
"""The environment variables of a process that compiles for other devices. Without them libtpu looks
for a TPU, asks the cloud about it, and takes a lock that a run on the same machine needs. JAX's
cache keeps nothing for devices that are not there. XLA chooses its own matrix products for GPUs by
trials on a GPU, so without one their compilation can fail; that of cuBLAS's products cannot."""


@dataclass(frozen=True)
class Topology:
    """Slices of a TPU pod, or machines with GPUs.

    >>> parse_topology("v5p-256")
    Topology(kind='v5p', shape=(4, 4, 8), slices=1)
    """

    kind: str  # a name of ACCELERATORS
    shape: tuple[int, ...]  # TPU: chips along each dimension of a slice; GPU: (machines, GPUs each)
    slices: int = 1

    def __str__(self) -> str:
        """Returns the text that `parse_topology` reads, like `v5p:4x4x8@2`; without `@` for one
        slice."""
        text = f"{self.kind}:{_shape_text(self.shape)}"
        if self.slices > 1:
            text += f"@{self.slices}"
        return text

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
        """The number of slices, or of machines with GPUs: the units that a slower network joins."""
        return self.slices if self.accelerator.is_tpu else self.shape[0]

    @property
    def num_hosts(self) -> int:
        """The number of machines that each run a process: of four chips, of eight for v5e or v6e,
        or with GPUs."""
        if not self.accelerator.is_tpu:
            return self.shape[0]
        if self._slice_is_one_host:
            return self.slices
        return self.slices * max(1, math.prod(self.shape) // 4)

    @property
    def _slice_is_one_host(self) -> bool:
        """True if a slice is one host: up to eight chips of v5e and v6e."""
        return self.accelerator.torus == 2 and math.prod(self.shape) <= 8

    def describe(self) -> str:
        """Returns a description for people, `128 v5p chips (4x4x8)` or `16 H200 (2 machines of
        8)`."""
        if not self.accelerator.is_tpu:
            text = f"{self.num_devices} {self.kind.upper()}"
            machines, gpus = self.shape
            if machines > 1:
                text += f" ({machines} machines of {gpus})"
            return text
        shape = _shape_text(self.shape)
        if self.slices > 1:
            shape = f"{self.slices} slices of {shape}"
        text = f"{self.num_chips} {self.kind} chips ({shape})"
        if self.accelerator.devices > 1:
            text += f", {self.num_devices} devices"
        return text

    def hosts(self, devices: Sequence[Any]) -> dict[Any, int]:
        """Returns device -> number of its host, from 0, as the processes of a run there would have
        them. Corrects JAX's description, whose hosts differ for GPUs and for small slices.
        `devices`: all devices of this topology, in order."""
        if self.accelerator.is_tpu and not self._slice_is_one_host:
            return {device: device.process_index for device in devices}
        # JAX describes each GPU that is not here as a host, and the eight chips of v5e or v6e that
        # one host has as two hosts.
        of_host = len(devices) // self.num_hosts
        return {device: number // of_host for number, device in enumerate(devices)}


def parse_topology(text: str) -> Topology:
    """Reads a topology from a text: `v5p-128` (the slice of that name), `v5p:4x4x8@2` (two slices
    of this shape), `h200:8` (one machine of 8 GPUs) or `h200:2x8` (two machines). Case does not
    matter, and `v5litepod` is `v5e`. `@N`, a number of slices, is for TPUs alone. The `shape` of
    GPUs is always (machines, GPUs each). ShoalError, which names the nearest ones, if there is no
    such topology."""
    # a kind (which may be like a100-40gb), then -NUMBER or :SHAPE, then @SLICES or nothing
    match = re.fullmatch(
        r"(?i)([a-z0-9]+?(?:-\d+gb)?)(?:-(?P<count>\d+)|:(?P<shape>\d+(?:x\d+)*))"
        r"(?:@(?P<slices>0*[1-9]\d*))?",
        text,
    )
    kind = match[1].lower().replace("v5litepod", "v5e") if match else ""
    if not match or kind not in ACCELERATORS:
        raise _no_topology(text)
    slices = int(match["slices"] or 1)
    if not ACCELERATORS[kind].is_tpu:
        sizes = [int(size) for size in (match["shape"] or match["count"]).split("x")]
        if len(sizes) > 2 or 0 in sizes or slices != 1:
            raise ShoalError(
                f"topology={text}: expected {kind}:GPUS of one machine or {kind}:MACHINESxGPUS, "
                f"such as {example(kind)}"
            )
        if len(sizes) == 1:
            sizes.insert(0, 1)  # one machine
        return Topology(kind, tuple(sizes))
    if match["count"]:
        return Topology(kind, _named_shape(text, kind, int(match["count"])), slices)
    shape = tuple(int(size) for size in match["shape"].split("x"))
    _check_shape(text, kind, shape)
    return Topology(kind, shape, slices)


def _no_topology(text: str) -> ShoalError:
    """Returns the error for a text whose kind is not known, or that is not in the right form.
    `text`: the whole topology that the user gave."""
    name = re.split("[-:@]", text)[0].lower()
    # a name with a number of slices in another form, like v5p-8x2
    slices = re.fullmatch(r"(?i)(v[^-]+-\d+)x(\d+)", text)
    if slices and name.replace("v5litepod", "v5e") in ACCELERATORS:
        return ShoalError(
            f"topology={text}: {slices[2]} slices are written {slices[1]}@{slices[2]}"
        )
    meant = nearest(name, ACCELERATORS)
    return ShoalError(
        f"topology={text}: there is no such topology, did you mean {example(meant)}? Kinds: "
        f"{', '.join(ACCELERATORS)}; written as v5p-256, v5p:4x4x8, v6e:4x8@2 (two slices), "
        "h200:8x8 (eight machines of eight)"
    )


def example(kind: str) -> str:
    """Returns a topology of eight devices of a kind, as users write it."""
    separator = "-" if ACCELERATORS[kind].is_tpu else ":"
    return f"{kind}{separator}8"


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


def slice_shape(kind: str, chips: int) -> tuple[int, ...] | None:
    """Returns the shape of a slice of `chips` chips of a TPU kind; None if there is no such slice.
    From 64 chips on a torus of three dimensions has the shape that is nearest to a cube, sizes
    ascending: 512 -> (8, 8, 8)."""
    torus = ACCELERATORS[kind].torus
    if chips in _SMALL[torus]:
        return _SMALL[torus][chips]
    if torus == 2 or chips % 64 or chips > ACCELERATORS[kind].largest:
        return None
    cubes = chips // 64
    best = None  # the cubes by dimension, ascending
    # All ways to write `cubes` as a product of three, ascending; the best has the smallest third.
    for first in range(1, cubes + 1):
        for second in range(first, cubes // first + 1):
            third, rest = divmod(cubes, first * second)
            if rest or third < second:
                continue
            shape = (first, second, third)
            if best is None or (third, second) < (best[2], best[1]):
                best = shape
    if best is None or 4 * best[2] >= _LONGEST:
        return None
    return tuple(4 * size for size in best)


def slice_names(kind: str) -> Iterator[str]:
    """Yields the names of all slices of a TPU kind, the smallest first: v5p-8, v5p-16, ... The
    number counts cores, which for some kinds are two a chip."""
    accelerator = ACCELERATORS[kind]
    counts = list(_SMALL[accelerator.torus])
    if accelerator.torus == 3:
        counts += range(64, accelerator.largest + 1, 64)
    for chips in counts:
        if slice_shape(kind, chips):
            yield f"{kind}-{chips * accelerator.cores}"


def _named_shape(text: str, kind: str, counted: int) -> tuple[int, ...]:
    """Returns the shape of the slice that a name like `v5p-16` means, whose number (`counted`)
    counts cores or chips, depending on the kind. ShoalError if there is no such slice. `text`: the
    whole topology, for the error."""
    chips, rest = divmod(counted, ACCELERATORS[kind].cores)
    shape = None if rest else slice_shape(kind, chips)
    if shape is None:
        raise _no_slice(text, kind, counted / ACCELERATORS[kind].cores, as_shapes=False)
    return shape


def _check_shape(text: str, kind: str, shape: tuple[int, ...]) -> None:
    """Raises ShoalError unless a slice of this shape exists: it has the dimensions of the kind's
    torus, at most as many chips as its largest slice, and is a single chip or made of whole hosts
    of 2x2 chips. `text`: the whole topology, for the error."""
    accelerator = ACCELERATORS[kind]
    chips = math.prod(shape)
    fits = len(shape) == accelerator.torus and 0 not in shape and chips <= accelerator.largest
    if fits and chips > 1:
        # A host has four chips, 2x2; only one chip can be a part of a host.
        # A torus of two dimensions has no third size.
        for size, of_host in zip(shape, (2, 2, 1), strict=False):
            fits = fits and size % of_host == 0
    if not fits:
        raise _no_slice(text, kind, chips, as_shapes=True)


def _no_slice(text: str, kind: str, chips: float, as_shapes: bool) -> ShoalError:
    """Returns the error for a slice that does not exist, with the two nearest ones, written as
    shapes or by their names. `text`: the whole topology that the user gave. `chips`: how many were
    wanted. `as_shapes`: True for shapes."""
    accelerator = ACCELERATORS[kind]

    def counted(name: str) -> int:
        return int(name.partition("-")[2])

    def distance(name: str) -> float:
        return abs(counted(name) / accelerator.cores - chips)

    by_distance = sorted(slice_names(kind), key=distance)
    names = sorted(by_distance[:2], key=counted)
    if as_shapes:
        names = [str(parse_topology(name)) for name in names]
    counts = "cores, two a chip" if accelerator.cores == 2 else "chips"
    return ShoalError(
        f"topology={text}: there is no such slice, the nearest are {' or '.join(names)} "
        f"({kind} counts {counts}); a shape is written as "
        f"{kind}:{_shape_text([4] * accelerator.torus)}, of {accelerator.torus} dimensions and "
        "whole hosts of 2x2 chips"
    )


def topology_devices(topology: Topology) -> list[Any]:
    """Returns JAX's devices of a topology, for a compiler: programs can be compiled for them, but
    nothing can run on them. They are as many as `topology.num_devices`. ShoalError if the compiler
    is not installed. ENVIRONMENT must have been set before JAX was imported."""
    from importlib.util import find_spec

    from jax.experimental.topologies import get_topology_desc

    if topology.accelerator.is_tpu:
        device, compilers = "a TPU", ["libtpu"]
    else:
        device, compilers = "a GPU", ["jax_cuda13_plugin", "jax_cuda12_plugin"]
    if all(find_spec(compiler) is None for compiler in compilers):
        raise ShoalError(
            f"topology={topology}: compiling for {device} needs {compilers[0]}: "
            "pip install '.[plan]'"
        )
    shape = _shape_text(topology.shape)
    if not topology.accelerator.is_tpu:
        # `x1`: each GPU counts as a host of its own, which `Topology.hosts` corrects.
        description = get_topology_desc(
            platform="cuda", target_config=gpu_target(topology.kind), topology=f"{shape}x1"
        )
        return list(description.devices)
    # Of a v4 the two cores of a chip are one device.
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
"""Kind of a TPU topology -> JAX's `device_kind`. For a GPU that is its maker's name."""


@dataclass(frozen=True)
class PlaceholderDevice:
    """Stands for a device of a topology without its compiler: it can be given to roles, but nothing
    can be compiled for it."""

    id: int
    platform: str
    slice_index: int = 0
    device_kind: str = ""
    process_index: int = 0

    @property
    def coords(self) -> tuple[int, ...]:
        # Meshes then take the devices in order.
        raise NotImplementedError("only the compiler knows its position in the torus")

    def memory_stats(self) -> None:
        """Returns None like the devices of a compiler, which have no memory."""

    def addressable_memories(self) -> list[Any]:
        """Returns [] like a described GPU, whose memories are not known."""
        return []


def placeholder_devices(topology: Topology) -> list[PlaceholderDevice]:
    """Returns as many placeholder devices as a topology has, for estimates and checks of meshes,
    which need no compiler. Each has its host's number as `process_index`, and its slice's as
    `slice_index`; ids and numbers count from 0."""
    platform = "tpu" if topology.accelerator.is_tpu else "gpu"
    kind = DEVICE_KINDS.get(topology.kind, f"NVIDIA {topology.kind.upper()}")
    of_slice = topology.num_devices // topology.slices
    of_host = topology.num_devices // topology.num_hosts
    devices = []
    for number in range(topology.num_devices):
        devices.append(
            PlaceholderDevice(
                number,
                platform,
                slice_index=number // of_slice,
                device_kind=kind,
                process_index=number // of_host,
            )
        )
    return devices


def gpu_target(kind: str) -> str:
    """Returns the description of a GPU that XLA's compiler takes in place of a GPU, as a text in
    the form of a protobuf. `kind`: a GPU's name in ACCELERATORS."""
    accelerator = ACCELERATORS[kind]
    assert accelerator.target is not None
    facts = dict(accelerator.target)
    major = facts.pop("capability")
    facts |= {
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_block_optin": facts["shared_memory_per_core"] - 1024,
        "memory_bandwidth": int(accelerator.hbm),
        "device_memory_size": accelerator.hbm_bytes,
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
    versions = {
        "driver_version": "13.0.0",
        "runtime_version": "13.0.0",
        "compile_time_toolkit_version": "13.0.0",
        "dnn_version": "9.10.0",
    }
    name = f"NVIDIA {kind.upper()}"
    feature = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    lines = ["gpu_device_info {"]
    for fact, value in facts.items():
        lines.append(f"  {fact}: {value}")
    for library, version in versions.items():
        lines.append(f'  {library}: "{version}"')
    lines += [
        f'  name: "{name}"',
        '  device_vendor: "NVIDIA Corporation"',
        f"  cuda_compute_capability {{ major: {major}{feature} }}",
        "  device_interconnect_info { active_links: 18 }",
        "}",
        'platform_name: "CUDA"',
        "dnn_version_info { major: 9 minor: 10 }",
        f'device_description_str: "{name}"',
    ]
    return "\n".join(lines) + "\n"
