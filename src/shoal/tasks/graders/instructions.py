"""The 25 kinds of instruction of IFEval (Zhou et al. 2023, arXiv:2311.07911), each as a check of a
text.

Written from their definitions, with the habits of the published checkers where these matter: `less
than` and `at least` are the only relations, a language that cannot be detected counts as right, an
empty text follows nothing. These checks differ in three ways: keywords and markers are taken
literally, every check takes time linear in the text's length, and a text of more than
MAX_CHARACTERS follows nothing.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}
"""Instruction's name in the published rows -> its check, which is called with the text and with the
arguments that its signature names."""


def follows(text: str, instruction: str, arguments: Mapping[str, Any]) -> bool:
    """True if a text follows an instruction, `CHECKS`' name of it, with the arguments that
    `read_arguments` returned. An empty text, and one over MAX_CHARACTERS, follows none. KeyError
    for an unknown instruction.

    >>> follows("No commas here", "punctuation:no_comma", {})
    True
    """
    if not text.strip() or len(text) > MAX_CHARACTERS:
        return False
    return CHECKS[instruction](text, **arguments)


def variants(text: str) -> list[str]:
    """Returns the texts of which one must follow an instruction for IFEval's loose accuracy: the
    text itself, without its first line, without its last line, without both, and each of these
    without `*`. Texts without a line are stripped. The text itself comes first; equal texts occur
    once."""
    lines = text.split("\n")
    shortened = [text]
    for kept_lines in (lines[1:], lines[:-1], lines[1:-1]):
        shortened.append("\n".join(kept_lines).strip())
    without_stars = [variant.replace("*", "") for variant in shortened]
    return list(dict.fromkeys(shortened + without_stars))


# ---- arguments


@dataclass(frozen=True)
class ArgumentKind:
    """How arguments are read whose names end in one of `endings`."""

    endings: tuple[str, ...]
    expected: str
    read: Callable[[Any], Any]
    """Returns the value as the checks take it; None if it is not what is expected."""


def read_arguments(instruction: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an instruction, from a row's `kwargs`, as its check takes them.
    Arguments that are None in the row are left out. ValueError for an unknown instruction, and for
    missing, unknown or wrong arguments. The arguments are in the order of the check's
    parameters."""
    if instruction not in CHECKS:
        near = did_you_mean(instruction, CHECKS, lists_all=True)
        raise ValueError(f"there is no instruction {instruction!r}{near}")
    parameters = list(inspect.signature(CHECKS[instruction]).parameters)
    names = parameters[1:]  # behind the text
    given = {name: value for name, value in given.items() if value is not None}
    unknown = given.keys() - set(names)
    if unknown:
        raise ValueError(
            f"{instruction} takes {', '.join(names) or 'no arguments'}, but there is "
            f"{', '.join(sorted(unknown))}"
        )
    arguments = {}
    for name in names:
        if name not in given:
            raise ValueError(f"{instruction} needs {name!r}")
        kind = _kind_of_argument(name)
        value = kind.read(given[name])
        if value is None:
            raise ValueError(
                f"{instruction}: {name}={shorten(repr(given[name]))}, expected {kind.expected}"
            )
        arguments[name] = value
    # The one instruction whose arguments depend on each other.
    if "nth_paragraph" in arguments:
        nth, number = arguments["nth_paragraph"], arguments["num_paragraphs"]
        if not 1 <= nth <= number:
            raise ValueError(
                f"{instruction}: nth_paragraph={nth}, expected 1 to num_paragraphs={number}"
            )
    return arguments


def _kind_of_argument(name: str) -> ArgumentKind:
    """Returns the first of ARGUMENT_KINDS whose endings the name of an argument has, else
    WHOLE_NUMBER."""
    for kind in ARGUMENT_KINDS:
        if name.endswith(kind.endings):
            return kind
    return WHOLE_NUMBER


def _read_words(value: Any) -> tuple[str, ...] | None:
    """Returns a list of words as a tuple; None if the value is not a list of texts, if it is empty,
    or if a word is."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return None
    for word in value:
        if not isinstance(word, str) or not word:
            return None
    return tuple(value)


def _read_relation(value: Any) -> str | None:
    return value if value in ("less than", "at least") else None


def _read_language(value: Any) -> str | None:
    return value if isinstance(value, str) and value in LANGUAGES else None


def _read_text(value: Any) -> str | None:
    """Returns a text without spaces around it; None if the value is no text or has nothing else."""
    if not isinstance(value, str):
        return None
    return value.strip() or None


def _read_letter(value: Any) -> str | None:
    text = _read_text(value)
    return None if text is None else text.lower()


def _read_whole_number(value: Any) -> int | None:
    """Returns a number that is whole and not negative as an int, also `3.0`; None for anything
    else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    is_whole = value >= 0 and value == value // 1
    return int(value) if is_whole else None


