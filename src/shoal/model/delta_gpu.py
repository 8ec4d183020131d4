"""The gated delta rule of decoding on NVIDIA GPUs, by one kernel a layer in Pallas for Triton.

A step reads a state twice, for what its key and query find in it and for the new state, and writes
it once. XLA for GPU does that in two passes through memory, and a state is most of what decoding
reads. Here a program has some columns of one head's state in registers: it is read once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shoal.model.architecture import DeltaNet
from shoal.model.delta_net import NORM_EPS

SIDES = (16, 32, 64, 128)
"""Dimensions of a head's keys and values for which the kernel works: powers of two, as Triton's
arrays have, whose states fit the registers."""

MOST_COLUMNS = 32
"""Most columns of a state in one program."""


def can_step(sizes: DeltaNet) -> bool:
    """True if the kernel can compute heads of these sizes."""
    return sizes.key_dim in SIDES and sizes.value_dim in SIDES


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
    rows, siblings, value_heads, _, dv = state.shape
    columns = min(dv, MOST_COLUMNS)
    out, state = pl.pallas_call(
        partial(_kernel, columns),
        [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        grid=(rows * siblings, value_heads, dv // columns),
        interpret=interpret,
        name="delta_step",
        input_output_aliases={5: 1},
        compiler_params=triton.CompilerParams(num_warps=4),
        # Not products of matrices: no tensor core computes them.
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=8 * state.size),
    )(q, k, v, log_decay, beta, state)
    return out, state


def _kernel(
    columns: int,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    log_decay_ref: Any,
    beta_ref: Any,
    state_ref: Any,
    out_ref: Any,
    new_ref: Any,
) -> None:
    """Computes some columns of one head of one slot, and writes them to `out_ref` and to `new_ref`,
    which is the memory of `state_ref`. The references are to the whole arrays of `delta_step`."""
    siblings = state_ref.shape[1]
    share = state_ref.shape[2] // k_ref.shape[2]
    row = jax.lax.div(pl.program_id(0), siblings)
    slot = jax.lax.rem(pl.program_id(0), siblings)
    head = pl.program_id(1)
    key_head = jax.lax.div(head, share)
    values = pl.ds(pl.program_id(2) * columns, columns)

    def unit(x: jax.Array, scale: float) -> jax.Array:
        """Returns x divided by its length, times `scale`, rounded to its type, as float32."""
        wide = x.astype(jnp.float32)
        length = jax.lax.rsqrt((wide * wide).sum() + NORM_EPS)
        return (wide * (length * scale)).astype(x.dtype).astype(jnp.float32)

    q = unit(q_ref[row, slot, key_head], state_ref.shape[3] ** -0.5)
    k = unit(k_ref[row, slot, key_head], 1.0)
    v = v_ref[row, slot, head, values].astype(jnp.float32)
    decay = jnp.exp(log_decay_ref[row, slot, head].astype(jnp.float32))
    rate = beta_ref[row, slot, head].astype(jnp.float32)
    state = state_ref[row, slot, head, :, values]
    of_query = (q[:, None] * state).sum(0)
    of_key = (k[:, None] * state).sum(0)
    replaced = rate * (v - decay * of_key)
    out = decay * of_query + (q * k).sum() * replaced
    new_ref[row, slot, head, :, values] = decay * state + k[:, None] * replaced[None]
    out_ref[row, slot, head, values] = out.astype(out_ref.dtype)
