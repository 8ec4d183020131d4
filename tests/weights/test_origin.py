"""Models for several kinds of input: their text model is read, and exports have the rest too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tiny_models import save_tensors, write_model
from tiny_runs import Workshop

from shoal.commands.export import export
from shoal.config.commands import ExportConfig
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.mesh import make_roles
from shoal.model.families import architecture_of
from shoal.records import ShoalError
from shoal.weights import huggingface
from shoal.weights.source import resolve_model

ROLE = make_roles(MeshSection(), jax.devices()[:1]).trainer
PREFIXES = ("model.language_model.", "language_model.model.")
TOWER: dict[str, np.ndarray] = {
    "vision_tower.patch.weight": np.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
    "vision_tower.position_ids": np.arange(5, dtype=np.int64),
    "vision_tower.scale": np.array(2.5, np.float32),
    "vision_tower.empty": np.zeros((0, 4), np.float16),
    "multi_modal_projector.mask": np.array([True, False]),
    "mtp.fc.weight": np.full((2, 2), 1 / 3, np.float64),
}


def with_tower(folder: Path, prefix: str = PREFIXES[0], dtype: Any = np.float32) -> Path:
    """Makes a folder of Gemma 3's text model one for images, with a tower and a draft head."""
    named = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        named[name.replace("model.", prefix, 1)] = tensor.astype(dtype)
    save_tensors(folder / "model.safetensors", named | TOWER)
    text = json.loads((folder / "config.json").read_text())
    text.pop("architectures")
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
        "torch_dtype": np.dtype(dtype).name,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def bits(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """(type, shape, bytes) of each tensor in a folder, by the names in its files."""
    return {name: content for file in folder.glob("*.safetensors") for name, content in _bits(file)}


def _bits(file: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...], bytes]]]:
    for name, tensor in load_file(file).items():
        yield name, (str(tensor.dtype), tensor.shape, tensor.tobytes())


def same(a: Any, b: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_text_model_is_read_and_its_towers_come_back(tmp_path, prefix, dtype):
    plain = write_model(tmp_path / "plain", "gemma3", dtype=dtype)
    source = with_tower(write_model(tmp_path / "source", "gemma3"), prefix, dtype)
    a = architecture_of(source)
    assert a == architecture_of(plain)
    parameters = huggingface.load(source, a, ROLE)
    assert same(parameters, huggingface.load(plain, a, ROLE))
    huggingface.save(tmp_path / "saved", parameters, a, source, dtype)
    assert bits(tmp_path / "saved") == bits(source)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved == json.loads((source / "config.json").read_text())
    with safe_open(tmp_path / "saved" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_one_line_says_what_is_passed_over(tmp_path):
    source = resolve_model(ModelSection(path=str(with_tower(write_model(tmp_path, "gemma3")))))
    (note,) = source.notes
    assert note.level == "ok" and "\n" not in note.text
    assert "only the text model is read and trained; " in note.text
    assert (
        "1 tensor of mtp, 1 tensor of multi_modal_projector, 4 tensors of vision_tower" in note.text
    )
    assert resolve_model(ModelSection(path=str(write_model(tmp_path / "a", "gemma3")))).notes == ()


def test_a_tower_keeps_its_types_where_the_text_is_written_in_another(tmp_path):
    source = with_tower(write_model(tmp_path / "source", "gemma3"))
    a = architecture_of(source)
    huggingface.save(
        tmp_path / "saved", huggingface.load(source, a, ROLE), a, source, "bfloat16", 3000
    )
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 3
    saved, stored = bits(tmp_path / "saved"), bits(source)
    assert saved.keys() == stored.keys()
    for name, (dtype, _, content) in saved.items():
        if name in TOWER:
            assert (dtype, content) == (stored[name][0], stored[name][2])
        else:
            assert dtype == "bfloat16"


def test_tensors_of_several_types_keep_them(tmp_path):
    """Where the files' type is written: a file in bfloat16 has norms in float32."""
    folder = write_model(tmp_path / "source", "qwen3", dtype=jnp.bfloat16)
    named = load_file(folder / "model.safetensors")
    for name in named:
        if "norm" in name:
            named[name] = (named[name].astype(np.float32) * np.float32(1 / 3)).astype(np.float32)
    save_tensors(folder / "model.safetensors", named)
    a = architecture_of(folder)
    parameters = huggingface.load(folder, a, ROLE)
    huggingface.save(tmp_path / "same", parameters, a, folder, "bfloat16")
    assert bits(tmp_path / "same") == bits(folder)
    huggingface.save(tmp_path / "half", parameters, a, folder, "float16")
    assert {dtype for dtype, _, _ in bits(tmp_path / "half").values()} == {"float16"}


def test_a_tied_head_that_files_have_is_written_as_the_embedding(tmp_path):
    folder = write_model(tmp_path / "source", "llama3")
    named = load_file(folder / "model.safetensors")
    named["lm_head.weight"] = named["model.embed_tokens.weight"].copy()
    named["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_tensors(folder / "model.safetensors", named)
    a = architecture_of(folder)
    parameters = huggingface.load(folder, a, ROLE)
    huggingface.save(tmp_path / "same", parameters, a, folder)
    assert bits(tmp_path / "same") == bits(folder)
    trained = jax.tree.map(lambda leaf: leaf + 1, parameters)
    huggingface.save(tmp_path / "trained", trained, a, folder)
    saved = load_file(tmp_path / "trained" / "model.safetensors")
    assert np.array_equal(saved["lm_head.weight"], saved["model.embed_tokens.weight"])
    assert not np.array_equal(saved["lm_head.weight"], named["lm_head.weight"])


def test_a_head_that_files_lack_lies_at_the_top(tmp_path):
    """As when a text model's tied head was untied."""
    source = with_tower(write_model(tmp_path / "source", "gemma3"), PREFIXES[1])
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(config))
    named = load_file(source / "model.safetensors")
    named["lm_head.weight"] = named["language_model.model.embed_tokens.weight"] + 1
    save_tensors(source / "model.safetensors", named)
    a = architecture_of(source)
    parameters = huggingface.load(source, a, ROLE)
    named["language_model.lm_head.weight"] = named.pop("lm_head.weight")
    save_tensors(source / "model.safetensors", named)
    assert same(parameters, huggingface.load(source, a, ROLE))
    huggingface.save(tmp_path / "saved", parameters, a, source)
    assert bits(tmp_path / "saved") == bits(source)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.language_model.extra.weight", r"left over: model\.extra\.weight"),
        (
            "model.norm.weight",
            r"two tensors for one parameter: model\.language_model\.norm.* and model\.norm\.weight",
        ),
        ("somewhere.else", r"left over: somewhere\.else"),
    ],
)
def test_what_is_neither_text_nor_tower_is_refused(tmp_path, name, said):
    source = with_tower(write_model(tmp_path, "gemma3"))
    named = load_file(source / "model.safetensors")
    save_tensors(source / "model.safetensors", {**named, name: np.zeros(32, np.float32)})
    with pytest.raises(ShoalError, match=said):
        huggingface.load(source, architecture_of(source), ROLE)


