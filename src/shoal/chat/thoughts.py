"""Thoughts: what a model writes in a turn before its answer.

Many models write `<think>` and `</think>` themselves, and templates and rewards know these tags.
Others mark thoughts by special tokens, which decoding leaves out, so that thought and answer would
become one text: gpt-oss writes messages in channels (https://cookbook.openai.com/articles/
openai-harmony), Gemma 4 a channel `thought`, Mistral's models [THINK]. Their thoughts get the tags
where ids become text, and lose them where a template has another place for thoughts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shoal.chat.markers import Markers

THOUGHTS: dict[str, dict[str, Any]] = {
    "think": {"open": "<think>", "close": "</think>"},
    "gemma": {
        "tokens": ["<|channel>", "<channel|>"],
        "open_pattern": r"<\|channel>(?:thought\n?)?",
        "close": "<channel|>",
    },
    "mistral": {"tokens": ["[THINK]", "[/THINK]"], "open": "[THINK]", "close": "[/THINK]"},
    # Every message of the model in another channel than `final` and without a recipient: the
    # template has one place for what is said before a call, the channel `analysis`. Tools answer
    # `to=assistant`.
    "harmony": {
        "tokens": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"],
        "open_pattern": r"(?<!to=assistant)<\|channel\|>(?!final\b)\w{1,32}<\|message\|>",
        "close_pattern": r"<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>)",
        "headers": r"<\|start\|>assistant|<\|channel\|>final<\|message\|>",
    },
}
"""How models mark thoughts, in the form of a field of `response_template`. `tokens`: the row counts
if the tokenizer has these as added tokens; `headers`: further marks, which are no part of what the
turn says."""


def thoughts_of(added_tokens: Mapping[int, tuple[str, bool]]) -> dict[str, dict[str, Any]]:
    """Returns the rows of THOUGHTS that a tokenizer with these added tokens (id -> (text, special))
    may write: `think`, whose tags may be plain text, and each whose tokens it has."""
    texts = {text for text, _ in added_tokens.values()}
    return {name: row for name, row in THOUGHTS.items() if texts.issuperset(row.get("tokens", ()))}


def pattern_of(field: Mapping[str, Any], name: str) -> str:
    """Returns the regular expression of a marker of a field, `name` being open, close or
    start_anchor: one that matches the field's literal texts under `name` (a text or a list), else
    its entry such as `open_pattern`; "" if the field has neither."""
    literals = field.get(name, [])
    if isinstance(literals, str):
        literals = [literals]
    longest_first = sorted(literals, key=len, reverse=True)
    pattern = "|".join(re.escape(literal) for literal in longest_first)
    return pattern or field.get(f"{name}_pattern", "")


class ThoughtTags:
    """Writes thoughts that special tokens mark between `<think>` and `</think>`.

    `markers`: of a table that has the rows `thoughts`, from `thoughts_of`. The row `think` needs
    nothing: its tags are text already."""

    def __init__(self, markers: Markers, thoughts: Mapping[str, Mapping[str, Any]]):
        """Compiles the patterns of the rows."""
        self._thoughts: list[re.Pattern[str]] = []
        self._closings: list[re.Pattern[str]] = []
        self._headers: list[re.Pattern[str]] = []
        for row in thoughts.values():
            if "tokens" not in row:
                continue
            opening = markers.in_pattern(pattern_of(row, "open"))
            closing = markers.in_pattern(pattern_of(row, "close"))
            thought = rf"(?:{opening})(?P<body>.*?)(?:(?P<end>{closing})|\Z)"
            self._thoughts.append(re.compile(thought, re.DOTALL))
            if "close" in row:
                self._closings.append(re.compile(closing))
            if "headers" in row:
                self._headers.append(re.compile(markers.in_pattern(row["headers"])))

    def tagged(self, text: str) -> str:
        """Returns a text of a turn, with markers as private characters, in which thoughts have
        tags, and headers and empty thoughts are left out. A thought without an end gets no closing
        tag; one that the prompt has opened gets that alone."""
        for pattern in self._thoughts:
            text = pattern.sub(_with_tags, text)
        for pattern in self._closings:
            text = pattern.sub("\n</think>\n\n", text)
        for pattern in self._headers:
            text = pattern.sub("", text)
        return text


def _with_tags(match: re.Match[str]) -> str:
    """Returns a thought with its tags, from a match with the groups `body` and `end`."""
    body = match["body"]
    if match["end"] is None:
        return f"<think>\n{body}"
    if not body.strip():
        return ""
    return "<think>\n" + body.strip("\n") + "\n</think>\n\n"


_TAG = re.compile("</?think>")


def split_thoughts(content: str) -> tuple[str, str]:
    """Returns (thoughts, answer) of a message's text, without tags: what is before the last
    `</think>`, and what follows it. The first tag may be missing, because a template writes it. A
    text that begins with `<think>` and never closes it is all thoughts; one without tags is all
    answer.

    >>> split_thoughts("<think>\\nWhy?\\n</think>\\n\\nSo.")
    ('Why?', 'So.')
    """
    thoughts, closed, answer = content.rpartition("</think>")
    if not closed and content.lstrip().startswith("<think>"):
        thoughts = content
        answer = ""
    parts = [part.strip() for part in _TAG.split(thoughts)]
    return "\n\n".join(part for part in parts if part), answer.lstrip("\n")
