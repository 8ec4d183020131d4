"""How a run is asked to stop, and the exceptions by which it leaves its current step."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator


class StopRequested(KeyboardInterrupt):
    """Raised at points where a run can be left, after somebody asked it to stop; the current step
    is given up."""


class NotHere(BaseException):
    """Raised in a dry run instead of downloading something. It is no `Exception`, so that no
    handler takes it for a fault to explain."""


class StopSignal:
    """Holds whether somebody asked the run to stop. Loops and waits call `check` wherever the
    current step can be given up."""

    def __init__(self) -> None:
        """Begins without a request to stop."""
        self.requested_at: float | None = None
        self.raises_at_once = False
        self.waits_for = ""  # what must end, or be given up, before the run can

    def request(self) -> None:
        """Asks the run to stop: notes the time of the first request. Inside of a `raising_at_once`
        block it raises StopRequested there; elsewhere the next `check` does."""
        if self.requested_at is None:
            self.requested_at = time.monotonic()
        if self.raises_at_once:
            raise StopRequested

    def announce_wait(self, what: str) -> None:
        """Sets what a stop waits for from now on; prints it on stderr if a stop was requested
        already. `what`: a noun, like `a save`."""
        self.waits_for = what
        if self.requested_at is not None:
            os.write(2, f"stopping: waits for {what}\n".encode())

    def check(self, patience_seconds: float = 0.0) -> None:
        """Raises StopRequested if a stop was requested at least `patience_seconds` ago; else does
        nothing, and does not wait."""
        if self.requested_at is None:
            return
        if time.monotonic() - self.requested_at >= patience_seconds:
            raise StopRequested

    @contextlib.contextmanager
    def raising_at_once(self) -> Iterator[None]:
        """Returns a context for a wait, or a call of a user's code, that may hang: a stop that is
        requested inside, or was before, raises StopRequested at once. Such blocks must not be
        nested: the end of the inner one ends this for the outer one too."""
        # This comes before the check: otherwise a request between the two would only be recorded.
        self.raises_at_once = True
        try:
            self.check()
            yield
        finally:
            self.raises_at_once = False
