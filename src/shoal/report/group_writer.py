"""A thread that writes groups while the next step is sampled.

    loop: put(step's groups) --(queue of MOST_PENDING)--> thread: Arrow table, zstd, rename
    loop: flush() before a checkpoint: the groups of every step that it covers are on disk when it becomes final
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

MOST_PENDING = 2
"""Steps that may wait to be written; a disk that is slower than training holds training up from then on."""


class GroupWriter:
    """Calls `write` in another thread, in order. What it raises is raised by the next `put` or `flush`, once; what was
    put meanwhile is not written."""

    def __init__(self, write: Callable[..., Any]) -> None:
        self._write = write
        self._pending: queue.Queue[tuple[Any, ...] | None] = queue.Queue(MOST_PENDING)
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, *arguments: Any) -> None:
        """Queues one call; waits where MOST_PENDING calls are queued already."""
        self._raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="groups to disk", daemon=True)
            self._thread.start()
        self._pending.put(arguments)

    def flush(self) -> None:
        """Returns when everything that was put is on disk."""
        self._pending.join()
        self._raise_failure()

    def close(self) -> None:
        """Ends the thread after what was put."""
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        # Read once: the thread may set it between a read and a store, and that failure would be lost.
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure

    def _work(self) -> None:
        while (arguments := self._pending.get()) is not None:
            try:
                if self._failure is None:
                    self._write(*arguments)
            except BaseException as error:  # raised again where the run can end
                self._failure = error
            finally:
                self._pending.task_done()
        self._pending.task_done()
