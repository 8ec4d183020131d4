"""Compiles the update for batches that later steps may need, in a thread, while training goes on.

A step's shape is a function of its own data (`choose_shape`), so the first long completion of a run is met at any step:
compiled there, it took 4 s where a step took 0.3. What is compiled here changes no shape and no result, only when.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from shoal.trainer.batch import Shape, bucket

LEAST_STEPS = 20
"""A shorter run seldom meets a new shape after its first steps."""


class AheadCompiler:
    """Calls `compile(prefix, length)` in a thread, once for each pair that is likely to be needed: the prompt buckets
    that were seen, with the completion buckets that were seen and the next longer one, up to `max_tokens`."""

    def __init__(self, compile: Callable[[int, int], None], max_tokens: int) -> None:
        self._compile, self._max_tokens = compile, max_tokens
        self._prefixes: set[int] = set()
        self._lengths: set[int] = set()
        self._futures: dict[tuple[int, int], Future[None] | None] = {}  # None: the step itself has compiled it
        self._pool = ThreadPoolExecutor(1, "compile ahead")

    def begin_step(self, shape: Shape) -> None:
        """Waits for the step's own shape if it is being compiled now; one that has not been begun is the step's."""
        future = self._futures.get((shape.prefix, shape.length))
        if future and not future.cancel():
            wait([future])  # what it raises, the step raises itself when it compiles again

    def end_step(self, shape: Shape) -> None:
        """Queues what later steps may need."""
        self._futures.setdefault((shape.prefix, shape.length), None)
        self._prefixes.add(shape.prefix)
        self._lengths |= {shape.length, bucket(min(shape.length + 1, self._max_tokens))}
        for sizes in ((prefix, length) for length in sorted(self._lengths) for prefix in sorted(self._prefixes)):
            if sizes not in self._futures:
                self._futures[sizes] = self._pool.submit(self._compile, *sizes)

    def close(self) -> None:
        """Returns when the thread has ended: one that still compiles would abort the process at its exit."""
        self._pool.shutdown(cancel_futures=True)
