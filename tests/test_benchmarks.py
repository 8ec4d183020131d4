"""The benchmarks that nobody can run here do run: on models of no size, in this process."""

from __future__ import annotations

import contextlib
import io
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.compile_quickly


@pytest.fixture
def benchmark(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import accelerator

    def run(command: list[str], stdout: Any = None, **_: Any) -> SimpleNamespace:
        """Its parts in this process."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text) if stdout == subprocess.PIPE else contextlib.nullcontext():
            accelerator.main(command[2:])
        return SimpleNamespace(stdout=text.getvalue(), returncode=0)

    monkeypatch.setattr(accelerator.subprocess, "run", run)
    return accelerator


def test_the_accelerator_benchmark_measures_every_part(benchmark, capsys):
    benchmark.main(["--tiny"])
    lines = capsys.readouterr().out.splitlines()
    assert "GB/s" in lines[0] and "TFLOP/s, as measured" in lines[0]
    for what in ("prefill, 1 prompts of 16", "decode, 4 places", "decode, 16 places", "update, 128 tokens",
                 "whole step, 4 x 4 x 8"):
        [line] = [line for line in lines if what in line]
        assert line.startswith(" tiny  shoal") and line.endswith("%")
    for peer in ("vllm", "trl"):
        assert any(peer in line and "not installed" in line for line in lines)


def test_what_the_time_does_not_hold_is_skipped(benchmark, capsys):
    benchmark.main(["--tiny", "--minutes", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:] for line in lines if "skipped" in line] == [
        [part, "skipped:", "0", "minutes", "are", "over"] for part in ("decode", "update", "step")]


def test_a_size_beyond_the_memory_is_a_line(benchmark):
    def large() -> Any:
        yield "prefill", "1 ms", "1%"
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    assert list(benchmark.guarded("decode, 1024 places", large()))[1][1] == "does not fit the memory"
    with pytest.raises(ValueError, match="another"):
        list(benchmark.guarded("decode", (int("another") for _ in range(1))))
