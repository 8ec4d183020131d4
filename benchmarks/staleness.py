"""What the age of samples does to learning: accuracy on `words` by mode and lag, paired by seed
with that of lag 0.

    python benchmarks/staleness.py [--seeds 0 1 2 3 4] [--modes fixed-0 fixed-1 ...] [--steps 80]
                                   [--folder FOLDER]

Each run is `shoal train` with its own process; greedy accuracy on the 500 held-out questions.
`newest` asks for as many steps ahead as the lag allows, so that samples are as old as they can be.
`slow`: the sampler does so little for each version that a completion lives through several of them.
The controls have no correction, and four updates for each step: eight versions of lag are then
thirty-two updates. A run that has ended is read, not run again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

from scipy.stats import t as student

from shoal.runs.lines import read_lines

OWN_DEVICES = ("mesh.trainer=1", "mesh.sampler=1", "train.versions=newest")
CONTROL = ("train.max_staleness=8", "algorithm.num_minibatches=4")
STEPS_A_VERSION, CHUNK = 2, 4
MODES = {
    "fixed-0": (),
    "fixed-1": ("train.max_staleness=1",),
    "fixed-4": ("train.max_staleness=4",),
    "newest-1": (*OWN_DEVICES, "train.max_staleness=1"),
    "newest-4": (*OWN_DEVICES, "train.max_staleness=4"),
    "newest-4-slow": (*OWN_DEVICES, "train.max_staleness=4", "sampling.slots_per_device=1280"),
    "control-corrected": CONTROL,
    "control": (*CONTROL, "algorithm.correction=none"),
}


def run(mode: str, seed: int, steps: int, folder: Path) -> dict[str, float]:
    """A run's accuracy in percent; the mean age of its tokens in versions, and the share of samples
    that is left after weighting by the ratio of trainer to sampler."""
    place = folder / f"{mode}-seed{seed}"
    if (found := last_accuracy(place, steps)) is None:
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2" * (
            mode[:6] == "newest"
        )
        if mode[:6] == "newest":
            program = [__file__, "--slow" if mode[-4:] == "slow" else "--pinned"]
        else:
            program = ["-m", "shoal.cli", "train"]
        command = [
            sys.executable,
            *program,
            *MODES[mode],
            f"seed={seed}",
            f"steps={steps}",
            "train.pass_k=0",
            "optimizer.lr=5e-5",
            "train.evaluate_every=0",
            f"run_name={place.name}",
            f"base_output_directory={folder}",
        ]
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "XLA_FLAGS": flags.strip()},
        )
        found = last_accuracy(place, steps)
        assert found is not None, place
    metrics = read_lines(place / "metrics.jsonl")
    return {
        "accuracy": found,
        "age": mean(one["staleness"] for one in metrics),
        "ess": mean(one["sampler_gap/ess"] for one in metrics),
    }


def train_pinned(words: Sequence[str]) -> None:
    """`shoal train` that asks for as many steps ahead as the lag allows, from the start on."""
    from shoal import cli
    from shoal.trainer.loop import Run
    from simulation import pinned

    begin = Run.begin

    def begin_pinned(self: Run) -> Any:
        pinned(self.lookahead)
        return begin(self)

    Run.begin = begin_pinned
    sys.exit(cli.main(["train", *words]))


def train_slowly(words: Sequence[str]) -> None:
    """`shoal train` with a sampler that stands still after STEPS_A_VERSION compiled steps of CHUNK
    tokens, until the next version is published or the trainer waits for its groups."""
    from shoal.sampler import programs

    programs.DECODE_CHUNK = CHUNK
    from shoal.rollout.fleet import Fleet
    from shoal.rollout.host import EngineHost

    poll, take, publish, changed = EngineHost.poll, Fleet.take, Fleet.publish, threading.Condition()
    # compiled steps of the version; calls that wait for groups
    now = SimpleNamespace(steps=0, taking=0)

    def slow_poll(self: EngineHost) -> dict[int, list[Any]]:
        with changed:
            changed.wait_for(lambda: now.steps < STEPS_A_VERSION or now.taking > 0)
        answers = poll(self)
        now.steps += not self.idle
        return answers

    def noted_take(self: Fleet, *args: Any) -> list[Any]:
        with changed:
            now.taking += 1
            changed.notify_all()
        groups = take(self, *args)
        now.taking -= 1
        return groups

    def noted_publish(self: Fleet, *args: Any, **kwargs: Any) -> None:
        publish(self, *args, **kwargs)
        with changed:
            now.steps = 0
            changed.notify_all()

    EngineHost.poll, Fleet.take, Fleet.publish = slow_poll, noted_take, noted_publish
    train_pinned(words)


def last_accuracy(place: Path, steps: int) -> float | None:
    return next(
        (
            100 * one["accuracy"]
            for one in read_lines(place / "evaluations.jsonl")
            if (one["step"], one["name"]) == (steps, "held_out")
        ),
        None,
    )


def interval(differences: list[float]) -> str:
    """Mean and half width of the 95% interval of Student's t, over seeds; in points."""
    if len(differences) < 2:
        return f"{mean(differences):+.1f}"
    half = student.ppf(0.975, len(differences) - 1) * stdev(differences) / len(differences) ** 0.5
    return f"{mean(differences):+.1f} ± {half:.1f}"


def main() -> None:
    if sys.argv[1:2] == ["--slow"]:
        train_slowly(sys.argv[2:])
    if sys.argv[1:2] == ["--pinned"]:
        train_pinned(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--folder", type=Path, default=Path("outputs/staleness"))
    options = parser.parse_args()
    print(
        f"{options.steps} steps, {len(options.seeds)} seeds; greedy accuracy in percent on 500 "
        "held-out questions"
    )
    print(
        f"{'':18} {'accuracy':>8} {'by seed':^{5 * len(options.seeds)}} "
        f"{'less that of fixed-0':>21} {'age':>5} "
        f"{'share left':>10}"
    )
    first: list[float] = []
    for mode in options.modes:
        runs = [run(mode, seed, options.steps, options.folder.absolute()) for seed in options.seeds]
        accuracies = [one["accuracy"] for one in runs]
        first = first or accuracies
        by_seed = " ".join(f"{one:4.1f}" for one in accuracies)
        difference = interval([one - other for one, other in zip(accuracies, first, strict=True)])
        print(
            f"{mode:18} {mean(accuracies):8.1f} {by_seed} "
            f"{difference if accuracies is not first else '':>21} "
            f"{mean(one['age'] for one in runs):5.2f} {mean(one['ess'] for one in runs):10.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
