"""Folders that published versions are written to: where they are, whose they are, and the removal
of those whose process was killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

KEY = "publish.folder"
MEMORY_FOLDER = Path("/dev/shm")
"""Linux's file system in memory that every process may use."""
COPIES_IN_MEMORY = 4
"""Copies of the weights that MEMORY_FOLDER must have room for to be chosen: versions that wait, and
the next."""
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
LOCAL_FILE_SYSTEMS = (
    "tmpfs",
    "ramfs",
    "overlay",
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
)
"""Kinds of file systems that one machine alone writes to."""
MOUNTS = Path("/proc/mounts")
OWNER = "owner.json"
"""The file that marks a folder as made here. Its process keeps it locked while it lives."""
PROGRAM = "shoal: published weights"
"""What `OWNER` says of the folder."""


def file_system(folder: Path, mounts: Path = MOUNTS) -> str:
    """The kind of file system that a folder lies in; "" where the system does not say."""
    try:
        lines = mounts.read_text().splitlines()
        resolved = folder.resolve()
    except OSError:
        return ""
    deepest_mount = ""
    deepest_kind = ""
    for line in lines:
        mount, kind = line.split()[1:3]
        if resolved.is_relative_to(mount) and len(mount) > len(deepest_mount):
            deepest_mount = mount
            deepest_kind = kind
    return deepest_kind


def default_folder(num_bytes: int) -> Path:
    """Where versions of so many bytes are written: a file system in memory with room for them, else
    a temporary one."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY_FOLDER).free >= COPIES_IN_MEMORY * num_bytes:
            with tempfile.TemporaryFile(dir=MEMORY_FOLDER):
                return MEMORY_FOLDER
    return Path(tempfile.gettempdir())


def mark_folder(folder: Path) -> int:
    """Marks a folder as this process's. Returns the marker's open file, which stays locked until
    the process ends."""
    import fcntl

    file = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    # Locked before it says anything: what is neither empty nor locked is abandoned.
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(file, json.dumps({**_owner_of(folder), "process": os.getpid()}).encode())
    return file


def remove_abandoned(parent: Path, mounts: Path = MOUNTS) -> None:
    """Removes marked folders of this machine whose process has ended. Nothing where other machines
    may write: their processes cannot be seen."""
    import fcntl

    if file_system(parent, mounts) not in LOCAL_FILE_SYSTEMS:
        return
    for folder in parent.glob("shoal-*"):
        # Opened, never made: only what this program has marked is its own.
        with contextlib.suppress(OSError, ValueError), open(folder / OWNER, "r+b") as file:
            owner = json.loads(file.read(4096))
            if isinstance(owner, dict) and _owner_of(folder).items() <= owner.items():
                # BlockingIOError, an OSError, while its process lives.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _owner_of(folder: Path) -> dict[str, str]:
    return {"program": PROGRAM, "folder": str(folder.resolve()), "host": socket.gethostname()}
