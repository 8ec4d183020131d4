"""What a run answers to flags of verl that it cannot follow, or follows by another word."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli import main
from shoal.commands.compat import checked_scripts, shim_argv
from shoal.compat.front import add_typed_names
from shoal.config.commands import CompatConfig
from shoal.config.merge import compose
from shoal.config.stored import to_yaml
from shoal.job.head import critic_text
from shoal.job.training import reported_name
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


def test_an_evaluation_alone_is_a_run_of_no_steps(tmp_path):
    only, steps = "trainer.val_only=True", "trainer.total_training_steps=3"
    for words in ([only], [only, steps], [steps, only], [only, "trainer.total_epochs=2"]):
        config, resolved = compose("train", ["recipe=verl", *words])
        assert config.steps == 0 and config.train.evaluate_first
        assert any(
            "an evaluation is all that the run does" in line for line in resolved.start_lines
        )
    assert compose("train", [steps, "trainer.val_only=False"])[0].steps == 3
    file = tmp_path / "mine.yml"
    file.write_text("trainer: {val_only: false, total_training_steps: 3}\n")
    assert compose("train", [str(file)])[0].steps == 3
    assert compose("train", [str(file), only])[0].steps == 0
    with pytest.raises(ShoalError, match=r"val_only=True is for the evaluation that trainer"):
        compose("train", [only, "trainer.val_before_train=False"])


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
    word = "async_training.compute_prox_log_prob=false"
    assert refusal(word).startswith(f"{word}: expected true; ")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("actor_rollout_ref.actor.nonexisting", ""),
        ("actor_rollout_ref.rollout.nonexisting", ""),
        ("actor_rollout_ref.actor.ppo_epoch", "actor_rollout_ref.actor.ppo_epochs"),
        ("actor_rollout_ref.actr.ppo_epochs", "actor_rollout_ref.actor.ppo_epochs"),
        ("actor_rollout_ref.rollout.nn", "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
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
    assert (config.base_output_directory, config.run_name) == ("ck/mine", "mine-1")
    assert "${trainer.project_name} refers to nothing that is set" in refusal(folder, names[1])
    itself = "trainer.experiment_name=${trainer.experiment_name}-1"
    assert "refers to itself" in refusal(itself)
    # What changes nothing here need not be resolved.
    compose("train", ["trainer.rollout_data_dir=${nothing}/dump", "trainer.save_freq=5"])


PROJECT = "trainer.project_name=p"
EXPERIMENT = "trainer.experiment_name=e"


@pytest.mark.parametrize(
    ("words", "base", "run_name"),
    [
        ([PROJECT, EXPERIMENT], "outputs", "p/e"),
        ([PROJECT, EXPERIMENT, "base_output_directory=out"], "out", "p/e"),
        ([PROJECT], "outputs", ""),
        ([EXPERIMENT], "outputs", "e"),
        ([PROJECT, EXPERIMENT, "run_name=mine"], "outputs", "mine"),
        ([PROJECT, EXPERIMENT, "trainer.default_local_dir=ck"], "ck", "e"),
        ([PROJECT, EXPERIMENT, "trainer.default_local_dir=ck/p/e"], "ck/p", "e"),
        ([EXPERIMENT, "trainer.default_local_dir=/e/"], "/", "e"),
        ([EXPERIMENT, "trainer.default_local_dir=e"], ".", "e"),
        ([EXPERIMENT, "trainer.default_local_dir=gs://bucket/ck/e"], "gs://bucket/ck", "e"),
        ([EXPERIMENT, "trainer.default_local_dir=gs://e"], "gs://e", "e"),
        ([EXPERIMENT, "trainer.default_local_dir=ck/some"], "ck/some", "e"),
        (["trainer.default_local_dir=ck/p/e"], "ck/p/e", ""),
    ],
)
def test_a_run_has_the_folder_of_its_project_and_experiment(words, base, run_name):
    """verl writes to default_local_dir, by default checkpoints/PROJECT/EXPERIMENT."""
    config, _ = compose("train", words)
    assert (config.base_output_directory, config.run_name) == (base, run_name)
    report = config.report
    projects = {report.wandb.project, report.mlflow.experiment, report.trackio.project}
    assert projects == {"p" if PROJECT in words else "shoal"}


def store_run(folder, project):
    """Writes the settings of a run of a W&B project into a folder."""
    folder.mkdir(parents=True)
    config, _ = compose("train", [f"report.wandb.project={project}"])
    (folder / "config.yaml").write_text(to_yaml(config))


def test_a_run_in_the_folder_that_it_had_before_goes_on_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store_run(tmp_path / "outputs" / "e", "p")
    store_run(tmp_path / "ck" / "p" / "e" / "e", "p")
    config, resolved = compose("train", [PROJECT, EXPERIMENT])
    assert config.run_name == "e"
    said = "the run that was begun in outputs/e goes on there; a new one is in outputs/p/e"
    assert any(said in line for line in resolved.start_lines)
    # Another project's run of this name is another run.
    assert compose("train", ["trainer.project_name=q", EXPERIMENT])[0].run_name == "q/e"
    words = [PROJECT, EXPERIMENT, "trainer.default_local_dir=ck/p/e"]
    config, resolved = compose("train", words)
    assert (config.base_output_directory, config.run_name) == ("ck/p/e", "e")
    assert any("begun in ck/p/e/e goes on there" in line for line in resolved.start_lines)
    # Once there is a run in the new place, that one goes on.
    store_run(tmp_path / "outputs" / "p" / "e", "p")
    assert compose("train", [PROJECT, EXPERIMENT])[0].run_name == "p/e"


def test_how_a_run_of_verl_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    disable = "trainer.resume_mode=disable"
    assert compose("train", [PROJECT, EXPERIMENT, disable])[0].resume == ""
    store_run(tmp_path / "outputs" / "p" / "e", "p")
    said = refusal(PROJECT, EXPERIMENT, disable)
    assert "trainer.resume_mode=disable: outputs/p/e holds a run" in said
    assert "another trainer.experiment_name" in said
    assert compose("train", [disable])[0].run_name == ""  # always a new folder
    _, resolved = compose("train", [PROJECT, EXPERIMENT, "trainer.resume_mode=auto"])
    assert not any("resume_mode" in line for line in resolved.start_lines)
    path = "trainer.resume_from_path=outputs/p/e/checkpoints"
    by_path = "trainer.resume_mode=resume_path"
    assert compose("train", [by_path, path])[0].resume == "outputs/p/e"
    config, resolved = compose("train", [path])
    assert config.resume == ""
    assert any("counts only with trainer.resume_mode=resume" in line for line in resolved.became)
    assert "needs trainer.resume_from_path" in refusal(by_path, "trainer.resume_from_path=null")
    _, resolved = compose("train", [PROJECT, EXPERIMENT])
    assert (
        "resume is trainer.resume_mode=resume_path trainer.resume_from_path=FOLDER"
        in add_typed_names("change them with resume=outputs/p/e", resolved)
    )
    assert "expected one of auto, disable, resume_path" in refusal("trainer.resume_mode=always")


def test_an_update_has_no_more_prompts_than_a_step():
    size = "actor_rollout_ref.actor.ppo_mini_batch_size"
    said = refusal("data.train_batch_size=8", f"{size}=16")
    assert f"{size}=16: expected at most batch.prompts_per_step=8" in said
    assert "data.train_batch_size" in said
    # verl's default, 256, need not be lowered by hand.
    config, _ = compose("train", ["recipe=verl", "data.train_batch_size=8"])
    assert config.algorithm.num_minibatches == 1


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


OVERLONG = ("enable=True", "len=32", "penalty_factor=0.5")
HEADS = [
    "+reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
    "reward.overlong_buffer.",
]


@pytest.mark.parametrize("head", HEADS)
def test_dapos_penalty_on_long_completions_is_reward_overlong_buffer_tokens(head):
    words = ["recipe=verl", "reward_model.reward_manager=dapo", "data.max_response_length=100"]
    words += [head + word for word in (*OVERLONG, "log=False")]
    config, resolved = compose("train", words)
    assert (config.reward.overlong_buffer_tokens, config.reward.overlong_penalty) == (32, 0.5)
    assert any(": over the last 32 of 100 tokens" in line for line in resolved.became)
    with_limit = [*words, "+reward_model.reward_kwargs.max_resp_len=100"]
    assert compose("train", with_limit)[0].reward.overlong_buffer_tokens == 32
    off, _ = compose("train", ["algorithm=dapo", *words, head + "enable=False"])
    assert off.reward.overlong_buffer_tokens == 0


def test_verls_batch_manager_says_which_completions_a_call_has():
    for word in ("reward_model.reward_manager=batch", "reward.reward_manager.name=batch"):
        _, resolved = compose("train", ["recipe=verl", word])
        [line] = [line for line in resolved.became if line.startswith(word)]
        assert "of the completions of one prompt at a time, there of a whole step" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reward_model.reward_manager=prime"], "=prime: expected naive, dapo or batch"),
        (["reward_manager.name=naive", *(HEADS[2] + word for word in OVERLONG)], "which alone"),
        (["reward_manager.name=batch", *(HEADS[2] + word for word in OVERLONG)], "which alone"),
        ([HEADS[2] + "enable=True"], "enable=true needs reward_model.overlong_buffer.len"),
        ([HEADS[1] + word for word in OVERLONG[:2]], "overlong_buffer_cfg.penalty_factor"),
        (
            [*(HEADS[1] + word for word in OVERLONG), "reward.reward_kwargs.max_resp_len=7"],
            "max_resp_len=7: expected 512 (data.max_response_length)",
        ),
        (["reward_model.reward_kwargs.other=7"], "dapo's max_resp_len and overlong_buffer_cfg"),
        (["reward.reward_kwargs.other=7"], "are custom_reward_function.reward_kwargs.NAME"),
        (["data.gen_batch_size=8"], "without it verl trains on all prompts that are sampled"),
        (["data.truncation=up"], "expected one of error, left, right, middle"),
    ],
)
def test_what_a_reward_manager_or_the_data_cannot_be_is_said(words, said):
    assert said in refusal("recipe=verl", *words)


@pytest.mark.parametrize(
    "words",
    [
        ["reward_model.reward_manager=dapo"],
        ["reward.reward_manager.name=naive"],
        ["reward_model.reward_manager=batch"],
        ["data.gen_batch_size=1"],
        ["data.gen_batch_size=1024"],
        ["data.gen_batch_size=8", "algorithm.filter_groups.enable=True"],
        ["data.truncation=left", "data.filter_overlong_prompts=True"],
        ["data.truncation=left"],
    ],
)
def test_what_cannot_matter_is_accepted(words):
    config, _ = compose("train", ["recipe=verl", *words])
    assert config.batch.prompts_per_step == 1024 and config.reward.overlong_buffer_tokens == 0


@pytest.mark.parametrize(
    ("words", "rounds", "said"),
    [
        ([], 1000, "max_sampling_rounds=1000"),
        (["F.max_num_gen_batches=0"], 1000, "no limit, as there"),
        (["F.max_num_gen_batches=1"], 0, "a step samples at most 1,024 prompts"),
        (["F.max_num_gen_batches=3", "data.gen_batch_size=512"], 1, "2,048 prompts, 1,536 there"),
        (["F.max_num_gen_batches=10", "data.gen_batch_size=3072"], 29, "30,720 prompts"),
        (["F.max_num_gen_batches=10", "algorithm.max_sampling_rounds=7"], 7, ""),
    ],
)
def test_dynamic_sampling_may_sample_as_many_prompts_as_in_verl(words, rounds, said):
    """verl stops with an error after max_num_gen_batches of gen_batch_size prompts."""
    words = [word.replace("F.", "algorithm.filter_groups.") for word in ["F.enable=True", *words]]
    config, resolved = compose("train", ["recipe=verl", *words])
    a = config.algorithm
    assert (a.max_sampling_rounds, a.on_too_few_groups) == (rounds, "stop")
    assert said in " ".join(resolved.became)
    config, _ = compose("train", ["recipe=verl", *words, "algorithm.on_too_few_groups=fill"])
    assert config.algorithm.on_too_few_groups == "fill"


def test_a_resumed_run_restores_all_of_its_checkpoint():
    head = "actor_rollout_ref.actor.checkpoint."
    everything = "[model,optimizer,extra,hf_model]"
    words = [f"{head}load_contents={everything}", f"{head}save_contents=[model]"]
    _, resolved = compose("train", ["recipe=verl", *words])
    said = " ".join(resolved.became)
    assert (
        "always holds all that a resumed run restores" in said and "changes no number" not in said
    )
    assert "start a new run from its weights" in refusal(
        "recipe=verl", f"{head}load_contents=['model']"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["T.val_before_train=False"], (False, -1)),
        (["T.val_before_train=False", "T.test_freq=-1"], (False, -1)),
        (["T.val_before_train=False", "T.test_freq=5"], (False, 5)),
        (["T.val_before_train=False", "train.evaluate_every=5"], (False, 5)),
        (["T.val_before_train=False", "train.evaluate_every=0"], (False, 0)),
        (["T.val_before_train=True", "T.test_freq=-1"], (True, 0)),
        (["T.test_freq=-1"], (True, 0)),
        (["T.test_freq=0", "train.evaluate_first=false"], (False, -1)),
        (["T.test_freq=2", "train.weight_sync_interval=3"], (True, 6)),
    ],
)
def test_without_a_test_freq_verl_evaluates_before_training_or_never(words, expected):
    words = [word.replace("T.", "trainer.") for word in words]
    config, resolved = compose("train", ["recipe=verl", *words])
    train = config.train
    assert (train.evaluate_first, train.evaluate_every) == expected
    said = " ".join(resolved.became)
    assert ("no evaluation, as there" in said) == (train.evaluate_every == -1)
    is_said = train.evaluate_every == 0 and "trainer.test_freq=-1" in words
    assert ("which verl does not make" in said) == is_said
    # Without verl's defaults the flag is only another name.
    config, _ = compose("train", ["trainer.val_before_train=False"])
    assert (config.train.evaluate_first, config.train.evaluate_every) == (False, -2)


MODEL = "actor_rollout_ref.model."


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (MODEL + "override_config.attention_dropout=0.", "no model has dropout here"),
        (MODEL + "override_config.attn_implementation=sdpa", "model.attention chooses"),
        (MODEL + "exclude_modules=.*visual.*", "model.lora.targets names"),
        ("hydra.run.dir=elsewhere", "a run's folder is trainer.default_local_dir"),
        ("trainer.resume_mode=disable", "the run is a new one"),
    ],
)
def test_words_of_common_scripts_are_accepted_with_their_reason(word, reason):
    plain, _ = compose("train", ["recipe=verl"])
    config, resolved = compose("train", ["recipe=verl", f"+{word}"])
    assert config == plain
    [line] = [line for line in resolved.became if line.startswith(word)]
    assert f"changes nothing here: {reason}" in line


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (MODEL + "override_config.attention_dropout=0.1", "no model has dropout here"),
        (MODEL + "override_config.num_hidden_layers=2", "comes with its checkpoint"),
        (MODEL + "exclude_modules=lm_head", "model.lora.targets"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", "leave it out"),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=2", "rollout_correction.rollout_is=token"),
        ("algorithm.rollout_is=True", "rollout_correction.rollout_is=token"),
    ],
)
def test_words_of_common_scripts_are_refused_with_the_way(word, said):
    assert said in refusal("recipe=verl", f"+{word}")


def test_a_run_that_is_there_is_not_begun_anew(tmp_path):
    words = ["recipe=verl", f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=mine"]
    disable = [*words, "trainer.resume_mode=disable"]
    assert compose("train", disable)[0].run_name == "mine"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("steps: 1\n")
    assert "another trainer.experiment_name" in refusal(*disable)
    assert compose("train", [*words, "trainer.resume_mode=auto"])[0].run_name == "mine"
    keeps = compose("train", ["recipe=verl", "trainer.remove_previous_ckpt_in_save=True"])[0]
    assert keeps.checkpoint.keep_last == 1


def test_flags_that_change_nothing_for_one_reason_share_a_line():
    head = "actor_rollout_ref.rollout."
    words = [head + "max_num_seqs=512", "trainer.balance_batch=True", head + "enforce_eager=True"]
    _, resolved = compose("train", ["recipe=verl", *words])
    idle = [line for line in resolved.became if "nothing here" in line]
    assert [line.partition(" nothing here")[0] for line in idle] == [
        f"{words[0]}, {words[2]} change",
        f"{words[1]} changes",
    ]


DAPO = [
    "data.prompt_key=prompt",
    "data.truncation=left",
    "data.max_prompt_length=2048",
    "data.max_response_length=20480",
    "data.gen_batch_size=1536",
    "data.train_batch_size=512",
    "actor_rollout_ref.rollout.n=16",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    "algorithm.kl_ctrl.kl_coef=0.0",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.kl_loss_coef=0.0",
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.clip_ratio_c=10.0",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.max_num_gen_batches=10",
    "algorithm.filter_groups.metric=acc",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=22528",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=22528",
    "+actor_rollout_ref.model.override_config.attention_dropout=0.",
    "+actor_rollout_ref.model.override_config.embd_pdrop=0.",
    "+actor_rollout_ref.model.override_config.resid_pdrop=0.",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    "actor_rollout_ref.actor.optim.weight_decay=0.1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.actor.grad_clip=1.0",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=8",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.80",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
    "actor_rollout_ref.rollout.enable_chunked_prefill=True",
    "actor_rollout_ref.rollout.max_num_batched_tokens=22528",
    "actor_rollout_ref.rollout.temperature=1.0",
    "actor_rollout_ref.rollout.top_p=1.0",
    "actor_rollout_ref.rollout.top_k=-1",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
    "actor_rollout_ref.rollout.val_kwargs.top_k=-1",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size=8",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",
    "reward_model.reward_manager=dapo",
    "reward_model.overlong_buffer.enable=True",
    "reward_model.overlong_buffer.len=4096",
    "reward_model.overlong_buffer.penalty_factor=1.0",
    "trainer.project_name=DAPO",
    "trainer.experiment_name=DAPO-Qwen2.5-32B",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=16",
    "trainer.val_before_train=True",
    "trainer.test_freq=5",
    "trainer.save_freq=5",
    "trainer.resume_mode=auto",
]
"""verl's recipe/dapo/run_dapo_qwen2.5_32b.sh, without its paths and loggers."""


