"""A thread that writes groups while the next step is sampled.

    loop: put(step's groups) --(queue of MOST_PENDING)--> thread: Arrow table, zstd, rename
    loop: flush() before a checkpoint: the groups of every step that it covers are on disk when it becomes final
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from shoal.types import ShoalError

MOST_PENDING = 2
"""Steps that may wait to be written; a disk that is slower than training holds training up from then on."""
REPORT_SECONDS, STUCK_SECONDS = 10.0, 120.0
"""After how long without a finished write a wait is reported, and given up."""


class GroupWriter:
    """Calls `write` in another thread, in order. What it raises is raised by the next `put` or `flush`, once; what was
    put meanwhile is not written. `folder` is named where the disk does not answer."""

    def __init__(self, write: Callable[..., Any], folder: object = "the run folder") -> None:
        self._write, self._folder = write, folder
        self._changed = threading.Condition()
        self._calls: deque[tuple[Any, ...] | None] = deque()  # the first is being written; None ends the thread
        self._num_done = 0
        self._failure: BaseException | None = None
        self._stuck: ShoalError | None = None
        self._thread: threading.Thread | None = None

    def put(self, *arguments: Any) -> None:
        """Queues one call; waits where MOST_PENDING calls are queued already."""
        self._raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="groups to disk", daemon=True)
            self._thread.start()
        self._wait(MOST_PENDING)
        with self._changed:
            self._calls.append(arguments)
            self._changed.notify_all()

    def flush(self) -> None:
        """Returns when everything that was put is on disk."""
        self._wait(0)
        self._raise_failure()

    def close(self) -> None:
        """Ends the thread after what was put; one that is stuck is left alone, it ends with the process."""
        if self._thread is not None and self._stuck is None:
            self._wait(0)
            with self._changed:
                self._calls.append(None)
                self._changed.notify_all()
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _wait(self, most: int) -> None:
        """Until at most so many calls are not done. ShoalError where the disk does not answer, now or before."""
        since, done, reported = time.monotonic(), self._num_done, False
        with self._changed:
            while self._stuck is None and len(self._calls) > most:
                self._changed.wait(REPORT_SECONDS / 10)
                if self._num_done != done:
                    since, done = time.monotonic(), self._num_done
                seconds = time.monotonic() - since
                if seconds >= STUCK_SECONDS:
                    self._stuck = ShoalError(
                        f"{self._folder}: the disk has not answered for {seconds:.0f} s, and {len(self._calls)} files "
                        f"of groups are not written; check the disk, then resume the run")
                elif seconds >= REPORT_SECONDS and not reported:
                    reported = True
                    print(f"waiting for the disk to write groups into {self._folder}, at most {STUCK_SECONDS:.0f} s",
                          file=sys.stderr, flush=True)
        if self._stuck is not None:
            raise self._stuck

    def _raise_failure(self) -> None:
        # Read once: the thread may set it between a read and a store, and that failure would be lost.
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls)
                arguments = self._calls[0]
            if arguments is None:
                return
            try:
                if self._failure is None:
                    self._write(*arguments)
            except BaseException as error:  # raised again where the run can end
                self._failure = error
            with self._changed:
                self._calls.popleft()
                self._num_done += 1
                self._changed.notify_all()
