"""Command lines of other systems, run: to the end on a tiny model, or to the line that says what is missing."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from test_compat import FOLDER, TOKEN, lines_of, words_of
from tiny_models import write_model_with_tokenizer
from tiny_runs import Workshop, checkpoints, groups, metrics

from shoal import cli
from shoal.commands import multirun

pytestmark = pytest.mark.compile_quickly

PLAIN = "model.template={{ messages[-1].content }}="


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    made = Workshop(tmp_path_factory.mktemp("compat"), num_hidden_layers=1, max_position_embeddings=2048)
    for name, count in (("train", 8), ("test", 4)):
        rows = [{"key": i, "prompt": f"Say {i} without commas.", "instruction_id_list": ["punctuation:no_comma"],
                 "kwargs": [{}]} for i in range(count)]
        (made.folder / f"ifeval_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")


def tiny(workshop: Workshop, line: str, name: str) -> list[str]:
    """A line's words with a tiny model and data in place of the large ones, and one short step."""
    words = [word for word in words_of(line) if not word.startswith("run_name=")]
    data = workshop.folder / "ifeval_train.jsonl" if "ifeval" in line else workshop.data
    return [*words, f"model.path={workshop.model}", "model.name=", "model.tokenizer=", f"task.path={data}", PLAIN,
            "task.split=train", "task.files=[]", *(["task.template={question}"] if "custom/" in line else []),
            f"reward={workshop.rewards}:letters", "reward.workers=0", f"base_output_directory={workshop.runs}",
            f"run_name={name}", "steps=1", "sampling.max_prompt_tokens=700", "sampling.max_completion_tokens=8",
            "sampling.slots_per_device=0", "train.pass_k=0", "task.num_eval_questions=2", "report.profile=[]",
            "model.dtype=float32", "batch.prompts_per_step=2", "batch.group_size=2", "batch.micro_tokens=512"]


@pytest.mark.parametrize(("stem", "number"), [("grpo_demo", 0), ("train_rl", 1), ("torchrl", 2)])
def test_a_line_for_one_device_runs_to_its_end(workshop, stem, number, capsys):
    line = lines_of(FOLDER / f"{stem}.sh")[number]
    name = f"{stem}{number}"
    unevaluated = ["train.evaluate_every=-1"] if stem == "train_rl" else []  # each task is evaluated once
    assert cli.main([*tiny(workshop, line, name), *unevaluated]) == 0
    out, err = capsys.readouterr()
    run = workshop.runs / name
    assert checkpoints(run) == [1] and len(metrics(run)) == 1 and len(groups(run, 1)) == 2
    assert (run / "summary.json").is_file()
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert TOKEN not in out + err and TOKEN.encode() not in written


def test_the_conversion_line_writes_a_checkpoint_that_is_read(workshop, tmp_path, capsys):
    model = write_model_with_tokenizer(tmp_path / "model", "llama3", "llama3")
    [line] = lines_of(FOLDER / "to_maxtext.sh")
    words = [*words_of(line), f"source={model}", "model_name=", f"base_output_directory={tmp_path}/out"]
    assert cli.main(words) == 0
    items = tmp_path / "out" / "0" / "items"
    back = [f"from={items}", f"to={tmp_path}/back", "format=huggingface", f"tokenizer={model}"]
    assert cli.main(["convert", *back]) == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", model))
    assert ours.keys() == theirs.keys()
    assert all(np.allclose(ours[name], theirs[name], rtol=1e-6, atol=0) for name in theirs)
    out, err = capsys.readouterr()
    assert TOKEN not in out + err


def test_a_sweep_over_their_names_ends_with_a_table(workshop, capsys, monkeypatch):
    monkeypatch.setattr(multirun, "run_process", lambda words: (cli.main(words), False))
    line = lines_of(FOLDER / "torchrl.sh")[4].replace("1e-4,1e-5", "1e-4")
    assert cli.main([*tiny(workshop, line, "sweep"), "steps=0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 runs, one after the other: 0 steps")
    table = [row.split() for row in out[out.index("== runs"):].splitlines()[1:4]]
    assert table[0][:3] == ["run", "policy.kl_coef", "state"]
    assert [row[:3] for row in table[1:]] == [["0", "0.01", "done"], ["1", "0.1", "done"]]
    configs = [yaml.safe_load((workshop.runs / "sweep" / str(n) / "config.yaml").read_text()) for n in (0, 1)]
    assert [config["algorithm"]["kl_coef"] for config in configs] == [0.01, 0.1]


@pytest.mark.parametrize(("stem", "number", "part"), [
    ("pathways", 0, "16 (trainer) + 16 (sampler) devices are requested, but JAX finds 3 devices"),
    ("torchrl", 0, "2 (trainer) + 2 (sampler) + 2 (reference) devices are requested, but JAX finds 3 devices"),
    ("torchrl", 1, "2 (trainer) + 2 (sampler) + 2 (reference) devices are requested, but JAX finds 3 devices"),
])
def test_a_line_for_more_says_what_is_missing(workshop, stem, number, part, capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: jax.local_devices()[:3])
    line = lines_of(FOLDER / f"{stem}.sh")[number]
    assert cli.main(tiny(workshop, line, "more")) == 2
    err = capsys.readouterr().err
    assert part in err and err.count("error: ") == 1 and not (workshop.runs / "more").exists()


