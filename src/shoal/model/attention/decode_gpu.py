"""Attention of decoding by one kernel a layer on GPU, in Pallas for Triton.

It goes through the keys of a row's prompt, once for all of its slots, then through each slot's own:
no block is read beyond its row's length, and one softmax is gathered over all (Milakov and
Gimelshein 2018, arXiv 1805.02867). What a slot computes depends on no other, to the bit. A program
has one key head of some slots of a row; it also turns their queries and their new key by rotary
positions, and writes that key and its value into the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shoal.model.attention.softmax import LOG2E, LOWEST, product32

HEADS = (32, 64, 128, 256)
"""Dimensions of a head that the kernel takes: powers of two, whose halves it rotates."""


PROGRAMS = 256
"""Programs of a kernel that keep a GPU busy: where there are more, each takes more slots, and fewer
read a prompt."""


MOST_RESULTS = 64 * 128
"""Queries of a program times the dimensions of a head, of 16 bits: they stay in registers and
shared memory."""


def block_keys(head_dim: int, dtype: Any) -> int:
    """Keys of a block, whose sizes divide all caches."""
    return (64 if head_dim <= 128 else 32) // (2 if dtype == jnp.float32 else 1)


def slots_at_once(
    rows: int, siblings: int, heads: int, share: int, width: int, programs: int = PROGRAMS
) -> int:
    """Slots of a row that one program takes, of `share` query heads to a key head."""
    return next(
        slots
        for slots in range(siblings, 0, -1)
        if siblings % slots == 0
        and (
            slots == 1
            or (
                rows * heads * (siblings // slots) >= programs
                and slots * share * width <= MOST_RESULTS
            )
        )
    )


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
    """Attention of one token for each of [N, W] slots -> (out[N, W, H, A], own keys, own values).

    `heads`[N, W, H + 2 K, A] are queries, key and value as products gave them; cos and sin
    float32[N, W, A/2]. `keys` are a cache's: of prompts [N, K, Tp, A] twice, of which prefix_len[N]
    are read; of slots [N, W, K, C, A] twice, of which those before position[N, W], where the new
    ones are written, in place. A is a power of two from 32 on; Tp and C are multiples of 64. Scores
    and sums are float32.
    """
    rows, siblings, key_heads, size, width = keys[2].shape
    num_heads = heads.shape[2] - 2 * key_heads
    slots = slots_at_once(
        rows,
        siblings,
        key_heads,
        num_heads // key_heads,
        width * heads.dtype.itemsize // 2,
        programs,
    )
    out = jax.ShapeDtypeStruct((rows, siblings, num_heads, width), heads.dtype)
    read = rows * siblings * num_heads * (keys[0].shape[2] + size)
    results = pl.pallas_call(
        partial(_kernel, slots, block_keys(width, heads.dtype)),
        [out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in keys[2:])],
        grid=(rows, siblings // slots, key_heads),
        interpret=interpret,
        name="decode_kernel",
        input_output_aliases={5: 1, 6: 2},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        # If every key were read.
        cost_estimate=pl.CostEstimate(
            flops=4 * read * width, transcendentals=read, bytes_accessed=0
        ),
    )(heads, cos, sin, *keys, prefix_len, position)
    return tuple(results)


def add_block(
    scores: jax.Array, mask: jax.Array, values: jax.Array, carry: tuple, product: Callable
) -> tuple:
    """Adds a block of keys to the maxima and sums [.., M, 1] and outputs [.., M, A] of queries,
    from their products with it [.., M, T]. What is masked changes no bit of a query that has a
    key."""
    top, total, out = carry
    scores = jnp.where(mask, scores * LOG2E, LOWEST)
    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
    shrink, p = jnp.exp2(top - new_top), jnp.exp2(scores - new_top)  # 0 where masked
    return (
        new_top,
        total * shrink + p.sum(-1, keepdims=True),
        out * shrink + product(p.astype(values.dtype), values),
    )


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
    row, part, head = (pl.program_id(axis) for axis in range(3))
    key_heads, width, num_heads = prefix_k.shape[1], heads_ref.shape[3], out_ref.shape[2]
    share, half = num_heads // key_heads, heads_ref.shape[3] // 2
    # Triton's arrays have sizes of powers of two, and its products at least 16: what is beyond
    # repeats the last slot, and writes the same again.
    index = jnp.arange(max(16, pl.next_power_of_2(slots * share)), dtype=jnp.int32)
    within = jnp.minimum(jax.lax.div(index, share), slots - 1)
    slot, query = part * slots + within, jax.lax.rem(index, share)
    cos, sin, position = cos_ref[row, slot], sin_ref[row, slot], position_ref[row, slot]

    def turned(place: Any) -> tuple[jax.Array, jax.Array]:
        first, second = (
            heads_ref[row, slot, place, pl.ds(start, half)].astype(jnp.float32)
            for start in (0, half)
        )
        return tuple(
            x.astype(heads_ref.dtype)
            for x in (first * cos - second * sin, second * cos + first * sin)
        )

    scale = jnp.asarray(width**-0.5, heads_ref.dtype)
    q = tuple(x * scale for x in turned(head * share + query))
    k, v = (
        turned(num_heads + head + 0 * query),
        heads_ref[row, slot, num_heads + key_heads + head + 0 * query],
    )
    for ref, new, start in ((new_k, k[0], 0), (new_k, k[1], half), (new_v, v, 0)):
        ref[row, slot, head, position, pl.ds(start, new.shape[1])] = new
    # The slot's new key, as if it had been read first.
    first, second = (
        (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(1, keepdims=True)
        for a, b in zip(q, k, strict=True)
    )
    scores = (first + second) * LOG2E
    carry = scores, jnp.ones(scores.shape, jnp.float32), v.astype(jnp.float32)

    def add(
        k_ref: Any,
        v_ref: Any,
        place: tuple,
        mask_of: Callable[[jax.Array], jax.Array],
        turn: jax.Array,
        carry: tuple,
    ) -> tuple:
        at = *place, pl.ds(turn * block, block)
        mask = mask_of(turn * block + jnp.arange(block, dtype=jnp.int32)[None])
        first, second = (
            product32(part, k_ref[*at, pl.ds(start, half)].T)
            for part, start in zip(q, (0, half), strict=True)
        )
        return add_block(first + second, mask, v_ref[at], carry, product32)

    def blocks(count: jax.Array) -> jax.Array:
        return jax.lax.div(count + block - 1, block)

    length = prefix_len[row]
    carry = jax.lax.fori_loop(
        0,
        blocks(length),
        partial(add, prefix_k, prefix_v, (row, head), lambda key: key < length),
        carry,
    )

    def of_slot(number: jax.Array, carry: tuple) -> tuple:
        at = part * slots + number
        before, mine = position_ref[row, at], (within == number)[:, None]
        return jax.lax.fori_loop(
            0,
            blocks(before),
            partial(add, own_k, own_v, (row, at, head), lambda key: mine & (key < before)),
            carry,
        )

    _, total, out = jax.lax.fori_loop(0, slots, of_slot, carry)
    out_ref[row, slot, head * share + query] = (out / total).astype(out_ref.dtype)
