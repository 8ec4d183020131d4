"""Which devices JAX finds, and which of them a role uses: all, a fraction, a number or a list, as
`mesh.trainer`, `.sampler` and `.reference` say.

Under Pathways one process has the devices of all hosts, by way of a proxy:

    JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://HOST:PORT   or that address and mesh.pathways=true
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from shoal.config.sections.devices import MeshSection
from shoal.mesh.accelerators import GPU_SHARE
from shoal.records import ShoalError
from shoal.text import count

NO_KEYS = MeshSection()


PROXY = "proxy"
"""JAX's name for this platform."""


PINNED_HOST = "pinned_host"
"""JAX's name of memory of the host that devices read by themselves."""


ANSWER_SECONDS = 15
"""How long a proxy may take to answer; without a limit JAX waits for ever."""


def available_devices(section: MeshSection = NO_KEYS, shared: bool = False) -> list[Any]:
    """JAX's devices, of all hosts under Pathways; ShoalError where JAX finds none of the platform
    that JAX_PLATFORMS names. `section` says whether Pathways is used, as the environment may too.
    `shared`: what is freed on a GPU is another process's to take, which XLA's own pool would
    keep."""
    through_proxy = uses_pathways(section)
    if through_proxy:
        start_pathways()
    elif not jax.config.values["jax_platforms"] and not accelerators_possible():
        jax.config.update("jax_platforms", "cpu")
    if shared:
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    # JAX reads it where it meets its first GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_SHARE))
    try:
        return jax.devices()
    # AssertionError: of `cuda` where jaxlib's plugin is not installed.
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.values["jax_platforms"]
        reason = str(error).partition(" (set JAX_PLATFORMS")[0]
        if not through_proxy:
            raise _no_devices(platforms, reason) from error
        cause = ""
        if "establish connection" not in reason:  # missing credentials, for one
            cause = f" ({reason})"
        raise ShoalError(
            f"JAX_BACKEND_TARGET={jax.config.values['jax_backend_target']}: no proxy of Pathways "
            f"answers there{cause}; start it, or unset JAX_PLATFORMS and leave out mesh.pathways "
            "to use the devices of this machine"
        ) from error


def _no_devices(platforms: Any, reason: str) -> ShoalError:
    because = f" ({reason})" if reason else ""
    extras = [f"'.[{name}]'" for name in ("cuda", "tpu") if name in str(platforms)]
    install = ""
    if extras:
        install = f", or install {' and '.join(extras)} where the machine has the devices"
    return ShoalError(
        f"JAX_PLATFORMS={platforms}: JAX finds no such devices{because}; unset it, or set "
        f"JAX_PLATFORMS=cpu{install}"
    )


def check_platforms(section: MeshSection = NO_KEYS, root: Path = Path("/")) -> None:
    """ShoalError for a platform of JAX_PLATFORMS that this machine certainly lacks. It asks JAX for
    no devices."""
    if uses_pathways(section):
        check_pathways()
    platforms = jax.config.values["jax_platforms"] or ""
    names = platforms.split(",")
    if not (root / "sys").exists():
        return
    for name, device, is_there in (("cuda", "NVIDIA GPU", has_gpu), ("tpu", "TPU", has_tpu)):
        if name in names and not is_there(root):
            raise _no_devices(platforms, f"this machine has no {device}")


def has_tpu(root: Path = Path("/")) -> bool:
    if _has_file(root, "dev/accel*", "dev/vfio/[0-9]*"):
        return True
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        if vendor.read_text().strip() == "0x1ae0":  # Google
            return True
    return False


def has_gpu(root: Path = Path("/")) -> bool:
    if _has_file(root, "dev/nvidia*", "dev/dxg"):  # dxg: of Windows' Linux
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver's
    except OSError:
        return False
    return True


def _has_file(root: Path, *patterns: str) -> bool:
    return any(next(root.glob(pattern), None) for pattern in patterns)


def accelerators_possible(root: Path = Path("/")) -> bool:
    """Whether JAX may find more than CPUs on this machine; False only where it certainly cannot.

    The compilers of the extra `plan` are JAX's plug-ins for TPUs and GPUs: asked for devices on a
    machine with neither, each prints a page of errors.
    """
    plugins = {plugin.name for plugin in entry_points(group="jax_plugins")}
    package = find_spec("jax_plugins")
    folders = package.submodule_search_locations if package else ()
    plugins.update(module.name for module in pkgutil.iter_modules(folders))
    if os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS"):
        return True
    if any(not name.startswith("xla_cuda") for name in plugins):
        return True
    return not (root / "sys").exists() or has_tpu(root) or has_gpu(root)


