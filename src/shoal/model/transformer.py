"""The model: its static description, and the one `forward` that every use of it shares.

`forward` runs on rows of tokens [R, T] and takes as an `AttentionPass` what they read of each
other: in training and scoring, completions read a shared prompt; in prefill, a prompt reads itself
and its keys and values, or its last state, are returned; in decoding, one new token in each row
reads caches. Everything else, and so every number, comes from the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shoal.mesh import PINNED_HOST, Role
from shoal.model.architecture import Architecture, Layer, Stack
from shoal.model.block import (
    NO_INPUTS,
    AttentionPass,
    LayerAux,
    LayerInputs,
    SharedKeys,
    block,
    cast_weight,
    rounded,
)
from shoal.model.compiler_habits import computed_once
from shoal.model.layers import by_layer, ffn_chunks, in_order, stacked_blocks, unstacked
from shoal.model.linear import linear
from shoal.model.norms import layer_norm
from shoal.model.parameters import (
    Block,
    LayerEmbedding,
    Parameters,
    Stacks,
    check_mesh,
    param_specs,
)
from shoal.model.rotary import rotary
from shoal.records import ShoalError


@dataclass(frozen=True)
class Model:
    """Static description of a model on the devices of a role: what `forward` needs besides
    parameters. Immutable and hashable, because compiled programs are cached by it; it holds no
    arrays."""

    architecture: Architecture
    role: Role
    dtype: Any = jnp.float32  # type of the computation; trained parameters are float32
    # What the backward pass computes again, see REMAT.
    remat: Literal["none", "dots", "attention", "full", "offload"] = "dots"
    # The form of attention in training, scoring and prefill.
    attention: Literal["auto", "reference", "blocked", "pallas"] = "auto"
    reduce_dtype: Any = jnp.float32  # type in which gradients are summed over the mesh
    sampler_type: str = ""  # 8-bit type of the sampler's matrices; "": as the trainer's
    # Most tokens of a sequence, a prompt with its completion, that its programs get; 0: not known.
    # Longer windows hide no key (`window_of`).
    longest_sequence: int = 0

    def __post_init__(self) -> None:
        """Raises ShoalError if the role's devices cannot compute this model: float16 on a TPU, or a
        mesh that does not divide the model's sizes (`check_mesh`)."""
        if self.dtype == jnp.float16 and self.role.platform == "tpu":
            raise ShoalError(
                "model.dtype=float16: a TPU has no products of float16; use bfloat16", "model.dtype"
            )
        check_mesh(self.architecture, self.role)

    def window_of(self, layer: Layer, size: int = 0) -> int:
        """Returns how many keys a query reads at most in a kind of layer, its own included; 0: all.
        It is the layer's window, unless that is as long as all sequences: then the layer is
        computed as one without a window, which kernels and pages can. `size`: the tokens of whole
        rows, which no sequence exceeds; 0: not known."""
        bounds = [bound for bound in (self.longest_sequence, size) if bound]
        if bounds and layer.window >= min(bounds):
            return 0
        return layer.window

    def key_heads_of(self, layer: Layer) -> int:
        """Returns the number of key/value heads that a kind of layer computes with: if `tensor` has
        more devices than the layer has heads, each head is repeated, one copy for each device.
        Caches have as many entries, but instead of copies each holds a part of a head's positions
        (`key_parts_of`)."""
        return max(self.architecture.kv_heads_of(layer), self.role.tensor)

    def key_parts_of(self, layer: Layer) -> int:
        """Returns the number of parts that the positions of a key/value head's cache are split into
        in a kind of layer, one on each device that has the head."""
        return self.architecture.key_parts_of(layer, self.role.tensor)

    @property
    def key_parts(self) -> int:
        """The largest `key_parts_of` of the model's kinds of layers: sizes of caches are divided by
        it."""
        return self.architecture.key_parts(self.role.tensor)

    @property
    def vocab_axis(self) -> str | None:
        """The logical axis that splits logits; None if `tensor` does not divide the vocabulary, so
        that each device has all logits."""
        return None if self.architecture.vocab_size % self.role.tensor else "vocab"

    @property
    def writes_float32(self) -> bool:
        """Whether products in bfloat16 are written in float32 first (`Cast.writes_float32`), which
        makes them faster on a CPU."""
        return self.role.platform == "cpu" and self.dtype == jnp.bfloat16

    @property
    def ffn_chunks(self) -> int:
        """How a sampler holds each feed-forward matrix, as `layers.ffn_chunks` returns it."""
        return ffn_chunks(self.architecture, self.role, self.dtype)

    def on(self, role: Role) -> Model:
        """Returns the model on the devices of another role; for the sampler also with the sampler's
        type of weights, if it has its own."""
        architecture = self.architecture
        if role.name == "sampler" and self.sampler_type:
            architecture = replace(architecture, quantised=self.sampler_type)
        return replace(self, role=role, architecture=architecture)


