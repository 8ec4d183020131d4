"""What one sees of a run: colours and a progress bar on a terminal, plain lines in a notebook or a file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from shoal.report.figures import evaluation_text, one_line, summary_rows, text_table
from shoal.report.progress import AnswerLines, LiveLine, StepLines
from shoal.report.summary import SolvedProblem
from shoal.types import Prompt

_LONGEST_TEXT = 2000
_MOST_UNKEPT = 1000
"""Lines that wait for a file to be kept in."""


class Console:
    """Prints a run's progress. Use in a `with`, or call `close`, so that the terminal is left as it was.

    `terminal=None` asks the stream; `clock` gives seconds. No text can make it fail: what the stream cannot show, and
    control characters, are printed as escapes."""

    def __init__(self, stream: TextIO | None = None, terminal: bool | None = None,
                 clock: Callable[[], float] = time.monotonic, width: int | None = None) -> None:
        self._stream = stream or sys.stdout
        is_terminal = getattr(self._stream, "isatty", lambda: False)() if terminal is None else terminal
        self._rich = _rich_console(self._stream, width) if is_terminal else None
        self._repeats: Counter[str] = Counter()
        self._log: Path | None = None
        self._unkept: deque[str] = deque(maxlen=_MOST_UNKEPT)
        live = LiveLine(self._rich, self._printable) if self._rich is not None else None
        self._steps = StepLines(self._write, clock, live)
        self._answers = AnswerLines(self._write, clock)

    def keep_log(self, path: Path) -> None:
        """Writes the lines printed so far, and all further ones, to the end of a file too."""
        self._log = path
        while self._unkept:
            self.keep(self._unkept.popleft())

    def heading(self, text: str) -> None:
        """Begins a part: evaluation, training."""
        self.text(f"== {one_line(text)}", "bold cyan")

    def note(self, text: str) -> None:
        """One fact in one line. A repetition is only counted; the summary shows the counts."""
        self._write_once(one_line(text), "dim")

    def wrong(self, text: str) -> None:
        """One line about what makes a run fail or learn nothing."""
        self._write_once(one_line(text), "bold red")

    def warning(self, text: str) -> None:
        """One line that asks for attention. A repetition is only counted; the summary shows the counts."""
        self._write_once(f"warning: {one_line(text)}", "yellow")

    def passage(self, title: str, text: str) -> None:
        """A text of many lines under its title, indented; the end of a very long one is left out."""
        self._write(f"{one_line(title)}:", "dim")
        self._write(_indented(text))

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """`step` of `steps` (from 1) is done; `StepLines` decides what is printed."""
        self._steps.step(step, steps, metrics)
        if step >= steps:
            self.close()

    def answered(self, part: str, done: int, total: int) -> None:
        """`done` (one more at each call) of the `total` questions of an evaluation's part.

        >>> console.answered("held_out, greedy", 120, 500)
        held_out, greedy: 120 of 500, 0:48 left
        """
        self._answers.answered(one_line(part), done, total)

    def evaluation(self, name: str, figures: Mapping[str, Any]) -> None:
        """The figures of one set of questions, with their number and protocol.

        >>> console.evaluation("held_out", {"accuracy": 0.5, "num_questions": 500, "protocol": "greedy",
        ...                                 "pass@8": 0.8})
        held_out: accuracy 50.0% (greedy, 500 questions; 95% interval 45.6-54.4)  pass@8 80.0%
        """
        self._write(f"{one_line(name)}: {evaluation_text(figures)}", "bold")

    def summary(self, before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]],
                solved: SolvedProblem | None = None, facts: Sequence[str] = ()) -> None:
        """The end: a table of figures by set of questions before and after, facts in a line each, a solved problem,
        counts.

        `before`, `after`: name of the set -> its figures, as given to `evaluation`."""
        if rows := summary_rows(before, after):
            self.table(("", "before", "after", "change"), rows)
        for fact in filter(None, facts):
            self.text(one_line(fact))
        if solved is not None:
            self._write("a problem that was wrong before and is right after:", "bold")
            for title, text in (("prompt", prompt_text(solved.prompt)), ("before", solved.before),
                                ("after", solved.after)):
                self.passage(title, text)
        for text, count in self._repeats.items():
            if count > 1:
                self._write(f"{count} times: {text}")

    def text(self, text: str, style: str = "") -> None:
        """A paragraph as it stands."""
        self.close()
        self._write(text, style)

    def table(self, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        """Rows under their head, the first column to the left, the others to the right."""
        self.text("\n".join(text_table(head, rows)))

    def close(self) -> None:
        """Ends the progress bar and gives the terminal back."""
        self._steps.stop()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_once(self, text: str, style: str) -> None:
        self._repeats[text] += 1
        if self._repeats[text] == 1:
            self._write(text, style)

    def _write(self, text: str, style: str = "") -> None:
        self.keep(text)
        if self._rich is not None:
            from rich.text import Text  # Text, not markup: a model's "[bold]" stays what it is

            self._rich.print(Text(self._printable(text), style=style))
            return
        self._stream.write(self._printable(text) + "\n")
        self._stream.flush()

    def keep(self, text: str) -> None:
        """Writes a text to the kept log alone."""
        if self._log is None:
            self._unkept.append(text)
            return
        # a full disk is met where something is written that a run needs
        with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
            file.write(printable(text) + "\n")

    def _printable(self, text: str) -> str:
        return printable(text, getattr(self._stream, "encoding", None) or "utf-8")


class _EscapingStream:
    """A stream that cannot fail on a character: rich draws some of its own (an ellipsis) in any encoding."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _rich_console(stream: TextIO, width: int | None) -> Any:
    from rich.console import Console as RichConsole

    escaping = cast(TextIO, _EscapingStream(stream))
    return RichConsole(file=escaping, force_terminal=True, width=width, highlight=False, emoji=False, markup=False)


def printable(text: str, encoding: str = "utf-8") -> str:
    """The text with control characters (but line ends and tabs) and what `encoding` lacks written as escapes."""
    shown = "".join(c if c in "\n\t" or not _is_control(c) else c.encode("unicode_escape").decode() for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _is_control(character: str) -> bool:
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069


def _indented(text: str) -> str:
    lines = [f"    {line}".rstrip() for line in text[:_LONGEST_TEXT].split("\n")]
    rest = len(text) - _LONGEST_TEXT
    return "\n".join(lines + ([f"    ... {rest} more characters"] if rest > 0 else []))


def prompt_text(prompt: Prompt) -> str:
    """A prompt for reading: text as it is, messages one below the other."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in prompt)
