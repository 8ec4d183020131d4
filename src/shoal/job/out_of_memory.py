"""Memory that ran out, in one line: what a device held, and the keys to change."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.budget.advice import lossy_changes, memory_trials, plain_changes
from shoal.budget.budget import Budget, parts_text
from shoal.config.train import Config
from shoal.job.job import Job, memory_report
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.weights.source import ModelSource, planned_architecture


def explain_out_of_memory(error: BaseException, config: Any) -> ShoalError | None:
    """An error in one line with the keys to change, if a device or the machine ran out of memory;
    else None."""
    seen: BaseException | None = error
    while seen is not None and not _is_out_of_memory(seen):
        seen = seen.__cause__ or seen.__context__
    if seen is None:
        return None
    asked = re.search(
        r"(?:allocat\w*|Attempting to reserve)\s+((\d+(?:\.\d+)?) ?(?:bytes|([KMGT]?)i?B)?)",
        str(seen),
    )
    what = f" ({asked[1].strip()} more were asked for)" if asked else ""
    size = float(asked[2]) * 1024 ** " KMGT".index(asked[3] or " ") if asked else 0.0
    plain = list(plain_changes(config))
    held, advice, key = (
        "",
        "; ".join(change.words(config) for change in plain),
        plain[0].key if plain else "",
    )
    if isinstance(config, Config):
        # No memory for the answer either, or devices of other processes: the keys alone.
        with contextlib.suppress(ShoalError, MemoryError, RuntimeError):
            held, advice, key = _by_phase(config, round(size))
    return ShoalError(f"memory ran out{what}{held}. In this order: {advice}", key)


def _by_phase(config: Config, asked: int) -> tuple[str, str, str]:
    """What a device holds in the fuller of sampling and update, the changes that take less in any
    of them where so many bytes more are needed, and the first one's key."""
    spec = ModelSource(Path(), planned_architecture(config.model))
    with Job(config, Console(io.StringIO()), spec=spec) as job:
        found = memory_report(job)
        extra = {"accumulate": max(asked, found["activations"]), "decode": asked}
        bare = {name: Budget(job.config, _alone(found, name), {}) for name in extra}
        phases = {
            name: replace(one, programs={name: {"error": "", "extra_bytes": extra[name]}})
            for name, one in bare.items()
        }
        held = parts_text(max(bare.values(), key=lambda one: one.peak))
        lines: dict[str, str] = {}
        for kind in (memory_trials, lossy_changes):  # of all phases, before what changes results
            for name, one in phases.items():
                for trial in kind(one, lambda other, name=name: _alone(job.described(other), name)):
                    lines.setdefault(trial.change.key, trial.text())
    if not lines:
        raise ShoalError("no key takes less")
    return f"; besides, a device holds {held}", "; ".join(lines.values()), next(iter(lines))


def _alone(job: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A job's outline with one of its programs alone."""
    return {**job, "programs": {name: job["programs"][name]}}


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError") and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    )
