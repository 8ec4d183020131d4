"""Loads the model that `model.path` names: a folder in Hugging Face format, a hub id, a run, or another system's
checkpoint."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shoal.config.schema import Config, ModelSection
from shoal.files import check_local, write_text
from shoal.mesh import Role
from shoal.model import hf, hf_config
from shoal.model.architecture import Architecture
from shoal.model.names import MODELS, locate, model_named
from shoal.model.segment_attention import kernel_fault
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformer import Model
from shoal.report.console import Console
from shoal.run import maxtext_checkpoint
from shoal.trainer.checkpoint import MODEL_FOLDER, find_checkpoint, load_parameters
from shoal.trainer.step import ModelScorer
from shoal.types import Params, ShoalError

MATMUL_PRECISION = "jax_default_matmul_precision"


def no_weights(role: Role, dtype: Any) -> Params:
    raise RuntimeError("a model of sizes alone has no weights to read")


@dataclass(frozen=True)
class ModelSpec:
    """A model that was found, without its weights: what it is, and how to read them.

    >>> spec = open_model(ModelSection(path="Qwen/Qwen3-0.6B"), console)
    >>> params = spec.load(roles.trainer, jnp.float32)
    """

    folder: Path  # holds the tokenizer, and config.json unless there is `config`
    architecture: Architecture
    load: Callable[[Role, Any], Params] = no_weights  # reads the weights, laid out for a role, in a dtype
    config: dict[str, Any] | None = None  # a config.json in place of the folder's
    notes: tuple[str, ...] = ()
    template: str = ""  # a chat template in place of the folder's

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder, self.template)


def open_model(section: ModelSection, console: Console | None) -> ModelSpec:
    """The model that the settings name, checked against its tokenizer. Prints notes about both to `console`."""
    return _noted(resolve_model(section), console)


def _noted(spec: ModelSpec, console: Console | None) -> ModelSpec:
    """The same; ShoalError if the tokenizer has ids that the model does not."""
    spec.tokenizer.check_vocabulary(spec.architecture)
    if console is not None:
        for note in (*spec.notes, *spec.tokenizer.notes):
            console.note(note)
    return spec


def open_run_model(section: ModelSection, run: Path | None, console: Console | None) -> ModelSpec:
    """The model of a training run. A resumed run loads the files in its folder, and `model.path` only for the first
    weights."""
    if run is None or not (run / MODEL_FOLDER / "config.json").is_file():
        return open_model(section, console)
    # The run's own files: what `model.path` names may have changed since, or be gone.
    stored = resolve_model(replace(section, path=str(run / MODEL_FOLDER), name="", tokenizer="", template=""))
    first = replace(stored, load=lambda role, dtype: open_model(section, console).load(role, dtype))
    return _noted(first, console)


def resolve_model(section: ModelSection) -> ModelSpec:
    """Finds the model that the settings name; a model on the hub is downloaded."""
    path = model_path(section)
    # Before anything is read: a cloud path would be taken for a hub id and fail as one.
    local = check_local(path, "model.path")
    if section.tokenizer:
        check_local(section.tokenizer, "model.tokenizer")
    # First: another system's folder may hold a config.json too.
    if found := maxtext_checkpoint.find_tree(local):
        return _maxtext_model(section, found)
    checkpoint = find_checkpoint(local) if local.is_dir() else None
    folder = checkpoint[0] / MODEL_FOLDER if checkpoint else locate(path)
    a = hf_config.architecture_of(folder)
    load = functools.partial(load_parameters, *checkpoint, a) if checkpoint else functools.partial(hf.load, folder, a)
    notes = _unused_name(section, a) if path == section.path else ()
    if not section.tokenizer:
        return ModelSpec(folder, a, load, None, notes, section.template)
    tokenizer = locate(section.tokenizer, weights=False)
    config = hf_config.make_config(a, tokenizer, hf_config.read_config(folder))
    return ModelSpec(tokenizer, a, load, config, notes, section.template)


def _maxtext_model(section: ModelSection, found: Path) -> ModelSpec:
    name = section.name
    source = section.tokenizer or (name if "/" in name else model_named(name).hub_id if name else "")
    tokenizer = locate(source, weights=False) if source else None
    checkpoint = maxtext_checkpoint.open_checkpoint(found, name, tokenizer, section.scan_layers)
    assert tokenizer is not None
    a = checkpoint.architecture
    config = None if hf_config.describes(tokenizer, a) else hf_config.make_config(a, tokenizer)
    return ModelSpec(tokenizer, a, checkpoint.load, config, (checkpoint.describe(),), section.template)


def model_path(section: ModelSection) -> str:
    """`model.path`; if it is the default, the hub's model of `model.name`."""
    if not section.name or section.path != ModelSection().path:
        return section.path
    return section.name if "/" in section.name else model_named(section.name).hub_id


