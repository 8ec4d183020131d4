"""The data of the Groups view and of the views that it links to: a search over completions, one
group, the tokens of one completion, and the first difference between two runs."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from shoal.commands.view.curves import Curves
from shoal.records import Purpose, ShoalError, ground_truth, turns_of
from shoal.runs.compare import (
    GROUP_STAGES,
    SettingDifference,
    likely_keys,
    without_idle_limits,
)
from shoal.runs.group_table import (
    ASKED_IN,
    Database,
    GroupFile,
    GroupTable,
    column_sql,
    reason,
)
from shoal.runs.groups import DISCARDED, EXPERT_COLUMNS, groups_file
from shoal.runs.lines import bounded_json, bounded_line
from shoal.runs.metrics import is_clock
from shoal.runs.reader import StoredRun

MAX_TEXT, MAX_HITS, MOST_KEPT = 500, 1_000_000, 4
"""The most characters of a text that is searched for, the most completions that a search finds, and
the most searches that are kept."""


SEARCH_SECONDS = 0.15
"""For how many seconds one request continues a search."""


class Search:
    """A search for a text in the prompts and completions of a run's groups, file by file, the
    newest first. The completions found are in the database table `table`.

    All texts of a run cannot be read in a few hundred milliseconds, so each request continues the
    search and shows what was found so far."""

    def __init__(self, index: GroupTable, text: str, number: int) -> None:
        """Creates the table of (file, group, completion), and searches nothing yet. Upper and lower
        case of `text` are the same. `number`: another one for each search of a database."""
        self.table = f"hits_{number}"
        self._index = index
        self._text = text.lower()
        self._seen: set[int] = set()  # numbers of the files that were searched
        self._hits = 0
        self._lock = threading.Lock()
        index.database.run(
            f'CREATE TABLE {self.table} (file INTEGER, "group" INTEGER, completion INTEGER)'
        )

    def read_on(self, seconds: float = SEARCH_SECONDS) -> dict[str, Any]:
        """Searches files that were not searched yet, the newest first, for so many seconds. Returns
        how far the search has come: `done` (all files, or MAX_HITS completions found), the number
        of files `searched`, and of all `files`. Files that the run writes later are searched by the
        next call."""
        until = time.monotonic() + seconds
        with self._lock:
            files = list(self._index.files.values())
            waiting = [file for file in files if file.number not in self._seen]
            waiting.sort(key=lambda file: file.number)
            while waiting and self._hits < MAX_HITS and time.monotonic() < until:
                # The newest, because files are numbered in the order in which they were indexed.
                file = waiting.pop()
                self._seen.add(file.number)
                # If a file was replaced or is damaged, GroupTable reports it.
                with contextlib.suppress(self._index.database.error):
                    self._read(file)
            return {
                "done": not waiting or self._hits >= MAX_HITS,
                "searched": len(self._seen),
                "files": len(self._seen) + len(waiting),
            }

    def _read(self, file: GroupFile) -> None:
        """Searches one file, and adds the completions found to the table; a match in the prompt
        counts for all of its completions. database.error if the file is damaged."""
        added = self._index.database.rows(
            f'INSERT INTO {self.table} SELECT {file.number}, TRY_CAST("group" AS INTEGER), '
            "TRY_CAST(completion AS INTEGER) FROM read_parquet(?) "
            "WHERE (contains(lower(prompt), ?) OR contains(lower(text), ?)) "
            'AND TRY_CAST("group" AS INTEGER) IS NOT NULL',
            str(file.path),
            self._text,
            self._text,
        )
        self._hits += added[0]["Count"]

    def drop(self) -> None:
        """Deletes the table of the completions found, after which the search cannot be used."""
        with self._lock:
            self._index.database.run(f"DROP TABLE {self.table}")


class Searches:
    """Keeps the MOST_KEPT searches that were used last."""

    def __init__(self) -> None:
        self._kept: dict[Any, Search] = {}
        self._number = 0
        self._lock = threading.Lock()

    def get(self, index: GroupTable, text: str) -> Search:
        """Returns the search for a text in a run's groups; searches nothing itself
        (`Search.read_on`). Makes a new one if none is kept for this run and text, and drops the
        least recently used if there are then more than MOST_KEPT."""
        key = (index.table, text)
        with self._lock:
            if key not in self._kept:
                self._number += 1
                self._kept[key] = Search(index, text, self._number)
            self._kept[key] = self._kept.pop(key)  # the last of the dict is the one used last
            for old in list(self._kept)[:-MOST_KEPT]:  # all but the last MOST_KEPT
                self._kept.pop(old).drop()
            return self._kept[key]


MAX_TOKENIZER_BYTES, MAX_REPLAY_BYTES = 64 << 20, 32 << 20


MAX_PENDING = 8
"""The most tokens that a single character may consist of."""


MAX_SIBLINGS, MAX_TEXT_CHARS, MAX_TOKENS = 1024, 200_000, 200_000
"""The most completions of a group, characters of a text, and tokens of a completion in a record."""


_LISTS = (
    "prompt_ids",
    "token_ids",
    "logprobs",
    "loss_mask",
    "versions",
    "trainer_logprobs",
    "support_ids",
    "own_prompt_ids",
    *EXPERT_COLUMNS,
)


def group_detail(
    index: GroupTable, stem: str, number: int, text_of: Callable[[Sequence[int]], str] | None = None
) -> dict[str, Any]:
    """Returns the record of one group for the page: its prompt, its completions with their rewards,
    and the groups and files next to it, but nothing that is stored by token (`token_detail`). Texts
    are cut off after MAX_TEXT_CHARS, and completions after MAX_SIBLINGS. ShoalError if there is no
    such group, or the file is damaged.

    `stem`: the name of the groups file without ending; `number`: the number of the group in the
    file. `text_of(ids)` returns the text of tokens: then `prompt_read` is the prompt as the model
    read it, with all that the chat template adds; "" without."""
    file = _file(index, stem)
    columns, as_json = _columns(index, file)
    chosen = []
    for column, column_type in columns.items():
        if column in _LISTS:
            continue
        name = column_sql(column)
        if column_type == "VARCHAR":
            name = f"left({name}, {MAX_TEXT_CHARS}) AS {name}"
        chosen.append(name)
    chosen += [
        "len(token_ids) AS num_tokens",
        "len(prompt_ids) AS num_prompt_tokens",
        "coalesce(list_sum(CAST(loss_mask AS INTEGER[])), len(token_ids)) AS num_trained",
    ]
    rows = _read(index, file, ", ".join(chosen), number)
    first = rows[0]  # has what all completions of the group share
    data = {}
    for column in columns:
        if column.startswith("column/"):
            data[column.removeprefix("column/")] = _value(first[column], column in as_json)
    detail = {
        "file": stem,
        "group": number,
        "step": first["step"],
        "version": first["version"],
        "row": first["row"],
        "set": _set_of(first),
        "prompt": _value(first["prompt"], "prompt" in as_json),
        "num_prompt_tokens": first["num_prompt_tokens"],
        "prompt_read": _prompt_read(index, file, number, first["completion"], text_of),
        "columns": data,
        "right_answer": ground_truth(data),
        "weights": _under(first, "weight/"),
        "completions": [_completion(row, as_json) for row in rows],
    }
    return detail | _neighbours(index, file, number)


def _set_of(row: Mapping[str, Any]) -> str:
    """Returns the set of a row of a groups file, as the table of groups has it: `train`,
    `discarded`, or the data set of an evaluation."""
    if row["purpose"] == "train" and row["subset"] != DISCARDED:
        return "train"
    return row["subset"]


def _prompt_read(
    index: GroupTable,
    file: GroupFile,
    number: int,
    completion: int,
    text_of: Callable[[Sequence[int]], str] | None,
) -> str:
    """Returns the text of a group's prompt tokens, cut off after MAX_TOKENS of them and
    MAX_TEXT_CHARS; "" without `text_of`. `completion`: of which the tokens are read."""
    if text_of is None:
        return ""
    row = _read(index, file, "prompt_ids", number, completion)[0]
    return text_of((row["prompt_ids"] or [])[:MAX_TOKENS])[:MAX_TEXT_CHARS]


_OF_COMPLETION = (
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


def _completion(row: Mapping[str, Any], as_json: frozenset[str]) -> dict[str, Any]:
    """Returns the record of one completion from its row of the groups file: _OF_COMPLETION,
    `components` (reward function -> value), `messages`, `turn_rewards` and `turn_advantages` (each
    None if there are none) and `extra`.
    `as_json`: the names of the columns that hold JSON text, which is parsed."""
    extra = {}
    for name, value in _under(row, "extra/").items():
        extra[name] = _value(value, f"extra/{name}" in as_json)
    record = {column: row[column] for column in _OF_COMPLETION}
    record["components"] = _under(row, "component/")
    record["messages"] = _value(row.get("messages"), "messages" in as_json) or None
    record["extra"] = extra
    for name in ("turn_rewards", "turn_advantages"):
        values = row.get(name)
        record[name] = None if values is None else _listed(np.array(values, np.float64))
    return record


def _under(row: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Returns the values of the columns whose names begin with `head`, by the rest of the name,
    without those that are None."""
    below = {}
    for column, value in row.items():
        if column.startswith(head) and value is not None:
            below[column.removeprefix(head)] = value
    return below


