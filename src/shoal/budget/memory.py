"""Computes the bytes that a job holds on its devices; all knowledge about bytes is in this module.

weight_budget     parameters, moments, gradient, a critic, the sampler's copy, reference, teacher
cache_items       the sampler's caches
..._bytes         what programs are estimated to need besides
available_memory  what a device has
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.algorithm.logprobs import CHUNK_ELEMENTS
from shoal.budget.budget import Budget, Item, RolePlacement
from shoal.config.derived import needs_first_weights
from shoal.config.sections.model import TeacherSection
from shoal.config.train import Config
from shoal.mesh import PINNED_HOST, Role, Roles, accelerator_of, memory_stats
from shoal.mesh.programs import MAX_IN_FLIGHT
from shoal.model.architecture import Architecture, Layer
from shoal.model.attention.caches import PAGE, PagedCache
from shoal.model.attention.selector import attention_kind
from shoal.model.head import head_alone
from shoal.model.layers import ffn_chunks, stacked_blocks
from shoal.model.linear import QUANTISED, Quantised
from shoal.model.parameters import (
    Block,
    active_size,
    frozen_specs,
    kernel_specs,
    param_shapes,
    param_specs,
    quantised_specs,
    trained_specs,
)
from shoal.model.transformer import Model
from shoal.sampler.decode_state import StateSizes, state_shapes
from shoal.trainer.critic import critic_architecture
from shoal.trainer.schedule import schedule_of
from shoal.weights.source import reward_architectures

ROLES = ("trainer", "sampler", "reference")


def weight_budget(
    config: Config, a: Architecture, roles: Roles, dtype: Any, teachers: Mapping[str, Architecture]
) -> Budget:
    """Returns a `Budget` with the weights of a job alone: what trainer, sampler and reference hold,
    computed from shapes and meshes. Nothing is allocated. Programs, costs and all else have their
    defaults. `dtype`: the type of the computation. `teachers`: the architectures of those that have
    weights of their own, by name."""
    items = trainer_items(config, a, roles, dtype)
    items += sampler_items(config, a, roles, dtype)
    items += reference_items(config, a, roles, dtype, teachers)
    return Budget(
        config=config,
        memory=device_memory(roles.trainer.mesh.devices.flat[0]),
        roles=role_placements(roles),
        items=items,
    )


def role_placements(roles: Roles) -> dict[str, RolePlacement]:
    """Returns role name (trainer, sampler, reference) -> the devices that it uses, and the axes of
    its mesh that have more than one device."""
    placements = {}
    for name, role in zip(ROLES, roles.all, strict=True):
        axes = {axis: size for axis, size in role.mesh.shape.items() if size > 1}
        numbers = tuple(device.id for device in role.mesh.devices.flat)
        placements[name] = RolePlacement(axes, numbers)
    return placements


def trainer_items(config: Config, a: Architecture, roles: Roles, dtype: Any) -> list[Item]:
    """Returns what the trainer holds: float32 masters of the weights, Adam's moments, the frozen
    base of an adapter, the same of a critic, and the gradient. Bytes are those of one device.
    `dtype`: the type of the computation."""
    masters = param_shapes(trained_specs(a), roles.trainer, jnp.float32)
    frozen = param_shapes(frozen_specs(a), roles.trainer, dtype)
    size = bytes_per_device(masters)
    # mean and variance of each gradient, in float32
    moments = 2 * size
    if config.optimizer.moments == "bfloat16":
        # two of 2 bytes
        moments = size
    # On a CPU the host's memory is the device's own, so nothing is moved.
    offloads = config.optimizer.offload and roles.trainer.platform != "cpu"
    items = [
        Item("parameters", "trainer", "always", size),
        Item("Adam's moments", "trainer", "always", moments, on_host=offloads),
    ]
    if frozen:
        items.append(Item("frozen parameters", "trainer", "always", bytes_per_device(frozen)))
    if config.algorithm.has_critic:
        critic = critic_architecture(a, config.critic.shared)
        size_of_critic = bytes_per_device(
            param_shapes(trained_specs(critic), roles.trainer, jnp.float32)
        )
        moments = moments * size_of_critic // size
        items.append(Item("critic", "trainer", "always", size_of_critic))
        items.append(Item("critic's moments", "trainer", "always", moments, on_host=offloads))
        if frozen and config.critic_path:
            # Without a model of its own the critic has the policy's frozen arrays.
            own = param_shapes(frozen_specs(critic), roles.trainer, dtype)
            items.append(
                Item("critic's frozen parameters", "trainer", "always", bytes_per_device(own))
            )
        # One gradient at a time: the policy's is gone when the critic's begins.
        size = max(size, size_of_critic)
    items.append(Item("gradient", "trainer", "update", size))
    return items


def sampler_items(config: Config, a: Architecture, roles: Roles, dtype: Any) -> list[Item]:
    """Returns a list with one item: the memory of the sampler's copies of the weights, of all
    versions that are held at the same time. [] if the sampler reads the trainer's arrays and needs
    no copies. `dtype`: the type of the computation."""
    sampled = sampled_architecture(config, a)
    masters = param_shapes(trained_specs(a), roles.trainer, jnp.float32)
    frozen = param_shapes(frozen_specs(a), roles.trainer, dtype)
    copies = copied_shapes(masters, trained_specs(a), roles.sampler, dtype, sampled)
    frozen_copies = copied_shapes(frozen, frozen_specs(a), roles.sampler, dtype, sampled)
    copied = bytes_per_device([own for _, own in copies])
    shared = bytes_per_device(masters) - bytes_per_device([mine for mine, _ in copies])
    # Arrays that are shared with the trainer take more memory only for older versions.
    trained = max(held * copied + older * shared for held, older in held_versions(config))
    size = bytes_per_device([own for _, own in frozen_copies]) + trained
    if not size:
        return []
    return [Item("the sampler's copy", "sampler", "always", size)]


def reference_items(
    config: Config, a: Architecture, roles: Roles, dtype: Any, teachers: Mapping[str, Architecture]
) -> list[Item]:
    """Returns an item for each model that only scores: the reference of a KL term, which is also
    the model at the start as its own teacher, each teacher with weights of its own, reward models.
    The reference's item has 0 bytes if it shares the adapter's frozen base with the trainer.
    `dtype`: the type of the computation. `teachers`: architectures by name."""
    items = []
    if needs_first_weights(config):
        frozen = param_shapes(frozen_specs(a), roles.trainer, dtype)
        shares_base = frozen and not copied_shapes(frozen, frozen_specs(a), roles.reference, dtype)
        size = 0
        if not shares_base:
            size = weight_bytes(a.base, roles.reference, dtype)
        if reference_architecture(config, a).adapter:
            # The reference has a copy of the adapter, because the policy's is trained.
            size += bytes_per_device(param_shapes(trained_specs(a), roles.reference, dtype))
        name = "reference" if config.algorithm.scores_reference else "teacher"
        items.append(Item(name, "reference", "always", size))
    for name, teacher in teachers.items():
        size = weight_bytes(teacher, roles.reference, dtype)
        items.append(Item(f"teacher {name}".strip(), "reference", "always", size))
    if config.teacher.divergence == "full" and roles.reference != roles.trainer:
        heads = dict(teachers)
        if config.teacher.is_first_policy:
            heads[""] = reference_architecture(config, a)
        for name, teacher in heads.items():
            head = param_shapes(head_alone(param_specs(teacher)), roles.trainer, dtype)
            whose = f"the teacher's head {name}".strip()
            items.append(Item(whose, "trainer", "always", bytes_per_device(head)))
    for path, judge in reward_architectures(config.reward).items():
        # A reward model has no head over the vocabulary.
        size = weight_bytes(replace(judge, value_head=True), roles.reference, dtype)
        items.append(Item(f"reward model {path}", "reference", "always", size))
    return items


def cache_items(states: Iterable[tuple[str, Any]]) -> list[Item]:
    """Returns a list with one item, the KV caches of the engine whose caches are largest, because
    the sampler's engines take turns; [] if nothing is sampled. `states`: (engine's name, shapes of
    its state) of each engine."""
    by_size = sorted((bytes_per_device(state), name) for name, state in states)
    if not by_size:
        return []
    size, name = by_size[-1]
    return [Item(f"KV caches ({name})", "sampler", "sampling", size)]


def bytes_per_device(shapes: Any) -> int:
    """Returns the bytes that a tree of shapes takes on each device, by the shapes' shardings. An
    array in the host's memory counts nothing; one without a sharding counts in full."""
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
    """Returns the bytes of a model's parameters on each of a role's devices."""
    return bytes_per_device(param_shapes(param_specs(a), role, dtype))


