"""Profiler traces of chosen steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


class Profiler:
    """Traces the chosen steps, counted from 1, to `<folder>/step_000012/`, for XProf, TensorBoard and Perfetto.

    A step that has a trace is not traced again. A trace that cannot be written is a warning.

    >>> with profiler.step(12):
    ...     train_one_step()
    """

    def __init__(self, steps: Collection[int], folder: Path, warn: Callable[[str], None]) -> None:
        self.steps = frozenset(steps)
        self.folder = folder
        self.warn = warn

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Traces the block, if this step was chosen, and closes the trace however the block ends."""
        target = self.folder / f"step_{step:06d}"
        if step not in self.steps or any(target.rglob("*")) or not self._attempt(step, self._start, target):
            yield
            return
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                yield
        finally:
            self._attempt(step, jax.profiler.stop_trace)

    def _start(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(target)

    def _attempt(self, step: int, action: Callable[..., None], *arguments: Path) -> bool:
        try:
            action(*arguments)
        except (RuntimeError, OSError) as error:
            self.warn(f"no profiler trace of step {step}: {error}")
            return False
        return True
