"""Whether a job fits the memory of its devices, as far as it is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.report.findings import Finding, gib
from shoal.run.advice import Describe, fitting
from shoal.run.figures import PHASES, Figures, outline, parts_text
from shoal.run.size import AvailableMemory, available_memory
from shoal.types import ShoalError

if TYPE_CHECKING:
    from shoal.run.job import Job

TIGHT = 0.9
"""Share of the free memory above which a job is tight."""


def check_memory(job: Job) -> Finding:
    """Whether what is known before compilation fits; ShoalError if it exceeds all of a device's memory."""
    figures = Figures(job.config, outline(job), {})
    available = available_memory(job.roles.trainer.mesh.devices.flat)
    found, _ = judge_memory(figures, available, job.described, "at least")
    if found.level == "wrong" and figures.peak * available.sharing > available.total:
        raise ShoalError(found.text)
    return found


def judge_memory(figures: Figures, available: AvailableMemory, describe: Describe,
                 bound: str = "at most") -> tuple[Finding, str]:
    """Whether a job fits: what each device needs and has, and, if that is tight, what to change, besides as the text of
    its own. `bound`: `at least` where activations are unknown."""
    shared = f" on each of {available.sharing} devices that share it" if available.sharing > 1 else ""
    text = f"{bound} {gib(figures.peak)}{shared}, in the {PHASES[figures.fullest][0]} phase ({parts_text(figures)})"
    if not available.free:
        return Finding("memory", "ok", f"{text}; the device does not report its memory"), ""
    text += f"; {gib(available.free)} of {gib(available.total)} free ({available.where})"
    free = available.free / available.sharing
    if figures.peak <= TIGHT * free:
        return Finding("memory", "ok", text), ""
    advice = fitting(figures, describe, TIGHT * free)
    level, word = ("wrong", "too little") if figures.peak > free else ("warning", "tight")
    return Finding("memory", level, f"{word}: {text}. {advice['text']}", advice["key"]), advice["text"]
