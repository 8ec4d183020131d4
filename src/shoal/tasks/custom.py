"""The task of a user's data (`task=custom`): rows from files or the hub at `task.path`, scored by the user's reward
functions.

A row's prompt is its column `prompt` (text, or messages), what `task.template` makes of its columns, or its `messages`
without a final answer. All other columns go to the reward functions, as in TRL and verl.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.config.schema import TaskSection
from shoal.tasks.data import Published, Rows, place_splits, without_held_out
from shoal.tasks.rows import check_alike, examples_of, unseen_columns
from shoal.tasks.task import Task
from shoal.text import suggest
from shoal.types import ShoalError

NAME = "custom"
_LIKELY = ("question", "problem", "instruction", "query", "input", "text")
"""Columns that hold a prompt under another name."""


def load(task: TaskSection) -> Task:
    """Loads the task of the rows at `task.path`; it comes without rewards.

    Raises `ShoalError`, with file and line, for a row that cannot be used: none is left out, but for training prompts
    that are held out too, which the notes count.
    """
    train_rows, held_out_rows, notes = place_splits(replace(task, template=""), Published(NAME))
    train_rows, added = _with_prompts(train_rows, task.template)
    held_out_rows, from_held_out = _with_prompts(held_out_rows, task.template)
    notes += added or from_held_out
    train, held_out = examples_of(train_rows), examples_of(held_out_rows)
    if train:
        check_alike(held_out[0], train[0], held_out_rows[0][0], train_rows[0][0])
    kept = without_held_out(train, held_out, lambda example: json.dumps(example.prompt, sort_keys=True, default=str),
                            NAME, "prompt", notes)
    numbered = [replace(example, row=row) for row, example in enumerate(kept)]
    return Task(NAME, numbered, {"held_out": held_out}, rewards=(), question="prompt",
                notes=(*notes, *unseen_columns(NAME, (train or held_out)[0])))


def _with_prompts(rows: Rows, template: str) -> tuple[Rows, list[str]]:
    """The rows, each with its `prompt`; a note on its origin, if it is another column."""
    if template:
        pieces, names = parse_template(_template_text(template))
        prompts = [[{"role": "user", "content": fill(pieces, names, row, place)}] for place, row in rows]
        note = f"{NAME}: task.template makes each prompt, as a user's message"
    elif not rows or "prompt" in rows[0][1]:
        return rows, []
    elif "messages" in rows[0][1]:
        prompts = [_without_answer(row.get("messages"), place) for place, row in rows]
        note = f"{NAME}: the prompts are the column `messages`, without the assistant's last message"
    else:
        place, first = rows[0]
        likely = next((name for name in (*_LIKELY, *first) if isinstance(first.get(name), str)), "OTHER")
        raise ShoalError(f"task {NAME}: {place} has no column `prompt`; its columns: {', '.join(first) or 'none'}. "
                         f"Take one as it is, task.columns=[prompt={likely}], or make a message, "
                         f"task.template='{{{likely}}}'")
    made = [(place, row | {"prompt": prompt}) for (place, row), prompt in zip(rows, prompts, strict=True)]
    return made, [note] if rows else []


def _without_answer(messages: Any, place: str) -> list[Any]:
    """Messages up to the answer that they end with, if they do."""
    if not isinstance(messages, list):
        raise ShoalError(f"{place}: `messages` is a {type(messages).__name__}: expected a list of dicts with role and "
                         "content")
    ends = bool(messages) and isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant"
    asked = messages[:-1] if ends else messages
    if not asked:
        raise ShoalError(f"{place}: `messages` holds nothing but an answer: expected a message to answer")
    return asked


# ---- template


def _template_text(template: str) -> str:
    """The template itself, or what the file of that name holds."""
    if "{" in template or "\n" in template:
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise ShoalError(f"task.template={template!r} names no column, nor is it a file; expected text with the names "
                         "of columns in braces, 'Solve: {question}'")
    try:
        return file.read_text(encoding="utf-8-sig").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ShoalError(f"task.template={template}: the file cannot be read as text in UTF-8: {error}") from error


def parse_template(text: str) -> tuple[list[str], list[str]]:
    """Text and names of columns in turn: pieces[0], names[0], pieces[1], ...; doubled braces are braces.

    >>> parse_template("{a} in {{}}: {b}!")
    (['', ' in {}: ', '!'], ['a', 'b'])
    """
    pieces, names = [""], []
    for token in re.split(r"(\{\{|\}\}|\{[^{}]*\}|[{}])", text):
        if token in ("{{", "}}"):
            pieces[-1] += token[0]
        elif token in ("{", "}", "{}"):
            raise ShoalError(f"task.template: {token!r} stands alone after {''.join(pieces)[-30:]!r}; a column is "
                             "{NAME}, braces that are meant as such are doubled: {{ }}")
        elif token.startswith("{"):
            names.append(token[1:-1].strip())
            pieces.append("")
        else:
            pieces[-1] += token
    if not names:
        raise ShoalError(f"task.template={text[:60]!r} names no column: every prompt would be the same; expected "
                         "'Solve: {question}'")
    return pieces, names


def fill(pieces: Sequence[str], names: Sequence[str], row: Mapping[str, Any], place: str) -> str:
    """The text with the row's values: text as it is, whatever braces it holds, other values as JSON."""
    values = []
    for name in names:
        if row.get(name) is None:
            if name in row:
                raise ShoalError(f"{place}: the column {name!r} is null, and task.template needs it")
            raise ShoalError(f"task.template names {name!r}, which is no column of {place}{suggest(name, list(row))}; "
                             f"its columns: {', '.join(row) or 'none'}")
        values.append(row[name] if isinstance(row[name], str) else
                      json.dumps(row[name], ensure_ascii=False, default=str))
    return "".join(piece + value for piece, value in zip(pieces, [*values, ""], strict=True))
