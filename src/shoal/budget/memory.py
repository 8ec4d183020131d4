"""What a job holds in the memory of its devices: the only place that knows bytes.

weight_budget     parameters, moments, gradient, the sampler's copy, reference, teacher
cache_items       the sampler's caches
..._bytes         what programs are reckoned to need besides
available_memory  what a device has
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.algorithm.logprobs import CHUNK_ELEMENTS
from shoal.budget.budget import Budget, Item, RolePlacement
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


def weight_budget(
    config: Config, a: Architecture, roles: Roles, dtype: Any, teacher: Architecture | None
) -> Budget:
    """The budget of a job's weights, from the sizes of the models and the meshes alone. `dtype`: of
    the computation."""
    items = trainer_items(config, a, roles, dtype)
    items += sampler_items(config, a, roles, dtype)
    items += reference_items(config, a, roles, dtype, teacher)
    return Budget(
        config=config,
        memory=device_memory(roles.trainer.mesh.devices.flat[0]),
        roles=role_placements(roles),
        items=items,
    )


def role_placements(roles: Roles) -> dict[str, RolePlacement]:
    """The devices of each role by its name."""
    placements = {}
    for name, role in zip(ROLES, roles.all, strict=True):
        axes = {axis: size for axis, size in role.mesh.shape.items() if size > 1}
        numbers = tuple(device.id for device in role.mesh.devices.flat)
        placements[name] = RolePlacement(axes, numbers)
    return placements


def trainer_items(config: Config, a: Architecture, roles: Roles, dtype: Any) -> list[Item]:
    """The masters in float32, Adam's moments, an adapter's frozen base, and the gradient."""
    masters = param_shapes(trained_specs(a), roles.trainer, jnp.float32)
    frozen = param_shapes(frozen_specs(a), roles.trainer, dtype)
    size = bytes_per_device(masters)
    moments = 2 * size
    if config.optimizer.moments == "bfloat16":
        moments = size
    # RAM is a CPU's own memory: nothing is moved out of it.
    offloads = config.optimizer.offload and roles.trainer.platform != "cpu"
    items = [
        Item("parameters", "trainer", "always", size),
        Item("Adam's moments", "trainer", "always", moments, on_host=offloads),
    ]
    if frozen:
        items.append(Item("frozen parameters", "trainer", "always", bytes_per_device(frozen)))
    items.append(Item("gradient", "trainer", "update", size))
    return items


def sampler_items(config: Config, a: Architecture, roles: Roles, dtype: Any) -> list[Item]:
    """The arrays of the sampler that are not the trainer's own, of all versions that are held at
    once."""
    sampled = sampled_architecture(config, a)
    masters = param_shapes(trained_specs(a), roles.trainer, jnp.float32)
    frozen = param_shapes(frozen_specs(a), roles.trainer, dtype)
    copies = copied_shapes(masters, trained_specs(a), roles.sampler, dtype, sampled)
    frozen_copies = copied_shapes(frozen, frozen_specs(a), roles.sampler, dtype, sampled)
    copied = bytes_per_device([own for _, own in copies])
    shared = bytes_per_device(masters) - bytes_per_device([mine for mine, _ in copies])
    # Of arrays that are the trainer's own, only those of older versions take more.
    trained = max(held * copied + older * shared for held, older in held_versions(config))
    size = bytes_per_device([own for _, own in frozen_copies]) + trained
    if not size:
        return []
    return [Item("the sampler's copy", "sampler", "always", size)]


def reference_items(
    config: Config, a: Architecture, roles: Roles, dtype: Any, teacher: Architecture | None
) -> list[Item]:
    """The models that only score: the reference of a KL term, a teacher, reward models."""
    items = []
    if config.algorithm.scores_reference:
        frozen = param_shapes(frozen_specs(a), roles.trainer, dtype)
        shares_base = frozen and not copied_shapes(frozen, frozen_specs(a), roles.reference, dtype)
        size = 0
        if not shares_base:
            size = weight_bytes(a.base, roles.reference, dtype)
        if reference_architecture(config, a).adapter:  # a copy of the one that is trained on
            size += bytes_per_device(param_shapes(trained_specs(a), roles.reference, dtype))
        items.append(Item("reference", "reference", "always", size))
    if teacher:
        size = weight_bytes(teacher, roles.reference, dtype)
        items.append(Item("teacher", "reference", "always", size))
    for path, judge in reward_architectures(config.reward).items():
        size = weight_bytes(replace(judge, tie_embeddings=True), roles.reference, dtype)
        items.append(Item(f"reward model {path}", "reference", "always", size))
    return items


def cache_items(states: Iterable[tuple[str, Any]]) -> list[Item]:
    """The KV caches of the largest of the sampler's engines, which take turns; none where nothing
    is sampled. `states`: their shapes by name."""
    by_size = sorted((bytes_per_device(state), name) for name, state in states)
    if not by_size:
        return []
    size, name = by_size[-1]
    return [Item(f"KV caches ({name})", "sampler", "sampling", size)]


def bytes_per_device(shapes: Any) -> int:
    """Bytes of a tree of shapes on each device that holds it, not in the host's memory; those
    without a sharding are whole."""
    total = 0
    for leaf in jax.tree.leaves(shapes):
        shape = leaf.shape
        if leaf.sharding is not None:
            if leaf.sharding.memory_kind == PINNED_HOST:
                continue
            shape = leaf.sharding.shard_shape(shape)
        total += math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
    return total


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
    """Parameters of a model, an adapter's included."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(a)))


