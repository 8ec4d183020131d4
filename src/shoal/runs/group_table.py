"""Tables of a run's groups and completions without their texts and tokens: in memory, one row per
group and one per completion, indexed once per file.

    groups/*.parquet -> per group: step, row, version, mean and spread of the reward, pass share,
                        length, ...
                     -> per completion: reward, advantage, right or wrong, length, each function's
                        score
                     -> per step: sums from which correlations with length come

Sorting and filtering a million groups reads only these tables (about 150 bytes per group, 40 per
completion). Texts and tokens are read from the group's file when a group is opened. The database
can reach only files of the runs, and only reads them."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.records import Purpose, ShoalError
from shoal.runs.groups import DISCARDED, groups_file
from shoal.runs.lines import bounded_json, bounded_line, rounded
from shoal.runs.reader import StoredRun
from shoal.text import did_you_mean

# ---- the database

MEMORY, THREADS, MOST_PATIENCE = "500MB", 2, 0.2
"""Limit on DuckDB's memory, its number of threads, and the longest wait in seconds of
`Database.wait_for_user_queries`."""


class Database:
    """DuckDB tables in memory, and queries over parquet files below some folders; each thread has
    its own cursor."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Opens an empty database. `folders`: the only folders whose files a query can read, with
        all that is below them; this cannot be changed later. ShoalError if duckdb is missing."""
        try:
            import duckdb
        except ImportError as error:
            raise ShoalError(
                "duckdb is not installed: `pip install '.[view]'` in the clone of Shoal"
            ) from error
        self.error = duckdb.Error  # so that callers can catch it without importing duckdb
        self._connection = duckdb.connect(config={"threads": THREADS, "memory_limit": MEMORY})
        self._local = threading.local()
        self._user_queries = 0
        self._lock = threading.Lock()
        allowed = ", ".join(quoted(f"{folder}/") for folder in folders)
        # After these settings no statement can reach a file elsewhere, or change the settings.
        for setting in (
            "autoinstall_known_extensions = false",
            "autoload_known_extensions = false",
            "preserve_insertion_order = false",
            "temp_directory = ''",
            f"allowed_directories = [{allowed}]",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    @property
    def cursor(self) -> Any:
        """The cursor of the current thread."""
        if not hasattr(self._local, "cursor"):
            self._local.cursor = self._connection.cursor()
        return self._local.cursor

    @contextmanager
    def user_query(self) -> Iterator[None]:
        """Context manager for the queries of a request of the page, which a person waits for:
        `wait_for_user_queries` of other threads waits until it is left."""
        with self._lock:
            self._user_queries += 1
        try:
            yield
        finally:
            with self._lock:
                self._user_queries -= 1

    def wait_for_user_queries(self) -> None:
        """Waits while a thread is in `user_query`, at most MOST_PATIENCE seconds, and then returns
        in any case. Called by the thread that reads ahead, before each piece of work."""
        until = time.monotonic() + MOST_PATIENCE
        while self._user_queries and time.monotonic() < until:
            time.sleep(0.004)

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """Runs a query, and returns its rows as dicts: column -> value. `values` stand for the
        query's `?`, in order. duckdb.Error (the attribute `error`) if DuckDB refuses it."""
        result = self.cursor.execute(query, values)
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def run(self, query: str, *values: Any) -> None:
        """Runs a statement without a result; values and errors as for `rows`."""
        self.cursor.execute(query, values)

    def columns(self, files: Sequence[Path]) -> dict[str, str]:
        """Returns name -> SQL type for each column that any of these parquet files has.
        duckdb.Error if a file is missing or damaged."""
        paths = [str(file) for file in files]
        query = "DESCRIBE SELECT * FROM read_parquet(?, union_by_name = true)"
        rows = self.cursor.execute(query, [paths]).fetchall()
        return {row[0]: row[1] for row in rows}

    def json_columns(self, file: Path) -> frozenset[str]:
        """Returns the names of the columns of a groups file that hold JSON text, from the file's
        metadata; none if the metadata is missing or damaged. duckdb.Error if the file is missing or
        is no parquet file."""
        for _, key, value in self.cursor.execute(
            "SELECT * FROM parquet_kv_metadata(?)", [str(file)]
        ).fetchall():
            if bytes(key) == b"shoal":
                try:
                    return frozenset(map(str, bounded_json(bytes(value))["json"]))
                except (ValueError, KeyError, TypeError):
                    break
        return frozenset()


def quoted(text: str) -> str:
    """Returns a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def column_sql(column: str) -> str:
    """Returns a column's name as SQL."""
    return '"' + column.replace('"', '""') + '"'


def reason(error: Exception) -> str:
    """Returns what a DuckDB error says, in one line of at most 200 characters, without the query,
    which DuckDB quotes from "LINE 1:" on."""
    return bounded_line(str(error).split("\nLINE")[0])[:200]


# ---- filters

