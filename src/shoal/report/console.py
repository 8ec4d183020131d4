"""What one sees of a run: colours and a progress bar on a terminal, plain lines in a notebook or a
file."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from shoal.records import Group, Prompt
from shoal.runs.lines import EventLevel
from shoal.runs.summary import evaluation_text, step_figures, summary_rows
from shoal.text import duration, one_line, text_table

LINES_A_RUN, FIRST_STEPS, QUIET_SECONDS = 40, 3, 60.0
"""A run prints its first steps, then about LINES_A_RUN lines at equal distances; at least one a
minute."""
FIRST_ANSWERS_SECONDS, ANSWERS_SECONDS = 2.0, 10.0
"""When an evaluation first prints how long it will take, and how often it does from then on."""
_MOST_UNKEPT = 1000
"""Lines, and events, that wait for a file to be kept in."""

WriteEvent: TypeAlias = "Callable[[EventLevel, str, str], None]"
"""Level, text, key -> a line of events.jsonl: `RunWriter.write_event`."""


class Console:
    """Prints a run's progress. Use in a `with`, or call `close`, so that the terminal is left as it
    was.

    `terminal=None` asks the stream; `clock` gives seconds. No text can make it fail: what the
    stream cannot show, and control characters, are printed as escapes."""

    def __init__(
        self,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
    ) -> None:
        self._stream, self._clock = stream or sys.stdout, clock
        if terminal is None:
            is_terminal = getattr(self._stream, "isatty", lambda: False)()
        else:
            is_terminal = terminal
        self._rich: Any = None
        if is_terminal:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(
                file=self._stream,
                force_terminal=True,
                width=width,
                highlight=False,
                emoji=False,
                markup=False,
            )
        self._bar: Any = None
        self._once: set[str] = set()
        self._log: Path | None = None
        self._unkept: deque[str] = deque(maxlen=_MOST_UNKEPT)
        self._write_event: WriteEvent | None = None
        self._unwritten: deque[tuple[EventLevel, str, str]] = deque(maxlen=_MOST_UNKEPT)
        self._pace, self._programs, self._printed_at = Pace(clock()), 0.0, -math.inf
        self._answers, self._due = Pace(clock()), 0.0
        # a warning with the flags of another system that set its keys
        self.in_their_names: Callable[[str], str] = str

    def keep_log(self, path: Path) -> None:
        """Writes the lines printed so far, and all further ones, to the end of a file too."""
        self._log = path
        while self._unkept:
            self.keep(self._unkept.popleft())

    def keep(self, text: str) -> None:
        """Writes a text to the kept log alone."""
        if self._log is None:
            self._unkept.append(text)
            return
        # a full disk is met where something is written that a run needs
        with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
            file.write(printable(text) + "\n")

    def keep_events(self, write: WriteEvent | None) -> None:
        """Hands the warnings and errors so far, and all further ones, to `write` too; None: from
        now on they wait for the next."""
        self._write_event = write
        while write and self._unwritten:
            level, text, key = self._unwritten.popleft()
            write(level, text, key)

    def _event(self, level: EventLevel, text: str, key: str = "") -> None:
        if self._write_event is None:
            self._unwritten.append((level, text, key))
        else:
            self._write_event(level, text, key)

    # ---- lines

    def heading(self, text: str) -> None:
        """Begins a part: evaluation, training."""
        self.text(f"== {one_line(text)}", "bold cyan")

    def note(self, text: str) -> None:
        """One fact in one line, said once."""
        self._write_once(one_line(text), "dim")

    def wrong(self, text: str, key: str = "") -> None:
        """One line about what makes a run fail or learn nothing, said once; `key`: of the
        configuration, what helps."""
        line = one_line(self.in_their_names(text))
        if self._write_once(line, "bold red"):
            self._event("wrong", line, key)

    def warning(self, text: str, key: str = "") -> None:
        """One line that asks for attention, said once; `key`: of the configuration, what helps."""
        line = one_line(self.in_their_names(text))
        if self._write_once(f"warning: {line}", "yellow"):
            self._event("warning", line, key)

    def failed(self, text: str) -> None:
        """Keeps the error that ends a run in its log and its events; the command prints it."""
        line = one_line(text)
        self.keep(f"error: {line}")
        self._event("error", line)

    def text(self, text: str, style: str = "") -> None:
        """A paragraph as it stands."""
        self.close()
        self._write(text, style)

    def passage(self, title: str, text: str, lines: int = 200, characters: int = 2000) -> None:
        """A text under its title, indented; of one with more lines or characters its beginning and
        its end."""
        rows = text.split("\n")
        head = "\n".join(rows[: lines // 2])[: characters // 2]
        tail = "\n".join(rows[-lines // 2 :])[-characters // 2 :]
        num_left_out = len(text) - len(head) - len(tail)
        if num_left_out > 0:
            rows = f"{head}\n... {num_left_out:,} more characters ...\n{tail}".split("\n")
        self._write(f"{one_line(title)}:", "dim")
        self._write("\n".join(f"    {row}".rstrip() for row in rows))

    def table(self, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
        """Rows under their head, the first column to the left, the others to the right."""
        self.text("\n".join(text_table(head, rows)))

    # ---- a run

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """`step` of `steps` (from 1) is done: one of about LINES_A_RUN lines that stay, and the
        bar."""
        now, programs = self._clock(), metrics.get("compilations", 0)
        compiled = round(programs - self._programs)
        self._pace.mark(now, step, compiled=compiled > 0)
        self._programs = programs
        times, left = f"{duration(now - self._pace.start)} elapsed", self._pace.left(steps - step)
        if left is not None:
            times += f", {duration(left)} left"
        line = "  ".join([times, *step_figures(metrics, compiled)])
        every = max(1, math.ceil(steps / LINES_A_RUN))
        if (
            step <= FIRST_STEPS
            or step >= steps
            or step % every == 0
            or now - self._printed_at >= QUIET_SECONDS
        ):
            self._printed_at = now
            self._write(f"step {step}/{steps}  {line}")
        if self._rich is not None and step < steps:
            self._show_bar(step, steps, f"{step}/{steps}  {line}")
        elif step >= steps:
            self.close()

    def _show_bar(self, step: int, steps: int, text: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        if self._bar is None:
            cropped = Column(no_wrap=True, overflow="crop")
            self._bar = Progress(
                BarColumn(20),
                TextColumn("{task.description}", markup=False, table_column=cropped),
                console=self._rich,
                auto_refresh=False,
                transient=True,
            )
            self._bar.add_task("", total=steps)
            self._bar.start()
        self._bar.update(
            0, completed=step, description=self._printable(f"step {text}"), refresh=True
        )

    def answered(self, part: str, done: int, total: int) -> None:
        """`done` (one more at each call) of the `total` questions of an evaluation's part: a line
        after 2 s where 10 s or more are left, then every 10 s.

        >>> console.answered("held_out, greedy", 120, 500)
        held_out, greedy: 120 of 500, 0:48 left
        """
        now = self._clock()
        if done == 1:
            self._answers, self._due = Pace(now, window=total), now + FIRST_ANSWERS_SECONDS
        self._answers.mark(now, done)
        left = self._answers.left(total - done)
        if now >= self._due and left:
            self._due = now + ANSWERS_SECONDS
            if left >= ANSWERS_SECONDS or now - self._answers.start >= ANSWERS_SECONDS:
                self._write(f"{one_line(part)}: {done} of {total}, {duration(left)} left")

    def evaluation(self, name: str, figures: Mapping[str, Any]) -> None:
        """The figures of one set of questions, with their number and protocol.

        >>> console.evaluation("held_out", {
        ...     "accuracy": 0.5, "accuracy_interval": [0.456, 0.544], "pass@8": 0.8,
        ...     "num_questions": 500, "protocol": "greedy",
        ... })
        held_out: accuracy 50.0% (greedy, 500 questions; 95% interval 45.6-54.4)  pass@8 80.0%
        """
        self._write(f"{one_line(name)}: {evaluation_text(figures)}", "bold")

    def summary(
        self,
        before: Mapping[str, Mapping[str, Any]],
        after: Mapping[str, Mapping[str, Any]],
        solved: tuple[Group, Group] | None = None,
        facts: Sequence[str] = (),
        reward_since: int = 0,
    ) -> None:
        """The end: a table of figures by set of questions before and after, facts in a line each,
        and a question that was answered wrong before and right after, as both groups.

        `before`, `after`: name of the set -> its figures, as given to `evaluation`; `reward_since`:
        see `summary_rows`."""
        rows = summary_rows(before, after, reward_since)
        if rows:
            self.table(("", "before", "after", "change"), rows)
        for fact in facts:
            if fact:
                self.text(one_line(fact))
        if solved is not None:
            self._write("a question that was answered wrong before and right after:", "bold")
            group_before, group_after = solved
            self.passage("prompt", prompt_text(group_before.example.prompt))
            self.passage("before", completion_text(group_before, 0))
            self.passage("after", completion_text(group_after, 0))

    def close(self) -> None:
        """Ends the progress bar and gives the terminal back."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_once(self, text: str, style: str) -> bool:
        """Writes a line unless it was written before; True if it was not."""
        if text in self._once:
            return False
        self._once.add(text)
        self._write(text, style)
        return True

    def _write(self, text: str, style: str = "") -> None:
        self.keep(text)
        if self._rich is not None:
            from rich.text import Text  # Text, not markup: a model's "[bold]" stays what it is

            self._rich.print(Text(self._printable(text), style=style))
            return
        self._stream.write(self._printable(text) + "\n")
        self._stream.flush()

    def _printable(self, text: str) -> str:
        return printable(text, getattr(self._stream, "encoding", None) or "utf-8")


