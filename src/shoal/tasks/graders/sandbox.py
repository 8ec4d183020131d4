"""Tests of a model's code, in bubblewrap (`bwrap`): no network, nothing of this machine but its libraries and Python.

    code, tests -> bwrap -> sandbox_main.py -> passed | failed | timed out | crashed
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoal.tasks.graders.sandbox_main import NUMBERS
from shoal.types import ShoalError
from shoal.workers.process import num_cores, require_bubblewrap

OUTCOMES = ("passed", "failed", "timed out", "crashed")
CPU_SECONDS, WALL_SECONDS, START_SECONDS, MEMORY_BYTES = 5, 10, 10, 1 << 29
"""Of one completion's tests; how much longer the sandbox may take to start and end."""
_CASE = {"code": "x = 1", "setup": "", "tests": ["assert x == 1"], "entry_point": ""}


@functools.cache
def command() -> list[str]:
    python = os.path.realpath(sys.executable)
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", "65534",
             "--gid", "65534", "--clearenv", "--hostname", "sandbox"]
    for folder in dict.fromkeys(("/usr", "/lib", "/lib64", "/bin", os.path.realpath(sys.base_prefix))):
        words += ["--ro-bind-try", folder, folder]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(MEMORY_BYTES // 16), "--tmpfs", "/tmp", "--chdir",
              "/tmp", "--remount-ro", "/"]
    # -I and -S: neither the environment nor installed packages reach it.
    source = Path(__file__).with_name("sandbox_main.py").read_text(encoding="utf-8")
    return [*words, python, "-ISBc", source, *map(str, (CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES))]


@functools.cache
def require_sandbox() -> None:
    """ShoalError where the sandbox cannot be made: tested code runs nowhere else."""
    if platform.machine() not in NUMBERS:
        raise ShoalError(f"task code: a model's code is run in bubblewrap alone, on Linux for {' or '.join(NUMBERS)}",
                         "task.name")
    require_bubblewrap("task code", command(), "task.name", json.dumps(_CASE))


def run(case: Mapping[str, Any]) -> str:
    """The outcome, one of OUTCOMES, of `code`, then `setup` and `tests`, then `check(entry_point)` if there is one.

    >>> run({"code": "def f(x): return x + 1", "setup": "", "tests": ["assert f(1) == 2"], "entry_point": ""})
    'passed'
    """
    return _run(json.dumps(case))


async def run_all(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The outcomes of several cases, as many at once as there are cores."""
    loop = asyncio.get_running_loop()
    return list(await asyncio.gather(*(loop.run_in_executor(_threads(os.getpid()), run, case) for case in cases)))


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Of this process: a sandbox ends with the thread that started it."""
    return ThreadPoolExecutor(num_cores())


@functools.lru_cache(10_000)
def _run(text: str) -> str:
    try:
        made = subprocess.run(command(), input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              timeout=WALL_SECONDS + START_SECONDS, check=False)
    except subprocess.TimeoutExpired:  # bwrap was killed, and with it everything in its namespace
        return "timed out"
    found = made.stdout.decode(errors="replace")
    return found if found in OUTCOMES else "crashed"
