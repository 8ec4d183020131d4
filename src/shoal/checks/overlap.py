"""Counts the questions of an evaluation that training data holds too: those with 13 words in a row
that a training row also has (Brown et al. 2020, arXiv:2005.14165, appendix C)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.records import Example
from shoal.text import count, shorten

NUM_WORDS = 13
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Overlap:
    """How many questions have words in a row that training data has too."""

    num_questions: int
    num_shared: int = 0  # questions with NUM_WORDS words in a row, or, if shorter, as a whole
    num_whole: int = 0  # those of them all of whose words were found so
    question: str = ""  # the first of them, and the training row that has its words
    place: str = ""

    def warning(self, name: str, model: str) -> str:
        """Returns the warning for the set of questions `name`, on which the model is evaluated; ""
        if no question is shared."""
        if not self.num_shared:
            return ""
        share = "shares" if self.num_shared == 1 else "share"
        return (
            f"{name}: {self.num_shared} of {count(self.num_questions, 'question')} {share} "
            f"{NUM_WORDS} consecutive words with the training data of {model}, "
            f"{self.num_whole} of them completely, so figures on them say little; the first is "
            f"{shorten(self.question, 60)!r}, in {self.place}"
        )


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case; numbers are words.

    >>> words_of("Find $x^2$, or 10.")
    ['find', 'x', '2', 'or', '10']
    """
    return _WORD.findall(text.lower())


def find_overlap(questions: Sequence[str], rows: Iterable[Example]) -> Overlap:
    """Counts the questions that share words in a row with the prompts or columns of training rows.
    Words that several different questions have, such as instructions, do not count. Questions of
    the same words are one question, counted as often as it is asked."""
    times: Counter[tuple[str, ...]] = Counter()  # the words of a question -> how often it is asked
    texts: dict[tuple[str, ...], str] = {}  # its words -> its text
    for question in questions:
        words_of_question = tuple(words_of(question))
        times[words_of_question] += 1
        texts.setdefault(words_of_question, question)
    different = list(texts)
    grams_of: list[set[int]] = []
    owners: dict[int, int] = {}  # the hash of words in a row -> the number of their question
    starts: set[str] = set()  # the first words of these
    repeated: set[int] = set()
    for number, words in enumerate(different):
        grams = set(_grams(words))
        grams_of.append(grams)
        starts.update(words)
        for gram in grams:
            if owners.setdefault(gram, number) != number:
                repeated.add(gram)
    for gram in repeated:
        del owners[gram]
    found: dict[int, set[int]] = {}
    places: dict[int, str] = {}
    for row in rows:
        for text in set(_texts_of(row)):
            for gram in _grams(words_of(text), starts):
                owner = owners.get(gram)
                if owner is not None:
                    found.setdefault(owner, set()).add(gram)
                    places.setdefault(owner, row.place or f"training row {row.row}")
    if not found:
        return Overlap(len(questions))
    num_shared = num_whole = 0
    for number, grams in found.items():
        num_shared += times[different[number]]
        if grams == grams_of[number] - repeated:
            num_whole += times[different[number]]
    first = min(found)
    return Overlap(len(questions), num_shared, num_whole, texts[different[first]], places[first])


def _grams(words: Sequence[str], starts: set[str] | None = None) -> Iterator[int]:
    """Yields a hash of each NUM_WORDS words in a row, or of all words if there are fewer. `starts`:
    only of those whose first word is one of these."""
    for begin in range(max(1, len(words) - NUM_WORDS + 1)):
        if words and (starts is None or words[begin] in starts):
            yield hash(tuple(words[begin : begin + NUM_WORDS]))


def _texts_of(value: Any) -> Iterator[str]:
    """Yields all texts in a row: those of its prompt and of its columns, at any depth."""
    if isinstance(value, Example):
        yield from _texts_of(value.prompt)
        yield from _texts_of(value.columns)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_of(item)