COLUMNS = {
    "step": "INTEGER",
    "group": "INTEGER",
    "set": "VARCHAR",
    "row": "BIGINT",
    "version": "BIGINT",
    "size": "INTEGER",
    "unscored": "INTEGER",
    "reward": "FLOAT",
    "spread": "FLOAT",
    "lowest": "FLOAT",
    "highest": "FLOAT",
    "pass": "FLOAT",
    "length": "FLOAT",
    "longest": "INTEGER",
    "truncated": "FLOAT",
    "staleness": "INTEGER",
    "prompt_tokens": "INTEGER",
    "advantage": "FLOAT",
    "length_effect": "FLOAT",
    "turns": "FLOAT",
    "calls": "FLOAT",
}
"""Column of the table -> type. `set` is `train`, `discarded` (by dynamic sampling), or the data set
of an evaluation; `length_effect` is the correlation of reward and length within the group."""

ASKED_IN = "CASE \"set\" WHEN 'discarded' THEN 'train' ELSE \"set\" END"
"""SQL: the set that the prompt of a group is from."""

COMPLETION_COLUMNS = {
    "step": "INTEGER",
    "group": "INTEGER",
    "set": "VARCHAR",
    "row": "BIGINT",
    "version": "BIGINT",
    "completion": "INTEGER",
    "reward": "FLOAT",
    "advantage": "FLOAT",
    "right": "TINYINT",
    "unscored": "TINYINT",
    "length": "INTEGER",
    "truncated": "TINYINT",
    "turns": "INTEGER",
    "calls": "INTEGER",
}
"""Column of a completion -> type. The first five are its group's; `right` is 1 or 0, or none where
nobody knows; `unscored` and `truncated` are 1 or 0; `length` counts tokens of the model."""

MAX_TERMS, MAX_CHARS = 20, 2000
"""The most conditions and characters of a filter."""
_TERM = re.compile(r"([\w/@.-]+?)\s*(<=|>=|!=|==|=|<|>)\s*(\"[^\"]*\"|\S+)")
"""One condition of a filter: column, operator, value."""


def condition(
    text: str, functions: Iterable[str], columns: Mapping[str, str] = COLUMNS
) -> tuple[str, list[Any]]:
    """Parses a filter that a person typed, and returns (SQL, values of its parameters); "true" for
    a filter without conditions. ShoalError if the text is not a filter.

    Conditions are next to each other, or with `and` between, and all must hold. `column=low..high`
    is a range with both ends; `none` stands for a missing value; a name with spaces is put in
    double quotes; `==` is `=`. What follows MAX_CHARS characters is ignored; more than MAX_TERMS
    conditions, an unknown column and a value of another type are errors. `functions`: names of the
    reward functions, whose means are columns too. `columns`: those of the table, COLUMNS or
    COMPLETION_COLUMNS.

    >>> condition("reward>0.5 step=10..20", [])
    ('"reward" > CAST(? AS FLOAT) AND "step" BETWEEN ? AND ?', [0.5, 10.0, 20.0])
    """
    text = text[:MAX_CHARS]
    parts = []
    values = []
    rest = text  # the text without the conditions that were parsed
    for number, term in enumerate(_TERM.finditer(text)):
        if number >= MAX_TERMS:
            raise ShoalError(f"filter: at most {MAX_TERMS} conditions")
        rest = rest.replace(term[0], "", 1)
        column, operator, value = term.groups()
        column_name = column_of(column, functions, columns)
        column_type = columns.get(column, "FLOAT")
        sql, own_values = _condition(
            column_name, column, column_type, operator.replace("==", "="), value.strip('"')
        )
        parts.append(sql)
        values += own_values
    # What is left must be nothing but `and`.
    words = [word for word in rest.replace(",", " ").split() if word.lower() != "and"]
    if words:
        rest = " ".join(words)
        raise ShoalError(
            f"filter: {rest[:60]!r} is not a condition; write column, operator and value: "
            "reward>0.5"
        )
    return " AND ".join(parts) or "true", values


def _condition(
    sql: str, column: str, column_type: str, operator: str, value: str
) -> tuple[str, list[Any]]:
    """Returns (SQL, values of its parameters) for one condition of a filter. `sql`: the column as
    SQL; `column`: its name as typed, for errors. `operator`: one of < > <= >= = !=; `value`: as
    typed, without quotes. ShoalError if operator or value do not fit the column."""
    if value == "none" and operator in ("=", "!="):
        return f"{sql} IS {'NOT ' if operator == '!=' else ''}NULL", []
    if column_type == "VARCHAR":
        if operator not in ("=", "!="):
            raise ShoalError(f"filter: {column} is a name; compare it with = or !=")
        return f"{sql} {operator} ?", [value]
    low, dots, high = value.partition("..")
    if dots and operator == "=":
        return f"{sql} BETWEEN ? AND ?", [_number(column, low), _number(column, high)]
    # The table's numbers have 32 bits, so 0.1 is converted to them first.
    # A whole number is compared with 0.5 as it is: converted, 0.5 would be 0 or 1.
    compared = f"CAST(? AS {column_type})" if column_type == "FLOAT" else "?"
    return f"{sql} {operator} {compared}", [_number(column, value)]


