"""A run folder in a bucket: the run works in a local folder, and a thread keeps the bucket equal to
it.

    .lock/000017          who writes there: a number is taken by creating its object, which only one
                          process can
    .manifests/12.json    checkpoint 12 is whole: names, sizes and checksums of its files, written
                          after all of them
    everything else       as in the local folder, by whole objects

The order of uploads is: the files that a checkpoint is resumed with, the files of the checkpoint,
its manifest. Then objects are removed whose files are gone here, manifests first. So the run can be
resumed from the bucket whenever this process ends, on any machine. The bucket's content then
replaces that of the local folder on that machine, unless this folder was the last that wrote to the
bucket."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shoal import buckets
from shoal.buckets import FIRST_PAUSE, LOCKS, LONGEST_PAUSE, MANIFESTS, with_retries
from shoal.protocols import Printer
from shoal.records import ShoalError
from shoal.runs.layout import process_start

LEASE_SECONDS = 60.0
"""Time after a process has last renewed its lease during which nobody else may write to the run; a
lease is renewed three times as often."""


CLOCK = "clock-"
"""Beginning of the name of the object with which a process reads the bucket's clock."""


UNKNOWN_HOLDER = "a process that its lease does not name"
"""Text for errors, for the holder of a lease that cannot be read."""


PERIOD_SECONDS = 5.0
"""Time between two uploads of the files that a run appends to."""


UNSAVED_SECONDS = 300.0
"""Longest time that a run waits for its bucket, at its end or while more than
checkpoint.most_unsaved checkpoints exist only here."""


MARKER = ".bucket"
"""File of a local folder that holds the id of the folder's newest lease."""


