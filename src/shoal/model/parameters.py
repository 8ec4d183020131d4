"""The parameters of a model, each declared once: shape, logical axes, initialisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shoal.mesh import Role, listed, listed_divisors
from shoal.model.architecture import Architecture
from shoal.model.linear import Adapted, Biased, Quantised, quantise
from shoal.records import ShoalError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """Parameters of one layer, or of all L stacked along a first dimension."""

    attention_norm: Any  # [D]
    q: Any  # [D, H*A]; in decoding [D, (H + 2*K)*A] where k and v are None
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
    # a Block whose leaves have L in front; or, where a sampler reads layers apart, L Blocks
    blocks: Any
    final_norm: Any  # [D]
    lm_head: Any = None  # [D, V]; None where tied to the embedding


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, the logical axes of its dimensions, its initialisation, and how
    Hugging Face's files hold it. A leaf of JAX's trees."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "uniform", "ones", "zeros"] = "normal"
    stddev: float = 0.02
    heads: int = 0  # that a dimension over `heads` is made of
    transposed: bool = False  # files hold kernels as [out, in]
    name: str = field(default="", compare=False)  # of its tensors; `{layer}` is the layer's number
    # else frozen: in the type of the computation, without gradient and moments
    trained: bool = True
    # on devices, whatever the computation's is; empty: that one's, or float32 of what is trained
    dtype: str = ""

    @property
    def stacked(self) -> bool:
        """True for all layers' in one array; files hold a tensor for each."""
        return self.axes[0] == "layers"

    @property
    def num_layers(self) -> int:
        """Layers that it holds; 1 where it belongs to none."""
        return self.shape[0] if self.stacked else 1

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one layer's part."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def tensor_names(self) -> list[str]:
        return [self.name.format(layer=layer) for layer in range(self.num_layers)]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each of its tensors in files."""
        return self.layer_shape[::-1] if self.transposed else self.layer_shape

    @property
    def is_vector(self) -> bool:
        return len(self.layer_shape) == 1

    @property
    def file_shape(self) -> tuple[int, int, int]:
        """Layers (1 if it has none), rows, columns (1 for a vector) of its tensors in files."""
        if self.is_vector:
            return self.num_layers, self.tensor_shape[0], 1
        rows, columns = self.tensor_shape
        return self.num_layers, rows, columns

    def from_file(self, values: Any) -> Any:
        """[layers, rows, columns] -> the parameter's own dimensions."""
        if self.transposed:
            values = values.swapaxes(1, 2)
        if self.is_vector:
            values = values[..., 0]
        return values if self.stacked else values[0]

    def to_file(self, values: Any) -> Any:
        """The way back."""
        if not self.stacked:
            values = values[None]
        if self.is_vector:
            values = values[..., None]
        return values.swapaxes(1, 2) if self.transposed else values

    def sharding(self, role: Role) -> NamedSharding:
        return role.sharding(self.axes_on(role), self.shape)

    def axes_on(self, role: Role) -> tuple[str | None, ...]:
        """The axes that a role splits, by whole heads. Key/value heads fewer than `tensor`, and a
        vocabulary that it does not divide (a resized embedding may have any size), are whole on
        each of its devices: None."""
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
"""Before the names of an adapter's tensors in PEFT's files."""


def param_specs(a: Architecture) -> Parameters:
    """Every parameter of an architecture: `Parameters` with `ParamSpec` leaves, the one place that
    declares them.

    An adapter's have the names of PEFT's files. With one, all others are frozen."""
    trained = a.adapter is None
    lm_head = None
    if not a.tie_embeddings:
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
            (a.hidden_size,), ("embed",), "ones", name="model.norm.weight", trained=trained
        ),
        lm_head=lm_head,
    )


