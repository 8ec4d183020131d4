"""The three roles that use the devices, and the logical names of array dimensions.

A parameter or activation names its dimensions logically (`embed`, `heads`, ...); a `Role` turns the
names into a sharding on its mesh. The trainer's mesh is data x fsdp x context x tensor and splits
`embed` over `fsdp` and `context`. A row of a batch is split into equal parts over `context`, which
are rows to all but attention. The sampler's is replicas (`data`) x tensor: a replica has all
weights, so that sampling a token moves none. Two roles may be two views of the same devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shoal.config.sections.devices import MeshSection
from shoal.mesh.devices import (
    RoleDevices,
    arrange_copies,
    as_mesh,
    available_devices,
    by_host,
    by_slice,
    listed_divisors,
    make_mesh,
    role_devices,
)
from shoal.mesh.programs import Program, device_options
from shoal.records import ShoalError

TRAINER_RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),  # whole rows
    "rows": ("data", "fsdp", "context"),  # their parts
    # rows of all devices of `fsdp` together, where these share another dimension
    "fsdp_rows": "data",
    "embed": ("fsdp", "context"),
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
}
# A token reads every weight once: gathering them over `fsdp` for each of some hundred tokens would
# move the whole model that often, so a replica of the sampler holds them whole or splits them over
# `tensor` alone.
SAMPLER_RULES = {**TRAINER_RULES, "batch": ("data",), "rows": ("data",), "embed": None}
SAMPLER_AXES = ("data", "tensor")


@dataclass(frozen=True)
class Role:
    """One of trainer, sampler and reference, on its mesh.

    >>> role.sharding(("layers", "embed", "heads"), (4, 128, 256))
    NamedSharding(mesh=..., spec=PartitionSpec(None, ('fsdp', 'context'), 'tensor'))
    """

    name: str
    mesh: Mesh
    rules: tuple[tuple[str, Any], ...]
    compiler_options: tuple[tuple[str, Any], ...] = ()

    def jit(self, function: Callable, queued: bool = True, **options: Any) -> Program:
        """A function compiled for the role's devices, with its compiler options; `options` are
        those of `jax.jit`."""
        return Program(
            function, dict(self.compiler_options), self.mesh.devices.flat, options, queued
        )

    def with_options(self, options: Mapping[str, Mapping[str, Any]]) -> Role:
        """The role with options of some of its programs besides, by kind of device."""
        # The role's come last: they hold those that the user gave.
        own = {
            **options.get(self.mesh.devices.flat[0].device_kind, {}),
            **dict(self.compiler_options),
        }
        return replace(self, compiler_options=tuple(own.items()))

    @property
    def platform(self) -> str:
        """cpu, gpu or tpu"""
        return self._device.platform

    @property
    def device_kind(self) -> str:
        """What JAX calls the devices, such as `NVIDIA H200`."""
        return self._device.device_kind

    @property
    def _device(self) -> Any:
        mesh: Any = self.mesh  # an abstract one inside of a program of each replica
        return mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device

    def spec(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """Mesh axes for logical ones. ValueError for a size that its axes do not divide: a copy on
        every device would go unnoticed. The sizes of a model are checked before
        (`shoal.model.transformer.check_mesh`)."""
        rules = dict(self.rules)
        parts: list[Any] = []
        for axis, size in zip(axes, shape, strict=True):
            mapped = rules[axis] if axis is not None else None
            names = (mapped,) if isinstance(mapped, str) else (mapped or ())
            if size % (count := math.prod(self.mesh.shape[n] for n in names)):
                raise ValueError(
                    f"{axis} of {tuple(shape)} has {size} elements, which {count} devices do not "
                    "divide"
                )
            parts.append(mapped)
        return PartitionSpec(*parts)

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))

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
            lambda x: put(x, self.sharding(("batch",) + (None,) * (np.ndim(x) - 1), np.shape(x))),
            tree,
        )

    def split_rows(self, x: jax.Array) -> jax.Array:
        """Inside a compiled function: rows [R, T, ...] as the parts [R * context, T / context, ...]
        that devices hold; those of a row are on neighbours."""
        if self.context == 1:
            return x
        x = x.reshape(
            self.batch_shards, -1, self.context, x.shape[1] // self.context, *x.shape[2:]
        ).swapaxes(1, 2)
        return self.constrain(x.reshape(-1, *x.shape[3:]), "rows", *(None,) * (x.ndim - 3))

    def join_rows(self, x: jax.Array) -> jax.Array:
        """The way back, to whole rows on each of their devices."""
        if self.context == 1:
            return x
        x = x.reshape(self.batch_shards, self.context, -1, *x.shape[1:]).swapaxes(1, 2)
        return self.constrain(
            x.reshape(x.shape[0] * x.shape[1], -1, *x.shape[4:]), "batch", *(None,) * (x.ndim - 3)
        )

    @property
    def host_layout(self) -> NamedSharding | None:
        """Of an output that the host reads: whole in each of several processes; of one, as the
        compiler has it."""
        return self.replicated if jax.process_count() > 1 else None

    @property
    def local(self) -> Role:
        """The role on this process's devices alone, whole parts of its first axis; itself with one
        process."""
        if jax.process_count() == 1:
            return self
        own = [
            part for part in self.mesh.devices if part.flat[0].process_index == jax.process_index()
        ]
        return replace(self, mesh=as_mesh(np.stack(own), self.mesh.axis_names))

    @property
    def row_shards(self) -> int:
        """Number of devices that rows and their parts are split over; the sampler's groups are a
        multiple of it."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)

    @property
    def batch_shards(self) -> int:
        """Number of parts that whole rows are split into, on `context` devices each: R is a
        multiple of it."""
        return self.row_shards // self.context

    @property
    def context(self) -> int:
        """Devices that share the tokens of a row."""
        return self.mesh.shape["context"] if "context" in self.row_axes else 1

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Mesh axes over which rows of a batch and groups of a sampler are split; none in a program
        of one replica."""
        return dict(self.rules)["rows"] or ()

    @property
    def tensor(self) -> int:
        """Devices that share heads, feed-forward layers and vocabulary."""
        return self.mesh.shape["tensor"]


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """A host array on the devices of a sharding; of several processes, each has the same array."""
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    # device_put would compare the processes' arrays each time.
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


@dataclass(frozen=True)
class Roles:
    """The trainer, the sampler and the reference; two of them may share devices, or be one."""

    trainer: Role
    sampler: Role
    reference: Role

    @property
    def all(self) -> tuple[Role, Role, Role]:
        return self.trainer, self.sampler, self.reference

    @property
    def disaggregated(self) -> bool:
        """True if the sampler has devices of its own."""
        return set(self.trainer.mesh.devices.flat).isdisjoint(self.sampler.mesh.devices.flat)

    @property
    def hosts(self) -> list[Role]:
        """The sampler's role on the devices of each of its hosts in this process: one with all, or,
        where these are its own, one for each replica, which then waits for no other."""
        local = self.sampler.local
        if not self.disaggregated:
            return [local]
        return [
            replace(local, mesh=as_mesh(replica[None], local.mesh.axis_names))
            for replica in local.mesh.devices
        ]


def make_roles(
    section: MeshSection, devices: Sequence[Any] | None = None, hidden_size: int = 0
) -> Roles:
    """The roles on their devices; two that share devices may divide them differently.

    A reference on other devices than the trainer's splits a model's `hidden_size` over as many of
    them as divide it. ShoalError for devices that are not there, roles that overlap in part, sizes
    that do not divide, and what several processes cannot do.
    """
    if section.processes > 1:
        raise ShoalError(
            f"mesh.processes={section.processes}: only shoal train runs in several processes; "
            "leave out mesh.coordinator, mesh.processes and mesh.process"
        )
    devices = devices if devices is not None else available_devices(section)
    numbers = role_devices(section, len(devices))
    try:
        mesh = make_mesh(section, [devices[number] for number in numbers.trainer])
    except ShoalError as error:
        given = ", ".join(
            f"mesh.{name}={text}"
            for name in ("trainer", "sampler")
            if (text := getattr(section, name))
        )
        if len(numbers.trainer) == len(devices):
            raise
        raise ShoalError(
            f"{error}. The trainer has {len(numbers.trainer)} of {len(devices)} devices by {given}",
            error.key,
        ) from None
    given = dict(option.split("=", 1) for option in section.compiler_options)
    options = tuple({**device_options(devices[0]), **given}.items())

    def role(name: str, mesh: Mesh, rules: Mapping[str, Any]) -> Role:
        return Role(name, mesh, tuple(rules.items()), options)

    trainer = role("trainer", mesh, TRAINER_RULES)
    sampler = role("sampler", _sampler_mesh(section, mesh, devices, numbers), SAMPLER_RULES)
    reference = trainer  # one layout, and so one program for its log-probs and the trainer's
    if set(numbers.reference) != set(numbers.trainer):
        scoring = [devices[number] for number in numbers.reference]
        within = math.gcd(*map(len, by_slice(scoring)))
        tensor = math.gcd(section.tensor, within)
        context = math.gcd(section.context, within // tensor, hidden_size)
        shape = (math.gcd(within // tensor, hidden_size) // context, context, tensor)
        mesh = as_mesh(arrange_copies(scoring, shape), mesh.axis_names)
        reference = role("reference", mesh, TRAINER_RULES)
    roles = Roles(trainer, sampler, reference)
    if jax.process_count() > 1 and (
        reason := refusal(section, roles, {device: device.process_index for device in devices})
    ):
        raise ShoalError(reason)
    return roles


def _sampler_mesh(
    section: MeshSection, trainer: Mesh, devices: Sequence[Any], numbers: RoleDevices
) -> Mesh:
    """The sampler's replicas x tensor; ShoalError for a size that does not divide its devices."""
    tensor = section.sampler_tensor or section.tensor
    shared = set(numbers.sampler) == set(numbers.trainer)
    count = trainer.size if shared else len(numbers.sampler)
    if count % tensor:
        key = "mesh.sampler_tensor" if section.sampler_tensor else "mesh.tensor"
        hint = "" if section.sampler_tensor else " for mesh.sampler_tensor"
        raise ShoalError(
            f"{key}={tensor} does not divide the sampler's {count} device{'s' * (count > 1)}; use "
            f"{listed_divisors(count)}{hint}",
            key,
        )
    if shared:
        # In the trainer's order where that will do: weights are published without an exchange of
        # parts before. Of a torus it puts neighbours on different hosts, but a process samples with
        # whole replicas on its own devices.
        return as_mesh(by_host(trainer.devices, tensor), SAMPLER_AXES)
    return as_mesh(
        arrange_copies([devices[number] for number in numbers.sampler], (tensor,)), SAMPLER_AXES
    )


