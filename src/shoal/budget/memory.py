"""What a job holds in the memory of its devices: the only place that knows bytes.

Sizes             role -> phase -> part -> bytes on each of the role's devices
weight_sizes      parameters, moments, gradient, the sampler's copy, reference, teacher
job_sizes         these, and the sampler's caches
..._bytes         what programs are reckoned to need besides
available_memory  what a device has
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.algorithm.logprobs import CHUNK_ELEMENTS
from shoal.config.train import Config
from shoal.mesh import PINNED_HOST, Role, Roles, accelerator_of, memory_stats
from shoal.model.architecture import Architecture
from shoal.model.layers import ffn_chunks
from shoal.model.linear import QUANTISED, Quantised
from shoal.model.parameters import (
    frozen_specs,
    param_shapes,
    param_specs,
    quantised_specs,
    trained_specs,
)
from shoal.trainer.schedule import schedule_of
from shoal.weights.source import reward_architectures

ROLES = ("trainer", "sampler", "reference")

Held = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Role -> phase (`always`, `sampling`, `update`) -> part -> bytes on each of the role's devices; in
the phase `host` those in the host's memory for each device."""


@dataclass(frozen=True)
class Sizes:
    """Bytes on each device of a role, by phase and part.

    >>> sizes.on("trainer", "update")
    {"parameters": 3437568, "Adam's moments": 6875136, "the sampler's copy": 1718784,
     "gradient": 3437568}
    """

    bytes_by_role: Held  # role -> phase -> part -> bytes
    devices: Mapping[
        str, Collection[int]
    ]  # role -> the numbers of its devices; empty for devices elsewhere

    @classmethod
    def of(cls, config: Config, held: Held, devices: Mapping[str, Collection[int]]) -> Sizes:
        """Of roles by the numbers of their devices; those of a remote sampler only stand for its
        own."""
        return cls(held, {**devices, "sampler": ()} if config.sampler.is_remote else devices)

    def colocated_roles(self, role: str) -> list[str]:
        """The roles that use devices of this one, itself included."""
        mine = set(self.devices[role])
        return [name for name in self.devices if name == role or mine & set(self.devices[name])]

    def on(self, role: str, phase: str = "always") -> dict[str, int]:
        """What a device of a role holds in a phase, by part."""
        found: dict[str, int] = {}
        for name in self.colocated_roles(role):
            for when in dict.fromkeys(("always", phase)):
                found |= self.bytes_by_role[name][when]
        return found


def weight_sizes(
    config: Config, a: Architecture, roles: Roles, dtype: Any, teacher: Architecture | None
) -> Sizes:
    """What weights take, from the sizes of the models and the meshes alone."""
    masters = param_shapes(trained_specs(a), roles.trainer, jnp.float32)
    frozen = param_shapes(frozen_specs(a), roles.trainer, dtype)
    size = bytes_per_device(masters)
    moments = 2 * size // (2 if config.optimizer.moments == "bfloat16" else 1)
    on_host = (
        {"Adam's moments": moments}
        if config.optimizer.offload and roles.trainer.platform != "cpu"
        else {}
    )
    always: dict[str, dict[str, int]] = {
        "trainer": {"parameters": size},
        "sampler": {},
        "reference": {},
    }
    if not on_host:
        always["trainer"]["Adam's moments"] = moments
    if frozen:
        always["trainer"]["frozen parameters"] = bytes_per_device(frozen)
    sampled = sampled_architecture(config, a)
    copies = copied_shapes(masters, trained_specs(a), roles.sampler, dtype, sampled)
    own = bytes_per_device([own for _, own in copies])
    shared = size - bytes_per_device([mine for mine, _ in copies])
    once = bytes_per_device(
        [own for _, own in copied_shapes(frozen, frozen_specs(a), roles.sampler, dtype, sampled)]
    )
    # Of arrays that are the trainer's own, only those of older versions take more.
    if copy := once + max(held * own + older * shared for held, older in held_versions(config)):
        always["sampler"]["the sampler's copy"] = copy
    if config.algorithm.scores_reference:
        same = frozen and not copied_shapes(frozen, frozen_specs(a), roles.reference, dtype)
        own = 0 if same else weight_bytes(a.base, roles.reference, dtype)
        if reference_architecture(config, a).adapter:  # a copy of the one that is trained on
            own += bytes_per_device(param_shapes(trained_specs(a), roles.reference, dtype))
        always["reference"]["reference"] = own
    if teacher:
        always["reference"]["teacher"] = weight_bytes(teacher, roles.reference, dtype)
    for path, judge in reward_architectures(config.reward).items():
        always["reference"][f"reward model {path}"] = weight_bytes(
            replace(judge, tie_embeddings=True), roles.reference, dtype
        )
    held = {name: {"always": always[name], "sampling": {}, "update": {}} for name in ROLES}
    held["trainer"] |= {"update": {"gradient": size}, "host": on_host}
    return Sizes.of(
        config,
        held,
        {
            name: [device.id for device in role.mesh.devices.flat]
            for name, role in zip(ROLES, roles.all, strict=True)
        },
    )


