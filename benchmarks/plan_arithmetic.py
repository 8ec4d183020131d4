"""Do the figures of `shoal plan` agree with arithmetic by hand?

    python benchmarks/plan_arithmetic.py [JOB ...] [--cache FOLDER] [key=value ...]
    python benchmarks/plan_arithmetic.py --traced [JOB ...]

Plans each job, reckons the same figures again from nothing but the model's sizes, the makers' rates and the job's
settings as they stand here, and prints both. The arithmetic imports nothing of Shoal's own code, so a mistake there is
not made twice. Ends with 1 where a figure is outside of its bounds. Needs compilers: `pip install '.[plan]'`.

    gathered   weights that a micro-batch gathers: each layer's in bfloat16, forward and backward; embedding and head
    scattered  its gradients, in float32, each once
    computed   tokens of a step that devices compute: those that there are, and at most a quarter of them padding
    floor      seconds that decoding takes at least: weights, whole prompts' keys and half of a completion's, each token
    rate       bytes a second at which the trainer's devices gather
    step       the longer of sampling and training where these overlap, else both

`--traced` compares what is known of ten other jobs before anything is compiled, each within 1%: what a device holds,
the decode floor, and the operations of a micro-batch outside of attention's kernels (of a layer forward, backward and
forward again without the last product, which no gradient needs; of the head both forward passes whole).
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
    is_tied: bool = False  # the embedding is the head
    bias: bool = False  # of q, k and v

    @property
    def layer(self) -> int:
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        bias = self.bias * (self.heads + 2 * self.kv_heads) * self.head_dim
        return attention + bias + 3 * self.hidden * self.feed_forward + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + (2 - self.is_tied) * self.vocabulary * self.hidden + self.hidden

    @property
    def read(self) -> int:
        """Parameters that a sampled token reads: of an embedding that is no head, single rows."""
        return self.parameters - (not self.is_tied) * self.vocabulary * self.hidden

    @property
    def operations(self) -> int:
        """Of an update's products for a token, all layers recomputed."""
        width, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 2 * self.hidden * (width + narrow) + 3 * self.hidden * self.feed_forward
        recomputed = self.layers * (8 * layer - 2 * self.hidden * self.feed_forward)
        return recomputed + 8 * self.vocabulary * self.hidden

    @property
    def keys(self) -> int:
        """Bytes of a token's keys and values, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


LLAMA_8B = Sizes(4096, 14336, 32, 32, 8, 128, 128256)
LLAMA_70B = Sizes(8192, 28672, 80, 64, 8, 128, 128256)
QWEN_1_5B = Sizes(1536, 8960, 28, 12, 2, 128, 151936, is_tied=True, bias=True)


@dataclass(frozen=True)
class Job:
    """What is planned, and what the arithmetic needs of it."""

    words: str
    prompts: int
    trainers: int  # devices that train, all along `fsdp`, and
    samplers: int  # that sample, each with a copy of the weights
    memory_rate: float  # bytes a second of a device's memory
    gather_rate: float  # bytes a second that a device of the trainer receives from the others
    latency: float  # seconds of a transfer before its bytes, as the plan assumes them
    overlaps: bool = False


JOBS: Mapping[str, Job] = {
    # NVLink: 450 GB/s each way.
    "8b-h200-8": Job("topology=h200:8 model.name=llama3.1-8b mesh.fsdp=-1 mesh.sampler_tensor=1 "
                     "batch.prompts_per_step=32 batch.micro_tokens=16384", 32, 8, 8, 4.8e12, 450e9, 1e-5),
    # Half of a slice of 2 x 2 x 2 chips, which has no wrap-around: a square, a link of 100 GB/s along each side.
    "8b-v5p-16": Job("topology=v5p:2x2x2 model.name=llama3.1-8b mesh.trainer=4 mesh.sampler=4 mesh.fsdp=-1 "
                     "mesh.sampler_tensor=1 batch.prompts_per_step=16 batch.micro_tokens=4352 train.max_staleness=1",
                     16, 4, 4, 2.765e12, 200e9, 2e-6, overlaps=True),
}

TRACED: Mapping[str, tuple[str, Sizes, int, int, int, int, float]] = {
    # Words of the plan, sizes, prompts, devices that train, replicas that sample, devices of each, memory's rate.
    "1.5b-h200": ("h200:1 qwen2.5-1.5b", QWEN_1_5B, 32, 1, 1, 1, 4.8e12),
    "1.5b-h100-8": ("h100:8 qwen2.5-1.5b", QWEN_1_5B, 64, 8, 8, 1, 3.35e12),
    "1.5b-v5e-8": ("v5e-8 qwen2.5-1.5b", QWEN_1_5B, 32, 8, 8, 1, 0.819e12),
    "8b-h200-8": ("h200:8 llama3.1-8b", LLAMA_8B, 32, 8, 8, 1, 4.8e12),
    "8b-h100-8": ("h100:8 llama3.1-8b", LLAMA_8B, 16, 8, 4, 2, 3.35e12),
    "8b-v6e-8": ("v6e-8 llama3.1-8b", LLAMA_8B, 32, 8, 4, 2, 1.638e12),
    "8b-v5p-16": ("v5p-16 llama3.1-8b", LLAMA_8B, 32, 8, 8, 1, 2.765e12),
    "8b-v6e-16": ("v6e-16 llama3.1-8b", LLAMA_8B, 64, 16, 2, 8, 1.638e12),
    "70b-v5p-64": ("v5p-64 llama3.1-70b", LLAMA_70B, 32, 32, 8, 4, 2.765e12),
    "70b-h200-32": ("h200:4x8 llama3.1-70b", LLAMA_70B, 32, 32, 4, 8, 4.8e12),
}

_ASK = """
import json, os, sys
from shoal.config.loading import compose
from shoal.mesh.topology import ENVIRONMENT
os.environ.update(ENVIRONMENT)
from shoal.run.plan.analysis import traced_costs
from shoal.run.plan.job import planned_job
config, _ = compose("plan", sys.argv[1:])
with planned_job(config, config.topology) as job:
    programs, figures, traced = job.programs(), job.describe(), {}
    for name in ("decode", "accumulate"):
        one = programs[name]
        traced[name] = one.runs, *traced_costs(job, one, one.program.trace(*one.args, **one.kwargs))
    print(json.dumps([figures.estimated.needed("accumulate"), figures.estimated.needed("decode"), traced]))
