"""Does each algorithm learn, and how much does each one clip? Every preset of `algorithm=`, three
seeds.

    python benchmarks/algorithms.py [--seeds 0 1 2] [--steps 20] [--names grpo gspo cispo]
                                    [--minibatches 4]

`shoal train algorithm=NAME` on word problems, with several updates a step, so that clipping acts.
Greedy accuracy on held-out problems (250); clip fraction and entropy are means over steps.
`distill`: no rewards, the teacher is the first algorithm's last checkpoint of the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from shoal.runs.lines import read_lines

DISTILL = "distill"


def one(
    name: str, seed: int, folder: str, teacher: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One run, in this process: its figures."""
    import shoal

    changes: dict[str, Any] = {"algorithm__name": name}
    if name == DISTILL:
        changes = {"algorithm__advantage": "none", "teacher__path": teacher}
    shoal.train(
        seed=seed,
        steps=options.steps,
        base_output_directory=folder,
        run_name=f"{name}-{seed}",
        train__pass_k=0,
        task__num_eval_questions=options.questions,
        algorithm__num_minibatches=options.minibatches,
        **changes,
    )
    run = Path(folder, f"{name}-{seed}")
    summary = json.loads((run / "summary.json").read_text())
    rows = read_lines(run / "metrics.jsonl")

    def average(metric: str) -> float:
        return mean(row.get(metric, 0.0) for row in rows)

    return {
        "before": 100 * summary["accuracy_before"],
        "after": 100 * summary["accuracy_after"],
        "clip": average("clip/fraction"),
        "low": average("clip/low"),
        "high": average("clip/high"),
        "entropy": average("entropy"),
        "reward": rows[-1]["reward/mean"],
        "seconds": summary["seconds_total"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--questions", type=int, default=250)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--names", nargs="+", default=[])
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, seed, folder, teacher = options.one
        print("\n" + json.dumps(one(name, int(seed), folder, teacher, options)))
        return
    names = options.names or [*all_names(), DISTILL]
    print(
        f"{options.steps} steps of {options.minibatches} updates; greedy accuracy in percent on "
        f"{options.questions} held-out problems, means of seeds {options.seeds}; {os.cpu_count()} "
        "CPU cores"
    )
    print(
        f"{'algorithm':>22} {'before':>7} {'after':>7} {'change':>7} {'(each)':>20} {'clip %':>8} "
        f"{'low %':>8} {'high %':>8} {'entropy':>8} {'seconds':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found = []
            for seed in options.seeds:
                teacher = str(Path(folder, f"{names[0]}-{seed}"))
                command = [sys.executable, __file__, "--one", name, str(seed), folder, teacher]
                for key in ("steps", "minibatches", "questions"):
                    command += [f"--{key}", str(getattr(options, key))]
                out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                found.append(json.loads(out.splitlines()[-1]))
            show(name, found)


def all_names() -> list[str]:
    """The presets, `grpo` first."""
    from shoal.config.preset_files import PRESETS

    names = sorted(file.stem for file in (PRESETS / "algorithm").glob("*.yaml"))
    return sorted(names, key=lambda name: name != "grpo")


def show(name: str, found: list[dict[str, Any]]) -> None:
    m = {key: mean(row[key] for row in found) for key in found[0]}
    each = " ".join(f"{row['after'] - row['before']:+.1f}" for row in found)
    print(
        f"{name:>22} {m['before']:7.1f} {m['after']:7.1f} {m['after'] - m['before']:+7.1f} "
        f"{each:>20} {100 * m['clip']:8.3f} {100 * m['low']:8.3f} {100 * m['high']:8.3f} "
        f"{m['entropy']:8.3f} {m['seconds']:8.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
