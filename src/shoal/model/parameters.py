"""The parameters of a model, each declared once: shape, logical axes, initialisation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shoal.mesh import Role, listed, listed_divisors
from shoal.model.architecture import Architecture
from shoal.model.linear import Biased
from shoal.types import ShoalError


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
    """One parameter: its shape, the logical axes of its dimensions, and its initialisation. A leaf of JAX's trees."""

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


def shardings(a: Architecture, role: Role) -> Parameters:
    """A NamedSharding for every parameter."""
    return jax.tree.map(lambda d: d.sharding(role), param_specs(a))


def param_shapes(specs: Any, role: Role, dtype: Any) -> Any:
    """Shapes, type and layout on a role's devices of the parameters in a tree of `ParamSpec`; nothing is allocated."""
    return jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape, dtype, sharding=d.sharding(role)), specs,)


def layers_apart(parameters: Parameters, num_layers: int) -> Parameters:
    """Parameters with a tuple of L blocks in place of the stacked one: of ParamSpecs, of arrays, and of tuples of each
    layer's array in place of a stacked one."""

    def layer(leaf: Any, number: int) -> Any:
        is_spec = isinstance(leaf, ParamSpec)
        return replace(leaf, shape=leaf.shape[1:], axes=leaf.axes[1:]) if is_spec else leaf[number]

    blocks = (jax.tree.map(partial(layer, number=number), parameters.blocks, is_leaf=lambda x: isinstance(x, tuple))
              for number in range(num_layers))
    return replace(parameters, blocks=tuple(blocks))


def reads_layers_apart(role: Role) -> bool:
    """True if a sampler on these devices is given `layers_apart`.

    XLA for GPU copies nearly all of a layer out of stacked weights before its products, at every token; for TPU it
    reads them in place, and prefill, which scans stacked layers, compiles in one layer's time.
    """
    return role.platform == "gpu"


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
            raise ShoalError(f"{key}={tensor} does not divide the model's {name}={size}; {use}", "mesh.tensor")
    if tensor not in tensor_sizes(a, tensor):
        raise ShoalError(f"{key}={tensor} neither divides the model's num_key_value_heads={a.num_kv_heads} nor is a "
                         f"multiple of it; {use}", "mesh.tensor")
    if a.hidden_size % fsdp:
        raise ShoalError(f"{on}fsdp={fsdp} does not divide the model's hidden_size={a.hidden_size}; use "
                         f"{listed_divisors(a.hidden_size, role.mesh.size)}", "mesh.fsdp")


def tensor_sizes(a: Architecture, count: int) -> list[int]:
    """The sizes of `tensor` into which a model, and so many devices, can be divided."""
    return [size for size in range(1, count + 1) if not count % size and not a.num_heads % size
            and not a.intermediate_size % size and (not a.num_kv_heads % size or not size % a.num_kv_heads)]


def initialise(a: Architecture, seed: int, role: Role) -> Parameters:
    """Random float32 parameters, created on the devices that hold them."""
    declared, structure = jax.tree.flatten(param_specs(a))

    def make() -> Parameters:
        leaves = []
        for number, d in enumerate(declared):
            key = jax.random.fold_in(jax.random.key(seed), number)
            constant = jnp.ones if d.init == "ones" else jnp.zeros
            leaves.append(jax.random.normal(key, d.shape) * d.stddev if d.init == "normal" else constant(d.shape))
        return jax.tree.unflatten(structure, leaves)

    return role.jit(make, out_shardings=shardings(a, role))()