def memory_stats(device: Any) -> Mapping[str, int]:
    """Bytes by name of a device's memory, as it counts them itself; nothing on a CPU and behind a
    proxy of Pathways."""
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        return {}


@functools.cache
def _trimming() -> Callable[[int], Any] | None:
    """glibc's `malloc_trim`; None where this process has another allocator."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed_memory() -> None:
    """Gives what the allocator keeps of freed memory back to the system, where the RAM is the
    device's memory too.

    A compilation, or a checkpoint that was written, leaves some hundred MB of freed pieces, which
    large arrays cannot use: they come on top of what the update then takes."""
    trim = _trimming()
    if trim is not None and jax.default_backend() == "cpu":
        trim(0)


def has_host_memory(device: Any) -> bool:
    """False for a device whose programs cannot reach memory of its host."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    return PINNED_HOST in kinds or not kinds  # a GPU that is only described has none at all


@dataclass(frozen=True)
class RoleDevices:
    """Numbers of the devices of each role."""

    trainer: list[int]
    sampler: list[int]
    reference: list[int]


def role_devices(section: MeshSection, available: int) -> RoleDevices:
    """The devices of each role: of counts and fractions the trainer has the first and the sampler
    the last, the reference the first that both leave.

    Two roles share all of their devices or none: where both name the same list, all devices as the
    fraction 1.0, or the only one. A role that is not mentioned shares, the sampler with the trainer
    and the reference with the sampler; a trainer that is not mentioned has what the others leave,
    or all. ShoalError for devices that are not there, too few, and roles that overlap in part.
    """
    texts = {}
    for name in ("trainer", "sampler", "reference"):
        text = getattr(section, name)
        if text:
            texts[name] = text
    shown = ", ".join(f"mesh.{name}={text}" for name, text in texts.items())
    devices = count(available, "device")
    everything = list(range(available))
    listed: dict[str, list[int]] = {}  # of a role with a list: the numbers of its devices
    counts: dict[str, int] = {}  # of a role with a number or a fraction: devices of its own
    requested: dict[str, int] = {}  # of each role that is mentioned: how many devices
    for name, text in texts.items():
        size = devices_asked(f"mesh.{name}", text, available)
        if isinstance(size, list):
            listed[name] = size
            requested[name] = len(size)
            continue
        requested[name] = size
        # 1.0 takes all devices, with whoever takes all too; so does any number of a single device.
        takes_all = size == available and (available == 1 or not text.isdigit())
        if not takes_all:
            counts[name] = size
    largest = -1
    for numbers in listed.values():
        largest = max(largest, *numbers)
    if largest >= available:
        raise ShoalError(
            f"{shown}: there is no device {largest}; JAX finds {devices}, numbered from 0. "
            f"{_all_devices(section, available)}"
        )

    def own(name: str, free: Sequence[int]) -> list[int]:
        """The devices of a role that is mentioned; of a count the first that are free."""
        if name in listed:
            return listed[name]
        if name not in counts:
            return everything
        if counts[name] > len(free):
            parts = [f"{size} ({role})" for role, size in requested.items()]
            if "trainer" not in requested:
                parts.append("1 or more (trainer)")
            raise ShoalError(
                f"{shown}: {' + '.join(parts)} devices are requested, but JAX finds {devices}. "
                f"Lower them. {_all_devices(section, available)}"
            )
        return list(free[: counts[name]])

    sampler: list[int] = []
    if "sampler" in texts:
        listed_for_trainer = listed.get("trainer", [])
        others = [number for number in everything if number not in listed_for_trainer]
        first = max(0, len(others) - counts.get("sampler", 0))
        sampler = own("sampler", others[first:])
    left = [number for number in everything if number not in sampler]
    if "trainer" in texts:
        trainer = own("trainer", left if "sampler" in counts else everything)
    else:
        reserved: Sequence[int] = ()
        if "reference" in listed:
            reserved = listed["reference"]
        elif "reference" in counts:
            reserved = left[-counts["reference"] :]
        trainer = [number for number in left if number not in reserved] or left or everything
    if not sampler:
        sampler = trainer
    reference = sampler
    if "reference" in texts:
        taken = set(trainer) | set(sampler)
        free = [number for number in everything if number not in taken]
        reference = own("reference", free)
    roles = RoleDevices(trainer, sampler, reference)
    for name, other in (("sampler", "trainer"), ("reference", "trainer"), ("reference", "sampler")):
        devices_of_role = set(getattr(roles, name))
        devices_of_other = set(getattr(roles, other))
        common = devices_of_role & devices_of_other
        if common and devices_of_role != devices_of_other:
            numbers = ", ".join(str(number) for number in sorted(common))
            noun = "devices" if len(common) > 1 else "device"
            raise ShoalError(
                f"{shown}: {noun} {numbers} would be both the {other}'s and the {name}'s; they "
                "share all of their devices or none"
            )
    return roles


