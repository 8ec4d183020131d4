"""What the settings leave to the devices' memory: the devices of a replica of the sampler, the room
of its caches, the tokens of a micro-batch, and what the backward pass computes again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from shoal.budget.budget import PLAN_FOR, TIGHT, Budget, StepProgram
from shoal.budget.memory import (
    activation_bytes,
    device_memory,
    held_versions,
    key_bytes,
    sampled_architecture,
    update_bytes,
    weight_budget,
)
from shoal.budget.shapes import completion_rows, computed_tokens, group_rows
from shoal.config.derived import longest_sequence
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
    section_of,
)

MOST_MICRO_TOKENS = 2**15
"""Tokens of a device at most, where `batch.micro_tokens` is open. By the compiler's account the
default update of 1.5B on one H200 takes 3.35 s with rows of 4,096 tokens, 2.51 with 17,408, four
whole groups, and 2.42 with 34,816."""

MOST_CPU_ROWS, WORTH_LONGER_ROWS = 2, 0.05
"""On a CPU: how many times longer a row may be than `derived.CPU_MICRO_TOKENS`, and the share of an
update's tokens that must be saved by it. An update takes as long as its rows have tokens, padding
included (`benchmarks/micro_tokens.py`)."""
SAMPLE_PROMPTS, SAMPLE_COMPLETIONS = 8, 64
"""Groups of a step on each device, and completions of each, whose packing decides: with more the
share of padding is the same."""

UNKNOWN_ROOM = 2 << 30
"""Bytes that may be kept where a device's memory is not known, as on a CPU, where keeping more is
no faster."""

LEAST_READS = 10
"""How often a TPU must be able to read an element while it computes it again for keeping it to pay.
By the compiler's account an update of 8B on v6e (7) takes 510 ms a micro-batch with all products
kept and 507 with none, one of 70B on v5p (49) 5.5 and 6.1 s a step."""


def run_roles(config: Config, a: Architecture, devices: Sequence[Any]) -> Roles:
    """The roles of a run that trains a model of this architecture, with `mesh.sampler_tensor`
    decided: `mesh.tensor` where a replica fits so, else the least that fits. It stays `mesh.tensor`
    where a device's memory is not known, as on a CPU."""
    if config.sampler.is_remote:  # here the trainer's devices stand for the workers'
        config = replace(config, mesh=replace(config.mesh, sampler_tensor=config.mesh.tensor))
    scored = []
    if config.algorithm.scores_reference:
        scored.append(a)
    teacher = teacher_architecture(config)
    if teacher:
        scored.append(teacher)
    scored.extend(reward_architectures(config.reward).values())
    hidden_size = a.hidden_size
    for model in scored:
        hidden_size = math.gcd(hidden_size, model.hidden_size)
    roles = make_roles(config.mesh, devices, hidden_size)
    check_mesh(a, roles.trainer)
    for model in scored:
        check_mesh(model, roles.reference)
    memory = device_memory(devices[0])
    if config.mesh.sampler_tensor or not memory:
        return roles
    tensor = replica_size(config, a, roles, PLAN_FOR * memory)
    if tensor == roles.sampler.tensor:
        return roles
    return make_roles(replace(config.mesh, sampler_tensor=tensor), devices, hidden_size)


def replica_size(config: Config, a: Architecture, roles: Roles, available: float) -> int:
    """Devices of a replica of the sampler whose weights leave each of them within so many bytes: as
    many as in `roles`, doubled until they fit or the model has no such split."""
    dtype = compute_dtype(config.model.dtype, roles.sampler.platform)
    held = open_budget(config, roles, a).held("sampler", "sampling")
    held.pop("the sampler's copy", 0)
    free = available - sum(held.values())
    versions = max(held for held, _ in held_versions(config))
    needed = 0
    for spec in jax.tree.leaves(param_specs(sampled_architecture(config, a))):
        size = math.prod(spec.shape) * jnp.dtype(spec.dtype or dtype).itemsize
        needed += size * versions if spec.trained else size
    possible = tensor_sizes(a, roles.sampler.local.mesh.size)
    tensor = roles.sampler.tensor
    # By a power of two: what heads, feed-forward size and the network are multiples of.
    while needed / tensor > free and 2 * tensor in possible:
        tensor *= 2
    return tensor


def open_budget(config: Config, roles: Roles, a: Architecture) -> Budget:
    """The budget that open settings are decided by: of weights alone, as no model is loaded yet."""
    dtype = compute_dtype(config.model.dtype, roles.trainer.platform)
    return weight_budget(config, a, roles, dtype, teacher_architecture(config))


