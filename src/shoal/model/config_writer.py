"""Writes config.json: the one that a model came with, or one made from its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.files import read_json
from shoal.model.architecture import Architecture
from shoal.model.config_json import read_config
from shoal.model.config_rope import scaling_entries
from shoal.model.families import (
    ACTIVATIONS,
    FAMILIES,
    MULTIMODAL,
    architecture_in,
    architecture_of,
    is_multimodal,
)
from shoal.records import ShoalError

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_of(a: Architecture) -> dict[str, Any]:
    """Returns a config.json for an architecture, that of its `model_type`; ShoalError if the
    family's entries cannot say all of it. An adapter and the type of weights are not in it.
    `max_position_embeddings` is 32,768 if it is not known; the ids of special tokens are None."""
    base = replace(a, adapter=None, quantised="")
    family = FAMILIES[a.model_type]
    config = {
        "architectures": [family.transformers_class],
        "model_type": a.model_type,
        **_common_entries(base),
    }
    for common, own in family.names.items():
        config[own] = config.pop(common)
    config |= family.write(base)
    if architecture_in(config, "the config.json to write") != base:
        raise ShoalError(
            f"the config.json of model_type {a.model_type} cannot describe this mixture of sizes "
            f"and switches: {a}."
        )
    return config


def _common_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries that all families have, as `_common` reads them, without those that a
    family's `write` adds."""
    positions = a.max_positions or 32768
    if a.rope_scaling and a.rope_scaling.kind == "linear":  # the file has the number before scaling
        positions = round(positions / a.rope_scaling.factor)
    by_activation = {activation: name for name, activation in ACTIVATIONS.items()}
    config: dict[str, Any] = {
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": by_activation.get(a.activation),
        "max_position_embeddings": positions,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope_theta,
        "tie_word_embeddings": a.tie_embeddings,
        # Explicitly None: without these entries Llama's class uses ids 1 and 2, which may be any
        # tokens here.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if a.rope_scaling:
        config["rope_scaling"] = scaling_entries(a.rope_scaling)
    return config


def config_to_save(
    a: Architecture, source: Path | None, config: dict[str, Any] | None, dtype: np.dtype
) -> dict[str, Any]:
    """Returns the content of the config.json to write with parameters of `dtype`: `config`, or else
    that of the folder `source`, or else one made from the architecture. A new dict is returned,
    whose `dtype` (or `torch_dtype`, if it has no entry `dtype`) is `dtype`, and which says nothing
    of quantised weights. ShoalError if `config` is None and the source's is of another
    architecture."""
    if config is None and source is not None and (source / "config.json").is_file():
        if architecture_of(source) != a:
            raise ShoalError(
                f"{source}/config.json describes another architecture than these parameters have."
            )
        config = read_config(source)
    saved = dict(config or make_config(a, source))
    # describes the source's files; the ones to write are not quantised
    saved.pop("quantization_config", None)
    dtype_key = "dtype" if "dtype" in saved else "torch_dtype"
    saved[dtype_key] = dtype.name
    text = saved.get("text_config")
    if isinstance(text, dict) and dtype_key in text:
        saved["text_config"] = {**text, dtype_key: dtype.name}
    return saved


def text_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the text model in that of a model for several kinds of input; an
    equal one for any other model."""
    if not is_multimodal(config):
        return dict(config)
    family_name = MULTIMODAL[config["model_type"]]
    text = {**config["text_config"], "model_type": family_name}
    text["architectures"] = [FAMILIES[family_name].transformers_class]
    for key in ("dtype", "torch_dtype", "tie_word_embeddings", *_TOKEN_IDS):
        if key in config:
            text[key] = config[key]
    return text


def make_config(
    a: Architecture, tokenizer: Path | None, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the content of a config.json: `config`, or else one made from the architecture. A new
    dict is returned. The ids of the special tokens in it are replaced by those that config.json,
    and then generation_config.json, have in the folder `tokenizer`. If both have an id, the second
    file's counts; without the folder or files they stay."""
    made = dict(config or config_of(a))
    for name in ("config.json", "generation_config.json"):
        if tokenizer and (tokenizer / name).is_file():
            for key, value in read_json(tokenizer / name).items():
                if key in _TOKEN_IDS:
                    made[key] = value
    return made
