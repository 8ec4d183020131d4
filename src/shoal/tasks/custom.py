"""The task of a user's data (`task=custom`): rows from files or the hub at `task.path`, scored by
the user's reward functions.

A row's prompt is its column `prompt` (text, or messages), what `task.template` makes of its
columns, or its `messages` without a final answer. All other columns go to the reward functions, as
in TRL and verl.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.config.schema import TaskSection
from shoal.tasks.data import Published, read_splits
from shoal.tasks.rows import SHARE_GPT_ADVICE, ExampleMaker, is_share_gpt, task_of_examples
from shoal.tasks.task import Task
from shoal.text import did_you_mean
from shoal.types import Example, ShoalError

NAME = "custom"
_LIKELY = ("question", "problem", "instruction", "query", "input", "text")
_UNLIKELY = ("solution", "answer", "target", "response", "completion", "label", "ground_truth")
"""Columns that hold a prompt under another name; and those that hold what is asked for."""


def load(task: TaskSection) -> Task:
    """Loads the task of the rows at `task.path`; it comes without rewards.

    Raises `ShoalError`, with file and line, for a row that cannot be used: none is left out, but
    for training prompts that are held out too.
    """
    maker, parts = (
        ExampleMaker(),
        parse_template(template_text(task.template)) if task.template else None,
    )

    def make(number: int, place: str, row: dict[str, Any]) -> Example:
        if parts:
            row = row | {"prompt": [{"role": "user", "content": fill(*parts, row, place)}]}
        elif "prompt" not in row and "messages" not in row:
            raise _no_prompt(row, place)
        return maker(number, place, row)

    splits = read_splits(replace(task, template=""), Published(NAME), make)
    if parts:
        splits.notes.append(f"{NAME}: task.template makes each prompt, as a user's message")
    return task_of_examples(splits, maker)


def _no_prompt(row: Mapping[str, Any], place: str) -> ShoalError:
    texts = [
        name
        for name, value in row.items()
        if isinstance(value, str)
        or (isinstance(value, list) and value and isinstance(value[0], dict))
    ]
    share_gpt = [name for name, value in row.items() if is_share_gpt(value)]
    if share_gpt:
        return ShoalError(
            f"task {NAME}: {place} has no column `prompt` or `messages`, but {share_gpt[0]!r}: "
            f"{SHARE_GPT_ADVICE}, in a column `messages`"
        )
    likely = min(
        texts,
        default="OTHER",
        key=lambda name: (
            _LIKELY.index(name.lower())
            if name.lower() in _LIKELY
            else len(_LIKELY) + (name.lower() in _UNLIKELY)
        ),
    )
    advice = (
        f"Take the messages of {likely}"
        if isinstance(row.get(likely), list)
        else f"Make a message of one, task.template='{{{likely}}}', or take text as it is, past "
        f"the model's chat template"
    )
    return ShoalError(
        f"task {NAME}: {place} has no column `prompt`; its columns: {', '.join(row) or 'none'}. "
        f"{advice}, task.columns=[prompt={likely}]"
    )


# ---- template


def template_text(template: str, key: str = "task.template") -> str:
    """The template itself, or what the file of that name holds; `key`: whose value it is."""
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
    """Text and names of columns in turn: pieces[0], names[0], pieces[1], ...; doubled braces are
    braces.

    >>> parse_template("{a} in {{}}: {b}!")
    (['', ' in {}: ', '!'], ['a', 'b'])
    """
    pieces, names = [""], []
    for token in re.split(r"(\{\{|\}\}|\{[^{}]*\}|[{}])", text):
        if token in ("{{", "}}"):
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
    """The text with the row's values: text as it is, whatever braces it holds, other values as
    JSON."""
    values = []
    for name in names:
        if row.get(name) is None:
            if name in row:
                raise ShoalError(f"{place}: the column {name!r} is null, and {key} needs it")
            raise ShoalError(
                f"{key} names {name!r}, which is no column of {place}{did_you_mean(name, row)}; "
                f"its columns: {', '.join(row) or 'none'}"
            )
        values.append(
            row[name]
            if isinstance(row[name], str)
            else json.dumps(row[name], ensure_ascii=False, default=str)
        )
    return "".join(piece + value for piece, value in zip(pieces, [*values, ""], strict=True))
