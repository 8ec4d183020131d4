"""MaxText's checkpoints: the names, shapes and numbers of their arrays, to and from Shoal's parameters.

Read from MaxText's sources, where this comes from (folders under `src/maxtext/`):

    names, transposition          checkpoint_conversion/utils/param_mapping.py, Llama 3.1's and Qwen's mappings
    layers stacked on axis 1      configs/base.yml, `param_scan_axis`; else `layers_0`, `layers_1`, ...
    query divided by sqrt(A)      layers/attentions.py, `init_query_w`: attention does not scale, Llama's queries are
                                  stored scaled; models/qwen2.py and qwen3.py scale at run time, theirs are not
    order of rotary dimensions    layers/attentions.py, `init_rotary_embedding`: pairs (x0 y0 x1 y1 ...) where the
                                  model's name starts with llama3.1, else halves (x0 x1 ... y0 y1 ...), as in HF
    norms without an offset       layers/normalizations.py, `scale_offset` is 0
    where the tree stands         common/checkpointing.py: `params/params/...` in the item `items` of step 0; a training
                                  checkpoint has `opt_state` beside it

For llama3.3-70b MaxText disagrees with itself: `llama_or_mistral_ckpt.py` leaves Meta's own files in pairs and Hugging
Face's in halves, its attention computes in halves. Halves are read and written under that name; one in pairs is read
under the name llama3.1-70b, which has the same sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.config.schema import ModelSection
from shoal.mesh import Role
from shoal.model import hf, hf_config, hub
from shoal.model.hf import dotted
from shoal.model.names import model_named
from shoal.model.transformer import Architecture, ParamSpec, is_param_spec, param_specs
from shoal.run.checkpoint_formats import ForeignArrays, ReadPart
from shoal.run.loading import ModelSpec
from shoal.trainer.array_tree import LazyArray, find_tree, inspect_tree, read_leaves
from shoal.types import Params, ShoalError

ROOTS = ("params/params/", "params/", "")
"""Prefixes under which a checkpoint may hold the parameters, tried in order."""

STACKED_AXIS = 1
"""The axis of layers in a stacked array."""


@dataclass(frozen=True)
class StoredParameter:
    """One parameter in MaxText's tree; of a parameter with layers, one layer's array."""

    path: str  # Shoal's: "blocks.q"
    name: str  # "decoder/{layers}/self_attention/query/kernel"
    shape: tuple[int, ...]  # [D, H, A]
    axes: tuple[str | None, ...]  # the logical axes of `shape`
    declared: ParamSpec  # Shoal's, stacked
    rotary: bool = False  # its last dimension is rotated by position
    factor: float = 1.0  # MaxText's values are Shoal's times this

    @property
    def layered(self) -> bool:
        return "{layers}" in self.name

    def names(self, num_layers: int, scan_layers: bool) -> list[str]:
        """The names of its arrays: one, or one a layer."""
        if not self.layered or scan_layers:
            return [self.name.format(layers="layers")]
        return [self.name.format(layers=f"layers_{layer}") for layer in range(num_layers)]

    def stored(self, num_layers: int, scan_layers: bool) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
        """Shape and logical axes of each of its arrays."""
        if not (self.layered and scan_layers):
            return self.shape, self.axes
        return _insert(self.shape, num_layers), _insert(self.axes, "layers")


def _insert(values: tuple, value: Any) -> tuple:
    return (*values[:STACKED_AXIS], value, *values[STACKED_AXIS:])


_ATTENTION = "decoder/{layers}/self_attention/"
_NAMES: Mapping[str, str] = {
    "embed_tokens": "token_embedder/embedding",
    "blocks.attention_norm": "decoder/{layers}/pre_self_attention_layer_norm/scale",
    "blocks.q": _ATTENTION + "query/kernel",
    "blocks.k": _ATTENTION + "key/kernel",
    "blocks.v": _ATTENTION + "value/kernel",
    "blocks.o": _ATTENTION + "out/kernel",
    "blocks.q.bias": _ATTENTION + "query/bias",
    "blocks.k.bias": _ATTENTION + "key/bias",
    "blocks.v.bias": _ATTENTION + "value/bias",
    "blocks.q_norm": _ATTENTION + "query_norm/scale",
    "blocks.k_norm": _ATTENTION + "key_norm/scale",
    "blocks.mlp_norm": "decoder/{layers}/post_self_attention_layer_norm/scale",
    "blocks.gate": "decoder/{layers}/mlp/wi_0/kernel",
    "blocks.up": "decoder/{layers}/mlp/wi_1/kernel",
    "blocks.down": "decoder/{layers}/mlp/wo/kernel",
    "final_norm": "decoder/decoder_norm/scale",
    "lm_head": "decoder/logits_dense/kernel",
}


def stored_parameters(a: Architecture) -> dict[str, StoredParameter]:
    """Every parameter of an architecture by its dotted path; ShoalError where MaxText has no such model."""
    if a.output_bias or a.mlp_bias or (a.qkv_bias and a.qk_norm):
        raise ShoalError("MaxText has no model with these biases (on the attention's output, the feed-forward part, or "
                         "together with norms on queries and keys): keep it in Hugging Face's format")
    found = {}
    for keys, declared in jax.tree_util.tree_leaves_with_path(param_specs(a), is_leaf=is_param_spec):
        path = dotted(keys)
        name = _NAMES[path]
        layered = "{layers}" in name
        shape, axes = (declared.shape[1:], declared.axes[1:]) if layered else (declared.shape, declared.axes)
        heads = {"q": a.num_heads, "k": a.num_kv_heads, "v": a.num_kv_heads, "o": a.num_heads}
        kind = path.removeprefix("blocks.").removesuffix(".bias")
        if kind in heads:  # MaxText splits the dimension of all heads in two
            axis = axes.index("heads")
            shape = (*shape[:axis], heads[kind], a.head_dim, *shape[axis + 1:])
            axes = (*axes[:axis], "heads", None, *axes[axis + 1:])
        llama = not (a.qkv_bias or a.qk_norm)
        factor = float(np.float32(a.head_dim**-0.5)) if llama and path == "blocks.q" else 1.0
        found[path] = StoredParameter(path, name, shape, axes, declared, kind in ("q", "k"), factor)
    return found


def in_pairs(name: str, a: Architecture) -> bool:
    """True if rotary dimensions that belong together are adjacent: by MaxText's name of the model; without one, where
    the frequencies are stretched as in Llama 3.1."""
    if name:
        return name.lower().startswith("llama3.1")
    return a.rope_scaling is not None and a.rope_scaling.kind == "llama3"


def to_maxtext(value: np.ndarray, parameter: StoredParameter, pairs: bool) -> np.ndarray:
    """One layer's array of Shoal ([in, out], [n]), float32, in MaxText's form."""
    value = value.reshape(parameter.shape)
    if parameter.rotary and pairs:
        halves = value.reshape(*parameter.shape[:-1], 2, parameter.shape[-1] // 2)
        value = halves.swapaxes(-1, -2).reshape(parameter.shape)
    return value if parameter.factor == 1.0 else value * np.float32(parameter.factor)


def from_maxtext(arrays: list[jax.Array], parameter: StoredParameter, pairs: bool, scanned: bool,
                 dtype: Any) -> jax.Array:
    """MaxText's arrays of a parameter (one, or one a layer) in Shoal's form, layers first. Traced."""
    value = arrays[0]
    if parameter.layered:
        value = jnp.moveaxis(value, STACKED_AXIS, 0) if scanned else jnp.stack(arrays)
    if parameter.rotary and pairs:
        by_pair = value.reshape(*value.shape[:-1], value.shape[-1] // 2, 2)
        value = by_pair.swapaxes(-1, -2).reshape(value.shape)
    if parameter.factor != 1.0:
        value = value.astype(jnp.float32) * np.float32(1 / parameter.factor)
    shape = parameter.declared.shape
    return value.reshape((value.shape[0], *shape[1:]) if parameter.layered else shape).astype(dtype)


def check_arrays(shapes: Mapping[str, tuple[int, ...]], a: Architecture, scan_layers: bool, where: Path,
                 model: str) -> str:
    """The prefix of the parameters' names, where they fit the architecture of `model` one to one; else ShoalError with
    the first that does not."""
    root = next((root for root in ROOTS if root + _NAMES["embed_tokens"] in shapes), None)
    if root is None:
        raise ShoalError(f"{where} holds no MaxText model: expected params/params/{_NAMES['embed_tokens']} among its "
                         f"arrays, found {', '.join(sorted(shapes)[:3]) or 'none'}")
    found = {name.removeprefix(root): shape for name, shape in shapes.items() if name.startswith(root)}
    if not root:  # the optimizer's state and the step have the same prefix
        found = {name: shape for name, shape in found.items() if name.startswith(("decoder/", "token_embedder/"))}
    stacked = any(name.startswith("decoder/layers/") for name in found)
    if stacked != scan_layers and (stacked or "decoder/layers_0/mlp/wo/kernel" in found):
        how = "stacked in one array each" if stacked else "in arrays of their own (decoder/layers_0, ...)"
        raise ShoalError(f"{where} has its layers {how}, which is not what scan_layers={str(scan_layers).lower()} "
                         f"says: give scan_layers={str(stacked).lower()}")
    wanted = {name: parameter.stored(a.num_layers, scan_layers)[0]
              for parameter in stored_parameters(a).values() for name in parameter.names(a.num_layers, scan_layers)}
    fault = next((f"{name} is {list(found[name])} instead of {list(shape)}"
                  for name, shape in wanted.items() if found.get(name, shape) != shape), "")
    for kind, names in (("lacks", wanted.keys() - found.keys()), ("also has", found.keys() - wanted.keys())):
        if names and not fault:
            fault = f"it {kind} {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    if fault:
        raise ShoalError(f"{where} does not fit {model}: {fault}; give the name of the model that it is, or a "
                         "tokenizer folder with its config.json")
    return root


@dataclass(frozen=True)
class MaxTextCheckpoint:
    """A MaxText checkpoint that fits an architecture."""

    folder: Path
    architecture: Architecture
    pairs: bool  # order of rotary dimensions
    scan_layers: bool
    root: str
    dtypes: Mapping[str, Any]  # of its arrays, by name

    def describe(self) -> str:
        return f"MaxText checkpoint {self.folder}: {layout_text(self.scan_layers, self.pairs)}"

    def load(self, role: Role, dtype: Any = np.float32) -> Params:
        """The parameters, each read for the devices that hold it and converted there, one after the other: the most
        memory needed beside them is one parameter of all layers."""
        found = stored_parameters(self.architecture)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self._parameter(found[dotted(path)], None, role, dtype),
            param_specs(self.architecture), is_leaf=is_param_spec)

    def load_lazily(self, role: Role, dtype: Any = np.float32) -> Any:
        """The parameters as `hf.LazyParameter`: one parameter of all layers (of one layer, where they are not stacked)
        is in memory at a time."""
        found, cached = stored_parameters(self.architecture), dict[str, np.ndarray]()

        def read(parameter: StoredParameter, layer: int | None) -> np.ndarray:
            if layer is not None and not self.scan_layers:
                return np.asarray(self._parameter(parameter, layer, role, dtype))[0]
            if parameter.path not in cached:
                cached.clear()
                cached[parameter.path] = np.asarray(self._parameter(parameter, None, role, dtype))
            return cached[parameter.path] if layer is None else cached[parameter.path][layer]

        return jax.tree_util.tree_map_with_path(
            lambda path, declared: hf.LazyParameter(declared.shape, partial(read, found[dotted(path)])),
            param_specs(self.architecture), is_leaf=is_param_spec)

    def _parameter(self, parameter: StoredParameter, layer: int | None, role: Role, dtype: Any) -> jax.Array:
        """A parameter in Shoal's form; with `layer`, that layer alone, [1, ...]."""
        count = self.architecture.num_layers
        shape, axes = parameter.stored(count, self.scan_layers)
        names = [self.root + name for name in parameter.names(count, self.scan_layers)]
        names = names if layer is None else names[layer : layer + 1]
        axes = tuple(None if axis in ("heads", "vocab") and size % role.tensor else axis
                     for axis, size in zip(axes, shape, strict=True))
        sharding = role.sharding(axes, shape)
        stored = read_leaves(self.folder, {
            name: jax.ShapeDtypeStruct(shape, self.dtypes[name], sharding=sharding) for name in names})
        assemble = partial(from_maxtext, parameter=parameter, pairs=self.pairs, scanned=self.scan_layers, dtype=dtype)
        out = role.replicated if layer is not None else parameter.declared.sharding(role)
        return jax.jit(assemble, out_shardings=out)([stored[name] for name in names]).block_until_ready()


