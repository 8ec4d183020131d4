"""Decides from the devices' memory what the settings leave open: over how many devices a replica of
the sampler is split, how many bytes its caches may take, the tokens of a micro-batch, and what the
backward pass computes again (`model.remat`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from shoal.budget.budget import FULL, PLAN_FOR, TIGHT, Budget, StepProgram
from shoal.budget.memory import (
    activation_bytes,
    device_memory,
    held_versions,
    input_bytes,
    sampled_architecture,
    score_bytes,
    teacher_update_bytes,
    unstacked_bytes,
    update_bytes,
    weight_budget,
)
from shoal.budget.shapes import completion_rows, computed_tokens, group_rows
from shoal.config.derived import MICRO_TOKENS, longest_sequence, needs_first_weights
from shoal.config.train import Config
from shoal.mesh import PINNED_HOST, Role, Roles, accelerator_of, has_host_memory, make_roles
from shoal.model.architecture import Architecture
from shoal.model.linear import QUANTISED
from shoal.model.parameters import check_mesh, param_specs, tensor_sizes
from shoal.model.transformer import Model
from shoal.records import ShoalError
from shoal.weights.source import (
    ModelSource,
    check_quantised,
    compute_dtype,
    known_architecture,
    make_model,
    reward_architectures,
    teacher_model,
)

MOST_MICRO_TOKENS = 2**15
"""Most tokens on a device that are chosen if `batch.micro_tokens` is open. By the compiler's
account the default update of 1.5B on one H200 takes 3.35 s with rows of 4,096 tokens, 2.51 with
17,408, four whole groups, and 2.42 with 34,816."""

MOST_CPU_ROWS, WORTH_LONGER_ROWS = 2, 0.05
"""On a CPU: how many times longer than `derived.CPU_MICRO_TOKENS` a row may be, and the share of an
update's tokens that a longer row must save. The time of an update is proportional to the tokens of
its rows, padding included (`benchmarks/micro_tokens.py`)."""
SAMPLE_PROMPTS, SAMPLE_COMPLETIONS = 8, 64
"""Most groups of a step on each device, and completions of a group, that are packed to compare
sizes of rows: with more the share of padding is the same."""

UNKNOWN_ROOM = 2 << 30
"""Bytes of activations that may be kept if the device's memory is not known, as on a CPU, where
keeping more is no faster."""

LEAST_READS = 10
"""Keeping activations pays on a TPU if it could read an element at least this many times in the
time that it needs to compute it again. By the compiler's account an update of 8B on v6e (7) takes
510 ms a micro-batch with all products kept and 507 with none, one of 70B on v5p (49) 5.5 and 6.1 s
a step."""


def run_roles(config: Config, a: Architecture, devices: Sequence[Any]) -> Roles:
    """Returns the meshes of a run's roles for a model of architecture `a`, with
    `mesh.sampler_tensor` decided if it is open: `mesh.tensor` if the sampler's weights fit that
    way, else the fewest devices that they fit on. If the devices' memory is not known, like that of
    a CPU, it is `mesh.tensor`. How a replica splits experts is decided too (`with_expert_split`).
    ShoalError if the meshes do not divide a model. With a remote
    sampler the trainer's devices stand for its own."""
    if config.sampler.is_remote:
        # The workers' devices are unknown, so the trainer's stand for them.
        config = replace(config, mesh=replace(config.mesh, sampler_tensor=config.mesh.tensor))
    scored = []
    if needs_first_weights(config):
        scored.append(a)
    scored.extend(teacher_architectures(config).values())
    scored.extend(reward_architectures(config.reward).values())
    # the largest number that divides the hidden sizes of all models: the reference's devices split
    # that dimension of each
    hidden_size = a.hidden_size
    for model in scored:
        hidden_size = math.gcd(hidden_size, model.hidden_size)
    roles = make_roles(config.mesh, devices, hidden_size)
    if config.mesh.expert > 1 and not a.experts:
        raise ShoalError(
            f"mesh.expert={config.mesh.expert}: this model has no experts; use mesh.expert=1, and "
            "mesh.fsdp for devices that share its parameters",
            "mesh.expert",
        )
    check_mesh(a, roles.trainer)
    for model in scored:
        check_mesh(model, roles.reference)
    memory = device_memory(devices[0])
    if not config.mesh.sampler_tensor and memory:
        tensor = replica_size(config, a, roles, memory)
        if tensor != roles.sampler.tensor:
            mesh = replace(config.mesh, sampler_tensor=tensor)
            roles = make_roles(mesh, devices, hidden_size)
    return with_expert_split(roles, a)


