"""Tensors that hold all experts of a layer: read as their parts, written from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small import LLAMA2, random_parameters, roles, shoal_logits

from shoal.model.adapters import make_adapter, merge
from shoal.model.architecture import EXPERT_PRODUCTS, Adapter, Architecture, Experts, Layer
from shoal.model.linear import Quantised
from shoal.model.parameters import (
    param_specs,
    quantiser,
    select,
    trained_specs,
    without_adapter,
)
from shoal.records import ShoalError
from shoal.weights import huggingface, peft
from shoal.weights import layout as weight_layout
from shoal.weights.fused import file_specs
from shoal.weights.tensor_files import digests, read_header

E, F = 4, 24
EXPERTS = Experts(num_experts=E, experts_per_token=2, intermediate_size=F)
MOE = replace(
    LLAMA2,
    num_layers=3,
    qk_norm=True,
    pattern=(Layer(feed_forward="experts"), Layer(), Layer(feed_forward="experts")),
    experts=EXPERTS,
)
INTERLEAVED = replace(
    MOE, experts=replace(EXPERTS, bias=True, router_bias=True), model_type="gpt_oss"
)
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"


def fused(tensors: dict[str, np.ndarray], interleaved: bool) -> dict[str, np.ndarray]:
    """The experts' tensors in the layout of Qwen3.5's files, or of gpt-oss'."""
    result = {name: t for name, t in tensors.items() if ".experts." not in name}
    places = {name.partition(".0.gate")[0] for name in tensors if ".experts.0.gate" in name}
    for place in places:
        for kind in ("weight", "bias"):
            if f"{place}.0.{GATE}.{kind}" not in tensors:
                continue
            gate, up, down = (
                np.stack([tensors[f"{place}.{e}.{product}.{kind}"] for e in range(E)])
                for product in (GATE, UP, DOWN)
            )
            ending = "" if kind == "weight" else "_bias"
            both = np.concatenate([gate, up], 1)  # rows of gate, then rows of up
            if interleaved:
                both = np.stack([gate, up], -1).reshape(*gate.shape[:-1], -1)
            result[f"{place}.gate_up_proj{ending}"] = both
            result[f"{place}.down_proj{ending}"] = down
    return result


def write(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A folder of these tensors alone: the architectures here are of no family."""
    folder.mkdir()
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def tensors_of(a: Architecture, parameters) -> dict[str, np.ndarray]:
    """By names of parameters, in the layout of the family's files."""
    named = {}
    specs = jax.tree.leaves(file_specs(a, param_specs(a)))
    for spec, array in zip(specs, jax.tree.leaves(parameters), strict=True):
        values = spec.transpose(np.asarray(array))
        named |= {name: values[index] for index, name in spec.names_by_index.items()}
    return named


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("a", [MOE, INTERLEAVED], ids=["rows", "interleaved"])
def test_fused_tensors_are_read_as_their_parts_and_written_as_they_were(
    tmp_path, monkeypatch, a, windows
):
    if windows:
        monkeypatch.setattr(weight_layout, "SMALL_BYTES", 0)
        monkeypatch.setattr(weight_layout, "WINDOW_BYTES", 700)
    expected = random_parameters(a)
    tensors = fused(tensors_of(a, expected), a is INTERLEAVED)
    folder = write(tmp_path / "source", tensors)
    role = roles(fsdp=2, tensor=2, data=2).trainer
    loaded = huggingface.load(folder, a, role)
    for mine, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    config = {"dtype": "float32"}
    huggingface.save(tmp_path / "out", loaded, a, folder, config=config, origin=folder)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor)


def test_a_source_with_a_tensor_for_each_expert_is_written_like_that(tmp_path):
    expected = random_parameters(MOE)
    tensors = tensors_of(MOE, expected)
    folder = write(tmp_path / "source", tensors)
    loaded = huggingface.load(folder, MOE, roles().trainer)
    config = {"dtype": "float32"}
    huggingface.save(tmp_path / "out", loaded, MOE, folder, config=config, origin=folder)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    # Without a source the family decides.
    huggingface.save(tmp_path / "split", loaded, MOE, config=config)
    assert load_file(tmp_path / "split" / "model.safetensors").keys() == tensors.keys()
    a = replace(MOE, model_type="mixtral")
    huggingface.save(tmp_path / "fused", loaded, a, config=config)
    names = load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert names == fused(tensors, False).keys()


