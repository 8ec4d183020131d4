"""How a run is asked to stop, and what leaves the step under way."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator


class StopRequested(KeyboardInterrupt):
    """Raised where a run can be left after somebody asked it to stop; the step under way is given
    up."""


class NotHere(BaseException):
    """Raised in a dry run in place of a download. No `Exception`: it is no fault that a handler may
    explain."""


class StopSignal:
    """Whether somebody asked the run to stop. Loops and waits call `check` wherever the step can be
    given up."""

    def __init__(self) -> None:
        self.requested_at: float | None = None
        self.raises_at_once = False
        self.waits_for = ""  # what must end, or be given up, before the run can

    def request(self) -> None:
        if self.requested_at is None:
            self.requested_at = time.monotonic()
        if self.raises_at_once:
            raise StopRequested

    def begin(self, what: str) -> None:
        """Names what a stop waits for from now on; says it where one was asked for already."""
        self.waits_for = what
        if self.requested_at is not None:
            os.write(2, f"stopping: waits for {what}\n".encode())

    def check(self, patience_seconds: float = 0.0) -> None:
        """Raises StopRequested once a request is so many seconds old."""
        if self.requested_at is None:
            return
        if time.monotonic() - self.requested_at >= patience_seconds:
            raise StopRequested

    @contextlib.contextmanager
    def raising_at_once(self) -> Iterator[None]:
        """Around a wait, or a call of a user's code, that may hang: a signal raises StopRequested
        out of it."""
        # Before the check: a request between the two would only be recorded.
        self.raises_at_once = True
        try:
            self.check()
            yield
        finally:
            self.raises_at_once = False
