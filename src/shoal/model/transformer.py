"""The model: an architecture, its parameters declared once, and the one `forward`.

`forward` runs on rows of tokens [R, T] and takes attention as an `AttentionFn`: in training and scoring, completions
attend to a shared prompt; in prefill, a prompt attends to itself and its keys and values are returned; in decoding, one
new token a row attends to caches. Everything else, and so every number, is the same code.
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
from jax.sharding import NamedSharding

from shoal.mesh import Role, listed, listed_divisors
from shoal.model.linear import Biased, Cast, Weight, cast_product, linear, spread
from shoal.model.rotary import rotary, rotate, rotate_by_product
from shoal.types import ShoalError


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the pretraining length: `llama3` (by wavelength) or `linear`."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder: Llama 2/3, Qwen2/2.5 (biases on q, k, v), Qwen3 (norms on q and k)."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # A
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection (Llama's `attention_bias`)
    mlp_bias: bool = False
    qk_norm: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """Parameters of one layer, or of all L stacked along a first dimension."""

    attention_norm: Any  # [D]
    q: Any  # [D, H*A]
    k: Any  # [D, K*A]
    v: Any  # [D, K*A]
    o: Any  # [H*A, D]
    mlp_norm: Any  # [D]
    gate: Any  # [D, F]
    up: Any  # [D, F]
    down: Any  # [F, D]
    q_norm: Any = None  # [A]
    k_norm: Any = None  # [A]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parameters:
    embed_tokens: Any  # [V, D]
    blocks: Any  # a Block whose leaves have L in front; or, where a sampler reads layers apart, L Blocks
    final_norm: Any  # [D]
    lm_head: Any = None  # [D, V]; None where tied to the embedding


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, the logical axes of its dimensions, and its initialisation."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    stddev: float = 0.02
    heads: int = 0  # that a dimension over `heads` is made of

    def sharding(self, role: Role) -> NamedSharding:
        return role.sharding(self.axes_on(role), self.shape)

    def axes_on(self, role: Role) -> tuple[str | None, ...]:
        """The axes that a role splits, by whole heads. Key/value heads fewer than `tensor`, and a vocabulary that it
        does not divide (a resized embedding may have any size), are whole on each of its devices: None."""
        units = dict(zip(self.axes, self.shape, strict=True)) | {"heads": self.heads}
        return tuple(None if axis in ("heads", "vocab") and units[axis] % role.tensor else axis for axis in self.axes)

    @property
    def weight_decay(self) -> bool:
        """True for matrices; norms and biases have no weight decay."""
        return self.init == "normal"


def param_specs(a: Architecture) -> Parameters:
    """Every parameter of an architecture: `Parameters` with `ParamSpec` leaves, the one place that declares them."""
    depth = (2 * a.num_layers) ** -0.5  # outputs to the residual stream start smaller, as in GPT-2

    def stacked(*shape: int, axes: tuple[str | None, ...], init: Any = "normal", scale: float = 1.0,
                heads: int = 0) -> ParamSpec:
        return ParamSpec((a.num_layers, *shape), ("layers", *axes), init, 0.02 * scale, heads)

    def product(rows: int, columns: int, axes: tuple[str, str], bias: bool, scale: float = 1.0, heads: int = 0) -> Any:
        kernel = stacked(rows, columns, axes=axes, scale=scale, heads=heads)
        return Biased(kernel, stacked(columns, axes=(axes[1],), init="zeros", heads=heads)) if bias else kernel

    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    norm = stacked(a.hidden_size, axes=("embed",), init="ones")
    head_norm = stacked(a.head_dim, axes=(None,), init="ones") if a.qk_norm else None
    blocks = Block(
        attention_norm=norm,
        q=product(a.hidden_size, queries, ("embed", "heads"), a.qkv_bias, heads=a.num_heads),
        k=product(a.hidden_size, keys, ("embed", "heads"), a.qkv_bias, heads=a.num_kv_heads),
        v=product(a.hidden_size, keys, ("embed", "heads"), a.qkv_bias, heads=a.num_kv_heads),
        o=product(queries, a.hidden_size, ("heads", "embed"), a.output_bias, depth, a.num_heads),
        mlp_norm=norm,
        gate=product(a.hidden_size, a.intermediate_size, ("embed", "mlp"), a.mlp_bias),
        up=product(a.hidden_size, a.intermediate_size, ("embed", "mlp"), a.mlp_bias),
        down=product(a.intermediate_size, a.hidden_size, ("mlp", "embed"), a.mlp_bias, depth),
        q_norm=head_norm,
        k_norm=head_norm,
    )
    return Parameters(
        embed_tokens=ParamSpec((a.vocab_size, a.hidden_size), ("vocab", "embed")),
        blocks=blocks,
        final_norm=ParamSpec((a.hidden_size,), ("embed",), "ones"),
        lm_head=None if a.tie_embeddings else ParamSpec((a.hidden_size, a.vocab_size), ("embed", "vocab")),
    )


def is_param_spec(x: object) -> bool:
    return isinstance(x, ParamSpec)


def shardings(a: Architecture, role: Role) -> Parameters:
    """A NamedSharding for every parameter."""
    return jax.tree.map(lambda d: d.sharding(role), param_specs(a), is_leaf=is_param_spec)


def param_shapes(specs: Any, role: Role, dtype: Any) -> Any:
    """Shapes, type and layout on a role's devices of the parameters in a tree of `ParamSpec`; nothing is allocated."""
    return jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape, dtype, sharding=d.sharding(role)), specs,
                        is_leaf=is_param_spec)


