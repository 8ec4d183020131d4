"""Model folders in Hugging Face format, read and written.

    load    its safetensors -> Parameters, each array created on the devices that hold it
    save    Parameters -> a folder that transformers loads

One table, `NAMES`, holds each parameter's name in the files. Values pass in windows (`shoal.model.spread`), so the host
never holds a second copy of the model, nor of one parameter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.files import move_folder, read_json, scratch_folder
from shoal.mesh import Role
from shoal.model.architecture import Architecture
from shoal.model.hf_config import config_to_save
from shoal.model.param_layout import ParamLayout
from shoal.model.parameters import Parameters, ParamSpec, param_specs
from shoal.model.spread import collect, spread
from shoal.model.tensor_file import DTYPES, OutputTensor, StoredParameter, StoredTensor, read_header, write_file
from shoal.types import ShoalError


@dataclass(frozen=True)
class TensorName:
    """A parameter's name in the files; `{layer}` is the layer's number. Files hold kernels as [out, in]."""

    template: str
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.template


_LAYER = "model.layers.{layer}."
_PRODUCTS = {
    "blocks.q": _LAYER + "self_attn.q_proj",
    "blocks.k": _LAYER + "self_attn.k_proj",
    "blocks.v": _LAYER + "self_attn.v_proj",
    "blocks.o": _LAYER + "self_attn.o_proj",
    "blocks.gate": _LAYER + "mlp.gate_proj",
    "blocks.up": _LAYER + "mlp.up_proj",
    "blocks.down": _LAYER + "mlp.down_proj",
}
NAMES: Mapping[str, TensorName] = {
    "embed_tokens": TensorName("model.embed_tokens.weight"),
    "blocks.attention_norm": TensorName(_LAYER + "input_layernorm.weight"),
    "blocks.mlp_norm": TensorName(_LAYER + "post_attention_layernorm.weight"),
    "blocks.q_norm": TensorName(_LAYER + "self_attn.q_norm.weight"),
    "blocks.k_norm": TensorName(_LAYER + "self_attn.k_norm.weight"),
    **{path: TensorName(name + ".weight", transposed=True) for path, name in _PRODUCTS.items()},
    **{path + ".bias": TensorName(name + ".bias") for path, name in _PRODUCTS.items()},
    "final_norm": TensorName("model.norm.weight"),
    "lm_head": TensorName("lm_head.weight", transposed=True),
}
"""Path in `Parameters` (a biased weight's kernel under the weight's own path) -> name in the files."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "generation_config.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


# Weights in


def load(folder: str | Path, architecture: Architecture, role: Role, dtype: Any = np.float32) -> Parameters:
    """The parameters in a folder's safetensors (bf16, f16 or f32) as `dtype`, in the role's sharding.

    Every byte is read once, by one of the processes. ShoalError names every tensor that is missing, left over or
    misshapen, and a truncated file.
    """
    # Checked whole before the first read: a wrong file is refused in a second, not after half of 100 GB.
    tensors = open_tensors(folder, architecture)
    return jax.tree_util.tree_map_with_path(
        lambda path, declared: spread(tensors[dotted(path)], layout_of(dotted(path), declared, role), dtype),
        param_specs(architecture))


def layout_of(path: str, declared: ParamSpec, role: Role) -> ParamLayout:
    """How a parameter lies on a role's devices and in files."""
    return ParamLayout.of(declared, role, NAMES[path].transposed)


def open_tensors(folder: str | Path, architecture: Architecture) -> dict[str, StoredParameter]:
    """The parameters in a folder's safetensors, by dotted path; ShoalError unless they are exactly those of the
    architecture."""
    folder = Path(folder)
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        stored.update(read_header(file))
    return {path: StoredParameter(tensors) for path, tensors in _match(stored, architecture, folder).items()}


def dotted(path: Sequence[Any]) -> str:
    """A tree path as `NAMES` spells it: `blocks.q`, `blocks.q.bias`."""
    return ".".join(key.name for key in path).removesuffix(".kernel")


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the only one, those that its index names, or all."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        files = sorted({folder / name for name in read_json(index).get("weight_map", {}).values()})
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ShoalError(f"{folder}: {index.name} names {_listed(absent)}, which is missing. Download it again.")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        advice = " Pickled weights are never read: convert them to safetensors." if pickled else ""
        raise ShoalError(f"{folder} holds no safetensors file.{advice}")
    return files


