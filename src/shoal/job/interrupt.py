"""Turns Ctrl-C and SIGTERM into a request to stop the run: the step under way is given up, and the
state after the last complete step is saved."""

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
    """Handler of Ctrl-C until a run handles it: ends the process and prints one line. Once `raises`
    is set, it raises KeyboardInterrupt, and sets `received`, because Python drops an exception that
    is raised in a callback, such as JAX's in the garbage collector."""

    raises = False
    received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Ends the process with exit code 130, or raises KeyboardInterrupt once `raises` is set."""
        if not self.raises:
            os.write(2, b"interrupted\n")
            os._exit(130)
        self.received = True
        raise KeyboardInterrupt


def is_command() -> bool:
    """True if `shoal` or `python -m shoal` started this process. It also works before Python has
    found the module: until then `sys.argv` begins with `-m`, as for every package that is run in
    this way and imports this one."""
    program = ""
    if sys.argv:
        program = sys.argv[0]
    if program != "-m":
        return program.endswith("/shoal")
    if len(sys.argv) > len(sys.orig_argv):  # another program has changed `sys.argv`
        return False
    typed = sys.orig_argv[-len(sys.argv)]  # the module; `-mshoal` and `-Imshoal` are one word
    if typed.startswith("-"):
        typed = typed.partition("m")[2]
    return typed == "shoal"


def end_on_interrupt() -> None:
    """Makes Ctrl-C end the process at once, until `raise_on_interrupt`, because there is nothing to
    clean up yet. Does nothing if somebody else has set a handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, EarlyInterrupt())


def raise_on_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, after `end_on_interrupt`. Does nothing if another
    handler is set."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, EarlyInterrupt):
        handler.raises = True


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt like Ctrl-C, so that a command cleans up.
    After the block the handler from before is back. Has no effect outside of the main thread."""

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
    """Returns what is kept of a run that is stopped at once."""
    return "the newest checkpoint is kept, what came after it is lost"


@contextlib.contextmanager
def stop_on_signals(
    stop: StopSignal | None = None, kept: Callable[[], str] = _kept_text
) -> Iterator[StopSignal]:
    """Returns a context in which the first SIGINT or SIGTERM requests `stop`, and a second one
    raises KeyboardInterrupt wherever the program is, with the text that `kept` returns. The context
    gives the StopSignal, a new one if `stop` is None.

    At the end of the block the handlers from before are back. Outside of the main thread Python
    handles no signals, so there it changes nothing.
    """
    stop = stop or StopSignal()

    def handle(number: int, frame: FrameType | None) -> None:
        """Requests a stop and says so on stderr; raises KeyboardInterrupt with the text of `kept`
        if a stop was requested already."""
        if stop.requested_at is not None:
            raise KeyboardInterrupt(f"stopped at once: {kept()}")
        waits = f"; waits for {stop.waits_for}" if stop.waits_for else ""
        saved = "the steps completed so far, if any, are saved"
        os.write(2, f"\nstopping: {saved}{waits}; press Ctrl-C again to stop at once\n".encode())
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
