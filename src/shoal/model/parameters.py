"""The parameters of a model, each declared once: shape, logical axes, initialisation, names in
files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shoal.mesh import Role, listed, listed_divisors
from shoal.model.architecture import Architecture, Stack, StackLayers
from shoal.model.linear import Adapted, Biased, Quantised, quantise
from shoal.records import ShoalError

INIT_STDDEV = 0.02
"""Standard deviation of the first values of a matrix, unless its spec has another."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaNetWeights:
    """Parameters of a gated delta net, of one layer or stacked. Hk and Hv are the numbers of key
    and value heads, C the channels of the convolution."""

    qkv: Any  # [D, C]: queries and keys of all key heads, then values
    z: Any  # [D, Hv*dv]: the gate of the output
    b: Any  # [D, Hv]: its sigmoid is how much of a key's value is replaced
    a: Any  # [D, Hv]: decides how much of the state is kept
    convolution: Any  # [C, 1, conv_size]
    dt_bias: Any  # [Hv]
    a_log: Any  # [Hv]
    norm: Any  # [dv]
    out: Any  # [Hv*dv, D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputWeights:
    """Parameters with which a layer adds its own embedding of each token, of one layer or stacked.
    P is `Architecture.layer_embedding_size`."""

    gate: Any  # [D, P]
    projection: Any  # [P, D]
    norm: Any  # [D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """Parameters of a feed-forward part with experts, of one layer or stacked. What every token has
    besides the chosen experts are the block's own gate, up and down."""

    router: Any  # [D, E]
    gate: Any  # [E, D, F]
    # [E, D, F]; an adapter on both has one `a`, which is in the place of gate's
    up: Any
    down: Any  # [E, F, D]
    # [D, 1]: the sigmoid of the product multiplies the output of the expert that every token has
    shared_gate: Any = None
    # Of experts next to an MLP (Gemma 4): these, the MLP and the router have norms of their own.
    norm: Any = None  # [D]
    post_norm: Any = None  # [D]
    post_mlp_norm: Any = None  # [D]
    router_scale: Any = None  # [D]: of what the router reads
    expert_scale: Any = None  # [E]: of the weights that the router gives

    @property
    def kernels(self) -> tuple[Any, Any, Any]:
        """(gate, up, down) as `experts_product` takes them: up's adapter with the `a` of gate's."""
        gate = self.gate.kernel if isinstance(self.gate, Biased) else self.gate
        up = self.up.kernel if isinstance(self.up, Biased) else self.up
        if not isinstance(up, Adapted):
            return self.gate, self.up, self.down
        up = replace(up, a=gate.a)
        if isinstance(self.up, Biased):
            up = replace(self.up, kernel=up)
        return self.gate, up, self.down


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """Parameters of one layer, or of n layers of one kind stacked along a first dimension. None is
    what this kind of layer does not have."""

    attention_norm: Any  # [D]
    # [D, H*A], with an output gate [D, H*2*A]; if k and v are None, as in decoding, all three:
    # [D, (H + 2*K)*A]
    q: Any
    k: Any  # [D, K*A]
    v: Any  # [D, K*A]
    o: Any  # [H*A, D]
    mlp_norm: Any  # [D]
    # The gated MLP, or the expert that every token has.
    gate: Any  # [D, F]
    up: Any  # [D, F]
    down: Any  # [F, D]
    q_norm: Any = None  # [A]
    k_norm: Any = None  # [A]
    sinks: Any = None  # [H]
    post_attention_norm: Any = None  # [D]
    post_mlp_norm: Any = None  # [D]
    delta_net: DeltaNetWeights | Any = None  # in place of q, k, v and o
    layer_input: LayerInputWeights | Any = None
    experts: ExpertWeights | Any = None  # in place of, or next to, gate, up and down
    layer_scale: Any = None  # [1]: what the layer's output is multiplied by


