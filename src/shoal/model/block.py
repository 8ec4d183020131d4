"""One layer of the model: attention and feed-forward with their norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shoal.model.compiler_habits import Habits, gated, habits_of, split_product
from shoal.model.linear import Cast, broadcast, linear
from shoal.model.parameters import Block

if TYPE_CHECKING:
    from shoal.model.transformer import Model


AttentionFn = Callable[..., tuple[jax.Array, Any]]
"""(q[R, T, H, A], k[R, T, K, A], v[R, T, K, A], cache of the layer) -> (out[R, T, H, A], new
cache). An AttentionFn with a true attribute `rotates` rotates q and k itself: it gets both without
rotary positions, and as `rope` what `rotary` returns."""


def block(
    model: Model,
    w: Block,
    x: jax.Array,
    *,
    rope: tuple[jax.Array, jax.Array],
    attention: AttentionFn,
    cache: Any,
) -> tuple[jax.Array, Any]:
    """Computes one layer with the weights `w`: x[R, T, D] -> (x[R, T, D], new cache). `rope` are
    the (cos, sin) of `rotary`; `cache` is passed to `attention`, and what that returns as the new
    cache is returned. A layer with a cache is compiled as one that decodes (`habits_of`). If the
    model has fewer key/value heads than `model.key_heads`, k and v are repeated before `attention`
    gets them."""
    a = model.architecture
    habits = habits_of(model, is_decoding=cache is not None)
    kept = partial(checkpoint_name, name="attention")
    x = checkpoint_name(x, "input")
    h = habits.normed(rms_norm(x, w.attention_norm, a.norm_eps))
    q, k, v = _heads(model, w, h, habits)
    if a.qk_norm:
        q = rms_norm(q, w.q_norm, a.norm_eps)
        k = rms_norm(k, w.k_norm, a.norm_eps)
    if getattr(attention, "rotates", False):
        attention = partial(attention, rope=rope)
    else:
        cos, sin = rope
        q = habits.rotate(q, cos, sin)
        k = habits.rotate(k, cos, sin)
    # above 1 if `tensor` has more devices than the model has key/value heads
    repeats = model.key_heads // a.num_kv_heads
    if repeats > 1:
        k = model.role.constrain(jnp.repeat(k, repeats, axis=-2), "rows", None, "heads", None)
        v = model.role.constrain(jnp.repeat(v, repeats, axis=-2), "rows", None, "heads", None)
    out: Any
    out, cache = attention(kept(q), kept(k), kept(v), cache)
    x = kept(x + linear(w.o, jax.lax.collapse(out, out.ndim - 2)))
    h = habits.normed(rms_norm(x, w.mlp_norm, a.norm_eps))
    x = x + _feed_forward(model, w, h, habits)
    return model.role.constrain(x, "rows", None, None), cache


def _heads(
    model: Model, w: Block, h: jax.Array, habits: Habits
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes q[R, T, H, A], k[R, T, K, A] and v[R, T, K, A] from h[R, T, D], without rotary
    positions and norms of q and k."""
    if w.k is None:  # the three weights are joined in one (`products_joined`)
        return split_product(model, linear(w.q, h))

    rows, size, _ = h.shape

    def by_head(product: jax.Array) -> jax.Array:
        return product.reshape(rows, size, -1, model.architecture.head_dim)

    q = linear(w.q, h)
    k = linear(w.k, h)
    v = linear(w.v, h)
    return by_head(habits.queries(q)), by_head(k), by_head(v)


def _feed_forward(model: Model, w: Block, h: jax.Array, habits: Habits) -> jax.Array:
    """Computes the gated feed-forward part, [R, T, D] -> [R, T, D]: down of silu(gate h) * (up h),
    without its norm and without the sum with x."""
    if not isinstance(w.down, tuple):
        return habits.gated_product(model, linear(w.gate, h), linear(w.up, h), w.down)
    # The matrices are split into chunks, each of which gives a term of the sum.
    total: Any = None
    for gate, up, down in zip(w.gate, w.up, w.down, strict=True):
        inner = habits.inner_of_chunk(gated(model, linear(gate, h), linear(up, h)))
        part = linear(down, inner, jnp.float32)
        total = part if total is None else total + part
    return total.astype(h.dtype)


def cast_weight(
    model: Model, weight: jax.Array, axes: tuple[str | None, ...], trained: bool = True
) -> jax.Array | Cast:
    """Returns a product's weight in the form that a layer reads. `axes` are its logical axes.

    A trained weight whose type is not the computation's becomes a `Cast`: a copy in that type,
    gathered along `embed`, with the stored weight as the master that gets the gradient. A frozen
    weight (`trained` is False) is gathered in its stored type. A trained weight that has the
    computation's type already is returned as it is.
    """
    whole = tuple(None if axis == "embed" else axis for axis in axes)

    def gathered(kernel: jax.Array) -> jax.Array:
        # Split as the master is, then gathered: with the second alone XLA may gather the master,
        # twice the bytes.
        split = model.role.constrain(kernel, *axes)
        return model.role.constrain(split, *whole)

    if not trained:  # gathered in the bytes that are stored
        return gathered(weight)
    if weight.dtype == model.dtype:
        return weight
    kernel = gathered(jax.lax.stop_gradient(weight).astype(model.dtype))
    return Cast(kernel, weight, model.reduce_dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension; mean and division are in
    float32. The quotient is rounded to x's type, which the result has, before the weight multiplies
    it."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    # Rounded before the weight, as transformers' LlamaRMSNorm does: parity in bfloat16 needs the
    # same order.
    return broadcast(weight, x) * wide.astype(x.dtype)
