"""Console: what people see of a run. Colours and a progress bar on a terminal, plain lines in a
notebook or a file."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from shoal.records import Group, Prompt
from shoal.runs.lines import EventLevel
from shoal.runs.reward_changes import NO_CHANGES, RewardChanges
from shoal.runs.summary import evaluation_text, step_texts, summary_rows
from shoal.text import duration, one_line, shorten, text_table

LINES_A_RUN, FIRST_STEPS, QUIET_SECONDS = 40, 3, 60.0
"""A run prints its first FIRST_STEPS steps, then about LINES_A_RUN lines at equal distances, and at
least one line every QUIET_SECONDS."""
FIRST_ANSWERS_SECONDS, ANSWERS_SECONDS = 2.0, 10.0
"""Time after which an evaluation first prints how long it will take, and time between such
lines."""
ANSWER_CHARACTERS = 300
"""Most characters of an answer, and of its prompt, among the answers of a step."""
BLOCK_COLUMNS = 100
"""Most characters of a line of a block of facts."""
_MOST_UNKEPT = 1000
"""Most lines, and events, that are remembered until there is a file for them."""

WriteEvent: TypeAlias = "Callable[[EventLevel, str, str], None]"
"""Function of (level, text, key) that writes a line of events.jsonl: `RunWriter.write_event`."""


class Console:
    """Prints a run's progress. Use it in a `with`, or call `close`, so that the terminal is left as
    it was.

    No text can make it fail: control characters, and characters that the stream cannot show, are
    printed as escapes. Notes and warnings that were printed before are not repeated."""

    def __init__(
        self,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
    ) -> None:
        """Prints nothing yet. `stream`: where to print, by default stdout; it is never closed.
        `terminal`: False prints plain lines, True colours and a bar, None asks the stream whether
        it is a terminal. `clock` returns seconds, of which only differences count. `width`: of the
        terminal in characters; None asks it."""
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
        # Of steps: their pace, the number of programs compiled, when a line was printed last.
        self._pace, self._programs, self._printed_at = Pace(clock()), 0.0, -math.inf
        # Of an evaluation's answers: their pace, and when the next line may be printed.
        self._answers, self._due = Pace(clock()), 0.0
        # rewrites a warning with the flags of another system, if these set the keys
        self.add_typed_names: Callable[[str], str] = str

    def keep_log(self, path: Path) -> None:
        """Appends all lines to a file, too: those printed so far (the last _MOST_UNKEPT) and all
        further ones. What the file holds stays. Errors of the disk are ignored."""
        self._log = path
        while self._unkept:
            self.keep(self._unkept.popleft())

    def keep(self, text: str) -> None:
        """Writes a text to the log file only, not to the screen. Before `keep_log` has named the
        file, the text is remembered and written then."""
        if self._log is None:
            self._unkept.append(text)
            return
        # errors are ignored: a full disk shows when something is written that the run needs
        with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
            file.write(printable(text) + "\n")

    def keep_events(self, write: WriteEvent | None) -> None:
        """Passes all warnings and errors (`warning`, `wrong`, `failed`; not notes) also to `write`:
        those that none has got yet (the last _MOST_UNKEPT) and all further ones. With None, further
        ones are remembered, and passed to the `write` of the next call."""
        self._write_event = write
        while write and self._unwritten:
            level, text, key = self._unwritten.popleft()
            write(level, text, key)

    def _event(self, level: EventLevel, text: str, key: str = "") -> None:
        """Passes an event to the function of `keep_events`, or remembers it until there is one.
        `level`: "warning", "wrong" or "error"; `key`: the configuration key that helps, or ""."""
        if self._write_event is None:
            self._unwritten.append((level, text, key))
        else:
            self._write_event(level, text, key)

    # ---- lines

    def heading(self, text: str) -> None:
        """Prints a heading, such as "== evaluation"."""
        self.text(f"== {one_line(text)}", "bold cyan")

    def note(self, text: str) -> None:
        """Prints one fact in one line; a text that was printed before is not repeated."""
        self._write_once(one_line(text), "dim")

    def block(self, title: str, facts: Sequence[str]) -> None:
        """Prints facts under a title, each indented and broken into lines of at most BLOCK_COLUMNS
        characters, fewer on a narrower terminal; nothing without facts, or if it was printed
        before. A word that is longer stays whole."""
        if not facts:
            return
        width = min(BLOCK_COLUMNS, self._rich.width) if self._rich else BLOCK_COLUMNS
        lines = [title]
        for fact in facts:
            lines += textwrap.wrap(
                one_line(fact),
                width,
                initial_indent="  ",
                subsequent_indent="      ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        self._write_once("\n".join(lines), "dim")

    def wrong(self, text: str, key: str = "") -> None:
        """Prints one line about something that makes a run fail or learn nothing, and passes on an
        event; neither if the line was printed before. `key`: the configuration key that helps, or
        ""; it is not printed."""
        line = one_line(self.add_typed_names(text))
        if self._write_once(line, "bold red"):
            self._event("wrong", line, key)

    def warning(self, text: str, key: str = "") -> None:
        """Prints one line that asks for attention, after "warning: ", and passes on an event;
        neither if the line was printed before. `key`: the configuration key that helps, or ""; it
        is not printed."""
        line = one_line(self.add_typed_names(text))
        if self._write_once(f"warning: {line}", "yellow"):
            self._event("warning", line, key)

    def failed(self, text: str) -> None:
        """Writes the error that ends a run to the log and the events, without printing it; the
        command prints it."""
        line = one_line(text)
        self.keep(f"error: {line}")
        self._event("error", line)

    def text(self, text: str, style: str = "") -> None:
        """Prints a paragraph, which may have several lines, and ends the progress bar. `style`: in
        rich's words, like "bold cyan"; only a terminal shows it."""
        self.close()
        self._write(text, style)

    def passage(self, title: str, text: str, lines: int = 200, characters: int = 2000) -> None:
        """Prints a text of any length under a title, indented. Of a text with more than `lines`
        lines or `characters` characters, prints half as much from the beginning and from the end,
        and between them how many characters are left out."""
        rows = text.split("\n")
        head = "\n".join(rows[: lines // 2])[: characters // 2]
        tail = "\n".join(rows[-lines // 2 :])[-characters // 2 :]
        # 0 or less if head and tail overlap or meet: the text is short enough.
        num_left_out = len(text) - len(head) - len(tail)
        if num_left_out > 0:
            rows = f"{head}\n... {num_left_out:,} more characters ...\n{tail}".split("\n")
        self._write(f"{one_line(title)}:", "dim")
        self._write("\n".join(f"    {row}".rstrip() for row in rows))

    def table(self, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
        """Prints rows under a head; the first column is aligned left, the others right. Each row
        has as many cells as the head, else ValueError."""
        self.text("\n".join(text_table(head, rows)))

    # ---- a run

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Notes that `step` (from 1) of `steps` is done, and updates the progress bar on a
        terminal. Prints the step's line for the first FIRST_STEPS steps and the last one, for every
        n-th step, so that there are about LINES_A_RUN in all, and if none was printed for
        QUIET_SECONDS. The last step ends the progress bar. Called once a step, in order."""
        now, programs = self._clock(), metrics.get("compilations", 0)
        compiled = round(programs - self._programs)  # since the last step
        self._pace.mark(now, step, compiled=compiled > 0)
        self._programs = programs
        times = f"{duration(now - self._pace.start)} elapsed"
        left = self._pace.seconds_left(steps - step)
        if left is not None:
            times += f", {duration(left)} left"
        line = "  ".join([times, *step_texts(metrics, compiled)])
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

    def answers(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints sampled answers to the first prompt among the rows (`completion_rows`), each in
        one line with its reward; nothing without rows. Long texts are shortened in the middle."""
        if not rows:
            return
        prompt = rows[0]["prompt"]
        self._write(f"step {step}, prompt: {shorten(prompt, ANSWER_CHARACTERS)}")
        for row in rows:
            if row["prompt"] == prompt:
                text = shorten(row["completion"], ANSWER_CHARACTERS)
                self._write(f"    reward {row['reward']:.3g}: {text}", "dim")

    def _show_bar(self, step: int, steps: int, text: str) -> None:
        """Shows the progress bar, or updates it: `step` of `steps`, and a text behind the bar."""
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
        self._bar.update(  # 0: the bar's only task, which `add_task` has added
            0, completed=step, description=self._printable(f"step {text}"), refresh=True
        )

    def answered(self, part: str, done: int, total: int) -> None:
        """Notes that `done` of the `total` questions of an evaluation's `part` are answered. Called
        with 1, 2, ... up to `total`, which begins again with each part. Prints a line with the
        estimated time after 2 s, if 10 s or more are left, then every 10 s until none is left.

        >>> console.answered("held_out, greedy", 120, 500)
        held_out, greedy: 120 of 500, 0:48 left
        """
        now = self._clock()
        if done == 1:
            self._answers, self._due = Pace(now, window=total), now + FIRST_ANSWERS_SECONDS
        self._answers.mark(now, done)
        left = self._answers.seconds_left(total - done)
        if now >= self._due and left:
            self._due = now + ANSWERS_SECONDS
            if left >= ANSWERS_SECONDS or now - self._answers.start >= ANSWERS_SECONDS:
                self._write(f"{one_line(part)}: {done} of {total}, {duration(left)} left")

    def evaluation(self, name: str, figures: Mapping[str, Any]) -> None:
        """Prints the figures of one data set, with their number of questions and protocol.

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
        changes: RewardChanges = NO_CHANGES,
    ) -> None:
        """Prints the end of a run: the table of figures before and after training, a line for each
        of the `facts` that is not "", and a question that was wrong before and right after.

        `before`, `after`: data set -> its figures, as given to `evaluation`. `solved`: the groups
        of that question before and after, or None. `changes`: those of the reward during the run; a
        figure that depends on what changed has no change in the table."""
        rows = summary_rows(before, after, changes)
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
        """Ends the progress bar and leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_once(self, text: str, style: str) -> bool:
        """Writes a line to screen and log, unless it was written so before. Returns True if it was
        written now."""
        if text in self._once:
            return False
        self._once.add(text)
        self._write(text, style)
        return True

    def _write(self, text: str, style: str = "") -> None:
        """Writes a text to the screen, with escapes for what it cannot show, and to the log."""
        self.keep(text)
        if self._rich is not None:
            from rich.text import Text  # Text, not markup: a model's "[bold]" stays what it is

            self._rich.print(Text(self._printable(text), style=style))
            return
        self._stream.write(self._printable(text) + "\n")
        self._stream.flush()

    def _printable(self, text: str) -> str:
        """Returns a text in which everything that the stream cannot show is escaped."""
        return printable(text, getattr(self._stream, "encoding", None) or "utf-8")


class Pace:
    """Estimates the time that is left from the mean duration of the last steps. The first step, and
    steps that compile a program, are left out, because they would make the estimate jump."""

    def __init__(self, start: float, window: int = 20) -> None:
        """`start`: the time now, in seconds of the clock that `mark` gets; `window`: how many of
        the last calls of `mark` count."""
        self.start = self._last = start  # `_last`: when `mark` was called last
        self._done = 0
        # (seconds, number of steps, whether one compiled a program)
        self._steps: deque[tuple[float, int, bool]] = deque(maxlen=window)

    def mark(self, now: float, done: int, compiled: bool = False) -> None:
        """Notes that at the time `now` `done` steps have been made in all; `compiled`: one of those
        since the last call compiled a program. The first call only says from when on and from which
        step on the pace is measured."""
        if self._done:
            self._steps.append((now - self._last, done - self._done, compiled))
        self._last, self._done = now, done

    def seconds_left(self, number: int) -> float | None:
        """Returns the estimated seconds for `number` more steps. None as long as there is no step
        after the first, or each of them has compiled something, except if there were more than five
        of them: then compiling is part of the run's pace."""
        usual = [step for step in self._steps if not step[2]]  # [2]: it compiled a program
        if not usual and len(self._steps) > 5:
            usual = list(self._steps)
        total_seconds = 0
        num_steps = 0
        for seconds, steps, _ in usual:
            total_seconds += seconds
            num_steps += steps
        return total_seconds / num_steps * number if num_steps else None


def printable(text: str, encoding: str = "utf-8") -> str:
    """Returns a text in which control characters (except line ends and tabs), characters that
    change the direction of text, and characters that `encoding` lacks are escapes."""

    def as_escape(control: re.Match[str]) -> str:
        return control[0].encode("unicode_escape").decode()

    return _CONTROL.sub(as_escape, text).encode(encoding, "backslashreplace").decode(encoding)


_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")
"""Control characters, except tab and line end, and characters that change the direction of text."""


def prompt_text(prompt: Prompt) -> str:
    """Returns a prompt for people to read: a text unchanged, messages one below the other, each as
    "role name (reward): content", and below it its tool calls, as "calls name(arguments)"."""
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
    """Returns completion `number` of a group for people to read: its text or, for a rollout with
    turns, its messages one below the other."""
    messages = group.completions[number].messages
    if not messages:
        return group.texts[number]
    return prompt_text([dict(message) for message in messages])