def _value(value: Any, is_json: bool) -> Any:
    """Returns the value of a cell. JSON text (`is_json`: of a column of JSON) is parsed, or
    returned as it is if that fails, for example because it was cut off."""
    if not is_json or not isinstance(value, str):
        return value
    try:
        return bounded_json(value)
    except ValueError:
        return value


def _neighbours(index: GroupTable, file: GroupFile, number: int) -> dict[str, Any]:
    """Returns what the page's links to the neighbours need: the numbers of the groups before and
    after this one in its file (`previous_group`, `next_group`), and the names of the files before
    and after its file (`previous_file`, `next_file`), among those of training or of the same
    evaluation; None at an end. Groups and files that are not indexed yet are not known."""
    rows = index.database.rows(
        f'SELECT "group" AS number FROM {index.table} WHERE file = ? ORDER BY number', file.number
    )
    groups = [row["number"] for row in rows]
    previous_group, next_group = _before_and_after(groups, number)
    kind = file.stem.rpartition("_")[0]
    stems = sorted(stem for stem in index.files if stem.rpartition("_")[0] == kind)
    previous_file, next_file = _before_and_after(stems, file.stem)
    return {
        "previous_group": previous_group,
        "next_group": next_group,
        "previous_file": previous_file,
        "next_file": next_file,
    }