def test_dapos_script_is_taken_as_it_is():
    config, resolved = compose("train", ["recipe=verl", "steps=34", *DAPO])
    assert (config.batch.prompts_per_step, config.batch.group_size) == (512, 16)
    a = config.algorithm
    assert (a.clip_low, a.clip_high, a.clip_dual, a.num_minibatches) == (0.2, 0.28, 10.0, 16)
    assert (a.dynamic_sampling, a.dynamic_sampling_by, a.on_too_few_groups) == (
        True,
        "correct",
        "stop",
    )
    assert (1 + a.max_sampling_rounds) * 512 == 1536 * 10  # as many prompts as there
    assert (a.aggregation, a.kl_coef, a.entropy_coef) == ("token-mean", 0, 0)
    assert (config.reward.overlong_buffer_tokens, config.reward.overlong_penalty) == (4096, 1)
    assert (config.optimizer.weight_decay, config.optimizer.warmup_steps) == (0.1, 10 * 16)
    assert (config.sampling.max_prompt_tokens, config.sampling.long_prompts) == (2048, "error")
    answers = config.evaluation
    assert (answers.samples, answers.temperature, answers.top_p, answers.top_k) == (1, 1, 0.7, 0)
    assert (config.mesh.context, config.mesh.trainer) == (8, "128")
    # Each of its flags acts, or changes nothing for a reason that is printed.
    said = " ".join([*resolved.became, *resolved.flag_lines])
    for word in DAPO:
        assert word.lstrip("+").partition("=")[0] in said, word
    unexplained = [line for line in resolved.became if line.endswith("changes nothing here")]
    assert unexplained == []


