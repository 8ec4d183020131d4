"""Processes that compile side by side, each with an environment for devices that are not here."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from shoal.mesh.topology import ENVIRONMENT
from shoal.run.plan.worker import answer
from shoal.types import ShoalError

Request = dict[str, Any]


class Compilers:
    """Answers the requests of `worker`; `count` processes at most work at once. Without a topology this process itself
    answers, for its own devices."""

    def __init__(self, count: int, topology: str) -> None:
        self.count, self.topology = count, topology
        self._idle: queue.LifoQueue[_Compiler] = queue.LifoQueue()
        self._started: list[_Compiler] = []

    def answer(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """The answers, in the order of the requests."""
        if not self.topology:
            return [answer(request) for request in requests]
        with ThreadPoolExecutor(max(1, min(self.count, len(requests)))) as threads:
            return list(threads.map(self._answer, requests))

    def _answer(self, request: Request) -> dict[str, Any]:
        try:
            compiler = self._idle.get_nowait()
        except queue.Empty:
            compiler = _Compiler()
            self._started.append(compiler)
        found = compiler.answer(request)
        self._idle.put(compiler)
        return found

    def close(self) -> None:
        for compiler in self._started:
            compiler.close()


class _Compiler:
    """One process."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.run.plan.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, env={**os.environ, **ENVIRONMENT}, text=True)

    def answer(self, request: Request) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        line = ""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            raise ShoalError(f"{request['program'] or 'the job'}: its compiler ended without an answer (exit code "
                             f"{self._process.wait()}), as a process does that the machine's memory cannot hold: give "
                             "fewer layers (layers=4), or plan on a larger machine")
        found: Mapping[str, Any] = json.loads(line)
        if "error" in found:
            raise ShoalError(found["error"])
        if "fault" in found:
            raise RuntimeError(f"{request['program'] or 'the job'}: {found['fault']}")
        return found["found"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


@contextmanager
def compilers(count: int, topology: str) -> Iterator[Compilers]:
    found = Compilers(count, topology)
    try:
        yield found
    finally:
        found.close()
