"""Reads a growing file of JSON lines a piece at a time: only what is new, never more than a limit at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from shoal.runs.bounded import bounded_json
from shoal.runs.stored_run import StoredRun

PIECE_BYTES, MAX_LINE_BYTES, MAX_FILE_BYTES = 4 << 20, 1 << 20, 2 << 30


class GrowingLines:
    """The objects of one file in order. A torn last line is left for the next reading; one that is no JSON object is
    passed over and reported. A file that was replaced by another, as a resumed run does, is read anew."""

    def __init__(self, run: StoredRun, name: str) -> None:
        self._run, self._name = run, name
        self._inode, self._offset, self._rest, self._skipping = -1, 0, b"", False
        self.complete = False  # everything that was there at the last reading has been read

    def new(self, seconds: float) -> tuple[bool, Iterator[dict[str, Any]]]:
        """Whether the file is another than before, and its new objects, as many as can be read in so many seconds."""
        path = self._run.file(self._name)
        if path is None:
            restarted, self._inode, self._offset = self._inode >= 0, -1, 0
            self.complete = True
            return restarted, iter(())
        stat = path.stat()
        restarted = stat.st_ino != self._inode or stat.st_size < self._offset
        if restarted:
            self._inode, self._offset, self._rest, self._skipping = stat.st_ino, 0, b"", False
        return restarted, self._objects(path, time.monotonic() + seconds)

    def _objects(self, path: Any, until: float) -> Iterator[dict[str, Any]]:
        try:
            with path.open("rb") as file:
                file.seek(self._offset)
                while self._offset < MAX_FILE_BYTES:
                    piece = file.read(PIECE_BYTES)
                    self._offset += len(piece)
                    self.complete = len(piece) < PIECE_BYTES
                    *lines, self._rest = (self._rest + piece).split(b"\n")
                    yield from self._parsed(lines)
                    if len(self._rest) > MAX_LINE_BYTES:
                        self._problem("has a line of more than 1 MiB, which is passed over")
                        self._rest, self._skipping = b"", True
                    if self.complete or time.monotonic() > until:
                        return
                self.complete = True
                if os.stat(path).st_size > MAX_FILE_BYTES:
                    self._problem(f"has more than {MAX_FILE_BYTES >> 30} GiB: only its beginning is shown")
        except OSError as error:
            self.complete = True
            self._problem(f"cannot be read ({error.strerror})")

    def _parsed(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            if self._skipping:  # the end of a line that was too long
                self._skipping = False
                continue
            if not line.strip():
                continue
            try:
                found = bounded_json(line)
            except ValueError:
                found = None
            if isinstance(found, dict):
                yield found
            else:
                self._problem("has a line that is no JSON object; it is passed over")

    def _problem(self, text: str) -> None:
        self._run.problem(self._name, text)
