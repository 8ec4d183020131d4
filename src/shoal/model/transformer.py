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
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shoal.mesh import PINNED_HOST, Role
from shoal.model.architecture import Architecture
from shoal.model.block import AttentionFn, block, cast_weight, rms_norm
from shoal.model.compiler_habits import computed_once
from shoal.model.layers import by_layer, ffn_chunks, unstacked
from shoal.model.parameters import Block, Parameters, check_mesh, param_specs
from shoal.model.rotary import rotary
from shoal.records import ShoalError


@dataclass(frozen=True)
class Model:
    """Static description of a model on the devices of a role: what `forward` needs besides
    parameters. Immutable and hashable, a key of the compiled programs; it holds no arrays."""

    architecture: Architecture
    role: Role
    dtype: Any = jnp.float32  # of the computation; parameters are float32
    # What is computed again, see REMAT.
    remat: Literal["none", "dots", "attention", "full", "offload"] = "dots"
    # Of training, scoring and prefill.
    attention: Literal["auto", "reference", "blocked", "pallas"] = "auto"
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
    def ffn_chunks(self) -> int:
        """`layers.ffn_chunks` of a sampler."""
        return ffn_chunks(self.architecture, self.role, self.dtype)

    def on(self, role: Role) -> Model:
        """The model on the devices of another role; of a sampler with its own type of weights."""
        architecture = self.architecture
        if role.name == "sampler" and self.sampler_type:
            architecture = replace(architecture, quantised=self.sampler_type)
        return replace(self, role=role, architecture=architecture)


def _all_kept(layer: Callable) -> Callable:
    return layer


_KEPT = jax.checkpoint_policies
_DOTS = _KEPT.save_from_both_policies(
    _KEPT.dots_with_no_batch_dims_saveable, _KEPT.save_only_these_names("kernel", "product")
)


REMAT: dict[str, Callable[[Callable], Callable]] = {
    "none": _all_kept,
    "dots": partial(jax.checkpoint, policy=_DOTS),
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
    x = embed(model, parameters.embed_tokens, tokens)
    rope = rotary(model.architecture, positions)
    if caches is not None:
        # Else XLA for CPU computes each cosine again for each head and layer.
        rope = computed_once(rope)
    layer = partial(block, model, rope=rope, attention=attention)
    x, aux = through_layers(model, parameters.blocks, x, layer, caches)
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
        return _scanned(model, blocks, x, layer)
    return _unrolled(by_layer(model, blocks), x, layer, caches)


def _scanned(
    model: Model, blocks: Block, x: jax.Array, layer: Callable[..., tuple[jax.Array, Any]]
) -> tuple[jax.Array, tuple]:
    """Through stacked layers: compiled once, and computed again as `model.remat` has it."""
    specs = param_specs(model.architecture).blocks

    def cast(weight: jax.Array, spec: Any) -> Any:
        axes = spec.axes_on(model.role)[1:]  # without the layers'
        return cast_weight(model, weight, axes, spec.trained and not spec.dtype)

    @REMAT[model.remat]
    def step(x: jax.Array, weights: Block) -> tuple[jax.Array, Any]:
        return layer(jax.tree.map(cast, weights, specs), x, cache=None)

    x, aux = jax.lax.scan(step, x, blocks)
    return x, unstacked(aux, model.architecture.num_layers)


def _unrolled(
    layers: tuple[Block, ...],
    x: jax.Array,
    layer: Callable[..., tuple[jax.Array, Any]],
    caches: Any,
) -> tuple[jax.Array, tuple]:
    aux = ()
    caches = caches or (None,) * len(layers)
    for weights, cache in zip(layers, caches, strict=True):
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
