"""The `AttentionFn`s of training, scoring and prefill, where completions share their prompt's keys, and which kind of
attention computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.mesh import Role
from shoal.model.attention import Keys, attend
from shoal.model.blocked_attention import KeyValues, attend_by_blocks, block_size
from shoal.model.transformer import AttentionFn, Model
from shoal.types import ShoalError

SCORE_BYTES = {"cpu": 2**22, "gpu": 2**31, "tpu": 2**31}
"""Scores on a device above which `model.attention=auto` computes them by blocks: of a layer, since the backward pass
computes them again, or of all where `model.remat=none` keeps them. On CPU scores that leave the cache cost more than
blocks do (docs/LOG.md)."""

SPLASH_TOKENS = 512
"""Tokens of a row from which `auto` takes splash on TPU: below, a row is one or two of its blocks."""

MOST_SPLASH_TOKENS = 2**16
"""Splash knows places in a row by 16 bits."""


def attention_kind(model: Model, rows: int, prefix: int, slots: int, size: int) -> str:
    """How attention is computed for rows of a prompt and slots of these sizes: `model.attention`; for `auto` by device
    and shape."""
    kind, tokens = model.attention, prefix + slots * size
    if kind == "splash" and (reason := _splash_refusal(model, tokens)):
        instead = attention_kind(replace(model, attention="auto"), rows, prefix, slots, size)
        raise ShoalError(f"model.attention=splash: {reason}; model.attention=auto uses {instead} here")
    if kind != "auto":
        return kind
    if tokens >= SPLASH_TOKENS and not _splash_refusal(model, tokens):
        return "splash"
    layers = model.architecture.num_layers if model.remat == "none" else 1
    scores = rows * (prefix**2 + slots * size * (prefix + size)) * model.architecture.num_heads * layers
    on_device = 4 * scores // (model.role.row_shards * model.role.tensor)
    return "blocked" if on_device > SCORE_BYTES[model.role.platform] else "reference"


def _splash_refusal(model: Model, tokens: int) -> str:
    """Why splash attention cannot compute a model's rows of so many tokens; empty if it can."""
    if model.role.platform != "tpu":
        return f"splash attention is for TPUs, and this is a {model.role.platform.upper()}"
    if model.architecture.head_dim % 64:
        return f"splash attention needs heads of a multiple of 64, and the model's head_dim is " \
               f"{model.architecture.head_dim}"
    if tokens >= MOST_SPLASH_TOKENS:
        return f"a row has {tokens:,} tokens, and at most {MOST_SPLASH_TOKENS - 1:,} are supported"
    return ""


def shared_prefix_attention(model: Model, prefix_size: int, prefix_len: jax.Array, segment: jax.Array) -> AttentionFn:
    """Of rows [prefix | slots] of T = Tp + S*C tokens.

    A prompt token attends to the prompt up to itself; a completion token to the prompt and to the tokens of its own
    segment up to itself. `prefix_len[R]`, `segment[R, S, C]`.
    """
    over_rows = _over_rows(model, prefix_size, prefix_len, segment)
    return lambda q, k, v, cache: (over_rows(q, k, v), None)


def prefill_attention(model: Model, prefix_len: jax.Array, size: int) -> AttentionFn:
    """Prompts [R, T] attend to themselves; their keys and values are the new cache."""
    over_rows = _over_rows(model, size, prefix_len, jnp.zeros((len(prefix_len), 0, 0), jnp.int32))
    return lambda q, k, v, cache: (over_rows(q, k, v), (k, v))


def _over_rows(model: Model, prefix_size: int, prefix_len: jax.Array, segment: jax.Array) -> Callable:
    """Attention of whole rows: q[R, T, H, A], k and v[R, T, K, A] -> [R, T, H, A]."""
    rows, slots, size = segment.shape
    kind = attention_kind(model, rows, prefix_size, slots, size)
    if kind == "reference":
        return _by_parts(_reference(prefix_size, prefix_len, segment), prefix_size, slots, size)
    if kind == "splash":
        from shoal.model.splash_attention import attend_rows  # Pallas takes a second to import

        return _on_each_device(model.role, attend_rows, prefix_len, segment)
    return _on_each_device(model.role, partial(_blocked, model.role.platform), prefix_len, segment)


