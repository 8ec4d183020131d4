"""config.json: the architecture of a model folder, read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.files import read_json
from shoal.model.architecture import Architecture, RopeScaling
from shoal.records import ShoalError


@dataclass(frozen=True)
class Family:
    """What a `model_type` of config.json implies beside the entries of the file.

    Entries that its class in transformers does not read are ignored here too; `config_of` writes
    those that it reads.
    """

    transformers_class: str
    biases: tuple[str, ...] = ()  # entries for biases that it reads, of attention_bias and mlp_bias
    qkv_bias: bool = False  # always, whatever attention_bias says
    qk_norm: bool = False
    head_dim: int = 0  # without the entry; 0: hidden_size / heads
    windows: bool = True  # it reads use_sliding_window
    computed: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # beside COMPUTED

    def has(self, a: Architecture) -> bool:
        """True if a model of the family may have these switches."""
        biases = [(self.qkv_bias, False)] + [(True, True)] * ("attention_bias" in self.biases)
        return (
            (a.qkv_bias, a.output_bias) in biases
            and a.qk_norm == self.qk_norm
            and (not a.mlp_bias or "mlp_bias" in self.biases)
        )


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", ("attention_bias", "mlp_bias"), windows=False),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", ("attention_bias",), qk_norm=True, head_dim=128),
}
"""`model_type` of config.json -> the family."""

MOST_LAYERS, MOST_HEADS, MOST_OF_A_SIZE = 10_000, 100_000, 2**31 - 1
"""What a config.json may say: a list of 10^9 layers would be made before any of their weights is
missed."""
MOST_OF_A_NUMBER = 1e18
"""Above are infinity and what no position can be multiplied by."""

COMPUTED: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "rope_type": ("default", "linear", "llama3"),
}
"""Entry of config.json -> the values that `forward` computes; absent, null or empty is right, too.
Any other is an error, which is better than wrong logits."""


def architecture_of(folder: str | Path) -> Architecture:
    """Reads config.json, as transformers 4 or 5 writes it. ShoalError for a model that is not
    supported."""
    folder = Path(folder)
    config = read_config(folder)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ShoalError(
            f"{folder}: model_type is {config.get('model_type')!r}; supported are "
            f"{', '.join(FAMILIES)}."
        )
    for key, kind in (
        ("rope_scaling", dict),
        ("rope_parameters", dict),
        ("quantization_config", dict),
        ("layer_types", list),
    ):
        if not isinstance(config.get(key) or kind(), kind):
            raise ShoalError(
                f"{folder}/config.json: {key} is {config[key]!r:.60}; expected "
                f"{'a mapping' if kind is dict else 'a list'}."
            )
    rope = (
        config.get("rope_scaling") or config.get("rope_parameters") or {}
    )  # of transformers 4; of 5
    rope = rope.get("full_attention", rope)  # transformers 5 may write one a kind of layer
    config |= {
        "rope_type": rope.get("type"),
        **{key: value for key, value in rope.items() if value is not None},
    }

    def number(key: str, least: float = 0.0, whole: bool = False) -> Any:
        value: Any = config.get(key)
        is_number = isinstance(value, int if whole else (int, float)) and not isinstance(
            value, bool
        )
        if not is_number or not least <= value < MOST_OF_A_NUMBER:
            raise ShoalError(
                f"{folder}/config.json: {key} is {'missing' if value is None else repr(value)}; "
                f"expected a {'whole ' * whole}number of {least:g} or more."
            )
        return value

    def size(key: str, most: int = MOST_OF_A_SIZE) -> int:
        value = number(key, least=1, whole=True)
        if value > most:
            raise ShoalError(f"{folder}/config.json: {key} is {value}; expected {most:,} at most.")
        return value

    for entry, values in {**COMPUTED, **family.computed}.items():
        if (value := config.get(entry)) and value not in values:
            raise ShoalError(
                f"{folder}/config.json: {entry} is {value!r:.60}, which is not supported; expected "
                f"{' or '.join(map(str, values)) or 'none'}."
            )
    layers, heads = size("num_hidden_layers", MOST_LAYERS), size("num_attention_heads", MOST_HEADS)
    _refuse_windows(config, layers, folder)
    weight_block(folder)
    key_heads = (
        size("num_key_value_heads", MOST_HEADS) if config.get("num_key_value_heads") else heads
    )
    if heads % key_heads:
        raise ShoalError(
            f"{folder}: num_attention_heads={heads} is no multiple of "
            f"num_key_value_heads={key_heads}."
        )
    scaling = None
    if config["rope_type"] == "linear":
        scaling = RopeScaling("linear", float(number("factor")))
    elif config["rope_type"] == "llama3":
        is_given = bool(config.get("original_max_position_embeddings"))
        original = number(
            "original_max_position_embeddings" if is_given else "max_position_embeddings", least=1
        )
        scaling = RopeScaling(
            "llama3",
            float(number("factor")),
            float(number("low_freq_factor")),
            float(number("high_freq_factor")),
            int(original),
        )
    attention_bias, mlp_bias = (
        entry in family.biases and bool(config.get(entry, False))
        for entry in ("attention_bias", "mlp_bias")
    )
    head_dim = size("head_dim", MOST_HEADS) if config.get("head_dim") else family.head_dim
    rope_theta = number("rope_theta") if config.get("rope_theta") else 10000.0
    norm_eps = number("rms_norm_eps") if "rms_norm_eps" in config else 1e-6
    return Architecture(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=head_dim or size("hidden_size") // heads,
        rope_theta=float(rope_theta),
        rope_scaling=scaling,
        norm_eps=float(norm_eps),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        max_positions=_max_positions(config, scaling),
    )


def _max_positions(config: Mapping[str, Any], scaling: RopeScaling | None) -> int:
    """Tokens of the longest sequence; 0 where the file does not say. Linear scaling stretches the
    positions of max_position_embeddings; with Llama 3's rule they are those after it."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or isinstance(positions, bool) or positions < 1:
        return 0
    return int(positions * scaling.factor) if scaling and scaling.kind == "linear" else positions


