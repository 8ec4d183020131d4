"""Families of models: what the config.json of each `model_type` says of the architecture, and how
it says that when it is written.

    config.json -> its entries (`config_json`) -> entries that all families have (`_common`)
                -> what the family adds (`Family.read`) -> `Architecture`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shoal.model.activations import SWIGLU_ALPHA, SWIGLU_LIMIT
from shoal.model.architecture import (
    Architecture,
    DeltaNet,
    Experts,
    Layer,
    RopeScaling,
    Rotary,
)
from shoal.model.config_json import (
    MOST_HEADS,
    MOST_LAYERS,
    Entries,
    read_config,
)
from shoal.model.config_quantisation import FileQuantisation, quantisation_in
from shoal.model.config_rope import rope_entries, rotary_of
from shoal.records import ShoalError

# Layers


def repeating(kinds: Sequence[Layer]) -> tuple[Layer, ...]:
    """Returns the shortest pattern of layers that gives these kinds, one a layer, when it is
    repeated: `Architecture.pattern`. The last repetition may be a part."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[number % length] for number, kind in enumerate(kinds)):
            return tuple(kinds[:length])
    return tuple(kinds)


def check_layer_types(entries: Entries, num_layers: int, known: Sequence[str]) -> None:
    """Raises ShoalError if the entry `layer_types`, the type of each layer, names another type than
    the `known` ones, or not as many as there are layers. It may be absent."""
    entries.check_type("layer_types", list, "a list")
    types = entries.get("layer_types") or []
    unknown = sorted({str(kind) for kind in types} - set(known))
    if unknown:
        raise ShoalError(
            f"{entries.title('layer_types')} has {', '.join(unknown)}, which is not supported; "
            f"expected {' or '.join(known)}."
        )
    if types and len(types) != num_layers:
        raise ShoalError(
            f"{entries.title('layer_types')} has {len(types)} layers; expected "
            f"num_hidden_layers={num_layers}."
        )


def layer_types(
    entries: Entries,
    num_layers: int,
    is_full: Callable[[int], bool],
    other: str = "sliding_attention",
) -> list[str]:
    """Returns the type of each layer: the entry `layer_types`; if it is absent, `full_attention`
    where `is_full` is true of the layer's number, from 0 on, and `other` elsewhere."""
    if entries.is_set("layer_types"):
        return entries.get("layer_types")
    return ["full_attention" if is_full(number) else other for number in range(num_layers)]


def window_layers(types: Sequence[str], window: Layer, full: Layer) -> tuple[Layer, ...]:
    """Returns the pattern of layers by their types: `window` is the kind of those with
    `sliding_attention`, `full` that of the others."""
    return repeating([window if kind == "sliding_attention" else full for kind in types])


def window_types(a: Architecture) -> list[str]:
    """Returns the entry `layer_types` of layers with windows and without, as `window_layers` reads
    it."""
    return [
        "sliding_attention" if layer.window else "full_attention" for layer in a.layers_in_order
    ]


def largest_window(a: Architecture) -> int | None:
    """Returns the entry `sliding_window`: the window of the layers that have one; None if none
    has."""
    return max(layer.window for layer in a.kinds) or None


# Families


@dataclass(frozen=True)
class Family:
    """How the config.json of a `model_type` describes a model: what it adds to the entries that all
    families have (`_common`), and how they differ.

    Entries that the family's class in transformers does not read are ignored here too.
    """

    transformers_class: str
    # (entries, architecture of the common ones) -> architecture of all: adds what the family has
    read: Callable[[Entries, Architecture], Architecture]
    # The way back: architecture -> entries that are added to the common ones, or take their place.
    write: Callable[[Architecture], dict[str, Any]]
    # Entry -> its value where it is absent or null, as the class in transformers has it. Common
    # entries without one must be there.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Common entry -> what the family's files call it.
    names: Mapping[str, str] = field(default_factory=dict)
    # Entry -> the values that are computed, in place of those in COMPUTED or in addition to them;
    # None: any, because `read` decides.
    computed: Mapping[str, Sequence[Any] | None] = field(default_factory=dict)
    # Values of `layer_types` that are computed.
    layer_types: Sequence[str] = ("full_attention",)
    # How files hold the experts' products: a tensor for each; the same from all experts in one
    # (`fused`); or that with matrices [in, out], whose columns of gate and up alternate
    # (`interleaved`). Files of the first two are read alike, and written like those that a model
    # came from.
    expert_files: Literal["by_expert", "fused", "interleaved"] = "by_expert"
    # True if files may have experts in 4 bits, each matrix [out, in / 32] blocks.
    reads_mxfp4: bool = False
    # `model_type` of files for several kinds of input that have the entries of this family in
    # `text_config`; "": none.
    multimodal: str = ""


