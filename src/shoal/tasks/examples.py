"""The task of a user's own rows: read from files or the hub at `task.path` (`task=custom`), or
given from Python; scored by the user's reward functions.

A row's prompt is its column `prompt` (text, or messages), what `task.template` makes of its
columns, or its `messages` without a final answer. All other columns are passed to the reward
functions, as in TRL and verl.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from json import JSONEncoder
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.sections.task import TaskSection
from shoal.records import Example, Prompt, ShoalError, ground_truth
from shoal.tasks.data import Published, Splits, half_character, read_splits
from shoal.tasks.task import CUSTOM, ROWS, Task
from shoal.text import count, did_you_mean

_LIKELY = ("question", "problem", "instruction", "query", "input", "text")
"""Usual names of columns that hold prompts, the likeliest first."""


_UNLIKELY = ("solution", "answer", "target", "response", "completion", "label", "ground_truth")
"""Usual names of columns that hold answers."""


def load(task: TaskSection) -> Task:
    """Loads the task of the rows at `task.path`; it has no reward functions.

    Raises `ShoalError`, with file and line, for a row that cannot be used. No row is left out,
    except training prompts that are held out too.
    """
    maker = ExampleMaker()

    def make(number: int, place: str, row: dict[str, Any]) -> Example:
        if "prompt" not in row and "messages" not in row:
            raise _no_prompt(row, place)
        return maker(number, place, row)

    if not task.template:
        return task_of_examples(read_splits(task, Published(CUSTOM), make), maker)

    pieces, names = parse_template(template_text(task.template))

    def make_by_template(number: int, place: str, row: dict[str, Any]) -> Example:
        text = fill(pieces, names, row, place)
        return maker(number, place, row | {"prompt": [{"role": "user", "content": text}]})

    splits = read_splits(replace(task, template=""), Published(CUSTOM), make_by_template)
    splits.notes.append(f"{CUSTOM}: task.template makes each prompt, as a user's message")
    return task_of_examples(splits, maker)


def _no_prompt(row: Mapping[str, Any], place: str) -> ShoalError:
    """Returns the error for a row without prompt, with advice on which column to take."""
    candidates = []
    for name, value in row.items():
        if is_share_gpt(value):
            return ShoalError(
                f"task {CUSTOM}: {place} has no column `prompt` or `messages`, but {name!r}: "
                f"{SHARE_GPT_ADVICE}, in a column `messages`"
            )
        are_messages = isinstance(value, list) and value and isinstance(value[0], dict)
        if isinstance(value, str) or are_messages:
            candidates.append(name)
    likely = min(candidates, default="OTHER", key=_unlikeliness)
    if isinstance(row.get(likely), list):
        advice = f"Take the messages of {likely}"
    else:
        advice = (
            f"Make a message of one, task.template='{{{likely}}}', or take text as it is, past "
            "the model's chat template"
        )
    return ShoalError(
        f"task {CUSTOM}: {place} has no column `prompt`; its columns: {', '.join(row) or 'none'}. "
        f"{advice}, task.columns=[prompt={likely}]"
    )


def _unlikeliness(column: str) -> int:
    """Returns a number for ranking columns by name: the lower, the likelier the column holds
    prompts."""
    name = column.lower()
    if name in _LIKELY:
        return _LIKELY.index(name)
    if name in _UNLIKELY:
        return len(_LIKELY) + 1
    return len(_LIKELY)


# ---- template


def template_text(template: str, key: str = "task.template") -> str:
    """Returns the text of a template: the value itself if it has braces or lines, else the content
    of the file that it names. ShoalError if there is no such file. `key`: the setting, for
    messages."""
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
    names[0], pieces[1], ... Doubled braces stand for braces. ShoalError for single braces, and if
    no column is named.

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
    """Returns the template's text with the values of a row: text as it is, whatever braces it
    holds, other values as JSON. ShoalError if a column is missing or null."""
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


TAKEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that reward functions get from the run: no column may have such a name."""


SAME = "train"
"""The value of `held_out=` that evaluates on the training rows."""


_GIVEN = "rows from Python"


_LISTS = ("files", "columns")
"""Names of task settings whose values are lists; `is_data` must not take them for columns."""


_PLAIN = (str, int, bool, type(None))


_ENCODER = JSONEncoder(sort_keys=True, default=str)


Correct = Callable[[str, Example], bool]


def is_data(task: Any) -> bool:
    """True if the argument `task=` holds data rather than a name or settings. Of two dicts, one
    with plain values is settings, one with lists is columns of data."""
    if not isinstance(task, Mapping):
        return task is not None and not isinstance(task, str | bytes)
    for name, value in task.items():
        is_plain = value is None or isinstance(value, str | bool | int | float)
        if not is_plain and name not in _LISTS:
            return True
    return False


