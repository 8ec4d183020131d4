"""The entries of a model folder's config.json, checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.files import read_json
from shoal.records import ShoalError

MOST_LAYERS, MOST_HEADS, MOST_OF_A_SIZE = 10_000, 100_000, 2**31 - 1
"""Largest values that a config.json may have: a list of 10^9 layers would be made before the first
of their weights is missed."""
MOST_OF_A_NUMBER = 1e18
"""Larger numbers are infinity, or such that no position can be multiplied by them."""


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a model folder's config.json; ShoalError if there is none."""
    file = folder / "config.json"
    if not file.is_file():
        raise ShoalError(
            f"{folder} holds no config.json: expected a model folder in Hugging Face format."
        )
    return read_json(file)


class Entries:
    """The entries that describe a model in a folder's config.json, checked when they are read."""

    def __init__(self, folder: Path, config: Mapping[str, Any], inside: str = "") -> None:
        """`inside`: the entry of the file that has these entries, like `text_config`; "": they are
        in the file itself."""
        self.folder = folder
        self.config = config
        self.inside = inside

    def title(self, key: str) -> str:
        """Returns what messages call an entry: the file, and the entry's name in it."""
        inside = f"{self.inside}." if self.inside else ""
        return f"{self.folder}/config.json: {inside}{key}"

    def with_changes(self, changes: Mapping[str, Any]) -> Entries:
        """Returns these entries with some changed or added. A change that is None, null in a file,
        leaves a value that is there."""
        changed = dict(self.config)
        for key, value in changes.items():
            if value is not None or key not in changed:
                changed[key] = value
        return Entries(self.folder, changed, self.inside)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns an entry as it is; `default` if it is absent or null."""
        value = self.config.get(key)
        return default if value is None else value

    def is_set(self, key: str) -> bool:
        """True if an entry is present and not empty, 0 or false."""
        return bool(self.config.get(key))

    def check_type(self, key: str, expected: type, words: str) -> None:
        """Raises ShoalError if an entry is present and not empty, 0 or false, but not of this type;
        `words` name the type in the message."""
        value = self.config.get(key)
        if value and not isinstance(value, expected):
            raise ShoalError(f"{self.title(key)} is {value!r:.60}; expected {words}.")

    def check_value(self, key: str, supported: Sequence[Any]) -> None:
        """Raises ShoalError if an entry is none of these values. Absent, null and false are
        accepted too, because they ask for nothing; 0 and "" are values like others."""
        value = self.config.get(key)
        is_asked_for = value is not None and value is not False
        if is_asked_for and value not in supported:
            raise ShoalError(
                f"{self.title(key)} is {value!r:.60}, which is not supported; "
                f"expected {' or '.join(map(str, supported)) or 'none'}."
            )

    def number(self, key: str, least: float = 0.0, whole: bool = False) -> Any:
        """Returns an entry that is a number of at least `least`, with `whole` a whole one;
        ShoalError if it is anything else, or missing. Numbers from MOST_OF_A_NUMBER on and bools
        are refused too."""
        value: Any = self.config.get(key)
        accepted = int if whole else (int, float)
        is_number = isinstance(value, accepted) and not isinstance(value, bool)
        if not is_number or not least <= value < MOST_OF_A_NUMBER:
            text = "missing" if value is None else repr(value)
            raise ShoalError(
                f"{self.title(key)} is {text}; expected a {'whole ' * whole}number of {least:g} or "
                "more."
            )
        return value

    def size(self, key: str, most: int = MOST_OF_A_SIZE) -> int:
        """Returns an entry that is a whole number from 1 to `most`; ShoalError if it is anything
        else, or missing."""
        value = self.number(key, least=1, whole=True)
        if value > most:
            raise ShoalError(f"{self.title(key)} is {value}; expected {most:,} at most.")
        return value