def _block_specs(a: Architecture) -> Block:
    """The parameters of all layers, stacked."""
    hidden = a.hidden_size
    inner = a.intermediate_size
    queries = a.num_heads * a.head_dim
    keys = a.num_kv_heads * a.head_dim
    # Outputs to the residual stream start smaller, as in GPT-2.
    depth = (2 * a.num_layers) ** -0.5
    product = partial(_product_specs, a)
    norm = partial(_norm_spec, a)
    to_queries = partial(product, axes=("embed", "heads"), bias=a.qkv_bias, heads=a.num_heads)
    to_keys = partial(product, axes=("embed", "heads"), bias=a.qkv_bias, heads=a.num_kv_heads)
    to_inner = partial(product, axes=("embed", "mlp"), bias=a.mlp_bias)
    q_norm = None
    k_norm = None
    if a.qk_norm:
        q_norm = norm("self_attn.q_norm", a.head_dim, None)
        k_norm = norm("self_attn.k_norm", a.head_dim, None)
    return Block(
        attention_norm=norm("input_layernorm", hidden, "embed"),
        q=to_queries("self_attn.q_proj", hidden, queries),
        k=to_keys("self_attn.k_proj", hidden, keys),
        v=to_keys("self_attn.v_proj", hidden, keys),
        o=product(
            "self_attn.o_proj",
            queries,
            hidden,
            axes=("heads", "embed"),
            bias=a.output_bias,
            scale=depth,
            heads=a.num_heads,
        ),
        mlp_norm=norm("post_attention_layernorm", hidden, "embed"),
        gate=to_inner("mlp.gate_proj", hidden, inner),
        up=to_inner("mlp.up_proj", hidden, inner),
        down=product(
            "mlp.down_proj", inner, hidden, axes=("mlp", "embed"), bias=a.mlp_bias, scale=depth
        ),
        q_norm=q_norm,
        k_norm=k_norm,
    )


def _layer_spec(
    a: Architecture,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Any = "normal",
    scale: float = 1.0,
    heads: int = 0,
) -> ParamSpec:
    """A parameter of each layer, stacked; `shape` and `axes` are one layer's."""
    return ParamSpec(
        shape=(a.num_layers, *shape),
        axes=("layers", *axes),
        init=init,
        stddev=0.02 * scale,
        heads=heads,
        transposed=len(shape) == 2,
        name=f"model.layers.{{layer}}.{name}",
        trained=a.adapter is None,
    )


def _norm_spec(a: Architecture, name: str, size: int, axis: str | None) -> ParamSpec:
    return _layer_spec(a, f"{name}.weight", (size,), (axis,), init="ones")


def _product_specs(
    a: Architecture,
    name: str,
    rows: int,
    columns: int,
    axes: tuple[str, str],
    bias: bool,
    scale: float = 1.0,
    heads: int = 0,
) -> Any:
    """A kernel[rows, columns] of each layer, with what belongs to it: scales in 8 bits, an adapter,
    a bias."""
    row_axis, column_axis = axes
    kernel: Any = _layer_spec(a, f"{name}.weight", (rows, columns), axes, scale=scale, heads=heads)
    if a.quantised:
        scales = _layer_spec(
            a, f"{name}.weight_scale", (columns,), (column_axis,), init="ones", heads=heads
        )
        kernel = Quantised(replace(kernel, dtype=a.quantised), replace(scales, dtype="float32"))
    adapter = a.adapter
    _, _, target = name.rpartition(".")
    if adapter is not None and target in adapter.targets:
        down = _layer_spec(
            a,
            f"{name}.lora_A.weight",
            (rows, adapter.rank),
            (row_axis, None),
            init="uniform",
            scale=50 * (3 * rows) ** -0.5,
            heads=heads,
        )
        up = _layer_spec(
            a,
            f"{name}.lora_B.weight",
            (adapter.rank, columns),
            (None, column_axis),
            init="zeros",
            heads=heads,
        )
        down = replace(down, name=ADAPTER_PREFIX + down.name, trained=True)
        up = replace(up, name=ADAPTER_PREFIX + up.name, trained=True)
        kernel = Adapted(kernel, down, up, adapter.scale)
    if not bias:
        return kernel
    bias_spec = _layer_spec(
        a, f"{name}.bias", (columns,), (column_axis,), init="zeros", heads=heads
    )
    return Biased(kernel, bias_spec)