def rows_task(
    data: Any, held_out: Any = None, correct: Correct | None = None, num_questions: int = 500
) -> Task:
    """Returns the task of rows that have `prompt` (text or messages) or `messages`; all other
    columns are passed to the reward functions.

    Without `held_out` the last rows are held out: `num_questions` (0: no limit), but at most a
    tenth; or all rows inside `evaluating()`. `held_out="train"` evaluates on the training rows.
    `correct`: a function (text, example) -> bool.
    """
    if correct is not None and not callable(correct):
        raise ShoalError(
            f"correct is a {type(correct).__name__}: expected a function (text, example) -> bool"
        )
    maker = ExampleMaker()
    train = _examples(maker, data, "task")
    splits = Splits(ROWS, train, [], on_purpose="held_out='train'", keeps_row_numbers=True)
    splits.data.train_files[_GIVEN] = len(splits.train)
    if isinstance(held_out, str) and held_out == SAME:
        splits.share()
    elif held_out is not None:
        splits.held_out = _examples(maker, held_out, "held_out")
        splits.data.held_out_files[_GIVEN] = len(splits.held_out)
    else:
        splits.divide("task", num_questions)
    checked = functools.partial(_call_correct, correct) if correct else None
    return task_of_examples(splits, maker, checked)


def task_of_examples(splits: Splits, maker: ExampleMaker, correct: Correct | None = None) -> Task:
    """Returns the task of examples, after dropping the training prompts that are held out too. Adds
    notes on what the maker of the examples saw."""
    splits.drop_held_out(prompt_key, "prompt")
    if maker.from_messages:
        splits.notes.append(
            f"{splits.task}: the prompts are the column `messages`, without the assistant's last "
            "message"
        )
    if maker.num_continued:
        splits.notes.append(
            f"{splits.task}: {count(maker.num_continued, 'prompt ends', 'prompts end')} with an "
            "assistant's message, which the completion continues"
        )
    splits.notes += [f"{splits.task}: {note}" for note in maker.roles.notes]
    note_empty_answers(splits)
    return with_rows(Task(splits.task, question="prompt", correct=correct), splits)


def note_empty_answers(splits: Splits) -> None:
    """Adds a note on how many rows have no right answer, if others have one: no completion can
    match an empty one."""
    rows = splits.all_rows
    empty = [example for example in rows if _is_blank(ground_truth(example.columns))]
    if empty and len(empty) < len(rows):
        place = f", the first {empty[0].place}" if empty[0].place else ""
        splits.notes.append(
            f"{splits.task}: {len(empty)} of {len(rows)} rows have an empty answer{place}: fill "
            "them in or leave these rows out, unless the reward needs no answer"
        )


def _is_blank(answer: Any) -> bool:
    """True for None and for text without visible characters."""
    return answer is None or (isinstance(answer, str) and not answer.strip())


def with_rows(task: Task, splits: Splits) -> Task:
    """Returns the task with the examples of its data, numbered from 0 in each split."""
    held_out = splits.held_out
    if not splits.keeps_row_numbers:
        held_out = _numbered(held_out)
    return replace(
        task,
        train=_numbered(splits.train),
        evaluations={"held_out": held_out},
        notes=tuple(splits.notes),
        data=splits.data,
    )


def has_answer(example: Example) -> bool:
    """True if an example's column `answer` is not None."""
    return example.columns["answer"] is not None


def prompt_key(example: Example) -> str:
    """Returns a text that is equal for two examples if and only if their prompts are equal."""
    return example.prompt if isinstance(example.prompt, str) else _ENCODER.encode(example.prompt)


def _numbered(examples: Sequence[Example]) -> list[Example]:
    """Returns the examples with their positions as row numbers."""
    numbered = []
    for number, example in enumerate(examples):
        if example.row != number:
            example = replace(example, row=number)
        numbered.append(example)
    return numbered


def _call_correct(correct: Correct, text: str, example: Example) -> bool:
    """Calls the user's function `correct`; if it raises, the ShoalError names the example."""
    try:
        return bool(correct(text, example))
    except Exception as error:
        raise ShoalError(
            f"correct raised {type(error).__name__}: {error} for data row {example.row}, "
            f"completion {text[:80]!r}: it must accept any text"
        ) from error


# ---- reading


def _examples(maker: ExampleMaker, data: Any, name: str) -> list[Example]:
    """Returns the examples of rows that were given from Python. `name` is the argument, for
    messages."""
    examples = []
    for number, row in enumerate(_rows(data, name)):
        examples.append(maker(number, f"{name} row {number}", row))
    return examples