def test_a_type_that_cannot_be_copied_is_named(tmp_path):
    source = with_tower(write_model(tmp_path / "source", "gemma3"))
    file = source / "model.safetensors"
    content = file.read_bytes()
    # a type of one byte in place of another
    assert content.count(b'"BOOL"') == 1
    file.write_bytes(content.replace(b'"BOOL"', b'"I8"  ').replace(b'"I64"', b'"C64"'))
    a = architecture_of(source)
    parameters = huggingface.load(source, a, ROLE)
    with pytest.raises(ShoalError, match=r"vision_tower\.position_ids has the type C64"):
        huggingface.save(tmp_path / "saved", parameters, a, source)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("other", ["qwen3", "gemma3"])
def test_another_model_gives_nothing_but_its_tokenizer(tmp_path, other):
    """A folder of weights of other sizes is no origin, though it is named as a source."""
    a = architecture_of(write_model(tmp_path / "source", "gemma3"))
    parameters = huggingface.load(tmp_path / "source", a, ROLE)
    tokenizer = write_model(tmp_path / "other", other, num_hidden_layers=6)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    huggingface.save(tmp_path / "saved", parameters, a, tokenizer, config=config)
    assert bits(tmp_path / "saved") == bits(tmp_path / "source")


@pytest.mark.slow
def test_exports_of_runs_have_the_towers_of_what_they_began_with(tmp_path, capsys):
    shop = Workshop(tmp_path, "gemma3", num_key_value_heads=2)
    stored = bits(with_tower(shop.model))
    first = shop.train("first", "optimizer.lr=0")
    assert "tensors of vision_tower" in capsys.readouterr().out
    # a run from a run, with an adapter
    shop.train("second", f"model={first}", "model.lora.rank=2")
    second = shop.runs / "second"
    for run, name, merge in ((first, "one", False), (second, "two", True)):
        export(ExportConfig(source=str(run), to=str(tmp_path / name), merge=merge))
        exported = bits(tmp_path / name)
        assert exported.keys() == stored.keys()
        assert {name: exported[name] for name in TOWER} == {name: stored[name] for name in TOWER}
        assert (exported == stored) == (run == first)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["model_type"] == "gemma3"
    assert "towers" not in capsys.readouterr().out
    # The model is gone: a text model is what is left.
    shutil.move(shop.model, tmp_path / "elsewhere")
    export(ExportConfig(source=str(first), to=str(tmp_path / "text")))
    said = [line for line in capsys.readouterr().out.splitlines() if "towers" in line]
    assert len(said) == 1 and "only the text model is written" in said[0]
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["model_type"] == "gemma3_text" and config["torch_dtype"] == "float32"
    expected = {}
    for name, content in stored.items():
        if name not in TOWER:
            expected[name.replace("model.language_model.", "model.")] = content
    assert bits(tmp_path / "text") == expected
    a = architecture_of(tmp_path / "text")
    assert a == architecture_of(first / "model")
