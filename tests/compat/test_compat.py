"""Other systems' flags as their users type them: the token, rewards, the table of flags, and the
pages made of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load

from shoal import cli
from shoal.commands import compat
from shoal.commands.compat import shim_argv
from shoal.compat.front import SYSTEMS
from shoal.compat.rules import RULES
from shoal.config.commands import COMMANDS
from shoal.config.foreign import front_end
from shoal.config.key import keys_of
from shoal.config.merge import compose, from_overrides
from shoal.config.sections.model import LoraSection
from shoal.config.stored import difference_from_defaults
from shoal.config.train import Config
from shoal.job.task import find_functions
from shoal.records import RewardFunction, ShoalError

ROOT = Path(__file__).parents[2]
TOKEN = "hf_thisIsNoTokenOfAnyone"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in (
        "HF_TOKEN",
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # no line reaches for Google's cloud


# ---- scripts


def test_maxtexts_scripts_read_the_environment(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICES_FRACTION", "0.5")
    monkeypatch.setenv("SAMPLER_DEVICES_FRACTION", "0.5")
    words = shim_argv("grpo_demo", ["trainer_devices_fraction=0.25"])
    config, _ = compose(words[0], words[1:])
    assert (config.mesh.trainer, config.mesh.sampler) == ("0.25", "0.5")


def test_pathways_alone_says_that_roles_share_devices(capsys):
    """MaxText's defaults there are one sampler of four devices."""
    shared = (
        "use_pathways=true became mesh.pathways=true: all roles share all devices; "
        "inference_devices_per_replica=4"
    )
    for words, is_said in (([], True), (["--sampler_devices_fraction=0.5"], False)):
        config, resolved = compose("train", ["--use_pathways", *words])
        assert config.mesh.pathways and (shared in "\n".join(resolved.became)) == is_said
        assert (shared in "\n".join(resolved.start_lines)) == is_said


@pytest.mark.parametrize("package", [True, False])
def test_torchrls_doors_log_as_its_recipe_does(package, monkeypatch):
    def find_spec(name):
        return package or None

    monkeypatch.setattr(compat, "find_spec", find_spec)
    for name in ("grpo", "grpo-async"):
        given = shim_argv(name, ["steps=1"])
        assert [word for word in given if word.startswith(("report.", "algorithm."))] == [
            "report.hydra=true",
            "algorithm.kl_metric=true",
            *["report.wandb.mode=auto"] * package,
        ]
    assert not any("report." in word for word in shim_argv("grpo_demo", []))


def test_the_asynchronous_script_lets_samples_be_a_version_old(monkeypatch):
    def find_spec(name):
        return None

    monkeypatch.setattr(compat, "find_spec", find_spec)
    words, own = shim_argv, ["report.hydra=true", "algorithm.kl_metric=true"]
    assert words("grpo", []) == ["train", "--config-name", "grpo_gsm8k", *own]
    assert words("grpo-async", []) == [
        "train",
        "--config-name",
        "grpo_gsm8k",
        *own,
        "train.max_staleness=1",
    ]
    assert (
        words("grpo-async", ["--config-name", "x", "train.max_staleness=2"])[-1]
        == "train.max_staleness=2"
    )
    assert words("train_rl", ["a/rl.yml", "steps=1"]) == [
        "train",
        "a/rl.yml",
        "--preset",
        "train_rl",
        "steps=1",
    ]
    config, _ = compose("train", words("grpo-async", [])[1:])
    # TorchRL's own ratio
    assert (config.train.max_staleness, config.algorithm.correction) == (1, "direct")


# ---- the token


