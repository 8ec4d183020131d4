"""Reads and writes model folders in Hugging Face format.

    load    its safetensors -> parameters, each array created on the devices that hold it
    save    parameters -> a folder that transformers loads

`param_specs` has each parameter's name in the files. Values pass in windows
(`shoal.weights.layout`), so the host never holds a second copy of the model, nor of one parameter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.chat.tokenizer_files import NAMED_TEMPLATES
from shoal.files import move_folder, read_json, scratch_folder
from shoal.mesh import Role
from shoal.model.architecture import Architecture
from shoal.model.config_json import read_config
from shoal.model.config_writer import config_to_save, text_alone
from shoal.model.families import FAMILIES, architecture_of, quantisation_of
from shoal.model.parameters import Keep, Parameters, ParamSpec, keep_as_read, param_specs
from shoal.paths import path_within
from shoal.records import ShoalError
from shoal.weights.fused import FusedTensor, file_specs, fused_tensors, with_fused, with_parts
from shoal.weights.layout import ParamLayout, collect, load_sharded
from shoal.weights.mxfp4 import with_widened
from shoal.weights.origin import EMBEDDING, HEAD, Origin, written_as
from shoal.weights.tensor_files import (
    DTYPES,
    OutputTensor,
    StoredParameter,
    StoredTensor,
    read_header,
    with_scales,
    write_file,
)

COMPARED_BYTES = 16 << 20
"""Bytes of a tensor that are compared at once."""
CARD = "README.md"
"""The file with the model card, where model hubs look for it."""


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model folder that are copied with its tokenizer. The last three are for images, which
transformers reads with any model that has a tower."""


# Weights in


def load(
    folder: str | Path,
    architecture: Architecture,
    role: Role,
    dtype: Any = np.float32,
    keep: Keep = keep_as_read,
) -> Parameters:
    """Reads the parameters in a folder's safetensors (bf16, f16, f32, or fp8 by blocks) and returns
    them as `dtype`, in the role's sharding. `keep` is called with each spec and array as soon as
    the array is read, and returns what takes its place.

    Every byte is read once, by one of the processes; twice where numbers of two parameters
    alternate in the files (gate and up of gpt-oss' experts). ShoalError names every tensor that is
    missing, left over or misshapen, and a truncated file.
    """
    # All headers are checked before the first read: a wrong file is refused in a second, not after
    # half of 100 GB.
    specs = file_specs(architecture, param_specs(architecture))
    return read_tensors(open_tensors(folder, architecture), specs, role, dtype, keep)


def read_tensors(
    stored: Mapping[str, StoredParameter],
    specs: Any,
    role: Role,
    dtype: Any,
    keep: Keep = keep_as_read,
) -> Any:
    """Reads the parameters in a tree of `ParamSpec`, and returns them in the same tree, as arrays
    of `dtype` on the role's devices. `stored`: the parameters by `ParamSpec.key`. `keep` is called
    with each spec and array as soon as the array is read, and returns what takes its place (for
    example the quantised weight). KeyError if `stored` lacks a parameter."""

    def read(spec: ParamSpec) -> Any:
        array = load_sharded(stored[spec.key], ParamLayout.of(spec, role), dtype)
        return keep(spec, array)

    return jax.tree.map(read, specs)


def stored_architecture(folder: Path) -> Architecture:
    """Returns the architecture of a model folder by its config.json. One entry is corrected by the
    files: if config.json says that the head is tied to the embedding, but the files hold another
    head, as folders of merged adapters do, the head is not tied. transformers 5 loads both too."""
    a = architecture_of(folder)
    if not a.tie_embeddings or not has_weights(folder):
        return a
    return replace(a, tie_embeddings=not _has_other_head(folder))


def describes_files(folder: Path, a: Architecture) -> bool:
    """True if a folder has weights, and they are a model of this architecture, without its adapter
    and type of weights."""
    if not has_weights(folder):
        return False
    try:
        return stored_architecture(folder) == replace(a, adapter=None, quantised="")
    except ShoalError:  # a model that is not supported
        return False


