"""The table of command lines, through the scripts that `shoal compat` writes: each runs, or says
what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stand_ins
from lines import LINES, TOKEN, among, becomes, run, words_of

import shoal
from shoal.commands.compat import MARK, REQUIREMENTS, SHELL, SHIMS, checked_scripts, shim_argv
from shoal.config.commands import CompatConfig
from shoal.config.derived import for_devices, num_updates
from shoal.config.merge import compose
from shoal.records import ShoalError

HERE = Path(__file__).parent
FILES = HERE / "files"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return stand_ins.build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def dry_runs(world) -> dict[str, tuple[int, str, str]]:
    """The dry runs of all lines, in one process with as many simulated devices as the largest
    wants."""
    most = max(line.devices for line in LINES.values())
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={most}")
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "lines.py"), str(world)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- the table


def test_the_table_has_the_documents_lines_and_thirty_more():
    own = [line for name, line in LINES.items() if name[:2].isdigit()]
    others = [line for line in LINES.values() if line not in own]
    assert [line.name[:2] for line in own] == [f"{number:02}" for number in range(1, 24)]
    assert sum(line.runs for line in own) == 19 and {
        line.expect for line in own if not line.runs
    } == {"needs docker", "needs xpk"}
    assert len(others) >= 30 and sum(line.runs for line in others) >= 0.8 * len(others)
    for line in LINES.values():
        assert line.expect == "runs" or line.expect.startswith("needs ")
    assert len({line.text for line in LINES.values()}) == len(LINES)


@pytest.mark.slow
@pytest.mark.parametrize("name", [line.name for line in LINES.values() if line.is_ours])
def test_a_dry_run_of_each_line_says_what_is_written(name, dry_runs):
    line, (code, out, err) = LINES[name], dry_runs[name]
    assert TOKEN not in out + err
    assert (code == 0) == line.runs, err
    assert becomes(out) == line.becomes
    if not line.runs:
        assert err.startswith("error: ") and len(err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("torchrl-openenv", ("grpo_openenv: no preset or YAML file has this name",)),
        ("verl-lora", ("row 0 has no column 'messages'", "--data.prompt_key")),
    ],
)
def test_a_line_that_needs_something_names_all_of_it_at_once(name, parts, dry_runs):
    assert all(part in dry_runs[name][2] for part in parts), dry_runs[name][2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["02-docker-grpo", "03-docker-grpo-experimental", "04-docker-upload"]
)
def test_a_docker_line_prints_the_command_and_names_what_is_missing(name, world, tmp_path):
    for tool in ("bash", "env"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    done = subprocess.run(
        ["bash", "-c", LINES[name].text],
        cwd=world / "here",
        capture_output=True,
        text=True,
        env={
            "PATH": str(tmp_path),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(Path(shoal.__file__).parents[1]),
        },
    )
    assert done.returncode == 2 and done.stdout.splitlines()[1].startswith("docker ")
    assert done.stderr.count("\n") == 1 and "docker is not on PATH" in done.stderr


def test_data_without_a_reward_name_all_that_is_to_be_given_at_once():
    code, _, err = run(["train", "dataset_name=custom/dataset", "--dry-run"])
    assert code == 2 and err.count("error: ") == 1
    for part in ("reward=file.py:function", "task.template=", "task.columns=", "eval_split="):
        assert part in err


@pytest.mark.slow
def test_data_of_ones_own_in_maxtexts_demo_are_read_as_gsm8ks(dry_runs):
    out = dry_runs["08-grpo-demo-own-data"][1]
    said = " ".join(out.replace("#", "").split())
    assert "hf_path=custom/dataset became task.name=gsm8k, task.path=custom/dataset" in said
    assert "else questions and answers as GSM8K's: task=custom with reward= takes others" in said
    config, _ = compose("train", ["hf_path=custom/dataset", "task=custom", "reward=f.py:g"])
    assert config.task.name == "custom"


# ---- in a shell


GUARD = """
import sys
def look(event, args):
    if event == "socket.__new__" and args[1] == 1:
        return  # AF_UNIX: to a process that was forked to check answers
    if event.startswith(("socket.", "urllib", "http")):
        print("TOUCHED", event, args, file=sys.stderr)
        sys.stderr.flush()
        __import__("os")._exit(9)
