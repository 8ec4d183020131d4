"""Processes that compile side by side, each with an environment for devices that are not here."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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

    def answer(self, requests: Sequence[Request], done: Callable[[Request], None] = lambda _: None) -> list[
            dict[str, Any]]:
        """The answers, in the order of the requests; `done` is called for each as it comes."""
        if not self.topology:
            return [answer(request) for request in requests]
        count = min(self.count, len(requests))
        while len(self._started) < count:  # by this thread: a process that Linux ends with its parent ends with it
            self._started.append(_Compiler())
            self._idle.put(self._started[-1])
        with ThreadPoolExecutor(count) as threads:
            futures = {threads.submit(self._answer, request): request for request in requests}
            for future in as_completed(futures):
                if future.exception():
                    threads.shutdown(cancel_futures=True)
                    future.result()
                done(futures[future])
        return [future.result() for future in futures]

    def _answer(self, request: Request) -> dict[str, Any]:
        compiler = self._idle.get()
        try:
            return compiler.answer(request)
        finally:
            self._idle.put(compiler)

    def close(self) -> None:
        for compiler in self._started:
            compiler.close()


class _Compiler:
    """One process."""

    def __init__(self) -> None:
        # What compilers print goes nowhere: libtpu tells much about a TPU that it does not find.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.run.plan.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={**os.environ, **ENVIRONMENT}, text=True)

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
                             f"{self._process.wait()}), as a process does that the machine's memory cannot hold: "
                             "compile fewer layers (layers=shallow), or plan on a larger machine")
        return found_in(json.loads(line), request["program"])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def found_in(reply: Mapping[str, Any], program: str) -> dict[str, Any]:
    """What a compiler found; what it says to be wrong is raised."""
    if "error" in reply:
        raise ShoalError(reply["error"])
    if "fault" in reply:
        raise RuntimeError(f"{program or 'the job'}: {reply['fault']}")
    return reply["found"]


@contextmanager
def compilers(count: int, topology: str) -> Iterator[Compilers]:
    found = Compilers(count, topology)
    try:
        yield found
    finally:
        found.close()
