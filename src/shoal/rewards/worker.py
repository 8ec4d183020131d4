"""A process that calls reward functions, and the link over which processes are asked and answer.

A frame is a line of JSON, then bytes. What goes towards a worker may end in the batch as Python's own bytes; what comes
back is JSON alone, so that nothing a function did can make its caller run anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from shoal.rewards.call import Batch, Loop, Outcome, call, call_async
from shoal.types import RewardFunction

_LENGTH = struct.Struct(">Q")
_KILL_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # options of Linux's prctl
_GIB = 2**30
PATIENCE_SECONDS = 600.0
"""How long a worker waits for the pool to take its answer; then it ends."""


class Link:
    """One end of a socket between two processes, never waiting unless asked to."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.inbox, self.outbox = bytearray(), bytearray()
        end.setblocking(False)

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Queues a frame and sends what the socket takes now."""
        line = json.dumps(header).encode() + b"\n"
        self.outbox += _LENGTH.pack(len(line) + len(body)) + line + body
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes; BrokenPipeError or ConnectionError where nobody is there."""
        with contextlib.suppress(BlockingIOError):
            while self.outbox:
                del self.outbox[:self.end.send(self.outbox)]

    def drain(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits until all is sent: the other end reads without waiting. TimeoutError where it takes nothing for some
        seconds."""
        poll = select.poll()
        poll.register(self.end, select.POLLOUT)
        deadline = time.monotonic() + seconds
        while size := len(self.outbox):
            poll.poll(max(1, min(1000, int(1000 * (deadline - time.monotonic())))))
            self.flush()
            if len(self.outbox) < size:
                deadline = time.monotonic() + seconds
            elif time.monotonic() >= deadline:
                raise TimeoutError(f"sent nothing for {seconds:g} s: the other end does not read")

    def receive(self) -> list[tuple[dict[str, Any], bytes]]:
        """The frames that are complete by now; EOFError once the other end is closed and all is read."""
        ended = False
        try:
            while data := self.end.recv(1 << 20):
                self.inbox += data
            ended = True
        except BlockingIOError:
            pass
        except ConnectionError:
            ended = True
        frames = []
        while len(self.inbox) >= _LENGTH.size:
            stop = _LENGTH.size + _LENGTH.unpack_from(self.inbox)[0]
            if len(self.inbox) < stop:
                break
            line, _, body = bytes(self.inbox[_LENGTH.size:stop]).partition(b"\n")
            frames.append((json.loads(line), body))
            del self.inbox[:stop]
        if ended and not frames:
            raise EOFError
        return frames


# ---- what a forked process does first


def detach() -> None:
    """Takes a forked process out of its parent's session: no terminal, no Ctrl-C, standard streams of its own."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, lambda *_: None)  # unlike SIG_IGN it is not handed on to programs that are started
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")


def _stream(number: int, mode: str) -> Any:
    try:
        return open(number, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    except OSError:
        return open(os.devnull, mode, encoding="utf-8")


def adopt_orphans() -> None:
    """On Linux, processes whose parent ends under this one become children of it, so that it can end them."""
    _prctl(_ADOPT_ORPHANS, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _limit(memory_gib: float) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # where memory ends, a worker is to go before the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    if memory_gib and sys.platform == "linux":  # elsewhere the system does not keep to such a limit
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = used + int(memory_gib * _GIB)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


# ---- a worker


def work(end: socket.socket, functions: Sequence[RewardFunction], memory_gib: float, timeout_seconds: float,
         together: bool, parent: int) -> None:
    """A worker's life: a call at a time, or with `together` all calls that are asked for on one event loop."""
    detach()
    _prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    adopt_orphans()
    _limit(memory_gib)
    if os.getppid() != parent:
        return
    desk = _Desk(Link(end), functions, timeout_seconds)
    if together:
        asyncio.run(desk.serve_together())
    else:
        desk.serve()


class _Desk:
    """Takes what is asked and sends what came of it."""

    def __init__(self, link: Link, functions: Sequence[RewardFunction], timeout_seconds: float) -> None:
        self.link, self.functions, self.timeout_seconds = link, functions, timeout_seconds
        self.batches: dict[int, Batch | Outcome] = {}
        self.loop = Loop()

    def serve(self) -> None:
        while True:
            wait([self.link.end])
            try:
                frames = self.link.receive()
            except EOFError:
                return
            for header, body in frames:
                if asked := self._asked(header, body):
                    batch, one, part = asked
                    self._begin(header)
                    self._answer(header, batch if isinstance(batch, Outcome) else
                                 call(one, batch, part, self.loop.run))

    async def serve_together(self) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        running: set[asyncio.Task[None]] = set()

        async def run(header: dict[str, Any], batch: Batch | Outcome, one: RewardFunction, part: range) -> None:
            self._begin(header)
            self._answer(header, batch if isinstance(batch, Outcome) else
                         await call_async(one, batch, part, self.timeout_seconds))

        def read() -> None:
            try:
                for header, body in self.link.receive():
                    if asked := self._asked(header, body):
                        running.add(task := loop.create_task(run(header, *asked)))
                        task.add_done_callback(running.discard)
            except EOFError:
                loop.remove_reader(self.link)
                ended.set_result(None)

        loop.add_reader(self.link, read)
        await ended

    def _asked(self, header: dict[str, Any], body: bytes) -> tuple[Batch | Outcome, RewardFunction, range] | None:
        if "forget" in header:
            self.batches.pop(header["forget"], None)
            return None
        job = header["job"]
        if job not in self.batches:
            try:
                self.batches[job] = ForkingPickler.loads(body)  # pyright: ignore[reportAttributeAccessIssue]
            except Exception as error:
                self.batches[job] = Outcome(kind="wrong", text=f"cannot be sent its batch: {type(error).__name__}: "
                                                               f"{error}; reward.workers=0 calls it in this process")
        return self.batches[job], self.functions[header["function"]], range(header["low"], header["high"])

    def _begin(self, header: dict[str, Any]) -> None:
        self._send({"task": header["task"], "begun": True})

    def _answer(self, header: dict[str, Any], outcome: Outcome) -> None:
        sys.stdout.flush()
        spent = isinstance(outcome.cause, MemoryError)
        self._send({"task": header["task"], "outcome": outcome.plain(), "spent": spent})

    def _send(self, header: dict[str, Any]) -> None:
        self.link.send(header)
        self.link.drain()