def job_sizes(
    config: Config,
    a: Architecture,
    roles: Roles,
    dtype: Any,
    teacher: Architecture | None,
    states: Iterable[tuple[str, Any]],
) -> Sizes:
    """What is known before compilation. `states`: shapes of the sampler's engines by name, of which
    the largest counts: they take turns."""
    sizes = weight_sizes(config, a, roles, dtype, teacher)
    by_engine = {name: bytes_per_device(state) for name, state in states}
    if not by_engine:  # nothing is sampled
        return sizes
    largest = max(by_engine, key=lambda name: (by_engine[name], name))
    sampler = {
        **sizes.bytes_by_role["sampler"],
        "sampling": {f"KV caches ({largest})": by_engine[largest]},
    }
    return replace(sizes, bytes_by_role={**sizes.bytes_by_role, "sampler": sampler})


def bytes_per_device(shapes: Any) -> int:
    """Bytes of a tree of shapes on each device that holds it, not in the host's memory; those
    without a sharding are whole."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)
        * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(shapes)
        if leaf.sharding is None or leaf.sharding.memory_kind != PINNED_HOST
    )


def weight_bytes(a: Architecture, role: Role, dtype: Any) -> int:
    """Bytes of a model's parameters on one of a role's devices."""
    return bytes_per_device(param_shapes(param_specs(a), role, dtype))


def sampled_architecture(config: Config, a: Architecture) -> Architecture:
    """The sizes and types of what the sampler has of a model in training."""
    return replace(a, quantised=QUANTISED[config.sampler.quantise] or a.quantised)


def reference_architecture(config: Config, a: Architecture) -> Architecture:
    """The sizes of the reference of a policy: with an adapter where that is the policy as the run
    begins. A new adapter changes nothing yet, so that the base alone is the same policy."""
    is_new = bool(config.model.lora.rank) and not config.model.lora.path
    return a.base if is_new or config.algorithm.reference == "base" else a


def parameter_count(a: Architecture) -> int:
    return sum(math.prod(d.shape) for d in jax.tree.leaves(param_specs(a)))


def held_versions(config: Config) -> Iterator[tuple[int, int]]:
    """(published versions whose weights are held, those of them that are older than the trainer's)
    while each of some later steps samples and updates."""
    schedule = schedule_of(config.train)
    if (
        schedule.newest
    ):  # the version that is sampled from, and the next, which is there before it is loaded
        yield 2, 1
        return
    newest = schedule.weight_sync_interval * (schedule.lag + 1)
    held = list(filter(schedule.publishes, range(schedule.version(newest), newest + 1)))
    for step in range(
        newest, newest + schedule.weight_sync_interval
    ):  # until the next is published
        yield len(held), sum(version < step for version in held)


def copied_shapes(
    parameters: Any, specs: Any, role: Role, dtype: Any, sampled: Architecture | None = None
) -> list[tuple[Any, Any]]:
    """The trainer's and a role's shapes of each array that it does not read from the trainer's own.
    `specs`: a tree of `ParamSpec`; `sampled`: the architecture of a sampler, which may have weights
    of 8 bits or layers apart."""
    smaller = quantised_specs(sampled) if sampled else {}
    found, is_apart = [], sampled is not None and ffn_chunks(sampled, role, dtype) > 0
    for mine, spec in zip(jax.tree.leaves(parameters), jax.tree.leaves(specs), strict=True):
        own = param_shapes(spec if spec.dtype else smaller.get(spec.name, spec), role, dtype)
        same = (
            not isinstance(own, Quantised)
            and mine.dtype == own.dtype
            and mine.sharding.is_equivalent_to(own.sharding, len(mine.shape))
        )
        if not same or (is_apart and spec.stacked):
            found.append((mine, own))
    return found


# ---- what programs need


def key_bytes(a: Architecture, role: Role, dtype: Any) -> int:
    """Bytes of a token's keys and values on each device of a replica of the sampler: on average,
    where devices that share a head hold other tokens each."""
    return 2 * a.num_layers * a.num_kv_heads * a.head_dim * jnp.dtype(dtype).itemsize // role.tensor


def activation_bytes(a: Architecture, tokens: float, dtype: Any, remat: str = "dots") -> int:
    """Bytes that the backward pass of `tokens` tokens finds stored, besides each layer's input,
    with a `model.remat` that computes anything again; wherever they are."""
    heads = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    attention = a.hidden_size + heads + a.num_heads * a.head_dim
    a_token = {
        "full": 0,
        "attention": attention,
        "offload": attention,
        "dots": 3 * a.hidden_size + heads + 2 * a.intermediate_size,
    }[remat]
    return int(a_token * a.num_layers * tokens * jnp.dtype(dtype).itemsize)


def input_bytes(a: Architecture, tokens: float, dtype: Any) -> int:
    """Bytes of each layer's input, which the backward pass finds stored whatever `model.remat`
    is."""
    return round(a.num_layers * a.hidden_size * tokens * jnp.dtype(dtype).itemsize)


def update_bytes(a: Architecture, role: Role, dtype: Any, tokens: int) -> int:
    """Bytes that an update of so many tokens takes besides what roles hold and `activation_bytes`:
    the weights in the type of the computation, a layer of them whole with its gradient, each
    layer's input, a few arrays of logits; where rows are split, the keys, values and hidden states
    of whole ones."""
    size = jnp.dtype(dtype).itemsize
    layer = parameter_count(replace(a, num_layers=2)) - parameter_count(replace(a, num_layers=1))
    trained = sum(
        math.prod(spec.shape[1:]) for spec in jax.tree.leaves(trained_specs(a)) if spec.stacked
    )
    whole = layer // role.tensor * 2 * size + trained // role.tensor * 4
    logits = 3 * 4 * min(CHUNK_ELEMENTS[role.platform], tokens * a.vocab_size)
    cast = bytes_per_device(param_shapes(trained_specs(a), role, dtype))
    rows = tokens * role.context * 2 * (a.hidden_size + 2 * a.num_kv_heads * a.head_dim) * size
    return cast + whole + input_bytes(a, tokens, dtype) + logits + rows * (role.context > 1)


# ---- what a device has


class AvailableMemory(NamedTuple):
    """Memory of one device. On CPU all devices share one memory: `sharing` of them."""

    total: int
    free: int
    where: str
    sharing: int = 1


def device_memory(device: Any) -> int:
    """Bytes of a device's memory, as its maker says, so that a plan and a run decide alike; 0 if it
    is not known."""
    known = accelerator_of(device.device_kind)
    return known.usable_bytes if known else 0


def available_memory(devices: Iterable[Any]) -> AvailableMemory:
    """The smallest memory of a local device; on CPU the machine's, or its control group's limit."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        total, free = machine_memory()
        return AvailableMemory(total, free, "RAM of this machine", len(local))
    stats = [memory_stats(device) for device in local]
    limits = [
        (s["bytes_limit"], s["bytes_limit"] - s.get("bytes_in_use", 0))
        for s in stats
        if "bytes_limit" in s
    ]
    total, free = min(limits, default=(0, 0))
    return AvailableMemory(total, free, local[0].device_kind)


def machine_memory(
    proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """(total, available) bytes of RAM, within the limit of the control group (versions 2 and 1)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    if (proc / "meminfo").is_file():
        found = dict(
            re.findall(r"^(\w+):\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
        )
        total = int(found.get("MemTotal", total // 1024)) * 1024
        free = int(found.get("MemAvailable", found.get("MemFree", free // 1024))) * 1024
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        most = _read_number(groups / limit)
        if most is not None:
            stat = (groups / limit).with_name("memory.stat")
            dropped = re.search(
                rf"^{cache} (\d+)$", stat.read_text() if stat.is_file() else "", re.MULTILINE
            )
            used_bytes = (_read_number(groups / used) or 0) - (int(dropped[1]) if dropped else 0)
            total, free = min(total, most), min(free, max(0, most - used_bytes))
    return total, free


def _read_number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
