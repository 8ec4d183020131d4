"""The command line: what it prints, what it returns, what it imports, whom it calls."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import shoal
from shoal import cli
from shoal.commands.compat import shim_argv
from shoal.commands.help import TOPICS
from shoal.config.commands import (
    COMMANDS,
    DiffConfig,
    DoctorConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    PlanConfig,
    ReplayConfig,
    RescoreConfig,
    ViewConfig,
)
from shoal.config.derived import learning_rate_text, step_text
from shoal.config.key import get_value, keys_of, sections_of
from shoal.config.merge import compose
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.optimizer import BatchSection, OptimizerSection
from shoal.config.sections.reward import RewardSection
from shoal.config.train import Config
from shoal.job.interrupt import is_command
from shoal.records import ShoalError

SOURCES = Path(__file__).parents[2] / "src"
CACHE_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What the commands set in the environment is forgotten after each test."""
    for name in CACHE_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


JOBS = {
    name: name
    for name in (
        "train",
        "generate",
        "serve",
        "export",
        "evaluate",
        "convert",
        "doctor",
        "plan",
        "replay",
        "rescore",
        "diff",
        "view",
    )
}
"""Module of `shoal.commands` -> the function that the command line calls there."""


@pytest.fixture
def calls(monkeypatch):
    """What the commands called, in place of the real jobs."""
    made: list[tuple] = []

    def stand_in(name):
        def call(*args, **kwargs):
            made.append((name, args, kwargs))
            return {"called": name, "number": float("nan")}

        return call

    for module, name in JOBS.items():
        replacement = types.ModuleType(f"shoal.commands.{module}")
        setattr(replacement, name, stand_in(name))
        if module == "plan":
            replacement.estimate = lambda config: []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, replacement.__name__, replacement)
    memory = types.ModuleType("shoal.job.out_of_memory")
    memory.explain_out_of_memory = lambda error, config: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, memory.__name__, memory)
    return made


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(SOURCES), "PATH": "", **environment},
    )


# ---- commands


@pytest.mark.parametrize(
    ("command", "words", "called", "config"),
    [
        ("train", ["steps=3"], "train", Config(steps=3)),
        ("eval", ["--pass_k=0"], "evaluate", EvalConfig(pass_k=0)),
        (
            "generate",
            ["prompts=a", "output=b"],
            "generate",
            GenerateConfig(prompts="a", output="b"),
        ),
        ("export", ["from=a", "to=b"], "export", ExportConfig(source="a", to="b")),
        ("doctor", ["steps=3"], "doctor", DoctorConfig(steps=3)),
        ("plan", ["steps=3", "topology=v5p-8"], "plan", PlanConfig(steps=3, topology="v5p-8")),
        (
            "train",
            ["--plan", "steps=3", "topology=v5p-8"],
            "plan",
            PlanConfig(steps=3, topology="v5p-8"),
        ),
        (
            "replay",
            ["runs/a", "step=37", "group=5"],
            "replay",
            ReplayConfig(run="runs/a", step=37, group=5),
        ),
        (
            "rescore",
            ["runs/a", "reward=f.py:g"],
            "rescore",
            RescoreConfig(run="runs/a", reward=RewardSection(functions=("f.py:g",))),
        ),
        ("diff", ["a", "b"], "diff", DiffConfig(run="a", other="b")),
        (
            "view",
            ["a", "port=0", "b,c", "groups=1,2:3"],
            "view",
            ViewConfig(("a", "b,c"), groups=("1", "2:3")),
        ),
        ("view", [], "view", ViewConfig()),
    ],
)
def test_each_command_calls_its_job(calls, command, words, called, config):
    assert cli.main([command, *words]) == 0
    [(name, args, kwargs)] = calls
    assert (name, args[0]) == (called, config)
    expected = ["console", "recipe"] if called == "train" else ["console"]
    assert len(args) == 1 and list(kwargs) == expected


def test_what_a_preset_sets_is_said(calls, capsys):
    assert cli.main(["train", "task=gsm8k"]) == 0
    assert "algorithm.kl_coef=0.04" in capsys.readouterr().out
    assert calls[0][1][0].algorithm.kl_coef == 0.04


@pytest.mark.parametrize(("module", "name"), JOBS.items())
def test_the_jobs_exist_under_the_names_that_are_called(module, name):
    function = getattr(importlib.import_module(f"shoal.commands.{module}"), name)
    assert "console" in function.__code__.co_varnames[: function.__code__.co_argcount]


