"""One layer of the model: attention and feed-forward with their norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shoal.model.linear import Cast, Weight, broadcast, linear
from shoal.model.parameters import Block
from shoal.model.rotary import rotate, rotate_by_product

if TYPE_CHECKING:
    from shoal.model.transformer import Model


AttentionFn = Callable[..., tuple[jax.Array, Any]]
"""(q[R, T, H, A], k[R, T, K, A], v[R, T, K, A], cache of the layer) -> (out[R, T, H, A], cache).
One with `rotates` is given q and k without rotary positions, and `rope`, what `rotary` gives."""


def block(
    model: Model,
    w: Block,
    x: jax.Array,
    *,
    rope: tuple[jax.Array, jax.Array],
    attention: AttentionFn,
    cache: Any,
) -> tuple[jax.Array, Any]:
    """One layer: x[R, T, D] -> (x[R, T, D], cache)."""
    a = model.architecture
    constrain = model.role.constrain
    kept = partial(checkpoint_name, name="attention")
    # Decoding has few rows, whose elementwise operations are better done within the products.
    is_tpu = model.role.platform == "tpu" and cache is None
    apart = _gradient_barrier if is_tpu else lambda x: x
    x = checkpoint_name(x, "input")
    h = apart(rms_norm(x, w.attention_norm, a.norm_eps))
    if w.k is None:
        heads = linear(w.q, h)
        q, k, v = jnp.split(
            heads.reshape(*heads.shape[:-1], -1, a.head_dim),
            (a.num_heads, a.num_heads + a.num_kv_heads),
            axis=-2,
        )
    else:
        q = linear(w.q, h)
        k = linear(w.k, h)
        v = linear(w.v, h)
        if cache is not None or (is_tpu and model.role.name == "sampler"):
            # Else XLA for TPU makes the heads of q inside the product, for which it copies the
            # weight in another order.
            q = jax.lax.optimization_barrier(q)
        q = q.reshape(*q.shape[:-1], -1, a.head_dim)
        k = k.reshape(*k.shape[:-1], -1, a.head_dim)
        v = v.reshape(*v.shape[:-1], -1, a.head_dim)
    if a.qk_norm:
        q = rms_norm(q, w.q_norm, a.norm_eps)
        k = rms_norm(k, w.k_norm, a.norm_eps)
    if getattr(attention, "rotates", False):
        attention = partial(attention, rope=rope)
    else:
        cos, sin = rope
        rotate_heads = rotate_by_product if is_tpu else rotate
        q = rotate_heads(q, cos, sin)
        k = rotate_heads(k, cos, sin)
    repeats = model.key_heads // a.num_kv_heads
    if repeats > 1:
        k = constrain(jnp.repeat(k, repeats, axis=-2), "rows", None, "heads", None)
        v = constrain(jnp.repeat(v, repeats, axis=-2), "rows", None, "heads", None)
    out: Any
    out, cache = attention(kept(q), kept(k), kept(v), cache)
    x = kept(x + linear(w.o, out.reshape(*out.shape[:-2], -1)))
    h = apart(rms_norm(x, w.mlp_norm, a.norm_eps))
    if isinstance(w.down, tuple):  # pieces, each of which gives a part of the sum
        parts = []
        for gate, up, down in zip(w.gate, w.up, w.down, strict=True):
            inner = _gated(model, linear(gate, h), linear(up, h))
            if is_tpu:
                inner = jax.lax.optimization_barrier(inner)
            parts.append(linear(down, inner, jnp.float32))
        out = sum(parts[1:], parts[0]).astype(x.dtype)
    elif is_tpu:
        out = gated_product(model, linear(w.gate, h), linear(w.up, h), w.down)
    else:
        out = linear(w.down, _gated(model, linear(w.gate, h), linear(w.up, h)))
    return constrain(x + out, "rows", None, None), cache


@jax.custom_vjp
def _gradient_barrier(x: jax.Array) -> jax.Array:
    """x, whose gradient is an array of its own: fused with the products that give it, a norm's
    backward pass halves their rate."""
    return x


_gradient_barrier.defvjp(
    lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),)
)


def _gated(model: Model, gate: jax.Array, up: jax.Array) -> jax.Array:
    return model.role.constrain(jax.nn.silu(gate) * up, "rows", None, "mlp")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_product(model: Model, gate: jax.Array, up: jax.Array, down: Weight) -> jax.Array:
    """The product of `_gated` with down, for TPU: XLA would compute silu and its gradient within
    products, for each of their blocks again."""
    return linear(down, jax.lax.optimization_barrier(_gated(model, gate, up)))


def _gated_product_backward(model: Model, kept: tuple, gradient: jax.Array) -> tuple:
    gate, up, down = kept
    h, of_gated = jax.vjp(partial(_gated, model), *jax.lax.optimization_barrier((gate, up)))
    of_down, of_h = jax.vjp(linear, down, jax.lax.optimization_barrier(h))[1](gradient)
    return *jax.lax.optimization_barrier(of_gated(jax.lax.optimization_barrier(of_h))), of_down


gated_product.defvjp(
    lambda model, *inputs: (gated_product(model, *inputs), inputs), _gated_product_backward
)


def cast_weight(
    model: Model, weight: jax.Array, axes: tuple[str | None, ...], trained: bool = True
) -> jax.Array | Cast:
    """A kernel in the type of the computation, with its master; vectors, what has that type and
    what is frozen stay as they are."""
    whole = tuple(None if axis == "embed" else axis for axis in axes)
    if not trained and weight.ndim > 1:  # gathered in the bytes that are stored
        return model.role.constrain(model.role.constrain(weight, *axes), *whole)
    if weight.ndim == 1 or weight.dtype == model.dtype:
        return weight
    # Split as the master is, then gathered: with the second alone XLA may gather the master, twice
    # the bytes.
    kernel = model.role.constrain(jax.lax.stop_gradient(weight).astype(model.dtype), *axes)
    return Cast(model.role.constrain(kernel, *whole), weight, model.reduce_dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; mean and division in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    # Rounded before the weight, as transformers' LlamaRMSNorm does: parity in bfloat16 needs the
    # same order.
    return broadcast(weight, x) * wide.astype(x.dtype)
