"""A task of rows that were given from Python: dicts, columns, a table of pandas, polars, arrow or datasets.

Rows from files go through the same checks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.tasks.data_file import half_character
from shoal.tasks.task import ROWS, Task
from shoal.types import Example, Prompt, ShoalError

HELD_OUT_SHARE = 10
"""Without rows to evaluate on, one in this many is held out at most."""

TAKEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Further arguments of reward functions: no column may have such a name."""
_NOT_GIVEN = ("completion",)  # by the convention, columns that reward functions do not see

_LISTS = ("files", "columns")
"""Settings of a task that are lists."""

_MESSAGE = ("role", "content")
_MISSING = ("NAType", "NaTType")

Correct = Callable[[str, Example], bool]


def is_data(task: Any) -> bool:
    """True if `task=` holds data, not a name or settings: a dict of settings has plain values, one of columns lists."""
    if isinstance(task, Mapping):
        return any(value is not None and not isinstance(value, str | bool | int | float) and name not in _LISTS
                   for name, value in task.items())
    return task is not None and not isinstance(task, str | bytes)


def rows_task(data: Any, held_out: Any = None, correct: Correct | None = None, num_questions: int = 500) -> Task:
    """A task of rows with `prompt` (text or messages); all other columns go to the reward functions.

    Without `held_out` the last rows are held out: `num_questions` (0: no limit), at most a tenth.
    """
    if correct is not None and not callable(correct):
        raise ShoalError(f"correct is a {type(correct).__name__}: expected a function (text, example) -> bool")
    train, notes = examples_of(_placed(data, "task")), []
    if held_out is not None:
        given = _placed(held_out, "held_out")
        kept = examples_of(given)
        check_alike(kept[0], train[0], given[0][0], "task row 0")
    else:
        if len(train) < 2:
            raise ShoalError("task has one row: expected two or more, or rows to evaluate on, held_out=...")
        count = max(1, min(num_questions or len(train), len(train) // HELD_OUT_SHARE))
        train, kept = train[:-count], train[-count:]
        notes.append(f"rows: the last {count} of {count + len(train)} are held out for evaluation "
                     "(held_out= gives others)")
    return Task(ROWS, train, {"held_out": kept}, rewards=(), question="prompt",
                correct=functools.partial(_call_correct, correct) if correct else None,
                notes=(*notes, *unseen_columns(ROWS, train[0])))


def unseen_columns(task: str, example: Example) -> list[str]:
    """Notes on columns that reward functions do not get."""
    return [f"{task}: the column {name!r} is not given to reward functions: it is no input of theirs by convention"
            for name in _NOT_GIVEN if name in example.columns]


def _call_correct(correct: Correct, text: str, example: Example) -> bool:
    """Calls a user's function; an error names the example."""
    try:
        return bool(correct(text, example))
    except Exception as error:
        raise ShoalError(f"correct raised {type(error).__name__}: {error} for example row {example.row}, "
                         f"completion {text[:80]!r}: it must accept any text") from error


# ---- reading


def _placed(data: Any, name: str) -> list[tuple[str, Any]]:
    """Whatever holds rows, as a list of them, each with its place."""
    rows: Any
    if isinstance(data, Mapping):
        rows = _rows_of_columns(data, name)
    elif hasattr(data, "iloc") and hasattr(data, "to_dict"):  # pandas
        rows = data.to_dict("records") if hasattr(data, "columns") else data.tolist()
    elif callable(read := getattr(data, "to_dicts", None) or getattr(data, "to_pylist", None)):  # polars, arrow
        rows = read()
    elif isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise ShoalError(f"{name} is a {type(data).__name__}: expected rows, a list of dicts with `prompt`, a table of "
                         "pandas, polars, arrow or datasets, or a shoal.Task")
    else:
        rows = list(data)
    if not len(rows):
        raise ShoalError(f"{name} is empty: expected rows with `prompt`")
    return [(f"{name} row {number}", row) for number, row in enumerate(rows)]


def _rows_of_columns(columns: Mapping[Any, Any], name: str) -> list[dict[str, Any]]:
    if "prompt" not in columns:
        raise ShoalError(f"{name} has no column `prompt`: {_list_columns(columns)}")
    for column, values in columns.items():
        if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
            raise ShoalError(f"{name}: the column {column!r} is a {type(values).__name__}; expected a list, a value a "
                             "row")
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{column} {length}" for column, length in lengths.items())
        raise ShoalError(f"{name}: its columns must be of one length, they have {shown} values")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _list_columns(row: Mapping[Any, Any]) -> str:
    return f"its columns are {', '.join(map(str, row))}" if row else "it has no columns at all"


def examples_of(rows: Sequence[tuple[str, Any]]) -> list[Example]:
    """(place, row with `prompt`) -> examples, numbered; ShoalError for one that cannot be used or differs in kind."""
    examples = [_example(row, number, place) for number, (place, row) in enumerate(rows)]
    for example, (place, _) in zip(examples[1:], rows[1:], strict=True):
        check_alike(example, examples[0], place, rows[0][0])
    return examples


def check_alike(example: Example, first: Example, place: str, first_place: str) -> None:
    """ShoalError unless both prompts are of one kind and both rows have the same columns."""
    kind, other_kind = ("text" if isinstance(one.prompt, str) else "messages" for one in (example, first))
    if kind != other_kind:
        raise ShoalError(f"{place}: `prompt` is {kind}, that of {first_place} is {other_kind}: make all prompts of one "
                         "kind")
    if other := sorted(example.columns.keys() ^ first.columns.keys()):
        has, lacks = (place, first_place) if other[0] in example.columns else (first_place, place)
        raise ShoalError(f"{lacks} has no column {other[0]!r}, {has} has: give every row the same columns, None where "
                         "there is no value")


def _example(row: Any, number: int, place: str) -> Example:
    if not isinstance(row, Mapping):
        raise ShoalError(f"{place} is a {type(row).__name__}: expected a dict with `prompt` and the reward's columns")
    if "prompt" not in row:
        raise ShoalError(f"{place} has no `prompt`: {_list_columns(row)}")
    columns = {column: _plain(value) for column, value in row.items() if column != "prompt"}
    for column in columns:
        if not isinstance(column, str):
            raise ShoalError(f"{place}: the column {column!r} is a {type(column).__name__}; expected a name, text")
        if column in TAKEN:
            raise ShoalError(f"{place}: a column cannot be called {column!r}: reward functions get that from the run; "
                             "rename it")
    return Example(number, _prompt(row["prompt"], place), columns)


def _plain(value: Any) -> Any:
    """A table's value as Python has it: lists for arrays, None where there is none (NaN, NA, NaT)."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    missing = (isinstance(value, float) and math.isnan(value)) or type(value).__name__ in _MISSING
    return None if missing else value


def _prompt(prompt: Any, place: str) -> Prompt:
    """Text, or messages as a list of plain dicts, checked."""
    if hasattr(prompt, "tolist"):  # tables hold lists as arrays
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        if not prompt:
            raise ShoalError(f"{place}: `prompt` is empty: expected text, or messages")
        texts = [prompt]
    elif not isinstance(prompt, list | tuple):
        raise ShoalError(f"{place}: `prompt` is a {type(prompt).__name__}: expected text, or messages, a list of dicts "
                         "with role and content")
    elif not prompt:
        raise ShoalError(f"{place}: `prompt` is an empty list: expected messages, or text")
    else:
        for at, message in enumerate(prompt):
            if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in _MESSAGE):
                raise ShoalError(f"{place}: message {at} of `prompt` is {str(message)[:60]!r}: expected a dict with "
                                 "role and content, both text")
        texts = [message["content"] for message in prompt]
    if half := half_character("".join(texts)):
        raise ShoalError(f"{place}: `prompt` holds {half}, half of a character that is written as two: write both "
                         "halves, or leave it out")
    if isinstance(prompt, str):
        return prompt
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]