def _number(column: str, text: str) -> float:
    """Returns the number that a filter compares a column with. ShoalError, with the column's name,
    if the text is no number, or one whose absolute value is 2**31 or more."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 2**31:
        raise ShoalError(f"filter: {column} is a number, {text[:40]!r} is not")
    return value


def column_of(column: str, functions: Iterable[str], columns: Mapping[str, str] = COLUMNS) -> str:
    """Returns the SQL name of a column: one of `columns`, or the figure of a reward function, named
    `format`, or in full `mean/format` (of completions `score/format`). ShoalError, with the
    columns, if there is none of this name."""
    if column in columns:
        return column_sql(column)
    function = column.removeprefix(_function_head(columns))
    if function in functions:
        return column_sql(_function_head(columns) + function)
    known = list(columns) + list(functions)
    raise ShoalError(
        f"there is no column {column[:60]!r}{did_you_mean(column, known) or '.'} Columns: "
        f"{', '.join(known)}"
    )


def _function_head(columns: Mapping[str, str]) -> str:
    """Returns how the columns of reward functions begin: of groups they are means."""
    return "score/" if columns is COMPLETION_COLUMNS else "mean/"


# ---- the table

FILES_AT_ONCE, MAX_FUNCTIONS, MAX_FILES, PROMPT_CHARS = 8, 32, 20_000, 160
"""The most files that are indexed by one call of `refresh`, reward functions of these, files of a
run, and characters of a prompt in the table."""
MAX_COMPLETIONS = 4_000_000
"""The most rows of the table of completions, which would otherwise outgrow the database's memory.
Later files have no rows in it."""
_FILE = re.compile(r"(step|discarded|evaluate_[\w-]{1,200})_(\d{1,9})")
Stamp = tuple[int, int]
"""(time, size) of a file, which show whether its content changed."""

NUMBER, TEXT, LIST = ("INT", "DOUBLE", "FLOAT", "BOOLEAN"), ("VARCHAR",), ("[]",)
NEEDED = {
    "step": NUMBER,
    "group": NUMBER,
    "completion": NUMBER,
    "row": NUMBER,
    "version": NUMBER,
    "reward": NUMBER,
    "valid": NUMBER,
    "correct": NUMBER,
    "advantage": NUMBER,
    "purpose": TEXT,
    "subset": TEXT,
    "prompt": TEXT,
    "text": TEXT,
    "stop_reason": TEXT,
    "prompt_ids": LIST,
    "token_ids": LIST,
    "logprobs": LIST,
    "trainer_logprobs": LIST,
    "loss_mask": LIST,
    "versions": LIST,
    "support_ids": LIST,
}
"""Columns that every groups file must have -> texts of which the name of the type contains one."""


@dataclass
class GroupFile:
    """One file of groups/. `number` stands for it in the table."""

    number: int
    path: Path
    stem: str  # step_000012, discarded_000012, evaluate_held_out_000040
    stamp: Stamp  # stamp of the content that was indexed


@dataclass(frozen=True)
class Added:
    """What a reward function adds to the rewards of a step, before its weight: its `mean` over all
    completions that have a reward, with 0 where it returned None, and the share of them that it
    `scored`."""

    mean: float
    scored: float


class GroupTable:
    """Table of the groups of one run. One thread calls `refresh`, which adds new files; any thread
    may query."""

    def __init__(self, run: StoredRun, database: Database, number: int = 0) -> None:
        """Creates the empty tables of the run's groups, completions, prompts and sums in the
        database, and reads no file. `number` is a part of their names: another one for each run of
        a database."""
        self.run = run
        self.database = database
        self.table = f"groups_{number}"
        self.completions = f"completions_{number}"
        self.prompts = f"prompts_{number}"
        self.sums = f"sums_{number}"
        columns = ", ".join(f"{column_sql(name)} {sql_type}" for name, sql_type in COLUMNS.items())
        database.run(f"CREATE TABLE {self.table} (file INTEGER, {columns})")
        own = []  # the columns that are not the group's
        for name, sql_type in COMPLETION_COLUMNS.items():
            if name == "group" or name not in _OF_THE_GROUP:
                own.append(f"{column_sql(name)} {sql_type}")
        database.run(f"CREATE TABLE {self.completions} (file INTEGER, {', '.join(own)})")
        database.run(f'CREATE TABLE {self.prompts} ("set" VARCHAR, "row" BIGINT, prompt VARCHAR)')
        database.run(
            f"CREATE TABLE {self.sums} (file INTEGER, step INTEGER, function VARCHAR, n DOUBLE, x "
            "DOUBLE, y DOUBLE, xx DOUBLE, yy DOUBLE, xy DOUBLE, low DOUBLE, high DOUBLE, "
            "rewarded DOUBLE, unscored DOUBLE, added DOUBLE)"
        )
        self.files: dict[str, GroupFile] = {}  # stem -> file, of the files that are indexed
        self.by_number: dict[int, GroupFile] = {}  # the same files, by `GroupFile.number`
        self.functions: list[str] = []  # names of the reward functions of any indexed file
        self.is_measured = False  # True if some completion is known to be right or wrong
        self.has_discarded = False  # True if dynamic sampling discarded groups
        self.waiting = 0  # number of files that are not indexed yet
        self.revision = 0  # rises each time that files were indexed
        self.lock = threading.Lock()
        self._failed: dict[str, Stamp] = {}  # stem -> stamp of the content that could not be read
        # (time of the folder when it was listed last, in ns; -1: never, the result of `_list`)
        self._listed: tuple[int, dict[str, tuple[Path, Stamp]]] = (-1, {})

    # ---- taking up files

    def refresh(self) -> bool:
        """Indexes up to FILES_AT_ONCE new or changed files, all of training or all of one data set,
        and drops those that were deleted from disk. A file that could not be read is a problem of
        the run, and is tried again only when it changes. Returns True if more files wait to be
        indexed, `waiting` in number; False if none do, also if there was nothing new."""
        on_disk = self._files_on_disk()
        for gone in self.files.keys() - on_disk.keys():
            self._remove(gone)
        new = []
        for stem, (_, stamp) in on_disk.items():
            is_indexed = stem in self.files and self.files[stem].stamp == stamp
            if not is_indexed and self._failed.get(stem) != stamp:
                new.append(stem)
        self.waiting = len(new)
        if not new:
            return False
        # files of the same kind have nearly the same columns, so index these together
        family = new[0].rpartition("_")[0]
        batch = [stem for stem in new if stem.rpartition("_")[0] == family][:FILES_AT_ONCE]
        self._add([(stem, on_disk[stem][0], on_disk[stem][1]) for stem in batch])
        self.waiting = len(new) - len(batch)
        self.revision += 1
        return self.waiting > 0

    def _files_on_disk(self) -> dict[str, tuple[Path, Stamp]]:
        """Returns stem -> (path, stamp) of the groups files that are on disk, without links that
        lead out of the run; {} if there is no folder. Lists the folder again only if it has
        changed: a thousand files take 20 ms, which a running job next to it should not pay every
        second."""
        try:
            folder = (self.run.root / "groups").resolve(strict=True)
            changed = folder.stat().st_mtime_ns
            if not folder.is_relative_to(self.run.root):
                self.run.add_problem(
                    "groups", "is a link that leads out of the run: it is not read"
                )
                return {}
            # Some file systems store times in seconds: a folder that has just changed may change
            # again without a new time. 3 s, in nanoseconds.
            if self._listed[0] != changed or time.time_ns() - changed < 3_000_000_000:
                self._listed = changed, self._list(folder)
        except FileNotFoundError:
            return {}
        except (OSError, RuntimeError) as error:
            self.run.add_problem("groups", f"cannot be listed ({error})")
            return {}
        return self._listed[1]

    def _list(self, folder: Path) -> dict[str, tuple[Path, Stamp]]:
        """Lists the groups files in a folder, at most MAX_FILES, as `_files_on_disk` returns them.
        A link that leads out of the run is left out, and is a problem of the run."""
        files: dict[str, tuple[Path, Stamp]] = {}
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        if len(entries) > MAX_FILES:
            self.run.add_problem(
                "groups", f"holds {len(entries):,} files: the first {MAX_FILES:,} are read"
            )
        for entry in entries[:MAX_FILES]:
            stem, _, ending = entry.name.rpartition(".")
            if ending != "parquet" or not _FILE.fullmatch(stem):
                continue
            path = folder / entry.name
            if entry.is_symlink():
                path = self.run.file("groups", entry.name)
            if path is not None and path.is_file():
                stat = path.stat()
                files[stem] = path, (stat.st_mtime_ns, stat.st_size)
        return files

    def _remove(self, stem: str) -> None:
        """Removes the groups of an indexed file from the tables; nothing on disk changes."""
        with self.lock:
            file = self.files.pop(stem)
            for table in (self.table, self.completions, self.sums):
                self.database.run(f"DELETE FROM {table} WHERE file = ?", file.number)
            del self.by_number[file.number]

    def _add(self, batch: Sequence[tuple[str, Path, Stamp]]) -> None:
        """Indexes files (stem, path, stamp) together. If DuckDB refuses, indexes each half by
        itself, down to single files, so that one damaged file costs no other. A damaged file
        becomes a problem of the run."""
        # `_insert` needs numbers in succession.
        file_number = max(self.by_number, default=-1) + 1  # 0 for the first file
        files = []
        for stem, path, stamp in batch:
            if stem in self.files:
                self._remove(stem)
            files.append(GroupFile(file_number, path, stem, stamp))
            file_number += 1
        try:
            self._insert(files)
        except (self.database.error, ShoalError) as error:
            if len(batch) > 1:
                self._add(batch[: len(batch) // 2])
                self._add(batch[len(batch) // 2 :])
                return
            stem, _, stamp = batch[0]
            self._failed[stem] = stamp
            self.run.add_problem(f"groups/{stem}.parquet", f"is skipped ({reason(error)})")
            return
        with self.lock:
            for file in files:
                self.files[file.stem] = self.by_number[file.number] = file
                self.has_discarded |= file.stem.startswith(f"{DISCARDED}_")

    def _insert(self, files: Sequence[GroupFile]) -> None:
        """Reads files, whose numbers follow one another, into the tables, all or none of them, and
        adds a column for each new reward function, of at most MAX_FUNCTIONS of these files. Does
        not add them to `files`. ShoalError if a needed column is missing or of another type,
        database.error if a file is damaged."""
        database = self.database
        columns = database.columns([file.path for file in files])
        for column, kinds in NEEDED.items():
            if not any(kind in columns.get(column, "") for kind in kinds):
                raise ShoalError(f"it lacks the column {column}, or another program wrote it")
        functions = []
        for column in columns:
            if column.startswith("component/") and len(functions) < MAX_FUNCTIONS:
                functions.append(column.removeprefix("component/"))
        function_columns = ""  # SQL for the values c0, c1, ... of each completion
        means = ""  # SQL for their means over each group
        scores = ""  # SQL for them as columns of the completions
        sums = [("reward", "reward")]  # (name of a function, its column)
        for number, function in enumerate(functions):
            mean = column_sql(f"mean/{function}")
            score = column_sql(f"score/{function}")
            component = column_sql(f"component/{function}")
            if function not in self.functions:
                database.run(f"ALTER TABLE {self.table} ADD COLUMN {mean} FLOAT")
                database.run(f"ALTER TABLE {self.completions} ADD COLUMN {score} FLOAT")
                self.functions.append(function)
            function_columns += f", TRY_CAST({component} AS DOUBLE) AS c{number}"
            means += f", avg(c{number}) AS {mean}"
            scores += f", c{number} AS {score}"
            sums.append((function, f"c{number}"))
        turns = ", NULL AS turns, NULL AS calls"
        if "messages" in columns:
            turns = f", {_count_of_role('assistant')} AS turns, {_count_of_role('tool')} AS calls"
        # DuckDB counts the files of a query from 0 (`file_index`); `first` makes that their number.
        source = _SOURCE.format(first=files[0].number, turns=turns, functions=function_columns)
        paths = [str(file.path) for file in files]
        database.run(f"CREATE OR REPLACE TEMP TABLE read_now AS {source}", paths)
        counted = database.rows(
            "SELECT count(*) AS num_new, count(correct) > 0 AS is_measured, "
            f"(SELECT count(*) FROM {self.completions}) AS num_held FROM read_now"
        )[0]
        has_place = counted["num_held"] + counted["num_new"] <= MAX_COMPLETIONS
        with self.lock:
            database.run("BEGIN")
            try:
                database.run(f"INSERT INTO {self.table} BY NAME {_GROUPS.format(means=means)}")
                if has_place:
                    completions = _COMPLETIONS.format(scores=scores)
                    database.run(f"INSERT INTO {self.completions} BY NAME {completions}")
                database.run(_PROMPTS.format(prompts=self.prompts, chars=PROMPT_CHARS))
                for function, column in sums:
                    database.run(
                        _SUMS.format(sums=self.sums, function=quoted(function), column=column)
                    )
            except BaseException:
                database.run("ROLLBACK")
                raise
            database.run("COMMIT")
        self.is_measured |= counted["is_measured"]
        database.run("DROP TABLE read_now")

    # ---- what it knows

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward function, from the groups of the newest step, or of an
        evaluation if there is no step; {} if there are none, or if the file is damaged. Reads the
        file each time, because the table may not have indexed it yet."""
        on_disk = self._files_on_disk()
        if not on_disk:
            return {}
        # Steps come after evaluations, and within these the largest name is the newest.
        newest = max(on_disk, key=lambda stem: (stem.startswith("step_"), stem))
        path, _ = on_disk[newest]
        try:
            chosen = []
            for column in self.database.columns([path]):
                if column.startswith("weight/") and len(chosen) < MAX_FUNCTIONS:
                    name = column_sql(column)
                    chosen.append(f"TRY_CAST({name} AS DOUBLE) AS {name}")
            query = f"SELECT {', '.join(chosen)} FROM read_parquet(?) LIMIT 1"
            rows = self.database.rows(query, str(path))
        # The file is damaged, which indexing reports; or `chosen` is empty, which DuckDB refuses.
        except self.database.error:
            return {}
        weights = {}
        for row in rows:
            for column, value in row.items():
                if value is not None:
                    weights[column.removeprefix("weight/")] = value
        return weights

    def partial_functions(self) -> dict[str, dict[int, Added]]:
        """Returns function -> step -> what it adds to the rewards of the step's training groups,
        for the reward functions that did not score some completions which others scored; {} if
        there are none in the files that are indexed."""
        query = (
            "SELECT function, step, sum(added) / sum(rewarded) AS mean, "
            "1 - sum(unscored) / sum(rewarded) AS scored FROM {sums} WHERE rewarded > 0 "
            "AND function IN (SELECT function FROM {sums} GROUP BY function "
            "HAVING sum(unscored) > 0) GROUP BY function, step"
        )
        with self.lock:
            rows = self.database.rows(query.format(sums=self.sums))
        functions: dict[str, dict[int, Added]] = {}
        for row in rows:
            by_step = functions.setdefault(row["function"], {})
            by_step[row["step"]] = Added(row["mean"], row["scored"])
        return functions

    def evaluation_stamp(self, data_set: str, version: int) -> Stamp | None:
        """Returns the stamp of the file with the answers of an evaluation; None if it is not
        there."""
        _, stamp = self._evaluation_file(data_set, version)
        return stamp

    def _evaluation_file(self, data_set: str, version: int) -> tuple[Path | None, Stamp | None]:
        name = groups_file(Purpose.EVALUATE, data_set, version).removesuffix(".parquet")
        return self._files_on_disk().get(name, (None, None))

    def evaluated_rewards(self, data_set: str, version: int) -> dict[int, float]:
        """Returns row of the data -> mean reward of the answers of an evaluation that were scored;
        {} if its answers are not stored, or if the file is damaged. Reads the file, because the
        table may not have indexed it yet."""
        path, _ = self._evaluation_file(data_set, version)
        if path is None:
            return {}
        query = (
            'SELECT TRY_CAST("row" AS BIGINT) AS question, '
            "avg(TRY_CAST(reward AS DOUBLE)) AS mean FROM read_parquet(?) GROUP BY question"
        )
        try:
            rows = self.database.rows(query, str(path))
        except self.database.error:  # the file is damaged, which indexing reports
            return {}
        rewards = {}
        for row in rows:
            if row["question"] is not None and row["mean"] is not None:
                rewards[row["question"]] = row["mean"]
        return rewards

    @property
    def num_left_out(self) -> int:
        """The number of completions of the indexed files that are not in the table of completions,
        because it has MAX_COMPLETIONS."""
        counted = self.database.rows(
            f"SELECT (SELECT coalesce(sum(size), 0) FROM {self.table}) AS num_all, "
            f"(SELECT count(*) FROM {self.completions}) AS num_held"
        )[0]
        return int(counted["num_all"]) - counted["num_held"]

    def blank_columns(self, columns: Mapping[str, str]) -> list[str]:
        """Returns the names of the columns, of COLUMNS or COMPLETION_COLUMNS, that have no value
        but 0 in the whole table."""
        source = self.table
        if columns is COMPLETION_COLUMNS:
            source = _WITH_GROUP.format(completions=self.completions, groups=self.table)
        numbers = [name for name, sql_type in columns.items() if sql_type != "VARCHAR"]
        counts = [f"count(*) FILTER ({column_sql(name)} != 0)" for name in numbers]
        counted = self.database.rows(f"SELECT [{', '.join(counts)}] AS counts FROM {source}")
        return [
            name for name, count in zip(numbers, counted[0]["counts"], strict=True) if count == 0
        ]

    def rows(
        self,
        filter: str = "",
        sort: str = "step",
        descending: bool = False,
        offset: int = 0,
        limit: int = 100,
        hits: str = "",
        by_prompt: str = "",
    ) -> tuple[list[dict[str, Any]], int]:
        """Returns (rows, total): `limit` rows of the table from `offset` on, each a group, and the
        number of all rows that the filter (see `condition`) leaves. A row has COLUMNS,
        `mean/<function>`, the beginning of its `prompt` and its `file` (the name without ending);
        the last two are "" if they are not known. Floats are rounded (`rounded`). Rows that are
        equal in `sort` are in order of file and group.

        `sort`: a column, or with `by_prompt` also `times` or `change`; rows without a value are the
        last ones. `hits`: name of a database table with columns file and group, the result of a
        search; only these groups count. "": all do. `by_prompt`: one of PROMPTS; then there is a
        row for each prompt that was answered more than once, with its newest group, the number of
        groups (`times`) and the change of its share of right answers, or of its mean reward, since
        the first (`change`).

        ShoalError if the filter, the column to sort by or `by_prompt` is wrong."""
        where, values = condition(filter, self.functions)
        if hits:
            where += f' AND (file, "group") IN (SELECT (file, "group") FROM {hits})'
        source = f"(SELECT * FROM {self.table} WHERE {where})"
        names = ["file", *COLUMNS]
        names += [f"mean/{function}" for function in self.functions]
        extra = ()
        if by_prompt:
            if by_prompt not in PROMPTS:
                raise ShoalError(f"prompts={by_prompt[:40]}: expected {', '.join(PROMPTS)}")
            extra = ("times", "change")
            names += extra
            prompts = _BY_PROMPT.format(chosen=source, wanted=PROMPTS[by_prompt])
            source = f"({prompts})"
        column = sort if sort in extra else column_of(sort, self.functions)
        order = f'{_ordered(column, descending)}, file, "group"'
        return self._page(source, values, names, order, limit, offset)

    def prompt_rows(self, subset: str, row: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Returns (rows, total) as `rows` does: the newest groups of one prompt, at most `limit`,
        in the order of their steps. `subset`: `train`, also for the groups that dynamic sampling
        discarded, or the data set of an evaluation; `row`: the prompt's row in the data."""
        source = f'(SELECT * FROM {self.table} WHERE {ASKED_IN} = ? AND "row" = ?)'
        names = ["file", *COLUMNS]
        order = 'step DESC, file DESC, "group" DESC'
        found, total = self._page(source, [subset, row], names, order, limit, 0)
        return found[::-1], total

    def completion_rows(
        self,
        filter: str = "",
        sort: str = "step",
        descending: bool = False,
        offset: int = 0,
        limit: int = 100,
        hits: str = "",
        file: GroupFile | None = None,
    ) -> tuple[list[dict[str, Any]], int]:
        """Returns (rows, total) as `rows` does, each row a completion, with COMPLETION_COLUMNS and
        `score/<function>`. Equal rows are in order of file, group and completion. `hits`: name of a
        database table of (file, group, completion). `file`: only its completions count. ShoalError
        if the filter or the column to sort by is wrong."""
        where, values = condition(filter, self.functions, COMPLETION_COLUMNS)
        if file is not None:
            where += f" AND file = {file.number}"
        if hits:
            where += (
                ' AND (file, "group", completion) IN (SELECT (file, "group", completion) '
                f"FROM {hits})"
            )
        joined = _WITH_GROUP.format(completions=self.completions, groups=self.table)
        names = ["file", *COMPLETION_COLUMNS]
        names += [f"score/{function}" for function in self.functions]
        column = column_of(sort, self.functions, COMPLETION_COLUMNS)
        order = f'{_ordered(column, descending)}, file, "group", completion'
        source = f"(SELECT * FROM {joined} WHERE {where})"
        return self._page(source, values, names, order, limit, offset)

    def _page(
        self,
        source: str,
        values: Sequence[Any],
        names: Sequence[str],
        order: str,
        limit: int,
        offset: int,
    ) -> tuple[list[dict[str, Any]], int]:
        """Returns (rows, total) of a query in brackets: `limit` of its rows from `offset` on, with
        the columns `names`, and how many it has. `values` stand for its `?`; `order`: as SQL."""
        columns = ", ".join(map(column_sql, names))
        with self.database.user_query(), self.lock:
            rows = self.database.rows(
                f"SELECT {columns} FROM {source} ORDER BY {order} LIMIT ? OFFSET ?",
                *values,
                limit,
                offset,
            )
            counted = self.database.rows(f"SELECT count(*) AS n FROM {source}", *values)
            files = {number: file.stem for number, file in self.by_number.items()}
        prompts = self.prompt_texts(rows)
        for row in rows:
            row["prompt"] = prompts.get((row["set"], row["row"]), "")
            row["file"] = files.get(row["file"], "")
            for name, value in row.items():
                if isinstance(value, float):
                    row[name] = rounded(value)
        return rows, counted[0]["n"]

    def prompt_texts(self, rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], str]:
        """Returns (set, row of the data) -> the shortened text of the prompt, for the prompts of
        these rows, and for those of the same data rows in other sets."""
        wanted = {int(row["row"]) for row in rows if row["row"] is not None}
        if not wanted:
            return {}
        numbers = ", ".join(map(str, sorted(wanted)))
        prompts = self.database.rows(
            f'SELECT "set", "row", prompt FROM {self.prompts} WHERE "row" IN ({numbers})'
        )
        return {(row["set"], row["row"]): row["prompt"] for row in prompts}