ARGUMENT_KINDS = (
    ArgumentKind(("keywords", "forbidden_words"), "a list of words that is not empty", _read_words),
    ArgumentKind(("relation",), "'less than' or 'at least'", _read_relation),
    ArgumentKind(("language",), f"one of {', '.join(sorted(LANGUAGES))}", _read_language),
    ArgumentKind(("letter",), "a letter or sign", _read_letter),
    ArgumentKind(
        ("keyword", "first_word", "marker", "spliter", "to_repeat", "phrase"),
        "text that is not empty",
        _read_text,
    ),
)
WHOLE_NUMBER = ArgumentKind((), "a whole number, 0 or more", _read_whole_number)
"""How all other arguments are read."""


# ---- checks


def _check(instruction: str) -> Callable[[Check], Check]:
    """Returns a decorator that adds a function to CHECKS, as the check of an instruction, and
    returns the function unchanged. After the text, the function's parameters have the names of the
    arguments in the published rows."""

    def register(check: Check) -> Check:
        CHECKS[instruction] = check
        return check

    return register


def _is_related(count: int, relation: str, wanted: int) -> bool:
    """True if `count` is less than `wanted`, or with any other relation at least `wanted`."""
    return count < wanted if relation == "less than" else count >= wanted


def _occurrences(literal: str, text: str) -> list[str]:
    """Returns all occurrences of a literal text, in any case, also inside of words. They do not
    overlap."""
    return re.findall(re.escape(literal), text, re.IGNORECASE)


def _is_in_language(text: str, language: str) -> bool:
    """True if a text is in a language, or if its language cannot be detected. `language` is a code
    of LANGUAGES."""
    return detect_language(text) in (language, None)


@_check("keywords:existence")
def _has_keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(_occurrences(keyword, text) for keyword in keywords)


@_check("keywords:frequency")
def _has_keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _is_related(len(_occurrences(keyword, text)), relation, frequency)


@_check("keywords:forbidden_words")
def _has_no_forbidden_word(text: str, forbidden_words: Sequence[str]) -> bool:
    """True if none of the words occurs as a whole word, in any case."""
    for word in forbidden_words:
        if re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE):
            return False
    return True


@_check("keywords:letter_frequency")
def _has_letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """True if a letter occurs, in any case, less often than `let_frequency` or at least so often. A
    `letter` of several letters never occurs."""
    return _is_related(Counter(text.lower())[letter], let_relation, let_frequency)


@_check("language:response_language")
def _is_in_response_language(text: str, language: str) -> bool:
    return _is_in_language(text, language)


@_check("length_constraints:number_sentences")
def _has_number_of_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _is_related(len(sentences(text)), relation, num_sentences)


@_check("length_constraints:number_paragraphs")
def _has_number_of_paragraphs(text: str, num_paragraphs: int) -> bool:
    """True if `***` separates exactly `num_paragraphs` paragraphs. The text may begin and end with
    `***`; no other paragraph may be empty."""
    parts = _parts_between(text, "***")
    return parts is not None and len(parts) == num_paragraphs


def _parts_between(text: str, separator: str) -> list[str] | None:
    """Returns the non-empty parts of a text between separators, stripped. None if a part that is
    neither the first nor the last is empty."""
    parts = [part.strip() for part in text.split(separator)]
    if not all(parts[1:-1]):
        return None
    return [part for part in parts if part]


@_check("length_constraints:number_words")
def _has_number_of_words(text: str, num_words: int, relation: str) -> bool:
    return _is_related(count_words(text), relation, num_words)