def _attention_bias(entries: Entries, common: Architecture) -> Architecture:
    """Reads `attention_bias`: biases on q, k, v and the output together."""
    has_bias = entries.is_set("attention_bias")
    return replace(common, qkv_bias=has_bias, output_bias=has_bias)


def _llama(entries: Entries, common: Architecture) -> Architecture:
    """Adds what Llama has: biases that can be switched on."""
    a = _attention_bias(entries, common)
    return replace(a, mlp_bias=entries.is_set("mlp_bias"))


def _llama_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json that `_llama` reads."""
    return {"attention_bias": a.qkv_bias, "mlp_bias": a.mlp_bias}


LLAMA = Family("LlamaForCausalLM", _llama, _llama_entries)


def _mistral(entries: Entries, common: Architecture) -> Architecture:
    """Adds what Mistral has: a window on all layers, or on none if the entry is null."""
    window = entries.size("sliding_window") if entries.is_set("sliding_window") else 0
    return replace(common, pattern=(Layer(window=window),))


def _mistral_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json that `_mistral` reads."""
    return {"sliding_window": largest_window(a)}


MISTRAL = Family(
    "MistralForCausalLM",
    _mistral,
    _mistral_entries,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)


_WINDOWS = ("full_attention", "sliding_attention")
_QWEN_WINDOWS: Mapping[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}


def _qwen_windows(entries: Entries, common: Architecture) -> Architecture:
    """Reads the windows that Qwen2 and Qwen3 may have: on layers that `layer_types` names, in older
    files on those from number max_window_layers on."""
    has_window = entries.is_set("use_sliding_window") and entries.is_set("sliding_window")
    window = entries.size("sliding_window") if has_window else 0

    def is_full(number: int) -> bool:
        return not window or number < entries.number("max_window_layers", whole=True)

    types = layer_types(entries, common.num_layers, is_full)
    if "sliding_attention" in types and not window:
        raise ShoalError(
            f"{entries.title('layer_types')} has sliding_attention; expected use_sliding_window "
            "and sliding_window, too."
        )
    return replace(common, pattern=window_layers(types, Layer(window=window), Layer()))


def _qwen_window_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json for windows, as Qwen2 and later ones have them."""
    window = largest_window(a)
    if not window:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": window_types(a),
    }


def _qwen2(entries: Entries, common: Architecture) -> Architecture:
    """Adds what Qwen2 has: biases on q, k and v, always."""
    return replace(_qwen_windows(entries, common), qkv_bias=True)


QWEN2 = Family(
    "Qwen2ForCausalLM",
    _qwen2,
    _qwen_window_entries,
    defaults=_QWEN_WINDOWS,
    layer_types=_WINDOWS,
)


def _qwen3(entries: Entries, common: Architecture) -> Architecture:
    """Adds what Qwen3 has: norms on q and k, and biases that can be switched on."""
    a = _attention_bias(entries, _qwen_windows(entries, common))
    return replace(a, qk_norm=True)


def _qwen3_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json that `_qwen3` reads."""
    return {"attention_bias": a.qkv_bias, **_qwen_window_entries(a)}


QWEN3 = Family(
    "Qwen3ForCausalLM",
    _qwen3,
    _qwen3_entries,
    defaults={"head_dim": 128, **_QWEN_WINDOWS},
    layer_types=_WINDOWS,
)


