"""Seconds of a training step on random weights, without early stop: sampling, update, whole; compile time; memory.

    python benchmarks/step.py [shape ...] [--repeats 5] [--dtype float32]

Each shape runs in a process of its own, so that peak memory is its own. A step draws P x G completions of a fixed
length, computes advantages from random rewards (so that no group drops out), and makes one update of AdamW.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

SHAPES = {
    # name: (width, layers, feed-forward, heads, key heads, head width, vocabulary, P, G, prompt, completion)
    "1M": (128, 4, 384, 4, 2, 32, 1024, 8, 8, 16, 16),
    "8M": (256, 6, 1024, 8, 4, 32, 4096, 4, 8, 64, 128),
    "50M": (512, 12, 2048, 8, 4, 64, 8192, 2, 8, 128, 256),
}


def measure(name: str, repeats: int, dtype: str) -> dict[str, float]:
    """One shape's figures, in this process."""
    import resource

    import jax
    import numpy as np

    from shoal.config.schema import AlgorithmSection, BatchSection, MeshSection, OptimizerSection
    from shoal.mesh import make_roles
    from shoal.model.transformer import Architecture, Model, initialise
    from shoal.sampler.engine import Engine, drain
    from shoal.trainer.loss import Objective
    from shoal.trainer.step import Learner
    from shoal.trainer.update import Updater
    from shoal.types import Address, Example, Group, Purpose, SampleRequest, SamplingParams

    hidden_size, layers, feed, heads, keys, head, vocabulary, prompts, siblings, prompt, completion = SHAPES[name]
    a = Architecture(vocabulary, hidden_size, feed, layers, heads, keys, head, tie_embeddings=True)
    roles = make_roles(MeshSection())
    model = Model(a, roles.trainer, jax.numpy.dtype(dtype))
    parameters = initialise(a, 0, roles.trainer)
    algorithm, batch = AlgorithmSection(), BatchSection(prompts, siblings)
    learner = Learner(model, Objective.of(algorithm), OptimizerSection(warmup_steps=0), 100)
    updater = Updater(learner, algorithm, batch, 1.0, 0)
    engine = Engine(model.on(roles.sampler), slots=prompts * siblings, group_size=siblings, max_prompt_tokens=prompt,
                    max_completion_tokens=completion, eos_ids=())
    state = learner.init(parameters)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=completion)

    def sample(step: int) -> list[Group]:
        ids = rng.integers(0, vocabulary, (prompts, prompt)).astype(np.int32)
        cast = jax.tree.map(lambda x: x.astype(model.dtype), state.trainable)
        engine.load(step, cast)
        engine.submit([SampleRequest(row, ids[row], siblings, Address(0, "train", step, row), params)
                       for row in range(prompts)])
        found = drain(engine)
        groups = []
        for row in range(prompts):
            own = tuple(found[row, index] for index in range(siblings))
            rewards = rng.permutation(siblings).astype(float)
            groups.append(Group(Purpose.TRAIN, step, step, Example(row, ""), ids[row], own, ("",) * siblings, rewards,
                                {}, np.ones(siblings, bool)))
        return groups

    times = []
    for step in range(repeats + 1):
        start = time.perf_counter()
        groups = sample(step)
        sampled = time.perf_counter()
        state, _ = updater.update(state, groups, step)
        jax.block_until_ready(state)
        times.append((sampled - start, time.perf_counter() - sampled))
    first, rest = times[0], np.array(times[1:])
    total = rest.sum(1)
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(parameters)),
        "step": float(np.median(total)), "fastest": float(total.min()), "slowest": float(total.max()),
        "sampling": float(np.median(rest[:, 0])), "update": float(np.median(rest[:, 1])),
        "compile": float(sum(first) - np.median(total)),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), help="which of 1M, 8M, 50M")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.shapes[0], options.repeats, options.dtype)))
        return
    print(f"median of {options.repeats} steps, {options.dtype}, {os.cpu_count()} CPU cores; seconds")
    print(f"{'shape':>6} {'params':>8} {'step':>8} {'min-max':>15} {'sampling':>9} {'update':>8}",
          f"{'compile':>8} {'peak GiB':>9}")
    for name in options.shapes:
        command = [sys.executable, __file__, name, "--one", "--repeats", str(options.repeats), "--dtype", options.dtype]
        env = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **os.environ}  # as `shoal train` sets it (decision 0003)
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
        row = json.loads(out.splitlines()[-1])
        spread = f"{row['fastest']:.2f}-{row['slowest']:.2f}"
        print(f"{name:>6} {row['parameters'] / 1e6:7.1f}M {row['step']:8.3f} {spread:>15} {row['sampling']:9.3f} "
              f"{row['update']:8.3f} {row['compile']:8.2f} {row['peak_gib']:9.2f}", flush=True)


if __name__ == "__main__":
    main()