def layout_text(scan_layers: bool, pairs: bool) -> str:
    return (f"layers {'stacked' if scan_layers else 'one by one'}, rotary dimensions in "
            f"{'pairs' if pairs else 'halves'}")


def arrays_to_write(read: ReadPart, a: Architecture, pairs: bool, scan_layers: bool,
                    dtype: np.dtype) -> dict[str, LazyArray]:
    """The arrays of MaxText's tree by name, each read and converted when it is written."""

    def one_layer(parameter: StoredParameter, layer: int, _: slice | None = None) -> np.ndarray:
        index = (slice(layer, layer + 1), *(slice(0, size) for size in parameter.declared.shape[1:]))
        return to_maxtext(read(parameter.path, index)[0], parameter, pairs).astype(dtype)

    def layers(parameter: StoredParameter, part: slice) -> np.ndarray:
        return np.stack([one_layer(parameter, layer) for layer in range(part.start, part.stop)], STACKED_AXIS)

    def rows(parameter: StoredParameter, axis: int, part: slice) -> np.ndarray:
        index = [slice(0, size) for size in parameter.shape]
        index[axis] = part
        return read(parameter.path, tuple(index)).astype(dtype)

    arrays = {}
    for parameter in stored_parameters(a).values():
        shape, axes = parameter.stored(a.num_layers, scan_layers)
        for layer, name in enumerate(parameter.names(a.num_layers, scan_layers)):
            if not parameter.layered:
                axis = axes.index("vocab") if "vocab" in axes else 0
                how = (axis, partial(rows, parameter, axis), False)
            elif scan_layers:
                how = (STACKED_AXIS, partial(layers, parameter), True)
            else:
                how = (None, partial(one_layer, parameter, layer), False)
            arrays[ROOTS[0] + name] = LazyArray(shape, dtype, *how)
    return arrays