def held_versions(config: Config) -> Iterator[tuple[int, int]]:
    """(published versions whose weights are held, those of them that are older than the trainer's)
    while each of some later steps samples and updates."""
    schedule = schedule_of(config.train)
    if schedule.newest:
        # The version that is sampled from, and the next, which is there before it is loaded.
        yield 2, 1
        return
    newest = schedule.weight_sync_interval * (schedule.lag + 1)
    held = []
    for version in range(schedule.version(newest), newest + 1):
        if schedule.publishes(version):
            held.append(version)
    for step in range(newest, newest + schedule.weight_sync_interval):  # until the next publication
        yield len(held), sum(version < step for version in held)


def copied_shapes(
    parameters: Any, specs: Any, role: Role, dtype: Any, sampled: Architecture | None = None
) -> list[tuple[Any, Any]]:
    """(trainer's shapes, role's shapes) of each array that the role does not read from the
    trainer's own. `specs`: a tree of `ParamSpec`; `sampled`: the architecture of a sampler, which
    may have weights of 8 bits or layers apart."""
    quantised = {}
    has_layers_apart = False
    if sampled is not None:
        quantised = quantised_specs(sampled)
        has_layers_apart = ffn_chunks(sampled, role, dtype) > 0
    copies = []
    for mine, spec in zip(jax.tree.leaves(parameters), jax.tree.leaves(specs), strict=True):
        role_spec = spec
        if not spec.dtype:
            role_spec = quantised.get(spec.name, spec)
        own = param_shapes(role_spec, role, dtype)
        is_shared = (
            not isinstance(own, Quantised)
            and mine.dtype == own.dtype
            and mine.sharding.is_equivalent_to(own.sharding, len(mine.shape))
        )
        if not is_shared or (has_layers_apart and spec.stacked):
            copies.append((mine, own))
    return copies


# ---- what programs need


def key_bytes(a: Architecture, role: Role, dtype: Any) -> int:
    """Bytes of a token's keys and values on each device of a replica of the sampler: on average,
    where devices that share a head hold other tokens each."""
    return 2 * a.num_layers * a.num_kv_heads * a.head_dim * jnp.dtype(dtype).itemsize // role.tensor


def activation_bytes(a: Architecture, tokens: float, dtype: Any, remat: str = "dots") -> int:
    """Bytes of activations that are saved for the backward pass of `tokens` tokens, without layer
    inputs, with a `model.remat` that computes anything again. Counts host memory too."""
    queries = a.num_heads * a.head_dim
    queries_and_keys = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    saved_by_attention = a.hidden_size + queries_and_keys + queries
    elements_of_a_token = {
        "full": 0,
        "attention": saved_by_attention,
        "offload": saved_by_attention,
        "dots": 3 * a.hidden_size + queries_and_keys + 2 * a.intermediate_size,
    }
    return int(elements_of_a_token[remat] * a.num_layers * tokens * jnp.dtype(dtype).itemsize)


