"""The gated delta rule of decoding on TPUs, by one kernel a layer in Pallas.

As `delta_gpu.py` for NVIDIA GPUs: a state is copied into on-chip memory once and back once, where
XLA reads it for what its key and query find in it, and again for the new state. A step of the
kernel takes all heads of some slots; the next one's states are copied meanwhile.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from shoal.model.architecture import DeltaNet
from shoal.model.attention.softmax import largest_block
from shoal.model.delta_net import unit_queries_and_keys

LANES = 128
"""The kernel works for keys and values of a multiple of so many dimensions."""

STATES_AT_ONCE = 32
"""States of heads that a step takes, if that is at least one slot's: 2 MB of 128 x 128."""


def can_step(sizes: DeltaNet) -> bool:
    """True if the kernel can compute heads of these sizes."""
    return sizes.key_dim % LANES == 0 and sizes.value_dim % LANES == 0


def step_by_kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `delta_step`, whose arguments these are; the state is written in place. `interpret`
    runs the kernel as plain JAX, on any device, for tests."""
    rows, siblings, value_heads, dk, dv = state.shape
    num_slots = rows * siblings
    slots = largest_block(num_slots, max(1, STATES_AT_ONCE // value_heads))

    def by_slot(x: jax.Array) -> jax.Array:
        """Returns an array [N, W, ..] of tokens as float32[slots, ..]."""
        return x.astype(jnp.float32).reshape(num_slots, *x.shape[2:])

    def block(*sizes: int) -> pl.BlockSpec:
        """The part of an array [slots, *sizes] that a step gets."""
        zeros = (0,) * len(sizes)
        return pl.BlockSpec((slots, *sizes), lambda number: (number, *zeros))

    q, k = (by_slot(x) for x in unit_queries_and_keys(q, k))
    # Numbers of heads in the last dimension, below one that is whole.
    decay = jnp.exp(by_slot(log_decay))[:, None]
    rate = by_slot(beta)[:, None]
    states = state.reshape(num_slots, value_heads, dk, dv)
    if not interpret:
        # Without this XLA might copy all states into on-chip memory first.
        states = tpu.with_memory_space_constraint(states, tpu.MemorySpace.HBM)
    key_heads = q.shape[1]
    of_key = block(key_heads, dk)
    of_value = block(value_heads, dv)
    of_head = block(1, value_heads)
    of_state = block(value_heads, dk, dv)
    out, states = pl.pallas_call(
        _kernel,
        [
            jax.ShapeDtypeStruct((num_slots, value_heads, dv), jnp.float32),
            jax.ShapeDtypeStruct(states.shape, jnp.float32),
        ],
        grid=(num_slots // slots,),
        in_specs=[of_key, of_key, of_value, of_head, of_head, of_state],
        out_specs=[of_value, of_state],
        input_output_aliases={5: 1},
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel",)),
        # Not products of matrices: the matrix unit computes nothing.
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=8 * state.size),
        interpret=interpret,
        name="delta_step",
    )(q, k, by_slot(v), decay, rate, states)
    return out.reshape(v.shape).astype(v.dtype), states.reshape(state.shape)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    decay_ref: Any,
    rate_ref: Any,
    state_ref: Any,
    out_ref: Any,
    new_ref: Any,
) -> None:
    """Computes all heads of some slots, and writes them to `out_ref` and to `new_ref`. Queries and
    keys are [slots, key heads, dk], values [slots, value heads, dv], decays and rates [slots, 1,
    value heads], states [slots, value heads, dk, dv]."""
    num_slots, value_heads = state_ref.shape[:2]
    share = value_heads // q_ref.shape[1]

    def step_slot(slot: jax.Array, _: None) -> None:
        # A key's dimensions lie along a state's rows: [dk, key heads].
        q = q_ref[slot].T
        k = k_ref[slot].T
        overlap = (q * k).sum(0, keepdims=True)  # [1, key heads]
        for head in range(value_heads):
            of_key_head = slice(head // share, head // share + 1)
            of_head = slice(head, head + 1)
            key = k[:, of_key_head]  # [dk, 1]
            decay = decay_ref[slot, :, of_head]  # [1, 1]
            rate = rate_ref[slot, :, of_head]
            state = state_ref[slot, head]
            of_query = (q[:, of_key_head] * state).sum(0, keepdims=True)  # [1, dv]
            of_key = (key * state).sum(0, keepdims=True)
            replaced = rate * (v_ref[slot, of_head] - decay * of_key)
            out_ref[slot, of_head] = decay * of_query + overlap[:, of_key_head] * replaced
            new_ref[slot, head] = decay * state + key * replaced

    jax.lax.fori_loop(0, num_slots, step_slot, None)
