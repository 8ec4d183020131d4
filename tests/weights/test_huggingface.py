"""Folders in Hugging Face format: what is read, what is refused, what is written."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from small import shoal_logits
from tiny_models import FAMILIES, save_tensors, tensors, write_model, write_tokenizer

from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import LoraSection, ModelSection
from shoal.mesh import make_roles
from shoal.model import families
from shoal.model.architecture import Architecture, Experts, Layer, RopeScaling, Rotary
from shoal.model.config_writer import config_of
from shoal.model.families import architecture_of
from shoal.model.parameters import initialise, param_specs
from shoal.records import ShoalError
from shoal.weights import hub as model_hub
from shoal.weights import huggingface
from shoal.weights import layout as weight_layout
from shoal.weights.hub import locate
from shoal.weights.source import planned_architecture, resolve_model

ROLE = make_roles(MeshSection(), jax.devices()[:1]).trainer
FP8 = jnp.float8_e4m3fn
DOWN = "model.layers.1.mlp.down_proj.weight"


def load(folder: Path, dtype=np.float32):
    return huggingface.load(folder, architecture_of(folder), ROLE, dtype)


def same(a, b) -> bool:
    equal = jax.tree.map(
        lambda x, y: x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b
    )
    return all(jax.tree.leaves(equal))


def rewrite(folder: Path, change) -> Path:
    """Changes the dict of tensors in a folder's one file."""
    named = load_file(folder / "model.safetensors")
    change(named)
    save_tensors(folder / "model.safetensors", named)
    return folder


# config.json


def config_folder(
    folder: Path, family: str = "qwen3", drop: tuple[str, ...] = (), **changes
) -> Path:
    config = {}
    for key, value in {**FAMILIES[family], **changes}.items():
        if key not in drop:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_architecture_of_each_family(tmp_path):
    def read(family: str, **changes) -> Architecture:
        return architecture_of(config_folder(tmp_path, family, **changes))

    llama = read("llama2")
    assert (llama.vocab_size, llama.hidden_size, llama.intermediate_size, llama.num_layers) == (
        64,
        32,
        48,
        2,
    )
    assert (llama.num_heads, llama.num_kv_heads, llama.head_dim, llama.rope_theta) == (
        4,
        2,
        8,
        10000.0,
    )
    assert not (
        llama.qkv_bias
        or llama.output_bias
        or llama.mlp_bias
        or llama.qk_norm
        or llama.tie_embeddings
    )
    assert read("llama3").rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    linear = read("llama-linear")
    assert linear.rope_scaling == RopeScaling("linear", 4.0)
    assert linear.qkv_bias and linear.output_bias and linear.mlp_bias
    qwen2 = read("qwen2-tied")
    assert qwen2.qkv_bias and not qwen2.output_bias and qwen2.tie_embeddings and not qwen2.qk_norm
    qwen3 = read("qwen3", attention_bias=True)
    assert qwen3.qk_norm and qwen3.qkv_bias and qwen3.output_bias and qwen3.head_dim == 16
    assert read("qwen3", drop=("head_dim",)).head_dim == 128  # transformers' default
    assert read("llama2", head_dim=None).head_dim == 8
    assert read("llama2", num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
            }
        },
    ],
)
def test_every_form_of_rope(tmp_path, rope):
    a = architecture_of(config_folder(tmp_path, "llama2", **rope))
    assert (a.rope_theta, a.rope_scaling) == (5e5, RopeScaling("linear", 2.0))


def test_rope_of_type_default_scales_nothing(tmp_path):
    folder = config_folder(
        tmp_path, "llama2", rope_parameters={"rope_theta": 7.0, "rope_type": "default"}
    )
    assert architecture_of(folder) == replace(
        architecture_of(folder), rope_theta=7.0, rope_scaling=None
    )


