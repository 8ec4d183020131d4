"""`shoal convert`: converts a checkpoint of Hugging Face or Shoal to MaxText's layout, and back.

Values pass in windows. On the way back one tensor of all layers at a time is in a temporary file beside the target:
pieces of a MaxText checkpoint may hold a part of every layer, and each is decompressed once. A run's own checkpoint is
read whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.config.schema import ConvertConfig, MeshSection, ModelSection
from shoal.files import check_local, check_new_folder, move_folder, scratch_folder, writing
from shoal.mesh import Role, make_roles
from shoal.model import hf, hf_config, hub
from shoal.model.architecture import Architecture
from shoal.model.names import check_name, model_named
from shoal.model.parameters import param_specs
from shoal.model.spread import take_rows
from shoal.report.console import Console
from shoal.report.findings import gib
from shoal.report.folder import named_folder
from shoal.run.checkpoint_formats import ReadRows, load_format
from shoal.run.loading import model_path
from shoal.run.preflight.settings import check_model
from shoal.text import count
from shoal.trainer.checkpoint import MODEL_FOLDER, find_checkpoint, load_parameters
from shoal.trainer.orbax import orbax_silenced
from shoal.types import ShoalError

PROGRESS_BYTES = 1 << 30
"""Size from which each tenth that is written is printed."""


def convert(config: ConvertConfig, console: Console | None = None) -> dict[str, Any]:
    """Writes the folder completely or not at all; raises ShoalError if it exists already."""
    if not (config.source or config.model_name):
        raise ShoalError("from: nothing was given; expected a checkpoint, or model_name alone for the hub's model of "
                         "that name")
    source = config.source or model_path(ModelSection(name=config.model_name))
    target, started = _target(config), time.perf_counter()
    found = load_format("maxtext").find(check_local(source, "from"))
    if config.format == "maxtext":
        check_model(ModelSection(path=source), key="from")
    if _name(config):
        model_named(_name(config))
    with console or Console() as console, orbax_silenced():
        _warn_of_unused(config, console)
        role = make_roles(MeshSection(fsdp=1)).trainer
        if config.format == "maxtext":
            if found:
                raise ShoalError(f"from={source} is a MaxText checkpoint already: give format=huggingface, or another "
                                 "checkpoint")
            written = _to_maxtext(config, source, target, role, console)
        else:
            if found is None and not check_local(source, "from").exists():
                raise ShoalError(f"from={source}: there is no such folder; give a MaxText checkpoint (.../0/items)")
            if found is None:
                raise ShoalError(f"from={source} is no MaxText checkpoint (.../0/items): give one, or use `shoal "
                                 "export`, which writes a run's weights in Hugging Face's format")
            written = _to_hugging_face(config, found, target, console)
        console.note(f"wrote {target}: {count(written['tensors'], 'tensor')}, {gib(written['bytes'])} in "
                     f"{time.perf_counter() - started:.1f} s")
    return {"to": str(target), **written}


def _target(config: ConvertConfig) -> Path:
    """The folder to write, which does not exist yet."""
    if config.to:
        return check_new_folder(config.to, "to")
    if not config.base_output_directory:
        raise ShoalError("to: nothing was given; expected the folder to write, or base_output_directory")
    target = check_local(config.base_output_directory, "base_output_directory")
    if config.run_name:
        target = named_folder(target, config.run_name)
    inner = load_format("maxtext").inner if config.format == "maxtext" else ""
    return check_new_folder(target / inner, "base_output_directory")


def _target_key(config: ConvertConfig) -> str:
    return "to" if config.to else "base_output_directory"


def _name(config: ConvertConfig) -> str:
    """MaxText's name of the model; empty for a hub id."""
    return "" if "/" in config.model_name else config.model_name


def _warn_of_unused(config: ConvertConfig, console: Console) -> None:
    unused = [key for key in ("base_output_directory", "run_name") if getattr(config, key)]
    if config.to and unused:
        console.warning(f"{' and '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect: to={config.to} is "
                        "the folder that is written")
    if config.tokenizer and config.format == "maxtext":
        console.warning(f"tokenizer={config.tokenizer} has no effect: there is no tokenizer in MaxText's layout")


