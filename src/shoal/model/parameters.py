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
    trained: bool = (
        True  # else frozen: in the type of the computation, without gradient and moments
    )
    # on devices, whatever the computation's is; empty: that one's, or float32 of what is trained
    dtype: str = ""

    @property
    def stacked(self) -> bool:
        """True for all layers' in one array; files hold a tensor for each."""
        return self.axes[0] == "layers"

    @property
    def tensor_names(self) -> list[str]:
        return [
            self.name.format(layer=layer) for layer in range(self.shape[0] if self.stacked else 1)
        ]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of each of its tensors in files."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    @property
    def file_shape(self) -> tuple[int, int, int]:
        """Layers (1 if it has none), rows, columns (1 for a vector) of its tensors in files."""
        rows, columns = (*self.tensor_shape, 1)[:2]
        return self.shape[0] if self.stacked else 1, rows, columns

    def from_file(self, values: Any) -> Any:
        """[layers, rows, columns] -> the parameter's own dimensions."""
        values = values.swapaxes(1, 2) if self.transposed else values
        values = values[..., 0] if len(self.tensor_shape) == 1 else values
        return values if self.stacked else values[0]

    def to_file(self, values: Any) -> Any:
        """The way back."""
        values = values if self.stacked else values[None]
        values = values[..., None] if len(self.tensor_shape) == 1 else values
        return values.swapaxes(1, 2) if self.transposed else values

    def sharding(self, role: Role) -> NamedSharding:
        return role.sharding(self.axes_on(role), self.shape)

    def axes_on(self, role: Role) -> tuple[str | None, ...]:
        """The axes that a role splits, by whole heads. Key/value heads fewer than `tensor`, and a
        vocabulary that it does not divide (a resized embedding may have any size), are whole on
        each of its devices: None."""
        units = dict(zip(self.axes, self.shape, strict=True)) | {"heads": self.heads}
        return tuple(
            None if axis in ("heads", "vocab") and units[axis] % role.tensor else axis
            for axis in self.axes
        )

    @property
    def weight_decay(self) -> bool:
        """True for matrices; norms and biases have no weight decay."""
        return len(self.tensor_shape) == 2


ADAPTER_PREFIX = "base_model.model."
"""Before the names of an adapter's tensors in PEFT's files."""


