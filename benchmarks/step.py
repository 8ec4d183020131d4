"""Seconds of a training step on random weights, without early stop: sampling, update, whole;
compile time; memory.

    python benchmarks/step.py [shape ...] [--repeats 5] [--turns 1] [--dtype float32] [--lora 0 16]

Each shape runs in a process of its own, so that peak memory is its own. A step publishes the
weights, draws P x G completions, computes advantages from random rewards (so that no group drops
out), and makes one update of AdamW. Completions are all as long as they may be; those of
`8M-lognormal` have lognormal lengths (median 150, sigma 1), cut at
512. `computed`: tokens that the update computes, over those that are real (prompts once a group,
     and completions).
`--lora`: ranks of an adapter that is trained instead of all weights (0: none), one after the
other. `--turns`: the shapes are measured so often in turns, and then compared with the first one:
on a busy machine the ratios say more than the seconds.

`8M-64` to `8M-1024` are the 8M model with completions of so many tokens, in rows that a
run on a CPU would choose: `us/token`, the time of a step over the tokens of its completions, says
how it grows with their length.

`keys-1k` and `states-1k` decode alone: four layers of attention over 1,024 own keys, and four delta
nets, both with a quarter of the widths of Qwen3.5-9B. The seconds are those of a token in each of
eight slots.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from shoal.records import Group
    from shoal.trainer.batch import LearnerBatch


@dataclass(frozen=True)
class Shape:
    """A model, and what a step draws with it. `median`: of lognormal lengths with sigma 1; 0: all
    are `completion`. `experts`: each has `intermediate_size / chosen` features, so that a token's
    are as many as those of a dense model. `decodes`: nothing but decoding is measured, after
    `completion` own keys."""

    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    prompts: int
    siblings: int
    prompt: int
    completion: int
    median: float = 0.0
    micro_tokens: int = 2048  # 0: what a run on a CPU decides
    tied: bool = True
    qkv_bias: bool = False
    experts: int = 0  # of each layer; 0: a dense feed-forward part
    chosen: int = 0  # experts of a token
    delta_nets: bool = False  # in place of attention
    decodes: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step's completions, at most; where nothing but decoding is measured, one in
        each slot."""
        slots = self.prompts * self.siblings
        return slots if self.decodes else slots * self.completion

    def lengths(self, step: int) -> np.ndarray:
        """Tokens of each completion of a step, [P, G]."""
        import numpy as np

        size = (self.prompts, self.siblings)
        if not self.median:
            return np.full(size, self.completion)
        drawn = self.median * np.exp(np.random.default_rng(step).standard_normal(size))
        return np.clip(drawn.round(), 1, self.completion).astype(int)


_8M = Shape(256, 6, 1024, 8, 4, 32, 4096, 4, 8, 64, 128)
_DECODED = Shape(1024, 4, 3072, 4, 1, 256, 1024, 1, 8, 64, 1024, decodes=True)

SHAPES: Mapping[str, Shape] = {
    "1M": Shape(128, 4, 384, 4, 2, 32, 1024, 8, 8, 16, 16),
    "8M": _8M,
    "50M": Shape(512, 12, 2048, 8, 4, 64, 8192, 2, 8, 128, 256),
    "8M-64": replace(_8M, completion=64, micro_tokens=0),
    "8M-128": replace(_8M, micro_tokens=0),
    "8M-256": replace(_8M, completion=256, micro_tokens=0),
    "8M-512": replace(_8M, completion=512, micro_tokens=0),
    "8M-1024": replace(_8M, completion=1024, micro_tokens=0),
    "8M-lognormal": replace(_8M, completion=512, median=150.0),
    "8M-prompts-2k": replace(_8M, prompt=2048, micro_tokens=8192),
    "8M-G16": replace(_8M, siblings=16),
    "8M-experts": replace(_8M, experts=16, chosen=2),
    "keys-1k": _DECODED,
    "states-1k": replace(_DECODED, delta_nets=True),
}
DEFAULT = ("1M", "8M", "50M")


