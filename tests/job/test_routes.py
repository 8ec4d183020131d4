"""Runs of a tiny model with experts, in which the trainer sends tokens to the experts that the
sampler sent them to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import polars
import pytest
from tiny_models import write_model
from tiny_runs import Workshop, groups, metrics, parameters_of, same_bits
from turn_runs import TurnWorkshop, calling

from shoal import cli
from shoal.commands.replay import replay
from shoal.config.commands import ReplayConfig
from shoal.runs.groups import read_file

pytestmark = pytest.mark.slow

OWN_ROUTES = "sampler_gap/logprob_mean_own_routes"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("routes"), "qwen3_moe")


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    return workshop.train("on", "steps=12", "checkpoint.every=6")


def file_of(run: Path, step: int) -> Path:
    return run / "groups" / f"step_{step:06d}.parquet"


def test_the_experts_of_each_token_are_in_the_record(run):
    for entry in read_file(file_of(run, 1)):
        group = entry.group
        (of_prompt,) = group.experts_by_prompt().values()
        assert of_prompt.shape == (len(group.prompt_ids), 2, 2)
        for one in group.completions:
            experts = one.extra["experts"]
            assert experts.dtype == of_prompt.dtype == np.uint8
            assert experts.shape == (len(one), 2, 2)
            # Two different ones of four, but for the last token, which was not computed.
            assert experts.max() <= 3
            assert (experts[:-1, :, 0] != experts[:-1, :, 1]).all()
            assert not experts[-1].any()


def test_an_evaluation_records_none(run):
    files = [file for file in (run / "groups").iterdir() if not file.name.startswith("step_")]
    assert files
    for file in files:
        assert not [name for name in polars.read_parquet_schema(file) if "experts" in name]


def test_the_effect_is_among_the_metrics(run):
    for number, step in enumerate(metrics(run)):
        # Both compute in float32 on the same devices: none changes its expert.
        assert step["experts/rerouted"] == 0.0
        assert (OWN_ROUTES in step) == (number in (0, 10))
        if OWN_ROUTES in step:
            assert step[OWN_ROUTES] == pytest.approx(step["sampler_gap/logprob_mean"], abs=2e-6)


def test_groups_are_sampled_and_trained_on_again_bit_for_bit(run, capsys):
    """Version 8 has no checkpoint: two updates are made again, with the recorded experts."""
    assert json.loads((run / "summary.json").read_text())["steps"] == 12
    capsys.readouterr()
    assert cli.main(["replay", str(run), "step=9", "group=1", "json=true"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["identical"]
    assert replayed["weights"]["updates_retrained"] == 2
    assert replayed["weights"]["verified"] is True


def test_without_replay_nothing_is_recorded_and_the_same_tokens_are_sampled(workshop, run):
    off = workshop.train("off", "steps=1", "model.router_replay=off")
    (step,) = metrics(off)
    assert "experts/load_max" in step
    assert "experts/rerouted" not in step and OWN_ROUTES not in step
    assert not [name for name in polars.read_parquet_schema(file_of(off, 1)) if "experts" in name]
    for ours, theirs in zip(groups(off, 1), groups(run, 1), strict=True):
        for one, other in zip(ours["completions"], theirs["completions"], strict=True):
            assert one["token_ids"] == other["token_ids"]
            assert one["logprobs"] == other["logprobs"]


def test_a_sampler_that_chooses_other_experts_is_followed(workshop):
    """8-bit weights change logits of the router: log-probs of the trainer are nearer to those of
    the sampler if it uses the sampler's experts."""
    words = ("steps=1", "sampler.quantise=int8", "batch.group_size=8", "seed=3")
    (step,) = metrics(workshop.train("rerouted", *words))
    assert 0 < step["experts/rerouted"] < 0.2
    assert step["sampler_gap/logprob_mean"] < 0.9 * step[OWN_ROUTES]
    (off,) = metrics(workshop.train("rerouted_off", *words, "model.router_replay=off"))
    assert off["sampler_gap/logprob_mean"] == pytest.approx(step[OWN_ROUTES], rel=0.02)


def test_a_killed_run_goes_on_with_the_same_routes(workshop, run):
    cut = workshop.train("cut", "steps=8", "checkpoint.every=6")
    shutil.rmtree(cut / "checkpoints" / "8")  # as if it was killed in step 8
    assert cli.main(["train", f"resume={cut}", "steps=12"]) == 0
    for step in (8, 12):
        table = polars.read_parquet(file_of(cut, step))
        assert table["experts"].null_count() == 0
        assert table.equals(polars.read_parquet(file_of(run, step)))
    assert same_bits(parameters_of(cut, 12), parameters_of(run, 12))


def test_turns_keep_the_routes_of_context_and_are_sampled_and_trained_on_again(
    tmp_path, monkeypatch
):
    """Rollouts overlap with training: a prompt may be of one version, later turns of another."""
    calling(monkeypatch)
    made = TurnWorkshop(tmp_path)
    size = json.loads((made.model / "config.json").read_text())["vocab_size"]
    write_model(made.model, "qwen3_moe", vocab_size=size)
    run = made.train("turns")
    context = 0
    for step in (1, 2, 3):
        for entry in read_file(file_of(run, step)):
            assert entry.group.experts_by_prompt()
            for one in entry.group.completions:
                experts = one.extra["experts"]
                assert (experts[:-1, :, 0] != experts[:-1, :, 1]).all()
                context += np.count_nonzero(~one.loss_mask)
    assert context > 20
    first, *later = metrics(run)
    assert first["experts/rerouted"] == 0.0
    assert first["sampler_gap/logprob_max"] < 1e-4
    # Sampled from weights one update before: the router has moved, the experts are kept.
    assert all(0 < step["experts/rerouted"] < 0.5 for step in later)
    for step in (1, 3):
        result = replay(ReplayConfig(run=str(run), step=step, group=1))
        assert result["identical"] and result["weights"]["verified"] in (None, True)