def with_expert_split(roles: Roles, a: Architecture) -> Roles:
    """Returns the roles of a model, with experts split by their number over the devices of a
    sampler's replica where that is possible: if these divide the number. They all have the
    replica's tokens, so no token is exchanged, and each expert is whole. In parts, 192 of the 768
    columns of Qwen3-30B-A3B's experts on each of 4 devices, XLA for TPU copied all experts into
    another layout. Experts stay in parts if the trainer's are, in as many: the sampler may then
    share the trainer's arrays. Other models' roles are returned as they are."""
    sampler = roles.sampler
    if a.experts is None or sampler.tensor == roles.trainer.tensor:
        return roles
    if a.experts.num_experts % sampler.tensor:
        return roles
    rules = dict(sampler.rules) | {"experts": "tensor"}
    return replace(roles, sampler=replace(sampler, rules=tuple(rules.items())))


def replica_size(config: Config, a: Architecture, roles: Roles, memory: int) -> int:
    """Returns the number of devices that a replica of the sampler is split over, so that its
    weights and what else a device of `memory` bytes holds fit. It is the number in `roles`, doubled
    until they fit into PLAN_FOR of it while sampling, or until the model cannot be split further
    (they may then still not fit); and until the least update on the same devices fits into FULL of
    it, if any number allows that."""
    dtype = compute_dtype(config.model.dtype, roles.sampler.platform)
    weights = open_budget(config, roles, a)
    held = weights.held("sampler", "sampling")
    held.pop("the sampler's copy", 0)  # counted below, because it depends on the size
    free = PLAN_FOR * memory - sum(held.values())
    # the most versions that are in memory at the same time
    versions = max(num_held for num_held, _ in held_versions(config))
    needed = 0
    for spec in jax.tree.leaves(param_specs(sampled_architecture(config, a))):
        size = math.prod(spec.shape) * jnp.dtype(spec.dtype or dtype).itemsize
        # frozen weights are held once, whatever the versions
        needed += size * versions if spec.trained else size
    possible = tensor_sizes(a, roles.sampler.local.mesh.size)
    if config.mesh.expert > 1 and a.experts:  # a replica's devices share the experts
        possible = [size for size in possible if a.experts.num_experts % size == 0]

    def fewest(free: float) -> int:
        """Returns the fewest devices with which the weights take at most `free` bytes of each."""
        tensor = roles.sampler.tensor
        # Doubled, because heads, feed-forward sizes and networks are multiples of powers of two.
        while needed / tensor > free and 2 * tensor in possible:
            tensor *= 2
        return tensor

    tensor = fewest(free)
    if "trainer" not in weights.colocated_roles("sampler"):
        return tensor
    in_update = least_update(weights, a, roles.trainer).needed("accumulate")
    in_update.pop("the sampler's copy", 0)
    free = FULL * memory - sum(in_update.values())
    of_update = fewest(free)
    # If no number leaves an update enough, as few as sampling needs.
    return max(tensor, of_update) if needed / of_update <= free else tensor


def open_budget(config: Config, roles: Roles, a: Architecture) -> Budget:
    """Returns the budget of a job's weights alone, without programs, caches and activations, by
    which open settings are decided before the model is made."""
    dtype = compute_dtype(config.model.dtype, roles.trainer.platform)
    return weight_budget(config, a, roles, dtype, teacher_architectures(config))


