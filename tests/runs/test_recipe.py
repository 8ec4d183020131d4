"""What a run says of its recipe: what differs, and where its evaluations lie in the band."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.config.merge import compose
from shoal.config.recipe_files import Band, Measurement, Recipe
from shoal.report.watch import Watch
from shoal.runs.recipe import Followed, settings_apart

ACCURACY = "evaluate/held_out/accuracy"


def recipe(metric: str = ACCURACY, *words: str) -> Recipe:
    config, _ = compose("train", words)
    return Recipe(
        name="mine",
        what="a model learns",
        hardware="two cores",
        about={},
        seconds=80,
        band=Band(metric, 5, {0: (0.37, 0.37), 20: (0.489, 0.531)}),
        measured=Measurement("c", "2026-11-30", "cpu", {"jax": "0.10.2"}, 1000, "0x1 float32"),
        config=config,
    )


def followed(*words: str, parameters: int = 1000, metric: str = ACCURACY) -> Followed:
    """The recipe `mine`, followed by a run with these words."""
    mine = recipe(metric)
    requested, _ = compose("train", words)
    return Followed(mine, settings_apart(mine, requested), parameters, {"jax": "0.10.2"})


def test_an_evaluation_lies_in_the_band():
    run = followed()
    figures = {"held_out": {"accuracy": 0.512, "protocol": "greedy"}, "other": {"accuracy": 0.1}}
    position = run.position(20, figures)
    assert position is not None and position.shortfall < 0
    assert position.text == "recipe mine, step 20: 51.2%, 5 seeds had 48.9% to 53.1%"
    assert Watch().recipe(position) == []
    assert run.position(10, figures) is None, "the band has no such step"
    assert run.position(20, {"held_out": {"mean_reward": 0.5}}) is None, "nor such a metric"


def test_below_the_band_what_differs_is_said_first_and_once():
    run = followed("optimizer.lr=1e-6", "batch.group_size=4")
    run = replace(run, versions={"jax": "0.12.0"}, weights="0x2 float32")
    position = run.position(20, {"held_out": {"accuracy": 0.45}})
    assert position is not None and position.shortfall == pytest.approx(0.039)
    watch = Watch()
    [finding] = watch.recipe(position)
    assert str(finding.text).startswith(
        "this run differs from recipe mine in optimizer.lr=1e-06 (there 0.00015), "
        "batch.group_size=4 (there 8), the first weights, jax 0.12.0 (there 0.10.2); below its "
        "band: recipe mine, step 20: 45.0%, 5 seeds had 48.9% to 53.1%"
    )
    assert "docs/reward-does-not-move.md#a-run-is-below-its-recipe" in finding.text
    assert finding.level == "warning" and watch.recipe(position) == []


def test_below_the_band_with_nothing_that_differs_chance_is_named():
    position = followed().position(20, {"held_out": {"accuracy": 0.45}})
    assert position is not None
    assert position.differs == (
        "nothing that is known differs from recipe mine; by chance one seed in 6 is below 5 others"
    )


@pytest.mark.parametrize(
    "word",
    [
        "seed=3",
        "model=tiny-tools",
        "steps=80",
        "train.evaluate_every=5",
        "checkpoint.every=3",
        "run_name=a",
        "mesh.fsdp=2",
        "report.groups=false",
    ],
)
def test_what_does_not_change_the_band_is_no_difference(word):
    assert not followed(word).settings


def test_the_start_says_what_the_band_was_measured_with():
    lines = followed().start_texts()
    assert lines == [
        "recipe mine: a model learns",
        "recipe mine took 1:20 on two cores; 5 seeds had 48.9% to 53.1% at step 20 "
        f"({ACCURACY}, 2026-11-30)",
    ]
    run = followed("batch.group_size=4", "batch.prompts_per_step=8")
    assert run.start_texts()[-1] == (
        "the band was measured with batch.prompts_per_step=32, batch.group_size=8; this run has "
        "batch.prompts_per_step=8, batch.group_size=4"
    )
    assert run.band is not None


@pytest.mark.parametrize(
    ("words", "parameters", "metric", "text"),
    [
        ((), 7, ACCURACY, "with a model of 1,000 parameters (tiny); this run has one of 7"),
        (("task=calculator",), 1000, ACCURACY, "with task.name=words"),
        (("task.max_value=50",), 1000, ACCURACY, "max_value=99; this run has task.max_value=50"),
        (("reward=brief_reward",), 1000, "evaluate/held_out/mean_reward", "reward.functions=[]"),
    ],
)
def test_a_band_of_another_model_or_task_is_not_used(words, parameters, metric, text):
    run = followed(*words, parameters=parameters, metric=metric)
    last = run.start_texts()[-1]
    assert text in last and last.endswith(": its evaluations are not compared with the band")
    figures = {"held_out": {"accuracy": 0.1, "mean_reward": 0.1}}
    assert run.band is None and run.position(20, figures) is None


def test_another_reward_leaves_the_band_of_an_accuracy():
    assert followed("reward=brief_reward").band is not None


def test_weights_are_compared_if_they_have_one_type():
    assert followed().with_weights("0x1 float32").weights_text() == ""
    assert followed().with_weights("0x1 bfloat16").weights_text() == ""
    assert "0x1 float32; this run has 0x2" in followed().with_weights("0x2 float32").weights_text()


def test_a_recipe_without_a_band_says_why():
    mine = replace(recipe(), band=None, measured=None, unmeasured="it needs a GPU")
    run = Followed(mine, [], 1, {})
    assert run.start_texts()[-1] == "recipe mine has no band: it needs a GPU"
    assert run.position(20, {"held_out": {"accuracy": 0.1}}) is None
