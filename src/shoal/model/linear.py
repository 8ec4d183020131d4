"""The one matrix product of the model. Kinds of weight (plain, biased, adapted, quantised, cast)
are distinguished here alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec


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
    `reduce_dtype`. If both are None, it goes to the kernel, in the kernel's type.

    Autodiff alone would give the gradient the kernel's type: rounded to bfloat16 before every sum.

    `writes_float32`: every product is written in float32, and rounded after that. XLA for CPU then
    multiplies factors in bfloat16 as they are, which CPUs with matrix units do several times as
    fast as products in float32; otherwise it widens both factors first.
    """

    kernel: Any
    master: Any
    reduce_dtype: Any = field(default=jnp.float32, metadata={"static": True})
    writes_float32: bool = field(default=False, metadata={"static": True})


Weight: TypeAlias = "jax.Array | Biased | Adapted | Quantised | Cast"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Which of E matrices multiplies each of M sorted rows: of the first sizes[0] rows matrix 0, of
    the next sizes[1] matrix 1, and so on. The sizes may sum up to less than M."""

    sizes: jax.Array  # int32[E]
    # On NVIDIA GPUs the same as `grouped_gpu.Tiles`, whose kernels then multiply; None elsewhere.
    tiles: Any = None


QUANTISED = {"none": "", "int8": "int8", "fp8": "float8_e4m3fn"}
"""The type of quantised weights for each value of `model.quantise`."""


def linear(
    weight: Weight, x: jax.Array, out_dtype: Any = None, groups: Groups | None = None
) -> jax.Array:
    """Computes x[..., in] times a weight of any kind -> [..., out], with its bias and its adapter's
    change added if it has them. The weight is cast to x's type, unless it is a `Cast`, which was
    cast before; the result has x's type, or `out_dtype` if given.

    With `groups` the weight is a stack of E weights, each array with E in front, and the rows of
    x[M, in] are sorted: each is multiplied by its group's weight. Results of rows that are in no
    group are undefined, and the rows have no part in the weights' gradients.
    """
    product: jax.Array
    if isinstance(weight, Biased):
        product = linear(weight.kernel, x, out_dtype, groups)
        return product + _bias_of_rows(weight.bias, product, groups)
    if isinstance(weight, Adapted):
        pair = (weight.a, weight.b)
        product = adapted_product(weight.scale, out_dtype, x, weight.kernel, pair, groups)
        return checkpoint_name(product, "product")
    if isinstance(weight, Quantised):
        # Without a barrier XLA for GPU widens the values of all layers at the start of a token,
        # because widening waits for nothing.
        values, x = jax.lax.optimization_barrier((weight.values, x))
        product = linear(values, x, out_dtype, groups)
        if groups is None:
            return product * weight.scale.astype(product.dtype)
        scale: jax.Array = _vector_of_rows(weight.scale, groups.sizes, len(x), product.dtype)
        return product * scale
    # Flattened to two dimensions: on CPU the weight's gradient over several batch dimensions is a
    # fifth slower.
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Cast):
        product = cast_product(
            flat,
            weight.kernel,
            weight.master,
            out_dtype,
            weight.reduce_dtype,
            groups,
            weight.writes_float32,
        )
    elif groups is None and out_dtype in (None, x.dtype):
        product = jnp.matmul(flat, weight.astype(x.dtype))
    elif groups is not None and groups.tiles is not None and weight.dtype.itemsize == 1:
        # The kernels for GPUs widen what they load.
        product = cast_product(flat, weight, None, out_dtype, None, groups)
    else:
        product = cast_product(flat, weight.astype(x.dtype), None, out_dtype, None, groups)
    return product.reshape((*x.shape[:-1], -1))


def weighted_linear(
    weight: Weight, x: jax.Array, factors: jax.Array, groups: Groups | None = None
) -> jax.Array:
    """Computes factors[...] * linear(weight, x[..., in]) -> [..., out] in x's type, with float32
    factors. They multiply x, in place of the product, which their gradient then does not need."""
    if isinstance(weight, Biased):
        product = weighted_linear(weight.kernel, x, factors, groups)
        bias = _bias_of_rows(weight.bias, product, groups)
        return product + _multiplied(bias, factors)
    return linear(weight, _multiplied(x, factors), groups=groups)


def _multiplied(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Returns x[..., F] times factors[...], rounded to x's type after the product."""
    return (x.astype(factors.dtype) * factors[..., None]).astype(x.dtype)