sys.addaudithook(look)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["05-xpk", "11-to-maxtext-8b", "20-grpo-optimizer", "trl-grpo"])
def test_a_line_runs_in_a_shell_as_it_is_typed_and_opens_no_socket(name, world, tmp_path):
    text = LINES[name].text
    if name == "05-xpk":  # what the cluster runs
        text = text.partition('--command "')[2].removesuffix('"').partition("python ")[2]
        text = f"python {text}"
    environment = stand_ins.environment(world)
    site = world / "site" / "sitecustomize.py"
    (tmp_path / "sitecustomize.py").write_text(site.read_text() + GUARD)
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    if "to_maxtext" in text:
        one_device = ""
    else:
        one_device = "mesh.trainer= mesh.sampler= mesh.fsdp=1 report.wandb.mode=off"
    done = subprocess.run(
        ["bash", "-c", f"{stand_ins.with_places(text, world)} {one_device} --dry-run"],
        cwd=world / "here",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "# this step = " in done.stdout or not one_device
    ) and TOKEN not in done.stdout + done.stderr


# ---- the scripts


def test_the_scripts_are_short_and_come_from_one_table(world):
    scripts = checked_scripts(CompatConfig(str(world / "here")))
    assert len(scripts) == sum(len(door.paths) for door in SHIMS.values()) + len(SHELL) + len(
        REQUIREMENTS
    )
    for path, text in scripts.items():
        assert path.read_text() == text and MARK in text
        assert os.access(path, os.X_OK) == (path.suffix != ".txt")
        assert len(text.splitlines()) < 30 and (
            path.suffix in (".sh", ".txt") or len(text.splitlines()) < 10
        )


def test_no_file_of_another_is_overwritten(tmp_path):
    theirs = tmp_path / "src" / "MaxText" / "rl" / "train_rl.py"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    for words in (["compat", str(tmp_path)], ["compat", str(tmp_path), "--dry-run"]):
        code, out, err = run(words)
        assert (code, out) == (2, "") and f"python3 DIR/{theirs.relative_to(tmp_path)}" in err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [
        theirs
    ] and theirs.read_text() == "theirs"
    theirs.unlink()
    for _ in range(2):
        code, out, err = run(["compat", str(tmp_path)])
        assert code == 0 and f"{tmp_path / 'bin' / 'trl'} stands for `trl`" in out + err
    assert run(["compat"])[0] == 2