class Trial:
    """The product's own engine, learner and updater on random weights, on the first device."""

    def __init__(self, shape: Shape, dtype: Any, rank: int = 0) -> None:
        import jax

        from shoal.budget.auto import cpu_micro_tokens, decided_remat, trained_model
        from shoal.config.derived import CPU_MICRO_TOKENS
        from shoal.config.sections.model import ModelSection
        from shoal.config.sections.optimizer import BatchSection, OptimizerSection
        from shoal.config.sections.sampling import SamplingSection
        from shoal.config.train import Config
        from shoal.job.job import Job
        from shoal.mesh import make_roles
        from shoal.model.adapters import ALL, make_adapter
        from shoal.model.architecture import Architecture, DeltaNet, Experts, Layer
        from shoal.report.console import Console
        from shoal.weights.source import ModelSource

        self.shape, self.computed = shape, 0
        self.architecture = Architecture(
            shape.vocabulary,
            shape.hidden_size,
            shape.intermediate_size,
            shape.layers,
            shape.heads,
            shape.key_heads,
            shape.head_dim,
            tie_embeddings=shape.tied,
            qkv_bias=shape.qkv_bias,
        )
        if shape.experts:
            each = shape.intermediate_size // shape.chosen
            self.architecture = replace(
                self.architecture,
                pattern=(Layer(feed_forward="experts"),),
                experts=Experts(shape.experts, shape.chosen, each),
            )
        if shape.delta_nets:
            self.architecture = replace(
                self.architecture,
                pattern=(Layer(mixer="delta_net"),),
                delta_net=DeltaNet(4, 8, 128, 128, 4),
            )
        if rank:
            adapter = make_adapter(self.architecture, rank, 32.0, [ALL], rslora=False)
            self.architecture = replace(self.architecture, adapter=adapter)
        config = Config(
            model=ModelSection(dtype=dtype),
            optimizer=OptimizerSection(warmup_steps=0),
            batch=BatchSection(
                prompts_per_step=shape.prompts,
                group_size=shape.siblings,
                micro_tokens=shape.micro_tokens or CPU_MICRO_TOKENS,
            ),
            sampling=SamplingSection(
                max_prompt_tokens=shape.prompt, max_completion_tokens=shape.completion
            ),
        )
        if not shape.micro_tokens:
            batch = replace(config.batch, micro_tokens=cpu_micro_tokens(config, 1))
            config = replace(config, batch=batch)
        self.roles = make_roles(config.mesh, jax.devices()[:1])
        spec = ModelSource(Path(), self.architecture, lambda role, dtype: self.parameters)
        remat = decided_remat(config, self.roles, self.architecture)
        config = replace(config, model=replace(config.model, remat=remat))
        self.model = trained_model(config, spec, self.roles)
        job = Job(config, Console(io.StringIO()), model_source=spec)
        job.opened |= {"config": config, "roles": self.roles, "model": self.model}
        self.learner, self.updater = job.learner, job.make_updater(None, None)
        accumulate = self.learner.accumulate

        def counted(total: Any, state: Any, batch: LearnerBatch, teacher: Any = None) -> Any:
            self.computed += computed_tokens(batch)
            return accumulate(total, state, batch, teacher)

        self.learner.accumulate = counted

    @cached_property
    def parameters(self) -> Any:
        from shoal.model.parameters import initialise

        return initialise(self.architecture, 0, self.roles.trainer)

    @cached_property
    def engine(self) -> Any:
        return limited_engine(
            self.model.on(self.roles.sampler),
            slots=self.shape.prompts * self.shape.siblings,
            group_size=self.shape.siblings,
            max_prompt_tokens=self.shape.prompt,
            max_completion_tokens=self.shape.completion,
            eos_ids=(),
        )

    def publish(self, version: int, trainable: Any) -> None:
        from shoal.weights.sampler_copy import publish_to

        self.engine.load(version, publish_to(self.model.on(self.roles.sampler), trainable))

    def sample(self, step: int, lengths: np.ndarray) -> list[Group]:
        """A step's groups, with completions of these lengths."""
        import numpy as np

        from shoal.protocols import SampleRequest
        from shoal.records import Example, Group, NoiseKey, Purpose, SamplingParams
        from shoal.sampler.engine import drain

        shape, rng = self.shape, np.random.default_rng(step)
        ids = rng.integers(0, shape.vocabulary, (len(lengths), shape.prompt)).astype(np.int32)
        self.engine.lengths = dict(enumerate(lengths))
        for row, own in enumerate(lengths):
            self.engine.submit(
                [
                    SampleRequest(
                        row,
                        ids[row],
                        shape.siblings,
                        NoiseKey(0, "train", step, row),
                        SamplingParams(max_tokens=int(own.max())),
                    )
                ]
            )
        found = drain(self.engine)
        groups = []
        for row, own in enumerate(lengths):
            completions = tuple(found[row, index] for index in range(shape.siblings))
            assert [len(one) for one in completions] == list(own)
            rewards = rng.permutation(shape.siblings).astype(float)
            groups.append(
                Group(
                    Purpose.TRAIN,
                    step,
                    step,
                    Example(row, ""),
                    ids[row],
                    completions,
                    ("",) * shape.siblings,
                    rewards,
                    {},
                    np.ones(shape.siblings, bool),
                )
            )
        return groups


