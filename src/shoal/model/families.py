"""Reads and writes config.json, which describes the architecture of a model folder."""

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
    """What a `model_type` of config.json implies besides the entries of the file.

    Entries that the family's class in transformers does not read are ignored here too; `config_of`
    writes those that it reads.
    """

    transformers_class: str
    # entries for biases that the class reads: attention_bias, mlp_bias
    biases: tuple[str, ...] = ()
    qkv_bias: bool = False  # True: always, whatever attention_bias says
    qk_norm: bool = False
    head_dim: int = 0  # without the entry head_dim; 0: hidden_size / heads
    windows: bool = True  # the class reads use_sliding_window
    # like COMPUTED, for this family only
    computed: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def has(self, a: Architecture) -> bool:
        """True if a model of this family may have the biases and norms of an architecture. An
        attention bias that the family can switch is on q, k, v and the output together; norms on q
        and k must be there if, and only if, the family has them."""
        possible = [(self.qkv_bias, False)]
        if "attention_bias" in self.biases:
            possible.append((True, True))
        has_attention_biases = (a.qkv_bias, a.output_bias) in possible
        has_mlp_bias = not a.mlp_bias or "mlp_bias" in self.biases
        return has_attention_biases and has_mlp_bias and a.qk_norm == self.qk_norm


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", ("attention_bias", "mlp_bias"), windows=False),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", ("attention_bias",), qk_norm=True, head_dim=128),
}
"""`model_type` in config.json -> its family."""

MOST_LAYERS, MOST_HEADS, MOST_OF_A_SIZE = 10_000, 100_000, 2**31 - 1
"""Largest values that a config.json may have: a list of 10^9 layers would be made before the first
of their weights is missed."""
MOST_OF_A_NUMBER = 1e18
"""Larger numbers are infinity, or such that no position can be multiplied by them."""

COMPUTED: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "rope_type": ("default", "linear", "llama3"),
}
"""Entry of config.json -> the values that `forward` computes; absent, null or empty is accepted,
too. Any other is an error, which is better than wrong logits."""


