"""Reads and writes adapters (LoRA) in PEFT's format: adapter_config.json,
adapter_model.safetensors.

PEFT names tensors and targets by the modules of the class that holds the base model:

    base                            names in an adapter
    a text model                    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    a text model within a class     base_model.model.model.language_model.layers.0...
    for several kinds of input      base_model.model.language_model.model.layers.0... (old)

All are read; what is written fits the class that the base's config.json names. Its towers may have
products of the same names (q_proj), so there the targets are a regular expression.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.files import move_folder, read_json, scratch_folder, write_text
from shoal.mesh import Role
from shoal.model.adapters import make_adapter
from shoal.model.architecture import EXPERT_PRODUCTS, Adapter, Architecture
from shoal.model.parameters import (
    ADAPTER_PREFIX,
    TEXT_MODEL,
    TEXT_MODELS_WITHIN,
    Parameters,
    initialise_specs,
    trained_specs,
)
from shoal.records import ShoalError
from shoal.text import count
from shoal.weights import huggingface
from shoal.weights.fused import fused_tensors, with_fused, with_parts
from shoal.weights.origin import PASSED_OVER, parameter_name
from shoal.weights.tensor_files import StoredParameter, StoredTensor, read_header, write_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


REFUSED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "layer_replication",
    "exclude_modules",
    "fan_in_fan_out",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "alora_invocation_tokens",
)
"""Entries of adapter_config.json that change the computation if they are set: an adapter with one
is refused."""


BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base model as it is."""


# In


def is_adapter(folder: Path) -> bool:
    """True if a folder has PEFT's adapter_config.json."""
    return (folder / CONFIG).is_file()


def read_base(folder: Path) -> str:
    """Returns the folder or hub id of the model that an adapter was trained on; ShoalError if its
    config does not name it."""
    base = read_json(folder / CONFIG).get("base_model_name_or_path")
    if not base:
        raise ShoalError(
            f"{folder / CONFIG} does not name the model it belongs to (base_model_name_or_path): "
            f"give that one as model.path, and this as model.lora.path={folder}"
        )
    return str(base)