def test_every_parameter_of_a_fused_tensor_has_a_digest_of_its_own(tmp_path):
    tensors = fused(tensors_of(INTERLEAVED, random_parameters(INTERLEAVED)), True)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    before = digests(huggingface.open_tensors(write(tmp_path / "before", tensors), INTERLEAVED))
    tensors[name] = tensors[name].copy()
    tensors[name][-1, -1, -1] += 1  # up of the last expert
    after = digests(huggingface.open_tensors(write(tmp_path / "after", tensors), INTERLEAVED))
    changed = {key for key in before if before[key] != after[key]}
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in changed
    assert all(key.startswith("model.layers.0.mlp.experts.0.") for key in changed)


def test_a_fused_tensor_of_another_shape_is_named(tmp_path):
    tensors = fused(tensors_of(MOE, random_parameters(MOE)), False)
    name = "model.layers.2.mlp.experts.down_proj"
    tensors[name] = tensors[name][:-1]
    folder = write(tmp_path / "model", tensors)
    with pytest.raises(ShoalError) as error:
        huggingface.load(folder, MOE, roles().trainer)
    assert f"not as expected: {name} [3, 32, 24] instead of [4, 32, 24]" in str(error.value)


# ---- adapters


def adapted(a: Architecture, *targets: str) -> Architecture:
    return replace(a, adapter=Adapter(3, 6.0, targets))


@pytest.mark.parametrize("a", [MOE, INTERLEAVED], ids=["rows", "interleaved"])
@pytest.mark.parametrize("targets", [EXPERT_PRODUCTS, EXPERT_PRODUCTS[:1], EXPERT_PRODUCTS[1:]])
def test_an_adapter_on_experts_has_the_tensors_of_pefts_param_wrapper(tmp_path, a, targets):
    """And comes back from them. What they mean is compared with PEFT itself in test_lora.py."""
    a = adapted(a, *targets)
    adapter = select(trained_specs(a), random_parameters(a))
    (tmp_path / "tokenizer").mkdir()
    peft.save(tmp_path / "adapter", adapter, a, "base", tmp_path / "tokenizer")
    shapes = {}
    for name, tensor in read_header(tmp_path / "adapter" / peft.WEIGHTS).items():
        if name.startswith("base_model.model.model.layers.2.mlp.experts."):
            shapes[name.partition(".experts.")[2].removesuffix(".weight")] = tensor.shape
    inner = "base_layer." if len(targets) == 2 else ""
    expected = {}
    if EXPERT_PRODUCTS[0] in targets:
        expected |= {f"{inner}lora_A": (E * 3, 32), f"{inner}lora_B": (2 * F, 3 * E)}
    if EXPERT_PRODUCTS[1] in targets:
        expected |= {"lora_A": (E * 3, F), "lora_B": (32, 3 * E)}
    assert shapes == expected
    again = peft.load(tmp_path / "adapter", a, roles().trainer, np.float32)
    for mine, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(adapter), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        (["all-linear"], {"q_proj", "k_proj", "v_proj", "o_proj", GATE, UP, DOWN}),
        # of the layer without experts
        ([DOWN], {DOWN}),
        ([r".*mlp\..*"], {GATE, UP, DOWN}),
        (["experts.down_proj"], {EXPERT_PRODUCTS[1]}),
        ([r".*\.experts\..*", "q_proj"], {"q_proj", *EXPERT_PRODUCTS}),
    ],
)
def test_experts_have_an_adapter_where_a_target_says_so(targets, chosen):
    """For PEFT they are parameters, and its all-linear means modules."""
    assert set(make_adapter(MOE, 2, 4.0, targets, False).targets) == chosen


def test_a_shared_experts_gate_is_a_linear_module():
    a = replace(MOE, pattern=MOE.pattern[:1], experts=replace(EXPERTS, shared_size=8))
    adapter = make_adapter(a, 2, 4.0, ["all-linear"], False)
    assert "shared_expert_gate" in adapter.targets
    adapted_gate = param_specs(replace(a, adapter=adapter, quantised="int8"))
    gate = jax.tree.leaves(adapted_gate.blocks.experts.shared_gate)
    assert [spec.trained for spec in gate] == [False, True, True]
    assert not any(spec.dtype for spec in gate)  # not in 8 bits


