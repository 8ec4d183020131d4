"""Counts compilations, which shows shapes that vary when they should not."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    _count += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)


class CompilationCounter:
    """Counts the programs that this process compiles, or reads from the persistent cache, from its creation on."""

    def __init__(self) -> None:
        self._start = _count

    def read(self) -> int:
        return _count - self._start
