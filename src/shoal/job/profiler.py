"""Traces chosen steps of a run with JAX's profiler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


class Profiler:
    """Writes a trace of each chosen step, counted from 1, to `<folder>/step_000012/`, for XProf,
    TensorBoard and Perfetto.

    A step that has a trace already is not traced again. If a trace cannot be written, `warn` is
    called and training continues.

    >>> with profiler.step(12):
    ...     train_one_step()
    """

    def __init__(self, steps: Collection[int], folder: Path, warn: Callable[[str], None]) -> None:
        """`steps`: the steps to trace, counted from 1. `folder`: gets a subfolder for each traced
        step. `warn`: called with a text if a trace cannot be written."""
        self.steps = frozenset(steps)
        self.folder = folder
        self.warn = warn

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Returns a context that traces its block if `step` (counted from 1) was chosen and has no
        trace yet, and closes the trace however the block ends. If no trace can be started, the
        block runs without one."""
        target = self.folder / f"step_{step:06d}"
        # Files are there already if an earlier start of the run traced this step.
        is_traced = step in self.steps and not any(target.rglob("*"))
        if is_traced:
            is_traced = self._attempt(step, self._start, target)
        if not is_traced:
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
        """Calls `action(*arguments)` and returns True. If it raises RuntimeError or OSError, warns
        that `step` has no trace and returns False."""
        try:
            action(*arguments)
        except (RuntimeError, OSError) as error:
            self.warn(f"no profiler trace of step {step}: {error}")
            return False
        return True