@pytest.mark.parametrize(
    "word",
    [
        f"{name}={TOKEN}"
        for name in (
            "hf_access_token",
            "--hf_access_token",
            "--hf-access-token",
            "++hf_access_token",
        )
    ],
)
@pytest.mark.parametrize(
    "other", [[], ["stpes=1"], ["steps=x"], ["--multirun", "seed=1,2"], ["nix.yml"]]
)
def test_the_token_is_shown_nowhere(word, other, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code = cli.main(["train", *other, word, "--dry-run"])
    out, err = capsys.readouterr()
    assert code == (0 if not other or other[0] == "--multirun" else 2)
    assert TOKEN not in out + err and os.environ["HF_TOKEN"] == TOKEN


@pytest.mark.slow
def test_the_token_is_kept_out_of_arguments_files_and_processes(tmp_path, monkeypatch, capsys):
    for give in (
        lambda: compose("train", [f"hf_access_token={TOKEN}"]),
        lambda: from_overrides(Config, hf_access_token=TOKEN),
    ):
        monkeypatch.delenv("HF_TOKEN", raising=False)
        found = give()
        assert TOKEN not in repr(found) and os.environ["HF_TOKEN"] == TOKEN
        assert any("HF_TOKEN of this process" in note for note in found[1].start_lines)
    monkeypatch.setattr(sys, "argv", ["shoal", "train", "--dry-run", f"hf_access_token={TOKEN}"])
    monkeypatch.setattr(sys, "orig_argv", ["python", *sys.argv])
    assert cli.program() == 0
    assert TOKEN not in " ".join([*sys.argv, *sys.orig_argv, *capsys.readouterr()])
    assert cli.main(["train", "--hf_access_token", TOKEN]) == 2
    assert TOKEN not in capsys.readouterr().err
    (tmp_path / "mine.yaml").write_text(f"hf_access_token: {TOKEN}\nsteps: 3\n")
    assert TOKEN not in repr(compose("train", [str(tmp_path / "mine.yaml")]))
    monkeypatch.delenv("HF_TOKEN")
    compose("train", ["hf_access_token="])
    assert "HF_TOKEN" not in os.environ


# ---- rewards as TRL's users name them


@pytest.mark.parametrize(
    ("words", "names", "weights"),
    [
        (["--reward_funcs", "accuracy_reward"], ["accuracy_reward"], ()),
        (
            [
                "--reward_funcs",
                "accuracy_reward",
                "think_format_reward",
                "--reward_weights",
                "1.0",
                "0.5",
                "--bf16",
            ],
            ["accuracy_reward", "think_format_reward"],
            (1.0, 0.5),
        ),
        (
            [
                "--reward_funcs",
                "reasoning_accuracy_reward",
                "get_soft_overlong_punishment",
                "--learning_rate",
                "1e-5",
            ],
            ["reasoning_accuracy_reward", "soft_overlong_punishment_reward"],
            (),
        ),
        (
            ["reward_funcs=accuracy_reward,think_format_reward"],
            ["accuracy_reward", "think_format_reward"],
            (),
        ),
        (
            ["reward_funcs=[accuracy_reward, think_format_reward]"],
            ["accuracy_reward", "think_format_reward"],
            (),
        ),
        (
            [
                "reward=think_format_reward,get_cosine_scaled_reward(max_len=512, "
                "min_value_wrong=-2),accuracy_reward"
            ],
            ["think_format_reward", "cosine_scaled_reward", "accuracy_reward"],
            (),
        ),
        (
            [
                "--reward_funcs",
                "get_cosine_scaled_reward(max_len=512,min_value_wrong=-2)",
                "accuracy_reward",
            ],
            ["cosine_scaled_reward", "accuracy_reward"],
            (),
        ),
        (
            ["reward=[get_repetition_penalty_reward(2, -0.5),accuracy_reward]"],
            ["repetition_penalty_reward", "accuracy_reward"],
            (),
        ),
    ],
)
def test_trls_ready_rewards_compose_and_load(words, names, weights, tmp_path):
    config, _ = compose("train", words)
    assert [one.name for one in find_functions(config.reward, config.reward.functions)] == names
    assert config.reward.weights == weights
    (tmp_path / "mine.yml").write_text(
        "reward_funcs: [accuracy_reward, get_cosine_scaled_reward(max_len=5)]\n"
    )
    config, _ = compose("train", [str(tmp_path / "mine.yml")])
    assert len(find_functions(config.reward, config.reward.functions)) == 2


def test_trls_reward_model_is_a_reward():
    config, _ = compose("train", ["--reward_model_name_or_path", "org/rm", "task=gsm8k"])
    assert config.reward.functions == ("model:org/rm",)
    with pytest.raises(
        ShoalError, match=r"with other rewards: .* reward_funcs=\[model:org/rm,accuracy_reward\]"
    ):
        compose(
            "train", ["--reward_funcs", "accuracy_reward", "--reward_model_name_or_path", "org/rm"]
        )


def test_other_systems_gsm8k_rewards_are_found_when_they_are_used():
    code = (
        "import sys, shoal; from shoal.tasks.gsm8k import REWARD_PRESETS as PRESETS, "
        "load_reward_preset\n"
        "assert 'shoal.compat.gsm8k_rewards' not in sys.modules and len(PRESETS) == 5\n"
        "print(*(len(load_reward_preset(name).rewards) for name in PRESETS))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["2", "2", "4", "2", "1"]


def test_a_correction_without_a_bound_is_typed_as_inf():
    config, _ = compose("train", ["algorithm.correction=mis", "--algorithm.correction_cap", "inf"])
    assert config.algorithm.correction_cap == float("inf")


@pytest.mark.parametrize(
    "word",
    [
        "vllm_tensor_parallel_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "rollout_tensor_parallelism=2",
    ],
)
def test_devices_of_a_replica_are_those_of_a_server_of_vllm(word):
    config, _ = compose("train", ["sampler.kind=vllm", "vllm.python=python", word])
    assert config.sampler.devices_per_worker == 2 and not config.mesh.sampler_tensor


@pytest.mark.parametrize("word", ["inference_model.num_devices=2", "inference_model.devices=[2,3]"])
def test_devices_of_the_sampler_are_refused_with_vllm_by_the_flag_that_was_typed(word):
    with pytest.raises(ShoalError, match=r"sampler\.devices_per_worker.*--inference_model"):
        compose("train", ["sampler.kind=vllm", "vllm.python=python", word])


def rejected_by(*words: str) -> tuple[str, float, float]:
    head = "algorithm.rollout_correction.rollout_rs"
    a = compose("train", [f"{head}{word}" for word in words])[0].algorithm
    return a.rejection, a.rejection_cap, a.rejection_floor


def test_verls_bounds_of_k1_are_of_the_inverse_weight():
    assert rejected_by("=seq_mean_k1", "_threshold=0.5_4.0") == ("seq_mean_k1", 2.0, 0.25)
    assert rejected_by("=token_k1", "_threshold='4.0'") == ("token_k1", 4.0, 0.25)
    assert rejected_by("=seq_max_k3", "_threshold=0.1") == ("seq_max_k3", 0.1, -1.0)
    assert rejected_by("=null", "_threshold=0.1")[0] == "none"


GIGPO = "algorithm.adv_estimator=gigpo"


@pytest.mark.parametrize(
    ("words", "advantage", "discount"),
    [
        ([GIGPO], "dr_grpo", 1.0),
        ([GIGPO, "algorithm.gamma=0.95", "algorithm.gigpo.mode=mean_norm"], "dr_grpo", 0.95),
        (
            [
                "algorithm.gigpo.mode=mean_std_norm",
                GIGPO,
                "algorithm.gigpo.step_advantage_w=1.0",
                "algorithm.gigpo.enable_similarity=False",
                "algorithm.gigpo.similarity_thresh=0.95",
            ],
            "grpo",
            1.0,
        ),
    ],
)
def test_gigpo_of_verl_agent_is_credit_by_state(words, advantage, discount):
    a = compose("train", words)[0].algorithm
    assert (a.credit, a.advantage, a.discount) == ("state", advantage, discount)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [GIGPO, "algorithm.gigpo.mode=norm"],
            r"gigpo\.mode=norm: expected one of mean_norm, mean",
        ),
        ([GIGPO, "algorithm.gigpo.step_advantage_w=0.5"], r"step_advantage_w=0\.5: expected 1"),
        ([GIGPO, "algorithm.gigpo.enable_similarity=true"], "states are equal or not"),
        (["algorithm.adv_estimator=grpo", "algorithm.gamma=0.9"], r"discount=0\.9: expected 1, or"),
        ([GIGPO, "algorithm.gamma=1.5"], r"discount=1\.5: expected a number in \[0, 1\]"),
    ],
)
def test_what_is_not_gigpos_is_one_error(words, message):
    with pytest.raises(ShoalError, match=message):
        compose("train", words)


