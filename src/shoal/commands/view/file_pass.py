"""A thread that reads groups files one after another, after whatever a person asks for meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from shoal.runs.database import Database
from shoal.runs.group_table import GroupFile


class FilePass:
    """Calls `read` with each file while it `is_wanted`. A file that DuckDB refuses, since it was replaced or damaged
    meanwhile, is passed over: the table of groups names it."""

    def __init__(self, database: Database, files: Sequence[GroupFile], read: Callable[[GroupFile], None],
                 is_wanted: Callable[[], bool] = lambda: True) -> None:
        self.files, self.num_read, self.is_over = files, 0, False
        self._database, self._read, self._is_wanted = database, read, is_wanted
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="reading groups", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for file in self.files:
                self._database.give_way()
                if self._stopped or not self._is_wanted():
                    return
                with contextlib.suppress(self._database.error):
                    self._read(file)
                self.num_read += 1
        finally:
            self.is_over = True

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        """Ends the thread: one that is inside DuckDB when the interpreter ends would abort it."""
        self.stop()
        self._thread.join(10)