def _before_and_after(items: Sequence[Any], item: Any) -> tuple[Any, Any]:
    """Returns the items before and after `item`, None at an end. An item that is not in the list is
    treated as the first one."""
    position = items.index(item) if item in items else 0
    before = items[position - 1] if position > 0 else None
    after = items[position + 1] if position + 1 < len(items) else None
    return before, after


def _file(index: GroupTable, stem: str) -> GroupFile:
    """Returns the indexed groups file of a name (`stem`, without ending); ShoalError if the run has
    none, or if it is not indexed yet."""
    file = index.files.get(stem)
    if file is None:
        still = " yet: it is still being read" if index.waiting else ""
        raise ShoalError(f"{stem[:80]}: the run has no such groups file{still}")
    return file


def _columns(index: GroupTable, file: GroupFile) -> tuple[dict[str, str], frozenset[str]]:
    """Returns (column -> SQL type, names of the columns that hold JSON text) of a groups file.
    ShoalError if the file is damaged."""
    try:
        return index.database.columns([file.path]), index.database.json_columns(file.path)
    except index.database.error as error:
        raise ShoalError(f"{file.stem}: {reason(error)}") from error


def _read(
    index: GroupTable, file: GroupFile, columns: str, number: int, completion: int | None = None
) -> list[dict]:
    """Returns the rows of group `number` in a file as dicts, in the order of the completions, at
    most MAX_SIBLINGS; or, if `completion` is not None, only the row of that one. `columns`: what to
    select, as SQL. ShoalError if there is no such row, or the file is damaged."""
    where = '"group" = ?'
    values = [number]
    asked = f"group {number}"
    if completion is not None:
        where += " AND completion = ?"
        values.append(completion)
        asked = f"completion {completion} in group {number}"
    query = (
        f"SELECT {columns} FROM read_parquet(?) WHERE {where} ORDER BY completion "
        f"LIMIT {MAX_SIBLINGS}"
    )
    try:
        rows = index.database.rows(query, str(file.path), *values)
    except index.database.error as error:
        raise ShoalError(f"{file.stem}: {reason(error)}") from error
    if not rows:
        raise ShoalError(f"{file.stem} has no {asked}")
    return rows


