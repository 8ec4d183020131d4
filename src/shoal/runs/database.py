"""One DuckDB for all runs of a page. It reaches files of these runs alone; every statement here only reads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.runs.bounded import bounded_json, one_line
from shoal.runs.stored_run import StoredRun
from shoal.types import ShoalError

MEMORY, THREADS, MOST_PATIENCE = "300MB", 2, 0.2


class Database:
    """Tables in memory and queries over parquet files; each thread has a cursor of its own."""

    def __init__(self, runs: Sequence[StoredRun]) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise ShoalError("duckdb is not installed: shoal view needs `pip install 'shoal[view]'`") from error
        self.error = duckdb.Error
        self._connection = duckdb.connect(config={"threads": THREADS, "memory_limit": MEMORY})
        self._local = threading.local()
        self._asked, self._lock = 0, threading.Lock()
        for setting in ("autoinstall_known_extensions = false", "autoload_known_extensions = false",
                        "preserve_insertion_order = false", "temp_directory = ''"):
            self._connection.execute(f"SET {setting}")
        # From here on no statement reaches a file outside the runs, nor can it change that.
        folders = ", ".join(quoted(f"{run.root}/") for run in runs)
        self._connection.execute(f"SET allowed_directories = [{folders}]")
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    @property
    def cursor(self) -> Any:
        if not hasattr(self._local, "cursor"):
            self._local.cursor = self._connection.cursor()
        return self._local.cursor

    @contextmanager
    def asked(self) -> Iterator[None]:
        """While inside, threads that read ahead wait: what a person asked for comes first."""
        with self._lock:
            self._asked += 1
        try:
            yield
        finally:
            with self._lock:
                self._asked -= 1

    def give_way(self) -> None:
        """Waits while something was asked, at most MOST_PATIENCE seconds."""
        until = time.monotonic() + MOST_PATIENCE
        while self._asked and time.monotonic() < until:
            time.sleep(0.004)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside, or none of them."""
        self.run("BEGIN")
        try:
            yield
        except BaseException:
            self.run("ROLLBACK")
            raise
        self.run("COMMIT")

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """The rows of a query as dicts. duckdb.Error for what DuckDB refuses."""
        found = self.cursor.execute(query, values)
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def run(self, query: str, *values: Any) -> None:
        self.cursor.execute(query, values)

    def columns(self, files: Sequence[Path]) -> dict[str, str]:
        """Name -> type of the columns of these files together."""
        found = self.cursor.execute("DESCRIBE SELECT * FROM read_parquet(?, union_by_name = true)",
                                    [[str(file) for file in files]])
        return {row[0]: row[1] for row in found.fetchall()}

    def json_columns(self, file: Path) -> frozenset[str]:
        """Columns of a groups file that hold JSON text, by the note in the file."""
        for _, key, value in self.cursor.execute("SELECT * FROM parquet_kv_metadata(?)", [str(file)]).fetchall():
            if bytes(key) == b"shoal":
                try:
                    return frozenset(map(str, bounded_json(bytes(value))["json"]))
                except (ValueError, KeyError, TypeError):
                    break
        return frozenset()


def quoted(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def name(column: str) -> str:
    """A column's name as SQL."""
    return '"' + column.replace('"', '""') + '"'


def reason(error: Exception) -> str:
    """What DuckDB says, in one line without the query."""
    return one_line(str(error).split("\nLINE")[0])[:200]
