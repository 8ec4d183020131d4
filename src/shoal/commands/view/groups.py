"""The Groups view and what it leads to: a search over completions, one group, one completion's
tokens."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.commands.view.curves import Curves
from shoal.records import ShoalError, ground_truth
from shoal.runs.compare import acting_keys, likely_keys
from shoal.runs.group_table import Database, GroupFile, GroupTable, column_sql, reason
from shoal.runs.lines import bounded_json, bounded_line
from shoal.runs.metrics import is_clock
from shoal.runs.reader import StoredRun

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


MAX_TOKENIZER_BYTES, MAX_REPLAY_BYTES = 64 << 20, 32 << 20


MAX_PENDING = 8
"""Tokens that a single character may consist of, at most."""


MAX_SIBLINGS, MAX_TEXT_CHARS, MAX_TOKENS = 1024, 200_000, 200_000


_LISTS = (
    "prompt_ids",
    "token_ids",
    "logprobs",
    "loss_mask",
    "versions",
    "trainer_logprobs",
    "support_ids",
    "own_prompt_ids",
)


def group_detail(index: GroupTable, stem: str, place: int) -> dict[str, Any]:
    """A group's prompt and completions with their rewards, without what is stored by token."""
    file = _file(index, stem)
    columns, as_json = _columns(index, file)
    plain = [column for column in columns if column not in _LISTS]
    chosen = ", ".join(
        f"left({column_sql(column)}, {MAX_TEXT_CHARS}) AS {column_sql(column)}"
        if columns[column] == "VARCHAR"
        else column_sql(column)
        for column in plain
    )
    rows = _read(
        index,
        file,
        f"{chosen}, len(token_ids) AS num_tokens, len(prompt_ids) AS num_prompt_tokens, "
        "coalesce(list_sum(CAST(loss_mask AS INTEGER[])), len(token_ids)) AS num_trained",
        place,
    )
    first = rows[0]
    data = {
        column.removeprefix("column/"): _value(first[column], column in as_json)
        for column in plain
        if column.startswith("column/")
    }
    return {
        "file": stem,
        "group": place,
        "step": first["step"],
        "version": first["version"],
        "row": first["row"],
        "set": "train" if first["purpose"] == "train" else first["subset"],
        "prompt": _value(first["prompt"], "prompt" in as_json),
        "num_prompt_tokens": first["num_prompt_tokens"],
        "columns": data,
        "right_answer": ground_truth(data),
        "weights": _under(first, "weight/"),
        "completions": [_completion(row, as_json) for row in rows],
        **_neighbours(index, file, place),
    }


def _completion(row: Mapping[str, Any], as_json: frozenset[str]) -> dict[str, Any]:
    kept = (
        "completion",
        "text",
        "reward",
        "valid",
        "correct",
        "advantage",
        "stop_reason",
        "num_tokens",
        "num_trained",
    )
    return {
        **{column: row[column] for column in kept},
        "components": _under(row, "component/"),
        "messages": _value(row.get("messages"), "messages" in as_json) or None,
        "extra": {
            column.removeprefix("extra/"): _value(row[column], column in as_json)
            for column in row
            if column.startswith("extra/") and row[column] is not None
        },
    }


def _under(row: Mapping[str, Any], head: str) -> dict[str, Any]:
    return {
        column.removeprefix(head): value
        for column, value in row.items()
        if column.startswith(head) and value is not None
    }


def _value(value: Any, is_json: bool) -> Any:
    if not is_json or not isinstance(value, str):
        return value
    try:
        return bounded_json(value)
    except ValueError:  # cut off, or no JSON: shown as it is
        return value


def _neighbours(index: GroupTable, file: GroupFile, place: int) -> dict[str, Any]:
    """The groups before and after this one in its file, and the files of the same kind before and
    after."""
    groups = [
        row["g"]
        for row in index.database.rows(
            f'SELECT "group" AS g FROM {index.table} WHERE file = ? ORDER BY g', file.number
        )
    ]
    kind = file.stem.rpartition("_")[0]
    stems = sorted(stem for stem in index.files if stem.rpartition("_")[0] == kind)
    at, own = stems.index(file.stem), groups.index(place) if place in groups else 0
    return {
        "previous_group": groups[own - 1] if own > 0 else None,
        "next_group": groups[own + 1] if own + 1 < len(groups) else None,
        "previous_file": stems[at - 1] if at else None,
        "next_file": stems[at + 1] if at + 1 < len(stems) else None,
    }


def _file(index: GroupTable, stem: str) -> GroupFile:
    file = index.files.get(stem)
    if file is None:
        raise ShoalError(
            f"{stem[:80]}: the run has no such groups file"
            + (" yet: it is still being read" if index.waiting else "")
        )
    return file


