"""Whether a job fits the memory of its devices before it runs, and what to change where it ran out."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.config.schema import Config
from shoal.mesh import Roles, available_devices
from shoal.model.architecture import Architecture
from shoal.model.transformer import Model
from shoal.report.findings import Finding, gib
from shoal.run.advice import Describe, fitting, other_results, plain_changes, smaller
from shoal.run.figures import PHASES, Figures, parts_text, resolved
from shoal.run.loading import planned_architecture
from shoal.run.outline import outline, outline_here
from shoal.run.predict import NOTHING, kept_bytes
from shoal.run.size import AvailableMemory, available_memory
from shoal.types import ShoalError

TIGHT = 0.9
"""Share of the free memory above which a job is tight."""

LARGEST = {"update": "accumulate", "sampling": "decode"}
"""Phase -> the program that needs most in it."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def describer(a: Architecture) -> Describe:
    """Describes other jobs for a model on the devices here."""
    return lambda config: outline_here(config, a, available_devices(config.mesh))


def check_memory(config: Config, model: Model, roles: Roles) -> Finding:
    """Whether what is known before compilation fits; ShoalError if it exceeds all of a device's memory."""
    job = outline(config, model, roles, available_devices(config.mesh))
    figures = Figures(resolved(config, job), job, {})
    available = available_memory(roles.trainer.mesh.devices.flat)
    found, _ = judge_memory(figures, available, describer(model.architecture), "at least")
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


# ---- memory that ran out


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
    plain = list(plain_changes(config))
    held, advice, key = "", "; ".join(change.words(config) for change in plain), plain[0].key if plain else ""
    if isinstance(config, Config):
        # No memory for the answer either, or devices of other processes: the keys alone.
        with contextlib.suppress(ShoalError, MemoryError, RuntimeError):
            held, advice, key = _phase_lines(config, _phases(seen), round(size))
    return ShoalError(f"memory ran out{what}{held}. In this order: {advice}", key)


def _phase_lines(config: Config, phases: Sequence[str], asked: int) -> tuple[str, str, str]:
    """What a device holds in the fullest of some phases, the changes that take less in any, and the first one's key."""
    lines, held = {}, {}
    a = planned_architecture(config.model)
    describe = describer(a)
    job = describe(config)
    config = replace(config, batch=replace(config.batch, micro_tokens=job["micro_tokens"]))
    for phase in phases:
        own = _of_phase(job, phase)
        bare = Figures(config, own, {})
        held[bare.peak] = parts_text(bare)
        size = max(asked, kept_bytes(job, a) if phase == "update" else 0)
        figures = Figures(config, own, {LARGEST[phase]: {**NOTHING, "extra_bytes": size}})
        for one in smaller(figures, lambda other, phase=phase: _of_phase(describe(other), phase)):
            lines.setdefault(one.change.key, one.text())
    last = {change.key for change in other_results(config, job)}  # of all phases, after what changes no result
    keys = sorted(lines, key=lambda key: key in last)
    return f"; besides, a device holds {held[max(held)]}", "; ".join(lines[key] for key in keys), next(iter(keys), "")


def _of_phase(job: Mapping[str, Any], phase: str) -> dict[str, Any]:
    """The job with that program alone which needs most in a phase."""
    name = LARGEST[phase]
    return {**job, "programs": {name: job["programs"][name]}}


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
