"""`shoal convert`: a checkpoint in MaxText's layout from one of Hugging Face's or ours, and back.

Nothing is in memory but the piece in hand: a layer of a tensor on the way to MaxText's layout; on the way back a tensor
of all layers, twice (of one layer, where they lie one by one). A run's own checkpoint is read whole.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.config.schema import ConvertConfig, MeshSection, ModelSection
from shoal.mesh import Role, make_roles
from shoal.model import hf, hf_config, hub, maxtext
from shoal.model.names import check_name, model_named
from shoal.model.transformer import Architecture
from shoal.report.console import Console
from shoal.report.folder import named_folder
from shoal.run.loading import find_maxtext, own_path, unnamed
from shoal.run.output import check_local, check_new_folder, writing
from shoal.trainer.array_tree import ITEM, STEP, LazyArray, find_tree, write_tree
from shoal.trainer.checkpoint import MODEL_FOLDER, find_checkpoint, load_parameters
from shoal.types import Params, ShoalError

Read = Callable[[str, tuple[slice, ...]], np.ndarray]
"""Dotted path of a parameter, part of it -> its values, float32: layers first, kernels as [in, out]."""

LATE_WRITES = 10
"""Tenths of a second that are waited for writes still under way when another has failed."""

TELL_ABOVE_BYTES = 1 << 30
"""Size from which each tenth that is written is told."""


def convert(config: ConvertConfig, console: Console | None = None) -> dict[str, Any]:
    """Writes the folder whole or not at all; one that is there already is left as it is."""
    source, target, started = _source(config), _target(config), time.perf_counter()
    tree = find_tree(check_local(source, "from"))
    if _name(config):
        model_named(_name(config))
    with console or Console() as console:
        _show_unused(config, console)
        role = make_roles(MeshSection(fsdp=1)).trainer
        if config.format == "maxtext":
            if tree:
                raise ShoalError(f"from={source} is a MaxText checkpoint already: give format=huggingface, or another "
                                 "checkpoint")
            written = _to_maxtext(config, source, target, role, console)
        else:
            if tree is None:
                raise ShoalError(f"from={source} is no MaxText checkpoint (.../0/items): give one, or take `shoal "
                                 "export`, which writes a run's weights in Hugging Face's format")
            written = _to_hugging_face(config, tree, target, role, console)
        console.note(f"wrote {target}: {written['tensors']} tensors, {_size(written['bytes'])} in "
                     f"{time.perf_counter() - started:.1f} s")
    return {"to": str(target), **written}


def _source(config: ConvertConfig) -> str:
    if not (config.source or config.model_name):
        raise ShoalError("from: nothing was given; expected a checkpoint, or model_name alone for the hub's model of "
                         "that name")
    return config.source or own_path(ModelSection(name=config.model_name))


def _target(config: ConvertConfig) -> Path:
    """The folder to write, which is not there yet."""
    if config.to:
        return check_new_folder(config.to, "to")
    if not config.base_output_directory:
        raise ShoalError("to: nothing was given; expected the folder to write, or base_output_directory")
    target = check_local(config.base_output_directory, "base_output_directory")
    if config.run_name:
        target = named_folder(target, config.run_name)
    return check_new_folder(target / STEP / ITEM if config.format == "maxtext" else target, "base_output_directory")


def _name(config: ConvertConfig) -> str:
    """MaxText's name of the model, where one was given: a hub id is none."""
    return "" if "/" in config.model_name else config.model_name


def _show_unused(config: ConvertConfig, console: Console) -> None:
    """Warns of keys that say nothing beside the others."""
    beside = [key for key in ("base_output_directory", "run_name") if getattr(config, key)]
    if config.to and beside:
        console.warning(f"to={config.to} is the folder that is written: {' and '.join(beside)} beside it "
                        f"{'has' if len(beside) == 1 else 'have'} no effect")
    if config.tokenizer and config.format == "maxtext":
        console.warning(f"tokenizer={config.tokenizer} has no effect: there is no tokenizer in MaxText's layout")


# To MaxText


def _to_maxtext(config: ConvertConfig, source: str, target: Path, role: Role, console: Console) -> dict[str, Any]:
    architecture, opened = find(source)
    if _name(config) and config.source:
        check_name(_name(config), architecture, source, "model_name")
    _show_rounding(config.dtype, architecture, console)
    pairs = maxtext.in_pairs(_name(config), architecture)
    arrays = unread(opened(role), architecture, pairs, config.scan_layers, np.dtype(jnp.dtype(config.dtype)))
    size = sum(array.nbytes for array in arrays.values())
    console.note(f"reads {source}; writes {len(arrays)} tensors as {config.dtype}, {_size(size)}, layers "
                 f"{'stacked' if config.scan_layers else 'one by one'}, rotary dimensions in "
                 f"{'pairs' if pairs else 'halves'}")
    said = {"scan_layers": config.scan_layers, "rope_in_pairs": pairs}
    with _beside(target, _key(config)) as partial_folder:
        write_tree(partial_folder, target, arrays, said, _telling(size, console))
        if target.parts[-2:] == (STEP, ITEM) and not target.parent.exists():
            _move(partial_folder / STEP, target.parent)  # with what Orbax says of the step
        else:
            _move(partial_folder / STEP / ITEM, target)
    return {"tensors": len(arrays), "bytes": size}


