"""The model: an architecture, its parameters declared once, and the one `forward`.

`forward` runs on rows of tokens [R, T] and takes attention as an `AttentionFn`: in training and
scoring, completions attend to a shared prompt; in prefill, a prompt attends to itself and its keys
and values are returned; in decoding, one new token a row attends to caches. Everything else, and so
every number, is the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shoal.mesh import PINNED_HOST, Role
from shoal.model.architecture import Architecture
from shoal.model.linear import Cast, Weight, broadcast, cast_product, linear
from shoal.model.parameters import (
    Block,
    Parameters,
    check_mesh,
    layer_pieces,
    layers_apart,
    param_specs,
)
from shoal.model.rotary import rotary, rotate, rotate_by_product
from shoal.types import ShoalError


@dataclass(frozen=True)
class Model:
    """What `forward` needs besides parameters: static, hashable, a key of the compiled programs."""

    architecture: Architecture
    role: Role
    dtype: Any = jnp.float32  # of the computation; parameters are float32
    remat: Literal["none", "dots", "attention", "full", "offload"] = (
        "dots"  # what is computed again, see REMAT
    )
    attention: Literal["auto", "reference", "blocked", "pallas"] = (
        "auto"  # of training, scoring and prefill
    )
    reduce_dtype: Any = jnp.float32  # in which gradients are summed over the mesh
    sampler_type: str = ""  # of the sampler's products' weights, in 8 bits; empty: as the trainer's

    def __post_init__(self) -> None:
        if self.dtype == jnp.float16 and self.role.platform == "tpu":
            raise ShoalError(
                "model.dtype=float16: a TPU has no products of float16; use bfloat16", "model.dtype"
            )
        check_mesh(self.architecture, self.role)

    @property
    def key_heads(self) -> int:
        """Key/value heads as attention has them, repeated in groups where devices outnumber them.
        Caches have as many: in place of copies, the parts of the positions of each
        (`key_parts`)."""
        return max(self.architecture.num_kv_heads, self.role.tensor)

    @property
    def key_parts(self) -> int:
        """Parts into which the positions of a key/value head's cache are split, one on each device
        that has it."""
        return self.architecture.key_parts(self.role.tensor)

    @property
    def vocab_axis(self) -> str | None:
        """The logical axis of logits: None where `tensor` does not divide the vocabulary."""
        return None if self.architecture.vocab_size % self.role.tensor else "vocab"

    @property
    def pieces(self) -> int:
        """Of a sampler: see `layer_pieces`."""
        return layer_pieces(self.architecture, self.role, self.dtype)

    def on(self, role: Role) -> Model:
        a = self.architecture
        if role.name == "sampler" and self.sampler_type:
            a = replace(a, quantised=self.sampler_type)
        return replace(self, role=role, architecture=a)


def published_specs(model: Model) -> Parameters:
    """The `param_specs` of what the sampler of a model is given."""
    specs = param_specs(model.architecture)
    return (
        layers_apart(specs, model.architecture.num_layers, model.pieces) if model.pieces else specs
    )


_KEPT, _DOTS = jax.checkpoint_policies, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
REMAT: dict[str, Callable[[Callable], Callable]] = {
    "none": lambda layer: layer,
    "dots": partial(
        jax.checkpoint,
        policy=_KEPT.save_from_both_policies(
            _DOTS, _KEPT.save_only_these_names("kernel", "product")
        ),
    ),
    "attention": partial(jax.checkpoint, policy=_KEPT.save_only_these_names("attention", "kernel")),
    "full": jax.checkpoint,
    "offload": partial(
        jax.checkpoint,
        policy=_KEPT.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["input", "attention", "kernel"],
            offload_src="device",
            offload_dst=PINNED_HOST,
        ),
    ),
}
"""What a block's backward pass computes again: nothing; all but products with weights; the
feed-forward part; all; and the feed-forward part, with what is kept, the block's input too, in the
host's memory. `kernel`: output and log-sum-exp of an attention with its own backward pass;
`attention`: its inputs, and x behind it; `product`: of a kernel with an adapter. On CPU `dots` is
fastest: `none` writes and reads four times the memory (docs/LOG.md)."""

AttentionFn = Callable[..., tuple[jax.Array, Any]]
"""(q[R, T, H, A], k[R, T, K, A], v[R, T, K, A], cache of the layer) -> (out[R, T, H, A], cache).
One with `rotates` is given q and k without rotary positions, and `rope`, what `rotary` gives."""


def forward(
    model: Model,
    parameters: Parameters,
    tokens: jax.Array,
    positions: jax.Array,
    attention: AttentionFn,
    caches: Any = None,
) -> tuple[jax.Array, Any]:
    """Hidden states of tokens[R, T] at positions[R, T] -> (hidden[R, T, D], aux).

    aux is what `attention` returned next to its output, an entry a layer: nothing in training, new
    caches in decoding.
    """
    x, rope = embed(model, parameters.embed_tokens, tokens), rotary(model.architecture, positions)
    if caches is not None:
        rope = jax.lax.optimization_barrier(
            rope
        )  # else XLA for CPU computes each cosine again for each head and layer
    x, aux = through_layers(
        model, parameters.blocks, x, partial(block, model, rope=rope, attention=attention), caches
    )
    return rms_norm(x, parameters.final_norm, model.architecture.norm_eps), aux


def through_layers(
    model: Model,
    blocks: Any,
    x: jax.Array,
    layer: Callable[..., tuple[jax.Array, Any]],
    caches: Any = None,
) -> tuple[jax.Array, tuple]:
    """x[R, T, D] through layers, each (weights, x, cache) -> (x, aux): (x, the aux of each).
    Stacked ones are scanned; unrolled with caches, one a layer, and where they are apart."""
    # Decoding is unrolled because a scan copies each layer's cache in and out: 46M parameters, 16
    # rows and 256 keys on two CPU cores take 67 ms a token with the caches as the scan's input and
    # output, 44 as its carry, 29 unrolled.
    if isinstance(blocks, Block) and caches is None:
        specs = param_specs(model.architecture).blocks

        @REMAT[model.remat]
        def step(x: jax.Array, weights: Block) -> tuple[jax.Array, Any]:
            cast = jax.tree.map(
                lambda weight, spec: cast_weight(
                    model, weight, spec.axes_on(model.role)[1:], spec.trained and not spec.dtype
                ),
                weights,
                specs,
            )
            return layer(cast, x, cache=None)

        x, aux = jax.lax.scan(step, x, blocks)
        return x, unstacked(aux, model.architecture.num_layers)
    aux, blocks = (), by_layer(model, blocks)
    for weights, cache in zip(blocks, caches or (None,) * len(blocks), strict=True):
        x, new = layer(weights, x, cache=cache)
        aux += (new,)
    return x, aux


def embed(model: Model, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table[V, D] at tokens[R, T] -> [R, T, D]."""
    constrain = model.role.constrain

    def look_up(tokens: jax.Array) -> jax.Array:
        return table[tokens].astype(model.dtype)  # the other way round would copy the whole table

    if "fsdp" not in model.role.row_axes:
        return constrain(look_up(tokens), "rows", None, None)
    # A device of `fsdp` looks up its columns for the rows of all of these, then columns and rows
    # change places. From tokens alone the partitioner makes [R, T, D] whole on each device where
    # `data` splits rows too.
    columns = constrain(look_up(constrain(tokens, "fsdp_rows", None)), "fsdp_rows", None, "embed")
    return constrain(columns, "rows", None, None)


