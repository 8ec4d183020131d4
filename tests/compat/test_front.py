"""The front end alone: from layers of words as typed to layers of words of our keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.compat.front import translate
from shoal.config.arguments import NO_VALUE, Layer, Setting
from shoal.config.merge import Merged, compose
from shoal.config.sections.model import TeacherSection
from shoal.config.train import Config
from shoal.records import ShoalError


def layer(*words: str, file: Path | None = None) -> Layer:
    typed = []
    for word in words:
        name, _, value = word.partition("=")
        typed.append(Setting(name, value, f"--{name}"))
    return Layer(typed, file=file)


def words_of(layer: Layer) -> list[tuple[str, str, object]]:
    return [(setting.name, setting.key, setting.value) for setting in layer.settings]


def test_a_flag_is_replaced_where_it_stands():
    typed = layer("steps=3", "grpo_epsilon=0.1", "seed=1")
    [translated] = translate(Config, [typed]).layers
    assert words_of(translated) == [
        ("steps", "", "3"),
        ("grpo_epsilon", "algorithm.clip_low", "0.1"),
        ("grpo_epsilon", "algorithm.clip_high", "0.1"),
        ("seed", "", "1"),
    ]
    assert translated.typed == typed.settings


def test_only_the_highest_use_of_a_flag_is_replaced():
    file, line = translate(
        Config, [layer("num_generations=2"), layer("num_generations=4", "beta=0.1")]
    ).layers
    assert words_of(file) == []
    assert words_of(line) == [
        ("num_generations", "batch.group_size", "4"),
        ("beta", "algorithm.kl_coef", "0.1"),
    ]


def test_beside_a_teacher_trls_beta_is_the_divergence():
    """Of DistillationConfig, whose default is 1, or of GKDConfig, where it is 0.5."""
    for given, beta in (([], 1.0), (["beta=0.3"], 0.3), (["lmbda=1.0"], 0.5)):
        config, _ = compose("train", ["teacher_model_name_or_path=big", *given])
        assert config.teacher == TeacherSection("big", divergence="full", beta=beta)
        assert config.algorithm.advantage == "none" and config.algorithm.kl_coef == 0
    for words, error in (
        (["lmbda=1"], "lmbda=1: expected teacher_model_name_or_path too"),
        (["teacher_model_name_or_path=big", "lmbda=0.5"], "lmbda=0.5: expected 1"),
        (["teacher_model_name_or_path=big", "seq_kd=true"], "seq_kd=true: expected false"),
    ):
        with pytest.raises(ShoalError, match=error):
            compose("train", words)


def test_any_flag_of_trls_ppo_config_asks_for_ppo_with_its_defaults():
    config, _ = compose("train", ["cliprange=0.3", "vf_coef=0.2", "per_device_train_batch_size=16"])
    a = config.algorithm
    assert (a.advantage, a.lam, a.discount, a.num_epochs) == ("gae", 0.95, 1.0, 4)
    assert (a.clip_low, a.clip_high, config.critic.value_clip) == (0.3, 0.3, 0.2)
    assert (a.kl, a.kl_coef, a.kl_placement) == ("k1", 0.05, "reward")
    assert config.batch.group_size == 1 and config.batch.prompts_per_device == 16
    # One optimizer there: one learning rate, and one lambda.
    assert config.critic.lr == 0 and config.critic.lam == -1
    words = ["num_ppo_epochs=2", "num_mini_batches=4", "algorithm.lam=1", "critic.lr=1e-3"]
    words += ["gradient_accumulation_steps=2", "total_episodes=100", "num_train_epochs=3"]
    config, _ = compose("train", [*words, "response_length=24", "mesh.fsdp=1"])
    a = config.algorithm
    assert (a.num_epochs, a.num_minibatches, a.lam) == (2, 4, 1.0)
    assert config.critic.lr == 1e-3 and config.sampling.max_completion_tokens == 24
    assert config.batch.prompts_per_device == 16 and config.steps == 7  # 100 / 16, rounded up
    for words, error in (
        (["lam=2"], "algorithm.lam"),
        (["gamma=0.9", "whiten_rewards=true"], "whiten_rewards=true is not supported: rewards are"),
        (["lam=1", "stop_token=period"], "stop_token=period: expected eos"),
        (["lam=1", "missing_eos_penalty=1.0"], "missing_eos_penalty=1.0 is not supported"),
        (["total_episodes=9", "per_device_train_batch_size=8", "mesh.fsdp=-1"], "leaves open"),
    ):
        with pytest.raises(ShoalError, match=error):
            compose("train", words)


def test_a_rules_words_stand_at_their_flags_and_have_the_values_of_what_lies_beneath():
    file = layer("sampling.max_prompt_tokens=100")
    line = layer("max_target_length=300")
    _, translated = translate(Config, [file, line]).layers
    assert words_of(translated) == [("max_target_length", "sampling.max_completion_tokens", "200")]
    assert translated.settings[0].of_rule


def test_a_rule_without_a_value_still_names_its_keys():
    [translated] = translate(Config, [layer("vllm_gpu_memory_utilization=0.5")]).layers
    assert {setting.value for setting in translated.settings} == {NO_VALUE}
    merged = Merged(Config, [translated])
    assert merged.in_effect == {} and merged.values_and_errors() == ({}, [])


def test_words_that_yield_to_all_else_are_a_layer_beneath_all():
    beneath, preset, line = translate(
        Config, [layer("task.name=gsm8k"), layer("data.train_files=a.parquet")]
    ).layers
    assert words_of(beneath) == [("data.train_files", "task.name", "custom")]
    assert Merged(Config, [beneath, preset, line]).get("task.name") == "gsm8k"


def test_files_may_have_absolute_and_relative_paths():
    below = Path.cwd() / "below"
    [_, line] = translate(Config, [layer(f"data.train_files=[{below}/a.parquet,b.parquet]")]).layers
    values = {setting.key: setting.value for setting in line.settings}
    assert values["task.path"] == str(Path.cwd())
    assert values["task.files"] == ["below/a.parquet", "b.parquet"]
    [error] = translate(Config, [layer("data.train_files=[gs://a/b.parquet,b.parquet]")]).errors
    assert error.startswith("data.train_files=") and "in a bucket or here" in error


def test_errors_of_flags_and_of_our_own_keys_come_together():
    translation = translate(Config, [layer("grpo_epsilon=x", "stepz=3")])
    assert [error.partition(":")[0] for error in translation.errors] == [
        "grpo_epsilon=x",
        "stepz",
    ]
    assert translation.became == []


def test_meshes_of_several_shapes_are_named_in_the_order_given(tmp_path):
    file = tmp_path / "tunix.yml"
    file.write_text(
        "actor_model_config: {mesh: {shape: '(2,2)'}}\n"
        "rollout_model_config: {mesh: {shape: '(4,1)'}}\n"
        "reference_model_config: {mesh: {shape: '(8,1)'}}\n"
    )
    with pytest.raises(ShoalError, match=r"got \('2,2', '4,1', '8,1'\)"):
        compose("train", [str(file)])