def _qwen3_5(entries: Entries, common: Architecture) -> Architecture:
    """Adds what Qwen3.5 has: delta nets, and attention with an output gate in every fourth layer;
    norms that multiply by 1 + weight."""
    if entries.get("attn_output_gate") is False:
        raise ShoalError(
            f"{entries.title('attn_output_gate')} is false, which is not supported; expected true."
        )

    def is_full(number: int) -> bool:
        return (number + 1) % entries.size("full_attention_interval") == 0

    types = layer_types(entries, common.num_layers, is_full, other="linear_attention")
    kinds = [Layer() if kind == "full_attention" else _DELTA_NET for kind in types]
    return replace(
        _attention_bias(entries, common),
        pattern=repeating(kinds),
        delta_net=DeltaNet(
            num_key_heads=entries.size("linear_num_key_heads", MOST_HEADS),
            num_value_heads=entries.size("linear_num_value_heads", MOST_HEADS),
            key_dim=entries.size("linear_key_head_dim", MOST_HEADS),
            value_dim=entries.size("linear_value_head_dim", MOST_HEADS),
            conv_size=entries.size("linear_conv_kernel_dim", MOST_HEADS),
        ),
        qk_norm=True,
        norm="one_plus_weight",
        output_gate=True,
    )


_QWEN3_5_LAYERS = ("linear_attention", "full_attention")
_DELTA_NET = Layer(mixer="delta_net")


def _qwen3_5_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json that `_qwen3_5` reads."""
    sizes = a.delta_net_sizes
    types = []
    for layer in a.layers_in_order:
        types.append("full_attention" if layer.mixer == "attention" else "linear_attention")
    return {
        "attention_bias": a.qkv_bias,
        "layer_types": types,
        "linear_num_key_heads": sizes.num_key_heads,
        "linear_num_value_heads": sizes.num_value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": sizes.conv_size,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": a.rope_theta,
            "partial_rotary_factor": a.rotary_share,
        },
    }


QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    _qwen3_5,
    _qwen3_5_entries,
    defaults={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    computed={"partial_rotary_factor": None},
    layer_types=_QWEN3_5_LAYERS,
    multimodal="qwen3_5",
)


def _gemma3(entries: Entries, common: Architecture) -> Architecture:
    """Adds what Gemma 3 has: norms before and after, which multiply by 1 + weight, norms on q and
    k, a scaled embedding, and windows on most layers, with rotary positions of their own."""

    def is_full(number: int) -> bool:
        return (number + 1) % entries.size("sliding_window_pattern") == 0

    types = layer_types(entries, common.num_layers, is_full)
    window = Layer(window=entries.size("sliding_window"), rotary=_gemma3_window_rotary(entries))
    query_scale = float(entries.number("query_pre_attn_scalar", least=1e-9)) ** -0.5
    return replace(
        _attention_bias(entries, common),
        pattern=window_layers(types, window, Layer()),
        qk_norm=True,
        norm="one_plus_weight",
        post_norms=True,
        query_scale=0.0 if query_scale == common.head_dim**-0.5 else query_scale,
        logit_cap=_logit_cap(entries),
        embedding_scale=common.hidden_size**0.5,
        # The number is the stretched one, also with linear scaling.
        max_positions=_max_positions(entries.config, None),
    )


def _logit_cap(entries: Entries) -> float:
    """Reads Gemma's bound of logits; 0 if there is none."""
    if not entries.is_set("final_logit_softcapping"):
        return 0.0
    return float(entries.number("final_logit_softcapping"))


def _gemma3_window_rotary(entries: Entries) -> Rotary:
    """Reads the rotary positions of Gemma 3's layers with windows. Older files have only their base
    and scale nothing there."""
    of_layers = (entries.get("rope_parameters") or {}).get("sliding_attention") or {}
    plain = Entries(entries.folder, {"rope_theta": entries.get("rope_local_base_freq", 10000.0)})
    return rotary_of(plain.with_changes(of_layers))


