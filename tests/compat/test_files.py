"""Configuration files of other systems, with the keys and values that these have: what acts, what
is listed once, what is an error; files over an entry point's preset; where each value came from.

The files under `files/` hold the keys and values of MaxText's base.yml, grpo.yml and rl.yml (August
2026), TorchRL's grpo_gsm8k.yaml and grpo_ifeval.yaml, and verl's ppo_trainer.yaml as it prints it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal import cli
from shoal.commands.compat import shim_argv
from shoal.compat.front import add_typed_names
from shoal.config.merge import compose
from shoal.config.sections.model import LoraSection
from shoal.config.stored import difference_from_defaults
from shoal.records import ShoalError

FILES = Path(__file__).parent / "files"


def load(name: str, *words: str):
    return compose("train", [str(FILES / name), *words])


def idle_of(resolved) -> list[str]:
    """The names in the one line on keys that change nothing."""
    [line] = [line for line in resolved.became if "that change nothing here: " in line]
    names = line.partition("here: ")[2].split(", ")
    [at_start] = [line for line in resolved.start_lines if "that change nothing here: " in line]
    if len(names) <= 8:
        assert at_start == line
    else:
        assert at_start.endswith(f": {', '.join(names[:3])} and others (--dry-run names all)")
    return names


def test_maxtexts_rl_file_loads():
    config, resolved = load("rl.yml")
    assert difference_from_defaults(config) == {
        "seed": 42,
        "steps": 4,
        "task.name": "gsm8k",
        "task.subset": "main",
        "task.num_eval_questions": 5,
        "sampling.temperature": 0.9,
        "sampling.top_k": 50,
        "sampling.max_completion_tokens": 768,
        "sampling.memory_share": 0.72,
        "algorithm.kl_coef": 0.08,
        "algorithm.aggregation": "seq-mean-token-mean",
        "optimizer.lr": 3e-6,
        "optimizer.clip_grad_norm": 0.1,
        "optimizer.beta2": 0.99,
        "batch.prompts_per_step": 1,
        "batch.group_size": 2,
        "train.max_staleness": 0,
        "mesh.trainer": "0.5",
        "mesh.sampler": "0.5",
        "mesh.pathways": True,
        "train.evaluate_every": 0,
        "checkpoint.every": 50,
        "checkpoint.keep_last": 10,
    }
    assert {"attention", "swap_space_vllm_gb", "generation_configs.greedy.eval_top_k"} <= set(
        idle_of(resolved)
    )


def test_maxtexts_grpo_file_loads():
    config, resolved = load(
        "grpo.yml", "inference_devices_per_replica=None", "inference_replicas=None"
    )
    assert difference_from_defaults(config) == {
        "sampling.temperature": 0.9,
        "sampling.max_prompt_tokens": 512,
        "sampling.max_completion_tokens": 512,
        "algorithm.kl_coef": 0.04,
        "optimizer.lr": 1e-6,
        "optimizer.beta2": 0.999,
        "batch.group_size": 4,
    }
    assert len(idle_of(resolved)) == 21
    assert any(
        note.startswith("base_config=base.yml changes nothing here")
        for note in resolved.start_lines
    )


def test_maxtexts_file_of_defaults_loads():
    config, resolved = load("base.yml")
    assert (config.steps, config.optimizer.lr, config.batch.prompts_per_device) == (
        150001,
        3e-5,
        12,
    )
    assert (config.optimizer.warmup_steps, config.mesh.fsdp, config.optimizer.weight_decay) == (
        15000,
        -1,
        0.1,
    )
    assert len(idle_of(resolved)) > 600
    assert any(
        line.startswith("learning_rate_final_fraction=0.1 changes nothing here")
        for line in resolved.became
    )
    [idle] = [line for line in resolved.start_lines if line.startswith("change nothing here (")]
    assert "learning_rate_final_fraction=0.1" in idle


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "grpo_gsm8k.yaml",
            {"task": "gsm8k", "steps": 3125, "prompts": 2, "kl_coef": 0.0, "kl_placement": "loss"},
        ),
        (
            "grpo_ifeval.yaml",
            {
                "task": "ifeval",
                "steps": 1563,
                "prompts": 4,
                "kl_coef": 0.0,
                "kl_placement": "reward",
            },
        ),
    ],
)
def test_torchrls_files_load_with_their_adapter(name, expected):
    config, resolved = load(name, "train.kl_to_inference_coeff=0")
    assert config.model.lora == LoraSection(rank=8, alpha=16.0)
    assert (
        load(name, "train_model.lora.enabled=false", "train.kl_to_inference_coeff=0")[0].model.lora
        == LoraSection()
    )
    assert (config.task.name, config.steps, config.batch.prompts_per_step) == (
        expected["task"],
        expected["steps"],
        expected["prompts"],
    )
    assert (config.algorithm.kl_coef, config.algorithm.kl_placement) == (
        expected["kl_coef"],
        expected["kl_placement"],
    )
    assert config.batch.group_size == 16 and config.model.dtype == "bfloat16"
    assert {"ray.init_config.num_cpus", "hydra.run.dir", "ref_model.lora.enabled"} <= set(
        idle_of(resolved)
    )


def test_what_matters_and_has_no_counterpart_is_named_all_at_once(tmp_path):
    file = tmp_path / "grpo_gsm8k.yaml"
    text = (FILES / file.name).read_text(encoding="utf-8")
    text = text.replace("reasoning: false", "reasoning: true")
    file.write_text(
        text.replace("quantization:\n    enabled: false", "quantization:\n    enabled: true", 1)
    )
    with pytest.raises(ShoalError) as caught:
        compose("train", [str(file)])
    text = str(caught.value)
    assert (
        "train_model.quantization.enabled=true is not supported: 8-bit weights are "
        "model.quantise=int8" in text
    )
    assert "env.reasoning=true is not supported" in text
    assert text.count("grpo_gsm8k.yaml:") == 2 and "\n" not in text


def test_verls_file_loads_with_its_critic():
    config, _ = load("ppo_trainer.yaml")
    assert config.algorithm.advantage == "gae" and config.batch.group_size == 1
    assert (config.algorithm.discount, config.algorithm.lam, config.critic.lam) == (1, 1, -1)
    assert (config.critic.lr, config.critic.value_clip, config.critic.warmup_steps) == (
        1e-5,
        0.5,
        0,
    )
    words = ["algorithm.gamma=0.9", "algorithm.lam=0.95", "trainer.critic_warmup=7"]
    config, _ = load("ppo_trainer.yaml", *words, "actor_rollout_ref.rollout.n=4")
    assert (config.algorithm.discount, config.algorithm.lam, config.critic.lam) == (0.9, 0.95, -1)
    assert (config.critic.warmup_steps, config.batch.group_size) == (7, 4)
    with pytest.raises(ShoalError, match="adv_estimator=gae, which has a critic"):
        load("ppo_trainer.yaml", "algorithm.adv_estimator=grpo", words[2])


def test_verls_file_loads_with_an_estimator_of_groups():
    config, resolved = load(
        "ppo_trainer.yaml",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=5",
        "trainer.total_training_steps=10",
    )
    assert (config.steps, config.batch.group_size, config.batch.prompts_per_step) == (10, 5, 1024)
    assert (config.algorithm.num_minibatches, config.algorithm.clip_dual, config.mesh.trainer) == (
        4,
        3.0,
        "8",
    )
    assert (config.mesh.fsdp, config.mesh.sampler_tensor) == (-1, 2)
    assert (config.task.name, config.task.path) == ("custom", "~/data/rlhf/gsm8k/train.parquet")
    assert (config.model.dtype, config.optimizer.beta2, config.optimizer.clip_grad_norm) == (
        "bfloat16",
        0.999,
        1.0,
    )
    assert "global_profiler.tool" in idle_of(resolved)
    config, _ = load(
        "ppo_trainer.yaml",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=5",
        "data.max_response_length=700",
        "actor_rollout_ref.actor.optim.clip_grad=0.5",
    )
    assert (config.sampling.max_completion_tokens, config.optimizer.clip_grad_norm) == (700, 0.5)


@pytest.mark.parametrize(
    "line",
    [
        "actor_rollout_ref.rollout.logprobs_mode: raw_logprobs",
        "actor_rollout_ref.rollout.quantization: torchao",
        "actor_rollout_ref.rollout.agent.default_agent_loop: tool_agent",
        "actor_rollout_ref.rollout.skip_rollout: true",
        "actor_rollout_ref.model.exclude_modules: x",
        "actor_rollout_ref.model.mtp.enable: true",
        "actor_rollout_ref.model.override_config: {num_hidden_layers: 2}",
        "actor_rollout_ref.ref.model.path: other",
        "actor_rollout_ref.actor.optim.min_lr_ratio: 0.1",
        "actor_rollout_ref.actor.optim.optimizer: Muon",
        "actor_rollout_ref.actor.fsdp_config.model_dtype: bf16",
        "actor_rollout_ref.actor.router_replay.mode: R2",
        "data.custom_cls.path: mine.py",
        "data.sampler.class_path: mine.py",
        "reward_manager.name: prime",
        "reward_model.reward_manager: prime",
        "critic.enable: true",
        "algorithm.rollout_correction.something: 1",
        "data.something: 1",
        "actor_rollout_ref.rollout.something: 1",
    ],
)
def test_what_matters_in_verls_files_is_no_pattern(line, tmp_path):
    file = tmp_path / "verl.yml"
    file.write_text(
        "trainer.total_epochs: 1\ntrainer.critic_warmup: 0\ntrainer.balance_batch: true\n" + line
    )
    with pytest.raises(ShoalError, match=r"^verl\.yml:\d: " + line.partition(":")[0]):
        compose("train", [str(file)])


def test_verls_file_of_fully_asynchronous_training_loads(tmp_path):
    file = tmp_path / "async.yml"
    file.write_text("""\
