"""Counts JAX's compilations in this process, and gives freed memory back after long ones."""

from __future__ import annotations

import jax

from shoal.mesh import return_freed_memory

_COMPILATION_EVENT = "/jax/core/compile/backend_compile_duration"

_num_compilations = 0

TRIMMED_SECONDS = 0.5
"""If a compilation takes longer than this, freed memory is given back to the system afterwards; a
shorter one leaves little."""


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    """Counts an event of JAX if it is a compilation, and gives freed memory back to the system
    after a long one. `duration_secs`: how long the event took. `_`: further facts of the event,
    which are not read."""
    global _num_compilations
    if event != _COMPILATION_EVENT:
        return
    _num_compilations += 1
    if duration_secs > TRIMMED_SECONDS:
        return_freed_memory()


jax.monitoring.register_event_duration_secs_listener(_listen)


class CompilationCounter:
    """Counts the programs that this process has compiled, or read from the persistent cache, since
    the counter was made."""

    def __init__(self) -> None:
        self._start = _num_compilations

    def read(self) -> int:
        """Returns the number of programs so far."""
        return _num_compilations - self._start
