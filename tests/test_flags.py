"""What flags of other systems become; recipes and algorithms: what lies over what, and what is said."""

from __future__ import annotations

import re
import shutil

import pytest

from shoal.config.compose import PRESETS, compose, difference_from_defaults, from_overrides, recompose
from shoal.config.schema import Config
from shoal.types import ShoalError


@pytest.mark.parametrize(("words", "expected"), [
    (["max_target_length=768"], {"sampling.max_completion_tokens": 512}),
    (["max_target_length=768", "max_prefill_predict_length=500"],
     {"sampling.max_prompt_tokens": 500, "sampling.max_completion_tokens": 268}),
    (["max_target_length=768", "sampling.max_completion_tokens=9"], {"sampling.max_completion_tokens": 9}),
    (["sampling.max_completion_tokens=9", "max_target_length=768"], {"sampling.max_completion_tokens": 512}),
    (["train.total_dialog_turns=1000", "env.num_envs=8", "env.repeats=4"],
     {"steps": 32, "batch.prompts_per_step": 8, "batch.group_size": 4}),
    (["train.optim_batch_size=8", "train.gradient_accumulation_steps=4"], {"batch.micro_tokens": 640}),
    (["grpo_epsilon=0.15"], {"algorithm.clip_low": 0.15, "algorithm.clip_high": 0.15}),
    (["epsilon=0.1", "epsilon_high=0.3"], {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3}),
    (["epsilon_high=0.3", "epsilon=0.1"], {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3}),
    (["inference_replicas=4"], {"mesh.sampler": "16", "mesh.sampler_tensor": 4, "mesh.trainer": "1"}),
    (["trainer_devices_fraction=1", "SAMPLER_DEVICES_FRACTION=1.0"], {"mesh.trainer": "1.0", "mesh.sampler": "1.0"}),
    (["ici_fsdp_parallelism=-1", "ici_tensor_parallelism=-1"], {"mesh.fsdp": -1}),
    (["hf_data_files=x.jsonl,y.jsonl"], {"task.files": ("x.jsonl", "y.jsonl")}),
    (["per_device_batch_size=2", "batch.prompts_per_step=4"], {"batch.prompts_per_step": 4}),
    (["batch.prompts_per_step=4", "per_device_batch_size=2"], {"batch.prompts_per_device": 2}),
    (["beta=0.1", "num_iterations=2", "loss_type=grpo", "scale_rewards=none", "delta=None"],
     {"algorithm.kl_coef": 0.1, "algorithm.num_epochs": 2, "algorithm.aggregation": "seq-mean-token-mean",
      "algorithm.advantage": "dr_grpo"}),
    (["per_device_train_batch_size=16", "num_generations=4"],
     {"batch.prompts_per_device": 4, "batch.group_size": 4, "batch.micro_tokens": 5120}),
    (["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.rollout.n=5"],
     {"batch.prompts_per_step": 64, "algorithm.num_minibatches": 4, "batch.group_size": 5}),
    (["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=low_var_kl"],
     {"algorithm.kl_coef": 0.001, "algorithm.kl_clamp_input": 20.0, "algorithm.kl_clamp_value": 10.0}),
    (["actor_rollout_ref.actor.kl_loss_coef=0.5"], {}),
    (["reward.custom_reward_function.path=a.py", "reward.custom_reward_function.name=f"],
     {"reward.functions": ("a.py:f",)}),
    (["trainer.save_freq=-1", "trainer.test_freq=5", "trainer.logger=[console,wandb]"],
     {"checkpoint.checkpoint_period": 0, "train.evaluate_every": 5, "report.wandb.mode": "online"}),
])
def test_what_flags_become(words, expected):
    found = difference_from_defaults(compose("train", words)[0])
    assert found == expected
    assert difference_from_defaults(from_overrides(Config, **dict(word.split("=", 1) for word in words))[0]) == expected


def test_a_data_set_of_ones_own_lies_over_a_presets():
    words = ["grpo.yml", "hf_path=custom/dataset", "hf_data_split=train"]
    task = compose("train", words)[0].task
    assert (task.name, task.path, task.split, task.files) == ("custom", "custom/dataset", "train", ())
    task = compose("train", ["grpo.yml"])[0].task
    assert (task.name, task.path, task.split, task.files) == ("gsm8k", "", "main", ("train",))


