"""Gated delta net layers: their products, and the recurrence of each pass over tokens.

The recurrence reads a token's queries, keys and values after a short causal convolution. Both carry
a state from token to token: the convolution its last inputs (the tail), the delta rule a matrix for
each head. `shoal.model.delta_net` has the maths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shoal.mesh import Role
from shoal.model.architecture import DeltaNet
from shoal.model.delta_net import (
    convolve,
    convolve_after,
    convolve_taps,
    delta_rows,
    delta_sequence,
    delta_step,
)
from shoal.model.linear import linear
from shoal.model.norms import rms_norm
from shoal.model.parameters import DeltaNetWeights

if TYPE_CHECKING:
    from shoal.model.attention.caches import StateCache
    from shoal.model.block import Recurrence
    from shoal.model.transformer import Model


class State(NamedTuple):
    """What a delta net carries from the tokens of R sequences so far to the next ones."""

    state: jax.Array  # float32[R, Hv, dk, dv]: of the delta rule
    tail: jax.Array  # [R, conv_size - 1, C]: the convolution's last inputs


Step: TypeAlias = Callable[..., tuple[jax.Array, jax.Array]]
"""(q, k, v, log_decay, beta, state) -> (out, new state), as `delta_step` takes and returns them."""


class DeltaNetInputs(NamedTuple):
    """What a delta net reads of each token."""

    mixed: jax.Array  # [R, T, C]: queries, keys and values before the convolution
    log_decay: jax.Array  # float32[R, T, Hv]: logarithm of the part of the state that is kept
    beta: jax.Array  # [R, T, Hv]: how much of a key's value is replaced


def delta_net(
    model: Model, w: DeltaNetWeights, h: jax.Array, recurrence: Recurrence, cache: Any
) -> tuple[jax.Array, Any]:
    """Computes a gated delta net (Yang et al. 2024, arXiv:2412.06464): h[R, T, D] -> (out[R, T, D],
    new cache)."""
    a = model.architecture
    sizes = a.delta_net_sizes
    constrain = model.role.constrain
    rows, size, _ = h.shape
    mixed = linear(w.qkv, h)
    if w.z is None:  # the four weights are joined in one (`products_joined`)
        ends = np.cumsum([sizes.conv_width, sizes.value_width, sizes.num_value_heads])
        mixed, z, of_beta, of_decay = jnp.split(mixed, ends, axis=-1)
    else:
        z, of_beta, of_decay = linear(w.z, h), linear(w.b, h), linear(w.a, h)
    # Queries, keys and values are in one array: a device that has a part of its columns has no
    # whole head of each.
    mixed = constrain(mixed, "rows", None, None)
    # In float32: the state multiplies by the decay at each token.
    wide = of_decay.astype(jnp.float32) + w.dt_bias.astype(jnp.float32)
    log_decay = -jnp.exp(w.a_log.astype(jnp.float32)) * jax.nn.softplus(wide)
    beta = jax.nn.sigmoid(of_beta)
    inputs = DeltaNetInputs(mixed, log_decay, beta)
    out: Any
    out, cache = recurrence(inputs, w.convolution, cache)
    z = z.reshape(rows, size, sizes.num_value_heads, sizes.value_dim)
    out = _gated_norm(out, z, w.norm, a.norm_eps)
    return linear(w.out, out.reshape(rows, size, sizes.value_width)), cache


def _gated_norm(out: jax.Array, z: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Computes the norm of each head of out[R, T, Hv, dv], times silu of its gate z."""
    normed = rms_norm(out, weight, eps)
    # Multiplied by the gate in float32, as transformers' Qwen3_5RMSNormGated does.
    return (normed * jax.nn.silu(z.astype(jnp.float32))).astype(out.dtype)


