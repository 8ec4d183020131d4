"""Makes the plan of a job: describes the job, compiles its programs side by side, and joins their
costs.

config, topology -> PlannedJob.budget (a process) -> prints what is held, and what is impossible
                 -> each program compiled, a deep model's decoding with few layers -> Budget
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
from shoal.budget.budget import Advice, Budget, ProgramCost, step_of
from shoal.budget.memory import machine_memory, parameter_count
from shoal.config.commands import PlanConfig
from shoal.config.train import Config
from shoal.mesh.topology import ENVIRONMENT
from shoal.model.architecture import Architecture
from shoal.plan.analysis import analyse
from shoal.plan.job import planned_job
from shoal.records import ShoalError
from shoal.text import seconds_text
from shoal.weights.source import planned_architecture
from shoal.workers.process import KILL_WITH_PARENT, limit_memory, num_cores, prctl

Call = tuple[Any, ...]
"""One of the functions `describe`, `cost` and `advise_plan`, followed by its arguments."""
Answers = Callable[..., list[Any]]
"""A function: (calls, done) -> what the calls return, in order; see `compilers`."""
Done = Callable[[Call, Any], None]
"""A function that gets a call and what it returned, as soon as that is there."""

SHALLOW = 2
"""The least number of layers, of the scan group with most of them, with which a deep model's
decoding is compiled (`shallow_layers`). It is unrolled over layers, and each further one costs as
much as the one of its kind before."""

DEEP = 8
"""A model with more layers counts as deep."""

COMPILER_BYTES = 3 << 29
LARGE_BYTES = 3 << 30
"""Bytes of a process that compiles, and how many more it needs for a model of 70e9 parameters
(measured)."""

_LONGEST_FIRST = (
    "accumulate",
    "decode",
    "teacher",
    "reference",
    "score",
    "prefill",
    "join",
    "begin",
    "embed",
    "apply",
    "publish",
)
"""Programs in the order in which they are compiled."""


def make_plan(
    config: PlanConfig,
    say: Callable[[str], None],
    show_job: Callable[[Budget], None] | None = None,
    show_compiled: Callable[[Budget], None] | None = None,
    compiles: bool = True,
) -> Budget:
    """Returns the budget of a job with the costs of its programs and with advice.

    say            called with lines of progress
    show_job       called with the budget before anything is compiled
    show_compiled  called if the user interrupts, with the costs of what was compiled until then
    compiles       False: the costs are estimated

    If what the roles hold does not fit the devices, nothing is compiled and there are no costs; the
    budget's `fits()` is then False, which is no error. ShoalError if the job is impossible on these
    devices, or if a compiler's process ends without an answer. Ctrl-C raises KeyboardInterrupt."""
    a = planned_architecture(config.model)
    size = parameter_count(a)
    bytes_of_a_compiler = COMPILER_BYTES + LARGE_BYTES * size / 70e9
    _, available = machine_memory()
    # How many processes compile at a time.
    count = max(1, min(num_cores(), int(available / bytes_of_a_compiler)))
    with compilers(count, config.topology) as answers:
        budget = answers([(describe, config, config.topology, compiles)])[0]
        if show_job:
            show_job(budget)
        if not compiles:
            budget = budget.estimated()
        elif budget.fits():  # judged only by what roles hold
            assert budget.step is not None
            say(f"{budget.step.devices}: compiling its programs, {count} at once")
            costs: dict[str, ProgramCost] = {}
            try:
                _compile(config, a, budget, answers, say, costs)
            except KeyboardInterrupt:
                if costs and show_compiled:
                    compiled = {name: budget.programs[name] for name in costs}
                    show_compiled(replace(budget, programs=compiled, costs=costs))
                raise
            in_order = {name: costs[name] for name in budget.programs}
            budget = replace(budget, costs=in_order)
        advice = answers([(advise_plan, budget, config.topology, compiles)])[0]
        return replace(budget, advice=advice)


