"""What a forked process needs: a channel to its parent, its own standard streams, a limit of
memory, and an event loop that concurrent calls share. Also a watcher that kills what this process
started elsewhere once this process has ended."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import traceback
import uuid
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn

from shoal.records import ShoalError

Header = dict[str, Any]
Handler = Callable[[Header, bytes], Header]
"""(header of the call, its body) -> the reply; `"spent": True` in a reply has the worker
replaced."""
AsyncHandler = Callable[[Header, bytes], Awaitable[Header]]

SEND_SECONDS = 120.0
"""How long `Channel.send` waits for the other end to read."""
PULSE_SECONDS = 1.0
"""The interval at which the supervisor sends a sign of life and checks that the trainer lives; a
worker whose event loop calls share sends signs of life as well."""

SIZES = struct.Struct(">II")
KILL_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # options of Linux's prctl


class Channel:
    """One end of a socket pair, which sends and receives frames. It belongs to the process that
    made it: a copy of that process, forked by user code, exits if it tries to send or receive."""

    def __init__(self, end: socket.socket) -> None:
        """Takes over a connected socket; only this process may use the channel. It has no `close`:
        whoever made the socket closes it."""
        self.end = end
        self.owner = os.getpid()
        self._inbox = bytearray()

    def send(self, header: Header, body: bytes = b"") -> None:
        """Sends one frame; waits up to `SEND_SECONDS` for the other end to read, then TimeoutError.
        ConnectionError if the other end is closed. After a TimeoutError part of the frame may be
        sent: the channel is then of no further use."""
        _end_copy_of(self.owner)
        self.end.settimeout(SEND_SECONDS)
        self.end.sendall(frame(header, body))

    def receive(self, seconds: float | None = None) -> list[tuple[Header, bytes]]:
        """Returns (header, body) of each complete frame that has arrived; [] if there is none.
        Waits at most `seconds` for the first data (None: for ever). Raises EOFError if the other
        end is closed and no complete frame is left. An incomplete frame is kept for the next call.
        ValueError if a frame's header is not JSON."""
        _end_copy_of(self.owner)
        ended = False
        self.end.settimeout(seconds)
        try:
            while True:
                data = self.end.recv(1 << 20)
                if not data:
                    ended = True
                    break
                self._inbox += data
                self.end.settimeout(0.0)  # takes what else is there, without waiting
        except (BlockingIOError, TimeoutError):
            pass
        except ConnectionError:
            ended = True
        frames = []
        while len(self._inbox) >= SIZES.size:
            header_size, body_size = SIZES.unpack_from(self._inbox)
            start = SIZES.size + header_size
            stop = start + body_size
            if len(self._inbox) < stop:
                break
            frames.append(
                (json.loads(self._inbox[SIZES.size : start]), bytes(self._inbox[start:stop]))
            )
            del self._inbox[:stop]
        if ended and not frames:
            raise EOFError
        return frames


def frame(header: Header, body: bytes = b"") -> bytes:
    """Returns a frame's bytes: the sizes of header and body, the header in JSON, the body."""
    line = json.dumps(header).encode()
    return SIZES.pack(len(line), len(body)) + line + body


def pickled(value: Any, parts: Iterable[tuple[str, Any]], hint: str) -> bytes:
    """Returns a value, pickled, as bytes for another process. If the value cannot be pickled,
    raises a ShoalError that names the first of its `parts`, (description, part), that cannot be
    pickled; the error ends with `hint`. If every part can be pickled, raises pickle's own error."""
    try:
        return bytes(ForkingPickler.dumps(value))
    except Exception as error:
        for name, part in parts:
            try:
                ForkingPickler.dumps(part)
            except Exception:
                raise ShoalError(
                    f"{name} holds a {type(part).__name__}, which cannot be sent to another "
                    f"process ({error}); {hint}"
                ) from error
        raise


