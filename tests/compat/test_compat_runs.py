"""Command lines of other systems, run: to the end on tiny stand-ins, or to the line that says what
is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import stand_ins
import yaml
from lines import LINES, TOKEN, among, run, words_of
from safetensors.numpy import load_file
from tiny_runs import checkpoints, groups, metrics

from shoal import cli
from shoal.commands import multirun

SHORT = (
    "steps=1",
    "sampling.max_prompt_tokens=700",
    "sampling.max_completion_tokens=8",
    "task.num_eval_questions=2",
    "train.pass_k=0",
    "report.profile=[]",
    "model.dtype=float32",
    "batch.prompts_per_step=2",
    "batch.group_size=2",
    "batch.micro_tokens=512",
    "reward.workers=0",
)
"""What makes a line's job short: one step, of few and short completions."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return stand_ins.build(tmp_path_factory.mktemp("world"))


def short(name: str, world: Path, run_name: str) -> list[str]:
    words = []
    for word in words_of(LINES[name], world):
        if not word.startswith("run_name="):
            words.append(word)
    return [*words, *SHORT, f"base_output_directory={world / 'runs'}", f"run_name={run_name}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("06-grpo-demo-8b", ("train.evaluate_every=-1",)),
        ("14-train-rl-gspo", ("train.evaluate_every=-1",)),
        ("18-grpo-ifeval", ()),
        ("verl-rloo", ("train.evaluate_every=-1", "report.wandb.mode=off")),
    ],
)
def test_a_line_runs_to_its_end(world, name, more):
    with among(world, LINES[name].devices):
        code, out, err = run([*short(name, world, name), *more])
    assert code == 0, err
    folder = world / "runs" / name
    assert checkpoints(folder) == [1] and len(metrics(folder)) == 1 and len(groups(folder, 1)) == 2
    assert (folder / "summary.json").is_file()
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert TOKEN not in out + err and TOKEN.encode() not in written


@pytest.mark.slow
def test_conversion_lines_lead_there_and_back(world):
    there, back = (
        words_of(LINES[name], world) for name in ("11-to-maxtext-8b", "maxtext-to-huggingface")
    )
    items, folder = world / "out" / "first" / "0" / "items", world / "back"
    with among(world, 1):
        assert run(there)[0] == 0
        assert run([*back, f"from={items}", f"base_output_directory={folder}"])[0] == 0
    ours, theirs = (
        load_file(place / "model.safetensors") for place in (folder, world / "models" / "llama3")
    )
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert np.allclose(ours[name], theirs[name], rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_sweep_over_their_names_ends_with_a_table(world, monkeypatch):
    def run_process(words):
        return (cli.main(words), False)

    monkeypatch.setattr(multirun, "run_process", run_process)
    words = []
    for word in short("23-grpo-sweep-of-two", world, "sweep"):
        words.append(word.replace("1e-4,1e-5", "1e-4"))
    with among(world, 1):
        code, out, err = run([*words, "steps=0"])
    assert code == 0, err
    assert out.startswith("2 runs, one after the other: 0 steps")
    table = []
    for row in out[out.index("== runs") :].splitlines()[1:4]:
        table.append(row.split())
    assert table[0][:3] == ["run", "policy.kl_coef", "state"]
    assert [row[:3] for row in table[1:]] == [["0", "0.01", "done"], ["1", "0.1", "done"]]
    configs = []
    for n in (0, 1):
        configs.append(
            yaml.safe_load((world / "runs" / "sweep" / str(n) / "config.yaml").read_text())
        )
    assert [config["algorithm"]["kl_coef"] for config in configs] == [0.01, 0.1]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (
            "07-grpo-demo-70b",
            "16 (trainer) + 16 (sampler) devices are requested, but JAX finds 3 devices",
        ),
        (
            "15-grpo-counts",
            "2 (trainer) + 2 (sampler) + 2 (reference) devices are requested, but JAX finds 3 "
            "devices",
        ),
        ("16-grpo-lists", "there is no device 5; JAX finds 3 devices"),
    ],
)
def test_a_line_for_more_devices_says_what_is_missing(world, name, part):
    with among(world, 3):
        for more in ([], ["--dry-run"]):
            code, _, err = run([*short(name, world, "more"), *more])
            assert code == 2 and part in err and err.count("error: ") == 1
    assert not (world / "runs" / "more").exists()
