"""MaxText's checkpoints: the names, shapes and numbers of their arrays, to and from Shoal's
parameters.

Read from MaxText's sources, where this comes from (folders under `src/maxtext/`):

    names, transposition        checkpoint_conversion/utils/param_mapping.py, Llama 3.1's and Qwen's
                                mappings
    layers stacked on axis 1    configs/base.yml, `param_scan_axis`; else `layers_0`, `layers_1`,
                                ...
    query divided by sqrt(A)    layers/attentions.py, `init_query_w`: attention does not scale,
                                Llama's queries are stored scaled; models/qwen2.py and qwen3.py
                                scale at run time, theirs are not
    order of rotary dimensions  layers/attentions.py, `init_rotary_embedding`: pairs
                                (x0 y0 x1 y1 ...) where the model's name starts with llama3.1, else
                                halves (x0 x1 ... y0 y1 ...), as in HF
    norms without an offset     layers/normalizations.py, `scale_offset` is 0
    where the tree stands       common/checkpointing.py: `params/params/...` in the item `items` of
                                step 0; a training checkpoint has `opt_state` beside it

For llama3.3-70b MaxText disagrees with itself: `llama_or_mistral_ckpt.py` leaves Meta's own files
in pairs and Hugging Face's in halves, its attention computes in halves. Halves are read and written
under that name; one in pairs is read under the name llama3.1-70b, which has the same sizes.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from shoal.buckets import area_of, complete
from shoal.files import is_offline, sample_of
from shoal.mesh import Role
from shoal.model import families
from shoal.model.architecture import Architecture
from shoal.model.parameters import Keep, ParamSpec, param_specs
from shoal.model.published import model_named
from shoal.records import Params, ShoalError
from shoal.stop import NotHere
from shoal.weights.checkpoints import FOLDER
from shoal.weights.hub import locate
from shoal.weights.layout import WINDOW_BYTES, Part, assemble
from shoal.weights.orbax import (
    StoredArray,
    check_room,
    leaf_types,
    load_orbax,
    reading,
    save_args,
    writing,
)
from shoal.weights.tensor_files import LazyArray, OutputTensor, grid

ROOTS = ("params/params/", "params/", "")
"""Prefixes under which a checkpoint may hold the parameters, tried in order."""
STACKED_AXIS = 1
"""The axis of layers in a stacked array."""
FILE_BYTES = 2 << 30
"""Target size of Orbax's files, the one that MaxText sets."""
INNER = Path("0", "items")
"""Where MaxText looks for a tree in a folder of checkpoints."""

ReadPart = Callable[[ParamSpec, tuple[slice, ...]], np.ndarray]
"""A parameter and the index of a part of it, all columns of some rows of Hugging Face's tensors ->
the part."""

_ATTENTION, _MLP = "decoder/{layers}/self_attention/", "decoder/{layers}/mlp/"
_NAMES: Mapping[str, str] = {
    "embed_tokens.weight": "token_embedder/embedding",
    "input_layernorm.weight": "decoder/{layers}/pre_self_attention_layer_norm/scale",
    "q_proj.weight": _ATTENTION + "query/kernel",
    "k_proj.weight": _ATTENTION + "key/kernel",
    "v_proj.weight": _ATTENTION + "value/kernel",
    "o_proj.weight": _ATTENTION + "out/kernel",
    "q_proj.bias": _ATTENTION + "query/bias",
    "k_proj.bias": _ATTENTION + "key/bias",
    "v_proj.bias": _ATTENTION + "value/bias",
    "q_norm.weight": _ATTENTION + "query_norm/scale",
    "k_norm.weight": _ATTENTION + "key_norm/scale",
    "post_attention_layernorm.weight": "decoder/{layers}/post_self_attention_layer_norm/scale",
    "gate_proj.weight": _MLP + "wi_0/kernel",
    "up_proj.weight": _MLP + "wi_1/kernel",
    "down_proj.weight": _MLP + "wo/kernel",
    "norm.weight": "decoder/decoder_norm/scale",
    "lm_head.weight": "decoder/logits_dense/kernel",
}
"""The last two parts of a tensor's name in Hugging Face's files -> MaxText's name."""


# ---- one array