"""

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
    floor = (COMPLETION - 1) * (2 * a.read + keys) / job.memory_rate
    yield "decode floor s", runs["decode"] * decode["floor_seconds"], floor, 0.99, 1.01

    gathers = [row for row in update["collectives"] if row["kind"] == "all-gather" and row["axis"] == "fsdp"]
    received = sum(row["bytes"] for row in gathers) * (job.trainers - 1) / job.trainers
    seconds = sum(row["seconds"] - row["times"] * job.latency for row in gathers)
    yield "gather GB/s", received / seconds / 1e9, job.gather_rate / 1e9, 0.999, 1.001

    phases = {name: one["hidden"] for name, one in plan["seconds"]["phases"].items()}
    sampling = phases.pop("sampling")
    both = max(sampling, sum(phases.values())) if job.overlaps else sampling + sum(phases.values())
    yield "step s", plan["seconds"]["step"]["hidden"], both, 0.999, 1.001


def traced_rows(name: str) -> Iterator[Row]:
    """What a device holds, the decode floor and the operations of one of TRACED."""
    words, a, prompts, trainers, replicas, tensor, memory_rate = TRACED[name]
    topology, model = words.split()
    asked = subprocess.run(
        [sys.executable, "-c", _ASK, f"topology={topology}", f"model.name={model}", "mesh.fsdp=-1", "model.remat=full",
         f"mesh.sampler_tensor={tensor}", f"batch.prompts_per_step={prompts}", "batch.micro_tokens=4352",
         *(word for word in LENGTHS.split() if "layers" not in word)], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise SystemExit(f"{name}: {asked.stderr.strip()[-1000:]}")
    update, sampling, traced = json.loads(asked.stdout.splitlines()[-1])
    # On average over the devices that share a key/value head.
    keys = a.keys * prompts / replicas / tensor
    found = {"parameters": (update["parameters"], 4 * a.parameters / trainers),
             "moments": (update["Adam's moments"], 8 * a.parameters / trainers),
             "gradient": (update["gradient"], 4 * a.parameters / trainers),
             "sampler's copy": (sampling["the sampler's copy"], 2 * a.parameters / tensor),
             # Those of evaluation are larger: a prompt for each completion.
             "caches": (sampling["KV caches (evaluation)"], keys * GROUP * (PROMPT + COMPLETION))}
    for kind, (size, expected) in found.items():
        yield f"{kind} GB", size / 1e9, expected / 1e9, 0.99, 1.01
    runs, *_, seconds = traced["decode"]
    live = 2 * a.read / tensor + keys * (PROMPT + GROUP * COMPLETION / 2)
    floor = (COMPLETION - 1) * live / memory_rate
    yield "decode floor s", runs * seconds, floor, 0.99, 1.01
    _, operations, in_kernels, _ = traced["accumulate"]
    yield "TFLOP", (operations - in_kernels) / 1e12, 4352 * a.operations / 1e12, 0.99, 1.01


def compared(name: str, found_rows: Iterator[Row]) -> bool:
    """Prints the rows of a job; True if all are within their bounds."""
    good = True
    for figure, found, expected, least, most in found_rows:
        fine = least <= found / expected <= most
        good &= fine
        print(f"| {name} | {figure} | {found:,.2f} | {expected:,.2f} | {found / expected:.3f} | "
              f"{'' if fine else f'expected {least} to {most}'} |", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache")
    parser.add_argument("--traced", action="store_true")
    args, words = parser.parse_known_args()
    names, added = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    jobs = TRACED if args.traced else JOBS
    if unknown := set(names) - jobs.keys():
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(jobs)}")
    print("| job | figure | plan | by hand | ratio | |\n| --- | --- | --- | --- | --- | --- |")
    good = True
    if args.traced:
        for name in names or TRACED:
            good &= compared(name, traced_rows(name))
        return 0 if good else 1
    with tempfile.TemporaryDirectory() as own:
        for name in names or JOBS:
            done = subprocess.run(
                [sys.executable, "-m", "shoal", "plan", *JOBS[name].words.split(), *LENGTHS.split(), *added,
                 "json=true"],
                capture_output=True, text=True, check=False,
                env={**os.environ, "JAX_COMPILATION_CACHE_DIR": args.cache or own})
            if not done.stdout.startswith("{"):
                raise SystemExit(f"{name}: {done.stderr.strip()[-1000:]}")
            good &= compared(name, rows(JOBS[name], json.loads(done.stdout)))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
