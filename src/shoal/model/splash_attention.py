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

from shoal.model.attention import MOST_SPLASH_TOKENS, Tokens, segment_index
from shoal.model.blocked_attention import needed_blocks

LANES = 128

BLOCK = 512
"""Most queries, and keys, of a block."""


class RowMasks(NamedTuple):
    """What queries [R, T] read of keys [R, S], both rounded up to whole blocks; in whole rows S is T."""

    segment: jax.Array  # int32[R, T]
    query: jax.Array  # int32[R, T]: the first token of its segment, and its position
    group: jax.Array  # int32[R, T]: of queries; the number of the prompt
    groups: jax.Array  # int32[R, 2S]: of keys, those of prompts and those of completions; -1 where it is not one
    is_needed: jax.Array  # bool[R, n, 2m]: pairs of blocks in which a query may read a key


@dataclass(frozen=True)
class _Reads:
    """True where a query reads a key by their places. Every query of a prompt's keys up to itself: which are the
    prompt's, segment ids say."""

    size: int

    def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
        position, first = query & (MOST_SPLASH_TOKENS - 1), jax.lax.shift_right_logical(query, 16)
        own = key - self.size
        return (own <= position) & ((key < self.size) & (key <= position) | (own >= first))


def row_masks(query: Tokens, key: Tokens) -> RowMasks:
    """Of rows' queries, or a part of each row's, and of all their keys."""
    block = block_size(query.segment.shape[1])
    first = key.position - segment_index(key.segment)
    first = jnp.take_along_axis(first, query.position, 1)
    query, key, (first, *_) = (Tokens(*(jnp.pad(x, ((0, 0), (0, -x.shape[1] % block))) for x in tokens))
                               for tokens in (query, key, Tokens(first, first, first)))
    of_prompt, of_completion = ((key.segment > 0) & x for x in (key.segment == key.prompt, key.segment != key.prompt))
    groups = jnp.concatenate([jnp.where(one, key.prompt, -1) for one in (of_prompt, of_completion)], 1)
    # Of completions alone: a prompt's tokens are the first half's.
    completion = jnp.where(query.segment == query.prompt, 0, query.segment)
    of_prompts = needed_blocks(query._replace(segment=query.prompt),
                               key._replace(segment=jnp.where(of_prompt, key.prompt, 0)), block)
    of_own = needed_blocks(query._replace(segment=completion, prompt=completion),
                           key._replace(segment=jnp.where(of_completion, key.segment, 0)), block)
    # The diagonal always: a block of queries without any block of keys would divide by a sum of 0.
    of_prompts |= (query.position[:, ::block] // block)[..., None] == jnp.arange(of_prompts.shape[-1])
    return RowMasks(query.segment, first << 16 | query.position, query.prompt, groups,
                    jnp.concatenate([of_prompts, of_own], -1))


def attend_rows(q: jax.Array, k: jax.Array, v: jax.Array, masks: RowMasks, interpret: bool = False) -> jax.Array:
    """Softmax attention of q[R, T, H, A] to k, v[R, S, K, A] -> [R, T, H, A]; padding gives 0. Scores and sums are
    float32."""
    size, head_dim = q.shape[1], q.shape[-1]
    num_keys, block = masks.groups.shape[1] // 2, block_size(size)

    def by_head(x: jax.Array, times: int) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0))).swapaxes(1, 2)
        return jnp.concatenate([x] * times, 2)

    def of_row(q: jax.Array, k: jax.Array, v: jax.Array, masks: RowMasks) -> jax.Array:
        sizes: Any = dict.fromkeys(("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
                                    "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"), block)
        forward, backward = (_mask_info(masks.is_needed, masks.query, axis) for axis in (-1, -2))
        kernel: Any = splash.SplashAttentionKernel(
            forward, forward, backward, is_mqa=False, save_residuals=False, mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None, residual_checkpoint_name="kernel", mask_function=_Reads(num_keys),
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