@pytest.fixture
def run(tmp_path) -> Path:
    """A run as far as its configuration, the last one started in its folder."""
    run = tmp_path / "first"
    run.mkdir()
    words = [
        "sampling.max_prompt_tokens=100",
        "optimizer.lr=1e-3",
        f"base_output_directory={tmp_path}",
    ]
    (run / "config.yaml").write_text(compose("train", [*words, "run_name=first"])[1].text)
    (tmp_path / "last").write_text("first\n")
    return run


def test_resumption_reaches_the_job(calls, run):
    assert (
        cli.main(["train", "resume=last", f"base_output_directory={run.parent}", "steps=200"]) == 0
    )
    [(_, (config,), _)] = calls
    assert (config.resume, config.steps, config.optimizer.lr) == (str(run), 200, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_flags_beside_resume_are_judged_by_the_run(calls, capsys, run, command):
    words = [command, f"resume={run}", "max_target_length=150", "task=gsm8k"]
    assert cli.main(words) == 0
    assert calls[0][1][0].sampling.max_completion_tokens == 50
    said = capsys.readouterr().out
    title, line, *_ = said.splitlines()
    assert title == "flags of other systems:" and "preset" not in said
    assert line.startswith("  max_target_length=150 became sampling.max_completion_tokens=50")
    # the run refuses the task
    assert cli.main([*words, "--dry-run"]) == (2 if command == "train" else 0)
    assert ("task.name was 'words' and cannot become 'gsm8k'" in capsys.readouterr().err) == (
        command == "train"
    )
    assert cli.main([*words[:-1], "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert (
        f"\nresume: {run}\n" in shown
        and "  max_completion_tokens: 50\n" in shown
        and "  lr: 0.001\n" in shown
    )
    assert cli.main([command, f"resume={run}", "max_target_length=100"]) == 2
    assert "expected more than max_prefill_predict_length=100" in capsys.readouterr().err


@pytest.fixture
def outputs(run, monkeypatch) -> Path:
    """`outputs/first` in the working folder, a copy of `run`; returns `outputs`."""
    outputs = run.parent / "work" / "outputs"
    outputs.mkdir(parents=True)
    shutil.copytree(run, outputs / "first")
    (outputs / "last").write_text("first\n")
    monkeypatch.chdir(outputs.parent)
    return outputs


@pytest.mark.parametrize(
    ("command", "words", "key"),
    [
        ("train", ["model=last"], "model.path"),
        ("train", ["--model_name_or_path=last"], "model.path"),
        ("train", ["model.lora.path=last"], "model.lora.path"),
        ("train", ["teacher.path=last"], "teacher.path"),
        ("train", ["critic.path=last", "algorithm.advantage=gae"], "critic.path"),
        ("doctor", ["model=last"], "model.path"),
        ("plan", ["model=last"], "model.path"),
        ("generate", ["model=last", "prompts=a", "output=b"], "model.path"),
        ("serve", ["model=last"], "model.path"),
        ("export", ["from=last", "to=b"], "source"),
        ("convert", ["from=last", "to=b"], "source"),
        ("rescore", ["last"], "run"),
        ("replay", ["last"], "run"),
        ("diff", ["a", "last"], "other"),
        ("view", ["last"], "runs"),
    ],
)
def test_last_is_the_run_started_last_wherever_a_run_is_taken(
    calls, capsys, outputs, command, words, key
):
    name = "from" if key == "source" else key
    for ending in ("last", "outputs/last"):
        assert cli.main([command, *(word.replace("last", ending) for word in words)]) == 0
        _, (config,), _ = calls.pop()
        # A run stores the path, so that it means the same later.
        assert get_value(config, key) in ("outputs/first", ("outputs/first",))
        said = capsys.readouterr().out
        assert f"{name}={ending} is outputs/first, the run that was started last\n" in said


def test_groups_without_a_run_says_which_it_shows(outputs, capsys):
    assert cli.main(["groups", "--dry-run"]) == 0
    assert "# run=last is outputs/first, the run that was started last\n" in capsys.readouterr().out


def test_last_is_looked_for_under_the_base_directory_of_the_command(calls, run, outputs, capsys):
    shutil.rmtree(outputs)
    base = f"base_output_directory={run.parent}"
    assert cli.main(["train", "model=last", base]) == 0
    assert cli.main(["export", f"from={run.parent}/last", "to=b"]) == 0
    assert [calls[0][1][0].model.path, calls[1][1][0].source] == [str(run), str(run)]
    for words, part in (
        (["export", "from=last", "to=b"], "last: no run was started under outputs yet; name a run"),
        (["groups"], "last: no run was started under outputs yet"),
        (["train", "model=last", "base_output_directory=none"], "was started under none yet"),
    ):
        assert cli.main(words) == 2
        assert part in capsys.readouterr().err
    shutil.rmtree(run)
    assert cli.main(["train", "model=last", base]) == 2
    error = capsys.readouterr().err
    assert f"last under {run.parent} is {run}, which is no longer there" in error


def test_a_folder_of_the_name_last_is_meant_before_the_run(calls, outputs, capsys):
    Path("last").mkdir()
    assert cli.main(["export", "from=last", "to=b"]) == 0
    assert calls[0][1][0].source == "last"
    said = capsys.readouterr().out
    assert said == "from=last is the folder `last` here, not the run started last\n"
    (outputs / "last").unlink()
    (outputs / "last").mkdir()
    assert cli.main(["export", "from=outputs/last", "to=b"]) == 0
    assert calls[1][1][0].source == "outputs/last"


def test_a_sweep_is_given_the_path_of_the_run_started_last(outputs, capsys):
    words = ["train", "--multirun", "model=last", "seed=1,2"]
    assert cli.main(words) == 2
    assert capsys.readouterr().err == (
        "error: model.path=last is outputs/first, the run that was started last; each run of a "
        "sweep becomes that when it starts, so give the path\n"
    )
    words[2] = "model=outputs/first"
    assert cli.main([*words, "--dry-run"]) == 0


def test_last_in_python(outputs, capsys):
    with pytest.raises(ShoalError, match=r"outputs/first\b"):  # the run has no checkpoint
        shoal.train(model="last", dry_run=True)
    shutil.copytree(SOURCES / "shoal" / "assets" / "tiny", outputs / "model")
    (outputs / "last").write_text("model\n")
    assert shoal.train(model="last", dry_run=True)["model.path"] == "outputs/model"
    assert "# model.path=last is outputs/model, the run" in capsys.readouterr().out
    settings = shoal.evaluate(model="outputs/last", task="words", dry_run=True)
    assert settings["model.path"] == "outputs/model"


def test_a_run_to_go_on_with_must_be_there(calls, capsys, run):
    for words, part in (
        (["resume=last", f"base_output_directory={run}"], f"no run was started under {run} yet"),
        ([f"resume={run.parent}"], "is not a run folder"),
        (["resume=last", "base_output_directory=zz://a"], "zz:// is not known"),
    ):
        assert cli.main(["train", *words, "--dry-run"]) == cli.main(["train", *words]) == 2
        assert capsys.readouterr().err.count(part) == 2
    assert calls == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["replay"], "run is not given: write run=... (run folder"),
        (["diff", "a"], "other is not given: write other=... (another run folder, or `last`)"),
        (["diff", "a", "b", "c"], "c: one word too many, expected `shoal diff RUN OTHER`"),
        (["replay", "a", "stpe=3"], "did you mean step?"),
        (
            ["launch", "--target"],
            "--target: expected a value (docker | ray | slurm | gke | xpk): write target=VALUE",
        ),
    ],
)
def test_words_that_are_missing_or_too_many(capsys, calls, words, part):
    assert cli.main(words) == 2
    assert part in capsys.readouterr().err and calls == []


