"""What is written around a layer's maths because of the habits of one compiler.

Barriers against fusion, gradients that are separate arrays, other forms of the same product: each
changes a program's time or memory, never what it computes. `block` asks for the `Habits` of its
model, and has no branch by platform itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from shoal.model.activations import ACTIVATIONS
from shoal.model.architecture import Layer
from shoal.model.linear import Adapted, Biased, Weight, linear, writing_float32
from shoal.model.parameters import Block
from shoal.model.rotary import rotate, rotate_by_product

if TYPE_CHECKING:
    from shoal.model.transformer import Model


def unchanged(x: Any) -> Any:
    return x


def computed_once(arrays: Any) -> Any:
    """Returns the same tree of arrays behind a barrier: the compiler computes them once, before
    whatever reads them, instead of again within each reader."""
    return jax.lax.optimization_barrier(arrays)


@jax.custom_vjp
def separate_gradient(x: jax.Array) -> jax.Array:
    """Returns x, and makes the gradient of x a separate array. If XLA fused it with the products
    that compute it, a norm's backward pass would halve their rate on TPU."""
    return x


def _separate_gradient_forward(x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _separate_gradient_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (computed_once(gradient),)


separate_gradient.defvjp(_separate_gradient_forward, _separate_gradient_backward)


def gated(model: Model, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes what the feed-forward part has between its products: silu(gate) * up, or another
    `Architecture.activation`."""
    activation = ACTIVATIONS[model.architecture.activation]
    return model.role.constrain(activation(gate, up), "rows", None, "mlp")


def plain_gated_product(model: Model, gate: jax.Array, up: jax.Array, down: Weight) -> jax.Array:
    """Computes `down` of what `gated` returns, the end of the feed-forward part; no barriers."""
    return linear(down, gated(model, gate, up))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_product(model: Model, gate: jax.Array, up: jax.Array, down: Weight) -> jax.Array:
    """Computes `plain_gated_product` in a form for TPU: without it XLA would compute the activation
    and its gradient within the products, again for each of their blocks."""
    return linear(down, computed_once(gated(model, gate, up)))


def _gated_product_forward(
    model: Model, gate: jax.Array, up: jax.Array, down: Weight
) -> tuple[jax.Array, tuple]:
    return gated_product(model, gate, up, down), (gate, up, down)


def _gated_product_backward(model: Model, kept: tuple, gradient: jax.Array) -> tuple:
    """Returns the gradients of (gate, up, down); what `gated` returns is computed again, with
    barriers around it."""
    gate, up, down = kept
    gate, up = computed_once((gate, up))
    inner, backward_of_gated = jax.vjp(partial(gated, model), gate, up)
    _, backward_of_down = jax.vjp(linear, down, computed_once(inner))
    d_down, d_inner = backward_of_down(gradient)
    d_gate, d_up = computed_once(backward_of_gated(computed_once(d_inner)))
    return d_gate, d_up, d_down


gated_product.defvjp(_gated_product_forward, _gated_product_backward)


@dataclass(frozen=True)
class Habits:
    """How one layer is written for a compiler: a function for each place where it matters."""

    weights: Callable[[Block], Block] = unchanged  # applied to the layer's weights first
    normed: Callable[[jax.Array], jax.Array] = unchanged  # applied to the result of a norm
    # Applied to the product that gives q, before it is split into heads.
    queries: Callable[[jax.Array], jax.Array] = unchanged
    # (q or k, cos, sin) -> the rotated array, like `rotary.rotate`
    rotate: Callable[..., Any] = rotate
    # (model, gate, up, down) -> the product, like `plain_gated_product`
    gated_product: Callable[..., Any] = plain_gated_product
    # Applied to what is between the products of a chunk of the feed-forward part.
    inner_of_chunk: Callable[[jax.Array], jax.Array] = unchanged


PLAIN = Habits()

# Decoding has few rows, so elementwise operations are better done within the products. But XLA for
# TPU would split q into heads inside the product, for which it copies the weight in another order.
DECODING = Habits(queries=computed_once)

TPU = Habits(
    normed=separate_gradient,
    rotate=rotate_by_product,
    gated_product=gated_product,
    inner_of_chunk=computed_once,
)

TPU_PREFILL = replace(TPU, queries=computed_once)


def habits_of(model: Model, is_decoding: bool) -> Habits:
    """Returns the habits for a layer that decodes, or for one that computes whole rows. They are
    DECODING for a layer that decodes. Else they are PLAIN on a CPU or GPU; on a TPU TPU_PREFILL for
    the sampler's role, and TPU for any other role. Both of a CPU have other weights if the model
    writes its products in float32."""
    habits = PLAIN
    if is_decoding:
        habits = DECODING
    elif model.role.platform == "tpu":
        habits = TPU_PREFILL if model.role.name == "sampler" else TPU
    if model.writes_float32:
        habits = replace(habits, weights=partial(products_in_float32, model.dtype))
    return habits


def products_in_float32(dtype: Any, block: Block) -> Block:
    """Returns a layer's block whose weights of products, those of experts left out, write them in
    float32 (`Cast.writes_float32`). `dtype` is that of the computation."""

    def changed(weights: Any, *names: str) -> Any:
        """Returns a part of the block with its fields `names` changed."""
        fields = {}
        for name in names:
            weight = getattr(weights, name)
            if isinstance(weight, tuple):  # the chunks of a matrix
                fields[name] = tuple(writing_float32(chunk, dtype) for chunk in weight)
            elif weight is not None:
                fields[name] = writing_float32(weight, dtype)
        return replace(weights, **fields)

    block = changed(block, "q", "k", "v", "o", "gate", "up", "down")
    if block.delta_net is not None:
        delta_net = changed(block.delta_net, "qkv", "z", "b", "a", "out")
        block = replace(block, delta_net=delta_net)
    return block


def products_joined(block: Block) -> Block:
    """Returns a layer's block in which products of the same input are one: of attention q, k and v,
    in the place of q's, of a delta net qkv, z, b and a, in the place of qkv's. The others are then
    None. Weights that are of different classes, for example if one has a bias and another none,
    stay as they are. Of an MLP, whose matrices are too large to be copied, only the first products
    of its adapters are one (`_with_one_first_product`)."""
    gate, up = _with_one_first_product(block.gate, block.up)
    block = replace(block, gate=gate, up=up)
    if block.delta_net is not None:
        w = block.delta_net
        joined = _side_by_side(w.qkv, w.z, w.b, w.a)
        if joined is None:
            return block
        return replace(block, delta_net=replace(w, qkv=joined, z=None, b=None, a=None))
    joined = _side_by_side(block.q, block.k, block.v)
    if joined is None:
        return block
    return replace(block, q=joined, k=None, v=None)


def _side_by_side(*weights: Weight | None) -> Weight | None:
    """Returns the weight whose product with an input has the columns of all products of `weights`
    with it, in their order; None if these are of different classes."""
    kinds = {jax.tree.structure(weight) for weight in weights}
    if len(kinds) > 1:
        return None

    def columns(*arrays: jax.Array) -> jax.Array:
        return jnp.concatenate(arrays, -1)

    def joined(*parts: Any) -> Any:
        """Joins weights of one class, or their kernels."""
        first = parts[0]
        if isinstance(first, Biased):
            kernels = [part.kernel for part in parts]
            biases = [part.bias for part in parts]
            return Biased(joined(*kernels), columns(*biases))
        if isinstance(first, Adapted):
            kernels = [part.kernel for part in parts]
            first_matrices = [part.a for part in parts]
            second_matrices = [part.b for part in parts]
            # Each adapter's second matrix multiplies its own columns of the first product alone.
            return Adapted(
                kernel=joined(*kernels),
                a=columns(*first_matrices),
                b=jax.scipy.linalg.block_diag(*second_matrices),
                scale=first.scale,
            )
        return jax.tree.map(columns, *parts)

    return joined(*weights)


def _with_one_first_product(gate: Any, up: Any) -> tuple[Any, Any]:
    """Returns gate and up with both adapters' first matrices side by side in each, and zeros in
    their second matrices for the other's columns: the results are the same, and the compiler finds
    that the two first products are one. Other weights are returned as they are."""
    if not (isinstance(gate, Adapted) and isinstance(up, Adapted)):
        return gate, up
    a = jnp.concatenate([gate.a, up.a], -1)
    of_gate = jnp.concatenate([gate.b, jnp.zeros((up.b.shape[0], gate.b.shape[1]), gate.b.dtype)])
    of_up = jnp.concatenate([jnp.zeros((gate.b.shape[0], up.b.shape[1]), up.b.dtype), up.b])
    return replace(gate, a=a, b=of_gate), replace(up, a=a, b=of_up)


def scales_folded(block: Block) -> Block:
    """Returns a layer's block with each adapter's scale multiplied into its second matrix, which
    spares an operation for each product, if the scale is a power of two: then every result has the
    same bits."""

    def is_adapted(node: Any) -> bool:
        return isinstance(node, Adapted)

    def folded(node: Any) -> Any:
        if not is_adapted(node) or math.frexp(node.scale)[0] != 0.5:
            return node
        return replace(node, b=node.b * jnp.asarray(node.scale, node.b.dtype), scale=1.0)

    return jax.tree.map(folded, block, is_leaf=is_adapted)


def split_product(
    model: Model, layer: Layer, heads: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits heads[R, T, (H + 2 K) A], the product with the joined weight of `products_joined` in a
    kind of layer, into q[R, T, H, A], k[R, T, K, A] and v[R, T, K, A]. With an output gate, whose
    columns are next to each query's, heads are [R, T, (2 H + 2 K) A] and q [R, T, H, 2 A]."""
    a = model.architecture
    rows, size, _ = heads.shape
    head_dim = a.head_dim_of(layer)
    num_queries = 2 * a.num_heads if a.output_gate else a.num_heads
    by_head = heads.reshape(rows, size, -1, head_dim)
    q, k, v = jnp.split(by_head, (num_queries, num_queries + a.kv_heads_of(layer)), axis=-2)
    if a.output_gate:
        q = q.reshape(rows, size, a.num_heads, 2 * head_dim)
    return q, k, v