def by_layer(model: Model, blocks: Any) -> tuple[Block, ...]:
    """The layers one by one, of stacked or separate ones."""
    return unstacked(blocks, model.architecture.num_layers) if isinstance(blocks, Block) else blocks


def unstacked(tree: Any, num_layers: int) -> tuple[Any, ...]:
    """The layers of a tree whose leaves have L in front, one by one."""
    return tuple(jax.tree.map(itemgetter(number), tree) for number in range(num_layers))


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
    a, constrain, kept = (
        model.architecture,
        model.role.constrain,
        partial(checkpoint_name, name="attention"),
    )
    # Decoding has few rows, whose elementwise operations are better done within the products.
    is_tpu = model.role.platform == "tpu" and cache is None
    apart = _apart if is_tpu else lambda x: x
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
        q, k, v = (linear(weight, h) for weight in (w.q, w.k, w.v))
        if cache is not None or (is_tpu and model.role.name == "sampler"):
            # Else XLA for TPU makes the heads of q inside the product, for which it copies the
            # weight in another order.
            q = jax.lax.optimization_barrier(q)
        q, k, v = (x.reshape(*x.shape[:-1], -1, a.head_dim) for x in (q, k, v))
    if a.qk_norm:
        q, k = rms_norm(q, w.q_norm, a.norm_eps), rms_norm(k, w.k_norm, a.norm_eps)
    if getattr(attention, "rotates", False):
        attention = partial(attention, rope=rope)
    else:
        turn = rotate_by_product if is_tpu else rotate
        q, k = turn(q, *rope), turn(k, *rope)
    if repeats := model.key_heads // a.num_kv_heads - 1:
        k, v = (
            constrain(jnp.repeat(x, repeats + 1, axis=-2), "rows", None, "heads", None)
            for x in (k, v)
        )
    out: Any
    out, cache = attention(kept(q), kept(k), kept(v), cache)
    x = kept(x + linear(w.o, out.reshape(*out.shape[:-2], -1)))
    h = apart(rms_norm(x, w.mlp_norm, a.norm_eps))
    if isinstance(w.down, tuple):  # pieces, each of which gives a part of the sum
        inner = (
            _gated(model, linear(gate, h), linear(up, h))
            for gate, up in zip(w.gate, w.up, strict=True)
        )
        parts = [
            linear(down, jax.lax.optimization_barrier(h) if is_tpu else h, jnp.float32)
            for down, h in zip(w.down, inner, strict=True)
        ]
        out = sum(parts[1:], parts[0]).astype(x.dtype)
    elif is_tpu:
        out = gated_product(model, linear(w.gate, h), linear(w.up, h), w.down)
    else:
        out = linear(w.down, _gated(model, linear(w.gate, h), linear(w.up, h)))
    return constrain(x + out, "rows", None, None), cache