def computed_tokens(batch: LearnerBatch) -> int:
    """Tokens that a micro-batch computes, padding included."""
    return batch.tokens.size


def limited_engine(model: Any, **sizes: Any) -> Any:
    """An engine whose completions have limits of their own: `lengths`, request -> tokens of each
    completion."""
    from shoal.sampler.engine import Engine

    class Limited(Engine):
        lengths: Mapping[int, Sequence[int]]

        def limit_of(self, request: Any, index: int) -> int:
            return int(self.lengths[request.id][index])

    return Limited(model, **sizes)


def measure_decoding(name: str, repeats: int, dtype: str) -> dict[str, float]:
    """The seconds in which a shape that only decodes samples a token in each slot after
    `completion` tokens of its own, in this process."""
    import jax
    import jax.numpy as jnp

    from shoal.sampler.decode_state import StateSizes
    from shoal.sampler.programs import DECODE_CHUNK, make_programs, no_turn_starts, run_program
    from shoal.weights.sampler_copy import publish_to

    trial = Trial(SHAPES[name], dtype)
    shape = trial.shape
    model = trial.model.on(trial.roles.sampler)
    weights = publish_to(model, trial.parameters)
    slots = (shape.prompts, shape.siblings)
    sizes = StateSizes(*slots, shape.prompt, shape.completion + DECODE_CHUNK)
    programs = make_programs(model, sizes, (), False, 0, shape.prompt)
    state = programs["make_state"]()
    arrays = {
        "stopped": jnp.zeros(slots, bool),
        "interrupt_after": jnp.array([[shape.prompts, shape.prompts * shape.siblings]], jnp.int32),
        "turns": no_turn_starts(*slots),
    }
    times = []
    for _ in range(1 + repeats):
        # Each decode begins anew after `completion` tokens, of zeros.
        state = replace(
            state,
            prefix_len=jnp.full(shape.prompts, shape.prompt),
            length=jnp.full(slots, shape.completion),
            limit=jnp.full(slots, shape.completion + DECODE_CHUNK),
            done=jnp.zeros(slots, bool),
        )
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, sampled = run_program(model, programs, "decode", weights, state, arrays)
        assert sampled is not None
        assert int(jax.device_get(sampled.count).min()) == DECODE_CHUNK
        times.append((time.perf_counter() - start) / DECODE_CHUNK)
    return figures(trial, times[0] * DECODE_CHUNK, times[1:], times[1:], [0.0])


