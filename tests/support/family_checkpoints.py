"""Random checkpoints of transformers' own classes, one for each form in which a family is
published.

`CHECKPOINTS` has a config.json and a class for each; `write_checkpoint` makes a folder as it is
on the hub: config.json with the entries that published files have, tensors under the names, in the
layout and the types of published files. `load_theirs` is transformers' model of such a folder.

To have a family tested, name its checkpoints in SUPPORTED: `tests/model/test_families.py` does the
rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models

Tensors = dict[str, Any]  # torch tensors by name


@dataclass(frozen=True)
class Checkpoint:
    """A random model, and what its published files are like."""

    transformers_class: str
    config: Mapping[str, Any]
    # from the tensors that transformers saves to those of published files
    published: Callable[[Tensors], Tensors] = dict
    # names of tensors that are float32 in files whose others are bfloat16
    float32: str = "nothing"
    # most keys that a query of some layer reads; 0: all
    window: int = 0
    # what the weights of norms on queries are multiplied by, so that scores are about 1
    query_norm: float = 1.0
    # parts of names of tensors that a text does not reach
    unused: tuple[str, ...] = ()


# ---- how published files differ from saved ones


def with_fused_experts(tensors: Tensors) -> Tensors:
    """All experts' gate and up products of a layer become `gate_up_proj` [E, 2F, D], all down
    products `down_proj` [E, D, F]."""
    import torch

    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    fused = {}
    split: dict[tuple[str, str], list[Any]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: _natural(item[0])):
        match = pattern.fullmatch(name)
        if match is None:
            fused[name] = tensor
        else:
            split.setdefault((match[1], match[3]), []).append(tensor)
    for place, kind in split:
        if kind == "down":
            fused[f"{place}.down_proj"] = torch.stack(split[place, "down"])
        elif kind == "gate":
            gate, up = torch.stack(split[place, "gate"]), torch.stack(split[place, "up"])
            fused[f"{place}.gate_up_proj"] = torch.cat((gate, up), dim=1)
    return fused


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def with_draft_head(tensors: Tensors) -> Tensors:
    """Adds tensors of a draft head, which transformers passes over."""
    import torch

    size = next(t for n, t in tensors.items() if n.endswith("embed_tokens.weight")).shape[1]
    generator = torch.Generator().manual_seed(5)
    added = {}
    for name, shape in {
        "mtp.fc.weight": (size, 2 * size),
        "mtp.layers.0.input_layernorm.weight": (size,),
        "mtp.layers.0.mlp.down_proj.weight": (size, 24),
        "mtp.norm.weight": (size,),
        "mtp.pre_fc_norm_embedding.weight": (size,),
    }.items():
        added[name] = torch.randn(shape, generator=generator)
    return {**tensors, **added}


def with_fused_experts_and_draft_head(tensors: Tensors) -> Tensors:
    return with_draft_head(with_fused_experts(tensors))


def with_unread_keys(tensors: Tensors) -> Tensors:
    """Adds products for keys and values to layers that read those of another one: published files
    have them, nothing reads them."""
    import torch

    generator = torch.Generator().manual_seed(6)
    added = {}
    for name, query in tensors.items():
        place, is_query, _ = name.partition("q_proj.weight")
        if is_query and f"{place}k_proj.weight" not in tensors:
            width = tensors[f"{place}q_norm.weight"].shape[0]
            shape = (2 * width, query.shape[1])
            added[f"{place}k_proj.weight"] = torch.randn(shape, generator=generator)
            added[f"{place}v_proj.weight"] = torch.randn(shape, generator=generator)
            added[f"{place}k_norm.weight"] = torch.randn(width, generator=generator)
    return {**tensors, **added}


def with_packed_experts(tensors: Tensors) -> Tensors:
    """Experts' products become blocks of 32 four-bit numbers with a scale each (mxfp4), drawn at
    random: [E, rows, columns / 32, 16] bytes, where a row is an output."""
    import torch

    generator = torch.Generator().manual_seed(7)
    packed = {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32, 16)
        packed[f"{name}_blocks"] = torch.randint(
            0, 256, shape, generator=generator, dtype=torch.uint8
        )
        # 2^-4 to 2^-2: the products of 32 such numbers are about 1. Those that add to the stream
        # are an eighth of that, as in `_spread`.
        lowest = 120 if name.endswith("down_proj") else 123
        packed[f"{name}_scales"] = torch.randint(
            lowest, lowest + 3, shape[:-1], generator=generator, dtype=torch.uint8
        )
    return packed


# ---- the checkpoints

_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,  # torch gives its embedding no gradient
    "bos_token_id": None,
    "eos_token_id": None,
}


def _sizes(layers: int, **changes: Any) -> dict[str, Any]:
    return {**_SIZES, "num_hidden_layers": layers, **changes}


def _without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


_QWEN3_5 = _sizes(
    6,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    attention_bias=False,
    attn_output_gate=True,
    full_attention_interval=3,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    mamba_ssm_dtype="float32",
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    rope_parameters={
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
)
_QWEN3_5_MOE = {
    **_without(_QWEN3_5, "intermediate_size"),
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 40,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
_GEMMA3 = _sizes(
    7,
    hidden_activation="gelu_pytorch_tanh",
    rms_norm_eps=1e-6,
    query_pre_attn_scalar=24,
    sliding_window=9,
)
_GEMMA3_TEXT = {
    **_GEMMA3,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window_pattern": 3,
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
_GEMMA4 = _sizes(
    6,
    attention_bias=False,
    attention_k_eq_v=False,
    enable_moe_block=False,
    final_logit_softcapping=30.0,
    global_head_dim=32,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size_per_layer_input=0,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    num_experts=None,
    num_global_key_value_heads=None,
    num_kv_shared_layers=0,
    rms_norm_eps=1e-6,
    rope_parameters={
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    sliding_window=9,
    tie_word_embeddings=True,
    top_k_experts=None,
    use_bidirectional_attention=None,
    use_double_wide_mlp=False,
    vocab_size_per_layer_input=101,
)
_GEMMA4_SMALL = {
    **_GEMMA4,
    "hidden_size_per_layer_input": 12,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
_GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 16,
}
_GPT_OSS = _sizes(
    4,
    hidden_size=32,
    intermediate_size=32,
    attention_bias=True,
    experts_per_token=2,
    hidden_act="silu",
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_experts_per_tok=2,
    num_local_experts=6,
    rms_norm_eps=1e-5,
    rope_scaling={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    rope_theta=150000,
    sliding_window=9,
    swiglu_limit=7.0,
)
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_DELTA_NET_FLOAT32 = r".*\.linear_attn\.(A_log|norm\.weight)"
_TOWERS = ("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision.", "mtp.")


def _of(model_type: str, transformers_class: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"architectures": [transformers_class], "model_type": model_type, **config}


def _known(family: str) -> Checkpoint:
    config = tiny_models.FAMILIES[family]
    return Checkpoint(config["architectures"][0], config)


CHECKPOINTS: Mapping[str, Checkpoint] = {
    "llama3": _known("llama3"),
    "qwen2": _known("qwen2"),
    "qwen3-tied": _known("qwen3-tied"),
    # the published form of Qwen3.5: text in a model with a tower
    "qwen3_5": Checkpoint(
        "Qwen3_5ForConditionalGeneration",
        _of(
            "qwen3_5",
            "Qwen3_5ForConditionalGeneration",
            {
                "text_config": {
                    "model_type": "qwen3_5_text",
                    "tie_word_embeddings": True,
                    **_QWEN3_5,
                },
                "vision_config": {"model_type": "qwen3_5", **_QWEN_VISION},
                "tie_word_embeddings": True,
            },
        ),
        published=with_draft_head,
        float32=_DELTA_NET_FLOAT32,
        unused=_TOWERS,
    ),
    "qwen3_5_text": Checkpoint(
        "Qwen3_5ForCausalLM",
        _of(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            {**_QWEN3_5, "num_hidden_layers": 4, "full_attention_interval": 2},
        ),
        float32=_DELTA_NET_FLOAT32,
    ),
    "qwen3_moe": Checkpoint(
        "Qwen3MoeForCausalLM",
        _of(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _sizes(
                2,
                decoder_sparse_step=1,
                mlp_only_layers=[],
                moe_intermediate_size=24,
                norm_topk_prob=True,
                num_experts=6,
                num_experts_per_tok=2,
                rms_norm_eps=1e-6,
                rope_scaling=None,
                rope_theta=1000000.0,
                sliding_window=None,
                use_sliding_window=False,
                max_window_layers=2,
            ),
        ),
    ),
    # a layer without experts, and weights of experts that are not normalised
    "qwen3_moe-mixed": Checkpoint(
        "Qwen3MoeForCausalLM",
        _of(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _sizes(
                3,
                mlp_only_layers=[1],
                moe_intermediate_size=24,
                norm_topk_prob=False,
                num_experts=6,
                num_experts_per_tok=3,
                rope_theta=1000000.0,
                tie_word_embeddings=True,
            ),
        ),
    ),
    # the published form of Qwen3.5 with experts: fused experts, a tower, a draft head
    "qwen3_5_moe": Checkpoint(
        "Qwen3_5MoeForConditionalGeneration",
        _of(
            "qwen3_5_moe",
            "Qwen3_5MoeForConditionalGeneration",
            {
                "text_config": {"model_type": "qwen3_5_moe_text", **_QWEN3_5_MOE},
                "vision_config": {"model_type": "qwen3_5_moe", **_QWEN_VISION},
                "tie_word_embeddings": False,
            },
        ),
        published=with_fused_experts_and_draft_head,
        float32=_DELTA_NET_FLOAT32,
        unused=_TOWERS,
    ),
    "qwen3_5_moe_text": Checkpoint(
        "Qwen3_5MoeForCausalLM",
        _of("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _QWEN3_5_MOE),
        float32=_DELTA_NET_FLOAT32,
    ),
    "gemma3_text": Checkpoint(
        "Gemma3ForCausalLM",
        _of("gemma3_text", "Gemma3ForCausalLM", _GEMMA3_TEXT),
        window=9,
    ),
    # the published form of 4B and more: text in a model with a tower, linear scaling of rotary
    "gemma3": Checkpoint(
        "Gemma3ForConditionalGeneration",
        _of(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            {
                "text_config": {
                    "model_type": "gemma3_text",
                    **_GEMMA3,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                },
                "vision_config": _SIGLIP,
                "mm_tokens_per_image": 4,
            },
        ),
        window=9,
        unused=_TOWERS,
    ),
    "mistral": Checkpoint(
        "MistralForCausalLM",
        _of(
            "mistral",
            "MistralForCausalLM",
            _sizes(2, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=9),
        ),
        window=9,
    ),
    "mixtral": Checkpoint(
        "MixtralForCausalLM",
        _of(
            "mixtral",
            "MixtralForCausalLM",
            _sizes(
                2,
                num_local_experts=6,
                num_experts_per_tok=2,
                rms_norm_eps=1e-5,
                rope_theta=1000000.0,
                sliding_window=None,
            ),
        ),
    ),
    "gpt_oss": Checkpoint(
        "GptOssForCausalLM", _of("gpt_oss", "GptOssForCausalLM", _GPT_OSS), window=9
    ),
    "gpt_oss-mxfp4": Checkpoint(
        "GptOssForCausalLM",
        _of("gpt_oss", "GptOssForCausalLM", {**_GPT_OSS, "quantization_config": _MXFP4}),
        published=with_packed_experts,
        window=9,
    ),
    # E2B and E4B: per-layer inputs, layers that read another layer's keys, with a wider MLP
    "gemma4-small": Checkpoint(
        query_norm=0.2,
        transformers_class="Gemma4ForConditionalGeneration",
        config=_of(
            "gemma4",
            "Gemma4ForConditionalGeneration",
            {
                "text_config": {"model_type": "gemma4_text", **_GEMMA4_SMALL},
                "vision_config": {"model_type": "gemma4_vision", **_GEMMA4_VISION},
                "audio_config": None,
                "tie_word_embeddings": True,
            },
        ),
        published=with_unread_keys,
        window=9,
        unused=_TOWERS,
    ),
    "gemma4_text-small": Checkpoint(
        query_norm=0.3,
        transformers_class="Gemma4ForCausalLM",
        config=_of("gemma4_text", "Gemma4ForCausalLM", _GEMMA4_SMALL),
        window=9,
    ),
    # 31B: full layers whose values are their keys
    "gemma4_text": Checkpoint(
        query_norm=0.3,
        transformers_class="Gemma4ForCausalLM",
        config=_of(
            "gemma4_text",
            "Gemma4ForCausalLM",
            {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        ),
        window=9,
    ),
    # 26B-A4B: experts beside the MLP
    "gemma4_text-moe": Checkpoint(
        query_norm=0.3,
        transformers_class="Gemma4ForCausalLM",
        config=_of(
            "gemma4_text",
            "Gemma4ForCausalLM",
            {
                **_GEMMA4,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 2,
                "moe_intermediate_size": 24,
            },
        ),
        window=9,
    ),
}

SUPPORTED = (
    "llama3",
    "qwen2",
    "qwen3-tied",
    "qwen3_moe",
    "qwen3_moe-mixed",
    "qwen3_5_text",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "mistral",
    "mixtral",
    "gemma3_text",
    "gemma3",
    "gpt_oss",
    "gpt_oss-mxfp4",
    "gemma4_text",
    "gemma4_text-small",
    "gemma4-small",
    "gemma4_text-moe",
)
"""The checkpoints that Shoal reads."""


# ---- written and read


def write_checkpoint(folder: Path, name: str, dtype: str = "float32", seed: int = 11) -> Path:
    """Makes a folder of one of CHECKPOINTS as it would be on the hub, with floats of `dtype`, and
    returns it."""
    import torch
    from safetensors.torch import load_file, save_file

    checkpoint = CHECKPOINTS[name]
    folder.mkdir(parents=True)
    config = {**checkpoint.config, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _random_model(folder, checkpoint, seed).save_pretrained(folder / "saved")
    saved: Tensors = {}
    for file in (folder / "saved").glob("*.safetensors"):
        saved |= load_file(file)
    tensors = {}
    for tensor_name, tensor in checkpoint.published(saved).items():
        if tensor.is_floating_point() and not re.fullmatch(checkpoint.float32, tensor_name):
            tensor = tensor.to(getattr(torch, dtype))
        tensors[tensor_name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random_model(folder: Path, checkpoint: Checkpoint, seed: int) -> Any:
    """Returns transformers' model of a folder's config.json. Logits have a standard deviation of
    1 and more; norms, biases, sinks and scales are away from the values they begin with."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)  # random numbers are drawn wide
    torch.manual_seed(seed)  # gpt-oss draws its sinks, which keep a part of what they begin with
    model = getattr(transformers, checkpoint.transformers_class)(config).eval()
    text = config.get_text_config()
    values = getattr(text, "linear_num_value_heads", 0) * getattr(text, "linear_value_head_dim", 0)
    generator = torch.Generator().manual_seed(seed)
    saved = [*model.named_parameters()]
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            saved.append((name, buffer))
    with torch.no_grad():
        for name, tensor in saved:
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim > 1:
                tensor.copy_(noise * _spread(name, tensor.shape))
            elif name.endswith("model.norm.weight"):
                # of both signs: else a model with a tied head says each token once more
                centre = 1.0 if tensor.any() else 0.0
                tensor.copy_(noise + centre - 1.0)
            elif name.endswith("A_log"):
                tensor.copy_(noise - 1.0)
            else:
                # where it begins, and noise
                tensor.add_(noise * (1.0 if name.endswith("sinks") else 0.3))
            if name.endswith("q_norm.weight"):
                tensor.mul_(checkpoint.query_norm)
            if name.endswith("in_proj_qkv.weight"):
                # The norm of the mixer's output divides by a number that may be near 0: values as
                # small as its epsilon allows keep float32's rounding from being multiplied.
                tensor[-values:] *= 0.03
    return model


def _spread(name: str, shape: tuple[int, ...]) -> float:
    """Returns the standard deviation of a random matrix."""
    factor = 1.2
    if name.endswith(("embed_tokens.weight", "lm_head.weight", "router.weight", "mlp.gate.weight")):
        factor = 2.0
    elif re.search(r"(o_proj|out_proj|down_proj)(\.weight)?$", name):
        factor = 0.3  # layers change the stream by a part of it, or rounding grows with each
    elif name.endswith("per_layer_input_gate.weight"):
        factor = 0.3  # it reads the stream without a norm
    return factor * shape[-1] ** -0.5


def load_theirs(folder: Path, name: str, dtype: str = "float32", **changes: Any) -> Any:
    """Returns transformers' model of a folder, which computes in `dtype`; four-bit experts are
    widened. `changes` are entries of the text model's configuration."""
    import torch
    import transformers
    from transformers.utils.quantization_config import Mxfp4Config

    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in changes.items():
        setattr(config.get_text_config(), key, value)
    options = {}
    if "quantization_config" in CHECKPOINTS[name].config:
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    model = getattr(transformers, CHECKPOINTS[name].transformers_class).from_pretrained(
        folder,
        config=config,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
        **options,
    )
    return model.eval()
