"""MaxText's tree of parameters: names, shapes and what is done to the numbers, there and back.

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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.model.hf import dotted
from shoal.model.transformer import Architecture, ParamSpec, is_param_spec, param_specs
from shoal.types import ShoalError

ROOTS = ("params/params/", "params/", "")
"""Where the tree may stand in a checkpoint, tried in order."""

STACKED_AXIS = 1
"""Of the layers, in a stacked array."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in MaxText's tree: of one layer, if it is of layers."""

    path: str  # ours: "blocks.q"
    name: str  # "decoder/{layers}/self_attention/query/kernel"
    shape: tuple[int, ...]  # [D, H, A]
    axes: tuple[str | None, ...]  # logical, of these
    declared: ParamSpec  # ours, stacked
    rotary: bool = False  # its last dimension is turned by position
    factor: float = 1.0  # what is stored there is ours times this

    @property
    def layered(self) -> bool:
        return "{layers}" in self.name

    def names(self, num_layers: int, scan_layers: bool) -> list[str]:
        """What it is called: one name, or one a layer."""
        if not self.layered or scan_layers:
            return [self.name.format(layers="layers")]
        return [self.name.format(layers=f"layers_{layer}") for layer in range(num_layers)]

    def stored(self, num_layers: int, scan_layers: bool) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
        """Shape and logical axes of each of these arrays."""
        if not (self.layered and scan_layers):
            return self.shape, self.axes
        return _inserted(self.shape, num_layers), _inserted(self.axes, "layers")


def _inserted(values: tuple, value: Any) -> tuple:
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


def places(a: Architecture) -> dict[str, Place]:
    """Every parameter of an architecture, by its dotted path; ShoalError where MaxText has no such model."""
    if a.output_bias or a.mlp_bias or (a.qkv_bias and a.qk_norm):
        raise ShoalError("MaxText has no model with these biases (on the attention's output, the feed-forward part, or "
                         "beside norms on queries and keys): it stays in Hugging Face's format")
    found = {}
    for keys, declared in jax.tree_util.tree_leaves_with_path(param_specs(a), is_leaf=is_param_spec):
        path = dotted(keys)
        name = _NAMES[path]
        layered = "{layers}" in name
        shape, axes = (declared.shape[1:], declared.axes[1:]) if layered else (declared.shape, declared.axes)
        heads = {"q": a.num_heads, "k": a.num_kv_heads, "v": a.num_kv_heads, "o": a.num_heads}
        kind = path.removeprefix("blocks.").removesuffix(".bias")
        if kind in heads:  # the dimension of all heads is two there
            place = axes.index("heads")
            shape = (*shape[:place], heads[kind], a.head_dim, *shape[place + 1:])
            axes = (*axes[:place], "heads", None, *axes[place + 1:])
        llama = not (a.qkv_bias or a.qk_norm)
        factor = float(np.float32(a.head_dim**-0.5)) if llama and path == "blocks.q" else 1.0
        found[path] = Place(path, name, shape, axes, declared, kind in ("q", "k"), factor)
    return found


def in_pairs(name: str, a: Architecture) -> bool:
    """Whether rotary dimensions that belong together lie side by side: by MaxText's name of the model; without one,
    where the frequencies are stretched as in Llama 3.1."""
    if name:
        return name.lower().startswith("llama3.1")
    return a.rope_scaling is not None and a.rope_scaling.kind == "llama3"


def to_maxtext(value: np.ndarray, place: Place, pairs: bool) -> np.ndarray:
    """One layer's array as it lies in ours ([in, out], [n]), float32, in MaxText's form."""
    value = value.reshape(place.shape)
    if place.rotary and pairs:
        halves = value.reshape(*place.shape[:-1], 2, place.shape[-1] // 2)
        value = halves.swapaxes(-1, -2).reshape(place.shape)
    return value if place.factor == 1.0 else value * np.float32(place.factor)


def from_maxtext(arrays: list[jax.Array], place: Place, pairs: bool, scanned: bool, dtype: Any) -> jax.Array:
    """What is stored (one array, or one a layer) in our form, layers first. Traced."""
    value = arrays[0]
    if place.layered:
        value = jnp.moveaxis(value, STACKED_AXIS, 0) if scanned else jnp.stack(arrays)
    if place.rotary and pairs:
        by_pair = value.reshape(*value.shape[:-1], value.shape[-1] // 2, 2)
        value = by_pair.swapaxes(-1, -2).reshape(value.shape)
    if place.factor != 1.0:
        value = value.astype(jnp.float32) * np.float32(1 / place.factor)
    ours = place.declared.shape
    return value.reshape((value.shape[0], *ours[1:]) if place.layered else ours).astype(dtype)


def root_of(shapes: Mapping[str, Any], where: Any) -> str:
    """What stands before the tree's names in a checkpoint."""
    for root in ROOTS:
        if root + _NAMES["embed_tokens"] in shapes:
            return root
    raise ShoalError(f"{where} holds no MaxText model: expected params/params/{_NAMES['embedding']} among its arrays, "
                     f"found {', '.join(sorted(shapes)[:3]) or 'none'}")


def check(shapes: Mapping[str, tuple[int, ...]], a: Architecture, scan_layers: bool, where: Any, model: str) -> str:
    """The tree's root, where its arrays fit the architecture of `model` one to one; else ShoalError with the first
    that does not."""
    root = root_of(shapes, where)
    found = {name.removeprefix(root): shape for name, shape in shapes.items() if name.startswith(root)}
    if not root:  # beside the optimizer's state and the step
        found = {name: shape for name, shape in found.items() if name.startswith(("decoder/", "token_embedder/"))}
    stacked = any(name.startswith("decoder/layers/") for name in found)
    if stacked != scan_layers and (stacked or "decoder/layers_0/mlp/wo/kernel" in found):
        how = "stacked in one array each" if stacked else "in arrays of their own (decoder/layers_0, ...)"
        raise ShoalError(f"{where} has its layers {how}, which is not what scan_layers={str(scan_layers).lower()} "
                         f"says: give scan_layers={str(stacked).lower()}")
    wanted = {name: place.stored(a.num_layers, scan_layers)[0]
              for place in places(a).values() for name in place.names(a.num_layers, scan_layers)}
    for name, shape in wanted.items():
        if name in found and found[name] != shape:
            raise ShoalError(f"{where} does not fit {model}: {name} is {list(found[name])} instead of {list(shape)}; "
                             "give the name of the model that it is, or a tokenizer folder with its config.json")
    for kind, names in (("lacks", wanted.keys() - found.keys()), ("also has", found.keys() - wanted.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ShoalError(f"{where} does not fit {model}: it {kind} {min(names)}{more}; give the name of the model "
                             "that it is, or a tokenizer folder with its config.json")
    return root
