"""The examples run as they stand, with less to do; the notebook in a real kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from tiny_runs import Workshop

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "first_run.ipynb"
ONE_GPU = EXAMPLES / "gsm8k_one_gpu.ipynb"
SCRIPT = EXAMPLES / "own_task.py"

pytestmark = pytest.mark.system


def smaller(source: str) -> str:
    """Few rows, prompts and tokens, as many in the notebook as in the script: what the first
    compiles the second finds."""
    source, of_rows = re.subn(r"for i in range\(\d+\)\]", "for i in range(8)]", source)
    source, of_steps = re.subn(r'(prompts_per_step\\?"): \d+', r"\1: 4", source)
    source, of_tokens = re.subn(r'(micro_tokens\\?"): \d+', r"\1: 512", source)
    assert (of_rows, of_steps, of_tokens) == (2, 1, 1)
    return source


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No user's settings."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("MPLBACKEND", raising=False)


def test_the_script_is_short_and_runs(environment, tmp_path):
    source = SCRIPT.read_text()
    assert len(source.splitlines()) < 60
    (tmp_path / SCRIPT.name).write_text(smaller(source))
    done = subprocess.run(
        [sys.executable, SCRIPT.name, "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert "step 1/1 " in done.stdout and done.stdout.splitlines()[-1].startswith("near enough: ")


def outputs(cell: Any, kind: str) -> list[Any]:
    """Of a cell's outputs those that hold `kind`: a MIME type, or `text` for what was printed."""
    if kind == "text":
        result = []
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                result.append("".join(output["text"]))
        return result
    result = []
    for output in cell["outputs"]:
        if kind in output.get("data", {}):
            result.append(output["data"][kind])
    return result


def run_notebook(notebook, folder: Path) -> None:
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()


def test_the_notebook_runs_in_a_kernel(environment, tmp_path):
    notebook = nbformat.reads(smaller(NOTEBOOK.read_text()), as_version=4)
    assert len(notebook.cells) < 20
    assert not any(
        cell["outputs"] or cell["execution_count"]
        for cell in notebook.cells
        if cell.cell_type == "code"
    )
    first, last = notebook.cells[1], notebook.cells[-1]
    for cell, old, new in ((first, "STEPS = 12", "STEPS = 2"), (last, "STEPS + 4", "STEPS + 1")):
        assert old in cell.source
        cell.source = cell.source.replace(old, new)
    run_notebook(notebook, tmp_path)
    by_text = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            by_text[cell.source.split("\n")[0]] = cell
    train = by_text["with live_curve() as curve:"]
    *_, table = outputs(train, "text/plain")
    assert "held_out accuracy" in table
    assert len(outputs(train, "image/png")) == 1, "one curve, drawn again in its place"
    printed = "".join(outputs(train, "text"))
    assert "== evaluation after step 2" in printed and "step 2/2" in printed
    groups = by_text["def show(result, step):"]
    [metrics] = outputs(groups, "text/plain")
    assert "reward/mean" in metrics and "Table of 2 rows" in metrics
    [group] = outputs(groups, "text")
    assert group.count("advantage") == 8 and "How many coins" in group
    again = by_text["def nearness_within(scale):"]
    assert (
        len(outputs(again, "image/png")) == 1
        and "".join(outputs(again, "text")).count("advantage ") == 8
    )
    [compared] = (cell for first_line, cell in by_text.items() if first_line.startswith("figure, "))
    assert len(outputs(compared, "image/png")) == 1
    assert "".join(outputs(notebook.cells[-1], "text")).endswith("3 steps\n")
    assert len(list((tmp_path / "outputs").glob("20*/*/summary.json"))) == 2, (
        "the last cell went on in its folder"
    )


def test_the_notebook_for_one_gpu_runs_on_a_cpu_with_a_tiny_model(
    environment, tmp_path, monkeypatch
):
    """No GPU and no published model was there: the cells run as they stand, with a random model of
    one layer, made-up rows, fewer and shorter completions."""
    workshop = Workshop(tmp_path, num_hidden_layers=1)
    notebook = nbformat.reads(ONE_GPU.read_text(), as_version=4)
    assert len(notebook.cells) < 20
    text = "".join(cell.source for cell in notebook.cells)
    assert "**Nobody has run it on a GPU yet.**" in text
    changes = {
        '"Qwen/Qwen2.5-0.5B-Instruct"': repr(str(workshop.model)),
        'DATA = ""': f"DATA = {str(workshop.data)!r}",
        "STEPS = 60": "STEPS = 1",
        '"bfloat16"': '"float32"',
        '"sampling.max_completion_tokens": 384': '"sampling.max_completion_tokens": 12',
        '"batch.prompts_per_step": 16': '"batch.prompts_per_step": 2',
        '"batch.group_size": 8': '"batch.group_size": 4',
        '"model.lora.rank": 32': '"model.lora.rank": 4',
    }
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            for old, new in list(changes.items()):
                if old in cell.source:
                    cell.source = cell.source.replace(old, new)
                    del changes[old]
    assert not changes
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    run_notebook(notebook, tmp_path)
    printed = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            printed[cell.source.split("\n")[0]] = "".join(outputs(cell, "text"))
    assert "GPU: none" in printed["import shutil"]
    doctor, train, export = (
        next(said for first, said in printed.items() if first.startswith(word))
        for word in ("words = ", "result = ", "!shoal export")
    )
    # Of a random model some findings are wrong.
    assert "agreement: " in doctor and "LoRA of rank 4" in train
    assert "step 1/1" in train and "exported" in export
    assert printed["def show(step):"].count("--- reward") == 8
    assert (tmp_path / "exported" / "adapter_model.safetensors").is_file()