@pytest.mark.parametrize(
    ("name", "folder", "file", "change", "key", "value"),
    [
        (
            "13-train-rl-grpo",
            "src/MaxText/configs",
            "rl.yml",
            ("learning_rate: 3e-6", "learning_rate: 7e-6"),
            "optimizer.lr",
            7e-6,
        ),
        (
            "20-grpo-optimizer",
            "config",
            "grpo_gsm8k.yaml",
            ("total_dialog_turns: 100000", "total_dialog_turns: 640"),
            "steps",
            20,
        ),
        (
            "18-grpo-ifeval",
            "config",
            "grpo_ifeval.yaml",
            ("repeats: 16", "repeats: 8"),
            "batch.group_size",
            8,
        ),
        (
            "15-grpo-counts",
            "sota-implementations/grpo/config",
            "grpo_gsm8k.yaml",
            ("repeats: 16", "repeats: 4"),
            "batch.group_size",
            4,
        ),
    ],
)
def test_in_a_checkout_their_files_are_read_from_disk(
    name, folder, file, change, key, value, world, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    target = tmp_path / folder / file
    target.parent.mkdir(parents=True)
    text = (FILES / file).read_text()
    assert text.count(change[0]) == 1
    target.write_text(text.replace(*change))
    words = words_of(LINES[name], world, at=tmp_path)
    config, resolved = compose(words[0], words[1:])
    section, _, last = key.rpartition(".")
    assert getattr(getattr(config, section) if section else config, last) == value
    assert resolved.origins[key].startswith(f"{file}:") or key == "steps"


def test_hydras_options_name_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.yaml").write_text("env: {repeats: 4}\n")
    for words in (
        ["--config-path", "mine", "--config-name", "own"],
        ["-cp", "mine", "-cn", "own"],
        ["--config-dir=mine", "--config-name=own"],
        ["-cd", "mine", "-cn", "own.yaml"],
    ):
        config, _ = compose("train", shim_argv("grpo", words)[1:])
        assert (config.batch.group_size, config.recipe) == (4, "torchrl"), words
    assert compose("train", ["--config-dir=mine", "-cn", "grpo_ifeval"])[0].task.name == "ifeval"
    for words, part in (
        (["-cp", "mine", "-cn", "nix"], "there is no mine/nix.yaml"),
        (["--config-path=mine"], "expected --config-name NAME with it"),
    ):
        with pytest.raises(ShoalError, match=part):
            compose("train", words)


@pytest.mark.parametrize(
    "words",
    [
        ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"],
        ["--config-path=config", "--config-name", "ppo_trainer"],
        ["--config-name=dapo_trainer.yaml"],
    ],
)
def test_the_own_file_of_verls_script_is_its_defaults(words, tmp_path, monkeypatch):
    """Its folder is beside the script there; verl's Megatron scripts name both."""
    monkeypatch.chdir(tmp_path)
    plain = shim_argv("verl", ["data.train_batch_size=8"])
    assert shim_argv("verl", [*words, "data.train_batch_size=8"]) == plain
    with pytest.raises(ShoalError, match=r"there is no config/another\.yaml"):
        compose("train", shim_argv("verl", ["--config-path=config", "-cn", "another"])[1:])
    # A file of the user has precedence.
    folder = tmp_path / "config" if "--config-path=config" in words else tmp_path
    folder.mkdir(exist_ok=True)
    for name in ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer"):
        (folder / f"{name}.yaml").write_text("data: {train_batch_size: 16}\n")
    line = shim_argv("verl", [*words, "steps=1", "algorithm.adv_estimator=grpo"])
    config, _ = compose("train", line[1:])
    assert config.batch.prompts_per_step == 16


@pytest.mark.parametrize(
    "entry",
    [
        "ppo_trainer",
        "ppo_trainer.yaml",
        "/ppo_megatron_trainer",
        "ppo_trainer@_here_",
        "actor/dp_actor@actor_rollout_ref.actor",
        {"actor@actor_rollout_ref.actor": "dp_actor"},
        {"override rollout@actor_rollout_ref.rollout": "rollout"},
    ],
)
def test_verls_own_file_in_defaults_is_its_defaults(entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = "hydra: {searchpath: [pkg://verl.trainer.config]}\n"
    body = "data: {train_batch_size: 16}\nalgorithm: {adv_estimator: grpo}\n"
    words = ["model=/m", "steps=1", "optimizer.lr=1e-5"]
    (tmp_path / "mine.yaml").write_text(f"{head}{body}defaults: {json.dumps([entry, '_self_'])}\n")
    config, _ = compose("train", ["mine.yaml", *words])
    (tmp_path / "preset.yaml").write_text(f"{body}defaults: [verl, _self_]\n")
    expected, _ = compose("train", ["preset.yaml", *words])
    assert config == expected and config.recipe == "verl" and config.batch.prompts_per_step == 16
    script = shim_argv("verl", ["--config-path=.", "--config-name=mine", *words])
    assert compose("train", script[1:])[0] == expected
    (tmp_path / "short.yaml").write_text(f"{body}defaults: {json.dumps([entry, '_self_'])}\n")
    compose("eval", ["short.yaml", "model=/m", "task=gsm8k"])  # it has no preset verl
    # A file of the user has precedence.
    stem = str(entry).removesuffix(".yaml")
    if stem == "ppo_trainer":
        (tmp_path / "ppo_trainer.yaml").write_text("data: {max_response_length: 77}\n")
        config, _ = compose("train", ["short.yaml", *words])
        assert config.recipe == ""


def test_dapos_own_file_as_verl_has_it(tmp_path):
    """Its gen_batch_size refers to a name of ppo_trainer.yaml."""
    file = tmp_path / "dapo_trainer.yaml"
    file.write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\n"
        "defaults: [ppo_trainer, _self_]\n"
        "data: {gen_batch_size: '${data.train_batch_size}'}\n"
        "algorithm: {filter_groups: {enable: false, metric: null, max_num_gen_batches: 0}}\n"
    )
    mini_batch = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
    for words, prompts in (([], 1024), (["data.train_batch_size=8", mini_batch], 8)):
        config, _ = compose("train", [str(file), "model=/m", "steps=1", *words])
        assert config.batch.prompts_per_step == prompts


def test_verls_own_files_in_defaults_lie_beneath_the_users(tmp_path):
    (tmp_path / "base.yaml").write_text("algorithm: {adv_estimator: grpo}\n")
    file = tmp_path / "mine.yaml"
    configs = []
    for entries in ("verl, base", "ppo_trainer, base, legacy_reward_impl", "verl"):
        file.write_text(f"defaults: [{entries}, _self_]\n")
        configs.append(compose("train", [str(file), "model=/m"])[0])
    assert configs[0] == configs[1] != configs[2]
    file.write_text("defaults: [ppo_trainer, another, _self_]\n")
    with pytest.raises(
        ShoalError, match=r"name another, .*put the file there, or remove the entry"
    ):
        compose("train", [str(file), "model=/m"])


def test_trls_command_takes_the_trainers_that_are_here():
    assert shim_argv("trl", ["rloo", "--beta", "0.1"]) == [
        "train",
        "--config-name",
        "trl",
        "algorithm=rloo",
        "--beta",
        "0.1",
    ]
    for words in (["sft", "--model_name_or_path", "x"], []):
        with pytest.raises(ShoalError, match="expected one of `trl grpo`, `trl rloo`"):
            shim_argv("trl", words)


# ---- what an audit found


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "model.path: no model is given"),
        (("--dry-run",), "no model is given"),
        (
            ("--model_name=llama3.1-8b", "--load_parameters_path={model}"),
            "model.name=llama3.1-8b is not the model at",
        ),
        (("--model_name=llama3.1-8b", "inference_rollouts=500", "steps=3"), "at most steps=3"),
    ],
)
def test_a_demo_that_cannot_be_meant_is_refused(words, part, world):
    words = [word.format(model=world / "models" / "qwen2") for word in words]
    with among(world, 1):
        for more in ([], ["--dry-run"]):
            code, _, err = run([*shim_argv("grpo_demo", words), *more])
            assert code == 2 and part in err and err.count("error: ") == 1


