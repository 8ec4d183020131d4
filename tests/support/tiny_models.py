"""Tiny random models and tokenizers in Hugging Face format, written without torch; the same bytes
for a seed, always.

`FAMILIES` has a config.json for kinds of models that Shoal reads; `write_model` makes a folder
of one, `write_tokenizer` puts a tokenizer into a folder. Names of tensors stand here once more,
apart from shoal.weights.huggingface.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}


def _config(family: str, **changes: Any) -> dict[str, Any]:
    names = {
        "llama": "Llama",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3Moe",
        "mistral": "Mistral",
        "gemma3_text": "Gemma3",
        "gpt_oss": "GptOss",
        "qwen3_5_text": "Qwen3_5",
        "qwen3_5_moe_text": "Qwen3_5Moe",
    }
    name = names[family]
    return {"architectures": [f"{name}ForCausalLM"], "model_type": family, **_SIZES, **changes}


# two delta nets, one layer with attention
_DELTA_NETS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "default",
    },
}

FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama2": _config("llama"),  # without rope_theta, as Llama 2's own
    "llama3": _config("llama", rope_theta=500000.0, rope_scaling=_LLAMA3, tie_word_embeddings=True),
    "llama-linear": _config(
        "llama",
        rope_theta=10000.0,
        rope_scaling={"type": "linear", "factor": 4.0},
        attention_bias=True,
        mlp_bias=True,
    ),
    "qwen2": _config("qwen2", rope_theta=1000000.0, rms_norm_eps=1e-6),
    "qwen2-tied": _config(
        "qwen2", rope_theta=1000000.0, tie_word_embeddings=True, use_sliding_window=False
    ),
    # a window from the second layer on
    "qwen2-window": _config(
        "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": _config("qwen3", rope_theta=1000000.0, head_dim=16),
    "qwen3-tied": _config("qwen3", rope_theta=1000000.0, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": _config(
        "qwen3_moe",
        rope_theta=1000000.0,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "mistral": _config("mistral", rope_theta=10000.0, sliding_window=9),
    # two layers with windows, one without
    "gemma3": _config(
        "gemma3_text",
        num_hidden_layers=3,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=9,
        sliding_window_pattern=3,
        hidden_activation="gelu_pytorch_tanh",
        final_logit_softcapping=8.0,
        tie_word_embeddings=True,
    ),
    # a layer with a window, one without
    "gpt_oss": _config(
        "gpt_oss",
        attention_bias=True,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_theta=150000.0,
        rope_scaling=_YARN,
        max_position_embeddings=256,
        sliding_window=9,
    ),
    "qwen3_5": _config("qwen3_5_text", **_DELTA_NETS),
    "qwen3_5_moe": _config(
        "qwen3_5_moe_text",
        **_DELTA_NETS,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
    ),
}


def tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors by name: logits of standard deviation above 1, biases and norms that
    matter."""
    random = np.random.RandomState(seed)  # its stream is frozen, unlike default_rng's
    d, f = config["hidden_size"], config["intermediate_size"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    a = config.get("head_dim") or d // heads
    family = config["model_type"]
    attention_bias = bool(config.get("attention_bias"))
    biased = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), family == "qwen2" or attention_bias),
        "o_proj": attention_bias,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), bool(config.get("mlp_bias"))),
    }
    out: dict[str, np.ndarray] = {}
    is_gemma = family == "gemma3_text"
    has_delta_nets = family.startswith("qwen3_5")
    adds_1 = is_gemma or has_delta_nets  # to the weights of norms
    norm = {"mean": 0.0 if adds_1 else 1.0, "stddev": 0.2}
    head_norm = {"mean": 0.3 if adds_1 else 1.3, "stddev": 0.3}

    def normal(name: str, *shape: int, mean: float = 0.0, stddev: float) -> None:
        out[name] = (mean + stddev * random.standard_normal(shape)).astype(np.float32)

    def product(place: str, name: str, rows: int, columns: int) -> None:
        normal(f"{place}{name}.weight", rows, columns, stddev=1.2 * columns**-0.5)
        if biased.get(name):
            normal(f"{place}{name}.bias", rows, stddev=0.5)

    def delta_net(place: str) -> None:
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        values = value_heads * config["linear_value_head_dim"]
        channels = 2 * key_heads * config["linear_key_head_dim"] + values
        product(place, "in_proj_qkv", channels, d)
        product(place, "in_proj_z", values, d)
        product(place, "in_proj_b", value_heads, d)
        product(place, "in_proj_a", value_heads, d)
        normal(f"{place}conv1d.weight", channels, 1, config["linear_conv_kernel_dim"], stddev=0.6)
        # A state decays to a half in 2 to 40 tokens.
        normal(f"{place}A_log", value_heads, mean=-2.5, stddev=1.0)
        normal(f"{place}dt_bias", value_heads, stddev=0.5)
        normal(f"{place}norm.weight", config["linear_value_head_dim"], mean=1.0, stddev=0.2)
        product(place, "out_proj", d, values)

    normal("model.embed_tokens.weight", config["vocab_size"], d, stddev=2 * d**-0.5)
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        normal(f"{place}input_layernorm.weight", d, **norm)
        has_attention = not has_delta_nets or (layer + 1) % config["full_attention_interval"] == 0
        if has_attention:
            # With delta nets each head has a gate beside its query.
            product(f"{place}self_attn.", "q_proj", heads * a * (1 + has_delta_nets), d)
            product(f"{place}self_attn.", "k_proj", keys * a, d)
            product(f"{place}self_attn.", "v_proj", keys * a, d)
            product(f"{place}self_attn.", "o_proj", d, heads * a)
        else:
            delta_net(f"{place}linear_attn.")
        has_head_norms = family in ("qwen3", "qwen3_moe", "gemma3_text") or has_delta_nets
        if has_attention and has_head_norms:
            normal(f"{place}self_attn.q_norm.weight", a, **head_norm)
            normal(f"{place}self_attn.k_norm.weight", a, **head_norm)
        normal(f"{place}post_attention_layernorm.weight", d, **norm)
        if is_gemma:
            normal(f"{place}pre_feedforward_layernorm.weight", d, **norm)
            normal(f"{place}post_feedforward_layernorm.weight", d, **norm)
        parts = [("mlp.", f)]
        if family == "gpt_oss":  # matrices are [in, out], all experts in one tensor
            experts = config["num_local_experts"]
            of_experts = f"{place}mlp.experts."
            normal(f"{place}self_attn.sinks", heads, stddev=1.0)
            normal(f"{place}mlp.router.weight", experts, d, stddev=2 * d**-0.5)
            normal(f"{place}mlp.router.bias", experts, stddev=0.5)
            normal(f"{of_experts}gate_up_proj", experts, d, 2 * f, stddev=1.2 * d**-0.5)
            normal(f"{of_experts}gate_up_proj_bias", experts, 2 * f, stddev=0.5)
            normal(f"{of_experts}down_proj", experts, f, d, stddev=1.2 * f**-0.5)
            normal(f"{of_experts}down_proj_bias", experts, d, stddev=0.5)
            parts = []
        if family == "qwen3_moe":
            normal(f"{place}mlp.gate.weight", config["num_experts"], d, stddev=2 * d**-0.5)
            width = config["moe_intermediate_size"]
            parts = [(f"mlp.experts.{e}.", width) for e in range(config["num_experts"])]
        if family == "qwen3_5_moe_text":  # as published: all experts in one tensor
            experts, width = config["num_experts"], config["moe_intermediate_size"]
            normal(f"{place}mlp.gate.weight", experts, d, stddev=2 * d**-0.5)
            normal(f"{place}mlp.shared_expert_gate.weight", 1, d, stddev=2 * d**-0.5)
            of_experts = f"{place}mlp.experts."
            normal(f"{of_experts}gate_up_proj", experts, 2 * width, d, stddev=1.2 * d**-0.5)
            normal(f"{of_experts}down_proj", experts, d, width, stddev=1.2 * width**-0.5)
            parts = [("mlp.shared_expert.", config["shared_expert_intermediate_size"])]
        for part, width in parts:
            product(f"{place}{part}", "gate_proj", width, d)
            product(f"{place}{part}", "up_proj", width, d)
            product(f"{place}{part}", "down_proj", d, width)
    normal("model.norm.weight", d, **norm)
    if not config.get("tie_word_embeddings"):
        normal("lm_head.weight", config["vocab_size"], d, stddev=2 * d**-0.5)
    return out


