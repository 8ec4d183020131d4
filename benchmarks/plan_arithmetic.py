"""Do the figures of `shoal plan` agree with arithmetic by hand?

    python benchmarks/plan_arithmetic.py [JOB ...] [--cache FOLDER] [key=value ...]

Plans each job, reckons the same figures again from nothing but the model's sizes, the makers' rates and the job's
settings as they stand here, and prints both. Nothing of Shoal's own code is imported, so a mistake there is not made
twice. Ends with 1 where a figure is outside of its bounds. Needs compilers: `pip install '.[plan]'`.

    gathered   weights that a micro-batch gathers: each layer's in bfloat16, forward and backward; embedding and head
    scattered  its gradients, in float32, each once
    computed   tokens of a step that devices compute: those that there are, and at most a quarter of them padding
    floor      seconds that decoding takes at least: weights, whole prompts' keys and half of a completion's, each token
    rate       bytes a second at which the trainer's devices gather
    step       the longer of sampling and training where these overlap, else both
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PROMPT, COMPLETION, GROUP = 256, 512, 8
LENGTHS = (f"sampling.max_prompt_tokens={PROMPT} sampling.max_completion_tokens={COMPLETION} "
           f"batch.group_size={GROUP} layers=shallow")


@dataclass(frozen=True)
class Sizes:
    """A model by its config.json; embedding and head are not tied."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def layer(self) -> int:
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        return attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def keys(self) -> int:
        """Bytes of a token's keys and values, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


LLAMA_8B = Sizes(4096, 14336, 32, 32, 8, 128, 128256)


@dataclass(frozen=True)
class Job:
    """What is planned, and what the arithmetic needs of it."""

    words: str
    prompts: int
    trainers: int  # devices that train, all along `fsdp`, and
    samplers: int  # that sample, each with a copy of the weights
    memory_rate: float  # bytes a second of a device's memory
    gather_rate: float  # bytes a second that a device of the trainer receives from the others
    overlaps: bool = False


JOBS: Mapping[str, Job] = {
    # NVLink: 450 GB/s each way.
    "8b-h200-8": Job("topology=h200:8 model.name=llama3.1-8b mesh.fsdp=-1 mesh.sampler_tensor=1 "
                     "batch.prompts_per_step=32 batch.micro_tokens=16384", 32, 8, 8, 4.8e12, 450e9),
    # Half of a slice of 2 x 2 x 2 chips, which has no wrap-around: a square, a link of 100 GB/s along each side.
    "8b-v5p-16": Job("topology=v5p:2x2x2 model.name=llama3.1-8b mesh.trainer=4 mesh.sampler=4 mesh.fsdp=-1 "
                     "mesh.sampler_tensor=1 batch.prompts_per_step=16 batch.micro_tokens=4352 train.max_staleness=1",
                     16, 4, 4, 2.765e12, 200e9, overlaps=True),
}

Row = tuple[str, float, float, float, float]
"""A figure's name; the plan's; by hand; the least and the most of their ratio."""


def rows(job: Job, plan: Mapping[str, Any], a: Sizes = LLAMA_8B) -> Iterator[Row]:
    update, decode = plan["programs"]["accumulate"], plan["programs"]["decode"]
    moved: dict[str, float] = {}
    for row in update["collectives"]:
        if row["axis"] == "fsdp":
            moved[row["kind"]] = moved.get(row["kind"], 0.0) + row["bytes"]
    # Activations are gathered, too, and a compiler may keep a layer's weights from the forward pass.
    yield "gathered GB", moved["all-gather"] / 1e9, 2 * (2 * a.parameters) / 1e9, 0.5, 1.3
    scattered = moved.get("reduce-scatter", 0.0) + moved.get("all-reduce", 0.0)
    yield "scattered GB", scattered / 1e9, 4 * a.parameters / 1e9, 0.5, 1.3

    runs = {name: one["runs"] for name, one in plan["job"]["programs"].items()}
    tokens = job.prompts * (PROMPT + GROUP * COMPLETION)
    yield "computed tokens", runs["accumulate"] * plan["job"]["shape"]["tokens"], tokens, 1.0, 1.25

    groups = job.prompts / job.samplers
    keys = a.keys * groups * (PROMPT + GROUP * COMPLETION / 2)
    weights = 2 * (a.parameters - a.vocabulary * a.hidden)  # of the embedding, single rows
    floor = (COMPLETION - 1) * (weights + keys) / job.memory_rate
    yield "decode floor s", runs["decode"] * decode["floor_seconds"], floor, 0.97, 1.1

    gathers = [row for row in update["collectives"] if row["kind"] == "all-gather" and row["axis"] == "fsdp"]
    received = sum(row["bytes"] for row in gathers) * (job.trainers - 1) / job.trainers
    yield "gather GB/s", received / sum(row["seconds"] for row in gathers) / 1e9, job.gather_rate / 1e9, 0.999, 1.001

    phases = {name: one["hidden"] for name, one in plan["seconds"]["phases"].items()}
    sampling = phases.pop("sampling")
    both = max(sampling, sum(phases.values())) if job.overlaps else sampling + sum(phases.values())
    yield "step s", plan["seconds"]["step"]["hidden"], both, 0.999, 1.001


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache")
    args, words = parser.parse_known_args()
    names, added = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    if unknown := set(names) - JOBS.keys():
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(JOBS)}")
    print("| job | figure | plan | by hand | ratio | |\n| --- | --- | --- | --- | --- | --- |")
    good = True
    with tempfile.TemporaryDirectory() as own:
        for name in names or JOBS:
            done = subprocess.run(
                [sys.executable, "-m", "shoal", "plan", *JOBS[name].words.split(), *LENGTHS.split(), *added,
                 "json=true"],
                capture_output=True, text=True, check=False,
                env={**os.environ, "JAX_COMPILATION_CACHE_DIR": args.cache or own})
            if not done.stdout.startswith("{"):
                raise SystemExit(f"{name}: {done.stderr.strip()[-1000:]}")
            for figure, found, expected, least, most in rows(JOBS[name], json.loads(done.stdout)):
                ratio = found / expected
                fine = least <= ratio <= most
                good &= fine
                print(f"| {name} | {figure} | {found:,.2f} | {expected:,.2f} | {ratio:.3f} | "
                      f"{'' if fine else f'expected {least} to {most}'} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
