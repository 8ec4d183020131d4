"""The 25 kinds of instruction of IFEval (Zhou et al. 2023, arXiv:2311.07911), each a check of a
text.

Written from their definitions, with the habits of the published checkers where these decide: `less
than` and `at least` are the only relations, a language that cannot be detected counts as right, an
empty text follows nothing. Ours differ in three ways: keywords and markers are taken literally,
every check takes time linear in the text, and a text of more than MAX_CHARACTERS follows nothing.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.tasks.graders.instructions_text import (
    LANGUAGES,
    count_capital_words,
    count_words,
    detect_language,
    sentences,
)
from shoal.text import did_you_mean, shorten

MAX_CHARACTERS = 100_000


def follows(text: str, instruction: str, arguments: Mapping[str, Any]) -> bool:
    """True if a text follows an instruction, by its arguments as `read_arguments` gives them.

    >>> follows("No commas here", "punctuation:no_comma", {})
    True
    """
    return (
        bool(text.strip()) and len(text) <= MAX_CHARACTERS and KINDS[instruction](text, **arguments)
    )


def variants(text: str) -> list[str]:
    """What the loose figures try: the text without its first line, its last, both; each also
    without `*`."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*cut, *(one.replace("*", "") for one in cut)]))


# ---- arguments


def read_arguments(instruction: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an instruction, those that are None left out. Raises ValueError for wrong
    ones."""
    if instruction not in KINDS:
        raise ValueError(
            "there is no instruction "
            f"{instruction!r}{did_you_mean(instruction, KINDS, lists_all=True)}"
        )
    names = [*inspect.signature(KINDS[instruction]).parameters][1:]
    given = {name: value for name, value in given.items() if value is not None}
    if unknown := given.keys() - set(names):
        raise ValueError(
            f"{instruction} takes {', '.join(names) or 'no arguments'}, but there is "
            f"{', '.join(sorted(unknown))}"
        )
    read = {}
    for name in names:
        if name not in given:
            raise ValueError(f"{instruction} needs {name!r}")
        expected, reader = next(kind for ends, kind in READERS.items() if name.endswith(ends))
        read[name] = reader(given[name])
        if read[name] is None:
            raise ValueError(
                f"{instruction}: {name}={shorten(repr(given[name]))}, expected {expected}"
            )
    if "nth_paragraph" in read and not 1 <= read["nth_paragraph"] <= read["num_paragraphs"]:
        raise ValueError(
            f"{instruction}: nth_paragraph={read['nth_paragraph']}, expected 1 to num_paragraphs="
            f"{read['num_paragraphs']}"
        )
    return read


def _whole_number(value: Any) -> int | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and value >= 0 and value == value // 1 else None


def _stripped(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _words(value: Any) -> tuple[str, ...] | None:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return tuple(value) if is_list and all(isinstance(one, str) and one for one in value) else None


READERS: Mapping[str | tuple[str, ...], tuple[str, Callable[[Any], Any]]] = {
    ("keywords", "forbidden_words"): ("a list of words that is not empty", _words),
    "relation": (
        "'less than' or 'at least'",
        lambda value: value if value in ("less than", "at least") else None,
    ),
    "language": (
        f"one of {', '.join(sorted(LANGUAGES))}",
        lambda value: value if isinstance(value, str) and value in LANGUAGES else None,
    ),
    "letter": ("a letter or sign", lambda value: (_stripped(value) or "").lower() or None),
    ("keyword", "first_word", "marker", "spliter", "to_repeat", "phrase"): (
        "text that is not empty",
        _stripped,
    ),
    "": ("a whole number, 0 or more", _whole_number),
}
"""By how an argument's name ends: what is expected of it, and what reads it (None: it is something
else)."""


# ---- checks


def _related(count: int, relation: str, wanted: int) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


def _found(literal: str, text: str) -> list[str]:
    return re.findall(re.escape(literal), text, re.IGNORECASE)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Exactly so many between `***`; the first and the last may be empty and do not count then,
    others may not be."""
    first, *others = (paragraph.strip() for paragraph in text.split("***"))
    last = others.pop() if others else ""
    return all(others) and sum(map(bool, (first, *others, last))) == num_paragraphs


def _nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Exactly so many paragraphs between empty lines, and how the nth begins: empty ones are not
    counted, but keep their place."""
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    if sum(map(bool, paragraphs)) != num_paragraphs or not paragraphs[nth_paragraph - 1]:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _number_placeholders(text: str, num_placeholders: int) -> bool:
    """`[...]` within a line."""
    lines = (line[: line.rfind("]") + 1] for line in text.split("\n"))
    return sum(len(re.findall(r"\[[^\]]*\]", line)) for line in lines) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    """The marker anywhere, whatever its capitals; spaces may stand inside the two usual ones."""
    usual = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    return (
        re.search(usual.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower())
        is not None
    )


def _number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Lines that begin with `-` or one `*`; a lone `*` takes the next line into its own."""
    count, lines, i = 0, [line.lstrip() for line in text.split("\n")], 0
    while i < len(lines):
        lone = lines[i] == "*" and i + 1 < len(lines)
        count += lone or (lines[i].startswith("*") and lines[i][1:2] not in ("", "*"))
        i += 2 if lone else 1
    return count + sum(line.startswith("-") for line in lines) == num_bullets


def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """`*...*` within a line, and `**...**` once more."""
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(inside.strip()) for inside in (*single, *double)) >= num_highlights


def _json_format(text: str) -> bool:
    """JSON of any kind, alone or between Markdown's fences."""
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    """A line with `<<...>>` that has something in it, taken from the first `<<` to the last
    `>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(text: str) -> bool:
    """Two different answers between `******`; only the first and the last part may be empty."""
    first, *others = (response.strip() for response in text.split("******"))
    last = others.pop() if others else ""
    answers = [answer for answer in (first, *others, last) if answer]
    return all(others) and len(answers) == 2 and answers[0] != answers[1]


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


KINDS: Mapping[str, Callable[..., bool]] = {
    # Every keyword anywhere, also inside a word.
    "keywords:existence": lambda text, keywords: all(_found(word, text) for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _related(
        len(_found(keyword, text)), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(
            re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words
        )
    ),
    # Several letters together are no letter, and never occur.
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _related(
        Counter(text.lower())[letter], let_relation, let_frequency
    ),
    "language:response_language": lambda text, language: detect_language(text) in (language, None),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _related(
        len(sentences(text)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: _related(
        count_words(text), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullet_lists,
    "detectable_format:constrained_response": lambda text: any(
        f"My answer is {answer}." in text for answer in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": _number_highlighted_sections,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.lower())
    ),
    "startend:quotation": _is_quoted,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: (
        _related(count_capital_words(text), capital_relation, capital_frequency)
    ),
    "change_case:english_capital": lambda text: (
        text.isupper() and detect_language(text) in ("en", None)
    ),
    "change_case:english_lowercase": lambda text: (
        text.islower() and detect_language(text) in ("en", None)
    ),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""Name in the published rows -> check, called with the text and the arguments that it names."""