def _columns(index: GroupTable, file: GroupFile) -> tuple[dict[str, str], frozenset[str]]:
    try:
        return index.database.columns([file.path]), index.database.json_columns(file.path)
    except index.database.error as error:
        raise ShoalError(f"{file.stem}: {reason(error)}") from error


def _read(
    index: GroupTable, file: GroupFile, columns: str, place: int, completion: int | None = None
) -> list[dict]:
    where = '"group" = ?' + (" AND completion = ?" if completion is not None else "")
    values = [place] if completion is None else [place, completion]
    try:
        rows = index.database.rows(
            f"SELECT {columns} FROM read_parquet(?) WHERE {where} ORDER BY completion "
            f"LIMIT {MAX_SIBLINGS}",
            str(file.path),
            *values,
        )
    except index.database.error as error:
        raise ShoalError(f"{file.stem}: {reason(error)}") from error
    if not rows:
        what = (
            f"group {place}" if completion is None else f"completion {completion} in group {place}"
        )
        raise ShoalError(f"{file.stem} has no {what}")
    return rows


# ---- tokens


class Pieces:
    """The text of single tokens, by the run's own tokenizer.json.

    Called with token ids, it gives each one's text: empty for a part of a character, which its last
    token has whole. An empty list if the run has no tokenizer that can be read."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._tokenizer: Any = None
        self._opened = False

    def __call__(self, ids: Sequence[int]) -> list[str]:
        if not self._opened:
            self._opened, self._tokenizer = True, self._load()
        return self._pieces(list(ids)) if self._tokenizer is not None else []

    def _load(self) -> Any:
        import tokenizers

        path = self._run.file("model", "tokenizer.json")
        if path is None:
            self._run.problem(
                "model/tokenizer.json", "is not there: tokens are shown without their texts"
            )
            return None
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            self._run.problem("model/tokenizer.json", "has more than 64 MiB: it is not read")
            return None
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:  # a panic of the Rust library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._run.problem(
                "model/tokenizer.json", f"cannot be read ({bounded_line(error)[:120]})"
            )
            return None

    def _pieces(self, ids: list[int]) -> list[str]:
        found, start, read = [], 0, 0
        for place in range(len(ids)):
            before, whole = self._decode(ids[start:read]), self._decode(ids[start : place + 1])
            if whole.endswith("\ufffd") and place - read < MAX_PENDING and place + 1 < len(ids):
                found.append("")
                continue
            found.append(
                whole[len(before) :]
                if whole.startswith(before)
                else self._decode(ids[place : place + 1])
            )
            start, read = read, place + 1
        return found

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        try:
            return self._tokenizer.decode([id for id in ids if id >= 0], skip_special_tokens=False)
        except Exception:  # an id beyond the vocabulary
            return "\ufffd"


def token_detail(
    index: GroupTable,
    stem: str,
    place: int,
    completion: int,
    pieces: Any,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that is stored by token of one completion, one list a quantity; null where it was
    not recorded.

    `pieces(ids)` gives each token's text. `ratio` is the trainer's probability before the update by
    the sampler's."""
    file = _file(index, stem)
    own = (
        "coalesce(own_prompt_ids, prompt_ids)"
        if "own_prompt_ids" in _columns(index, file)[0]
        else "prompt_ids"
    )
    rows = _read(
        index,
        file,
        f"version, advantage, reward, {own} AS prompt_ids, token_ids, logprobs, "
        "trainer_logprobs, loss_mask, versions, support_ids",
        place,
        completion,
    )
    row = rows[0]
    ids = (row["token_ids"] or [])[:MAX_TOKENS]
    size = len(ids)
    sampler, trainer = (_floats(row[column], size) for column in ("logprobs", "trainer_logprobs"))
    ratio = np.exp(np.clip(trainer - sampler, -50, 50))
    advantage = row["advantage"] if row["advantage"] is not None else math.nan
    mask = (
        np.ones(size, bool)
        if row["loss_mask"] is None
        else np.array([bool(one) for one in row["loss_mask"]][:size])
    )
    low, high = (
        1 - _number(settings, "algorithm.clip_low", 0.2),
        1 + _number(settings, "algorithm.clip_high", 0.2),
    )
    clipped = (
        np.where(advantage > 0, ratio > high, ratio < low) & np.isfinite(ratio) & (advantage != 0)
    )
    versions = row["versions"] or [row["version"]] * size
    entropy, likeliest = _replayed(index.run, f"replays/{stem}_{place}.json", completion, ids)
    return {
        "file": stem,
        "group": place,
        "completion": completion,
        "advantage": row["advantage"],
        "reward": row["reward"],
        "is_trained": row["trainer_logprobs"] is not None,
        "prompt": pieces((row["prompt_ids"] or [])[:MAX_TOKENS]),
        "tokens": pieces(ids) or None,
        "ids": ids,
        "logprob": _listed(sampler),
        "trainer": _listed(trainer),
        "ratio": _listed(ratio),
        "gap": _listed(trainer - sampler),
        "weighted": _listed(advantage * ratio),
        "clipped": [bool(one) for one in clipped],
        "mask": [bool(one) for one in mask],
        "versions": versions[:size],
        "support": [len(one) for one in row["support_ids"]][:size] if row["support_ids"] else None,
        "entropy": entropy,
        "likeliest": likeliest,
    }


