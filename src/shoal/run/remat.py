"""What the backward pass keeps, where `model.remat=auto` leaves it open: as much as a device has memory for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from shoal.algorithm.logprobs import CHUNK_ELEMENTS
from shoal.config.schema import Config
from shoal.mesh import Roles, accelerator_of
from shoal.model.architecture import Architecture
from shoal.model.transformer import Model
from shoal.run.derived import longest_sequence
from shoal.run.loading import ModelSpec, compute_dtype, make_model
from shoal.run.preflight.memory import FULL, held_versions, parameter_count, weight_bytes
from shoal.run.sampler_size import other_weights, scored_models

LEAST_ROOM = 2 << 30
"""Bytes that may be kept where a device's memory is not known, as on a CPU, where keeping more is no faster."""


LEAST_READS = 10
"""How often a TPU must be able to read an element while it computes it again for keeping it to pay. By the compiler's
account an update of 8B on v6e (7) takes 510 ms a micro-batch with all products kept and 507 with none, one of 70B on
v5p (49) 5.5 and 6.1 s a step."""


def trained_model(config: Config, spec: ModelSpec, roles: Roles) -> Model:
    """The `Model` on the trainer's devices, with `model.remat` decided."""
    remat = config.model.remat
    if remat == "auto":
        remat = decided_remat(config, roles, spec.architecture)
    return make_model(replace(config.model, remat=remat), spec, roles.trainer)


def decided_remat(config: Config, roles: Roles, a: Architecture) -> str:
    """`dots`, `attention` or `full`: the first that fits."""
    device = roles.trainer.mesh.devices.flat[0]
    dtype, known = compute_dtype(config.model.dtype, device.platform), accelerator_of(device.device_kind)
    if known is None:
        kinds, tokens, room = ("dots",), config.batch.micro_tokens, LEAST_ROOM
    else:
        kinds, tokens = ("dots", "attention"), max(config.batch.micro_tokens, longest_sequence(config))
        pays = not known.is_tpu or a.hidden_size * known.hbm / known.peaks["bfloat16"] >= LEAST_READS
        room = kept_room(config, roles, a, dtype, tokens, known.usable_bytes) if pays else 0
    return next((kind for kind in kinds if activation_bytes(a, tokens, dtype, kind) <= room), "full")


def kept_room(config: Config, roles: Roles, a: Architecture, dtype: Any, tokens: int, memory: int) -> float:
    """Bytes of a trainer's device with so much memory that an update does not need anyway."""
    role, size = roles.trainer, jnp.dtype(dtype).itemsize
    held = weight_bytes(a, role, jnp.float32)  # the gradient
    if roles.disaggregated:
        held *= 4
    else:
        held += other_weights(roles, a, scored_models(config, a), dtype)
        held += max(count for count, _ in held_versions(config)) * weight_bytes(a, roles.sampler, dtype)
    # A copy of the weights in the type of the computation, a layer of them whole with its gradient, each layer's input,
    # and a few arrays of logits.
    layer = parameter_count(a) - parameter_count(replace(a, num_layers=a.num_layers - 1))
    needed = weight_bytes(a, role, dtype) + layer // role.tensor * (2 * size + 4) \
        + tokens * a.num_layers * a.hidden_size * size + 3 * 4 * CHUNK_ELEMENTS[role.platform]
    return FULL * memory - held - needed


def activation_bytes(a: Architecture, tokens: int, dtype: Any, remat: str = "dots") -> int:
    """Bytes that the backward pass of `tokens` tokens finds stored, besides each layer's input, with a `model.remat`
    that computes anything again."""
    heads = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    a_token = {"full": 0, "attention": a.hidden_size + heads + a.num_heads * a.head_dim,
               "dots": 3 * a.hidden_size + heads + 2 * a.intermediate_size}[remat]
    return a_token * a.num_layers * tokens * jnp.dtype(dtype).itemsize
