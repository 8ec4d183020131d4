"""Device meshes, the logical names of array dimensions, and the three roles that use the devices.

A parameter or activation names its dimensions logically (`embed`, `heads`, ...); a `Role` turns the names into a
sharding on its mesh. The trainer splits `embed` over `fsdp`; the sampler keeps whole copies over `data` and `fsdp` and
splits over `tensor` only, so that sampling a token moves no weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shoal.config.schema import MeshSection
from shoal.mesh.programs import Program, platform_options
from shoal.types import ShoalError

AXES = ("data", "fsdp", "tensor")

ROWS = ("data", "fsdp")
"""Mesh axes over which rows of a batch and slots of a sampler are split."""

TRAINER_RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "rows": ROWS,
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
}
# A token reads every weight once: gathering them over `fsdp` for each of some hundred tokens would move the whole
# model that often, so the sampler holds whole copies and splits over `tensor` alone.
SAMPLER_RULES = {**TRAINER_RULES, "embed": None}


@dataclass(frozen=True)
class Role:
    """One of trainer, sampler and reference, on its mesh.

    >>> role.sharding(("layers", "embed", "heads"), (4, 128, 256))
    NamedSharding(mesh=..., spec=PartitionSpec(None, 'fsdp', 'tensor'))
    """

    name: str
    mesh: Mesh
    rules: tuple[tuple[str, Any], ...]
    compiler_options: tuple[tuple[str, Any], ...] = ()
    in_flight: deque[Any] = field(default_factory=deque, compare=False, repr=False)  # one for all roles on the devices

    def jit(self, function: Callable, **options: Any) -> Program:
        """A function compiled for the role's devices, with its compiler options; `options` are those of `jax.jit`."""
        return Program(function, dict(self.compiler_options), self.in_flight, options)

    @property
    def platform(self) -> str:
        """cpu, gpu or tpu"""
        return self.mesh.devices.flat[0].platform

    def spec(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """Mesh axes for logical ones; a dimension that does not divide evenly is whole on every device.

        The sizes of a model are checked where it is made (`shoal.model.transformer.check_mesh`); what is left to stay
        whole are an odd vocabulary and the caches of key/value heads that are fewer than `tensor`.
        """
        rules = dict(self.rules)
        parts: list[Any] = []
        for axis, size in zip(axes, shape, strict=True):
            mapped = rules[axis] if axis is not None else None
            names = (mapped,) if isinstance(mapped, str) else (mapped or ())
            parts.append(mapped if size % math.prod(self.mesh.shape[n] for n in names) == 0 else None)
        return PartitionSpec(*parts)

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def num_parts(self, axis: str, size: int) -> int:
        """Number of parts that a dimension of this logical axis and size is split into."""
        names = self.spec((axis,), (size,))[0] or ()
        return math.prod(self.mesh.shape[n] for n in ((names,) if isinstance(names, str) else names))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Inside a compiled function: x laid out by its logical axes."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

    def put_rows(self, tree: Any) -> Any:
        """Host arrays whose first dimension is rows, split over the devices."""
        return jax.tree.map(
            lambda x: jax.device_put(x, self.sharding(("rows",) + (None,) * (np.ndim(x) - 1), np.shape(x))), tree
        )

    @property
    def row_shards(self) -> int:
        """Number of parts that rows are split into: R and the sampler's groups are multiples of it."""
        return math.prod(self.mesh.shape[axis] for axis in ROWS)


@dataclass(frozen=True)
class Roles:
    trainer: Role
    sampler: Role
    reference: Role


def make_mesh(section: MeshSection, devices: Sequence[Any]) -> Mesh:
    """The mesh `data x fsdp x tensor` over the first devices; fsdp=-1 takes all that the others leave.

    ShoalError for a size that does not divide the devices: the rest would stay idle, and a model dimension that the
    odd size does not divide either would be copied to every device.
    """
    # fsdp last: it takes what the others leave.
    sizes = {"data": section.data, "tensor": section.tensor, "fsdp": section.fsdp}
    left = len(devices)
    for axis, size in sizes.items():
        if size == -1:
            sizes[axis] = size = left
        if left % size:
            place = f"the {left} of {len(devices)} devices that the other axes leave"
            if left == len(devices):
                place = f"{left} device{'s' * (left > 1)}"
            raise ShoalError(f"mesh.{axis}={size} does not divide {place}; use {listed_divisors(left)}")
        left //= size
    shape = tuple(sizes[axis] for axis in AXES)
    grid = np.asarray(devices[: math.prod(shape)]).reshape(shape)
    # Auto: the compiler propagates shardings between the few constraints of the model; explicit axes would need one at
    # every operation.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def listed_divisors(*numbers: int) -> str:
    """The sizes that divide all of some numbers, as text.

    >>> listed_divisors(8), listed_divisors(12, 8)
    ('1, 2, 4 or 8', '1, 2 or 4')
    """
    common = math.gcd(*numbers)
    *most, last = (str(size) for size in range(1, common + 1) if common % size == 0)
    return f"{', '.join(most)} or {last}" if most else last


def make_roles(section: MeshSection, devices: Sequence[Any] | None = None) -> Roles:
    """All three roles on one mesh over the same devices: those that mesh.trainer names, or all."""
    devices = devices if devices is not None else available_devices()
    mesh = make_mesh(section, [devices[number] for number in shared_devices(section, len(devices))])
    options, in_flight = tuple(platform_options(mesh.devices.flat[0].platform).items()), deque()

    def role(name: str, rules: Mapping[str, Any]) -> Role:
        return Role(name, mesh, tuple(rules.items()), options, in_flight)

    return Roles(role("trainer", TRAINER_RULES), role("sampler", SAMPLER_RULES), role("reference", TRAINER_RULES))


def available_devices() -> list[Any]:
    """JAX's devices; ShoalError where JAX finds none of the platform that JAX_PLATFORMS names."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: `cuda` where jaxlib's plugin is not installed
        asked = jax.config.values["jax_platforms"]
        reason = str(error).partition(" (set JAX_PLATFORMS")[0]
        raise ShoalError(f"JAX_PLATFORMS={asked}: JAX finds no such devices{reason and f' ({reason})'}; unset it, name "
                         "a platform of this machine (cpu, cuda, tpu), or install 'shoal[cuda]' or 'shoal[tpu]'"
                         ) from error


def shared_devices(section: MeshSection, available: int) -> list[int]:
    """Numbers of the devices that all roles share; ShoalError if the roles ask for different devices, or for more than
    are available."""
    asked = {f"mesh.{name}": text for name in ("trainer", "sampler", "reference") if (text := getattr(section, name))}
    if not asked:
        return list(range(available))
    sizes = {key: devices_asked(key, text, available) for key, text in asked.items()}
    shown = ", ".join(f"{key}={text}" for key, text in asked.items())
    devices = f"{available} device{'s' * (available > 1)}"
    numbered = [number for size in sizes.values() if isinstance(size, list) for number in size]
    if beyond := [number for number in numbered if number >= available]:
        raise ShoalError(f"{shown}: there is no device {max(beyond)}; JAX finds {devices}, numbered from 0")
    counts = {key.removeprefix("mesh."): size for key, size in sizes.items() if isinstance(size, int)}
    if sum(counts.values()) > available and set(counts.values()) != {available}:
        raise ShoalError(f"{shown}: {' + '.join(f'{size} ({role})' for role, size in counts.items())} devices are "
                         f"requested, but JAX finds {devices}. Lower them, or leave them out: all "
                         "roles then share all devices")
    trainer = sizes.get("mesh.trainer", available)
    numbers = trainer if isinstance(trainer, list) else list(range(trainer))
    others = [(key, size) for key, size in sizes.items() if key != "mesh.trainer"]
    if any(_differs_from_trainer(key, size, numbers, available) for key, size in others):
        replicas = f" (replicas of {section.sampler_tensor})" if section.sampler_tensor else ""
        raise ShoalError(f"{shown}{replicas}: sampler or reference on other devices than the trainer are not supported "
                         "yet; leave mesh.sampler and mesh.reference out, all roles then share the trainer's devices")
    if section.sampler_tensor not in (0, section.tensor):
        raise ShoalError(f"mesh.sampler_tensor={section.sampler_tensor}: a sampler on the trainer's devices is split "
                         f"as the trainer is, over mesh.tensor={section.tensor}; set both to one value, or leave it "
                         "out")
    return numbers


def devices_asked(key: str, text: str, available: int) -> int | list[int]:
    """A role's setting as a number of devices, or as a list of their numbers.

    >>> devices_asked("mesh.trainer", "0.5", 8), devices_asked("mesh.trainer", "[0,2]", 8)
    (4, [0, 2])
    """
    wrong = ShoalError(f"{key}={text}: expected a fraction up to 1.0, a number of devices, or a list of their numbers "
                       "as [0,1]")
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


def _differs_from_trainer(key: str, size: int | list[int], trainer: Sequence[int], available: int) -> bool:
    """True if a role's devices differ from the trainer's: a number means the last ones for the sampler, and those after
    the trainer's for the reference."""
    if isinstance(size, list):
        return set(size) != set(trainer)
    if key == "mesh.reference":
        return size != len(trainer) or len(trainer) < available
    return set(range(available - size, available)) != set(trainer)