@jax.custom_vjp
def _apart(x: jax.Array) -> jax.Array:
    """x, whose gradient is an array of its own: fused with the products that give it, a norm's
    backward pass halves their rate."""
    return x


_apart.defvjp(lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),))


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


def logits(model: Model, parameters: Parameters, hidden: jax.Array) -> jax.Array:
    """hidden[..., D] -> float32[..., V]."""
    return _project(output_head(parameters), hidden.astype(model.dtype))


def output_head(parameters: Parameters) -> jax.Array:
    """[D, V]"""
    return parameters.embed_tokens.T if parameters.lm_head is None else parameters.lm_head


def _project(head: Weight, hidden: jax.Array) -> jax.Array:
    # float32 out: bfloat16 has 8 significant bits, and ratios are made of differences of these.
    return linear(head, hidden, jnp.float32)


def head_slices(head: jax.Array, size: int) -> jax.Array:
    """A head[D, V] as slices [n, D, v], v at most `size`, by whole registers; the last ones are
    filled up by zeros."""
    count = -(-head.shape[1] // size)
    width = -(-head.shape[1] // (128 * count)) * 128
    head = jnp.pad(head, ((0, 0), (0, count * width - head.shape[1])))
    return head.reshape(-1, count, width).swapaxes(0, 1)


def head_projection(model: Model, head: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """`logits` for many chunks hidden[R, T, D] of a batch: the head[D, V] is cast and gathered
    once, before the first, and its gradient is summed over the devices once, after the last."""
    role = model.role
    shards = role.row_shards
    if shards == 1:
        return partial(_project, cast_weight(model, head, ("embed", model.vocab_axis)))
    # A copy for each part of the rows, each on that part's devices: in a loop over chunks the
    # products are then local, and so is the sum of their gradients. One head for all would be
    # summed over the devices in every chunk.
    kernel = jax.lax.stop_gradient(_copies(model, jnp.float32, head.astype(model.dtype)))
    master = _copies(model, model.reduce_dtype, head)

    def project(hidden: jax.Array) -> jax.Array:
        flat = role.constrain(hidden.reshape(shards, -1, hidden.shape[-1]), "rows", None, None)
        product: jax.Array = cast_product(flat, kernel, master, jnp.float32, jnp.float32)
        return role.constrain(
            product.reshape(*hidden.shape[:-1], -1), "rows", None, model.vocab_axis
        )

    return project


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(model: Model, reduce_dtype: Any, head: jax.Array) -> jax.Array:
    """[D, V] -> a copy for each part of the rows, on its devices; the gradient is summed over them
    in `reduce_dtype`."""
    copies = jnp.broadcast_to(head, (model.role.row_shards, *head.shape))
    return model.role.constrain(copies, "rows", None, model.vocab_axis)


def _copies_backward(
    model: Model, reduce_dtype: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    role, vocab = model.role, model.vocab_axis
    gradient = role.constrain(gradient, "rows", None, vocab).astype(reduce_dtype)
    # Not jnp.sum: it would sum bfloat16 in float32.
    total = jax.lax.reduce(gradient, jnp.zeros((), reduce_dtype), jax.lax.add, (0,))
    return (role.constrain(total, "embed", vocab).astype(jnp.float32),)


_copies.defvjp(lambda *arguments: (_copies(*arguments), None), _copies_backward)
