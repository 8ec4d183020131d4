"""The process that starts reward workers, gives them calls, and ends them at their limits.

It is forked once, early, from the process that trains; it holds the functions as they were then, has one thread, and
never calls them. So a worker that was killed is replaced by a fork of a clean process, and limits hold while the
trainer is busy. Where the trainer ends, however it ends, this process ends its workers and itself.

    trainer --(job: a batch)--> pool --(task: function, part)--> worker --(outcome)--> pool --(cases)--> trainer

What it costs at most when a function hangs on everything: for the first calls of a step, one limit; then every
completion of that step alone, `reward.workers` at a time: limit * (1 + P*G / workers).
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from shoal.config.schema import RewardSection
from shoal.rewards.call import WRONG
from shoal.rewards.worker import Link, adopt_orphans, detach, work
from shoal.types import RewardFunction

_START_SECONDS = 30.0
"""What a worker may take before its call begins: to start and to read the batch."""
_GRACE_SECONDS = 1.0
"""What an event loop may take, beyond the limit, to end a call by itself."""
_EXIT_SECONDS = 0.5
"""What a worker that has closed its link may take to end, before it is killed, and then to be gone."""
_LOOK_SECONDS = 1.0
"""How often to see whether the trainer is there, should its end of the link be held open by another process."""
_ALIVE_SECONDS = 1.0
"""How often the trainer is told that its calls are seen to."""


def most_seconds(section: RewardSection) -> float:
    """What one call may take at most, with the start and the end of its worker."""
    return section.timeout_seconds + _START_SECONDS + _GRACE_SECONDS + 2 * _EXIT_SECONDS


def start(functions: Sequence[RewardFunction], section: RewardSection) -> tuple[int, Link]:
    """Forks the pool; its process id and the link to it."""
    here, there = socket.socketpair()
    trainer = os.getpid()
    pid = fork()
    if pid == 0:
        _live(here, there, functions, section, trainer)
    there.close()
    return pid, Link(here)


def fork() -> int:
    """Forks with signals held back until the child has its own handlers, and without warnings of other threads: the
    child uses none, and touches no device."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    pid = -1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _live(here: socket.socket, there: socket.socket, functions: Sequence[RewardFunction], section: RewardSection,
          trainer: int) -> NoReturn:
    code = 1
    try:
        gc.freeze()  # nothing that the trainer made is ever taken apart here
        here.close()
        warnings.filterwarnings("ignore", message=".*fork")
        detach()
        adopt_orphans()
        Pool(Link(there), functions, section, trainer).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class _Case:
    """One function, one batch."""

    left: int = 1  # calls that are to come
    whole: dict[str, Any] | None = None
    singles: dict[int, dict[str, Any]] = field(default_factory=dict)
    done: bool = False


@dataclass
class _Job:
    id: int
    step: int
    size: int
    body: bytes
    cases: list[_Case]
    on_error: str
    trial: bool  # ends a function's calls with the first completion that takes too long


@dataclass(eq=False)
class _Task:
    """A call: a function on completions [low, high) of a job."""

    id: int
    job: _Job
    function: int
    low: int
    high: int
    together: bool  # on the event loop that `async` functions share
    deadline: float = 0.0
    begun: bool = False

    @property
    def case(self) -> _Case:
        return self.job.cases[self.function]

    @property
    def is_whole(self) -> bool:
        return self.high - self.low == self.job.size


@dataclass(eq=False)
class _Worker:
    pid: int
    link: Link
    together: bool
    tasks: dict[int, _Task] = field(default_factory=dict)
    jobs: set[int] = field(default_factory=set)  # whose batches it holds
    status: int | None = None  # as waitpid gives it, once it has ended
    killed: bool = False  # from here

    def wait(self, seconds: float = 0.0) -> bool:
        """Whether it has ended, or does within some time; its status is kept."""
        if self.status is None:
            self.status = _reap(self.pid, seconds)
        return self.status is not None


