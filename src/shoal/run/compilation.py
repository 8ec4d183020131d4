"""Counts compilations, so that a shape that varies when it should not is seen."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    _count += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)


class CompilationCounter:
    """Programs that this process has compiled (or read from the persistent cache) since the counter was made."""

    def __init__(self) -> None:
        self._start = _count

    def read(self) -> int:
        return _count - self._start