def fork() -> int:
    """Forks this process; returns the child's id, and 0 in the child. SIGINT, SIGTERM and SIGHUP
    stay blocked in the child until `run_child` sets its handlers. Suppresses Python's warning about
    other threads: the child uses none, and touches no device."""
    held_back = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
    # In case `os.fork` raises: this process then gets its signals back, like a parent.
    pid = -1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def run_child(body: Callable[[], Any]) -> NoReturn:
    """Runs `body` in a forked process and then exits, with code 1 if it raised. It prints what was
    raised, unless that is a ConnectionError, TimeoutError or EOFError. The process gets a session
    of its own, so Ctrl-C does not reach it, and its own standard streams (stdin is empty, stdout
    and stderr write where those of the parent do)."""
    code = 1
    try:
        gc.freeze()  # nothing that the parent made is ever freed here
        warnings.filterwarnings("ignore", message=".*fork")
        os.setsid()
        for number in (
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGALRM,
            signal.SIGPROF,
            signal.SIGUSR1,
            signal.SIGUSR2,
        ):
            signal.signal(number, signal.SIG_DFL)
        # Unlike SIG_IGN, programs that are started do not inherit it.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)
        sys.stdin = _open_stream(0, "r")
        sys.stdout = _open_stream(1, "w")
        sys.stderr = _open_stream(2, "w")
        # Processes whose parent ends under this one become its children: it can end them.
        prctl(_ADOPT_ORPHANS, 1)
        body()
        code = 0
    except (ConnectionError, TimeoutError, EOFError):  # the other end is gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# ---- processes that user code forks


@contextlib.contextmanager
def exit_forked_copies() -> Iterator[None]:
    """A context for user code that may fork: a process that was forked in the context exits at the
    end of it. Otherwise such a copy would continue as this process does, and answer its calls."""
    owner = os.getpid()
    try:
        yield
    finally:
        _end_copy_of(owner)


def _end_copy_of(owner: int) -> None:
    """Exits if this process is not the process `owner`, but a fork of it."""
    if os.getpid() != owner:
        os._exit(0)  # skips `finally` and `atexit`, which only the original should run


