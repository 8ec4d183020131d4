"""A dry run and its run go through the same checks: what one refuses, the other refuses with the
same error."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tiny_models import FAMILIES, write_model_with_tokenizer
from tiny_runs import Workshop

from shoal import cli
from shoal.job.job import Job
from shoal.weights import hub as hub_files


def error_of(capsys: pytest.CaptureFixture[str], words: list[str], code: int = 2) -> str:
    assert cli.main(words) == code
    return capsys.readouterr().err


def truncated(folder: Path) -> str:
    write_model_with_tokenizer(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return str(folder)


def other_vocabulary(folder: Path) -> str:
    return str(write_model_with_tokenizer(folder, style="llama3"))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["reward={rewards}:raises"], "KeyError: 'no such thing'"),
        (
            ["task=words", "task.path=", "model=tiny", "sampling.max_prompt_tokens=5"],
            "raise sampling.max_prompt_tokens to",
        ),
        (
            ["model.attention=pallas"],
            "model.attention=pallas: pallas attention is for GPUs and TPUs, and this is a CPU",
        ),
        (["teacher.path={other}"], "its vocabulary is not that of the model"),
        (["teacher.path={truncated}"], "model.safetensors"),
        (["model={truncated}"], "model.safetensors"),
        (
            ["sampler.kind=ray", "ray.address=127.0.0.1:1"],
            "ray.address=127.0.0.1:1: nothing answers there",
        ),
        (["report.wandb.mode=online"], "report.wandb.mode=online"),
        (
            ["train.on_warning=stop", "optimizer.warmup_steps=2"],
            "stopped before the first step by train.on_warning=stop",
        ),
        (["reward={rewards}:too_few"], "returned"),
    ],
)
def test_a_dry_run_refuses_what_its_run_refuses(
    workshop: Workshop,
    tmp_path: Path,
    capsys,
    words: list[str],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "sampler.kind=ray" in words:
        cluster = pytest.importorskip("shoal.rollout.ray_host")
        monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.5)
    if "report.wandb.mode=online" in words:
        pytest.importorskip("wandb")
    for name, value in {
        "WANDB_BASE_URL": "http://127.0.0.1:1",
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / "netrc"),
        "WANDB_CONFIG_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    found = {"{rewards}": str(workshop.rewards)}
    for name, make in (("{truncated}", truncated), ("{other}", other_vocabulary)):
        if any(name in word for word in words):
            found[name] = make(tmp_path / "m")
    for name, value in found.items():
        words = [word.replace(name, value) for word in words]
    typed = workshop.words("never", *words)
    dry, run = error_of(capsys, [*typed, "--dry-run"]), error_of(capsys, typed)
    assert part in dry and dry == run and not (workshop.runs / "never").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["train", "model=models/mine"],
        ["train", "teacher.path=models/mine"],
        ["eval", "model=models/mine"],
        ["generate", "model=models/mine"],
        ["doctor", "model=models/mine"],
        ["export", "from=models/mine", "to=out"],
        ["convert", "from=models/mine", "to=out"],
    ],
)
def test_a_folder_without_weights_is_refused_also_where_it_looks_like_a_hub_id(
    workshop: Workshop, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (write_model_with_tokenizer(tmp_path / "models" / "mine") / "model.safetensors").unlink()
    if words[0] in ("train", "eval", "doctor"):
        words = [
            words[0],
            *workshop.words("never")[1:4],
            f"base_output_directory={tmp_path}",
            *words[1:],
        ]
        words = [word for word in words if words[0] != "eval" or not word.startswith("base_")]
    error = error_of(capsys, [*words, "--dry-run"])
    assert "models/mine holds no safetensors file" in error and error.count("\n") == 1


def test_sequences_beyond_a_models_positions_are_refused_before_weights_are_read(
    workshop: Workshop, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the policy, and so of its reference, by every command; and of a teacher. Once in the run,
    once in its dry run."""

    def load_weights(*_):
        return pytest.fail("weights were read")

    monkeypatch.setattr(Job, "load_weights", load_weights)
    model = f"model={workshop.model}"
    lengths = ["sampling.max_prompt_tokens=64", "sampling.max_completion_tokens=2000"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "2 + 3 = ?", "completion": "5"}) + "\n")
    commands = [
        workshop.words("never", *lengths),
        workshop.words("never", *lengths, "algorithm.kl_coef=0.1"),
        [
            "sft",
            model,
            f"task.path={rows}",
            "task.eval_split=train",
            f"base_output_directory={tmp_path}",
            *lengths,
        ],
        ["eval", model, "task=gsm8k", f"task.path={workshop.data}", *lengths],
        ["generate", model, f"prompts={rows}", f"output={tmp_path / 'out.jsonl'}", *lengths],
        ["serve", model, *lengths],
    ]
    said = (
        f"model.path={workshop.model}: it has positions for 2,048 tokens "
        "(max_position_embeddings), but sampling.max_prompt_tokens=64 and "
        "sampling.max_completion_tokens=2000 are 2,064; lower one"
    )
    for words in commands:
        for ending in ([], ["--dry-run"]):
            assert said in error_of(capsys, [*words, *ending]), words
    assert said in error_of(
        capsys, ["plan", model, "mesh.fsdp=1", "mesh.trainer=1", *lengths, "--dry-run"]
    )
    assert cli.main(["doctor", *workshop.words("never", *lengths)[1:]]) == 2
    assert said in " ".join(capsys.readouterr().out.split())

    teacher = write_model_with_tokenizer(tmp_path / "teacher", max_position_embeddings=70)
    short = ["sampling.max_prompt_tokens=64", "sampling.max_completion_tokens=8"]
    for ending in ([], ["--dry-run"]):
        error = error_of(
            capsys, [*workshop.words("never", f"teacher.path={teacher}", *short), *ending]
        )
        assert f"teacher.path={teacher}: it has positions for 70 tokens" in error
    assert not (workshop.runs / "never").exists()