def test_json_stands_alone_on_stdout(capfd, calls, monkeypatch):
    def talks(config, console):
        console.note("a note")
        print("said aloud")
        os.write(1, b"by a process of its own\n")
        return {"identical": True, "worst": float("nan")}

    monkeypatch.setattr(sys.modules["shoal.commands.replay"], "replay", talks)
    assert cli.main(["replay", "a", "json=true"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"identical": True, "worst": None}
    assert "a note" in err and "said aloud" in err and "by a process" in err
    assert cli.main(["replay", "a"]) == 0
    out, err = capfd.readouterr()
    assert "a note" in out and "identical" not in out and err == ""


def test_what_the_doctor_finds_is_exit_code_2(calls, monkeypatch, capfd):
    for ok, code in ((True, 0), (False, 2)):

        def doctor(config, console, ok=ok):
            return {"ok": ok}

        monkeypatch.setattr(
            sys.modules["shoal.commands.doctor"],
            "doctor",
            doctor,
        )
        assert cli.main(["doctor"]) == cli.main(["doctor", "--json"]) == code
        assert json.loads(capfd.readouterr().out) == {"ok": ok}


# ---- mistakes


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trian"], "did you mean train?"),
        (["evaluate"], "did you mean eval?"),
        (["steps=3"], "Commands: train, sft, doctor, plan, eval"),
        (["train", "stpes=3"], "did you mean steps?"),
        (["train", "steps=x"], "steps='x': expected a whole number"),
        (
            ["eval", "steps=3"],
            "steps: shoal eval has no use for it, shoal train does: leave it out here",
        ),
        (
            ["eval", "optimizer.lr=1"],
            "optimizer.lr: shoal eval has no use for it, shoal train does",
        ),
        (["eval", "train.pass_k=8"], "did you mean pass_k?"),
        (["replay", "a", "steps=3"], "did you mean step?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, calls, words, part):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and calls == []
    assert err.startswith("error: ") and err.count("\n") == 1 and part in err


def test_a_mistake_met_later_is_one_line_too(capsys, calls, monkeypatch):
    def fails(*args, **kwargs):
        raise ShoalError("no such\nfolder")

    monkeypatch.setattr(sys.modules["shoal.commands.train"], "train", fails)
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "error: no such folder\n"


def test_interrupt_and_bug(capsys, calls, monkeypatch):
    def raises(error):
        def call(*args, **kwargs):
            raise error

        return call

    monkeypatch.setattr(sys.modules["shoal.commands.train"], "train", raises(KeyboardInterrupt()))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr(
        sys.modules["shoal.commands.train"],
        "train",
        raises(KeyboardInterrupt("saved; resume=last")),
    )
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "saved; resume=last\n"
    monkeypatch.setattr(
        sys.modules["shoal.commands.train"], "train", raises(ZeroDivisionError("a bug"))
    )
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["train"])


@pytest.mark.parametrize("module", ["numpy", "shoal.cli", "shoal.config.merge", "jax"])
def test_ctrl_c_before_a_run_begins_is_one_line(module, tmp_path):
    """The signal comes when a module is imported, early or late in a start."""
    code = (
        "import os, runpy, signal, sys\nclass Finder:\n    @staticmethod\n    def find_spec(name, "
        "*args):\n"
        f"        if name == {module!r}:\n            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\nsys.argv[:] = ['-m', 'train']\n"
        "sys.orig_argv[:] = ['python', '-m', 'shoal', 'train']\n"
        "runpy.run_module('shoal', run_name='__main__')"
    )
    done = python(code, GLIBC_TUNABLES="")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("argv", "typed", "is_it"),
    [
        (["-m", "train"], ["python", "-m", "shoal", "train"], True),
        (["-m"], ["python", "-X", "dev", "-Imshoal"], True),
        (["/venv/bin/shoal", "train"], ["python", "/venv/bin/shoal", "train"], True),
        (["-m", "a"], ["python", "-m", "package", "a"], False),
        (["-m", "-m", "shoal"], ["python", "-mpackage", "-m", "shoal"], False),
        (["-m", "shoal"], ["python", "-m", "package", "shoal"], False),
        (["-m"], ["python", "-m", "shoal.other"], False),
        (["-m", "a", "b"], ["python"], False),
        (["train.py"], ["python", "train.py"], False),
        ([""], ["python"], False),
        ([], ["python"], False),
    ],
)
def test_ctrl_c_is_changed_in_the_commands_own_process_alone(monkeypatch, argv, typed, is_it):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", typed)
    assert is_command() is is_it


