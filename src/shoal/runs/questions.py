"""Finds the example of a question that was asked elsewhere, by its text or its conversation."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal.report.console import Console
from shoal.text import count
from shoal.types import Example, ground_truth

Key: TypeAlias = "tuple[Any, ...]"
"""What a question is looked up by."""

_LAST = object()
"""Starts the key of a conversation's last message, so that it differs from a question of that text."""
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "−": "-"})


@dataclass(frozen=True)
class Question:
    """A question as asked elsewhere: text, or a conversation whose last message is `text`."""

    text: str
    messages: tuple[tuple[str, str], ...] = ()  # role and normalized content

    @classmethod
    def of(cls, value: Any) -> Question:
        """From a row's text or list of messages; TypeError for anything else."""
        if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
            text, messages = value[-1].get("content"), _conversation(value)
        else:
            text, messages = value, ()
        if not isinstance(text, str):
            raise TypeError(type(text))
        return cls(text, messages)

    def lookup_keys(self) -> list[Key]:
        """The keys to look it up by, in order: text as a question or as a conversation's last message; a conversation
        by all its messages, by those but the system's, by its last."""
        if not self.messages:
            text = normalized(self.text)
            return [(text,), (_LAST, text)]
        turns = _turns(self.messages)
        return [self.messages, turns, turns[-1:]]


def example_keys(example: Example, column: str) -> list[Key]:
    """The keys that an example is found by, the counterpart of `Question.lookup_keys`."""
    own, prompt = example.columns.get(column), example.prompt
    if isinstance(own, str):
        return [(normalized(own),)]
    if isinstance(prompt, str):
        return [(normalized(prompt),)]
    messages = _conversation(prompt)
    turns = _turns(messages)
    return [messages, turns, *([(_LAST, turns[-1])] if len(turns) > 1 else [])]


def _conversation(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((str(message.get("role", "")), normalized(str(message.get("content") or ""))) for message in messages)


def _turns(messages: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The contents of all messages but the system's."""
    return tuple(content for role, content in messages if role != "system") or ("",)


def normalized(question: str) -> str:
    """A question with one form for equivalent characters, quotes and white space.

    >>> normalized("Janet\\u2019s\\u00a0 eggs?\\n")
    "Janet's eggs?"
    """
    return " ".join(unicodedata.normalize("NFKC", question).translate(_QUOTES).split())


def find_examples(questions: Mapping[int, tuple[str, Question]], splits: Mapping[str, Sequence[Example]], column: str,
                  console: Console) -> dict[int, Example]:
    """The example of each question (number -> its place in a file, the question), by its first key that any split has.

    Warns of questions that match several examples with different ground truth; the first is taken."""
    wanted = {key for _, question in questions.values() for key in question.lookup_keys()}

    @functools.cache
    def index(split: str) -> dict[Key, list[Example]]:
        found: dict[Key, list[Example]] = {}
        for example in splits[split]:
            for key in example_keys(example, column):
                if key in wanted:
                    found.setdefault(key, []).append(example)
        return found

    examples: dict[int, Example] = {}
    rows: dict[str, set[int]] = {split: set() for split in splits}
    ambiguous: dict[Key, str] = {}  # -> the place of the first such question
    for number, (place, question) in questions.items():
        matches = ((key, split, index(split)[key]) for key in question.lookup_keys() for split in splits
                   if key in index(split))
        key, split, matching = next(matches, ((), "", []))
        if matching:
            examples[number] = matching[0]
            rows[split].add(matching[0].row)
            if len(set(map(_gold_text, matching))) > 1:
                ambiguous.setdefault(key, place)
    for split, found in rows.items():
        if found:
            console.note(f"{len(found)} of {len(splits[split])} {split} questions are answered")
    if ambiguous:
        matches = "matches" if len(ambiguous) == 1 else "match"
        console.warning(f"{count(len(ambiguous), 'question')} {matches} several rows of the data with different ground "
                        f"truth, and the first row is used; the first such question, {next(iter(ambiguous.values()))}")
    return examples


def _gold_text(example: Example) -> str:
    gold = ground_truth(example.columns)
    return repr(example.columns if gold is None else gold)


def question_text(example: Example, column: str) -> str:
    """The question of an example as published: its column of that name, else the last message, else the prompt."""
    own = example.columns.get(column)
    if isinstance(own, str):
        return own
    return example.prompt if isinstance(example.prompt, str) else str(example.prompt[-1].get("content", ""))
