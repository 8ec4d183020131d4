"""Finds JAX's devices, divides them among the roles (all, a fraction, a number or a list, as
`mesh.trainer`, `.sampler` and `.reference` say), and arranges them in meshes.

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
"""JAX's name for the platform of Pathways' proxy."""


PINNED_HOST = "pinned_host"
"""JAX's name for memory of the host that devices can read directly."""


ANSWER_SECONDS = 15
"""How long a proxy of Pathways may take to answer; without a limit JAX waits for ever."""


def available_devices(section: MeshSection = NO_KEYS, shared: bool = False) -> list[Any]:
    """Returns all devices that JAX finds (under Pathways those of all hosts). Before that it
    configures JAX, which has an effect only if JAX has not looked for its devices yet.

    It sets JAX's platform: to Pathways' proxy if `section` or the environment asks for Pathways,
    else to `cpu` if none was named and the machine certainly has no accelerator. Unless the
    environment has them, it sets XLA_PYTHON_CLIENT_MEM_FRACTION to GPU_SHARE, and with `shared`
    also XLA_PYTHON_CLIENT_ALLOCATOR to `platform`, so that memory freed on a GPU can be taken by
    another process instead of being kept in XLA's pool. ShoalError if JAX finds no device of the
    platform that JAX_PLATFORMS names, if no proxy answers, or if Pathways is asked for and its
    address or client is missing (`section`: only its key `pathways` is read).
    """
    through_proxy = uses_pathways(section)
    if through_proxy:
        start_pathways()
    elif not jax.config.values["jax_platforms"] and not accelerators_possible():
        jax.config.update("jax_platforms", "cpu")
    if shared:
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    # JAX reads this variable when it finds its first GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_SHARE))
    try:
        return jax.devices()
    # AssertionError: raised for `cuda` if jaxlib's plugin is not installed.
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
    """Returns the error for a platform of which JAX finds no devices, with what to do: unset
    JAX_PLATFORMS, or install the extra for GPUs or TPUs. `platforms`: the value of JAX_PLATFORMS;
    `reason`: added in brackets, '' for none."""
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
    """Raises ShoalError if this machine certainly lacks the devices of a platform that
    JAX_PLATFORMS names. Also if Pathways is asked for and its address or client is missing. Does
    not make JAX look for devices. The first platform without devices is named. Other platforms than
    `cuda` and `tpu` are not checked, and none on a machine without /sys. `root`: where the
    machine's files are, for tests."""
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
    """True if the machine has a TPU, judging by its device files and PCI vendors. `root`: where the
    machine's files are, for tests."""
    if _has_file(root, "dev/accel*", "dev/vfio/[0-9]*"):
        return True
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        if vendor.read_text().strip() == "0x1ae0":  # Google
            return True
    return False


def has_gpu(root: Path = Path("/")) -> bool:
    """True if the machine has an NVIDIA GPU, judging by its device files and the driver's library.
    `root`: where the device files are, for tests."""
    if _has_file(root, "dev/nvidia*", "dev/dxg"):  # dxg: of Windows' Linux
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver's
    except OSError:
        return False
    return True


def _has_file(root: Path, *patterns: str) -> bool:
    """True if any file under `root` matches any of the patterns."""
    return any(next(root.glob(pattern), None) for pattern in patterns)


def accelerators_possible(root: Path = Path("/")) -> bool:
    """True if JAX may find more than CPUs on this machine; False only if it certainly cannot: no
    plug-in but NVIDIA's is installed, and neither a TPU nor a GPU is here. `root`: where the
    machine's files are, for tests.

    This avoids noise: the compilers of the extra `plan` are JAX's plug-ins for TPUs and GPUs, and
    on a machine with neither each of them prints a page of errors when JAX looks for devices.
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
    """Returns the counts of a device's memory as the device reports them, name -> bytes; {} for a
    CPU and behind a proxy of Pathways."""
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        return {}


@functools.cache
def _trimming() -> Callable[[int], Any] | None:
    """Returns glibc's function `malloc_trim`; None if this process has another allocator."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed_memory() -> None:
    """Gives memory that the process has freed back to the system, because its allocator keeps some
    of it. Does so only if JAX's devices are CPUs, whose memory is the RAM, and the allocator is
    glibc's; else does nothing.

    A compilation, or writing a checkpoint, leaves some hundred MB of freed pieces, which are of no
    use for large arrays and so come on top of the memory that the next update takes.
    """
    trim = _trimming()
    if trim is not None and jax.default_backend() == "cpu":
        trim(0)


