"""math-verify in supervised worker processes, where no text can keep it busy for ever.

math-verify gives a model's text to a parser and to sympy, which some texts keep busy for ever. So each check has a
limit of processor time and memory: at the limit its process ends, the answer counts as wrong, and another process
replaces it. math-verify is imported by the process that supervises the workers, never by the one that trains.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from shoal.types import ShoalError
from shoal.workers.pool import Limits, WorkerPool
from shoal.workers.process import Header

CPU_SECONDS = 3.0
"""Processor time of one check."""
WALL_SECONDS = 30.0
"""Time of one check by the clock: a machine that is busy with other things gets it."""
MEMORY_BYTES = 2**30
NUM_WORKERS = 4
CHECKS_A_WORKER = 5000
"""After so many checks sympy's caches take room, and a fresh process takes the worker's place."""
_NUM_CACHED = 20_000
"""Above so many results the cache is emptied."""

Pair = tuple[str, str]
"""(gold, answer)"""


def require_math_verify() -> None:
    """ShoalError where it is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ShoalError("task math checks answers with math-verify, which is not installed: pip install 'shoal[math]'")


@functools.cache
def _checker(process: int) -> Checker:
    return Checker()


def checker() -> Checker:
    """The checker of this process; a forked one starts another."""
    return _checker(os.getpid())


class Checker:
    """Worker processes that compare answers, several at a time; forked when they are needed, their results cached.

    >>> Checker().ask([("x^2", "x x"), ("1", "9^{9^{9^{9}}}")])
    [True, None]
    """

    def __init__(self, num_workers: int = NUM_WORKERS, cpu_seconds: float = CPU_SECONDS) -> None:
        self.num_workers = max(1, min(num_workers, os.cpu_count() or 1))
        self.cpu_seconds = cpu_seconds
        self._workers: WorkerPool | None = None
        self._next_call = 0
        self._cache: dict[tuple[str, ...], bool | None] = {}
        self._lock = threading.Lock()

    def ask(self, pairs: Sequence[Pair], how: str = "answer") -> list[bool | None]:
        """True if (gold, answer) are the same; None where a check was ended at its limit or failed.

        How the two texts are read: `answer`, each as an answer alone; `trl`, a solution and a whole completion, as by
        TRL's `accuracy_reward`: None where the solution has no answer that can be read, False at the limit."""
        keys: list[tuple[str, ...]] = [(how, *pair) for pair in pairs]
        with self._lock:
            if len(self._cache) > _NUM_CACHED:
                self._cache.clear()
            fresh = [key for key in dict.fromkeys(keys) if key not in self._cache]
            self._cache.update(zip(fresh, self._check(fresh), strict=True))
            return [self._cache[key] for key in keys]

    def close(self) -> None:
        """Ends the processes."""
        if self._workers is not None:
            self._workers.close()
        self._workers = None

    def _check(self, keys: Sequence[tuple[str, ...]]) -> list[bool | None]:
        """Results by math-verify. Where the supervisor was killed or is stuck, the rest counts as ended at the limit,
        and the next check starts another."""
        results: list[bool | None] = [False if key[0] == "trl" else None for key in keys]
        limits = Limits(self.num_workers, WALL_SECONDS, MEMORY_BYTES)
        if keys and self._workers is None:
            self._workers = WorkerPool(_Handler(self.cpu_seconds).check, limits, prepare=_import_math_verify)
        first, self._next_call = self._next_call, self._next_call + len(keys)
        left = set(range(len(keys)))
        deadline = time.monotonic() + limits.most_seconds * (1 + len(keys) / self.num_workers)
        try:
            for i, key in enumerate(keys):
                assert self._workers is not None
                self._workers.submit(first + i, {"texts": key})
            while left and self._workers is not None and time.monotonic() < deadline:
                for call, reply in self._workers.receive(1.0):
                    if call - first in left:  # not of a check that an interrupt ended
                        left.discard(call - first)
                        if "unusable" in reply:
                            raise ShoalError(f"math-verify cannot be used ({reply['unusable']}): "
                                             f"pip install 'shoal[math]'")
                        results[call - first] = reply.get("same", results[call - first])
        except (EOFError, ConnectionError, TimeoutError):
            pass
        except BaseException:  # a stop may fall between two halves of a frame: other runs of this process start anew
            self.close()
            raise
        if left:
            self.close()
        return results


# ---- in a worker


_unusable = ""
"""Why math-verify cannot be imported."""


def _import_math_verify() -> None:
    """In the supervisor, so that a worker that takes another's place starts at once."""
    global _unusable
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    logging.disable()
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

        verify(parse("\\boxed{1}", parsing_timeout=0), parse("\\boxed{1}", parsing_timeout=0), timeout_seconds=None)
    except Exception as error:
        _unusable = f"{type(error).__name__}: {error}".replace("\n", " ")


class _Handler:
    """Compares the texts that a worker is sent."""

    def __init__(self, cpu_seconds: float) -> None:
        self.cpu_seconds = cpu_seconds
        self.num_checks = 0

    def check(self, header: Header, body: bytes) -> Header:
        """`same`: True, False or None; left out where the check failed."""
        if _unusable:
            return {"unusable": _unusable}
        how, gold, answer = header["texts"]
        self.num_checks += 1
        signal.setitimer(signal.ITIMER_PROF, self.cpu_seconds)  # at its end the system ends the process
        try:
            reply: Header = {"same": _same_as_trl(gold, answer) if how == "trl" else _same(gold, answer)}
        except (Exception, RecursionError):
            reply = {}
        signal.setitimer(signal.ITIMER_PROF, 0)
        return {**reply, "spent": self.num_checks >= CHECKS_A_WORKER}


def _same(gold: str, answer: str) -> bool:
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    golds, answers = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (gold, answer))
    return bool(golds and answers and verify(golds, answers, timeout_seconds=None))


def _same_as_trl(solution: str, completion: str) -> bool | None:
    """TRL reads any answer of a solution, but only LaTeX in a completion, a box before all else."""
    from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingImports]

    golds: list[Any] = parse(solution, parsing_timeout=0)
    if not golds:
        return None
    config = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False,
                                   normalization_config=_with_units())
    answers = parse(completion, extraction_config=[config], extraction_mode="first_match", parsing_timeout=0)
    return bool(verify(golds, answers, timeout_seconds=None))


def _with_units() -> Any:
    from latex2sympy2_extended import NormalizationConfig  # pyright: ignore[reportMissingImports]

    return NormalizationConfig(units=True)
