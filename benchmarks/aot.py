"""How near are the programs of large models to what their devices allow? Compiled here, for devices
that are not here.

    python benchmarks/aot.py [JOB ...] [--programs decode,prefill,accumulate] [--cache FOLDER]
                             [--sources 8] [key=value]

Compiles the sampler's and the trainer's programs of each job as `shoal plan` does, of deep models
with few layers, from which all follow; prints a row of the table for each job's programs as
they are done. `key=value` is added to every job, such as `model.attention=blocked`. `--sources`
prints the lines of code that take longest, and the largest arrays. Needs compilers: `pip install
'.[plan]'`.

Seconds are the compiler's cycles at the clock, on TPU, or the larger of bytes and operations at the
maker's rates, on GPU; without transfers between devices. Floors, which no program can pass: of a
token in decoding, the weights and the live caches (of whole prompts, once a group, and of half of
the longest completion; of windows as many keys; states) read once; of a prefill and an update, the
model's operations at the peak rate, with neither recomputation nor padding. Nothing here was
measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shoal.budget.budget import Budget
from shoal.budget.memory import parameter_count
from shoal.config.commands import PlanConfig
from shoal.config.merge import compose
from shoal.model.architecture import Architecture
from shoal.model.flops import forward_flops
from shoal.plan.plan import compilers, cost, describe, extrapolate, is_deep, shallow_layers
from shoal.weights.source import planned_architecture

LENGTHS = "batch.group_size=8 sampling.max_prompt_tokens=256 sampling.max_completion_tokens=512"
LONG = "sampling.max_prompt_tokens=1024 sampling.max_completion_tokens=64512"
DECODE, UPDATE = "decode prefill", "accumulate"

JOBS: Mapping[str, tuple[str, str]] = {
    # 64 chips train; the other 64 are 8 samplers of 8, with 64 places each.
    "70b-v5p": (
        f"{DECODE} {UPDATE}",
        "topology=v5p-256 model.name=llama3.3-70b mesh.trainer=64 mesh.sampler=64 mesh.fsdp=-1 "
        "mesh.sampler_tensor=8 batch.prompts_per_device=1 batch.micro_tokens=4352",
    ),
    "8b-v6e-decode": (
        DECODE,
        "topology=v6e-4 model.name=llama3.1-8b mesh.trainer=1 mesh.sampler=1 "
        "batch.prompts_per_step=8",
    ),
    "8b-h200-decode": (
        DECODE,
        "topology=h200:2 model.name=llama3.1-8b mesh.trainer=1 mesh.sampler=1 "
        "batch.prompts_per_step=8",
    ),
    "1.5b-h200-decode": (
        DECODE,
        "topology=h200:1 model.name=qwen2.5-1.5b batch.prompts_per_step=32",
    ),
    "8b-v6e": (
        UPDATE,
        "topology=v6e-8 model.name=llama3.1-8b mesh.fsdp=-1 batch.micro_tokens=4352",
    ),
    "8b-h200": (
        UPDATE,
        "topology=h200:8 model.name=llama3.1-8b mesh.fsdp=-1 batch.micro_tokens=16384",
    ),
    # A row is a prompt with one completion.
    "8b-v6e-long": (
        UPDATE,
        "topology=v6e-8 model.name=llama3.1-8b mesh.fsdp=-1 batch.micro_tokens=4352 "
        "batch.prompts_per_step=8 sampling.max_completion_tokens=4096",
    ),
    # Rows of one prompt with one completion, as agents think.
    "8b-v6e-64k": (
        UPDATE,
        "topology=v6e-8 model.name=llama3.1-8b mesh.context=4 mesh.fsdp=-1 "
        f"mesh.sampler_tensor=4 batch.micro_tokens=16384 batch.prompts_per_step=8 {LONG}",
    ),
    "8b-v6e-lora-64k": (
        UPDATE,
        "topology=v6e-8 model.name=llama3.1-8b model.lora.rank=16 mesh.context=4 mesh.fsdp=-1 "
        f"batch.micro_tokens=16384 batch.prompts_per_step=8 {LONG}",
    ),
    "4b-h100-lora-64k": (
        UPDATE,
        "topology=h100:1 model.name=qwen3-4b model.lora.rank=16 batch.micro_tokens=65536 "
        f"batch.prompts_per_step=8 {LONG}",
    ),
    "4b-h200-64k": (
        UPDATE,
        "topology=h200:1 model.name=qwen3-4b batch.micro_tokens=65536 batch.prompts_per_step=8 "
        f"{LONG}",
    ),
    **{
        f"7b-{gpu}-lora-32k": (
            UPDATE,
            f"topology={gpu}:1 model.name=qwen2.5-7b model.lora.rank=16 model.quantise=int8 "
            "batch.micro_tokens=32768 batch.prompts_per_step=8 "
            "sampling.max_prompt_tokens=1024 sampling.max_completion_tokens=31744",
        )
        for gpu in ("h100", "h200")
    },
}
"""Name -> (the programs of its rows, the words after `shoal plan`), over LENGTHS."""

GIB = 2**30
BFLOAT16 = 2  # bytes
FLOAT32 = 4
HEAD = (
    "job",
    "program",
    "peak GiB",
    "of",
    "computes",
    "floor",
    "times the floor",
    "share of peak",
    "GB moved",
)


def composed(job: str, added: Sequence[str]) -> PlanConfig:
    words = [*LENGTHS.split(), *JOBS[job][1].split(), "layers=shallow", *added]
    config, _ = compose("plan", list({word.partition("=")[0]: word for word in words}.values()))
    return config


def compiled(config: PlanConfig, programs: Sequence[str], say: Callable[[str], None]) -> Budget:
    """The budget of a job with the costs of some of its programs; one is compiled at a time."""
    with compilers(1, config.topology) as answers:
        budget = answers([(describe, config, config.topology)])[0]
        a = planned_architecture(config.model)
        deep = is_deep(a) and config.layers != "all"
        costs = {}
        for name in programs:
            few = []
            for layers in shallow_layers(a) if deep else (0,):
                started = time.perf_counter()
                few += answers([(cost, config, config.topology, name, layers)])
                title = f"{name} of {layers} layers" if layers else name
                say(f"{title}: {time.perf_counter() - started:.0f} s")
            costs[name] = extrapolate(few[0], few[1], a.num_layers) if deep else few[0]
    return replace(budget, costs=costs)


def decode_bytes(a: Architecture, groups: float, size: int, prompt: int, completion: int) -> float:
    """What one token of all completions reads: the weights, the live keys and values in bfloat16,
    and states in float32."""
    read = BFLOAT16 * parameter_count(a)
    for layer in a.layers_in_order:
        if layer.mixer == "delta_net":
            sizes = a.delta_net
            assert sizes is not None
            state = sizes.num_value_heads * sizes.key_dim * sizes.value_dim
            read += groups * size * FLOAT32 * state
            continue
        of_prompt = min(prompt, layer.window or prompt)
        of_completion = min(completion / 2, layer.window or completion)
        keys = groups * (of_prompt + size * of_completion)
        read += BFLOAT16 * 2 * a.kv_heads_of(layer) * a.head_dim_of(layer) * keys
    return read


def floor_seconds(budget: Budget, program: str) -> float:
    """The least that all runs of a program in a step could take."""
    config = budget.config
    a = planned_architecture(config.model)
    s = config.sampling
    groups = budget.prompts_per_step
    size = config.batch.group_size
    assert budget.step is not None and budget.step.rates is not None
    rates = budget.step.rates
    devices = len(budget.roles[budget.programs[program].role].devices)
    if program == "decode":
        replica = budget.roles["sampler"].mesh.get("tensor", 1)
        replicas = devices // replica
        read = (
            decode_bytes(a, groups / replicas, size, s.max_prompt_tokens, s.max_completion_tokens)
            / replica
        )
        return (s.max_completion_tokens - 1) * read / rates.hbm
    assert rates.peak_flops is not None
    lengths = (
        s.max_prompt_tokens,
        [1] if program == "prefill" else [s.max_completion_tokens] * size,
    )
    passes = 1 if program == "prefill" else 3 * config.algorithm.num_epochs
    return passes * groups * forward_flops(a, *lengths) / devices / rates.peak_flops


def row(job: str, program: str, budget: Budget) -> list[str]:
    config = budget.config
    cost = budget.costs[program]
    runs = budget.programs[program].runs
    cells = [
        job,
        f"{program}, {scope(budget, program)}",
        f"{budget.needed_bytes(program) / GIB:.1f}",
        f"{budget.memory / GIB:.1f}",
    ]
    if cost.error:
        return [*cells, "does not compile", "", "", "", cost.error[:100]]
    seconds, floor = runs * cost.compute_seconds, floor_seconds(budget, program)
    tokens = config.sampling.max_completion_tokens - 1
    scale, digits, unit = {
        "decode": (1e3 / tokens, 2, "ms a token"),
        "prefill": (1e3, 1, "ms a step"),
    }.get(program, (1.0, 2, "s a step"))
    times = [f"{scale * value:.{digits}f}" for value in (seconds, floor)]
    share = "" if program == "decode" else f"{100 * floor / seconds:.0f}%"
    moved: dict[str, float] = defaultdict(float)
    for transfers in cost.collectives:
        moved[transfers.kind] += (
            runs * transfers.bytes / (tokens if program == "decode" else 1) / 1e9
        )
    moved_text = ", ".join(
        f"{size:.3g} {kind}" for kind, size in sorted(moved.items(), key=lambda item: -item[1])
    )
    return [*cells, f"{times[0]} {unit}", times[1], f"{seconds / floor:.2f}", share, moved_text]


def scope(budget: Budget, program: str) -> str:
    """What one run of a program works on."""
    if program != "accumulate":
        replicas = budget.roles["sampler"].mesh.get("data", 1)
        return f"{budget.slots // replicas} slots a replica"
    batch = budget.batch
    devices = len(budget.roles["trainer"].devices)
    return f"{batch.tokens // devices} tokens a device ({batch.rows} x {batch.length})"


def print_sources(program: str, budget: Budget, number: int) -> None:
    cost = budget.costs[program]
    print(
        f"\n{program}: model.remat={budget.model.remat}; shares of its seconds, and its largest "
        "arrays"
    )
    for source, seconds in list(cost.sources.items())[:number]:
        print(f"    {100 * seconds / cost.compute_seconds:5.1f}%  {source}")
    for size, shape, source in cost.largest[:number]:
        print(f"    {size / GIB:5.2f} GiB  {shape}  {source}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", default="decode,prefill,accumulate")
    parser.add_argument(
        "--cache", help="folder of what is compiled, to be found again; default: none is kept"
    )
    parser.add_argument("--sources", type=int, default=0)
    args, words = parser.parse_known_args()
    names = [word for word in words if "=" not in word]
    added = [word for word in words if "=" in word]
    if unknown := set(names) - JOBS.keys():
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(JOBS)}")
    print(f"| {' | '.join(HEAD)} |\n| {' | '.join(['---'] * len(HEAD))} |", flush=True)
    with tempfile.TemporaryDirectory() as own:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = args.cache or own
        for name in names or JOBS:
            programs = [one for one in JOBS[name][0].split() if one in args.programs.split(",")]
            if not programs:
                continue
            budget = compiled(
                composed(name, added),
                programs,
                lambda text: print(text, file=sys.stderr, flush=True),
            )
            for program in programs:
                print(f"| {' | '.join(row(name, program, budget))} |", flush=True)
                if args.sources:
                    print_sources(program, budget, args.sources)


if __name__ == "__main__":
    main()
