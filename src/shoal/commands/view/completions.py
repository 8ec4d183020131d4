"""The data of the Completions view: the texts of a page of the table, and the whole table as a
file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.records import ShoalError
from shoal.runs.group_table import COMPLETION_COLUMNS, GroupFile, GroupTable
from shoal.runs.lines import json_ready

MAX_COMPLETION_ROWS, CUT_CHARS = 200, 600
"""The most completions of one page, and the characters of a text in it; the group's page has the
rest."""

FORMATS = {"csv": "text/csv", "jsonl": "application/jsonl"}
"""Format of an exported file -> its media type."""


def with_texts(index: GroupTable, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of `GroupTable.completion_rows` with the first CUT_CHARS characters of each
    completion's `text`, and how many it has (`chars`). Each file is read once. Of a file that is
    damaged or gone, which GroupTable reports, texts are "" with 0 characters."""
    places: dict[str, list[tuple[int, int]]] = {}  # stem -> (group, completion) of its rows
    for row in rows:
        places.setdefault(row["file"], []).append((row["group"], row["completion"]))
    texts: dict[tuple[str, int, int], tuple[str, int]] = {}
    for stem, wanted in places.items():
        file = index.files.get(stem)
        if file is None:
            continue
        for read in _texts(index, file, wanted, CUT_CHARS):
            key = (stem, read["group"], read["completion"])
            texts[key] = (read["text"] or "", read["chars"] or 0)
    with_their_texts = []
    for row in rows:
        text, chars = texts.get((row["file"], row["group"], row["completion"]), ("", 0))
        with_their_texts.append(row | {"text": text, "chars": chars})
    return with_their_texts


def _texts(
    index: GroupTable, file: GroupFile, wanted: Sequence[tuple[int, int]], most: int | None
) -> list[dict[str, Any]]:
    """Returns `group`, `completion`, `text`, its number of characters (`chars`) and `prompt` of the
    wanted completions (group, completion) of a file; [] if the file cannot be read. `most`: a text
    is cut off after so many characters, and there is no prompt; None: texts are whole."""
    chosen = "text, prompt"
    if most is not None:
        chosen = f"left(text, {most}) AS text"
    # The group alone is compared at first: its values lie together, and are read quickly.
    groups = sorted({group for group, _ in wanted})
    try:
        rows = index.database.rows(
            f'SELECT TRY_CAST("group" AS INTEGER) AS "group", '
            f"TRY_CAST(completion AS INTEGER) AS completion, length(text) AS chars, {chosen} "
            f'FROM read_parquet(?) WHERE "group" IN ({", ".join(map(str, groups))})',
            str(file.path),
        )
    except index.database.error:
        return []
    places = set(wanted)
    return [row for row in rows if (row["group"], row["completion"]) in places]


# ---- the table as a file


def exported(index: GroupTable, filter: str, hits: str, kind: str) -> Iterator[str]:
    """Returns an iterator over the pieces of a file that has all completions that a filter and a
    search choose, whole texts and prompts included, in the order of files, groups and completions.
    At no time more than one groups file is in memory. `hits` as for `completion_rows`; `kind`: of
    FORMATS. ShoalError if the filter or the format is wrong."""
    if kind not in FORMATS:
        raise ShoalError(f"format={kind[:20]}: expected {' or '.join(FORMATS)}")
    _, total = index.completion_rows(filter, limit=1, hits=hits)  # refuses a wrong filter at once
    return _pieces(index, filter, hits, kind, total)


def _pieces(index: GroupTable, filter: str, hits: str, kind: str, total: int) -> Iterator[str]:
    """Yields the pieces of an exported file: the head of a CSV file, then the rows of each groups
    file. `total`: the most rows that there are."""
    names = ["file", *COMPLETION_COLUMNS]
    names += [f"score/{function}" for function in index.functions]
    names += ["prompt", "text"]
    if kind == "csv":
        yield _csv_line(names)
    for stem in sorted(index.files):
        file = index.files.get(stem)
        if file is None:  # deleted meanwhile
            continue
        rows, _ = index.completion_rows(filter, "group", limit=total, hits=hits, file=file)
        if not rows:
            continue
        wanted = [(row["group"], row["completion"]) for row in rows]
        texts = {}
        for read in _texts(index, file, wanted, None):
            texts[read["group"], read["completion"]] = read
        lines = []
        for row in rows:
            read = texts.get((row["group"], row["completion"]), {})
            record = row | {"prompt": read.get("prompt"), "text": read.get("text")}
            if kind == "csv":
                lines.append(_csv_line([_cell(record[name]) for name in names]))
            else:
                lines.append(_json_line(record, names))
        yield "".join(lines)


def _json_line(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns a line of a JSONL file: the record's values under `names`."""
    values = {name: record[name] for name in names}
    return json.dumps(json_ready(values), ensure_ascii=False, allow_nan=False) + "\n"


def _cell(value: Any) -> Any:
    """Returns a value as a cell of a CSV file. A spreadsheet takes a text that begins with one of
    `=+-@`, a tab or a carriage return for a formula, and a model may write anything: such a text
    gets an apostrophe before it."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return value


def _csv_line(cells: Sequence[Any]) -> str:
    """Returns a line of a CSV file; None is an empty cell."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
