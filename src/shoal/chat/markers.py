"""Markers: added tokens that patterns name, such as `<tool_call>`, found in a text by their ids.

Patterns search a text in which each marker is replaced by a *private character*, which no other
token decodes to: the same text in other tokens never matches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PRIVATE = re.compile("[\U000f0000-\U000f0fff]")


class Markers:
    """The markers of one tokenizer that a table of patterns names.

    >>> markers = Markers(tokenizer.added_tokens(), tokenizer.decode, {"open": "<tool_call>"})
    >>> text = markers.text(ids)  # the marker is one private character in it
    >>> re.search(markers.in_pattern("<tool_call>"), text)
    """

    def __init__(
        self,
        added_tokens: Mapping[int, tuple[str, bool]],
        decode: Callable[[Sequence[int]], str],
        table: Any,
    ):
        """Assigns a private character to each added token whose text occurs in `table`: patterns
        and literal texts in JSON's types, which are not checked here. `added_tokens`: id -> (text,
        True for a special one), as `Tokenizer.added_tokens` returns them. `decode`: ids -> text
        without special tokens."""
        self._decode_ids = decode
        # JSON's escapes and those of regular expressions are undone, to find tokens in patterns.
        used = json.dumps(table, ensure_ascii=False).replace("\\\\", "").replace('\\"', '"')
        markers = []
        for token_id, (token, is_special) in added_tokens.items():
            if token in used:
                markers.append((token, token_id, is_special))
        # The longest first, since markers are replaced in this order.
        markers.sort(key=lambda marker: -len(marker[0]))
        self._char_of_token: dict[str, str] = {}
        self._token_of_char: dict[str, str] = {}
        self._char_of_id: dict[int, str] = {}
        self._decoded: dict[str, str] = {}  # character -> its text where special tokens are skipped
        for marker_index, (token, token_id, is_special) in enumerate(markers):
            char = chr(0xF0000 + marker_index)  # of Unicode's plane for private use, see _PRIVATE
            self._char_of_token[token] = char
            self._token_of_char[char] = token
            self._char_of_id[token_id] = char
            self._decoded[char] = "" if is_special else token

    def in_pattern(self, pattern: str) -> str:
        """Returns a regular expression with its markers, escaped or not, replaced by their private
        characters."""
        for token, char in self._char_of_token.items():
            pattern = pattern.replace(token, char).replace(re.escape(token), char)
        return pattern

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, with markers as private characters and without other special
        tokens."""
        parts = []
        start = 0
        for position, token_id in enumerate(ids):
            if token_id in self._char_of_id:
                parts.append(self._decode(ids[start:position]))
                parts.append(self._char_of_id[token_id])
                start = position + 1
        parts.append(self._decode(ids[start:]))
        return "".join(parts)

    def _decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, in which stray private characters are replaced."""
        return _PRIVATE.sub("\ufffd", self._decode_ids(ids))

    def spelled(self, text: str) -> str:
        """Returns a text with its private characters replaced by the texts of their tokens."""
        return _PRIVATE.sub(lambda match: self._token_of_char[match[0]], text)

    def decoded(self, text: str) -> str:
        """Returns a text with its private characters replaced by what decoding makes of their
        tokens: nothing for special ones."""
        return _PRIVATE.sub(lambda match: self._decoded[match[0]], text)
