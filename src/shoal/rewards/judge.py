"""Has groups judged while sampling goes on: a queue of groups in, their scores out."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from multiprocessing.reduction import ForkingPickler
from typing import Any

from shoal.config.schema import RewardSection
from shoal.rewards import pool
from shoal.rewards.call import Batch, Loop, Outcome
from shoal.rewards.scores import Case, Policy, Scores, call_here, total, trainer_state
from shoal.rewards.worker import Link
from shoal.types import Example, RewardFunction, ShoalError

_END_SECONDS = 10.0
"""What the pool's process may take to end its workers and itself, before it is killed."""
_SILENT_SECONDS = 120.0
"""After how long without a word the pool counts as stuck: while it has work it gives one each second."""
_TOLD_SECONDS = 60.0
"""After how long a wait is told of; then each time that it has doubled."""
_GENEROUS = 2.0
"""By how much the calls of a batch may pass the time that they take at most, before the pool counts as stuck."""


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
        self._remote = [one for one in functions if not one.builtin] if section.workers else []
        self._here = [one for one in functions if one not in self._remote]
        self._loop = Loop()
        self._done: list[tuple[Hashable, Scores | ShoalError]] = []
        self._asked: dict[int, _Asked] = {}
        self._next_job = 0
        self._link: Link | None = None
        self._heard = self._moved = time.monotonic()  # the pool's last word, and the last batch that came back
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
               completion_ids: Sequence[Sequence[Sequence[int]]], step: int, on_error: Policy | None = None,
               trial: bool = False) -> None:
        """Queues P groups (texts[P][G]) under a ticket; returns at once. `on_error` stands in for `reward.on_error`; a
        `trial` ends with the first completion that takes too long: the later ones are NaN.

        Raises ShoalError for a column that cannot be sent to another process, and once the workers have ended."""
        if self._remote and self._link is None:
            raise ShoalError("the reward workers have ended, so nothing more can be judged: start or resume the run "
                             "again")
        policy = on_error or self.section.on_error
        prompts = [example.prompt for example in examples]
        batch = Batch.of(examples, prompts, texts, completion_ids, trainer_state(step, self.max_steps))
        asked = _Asked(ticket, batch, call_here(self._here, batch, self._loop, policy), policy)
        if self._link is None:
            self._finish(asked)
            return
        body = _sendable(batch)
        job = self._next_job
        self._next_job += 1
        if not self._asked:
            self._moved = time.monotonic()
        self._asked[job] = asked
        try:
            self._link.send({"job": job, "step": step, "size": len(batch), "on_error": policy, "trial": trial}, body)
            self._link.drain(_SILENT_SECONDS)
        except ConnectionError:
            raise self._lost() from None
        except TimeoutError:
            raise self._stuck(_SILENT_SECONDS) from None

    def collect(self, wait: bool = False) -> list[tuple[Hashable, Scores]]:
        """What is judged by now, each ticket once; with `wait`, not before one is, unless nothing is queued.

        A long wait is told of on stderr. Raises ShoalError, naming function, step and example, where `reward.on_error`
        is `error` and one failed, and where the pool is stuck."""
        self._hear()
        if wait:
            self._wait()
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

    def _wait(self) -> None:
        """Until a batch is judged, if one is queued. The pool is stuck where it says nothing, or has taken much longer
        than limits allow."""
        begun = time.monotonic()
        telling = begun + _TOLD_SECONDS
        while self._asked and not self._done and self._link is not None:
            silent, late = max(self._heard, begun) + _SILENT_SECONDS, max(self._moved, begun) + self._most_seconds()
            wait_for([self._link.end], max(0.0, min(silent, late, telling) - time.monotonic()))
            self._hear()
            now = time.monotonic()
            if self._done or not self._asked:
                return
            if now >= max(self._heard, begun) + _SILENT_SECONDS or now >= late:
                raise self._stuck(now - begun)
            if now >= telling:
                print(f"waiting for rewards: {now - begun:.0f} s, {self._waiting()}; reward.timeout_seconds="
                      f"{self.section.timeout_seconds:g} is the limit of a call", file=sys.stderr, flush=True)
                telling = now + (now - begun)

    def _most_seconds(self) -> float:
        """What all that is queued may take, however its functions behave; see `pool.py`."""
        calls = sum(1 + len(asked.batch) for asked in self._asked.values()) * len(self._remote)
        return _GENEROUS * pool.most_seconds(self.section) * (1 + calls / self.section.workers)

    def _waiting(self) -> str:
        names = ", ".join(one.name for one in self._remote)
        return f"completions with {names}: {sum(len(asked.batch) for asked in self._asked.values())}"

    def _hear(self) -> None:
        """Reads what has come from the pool."""
        if self._link is None:
            return
        try:
            frames = self._link.receive()
        except EOFError:
            raise self._lost() from None
        if frames:
            self._heard = time.monotonic()
        for header, _ in frames:
            if "alive" in header:
                continue
            self._moved = self._heard
            asked = self._asked.pop(header["job"])
            for number, case in header["cases"]:
                asked.cases[self._remote[number].name] = _case(case)
            self._finish(asked)

    def _finish(self, asked: _Asked) -> None:
        """Where a function ends the run, its calls are all that there is."""
        functions = [one for one in self.functions if one.name in asked.cases]
        try:
            scores = total(functions, asked.batch, asked.cases, asked.policy, self.section.timeout_seconds)
        except ShoalError as error:
            scores = error
        self._done.append((asked.ticket, scores))

    def _lost(self) -> ShoalError:
        self.close()
        return ShoalError("the process that starts reward workers has ended, killed from outside or for want of "
                          "memory; free some, or take fewer reward.workers")

    def _stuck(self, seconds: float) -> ShoalError:
        waiting = self._waiting()
        self.close()
        return ShoalError(f"waited {seconds:.0f} s for rewards ({waiting}), but the process that starts reward workers "
                          f"is stopped or stuck; see what holds it, such as storage that does not answer, and start or "
                          f"resume the run again")


@dataclass
class _Asked:
    """Groups that are being judged."""

    ticket: Hashable
    batch: Batch
    cases: dict[str, Case]  # by function, as they come
    policy: Policy


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
    """Shuts the link down, at which the pool's process ends by itself, and waits for that. Other processes, such as a
    younger judge's pool, may hold a copy of the link: closing it alone would not be seen."""
    if os.getpid() != owner:  # a copy in a process that someone else forked
        link.end.close()
        return
    with contextlib.suppress(OSError):
        link.end.shutdown(socket.SHUT_RDWR)
    link.end.close()
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        os.kill(pid, signal.SIGCONT)  # should it be stopped
        if not _ends(pid, _END_SECONDS):
            os.kill(pid, signal.SIGKILL)
            _ends(pid, 1.0)  # one that waits for a device cannot end before that answers


def _ends(pid: int, seconds: float) -> bool:
    """Whether a child ends within some time."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(0.05, 2 * pause)
    return True