# ---- a prompt through the run

MAX_ASKED, MAX_SHARED = 500, 8
"""The most groups of a prompt in a record, and the most questions of each kind that two runs
answered differently."""


def prompt_detail(index: GroupTable, subset: str, row: int) -> dict[str, Any]:
    """Returns the record of a prompt: all of its groups in the order of their steps (`groups`, rows
    of the Groups view, at most MAX_ASKED, the newest), and the rows of the prompts before and after
    it in its set among those that were answered more than once (`previous`, `next`; None at an
    end). `subset`: the prompt's set, `train` also if the group was discarded; `row`: its row in the
    data."""
    if subset == DISCARDED:
        subset = "train"
    asked = index.database.rows(
        f'SELECT "row" AS number FROM {index.table} WHERE {ASKED_IN} = ? '
        'GROUP BY "row" HAVING count(*) > 1',
        subset,
    )
    rows = [one["number"] for one in asked]
    found, total = index.prompt_rows(subset, row, MAX_ASKED)
    return {
        "set": subset,
        "row": row,
        "groups": found,
        "total": total,
        "previous": max((number for number in rows if number < row), default=None),
        "next": min((number for number in rows if number > row), default=None),
    }


def shared_questions(a: GroupTable, b: GroupTable) -> dict[str, Any]:
    """Returns the record of the questions of evaluations that two runs were both asked, in the same
    words: how many (`total`), how many the second run answers better (`num_better`) or worse
    (`num_worse`) than the first in its newest evaluation, and the MAX_SHARED of both kinds that
    differ most (`better`, `worse`): `set`, `row`, `prompt`, and the share of right answers, or
    without that notion the mean reward, of both (`a`, `b`)."""
    newest = []
    for index in (a, b):
        newest.append(
            'SELECT "set", "row", prompt, arg_max(coalesce(pass, reward), step) AS value '
            f'FROM {index.table} JOIN {index.prompts} USING ("set", "row") '
            f"WHERE {ASKED_IN} != 'train' GROUP BY ALL"
        )
    rows = a.database.rows(
        f'SELECT "set", "row", prompt, a.value AS a, b.value AS b FROM ({newest[0]}) AS a '
        f'JOIN ({newest[1]}) AS b USING ("set", "row", prompt) '
        'ORDER BY abs(b.value - a.value) DESC NULLS LAST, "set", "row"'
    )
    known = [row for row in rows if row["a"] is not None and row["b"] is not None]
    better = [row for row in known if row["b"] > row["a"]]
    worse = [row for row in known if row["b"] < row["a"]]
    return {
        "total": len(rows),
        "num_better": len(better),
        "num_worse": len(worse),
        "better": better[:MAX_SHARED],
        "worse": worse[:MAX_SHARED],
    }


# ---- tokens


