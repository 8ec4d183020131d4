"""The 25 kinds of instruction of IFEval (Zhou et al. 2023, arXiv:2311.07911), each a check of a text.

Written from their definitions, with the habits of the published checkers where these decide: `less than` and `at
least` are the only relations, a language that cannot be detected counts as right, an empty text follows nothing. What
is ours: keywords and markers are taken literally, every check takes time linear in the text, and a text of more than
MAX_CHARACTERS follows nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.tasks.graders.instructions_text import (
    LANGUAGES,
    count_capital_words,
    count_words,
    detect_language,
    sentences,
)
from shoal.text import shorten, suggest

MAX_CHARACTERS = 100_000
RELATIONS = ("less than", "at least")
_NTH = "length_constraints:nth_paragraph_first_word"
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

Reader = Callable[[Any], Any]
"""From what a row holds to what a check takes; raises `ValueError` with what was wanted."""


@dataclass(frozen=True)
class Kind:
    """A kind of instruction: its check, called with the text and the arguments, and how each argument is read."""

    check: Callable[..., bool]
    arguments: Mapping[str, Reader] = field(default_factory=dict)


def follows(text: str, instruction: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a text follows an instruction, by its arguments as `read_arguments` gives them.

    >>> follows("No commas here", "punctuation:no_comma", {})
    True
    """
    return bool(text.strip()) and len(text) <= MAX_CHARACTERS and KINDS[instruction].check(text, **arguments)


def variants(text: str) -> list[str]:
    """What the loose figures try: the text without its first line, its last, both; each also without `*`."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*cut, *(one.replace("*", "") for one in cut)]))


def read_arguments(instruction: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an instruction, those that are None left out. Raises `ValueError` for what it cannot take."""
    if instruction not in KINDS:
        raise ValueError(f"there is no instruction {instruction!r}{suggest(instruction, list(KINDS))}")
    readers = KINDS[instruction].arguments
    there = {name: value for name, value in given.items() if value is not None}
    if unknown := there.keys() - readers.keys():
        raise ValueError(f"{instruction} takes {', '.join(readers) or 'no arguments'}, but there is "
                         f"{', '.join(sorted(unknown))}")
    read = {}
    for name, reader in readers.items():
        if name not in there:
            raise ValueError(f"{instruction} needs {name!r}")
        try:
            read[name] = reader(there[name])
        except ValueError as error:
            raise ValueError(f"{instruction}: {name}={shorten(repr(there[name]))}, expected {error}") from None
    if instruction == _NTH and not 1 <= read["nth_paragraph"] <= read["num_paragraphs"]:
        raise ValueError(f"{instruction}: nth_paragraph={read['nth_paragraph']}, expected 1 to num_paragraphs="
                         f"{read['num_paragraphs']}")
    return read


# ---- arguments


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
        raise ValueError("a whole number, 0 or more")
    return int(value)


def _relation(value: Any) -> str:
    if value not in RELATIONS:
        raise ValueError(" or ".join(map(repr, RELATIONS)))
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("text that is not empty")
    return value.strip()


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError("a list of words that is not empty")
    if not all(isinstance(one, str) and one for one in value):
        raise ValueError("a list of words that is not empty")
    return tuple(value)


def _letter(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a letter or sign")
    return value.strip().lower()


def _language(value: Any) -> str:
    if not isinstance(value, str) or value not in LANGUAGES:
        raise ValueError(f"one of {', '.join(sorted(LANGUAGES))}")
    return value


def _related(count: int, relation: str, wanted: int) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


# ---- keywords


def _existence(text: str, keywords: Sequence[str]) -> bool:
    """Every keyword somewhere, also inside a word, whatever its capitals."""
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _related(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency)


def _forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words as a word of its own."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """How often a letter occurs, whatever its capitals; several letters together are none, and never do."""
    return _related(Counter(text.lower())[letter], let_relation, let_frequency)


# ---- lengths


def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _related(len(sentences(text)), relation, num_sentences)


def _number_words(text: str, num_words: int, relation: str) -> bool:
    return _related(count_words(text), relation, num_words)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Exactly so many between `***`; the first and the last may be empty and do not count then, others may not be."""
    first, *others = (paragraph.strip() for paragraph in text.split("***"))
    last = others.pop() if others else ""
    return all(others) and sum(map(bool, (first, *others, last))) == num_paragraphs


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs between empty lines, and how the nth begins: empty ones are not counted, but keep
    their place."""
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    if sum(map(bool, paragraphs)) != num_paragraphs or not paragraphs[nth_paragraph - 1]:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


# ---- content and format


def _number_placeholders(text: str, num_placeholders: int) -> bool:
    """`[...]` within a line."""
    lines = (line[:line.rfind("]") + 1] for line in text.split("\n"))
    return sum(len(re.findall(r"\[[^\]]*\]", line)) for line in lines) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    """The marker anywhere, whatever its capitals; spaces may stand inside the two usual ones."""
    usual = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    return re.search(usual.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower()) is not None


def _number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Lines that begin with `-` or one `*`; a lone `*` takes the next line into its own."""
    count, lines, i = 0, [line.lstrip() for line in text.split("\n")], 0
    while i < len(lines):
        lone = lines[i] == "*" and i + 1 < len(lines)
        count += lone or (lines[i].startswith("*") and lines[i][1:2] not in ("", "*"))
        i += 2 if lone else 1
    return count + sum(line.startswith("-") for line in lines) == num_bullets


def _constrained_response(text: str) -> bool:
    return any(option in text for option in CONSTRAINED)


def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """`*...*` within a line, and `**...**` once more."""
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(inside.strip()) for inside in (*single, *double)) >= num_highlights