VALIDATION = "actor_rollout_ref.rollout.val_kwargs."


@pytest.mark.parametrize(
    ("words", "answers", "said"),
    [
        (["n=8", "temperature=0.6"], (8, 0.6, 0, 1.0), ""),
        (["n=1", "temperature=1.0", "top_p=0.7", "top_k=-1"], (1, 1.0, 0, 0.7), ""),
        (["temperature=1.0", "top_k=20"], (1, 1.0, 20, 1.0), ""),
        (["n=1", "top_k=20"], (1, 0, 0, 1.0), ""),
        (["temperature=0", "top_p=0.7"], (1, 0, 0, 1.0), ""),
        (["n=8"], (1, 0, 0, 1.0), "val_kwargs.temperature is 0, so one answer"),
        (["n=8", "temperature=0"], (1, 0, 0, 1.0), "val_kwargs.temperature is 0, so one answer"),
        (["do_sample=True"], (1, 0, 0, 1.0), "val_kwargs.temperature, by default 0, decides"),
        (["top_p=0.7"], (1, 0, 0, 1.0), "evaluations are greedy"),
        (["temperature=0.6", "do_sample=False"], (1, 0.6, 0, 1.0), "temperature, by default 0"),
    ],
)
def test_a_validation_of_verl_is_an_evaluation(words, answers, said):
    """verl 0.9.1: val_kwargs.temperature alone decides, in agent_loop.generate_sequences."""
    config, resolved = compose("train", ["recipe=verl", *(VALIDATION + word for word in words)])
    own = config.evaluation
    assert (own.samples, own.temperature, own.top_k, own.top_p) == answers
    assert said in "\n".join(resolved.start_lines)
    explained = [line for line in resolved.start_lines if not line.startswith("set keys")]
    assert said or not any(VALIDATION in line for line in explained)


