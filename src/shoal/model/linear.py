"""The one matrix product of the model. Kinds of weight (plain, biased, adapted, quantised, cast)
are distinguished here alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Biased:
    """A weight with a bias: `kernel[in, out]`, `bias[out]`."""

    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A frozen kernel[in, out] with a low-rank change: `x kernel + (x a) b * scale`, a[in, rank],
    b[rank, out]."""

    kernel: Any
    a: Any
    b: Any
    scale: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """A frozen kernel in one byte an element: `values[in, out] * scale[out]`, with one scale for
    each output channel. Each scale is a bfloat16 value, so that a computation in bfloat16 does not
    round it."""

    values: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cast:
    """A kernel cast to the type of the computation, and its master. The gradient goes to `master`
    (same shape, values never read) in the master's type, and is summed over devices in
    `reduce_dtype`.

    Autodiff alone would give the gradient the kernel's type: rounded to bfloat16 before every sum.
    """

    kernel: Any
    master: Any
    reduce_dtype: Any = field(default=jnp.float32, metadata={"static": True})


Weight: TypeAlias = "jax.Array | Biased | Adapted | Quantised | Cast"


QUANTISED = {"none": "", "int8": "int8", "fp8": "float8_e4m3fn"}
"""The type of quantised weights for each value of `model.quantise`."""


def linear(weight: Weight, x: jax.Array, out_dtype: Any = None) -> jax.Array:
    """Computes x[..., in] times a weight of any kind -> [..., out], with its bias and its adapter's
    change added if it has them. The weight is cast to x's type, unless it is a `Cast`, which was
    cast before; the result has x's type, or `out_dtype` if given."""
    product: jax.Array
    if isinstance(weight, Biased):
        product = linear(weight.kernel, x, out_dtype)
        return product + broadcast(weight.bias, product)
    if isinstance(weight, Adapted):
        product = adapted_product(weight.scale, out_dtype, x, weight.kernel, (weight.a, weight.b))
        return checkpoint_name(product, "product")
    if isinstance(weight, Quantised):
        # Without a barrier XLA for GPU widens the values of all layers at the start of a token,
        # because widening waits for nothing.
        values, x = jax.lax.optimization_barrier((weight.values, x))
        product = linear(values, x, out_dtype)
        return product * weight.scale.astype(product.dtype)
    # Flattened to two dimensions: on CPU the weight's gradient over several batch dimensions is a
    # fifth slower.
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Cast):
        product = cast_product(flat, weight.kernel, weight.master, out_dtype, weight.reduce_dtype)
    elif out_dtype in (None, x.dtype):
        product = jnp.matmul(flat, weight.astype(x.dtype))
    else:
        product = cast_product(flat, weight.astype(x.dtype), None, out_dtype, None)
    return product.reshape((*x.shape[:-1], -1))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cast_product(
    x: jax.Array, kernel: jax.Array, master: jax.Array | None, out_dtype: Any, reduce_dtype: Any
) -> jax.Array:
    """Computes x[..., T, in] times the kernel[..., in, out] of a `Cast`. The gradient goes to
    `master`; if that is None, to the kernel."""
    return jnp.matmul(x, kernel, preferred_element_type=out_dtype)


def _cast_product_forward(
    x: jax.Array, kernel: jax.Array, master: jax.Array | None, out_dtype: Any, reduce_dtype: Any
) -> tuple[jax.Array, Any]:
    # Not `cast_product` again: no policy of `jax.checkpoint` looks into a custom_vjp, so none would
    # keep the product.
    return jnp.matmul(x, kernel, preferred_element_type=out_dtype), (x, kernel)


def _cast_product_backward(
    out_dtype: Any, reduce_dtype: Any, kept: Any, gradient: jax.Array
) -> tuple:
    """Returns the gradients of (x, kernel, master). The weight's gradient is the master's, in
    float32, and the kernel's is None; without a master (`reduce_dtype` is None) it is the reverse,
    in the type of the product. With x[..., T, in] the result's gradient is [..., T, out], the
    weight's [..., in, out]. `out_dtype` is not read; it is here because custom_vjp passes all
    static arguments."""
    x, kernel = kept
    # The gradient is cast to x's type even if the product is float32 (logits): otherwise the whole
    # kernel would be converted for float32 products.
    gradient = gradient.astype(x.dtype)
    # The partitioner sums this product over devices, so the product's type is that of the
    # reduction.
    of_kernel = jnp.matmul(x.mT, gradient, preferred_element_type=reduce_dtype)
    of_x = jnp.matmul(gradient, kernel.mT)
    if reduce_dtype is None:  # without a master
        return of_x, of_kernel, None
    return of_x, None, of_kernel.astype(jnp.float32)


cast_product.defvjp(_cast_product_forward, _cast_product_backward)


