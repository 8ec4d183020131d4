"""Processes that tests kill."""

from __future__ import annotations

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
