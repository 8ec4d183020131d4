"""The rows of one data file: jsonl, json, parquet, csv, tsv or arrow."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from shoal.types import ShoalError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow")

PlacedRows = list[tuple[str, Any]]
"""Each row with its place in the file, `line 3` or `row 2`."""


def read_file(file: Path, task: str) -> PlacedRows:
    """The rows of a file. Raises ShoalError, naming the task, for what cannot be read.

    A json file holds a list of objects, or lines as in jsonl."""
    name = f"task {task}: {file}"
    if file.suffix in (".parquet", ".arrow"):
        return _read_columnar(file, name)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ShoalError(f"{name} is no text in UTF-8 ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise ShoalError(f"{name} cannot be read: {error.strerror or error}") from error
    if file.suffix in (".csv", ".tsv"):
        return _read_table(text, "\t" if file.suffix == ".tsv" else ",", name)
    if file.suffix == ".json" and text.lstrip().startswith("["):
        rows = _parse_json(text, f"{name} is no JSON list of objects: ")
        placed = [(f"row {number}", row) for number, row in enumerate(rows)]
    else:
        placed = [(f"line {number}", _parse_json(line, f"{name}, line {number} is no JSON object: ",
                                                 "; one object a line is needed"))
                  for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    for place, row in placed if "\\u" in text else ():  # JSON's way of writing a half alone
        if half := half_character(json.dumps(row, ensure_ascii=False)):
            raise ShoalError(f"{name}, {place} holds {half}, half of a character that JSON writes as two: write both "
                             "halves, or leave it out")
    return placed


def _parse_json(text: str, fault: str, wanted: str = "") -> Any:
    """What JSON holds, or ShoalError: `fault`, its cause, `wanted`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ShoalError(f"{fault}{error.msg} at {line}column {error.colno}{wanted}") from error
    except RecursionError as error:
        raise ShoalError(f"{fault}it is nested too deeply{wanted}") from error
    except ValueError as error:
        raise ShoalError(f"{fault}a number in it has too many digits{wanted}") from error


def half_character(text: str) -> str:
    """The first half of a surrogate pair alone, which no tokenizer and no file takes, as `\\ud83d`; empty without."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start]).strip("'")
    return ""


def _read_table(text: str, separator: str, name: str) -> PlacedRows:
    """A table with a header; all values are text, so that of the answer `007` nothing is lost."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows = []
    try:
        header = next(reader, [])
        for values in filter(None, reader):
            if len(values) != len(header):
                raise ShoalError(f"{name}, line {reader.line_num} has {len(values)} values, the header has "
                                 f"{len(header)}: quote a value that holds the separator")
            rows.append((f"line {reader.line_num}", dict(zip(header, values, strict=True))))
    except csv.Error as error:
        raise ShoalError(f"{name}, line {reader.line_num} cannot be read as a table: {error}") from error
    return rows


def _read_columnar(file: Path, name: str) -> PlacedRows:
    """Parquet, or arrow: its stream format, in which the `datasets` library stores, or its file format."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            table = pyarrow.parquet.read_table(file)
        else:
            with pyarrow.memory_map(str(file)) as source:
                is_file = bytes(source.read(6)) == b"ARROW1"
                source.seek(0)
                table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source).read_all()
        return [(f"row {i}", row) for i, row in enumerate(table.to_pylist())]
    except (pyarrow.ArrowException, OSError) as error:
        raise ShoalError(f"{name} cannot be read as {file.suffix[1:]}: {str(error).splitlines()[0]}") from error
