"""What a run answers to flags of verl that it cannot follow, or follows by another word."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from shoal.cli import main
from shoal.config.merge import compose
from shoal.records import ShoalError

GAE = ["recipe=verl", "algorithm.adv_estimator=gae"]


def refusal(*words: str) -> str:
    with pytest.raises(ShoalError) as caught:
        compose("train", words)
    return str(caught.value)


def test_a_critic_that_would_learn_otherwise_than_the_policy_is_refused_in_one_sentence():
    words = [
        "critic.ppo_epochs=4",
        "critic.grad_clip=0.1",
        "critic.ppo_mini_batch_size=2",
        "critic.optim.weight_decay=0.5",
        "critic.optim.lr_warmup_steps=3",
        "critic.optim.min_lr_ratio=0.1",
        "critic.loss_agg_mode=seq-mean-token-sum",
    ]
    of_policies = ("1", "1", "256", "0.01", "0", "0", "token-mean")
    said = refusal(*GAE, *words)
    assert said.count("the critic takes the policy's epochs") == 1
    for word, of_policy in zip(words, of_policies, strict=True):
        assert f"{word} (the policy's is {of_policy})" in said
    # Keys of the critic on the same line do not switch the check off.
    assert "critic.ppo_epochs=4" in refusal(*GAE, words[0], "critic.lam=0.9", "critic.lr=1e-4")
    # Nothing has a critic without gae.
    _, resolved = compose("train", ["recipe=verl", *words])
    assert any("critic.ppo_epochs=4, critic.grad_clip=0.1" in line for line in resolved.became)


@pytest.mark.parametrize(
    "words",
    [
        [
            "critic.ppo_epochs=1",
            "critic.grad_clip=1",
            "critic.ppo_mini_batch_size=256",
            "critic.optim.weight_decay=1e-2",
            "critic.optim.lr_warmup_steps=-1",
            "critic.optim.lr_warmup_steps_ratio=0.0",
            "critic.optim.betas=[0.9,0.999]",
            "critic.optim.lr_scheduler_type=constant",
            "critic.optim.min_lr_ratio=0.0",
            "critic.optim.num_cycles=0.5",
            "critic.optim.optimizer=AdamW",
            "critic.loss_agg_mode=token-mean",
            "critic.model.lora_rank=0",
        ],
        [
            "actor_rollout_ref.actor.ppo_epochs=2",
            "critic.ppo_epochs=2",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
            "critic.optim.lr_warmup_steps=3",
            "data.train_batch_size=8",
            "critic.ppo_mini_batch_size=64",
        ],
    ],
)
def test_a_critic_that_learns_as_the_policy_does_is_accepted(words):
    config, resolved = compose("train", [*GAE, *words])
    assert config.algorithm.advantage == "gae"
    assert any("the critic takes the policy's value" in line for line in resolved.became)


def test_an_unknown_estimator_is_answered_with_all_that_work():
    names = refusal("algorithm.adv_estimator=remax").partition("one of ")[2].split(", ")
    assert "gae" in names
    for name in names:
        compose("train", ["recipe=verl", f"algorithm.adv_estimator={name}"])


@pytest.mark.parametrize(
    ("words", "is_first"),
    [
        (["recipe=verl"], True),
        (["recipe=verl", "trainer.val_before_train=False"], False),
        (["trainer.val_before_train=True"], True),
        (["--eval_on_start", "False"], False),
        (["--eval_on_start"], True),
    ],
)
def test_the_evaluation_before_the_first_step_can_be_left_out(words, is_first):
    assert compose("train", words)[0].train.evaluate_first == is_first


def test_an_evaluation_alone_is_another_command():
    with pytest.raises(
        ShoalError, match=r"trainer.val_only=True .* to evaluate only, use `shoal eval`"
    ):
        compose("train", ["trainer.val_only=True"])


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["recipe=verl"], 0),
        (["trainer.max_actor_ckpt_to_keep=null"], 0),
        (["recipe=verl", "trainer.max_actor_ckpt_to_keep=3"], 3),
        (["trainer.total_training_steps=3"], 2),
    ],
)
def test_verl_keeps_all_checkpoints_unless_it_is_told(words, kept):
    assert compose("train", words)[0].checkpoint.keep_last == kept


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("actor_rollout_ref.rollout.name=sglang", "the sampler is the model itself"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=1", "=0: left open"),
        (
            "algorithm.gigpo.similarity_thresh=0.9",
            "counts only with algorithm.gigpo.enable_similarity",
        ),
    ],
)
def test_a_line_about_a_flag_says_what_is_so_here(word, said):
    _, resolved = compose("train", ["recipe=verl", word])
    assert any(line.startswith(word) and said in line for line in resolved.became)


def test_one_choice_is_not_one_of_several():
    assert refusal("data.truncation=left") == "data.truncation=left: expected error"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("actor_rollout_ref.actor.nonexisting", ""),
        ("actor_rollout_ref.rollout.nonexisting", ""),
        ("actor_rollout_ref.actor.ppo_epoch", "actor_rollout_ref.actor.ppo_epochs"),
        ("actor_rollout_ref.actr.ppo_epochs", "actor_rollout_ref.actor.ppo_epochs"),
    ],
)
def test_a_key_is_suggested_only_if_its_own_part_of_the_name_is_alike(name, meant):
    said = refusal("recipe=verl", f"{name}=1")
    suggested = re.search(r"did you mean ([\w.]+)", said)
    assert (suggested[1] if suggested else "") == meant


def test_references_on_the_command_line_have_the_values_of_other_flags():
    folder = "trainer.default_local_dir=ck/${trainer.project_name}/${trainer.experiment_name}"
    names = ["trainer.project_name=mine", "trainer.experiment_name=${trainer.project_name}-1"]
    config, _ = compose("train", [folder, *names])
    assert (config.base_output_directory, config.run_name) == ("ck/mine/mine-1", "mine-1")
    assert "${trainer.project_name} refers to nothing that is set" in refusal(folder, names[1])
    itself = "trainer.experiment_name=${trainer.experiment_name}-1"
    assert "refers to itself" in refusal(itself)
    # What changes nothing here need not be resolved.
    compose("train", ["trainer.rollout_data_dir=${nothing}/dump", "trainer.save_freq=5"])


@pytest.mark.slow
def test_a_module_of_verl_starts_from_ones_own_folder_with_its_relative_paths(tmp_path):
    """As docs/lines.md says, with PYTHONPATH."""
    assert main(["compat", str(tmp_path / "doors")]) == 0
    rows = tmp_path / "mine" / "train.jsonl"
    rows.parent.mkdir()
    lines = []
    for number in range(20):
        truth = {"ground_truth": str(number + 1)}
        row = {"data_source": "openai/gsm8k", "prompt": f"{number} + 1 = ?", "reward_model": truth}
        lines.append(json.dumps(row))
    rows.write_text("\n".join(lines))
    words = ["task=custom", "task.path=train.jsonl", "model=tiny", "algorithm.adv_estimator=grpo"]
    sizes = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    ended = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *words, *sizes, "--dry-run"],
        cwd=rows.parent,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "doors"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "task.path=train.jsonl" in ended.stdout