def _gemma3_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json that `_gemma3` reads."""
    of_windows = [a.rotary_of(layer) for layer in a.kinds if layer.window]
    # Without the last digits of the two roots; as a whole number, if it is one.
    scalar = round(a.query_scale**-2, 9) if a.query_scale else float(a.head_dim)
    return {
        "attention_bias": a.qkv_bias,
        "layer_types": window_types(a),
        "sliding_window": largest_window(a) or 4096,
        "rope_local_base_freq": of_windows[0].theta if of_windows else 10000.0,
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "final_logit_softcapping": a.logit_cap or None,
        "max_position_embeddings": a.max_positions or 32768,
    }


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    _gemma3,
    _gemma3_entries,
    # published files of the larger models have few entries
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    names={"hidden_act": "hidden_activation"},
    computed={
        "hidden_act": None,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (),
        "use_bidirectional_attention": (),
    },
    layer_types=_WINDOWS,
    multimodal="gemma3",
)


def experts_of(
    entries: Entries,
    normalise: bool,
    width: str = "moe_intermediate_size",
    chosen: str = "num_experts_per_tok",
) -> Experts | None:
    """Reads the sizes of experts; None if there are none. transformers 5 calls the number of
    experts `num_local_experts` in some families' files, others `num_experts`. `width` is the entry
    with the inner size of an expert, `chosen` the one with the number that a token has."""
    name = "num_local_experts" if entries.is_set("num_local_experts") else "num_experts"
    if not entries.is_set(name):
        return None
    num_experts = entries.size(name)
    per_token = entries.size(chosen)
    if per_token > num_experts:
        raise ShoalError(
            f"{entries.title(chosen)} is {per_token}; expected {name}={num_experts} at most."
        )
    return Experts(num_experts, per_token, entries.size(width), normalise)


def expert_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries that `experts_of` reads."""
    if a.experts is None:
        return {"num_experts": 0}
    return {
        "num_experts": a.experts.num_experts,
        "num_experts_per_tok": a.experts.experts_per_token,
        "moe_intermediate_size": a.experts.intermediate_size,
    }


def _qwen3_moe(entries: Entries, common: Architecture) -> Architecture:
    """Adds what Qwen3 with experts has in addition to Qwen3: layers with experts in place of an
    MLP, all of them unless the file says which not, and a window on all layers or on none."""
    a = replace(_attention_bias(entries, common), qk_norm=True)
    window = entries.size("sliding_window") if entries.is_set("use_sliding_window") else 0
    step = entries.size("decoder_sparse_step")
    entries.check_type("mlp_only_layers", list, "a list")
    without_experts = entries.get("mlp_only_layers") or []
    experts = experts_of(entries, normalise=entries.is_set("norm_topk_prob"))
    kinds = []
    for number in range(a.num_layers):
        has_experts = experts and number not in without_experts and (number + 1) % step == 0
        kinds.append(Layer(window=window, feed_forward="experts" if has_experts else "mlp"))
    return replace(a, pattern=repeating(kinds), experts=experts)


def _qwen3_moe_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json that `_qwen3_moe` reads."""
    without_experts = []
    for number, layer in enumerate(a.layers_in_order):
        if layer.feed_forward == "mlp":
            without_experts.append(number)
    window = largest_window(a)
    return {
        "attention_bias": a.qkv_bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "decoder_sparse_step": 1,
        "mlp_only_layers": without_experts,
        "norm_topk_prob": a.experts is not None and a.experts.normalise,
        **expert_entries(a),
    }


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    _qwen3_moe,
    _qwen3_moe_entries,
    defaults={
        "decoder_sparse_step": 1,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "sliding_window": 4096,
    },
)


def _qwen3_5_moe(entries: Entries, common: Architecture) -> Architecture:
    """Adds what Qwen3.5 with experts has in addition to Qwen3.5: experts in all layers, one of
    which every token has."""
    a = _qwen3_5(entries, common)
    experts = experts_of(entries, normalise=True)
    if experts is None:
        raise ShoalError(f"{entries.title('num_experts')} is 0; expected 1 or more.")
    shared_size = entries.size("shared_expert_intermediate_size")
    kinds = [replace(layer, feed_forward="experts") for layer in a.pattern]
    return replace(a, pattern=tuple(kinds), experts=replace(experts, shared_size=shared_size))


def _qwen3_5_moe_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json that `_qwen3_5_moe` reads."""
    return {
        **_qwen3_5_entries(a),
        **expert_entries(a),
        "shared_expert_intermediate_size": a.expert_sizes.shared_size,
    }