class Pieces:
    """The texts of single tokens, from the tokenizer.json that the run has stored.

    Called with token ids, returns the text of each. If several tokens make up one character, the
    last one has the whole character and the others have ''. Returns [] if the run has no tokenizer
    that can be read."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run

    def __call__(self, ids: Sequence[int]) -> list[str]:
        return self._pieces(list(ids)) if self._tokenizer is not None else []

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer that the run has stored in model/tokenizer.json. If the file is missing,
        has more than MAX_TOKENIZER_BYTES, or is damaged: None, and a problem of the run (a strict
        reading raises it)."""
        import tokenizers

        path = self._run.file("model", "tokenizer.json")
        if path is None:
            self._run.add_problem(
                "model/tokenizer.json", "is not there: tokens are shown without their texts"
            )
            return None
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            self._run.add_problem("model/tokenizer.json", "has more than 64 MiB: it is not read")
            return None
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:  # a panic of the Rust library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._run.add_problem(
                "model/tokenizer.json", f"cannot be read ({bounded_line(error)[:120]})"
            )
            return None

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens together, also of special ones; "" if the run has no tokenizer
        that can be read."""
        return self._decode(list(ids)) if self._tokenizer is not None else ""

    def _pieces(self, ids: list[int]) -> list[str]:
        """Returns the text that each token adds to the decoded text; "" for a token that is the
        beginning of a character, whose last token has all of it."""
        # A token is decoded together with the character before it, and its text is what it adds:
        # decoded alone, many tokens lose the space at their beginning.
        pieces = []
        start = 0  # index of the first token that is decoded with the next one
        read = 0  # number of tokens whose text is in `pieces`
        for position in range(len(ids)):
            before = self._decode(ids[start:read])
            whole = self._decode(ids[start : position + 1])
            is_last = position + 1 == len(ids)
            # U+FFFD at the end: the token is a part of a character, and the rest is to follow.
            if whole.endswith("\ufffd") and position - read < MAX_PENDING and not is_last:
                pieces.append("")
                continue
            if whole.startswith(before):
                pieces.append(whole[len(before) :])
            else:
                pieces.append(self._decode(ids[position : position + 1]))
            start = read
            read = position + 1
        return pieces

    def _decode(self, ids: list[int]) -> str:
        """Returns the text of tokens, also of special ones; "" for none; negative ids are left out.
        Returns U+FFFD, for all of them, if an id is beyond the vocabulary."""
        if not ids:
            return ""
        try:
            return self._tokenizer.decode([id for id in ids if id >= 0], skip_special_tokens=False)
        except Exception:  # an id beyond the vocabulary
            return "\ufffd"


def token_detail(
    index: GroupTable,
    stem: str,
    number: int,
    completion: int,
    pieces: Any,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the record of one completion with everything that is stored for each token, one list
    for each quantity, None in place of values that were not recorded. ShoalError if there is no
    such completion, or the file is damaged.

    `stem`: the name of the groups file without ending; `number`: the number of the group in the
    file. `pieces(ids)` returns each token's text. `settings`: the run's, for the bounds of
    clipping.

    Of the record, `advantages` has each token's own, None unless advantages are by turn; `logprob`
    is the sampler's log-prob of a token, `trainer` the trainer's, `ratio`
    the probability of a token under the trainer before the update, divided by that under the
    sampler; `gap` its logarithm; `weighted` the ratio times the advantage; `clipped` tells whether
    the ratio is beyond the bound that the sign of the advantage selects (False if the ratio is
    unknown, or the advantage is 0); `mask` whether the loss counts the token; `support` the number
    of tokens that it was sampled from (None: all). At most MAX_TOKENS tokens."""
    file = _file(index, stem)
    columns, _ = _columns(index, file)
    prompt = "prompt_ids"
    if "own_prompt_ids" in columns:
        prompt = "coalesce(own_prompt_ids, prompt_ids)"
    query = (
        f"version, advantage, reward, {prompt} AS prompt_ids, token_ids, logprobs, "
        "trainer_logprobs, loss_mask, versions, support_ids"
    )
    for name in ("turn_advantages", "branches"):
        if name in columns:
            query += f", {name}"
    row = _read(index, file, query, number, completion)[0]
    ids = (row["token_ids"] or [])[:MAX_TOKENS]
    size = len(ids)
    sampler = _floats(row["logprobs"], size)
    trainer = _floats(row["trainer_logprobs"], size)
    ratio = np.exp(np.clip(trainer - sampler, -50, 50))  # clipped, so that none is infinite
    mask = [True] * size
    if row["loss_mask"] is not None:
        mask = [bool(is_trained) for is_trained in row["loss_mask"]][:size]
    advantage = np.full(size, math.nan if row["advantage"] is None else row["advantage"])
    by_turn = row.get("turn_advantages")
    if by_turn is not None:
        branches = _value(row.get("branches"), True) or ()
        turns = turns_of(np.array(mask, bool), [branch["start"] for branch in branches])
        advantage = np.zeros(size)
        # Of a completion that is cut off here there are fewer turns than advantages.
        for tokens, of_turn in zip(turns, by_turn, strict=False):
            advantage[tokens] = of_turn
    low = 1 - _number(settings, "algorithm.clip_low", 0.2)
    high = 1 + _number(settings, "algorithm.clip_high", 0.2)
    is_beyond = np.where(advantage > 0, ratio > high, ratio < low)
    clipped = is_beyond & np.isfinite(ratio) & (advantage != 0)
    # Versions are stored only if a token is of another version than the group.
    versions = row["versions"] or [row["version"]] * size
    support = None
    if row["support_ids"]:
        support = [len(token_ids) for token_ids in row["support_ids"]][:size]
    entropy, likeliest = _replayed(index.run, f"replays/{stem}_{number}.json", completion, ids)
    return {
        "file": stem,
        "group": number,
        "completion": completion,
        "advantage": row["advantage"],
        "advantages": None if by_turn is None else _listed(advantage),
        "reward": row["reward"],
        "is_trained": row["trainer_logprobs"] is not None,
        "prompt": pieces((row["prompt_ids"] or [])[:MAX_TOKENS]),
        "tokens": pieces(ids) or None,  # None: the run has no tokenizer, or there is no token
        "ids": ids,
        "logprob": _listed(sampler),
        "trainer": _listed(trainer),
        "ratio": _listed(ratio),
        "gap": _listed(trainer - sampler),
        "weighted": _listed(advantage * ratio),
        "clipped": clipped.tolist(),
        "mask": mask,
        "versions": versions[:size],
        "support": support,
        "entropy": entropy,
        "likeliest": likeliest,
    }