def _rows(data: Any, name: str) -> Sequence[Any]:
    """Returns the rows of any object that holds rows: a list of dicts, a dict of columns, or a
    table of pandas, polars, arrow or datasets. ShoalError for anything else, and if there are no
    rows."""
    rows: Any
    to_rows = getattr(data, "to_dicts", None) or getattr(data, "to_pylist", None)
    if isinstance(data, Mapping):
        rows = _rows_of_columns(data, name)
    elif hasattr(data, "iloc") and hasattr(data, "to_dict"):  # pandas
        rows = data.to_dict("records") if hasattr(data, "columns") else data.tolist()
    elif callable(to_rows):  # polars, arrow
        rows = to_rows()
    elif isinstance(data, str | bytes) or not isinstance(data, Iterable):
        other = "or a shoal.Task"
        if name == "held_out":
            other = f"or {SAME!r}, for those that are trained on"
        raise ShoalError(
            f"{name} is a {type(data).__name__}: expected rows, a list of dicts with `prompt`, a "
            f"table of pandas, polars, arrow or datasets, {other}"
        )
    else:
        rows = list(data)
    if not len(rows):
        raise ShoalError(f"{name} is empty: expected rows with `prompt`")
    return rows


def _rows_of_columns(columns: Mapping[Any, Any], name: str) -> list[dict[str, Any]]:
    """Returns a dict of columns as a list of rows. ShoalError if their lengths differ."""
    for column, values in columns.items():
        if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
            raise ShoalError(
                f"{name}: the column {column!r} is a {type(values).__name__}; expected a list, a "
                "value a row"
            )
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{column} {length}" for column, length in lengths.items())
        raise ShoalError(f"{name}: its columns must be of one length, they have {shown} values")
    rows = []
    for values in zip(*columns.values(), strict=True):
        rows.append(dict(zip(columns, values, strict=True)))
    return rows


ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages that chat templates write: of OpenAI's API, and Llama's for a tool."""


class UnknownRoles:
    """Collects roles of messages that are not in ROLES: a chat template writes such a role as it
    is, drops it or fails."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}  # unknown role -> places of the rows that have it

    def add(self, example: Example) -> None:
        """Collects the unknown roles of one example."""
        if isinstance(example.prompt, str):
            return
        roles = {message["role"] for message in example.prompt}
        for role in sorted(roles.difference(ROLES)):
            self._places.setdefault(role, []).append(example.place)

    @property
    def notes(self) -> list[str]:
        """A line for each unknown role, with the number of prompts that have it and the first
        place."""
        notes = []
        for role, places in self._places.items():
            notes.append(
                f"{count(len(places), 'prompt has', 'prompts have')} a message of the role "
                f"{role!r:.40} (first {places[0]}), which most chat templates do not know: "
                f"expected {', '.join(ROLES[:5])}"
            )
        return notes


class ExampleMaker:
    """Makes an example of each row with `prompt` or `messages`. Raises ShoalError if a row cannot
    be used, or has another form of prompt or other columns than the first row."""

    def __init__(self) -> None:
        self.num_continued = 0  # prompts that end with an assistant's message
        self.roles = UnknownRoles()
        self.from_messages = False
        self._first: tuple[Example, str] | None = None  # the first example and its place

    def __call__(self, number: int, place: str, row: Any) -> Example:
        """Returns the example of a row, and counts what is noted about all of them."""
        example = example_of(number, place, row)
        if self._first is None:
            _check_names(example, place)
            self._first = (example, place)
            self.from_messages = "prompt" not in row
        first, first_place = self._first
        is_text, first_is_text = isinstance(example.prompt, str), isinstance(first.prompt, str)
        if is_text != first_is_text:
            form, first_form = ("text", "messages") if is_text else ("messages", "text")
            raise ShoalError(
                f"{place}: `prompt` is {form}, that of {first_place} is {first_form}: make all "
                "prompts of one kind"
            )
        if example.columns.keys() != first.columns.keys():
            _check_names(example, place)
            column = min(example.columns.keys() ^ first.columns.keys())
            has, lacks = first_place, place
            if column in example.columns:
                has, lacks = place, first_place
            raise ShoalError(
                f"{lacks} has no column {column!r}, {has} has: give every row the same columns, "
                "None where there is no value"
            )
        if not isinstance(example.prompt, str) and example.prompt[-1]["role"] == "assistant":
            self.num_continued += 1
        self.roles.add(example)
        return example


