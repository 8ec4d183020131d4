"""Worker processes that are ended if they exceed their limits of time and memory, and the process
that supervises them.

    trainer --(call)--> supervisor --(call)--> worker --(reply)--> supervisor --(reply)--> trainer

Each call has a number, which its reply repeats: a worker that answers another call than it was sent
is ended. A process that user code forks never answers: it ends once the call that it runs is over
(`exit_forked_copies`).

The supervisor is forked once from the process that trains, and runs one event loop without further
threads. It never runs the handler that workers call. So a worker that was killed is replaced by a
fork of a clean process, and limits hold while the trainer is busy. If the trainer ends, for
whatever reason, the supervisor ends its workers and itself.

A frame is a header in JSON and a body of bytes. Replies are JSON alone: nothing that a worker sends
is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import signal
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.workers import process
from shoal.workers.process import (
    KILL_WITH_PARENT,
    PULSE_SECONDS,
    SIZES,
    AsyncHandler,
    Channel,
    Handler,
    Header,
    children,
    exit_forked_copies,
    fork,
    frame,
    limit_memory,
    prctl,
    run_child,
    run_shared_worker,
)

START_SECONDS = 30.0
"""The time that a worker may take to start."""
GRACE_SECONDS = 1.0
"""The time, beyond a call's limit, that a shared event loop may take to end the call by itself."""
EXIT_SECONDS = 0.5
"""How long to wait for a worker that has been killed, or has closed its socket, to be gone."""
MOST_BYTES = 1 << 30
"""The largest frame that is read: a worker may write anything into its socket."""
SILENT_SECONDS = 120.0
"""A supervisor with open calls that sends nothing for this time counts as stuck: it should send a
sign of life each second."""
DIED_AS_IT_STARTED = {"kind": "died", "text": "as it started"}
"""The reply to a call whose worker could not start."""
LOST_SUPERVISOR = "the process that starts workers was killed, by a call or from outside"
END_SECONDS = 1.5
"""The time that the supervisor may take to end its workers and itself, before it is killed."""


@dataclass(frozen=True)
class Limits:
    """The limits of a pool: how many workers, and what one call may take."""

    num_workers: int
    seconds: float  # of one call
    memory_bytes: int = 0  # beyond what a worker starts with; Linux only; 0: no limit

    def most_seconds(self, num_calls: int) -> float:
        """Returns how long this many calls may take at most, in seconds: with the start and the end
        of their workers, and one earlier call that is still running. The calls run `num_workers` at
        a time; a part of a round counts as that part, not as a whole round."""
        a_call = self.seconds + START_SECONDS + GRACE_SECONDS + 2 * EXIT_SECONDS
        # 1: the earlier call that is still running.
        return a_call * (1 + num_calls / self.num_workers)


class WorkersLost(Exception):
    """Raised if the supervisor of a pool no longer answers and is not replaced: it has ended, or it
    is stopped or stuck. Such a pool can only be closed."""

    def __init__(self, has_ended: bool, seconds: float = 0.0) -> None:
        """`seconds`: how long the supervisor has sent or read nothing; 0 if it has ended."""
        super().__init__("ended" if has_ended else f"stopped or stuck for {seconds:.0f} s")
        self.has_ended = has_ended
        self.seconds = seconds  # how long it has sent or read nothing; 0 if it has ended