def _all_kept(layer: Callable) -> Callable:
    return layer


_KEPT = jax.checkpoint_policies
_DOTS = _KEPT.save_from_both_policies(
    _KEPT.dots_with_no_batch_dims_saveable,
    _KEPT.save_only_these_names("kernel", "product", "experts"),
)


REMAT: dict[str, Callable[[Callable], Callable]] = {
    "none": _all_kept,
    "dots": partial(jax.checkpoint, policy=_DOTS),
    "attention": partial(
        jax.checkpoint, policy=_KEPT.save_only_these_names("attention", "kernel", "experts")
    ),
    "full": partial(jax.checkpoint, policy=_KEPT.save_only_these_names("experts")),
    "offload": partial(
        jax.checkpoint,
        policy=_KEPT.save_and_offload_only_these_names(
            names_which_can_be_saved=["experts"],
            names_which_can_be_offloaded=["input", "attention", "kernel"],
            offload_src="device",
            offload_dst=PINNED_HOST,
        ),
    ),
}
"""What a block's backward pass computes again, by `model.remat`. `none`: nothing. `dots`: all but
products with weights. `attention`: the feed-forward part. `full`: everything. `offload`: the
feed-forward part; what is kept, the block's input too, is in the host's memory.

Names of kept results: `kernel` are output and log-sum-exp of an attention with its own backward
pass; `attention` are the inputs of attention, and x after it; `product` is the product of a kernel
with an adapter, and of experts their products with x; `experts` are the numbers of each token's
experts, which all keep: chosen again, they could be others, because the logits may be rounded
otherwise. On CPU `dots` is fastest: `none` writes and reads four times the memory (docs/LOG.md).
"""


def forward(
    model: Model,
    parameters: Parameters,
    tokens: jax.Array,
    positions: jax.Array,
    attention_pass: AttentionPass,
    caches: Any = None,
    experts: jax.Array | None = None,
) -> tuple[jax.Array, tuple[LayerAux, ...]]:
    """Returns (hidden states [R, T, D] after the last norm, `LayerAux` of each layer) of tokens[R,
    T]. positions[R, T] are those in each token's sequence, which its rotation depends on; what a
    token reads is decided by `attention_pass` alone.

    The caches in the result are None in training, those of the prompts in a prefill, the new caches
    in decoding. `caches` has one entry a layer, or is None. `experts` are those of `LayerInputs`.
    """
    x = embed(model, parameters.embed_tokens, tokens, model.architecture.embedding_scale)
    embeddings = layer_embeddings(model, parameters.layer_embedding, tokens, x)
    inputs = LayerInputs(embeddings, experts)
    rope = rotary(model.architecture, positions)
    if caches is not None:
        # Otherwise XLA for CPU would compute each cosine again for each head and layer.
        rope = computed_once(rope)
    compute = partial(block, model, rope=rope, attention_pass=attention_pass)
    x, aux = through_layers(model, parameters.blocks, x, compute, caches, inputs=inputs)
    return layer_norm(model, x, rounded(parameters.final_norm, model.dtype)), aux


ComputeLayer = Callable[..., tuple[jax.Array, LayerAux]]
"""(kind of the layer, its weights, x[R, T, D], cache, its `LayerInputs`, the `SharedKeys` that it
reads) -> (x, `LayerAux`)."""


def through_layers(
    model: Model,
    blocks: Any,
    x: jax.Array,
    compute: ComputeLayer,
    caches: Any = None,
    kinds: Sequence[Layer] = (),
    inputs: LayerInputs = NO_INPUTS,
    keys: SharedKeys | None = None,
) -> tuple[jax.Array, tuple[LayerAux, ...]]:
    """Passes x[R, T, D] through layers, and returns (x, the aux of each layer). `blocks` are all
    layers of the model, or some with arrays of their own, whose kinds are then given as `kinds`.
    `inputs` have these layers in front. `keys` are what the layer left whose keys some read that
    are given without it.

    Stacked layers without caches are scanned; with caches (one a layer), or if each layer has its
    own arrays, the layers are unrolled.
    """
    # Decoding is unrolled because a scan copies each layer's cache in and out: 46M parameters, 16
    # rows and 256 keys on two CPU cores take 67 ms a token with the caches as the scan's input and
    # output, 44 as its carry, 29 unrolled.
    if isinstance(blocks, Block | Stacks) and caches is None:
        return _scanned(model, blocks, x, compute, inputs)
    kinds = kinds or model.architecture.layers_in_order
    return _unrolled(kinds, by_layer(model, blocks), x, compute, caches, inputs, keys)


