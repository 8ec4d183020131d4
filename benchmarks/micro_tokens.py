"""Seconds of an update on a CPU by the length of its rows: the measurement behind an open
`batch.micro_tokens`.

    python benchmarks/micro_tokens.py [--models 8M 50M] [--completions 128 256 512 1024]
                                      [--repeats 5] [--peaks]

An update has one prompt of 64 tokens with 8 completions, on random weights of `benchmarks/step.py`.
Each line of the table is a model and a longest completion; completions are all of that length, or
(`lognormal`) have a median of a third of it with sigma 1. Columns are values of
`batch.micro_tokens`: 2,048, what a run decides, twice that. Updates of a line take turns in one
process; a figure is a median. `--peaks` also prints the most memory that a process with one value
alone takes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.records import Group

NUM_PROMPTS = 1
PROMPT = 64
GROUP_SIZE = 8
BASELINE = 2048


def completion_lengths(longest: int, lognormal: bool) -> list[list[int]]:
    """Tokens of each completion, by group."""
    import numpy as np

    shape = (NUM_PROMPTS, GROUP_SIZE)
    if not lognormal:
        return np.full(shape, longest).tolist()
    drawn = longest / 3 * np.exp(np.random.default_rng(0).standard_normal(shape))
    return np.clip(drawn.round(), 1, longest).astype(int).tolist()


def make_group(number: int, lengths: Sequence[int], vocabulary: int) -> Group:
    """A group of random tokens with completions of these lengths and rewards that differ."""
    import numpy as np

    from shoal.records import Completion, Example, Group, Purpose, StopReason

    rng = np.random.default_rng(number)
    completions = []
    for index, length in enumerate(lengths):
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        completions.append(
            Completion(
                request_id=number,
                index=index,
                token_ids=ids,
                logprobs=np.full(length, -1.0, np.float32),
                loss_mask=np.ones(length, bool),
                versions=np.zeros(length, np.int32),
                stop_reason=StopReason.LENGTH,
            )
        )
    size = len(lengths)
    prompt_ids = rng.integers(0, vocabulary, PROMPT).astype(np.int32)
    rewards = rng.permutation(size).astype(float)
    return Group(
        Purpose.TRAIN,
        0,
        0,
        Example(number, ""),
        prompt_ids,
        tuple(completions),
        ("",) * size,
        rewards,
        {},
        np.ones(size, bool),
    )


def row_sizes(longest: int) -> list[int]:
    """The values of `batch.micro_tokens` that are compared for completions of at most so many
    tokens."""
    from shoal.budget.auto import cpu_micro_tokens
    from shoal.config.sections.optimizer import BatchSection
    from shoal.config.sections.sampling import SamplingSection
    from shoal.config.train import Config

    batch = BatchSection(prompts_per_step=NUM_PROMPTS, group_size=GROUP_SIZE, micro_tokens=BASELINE)
    sampling = SamplingSection(max_prompt_tokens=PROMPT, max_completion_tokens=longest)
    chosen = cpu_micro_tokens(Config(batch=batch, sampling=sampling), row_shards=1)
    return sorted({BASELINE, chosen, 2 * chosen})


def measure(
    model: str, longest: int, lognormal: bool, sizes: Sequence[int], repeats: int
) -> dict[int, float]:
    """`batch.micro_tokens` -> the median of an update's seconds; the updates take turns."""
    import jax

    from step import SHAPES, Trial

    shape = replace(
        SHAPES[model], prompts=NUM_PROMPTS, siblings=GROUP_SIZE, prompt=PROMPT, completion=longest
    )
    groups = []
    for number, lengths in enumerate(completion_lengths(longest, lognormal)):
        groups.append(make_group(number, lengths, shape.vocabulary))
    trials, states = {}, {}
    for size in sizes:
        trial = Trial(replace(shape, micro_tokens=size), "float32")
        state = trial.learner.init(trial.parameters)
        states[size], _ = trial.updater.update(state, groups, 0)  # compiles
        trials[size] = trial
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size, trial in trials.items():
            start = time.perf_counter()
            states[size], _ = trial.updater.update(states[size], groups, 0)
            jax.block_until_ready(states[size])
            seconds[size].append(time.perf_counter() - start)
    return {size: statistics.median(times) for size, times in seconds.items()}


def peak_gib(model: str, longest: int, lognormal: bool, size: int) -> float:
    """The peak memory of a process that makes two updates with this size, in GiB."""
    command = [sys.executable, __file__, "--child", json.dumps([model, longest, lognormal, size])]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["8M", "50M"])
    parser.add_argument("--completions", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--peaks", action="store_true", help="also the peak memory of each, in a process of its own"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        model, longest, lognormal, size = json.loads(options.child)
        measure(model, longest, lognormal, [size], repeats=1)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return
    print(
        f"median seconds of {options.repeats} updates of {NUM_PROMPTS} x {GROUP_SIZE} completions, "
        "float32"
    )
    for model in options.models:
        for longest in options.completions:
            for lognormal in (False, True):
                sizes = row_sizes(longest)
                seconds = measure(model, longest, lognormal, sizes, options.repeats)
                columns = []
                for size in sizes:
                    text = f"{size:,}: {seconds[size]:.2f}"
                    if options.peaks:
                        text += f" ({peak_gib(model, longest, lognormal, size):.2f} GiB)"
                    columns.append(text)
                name = f"{longest} lognormal" if lognormal else str(longest)
                print(f"{model:>4}  {name:>15}  {'  '.join(columns)}", flush=True)


if __name__ == "__main__":
    main()
