"""Files in buckets, `gs://`, `s3://` and whatever else fsspec knows, by way of a cache on this
machine:

    copies/s3/BUCKET/...     what was fetched: models, data, runs that are read
    runs/s3/BUCKET/...       run folders that train here; runs/mirror.py keeps the bucket equal to
                             them
    outputs/s3/BUCKET/...    what is being written; it is uploaded when it is whole

A path of the cache says its address, and everything else reads and writes local paths. A copied
file has its object's size, and as time of modification that of the object with a digest of its
ETag: one that has both is not fetched again.
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
attempts, and at most."""
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
"""Of HTTP's statuses from 300 to 499, those after which the same request may succeed."""
WAITED_CODES = (
    "BadDigest",
    "IncompleteBody",
    "InvalidDigest",
    "RequestTimeout",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
)
"""S3's codes for a request that was damaged or cut on its way, which have the status 400, too."""
FRESH_SECONDS = 10.0
"""How long a copy counts as the bucket's newest within one process."""
FILES_AT_ONCE, PART_BYTES = 4, 16 << 20
"""Files that are downloaded at the same time, each as a stream; parts of an upload, of which two
are in memory."""

MANIFESTS, LOCKS, INCOMPLETE = ".manifests", ".lock", ".incomplete"
"""In a run: a manifest for each checkpoint that is whole; who writes there. In a folder: it is
being written."""
CHECKPOINT = re.compile(r"(?:(?P<run>.*)/)?checkpoints/(?P<version>\d+)(?:/.*)?", re.DOTALL)


class Unreachable(ShoalError):
    """A bucket that did not answer in time: what it holds may be whole."""


# ---- addresses


