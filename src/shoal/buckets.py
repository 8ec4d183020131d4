"""Reads and writes files in buckets (`gs://`, `s3://` and whatever else fsspec knows) through a
cache on this machine:

    copies/s3/BUCKET/...     what was fetched: models, data, runs that are read
    runs/s3/BUCKET/...       run folders that train here; runs/mirror.py keeps the bucket equal to
                             them
    outputs/s3/BUCKET/...    what is being written; it is uploaded when it is whole

The path of a file in the cache contains its address; the rest of the program reads and writes local
paths only. A copied file has its object's size, and its time of modification combines that of the
object with a digest of the object's ETag: a file with the same size and time is not fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from shoal.paths import path_within
from shoal.records import ShoalError

T = TypeVar("T")

COPIES, RUNS, OUTPUTS = "copies", "runs", "outputs"
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
"""Scheme -> the extra of the package that reads it."""

WAIT_SECONDS, FIRST_PAUSE, LONGEST_PAUSE = 60.0, 0.5, 15.0
"""How long a command waits for a bucket that does not answer; seconds between the first two
attempts, and the longest pause."""
CAUSE_LENGTH = 400
"""Characters of a library's error that are shown."""
DISK_FAULTS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
)
WAITED_STATUSES = (307, 408, 409, 425, 429)
"""HTTP statuses, among those from 300 to 499, after which the same request may succeed."""
WAITED_CODES = (
    "BadDigest",
    "IncompleteBody",
    "InvalidDigest",
    "RequestTimeout",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
)
"""S3's codes for a request that was damaged or cut on its way, which have the status 400, too."""
CONNECTION_FAULTS = (
    "HTTPClientError",
    "ConnectionError",
    "IncompleteReadError",
    "FlexibleChecksumError",
)
"""Errors of boto after which the same request may succeed."""
FRESH_SECONDS = 10.0
"""How long a copy counts as the bucket's newest within one process."""
FILES_AT_ONCE, PART_BYTES = 4, 16 << 20
"""How many files are downloaded at the same time, each as a stream; bytes of one part of an upload,
of which two are in memory."""

MANIFESTS, LOCKS, INCOMPLETE = ".manifests", ".lock", ".incomplete"
"""Names in a bucket. In a run: the folder with a manifest of each complete checkpoint, and the
folder that says who writes there. In any folder: the marker of an output that is still being
uploaded."""
CHECKPOINT = re.compile(r"(?:(?P<run>.*)/)?checkpoints/(?P<version>\d+)(?:/.*)?", re.DOTALL)


class Unreachable(ShoalError):
    """Raised if a bucket did not answer in time; what it holds may be complete."""


# ---- addresses


def cache_folder(name: str) -> Path:
    """Returns this program's folder `name` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / name


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """True if a path is an address, SCHEME://..."""
    return "://" in str(path)


def cache_path(url: str, area: str, key: str = "") -> Path:
    """Returns the path in an area of the cache (COPIES, RUNS or OUTPUTS) for the file or folder at
    an address; it need not exist. Empty parts and `.` of the address are dropped. `key`: the
    setting whose value the address is, for messages; "": none. ShoalError if the address is not
    valid."""
    scheme, _, rest = url.partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in rest:
        raise ShoalError(
            f"{_named(key, url)}: expected SCHEME://BUCKET/PATH without '..', such as "
            "s3://bucket/run, "
            "or SCHEME://BUCKET"
        )
    return cache_folder("buckets").resolve() / area / scheme.lower() / Path(*parts)


def area_of(path: str | os.PathLike[str]) -> str:
    """Returns the area of the cache that a path lies in, COPIES, RUNS or OUTPUTS; "" for a path
    outside of the cache."""
    try:
        return Path(path).absolute().relative_to(cache_folder("buckets").resolve()).parts[0]
    except (ValueError, IndexError):
        return ""


