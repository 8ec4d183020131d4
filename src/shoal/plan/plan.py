"""Makes the plan of a job: describes it, compiles its programs side by side, and joins their
figures.

config, topology -> PlannedJob.describe (a process) -> prints what is held, and what is impossible
                 -> each program compiled, a deep model's decoding with 2 and 4 layers -> Budget
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shoal.budget.advice import advise
from shoal.budget.budget import Budget
from shoal.budget.memory import machine_memory, parameter_count
from shoal.config.commands import PlanConfig
from shoal.config.train import Config
from shoal.mesh.topology import ENVIRONMENT
from shoal.plan.analysis import analyse
from shoal.plan.job import planned_job
from shoal.records import ShoalError
from shoal.text import seconds_text
from shoal.weights.source import planned_architecture
from shoal.workers.process import KILL_WITH_PARENT, limit_memory, num_cores, prctl

Call = tuple[Any, ...]
"""`describe`, `cost` or `advice`, and what it is called with."""
Answers = Callable[..., list[Any]]
Done = Callable[[Call, Any], None]

SHALLOW = (2, 4)
"""Numbers of layers at which a deep model's decoding is compiled: it is unrolled over layers, and
each further layer costs what the one before did."""

DEEP = 8
"""Layers above which a model is deep."""

COMPILER_BYTES = 3 << 29
LARGE_BYTES = 3 << 30
"""Memory of a process that compiles, and what it needs besides for a model of 70e9 parameters
(measured)."""

_LONGEST_FIRST = (
    "accumulate",
    "decode",
    "teacher",
    "reference",
    "score",
    "prefill",
    "join",
    "enter",
    "embed",
    "apply",
    "publish",
)
"""Programs in the order in which they are compiled."""


def make_plan(
    config: PlanConfig,
    say: Callable[[str], None],
    show: Callable[[Budget], None] = lambda _: None,
    compiles: bool = True,
) -> Budget:
    """The figures of a job, with advice; those estimated where nothing `compiles`. `show` is given
    the job before anything is compiled, and at an interrupt what was compiled by then."""
    each = COMPILER_BYTES + LARGE_BYTES * parameter_count(planned_architecture(config.model)) / 70e9
    count = max(1, min(num_cores(), int(machine_memory()[1] / each)))
    with compilers(count, config.topology) as answers:
        (figures,) = answers([(describe, config, config.topology, compiles)])
        show(figures)
        if not compiles:
            figures = figures.estimated
        elif figures.fits:  # by what is held alone
            say(f"{figures.job['devices']}: compiling its programs, {count} at once")
            programs: dict[str, Mapping[str, Any]] = {}
            try:
                _compile(config, figures.job, answers, say, programs)
            except KeyboardInterrupt:
                if programs:
                    kept = {name: figures.job["programs"][name] for name in programs}
                    show(replace(figures, job={**figures.job, "programs": kept}, programs=programs))
                raise
            figures = replace(
                figures, programs={name: programs[name] for name in figures.job["programs"]}
            )
        (found,) = answers([(advice, figures, config.topology, compiles)])
        return replace(figures, advice=found)


def _compile(
    config: PlanConfig,
    job: Mapping[str, Any],
    answers: Answers,
    say: Callable[[str], None],
    programs: dict[str, Mapping[str, Any]],
) -> None:
    """Puts what each program costs into `programs`, as it is compiled."""
    layers, calls = job["model"]["layers"], {}
    for name in sorted(job["programs"], key=_LONGEST_FIRST.index):
        # Publication goes by arrays, and which is the largest depends on the layers.
        shallow = (
            layers > DEEP
            and name != "publish"
            and (config.layers == "shallow" or (config.layers == "auto" and name == "decode"))
        )
        for number in reversed(SHALLOW) if shallow else (0,):
            calls[name, number] = (cost, config, config.topology, name, number)
    found: dict[tuple[str, int], dict[str, Any]] = {}

    def title(name: str, number: int) -> str:
        return f"{name} ({number} layers)" if number else name

    def done(call: Call, answer: dict[str, Any]) -> None:
        *_, name, number = call
        found[name, number] = answer
        if not number:
            programs[name] = answer
        elif all((name, each) in found for each in SHALLOW):
            programs[name] = extrapolate(found[name, SHALLOW[0]], found[name, SHALLOW[1]], layers)
        left = ", ".join(title(*one) for one in calls if one not in found)
        say(
            f"{len(found)} of {len(calls)} compiled: {title(name, number)}, "
            f"{seconds_text(answer['compiled_seconds'])}{f'; left: {left}' * bool(left)}"
        )

    answers(list(calls.values()), done)


def extrapolate(
    shallow: Mapping[str, Any], deeper: Mapping[str, Any], layers: int
) -> dict[str, Any]:
    """The figures of a program with `layers` layers, from those with two smaller numbers of them:
    each further layer costs what those between the two did."""
    first, second = shallow["layers"], deeper["layers"]

    def line(a: float, b: float) -> float:
        return max(0.0, a + (b - a) / (second - first) * (layers - first))

    numbers = {
        name: line(shallow[name], deeper[name])
        for name in (
            "flops",
            "floor_seconds",
            "extra_bytes",
            "compute_seconds",
            "transfer_seconds",
            "launches",
            "kernel_flops",
            "code_bytes",
        )
    }
    sources = {
        source: line(shallow["sources"].get(source, 0.0), value)
        for source, value in deeper["sources"].items()
    }
    sources = dict(sorted(sources.items(), key=lambda item: -item[1]))
    rows = {(row["kind"], row["axis"], row["source"]): row for row in shallow["collectives"]}
    collectives = []
    for row in deeper["collectives"]:
        before = rows.get((row["kind"], row["axis"], row["source"]), {})
        collectives.append(
            row
            | {
                name: line(before.get(name, 0.0), row[name])
                for name in ("times", "bytes", "seconds")
            }
        )
    whole = {name: round(numbers[name]) for name in ("extra_bytes", "code_bytes")}
    return {
        **deeper,
        **numbers,
        **whole,
        "sources": sources,
        "error": shallow["error"] or deeper["error"],
        "layers": layers,
        "extrapolated": [first, second],
        "collectives": sorted(collectives, key=lambda row: -row["bytes"]),
        "compiled_seconds": shallow["compiled_seconds"] + deeper["compiled_seconds"],
    }


# ---- in processes of their own


def describe(config: Config, topology: str, compiles: bool = True) -> Budget:
    """What is known of a job before anything is compiled."""
    with planned_job(config, topology, compiles=compiles) as job:
        return job.describe()


def cost(config: Config, topology: str, program: str, layers: int) -> dict[str, Any]:
    """What one program of a job costs, with fewer layers than the model has, or 0 for all."""
    with planned_job(config, topology, layers) as job:
        return analyse(job, program)


def advice(figures: Budget, topology: str, compiles: bool = True) -> list[dict[str, Any]]:
    with planned_job(figures.config, topology, compiles=compiles) as job:
        return advise(figures, job.job.described)


@contextmanager
def compilers(count: int, topology: str) -> Iterator[Answers]:
    """A function of calls that gives their answers, in their order; `done(call, answer)` as each
    comes. At most `count` processes work at once; without a topology this process itself answers,
    for its own devices.

        with compilers(4, "v5p-8") as answers:
            one, other = answers(
                [(cost, config, "v5p-8", "decode", 2), (cost, config, "v5p-8", "apply", 0)]
            )

    Processes of their own, because a compiler's settings stand in the environment, and JAX takes
    one backend for good.
    """
    if not topology:
        yield _answers_here
        return
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)  # a process takes it over when it starts
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start)
    try:
        yield lambda calls, done=None: _answers(pool, calls, done)
    finally:
        for process in list(
            (pool._processes or {}).values()
        ):  # a compiler does not hear that it is to stop
            process.kill()
        pool.shutdown(cancel_futures=True)
        os.environ.clear()
        os.environ.update(before)


def _answers_here(calls: Sequence[Call], done: Done | None = None) -> list[Any]:
    answers = []
    for function, *words in calls:
        answers.append(function(*words))
        if done:
            done((function, *words), answers[-1])
    return answers


def _answers(pool: ProcessPoolExecutor, calls: Sequence[Call], done: Done | None) -> list[Any]:
    futures: dict[Future[Any], Call] = {pool.submit(*call): call for call in calls}
    try:
        for future in as_completed(futures):
            answer = future.result()
            if done:
                done(futures[future], answer)
    except (BrokenProcessPool, MemoryError) as error:
        raise ShoalError(
            "a compiler ended without an answer, as a process does that the machine's memory "
            "cannot hold: compile fewer layers (layers=shallow), or plan on a larger machine"
        ) from error
    return [future.result() for future in futures]


def _start() -> None:
    prctl(KILL_WITH_PARENT, signal.SIGKILL)
    limit_memory(0)  # no limit, but the first to go where memory ends
    for stream in (1, 2):  # libtpu tells much about a TPU that it does not find
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