def figures(
    trial: Trial, compiled: float, steps: Sequence[float], sampling: Any, update: Any
) -> dict[str, float]:
    """One shape's row of the table: medians, and what this process has taken at most."""
    import resource

    import jax
    import numpy as np

    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trial.parameters)),
        "step": float(np.median(steps)),
        "fastest": float(np.min(steps)),
        "slowest": float(np.max(steps)),
        "sampling": float(np.median(sampling)),
        "update": float(np.median(update)),
        "compile": compiled,
        "computed": 1.0,
        "us_per_token": 1e6 * float(np.median(steps)) / trial.shape.tokens,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def measure(name: str, repeats: int, dtype: str, rank: int = 0) -> dict[str, float]:
    """One shape's figures, in this process."""
    if SHAPES[name].decodes:
        return measure_decoding(name, repeats, dtype)
    import jax
    import numpy as np

    trial = Trial(SHAPES[name], dtype, rank)
    state, times, real = trial.learner.init(trial.parameters), [], 0
    # Lengths that differ make shapes that differ: each is met, and compiled, before anything is
    # timed.
    warm = repeats if trial.shape.median else 1
    for step in range(warm + repeats):
        lengths = trial.shape.lengths(step % repeats)
        if step == warm:
            trial.computed, real = 0, 0
        start = time.perf_counter()
        trial.publish(step, state.parameters)
        groups = trial.sample(step, lengths)
        sampled = time.perf_counter()
        state, _ = trial.updater.update(state, groups, step)
        jax.block_until_ready(state)
        times.append((sampled - start, time.perf_counter() - sampled))
        real += lengths.sum() + len(lengths) * trial.shape.prompt if step >= warm else 0
    first, rest = np.array(times[:warm]), np.array(times[warm:])
    total = rest.sum(1)
    compiled = float(first.sum() - warm * np.median(total))
    row = figures(trial, compiled, total, rest[:, 0], rest[:, 1])
    return row | {"computed": trial.computed / float(real)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "shapes", nargs="*", default=DEFAULT, help=f"of {', '.join(SHAPES)}; default: three"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora", type=int, nargs="+", default=[0])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.shapes) - SHAPES.keys():
        parser.error(f"no such shape: {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    if options.one:
        print(
            json.dumps(measure(options.shapes[0], options.repeats, options.dtype, options.lora[0]))
        )
        return
    print(
        f"median of {options.repeats} steps, {options.dtype}, {os.cpu_count()} CPU cores; seconds"
    )
    print(
        f"{'shape':>13} {'params':>8} {'step':>8} {'min-max':>15} {'sampling':>9} {'update':>8}",
        f"{'compile':>8} {'computed':>9} {'us/token':>9} {'peak GiB':>9}",
    )
    shapes = list(itertools.product(options.shapes, options.lora))
    ratios: dict[tuple[str, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(options.turns):
        first = None
        for name, rank in shapes:
            row = measured_apart(name, rank, options)
            first = first or row
            ratios[name, rank].append(row["step"] / first["step"])
            spread = f"{row['fastest']:.2f}-{row['slowest']:.2f}"
            print(
                f"{label(name, rank):>13} {row['parameters'] / 1e6:7.1f}M {row['step']:8.3f} "
                f"{spread:>15} {row['sampling']:9.3f} {row['update']:8.3f} {row['compile']:8.2f} "
                f"{row['computed']:8.2f}x {row['us_per_token']:9.1f} {row['peak_gib']:9.2f}",
                flush=True,
            )
    if options.turns > 1:
        for name, rank in shapes[1:]:
            of_turns = sorted(ratios[name, rank])
            median = of_turns[len(of_turns) // 2]
            print(
                f"{label(name, rank)}: a step takes {median:.2f} times that of {label(*shapes[0])} "
                f"({of_turns[0]:.2f}-{of_turns[-1]:.2f} in {options.turns} turns)"
            )


def label(name: str, rank: int) -> str:
    return f"{name} r{rank}" if rank else name


def measured_apart(name: str, rank: int, options: argparse.Namespace) -> dict[str, float]:
    """One shape's figures, measured in a process of its own."""
    command = [
        sys.executable,
        __file__,
        name,
        "--one",
        "--repeats",
        str(options.repeats),
        "--dtype",
        options.dtype,
        "--lora",
        str(rank),
    ]
    # as `shoal train` sets it (decision 0003)
    env = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **os.environ}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    return json.loads(out.splitlines()[-1])


if __name__ == "__main__":
    main()
