"""`shoal convert`: converts a checkpoint of Hugging Face or Shoal to MaxText's layout, and back.

Values are copied piece by piece. On the way back, one tensor of all layers at a time is in a
temporary file next to the target, because a piece of a MaxText checkpoint may hold a part of every
layer, and each piece is decompressed once. A checkpoint of Shoal's own is read whole."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.buckets import COPIES, address
from shoal.checks.settings import check_model
from shoal.config.commands import ConvertConfig
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.files import (
    check_local,
    check_new_folder,
    explain_write_errors,
    find_input,
    move_folder,
    scratch_folder,
)
from shoal.mesh import make_roles
from shoal.model import families
from shoal.model.architecture import Architecture
from shoal.model.config_writer import make_config
from shoal.model.parameters import ParamSpec, param_specs
from shoal.model.published import check_name, model_named
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.runs.layout import MODEL_FOLDER, named_folder
from shoal.text import count, gib
from shoal.weights import huggingface, maxtext, peft
from shoal.weights.checkpoints import find_checkpoint, load_parameters
from shoal.weights.hub import locate
from shoal.weights.orbax import orbax_silenced
from shoal.weights.source import model_path

PROGRESS_BYTES = 1 << 30
"""If at least this many bytes are written, a line is printed after each tenth."""


def convert(config: ConvertConfig, console: Console | None = None) -> dict[str, Any]:
    """Writes a Hugging Face folder, hub id or run as a MaxText checkpoint, or a MaxText checkpoint
    as a Hugging Face folder, as `format` says. The new folder is written completely or not at all.
    Returns {"to": its path, "tensors": their number, "bytes": their size}. `from` may be left out
    if `model_name` names a model, which is then the hub's. ShoalError if the new folder holds files
    already, if the source has the wrong format, or if MaxText has no model of the name given. A
    `console` that is given can be used afterwards; None: one for this command."""
    if not (config.source or config.model_name):
        raise ShoalError(
            "from: nothing was given; expected a checkpoint, or model_name alone for the hub's "
            "model of that name"
        )
    source = config.source or model_path(ModelSection(name=config.model_name))
    target = _target(config)
    started = time.perf_counter()
    tree = maxtext.find_tree(find_input(source, "from"))
    if config.format == "maxtext":
        check_model(ModelSection(path=source), key="from")
    if _name(config):
        model_named(_name(config))  # raises ShoalError if MaxText has no such name
    if config.format == "maxtext" and tree:
        raise ShoalError(
            f"from={source} is a MaxText checkpoint already: give format=huggingface, or another "
            "checkpoint"
        )
    if config.format != "maxtext" and not tree:
        raise ShoalError(
            f"from={source} is not a MaxText checkpoint (.../0/items): give one, or use `shoal "
            "export`, which writes a run's weights in Hugging Face's format"
        )
    make_roles(MeshSection(fsdp=1))  # raises ShoalError if JAX finds no devices
    with console or Console() as console, orbax_silenced():
        if tree:
            written = _to_hugging_face(config, tree, target, console)
        else:
            written = _to_maxtext(config, source, target, console)
        console.note(
            f"wrote {address(target)}: {count(written['tensors'], 'tensor')}, "
            f"{gib(written['bytes'])} in {time.perf_counter() - started:.1f} s"
        )
    return {"to": address(target), **written}


def _target(config: ConvertConfig) -> Path:
    """Returns the folder to write: `to`, or for MaxText's own flags the one that
    base_output_directory and run_name name (run_name may be left out). ShoalError if it holds files
    already, or if neither or both are given. With `format=maxtext` and MaxText's flags it is the
    folder `0/items` in that one. Creates nothing."""
    if config.to and (config.base_output_directory or config.run_name):
        raise ShoalError(
            f"to={config.to} is the folder that is written: give it, or base_output_directory with "
            "run_name, not both"
        )
    if config.to:
        return check_new_folder(config.to, "to")
    if not config.base_output_directory:
        raise ShoalError(
            "to: nothing was given; expected the folder to write, or base_output_directory"
        )
    target = config.base_output_directory.rstrip("/")
    if config.run_name:
        named_folder(target, config.run_name)  # raises ShoalError if it leads elsewhere
        target = f"{target}/{config.run_name}"
    if config.format == "maxtext":
        target = f"{target}/{maxtext.INNER}"
    return check_new_folder(target, "base_output_directory")


def _name(config: ConvertConfig) -> str:
    """Returns MaxText's name of the model; '' if `model_name` is a hub id."""
    is_hub_id = "/" in config.model_name
    return "" if is_hub_id else config.model_name


