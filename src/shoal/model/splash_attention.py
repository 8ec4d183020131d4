"""Attention of rows of several sequences on TPU by JAX's splash kernels: one call, in memory that grows with tokens.

Splash computes which query reads which key from one number of the query and the key's position, and from segment ids
that must be equal. A row's keys are therefore given twice: first its prompts', then its completions', and the ids are
those of the group. Of the second half a query reads one run of keys, from the first token of its segment to its own
position: both fit one number. One softmax serves both halves, with the library's own backward pass. Blocks without any
such pair are skipped, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from shoal.model.attention import MOST_SPLASH_TOKENS, segment_index
from shoal.model.blocked_attention import needed_blocks

LANES = 128

BLOCK = 512
"""Most queries, and keys, of a block."""


class RowMasks(NamedTuple):
    """What the tokens of rows [R, T] read, T rounded up to whole blocks."""

    segment: jax.Array  # int32[R, T]
    query: jax.Array  # int32[R, T]: the first token of its segment, and its position
    group: jax.Array  # int32[R, T]: of queries; the number of the prompt
    groups: jax.Array  # int32[R, 2T]: of keys, those of prompts and those of completions; -1 where it is not one
    is_needed: jax.Array  # bool[R, n, 2n]: pairs of blocks in which a query may read a key


@dataclass(frozen=True)
class _Reads:
    """True where a query reads a key by their places. Every query of a prompt's keys up to itself: which are the
    prompt's, segment ids say."""

    size: int

    def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
        position, first = query & (MOST_SPLASH_TOKENS - 1), jax.lax.shift_right_logical(query, 16)
        own = key - self.size
        return (own <= position) & ((key < self.size) & (key <= position) | (own >= first))


def row_masks(segment: jax.Array, prompt: jax.Array) -> RowMasks:
    """Of rows segment[R, T], prompt[R, T]."""
    size = segment.shape[1]
    block = block_size(size)
    segment, prompt = (jnp.pad(x, ((0, 0), (0, -size % block))) for x in (segment, prompt))
    position = jnp.arange(segment.shape[1])
    is_prompt = (segment == prompt) & (segment > 0)
    first = position - segment_index(segment)
    groups = jnp.concatenate([jnp.where(is_prompt, prompt, -1), jnp.where(is_prompt | (segment == 0), -1, prompt)], 1)
    # Of completions alone: a prompt's tokens are the first half's.
    completion = jnp.where(is_prompt, 0, segment)
    of_prompts = needed_blocks(prompt, prompt, block, jnp.where(is_prompt, prompt, 0))
    of_own = needed_blocks(completion, completion, block)
    # The diagonal always: a block of queries without any block of keys would divide by a sum of 0.
    of_prompts |= jnp.eye(of_prompts.shape[-1], dtype=bool)
    return RowMasks(segment, first << 16 | position, prompt, groups, jnp.concatenate([of_prompts, of_own], -1))


def attend_rows(q: jax.Array, k: jax.Array, v: jax.Array, masks: RowMasks, interpret: bool = False) -> jax.Array:
    """Softmax attention of q[R, T, H, A] to k, v[R, T, K, A] -> [R, T, H, A]; padding gives 0. Scores and sums are
    float32."""
    size, head_dim = q.shape[1], q.shape[-1]
    padded, block = masks.segment.shape[1], block_size(size)

    def by_head(x: jax.Array, times: int) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padded - size), (0, 0), (0, 0))).swapaxes(1, 2)
        return jnp.concatenate([x] * times, 2)

    def of_row(q: jax.Array, k: jax.Array, v: jax.Array, masks: RowMasks) -> jax.Array:
        sizes: Any = dict.fromkeys(("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
                                    "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"), block)
        forward, backward = (_mask_info(masks.is_needed, masks.query, axis) for axis in (-1, -2))
        kernel: Any = splash.SplashAttentionKernel(
            forward, forward, backward, is_mqa=False, save_residuals=False, mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None, residual_checkpoint_name="kernel", mask_function=_Reads(padded),
            block_sizes=splash.BlockSizes(**sizes), interpret=interpret)
        return kernel(q, k, v, splash.SegmentIds(masks.group, masks.groups))

    q = q * jnp.asarray(head_dim**-0.5, q.dtype)
    out = jax.vmap(of_row)(by_head(q, 1), by_head(k, 2), by_head(v, 2), masks)
    # Padding has averaged what it must not read.
    return jnp.where((masks.segment > 0)[:, :size, None, None], out.swapaxes(1, 2)[:, :size], 0)


def block_size(size: int) -> int:
    """Tokens of a block of rows of `size` tokens, which are rounded up to whole ones."""
    return next(block for block in (BLOCK, 2 * LANES, LANES) if size > 2 * block or block == LANES)


def _mask_info(is_needed: jax.Array, query: jax.Array, axis: int) -> MaskInfo:
    """Splash's account of blocks[queries, keys], walked along `axis`: where one is skipped, the last that was read
    stays, so that nothing is read for it."""
    number = jax.lax.broadcasted_iota(jnp.int32, is_needed.shape, is_needed.ndim + axis)
    last = jax.lax.cummax(jnp.where(is_needed, number, 0), axis=is_needed.ndim + axis)
    info: Any = MaskInfo  # whose types are those of a mask known before compilation
    return info(data_next=last[None], mask_next=None, block_mask=is_needed.astype(jnp.int32)[None],
                partial_mask_blocks=None, q_sequence=query)
