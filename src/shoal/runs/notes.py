"""What people write about a run, a note and tags, in `notes.json` in the run's folder:

    {"notes": "warm-up of 1 step, like the paper", "tags": ["baseline", "warm-up"]}

The fields are those of Weights & Biases. A run writes its keys `notes` and `tags` there when it
starts, or is resumed with others. The page of `shoal view` changes the file at any time, and people
may do so in an editor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.files import explain_write_errors
from shoal.records import ShoalError
from shoal.runs.lines import write_atomically
from shoal.text import one_line, shorten

NOTES = "notes.json"

MAX_NOTE_CHARS, MAX_TAGS, MAX_TAG_CHARS = 20_000, 32, 64
"""The most characters of a note, tags of a run, and characters of a tag."""


@dataclass(frozen=True)
class RunNotes:
    """The note on a run, in plain text, and its tags, which are words without spaces and commas.
    "" and () if nobody wrote any.

    >>> RunNotes.parse({"notes": "as in the paper", "tags": ["baseline"]})
    RunNotes(notes='as in the paper', tags=('baseline',))
    """

    notes: str = ""
    tags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, record: Any) -> RunNotes:
        """Makes the notes from the content of `notes.json`. White space around the note is removed,
        and so are tags that are named twice. ValueError, which says what is wrong, if the record
        has other types, a tag that is not a single word, or more than fits."""
        if not isinstance(record, Mapping):
            raise ValueError("expected an object with `notes` and `tags`")
        notes = record.get("notes", "")
        tags = record.get("tags", [])
        if not isinstance(notes, str):
            raise ValueError("`notes` is not text")
        if len(notes) > MAX_NOTE_CHARS:
            raise ValueError(f"the note has more than {MAX_NOTE_CHARS:,} characters")
        if not isinstance(tags, list):
            raise ValueError("`tags` is not a list")
        for tag in tags:
            if not isinstance(tag, str) or not tag or "," in tag or tag.split() != [tag]:
                raise ValueError(f"the tag {str(tag)[:40]!r} is not a single word")
            if len(tag) > MAX_TAG_CHARS:
                raise ValueError(
                    f"the tag {tag[:40]!r}... has more than {MAX_TAG_CHARS} characters"
                )
        unique_tags = tuple(dict.fromkeys(tags))
        if len(unique_tags) > MAX_TAGS:
            raise ValueError(f"there are more than {MAX_TAGS} tags")
        return cls(notes.strip(), unique_tags)

    @classmethod
    def of_keys(cls, notes: str, tags: Sequence[str]) -> RunNotes:
        """Makes the notes from the keys `notes` and `tags`. ShoalError, which names the key, for
        what `parse` does not allow."""
        try:
            of_note = cls.parse({"notes": notes})
        except ValueError as error:
            raise ShoalError(f"notes: {error}", "notes") from error
        try:
            of_tags = cls.parse({"tags": list(tags)})
        except ValueError as error:
            raise ShoalError(
                f"tags={list(tags)}: {error}; separate several tags with commas, "
                "tags=baseline,warm-up",
                "tags",
            ) from error
        return cls(of_note.notes, of_tags.tags)

    @property
    def text(self) -> str:
        """Returns tags and note in one line for the terminal: "[baseline] as in the paper"."""
        parts = [f"[{tag}]" for tag in self.tags]
        if self.notes:
            parts.append(shorten(one_line(self.notes), 160))
        return " ".join(parts)

    def record(self) -> dict[str, Any]:
        """Returns the content of `notes.json`."""
        return {"notes": self.notes, "tags": list(self.tags)}


NO_NOTES = RunNotes()
"""The notes of a run about which nobody has written."""


def write_notes(folder: Path, notes: RunNotes) -> None:
    """Writes `notes.json` to a run's folder atomically, also while the run trains: no lock is
    taken. Empty notes remove the file. ShoalError if the folder cannot be written."""
    path = folder / NOTES
    if notes == NO_NOTES:
        with explain_write_errors(path):
            path.unlink(missing_ok=True)
        return
    text = json.dumps(notes.record(), indent=2, ensure_ascii=False)
    write_atomically(path, [text])
