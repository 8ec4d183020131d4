"""Weights of 4 bits in files: read, held in 8 bits, exported."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from small import roles
from tiny_models import save_tensors

from shoal.config.sections.model import LoraSection, ModelSection
from shoal.model.families import architecture_of
from shoal.model.linear import Adapted, quantise
from shoal.model.parameters import initialise, param_specs
from shoal.records import ShoalError
from shoal.weights import huggingface, mxfp4
from shoal.weights import layout as weight_layout
from shoal.weights.fused import file_specs
from shoal.weights.source import resolve_model
from shoal.weights.tensor_files import StoredTensor, read_header


def random_weight(
    experts: int, rows: int, columns: int, scales: tuple[int, int] = (100, 140)
) -> dict[str, np.ndarray]:
    """Blocks and scales of a weight [experts, rows, columns], by the ends of their names."""
    rng = np.random.default_rng(rows)
    shape = (experts, columns, rows // 32)
    return {
        "_blocks": rng.integers(0, 256, (*shape, 16), np.uint8),
        "_scales": rng.integers(*scales, shape, np.uint8),
    }


def stored(folder: Path, named: dict[str, np.ndarray]) -> dict[str, Any]:
    save_tensors(folder / "model.safetensors", named)
    return read_header(folder / "model.safetensors")


def read(tensor: Any, start: int, count: int) -> np.ndarray:
    values = np.empty((count, *tensor.shape[1:]), jnp.bfloat16)
    tensor.read(start, values)
    return values.astype(np.float32)


def test_numbers_by_hand():
    """All sixteen, the first of a byte in its low bits, times 2^(scale - 127)."""
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    first = np.arange(0, 16, 2)
    blocks = np.tile(first | first + 1 << 4, 2).astype(np.uint8)  # two times all numbers
    found = mxfp4.widened(blocks[None], np.array([130], np.uint8)).astype(np.float32)
    assert found.tolist() == [8.0 * number for number in numbers * 2]
    found = mxfp4.widened(blocks[None], np.array([0], np.uint8)).astype(np.float64)
    assert found[1:4].tolist() == [2.0**-128, 2.0**-127, 1.5 * 2.0**-127]


def test_rows_and_columns_of_an_expert(tmp_path):
    """Of [E, in, out]; files have the columns of each expert one after the other."""
    tensors = {f"w{end}": values for end, values in random_weight(3, 96, 10).items()}
    (found,) = mxfp4.with_widened(stored(tmp_path, tensors)).values()
    assert isinstance(found, mxfp4.Mxfp4Tensor)
    assert (found.name, found.shape, found.dtype) == ("w", (3, 96, 10), "BF16")
    whole = mxfp4.widened(tensors["w_blocks"], tensors["w_scales"]).astype(np.float32)
    expert = found.part(2, (96, 10))
    assert np.array_equal(read(expert, 0, 96), whole[2].T)
    assert np.array_equal(read(expert, 40, 30), whole[2].T[40:70])
    assert np.array_equal(read(expert.every_second_column(1), 31, 2), whole[2].T[31:33, 1::2])
    assert read(expert, 5, 0).shape == (0, 10)
    samples = {expert.sample(), found.part(1, (96, 10)).sample()}
    samples |= {expert.every_second_column(place).sample() for place in (0, 1)}
    assert len(samples) == 4


def test_tensors_of_other_shapes_are_no_weights(tmp_path):
    weight = random_weight(2, 32, 4)
    tensors = {
        "no_scales_blocks": weight["_blocks"],
        "short_blocks": weight["_blocks"],
        "short_scales": weight["_scales"][:, :2],
        "signed_blocks": weight["_blocks"].astype(np.int8),
        "signed_scales": weight["_scales"].astype(np.int8),
    }
    assert mxfp4.with_widened(stored(tmp_path, tensors)).keys() == tensors.keys()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_they_are_those_of_transformers(tmp_path, dtype, transformers):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = random_weight(2, 64, 24, scales=(1, 255))
    theirs = convert_moe_packed_tensors(
        torch.from_numpy(weight["_blocks"]),
        torch.from_numpy(weight["_scales"]),
        dtype=getattr(torch, dtype),
    )
    ours = mxfp4.widened(weight["_blocks"], weight["_scales"]).astype(np.float32)
    assert np.array_equal(ours.swapaxes(1, 2), theirs.float().numpy())


def test_fp8_holds_them_exactly():
    """If no scale in a channel is 2^14 times another: 6 times the largest stays 384, and half the
    smallest is the smallest float of 8 bits."""
    weight = random_weight(2, 96, 16, scales=(110, 125))
    wide = mxfp4.widened(weight["_blocks"], weight["_scales"]).swapaxes(1, 2)
    held = quantise(jnp.asarray(wide), jnp.float8_e4m3fn)
    again = held.values.astype(jnp.float32) * held.scale[:, None]
    assert np.array_equal(np.asarray(again), wide.astype(np.float32))
    in_int8 = quantise(jnp.asarray(wide), jnp.int8)
    rounded = in_int8.values.astype(jnp.float32) * in_int8.scale[:, None]
    assert not np.array_equal(np.asarray(rounded), wide.astype(np.float32))


# Models


CONFIG = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
EXPERTS = "model.layers.{}.mlp.experts."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as gpt-oss is published: bfloat16, and experts in 4 bits."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    a = architecture_of(made)
    wide = tmp_path / "wide"
    huggingface.save(wide, initialise(a, 0, roles().trainer), a, made, "bfloat16")
    named = load_file(wide / "model.safetensors")
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            experts, rows, columns = named.pop(EXPERTS.format(layer) + name).shape
            for end, values in random_weight(experts, rows, columns, (110, 125)).items():
                named[EXPERTS.format(layer) + name + end] = values
    save_tensors(made / "model.safetensors", named)
    return made


def wide_experts(folder: Path, layer: int, name: str) -> np.ndarray:
    """float32[E, in, out] of a folder's packed experts."""
    named = load_file(folder / "model.safetensors")
    place = EXPERTS.format(layer) + name
    wide = mxfp4.widened(named[f"{place}_blocks"], named[f"{place}_scales"])
    return wide.astype(np.float32).swapaxes(1, 2)