@pytest.mark.slow
def test_a_model_under_its_own_name_is_taken(world):
    with among(world, 1):
        path = world / "models" / "llama3"
        assert (
            run(["train", "model_name=llama3.1-8b", f"load_parameters_path={path}", "--dry-run"])[0]
            == 0
        )


@pytest.mark.parametrize("name", ["lazy_load_tensor", "lazy_load_tensors"])
def test_both_spellings_of_lazy_tensors_are_accepted(name):
    for word in (f"--{name}", f"{name}=true", f"--{name}=true"):
        _, resolved = compose("convert", [word])
        assert resolved.became[0].endswith("weights are always read a tensor at a time")


@pytest.mark.parametrize(
    "word",
    [
        "vllm_gpu_memory_utilization=0.3",
        "hbm_utilization_vllm=0.72",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_a_share_of_memory_that_does_not_act_is_said(word, in_file, tmp_path):
    name, _, value = word.partition("=")
    (tmp_path / "mine.yml").write_text(f"{name}: {value}\n")
    _, resolved = compose("train", [str(tmp_path / "mine.yml")] if in_file else [word])
    assert any(
        word in note and "sampling.slots_per_device" in note for note in resolved.start_lines
    ), resolved.start_lines


@pytest.mark.parametrize(
    "name",
    [
        "vllm_gpu_memory_utilization",
        "hbm_utilization_vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
    ],
)
def test_a_share_of_memory_is_the_samplers_where_it_has_devices_of_its_own(name):
    assert compose("train", [f"{name}=0.5", "mesh.sampler=4"])[0].sampling.memory_share == 0.5
    assert compose("train", [f"{name}=0.5"])[0].sampling.memory_share == 0.85


def test_torchrls_share_of_memory_is_always_the_samplers():
    name = "inference_model.gpu_memory_utilization"
    for words in ([], ["inference_model.num_devices=2"], ["recipe=torchrl"]):
        assert compose("train", [f"{name}=0.5", *words])[0].sampling.memory_share == 0.5
    with pytest.raises(
        ShoalError, match=f"{name}=1.5: expected a share of a device's memory, above 0 and up to 1"
    ):
        compose("train", [f"{name}=1.5"])


@pytest.mark.parametrize(
    ("words", "prompts", "slots"),
    [
        # Without dialog_turns_per_batch num_envs are the prompts of a step, and all are sampled at
        # once.
        ("env.num_envs=8", 8, 0),
        # With it, num_envs completions are sampled at once, on all of the sampler's devices
        # together.
        ("env.num_envs=32 train.dialog_turns_per_batch=64 mesh.fsdp=1", 16, 32),
        ("env.num_envs=32 train.dialog_turns_per_batch=64 inference_model.num_devices=2", 16, 16),
        ("env.num_envs=20 train.dialog_turns_per_batch=64 inference_model.devices=[4,5]", 16, 10),
        # the number of devices is open
        ("env.num_envs=32 train.dialog_turns_per_batch=64 mesh.fsdp=-1", 16, 32),
        # All of a step; never fewer than the completions of a prompt, or of pass@k (8).
        ("env.num_envs=64 train.dialog_turns_per_batch=64", 16, 0),
        ("env.num_envs=99 train.dialog_turns_per_batch=64", 16, 0),
        ("env.num_envs=2 train.dialog_turns_per_batch=64", 16, 8),
        ("env.num_envs=2 env.repeats=16 train.dialog_turns_per_batch=64", 4, 16),
        ("env.num_envs=32 train.dialog_turns_per_batch=64 sampling.slots_per_device=24", 16, 24),
    ],
)
def test_torchrls_num_envs_says_how_many_are_sampled_at_once(words, prompts, slots):
    line = words.split() if "repeats" in words else [*words.split(), "env.repeats=4"]
    config, resolved = compose("train", line)
    assert (config.batch.prompts_per_step, config.sampling.slots_per_device) == (prompts, slots)
    assert not any("changes nothing" in one for one in resolved.became)


SERVED = ["sampler.kind=vllm", "vllm.python=python"]


@pytest.mark.parametrize(
    "name",
    [
        "inference_model.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
    ],
)
def test_a_share_of_memory_is_that_of_the_servers_that_are_started_here(name):
    assert compose("train", [*SERVED, f"{name}=0.5"])[0].vllm.memory == 0.5
    urls = ["sampler.kind=vllm", "vllm.urls=[http://127.0.0.1:8000]"]
    assert compose("train", [*urls, f"{name}=0.5"])[0].vllm.memory == 0.0
    with pytest.raises(
        ShoalError, match=r"vllm.memory.*in a run with train.max_staleness=0.*\[--gpu-memory-utiliz"
    ):
        compose("train", [*SERVED, f"{name}=0.5", "train.max_staleness=1"])


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5-0.5b",
        "qwen2.5-3b",
        "qwen2.5-32b",
        "qwen2.5-72b",
        "llama3.2-1b",
        "llama3.2-3b-Instruct",
    ],
)
def test_the_names_of_models_that_people_use_are_known(name):
    from shoal.budget.memory import parameter_count
    from shoal.model.published import model_named

    size = float(name.split("-")[1].rstrip("b"))
    # Llama 3.2 is called after less than it has: 1.24 and 3.21 billion.
    assert 0.95 * size < parameter_count(model_named(name).architecture) / 1e9 < 1.25 * size