def trained_part(weight: Weight) -> Any:
    """Returns a weight of any kind with None in place of what `linear` gives no gradient: the
    kernel of a `Cast` or of an `Adapted`, and a `Quantised` as a whole. A plain array is returned
    as it is."""
    if isinstance(weight, Biased):
        return replace(weight, kernel=trained_part(weight.kernel))
    if isinstance(weight, Adapted):
        return replace(weight, kernel=None, a=trained_part(weight.a), b=trained_part(weight.b))
    if isinstance(weight, Quantised):
        return None
    if isinstance(weight, Cast):
        return replace(weight, kernel=None)
    return weight


def split_of(weight: Weight, experts: Any, rows: Any, columns: Any) -> Any:
    """Returns how mesh axes split the arrays of E weights [E, in, out] of any kind, as a tree of
    PartitionSpecs: E over the axis `experts`, `in` over `rows`, `out` over `columns`; None: that
    dimension is not split."""
    matrix = PartitionSpec(experts, rows, columns)
    if isinstance(weight, Biased):
        kernel = split_of(weight.kernel, experts, rows, columns)
        return replace(weight, kernel=kernel, bias=PartitionSpec(experts, columns))
    if isinstance(weight, Adapted):
        return replace(
            weight,
            kernel=split_of(weight.kernel, experts, rows, columns),
            a=split_of(weight.a, experts, rows, None),
            b=split_of(weight.b, experts, None, columns),
        )
    if isinstance(weight, Quantised):
        return replace(weight, values=matrix, scale=PartitionSpec(experts, columns))
    if isinstance(weight, Cast):
        return replace(weight, kernel=matrix, master=matrix)
    return matrix


def writing_float32(weight: Weight, dtype: Any) -> Weight:
    """Returns a weight of any kind, cast to `dtype`, whose products are written in float32 before
    they are rounded (`Cast.writes_float32`). Quantised kernels stay as they are."""
    if isinstance(weight, Biased):
        return replace(weight, kernel=writing_float32(weight.kernel, dtype))
    if isinstance(weight, Adapted):
        return replace(
            weight,
            kernel=writing_float32(weight.kernel, dtype),
            a=writing_float32(weight.a, dtype),
            b=writing_float32(weight.b, dtype),
        )
    if isinstance(weight, Quantised):
        return weight
    if isinstance(weight, Cast):
        return replace(weight, writes_float32=True)
    return Cast(weight.astype(dtype), master=None, reduce_dtype=None, writes_float32=True)


def transposed_linear(
    weight: jax.Array, x: jax.Array, out_dtype: Any, writes_float32: bool
) -> jax.Array:
    """Computes x[..., in] times the transpose of a plain weight[out, in] -> [..., out]. The weight
    is cast to x's type. `writes_float32` is that of `Cast`."""
    flat = x.reshape(-1, x.shape[-1])
    kernel = weight.astype(x.dtype)
    if writes_float32:
        product = _product_in_float32(flat, kernel, out_dtype, is_transposed=True)
    else:
        product = linear(kernel.T, flat, out_dtype)
    return product.reshape((*x.shape[:-1], -1))


def _product_in_float32(
    x: jax.Array, kernel: jax.Array, out_dtype: Any, is_transposed: bool = False
) -> jax.Array:
    """Computes x[..., M, in] times kernel[..., in, out], or, with `is_transposed`, times the
    transpose of kernel[..., out, in]: in float32, then rounded to `out_dtype`."""
    # `dot_general` is told which dimension to sum over: XLA for CPU would widen the factors of a
    # product with a transposed array.
    summed = kernel.ndim - 1 if is_transposed else kernel.ndim - 2
    batch = tuple(range(kernel.ndim - 2))
    dimensions = (((x.ndim - 1,), (summed,)), (batch, batch))
    product = jax.lax.dot_general(x, kernel, dimensions, preferred_element_type=jnp.float32)
    # Without a barrier, XLA for CPU (0.10.2) makes one operation of the product and a transposition
    # that follows it, for which it has no kernel: "Unsupported element type for DotThunk".
    return jax.lax.optimization_barrier(product).astype(out_dtype)