def _by_head(
    sizes: DeltaNet, role: Role, convolved: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits the convolution's output [R, T, C] into q and k [R, T, Hk, dk] and v [R, T, Hv, dv]. A
    device of `tensor`, which has all columns before, has its heads after."""
    leading = convolved.shape[:-1]

    def heads(columns: jax.Array, num_heads: int, head_dim: int) -> jax.Array:
        by_head = columns.reshape(*leading, num_heads, head_dim)
        return role.constrain(by_head, "rows", None, "heads", None)

    q, k, v = jnp.split(convolved, (sizes.key_width, 2 * sizes.key_width), axis=-1)
    q = heads(q, sizes.num_key_heads, sizes.key_dim)
    k = heads(k, sizes.num_key_heads, sizes.key_dim)
    v = heads(v, sizes.num_value_heads, sizes.value_dim)
    return q, k, v


@dataclass(frozen=True)
class RowRecurrence:
    """The `Recurrence` of packed rows, in training and scoring: the state after a prompt is the
    first state of each of its completions."""

    sizes: DeltaNet
    role: Role
    segment: jax.Array  # [R, T]
    prompt: jax.Array  # [R, T]
    chain: Any  # [R, T, conv_size - 1]: see `chain_before`

    def __call__(
        self, inputs: DeltaNetInputs, convolution: jax.Array, cache: None
    ) -> tuple[jax.Array, None]:
        mixed, log_decay, beta = inputs
        convolved = convolve(mixed, convolution[:, 0], self.chain)
        q, k, v = _by_head(self.sizes, self.role, convolved)
        tokens = q, k, v, log_decay, beta
        return delta_rows(*tokens, self.segment, self.prompt, self.role.platform), cache


@dataclass(frozen=True)
class SequenceRecurrence:
    """The `Recurrence` of R sequences of T tokens, of which count[R] are real: prompts, chunks of
    prompts, and context after a completion. The cache is the `State` before the first token, None:
    zeros; the new one is that after the last real token."""

    sizes: DeltaNet
    role: Role
    count: jax.Array

    def __call__(
        self, inputs: DeltaNetInputs, convolution: jax.Array, cache: State | None
    ) -> tuple[jax.Array, State]:
        mixed, log_decay, beta = inputs
        if cache is None:
            cache = empty_state(self.sizes, (len(mixed),), mixed.dtype)
        state, tail = cache
        convolved, tail = convolve_after(mixed, tail, convolution[:, 0], self.count)
        q, k, v = _by_head(self.sizes, self.role, convolved)
        tokens = q, k, v, log_decay, beta
        out, state = delta_sequence(*tokens, state, self.count, self.role.platform)
        return out, State(state, tail)


@dataclass(frozen=True)
class SlotRecurrence:
    """The `Recurrence` of decoding: one token in each of [N, W] slots. The states of slots that
    are not live[N, W] stay as they are."""

    sizes: DeltaNet
    role: Role
    step: Step
    live: jax.Array

    def __call__(
        self, inputs: DeltaNetInputs, convolution: jax.Array, cache: StateCache
    ) -> tuple[jax.Array, StateCache]:
        mixed, log_decay, beta = inputs
        live = self.live[..., None]
        tokens = jnp.concatenate([cache.own_tail, mixed[:, :, None]], axis=2)
        newest_first = jnp.unstack(tokens, axis=2)[::-1]
        convolved = convolve_taps(newest_first, convolution[:, 0])
        q, k, v = _by_head(self.sizes, self.role, convolved)
        # Nothing decays and nothing is replaced: the state stays.
        log_decay = jnp.where(live, log_decay, 0.0)
        beta = jnp.where(live, beta, 0.0)
        out, state = self.step(q, k, v, log_decay, beta, cache.own_state)
        tail = jnp.where(live[..., None], tokens[:, :, 1:], cache.own_tail)
        return out, replace(cache, own_state=state, own_tail=tail)


def steps_by_kernel(model: Model) -> bool:
    """True if decoding computes delta nets by the kernel for the model's devices: with
    `model.attention` `auto` or `pallas`, on a GPU or TPU, if it can compute their heads."""
    sizes = model.architecture.delta_net
    if sizes is None or model.attention not in ("auto", "pallas"):
        return False
    return model.role.platform != "cpu" and step_kernel(model.role.platform).can_step(sizes)


def step_kernel(platform: str) -> Any:
    """Returns the module with the kernel for GPUs or TPUs. Pallas takes a second to import."""
    if platform == "tpu":
        from shoal.model import delta_tpu

        return delta_tpu
    from shoal.model import delta_gpu

    return delta_gpu


def step_of(model: Model) -> Step:
    """Returns how decoding computes `delta_step` on the model's devices, each of which has its
    heads."""
    if not steps_by_kernel(model):
        return partial(delta_step, platform=model.role.platform)
    step = step_kernel(model.role.platform).step_by_kernel
    mesh = model.role.mesh
    if mesh.size == 1:
        return step
    heads = PartitionSpec(None, None, "tensor")
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(heads,) * 6,
        out_specs=(heads, heads),
        # All axes that are not manual already.
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )


def empty_state(sizes: DeltaNet, leading: tuple[int, ...], dtype: Any) -> State:
    """Returns the state before the first token of sequences, zeros: the delta rule's [leading, Hv,
    dk, dv] in float32, the tail [leading, conv_size - 1, C] of `dtype`."""
    state = jnp.zeros(
        (*leading, sizes.num_value_heads, sizes.key_dim, sizes.value_dim), jnp.float32
    )
    return State(state, jnp.zeros((*leading, sizes.conv_size - 1, sizes.conv_width), dtype))
