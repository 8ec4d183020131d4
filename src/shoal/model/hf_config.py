"""config.json: the architecture of a model folder, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.files import read_json
from shoal.model.architecture import Architecture, RopeScaling
from shoal.types import ShoalError

FAMILIES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`model_type` of config.json -> its class in transformers."""


def architecture_of(folder: str | Path) -> Architecture:
    """Reads config.json, as transformers 4 or 5 writes it. ShoalError for a model that is not supported."""
    folder = Path(folder)
    config = read_config(folder)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ShoalError(f"{folder}: model_type is {family!r}; supported are {', '.join(FAMILIES)}.")
    _refuse_unsupported(config, folder)
    hidden_size, heads = _size(config, "hidden_size", folder), _size(config, "num_attention_heads", folder)
    key_heads = config.get("num_key_value_heads") or heads
    if heads % key_heads:
        raise ShoalError(f"{folder}: num_attention_heads={heads} is no multiple of num_key_value_heads={key_heads}.")
    theta, scaling = _rope(config, folder)
    bias = bool(config.get("attention_bias", False))
    return Architecture(
        vocab_size=_size(config, "vocab_size", folder),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size", folder),
        num_layers=_size(config, "num_hidden_layers", folder),
        num_heads=heads,
        num_kv_heads=key_heads,
        # Qwen3's class has head_dim=128 by default, whatever hidden_size and heads are.
        head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden_size // heads),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        # Qwen2's biases are in its code, not in its config.json; Llama's attention_bias adds one to `o` too.
        qkv_bias=family == "qwen2" or bias,
        output_bias=family != "qwen2" and bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
    )


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ShoalError(f"{folder} holds no config.json: expected a model folder in Hugging Face format.")
    return read_json(file)


def _size(config: Mapping[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        came = "is missing" if value is None else f"is {value!r}"
        raise ShoalError(f"{folder}/config.json: {key} {came}; expected a whole number of 1 or more.")
    return value


def _refuse_unsupported(config: Mapping[str, Any], folder: Path) -> None:
    def refuse(what: str, advice: str = "") -> None:
        raise ShoalError(f"{folder}: {what}, which is not supported.{advice and ' ' + advice}")

    if config.get("quantization_config"):
        refuse("config.json has a quantization_config", "Use the model's unquantised weights.")
    if config.get("hidden_act", "silu") != "silu":
        refuse(f"hidden_act is {config['hidden_act']!r} (expected 'silu')")
    # Newer files name each layer's kind; older ones have switches, and windows from layer max_window_layers on.
    if config.get("layer_types"):
        others = set(config["layer_types"]) - {"full_attention"}
        if others:
            refuse(f"layer_types has {', '.join(sorted(others))} (expected full_attention)")
    elif config.get("use_sliding_window") and config.get("sliding_window"):
        first = config.get("max_window_layers", 28)
        if first < _size(config, "num_hidden_layers", folder):
            refuse(f"use_sliding_window is true from layer {first} on")


def _rope(config: Mapping[str, Any], folder: Path) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_scaling` + `rope_theta` (transformers 4) or `rope_parameters` (5)."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # transformers 5 may write one a kind of layer
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ShoalError(f"{folder}: partial_rotary_factor is set, which is not supported.")
    if kind == "default":
        return theta, None
    if kind not in ("llama3", "linear"):
        raise ShoalError(f"{folder}: rope type {kind!r} is not supported; use default, linear or llama3.")

    def number(key: str) -> float:
        if not isinstance(rope.get(key), (int, float)):
            raise ShoalError(f"{folder}/config.json: rope type {kind!r} needs the number {key!r}.")
        return float(rope[key])

    if kind == "linear":
        return theta, RopeScaling("linear", number("factor"))
    original = (
        config.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or _size(config, "max_position_embeddings", folder)
    )
    return theta, RopeScaling(
        "llama3", number("factor"), number("low_freq_factor"), number("high_freq_factor"), int(original)
    )


def config_of(a: Architecture) -> dict[str, Any]:
    """A config.json for an architecture; ShoalError if no family of transformers has it."""
    family = "qwen3" if a.qk_norm else "qwen2" if a.qkv_bias and not a.output_bias else "llama"
    if (family != "llama" and a.mlp_bias) or (family != "qwen2" and a.qkv_bias != a.output_bias):
        raise ShoalError(f"No model of transformers has this mixture of biases and norms ({family}): {a}.")
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope_theta,
        "tie_word_embeddings": a.tie_embeddings,
        # Named as none: without them Llama's class takes ids 1 and 2, which may be any tokens here.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family != "qwen2":
        config["attention_bias"] = a.qkv_bias
    if family == "llama":
        config["mlp_bias"] = a.mlp_bias
    else:
        config["use_sliding_window"] = False
    if a.rope_scaling is not None:
        s = a.rope_scaling
        config["rope_scaling"] = {"rope_type": s.kind, "factor": s.factor}
        if s.kind == "llama3":
            config["rope_scaling"] |= {
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_max_position,
            }
    return config


def config_to_save(a: Architecture, source: Path | None, config: dict[str, Any] | None,
                   dtype: np.dtype) -> dict[str, Any]:
    """The config.json to write with parameters of `dtype`: the given one, else the source's, else one made from the
    architecture."""
    if config is None and source is not None and (source / "config.json").is_file():
        if architecture_of(source) != a:
            raise ShoalError(f"{source}/config.json describes another architecture than these parameters have.")
        config = read_config(source)
    config = config or make_config(a, source)
    return {**config, "dtype" if "dtype" in config else "torch_dtype": dtype.name}


def make_config(a: Architecture, tokenizer: Path | None, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config for an architecture (or the given one), with the special token ids of a tokenizer's folder."""
    made = dict(config or config_of(a))
    for name in ("config.json", "generation_config.json"):
        if tokenizer and (tokenizer / name).is_file():
            ids = read_json(tokenizer / name)
            made.update({key: value for key, value in ids.items() if key in _TOKEN_IDS})
    return made


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def describes(folder: Path, a: Architecture) -> bool:
    """True if the config.json in a folder describes this architecture."""
    try:
        return architecture_of(folder) == a
    except ShoalError:  # no config.json, or a model that is not supported
        return False
