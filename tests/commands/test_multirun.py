"""Sweeps: which words are swept, the folder and record of each run, failures and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from shoal import cli
from shoal.commands import multirun
from shoal.config.key import get_value
from shoal.config.merge import compose
from shoal.config.train import Config
from shoal.records import ShoalError

SOURCES = Path(__file__).parents[2] / "src"


def combinations(*words: str) -> list[dict[str, str]]:
    return [values for values, _ in multirun.combine(Config, words)]


# ---- what is a sweep


@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("optimizer.lr=1e-4,1e-5", ["1e-4", "1e-5"]),
        ("--optimizer.lr=1e-4, 1e-5", ["1e-4", "1e-5"]),
        ("seed=range(1,4)", ["1", "2", "3"]),
        ("seed=range(3)", ["0", "1", "2"]),
        ("seed=range(6, 0, -3)", ["6", "3"]),
        ("report.groups=true,false", ["true", "false"]),
        ("model=Qwen/Qwen2.5-0.5B, ./llama", ["Qwen/Qwen2.5-0.5B", "./llama"]),
        ("reward=a.py:f,b.py:g", ["a.py:f", "b.py:g"]),
        ("reward=[a.py:f,b.py:g],[c.py:h]", ["[a.py:f,b.py:g]", "[c.py:h]"]),
        ("model.template='a,b',c", ["a,b", "c"]),
    ],
)
def test_values_between_commas_are_a_sweep(word, texts):
    found = combinations(word)
    assert [list(values.values()) for values in found] == [[text] for text in texts]
    # dotted keys, no short forms
    assert {"." in key or key == "seed" for values in found for key in values} == {True}


@pytest.mark.parametrize(
    ("word", "plain"),
    [
        ("steps=3", "steps=3"),
        ("sampling.stop=[a,b]", "sampling.stop=[a,b]"),
        ("sampling.stop=</answer>", "sampling.stop=</answer>"),
        ("run_name='a,b'", "run_name=a,b"),
        ("model.template={{ messages }}", "model.template={{ messages }}"),
        ("run_name=", "run_name="),
        ("--report.tensorboard", "--report.tensorboard"),
    ],
)
def test_a_value_that_is_no_sweep_is_unchanged(word, plain):
    assert list(multirun.combine(Config, [word])) == [({}, [plain])]


def test_combinations_are_every_one_in_order():
    assert combinations("seed=1,2", "steps=5,6", "optimizer.lr=1") == [
        {"seed": "1", "steps": "5"},
        {"seed": "1", "steps": "6"},
        {"seed": "2", "steps": "5"},
        {"seed": "2", "steps": "6"},
    ]
    assert next(multirun.combine(Config, ["gsm8k.yml", "--config-name=a,b", "seed=1,2"]))[1] == [
        "gsm8k.yml",
        "--config-name=a,b",
        "seed=1",
    ]


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["seed=1,2", "--steps=5", "run_name=a"],
            [["seed=1", "--steps=5", "run_name=a"], ["seed=2", "--steps=5", "run_name=a"]],
        ),
        (["--seed", "1,2", "--steps", "5"], [["seed=1", "--steps=5"], ["seed=2", "--steps=5"]]),
    ],
)
def test_each_word_keeps_its_place(words, lines):
    assert [line for _, line in multirun.combine(Config, words)] == lines


def test_a_sweeps_folder_is_under_the_base(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        multirun.root_of(compose("train", ["base_output_directory=~/x", "run_name=a"])[0])
        == tmp_path / "x" / "a"
    )
    assert multirun.root_of(compose("train", ["base_output_directory=~/x"])[0]).is_relative_to(
        tmp_path / "x"
    )
    with pytest.raises(ShoalError, match="expected a name under base_output_directory"):
        multirun.root_of(compose("train", ["run_name=../x"])[0])


@pytest.mark.parametrize(
    ("words", "keys", "values"),
    [
        (
            ["grpo_epsilon=0.1,0.2", "algorithm.clip_low=0.3"],
            ("algorithm.clip_low", "algorithm.clip_high"),
            [(0.3, 0.1), (0.3, 0.2)],
        ),
        (
            ["algorithm.clip_low=0.3", "grpo_epsilon=0.1,0.2"],
            ("algorithm.clip_low", "algorithm.clip_high"),
            [(0.1, 0.1), (0.2, 0.2)],
        ),
        (
            ["per_device_batch_size=1,2", "batch.prompts_per_step=8"],
            ("batch.prompts_per_device", "batch.prompts_per_step"),
            [(0, 8), (0, 8)],
        ),
        (
            ["batch.prompts_per_step=8", "per_device_batch_size=1,2"],
            ("batch.prompts_per_device",),
            [(1,), (2,)],
        ),
    ],
)
def test_of_two_names_for_one_key_the_later_counts_in_a_sweep_too(words, keys, values):
    found = []
    for _, line in multirun.combine(Config, words):
        found.append(compose("train", line)[0])
    assert [tuple(get_value(config, key) for key in keys) for config in found] == values


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["optimizer.lr=f(1,2)"], "optimizer.lr='f(1,2)': expected a finite number"),
        (["seed=range(0)"], "range(0): there is no number in this range"),
        (["seed=1,2", "seed=3,4"], "seed is given more than once, and swept"),
        (["steps=3", "steps=1,2"], "steps is given more than once, and swept"),
        (["steps=1,2", "--steps=3"], "steps is given more than once, and swept"),
        (["run_name=a,b"], "run_name=a,b: this key cannot be swept"),
        (["stpes=1,2"], "did you mean steps?"),
        (["steps=1,x"], "steps='x': expected a whole number"),
        (
            ["resume=last", "seed=1,2"],
            "resume=last: a sweep is resumed by giving the same run_name",
        ),
    ],
)
def test_a_mistake_ends_the_sweep_before_it_begins(words, part, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--multirun", *words]) == 2
    out, err = capsys.readouterr()
    assert part in err and err.count("\n") == 1 and out == "" and list(tmp_path.iterdir()) == []


def test_only_training_is_swept(capsys):
    assert cli.main(["eval", "-m", "seed=1,2"]) == 2
    assert "--multirun: only shoal train has it" in capsys.readouterr().err


# ---- where runs go


def test_the_folder_of_a_sweep():
    now = datetime(2026, 11, 21, 12, 5, 7)
    assert multirun.root_of(Config(), now) == Path("multirun/2026-11-21/12-05-07")
    assert multirun.root_of(Config(base_output_directory="b"), now) == Path("b/2026-11-21/12-05-07")
    assert multirun.root_of(Config(run_name="a"), now) == Path("outputs/a")
    assert multirun.root_of(Config(run_name="a", base_output_directory="b"), now) == Path("b/a")


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Command lines that were run, in place of processes; those with seed=13 fail."""
    monkeypatch.chdir(tmp_path)
    lines: list[list[str]] = []

    def stand_in(words):
        lines.append(words)
        if "seed=13" in words:
            return 3, False
        folder = Path(words[-2].partition("=")[2]) / words[-1].partition("=")[2]
        folder.mkdir(parents=True, exist_ok=True)
        summary = {"accuracy_before": 0.25, "accuracy_after": 0.5, "seconds_total": 7.4}
        (folder / "summary.json").write_text(json.dumps(summary))
        return (130, True) if "seed=99" in words else (0, False)

    monkeypatch.setattr(multirun, "run_process", stand_in)
    return lines