def _show_rounding(dtype: str, a: Architecture, console: Console) -> None:
    """Warns where bfloat16 weights would not be themselves again on the way back."""
    inexact = [place for place in maxtext.places(a).values() if math.frexp(place.factor)[0] != 0.5]
    if inexact and dtype == "bfloat16":
        console.warning(f"dtype=bfloat16: MaxText's queries are divided by the square root of head_dim={a.head_dim}, "
                        "which rounds them once more; dtype=float32 keeps bfloat16 weights as they are")


def find(source: str) -> tuple[Architecture, Callable[[Role], Read]]:
    """A folder of Hugging Face's or a run's checkpoint: what it is, and what opens it to be read in parts."""
    local = Path(source).expanduser()
    checkpoint = find_checkpoint(local) if local.is_dir() else None
    folder = checkpoint[0] / MODEL_FOLDER if checkpoint else hub.locate(source)
    architecture = hf.architecture_of(folder)

    def opened(role: Role) -> Read:
        if checkpoint is None:
            return partial(hf.open_tensors(folder, architecture).read, dtype=np.float32)
        leaves = _by_path(load_parameters(*checkpoint, architecture, role))
        return lambda path, part: np.asarray(leaves[path][part])

    return architecture, opened


def _by_path(parameters: Params) -> dict[str, jax.Array]:
    return {hf.dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)}


def unread(read: Read, a: Architecture, pairs: bool, scan_layers: bool, dtype: np.dtype) -> dict[str, LazyArray]:
    """The arrays of MaxText's tree by name, each made when it is written."""

    def layer_of(place: maxtext.Place, layer: int, _: slice | None = None) -> np.ndarray:
        index = (slice(layer, layer + 1), *(slice(0, size) for size in place.declared.shape[1:]))
        return maxtext.to_maxtext(read(place.path, index)[0], place, pairs).astype(dtype)

    def layers_of(place: maxtext.Place, part: slice) -> np.ndarray:
        return np.stack([layer_of(place, layer) for layer in range(part.start, part.stop)], maxtext.STACKED_AXIS)

    def part_of(place: maxtext.Place, axis: int, part: slice) -> np.ndarray:
        index = [slice(0, size) for size in place.shape]
        index[axis] = part
        return read(place.path, tuple(index)).astype(dtype)

    arrays = {}
    for place in maxtext.places(a).values():
        shape, axes = place.stored(a.num_layers, scan_layers)
        for layer, name in enumerate(place.names(a.num_layers, scan_layers)):
            if not place.layered:
                axis = axes.index("vocab") if "vocab" in axes else 0
                how = (axis, partial(part_of, place, axis), False)
            elif scan_layers:
                how = (maxtext.STACKED_AXIS, partial(layers_of, place), True)
            else:
                how = (None, partial(layer_of, place, layer), False)
            arrays[maxtext.ROOTS[0] + name] = LazyArray(shape, dtype, *how)
    return arrays


# To Hugging Face's format


def _to_hugging_face(config: ConvertConfig, tree: Path, target: Path, role: Role, console: Console) -> dict[str, Any]:
    if not (config.tokenizer or config.model_name):
        raise unnamed(tree, "model_name", "tokenizer")
    if config.tokenizer:
        check_local(config.tokenizer, "tokenizer")
    tokenizer = hub.locate(config.tokenizer, weights=False) if config.tokenizer else None
    found = find_maxtext(tree, config.model_name, tokenizer, config.scan_layers)
    console.note(found.told())
    if tokenizer is None:
        console.warning("no tokenizer was given: the folder will hold none; copy the tokenizer's files into it, or "
                        "give tokenizer=FOLDER or a hub id")
    a = found.architecture
    made = None if tokenizer and hf_config.own_config(a, tokenizer) else hf_config.made_config(a, tokenizer)
    with writing(target, _key(config)):
        target.parent.mkdir(parents=True, exist_ok=True)
        later = found.later(role, jnp.dtype(config.dtype))
        hf.save(target, later, a, tokenizer, config.dtype, config=made)
    sizes = [place.declared.shape for place in maxtext.places(a).values()]
    values = sum(int(np.prod(shape)) for shape in sizes)
    return {"tensors": len(list(hf.names_of(a))), "bytes": values * jnp.dtype(config.dtype).itemsize}


# Files


def _key(config: ConvertConfig) -> str:
    return "to" if config.to else "base_output_directory"


@contextmanager
def _beside(target: Path, key: str) -> Iterator[Path]:
    """A folder of its own to write into, on the target's disk, gone afterwards; folders above that were made for it go
    too where nothing came of them."""
    above = next(parent for parent in target.absolute().parents if parent.exists())
    folder = above / f".{target.name}.partial-{os.getpid()}"
    with writing(target, key):
        try:
            folder.mkdir()
            yield folder
        except BaseException:
            for _ in range(LATE_WRITES):  # of Orbax's other threads, which make the folder anew
                shutil.rmtree(folder, ignore_errors=True)
                time.sleep(0.1)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _move(folder: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        target.rmdir()  # empty, as was looked before
    folder.rename(target)


def _telling(size: int, console: Console) -> Callable[[int], None]:
    """Counts bytes that are written and tells each tenth of them."""
    done, started = 0, time.perf_counter()

    def written(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if size >= TELL_ABOVE_BYTES and done * 10 // size > before * 10 // size:
            console.note(f"{_size(done)} of {_size(size)} written, {time.perf_counter() - started:.0f} s")

    return written


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

