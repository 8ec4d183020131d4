"""Runs the transcripts of the pages and rewrites their output: `python docs/transcripts.py
[--quick] [PAGE.md ...]`.

A `console` block is a transcript: `$ ` begins a command, the lines below it are its output, of
which `...` alone leaves some out. A block with a title (```python title="rewards.py") is a file
that the commands read. The blocks of a page run in order in one empty folder. `--quick` leaves out
the blocks that need a run; `tests/test_docs.py` compares the others with what their commands print.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WIDTH = 118
"""Longer lines are cut, except errors and warnings."""
ALIKE = 0.6
"""Two lines with at least this ratio of difflib are the same line on two days."""
CLOCK = re.compile(r"\d+:\d\d|[\d.]+k?( tokens/s| s\b| GiB\b)")
"""What differs from one day to the next; an output that differs in nothing else stays."""

PACKAGE = Path(__file__).parent.parent / "src" / "shoal"

BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Call:
    """A command with the lines shown below it.

    >>> [Call("shoal --version", ["shoal 0.1.0"])] == calls("$ shoal --version\\nshoal 0.1.0\\n")
    True
    """

    command: str
    shown: list[str]

    @property
    def is_quick(self) -> bool:
        """True if it neither starts a run nor names one: a help text, a dry run, an error."""
        is_error = "".join(self.shown).startswith("error: ")
        words = {"--help", "--dry-run", "export"} & set(self.words)
        return bool(words) or (is_error and "run_name=" not in self.command)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command.replace("\\\n", " "))


def calls(text: str) -> list[Call]:
    """The commands of a transcript."""
    found: list[Call] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            while line.endswith("\\"):
                line += "\n" + next(lines)
            found.append(Call(line[2:], []))
        else:
            found[-1].shown.append(line)
    return found


def transcripts(page: str) -> Iterator[list[Call]]:
    """The transcripts of a page."""
    yield from (calls(match[3]) for match in BLOCK.finditer(page) if match[1] == "console")


def files(page: str) -> Iterator[tuple[str, str]]:
    """Name and text of the files that a page shows."""
    for match in BLOCK.finditer(page):
        if title := re.search(r'title="([^"]+)"', match[2]):
            yield title[1], match[3]


def renewed(shown: list[str], printed: list[str]) -> list[str]:
    """The lines that were shown, as a command prints them today; ValueError for one that it no
    longer prints.

    >>> printed = ["step 1  0:05", "step 2  0:09", "loss 4", "took 5 s"]
    >>> renewed(["step 1  0:02", "...", "loss 3"], printed)
    ['step 1  0:05', '...', 'loss 4', 'took 5 s']
    """
    printed = [_cut(line.rstrip()) for line in printed]
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    result: list[str] = []
    place = 0
    for number, part in enumerate(parts):
        result += ["..."] if number else []
        if not part and number in (0, len(parts) - 1):
            continue
        first = 0 if number == 0 else _find(part[0], printed, place)
        last = len(printed) - 1 if number == len(parts) - 1 else _find(part[-1], printed, first)
        result += printed[first : last + 1]
        place = last + 1
    clocks_alone = [CLOCK.sub("0", line) for line in result] == [
        CLOCK.sub("0", line) for line in shown
    ]
    return shown if clocks_alone else result


def _find(line: str, printed: list[str], start: int) -> int:
    """The place of the first line that resembles this one about as much as any, its numbers
    apart."""
    ratios = [
        difflib.SequenceMatcher(None, _words(line), _words(each), autojunk=False).ratio()
        for each in printed[start:]
    ]
    if not ratios or max(ratios) < ALIKE:
        raise ValueError(f"no longer printed: {line}")
    return start + next(place for place, ratio in enumerate(ratios) if ratio >= 0.9 * max(ratios))


def _words(line: str) -> str:
    return re.sub(r"[-+]?\d[\d.,:e-]*", "0", line)


def _cut(line: str) -> str:
    return (
        line
        if len(line) <= WIDTH or line.startswith(("error: ", "warning: "))
        else f"{line[: WIDTH - 4]} ..."
    )


def run(command: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """What a command prints; an `export` stays in the environment."""
    if command.startswith("export "):
        name, _, environment[name] = command.removeprefix("export ").partition("=")
        return []
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    # Where the package lies is this machine's own.
    return done.stdout.replace(str(PACKAGE.parent), "...").splitlines()


def renew(page: Path, quick: bool) -> None:
    """Runs the transcripts of a page, or the quick ones, and writes it again."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        for file, content in files(text):
            (Path(name) / file).write_text(content, encoding="utf-8")
        environment = {**os.environ, "COLUMNS": "110"}

        def transcript(match: re.Match[str]) -> str:
            block = calls(match[3]) if match[1] == "console" else []
            if not block or (quick and not all(call.is_quick for call in block)):
                return match[0]
            lines = []
            for call in block:
                printed = run(call.command, Path(name), environment)
                lines.append(f"$ {call.command}")
                try:
                    lines += renewed(call.shown, printed)
                except ValueError as error:
                    print(
                        f"{page.name}: {call.command}: {error}", *printed, sep="\n", file=sys.stderr
                    )
                    lines += call.shown  # for a person to edit
            return "\n".join([f"```console{match[2]}", *lines, "```"])

        page.write_text(BLOCK.sub(transcript, text), encoding="utf-8")


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--quick"]
    for each in [Path(word) for word in words] or sorted(Path(__file__).parent.glob("*.md")):
        renew(each, "--quick" in sys.argv)
