"""Does a long run stay as it began? Memory in use and the seconds of each of 300 steps of the
packaged model.

    python benchmarks/long_run.py [--steps 300] [key=value ...]

A run of `shoal train` in a process of its own; this one reads its resident memory whenever
metrics.jsonl grows. It prints memory once all is compiled and at the end, the steps after the first
ten that took over three medians, and those that compiled a program. The exit status is 1 where such
a step is, or where memory grew by more than 3%.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shoal.runs.lines import read_lines

SETTINGS = [
    "batch.prompts_per_step=8",
    "batch.group_size=4",
    "train.evaluate_every=-1",
    "checkpoint.every=50",
]
SETTLED, LATE = 50, 10


def resident_bytes(process: int) -> int:
    # The pages themselves: the counter in statm is tens of MiB off in a process of many threads.
    return (
        int(Path(f"/proc/{process}/smaps_rollup").read_text().partition("Rss:")[2].split()[0])
        * 1024
    )


def watch(process: subprocess.Popen, metrics: Path) -> dict[int, int]:
    """Step -> resident bytes when it was recorded."""
    found: dict[int, int] = {}
    while process.poll() is None:
        if metrics.is_file() and (step := metrics.read_bytes().count(b"\n")) not in found:
            found[step] = resident_bytes(process.pid)
        time.sleep(0.02)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "shoal",
            "train",
            f"steps={options.steps}",
            "run_name=long",
            f"base_output_directory={folder}",
            *SETTINGS,
            *options.settings,
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        memory = watch(process, Path(folder) / "long/metrics.jsonl")
        if process.returncode:
            return process.returncode
        steps = read_lines(Path(folder) / "long/metrics.jsonl")
    seconds = {step["step"]: step["time/step_seconds"] for step in steps}
    median = statistics.median(seconds.values())
    slow = {step: took for step, took in seconds.items() if step > LATE and took > 3 * median}
    compiled = []
    for a, b in itertools.pairwise(steps):
        if b["compilations"] > a["compilations"]:
            compiled.append(b["step"])
    # A program takes memory once, when it is compiled: growth is counted from the last one on.
    begins = min(
        (step for step in memory if step >= max(SETTLED, *compiled, 0) + 5), default=max(memory)
    )
    growth = memory[max(memory)] / memory[begins] - 1
    print(
        f"steps {len(steps)}, median {median:.3f} s, longest after {LATE}: "
        f"{max(took for step, took in seconds.items() if step > LATE) / median:.1f} medians"
    )
    print(
        "steps over 3 medians: "
        + (", ".join(f"{step} ({took:.2f} s)" for step, took in slow.items()) or "none")
    )
    print("steps that compiled: " + (", ".join(map(str, compiled)) or "none after the first"))
    print(
        f"resident memory: {memory[begins] / 2**20:.0f} MiB after {begins} steps, "
        f"{memory[max(memory)] / 2**20:.0f} MiB at the end ({100 * growth:+.1f}%)"
    )
    return int(bool(slow) or growth > 0.03)


if __name__ == "__main__":
    sys.exit(main())