def test_gigpos_mode_without_gigpo_sets_nothing():
    assert compose("train", ["algorithm.gigpo.mode=mean_norm"])[0].algorithm.advantage == "grpo"
    words = ["algorithm.adv_estimator=rloo", "algorithm.gigpo.mode=mean_norm"]
    assert compose("train", words)[0].algorithm.advantage == "rloo"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("=token_k1,seq_max_k2", "_threshold=2"), "expected one of token_k1"),
        (("=token_k2",), "needs .*rollout_rs_threshold: a number"),
        (("=token_k2", "_threshold=0.1_0.2"), "low_high with k1"),
        (("=token_k1", "_threshold=0.0_2.0"), "above 0"),
        (("=token_k1", "_threshold=0.5"), "algorithm.rejection_cap"),
    ],
)
def test_what_cannot_be_a_rejection_is_one_error(words, message):
    with pytest.raises(ShoalError, match=message):
        rejected_by(*words)


# ---- the table

SECTION_D = """
model_name tokenizer_path load_parameters_path base_output_directory hf_access_token hf_path
hf_data_split hf_data_files steps per_device_batch_size learning_rate run_name num_generations
grpo_beta grpo_epsilon max_prefill_predict_length max_target_length use_pathways
inference_devices_per_replica inference_replicas ici_fsdp_parallelism ici_tensor_parallelism
profiler checkpoint_period config_file loss_algo inference_rollouts trainer_devices_fraction
sampler_devices_fraction decode_sampling_temperature scan_layers train_model.num_devices
ref_model.num_devices inference_model.num_devices train_model.devices ref_model.devices
inference_model.devices inference_model.gpu_memory_utilization env.dataset env.num_envs env.repeats
model.name optimizer.lr optimizer.weight_decay optimizer.clip_grad_norm policy.kl_coef
train.kl_to_ref_coeff train.total_dialog_turns train.optim_batch_size
train.gradient_accumulation_steps train.checkpoint_frequency train.mixed_precision
train_model.lora.enabled
"""
VALUES = {
    "steps": "5",
    "per_device_batch_size": "2",
    "learning_rate": "1e-5",
    "num_generations": "4",
    "grpo_beta": "0.1",
    "grpo_epsilon": "0.1",
    "max_prefill_predict_length": "99",
    "max_target_length": "400",
    "use_pathways": "true",
    "inference_devices_per_replica": "4",
    "inference_replicas": "2",
    "ici_fsdp_parallelism": "4",
    "ici_tensor_parallelism": "2",
    "profiler": "xplane",
    "checkpoint_period": "7",
    "config_file": "grpo.yml",
    "loss_algo": "gspo",
    "inference_rollouts": "2",
    "trainer_devices_fraction": "0.5",
    "hf_path": "a/b",
    "sampler_devices_fraction": "0.5",
    "decode_sampling_temperature": "0.5",
    "scan_layers": "false",
    "env.dataset": "ifeval",
    "model.name": "a/b",
    "train.mixed_precision": "true",
    "train_model.lora.enabled": "false",
    "env.num_envs": "4",
    "env.repeats": "4",
    "train.optim_batch_size": "4",
    "train.gradient_accumulation_steps": "2",
    "train.total_dialog_turns": "1000",
    "policy.kl_coef": "0.1",
    "train.kl_to_ref_coeff": "0.1",
    "train.checkpoint_frequency": "5",
    "optimizer.lr": "1e-3",
    "optimizer.weight_decay": "0.1",
    "optimizer.clip_grad_norm": "2",
    "inference_model.gpu_memory_utilization": "0.5",
}
WITHOUT_A_KEY = {"hf_access_token", "train_model.lora.enabled"}


