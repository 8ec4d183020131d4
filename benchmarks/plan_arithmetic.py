"""Do the figures of `shoal plan` agree with arithmetic by hand?

    python benchmarks/plan_arithmetic.py [JOB ...] [--cache FOLDER]
    python benchmarks/plan_arithmetic.py --traced [JOB ...]

Plans ten jobs, reckons the same figures again from nothing but the model's sizes, the makers' rates
and the job's settings as they stand here, and prints both. The arithmetic imports nothing of
Shoal's own code, so a mistake there is not made twice. Ends with 1 where a figure is outside of its
bounds. Needs compilers: `pip install '.[plan]'`.

`--traced` compares what is known before anything is compiled, each within 1%: what a device holds,
the decode floor and the operations of a micro-batch outside of attention's kernels (of a layer
forward, backward and forward again without the last product, which no gradient needs; of the head
both forward passes whole). Without it the programs are compiled, and compared is

    gathered   weights that a micro-batch gathers: each layer's in bfloat16, forward and backward;
               the head
    scattered  its gradients, in float32, each once
    exchanged  the embedding's columns against rows, forward and backward
    decoding   what a token moves within a replica: a sum after attention, after each feed-forward
               part and of the embedding; the sums of the vocabulary's blocks, and the block that
               is drawn from
    published  all weights once, in bfloat16, and a device's own part
    seconds    of each phase: the longest of an operation's products at the peak rate, its bytes at
               the memory's and its launch; training's kernels at their share of the peak,
               decoding's at the memory's rate, in whole blocks; transfers at the links' rate, each
               after its latency
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

PROMPT, COMPLETION, GROUP, TOKENS = 256, 512, 8, 4352
SETTINGS = (
    f"mesh.fsdp=-1 model.remat=full batch.micro_tokens={TOKENS} batch.group_size={GROUP} "
    f"sampling.max_prompt_tokens={PROMPT} sampling.max_completion_tokens={COMPLETION}"
).split()


@dataclass(frozen=True)
class Sizes:
    """A model by its config.json."""

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
    def matrices(self) -> list[tuple[int, int]]:
        """Of a layer: q, k, v, o, gate, up, down, [in, out] each."""
        h = self.hidden
        f = self.feed_forward
        q = self.heads * self.head_dim
        k = self.kv_heads * self.head_dim
        return [(h, q), (h, k), (h, k), (q, h), (h, f), (h, f), (f, h)]

    @property
    def weights(self) -> int:
        """Of a layer's matrices."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def layer(self) -> int:
        bias = self.bias * (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.weights + bias + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return (
            self.layers * self.layer
            + (2 - self.is_tied) * self.vocabulary * self.hidden
            + self.hidden
        )

    @property
    def read(self) -> int:
        """Parameters that a sampled token reads: of an embedding that is no head, single rows."""
        return self.parameters - (not self.is_tied) * self.vocabulary * self.hidden

    @property
    def operations(self) -> int:
        """Of an update's products for a token, all layers recomputed."""
        recomputed = self.layers * (8 * self.weights - 2 * self.hidden * self.feed_forward)
        return recomputed + 8 * self.vocabulary * self.hidden

    @property
    def keys(self) -> int:
        """Bytes of a token's keys and values, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


LLAMA_8B = Sizes(4096, 14336, 32, 32, 8, 128, 128256)
LLAMA_70B = Sizes(8192, 28672, 80, 64, 8, 128, 128256)
QWEN_1_5B = Sizes(1536, 8960, 28, 12, 2, 128, 151936, is_tied=True, bias=True)


@dataclass(frozen=True)
class Device:
    """A maker's figures, and what a plan assumes beside them."""

    peak: float  # operations a second in bfloat16
    memory: float  # bytes a second
    kernels: float  # share of the peak that attention's kernels reach
    block: int  # keys that these read at a time
    page: int  # and decoding's
    logits: int  # that are in memory at once
    launch: float = 0.0  # seconds


H100, H200 = (Device(989e12, memory, 0.35, 64, 64, 2**28, 3e-6) for memory in (3.35e12, 4.8e12))
V5E, V5P, V6E = (
    Device(peak, memory, 0.5, 256, 128, 5 * 2**25)
    for peak, memory in ((197e12, 0.819e12), (459e12, 2.765e12), (918e12, 1.638e12))
)

Link = tuple[float, float]
"""(bytes a second that a device receives, seconds before the first)"""


@dataclass(frozen=True)
class Job:
    words: str
    sizes: Sizes
    prompts: int
    trainers: int  # devices, which all sample too,
    tensor: int  # so many a replica
    device: Device
    all: Link = (1.0, 0.0)  # between all devices,
    inside: Link = (1.0, 0.0)  # those of a replica,
    between: Link = (1.0, 0.0)  # and one of each replica

    @property
    def replicas(self) -> int:
        return self.trainers // self.tensor

    @property
    def rows(self) -> int:
        """Completions of a replica."""
        return self.prompts * GROUP // self.replicas


# NVLink 450 GB/s each way, NCCL 10 us; a machine's eight networks of 50 GB/s, 30 us. A TPU's links:
# as many as its slice has dimensions, without a way round, and 1 us for each chip on the longest
# way. Of 4x4 chips a replica of eight is no rectangle: two ways, five chips.
NVLINK, V6E_8, V5P_16, V5P_64 = (450e9, 1e-5), (200e9, 4e-6), (300e9, 3e-6), (300e9, 7e-6)
JOBS: Mapping[str, Job] = {
    "1.5b-h200": Job("h200:1 qwen2.5-1.5b", QWEN_1_5B, 32, 1, 1, H200),
    "1.5b-h100-8": Job("h100:8 qwen2.5-1.5b", QWEN_1_5B, 64, 8, 1, H100, NVLINK, between=NVLINK),
    "1.5b-v5e-8": Job(
        "v5e-8 qwen2.5-1.5b", QWEN_1_5B, 32, 8, 1, V5E, (100e9, 4e-6), between=(100e9, 4e-6)
    ),
    "8b-h200-8": Job("h200:8 llama3.1-8b", LLAMA_8B, 32, 8, 1, H200, NVLINK, between=NVLINK),
    "8b-h100-8": Job("h100:8 llama3.1-8b", LLAMA_8B, 16, 8, 2, H100, NVLINK, NVLINK, NVLINK),
    "8b-v6e-8": Job("v6e-8 llama3.1-8b", LLAMA_8B, 32, 8, 2, V6E, V6E_8, (100e9, 1e-6), V6E_8),
    "8b-v5p-16": Job("v5p-16 llama3.1-8b", LLAMA_8B, 32, 8, 1, V5P, V5P_16, between=V5P_16),
    "8b-v6e-16": Job(
        "v6e-16 llama3.1-8b", LLAMA_8B, 64, 16, 8, V6E, (200e9, 6e-6), (200e9, 5e-6), (200e9, 2e-6)
    ),
    "70b-v5p-64": Job(
        "v5p-64 llama3.1-70b", LLAMA_70B, 32, 32, 4, V5P, V5P_64, (200e9, 2e-6), (200e9, 4e-6)
    ),
    "70b-h200-32": Job(
        "h200:4x8 llama3.1-70b", LLAMA_70B, 32, 32, 8, H200, (400e9, 3e-5), NVLINK, (50e9, 3e-5)
    ),
}

_ASK = """
import json, os, sys
from shoal.config.merge import compose
from shoal.mesh.topology import ENVIRONMENT
os.environ.update(ENVIRONMENT)
from shoal.plan.analysis import traced_costs
from shoal.plan.job import planned_job
config, _ = compose("plan", sys.argv[1:])
with planned_job(config, config.topology) as job:
    programs, budget, traced = job.programs(), job.budget().estimated(), {}
    for name in ("decode", "accumulate"):
        one = programs[name]
        traced[name] = one.runs, *traced_costs(job, one, one.program.trace(*one.args, **one.kwargs))
    estimates = [budget.needed("accumulate"), budget.needed("decode")]
    print(json.dumps([*estimates, traced]))
"""

Row = tuple[str, float, float, float, float]
"""A figure's name; the plan's; by hand; the least and the most of their ratio."""


# ---- before anything is compiled


def traced_rows(name: str) -> Iterator[Row]:
    """What a device holds, the decode floor and the operations of a job."""
    job = JOBS[name]
    a = job.sizes
    asked = subprocess.run(
        [sys.executable, "-c", _ASK, *words(job)], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise SystemExit(f"{name}: {asked.stderr.strip()[-1000:]}")
    update, sampling, traced = json.loads(asked.stdout.splitlines()[-1])
    # On average over the devices that share a key/value head.
    keys = a.keys * job.prompts / job.trainers
    found = {
        "parameters": (update["parameters"], 4 * a.parameters / job.trainers),
        "moments": (update["Adam's moments"], 8 * a.parameters / job.trainers),
        "gradient": (update["gradient"], 4 * a.parameters / job.trainers),
        "sampler's copy": (sampling["the sampler's copy"], 2 * a.parameters / job.tensor),
        # Those of evaluation are larger: a prompt for each completion.
        "caches": (sampling["KV caches (evaluation)"], keys * GROUP * (PROMPT + COMPLETION)),
    }
    for kind, (size, expected) in found.items():
        yield f"{kind} GB", size / 1e9, expected / 1e9, 0.99, 1.01
    runs, *_, seconds = traced["decode"]
    live = 2 * a.read / job.tensor + keys * (PROMPT + GROUP * COMPLETION / 2)
    floor = (COMPLETION - 1) * live / job.device.memory
    yield "decode floor s", runs * seconds, floor, 0.99, 1.01
    _, operations, in_kernels, _ = traced["accumulate"]
    yield "TFLOP", (operations - in_kernels) / 1e12, TOKENS * a.operations / 1e12, 0.99, 1.01


def words(job: Job) -> list[str]:
    topology, model = job.words.split()
    return [
        f"topology={topology}",
        f"model.name={model}",
        f"mesh.sampler_tensor={job.tensor}",
        f"batch.prompts_per_step={job.prompts}",
        *SETTINGS,
    ]


# ---- what moves


def moved(job: Job) -> dict[str, float]:
    """Bytes of whole arrays: of a micro-batch, a token of decoding, a publication."""
    a, head = job.sizes, job.sizes.vocabulary * job.sizes.hidden
    found = {}
    if job.trainers > 1:
        # Looked up by columns: where it is no head, the embedding moves in no other way. A TPU
        # gathers slices of the head, forward and again in the backward pass.
        again = 1 if job.device.launch else 2
        found |= {
            "gathered": 2 * (2 * a.layers * a.weights + again * head),
            "scattered": 4 * (a.layers * a.weights + head),
            "exchanged": 2 * 2 * TOKENS * a.hidden,
            # A device's part first changes places within a replica, from one dimension of a matrix
            # to the other.
            "published": 2 * a.parameters * (1 / job.tensor + (job.tensor > 1) / job.trainers),
        }
    if job.tensor > 1:
        blocks = job.tensor * -(-a.vocabulary // (job.tensor * BLOCK))
        found["decoding"] = job.rows * (2 * a.hidden * (2 * a.layers + 1) + 4 * (blocks + BLOCK))
    return found


BLOCK = 512
"""Of the vocabulary, in which a token is drawn."""


def sent(link: Link, size: float, devices: int, times: float = 1.0, both: bool = False) -> float:
    """Seconds of so many transfers of `size` bytes in all; `both`: sums, which are scattered and
    then gathered."""
    return (1 + both) * (size * (devices - 1) / devices / link[0] + times * link[1])


# ---- seconds


def operation(d: Device, flops: float, size: float) -> float:
    return max(flops / d.peak, size / d.memory, d.launch)


def update_seconds(job: Job) -> tuple[float, float]:
    """(computation, transfers) of a micro-batch."""
    a, d, t, n = job.sizes, job.device, TOKENS, job.trainers
    h, f, q, k = a.hidden, a.feed_forward, a.heads * a.head_dim, a.kv_heads * a.head_dim
    forward = [operation(d, 2 * t * i * o, 2 * (t * i + i * o + t * o)) for i, o in a.matrices]
    backward = [operation(d, 2 * t * i * o, 2 * t * (i + o) + 4 * i * o) for i, o in a.matrices]
    # forward, again without the last, both gradients
    products = 3 * sum(forward) - forward[-1] + sum(backward)
    # Each reads and writes: two norms, rope, two sums, silu; then their gradients, and the sums of
    # those of one input.
    once = [4 * h, 4 * h, 4 * (q + k), 6 * h, 6 * h, 6 * f]
    gradients = [12 * f, 8 * h, 8 * h, 4 * (q + k), 8 * h, 6 * h]
    values = sum(operation(d, 0, t * size) for size in (*once, *once, *gradients))
    # Of each matrix: to bfloat16, forward and backward; its gradient added to the sum.
    own = sum(
        2 * operation(d, 0, 6 * i * o / n) + operation(d, 0, 12 * i * o / n) for i, o in a.matrices
    )
    mean = (PROMPT * PROMPT / 2 + GROUP * COMPLETION * (PROMPT + COMPLETION / 2)) / TOKENS
    # Two products forward, again, and seven backward, as dq and dk with dv compute the scores and
    # their gradient each.
    kernels = 22 * t * q * (mean + d.block / 2) / (d.kernels * d.peak)
    # The head in parts of the logits: twice forward, both gradients; of logits the largest, the
    # sum, the entropy, and the first two again, each read; their gradient read and written; the
    # head's gradient added for each part.
    parts = -(-t * a.vocabulary // d.logits)
    logits, whole, each = 4 * t * a.vocabulary / parts, h * a.vocabulary, t / parts
    head = parts * (
        2 * operation(d, 2 * each * whole, 2 * whole + logits)
        + 2 * operation(d, 2 * each * whole, 4 * whole + logits / 2)
        + 5 * operation(d, 0, logits)
        + operation(d, 0, 1.5 * logits)
        + operation(d, 0, 12 * whole)
    )
    compute = a.layers * (products + values + own + kernels + SMALL["update"] * d.launch) + head
    if n == 1:
        return compute, 0.0
    size = moved(job)
    # A matrix at a time gathered, a layer at a time scattered.
    return compute, (
        sent(job.all, size["gathered"], n, 14 * a.layers + 1)
        + sent(job.all, size["scattered"], n, a.layers + 1)
        + sent(job.all, size["exchanged"], n, 2)
    )


def decode_seconds(job: Job) -> tuple[float, float]:
    """(computation, transfers) of a token of all rows, at half of a completion."""
    a, d, r, n = job.sizes, job.device, job.rows, job.tensor
    (_, q), (_, k), *_ = matrices = a.matrices
    if d.launch and n == 1:  # q, k and v by one product
        matrices = [(a.hidden, q + 2 * k), *matrices[3:]]
    products = sum(operation(d, 2 * r * i * o / n, 2 * i * o / n) for i, o in matrices)
    # By a kernel, which reads whole blocks: a completion's last is half beyond its end, on average.
    keys, own = a.keys / a.layers * r / n, (COMPLETION + d.page) / 2
    attention = operation(d, 0, keys * (PROMPT / GROUP + own))
    head = operation(d, 0, 2 * a.hidden * a.vocabulary / n) + 4 * operation(
        d, 0, 4 * r * a.vocabulary / n
    )
    head += SMALL["token"] * d.launch
    compute = a.layers * (products + attention + SMALL["decoding"] * d.launch) + head
    if n == 1:
        return compute, 0.0
    sums = 2 * r * a.hidden * (2 * a.layers + 1)
    return compute, (
        sent(job.inside, sums, n, 2 * a.layers + 5, both=True)  # four of them of single numbers
        + sent(job.inside, moved(job)["decoding"] - sums, n)
    )


SMALL = {"update": 40, "decoding": 3, "token": 25}
"""Operations besides, of a layer and of a sampled token, which read next to nothing: counted in the
programs."""


def step_seconds(job: Job) -> dict[str, tuple[float, float]]:
    """Phase -> (computation, transfers) of a step."""
    a, d, n = job.sizes, job.device, job.trainers
    micro, update = job.prompts / n, update_seconds(job)
    # gradient, parameter and moments, read and written; the norm
    applied = 32 * a.parameters / n / d.memory
    prompts = job.prompts / job.replicas
    prefill = 2 * prompts * PROMPT * (a.layers * a.weights) / job.tensor / d.peak
    token = decode_seconds(job)
    own, copy = 2 * a.parameters / n, 2 * a.parameters / job.tensor * (n > 1)
    # Read in float32, written, of several devices read to be summed; what changes places or is
    # gathered is copied.
    laid_out = (3 + (n > 1) + 2 * (job.tensor > 1)) * own + 2 * copy
    published = sent(job.between, copy, job.replicas) + sent(
        job.inside, own * (job.tensor > 1), job.tensor
    )
    return {
        "sampling": (prefill + (COMPLETION - 1) * token[0], (COMPLETION - 1) * token[1]),
        "update": (micro * update[0] + applied, micro * update[1]),
        "publication": (laid_out / d.memory, published),
    }


# ---- compared

_RING = "gradients go around a ring between products: 9/8 of an array for 7/8"
_LAID_OUT = "laid out anew below half of the memory's rate, by the compiler's cycles"
RESIDUALS: Mapping[tuple[str, str], tuple[float, float, str]] = {
    ("h100", "sampling"): (
        1.0,
        1.15,
        "products of few rows are divided over inputs, and their parts written",
    ),
    ("h200", "sampling"): (
        1.0,
        1.2,
        "products of few rows are divided over inputs, and their parts written",
    ),
    ("v5e", "scattered"): (1.0, 1.12, _RING),
    ("v5e", "update"): (
        1.2,
        1.36,
        "products at 91% of the peak and much beside them, by the cycles; the ring",
    ),
    ("v5e", "sampling"): (
        1.0,
        1.7,
        "stacked weights at 64%, the head at 72% of the memory's rate, by the cycles",
    ),
    ("v5e", "publication"): (1.0, 1.35, _LAID_OUT),
    ("v6e", "scattered"): (
        1.0,
        1.03,
        "padding: 528 for 512 rows of gate's and up's gradients a device",
    ),
    ("v6e", "update"): (1.2, 1.42, "products at 76 to 89% of the peak, by the compiler's cycles"),
    ("v6e", "sampling"): (
        1.0,
        1.9,
        "stacked weights at 64% of the memory's rate; norms and rope of 256 rows",
    ),
    ("v6e", "publication"): (1.2, 2.25, _LAID_OUT),
    ("v5p", "sampling"): (1.0, 1.26, "weights below the memory's rate, by the compiler's cycles"),
    ("v5p", "publication"): (1.0, 1.45, _LAID_OUT),
    ("v5p", "scattered"): (1.0, 1.12, _RING),
    ("v5p", "update"): (
        1.2,
        1.57,
        "products at 91 to 95% of the peak, 3 to 5% copies, by the cycles; the ring",
    ),
}
"""Of what differs by more than its bounds: (kind of device, the figure's first word) -> (least,
most, why)."""


def compiled_rows(name: str, plan: Mapping[str, Any]) -> Iterator[Row]:
    """What moves and how long a step takes, of a plan whose programs are compiled."""
    job, programs = JOBS[name], plan["programs"]
    found: dict[str, float] = {}
    kinds = {
        "all-gather": "gathered",
        "reduce-scatter": "scattered",
        "all-reduce": "scattered",
        "collective-permute": "scattered",
        "all-to-all": "exchanged",
    }
    for row in programs["accumulate"]["collectives"]:
        kind = kinds.get(row["kind"], "")
        found[kind] = found.get(kind, 0.0) + row["bytes"]
    each = (COMPLETION - 1) / plan["job"]["programs"]["decode"]["runs"]
    found["decoding"] = sum(row["bytes"] for row in programs["decode"]["collectives"]) / each
    found["published"] = plan["job"]["programs"]["publish"]["runs"] * sum(
        row["bytes"] for row in programs["publish"]["collectives"]
    )
    for figure, expected in moved(job).items():
        yield f"{figure} GB", found.get(figure, 0.0) / 1e9, expected / 1e9, 0.99, 1.01
    phases = plan["seconds"]["phases"]
    for phase, (compute, transfers) in step_seconds(job).items():
        yield f"{phase} s, hidden", phases[phase]["hidden"], max(compute, transfers), 0.9, 1.1
        yield f"{phase} s", phases[phase]["not_hidden"], compute + transfers, 0.9, 1.1


def compared(name: str, found_rows: Iterator[Row]) -> bool:
    """Prints the rows of a job; True if all are within their bounds."""
    good = True
    for figure, found, expected, least, most in found_rows:
        ratio, note = found / expected, ""
        if not least <= ratio <= most:
            low, high, why = RESIDUALS.get((name.split("-")[1], figure.split()[0]), (1.0, 0.0, ""))
            is_known = low <= ratio <= high
            good, note = good and is_known, why if is_known else f"expected {least} to {most}"
        print(
            f"| {name} | {figure} | {found:,.3g} | {expected:,.3g} | {ratio:.3f} | {note} |",
            flush=True,
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"which of {', '.join(JOBS)}")
    parser.add_argument("--cache")
    parser.add_argument("--traced", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.jobs) - JOBS.keys():
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(JOBS)}")
    print("| job | figure | plan | by hand | ratio | |\n| --- | --- | --- | --- | --- | --- |")
    good = True
    with tempfile.TemporaryDirectory() as own:
        for name in args.jobs or JOBS:
            if args.traced:
                good &= compared(name, traced_rows(name))
                continue
            done = subprocess.run(
                [sys.executable, "-m", "shoal", "plan", *words(JOBS[name]), "json=true"],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "JAX_COMPILATION_CACHE_DIR": args.cache or own},
            )
            if not done.stdout.startswith("{"):
                raise SystemExit(f"{name}: {done.stderr.strip()[-1000:]}")
            good &= compared(name, compiled_rows(name, json.loads(done.stdout)))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
