"""Rows of the Groups view: filtered by any column, by text of prompt or completion, sorted by any column."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from shoal.commands.view.curves import rounded
from shoal.runs.database import Database, name, reason
from shoal.runs.group_table import COLUMNS, GroupFile, GroupTable
from shoal.text import did_you_mean
from shoal.types import ShoalError

MAX_LIMIT, MAX_TERMS, MAX_TEXT, MAX_HITS = 500, 20, 500, 200_000
FORGOTTEN_SECONDS = 3.0
OPERATORS = ("<=", ">=", "!=", "=", "<", ">")
_TERM = re.compile(r"([\w/@.-]+?)\s*(<=|>=|!=|==|=|<|>)\s*(\"[^\"]*\"|\S+)")


def condition(index: GroupTable, text: str) -> tuple[str, list[Any]]:
    """SQL and its values for a filter such as `reward>0.5 step=10..20 set=held_out`; ShoalError where it is none.

    `column=low..high` is a range; `none` stands for a missing value."""
    parts, values, rest = [], [], text[:2000]
    for place, term in enumerate(_TERM.finditer(text[:2000])):
        if place >= MAX_TERMS:
            raise ShoalError(f"filter: at most {MAX_TERMS} conditions")
        rest = rest.replace(term[0], "", 1)
        sql, own = _condition(index, term[1], term[2].replace("==", "="), term[3].strip('"'))
        parts.append(sql)
        values += own
    if rest := " ".join(word for word in rest.replace(",", " ").split() if word.lower() != "and"):
        raise ShoalError(f"filter: {rest[:60]!r} is no condition; write column, operator and value: reward>0.5")
    return " AND ".join(parts) or "true", values


def _condition(index: GroupTable, column: str, operator: str, value: str) -> tuple[str, list[Any]]:
    sql = column_of(index, column)
    if value == "none" and operator in ("=", "!="):
        return f"{sql} IS {'NOT ' if operator == '!=' else ''}NULL", []
    if COLUMNS.get(column) == "VARCHAR":
        if operator not in ("=", "!="):
            raise ShoalError(f"filter: {column} is a name; compare it with = or !=")
        return f"{sql} {operator} ?", [value]
    low, dots, high = value.partition("..")
    if dots and operator == "=":
        return f"{sql} BETWEEN ? AND ?", [_number(column, low), _number(column, high)]
    # The table's numbers have 32 bits: 0.1 is compared as they hold it.
    return f"{sql} {operator} CAST(? AS {COLUMNS.get(column, 'FLOAT')})", [_number(column, value)]


def _number(column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 2**31:
        raise ShoalError(f"filter: {column} is a number, {text[:40]!r} is none")
    return value


def column_of(index: GroupTable, column: str) -> str:
    """A column as SQL: of the table, or a reward function's mean by the function's name."""
    if column in COLUMNS:
        return name(column)
    function = column.removeprefix("mean/")
    if function in index.functions:
        return name(f"mean/{function}")
    known = [*COLUMNS, *index.functions]
    raise ShoalError(f"there is no column {column[:60]!r}{did_you_mean(column, known) or '.'} "
                     f"Columns: {', '.join(known)}")


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
    where, values = condition(index, filter)
    state = None
    search = searches.get(index, text[:MAX_TEXT], is_regex, within) if text else None
    if search:
        search.wait(0.04)
        state = search.state()  # before the rows are counted: what is found meanwhile is asked for again
        if search.error:
            raise ShoalError(search.error)
        where += f' AND (file, "group") IN (SELECT (file, "group") FROM {search.table})'
    order = f"{column_of(index, sort)} {'DESC' if descending else 'ASC'} NULLS LAST"
    means = "".join(f", {name(f'mean/{function}')}" for function in index.functions)
    columns = ", ".join(map(name, COLUMNS))
    with index.database.asked(), index.lock:
        rows = index.database.rows(
            f'SELECT file, {columns}{means} FROM {index.table} WHERE {where} ORDER BY {order}, file, "group" '
            "LIMIT ? OFFSET ?", *values, min(limit, MAX_LIMIT), offset)
        total = index.database.rows(f"SELECT count(*) AS n FROM {index.table} WHERE {where}", *values)[0]["n"]
        files = {number: file.stem for number, file in index.by_number.items()}
    prompts = _prompts(index.database, index, rows)
    for row in rows:
        row["prompt"] = prompts.get((row["set"], row["row"]), "")
        row["file"] = files.get(row["file"], "")
        for column, value in row.items():
            if isinstance(value, float):
                row[column] = rounded(value)
    return {"rows": rows, "total": total, "functions": index.functions, "waiting": index.waiting,
            "search": state}


def _prompts(database: Database, index: GroupTable, rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int], str]:
    wanted = sorted({int(row["row"]) for row in rows if row["row"] is not None})
    if not wanted:
        return {}
    found = database.rows(f'SELECT "set", "row", prompt FROM {index.prompts} WHERE "row" IN '
                          f"({', '.join(map(str, wanted))})")
    return {(row["set"], row["row"]): row["prompt"] for row in found}