def layers_apart(parameters: Parameters, num_layers: int) -> Parameters:
    """Parameters with a tuple of L blocks in place of the stacked one: of ParamSpecs, of arrays, and of tuples of each
    layer's array in place of a stacked one."""

    def layer(leaf: Any, number: int) -> Any:
        return replace(leaf, shape=leaf.shape[1:], axes=leaf.axes[1:]) if is_param_spec(leaf) else leaf[number]

    def is_leaf(x: object) -> bool:
        return is_param_spec(x) or isinstance(x, tuple)

    blocks = (jax.tree.map(partial(layer, number=number), parameters.blocks, is_leaf=is_leaf)
              for number in range(num_layers))
    return replace(parameters, blocks=tuple(blocks))


def reads_layers_apart(role: Role) -> bool:
    """True if a sampler on these devices is given `layers_apart`.

    XLA for GPU copies nearly all of a layer out of stacked weights before its products, at every token; for TPU it
    reads them in place, and prefill, which scans stacked layers, compiles in one layer's time.
    """
    return role.platform == "gpu"


def published_specs(model: Model) -> Parameters:
    """The `param_specs` of what the sampler of a model is given."""
    specs = param_specs(model.architecture)
    return layers_apart(specs, model.architecture.num_layers) if reads_layers_apart(model.role) else specs


def check_mesh(a: Architecture, role: Role) -> None:
    """ShoalError unless the mesh divides the model's heads, feed-forward size and hidden size.

    Key/value heads may be fewer than `tensor`, which is then a multiple of theirs: they are repeated in groups. A
    vocabulary that does not divide is whole on each device (a warning at the head of a run says so).
    """
    tensor, fsdp = role.tensor, role.mesh.shape.get("fsdp", 1)
    on = "mesh.reference: " if role.name == "reference" else "mesh."
    key = "mesh.sampler_tensor (or mesh.tensor)" if role.name == "sampler" else f"{on}tensor"
    use = f"use {listed(tensor_sizes(a, role.mesh.size))}"
    for name, size in (("num_attention_heads", a.num_heads), ("intermediate_size", a.intermediate_size)):
        if size % tensor:
            raise ShoalError(f"{key}={tensor} does not divide the model's {name}={size}; {use}")
    if tensor not in tensor_sizes(a, tensor):
        raise ShoalError(f"{key}={tensor} neither divides the model's num_key_value_heads={a.num_kv_heads} nor is a "
                         f"multiple of it; {use}")
    if a.hidden_size % fsdp:
        raise ShoalError(f"{on}fsdp={fsdp} does not divide the model's hidden_size={a.hidden_size}; use "
                         f"{listed_divisors(a.hidden_size, role.mesh.size)}")


def tensor_sizes(a: Architecture, count: int) -> list[int]:
    """The sizes of `tensor` into which a model, and so many devices, can be divided."""
    return [size for size in range(1, count + 1) if not count % size and not a.num_heads % size
            and not a.intermediate_size % size and (not a.num_kv_heads % size or not size % a.num_kv_heads)]


