"""Text made from a row's columns by a template with their names in braces, `Solve: {question}`: the
setting `task.template`, and a judge's template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.records import ShoalError
from shoal.text import did_you_mean


def template_text(template: str, key: str = "task.template") -> str:
    """Returns a template's text: the setting's value itself if it has `{` or a line break, else the
    content of the file that the value names, without its final line break. ShoalError if there is
    no such file, or if it is no text in UTF-8. `key` names the setting in messages. A value with
    `{` is never taken for a file's name."""
    if "{" in template or "\n" in template:
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise ShoalError(
            f"{key}={template!r} names no column, nor is it a file; expected text with the names "
            "of columns in braces, 'Solve: {question}'"
        )
    try:
        return file.read_text(encoding="utf-8-sig").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ShoalError(
            f"{key}={template}: the file cannot be read as text in UTF-8: {error}"
        ) from error


def parse_template(text: str, key: str = "task.template") -> tuple[list[str], list[str]]:
    """Splits a template into pieces of text and names of columns, which alternate: pieces[0],
    names[0], pieces[1], ... Doubled braces stand for braces. Spaces around names are dropped.
    ShoalError for single braces, and if no column is named; `key` names the setting in messages.

    >>> parse_template("{a} in {{}}: {b}!")
    (['', ' in {}: ', '!'], ['a', 'b'])
    """
    pieces, names = [""], []
    for token in re.split(r"(\{\{|\}\}|\{[^{}]*\}|[{}])", text):
        if token in ("{{", "}}"):
            # `{{` -> `{`
            pieces[-1] += token[0]
        elif token in ("{", "}", "{}"):
            raise ShoalError(
                f"{key}: {token!r} stands alone after {''.join(pieces)[-30:]!r}; a column is "
                "{NAME}, braces that are meant as such are doubled: {{ }}"
            )
        elif token.startswith("{"):
            names.append(token[1:-1].strip())
            pieces.append("")
        else:
            pieces[-1] += token
    if not names:
        raise ShoalError(
            f"{key}={text[:60]!r} names no column: every prompt would be the same; expected "
            "'Solve: {question}'"
        )
    return pieces, names


def fill(
    pieces: Sequence[str],
    names: Sequence[str],
    row: Mapping[str, Any],
    place: str,
    key: str = "task.template",
) -> str:
    """Returns the text of a template, parsed to `pieces` and `names`, for one row. Values that are
    text are inserted as they are (braces in them mean nothing), other values as JSON. ShoalError if
    a column is missing or null. In messages `place` names the row, `key` the setting. Columns that
    the template does not name do not matter."""
    values = []
    for name in names:
        if row.get(name) is None:
            if name in row:
                raise ShoalError(f"{place}: the column {name!r} is null, and {key} needs it")
            raise ShoalError(
                f"{key} names {name!r}, which is no column of {place}{did_you_mean(name, row)}; "
                f"its columns: {', '.join(row) or 'none'}"
            )
        value = row[name]
        if not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False, default=str)
        values.append(value)
    text = pieces[0]
    for value, piece in zip(values, pieces[1:], strict=True):
        text += value + piece
    return text