class Pace:
    """The time that is left, by the mean duration of the last steps. The first step, and steps that
    compile a program, are left out, since they would make it jump."""

    def __init__(self, start: float, window: int = 20) -> None:
        self.start = self._last = start
        self._done = 0
        # seconds, number of steps, compiled
        self._steps: deque[tuple[float, int, bool]] = deque(maxlen=window)

    def mark(self, now: float, done: int, compiled: bool = False) -> None:
        """`done` steps have been made; `compiled`: the last of them compiled a program."""
        if self._done:
            self._steps.append((now - self._last, done - self._done, compiled))
        self._last, self._done = now, done

    def left(self, number: int) -> float | None:
        """Seconds for so many steps more; None until a step after the first has compiled
        nothing."""
        usual = [step for step in self._steps if not step[2]]
        if not usual and len(self._steps) > 5:  # every step compiles: that is this run's pace
            usual = list(self._steps)
        total_seconds = 0
        num_steps = 0
        for seconds, steps, _ in usual:
            total_seconds += seconds
            num_steps += steps
        return total_seconds / num_steps * number if num_steps else None


def printable(text: str, encoding: str = "utf-8") -> str:
    """The text with control characters (but line ends and tabs) and what `encoding` lacks written
    as escapes."""

    def escaped(control: re.Match[str]) -> str:
        return control[0].encode("unicode_escape").decode()

    return _CONTROL.sub(escaped, text).encode(encoding, "backslashreplace").decode(encoding)


_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")
"""Control characters, but tab and line end, and those that turn the direction of text."""


def prompt_text(prompt: Prompt) -> str:
    """A prompt for reading: text as it is, messages with their tool calls one below the other."""
    if isinstance(prompt, str):
        return prompt
    lines = []
    for message in prompt:
        speaker = str(message.get("role", "?"))
        if message.get("name"):
            speaker += f" {message['name']}"
        if isinstance(message.get("reward"), int | float):
            speaker += f" (reward {message['reward']:g})"
        lines.append(f"{speaker}: {message.get('content') or ''}")
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
            lines.append(f"  calls {function.get('name')}({arguments})")
    return "\n".join(lines)


def completion_text(group: Group, number: int) -> str:
    """A completion for reading: its text, or the messages of a rollout with turns."""
    messages = group.completions[number].messages
    if not messages:
        return group.texts[number]
    return prompt_text([dict(message) for message in messages])