QWEN3_5_MOE = replace(
    QWEN3_5,
    transformers_class="Qwen3_5MoeForCausalLM",
    read=_qwen3_5_moe,
    write=_qwen3_5_moe_entries,
    defaults={
        **QWEN3_5.defaults,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "shared_expert_intermediate_size": 512,
    },
    # No layer has a plain MLP.
    names={"intermediate_size": "moe_intermediate_size"},
    multimodal="qwen3_5_moe",
)


def _gpt_oss(entries: Entries, common: Architecture) -> Architecture:
    """Adds what gpt-oss has: experts in all layers, with biases; sinks; and a window on every other
    layer, the first one included."""
    experts = experts_of(entries, normalise=True, width="intermediate_size")
    if experts is None:
        raise ShoalError(f"{entries.title('num_local_experts')} is missing; expected 1 or more.")

    types = layer_types(entries, common.num_layers, lambda number: number % 2 == 1)
    full = Layer(feed_forward="experts")
    window = replace(full, window=entries.size("sliding_window"))
    return replace(
        _attention_bias(entries, common),
        pattern=window_layers(types, window, full),
        experts=replace(experts, router_bias=True, bias=True),
        activation="clamped_swiglu",
        norm="weight_float32",
        sinks=True,
    )


def _gpt_oss_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json that `_gpt_oss` reads."""
    sizes = a.expert_sizes
    entries = {
        "attention_bias": a.qkv_bias,
        "hidden_act": "silu",  # not read by transformers' class
        "intermediate_size": sizes.intermediate_size,
        "layer_types": window_types(a),
        "num_experts_per_tok": sizes.experts_per_token,
        "num_local_experts": sizes.num_experts,
        "sliding_window": largest_window(a) or 128,
    }
    if a.rope_scaling is None:  # without an entry it is YaRN's
        entries["rope_parameters"] = {"rope_type": "default", "rope_theta": a.rope_theta}
    return entries


GPT_OSS = Family(
    "GptOssForCausalLM",
    _gpt_oss,
    _gpt_oss_entries,
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000.0,
        "sliding_window": 128,
    },
    computed={"swiglu_alpha": (SWIGLU_ALPHA,), "swiglu_limit": (SWIGLU_LIMIT,)},
    layer_types=_WINDOWS,
    expert_files="interleaved",
    reads_mxfp4=True,
)


def _mixtral(entries: Entries, common: Architecture) -> Architecture:
    """Adds what Mixtral has: experts in all layers, and Mistral's window."""
    a = _mistral(entries, common)
    experts = experts_of(entries, normalise=True, width="intermediate_size")
    if experts is None:
        raise ShoalError(f"{entries.title('num_local_experts')} is 0; expected 1 or more.")
    kinds = [replace(layer, feed_forward="experts") for layer in a.pattern]
    return replace(a, pattern=tuple(kinds), experts=experts)