ROWS = 1160
"""Training rows of the stand-in for GSM8K."""


@pytest.mark.parametrize(
    ("door", "words", "updates", "completions", "tokens"),
    [
        # grpo_gsm8k.yaml: 100,000 turns, 32 a batch and an update. grpo_ifeval.yaml: 64 a batch, 16
        # an update.
        ("grpo", [], 3125, 32, (512, 1024)),
        ("grpo", ["--config-name", "grpo_ifeval"], 1563 * 4, 64, (1024, 2048)),
        # The demo: 100 steps, 1 prompt a device, 2 generations, 256 + 512 tokens. rl.yml: 4 batches
        # of 1 prompt.
        ("grpo_demo", ["model_name=llama3.1-8b"], 100, 2, (256, 512)),
        ("train_rl", ["model_name=llama3.1-8b"], 4, 2, (256, 768)),
        ("grpo_llama3_1_70b_demo_pw", [], 4, 2, (256, 768)),
        # GRPOConfig: 3 epochs, 8 completions of one prompt a device.
        (
            "trl",
            [
                "grpo",
                "--model_name_or_path",
                "x/y",
                "--dataset_name",
                "{data}",
                "reward=accuracy_reward",
            ],
            3 * ROWS,
            8,
            (None, 512),
        ),
        # ppo_trainer.yaml: 30 epochs, 1,024 prompts, mini-batches of 256; n is for the user to say.
        (
            "verl",
            [
                "algorithm.adv_estimator=grpo",
                "actor_rollout_ref.model.path=x/y",
                "data.train_files={data}",
                "actor_rollout_ref.rollout.n=5",
            ],
            30 * (ROWS // 1024) * 4,
            1024 * 5,
            (512, 512),
        ),
        # base_config.yaml: max_steps 10, batch_size 16, 2 generations.
        ("tunix", ["base_config.yaml", "model_config.model_id=x/y"], 10, 32, (256, 768)),
    ],
)
def test_a_systems_default_job_has_its_own_numbers(
    door, words, updates, completions, tokens, world
):
    data = world / "home" / "data" / "gsm8k" / "train.parquet"
    config, _ = compose("train", shim_argv(door, [word.format(data=data) for word in words])[1:])
    config = for_devices(config, 1, "cpu")
    assert (num_updates(config), config.batch.prompts_per_step * config.batch.group_size) == (
        updates,
        completions,
    )
    prompt, completion = tokens
    assert config.sampling.max_completion_tokens == completion
    assert config.sampling.max_prompt_tokens == prompt or prompt is None  # TRL has no limit