def _has_other_head(folder: Path) -> bool:
    """True if a model's files hold a head that is not its embedding: its shape differs, or any
    value does. False also if one of the two is not in the files, or has a type that is not read."""
    stored = read_origin(folder).tensors
    head = stored.get(HEAD)
    embedding = stored.get(EMBEDDING)
    if head is None or embedding is None:
        return False
    if head.shape != embedding.shape:
        return True
    if head.dtype not in DTYPES or embedding.dtype not in DTYPES:
        return False
    step = max(1, COMPARED_BYTES // (4 * head.shape[1]))  # 4: bytes of a float32
    for start in range(0, head.shape[0], step):
        rows = slice(start, min(start + step, head.shape[0]))
        head_rows = StoredParameter([head]).read([rows])
        embedding_rows = StoredParameter([embedding]).read([rows])
        if not np.array_equal(
            head_rows.astype(np.float32), embedding_rows.astype(np.float32), equal_nan=True
        ):
            return True
    return False


def read_origin(folder: Path) -> Origin:
    """Returns the tensors of a folder's safetensors files, without reading values. ShoalError if
    the folder has none, or one is missing or damaged. Tensors of 8 bits with scales become one
    `BlockScaledTensor` each, those of 4 bits one `Mxfp4Tensor`."""
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        stored |= read_header(file)
    quantisation = quantisation_of(folder)
    if quantisation is None:
        return Origin.of(stored)
    if quantisation.method == "mxfp4":
        return Origin.of(with_widened(stored))
    return Origin.of(with_scales(stored, quantisation.block))


def open_tensors(folder: str | Path, a: Architecture) -> dict[str, StoredParameter]:
    """Returns the parameters in a folder's safetensors, by their names in `param_specs`, without
    reading values. ShoalError unless they are exactly those of the architecture, and such as are
    passed over (`Origin.others`)."""
    folder = Path(folder)
    stored = dict(read_origin(folder).tensors)
    # A tied head is the embedding: stored a second time, which is dropped, or under this name only.
    if a.tie_embeddings and HEAD in stored:
        # `pop` always removes the head; `setdefault` keeps an embedding that is there
        stored.setdefault(EMBEDDING, stored.pop(HEAD))
    for name in _unread_names(a):
        stored.pop(name, None)
    specs = file_specs(a, param_specs(a))
    where = f"{folder} do not fit its config.json"
    stored = with_parts(stored, fused_tensors(a, specs), where)
    return check_tensors(stored, specs, where)


def _unread_names(a: Architecture) -> list[str]:
    """Returns the names of tensors that files may have for layers which read another layer's keys,
    and that nothing reads."""
    names = []
    for number, layer in enumerate(a.layers_in_order):
        if layer.keys_of is not None:
            for part in ("k_proj", "v_proj", "k_norm"):
                names.append(f"model.layers.{number}.self_attn.{part}.weight")
    return names


def check_tensors(
    stored: Mapping[str, StoredTensor], specs: Any, where: str
) -> dict[str, StoredParameter]:
    """Returns stored tensors as parameters, by the names of a tree of `ParamSpec`. ShoalError
    unless names and shapes are exactly those, and each type is one of DTYPES. `where`: what the
    message says after "The tensors in", like "FOLDER do not fit its config.json"."""
    specs = jax.tree.leaves(specs)
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        for name in spec.names_by_index.values():
            shapes[name] = spec.tensor_shape
    missing = []
    misshapen = []
    mistyped = []
    for name, shape in shapes.items():
        if name not in stored:
            missing.append(name)
            continue
        tensor = stored[name]
        if tensor.shape != shape:
            misshapen.append(f"{name} {list(tensor.shape)} instead of {list(shape)}")
        if tensor.dtype not in DTYPES:
            mistyped.append(f"{name} stored as {tensor.dtype} instead of {', '.join(DTYPES)}")
    problems = {
        "missing": missing,
        "left over": sorted(stored.keys() - shapes.keys()),
        "not as expected": misshapen + mistyped,
    }
    faults = [f"{title}: {_listed(names)}" for title, names in problems.items() if names]
    if faults:
        raise ShoalError(f"The tensors in {where}. {'; '.join(faults)}.")
    parameters = {}
    for spec in specs:
        tensors = [stored[name] for name in spec.names_by_index.values()]
        parameters[spec.key] = StoredParameter(tensors, spec.index_shape)
    return parameters


def has_weights(folder: Path) -> bool:
    """True if a folder has safetensors files, and all that its index names."""
    try:
        return bool(_weight_files(folder))
    except ShoalError:
        return False


def _weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: model.safetensors alone if there is one, else the
    files that the index names, else all. ShoalError if there are none, or if one that the index
    names is missing."""
    if not folder.is_dir():
        raise ShoalError(
            f"{folder}: this machine has no such folder; expected one with a model's safetensors "
            "files"
        )
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ShoalError(
                f"{index} has no weight_map, which names the file of each tensor. Download it "
                "again."
            )
        # values: the file of each tensor, so most files occur many times
        files = sorted({path_within(folder, name, str(index)) for name in weight_map.values()})
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ShoalError(
                f"{folder}: {index.name} names {_listed(absent)}, which is missing. Download it "
                "again."
            )
    if not files:
        raise ShoalError(
            f"{folder} holds no safetensors file. Pickled weights are never read: save_pretrained "
            "of transformers writes safetensors."
        )
    return files


def _listed(names: Sequence[str], most: int = 5) -> str:
    """Returns the names as text, for example "a, b and 3 more", if there are more than `most`."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


# Weights out


def save(
    folder: str | Path,
    parameters: Parameters | Iterable[OutputTensor],
    architecture: Architecture,
    source_folder: str | Path | None = None,
    dtype: Any = "float32",
    shard_bytes: int = 4_000_000_000,
    config: dict[str, Any] | None = None,
    origin: Path | None = None,
    card: str = "",
) -> None:
    """Writes a folder that transformers loads: config.json, safetensors, the source's tokenizer
    files, and the model card (README.md), if one is given.

    The config is the given one, or the source's own, with the type of the weights set; without a
    source it is made from the architecture. `parameters` are a tree of arrays, or tensors that are
    written in their order. `dtype` is the type of the weights, a name or a NumPy type.
    `source_folder` None: no tokenizer. `shard_bytes` is the largest size of a file, unless one
    tensor is larger. Everything is written to a temporary folder, which is renamed at the end.

    `origin` is the folder with the weights that these came from; None: the source, if it has such
    weights. What is written has the names of its tensors, and its towers (`Origin.restore`). If
    there is none, a text model is written, also if the config has one in `text_config`. Weights
    that it has in 4 bits are written like that if `parameters` have the values of all of them, else
    as `dtype`; tensors in their order are always written as `dtype`.

    OSError if it cannot be written. ShoalError if the folder is not empty, or if `dtype` is none of
    float32, bfloat16 and float16."""
    folder = Path(folder).expanduser()
    source = None if source_folder is None else Path(source_folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ShoalError(f"{folder} exists and is not empty: give another folder, or remove it.")
    dtype = np.dtype(jnp.dtype(dtype))
    if dtype not in DTYPES.values():
        raise ShoalError(f"dtype={dtype.name!r}: expected float32, bfloat16 or float16.")
    if origin is None and source is not None and describes_files(source, architecture):
        origin = source
    config = config_to_save(architecture, source, config, dtype)
    if origin is None:
        config = text_alone(config)
    tensors: Iterable[OutputTensor]
    if isinstance(parameters, Parameters):
        specs = file_specs(architecture, param_specs(architecture))
        tensors = output_tensors(parameters, specs)
    else:
        tensors = parameters
    tensors = with_fused(tensors, _fused_in(origin, architecture))
    if origin is None:
        tensors = written_as(architecture.model_type, tensors)
    else:
        stored = read_origin(origin)
        packed = False
        if isinstance(parameters, Parameters):
            tensors = list(tensors)  # without values
            packed = stored.keeps_packed(tensors, dtype)
        if packed:
            config["quantization_config"] = read_config(origin)["quantization_config"]
        tensors = stored.restore(tensors, dtype, packed)
    with scratch_folder(folder) as scratch:
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if source is not None:
            copy_tokenizer(source, scratch)
        _write_shards(scratch, tensors, dtype, shard_bytes)
        write_card(scratch, card)
        move_folder(scratch, folder)


def write_card(folder: Path, card: str) -> None:
    """Writes a model card into a folder; nothing if it is empty."""
    if card:
        (folder / CARD).write_text(card, encoding="utf-8")


def _fused_in(origin: Path | None, a: Architecture) -> list[FusedTensor]:
    """Returns the tensors to be written in place of those of single experts: those that the files
    of `origin` have; without it, those of the family's files."""
    possible = fused_tensors(a, file_specs(a, param_specs(a)))
    if origin is not None:
        stored = read_origin(origin).tensors
        return [tensor for tensor in possible if tensor.name in stored]
    return [] if FAMILIES[a.model_type].expert_files == "by_expert" else possible


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies the files of a tokenizer (TOKENIZER_FILES, those that exist), and its folder of chat
    templates, into `folder`. Files of the same names are replaced; FileExistsError if `folder` has
    a folder of chat templates already."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / NAMED_TEMPLATES).is_dir():
        shutil.copytree(source / NAMED_TEMPLATES, folder / NAMED_TEMPLATES)


def output_tensors(parameters: Any, specs: Any) -> Iterator[OutputTensor]:
    """Yields the tensors of a tree of parameters as files hold them, in the tree's order; leaves
    that are None in both trees are left out. Values are copied from the devices only when a tensor
    is written. `specs` is the tree of `ParamSpec` of the parameters; ValueError if a shape
    differs."""
    for array, spec in zip(jax.tree.leaves(parameters), jax.tree.leaves(specs), strict=True):
        if tuple(array.shape) != spec.shape:
            raise ValueError(
                f"parameter {spec.name} is {tuple(array.shape)}; the architecture has {spec.shape}"
            )
        layout = ParamLayout.on(array, spec)
        for index, name in spec.names_by_index.items():
            yield OutputTensor(name, spec.tensor_shape, partial(collect, array, layout, index))


def _write_shards(
    folder: Path, tensors: Iterable[OutputTensor], dtype: np.dtype, shard_bytes: int
) -> None:
    """Writes one file, `model.safetensors`, or several of at most `shard_bytes`
    (`model-00001-of-00003.safetensors`) with an index. A tensor that is larger gets a file of its
    own."""
    shards: list[list[OutputTensor]] = [[]]
    sizes = [0]
    for tensor in tensors:
        size = (tensor.dtype or dtype).itemsize * int(np.prod(tensor.shape))
        # a shard that is empty takes any tensor
        if shards[-1] and sizes[-1] + size > shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(tensor)
        sizes[-1] += size
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0], dtype)
        return
    weight_map = {}
    # numbers in the files' names begin at 1
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard, dtype)
        for tensor in shard:
            weight_map[tensor.name] = name
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )
