"""The `AttentionFn`s of training, scoring and prefill, where completions share their prompt's keys, and which kind of
attention computes them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shoal.model.attention import Keys, attend
from shoal.model.blocked_attention import KeyValues, attend_by_blocks
from shoal.model.transformer import AttentionFn, Model

SCORE_BYTES = 2**31
"""Scores on a device above which `model.attention=auto` computes them by blocks: of a layer, since the backward pass
computes them again, or of all where `model.remat=none` keeps them."""


def attention_kind(model: Model, rows: int, prefix: int, slots: int, size: int) -> str:
    """`reference` or `blocked`, for rows of a prompt and slots of these sizes: `model.attention`, or by memory."""
    if model.attention != "auto":
        return model.attention
    layers = model.architecture.num_layers if model.remat == "none" else 1
    scores = rows * (prefix**2 + slots * size * (prefix + size)) * model.architecture.num_heads * layers
    return "blocked" if 4 * scores // (model.role.row_shards * model.role.tensor) > SCORE_BYTES else "reference"


def shared_prefix_attention(model: Model, prefix_size: int, prefix_len: jax.Array, segment: jax.Array) -> AttentionFn:
    """Of rows [prefix | slots] of T = Tp + S*C tokens.

    A prompt token attends to the prompt up to itself; a completion token to the prompt and to the tokens of its own
    segment up to itself. `prefix_len[R]`, `segment[R, S, C]`.
    """
    rows, slots, size = segment.shape
    kind = attention_kind(model, rows, prefix_size, slots, size)
    over_prompt = prompt_attention(kind, prefix_len, prefix_size)
    over_both = _over_both(kind, prefix_size, prefix_len, segment)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, cache: None) -> tuple[jax.Array, None]:
        def prefix(x: jax.Array) -> jax.Array:
            return x[:, :prefix_size]

        def own(x: jax.Array) -> jax.Array:
            return x[:, prefix_size:].reshape(rows, slots, size, *x.shape[2:])

        # The prompt attends to itself once for all S slots: here (S-1)/S of its cost is saved, in the gradient too.
        prompt = over_prompt(prefix(q), prefix(k), prefix(v))
        slot = over_both(own(q), KeyValues(prefix(k), prefix(v)), KeyValues(own(k), own(v)))
        return jnp.concatenate([prompt, slot.reshape(rows, slots * size, *slot.shape[3:])], axis=1), None

    return attention


def prefill_attention(model: Model, prefix_len: jax.Array, size: int) -> AttentionFn:
    """Prompts [R, T] attend to themselves; their keys and values are the new cache."""
    over_prompt = prompt_attention(attention_kind(model, len(prefix_len), size, 0, 0), prefix_len, size)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array,
                  cache: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return over_prompt(q, k, v), (k, v)

    return attention


def prompt_attention(kind: str, prefix_len: jax.Array, size: int) -> Callable:
    """Causal attention of prompts [R, T] to themselves."""
    visible = jnp.arange(size) < prefix_len[:, None]
    if kind == "blocked":
        segment = visible.astype(jnp.int32)[:, None]

        def by_blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend_by_blocks(q[:, None], None, KeyValues(k[:, None], v[:, None]), segment)[:, 0]

        return by_blocks
    mask = (visible[:, None, :] & jnp.tri(size, dtype=bool))[:, None]

    def by_reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q[:, None], None, Keys(k[:, None], v[:, None], mask))[:, 0]

    return by_reference


def _over_both(kind: str, prefix_size: int, prefix_len: jax.Array, segment: jax.Array) -> Callable:
    """Attention of completions to their prompt and to themselves: (q, prompt's keys and values, their own) -> out."""
    if kind == "blocked":
        return lambda q, prefix, own: attend_by_blocks(q, (prefix, prefix_len), own, segment)
    visible = jnp.arange(prefix_size) < prefix_len[:, None]
    same = segment[..., None] == segment[..., None, :]
    mask = same & jnp.tri(segment.shape[-1], dtype=bool) & (segment > 0)[..., None]
    return lambda q, prefix, own: attend(q, Keys(prefix.k, prefix.v, visible), Keys(own.k, own.v, mask))