def _mixtral_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json that `_mixtral` reads."""
    sizes = a.expert_sizes
    return {
        **_mistral_entries(a),
        "intermediate_size": sizes.intermediate_size,
        "num_experts_per_tok": sizes.experts_per_token,
        "num_local_experts": sizes.num_experts,
    }


MIXTRAL = Family(
    "MixtralForCausalLM",
    _mixtral,
    _mixtral_entries,
    defaults={
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    # As one tensor, transformers reads them under the names that the parameters have.
    expert_files="fused",
)


def _gemma4(entries: Entries, common: Architecture) -> Architecture:
    """Adds what Gemma 4 has: Gemma 3's norms, with weights as they are, and norms on values; layers
    without a window that have heads and rotary positions of their own; last layers that read the
    keys of earlier ones; embeddings of layers; experts next to the MLP of each layer."""

    types = layer_types(entries, common.num_layers, lambda number: (number + 1) % 6 == 0)
    types = [*types[:-1], "full_attention"]  # the last layer, whatever the entry says
    num_shared = entries.number("num_kv_shared_layers", whole=True)
    first_shared = common.num_layers - num_shared
    shared_size = 0
    if entries.is_set("use_double_wide_mlp"):
        shared_size = 2 * common.intermediate_size
    layers = []
    for number, kind in enumerate(types):
        layer = _gemma4_layer(entries, common, number, kind)
        if number >= first_shared:
            own = types[: max(0, first_shared)]
            if kind not in own:
                raise ShoalError(
                    f"{entries.title('num_kv_shared_layers')} is {num_shared}, but no layer before "
                    f"these has {kind}, whose keys they would read."
                )
            last = len(own) - 1 - own[::-1].index(kind)
            layer = replace(
                layer, keys_of=last, values_are_keys=False, intermediate_size=shared_size
            )
        layers.append(layer)
    layer_embedding_size = 0
    if entries.is_set("hidden_size_per_layer_input"):
        layer_embedding_size = entries.size("hidden_size_per_layer_input")
        entries.check_value("vocab_size_per_layer_input", (common.vocab_size,))
    experts = None
    if entries.is_set("enable_moe_block"):
        experts = experts_of(entries, normalise=True, chosen="top_k_experts")
        if experts is None:
            raise ShoalError(f"{entries.title('num_experts')} is missing; expected 1 or more.")
        layers = [replace(layer, feed_forward="mlp+experts") for layer in layers]
    return replace(
        _attention_bias(entries, common),
        pattern=repeating(layers),
        experts=experts,
        rotary_share=1.0,  # each kind of layer has its own
        qk_norm=True,
        v_norm=True,
        norm="weight_float32",
        post_norms=True,
        query_scale=1.0,
        logit_cap=_logit_cap(entries),
        embedding_scale=common.hidden_size**0.5,
        layer_scale=True,
        layer_embedding_size=layer_embedding_size,
        max_positions=_max_positions(entries.config, None),
    )


def _gemma4_layer(entries: Entries, common: Architecture, number: int, kind: str) -> Layer:
    """Reads what Gemma 4's layer with this number and type has, if its keys are its own. Files that
    transformers has saved name the sizes of each layer that has others than the model; published
    files have those of all layers without a window."""
    rotary = rotary_of(rope_entries(entries, kind))
    if kind == "sliding_attention":
        layer = Layer(window=entries.size("sliding_window"), rotary=rotary)
    else:
        layer = Layer(rotary=rotary, values_are_keys=entries.is_set("attention_k_eq_v"))
    sizes: Mapping[str, Any] = {}
    if entries.get("per_layer_config") is not None:
        entries.check_type("per_layer_config", dict, "a mapping")
        sizes = entries.get("per_layer_config").get(str(number), {})
    elif kind == "full_attention":
        sizes = {"head_dim": entries.get("global_head_dim")}
        if layer.values_are_keys:
            sizes["num_key_value_heads"] = entries.get("num_global_key_value_heads")
    own = Entries(entries.folder, sizes, entries.inside)
    for size in sizes:
        if size not in ("head_dim", "num_key_value_heads"):
            raise ShoalError(
                f"{entries.title('per_layer_config')} has {size} for layer {number}, which is not "
                "supported; expected head_dim and num_key_value_heads."
            )
    head_dim = own.size("head_dim", MOST_HEADS) if own.is_set("head_dim") else common.head_dim
    key_heads = common.num_kv_heads
    if own.is_set("num_key_value_heads"):
        key_heads = own.size("num_key_value_heads", MOST_HEADS)
    if common.num_heads % key_heads:
        raise ShoalError(
            f"{entries.folder}: num_attention_heads={common.num_heads} is not a multiple of the "
            f"{key_heads} key/value heads of layer {number}."
        )
    return replace(
        layer,
        # 0: as the model has
        head_dim=0 if head_dim == common.head_dim else head_dim,
        num_kv_heads=0 if key_heads == common.num_kv_heads else key_heads,
    )


def _gemma4_entries(a: Architecture) -> dict[str, Any]:
    """Returns the entries of config.json that `_gemma4` reads."""
    shared = [layer for layer in a.layers_in_order if layer.keys_of is not None]
    full = [layer for layer in a.kinds if not layer.window]
    rope = {}
    for kind, layer in zip(window_types(a), a.layers_in_order, strict=True):
        rotary = a.rotary_of(layer)
        rope[kind] = {"rope_type": "default", "rope_theta": rotary.theta}
        if rotary.over_whole_head:
            rope[kind] |= {"rope_type": "proportional", "partial_rotary_factor": rotary.share}
    entries = {
        "attention_bias": a.qkv_bias,
        "attention_k_eq_v": any(layer.values_are_keys for layer in full),
        "enable_moe_block": a.experts is not None,
        "final_logit_softcapping": a.logit_cap or None,
        "global_head_dim": a.head_dim_of(full[-1]) if full else None,
        "hidden_size_per_layer_input": a.layer_embedding_size,
        "layer_types": window_types(a),
        "max_position_embeddings": a.max_positions or 32768,
        "num_global_key_value_heads": a.kv_heads_of(full[-1]) if full else None,
        "num_kv_shared_layers": len(shared),
        "rope_parameters": rope,
        "sliding_window": largest_window(a) or 512,
        "use_double_wide_mlp": any(layer.intermediate_size for layer in shared),
        "vocab_size_per_layer_input": a.vocab_size,
    }
    if a.experts is not None:
        entries |= {
            "moe_intermediate_size": a.experts.intermediate_size,
            "num_experts": a.experts.num_experts,
            "top_k_experts": a.experts.experts_per_token,
        }
    return entries


GEMMA4 = Family(
    "Gemma4ForCausalLM",
    _gemma4,
    _gemma4_entries,
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131072,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": 262144,
    },
    names={"hidden_act": "hidden_activation"},
    computed={
        "hidden_act": None,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "partial_rotary_factor": None,
        # only of images
        "use_bidirectional_attention": ("vision",),
    },
    layer_types=_WINDOWS,
    expert_files="fused",
    multimodal="gemma4",
)


FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "mistral": MISTRAL,
    "gemma3_text": GEMMA3,
    "gpt_oss": GPT_OSS,
    "mixtral": MIXTRAL,
    "gemma4_text": GEMMA4,
}
"""`model_type` in config.json -> its family."""

MULTIMODAL: Mapping[str, str] = {
    family.multimodal: name for name, family in FAMILIES.items() if family.multimodal
}
"""`model_type` of a file with a `text_config` -> the `model_type` in that, which is in FAMILIES."""

COMPUTED: Mapping[str, Sequence[Any] | None] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
}
"""Entry of config.json -> the values that `forward` computes; absent, null or false is accepted,
too. Any other is an error, which is better than wrong logits."""

ACTIVATIONS: Mapping[str, Any] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""`hidden_act` in config.json -> `Architecture.activation`."""

