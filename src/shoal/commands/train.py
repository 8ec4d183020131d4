"""`shoal train`: starts a run, or resumes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from shoal.config.schema import Config
from shoal.report.console import Console
from shoal.report.figures import one_line
from shoal.report.folder import read_summary
from shoal.run.assembly import assemble_run
from shoal.run.resume import resolve_run
from shoal.tasks.task import Task
from shoal.types import ShoalError


def train(config: Config, reward_functions: Sequence[Callable] = (), console: Console | None = None,
          task: Task | None = None) -> dict[str, Any]:
    """Returns the run's summary, which its folder holds too. A run that its folder shows unfinished is resumed, one
    that has made its steps is left as it is."""
    with console or Console() as console, ExitStack() as stack:
        plan = resolve_run(config, console)
        summary = read_summary(plan.run) if plan.run else None
        if summary and summary["steps"] == plan.config.steps:
            console.note(f"{plan.run} has made its {plan.config.steps} steps already: give more steps to continue, "
                         "or another run_name")
            return summary
        try:
            run = assemble_run(plan, reward_functions, console, stack, task)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped before the first step: give the same command again") from None
        try:
            return run.train()
        except (ShoalError, KeyboardInterrupt) as error:
            console.keep(one_line(error))  # the command prints it
            raise