def initialise(a: Architecture, seed: int, role: Role) -> Parameters:
    """Random float32 parameters, created on the devices that hold them."""
    declared, structure = jax.tree.flatten(param_specs(a), is_leaf=is_param_spec)

    def make() -> Parameters:
        leaves = []
        for number, d in enumerate(declared):
            key = jax.random.fold_in(jax.random.key(seed), number)
            constant = jnp.ones if d.init == "ones" else jnp.zeros
            leaves.append(jax.random.normal(key, d.shape) * d.stddev if d.init == "normal" else constant(d.shape))
        return jax.tree.unflatten(structure, leaves)

    return role.jit(make, out_shardings=shardings(a, role))()


@dataclass(frozen=True)
class Model:
    """What `forward` needs besides parameters: static, hashable, a key of the compiled programs."""

    architecture: Architecture
    role: Role
    dtype: Any = jnp.float32  # of the computation; parameters are float32
    remat: Literal["none", "dots", "attention", "full"] = "dots"  # what the backward pass computes again, see REMAT
    attention: Literal["auto", "reference", "blocked", "splash", "pallas"] = "auto"  # of training, scoring and prefill
    reduce_dtype: Any = jnp.float32  # in which gradients are summed over the mesh

    def __post_init__(self) -> None:
        check_mesh(self.architecture, self.role)

    @property
    def key_heads(self) -> int:
        """Key/value heads as attention and caches have them: repeated in groups where devices outnumber them."""
        return max(self.architecture.num_kv_heads, self.role.tensor)

    @property
    def vocab_axis(self) -> str | None:
        """The logical axis of logits: None where `tensor` does not divide the vocabulary."""
        return None if self.architecture.vocab_size % self.role.tensor else "vocab"

    def on(self, role: Role) -> Model:
        return replace(self, role=role)


_KEPT, _DOTS = jax.checkpoint_policies, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
REMAT: dict[str, Callable[[Callable], Callable]] = {
    "none": lambda layer: layer,
    "dots": partial(jax.checkpoint, policy=_KEPT.save_from_both_policies(_DOTS, _KEPT.save_only_these_names("kernel"))),
    "attention": partial(jax.checkpoint, policy=_KEPT.save_only_these_names("attention", "kernel")),
    "full": jax.checkpoint,
}
"""What a block's backward pass computes again: nothing; all but products with weights; the feed-forward part; all.
`kernel`: output and log-sum-exp of an attention with its own backward pass; `attention`: its inputs, and x behind it.
On CPU `dots` is fastest: `none` writes and reads four times the memory (docs/LOG.md)."""

AttentionFn = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(q[R, T, H, A], k[R, T, K, A], v[R, T, K, A], cache of the layer) -> (out[R, T, H, A], cache)."""


def forward(
    model: Model,
    parameters: Parameters,
    tokens: jax.Array,
    positions: jax.Array,
    attention: AttentionFn,
    caches: Any = None,
) -> tuple[jax.Array, Any]:
    """Hidden states of tokens[R, T] at positions[R, T] -> (hidden[R, T, D], aux).

    aux is what `attention` returned next to its output, an entry a layer: nothing in training, keys and values in
    prefill, new caches in decoding. The layers are scanned; unrolled with a tuple of caches, one a layer, and where
    parameters are apart. `caches` may also be stacked as parameters are, and so is then aux.
    """
    a = model.architecture
    x = _embed(model, parameters.embed_tokens, tokens)
    rope = rotary(a, positions)
    if caches is not None:
        rope = jax.lax.optimization_barrier(rope)  # else XLA for CPU computes each cosine again for each head and layer

    def layer(x: jax.Array, weights: Block, cache: Any) -> tuple[jax.Array, Any]:
        return block(model, weights, x, rope, attention, cache)

    # Decoding is unrolled because a scan copies each layer's cache in and out: 46M parameters, 16 rows and 256 keys on
    # two CPU cores take 67 ms a token with the caches as the scan's input and output, 44 as its carry, 29 unrolled.
    if isinstance(parameters.blocks, Block) and not isinstance(caches, tuple):
        specs = param_specs(a).blocks

        @REMAT[model.remat]
        def step(x: jax.Array, inputs: tuple[Block, Any]) -> tuple[jax.Array, Any]:
            weights, cache = inputs
            cast = jax.tree.map(lambda weight, spec: _cast(model, weight, spec.axes_on(model.role)[1:]), weights, specs)
            return layer(x, cast, cache)

        x, aux = jax.lax.scan(step, x, (parameters.blocks, caches))
        aux = unstacked(aux, a.num_layers) if caches is None else aux
    else:
        aux = ()
        for weights, cache in zip(by_layer(model, parameters), caches or (None,) * a.num_layers, strict=True):
            x, new = layer(x, weights, cache)
            aux += (new,)
    return rms_norm(x, parameters.final_norm, a.norm_eps), aux


def _embed(model: Model, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table[V, D] at tokens[R, T] -> [R, T, D]."""
    constrain = model.role.constrain

    def look_up(tokens: jax.Array) -> jax.Array:
        return table[tokens].astype(model.dtype)  # the other way round would copy the whole table

    if "fsdp" not in model.role.row_axes:
        return constrain(look_up(tokens), "rows", None, None)
    # A device of `fsdp` looks up its columns for the rows of all of these, then columns and rows change places. From
    # tokens alone the partitioner makes [R, T, D] whole on each device where `data` splits rows too.
    columns = constrain(look_up(constrain(tokens, "fsdp_rows", None)), "fsdp_rows", None, "embed")
    return constrain(columns, "rows", None, None)