def has_host_memory(device: Any) -> bool:
    """True unless the device's programs cannot use memory of its host (`pinned_host`)."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    return PINNED_HOST in kinds or not kinds  # a GPU that is only described has none at all


@dataclass(frozen=True)
class RoleDevices:
    """The numbers of the devices of each role, as indices, from 0, into the list of available
    devices."""

    trainer: list[int]
    sampler: list[int]
    reference: list[int]


def role_devices(section: MeshSection, available: int) -> RoleDevices:
    """Assigns devices to the roles and returns their numbers. `available`: how many devices there
    are. If numbers or fractions are given, the trainer gets the first devices, the sampler the last
    that the trainer's list does not name, and the reference the first that both leave.

    Two roles share all of their devices or none. They share if both name the same list, if both
    take all as the fraction 1.0, or if there is one device. A role that is not set shares: the
    sampler with the trainer, and the reference with the sampler; a trainer that is not set gets
    what the others leave, or all. ShoalError for devices that do not exist, for too few, and for
    roles that overlap in part.
    """
    texts = {}
    for name in ("trainer", "sampler", "reference"):
        text = getattr(section, name)
        if text:
            texts[name] = text
    shown = ", ".join(f"mesh.{name}={text}" for name, text in texts.items())
    devices = count(available, "device")
    everything = list(range(available))
    listed: dict[str, list[int]] = {}  # role with a list -> the numbers of its devices
    counts: dict[str, int] = {}  # role with a number or fraction -> how many devices
    requested: dict[str, int] = {}  # each role that is set -> how many devices it asks for
    for name, text in texts.items():
        size = devices_asked(f"mesh.{name}", text, available)
        if isinstance(size, list):
            listed[name] = size
            requested[name] = len(size)
            continue
        requested[name] = size
        # A role with 1.0 takes all devices, and shares them with other roles that take all. A
        # single device is always shared.
        takes_all = size == available and (available == 1 or not text.isdigit())
        if not takes_all:
            counts[name] = size
    # -1: no role has a list
    largest = -1
    for numbers in listed.values():
        largest = max(largest, *numbers)
    if largest >= available:
        raise ShoalError(
            f"{shown}: there is no device {largest}; JAX finds {devices}, numbered from 0. "
            f"{_all_devices(section, available)}"
        )

    def devices_for(name: str, free: Sequence[int]) -> list[int]:
        """Returns the devices of the role `name`, which is set: those that its list names, all if
        it takes all, else as many as it asks for, the first ones of `free`. ShoalError if `free`
        has fewer."""
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

    # The sampler: the last devices, of those that the trainer does not list.
    sampler: list[int] = []
    if "sampler" in texts:
        listed_for_trainer = listed.get("trainer", [])
        others = [number for number in everything if number not in listed_for_trainer]
        # `counts` has no sampler with a list or with all devices: `free` is then not read.
        first = max(0, len(others) - counts.get("sampler", 0))
        sampler = devices_for("sampler", others[first:])
    # The trainer: the first devices that the sampler leaves; all if nothing is left.
    left = [number for number in everything if number not in sampler]
    if "trainer" in texts:
        trainer = devices_for("trainer", left if "sampler" in counts else everything)
    else:
        reserved: Sequence[int] = ()
        if "reference" in listed:
            reserved = listed["reference"]
        elif "reference" in counts:
            reserved = left[-counts["reference"] :]  # left to the reference
        trainer = [number for number in left if number not in reserved] or left or everything
    if not sampler:
        sampler = trainer
    # The reference: the first devices that both leave.
    reference = sampler
    if "reference" in texts:
        taken = set(trainer) | set(sampler)
        free = [number for number in everything if number not in taken]
        reference = devices_for("reference", free)
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
    """Returns a sentence for messages with the settings by which all roles share all devices: `All
    roles share all devices with mesh.trainer= mesh.fsdp=-1`. It names only keys that are set to
    something else; an empty value also resets a key of a stored configuration. A key of an axis is
    named if its size does not divide `available`, the number of devices; mesh.fsdp only if it is
    above 1."""
    words = []
    for role in ("trainer", "sampler", "reference"):
        if getattr(section, role):
            words.append(f"mesh.{role}=")
    defaults = {
        "data": 1,
        "tensor": 1,
        "context": 1,
        "expert": 1,
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
    """Reads the text of a role's key: an int for a number of devices or a fraction of the
    `available` ones, a list for the numbers of certain devices. A fraction is rounded down, to at
    least one device. A text with `.` or `e` is a fraction, so "1" is one device and "1.0" all. A
    number above `available` is not refused here. ShoalError, which names `key`, if the text cannot
    be read.

    >>> devices_asked("mesh.trainer", "0.5", 8), devices_asked("mesh.trainer", "[0,2]", 8)
    (4, [0, 2])
    """
    wrong = ShoalError(
        f"{key}={text}: expected a fraction up to 1.0, a number of devices, or a list of their "
        "numbers, such as [0,1]"
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
    """True if JAX_PLATFORMS names Pathways' proxy, or if `mesh.pathways` is set and the environment
    has a proxy's address."""
    return _is_chosen() or (section.pathways and bool(jax.config.values["jax_backend_target"]))