@pytest.mark.parametrize("name", SECTION_D.split())
def test_no_name_that_users_know_is_unknown(name):
    value = VALUES.get(name, "2" if name.endswith("devices") else "some")
    config, resolved = compose("train", [f"--{name}={value}"])
    assert (config == Config()) == (name in WITHOUT_A_KEY)
    if name in front_end().flags_of(Config) and name != "config_file":
        assert len(resolved.became) == 1 and resolved.became[0].startswith(f"{name}=")
    assert difference_from_defaults(
        compose("doctor", [f"{name}={value}"])[0]
    ) == difference_from_defaults(config)
    if "." not in name and name not in ("config_file", "run_name"):
        assert from_overrides(Config, **{name: value})[0] == config


PEFT = ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("use_peft=true", LoraSection(16, 32.0, PEFT)),
        (
            "use_peft=true lora_r=8 lora_alpha=16 lora_target_modules=[o_proj] use_rslora=true "
            "lora_dropout=0.0",
            LoraSection(8, 16.0, ("o_proj",), True),
        ),
        ("use_peft=true lora_target_modules=all-linear model.lora.rank=2", LoraSection(2)),
        (
            "lora_r=8 lora_alpha=16 lora_target_modules=q_proj use_rslora=true lora_dropout=0.1 "
            "use_dora=true",
            LoraSection(),
        ),
        ("use_peft=false lora_r=8 lora_modules_to_save=lm_head", LoraSection()),
        ("V.lora_rank=4", LoraSection(4, 16.0)),
        (
            "V.lora_rank=4 V.lora_alpha=8 V.target_modules=[q_proj,k_proj]",
            LoraSection(4, 8.0, ("q_proj", "k_proj")),
        ),
        (
            "V.lora_rank=0 V.lora_alpha=8 V.target_modules=q_proj V.lora_adapter_path=null",
            LoraSection(),
        ),
        ("V.lora_rank=4 V.lora_adapter_path=./adapter", LoraSection(path="./adapter")),
        ("train_model.lora.enabled=true", LoraSection(8, 16.0)),
        (
            "train_model.lora.enabled=true train_model.lora.r=2 train_model.lora.alpha=3 "
            "train_model.lora.dropout=0.1",
            LoraSection(2, 3.0),
        ),
        ("train_model.lora.r=2 train_model.lora.alpha=3", LoraSection()),
        (
            "T.rank=64 T.alpha=64.0 T.module_path=.*q_einsum|.*kv_einsum|.*attn_vec_einsum",
            LoraSection(64, 64.0, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ),
        ("T.rank=4 T.alpha=2", LoraSection(4, 2.0)),
        ("enable_lora=true lora_rank=4 lora_alpha=2", LoraSection(4, 2.0)),
        (
            "lora.enable_lora=true lora.lora_rank=4 lora.lora_alpha=2 "
            "lora.lora_module_path=decoder/layers/.*(self_attention/(query|out)|mlp/(wi_0|wi_1))",
            LoraSection(4, 2.0, ("q_proj", "o_proj", "gate_proj", "up_proj")),
        ),
        ("enable_lora=false lora_rank=4 lora_alpha=2 lora_module_path=nothing", LoraSection()),
        ("hf_lora_adapter_path= lora_restore_path= trainable_parameters_mask=[]", LoraSection()),
    ],
)
def test_an_adapter_of_each_system_is_ours(line, expected):
    line = line.replace("V.", "actor_rollout_ref.model.").replace(
        "T.", "actor_model_config.lora_config."
    )
    config, resolved = compose("train", line.split())
    assert config.model.lora == expected
    assert config.algorithm.reference == ("base" if "lora_adapter_path=./" in line else "start")
    assert expected.rank or expected.path or all(" nothing here" in one for one in resolved.became)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("use_peft=true use_dora=true", "use_dora=true is not supported: an adapter is plain LoRA"),
        (
            "use_peft=true lora_modules_to_save=lm_head",
            "lora_modules_to_save=lm_head is not supported: only an adapter",
        ),
        (
            "use_peft=true lora_dropout=0.05",
            "lora_dropout=0.05 is not supported: sampler and trainer would be two models",
        ),
        (
            "enable_lora=true lora_rank=4",
            "enable_lora is given without alpha: expected rank and alpha",
        ),
        (
            "enable_lora=true lora_rank=4 lora_alpha=2 lora_module_path=x",
            "module_path=x: expected a regular expression",
        ),
        (
            "enable_lora=true lora_rank=4 lora_alpha=2 lora_module_path=(",
            "module_path=(: expected a regular expression",
        ),
        (
            "enable_lora=true lora_rank=4 lora_alpha=2 lora_weight_qtype=nf4",
            "nf4 is not supported: 8-bit weights",
        ),
        ("lora.lora_restore_path=gs://x", "an adapter in PEFT's format is model.lora.path=FOLDER"),
        (
            "load_in_4bit=true",
            "8-bit weights are model.quantise=int8 or fp8, only for LoRA's frozen weights",
        ),
    ],
)
def test_what_is_no_plain_adapter_is_refused_by_name(line, part):
    with pytest.raises(ShoalError) as caught:
        compose("train", line.split())
    assert part in str(caught.value)