def classifier_specs(a: Architecture) -> Parameters:
    """The `param_specs` of a sequence classifier with one label: its head is in place of that of
    logits."""
    head = ParamSpec((a.hidden_size, 1), ("embed", None), transposed=True, name="score.weight")
    return replace(param_specs(a), lm_head=head)


def trained_specs(a: Architecture) -> Parameters:
    """The `param_specs` that are trained, None in place of the others: leaves that JAX's trees do
    not have."""
    return trained_of(param_specs(a))


def trained_of(specs: Any) -> Any:
    """The `ParamSpec`s of a tree that are trained, None in place of the others."""

    def if_trained(spec: ParamSpec) -> ParamSpec | None:
        return spec if spec.trained else None

    return jax.tree.map(if_trained, specs)


def frozen_specs(a: Architecture) -> Parameters | None:
    """The `param_specs` that are not trained; None where all are trained."""
    if not a.adapter:
        return None

    def if_frozen(spec: ParamSpec) -> ParamSpec | None:
        return None if spec.trained else spec

    return jax.tree.map(if_frozen, param_specs(a))


def _is_none(leaf: Any) -> bool:
    return leaf is None


def select(specs: Any, tree: Any) -> Any:
    """The leaves of a tree of parameters that `trained_specs` or `frozen_specs` have."""
    if specs is None:
        return None

    def selected(spec: ParamSpec | None, leaf: Any) -> Any:
        return None if spec is None else leaf

    return jax.tree.map(selected, specs, tree, is_leaf=_is_none)


def joined(part: Any, other: Any) -> Any:
    """The whole of two parts; `other` may be None, without any."""
    if other is None:
        return part

    def present(leaf: Any, other_leaf: Any) -> Any:
        return other_leaf if leaf is None else leaf

    return jax.tree.map(present, part, other, is_leaf=_is_none)


def without_adapter(a: Architecture, parameters: Parameters) -> Parameters:
    """The parameters of the base of an architecture: the same arrays."""
    if not a.adapter:
        return parameters
    frozen = jax.tree.leaves(select(frozen_specs(a), parameters))
    return jax.tree.unflatten(jax.tree.structure(param_specs(a.base)), frozen)


def as_frozen(a: Architecture, base: Parameters) -> Parameters:
    """The parameters of the base of an architecture where its adapter has them, None in place of
    the adapter's."""
    return jax.tree.unflatten(jax.tree.structure(frozen_specs(a)), jax.tree.leaves(base))


def shardings(a: Architecture, role: Role) -> Parameters:
    """A NamedSharding for every parameter."""
    return shardings_of(param_specs(a), role)


def shardings_of(specs: Any, role: Role) -> Any:
    """A NamedSharding for every parameter in a tree of `ParamSpec`."""

    def sharding(spec: ParamSpec) -> NamedSharding:
        return spec.sharding(role)

    return jax.tree.map(sharding, specs)


def param_shapes(specs: Any, role: Role, dtype: Any) -> Any:
    """Shapes, type and layout on a role's devices of the parameters in a tree of `ParamSpec`;
    nothing is allocated."""

    def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        held = jnp.dtype(spec.dtype or dtype)
        return jax.ShapeDtypeStruct(spec.shape, held, sharding=spec.sharding(role))

    return jax.tree.map(shape, specs)


Keep = Callable[[ParamSpec, jax.Array], Any]
"""(a parameter, its array as it was read) -> what takes the array's place."""


def keep_as_read(spec: ParamSpec, array: jax.Array) -> Any:
    """The `Keep` that takes each array as it is."""
    return array


