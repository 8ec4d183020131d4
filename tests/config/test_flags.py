"""What flags of other systems become; recipes and algorithms: what lies over what, and what is
said."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from shoal.config.foreign import front_end
from shoal.config.merge import compose, from_overrides, load
from shoal.config.preset_files import PRESETS, presets_of
from shoal.config.stored import difference_from_defaults
from shoal.config.train import Config
from shoal.records import ShoalError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["max_target_length=768"], {"sampling.max_completion_tokens": 512}),
        (
            ["max_target_length=768", "max_prefill_predict_length=500"],
            {"sampling.max_prompt_tokens": 500, "sampling.max_completion_tokens": 268},
        ),
        (
            ["max_target_length=768", "sampling.max_completion_tokens=9"],
            {"sampling.max_completion_tokens": 9},
        ),
        (
            ["sampling.max_completion_tokens=9", "max_target_length=768"],
            {"sampling.max_completion_tokens": 512},
        ),
        (
            ["train.total_dialog_turns=1000", "env.num_envs=8", "env.repeats=4"],
            {"steps": 32, "batch.prompts_per_step": 8, "batch.group_size": 4},
        ),
        (
            ["train.optim_batch_size=8", "train.gradient_accumulation_steps=4"],
            {"algorithm.num_minibatches": 32, "batch.micro_tokens": 640},
        ),
        (["grpo_epsilon=0.15"], {"algorithm.clip_low": 0.15, "algorithm.clip_high": 0.15}),
        (
            ["epsilon=0.1", "epsilon_high=0.3"],
            {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3},
        ),
        (
            ["epsilon_high=0.3", "epsilon=0.1"],
            {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3},
        ),
        (
            ["inference_replicas=4"],
            {"mesh.sampler": "16", "mesh.sampler_tensor": 4, "mesh.trainer": "1"},
        ),
        (
            ["trainer_devices_fraction=1", "SAMPLER_DEVICES_FRACTION=1.0"],
            {"mesh.trainer": "1.0", "mesh.sampler": "1.0"},
        ),
        (["ici_fsdp_parallelism=-1", "ici_tensor_parallelism=-1"], {"mesh.fsdp": -1}),
        (["hf_data_files=x.jsonl,y.jsonl"], {"task.files": ("x.jsonl", "y.jsonl")}),
        (["per_device_batch_size=2", "batch.prompts_per_step=4"], {"batch.prompts_per_step": 4}),
        (["batch.prompts_per_step=4", "per_device_batch_size=2"], {"batch.prompts_per_device": 2}),
        (
            ["beta=0.1", "num_iterations=2", "loss_type=grpo", "scale_rewards=none", "delta=None"],
            {
                "algorithm.kl_coef": 0.1,
                "algorithm.num_epochs": 2,
                "algorithm.aggregation": "seq-mean-token-mean",
                "algorithm.advantage": "dr_grpo",
            },
        ),
        (
            ["per_device_train_batch_size=16", "num_generations=4"],
            {"batch.prompts_per_device": 4, "batch.group_size": 4, "batch.micro_tokens": 5120},
        ),
        (
            [
                "data.train_batch_size=64",
                "actor_rollout_ref.actor.ppo_mini_batch_size=16",
                "actor_rollout_ref.rollout.n=5",
            ],
            {"batch.prompts_per_step": 64, "algorithm.num_minibatches": 4, "batch.group_size": 5},
        ),
        (
            [
                "actor_rollout_ref.actor.use_kl_loss=True",
                "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
            ],
            {
                "algorithm.kl_coef": 0.001,
                "algorithm.kl_clamp_input": 20.0,
                "algorithm.kl_clamp_value": 10.0,
            },
        ),
        (["actor_rollout_ref.actor.kl_loss_coef=0.5"], {}),
        (
            ["reward.custom_reward_function.path=a.py", "reward.custom_reward_function.name=f"],
            {"reward.functions": ("a.py:f",)},
        ),
        (
            [
                "per_device_train_batch_size=8",
                "steps_per_generation=4",
                "max_steps=10",
                "save_steps=5",
            ],
            {
                "batch.prompts_per_device": 4,
                "batch.micro_tokens": 2560,
                "algorithm.num_minibatches": 4,
                "steps": 3,
                "checkpoint.every": 2,
            },
        ),
        (
            ["gradient_accumulation_steps=8"],
            {"batch.prompts_per_device": 8, "batch.micro_tokens": 2560},
        ),
        (
            [
                "gradient_accumulation_steps=2",
                "steps_per_generation=4",
                "num_iterations=2",
                "max_steps=8",
            ],
            {
                "batch.prompts_per_device": 4,
                "batch.micro_tokens": 2560,
                "algorithm.num_minibatches": 2,
                "algorithm.num_epochs": 2,
                "steps": 2,
            },
        ),
        (
            ["per_device_train_batch_size=8", "batch.prompts_per_step=4"],
            {"batch.prompts_per_step": 4, "batch.micro_tokens": 2560},
        ),
        (
            ["importance_sampling_level=sequence", "loss_type=grpo"],
            {"algorithm.loss": "gspo", "algorithm.aggregation": "seq-mean-token-mean"},
        ),
        (
            ["loss_type=grpo", "importance_sampling_level=sequence"],
            {"algorithm.loss": "gspo", "algorithm.aggregation": "seq-mean-token-mean"},
        ),
        (
            ["loss_type=cispo", "importance_sampling_level=token"],
            {"algorithm.loss": "cispo", "algorithm.cispo_bound": "absolute"},
        ),
        (
            ["algorithm.norm_adv_by_std_in_grpo=False", "algorithm.adv_estimator=grpo"],
            {"algorithm.advantage": "dr_grpo"},
        ),
        (
            ["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=True"],
            {"algorithm.advantage": "rloo"},
        ),
        (
            [
                "actor_rollout_ref.actor.clip_ratio_high=0.28",
                "actor_rollout_ref.actor.clip_ratio=0.1",
            ],
            {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.28},
        ),
        (
            ["algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.use_kl_loss=False"],
            {"algorithm.kl": "k1", "algorithm.kl_coef": 0.001, "algorithm.kl_placement": "reward"},
        ),
        (
            ["reward_weights=1.0,0.2", "reward_funcs=[a.py:f,b.py:g]"],
            {"reward.weights": (1.0, 0.2), "reward.functions": ("a.py:f", "b.py:g")},
        ),
        (
            [
                "epsilon_high=None",
                "epsilon=0.1",
                "top_k=None",
                "max_prompt_length=None",
                "load_parameters_path=",
            ],
            {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1},
        ),
        (
            [
                "sampler_devices_fraction=0.5",
                "trainer_devices_fraction=0.5",
                "inference_replicas=2",
            ],
            {"mesh.trainer": "0.5", "mesh.sampler": "0.5", "mesh.sampler_tensor": 4},
        ),
        (
            ["data.filter_overlong_prompts=True", "data.truncation=error", "steps=7"],
            {"steps": 7, "sampling.long_prompts": "drop"},
        ),
        (["data.truncation='error'"], {"sampling.long_prompts": "error"}),
        (
            ["sampling.long_prompts=drop", "data.truncation=error"],
            {"sampling.long_prompts": "drop"},
        ),
        (["trainer.nnodes=2"], {"mesh.trainer": "16", "mesh.fsdp": -1}),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], {}),
        (
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=1"],
            {"mesh.trainer": "1", "mesh.fsdp": -1},
        ),
        (
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=8"],
            {"mesh.trainer": "8", "mesh.fsdp": -1, "mesh.sampler_tensor": 2},
        ),
        (
            ["vllm_tensor_parallel_size=4", "mesh.fsdp=2", "mesh.data=2"],
            {"mesh.data": 2, "mesh.fsdp": 2, "mesh.sampler_tensor": 4},
        ),
        (["vllm_tensor_parallel_size=2", "mesh.sampler=[0,1,2]"], {"mesh.sampler": "[0,1,2]"}),
        (
            [
                "use_vllm=true",
                "vllm_mode=server",
                "vllm_server_host=0.0.0.0",
                "vllm_server_port=8001",
            ],
            {"sampler.kind": "vllm", "vllm.urls": ("http://127.0.0.1:8001",)},
        ),
        (["vllm_mode=server", "vllm_server_host=x"], {}),
        (["use_vllm=true"], {}),
        (["use_vllm=true", "vllm_mode=colocate", "vllm_tensor_parallel_size=1"], {}),
        (
            ["rollout_tensor_parallelism=2", "ici_fsdp_parallelism=-1"],
            {"mesh.fsdp": -1, "mesh.sampler_tensor": 2},
        ),
        (["rollout_tensor_parallelism=-1", "ici_fsdp_parallelism=-1"], {"mesh.fsdp": -1}),
        (
            ["rollout_tensor_parallelism=2", "inference_devices_per_replica=4"],
            {"mesh.trainer": "1", "mesh.sampler": "4", "mesh.sampler_tensor": 4},
        ),
        (
            ["env.repeats=16", "train.dialog_turns_per_batch=32", "train.total_dialog_turns=320"],
            {"batch.group_size": 16, "batch.prompts_per_step": 2, "steps": 10},
        ),
        (
            ["steps=50", "warmup_ratio=0.1", "num_iterations=2"],
            {"steps": 50, "algorithm.num_epochs": 2, "optimizer.warmup_steps": 10},
        ),
        (
            [
                "algorithm.filter_groups.metric=seq_reward",
                "algorithm.filter_groups.max_num_gen_batches=4",
            ],
            {"algorithm.dynamic_sampling_by": "reward", "algorithm.max_sampling_rounds": 3},
        ),
        (["data.shuffle=False"], {"train.shuffle": False}),
        (["shuffle_dataset=false"], {"train.shuffle": False}),
        (["enable_data_shuffling=false"], {"train.shuffle": False}),
        (
            ["trainer.save_freq=-1", "trainer.test_freq=5", "trainer.logger=[console,file,wandb]"],
            {"checkpoint.every": 0, "train.evaluate_every": 5, "report.wandb.mode": "auto"},
        ),
        (["eval_interval=50"], {"train.evaluate_every": 50}),
        (["eval_interval=50", "train_fraction=1.0"], {"train.evaluate_every": 0}),
        (["eval_interval=-1", "train_fraction=0.5"], {"train.evaluate_every": 0}),
        (
            ["train_fraction=0.5", "eval_interval=5", "num_batches=30", "num_epoch=2"],
            {"steps": 30, "train.evaluate_every": 5},
        ),
        (["num_test_batches=3", "eval_batch_size=7"], {"task.num_eval_questions": 21}),
        (
            ["num_test_batches=3", "per_device_batch_size=2", "mesh.fsdp=4"],
            {"task.num_eval_questions": 24, "batch.prompts_per_device": 2, "mesh.fsdp": 4},
        ),
        (
            [
                "checkpoint_storage_use_ocdbt=True",
                "enable_goodput_recording=True",
                "monitor_goodput=True",
            ],
            {},
        ),
    ],
)
def test_what_flags_become(words, expected):
    found = difference_from_defaults(compose("train", words)[0])
    assert found == expected
    assert (
        difference_from_defaults(
            from_overrides(Config, **dict(word.split("=", 1) for word in words))[0]
        )
        == expected
    )


def test_a_flag_that_is_dropped_or_shards_names_the_key_that_uses_more_devices():
    for word, reason in (
        (
            "--vllm_tensor_parallel_size=2",
            "it does not divide the sampler's 1 device; mesh.fsdp=-1 takes all",
        ),
        ("--deepspeed=zero3.json", "mesh.fsdp=-1 shards parameters, gradients and moments"),
        ("--fsdp=full_shard", "mesh.fsdp=-1 shards parameters, gradients and moments"),
    ):
        [note] = compose("train", [word])[1].start_lines
        assert f" changes nothing here: {reason}" in note


def test_a_flag_that_is_found_names_its_system():
    found = {}
    for name in ("grpo_beta", "learning_rate"):
        found[name] = front_end().find_flag(Config, name)
    assert {name: flag and flag.system for name, flag in found.items()} == {
        "grpo_beta": "MaxText",
        "learning_rate": "TRL",
    }
    rows = front_end().flags_of(Config)["learning_rate"]
    assert [row.system for row in rows] == ["TRL", "MaxText"]


def test_a_data_set_of_ones_own_lies_over_a_presets():
    words = ["grpo.yml", "hf_path=custom/dataset", "hf_data_split=train"]
    task = compose("train", words)[0].task
    assert (task.name, task.path, task.split, task.files) == (
        "gsm8k",
        "custom/dataset",
        "train",
        (),
    )
    task = compose("train", [word.replace("hf_path", "dataset_name") for word in words])[0].task
    assert (task.name, task.path, task.split, task.files) == (
        "custom",
        "custom/dataset",
        "train",
        (),
    )
    task = compose("train", ["grpo.yml"])[0].task
    assert (task.name, task.path, task.split, task.files) == ("gsm8k", "", "main", ("train",))


def test_the_preset_grpo_has_the_values_that_users_know():
    config, resolved = compose("train", ["grpo.yml"])
    a, s, b = config.algorithm, config.sampling, config.batch
    assert (config.steps, b.prompts_per_device, config.optimizer.lr, b.group_size) == (
        100,
        1,
        3e-6,
        2,
    )
    assert (a.kl_coef, a.clip_low, a.clip_high) == (0.08, 0.2, 0.2)
    assert (s.max_prompt_tokens, s.max_completion_tokens) == (256, 512)
    assert (config.checkpoint.every, config.report.profile) == (50, (2, 3, 4))
    assert resolved.became == ()


def test_of_two_names_for_one_key_the_later_stands_and_is_said():
    config, resolved = compose("train", ["grpo_beta=0.04", "algorithm.kl_coef=0.1"])
    assert config.algorithm.kl_coef == 0.1
    assert (
        "grpo_beta and algorithm.kl_coef both set algorithm.kl_coef: the later one counts, "
        "algorithm.kl_coef" in (resolved.start_lines)
    )
    assert compose("train", ["grpo_beta=0.04", "algorithm.kl_coef=0.04"])[1].start_lines == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ["max_target_length=256"],
            "max_target_length=256: expected more than max_prefill_predict_length=256",
        ),
        (
            ["trainer_devices_fraction=0.75", "sampler_devices_fraction=0.5"],
            "are more than all devices",
        ),
        (["trainer_devices_fraction=2"], "expected a number above 0, up to 1.0"),
        (["loss_algo=ppo"], "loss_algo=ppo: expected one of grpo, gspo-token, gspo"),
        (["profiler=nsys"], "profiler=nsys: expected xplane"),
        (
            ["per_device_batch_size=0.5"],
            "per_device_batch_size=0.5: expected a whole number of 1 or more",
        ),
        (["grpo_epsilon=small"], "grpo_epsilon=small: expected a finite number"),
        (["train.mixed_precision=maybe"], "train.mixed_precision=maybe: expected true or false"),
        (["--num_generations"], "--num_generations: expected a value: write num_generations=VALUE"),
        (["train.total_dialog_turns=100", "per_device_batch_size=1"], "needs env.num_envs"),
        (["per_device_train_batch_size=3"], "expected a multiple of num_generations=8"),
        (
            ["steps_per_generation=2", "gradient_accumulation_steps=4"],
            "a multiple of gradient_accumulation_steps=4",
        ),
        (
            ["loss_type=sapo", "importance_sampling_level=sequence"],
            "the loss has a ratio of its own",
        ),
        (["loss_type=vespo"], "loss_type=vespo: expected one of grpo"),
        (["warmup_steps_fraction=10"], "expected a share of the run, 0 to 1"),
        (["train.dialog_turns_per_batch=30"], "expected a multiple of batch.group_size=8"),
        (
            ["algorithm.use_kl_in_reward=1", "actor_rollout_ref.actor.use_kl_loss=1"],
            "there is one divergence at a time",
        ),
        (
            ["nokey=1", "--other", "x", "steps=2", "stpes=3"],
            "nokey: there is no such key; other: there is no such key; stpes: there is no such "
            "key, did you mean steps? (`shoal train --help` lists all keys)",
        ),
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=5"],
            "expected a divisor of batch.prompts_per_step=32",
        ),
        (["algorithm.adv_estimator=remax"], "expected one of grpo, rloo"),
        (["critic.enable=true"], "expected algorithm.adv_estimator=gae with it"),
        (["trainer.critic_warmup=3"], "expected 0, or algorithm.adv_estimator=gae"),
        (["trainer.logger=[swanlab]"], "swanlab is not supported"),
        (["trainer.resume_mode=never"], "expected one of auto, disable, resume_path"),
        (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        (["data.train_files=[]"], "expected a file, or a list of files"),
        (["custom_reward_function.name=f"], "needs custom_reward_function.path"),
        (["vllm_importance_sampling_mode=odd"], "expected token_truncate"),
        (
            ["use_vllm=true", "vllm_mode=elsewhere"],
            "vllm_mode=elsewhere: expected one of colocate, server",
        ),
        (
            ["sampler.kind=vllm"],
            "vllm.python='': expected a Python that has vLLM, to start servers, or vllm.urls",
        ),
        (
            ["sampler.kind=vllm", "vllm.urls=[localhost:8000]"],
            "vllm.urls='localhost:8000': expected http://HOST:PORT",
        ),
        (
            ["sampler.kind=vllm", "vllm.python=python", "mesh.sampler=1"],
            "mesh.sampler='1': expected '' with sampler.kind=",
        ),
        (["bf16=true", "fp16=true"], "bf16=true fp16=true: expected one of them"),
    ],
)
def test_what_cannot_be_is_named(words, part):
    with pytest.raises(ShoalError) as caught:
        compose("train", words)
    assert part in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (["fp16=true"], "float16"),
        (["--fp16", "--bf16", "false"], "float16"),
        (["bf16=true", "fp16=false"], "bfloat16"),
        (["bf16=false"], "float32"),
        (["train.mixed_precision=false"], "float32"),
        (["train.mixed_precision=true"], "bfloat16"),
        (["actor_rollout_ref.actor.fsdp_config.dtype=fp16"], "float16"),
    ],
)
def test_every_system_s_name_of_half_precision(words, dtype):
    assert compose("train", words)[0].model.dtype == dtype


def test_a_value_may_be_the_next_word():
    config, _ = compose(
        "train",
        [
            "--learning_rate",
            "1e-5",
            "--bf16",
            "true",
            "--scan_layers",
            "--report.groups",
            "--steps",
            "7",
            "--seed=1",
        ],
    )
    assert (config.optimizer.lr, config.model.dtype, config.steps, config.seed) == (
        1e-5,
        "bfloat16",
        7,
        1,
    )
    assert config.model.scan_layers and config.report.groups
    assert compose("train", ["--logging_steps", "1", "--steps", "3"])[0].steps == 3
    assert compose("replay", ["--json", "a", "--step", "3"])[0].run == "a"
    with pytest.raises(ShoalError, match="--steps: expected a value"):
        compose("train", ["--steps", "--seed=1"])


def test_a_function_goes_by_their_name_too():
    def right(completions, **_):
        return [1.0] * len(completions)

    assert from_overrides(Config, reward_funcs=[right])[2] == (right,)


def test_what_gave_way_is_not_said_to_have_become():
    _, resolved = compose("train", ["per_device_batch_size=2", "batch.prompts_per_step=4"])
    assert not resolved.became and resolved.notes == (
        "per_device_batch_size and batch.prompts_per_step both set how many prompts a step has: "
        "the later one counts, batch.prompts_per_step",
    )
    _, resolved = compose("train", ["max_target_length=768", "sampling.max_completion_tokens=9"])
    assert not resolved.became


def test_a_flag_of_the_line_and_its_partner_in_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("epsilon_high: 0.28\nimportance_sampling_level: sequence\nloss_type: grpo\n")
    config, _ = compose("train", [str(file), "epsilon=0.1"])
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.1, 0.28)
    assert (config.algorithm.loss, config.algorithm.aggregation) == ("gspo", "seq-mean-token-mean")


def with_file(folder, text: str, *words: str):
    file = folder / "their.yml"
    file.write_text(text)
    return compose("train", [str(file), *words])


_ACTOR = "actor_rollout_ref.actor."


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (
            "algorithm.norm_adv_by_std_in_grpo: true",
            "recipe=verl algorithm.adv_estimator=rloo",
            {"advantage": "rloo"},
        ),
        (
            f"{_ACTOR}kl_loss_coef: 0.001",
            f"recipe=verl {_ACTOR}use_kl_loss=true",
            {"kl_coef": 0.001},
        ),
        (
            f"{_ACTOR}policy_loss.loss_mode: gspo",
            f"algorithm=grpo {_ACTOR}clip_ratio_c=5",
            {"loss": "grpo", "clip_dual": 5.0},
        ),
        (
            "epsilon_high: 0.28",
            "algorithm=dapo epsilon=0.1 batch.prompts_per_step=64",
            {"clip_low": 0.1, "clip_high": 0.1},
        ),
        (
            "multi_objective_aggregation: normalize_then_sum",
            "algorithm=dapo scale_rewards=none batch.prompts_per_step=64",
            {"advantage": "dr_grpo"},
        ),
        # nothing between the two, as a recipe lies beneath the file: they are read together
        (
            f"{_ACTOR}policy_loss.loss_mode: gspo",
            f"recipe=verl {_ACTOR}clip_ratio_c=5",
            {"loss": "gspo-token", "clip_dual": 0.0},
        ),
        ("epsilon_high: 0.28", "recipe=trl epsilon=0.1", {"clip_low": 0.1, "clip_high": 0.28}),
        (
            "algorithm.norm_adv_by_std_in_grpo: false",
            "algorithm.adv_estimator=grpo",
            {"advantage": "dr_grpo"},
        ),
        (
            "algorithm.adv_estimator: rloo",
            "algorithm.advantage=rloo algorithm.norm_adv_by_std_in_grpo=true",
            {"advantage": "rloo"},
        ),
        (f"{_ACTOR}kl_loss_coef: 0.01", f"{_ACTOR}use_kl_loss=true", {"kl_coef": 0.01}),
        (
            f"{_ACTOR}policy_loss.loss_mode: gspo",
            f"{_ACTOR}clip_ratio_c=5",
            {"loss": "gspo-token", "clip_dual": 0.0},
        ),
    ],
)
def test_a_flag_of_the_line_counts_beside_a_files_flag_of_its_group(
    tmp_path, text, words, expected
):
    algorithm = with_file(tmp_path, text, *words.split())[0].algorithm
    assert {key: getattr(algorithm, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (
            "algorithm: {kl_coef: 0.05}",
            f"{_ACTOR}kl_loss_type=low_var_kl",
            {"kl_coef": 0.05, "kl_clamp_input": 20.0},
        ),
        ("steps: 3", f"algorithm.kl_coef=0.05 {_ACTOR}kl_loss_type=low_var_kl", {"kl_coef": 0.05}),
        ("algorithm: {kl_coef: 0.05}", f"{_ACTOR}use_kl_loss=false", {"kl_coef": 0.0}),
        (
            "steps: 3",
            "algorithm=rloo algorithm.norm_adv_by_std_in_grpo=true",
            {"advantage": "rloo"},
        ),
        (
            "algorithm: {advantage: rloo}",
            "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=true",
            {"advantage": "grpo"},
        ),
        (
            "algorithm: {correction: mis}",
            "algorithm.rollout_correction.rollout_is_threshold=3",
            {"correction": "mis"},
        ),
        (
            "algorithm: {correction: mis}",
            "algorithm.rollout_correction.rollout_is=null",
            {"correction": "none"},
        ),
    ],
)
def test_what_a_group_says_for_an_absent_flag_yields_to_what_is_given(
    tmp_path, text, words, expected
):
    algorithm = with_file(tmp_path, text, *words.split())[0].algorithm
    assert {key: getattr(algorithm, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("grpo_epsilon", "epsilon_high"),
        (f"{_ACTOR}clip_ratio", "epsilon_high"),
        ("epsilon", f"{_ACTOR}clip_ratio_high"),
    ],
)
def test_of_two_systems_flags_the_one_that_names_fewer_keys_stands(tmp_path, wide, narrow):
    for config, resolved in (
        with_file(tmp_path, f"{wide}: 0.1\n{narrow}: 0.28\n"),
        compose("train", [f"{narrow}=0.28", f"{wide}=0.1"]),
        compose("train", [f"{wide}=0.1", f"{narrow}=0.28"]),
    ):
        assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.1, 0.28)
        assert not any("both set" in note for note in resolved.start_lines)
    # An algorithm between the two sets the key anew, over the file's narrow flag.
    config, _ = with_file(tmp_path, f"{narrow}: 0.28\n", f"{wide}=0.1", "algorithm=grpo")
    assert config.algorithm.clip_high == 0.1
    with pytest.raises(
        ShoalError, match=r"epsilon and grpo_epsilon both set algorithm.clip_low; write one of them"
    ):
        with_file(tmp_path, "epsilon: 0.1\ngrpo_epsilon: 0.28\n")


def test_unknown_keys_of_a_file_are_named_together(tmp_path):
    with pytest.raises(ShoalError) as caught:
        with_file(tmp_path, "stpes: 3\noptimizer: {lrr: 1}\n")
    assert str(caught.value) == (
        "their.yml:1: stpes: there is no such key, did you mean steps?; their.yml:2: "
        "optimizer.lrr: there is no such key, did you mean optimizer.lr? (`shoal train --help` "
        "lists all keys)"
    )


def test_a_file_says_how_many_prompts_a_step_has_once(tmp_path):
    text = "batch: {prompts_per_step: 8, prompts_per_device: 2}\n"
    with pytest.raises(
        ShoalError, match=r"batch.prompts_per_step and batch.prompts_per_device both set how many"
    ):
        with_file(tmp_path, text)
    assert with_file(tmp_path, text, "batch.prompts_per_step=4")[0].batch.prompts_per_device == 0
    whole = compose("train", ["batch.prompts_per_device=2"])[1].text  # as a run's own
    assert with_file(tmp_path, whole)[0].batch.prompts_per_device == 2


def test_an_unknown_recipe_names_the_line_of_the_file(tmp_path):
    with pytest.raises(
        ShoalError,
        match=r"^their.yml:2: recipe=nope: there is no such recipe\. There are: maxtext, ",
    ):
        with_file(tmp_path, "steps: 3\nrecipe: nope\n")
    with pytest.raises(
        ShoalError, match=r"^recipe=nope: there is no such recipe\. There are: maxtext, "
    ):
        compose("train", ["recipe=nope"])
    with pytest.raises(
        ShoalError, match=r"^nope: no preset or YAML file has this name\. Presets: aime24, "
    ):
        compose("train", ["--config-name", "nope"])


@pytest.mark.parametrize(
    ("words", "dual"),
    [
        (["algorithm=gspo", "batch.prompts_per_step=64"], 0.0),
        (["algorithm.loss=cispo"], 0.0),
        (["recipe=verl"], 10.0),
        (["recipe=verl", "algorithm=gspo"], 0.0),
        ([], 10.0),
    ],
)
def test_of_verls_losses_only_vanilla_has_the_dual_clip(words, dual):
    assert compose("train", [*words, f"{_ACTOR}clip_ratio_c=10"])[0].algorithm.clip_dual == dual


def test_a_recipe_lies_beneath_the_file_wherever_it_is_named(tmp_path):
    text = (
        "beta: 0.04\nnum_generations: 4\nper_device_train_batch_size: 8\nlearning_rate: 2.0e-5\n"
        "max_steps: 10\nnum_iterations: 2\n"
    )
    config, resolved = with_file(tmp_path, text, "recipe=trl")
    assert (config.algorithm.kl_coef, config.batch.group_size) == (0.04, 4)
    assert (config.steps, config.algorithm.num_epochs, config.optimizer.lr) == (5, 2, 2e-5)
    assert config.optimizer.beta2 == 0.999 and config.recipe == "trl"  # the recipe's own
    named_first = compose("train", ["recipe=trl", str(tmp_path / "their.yml")])[0]
    in_file, of_file = with_file(tmp_path, f"{text}recipe: trl\n")
    in_python = from_overrides(Config, config_name=str(tmp_path / "their.yml"), recipe="trl")[0]
    assert config == named_first == in_file == in_python
    # No line says that something is replaced, and what is typed on the line wins over both.
    for notes in (resolved.start_lines, of_file.start_lines):
        assert "replaces there" not in str(notes) and "changes nothing" not in str(notes)
    assert with_file(tmp_path, text, "beta=0.1", "recipe=trl")[0].algorithm.kl_coef == 0.1
    # Of two recipes the one on the line is read, beneath the file that names the other.
    other, _ = with_file(tmp_path, f"{text}recipe: verl\n", "recipe=trl")
    assert other == config


def test_a_recipe_lies_beneath_the_files_that_a_file_names_and_beside_a_task(tmp_path):
    (tmp_path / "base.yml").write_text("optimizer: {lr: 0.25}\nsteps: 3\n")
    text = "defaults: [base.yml, _self_]\nsteps: 4\n"
    config, _ = with_file(tmp_path, text, "recipe=verl")
    assert (config.optimizer.lr, config.steps) == (0.25, 4)
    assert config.algorithm.kl_coef == compose("train", ["recipe=verl"])[0].algorithm.kl_coef
    # A packaged preset is no file of the user's: the recipe's defaults are the later ones.
    of_preset = compose("train", ["--config-name", "gsm8k", "recipe=trl"])[0]
    assert of_preset.optimizer.beta2 == 0.999
    assert of_preset.optimizer.lr == compose("train", ["recipe=trl"])[0].optimizer.lr


def test_a_recipe_that_a_file_covers_completely_is_said_to_change_nothing(tmp_path):
    whole = compose("train", ["steps=6"])[1].text  # as a run's own
    config, resolved = with_file(tmp_path, whole, "recipe=trl")
    assert config == replace(compose("train", ["steps=6"])[0], recipe="trl")
    assert [note for note in resolved.notes if note.startswith("recipe=")] == [
        "recipe=trl changes nothing: it is beneath a file, or the configuration of a run, that "
        "sets all of its keys"
    ]


def test_an_algorithm_on_the_line_names_the_settings_of_the_file_that_it_replaces(tmp_path):
    text = "beta: 0.04\nepsilon_high: 0.3\nlearning_rate: 1.0e-6\nsteps: 7\n"
    config, resolved = with_file(tmp_path, text, "algorithm=dapo")
    assert (config.algorithm.kl_coef, config.algorithm.clip_high) == (0.0, 0.28)
    [line] = [line for line in resolved.start_lines if "replaces there" in line]
    assert line.startswith(
        "algorithm=dapo on the command line lies over their.yml and replaces there: "
    )
    assert {"beta=0.04", "epsilon_high=0.3"} <= {*re.split("[,;]? ", line)}
    # the algorithm's own, or none of its keys
    assert "learning_rate" not in line and "steps=7" not in line
    assert "beta" not in str(with_file(tmp_path, text, "algorithm=dapo", "beta=0.1")[1].notes)
    assert "replaces there" not in str(
        with_file(tmp_path, f"algorithm: dapo\n{text}")[1].start_lines
    )


def test_trls_batch_flags_leave_an_algorithms_mini_batches():
    def updates(*words):
        return compose("train", ["algorithm=gspo", *words])[0].algorithm.num_minibatches

    assert updates("per_device_train_batch_size=16", "gradient_accumulation_steps=2") == 4
    assert updates("per_device_train_batch_size=16", "steps_per_generation=2") == 2


def test_a_recipe_keeps_the_systems_rules_where_other_keys_change():
    def of(*words):
        config = compose("train", list(words))[0]
        return (
            config,
            config.optimizer.warmup_steps,
            config.algorithm.num_minibatches,
            config.batch.prompts_per_device,
        )

    assert of("recipe=maxtext", "steps=20")[1] == 2 and of("recipe=maxtext")[1] == 10
    assert (
        of("recipe=maxtext", "optimizer.warmup_steps=5")[1] == 5
        and of("grpo.yml", "steps=1000")[1] == 100
    )
    assert (
        of("recipe=maxtext", "max_prefill_predict_length=128")[0].sampling.max_completion_tokens
        == 640
    )
    assert of("recipe=verl")[2] == 4 and of("recipe=verl", "data.train_batch_size=512")[2] == 2
    assert (
        of("recipe=verl", "algorithm.num_minibatches=8")[2] == 8
        and of("recipe=verl", "batch.prompts_per_step=4")[2] == 1
    )
    assert of("recipe=trl")[3] == 1 and of("recipe=trl", "num_generations=4")[3] == 2
    assert (
        of("recipe=trl", "gradient_accumulation_steps=8")[3] == 8
        and of("recipe=trl", "batch.prompts_per_step=4")[0].batch.prompts_per_device == 0
    )


def test_epochs_of_a_local_file_are_steps(tmp_path):
    data = tmp_path / "rows.jsonl"
    # the last 11 are held out
    data.write_text("".join(f'{{"prompt": "{row}"}}\n' for row in range(119)))
    words = [
        "reward=f.py:g",
        f"data.train_files={data}",
        "data.train_batch_size=8",
        "trainer.total_epochs=3",
    ]
    config, resolved = compose("train", words)
    assert config.steps == 3 * (108 // 8) and resolved.origins["steps"] == "--trainer.total_epochs"
    assert (
        "trainer.total_epochs=3 became steps=39: 3 epochs of 108 training rows in rows.jsonl, 8 "
        "prompts a step; 312 of 324 rows, as an epoch's last rows that fill no step are not counted"
        in resolved.start_lines
    )
    assert compose("train", [*words, "trainer.total_training_steps=5"])[0].steps == 5
    assert compose("train", ["steps=7", *words])[0].steps == 7
    trl = [
        "reward=f.py:g",
        "task=custom",
        f"task.path={data}",
        "batch.prompts_per_step=8",
        "num_train_epochs=0.5",
    ]
    assert (
        compose("train", trl)[0].steps == 7  # 0.5 x 13, rounded up as in transformers
        and compose("train", [*trl, "max_steps=9"])[0].steps == 9
    )


@pytest.mark.parametrize(
    ("rows", "prompts", "epochs", "steps", "said"),
    [
        (60, 32, "1", 2, "; 64 rows, the last 4 of a further epoch"),
        (5, 2, "1", 3, "; 6 rows, the last 1 of a further"),
        (5, 2, "3", 9, "; 18 rows, the last 3 of a further epoch"),
        (64, 32, "2", 4, "32 prompts a step"),
        (60, 32, "0.5", 1, "; 32 rows, the last 2 of"),
        (60, 32, "1.5", 3, "; 96 rows"),
        (1, 1, "0.1", 1, "; 1 row"),
    ],
)
def test_epochs_of_fine_tuning_are_rounded_up_as_in_trl(
    tmp_path, rows, prompts, epochs, steps, said
):
    data = tmp_path / "rows.jsonl"
    row = (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    data.write_text(row * rows)
    words = [f"task.path={data}", f"batch.prompts_per_step={prompts}", f"num_train_epochs={epochs}"]
    config, resolved = compose("sft", words)
    assert config.steps == steps
    (line,) = (line for line in resolved.start_lines if "became steps=" in line)
    assert said in line and ("further" in line) == (steps * prompts > float(epochs) * rows)
    unread = compose("sft", [*words, "task.path=org/data"])[1].start_lines
    assert any(
        f"steps to {float(epochs):g} x (rows / {prompts}, rounded up)" in line for line in unread
    )


def test_an_epoch_of_several_files_names_them_and_counts_one_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in {"a": range(30), "b": range(30, 40), "val": range(50, 55)}.items():
        lines = [f'{{"prompt": "{row}"}}\n' for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    words = ["data.val_files=val.jsonl", "reward=f.py:g", "data.train_batch_size=10"]
    words += ["trainer.total_epochs=1", "actor_rollout_ref.rollout.n=4"]
    for files, steps, said in (
        ("[a.jsonl,b.jsonl]", 4, "40 training rows in a.jsonl and b.jsonl, 10 prompts a step"),
        ("[a.jsonl,a.jsonl,b.jsonl]", 7, "70 training rows in 3 files, 10 prompts a step"),
    ):
        config, resolved = compose("train", [f"data.train_files={files}", *words])
        assert config.steps == steps
        assert any(said in line for line in resolved.start_lines)


def test_epochs_count_the_prompts_of_all_devices(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{row}"}}\n' for row in range(107)))
    (tmp_path / "test.jsonl").write_text('{"prompt": "held out"}\n')
    words = [
        "reward=f.py:g",
        f"dataset_name={tmp_path}",
        "num_generations=4",
        "per_device_train_batch_size=8",
        "gradient_accumulation_steps=4",
        "num_train_epochs=1",
    ]
    config, resolved = compose("train", words)
    assert (config.batch.prompts_per_device, config.steps) == (8, 13)
    assert any(
        f"107 training rows in {tmp_path.name}, 8 prompts a step; 104 of 107 rows, as an epoch's"
        in line
        for line in resolved.start_lines
    )
    config, resolved = compose("train", [*words, "mesh.fsdp=4"])
    assert config.steps == 3 and any(
        "32 prompts a step (8 a device x 4)" in line for line in resolved.start_lines
    )
    assert compose("train", [*words, "mesh.fsdp=-1", "mesh.trainer=2"])[0].steps == 6
    with pytest.raises(
        ShoalError,
        match=r"num_train_epochs=1 needs the number of devices.*13 on 1 device, 3 on 4, 1 ",
    ):
        compose("train", [*words, "mesh.fsdp=-1"])
    assert compose("train", [*words, "mesh.fsdp=-1", "max_steps=9"])[0].steps == 9


@pytest.mark.parametrize("words", [["task=gsm8k"], ["task=gsm8k", "per_device_batch_size=2"]])
def test_epochs_of_unknown_rows_leave_the_steps_and_say_what_to_write(words):
    config, resolved = compose("train", [*words, "trainer.total_epochs=3"])
    assert config.steps == 200 and resolved.origins["steps"] == "task gsm8k"
    [line] = [
        line
        for line in resolved.start_lines
        if line.startswith("trainer.total_epochs=3 changes nothing here: ")
    ]
    assert "set steps to 3 x rows // " in line


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        (["data.train_batch_size=8", "trainer.test_freq=5"], "verl"),
        (["--beta=0.1", "--epsilon=0.1", "--num_generations=4"], "trl"),
        (["--learning_rate=1e-5", "--num_generations=4", "--max_steps=9"], "trl"),
        (["--learning_rate=1e-5", "--num_generations=4"], "trl or recipe=maxtext"),
        (["--learning_rate=1e-5", "run_name=first", "steps=9"], ""),
        (["data.train_batch_size=8", "trainer.test_freq=5", "recipe=verl"], ""),
        (["grpo.yml", "grpo_beta=0.1", "grpo_epsilon=0.1"], ""),
    ],
)
def test_a_systems_recipe_is_named_beside_its_flags(words, recipe):
    found = []
    for note in compose("train", words)[1].start_lines:
        if "flags change only what they name" in note:
            found.append(note)
    expected = [f"Shoal's defaults, and recipe={recipe} sets "] if recipe else []
    assert len(found) == len(expected)
    assert all(text in note for text, note in zip(expected, found, strict=True))


def test_a_recipe_of_many_keys_is_one_short_line():
    [line] = [
        note
        for note in compose("train", ["recipe=verl"])[1].start_lines
        if note.startswith("recipe=verl")
    ]
    assert line.endswith(" more keys (--dry-run lists them)") and len(line) < 300


def test_a_file_that_leaves_a_tasks_preset_out_says_so(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("task: gsm8k\noptimizer: {lr: 1.0e-6}\n")
    config, resolved = compose("train", [str(file)])
    assert config.sampling.max_completion_tokens == 64
    [note] = resolved.notes
    assert (
        "mine.yaml does not load the preset of task=gsm8k" in note
        and "sampling.max_completion_tokens=64 (preset: 512)" in note
        and "defaults: [gsm8k, _self_]" in note
    )
    assert "batch.prompts_per_step=32 (preset: " in note
    file.write_text("task: gsm8k\nbatch: {prompts_per_device: 2}\n")
    [note] = compose("train", [str(file)])[1].start_lines
    assert "batch.prompts_per_step" not in note  # another key takes its place
    file.write_text("defaults: [gsm8k, _self_]\noptimizer: {lr: 1.0e-5}\n")
    config, resolved = compose("train", [str(file)])
    assert (config.sampling.max_completion_tokens, config.optimizer.lr, resolved.notes) == (
        512,
        1e-5,
        (),
    )


def test_data_files_of_ones_own_bring_the_preset_of_such_data():
    config, _ = compose("train", ["data.train_files=a/x.parquet"])
    assert (config.task.name, config.task.path, config.sampling.max_prompt_tokens) == (
        "custom",
        "a/x.parquet",
        1024,
    )


def test_flags_stand_in_files_too(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [grpo, _self_]\nnum_generations: 8\ngrpo_beta: 0.2\n")
    config, resolved = compose("train", [str(file), "max_prefill_predict_length=300"])
    assert (
        config.batch.group_size,
        config.algorithm.kl_coef,
        config.sampling.max_completion_tokens,
    ) == (8, 0.2, 468)
    file.write_text("num_generations: 8\nbatch: {group_size: 4}\n")
    with pytest.raises(
        ShoalError,
        match=r"num_generations and batch.group_size both set batch.group_size; write one",
    ):
        compose("train", [str(file)])
    assert compose("train", [str(file), "batch.group_size=2"])[0].batch.group_size == 2
    file.write_text("learning_rate: 1.0e-6\nenv: {num_envs: 4}\nmax_target_length: 300\n")
    config, resolved = compose("eval", [str(file)])
    assert (
        config.sampling.max_completion_tokens == 44
        and "1 key that only training reads" in resolved.notes[0]
    )


# ---- recipes and algorithms


@pytest.fixture
def packaged(monkeypatch, tmp_path):
    """Settings of our own beside those that are packaged."""
    folder = tmp_path / "presets"
    shutil.copytree(PRESETS, folder)
    (folder / "recipe").mkdir()
    (folder / "algorithm" / "mine.yaml").write_text("algorithm: {clip_high: 0.5, loss: cispo}\n")
    (folder / "recipe" / "theirs.yaml").write_text(
        "algorithm: {clip_high: 0.4, clip_low: 0.1}\noptimizer: {lr: 0.5}\nsteps: 80\n"
    )
    monkeypatch.setattr("shoal.config.preset_files.PRESETS", folder)
    return tmp_path


def seen(*words: str) -> tuple:
    config = compose("train", list(words))[0]
    return (
        config.optimizer.lr,
        config.algorithm.clip_low,
        config.algorithm.clip_high,
        config.algorithm.loss,
    )


def test_what_lies_over_what(packaged):
    assert seen("recipe=theirs") == (0.5, 0.1, 0.4, "grpo")
    assert seen("algorithm=mine", "recipe=theirs") == (0.5, 0.1, 0.5, "cispo")
    assert seen("recipe=theirs", "algorithm=mine", "algorithm.clip_high=0.3") == (
        0.5,
        0.1,
        0.3,
        "cispo",
    )
    assert seen("recipe=theirs", "task=gsm8k")[0] == 0.5
    file = packaged / "file.yaml"
    file.write_text("recipe: theirs\nalgorithm: {name: mine, clip_low: 0.15}\n")
    assert seen(str(file)) == (0.5, 0.15, 0.5, "cispo")
    assert seen(str(file), "recipe=theirs") == (0.5, 0.15, 0.5, "cispo")
    assert seen(str(file), "algorithm=mine") == (0.5, 0.15, 0.5, "cispo")
    assert seen(str(file), "recipe=", "algorithm.name=") == (1.5e-4, 0.15, 0.2, "grpo")
    assert from_overrides(Config, recipe="theirs", algorithm="mine")[0].algorithm.clip_high == 0.5
    assert compose("doctor", ["recipe=theirs"])[0].optimizer.lr == 0.5


def test_what_a_recipe_sets_is_said(packaged):
    _, resolved = compose("train", ["recipe=theirs", "algorithm=mine", "algorithm.clip_low=0.3"])
    assert resolved.notes == (
        "recipe=theirs differs from Shoal's defaults in: optimizer.lr=0.5 (ours: 0.00015), "
        "steps=80 (ours: 40)",
        "algorithm=mine differs from Shoal's defaults in: algorithm.clip_high=0.5 (ours: 0.2), "
        "algorithm.loss=cispo (ours: grpo)",
    )
    for word, part in (
        ("recipe=thiers", "did you mean theirs?"),
        ("algorithm=mien", "did you mean mine?"),
    ):
        with pytest.raises(ShoalError, match=re.escape(part)):
            compose("train", [word])


def test_a_stored_configuration_comes_out_unchanged(packaged):
    config, resolved = compose(
        "train", ["recipe=theirs", "algorithm=mine", "algorithm.clip_high=0.3", "grpo_beta=0.1"]
    )
    stored = packaged / "config.yaml"
    stored.write_text(resolved.text)
    again, found = load(Config, compose("train", ["resume=last"])[1].arguments, stored)
    assert (
        found.text.replace("resume: last", "resume: ''") == resolved.text
        and again.recipe == "theirs"
    )
    assert (
        compose("train", [str(stored)])[0] == config
        and compose("train", [str(stored)])[1].notes == ()
    )


@pytest.mark.parametrize(
    "word", [f"{kind}={name}" for kind in ("recipe", "algorithm") for name in presets_of(kind)]
)
def test_each_recipe_and_algorithm_composes_and_says_what_it_sets(word):
    config, resolved = compose("train", [word])
    assert config != Config() and resolved.notes[0].startswith(
        f"{word} differs from Shoal's defaults in: "
    )


def test_values_of_trls_lists_follow_their_flag():
    """As the parser of transformers takes them; the second value was read as a name of a key."""
    words = ["recipe=trl", "dataset_name=a.jsonl", "reward_funcs=f.py:g", "--use_peft"]
    words += ["--lora_target_modules", "q_proj", "o_proj", "--report_to", "tensorboard", "wandb"]
    words += ["--include_for_metrics", "inputs", "loss", "--learning_rate", "1e-5"]
    config, _ = compose("train", words)
    assert config.model.lora.targets == ("q_proj", "o_proj")
    assert config.report.tensorboard and config.report.wandb.mode == "auto"
    assert config.optimizer.lr == 1e-5


def test_a_switch_of_trl_is_turned_off_by_no():
    for word in ("--no_shuffle_dataset", "--no-shuffle-dataset"):
        config, _ = compose("train", [word, "--no_remove_unused_columns"])
        assert config.train.shuffle is False
    with pytest.raises(ShoalError, match="no_such_flag: there is no such key"):
        compose("train", ["--no_such_flag"])


def test_generation_kwargs_may_be_a_json_object():
    words = ["--generation_kwargs", '{"stop_strings": ["."], "top_k": 7}']
    config, _ = compose("train", words)
    assert config.sampling.stop == (".",) and config.sampling.top_k == 7
    with pytest.raises(ShoalError, match=r"generation_kwargs\.penalty=2 is not supported"):
        compose("train", ["--generation_kwargs", '{"penalty": 2, "top_k": 7}'])


def test_a_word_of_a_message_is_no_key():
    with pytest.raises(ShoalError) as error:
        compose("train", ["eval_strategy=never", "--max_steps=3"])
    assert "max_steps" not in str(error.value)