def test_a_validation_and_ones_own_keys_go_together():
    config, _ = compose("train", [VALIDATION + "n=4", "evaluation.temperature=0.7"])
    assert (config.evaluation.samples, config.evaluation.temperature) == (4, 0.7)
    config, _ = compose("eval", [VALIDATION + "n=4", VALIDATION + "temperature=0.7"])
    assert config.evaluation.samples == config.largest_group == 4
    for word, said in (
        ("n=0", "val_kwargs.n=0: expected a whole number of 1 or more"),
        ("temperature=hot", "val_kwargs.temperature=hot: expected a finite number"),
    ):
        assert said in refusal("recipe=verl", VALIDATION + word)
    wrong = [VALIDATION + "temperature=1", VALIDATION + "top_p=3"]
    said = "(evaluation.top_p: --actor_rollout_ref.rollout.val_kwargs.top_p)"
    assert said in refusal("recipe=verl", *wrong)


def test_prompts_that_are_too_long_are_what_the_flags_say():
    def long_prompts(*words: str) -> str:
        return compose("train", list(words))[0].sampling.long_prompts

    for recipe in ([], ["recipe=verl"]):
        assert long_prompts(*recipe, "data.filter_overlong_prompts=True") == "drop"
        assert long_prompts(*recipe, "data.truncation=left") == "error"
        assert long_prompts(*recipe, "data.filter_overlong_prompts=False") == "error"
        both = ["data.truncation=middle", "data.filter_overlong_prompts=True"]
        assert long_prompts(*recipe, *both) == "drop"
    assert long_prompts("data.max_prompt_length=64") == "warn"
    _, resolved = compose("train", ["recipe=verl", "data.truncation=left"])
    [line] = [line for line in resolved.start_lines if "data.truncation" in line]
    assert ": a prompt is never cut: one that is too long is an error" in line
    _, resolved = compose("train", ["recipe=verl", "data.max_prompt_length=64"])
    message = "row 1 is too long: set sampling.long_prompts=drop"
    said = add_typed_names(message, resolved)
    assert "sampling.long_prompts is data.filter_overlong_prompts" in said
    _, resolved = compose("train", ["recipe=verl", "data.filter_overlong_prompts=False"])
    said = add_typed_names(message, resolved)
    assert said == f"{message} (sampling.long_prompts: --data.filter_overlong_prompts)"
    assert not any("changes nothing" in line for line in resolved.start_lines)