def _replayed(
    run: StoredRun, name: str, completion: int, ids: Sequence[int]
) -> tuple[list | None, list | None]:
    """Returns (entropies, likeliest tokens) from a file of `shoal replay likeliest=`: for each
    token of a completion its entropy, and pairs of text and log-prob. Returns (None, None) if there
    is no such file, if it is damaged (which is a problem of the run), or if it is of other tokens
    than `ids`. `name`: of the file within the run; `completion`: the number of the completion."""
    text = run.text(name, MAX_REPLAY_BYTES)
    if not text:
        return None, None
    try:
        tokens = bounded_json(text)["completions"][completion]["tokens"]
        if tokens is None or [token["id"] for token in tokens] != list(ids):
            # A run that was resumed since the replay has sampled other tokens.
            return None, None
        entropies = [float(token["entropy"]) for token in tokens]
        likeliest = []
        for token in tokens:
            others = [[str(other["text"]), float(other["logprob"])] for other in token["likeliest"]]
            likeliest.append(others)
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        run.add_problem(name, f"is damaged ({type(error).__name__})")
        return None, None
    return entropies, likeliest


def _floats(values: Sequence[float | None] | None, size: int) -> np.ndarray:
    """Returns the first `size` values as float64[size]; NaN for None, and after their end."""
    floats = np.full(size, math.nan)
    for position, value in enumerate((values or ())[:size]):
        if value is not None:
            floats[position] = value
    return floats


def _listed(values: np.ndarray) -> list[float | None]:
    """Returns values as a list for JSON, rounded to five digits, which is more than a screen shows;
    None for NaN and infinity."""
    listed = []
    for value in values.tolist():
        listed.append(float(f"{value:.5g}") if math.isfinite(value) else None)
    return listed


