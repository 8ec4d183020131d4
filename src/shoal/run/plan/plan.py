"""Makes the plan of a job: describes it, compiles its programs side by side, and joins their figures.

    config, topology -> PlannedJob.describe (a worker) -> what is impossible is said now
                     -> each program compiled, a deep model's decoding with 2 and 4 layers -> Figures
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shoal.config.keys import keys_of
from shoal.config.schema import Config, PlanConfig
from shoal.config.values import get_value
from shoal.run.figures import FULL, PHASES, Figures, resolved
from shoal.run.plan.compilers import Compilers, compilers
from shoal.run.size import machine_memory
from shoal.workers.process import num_cores

SHALLOW = (2, 4)
"""Numbers of layers at which a deep model's decoding is compiled: it is unrolled over layers, and each further layer
costs what the one before did."""

DEEP = 8
"""Layers above which a model is deep."""

COMPILER_BYTES = 3 << 29
LARGE_BYTES = 3 << 30
"""Memory of a process that compiles, and what it needs besides for a model of 70e9 parameters (measured)."""

_LONGEST_FIRST = ("accumulate", "decode", "teacher", "reference", "score", "prefill", "join", "apply", "publish")
"""Programs in the order in which they are compiled."""

MOST_TRIES = 4
"""Compilations that `fit=true` makes at most."""


def make_plan(config: PlanConfig, say: Callable[[str], None]) -> Figures:
    """The figures of a job, with `fit=true` those of the largest batch.micro_tokens that fits."""
    with compilers(num_cores(), config.topology) as found:
        figures = _figures(config, found, say)
        figures = _fitted(config, figures, found, say) if config.fit else figures
        request = _request(figures.config, config.topology, "", 0)
        known = {"figures": {"job": figures.job, "programs": figures.programs}}
        return replace(figures, **found.answer([request | known])[0])


def _figures(config: PlanConfig, found: Compilers, say: Callable[[str], None]) -> Figures:
    job = found.answer([_request(config, config.topology, "", 0)])[0]
    figures = Figures(resolved(config, job), job, {})
    if not figures.fits:  # by what is held alone
        return figures
    free, parameters = machine_memory()[1], job["model"]["parameters"]
    each = COMPILER_BYTES + LARGE_BYTES * parameters / 70e9
    found.count = max(1, min(found.count, int(free / each)))
    layers, deep = job["model"]["layers"], job["model"]["layers"] > DEEP
    requests: dict[tuple[str, int], dict[str, Any]] = {}
    for name in sorted(job["programs"], key=_LONGEST_FIRST.index):
        # Publication goes by arrays, and which is the largest depends on the layers.
        shallow = deep and name != "publish" and (config.layers == "shallow" or
                                                  (config.layers == "auto" and name == "decode"))
        for number in reversed(SHALLOW) if shallow else (0,):
            requests[name, number] = _request(config, config.topology, name, number)
    say(f"{job['devices']}: compiling {len(requests)} programs, {found.count} at once")
    compiled: list[str] = []

    def done(request: Mapping[str, Any]) -> None:
        layers = f" ({request['layers']} layers)" * (request["layers"] > 0)
        compiled.append(request["program"])
        say(f"{len(compiled)} of {len(requests)} compiled: {request['program']}{layers}")

    answers = dict(zip(requests, found.answer(list(requests.values()), done), strict=True))
    programs = {name: answers[name, 0] if (name, 0) in answers else
                extrapolate(answers[name, SHALLOW[0]], answers[name, SHALLOW[1]], layers) for name in job["programs"]}
    return replace(figures, programs=programs)


def _request(config: Config, topology: str, program: str, layers: int) -> dict[str, Any]:
    values = {name: get_value(config, name) for name in keys_of(Config)}
    return {"config": values, "topology": topology, "program": program, "layers": layers}


# ---- a deep model from shallow ones


def extrapolate(shallow: Mapping[str, Any], deeper: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The figures of a program with `layers` layers, from those with two smaller numbers of them: each further layer
    costs what those between the two did."""
    first, second = shallow["layers"], deeper["layers"]

    def line(a: float, b: float) -> float:
        return max(0.0, a + (b - a) / (second - first) * (layers - first))

    numbers = {name: line(shallow[name], deeper[name]) for name in
               ("flops", "floor_seconds", "weights_seconds", "extra_bytes", "compute_seconds", "transfer_seconds")}
    sources = {source: line(shallow["sources"].get(source, 0.0), value)
               for source, value in deeper["sources"].items()}
    sources = dict(sorted(sources.items(), key=lambda item: -item[1]))
    rows = {(row["kind"], row["axis"], row["source"]): row for row in shallow["collectives"]}
    collectives = []
    for row in deeper["collectives"]:
        before = rows.get((row["kind"], row["axis"], row["source"]), {})
        collectives.append(row | {name: line(before.get(name, 0.0), row[name]) for name in
                                  ("times", "bytes", "seconds")})
    return {**deeper, **numbers, "extra_bytes": round(numbers["extra_bytes"]), "sources": sources,
            "error": shallow["error"] or deeper["error"], "layers": layers, "extrapolated": [first, second],
            "collectives": sorted(collectives, key=lambda row: -row["bytes"]),
            "compiled_seconds": shallow["compiled_seconds"] + deeper["compiled_seconds"]}


# ---- the largest batch that fits


def _fitted(config: PlanConfig, figures: Figures, found: Compilers, say: Callable[[str], None]) -> Figures:
    """The plan with the largest batch.micro_tokens whose compiled programs fit; the first one where none does, or
    where what does not fit are not the activations."""
    tried = {figures.config.batch.micro_tokens: figures}
    while len(tried) < MOST_TRIES and (micro := _next_micro(config, tried)) and micro not in tried:
        say(f"trying batch.micro_tokens={micro}")
        tried[micro] = _figures(replace(config, batch=replace(config.batch, micro_tokens=micro)), found, say)
    fitting = [micro for micro, one in tried.items() if one.fits and one.programs]
    return tried[max(fitting)] if fitting else figures


def _next_micro(config: PlanConfig, tried: Mapping[int, Figures]) -> int | None:
    """The micro_tokens at which an update is expected to fill the memory; None where it decides nothing."""
    least = config.sampling.max_prompt_tokens + config.sampling.max_completion_tokens
    points = sorted((micro, one.programs["accumulate"]["extra_bytes"]) for micro, one in tried.items() if one.programs)
    one = next(iter(tried.values()))
    if not points or not (one.fits or PHASES[one.fullest][0] == "update"):
        return None
    room = FULL * one.memory - sum(one.sizes.on("trainer", "update").values())
    (a, low), (b, high) = (points[0], points[-1]) if len(points) > 1 else ((0, 0), points[0])
    slope = (high - low) / (b - a) if b > a else 0
    if slope <= 0 or room <= 0:
        return None
    micro = int(b + (room - high) / slope) // 64 * 64
    whole = -(-one.job["prompts"] // config.algorithm.num_minibatches) * (
        config.sampling.max_prompt_tokens + config.batch.group_size * config.sampling.max_completion_tokens)
    fitting = max((m for m, figures in tried.items() if figures.fits), default=0)
    failing = min((m for m, figures in tried.items() if not figures.fits), default=whole + 1)
    micro = min(max(micro, least), whole)
    return micro if fitting < micro < failing else None
