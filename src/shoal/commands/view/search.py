"""Texts of all groups, read in threads: a pass over groups files, and the search of the Groups view."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.runs.group_table import Database, GroupFile, GroupTable, name, reason
from shoal.types import ShoalError

MAX_LIMIT, MAX_TEXT, MAX_HITS = 500, 500, 200_000
FORGOTTEN_SECONDS = 3.0


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


class Search:
    """The groups in whose prompt or completions a text occurs, found file by file in a thread, the newest first.

    A whole run's texts do not fit into a few hundred milliseconds: what is found so far can be shown at any time."""

    def __init__(self, index: GroupTable, text: str, is_regex: bool, within: str, number: int) -> None:
        self.table = f"hits_{number}"
        self._index, database = index, index.database
        matches = "regexp_matches({0}, ?)" if is_regex else "contains(lower({0}), ?)"
        columns = {"prompt": ("prompt",), "completion": ("text",)}.get(within, ("prompt", "text"))
        self._where = " OR ".join(matches.format(column) for column in columns)
        self._values = [text if is_regex else text.lower()] * len(columns)
        self._asked = time.monotonic()  # when somebody last wanted to know
        self._seen: set[int] = set()  # numbers of the files that were searched
        self._hits = 0
        self.work: FilePass | None = None
        try:  # a wrong regular expression is said before a file is read
            database.rows(f"SELECT {matches.format(name('t'))} FROM (SELECT 'x' AS t)", self._values[0])
        except database.error as error:
            raise ShoalError(f"regular expression: {reason(error)}") from error
        database.run(f'CREATE TABLE {self.table} (file INTEGER, "group" INTEGER, hits INTEGER)')

    def catch_up(self) -> None:
        """Continues where it stopped, and with the files that a live run has written since."""
        self._asked = time.monotonic()
        waiting = self._waiting()
        if waiting and self._hits < MAX_HITS and (self.work is None or self.work.is_over):
            self.work = FilePass(self._index.database, waiting, self._read, self._is_wanted)

    def _waiting(self) -> list[GroupFile]:
        files = list(self._index.files.values())
        return sorted((file for file in files if file.number not in self._seen), key=lambda file: -file.number)

    def _is_wanted(self) -> bool:
        """False once the page shows something else, or cannot show more."""
        return self._hits < MAX_HITS and time.monotonic() - self._asked < FORGOTTEN_SECONDS

    def _read(self, file: GroupFile) -> None:
        self._seen.add(file.number)
        database = self._index.database
        found = database.rows(
            f'SELECT TRY_CAST("group" AS INTEGER) AS place, count(*) AS hits FROM read_parquet(?) '
            f"WHERE ({self._where}) AND place IS NOT NULL GROUP BY place", str(file.path), *self._values)
        if found:
            values = ", ".join(f"({file.number}, {int(row['place'])}, {row['hits']})" for row in found)
            database.run(f"INSERT INTO {self.table} VALUES {values}")
        self._hits += len(found)

    def state(self) -> dict[str, Any]:
        searched, waiting = len(self._seen), len(self._waiting())
        is_reading = self.work is not None and not self.work.is_over
        done = self._hits >= MAX_HITS or not (waiting or is_reading)
        return {"done": done, "searched": searched, "files": searched + waiting}

    def drop(self) -> None:
        """Stops it; what its thread still finds has no table any more."""
        if self.work is not None:
            self.work.stop()
        with contextlib.suppress(self._index.database.error):  # the thread writes to it at this moment
            self._index.database.run(f"DROP TABLE {self.table}")


class Searches:
    """The newest few searches; an older one is stopped."""

    def __init__(self, most: int = 4) -> None:
        self._kept: dict[Any, Search] = {}
        self._passes: list[FilePass] = []  # that may be at work
        self._most, self._number, self._lock = most, 0, threading.Lock()

    def get(self, index: GroupTable, text: str, is_regex: bool, within: str) -> Search:
        """The search for a text, begun or continued; ShoalError for a wrong regular expression."""
        key = (index.table, text, is_regex, within)
        with self._lock:
            if key not in self._kept:
                self._number += 1
                self._kept[key] = Search(index, text, is_regex, within, self._number)
            search = self._kept[key] = self._kept.pop(key)
            search.catch_up()
            if search.work is not None:
                self._passes = [work for work in self._passes if not work.is_over and work is not search.work]
                self._passes.append(search.work)
            for old in list(self._kept)[:-self._most]:
                self._kept.pop(old).drop()
        return search

    def close(self) -> None:
        for work in self._passes:
            work.close()


def group_rows(index: GroupTable, searches: Searches, *, sort: str = "step", descending: bool = False,
               filter: str = "", text: str = "", is_regex: bool = False, within: str = "any", offset: int = 0,
               limit: int = 100) -> dict[str, Any]:
    """A page of rows, how many there are in all, and how far a search has come."""
    state, hits = None, ""
    if text:
        search = searches.get(index, text[:MAX_TEXT], is_regex, within)
        if search.work is not None:
            search.work.wait(0.04)
        state, hits = search.state(), search.table  # the state first: what is found meanwhile is asked for again
    rows, total = index.rows(filter, sort, descending, offset, min(limit, MAX_LIMIT), hits)
    return {"rows": rows, "total": total, "functions": index.functions, "waiting": index.waiting, "search": state}