NULLS = ("sliding_window", "num_key_value_heads")
"""Entries of which null says something: no layer has a window; as many key heads as query heads.
Any other entry that is null is as if it were absent. transformers refuses most of these."""

COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""Entries that all families have -> values where they are absent, unless a family has others."""


# Files


def architecture_of(folder: str | Path) -> Architecture:
    """Reads config.json, as transformers 4 or 5 writes it, and returns the architecture. ShoalError
    if there is no such file, if an entry that must be there is missing, if an entry has a wrong
    type or size, or if the model is not supported. An entry that may be missing gets the default of
    transformers. `max_positions` is 0 if the file does not say it."""
    return architecture_in(read_config(Path(folder)), str(folder))


def architecture_in(config: Mapping[str, Any], where: str) -> Architecture:
    """Returns the architecture that the content of a config.json describes; `where` says in
    messages whose it is. ShoalError like `architecture_of`."""
    folder = Path(where)
    Entries(folder, config).check_type("quantization_config", dict, "a mapping")
    a = _architecture(folder, config)
    # Called for its error alone: weights quantised in an unknown way.
    quantisation_in(config, folder, _reads_mxfp4(config))
    return a


def _architecture(folder: Path, config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that the content of a folder's config.json describes."""
    name, entries = _model_entries(folder, config)
    family = FAMILIES[name]
    described = {**COMMON_DEFAULTS, **family.defaults}
    for entry, value in entries.config.items():
        if value is not None or entry in NULLS:
            described[entry] = value
    for common, own in family.names.items():
        described[common] = described.get(own)
    entries = Entries(folder, described, entries.inside)
    rope = rope_entries(entries)
    for entry, values in {**COMPUTED, **family.computed}.items():
        if values is not None:
            rope.check_value(entry, values)
    num_layers = entries.size("num_hidden_layers", MOST_LAYERS)
    check_layer_types(entries, num_layers, family.layer_types)
    return replace(family.read(entries, _common(entries, rope)), model_type=name)


