"""Shoal's logits against transformers': live where torch is installed, and by golden files
everywhere."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import shoal_logits
from tiny_models import FAMILIES, write_model

from shoal.config.sections.devices import MeshSection
from shoal.mesh import make_roles
from shoal.model.architecture import Architecture
from shoal.model.families import architecture_of
from shoal.model.layers import stacked_blocks
from shoal.model.parameters import Parameters, Stacks
from shoal.weights import huggingface

GOLDEN = Path(__file__).parent / "golden"
ROLE = make_roles(MeshSection(), jax.devices()[:1]).trainer
TOLERANCE = 1e-4
FAR = 0.1  # what a model that lacks a part must miss by


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


def logits_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    a = architecture_of(folder)
    return shoal_logits(a, huggingface.load(folder, a, ROLE), tokens)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def without(part: str, a: Architecture, p: Parameters) -> tuple[Architecture, Parameters]:
    """The model with one part left out."""
    if part == "rope scaling":
        assert a.rope_scaling is not None
        return replace(a, rope_scaling=None), p
    if part in CHANGES:
        return CHANGES[part](a), p
    if part == "factor of YaRN":
        assert a.rope_scaling is not None
        scaling = replace(a.rope_scaling, attention_factor=1.0)
        return replace(a, rope_scaling=scaling), p
    if part == "sinks":
        stacks = tuple(replace(block, sinks=None) for block in stacked_blocks(p.blocks))
        return replace(a, sinks=False), replace(p, blocks=replace(p.blocks, blocks=stacks))
    if part == "attention biases" and isinstance(p.blocks, Stacks):
        plain = []
        for block in p.blocks.blocks:
            products = {}
            for name in "qkvo":
                weight = getattr(block, name)
                products[name] = replace(weight, bias=weight.bias * 0)
            plain.append(replace(block, **products))
        return a, replace(p, blocks=replace(p.blocks, blocks=tuple(plain)))
    if part == "attention biases":
        blocks = {
            name: replace(w, bias=w.bias * 0)
            for name in "qkvo"
            if hasattr(w := getattr(p.blocks, name), "bias")
        }
    elif part == "mlp biases":
        blocks = {
            name: replace(w, bias=w.bias * 0)
            for name in ("gate", "up", "down")
            if hasattr(w := getattr(p.blocks, name), "bias")
        }
    else:
        blocks = {}
        for name in ("q_norm", "k_norm"):
            blocks[name] = jnp.ones_like(getattr(p.blocks, name))
        assert a.qk_norm
    assert blocks
    return a, replace(p, blocks=replace(p.blocks, **blocks))


def without_windows(a: Architecture) -> Architecture:
    return replace(a, pattern=tuple(replace(layer, window=0) for layer in a.pattern))


def without_own_rotary(a: Architecture) -> Architecture:
    return replace(a, pattern=tuple(replace(layer, rotary=None) for layer in a.pattern))


CHANGES: dict[str, Callable[[Architecture], Architecture]] = {
    "windows": without_windows,
    "rotary of layers with windows": without_own_rotary,
    "query scale": lambda a: replace(a, query_scale=0.0),
    "embedding scale": lambda a: replace(a, embedding_scale=1.0),
    "logit cap": lambda a: replace(a, logit_cap=0.0),
    "activation": lambda a: replace(a, activation="silu"),
    "1 of norms": lambda a: replace(a, norm="weight"),
}


PARTS = [
    ("llama3", "rope scaling"),
    ("llama-linear", "rope scaling"),
    ("llama-linear", "attention biases"),
    ("llama-linear", "mlp biases"),
    ("qwen2", "attention biases"),
    ("qwen2-tied", "attention biases"),
    ("qwen3", "query and key norm weights"),
    ("qwen3-tied", "query and key norm weights"),
    ("mistral", "windows"),
    ("qwen2-window", "windows"),
    *(("gemma3", part) for part in CHANGES),
    ("qwen3_5", "1 of norms"),
    ("qwen3_5_moe", "1 of norms"),
    ("gpt_oss", "windows"),
    ("gpt_oss", "rope scaling"),
    ("gpt_oss", "factor of YaRN"),
    ("gpt_oss", "sinks"),
    ("gpt_oss", "attention biases"),
    ("gpt_oss", "activation"),
]


# Golden files


@pytest.fixture
def golden(tmp_path):
    def read(family: str) -> tuple[Path, Any]:
        with np.load(GOLDEN / f"{family}.npz") as file:
            return write_model(tmp_path / family, family, seed=3), dict(file)

    return read


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_logits(golden, family):
    folder, expected = golden(family)
    assert expected["logits"].std() >= 1 and len(expected["tokens"]) >= 96
    ours = logits_of(folder, expected["tokens"])[expected["positions"]]
    assert distance(ours, expected["logits"]) < TOLERANCE


@pytest.mark.parametrize(("family", "part"), PARTS)
def test_leaving_a_part_out_is_seen(golden, family, part):
    folder, expected = golden(family)
    a = architecture_of(folder)
    a, parameters = without(part, a, huggingface.load(folder, a, ROLE))
    ours = shoal_logits(a, parameters, expected["tokens"])[expected["positions"]]
    assert distance(ours, expected["logits"]) > FAR


def test_query_and_key_norms_themselves_matter(golden):
    folder, expected = golden("qwen3")
    a = architecture_of(folder)
    p = huggingface.load(folder, a, ROLE)
    p = replace(p, blocks=replace(p.blocks, q_norm=None, k_norm=None))
    ours = shoal_logits(replace(a, qk_norm=False), p, expected["tokens"])[expected["positions"]]
    assert distance(ours, expected["logits"]) > FAR


def test_golden_files_are_those_of_the_families():
    assert {file.stem for file in GOLDEN.glob("*.npz")} == set(FAMILIES)


# Live


@pytest.fixture(scope="module")
def transformers(transformers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
    transformers.logging.disable_progress_bar()
    return transformers


def their_model(transformers: Any, folder: Path) -> Any:
    import torch

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].float().numpy()


def random_tokens(seed: int, vocab_size: int = 64, length: int = 120) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, vocab_size, length)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_transformers_saved(transformers, tmp_path, family):
    import torch

    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(11)
    has_delta_nets = family.startswith("qwen3_5")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            norm = "norm" in name
            centre = 1.0 if norm else 0.0
            if has_delta_nets and norm and "linear_attn" not in name:
                centre = 0.0  # the norm adds 1
            if name.endswith("A_log"):
                # States decay slowly. Of those that are forgotten at once little is left, which
                # the norm after them divides by itself: rounding would decide.
                centre = -2.5
            if norm or tensor.ndim == 1:
                scale = 0.3
            else:
                scale = (2.0 if "embed" in name or "lm_head" in name else 1.2) * (
                    tensor.shape[-1] ** -0.5
                )
            tensor.copy_(noise * scale + centre)
    model.save_pretrained(tmp_path / "saved")
    tokens = random_tokens(5)
    expected = their_logits(model, tokens)
    assert expected.std() >= 1
    assert distance(logits_of(tmp_path / "saved", tokens), expected) < TOLERANCE
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "rope_parameters" in saved or "rope_scaling" in saved or "rope_theta" in saved
    assert architecture_of(tmp_path / "saved") == architecture_of(tmp_path)  # both forms read alike


@pytest.mark.parametrize("own_config", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_loads_in_transformers_with_the_same_logits(
    transformers, tmp_path, family, own_config
):
    source = write_model(tmp_path / "source", family, seed=7)
    a = architecture_of(source)
    huggingface.save(
        tmp_path / "saved",
        huggingface.load(source, a, ROLE),
        a,
        source if own_config else None,
        shard_bytes=30_000,
    )
    assert (tmp_path / "saved" / "model.safetensors.index.json").is_file()
    tokens = random_tokens(8)
    theirs = their_logits(their_model(transformers, tmp_path / "saved"), tokens)
    assert distance(theirs, their_logits(their_model(transformers, source), tokens)) == 0
    assert distance(theirs, logits_of(tmp_path / "saved", tokens)) < TOLERANCE


def test_half_precision_files_give_the_logits_of_their_own_weights(transformers, tmp_path):
    import torch

    folder = write_model(
        tmp_path / "half", "qwen2", seed=7, dtype=jnp.bfloat16, torch_dtype="bfloat16"
    )
    tokens = random_tokens(9)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert distance(logits_of(folder, tokens), their_logits(model.float(), tokens)) < TOLERANCE
