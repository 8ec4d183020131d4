"""config.json: the architecture of a model folder, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.files import read_json
from shoal.model.architecture import Architecture, RopeScaling
from shoal.types import ShoalError


@dataclass(frozen=True)
class Family:
    """What a `model_type` of config.json implies beside the entries of the file.

    Entries that its class in transformers does not read are ignored here too; `config_of` writes those that it reads.
    """

    transformers_class: str
    biases: tuple[str, ...] = ()  # entries for biases that it reads, of attention_bias and mlp_bias
    qkv_bias: bool = False  # always, whatever attention_bias says
    qk_norm: bool = False
    head_dim: int = 0  # without the entry; 0: hidden_size / heads
    windows: bool = True  # it reads use_sliding_window

    def has(self, a: Architecture) -> bool:
        """True if a model of the family may have these switches."""
        biases = [(self.qkv_bias, False)] + [(True, True)] * ("attention_bias" in self.biases)
        return ((a.qkv_bias, a.output_bias) in biases and a.qk_norm == self.qk_norm
                and (not a.mlp_bias or "mlp_bias" in self.biases))


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", ("attention_bias", "mlp_bias"), windows=False),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", ("attention_bias",), qk_norm=True, head_dim=128),
}
"""`model_type` of config.json -> the family."""


def architecture_of(folder: str | Path) -> Architecture:
    """Reads config.json, as transformers 4 or 5 writes it. ShoalError for a model that is not supported."""
    folder = Path(folder)
    config = read_config(folder)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ShoalError(f"{folder}: model_type is {config.get('model_type')!r}; supported are {', '.join(FAMILIES)}.")
    _refuse_unsupported(config, folder)
    hidden_size, heads = _size(config, "hidden_size", folder), _size(config, "num_attention_heads", folder)
    key_heads = config.get("num_key_value_heads") or heads
    if heads % key_heads:
        raise ShoalError(f"{folder}: num_attention_heads={heads} is no multiple of num_key_value_heads={key_heads}.")
    theta, scaling = _rope(config, folder)
    attention_bias, mlp_bias = (entry in family.biases and bool(config.get(entry, False))
                                for entry in ("attention_bias", "mlp_bias"))
    return Architecture(
        vocab_size=_size(config, "vocab_size", folder),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size", folder),
        num_layers=_size(config, "num_hidden_layers", folder),
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=config.get("head_dim") or family.head_dim or hidden_size // heads,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
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
    """Raises ShoalError for entries of config.json that ask for what `forward` does not compute."""
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
    name, family = next(((name, family) for name, family in FAMILIES.items() if family.has(a)), ("", None))
    if family is None:
        raise ShoalError(f"No model of transformers has this mixture of biases and norms: {a}.")
    config: dict[str, Any] = {
        "architectures": [family.transformers_class],
        "model_type": name,
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
    config |= {entry: value for entry, value in (("attention_bias", a.qkv_bias), ("mlp_bias", a.mlp_bias))
               if entry in family.biases}
    if family.windows:
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