@dataclass(frozen=True)
class MaxTextArray:
    """An array of MaxText's: a parameter, or one layer of it."""

    name: str  # "decoder/layers/self_attention/query/kernel"
    spec: ParamSpec  # of the parameter
    layer: int | None = None  # that it holds; None for all
    head_dim: int = 0
    head_axis: int | None = (
        None  # of a layer's: all heads and a head's width, one dimension in Shoal, are two
    )
    in_pairs: bool = (
        False  # its last dimension is rotated by position, in another order than Shoal's
    )
    factor: float = 1.0  # MaxText's values are Shoal's times this

    @property
    def scanned(self) -> bool:
        return self.spec.stacked and self.layer is None

    @property
    def shape(self) -> tuple[int, ...]:
        axis, shape = self.head_axis, self.spec.shape[self.spec.stacked :]
        if axis is not None:
            shape = (*shape[:axis], shape[axis] // self.head_dim, self.head_dim, *shape[axis + 1 :])
        return (
            (*shape[:STACKED_AXIS], self.spec.shape[0], *shape[STACKED_AXIS:])
            if self.scanned
            else shape
        )

    @property
    def row_axis(self) -> int:
        """Its axis that is the rows of Hugging Face's tensor."""
        if not self.spec.transposed:
            return 0
        return len(self.shape) - (2 if self.head_axis == 1 else 1)

    @property
    def whole_axis(self) -> int | None:
        """Its axis that is the width of a head, which no part cuts."""
        return None if self.head_axis is None else self.head_axis + 1 + self.scanned

    def index(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where a part is in Shoal's parameter."""
        cuts, layers = list(part), []
        if self.spec.stacked:
            layers = [
                cuts.pop(STACKED_AXIS) if self.layer is None else slice(self.layer, self.layer + 1)
            ]
        if self.head_axis is not None:
            heads, width = cuts[self.head_axis], cuts.pop(self.head_axis + 1).stop
            cuts[self.head_axis] = slice(heads.start * width, heads.stop * width)
        return (*layers, *cuts)

    def from_shoal(self, values: np.ndarray) -> np.ndarray:
        """A part of Shoal's parameter as it is here."""
        if self.head_axis is not None:
            axis = self.head_axis + self.spec.stacked
            values = values.reshape(
                *values.shape[:axis], -1, self.head_dim, *values.shape[axis + 1 :]
            )
        if self.in_pairs:
            halves = values.reshape(*values.shape[:-1], 2, values.shape[-1] // 2)
            values = halves.swapaxes(-1, -2).reshape(values.shape)
        if self.factor != 1.0:
            values = values.astype(np.float32) * np.float32(self.factor)
        if self.spec.stacked:
            values = np.moveaxis(values, 0, STACKED_AXIS) if self.scanned else values[0]
        return values

    def to_shoal(self, values: np.ndarray) -> np.ndarray:
        """The way back."""
        if self.spec.stacked:
            values = np.moveaxis(values, STACKED_AXIS, 0) if self.scanned else values[None]
        if self.in_pairs:
            by_pair = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
            values = by_pair.swapaxes(-1, -2).reshape(values.shape)
        if self.factor != 1.0:
            values = values.astype(np.float32) * np.float32(1 / self.factor)
        if self.head_axis is not None:
            axis = self.head_axis + self.spec.stacked
            values = values.reshape(*values.shape[:axis], -1, *values.shape[axis + 2 :])
        return values


def arrays_of(a: Architecture, scan_layers: bool, pairs: bool) -> list[MaxTextArray]:
    """All arrays of an architecture; ShoalError where MaxText has no such model."""
    if a.output_bias or a.mlp_bias or (a.qkv_bias and a.qk_norm):
        raise ShoalError(
            "MaxText has no model with these biases (on the attention's output, the feed-forward "
            "part, or together with norms on queries and keys): keep it in Hugging Face's format"
        )
    found, scale = [], 1.0 if a.qkv_bias or a.qk_norm else float(np.float32(a.head_dim**-0.5))
    for spec in jax.tree.leaves(param_specs(a)):
        last = ".".join(spec.name.split(".")[-2:])
        head_axis = spec.axes[spec.stacked :].index("heads") if "heads" in spec.axes else None
        make = partial(
            MaxTextArray,
            spec=spec,
            head_dim=a.head_dim,
            head_axis=head_axis,
            in_pairs=pairs and last.startswith(("q_proj", "k_proj")),
            factor=scale if last == "q_proj.weight" else 1.0,
        )
        layers = range(a.num_layers) if spec.stacked and not scan_layers else [None]
        found += [
            make(
                _NAMES[last].format(layers="layers" if layer is None else f"layers_{layer}"),
                layer=layer,
            )
            for layer in layers
        ]
    return found


def name_in_pairs(name: str, a: Architecture) -> bool:
    """True if rotary dimensions that belong together are adjacent: by MaxText's name of the model;
    without one, where the frequencies are stretched as in Llama 3.1."""
    if name:
        return name.lower().startswith("llama3.1")
    return a.rope_scaling is not None and a.rope_scaling.kind == "llama3"


def layout_text(scan_layers: bool, pairs: bool) -> str:
    return (
        f"layers {'stacked' if scan_layers else 'one by one'}, rotary dimensions in "
        f"{'pairs' if pairs else 'halves'}"
    )


# ---- reading


def find_tree(folder: Path) -> Path | None:
    """The tree at a path, in its `items`, or in its newest step; None unless Orbax wrote it and it
    is not part of a run of Shoal's."""
    for path in (folder, folder / INNER.name):
        if (path / "_METADATA").is_file() and not (path / "config.json").exists():
            # Our own checkpoints are Orbax trees, too; `checkpoint.py` reads those, and compares
            # checksums.
            return (
                None
                if path.parent.parent.name == FOLDER and (path.parent / "extra").exists()
                else path
            )
    steps = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    trees = map(find_tree, sorted(steps, key=lambda path: -int(path.name)))
    return next((tree for tree in trees if tree), None)


@dataclass(frozen=True)
class MaxTextCheckpoint:
    """A MaxText checkpoint that fits an architecture."""

    folder: Path
    architecture: Architecture
    scan_layers: bool
    pairs: bool  # order of rotary dimensions
    root: str
    dtypes: Mapping[str, Any]  # of its arrays, by name

    def describe(self) -> str:
        return f"MaxText checkpoint {self.folder}: {layout_text(self.scan_layers, self.pairs)}"

    def load(
        self, role: Role, dtype: Any = np.float32, keep: Keep = lambda _, array: array
    ) -> Params:
        """The parameters in the role's layout, read a part at a time, each part once by a process;
        `keep` as in `hf.load`."""

        def read(spec: ParamSpec) -> Any:
            return keep(spec, assemble(self._parts(spec), spec.sharding(role), spec.shape, dtype))

        return jax.tree.map(read, param_specs(self.architecture))

    def digests(self) -> dict[str, str]:
        """A digest of the size of each file and of bytes from all over it, by name: a copy of the
        checkpoint has the same."""
        found = {}
        for file in sorted(self.folder.rglob("*")):
            if file.is_file():
                content = f"{file.stat().st_size} ".encode() + sample_of(file)
                found[str(file.relative_to(self.folder))] = hashlib.blake2b(
                    content, digest_size=8
                ).hexdigest()
        return found

    def tensors(self, file: IO[bytes], dtype: np.dtype) -> Iterator[OutputTensor]:
        """The tensors of Hugging Face's files, each read when it is written: one parameter at a
        time is in `file`, from which its tensors are read in windows."""
        staged = ""

        def read(spec: ParamSpec, layer: int, _: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
            nonlocal staged
            if spec.name != staged:
                self._stage(spec, file, dtype)
                staged = spec.name
            rows = spec.tensor_shape[0]
            step = max(1, rows * WINDOW_BYTES // (math.prod(spec.tensor_shape) * dtype.itemsize))
            for start in range(0, rows, step):
                # Mapped anew for each window: pages that were read count as this process's memory
                # until then.
                whole, window = (
                    np.memmap(file, dtype, "r", shape=spec.shape),
                    slice(start, start + step),
                )
                tensor = whole[layer] if spec.stacked else whole
                yield (
                    start,
                    transpose(tensor[:, window]) if spec.transposed else np.array(tensor[window]),
                )

        for spec in jax.tree.leaves(param_specs(self.architecture)):
            for layer, name in enumerate(spec.tensor_names):
                yield OutputTensor(name, spec.tensor_shape, partial(read, spec, layer))

    def _stage(self, spec: ParamSpec, file: IO[bytes], dtype: np.dtype) -> None:
        """Writes a parameter in Shoal's form to a file."""
        file.truncate(0)
        if hasattr(os, "posix_fallocate"):  # else a full disk ends the process by a signal
            os.posix_fallocate(file.fileno(), 0, math.prod(spec.shape) * dtype.itemsize)
        for index, read in self._parts(spec):
            np.memmap(file, dtype, "r+", shape=spec.shape)[index] = read().astype(dtype)

    def _parts(self, spec: ParamSpec) -> Iterator[Part]:
        """All of a parameter in parts of a window, or of a piece of the file where pieces are
        larger."""
        for array in arrays_of(self.architecture, self.scan_layers, self.pairs):
            if array.spec.name == spec.name:
                name = self.root + array.name
                stored = StoredArray(self.folder, name)
                steps = part_steps(stored, self.dtypes[name].itemsize, array.whole_axis)
                for part in grid(stored.shape, steps):
                    yield (
                        array.index(part),
                        lambda a=array, s=stored, part=part: a.to_shoal(s.read(part)),
                    )


def part_steps(array: StoredArray, itemsize: int, whole: int | None) -> list[int]:
    """Steps along an array's axes: a piece of the file, and as many more as a window holds; the
    axis `whole` is not cut."""
    steps = [min(piece, size) for piece, size in zip(array.pieces, array.shape, strict=True)]
    if whole is not None:
        steps[whole] = array.shape[whole]
    for axis in reversed(range(len(steps))):
        more = max(1, WINDOW_BYTES // (math.prod(steps) * itemsize))
        steps[axis] = min(array.shape[axis], steps[axis] * more)
    return steps


def transpose(values: np.ndarray) -> np.ndarray:
    """A copy of `values.T`, by blocks of rows: three times as fast as at once."""
    copy = np.empty(values.shape[::-1], values.dtype)
    for start in range(0, len(values), 64):
        copy[:, start : start + 64] = values[start : start + 64].T
    return copy


def open_checkpoint(
    found: Path,
    model_name: str,
    tokenizer: Path | None,
    scan_layers: bool,
    keys: tuple[str, str] = ("model.name", "model.tokenizer"),
) -> MaxTextCheckpoint:
    """The checkpoint, checked against the model of a name, else of the config.json beside the
    tokenizer. `keys`: of both, for errors."""
    if not (model_name or tokenizer):
        raise ShoalError(
            f"{found} is a MaxText checkpoint, which does not say what model it is: give {keys[0]} "
            f"(llama3.1-8b, ...), or as {keys[1]} a folder that also holds config.json"
        )
    if is_offline() and area_of(found):
        raise NotHere(found)
    complete(found)
    name = "" if "/" in model_name else model_name
    if name:
        a, model = model_named(name).architecture, name
    else:
        folder = locate(model_name or tokenizer or "", weights=False)
        a, model = families.architecture_of(folder), f"{folder}/config.json"
    with reading(found), load_orbax().PyTreeCheckpointer() as reader:
        tree = reader.metadata(found.absolute()).item_metadata
        if tree is None:
            raise ValueError("its list of arrays is damaged")
        leaves = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree.tree)
            if hasattr(leaf, "shape")
        }  # leaves of text have none
    if a.tie_embeddings and any(root + _NAMES["lm_head.weight"] in leaves for root in ROOTS):
        a = replace(a, tie_embeddings=False)  # as `hf.stored_architecture`
    root = _check_arrays(
        {name: tuple(leaf.shape or ()) for name, leaf in leaves.items()},
        a,
        scan_layers,
        found,
        model,
    )
    pairs = (tree.custom_metadata or {}).get("rope_in_pairs")  # written by `shoal convert`
    pairs = name_in_pairs(name, a) if pairs is None else bool(pairs)
    return MaxTextCheckpoint(
        found, a, scan_layers, pairs, root, {name: leaf.dtype for name, leaf in leaves.items()}
    )


def _check_arrays(
    shapes: Mapping[str, tuple[int, ...]],
    a: Architecture,
    scan_layers: bool,
    where: Path,
    model: str,
) -> str:
    """The prefix of the parameters' names, where they fit the architecture of `model` one to one;
    else ShoalError with the first that does not."""
    root = next((root for root in ROOTS if root + "token_embedder/embedding" in shapes), None)
    if root is None:
        raise ShoalError(
            f"{where} holds no MaxText model: expected params/params/token_embedder/embedding "
            f"among its arrays, found {', '.join(sorted(shapes)[:3]) or 'none'}"
        )
    found = {
        name.removeprefix(root): shape for name, shape in shapes.items() if name.startswith(root)
    }
    if not root:  # the optimizer's state and the step have the same prefix
        found = {
            name: shape
            for name, shape in found.items()
            if name.startswith(("decoder/", "token_embedder/"))
        }
    stacked = any(name.startswith("decoder/layers/") for name in found)
    if stacked != scan_layers and (stacked or "decoder/layers_0/mlp/wo/kernel" in found):
        how = (
            "stacked in one array each"
            if stacked
            else "in arrays of their own (decoder/layers_0, ...)"
        )
        raise ShoalError(
            f"{where} has its layers {how}, which is not what "
            f"scan_layers={str(scan_layers).lower()} says: give scan_layers={str(stacked).lower()}"
        )
    wanted = {array.name: array.shape for array in arrays_of(a, scan_layers, False)}
    fault = next(
        (
            f"{name} is {list(found[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ),
        "",
    )
    for kind, names in (
        ("lacks", wanted.keys() - found.keys()),
        ("also has", found.keys() - wanted.keys()),
    ):
        if names and not fault:
            fault = f"it {kind} {min(names)}" + (
                f" and {len(names) - 1} more" if len(names) > 1 else ""
            )
    if fault:
        raise ShoalError(
            f"{where} does not fit {model}: {fault}; give the name of the model that it is, or a "
            "tokenizer folder with its config.json"
        )
    return root


# ---- writing


def arrays_to_write(
    read: ReadPart, arrays: Iterable[MaxTextArray], dtype: np.dtype
) -> dict[str, LazyArray]:
    """The arrays of MaxText's tree by name, each read and converted when it is written."""

    def part_of(array: MaxTextArray, part: tuple[slice, ...]) -> np.ndarray:
        return array.from_shoal(read(array.spec, array.index(part))).astype(dtype, copy=False)

    return {
        ROOTS[0] + array.name: LazyArray(
            array.shape,
            dtype,
            partial(part_of, array),
            (STACKED_AXIS, array.row_axis) if array.scanned else (array.row_axis,),
            STACKED_AXIS if array.scanned else None,
        )
        for array in arrays
    }


def write_tree(
    folder: Path,
    target: Path,
    arrays: Mapping[str, LazyArray],
    metadata: Mapping[str, Any],
    on_written: Callable[[int], None],
) -> None:
    """Writes `folder/0/items` as MaxText does: the step, the arrays, an empty optimizer state.

    One piece of one array at a time is in memory; `on_written` gets the bytes of each. Errors name
    `target`, the folder that the result will be moved to.
    """
    ocp, (step, item) = load_orbax(), INNER.parts
    tree: dict[str, Any] = {"step": 0, "opt_state": {}}
    for name, leaf in arrays.items():
        *folders, last = name.split("/")
        place = tree
        for one in folders:
            place = place.setdefault(one, {})
        place[last] = leaf
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, type_handler_registry=leaf_types(on_written)
    )
    options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    with (
        writing(target),
        ocp.CheckpointManager(
            folder.absolute(), item_names=(item,), item_handlers={item: handler}, options=options
        ) as manager,
    ):
        check_room(folder, list(arrays.values()))
        manager.save(
            int(step),
            args=ocp.args.Composite(
                **{
                    item: ocp.args.PyTreeSave(
                        tree,
                        save_args=jax.tree.map(save_args, tree),
                        ocdbt_target_data_file_size=FILE_BYTES,
                        custom_metadata=dict(metadata),
                    )
                }
            ),
        )
