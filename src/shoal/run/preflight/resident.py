"""What processes hold in RAM, where that is the device's memory: this one, its children, and its
peak in a block."""

from __future__ import annotations

import gc
import os
import re
import threading
from pathlib import Path
from types import TracebackType

import jax

from shoal.mesh import return_freed_memory

PROC = Path("/proc")
PEAK_SECONDS = 0.02
"""Seconds between two readings for a peak."""


def resident_bytes() -> int:
    """Bytes of this process in RAM; 0 where the system does not say it."""
    try:
        pages = (PROC / "self" / "statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def array_bytes() -> int:
    """Bytes of the arrays on this process's devices; those that share memory count once."""
    sizes: dict[int, int] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            sizes[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(sizes.values())


def process_bytes() -> int:
    """Bytes of this process in RAM without its arrays: libraries, compiled programs, data. 0 if
    they are not known."""
    gc.collect()
    return_freed_memory()
    resident = resident_bytes()
    return max(0, resident - array_bytes()) if resident else 0


def children_bytes(pid: int = 0) -> int:
    """Bytes in RAM that the children of a process (0: of this one), and theirs, share with no
    other."""
    of = PROC / str(pid or os.getpid())
    total = 0
    for task in (of / "task").glob("*"):
        for child in _read(task / "children").split():
            text = _read(PROC / child / "smaps_rollup")
            private = re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB", text, re.MULTILINE)
            total += 1024 * sum(map(int, private)) + children_bytes(int(child))
    return total


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended
        return ""


class ResidentPeak:
    """The most that this process takes in RAM within a block, beyond what it had before; what stays
    of it.

    >>> with ResidentPeak() as peak:
    ...     compiled = lowered.compile()
    >>> peak.bytes
    """

    bytes = 0
    stays = 0

    def __enter__(self) -> ResidentPeak:
        self._before = self._most = resident_bytes()
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read_until_ended, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._reader.join()
        now = resident_bytes()
        self.bytes = max(self._most, now) - self._before
        self.stays = max(0, now - self._before)

    def _read_until_ended(self) -> None:
        while not self._ended.wait(PEAK_SECONDS):
            self._most = max(self._most, resident_bytes())