@pytest.mark.parametrize(
    ("entries", "expected", "positions"),
    [
        (
            {"factor": 4.0, "original_max_position_embeddings": 64},
            {"factor": 4.0, "attention_factor": 0.1 * math.log(4) + 1},
            256,
        ),
        # the factor is that of the positions, here 128 / 64
        (
            {"factor": None, "original_max_position_embeddings": 64, "beta_fast": 8},
            {"factor": 2.0, "attention_factor": 0.1 * math.log(2) + 1, "beta_fast": 8.0},
            128,
        ),
        (
            {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
            | {"mscale": 2.0, "mscale_all_dim": 1.0, "beta_slow": 2},
            {
                "factor": 4.0,
                "attention_factor": (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
                "beta_slow": 2.0,
                "truncate": False,
            },
            256,
        ),
        (
            {"factor": 0.5, "original_max_position_embeddings": 64},
            {"factor": 0.5, "attention_factor": 1.0},
            128,
        ),
        (
            {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
            {"factor": 4.0, "attention_factor": 1.5},
            256,
        ),
    ],
)
def test_entries_of_yarn_and_their_way_back(tmp_path, entries, expected, positions):
    rope = {"rope_type": "yarn", **entries}
    a = architecture_of(config_folder(tmp_path, rope_scaling=rope, max_position_embeddings=128))
    assert a.rope_scaling == RopeScaling("yarn", original_max_position=64, **expected)
    assert a.max_positions == positions
    (tmp_path / "config.json").write_text(json.dumps(config_of(a)))
    again = architecture_of(tmp_path)
    assert again == a and again.max_positions == positions


def test_gpt_oss_has_defaults_of_its_own(tmp_path):
    """Those of transformers' class: YaRN, and a window on every other layer from the first on."""
    left_out = ("attention_bias", "head_dim", "rope_theta", "rope_scaling", "sliding_window")
    a = architecture_of(
        config_folder(tmp_path, "gpt_oss", (*left_out, "rms_norm_eps"), num_hidden_layers=3)
    )
    layers = [(layer.window, layer.feed_forward) for layer in a.layers_in_order]
    assert layers == [(128, "experts"), (0, "experts"), (128, "experts")]
    assert (a.head_dim, a.rope_theta, a.norm_eps) == (64, 150000.0, 1e-5)
    assert a.qkv_bias and a.output_bias and a.sinks
    assert a.rope_scaling == RopeScaling(
        "yarn",
        32.0,
        original_max_position=4096,
        attention_factor=0.1 * math.log(32) + 1,
        truncate=False,
    )
    assert a.max_positions == 131072
    # transformers' config calls the number of experts so, too
    other = config_folder(tmp_path, "gpt_oss", ("num_local_experts",), num_experts=6)
    experts = architecture_of(other).experts
    assert experts is not None and experts.num_experts == 6


def test_gpt_oss_without_yarn_is_written_so(tmp_path):
    a = architecture_of(config_folder(tmp_path, "gpt_oss", rope_scaling={"rope_type": "default"}))
    assert a.rope_scaling is None
    (tmp_path / "config.json").write_text(json.dumps(config_of(a)))
    assert architecture_of(tmp_path) == a


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0, which is not supported; expected 7.0"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0, which is not supported; expected 7.0"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quant_method gptq; expected mxfp4, fp8 (e4m3)",
        ),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; expected num_local_experts=4"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types has chunked_attention"),
    ],
)
def test_what_is_not_computed_of_gpt_oss_is_refused(tmp_path, changes, said):
    with pytest.raises(ShoalError, match=re.escape(said)):
        architecture_of(config_folder(tmp_path, "gpt_oss", **changes))


LAYERS = ["full_attention", "sliding_attention"]
BY_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""As DeepSeek's and Qwen3's folders have it."""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt_neox"}, "'gpt_neox'; supported are llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_act": ""}, "hidden_act is '', which is not supported; expected silu"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor is 0, which is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantised by quant_method gptq; expected fp8",
        ),
        *(
            (
                {"quantization_config": {"quant_method": method}},
                f"quantised by quant_method {method}; expected fp8",
            )
            for method in (
                "bitsandbytes",
                "awq",
                "compressed-tensors",
                "mxfp4",
                "fbgemm_fp8",
                "torchao",
            )
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantised by quant_method fp8; expected fp8 (e4m3) with a weight_block_size, or none: "
            "give the model's folder with weights in bfloat16",
        ),
        (
            {"quantization_config": {**BY_BLOCKS, "weight_block_size": None}},
            "fp8 (fmt e4m3, activation_scheme dynamic, weight_block_size None); expected",
        ),
        (
            {"quantization_config": {**BY_BLOCKS, "weight_block_size": [128]}},
            "weight_block_size [128]",
        ),
        ({"quantization_config": {**BY_BLOCKS, "fmt": "e5m2"}}, "fmt e5m2"),
        (
            {"quantization_config": {**BY_BLOCKS, "activation_scheme": "static"}},
            "activation_scheme static",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope_type is 'dynamic', which is not supported",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor is '4'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": LAYERS}, "has sliding_attention; expected use_sliding_window"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types has chunked_attention, which is"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers; expected num_hidden"),
        ({"model_type": "llama", "layer_types": LAYERS}, "layer_types has sliding_attention"),
        ({"model_type": "qwen3_7", "text_config": {}}, "model_type is 'qwen3_7'; supported are"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma9_text"}},
            "text_config.model_type is 'gemma9_text'",
        ),
        (
            {"model_type": "gemma3", "text_config": {"hidden_activation": "relu"}},
            "text_config.hidden_activation is 'relu'",
        ),
        (
            {"model_type": "gemma3", "text_config": {"attn_logit_softcapping": 50.0}},
            "text_config.attn_logit_softcapping is 50.0, which is not supported",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention is True",
        ),
        ({"model_type": "gemma3", "text_config": 3}, "text_config is 3; expected a mapping"),
    ],
)
def test_what_shoal_does_not_compute_is_refused(tmp_path, changes, said):
    with pytest.raises(ShoalError) as error:
        architecture_of(config_folder(tmp_path, **changes))
    assert said in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_entry_that_is_null_is_as_if_it_were_absent(tmp_path, family):
    """In all families, also where the family's default is another than that of most."""

    def read(drop: tuple[str, ...] = (), **changes: Any) -> Architecture | str:
        try:
            return architecture_of(config_folder(tmp_path, family, drop, **changes))
        except ShoalError as error:  # a default that does not fit the other sizes
            return str(error)

    family_defaults = families.FAMILIES[FAMILIES[family]["model_type"]].defaults
    defaults = {**families.COMMON_DEFAULTS, **family_defaults}
    for entry in sorted(defaults.keys() - set(families.NULLS)):
        null: dict[str, Any] = {entry: None}
        assert read(**null) == read((entry,)), entry


