"""Converts MaxText's checkpoints to Shoal's parameters and back: the names, shapes and numbers of
their arrays.

The rules come from MaxText's sources (folders under `src/maxtext/`):

    names, transposition        checkpoint_conversion/utils/param_mapping.py, Llama 3.1's and Qwen's
                                mappings
    layers stacked on axis 1    configs/base.yml, `param_scan_axis`; otherwise `layers_0`,
                                `layers_1`, ...
    query divided by sqrt(A)    layers/attentions.py, `init_query_w`: attention does not scale, so
                                Llama's queries are stored scaled; models/qwen2.py and qwen3.py
                                scale at run time, so Qwen's queries are not
    order of rotary dimensions  layers/attentions.py, `init_rotary_embedding`: pairs
                                (x0 y0 x1 y1 ...) if the model's name begins with llama3.1, else
                                halves (x0 x1 ... y0 y1 ...), as in HF
    norms without an offset     layers/normalizations.py, `scale_offset` is 0
    place of the tree           common/checkpointing.py: `params/params/...` in the item `items` of
                                step 0; a training checkpoint also has `opt_state` there

For llama3.3-70b MaxText disagrees with itself: `llama_or_mistral_ckpt.py` leaves Meta's own files
in pairs and Hugging Face's in halves, its attention computes in halves. Halves are read and written
under that name; a checkpoint in pairs is read under the name llama3.1-70b, which has the same
sizes.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from shoal.buckets import area_of, complete
from shoal.files import is_offline, sample_bytes
from shoal.mesh import Role
from shoal.model import families
from shoal.model.architecture import Architecture
from shoal.model.parameters import Keep, ParamSpec, keep_as_read, param_specs
from shoal.model.published import model_named
from shoal.records import Params, ShoalError
from shoal.stop import NotHere
from shoal.weights.checkpoints import FOLDER
from shoal.weights.hub import locate
from shoal.weights.layout import WINDOW_BYTES, Part, assemble
from shoal.weights.orbax import (
    StoredArray,
    check_room,
    explain_write_errors,
    leaf_types,
    load_orbax,
    reading,
    save_args,
)
from shoal.weights.tensor_files import LazyArray, OutputTensor, grid

ROOTS = ("params/params/", "params/", "")
"""Prefixes that the names of a checkpoint's parameters may have, tried in order."""
STACKED_AXIS = 1
"""The axis of layers in a stacked array of MaxText's."""
FILE_BYTES = 2 << 30
"""Size of Orbax's files to aim at, the one that MaxText sets."""
INNER = Path("0", "items")
"""Path, within a folder of checkpoints, at which MaxText looks for a tree."""

ReadPart = Callable[[ParamSpec, tuple[slice, ...]], np.ndarray]
"""(a parameter, the index of a part of it that is all columns of some rows of Hugging Face's
tensors) -> the part's values."""

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
"""The last two parts of a tensor's name in Hugging Face's files -> MaxText's name of the array."""


# ---- an array