def _ordered(column: str, descending: bool) -> str:
    """Returns SQL that sorts by a column; rows without a value are the last ones."""
    return f"{column} {'DESC' if descending else 'ASC'} NULLS LAST"


def _count_of_role(role: str) -> str:
    """Returns SQL for the number of messages with a role: by how much the text becomes shorter
    without its mentions, divided by the length of one. Within JSON text quotes are escaped, so the
    content of a message cannot match."""
    text = f'"role": "{role}"'
    return f"(length(messages) - length(replace(messages, {quoted(text)}, ''))) / {len(text)}"


_SOURCE = """
SELECT file_index + {first} AS file, TRY_CAST(step AS INTEGER) AS step,
  TRY_CAST("group" AS INTEGER) AS "group", TRY_CAST(completion AS INTEGER) AS completion,
  CASE WHEN purpose <> 'train' THEN left(subset, 200) WHEN subset = 'discarded' THEN subset
    ELSE 'train' END AS "set",
  TRY_CAST("row" AS BIGINT) AS "row",
  TRY_CAST(version AS BIGINT) AS version, TRY_CAST(reward AS DOUBLE) AS reward,
  TRY_CAST(valid AS BOOLEAN) AS valid,
  TRY_CAST(correct AS BOOLEAN) AS correct, TRY_CAST(advantage AS DOUBLE) AS advantage, stop_reason,
  coalesce(list_sum(CAST(loss_mask AS INTEGER[])), len(token_ids)) AS length,
  len(prompt_ids) AS prompt_tokens,
  right(prompt, 20000) AS prompt {turns} {functions}
FROM read_parquet(?, union_by_name = true)
"""

