"""The event loop on which `async` functions run in the process that called them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

CLOSE_SECONDS = 1.0
"""How long to wait for what runs on a loop that is closed."""


class Loop:
    """An event loop that is made when first needed and kept, for clients of a network that functions keep too.

    It runs in the caller's thread; where that has a running loop already, as a notebook's has, in a thread of its own.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._thread: threading.Thread | None = None  # of the last call that needed one

    def run(self, wanted: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await wanted

        def run_and_close() -> Any:
            try:
                return runner.run(wait())
            finally:
                if self._runner is None:  # closed meanwhile
                    runner.close()

        # With a factory, the thread's current loop is left as it is.
        runner = self._runner = self._runner or asyncio.Runner(loop_factory=asyncio.new_event_loop)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return runner.run(wait())
        self._thread, result = _in_thread(run_and_close)
        return result.result()

    def close(self) -> None:
        """Cancels what still runs, and waits `CLOSE_SECONDS` for it; what goes on then ends with the process."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        if self._thread is not None and self._thread.is_alive():  # the wait for it was interrupted
            loop = runner.get_loop()
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                return
        _in_thread(runner.close)[0].join(CLOSE_SECONDS)


def _in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, Future[Any]]:
    """Calls a function in a daemon thread: unlike an executor's, nothing waits for it at the end of the process."""
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, name="async rewards", daemon=True)
    thread.start()
    return thread, result
