"""Recipes: files of settings with the section `about`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from stored_runs import recipe_about

from shoal import cli
from shoal.config.merge import compose
from shoal.config.preset_files import PRESETS, PRESETS_OF_SYSTEMS, RECIPES, recipe_names
from shoal.records import ShoalError
from shoal.tasks.task import TASKS

ABOUT = recipe_about({0: [0.1, 0.2], 2: [0.5, 1.0]})


def with_about(about: object, **settings: object) -> str:
    return yaml.safe_dump({"model": {"path": "tiny"}, **settings, "about": about})


def without(*path: str) -> dict:
    """ABOUT without the field at this path."""
    about = yaml.safe_load(yaml.safe_dump(ABOUT))
    section = about
    for name in path[:-1]:
        section = section[name]
    del section[path[-1]]
    return about


def test_packaged_recipes_compose_and_none_has_the_name_of_a_task_or_preset():
    assert recipe_names() == [
        "alphabet-sort-qwen3-4b",
        "gsm8k-qwen2.5-0.5b",
        "gsm8k-qwen2.5-1.5b",
        "guess-a-number",
        "short-answers",
        "word-problems",
    ]
    others = {
        file.stem for folder in (PRESETS, PRESETS_OF_SYSTEMS) for file in folder.glob("*/*.yaml")
    }
    assert not {*recipe_names()} & {*TASKS, *others}
    for name in recipe_names():
        config, resolved = compose("train", [f"config_name={name}"])
        recipe = resolved.recipe
        assert recipe is not None and recipe.name == name and recipe.config == config
        assert bool(recipe.band) != bool(recipe.unmeasured)
        assert f"config_name={name}" in (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
        if recipe.band:
            # The last evaluation and the first are always made.
            assert {0, config.steps} <= {*recipe.band.steps} <= {*range(0, 101, 5)}


def test_the_default_run_is_the_recipe_of_word_problems():
    by_recipe, _ = compose("train", ["config_name=word-problems"])
    default, _ = compose("train")
    assert by_recipe.train.evaluate_every == 10  # which -2 stands for
    changed = by_recipe.train.__class__()
    assert by_recipe.__class__(**{**vars(by_recipe), "train": changed}) == default


def test_a_recipe_is_an_own_file_too_and_may_lie_beneath_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(with_about(ABOUT, steps=2))
    Path("above.yaml").write_text("defaults: [mine, _self_]\noptimizer: {lr: 1.0e-3}\n")
    for words, lr in (
        (["mine.yaml"], 1.5e-4),
        (["config=mine.yaml", "optimizer.lr=1e-3"], 1e-3),
        (["above.yaml"], 1e-3),
    ):
        config, resolved = compose("train", words)
        assert config.optimizer.lr == lr and config.steps == 2
        recipe = resolved.recipe
        assert recipe is not None and recipe.name == "mine"
        assert recipe.config.optimizer.lr == 1.5e-4, "the recipe's own settings"
        assert recipe.band is not None and recipe.band.steps == {0: (0.1, 0.2), 2: (0.5, 1.0)}
    assert compose("train", ["steps=2"])[1].recipe is None


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_other_commands_on_a_training_job_read_recipes_too(command):
    config, resolved = compose(command, ["config_name=short-answers"])
    assert resolved.recipe is not None and config.steps == 15


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("a text", r"mine\.yaml: about is 'a text': expected a section with fields"),
        (without("what"), r"mine\.yaml: about\.what is missing"),
        (without("hardware"), r"about\.hardware is missing"),
        (without("seconds"), r"about\.seconds is missing"),
        (without("measured"), r"about\.measured is missing"),
        (without("expected"), r"about\.expected is missing, and about\.measured is there"),
        ({"what": "a", "hardware": "b"}, r"about has no `expected`.*`unmeasured`"),
        ({**ABOUT, "unmeasured": "why"}, r"has `expected` and `unmeasured`"),
        ({**ABOUT, "sceonds": 3}, r"about\.sceonds: there is no such field, did you mean seconds"),
        ({**ABOUT, "seconds": "long"}, r"about\.seconds: expected a number above 0, got 'long'"),
        (without("expected", "metric"), r"about\.expected\.metric is missing"),
        (without("expected", "seeds"), r"about\.expected\.seeds is missing"),
        (without("expected", "steps"), r"about\.expected\.steps is missing"),
        (
            {**ABOUT, "expected": {**ABOUT["expected"], "seeds": 1}},
            r"expected\.seeds: expected 2 or more, got 1",
        ),
        (
            {**ABOUT, "expected": {**ABOUT["expected"], "steps": {0: [0.2, 0.1]}}},
            r"expected\.steps\.0: expected \[lowest, highest\]",
        ),
        (
            {**ABOUT, "expected": {**ABOUT["expected"], "steps": {"last": [0.1, 0.2]}}},
            r"expected\.steps\.last: expected the number of a step",
        ),
        (without("measured", "weights"), r"about\.measured\.weights is missing"),
        (without("measured", "versions"), r"about\.measured\.versions is missing"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_one_line(about, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(with_about(about))
    with pytest.raises(ShoalError, match=message):
        compose("train", ["mine.yaml"])
    assert cli.main(["train", "mine.yaml"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not Path("outputs").exists()


def test_an_unknown_name_lists_the_recipes():
    with pytest.raises(ShoalError, match=r"word-problem: no preset .* mean word-problems\?"):
        compose("train", ["config_name=word-problem"])
    with pytest.raises(ShoalError, match="short-answers"):
        compose("train", ["config_name=help"])
    with pytest.raises(ShoalError, match="did you mean --config-name short-answers"):
        compose("train", ["short-answers"])