def quantised_specs(a: Architecture) -> dict[str, Quantised]:
    """The quantised weights of an architecture, by the name of the kernel in whose place they
    are."""

    def is_quantised(weight: Any) -> bool:
        return isinstance(weight, Quantised)

    by_name: dict[str, Quantised] = {}
    for weight in jax.tree.leaves(param_specs(a), is_leaf=is_quantised):
        if isinstance(weight, Quantised):
            by_name[weight.values.name] = weight
    return by_name


def quantiser(a: Architecture, role: Role) -> Keep:
    """A `Keep` that quantises the kernels that `param_specs` of the architecture has quantised."""
    by_name = quantised_specs(a)

    def keep(spec: ParamSpec, array: jax.Array) -> Any:
        if spec.name not in by_name:
            return array
        layout = shardings_of(by_name[spec.name], role)
        return role.jit(partial(quantise, dtype=a.quantised), out_shardings=layout)(array)

    return keep


def check_mesh(a: Architecture, role: Role) -> None:
    """ShoalError unless the mesh divides the model's heads, feed-forward size and hidden size.

    Key/value heads may be fewer than `tensor`, which is then a multiple of theirs: they are
    repeated in groups. A vocabulary that does not divide is whole on each device (a warning at the
    head of a run says so).
    """
    tensor = role.tensor
    fsdp = role.mesh.shape.get("fsdp", 1)
    context = role.context
    on = "mesh.reference: " if role.name == "reference" else "mesh."
    key = "mesh.sampler_tensor (or mesh.tensor)" if role.name == "sampler" else f"{on}tensor"
    use = f"use {listed(tensor_sizes(a, role.mesh.size))}"
    sizes = {"num_attention_heads": a.num_heads, "intermediate_size": a.intermediate_size}
    for name, size in sizes.items():
        if size % tensor:
            raise ShoalError(
                f"{key}={tensor} does not divide the model's {name}={size}; {use}", "mesh.tensor"
            )
    if tensor not in tensor_sizes(a, tensor):
        raise ShoalError(
            f"{key}={tensor} neither divides the model's num_key_value_heads={a.num_kv_heads} nor "
            f"is a multiple of it; {use}",
            "mesh.tensor",
        )
    if a.hidden_size % (fsdp * context):
        both = f" x mesh.context={context}" * (context > 1)
        raise ShoalError(
            f"{on}fsdp={fsdp}{both} does not divide the model's hidden_size={a.hidden_size}; use "
            f"{listed_divisors(a.hidden_size, role.mesh.size)}",
            "mesh.fsdp",
        )


def tensor_sizes(a: Architecture, count: int) -> list[int]:
    """The sizes of `tensor` into which a model, and so many devices, can be divided."""
    sizes = []
    for size in range(1, count + 1):
        divides_all = not (count % size or a.num_heads % size or a.intermediate_size % size)
        key_heads_fit = a.num_kv_heads % size == 0 or size % a.num_kv_heads == 0
        if divides_all and key_heads_fit:
            sizes.append(size)
    return sizes


def initialise(a: Architecture, seed: int, role: Role) -> Parameters:
    """Random float32 parameters, created on the devices that hold them."""
    return initialise_specs(param_specs(a), seed, role)


def initialise_specs(specs: Any, seed: int, role: Role) -> Any:
    """Random float32 arrays for a tree of `ParamSpec`, on the devices that hold them. A leaf's
    number in the tree seeds it."""
    leaves, structure = jax.tree.flatten(specs)

    def make() -> Any:
        arrays = []
        for number, spec in enumerate(leaves):
            key = jax.random.fold_in(jax.random.key(seed), number)
            arrays.append(_initial(spec, key))
        return jax.tree.unflatten(structure, arrays)

    return role.jit(make, out_shardings=shardings_of(specs, role))()


def _initial(spec: ParamSpec, key: jax.Array) -> jax.Array:
    if spec.init == "ones":
        return jnp.ones(spec.shape)
    if spec.init == "zeros":
        return jnp.zeros(spec.shape)
    if spec.init == "normal":
        return jax.random.normal(key, spec.shape) * spec.stddev
    bound = 3**0.5 * spec.stddev
    return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)