@pytest.mark.parametrize(
    ("metric", "by"),
    [
        ("acc", "correct"),
        ("score", "score"),
        ("seq_reward", "reward"),
        ("seq_final_reward", "reward"),
        ("pass_rate", "pass_rate"),
    ],
)
def test_groups_are_filtered_by_any_metric_of_verl(metric, by):
    config, _ = compose("train", ["recipe=verl", f"algorithm.filter_groups.metric={metric}"])
    assert config.algorithm.dynamic_sampling_by == by


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("ppo_micro_batch_size_per_gpu=4", "batch.micro_tokens"),
        ("model.enable_gradient_checkpointing=True", "model.remat"),
        ("model.use_remove_padding=True", "padding is always removed"),
        ("model.fsdp_config.param_offload=True", "mesh.*"),
        ("strategy=fsdp", "mesh.*"),
    ],
)
def test_what_changes_nothing_for_a_critic_has_the_reason_that_holds(word, reason):
    _, resolved = compose("train", [*GAE, f"critic.{word}"])
    [line] = [line for line in resolved.became if line.startswith(f"critic.{word}")]
    assert "changes nothing here" in line and reason in line


def test_each_of_an_adapters_numbers_is_attributed_to_its_flag():
    head = "actor_rollout_ref.model."
    _, resolved = compose("train", [f"{head}lora_rank=8", f"{head}lora_alpha=16"])
    assert resolved.origins["model.lora.alpha"] == f"--{head}lora_alpha"
    assert resolved.origins["model.lora.rank"] == f"--{head}lora_rank"
    _, resolved = compose("train", ["trainer.n_gpus_per_node=8", "trainer.nnodes=1"])
    assert resolved.origins["mesh.trainer"] == "--trainer.n_gpus_per_node"


