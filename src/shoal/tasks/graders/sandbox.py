"""Runs tests of a model's code in bubblewrap (`bwrap`): without network, and without anything of
this machine except its libraries and Python.

code, tests -> bwrap -> sandbox_main.py -> passed | failed | timed out | crashed
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoal.records import ShoalError
from shoal.tasks.graders.sandbox_main import NUMBERS
from shoal.tasks.graders.tested_names import tested_names
from shoal.workers.process import num_cores, require_bubblewrap

OUTCOMES = ("passed", "failed", "timed out", "crashed")
CPU_SECONDS, WALL_SECONDS, START_SECONDS, MEMORY_BYTES = 5, 10, 10, 1 << 29
"""Limits of one completion's tests: processor time, time by the clock, how much longer the sandbox
may take to start and end, memory."""
MOST_OUTCOMES = 100_000
_outcomes: dict[bytes, str] = {}
"""Digest of a case -> its outcome, at most MOST_OUTCOMES."""
_CASE = {
    "code": "x = 1",
    "setup": "",
    "tests": ["assert x == 1"],
    "entry_point": "",
    "given": "",
    "reference": "",
}


@functools.cache
def command() -> list[str]:
    """Returns the command that starts a sandbox which runs `sandbox_main.py`. It reads a case, as
    JSON, from its standard input, and prints the outcome. The case has a seal, a secret that is
    printed with the outcome, so that the tested code cannot print an outcome itself. The list is
    cached: it must not be changed."""
    python = os.path.realpath(sys.executable)
    # Code could read the environment of the sandbox's first process, so `run` starts it with an
    # empty one.
    bwrap = shutil.which("bwrap") or "bwrap"
    words = [
        bwrap,
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
        "--uid",
        "65534",
        "--gid",
        "65534",
        "--clearenv",
        "--hostname",
        "sandbox",
    ]
    folders = ["/usr", "/lib", "/lib64", "/bin"]
    home_of_python = os.path.realpath(sys.base_prefix)
    if home_of_python not in folders:
        folders.append(home_of_python)
    for folder in folders:
        words += ["--ro-bind-try", folder, folder]
    words += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--size",
        # The size of /tmp: 32 MiB.
        str(MEMORY_BYTES // 16),
        "--tmpfs",
        "/tmp",
        "--chdir",
        "/tmp",
        "--remount-ro",
        "/",
    ]
    # -I and -S: neither the environment nor installed packages reach it.
    source = Path(__file__).with_name("sandbox_main.py").read_text(encoding="utf-8")
    words += [python, "-ISBc", source]
    words += [str(CPU_SECONDS), str(WALL_SECONDS), str(MEMORY_BYTES)]
    return words


@functools.cache
def require_sandbox() -> None:
    """Raises ShoalError if sandboxes do not work on this machine: there is no way to run a model's
    code outside of one. A success is cached. The check runs a small case in a sandbox."""
    if platform.machine() not in NUMBERS:
        raise ShoalError(
            "task code: a model's code runs only in bubblewrap, on Linux for "
            f"{' or '.join(NUMBERS)}",
            "task.name",
        )
    require_bubblewrap(
        "task code", command(), "task.name", _sealed(json.dumps(_CASE), "here"), "passed here"
    )


def run(case: Mapping[str, Any]) -> str:
    """Runs a case in a sandbox and returns its outcome, one of OUTCOMES. It runs `code`, then
    `setup` and `tests`, then `check(entry_point)` if there is an entry point. The values of a case
    are texts; `tests` is a list of them. Outcomes are cached.

    If the data has them, `given` (the prompt's code) and `reference` (its solution) help to tell
    the tests' own names from the candidate's.

    >>> code, tests = "def f(x): return x + 1", ["assert f(1) == 2"]
    >>> run({"code": code, "setup": "", "tests": tests, "entry_point": ""})
    'passed'
    """
    return _run(json.dumps({"given": "", "reference": "", **case}))


async def run_all(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Runs cases in sandboxes, as many at once as there are cores, and returns their outcomes in
    the order of the cases. Each outcome is one of OUTCOMES, and cached."""
    return await in_threads(run, cases)


async def in_threads(function: Callable[[Any], str], items: Sequence[Any]) -> list[str]:
    """Calls a function that runs sandboxes with each item, as many at once as there are cores, and
    returns the results in the order of the items."""
    loop = asyncio.get_running_loop()
    threads = _threads(os.getpid())
    running = [loop.run_in_executor(threads, function, item) for item in items]
    return list(await asyncio.gather(*running))


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Returns the pool of threads that start sandboxes, one for each process id, since threads do
    not survive a fork. It is kept, because a sandbox ends with the thread that started it."""
    return ThreadPoolExecutor(num_cores())


def _run(text: str) -> str:
    """Runs a case, as JSON, in a sandbox and returns its outcome. Outcomes are cached by a digest
    of the case, which may have megabytes."""
    digest = hashlib.sha256(text.encode()).digest()
    outcome = _outcomes.get(digest)
    if outcome is None:
        outcome = _run_anew(text)
        if len(_outcomes) >= MOST_OUTCOMES:
            _outcomes.clear()
        _outcomes[digest] = outcome
    return outcome


def _run_anew(text: str) -> str:
    """Runs a case, as JSON, in a sandbox and returns its outcome. "crashed" also means that the
    sandbox printed no verdict."""
    seal = secrets.token_hex(16)  # the tester alone reads it, so nothing else can write a verdict
    try:
        tester = subprocess.run(
            command(),
            input=_sealed(text, seal).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WALL_SECONDS + START_SECONDS,
            check=False,
            env={},
        )
    except subprocess.TimeoutExpired:  # bwrap was killed, and with it everything in its namespace
        return "timed out"
    outcome, _, its_seal = tester.stdout.decode(errors="replace").rpartition(" ")
    if its_seal != seal or outcome not in OUTCOMES:
        return "crashed"
    return outcome


def _sealed(text: str, seal: str) -> str:
    """Returns a case, as JSON, with what the tester needs: which names the tests may use
    (`tested_names`), and the seal that it must print with its verdict."""
    case = json.loads(text)
    tested = tested_names(case)
    case["given"] = tested.given
    case["names"] = tested.names
    case["spare"] = tested.spare
    case["imports"] = tested.imports
    case["seal"] = seal
    return json.dumps(case)
