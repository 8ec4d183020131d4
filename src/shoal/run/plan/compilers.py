"""Processes that compile side by side for devices that are not here.

    with compilers(4, "v5p-8") as answers:
        one, other = answers([(cost, config, "v5p-8", "decode", 2), (cost, config, "v5p-8", "apply", 0)])

Processes of their own, because a compiler's settings stand in the environment, and JAX takes one backend for good.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from shoal.config.schema import Config
from shoal.mesh.topology import ENVIRONMENT
from shoal.run.advice import advise
from shoal.run.figures import Figures
from shoal.run.plan.analysis import analyse
from shoal.run.plan.job import planned_job
from shoal.types import ShoalError
from shoal.workers.process import KILL_WITH_PARENT, limit_memory, prctl

Call = tuple[Any, ...]
"""One of the functions below, and what it is called with."""
Answers = Callable[..., list[Any]]


def describe(config: Config, topology: str) -> Figures:
    """What is known of a job before anything is compiled."""
    with planned_job(config, topology) as job:
        return job.describe()


def cost(config: Config, topology: str, program: str, layers: int) -> dict[str, Any]:
    """What one program of a job costs, with fewer layers than the model has, or 0 for all."""
    with planned_job(config, topology, layers) as job:
        return analyse(job, program)


def advice(figures: Figures, topology: str) -> list[dict[str, Any]]:
    with planned_job(figures.config, topology) as job:
        return advise(figures, job.job.described)


@contextmanager
def compilers(count: int, topology: str) -> Iterator[Answers]:
    """A function of calls that gives their answers, in their order; `done(call)` as each comes. At most `count`
    processes work at once; without a topology this process itself answers, for its own devices."""
    if not topology:
        yield lambda calls, done=None: [function(*words) for function, *words in calls]
        return
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)  # a process takes it over when it starts
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start)
    try:
        yield lambda calls, done=None: _answers(pool, calls, done)
    finally:
        for process in list((pool._processes or {}).values()):  # a compiler does not hear that it is to stop
            process.kill()
        pool.shutdown(cancel_futures=True)
        os.environ.clear()
        os.environ.update(before)


def _answers(pool: ProcessPoolExecutor, calls: Sequence[Call], done: Callable[[Call], None] | None) -> list[Any]:
    futures: dict[Future[Any], Call] = {pool.submit(*call): call for call in calls}
    try:
        for future in as_completed(futures):
            future.result()
            if done:
                done(futures[future])
    except (BrokenProcessPool, MemoryError) as error:
        raise ShoalError("a compiler ended without an answer, as a process does that the machine's memory cannot hold: "
                         "compile fewer layers (layers=shallow), or plan on a larger machine") from error
    return [future.result() for future in futures]


def _start() -> None:
    prctl(KILL_WITH_PARENT, signal.SIGKILL)
    limit_memory(0)  # no limit, but the first to go where memory ends
    for stream in (1, 2):  # libtpu tells much about a TPU that it does not find
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
