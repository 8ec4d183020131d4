"""Runs that follow a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from stored_runs import recipe_about

import shoal
from shoal import cli
from shoal.config.merge import compose
from shoal.records import ShoalError
from shoal.runs.layout import RECIPE
from shoal.runs.reader import StoredRun

SETTINGS = {
    "steps": 2,
    "model": {"path": "tiny"},
    "task": {"num_eval_questions": 4},
    "sampling": {"max_completion_tokens": 8},
    "batch": {"prompts_per_step": 2, "group_size": 2},
    "train": {"evaluate_every": 1, "pass_k": 0},
}


def write_recipe(low: float = 0.0, parameters: int = 875520) -> None:
    about = recipe_about({0: [0.0, 1.0], 1: [low, 1.0], 2: [0.0, 1.0]}, parameters, jax="0.0.1")
    Path("mine.yaml").write_text(yaml.safe_dump({**SETTINGS, "about": about}))


@pytest.mark.slow
def test_a_run_follows_its_recipe_also_when_it_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_recipe(low=0.99)
    assert cli.main(["train", "mine.yaml", "run_name=a", "optimizer.lr=1e-6"]) == 0
    printed = capsys.readouterr().out
    assert "recipe mine: a model learns\n" in printed
    assert (
        "the band was measured with optimizer.lr=0.00015; this run has optimizer.lr=1e-06"
        in printed
    )
    assert "the band was measured with weights 0x00000012 float32; this run has 0x" in printed
    assert "recipe mine, step 0: 0.0%, 3 seeds had 0.0% to 100.0%" in printed
    warning = "warning: this run differs from recipe mine in optimizer.lr=1e-06 (there 0.00015), "
    assert f"{warning}the first weights, jax " in printed
    assert printed.index("recipe mine, step 0") < printed.index(warning)

    run = StoredRun(Path("outputs/a"))
    recipe = run.recipe()
    assert recipe is not None and recipe.name == "mine" and recipe.config.optimizer.lr == 1.5e-4
    packaged = compose("train", ["config_name=word-problems"])[1].recipe
    assert packaged is not None and packaged.measured is not None
    assert recipe.weights_here == packaged.measured.weights, "of the packaged model"
    assert any(event.text.startswith("this run differs") for event in run.events())

    # The recipe is in the run's folder: the file may be gone.
    Path("mine.yaml").unlink()
    assert cli.main(["train", "resume=outputs/a", "steps=3"]) == 0
    printed = capsys.readouterr().out
    assert "recipe mine: a model learns" in printed and "this run has 0x" in printed
    assert run.recipe() == recipe

    (run.path / RECIPE).write_text("about: {what: a}\n")
    assert cli.main(["train", "resume=outputs/a", "steps=4"]) == 2
    assert "recipe.yaml is damaged" in capsys.readouterr().err
    (run.path / RECIPE).unlink()
    assert cli.main(["train", "resume=outputs/a", "steps=4"]) == 0
    assert "recipe" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_band_of_another_model_is_named_before_weights_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_recipe(parameters=7)
    monkeypatch.setattr("shoal.commands.train.open_run", lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "mine.yaml"])
    assert (
        "the band was measured with a model of 7 parameters (tiny); this run has one of 875,520: "
        "its evaluations are not compared with the band" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_recipe_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe()
    result = shoal.train(config_name="mine.yaml", steps=1, run_name="a")
    assert StoredRun(result.folder).recipe() is not None
    with pytest.raises(ShoalError, match=r"no preset or YAML file has this name.*word-problems"):
        shoal.train(config_name="no-such-recipe")


def test_the_data_and_reward_of_short_answers_come_with_the_package(tmp_path, monkeypatch):
    from shoal.job.task import load_task

    monkeypatch.chdir(tmp_path)
    config, _ = compose("train", ["config_name=short-answers"])
    task = load_task(config.task, config.reward)
    [reward] = task.rewards
    answers = [[{"role": "assistant", "content": "word " * words}] for words in (0, 1, 6, 23, 40)]
    assert reward.function(completions=answers) == [0.0, 1.0, 1.0, 0.5, 0.0]
    assert len(task.train) == 80 and len(task.evaluations["held_out"]) == 8


@pytest.mark.slow
def test_short_answers_run_outside_of_a_clone_with_any_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["model=tiny", "batch.prompts_per_step=2", "batch.group_size=4", "run_name=brief"]
    words += ["steps=1", "sampling.max_completion_tokens=12", "model.lora.rank=2"]
    assert cli.main(["train", "config_name=short-answers", *words]) == 0
    (reward,) = shoal.load_run("outputs/brief").metrics["reward/mean"]
    assert 0 < reward <= 1
    printed = capsys.readouterr().out
    assert (
        "a model of 134,515,008 parameters" in printed
        and "recipe short-answers, step" not in printed
    )
    stored = StoredRun(Path("outputs/brief")).recipe()
    assert stored is not None and not stored.holds and "134,515,008" in stored.apart
    # The run's copy is a recipe by itself.
    again = compose("train", ["outputs/brief/recipe.yaml"])[1].recipe
    assert again is not None and again.name == "short-answers" and again.config == stored.config
