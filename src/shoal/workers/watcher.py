"""Ends processes that others started for this one, and removes folders, where this one is killed and can do nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

MARK = "SHOAL_ENDS_WITH"

_WATCH = """
import os, shutil, signal, sys, time
mark = sys.argv[1].encode()
folders = sys.stdin.buffer.read().split(bytes(1))  # until the process that is watched has ended, however it did
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
for folder in filter(None, folders):
    shutil.rmtree(folder, ignore_errors=True)
"""


class Watcher:
    """Once this process has ended, kills all that were started with `environment` in theirs, and removes folders."""

    def __init__(self) -> None:
        self.environment = {MARK: uuid.uuid4().hex}
        (name, value), = self.environment.items()
        # In a session of its own: Ctrl-C in a terminal is for the process that is watched.
        self._process = subprocess.Popen([sys.executable, "-ISc", _WATCH, f"{name}={value}"], stdin=subprocess.PIPE,
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def remove(self, folder: Path) -> None:
        """Has a folder removed once this process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(os.fsencode(folder) + bytes(1))
        self._process.stdin.flush()

    def close(self) -> None:
        """Kills and removes them now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