@partial(jax.tree_util.register_dataclass, data_fields=["blocks"], meta_fields=["layers"])
@dataclass(frozen=True)
class Stacks:
    """Layers of several kinds: a block of stacked layers for each of `Architecture.stacks`."""

    blocks: tuple[Block, ...]
    layers: StackLayers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerEmbedding:
    """Parameters of the embeddings that layers have for themselves, those of all L layers side by
    side. P is `Architecture.layer_embedding_size`."""

    tokens: Any  # [V, L*P]
    projection: Any  # [D, L*P]: of the embedding that enters the first layer
    norm: Any  # [P]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parameters:
    """All parameters of a model. The same class holds trees of specs, shapes, shardings or
    gradients."""

    embed_tokens: Any  # [V, D]
    # A Block whose leaves have L in front; Stacks, if there are layers of several kinds; or a tuple
    # of L Blocks, if a sampler reads each layer from its own arrays.
    blocks: Any
    final_norm: Any  # [D]
    lm_head: Any = None  # [D, V], or [D, 1] of a value; None if tied to the embedding
    layer_embedding: LayerEmbedding | Any = None


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, the logical axes of its dimensions, its initialisation, and how
    Hugging Face's files hold it. A leaf of JAX's trees. The logical axes are "layers", "experts",
    "embed", "vocab", "heads" and "mlp"; None stands for a dimension that is never split."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    # `log_uniform`: the logarithm of a uniform number from 0 to 16
    init: Literal["normal", "uniform", "ones", "zeros", "log_uniform"] = "normal"
    stddev: float = INIT_STDDEV
    heads: int = 0  # number of heads that a dimension over `heads` consists of
    # What the first dimensions count, if files hold a tensor for each of their indices: ("layer",)
    # for a parameter of every layer, ("layer", "expert") for one of every expert of every layer
    indices: tuple[str, ...] = ()
    # Numbers of the layers along the first dimension, if `indices` begins with "layer"; empty: from
    # 0 on.
    layers: range = range(0)
    # True for the kernel of a product: `linear` multiplies by it.
    is_product: bool = False
    # True if tensors in files have the last two dimensions in the other order: kernels as [out, in]
    transposed: bool = False
    # True if tensors in files have the last three dimensions in the other order, as PEFT's lora_B
    # of experts: [out, rank, experts]
    experts_last: bool = False
    # Name of its tensors in files. Each of `indices` is in it in braces, like `{layer}`.
    name: str = field(default="", compare=False)
    # False: frozen, in the type of the computation, without gradient and moments
    trained: bool = True
    # Type on devices, whatever the computation's is; "": the computation's, or float32 for a
    # trained parameter
    dtype: str = ""

    @property
    def stacked(self) -> bool:
        """True if one array has the parameter of all layers, along its first dimension."""
        return self.indices[:1] == ("layer",)

    @property
    def num_experts(self) -> int:
        """How many experts' values a layer has in the parameter; 1 if it is not one of experts."""
        if "expert" not in self.indices:
            return 1
        return self.shape[self.indices.index("expert")]

    @property
    def index_shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions that `indices` names: (layers,) for a parameter of every layer,
        () for one that is a single tensor in files."""
        return self.shape[: len(self.indices)]

    @property
    def names_by_index(self) -> dict[tuple[int, ...], str]:
        """Index in the dimensions of `index_shape` -> name of the tensor in files with the values
        there, in order; for example {(0,): "model.layers.0.mlp.up_proj.weight", ...}, or
        {(): "lm_head.weight"} for a single tensor."""
        names = {}
        for index in np.ndindex(self.index_shape):
            numbers = dict(zip(self.indices, index, strict=True))
            if self.layers:
                numbers["layer"] = self.layers[index[0]]
            names[index] = self.name.format(**numbers)
        return names

    @property
    def key(self) -> str:
        """The name of the parameter's first tensor in files, which no other parameter has; stacks
        of layers may share `name`."""
        first: dict[str, int] = dict.fromkeys(self.indices, 0)
        if self.layers:
            first["layer"] = self.layers.start
        return self.name.format(**first)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each of the parameter's tensors in files."""
        return self.in_file_order(self.shape)[len(self.indices) :]

    @property
    def is_vector(self) -> bool:
        """True if each tensor in files is a vector: a norm's weight or a bias."""
        return len(self.tensor_shape) == 1

    def in_file_order(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Reorders a sequence that has an entry for each dimension of the array (its shape, a
        position in it) like the dimensions of the tensors in files, which have the last two
        exchanged if the parameter is `transposed`, the last three reversed if `experts_last`.
        Called with the result, it restores the array's order."""
        ordered = list(entries)
        if self.transposed:
            ordered[-2:] = [entries[-1], entries[-2]]
        if self.experts_last:
            ordered[-3:] = [entries[-1], entries[-2], entries[-3]]
        return tuple(ordered)

    def transpose(self, values: Any) -> Any:
        """Converts values between the array's order of dimensions and that of files, in either
        direction (see `in_file_order`). Values may be any part of the parameter with all of its
        dimensions."""
        if self.experts_last:
            return values.swapaxes(-1, -3)
        return values.swapaxes(-1, -2) if self.transposed else values

    def sharding(self, role: Role) -> NamedSharding:
        """Returns how a role's devices split the parameter."""
        return role.sharding(self.axes_on(role), self.shape)

    def axes_on(self, role: Role) -> tuple[str | None, ...]:
        """Returns the logical axes that a role splits the parameter along, None for a dimension
        that is not split. Heads are split as whole heads only: if `tensor` does not divide them, or
        the vocabulary (a resized embedding may have any size), each device of `tensor` has all of
        that dimension, and its axis is None."""
        axes: list[str | None] = []
        for axis, size in zip(self.axes, self.shape, strict=True):
            is_whole = (axis == "heads" and self.heads % role.tensor) or (
                axis == "vocab" and size % role.tensor
            )
            axes.append(None if is_whole else axis)
        return tuple(axes)

    @property
    def weight_decay(self) -> bool:
        """True for matrices; norms and biases have no weight decay."""
        return not self.is_vector


ADAPTER_PREFIX = "base_model.model."
"""Prefix of the names of an adapter's tensors in PEFT's files."""

TEXT_MODEL = "model."
"""Beginning of the names of a text model's parameters, but for its head."""

TEXT_MODELS_WITHIN = ("model.language_model.", "language_model.model.")
"""What transformers' classes for several kinds of input have in place of TEXT_MODEL: today, and
before its version 4.52, with which Gemma 3 was published."""


def param_specs(a: Architecture) -> Parameters:
    """Returns every parameter of an architecture: `Parameters` with `ParamSpec` leaves. This is the
    one place that declares them.

    An adapter's parameters have the names of PEFT's files. With an adapter, all others are frozen.
    """
    trained = a.adapter is None
    lm_head = None
    if a.value_head:
        lm_head = value_head_spec(a)
    elif not a.tie_embeddings:
        lm_head = ParamSpec(
            (a.hidden_size, a.vocab_size),
            ("embed", "vocab"),
            transposed=True,
            name="lm_head.weight",
            trained=trained,
        )
    return Parameters(
        embed_tokens=ParamSpec(
            (a.vocab_size, a.hidden_size),
            ("vocab", "embed"),
            name="model.embed_tokens.weight",
            trained=trained,
        ),
        blocks=_block_specs(a),
        final_norm=ParamSpec(
            (a.hidden_size,),
            ("embed",),
            _norm_init(a),
            name="model.norm.weight",
            trained=trained,
        ),
        lm_head=lm_head,
        layer_embedding=_layer_embedding_specs(a) if a.layer_embedding_size else None,
    )


def value_head_spec(a: Architecture) -> ParamSpec:
    """Returns the spec of a head that gives one number, [D, 1]."""
    # An adapter has no part of it: a new head must be trained whole. From zeros all values are 0 at
    # first.
    return ParamSpec(
        (a.hidden_size, 1), ("embed", None), init="zeros", transposed=True, name="score.weight"
    )


def _layer_embedding_specs(a: Architecture) -> LayerEmbedding:
    """Returns the specs of the embeddings that layers have for themselves."""
    trained = a.adapter is None
    width = a.num_layers * a.layer_embedding_size
    return LayerEmbedding(
        tokens=ParamSpec(
            (a.vocab_size, width),
            ("vocab", "embed"),
            name="model.embed_tokens_per_layer.weight",
            trained=trained,
        ),
        projection=ParamSpec(
            (a.hidden_size, width),
            ("embed", None),
            transposed=True,
            is_product=True,
            name="model.per_layer_model_projection.weight",
            trained=trained,
        ),
        norm=ParamSpec(
            (a.layer_embedding_size,),
            (None,),
            _norm_init(a),
            name="model.per_layer_projection_norm.weight",
            trained=trained,
        ),
    )


def _block_specs(a: Architecture) -> Block | Stacks:
    """Returns the specs of the parameters of all layers: one block if all are of one kind in one
    stack, else a block for each stack."""
    blocks = tuple(_stack_specs(a, stack) for stack in a.stacks)
    if len(blocks) == 1:
        return blocks[0]
    return Stacks(blocks, a.stack_layers)


def _stack_specs(a: Architecture, stack: Stack) -> Block:
    """Returns the specs of the parameters of a stack of layers, with None for what this kind of
    layer does not have."""
    layer = stack.layer
    hidden = a.hidden_size
    norm = partial(_norm_spec, a, stack)
    block = Block(
        attention_norm=norm("input_layernorm", hidden, "embed"),
        q=None,
        k=None,
        v=None,
        o=None,
        mlp_norm=norm("post_attention_layernorm", hidden, "embed"),
        gate=None,
        up=None,
        down=None,
    )
    if layer.feed_forward != "experts":
        block = replace(block, **_mlp_specs(a, stack, "mlp", a.intermediate_size_of(layer)))
    if layer.feed_forward != "mlp":
        block = replace(block, experts=_expert_specs(a, stack))
    # The expert that every token has.
    if layer.feed_forward == "experts" and a.experts and a.experts.shared_size:
        shared = _mlp_specs(a, stack, "mlp.shared_expert", a.experts.shared_size)
        block = replace(block, **shared)
    if a.post_norms:
        # With norms before and after, Gemma's files call the one after attention what others call
        # the one before the feed-forward part.
        block = replace(
            block,
            mlp_norm=norm("pre_feedforward_layernorm", hidden, "embed"),
            post_attention_norm=norm("post_attention_layernorm", hidden, "embed"),
            post_mlp_norm=norm("post_feedforward_layernorm", hidden, "embed"),
        )
    if a.layer_embedding_size:
        block = replace(block, layer_input=_layer_input_specs(a, stack))
    if a.layer_scale:
        # Its gradient is 0, so that no update changes it: see `block`.
        scale = _layer_spec(a, stack, "layer_scalar", (1,), (None,), init="ones")
        block = replace(block, layer_scale=scale)
    if layer.mixer == "delta_net":
        return replace(block, delta_net=_delta_net_specs(a, stack))
    return replace(block, **_attention_specs(a, stack))


def _mlp_specs(a: Architecture, stack: Stack, name: str, inner: int) -> dict[str, Any]:
    """Returns the specs of a gated MLP of width `inner`, by the names of `Block`'s fields. `name`
    is its name within a layer in files."""
    product = partial(_product_specs, a, stack, bias=a.mlp_bias)
    to_inner = partial(product, rows=a.hidden_size, columns=inner, axes=("embed", "mlp"))
    return {
        "gate": to_inner(f"{name}.gate_proj"),
        "up": to_inner(f"{name}.up_proj"),
        "down": product(
            f"{name}.down_proj",
            inner,
            a.hidden_size,
            axes=("mlp", "embed"),
            scale=_output_scale(a),
        ),
    }


def _expert_specs(a: Architecture, stack: Stack) -> ExpertWeights:
    """Returns the specs of a feed-forward part with experts, without the MLP next to them. Each
    expert's products have names of their own here, also where files hold all experts in one tensor
    (`shoal.weights.fused`)."""
    sizes = a.expert_sizes
    hidden = a.hidden_size
    inner = sizes.intermediate_size
    # Gemma 4's files have experts next to the MLP, not in it.
    router_name, experts_name = "mlp.gate", "mlp.experts"
    if stack.layer.feed_forward == "mlp+experts":
        router_name, experts_name = "router.proj", "experts"
    # Neither the router nor the shared expert's gate is quantised: they are small. Nor has the
    # router an adapter: in transformers' classes it is no linear module.
    of_layer = partial(_layer_spec, a, stack)
    router: Any = of_layer(f"{router_name}.weight", (hidden, sizes.num_experts), ("embed", None))
    router = replace(router, is_product=True)
    if sizes.router_bias:
        bias = of_layer(f"{router_name}.bias", (sizes.num_experts,), (None,), init="zeros")
        router = Biased(router, bias)
    shared_gate = None
    if sizes.shared_size:
        shared_gate = _product_specs(
            replace(a, quantised=""),
            stack,
            "mlp.shared_expert_gate",
            hidden,
            1,
            axes=("embed", None),
            bias=False,
        )
    specs_next_to_mlp: dict[str, ParamSpec] = {}
    if stack.layer.feed_forward == "mlp+experts":
        norm = partial(_norm_spec, a, stack, size=hidden, axis="embed")
        specs_next_to_mlp = {
            "norm": norm("pre_feedforward_layernorm_2"),
            "post_norm": norm("post_feedforward_layernorm_2"),
            "post_mlp_norm": norm("post_feedforward_layernorm_1"),
            "router_scale": of_layer("router.scale", (hidden,), ("embed",), init="ones"),
            "expert_scale": of_layer(
                "router.per_expert_scale", (sizes.num_experts,), (None,), init="ones"
            ),
        }
    product = partial(_product_specs, a, stack, bias=sizes.bias, experts=sizes.num_experts)
    to_inner = partial(product, rows=hidden, columns=inner, axes=("embed", "mlp"))
    return ExpertWeights(
        router=router,
        gate=to_inner(f"{experts_name}.{{expert}}.gate_proj"),
        up=to_inner(f"{experts_name}.{{expert}}.up_proj"),
        down=product(
            f"{experts_name}.{{expert}}.down_proj",
            inner,
            hidden,
            axes=("mlp", "embed"),
            scale=_output_scale(a),
        ),
        shared_gate=shared_gate,
        **specs_next_to_mlp,
    )


def _output_scale(a: Architecture) -> float:
    """Returns the factor of the first values of products that add to the residual stream: they
    start smaller, as in GPT-2."""
    return (2 * a.num_layers) ** -0.5


def _attention_specs(a: Architecture, stack: Stack) -> dict[str, Any]:
    """Returns the specs of attention's parameters, by the names of `Block`'s fields."""
    layer = stack.layer
    hidden = a.hidden_size
    head_dim = a.head_dim_of(layer)
    key_heads = a.kv_heads_of(layer)
    queries = a.num_heads * head_dim
    keys = key_heads * head_dim
    product = partial(_product_specs, a, stack)
    to_keys = partial(product, axes=("embed", "heads"), bias=a.qkv_bias, heads=key_heads)
    specs: dict[str, Any] = {
        "q": product(
            "self_attn.q_proj",
            hidden,
            # the gate of each head is next to its query
            2 * queries if a.output_gate else queries,
            axes=("embed", "heads"),
            bias=a.qkv_bias,
            heads=a.num_heads,
        ),
        "o": product(
            "self_attn.o_proj",
            queries,
            hidden,
            axes=("heads", "embed"),
            bias=a.output_bias,
            scale=_output_scale(a),
            heads=a.num_heads,
        ),
    }
    has_keys = layer.keys_of is None
    if has_keys:
        specs["k"] = to_keys("self_attn.k_proj", hidden, keys)
    if has_keys and not layer.values_are_keys:
        specs["v"] = to_keys("self_attn.v_proj", hidden, keys)
    if a.qk_norm:
        specs["q_norm"] = _norm_spec(a, stack, "self_attn.q_norm", head_dim, None)
    if a.qk_norm and has_keys:
        specs["k_norm"] = _norm_spec(a, stack, "self_attn.k_norm", head_dim, None)
    if a.sinks:
        specs["sinks"] = _layer_spec(
            a,
            stack,
            "self_attn.sinks",
            (a.num_heads,),
            ("heads",),
            init="zeros",
            heads=a.num_heads,
        )
    return specs


def _layer_input_specs(a: Architecture, stack: Stack) -> LayerInputWeights:
    """Returns the specs of the parameters with which layers add embeddings of their own."""
    size = a.layer_embedding_size
    product = partial(_product_specs, a, stack, bias=False)
    return LayerInputWeights(
        # The embedding is too narrow to be split.
        gate=product("per_layer_input_gate", a.hidden_size, size, axes=("embed", None)),
        projection=product(
            "per_layer_projection",
            size,
            a.hidden_size,
            axes=(None, "embed"),
            scale=_output_scale(a),
        ),
        norm=_norm_spec(a, stack, "post_per_layer_input_norm", a.hidden_size, "embed"),
    )


def _delta_net_specs(a: Architecture, stack: Stack) -> DeltaNetWeights:
    """Returns the specs of a gated delta net's parameters."""
    sizes = a.delta_net_sizes
    hidden = a.hidden_size
    value_heads = sizes.num_value_heads
    product = partial(_product_specs, a, stack, bias=False)
    to_values = partial(product, axes=("embed", "heads"), heads=value_heads)
    of_value_heads = partial(
        _layer_spec, a, stack, shape=(value_heads,), axes=("heads",), heads=value_heads
    )
    return DeltaNetWeights(
        qkv=product(
            "linear_attn.in_proj_qkv",
            hidden,
            sizes.conv_width,
            axes=("embed", "heads"),
            # Its columns are those of queries, keys and values, each a multiple of these heads.
            heads=sizes.num_key_heads,
        ),
        z=to_values("linear_attn.in_proj_z", hidden, sizes.value_width),
        b=to_values("linear_attn.in_proj_b", hidden, value_heads),
        a=to_values("linear_attn.in_proj_a", hidden, value_heads),
        convolution=_layer_spec(
            a,
            stack,
            "linear_attn.conv1d.weight",
            (sizes.conv_width, 1, sizes.conv_size),
            (None, None, None),
            init="uniform",
            scale=(3 * sizes.conv_size) ** -0.5 / INIT_STDDEV,
        ),
        dt_bias=of_value_heads("linear_attn.dt_bias", init="ones"),
        a_log=of_value_heads("linear_attn.A_log", init="log_uniform"),
        norm=_layer_spec(
            a, stack, "linear_attn.norm.weight", (sizes.value_dim,), (None,), init="ones"
        ),
        out=product(
            "linear_attn.out_proj",
            sizes.value_width,
            hidden,
            axes=("heads", "embed"),
            scale=_output_scale(a),
            heads=value_heads,
        ),
    )


def _layer_spec(
    a: Architecture,
    stack: Stack,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Any = "normal",
    scale: float = 1.0,
    heads: int = 0,
    experts: int = 0,
) -> ParamSpec:
    """Returns the spec of a parameter of a stack of layers. `shape` and `axes` are those of
    one layer, with `experts` above 0 those of each of so many experts; `name` follows
    `model.layers.{layer}.` in files, which hold matrices transposed. `init` is "normal", "uniform",
    "ones" or "zeros". `scale` multiplies the standard deviation of 0.02 of its first values. Not
    trained if the model has an adapter. `heads` is the number of heads that a dimension over the
    axis `heads` consists of."""
    indices = ("layer",)
    transposed = len(shape) == 2
    if experts:
        indices = ("layer", "expert")
        shape = (experts, *shape)
        axes = ("experts", *axes)
    return ParamSpec(
        shape=(len(stack.numbers), *shape),
        axes=("layers", *axes),
        init=init,
        stddev=INIT_STDDEV * scale,
        heads=heads,
        indices=indices,
        layers=stack.numbers,
        transposed=transposed,
        name=f"model.layers.{{layer}}.{name}",
        trained=a.adapter is None,
    )


def _norm_spec(a: Architecture, stack: Stack, name: str, size: int, axis: str | None) -> ParamSpec:
    """Returns the spec of a norm's weight."""
    return _layer_spec(a, stack, f"{name}.weight", (size,), (axis,), init=_norm_init(a))


def _norm_init(a: Architecture) -> Literal["ones", "zeros"]:
    """Returns how a norm's weight is initialised: as a factor of 1."""
    return "zeros" if a.norm == "one_plus_weight" else "ones"


def _product_specs(
    a: Architecture,
    stack: Stack,
    name: str,
    rows: int,
    columns: int,
    axes: tuple[str | None, str | None],
    bias: bool,
    scale: float = 1.0,
    heads: int = 0,
    experts: int = 0,
) -> Any:
    """Returns the specs of a product of a stack, in the tree that `linear` takes: the spec of its
    kernel[rows, columns], put into a `Quantised` if the architecture is quantised, that into
    an `Adapted` if an adapter targets it, and that into a `Biased` if `bias` is set.

    `name` is the product's name within a layer in files, like `mlp.up_proj`. `axes` are the logical
    axes of rows and columns. `scale` multiplies the standard deviation of the kernel's first
    values. `heads` is the number of heads that the dimension over the axis `heads` consists of; 0
    if there is none. With `experts` above 0 the product is that of each of so many experts, whose
    number stands in the name as `{expert}`.
    """
    _, column_axis = axes
    of_layer = partial(_layer_spec, a, stack, heads=heads, experts=experts)
    kernel: Any = of_layer(f"{name}.weight", (rows, columns), axes, scale=scale)
    kernel = replace(kernel, is_product=True)
    if a.quantised:
        scales = of_layer(f"{name}.weight_scale", (columns,), (column_axis,), init="ones")
        kernel = Quantised(replace(kernel, dtype=a.quantised), replace(scales, dtype="float32"))
    if a.adapter is not None and target_of(name) in a.adapter.targets:
        kernel = _adapted_specs(a, stack, kernel, name, (rows, columns), axes, heads, experts)
    if not bias:
        return kernel
    return Biased(kernel, of_layer(f"{name}.bias", (columns,), (column_axis,), init="zeros"))


def _adapted_specs(
    a: Architecture,
    stack: Stack,
    kernel: Any,
    name: str,
    shape: tuple[int, int],
    axes: tuple[str | None, str | None],
    heads: int,
    experts: int,
) -> Adapted:
    """Returns the specs of a product with an adapter; the other arguments are those of
    `_product_specs`.

    On experts it is as PEFT has it (its `ParamWrapper`): gate and up have one first matrix, which
    is in the place of gate's, and files hold the second as [columns, rank, E].
    """
    adapter = a.adapter
    assert adapter is not None
    rows, columns = shape
    row_axis, column_axis = axes
    first_name = f"{name}.lora_A.weight"
    second_name = f"{name}.lora_B.weight"
    place, _, product = name.partition(".{expert}.")
    if experts:
        parameter = target_of(name).removeprefix("experts.")
        first_name = f"{place}.{{expert}}.{parameter}.lora_A.weight"
        second_name = f"{place}.{product}.lora_B.weight"
    of_layer = partial(_layer_spec, a, stack, heads=heads, experts=experts)
    first = of_layer(
        first_name,
        (rows, adapter.rank),
        (row_axis, None),
        init="uniform",
        scale=1 / INIT_STDDEV * (3 * rows) ** -0.5,  # bound 1 / sqrt(rows), like PEFT's
    )
    second = of_layer(second_name, (adapter.rank, columns), (None, column_axis), init="zeros")
    first = replace(first, name=ADAPTER_PREFIX + first.name, trained=True, is_product=True)
    second = replace(second, name=ADAPTER_PREFIX + second.name, trained=True, is_product=True)
    if not experts:
        return Adapted(kernel, first, second, adapter.scale)
    second = replace(second, indices=("layer",), transposed=False, experts_last=True)
    return Adapted(kernel, None if product == "up_proj" else first, second, adapter.scale)


def target_of(name: str) -> str:
    """Returns what an adapter's targets call a product with this name in files: its last part, for
    experts that of the parameter in transformers' class which holds all of them.

    >>> target_of("mlp.up_proj"), target_of("mlp.experts.{expert}.up_proj")
    ('up_proj', 'experts.gate_up_proj')
    """
    place, _, product = name.rpartition(".")
    _, _, inner = place.rpartition(".")
    if inner != "{expert}":
        return product
    return "experts.down_proj" if product == "down_proj" else "experts.gate_up_proj"


def kernel_specs(a: Architecture) -> list[ParamSpec]:
    """Returns the specs of the kernels that the layers' products have, each for a stack of layers,
    and of that which makes the layers' own embeddings; none of an adapter."""
    specs = param_specs(a.base)
    leaves = jax.tree.leaves((specs.blocks, specs.layer_embedding))
    return [spec for spec in leaves if spec.is_product]


def active_size(a: Architecture, spec: ParamSpec) -> int:
    """Returns the elements of a parameter that take part in one token's computation: of experts
    those of the `experts_per_token` that each token has, of any other parameter all."""
    size = math.prod(spec.shape)
    if spec.num_experts == 1:
        return size
    return size // spec.num_experts * a.expert_sizes.experts_per_token


def trained_specs(a: Architecture) -> Parameters:
    """Returns the `param_specs` of the trained parameters, with None in place of the others; JAX's
    trees have no leaf there."""
    trained = trained_of(param_specs(a))
    if a.shares_layers:
        of_others = jax.tree.map(lambda spec: None, trained)
        return replace(of_others, lm_head=trained.lm_head)
    return trained


def trained_of(specs: Any) -> Any:
    """Returns a tree of `ParamSpec`s with None in place of those that are not trained."""

    def if_trained(spec: ParamSpec) -> ParamSpec | None:
        return spec if spec.trained else None

    return jax.tree.map(if_trained, specs)


def frozen_specs(a: Architecture) -> Parameters | None:
    """Returns the `param_specs` of the frozen parameters, with None in place of the others; None if
    all parameters are trained, or if those that are not are another model's."""
    if not a.adapter or a.shares_layers:
        return None

    def if_frozen(spec: ParamSpec) -> ParamSpec | None:
        return None if spec.trained else spec

    return jax.tree.map(if_frozen, param_specs(a))


def _is_none(leaf: Any) -> bool:
    return leaf is None


def select(present: Any, tree: Any) -> Any:
    """Returns `tree`, which has an entry for each parameter, with None wherever `present` (for
    example `trained_specs` or `frozen_specs`) has None. None if `present` is None. The leaves are
    not copied."""
    if present is None:
        return None

    def selected(present_leaf: Any, leaf: Any) -> Any:
        return None if present_leaf is None else leaf

    return jax.tree.map(selected, present, tree, is_leaf=_is_none)


def joined(part: Any, other: Any) -> Any:
    """Joins two trees of `select` to one: each leaf is that of `part`, or that of `other` where
    `part` has None. `other` may be None as a whole: the result is then `part`. The leaves are not
    copied."""
    if other is None:
        return part

    def present(leaf: Any, other_leaf: Any) -> Any:
        return other_leaf if leaf is None else leaf

    return jax.tree.map(present, part, other, is_leaf=_is_none)


def without_adapter(a: Architecture, parameters: Parameters) -> Parameters:
    """Returns the parameters of the base model, without the adapter's: the same arrays in the tree
    of `a.base`. Returns `parameters` itself if the architecture has no adapter."""
    if not a.adapter:
        return parameters
    # None is no leaf: these are the base model's arrays, in the order of its tree.
    frozen = jax.tree.leaves(select(frozen_specs(a), parameters))
    return jax.tree.unflatten(jax.tree.structure(param_specs(a.base)), frozen)


def as_frozen(a: Architecture, base: Parameters) -> Parameters:
    """Returns the base model's parameters in the tree of the architecture with its adapter, with
    None in place of the adapter's parameters: the inverse of `without_adapter`. Only for an
    architecture with an adapter."""
    return jax.tree.unflatten(jax.tree.structure(frozen_specs(a)), jax.tree.leaves(base))


def shardings(a: Architecture, role: Role) -> Parameters:
    """Returns a NamedSharding for every parameter of an architecture."""
    return shardings_of(param_specs(a), role)


def shardings_of(specs: Any, role: Role) -> Any:
    """Returns a NamedSharding for every `ParamSpec` in a tree."""

    def sharding(spec: ParamSpec) -> NamedSharding:
        return spec.sharding(role)

    return jax.tree.map(sharding, specs)


def param_shapes(specs: Any, role: Role, dtype: Any) -> Any:
    """Returns shape, type and sharding of each parameter in a tree of `ParamSpec`, as
    ShapeDtypeStructs; nothing is allocated. `dtype` is for the specs that name no type
    themselves."""

    def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        held = jnp.dtype(spec.dtype or dtype)
        return jax.ShapeDtypeStruct(spec.shape, held, sharding=spec.sharding(role))

    return jax.tree.map(shape, specs)


Keep = Callable[[ParamSpec, jax.Array], Any]
"""(a parameter's spec, its array as it was read) -> what takes the array's place."""


def keep_as_read(spec: ParamSpec, array: jax.Array) -> Any:
    """Returns the array as it is: the `Keep` that changes nothing."""
    return array


def quantised_specs(a: Architecture) -> dict[str, Quantised]:
    """Returns the specs of an architecture's quantised weights, by the `ParamSpec.key` of the
    kernel that each replaces. Empty if the architecture is not quantised."""

    def is_quantised(weight: Any) -> bool:
        return isinstance(weight, Quantised)

    by_name: dict[str, Quantised] = {}
    for weight in jax.tree.leaves(param_specs(a), is_leaf=is_quantised):
        if isinstance(weight, Quantised):
            by_name[weight.values.key] = weight
    return by_name


def quantiser(a: Architecture, role: Role) -> Keep:
    """Returns a `Keep` for reading weights of an architecture with quantised kernels: it replaces
    each of these by its `Quantised`, and returns any other array as it was read. If no kernel of
    the architecture is quantised, it returns every array as it was read."""
    by_name = quantised_specs(a)

    def keep(spec: ParamSpec, array: jax.Array) -> Any:
        """Quantises the array, on the devices that hold it, if its parameter is a quantised kernel;
        else returns the array itself."""
        if spec.key not in by_name:
            return array
        layout = shardings_of(by_name[spec.key], role)
        return role.jit(partial(quantise, dtype=a.quantised), out_shardings=layout)(array)

    return keep


def check_mesh(a: Architecture, role: Role) -> None:
    """Raises ShoalError unless the mesh divides the model's heads, feed-forward size, hidden size
    and number of experts, in all kinds of layers. The first two are divided by `tensor`, the hidden
    size by `fsdp` times `expert` times `context`, the experts by the devices that they are split
    over. Also if `context` would split rows of a model with delta nets, whose states follow a row
    from its beginning to its end.

    Key/value heads may be fewer than `tensor` if `tensor` is a multiple of their number: they are
    then repeated in groups. A vocabulary that `tensor` does not divide is whole on each device (a
    warning at the start of a run says so).
    """
    tensor = role.tensor
    fsdp = role.mesh.shape.get("fsdp", 1)
    expert = role.mesh.shape.get("expert", 1)
    context = role.context
    on = "mesh.reference: " if role.name == "reference" else "mesh."
    key = "mesh.sampler_tensor (or mesh.tensor)" if role.name == "sampler" else f"{on}tensor"
    use = f"use {listed(tensor_sizes(a, role.mesh.size))}"
    for name, size in _sizes_by_tensor(a):
        if size % tensor:
            raise ShoalError(
                f"{key}={tensor} does not divide the model's {name}={size}; {use}", "mesh.tensor"
            )
    for num_heads in _key_heads(a):
        if not _key_heads_fit(num_heads, tensor):
            raise ShoalError(
                f"{key}={tensor} neither divides the model's num_key_value_heads={num_heads} nor "
                f"is a multiple of it; {use}",
                "mesh.tensor",
            )
    if context > 1 and a.delta_net:
        raise ShoalError(
            f"{on}context={context}: a row cannot be split over devices in a model with linear "
            "attention, whose states are computed token after token; use mesh.context=1",
            "mesh.context",
        )
    if a.experts and a.experts.num_experts % role.expert:
        if role.expert_axis == "tensor":  # in a sampler
            wrong, named = key, "mesh.sampler_tensor"
        else:
            wrong, named = f"{on}expert", "mesh.expert"
        sizes = listed_divisors(a.experts.num_experts, role.mesh.size)
        raise ShoalError(
            f"{wrong}={role.expert} does not divide the model's "
            f"num_experts={a.experts.num_experts}; use {sizes}",
            named,
        )
    split_sizes = {"hidden_size": a.hidden_size}
    if a.layer_embedding_size:
        width = a.num_layers * a.layer_embedding_size
        split_sizes["num_hidden_layers x hidden_size_per_layer_input"] = width
    for name, size in split_sizes.items():
        if size % (fsdp * expert * context):
            # "" for an axis of one device
            others = f" x mesh.expert={expert}" * (expert > 1)
            others += f" x mesh.context={context}" * (context > 1)
            raise ShoalError(
                f"{on}fsdp={fsdp}{others} does not divide the model's {name}={size}; use "
                f"{listed_divisors(size, role.mesh.size)}",
                "mesh.fsdp",
            )


def tensor_sizes(a: Architecture, count: int) -> list[int]:
    """Returns the sizes of `tensor` that divide `count` devices and that this model can be split
    by. In rising order; 1 is always among them."""
    sizes = []
    for size in range(1, count + 1):
        divides_all = count % size == 0
        divides_all &= all(of_model % size == 0 for _, of_model in _sizes_by_tensor(a))
        if divides_all and all(_key_heads_fit(num_heads, size) for num_heads in _key_heads(a)):
            sizes.append(size)
    return sizes


def _sizes_by_tensor(a: Architecture) -> list[tuple[str, int]]:
    """Returns (its name in config.json, the size) of all sizes that `tensor` must divide, without
    those of key/value heads."""
    sizes = [("num_attention_heads", a.num_heads)]
    for layer in a.kinds:
        if layer.feed_forward != "experts":
            sizes.append(("intermediate_size", a.intermediate_size_of(layer)))
    if a.experts:
        sizes.append(("moe_intermediate_size", a.experts.intermediate_size))
        sizes.append(("shared_expert_intermediate_size", a.experts.shared_size))
    if a.delta_net:
        sizes.append(("linear_num_key_heads", a.delta_net.num_key_heads))
        sizes.append(("linear_num_value_heads", a.delta_net.num_value_heads))
    return sizes


def _key_heads(a: Architecture) -> set[int]:
    """Returns the numbers of key/value heads of the model's kinds of layers."""
    return {a.kv_heads_of(layer) for layer in a.kinds if layer.mixer == "attention"}


def _key_heads_fit(num_heads: int, tensor: int) -> bool:
    """True if so many key/value heads can be split over `tensor` devices, or repeated on them."""
    return num_heads % tensor == 0 or tensor % num_heads == 0


def initialise(a: Architecture, seed: int, role: Role) -> Parameters:
    """Returns random float32 parameters, created on the devices that hold them."""
    return initialise_specs(param_specs(a), seed, role)


def initialise_specs(specs: Any, seed: int, role: Role) -> Any:
    """Returns first values for a tree of `ParamSpec`, float32 arrays of random numbers, ones or
    zeros by each spec's `init`, created on the devices that hold them. The seed of each array is
    `seed` folded with the leaf's number in the tree."""
    leaves, structure = jax.tree.flatten(specs)

    def make() -> Any:
        """Makes all arrays; compiled, so that each is created on the devices that hold it."""
        arrays = []
        for number, spec in enumerate(leaves):
            key = jax.random.fold_in(jax.random.key(seed), number)
            arrays.append(_initial(spec, key))
        return jax.tree.unflatten(structure, arrays)

    return role.jit(make, out_shardings=shardings_of(specs, role))()


def _initial(spec: ParamSpec, key: jax.Array) -> jax.Array:
    """Returns the initial values of one parameter, float32: ones, zeros, or random values with the
    spec's standard deviation, normal or uniform around 0."""
    if spec.init == "ones":
        return jnp.ones(spec.shape)
    if spec.init == "zeros":
        return jnp.zeros(spec.shape)
    if spec.init == "normal":
        return jax.random.normal(key, spec.shape) * spec.stddev
    if spec.init == "log_uniform":
        return jnp.log(jax.random.uniform(key, spec.shape, minval=1e-3, maxval=16.0))
    # Uniform numbers from -b to b have the standard deviation b / sqrt(3).
    bound = 3**0.5 * spec.stddev
    return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)