def _adapted(
    scale: float, out_dtype: Any, x: jax.Array, kernel: Weight, pair: tuple[Weight, Weight]
) -> jax.Array:
    """Computes the product of a kernel with an adapter, without a rule of its own for the gradient:
    x kernel + (x a) b * scale, with `pair` = (a, b)."""
    # The adapter is never merged into the kernel, whose type would round an update's change away.
    a, b = pair
    product = linear(kernel, x, out_dtype)
    return product + linear(b, linear(a, x) * scale, out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def adapted_product(
    scale: float, out_dtype: Any, x: jax.Array, kernel: Weight, pair: tuple[Weight, Weight]
) -> jax.Array:
    """Computes x[..., in] kernel + (x a) b * scale -> [..., out], with `pair` = (a, b); the kernel
    is frozen and has no gradient.

    No policy of `jax.checkpoint` looks into a custom_vjp: the sum, named `product`, is kept in
    place of its terms, and the backward pass computes only x a again, which is little.
    """
    return _adapted(scale, out_dtype, x, kernel, pair)


def _adapted_product_forward(
    scale: float, out_dtype: Any, x: jax.Array, kernel: Weight, pair: tuple[Weight, Weight]
) -> tuple[jax.Array, Any]:
    return adapted_product(scale, out_dtype, x, kernel, pair), (x, kernel, pair)


def _adapted_product_backward(
    scale: float, out_dtype: Any, kept: Any, gradient: jax.Array
) -> tuple:
    """Returns the gradients of (x, kernel, the pair of the adapter's matrices); the kernel is
    frozen, and its gradient is None. `kept` are the arguments of the product."""
    x, kernel, pair = kept

    def of_trained(x: jax.Array, pair: tuple[Weight, Weight]) -> jax.Array:
        """Computes the product from the arguments that have a gradient."""
        return _adapted(scale, out_dtype, x, kernel, pair)

    _, backward = jax.vjp(of_trained, x, pair)
    of_x, (of_a, of_b) = backward(gradient)

    # The gradient is computed as [rank, in], which is four times as fast on CPU; without a barrier
    # XLA would exchange the product's factors again.
    def transposed_first(gradient: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(gradient.mT).mT

    return of_x, None, (jax.tree.map(transposed_first, of_a), of_b)


adapted_product.defvjp(_adapted_product_forward, _adapted_product_backward)


def quantise(kernel: jax.Array, dtype: Any) -> Quantised:
    """Quantises kernel[..., in, out] to `dtype`, int8 or a float of 8 bits: the nearest values,
    with one scale for each output channel, by which its largest value becomes at most the type's
    largest. The first dimensions, such as layers, stay; a channel of zeros gets scale 1."""
    wide = kernel.astype(jnp.float32)
    dtype = jnp.dtype(dtype)
    is_integer = dtype.kind == "i"
    limits = jnp.iinfo(dtype) if is_integer else jnp.finfo(dtype)
    largest_of_type = float(limits.max)
    scale = jnp.abs(wide).max(axis=-2) / largest_of_type  # [..., out]
    # The scale is rounded to bfloat16, the upper 16 bits of a float32, because a computation in
    # bfloat16 would round it anyway; and up, because no value may pass the type's largest.
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) + jnp.uint32(0xFFFF)
    bits = bits & jnp.uint32(0xFFFF0000)
    scale = jnp.where(scale > 0, jax.lax.bitcast_convert_type(bits, jnp.float32), 1.0)
    values = wide / scale[..., None, :]
    if is_integer:
        values = jnp.round(values)
    return Quantised(values.astype(dtype), scale)


def broadcast(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Returns a vector (a norm's weight or a bias) in the type of `like`, and in its shape if the
    vector is float32; its gradient is then summed in float32. A vector of another type keeps its
    shape."""
    if vector.dtype != jnp.float32:
        return vector.astype(like.dtype)
    return _broadcast(vector, like.shape, like.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _broadcast(vector: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.broadcast_to(vector.astype(dtype), shape)


def _broadcast_forward(
    vector: jax.Array, shape: tuple[int, ...], dtype: Any
) -> tuple[jax.Array, None]:
    return _broadcast(vector, shape, dtype), None


def _broadcast_backward(
    shape: tuple[int, ...], dtype: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    """Returns the gradient of the vector: the sum over all rows, in float32."""
    rows = gradient.reshape(-1, shape[-1])
    if dtype == jnp.float32:
        # A product: XLA's sum over rows on CPU has an eighth of its speed, an eighth of a small
        # model's update.
        return (jnp.matmul(jnp.ones(len(rows), dtype), rows, precision="highest"),)
    return (rows.astype(jnp.float32).sum(0),)


_broadcast.defvjp(_broadcast_forward, _broadcast_backward)
