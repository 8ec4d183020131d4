"""The command line: what it prints, what it returns, what it imports, whom it calls."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from shoal import cli
from shoal.config.keys import COMMANDS, keys_of
from shoal.config.schema import Config, EvalConfig, ExportConfig, GenerateConfig, PretrainConfig
from shoal.types import ShoalError

SOURCES = Path(__file__).parent.parent / "src"
CACHE_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What the commands set in the environment is forgotten after each test."""
    for name in CACHE_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def calls(monkeypatch):
    """What the commands called, in place of the real jobs."""
    made: list[tuple] = []

    def stand_in(name):
        def call(*args, **kwargs):
            made.append((name, args, kwargs))
        return call

    job, pretrain = types.ModuleType("shoal.runtime.job"), types.ModuleType("shoal.runtime.pretrain")
    for name in ("train", "evaluate", "generate", "export"):
        setattr(job, name, stand_in(name))
    pretrain.pretrain = stand_in("pretrain")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shoal.runtime.job", job)
    monkeypatch.setitem(sys.modules, "shoal.runtime.pretrain", pretrain)
    return made


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          env={"PYTHONPATH": str(SOURCES), "PATH": "", **environment})


# ---- commands


@pytest.mark.parametrize(("command", "words", "called", "config"), [
    ("train", ["steps=3"], "train", Config(steps=3)),
    ("eval", ["--pass_k=0"], "evaluate", EvalConfig(pass_k=0)),
    ("generate", ["prompts=a", "output=b"], "generate", GenerateConfig(prompts="a", output="b")),
    ("export", ["from=a", "to=b"], "export", ExportConfig(source="a", to="b")),
    ("pretrain", ["output=a"], "pretrain", PretrainConfig(output="a")),
])
def test_each_command_calls_its_job(calls, command, words, called, config):
    assert cli.main([command, *words]) == 0
    [(name, args, kwargs)] = calls
    assert (name, args[0]) == (called, config)
    assert "console" in kwargs
    assert len(args) == (2 if command == "train" else 1)
    if command == "train":
        assert "steps: 3" in args[1][0] and args[1][1] == "steps: 3\n"


def test_what_a_preset_sets_is_said(calls, capsys):
    assert cli.main(["train", "task=gsm8k"]) == 0
    assert "algorithm.kl_coef=0.04" in capsys.readouterr().out
    assert calls[0][1][0].algorithm.kl_coef == 0.04


def test_the_jobs_exist_under_the_names_that_are_called():
    from shoal.runtime import job, pretrain

    for module, name in [(job, "train"), (job, "evaluate"), (job, "generate"), (job, "export"),
                         (pretrain, "pretrain")]:
        assert "console" in getattr(module, name).__code__.co_varnames


# ---- mistakes


@pytest.mark.parametrize(("words", "part"), [
    (["trian"], "did you mean train?"),
    (["evaluate"], "did you mean eval?"),
    (["steps=3"], "Commands: train, eval"),
    (["train", "stpes=3"], "did you mean steps?"),
    (["train", "steps=x"], "steps='x': expected a whole number"),
])
def test_a_mistake_is_one_line_and_exit_code_2(capsys, calls, words, part):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and calls == []
    assert err.startswith("error: ") and err.count("\n") == 1 and part in err


def test_a_mistake_met_later_is_one_line_too(capsys, calls, monkeypatch):
    def fails(*args, **kwargs):
        raise ShoalError("no such\nfolder")

    monkeypatch.setattr(sys.modules["shoal.runtime.job"], "train", fails)
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "error: no such folder\n"


def test_interrupt_and_bug(capsys, calls, monkeypatch):
    def raises(error):
        def call(*args, **kwargs):
            raise error
        return call

    monkeypatch.setattr(sys.modules["shoal.runtime.job"], "train", raises(KeyboardInterrupt()))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr(sys.modules["shoal.runtime.job"], "train", raises(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["train"])


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
        [place] = [i for i, line in enumerate(lines) if line.startswith(f"  {name}=") and " is " not in line]
        assert key.help.split()[0] in lines[place + 1]
    text = " ".join(" ".join(lines).split())
    for key in keys_of(COMMANDS[command]).values():
        assert f"{key.help} [{key.type_text}]" in text


def test_help_shows_defaults_and_short_forms(capsys):
    cli.main(["train", "--help"])
    out = capsys.readouterr().out
    for line in ("  optimizer.lr=5e-05", "  report.groups=true", "  sampling.stop=[]", "  model.path=tiny",
                 "  model= is model.path="):
        assert f"\n{line}\n" in out
    assert "\noptimizer\n" in out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shoal ")


# ---- what is imported, and when


def test_help_is_quick_and_light():
    code = ("import sys\nfrom shoal.cli import main\nassert main(['--help']) == main(['train', '--help']) == 0\n"
            "heavy = [m for m in ('jax', 'hydra', 'omegaconf', 'orbax', 'rich') if m in sys.modules]\n"
            "assert not heavy, heavy")
    started = time.perf_counter()
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - started < 2  # seconds


def test_a_mistaken_key_is_found_without_jax():
    done = python("import sys\nfrom shoal.cli import main\nassert main(['train', 'stpes=1']) == 2\n"
                  "assert 'jax' not in sys.modules")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("error: stpes")


def test_the_compilation_cache_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cli.use_compilation_cache()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "shoal" / "jax")
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0.5"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    cli.use_compilation_cache()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
    for name in CACHE_VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cli.use_compilation_cache()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "home" / ".cache" / "shoal" / "jax")
