"""Text made from a row's columns by a template with their names in braces, `Solve: {question}`: the
setting `task.template`, a judge's template, and a teacher's hint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.records import Example, Prompt, ShoalError
from shoal.text import did_you_mean


def template_text(template: str, key: str = "task.template") -> str:
    """Returns a template's text: the setting's value itself if it has `{` or a line break, else the
    content of the file that the value names, without its final line break. ShoalError if there is
    no such file, or if it is not UTF-8 text. `key` names the setting in messages. A value with
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
                "{NAME}, literal braces are doubled: {{ }}"
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
                f"{key} names {name!r}, which is not a column of {place}{did_you_mean(name, row)}; "
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


@dataclass(frozen=True)
class Hint:
    """What a teacher reads in place of a row's last user message (`teacher.hint`), parsed."""

    pieces: Sequence[str]
    names: Sequence[str]  # columns, and `prompt`, the message itself

    @classmethod
    def parse(cls, text: str) -> Hint:
        """Parses the value of `teacher.hint`. Without the name `prompt` the hint follows the
        message, after a blank line. ShoalError for wrong braces, or if nothing is named."""
        key = "teacher.hint"
        pieces, names = parse_template(template_text(text, key), key)
        if "prompt" not in names:
            pieces = ["", f"\n\n{pieces[0]}", *pieces[1:]]
            names = ["prompt", *names]
        return cls(pieces, names)

    def in_example(self, example: Example) -> Example:
        """Returns the row with the hint in its prompt: in its last user message, or in the prompt
        that is a text. ShoalError if the row lacks a column that the hint names, or has no user
        message.

        >>> Hint.parse("The answer is {answer}.").in_example(row).prompt
        [{'role': 'user', 'content': '2 + 3 = ?\n\nThe answer is 5.'}]
        """
        place = example.place or f"row {example.row}"

        def hinted(message: Any) -> str:
            row = {**example.columns, "prompt": message}
            return fill(self.pieces, self.names, row, place, "teacher.hint")

        prompt: Prompt = example.prompt
        if isinstance(prompt, str):
            return replace(example, prompt=hinted(prompt))
        messages = list(prompt)
        for number in reversed(range(len(messages))):
            if messages[number].get("role") == "user":
                message = messages[number]
                messages[number] = {**message, "content": hinted(message.get("content"))}
                return replace(example, prompt=messages)
        raise ShoalError(
            f"{place}: its prompt has no message of a user, into which teacher.hint could go",
            "teacher.hint",
        )