def check_pathways() -> None:
    """Raises ShoalError if the proxy's address (JAX_BACKEND_TARGET) or Pathways' client (the
    package pathwaysutils) is missing."""
    target = jax.config.values["jax_backend_target"]
    if not target:
        raise ShoalError(
            f"JAX_PLATFORMS={PROXY}: JAX_BACKEND_TARGET is missing; set it to the address of the "
            "proxy of Pathways, such as grpc://HOST:29000, or unset JAX_PLATFORMS"
        )
    if find_spec("pathwaysutils") is None:
        raise ShoalError(
            f"JAX_BACKEND_TARGET={target}: Pathways needs the package pathwaysutils; install "
            "'.[pathways]'"
        )


def start_pathways() -> None:
    """Makes Pathways' proxy JAX's platform; this has to happen before JAX looks for its devices,
    else ShoalError. ShoalError too if the proxy's address or the package pathwaysutils is missing.
    If the environment has no limit for it, sets the seconds that the proxy may take to answer."""
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
    """True if JAX_PLATFORMS names the proxy."""
    return PROXY in (jax.config.values["jax_platforms"] or "").split(",")


AXES = ("data", "fsdp", "expert", "context", "tensor")


def make_mesh(section: MeshSection, devices: Sequence[Any]) -> Mesh:
    """Returns the trainer's mesh `data x fsdp x expert x context x tensor` over `devices`, with the
    sizes of `section`. `mesh.fsdp=-1` gets all devices that the other axes leave.

    `mesh.dcn_data` and `mesh.dcn_fsdp` are numbers of slices (or hosts), which multiply their axes;
    each slice gives as many devices; on TPUs they must be the very slices of the devices, else
    ShoalError. ShoalError for a size that does not divide the devices: the rest would stay idle. If
    the sizes divide them but their product is smaller, the mesh has the first devices of each
    slice.
    """
    slices = (section.dcn_data, section.dcn_fsdp, 1, 1, 1)
    num_slices, parts = math.prod(slices), by_slice(devices)
    if num_slices != len(parts):
        if len(devices) % num_slices:
            raise ShoalError(
                f"mesh.dcn_data={section.dcn_data} x mesh.dcn_fsdp={section.dcn_fsdp} does not "
                f"divide {count(len(devices), 'device')} into {num_slices} slices of one size"
            )
        # The parts are hosts, which JAX does not number as slices: equal parts, in the devices'
        # order.
        parts = np.reshape(np.asarray(devices), (num_slices, -1)).tolist()
    # fsdp last: it takes what the others leave.
    sizes = {
        "data": section.data,
        "tensor": section.tensor,
        "context": section.context,
        "expert": section.expert,
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
    # [dcn_data, dcn_fsdp, 1, 1, 1, data, fsdp, expert, context, tensor]
    grid = np.stack([arrange(part, shape) for part in parts]).reshape(*slices, *shape)
    # Each axis of the mesh: its slices, then its devices in a slice.
    order = []
    whole_sizes = []
    for axis, (size, slices_of_axis) in enumerate(zip(shape, slices, strict=True)):
        # the axis's place among the slices' dimensions, then among those of a slice
        order += [axis, len(shape) + axis]
        whole_sizes.append(size * slices_of_axis)
    return as_mesh(grid.transpose(order).reshape(whole_sizes), AXES)


def as_mesh(grid: np.ndarray, axes: Sequence[str]) -> Mesh:
    """Returns a mesh of JAX with these axes, outermost first, over the devices of `grid`, which has
    one dimension for each axis."""
    # Auto: the compiler propagates shardings between the few constraints of the model; explicit
    # axes would need one at every operation.
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def arrange(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Returns the devices of one slice as an array of `shape`; on a TPU neighbours in the array are
    neighbours in the torus if possible, otherwise the devices keep their order. `shape`: its
    product is the number of devices."""
    if devices[0].platform == "tpu":
        try:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        except (AssertionError, NotImplementedError, ValueError):
            pass  # these devices of a slice form no box: keep their order
    return np.reshape(np.asarray(devices), shape)


def arrange_copies(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Returns devices as an array [copies, *shape], for a mesh with as many copies of a model as
    there are devices for; `shape`: that of one copy, whose size must divide the number of devices.
    Each copy lies within one slice if the slices' sizes allow it; copies need not be neighbours,
    because they exchange nothing."""
    size = math.prod(shape)
    parts = by_slice(devices)
    if any(len(part) % size for part in parts):
        parts = [list(devices)]
    arranged = [arrange(part, (len(part) // size, *shape)) for part in parts]
    return np.concatenate(arranged)


def by_slice(devices: Sequence[Any]) -> list[list[Any]]:
    """Returns the devices of each slice, slices in the order of their numbers in JAX; devices
    without a number count as slice 0."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        number = getattr(device, "slice_index", None) or 0
        slices.setdefault(number, []).append(device)
    return [slices[number] for number in sorted(slices)]


def by_host(devices: np.ndarray, size: int) -> np.ndarray:
    """Returns devices as rows of `size`, [N / size, size]. They keep their order, unless that puts
    devices of two hosts into one row and sorting them by host does not. A host is a process of JAX.
    `size` must divide the number of devices."""

    def within_hosts(grid: np.ndarray) -> bool:
        """True if no row has devices of two hosts."""
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
    """Raises ShoalError unless all TPU devices of a part are of one slice, and no two parts are of
    the same slice. Does nothing for other devices than TPUs."""
    devices = [device for part in parts for device in part]
    if devices[0].platform != "tpu":
        return
    num_slices = len(by_slice(devices))
    if num_slices == len(parts) and all(len(by_slice(part)) == 1 for part in parts):
        return
    cure = "leave both out"
    if num_slices > 1:
        cure = (
            f"set mesh.dcn_data={num_slices} mesh.dcn_fsdp=1 (the slices exchange only gradients) "
            f"or mesh.dcn_data=1 mesh.dcn_fsdp={num_slices}"
        )
    raise ShoalError(
        f"these {len(devices)} devices are {count(num_slices, 'slice')}, but "
        f"mesh.dcn_data x mesh.dcn_fsdp is {len(parts)}: {cure}"
    )


def listed_divisors(*numbers: int) -> str:
    """Returns the common divisors of some numbers as text, the sizes that divide all of them. The
    numbers are positive.

    >>> listed_divisors(8), listed_divisors(12, 8)
    ('1, 2, 4 or 8', '1, 2 or 4')
    """
    common = math.gcd(*numbers)
    return listed([size for size in range(1, common + 1) if common % size == 0])


def listed(sizes: Sequence[int]) -> str:
    """Returns sizes as text: [1, 2, 4] -> `1, 2 or 4`, [4] -> `4`."""
    *most, last = [str(size) for size in sizes]
    if not most:
        return last
    return f"{', '.join(most)} or {last}"