def by_layer(model: Model, parameters: Parameters) -> tuple[Block, ...]:
    """The layers one by one, of stacked or separate ones."""
    blocks = parameters.blocks
    return unstacked(blocks, model.architecture.num_layers) if isinstance(blocks, Block) else blocks


def unstacked(tree: Any, num_layers: int) -> tuple[Any, ...]:
    """The layers of a tree whose leaves have L in front, one by one."""
    return tuple(jax.tree.map(itemgetter(number), tree) for number in range(num_layers))


def block(model: Model, w: Block, x: jax.Array, rope: tuple[jax.Array, jax.Array], attention: AttentionFn,
          cache: Any) -> tuple[jax.Array, Any]:
    """One layer: x[R, T, D] -> (x[R, T, D], cache)."""
    a, constrain, kept = model.architecture, model.role.constrain, partial(checkpoint_name, name="attention")
    # Decoding has few rows, whose elementwise operations are better done within the products.
    is_tpu = model.role.platform == "tpu" and cache is None
    apart = _apart if is_tpu else lambda x: x
    h = apart(rms_norm(x, w.attention_norm, a.norm_eps))
    q, k, v = (linear(weight, h) for weight in (w.q, w.k, w.v))
    if cache is not None:
        # Else XLA for TPU makes the heads of q inside the product, for which it copies the weight in another order.
        q = jax.lax.optimization_barrier(q)
    q, k, v = (_heads(x, a.head_dim) for x in (q, k, v))
    if a.qk_norm:
        q, k = rms_norm(q, w.q_norm, a.norm_eps), rms_norm(k, w.k_norm, a.norm_eps)
    turn = rotate_by_product if is_tpu else rotate
    q, k = turn(q, *rope), turn(k, *rope)
    if repeats := model.key_heads // a.num_kv_heads - 1:
        k, v = (constrain(jnp.repeat(x, repeats + 1, axis=-2), "rows", None, "heads", None) for x in (k, v))
    out: Any
    out, cache = attention(kept(q), kept(k), kept(v), cache)
    x = kept(x + linear(w.o, out.reshape(*out.shape[:-2], -1)))
    h = apart(rms_norm(x, w.mlp_norm, a.norm_eps))
    if is_tpu:
        out = gated_product(model, linear(w.gate, h), linear(w.up, h), w.down)
    else:
        out = linear(w.down, constrain(jax.nn.silu(linear(w.gate, h)) * linear(w.up, h), "rows", None, "mlp"))
    return constrain(x + out, "rows", None, None), cache


@jax.custom_vjp
def _apart(x: jax.Array) -> jax.Array:
    """x, whose gradient is an array of its own: fused with the products that give it, a norm's backward pass halves
    their rate."""
    return x


_apart.defvjp(lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),))


