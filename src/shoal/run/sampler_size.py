"""How many devices share one replica of the sampler, where `mesh.sampler_tensor` leaves that open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from shoal.config.schema import Config, MeshSection
from shoal.mesh import Roles, accelerator_of, make_roles, role_devices
from shoal.model.transformer import Architecture
from shoal.run.loading import compute_dtype
from shoal.run.preflight.memory import parameter_count

TRAINER_BYTES = 12
"""Bytes of a parameter that the trainer holds all the time: its master and two moments in float32."""
SHARE = 0.75
"""Of a device's memory that weights may take; the rest is for caches and what programs need besides."""


def run_roles(config: Config, a: Architecture, devices: Sequence[Any]) -> Roles:
    """The roles of a run that trains a model of this architecture."""
    dtype = compute_dtype(config.model.dtype, devices[0].platform)
    return make_roles(with_sampler_tensor(config.mesh, a, dtype, devices), devices)


def with_sampler_tensor(section: MeshSection, a: Architecture, dtype: Any, devices: Sequence[Any]) -> MeshSection:
    """The section with `sampler_tensor` decided: `tensor` where a replica fits so, else the least that fits.

    It stays `tensor` where a device's memory is not known, as on a CPU.
    """
    memory = device_memory(devices[0])
    if section.sampler_tensor or not memory:
        return section
    numbers = role_devices(section, len(devices))
    shared = set(numbers.sampler) == set(numbers.trainer)
    count, total = len(numbers.sampler), parameter_count(a)
    held = TRAINER_BYTES * total / len(numbers.trainer) if shared else 0.0
    # By a power of two: what heads, feed-forward size and the network are multiples of.
    fitting = section.tensor
    while held + total * jnp.dtype(dtype).itemsize / fitting > SHARE * memory and is_divisor(2 * fitting, a, count):
        fitting *= 2
    return section if fitting == section.tensor else replace(section, sampler_tensor=fitting)


def is_divisor(tensor: int, a: Architecture, count: int) -> bool:
    """True if `tensor` devices can share a replica of the model among so many devices."""
    heads = a.num_kv_heads % tensor == 0 or tensor % a.num_kv_heads == 0
    return count % tensor == 0 and a.num_heads % tensor == 0 and a.intermediate_size % tensor == 0 and heads


def device_memory(device: Any) -> int:
    """Bytes of a device's memory, as its maker says, so that a plan and a run decide alike; 0 if it is not known."""
    known = accelerator_of(device.device_kind)
    return known.hbm_bytes if known else 0