def _target_key(config: ConvertConfig) -> str:
    """Returns the key that named the folder to write, for errors."""
    return "to" if config.to else "base_output_directory"


def _to_maxtext(
    config: ConvertConfig, source: str, target: Path, console: Console
) -> dict[str, Any]:
    """Writes the model `source` as a checkpoint in MaxText's layout, and returns {"tensors": their
    number, "bytes": their size}. Warns of a tokenizer, which is not written, and of bfloat16 if it
    rounds values once more. The folder `target` is written completely or not at all. ShoalError if
    the model is not the one that `model_name` names (only checked if `from` is given too), or if
    it is an adapter."""
    if config.tokenizer:  # no error, because MaxText's own command lines name a tokenizer
        console.warning(
            f"tokenizer={config.tokenizer} is not used: MaxText's layout holds no tokenizer"
        )
    architecture, read = open_source(source)
    name = _name(config)
    dtype = np.dtype(jnp.dtype(config.dtype))
    if name and config.source:
        check_name(name, architecture, source, "model_name")
    pairs = maxtext.rope_is_in_pairs(name, architecture)
    stored = maxtext.arrays_of(architecture, config.scan_layers, pairs)
    # A multiplication by a power of two (whose mantissa is 0.5) rounds nothing.
    rounds = any(math.frexp(array.factor)[0] != 0.5 for array in stored)
    if dtype.name == "bfloat16" and rounds:
        console.warning(
            "dtype=bfloat16: MaxText's queries are divided by the square root of "
            f"head_dim={architecture.head_dim}, which rounds them once more; dtype=float32 keeps "
            "bfloat16 weights as they are"
        )
    arrays = maxtext.arrays_to_write(read, stored, dtype)
    size = sum(array.nbytes for array in arrays.values())
    console.note(
        f"reads {source}; writes {len(arrays)} tensors as {config.dtype}, {gib(size)}, "
        f"{maxtext.layout_text(config.scan_layers, pairs)}"
    )
    inner = maxtext.INNER
    metadata = {"scan_layers": config.scan_layers, "rope_in_pairs": pairs}
    with explain_write_errors(target, _target_key(config)), scratch_folder(target) as scratch:
        maxtext.write_tree(scratch, target, arrays, metadata, _progress(size, console))
        is_folder_of_step = target.parts[-2:] == inner.parts
        if is_folder_of_step and not target.parent.exists():
            move_folder(scratch / inner.parent, target.parent)  # with Orbax's own files of the step
        else:
            move_folder(scratch / inner, target)
    return {"tensors": len(arrays), "bytes": size}


