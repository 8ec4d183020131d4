"""Share of the sampler's places that draw, and tokens a second, by how many siblings share a row;
random weights.

    python benchmarks/places.py [--sigmas 0 0.5 1] [--rows-of 1 2 4 8] [--repeats 3] [--shape 1M]

Sampling alone: groups of 8, many more prompts than places, lengths forced to a lognormal
distribution (sigma 0: all equal) of one median. Measured while prompts wait: what is left then is
cancelled. The engines take turns in one process; all draw the same lengths.
"""

from __future__ import annotations

import argparse
import os
import time

import jax
import numpy as np

from shoal.config.sections.devices import MeshSection
from shoal.mesh import make_roles
from shoal.model.architecture import Architecture
from shoal.model.parameters import initialise
from shoal.model.transformer import Model
from shoal.protocols import SampleRequest
from shoal.records import NoiseKey, SamplingParams
from shoal.sampler.engine import Engine, drain

SHAPES = {
    "1M": Architecture(1024, 128, 384, 4, 4, 2, 32, tie_embeddings=True),
    "8M": Architecture(4096, 256, 1024, 6, 8, 4, 32, tie_embeddings=True),
}
GROUP_SIZE = 8


class Forced(Engine):
    """An engine whose completions have given lengths."""

    lengths: np.ndarray  # int[P, G]

    def limit_of(self, request: SampleRequest, index: int) -> int:
        return int(self.lengths[request.id, index])


def lognormal_lengths(prompts: int, median: int, sigma: float, cap: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, (prompts, GROUP_SIZE))
    return np.clip(drawn, 1, cap).astype(int)


def measure(
    engine: Forced, lengths: np.ndarray, prompt: int, step: int
) -> tuple[float, float, float]:
    """Share of places that draw in decoding, and tokens a second and a CPU second, while prompts
    wait."""
    rng = np.random.default_rng(1)
    engine.lengths = lengths
    params = SamplingParams(max_tokens=engine.max_completion_tokens)
    requests = []
    for row in range(len(lengths)):
        requests.append(
            SampleRequest(
                row,
                rng.integers(0, 1024, prompt).astype(np.int32),
                GROUP_SIZE,
                NoiseKey(0, "train", step, row),
                params,
            )
        )
    started, used = time.perf_counter(), time.process_time()
    engine.counters.clear()
    engine.submit(requests)
    found = []
    while engine.scheduler.waiting:
        found += [one for completions in engine.step().values() for one in completions]
    seconds, used = time.perf_counter() - started, time.process_time() - used
    assert all(len(one) == lengths[one.request_id, one.index] for one in found)
    drawing, places = engine.counters["active_slots"], engine.counters["total_slots"]
    for id in list(engine.requests):
        engine.cancel(id)
    drain(engine)
    return drawing / max(1, places), drawing / seconds, drawing / used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="1M", choices=SHAPES)
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.0, 0.5, 1.0])
    parser.add_argument("--rows-of", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--median", type=int, default=100, help="median tokens of a completion")
    parser.add_argument("--cap", type=int, default=512, help="most tokens of a completion")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    role = make_roles(MeshSection()).sampler
    model = Model(SHAPES[options.shape], role)
    parameters = initialise(model.architecture, 0, role)
    engines = {}
    for siblings in options.rows_of:
        engines[siblings] = Forced(
            model,
            slots=options.slots,
            group_size=GROUP_SIZE,
            siblings_per_row=siblings,
            max_prompt_tokens=options.prompt,
            max_completion_tokens=options.cap,
            eos_ids=(),
        )
        engines[siblings].load(0, parameters)
        short = np.full((2 * options.slots // GROUP_SIZE, GROUP_SIZE), 3)
        measure(engines[siblings], short, options.prompt, 0)  # compiles
    print(
        f"{options.shape}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores: "
        f"{options.prompts} prompts of {options.prompt} tokens, groups of {GROUP_SIZE}, "
        f"{options.slots} places, median {options.median}, cap {options.cap}; the fastest of "
        f"{options.repeats}"
    )
    print(
        f"{'sigma':>6} {'siblings a row':>15} {'places drawing':>15} {'tokens/s':>10} "
        f"{'against 8':>10} {'/CPU s':>10} {'against 8':>10}"
    )
    for sigma in options.sigmas:
        lengths = lognormal_lengths(options.prompts, options.median, sigma, options.cap)
        found: dict[int, list[tuple[float, float, float]]] = {siblings: [] for siblings in engines}
        for repeat in range(options.repeats):
            for siblings, engine in engines.items():
                found[siblings].append(measure(engine, lengths, options.prompt, repeat))
        best = {siblings: np.max(runs, 0) for siblings, runs in found.items()}
        for siblings, (share, rate, cpu_rate) in best.items():
            _, *whole = best[siblings] / best.get(GROUP_SIZE, np.nan)
            print(
                f"{sigma:6.1f} {siblings:15d} {share:15.3f} {rate:10.0f} {whole[0]:10.2f} "
                f"{cpu_rate:10.0f} {whole[1]:10.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