def with_update(
    weights: Budget, a: Architecture, role: Role, dtype: Any, tokens: int, remat: str
) -> Budget:
    """The budget of a job's weights and of an update whose micro-batches have so many tokens on
    each device."""
    activations = update_bytes(a, role, dtype, tokens) + activation_bytes(a, tokens, dtype, remat)
    update = {"accumulate": StepProgram("trainer")}
    return replace(weights, programs=update, activations=activations).estimated()


def free_cache_tokens(config: Config, roles: Roles, a: Architecture) -> int:
    """KV-cache capacity of one host of the sampler beside weights, in tokens; 0 where a device's
    memory is not known, as on a CPU."""
    role = roles.sampler
    memory = device_memory(role.mesh.devices.flat[0])
    if not memory:
        return 0
    held = open_budget(config, roles, a).held("sampler", "sampling")
    free = config.sampling.memory_share * memory - sum(held.values())
    dtype = compute_dtype(config.model.dtype, role.platform)
    tokens_of_a_replica = max(1, int(free / key_bytes(a, role, dtype)))
    return tokens_of_a_replica * roles.hosts[0].row_shards


def teacher_architecture(config: Config) -> Architecture | None:
    """The teacher's sizes where they are known without a download."""
    if not config.teacher.path:
        return None
    return known_architecture(section_of(config.model, config.teacher.path))


def trained_model(config: Config, spec: ModelSource, roles: Roles) -> Model:
    """The `Model` on the trainer's devices, with `model.remat` decided. ShoalError for what they
    cannot do."""
    check_quantised(config.model, spec.architecture)
    remat = config.model.remat
    device = roles.trainer.mesh.devices.flat[0]
    if config.optimizer.offload:
        check_host_memory(device, "optimizer.offload", "true", "false")
    if remat == "offload":
        check_host_memory(device, "model.remat", "offload", "full")
    if remat == "auto":
        remat = decided_remat(config, roles, spec.architecture)
    section = replace(config.model, remat=remat)
    model = make_model(section, spec.architecture, roles.trainer)
    return replace(model, sampler_type=QUANTISED[config.sampler.quantise])


def check_host_memory(device: Any, key: str, value: str, instead: str) -> None:
    """ShoalError for a setting that moves arrays to a host whose memory programs cannot use."""
    if not has_host_memory(device):
        raise ShoalError(
            f"{key}={value}: {device.device_kind} has no host memory that its programs can use "
            f"({PINNED_HOST}); use {key}={instead}",
            key,
        )


def decided_micro_tokens(config: Config, roles: Roles, a: Architecture) -> int:
    """`batch.micro_tokens` where it is open: `config`'s, or on an accelerator more, as many whole
    groups as leave part of its memory while as much is kept of them for the backward pass; on a CPU
    as `cpu_micro_tokens` says."""
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
    chosen = tokens
    for size in group_rows(config, role.row_shards):
        if not chosen < size <= MOST_MICRO_TOKENS:
            continue
        budget = with_update(weights, a, role, dtype, size, remat)
        if budget.fits(PLAN_FOR):
            chosen = size
    return chosen


def cpu_micro_tokens(config: Config, row_shards: int) -> int:
    """`batch.micro_tokens` of a CPU where it is open: `config`'s, or up to `MOST_CPU_ROWS` times as
    many where a group does not fit them, so that a row holds a number of the longest completions
    with little padding behind them."""
    tokens = config.batch.micro_tokens
    rows = completion_rows(config)
    if max(rows) <= tokens:
        return tokens
    prompts = -(-config.batch.prompts_per_step // config.algorithm.num_minibatches)
    prompts = min(prompts, SAMPLE_PROMPTS * row_shards)
    # Of a larger group the share of padding is the same, and packing a million takes minutes.
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
    """`dots`, `attention` or `full`: the first that fits."""
    role = roles.trainer
    tokens = config.batch.micro_tokens
    dtype = compute_dtype(config.model.dtype, role.platform)
    known = accelerator_of(role.mesh.devices.flat[0].device_kind)
    if known is None:
        if activation_bytes(a, tokens, dtype, "dots") <= UNKNOWN_ROOM:
            return "dots"
        return "full"
    if known.is_tpu and a.hidden_size * known.hbm / known.peaks["bfloat16"] < LEAST_READS:
        return "full"
    tokens = max(tokens, -(-longest_sequence(config) // role.context))
    weights = open_budget(config, roles, a)
    for remat in ("dots", "attention"):
        if with_update(weights, a, role, dtype, tokens, remat).fits(TIGHT):
            return remat
    return "full"
