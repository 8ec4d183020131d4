"""How many devices share one replica of the sampler, and what its caches may take of their memory, where
`mesh.sampler_tensor` and `sampling.cache_tokens` leave that open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from shoal.config.schema import Config
from shoal.mesh import Roles, accelerator_of, make_roles
from shoal.model.architecture import Architecture
from shoal.model.parameters import check_mesh, tensor_sizes
from shoal.run.loading import compute_dtype, known_architecture
from shoal.run.preflight.memory import held_versions, parameter_count, weight_bytes

SHARE = 0.75
"""Of a device's memory that weights may take; the rest is for caches and what programs need besides."""
CACHE_SHARE = 0.85
"""Of a device's memory that weights and caches may take while sampling; the rest is for what programs need besides."""


def run_roles(config: Config, a: Architecture, devices: Sequence[Any]) -> Roles:
    """The roles of a run that trains a model of this architecture, with `mesh.sampler_tensor` decided: `mesh.tensor`
    where a replica fits so, else the least that fits. It stays `mesh.tensor` where a device's memory is not known, as
    on a CPU."""
    if config.sampler.kind == "ray":  # whose workers have devices of their own; here the trainer's stand for them
        config = replace(config, mesh=replace(config.mesh, sampler_tensor=config.mesh.tensor))
    scored = scored_models(config, a)
    hidden_size = math.gcd(a.hidden_size, *(model.hidden_size for model in scored))
    roles = make_roles(config.mesh, devices, hidden_size)
    for model, role in (a, roles.trainer), *((model, roles.reference) for model in scored):
        check_mesh(model, role)
    memory = device_memory(devices[0])
    if config.mesh.sampler_tensor or not memory:
        return roles
    dtype = compute_dtype(config.model.dtype, devices[0].platform)
    sampler, sizes = roles.sampler, tensor_sizes(a, roles.sampler.local.mesh.size)
    free = SHARE * memory - other_weights(roles, a, scored, dtype)
    # By a power of two: what heads, feed-forward size and the network are multiples of.
    fitting = sampler.tensor
    needed = parameter_count(a) * jnp.dtype(dtype).itemsize * max(held for held, _ in held_versions(config))
    while needed / fitting > free and 2 * fitting in sizes:
        fitting *= 2
    if fitting == sampler.tensor:
        return roles
    return make_roles(replace(config.mesh, sampler_tensor=fitting), devices, hidden_size)


def free_cache_tokens(config: Config, roles: Roles, a: Architecture) -> int:
    """Tokens for whose keys and values the devices of a host of the sampler have memory beside weights; 0 where it is
    not known, as on a CPU."""
    role, memory = roles.sampler, device_memory(roles.sampler.mesh.devices.flat[0])
    if not memory:
        return 0
    dtype = compute_dtype(config.model.dtype, role.platform)
    weights = max(held for held, _ in held_versions(config)) * weight_bytes(a, role, dtype)
    others = 0 if config.sampler.kind == "ray" else other_weights(roles, a, scored_models(config, a), dtype)
    free = CACHE_SHARE * memory - weights - others
    heads = max(a.num_kv_heads, role.tensor) // role.tensor
    token = 2 * a.num_layers * heads * a.head_dim * jnp.dtype(dtype).itemsize
    return max(1, int(free / token)) * roles.hosts[0].row_shards


def scored_models(config: Config, a: Architecture) -> list[Architecture]:
    """The models on the reference's devices: the first weights for a KL term, and a teacher whose sizes are known."""
    found = [a] if config.algorithm.kl_coef > 0 else []
    section = replace(config.model, path=config.teacher.path, name="", tokenizer="", template="")
    if config.teacher.path and (teacher := known_architecture(section)):
        found.append(teacher)
    return found


def other_weights(roles: Roles, a: Architecture, scored: Sequence[Architecture], dtype: Any) -> int:
    """Bytes of weights on a device of the sampler that other roles hold all the time."""
    own = set(roles.sampler.mesh.devices.flat)
    # The masters and two moments of each in float32; the gradient is there when nothing is sampled.
    held = 0 if roles.disaggregated else 3 * weight_bytes(a, roles.trainer, jnp.float32)
    if not own.isdisjoint(roles.reference.mesh.devices.flat):
        held += sum(weight_bytes(model, roles.reference, dtype) for model in scored)
    return held


def device_memory(device: Any) -> int:
    """Bytes of a device's memory, as its maker says, so that a plan and a run decide alike; 0 if it is not known."""
    known = accelerator_of(device.device_kind)
    return known.usable_bytes if known else 0