def _compile(
    config: PlanConfig,
    a: Architecture,
    budget: Budget,
    answers: Answers,
    say: Callable[[str], None],
    costs: dict[str, ProgramCost],
) -> None:
    """Compiles the programs of a job in parallel, calls `say` with a line of progress after each,
    and writes the cost of each program into `costs` (name -> cost) as soon as it is known. A
    program that is compiled with few layers twice gets the cost that is extrapolated to all layers,
    when both are there. An error of a compilation is raised; `costs` keeps what it has then."""
    first, second = shallow_layers(a)
    calls: dict[tuple[str, int], Call] = {}  # (program, layers: 0 for all)
    for name in sorted(budget.programs, key=lambda name: _LONGEST_FIRST.index(step_of(name))):
        depths = (0,)
        if _is_shallow(config, a, name):
            depths = (second, first)
        for depth in depths:
            calls[name, depth] = (cost, config, config.topology, name, depth)
    done: dict[tuple[str, int], ProgramCost] = {}

    def title(name: str, depth: int) -> str:
        """Returns the name of a program for progress, with its layers if these are not all."""
        if not depth:
            return name
        return f"{name} ({depth} layers)"

    def take(call: Call, answer: ProgramCost) -> None:
        """Stores the cost of one compiled program, and prints progress. Called for each answer as
        soon as it is there."""
        name, depth = call[-2:]  # the last two arguments of `cost`
        done[name, depth] = answer
        if not depth:
            costs[name] = answer
        elif (name, first) in done and (name, second) in done:
            costs[name] = extrapolate(done[name, first], done[name, second], a.num_layers)
        titles_left = []
        for other, other_depth in calls:
            if (other, other_depth) not in done:
                titles_left.append(title(other, other_depth))
        text = f"{len(done)} of {len(calls)} compiled: {title(name, depth)}, "
        text += seconds_text(answer.compiled_seconds)
        if titles_left:
            text += f"; left: {', '.join(titles_left)}"
        say(text)

    answers(list(calls.values()), take)