def address(path: str | os.PathLike[str]) -> str:
    """Returns the address in the bucket for a path in the cache
    (`~/.cache/shoal/buckets/runs/gs/bucket/x` -> `gs://bucket/x`); any other path unchanged, as
    text."""
    if not area_of(path):
        return str(path)
    parts = Path(path).absolute().relative_to(cache_folder("buckets").resolve()).parts
    scheme = parts[1]  # behind the area
    name = "/".join(parts[2:])
    if scheme in ("file", "local"):
        # an absolute path, whose first slash is lost in the cache's path
        name = f"/{name}"
    return f"{scheme}://{name}"


def _named(key: str, url: str) -> str:
    """Returns `KEY=URL`, or the URL if there is no key, for messages."""
    return f"{key}={url}" if key else url


# ---- file systems and their errors


def connect(url: str, key: str = "") -> tuple[Any, str]:
    """Returns (fsspec's file system for an address, the path in that file system). Nothing is read
    yet. `key`: the setting whose value the address is, for messages; "": none. ShoalError for an
    unknown scheme, a missing package or missing credentials."""
    import fsspec

    scheme = check_scheme(url, key)
    options: dict[str, Any] = {"use_listings_cache": False}
    if EXTRAS.get(scheme) == "s3":
        # A download in parts is slower, and keeps all parts that are under way in memory.
        options["max_concurrency"] = 1
    if EXTRAS.get(scheme) == "gcs" and os.environ.get("STORAGE_EMULATOR_HOST"):
        options["token"] = "anon"  # else it looks for Google's metadata server
    if scheme in ("file", "local"):
        options["auto_mkdir"] = True
    try:
        return fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # gcsfs looks for credentials here
        raise ShoalError(f"{_named(key, url)}: {permanent_fault(error) or cause(error)}") from error


def check_scheme(url: str, key: str = "") -> str:
    """Returns the scheme of an address (`gs`, `s3`, ...) in lower case; ShoalError if it is not
    known, or if the package that reads it is not installed. If an emulator of Google's storage is
    set, also sets an environment variable that gcsfs needs for it. `key`: the setting whose value
    the address is, for messages; "": none."""
    import fsspec

    scheme = url.partition("://")[0].lower()
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        # Otherwise gcsfs would ask Google's own servers by gRPC, not the emulator.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        cure = str(error)
        if scheme in EXTRAS:
            cure = f"pip install '.[{EXTRAS[scheme]}]' in the clone of Shoal"
        raise ShoalError(
            f"{_named(key, url)}: a package that reads {scheme}:// is not installed: {cure}"
        ) from error
    except ValueError as error:
        raise ShoalError(
            f"{_named(key, url)}: {scheme}:// is not known; give gs://, s3:// or another scheme of "
            "fsspec, or a local folder"
        ) from error
    return scheme


