"""The end of the model: computes logits of all tokens, or of the slices of the vocabulary that a
loss reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from shoal.model.block import cast_weight
from shoal.model.linear import Weight, cast_product, linear, transposed_linear, writing_float32
from shoal.model.parameters import Parameters

if TYPE_CHECKING:
    from shoal.model.transformer import Model


def logits(model: Model, parameters: Parameters, hidden: jax.Array) -> jax.Array:
    """Computes logits float32[..., V] from hidden[..., D]."""
    hidden = hidden.astype(model.dtype)
    if parameters.lm_head is None:
        table = parameters.embed_tokens
        scores = transposed_linear(table, hidden, jnp.float32, model.writes_float32)
        return _capped(model, scores)
    return _project(model, parameters.lm_head, hidden)


def output_head(parameters: Parameters) -> jax.Array:
    """Returns the head [D, V]: the embedding transposed if they are tied."""
    if parameters.lm_head is None:
        return parameters.embed_tokens.T
    return parameters.lm_head


def head_alone(parameters: Parameters) -> Parameters:
    """Returns the parameters with None in place of all that `output_head` does not read; also of
    specs or shapes."""
    if parameters.lm_head is None:
        return Parameters(parameters.embed_tokens, None, None)
    return Parameters(None, None, None, parameters.lm_head)


def _project(model: Model, head: Weight, hidden: jax.Array) -> jax.Array:
    # float32, because bfloat16 has 8 significant bits, and ratios are computed from differences of
    # logits.
    if model.writes_float32:
        head = writing_float32(head, model.dtype)
    return _capped(model, linear(head, hidden, jnp.float32))


def _capped(model: Model, scores: jax.Array) -> jax.Array:
    """Bounds logits by the model's `logit_cap`, if it has one."""
    cap = model.architecture.logit_cap
    return cap * jnp.tanh(scores / cap) if cap else scores


def head_slices(head: jax.Array, size: int) -> jax.Array:
    """Splits a head[D, V] into n slices of consecutive columns, [n, D, v]. v is a multiple of a
    register's 128, and at most `size` rounded up to one; zeros fill up the last slices. The width
    is chosen so that the slices are about equally full."""
    vocab_size = head.shape[1]
    count = -(-vocab_size // size)
    width = -(-vocab_size // (128 * count)) * 128
    head = jnp.pad(head, ((0, 0), (0, count * width - vocab_size)))
    return head.reshape(-1, count, width).swapaxes(0, 1)


def head_projection(model: Model, head: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that computes `logits` of chunks hidden[R, T, D] of a batch. The head[D,
    V] is cast and gathered once, before the first chunk, and its gradient is summed over the
    devices once, after the last."""
    role = model.role
    shards = role.row_shards
    if shards == 1:
        return partial(_project, model, cast_weight(model, head, ("embed", model.vocab_axis)))
    # Each part of the rows gets its own copy of the head, on that part's devices: in a loop over
    # chunks the products are then local, and so is the sum of their gradients. The gradient of a
    # single head would be summed over the devices in every chunk.
    kernel = jax.lax.stop_gradient(_copies(model, jnp.float32, head.astype(model.dtype)))
    master = _copies(model, model.reduce_dtype, head)

    def project(hidden: jax.Array) -> jax.Array:
        """Returns logits of a chunk, with each part of the rows times its own copy of the head."""
        flat = role.constrain(hidden.reshape(shards, -1, hidden.shape[-1]), "rows", None, None)
        # Both types are float32: that of the logits, and that in which a copy's own gradient is
        # computed. `_copies` sums these gradients.
        product: jax.Array = cast_product(flat, kernel, master, jnp.float32, jnp.float32)
        rows, size, _ = hidden.shape
        scores = product.reshape(rows, size, -1)
        return role.constrain(_capped(model, scores), "rows", None, model.vocab_axis)

    return project


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(model: Model, reduce_dtype: Any, head: jax.Array) -> jax.Array:
    """Returns a copy of the head[D, V] for each part of the rows, on that part's devices; the
    gradient is summed over the copies in `reduce_dtype`."""
    hidden_size, vocab_size = head.shape
    copies = jnp.broadcast_to(head, (model.role.row_shards, hidden_size, vocab_size))
    return model.role.constrain(copies, "rows", None, model.vocab_axis)


def _copies_forward(model: Model, reduce_dtype: Any, head: jax.Array) -> tuple[jax.Array, None]:
    return _copies(model, reduce_dtype, head), None


def _copies_backward(
    model: Model, reduce_dtype: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    """Returns the gradient of the head, float32: the sum of the gradients of all copies, which is
    computed in `reduce_dtype`."""
    role = model.role
    vocab = model.vocab_axis
    gradient = role.constrain(gradient, "rows", None, vocab).astype(reduce_dtype)
    # Not jnp.sum: it would sum bfloat16 in float32.
    total = jax.lax.reduce(gradient, jnp.zeros((), reduce_dtype), jax.lax.add, (0,))
    return (role.constrain(total, "embed", vocab).astype(jnp.float32),)


_copies.defvjp(_copies_forward, _copies_backward)
