"""Rows of the Groups view: those of the table in which a text occurs, in the prompt or a
completion."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from shoal.runs.group_table import GroupFile, GroupTable

MAX_TEXT, MAX_HITS, MOST_KEPT = 500, 200_000, 4
SEARCH_SECONDS = 0.15
"""How long a request reads on."""


class Search:
    """The groups in whose prompt or completions a text occurs, found file by file, the newest
    first.

    A whole run's texts do not fit into a few hundred milliseconds: each request reads on, and shows
    what is found."""

    def __init__(self, index: GroupTable, text: str, number: int) -> None:
        self.table = f"hits_{number}"
        self._index = index
        self._text = text.lower()
        self._seen: set[int] = set()  # numbers of the files that were searched
        self._hits = 0
        self._lock = threading.Lock()
        index.database.run(
            f'CREATE TABLE {self.table} (file INTEGER, "group" INTEGER, hits INTEGER)'
        )

    def read_on(self) -> dict[str, Any]:
        """Searches further files, also those that a live run has written since; says how far it has
        come."""
        until = time.monotonic() + SEARCH_SECONDS
        with self._lock:
            waiting = sorted(
                (
                    file
                    for file in list(self._index.files.values())
                    if file.number not in self._seen
                ),
                key=lambda file: file.number,
            )
            while waiting and self._hits < MAX_HITS and time.monotonic() < until:
                file = waiting.pop()
                self._seen.add(file.number)
                with contextlib.suppress(
                    self._index.database.error
                ):  # replaced or damaged: the table names it
                    self._read(file)
            return {
                "done": not waiting or self._hits >= MAX_HITS,
                "searched": len(self._seen),
                "files": len(self._seen) + len(waiting),
            }

    def _read(self, file: GroupFile) -> None:
        database = self._index.database
        found = database.rows(
            'SELECT TRY_CAST("group" AS INTEGER) AS place, count(*) AS hits FROM read_parquet(?) '
            "WHERE (contains("
            "lower(prompt), ?) OR contains(lower(text), ?)) AND place IS NOT NULL GROUP BY place",
            str(file.path),
            self._text,
            self._text,
        )
        if found:
            values = ", ".join(
                f"({file.number}, {int(row['place'])}, {row['hits']})" for row in found
            )
            database.run(f"INSERT INTO {self.table} VALUES {values}")
        self._hits += len(found)

    def drop(self) -> None:
        with self._lock:
            self._index.database.run(f"DROP TABLE {self.table}")


class Searches:
    """The newest few searches."""

    def __init__(self) -> None:
        self._kept: dict[Any, Search] = {}
        self._number, self._lock = 0, threading.Lock()

    def get(self, index: GroupTable, text: str) -> Search:
        """The search for a text."""
        key = (index.table, text)
        with self._lock:
            if key not in self._kept:
                self._number += 1
                self._kept[key] = Search(index, text, self._number)
            self._kept[key] = self._kept.pop(key)
            for old in list(self._kept)[:-MOST_KEPT]:
                self._kept.pop(old).drop()
            return self._kept[key]