def _model_entries(folder: Path, config: Mapping[str, Any]) -> tuple[str, Entries]:
    """Returns (name of the family, entries that describe its model): those of the file itself, or
    of its `text_config` if it is for several kinds of input. ShoalError if the `model_type` is not
    supported."""
    name = str(config.get("model_type"))
    entries = Entries(folder, config)
    if name in MULTIMODAL:
        entries.check_type("text_config", dict, "a mapping")
        text = dict(entries.get("text_config") or {})
        # The head belongs to the whole model, whose entry counts.
        if config.get("tie_word_embeddings") is not None:
            text["tie_word_embeddings"] = config["tie_word_embeddings"]
        text.setdefault("model_type", MULTIMODAL[name])
        entries = Entries(folder, text, "text_config")
        name = str(text["model_type"])
    if name not in FAMILIES:
        inside = f"{entries.inside}." if entries.inside else ""
        raise ShoalError(
            f"{folder}: {inside}model_type is {entries.get('model_type')!r}; supported "
            f"are {', '.join([*FAMILIES, *MULTIMODAL])}."
        )
    return name, entries


def _common(entries: Entries, rope: Entries) -> Architecture:
    """Returns the architecture that the entries which all families have describe. `entries` with
    the family's defaults, under the common names; `rope`: their `rope_entries`."""
    heads = entries.size("num_attention_heads", MOST_HEADS)
    key_heads = heads
    if entries.is_set("num_key_value_heads"):
        key_heads = entries.size("num_key_value_heads", MOST_HEADS)
    if heads % key_heads:
        raise ShoalError(
            f"{entries.folder}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={key_heads}."
        )
    hidden_size = entries.size("hidden_size")
    head_dim = hidden_size // heads
    if entries.is_set("head_dim"):
        head_dim = entries.size("head_dim", MOST_HEADS)
    rotary = rotary_of(rope)
    return Architecture(
        vocab_size=entries.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=entries.size("intermediate_size"),
        num_layers=entries.size("num_hidden_layers", MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=head_dim,
        rope_theta=rotary.theta,
        rope_scaling=rotary.scaling,
        rotary_share=rotary.share,
        norm_eps=float(entries.number("rms_norm_eps")),
        tie_embeddings=entries.is_set("tie_word_embeddings"),
        activation=ACTIVATIONS[entries.get("hidden_act")],
        max_positions=_max_positions(entries.config, rotary.scaling),
    )


def _max_positions(config: Mapping[str, Any], scaling: RopeScaling | None) -> int:
    """Returns the tokens of the longest sequence; 0 if the file does not say. Linear scaling
    stretches max_position_embeddings; with Llama 3's rule that entry already is the stretched
    number; with YaRN it may be either."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or isinstance(positions, bool) or positions < 1:
        return 0
    if scaling and scaling.kind == "linear":
        return int(positions * scaling.factor)
    if scaling and scaling.kind == "yarn":
        return max(positions, int(scaling.original_max_position * scaling.factor))
    return positions


def quantisation_of(folder: Path) -> FileQuantisation | None:
    """Returns how a folder's weights are quantised; None if they are not. ShoalError if they are
    quantised in another way than those of `FileQuantisation`, or if the folder has no
    config.json."""
    config = read_config(folder)
    return quantisation_in(config, folder, _reads_mxfp4(config))


def _reads_mxfp4(config: Mapping[str, Any]) -> bool:
    """True if a config.json is of a family whose files may have experts in 4 bits."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.reads_mxfp4


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """True if a config.json is of a model for several kinds of input, whose text model is read."""
    return config.get("model_type") in MULTIMODAL


def describes(folder: Path, a: Architecture) -> bool:
    """True if the config.json in a folder describes this architecture; False also if there is none.
    A model that is not supported counts as another architecture. `max_positions` is not
    compared."""
    try:
        return architecture_of(folder) == a
    except ShoalError:  # no config.json, or a model that is not supported
        return False
