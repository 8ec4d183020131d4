"""The text of single tokens, by the run's own tokenizer.json; nothing else of a model folder is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.runs.bounded import one_line
from shoal.runs.stored_run import StoredRun

MAX_TOKENIZER_BYTES = 64 << 20
MAX_PENDING = 8
"""Tokens that a single character may consist of, at most."""


class Pieces:
    """Called with token ids, gives each one's text; empty for a part of a character, which its last token has whole.

    An empty list if the run has no tokenizer that can be read."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._tokenizer: Any = None
        self._opened = False

    def __call__(self, ids: Sequence[int]) -> list[str]:
        if not self._opened:
            self._opened, self._tokenizer = True, self._load()
        return self._pieces(list(ids)) if self._tokenizer is not None else []

    def _load(self) -> Any:
        import tokenizers

        path = self._run.file("model", "tokenizer.json")
        if path is None:
            self._run.problem("model/tokenizer.json", "is not there: tokens are shown without their texts")
            return None
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            self._run.problem("model/tokenizer.json", "has more than 64 MiB: it is not read")
            return None
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:  # a panic of the Rust library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._run.problem("model/tokenizer.json", f"cannot be read ({one_line(error)[:120]})")
            return None

    def _pieces(self, ids: list[int]) -> list[str]:
        found, start, read = [], 0, 0
        for place in range(len(ids)):
            before, whole = self._decode(ids[start:read]), self._decode(ids[start:place + 1])
            if whole.endswith("\ufffd") and place - read < MAX_PENDING and place + 1 < len(ids):
                found.append("")
                continue
            found.append(whole[len(before):] if whole.startswith(before) else self._decode(ids[place:place + 1]))
            start, read = read, place + 1
        return found

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        try:
            return self._tokenizer.decode([id for id in ids if id >= 0], skip_special_tokens=False)
        except Exception:  # an id beyond the vocabulary
            return "\ufffd"
