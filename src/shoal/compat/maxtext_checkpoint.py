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
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from shoal.compat.maxtext_tree import ITEM, STEP, find_tree, inspect_tree, write_tree
from shoal.config.schema import ModelSection
from shoal.mesh import Role
from shoal.model import hf, hf_config, hub
from shoal.model.architecture import Architecture
from shoal.model.hf import NAMES, dotted
from shoal.model.lazy_array import LazyArray, grid
from shoal.model.names import model_named
from shoal.model.param_layout import WINDOW_BYTES
from shoal.model.parameters import ParamSpec, param_specs
from shoal.model.spread import Part, assemble
from shoal.run.checkpoint_formats import ForeignArrays, ReadRows
from shoal.run.loading import ModelSpec
from shoal.trainer.orbax import StoredArray
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
    transposed: bool  # in Hugging Face's files
    head_axis: int | None = None  # of `shape`: all heads and a head's width, one dimension in Shoal, are two
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


    def row_axis(self) -> int:
        """The axis of `shape` that is the rows of the tensor in Hugging Face's files."""
        if not self.transposed:
            return 0
        last = len(self.shape) - 1
        return last - 1 if self.head_axis == last - 1 else last

    def rows(self, part: slice) -> slice:
        """The rows of Hugging Face's tensor that a part of `row_axis` is."""
        width = self.shape[self.row_axis() + 1] if self.row_axis() == self.head_axis else 1
        return slice(part.start * width, part.stop * width)

    def place(self, part: tuple[slice, ...], layers: slice | None) -> tuple[slice, ...]:
        """Where a part of one layer's array, with whole heads, is in Shoal's parameter."""
        cuts = list(part)
        if self.head_axis is not None:
            heads, width = cuts[self.head_axis], cuts.pop(self.head_axis + 1).stop
            cuts[self.head_axis] = slice(heads.start * width, heads.stop * width)
        return (*(() if layers is None else (layers,)), *cuts)


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
    for keys, declared in jax.tree_util.tree_leaves_with_path(param_specs(a)):
        path = dotted(keys)
        name = _NAMES[path]
        layered = "{layers}" in name
        shape, axes = (declared.shape[1:], declared.axes[1:]) if layered else (declared.shape, declared.axes)
        heads = {"q": a.num_heads, "k": a.num_kv_heads, "v": a.num_kv_heads, "o": a.num_heads}
        kind, axis = path.removeprefix("blocks.").removesuffix(".bias"), None
        if kind in heads:
            axis = axes.index("heads")
            shape = (*shape[:axis], heads[kind], a.head_dim, *shape[axis + 1:])
            axes = (*axes[:axis], "heads", None, *axes[axis + 1:])
        llama = not (a.qkv_bias or a.qk_norm)
        factor = float(np.float32(a.head_dim**-0.5)) if llama and path == "blocks.q" else 1.0
        found[path] = StoredParameter(path, name, shape, axes, declared, NAMES[path].transposed, axis,
                                      kind in ("q", "k"), factor)
    return found


def in_pairs(name: str, a: Architecture) -> bool:
    """True if rotary dimensions that belong together are adjacent: by MaxText's name of the model; without one, where
    the frequencies are stretched as in Llama 3.1."""
    if name:
        return name.lower().startswith("llama3.1")
    return a.rope_scaling is not None and a.rope_scaling.kind == "llama3"


