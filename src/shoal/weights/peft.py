"""Reads and writes adapters (LoRA) in PEFT's format: adapter_config.json,
adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.files import move_folder, read_json, scratch_folder, write_text
from shoal.mesh import Role
from shoal.model.adapters import make_adapter
from shoal.model.architecture import EXPERT_PRODUCTS, Adapter, Architecture
from shoal.model.parameters import ADAPTER_PREFIX, Parameters, initialise_specs, trained_specs
from shoal.records import ShoalError
from shoal.text import count
from shoal.weights import huggingface
from shoal.weights.fused import fused_tensors, with_fused, with_parts
from shoal.weights.tensor_files import StoredParameter, read_header, write_file

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
    model of architecture `a`. ShoalError if the adapter is not plain LoRA, or does not fit the
    model."""
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
    targets = (*targets, *(config.get("target_parameters") or ()))
    try:
        return make_adapter(
            a,
            int(config["r"]),
            float(config["lora_alpha"]),
            tuple(targets),
            bool(config.get("use_rslora")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ShoalError(
            f"{folder / CONFIG} is no adapter's: r, lora_alpha or target_modules is wrong ({error})"
        ) from error


def open_tensors(folder: Path, a: Architecture) -> dict[str, StoredParameter]:
    """Returns the stored tensors of an adapter in a folder by the names of the adapter's specs,
    without reading values. ShoalError unless they are exactly those of the architecture, which has
    the adapter."""
    if not (folder / WEIGHTS).is_file():
        raise ShoalError(f"{folder} holds no {WEIGHTS}: expected an adapter as PEFT saves it")
    specs = trained_specs(a)
    where = f"{folder} do not fit its {CONFIG} and the model"
    stored = with_parts(read_header(folder / WEIGHTS), fused_tensors(a, specs), where)
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


def write_config(folder: Path, adapter: Adapter, base: str) -> None:
    """Writes `folder`/adapter_config.json with the entries that PEFT writes, in place of one that
    exists; `base` is the folder or hub id of the frozen model."""
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
        "target_modules": [name for name in adapter.targets if name not in EXPERT_PRODUCTS],
        "target_parameters": [name for name in adapter.targets if name in EXPERT_PRODUCTS] or None,
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
) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads onto the base model, with the
    tokenizer's files. It appears whole at the end; `folder` must be missing or empty. `parameters`
    has the adapter's parameters, and None in place of the base's; `base` is the folder or hub id of
    the base, `tokenizer` a folder with its files, `dtype` the type of the written weights. OSError
    if the folder cannot be written; AssertionError if `a` has no adapter."""
    assert a.adapter
    specs = trained_specs(a)
    parts = huggingface.output_tensors(parameters, specs)
    tensors = list(with_fused(parts, fused_tensors(a, specs)))
    with scratch_folder(folder) as scratch:
        write_file(scratch / WEIGHTS, tensors, np.dtype(jnp.dtype(dtype)))
        write_config(scratch, a.adapter, base)
        huggingface.copy_tokenizer(tokenizer, scratch)
        move_folder(scratch, folder)