def test_a_dry_run_opens_the_stages_of_its_run_and_reads_no_weights(
    workshop: Workshop, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    check = Job.check

    def check_and_keep(job: Job) -> None:
        check(job)
        jobs.append(job)

    monkeypatch.setattr(Job, "check", check_and_keep)

    def load_weights(*_):
        return pytest.fail("weights were read")

    monkeypatch.setattr(Job, "load_weights", load_weights)
    assert cli.main([*workshop.words("never"), "--dry-run"]) == 0
    assert cli.main(["generate", f"model={workshop.model}", "--dry-run"]) == 0
    assert (
        cli.main(
            [
                "eval",
                f"model={workshop.model}",
                "task=gsm8k",
                f"task.path={workshop.data}",
                "--dry-run",
            ]
        )
        == 0
    )
    assert [job.command for job in jobs] == ["train", "generate", "eval"]
    for job in jobs:
        checked = []
        for name, stage in Job.stages.items():
            if job.command in stage.commands:
                checked.append(name)
        assert len(checked) >= 4 and job.is_open(*checked)


def test_a_reward_that_prints_does_not_spoil_what_a_dry_run_prints(
    workshop: Workshop, tmp_path: Path, capfd
) -> None:
    file = tmp_path / "loud.py"
    file.write_text(
        "def loud(completions, **kwargs):\n    print('LOUD')\n    return [1.0] * len(completions)\n"
    )
    for workers in (0, 1):
        words = workshop.words("never", f"reward={file}:loud", f"reward.workers={workers}")
        assert cli.main([*words, "--dry-run"]) == 0
        out, err = capfd.readouterr()
        assert "LOUD" not in out and "LOUD" in err


@pytest.mark.parametrize(
    ("config", "code", "part"),
    [({"model_type": "mamba"}, 2, "model_type is 'mamba'; supported are llama"), (None, 0, "")],
)
def test_a_dry_run_reads_the_cached_config_of_a_hub_id_and_downloads_nothing(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, config, code: int, part: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    def snapshot_download(*_, **__):
        return pytest.fail("something was downloaded")

    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        snapshot_download,
    )
    for name in ("org--model", "org--judge"):
        snapshot = tmp_path / f"models--{name}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("abc")
        if config:
            (snapshot / "config.json").write_text(json.dumps(config))
    for words in (["model=org/model"], ["reward=model:org/judge"]):
        assert (
            cli.main(["train", *words, f"base_output_directory={tmp_path / 'runs'}", "--dry-run"])
            == code
        )
        assert part in capsys.readouterr().err


@pytest.fixture
def remote_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The files of a stand-in for the hub on this machine, by path; with each that was asked for
    comes a token."""
    files: dict[str, bytes] = {}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = files.get(self.path)
            allowed = self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if content is not None and allowed else 404)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_TOKEN", "secret")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield files
        server.shutdown()
        thread.join()


GEMMA = {"model_type": "gemma9", "text_config": {"model_type": "gemma9_text"}}
PACKED = {**FAMILIES["llama3"], "quantization_config": {"quant_method": "gptq"}}


@pytest.mark.parametrize(
    ("content", "code", "part"),
    [
        (GEMMA, 2, "org/model: model_type is 'gemma9'; supported are llama"),
        (PACKED, 2, "org/model/config.json: the weights are quantised by quant_method gptq"),
        (FAMILIES["llama3"], 0, "org/model is not on this machine, and so not checked"),
        ("no mapping", 0, "org/model is not on this machine, and so not checked"),
        (None, 0, "org/model is not on this machine, and so not checked"),
    ],
)
def test_a_dry_run_reads_the_config_of_a_model_on_the_hub(
    tmp_path: Path, capsys, monkeypatch, remote_config, content, code: int, part: str
):
    """And refuses its family before weights are downloaded; the cache gets nothing."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    if content is not None:
        remote_config["/org/model/resolve/main/config.json"] = json.dumps(content).encode()
    runs = f"base_output_directory={tmp_path / 'runs'}"
    assert cli.main(["train", "model=org/model", runs, "--dry-run"]) == code
    printed = capsys.readouterr()
    assert part in (printed.err if code else printed.out)
    assert not (tmp_path / "cache").exists()


def test_a_hub_that_cannot_be_reached_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_files, "CONFIG_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections, and never writes
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert hub_files.config_on_hub("org/model") is None
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert hub_files.config_on_hub("org/model") is None


def cached(hub: Path, name: str, make) -> Path:
    """A model in the hub's cache, made by a function."""
    snapshot = hub / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
    (snapshot.parents[1] / "refs").mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    make(snapshot)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache on a machine that asks the hub for nothing."""
    for name, value in (("HF_HUB_CACHE", tmp_path / "hub"), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv(name, str(value))
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["model=org/cut"], "model.safetensors"),
        (
            ["model.tokenizer=nix/x"],
            "nix/x is not a local folder, and as a hub id it could not be downloaded",
        ),
    ],
)
def test_what_the_hubs_cache_holds_is_opened(
    workshop: Workshop, hub: Path, capsys, words: list[str], part: str
):
    cached(hub, "org/cut", truncated)
    typed = workshop.words("never", *words)
    dry, run = error_of(capsys, [*typed, "--dry-run"]), error_of(capsys, typed)
    assert part in dry and dry == run


def test_a_cached_model_without_all_of_its_weights_is_not_checked(
    workshop: Workshop, hub: Path, capsys, monkeypatch
):
    snapshot = cached(hub, "org/half", write_model_with_tokenizer)
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "weight_map": {
                    "a": "model-00001-of-00002.safetensors",
                    "b": "model-00002-of-00002.safetensors",
                }
            }
        )
    )
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert cli.main([*workshop.words("never", "model=org/half"), "--dry-run"]) == 0
    assert "org/half is not on this machine, and so not checked" in capsys.readouterr().out


def test_attention_that_no_model_has_on_these_devices_is_refused_before_the_model_is_here(capsys):
    words = [
        "train",
        "model=nobody/nothing",
        "model.attention=pallas",
        "optimizer.offload=true",
        "--dry-run",
    ]
    assert (
        "model.attention=pallas: pallas attention is for GPUs and TPUs, and this is a CPU"
        in error_of(capsys, words)
    )


def test_a_reward_function_is_checked_although_the_data_is_not_here(workshop: Workshop, capsys):
    reward = workshop.runs.parent / "bad_reward.py"
    reward.write_text("def f(completions, **kwargs:\n    return [0.0]\n")
    words = ["train", "task=custom", "task.path=nobody/rows", f"reward={reward}:f", "--dry-run"]
    message = error_of(capsys, words)
    assert "bad_reward.py" in message and "line 1" in message


def test_what_is_not_on_this_machine_is_said(capsys):
    assert (
        cli.main(
            [
                "train",
                "model=nobody/nothing",
                "task=custom",
                "task.path=nobody/rows",
                "reward=accuracy_reward",
                "--dry-run",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "note: download: nobody/rows is not on this machine, and so not checked" in out
    assert out.count("nobody/nothing is not on this machine") == 1