def test_null_says_that_no_layer_has_a_window_and_each_head_its_keys(tmp_path):
    windows = config_folder(tmp_path, "mistral", sliding_window=None, num_key_value_heads=None)
    a = architecture_of(windows)
    assert [layer.window for layer in a.kinds] == [0] and a.num_kv_heads == a.num_heads == 4


def test_a_switch_that_is_off_is_accepted(tmp_path):
    folder = config_folder(tmp_path, "gemma3", use_bidirectional_attention=False)
    assert architecture_of(folder).post_norms


def test_windows_of_each_family(tmp_path):
    def layers(family: str = "qwen3", **changes) -> tuple[Layer, ...]:
        return architecture_of(config_folder(tmp_path, family, **changes)).pattern

    window, full = Layer(window=16), Layer()
    switched_on = {"sliding_window": 16, "use_sliding_window": True}
    # Qwen's switch, and the layers that it is for
    assert layers(sliding_window=16, use_sliding_window=False) == (full,)
    assert layers(**switched_on, max_window_layers=2) == (full,)
    assert layers(**switched_on) == (full,)  # from layer 28 on
    assert layers(**switched_on, max_window_layers=1) == (full, window)
    assert layers(**switched_on, max_window_layers=0) == (window,)
    assert layers(**switched_on, layer_types=LAYERS) == (full, window)
    assert layers("qwen2", **switched_on, layer_types=LAYERS[1:] * 2) == (window,)
    assert layers(layer_types=["full_attention"] * 2) == (full,)
    # Mistral's on all layers, which must be null for none
    assert layers(model_type="mistral") == (Layer(window=4096),)
    assert layers(model_type="mistral", sliding_window=16) == (window,)
    assert layers(model_type="mistral", sliding_window=None) == (full,)
    # one that is written down means nothing to Llama
    assert layers("llama2", sliding_window=16) == (full,)


OLD_GEMMA = {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "sliding_window_pattern": 3}
NEW_GEMMA = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    },
    "layer_types": [*LAYERS[1:] * 2, "full_attention"] * 2 + ["sliding_attention"],
}
BY_EIGHT = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}


@pytest.mark.parametrize(
    "changes",
    [
        {**OLD_GEMMA, **BY_EIGHT},
        NEW_GEMMA,
        {**NEW_GEMMA, "sliding_window_pattern": 6},  # the list of layers counts
    ],
)
def test_gemma_3_in_every_form(tmp_path, changes):
    described = {"num_hidden_layers": 7, "sliding_window": 16, **changes}
    text = {"model_type": "gemma3_text", **described}
    in_text = {"model_type": "gemma3", "text_config": described}
    for config in (text, in_text, {**in_text, "text_config": text}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        a = architecture_of(tmp_path)
        local = Layer(window=16, rotary=Rotary(5e3))
        assert a.pattern == (local, local, Layer())
        assert a.rotary_of(Layer()) == Rotary(1e6, RopeScaling("linear", 8.0))
        # scaling has no part in it
        assert a.max_positions == 131072
        sizes = (a.vocab_size, a.hidden_size, a.intermediate_size, a.num_heads, a.num_kv_heads)
        assert sizes == (262208, 2304, 9216, 8, 4) and a.head_dim == 256 and a.tie_embeddings
        assert a.embedding_scale == 48.0 and a.activation == "gelu_tanh" and a.post_norms
        (tmp_path / "config.json").write_text(json.dumps(config_of(a)))
        assert architecture_of(tmp_path) == a
        assert architecture_of(tmp_path).max_positions == 131072


GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": [LAYERS[1], LAYERS[0]] * 3,
    "sliding_window": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
GEMMA4_LOCAL = Layer(window=16, rotary=Rotary(1e4))
GEMMA4_FULL = Layer(head_dim=512, rotary=Rotary(1e6, share=0.25, over_whole_head=True))


def test_gemma_4_in_every_form(tmp_path):
    """As published, and as transformers saves it: with the sizes of single layers."""
    saved = {"global_head_dim": None, "per_layer_config": {}}
    for number in ("1", "3", "5"):
        saved["per_layer_config"][number] = {"head_dim": 512}
    for changes in ({}, saved, {"layer_types": [*GEMMA4["layer_types"][:5], LAYERS[1]]}):
        (tmp_path / "config.json").write_text(json.dumps({**GEMMA4, **changes}))
        a = architecture_of(tmp_path)
        assert a.layers_in_order[:4] == (GEMMA4_LOCAL, GEMMA4_FULL) * 2
        local = replace(GEMMA4_LOCAL, keys_of=2, intermediate_size=2 * 9216)
        # the last layer has no window, whatever the file says
        full = replace(GEMMA4_FULL, keys_of=3, intermediate_size=2 * 9216)
        assert a.layers_in_order[4:] == (local, full)
        assert a.layer_embedding_size == 256 and a.query_scale == 1.0
        (tmp_path / "config.json").write_text(json.dumps(config_of(a)))
        assert architecture_of(tmp_path) == a


def test_values_are_keys_in_gemma_4_where_the_file_says_so(tmp_path):
    changes = {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA4, **changes}))
    a = architecture_of(tmp_path)
    assert a.pattern == (GEMMA4_LOCAL, replace(GEMMA4_FULL, num_kv_heads=2, values_are_keys=True))
    assert config_of(a)["num_global_key_value_heads"] == 2


