"""Whole runs of a tiny model of each family: what is trained, resumed, adapted, and played in
turns."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import write_chat_tokenizer
from family_checkpoints import CHECKPOINTS, SUPPORTED
from safetensors.numpy import load_file, save_file
from small import roles
from tiny_models import write_tokenizer
from tiny_runs import Workshop, by_path, checkpoints, groups, metrics, same_bits, trainer
from turn_runs import TurnWorkshop, calling

from shoal import cli
from shoal.model.architecture import EXPERT_PRODUCTS
from shoal.model.families import architecture_of
from shoal.model.parameters import initialise
from shoal.runs.metrics import is_clock
from shoal.weights import huggingface
from shoal.weights.checkpoints import load_parameters

# Of several forms of one model, such as with and without a tower, the text alone is trained.
NAMES = [name for name in SUPPORTED if CHECKPOINTS[name].config.get("text_config") is None]
NAMES = [name for name in NAMES if name not in ("llama3", "qwen2", "qwen3-tied")]


def write_model(folder: Path, name: str, vocabulary: int) -> None:
    """A random model of a family, with the first values that training from nothing has."""
    config = copy.deepcopy(dict(CHECKPOINTS[name].config))
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if key in config:
            config[key] = vocabulary
    described = folder / "described"
    described.mkdir(parents=True)
    (described / "config.json").write_text(json.dumps(config))
    a = architecture_of(described)
    model = folder / "written"
    huggingface.save(model, initialise(a, 0, roles().trainer), a, config=config)
    for file in model.iterdir():
        file.rename(folder / file.name)


@pytest.fixture(scope="module", params=NAMES)
def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("family")
    made = Workshop(folder)
    made.model = folder / "own"
    tokenizer = write_tokenizer(made.model)
    write_model(made.model, request.param, tokenizer.get_vocab_size())
    return made


SETTINGS = ("steps=20", "checkpoint.every=5", "algorithm.kl_coef=0.05", "optimizer.lr=1e-3")


@pytest.mark.slow
def test_twenty_steps_are_finite_and_a_resumed_run_has_the_same_bits(workshop):
    whole = workshop.train("whole", *SETTINGS)
    steps = metrics(whole)
    assert len(steps) == 20
    # The programs of scoring and of the update are compiled, here with little effort, to sums in
    # another order: with experts on any processor, with other families on some processors. A few
    # log-probs then differ by their last bit.
    assert 0 <= steps[0]["kl"] < 1e-13
    for step in steps:
        for name in ("loss", "grad_norm", "kl", "sampler_gap/logprob_mean"):
            assert np.isfinite(step[name])
        assert step["sampler_gap/logprob_max"] < 1e-4
    cut = workshop.train("cut", *SETTINGS, "steps=8")
    assert checkpoints(cut)[-1] == 8
    assert cli.main(["train", f"resume={cut}", "steps=20"]) == 0
    for ours, theirs in zip(metrics(cut), steps, strict=True):
        for name in theirs:
            if not is_clock(name):
                assert ours[name] == theirs[name], name
    a = architecture_of(workshop.model)
    ours = by_path(load_parameters(cut, 20, a, trainer()))
    assert same_bits(ours, by_path(load_parameters(whole, 20, a, trainer())))
    assert groups(cut, 19) == groups(whole, 19)


@pytest.mark.slow
def test_an_adapter_is_trained_and_exported(workshop, tmp_path):
    words = ["model.lora.rank=2"]
    if architecture_of(workshop.model).experts:
        words.append(f"model.lora.targets=[all-linear,{','.join(EXPERT_PRODUCTS)}]")
    run = workshop.train("adapter", "steps=3", *words)
    steps = metrics(run)
    assert all(step["grad_norm"] > 0 for step in steps)
    out = tmp_path / "adapter"
    assert cli.main(["export", f"from={run}", f"to={out}"]) == 0
    assert (out / "adapter_model.safetensors").is_file()


def write_within(folder: Path) -> None:
    """Makes a text model's folder, Gemma 3's, one of a model for several kinds of input: with the
    names of published files, and with a tensor of a tower."""
    text = json.loads((folder / "config.json").read_text())
    config = {**CHECKPOINTS["gemma3"].config, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"vision_tower.vision_model.post_layernorm.weight": np.ones(3, np.float32)}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[f"language_model.{name}"] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.slow
def test_an_adapter_on_a_model_for_several_kinds_of_input_is_resumed_and_exported(tmp_path):
    """With the names of its class; merged, the tower comes back."""
    made = Workshop(tmp_path)
    made.model = tmp_path / "own"
    tokenizer = write_tokenizer(made.model)
    write_model(made.model, "gemma3_text", tokenizer.get_vocab_size())
    write_within(made.model)
    run = made.train("adapter", "steps=1", "model.lora.rank=2")
    assert cli.main(["train", f"resume={run}", "steps=2"]) == 0
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert cli.main(["export", f"from={run}", f"to={adapter}"]) == 0
    for name in load_file(adapter / "adapter_model.safetensors"):
        assert name.startswith("base_model.model.model.language_model.layers.")
    assert cli.main(["export", f"from={run}", f"to={merged}", "merge=true"]) == 0
    assert cli.main(["export", f"from={adapter}", f"to={tmp_path / 'again'}", "merge=true"]) == 0
    base = load_file(made.model / "model.safetensors")
    written, again = (load_file(one / "model.safetensors") for one in (merged, tmp_path / "again"))
    assert written.keys() == again.keys() == base.keys()
    changed = set()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, again[name])
        if not np.array_equal(tensor, base[name]):
            changed.add(name.rpartition(".layers.")[2].split(".")[-2])
    assert changed == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_turns_are_played_and_trained_on(name, tmp_path, monkeypatch):
    calling(monkeypatch)
    made = TurnWorkshop(tmp_path)
    ends = made.model / "generation_config.json"
    kept = ends.read_text()
    made.model = tmp_path / "own"
    made.model.mkdir()
    write_chat_tokenizer(made.model, "qwen3")
    vocabulary = json.loads((made.model / "tokenizer.json").read_text())
    size = len(vocabulary["model"]["vocab"]) + len(vocabulary["added_tokens"])
    write_model(made.model, name, size)
    (made.model / "generation_config.json").write_text(kept)
    run = made.train("turns", "steps=3", "train.max_staleness=0")
    steps = metrics(run)
    assert max(step["turns/mean"] for step in steps) > 1
    for step in steps:
        assert np.isfinite(step["loss"])
        assert step["sampler_gap/logprob_max"] < 1e-4