def _machine() -> str:
    """Returns a text that identifies this machine, its last start, and its namespace of process
    ids: two processes for which it is equal can look each other up by id. A host name alone does
    not say so, because containers may share it."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(parts)


class Fenced(ShoalError):
    """Raised if another process now writes to this run."""


class Lease:
    """The right to write to a run in a bucket, renewed by `renew`. Making one raises ShoalError if
    another process holds it. Nothing renews it by itself: it ends LEASE_SECONDS after the last
    renewal, or at once with `renew(lives=False)`.

    Its age is measured with the bucket's clock: the time of its object against that of an object
    written just now. The clocks of machines differ by minutes, so they decide nothing. The id in it
    says whose it is, so a process recognizes its own after a lost answer."""

    def __init__(self, url: str) -> None:
        """Takes the lease of the run at `url`, an address in a bucket, and removes older ones.
        ShoalError, with the holder's name and the time at which its lease ends, if another process
        holds it, or if the bucket does not answer."""
        (self.fs, root), self.url = buckets.connect(url), url
        self.folder, self.id, self.number = f"{root}/{LOCKS}", secrets.token_hex(8), 0
        self.before = ""  # id of the lease before this one
        numbers: list[int] = []
        while not self.number:  # 0: the lease is not taken yet
            ages = with_retries(self._ages, url)
            numbers = sorted(ages)
            newest = max(numbers, default=0)
            holder = with_retries(partial(self._holder, newest), url) if newest else {}
            # this process has written it, though the answer was lost
            if holder.get("id") == self.id:
                self.number = newest
                break
            # No holder: there is no lease yet, or it was removed meanwhile.
            left = _seconds_left(holder, ages[newest]) if holder else 0.0
            if left > 0:
                ends = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
                raise ShoalError(
                    f"the run folder {url} is in use by {holder['name']}, whose lease ends at "
                    f"{ends}, in {left:.0f} s: wait for it, stop it, or choose another run_name"
                )
            self.before = holder.get("id", "")
            with contextlib.suppress(FileExistsError):
                # another process was faster, or this one has written it already: the next round
                # reads the lease
                write = partial(
                    self.fs.pipe_file, self._path(newest + 1), self._record(), mode="create"
                )
                with_retries(write, url)
                # A higher number: another process took a lease meanwhile, and this one lost.
                if with_retries(self.numbers, url)[-1] == newest + 1:
                    self.number = newest + 1
        for number in numbers:
            if number < self.number:
                with_retries(partial(buckets.remove, self.fs, self._path(number)), url)

    def numbers(self) -> list[int]:
        """Returns the numbers of the leases in the bucket, from 1, in order; the last one is the
        newest. [] if there are none."""
        return sorted(
            int(name) for name in buckets.objects(self.fs, self.folder) if name.isdecimal()
        )

    def _ages(self) -> dict[int, float]:
        """Returns number -> age of each lease in the bucket, in seconds since it was renewed, by
        the bucket's own clock, which is read by writing an object and removing it. Also removes
        such objects that were left behind. ShoalError if this kind of storage has no such times;
        ConnectionError, after which `with_retries` calls again, if the object just written is not
        listed yet."""
        clock = f"{CLOCK}{secrets.token_hex(8)}"
        path = f"{self.folder}/{clock}"
        self.fs.pipe_file(path, b"-")
        try:
            objects = buckets.objects(self.fs, self.folder)
        finally:
            buckets.remove(self.fs, path)
        if clock not in objects:
            raise ConnectionError("an object that was just written is not listed yet")
        now = objects[clock].modified
        if not now:
            raise ShoalError(
                f"{self.url}: this kind of storage does not say when an object was written, so "
                "two processes could write to one run: give gs://, s3:// or a local folder"
            )
        ages = {}
        for name, stored in objects.items():
            age = float(now - stored.modified)
            if name.isdecimal():
                ages[int(name)] = age
            # Left by a process that ended within these few milliseconds.
            elif name.startswith(CLOCK) and age > LEASE_SECONDS:
                buckets.remove(self.fs, f"{self.folder}/{name}")
        return ages

    def check(self) -> None:
        """Raises `Fenced` if another process has taken over, and an error of the storage as it is;
        does nothing if this process still holds the lease, also if it is overdue."""
        newest = max(self.numbers(), default=0)
        if newest > self.number:
            name = self._holder(newest).get("name", "another process")
            raise Fenced(
                f"{self.url} was taken over by {name}, since this process had not renewed "
                f"its lease for {LEASE_SECONDS:.0f} s: it stops, and the run continues there"
            )

    def renew(self, lives: bool = True) -> None:
        """Renews the lease, or with `lives=False` gives it back, by writing its object again; its
        object stays in the bucket. Does not try again. Raises `Fenced` if another process has taken
        over, and an error of the storage as it is."""
        self.check()
        self.fs.pipe_file(self._path(self.number), self._record(lives))

    def _path(self, number: int) -> str:
        """Returns the path of a lease's object."""
        return f"{self.folder}/{number:06d}"

    def _holder(self, number: int) -> dict[str, Any]:
        """Returns the record of the process that holds a lease (`_record`); {} if the lease was
        removed meanwhile, because another process took the next one.

        If the record cannot be read, for example after a write that was cut off, the holder is
        unknown, and the lease ends by its age. A result that is not {} always has `name`; it may
        lack all else."""
        try:
            record = json.loads(self.fs.cat_file(self._path(number)))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            record = None
        holder = {"name": UNKNOWN_HOLDER}
        if isinstance(record, dict):
            holder.update(record)
        return holder

    def _record(self, lives: bool = True) -> bytes:
        """Returns what this process writes into its lease, as JSON: its name for messages, the
        lease's id, machine, process id and start, by which others see whether it has ended, and
        `lives`, False if the lease is given back."""
        pid = os.getpid()
        return json.dumps(
            {
                "name": f"process {pid} on {socket.gethostname()}",
                "id": self.id,
                "machine": _machine(),
                "pid": pid,
                "start": process_start(pid),
                "lives": lives,
            }
        ).encode()


def _seconds_left(holder: dict[str, Any], age: float) -> float:
    """Returns for how many seconds a lease that was renewed `age` seconds ago still lasts; 0 or
    less if it has ended. It ends at once if it was given back, or if its process ran on this
    machine and has ended. `holder`: the record in the lease (`Lease._record`)."""
    pid = holder.get("pid")
    has_ended = False
    if isinstance(pid, int) and holder.get("machine") == _machine():
        has_ended = process_start(pid) != holder.get("start")
    # Older records have `until` instead of `lives`: 0 in a lease that was given back.
    is_given_back = not holder.get("lives", holder.get("until", 1))
    if has_ended or is_given_back:
        return 0.0
    return LEASE_SECONDS - age


class _Closed(Exception):
    """Raised in the mirror's threads when the mirror is closed."""


