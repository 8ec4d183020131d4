"""Groups as a parquet table: one row a completion, so that pandas and polars need no unpacking.

    df.groupby(["step", "group"])["reward"].mean()          df[df.text.str.contains("boxed")]

A row a group would hold lists of structs, which each of these would have to explode first. What the completions of a
group share (prompt, step, data columns) stands in each of its rows; dictionaries and compression make that cheap.

    step version row group completion purpose subset        numbers and names; `group` is the place in the file
    prompt prompt_ids                                       messages as JSON text
    column/<name> weight/<name>                             the data's columns, the rewards' weights
    text token_ids logprobs stop_reason                     the completion, one entry a token in the lists
    reward component/<name> valid correct advantage         NaN is null
    loss_mask versions support_ids extra/<name> trainer_logprobs       where they are told; further arrays by token likewise

`column/*` and `extra/*` are text, numbers or booleans where all values are of that kind, else JSON text.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.report.groups import COMPLETION_FIELDS

_SHARED = ("purpose", "step", "version", "subset", "row", "prompt", "prompt_ids")
_OWN = ("group", "completion", *_SHARED)
_SPREAD = {"components": "component/", "extra": "extra/", "columns": "column/", "reward_weights": "weight/"}
_NOTES = b"shoal"
"""The key of the file's own notes: which columns hold JSON text."""


def to_parquet(records: Sequence[Mapping[str, Any]]) -> bytes:
    """The file that holds these groups (of `group_record`)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [row for number, record in enumerate(records) for row in _rows(number, record)]
    names = dict.fromkeys([*_fixed_types(), *(name for row in rows for name in row)])
    columns, fields, as_json = [], [], []
    for name in names:
        values = [row.get(name) for row in rows]
        kind = _fixed_types().get(name) or _type_of(name, values)
        if kind is None:
            values = [value if value is None else json.dumps(value, ensure_ascii=False) for value in values]
            as_json.append(name)
        if kind in (None, "string"):
            kind, values = "string", [encodable(value) for value in values]
        fields.append(pa.field(name, _arrow_type(kind)))
        columns.append(pa.array(values, fields[-1].type))
    table = pa.Table.from_arrays(columns, schema=pa.schema(fields, {_NOTES: json.dumps({"json": as_json})}))
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def from_parquet(data: bytes) -> list[dict[str, Any]]:
    """The records of a file that `to_parquet` made; ValueError, KeyError or TypeError for another thing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
    as_json = set(json.loads((table.schema.metadata or {})[_NOTES])["json"])
    columns = {name: table[name].to_pylist() for name in table.column_names}
    for name in as_json:
        columns[name] = [value if value is None else json.loads(value) for value in columns[name]]
    records: dict[int, dict[str, Any]] = {}
    for i, number in enumerate(columns["group"]):
        row = {name: values[i] for name, values in columns.items()}
        record = records.setdefault(number, {name: row[name] for name in _SHARED} | {
            "columns": _gathered(row, "columns"), **_weights(row), "completions": []})
        record["completions"].append(_completion(row))
    return [records[number] for number in sorted(records)]


def _rows(number: int, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    shared = {"group": number, **{name: record[name] for name in _SHARED}, **_spread("columns", record["columns"]),
              **_spread("reward_weights", record.get("reward_weights", {}))}
    rows = []
    for index, completion in enumerate(record["completions"]):
        row = {**shared, "completion": index}
        for name, value in completion.items():
            own = _spread(name, value) if name in _SPREAD else {name: value}
            if name not in COMPLETION_FIELDS and ("/" in name or name in _OWN):
                raise ValueError(f"token array {name!r}: the table has other columns by such a name")
            row |= own
        rows.append(row)
    return rows


def _spread(field: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_SPREAD[field]}{name}": value for name, value in values.items()}


def _gathered(row: Mapping[str, Any], field: str) -> dict[str, Any]:
    head = _SPREAD[field]
    return {name.removeprefix(head): value for name, value in row.items() if name.startswith(head)}


def _weights(row: Mapping[str, Any]) -> dict[str, Any]:
    own = _gathered(row, "reward_weights")
    return {"reward_weights": own} if own else {}


def _completion(row: Mapping[str, Any]) -> dict[str, Any]:
    """A completion's record from its row; what is null was not told, but for rewards, which NaN makes null."""
    record = {name: value for name, value in row.items() if name not in _OWN and "/" not in name
              and (value is not None or name == "reward")}
    return record | {field: own for field in ("components", "extra") if (own := _gathered(row, field)) or
                     field == "components"}


def _fixed_types() -> dict[str, str]:
    return {
        "step": "int64", "version": "int64", "row": "int64", "group": "int64", "completion": "int64",
        "purpose": "string", "subset": "string", "prompt_ids": "int32s", "text": "string", "token_ids": "int32s",
        "logprobs": "float32s", "stop_reason": "string", "reward": "float64", "valid": "bool", "correct": "bool",
        "advantage": "float64", "loss_mask": "bools", "versions": "int32s", "trainer_logprobs": "float32s",
        "support_ids": "int32ss",
    }


def _type_of(name: str, values: Sequence[Any]) -> str | None:
    """The type of a column that is not the same in every file; None where only JSON text holds all its values."""
    if name.startswith("component/"):
        return "float64"
    if "/" not in name and name != "prompt":
        assert name not in COMPLETION_FIELDS
        return "float32s"
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int} and not all(-(2**63) <= value < 2**63 for value in values if value is not None):
        return None
    return {str: "string", bool: "bool", int: "int64", float: "float64"}.get(next(iter(kinds), str)) \
        if len(kinds) <= 1 else None


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    if kind.endswith("s"):
        return pa.list_(_arrow_type(kind[:-1]))
    return {"bool": pa.bool_(), "string": pa.string()}.get(kind) or getattr(pa, kind)()


def encodable(value: Any) -> Any:
    """A text's lone surrogates, which UTF-8 cannot hold, as their escapes; any other value as it is."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value