def test_experts_stand_beside_the_mlp_in_gemma_4_where_the_file_says_so(tmp_path):
    sizes = {"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
    for is_on in (True, False):
        config = {**GEMMA4, **sizes, "enable_moe_block": is_on}
        (tmp_path / "config.json").write_text(json.dumps(config))
        a = architecture_of(tmp_path)
        assert {layer.feed_forward for layer in a.pattern} == {"mlp+experts" if is_on else "mlp"}
        assert a.experts == (Experts(8, 3, 24) if is_on else None)
        (tmp_path / "config.json").write_text(json.dumps(config_of(a)))
        assert architecture_of(tmp_path) == a


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_kv_shared_layers": 5},
            "num_kv_shared_layers is 5, but no layer before these has full_attention",
        ),
        ({"per_layer_config": {"1": {"sliding_window": 8}}}, "has sliding_window for layer 1"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "3 key/value heads of layer 1"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"vocab_size_per_layer_input": 8}, "vocab_size_per_layer_input is 8"),
        ({"enable_moe_block": True}, "num_experts is missing; expected 1 or more"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
            "top_k_experts is 5; expected num_experts=4 at most",
        ),
    ],
)
def test_what_is_not_computed_of_gemma_4_is_refused(tmp_path, changes, said):
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA4, **changes}))
    with pytest.raises(ShoalError, match=re.escape(said)):
        architecture_of(tmp_path)


def test_a_head_of_a_model_for_images_is_tied_as_the_whole_model_says(tmp_path):
    for said, in_text, tied in ((False, True, False), (True, False, True), (None, False, False)):
        config = {
            "model_type": "gemma3",
            "tie_word_embeddings": said,
            "text_config": {"tie_word_embeddings": in_text},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert architecture_of(tmp_path).tie_embeddings == tied


def test_scores_are_scaled_as_the_file_says(tmp_path):
    for scalar, scale in ((256, 0.0), (168, 168**-0.5)):
        config = {"model_type": "gemma3_text", "query_pre_attn_scalar": scalar}
        (tmp_path / "config.json").write_text(json.dumps(config))
        a = architecture_of(tmp_path)
        # 0: by the dimensions of a head, which are 256
        assert a.query_scale == scale
        made = config_of(replace(a, logit_cap=30.0))
        assert made["query_pre_attn_scalar"] == scalar and made["final_logit_softcapping"] == 30.0


def test_config_missing_or_broken(tmp_path):
    with pytest.raises(ShoalError, match=r"no config\.json"):
        architecture_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ShoalError, match="as JSON"):
        architecture_of(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_made_config_describes_the_same_architecture(tmp_path, family):
    a = architecture_of(config_folder(tmp_path, family))
    (tmp_path / "config.json").write_text(json.dumps(config_of(a)))
    assert architecture_of(tmp_path) == a


def test_no_config_for_a_mixture_that_no_family_has():
    a = Architecture(8, 4, 4, 1, 1, 1, 4, qk_norm=True, mlp_bias=True)
    with pytest.raises(ShoalError, match="mixture"):
        config_of(a)


# Where a model is


def test_locate_a_folder(tmp_path):
    assert locate(tmp_path) == tmp_path


def test_locate_nothing(tmp_path):
    for path in (str(tmp_path / "absent"), "absent", "./org/name/x"):
        with pytest.raises(ShoalError, match="no model folder"):
            locate(path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ShoalError, match="is a file"):
        locate(file)


def test_locate_tiny_is_the_packaged_one(tmp_path, monkeypatch):
    assets = tmp_path / "assets" / "tiny"
    assets.mkdir(parents=True)

    def files(name):
        return {"shoal": tmp_path}[name]

    monkeypatch.setattr(model_hub.resources, "files", files)
    assert locate("tiny") == assets
    assets.rmdir()
    with pytest.raises(ShoalError, match="lacks its packaged model"):
        locate("tiny")


def test_locate_a_hub_id(tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert locate("org/name-1.5B") == tmp_path
    assert asked["repository"] == "org/name-1.5B" and asked["token"] == "secret"
    assert "*.bin" not in asked["allow_patterns"]


def hub_errors():
    from huggingface_hub import errors

    def response(status: int) -> Any:
        return SimpleNamespace(status_code=status, headers={}, request=None)

    yield errors.GatedRepoError("x", response=response(403)), "gated.*HF_TOKEN"
    yield errors.RepositoryNotFoundError("x", response=response(404)), "not found"
    yield errors.HfHubHTTPError("x", response=response(401)), r"401.*HF_TOKEN"
    yield errors.HfHubHTTPError("x", response=response(503)), r"503.*online"
    yield errors.LocalEntryNotFoundError("x"), "online"
    yield errors.OfflineModeIsEnabled("x"), "online"


@pytest.mark.parametrize("number", range(6))
def test_a_hub_id_that_cannot_be_had(monkeypatch, number):
    import huggingface_hub

    error, said = list(hub_errors())[number]

    def snapshot(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ShoalError, match=said) as raised:
        locate("org/name")
    assert "org/name" in str(raised.value)


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_said_and_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections, and never writes
        keys = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
        }
        program = (
            "import shoal.files, shoal.weights.hub\n"
            "shoal.files.HUB_SECONDS, shoal.files.SILENT_SECONDS = 1.0, 0.2\n"
            "shoal.weights.hub.locate('org/name')"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | keys,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert "waiting for org/name of the Hugging Face hub" in ended.stderr
    assert (
        "ShoalError: org/name is not a local folder, and as a hub id it could not be downloaded"
        in ended.stderr
    )


# Weights in


def test_each_tensor_is_where_it_belongs(tmp_path):
    folder = write_model(tmp_path, "qwen2", seed=1)
    stored, p = tensors(FAMILIES["qwen2"], seed=1), load(folder)
    assert np.array_equal(p.embed_tokens, stored["model.embed_tokens.weight"])
    assert np.array_equal(p.lm_head, stored["lm_head.weight"].T)
    for layer in range(2):
        place = f"model.layers.{layer}."
        assert np.array_equal(p.blocks.q.kernel[layer], stored[place + "self_attn.q_proj.weight"].T)
        assert np.array_equal(p.blocks.v.bias[layer], stored[place + "self_attn.v_proj.bias"])
        assert np.array_equal(p.blocks.down[layer], stored[place + "mlp.down_proj.weight"].T)
        assert np.array_equal(
            p.blocks.mlp_norm[layer], stored[place + "post_attention_layernorm.weight"]
        )
    for leaf in jax.tree.leaves(p):
        assert leaf.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_half_precision_files(tmp_path, dtype):
    whole = load(write_model(tmp_path / "whole"))
    half = load(write_model(tmp_path / "half", dtype=dtype))
    assert same(half, jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), whole))
    assert load(tmp_path / "half", jnp.bfloat16).embed_tokens.dtype == jnp.bfloat16


