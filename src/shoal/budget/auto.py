"""What the settings leave to the devices' memory: the devices of a replica of the sampler, the room
of its caches, the tokens of a micro-batch, and what the backward pass computes again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from shoal.budget.memory import (
    activation_bytes,
    device_memory,
    held_versions,
    key_bytes,
    sampled_architecture,
    update_bytes,
    weight_sizes,
)
from shoal.budget.shapes import completion_rows, computed_tokens, group_rows
from shoal.config.derived import longest_sequence
from shoal.config.key import get_value
from shoal.config.train import Config
from shoal.mesh import PINNED_HOST, Roles, accelerator_of, has_host_memory, make_roles
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

WEIGHT_SHARE = 0.75
"""Of a device's memory that weights may take while sampling, where `mesh.sampler_tensor` is
open."""
UPDATE_SHARE = 0.9
"""Of a device's memory that an update may take, where `model.remat` is open."""

MICRO_TOKENS_SHARE, MOST_MICRO_TOKENS = 0.75, 2**15
"""Of a device's memory what an update may take, and tokens of a device, where `batch.micro_tokens`
is open. By the compiler's account the default update of 1.5B on one H200 takes 3.35 s with rows of
4,096 tokens, 2.51 with 17,408, four whole groups, and 2.42 with 34,816."""

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
    teacher = teacher_architecture(config)
    scored = [
        model
        for model in (
            a if config.algorithm.scores_reference else None,
            teacher,
            *reward_architectures(config.reward).values(),
        )
        if model
    ]
    hidden_size = math.gcd(a.hidden_size, *(model.hidden_size for model in scored))
    roles = make_roles(config.mesh, devices, hidden_size)
    for model, role in (a, roles.trainer), *((model, roles.reference) for model in scored):
        check_mesh(model, role)
    memory = device_memory(devices[0])
    if config.mesh.sampler_tensor or not memory:
        return roles
    dtype = compute_dtype(config.model.dtype, devices[0].platform)
    sampler, possible = roles.sampler, tensor_sizes(a, roles.sampler.local.mesh.size)
    held = weight_sizes(config, a, roles, dtype, teacher).on("sampler", "sampling")
    free = WEIGHT_SHARE * memory - sum(
        size for part, size in held.items() if part != "the sampler's copy"
    )
    # By a power of two: what heads, feed-forward size and the network are multiples of.
    fitting = sampler.tensor
    versions = max(held for held, _ in held_versions(config))
    needed = sum(
        math.prod(spec.shape)
        * jnp.dtype(spec.dtype or dtype).itemsize
        * (versions if spec.trained else 1)
        for spec in jax.tree.leaves(param_specs(sampled_architecture(config, a)))
    )
    while needed / fitting > free and 2 * fitting in possible:
        fitting *= 2
    if fitting == sampler.tensor:
        return roles
    return make_roles(replace(config.mesh, sampler_tensor=fitting), devices, hidden_size)


def free_cache_tokens(config: Config, roles: Roles, a: Architecture) -> int:
    """Tokens for whose keys and values the devices of a host of the sampler have memory beside
    weights; 0 where it is not known, as on a CPU."""
    role, memory = roles.sampler, device_memory(roles.sampler.mesh.devices.flat[0])
    if not memory:
        return 0
    dtype = compute_dtype(config.model.dtype, role.platform)
    held = weight_sizes(config, a, roles, dtype, teacher_architecture(config)).on(
        "sampler", "sampling"
    )
    free = config.sampling.memory_share * memory - sum(held.values())
    return max(1, int(free / key_bytes(a, role, dtype))) * roles.hosts[0].row_shards


def teacher_architecture(config: Config) -> Architecture | None:
    """The teacher's sizes where they are known without a download."""
    if not config.teacher.path:
        return None
    return known_architecture(section_of(config.model, config.teacher.path))


def trained_model(config: Config, spec: ModelSource, roles: Roles) -> Model:
    """The `Model` on the trainer's devices, with `model.remat` decided. ShoalError for what they
    cannot do."""
    check_quantised(config.model, spec.architecture)
    remat, device = config.model.remat, roles.trainer.mesh.devices.flat[0]
    for key, wanted, instead in (
        ("optimizer.offload", config.optimizer.offload, "false"),
        ("model.remat", remat == "offload", "full"),
    ):
        if wanted and not has_host_memory(device):
            raise ShoalError(
                f"{key}={str(get_value(config, key)).lower()}: {device.device_kind} has no host "
                f"memory that its programs can use ({PINNED_HOST}); use {key}={instead}",
                key,
            )
    if remat == "auto":
        remat = decided_remat(config, roles, spec.architecture)
    return replace(
        make_model(replace(config.model, remat=remat), spec.architecture, roles.trainer),
        sampler_type=QUANTISED[config.sampler.quantise],
    )


def decided_micro_tokens(config: Config, roles: Roles, a: Architecture) -> int:
    """`batch.micro_tokens` where it is open: `config`'s, or on an accelerator more, as many whole
    groups as leave part of its memory while as much is kept of them for the backward pass; on a CPU
    as `cpu_micro_tokens` says."""
    tokens, role, remat = config.batch.micro_tokens, roles.trainer, config.model.remat
    if config.algorithm.learns_from_data:
        return tokens
    if role.platform == "cpu":
        return cpu_micro_tokens(config, role.row_shards)
    known = accelerator_of(role.mesh.devices.flat[0].device_kind)
    if not known or remat == "none":
        return tokens
    dtype = compute_dtype(config.model.dtype, role.platform)
    kind = decided_remat(config, roles, a) if remat == "auto" else remat
    room = MICRO_TOKENS_SHARE * known.usable_bytes - _held_bytes(config, roles, a, dtype)
    return max(
        (
            size
            for size in group_rows(config, role.row_shards)
            if tokens < size <= MOST_MICRO_TOKENS
            and update_bytes(a, role, dtype, size) + activation_bytes(a, size, dtype, kind) <= room
        ),
        default=tokens,
    )


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


def _held_bytes(config: Config, roles: Roles, a: Architecture, dtype: Any) -> int:
    """Bytes that are held on a device of the trainer while it updates."""
    held = weight_sizes(config, a, roles, dtype, teacher_architecture(config)).on(
        "trainer", "update"
    )
    return sum(held.values())


def decided_remat(config: Config, roles: Roles, a: Architecture) -> str:
    """`dots`, `attention` or `full`: the first that fits."""
    role = roles.trainer
    device = role.mesh.devices.flat[0]
    dtype, known = (
        compute_dtype(config.model.dtype, device.platform),
        accelerator_of(device.device_kind),
    )
    kinds, tokens, room = ("dots",), config.batch.micro_tokens, UNKNOWN_ROOM
    if known:
        kinds, tokens = (
            ("dots", "attention"),
            max(config.batch.micro_tokens, -(-longest_sequence(config) // role.context)),
        )
        pays = (
            not known.is_tpu or a.hidden_size * known.hbm / known.peaks["bfloat16"] >= LEAST_READS
        )
        room = (
            UPDATE_SHARE * known.usable_bytes
            - _held_bytes(config, roles, a, dtype)
            - update_bytes(a, role, dtype, tokens)
            if pays
            else 0
        )
    return next(
        (kind for kind in kinds if activation_bytes(a, tokens, dtype, kind) <= room), "full"
    )