def test_a_critic_that_names_the_model_has_no_model_of_its_own(tmp_path):
    model = f"{tmp_path}/model"
    config, _ = compose("train", [*GAE, f"model.path={model}", f"critic.model.path={model}/"])
    assert config.critic_path == ""
    config, _ = compose("train", [*GAE, f"model.path={model}", "critic.model.path=other"])
    assert config.critic_path == "other"


def test_epochs_are_of_the_rows_that_are_not_dropped(tmp_path):
    rows = []
    for number in range(64):
        words = "long " * 200 if number % 2 else "short"
        rows.append({"prompt": [{"role": "user", "content": f"{number} {words}"}]})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["recipe=verl", f"data.train_files={data}", f"data.val_files={data}"]
    words += ["reward=f.py:g", "data.train_batch_size=4", "trainer.total_epochs=1"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_prompt_length=64"]
    # Without the filter a long prompt is an error of the run.
    config, resolved = compose("train", words)
    assert config.steps == 16 and not any("gen_batch_size" in line for line in resolved.start_lines)
    # verl would count 64 // 8 steps.
    filtered = ["algorithm.filter_groups.enable=True", "data.gen_batch_size=8"]
    config, resolved = compose("train", [*words, *filtered])
    assert config.steps == 16
    [line] = [line for line in resolved.start_lines if "trainer.total_epochs=1 became" in line]
    assert line.endswith("(verl counts data.gen_batch_size prompts a step)")
    config, resolved = compose("train", [*words, "data.filter_overlong_prompts=True"])
    assert config.steps == 8
    said = "(32 of 64 are dropped by sampling.max_prompt_tokens=64)"
    assert any(said in line for line in resolved.start_lines)
    # Not known before the run: the model is on the hub, or tools write into prompts.
    for word in ("model.path=org/not-here", "environment.tools=[tools.py:f]"):
        unknown = [*words, "data.filter_overlong_prompts=True", word]
        config, resolved = compose("train", unknown)
        said = "those with more than sampling.max_prompt_tokens=64 tokens included"
        assert config.steps == 16 and any(said in line for line in resolved.start_lines)


def test_epochs_are_of_the_rows_that_are_not_held_out_too(tmp_path):
    """verl trains on these, so its epochs have more steps."""
    rows = [{"prompt": f"{number}?", "answer": "1"} for number in range(64)]
    for name, number in (("train", 64), ("val", 8)):
        text = "".join(json.dumps(row) + "\n" for row in rows[:number])
        (tmp_path / f"{name}.jsonl").write_text(text)
    words = ["recipe=verl", f"data.train_files={tmp_path / 'train.jsonl'}", "reward=f.py:g"]
    words += ["data.train_batch_size=4", "trainer.total_epochs=1"]
    config, resolved = compose("train", [*words, f"data.val_files={tmp_path / 'val.jsonl'}"])
    assert config.steps == 14
    said = "(8 more are left out, since rows to evaluate on have their prompt; no key keeps them)"
    assert any(said in line for line in resolved.start_lines)


def test_the_head_of_a_run_says_that_a_critic_has_an_adapter_too():
    model: Any = SimpleNamespace(architecture=SimpleNamespace(adapter=SimpleNamespace(rank=8)))
    config, _ = compose("train", [*GAE, "actor_rollout_ref.model.lora_rank=8"])
    assert critic_text(config, model).startswith("trained as the policy, by LoRA of rank 8")
    without, _ = compose("train", ["recipe=verl", "actor_rollout_ref.model.lora_rank=8"])
    assert critic_text(without, model) == ""


def test_dapos_script_is_main_ppos(tmp_path):
    scripts = checked_scripts(CompatConfig(to=str(tmp_path)))
    of_dapo = scripts[tmp_path / "recipe" / "dapo" / "main_dapo.py"]
    assert of_dapo == scripts[tmp_path / "verl" / "trainer" / "main_ppo.py"]


def test_verls_one_completion_of_a_prompt_is_said_where_nobody_says_how_many():
    said = "actor_rollout_ref.rollout.n is not given: batch.group_size=8 completions of each"
    for words, is_said in (
        ([], True),
        (["algorithm.adv_estimator=grpo"], True),
        (["task=gsm8k"], True),
        (["algorithm.adv_estimator=gae"], False),
        (["actor_rollout_ref.rollout.n=8"], False),
        (["batch.group_size=8"], False),
    ):
        _, resolved = compose("train", ["recipe=verl", *words])
        assert any(line.startswith(said) for line in resolved.start_lines) == is_said, words
    _, resolved = compose("train", ["algorithm.adv_estimator=grpo"])  # nothing else is verl's
    assert not any("is not given" in line for line in resolved.start_lines)


def test_epochs_beside_steps_are_said_to_count_nothing(tmp_path):
    said = "trainer.total_epochs=2 changes nothing here: steps=3{} counts"
    by_verls_name = said.format(", from trainer.total_training_steps,")
    for other, line in (
        ("trainer.total_training_steps=3", by_verls_name),
        ("steps=3", said.format("")),
    ):
        for words in (["trainer.total_epochs=2", other], [other, "trainer.total_epochs=2"]):
            config, resolved = compose("train", words)
            assert config.steps == 3 and line in resolved.start_lines
    file = tmp_path / "mine.yml"
    file.write_text("trainer: {total_epochs: 2, total_training_steps: 3}\n")
    _, resolved = compose("train", [str(file)])
    assert by_verls_name in resolved.start_lines
    # over a file of epochs a number of steps on the command line is meant as it stands
    file.write_text("trainer: {total_epochs: 2}\n")
    _, resolved = compose("train", [str(file), "trainer.total_training_steps=3"])
    assert not any("total_epochs" in line for line in resolved.start_lines)


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("verl/model_merger/__main__.py", "shoal export from=RUN to=FOLDER"),
        ("verl/trainer/main_generation.py", "shoal generate model=MODEL"),
        ("verl/trainer/main_generation_server.py", "shoal generate model=MODEL"),
        ("verl/trainer/main_eval.py", "shoal eval responses=FILE.jsonl"),
    ],
)
def test_verls_other_scripts_name_the_command_here(path, command, tmp_path):
    text = checked_scripts(CompatConfig(to=str(tmp_path)))[tmp_path / path]
    found = re.search(r'run_as\("(.+)"\)', text)
    assert found
    with pytest.raises(ShoalError, match=command) as refused:
        shim_argv(found[1], ["merge", "--backend", "fsdp"])
    assert str(refused.value).startswith(found[1])