def open_source(source: str) -> tuple[Architecture, maxtext.ReadPart]:
    """Returns (architecture, function that reads parts of the parameters) of a Hugging Face folder,
    a hub id or a run. The function gets a parameter's spec and an index, a slice for each dimension
    of Shoal's array, and returns these values in Shoal's orientation. ShoalError for an adapter,
    which is no whole model. A run's checkpoint (the newest, unless a checkpoint's folder is given)
    is loaded here; of a folder or hub id, values are read when the function is called."""
    local = find_input(source, "from")
    checkpoint = find_checkpoint(local) if local.is_dir() else None
    folder = checkpoint[0] / MODEL_FOLDER if checkpoint else locate(source)
    if peft.is_adapter(folder):
        raise ShoalError(
            f"from={source} is an adapter on {peft.read_base(folder)}: write a whole model of it "
            f"(shoal export from={source} to=FOLDER merge=true), and convert that"
        )
    if checkpoint:
        architecture = families.architecture_of(folder)
        return architecture, _read_from_checkpoint(checkpoint, architecture)
    architecture = huggingface.stored_architecture(folder)
    # Called for its error alone, before weights: a model that MaxText's layout has no names for.
    maxtext.arrays_of(architecture, scan_layers=True, pairs=False)
    tensors = huggingface.open_tensors(folder, architecture)

    def read(spec: ParamSpec, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the part `index` of one parameter from the stored tensors, in the orientation of
        Shoal's arrays, which is transposed for some."""
        # Of `index`: the entries for layers or experts, and for the first dimension of a tensor.
        num_indices = len(spec.indices)
        values = tensors[spec.key].read(spec.in_file_order(index)[: num_indices + 1])
        if not spec.transposed:
            return values
        matrices = values.reshape((-1, values.shape[-2], values.shape[-1]))
        transposed = np.stack([maxtext.transpose(matrix) for matrix in matrices])
        return transposed.reshape(values.shape[:-2] + transposed.shape[-2:])

    return architecture, read


def _read_from_checkpoint(
    checkpoint: tuple[Path, int], architecture: Architecture
) -> maxtext.ReadPart:
    """Returns a function that reads parts of the parameters of a run's checkpoint: (spec of a
    parameter, a slice for each dimension) -> values. Loads the checkpoint whole, at once.
    `checkpoint`: (the run's folder, the version)."""
    role = make_roles(MeshSection(fsdp=1)).trainer
    leaves = jax.tree.leaves(load_parameters(*checkpoint, architecture, role))
    specs = jax.tree.leaves(param_specs(architecture))
    arrays = {spec.key: leaf for spec, leaf in zip(specs, leaves, strict=True)}

    def read(spec: ParamSpec, index: tuple[slice, ...]) -> np.ndarray:
        return np.asarray(arrays[spec.key])[index]

    return read


def _to_hugging_face(
    config: ConvertConfig, tree: Path, target: Path, console: Console
) -> dict[str, Any]:
    """Writes the MaxText checkpoint at `tree` as a Hugging Face folder, and returns {"tensors":
    their number, "bytes": their size}, counted by Shoal's parameters. Warns if no tokenizer was
    given; the folder then holds none. The tokenizer's folder also gives the config.json if that
    describes this architecture; else one is made. The folder `target` is written completely or not
    at all."""
    check_local(config.tokenizer, "tokenizer", COPIES)
    tokenizer = locate(config.tokenizer, weights=False) if config.tokenizer else None
    checkpoint = maxtext.open_checkpoint(
        tree, config.model_name, tokenizer, config.scan_layers, ("model_name", "tokenizer")
    )
    console.note(checkpoint.describe())
    if tokenizer is None:
        console.warning(
            "no tokenizer was given: the folder will hold none; copy the tokenizer's files into "
            "it, or give tokenizer=FOLDER or a hub id"
        )
    architecture = checkpoint.architecture
    dtype = np.dtype(jnp.dtype(config.dtype))
    has_config = tokenizer is not None and families.describes(tokenizer, architecture)
    new_config = None if has_config else make_config(architecture, tokenizer)
    specs = jax.tree.leaves(param_specs(architecture))
    with explain_write_errors(target, _target_key(config)):
        target.parent.mkdir(parents=True, exist_ok=True)
        # The file holds one tensor at a time (see the module).
        with tempfile.TemporaryFile(dir=target.parent) as file:
            huggingface.save(
                target,
                checkpoint.tensors(file, dtype),
                architecture,
                tokenizer,
                config.dtype,
                config=new_config,
            )
    return {
        "tensors": sum(len(spec.names_by_index) for spec in specs),
        "bytes": sum(math.prod(spec.shape) for spec in specs) * dtype.itemsize,
    }


def _progress(size: int, console: Console) -> Callable[[int], None]:
    """Returns a function to call with the number of bytes that were just written. It prints a line
    whenever the sum reaches another tenth of `size`, the bytes of all; nothing if `size` is less
    than PROGRESS_BYTES. Seconds count from this call on."""
    done = 0
    started = time.perf_counter()

    def written(count: int) -> None:
        """Adds a number of bytes; prints a line if they reach another tenth."""
        nonlocal done
        before = done
        done += count
        # done * 10 // size: how many tenths are complete
        reached_next_tenth = size and done * 10 // size > before * 10 // size
        if size >= PROGRESS_BYTES and reached_next_tenth:
            console.note(
                f"{gib(done)} of {gib(size)} written, {time.perf_counter() - started:.0f} s"
            )

    return written