class Mirror:
    """Keeps a bucket equal to a local run folder, in threads, until `close`. The run calls `check`,
    `saved` and `flush`.

    >>> with closing(Mirror(folder, most_unsaved=3, console=console)) as mirror:
    ...     mirror.flush()
    """

    def __init__(self, folder: Path, most_unsaved: int, console: Printer) -> None:
        """Takes the lease, fetches what the bucket has (`_begin`), and starts the threads.
        `folder`: the run's folder in the cache of buckets, whose path says which bucket is meant.
        `most_unsaved`: how many checkpoints may be in the folder alone. `console` prints warnings.
        ShoalError if another process holds the lease, or if the bucket does not answer."""
        self.folder, self.url, self.checkpoints = (
            folder,
            buckets.address(folder),
            folder / "checkpoints",
        )
        self.most_unsaved, self.console = most_unsaved, console
        self.fs, self.root = buckets.connect(self.url)
        # file -> (size, time) of the version that the bucket has
        self.sent: dict[str, tuple[int, int]] = {}
        # versions of the checkpoints that have a manifest in the bucket
        self.whole: set[int] = set()
        self.pending: list[int] = []  # versions of the checkpoints that were saved here
        self.fault: ShoalError | None = None  # the error that ends the run, once there is one
        # why the bucket does not answer, and since when (time.monotonic; 0: it answers)
        self._cause, self._silent_since = "", 0.0
        self._warned = ""  # what the last warning said about a bucket that does not answer
        self._asked = self._done = 0  # number of flushes asked for, and done
        self._closed, self._wake = threading.Event(), threading.Event()
        self.lease = Lease(self.url)
        try:
            self._begin()
        except BaseException:
            self.lease.renew(lives=False)
            raise
        self._threads = [
            threading.Thread(
                target=self._run_thread, args=[work], name=f"mirror: {work.__name__}", daemon=True
            )
            for work in (self._upload, self._renew)
        ]
        for thread in self._threads:
            thread.start()

    def _begin(self) -> None:
        """Fetches the bucket's files into the local folder, unless this folder was the last that
        wrote to the bucket and is therefore newer. Then notes in `sent` and `whole` which files and
        checkpoints the bucket has, and removes checkpoints whose upload was cut off."""
        marker = self.folder / MARKER
        objects = with_retries(partial(buckets.objects, self.fs, self.root), self.url)
        # Whether the lease before this process's own was taken from this folder.
        wrote_last = False
        if marker.is_file() and "config.yaml" in objects:
            wrote_last = marker.read_text() == self.lease.before
        if not wrote_last:
            marker.unlink(missing_ok=True)
            buckets.fetch_into(self.folder, weights=False, may_be_empty=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(self.lease.id)
        for left in self.folder.glob(".upload-*"):  # staging folders of processes that were killed
            shutil.rmtree(left)
        self.staging = Path(tempfile.mkdtemp(prefix=".upload-", dir=self.folder))
        self.whole = {int(Path(name).stem) for name in objects if name.startswith(f"{MANIFESTS}/")}
        known = self._plain_files()
        for name, stored in objects.items():
            matched = buckets.CHECKPOINT.fullmatch(name)
            if matched:
                # left by a process that was killed while it uploaded
                if int(matched["version"]) not in self.whole:
                    with_retries(partial(buckets.remove, self.fs, stored.path), self.url)
                continue
            # A file that is here is known as sent if it is the same, else it is uploaded again. One
            # that is not here is known as sent, too, so that `_remove` removes its object; but only
            # if this folder is the newer side.
            may_be_removed = name[0] != "." and not name.startswith("checkpoints_damaged/")
            if name in known or (wrote_last and may_be_removed):
                is_same = buckets.is_same(stored, self.folder / name)
                self.sent[name] = known[name] if is_same else (-1, 0)  # (-1, 0): no file has that

    # ---- called by the run

    def check(self) -> None:
        """Prints that the bucket does not answer, or that it answers again, once each; raises the
        ShoalError that ends the run, if a thread has met one. Never waits."""
        self._check(f"training continues, and what it writes is kept in {self.folder}")

    def _check(self, without_answer: str) -> None:
        """Raises the error that ends the run, if there is one. Otherwise prints that the bucket
        does not answer, or that it answers again, once each. `without_answer`: the end of the
        warning, which says what the run does meanwhile; a warning with another end is printed
        again."""
        if self.fault:
            raise self.fault
        if not self._silent_since:
            if self._warned:
                self.console.note(f"{self.url} answers again")
            self._warned = ""
        elif self._warned != without_answer:
            self.console.warning(f"{self.url} does not answer ({self._cause}): {without_answer}")
            self._warned = without_answer

    def saved(self, version: int) -> None:
        """Notes that a checkpoint was saved to the local folder. If more than `most_unsaved`
        checkpoints are newer than the newest one in the bucket, waits until enough are uploaded,
        else returns at once. ShoalError if the bucket does not answer for UNSAVED_SECONDS of the
        wait, or if a thread has failed. Uploads nothing itself."""
        self.pending.append(version)

        def are_few_unsaved() -> bool:
            newest_whole = max(self.whole, default=-1)
            unsaved = [version for version in self.pending if version > newest_whole]
            return len(unsaved) <= self.most_unsaved

        self._wait_until(
            are_few_unsaved,
            f"more than checkpoint.most_unsaved={self.most_unsaved} checkpoints are in "
            f"{self.folder} alone",
        )

    def flush(self) -> None:
        """Waits until the bucket has everything that the folder holds now. ShoalError if it does
        not answer for UNSAVED_SECONDS, or if a thread has failed."""
        # The uploading thread sets `_done` to the number of flushes that it has done.
        self._asked = asked = self._asked + 1
        self._wait_until(
            lambda: self._done >= asked, f"its newest files are in {self.folder} alone"
        )

    def _wait_until(self, is_done: Callable[[], bool], reason: str) -> None:
        """Wakes the uploading thread, and waits until `is_done()` is true. If the bucket does not
        answer, prints that the run waits, and why (`reason`); ShoalError if it has not answered for
        UNSAVED_SECONDS of the wait, or if a thread has failed."""
        began = time.monotonic()
        self._wake.set()
        waits = f"the run waits for it, at most {UNSAVED_SECONDS:.0f} s, as {reason}"
        while True:
            if is_done():
                self.check()
                return
            self._check(waits)
            if (
                self._silent_since
                and time.monotonic() - max(began, self._silent_since) > UNSAVED_SECONDS
            ):
                self.fault = ShoalError(  # the next round's `_check` raises it
                    f"{self.url} has not answered for {UNSAVED_SECONDS:.0f} s ({self._cause}), and "
                    f"the newest state of the run is in {self.folder} alone: once it answers "
                    "again, the same command on this machine continues from there"
                )
            time.sleep(0.02)

    def close(self) -> None:
        """Uploads what is left and gives the lease back, unless the bucket has failed; ends the
        threads and removes the staging folder in any case. ShoalError if the upload fails."""
        try:
            if not self.fault:
                self.flush()
        finally:
            self._closed.set()
            self._wake.set()
            for thread in self._threads:
                # In seconds. A thread that goes on, a daemon, ends with the process.
                thread.join(0 if self.fault else 30)
            if not self.fault:
                with contextlib.suppress(Exception):  # if this fails, the lease ends by itself
                    self.lease.renew(lives=False)
            shutil.rmtree(self.staging, ignore_errors=True)

    # ---- threads

    def _run_thread(self, work: Callable[[], None]) -> None:
        """Runs a thread's work, and raises nothing. An error of it becomes `fault`, which the run
        raises at its next call of `check`, `saved` or `flush`; `_Closed` is no error."""
        try:
            work()
        except _Closed:
            pass
        except Exception as error:
            if isinstance(error, ShoalError):
                self.fault = error
            else:
                self.fault = ShoalError(
                    f"{self.folder} cannot be uploaded to {self.url}: {type(error).__name__}: "
                    f"{error}"
                )

    def _renew(self) -> None:
        """Runs in a thread until the mirror is closed: renews the lease, more often while that
        fails. `Fenced`, which ends the run, if another process has taken over."""
        pause = LEASE_SECONDS / 3
        while not self._closed.wait(pause):
            try:
                self.lease.renew()
                pause = LEASE_SECONDS / 3
            except Fenced:
                raise
            except Exception:  # the uploading thread reports it
                pause = LEASE_SECONDS / 12

    def _upload(self) -> None:
        """Runs in a thread until the mirror is closed: uploads what is new, removes from the bucket
        what is gone here, and waits PERIOD_SECONDS or until `flush` wakes it. `_repeat` repeats
        what fails."""
        while not self._closed.is_set():
            # Read the checkpoints before the files, so that the files that these checkpoints need
            # are uploaded.
            asked = self._asked
            versions = self._versions()
            files = self._plain_files()
            # The summary says that the run has finished, so it follows the last checkpoint.
            files.pop("summary.json", None)
            self._upload_plain(files)
            for version in sorted(versions - self.whole, reverse=True):
                self._upload_checkpoint(version)
            self._upload_plain(self._plain_files())
            self._remove()
            self._done = asked
            if self._asked == asked:  # otherwise a flush was asked for meanwhile: go on at once
                self._wake.wait(PERIOD_SECONDS)
                self._wake.clear()

    def _repeat(self, do: Callable[[], Any]) -> Any:
        """Calls `do` until it succeeds, with growing pauses in between, and returns its result.
        Notes since when, and why, the bucket has not answered. A ShoalError is raised at once;
        `_Closed` if the mirror is closed or has failed."""
        pause = FIRST_PAUSE
        while not (self._closed.is_set() or self.fault):
            try:
                result = do()
                self._silent_since = 0.0
                return result
            except ShoalError:
                raise
            except Exception as error:  # each library of a storage has its own errors
                self._cause = buckets.cause(error)
                self._silent_since = self._silent_since or time.monotonic()
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        raise _Closed

    def _versions(self) -> set[int]:
        """Returns the versions of the checkpoints in the local folder."""
        entries = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return {int(entry.name) for entry in entries if entry.name.isdecimal()}

    def _plain_files(self) -> dict[str, tuple[int, int]]:
        """Returns name -> (size, time) of the local files outside checkpoints/, in the order of
        their upload (`_upload_order`). Hidden files and folders are not uploaded."""
        sizes_and_times = {}
        for walked, folders, names in os.walk(self.folder):
            folder = Path(walked)
            kept = []
            for name in folders:
                if name[0] != "." and folder / name != self.checkpoints:
                    kept.append(name)
            folders[:] = kept  # os.walk then enters only these
            for name in names:
                path = folder / name
                if name[0] == ".":
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    relative = path.relative_to(self.folder).as_posix()
                    sizes_and_times[relative] = stat.st_size, stat.st_mtime_ns
        return {name: sizes_and_times[name] for name in sorted(sizes_and_times, key=_upload_order)}

    def _upload_plain(self, files: dict[str, tuple[int, int]]) -> None:
        """Uploads those of the files (`_plain_files`) that have changed since their last upload, in
        their order; a file that was removed meanwhile is passed over."""
        # Upload a copy: a file that grows meanwhile would not have the size that was announced.
        copy = self.staging / "copy"
        for name, version in files.items():  # `version`: (size, time) of the file's content
            with contextlib.suppress(FileNotFoundError):
                if self.sent.get(name) != version:
                    shutil.copyfile(self.folder / name, copy)
                    self._upload_file(copy, name)
                    self.sent[name] = version

    def _upload_checkpoint(self, version: int) -> None:
        """Uploads a checkpoint's files and then its manifest, which makes it complete, and adds it
        to `whole`. Does nothing if the run removes the checkpoint at this moment. `Fenced` if
        another process has taken over."""
        name, stage = f"checkpoints/{version}", self.staging / str(version)
        try:  # hard links keep the files if the run removes the checkpoint meanwhile
            shutil.copytree(self.folder / name, stage, copy_function=os.link)
        except (shutil.Error, FileNotFoundError):
            shutil.rmtree(stage, ignore_errors=True)
            return
        files = sorted(path for path in stage.rglob("*") if path.is_file())
        manifest = {
            path.relative_to(stage).as_posix(): (path.stat().st_size, buckets.checksum(path))
            for path in files
        }
        for file in manifest:
            self._upload_file(stage / file, f"{name}/{file}")
        # Checked before the manifest: a process that lost the lease must complete no checkpoint.
        self._repeat(self.lease.check)
        path, text = f"{MANIFESTS}/{version}.json", json.dumps(manifest)
        self._repeat(lambda: self.fs.pipe_file(f"{self.root}/{path}", text.encode()))
        (self.folder / MANIFESTS).mkdir(exist_ok=True)
        (self.folder / path).write_text(text)
        self.whole.add(version)
        shutil.rmtree(stage)

    def _upload_file(self, file: Path, name: str) -> None:
        """Uploads a file to the object `name` of the run, repeated until it succeeds."""
        self._repeat(lambda: buckets.put(self.fs, file, f"{self.root}/{name}"))

    def _remove(self) -> None:
        """Removes from the bucket the files and checkpoints that the local folder no longer has, of
        a checkpoint the manifest first. `Fenced` if another process has taken over when a
        checkpoint is to be removed."""
        for name in self.sent.keys() - self._plain_files().keys():
            self._remove_object(name)
            del self.sent[name]
        for version in self.whole - self._versions():
            self._repeat(self.lease.check)
            self._remove_object(f"{MANIFESTS}/{version}.json")
            (self.folder / MANIFESTS / f"{version}.json").unlink(missing_ok=True)
            self.whole.discard(version)
            for name in self._repeat(
                partial(buckets.objects, self.fs, f"{self.root}/checkpoints/{version}")
            ):
                self._remove_object(f"checkpoints/{version}/{name}")

    def _remove_object(self, name: str) -> None:
        self._repeat(partial(buckets.remove, self.fs, f"{self.root}/{name}"))


def _upload_order(name: str) -> tuple[int, str]:
    """Returns the sort key of a file by its name within the run: first the settings and decisions
    of a run's parts, then config.yaml, which makes the folder a run, then all others, each by
    name."""
    if re.fullmatch(r"(config|decided)_\d+\.yaml", name):
        return 0, name
    if name == "config.yaml":
        return 1, name
    return 2, name