def cause(error: BaseException) -> str:
    """Returns the message of a client library's error as one line of at most CAUSE_LENGTH
    characters, or the error's type if it has no message. All lines of the message are joined,
    because the reason often is in the second one."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > CAUSE_LENGTH:
        return f"{text[:CAUSE_LENGTH]}..."
    return text


def permanent_fault(error: BaseException) -> str:
    """Returns the text for an error that waiting does not cure: what is wrong and how to fix it
    (credentials, permissions, this machine's disk, a request that can never succeed). Returns "" if
    the bucket may answer later, so that the request is worth repeating."""
    text, name = cause(error), type(error).__name__
    if "expired" in text.lower():
        return (
            f"the credentials have expired ({text}): renew them, then give the same command again"
        )
    if "Credentials" in name or "Token" in name or name == "ProfileNotFound":
        return (
            f"no credentials that work were found ({text}): set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY or AWS_PROFILE for s3://, GOOGLE_APPLICATION_CREDENTIALS for "
            "gs://"
        )
    if isinstance(error, TypeError | NotImplementedError):
        return f"this kind of storage cannot do what is needed ({text})"
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return f"access is refused ({text}): these credentials may not do that there"
    if isinstance(error, OSError) and error.errno in DISK_FAULTS:
        return (
            f"this machine cannot hold the files ({text}): make room in {cache_folder('buckets')}, "
            "or set XDG_CACHE_HOME to another disk"
        )
    if _is_refused(error):
        return f"no such request can be made ({text}): is the address right?"
    return ""


def _status(error: BaseException) -> int:
    """Returns the HTTP status that an error carries; 0 if it carries none."""
    code = getattr(error, "code", None)
    if isinstance(code, int | str) and str(code).isdecimal():
        return int(code)
    return 0


def _is_refused(error: BaseException) -> bool:
    """True if the bucket refused the request itself, so that sending it again would give the same
    error; False for errors of the connection, and for statuses that mean "try again later"."""
    if isinstance(error, LookupError | AttributeError):
        return True
    if isinstance(error, ValueError):
        # An exception is an answer that could not be read, such as a proxy's page.
        return not isinstance(error, json.JSONDecodeError | UnicodeError)
    if 400 <= _status(error) < 500:
        return _status(error) not in WAITED_STATUSES
    type_names = {error_type.__name__ for error_type in type(error).__mro__}
    if "BotoCoreError" in type_names:
        # boto raises these without having sent a request, except those about the connection.
        return type_names.isdisjoint(CONNECTION_FAULTS)
    # s3fs turns S3's error into an OSError; S3's own code is in its cause.
    answer = getattr(error.__cause__, "response", None)
    if not isinstance(answer, dict):
        return False
    code = str(answer.get("Error", {}).get("Code", ""))
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    # 301: the bucket is in another region.
    is_refusal = 300 <= status < 500 and status not in WAITED_STATUSES
    return (is_refusal or code.startswith("Invalid")) and code not in WAITED_CODES


def with_retries(do: Callable[[], T], url: str, key: str = "") -> T:
    """Calls `do` and returns its result. If the bucket does not answer, waits and calls it again,
    with growing pauses, and says so once on stderr. Raises ShoalError if the bucket or file is
    missing or the request is refused, `Unreachable` after WAIT_SECONDS. A ShoalError of `do` is
    raised as it is, and so is a FileExistsError, for the caller to handle. `url` and `key` (the
    setting that has it) are for messages."""
    began = time.monotonic()
    pause = FIRST_PAUSE
    while True:
        try:
            return do()
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            raise ShoalError(
                f"{_named(key, url)}: there is no such bucket or file ({cause(error)})"
            ) from error
        except ShoalError:
            raise
        except Exception as error:  # each library raises exceptions of its own
            fault = permanent_fault(error)
            if fault:
                raise ShoalError(f"{_named(key, url)}: {fault}") from error
            if time.monotonic() + pause - began > WAIT_SECONDS:
                raise Unreachable(
                    f"{_named(key, url)} has not answered for {WAIT_SECONDS:.0f} s "
                    f"({cause(error)}): is the address right, and this machine online?"
                ) from error
            # only after the first attempt
            if pause == FIRST_PAUSE:
                text = f"waiting for {url}, at most {WAIT_SECONDS:.0f} s ({cause(error)}) ..."
                print(text, file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


# ---- objects


@dataclass(frozen=True)
class Object:
    """One file of a bucket."""

    path: str  # in its file system
    size: int
    # nanoseconds since the epoch: when it was modified, with a digest of its ETag below the second
    stamp: int
    md5: str  # hexadecimal; "" if the bucket does not say

    @property
    def modified(self) -> int:
        """When the object was modified, in seconds since the epoch by the bucket's clock; 0 if the
        bucket does not say."""
        return self.stamp // 10**9


def objects(fs: Any, path: str) -> dict[str, Object]:
    """Returns the files at and below a path of a bucket, by their names relative to the path; a
    file at the path itself has the name "". {} if there is nothing. `fs`: fsspec's file system, as
    `connect` returns it. ShoalError if a name leads out of the path, or is also a folder of another
    file."""
    by_name: dict[str, Object] = {}
    top = path.strip("/")
    for key, info in fs.find(path, detail=True).items():
        # A key that ends with a slash marks a folder: consoles make such objects, without content.
        if info["type"] != "file" or key.endswith("/") or str(info["name"]).endswith("/"):
            continue
        full_name = key.removeprefix("/")
        if full_name == top:
            by_name[""] = _object(info)
            continue
        name = full_name[len(top) + 1 :]
        # This check covers all names: every name that is read or written comes from here.
        path_within(Path(), name, f"the bucket's folder {path}")
        by_name[name] = _object(info)
    for name in by_name:
        for parent in PurePosixPath(name).parents:
            if name and str(parent) in by_name:
                raise ShoalError(
                    f"the bucket's folder {path} holds {parent} and {name}: one name cannot be a "
                    "file and a folder here; remove or rename one of them there"
                )
    return by_name


MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
"""What file systems of fsspec call the time of an object's last change."""


def _object(info: Mapping[str, Any]) -> Object:
    """Returns the object that fsspec's information about a file describes. Its md5 is Google's
    `md5Hash` (base64), or an ETag of 32 hexadecimal digits, which S3 gives a file uploaded in one
    part."""
    tag = str(info.get("md5Hash") or info.get("ETag") or info.get("etag") or "").strip('"')
    if info.get("md5Hash"):
        import base64

        md5 = base64.b64decode(tag).hex()
    elif re.fullmatch("[0-9a-f]{32}", tag):
        md5 = tag
    else:
        md5 = ""
    modified: Any = 0.0
    for name in MODIFIED:
        if info.get(name):
            modified = info[name]
            break
    if isinstance(modified, str):
        modified = datetime.fromisoformat(modified)
    seconds = modified.timestamp() if isinstance(modified, datetime) else float(modified)
    # Below the second: a digest, so that an object changed within the same second differs.
    digest = hashlib.blake2b(f"{tag} {seconds}".encode(), digest_size=4).digest()
    nanoseconds = int.from_bytes(digest) % 10**9
    return Object(info["name"], int(info["size"]), int(seconds) * 10**9 + nanoseconds, md5)


def checksum(file: Path, kind: str = "blake2b") -> str:
    """Returns the hexadecimal digest of a file's content. `kind`: the algorithm's name in
    hashlib."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, kind).hexdigest()


def is_same(remote: Object, file: Path) -> bool:
    """True if a local file is a copy of the object: if size and modification time are equal, or
    else size and content (by md5; False if the bucket does not say the object's md5). False if
    there is no such file. In the second case the file's time is set to the object's, so that the
    next check need not read the content."""
    if not file.is_file() or file.stat().st_size != remote.size:
        return False
    if file.stat().st_mtime_ns == remote.stamp:
        return True
    if not remote.md5 or checksum(file, "md5") != remote.md5:
        return False
    os.utime(file, ns=(remote.stamp, remote.stamp))
    return True


def put(fs: Any, file: Path, path: str) -> None:
    """Uploads a file to a path of the bucket; an object that is there is replaced. Does not repeat
    a request that fails, and raises the client library's error."""
    if "s3" in fs.protocol:
        fs.put_file(str(file), path, chunksize=PART_BYTES)
    else:
        fs.put_file(str(file), path)


def remove(fs: Any, path: str) -> None:
    """Removes an object. A missing one is no error: an earlier request may have removed it although
    its answer was lost."""
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(path)


@contextlib.contextmanager
def _downloaded(fs: Any, source: str, file: Path, key: str = "") -> Iterator[Path]:
    """Downloads an object to a temporary copy, which the `with` block may check, and moves it to
    `file` after the block. After an error the copy is removed, and `file` stays as it was.

    The copy has a random name, since two processes or threads may fetch the same file at once.
    """
    temporary = file.with_name(f".{secrets.token_hex(8)}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with_retries(partial(fs.get_file, source, str(temporary)), address(file), key)
        yield temporary
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def download(fs: Any, wanted: Mapping[Path, Object], key: str = "") -> list[Path]:
    """Copies objects of a bucket to files, several at once, each completely or not at all. Creates
    the folders above the files. A file that is equal to its object already is left as it is.
    Returns the files that were copied, in order of `wanted`. `wanted` maps each file to its object.
    `key`: a setting's name for messages, or "". ShoalError if one cannot be copied."""

    def copy_if_changed(file: Path) -> bool:
        """Copies one object; returns False, without copying, if its file was equal already."""
        remote = wanted[file]
        if is_same(remote, file):
            return False
        with _downloaded(fs, remote.path, file, key) as copied_file:
            os.utime(copied_file, ns=(remote.stamp, remote.stamp))
        return True

    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        copied = list(threads.map(copy_if_changed, wanted))
    return [file for file, is_new in zip(wanted, copied, strict=True) if is_new]


# ---- reading

_fetched: dict[tuple[str, bool, bool, str], float] = {}
"""(address, weights, groups, the cache's folder) -> when `fetch` last fetched it, by
time.monotonic()."""


def fetch(
    url: str, key: str = "", weights: bool = True, groups: bool = True, may_be_empty: bool = False
) -> Path:
    """Makes this machine's copy of a bucket's file or folder equal to it, and returns the path of
    the copy. For the checkpoints of a run, or one of them, the whole run is fetched.

    Without `weights` the arrays of models and checkpoints are left out, without `groups` the
    completions of runs; `complete` fetches them later. The arrays of a run's checkpoint are always
    left to `complete`. A copy that this process fetched within FRESH_SECONDS is taken as it is.
    With `may_be_empty` it is no error if there is nothing at the address; the path then need not
    exist. ShoalError if there is nothing at the address, or if it cannot be read or is not
    complete. `key`: the setting whose value the address is, for messages; "": none.
    """
    copy = cache_path(url, COPIES, key)
    seen = (url, weights, groups, str(cache_folder("buckets")))
    # -FRESH_SECONDS: an address that was never fetched is always too old
    if time.monotonic() - _fetched.get(seen, -FRESH_SECONDS) > FRESH_SECONDS:
        root = url
        fs, path = connect(url, key)
        checkpoint = re.fullmatch(r"(.+)/checkpoints(?:/\d+)?/*", path)
        if checkpoint:  # reading it also needs other files of its run
            config_file = f"{checkpoint[1]}/config.yaml"
            if with_retries(partial(fs.exists, config_file), url, key):
                root = re.sub(r"/checkpoints(/\d+)?/*$", "", url)
        fetch_into(cache_path(root, COPIES, key), key, weights, groups, may_be_empty)
        # An address that holds nothing is not remembered: the next caller may need files there.
        if copy.exists():
            _fetched[seen] = time.monotonic()
    return copy


def fetch_matching(pattern: str, key: str) -> list[Path]:
    """Fetches the files and folders that a pattern matches in a bucket, and returns the paths of
    their copies, sorted by name; ShoalError if nothing matches. `*`, `?` and `[...]` match as in a
    shell; a pattern without them is one address. `key`: the setting that holds the pattern, for
    messages."""
    fs, path = connect(pattern, key)
    names = [path]
    if re.search(r"[*?[]", path):
        names = with_retries(partial(fs.glob, path), pattern, key)
    if not names:
        raise ShoalError(f"{_named(key, pattern)}: the bucket holds nothing of that name")
    scheme = pattern.partition("://")[0]
    return [fetch(f"{scheme}://{name}", key) for name in sorted(names)]


def fetch_into(
    to: Path, key: str = "", weights: bool = True, groups: bool = True, may_be_empty: bool = False
) -> None:
    """Makes a file or folder of the cache equal to the bucket's: downloads what differs, and
    removes what the bucket does not have. `to`: the path in the cache, which says the address.
    Without `weights` the arrays of models are left out, without `groups` the completions of runs;
    the arrays of a run's checkpoint always are. With `may_be_empty` it is no error if there is
    nothing at the address. `key`: a setting's name for messages, or "". ShoalError if the bucket
    holds nothing there, cannot be read, has an output that is not complete, or if a file changed
    meanwhile (not checked if a run may write there)."""
    url = address(to)
    fs, path = connect(url, key)
    in_bucket = with_retries(partial(objects, fs, path), url, key)
    if not in_bucket and not may_be_empty:
        raise ShoalError(f"{_named(key, url)}: the bucket holds nothing of that name")
    if INCOMPLETE in in_bucket:
        raise ShoalError(f"{_named(key, url)} was not written to its end: write it again")
    # the name of a file that is at the address itself
    if "" in in_bucket:
        download(fs, {to: in_bucket[""]}, key)
        return
    if to.is_file():
        to.unlink()

    whole: dict[str, Object] = {}
    trees: set[str] = set()  # folders that Orbax wrote
    for name, remote in in_bucket.items():
        if not is_partial(name, in_bucket):
            whole[name] = remote
            if PurePosixPath(name).name == "_METADATA":
                trees.add(str(PurePosixPath(name).parent))
    wanted: dict[Path, Object] = {}
    for name, remote in whole.items():
        is_array = _is_array(name, trees)
        if is_array and (not weights or CHECKPOINT.fullmatch(name)):
            continue
        if not groups and re.search(r"(^|/)groups/[^/]*$", name):
            continue
        wanted[to / name] = remote
    copied = download(fs, wanted, key)
    _remove_others(to, whole)

    # A run that writes there may change its files meanwhile. Without one, a change means that the
    # copy has files of two states.
    a_run_may_write = any(LOCKS in PurePosixPath(name).parts for name in in_bucket)
    if a_run_may_write or not copied:
        return
    now = with_retries(partial(objects, fs, path), url, key)
    for name, remote in whole.items():
        if to / name in wanted and now.get(name) != remote:
            raise ShoalError(
                f"{_named(key, url)}: {name} changed while it was fetched: repeat the command "
                "when nobody writes there"
            )


def is_partial(name: str, in_bucket: Iterable[str]) -> bool:
    """True for a file of a run that another machine is still uploading: its lock, or, while there
    is a lock, a file of a checkpoint whose manifest, which is uploaded last, is not there yet.
    `in_bucket` are the names of all files there."""
    parts = PurePosixPath(name).parts
    if LOCKS in parts:
        return True
    matched = CHECKPOINT.fullmatch(name)
    if not matched:
        return False
    run = f"{matched['run']}/" if matched["run"] else ""
    if f"{run}{MANIFESTS}/{matched['version']}.json" in in_bucket:
        return False
    # Without a lock nobody uploads there.
    return any(other.startswith(f"{run}{LOCKS}/") for other in in_bucket)


def _is_array(name: str, trees: Iterable[str]) -> bool:
    """True for weights: a safetensors file, or a file in a folder below a tree that Orbax wrote
    (files directly in the tree describe it). `trees`: the folders of such trees, named like
    `name`."""
    if name.endswith(".safetensors"):
        return True
    # Files directly in a tree describe it; the arrays are in folders below.
    folders_above_its_own = [str(parent) for parent in PurePosixPath(name).parents][1:]
    return any(tree in folders_above_its_own for tree in trees)


def _remove_others(folder: Path, kept: Mapping[str, Object]) -> None:
    """Removes the files of a folder whose paths in it `kept` does not name, and then empty folders,
    also the folder itself. Does nothing if there is no such folder. Files that are being downloaded
    (`.part`) stay."""
    for parent, _, files in os.walk(folder, topdown=False):
        for file in files:
            path = Path(parent, file)
            if path.relative_to(folder).as_posix() not in kept and not file.endswith(".part"):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds something
            os.rmdir(parent)


def complete(path: Path) -> None:
    """Downloads the arrays and completions that `fetch` left out (`weights`, `groups`) at or below
    a path of the cache (of RUNS only those that a checkpoint's manifest names); does nothing for
    paths outside of the cache. ShoalError if a file of a checkpoint is missing, or differs from
    what the checkpoint's manifest says."""
    if area_of(path) not in (COPIES, RUNS):
        return
    url = address(path)
    fs, root = connect(url)
    manifest = None
    matched = CHECKPOINT.fullmatch(path.as_posix())
    if matched:
        # "": the run is the root folder
        manifest = Path(matched["run"] or "/", MANIFESTS, f"{matched['version']}.json")
    if manifest is None or not manifest.is_file():
        if area_of(path) == COPIES:  # a path in RUNS was written on this machine
            in_bucket = with_retries(partial(objects, fs, root), url)
            download(fs, {path / name: remote for name, remote in in_bucket.items()})
        return
    entries = _read_manifest(manifest, path)

    def bring(file: Path) -> None:
        """Downloads one file of a checkpoint, unless it is here already."""
        size, digest = entries[file]
        if file.is_file() and file.stat().st_size == size and checksum(file) == digest:
            return
        name = file.relative_to(path).as_posix()
        with _downloaded(fs, f"{root}/{name}", file) as copied_file:
            if checksum(copied_file) != digest:
                raise ShoalError(
                    f"{url}/{name} is not the file that the checkpoint's manifest names"
                )

    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        # `list` waits for all, and raises the error of any
        list(threads.map(bring, entries))


def _read_manifest(manifest: Path, checkpoint: Path) -> dict[Path, tuple[int, str]]:
    """Returns path -> (size in bytes, checksum) for the files of the folder `checkpoint`;
    ShoalError if the manifest is damaged, or names files outside of the checkpoint."""
    try:
        named = {}
        for name, (size, digest) in json.loads(manifest.read_text("utf-8")).items():
            named[str(name)] = (int(size), str(digest))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ShoalError(
            f"{address(manifest)} is damaged ({cause(error)}): choose another checkpoint"
        ) from error
    source = address(manifest)
    return {path_within(checkpoint, name, source): entry for name, entry in named.items()}


# ---- writing


def check_new(url: str, key: str) -> Path:
    """Checks that a new output can be written to an address, and returns its path in the cache,
    where nothing exists then. ShoalError if the bucket holds something there (except an incomplete
    output), or cannot be written. `key`: the setting whose value `url` is, for messages."""
    fs, path = connect(url, key)
    in_bucket = with_retries(partial(objects, fs, path), url, key)
    if in_bucket and INCOMPLETE not in in_bucket:
        raise ShoalError(f"{key}={url} exists and is not empty: choose another name, or remove it")
    check_writable(url, key)
    to = cache_path(url, OUTPUTS, key)
    shutil.rmtree(to, ignore_errors=True)
    to.unlink(missing_ok=True)
    return to


def check_writable(url: str, key: str) -> None:
    """Raises ShoalError unless an object can be written next to an address; writes a small one to
    find out, and removes it. `key`: the setting whose value `url` is, for messages."""
    fs, path = connect(url, key)
    start = path.rstrip("/")
    if "/" not in start.strip("/"):  # a bucket's root: an object next to it would be in no bucket
        start += "/"
    probe = f"{start}.shoal-{os.getpid()}-{time.time_ns()}"
    with_retries(partial(fs.pipe_file, probe, b"-"), url, key)
    with_retries(partial(remove, fs, probe), url, key)


def send(file: Path) -> None:
    """Uploads a file of the cache to its address; does nothing for a file outside of the cache. The
    file stays here."""
    if area_of(file):
        url = address(file)
        fs, path = connect(url)
        with_retries(partial(put, fs, file, path), url)


def deliver(path: Path) -> None:
    """Uploads a finished file or folder of OUTPUTS, and removes it here; does nothing for any other
    path, nor within a folder of `files.scratch_folder`. What the bucket's folder held before is
    replaced: objects that the folder lacks are removed there.

    While a folder is being uploaded its marker INCOMPLETE is in the bucket. config.json, by which
    other programs recognise a model, is uploaded last.
    """
    if area_of(path) != OUTPUTS or any(".partial-" in part for part in path.parts):
        return
    if path.is_file():
        send(path)
        path.unlink()
        return
    url = address(path)
    fs, root = connect(url)
    marker = f"{root}/{INCOMPLETE}"
    with_retries(partial(fs.pipe_file, marker, b"-"), url)
    old = with_retries(partial(objects, fs, root), url)
    files: dict[str, Path] = {}
    for file in path.rglob("*"):
        if file.is_file():
            files[file.relative_to(path).as_posix()] = file
    # False before True: config.json is last
    for name in sorted(files, key=lambda name: (name == "config.json", name)):
        with_retries(partial(put, fs, files[name], f"{root}/{name}"), f"{url}/{name}")
    # the marker is removed at the very end
    for name in old.keys() - files.keys() - {INCOMPLETE}:
        with_retries(partial(remove, fs, f"{root}/{name}"), f"{url}/{name}")
    with_retries(partial(remove, fs, marker), url)
    shutil.rmtree(path)