def _on_each_device(role: Role, attention: Callable, prefix_len: jax.Array, segment: jax.Array) -> Callable:
    """Each device computes its own rows and heads: the partitioner cannot split a kernel, nor skip by device."""
    if role.mesh.size == 1:
        return lambda q, k, v: attention(q, k, v, prefix_len, segment)
    rows = role.row_axes or None
    heads, row = PartitionSpec(rows, None, "tensor"), PartitionSpec(rows)
    local = jax.shard_map(attention, mesh=role.mesh, in_specs=(heads, heads, heads, row, row), out_specs=heads,
                          axis_names={*role.row_axes, "tensor"}, check_vma=False)
    return lambda q, k, v: local(q, k, v, prefix_len, segment)


def _by_parts(attention: tuple[Callable, Callable], prefix: int, slots: int, size: int) -> Callable:
    """Rows [prompt | slots] by two functions: the prompts' attention to themselves, and the slots' to both."""
    over_prompt, over_both = attention

    def over_rows(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def own(x: jax.Array) -> jax.Array:
            return x[:, prefix:].reshape(len(x), slots, size, *x.shape[2:])

        # The prompt attends to itself once for all S slots: here (S-1)/S of its cost is saved, in the gradient too.
        prompt = over_prompt(*(x[:, :prefix] for x in (q, k, v)))
        if not slots:
            return prompt
        slot = over_both(own(q), KeyValues(k[:, :prefix], v[:, :prefix]), KeyValues(own(k), own(v)))
        return jnp.concatenate([prompt, slot.reshape(len(q), slots * size, *slot.shape[3:])], axis=1)

    return over_rows


def _reference(prefix_size: int, prefix_len: jax.Array, segment: jax.Array) -> tuple[Callable, Callable]:
    visible = jnp.arange(prefix_size) < prefix_len[:, None]
    of_prompt = (visible[:, None, :] & jnp.tri(prefix_size, dtype=bool))[:, None]
    same = segment[..., None] == segment[..., None, :]
    of_own = same & jnp.tri(segment.shape[-1], dtype=bool) & (segment > 0)[..., None]

    def over_prompt(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q[:, None], None, Keys(k[:, None], v[:, None], of_prompt))[:, 0]

    def over_both(q: jax.Array, prefix: KeyValues, own: KeyValues) -> jax.Array:
        return attend(q, Keys(prefix.k, prefix.v, visible), Keys(own.k, own.v, of_own))

    return over_prompt, over_both


def _blocked(platform: str, q: jax.Array, k: jax.Array, v: jax.Array, prefix_len: jax.Array,
             segment: jax.Array) -> jax.Array:
    _, slots, size = segment.shape
    prefix_size = q.shape[1] - slots * size

    def of_rows(q: jax.Array, k: jax.Array, v: jax.Array, prefix_len: jax.Array, segment: jax.Array) -> jax.Array:
        real = (jnp.arange(prefix_size) < prefix_len[:, None]).astype(jnp.int32)[:, None]

        def over_prompt(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend_by_blocks(q[:, None], None, KeyValues(k[:, None], v[:, None]), real,
                                    block_size(platform, 1, q.shape[-2]))[:, 0]

        def over_both(q: jax.Array, prefix: KeyValues, own: KeyValues) -> jax.Array:
            return attend_by_blocks(q, (prefix, prefix_len), own, segment, block_size(platform, slots, q.shape[-2]))

        return _by_parts((over_prompt, over_both), prefix_size, slots, size)(q, k, v)

    if platform != "cpu":
        return of_rows(q, k, v, prefix_len, segment)
    # Row by row, blocks fit the cache, and are skipped by one row's segments (four rows of 512 tokens: 78 -> 49 ms).
    return jax.lax.map(lambda row: of_rows(*(x[None] for x in row))[0], (q, k, v, prefix_len, segment))