class _Entries:
    """The entries of a folder's config.json, checked when they are read."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.config = config

    def is_set(self, key: str) -> bool:
        """True if an entry is present and not empty, 0 or false."""
        return bool(self.config.get(key))

    def check_type(self, key: str, expected: type, words: str) -> None:
        """Raises ShoalError if an entry is present and not empty, 0 or false, but not of this type;
        `words` name the type in the message."""
        value = self.config.get(key)
        if value and not isinstance(value, expected):
            raise ShoalError(
                f"{self.folder}/config.json: {key} is {value!r:.60}; expected {words}."
            )

    def check_value(self, key: str, supported: Sequence[Any]) -> None:
        """Raises ShoalError if an entry is present and not empty, 0 or false, but none of these
        values."""
        value = self.config.get(key)
        if value and value not in supported:
            raise ShoalError(
                f"{self.folder}/config.json: {key} is {value!r:.60}, which is not supported; "
                f"expected {' or '.join(map(str, supported)) or 'none'}."
            )

    def number(self, key: str, least: float = 0.0, whole: bool = False) -> Any:
        """Returns an entry that is a number of at least `least`, with `whole` a whole one;
        ShoalError if it is anything else, or missing. Numbers from MOST_OF_A_NUMBER on and bools
        are refused too."""
        value: Any = self.config.get(key)
        accepted = int if whole else (int, float)
        is_number = isinstance(value, accepted) and not isinstance(value, bool)
        if not is_number or not least <= value < MOST_OF_A_NUMBER:
            text = "missing" if value is None else repr(value)
            raise ShoalError(
                f"{self.folder}/config.json: {key} is {text}; expected a "
                f"{'whole ' * whole}number of {least:g} or more."
            )
        return value

    def size(self, key: str, most: int = MOST_OF_A_SIZE) -> int:
        """Returns an entry that is a whole number from 1 to `most`; ShoalError if it is anything
        else, or missing."""
        value = self.number(key, least=1, whole=True)
        if value > most:
            raise ShoalError(
                f"{self.folder}/config.json: {key} is {value}; expected {most:,} at most."
            )
        return value


def architecture_of(folder: str | Path) -> Architecture:
    """Reads config.json, as transformers 4 or 5 writes it, and returns the architecture. ShoalError
    if there is no such file, if an entry that must be there is missing, if an entry has a wrong
    type or size, or if the model is not supported. An entry that may be missing gets the default of
    transformers. `max_positions` is 0 if the file does not say it."""
    folder = Path(folder)
    config = read_config(folder)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ShoalError(
            f"{folder}: model_type is {config.get('model_type')!r}; supported are "
            f"{', '.join(FAMILIES)}."
        )
    entries = _Entries(folder, config)
    entries.check_type("rope_scaling", dict, "a mapping")
    entries.check_type("rope_parameters", dict, "a mapping")
    entries.check_type("quantization_config", dict, "a mapping")
    entries.check_type("layer_types", list, "a list")
    # rope_scaling is written by transformers 4, rope_parameters by 5, which may write one for each
    # kind of layer. Its entries are read as if they stood in the file itself; older files say type
    # for rope_type.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    # the older name first: an entry rope_type overwrites it below
    config["rope_type"] = rope.get("type")
    for key, value in rope.items():
        if value is not None:
            config[key] = value
    computed = dict(COMPUTED) | dict(family.computed)
    for entry, values in computed.items():
        entries.check_value(entry, values)
    layers = entries.size("num_hidden_layers", MOST_LAYERS)
    heads = entries.size("num_attention_heads", MOST_HEADS)
    _refuse_windows(config, layers, folder)
    # Called for its error alone: weights quantised in an unknown way.
    weight_block(folder)
    key_heads = heads
    if entries.is_set("num_key_value_heads"):
        key_heads = entries.size("num_key_value_heads", MOST_HEADS)
    if heads % key_heads:
        raise ShoalError(
            f"{folder}: num_attention_heads={heads} is no multiple of "
            f"num_key_value_heads={key_heads}."
        )
    scaling = _rope_scaling(entries)
    attention_bias = "attention_bias" in family.biases and entries.is_set("attention_bias")
    mlp_bias = "mlp_bias" in family.biases and entries.is_set("mlp_bias")
    head_dim = family.head_dim
    if entries.is_set("head_dim"):
        head_dim = entries.size("head_dim", MOST_HEADS)
    rope_theta = entries.number("rope_theta") if entries.is_set("rope_theta") else 10000.0
    norm_eps = entries.number("rms_norm_eps") if "rms_norm_eps" in config else 1e-6
    return Architecture(
        vocab_size=entries.size("vocab_size"),
        hidden_size=entries.size("hidden_size"),
        intermediate_size=entries.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=head_dim or entries.size("hidden_size") // heads,
        rope_theta=float(rope_theta),
        rope_scaling=scaling,
        norm_eps=float(norm_eps),
        tie_embeddings=entries.is_set("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        max_positions=_max_positions(config, scaling),
    )


def _rope_scaling(entries: _Entries) -> RopeScaling | None:
    """Returns the scaling of rotary frequencies; None if there is none, which is so for every kind
    but `linear` and `llama3`; unknown kinds were refused before. ShoalError if a number that it
    needs is missing. Reads the entries as `architecture_of` has merged them."""
    kind = entries.config["rope_type"]
    if kind == "linear":
        return RopeScaling("linear", float(entries.number("factor")))
    if kind != "llama3":
        return None
    original = "max_position_embeddings"
    if entries.is_set("original_max_position_embeddings"):
        original = "original_max_position_embeddings"
    original_max_position = entries.number(original, least=1)
    return RopeScaling(
        "llama3",
        float(entries.number("factor")),
        float(entries.number("low_freq_factor")),
        float(entries.number("high_freq_factor")),
        int(original_max_position),
    )


def _max_positions(config: Mapping[str, Any], scaling: RopeScaling | None) -> int:
    """Returns the tokens of the longest sequence; 0 if the file does not say. Linear scaling
    stretches max_position_embeddings; with Llama 3's rule that entry already is the stretched
    number."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or isinstance(positions, bool) or positions < 1:
        return 0
    if scaling and scaling.kind == "linear":
        return int(positions * scaling.factor)
    return positions