def with_update(
    weights: Budget, a: Architecture, role: Role, dtype: Any, tokens: int, remat: str
) -> Budget:
    """Returns the budget of a job's weights with the estimated memory of an update added, whose
    micro-batches have `tokens` tokens on each device. `remat`: a value of `model.remat`, except
    `auto` and `none`."""
    config = weights.config
    longest = longest_sequence(config)
    model = Model(a, role, dtype, attention=config.model.attention, longest_sequence=longest)
    stored = activation_bytes(a, tokens, dtype, remat, role.expert)
    activations = update_bytes(a, role, dtype, tokens) + stored + score_bytes(model, tokens)
    activations += unstacked_bytes(a, role, dtype, stored + input_bytes(a, tokens, dtype))
    teachers = all_teachers(config, a, teacher_architectures(config))
    activations += teacher_update_bytes(config.teacher, teachers, role, dtype, tokens)
    update = {"accumulate": StepProgram("trainer")}
    return replace(weights, programs=update, activations=activations).estimated()


def least_update(weights: Budget, a: Architecture, role: Role) -> Budget:
    """Returns the budget of a job's weights with the least update that the settings allow: the
    default micro-batch, and, where `model.remat` is open, the backward pass that keeps least."""
    config = weights.config
    remat = config.model.remat
    if remat in ("auto", "none"):
        remat = "full"
    dtype = compute_dtype(config.model.dtype, role.platform)
    tokens = least_tokens(config, role)
    return with_update(weights=weights, a=a, role=role, dtype=dtype, tokens=tokens, remat=remat)