def shallow_layers(a: Architecture) -> tuple[int, int]:
    """Returns the two numbers of layers with which a deep model's programs are compiled, instead of
    all: whole patterns of the scan group with most layers, and all other layers."""
    pattern = len(a.longest_scan_group)
    others = a.num_layers - pattern * len(a.longest_scan_group[0].numbers)
    few = pattern * -(-SHALLOW // pattern)  # rounded up to whole patterns
    return others + few, others + 2 * few


def is_deep(a: Architecture) -> bool:
    """True if a model has so many layers that few of them may be compiled instead."""
    _, most = shallow_layers(a)
    return a.num_layers > max(DEEP, most)


def _is_shallow(config: PlanConfig, a: Architecture, program: str) -> bool:
    """True if a program is compiled with few layers, and its cost extrapolated. Never for a model
    that is not deep, and never `publish`. Else by the key `layers`: `auto`: decoding alone;
    `shallow`: all programs; `all`: none."""
    if not is_deep(a) or program == "publish":
        # Publication copies array by array, and which array is the largest depends on the layers.
        return False
    if config.layers == "auto":
        return program == "decode"
    return config.layers == "shallow"


def extrapolate(shallow: ProgramCost, deeper: ProgramCost, layers: int) -> ProgramCost:
    """Returns the cost of a program with `layers` layers, extrapolated from its costs with two
    smaller numbers of layers on a straight line: each further layer costs as much as each of those
    between the two. No value becomes less than 0. Sources and transfers that only the shallower one
    has are left out, those that only the deeper one has count as 0 in the other; `memory`,
    `largest` and `assumed` are those of the deeper one. If one has an `error`, so has the
    result."""
    shallow_layers, deeper_layers = shallow.layers, deeper.layers

    def line(at_first: float, at_second: float) -> float:
        """Returns the value at `layers` of the line through two values; at least 0."""
        of_a_layer = (at_second - at_first) / (deeper_layers - shallow_layers)
        return max(0.0, at_first + of_a_layer * (layers - shallow_layers))

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
        extrapolated=(shallow_layers, deeper_layers),
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
    """Returns the budget of a job before anything is compiled, without costs and advice. Called in
    a process of `compilers`, because it looks for devices. `topology`: '' for the devices here;
    `compiles`: False for placeholders, which need no compiler. ShoalError if such a job is
    impossible."""
    with planned_job(config, topology, compiles=compiles) as job:
        return job.budget()


def cost(config: Config, topology: str, program: str, layers: int) -> ProgramCost:
    """Compiles one program of a job, or reads what its compiler said before from disk, and returns
    the cost of one run on a device. `topology`: '' for the devices here; `program`: its name in the
    job's budget; `layers`: fewer than the model has; 0: all. A program that the compiler refuses
    for lack of memory has an `error` in its cost."""
    with planned_job(config, topology, layers) as job:
        return analyse(job, program)


def advise_plan(budget: Budget, topology: str, compiles: bool = True) -> list[Advice]:
    """Returns advice on a plan's budget, the best first: changes of keys that would make it fit or
    faster, each tried with a budget on the devices of the plan, without compiling; [] if none
    helps. `topology`: '' for the devices here; `compiles`: like in `describe`."""
    with planned_job(budget.config, topology, compiles=compiles) as job:
        return advise(budget, job.job.budget_for)


@contextmanager
def compilers(count: int, topology: str) -> Iterator[Answers]:
    """A context with a function `answers(calls, done)`: it makes the calls in at most `count`
    parallel processes, and returns their results in the order of the calls. `done(call, result)`,
    if given, is called in this process as soon as each result is there, in any order. Without a
    topology this process itself makes the calls, one after the other, for its own devices.

        with compilers(4, "v5p-8") as answers:
            decode, apply = answers(
                [(cost, config, "v5p-8", "decode", 2), (cost, config, "v5p-8", "apply", 0)]
            )

    Separate processes are needed, because a compiler reads its settings from the environment, and
    JAX keeps the first backend that it finds. The environment of this process is changed within the
    block, and restored after it. Leaving the block kills the processes.
    """
    if not topology:
        yield _answers_here
        return
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)  # processes inherit it when they start
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start)

    def answers(calls: Sequence[Call], done: Done | None = None) -> list[Any]:
        return _answers(pool, calls, done)

    try:
        yield answers
    finally:
        # Killed, because a process does not react to a request to stop while it compiles.
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)
        os.environ.clear()
        os.environ.update(before)


def _answers_here(calls: Sequence[Call], done: Done | None = None) -> list[Any]:
    """Makes the calls in this process, one after the other, and returns their results. `done(call,
    result)`, if given, is called after each. The first error ends it and is raised."""
    answers = []
    for call in calls:
        function, *arguments = call
        answer = function(*arguments)
        answers.append(answer)
        if done:
            done(call, answer)
    return answers


def _answers(pool: ProcessPoolExecutor, calls: Sequence[Call], done: Done | None) -> list[Any]:
    """Makes the calls in the pool's processes, and returns their results in the order of the calls.
    `done(call, result)`, if given, is called as soon as each result is there. ShoalError if a
    process ends without an answer or lacks memory; any other error of a call is raised as it is, at
    the first call that fails, while others may still run."""
    futures: dict[Future[Any], Call] = {pool.submit(*call): call for call in calls}
    try:
        for future in as_completed(futures):
            answer = future.result()
            if done:
                done(futures[future], answer)
    except (BrokenProcessPool, MemoryError) as error:
        raise ShoalError(
            "a compiler ended without an answer, probably because this machine ran out of memory: "
            "compile fewer layers (layers=shallow), or plan on a larger machine"
        ) from error
    return [future.result() for future in futures]


def _start() -> None:
    """Prepares the process that calls this function to compile: it ends with its parent, is the
    first to be killed if memory runs out, and prints nothing, neither output nor errors."""
    prctl(KILL_WITH_PARENT, signal.SIGKILL)
    limit_memory(0)  # no limit, but this process is killed first if memory runs out
    # Standard output and error; libtpu prints much about a TPU that it does not find.
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