def weight_block(folder: Path) -> tuple[int, int] | None:
    """Returns (rows, columns) of a block of 8-bit floats with one scale, if a folder's weights are
    stored like that, as DeepSeek's and Qwen3's are; None if they are not quantised. ShoalError if
    they are quantised in another way, or if the folder has no config.json."""
    quantisation = read_config(folder).get("quantization_config") or {}
    method = quantisation.get("quant_method")
    is_known = (
        method == "fp8"
        and quantisation.get("fmt", "e4m3") == "e4m3"
        and quantisation.get("activation_scheme", "dynamic") == "dynamic"
    )
    match quantisation.get("weight_block_size"):
        case [int(rows), int(columns)] if is_known and min(rows, columns) > 0:
            return rows, columns
    if not quantisation:
        return None
    entries = []
    for name in ("fmt", "activation_scheme", "weight_block_size"):
        if name in quantisation:
            entries.append(f"{name} {quantisation[name]}")
    in_brackets = f" ({', '.join(entries)})" if entries else ""
    raise ShoalError(
        f"{folder}/config.json: the weights are quantised by quant_method "
        f"{method}{in_brackets}; expected fp8 (e4m3) with a weight_block_size, "
        "or none: give the model's folder with weights in bfloat16; model.quantise=int8 makes "
        "frozen ones small"
    )


def _refuse_windows(config: Mapping[str, Any], layers: int, folder: Path) -> None:
    """Raises ShoalError if any layer has a sliding window, or anything else but full attention.
    `layers` is the number of layers. Newer files name each layer's kind in `layer_types`; older
    ones have the switch `use_sliding_window`, and windows from layer max_window_layers on."""
    layer_types = config.get("layer_types")
    if not layer_types and config.get("use_sliding_window") and config.get("sliding_window"):
        first_with_window = config.get("max_window_layers", 28)  # 28 is the default of transformers
        # These files name no kind of layer: the message names the switch instead.
        layer_types = ["use_sliding_window"] if first_with_window < layers else []
    refused = sorted(set(layer_types or ()) - {"full_attention"})
    if refused:
        raise ShoalError(
            f"{folder}/config.json: {', '.join(refused)}, which is not supported; expected full "
            "attention in all layers."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a model folder's config.json; ShoalError if there is none."""
    file = folder / "config.json"
    if not file.is_file():
        raise ShoalError(
            f"{folder} holds no config.json: expected a model folder in Hugging Face format."
        )
    return read_json(file)


def config_of(a: Architecture) -> dict[str, Any]:
    """Returns a config.json for an architecture; ShoalError if no family of transformers has it.
    `max_position_embeddings` is 32,768 if it is not known; the ids of special tokens are None."""
    name, family = _family_of(a)
    positions = a.max_positions or 32768
    if a.rope_scaling and a.rope_scaling.kind == "linear":  # the file has the number before scaling
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
        # Explicitly None: without these entries Llama's class uses ids 1 and 2, which may be any
        # tokens here.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if "attention_bias" in family.biases:
        config["attention_bias"] = a.qkv_bias
    if "mlp_bias" in family.biases:
        config["mlp_bias"] = a.mlp_bias
    if family.windows:
        config["use_sliding_window"] = False
    scaling = a.rope_scaling
    if scaling:
        config["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            config["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
    return config


def _family_of(a: Architecture) -> tuple[str, Family]:
    """Returns (model_type, family) of the first family, in the order of FAMILIES, that may have
    this architecture; ShoalError if there is none."""
    for name, family in FAMILIES.items():
        if family.has(a):
            return name, family
    raise ShoalError(f"No model of transformers has this mixture of biases and norms: {a}.")


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
    return saved


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


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def describes(folder: Path, a: Architecture) -> bool:
    """True if the config.json in a folder describes this architecture; False also if there is none.
    A model that is not supported counts as another architecture. `max_positions` is not
    compared."""
    try:
        return architecture_of(folder) == a
    except ShoalError:  # no config.json, or a model that is not supported
        return False