def _scanned(
    model: Model,
    blocks: Block | Stacks,
    x: jax.Array,
    compute: ComputeLayer,
    inputs: LayerInputs,
) -> tuple[jax.Array, tuple[LayerAux, ...]]:
    """Passes x through stacked layers, and returns (x, the aux of each layer). Each of the
    architecture's scan groups is a scan over its pattern: the pattern's layers are compiled once,
    and a layer's backward pass computes again what `model.remat` says."""
    a = model.architecture
    stacks = stacked_blocks(blocks)
    specs = stacked_blocks(param_specs(a).blocks)
    by_number: dict[int, LayerAux] = {}
    keys: dict[int, SharedKeys | None] = {}  # those that other layers read, by number
    first = 0  # number of the group's first stack
    for group in a.scan_groups:
        of_group = slice(first, first + len(group))
        step = partial(_pattern_step, model, compute, group, specs[of_group], keys)
        of_stacks = tuple(_of_layers(inputs, stack.numbers) for stack in group)
        x, aux = jax.lax.scan(step, x, (stacks[of_group], of_stacks))
        for stack, of_stack in zip(group, aux, strict=True):
            of_layers = unstacked(of_stack, len(stack.numbers))
            by_number |= zip(stack.numbers, of_layers, strict=True)
            for number in a.read_layers.intersection(stack.numbers):
                keys[number] = by_number[number].keys
        first += len(group)
    return x, in_order(by_number)


def _of_layers(inputs: LayerInputs, numbers: range) -> LayerInputs:
    """Returns the inputs of the layers with these numbers."""

    def select(of_all: jax.Array) -> jax.Array:
        return of_all[numbers.start : numbers.stop : numbers.step]

    return jax.tree.map(select, inputs)


def _pattern_step(
    model: Model,
    compute: ComputeLayer,
    group: Sequence[Stack],
    specs: Sequence[Block],
    keys: Mapping[int, SharedKeys | None],
    x: jax.Array,
    of_step: tuple[Sequence[Block], Sequence[LayerInputs]],
) -> tuple[jax.Array, tuple[LayerAux, ...]]:
    """Passes x through one layer of each stack of a scan group: the step of a scan. `specs` are
    those of the stacks; `keys` are what earlier layers left whose keys others read; `of_step` are
    the layers' weights and inputs."""

    def cast(weight: jax.Array, spec: Any) -> Any:
        """Returns a product's kernel in the form that a layer reads (`cast_weight`); any other
        weight `rounded`."""
        if not spec.is_product:
            return rounded(weight, model.dtype)
        axes = spec.axes_on(model.role)[1:]  # without the layers'
        # A matrix with a type of its own is quantised: it is read in the bytes that are stored.
        return cast_weight(model, weight, axes, spec.trained and not spec.dtype)

    aux = []
    read_layers = model.architecture.read_layers
    for stack, of_stack, weights, inputs in zip(group, specs, *of_step, strict=True):
        read_keys = None if stack.layer.keys_of is None else keys[stack.layer.keys_of]

        @REMAT[model.remat]
        def step(
            x: jax.Array,
            weights: Block,
            inputs: LayerInputs,
            keys: SharedKeys | None,
            stack: Stack = stack,
            specs: Block = of_stack,
        ) -> tuple[jax.Array, LayerAux]:
            cast_weights = jax.tree.map(cast, weights, specs)
            x, of_this = compute(stack.layer, cast_weights, x, cache=None, inputs=inputs, keys=keys)
            if read_layers.isdisjoint(stack.numbers):
                of_this = of_this._replace(keys=None)
            return x, of_this

        if model.writes_float32 and model.remat != "none":
            step = keeping_integers(step)
        x, of_this = step(x, weights, inputs, read_keys)
        aux.append(of_this)
    return x, tuple(aux)