def _matmul(
    x: jax.Array,
    kernel: jax.Array,
    out_dtype: Any,
    groups: Groups | None,
    writes_float32: bool = False,
) -> jax.Array:
    """Computes x[..., M, in] times kernel[..., in, out]; or, with groups, the rows of x[M, in]
    times the matrices of their groups in kernel[E, in, out]. `writes_float32` is that of `Cast`,
    without groups."""
    if groups is None and writes_float32:
        return _product_in_float32(x, kernel, out_dtype or x.dtype)
    if groups is None:
        return jnp.matmul(x, kernel, preferred_element_type=out_dtype)
    if groups.tiles is not None:
        return _kernels_of_gpu().product(x, kernel, groups.tiles, out_dtype or x.dtype)
    return jax.lax.ragged_dot(x, kernel, groups.sizes, preferred_element_type=out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 6))
def cast_product(
    x: jax.Array,
    kernel: jax.Array,
    master: jax.Array | None,
    out_dtype: Any,
    reduce_dtype: Any,
    groups: Groups | None = None,
    writes_float32: bool = False,
) -> jax.Array:
    """Computes x[..., T, in] times the kernel[..., in, out] of a `Cast`, or, with groups, the
    product of `linear` with kernel[E, in, out]. The gradient goes to `master`; if that is None, to
    the kernel, unless it has one byte an element."""
    return _matmul(x, kernel, out_dtype, groups, writes_float32)


def _cast_product_forward(
    x: jax.Array,
    kernel: jax.Array,
    master: jax.Array | None,
    out_dtype: Any,
    reduce_dtype: Any,
    groups: Groups | None,
    writes_float32: bool,
) -> tuple[jax.Array, Any]:
    # Not `cast_product` again: no policy of `jax.checkpoint` looks into a custom_vjp, so none would
    # keep the product.
    product = _matmul(x, kernel, out_dtype, groups, writes_float32)
    if writes_float32:
        # Kept as it is rounded; the policies for products would keep it in float32.
        product = checkpoint_name(product, "product")
    return product, (x, kernel, groups)