_GROUPS = """
SELECT file, any_value(step) AS step, "group", any_value("set") AS "set", any_value("row") AS "row",
  any_value(version) AS version, count(*) AS size, count_if(NOT coalesce(valid, false)) AS unscored,
  avg(reward) AS reward, stddev_pop(reward) AS spread,
  min(reward) AS lowest, max(reward) AS highest,
  avg(correct::INTEGER) AS pass, avg(length) AS length, max(length) AS longest,
  avg((stop_reason = 'length')::INTEGER) AS truncated,
  CASE WHEN any_value("set") IN ('train', 'discarded')
    THEN any_value(step) - 1 - any_value(version) ELSE 0 END AS staleness,
  avg(turns) AS turns, avg(calls) AS calls, any_value(prompt_tokens) AS prompt_tokens,
  max(abs(advantage)) AS advantage,
  CASE WHEN stddev_pop(reward) > 1e-9 AND stddev_pop(length) > 0 THEN corr(reward, length) END
    AS length_effect {means}
FROM read_now GROUP BY file, "group"
"""

_COMPLETIONS = """
SELECT file, "group", completion, reward, advantage, correct::TINYINT AS "right",
  (NOT coalesce(valid, false))::TINYINT AS unscored, length,
  (stop_reason = 'length')::TINYINT AS truncated, turns, calls {scores}
FROM read_now
"""