def param_specs(a: Architecture) -> Parameters:
    """Every parameter of an architecture: `Parameters` with `ParamSpec` leaves, the one place that
    declares them.

    An adapter's have the names of PEFT's files. With one, all others are frozen."""
    trained = a.adapter is None
    depth = (2 * a.num_layers) ** -0.5  # outputs to the residual stream start smaller, as in GPT-2

    def layered(
        name: str,
        *shape: int,
        axes: tuple[str | None, ...],
        init: Any = "normal",
        scale: float = 1.0,
        heads: int = 0,
    ) -> ParamSpec:
        return ParamSpec(
            (a.num_layers, *shape),
            ("layers", *axes),
            init,
            0.02 * scale,
            heads,
            len(shape) == 2,
            f"model.layers.{{layer}}.{name}",
            trained,
        )

    def product(
        name: str,
        rows: int,
        columns: int,
        axes: tuple[str, str],
        bias: bool,
        scale: float = 1.0,
        heads: int = 0,
    ) -> Any:
        kernel: Any = layered(f"{name}.weight", rows, columns, axes=axes, scale=scale, heads=heads)
        if a.quantised:
            scales = layered(
                f"{name}.weight_scale", columns, axes=(axes[1],), init="ones", heads=heads
            )
            kernel = Quantised(replace(kernel, dtype=a.quantised), replace(scales, dtype="float32"))
        if (adapter := a.adapter) and name.rpartition(".")[2] in adapter.targets:
            pair = (
                layered(
                    f"{name}.lora_A.weight",
                    rows,
                    adapter.rank,
                    axes=(axes[0], None),
                    init="uniform",
                    scale=50 * (3 * rows) ** -0.5,
                    heads=heads,
                ),
                layered(
                    f"{name}.lora_B.weight",
                    adapter.rank,
                    columns,
                    axes=(None, axes[1]),
                    init="zeros",
                    heads=heads,
                ),
            )
            down, up = (replace(one, name=ADAPTER_PREFIX + one.name, trained=True) for one in pair)
            kernel = Adapted(kernel, down, up, adapter.scale)
        return (
            Biased(
                kernel, layered(f"{name}.bias", columns, axes=(axes[1],), init="zeros", heads=heads)
            )
            if bias
            else kernel
        )

    def norm(name: str, size: int = a.hidden_size, axis: str | None = "embed") -> ParamSpec:
        return layered(f"{name}.weight", size, axes=(axis,), init="ones")

    hidden, inner, queries, keys = (
        a.hidden_size,
        a.intermediate_size,
        a.num_heads * a.head_dim,
        a.num_kv_heads * a.head_dim,
    )
    blocks = Block(
        attention_norm=norm("input_layernorm"),
        q=product(
            "self_attn.q_proj", hidden, queries, ("embed", "heads"), a.qkv_bias, heads=a.num_heads
        ),
        k=product(
            "self_attn.k_proj", hidden, keys, ("embed", "heads"), a.qkv_bias, heads=a.num_kv_heads
        ),
        v=product(
            "self_attn.v_proj", hidden, keys, ("embed", "heads"), a.qkv_bias, heads=a.num_kv_heads
        ),
        o=product(
            "self_attn.o_proj",
            queries,
            hidden,
            ("heads", "embed"),
            a.output_bias,
            depth,
            a.num_heads,
        ),
        mlp_norm=norm("post_attention_layernorm"),
        gate=product("mlp.gate_proj", hidden, inner, ("embed", "mlp"), a.mlp_bias),
        up=product("mlp.up_proj", hidden, inner, ("embed", "mlp"), a.mlp_bias),
        down=product("mlp.down_proj", inner, hidden, ("mlp", "embed"), a.mlp_bias, depth),
        q_norm=norm("self_attn.q_norm", a.head_dim, None) if a.qk_norm else None,
        k_norm=norm("self_attn.k_norm", a.head_dim, None) if a.qk_norm else None,
    )
    return Parameters(
        embed_tokens=ParamSpec(
            (a.vocab_size, hidden),
            ("vocab", "embed"),
            name="model.embed_tokens.weight",
            trained=trained,
        ),
        blocks=blocks,
        final_norm=ParamSpec(
            (hidden,), ("embed",), "ones", name="model.norm.weight", trained=trained
        ),
        lm_head=None
        if a.tie_embeddings
        else ParamSpec(
            (hidden, a.vocab_size),
            ("embed", "vocab"),
            transposed=True,
            name="lm_head.weight",
            trained=trained,
        ),
    )


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
    """The same of any tree of `ParamSpec`."""
    return jax.tree.map(lambda spec: spec if spec.trained else None, specs)


def frozen_specs(a: Architecture) -> Parameters | None:
    """Those that are not trained; None where all are."""
    if not a.adapter:
        return None
    return jax.tree.map(lambda spec: None if spec.trained else spec, param_specs(a))


def select(specs: Any, tree: Any) -> Any:
    """The leaves of a tree of parameters that `trained_specs` or `frozen_specs` have."""
    return (
        None
        if specs is None
        else jax.tree.map(
            lambda spec, leaf: None if spec is None else leaf,
            specs,
            tree,
            is_leaf=lambda spec: spec is None,
        )
    )


def joined(part: Any, other: Any) -> Any:
    """The whole of two parts; `other` may be None, without any."""
    return (
        part
        if other is None
        else jax.tree.map(
            lambda one, two: two if one is None else one,
            part,
            other,
            is_leaf=lambda leaf: leaf is None,
        )
    )


def without_adapter(a: Architecture, parameters: Parameters) -> Parameters:
    """The parameters of the base of an architecture: the same arrays."""
    return (
        jax.tree.unflatten(
            jax.tree.structure(param_specs(a.base)),
            jax.tree.leaves(select(frozen_specs(a), parameters)),
        )
        if a.adapter
        else parameters
    )


def as_frozen(a: Architecture, base: Parameters) -> Parameters:
    """The parameters of the base of an architecture where its adapter has them, None in place of
    the adapter's."""
    return jax.tree.unflatten(jax.tree.structure(frozen_specs(a)), jax.tree.leaves(base))


def shardings(a: Architecture, role: Role) -> Parameters:
    """A NamedSharding for every parameter."""
    return shardings_of(param_specs(a), role)


