"""Files and folders that a command leaves behind: whether there is room for them, and writing them whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shoal.types import ShoalError


@contextlib.contextmanager
def writing(path: str | Path, key: str) -> Iterator[None]:
    """Turns the system's refusal to write `path`, the value of `key`, into ShoalError."""
    try:
        yield
    except OSError as error:
        raise ShoalError(f"{key}={path} cannot be written: {error.strerror or error}; choose another place") from error


def check_local(path: str | Path, key: str) -> Path:
    """`path`, the value of `key`, with the user's home for `~`. ShoalError for a place in a cloud's storage: as a path
    it would be a folder of that name here."""
    if "://" in str(path):
        raise ShoalError(f"{key}={path}: storage in a cloud is not there yet; give a local folder")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ShoalError(f"{key}={path}: no home folder is known for that user; give the whole path") from error


def check_writable(path: str | Path, key: str) -> Path:
    """The place of a file, as `check_local` has it; ShoalError where none can be: met before the work that would be
    lost."""
    path = check_local(path, key)
    if path.is_dir():
        raise ShoalError(f"{key}={path} is a folder: give the name of a file")
    _check_place(path, key)
    return path


def check_new_folder(path: str | Path, key: str) -> Path:
    """The place of a folder, as `check_local` has it; ShoalError unless it is free, or an empty folder."""
    path = check_local(path, key)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ShoalError(f"{key}={path} exists and is not empty: choose another folder, or remove it")
    _check_place(path, key)
    return path


def _check_place(path: Path, key: str) -> None:
    """The nearest folder above that exists must be one, and take a new file."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ShoalError(f"{key}={path} cannot be written: {above} is a file, not a folder; choose another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ShoalError(f"{key}={path} cannot be written: no permission in {above}; choose another place")
    with writing(path, key), tempfile.TemporaryFile(dir=above):  # some folders take none, whatever their mode says
        pass


def write_text(path: str | Path, text: str, key: str = "output") -> None:
    """A text file that appears whole or not at all; folders above it are made."""
    path = check_local(path, key)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with writing(path, key):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
