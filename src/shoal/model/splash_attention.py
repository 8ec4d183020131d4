"""Attention on TPU by JAX's splash kernels: one call over a row's prompt and completions, in memory that grows with
tokens.

Splash computes which query reads which key from two numbers, a query's own and the key's place. What a completion may
read is one run of its row's keys beside the prompt, so both fit one number, and so one softmax serves both sets of keys
with the library's own backward pass. Blocks without any such pair are skipped, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from shoal.model.attention import segment_index

MOST_TOKENS = 2**16
"""Tokens of a row: the place of a query and of its segment's first token share 32 bits."""

LANES = 128

BLOCK = 512
"""Most queries, and keys, of a block."""


@dataclass(frozen=True)
class _Reads:
    """True where a query reads a key by their order; of the prompt's keys, by `prefix` in number, splash leaves out the
    padding by its segment ids."""

    prefix: int

    def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
        place, first = query & (MOST_TOKENS - 1), jax.lax.shift_right_logical(query, 16)
        return (key <= place) & ((key < self.prefix) | (key >= first))


def attend_rows(q: jax.Array, k: jax.Array, v: jax.Array, prefix_len: jax.Array, segment: jax.Array,
                interpret: bool = False) -> jax.Array:
    """Softmax attention of rows [prompt | slots]: q[R, T, H, A], k and v[R, T, K, A] -> [R, T, H, A].

    A token reads its prompt (`prefix_len[R]` tokens) and its own segment (`segment[R, S, C]`), both up to itself;
    padding reads nothing and gives 0. T is the prompt's size and S x C. Scores and sums are float32.
    """
    rows, total, _, head_dim = q.shape
    prefix = total - segment[0].size
    block = next(size for size in (BLOCK, 2 * LANES, LANES) if total > 2 * size or size == LANES)
    padded = -(-total // block) * block
    place = jnp.arange(padded)
    own = (place[prefix:total].reshape(segment.shape[1:]) - segment_index(segment)).reshape(rows, -1)
    own = jnp.where(segment.reshape(rows, -1) > 0, own, padded)  # the first token of a token's segment, if any
    first = jnp.pad(own, ((0, 0), (prefix, padded - total)), constant_values=padded)
    is_real = jnp.where(place < prefix, place < prefix_len[:, None], first < padded)
    first = jnp.minimum(first, place + 1)  # none of its own
    is_needed = _needed(first, is_real, prefix, block)

    def by_head(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, padded - total), (0, 0), (0, 0))).swapaxes(1, 2)

    def of_row(q: jax.Array, k: jax.Array, v: jax.Array, is_needed: jax.Array, query: jax.Array,
               is_real: jax.Array) -> jax.Array:
        forward, backward = (_mask_info(is_needed, query, axis) for axis in (-1, -2))
        kernel = splash.SplashAttentionKernel(
            forward, forward, backward, is_mqa=False, save_residuals=False, mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None, residual_checkpoint_name="kernel", mask_function=_Reads(prefix),
            block_sizes=_block_sizes(block), interpret=interpret)
        out: Any = kernel(q, k, v, splash.SegmentIds(jnp.ones_like(is_real, jnp.int32), is_real.astype(jnp.int32)))
        return out

    q = q * jnp.asarray(head_dim**-0.5, q.dtype)
    out = jax.vmap(of_row)(by_head(q), by_head(k), by_head(v), is_needed, first << 16 | place, is_real)
    # Padding has averaged what it must not read.
    return jnp.where(is_real[:, :total, None, None], out.swapaxes(1, 2)[:, :total], 0)


def _needed(first: jax.Array, is_real: jax.Array, prefix: int, block: int) -> jax.Array:
    """True for each pair of blocks [R, queries, keys] in which a query that is no padding reads a key."""
    rows = len(first)
    first, real = first.reshape(rows, -1, block), is_real.reshape(rows, -1, block)
    key = jnp.arange(first.shape[1])
    query = key[:, None]
    of_prompt = (real & (key[:, None] * block + jnp.arange(block) < prefix)).any(-1)[:, None] & real.any(-1)[..., None]
    of_own = key >= first.min(-1)[..., None] // block
    # The diagonal always: a block of queries without any block of keys would divide by a sum of 0.
    return (of_prompt | of_own | (key == query)) & (key <= query)


def _block_sizes(block: int) -> splash.BlockSizes:
    return splash.BlockSizes(block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block,
                             block_kv_dq=block)


def _mask_info(is_needed: jax.Array, query: jax.Array, axis: int) -> MaskInfo:
    """Splash's account of blocks[queries, keys], walked along `axis`: where one is skipped, the last that was read
    stays, so that nothing is read for it."""
    place: Any = query  # splash's own annotation is of NumPy arrays, of its static masks
    number = jax.lax.broadcasted_iota(jnp.int32, is_needed.shape, is_needed.ndim + axis)
    last = jax.lax.cummax(jnp.where(is_needed, number, 0), axis=is_needed.ndim + axis)
    return MaskInfo(data_next=last[None], mask_next=None, block_mask=is_needed.astype(jnp.int32)[None],
                    partial_mask_blocks=None, q_sequence=place)
