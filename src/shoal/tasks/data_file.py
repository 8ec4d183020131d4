"""The rows of one data file: jsonl, json, parquet, csv, tsv or arrow."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from shoal.types import ShoalError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow")


def read_file(file: Path, task: str) -> list[tuple[str, Any]]:
    """Each row with its place in the file, `line 3` or `row 2`; ShoalError, naming the task, for what cannot be read.

    A json file holds a list of objects, or lines as in jsonl."""
    if file.suffix == ".parquet":
        return _parquet(file, task)
    if file.suffix == ".arrow":
        return _arrow(file, task)
    if file.suffix in (".csv", ".tsv"):
        return _table(file, task)
    text = _text(file, task)
    return _list(text, file, task) if file.suffix == ".json" and text.lstrip().startswith("[") else \
        _lines(text, file, task)


def _lines(text: str, file: Path, task: str) -> list[tuple[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ShoalError(f"task {task}: {file}, line {number} is no JSON object: {_fault(error)}; one object a "
                                 "line is needed") from error
            if "\\u" in line:
                _check_characters(row, f"{file}, line {number}", task)
            rows.append((f"line {number}", row))
    return rows


def _list(text: str, file: Path, task: str) -> list[tuple[str, Any]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"task {task}: {file} is no JSON list of objects: {_fault(error)}") from error
    for number, row in enumerate(rows if "\\u" in text else ()):
        _check_characters(row, f"{file}, row {number}", task)
    return [(f"row {number}", row) for number, row in enumerate(rows)]


def _fault(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}" if error.lineno > 1 else \
            f"{error.msg} at column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "a number in it has too many digits"


def _check_characters(row: Any, place: str, task: str) -> None:
    if half := half_character(json.dumps(row, ensure_ascii=False)):
        raise ShoalError(f"task {task}: {place} holds {half}, half of a character that JSON writes as two: write both "
                         "halves, or leave it out")


def half_character(text: str) -> str:
    """The first half of a surrogate pair alone, which no tokenizer and no file takes, as `\\ud83d`; empty without."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start]).strip("'")
    return ""


def _text(file: Path, task: str) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ShoalError(f"task {task}: {file} is no text in UTF-8 ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise ShoalError(f"task {task}: {file} cannot be read: {error.strerror or error}") from error


def _parquet(file: Path, task: str) -> list[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ShoalError(f"task {task}: {file} cannot be read as parquet: {str(error).splitlines()[0]}") from error
    return [(f"row {i}", row) for i, row in enumerate(rows)]


def _table(file: Path, task: str) -> list[tuple[str, Any]]:
    """A table with a header; all values are text, so that of the answer `007` nothing is lost."""
    reader = csv.reader(io.StringIO(_text(file, task), newline=""), delimiter="\t" if file.suffix == ".tsv" else ",",
                        strict=True)
    rows = []
    try:
        header = next(reader, [])
        for values in reader:
            if values and len(values) != len(header):
                raise ShoalError(f"task {task}: {file}, line {reader.line_num} has {len(values)} values, the header "
                                 f"has {len(header)}: quote a value that holds the separator")
            if values:
                rows.append((f"line {reader.line_num}", dict(zip(header, values, strict=True))))
    except csv.Error as error:
        raise ShoalError(f"task {task}: {file}, line {reader.line_num} cannot be read as a table: {error}") from error
    return rows


def _arrow(file: Path, task: str) -> list[tuple[str, Any]]:
    """Arrow's stream format, in which the `datasets` library stores, or its file format."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(file)) as source:
            is_file = bytes(source.read(6)) == b"ARROW1"
            source.seek(0)
            open_arrow = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
            rows = open_arrow(source).read_all().to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ShoalError(f"task {task}: {file} cannot be read as arrow: {str(error).splitlines()[0]}") from error
    return [(f"row {i}", row) for i, row in enumerate(rows)]