def test_the_tables_are_whole():
    settings = {key for config_type in COMMANDS.values() for key in keys_of(config_type)}
    rules = set()
    for system, flags in SYSTEMS.items():
        names = [flag.name for flag in flags]
        assert len(names) == len(set(names)), (
            f"{system}: {[name for name in names if names.count(name) > 1]}"
        )
        for flag in flags:
            # A flag may have a group and a rule, which follows it.
            kinds = (flag.read, flag.group or flag.rule, flag.idle, flag.refused)
            assert sum(map(bool, kinds)) <= 1, flag.name
            assert {*flag.keys, *flag.default_only} <= settings, f"{flag.name}: no such key"
            assert flag.meaning or flag.is_rename or flag.group, flag.name
            assert not flag.is_rename or len(flag.keys) == 1
            assert flag.is_pattern or flag.value_filter or flag.name not in keys_of(Config), (
                f"{flag.name} is ours"
            )
            rules |= {flag.rule} - {None}
    assert rules == set(RULES)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_systems_page_has_one_job_in_two_forms(system):
    """Their line ends with the flags that are taken here; both forms resolve to the same
    configuration."""
    job = load("docs/reference.py").SAME_JOBS[system]
    by_flags, by_keys = (compose("train", line.split()[2:])[0] for line in (job.flags, job.keys))
    assert by_flags == by_keys and by_flags != Config()
    flags = []
    for word in job.flags.split()[2:]:
        if not word.startswith(("recipe=", "--config-name", "grpo")):
            flags.append(word)
    assert set(flags) <= set(job.theirs.split())