def read_adapter(folder: Path, a: Architecture) -> Adapter:
    """Reads adapter_config.json, and returns the adapter (rank, alpha, targets; no weights) for a
    model of architecture `a`. Targets in the base's towers are left out. ShoalError if the adapter
    is not plain LoRA, or does not fit the model."""
    config = read_json(folder / CONFIG)
    unsupported = [name for name in REFUSED if config.get(name)]
    # other values change the base's weights when the adapter begins
    if config.get("init_lora_weights") not in BEGINNINGS:
        unsupported.append(f"init_lora_weights {config.get('init_lora_weights')}")
    if config.get("peft_type") != "LORA":
        unsupported.append(f"peft_type {config.get('peft_type')}")
    if config.get("bias", "none") != "none":
        unsupported.append(f"bias {config.get('bias')}")
    if unsupported:
        raise ShoalError(
            f"{folder / CONFIG} has {', '.join(unsupported)}, which is not supported: expected "
            "plain LoRA"
        )
    targets = config.get("target_modules") or ()
    if isinstance(targets, str):
        targets = (targets,)
    # PEFT takes the end of a parameter's path, so that `down_proj` is one too.
    parameters = []
    for name in config.get("target_parameters") or ():
        parameters.append(name if "experts" in name else f"experts.{name}")
    passed_over = []
    if (folder / WEIGHTS).is_file():
        _, others = _sorted_tensors(folder)
        passed_over = [name.partition(".lora_")[0] for name in others]
    try:
        return make_adapter(
            a,
            int(config["r"]),
            float(config["lora_alpha"]),
            (*targets, *parameters),
            bool(config.get("use_rslora")),
            passed_over,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ShoalError(
            f"{folder / CONFIG} is not an adapter's: r, lora_alpha or target_modules is wrong "
            f"({error})"
        ) from error


def _sorted_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns (the tensors of an adapter's file by the names that a text model's adapter has, names
    of those on parts that a text model does not have, without PEFT's prefix)."""
    tensors: dict[str, StoredTensor] = {}
    others: list[str] = []
    for stored_name, tensor in read_header(folder / WEIGHTS).items():
        name = stored_name.removeprefix(ADAPTER_PREFIX)
        if name.startswith(PASSED_OVER):
            others.append(name)
        else:
            tensors[ADAPTER_PREFIX + parameter_name(name)] = tensor
    return tensors, others


def notes(folder: Path) -> list[str]:
    """Returns what a user should know of an adapter's file: that parts of it are passed over."""
    if not (folder / WEIGHTS).is_file():
        return []
    _, others = _sorted_tensors(folder)
    if not others:
        return []
    return [
        f"the adapter in {folder} has {count(len(others), 'tensor')} on towers, as "
        f"{others[0]}, which a text does not reach: they are passed over, also in exports"
    ]


def open_tensors(folder: Path, a: Architecture) -> dict[str, StoredParameter]:
    """Returns the stored tensors of an adapter in a folder by the names of the adapter's specs,
    without reading values. ShoalError unless they are exactly those of the architecture, which has
    the adapter."""
    if not (folder / WEIGHTS).is_file():
        raise ShoalError(f"{folder} holds no {WEIGHTS}: expected an adapter as PEFT saves it")
    specs = trained_specs(a)
    where = f"{folder} do not fit its {CONFIG} and the model"
    tensors, _ = _sorted_tensors(folder)
    stored = with_parts(tensors, fused_tensors(a, specs), where)
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in jax.tree.leaves(specs):
        for name in spec.names_by_index.values():
            shapes[name] = spec.tensor_shape
    misfits = []
    for name, shape in shapes.items():
        if name in stored and stored[name].shape != shape:
            short = name.removeprefix(ADAPTER_PREFIX)
            misfits.append(f"{short} is {list(stored[name].shape)}, here {list(shape)}")
    missing = [name.removeprefix(ADAPTER_PREFIX) for name in shapes.keys() - stored]
    for short in sorted(missing):
        misfits.append(f"the model has {short}, it has not")
    left_over = [name.removeprefix(ADAPTER_PREFIX) for name in stored.keys() - shapes]
    for short in sorted(left_over):
        misfits.append(f"it has {short}, the model has not")
    if misfits:
        base = read_json(folder / CONFIG).get("base_model_name_or_path") or "not named"
        raise ShoalError(
            f"{folder} holds an adapter that does not fit its {CONFIG} and the model: {misfits[0]} "
            f"({count(len(misfits), 'tensor')} in all); give the model that it was trained on "
            f"({base!s:.200}) as model.path"
        )
    return huggingface.check_tensors(stored, specs, where)


def load(folder: Path, a: Architecture, role: Role, dtype: Any) -> Parameters:
    """Reads the trained parameters of an adapter in a folder, and returns them as `dtype` in the
    role's sharding. ShoalError if they do not fit."""
    return huggingface.read_tensors(open_tensors(folder, a), trained_specs(a), role, dtype)


def begin(a: Architecture, role: Role, dtype: Any, seed: int) -> Parameters:
    """Returns the parameters of a new adapter, started as PEFT starts it: A uniform within
    1/sqrt(in), B zero, so that the adapter changes nothing yet. The same `seed` gives the same
    values."""

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype)

    return jax.tree.map(cast, initialise_specs(trained_specs(a), seed, role))


# Out


def write_config(folder: Path, adapter: Adapter, base: str, is_multimodal: bool = False) -> None:
    """Writes `folder`/adapter_config.json with the entries that PEFT writes, in place of one that
    exists; `base` is the folder or hub id of the frozen model, `is_multimodal` as in `save`."""
    modules = [name for name in adapter.targets if name not in EXPERT_PRODUCTS]
    parameters = [name for name in adapter.targets if name in EXPERT_PRODUCTS]
    target_modules: list[str] | str = modules
    if is_multimodal and modules:
        # The text model's layers alone, also where transformers loads it without its towers.
        any_of = "|".join(modules)
        target_modules = rf"model\.(language_model\.)?layers\..*\.({any_of})"
    config = {
        "alpha_pattern": {},
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": {},
        "target_modules": target_modules,
        "target_parameters": parameters or None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": adapter.rslora,
    }
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def save(
    folder: Path,
    parameters: Parameters,
    a: Architecture,
    base: str,
    tokenizer: Path,
    dtype: Any = "float32",
    is_multimodal: bool = False,
    card: str = "",
) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads onto the base model, with the
    tokenizer's files. It appears whole at the end; `folder` must be missing or empty. `parameters`
    has the adapter's parameters, and None in place of the base's; `base` is the folder or hub id of
    the base, `tokenizer` a folder with its files, `dtype` the type of the written weights.
    `is_multimodal`: True if the base's config.json is of a model for several kinds of input.
    `card`: the model card, "" for none. OSError if the folder cannot be written; AssertionError if
    `a` has no adapter."""
    assert a.adapter
    specs = trained_specs(a)
    parts = huggingface.output_tensors(parameters, specs)
    tensors = []
    for tensor in with_fused(parts, fused_tensors(a, specs)):
        name = tensor.name
        if is_multimodal:
            own_name = name.removeprefix(ADAPTER_PREFIX + TEXT_MODEL)
            name = ADAPTER_PREFIX + TEXT_MODELS_WITHIN[0] + own_name
        tensors.append(replace(tensor, name=name))
    with scratch_folder(folder) as scratch:
        write_file(scratch / WEIGHTS, tensors, np.dtype(jnp.dtype(dtype)))
        write_config(scratch, a.adapter, base, is_multimodal)
        huggingface.copy_tokenizer(tokenizer, scratch)
        huggingface.write_card(scratch, card)
        move_folder(scratch, folder)