@pytest.mark.parametrize("name", ["down_proj", "experts.down_proj", "mlp.experts.down_proj"])
def test_target_parameters_of_peft_are_the_ends_of_names(tmp_path, name):
    peft.write_config(tmp_path, Adapter(3, 6.0, ("q_proj", "experts.down_proj")), "base")
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    assert config["target_modules"] == ["q_proj"]
    config["target_parameters"] = [name]
    (tmp_path / peft.CONFIG).write_text(json.dumps(config))
    assert peft.read_adapter(tmp_path, MOE).targets == ("q_proj", "experts.down_proj")


@pytest.mark.parametrize("beginning", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_class_for_several_kinds_of_input_is_read(tmp_path, beginning):
    """Its names begin otherwise, and it may have tensors on towers, whose names end alike."""
    a = adapted(MOE, "q_proj", *EXPERT_PRODUCTS)
    adapter = select(trained_specs(a), random_parameters(a))
    (tmp_path / "tokenizer").mkdir()
    folder = tmp_path / "adapter"
    peft.save(folder, adapter, a, "base", tmp_path / "tokenizer", is_multimodal=True)
    assert peft.read_adapter(folder, MOE) == a.adapter and peft.notes(folder) == []
    tensors = {}
    for name, tensor in load_file(folder / peft.WEIGHTS).items():
        assert name.startswith("base_model.model.model.language_model.layers.")
        tensors[name.replace("model.language_model.", beginning)] = tensor
    for matrix in "AB":
        name = f"base_model.model.model.visual.blocks.0.attn.qkv.lora_{matrix}.weight"
        tensors[name] = np.ones((3, 3), np.float32)
    save_file(tensors, folder / peft.WEIGHTS)
    config = json.loads((folder / peft.CONFIG).read_text())
    config["target_modules"] = ["q_proj", "qkv"]
    (folder / peft.CONFIG).write_text(json.dumps(config))
    assert peft.read_adapter(folder, MOE) == a.adapter
    again = peft.load(folder, a, roles().trainer, np.float32)
    for mine, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(adapter), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    (note,) = peft.notes(folder)
    assert "has 2 tensors on towers, as model.visual.blocks.0.attn.qkv.lora_A.weight" in note


def test_an_adapter_on_experts_computes_as_the_merged_weights():
    a = adapted(replace(MOE, num_layers=1), *EXPERT_PRODUCTS)
    parameters = random_parameters(a)
    tokens = np.arange(20) * 7 % a.vocab_size
    ours = shoal_logits(a, parameters, tokens)
    merged = shoal_logits(a.base, merge(a, parameters, roles().trainer), tokens)
    plain = shoal_logits(a.base, without_adapter(a, parameters), tokens)
    assert np.abs(ours - merged).max() < 1e-4 < 0.1 < np.abs(ours - plain).max()


def test_quantised_experts_have_a_scale_for_each_expert_and_channel(tmp_path):
    a = replace(MOE, num_layers=1)
    small = replace(a, quantised="int8")
    parameters = random_parameters(a)
    folder = write(tmp_path / "model", fused(tensors_of(a, parameters), False))
    role = roles().trainer
    loaded = huggingface.load(folder, a, role, keep=quantiser(small, role))
    gate = loaded.blocks.experts.gate
    assert isinstance(gate, Quantised)
    assert gate.values.shape == (1, E, 32, F) and gate.scale.shape == (1, E, F)
    assert not isinstance(loaded.blocks.experts.router, Quantised)

    def widened(weight):
        if not isinstance(weight, Quantised):
            return weight
        return weight.values.astype(jnp.float32) * weight.scale[..., None, :]

    wide = jax.tree.map(widened, loaded, is_leaf=lambda one: isinstance(one, Quantised))
    tokens = np.arange(20) * 7 % a.vocab_size
    ours = shoal_logits(small, loaded, tokens)
    assert np.abs(ours - shoal_logits(a, wide, tokens)).max() < 1e-4
    assert np.abs(ours - shoal_logits(a, parameters, tokens)).max() > 1e-3