def _all_devices(section: MeshSection, available: int) -> str:
    """The words with which all roles share all devices, over a stored configuration too, whose keys
    stay."""
    words = []
    for role in ("trainer", "sampler", "reference"):
        if getattr(section, role):
            words.append(f"mesh.{role}=")
    defaults = {
        "data": 1,
        "tensor": 1,
        "context": 1,
        "sampler_tensor": 0,
        "dcn_data": 1,
        "dcn_fsdp": 1,
    }
    for axis, default in defaults.items():
        size = getattr(section, axis) or 1
        if available % size:
            words.append(f"mesh.{axis}={default}")
    if section.fsdp > 1:
        words.append("mesh.fsdp=-1")
    return f"All roles share all devices with {' '.join(words)}"


def devices_asked(key: str, text: str, available: int) -> int | list[int]:
    """A role's setting as a number of devices, or as a list of their numbers.

    >>> devices_asked("mesh.trainer", "0.5", 8), devices_asked("mesh.trainer", "[0,2]", 8)
    (4, [0, 2])
    """
    wrong = ShoalError(
        f"{key}={text}: expected a fraction up to 1.0, a number of devices, or a list of their "
        "numbers as [0,1]"
    )
    try:
        if text.startswith("["):
            numbers = [int(item) for item in text.strip("[]").split(",")]
            if len(set(numbers)) < len(numbers) or min(numbers) < 0:
                raise wrong
            return numbers
        if "." in text or "e" in text:
            share = float(text)
            if not 0 < share <= 1:
                raise wrong
            return max(1, int(share * available))
        if int(text) < 1:
            raise wrong
        return int(text)
    except ValueError:
        raise wrong from None


# ---- Pathways


def uses_pathways(section: MeshSection) -> bool:
    """True if the environment asks for Pathways, or `mesh.pathways` does and the environment names
    a proxy."""
    return _is_chosen() or (section.pathways and bool(jax.config.values["jax_backend_target"]))


def check_pathways() -> None:
    """ShoalError where the proxy's address or Pathways' client is missing."""
    target = jax.config.values["jax_backend_target"]
    if not target:
        raise ShoalError(
            f"JAX_PLATFORMS={PROXY}: JAX_BACKEND_TARGET is missing; set it to the address of the "
            "proxy of Pathways, as grpc://HOST:29000, or unset JAX_PLATFORMS"
        )
    if find_spec("pathwaysutils") is None:
        raise ShoalError(
            f"JAX_BACKEND_TARGET={target}: Pathways needs the package pathwaysutils; install "
            "'.[pathways]'"
        )


def start_pathways() -> None:
    """Registers the proxy as JAX's platform, which it has to be before JAX looks for its
    devices."""
    if (
        not _is_chosen()
        and jax.config.values["jax_backend_target"]
        and xla_bridge.backends_are_initialized()
    ):
        raise ShoalError(
            "mesh.pathways=true: JAX has found its devices before; set JAX_PLATFORMS=proxy in the "
            "environment"
        )
    check_pathways()
    import pathwaysutils  # pyright: ignore[reportMissingImports]

    os.environ.setdefault("PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS", str(ANSWER_SECONDS))
    if not _is_chosen():
        jax.config.update("jax_platforms", PROXY)
    pathwaysutils.initialize()


def _is_chosen() -> bool:
    return PROXY in (jax.config.values["jax_platforms"] or "").split(",")


AXES = ("data", "fsdp", "context", "tensor")