class Pool:
    """The life of the pool's process."""

    def __init__(self, link: Link, functions: Sequence[RewardFunction], section: RewardSection, trainer: int) -> None:
        self.link, self.functions, self.section, self.trainer = link, functions, section, trainer
        self.workers: list[_Worker] = []
        self.unreaped: set[int] = set()  # killed, but not gone: such as those that wait for a device
        self.said = time.monotonic()
        self.queues: dict[bool, deque[_Task]] = {True: deque(), False: deque()}  # by `together`
        self.jobs: dict[int, _Job] = {}
        self.hung: set[tuple[int, int]] = set()  # (function, step): call it for one completion at a time
        self.next_task = 0
        self.alarm, self._ring = os.pipe()
        for end in (self.alarm, self._ring):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)

    def run(self) -> None:
        """Until the trainer closes its end or is gone."""
        try:
            while os.getppid() == self.trainer:
                self._dispatch()
                ready = self._wait()
                for header, body in self.link.receive():
                    self._open(header, body)
                if self.alarm in ready:
                    os.read(self.alarm, 4096)
                ended = [worker for worker in self.workers if worker.wait()]
                for worker in [worker for worker in self.workers if worker.link.fileno() in ready or worker in ended]:
                    self._hear(worker)
                for worker in ended:
                    self._lose(worker)
                self._watch()
                self.unreaped = {pid for pid in self.unreaped if _reap(pid) is None}
                if self.jobs and not self.link.outbox and time.monotonic() >= self.said + _ALIVE_SECONDS:
                    self.said = time.monotonic()
                    self.link.send({"alive": True})
                self.link.flush()
        except (EOFError, ConnectionError):
            pass
        finally:
            for worker in list(self.workers):
                self._end(worker)

    def _wait(self) -> set[int]:
        poll = select.poll()
        poll.register(self.alarm, select.POLLIN)
        for link in (self.link, *(worker.link for worker in self.workers)):
            poll.register(link, select.POLLIN | (select.POLLOUT if link.outbox else 0))
        deadlines = [task.deadline for worker in self.workers for task in worker.tasks.values()]
        seconds = max(0.0, min([_LOOK_SECONDS, *(deadline - time.monotonic() for deadline in deadlines)]))
        ready = {number for number, _ in poll.poll(int(seconds * 1000) + 1)}
        for worker in self.workers:
            _send(worker.link)
        return ready

    # -- jobs

    def _open(self, header: dict[str, Any], body: bytes) -> None:
        cases = [_Case() for _ in self.functions]
        job = self.jobs[header["job"]] = _Job(header["job"], header["step"], header["size"], body, cases,
                                             header["on_error"], header["trial"])
        self.hung = {(function, step) for function, step in self.hung if step >= job.step}
        for number, one in enumerate(self.functions):
            if one.per_completion:
                self._enqueue_singles(job, number, one.awaits)
            else:
                self.queues[one.awaits].append(self._task(job, number, 0, job.size, one.awaits))

    def _task(self, job: _Job, function: int, low: int, high: int, together: bool) -> _Task:
        self.next_task += 1
        return _Task(self.next_task, job, function, low, high, together)

    def _enqueue_singles(self, job: _Job, function: int, together: bool, first: bool = False) -> None:
        tasks = [self._task(job, function, i, i + 1, together) for i in range(job.size)]
        job.cases[function].left = len(tasks)
        if first:
            self.queues[together].extendleft(reversed(tasks))
        else:
            self.queues[together].extend(tasks)

    def _settle(self, task: _Task, outcome: dict[str, Any]) -> None:
        """Notes what a call came to; where one of several completions failed, each is to be called alone."""
        case, kind = task.case, outcome.get("kind", "")
        if kind in ("timed out", "died"):
            self.hung.add((task.function, task.job.step))
        if case.done:
            return
        if task.is_whole and not self.functions[task.function].per_completion:
            case.whole = outcome
            if kind not in ("", WRONG) and task.job.size > 1:
                self._enqueue_singles(task.job, task.function, task.together, first=True)
                return
            case.left = 0
        else:
            case.singles[task.low] = outcome
            case.left -= 1
            if kind == "timed out" and task.job.trial:
                case.left = 0
        case.done = case.left == 0
        if kind == WRONG or (task.job.on_error == "error" and (kind or "bad" in outcome)):
            self._close(task.job, [task.function])
        elif all(one.done for one in task.job.cases):
            self._close(task.job, range(len(self.functions)))

    def _close(self, job: _Job, functions: Sequence[int]) -> None:
        """Tells the trainer what its functions came to, or the one that ends the run."""
        for case in job.cases:
            case.done = True
        del self.jobs[job.id]
        for worker in self.workers:
            if job.id in worker.jobs:
                worker.jobs.discard(job.id)
                _send(worker.link, {"forget": job.id})
        cases = {number: {"whole": job.cases[number].whole, "singles": list(job.cases[number].singles.items())}
                 for number in functions}
        self.link.send({"job": job.id, "cases": list(cases.items())})

    # -- workers

    def _dispatch(self) -> None:
        """Gives calls to workers that are free, as many as there may be; that of the event loop is always free."""
        for together, queue in self.queues.items():
            while queue:
                task = queue[0]
                if task.case.done:
                    queue.popleft()
                elif task.is_whole and task.job.size > 1 and (task.function, task.job.step) in self.hung:
                    queue.popleft()
                    self._enqueue_singles(task.job, task.function, together, first=True)
                elif worker := self._free(together):
                    self._ask(worker, queue.popleft())
                else:
                    break

    def _free(self, together: bool) -> _Worker | None:
        mine = [worker for worker in self.workers if worker.together == together]
        free = next((worker for worker in mine if together or not worker.tasks), None)
        most = 1 if together else self.section.workers
        return free or (self._spawn(together) if len(mine) < most else None)

    def _spawn(self, together: bool) -> _Worker:
        here, there = socket.socketpair()
        pool = os.getpid()
        pid = fork()
        if pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(self.alarm)
                os.close(self._ring)
                for end in (here, self.link.end, *(worker.link.end for worker in self.workers)):
                    end.close()
                work(there, self.functions, self.section.memory_gib, self.section.timeout_seconds, together, pool)
                code = 0
            except (ConnectionError, TimeoutError):
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        there.close()
        worker = _Worker(pid, Link(here), together)
        self.workers.append(worker)
        return worker

    def _ask(self, worker: _Worker, task: _Task) -> None:
        worker.tasks[task.id] = task
        self._put_off(worker)
        known = task.job.id in worker.jobs
        worker.jobs.add(task.job.id)
        _send(worker.link, {"task": task.id, "job": task.job.id, "function": task.function, "low": task.low,
                            "high": task.high}, b"" if known else task.job.body)

    def _hear(self, worker: _Worker) -> None:
        try:
            frames = worker.link.receive()
        except (EOFError, ValueError):  # it is going, or its function wrote into the link
            worker.wait(_EXIT_SECONDS)
            self._lose(worker)
            return
        for header, _ in frames:
            task = worker.tasks.get(header.get("task", -1))
            if task is None or not ("begun" in header or "outcome" in header):
                self._lose(worker)
                return
            if "begun" in header:
                grace = _GRACE_SECONDS if worker.together else 0.0
                task.deadline = time.monotonic() + self.section.timeout_seconds + grace
                task.begun = True
                continue
            del worker.tasks[task.id]
            self._put_off(worker)
            self._settle(task, header["outcome"])
            if header["spent"]:  # what it holds may leave too little for the next call
                self._lose(worker)
                return

    def _put_off(self, worker: _Worker) -> None:
        """Calls that have not begun: on an event loop each may have to wait for one before it, which has its limit."""
        for task in worker.tasks.values():
            if not task.begun:
                task.deadline = time.monotonic() + self.section.timeout_seconds + _START_SECONDS

    def _watch(self) -> None:
        """Ends the workers whose calls are over the limit."""
        now = time.monotonic()
        for worker in list(self.workers):
            if late := [task for task in worker.tasks.values() if task.deadline <= now]:
                if not worker.together:
                    worker.tasks.clear()
                self._lose(worker)
                if not worker.together:
                    self._settle(late[0], {"kind": "timed out"})

    def _lose(self, worker: _Worker) -> None:
        """Ends a worker. What it was at has died with it; of several calls on an event loop, each is made again in a
        worker of its own."""
        self._end(worker)
        tasks, worker.tasks = list(worker.tasks.values()), {}
        for task in tasks:
            if worker.together:
                task.together = False
                self.queues[False].append(task)
            else:
                self._settle(task, {"kind": "died", "text": _manner(worker)})

    def _end(self, worker: _Worker) -> None:
        """Ends a worker and everything that it started."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        worker.link.end.close()
        worker.wait()
        _kill(os.killpg, worker.pid)
        if worker.status is None:
            worker.killed = True
            _kill(os.kill, worker.pid)
            if not worker.wait(_EXIT_SECONDS):
                self.unreaped.add(worker.pid)
        self._end_orphans()

    def _end_orphans(self) -> None:
        """On Linux, processes that a worker started in sessions of their own are now children of this one."""
        listed = Path(f"/proc/self/task/{os.getpid()}/children")
        while listed.exists():
            pids = {int(pid) for pid in listed.read_text().split()} - {worker.pid for worker in self.workers}
            pids -= self.unreaped
            if not pids:
                return
            for pid in pids:
                _kill(os.kill, pid)
                if _reap(pid, _EXIT_SECONDS) is None:
                    self.unreaped.add(pid)


def _reap(pid: int, seconds: float = 0.0) -> int | None:
    """The status of a child that has ended, or does within some time; never waits longer, whatever holds it."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.001)


def _kill(how: Callable[[int, int], None], pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, signal.SIGKILL)


def _send(link: Link, header: dict[str, Any] | None = None, body: bytes = b"") -> None:
    """To a worker; that it is gone shows elsewhere."""
    with contextlib.suppress(ConnectionError):
        if header is None:
            link.flush()
        else:
            link.send(header, body)


def _manner(worker: _Worker) -> str:
    status = worker.status or 0
    if worker.killed:
        return "it closed or spoilt its link to the trainer"
    if os.WIFEXITED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"{name}, out of memory?" if number == signal.SIGKILL else name