def test_the_pages_have_every_flag_and_their_commands_work():
    page, *tables = (
        file.read_text(encoding="utf-8")
        for name in ("migrating.md", "flags-*.md")
        for file in (ROOT / "docs").glob(name)
    )
    for name in front_end().flags_of(Config):
        assert f"`{name}`" in "".join(tables)
    for line in re.findall(r"^shoal (.*)$", page, re.MULTILINE):
        assert cli.main(line.replace("./llama", "tiny").split()) == 0


# ---- verl's data, and how many completions a prompt has


def test_verls_val_files_are_the_files_that_are_evaluated():
    for text, expected in (
        ("/data/val.parquet", "/data/val.parquet"),
        ("['a/test.parquet', 'b/test.parquet']", "a/test.parquet,b/test.parquet"),
        ("val", "./val"),  # a file, and no name of a split
        ("null", "test"),
    ):
        config, resolved = compose("train", [f"data.val_files={text}"])
        assert config.task.eval_split == expected
        assert text == "null" or not any("val_files" in note for note in resolved.notes)
    with pytest.raises(ShoalError, match=r"data\.val_files=, : expected a file"):
        compose("train", ["data.val_files=, "])


def test_verls_names_of_columns_are_renamed():
    for words, columns in (
        (["data.prompt_key=question"], ("prompt=question",)),
        (["data.reward_fn_key=source"], ("data_source=source",)),
        (
            ["data.reward_fn_key=source", "data.prompt_key=question"],
            ("prompt=question", "data_source=source"),
        ),
        (["data.prompt_key=prompt", "data.reward_fn_key=data_source"], ()),
        (["data.prompt_key=prompt", "task.columns=[answer=final]"], ("answer=final",)),
    ):
        assert compose("train", words)[0].task.columns == columns


