"""Makes the plan of a job: describes it, compiles its programs side by side, and joins their
figures.

config, topology -> PlannedJob.budget (a process) -> prints what is held, and what is impossible
                 -> each program compiled, a deep model's decoding with 2 and 4 layers -> Budget
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shoal.budget.advice import advise
from shoal.budget.budget import Advice, Budget, ProgramCost
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
"""`describe`, `cost` or `advise_plan`, and what it is called with."""
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
    show: Callable[[Budget], None] | None = None,
    compiles: bool = True,
) -> Budget:
    """The budget of a job with the costs of its programs, and advice; that estimated where nothing
    `compiles`. `show` is given the job before anything is compiled, and at an interrupt what was
    compiled by then."""
    size = parameter_count(planned_architecture(config.model))
    bytes_of_a_compiler = COMPILER_BYTES + LARGE_BYTES * size / 70e9
    _, available = machine_memory()
    count = max(1, min(num_cores(), int(available / bytes_of_a_compiler)))
    with compilers(count, config.topology) as answers:
        budget = answers([(describe, config, config.topology, compiles)])[0]
        if show:
            show(budget)
        if not compiles:
            budget = budget.estimated()
        elif budget.fits():  # by what is held alone
            assert budget.step is not None
            say(f"{budget.step.devices}: compiling its programs, {count} at once")
            costs: dict[str, ProgramCost] = {}
            try:
                _compile(config, budget, answers, say, costs)
            except KeyboardInterrupt:
                if costs and show:
                    compiled = {name: budget.programs[name] for name in costs}
                    show(replace(budget, programs=compiled, costs=costs))
                raise
            in_order = {name: costs[name] for name in budget.programs}
            budget = replace(budget, costs=in_order)
        advice = answers([(advise_plan, budget, config.topology, compiles)])[0]
        return replace(budget, advice=advice)


def _compile(
    config: PlanConfig,
    budget: Budget,
    answers: Answers,
    say: Callable[[str], None],
    costs: dict[str, ProgramCost],
) -> None:
    """Puts what each program costs into `costs`, as it is compiled."""
    layers = budget.model.layers
    calls: dict[tuple[str, int], Call] = {}  # (program, layers: 0 for all)
    for name in sorted(budget.programs, key=_LONGEST_FIRST.index):
        depths = (0,)
        if _is_shallow(config, name, layers):
            depths = tuple(reversed(SHALLOW))
        for depth in depths:
            calls[name, depth] = (cost, config, config.topology, name, depth)
    done: dict[tuple[str, int], ProgramCost] = {}

    def title(name: str, depth: int) -> str:
        if not depth:
            return name
        return f"{name} ({depth} layers)"

    def take(call: Call, answer: ProgramCost) -> None:
        name, depth = call[-2:]
        done[name, depth] = answer
        if not depth:
            costs[name] = answer
        elif all((name, each) in done for each in SHALLOW):
            first, second = SHALLOW
            costs[name] = extrapolate(done[name, first], done[name, second], layers)
        left = []
        for other, other_depth in calls:
            if (other, other_depth) not in done:
                left.append(title(other, other_depth))
        text = f"{len(done)} of {len(calls)} compiled: {title(name, depth)}, "
        text += seconds_text(answer.compiled_seconds)
        if left:
            text += f"; left: {', '.join(left)}"
        say(text)

    answers(list(calls.values()), take)


def _is_shallow(config: PlanConfig, program: str, layers: int) -> bool:
    """True for a program that is compiled with few layers instead of all of them."""
    if layers <= DEEP or program == "publish":
        # Publication goes by arrays, and which is the largest depends on the layers.
        return False
    if config.layers == "auto":
        return program == "decode"
    return config.layers == "shallow"


def extrapolate(shallow: ProgramCost, deeper: ProgramCost, layers: int) -> ProgramCost:
    """The cost of a program with `layers` layers, from those with two smaller numbers of them: each
    further layer costs what those between the two did."""
    first, second = shallow.layers, deeper.layers

    def line(at_first: float, at_second: float) -> float:
        of_a_layer = (at_second - at_first) / (second - first)
        return max(0.0, at_first + of_a_layer * (layers - first))

    sources = {}
    for source, seconds in deeper.sources.items():
        sources[source] = line(shallow.sources.get(source, 0.0), seconds)
    rows = {(row.kind, row.axis, row.source): row for row in shallow.collectives}
    collectives = []
    for row in deeper.collectives:
        before = rows.get((row.kind, row.axis, row.source))
        if before is None:
            before = replace(row, times=0.0, bytes=0.0, seconds=0.0)
        collectives.append(
            replace(
                row,
                times=line(before.times, row.times),
                bytes=line(before.bytes, row.bytes),
                seconds=line(before.seconds, row.seconds),
            )
        )
    return replace(
        deeper,
        layers=layers,
        extrapolated=(first, second),
        compiled_seconds=shallow.compiled_seconds + deeper.compiled_seconds,
        error=shallow.error or deeper.error,
        flops=line(shallow.flops, deeper.flops),
        floor_seconds=line(shallow.floor_seconds, deeper.floor_seconds),
        extra_bytes=round(line(shallow.extra_bytes, deeper.extra_bytes)),
        code_bytes=round(line(shallow.code_bytes, deeper.code_bytes)),
        compute_seconds=line(shallow.compute_seconds, deeper.compute_seconds),
        transfer_seconds=line(shallow.transfer_seconds, deeper.transfer_seconds),
        launches=line(shallow.launches, deeper.launches),
        kernel_flops=line(shallow.kernel_flops, deeper.kernel_flops),
        sources=dict(sorted(sources.items(), key=lambda item: -item[1])),
        collectives=sorted(collectives, key=lambda row: -row.bytes),
    )


# ---- in processes of their own


def describe(config: Config, topology: str, compiles: bool = True) -> Budget:
    """What is known of a job before anything is compiled."""
    with planned_job(config, topology, compiles=compiles) as job:
        return job.budget()


def cost(config: Config, topology: str, program: str, layers: int) -> ProgramCost:
    """What one program of a job costs, with fewer layers than the model has, or 0 for all."""
    with planned_job(config, topology, layers) as job:
        return analyse(job, program)


def advise_plan(budget: Budget, topology: str, compiles: bool = True) -> list[Advice]:
    """Keys to change, each tried on the devices of the plan."""
    with planned_job(budget.config, topology, compiles=compiles) as job:
        return advise(budget, job.job.described)


@contextmanager
def compilers(count: int, topology: str) -> Iterator[Answers]:
    """A function of calls that gives their answers, in their order; `done(call, answer)` as each
    comes. At most `count` processes work at once; without a topology this process itself answers,
    for its own devices.

        with compilers(4, "v5p-8") as answers:
            decode, apply = answers(
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

    def answers(calls: Sequence[Call], done: Done | None = None) -> list[Any]:
        return _answers(pool, calls, done)

    try:
        yield answers
    finally:
        # A compiler does not hear that it is to stop.
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)
        os.environ.clear()
        os.environ.update(before)


def _answers_here(calls: Sequence[Call], done: Done | None = None) -> list[Any]:
    answers = []
    for call in calls:
        function, *arguments = call
        answer = function(*arguments)
        answers.append(answer)
        if done:
            done(call, answer)
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
