"""Whole runs of a tiny model whose devices share the experts (`mesh.expert`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small import roles
from tiny_runs import Workshop, by_path, checkpoints, groups, metrics, same_bits, trainer

from shoal import cli
from shoal.model.families import architecture_of
from shoal.runs.metrics import is_clock
from shoal.weights.checkpoints import load_parameters

SETTINGS = ("steps=4", "checkpoint.every=2", "algorithm.kl_coef=0.05", "optimizer.lr=1e-3")
SPLIT = ("mesh.fsdp=2", "mesh.expert=2", "mesh.sampler_tensor=2")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("experts"), "qwen3_moe")


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(workshop):
    whole = workshop.train("whole", *SETTINGS, *SPLIT)
    cut = workshop.train("cut", *SETTINGS, *SPLIT, "steps=2")
    assert checkpoints(cut)[-1] == 2
    assert cli.main(["train", f"resume={cut}", "steps=4"]) == 0
    for ours, theirs in zip(metrics(cut), metrics(whole), strict=True):
        assert theirs["sampler_gap/logprob_max"] < 1e-4
        for name in theirs:
            if not is_clock(name):
                assert ours[name] == theirs[name], name
    a = architecture_of(workshop.model)
    ours = by_path(load_parameters(cut, 4, a, trainer()))
    assert same_bits(ours, by_path(load_parameters(whole, 4, a, trainer())))
    assert groups(cut, 3) == groups(whole, 3)


@pytest.mark.slow
def test_a_checkpoint_moves_between_meshes(workshop):
    """From one device to devices that share the experts, and on from there."""
    run = workshop.train("moved", *SETTINGS, "steps=2")
    a = architecture_of(workshop.model)
    split = load_parameters(run, 2, a, roles(fsdp=2, expert=2).trainer)
    assert split.blocks.experts.gate.sharding.spec[:2] == (None, "expert")
    assert same_bits(by_path(split), by_path(load_parameters(run, 2, a, trainer())))
    alone = workshop.train("alone", *SETTINGS)
    assert cli.main(["train", f"resume={run}", "steps=4", *SPLIT]) == 0
    assert groups(run, 2) == groups(alone, 2)
    for ours, theirs in zip(metrics(run), metrics(alone), strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    back = load_parameters(run, 4, a, trainer())
    assert all(np.isfinite(leaf).all() for leaf in by_path(back).values())


@pytest.mark.slow
def test_a_samplers_devices_share_experts_where_the_trainers_do_not(workshop):
    split = ("mesh.fsdp=2", "mesh.sampler_tensor=2", "steps=2")
    run = workshop.train("sampler", *SETTINGS, *split)
    alone = workshop.train("sampler-alone", *SETTINGS, "steps=2")
    for ours, theirs in zip(metrics(run), metrics(alone), strict=True):
        assert ours["sampler_gap/logprob_max"] < 1e-4
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3) != 0
    # A command that only samples takes the mesh as it is told.
    words = ("task=gsm8k", f"task.path={workshop.data}", f"reward={workshop.rewards}:letters")
    lengths = ("sampling.max_prompt_tokens=64", "sampling.max_completion_tokens=12")
    mesh = ("mesh.data=2", "mesh.sampler_tensor=2")
    assert cli.main(["eval", f"model={run}", *words, *lengths, *mesh]) == 0


@pytest.mark.slow
def test_an_adapter_on_shared_experts_is_trained(workshop):
    targets = "model.lora.targets=[experts.gate_up_proj,experts.down_proj]"
    run = workshop.train("adapter", *SETTINGS, *SPLIT, "model.lora.rank=2", targets)
    alone = workshop.train("adapter-alone", *SETTINGS, "model.lora.rank=2", targets)
    for ours, theirs in zip(metrics(run), metrics(alone), strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3) != 0
    out = workshop.folder / "exported"
    assert cli.main(["export", f"from={run}", f"to={out}"]) == 0
    assert (out / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("family", "words", "message"),
    [
        ("qwen3_moe", ["mesh.expert=8"], "mesh.expert=8 does not divide the model's num_experts=4"),
        (
            "qwen3_moe",
            ["mesh.expert=2", "mesh.fsdp=4", "mesh.sampler_tensor=8"],
            "mesh.sampler_tensor",
        ),
        ("qwen3", ["mesh.expert=2"], "mesh.expert=2: this model has no experts"),
    ],
)
def test_experts_that_devices_cannot_share_are_refused(
    family, words, message, tmp_path: Path, capfd
):
    """Before weights are read: these could not be."""
    made = Workshop(tmp_path, family)
    (made.model / "model.safetensors").write_bytes(b"none")
    assert cli.main(made.words("refused", *words)) == 2
    error = capfd.readouterr().err
    assert message in error and "safetensors" not in error