def _gated(model: Model, gate: jax.Array, up: jax.Array) -> jax.Array:
    return model.role.constrain(jax.nn.silu(gate) * up, "rows", None, "mlp")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_product(model: Model, gate: jax.Array, up: jax.Array, down: Weight) -> jax.Array:
    """The product of `_gated` with down, for TPU: XLA would compute silu and its gradient within products, for each of
    their blocks again."""
    return linear(down, jax.lax.optimization_barrier(_gated(model, gate, up)))


def _gated_product_backward(model: Model, kept: tuple, gradient: jax.Array) -> tuple:
    gate, up, down = kept
    h, of_gated = jax.vjp(partial(_gated, model), *jax.lax.optimization_barrier((gate, up)))
    of_down, of_h = jax.vjp(linear, down, jax.lax.optimization_barrier(h))[1](gradient)
    return *jax.lax.optimization_barrier(of_gated(jax.lax.optimization_barrier(of_h))), of_down


gated_product.defvjp(lambda model, *inputs: (gated_product(model, *inputs), inputs), _gated_product_backward)


def _cast(model: Model, weight: jax.Array, axes: tuple[str | None, ...]) -> jax.Array | Cast:
    """A kernel in the type of the computation, with its master; vectors and what has that type stay as they are."""
    if weight.ndim == 1 or weight.dtype == model.dtype:
        return weight
    # Split as the master is, then gathered: with the second alone XLA may gather the master, twice the bytes.
    kernel = model.role.constrain(jax.lax.stop_gradient(weight).astype(model.dtype), *axes)
    kernel = model.role.constrain(kernel, *(None if axis == "embed" else axis for axis in axes))
    return Cast(kernel, weight, model.reduce_dtype)


def _heads(x: jax.Array, head_dim: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, head_dim)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; mean and division in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    # Rounded before the weight, as transformers' LlamaRMSNorm does: parity in bfloat16 needs the same order.
    return spread(weight, x) * wide.astype(x.dtype)


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
    """A head[D, V] as slices [n, D, v], v at most `size`, by whole registers; the last ones are filled up by zeros."""
    count = -(-head.shape[1] // size)
    width = -(-head.shape[1] // (128 * count)) * 128
    head = jnp.pad(head, ((0, 0), (0, count * width - head.shape[1])))
    return head.reshape(-1, count, width).swapaxes(0, 1)


def head_projection(model: Model, head: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """`logits` for many chunks hidden[R, T, D] of a batch: the head[D, V] is cast and gathered once, before the first,
    and its gradient is summed over the devices once, after the last."""
    role = model.role
    shards = role.row_shards
    if shards == 1:
        return partial(_project, _cast(model, head, ("embed", model.vocab_axis)))
    # A copy for each part of the rows, each on that part's devices: in a loop over chunks the products are then local,
    # and so is the sum of their gradients. One head for all would be summed over the devices in every chunk.
    kernel = jax.lax.stop_gradient(_copies(model, jnp.float32, head.astype(model.dtype)))
    master = _copies(model, model.reduce_dtype, head)

    def project(hidden: jax.Array) -> jax.Array:
        flat = role.constrain(hidden.reshape(shards, -1, hidden.shape[-1]), "rows", None, None)
        product: jax.Array = cast_product(flat, kernel, master, jnp.float32, jnp.float32)
        return role.constrain(product.reshape(*hidden.shape[:-1], -1), "rows", None, model.vocab_axis)

    return project


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(model: Model, reduce_dtype: Any, head: jax.Array) -> jax.Array:
    """[D, V] -> a copy for each part of the rows, on its devices; the gradient is summed over them in
    `reduce_dtype`."""
    copies = jnp.broadcast_to(head, (model.role.row_shards, *head.shape))
    return model.role.constrain(copies, "rows", None, model.vocab_axis)


def _copies_backward(model: Model, reduce_dtype: Any, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    role, vocab = model.role, model.vocab_axis
    gradient = role.constrain(gradient, "rows", None, vocab).astype(reduce_dtype)
    # Not jnp.sum: it would sum bfloat16 in float32.
    total = jax.lax.reduce(gradient, jnp.zeros((), reduce_dtype), jax.lax.add, (0,))
    return (role.constrain(total, "embed", vocab).astype(jnp.float32),)


_copies.defvjp(lambda *arguments: (_copies(*arguments), None), _copies_backward)