def test_a_run_has_its_experiments_name_at_services(tmp_path):
    """As in verl, where the project is another setting of theirs."""
    folder = tmp_path / "p" / "e"
    for words in ([PROJECT, EXPERIMENT], [EXPERIMENT], [PROJECT]):
        config, _ = compose("train", words)
        assert reported_name(config, folder) == "e"
    assert reported_name(compose("train", ["run_name=mine/e"])[0], folder) == "mine/e"


def test_turns_are_named_where_multi_turn_is_refused():
    said = refusal("recipe=verl", "actor_rollout_ref.rollout.multi_turn.enable=True")
    assert "tools=FILE.py:FUNCTION" in said and "rollout=FILE.py:FUNCTION" in said


@pytest.mark.parametrize("command", ["train", "eval"])
def test_hydras_settings_in_a_small_file_are_said_to_change_nothing(tmp_path, command):
    file = tmp_path / "small.yaml"
    file.write_text(
        "hydra:\n  searchpath: [file://verl/trainer/config]\n  run: {dir: out}\n"
        "data:\n  max_response_length: 64\nalgorithm:\n  adv_estimator: grpo\n"
    )
    config, resolved = compose(command, [str(file)])
    assert config.sampling.max_completion_tokens == 64
    said = "small.yaml: 2 keys that change nothing here: hydra.searchpath, hydra.run.dir"
    assert said in resolved.start_lines


