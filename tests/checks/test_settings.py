"""Settings of the algorithm that are refused, or warned of, before a run."""

from __future__ import annotations

import pytest

from shoal.checks.settings import (
    algorithm_warnings,
    check_model,
    check_trainable,
    reward_preset_notes,
)
from shoal.config.choices import POLICY_LOSSES, PolicyLoss
from shoal.config.merge import compose
from shoal.config.sections.model import ModelSection
from shoal.records import ShoalError
from shoal.tasks.task import Task
from shoal.weights import source


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["algorithm.loss=gspo"], "practically never clips"),
        (["algorithm.kl=k1", "algorithm.kl_coef=0.1"], "regularises nothing"),
        (["sampling.top_p=0.9"], "kept, stored and replayed"),
        (["sampling.top_p=0.9", "algorithm.match_sampling_support=false"], "the ratio is biased"),
        (
            ["algorithm.loss=cispo", "algorithm.clip_dual=3"],
            "has no effect on algorithm.loss=cispo",
        ),
        (["algorithm.loss=cispo", "algorithm.cispo_bound=absolute"], "5 is usual"),
        (["algorithm.kl_coef=1", "algorithm.kl_placement=reward"], "k1 is the unbiased one"),
        (
            ["algorithm.advantage=maxrl", "reward.overlong_buffer_tokens=9"],
            "a group with one below 0",
        ),
        (
            ["train.weight_sync_interval=3", "algorithm.correction=none"],
            "samples may be 2 versions old",
        ),
        (
            ["train.max_staleness=1", "algorithm.correction=none", "algorithm.num_epochs=2"],
            "samples may be 1 version old",
        ),
        (
            ["algorithm=gspo", "algorithm.advantage=none", "teacher.path=x"],
            "set algorithm.loss=gspo-token",
        ),
        (["algorithm=gmpo", "teacher.path=x"], "averaged over the completion"),
        (
            ["algorithm.dynamic_sampling=true", "reward=f.py:f"],
            "algorithm.dynamic_sampling_by=reward uses what they",
        ),
        (
            ["algorithm.clip_low=0.1", "algorithm.clip_high=0.3"],
            "clip_low=0.1, algorithm.clip_high=0.3 cannot act",
        ),
        (["algorithm.clip_dual=3"], "algorithm.clip_dual=3 cannot act: with one update a step"),
        (
            ["algorithm=sapo", "algorithm.num_minibatches=1", "algorithm.sapo_negative=2"],
            "sapo_negative=2 cannot act",
        ),
        (["recipe=scalerl", "algorithm.clip_high=4"], "algorithm.clip_high=4 cannot act"),
        (["algorithm.aggregation_tokens=64"], "algorithm.aggregation_tokens=64 has no effect"),
        (
            ["algorithm.whiten_over=tokens"],
            "has no effect on algorithm.advantage=grpo: it is for reinforce++, ",
        ),
        (
            ["algorithm.cispo_bound=both"],
            "cispo_bound=both has no effect on algorithm.loss=grpo: it is for cispo",
        ),
    ],
)
def test_what_is_hardly_meant_is_said(words, text):
    [(_, warning)] = algorithm_warnings(compose("train", words)[0])
    assert text in warning


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["recipe=scalerl"],
        ["recipe=prime-rl", "algorithm.clip_high=0.1"],
        ["recipe=verl", "algorithm.num_minibatches=1"],
        ["algorithm=gmpo", "algorithm.num_minibatches=1"],
        ["algorithm=gspo-token", "teacher.path=x"],
        ["train.max_staleness=1"],
        ["train.max_staleness=1", "algorithm.correction=tis"],
        ["algorithm.clip_low=0.1", "algorithm.num_epochs=2"],
        ["algorithm.dynamic_sampling=true", "task.name=custom", "task.path=x", "reward=f.py:f"],
        [
            "algorithm.dynamic_sampling=true",
            "reward=f.py:f",
            "algorithm.dynamic_sampling_by=reward",
        ],
        ["algorithm.aggregation_tokens=64", "algorithm.aggregation=seq-mean-token-sum-norm"],
    ],
)
def test_what_is_meant_is_not_spoken_of(words):
    assert list(algorithm_warnings(compose("train", words)[0])) == []


def test_an_own_loss_may_read_any_key(monkeypatch):
    """Its texts and numbers are not taken for bounds of a ratio, which cannot act in a step of one
    update."""
    monkeypatch.setitem(
        POLICY_LOSSES, "own", PolicyLoss("module:own", ("cispo_bound", "entropy_coef"))
    )
    words = ["algorithm.loss=own", "algorithm.cispo_bound=both", "algorithm.entropy_coef=1"]
    assert list(algorithm_warnings(compose("train", words)[0])) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["sampling.temperature=0"], "sampling.temperature=0"),
        (["algorithm.advantage=none"], "nothing would be learned"),
        (
            [
                "algorithm.advantage=none",
                "teacher.path=x",
                "algorithm.kl_coef=1",
                "algorithm.kl_placement=reward",
            ],
            "rewards, and the KL penalty in them, are ignored",
        ),
        (
            ["algorithm.advantage=none", "teacher.path=x", "algorithm.dynamic_sampling=true"],
            "groups are chosen by their",
        ),
        (
            [
                "algorithm.advantage=gdpo",
                "algorithm.kl_coef=1",
                "algorithm.kl_placement=reward",
                "algorithm.kl=k1",
            ],
            "would cancel",
        ),
    ],
)
def test_what_nothing_can_be_learnt_from(words, text):
    with pytest.raises(ShoalError, match=text):
        check_trainable(compose("train", words)[0])


def test_a_reward_preset_of_another_task_is_said_to_do_nothing_unless_a_recipe_set_it():
    def said(*words: str) -> list[str]:
        return list(reward_preset_notes(compose("train", words)[0], Task("any")))

    told = "words: reward.preset=verl has no effect: it is for task=gsm8k"
    assert said("task=words", "reward.preset=verl") == [told]
    assert said("task=words", "recipe=trl", "reward.preset=verl") == [told]
    assert said("task=words", "recipe=verl") == said("task=words") == []
    assert said("task=gsm8k", "reward.preset=verl") == []


def test_a_reward_preset_of_the_run_that_is_evaluated_is_not_said_to_do_nothing(monkeypatch):
    of_run, _ = compose("train", ["recipe=verl"])
    monkeypatch.setattr(source, "settings_of_run", lambda section: of_run)
    config, _ = compose("eval", ["task=words", "reward.preset=verl"])
    assert list(reward_preset_notes(config, Task("any"))) == []
    monkeypatch.setattr(source, "settings_of_run", lambda section: None)
    [told] = reward_preset_notes(config, Task("any"))
    assert told.startswith("words: reward.preset=verl has no effect")


def test_a_missing_model_is_answered_with_what_lies_beside_it_only_if_that_is_near(tmp_path):
    run = tmp_path / "first-run"
    run.mkdir()
    (run / "config.yaml").touch()
    for path, hint in (
        ("nomodel", "Give a folder, a hub id (org/name), or `tiny`."),
        ("frist-run", f"{tmp_path} holds first-run."),
    ):
        with pytest.raises(ShoalError) as caught:
            check_model(ModelSection(path=str(tmp_path / path)))
        assert str(caught.value).endswith(hint)