def refusal(section: MeshSection, roles: Roles, hosts: Mapping[Any, int]) -> str:
    """Why a process on each host cannot have these roles; "" if it can. `hosts`: of each device
    that is available.

    Refused are idle devices, roles on devices of their own, and a replica over two processes.
    """
    processes, trainer, sampler = len(set(hosts.values())), roles.trainer.mesh, roles.sampler
    if processes == 1:
        return ""
    if any(set(role.mesh.devices.flat) != set(trainer.devices.flat) for role in roles.all):
        return (
            f"a run in {processes} processes has all roles on all devices, since each process "
            "samples on its own: leave out mesh.trainer, mesh.sampler and mesh.reference, or start "
            "one process"
        )
    if trainer.size != len(hosts):
        axes = " x ".join(f"mesh.{axis}={getattr(section, axis)}" for axis in trainer.axis_names)
        return (
            f"{axes} uses {trainer.size} of {len(hosts)} devices, but {processes} processes train "
            "on all of theirs: set mesh.fsdp=-1"
        )
    if any(len({hosts[device] for device in replica.flat}) > 1 for replica in sampler.mesh.devices):
        each = len(hosts) // processes
        return (
            f"a replica of the sampler ({sampler.tensor} devices) would lie in two processes, "
            f"which have {each} devices each: set "
            f"mesh.sampler_tensor={math.gcd(sampler.tensor, each)}"
        )
    return ""


def view_of(role: Role, devices: Sequence[Any]) -> Role:
    """A role as it would be on other devices, in parts that hold whole parts of its own: as many as
    divide both."""
    if set(devices) == set(role.mesh.devices.flat):
        return role
    shape, left = [], len(devices)
    for axis in reversed(role.mesh.axis_names[1:]):
        shape.append(math.gcd(role.mesh.shape[axis], left))
        left //= shape[-1]
    mesh = as_mesh(np.asarray(devices).reshape(left, *reversed(shape)), role.mesh.axis_names)
    return replace(role, mesh=mesh)