def to_maxtext(values: np.ndarray, parameter: StoredParameter, pairs: bool) -> np.ndarray:
    """Whole heads of a layer's tensor, [rows, columns] as in Hugging Face's files, in MaxText's form."""
    values = transpose(values) if parameter.transposed else values
    shape = list(parameter.shape)
    shape[parameter.row_axis()] = -1
    values = values.reshape(shape)
    if parameter.rotary and pairs:
        halves = values.reshape(*values.shape[:-1], 2, values.shape[-1] // 2)
        values = halves.swapaxes(-1, -2).reshape(values.shape)
    return values if parameter.factor == 1.0 else values.astype(np.float32) * np.float32(parameter.factor)


def from_maxtext(values: np.ndarray, parameter: StoredParameter, pairs: bool, scanned: bool) -> np.ndarray:
    """A part of an array of MaxText, with whole heads, in Shoal's form: layers first."""
    if parameter.layered:
        values = np.moveaxis(values, STACKED_AXIS, 0) if scanned else values[None]
    if parameter.rotary and pairs:
        by_pair = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
        values = by_pair.swapaxes(-1, -2).reshape(values.shape)
    if parameter.factor != 1.0:
        values = values.astype(np.float32) * np.float32(1 / parameter.factor)
    if parameter.head_axis is not None:
        axis = parameter.head_axis + parameter.layered
        values = values.reshape(*values.shape[:axis], -1, *values.shape[axis + 2:])
    return values


def transpose(values: np.ndarray) -> np.ndarray:
    """A copy of `values.T`, by blocks of rows: three times as fast as at once."""
    copy = np.empty(values.shape[::-1], values.dtype)
    for start in range(0, len(values), 64):
        copy[:, start : start + 64] = values[start : start + 64].T
    return copy


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
        """The parameters in the role's layout, read a part at a time, each part once by a process."""
        found = stored_parameters(self.architecture)
        return jax.tree_util.tree_map_with_path(
            lambda path, declared: assemble(self._parts(found[dotted(path)]),
                                            declared.sharding(role), declared.shape, dtype),
            param_specs(self.architecture))

    @contextmanager
    def open_lazily(self, scratch: Path, dtype: Any = np.float32) -> Iterator[Any]:
        """The parameters as `hf.LazyParameter`: one of all layers at a time is in a file in the folder `scratch`, from
        which its tensors are read in windows."""
        dtype, staged = np.dtype(dtype), ""

        def read(parameter: StoredParameter, layer: int | None) -> Iterator[tuple[int, np.ndarray]]:
            nonlocal staged
            if parameter.path != staged:
                self._stage(parameter, file, dtype)
                staged = parameter.path
            size = parameter.rows(slice(0, parameter.shape[parameter.row_axis()])).stop
            step = max(1, size * WINDOW_BYTES // (math.prod(parameter.shape) * dtype.itemsize))
            for start in range(0, size, step):
                # Mapped anew for each window: pages that were read count as this process's memory until then.
                whole, rows = np.memmap(file, dtype, "r", shape=parameter.declared.shape), slice(start, start + step)
                tensor = whole if layer is None else whole[layer]
                yield start, transpose(tensor[:, rows]) if parameter.transposed else np.array(tensor[rows])

        with tempfile.TemporaryFile(dir=scratch) as file:
            found = stored_parameters(self.architecture)
            yield jax.tree_util.tree_map_with_path(
                lambda path, declared: hf.LazyParameter(declared.shape, partial(read, found[dotted(path)])),
                param_specs(self.architecture))

    def _stage(self, parameter: StoredParameter, file: IO[bytes], dtype: np.dtype) -> None:
        """Writes a parameter in Shoal's form to a file."""
        shape = parameter.declared.shape
        file.truncate(0)
        if hasattr(os, "posix_fallocate"):  # else a full disk ends the process by a signal
            os.posix_fallocate(file.fileno(), 0, math.prod(shape) * dtype.itemsize)
        for place, read in self._parts(parameter):
            np.memmap(file, dtype, "r+", shape=shape)[place] = read().astype(dtype)

    def _parts(self, parameter: StoredParameter) -> Iterator[Part]:
        """All of a parameter in parts of a window, or of a piece of the file where pieces are larger."""
        scanned = parameter.layered and self.scan_layers
        for number, name in enumerate(parameter.names(self.architecture.num_layers, self.scan_layers)):
            array = StoredArray(self.folder, self.root + name)
            heads = parameter.head_axis
            whole = None if heads is None else heads + 1 + (scanned and heads + 1 >= STACKED_AXIS)
            for part in grid(array.shape, part_steps(array, self.dtypes[self.root + name].itemsize, whole)):
                layers = slice(number, number + 1) if parameter.layered else None
                within = part
                if scanned:
                    layers, within = part[STACKED_AXIS], (*part[:STACKED_AXIS], *part[STACKED_AXIS + 1 :])
                yield parameter.place(within, layers), partial(self._read, array, part, parameter)

    def _read(self, array: StoredArray, part: tuple[slice, ...], parameter: StoredParameter) -> np.ndarray:
        return from_maxtext(array.read(part), parameter, self.pairs, self.scan_layers)


def part_steps(array: StoredArray, itemsize: int, whole: int | None) -> list[int]:
    """Steps along an array's axes: a piece of the file, and as many more as a window holds; the axis `whole` is not
    cut."""
    steps = [min(piece, size) for piece, size in zip(array.pieces, array.shape, strict=True)]
    if whole is not None:
        steps[whole] = array.shape[whole]
    for axis in reversed(range(len(steps))):
        more = max(1, WINDOW_BYTES // (math.prod(steps) * itemsize))
        steps[axis] = min(array.shape[axis], steps[axis] * more)
    return steps


def layout_text(scan_layers: bool, pairs: bool) -> str:
    return (f"layers {'stacked' if scan_layers else 'one by one'}, rotary dimensions in "
            f"{'pairs' if pairs else 'halves'}")


def arrays_to_write(read: ReadRows, a: Architecture, pairs: bool, scan_layers: bool,
                    dtype: np.dtype) -> dict[str, LazyArray]:
    """The arrays of MaxText's tree by name, each read and converted when it is written."""

    def of_layer(parameter: StoredParameter, layer: int, part: tuple[slice, ...]) -> np.ndarray:
        rows = parameter.rows(part[parameter.row_axis()])
        return to_maxtext(read(parameter.path, layer, rows), parameter, pairs).astype(dtype, copy=False)

    def of_layers(parameter: StoredParameter, part: tuple[slice, ...]) -> np.ndarray:
        layers, within = part[STACKED_AXIS], (*part[:STACKED_AXIS], *part[STACKED_AXIS + 1 :])
        return np.stack([of_layer(parameter, layer, within) for layer in range(layers.start, layers.stop)],
                        STACKED_AXIS)

    arrays = {}
    for parameter in stored_parameters(a).values():
        shape, _ = parameter.stored(a.num_layers, scan_layers)
        for layer, name in enumerate(parameter.names(a.num_layers, scan_layers)):
            if parameter.layered and scan_layers:
                row_axis = parameter.row_axis() + (parameter.row_axis() >= STACKED_AXIS)
                array = LazyArray(shape, dtype, partial(of_layers, parameter), (STACKED_AXIS, row_axis), STACKED_AXIS)
            else:
                array = LazyArray(shape, dtype, partial(of_layer, parameter, layer), (parameter.row_axis(),))
            arrays[ROOTS[0] + name] = array
    return arrays


class MaxTextFormat:
    """The CheckpointFormat of MaxText."""

    inner = Path(STEP, ITEM)

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

    def arrays(self, read: ReadRows, a: Architecture, model_name: str, scan_layers: bool,
               dtype: np.dtype) -> ForeignArrays:
        pairs = in_pairs(model_name, a)
        inexact = any(math.frexp(parameter.factor)[0] != 0.5 for parameter in stored_parameters(a).values())
        warnings = (f"dtype=bfloat16: MaxText's queries are divided by the square root of head_dim={a.head_dim}, which "
                    "rounds them once more; dtype=float32 keeps bfloat16 weights as they are",)
        return ForeignArrays(arrays_to_write(read, a, pairs, scan_layers, dtype),
                             {"scan_layers": scan_layers, "rope_in_pairs": pairs}, layout_text(scan_layers, pairs),
                             warnings if inexact and dtype.name == "bfloat16" else ())

    def write(self, folder: Path, target: Path, made: ForeignArrays, on_written: Callable[[int], None]) -> None:
        write_tree(folder, target, made.arrays, made.metadata, on_written)

    def unnamed(self, found: Path, name_key: str, tokenizer_key: str) -> ShoalError:
        return ShoalError(f"{found} is a MaxText checkpoint, which does not say what model it is: give {name_key} "
                          f"(llama3.1-8b, ...), or as {tokenizer_key} a folder that also holds config.json")


FORMAT = MaxTextFormat()
