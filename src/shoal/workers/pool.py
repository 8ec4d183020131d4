"""Worker processes that are ended at their limits of time and memory, and the process that
supervises them.

    trainer --(call)--> supervisor --(call)--> worker --(reply)--> supervisor --(reply)--> trainer

A call has a number, which its reply repeats: a worker that answers another call is ended. A process
that user code forks never answers: it ends once the call is over there (`ends_copies`).

The supervisor is forked once from the process that trains, and runs one event loop without further
threads. It never runs what it is asked to call. So a worker that was killed is replaced by a fork
of a clean process, and limits hold while the trainer is busy. Where the trainer ends, however it
ends, the supervisor ends its workers and itself.

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
    ends_copies,
    fork,
    frame,
    limit_memory,
    live,
    prctl,
    work_together,
)

START_SECONDS = 30.0
"""What a worker may take to start."""
GRACE_SECONDS = 1.0
"""What an event loop may take, beyond the limit, to end a call by itself."""
EXIT_SECONDS = 0.5
"""How long to wait for a worker that has been killed, or has closed its socket, to be gone."""
MOST_BYTES = 1 << 30
"""Of a frame: a worker may write anything into its socket."""
SILENT_SECONDS = 120.0
"""After how long without a word the supervisor counts as stuck: while it has calls it sends
something each second."""
DIED_AS_IT_STARTED = {"kind": "died", "text": "as it started"}
"""The reply to a call whose worker could not start."""
LOST_SUPERVISOR = "the process that starts workers was killed, by a call or from outside"
END_SECONDS = 1.5
"""What the supervisor may take to end its workers and itself, before it is killed."""


@dataclass(frozen=True)
class Limits:
    """What the workers of a pool may take."""

    num_workers: int
    seconds: float  # of one call
    memory_bytes: int = 0  # beyond what a worker starts with, on Linux; 0 for no limit

    def most_seconds(self, num_calls: int) -> float:
        """What so many calls may take at most, the start and the end of their workers included,
        and one call before them that is still under way."""
        a_call = self.seconds + START_SECONDS + GRACE_SECONDS + 2 * EXIT_SECONDS
        return a_call * (1 + num_calls / self.num_workers)


class WorkersLost(Exception):
    """The supervisor of a pool answers no more, and no other takes its place: it has ended, or it
    is stopped or stuck. Only closing the pool is left."""

    def __init__(self, has_ended: bool, seconds: float = 0.0) -> None:
        super().__init__("ended" if has_ended else f"stopped or stuck for {seconds:.0f} s")
        self.has_ended = has_ended
        self.seconds = seconds  # how long it has sent or read nothing, where it has not ended


class WorkerPool:
    """Calls a handler in worker processes; any function can be one, since processes are forked.

    >>> pool.submit(7, {"question": "..."}, b"...")
    >>> pool.receive(seconds=1.0)
    [(7, {"answer": ...})]

    A reply is what the handler returned, or `{"kind": "timed out"}`, `{"kind": "died", "text":
    "SIGSEGV"}` or `{"kind": "cancelled"}`. With `together`, calls share the event loop of one more
    worker, which `handle_async` serves on it; where a call blocks that loop, the worker is ended
    and each of its calls is made again in a worker of its own, and the reply says `alone`.

    With `restarts`, a supervisor that a call has killed is replaced, and each call that it had is
    replied to as one that died.

    A call with a `seat`, a number, goes to the one worker of that seat, which starts with its first
    call and is kept: what the worker holds in memory is there in the next call. Its calls are never
    made again elsewhere.
    """

    def __init__(
        self,
        handle: Handler,
        limits: Limits,
        handle_async: AsyncHandler | None = None,
        prepare: Callable[[], Any] | None = None,
        enter: Callable[[socket.socket], Any] | None = None,
        restarts: bool = False,
    ) -> None:
        """`prepare` is called in the supervisor, before it forks the first worker; `enter` stands
        in for the supervisor's life, and becomes it elsewhere with its end of the socket. With
        `restarts`, another supervisor takes the place of one that a call has killed."""
        trainer = os.getpid()

        def supervise(end: socket.socket) -> None:
            if enter is not None:
                enter(end)
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
        """When the supervisor last sent something, or was last asked."""
        self.close = weakref.finalize(self, _end_supervisor, self._supervisor, self._trainer)
        """Ends the supervisor, its workers and everything that they started; a second time does
        nothing."""

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return self._supervisor.pid

    def _replies_of_lost(self) -> list[tuple[int, Header]]:
        """Starts another supervisor, and fails the calls that the one before had: any of them may
        have killed it."""
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
        """Sends a call; `seconds` stands in for the limit of the pool. WorkersLost where the
        supervisor has ended and none takes its place, or does not read."""
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
        """Cancels those of the calls that no worker has begun; the others are replied to as
        usual. Raises as `submit`."""
        self._send({"cancel": list(calls)})

    def _send(self, header: Header, body: bytes = b"") -> None:
        try:
            self._channel.send(header, body)
        except ConnectionError:
            if not self._restarts:
                raise WorkersLost(has_ended=True) from None
            # `receive` finds the end too, and fails the calls.
        except TimeoutError:
            raise WorkersLost(has_ended=False, seconds=process.SEND_SECONDS) from None

    def wait(self, seconds: float, since: float = 0.0) -> list[tuple[int, Header]]:
        """`receive`, with WorkersLost also where the supervisor has calls and has sent nothing for
        `SILENT_SECONDS`; silence counts from `since`, by time.monotonic, at the earliest."""
        silent_at = max(self.heard, since) + SILENT_SECONDS
        left = max(0.0, silent_at - time.monotonic())
        replies = self.receive(min(seconds, left) if self._open else seconds)
        silence = time.monotonic() - max(self.heard, since)
        if self._open and silence >= SILENT_SECONDS:
            raise WorkersLost(has_ended=False, seconds=silence)
        return replies

    def receive(self, seconds: float = 0.0) -> list[tuple[int, Header]]:
        """The replies that have arrived, waiting some seconds for a frame. WorkersLost once the
        supervisor has ended and none takes its place: where it does not restart, or ended as it
        started."""
        try:
            frames = self._channel.receive(seconds)
        except EOFError:
            if not (self._restarts and self._is_ready):
                raise WorkersLost(has_ended=True) from None
            return self._replies_of_lost()
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
    """A supervisor's process, and the trainer's end of the socket to it."""

    pid: int
    end: socket.socket


def _start_supervisor(supervise: Callable[[socket.socket], Any]) -> _RunningSupervisor:
    sys.stdout.flush()
    sys.stderr.flush()
    here, there = socket.socketpair()
    pid = fork()
    if pid == 0:
        here.close()
        live(lambda: supervise(there))
    there.close()
    return _RunningSupervisor(pid, here)


def _end_supervisor(supervisor: _RunningSupervisor, owner: int) -> None:
    """Shuts the socket down, upon which the supervisor ends by itself, and waits for that. Another
    process, such as the supervisor of a younger pool, may hold a copy of the socket: closing it
    alone would not be seen."""
    pid, end = supervisor.pid, supervisor.end
    if os.getpid() != owner:  # a copy in a process that someone else forked
        end.close()
        return
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)  # should it be stopped
        # One that waits for a device cannot end before that answers.
        for seconds, number in ((END_SECONDS, 0), (EXIT_SECONDS, signal.SIGKILL)):
            os.kill(pid, number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if _reaped(pid) is not None:
                    return
                time.sleep(0.002)


@dataclass(eq=False)
class _Call:
    id: int
    together: bool
    seat: int
    seconds: float
    frame: bytes


@dataclass(eq=False)
class _Worker:
    pid: int
    # Of stateless calls: 0 for those that share an event loop, None for the others.
    seat: int | None
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    # By call, on an event loop.
    waiting: dict[int, asyncio.Future[Header | None]] = field(default_factory=dict)
    heard: float = 0.0  # when it last sent something, or was asked while it had nothing to do
    status: int | None = None  # from waitpid, once it has ended
    killed: bool = False  # by the supervisor
    blocked: bool = False  # a call blocked the event loop that calls share

    def has_ended(self) -> bool:
        if self.status is None:
            self.status = _reaped(self.pid)
        return self.status is not None

    def describe_end(self) -> str:
        """How the worker ended, in words."""
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
    """The process that gives calls to workers, at most `num_workers` at a time, and ends workers at
    their limits."""

    def __init__(
        self,
        trainer_end: socket.socket,
        handle: Handler,
        handle_async: AsyncHandler | None,
        limits: Limits,
        trainer: int,
    ) -> None:
        self.trainer_end = trainer_end
        self.handle = handle
        self.handle_async = handle_async
        self.limits = limits
        self.trainer = trainer
        self.queue: deque[_Call] = deque()
        self.num_open = 0  # calls that are not replied to
        self.busy = 0  # workers with a call, or about to start for one
        self.ending = False
        self.ends = {trainer_end}  # of sockets, that no worker may hold
        self.workers: list[_Worker] = []
        # The last one to become free is used first: it may have things in its memory.
        self.free: list[_Worker] = []
        # Workers that are kept; 0: of stateless calls on one loop.
        self.seats: dict[int, asyncio.Task[_Worker]] = {}
        self.pids: set[int] = set()  # of workers that are not reaped, ended ones too
        # Killed, but not gone: such as those that wait for a device.
        self.unreaped: set[int] = set()
        self.tasks: set[asyncio.Task[Any]] = set()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        """Until the trainer closes its end or is gone."""
        reader, self.writer = await asyncio.open_connection(sock=self.trainer_end, limit=1 << 24)
        self._send({"ready": True})
        pulse = self._start(self._pulse(reader))
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
                    self._start(self._serve_together(call))
                elif call.seat:
                    self._start(self._serve_seat(call))
                else:
                    self.queue.append(call)
                    self._dispatch()
        finally:
            self.ending = True
            pulse.cancel()
            for worker in self.workers:
                _kill_group(worker.pid)
            ends = [self._end_worker(worker) for worker in self.workers]
            await asyncio.gather(*ends)
            if self.tasks:
                await asyncio.wait(self.tasks, timeout=EXIT_SECONDS)
            await self._end_orphans()

    def _start(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _pulse(self, reader: asyncio.StreamReader) -> None:
        """Each second: ends with the trainer, sends a sign of life, and notices workers that have
        ended."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            if os.getppid() != self.trainer:
                # Another process may hold the trainer's end of the socket open.
                reader.feed_eof()
            if self.num_open:
                self._send({"alive": True})
            for worker in self.workers:  # a process that it forked may hold its socket open
                if worker.status is None and worker.has_ended():
                    loop.call_later(0.1, worker.reader.feed_eof)
            for pid in list(self.unreaped):
                if _reaped(pid) is not None:
                    self.unreaped.discard(pid)

    def _cancel(self, calls: set[int]) -> None:
        for call in [call for call in self.queue if call.id in calls]:
            self.queue.remove(call)
            self._reply(call, {"kind": "cancelled"})

    def _reply(self, call: _Call, reply: Header) -> None:
        self.num_open -= 1
        self._send({"call": call.id, "reply": reply})

    def _send(self, header: Header) -> None:
        if not self.writer.is_closing():  # a trainer that gave up reads no more
            self.writer.write(frame(header))

    def _dispatch(self) -> None:
        while self.queue and self.busy < self.limits.num_workers and not self.ending:
            self.busy += 1
            self._start(self._serve(self.queue.popleft()))

    async def _serve(self, call: _Call) -> None:
        """One call on a worker of its own for that time."""
        while self.free and self.free[-1].has_ended():
            # Killed from outside while it had nothing to do.
            await self._end_worker(self.free[-1])
        free_worker = self.free.pop() if self.free else None
        reply, worker = await self._ask(free_worker, call)
        if worker in self.workers:
            self.free.append(worker)
        if call.together:
            reply = {**reply, "alone": True}
        self._reply(call, reply)
        self.busy -= 1
        self._dispatch()

    async def _serve_seat(self, call: _Call) -> None:
        """One call on the worker of its seat, which has one at a time."""
        worker = await self._seated(call)
        if worker is None:
            self._reply(call, DIED_AS_IT_STARTED)
            return
        reply, _ = await self._ask(worker, call)
        self._reply(call, reply)

    async def _ask(self, worker: _Worker | None, call: _Call) -> tuple[Header, _Worker | None]:
        """The reply to a call, and its worker, a new one where none is given; it is ended at its
        limits."""
        try:
            if worker is None:
                worker = await self._spawn()
            worker.writer.write(call.frame)
            async with asyncio.timeout(call.seconds):
                header, _ = await _read_frame(worker.reader)
                answered, reply = _reply_of(header)
            if answered != call.id:
                # Of an earlier call, or written by something that the worker started.
                raise ValueError
            if reply.pop("spent", False):
                # What it holds may leave too little memory for the next call.
                await self._end_worker(worker)
        except TimeoutError:
            reply = {"kind": "timed out"}
            if worker is not None:
                await self._end_worker(worker)
        except (EOFError, ConnectionError, ValueError, KeyError):
            # It is going, or wrote into its socket.
            if worker is None:
                return DIED_AS_IT_STARTED, None
            await self._end_worker(worker, wait=True)
            reply = {"kind": "died", "text": worker.describe_end()}
        return reply, worker

    async def _seated(self, call: _Call) -> _Worker | None:
        """The worker of a call's seat; None where it cannot start."""
        for _ in range(2):
            if call.seat not in self.seats:
                self.seats[call.seat] = self._start(self._spawn(call.seat, call.together))
            try:
                worker = await asyncio.shield(self.seats[call.seat])
            except (TimeoutError, EOFError, ConnectionError):
                break
            if not worker.has_ended():
                return worker
            await self._end_worker(worker)  # killed from outside while it had nothing to do
        self.seats.pop(call.seat, None)
        return None

    async def _serve_together(self, call: _Call) -> None:
        """One call on the event loop that calls share. The worker ends a call at its limit by
        itself; where it sends nothing for longer, a call blocks its loop. Then each call is made
        again alone, but those of a seat."""
        worker = await self._seated(call)
        reply = None
        if worker in self.workers:
            reply = await self._reply_of_shared(worker, call)
        if reply is not None:
            self._reply(call, reply)
        elif not call.seat:
            self.queue.append(call)
            self._dispatch()
        elif worker is None:
            self._reply(call, DIED_AS_IT_STARTED)
        else:
            await _gone(worker.has_ended)
            self._reply(call, {"kind": "died", "text": worker.describe_end()})

    async def _reply_of_shared(self, worker: _Worker, call: _Call) -> Header | None:
        """The reply to a call by a worker whose event loop calls share; None where it ended, also
        here because a call blocks its loop."""
        if not worker.waiting:
            worker.heard = time.monotonic()
        future: asyncio.Future[Header | None] = asyncio.get_running_loop().create_future()
        worker.waiting[call.id] = future
        worker.writer.write(call.frame)
        limit = call.seconds + GRACE_SECONDS
        last = math.inf
        if call.seat:  # it may wait for one that blocks the loop
            last = time.monotonic() + 3 * limit
        while not future.done():
            seconds_left = min(worker.heard + limit, last) - time.monotonic()
            if seconds_left <= 0:
                worker.blocked = True
                await self._end_worker(worker)
                return None
            await asyncio.wait([future], timeout=seconds_left)
        return future.result()

    async def _read_together(self, worker: _Worker) -> None:
        """Gives the replies of the shared worker to those who wait, until it ends."""
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
        """A worker that has started; TimeoutError where it takes too long, EOFError where it ends
        first."""
        here, there = socket.socketpair()
        self.ends = {end for end in self.ends if end.fileno() >= 0}
        self.ends.add(here)
        supervisor = os.getpid()
        pid = fork()
        if pid == 0:
            for end in self.ends:  # of workers that are about to start, too
                with contextlib.suppress(OSError):
                    os.close(end.fileno())
            live(lambda: self._work(there, supervisor, together, seat))
        self.pids.add(pid)
        there.close()
        reader, writer = await asyncio.open_connection(sock=here, limit=1 << 24)
        worker = _Worker(pid, seat, reader, writer)
        self.workers.append(worker)
        try:
            async with asyncio.timeout(START_SECONDS):
                await _read_frame(reader)
        except (TimeoutError, EOFError, ConnectionError):
            await self._end_worker(worker)
            raise
        if together:
            self._start(self._read_together(worker))
        return worker

    def _work(self, end: socket.socket, supervisor: int, together: bool, seat: int | None) -> None:
        """The life of a worker."""
        prctl(KILL_WITH_PARENT, signal.SIGKILL)
        limit_memory(self.limits.memory_bytes)
        if os.getppid() != supervisor:
            return
        channel = Channel(end)
        # Else what a call forks holds, and may spoil, the socket.
        os.register_at_fork(after_in_child=end.close)
        channel.send({"ready": True})
        if together:
            assert self.handle_async is not None
            alarm = self.limits.seconds if seat else 0.0
            asyncio.run(work_together(channel, self.handle_async, alarm))
            return
        while True:
            for header, body in channel.receive():
                with ends_copies():
                    reply = self.handle(header["asked"], body)
                sys.stdout.flush()
                channel.send({"call": header["call"], "reply": reply})

    async def _end_worker(self, worker: _Worker, wait: bool = False) -> None:
        """Ends a worker and everything that it started; with `wait` it may end by itself first, so
        that its status says how it did."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        if worker in self.free:
            self.free.remove(worker)
        if worker.seat is not None:
            self.seats.pop(worker.seat, None)
        for future in worker.waiting.values():
            if not future.done():
                future.set_result(None)
        worker.writer.transport.abort()
        if wait:
            await _gone(worker.has_ended)
        _kill_group(worker.pid)
        if not worker.has_ended():
            worker.killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            if not await _gone(worker.has_ended):
                self.unreaped.add(worker.pid)
        self.pids.discard(worker.pid)
        await self._end_orphans()

    async def _end_orphans(self) -> None:
        """On Linux, processes that a worker started in sessions of their own are now children of
        this one."""
        while True:
            orphans = children() - self.pids - self.unreaped
            if not orphans:
                return
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                if not await _gone(functools.partial(_is_reaped, pid)):
                    self.unreaped.add(pid)


async def _read_frame(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    """ValueError or EOFError for what is no frame."""
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
    """The number of the call that a worker answers, and its reply. ValueError for what is none."""
    call, reply = header.get("call"), header.get("reply")
    if not (isinstance(call, int) and isinstance(reply, dict)):
        raise ValueError
    return call, reply


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def _gone(is_gone: Callable[[], bool]) -> bool:
    """True if a process is gone within `EXIT_SECONDS`; never waits longer, whatever holds it."""
    deadline = time.monotonic() + EXIT_SECONDS
    while not is_gone():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.001)
    return True


def _reaped(pid: int) -> int | None:
    """The status of a child that has ended; 0 where another call got it."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if ended else None


def _is_reaped(pid: int) -> bool:
    return _reaped(pid) is not None
