"""Folders that published versions are written to: chooses where they are, marks whose they are, and
removes those of processes that were killed."""

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
"""Linux's file system in memory, which every process may use."""
COPIES_IN_MEMORY = 4
"""MEMORY_FOLDER is chosen if it has room for so many copies of the weights: versions that wait to
be read, and the next one."""
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
"""Types of file systems to which only one machine writes."""
MOUNTS = Path("/proc/mounts")
OWNER = "owner.json"
"""File that marks a folder as made by this module. The process that made the folder keeps the file
locked while it lives."""
PROGRAM = "shoal: published weights"
"""The entry `program` of the file `OWNER`."""


def file_system(folder: Path, mounts: Path = MOUNTS) -> str:
    """Returns the type of the file system that a folder or file is in, for example "tmpfs" or
    "ext4"; "" if that is unknown. `mounts`: Linux's list of mounted file systems."""
    try:
        lines = mounts.read_text().splitlines()
        resolved = folder.resolve()
    except OSError:
        return ""
    deepest_mount = ""
    deepest_kind = ""
    for line in lines:
        mount, kind = line.split()[1:3]  # a line: device, mount, type, options, ...
        # of the mounts above the folder the one with the longest path holds the folder
        if resolved.is_relative_to(mount) and len(mount) > len(deepest_mount):
            deepest_mount = mount
            deepest_kind = kind
    return deepest_kind


def default_folder(num_bytes: int) -> Path:
    """Returns the folder for versions of `num_bytes` bytes each: MEMORY_FOLDER if it can be written
    and has room for COPIES_IN_MEMORY of them, else the system's folder for temporary files."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY_FOLDER).free >= COPIES_IN_MEMORY * num_bytes:
            # created only to find out whether the folder can be written
            with tempfile.TemporaryFile(dir=MEMORY_FOLDER):
                return MEMORY_FOLDER
    return Path(tempfile.gettempdir())


def mark_folder(folder: Path) -> int:
    """Marks a folder as this process's by the file `OWNER` in it, which it creates and locks
    (FileExistsError if there is one). Returns the file's descriptor: the lock ends when that is
    closed, or with the process."""
    import fcntl

    file = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    # Locked before anything is written: a file that is neither empty nor locked belongs to a
    # process that has ended.
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(file, json.dumps({**_owner_of(folder), "process": os.getpid()}).encode())
    return file


def remove_abandoned(parent: Path, mounts: Path = MOUNTS) -> None:
    """Deletes folders `shoal-*` in `parent` that were marked (`mark_folder`) by processes of this
    machine which have ended since without deleting them. Deletes nothing on a file system that
    other machines may write to, because their processes cannot be seen."""
    import fcntl

    if file_system(parent, mounts) not in LOCAL_FILE_SYSTEMS:
        return
    for folder in parent.glob("shoal-*"):
        # The file is opened, never created: only folders that this program has marked may be
        # removed.
        with contextlib.suppress(OSError, ValueError), open(folder / OWNER, "r+b") as file:
            owner = json.loads(file.read(4096))
            # The file must name this program, this path and this machine: a copy of a marked
            # folder, or one that another machine has made, does not.
            if isinstance(owner, dict) and _owner_of(folder).items() <= owner.items():
                # Raises BlockingIOError, an OSError, if the process still lives.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _owner_of(folder: Path) -> dict[str, str]:
    """Returns what the file `OWNER` says of a folder of this machine, except the process: program,
    folder and host."""
    return {"program": PROGRAM, "folder": str(folder.resolve()), "host": socket.gethostname()}