def _match(stored: Mapping[str, StoredTensor], a: Architecture, folder: Path) -> dict[str, list[StoredTensor]]:
    """The stored tensors of each parameter, by dotted path; ShoalError unless they fit one to one."""
    by_path: dict[str, list[StoredTensor]] = {}
    missing, misshapen = [], []
    # Old Llama files store the rotary frequencies, which are computed here.
    left = {name for name in stored if not name.endswith("rotary_emb.inv_freq")}
    if a.tie_embeddings and "lm_head.weight" in stored:
        left.discard("lm_head.weight")  # the same tensor once more, or alone
        stored = {"model.embed_tokens.weight": stored["lm_head.weight"], **stored}
    for path, name, shape, numbers in _tensor_specs(a):
        tensors = by_path.setdefault(path, [])
        for layer in numbers:
            text = name.template.format(layer=layer)
            left.discard(text)
            if text not in stored:
                missing.append(text)
            elif stored[text].shape != shape:
                misshapen.append(f"{text} {list(stored[text].shape)} instead of {list(shape)}")
            elif stored[text].dtype not in DTYPES:
                misshapen.append(f"{text} stored as {stored[text].dtype} instead of {', '.join(DTYPES)}")
            else:
                tensors.append(stored[text])
    problems = (("missing", missing), ("left over", sorted(left)), ("not as expected", misshapen))
    listed = "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems if names)
    if listed:
        raise ShoalError(f"The tensors in {folder} do not fit its config.json. {listed}.")
    return by_path


def _tensor_specs(a: Architecture) -> Iterator[tuple[str, TensorName, tuple[int, ...], Sequence[int]]]:
    """Each parameter's dotted path, name, shape of one tensor in the files, and layers."""
    for path, declared in jax.tree_util.tree_leaves_with_path(param_specs(a)):
        name = NAMES[dotted(path)]
        shape = declared.shape[1:] if name.stacked else declared.shape
        yield dotted(path), name, shape[::-1] if name.transposed else shape, range(a.num_layers if name.stacked else 1)


def names_of(a: Architecture) -> Iterator[str]:
    """Names in the files of all tensors of an architecture."""
    for _, name, _, numbers in _tensor_specs(a):
        yield from (name.template.format(layer=layer) for layer in numbers)


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# Weights out


@dataclass(frozen=True)
class LazyParameter:
    """A parameter to be written that is not in memory: `read` gets a layer's number, or None if it has no layers, and
    gives the tensor as the files hold it, in runs of rows, each with the number of its first row."""

    shape: tuple[int, ...]
    read: Callable[[int | None], Iterator[tuple[int, np.ndarray]]]


def save(
    folder: str | Path,
    parameters: Parameters,
    architecture: Architecture,
    source_folder: str | Path | None = None,
    dtype: Any = "float32",
    shard_bytes: int = 4_000_000_000,
    config: dict[str, Any] | None = None,
) -> None:
    """Writes a folder that transformers loads: config.json, safetensors, and the source's tokenizer files.

    The config is the given one, or the source's own, with the type of the weights set; without a source it is made from
    the architecture. A parameter may be a `LazyParameter`: it is read when it is written. Everything is written to a
    temporary folder and renamed at the end. ShoalError if the folder holds files.
    """
    folder, source = Path(folder).expanduser(), None if source_folder is None else Path(source_folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ShoalError(f"{folder} exists and is not empty: give another folder, or remove it.")
    dtype = np.dtype(jnp.dtype(dtype))
    if dtype not in DTYPES.values():
        raise ShoalError(f"dtype={dtype.name!r}: expected float32, bfloat16 or float16.")
    config = config_to_save(architecture, source, config, dtype)
    with scratch_folder(folder) as scratch:
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in TOKENIZER_FILES:
            if source is not None and (source / name).is_file():
                shutil.copyfile(source / name, scratch / name)
        _write_shards(scratch, _output_tensors(parameters, architecture), dtype, shard_bytes)
        move_folder(scratch, folder)


def _output_tensors(parameters: Parameters, a: Architecture) -> Iterator[OutputTensor]:
    """The tensors of all parameters as files hold them, each read when it is written."""
    declared = jax.tree.leaves(param_specs(a))
    for leaf, spec, (path, name, shape, numbers) in zip(jax.tree.leaves(parameters), declared, _tensor_specs(a),
                                                       strict=True):
        if tuple(leaf.shape) != spec.shape:
            raise ValueError(f"parameter {path} is {tuple(leaf.shape)}; the architecture has {spec.shape}")
        read = _reader(leaf, spec, name)
        for layer in numbers:
            yield OutputTensor(name.template.format(layer=layer), shape, partial(read, layer))


def _reader(leaf: Any, declared: ParamSpec, name: TensorName) -> Callable[[int, np.dtype], Iterator]:
    """A function of layer and type that gives a parameter's tensor in runs of rows."""
    # Of another system's checkpoint, which may be larger than this host's memory.
    if isinstance(leaf, LazyParameter):
        return lambda layer, _: leaf.read(layer if name.stacked else None)
    return partial(collect, leaf, ParamLayout.on(leaf, declared, name.transposed))


def _write_shards(folder: Path, tensors: Iterator[OutputTensor], dtype: np.dtype, shard_bytes: int) -> None:
    """Writes one file, or files of at most `shard_bytes` with an index."""
    shards: list[list[OutputTensor]] = [[]]
    sizes = [0]
    for tensor in tensors:
        size = dtype.itemsize * int(np.prod(tensor.shape))
        if shards[-1] and sizes[-1] + size > shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(tensor)
        sizes[-1] += size
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0], dtype)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard, dtype)
        weight_map.update({tensor.name: name for tensor in shard})
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
