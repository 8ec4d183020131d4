"""Ctrl-C and SIGTERM as a request to stop: the step under way is given up, the last complete state
is saved."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from shoal.stop import StopSignal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class EarlyInterrupt:
    """Ctrl-C before a run takes it: ends the process with one line. Once `raises` is set, it raises
    KeyboardInterrupt and remembers that, since Python drops an exception raised in a callback, as
    JAX's in the garbage collector."""

    raises = False
    received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.raises:
            os.write(2, b"interrupted\n")
            os._exit(130)
        self.received = True
        raise KeyboardInterrupt


def is_command() -> bool:
    """True in a process that `shoal` or `python -m shoal` started, also before Python has found the
    module: until then `sys.argv` begins with `-m`, as it does for every package that is run so and
    imports this one."""
    program = ""
    if sys.argv:
        program = sys.argv[0]
    if program != "-m":
        return program.endswith("/shoal")
    if len(sys.argv) > len(sys.orig_argv):  # another program has set it
        return False
    typed = sys.orig_argv[-len(sys.argv)]  # the module; `-mshoal` and `-Imshoal` are one word
    if typed.startswith("-"):
        typed = typed.partition("m")[2]
    return typed == "shoal"


def end_on_interrupt() -> None:
    """Makes Ctrl-C end the process, while there is nothing yet that it must leave in order."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, EarlyInterrupt())


def raise_on_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, EarlyInterrupt):
        handler.raises = True


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt too, so that what a command has is left in order."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _kept_text() -> str:
    return "the newest checkpoint stands, what came after it is lost"


@contextlib.contextmanager
def stop_on_signals(
    stop: StopSignal | None = None, kept: Callable[[], str] = _kept_text
) -> Iterator[StopSignal]:
    """SIGINT and SIGTERM request `stop` while this is entered; a second one raises
    KeyboardInterrupt anywhere, with what is `kept` in its text.

    Outside the main thread Python handles no signals: there nothing sets it."""
    stop = stop or StopSignal()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested_at is not None:
            raise KeyboardInterrupt(f"stopped at once: {kept()}")
        waits = f"; waits for {stop.waits_for}" if stop.waits_for else ""
        saved = "the steps completed so far, if any, are saved"
        os.write(2, f"\nstopping: {saved}{waits}; once more to stop at once\n".encode())
        stop.request()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    early = before[signal.SIGINT]
    if isinstance(early, EarlyInterrupt) and early.received:  # its exception was lost in a callback
        stop.request()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