class WorkerPool:
    """Calls a handler in forked worker processes, so the handler can be any function, also a
    closure.

    >>> pool.submit(7, {"question": "..."}, b"...")
    >>> pool.receive(seconds=1.0)
    [(7, {"answer": ...})]

    A reply is what the handler returned, or `{"kind": "timed out"}`, `{"kind": "died", "text":
    "SIGSEGV"}` or `{"kind": "cancelled"}`.

    Calls with `together` run concurrently on the event loop of one more worker, by `handle_async`.
    If a call blocks that loop, the worker is ended, and each of its calls is made again in a worker
    that runs nothing else; the reply then has `alone`.

    With `restarts`, a supervisor that a call has killed is replaced, and each call that was open is
    answered as one that died.

    A call with a `seat` (a number, not 0) goes to the one worker of that seat, which starts with
    its first call and is kept: what the worker holds in memory is still there in the next call.
    Such calls are never made again elsewhere.
    """

    def __init__(
        self,
        handle: Handler,
        limits: Limits,
        handle_async: AsyncHandler | None = None,
        prepare: Callable[[], Any] | None = None,
        exec_supervisor: Callable[[socket.socket], Any] | None = None,
        restarts: bool = False,
    ) -> None:
        """Forks the supervisor.

        `handle` is called in a worker with (header, body) of a call and returns the reply, a dict
        that JSON can hold. `handle_async` does the same for calls with `together`; None if there
        are none. `prepare` is called in the supervisor before it forks the first worker.
        `exec_supervisor` replaces all that (`handle`, `handle_async`, `prepare` and `limits` are
        then not used): it is called in the forked process with the socket to the trainer, and
        executes a program that runs a supervisor, such as one in a sandbox. With `restarts`, a
        supervisor that a call has killed is replaced. Does not wait for the supervisor to start.
        Whoever makes a pool calls `close`; else the supervisor ends once the pool is collected or
        this process ends.
        """
        trainer = os.getpid()

        def supervise(end: socket.socket) -> None:
            """Runs the supervisor in the forked process. `end` is its end of the socket to the
            trainer."""
            if exec_supervisor is not None:
                exec_supervisor(end)
            else:
                supervisor = Supervisor(end, handle, handle_async, limits, trainer)
                if prepare is not None:
                    prepare()
                supervisor.run()

        self._supervise = supervise
        self._trainer = trainer
        self._restarts = restarts
        self._open: set[int] = set()  # calls without a reply
        self._is_ready = False  # the supervisor has begun its work
        self._supervisor = _start_supervisor(supervise)
        self._channel = Channel(self._supervisor.end)
        self.heard = time.monotonic()
        """When the supervisor last sent something or was last sent a call, by time.monotonic."""
        self.close = weakref.finalize(self, _end_supervisor, self._supervisor, self._trainer)
        """Ends the supervisor, its workers and everything that they started; a second time does
        nothing."""

    @property
    def pid(self) -> int:
        """The process id of the supervisor."""
        return self._supervisor.pid

    def _restart(self) -> list[tuple[int, Header]]:
        """Starts another supervisor after one has ended. Returns a reply "died" for each call that
        was open, because any of these calls may have killed it. No call is made again. `pid` is
        then that of the new supervisor."""
        lost = sorted(self._open)
        self._open.clear()
        _end_supervisor(self._supervisor, self._trainer)
        started = _start_supervisor(self._supervise)
        # `close` holds the record, so it is changed and not replaced.
        self._supervisor.pid = started.pid
        self._supervisor.end = started.end
        self._channel = Channel(started.end)
        self._is_ready = False
        self.heard = time.monotonic()
        return [(call, {"kind": "died", "text": LOST_SUPERVISOR}) for call in lost]

    def submit(
        self,
        call: int,
        header: Header,
        body: bytes = b"",
        together: bool = False,
        seat: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Sends a call to the supervisor; `receive` returns its reply.

        `call` is a number that the reply repeats; `header` and `body` are for the handler. With
        `together` the call runs on the event loop that such calls share, with a `seat` (0: none) on
        the one worker of that seat, else on any worker that is free, one call at a time. `seconds`
        is the time limit of this call (0: that of the pool). WorkersLost if the supervisor has
        ended and is not replaced, or does not read. Does not wait for the reply. No open call may
        have the same number. With `restarts` nothing is raised if the supervisor has ended: the
        next `receive` replies "died".
        """
        # Silence counts from the latest call, since a supervisor without open calls sends nothing.
        self.heard = time.monotonic()
        envelope = {
            "call": call,
            "together": together,
            "seat": seat,
            "seconds": seconds,
            "asked": header,
        }
        self._send(envelope, body)
        self._open.add(call)

    def cancel(self, calls: Iterable[int]) -> None:
        """Cancels calls. A call that no worker has begun gets the reply "cancelled"; any other call
        continues and gets its usual reply. A call with `together` or a `seat` counts as begun at
        once, unless it waits to be made again alone. Numbers of no open call are ignored.
        WorkersLost if the supervisor has ended and is not replaced, or does not read. Returns
        before the replies arrive."""
        self._send({"cancel": list(calls)})

    def _send(self, header: Header, body: bytes = b"") -> None:
        """Sends one frame to the supervisor; WorkersLost if the supervisor has ended, or reads
        nothing for `SEND_SECONDS`. With `restarts`, a supervisor that has ended is no error here:
        `receive` replaces it."""
        try:
            self._channel.send(header, body)
        except ConnectionError:
            if not self._restarts:
                raise WorkersLost(has_ended=True) from None
            # The next `receive` notices the end too; it restarts the supervisor and answers the
            # open calls.
        except TimeoutError:
            raise WorkersLost(has_ended=False, seconds=process.SEND_SECONDS) from None

    def wait(self, seconds: float, since: float = 0.0) -> list[tuple[int, Header]]:
        """Returns (call, reply) for all replies that have arrived, like `receive`, but also raises
        WorkersLost if the supervisor has open calls and has sent nothing for `SILENT_SECONDS`.
        Silence before `since` (a time of time.monotonic) does not count. It waits at most
        `seconds`. Without open calls silence never counts."""
        silent_at = max(self.heard, since) + SILENT_SECONDS
        left = max(0.0, silent_at - time.monotonic())
        # Not longer than to the time at which the supervisor counts as stuck.
        replies = self.receive(min(seconds, left) if self._open else seconds)
        silence = time.monotonic() - max(self.heard, since)
        if self._open and silence >= SILENT_SECONDS:
            raise WorkersLost(has_ended=False, seconds=silence)
        return replies

    def receive(self, seconds: float = 0.0) -> list[tuple[int, Header]]:
        """Returns (call, reply) for all replies that have arrived; waits at most `seconds` for the
        first frame. It may return [] earlier, because a frame can be a sign of life without a
        reply. If the supervisor has ended it is replaced, and its open calls count as died; without
        `restarts`, or if it ended before it was ready, raises WorkersLost. After a replacement
        returns the reply "died" for each call that was open."""
        try:
            frames = self._channel.receive(seconds)
        except EOFError:
            if not (self._restarts and self._is_ready):
                raise WorkersLost(has_ended=True) from None
            return self._restart()
        if frames:
            self.heard = time.monotonic()
            self._is_ready = True
        replies = []
        for header, _ in frames:
            if "call" in header:
                replies.append((header["call"], header["reply"]))
                self._open.discard(header["call"])
        return replies


@dataclass
class _RunningSupervisor:
    """The process of a supervisor, and the trainer's end of the socket to it."""

    pid: int
    end: socket.socket


def _start_supervisor(supervise: Callable[[socket.socket], Any]) -> _RunningSupervisor:
    """Forks a process that runs `supervise` on one end of a new socket pair. Returns its id and
    the other end."""
    # What is buffered here would else be written by the child too.
    sys.stdout.flush()
    sys.stderr.flush()
    here, there = socket.socketpair()
    pid = fork()
    if pid == 0:
        here.close()
        # The child never gets beyond this line.
        run_child(lambda: supervise(there))
    there.close()
    return _RunningSupervisor(pid, here)


def _end_supervisor(supervisor: _RunningSupervisor, owner: int) -> None:
    """Ends a supervisor and waits until its process is gone. Shuts the socket down, so that the
    supervisor ends by itself, and kills it if it has not ended after `END_SECONDS`. If it is still
    there `EXIT_SECONDS` later, returns all the same. In a fork of the process `owner`, only closes
    the copy of the socket."""
    pid, end = supervisor.pid, supervisor.end
    if os.getpid() != owner:  # this process is a fork of the owner, made by somebody else
        end.close()
        return
    # Closing it would not suffice: another process, such as the supervisor of a younger pool, may
    # hold a copy.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)  # in case it is stopped
        # Signal 0 sends nothing: the supervisor gets END_SECONDS to end by itself. A process that
        # waits for a device cannot end before the device answers.
        for seconds, signal_number in ((END_SECONDS, 0), (EXIT_SECONDS, signal.SIGKILL)):
            os.kill(pid, signal_number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if _reap(pid) is not None:
                    return
                time.sleep(0.002)


@dataclass(eq=False)
class _Call:
    """A call in the supervisor, with the frame that its worker is sent. `WorkerPool` explains
    `together` and `seat`."""

    id: int
    together: bool
    seat: int
    seconds: float
    frame: bytes


@dataclass(eq=False)
class _Worker:
    """A worker process as the supervisor sees it."""

    pid: int
    # 0: the worker whose event loop stateless calls share; None: a worker for one stateless call at
    # a time; else the number of a seat.
    seat: int | None
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    # Number of a call on a shared event loop -> its reply to come.
    waiting: dict[int, asyncio.Future[Header | None]] = field(default_factory=dict)
    heard: float = 0.0  # when it last sent something, or got a call while idle
    status: int | None = None  # from waitpid, once it has ended
    killed: bool = False  # by the supervisor
    blocked: bool = False  # a call blocked the event loop that calls share

    def has_ended(self) -> bool:
        """True if the process has ended; reaps it and keeps its status."""
        if self.status is None:
            self.status = _reap(self.pid)
        return self.status is not None

    def describe_end(self) -> str:
        """Returns how the worker ended as a text: `exit code 1`, `SIGSEGV`, or a sentence if the
        supervisor killed it. A worker that `has_ended` has not seen to end reads as `exit code 0`.
        SIGKILL has a hint: it may be for want of memory."""
        status = self.status or 0
        if self.blocked:
            return "a call blocked the event loop that it shares"
        if self.killed:
            return "it closed or spoilt its socket to the supervisor"
        if os.WIFEXITED(status):
            return f"exit code {os.WEXITSTATUS(status)}"
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            return "SIGKILL, out of memory?"
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"


class Supervisor:
    """Runs in the supervising process: gives calls to workers, at most `num_workers` at a time
    (besides those of seats and of the shared event loop), and ends workers that exceed their
    limits."""

    def __init__(
        self,
        trainer_end: socket.socket,
        handle: Handler,
        handle_async: AsyncHandler | None,
        limits: Limits,
        trainer: int,
    ) -> None:
        """`trainer_end` is this process's end of the socket to the trainer, `trainer` the trainer's
        process id. `handle` is called in a worker with (header, body) of a call and returns the
        reply, `handle_async` does the same for calls with `together` (None if there are none);
        `limits` are those of the pool. Starts no worker yet."""
        self.trainer_end = trainer_end
        self.handle = handle
        self.handle_async = handle_async
        self.limits = limits
        self.trainer = trainer
        self.queue: deque[_Call] = deque()
        self.num_open = 0  # calls that are not replied to
        self.busy = 0  # workers with a call, or about to start for one
        self.ending = False
        self.sockets = {trainer_end}  # sockets of this process, of which no worker may keep a copy
        self.workers: list[_Worker] = []
        # Idle workers. The last to become idle is used first: its caches may still be warm.
        self.free: list[_Worker] = []
        # Seat -> its worker, which is kept; seat 0 is the one event loop of stateless calls.
        self.seats: dict[int, asyncio.Task[_Worker]] = {}
        self.pids: set[int] = set()  # of all workers that are not reaped yet
        # Processes that were killed but are not gone yet, such as those that wait for a device.
        self.unreaped: set[int] = set()
        self.tasks: set[asyncio.Task[Any]] = set()

    def run(self) -> None:
        """Serves calls until the trainer closes its end of the socket or is gone; then ends all
        workers. It always ends with an exception, EOFError or ConnectionError, which `run_child`
        takes for the usual end."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        """Serves calls until the trainer closes its end of the socket or is gone; then ends all
        workers. It always ends with an exception, EOFError or ConnectionError, which `run_child`
        takes for the usual end."""
        # `limit` is the size of the buffer: 16 MiB.
        reader, self.writer = await asyncio.open_connection(sock=self.trainer_end, limit=1 << 24)
        self._send({"ready": True})
        pulse = self._start_task(self._pulse(reader))
        try:
            while True:
                header, body = await _read_frame(reader)
                if "cancel" in header:
                    self._cancel(set(header["cancel"]))
                    continue
                call = _Call(
                    id=header["call"],
                    together=header["together"],
                    seat=header["seat"],
                    seconds=header["seconds"] or self.limits.seconds,
                    frame=frame(header, body),
                )
                self.num_open += 1
                if call.together:
                    self._start_task(self._serve_together(call))
                elif call.seat:
                    self._start_task(self._serve_seat(call))
                else:
                    self.queue.append(call)
                    self._dispatch()
        finally:
            self.ending = True
            pulse.cancel()
            for worker in self.workers:
                # All at once, before waiting for any of them.
                _kill_group(worker.pid)
            # The list is made first, because `_end_worker` removes the worker from `self.workers`.
            ends = [self._end_worker(worker) for worker in self.workers]
            await asyncio.gather(*ends)
            if self.tasks:
                await asyncio.wait(self.tasks, timeout=EXIT_SECONDS)
            await self._end_orphans()

    def _start_task(self, coroutine: Any) -> asyncio.Task[Any]:
        """Starts a task on the event loop. Keeps a reference until it is done, since the loop keeps
        none."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _pulse(self, reader: asyncio.StreamReader) -> None:
        """Runs as long as the supervisor. Once a second: closes `reader`, so that the supervisor
        ends, if the trainer is gone; sends the trainer a sign of life if calls are open; closes the
        readers of workers that have ended; reaps processes that were killed and have ended
        since."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            if os.getppid() != self.trainer:
                # The socket may not show it: another process may hold the trainer's end open.
                reader.feed_eof()
            if self.num_open:
                self._send({"alive": True})
            for worker in self.workers:  # a child of an ended worker may hold its socket open
                if worker.status is None and worker.has_ended():
                    # Later, so that what it still wrote is read first.
                    loop.call_later(0.1, worker.reader.feed_eof)
            for pid in list(self.unreaped):
                if _reap(pid) is not None:
                    self.unreaped.discard(pid)

    def _cancel(self, calls: set[int]) -> None:
        """Replies "cancelled" to each of the calls, by number, that is still queued. Ignores all
        other numbers."""
        for call in [call for call in self.queue if call.id in calls]:
            self.queue.remove(call)
            self._reply(call, {"kind": "cancelled"})

    def _reply(self, call: _Call, reply: Header) -> None:
        """Sends the trainer the reply to a call."""
        self.num_open -= 1
        self._send({"call": call.id, "reply": reply})

    def _send(self, header: Header) -> None:
        """Sends the trainer one frame without a body, unless the trainer has closed its end."""
        if not self.writer.is_closing():  # a trainer that gave up reads no more
            self.writer.write(frame(header))

    def _dispatch(self) -> None:
        """Starts queued calls as long as fewer than `num_workers` are running. Does nothing once
        the supervisor is ending."""
        while self.queue and self.busy < self.limits.num_workers and not self.ending:
            self.busy += 1
            self._start_task(self._serve_alone(self.queue.popleft()))

    async def _serve_alone(self, call: _Call) -> None:
        """Runs one call on a worker that runs one call at a time, an idle one or a new one. Sends
        the reply and starts the next call of the queue. The reply has `alone` if the call was to
        run on a shared event loop. If no worker can start, the reply is "died", or "timed out" if
        that took too long."""
        while self.free and self.free[-1].has_ended():
            # The worker was killed from outside while it was idle.
            await self._end_worker(self.free[-1])
        free_worker = self.free.pop() if self.free else None
        reply, worker = await self._call_worker(free_worker, call)
        # Not if it was ended during the call, or never started.
        if worker in self.workers:
            self.free.append(worker)
        if call.together:
            reply = {**reply, "alone": True}
        self._reply(call, reply)
        self.busy -= 1
        self._dispatch()

    async def _serve_seat(self, call: _Call) -> None:
        """Runs one call on the worker of its seat and sends the reply. The caller submits one call
        of a seat at a time. DIED_AS_IT_STARTED if that worker cannot start."""
        worker = await self._worker_of_seat(call)
        if worker is None:
            self._reply(call, DIED_AS_IT_STARTED)
            return
        reply, _ = await self._call_worker(worker, call)
        self._reply(call, reply)

    async def _call_worker(
        self, worker: _Worker | None, call: _Call
    ) -> tuple[Header, _Worker | None]:
        """Sends a call to a worker (None: to a new one) and waits for the reply. Returns the reply
        and the worker, which is None if no worker could start.

        Ends the worker if the call exceeds its time limit (reply "timed out"), if the worker ends
        or sends anything but a reply to this call ("died"), or if the reply asks for it (`spent`).
        If a new worker ends before it is ready, the reply is DIED_AS_IT_STARTED; if it takes too
        long to start, "timed out". A worker that was ended is returned too, but is not in
        `self.workers` any more.
        """
        try:
            if worker is None:
                worker = await self._spawn()
            worker.writer.write(call.frame)
            async with asyncio.timeout(call.seconds):
                header, _ = await _read_frame(worker.reader)
                answered, reply = _reply_of(header)
            if answered != call.id:
                # An answer to an earlier call, or written by something that the worker started.
                raise ValueError
            if reply.pop("spent", False):
                # What the worker keeps may leave too little memory for the next call.
                await self._end_worker(worker)
        except TimeoutError:
            reply = {"kind": "timed out"}
            if worker is not None:
                await self._end_worker(worker)
        except (EOFError, ConnectionError, ValueError, KeyError):
            # The worker is ending, or user code wrote into its socket.
            if worker is None:
                return DIED_AS_IT_STARTED, None
            await self._end_worker(worker, wait=True)
            reply = {"kind": "died", "text": worker.describe_end()}
        return reply, worker

    async def _worker_of_seat(self, call: _Call) -> _Worker | None:
        """Returns the worker of a call's seat, and starts it if there is none or if it was killed.
        None if it cannot start."""
        for _ in range(2):  # the second time if the worker was killed while it was idle
            if call.seat not in self.seats:
                self.seats[call.seat] = self._start_task(self._spawn(call.seat, call.together))
            try:
                # Other calls of the seat may wait for the same start, so this one never ends it.
                worker = await asyncio.shield(self.seats[call.seat])
            except (TimeoutError, EOFError, ConnectionError):
                break
            if not worker.has_ended():
                return worker
            await self._end_worker(worker)  # killed from outside while it was idle
        self.seats.pop(call.seat, None)
        return None

    async def _serve_together(self, call: _Call) -> None:
        """Runs one call on the shared event loop of a worker, and sends the reply.

        The worker itself ends a call that reaches its limit. If the worker sends nothing for longer
        than that, some call blocks its loop, and the worker is ended. Then each of its calls is
        queued again for a worker that runs one call at a time; a call of a seat gets the reply
        "died" instead.
        """
        worker = await self._worker_of_seat(call)
        reply = None
        # Not if it could not start (None), or if another of its calls has ended it.
        if worker in self.workers:
            reply = await self._call_shared_worker(worker, call)
        if reply is not None:
            self._reply(call, reply)
        elif not call.seat:
            self.queue.append(call)
            self._dispatch()
        elif worker is None:
            self._reply(call, DIED_AS_IT_STARTED)
        else:
            await _wait_until(worker.has_ended)
            self._reply(call, {"kind": "died", "text": worker.describe_end()})

    async def _call_shared_worker(self, worker: _Worker, call: _Call) -> Header | None:
        """Sends a call to a worker with a shared event loop, and returns the reply. None if the
        worker ended, or was ended here because it sent nothing for longer than the call's limit and
        GRACE_SECONDS, or because a call of a seat took three times that."""
        # It was idle, so its silence begins now.
        if not worker.waiting:
            worker.heard = time.monotonic()
        future: asyncio.Future[Header | None] = asyncio.get_running_loop().create_future()
        worker.waiting[call.id] = future
        worker.writer.write(call.frame)
        limit = call.seconds + GRACE_SECONDS
        last = math.inf
        if call.seat:  # the call may wait for another one of the seat that blocks the loop
            last = time.monotonic() + 3 * limit
        while not future.done():
            seconds_left = min(worker.heard + limit, last) - time.monotonic()
            if seconds_left <= 0:
                worker.blocked = True
                await self._end_worker(worker)
                return None
            await asyncio.wait([future], timeout=seconds_left)
        return future.result()

    async def _read_shared_replies(self, worker: _Worker) -> None:
        """Reads what a worker with a shared event loop sends, and passes each reply to the task
        that waits for it. Returns once the worker has ended, or after ending it: because it sent
        something else, or because a reply asks for it (`spent`)."""
        try:
            while True:
                header, _ = await _read_frame(worker.reader)
                worker.heard = time.monotonic()
                if "alive" in header:
                    continue
                answered, reply = _reply_of(header)
                future = worker.waiting.pop(answered)
                if not future.done():
                    future.set_result(reply)
                if reply.pop("spent", False):
                    break
        except (EOFError, ConnectionError, ValueError, KeyError):
            pass
        await self._end_worker(worker, wait=bool(worker.waiting))

    # -- workers

    async def _spawn(self, seat: int | None = None, together: bool = False) -> _Worker:
        """Forks a worker and returns it once it is ready. `seat` is the number of its seat, 0 for
        the shared event loop of stateless calls, None for a worker of one stateless call at a time.
        With `together` it runs a shared event loop. TimeoutError if it takes too long to start,
        EOFError or ConnectionError if it ends before it is ready."""
        here, there = socket.socketpair()
        # Forgets sockets that were closed since.
        self.sockets = {end for end in self.sockets if end.fileno() >= 0}
        self.sockets.add(here)
        supervisor = os.getpid()
        pid = fork()
        if pid == 0:
            for end in self.sockets:  # also those of workers that are about to start
                with contextlib.suppress(OSError):
                    os.close(end.fileno())
            run_child(lambda: self._work(there, supervisor, together, seat))
        self.pids.add(pid)
        there.close()
        reader, writer = await asyncio.open_connection(sock=here, limit=1 << 24)
        worker = _Worker(pid, seat, reader, writer)
        self.workers.append(worker)
        try:
            async with asyncio.timeout(START_SECONDS):
                # Its first frame says that it is ready.
                await _read_frame(reader)
        except (TimeoutError, EOFError, ConnectionError):
            await self._end_worker(worker)
            raise
        if together:
            self._start_task(self._read_shared_replies(worker))
        return worker

    def _work(self, end: socket.socket, supervisor: int, together: bool, seat: int | None) -> None:
        """Runs in the worker process: calls the handler for each call that arrives at the socket
        `end`, until that closes; with `together` all calls concurrently on one event loop, else one
        after the other. `supervisor` is the process id of its parent. A `together` call of a `seat`
        that blocks the loop is interrupted (`run_shared_worker`). If the handler raises, this
        process ends, and the call is answered as one that died. With `together` there must be a
        `handle_async`."""
        prctl(KILL_WITH_PARENT, signal.SIGKILL)
        limit_memory(self.limits.memory_bytes)
        if os.getppid() != supervisor:
            return
        channel = Channel(end)
        # Otherwise a process that a call forks would hold the socket, and might write into it.
        os.register_at_fork(after_in_child=end.close)
        channel.send({"ready": True})
        if together:
            assert self.handle_async is not None
            alarm = self.limits.seconds if seat else 0.0
            asyncio.run(run_shared_worker(channel, self.handle_async, alarm))
            return
        while True:
            for header, body in channel.receive():
                with exit_forked_copies():
                    reply = self.handle(header["asked"], body)
                sys.stdout.flush()
                channel.send({"call": header["call"], "reply": reply})

    async def _end_worker(self, worker: _Worker, wait: bool = False) -> None:
        """Kills a worker and everything that it started, and removes it from all lists; does
        nothing if it was removed before. With `wait`, first gives the worker `EXIT_SECONDS` to end
        by itself, so that its status says how it ended."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        if worker in self.free:
            self.free.remove(worker)
        if worker.seat is not None:
            self.seats.pop(worker.seat, None)
        for future in worker.waiting.values():
            if not future.done():
                # `_call_shared_worker` then returns None.
                future.set_result(None)
        worker.writer.transport.abort()
        if wait:
            await _wait_until(worker.has_ended)
        _kill_group(worker.pid)
        if not worker.has_ended():
            worker.killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            if not await _wait_until(worker.has_ended):
                self.unreaped.add(worker.pid)
        self.pids.discard(worker.pid)
        await self._end_orphans()

    async def _end_orphans(self) -> None:
        """Kills processes that ended workers had started in sessions of their own. On Linux this
        process has adopted them; on other systems they are not found. Processes that cannot be
        killed within `EXIT_SECONDS` go to `unreaped` and are not tried again."""
        while True:
            # Again and again: killing one makes its children orphans.
            orphans = children() - self.pids - self.unreaped
            if not orphans:
                return
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                if not await _wait_until(functools.partial(_has_ended, pid)):
                    self.unreaped.add(pid)


async def _read_frame(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    """Returns header and body of the next frame. ValueError if the bytes are not a frame, EOFError
    if the stream ends before. A frame of more than MOST_BYTES is not read: ValueError."""
    header_size, body_size = SIZES.unpack(await reader.readexactly(SIZES.size))
    if header_size + body_size > MOST_BYTES:
        raise ValueError
    try:
        header = json.loads(await reader.readexactly(header_size))
    except RecursionError:
        raise ValueError from None
    if not isinstance(header, dict):
        raise ValueError
    return header, await reader.readexactly(body_size)


def _reply_of(header: Header) -> tuple[int, Header]:
    """Returns (number of the call, reply) of a frame's header from a worker. ValueError if it is
    not a reply."""
    call, reply = header.get("call"), header.get("reply")
    if not (isinstance(call, int) and isinstance(reply, dict)):
        raise ValueError
    return call, reply


def _kill_group(pid: int) -> None:
    """Kills a process and its process group. Does nothing if there is no such group, or if it
    belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def _wait_until(condition: Callable[[], bool]) -> bool:
    """Waits until `condition()` is True, and returns True; returns False if it still is not after
    `EXIT_SECONDS`."""
    deadline = time.monotonic() + EXIT_SECONDS
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.001)
    return True


def _reap(pid: int) -> int | None:
    """Reaps a child process, without waiting. Returns its status from waitpid if it has ended, None
    if it still runs, 0 if it is no child or was reaped before."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if ended else None


def _has_ended(pid: int) -> bool:
    return _reap(pid) is not None
