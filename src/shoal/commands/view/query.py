"""Rows of the Groups view: those of the table in which a text occurs, in the prompt or a completion."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from shoal.runs.database import name, reason
from shoal.runs.group_table import GroupFile, GroupTable
from shoal.types import ShoalError

MAX_LIMIT, MAX_TEXT, MAX_HITS = 500, 500, 200_000
FORGOTTEN_SECONDS = 3.0


class Search:
    """The groups in whose prompt or completions a text occurs, found file by file in a thread, the newest first.

    A whole run's texts do not fit into a few hundred milliseconds: what is found so far can be shown at any time."""

    def __init__(self, index: GroupTable, text: str, is_regex: bool, within: str, number: int) -> None:
        self.table = f"hits_{number}"
        self.error, self.done, self.running, self.stop = "", False, False, False
        self.asked = time.monotonic()  # when somebody last wanted to know
        self._index, self._values = index, [text if is_regex else text.lower()]
        matches = "regexp_matches({0}, ?)" if is_regex else "contains(lower({0}), ?)"
        columns = {"prompt": ("prompt",), "completion": ("text",)}.get(within, ("prompt", "text"))
        self._where = " OR ".join(matches.format(column) for column in columns)
        self._values *= len(columns)
        self._seen: set[int] = set()  # numbers of the files that were searched
        self._hits, self._files = 0, 0
        self._ready = threading.Event()
        self.thread: threading.Thread | None = None
        database = index.database
        database.run(f'CREATE TABLE {self.table} (file INTEGER, "group" INTEGER, hits INTEGER)')
        try:  # a wrong regular expression is said before a file is read
            database.rows(f"SELECT {matches.format(name('t'))} FROM (SELECT 'x' AS t)", self._values[0])
        except database.error as error:
            self.error, self.done = f"regular expression: {reason(error)}", True
            self._ready.set()
            return
        self._begin()

    def _begin(self) -> None:
        files = sorted((file for file in list(self._index.files.values()) if file.number not in self._seen),
                       key=lambda file: -file.number)
        self._files, self.done, self.running = len(self._seen) + len(files), False, True
        self.thread = threading.Thread(target=self._work, args=(files,), name="search", daemon=True)
        self.thread.start()

    def catch_up(self) -> None:
        """Goes on where it was left, and with the files that a live run has written since."""
        self.asked = time.monotonic()
        ended = not self.running and not self.error and self._hits < MAX_HITS
        if ended and any(number not in self._seen for number in list(self._index.by_number)):
            self._begin()

    def wait(self, seconds: float) -> None:
        self._ready.wait(seconds)

    def _work(self, files: Sequence[GroupFile]) -> None:
        database = self._index.database
        for file in files:
            database.give_way()
            if self.stop or self._hits >= MAX_HITS:
                break
            if time.monotonic() - self.asked > FORGOTTEN_SECONDS:  # the page shows something else by now
                self.running = False
                return
            # One that was replaced or damaged since it was indexed is named by the index.
            with contextlib.suppress(database.error):
                found = database.rows(
                    f'SELECT TRY_CAST("group" AS INTEGER) AS place, count(*) AS hits FROM read_parquet(?) '
                    f"WHERE ({self._where}) AND place IS NOT NULL GROUP BY place", str(file.path), *self._values)
                if found:
                    values = ", ".join(f"({file.number}, {int(row['place'])}, {row['hits']})" for row in found)
                    database.run(f"INSERT INTO {self.table} VALUES {values}")
                self._hits += len(found)
            self._seen.add(file.number)
        self.done, self.running = True, False
        self._ready.set()
        if self.stop:
            database.run(f"DROP TABLE IF EXISTS {self.table}")

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "searched": len(self._seen), "files": self._files, "error": self.error}

    def drop(self) -> None:
        self.stop = True
        if not self.running:
            with contextlib.suppress(self._index.database.error):
                self._index.database.run(f"DROP TABLE IF EXISTS {self.table}")


class Searches:
    """The newest few searches; an older one is stopped."""

    def __init__(self, most: int = 4) -> None:
        self._kept: dict[Any, Search] = {}
        self._most, self._number, self._lock = most, 0, threading.Lock()
        self._dropped: list[threading.Thread | None] = []

    def get(self, index: GroupTable, text: str, is_regex: bool, within: str) -> Search:
        key = (index.table, text, is_regex, within)
        with self._lock:
            if key not in self._kept:
                self._number += 1
                self._kept[key] = Search(index, text, is_regex, within, self._number)
            search = self._kept[key] = self._kept.pop(key)
            search.catch_up()
            for old in list(self._kept)[:-self._most]:
                dropped = self._kept.pop(old)
                dropped.drop()
                self._dropped = [thread for thread in (*self._dropped, dropped.thread) if thread and thread.is_alive()]
        return search

    def close(self) -> list[threading.Thread | None]:
        """Stops all; the threads that may still be at work."""
        for search in self._kept.values():
            search.drop()
        return [search.thread for search in self._kept.values()] + self._dropped


def group_rows(index: GroupTable, searches: Searches, *, sort: str = "step", descending: bool = False,
               filter: str = "", text: str = "", is_regex: bool = False, within: str = "any", offset: int = 0,
               limit: int = 100) -> dict[str, Any]:
    """A page of rows, how many there are in all, and how far a search has come."""
    state, hits = None, ""
    if text:
        search = searches.get(index, text[:MAX_TEXT], is_regex, within)
        search.wait(0.04)
        state, hits = search.state(), search.table  # the state first: what is found meanwhile is asked for again
        if search.error:
            raise ShoalError(search.error)
    rows, total = index.rows(filter, sort, descending, offset, min(limit, MAX_LIMIT), hits)
    return {"rows": rows, "total": total, "functions": index.functions, "waiting": index.waiting, "search": state}