def end_copies_of_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Registers a hook for forks: a process that user code forks during a call on this event loop
    exits as soon as the call returns to the loop. Such a copy shares the original's epoll instance
    and wakeup socket, and would take its events. The hook cannot be removed; it does nothing once
    the loop is closed or gone."""
    reference = weakref.ref(loop)

    def end() -> None:
        """Runs in each forked process: makes it exit at the next turn of its copy of the loop."""
        copy = reference()
        if copy is not None:
            # RuntimeError: it is closed, or its thread is not in the copy.
            with contextlib.suppress(RuntimeError):
                copy.call_soon(os._exit, 0)

    os.register_at_fork(after_in_child=end)


def _open_stream(number: int, mode: str) -> Any:
    """Returns a text stream in UTF-8 on a file descriptor, or on the null device if the descriptor
    is closed. `mode` is "r" or "w". Closing the stream leaves the descriptor open."""
    try:
        return open(
            number, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
    except OSError:
        return open(os.devnull, mode, encoding="utf-8")


class Blocked(BaseException):
    """Raised inside a call that blocks the event loop which it shares with other calls of its
    seat."""


async def run_shared_worker(channel: Channel, handle: AsyncHandler, alarm: float) -> None:
    """Runs a worker whose calls run concurrently on one event loop: starts each call that arrives
    at the channel as a task and sends its reply, until the channel closes. If a call blocks the
    loop for `alarm` seconds (0: no limit), `Blocked` is raised in it, and the other calls continue.
    `handle` is awaited with (header, body) of a call and returns the reply."""
    loop = asyncio.get_running_loop()
    end_copies_of_loop(loop)
    ended = loop.create_future()
    running: set[asyncio.Task[Any]] = set()
    beats: list[asyncio.TimerHandle] = []

    async def work(header: Header, body: bytes) -> None:
        """Runs the handler for one call and sends its reply."""
        with exit_forked_copies():
            reply = await handle(header["asked"], body)
        # Not in `running` any more: no alarm can interrupt the writing of the frame.
        running.discard(asyncio.current_task(loop))  # pyright: ignore[reportArgumentType]
        sys.stdout.flush()
        channel.send({"call": header["call"], "reply": reply})

    def beat() -> None:
        """Repeats while calls run. That it runs at all shows that the loop is not blocked: resets
        the alarm and sends the supervisor a sign of life. It is only used with an alarm: without
        one the worker sends no signs of life."""
        beats.clear()
        if not running:
            # 0.0 stops the timer.
            signal.setitimer(signal.ITIMER_REAL, 0.0, alarm)
            return
        signal.setitimer(signal.ITIMER_REAL, alarm, alarm)
        # Well before the alarm, which the next beat sets again.
        beats.append(loop.call_later(min(PULSE_SECONDS, alarm / 4), beat))
        channel.send({"alive": True})

    def interrupt(*_: Any) -> None:
        """Handles the alarm: raises `Blocked` in the call that is running now."""
        if asyncio.current_task(loop) in running:
            raise Blocked

    def read() -> None:
        """Starts a task for each call that has arrived. Ends the worker's loop once the channel has
        closed."""
        try:
            for header, body in channel.receive(0.0):
                task = loop.create_task(work(header, body))
                running.add(task)
                task.add_done_callback(running.discard)
        except EOFError:
            loop.remove_reader(channel.end)
            ended.set_result(None)
        if alarm and not beats:
            beat()

    signal.signal(signal.SIGALRM, interrupt)
    loop.add_reader(channel.end, read)
    await ended


def children() -> set[int]:
    """Returns the ids of this process's children, with the orphans that it adopted; empty on other
    systems than Linux. Grandchildren are not among them."""
    pids: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            pids.update(int(pid) for pid in file.read_text().split())
    return pids


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use. On systems that do not tell, this
    is the number of all cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prctl(option: int, value: int) -> None:
    """Sets an option of this process on Linux; does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def limit_memory(memory_bytes: int) -> None:
    """Limits this process's address space, on Linux, to its present size plus `memory_bytes` (0: no
    limit). Also disables core dumps, and makes this process the first that Linux kills if the
    machine's memory runs out. A limit that is set already is never raised."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If memory runs out, the system is to kill a worker and not the trainer.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if memory_bytes and sys.platform == "linux":  # other systems do not enforce such a limit
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = used + memory_bytes
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def require_bubblewrap(
    what: str, words: Sequence[str], key: str, case: str = "", expected: str = "passed"
) -> None:
    """Raises ShoalError unless sandboxes work on this machine: `bwrap` is installed, and the
    command `words`, which starts one, prints `expected` for the input `case`. Without a `case` the
    command runs `echo` in the sandbox. `what` begins the message, `key` is the setting to change.
    The command has an empty environment. subprocess.TimeoutExpired if it takes more than 60 s."""
    if not shutil.which("bwrap"):
        raise ShoalError(
            f"{what}: this machine has no bwrap: install it (apt install bubblewrap)", key
        )
    command = list(words)
    if not case:
        command += ["echo", "-n", expected]
    finished = subprocess.run(
        command,
        input=case,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={},
    )
    if finished.stdout != expected:
        reason = (finished.stderr.strip().splitlines() or ["no output"])[-1]
        raise ShoalError(
            f"{what}: bwrap cannot make a sandbox here ({reason}); allow unprivileged user "
            "namespaces (sysctl kernel.unprivileged_userns_clone=1, in a container its seccomp "
            "profile)",
            key,
        )


# ---- the end

MARK = "SHOAL_ENDS_WITH"

_WATCH = """
import os, shutil, signal, sys, time
mark = sys.argv[1].encode()
# until the process that is watched has ended, however it did
folders = sys.stdin.buffer.read().split(bytes(1))
for _ in range(5):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read().split(bytes(1)):
                    found.append(int(pid))
        except OSError:
            pass
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    if not found:
        break
    time.sleep(0.2)
for folder in filter(None, folders):
    shutil.rmtree(folder, ignore_errors=True)
"""


class Watcher:
    """A separate process that waits until this process has ended, however it ended, and then kills
    all processes whose environment has `Watcher.environment` (Linux) and removes folders."""

    def __init__(self) -> None:
        """Starts the process. `environment` is the variable that marks the processes to be killed.
        Whoever starts such a process gives it this variable. Close the watcher to end them sooner
        than this process ends."""
        mark = uuid.uuid4().hex
        self.environment = {MARK: mark}
        # In a session of its own: Ctrl-C in a terminal is for the process that is watched.
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _WATCH, f"{MARK}={mark}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def remove(self, folder: Path) -> None:
        """Registers a folder to be removed once this process has ended. A folder that is missing
        then is ignored. ValueError after `close`."""
        assert self._process.stdin is not None
        self._process.stdin.write(os.fsencode(folder) + bytes(1))
        self._process.stdin.flush()

    def close(self) -> None:
        """Kills the processes and removes the folders now, and waits for that. A second call does
        nothing."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