def _number(settings: Mapping[str, Any], key: str, default: float) -> float:
    """Returns the setting `key` (dotted) as a float; the default if it is missing or no number.
    True and False count as 1 and 0."""
    value = settings.get(key, default)
    return float(value) if isinstance(value, int | float) else default


# ---- two runs


def first_difference(
    a: Curves, b: Curves, database: Database, differing: Sequence[SettingDifference]
) -> dict[str, Any]:
    """Returns the record of the first step at which two runs differ in a metric that is not a time,
    and of the first completion of that step that differs (`_first_completion`).

    The record has `step`, `num_shared`, `causes` and, if a step differs, `stage`; if its groups can
    be compared, too, `file`, `group` and `completion`, which name the completion. In it, `step` is
    None if nothing differs; `num_shared` is the number of steps that both
    runs have; `stage` is None if the groups of the step cannot be compared; `causes` are the keys,
    among the settings in which the runs differ (`differing`), that act on the stage. Steps are
    those that the curves keep, which may be every second or fourth one of a long run."""
    # rows_a[i] and rows_b[i] are the rows of both curves that hold the i-th shared step.
    steps, rows_a, rows_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    first = len(steps)  # index of the first shared step that differs; len(steps): none
    for metric in a.columns.keys() & b.columns.keys():
        if is_clock(metric):
            continue
        values_a = np.array(a.columns[metric])[rows_a]
        values_b = np.array(b.columns[metric])[rows_b]
        both_missing = np.isnan(values_a) & np.isnan(values_b)
        unequal = np.flatnonzero((values_a != values_b) & ~both_missing)
        if len(unequal):
            first = min(first, int(unequal[0]))
    if first == len(steps):
        return {"num_shared": len(steps), "step": None, "causes": []}
    step = int(steps[first])
    completion = _first_completion(database, [a.run, b.run], step)
    record = {"num_shared": len(steps), "step": step, "causes": [], "stage": None}
    if completion is None:
        return record
    stage = completion["stage"]
    stages = (stage,)
    # Texts may differ because weights do, and weights because rewards do. Unlike `shoal diff`, this
    # has not compared the groups of the steps before, so rewards are not ruled out.
    if stage == "sampling":
        stages = ("sampling", "rewards", "update")
    dropped: list[float] = []
    for run in (a, b):
        dropped += run.columns.get("prompts/dropped", ())
    record["causes"] = likely_keys(stages, without_idle_limits(differing, dropped))
    record["file"] = groups_file(Purpose.TRAIN, "", step).removesuffix(".parquet")
    return record | completion


def _first_completion(
    database: Database, runs: Sequence[StoredRun], step: int
) -> dict[str, Any] | None:
    """Returns the first completion of a step that has another data row in the two runs; if there is
    none, the first with another text; if there is none, the first with another reward. If all of
    these are equal, returns the step's first completion, with stage "update". Only completions that
    both runs have count. The record has `group`, `completion` and `stage` (of GROUP_STAGES).
    Returns None if the groups cannot be compared, because a run lacks them or a file is
    damaged."""
    # A file that does not exist has the path "None", which DuckDB does not find.
    file = groups_file(Purpose.TRAIN, "", step)
    files = [str(run.file("groups", file)) for run in runs]
    try:
        rows = database.rows(
            """SELECT "group", completion, CASE WHEN a."row" IS DISTINCT FROM b."row" THEN 0
                WHEN a.text IS DISTINCT FROM b.text THEN 1
                WHEN a.reward IS DISTINCT FROM b.reward THEN 2 ELSE 3 END AS stage
            FROM read_parquet(?) AS a JOIN read_parquet(?) AS b USING ("group", completion)
            ORDER BY stage, "group", completion LIMIT 1""",
            *files,
        )
    # One run lacks the step, or a file is damaged, which GroupTable reports.
    except database.error:
        return None
    if not rows:
        return None
    # The query computes 0 to 3, in the order of GROUP_STAGES.
    return rows[0] | {"stage": GROUP_STAGES[rows[0]["stage"]]}
