"""Reads the rows of one file: jsonl, json, parquet or csv."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from shoal.records import ShoalError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


_BATCH_ROWS = 1000


_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


PlacedRows: TypeAlias = "Iterator[tuple[str, Any]]"
"""Yields (place, row); the place is a text like `FILE, line 3`."""


def read_file(file: Path, prefix: str = "") -> PlacedRows:
    """Yields each row of a file, with its place, `FILE, line 3` or `FILE, row 3`: lines (of jsonl
    and csv) count from 1, rows (of a JSON list and of parquet) from 0. Reads csv, parquet, and json
    or jsonl that holds a list of objects or one object on each line; that a row of JSON is an
    object is not checked. Raises ShoalError, whose message begins with `prefix`, if the file cannot
    be read or has another suffix."""
    name = f"{prefix}{file}"
    if file.suffix not in SUFFIXES:
        raise ShoalError(
            f"{name} is of an unsupported kind: unpack or convert it; expected "
            f"{', '.join(SUFFIXES)}"
        )
    read = {".csv": _read_table, ".parquet": _read_parquet}.get(file.suffix, _read_json)
    try:
        for place, row in read(file, name):
            yield f"{file}, {place}", row
    except OSError as error:
        raise ShoalError(f"{name} cannot be read: {error.strerror or error}") from error


def _read_json(file: Path, name: str) -> PlacedRows:
    """Yields the rows of a file that holds a JSON list, or a JSON object on each line, with `row 0`
    or `line 1` as their places. Blank lines are skipped, but counted. ShoalError for invalid JSON.
    `name` is the file in messages."""
    with file.open("rb") as lines:
        # A list begins with `[`, perhaps after white space.
        is_list = lines.read(1000).decode("utf-8-sig", "replace").lstrip().startswith("[")
        lines.seek(0)
        if is_list:
            rows = _parse_json(lines.read(), f"{name} is not a JSON list of objects")
            for number, row in enumerate(rows):
                yield f"row {number}", row
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = _parse_json(line, f"{name}, line {number} is not a JSON object")
                yield f"line {number}", row


def _parse_json(data: bytes, fault: str) -> Any:
    """Returns the value of JSON text in UTF-8. ShoalError, which begins with `fault`, if it is
    invalid or has half of a surrogate pair."""
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text)
        if "\\u" in text:  # half a surrogate pair is no text, but JSON can write it
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise ShoalError(
            f"{fault}: it is not UTF-8 text ({error.reason} at byte {error.start}); save the "
            "file as UTF-8"
        ) from error
    except UnicodeEncodeError as error:
        raise ShoalError(
            f"{fault}: it holds {half_character(error.object)}, half of a character that JSON "
            "writes as two; write both halves, or leave it out"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ShoalError(
            f"{fault}: {error}; expected one object per line, or one list of objects"
        ) from error


def half_character(text: str) -> str:
    """Returns the first half of a surrogate pair that is alone in a text, written like `\\ud83d`;
    "" if there is none. Neither tokenizers nor files accept such a half."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start]).strip("'")
    return ""


def _read_table(file: Path, name: str) -> PlacedRows:
    """Yields the rows of a csv file with a header, with `line 2` as the place of the first (of a
    row of several lines the last line). All values stay text, so that the answer `007` keeps its
    zeros. Blank lines are skipped. ShoalError for another delimiter than commas, two columns of one
    name, and a row with more or fewer values than the header."""
    csv.field_size_limit(2**31 - 1)  # the module's own limit of 131,072 characters is a long prompt
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            header = next(reader, [])
            for sign, plural in _OTHER_DELIMITERS.items():
                if len(header) == 1 and sign in header[0]:
                    raise ShoalError(
                        f"{name}: its header, {header[0][:80]!r}, has {plural} between its "
                        "columns; expected commas: save the table with commas"
                    )
            if len(set(header)) < len(header):
                raise ShoalError(
                    f"{name}: two columns of its header have the same name, {', '.join(header)}"
                )
            for values in filter(None, reader):
                if len(values) != len(header):
                    raise ShoalError(
                        f"{name}, line {reader.line_num} has {len(values)} values, the header has "
                        f"{len(header)}: quote a value that holds a comma"
                    )
                yield f"line {reader.line_num}", dict(zip(header, values, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ShoalError(
                f"{name} cannot be read as a table in UTF-8, near line {reader.line_num}: {error}"
            ) from error


def _read_parquet(file: Path, name: str) -> PlacedRows:
    """Yields the rows of a parquet file, with `row 0`, `row 1`, ... as their places. ShoalError if
    it cannot be read."""
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist():
                    yield f"row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ShoalError(
            f"{name} cannot be read as parquet: {str(error).splitlines()[0]}"
        ) from error