def _multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """The splitter with a number after it, anywhere."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


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
    """A line with `<<...>>` that has something in it, taken from the first `<<` to the last `>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(text: str) -> bool:
    """Two different answers between `******`; only the first and the last part may be empty."""
    first, *others = (response.strip() for response in text.split("******"))
    last = others.pop() if others else ""
    answers = [answer for answer in (first, *others, last) if answer]
    return all(others) and len(answers) == 2 and answers[0] != answers[1]


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.lower())


def _end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.lower())


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _no_comma(text: str) -> bool:
    return "," not in text


# ---- capitals and language


def _english_capital(text: str) -> bool:
    return text.isupper() and detect_language(text) in ("en", None)


def _english_lowercase(text: str) -> bool:
    return text.islower() and detect_language(text) in ("en", None)


def _capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _related(count_capital_words(text), capital_relation, capital_frequency)


def _response_language(text: str, language: str) -> bool:
    return detect_language(text) in (language, None)


KINDS: Mapping[str, Kind] = {
    "keywords:existence": Kind(_existence, {"keywords": _texts}),
    "keywords:frequency": Kind(_frequency, {"keyword": _text, "frequency": _count, "relation": _relation}),
    "keywords:forbidden_words": Kind(_forbidden_words, {"forbidden_words": _texts}),
    "keywords:letter_frequency": Kind(
        _letter_frequency, {"letter": _letter, "let_frequency": _count, "let_relation": _relation}),
    "language:response_language": Kind(_response_language, {"language": _language}),
    "length_constraints:number_sentences": Kind(
        _number_sentences, {"num_sentences": _count, "relation": _relation}),
    "length_constraints:number_paragraphs": Kind(_number_paragraphs, {"num_paragraphs": _count}),
    "length_constraints:number_words": Kind(_number_words, {"num_words": _count, "relation": _relation}),
    _NTH: Kind(_nth_paragraph_first_word, {"num_paragraphs": _count, "nth_paragraph": _count, "first_word": _text}),
    "detectable_content:number_placeholders": Kind(_number_placeholders, {"num_placeholders": _count}),
    "detectable_content:postscript": Kind(_postscript, {"postscript_marker": _text}),
    "detectable_format:number_bullet_lists": Kind(_number_bullet_lists, {"num_bullets": _count}),
    "detectable_format:constrained_response": Kind(_constrained_response),
    "detectable_format:number_highlighted_sections": Kind(
        _number_highlighted_sections, {"num_highlights": _count}),
    "detectable_format:multiple_sections": Kind(
        _multiple_sections, {"section_spliter": _text, "num_sections": _count}),
    "detectable_format:json_format": Kind(_json_format),
    "detectable_format:title": Kind(_title),
    "combination:two_responses": Kind(_two_responses),
    "combination:repeat_prompt": Kind(_repeat_prompt, {"prompt_to_repeat": _text}),
    "startend:end_checker": Kind(_end_checker, {"end_phrase": _text}),
    "startend:quotation": Kind(_quotation),
    "change_case:capital_word_frequency": Kind(
        _capital_word_frequency, {"capital_frequency": _count, "capital_relation": _relation}),
    "change_case:english_capital": Kind(_english_capital),
    "change_case:english_lowercase": Kind(_english_lowercase),
    "punctuation:no_comma": Kind(_no_comma),
}
"""Name in the published rows -> kind."""
