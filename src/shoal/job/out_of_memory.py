"""Explains an error of memory that ran out in one line: what a device held, and the keys to
change."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.budget.advice import (
    lossy_changes,
    memory_saving_changes,
    plain_changes,
    saving_trials,
)
from shoal.budget.budget import Budget, ProgramCost, parts_text
from shoal.config.train import Config
from shoal.job.job import Job
from shoal.job.memory import job_budget
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.weights.source import ModelSource, planned_architecture


def explain_out_of_memory(error: BaseException, config: Any) -> ShoalError | None:
    """Returns a ShoalError that explains `error` with the keys to change and, for a training run,
    what a device held, if `error` or one of its causes says that a device or the machine ran out of
    memory; else None. It is returned, not raised."""
    seen: BaseException | None = error
    while seen is not None and not _is_out_of_memory(seen):
        seen = seen.__cause__ or seen.__context__
    if seen is None:
        return None
    # As in `trying to allocate 4294967296 bytes` or `Attempting to reserve 5.25G`.
    asked = re.search(
        r"(?:allocat\w*|Attempting to reserve)\s+((\d+(?:\.\d+)?) ?(?:bytes|([KMGT]?)i?B)?)",
        str(seen),
    )
    what = ""
    size = 0.0
    if asked:
        what = f" ({asked[1].strip()} more were requested)"
        # K is 1024 bytes, M 1024 K, ...; without a prefix the number is of bytes.
        size = float(asked[2]) * 1024 ** " KMGT".index(asked[3] or " ")
    changes = plain_changes(config)
    held = ""
    advice = "; ".join(change.words(config) for change in changes)
    key = ""
    if changes:
        key = changes[0].key
    if isinstance(config, Config):
        # This fails if there is no memory for it either, or if devices belong to other processes.
        # The message then has the keys without what they save.
        with contextlib.suppress(ShoalError, MemoryError, RuntimeError):
            held, advice, key = _by_phase(config, round(size))
    return ShoalError(f"memory ran out{what}{held}. In this order: {advice}", key)


def _by_phase(config: Config, asked: int) -> tuple[str, str, str]:
    """Returns (text that says what a device holds in the phase that needs more, sampling or update;
    text with changes of keys that save memory in each phase; the key of the first change). `asked`:
    bytes that the failed allocation wanted. ShoalError if no key saves memory."""
    # No folder: nothing of the model is read.
    spec = ModelSource(Path(), planned_architecture(config.model))
    with Job(config, Console(io.StringIO()), model_source=spec) as job:
        budget = job_budget(job)
        update = _of_program(budget, "accumulate")
        sampling = _of_program(budget, "decode")
        held = parts_text(max(update, sampling, key=Budget.peak))
        update = _with_extra(update, max(asked, budget.activations))
        sampling = _with_extra(sampling, asked)

        def describe_update(other: Config) -> Budget:
            return _of_program(job.budget_for(other), "accumulate")

        def describe_sampling(other: Config) -> Budget:
            return _of_program(job.budget_for(other), "decode")

        # Changes that alter no result come first, for both phases, then those that do.
        trials = saving_trials(update, describe_update, memory_saving_changes(update))
        trials += saving_trials(sampling, describe_sampling, memory_saving_changes(sampling))
        trials += saving_trials(update, describe_update, lossy_changes(update))
        trials += saving_trials(sampling, describe_sampling, lossy_changes(sampling))
    lines: dict[str, str] = {}
    for trial in trials:
        lines.setdefault(trial.change.key, trial.text())
    if not lines:
        raise ShoalError("no key takes less")
    return f"; in addition, a device holds {held}", "; ".join(lines.values()), next(iter(lines))


def _of_program(budget: Budget, program: str) -> Budget:
    """Returns the budget as if the job ran only this program."""
    return replace(budget, programs={program: budget.programs[program]})


def _with_extra(budget: Budget, extra: int) -> Budget:
    """Returns the budget with `extra` bytes for each of its programs besides what roles hold. The
    given budget is not changed."""
    costs = {program: ProgramCost(extra_bytes=extra) for program in budget.programs}
    return replace(budget, costs=costs)


def _is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory ran out, on the machine or on a device. Causes of the error
    are not searched."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError") and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    )
