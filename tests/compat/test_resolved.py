"""What command lines and files resolve to, recorded: flags, recipes, algorithms, presets, files,
and random mixtures of them. `resolved.txt` has a line for each: the digest of the keys that differ
from the defaults with their origins, the command, a file's text, the words. Where a recorded fault
was corrected, the earlier digest stands in front (`was>now`).

`python tests/compat/test_resolved.py` prints the lines whose digest is another now, with what they
resolve to.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from shoal.config.merge import compose
from shoal.config.stored import difference_from_defaults
from shoal.records import ShoalError

HERE = Path(__file__).parent
LINES = (HERE / "resolved.txt").read_text(encoding="utf-8").splitlines()
PARTS = 8


def resolve(command: str, file: str, words: list[str], folder: Path) -> str:
    """The keys of a case that differ from the defaults, each with its origin; `error` where it is
    refused."""
    mine = folder / "mine.yml"
    mine.write_text(file, encoding="utf-8")
    places = {
        "FILE": str(mine),
        **{f"FILE:{path.name}": str(path) for path in (HERE / "files").iterdir()},
    }
    try:
        config, resolved = compose(command, [places.get(word, word) for word in words])
    except ShoalError:
        return "error"
    changed = difference_from_defaults(config)
    return json.dumps(
        {key: [value, resolved.origins.get(key, "")] for key, value in changed.items()},
        sort_keys=True,
    )


def digest(text: str) -> str:
    return text if text == "error" else hashlib.sha256(text.encode()).hexdigest()[:10]


def changed_lines(lines: list[str], folder: Path) -> list[tuple[str, str]]:
    """The lines that resolve to something else, each with what that is."""
    found = []
    for line in lines:
        recorded, case = line.split(" ", 1)
        command, file, words = json.loads(case)
        text = resolve(command, file, words, folder)
        if digest(text) != recorded.rpartition(">")[2]:
            found.append((line, text))
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_what_was_recorded_resolves_to_the_same(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert changed_lines(LINES[part::PARTS], tmp_path) == []


def test_corrections_are_few():
    corrected = [line for line in LINES if ">" in line.split(" ", 1)[0]]
    assert len(LINES) > 700 and len(corrected) < len(LINES) // 12


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for line, text in changed_lines(LINES, Path(folder)):
            print(f"{line}\n    {text}")