def write_model(
    folder: str | Path,
    family: str = "qwen3",
    seed: int = 0,
    dtype: Any = np.float32,
    **changes: Any,
) -> Path:
    """A model folder: config.json and model.safetensors; `changes` are keys of config.json. Returns
    the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**FAMILIES[family], **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_tensors(
        folder / "model.safetensors", {n: t.astype(dtype) for n, t in tensors(config, seed).items()}
    )
    return folder


def save_tensors(file: Path, named: Mapping[str, np.ndarray]) -> None:
    save_file(dict(named), file, metadata={"format": "pt"})


CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SPECIAL = {
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    "plain": ("<s>", "</s>"),
    "bare": (),
}
_NAMED = {
    "chatml": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "plain": {"bos_token": "<s>", "eos_token": "</s>"},
    "bare": {},
}
_MERGES = [
    ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("1", "0"),
    ("Ġ", "a"), ("Ċ", "Ċ"), ("u", "s"), ("e", "r"), ("us", "er"),
]  # fmt: skip


def write_tokenizer(
    folder: str | Path, style: str = "chatml", template: str | None = None
) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of about 270 tokens: every text goes through and comes back.

    `style`: chatml (Qwen: no bos), llama3 (bos first), plain (bos first, and no template unless one
    is given), bare (no special token).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [
        first + second for first, second in _MERGES
    ]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: id for id, piece in enumerate(pieces)}, _MERGES)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL[style]))
    named = _NAMED[style]
    if "bos_token" in named:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    template = CHATML if template is None and style == "chatml" else template
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if template:
        config["chat_template"] = template
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    eos = [backend.token_to_id(named["eos_token"])] if named else []
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return backend


def write_model_with_tokenizer(
    folder: str | Path, family: str = "qwen3", style: str = "chatml", seed: int = 0, **changes: Any
) -> Path:
    """A whole model folder: weights with a vocabulary that fits the tokenizer, both written
    here."""
    size = write_tokenizer(folder, style).get_vocab_size()
    return write_model(folder, family, seed, vocab_size=size, **changes)