def test_the_preset_grpo_has_the_values_that_users_know():
    config, resolved = compose("train", ["grpo.yml"])
    a, s, b = config.algorithm, config.sampling, config.batch
    assert (config.steps, b.prompts_per_device, config.optimizer.lr, b.group_size) == (100, 1, 3e-6, 2)
    assert (a.kl_coef, a.clip_low, a.clip_high) == (0.08, 0.2, 0.2)
    assert (s.max_prompt_tokens, s.max_completion_tokens) == (256, 512)
    assert (config.checkpoint.checkpoint_period, config.report.profile) == (50, (2, 3, 4))
    assert resolved.became == ()


def test_of_two_names_for_one_key_the_later_stands_and_is_said():
    config, resolved = compose("train", ["grpo_beta=0.04", "algorithm.kl_coef=0.1"])
    assert config.algorithm.kl_coef == 0.1
    assert "grpo_beta and algorithm.kl_coef both set algorithm.kl_coef: the later one stands, algorithm.kl_coef" in (
        resolved.notes)
    assert compose("train", ["grpo_beta=0.04", "algorithm.kl_coef=0.04"])[1].notes == ()


@pytest.mark.parametrize(("words", "part"), [
    (["max_target_length=256"], "max_target_length=256: expected more than sampling.max_prompt_tokens=256"),
    (["trainer_devices_fraction=0.75", "sampler_devices_fraction=0.5"], "are more than all devices"),
    (["trainer_devices_fraction=2"], "expected a number above 0, up to 1.0"),
    (["loss_algo=ppo"], "loss_algo=ppo: expected one of grpo, gspo-token, gspo"),
    (["profiler=nsys"], "profiler=nsys: expected xplane"),
    (["per_device_batch_size=0.5"], "per_device_batch_size=0.5: expected a whole number of 1 or more"),
    (["grpo_epsilon=small"], "grpo_epsilon=small: expected a finite number"),
    (["train.mixed_precision=maybe"], "train.mixed_precision=maybe: expected true or false"),
    (["--num_generations"], "--num_generations: expected a value: write num_generations=VALUE"),
    (["train.total_dialog_turns=100", "per_device_batch_size=1"], "needs env.num_envs"),
    (["per_device_train_batch_size=3"], "expected a multiple of num_generations=8"),
    (["actor_rollout_ref.actor.ppo_mini_batch_size=5"], "expected a divisor of batch.prompts_per_step=32"),
    (["data.truncation=left"], "data.truncation=left: expected one of error"),
    (["algorithm.adv_estimator=gae"], "expected one of grpo, rloo"),
    (["trainer.logger=[mlflow]"], "mlflow is not there"),
    (["trainer.resume_mode=disable"], "a run goes on by the same run_name"),
    (["data.train_files=[a/x.parquet,b/y.parquet]"], "expected files of one folder"),
    (["data.train_files=[]"], "expected a file, or a list of files"),
    (["custom_reward_function.name=f"], "needs custom_reward_function.path"),
    (["vllm_importance_sampling_mode=odd"], "expected token_truncate"),
    (["shuffle_dataset=false"], "shuffle_dataset=false: expected true"),
    (["use_vllm=true"], "use_vllm=true is not there yet"),
])
def test_what_cannot_be_is_named(words, part):
    with pytest.raises(ShoalError) as caught:
        compose("train", words)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_flags_stand_in_files_too(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [grpo, _self_]\nnum_generations: 8\ngrpo_beta: 0.2\n")
    config, resolved = compose("train", [str(file), "max_prefill_predict_length=300"])
    assert (config.batch.group_size, config.algorithm.kl_coef, config.sampling.max_completion_tokens) == (8, 0.2, 468)
    file.write_text("num_generations: 8\nbatch: {group_size: 4}\n")
    with pytest.raises(ShoalError, match=r"num_generations and batch.group_size both set batch.group_size; write one"):
        compose("train", [str(file)])
    assert compose("train", [str(file), "batch.group_size=2"])[0].batch.group_size == 2
    file.write_text("learning_rate: 1.0e-6\nenv: {num_envs: 4}\nmax_target_length: 300\n")
    config, resolved = compose("eval", [str(file)])
    assert config.sampling.max_completion_tokens == 44 and "2 keys that only training reads" in resolved.notes[0]


# ---- recipes and algorithms


@pytest.fixture
def packaged(monkeypatch, tmp_path):
    """Settings of our own beside those that are packaged."""
    folder = tmp_path / "presets"
    shutil.copytree(PRESETS, folder)
    (folder / "algorithm" / "mine.yaml").write_text("algorithm: {clip_high: 0.5, loss: cispo}\n")
    (folder / "recipe" / "theirs.yaml").write_text(
        "algorithm: {clip_high: 0.4, clip_low: 0.1}\noptimizer: {lr: 0.5}\nsteps: 80\n")
    monkeypatch.setattr("shoal.config.compose.PRESETS", folder)
    return tmp_path


def seen(*words: str) -> tuple:
    config = compose("train", list(words))[0]
    return config.optimizer.lr, config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.loss


def test_what_lies_over_what(packaged):
    assert seen("recipe=theirs") == (0.5, 0.1, 0.4, "grpo")
    assert seen("algorithm=mine", "recipe=theirs") == (0.5, 0.1, 0.5, "cispo")
    assert seen("recipe=theirs", "algorithm=mine", "algorithm.clip_high=0.3") == (0.5, 0.1, 0.3, "cispo")
    assert seen("recipe=theirs", "task=gsm8k")[0] == 0.5
    file = packaged / "file.yaml"
    file.write_text("recipe: theirs\nalgorithm: {name: mine, clip_low: 0.15}\n")
    assert seen(str(file)) == (0.5, 0.15, 0.5, "cispo")
    assert seen(str(file), "recipe=theirs") == (0.5, 0.1, 0.4, "cispo")
    assert seen(str(file), "recipe=", "algorithm.name=") == (5e-5, 0.15, 0.2, "grpo")
    assert from_overrides(Config, recipe="theirs", algorithm="mine")[0].algorithm.clip_high == 0.5
    assert compose("doctor", ["recipe=theirs"])[0].optimizer.lr == 0.5


def test_what_a_recipe_sets_is_said(packaged):
    _, resolved = compose("train", ["recipe=theirs", "algorithm=mine", "algorithm.clip_low=0.3"])
    assert resolved.notes == (
        "recipe=theirs differs from Shoal's defaults in: optimizer.lr=0.5 (ours: 5e-05)",
        "algorithm=mine differs from Shoal's defaults in: algorithm.clip_high=0.5 (ours: 0.2), algorithm.loss=cispo "
        "(ours: grpo)")
    for word, part in (("recipe=thiers", "did you mean theirs?"), ("algorithm=mien", "did you mean mine?")):
        with pytest.raises(ShoalError, match=re.escape(part)):
            compose("train", [word])


def test_a_stored_configuration_comes_out_unchanged(packaged):
    config, resolved = compose("train", ["recipe=theirs", "algorithm=mine", "algorithm.clip_high=0.3", "grpo_beta=0.1"])
    stored = packaged / "config.yaml"
    stored.write_text(resolved.text)
    again, found = recompose(Config, stored, compose("train", ["resume=last"])[1].arguments)
    assert found.text.replace("resume: last", "resume: ''") == resolved.text and again.recipe == "theirs"
    assert compose("train", [str(stored)])[0] == config and compose("train", [str(stored)])[1].notes == ()


@pytest.mark.parametrize("word", [f"{kind}={file.stem}" for kind in ("recipe", "algorithm")
                                  for file in sorted((PRESETS / kind).glob("*.yaml"))])
def test_each_recipe_and_algorithm_composes_and_says_what_it_sets(word):
    config, resolved = compose("train", [word])
    assert config != Config() and resolved.notes[0].startswith(f"{word} differs from Shoal's defaults in: ")