@_check("length_constraints:nth_paragraph_first_word")
def _begins_nth_paragraph_with(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """True if the text has exactly `num_paragraphs` non-empty paragraphs, separated by `\\n\\n`,
    and paragraph `nth_paragraph` begins with `first_word`, in any case. For `nth_paragraph` empty
    paragraphs are counted too, as in IFEval's own check. Quotes before the word are dropped; a
    quote or one of `.,?!` ends it."""
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    num_filled = sum(bool(paragraph) for paragraph in paragraphs)
    if num_filled != num_paragraphs:
        return False
    paragraph = paragraphs[nth_paragraph - 1]
    if not paragraph:
        return False
    word = paragraph.split()[0].lstrip("'").lstrip('"')
    word = re.split(r"[.,?!'\"]", word)[0]
    return word.lower() == first_word.lower()


@_check("detectable_content:number_placeholders")
def _has_placeholders(text: str, num_placeholders: int) -> bool:
    """True if there are at least `num_placeholders` occurrences of `[...]` within a line; `[]` is
    one too."""
    count = 0
    for line in text.split("\n"):
        # Without this a line of many `[` and no `]` would take quadratic time.
        up_to_last_bracket = line[: line.rfind("]") + 1]
        count += len(re.findall(r"\[[^\]]*\]", up_to_last_bracket))
    return count >= num_placeholders


@_check("detectable_content:postscript")
def _has_postscript(text: str, postscript_marker: str) -> bool:
    """True if the marker occurs anywhere, in any case. `P.S.` and `P.P.S` may have spaces after
    their periods."""
    usual = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    pattern = usual.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(pattern, text.lower()) is not None


@_check("detectable_format:number_bullet_lists")
def _has_number_of_bullets(text: str, num_bullets: int) -> bool:
    """True if exactly `num_bullets` lines, without their indents, begin with `-` or with a single
    `*`. A line `*` is one bullet together with the next line."""
    lines = [line.lstrip() for line in text.split("\n")]
    count = sum(line.startswith("-") for line in lines)
    i = 0
    while i < len(lines):
        line = lines[i]
        is_lone_star = line == "*" and i + 1 < len(lines)
        begins_with_one_star = line.startswith("*") and line[1:2] not in ("", "*")
        if is_lone_star or begins_with_one_star:
            count += 1
        i += 2 if is_lone_star else 1
    return count == num_bullets


@_check("detectable_format:constrained_response")
def _is_constrained_response(text: str) -> bool:
    return any(f"My answer is {answer}." in text for answer in ("yes", "no", "maybe"))


@_check("detectable_format:number_highlighted_sections")
def _has_highlights(text: str, num_highlights: int) -> bool:
    """True if there are at least `num_highlights` occurrences of `*...*` within a line and of
    `**...**`, with more than spaces inside."""
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    count = sum(bool(inside.strip()) for inside in single + double)
    return count >= num_highlights


@_check("detectable_format:multiple_sections")
def _has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """True if at least `num_sections` headings occur, such as `Section 1` for the `section_spliter`
    `Section`. A heading is this word and digits, with at most one space between, anywhere in the
    text."""
    heads = re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)
    return len(heads) >= num_sections


@_check("detectable_format:json_format")
def _is_json(text: str) -> bool:
    """True if the text is valid JSON of any kind, alone or between Markdown's fences."""
    text = text.strip()
    # A text has one of these; the longer ones come first.
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@_check("detectable_format:title")
def _has_title(text: str) -> bool:
    """True if a line has a title `<<...>>` that is not empty, between its first `<<` and last
    `>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        # Both are there, and at least one character is between.
        if 0 <= start < end - 2:
            title = line[start : end + 2].lstrip("<").rstrip(">")
            if title.strip():
                return True
    return False


@_check("combination:two_responses")
def _has_two_responses(text: str) -> bool:
    """True if `******` separates exactly two different answers. The text may begin and end with
    `******`."""
    answers = _parts_between(text, "******")
    return answers is not None and len(answers) == 2 and answers[0] != answers[1]


@_check("combination:repeat_prompt")
def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.lower())


@_check("startend:end_checker")
def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.lower())


@_check("startend:quotation")
def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@_check("change_case:capital_word_frequency")
def _has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _is_related(count_capital_words(text), capital_relation, capital_frequency)


@_check("change_case:english_capital")
def _is_english_in_capitals(text: str) -> bool:
    return text.isupper() and _is_in_language(text, "en")


@_check("change_case:english_lowercase")
def _is_english_in_small_letters(text: str) -> bool:
    return text.islower() and _is_in_language(text, "en")


@_check("punctuation:no_comma")
def _has_no_comma(text: str) -> bool:
    return "," not in text
