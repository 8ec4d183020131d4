"""The answer to memory that ran out while a job ran: the plan's advice, for the devices here."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.config.schema import Config
from shoal.run.plan.advice import other_results, smaller
from shoal.run.plan.figures import Figures, parts_text
from shoal.run.plan.job import Job, planned_architecture
from shoal.run.plan.predict import NOTHING, kept_bytes
from shoal.run.preflight.memory import savings_text
from shoal.types import ShoalError

LARGEST = {"update": "accumulate", "sampling": "decode"}
"""Phase -> the program that needs most in it."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def explain_out_of_memory(error: BaseException, config: Any) -> ShoalError | None:
    """An error in one line with the keys to change, if a device or the machine ran out of memory; else None."""
    seen: BaseException | None = error
    while seen is not None and not _is_out_of_memory(seen):
        seen = seen.__cause__ or seen.__context__
    if seen is None:
        return None
    asked = re.search(r"(?:allocat\w*|Attempting to reserve)\s+(([\d.]+) ?(?:bytes|([KMGT]?)i?B|B)?)", str(seen))
    what = f" ({asked[1].strip()} more were asked for)" if asked else ""
    size = float(asked[2].rstrip(".")) * _UNITS[asked[3] or ""] if asked else 0.0
    held, advice, key = "", savings_text(config), "batch.micro_tokens"
    if isinstance(config, Config):
        # No memory for the answer either, or devices of other processes: the keys alone.
        with contextlib.suppress(ShoalError, MemoryError, RuntimeError):
            held, advice, key = _plan_lines(config, _phases(seen), round(size))
    return ShoalError(f"memory ran out{what}{held}. In this order: {advice}", key)


def _plan_lines(config: Config, phases: Sequence[str], asked: int) -> tuple[str, str, str]:
    """What a device holds in the fullest of some phases, the changes that take less in any, and the first one's key."""
    lines, held = {}, {}
    found = Job(config, "")
    config, job = found.config, found.describe()
    for phase in phases:
        def describe(other: Config, phase: str = phase) -> Mapping[str, Any]:
            return _of_phase(Job(other, "").describe(), phase)

        own = _of_phase(job, phase)
        size = max(asked, kept_bytes(job, planned_architecture(config.model)) if phase == "update" else 0)
        bare = Figures(config, own, {})
        held[bare.peak] = parts_text(bare)
        figures = Figures(config, own, {LARGEST[phase]: {**NOTHING, "extra_bytes": size}})
        for one in smaller(figures, describe):
            lines.setdefault(one.change.key, one.text())
    last = {change.key for change in other_results(config, job)}  # of all phases, after what changes no result
    keys = sorted(lines, key=lambda key: key in last)
    return f"; besides, a device holds {held[max(held)]}", "; ".join(lines[key] for key in keys), next(iter(keys), "")


def _of_phase(job: Mapping[str, Any], phase: str) -> dict[str, Any]:
    """The job with that program alone which needs most in a phase."""
    name = LARGEST[phase]
    return {**job, "programs": {name: job["programs"][name]}, "peak_flops": None}


def _phases(error: BaseException) -> Sequence[str]:
    """The phase of a step in which an error was raised; all where its traceback does not say."""
    files = " ".join(frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__))
    places = {"shoal/sampler/": "sampling", "shoal/trainer/step": "update", "shoal/trainer/update": "update"}
    return [phase for place, phase in places.items() if place in files] or tuple(LARGEST)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError") and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower())
