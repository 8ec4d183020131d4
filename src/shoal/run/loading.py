"""What `model.path` names: a folder in Hugging Face format, a run of ours, a MaxText checkpoint. Found, not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.config.schema import ModelSection
from shoal.mesh import Role
from shoal.model import hf, hf_config, hub, maxtext
from shoal.model.maxtext import Place
from shoal.model.names import model_named
from shoal.model.transformer import Architecture, is_param_spec, param_specs
from shoal.run.output import check_local
from shoal.trainer.array_tree import find_tree, inspect_tree, read_leaves
from shoal.trainer.checkpoint import MODEL_FOLDER, find_checkpoint, load_parameters
from shoal.types import Params, ShoalError


@dataclass(frozen=True)
class ModelSpec:
    """A model where it lies."""

    tokenizer: Path  # the folder of the tokenizer; of config.json too, unless there is `config`
    architecture: Architecture
    load: Callable[[Role, Any], Params]  # reads the weights, laid out for a role, in a type
    config: dict[str, Any] | None = None  # a config.json in place of that folder's
    notes: tuple[str, ...] = ()


def resolve_model(section: ModelSection) -> ModelSpec:
    """The model of a configuration: where it lies and what it is."""
    path = own_path(section)
    local = check_local(path, "model.path")
    if section.tokenizer:
        check_local(section.tokenizer, "model.tokenizer")
    if tree := find_tree(local):
        return _maxtext_source(section, tree)
    checkpoint = find_checkpoint(local) if local.is_dir() else None
    folder = checkpoint[0] / MODEL_FOLDER if checkpoint else hub.locate(path)
    architecture = hf.architecture_of(folder)
    load = partial(load_parameters, *checkpoint, architecture) if checkpoint else partial(hf.load, folder, architecture)
    tokenizer, config = folder, None
    if section.tokenizer:
        tokenizer = hub.locate(section.tokenizer, weights=False)
        config = hf_config.made_config(architecture, tokenizer, hf.read_config(folder))
    return ModelSpec(tokenizer, architecture, load, config, _name_notes(section, path, architecture))


def own_path(section: ModelSection) -> str:
    """`model.path`; where it was left alone, the model on the hub that `model.name` names."""
    if not section.name or section.path != ModelSection().path:
        return section.path
    return section.name if "/" in section.name else model_named(section.name).hub_id


def _name_notes(section: ModelSection, path: str, architecture: Architecture) -> tuple[str, ...]:
    """What is to be said of a name beside a checkpoint that says by itself what it is."""
    if not section.name or path != section.path or "/" in section.name:
        return ()
    try:
        same = model_named(section.name).architecture == architecture
    except ShoalError:
        same = False
    said = f"{path} says by itself what it is, which is not model.name={section.name}: the name is not looked at"
    return () if same else (said,)


def _maxtext_source(section: ModelSection, tree: Path) -> ModelSpec:
    hub_id = section.name if "/" in section.name else model_named(section.name).hub_id if section.name else ""
    if not (section.tokenizer or hub_id):
        raise unnamed(tree, "model.name", "model.tokenizer")
    tokenizer = hub.locate(section.tokenizer or hub_id, weights=False)
    found = find_maxtext(tree, section.name, tokenizer, section.scan_layers)
    config = None if hf_config.own_config(found.architecture, tokenizer) else hf_config.made_config(found.architecture, tokenizer)
    return ModelSpec(tokenizer, found.architecture, found.load, config, (found.told(),))


def unnamed(tree: Path, name: str, tokenizer: str) -> ShoalError:
    """The error of a tree that nothing says more of; `name` and `tokenizer` are the keys that could."""
    return ShoalError(f"{tree} is a MaxText checkpoint, which does not say what model it is: give {name} "
                      f"(llama3.1-8b, ...), or as {tokenizer} a folder that also holds config.json")


def find_maxtext(tree: Path, name: str, reference: Path | None, scan_layers: bool) -> MaxText:
    """The checkpoint at a path, checked against the model of a name, else of the config.json in `reference`; one of
    them must be there."""
    if name and "/" not in name:
        architecture, model = model_named(name).architecture, name
    else:
        folder = reference if not name else hub.locate(name, weights=False)
        assert folder is not None
        architecture, model, name = hf.architecture_of(folder), f"{folder}/config.json", ""
    found = inspect_tree(tree)
    root = maxtext.check(found.shapes, architecture, scan_layers, tree, model)
    pairs = found.metadata.get("rope_in_pairs")  # what `shoal convert` wrote
    told = maxtext.in_pairs(name, architecture) if pairs is None else bool(pairs)
    return MaxText(tree, architecture, told, scan_layers, root, found.dtypes)


@dataclass(frozen=True)
class MaxText:
    """A MaxText checkpoint that fits an architecture."""

    folder: Path
    architecture: Architecture
    pairs: bool  # order of rotary dimensions
    scan_layers: bool
    root: str
    dtypes: Any  # of its arrays, by name

    def told(self) -> str:
        layers = "stacked" if self.scan_layers else "one by one"
        return (f"MaxText checkpoint {self.folder}: layers {layers}, rotary dimensions in "
                f"{'pairs' if self.pairs else 'halves'}")

    def load(self, role: Role, dtype: Any = np.float32) -> Params:
        """The parameters: one after the other, each read for the devices that hold it and brought into our form
        there. Beside what is loaded, one parameter of all layers is there twice."""
        found = maxtext.places(self.architecture)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self._parameter(found[hf.dotted(path)], None, role, dtype),
            param_specs(self.architecture), is_leaf=is_param_spec)

    def later(self, role: Role, dtype: Any = np.float32) -> Any:
        """`Parameters` of hf.LazyParameter: one parameter of all layers (of one layer, where they lie one by one) is in
        memory at a time."""
        kept: dict[str, np.ndarray] = {}

        def read(place: Place, layer: int | None) -> np.ndarray:
            if layer is not None and not self.scan_layers:
                return np.asarray(self._parameter(place, layer, role, dtype))[0]
            if place.path not in kept:
                kept.clear()
                kept[place.path] = np.asarray(self._parameter(place, None, role, dtype))
            return kept[place.path] if layer is None else kept[place.path][layer]

        def later(path: Any, declared: Any) -> hf.LazyParameter:
            return hf.LazyParameter(declared.shape, partial(read, found[hf.dotted(path)]))

        found = maxtext.places(self.architecture)
        return jax.tree_util.tree_map_with_path(later, param_specs(self.architecture), is_leaf=is_param_spec)

    def _parameter(self, place: Place, layer: int | None, role: Role, dtype: Any) -> jax.Array:
        """A parameter in our form; with `layer`, of that one alone, [1, ...]."""
        count = self.architecture.num_layers
        shape, axes = place.stored(count, self.scan_layers)
        names = [self.root + name for name in place.names(count, self.scan_layers)]
        names = names if layer is None else names[layer : layer + 1]
        sharding = role.sharding(axes, shape)
        stored = read_leaves(self.folder, {
            name: jax.ShapeDtypeStruct(shape, self.dtypes[name], sharding=sharding) for name in names})
        assemble = partial(maxtext.from_maxtext, place=place, pairs=self.pairs, scanned=self.scan_layers, dtype=dtype)
        ours = place.declared if layer is None else None
        out = role.sharding(ours.axes, ours.shape) if ours else role.replicated
        return jax.jit(assemble, out_shardings=out)([stored[name] for name in names]).block_until_ready()
