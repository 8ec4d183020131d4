"""Has groups judged while sampling goes on: a queue of groups in, their scores out."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from multiprocessing.reduction import ForkingPickler
from typing import Any

from shoal.config.schema import RewardSection
from shoal.task import pool
from shoal.task.call import Batch, Loop, Outcome, RewardFunction
from shoal.task.reward import Case, Scores, call_here, total, trainer_state
from shoal.task.worker import Link
from shoal.types import Example, ShoalError

_END_SECONDS = 10.0
"""What the pool's process may take to end its workers and itself, before it is killed."""


class Judge:
    """Scores groups with reward functions.

    >>> judge.submit(4, [example], texts=[["5", "6"]], completion_ids=[[[7], [8]]], step=3)
    >>> judge.collect(wait=True)
    [(4, Scores(...))]

    The task's own functions are called here, and so are all with `reward.workers=0`. The others run in processes that
    are forked from this one, so that any function can be one, a closure or one of a notebook; best before JAX starts
    its threads. `async` functions run together on the event loop of one more process. At `reward.timeout_seconds` and
    `reward.memory_gib` a call is ended with its process and everything that was started there.

    Where a call for several completions fails, each of them is called alone, which shows whose fault it is; the others
    keep what they came to alone. Once a call of a step has hung or died, the rest of that step is called one by one.
    """

    def __init__(self, functions: Sequence[RewardFunction], section: RewardSection, max_steps: int = 0) -> None:
        if len({one.name for one in functions}) < len(functions):
            raise ValueError(f"expected functions each with its own name; got {[one.name for one in functions]}")
        self.functions, self.section, self.max_steps = tuple(functions), section, max_steps
        self._remote = [one for one in functions if not one.own] if section.workers else []
        self._here = [one for one in functions if one not in self._remote]
        self._loop = Loop()
        self._done: list[tuple[Hashable, Scores | ShoalError]] = []
        self._asked: dict[int, _Asked] = {}
        self._next_job = 0
        self._link: Link | None = None
        if self._remote:
            if not hasattr(os, "fork"):
                raise ShoalError(f"reward.workers={section.workers}: this system cannot fork processes; "
                                 f"reward.workers=0 calls reward functions in this one, without limits")
            sys.stdout.flush()
            sys.stderr.flush()
            self._pid, self._link = pool.start(self._remote, section)
            self._end = weakref.finalize(self, _end, self._pid, self._link, os.getpid())

    @property
    def by_step(self) -> bool:
        """All groups of a step are to be submitted at once."""
        return self.section.call == "step"

    def submit(self, ticket: Hashable, examples: Sequence[Example], texts: Sequence[Sequence[str]],
               completion_ids: Sequence[Sequence[Sequence[int]]], step: int) -> None:
        """Queues P groups (texts[P][G]) under a ticket; returns at once.

        Raises ShoalError for a column that cannot be sent to another process."""
        prompts = [example.prompt for example in examples]
        batch = Batch.of(examples, prompts, texts, completion_ids, trainer_state(step, self.max_steps))
        asked = _Asked(ticket, batch, call_here(self._here, batch, self._loop, self.section.on_error))
        if self._link is None:
            self._finish(asked)
            return
        body = _sendable(batch)
        job = self._next_job
        self._next_job += 1
        self._asked[job] = asked
        try:
            self._link.send({"job": job, "step": step, "size": len(batch)}, body)
            self._link.drain()
        except ConnectionError:
            raise self._lost() from None

    def collect(self, wait: bool = False) -> list[tuple[Hashable, Scores]]:
        """What is judged by now, each ticket once; with `wait`, not before one is, unless nothing is queued.

        Raises ShoalError, naming function, step and example, where `reward.on_error` is `error` and one failed."""
        self._hear()
        while wait and self._asked and not self._done and self._link is not None:
            wait_for([self._link.end])
            self._hear()
        done, self._done = self._done, []
        for number, (_, scores) in enumerate(done):
            if isinstance(scores, ShoalError):
                self._done = done[number + 1:]
                raise scores
        return [(ticket, scores) for ticket, scores in done if isinstance(scores, Scores)]

    def close(self) -> None:
        """Ends the worker processes, and everything that they started."""
        self._loop.close()
        if self._link is not None:
            self._end()
        self._link = None
        self._asked.clear()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self) -> None:
        """Reads what has come from the pool."""
        if self._link is None:
            return
        try:
            frames = self._link.receive()
        except EOFError:
            raise self._lost() from None
        for header, _ in frames:
            asked = self._asked.pop(header["job"])
            for number, case in header["cases"]:
                asked.cases[self._remote[number].name] = _case(case)
            self._finish(asked)

    def _finish(self, asked: _Asked) -> None:
        """Where a function ends the run, its calls are all that there is."""
        functions = [one for one in self.functions if one.name in asked.cases]
        try:
            scores = total(functions, asked.batch, asked.cases, self.section.on_error, self.section.timeout_seconds)
        except ShoalError as error:
            scores = error
        self._done.append((asked.ticket, scores))

    def _lost(self) -> ShoalError:
        self.close()
        return ShoalError("the process that starts reward workers has ended, killed from outside or for want of "
                          "memory; free some, or take fewer reward.workers")


@dataclass
class _Asked:
    """Groups that are being judged."""

    ticket: Hashable
    batch: Batch
    cases: dict[str, Case]  # by function, as they come


def _case(plain: dict[str, Any]) -> Case:
    whole = plain["whole"]
    return Case(None if whole is None else Outcome(**whole), {i: Outcome(**one) for i, one in plain["singles"]})


def _sendable(batch: Batch) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(batch))
    except Exception as error:
        for name, values in batch.columns.items():
            for place, value in enumerate(values):
                try:
                    ForkingPickler.dumps(value)
                except Exception:
                    raise ShoalError(f"column {name!r} of example row {batch.rows[place][0]} holds a "
                                     f"{type(value).__name__}, which cannot be sent to a reward process ({error}); "
                                     f"leave it out, or call rewards in this process: reward.workers=0") from error
        raise


def _end(pid: int, link: Link, owner: int) -> None:
    """Closes the link, at which the pool's process ends by itself, and waits for that."""
    link.end.close()
    if os.getpid() != owner:  # a copy in a process that someone else forked
        return
    with contextlib.suppress(ChildProcessError):
        deadline = time.monotonic() + _END_SECONDS
        pause = 0.0005
        while time.monotonic() < deadline:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(pause)
            pause = min(0.05, 2 * pause)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
