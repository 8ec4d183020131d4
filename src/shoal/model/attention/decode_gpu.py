"""Attention of decoding on GPU, by one kernel a layer in Pallas for Triton.

The kernel goes through the keys of a row's prompt, once for all of its slots, then through each
slot's own: no block is read beyond its row's length, and one softmax is gathered over all. What a
slot computes does not depend on any other, to the bit. A program has one key head of some slots of
a row; it also rotates their queries and their new key, and writes that key and its value into the
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shoal.model.attention import softmax
from shoal.model.attention.softmax import LOG2E, RunningSoftmax, masked, product32

HEADS = (32, 64, 128, 256)
"""Dimensions of a head for which the kernel works: powers of two, whose halves it rotates."""


PROGRAMS = 256
"""Number of programs that keeps a GPU busy: if there are more, each takes more slots, so that fewer
programs read the same prompt."""


MOST_RESULTS = 64 * 128
"""Most queries of a program times the dimensions of a head, in 16 bits: they stay in registers and
shared memory."""


def block_keys(head_dim: int, dtype: Any) -> int:
    """Returns the keys of a block; sizes of caches are multiples of it. float32 has half as many as
    a type of 16 bits."""
    keys = 64 if head_dim <= 128 else 32
    return keys // 2 if dtype == jnp.float32 else keys


def slots_at_once(
    rows: int, siblings: int, heads: int, share: int, width: int, programs: int = PROGRAMS
) -> int:
    """Returns how many of a row's `siblings` slots one program takes: a divisor of them, the
    largest for which there are still `programs` programs and a program's results fit into
    registers; else 1. `heads` are the key heads, each with `share` query heads; `width` is a head's
    dimension, counted in 16 bits."""
    for slots in range(siblings, 1, -1):
        if siblings % slots:
            continue
        keeps_gpu_busy = rows * heads * (siblings // slots) >= programs
        fits_registers = slots * share * width <= MOST_RESULTS
        if keeps_gpu_busy and fits_registers:
            return slots
    return 1


def attend_slots(
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: tuple[jax.Array, ...],
    prefix_len: jax.Array,
    position: jax.Array,
    interpret: bool = False,
    programs: int = PROGRAMS,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes attention of one token in each of [N, W] slots, and writes its key and value into
    the cache -> (out[N, W, H, A], own keys, own values).

    `heads`[N, W, H + 2 K, A] are queries, key and value as products gave them; cos and sin are
    float32[N, W, A/2]. `keys` are (prefix_k, prefix_v, own_k, own_v) of a cache: of the prompts,
    [N, K, Tp, A], the first prefix_len[N] are read; of the slots' own, [N, W, K, C, A], those
    before position[N, W], where the new key and value are written, in place. A is a power of two
    from 32 on; Tp and C are multiples of 64. Queries and new keys are rotated here, and scores
    scaled by 1/sqrt(A); scores and sums are float32. `interpret` runs the kernel as plain JAX, on
    any device, for tests. `programs` is that of `slots_at_once`.
    """
    prefix_k, prefix_v, own_k, own_v = keys
    rows, siblings, key_heads, size, width = own_k.shape
    num_heads = heads.shape[2] - 2 * key_heads
    share = num_heads // key_heads
    width_of_16_bits = width * heads.dtype.itemsize // 2
    slots = slots_at_once(rows, siblings, key_heads, share, width_of_16_bits, programs)
    # the number if every key were read
    num_scores = rows * siblings * num_heads * (prefix_k.shape[2] + size)
    results = pl.pallas_call(
        partial(_kernel, slots, block_keys(width, heads.dtype)),
        [
            jax.ShapeDtypeStruct((rows, siblings, num_heads, width), heads.dtype),
            jax.ShapeDtypeStruct(own_k.shape, own_k.dtype),
            jax.ShapeDtypeStruct(own_v.shape, own_v.dtype),
        ],
        grid=(rows, siblings // slots, key_heads),
        interpret=interpret,
        name="decode_kernel",
        # number of an input: number of the result that takes its memory
        input_output_aliases={5: 1, 6: 2},  # own keys and values are updated in place
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        cost_estimate=pl.CostEstimate(
            flops=4 * num_scores * width, transcendentals=num_scores, bytes_accessed=0
        ),
    )(heads, cos, sin, prefix_k, prefix_v, own_k, own_v, prefix_len, position)
    return tuple(results)


def _kernel(
    slots: int,
    block: int,
    heads_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    prefix_k: Any,
    prefix_v: Any,
    own_k: Any,
    own_v: Any,
    prefix_len: Any,
    position_ref: Any,
    out_ref: Any,
    new_k: Any,
    new_v: Any,
) -> None:
    """Computes the output of one key head of some slots of a row, and writes their new key and
    value. Writes to `out_ref`, `new_k` and `new_v`, which are the memory of `own_k` and `own_v`.
    The references are to the whole arrays of `attend_slots`, by their names there. `slots` is how
    many slots a program takes, `block` the keys of a block."""
    row = pl.program_id(0)
    part = pl.program_id(1)
    head = pl.program_id(2)
    key_heads = prefix_k.shape[1]
    width = heads_ref.shape[3]
    num_heads = out_ref.shape[2]
    share = num_heads // key_heads
    half = width // 2
    # Triton's arrays have sizes of powers of two, and its products at least 16: elements beyond the
    # last slot repeat that slot, and write the same values again.
    index = jnp.arange(max(16, pl.next_power_of_2(slots * share)), dtype=jnp.int32)
    within = jnp.minimum(jax.lax.div(index, share), slots - 1)
    slot = part * slots + within
    query = jax.lax.rem(index, share)
    cos = cos_ref[row, slot]
    sin = sin_ref[row, slot]
    position = position_ref[row, slot]

    def rotated(number: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the halves of the heads with these numbers, rotated by the positions of the
        slots."""
        first = heads_ref[row, slot, number, pl.ds(0, half)].astype(jnp.float32)
        second = heads_ref[row, slot, number, pl.ds(half, half)].astype(jnp.float32)
        turned_first = first * cos - second * sin
        turned_second = second * cos + first * sin
        return turned_first.astype(heads_ref.dtype), turned_second.astype(heads_ref.dtype)

    scale = jnp.asarray(width**-0.5, heads_ref.dtype)
    q_first, q_second = rotated(head * share + query)
    q_first = q_first * scale
    q_second = q_second * scale
    # 0 * query: the same head for every query, as an array of their shape.
    k_first, k_second = rotated(num_heads + head + 0 * query)
    v = heads_ref[row, slot, num_heads + key_heads + head + 0 * query]
    new_k[row, slot, head, position, pl.ds(0, half)] = k_first
    new_k[row, slot, head, position, pl.ds(half, half)] = k_second
    new_v[row, slot, head, position, pl.ds(0, width)] = v

    def product_of_rows(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(1, keepdims=True)

    # The softmax starts with the slot's new key, whose weight is 1.
    own_score = (product_of_rows(q_first, k_first) + product_of_rows(q_second, k_second)) * LOG2E
    running = RunningSoftmax(
        top=own_score, total=jnp.ones(own_score.shape, jnp.float32), out=v.astype(jnp.float32)
    )

    def add(
        k_ref: Any,
        v_ref: Any,
        read: Callable[..., jax.Array],
        length: jax.Array,
        is_reader: jax.Array | None,
        turn: jax.Array,
        running: RunningSoftmax,
    ) -> RunningSoftmax:
        """Adds a block of a cache that holds `length` keys, for the queries that read it
        (`is_reader`; None: all). `read(cache, keys, dimensions)` returns a part of the head's keys
        or values. The block is the one with the index `turn`. Returns the new state."""
        keys = pl.ds(turn * block, block)
        key = turn * block + jnp.arange(block, dtype=jnp.int32)[None]
        mask = key < length
        if is_reader is not None:
            mask = is_reader & mask
        # [queries, keys], as the sum over both halves of a head
        scores_first = product32(q_first, read(k_ref, keys, pl.ds(0, half)).T)
        scores_second = product32(q_second, read(k_ref, keys, pl.ds(half, half)).T)
        scores = scores_first + scores_second
        values = read(v_ref, keys, slice(None))
        scores = masked(scores * LOG2E, mask)

        def weigh_values(weights: jax.Array) -> jax.Array:
            return product32(weights.astype(values.dtype), values)

        return softmax.add_block(running, scores, weigh_values, jnp.exp2)

    def num_blocks(num_keys: jax.Array) -> jax.Array:
        return jax.lax.div(num_keys + block - 1, block)

    def read_prefix(cache: Any, keys: Any, dimensions: Any) -> jax.Array:
        return cache[row, head, keys, dimensions]

    num_prefix = prefix_len[row]
    add_prefix = partial(add, prefix_k, prefix_v, read_prefix, num_prefix, None)
    running = jax.lax.fori_loop(0, num_blocks(num_prefix), add_prefix, running)

    def add_slot(number: jax.Array, running: RunningSoftmax) -> RunningSoftmax:
        """Adds the own keys of the slot with this number in the program."""
        slot = part * slots + number
        num_own = position_ref[row, slot]
        is_reader = (within == number)[:, None]

        def read_own(cache: Any, keys: Any, dimensions: Any) -> jax.Array:
            return cache[row, slot, head, keys, dimensions]

        add_own = partial(add, own_k, own_v, read_own, num_own, is_reader)
        return jax.lax.fori_loop(0, num_blocks(num_own), add_own, running)

    running = jax.lax.fori_loop(0, slots, add_slot, running)
    out = softmax.attention_of(running)
    out_ref[row, slot, head * share + query] = out.astype(out_ref.dtype)