def make_mesh(section: MeshSection, devices: Sequence[Any]) -> Mesh:
    """The trainer's mesh `data x fsdp x context x tensor` over the first devices; fsdp=-1 takes all
    that the others leave.

    `mesh.dcn_data` and `mesh.dcn_fsdp` slices (or hosts) multiply their axes, with as many devices
    of each. ShoalError for a size that does not divide the devices: the rest would stay idle.
    """
    slices = (section.dcn_data, section.dcn_fsdp, 1, 1)
    num_slices, parts = math.prod(slices), by_slice(devices)
    if num_slices != len(parts):
        if len(devices) % num_slices:
            raise ShoalError(
                f"mesh.dcn_data={section.dcn_data} x mesh.dcn_fsdp={section.dcn_fsdp} does not "
                f"divide {count(len(devices), 'device')} into {num_slices} slices of one size"
            )
        # Hosts, which have no number of a slice: equal parts in the devices' order.
        parts = np.reshape(np.asarray(devices), (num_slices, -1)).tolist()
    # fsdp last: it takes what the others leave.
    sizes = {
        "data": section.data,
        "tensor": section.tensor,
        "context": section.context,
        "fsdp": section.fsdp,
    }
    of_slice = min(len(part) for part in parts)
    left = of_slice
    for axis, size in sizes.items():
        if size == -1:
            size = left
            sizes[axis] = size
        if left % size:
            among = f"the {left} of {of_slice} devices that the other axes leave"
            if left == of_slice:
                among = count(left, "device")
            within = " of a slice" if num_slices > 1 else ""
            raise ShoalError(
                f"mesh.{axis}={size} does not divide {among}{within}; use {listed_divisors(left)}",
                f"mesh.{axis}",
            )
        left //= size
    shape = tuple(sizes[axis] for axis in AXES)
    parts = [part[: math.prod(shape)] for part in parts]
    _check_slices(parts)
    grid = np.stack([arrange(part, shape) for part in parts]).reshape(*slices, *shape)
    # Each axis of the mesh: its slices, then its devices in a slice.
    order = []
    whole_sizes = []
    for axis, (size, slices_of_axis) in enumerate(zip(shape, slices, strict=True)):
        order += [axis, len(shape) + axis]
        whole_sizes.append(size * slices_of_axis)
    return as_mesh(grid.transpose(order).reshape(whole_sizes), AXES)


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
    size = math.prod(shape)
    parts = by_slice(devices)
    if any(len(part) % size for part in parts):
        parts = [list(devices)]
    arranged = [arrange(part, (len(part) // size, *shape)) for part in parts]
    return np.concatenate(arranged)


def by_slice(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each slice, as JAX numbers them, in their order; devices without a number
    belong to slice 0."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        number = getattr(device, "slice_index", None) or 0
        slices.setdefault(number, []).append(device)
    return [slices[number] for number in sorted(slices)]


def by_host(devices: np.ndarray, size: int) -> np.ndarray:
    """Devices as rows of `size`: in their order, or host by host where only so each row lies within
    a host."""

    def within_hosts(grid: np.ndarray) -> bool:
        for row in grid:
            if len({device.process_index for device in row}) > 1:
                return False
        return True

    in_order = devices.reshape(-1, size)
    by_process = sorted(devices.flat, key=lambda device: device.process_index)
    host_by_host = np.asarray(by_process).reshape(-1, size)
    if within_hosts(host_by_host) and not within_hosts(in_order):
        return host_by_host
    return in_order


def _check_slices(parts: Sequence[Sequence[Any]]) -> None:
    """ShoalError unless each part is of one TPU slice, and each of another."""
    devices = [device for part in parts for device in part]
    if devices[0].platform != "tpu":
        return
    num_slices = len(by_slice(devices))
    if num_slices == len(parts) and all(len(by_slice(part)) == 1 for part in parts):
        return
    cure = "leave both out"
    if num_slices > 1:
        cure = (
            f"set mesh.dcn_data={num_slices} mesh.dcn_fsdp=1 (the slices exchange gradients alone) "
            f"or mesh.dcn_data=1 mesh.dcn_fsdp={num_slices}"
        )
    raise ShoalError(
        f"these {len(devices)} devices are {count(num_slices, 'slice')}, but "
        f"mesh.dcn_data x mesh.dcn_fsdp is {len(parts)}: {cure}"
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
    *most, last = [str(size) for size in sizes]
    if not most:
        return last
    return f"{', '.join(most)} or {last}"