def shardings_of(specs: Any, role: Role) -> Any:
    """A NamedSharding for every parameter in a tree of `ParamSpec`."""
    return jax.tree.map(lambda d: d.sharding(role), specs)


def param_shapes(specs: Any, role: Role, dtype: Any) -> Any:
    """Shapes, type and layout on a role's devices of the parameters in a tree of `ParamSpec`;
    nothing is allocated."""
    return jax.tree.map(
        lambda d: jax.ShapeDtypeStruct(
            d.shape, jnp.dtype(d.dtype or dtype), sharding=d.sharding(role)
        ),
        specs,
    )


Keep = Callable[[ParamSpec, jax.Array], Any]
"""(a parameter, its array as it was read) -> what takes the array's place."""


def keep_as_read(spec: ParamSpec, array: jax.Array) -> Any:
    """The `Keep` that takes each array as it is."""
    return array


def quantised_specs(a: Architecture) -> dict[str, Quantised]:
    """The quantised weights of an architecture, by the name of the kernel in whose place they
    are."""
    weights = jax.tree.leaves(param_specs(a), is_leaf=lambda weight: isinstance(weight, Quantised))
    return {weight.values.name: weight for weight in weights if isinstance(weight, Quantised)}


def quantiser(a: Architecture, role: Role) -> Keep:
    """What turns each parameter of a model that is read into what `param_specs` of the quantised
    architecture has."""
    wanted = quantised_specs(a)

    def keep(spec: ParamSpec, array: jax.Array) -> Any:
        if spec.name not in wanted:
            return array
        return role.jit(
            partial(quantise, dtype=a.quantised),
            out_shardings=shardings_of(wanted[spec.name], role),
        )(array)

    return keep


def products_joined(block: Block) -> Block:
    """A layer's block with the weights of k and v beside those of q, for one product in place of
    three, and None in their places; itself where they are no such weights (an adapter's are
    products of two)."""
    weights = block.q, block.k, block.v
    kinds = {jax.tree.structure(weight) for weight in weights}
    if len(kinds) > 1 or isinstance(
        block.q.kernel if isinstance(block.q, Biased) else block.q, Adapted
    ):
        return block
    return replace(
        block, q=jax.tree.map(lambda *parts: jnp.concatenate(parts, -1), *weights), k=None, v=None
    )


def check_mesh(a: Architecture, role: Role) -> None:
    """ShoalError unless the mesh divides the model's heads, feed-forward size and hidden size.

    Key/value heads may be fewer than `tensor`, which is then a multiple of theirs: they are
    repeated in groups. A vocabulary that does not divide is whole on each device (a warning at the
    head of a run says so).
    """
    tensor, fsdp, context = role.tensor, role.mesh.shape.get("fsdp", 1), role.context
    on = "mesh.reference: " if role.name == "reference" else "mesh."
    key = "mesh.sampler_tensor (or mesh.tensor)" if role.name == "sampler" else f"{on}tensor"
    use = f"use {listed(tensor_sizes(a, role.mesh.size))}"
    for name, size in (
        ("num_attention_heads", a.num_heads),
        ("intermediate_size", a.intermediate_size),
    ):
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
    return [
        size
        for size in range(1, count + 1)
        if not count % size
        and not a.num_heads % size
        and not a.intermediate_size % size
        and (not a.num_kv_heads % size or not size % a.num_kv_heads)
    ]


def initialise(a: Architecture, seed: int, role: Role) -> Parameters:
    """Random float32 parameters, created on the devices that hold them."""
    return initialise_specs(param_specs(a), seed, role)


def initialise_specs(specs: Any, seed: int, role: Role) -> Any:
    """The same of a tree of `ParamSpec`."""
    declared, structure = jax.tree.flatten(specs)

    def make() -> Any:
        leaves = []
        for number, d in enumerate(declared):
            key = jax.random.fold_in(jax.random.key(seed), number)
            constant = jnp.ones if d.init == "ones" else jnp.zeros
            bound = 3**0.5 * d.stddev
            leaves.append(
                jax.random.normal(key, d.shape) * d.stddev
                if d.init == "normal"
                else jax.random.uniform(key, d.shape, minval=-bound, maxval=bound)
                if d.init == "uniform"
                else constant(d.shape)
            )
        return jax.tree.unflatten(structure, leaves)

    return role.jit(make, out_shardings=shardings_of(specs, role))()
