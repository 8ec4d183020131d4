"""How much do sampling and training at once gain, by simulation and with the real fleet and loop
over sleeping parts?

    python benchmarks/overlap.py [--cases targets|all|none] [--table] [--real] [--steps 30]
                                 [--token-ms 10] [--seed 0]

A step learns from P x G completions. One place samples one of them at a time, a token each
`--token-ms`. Lengths are constant, or lognormal with a given sigma. An update takes a share of the
synchronous sampling time: what a step's completions take when nothing else is sampled, in the mean.
Nothing else takes time in the simulation.

    fixed k     step t samples from version t - k; a host samples all of a version before it loads
                the next
    newest k    step t is asked for k steps ahead, starts on the newest weights, and goes on
                through new ones
    auto k      the same, asked for 1 to k steps ahead, as few as keep the trainer from waiting

`--table` prints the simulation alone. Each case of `--cases` is simulated, and run with
`rollout/fleet.py`, `rollout/host.py` and `trainer/loop.py` as they are over engines and updates
that sleep (benchmarks/fakes.py), with the same lengths; `run/sim` is the run's seconds a step over
those predicted. The first steps, in which the pipeline fills, and the last are left out of all
figures.

`--real` is the default command with nothing that sleeps, on eight simulated devices of this CPU:
four of the trainer's and four of the sampler's. They share its cores, so that it shows idle shares
and not what real devices would gain.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fakes import run_case
from shoal.runs.lines import read_lines
from simulation import Case, Figures, figures, sampling_seconds, simulate

MODES = [
    ("fixed", 0),
    ("fixed", 1),
    ("fixed", 2),
    ("fixed", 4),
    ("newest", 1),
    ("newest", 2),
    ("newest", 4),
    ("auto", 4),
]


def modes(case: Case, wanted: Iterable[tuple[str, int]] = MODES) -> list[Case]:
    return [replace(case, mode=mode, k=k) for mode, k in wanted]


LONG = Case(sigma=1, most=16, update=0.6)
TABLE = [
    Case(),
    LONG,
    replace(LONG, update=0.2),
    replace(LONG, update=1.0),
    replace(LONG, most=4),
    replace(LONG, most=0),
    replace(LONG, sigma=0.5),
    replace(LONG, sigma=1.5),
    replace(LONG, prompts=64),
    replace(LONG, places=16),
    replace(LONG, places=32),
    replace(LONG, hosts=4, capacity=64),
]
"""What the simulation alone says something of; the default has as many places as a step has
completions."""
ENDLESS = replace(LONG, most=0)
TARGETS = [
    *modes(Case(), [("fixed", 0), ("fixed", 1)]),
    *modes(LONG, [("fixed", 0), ("fixed", 1), ("newest", 1), ("newest", 2)]),
    *modes(ENDLESS, [("fixed", 0), ("newest", 1), ("newest", 2)]),
]
MORE = [
    *modes(LONG, [("fixed", 0), ("fixed", 2), ("newest", 4), ("auto", 4)]),
    *modes(replace(LONG, places=16), [("fixed", 0), ("fixed", 1), ("newest", 1), ("newest", 2)]),
    *modes(replace(LONG, hosts=4, capacity=64), [("fixed", 0), ("fixed", 1), ("newest", 2)]),
]
HEAD = "mode       speed  idle: trainer  sampler  staleness: mean  max"


def line(name: str, one: Figures, slowest: float) -> str:
    return (
        f"{name:<9} {slowest / one.seconds:5.2f}x {one.idle_trainer:13.0%} {one.idle_sampler:8.0%} "
        f"{one.staleness:16.2f} {one.staleness_max:4}"
    )


def print_table(steps: int, seed: int, token_seconds: float) -> None:
    """The simulation alone, over many steps."""
    for case in TABLE:
        print(f"\n{case}, P {case.prompts}\n{HEAD}")
        lengths, slowest = case.lengths(steps, seed), 0.0
        for one in modes(case):
            found = simulate(one, lengths, token_seconds)
            slowest = slowest or found.seconds
            print(line(f"{one.mode} {one.k}", found, slowest), flush=True)


def print_capacities(steps: int, seed: int, token_seconds: float) -> None:
    """How much a host must have at once where the sampler is the bottleneck: a group counts until
    its longest ends."""
    print(
        "\nidle places, newest 2, update 0.2: completions that a host has at once, over its "
        "places\n"
        "longest  hosts  places of each      1x      2x      4x      8x"
    )
    for most, hosts, places in itertools.product((4, 16), (1, 4), (4, 8, 16)):
        case = replace(LONG, mode="newest", k=2, most=most, update=0.2, hosts=hosts, places=places)
        lengths = case.lengths(steps, seed)
        idle = []
        for times in (1, 2, 4, 8):
            idle.append(
                simulate(
                    replace(case, capacity=times * places), lengths, token_seconds
                ).idle_sampler
            )
        print(
            f"{most:7} {hosts:6} {places:15} " + "".join(f"{share:8.0%}" for share in idle),
            flush=True,
        )


def print_runs(cases: Sequence[Case], steps: int, seed: int, token_seconds: float) -> None:
    """Simulation and run of each case, one below the other; `speed` is over that of the first with
    the same work."""
    slowest: dict[str, tuple[float, float]] = {}
    ratios = []
    for case in cases:
        lengths = case.lengths(steps, seed)
        seconds = case.update * sampling_seconds(case, lengths, token_seconds)
        simulated = simulate(case, lengths, token_seconds)
        ran = figures(run_case(case, lengths, seconds, token_seconds), case)
        if str(case) not in slowest:
            print(
                f"\n{case}: sampling {seconds / case.update:.2f} s, update {seconds:.2f} s\n      "
                f"{HEAD}  ms of CPU"
            )
        base = slowest.setdefault(str(case), (simulated.seconds, ran.seconds))
        ratios.append(ran.seconds / simulated.seconds)
        print("sim  ", line(f"{case.mode} {case.k}", simulated, base[0]))
        print(
            "run  ",
            line(f"{case.mode} {case.k}", ran, base[1]),
            f" {1e3 * ran.cpu_seconds:9.0f}  run/sim {ratios[-1]:.3f}",
            flush=True,
        )
    if ratios:
        print(
            f"\nrun/sim: {min(ratios):.3f} to {max(ratios):.3f}, mean {statistics.mean(ratios):.3f}"
        )


def print_real(steps: int, seed: int) -> None:
    """Real models on simulated devices; of each run the mean over the steps after the first
    fifth."""
    print(
        f"\n4 + 4 simulated devices, {os.cpu_count()} cores, {steps} steps\n"
        "mode      idle: trainer  sampler  staleness: mean  seconds a step"
    )
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    for mode, k in (("fixed", 0), ("fixed", 1), ("newest", 2)):
        with tempfile.TemporaryDirectory() as folder:
            words = [
                "mesh.trainer=4",
                "mesh.sampler=4",
                "mesh.data=4",
                f"train.max_staleness={k}",
                f"train.versions={mode}",
                "train.evaluate_every=-1",
                f"seed={seed}",
                f"steps={steps}",
                f"base_output_directory={folder}",
                "run_name=real",
            ]
            subprocess.run(
                [sys.executable, "-m", "shoal.cli", "train", *words],
                env=environment,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            rows = read_lines(Path(folder) / "real/metrics.jsonl")
        trainer, sampler, age, seconds = (
            statistics.mean(row[name] for row in rows[steps // 5 :])
            for name in ("idle/trainer", "idle/sampler", "staleness", "time/step_seconds")
        )
        print(f"{mode:<7}{k}{trainer:14.0%}{sampler:9.0%}{age:17.2f}{seconds:16.2f}", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", choices=("targets", "all", "none"), default="targets")
    parser.add_argument("--table", action="store_true", help="the simulation alone, over 200 steps")
    parser.add_argument("--real", action="store_true", help="real models on simulated devices")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--token-ms", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    started = time.monotonic()
    if options.table:
        print_table(200, options.seed, options.token_ms / 1e3)
        print_capacities(100, options.seed, options.token_ms / 1e3)
    if options.real:
        print_real(options.steps, options.seed)
    cases = {"targets": TARGETS, "all": TARGETS + MORE, "none": []}[options.cases]
    print_runs(cases, options.steps, options.seed, options.token_ms / 1e3)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