_OF_THE_GROUP = ("step", "group", "set", "row", "version")

_WITH_GROUP = """
(SELECT own.*, step, "set", "row", version
  FROM {completions} AS own JOIN (SELECT file, "group", step, "set", "row", version FROM {groups})
  USING (file, "group"))
"""

# The last message of a conversation, else the text; of a long one beginning and end, where the
# question mostly stands. A row of the data has its prompt once, however often it is asked: that of
# the first step of the files that are read together, so that it does not depend on threads.
_PROMPTS = """
INSERT INTO {prompts}
SELECT "set", "row", CASE WHEN length(text) > {chars} THEN left(text, {chars} // 2 - 3) || ' ... '
  || right(text, {chars} // 2 - 2) ELSE text END
FROM (SELECT "set", "row", arg_min(coalesce(
  CASE WHEN json_valid(prompt) THEN json_extract_string(prompt, '$[#-1].content') END, prompt),
  step) AS text
  FROM read_now GROUP BY "set", "row") AS new
WHERE NOT EXISTS (SELECT 1 FROM {prompts} AS old
  WHERE old."set" = new."set" AND old."row" = new."row")
"""

# `change`: of the share of right answers, of a task without that notion of the mean reward.
_BY_PROMPT = """
WITH chosen AS {chosen}
SELECT * FROM (
  SELECT chosen.*, times, coalesce(pass, reward) - before AS change FROM chosen JOIN (
    SELECT "set", "row", count(*) AS times, arg_min(coalesce(pass, reward), step) AS before,
      max(step) AS step
    FROM chosen GROUP BY "set", "row" HAVING count(*) > 1) USING ("set", "row", step))
WHERE {wanted}
"""

PROMPTS = {"1": "true", "learned": "change > 0", "lost": "change < 0"}
"""Which of the prompts that were answered more than once are wanted -> SQL."""

# `rewarded`: the completions that have a reward. `unscored`: those of them that only other
# functions scored, since this one returned None; it adds 0 to their reward. `added`: the sum of its
# values over `rewarded`.
_SUMS = """
INSERT INTO {sums}
SELECT file, any_value(step), {function}, count({column}), sum(x), sum({column}), sum(x * x),
  sum({column} * {column}), sum(x * {column}), min({column}), max({column}),
  count(reward), count(reward) FILTER ({column} IS NULL),
  coalesce(sum({column}) FILTER (reward IS NOT NULL), 0)
FROM (SELECT *, CASE WHEN {column} IS NULL THEN NULL ELSE length::DOUBLE END AS x FROM read_now
  WHERE "set" = 'train')
GROUP BY file
"""
