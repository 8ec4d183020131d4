"""The rows of one data file, one after the other: jsonl, json, parquet, csv, tsv or arrow."""

from __future__ import annotations

import csv
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from shoal.types import ShoalError

PlacedRows: TypeAlias = "Iterator[tuple[str, Any]]"
"""Each row with its place: `FILE, line 3`."""

_BATCH_ROWS, _BATCH_BYTES = 1000, 2**18
_PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst")
_MARK = secrets.token_hex(8)  # in no file
_BOM = b"\xef\xbb\xbf"


def read_file(file: Path, prefix: str = "") -> PlacedRows:
    """The rows of a file. Raises ShoalError, which `prefix` begins, for what cannot be read.

    A json file holds a list of objects, or lines as in jsonl."""
    name = f"{prefix}{file}"
    if file.suffix not in _READERS:
        cure = ": unpack it" if file.suffix in _PACKED else ""
        raise ShoalError(f"{name} is of a kind that is not read{cure}; expected {', '.join(SUFFIXES)}")
    try:
        for place, row in _READERS[file.suffix](file, name):
            yield f"{file}, {place}", row
    except OSError as error:
        raise ShoalError(f"{name} cannot be read: {error.strerror or error}") from error


# ---- JSON


def _read_json(file: Path, name: str) -> PlacedRows:
    with file.open("rb") as opened:
        is_list = opened.read(1000).removeprefix(_BOM).lstrip().startswith(b"[")
    if not is_list:
        yield from _read_lines(file, name)
        return
    text = _decode(file.read_bytes().removeprefix(_BOM), name)
    escapes = "\\u" in text
    for number, row in enumerate(_parse_json(text, f"{name} is no JSON list of objects: ")):
        if escapes:
            _check_whole_characters(row, f"{name}, row {number}")
        yield f"row {number}", row


def _read_lines(file: Path, name: str) -> PlacedRows:
    with file.open("rb") as lines:
        if lines.read(len(_BOM)) != _BOM:
            lines.seek(0)
        first = 1
        while batch := lines.readlines(_BATCH_BYTES):
            filled = [(number, line) for number, line in enumerate(batch, first) if line.strip()]
            rows = _parse_together([line for _, line in filled])
            for at, (number, line) in enumerate(filled):
                yield f"line {number}", rows[at] if rows else _parse_line(line, f"{name}, line {number}")
            first += len(batch)


def _parse_together(lines: list[bytes]) -> list[Any]:
    """The rows of some lines, parsed as one list: a third faster, and equal keys are one object. Empty if any line is
    faulty, or may be."""
    text = b"[" + f',"{_MARK}",'.encode().join(lines) + b"]"  # a line that ends within a value takes the mark into it
    if b"\\u" in text:
        return []
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        return []
    return found[::2] if found[1::2] == [_MARK] * (len(lines) - 1) and len(found) == 2 * len(lines) - 1 else []


def _parse_line(line: bytes, name: str) -> Any:
    text = _decode(line, name)
    row = _parse_json(text, f"{name} is no JSON object: ", "; one object a line is needed" + (
        " (a file that is one list has the suffix .json)" if text.lstrip().startswith("[") else ""))
    if "\\u" in text:
        _check_whole_characters(row, name)
    return row


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ShoalError(f"{name} is no text in UTF-8 ({error.reason} at byte {error.start}): save the file as "
                         "UTF-8") from error


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


def _check_whole_characters(row: Any, place: str) -> None:
    """ShoalError for half a character, which JSON can write with `\\u`."""
    if half := half_character(json.dumps(row, ensure_ascii=False)):
        raise ShoalError(f"{place} holds {half}, half of a character that JSON writes as two: write both halves, or "
                         "leave it out")


def half_character(text: str) -> str:
    """The first half of a surrogate pair alone, which no tokenizer and no file takes, as `\\ud83d`; empty without."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start]).strip("'")
    return ""


# ---- tables


def _read_table(file: Path, name: str) -> PlacedRows:
    """A table with a header; all values are text, so that of the answer `007` nothing is lost."""
    separator = "\t" if file.suffix == ".tsv" else ","
    csv.field_size_limit(2**31 - 1)  # the module's own limit of 131,072 characters is a long prompt
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=separator, strict=True)
        try:
            header = next(reader, [])
            _check_header(header, separator, name)
            for values in filter(None, reader):
                if len(values) != len(header):
                    raise ShoalError(f"{name}, line {reader.line_num} has {len(values)} values, the header has "
                                     f"{len(header)}: quote a value that holds the separator")
                yield f"line {reader.line_num}", dict(zip(header, values, strict=True))
        except csv.Error as error:
            raise ShoalError(f"{name}, line {reader.line_num} cannot be read as a table: {error}") from error
        except UnicodeDecodeError as error:
            raise ShoalError(f"{name} is no text in UTF-8 ({error.reason}, after line {reader.line_num}): save the "
                             "file as UTF-8") from error


def _check_header(header: list[str], separator: str, name: str) -> None:
    if twice := [column for column in header if header.count(column) > 1]:
        raise ShoalError(f"{name}: its header has the column {twice[0]!r} twice; each column has one name")
    other = next((mark for mark in "\t;," if len(header) == 1 and mark in header[0]), "")
    if other:
        cure = {"\t": "name it .tsv", ",": "name it .csv"}.get(other, "separate by commas")
        raise ShoalError(f"{name}: its header is one column, {header[0]!r}, which {other!r} separates, not "
                         f"{separator!r}: {cure}")


def _read_columnar(file: Path, name: str) -> PlacedRows:
    """Parquet, or arrow: its stream format, in which the `datasets` library stores, or its file format."""
    import pyarrow

    number = 0
    try:
        for batch in _parquet_batches(file) if file.suffix == ".parquet" else _arrow_batches(file):
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                    yield f"row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ShoalError(f"{name} cannot be read as {file.suffix[1:]}: {str(error).splitlines()[0]}") from error


def _parquet_batches(file: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as opened:
        yield from opened.iter_batches(_BATCH_ROWS)


def _arrow_batches(file: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.ipc

    with pyarrow.memory_map(str(file)) as source:
        is_file = bytes(source.read(6)) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(source)


_READERS: Mapping[str, Callable[[Path, str], PlacedRows]] = {
    ".jsonl": _read_lines, ".json": _read_json, ".parquet": _read_columnar, ".csv": _read_table, ".tsv": _read_table,
    ".arrow": _read_columnar}
SUFFIXES = tuple(_READERS)
