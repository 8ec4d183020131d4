"""Processes that tests kill."""

from __future__ import annotations

import os
import time
from pathlib import Path


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends, or is a zombie that nobody here can reap, within some time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def descendants() -> set[int]:
    """The processes that this one has started, theirs too, but zombies."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    found: set[int] = set()
    while (
        more := {pid for pid, parent in parents.items() if parent in found | {os.getpid()}} - found
    ):
        found |= more
    return found