@pytest.mark.parametrize("indexed", [True, False])
def test_several_files(tmp_path, indexed):
    folder = write_model(tmp_path)
    expected, named = load(folder), load_file(folder / "model.safetensors")
    names = sorted(named)
    (folder / "model.safetensors").unlink()
    for number, some in enumerate((names[:9], names[9:])):
        save_tensors(folder / f"part-{number}.safetensors", {name: named[name] for name in some})
    if indexed:
        places = {}
        for name in names:
            places[name] = f"part-{int(name in names[9:])}.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert same(load(folder), expected)
    if indexed:
        (folder / "part-1.safetensors").unlink()
        with pytest.raises(ShoalError, match=r"names part-1\.safetensors"):
            load(folder)


@pytest.mark.parametrize(
    "named",
    [
        "../other/model.safetensors",
        "{tmp}/other/model.safetensors",
        "a//b",
        "..\\other",
        3,
        None,
        ["x"],
    ],
)
def test_an_index_names_files_of_its_own_folder(tmp_path, named):
    folder, _ = write_model(tmp_path / "model"), write_model(tmp_path / "other")
    (folder / "model.safetensors").unlink()
    named = named.format(tmp=tmp_path) if isinstance(named, str) else named
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": named}}))
    with pytest.raises(
        ShoalError, match=r"model\.safetensors\.index\.json names the file .*, which is refused"
    ):
        load(folder)
    for wrong in ({}, {"weight_map": ["model.safetensors"]}):
        index.write_text(json.dumps(wrong))
        with pytest.raises(ShoalError, match="has no weight_map"):
            load(folder)
    index.write_text("[" * 100_000)
    with pytest.raises(ShoalError, match="could not be read as JSON: maximum recursion depth"):
        load(folder)


def test_an_untied_model_without_lm_head(tmp_path):
    folder = rewrite(write_model(tmp_path), lambda named: named.pop("lm_head.weight"))
    with pytest.raises(ShoalError, match=r"missing: lm_head\.weight"):
        load(folder)


def test_a_tensor_of_another_type_is_named(tmp_path):
    def integers(named):
        named["model.norm.weight"] = np.zeros(32, np.int8)

    with pytest.raises(ShoalError, match=r"model\.norm\.weight stored as I8"):
        load(rewrite(write_model(tmp_path), integers))


@pytest.mark.parametrize(
    ("family", "changes", "positions"),
    [
        ("qwen3", {}, 2048),
        ("qwen3", {"max_position_embeddings": 70}, 70),
        ("llama3", {}, 2048),
        ("llama-linear", {}, 4 * 2048),
        ("qwen2", {"max_position_embeddings": None}, 0),
        ("qwen2", {"max_position_embeddings": True}, 0),
        (
            "llama2",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            2 * 2048,
        ),
    ],
)
def test_how_far_positions_reach_counts_their_scaling(tmp_path, family, changes, positions):
    a = architecture_of(write_model(tmp_path / "m", family, **changes))
    assert a.max_positions == positions
    written = tmp_path / "written"
    written.mkdir()
    (written / "config.json").write_text(json.dumps(config_of(a)))
    assert architecture_of(written) == a  # another length alone is no other model
    assert architecture_of(written).max_positions == (positions or 32768)