def weight_block(folder: Path) -> tuple[int, int] | None:
    """Rows and columns of a block of 8-bit floats with one scale, where a folder's weights are
    stored so, as DeepSeek's and Qwen3's are; None where they are not quantised. ShoalError where
    they are in another way."""
    found = read_config(folder).get("quantization_config") or {}
    method, block = found.get("quant_method"), found.get("weight_block_size")
    is_known = (
        method == "fp8"
        and found.get("fmt", "e4m3") == "e4m3"
        and found.get("activation_scheme", "dynamic") == "dynamic"
    )
    match block:
        case [int(rows), int(columns)] if is_known and min(rows, columns) > 0:
            return rows, columns
    if not found:
        return None
    entries = ", ".join(
        f"{name} {found[name]}"
        for name in ("fmt", "activation_scheme", "weight_block_size")
        if name in found
    )
    raise ShoalError(
        f"{folder}/config.json: the weights are quantised by quant_method "
        f"{method}{f' ({entries})' * bool(entries)}; expected fp8 (e4m3) with a weight_block_size, "
        "or none: give the model's folder with weights in bfloat16; model.quantise=int8 makes "
        "frozen ones small"
    )


def _refuse_windows(config: Mapping[str, Any], layers: int, folder: Path) -> None:
    """ShoalError where a layer attends to a window. Newer files name each layer's kind; older ones
    have switches, and windows from layer max_window_layers on."""
    kinds = config.get("layer_types")
    if not kinds and config.get("use_sliding_window") and config.get("sliding_window"):
        first = config.get("max_window_layers", 28)
        kinds = ["use_sliding_window"] if first < layers else []
    if others := sorted({*(kinds or ())} - {"full_attention"}):
        raise ShoalError(
            f"{folder}/config.json: {', '.join(others)}, which is not supported; expected full "
            "attention in all layers."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder; ShoalError where there is none."""
    file = folder / "config.json"
    if not file.is_file():
        raise ShoalError(
            f"{folder} holds no config.json: expected a model folder in Hugging Face format."
        )
    return read_json(file)


def config_of(a: Architecture) -> dict[str, Any]:
    """A config.json for an architecture; ShoalError if no family of transformers has it."""
    name, family = next(
        ((name, family) for name, family in FAMILIES.items() if family.has(a)), ("", None)
    )
    if family is None:
        raise ShoalError(f"No model of transformers has this mixture of biases and norms: {a}.")
    positions = a.max_positions or 32768
    if a.rope_scaling and a.rope_scaling.kind == "linear":  # of which the file has those before it
        positions = round(positions / a.rope_scaling.factor)
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
        "max_position_embeddings": positions,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope_theta,
        "tie_word_embeddings": a.tie_embeddings,
        # Named as none: without them Llama's class takes ids 1 and 2, which may be any tokens here.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config |= {
        entry: value
        for entry, value in (("attention_bias", a.qkv_bias), ("mlp_bias", a.mlp_bias))
        if entry in family.biases
    }
    if family.windows:
        config["use_sliding_window"] = False
    if scaling := a.rope_scaling:
        config["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            config["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
    return config


def config_to_save(
    a: Architecture, source: Path | None, config: dict[str, Any] | None, dtype: np.dtype
) -> dict[str, Any]:
    """The config.json to write with parameters of `dtype`: the given one, else the source's, else
    one made from the architecture."""
    if config is None and source is not None and (source / "config.json").is_file():
        if architecture_of(source) != a:
            raise ShoalError(
                f"{source}/config.json describes another architecture than these parameters have."
            )
        config = read_config(source)
    config = {**(config or make_config(a, source))}
    config.pop("quantization_config", None)  # of the source's files: what is written is widened
    return {**config, "dtype" if "dtype" in config else "torch_dtype": dtype.name}


def make_config(
    a: Architecture, tokenizer: Path | None, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A config for an architecture (or the given one), with the special token ids of a tokenizer's
    folder."""
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
