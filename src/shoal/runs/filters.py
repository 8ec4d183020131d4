"""The filter language of the table of groups: `reward>0.5 step=10..20 set=held_out` as SQL."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from shoal.runs.database import name
from shoal.text import did_you_mean
from shoal.types import ShoalError

COLUMNS = {
    "step": "INTEGER", "group": "INTEGER", "set": "VARCHAR", "row": "BIGINT", "version": "BIGINT", "size": "INTEGER",
    "unscored": "INTEGER", "reward": "FLOAT", "spread": "FLOAT", "lowest": "FLOAT", "highest": "FLOAT", "pass": "FLOAT",
    "length": "FLOAT", "longest": "INTEGER", "truncated": "FLOAT", "staleness": "INTEGER", "prompt_tokens": "INTEGER",
    "advantage": "FLOAT", "length_effect": "FLOAT",
}
"""Column of the table -> type. `set` is `train`, or the data set of an evaluation; `length_effect` the correlation of
reward and length within the group."""


MAX_TERMS, MAX_CHARS = 20, 2000
_TERM = re.compile(r"([\w/@.-]+?)\s*(<=|>=|!=|==|=|<|>)\s*(\"[^\"]*\"|\S+)")


def condition(text: str, functions: Iterable[str]) -> tuple[str, list[Any]]:
    """SQL and its values for a filter such as `reward>0.5 step=10..20 set=held_out`; ShoalError where it is none.

    `column=low..high` is a range; `none` stands for a missing value. `functions`: the reward functions."""
    parts, values, rest = [], [], text[:MAX_CHARS]
    for place, term in enumerate(_TERM.finditer(text[:MAX_CHARS])):
        if place >= MAX_TERMS:
            raise ShoalError(f"filter: at most {MAX_TERMS} conditions")
        rest = rest.replace(term[0], "", 1)
        sql, own = _condition(column_of(term[1], functions), term[1], term[2].replace("==", "="), term[3].strip('"'))
        parts.append(sql)
        values += own
    if rest := " ".join(word for word in rest.replace(",", " ").split() if word.lower() != "and"):
        raise ShoalError(f"filter: {rest[:60]!r} is no condition; write column, operator and value: reward>0.5")
    return " AND ".join(parts) or "true", values


def _condition(sql: str, column: str, operator: str, value: str) -> tuple[str, list[Any]]:
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


def column_of(column: str, functions: Iterable[str]) -> str:
    """A column as SQL: of the table, or a reward function's mean by the function's name."""
    if column in COLUMNS:
        return name(column)
    function = column.removeprefix("mean/")
    if function in functions:
        return name(f"mean/{function}")
    known = [*COLUMNS, *functions]
    raise ShoalError(f"there is no column {column[:60]!r}{did_you_mean(column, known) or '.'} "
                     f"Columns: {', '.join(known)}")