def test_runs_their_cost_their_table_and_their_record(ran, capsys):
    words = ["seed=1,13,2", "steps=5", "batch.group_size=4", "run_name=sweep"]
    assert cli.main(["train", "--multirun", *words]) == 1
    assert ran == [
        [
            "train",
            f"seed={seed}",
            "steps=5",
            "batch.group_size=4",
            "run_name=sweep",
            "base_output_directory=outputs/sweep",
            f"run_name={number}",
        ]
        for number, seed in enumerate((1, 13, 2))
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "3 runs, one after the other: 15 steps, 1,920 completions to train on"
    )
    head, *rows = [line.split() for line in lines[lines.index("== runs") + 1 : -1]]
    assert head == ["run", "seed", "state", "before", "after", "time", "folder"]
    assert rows == [
        ["0", "1", "done", "25.0%", "50.0%", "7.4", "s", "outputs/sweep/0"],
        ["1", "13", "failed", "(3)", "outputs/sweep/1"],
        ["2", "2", "done", "25.0%", "50.0%", "7.4", "s", "outputs/sweep/2"],
    ]
    record = json.loads(Path("outputs/sweep/multirun.json").read_text())
    assert (record["keys"], record["num_failed"], len(record["runs"])) == (["seed"], 1, 3)
    assert record["runs"][0] == {
        "number": 0,
        "values": {"seed": "1"},
        "folder": "outputs/sweep/0",
        "state": "done",
        "exit_code": 0,
        "accuracy_before": 0.25,
        "accuracy_after": 0.5,
        "seconds_total": 7.4,
    }


def test_the_same_command_resumes_and_another_sweep_is_refused(ran, capsys):
    assert cli.main(["train", "-m", "seed=1,2", "run_name=sweep"]) == 0
    assert cli.main(["train", "-m", "seed=1,2,3", "run_name=sweep"]) == 0
    assert len(ran) == 5
    capsys.readouterr()
    assert cli.main(["train", "-m", "seed=2,1", "run_name=sweep"]) == 2
    assert (
        "outputs/sweep holds another sweep: its run 0 is {'seed': '1'}" in capsys.readouterr().err
    )
    Path("outputs/sweep/multirun.json").write_text("{")
    assert cli.main(["train", "-m", "seed=1,2", "run_name=sweep"]) == 2
    Path("outputs/one").mkdir()
    Path("outputs/one/config.yaml").write_text("")
    assert cli.main(["train", "-m", "seed=1,2", "run_name=one"]) == 2
    assert "is the folder of a run, not of a sweep" in capsys.readouterr().err
    assert len(ran) == 5