def test_verls_arguments_of_a_reward_function_are_bound_to_it(tmp_path):
    file = tmp_path / "score.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):\n"
        "    return more\n"
    )
    settings = tmp_path / "verl.yml"
    settings.write_text(
        "trainer.total_training_steps: 1\n"
        f"custom_reward_function: {{path: {file}, reward_kwargs: {{x: 3, how: {{a: [1, b]}}}}}}\n"
    )
    for head in ("", "reward.", "+reward."):
        of_function = f"{head}custom_reward_function"
        name = f"{of_function}.reward_kwargs"
        for words, bound in (
            ([f"{name}.x=0"], {"x": 0}),
            (
                [f"{name}.x=0.5", f"{name}.on=True", f"{name}.to=a, 'b'"],
                {"x": 0.5, "on": True, "to": "a, 'b'"},
            ),
            ([f"{name}.how.a=1", f"{name}.none=null"], {"how": {"a": 1}, "none": None}),
            ([name + '={"x": 1}'], {"x": 1}),
            ([f"{name}={{}}"], {}),
        ):
            config, _ = compose("train", ["recipe=verl", f"{of_function}.path={file}", *words])
            [function] = find_functions(config.reward, config.reward.functions)
            assert not isinstance(function, RewardFunction) and function("", "", "") == bound
        with pytest.raises(ShoalError, match=r"x needs custom_reward_function\.path"):
            compose("train", [f"{name}.x=3"])
        with pytest.raises(ShoalError, match="expected the name of an argument"):
            compose("train", [f"{of_function}.path={file}", f"{name}.a-b=3"])
    config, _ = compose("train", [str(settings)])
    [function] = find_functions(config.reward, config.reward.functions)
    assert function("", "", "") == {"x": 3, "how": {"a": [1, "b"]}}
    assert compose("train", ["custom_reward_function.reward_kwargs={}"])[0].reward.functions == ()


@pytest.mark.parametrize("flags", [["algorithm.adv_estimator=gae"], ["lam=0.9"]])
@pytest.mark.parametrize("task", ["words", "gsm8k", "custom"])
def test_ppo_has_one_completion_a_prompt_whatever_the_tasks_preset_says(flags, task, tmp_path):
    words = [*flags, f"task={task}"]
    assert compose("train", words)[0].batch.group_size == 1
    assert compose("train", ["recipe=verl", *words])[0].batch.group_size == 1
    for more in (["batch.group_size=3"], ["actor_rollout_ref.rollout.n=3"]):
        assert compose("train", [*more, *words])[0].batch.group_size == 3
    file = tmp_path / "mine.yml"
    file.write_text("batch: {group_size: 5}\n")
    assert compose("train", [str(file), *words])[0].batch.group_size == 5
    assert compose("train", [f"task={task}", "batch.group_size=4"])[0].batch.group_size == 4
