"""Progress of a run's steps and of an evaluation's questions: the kept lines, the live line, the time that is left."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.report.figures import duration, step_figures

LINES_A_RUN = 40
FIRST_STEPS = 3
QUIET_SECONDS = 60.0
"""A run prints its first steps, then about LINES_A_RUN lines at equal distances; at least one a minute."""


class Pace:
    """The time that is left, by the mean duration of the last steps. The first step, and steps that compile a program,
    are left out, since they would make it jump."""

    def __init__(self, start: float, window: int = 20) -> None:
        self.start = self._last = start
        self._done = 0
        self._steps: deque[tuple[float, int, bool]] = deque(maxlen=window)  # seconds, number of steps, compiled

    def mark(self, now: float, done: int, compiled: bool = False) -> None:
        """`done` steps have been made; `compiled`: the last of them compiled a program."""
        if self._done:
            self._steps.append((now - self._last, done - self._done, compiled))
        self._last, self._done = now, done

    def left(self, number: int) -> float | None:
        """Seconds for so many steps more; None until a step after the first has compiled nothing."""
        usual = [step for step in self._steps if not step[2]]
        if not usual and len(self._steps) > 5:  # every step compiles: that is this run's pace
            usual = list(self._steps)
        done = sum(step[1] for step in usual)
        return sum(step[0] for step in usual) / done * number if done else None


class StepLines:
    """Prints steps: lines that stay, at equal distances, by `write`, and on a terminal (`live`) one that is updated in
    place."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float], live: LiveLine | None = None) -> None:
        self._write, self._clock, self._live = write, clock, live
        self._pace = Pace(clock())
        self._printed_at = -math.inf
        self._programs = 0.0

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Step `step` (from 1) of `steps` has been made."""
        now, programs = self._clock(), metrics.get("compilations", 0)
        compiled = round(programs - self._programs)
        self._pace.mark(now, step, compiled=compiled > 0)
        self._programs = programs
        times, left = f"{duration(now - self._pace.start)} elapsed", self._pace.left(steps - step)
        if left is not None:
            times += f", {duration(left)} left"
        figures = step_figures(metrics, compiled)
        if self._is_kept(step, steps, now):
            self._printed_at = now
            self._write("  ".join([f"step {step}/{steps}", times, *figures]))
        if self._live:
            self._live.update(step, steps, [f"{step}/{steps}", times, *figures])

    def stop(self) -> None:
        """Takes the live line away until the next step."""
        if self._live:
            self._live.stop()

    def _is_kept(self, step: int, steps: int, now: float) -> bool:
        every = max(1, math.ceil(steps / LINES_A_RUN))
        return step <= FIRST_STEPS or step >= steps or step % every == 0 or now - self._printed_at >= QUIET_SECONDS


def fitting(parts: Sequence[str], width: int) -> str:
    """As many of the parts, from the first, as fit a width in characters; the first is cut where it does not.

    >>> fitting(["3/80", "0:05 elapsed", "reward 0.41"], 20)
    '3/80  0:05 elapsed'
    """
    line = parts[0][:max(width, 1)]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line


FIRST_ANSWERS_SECONDS, ANSWERS_SECONDS = 2.0, 10.0
"""When an evaluation first prints how long it will take, and how often it does from then on."""


class AnswerLines:
    """Prints how many questions of an evaluation's part have been answered, and the time that is left."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._pace, self._due = Pace(clock()), 0.0

    def answered(self, part: str, done: int, total: int) -> None:
        """`done` (one more at each call) of the part's `total` questions: a line after 2 s where 10 s or more are left,
        then every 10 s."""
        now = self._clock()
        if done == 1:
            self._pace, self._due = Pace(now, window=total), now + FIRST_ANSWERS_SECONDS
        self._pace.mark(now, done)
        left = self._pace.left(total - done)
        if now >= self._due and left:
            self._due = now + ANSWERS_SECONDS
            if left >= ANSWERS_SECONDS or now - self._pace.start >= ANSWERS_SECONDS:
                self._write(f"{part}: {done} of {total}, {duration(left)} left")


class LiveLine:
    """A progress bar of rich with a text that fits the terminal, updated in place; `stop` takes it away."""

    def __init__(self, console: Any, printable: Callable[[str], str]) -> None:
        self._console, self._printable = console, printable
        self._live: Any = None

    def update(self, step: int, steps: int, parts: Sequence[str]) -> None:
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        width = 20 if self._console.width >= 100 else 8
        text = self._printable(fitting(parts, max(self._console.width - width - 9, 10)))
        line = Table.grid(padding=(0, 1))
        line.add_row("step", ProgressBar(max(steps, 1), step, width), Text(text, no_wrap=True, overflow="crop"))
        self._live.update(line, refresh=True)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = None
