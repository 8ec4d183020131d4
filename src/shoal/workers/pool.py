"""Worker processes that are ended at their limits of time and memory, and the process that supervises them.

    trainer --(call)--> supervisor --(call)--> worker --(reply)--> supervisor --(reply)--> trainer

The supervisor is forked once from the process that trains, and runs one event loop without further threads. It never
runs what it is asked to call. So a worker that was killed is replaced by a fork of a clean process, and limits hold
while the trainer is busy. Where the trainer ends, however it ends, the supervisor ends its workers and itself.

A frame is a header in JSON and a body of bytes. Replies are JSON alone: nothing that a worker sends is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from shoal.workers.process import Channel, Header, fork, live
from shoal.workers.supervisor import EXIT_SECONDS, AsyncHandler, Handler, Limits, Supervisor

END_SECONDS = 1.5
"""What the supervisor may take to end its workers and itself, before it is killed."""


class WorkerPool:
    """Calls a handler in worker processes; any function can be one, since processes are forked.

    >>> pool.submit(7, {"question": "..."}, b"...")
    >>> pool.receive(seconds=1.0)
    [(7, {"answer": ...})]

    A reply is what the handler returned, or `{"kind": "timed out"}`, `{"kind": "died", "text": "SIGSEGV"}` or
    `{"kind": "cancelled"}`. With `together`, calls share the event loop of one more worker, which `handle_async` serves
    on it; where a call blocks that loop, the worker is ended and each of its calls is made again in a worker of its
    own, and the reply says `alone`.
    """

    def __init__(self, handle: Handler, limits: Limits, handle_async: AsyncHandler | None = None,
                 prepare: Callable[[], Any] = lambda: None) -> None:
        """`prepare` is called in the supervisor, before it forks the first worker."""
        sys.stdout.flush()
        sys.stderr.flush()
        here, there = socket.socketpair()
        trainer = os.getpid()
        self.pid = fork()
        if self.pid == 0:
            here.close()
            live(lambda: Supervisor(there, handle, handle_async, limits, trainer).run(prepare))
        there.close()
        self._channel = Channel(here)
        self.heard = time.monotonic()
        """When the supervisor last sent something."""
        self.close = weakref.finalize(self, _end_supervisor, self.pid, here, trainer)
        """Ends the supervisor, its workers and everything that they started; a second time does nothing."""

    def submit(self, call: int, header: Header, body: bytes = b"", together: bool = False) -> None:
        """Sends a call. ConnectionError where the supervisor has ended, TimeoutError where it does not read."""
        self._channel.send({"call": call, "together": together, "asked": header}, body)

    def cancel(self, calls: Iterable[int]) -> None:
        """Cancels those of the calls that no worker has begun; the others are replied to as usual."""
        self._channel.send({"cancel": list(calls)})

    def receive(self, seconds: float = 0.0) -> list[tuple[int, Header]]:
        """The replies that have arrived, waiting some seconds for a frame. EOFError once the supervisor has ended."""
        frames = self._channel.receive(seconds)
        if frames:
            self.heard = time.monotonic()
        return [(header["call"], header["reply"]) for header, _ in frames if "call" in header]


def _end_supervisor(pid: int, end: socket.socket, owner: int) -> None:
    """Shuts the socket down, upon which the supervisor ends by itself, and waits for that. Another process, such as the
    supervisor of a younger pool, may hold a copy of the socket: closing it alone would not be seen."""
    if os.getpid() != owner:  # a copy in a process that someone else forked
        end.close()
        return
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        os.kill(pid, signal.SIGCONT)  # should it be stopped
        if not _reaped(pid, END_SECONDS):
            os.kill(pid, signal.SIGKILL)
            _reaped(pid, EXIT_SECONDS)  # one that waits for a device cannot end before that answers


def _reaped(pid: int, seconds: float) -> bool:
    """True if the process ended within so many seconds."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(0.05, 2 * pause)
    return True