def cache_folder(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / name


def is_bucket(path: str | os.PathLike[str]) -> bool:
    return "://" in str(path)


def place(url: str, area: str, key: str = "") -> Path:
    """Where a bucket's file or folder lies in an area of the cache. ShoalError for an address that
    names none."""
    scheme, _, rest = url.partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in rest:
        raise ShoalError(
            f"{_named(key, url)}: expected SCHEME://BUCKET/PATH without '..', as s3://bucket/run, "
            "or SCHEME://BUCKET"
        )
    return cache_folder("buckets").resolve() / area / scheme.lower() / Path(*parts)


def area_of(path: str | os.PathLike[str]) -> str:
    """The area of the cache that a path is in; empty for one outside."""
    try:
        return Path(path).absolute().relative_to(cache_folder("buckets").resolve()).parts[0]
    except (ValueError, IndexError):
        return ""


def address(path: str | os.PathLike[str]) -> str:
    """The address that a path of the cache stands for; any other path as it is."""
    if not area_of(path):
        return str(path)
    _, scheme, *parts = Path(path).absolute().relative_to(cache_folder("buckets").resolve()).parts
    return f"{scheme}://{'/' if scheme in ('file', 'local') else ''}{'/'.join(parts)}"


def _named(key: str, url: str) -> str:
    return f"{key}={url}" if key else url


# ---- file systems and their errors


def connect(url: str, key: str = "") -> tuple[Any, str]:
    """The file system of an address, and the path in it. ShoalError for an unknown scheme or a
    missing package."""
    import fsspec

    scheme = check_scheme(url, key)
    options: dict[str, Any] = {"use_listings_cache": False}
    if EXTRAS.get(scheme) == "s3":
        options["max_concurrency"] = (
            1  # by parts a download is slower, and holds all that are under way
        )
    if EXTRAS.get(scheme) == "gcs" and os.environ.get("STORAGE_EMULATOR_HOST"):
        options["token"] = "anon"  # else it looks for Google's metadata server
    if scheme in ("file", "local"):
        options["auto_mkdir"] = True
    try:
        return fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # gcsfs looks for credentials here
        raise ShoalError(f"{_named(key, url)}: {lasting_fault(error) or cause(error)}") from error


def check_scheme(url: str, key: str = "") -> str:
    """The scheme of an address; ShoalError for an unknown one, and where the package that reads it
    is missing."""
    import fsspec

    scheme = url.partition("://")[0].lower()
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        os.environ.setdefault(
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
        )  # it would ask Google itself, by gRPC
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        cure = (
            f"pip install '.[{EXTRAS[scheme]}]' in the clone of Shoal"
            if scheme in EXTRAS
            else str(error)
        )
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
    """What a client library raised, as one line: the reason often stands in its second."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= CAUSE_LENGTH else f"{text[:CAUSE_LENGTH]}..."


def lasting_fault(error: BaseException) -> str:
    """What is wrong where waiting does not help; empty where the bucket may answer later."""
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
    """The HTTP status that an error carries; 0 for none."""
    code = getattr(error, "code", None)
    return int(code) if isinstance(code, int | str) and str(code).isdecimal() else 0


def _is_refused(error: BaseException) -> bool:
    """True for what the client or the bucket will refuse again: the request itself is wrong."""
    if isinstance(error, LookupError | AttributeError):
        return True
    if isinstance(
        error, ValueError
    ):  # but for an answer that could not be read: a proxy's page, for one
        return not isinstance(error, json.JSONDecodeError | UnicodeError)
    if 400 <= _status(error) < 500:
        return _status(error) not in WAITED_STATUSES
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if (
        "BotoCoreError" in kinds
    ):  # what boto says without having asked, but for the trouble of a connection
        return not kinds & {
            "HTTPClientError",
            "ConnectionError",
            "IncompleteReadError",
            "FlexibleChecksumError",
        }
    # s3fs makes an OSError of S3's own code, which is then in its cause.
    answer = getattr(error.__cause__, "response", None)
    if not isinstance(answer, dict):
        return False
    code = str(answer.get("Error", {}).get("Code", ""))
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    is_refusal = (
        300 <= status < 500 and status not in WAITED_STATUSES
    )  # 301: the bucket is in another region
    return (is_refusal or code.startswith("Invalid")) and code not in WAITED_CODES


def attempt(do: Callable[[], T], url: str, key: str = "") -> T:
    """What `do` returns, repeated with growing pauses where the bucket does not answer. ShoalError
    where it is missing or refuses, `Unreachable` after WAIT_SECONDS. FileExistsError is the
    caller's."""
    began, pause = time.monotonic(), FIRST_PAUSE
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
        except Exception as error:  # each library has its own
            if fault := lasting_fault(error):
                raise ShoalError(f"{_named(key, url)}: {fault}") from error
            if time.monotonic() + pause - began > WAIT_SECONDS:
                raise Unreachable(
                    f"{_named(key, url)} has not answered for {WAIT_SECONDS:.0f} s "
                    f"({cause(error)}): is the address right, and this machine online?"
                ) from error
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
    md5: str  # hexadecimal; empty where the bucket does not say

    @property
    def modified(self) -> int:
        """When it was modified, in seconds since the epoch by the bucket's clock; 0 where the
        bucket does not say."""
        return self.stamp // 10**9


def objects(fs: Any, path: str) -> dict[str, Object]:
    """The files below a path by their names from there, the one at the path itself under the empty
    name. ShoalError for a name that leads out of the path, and for one that is also the folder of
    another."""
    found = {}
    top = path.strip("/")
    for key, info in fs.find(path, detail=True).items():
        # A key that ends with a slash marks a folder: consoles make such objects, without content.
        if info["type"] != "file" or key.endswith("/") or str(info["name"]).endswith("/"):
            continue
        full_name = key.removeprefix("/")
        if full_name == top:
            found[""] = _object(info)
            continue
        name = full_name[len(top) + 1 :]
        path_within(
            Path(), name, f"the bucket's folder {path}"
        )  # every name that is read or written passes here
        found[name] = _object(info)
    for name in found:
        for parent in PurePosixPath(name).parents:
            if name and str(parent) in found:
                raise ShoalError(
                    f"the bucket's folder {path} holds {parent} and {name}: one name cannot be a "
                    "file and a folder here; remove or rename one of them there"
                )
    return found


MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
"""What file systems of fsspec call the time of an object's last change."""


def _object(info: Mapping[str, Any]) -> Object:
    tag = str(info.get("md5Hash") or info.get("ETag") or info.get("etag") or "").strip('"')
    md5 = tag if re.fullmatch("[0-9a-f]{32}", tag) else ""
    if info.get("md5Hash"):
        import base64

        md5 = base64.b64decode(tag).hex()
    when = next((info[name] for name in MODIFIED if info.get(name)), 0.0)
    when = datetime.fromisoformat(when) if isinstance(when, str) else when
    seconds = when.timestamp() if isinstance(when, datetime) else float(when)
    below = (
        int.from_bytes(hashlib.blake2b(f"{tag} {seconds}".encode(), digest_size=4).digest()) % 10**9
    )
    return Object(info["name"], int(info["size"]), int(seconds) * 10**9 + below, md5)


def checksum(file: Path, kind: str = "blake2b") -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, kind).hexdigest()


