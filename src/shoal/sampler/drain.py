"""Runs an engine until nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.sampler.engine import Engine
from shoal.types import Completion


def run_until_idle(engine: Engine) -> Iterator[tuple[int, list[Completion]]]:
    """Runs an engine until nothing is left; yields each request's id with its completions as it
    finishes."""
    while not engine.idle:
        yield from engine.step().items()


def drain(engine: Engine) -> dict[tuple[int, int], Completion]:
    """Runs an engine until nothing is left; the completions by (request, index)."""
    return {
        (id, one.index): one for id, completions in run_until_idle(engine) for one in completions
    }