def _to_maxtext(config: ConvertConfig, source: str, target: Path, role: Role, console: Console) -> dict[str, Any]:
    a, open_source = find_source(source)
    if _name(config) and config.source:
        check_name(_name(config), a, source, "model_name")
    maxtext = load_format("maxtext")
    made = maxtext.arrays(open_source(role), a, _name(config), config.scan_layers, np.dtype(jnp.dtype(config.dtype)))
    for text in made.warnings:
        console.warning(text)
    size = sum(array.nbytes for array in made.arrays.values())
    console.note(f"reads {source}; writes {len(made.arrays)} tensors as {config.dtype}, {gib(size)}, "
                 f"{made.description}")
    with writing(target, _target_key(config)), scratch_folder(target) as scratch:
        maxtext.write(scratch, target, made, _progress(size, console))
        if target.parts[-2:] == maxtext.inner.parts and not target.parent.exists():
            move_folder(scratch / maxtext.inner.parent, target.parent)  # with Orbax's own files of the step
        else:
            move_folder(scratch / maxtext.inner, target)
    return {"tensors": len(made.arrays), "bytes": size}


def find_source(source: str) -> tuple[Architecture, Callable[[Role], ReadRows]]:
    """The architecture of a folder of Hugging Face's or of a run, and a function that opens it to be read in parts."""
    local = Path(source).expanduser()
    checkpoint = find_checkpoint(local) if local.is_dir() else None
    folder = checkpoint[0] / MODEL_FOLDER if checkpoint else hub.locate(source)
    a = hf_config.architecture_of(folder)

    def open_source(role: Role) -> ReadRows:
        if checkpoint is None:
            tensors = hf.open_tensors(folder, a)
            return lambda path, layer, rows: tensors[path].read(slice(layer, layer + 1), rows)[0]
        leaves = jax.tree_util.tree_leaves_with_path(load_parameters(*checkpoint, a, role))
        declared = jax.tree.leaves(param_specs(a))
        arrays = {hf.dotted(path): (leaf, hf.layout_of(hf.dotted(path), one, role))
                  for (path, leaf), one in zip(leaves, declared, strict=True)}
        return lambda path, layer, rows: take_rows(*arrays[path], layer, rows)

    return a, open_source


def _to_hugging_face(config: ConvertConfig, found: Path, target: Path, console: Console) -> dict[str, Any]:
    maxtext = load_format("maxtext")
    if not (config.tokenizer or config.model_name):
        raise maxtext.unnamed(found, "model_name", "tokenizer")
    if config.tokenizer:
        check_local(config.tokenizer, "tokenizer")
    tokenizer = hub.locate(config.tokenizer, weights=False) if config.tokenizer else None
    checkpoint = maxtext.open(found, config.model_name, tokenizer, config.scan_layers)
    console.note(checkpoint.describe())
    if tokenizer is None:
        console.warning("no tokenizer was given: the folder will hold none; copy the tokenizer's files into it, or "
                        "give tokenizer=FOLDER or a hub id")
    a, dtype = checkpoint.architecture, jnp.dtype(config.dtype)
    made = None if tokenizer and hf_config.describes(tokenizer, a) else hf_config.make_config(a, tokenizer)
    with writing(target, _target_key(config)):
        target.parent.mkdir(parents=True, exist_ok=True)
        with checkpoint.open_lazily(target.parent, dtype) as parameters:
            hf.save(target, parameters, a, tokenizer, config.dtype, config=made)
    values = sum(math.prod(one.shape) for one in jax.tree.leaves(param_specs(a)))
    return {"tensors": len(list(hf.names_of(a))), "bytes": values * dtype.itemsize}


def _progress(size: int, console: Console) -> Callable[[int], None]:
    """A function that counts the bytes written and prints each tenth of `size`."""
    done, started = 0, time.perf_counter()

    def written(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if size >= PROGRESS_BYTES and done * 10 // size > before * 10 // size:
            console.note(f"{gib(done)} of {gib(size)} written, {time.perf_counter() - started:.0f} s")

    return written