@pytest.mark.system
def test_a_package_that_is_run_by_its_name_and_imports_this_one_keeps_its_ctrl_c(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import shoal\n")
    (package / "__main__.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    print('in order', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "package", "shoal"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "in order\n", "")


def test_what_explains_running_out_of_memory_exists():
    from shoal.job.out_of_memory import explain_out_of_memory

    assert isinstance(explain_out_of_memory(MemoryError(), Config()), ShoalError)
    assert explain_out_of_memory(ZeroDivisionError(), Config()) is None


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory")]
)
def test_running_out_of_memory_is_explained(capsys, calls, monkeypatch, error):
    def out_of_memory(*args, **kwargs):
        raise error

    def explain(found, config):
        assert found is error
        if config.steps:
            return ShoalError(f"lower batch.group_size={config.batch.group_size}")
        return None

    monkeypatch.setattr(sys.modules["shoal.commands.train"], "train", out_of_memory)
    monkeypatch.setattr(sys.modules["shoal.job.out_of_memory"], "explain_out_of_memory", explain)
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "error: lower batch.group_size=8\n"
    with pytest.raises(type(error)):
        cli.main(["train", "steps=0"])


def test_memory_that_ran_out_in_torchrls_door_names_what_was_typed(capsys, monkeypatch):
    """The model's size is not known here: keys alone, none of them with the value that it has."""

    def out_of_memory(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("shoal.commands.train.train", out_of_memory)
    words = shim_argv(
        "grpo", ["train.optim_batch_size=32", "env.repeats=16", "model.name=some/model"]
    )
    assert cli.main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "batch.group_size=8 (now 16)" in error and "batch.group_size: --env.repeats" in error
    assert "batch.micro_tokens: --train.optim_batch_size" in error
    assert "full (now full)" not in error and "bfloat16 (now bfloat16)" not in error


def test_memory_that_ran_out_is_answered_with_the_plans_advice_in_the_users_flags(
    capsys, monkeypatch
):
    def out_of_memory(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB."
        )

    monkeypatch.setattr("shoal.commands.train.train", out_of_memory)
    flags = [
        "--per_device_train_batch_size=8",
        "--num_generations=8",
        "--max_completion_length=256",
    ]
    assert cli.main(["train", *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "error: memory ran out (12.50GiB more were requested); in addition, a device holds KV "
        "caches"
    )
    # A group, 256 + 8 x 256 tokens, is an update, and half of it is advised. Of the tiny model in
    # float32: its weights, a layer with its gradient; for each token the layers' inputs, three
    # arrays of logits, what is kept.
    fixed = 4 * 875_520 + (2 * 4 + 4) * 196_928
    a_token = 4 * 4 * 128 + 3 * 4 * 685 + 4 * 4 * (3 * 128 + (4 + 2 * 2) * 32 + 2 * 384)
    saved = 12.5 * (1 - (fixed + 1152 * a_token) / (fixed + 2304 * a_token))
    for part in (
        f"order: batch.micro_tokens=1152 (now 4096): about {saved:.1f} GiB less a device, weights "
        "are",
        "batch.micro_tokens: --per_device_train_batch_size",
        "batch.group_size: --num_generations",
        "model.remat is gradient_checkpointing",
    ):
        assert part in error


# ---- dry run


@pytest.mark.slow
def test_a_dry_run_says_what_an_adapter_trains_and_warns_of_a_high_rank(capsys, calls):
    assert cli.main(["train", "model.lora.rank=64", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# LoRA of rank 64 trains 622,592 parameters; 875,520 are frozen" in out
    assert (
        "warning: configuration: model.lora.rank=64: in published runs of GRPO 73% accuracy fell "
        "to 9%" in out
    )
    assert cli.main(["train", "model.lora.rank=32", "--dry-run"]) == 0
    assert "published runs" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["train", "model.lora.alpha=16"],
            "model.lora.alpha=16 has no effect without an adapter: set model.lora.rank",
        ),
        (
            ["train", "model.lora.targets=[q_proj]", "model.lora.rslora=true"],
            "model.lora.targets=[q_proj], model.lora.rslora=true have no effect without an adapter",
        ),
        (["doctor", "model.lora.alpha=16"], "model.lora.alpha=16 has no effect without an adapter"),
        (["train", "model.lora.alpha=32"], ""),
        (["train", "model.lora.rank=4", "model.lora.alpha=16"], ""),
    ],
)
def test_what_is_said_of_an_adapter_that_there_is_not_is_a_warning(capsys, words, text):
    assert cli.main([*words, "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.replace("#", "").split())
    assert text in out and ("no effect" in out) == bool(text)


def test_a_dry_run_shows_what_would_run(capsys, calls, tmp_path):
    words = [
        "batch.group_size=4",
        "algorithm.num_epochs=2",
        "algorithm.num_minibatches=3",
        "run_name=a",
    ]
    assert cli.main(["train", *words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert calls == []
    for line in (
        "#   batch.group_size=4  # command line (default 8)",
        "#   run_name=a  # command line (default empty)",
        "# this step = 32 prompts x 4 completions = 128 completions, 6 updates (2 epochs x 3 "
        "mini-batches); 40 steps",
    ):
        assert f"\n{line}\n" in out
    file = tmp_path / "printed.yaml"
    file.write_text(out)
    assert compose("train", [str(file)])[0] == compose("train", words)[0]


def test_a_dry_run_says_which_model_a_name_loads(capsys, calls):
    assert cli.main(["train", "model.name=llama3.1-8b", "weight_dtype=bfloat16", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# model.name=llama3.1-8b loads meta-llama/Llama-3.1-8B\n" in out
    assert (
        "weight_dtype=bfloat16 changes nothing here: master weights and moments are float32\n"
        in out
    )


def test_a_step_in_one_line():
    fixed = Config(mesh=MeshSection(fsdp=4, dcn_data=2), batch=BatchSection(prompts_per_device=2))
    assert (
        "2 prompts a device x 8 completions x 8 devices = 128 completions, 1 update"
        in step_text(fixed)
    )
    assert "x 8 completions, 1 update" in step_text(replace(fixed, mesh=MeshSection(fsdp=-1)))
    assert step_text(Config()) == (
        "this step = 32 prompts x 8 completions = 256 completions, 1 update (1 epoch x 1 "
        "mini-batch); 40 steps"
    )


@pytest.mark.parametrize(
    "optimizer, text",
    [
        ({}, "rises to 0.001 in the first 5 of 40 updates, then stays"),
        ({"warmup_steps": 0}, "0.001 from the first update, which stays"),
        ({"schedule": "linear"}, "in the first 5 of 40 updates, then falls linearly to 0"),
        ({"warmup_steps": 80}, "rises to 0.0005 in 40 updates; its warm-up to 0.001 takes 80"),
    ],
)
def test_the_learning_rate_in_one_line(optimizer: dict[str, Any], text: str):
    section = OptimizerSection(**({"lr": 1e-3, "warmup_steps": 5} | optimizer))
    assert learning_rate_text(Config(optimizer=section)).endswith(text)


def test_a_resumed_run_says_from_which_update_its_learning_rate_is():
    """The updates before may have had another rate."""
    config = Config(steps=40, optimizer=OptimizerSection(lr=5e-5, warmup_steps=0))
    assert learning_rate_text(config, steps_made=8) == "learning rate: 5e-05 from update 9 on"
    two_updates = replace(config, algorithm=replace(config.algorithm, num_epochs=2))
    assert learning_rate_text(two_updates, steps_made=8).endswith("from update 17 on")
    rising = replace(config, optimizer=replace(config.optimizer, warmup_steps=20))
    assert "in the first 20 of 40 updates" in learning_rate_text(rising, steps_made=8)
    falling = replace(config, optimizer=replace(config.optimizer, schedule="linear"))
    assert learning_rate_text(falling, steps_made=8).endswith("this run continues at update 9")


# launch prints the job, sft needs data, groups a run
@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command not in ("launch", "sft", "groups")]
)
def test_every_command_has_a_dry_run(capsys, calls, command):
    assert cli.main([command, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# nothing differs from the defaults\n" in out and calls == []
    assert ("# this step = " in out) == (command in ("train", "doctor", "plan"))


@pytest.mark.slow
def test_a_dry_run_touches_nothing(tmp_path):
    done = python(
        "import sys\nfrom shoal.cli import main\n"
        "assert main(['train', '-m', '--dry-run', 'steps=1,2']) == 0\nassert 'jax' not in "
        "sys.modules\n"
        f"assert main(['train', 'model=not/there', 'base_output_directory={tmp_path}/runs', "
        f"'--dry-run']) == 0"
    )
    assert done.returncode == 0, done.stderr
    assert "path: not/there" in done.stdout and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("plan topology=h100:16 mesh.fsdp=16", 0, ""),
        (
            "plan topology=v5p-256 mesh.trainer=64 mesh.sampler=64 mesh.fsdp=-1 "
            "mesh.sampler_tensor=8",
            0,
            "",
        ),
        (
            "train --plan topology=h100:4 mesh.fsdp=8",
            2,
            "mesh.fsdp=8 does not divide 4 devices; use 1, 2 or 4",
        ),
        (
            "plan topology=v6e:4x8@2 mesh.fsdp=-1",
            2,
            "64 devices are 2 slices, but mesh.dcn_data x mesh.dcn_fsdp is 1",
        ),
        ("plan topology=v6e:4x8@2 mesh.fsdp=-1 mesh.dcn_data=2", 0, ""),
        ("plan topology=v7-8", 2, "there is no such topology"),
        (
            "plan topology=h100:16",
            0,
            "1 of 16 devices are used: raise mesh.fsdp (-1 takes all of the trainer's)",
        ),
        (
            "train mesh.trainer=0.3 mesh.sampler=0.3 mesh.fsdp=-1",
            0,
            "4 of 8 devices are used: raise mesh.trainer or mesh.sampler",
        ),
        (
            "train mesh.sampler=4",
            0,
            "5 of 8 devices are used: raise mesh.fsdp (-1 takes all of the trainer's)",
        ),
    ],
)
def test_a_dry_run_judges_the_mesh_on_the_jobs_devices(capsys, words, code, part):
    assert cli.main([*words.split(), "--dry-run"]) == code
    found = "".join(capsys.readouterr())
    assert part in found and ("# warning: devices" in found) == (code == 0 and part != "")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["base_output_directory=zz://a/b"], "base_output_directory=zz://a/b: zz:// is not known"),
        (["model=zz://a"], "model.path=zz://a: zz:// is not known"),
        (["model={folder}"], "model_type is 'mamba'; supported are llama, qwen2, qwen3"),
        (["teacher.path={folder}", "algorithm.advantage=none"], "model_type is 'mamba'"),
        (["model.name=llama9-8b"], "no model is called 'llama9-8b'"),
        (["task=gsm8q"], "did you mean 'gsm8k'"),
        (["task=custom", "task.path={data}"], "task custom: it has no reward of its own"),
        (["task=custom", "reward=f.py:g"], "task custom: task.path is not given"),
        (
            ["task=custom", "task.path={data}", "algorithm.advantage=none", "teacher.path=tiny"],
            "has no column `prompt`",
        ),
        (["sampling.temperature=0"], "sampling.temperature=0: in training every completion"),
        (["algorithm.advantage=none"], "set teacher.path"),
        (["mesh.fsdp=3"], "mesh.fsdp=3 does not divide 8 devices; use 1, 2, 4 or 8"),
        (
            ["mesh.tensor=2", "mesh.fsdp=3"],
            "mesh.fsdp=3 does not divide the 4 of 8 devices that the other axes leave; use 1, 2 or "
            "4",
        ),
        (["mesh.trainer=6", "mesh.sampler=4"], "6 (trainer) + 4 (sampler) devices are requested"),
        (["run_name=../out"], "without '..'"),
        (["ici_fsdp_parallelism=3"], "use 1, 2, 4 or 8 (mesh.fsdp: --ici_fsdp_parallelism)"),
        (["trainer.n_gpus_per_node=16"], "JAX finds 8 devices"),
        (["trainer.n_gpus_per_node=16"], "(mesh.trainer: --trainer.n_gpus_per_node)"),
        (["task=gsm8k", "task.path={folder}/no.jsonl"], "there is no such file or folder"),
        (
            ["task=gsm8k", "task.path=no.jsonl"],
            "task.path='no.jsonl': there is no such file or folder",
        ),
        (
            [
                "task=custom",
                "task.files=[no.jsonl]",
                "algorithm.advantage=none",
                "teacher.path=tiny",
            ],
            "task.files: there is no file 'no.jsonl'",
        ),
        (["reward={folder}/no.py:f"], "there is no file"),
        (["reward=[python:f]"], "this reward came from Python"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse(capsys, tmp_path, words, part):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1 + 1", "answer": "2"}\n' * 4)
    words = [word.format(folder=tmp_path, data=data) for word in words]
    if any(word.startswith("base") for word in words):
        words += []
    else:
        words += [f"base_output_directory={tmp_path / 'runs'}"]
    assert cli.main(["train", *words, "--dry-run"]) == 2
    assert part in capsys.readouterr().err
    if "reward=f.py:g" not in words:  # the run reads the functions' file before the data
        assert cli.main(["train", *words]) == 2
        assert part in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            "generate prompts={folder}/no.jsonl output={folder}/out.jsonl",
            "there is no such file; give a jsonl, csv",
        ),
        ("generate prompts={file} output={file}", "in.jsonl exists: choose another name"),
        (
            "generate prompts={file} output={folder}/out.csv",
            "JSON is written, so the name must end otherwise: output=",
        ),
        (
            "eval responses={folder}/no.jsonl task=gsm8k",
            "there is no such file; give a jsonl file with `question`",
        ),
        ("eval output={file}", "in.jsonl exists"),
        ("eval output={folder}/out.parquet", "out.jsonl"),
        ("eval task=gsm8k task.path={folder}/no.jsonl", "there is no such file or folder"),
        ("eval reward={folder}/no.py:f", "there is no file"),
        ("export from={folder}/no to={folder}/new", "there is no model folder"),
        ("export from=tiny to={folder}", "exists and is not empty"),
    ],
)
def test_other_commands_dry_runs_refuse_what_they_would_refuse(capsys, tmp_path, words, part):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n')
    words = words.format(folder=tmp_path, file=file).split()
    for ending in ([], ["--dry-run"]):
        assert cli.main([*words, *ending]) == 2
        assert part in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def test_a_dry_run_warns_of_a_folder_that_would_be_looked_for_on_the_hub(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert cli.main(["train", "model=models/mine", "--dry-run"]) == 0
    assert (
        "# warning: configuration: model.path=models/mine: models/ holds nothing"
        in capsys.readouterr().out
    )
    assert cli.main(["train", "model=org/mine", "--dry-run"]) == 0
    assert "on the hub" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_platform_that_jax_does_not_find_is_one_error(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "1 + 1"}\n')
    commands = [
        ["train", f"base_output_directory={tmp_path / 'runs'}"],
        ["doctor"],
        ["eval"],
        ["generate", f"prompts={prompts}", f"output={tmp_path / 'out.jsonl'}"],
        ["export", "from=tiny", f"to={tmp_path / 'a'}"],
        ["convert", "from=tiny", f"to={tmp_path / 'a'}"],
    ]
    commands += [[*words, "--dry-run"] for words in commands]
    done = python(
        f"""
from shoal.cli import main
assert [main(words) for words in {commands!r}] == [2] * 12
import jax
jax.config.update("jax_platforms", "kpu")
assert [main(words) for words in {commands!r}] == [2] * 12""",
        JAX_PLATFORMS="cuda",
    )
    # Where the plug-in is installed, JAX itself prints once why it does not start: a cause, and
    # what came of it.
    printed_by_jax = 2 * done.stderr.count("Jax plugin configuration error")
    assert done.returncode == 0 and done.stderr.count("Traceback") == printed_by_jax <= 2, (
        done.stderr
    )
    errors = []
    for line in done.stderr.splitlines():
        if line.startswith("error: "):
            errors.append(line)
    # doctor goes on
    found = []
    for line in done.stdout.splitlines():
        if line.startswith("WRONG devices: "):
            found.append(line)
    assert (len(errors), len(found)) == (22, 2) and "(cpu, cuda, tpu)" not in done.stderr
    for platform, lines in (("cuda", [*errors[:11], found[0]]), ("kpu", [*errors[11:], found[1]])):
        for line in lines:
            assert f": JAX_PLATFORMS={platform}: JAX finds no such devices" in line
            assert ("install '.[cuda]'" in line) == (platform == "cuda")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# ---- help


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(capsys, words):
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_key(capsys, command):
    assert cli.main([command, "steps=wrong", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, key in keys_of(COMMANDS[command]).items():
        [place] = [
            i
            for i, line in enumerate(lines)
            if line.startswith(f"  {name}=") and " is " not in line
        ]
        assert key.help.split()[0] in lines[place + 1]
    text = " ".join(" ".join(lines).split())
    for key in keys_of(COMMANDS[command]).values():
        assert f"{key.help} [{key.type_text}]" in text


def test_help_shows_defaults_and_short_forms(capsys):
    cli.main(["train", "--help"])
    out = capsys.readouterr().out
    for line in (
        "  optimizer.lr=0.00015",
        "  report.groups=true",
        "  sampling.stop=[]",
        "  model.path=tiny",
        "  model= is model.path=",
    ):
        assert f"\n{line}\n" in out
    assert "\noptimizer: AdamW" in out


def test_help_of_a_short_form_says_whose_it_is(capsys):
    assert cli.main(["train", "--help", "checkpoint_period"]) == 0
    assert capsys.readouterr().out.startswith(
        "checkpoint_period: another name of checkpoint.every\n"
    )


def test_help_of_one_topic(capsys):
    cli.main(["train", "--help"])
    everything = capsys.readouterr().out
    assert (
        cli.main(["train", "--help", "optimizer", "lr=1"])
        == cli.main(["help", "train", "optimizer"])
        == 0
    )
    once, again = capsys.readouterr().out.split("optimizer: ")[1:]
    assert once == again and f"optimizer: {once}" in everything
    assert once.count("\n  optimizer.") == sum(
        key.startswith("optimizer.") for key in keys_of(Config)
    )
    assert cli.main(["help", "train", "report", "steps"]) == 0
    out = capsys.readouterr().out
    assert (
        "  report.wandb.mode=off\n" in out
        and out.endswith("[integer]\n")
        and "optimizer" not in out
    )
    assert cli.main(["train", "--help", "optimiser"]) == 2
    assert (
        "optimiser: there is no such topic or key, did you mean optimizer?"
        in capsys.readouterr().err
    )


def test_every_topic_is_described():
    assert {
        topic for config_type in COMMANDS.values() for topic in sections_of(config_type)
    } == set(TOPICS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shoal ")


# ---- what is imported, and when


def test_help_is_quick_and_light():
    code = (
        "import sys\nfrom shoal.cli import main\nassert main(['--help']) == main(['train', "
        "'--help']) == 0\n"
        "heavy = [m for m in ('jax', 'hydra', 'omegaconf', 'orbax', 'rich') if m in sys.modules]\n"
        "assert not heavy, heavy"
    )
    before = os.times()
    done = python(code)
    after = os.times()
    assert done.returncode == 0, done.stderr
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    assert user + system < 2  # seconds of CPU: on a machine that is busy, the clock measures others


def test_a_mistaken_key_is_found_without_jax():
    done = python(
        "import sys\nfrom shoal.cli import main\nassert main(['train', 'stpes=1']) == 2\n"
        "assert 'jax' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("error: stpes")


def test_the_compilation_cache_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cli.cache_by_environment()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "shoal" / "jax")
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0.5"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    cli.cache_by_environment()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
    for name in CACHE_VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cli.cache_by_environment()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(
        tmp_path / "home" / ".cache" / "shoal" / "jax"
    )