async_training: {staleness_threshold: 0.1, trigger_parameter_sync_step: 4, require_batches: 1, \
partial_rollout: true,
  use_trainer_do_validate: false, use_dynamic_resource_scheduling: false, dynamic_schedule_policy: \
default,
  dynamic_schedule_deactivate_ratio: 0.3, concurrent_samples_per_replica: 16}
rollout: {nnodes: 1, n_gpus_per_node: 8, n: 4, total_rollout_steps: 100}
data: {gen_batch_size: 1, train_batch_size: 0}
actor_rollout_ref:
  rollout: {calculate_log_probs: true, standalone_gpu_memory_utilization: null, checkpoint_engine: \
{backend: nccl}}
  actor: {use_rollout_log_probs: true, ppo_mini_batch_size: 8}
  model: {use_remove_padding: true}
algorithm.rollout_correction.bypass_mode: true
""")
    assert compose("train", [str(file)])[0].algorithm.correction == "direct"
    config, _ = compose("train", [str(file), "algorithm.rollout_correction.bypass_mode=false"])
    assert difference_from_defaults(config) == {
        "steps": 12,
        "batch.prompts_per_step": 8,
        "train.weight_sync_interval": 4,
        "train.max_staleness": 4,
        "train.versions": "newest",
        "mesh.sampler": "8",
    }


def test_patterns_of_names_count_in_their_own_files_alone(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text("base_output_dir: x\nsteps: 3\n")  # `base_*` is MaxText's
    with pytest.raises(ShoalError, match=r"mine.yml:1: base_output_dir: there is no such key"):
        compose("train", [str(file)])
    with pytest.raises(ShoalError, match="base_output_dir: there is no such key"):
        compose(
            "train", ["base_output_dir=x", "learning_rate=1", "num_generations=4", "grpo_beta=0"]
        )


# ---- entry points


@pytest.mark.parametrize(
    "words", [["--config_file={}"], ["--config-name={}"], ["config_file={}"], ["{}"]]
)
def test_a_file_lies_over_the_entry_points_preset(words, tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(
        "num_generations: 8\ngrpo_beta: 0.2\nlearning_rate: 1.0e-6\nmax_target_length: 1024\n"
    )
    words = shim_argv("grpo_demo", [word.format(file) for word in words])
    config, resolved = compose(words[0], words[1:])
    assert (config.task.name, config.recipe, config.steps) == ("gsm8k", "maxtext", 100)
    assert (config.optimizer.lr, config.batch.group_size, config.algorithm.kl_coef) == (
        1e-6,
        8,
        0.2,
    )
    assert config.sampling.max_completion_tokens == 768
    assert (
        resolved.origins["optimizer.lr"] == "mine.yml:3"
        and resolved.origins["steps"] == "preset grpo_demo"
    )


def test_a_packaged_preset_takes_the_place_of_the_entry_points_own():
    words = shim_argv("grpo", ["--config-name", "grpo_ifeval"])
    own = [word for word in words if word.startswith(("report.", "algorithm."))]
    assert (
        compose(words[0], words[1:])[0]
        == compose("train", ["--config-name", "grpo_ifeval", *own])[0]
    )


def test_an_entry_points_own_words_yield_to_the_users():
    words = shim_argv("grpo-async", ["train.max_staleness=3"])
    config, resolved = compose(words[0], words[1:])
    assert config.train.max_staleness == 3 and not any(
        "more than once" in note for note in resolved.start_lines
    )


def test_a_real_file_under_an_entry_point():
    words = shim_argv("train_rl", [str(FILES / "rl.yml"), "learning_rate=1e-5"])
    config, resolved = compose(words[0], words[1:])
    assert (config.recipe, config.reward.preset, config.optimizer.lr, config.steps) == (
        "tunix",
        "tunix",
        1e-5,
        4,
    )
    assert resolved.origins["optimizer.lr"] == "--learning_rate"


# ---- where values came from, and errors


@pytest.mark.slow
def test_each_value_says_where_it_came_from(tmp_path, capsys):
    file = tmp_path / "mine.yml"
    file.write_text("recipe: maxtext\n\n\nbatch: {group_size: 4}\n")
    assert cli.main(["train", str(file), "--learning_rate=3e-6", "steps=7", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for line in (
        "optimizer.lr=3e-06  # --learning_rate",
        "batch.group_size=4  # mine.yml:4",
        "steps=7  # command line",
        "algorithm.kl_coef=0.08  # set by recipe=maxtext",
        "algorithm.std_ddof=0  # set by recipe=maxtext",
    ):
        assert line in out
    assert cli.main(["train", "task=gsm8k", "algorithm=gspo", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "optimizer.lr=1e-06  # set by the preset of task=gsm8k" in out
    assert "algorithm.loss=gspo  # set by algorithm=gspo" in out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ["num_generations=1"],
            "has nothing to be compared with (batch.group_size: --num_generations)",
        ),
        (
            ["--learning_rate=fast"],
            "optimizer.lr='fast': expected a finite number (optimizer.lr: --learning_rate)",
        ),
        (
            ["max_target_length=200", "max_prefill_predict_length=300"],
            "(sampling.max_prompt_tokens: --max_prefill_predict_length)",
        ),
    ],
)
def test_an_error_names_the_flag(words, part):
    with pytest.raises(ShoalError) as caught:
        compose("train", words)
    assert part in str(caught.value)


def test_an_error_names_the_files_line(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text("steps: 3\nsampling:\n  top_p: 2\n")
    with pytest.raises(
        ShoalError, match=r"sampling.top_p=2.0: expected .* \(sampling.top_p: mine.yml:3\)"
    ):
        compose("train", [str(file)])
    file.write_text(
        "stpes: 3\nnum_generations: x\nvllm_importance_sampling_mode: odd\nseed: 1\nseed2: 1\n"
    )
    with pytest.raises(ShoalError) as caught:
        compose("train", [str(file)])
    for part in (
        "mine.yml:1: stpes",
        "batch.group_size: mine.yml:2",
        "mine.yml:3: vllm_importance_sampling_mode=odd",
        "mine.yml:5: seed2",
    ):
        assert part in str(caught.value)
    file.write_text("steps: 3\nsteps: 4\n")
    with pytest.raises(ShoalError, match="lines 1 and 2 both set steps"):
        compose("train", [str(file)])


def test_a_runs_error_names_their_flags_beside_our_keys():
    _, resolved = compose("train", ["per_device_batch_size=4", "num_generations=8", "model_name=x"])
    said = add_typed_names(
        "lower batch.prompts_per_device or sampling.max_completion_tokens; set HF_TOKEN", resolved
    )
    assert "(batch.prompts_per_device: --per_device_batch_size)" in said
    assert (
        "(in MaxText: sampling.max_completion_tokens is max_target_length, HF_TOKEN is "
        "hf_access_token)" in said
    )
    _, resolved = compose("train", ["steps=3"])
    assert (
        add_typed_names("lower batch.prompts_per_step", resolved) == "lower batch.prompts_per_step"
    )
    # A name that several systems have says nothing about whose words to use.
    shared = compose("train", ["learning_rate=1e-4"])[1]
    assert add_typed_names("set resume", shared) == "set resume"


def test_that_nothing_is_pushed_is_said_of_files_too(tmp_path):
    file = tmp_path / "trl.yml"
    said = "nothing is pushed while training: `shoal export from=RUN to=hub:USER/NAME`"
    for text, is_said in (("true", True), ("false", False)):
        file.write_text(f"push_to_hub: {text}\nhub_model_id: me/x\nlearning_rate: 1.0e-05\n")
        notes = compose("train", [str(file)])[1].start_lines
        assert any(said in note for note in notes) == is_said, notes


def test_what_decides_memory_is_named():
    words = ["--per_device_train_batch_size=8", "--num_generations=8"]
    note, setting_keys = compose("train", words)[1].flag_lines
    assert setting_keys == "set keys: num_generations=8 (batch.group_size)"
    assert note.endswith("at once on a device: batch.micro_tokens decides memory, never the result")


# ---- interpolation, lists of defaults


def test_references_are_to_final_values(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_NAME", "first")
    file = tmp_path / "mine.yml"
    file.write_text(
        "steps: 30\ntrain: {evaluate_every: '${steps}'}\nrun_name: ${oc.env:SOME_NAME}-${seed}\n"
        "sampling: {max_prompt_tokens: 40, max_completion_tokens: '${.max_prompt_tokens}'}\n"
        "optimizer: {beta1: '${oc.select:nope,0.5}'}\n"
    )
    config, _ = compose("train", [str(file), "steps=9", "seed=4"])
    assert (
        config.train.evaluate_every,
        config.run_name,
        config.sampling.max_completion_tokens,
    ) == (9, "first-4", 40)
    assert config.optimizer.beta1 == 0.5
    file.write_text("steps: ${train.evaluate_every}\ntrain: {evaluate_every: '${steps}'}\n")
    with pytest.raises(ShoalError, match="refers to itself"):
        compose("train", [str(file)])
    file.write_text("defaults: [mine, _self_]\n")
    with pytest.raises(ShoalError, match="lead back to itself"):
        compose("train", [str(file)])


def test_references_of_other_systems_files_are_to_final_values_too(tmp_path):
    """verl resolves them after the command line: one update of 8 prompts, not two of 4."""
    mini_batch = "ppo_mini_batch_size: '${data.gen_batch_size}'"
    lower = tmp_path / "lower.yaml"
    lower.write_text(
        f"actor_rollout_ref: {{actor: {{{mini_batch}}}}}\n"
        "data: {gen_batch_size: '${data.train_batch_size}', train_batch_size: 4}\n"
    )
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [lower, _self_]\ndata: {train_batch_size: 12}\n")
    for typed, prompts in (([], 12), (["data.train_batch_size=8"], 8)):
        config, _ = compose("train", ["recipe=verl", str(file), *typed])
        assert config.batch.prompts_per_step == prompts
        assert config.algorithm.num_minibatches == 1


def test_a_file_of_another_system_over_a_recipe_is_said(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(
        "env: {num_envs: 4, repeats: 4}\ntrain: {total_dialog_turns: 100, optim_batch_size: 4}\n"
    )
    said = (
        "is TorchRL's, and settings that it does not name are as in maxtext: recipe=torchrl sets "
        "TorchRL's defaults"
    )
    for recipe, is_said in (("maxtext", True), ("torchrl", False)):
        _, resolved = compose("train", [f"recipe={recipe}", f"config_file={file}"])
        assert any(said in note for note in resolved.start_lines) == is_said


def test_batches_of_an_evaluation_are_of_the_prompts_that_devices_have():
    config, _ = compose(
        "train", shim_argv("grpo_demo", ["num_test_batches=4", "per_device_batch_size=2"])[1:]
    )
    assert (config.batch.prompts_per_device, config.task.num_eval_questions) == (2, 8)