def keeping_integers(layer: Callable) -> Callable:
    """Returns the layer, a function of (x, ...), with another way to keep bfloat16 for the backward
    pass: as integers of 16 bits.

    A scan writes what each layer keeps into an array of all layers. XLA for CPU cannot write a part
    of an array of bfloat16: for each layer it would convert the array of all layers to float32, and
    back. For layers under `jax.checkpoint`, which keep their arguments as they are.
    """

    @jax.custom_vjp
    def computed(x: jax.Array, *others: Any) -> Any:
        return layer(x, *others)

    def forward(x: jax.Array, *others: Any) -> tuple[Any, Callable]:
        result, backward = jax.vjp(layer, x, *others)
        # A scan does not write what it passes on, such as weights; as integers it would.
        passed_on = {id(array) for array in jax.tree.leaves(others)}

        def to_integers(kept: jax.Array) -> jax.Array:
            if kept.dtype != jnp.bfloat16 or id(kept) in passed_on:
                return kept
            return jax.lax.bitcast_convert_type(kept, jnp.uint16)

        return result, jax.tree.map(to_integers, backward)

    def from_integers(kept: jax.Array) -> jax.Array:
        if kept.dtype != jnp.uint16:
            return kept
        return jax.lax.bitcast_convert_type(kept, jnp.bfloat16)

    def gradients(kept: Callable, of_result: Any) -> tuple:
        return jax.tree.map(from_integers, kept)(of_result)

    computed.defvjp(forward, gradients)
    return computed


def _unrolled(
    kinds: Sequence[Layer],
    layers: Sequence[Block],
    x: jax.Array,
    compute: ComputeLayer,
    caches: Any,
    inputs: LayerInputs,
    keys: SharedKeys | None,
) -> tuple[jax.Array, tuple[LayerAux, ...]]:
    """Passes x through layers one after the other, each compiled separately, and returns (x, the
    aux of each layer). `caches` has one entry a layer, or is None: then each layer gets None.
    `keys` are given if these are not all layers of the model: what another layer left for them."""
    aux: tuple[LayerAux, ...] = ()
    caches = caches or (None,) * len(layers)
    by_layer = unstacked(inputs, len(layers))
    for layer, weights, cache, own in zip(kinds, layers, caches, by_layer, strict=True):
        read_keys = keys
        if layer.keys_of is not None and keys is None:
            read_keys = aux[layer.keys_of].keys
        x, new = compute(layer, weights, x, cache=cache, inputs=own, keys=read_keys)
        aux += (new,)
    return x, aux


def embed(model: Model, table: jax.Array, tokens: jax.Array, scale: float) -> jax.Array:
    """Looks up the embeddings of tokens[R, T] in table[V, D], times `scale`; returns [R, T, D] in
    the type of the computation."""
    constrain = model.role.constrain

    def look_up(tokens: jax.Array) -> jax.Array:
        rows = table[tokens].astype(model.dtype)  # the other way round would copy the whole table
        if scale == 1.0:
            return rows
        # The scale is rounded first, as transformers does.
        return rows * jnp.asarray(scale, model.dtype)

    if "fsdp" not in model.role.row_axes:
        return constrain(look_up(tokens), "rows", None, None)
    # Each device of `fsdp` looks up its own columns for the rows of all these devices; then columns
    # and rows change places. From tokens alone, the partitioner would make all of [R, T, D] on each
    # device if `data` splits rows too.
    columns = constrain(look_up(constrain(tokens, "fsdp_rows", None)), "fsdp_rows", None, "embed")
    return constrain(columns, "rows", None, None)


def layer_embeddings(
    model: Model, w: LayerEmbedding | None, tokens: jax.Array, x: jax.Array
) -> jax.Array | None:
    """Computes the embeddings that layers have for themselves of tokens[R, T], whose embeddings
    enter the first layer as x[R, T, D]: the sum of a table's entry and of a product with x, over
    sqrt(2), as transformers' Gemma4TextModel does. Returns [L, R, T, P], or None if the model has
    none."""
    if w is None:
        return None
    a = model.architecture
    size = a.layer_embedding_size

    def by_layer(side_by_side: jax.Array) -> jax.Array:
        return side_by_side.reshape(*tokens.shape, a.num_layers, size)

    def scaled(values: jax.Array, factor: float) -> jax.Array:
        # The factor is not rounded to the values' type.
        return (values.astype(jnp.float32) * factor).astype(values.dtype)

    of_tokens = by_layer(embed(model, w.tokens, tokens, size**0.5))
    projection = cast_weight(model, w.projection, ("embed", None), a.adapter is None)
    of_stream = by_layer(scaled(linear(projection, x), a.hidden_size**-0.5))
    of_stream = layer_norm(model, of_stream, rounded(w.norm, model.dtype))
    return jnp.moveaxis(scaled(of_stream + of_tokens, 2**-0.5), 2, 0)
