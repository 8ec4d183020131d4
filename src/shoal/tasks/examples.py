"""Makes an `Example` of a data row: checks its prompt, and keeps its other columns.

A row's prompt is its column `prompt` (text, or messages), or its `messages` without a final answer.
All other columns are passed to the reward functions, as in TRL and verl.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from json import JSONEncoder
from typing import Any

import numpy as np

from shoal.records import Example, Prompt, ShoalError
from shoal.tasks.data_files import half_character
from shoal.text import count

TAKEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that reward functions get from the run: no column may have such a name."""


ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages that chat templates write: of OpenAI's API, and Llama's for a tool."""


_INDEX = re.compile(r"__index_level_\d+__")
"""Columns in which pandas stores the index of a table: row numbers, not data."""


_PLAIN = (str, int, bool, type(None))


_ENCODER = JSONEncoder(sort_keys=True, default=str)


class ExampleMaker:
    """Makes an example of each row with `prompt` or `messages`, first of the training rows, then of
    those to evaluate on. Raises ShoalError if a row cannot be used, or has another form of prompt
    than the first row, or other columns than the first row of its split."""

    def __init__(self) -> None:
        self.num_continued = 0  # prompts that end with an assistant's message
        self.roles = UnknownRoles()
        self.from_messages = False
        # Examples with their places: the first of all, which decides the form of prompts, and the
        # first of the split, which decides the columns of its rows.
        self._first: tuple[Example, str] | None = None
        self._first_of_split: tuple[Example, str] | None = None

    def __call__(self, number: int, place: str, row: Any) -> Example:
        """Returns the example of a row. Counts prompts that end with an assistant's message, and
        collects unknown roles. `number` is the row's number in its split, from 0; `place` a text
        like `FILE, line 3`. ShoalError if the row has no usable prompt, or another form of prompt
        (text, messages) than the first row, or other columns than the first of its split."""
        example = example_of(number, place, row)
        if number == 0 or self._first_of_split is None:
            _check_names(example, place)
            self._first_of_split = (example, place)
        if self._first is None:
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
        first, first_place = self._first_of_split
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


class UnknownRoles:
    """Collects roles of messages that are not in ROLES: a chat template writes such a role as it
    is, drops it or fails."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}  # unknown role -> places of the rows that have it

    def add(self, example: Example) -> None:
        """Collects the unknown roles of one example. A role counts once, however many messages of
        the example have it."""
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


def example_of(number: int, place: str, row: Any) -> Example:
    """Returns the example of a row: its prompt is the column `prompt`, else `messages` without a
    final answer; all columns but `prompt` (also `messages`) and pandas' index become the example's
    columns, with their values in Python's types. ShoalError, which names the place, if the row has
    no usable prompt."""
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
    columns = {}
    for column, value in row.items():
        is_index = isinstance(column, str) and _INDEX.fullmatch(column)
        if column != "prompt" and not is_index:
            columns[column] = _plain(value)
    if "prompt" in row:
        prompt = row["prompt"]
    else:
        prompt = _without_answer(columns["messages"], place)
    return Example(number, checked_prompt(prompt, place), columns, place)


def _without_answer(messages: Any, place: str) -> list[Any]:
    """Returns the messages without the last one if that is the assistant's. ShoalError if there are
    no other messages, or if `messages` is no list. `place` names the row. Only one message is left
    out. The list is not changed."""
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


OTHER_INPUTS = ("image", "images", "video", "videos", "audio", "audios")
"""Columns with which data sets give a model something else than text."""


def _check_names(example: Example, place: str) -> None:
    """Raises ShoalError if a column's name is not text, or is an argument that reward functions get
    from the run; also if a column has images, videos or sound for the model."""
    for column in example.columns:
        if not isinstance(column, str) or column in TAKEN:
            raise ShoalError(
                f"{place}: a column cannot be called {column!r}: expected text, and none of "
                f"{', '.join(TAKEN)}, which reward functions get from the run; rename it"
            )
    for column in OTHER_INPUTS:
        if example.columns.get(column):
            raise ShoalError(
                f"{place}: the column {column!r} has a value, and models are trained on text "
                "only: remove the column, or rename it if it is text"
            )


def _plain(value: Any) -> Any:
    """Returns a table's value in Python's types: arrays become lists, and missing values (NaN, NA,
    NaT) None. Dicts and lists are copied; any other object stays as it is."""
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


# ---- prompts


def checked_prompt(prompt: Any, place: str) -> Prompt:
    """Returns a prompt as text, or as a list of message dicts with `role` and `content`. ShoalError
    if it is neither, is empty, or has a message without role or content. `place` names the row in
    messages. Messages count from 0. Which roles they have is not checked."""
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


SHARE_GPT_ADVICE = (
    "ShareGPT's `from` and `value` are not read; write messages with `role` (human is user, gpt is "
    "assistant) and `content`"
)


def is_share_gpt(messages: Any) -> bool:
    """True for messages in ShareGPT's form, with `from` and `value` in place of `role` and
    `content`."""
    if not isinstance(messages, list | tuple | np.ndarray) or not len(messages):
        return False
    return isinstance(messages[0], Mapping) and {"from", "value"} <= set(messages[0])


def _message(number: int, message: Any, place: str) -> dict[str, Any]:
    """Returns message `number` of a prompt as a dict, with all its keys but those whose value is
    None. The content of a message with `tool_calls` may be None, which becomes "". ShoalError
    unless role and content are text. Messages count from 0."""
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
    if isinstance(content, list | tuple | np.ndarray):
        types = sorted({str(part.get("type")) for part in content if isinstance(part, Mapping)})
        others = ", ".join(kind for kind in types if kind != "text")
        if others:
            raise ShoalError(
                f"{place}: message {number} of `prompt` has content of type {others}, and models "
                "are trained on text only: leave such rows out"
            )
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
    a row if other rows have them, for example in a tool's arguments. Tuples and arrays become
    lists; a None in a list stays."""
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


# ---- comparing examples


def has_answer(example: Example) -> bool:
    """True if an example's column `answer` is not None."""
    return example.columns["answer"] is not None


def prompt_key(example: Example) -> str:
    """Returns a text that is equal for two examples if and only if their prompts are equal."""
    return example.prompt if isinstance(example.prompt, str) else _ENCODER.encode(example.prompt)