@pytest.mark.parametrize("windows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_are_widened_on_all_devices(folder, monkeypatch, windows):
    if windows:  # parts of rows, which begin within a block
        monkeypatch.setattr(weight_layout, "SMALL_BYTES", 0)
        monkeypatch.setattr(weight_layout, "WINDOW_BYTES", 700)
    a = architecture_of(folder)
    loaded = huggingface.load(folder, a, roles(fsdp=4, tensor=2).trainer)
    for layer, block in enumerate(loaded.blocks.blocks):
        both = wide_experts(folder, layer, "gate_up_proj")
        assert np.array_equal(block.experts.gate.kernel[0], both[..., ::2])
        assert np.array_equal(block.experts.up.kernel[0], both[..., 1::2])
        down = wide_experts(folder, layer, "down_proj")
        assert np.array_equal(block.experts.down.kernel[0], down)


@pytest.mark.parametrize("axes", [{}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_each_byte_of_an_expert_is_read_once(folder, monkeypatch, axes):
    """However many devices share its rows; those of gate and up, which alternate, once for each."""
    monkeypatch.setattr(weight_layout, "SMALL_BYTES", 0)
    counts = np.zeros((folder / "model.safetensors").stat().st_size, int)
    read_rows = StoredTensor.read

    def counting(self: StoredTensor, start: int, values: np.ndarray) -> None:
        if values.size:
            position = self.offset + start * values[0].nbytes
            counts[position : position + values.nbytes] += 1
        read_rows(self, start, values)

    monkeypatch.setattr(StoredTensor, "read", counting)
    a = architecture_of(folder)
    tensors = huggingface.open_tensors(folder, a)
    experts = file_specs(a, param_specs(a)).blocks.blocks[0].experts
    # least and most often that a byte of the product's tensor has been read after each
    times = ((experts.down, 1, 1), (experts.up, 0, 1), (experts.gate, 1, 2))
    for product, least, most in times:
        spec = product.kernel
        (array,) = huggingface.read_tensors(tensors, [spec], roles(**axes).trainer, jnp.bfloat16)
        assert array.shape == spec.shape
        packed = tensors[spec.key].tensors[0]
        assert isinstance(packed, mxfp4.Mxfp4Tensor)
        for stored in (packed.blocks, packed.scales):
            found = counts[stored.offset : stored.offset + math.prod(stored.shape)]
            assert (found.min(), found.max()) == (least, most)
    assert counts.max() == 2


def bits(folder: Path) -> dict[str, bytes]:
    return {name: t.tobytes() for name, t in load_file(folder / "model.safetensors").items()}


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_was_not_trained_stays_in_4_bits(folder, tmp_path, dtype):
    """Also if the attention was trained, or an adapter of it merged."""
    a = architecture_of(folder)
    loaded = huggingface.load(folder, a, roles().trainer)
    first, second = loaded.blocks.blocks
    trained = replace(first, sinks=first.sinks + 1)
    parameters = replace(loaded, blocks=replace(loaded.blocks, blocks=(trained, second)))
    huggingface.save(tmp_path / "out", parameters, a, folder, dtype)
    before, after = bits(folder), bits(tmp_path / "out")
    assert before.keys() == after.keys()
    differing = {name for name in before if before[name] != after[name]}
    assert not {name for name in differing if name.endswith(("_blocks", "_scales"))}
    assert differing == {"model.layers.0.self_attn.sinks"} or dtype == "float32"
    assert config_in(tmp_path / "out") == {**CONFIG, "torch_dtype": dtype}


def test_trained_experts_are_written_wide(folder, tmp_path):
    """All of them: a folder has one entry for the experts of all layers."""
    a = architecture_of(folder)
    loaded = huggingface.load(folder, a, roles().trainer)
    first, second = loaded.blocks.blocks
    down = second.experts.down
    changed = replace(down, kernel=down.kernel.at[0, 3, 31, 63].add(0.5))
    trained = replace(second, experts=replace(second.experts, down=changed))
    parameters = replace(loaded, blocks=replace(loaded.blocks, blocks=(first, trained)))
    huggingface.save(tmp_path / "out", parameters, a, folder, "bfloat16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in written if name.endswith(("_blocks", "_scales"))]
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            found = written[EXPERTS.format(layer) + name]
            assert found.dtype == jnp.bfloat16
            differs = np.argwhere(found.astype(np.float32) != wide_experts(folder, layer, name))
            is_changed = (layer, name) == (1, "down_proj")
            assert differs.tolist() == ([[3, 31, 63]] if is_changed else [])
    assert "quantization_config" not in config_in(tmp_path / "out")
    again = huggingface.load(tmp_path / "out", architecture_of(tmp_path / "out"), roles().trainer)
    assert np.array_equal(again.blocks.blocks[0].experts.up.kernel, first.experts.up.kernel)


def test_frozen_experts_in_8_bits_are_those_of_the_files(folder):
    """With model.quantise=fp8 and an adapter; a note says so."""
    section = ModelSection(path=str(folder), quantise="fp8", lora=LoraSection(rank=2))
    source = resolve_model(section)
    loaded = source.load(roles().trainer, jnp.float32)
    down = loaded.blocks.blocks[1].experts.down.kernel
    if isinstance(down, Adapted):
        down = down.kernel
    assert down.values.dtype == jnp.float8_e4m3fn
    wide = down.values[0].astype(jnp.float32) * down.scale[0][:, None]
    assert np.array_equal(np.asarray(wide), wide_experts(folder, 1, "down_proj"))
    (note,) = [note for note in source.notes if "4 bits" in note.text]
    assert "4 tensors of experts, in 4 bits (mxfp4), are widened" in note.text


def test_packed_experts_that_do_not_fit_are_named(folder):
    named = load_file(folder / "model.safetensors")
    name = EXPERTS.format(1) + "down_proj_scales"
    save_tensors(folder / "model.safetensors", named | {name: named[name][:2]})
    with pytest.raises(ShoalError, match=r"missing: model.layers.1.mlp.experts.0.down_proj.weight"):
        huggingface.open_tensors(folder, architecture_of(folder))
