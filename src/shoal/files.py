"""Reads JSON files, checks where files may be written, and writes files completely or not at
all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from shoal import buckets
from shoal.buckets import COPIES, OUTPUTS, RUNS, is_bucket
from shoal.records import ShoalError
from shoal.stop import NotHere

MOST_OF_NAME = 200
"""How many characters of a file's name its temporary file's name keeps, since a name may have only
255 bytes."""
LATE_WRITES = 10
"""Attempts, a tenth of a second apart, to remove a folder in which other threads still write
(Orbax's do)."""

SAMPLES, SAMPLE_BYTES = 16, 1 << 12
"""How many pieces `sample_bytes` takes from a long file, and the bytes of each."""

HUB_SECONDS, SILENT_SECONDS = 30.0, 2.0
"""How long the hub may take for an answer, or for the next bytes; and after how long a wait for it
is reported."""


_OFFLINE: ContextVar[bool] = ContextVar("offline", default=False)


@contextlib.contextmanager
def within(condition: ContextVar[bool]) -> Iterator[None]:
    """Sets a context variable to True during the `with` block, also for all functions that the
    block calls, and sets it back afterwards. Threads that the block starts do not see the value."""
    token = condition.set(True)
    try:
        yield
    finally:
        condition.reset(token)


def offline() -> AbstractContextManager[None]:
    """Returns a context in which every download raises NotHere instead."""
    return within(_OFFLINE)


def is_offline() -> bool:
    """True inside of an `offline()` context."""
    return _OFFLINE.get()


def waits_for_hub() -> bool:
    """True if a dry run leaves out a download that the run itself would make; False also if
    HF_HUB_OFFLINE says that the cache is to be used alone (or TRANSFORMERS_OFFLINE, its older
    name)."""
    asked = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return is_offline() and asked.upper() not in ("1", "ON", "YES", "TRUE")


HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""The form of a hub id, `owner/name`. A folder may have such a name too."""


def from_hub(name: str, **options: Any) -> Path:
    """Downloads a model or a data set from the Hugging Face hub, unless the hub's cache on this
    machine has it, and returns its folder in that cache. `options` are those of
    `huggingface_hub.snapshot_download`, and so are its errors. No request waits longer than
    HUB_SECONDS, and a wait of more than SILENT_SECONDS is reported on stderr. Raises NotHere inside
    of `offline()`, where nothing is downloaded, unless HF_HUB_OFFLINE says that the cache is to be
    used alone."""
    if waits_for_hub():
        raise NotHere(name)
    from huggingface_hub import get_session, snapshot_download

    hooks = get_session().event_hooks["request"]
    # Each request of huggingface_hub asks for no limit, whatever limit its client has.
    if _limit_wait not in hooks:
        hooks.append(_limit_wait)
    limit = f"{HUB_SECONDS:.0f} s"
    text = f"waiting for {name} of the Hugging Face hub (it may take {limit} to answer) ..."
    # printed only if the download is still going on by then
    note = threading.Timer(SILENT_SECONDS, print, (text,), {"file": sys.stderr, "flush": True})
    note.start()
    try:
        return Path(snapshot_download(name, **options))
    finally:
        note.cancel()


def _limit_wait(request: Any) -> None:
    """Sets the limit HUB_SECONDS for each phase of a request (connect, read, write) that has none.
    A hook of httpx: it changes the request in place."""
    limits = request.extensions.get("timeout", {})
    timeouts = {}
    for phase in ("connect", "read", "write"):
        timeouts[phase] = limits.get(phase) or HUB_SECONDS
    request.extensions["timeout"] = timeouts


@contextlib.contextmanager
def explain_write_errors(path: str | Path, key: str = "") -> Iterator[None]:
    """Turns an OSError of the `with` block, such as a full disk or a missing permission, into a
    ShoalError that says what to do. `key`: the setting whose value `path` is; the message then
    names it; "": none. Other errors pass unchanged."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        if key:
            raise ShoalError(
                f"{key}={path} cannot be written: {reason}; choose another place"
            ) from error
        raise ShoalError(
            f"cannot write {path}: {reason}; make room or set base_output_directory to a folder "
            "that can be written"
        ) from error


@contextlib.contextmanager
def atomic_write(path: Path, key: str = "") -> Iterator[Path]:
    """Yields a temporary path next to `path` for the `with` block to write to. After the block that
    file replaces `path` in one operation; after an error of the block or of replacing it is
    removed, and `path` stays as it was. If `path` is in the cache's area OUTPUTS, the file is then
    uploaded to its bucket and removed here (ShoalError if that fails: `path` has the new content).
    Creates the folders above `path`. ShoalError if the folders or `path` cannot be written, with
    `key`, the setting whose value `path` is ("": none), in its text; errors of the block pass
    unchanged.

    If `path` is a device or a pipe, `path` itself is yielded, because replacing would make
    /dev/null a file.
    """
    # a device or a pipe
    if path.exists() and not path.is_file() and not path.is_dir():
        with explain_write_errors(path, key):
            yield path
        return
    # The name is random, because two runs that start in one folder both write the file `last`.
    temporary = path.with_name(f".{path.name[:MOST_OF_NAME]}.{secrets.token_hex(4)}.tmp")
    with explain_write_errors(path, key):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        with explain_write_errors(path, key):
            os.replace(temporary, path)
        buckets.deliver(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Yields a new empty folder for the `with` block to write to, on the same disk as `target`, so
    that the block's end can move it to `target` at no cost. The folder is removed after the block,
    if it was not moved. FileExistsError if this process has such a folder for `target` already.

    It lies in the nearest existing folder above `target`, so that a failure leaves no new folders
    behind.
    """
    folder = nearest_folder(target) / f".{target.name}.partial-{os.getpid()}"
    try:
        folder.mkdir()
        yield folder
    except BaseException:
        # Threads of the failed block may still write files here.
        # `rmtree` misses files that are written after it has listed the folder
        for _ in range(LATE_WRITES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def move_folder(folder: Path, target: Path) -> None:
    """Moves a folder to `target`, which is missing or empty (else OSError) and on the same disk,
    and creates the folders above it; if `target` is the cache's copy of a folder in a bucket,
    uploads it then, and removes it here."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        target.rmdir()
    folder.rename(target)
    buckets.deliver(target)


def write_text(path: str | Path, text: str, key: str = "output") -> None:
    """Writes a text file completely or not at all, and creates the folders above it. `path`: a
    local path or an address in a bucket; the value of the setting `key`. An existing file is
    replaced. ShoalError if it cannot be written."""
    path = check_local(path, key, OUTPUTS)
    with atomic_write(path, key) as temporary, explain_write_errors(path, key):
        temporary.write_text(text, encoding="utf-8")


_ONE_SLASH = re.compile(r"(gs|gcs|s3|s3a|az|abfss?|hdfs|memory):/(?!/)(.*)", re.DOTALL)


def check_local(path: str | Path, key: str, area: str = "") -> Path:
    """Returns the local path for the value of the setting `key`, which is a path or an address of a
    bucket; it need not exist, and nothing is read. In a path `~` is expanded; an address gives its
    path in `area` of the cache. Raises ShoalError for an address if `area` is "" (this setting
    allows no bucket) or if its scheme is unknown, and for `gs:/` with one slash, which would become
    a folder of that name."""
    one_slash = _ONE_SLASH.fullmatch(str(path))
    if one_slash:
        scheme, rest = one_slash.groups()
        raise ShoalError(f"{key}={path} has one slash too few: give {scheme}://{rest}")
    if is_bucket(path):
        if not area:
            raise ShoalError(f"{key}={path}: no bucket can be used here; give a local folder")
        buckets.check_scheme(str(path), key)
        return buckets.cache_path(str(path), area, key)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ShoalError(
            f"{key}={path}: no home folder is known for that user; give the whole path"
        ) from error


def find_input(path: str | Path, key: str, weights: bool = False, groups: bool = False) -> Path:
    """Returns the local path of an input, the value of the setting `key`, whether it exists or not.
    What is in a bucket is fetched first; without `weights` the arrays of models, and without
    `groups` the completions of runs, are left out of that. ShoalError if the bucket holds nothing
    there; a local path is not checked."""
    local = check_local(path, key, COPIES)
    if is_bucket(path):
        return buckets.fetch(str(path), key, weights, groups)
    return local


TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".xlsx")
"""Endings of formats that no command writes."""

INPUTS = {
    "prompts": "a jsonl, csv or parquet file with a `prompt` a row",
    "responses": "a jsonl file with `question` (of ifeval `prompt`) and `response` on each line",
}
"""Key of a file that a command reads -> what the file holds."""


def check_input(path: str | Path, key: str) -> Path:
    """Returns the local path of a file to read, the value of `key`, which is one of INPUTS; fetches
    it if it is in a bucket; ShoalError if there is no such file."""
    local = find_input(path, key)
    if not local.is_file():
        raise ShoalError(f"{key}={path}: there is no such file; give {INPUTS[key]}")
    return local


def check_new_file(path: str | Path, key: str) -> Path:
    """Returns the local path of a JSON file to write, the value of `key`; ShoalError if the file
    exists or cannot be written, or if its name has the ending of another format (TABLES). Folders
    above need not exist. For an address: the path in the cache, where nothing exists then."""
    local = check_local(path, key, OUTPUTS)
    if local.is_dir() and not is_bucket(path):
        raise ShoalError(f"{key}={path} is a folder: give the name of a file")
    if local.suffix.lower() in TABLES:
        raise ShoalError(
            f"{key}={path}: JSON is written, so the name must end otherwise: {key}="
            f"{str(path).removesuffix(local.suffix)}.jsonl"
        )
    if is_bucket(path):
        return buckets.check_new(str(path), key)
    check_writable(local, key)
    if local.exists():
        raise ShoalError(f"{key}={path} exists: choose another name, or remove it")
    return local


def check_new_folder(path: str | Path, key: str) -> Path:
    """Returns the local path of a folder to write, the value of `key`; ShoalError if it holds files
    or cannot be written. Does not create the folder; an empty one is allowed. For an address in a
    bucket: the path in the cache to which the files are written first; nothing exists there yet."""
    local = check_local(path, key, OUTPUTS)
    if is_bucket(path):
        return buckets.check_new(str(path), key)
    if local.is_file() or (local.is_dir() and any(local.iterdir())):
        raise ShoalError(
            f"{key}={path} exists and is not empty: choose another folder, or remove it"
        )
    check_writable(local, key)
    return local


def check_base(path: str | Path, key: str = "base_output_directory") -> Path:
    """Returns the local path of a folder for runs, the value of `key` (for an address the path in
    the cache, after an object was written to the bucket and removed there); the folder need not
    exist, and is not created; ShoalError if nothing can be written there."""
    local = check_local(path, key, RUNS)
    if is_bucket(path):
        buckets.check_writable(str(path), key)
    check_writable(local, key, within=True)
    return local


def check_writable(path: Path, key: str, within: bool = False) -> None:
    """Raises ShoalError, naming `key` and its value, unless a file can be created in the nearest
    existing folder above `path`; with `within`, in `path` itself if it exists. Creates a temporary
    file there to find out."""
    # `nearest_folder` never returns its argument, so for `path` itself a name below it is passed
    above = nearest_folder(path / "any" if within else path)
    if not above.is_dir():
        raise ShoalError(
            f"{key}={path} cannot be written: {above} is a file, not a folder; choose another place"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise ShoalError(
            f"{key}={path} cannot be written: no permission in {above}; choose another place"
        )
    # In some folders no file can be created, whatever their mode says.
    with explain_write_errors(path, key), tempfile.TemporaryFile(dir=above):
        pass


def nearest_folder(path: Path) -> Path:
    """Returns the nearest path above `path` that exists, absolute; never `path` itself. It is a
    file if `path` leads through a file."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def sample_bytes(file: Path, start: int = 0, size: int | None = None) -> bytes:
    """Reads a part of a file, `size` bytes from `start` on (None: to the file's end), and returns a
    sample of it, for a quick checksum. A short part is returned whole; of a long one SAMPLES pieces
    of SAMPLE_BYTES that are spread over it, the first and the last bytes included. OSError if the
    file cannot be read."""
    with open(file, "rb", buffering=0) as stream:
        total = size
        if total is None:
            total = os.fstat(stream.fileno()).st_size - start
        # a part that is no longer than all pieces together
        if total <= SAMPLES * SAMPLE_BYTES:
            return os.pread(stream.fileno(), total, start)
        last_piece = total - SAMPLE_BYTES  # where the last piece begins
        samples = b""
        for number in range(SAMPLES):
            position = start + last_piece * number // (SAMPLES - 1)
            samples += os.pread(stream.fileno(), SAMPLE_BYTES, position)
        return samples


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; ShoalError if the file holds anything else, is missing or
    cannot be read."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ShoalError(f"{file} could not be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ShoalError(f"{file}: expected a JSON object, got {type(value).__name__}.")
    return value
