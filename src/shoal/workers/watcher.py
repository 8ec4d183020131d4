"""Ends processes that others started for this one, where this one is killed and can end nothing."""

from __future__ import annotations

import subprocess
import sys
import uuid

MARK = "SHOAL_ENDS_WITH"

_WATCH = """
import os, signal, sys, time
mark = sys.argv[1].encode()
sys.stdin.buffer.read()  # until the process that is watched has ended, however it did
for _ in range(5):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read().split(bytes(1)):
                    found.append(int(pid))
        except OSError:
            pass
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    if not found:
        break
    time.sleep(0.2)
"""


class Watcher:
    """Once this process has ended, kills all that were started with `environment` in theirs."""

    def __init__(self) -> None:
        self.environment = {MARK: uuid.uuid4().hex}
        (name, value), = self.environment.items()
        # In a session of its own: Ctrl-C in a terminal is for the process that is watched.
        self._process = subprocess.Popen([sys.executable, "-ISc", _WATCH, f"{name}={value}"], stdin=subprocess.PIPE,
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        """Kills them now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