@dataclass(frozen=True)
class MaxTextArray:
    """An array as MaxText stores it: a parameter, or one layer of one. Its methods convert between
    Shoal's form and MaxText's."""

    name: str
    """MaxText's name, for example "decoder/layers/self_attention/query/kernel"."""
    spec: ParamSpec
    """Spec of the parameter in Shoal."""
    layer: int | None = None
    """Number of the layer that the array holds; None if it holds all, or the parameter belongs to
    none."""
    head_dim: int = 0
    head_axis: int | None = None
    """Axis of the heads in one layer; None if there are no heads. MaxText has two dimensions, heads
    and a head's width, where Shoal has one."""
    in_pairs: bool = False
    """True if the last dimension is rotated by position in pairs, unlike Shoal's halves."""
    factor: float = 1.0
    """MaxText's values are Shoal's values times this."""

    @property
    def scanned(self) -> bool:
        """True if the array holds all layers."""
        return self.spec.stacked and self.layer is None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of MaxText's array."""
        shape = list(self.spec.shape)
        num_layers = shape.pop(0) if self.spec.stacked else 0
        if self.head_axis is not None:
            num_heads = shape[self.head_axis] // self.head_dim
            shape[self.head_axis : self.head_axis + 1] = [num_heads, self.head_dim]
        if self.scanned:
            shape.insert(STACKED_AXIS, num_layers)
        return tuple(shape)

    @property
    def row_axis(self) -> int:
        """The axis of MaxText's array that corresponds to the rows of the tensor in Hugging Face's
        files; of heads the one that counts them."""
        if not self.spec.transposed:
            return 0
        if self.head_axis == 1:  # [in, heads, width]
            return len(self.shape) - 2
        return len(self.shape) - 1

    @property
    def whole_axis(self) -> int | None:
        """The axis that is the width of a head, along which no part may be cut; None if there are
        no heads."""
        if self.head_axis is None:
            return None
        return self.head_axis + 1 + int(self.scanned)

    def index(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Converts the index of a part of MaxText's array to the index of the same values in
        Shoal's parameter. The axis of a head's width must be whole."""
        cuts = list(part)
        layers: slice | None = None
        if self.scanned:
            layers = cuts.pop(STACKED_AXIS)
        elif self.layer is not None:
            layers = slice(self.layer, self.layer + 1)
        if self.head_axis is not None:  # heads 2 and 3 of width 64 -> elements 128 to 255
            heads = cuts[self.head_axis]
            # the axis of the width is whole, so its stop is the width
            width = cuts.pop(self.head_axis + 1).stop
            cuts[self.head_axis] = slice(heads.start * width, heads.stop * width)
        if layers is not None:
            cuts.insert(0, layers)
        return tuple(cuts)

    def from_shoal(self, values: np.ndarray) -> np.ndarray:
        """Converts a part of Shoal's parameter, with its dimension of layers if it has one, to
        MaxText's form: heads in two dimensions, rotary pairs, scaled queries, layers on axis 1.
        Scaled values are float32, others keep their type and may be a view."""
        if self.head_axis is not None:  # [..., heads * width, ...] -> [..., heads, width, ...]
            axis = self.head_axis + int(self.spec.stacked)
            shape = list(values.shape)
            shape[axis : axis + 1] = [-1, self.head_dim]
            values = values.reshape(shape)
        if self.in_pairs:  # x0 x1 ... y0 y1 ... -> x0 y0 x1 y1 ...
            halves = values.reshape(*values.shape[:-1], 2, values.shape[-1] // 2)
            values = halves.swapaxes(-1, -2).reshape(values.shape)
        if self.factor != 1.0:
            values = values.astype(np.float32) * np.float32(self.factor)
        if self.scanned:
            return np.moveaxis(values, 0, STACKED_AXIS)
        if self.spec.stacked:
            # one layer: the dimension of layers goes
            return values[0]
        return values

    def to_shoal(self, values: np.ndarray) -> np.ndarray:
        """Converts a part of MaxText's array to Shoal's form: the inverse of `from_shoal`."""
        if self.scanned:
            values = np.moveaxis(values, STACKED_AXIS, 0)
        elif self.spec.stacked:  # one layer: a dimension of layers in front
            values = values[None]
        if self.in_pairs:  # x0 y0 x1 y1 ... -> x0 x1 ... y0 y1 ...
            by_pair = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
            values = by_pair.swapaxes(-1, -2).reshape(values.shape)
        if self.factor != 1.0:
            values = values.astype(np.float32) * np.float32(1 / self.factor)
        if self.head_axis is not None:
            axis = self.head_axis + int(self.spec.stacked)
            shape = list(values.shape)
            shape[axis : axis + 2] = [-1]
            values = values.reshape(shape)
        return values


def arrays_of(a: Architecture, scan_layers: bool, pairs: bool) -> list[MaxTextArray]:
    """Returns all arrays that MaxText has for an architecture: one for each parameter if
    `scan_layers`, else one for each layer of it; in the order of Shoal's parameters. `pairs`: True
    if rotary dimensions that belong together are adjacent. ShoalError if MaxText has no model with
    these biases, or if the model is of a family whose MaxText checkpoints are not read."""
    if not _is_plain(a):
        raise ShoalError(
            "MaxText's checkpoints are read and written only for Llama, Qwen2 and dense Qwen3; "
            "this model has other layers (windows, linear attention, experts, other norms, ...): "
            "keep it in Hugging Face's format"
        )
    if a.output_bias or a.mlp_bias or (a.qkv_bias and a.qk_norm):
        raise ShoalError(
            "MaxText has no model with these biases (on the attention's output, the feed-forward "
            "part, or together with norms on queries and keys): keep it in Hugging Face's format"
        )
    # MaxText's attention does not scale scores: Llama's queries are stored scaled.
    query_factor = float(np.float32(a.head_dim**-0.5))
    if a.qkv_bias or a.qk_norm:  # Qwen's are scaled at run time
        query_factor = 1.0
    arrays = []
    for spec in jax.tree.leaves(param_specs(a)):
        end_of_name = ".".join(spec.name.split(".")[-2:])
        head_axis = None
        if "heads" in spec.axes:
            # counted in one layer, without the axis of layers
            head_axis = spec.axes.index("heads") - int(spec.stacked)
        layers: Iterable[int | None] = [None]
        if spec.stacked and not scan_layers:
            layers = range(a.num_layers)
        for layer in layers:
            layers_name = "layers" if layer is None else f"layers_{layer}"
            array = MaxTextArray(
                name=_NAMES[end_of_name].format(layers=layers_name),
                spec=spec,
                layer=layer,
                head_dim=a.head_dim,
                head_axis=head_axis,
                in_pairs=pairs and end_of_name.startswith(("q_proj", "k_proj")),
                factor=query_factor if end_of_name == "q_proj.weight" else 1.0,
            )
            arrays.append(array)
    return arrays


def _is_plain(a: Architecture) -> bool:
    """True if an architecture has nothing but the sizes and switches of Llama, Qwen2 and Qwen3."""
    plain = Architecture(
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        intermediate_size=a.intermediate_size,
        num_layers=a.num_layers,
        num_heads=a.num_heads,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        rope_theta=a.rope_theta,
        rope_scaling=a.rope_scaling,
        norm_eps=a.norm_eps,
        tie_embeddings=a.tie_embeddings,
        qkv_bias=a.qkv_bias,
        output_bias=a.output_bias,
        mlp_bias=a.mlp_bias,
        qk_norm=a.qk_norm,
        adapter=a.adapter,
        quantised=a.quantised,
    )
    return a == plain


def rope_is_in_pairs(name: str, a: Architecture) -> bool:
    """True if a model's rotary dimensions that belong together are adjacent. Decided by MaxText's
    name of the model; without a name, True if its frequencies are stretched as in Llama 3.1."""
    if name:
        return name.lower().startswith("llama3.1")
    return a.rope_scaling is not None and a.rope_scaling.kind == "llama3"


def layout_text(scan_layers: bool, pairs: bool) -> str:
    """Describes the layout of a checkpoint, for messages."""
    layers = "stacked" if scan_layers else "one by one"
    order = "pairs" if pairs else "halves"
    return f"layers {layers}, rotary dimensions in {order}"


# ---- reading


def find_tree(folder: Path) -> Path | None:
    """Returns the folder of an Orbax tree of MaxText's: `folder` itself, its `items`, or that of
    its newest step, the largest number that has one. None if there is no tree, or if it is part of
    a Shoal run's checkpoint. A folder with config.json is no tree."""
    for path in (folder, folder / INNER.name):
        if (path / "_METADATA").is_file() and not (path / "config.json").exists():
            # Shoal's own checkpoints are Orbax trees, too; `checkpoints.py` reads those, and
            # compares checksums.
            if path.parent.parent.name == FOLDER and (path.parent / "extra").exists():
                return None
            return path
    if not folder.is_dir():
        return None
    steps = [path for path in folder.iterdir() if path.name.isdigit()]
    steps.sort(key=lambda path: int(path.name), reverse=True)
    for step in steps:
        tree = find_tree(step)
        if tree is not None:
            return tree
    return None


@dataclass(frozen=True)
class MaxTextCheckpoint:
    """A MaxText checkpoint that was found to fit an architecture."""

    folder: Path
    architecture: Architecture
    scan_layers: bool
    pairs: bool  # True: rotary dimensions are in pairs
    root: str  # prefix of the arrays' names, one of ROOTS
    dtypes: Mapping[str, Any]  # types of the arrays, by name

    def describe(self) -> str:
        """Names the checkpoint and its layout, for messages."""
        return f"MaxText checkpoint {self.folder}: {layout_text(self.scan_layers, self.pairs)}"

    def load(self, role: Role, dtype: Any = np.float32, keep: Keep = keep_as_read) -> Params:
        """Reads the parameters and returns them in the role's layout. Each process reads the parts
        that its devices need, one after the other; `keep` is called with each spec and array, and
        returns what takes the array's place."""

        def read(spec: ParamSpec) -> Any:
            array = assemble(self._parts(spec), spec.sharding(role), spec.shape, dtype)
            return keep(spec, array)

        return jax.tree.map(read, param_specs(self.architecture))

    def digests(self) -> dict[str, str]:
        """Returns, by path within the folder, a digest of each file's size and of bytes from all
        over it: a copy of the checkpoint has the same digests."""
        digests = {}
        for file in sorted(self.folder.rglob("*")):
            if file.is_file():
                content = f"{file.stat().st_size} ".encode() + sample_bytes(file)
                name = str(file.relative_to(self.folder))
                digests[name] = hashlib.blake2b(content, digest_size=8).hexdigest()
        return digests

    def tensors(self, file: IO[bytes], dtype: np.dtype) -> Iterator[OutputTensor]:
        """Yields the tensors of Hugging Face's files, whose values are read only when they are
        written. They must be written one after the other, in order. `dtype`: the type in which they
        will be asked for. `file`: a temporary file; the parameter that is being written is
        converted into it as a whole, and its tensors are read from there."""
        in_file = ""  # name of the parameter that `file` holds

        def read(
            spec: ParamSpec, index: tuple[int, ...], _: np.dtype
        ) -> Iterator[tuple[int, np.ndarray]]:
            """Yields one tensor in runs of rows. Fills `file` with the tensor's parameter first,
            unless the tensor before was of the same parameter."""
            nonlocal in_file
            if spec.name != in_file:
                self._write_parameter(spec, file, dtype)
                in_file = spec.name
            num_rows = spec.tensor_shape[0]
            tensor_bytes = math.prod(spec.tensor_shape) * dtype.itemsize
            # rows of about WINDOW_BYTES together
            step = max(1, num_rows * WINDOW_BYTES // tensor_bytes)
            for start in range(0, num_rows, step):
                # Mapped again for each window, because pages that were read count as this process's
                # memory as long as the mapping exists.
                mapped = np.memmap(file, dtype, "r", shape=spec.shape)
                tensor = mapped[index]
                rows = slice(start, start + step)
                if spec.transposed:
                    yield start, transpose(tensor[:, rows])
                else:
                    yield start, np.array(tensor[rows])

        for spec in jax.tree.leaves(param_specs(self.architecture)):
            for index, name in spec.names_by_index.items():
                yield OutputTensor(name, spec.tensor_shape, partial(read, spec, index))

    def _write_parameter(self, spec: ParamSpec, file: IO[bytes], dtype: np.dtype) -> None:
        """Replaces the content of `file` by the values of a parameter in Shoal's form, as `dtype`:
        an array of `spec.shape`. OSError if the disk is full."""
        file.truncate(0)
        # otherwise a full disk would end the process by a signal
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, math.prod(spec.shape) * dtype.itemsize)
        for index, read in self._parts(spec):
            # Mapped again for each part, because pages that were written count as this process's
            # memory as long as the mapping exists.
            np.memmap(file, dtype, "r+", shape=spec.shape)[index] = read().astype(dtype)

    def _parts(self, spec: ParamSpec) -> Iterator[Part]:
        """Yields a parameter in parts: (index of the part in Shoal's parameter, function that reads
        it in Shoal's form). A part has about WINDOW_BYTES, or is a piece of the stored array if its
        pieces are larger."""
        for array in arrays_of(self.architecture, self.scan_layers, self.pairs):
            if array.spec.name != spec.name:
                continue
            name = self.root + array.name
            stored = StoredArray(self.folder, name)
            steps = part_steps(stored, self.dtypes[name].itemsize, array.whole_axis)
            for part in grid(stored.shape, steps):
                yield array.index(part), partial(_read_part, array, stored, part)


def _read_part(array: MaxTextArray, stored: StoredArray, part: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a stored array, and returns it in Shoal's form."""
    return array.to_shoal(stored.read(part))


def part_steps(array: StoredArray, itemsize: int, whole: int | None) -> list[int]:
    """Returns the size, along each axis, of the parts in which a stored array is read: a piece of
    the array on disk, or several if they fit into WINDOW_BYTES. `itemsize`: bytes of a stored
    value. The axis `whole` is not cut; None: every axis may be."""
    steps = [min(piece, size) for piece, size in zip(array.pieces, array.shape, strict=True)]
    if whole is not None:
        steps[whole] = array.shape[whole]
    for axis in reversed(range(len(steps))):
        # how many times the part of now fits
        more = max(1, WINDOW_BYTES // (math.prod(steps) * itemsize))
        steps[axis] = min(array.shape[axis], steps[axis] * more)
    return steps


def transpose(values: np.ndarray) -> np.ndarray:
    """Returns a copy of the matrix `values.T`. It is made from blocks of rows, which is three times
    as fast as one copy."""
    copy = np.empty(values.shape[::-1], values.dtype)
    # 64 rows a block
    for start in range(0, len(values), 64):
        copy[:, start : start + 64] = values[start : start + 64].T
    return copy


def open_checkpoint(
    tree_folder: Path,
    model_name: str,
    tokenizer: Path | None,
    scan_layers: bool,
    keys: tuple[str, str] = ("model.name", "model.tokenizer"),
) -> MaxTextCheckpoint:
    """Opens a MaxText checkpoint without reading its values, and returns it after checking names
    and shapes of its arrays against a model: the published one called `model_name`, or that of the
    config.json of `model_name` (a hub id) or of the `tokenizer` folder. `model_name` "" or
    `tokenizer` None: not given. `keys`: the settings that hold the two, for messages.
    `scan_layers`: True if all layers of a parameter are in one array. NotHere in a dry run if the
    checkpoint is in a bucket; ShoalError if it does not fit, or if no model is given."""
    if not (model_name or tokenizer):
        raise ShoalError(
            f"{tree_folder} is a MaxText checkpoint, which does not say what model it is: give "
            f"{keys[0]} (llama3.1-8b, ...), or as {keys[1]} a folder that also holds config.json"
        )
    if is_offline() and area_of(tree_folder):
        raise NotHere(tree_folder)
    complete(tree_folder)
    if model_name and "/" not in model_name:
        published_name = model_name
        fitted_to = model_name
        a = model_named(model_name).architecture
    else:
        published_name = ""
        folder = locate(model_name or tokenizer or "", weights=False)
        fitted_to = f"{folder}/config.json"
        a = families.architecture_of(folder)
    with reading(tree_folder), load_orbax().PyTreeCheckpointer() as reader:
        metadata = reader.metadata(tree_folder.absolute()).item_metadata
        if metadata is None:
            raise ValueError("its list of arrays is damaged")
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, Any] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(metadata.tree):
            if hasattr(leaf, "shape"):  # leaves of text have no shape
                array_name = jax.tree_util.keystr(path, simple=True, separator="/")
                shapes[array_name] = tuple(leaf.shape or ())
                dtypes[array_name] = leaf.dtype
    if a.tie_embeddings:
        has_head = any(root + _NAMES["lm_head.weight"] in shapes for root in ROOTS)
        if has_head:  # the files have a head, as in `huggingface.stored_architecture`
            a = replace(a, tie_embeddings=False)
    root = _check_arrays(shapes, a, scan_layers, tree_folder, fitted_to)
    # an entry that `shoal convert` writes
    pairs = (metadata.custom_metadata or {}).get("rope_in_pairs")
    if pairs is None:
        pairs = rope_is_in_pairs(published_name, a)
    return MaxTextCheckpoint(
        folder=tree_folder,
        architecture=a,
        scan_layers=scan_layers,
        pairs=bool(pairs),
        root=root,
        dtypes=dtypes,
    )


def _check_arrays(
    shapes: Mapping[str, tuple[int, ...]],
    a: Architecture,
    scan_layers: bool,
    where: Path,
    model: str,
) -> str:
    """Returns the prefix of the parameters' names (one of ROOTS), if the stored arrays are exactly
    those of the architecture; else raises ShoalError, which names the first that differs. `shapes`:
    shape by name of all stored arrays. `where`: the checkpoint, `model`: what the architecture was
    read from, for messages."""
    roots = [root for root in ROOTS if root + "token_embedder/embedding" in shapes]
    if not roots:
        raise ShoalError(
            f"{where} holds no MaxText model: expected params/params/token_embedder/embedding "
            f"among its arrays, found {', '.join(sorted(shapes)[:3]) or 'none'}"
        )
    root = roots[0]
    stored: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if not name.startswith(root):
            continue
        # Without a prefix, the optimizer's state and the step are next to the parameters.
        if root or name.startswith(("decoder/", "token_embedder/")):
            stored[name.removeprefix(root)] = shape
    stacked = any(name.startswith("decoder/layers/") for name in stored)
    if stacked != scan_layers and (stacked or "decoder/layers_0/mlp/wo/kernel" in stored):
        how = "in arrays of their own (decoder/layers_0, ...)"
        if stacked:
            how = "stacked in one array each"
        raise ShoalError(
            f"{where} has its layers {how}, which is not what "
            f"scan_layers={str(scan_layers).lower()} says: give scan_layers={str(stacked).lower()}"
        )
    # False: no name or shape depends on the order of rotary dimensions
    fault = _first_misfit(stored, arrays_of(a, scan_layers, False))
    if fault:
        raise ShoalError(
            f"{where} does not fit {model}: {fault}; give the name of the model that it is, or a "
            "tokenizer folder with its config.json"
        )
    return root


def _first_misfit(stored: Mapping[str, tuple[int, ...]], arrays: Sequence[MaxTextArray]) -> str:
    """Returns a text about one array: the first that has another shape, else one that is missing,
    else one that is left over; "" if the stored arrays are exactly these."""
    wanted = {array.name: array.shape for array in arrays}
    for name, shape in wanted.items():
        if name in stored and stored[name] != shape:
            return f"{name} is {list(stored[name])} instead of {list(shape)}"
    missing = wanted.keys() - stored.keys()
    if missing:
        return f"it lacks {_first_of(missing)}"
    left_over = stored.keys() - wanted.keys()
    if left_over:
        return f"it also has {_first_of(left_over)}"
    return ""


def _first_of(names: Collection[str]) -> str:
    """Returns the first of some names by the alphabet, and how many more there are: `a and 2 more`;
    the name alone if it is the only one."""
    if len(names) == 1:
        return min(names)
    return f"{min(names)} and {len(names) - 1} more"


# ---- writing


def arrays_to_write(
    read: ReadPart, arrays: Iterable[MaxTextArray], dtype: np.dtype
) -> dict[str, LazyArray]:
    """Returns name in MaxText's tree (parts joined by slashes) -> array of `dtype`, whose values
    are read by `read` and converted to MaxText's form only when the array is written."""

    def part_of(array: MaxTextArray, part: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of MaxText's array, read and converted."""
        return array.from_shoal(read(array.spec, array.index(part))).astype(dtype, copy=False)

    tree: dict[str, LazyArray] = {}
    for array in arrays:
        axes: tuple[int, ...] = (array.row_axis,)
        one_by_one = None
        if array.scanned:
            axes = (STACKED_AXIS, array.row_axis)
            one_by_one = STACKED_AXIS
        lazy = LazyArray(array.shape, dtype, partial(part_of, array), axes, one_by_one)
        tree[ROOTS[0] + array.name] = lazy
    return tree


def write_tree(
    folder: Path,
    target: Path,
    arrays: Mapping[str, LazyArray],
    metadata: Mapping[str, Any],
    on_written: Callable[[int], None],
) -> None:
    """Writes `folder/0/items` as MaxText does: the step, the arrays, an empty optimizer state, and
    `metadata`.

    `arrays` is what `arrays_to_write` returned. One piece of one array at a time is in memory;
    `on_written` is called with the number of bytes of each. ShoalError if it cannot be written, or
    if the disk lacks room. Errors name `target`, the folder to which the caller will move the
    result.
    """
    ocp = load_orbax()
    step, item = INNER.parts
    tree: dict[str, Any] = {"step": 0, "opt_state": {}}
    for name, array in arrays.items():
        folder_names = name.split("/")
        array_name = folder_names.pop()
        node = tree
        for folder_name in folder_names:
            node = node.setdefault(folder_name, {})
        node[array_name] = array
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, type_handler_registry=leaf_types(on_written)
    )
    options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    with (
        explain_write_errors(target),
        ocp.CheckpointManager(
            folder.absolute(), item_names=(item,), item_handlers={item: handler}, options=options
        ) as manager,
    ):
        check_room(folder, list(arrays.values()))
        save = ocp.args.PyTreeSave(
            tree,
            save_args=jax.tree.map(save_args, tree),
            ocdbt_target_data_file_size=FILE_BYTES,
            custom_metadata=dict(metadata),
        )
        items = {item: save}
        manager.save(int(step), args=ocp.args.Composite(**items))