def test_an_interrupt_stops_the_sweep_and_says_how_to_resume(ran, capsys):
    assert cli.main(["train", "-m", "seed=99,1", "base_output_directory=b"]) == 130
    out, err = capsys.readouterr()
    assert len(ran) == 1 and " interrupted " in out and " not run " in out
    [root] = Path("b").glob("*/*")
    record = json.loads((root / "multirun.json").read_text())
    assert (record["num_failed"], [run["state"] for run in record["runs"]]) == (
        0,
        ["interrupted", "not run"],
    )
    assert err == (
        f"interrupted; the same command with base_output_directory={root.parent} "
        f"run_name={root.name} "
        "resumes it\n"
    )
    place = [f"base_output_directory={root.parent}", f"run_name={root.name}"]
    assert cli.main(["train", "-m", "seed=99,1", *place]) == 130
    assert ran[0][-2:] == ran[1][-2:]


def test_a_dry_run_of_a_sweep_starts_nothing(ran, capsys):
    assert cli.main(["train", "-m", "--dry-run", "seed=1,2", "run_name=a"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "outputs/a/0: seed=1",
        "outputs/a/1: seed=2",
    ]
    assert ran == [] and list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["seed=1,2"], "6 steps, 48 completions to train on, and"),
        (
            ["seed=1,2", "per_device_batch_size=5"],
            "6 steps, 120 completions on each device to train on, and",
        ),
        (
            ["batch.prompts_per_device=0,5"],
            "6 steps, 24 completions (1 run) and 60 completions on each device (1 run) to train "
            "on, and",
        ),
    ],
)
def test_the_cost_by_the_unit_that_is_counted(words, part):
    words = ["steps=3", "batch.prompts_per_step=2", "batch.group_size=4", *words]
    configs = []
    for _, line in multirun.combine(Config, words):
        configs.append(compose("train", line)[0])
    assert multirun.cost_text(configs) == f"2 runs, one after the other: {part} their evaluations"


# ---- processes


@pytest.mark.slow
def test_a_process_is_a_shoal_of_its_own(capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    assert multirun.run_process(["train", "--dry-run", "seed=5"]) == (0, False)
    assert "seed: 5\n" in capfd.readouterr().out
    assert multirun.run_process(["train", "--dry-run", "seed=x"]) == (2, False)
    assert "seed='x'" in capfd.readouterr().err


@pytest.mark.system
def test_real_runs_and_resuming(workshop, capfd, monkeypatch):
    """The runs themselves, in this process: one that cannot be, and one that is skipped when it is
    finished."""

    def run_process(words):
        return (cli.main(words), False)

    monkeypatch.setattr(multirun, "run_process", run_process)
    words = workshop.words(
        "sweep", "steps=0", "train.pass_k=0", "reward.workers=0", "mesh.data=64,1"
    )
    assert cli.main([*words, "--multirun"]) == 1
    out, err = capfd.readouterr()
    assert "mesh.data=64" in err and err.count("error: ") == 1
    root = workshop.runs / "sweep"
    failed, done = json.loads((root / "multirun.json").read_text())["runs"]
    assert (failed["state"], failed["exit_code"]) == ("failed (2)", 2) and not (root / "0").exists()
    assert done["state"] == "done" and done["seconds_total"] > 0
    assert f"run 2 of 2: mesh.data=1 {root / '1'}" in out and "evaluation before training" in out
    assert cli.main([*words, "--multirun"]) == 1
    out = capfd.readouterr().out
    assert "evaluation before training" not in out
    assert json.loads((root / "multirun.json").read_text())["runs"][1] == done


@pytest.mark.system
def test_ctrl_c_reaches_the_run_and_is_waited_for(tmp_path):
    log = tmp_path / "log"
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f"#!/bin/sh\ntrap 'sleep 0.3; echo ended >> {log}; exit 0' INT\necho began >> {log}\n"
        "while true; do sleep 0.05; done\n"
    )
    stand_in.chmod(0o755)
    code = (
        f"import sys\nfrom shoal import cli\nsys.executable = {str(stand_in)!r}\n"
        "sys.exit(cli.main(['train', '-m', 'seed=1,2', 'run_name=a']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )
    try:
        until = time.monotonic() + 60
        while not log.exists() and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert log.read_text() == "began\nended\n"
    assert (
        err.endswith("base_output_directory=outputs run_name=a resumes it\n") and "== runs" in out
    )


def test_a_process_that_was_interrupted_stops_the_sweep(monkeypatch, tmp_path):
    stand_in = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(stand_in))
    for code, interrupted in ((0, False), (1, False), (130, True)):
        stand_in.write_text(f"#!/bin/sh\nexit {code}\n")
        stand_in.chmod(0o755)
        assert multirun.run_process(["train"]) == (code, interrupted)
    stand_in.write_text("#!/bin/sh\nkill -INT $$\n")
    assert multirun.run_process(["train"]) == (-signal.SIGINT, True)


def test_a_sweep_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / multirun.SUMMARY).write_text("[]")
    with pytest.raises(ShoalError, match=r"multirun\.json: expected a JSON object"):
        multirun.check_same_sweep(tmp_path, [])