def least_tokens(config: Config, role: Role) -> int:
    """Returns the tokens that a micro-batch has on each device of the trainer: those of
    `batch.micro_tokens`, or the default if that is open; but a row is never shorter than the
    longest sequence, which `context` devices share."""
    tokens = config.batch.micro_tokens or MICRO_TOKENS
    return max(tokens, -(-longest_sequence(config) // role.context))


def free_cache_bytes(config: Config, roles: Roles, a: Architecture) -> int:
    """Returns the bytes of each of the sampler's devices that caches may take:
    `sampling.memory_share` of its memory, less what the device holds; at least one. 0 if the
    devices' memory is not known, like that of a CPU."""
    role = roles.sampler
    memory = device_memory(role.mesh.devices.flat[0])
    if not memory:
        return 0
    held = open_budget(config, roles, a).held("sampler", "sampling")
    free = config.sampling.memory_share * memory - sum(held.values())
    # at least 1, because 0 means that the memory is not known
    return max(1, int(free))


def teacher_architectures(config: Config) -> dict[str, Architecture]:
    """Returns the architectures of the teachers that have weights of their own, by name, without
    those whose sizes would have to be downloaded."""
    known = {}
    for name, path in config.teacher.paths.items():
        architecture = known_architecture(teacher_model(config, path))
        if architecture:
            known[name] = architecture
    return known


def all_teachers(
    config: Config, a: Architecture, own: Mapping[str, Architecture]
) -> list[Architecture]:
    """Returns the architectures of all teachers: `own`, those that have weights of their own, or
    the policy's, `a`, if the model is its own teacher, or servers are, whose tokens are its."""
    teacher = config.teacher
    return [a] if teacher.is_policy or teacher.address else list(own.values())


def trained_model(config: Config, spec: ModelSource, roles: Roles) -> Model:
    """Returns the `Model` that is trained, on the trainer's devices, with the sampler's own type of
    weights, if the settings give it one. `config` must have `model.remat` decided. ShoalError if a
    device lacks the host memory that the settings need, or if trained weights would be in 8
    bits."""
    check_quantised(config.model, spec.architecture)
    device = roles.trainer.mesh.devices.flat[0]
    if config.optimizer.offload:
        check_host_memory(device, "optimizer.offload", "true", "false")
    if config.model.remat == "offload":
        check_host_memory(device, "model.remat", "offload", "full")
    model = make_model(config.model, spec.architecture, roles.trainer, longest_sequence(config))
    return replace(model, sampler_type=QUANTISED[config.sampler.quantise])


def check_host_memory(device: Any, key: str, value: str, instead: str) -> None:
    """Raises ShoalError if programs on the device cannot use the host's memory. `key`, `value`: the
    setting that moves arrays there; `instead`: the value that the error recommends."""
    if not has_host_memory(device):
        raise ShoalError(
            f"{key}={value}: {device.device_kind} has no host memory that its programs can use "
            f"({PINNED_HOST}); use {key}={instead}",
            key,
        )


def decided_micro_tokens(config: Config, roles: Roles, a: Architecture) -> int:
    """Decides `batch.micro_tokens` for a job that leaves it open, and returns the tokens.

    On an accelerator: the largest number of whole groups, up to MOST_MICRO_TOKENS, with which an
    update fits into PLAN_FOR of a device's memory, with the `model.remat` that the default would
    get. If not even the default in `config` fits into FULL of it, the largest part of a group that
    does; the default if none does. On a CPU: `cpu_micro_tokens`. The default is also returned if
    the device's memory is unknown, if `model.remat` is `none`, or if the job learns from data.
    """
    tokens = config.batch.micro_tokens
    role = roles.trainer
    remat = config.model.remat
    if config.algorithm.learns_from_data:
        return tokens
    if role.platform == "cpu":
        return cpu_micro_tokens(config, role.row_shards)
    memory = device_memory(role.mesh.devices.flat[0])
    if not memory or remat == "none":
        return tokens
    if remat == "auto":
        remat = decided_remat(config, roles, a)
    dtype = compute_dtype(config.model.dtype, role.platform)
    weights = open_budget(config, roles, a)

    def fits(size: int, share: float) -> bool:
        """True if an update of rows of `size` tokens fits into this share of the memory."""
        budget = with_update(weights=weights, a=a, role=role, dtype=dtype, tokens=size, remat=remat)
        return budget.fits(share)

    if not fits(least_tokens(config, role), FULL):
        for size in reversed(completion_rows(config)):
            if size < tokens and fits(size, FULL):
                return size
        return tokens
    chosen = tokens
    for size in group_rows(config, role.row_shards):
        if chosen < size <= MOST_MICRO_TOKENS and fits(size, PLAN_FOR):
            chosen = size
    return chosen


def cpu_micro_tokens(config: Config, row_shards: int) -> int:
    """Decides `batch.micro_tokens` for a CPU, and returns the tokens: the default in `config`,
    unless groups do not fit into that. Then rows up to MOST_CPU_ROWS times as long are compared,
    each with room for a number of the longest completions, and a longer row is chosen if its
    padding saves enough (WORTH_LONGER_ROWS)."""
    tokens = config.batch.micro_tokens
    rows = completion_rows(config)
    if max(rows) <= tokens:
        return tokens
    prompts = -(-config.batch.prompts_per_step // config.algorithm.num_minibatches)
    # so many groups on each device are enough to compare sizes of rows
    prompts = min(prompts, SAMPLE_PROMPTS * row_shards)
    # A larger group has the same share of padding, and packing a million completions takes minutes.
    group_size = min(config.batch.group_size, SAMPLE_COMPLETIONS)
    sample = replace(config, batch=replace(config.batch, group_size=group_size))
    chosen, least = tokens, computed_tokens(sample, row_shards, prompts, tokens)
    for size in rows:
        if not tokens < size <= MOST_CPU_ROWS * tokens:
            continue
        computed = computed_tokens(sample, row_shards, prompts, size)
        if computed < (1 - WORTH_LONGER_ROWS) * least:
            chosen, least = size, computed
    return chosen


def decided_remat(config: Config, roles: Roles, a: Architecture) -> str:
    """Decides `model.remat` for a job that leaves it open, and returns it; `batch.micro_tokens`
    must be decided. If the device's memory is known: the first of `dots` and `attention` with which
    an update fits into TIGHT of it, else `full`; on a TPU `full` also if computing again is as fast
    as reading (LEAST_READS). If it is unknown, like that of a CPU: `dots` if its activations take
    at most UNKNOWN_ROOM, else `full`."""
    role = roles.trainer
    tokens = config.batch.micro_tokens
    dtype = compute_dtype(config.model.dtype, role.platform)
    known = accelerator_of(role.mesh.devices.flat[0].device_kind)
    if known is None:
        if activation_bytes(a, tokens, dtype, "dots", role.expert) <= UNKNOWN_ROOM:
            return "dots"
        return "full"
    if known.is_tpu and a.hidden_size * known.hbm / known.peaks["bfloat16"] < LEAST_READS:
        return "full"
    tokens = least_tokens(config, role)
    weights = open_budget(config, roles, a)
    for remat in ("dots", "attention"):
        if with_update(
            weights=weights, a=a, role=role, dtype=dtype, tokens=tokens, remat=remat
        ).fits(TIGHT):
            return remat
    return "full"
