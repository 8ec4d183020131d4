"""docs/limits.md: a command that asks for something missing is refused by one line, before weights
are read; what no command can ask for is listed here with the reason."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tiny_models import FAMILIES

from shoal import cli
from shoal.weights.hub import locate

LIMITS = (Path(__file__).parents[1] / "docs" / "limits.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ")[0].removeprefix("| ") for line in LIMITS.splitlines() if " | " in line]
ROWS = [row for row in ROWS if row not in ("not supported", "---")]

REFUSED = {
    "DoRA and other": ("--use_peft true --use_dora true", "an adapter is plain LoRA"),
    "quantised weights in full": ("model.quantise=int8", "weights that are trained are float32"),
    "float16 on a TPU": (
        "plan topology=v5p-8 model.name=qwen3-4b model.dtype=float16",
        "a TPU has no products of float16",
    ),
    "DPO": ("algorithm=dpo", "there is no such algorithm"),
    "a teacher's whole distributions": (
        "teacher.address=http://127.0.0.1:1 teacher.divergence=full",
        "sampled or topk with teacher.address",
    ),
    "the teacher's own samples": (
        "--teacher_model_name_or_path tiny --lmbda 0.5",
        "lmbda=0.5: expected 1, all samples are the policy's",
    ),
    "a moving average": (
        "teacher.hint={{answer}} teacher.weights=ema",
        "expected one of base, live",
    ),
    "another optimizer": ("--optim adafactor", "AdamW is the optimizer"),
    "masters or gradients": ("optimizer.offload=masters", "expected true or false"),
    "training on a part": ("model.frozen_layers=3", "model.frozen_layers: there is no such key"),
    "families that": ("model={model}", "phi3"),
    "weights stored quantised": ("model={packed}", "gptq"),
    "images and sound": ("task=custom task.path={images} reward={reward}:f", "images"),
    "`.bin` checkpoints": ("model={bin}", "Pickled weights are never read"),
    "SGLang or another": ("sampler.kind=sglang", "expected one of local, ray, vllm"),
    "penalties for repetition": ("--repetition_penalty 1.1", "sampling has no penalty"),
    "pipeline parallelism": ("ici_pipeline_parallelism=2", "devices share the work by mesh.data"),
    "evaluation on other": ("eval task=hellaswag", "there is no such task"),
}
"""The beginning of a row -> (a command, of `train` if it names none, and a part of its error)."""

NO_COMMAND = {
    "a sampler's caches": "needs more devices than heads; tests/mesh has the errors of meshes",
    "experts in 4 bits": "they are read, and widened",
    "kernels of attention": "a matter of speed alone",
    "weights to vLLM": "no key chooses the way of the weights",
    "trainer and sampler": "needs several hosts; tests/mesh has the error",
    "a trainer in Ray": "no key puts a trainer there",
    "a number of devices": "happens to a run; tests/job has the error of a resumed one",
    "storage that cannot": "needs such a storage; tests/runs/test_buckets.py has the error",
    "pushing checkpoints": "TRL's push_to_hub is accepted, with a line that nothing is pushed",
    "a package on PyPI": "nothing to ask for",
    "users and passwords": "no key asks for them",
}
"""The beginning of a row that no command on one device can ask for -> why."""


def row_of(row: str) -> str | None:
    """Returns the beginning under which the tables above have a row of the page."""
    for beginning in (*REFUSED, *NO_COMMAND):
        if row.startswith(beginning):
            return beginning
    return None


@pytest.mark.parametrize("row", ROWS)
def test_each_row_of_the_page_is_refused_or_cannot_be_asked_for(row: str):
    assert row_of(row)


@pytest.mark.parametrize("beginning", [*REFUSED, *NO_COMMAND])
def test_what_is_refused_here_stands_on_the_page(beginning: str):
    assert any(row.startswith(beginning) for row in ROWS)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Name in braces -> a folder or file that asks for something missing."""
    llama = FAMILIES["llama3"]
    configs = {
        "model": {**llama, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
        "packed": {**llama, "quantization_config": {"quant_method": "gptq"}},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    without_weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(locate("tiny", weights=False), tmp_path / "bin", ignore=without_weights)
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "reward.py").write_text("def f(completions, **kwargs):\n    return [0.0]\n")
    row = {"prompt": "What is this?", "images": ["a.png"]}
    (tmp_path / "images.jsonl").write_text(json.dumps(row))
    places = {name: tmp_path / name for name in (*configs, "bin")}
    return {**places, "images": tmp_path / "images.jsonl", "reward": tmp_path / "reward.py"}


NEEDS_COMPILERS = "float16 on a TPU"
"""Needs the extra `plan`, which the fast tier's environment lacks."""


@pytest.mark.parametrize(
    "beginning",
    [
        *(beginning for beginning in REFUSED if beginning != NEEDS_COMPILERS),
        pytest.param(NEEDS_COMPILERS, marks=pytest.mark.slow),
    ],
)
def test_what_is_missing_is_one_line(beginning: str, places, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command, sentence = REFUSED[beginning]
    words = command.format(**places).split()
    if words[0] not in ("plan", "eval"):
        words = ["train", *words, "--dry-run"]
    assert cli.main(words) == cli.USAGE_EXIT_CODE
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and re.search(re.escape(sentence), errors[0]), lines