def sampled_architecture(config: Config, a: Architecture) -> Architecture:
    """Returns the architecture of the sampler's copy of a trained model, whose weights may be
    quantised (`sampler.quantise`)."""
    return replace(a, quantised=QUANTISED[config.sampler.quantise] or a.quantised)


def reference_architecture(config: Config, a: Architecture) -> Architecture:
    """Returns the architecture of a policy's reference, which is the policy as the run begins: with
    an adapter only if the run began with one. A new adapter changes nothing yet, so the base model
    alone is the same policy."""
    is_new = bool(config.model.lora.rank) and not config.model.lora.path
    return a.base if is_new or config.algorithm.reference == "base" else a


def parameter_count(a: Architecture) -> int:
    """Returns the number of a model's parameters, including those of its adapter."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(a)))


def active_parameter_count(a: Architecture) -> int:
    """Returns the number of a model's parameters that take part in one token's computation: all but
    those of the experts that it does not have."""
    return sum(active_size(a, spec) for spec in jax.tree.leaves(param_specs(a)))


def held_versions(config: Config) -> Iterator[tuple[int, int]]:
    """Yields, for each step between two publications of a run that is under way, (number of
    published versions whose weights are in memory during the step, how many of these are older than
    the trainer's weights). Later steps repeat the same numbers.

    Examples: a run that samples from the version it trains yields (1, 0); with `max_staleness=1`
    steps yield (2, 1).
    """
    schedule = schedule_of(config.train)
    if schedule.takes_newest:
        # The version that is sampled from, and the next, which is held before it is loaded.
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
    """Returns (trainer's shape, role's shape) of each array that a role cannot share with the
    trainer, because its type, sharding or layout differs; the role's is a `Quantised` of two shapes
    for a kernel in 8 bits. Arrays that can be shared are left out.

    `parameters`, `specs`: trees of the trainer's shapes and of their `ParamSpec`. `dtype`: the
    role's type of weights, for parameters without a type of their own. `sampled`: the architecture
    of a sampler, which may have 8-bit weights or an array for each layer; None for other roles.
    """
    quantised = {}
    has_layers_apart = False
    if sampled is not None:
        quantised = quantised_specs(sampled)
        has_layers_apart = ffn_chunks(sampled, role, dtype) > 0
    copies = []
    for mine, spec in zip(jax.tree.leaves(parameters), jax.tree.leaves(specs), strict=True):
        role_spec = spec
        if not spec.dtype:
            role_spec = quantised.get(spec.key, spec)
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


class CacheBytes(NamedTuple):
    """Bytes of a sampler's caches on each device of a replica, of all layers together: keys and
    values, rings of windows, states."""

    row: int  # of a row's prompt
    slot: int  # of a slot's completion, without its pages
    page: int = 0  # of a page, of the layers that have pages

    def of_slot(self, tokens: int) -> int:
        """Returns the bytes of a slot whose completion has so many tokens, a multiple of PAGE."""
        return self.slot + tokens // PAGE * self.page


def cache_bytes(model: Model, prompt: int, own: int) -> CacheBytes:
    """Returns the bytes of caches with room for `prompt` keys of a prompt and `own` keys of a
    completion. `model` is on a role of a sampler."""
    shards = model.role.row_shards  # each has a row with one slot
    caches = state_shapes(model, StateSizes(shards, 1, prompt, own)).caches
    row = 0
    slot = 0
    page = 0
    for cache in caches:
        row += bytes_per_device(cache.of_prompts)
        of_completion = bytes_per_device(cache.of_slots)
        if isinstance(cache, PagedCache):
            page += of_completion // (own // PAGE)
        else:
            slot += of_completion
    return CacheBytes(row, slot, page)


def activation_bytes(
    a: Architecture, tokens: float, dtype: Any, remat: str = "dots", expert: int = 1
) -> int:
    """Returns the bytes of activations that all layers save for the backward pass of `tokens`
    tokens, without the layers' inputs (`input_bytes`). They are counted at the model's whole width;
    for one of several devices that split it, callers divide `tokens`. `remat`: a value of
    `model.remat`, except `auto` and `none`. With `offload` these bytes are in the host's memory;
    they are counted too. `expert`: the devices that experts are split over by their number; above 1
    nothing of experts is saved (`experts_of_rows`)."""
    elements_of_a_token = 0
    if remat == "dots":
        # The outputs of all products of a layer, and its mixer's output, which is counted as wide
        # as the hidden states.
        elements_of_a_token = a.num_layers * a.hidden_size
        for kernel in kernel_specs(a):  # [layers, ..., in, out]: `out` values of a token
            if kernel.num_experts > 1 and expert > 1:
                continue
            # What experts add to the stream is summed by token, and not kept for each expert.
            if kernel.num_experts == 1 or kernel.axes[-1] != "embed":
                elements_of_a_token += active_size(a, kernel) // kernel.shape[-2]
    elif remat == "full":
        # The keys and values that other layers read: they go from one layer to others.
        for number in a.read_layers:
            elements_of_a_token += _key_elements(a, a.layer(number))
    else:
        # `attention` and `offload`
        elements_of_a_token = sum(_mixer_elements(a, layer) for layer in a.layers_in_order)
    return int(elements_of_a_token * tokens * jnp.dtype(dtype).itemsize)


def _mixer_elements(a: Architecture, layer: Layer) -> int:
    """Returns how many elements per token a kind of layer saves for the backward pass with
    model.remat=attention: the hidden state after its mixer and, if that is attention, the queries,
    keys, values and the attention's output."""
    if layer.mixer != "attention":
        return a.hidden_size
    queries = a.num_heads * a.head_dim_of(layer)
    return 2 * queries + _key_elements(a, layer) + a.hidden_size


def _key_elements(a: Architecture, layer: Layer) -> int:
    """Returns the elements of a token's keys and values in a kind of layer with attention: 0 if it
    reads those of another layer."""
    if layer.keys_of is not None:
        return 0
    return 2 * a.kv_heads_of(layer) * a.head_dim_of(layer)


def input_bytes(a: Architecture, tokens: float, dtype: Any) -> int:
    """Returns the bytes of all layers' inputs for `tokens` tokens, which are saved for the backward
    pass whatever `model.remat` is: the hidden states, and each layer's own embeddings."""
    elements_of_a_token = a.num_layers * (a.hidden_size + a.layer_embedding_size)
    return round(elements_of_a_token * tokens * jnp.dtype(dtype).itemsize)


def update_bytes(a: Architecture, role: Role, dtype: Any, tokens: int) -> int:
    """Returns the estimated bytes that an update of `tokens` tokens on a device needs there, in
    addition to what roles hold and to `activation_bytes`: weights in the type of the computation,
    one gathered layer with its gradient, inputs of layers, logits, and what a layer of experts or a
    delta net computes at a time."""
    itemsize = jnp.dtype(dtype).itemsize
    # The weights in the computation's type, and one layer, gathered whole, with its gradient.
    weights = bytes_per_device(param_shapes(trained_specs(a), role, dtype))
    of_layers = [
        _layer_bytes(block, role, itemsize) for block in stacked_blocks(param_specs(a).blocks)
    ]
    # Three arrays of logits in float32.
    logits = 3 * 4 * min(CHUNK_ELEMENTS[role.platform], tokens * a.vocab_size)
    total = weights + max(of_layers) + input_bytes(a, tokens, dtype) + logits
    total += round(tokens * _passing_bytes(a, role, itemsize))
    if role.context > 1:  # keys, values and hidden states are gathered for whole rows
        of_keys = [_key_elements(a, layer) for layer in a.kinds]
        width = a.hidden_size + max(of_keys)
        total += tokens * role.context * 2 * width * itemsize
    return total


def score_bytes(model: Model, tokens: int) -> int:
    """Returns the bytes of scores that an update of `tokens` tokens on a device needs there: those
    of one layer, because the backward pass computes them again. 0 if every kind of layer computes
    them by kernels or by blocks. By the compilers' account of one layer, 1.6 arrays in float32 of
    all scores on v5p and v6e: one, and one in the computation's type."""
    role = model.role
    a = model.architecture
    # A device has one row, or a part of one.
    rows = role.batch_shards
    size = tokens * role.context
    for layer in a.kinds:
        if layer.mixer != "attention":
            continue
        if attention_kind(model, rows, size, layer) == "reference":
            num_scores = tokens * size * a.num_heads // role.tensor
            return num_scores * (4 + model.dtype.itemsize)
    return 0


def unstacked_bytes(a: Architecture, role: Role, dtype: Any, stored: int) -> int:
    """Returns the bytes that the backward pass takes at once out of stacked arrays, of weights and
    of what layers stored, `stored` bytes of all layers. XLA for TPU takes out a whole pattern of
    layers before it computes the first of them (of Gemma 4 31B with 12 layers 4.9 GiB were there at
    the peak); for GPU, and with layers of one kind, it takes what it computes."""
    pattern = len(a.longest_scan_group)
    if role.platform != "tpu" or pattern == 1:
        return 0
    weights = bytes_per_device(param_shapes(param_specs(a).blocks, role, dtype))
    return (weights + stored) * pattern // a.num_layers


def teacher_update_bytes(
    section: TeacherSection, teachers: Iterable[Architecture], role: Role, dtype: Any, tokens: int
) -> int:
    """Returns the bytes that an update of `tokens` tokens on a device needs there for a teacher's
    distributions, besides logits, which `update_bytes` counts: its head, gathered whole but for
    `tensor`, and what it says of the tokens of the micro-batches whose programs are under way, its
    hidden states or likeliest tokens; of several teachers, one of which speaks of a micro-batch,
    those of the one that needs most. `teachers`: all of them, the policy too if it is its own. 0
    without one, and if only log-probs of samples are read."""
    if not section.gives_distributions:
        return 0
    itemsize = jnp.dtype(dtype).itemsize
    needed = [0]
    for teacher in teachers:
        head = 0
        of_a_token = 8 * section.top_k + 4  # an id and a log-prob of each, and the rest
        if section.divergence == "full":
            head = teacher.vocab_size * teacher.hidden_size * itemsize // role.tensor
            of_a_token = teacher.hidden_size * itemsize
        needed.append(head + MAX_IN_FLIGHT * tokens * of_a_token)
    return max(needed)


DELTA_NET_ARRAYS = {"cpu": 44, "gpu": 30, "tpu": 29}
"""So many float32 arrays as wide as a delta net's values are on a device while its layer is
computed backward, with the MLP next to it, by platform. By the compilers' account of heads of 128
the delta net alone has 22 on an H200 and 23 on a v6e, in bfloat16, and 10 on a CPU, in float32,
where a narrow model has 43 with all else."""


def _passing_bytes(a: Architecture, role: Role, itemsize: int) -> float:
    """Returns the bytes of a token on a device that the backward pass of one layer needs while it
    computes, without what layers save: of experts the rows of each, with their gradients; of a
    delta net its chunks. The layer that needs most counts; attention counts nothing. `itemsize`: of
    the computation's type."""
    most = 0.0
    for layer in a.kinds:
        of_layer = 0.0
        if layer.feed_forward != "mlp":
            # Tokens by expert and what the experts return, and their gradients; gate, up and what
            # is between them and down, and their gradients.
            width = 4 * a.hidden_size + 6 * a.expert_sizes.intermediate_size / role.tensor
            of_token = a.expert_sizes.experts_per_token * width * itemsize
            if role.expert > 1:
                # Tokens of all devices and their results, with gradients. There are rows for all
                # of their assignments, which might all be of experts here.
                of_token = role.expert * (of_token + 4 * a.hidden_size * itemsize)
            of_layer += of_token
        if layer.mixer == "delta_net":
            num_arrays = DELTA_NET_ARRAYS[role.platform]
            of_layer += num_arrays * a.delta_net_sizes.value_width / role.tensor * 4
        most = max(most, of_layer)
    return most


def _layer_bytes(stack: Block, role: Role, itemsize: int) -> int:
    """Returns the bytes on a device of one layer of a stack, given by its specs, gathered whole
    but for `tensor` and for experts of other devices: twice in the computation's type, of
    `itemsize` bytes, and the gradient of its trained part in float32."""
    num_elements = 0
    num_trained = 0
    for spec in jax.tree.leaves(stack):
        size = math.prod(spec.shape[1:])
        if "experts" in spec.axes:
            size //= role.expert
        num_elements += size
        num_trained += spec.trained * size
    return num_elements // role.tensor * 2 * itemsize + num_trained // role.tensor * 4


# ---- what a device has


class AvailableMemory(NamedTuple):
    """Memory of one device in bytes, 0 if the device does not report it. `where`: a text that says
    which memory it is. `sharing`: the number of devices that share it, which on a CPU are all of
    them."""

    total: int
    free: int
    where: str
    sharing: int = 1


CONTROL_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""For versions 2 and 1 of control groups: the file with the limit, the file with the use, and the
line of `memory.stat` that has the bytes of cached files."""


def device_memory(device: Any) -> int:
    """Returns the usable bytes of a device's memory by the figures of its maker, so that a plan and
    a run decide alike; 0 if they are not known."""
    known = accelerator_of(device.device_kind)
    if known is None:
        return 0
    return known.usable_bytes


def available_memory(devices: Iterable[Any]) -> AvailableMemory:
    """Returns the memory of the device of this process that has the least; of a CPU, the memory of
    the machine or the limit of its control group. One of the devices must be of this process. Both
    figures are 0 if the device does not report them."""
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
    # by the limit first, and of equal limits by what is free
    total, free = min(limits, default=(0, 0))
    return AvailableMemory(total, free, local[0].device_kind)


def machine_memory(
    proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """Returns (total, available) bytes of RAM: those of the machine, or of its control group
    (version 2 or 1) if that allows less. `proc`, `groups`: the folders where Linux reports both."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    if (proc / "meminfo").is_file():
        text = (proc / "meminfo").read_text()
        kibibytes = {}
        for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE):
            kibibytes[name] = int(number)
        total = kibibytes.get("MemTotal", total // 1024) * 1024
        # old kernels do not report MemAvailable
        free = kibibytes.get("MemAvailable", kibibytes.get("MemFree", free // 1024)) * 1024
    for limit_file, used_file, cache in CONTROL_GROUP_FILES:
        limit = _read_number(groups / limit_file)
        if limit is None:
            continue
        used = _read_number(groups / used_file) or 0
        statistics = (groups / limit_file).with_name("memory.stat")
        if statistics.is_file():
            # The system frees the cache of files before a program runs out of memory.
            cached = re.search(rf"^{cache} (\d+)$", statistics.read_text(), re.MULTILINE)
            if cached:
                used -= int(cached[1])
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return total, free


def _read_number(file: Path) -> int | None:
    """Returns the number that a file contains; None if it cannot be read or holds something else,
    like `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    if not text.isdigit():
        return None
    return int(text)