def test_parts_of_gdpo_that_one_function_returns_are_refused():
    """Only the function's score would count, without a word."""
    words = ["algorithm.adv_estimator=gdpo", "custom_reward_function.path=r.py"]
    words += ["data.train_files=a.parquet", "actor_rollout_ref.rollout.n=4"]
    with pytest.raises(ShoalError, match=r"gdpo_reward_keys=.*r\.py:digits,r\.py:letters"):
        compose("train", [*words, "algorithm.gdpo_reward_keys=[digits,letters]"])
    config, _ = compose("train", [*words, "algorithm.gdpo_reward_keys=null"])
    assert config.algorithm.advantage == "gdpo"
    separate = "reward=r.py:digits,r.py:letters"
    compose("train", [*words, separate, "algorithm.gdpo_reward_keys=[digits,letters]"])


def test_an_epoch_of_steps_without_prompts_is_one_error(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    words = [f"data.train_files={tmp_path}/rows.jsonl", "reward=r.py:f", "task.hold_out=false"]
    with pytest.raises(ShoalError, match=r"batch\.prompts_per_step=0: the steps of an epoch"):
        compose("train", [*words, "data.train_batch_size=0", "trainer.total_epochs=1"])


def test_a_value_is_traced_to_the_flag_that_set_it(tmp_path):
    """val_before_train may change how often is evaluated, but test_freq of the file has set it."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("trainer:\n  test_freq: 3\n")
    _, resolved = compose("train", [str(mine), "trainer.val_before_train=False"])
    assert resolved.origins["train.evaluate_every"].startswith("mine.yaml:2")
    assert resolved.origins["train.evaluate_first"] == "--trainer.val_before_train"