def test_everything_wrong_is_told_at_once(tmp_path):
    def spoil(named):
        named["extra"] = named.pop("model.norm.weight")
        named["lm_head.weight"] = named["lm_head.weight"][:3].copy()

    with pytest.raises(
        ShoalError,
        match=r"missing: model\.norm\.weight; left over: extra; not as expected: "
        r"lm_head\.weight \[3, 32\] instead of \[64, 32\]\.",
    ):
        load(rewrite(write_model(tmp_path), spoil))


def test_a_truncated_or_damaged_file_is_named_in_a_line(tmp_path):
    file = write_model(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    headers = (
        b'{"a": 1 } ',
        b"[]",
        b"\xff\xfe",
        b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}',
    )
    for content in (
        whole[:-1],
        whole[:100],
        whole[:5],
        b"version https://git-lfs.github.com/spec/v1\n",
        *(len(text).to_bytes(8, "little") + text + b"0" * 50 for text in headers),
    ):
        file.write_bytes(content)
        with pytest.raises(ShoalError, match="not a complete safetensors file") as error:
            load(tmp_path)
        assert (
            str(error.value).startswith(str(file)) and len(str(error.value)) < len(str(file)) + 120
        )


def test_no_weights_at_all(tmp_path):
    config_folder(tmp_path)
    with pytest.raises(ShoalError, match="no safetensors file"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ShoalError, match="never read"):
        load(tmp_path)