def known_architecture(section: ModelSection) -> Architecture | None:
    """The sizes of a model that is a folder or has a well-known name; None for others, which the hub knows."""
    path = model_path(section)
    if Path(path).expanduser().is_dir() or path == ModelSection.path:
        return resolve_model(section).architecture
    if section.name and "/" not in section.name:
        return model_named(section.name).architecture
    return next((known.architecture for known in MODELS.values() if known.hub_id.lower() == path.lower()), None)


def planned_architecture(section: ModelSection) -> Architecture:
    """The model's sizes, from its name or a config.json alone; ShoalError if neither can be had."""
    return known_architecture(section) or hf_config.architecture_of(locate(model_path(section), weights=False))


def _unused_name(section: ModelSection, a: Architecture) -> tuple[str, ...]:
    """A note if `model.name` contradicts the checkpoint's own config.json."""
    if not section.name or "/" in section.name:
        return ()
    try:
        same = model_named(section.name).architecture == a
    except ShoalError:
        same = False
    note = (f"the config.json of {section.path} describes another model, not model.name={section.name}: the name has "
            "no effect")
    return () if same else (note,)


def find_teacher(config: Config, student: ModelSpec, console: Console | None) -> ModelSpec:
    """The teacher without its weights; raises ShoalError if its vocabulary is not the student's."""
    teacher = open_model(replace(config.model, path=config.teacher.path, name="", tokenizer="", template=""), console)
    # By vocabulary, not by family: log-probs are compared id by id.
    if teacher.tokenizer.vocabulary() != student.tokenizer.vocabulary():
        raise ShoalError(f"teacher.path={config.teacher.path}: its vocabulary is not that of the model "
                         f"{config.model.path}, so its log-probs would be of other tokens; give one of the same family")
    return teacher


def load_scorer(section: ModelSection, spec: ModelSpec, role: Role) -> ModelScorer:
    """A model that only scores, with its weights, in the dtype of the computation."""
    model = make_model(section, spec, role)
    return ModelScorer(model, spec.load(role, model.dtype))


def compute_dtype(name: str, platform: str) -> Any:
    """The dtype of `model.dtype`: for `auto`, float32 on CPU and bfloat16 on accelerators."""
    if name == "auto":
        # Most CPUs have no bfloat16 products: XLA converts to float32 and back, which is slower.
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def multiply_exactly(dtype: Any, stack: ExitStack) -> None:
    """Until `stack` closes, float32 is multiplied as float32, of which accelerators keep fewer bits by default."""
    if dtype != jnp.float32:
        return
    # For all threads, some of which sample: `jax.default_matmul_precision` is for its own alone.
    stack.callback(jax.config.update, MATMUL_PRECISION, jax.config.values[MATMUL_PRECISION])
    jax.config.update(MATMUL_PRECISION, "highest")


def make_model(section: ModelSection, spec: ModelSpec, role: Role) -> Model:
    """The `Model` on a role's devices; one that is trained is `trained_model`'s."""
    dtype = compute_dtype(section.dtype, role.platform)
    remat = "dots" if section.remat == "auto" else section.remat
    model = Model(spec.architecture, role, dtype, remat, section.attention)
    return replace(model, attention="blocked") if kernel_fault(model) else model


def copy_model_files(model: ModelSpec, target: Path) -> None:
    """Copies tokenizer, chat template and config.json, so that checkpoints need nothing else. config.json comes last:
    it marks the folder as complete."""
    target.mkdir(parents=True, exist_ok=True)
    # The template may be the user's own; exported, the model must be asked as it was trained.
    if model.tokenizer.template:
        (target / "chat_template.jinja").write_text(model.tokenizer.template, encoding="utf-8")
    names = [name for name in hf.TOKENIZER_FILES if name != "chat_template.jinja"]
    for name in names if model.config else (*names, "config.json"):
        if (model.folder / name).is_file():
            shutil.copy2(model.folder / name, target / name)
    if model.config:
        write_text(target / "config.json", json.dumps(model.config, indent=2) + "\n", "base_output_directory")