_OUTER_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _outer_by_group(x: jax.Array, y: jax.Array, groups: Groups, out_dtype: Any) -> jax.Array:
    """Computes for each group the sum of its rows' outer products: x[M, in] and y[M, out] -> [E,
    in, out], of x's type if `out_dtype` is None."""
    if groups.tiles is not None:
        return _kernels_of_gpu().outer_product(x, y, groups.tiles, out_dtype or x.dtype)

    def of_xla(x: jax.Array, y: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot_general(
            x, y, group_sizes, _OUTER_BY_GROUP, preferred_element_type=out_dtype
        )

    def of_kernel(x: jax.Array, y: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return outer_by_group_on_tpu(x, y, group_sizes, out_dtype or x.dtype)

    # XLA for TPU has a kernel for products with the matrices of groups, but none for these: it
    # would multiply all rows once for each group.
    return jax.lax.platform_dependent(x, y, groups.sizes, tpu=of_kernel, default=of_xla)


def _matmul_transposed(
    x: jax.Array, kernel: jax.Array, groups: Groups | None, writes_float32: bool = False
) -> jax.Array:
    """Computes `_matmul` with the transposes of the matrices: x[..., M, out] and kernel[..., in,
    out] -> [..., M, in]."""
    if groups is None and writes_float32:
        return _product_in_float32(x, kernel, x.dtype, is_transposed=True)
    if groups is None:
        return jnp.matmul(x, kernel.mT)
    if groups.tiles is not None:
        return _kernels_of_gpu().transposed_product(x, kernel, groups.tiles)

    def of_xla(x: jax.Array, kernel: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, kernel.mT, group_sizes)

    # XLA for TPU would write all matrices to memory once more, transposed.
    return jax.lax.platform_dependent(
        x, kernel, groups.sizes, tpu=matmul_transposed_on_tpu, default=of_xla
    )


SIDE = 1024
"""Longest side of the part of a matrix that one step of the kernels for TPUs has: 4 MB of sums in
float32."""

MANY_ROWS = 1500
"""Mean rows of a group from which steps of 512 rows take less than steps of 256. By the bundles
that Mosaic schedules for v6e a step of 256 rows of experts of 768 takes as long as 376 rows at the
peak (gradient of the inputs) and 397 (of the weights), one of 512 as long as 625 and 724. Steps of
128 rows gain nothing for groups of 128 rows and more (benchmarks/results/2026-11-30-plans.md)."""


def rows_of_step(num_rows: int, num_groups: int) -> int:
    """Returns how many rows of `num_rows` in all one step of the kernels for TPUs has. A step in
    which another group begins is computed once for each of the two, so there are as many steps more
    as groups: few rows a group want short steps, many rows long ones."""
    return 256 if num_rows < MANY_ROWS * num_groups else 512


def outer_by_group_on_tpu(
    x: jax.Array, y: jax.Array, group_sizes: jax.Array, out_dtype: Any, interpret: bool = False
) -> jax.Array:
    """Computes `_outer_by_group` by JAX's kernel for TPUs. `interpret`: on any device, without the
    compiler for TPUs."""
    rows = rows_of_step(len(x), len(group_sizes))
    tile = (rows, min(SIDE, x.shape[-1]), min(SIDE, y.shape[-1]))
    kernel = _kernels_of_tpu().tgmm
    return kernel(
        _whole_steps(x, rows).mT,
        _whole_steps(y, rows),
        group_sizes,
        out_dtype,
        tile,
        interpret=interpret,
    )


def matmul_transposed_on_tpu(
    x: jax.Array, kernel: jax.Array, group_sizes: jax.Array, interpret: bool = False
) -> jax.Array:
    """Computes `_matmul_transposed` by JAX's kernel for TPUs; `interpret` as above."""
    _, inputs, outputs = kernel.shape
    rows = rows_of_step(len(x), len(group_sizes))
    tile = (rows, min(SIDE, outputs), min(SIDE, inputs))
    product = _kernels_of_tpu().gmm(
        _whole_steps(x, rows),
        kernel,
        group_sizes,
        x.dtype,
        tile,
        transpose_rhs=True,
        interpret=interpret,
    )
    return product[: len(x)]


def _whole_steps(x: jax.Array, rows: int) -> jax.Array:
    """Appends rows to x[M, ...] up to whole steps of `rows` rows; they are in no group."""
    return jnp.pad(x, ((0, -len(x) % rows), (0, 0)))


def _kernels_of_tpu() -> Any:
    """Returns the module of JAX's kernels for TPUs. Pallas takes a second to import."""
    # By name, because the package has a function that hides the module.
    return import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def _kernels_of_gpu() -> Any:
    """Returns the module of the kernels for GPUs."""
    from shoal.model import grouped_gpu  # Pallas takes a second to import

    return grouped_gpu


def _gradient_of_kernel(
    x: jax.Array, gradient: jax.Array, out_dtype: Any, writes_float32: bool
) -> jax.Array:
    """Computes the transpose of x[..., T, in] times gradient[..., T, out] -> [..., in, out].
    `writes_float32` is that of `Cast`."""
    if not writes_float32:
        return jnp.matmul(x.mT, gradient, preferred_element_type=out_dtype)
    order = tuple(range(x.ndim))
    # XLA for CPU multiplies in bfloat16 only if the rows of the first factor lie in memory as rows.
    transposed = with_layout_constraint(x.mT, Layout(major_to_minor=order))
    return _product_in_float32(transposed, gradient, out_dtype or x.dtype)


def _cast_product_backward(
    out_dtype: Any, reduce_dtype: Any, writes_float32: bool, kept: Any, gradient: jax.Array
) -> tuple:
    """Returns the gradients of (x, kernel, master, groups), the last of which is None. The
    weight's gradient is the master's, in float32, and the kernel's is None; without a master
    (`reduce_dtype` is None) it is the reverse, in the type of the product. A kernel of one byte an
    element is frozen and has none. With x[..., T, in] the result's gradient is [..., T, out], the
    weight's [..., in, out]. `out_dtype` is not read; it is here because custom_vjp passes all
    static arguments."""
    x, kernel, groups = kept
    # The gradient is cast to x's type even if the product is float32 (logits): otherwise the whole
    # kernel would be converted for float32 products.
    gradient = gradient.astype(x.dtype)
    # The partitioner sums this product over devices, so the product's type is that of the
    # reduction.
    of_x = _matmul_transposed(gradient, kernel, groups, writes_float32)
    if kernel.dtype.itemsize == 1:
        return of_x, None, None, None
    if groups is None:
        of_kernel = _gradient_of_kernel(x, gradient, reduce_dtype, writes_float32)
    else:
        of_kernel = _outer_by_group(x, gradient, groups, reduce_dtype)
    if reduce_dtype is None:  # without a master
        return of_x, of_kernel, None, None
    return of_x, None, of_kernel.astype(jnp.float32), None


cast_product.defvjp(_cast_product_forward, _cast_product_backward)


def _adapted(
    scale: float,
    out_dtype: Any,
    x: jax.Array,
    kernel: Weight,
    pair: tuple[Weight, Weight],
    groups: Groups | None,
) -> jax.Array:
    """Computes the product of a kernel with an adapter, without a rule of its own for the gradient:
    x kernel + (x a) b * scale, with `pair` = (a, b); each product by groups if there are any."""
    # The adapter is never merged into the kernel, whose type would round an update's change away.
    a, b = pair
    product = linear(kernel, x, out_dtype, groups)
    low_rank = linear(a, x, groups=groups)
    if scale != 1.0:
        low_rank = low_rank * scale
    return product + linear(b, low_rank, out_dtype, groups)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def adapted_product(
    scale: float,
    out_dtype: Any,
    x: jax.Array,
    kernel: Weight,
    pair: tuple[Weight, Weight],
    groups: Groups | None,
) -> jax.Array:
    """Computes x[..., in] kernel + (x a) b * scale -> [..., out], with `pair` = (a, b); the kernel
    is frozen and has no gradient. `groups` is that of `linear`, or None.

    No policy of `jax.checkpoint` looks into a custom_vjp: the sum, named `product`, is kept in
    place of its terms, and the backward pass computes only x a again, which is little.
    """
    return _adapted(scale, out_dtype, x, kernel, pair, groups)


def _adapted_product_forward(
    scale: float,
    out_dtype: Any,
    x: jax.Array,
    kernel: Weight,
    pair: tuple[Weight, Weight],
    groups: Groups | None,
) -> tuple[jax.Array, Any]:
    kept = (x, kernel, pair, groups)
    return adapted_product(scale, out_dtype, *kept), kept


def _adapted_product_backward(
    scale: float, out_dtype: Any, kept: Any, gradient: jax.Array
) -> tuple:
    """Returns the gradients of (x, kernel, the pair of the adapter's matrices, groups); the
    kernel is frozen, and its gradient is None, as that of the groups. `kept` are the arguments of
    the product."""
    x, kernel, pair, groups = kept

    def of_trained(x: jax.Array, pair: tuple[Weight, Weight]) -> jax.Array:
        """Computes the product from the arguments that have a gradient."""
        return _adapted(scale, out_dtype, x, kernel, pair, groups)

    _, backward = jax.vjp(of_trained, x, pair)
    of_x, (of_a, of_b) = backward(gradient)

    # The gradient is computed as [rank, in], which is four times as fast on CPU; without a barrier
    # XLA would exchange the product's factors again.
    def transposed_first(gradient: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(gradient.mT).mT

    return of_x, None, (jax.tree.map(transposed_first, of_a), of_b), None


adapted_product.defvjp(_adapted_product_forward, _adapted_product_backward)


def quantise(kernel: jax.Array, dtype: Any) -> Quantised:
    """Quantises kernel[..., in, out] to `dtype`, int8 or a float of 8 bits: the nearest values,
    with one scale for each output channel, by which its largest value becomes at most the type's
    largest. The first dimensions, such as layers, stay; a channel of zeros gets scale 1.

    Scales of floats are powers of two. A value with fewer significant bits than the type is then
    kept exactly, if it is not far smaller than its channel's largest: so are those that files have
    in 4 bits (mxfp4)."""
    wide = kernel.astype(jnp.float32)
    dtype = jnp.dtype(dtype)
    is_integer = dtype.kind == "i"
    limits = jnp.iinfo(dtype) if is_integer else jnp.finfo(dtype)
    largest_of_type = float(limits.max)
    scale = jnp.abs(wide).max(axis=-2) / largest_of_type  # [..., out]
    # The scale is rounded up, because no value may pass the type's largest: to a bfloat16, the
    # upper 16 bits of a float32, because a computation in bfloat16 would round it anyway; or to a
    # power of two, which is a float32 without a bit of mantissa, of which there are 23.
    dropped = 0xFFFF if is_integer else (1 << 23) - 1
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) + jnp.uint32(dropped)
    bits = bits & ~jnp.uint32(dropped)
    scale = jnp.where(scale > 0, jax.lax.bitcast_convert_type(bits, jnp.float32), 1.0)
    values = wide / scale[..., None, :]
    if is_integer:
        values = jnp.round(values)
    return Quantised(values.astype(dtype), scale)


def _bias_of_rows(bias: jax.Array, like: jax.Array, groups: Groups | None) -> jax.Array:
    """Returns a bias[out] in the form of `broadcast`; or, with groups, of bias[E, out] that of each
    row's group, in the type of `like`[M, out]. Its gradient is summed in float32."""
    if groups is None:
        return broadcast(bias, like)
    return _vector_of_rows(bias, groups.sizes, len(like), like.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _vector_of_rows(
    vectors: jax.Array, group_sizes: jax.Array, num_rows: int, dtype: Any
) -> jax.Array:
    """Returns for each of M sorted rows the vector of its group, of vectors[E, out] -> [M, out] in
    `dtype`: of the first group_sizes[0] rows vector 0, and so on; any vector for rows past the last
    group. The gradient is summed in float32."""
    return vectors.astype(dtype)[_group_of_rows(group_sizes, num_rows)]


def _group_of_rows(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Returns the number of each row's group, int32[M]; E for rows past the last group."""
    ends = jnp.cumsum(group_sizes)
    # Counted: a search would be a loop, whose turns a GPU launches one by one.
    return (ends <= jnp.arange(num_rows)[:, None]).sum(1, dtype=jnp.int32)


def _vector_of_rows_forward(
    vectors: jax.Array, group_sizes: jax.Array, num_rows: int, dtype: Any
) -> tuple[jax.Array, tuple]:
    # The empty array says the vectors' type.
    kept = group_sizes, vectors[:0]
    return _vector_of_rows(vectors, group_sizes, num_rows, dtype), kept


def _vector_of_rows_backward(num_rows: int, dtype: Any, kept: tuple, gradient: jax.Array) -> tuple:
    """Returns the gradient of the vectors, the sum over the rows of each group, and None for the
    group sizes."""
    group_sizes, vectors = kept
    groups = _group_of_rows(group_sizes, num_rows)
    num_groups = len(group_sizes)
    # A product may have left NaN in rows past the last group.
    gradient = jnp.where((groups < num_groups)[:, None], gradient, 0)
    # A product, because accelerators are slow at adding rows to given places.
    is_of_group = (groups == jnp.arange(num_groups)[:, None]).astype(dtype)  # [E, M]
    sums = jnp.matmul(
        is_of_group, gradient, precision="highest", preferred_element_type=jnp.float32
    )
    return sums.astype(vectors.dtype), None


_vector_of_rows.defvjp(_vector_of_rows_forward, _vector_of_rows_backward)


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
