"""What does it cost to record a step of a million tokens? The loop's own seconds, the thread's, and
the file's size.

    python benchmarks/recording.py [--tokens 1000000] [--prompts 64] [--siblings 16] [--steps 5]

Groups with random tokens and log-probs, as a step leaves them, go through the recorder that a run
uses: metrics are counted, the line of metrics.jsonl is written, the groups are handed to the
thread. While the thread writes, the loop computes something of its own (a matrix product), as a
step does; `slowed` is what that product then takes longer. The share is of a step of
`--step-seconds`: 10 s, a million tokens sampled and trained on at 100 thousand a second.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np

from shoal.records import Completion, Example, Group, Purpose, StopReason
from shoal.report.console import Console
from shoal.report.recorder import Recorder, StepRecord
from shoal.runs.metrics import MetricSet
from shoal.runs.writer import RunWriter


def make_groups(
    step: int, options: argparse.Namespace
) -> tuple[list[Group], dict[tuple[int, int], np.ndarray]]:
    """A step's groups and the trainer's log-probs; lengths vary by a quarter, words by Zipf's
    law."""
    random = np.random.default_rng(step)
    mean = options.tokens / (options.prompts * options.siblings)
    groups, logprobs = [], {}
    for p in range(options.prompts):
        completions = []
        for g in range(options.siblings):
            size = max(1, int(random.normal(mean, mean / 4)))
            tokens = (random.zipf(1.3, size) % 150_000).astype(np.int32)
            sampled = (-random.gamma(0.3, 1.0, size)).astype(np.float32)
            logprobs[p, g] = sampled + random.normal(0, 1e-4, size).astype(np.float32)
            completions.append(
                Completion(
                    p,
                    g,
                    tokens,
                    sampled,
                    np.ones(size, bool),
                    np.full(size, step, np.int32),
                    StopReason.EOS,
                )
            )
        texts = tuple("".join(chr(97 + token % 26) for token in c.token_ids) for c in completions)
        rewards = random.integers(0, 2, options.siblings).astype(float)
        groups.append(
            Group(
                Purpose.TRAIN,
                step,
                step,
                Example(p, f"question {p}", {"answer": str(p)}),
                random.integers(0, 150_000, options.prompt_tokens).astype(np.int32),
                tuple(completions),
                texts,
                rewards,
                {"correct": rewards},
                np.ones(options.siblings, bool),
                rewards > 0,
            )
        )
    return groups, logprobs


def product_seconds(matrix: np.ndarray) -> float:
    started = time.perf_counter()
    for _ in range(3):
        matrix @ matrix
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--siblings", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=10.0)
    options = parser.parse_args()
    matrix = np.random.default_rng(0).random((1500, 1500), np.float32)
    product_seconds(matrix)
    alone, slowed, loop, thread, count, size = product_seconds(matrix), [], [], [], 0, 0
    clock = SimpleNamespace(
        failures=[], tokens=options.tokens, sample_seconds=1.0, reward_seconds=0.0
    )
    with tempfile.TemporaryDirectory() as folder, RunWriter(Path(folder)) as run:
        recorder = Recorder(
            run, Console(io.StringIO()), options.steps, True, lambda: clock, lambda: 0, lambda: 0
        )
        for step in range(options.steps):
            groups, logprobs = make_groups(step, options)
            metrics = MetricSet()
            metrics.add("time/update_seconds", 1.0)
            metrics.add("tokens/trained", options.tokens)
            advantages = np.zeros((options.prompts, options.siblings))
            nonzero = np.ones(options.prompts, bool)
            started = time.perf_counter()
            recorder.step(StepRecord(step, groups, advantages, nonzero, logprobs, metrics, 60.0))
            loop.append(time.perf_counter() - started)
            slowed.append(product_seconds(matrix) - alone)
            recorder.sync([])
            thread.append(time.perf_counter() - started)
            count = sum(len(c) for group in groups for c in group.completions)
            size = (run.groups_path / f"step_{step + 1:06d}.parquet").stat().st_size
        recorder.close()
    print(
        f"{options.prompts} groups of {options.siblings}, {count:,} tokens, prompts of "
        f"{options.prompt_tokens}"
    )
    print(
        f"loop        {median(loop):.3f} s, {100 * median(loop) / options.step_seconds:.2f}% of a "
        f"step of {options.step_seconds:g} s"
    )
    print(
        f"to disk     {median(thread):.3f} s after the step, a product of {alone:.3f} s slowed by "
        f"{max(0.0, median(slowed)):.3f} s"
    )
    print(f"file        {size / 1e6:.1f} MB, {size / count:.1f} bytes a token")


if __name__ == "__main__":
    main()