class MaxTextFormat:
    """The CheckpointFormat of MaxText."""

    def find(self, path: Path) -> Path | None:
        return find_tree(path)

    def resolve(self, section: ModelSection, found: Path) -> ModelSpec:
        name = section.name
        hub_id = name if "/" in name else model_named(name).hub_id if name else ""
        if not (section.tokenizer or hub_id):
            raise self.unnamed(found, "model.name", "model.tokenizer")
        tokenizer = hub.locate(section.tokenizer or hub_id, weights=False)
        checkpoint = self.open(found, name, tokenizer, section.scan_layers)
        a = checkpoint.architecture
        config = None if hf_config.describes(tokenizer, a) else hf_config.make_config(a, tokenizer)
        return ModelSpec(tokenizer, a, checkpoint.load, config, (checkpoint.describe(),), section.template)

    def open(self, found: Path, model_name: str, reference: Path | None, scan_layers: bool) -> MaxTextCheckpoint:
        name = "" if "/" in model_name else model_name
        if name:
            a, model = model_named(name).architecture, name
        else:
            folder = hub.locate(model_name, weights=False) if model_name else reference
            assert folder is not None
            a, model = hf_config.architecture_of(folder), f"{folder}/config.json"
        tree = inspect_tree(found)
        root = check_arrays(tree.shapes, a, scan_layers, found, model)
        pairs = tree.metadata.get("rope_in_pairs")  # written by `shoal convert`
        pairs = in_pairs(name, a) if pairs is None else bool(pairs)
        return MaxTextCheckpoint(found, a, pairs, scan_layers, root, tree.dtypes)

    def arrays(self, read: ReadPart, a: Architecture, model_name: str, scan_layers: bool,
               dtype: np.dtype) -> ForeignArrays:
        pairs = in_pairs(model_name, a)
        inexact = any(math.frexp(parameter.factor)[0] != 0.5 for parameter in stored_parameters(a).values())
        warnings = (f"dtype=bfloat16: MaxText's queries are divided by the square root of head_dim={a.head_dim}, which "
                    "rounds them once more; dtype=float32 keeps bfloat16 weights as they are",)
        return ForeignArrays(arrays_to_write(read, a, pairs, scan_layers, dtype),
                             {"scan_layers": scan_layers, "rope_in_pairs": pairs}, layout_text(scan_layers, pairs),
                             warnings if inexact and dtype.name == "bfloat16" else ())

    def unnamed(self, found: Path, name_key: str, tokenizer_key: str) -> ShoalError:
        return ShoalError(f"{found} is a MaxText checkpoint, which does not say what model it is: give {name_key} "
                          f"(llama3.1-8b, ...), or as {tokenizer_key} a folder that also holds config.json")


FORMAT = MaxTextFormat()
