"""The three roles that use the devices (trainer, sampler, reference), and the logical names of
array dimensions.

A parameter or activation names its dimensions logically (`embed`, `heads`, ...); a `Role` turns the
names into a sharding on its mesh. The trainer's mesh is data x fsdp x expert x context x tensor. It
splits `embed` over `fsdp`, `expert` and `context`; of experts, `expert` splits the number instead.
A row of a batch is split into equal parts over `context`; all computations except attention treat
these parts as rows. The sampler's mesh is replicas (`data`) x tensor: a replica has all weights, so
that no weights are moved to sample a token. Two roles may be two views of the same devices.
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
from shoal.text import count

TRAINER_RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp", "expert"),  # whole rows
    "rows": ("data", "fsdp", "expert", "context"),  # the parts of rows that devices hold
    # rows that all devices of `fsdp` have, because another dimension is split over `fsdp`
    "fsdp_rows": "data",
    "embed": ("fsdp", "expert", "context"),
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
    "experts": "expert",
}
# A token reads every weight once: gathering them over `fsdp` for each of some hundred tokens would
# move the whole model that often, so a replica of the sampler holds them whole or splits them over
# `tensor` alone.
SAMPLER_RULES = {
    **TRAINER_RULES,
    "batch": ("data",),
    "rows": ("data",),
    "embed": None,
    "experts": None,  # with `mesh.expert` above 1: `tensor`
}
SAMPLER_AXES = ("data", "tensor")


@dataclass(frozen=True)
class Role:
    """One of trainer, sampler and reference: its mesh, and the rules by which arrays are split over
    it.

    >>> role.sharding(("layers", "embed", "heads"), (4, 128, 256))
    NamedSharding(mesh=..., spec=PartitionSpec(None, ('fsdp', 'expert', 'context'), 'tensor'))
    """

    name: str
    mesh: Mesh
    # (logical axis, the mesh axis or tuple of mesh axes that split it; None: it is not split)
    rules: tuple[tuple[str, Any], ...]
    compiler_options: tuple[tuple[str, Any], ...] = ()

    def jit(self, function: Callable, queued: bool = True, **options: Any) -> Program:
        """Returns a function compiled for the role's devices with its compiler options. Nothing is
        compiled before the first call. `options` are those of `jax.jit`. `queued`: True if a call
        waits while too many earlier programs of these devices are unfinished; False, for a part of
        a sequence of programs: calls neither wait nor are waited for, except on CPU devices."""
        return Program(
            function, dict(self.compiler_options), self.mesh.devices.flat, options, queued
        )

    def with_options(self, options: Mapping[str, Mapping[str, Any]]) -> Role:
        """Returns the role with further compiler options: `options` has them by the kind of device,
        name -> value; the role's present options take precedence, and those of other kinds are
        ignored. This role is not changed."""
        merged = dict(options.get(self.mesh.devices.flat[0].device_kind, {}))
        merged |= dict(self.compiler_options)  # they include those that the user set
        return replace(self, compiler_options=tuple(merged.items()))

    @property
    def platform(self) -> str:
        """JAX's platform of the devices: cpu, gpu or tpu."""
        return self._device.platform

    @property
    def device_kind(self) -> str:
        """JAX's name for the devices' kind, such as `NVIDIA H200`."""
        return self._device.device_kind

    @property
    def _device(self) -> Any:
        """The first device; inside of a program of each replica its abstract counterpart."""
        mesh: Any = self.mesh  # an abstract one inside of a program of each replica
        return mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device

    def spec(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """Returns over which mesh axes each dimension of an array is split, by the role's rules:
        `("layers", "embed", "heads")` -> `P(None, ("fsdp", "expert", "context"), "tensor")`. A
        logical axis None is not split. A mesh axis splits the first dimension alone whose rule has
        it: `("experts", "embed", "mlp")` -> `P("expert", ("fsdp", "context"), "tensor")`.
        ValueError if a dimension's size is not divisible by the number of its
        parts; replicating the array instead would go unnoticed. A model's sizes are checked before
        that, with an error for users (`shoal.model.parameters.check_mesh`). KeyError for an axis
        that the rules do not have."""
        rules = dict(self.rules)
        mesh_axes: list[Any] = []
        used: set[str] = set()
        for axis, size in zip(axes, shape, strict=True):
            mapped = None if axis is None else rules[axis]
            if mapped is None:
                names = ()
            elif isinstance(mapped, str):
                names = (mapped,)
            else:
                names = mapped
            if used.intersection(names):
                names = tuple(name for name in names if name not in used)
                mapped = names or None
            used.update(names)
            num_parts = math.prod(self.mesh.shape[name] for name in names)
            if size % num_parts:
                raise ValueError(
                    f"{axis} of {tuple(shape)} has {size} elements, which {num_parts} devices do "
                    "not divide"
                )
            mesh_axes.append(mapped)
        return PartitionSpec(*mesh_axes)

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding for an array of `shape` with these logical axes; ValueError if a
        dimension's size is not divisible by the number of its parts, KeyError for an axis that the
        role's rules do not have."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array of which each device has a whole copy."""
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Inside a compiled function: returns x, laid out over the devices by the logical `axes`,
        one for each dimension; None: that dimension is not split. On a single device returns x
        itself. On several devices ValueError if a dimension's size is not divisible by the number
        of its parts."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

    def put_rows(self, tree: Any) -> Any:
        """Puts a tree of host arrays, whose first dimension is rows, onto the devices, and returns
        the tree of JAX arrays: rows are split over the devices (the `batch_shards`), other
        dimensions are not. ValueError if `batch_shards` does not divide the number of rows."""

        def put_array(x: Any) -> jax.Array:
            axes = ("batch",) + (None,) * (np.ndim(x) - 1)
            return put(x, self.sharding(axes, np.shape(x)))

        return jax.tree.map(put_array, tree)

    def split_rows(self, x: jax.Array) -> jax.Array:
        """Inside a compiled function: cuts the tokens of each row into `context` parts, [R, T, ...]
        -> [R * context, T / context, ...], so that each device holds whole entries of the first
        dimension. The parts of a row are on neighbouring devices, and so not neighbours in the
        result if a device holds several rows. Returns x itself if `context` is 1. R must be a
        multiple of `batch_shards`, and T of `context`."""
        if self.context == 1:
            return x
        tokens_of_part = x.shape[1] // self.context
        inner = x.shape[2:]
        # [R, T, ...] -> [shards, rows of a shard, context, T / context, ...]; then the parts of a
        # shard that have the same place in their rows come one after the other.
        x = x.reshape(self.batch_shards, -1, self.context, tokens_of_part, *inner)
        x = x.swapaxes(1, 2).reshape(-1, tokens_of_part, *inner)
        inner_axes = (None,) * (x.ndim - 1)
        return self.constrain(x, "rows", *inner_axes)

    def join_rows(self, x: jax.Array) -> jax.Array:
        """Undoes `split_rows`, inside a compiled function: [R * context, T / context, ...] -> [R,
        T, ...]. Returns whole rows, each copied to all of the `context` devices that held its
        parts; x itself if `context` is 1."""
        if self.context == 1:
            return x
        num_rows = x.shape[0] // self.context
        inner = x.shape[2:]
        # [R * context, T / context, ...] -> [shards, context, rows of a shard, T / context, ...]
        x = x.reshape(self.batch_shards, self.context, -1, *x.shape[1:])
        x = x.swapaxes(1, 2).reshape(num_rows, -1, *inner)
        inner_axes = (None,) * (x.ndim - 1)
        return self.constrain(x, "batch", *inner_axes)

    @property
    def host_layout(self) -> NamedSharding | None:
        """The sharding for an output that the host reads: with several processes a whole copy in
        each; with one process None, which leaves the layout to the compiler."""
        return self.replicated if jax.process_count() > 1 else None

    @property
    def local(self) -> Role:
        """The role on the devices of this process alone; the role itself if there is one process. A
        process must have whole replicas, which are entries of the mesh's first axis."""
        if jax.process_count() == 1:
            return self
        this_process = jax.process_index()
        own = [part for part in self.mesh.devices if part.flat[0].process_index == this_process]
        return replace(self, mesh=as_mesh(np.stack(own), self.mesh.axis_names))

    @property
    def row_shards(self) -> int:
        """The number of devices that rows, and their parts if `context` is more than 1, are split
        over. The number of rows of a sampler is a multiple of it."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)

    @property
    def batch_shards(self) -> int:
        """The number of shares that the rows of a batch are dealt into, each on `context` devices;
        the number of rows is a multiple of it."""
        return self.row_shards // self.context

    @property
    def context(self) -> int:
        """The number of devices that share the tokens of a row."""
        return self.mesh.shape["context"] if "context" in self.row_axes else 1

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes over which rows of a batch, or groups of a sampler, are split; () in a
        program of one replica."""
        return dict(self.rules)["rows"] or ()

    @property
    def expert_axis(self) -> str | None:
        """The mesh axis over which the experts of a layer are split by their number; None if each
        device has all of them."""
        axis = dict(self.rules)["experts"]
        if axis is None or self.mesh.shape[axis] == 1:
            return None
        return axis

    @property
    def expert(self) -> int:
        """The number of devices that the experts of a layer are split over by their number."""
        return self.mesh.shape[self.expert_axis] if self.expert_axis else 1

    @property
    def tensor(self) -> int:
        """The number of devices that share heads, feed-forward layers and vocabulary."""
        return self.mesh.shape["tensor"]


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Puts a host array onto the devices of a sharding and returns the JAX array. With several
    processes, each must give the same array. Each device gets only its part. A JAX array that has
    this sharding already is returned itself."""
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    # device_put would compare the processes' arrays each time.
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


@dataclass(frozen=True)
class Roles:
    """The roles of a job: trainer, sampler and reference. Two of them may share devices, or be the
    same."""

    trainer: Role
    sampler: Role
    reference: Role

    @property
    def all(self) -> tuple[Role, Role, Role]:
        return self.trainer, self.sampler, self.reference

    @property
    def num_devices(self) -> int:
        """Number of devices that have a role, in all processes."""
        used: set[Any] = set()
        for role in self.all:
            used.update(role.mesh.devices.flat)
        return len(used)

    @property
    def disaggregated(self) -> bool:
        """True if the sampler and the trainer share no device."""
        return set(self.trainer.mesh.devices.flat).isdisjoint(self.sampler.mesh.devices.flat)

    @property
    def hosts(self) -> list[Role]:
        """The sampler's role for each `Host` in this process. If the sampler has devices of its
        own, there is one host for each replica of the model, on its devices in this process, so
        that none waits for the others; else one host with all of the sampler's devices here."""
        local = self.sampler.local
        if not self.disaggregated:
            return [local]
        hosts = []
        for replica in local.mesh.devices:
            mesh = as_mesh(replica[None], local.mesh.axis_names)
            hosts.append(replace(local, mesh=mesh))
        return hosts


def make_roles(
    section: MeshSection, devices: Sequence[Any] | None = None, hidden_size: int = 0
) -> Roles:
    """Assigns devices to the roles by the keys of `mesh`, and returns the roles. Two roles that
    share devices may arrange them differently. `devices`: None for all that JAX finds, which
    configures JAX (`available_devices`). `hidden_size`: the model's, used only if the reference has
    other devices than the trainer: it then splits this dimension over the largest number of its
    devices that divides it; 0 if the model is not known yet.

    ShoalError if `section` says that there are several processes, because only training has them,
    and it passes a section without these keys; for devices that do not exist, roles that share only
    some of their devices, sizes of axes that do not divide the devices, and, in a run of several
    processes, roles that these cannot have (`process_refusal`).
    """
    if section.processes > 1:
        raise ShoalError(
            f"mesh.processes={section.processes}: only shoal train runs in several processes; "
            "leave out mesh.coordinator, mesh.processes and mesh.process"
        )
    if devices is None:
        devices = available_devices(section)
    numbers = role_devices(section, len(devices))
    try:
        mesh = make_mesh(section, [devices[number] for number in numbers.trainer])
    except ShoalError as error:
        if len(numbers.trainer) == len(devices):
            raise
        settings = []
        if section.trainer:
            settings.append(f"mesh.trainer={section.trainer}")
        if section.sampler:
            settings.append(f"mesh.sampler={section.sampler}")
        raise ShoalError(
            f"{error}. The trainer has {len(numbers.trainer)} of {len(devices)} devices by "
            f"{', '.join(settings)}",
            error.key,
        ) from None
    compiler_options: dict[str, Any] = dict(device_options(devices[0]))
    for option in section.compiler_options:
        name, _, value = option.partition("=")
        compiler_options[name] = value
    options = tuple(compiler_options.items())

    def role(name: str, mesh: Mesh, rules: Mapping[str, Any]) -> Role:
        return Role(name, mesh, tuple(rules.items()), options)

    trainer = role("trainer", mesh, TRAINER_RULES)
    # The devices of a replica all have its tokens: each can compute those of its experts.
    of_sampler = SAMPLER_RULES | {"experts": "tensor" if section.expert > 1 else None}
    sampler = role("sampler", _sampler_mesh(section, mesh, devices, numbers), of_sampler)
    if set(numbers.reference) == set(numbers.trainer):
        reference = trainer  # one layout, and so one program for its log-probs and the trainer's
    else:
        own_devices = [devices[number] for number in numbers.reference]
        # the largest number that divides the size of each slice; gcd(0, n) is n
        in_slice = 0
        for members in by_slice(own_devices):
            in_slice = math.gcd(in_slice, len(members))
        tensor = math.gcd(section.tensor, in_slice)
        split = math.gcd(in_slice // tensor, hidden_size)
        expert = math.gcd(section.expert, split)
        context = math.gcd(section.context, split // expert)
        fsdp = split // expert // context
        arranged = arrange_copies(own_devices, (fsdp, expert, context, tensor))
        reference = role("reference", as_mesh(arranged, mesh.axis_names), TRAINER_RULES)
    roles = Roles(trainer, sampler, reference)
    if jax.process_count() > 1:
        hosts = {device: device.process_index for device in devices}
        reason = process_refusal(section, roles, hosts)
        if reason:
            raise ShoalError(reason)
    return roles


def _sampler_mesh(
    section: MeshSection, trainer: Mesh, devices: Sequence[Any], numbers: RoleDevices
) -> Mesh:
    """Returns the sampler's mesh, replicas x tensor, over the trainer's devices if `numbers` gives
    both roles the same ones, else over those of `numbers.sampler`. ShoalError if
    `mesh.sampler_tensor` (or else `mesh.tensor`) does not divide the number of its devices.
    `trainer`: the trainer's mesh; `devices`: all available devices, into which `numbers` are
    indices."""
    tensor = section.sampler_tensor or section.tensor
    shared = set(numbers.sampler) == set(numbers.trainer)
    num_devices = trainer.size if shared else len(numbers.sampler)
    if num_devices % tensor:
        key = "mesh.tensor"
        hint = " for mesh.sampler_tensor"
        if section.sampler_tensor:
            key = "mesh.sampler_tensor"
            hint = ""
        raise ShoalError(
            f"{key}={tensor} does not divide the sampler's {count(num_devices, 'device')}; use "
            f"{listed_divisors(num_devices)}{hint}",
            key,
        )
    if shared:
        # In the trainer's order where possible: weights are then published without an exchange of
        # parts. In a torus that order puts neighbours on different hosts, but a process samples
        # with whole replicas on its own devices.
        return as_mesh(by_host(trainer.devices, tensor), SAMPLER_AXES)
    own_devices = [devices[number] for number in numbers.sampler]
    # [replicas, tensor]
    return as_mesh(arrange_copies(own_devices, (tensor,)), SAMPLER_AXES)


def process_refusal(section: MeshSection, roles: Roles, hosts: Mapping[Any, int]) -> str:
    """Returns why a run with one process on each host cannot have these roles, with the key to
    change; "" if it can. `hosts`: device -> number of its host, for all available devices.

    Refused are roles that do not all have the same devices, idle devices, and a replica of the
    sampler whose devices are on two hosts.
    """
    num_processes = len(set(hosts.values()))
    if num_processes == 1:
        return ""
    trainer = roles.trainer.mesh
    sampler = roles.sampler
    for role in roles.all:
        if set(role.mesh.devices.flat) != set(trainer.devices.flat):
            return (
                f"a run in {num_processes} processes has all roles on all devices, since each "
                "process samples on its own: leave out mesh.trainer, mesh.sampler and "
                "mesh.reference, or start one process"
            )
    if trainer.size != len(hosts):
        axes = " x ".join(f"mesh.{axis}={getattr(section, axis)}" for axis in trainer.axis_names)
        return (
            f"{axes} uses {trainer.size} of {len(hosts)} devices, but {num_processes} processes "
            "train on all of theirs: set mesh.fsdp=-1"
        )
    for replica in sampler.mesh.devices:
        hosts_of_replica = {hosts[device] for device in replica.flat}
        if len(hosts_of_replica) > 1:
            of_process = len(hosts) // num_processes
            return (
                f"a replica of the sampler ({sampler.tensor} devices) would lie in two processes, "
                f"which have {of_process} devices each: set "
                f"mesh.sampler_tensor={math.gcd(sampler.tensor, of_process)}"
            )
    return ""


def view_of(role: Role, devices: Sequence[Any]) -> Role:
    """Returns the role with a mesh over `devices`, by whose shardings the role's arrays can be laid
    out there without cutting a part in two: each mesh axis but the first, from the last one on,
    gets the largest size that divides both its present size and the devices that are left; the
    first axis gets the rest. Returns the role itself if these are its devices."""
    if set(devices) == set(role.mesh.devices.flat):
        return role
    sizes = []
    left = len(devices)
    for axis in reversed(role.mesh.axis_names[1:]):
        size = math.gcd(role.mesh.shape[axis], left)
        sizes.insert(0, size)
        left //= size
    mesh = as_mesh(np.asarray(devices).reshape([left, *sizes]), role.mesh.axis_names)
    return replace(role, mesh=mesh)
