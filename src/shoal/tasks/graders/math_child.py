"""A program that math-verify runs in, so that it can be killed: started by `math_check.py`, never imported.

    python -P math_child.py CPU_SECONDS MEMORY_BYTES

It says `ready`, or `no` and why it cannot; then for each line `["gold", "answer"]` of JSON it says `1` (the same), `0`
(not) or `e` (it could not tell). A check that takes more processor time than it may ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path


def main(cpu_seconds: float, memory_bytes: int) -> None:
    """Answers until its input ends."""
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

        verify(parse("\\boxed{1}", parsing_timeout=0), parse("\\boxed{1}", parsing_timeout=0),
               timeout_seconds=None)
    except Exception as error:
        os.write(out, f"no {type(error).__name__}: {error}".replace("\n", " ").encode() + b"\n")
        return
    limit(memory_bytes)
    os.write(out, b"ready\n")
    for line in sys.stdin.buffer:
        gold, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # at its end the system ends the process, whatever it is at
        try:
            golds = parse(f"\\boxed{{{gold}}}", parsing_timeout=0)
            answers = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
            said = b"1\n" if golds and answers and verify(golds, answers, timeout_seconds=None) else b"0\n"
        except (Exception, RecursionError):
            said = b"e\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(out, said)


def limit(memory_bytes: int) -> None:
    """At most so much memory beyond what is used by now; on Linux, where such a limit is kept to."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = used + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