def _replayed(
    run: StoredRun, name: str, completion: int, ids: Sequence[int]
) -> tuple[list | None, list | None]:
    """By token the entropy, and the likeliest tokens with their log-probs, as `shoal replay
    likeliest=` stored them; None where it did not."""
    text = run.text(name, MAX_REPLAY_BYTES)
    try:
        tokens = bounded_json(text)["completions"][completion]["tokens"] if text else None
        if tokens is None or [token["id"] for token in tokens] != list(
            ids
        ):  # a resumed run sampled others since
            return None, None
        return (
            [float(token["entropy"]) for token in tokens],
            [
                [[str(one["text"]), float(one["logprob"])] for one in token["likeliest"]]
                for token in tokens
            ],
        )
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        run.problem(name, f"is damaged ({type(error).__name__})")
        return None, None


def _floats(values: Sequence[float | None] | None, size: int) -> np.ndarray:
    known = [math.nan if value is None else value for value in values or ()][:size]
    return np.array(known + [math.nan] * (size - len(known)))


def _listed(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def _number(settings: Mapping[str, Any], key: str, default: float) -> float:
    value = settings.get(key, default)
    return float(value) if isinstance(value, int | float) else default


# ---- two runs

STAGES = (
    "data",
    "sampling",
    "rewards",
    "update",
)  # of a step: a difference in one causes others after it


def first_difference(
    a: Curves, b: Curves, database: Database, keys: Sequence[str]
) -> dict[str, Any]:
    """The first step of both runs with a metric that differs, clocks aside, and the first
    completion that does.

    `step` is None where nothing differs, `num_shared` the number of steps in both; `stage` is None
    where the step's groups cannot be compared; `causes` are those of `keys`, the settings that
    differ, that act on the stage."""
    steps, at_a, at_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    firsts: list[int] = []
    for metric in a.columns.keys() & b.columns.keys():
        x, y = np.array(a.columns[metric])[at_a], np.array(b.columns[metric])[at_b]
        differs = np.flatnonzero((x != y) & ~(np.isnan(x) & np.isnan(y)))
        if len(differs) and not is_clock(metric):
            firsts.append(int(differs[0]))
    if not firsts:
        return {"num_shared": len(steps), "step": None, "causes": []}
    step = int(steps[min(firsts)])
    found = _first_completion(database, [a.run, b.run], f"step_{step:06d}")
    # Other weights sample other texts, and other rewards make other weights.
    stages = {"sampling": ("sampling", "rewards", "update"), None: ()}.get(
        found["stage"], (found["stage"],)
    )
    acting = acting_keys(
        keys, (number for one in (a, b) for number in one.columns.get("prompts/dropped", ()))
    )
    return {"num_shared": len(steps), "step": step, "causes": likely_keys(stages, acting), **found}


def _first_completion(database: Database, runs: Sequence[StoredRun], stem: str) -> dict[str, Any]:
    """The first completion of a step that has another data row, else another text, else another
    reward."""
    files = [run.file("groups", f"{stem}.parquet") for run in runs]
    try:
        rows = database.rows(
            """SELECT "group", completion, CASE WHEN a."row" IS DISTINCT FROM b."row" THEN 0
                WHEN a.text IS DISTINCT FROM b.text THEN 1
                WHEN a.reward IS DISTINCT FROM b.reward THEN 2 ELSE 3 END AS stage
            FROM read_parquet(?) AS a JOIN read_parquet(?) AS b USING ("group", completion)
            ORDER BY stage, "group", completion LIMIT 1""",
            *map(str, files),
        )
    except database.error:  # the step is not in both, or a file is damaged, which the table names
        rows = []
    return {**rows[0], "file": stem, "stage": STAGES[rows[0]["stage"]]} if rows else {"stage": None}