def is_same(one: Object, file: Path) -> bool:
    """True if a file is a copy of the object, or has its content."""
    if not file.is_file() or file.stat().st_size != one.size:
        return False
    if file.stat().st_mtime_ns == one.stamp:
        return True
    if same := bool(one.md5) and checksum(file, "md5") == one.md5:
        os.utime(file, ns=(one.stamp, one.stamp))
    return same


def put(fs: Any, file: Path, path: str) -> None:
    fs.put_file(str(file), path, **({"chunksize": PART_BYTES} if "s3" in fs.protocol else {}))


def remove(fs: Any, path: str) -> None:
    """Removes an object; one that is gone was removed before, by a request whose answer was
    lost."""
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(path)


@contextlib.contextmanager
def _arriving(fs: Any, source: str, file: Path, key: str = "") -> Iterator[Path]:
    """Downloads an object, yields the copy to be checked, then moves it to `file`; after an error
    there is none.

    The copy's name is its own: two processes, or two threads, may fetch the same file at once."""
    temporary = file.with_name(f".{secrets.token_hex(8)}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        attempt(lambda: fs.get_file(source, str(temporary)), address(file), key)
        yield temporary
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def download(fs: Any, wanted: Mapping[Path, Object], key: str = "") -> list[Path]:
    """Copies objects to files, each whole or not at all; those that are the same already stay. The
    files copied."""

    def copy(file: Path, one: Object) -> bool:
        if is_same(one, file):
            return False
        with _arriving(fs, one.path, file, key) as copied_file:
            os.utime(copied_file, ns=(one.stamp, one.stamp))
        return True

    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        copied = list(threads.map(lambda pair: copy(*pair), wanted.items()))
    return [file for file, is_new in zip(wanted, copied, strict=True) if is_new]


# ---- reading

_fetched: dict[tuple[str, bool, bool, str], float] = {}


def fetch(
    url: str, key: str = "", weights: bool = True, groups: bool = True, may_be_empty: bool = False
) -> Path:
    """The copy of a bucket's file or folder, made equal to it; without `weights` no arrays of
    models and checkpoints, without `groups` no completions of runs (`complete` fetches them later).
    Those of a run's checkpoint are always fetched by `complete`. ShoalError where there is nothing,
    it cannot be read, or is not whole."""
    seen = (url, weights, groups, str(cache_folder("buckets")))
    if time.monotonic() - _fetched.get(seen, -FRESH_SECONDS) > FRESH_SECONDS:
        root, (fs, path) = url, connect(url, key)
        if run := re.fullmatch(
            r"(.+)/checkpoints(?:/\d+)?/*", path
        ):  # read by what its run holds, too
            is_of_run = attempt(lambda: fs.exists(f"{run[1]}/config.yaml"), url, key)
            root = re.sub(r"/checkpoints(/\d+)?/*$", "", url) if is_of_run else url
        fetch_into(place(root, COPIES, key), key, weights, groups, may_be_empty)
        _fetched[seen] = time.monotonic()
    return place(url, COPIES, key)


def fetch_matching(pattern: str, key: str) -> list[Path]:
    """The copies of what a pattern names in a bucket, in order; ShoalError where that is
    nothing."""
    (fs, path), scheme = connect(pattern, key), pattern.partition("://")[0]
    names = attempt(lambda: fs.glob(path), pattern, key) if re.search(r"[*?[]", path) else [path]
    if not names:
        raise ShoalError(f"{_named(key, pattern)}: the bucket holds nothing of that name")
    return [fetch(f"{scheme}://{name}", key) for name in sorted(names)]


def fetch_into(
    to: Path, key: str = "", weights: bool = True, groups: bool = True, may_be_empty: bool = False
) -> None:
    """Makes a file or folder of the cache equal to the bucket's; what is there beyond it is
    removed."""
    url = address(to)
    fs, path = connect(url, key)
    found = attempt(lambda: objects(fs, path), url, key)
    if not found and not may_be_empty:
        raise ShoalError(f"{_named(key, url)}: the bucket holds nothing of that name")
    if INCOMPLETE in found:
        raise ShoalError(f"{_named(key, url)} was not written to its end: write it again")
    if to.is_file() and "" not in found:
        to.unlink()
    if "" in found:
        download(fs, {to: found[""]}, key)
        return
    held = {name: one for name, one in found.items() if not is_partial(name, found)}
    trees = {
        str(PurePosixPath(name).parent) for name in held if PurePosixPath(name).name == "_METADATA"
    }
    wanted = {
        to / name: one
        for name, one in held.items()
        if (weights or not _is_array(name, trees))
        and (groups or not re.search(r"(^|/)groups/[^/]*$", name))
        and not (CHECKPOINT.fullmatch(name) and _is_array(name, trees))
    }
    copied = download(fs, wanted, key)
    _remove_others(to, held)
    if any(LOCKS in PurePosixPath(name).parts for name in found) or not copied:
        return  # a run may go on while it is read
    now = attempt(lambda: objects(fs, path), url, key)
    if changed := [
        name for name, one in held.items() if to / name in wanted and now.get(name) != one
    ]:
        raise ShoalError(
            f"{_named(key, url)}: {changed[0]} changed while it was fetched: give the same command "
            "again when nobody writes there"
        )


def is_partial(name: str, found: Iterable[str]) -> bool:
    """True for a lock, and for a file of a checkpoint without manifest in a run that a mirror
    writes."""
    parts = PurePosixPath(name).parts
    if LOCKS in parts:
        return True
    matched = CHECKPOINT.fullmatch(name)
    if not matched:
        return False
    run = f"{matched['run']}/" if matched["run"] else ""
    return f"{run}{MANIFESTS}/{matched['version']}.json" not in found and any(
        other.startswith(f"{run}{LOCKS}/") for other in found
    )


def _is_array(name: str, trees: Iterable[str]) -> bool:
    """True for weights, and for what lies deeper in a tree of Orbax's than its description."""
    parents = [str(parent) for parent in PurePosixPath(name).parents]
    return name.endswith(".safetensors") or any(tree in parents[1:] for tree in trees)


def _remove_others(folder: Path, held: Mapping[str, Object]) -> None:
    for place_, _, files in os.walk(folder, topdown=False):
        for file in files:
            path = Path(place_, file)
            if path.relative_to(folder).as_posix() not in held and not file.endswith(".part"):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds something
            os.rmdir(place_)


def complete(path: Path) -> None:
    """Fetches what was left out below a path of the cache. ShoalError for a checkpoint's file that
    is missing or is not the one that its manifest names."""
    url, matched = address(path), CHECKPOINT.fullmatch(path.as_posix())
    if area_of(path) not in (COPIES, RUNS):
        return
    manifest = (
        Path(matched["run"] or "/", MANIFESTS, f"{matched['version']}.json") if matched else None
    )
    fs, root = connect(url)
    if manifest is None or not manifest.is_file():
        if area_of(path) == COPIES:  # in RUNS it was written here
            download(
                fs,
                {path / name: one for name, one in attempt(lambda: objects(fs, root), url).items()},
            )
        return

    def bring(entry: tuple[Path, tuple[int, str]]) -> None:
        file, (size, digest) = entry
        if file.is_file() and file.stat().st_size == size and checksum(file) == digest:
            return
        name = file.relative_to(path).as_posix()
        with _arriving(fs, f"{root}/{name}", file) as copied_file:
            if checksum(copied_file) != digest:
                raise ShoalError(
                    f"{url}/{name} is not the file that the checkpoint's manifest names"
                )

    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        list(threads.map(bring, _read_manifest(manifest, path).items()))


def _read_manifest(manifest: Path, checkpoint: Path) -> dict[Path, tuple[int, str]]:
    """The files of a checkpoint with size and checksum; ShoalError for a manifest that is damaged
    or names others."""
    try:
        entries = json.loads(manifest.read_text("utf-8"))
        named = {str(name): (int(size), str(digest)) for name, (size, digest) in entries.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ShoalError(
            f"{address(manifest)} is damaged ({cause(error)}): choose another checkpoint"
        ) from error
    source = address(manifest)
    return {path_within(checkpoint, name, source): entry for name, entry in named.items()}


# ---- writing


def check_new(url: str, key: str) -> Path:
    """The path in the cache of what is to be written to an address, with nothing there. ShoalError
    where the bucket holds something under it, but for what was not written to its end, or cannot be
    written."""
    fs, path = connect(url, key)
    found = attempt(lambda: objects(fs, path), url, key)
    if found and INCOMPLETE not in found:
        raise ShoalError(f"{key}={url} exists and is not empty: choose another name, or remove it")
    check_writable(url, key)
    to = place(url, OUTPUTS, key)
    shutil.rmtree(to, ignore_errors=True)
    to.unlink(missing_ok=True)
    return to


def check_writable(url: str, key: str) -> None:
    """ShoalError unless an object can be written beside an address."""
    fs, path = connect(url, key)
    beside = path.rstrip("/")
    if "/" not in beside.strip("/"):  # a bucket's root: an object beside it would be in no bucket
        beside += "/"
    probe = f"{beside}.shoal-{os.getpid()}-{time.time_ns()}"
    attempt(lambda: fs.pipe_file(probe, b"-"), url, key)
    attempt(lambda: remove(fs, probe), url, key)


def send(file: Path) -> None:
    """Uploads a file of the cache to its address; nothing for any other."""
    if area_of(file):
        url = address(file)
        fs, path = connect(url)
        attempt(lambda: put(fs, file, path), url)


def deliver(path: Path) -> None:
    """Uploads a finished file or folder of OUTPUTS and removes it here; nothing for any other path.
    A folder's marker INCOMPLETE is there until all of it is, and config.json, by which others know
    a model, comes last."""
    if area_of(path) != OUTPUTS or any(".partial-" in part for part in path.parts):
        return
    if path.is_file():
        send(path)
        path.unlink()
        return
    url = address(path)
    fs, root = connect(url)
    attempt(lambda: fs.pipe_file(f"{root}/{INCOMPLETE}", b"-"), url)
    old = attempt(lambda: objects(fs, root), url)
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    for name in sorted(files, key=lambda name: (name == "config.json", name)):
        attempt(lambda name=name: put(fs, files[name], f"{root}/{name}"), f"{url}/{name}")
    for name in old.keys() - files.keys() - {INCOMPLETE}:
        attempt(lambda name=name: remove(fs, f"{root}/{name}"), f"{url}/{name}")
    attempt(lambda: remove(fs, f"{root}/{INCOMPLETE}"), url)
    shutil.rmtree(path)