def example_of(number: int, place: str, row: Any) -> Example:
    """Returns the example of a row; ShoalError, naming its place, if the row has no usable
    prompt."""
    if not isinstance(row, Mapping):
        raise ShoalError(
            f"{place} is a {type(row).__name__}: expected a dict with `prompt` and the reward's "
            "columns"
        )
    if "prompt" not in row and "messages" not in row:
        raise ShoalError(
            f"{place} has no `prompt`: its columns are {', '.join(map(str, row)) or 'none'}; "
            "rename the column that holds the text to `prompt`, or the one that holds messages to "
            "`messages`"
        )
    columns = {column: _plain(value) for column, value in row.items() if column != "prompt"}
    if "prompt" in row:
        prompt = row["prompt"]
    else:
        prompt = _without_answer(columns["messages"], place)
    return Example(number, checked_prompt(prompt, place), columns, place)


def _without_answer(messages: Any, place: str) -> list[Any]:
    """Returns the messages without a final message of the assistant. ShoalError if nothing else is
    there."""
    if not isinstance(messages, list):
        raise ShoalError(
            f"{place}: `messages` is a {type(messages).__name__}: expected a list of dicts with "
            "role and content"
        )
    last = messages[-1] if messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ShoalError(
            f"{place}: `messages` holds nothing but an answer: expected a message to answer"
        )
    return messages


def _check_names(example: Example, place: str) -> None:
    """Raises ShoalError if a column's name is not text, or is an argument that reward functions get
    from the run."""
    for column in example.columns:
        if not isinstance(column, str) or column in TAKEN:
            raise ShoalError(
                f"{place}: a column cannot be called {column!r}: expected text, and none of "
                f"{', '.join(TAKEN)}, which reward functions get from the run; rename it"
            )


def _plain(value: Any) -> Any:
    """Returns a table's value in Python's types: arrays become lists, and missing values (NaN, NA,
    NaT) None."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    is_nan = isinstance(value, float) and math.isnan(value)
    is_missing = is_nan or type(value).__name__ in ("NAType", "NaTType")
    return None if is_missing else value


def checked_prompt(prompt: Any, place: str) -> Prompt:
    """Returns a prompt as text or as a list of plain message dicts; ShoalError if it is neither."""
    if hasattr(prompt, "tolist"):  # tables hold lists as arrays
        prompt = prompt.tolist()
    if not (isinstance(prompt, str | list | tuple) and prompt):
        article = "a" if prompt or prompt is None else "an empty"
        raise ShoalError(
            f"{place}: `prompt` is {article} {type(prompt).__name__}: expected text, or messages, "
            "a list of dicts with role and content"
        )
    if isinstance(prompt, str):
        return _checked_text(prompt, place)
    return [_message(number, message, place) for number, message in enumerate(prompt)]


def is_share_gpt(messages: Any) -> bool:
    """True for messages in ShareGPT's form, with `from` and `value` in place of `role` and
    `content`."""
    if not isinstance(messages, list | tuple | np.ndarray) or not len(messages):
        return False
    return isinstance(messages[0], Mapping) and {"from", "value"} <= set(messages[0])


SHARE_GPT_ADVICE = (
    "ShareGPT's `from` and `value` are not read; write messages with `role` (human is user, gpt is "
    "assistant) and `content`"
)


def _message(number: int, message: Any, place: str) -> dict[str, Any]:
    """Returns message `number` of a prompt as a plain dict; ShoalError unless role and content are
    text."""
    role = content = None
    if isinstance(message, Mapping):
        role = message.get("role")
        content = message.get("content")
        if content is None and is_share_gpt([message]):
            raise ShoalError(
                f"{place}: message {number} of `prompt` is {str(message)[:60]!r}: "
                f"{SHARE_GPT_ADVICE}"
            )
        if content is None and message.get("tool_calls"):
            content = ""
    if not (isinstance(role, str) and isinstance(content, str)):
        raise ShoalError(
            f"{place}: message {number} of `prompt` is {str(message)[:60]!r}: expected a dict with "
            "role and content, both text, or with tool_calls"
        )
    content = _checked_text(content, place)
    if role == "system":
        content = sys.intern(str(content))  # one object for all rows, which mostly share it
    return without_none(message) | {"content": content}


def without_none(value: Any) -> Any:
    """Returns a value without the keys whose value is None, at all levels. Tables add such keys to
    a row if other rows have them, for example in a tool's arguments."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple | np.ndarray):
        return [without_none(item) for item in value]
    return value


def _checked_text(text: str, place: str) -> str:
    """Returns the text; ShoalError if it holds half of a surrogate pair."""
    half = "" if text.isascii() else half_character(text)
    if half:
        raise ShoalError(
            f"{place}: `prompt` holds {half}, half of a character that is written as two: write "
            "both halves, or leave it out"
        )
    return text