def test_harmless_leftovers(tmp_path):
    def add(named):
        named["lm_head.weight"] = named["model.embed_tokens.weight"].copy()
        named["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    folder = write_model(tmp_path, "llama3")
    expected = load(folder)
    assert expected.lm_head is None
    assert same(load(rewrite(folder, add)), expected)
    assert same(
        load(rewrite(folder, lambda named: named.pop("model.embed_tokens.weight"))), expected
    )


def by_blocks(
    folder: Path, hidden: int = 160, inner: int = 320, change: Any = len
) -> tuple[Path, Path]:
    """A model whose products are stored in 8 bits by blocks, and the same with the values that
    these mean, in float64 until they are written."""
    write_model(folder / "plain", "qwen3", hidden_size=hidden, intermediate_size=inner, head_dim=64)
    shutil.copytree(folder / "plain", folder / "stored")
    plain = load_file(folder / "plain" / "model.safetensors")
    stored = dict(plain)
    for name, tensor in plain.items():
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = (-(-size // 128) for size in tensor.shape)
        scales, values, wide = (
            np.zeros(shape, dtype)
            for shape, dtype in (
                ((rows, columns), np.float32),
                (tensor.shape, FP8),
                (tensor.shape, np.float64),
            )
        )
        for i, j in np.ndindex(rows, columns):
            part = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            scales[i, j] = np.abs(tensor[part]).max() / 448
            values[part] = (tensor[part] / scales[i, j]).astype(FP8)
            wide[part] = values[part].astype(np.float64) * np.float64(scales[i, j])
        stored |= {name: values, f"{name}_scale_inv": scales}
        plain[name] = wide.astype(np.float32)
    change(stored)
    save_tensors(folder / "plain" / "model.safetensors", plain)
    save_tensors(folder / "stored" / "model.safetensors", stored)
    file = folder / "stored" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": BY_BLOCKS}))
    return folder / "stored", folder / "plain"


@pytest.mark.slow
@pytest.mark.parametrize("windows", [False, True])
def test_weights_stored_by_blocks_of_8_bits_are_read_as_what_they_mean(
    tmp_path, monkeypatch, windows
):
    if windows:  # of a few rows each, which begin within a block
        monkeypatch.setattr(weight_layout, "SMALL_BYTES", 1000)
        monkeypatch.setattr(weight_layout, "WINDOW_BYTES", 40_000)
    stored, plain = by_blocks(tmp_path)
    a = architecture_of(stored)
    assert a == architecture_of(plain) and same(load(stored), load(plain))
    down = huggingface.open_tensors(stored, a)["model.layers.0.mlp.down_proj.weight"]
    assert down.shape == (2, 160, 320) and np.array_equal(
        down.read([slice(1, 2), slice(120, 137)])[0],
        load_file(plain / "model.safetensors")["model.layers.1.mlp.down_proj.weight"][120:137],
    )
    # Widened, they are written without the entry that would have other programs look for scales.
    huggingface.save(tmp_path / "saved", load(stored), a, stored)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert same(load(tmp_path / "saved"), load(plain))


@pytest.mark.slow
def test_transformers_reads_weights_stored_by_blocks_as_the_same(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    stored, _ = by_blocks(tmp_path, 128, 256)  # it takes whole blocks alone
    a, tokens = architecture_of(stored), np.arange(24) * 5 % 64
    how = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        stored, dtype=torch.float32, quantization_config=how
    )
    with torch.no_grad(), jax.default_matmul_precision("highest"):
        ours = shoal_logits(a, load(stored), tokens)
        assert np.abs(theirs(torch.tensor(tokens[None])).logits[0].numpy() - ours).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda named: named.pop(f"{DOWN}_scale_inv"),
            f"not as expected: {DOWN} stored as F8_E4M3 instead of F32",
        ),
        (
            lambda named: named.update({f"{DOWN}_scale_inv": named[f"{DOWN}_scale_inv"][:1]}),
            f"left over: {DOWN}_scale_inv",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path, change, said):
    with pytest.raises(ShoalError) as error:
        load(by_blocks(tmp_path, change=change)[0])
    assert said in str(error.value)


@pytest.mark.slow
def test_eight_devices_hold_the_same_parameters(tmp_path):
    folder = write_model(tmp_path / "source", "qwen2")
    a, one = architecture_of(folder), load(folder)
    for section in (MeshSection(fsdp=4, tensor=2), MeshSection(data=2, fsdp=2, tensor=2)):
        roles = make_roles(section)
        for role in (roles.trainer, roles.sampler):
            assert same(huggingface.load(folder, a, role), one)
        many = huggingface.load(folder, a, roles.trainer)
        assert many.blocks.q.kernel.addressable_data(0).shape == (2, 32 // section.fsdp, 16)
    huggingface.save(tmp_path / "saved", many, a, folder)
    assert same(load(tmp_path / "saved"), one)


MEMORY = """
import sys, jax
from shoal.config.sections.devices import MeshSection
from shoal.mesh import make_roles
from shoal.model import families
from shoal.weights import huggingface

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

role = make_roles(MeshSection()).trainer
huggingface.load(sys.argv[1], families.architecture_of(sys.argv[1]), role)
before = status("VmRSS")
a = families.architecture_of(sys.argv[2])
parameters = jax.block_until_ready(huggingface.load(sys.argv[2], a, role))
peak = status("VmHWM")
huggingface.save(sys.argv[3], parameters, a)
model = sum(x.nbytes for x in jax.tree.leaves(parameters))
largest = max(x.nbytes for x in jax.tree.leaves(parameters))
print(model, largest, peak - before, status("VmHWM") - peak)
"""


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_second_copy_of_the_model_in_memory(tmp_path):
    small = write_model(tmp_path / "small", "llama2")
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "vocab_size": 1024,
    }
    large = write_model(tmp_path / "large", "llama2", **sizes)
    command = [sys.executable, "-c", MEMORY, *map(str, (small, large, tmp_path / "saved"))]
    env = {**os.environ, "PYTHONPATH": str(Path(huggingface.__file__).parents[2]), "XLA_FLAGS": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    model, tensor, loading, saving = map(int, done.stdout.split())
    assert model > 90e6
    assert model * 0.9 < loading < model + tensor + 35e6
    assert saving < 0.75 * model  # compilation included; a gathered copy would be all of it


# Weights out


@pytest.mark.parametrize("family", FAMILIES)
def test_load_after_save_is_bitwise_the_same(tmp_path, family):
    a = architecture_of(write_model(tmp_path / "source", family))
    parameters = load(tmp_path / "source")
    huggingface.save(tmp_path / "saved", parameters, a)
    assert architecture_of(tmp_path / "saved") == a
    assert same(load(tmp_path / "saved"), parameters)
    theirs = load_file(tmp_path / "saved" / "model.safetensors")  # the library's own reader
    if a.model_type == "gpt_oss":
        assert "model.layers.0.mlp.router.bias" in theirs
        assert theirs["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 32, 96)
    elif a.experts:
        assert theirs["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (24, 32)
    else:
        assert theirs["model.layers.1.mlp.gate_proj.weight"].shape == (48, 32)
    assert ("lm_head.weight" in theirs) == (not a.tie_embeddings)


@pytest.mark.slow
def test_fresh_parameters_come_back(tmp_path):
    a = Architecture(16, 8, 8, 2, 2, 1, 4, qk_norm=True, tie_embeddings=True, model_type="qwen3")
    parameters = initialise(a, 5, ROLE)
    huggingface.save(tmp_path, parameters, a)
    assert same(load(tmp_path), parameters)


def test_shards_have_an_index_and_keep_to_their_size(tmp_path):
    folder = write_model(tmp_path / "source")
    a = architecture_of(folder)
    huggingface.save(tmp_path / "saved", load(folder), a, folder, shard_bytes=20_000)
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == {file.name for file in files}
    stored = {file.name: load_file(file) for file in files}
    assert {name: file for file, named in stored.items() for name in named} == index["weight_map"]
    for named in stored.values():
        assert sum(t.nbytes for t in named.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for named in stored.values() for t in named.values()
    )
    assert same(load(tmp_path / "saved"), load(folder))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_save_in_half_precision(tmp_path, dtype):
    folder = write_model(tmp_path / "source")
    huggingface.save(tmp_path / "saved", load(folder), architecture_of(folder), folder, dtype)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["torch_dtype"] == dtype
    kept = jax.tree.map(
        lambda x: np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float32), load(folder)
    )
    assert same(load(tmp_path / "saved"), kept)


def test_the_sources_config_and_tokenizer_go_along(tmp_path):
    folder = write_model(tmp_path / "source", rope_theta=123.0, note="kept", torch_dtype="bfloat16")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("x")
    a = architecture_of(folder)
    huggingface.save(tmp_path / "saved", load(folder), a, folder)
    source, saved = (
        json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "saved")
    )
    assert saved == {**source, "torch_dtype": "float32"}
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes()
    newer = write_model(tmp_path / "newer")
    config_folder(newer, dtype="bfloat16")
    huggingface.save(tmp_path / "again", load(newer), architecture_of(newer), newer, "float16")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["dtype"] == "float16" and "torch_dtype" not in config


def test_a_source_of_tokenizer_files_only(tmp_path):
    write_tokenizer(tmp_path / "tokens")
    a = architecture_of(write_model(tmp_path / "model", vocab_size=300))
    huggingface.save(tmp_path / "saved", load(tmp_path / "model"), a, tmp_path / "tokens")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    generation = json.loads((tmp_path / "tokens" / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"]
    assert (
        architecture_of(tmp_path / "saved") == a
        and (tmp_path / "saved" / "tokenizer.json").is_file()
    )


def test_save_overwrites_nothing_and_leaves_nothing_half_done(tmp_path):
    folder = write_model(tmp_path / "source")
    a, parameters = architecture_of(folder), load(folder)
    with pytest.raises(ShoalError, match="not empty"):
        huggingface.save(folder, parameters, a)
    with pytest.raises(ShoalError, match="expected float32, bfloat16 or float16"):
        huggingface.save(tmp_path / "saved", parameters, a, dtype="int8")
    with pytest.raises(ShoalError, match="another architecture"):
        huggingface.save(tmp_path / "saved", parameters, replace(a, norm_eps=1.0), folder)
    with pytest.raises(ValueError, match=r"parameter model.embed_tokens.weight is \(64, 32\)"):
        huggingface.save(tmp_path / "saved", parameters, replace(a, vocab_size=65))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    (tmp_path / "saved").mkdir()  # an empty folder may be there
    huggingface.save(tmp_path / "saved", parameters, a)
    assert same(load(tmp_path / "saved"), parameters)


def test_every_parameter_has_a_name_of_its_own(tmp_path):
    for family in FAMILIES:
        names = []
        for spec in jax.tree.leaves(param_specs(architecture_of(config_folder(tmp_path, family)))):
            names += spec.names_by_index.values()
        assert all(names) and len(set(names)) == len(names)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-tied", "llama3"])
def test_a_tied_model_whose_files_hold_another_head_is_untied_as_in_transformers(
    transformers, tmp_path, family, shards
):
    folder = write_model(tmp_path / "tied", family)
    named = dict(load_file(folder / "model.safetensors"))
    embedding = named["model.embed_tokens.weight"]
    head = embedding[::-1].copy()
    if shards == 1:
        save_tensors(folder / "model.safetensors", {**named, "lm_head.weight": head})
    else:
        (folder / "model.safetensors").unlink()
        parts = {"a.safetensors": named, "b.safetensors": {"lm_head.weight": head}}
        for name, part in parts.items():
            save_tensors(folder / name, part)
        weight_map = {}
        for name, part in parts.items():
            for tensor in part:
                weight_map[tensor] = name
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    spec = resolve_model(ModelSection(path=str(folder)))
    assert not spec.architecture.tie_embeddings and "hold another head" in spec.notes[-1].text
    spec.check()
    assert not planned_architecture(ModelSection(path=str(folder))).tie_embeddings
    for section in (LoraSection(rank=2), LoraSection()):
        quantise = "int8" if section.rank else "none"
        other = resolve_model(ModelSection(path=str(folder), lora=section, quantise=quantise))
        assert not other.architecture.tie_embeddings
    # A run's folder and an export say so, and keep the head.
    assert spec.config is not None and spec.config["tie_word_embeddings"] is False
    parameters = spec.load(make_roles(MeshSection(fsdp=1)).trainer, np.float32)
    huggingface.save(
        tmp_path / "export", parameters, spec.architecture, spec.folder, config=spec.config
    )
    np.testing.assert_array_equal(
        load_file(tmp_path / "export" / "model.safetensors")["lm_head.weight"], head
    )
    theirs = []
    for one in (folder, tmp_path / "export"):
        theirs.append(
            transformers.AutoModelForCausalLM.from_pretrained(one).lm_head.weight.detach().numpy()
        )
    for one in theirs:
        np.testing.assert_array_equal(one, head)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_tied_model_whose_files_hold_the_same_head_twice_stays_tied(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(huggingface, "COMPARED_BYTES", 1024)  # several parts
    folder = write_model(tmp_path / "tied", "qwen3-tied", dtype=dtype)
    named = dict(load_file(folder / "model.safetensors"))
    for change in (0, 1):
        head = named["model.embed_tokens.weight"].copy()
        head[-1, -1] += change
        save_tensors(folder / "model.safetensors", {**named, "lm_head.weight": head})
        assert huggingface.stored_architecture(folder).tie_embeddings == (change == 0)
    assert (
        huggingface.stored_architecture(write_model(tmp_path / "untied", "qwen3")).tie_embeddings
        is False
    )