def input_bytes(a: Architecture, tokens: float, dtype: Any) -> int:
    """Bytes of each layer's input, which are saved for the backward pass whatever `model.remat`
    is."""
    return round(a.num_layers * a.hidden_size * tokens * jnp.dtype(dtype).itemsize)


def update_bytes(a: Architecture, role: Role, dtype: Any, tokens: int) -> int:
    """Bytes that an update of so many tokens on a device takes, without what roles hold and
    `activation_bytes`."""
    itemsize = jnp.dtype(dtype).itemsize
    # The weights in the type of the computation, and a layer of them whole with its gradient.
    weights = bytes_per_device(param_shapes(trained_specs(a), role, dtype))
    layer = parameter_count(replace(a, num_layers=2)) - parameter_count(replace(a, num_layers=1))
    trained = sum(
        math.prod(spec.shape[1:]) for spec in jax.tree.leaves(trained_specs(a)) if spec.stacked
    )
    whole_layer = layer // role.tensor * 2 * itemsize + trained // role.tensor * 4
    # A few arrays of logits in float32.
    logits = 3 * 4 * min(CHUNK_ELEMENTS[role.platform], tokens * a.vocab_size)
    total = weights + whole_layer + input_bytes(a, tokens, dtype) + logits
    if role.context > 1:  # keys, values and hidden states of whole rows, whose tokens are split
        width = a.hidden_size + 2 * a.num_kv_heads * a.head_dim
        total += tokens * role.context * 2 * width * itemsize
    return total


# ---- what a device has


class AvailableMemory(NamedTuple):
    """Memory of one device. On CPU all devices share one memory: `sharing` of them."""

    total: int
    free: int
    where: str
    sharing: int = 1


CONTROL_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Versions 2 and 1 of control groups: the files of the limit and of the use, and which line of
`memory.stat` has the bytes of cached files."""


def device_memory(device: Any) -> int:
    """Bytes of a device's memory, as its maker says, so that a plan and a run decide alike; 0 if it
    is not known."""
    known = accelerator_of(device.device_kind)
    if known is None:
        return 0
    return known.usable_bytes


def available_memory(devices: Iterable[Any]) -> AvailableMemory:
    """The smallest memory of a local device; on CPU the machine's, or its control group's limit."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        total, free = machine_memory()
        return AvailableMemory(total, free, "RAM of this machine", len(local))
    limits = []
    for device in local:
        stats = memory_stats(device)
        if "bytes_limit" in stats:
            limit = stats["bytes_limit"]
            limits.append((limit, limit - stats.get("bytes_in_use", 0)))
    total, free = min(limits, default=(0, 0))
    return AvailableMemory(total, free, local[0].device_kind)


def machine_memory(
    proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """(total, available) bytes of RAM, within the limit of the control group (versions 2 and 1)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    if (proc / "meminfo").is_file():
        text = (proc / "meminfo").read_text()
        kibibytes = {}
        for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE):
            kibibytes[name] = int(number)
        total = kibibytes.get("MemTotal", total // 1024) * 1024
        free = kibibytes.get("MemAvailable", kibibytes.get("MemFree", free // 1024)) * 1024
    for limit_file, used_file, cache in CONTROL_GROUP_FILES:
        limit = _read_number(groups / limit_file)
        if limit is None:
            continue
        used = _read_number(groups / used_file) or 0
        statistics = (groups / limit_file).with_name("memory.stat")
        if statistics.is_file():
            # What files are cached in is given back before a program runs out of memory.
            cached = re.search(rf"^{cache} (\d+)$", statistics.read_text(), re.MULTILINE)
            if cached:
                used -= int(cached[1])
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return total, free


def _read_number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    if not text.isdigit():
        return None
    return int(text)
