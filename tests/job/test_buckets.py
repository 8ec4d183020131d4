"""Models, data, runs and exports in buckets: a real S3 server and GCS's emulator, and fsspec's
memory where the order of single operations counts."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import boto3
import botocore.exceptions
import fsspec
import pytest
from scripts import load
from test_bad_input import refused
from test_resume import WORDS, assert_equal_ends
from tiny_runs import Workshop, write_data

from shoal import ShoalError, buckets, cli, load_run
from shoal.buckets import (
    COPIES,
    INCOMPLETE,
    RUNS,
    address,
    area_of,
    cache_path,
    complete,
    fetch,
    fetch_into,
)
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.files import check_base, check_new_folder, find_input
from shoal.runs import mirror as mirrors
from shoal.runs.layout import find_named
from shoal.runs.mirror import MARKER, Fenced, Lease, Mirror
from shoal.tasks.task import load_by_name

servers = load("benchmarks/buckets.py")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server; its bucket is s3://bucket."""
    with servers.s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in servers.environment(server).items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path) -> Callable[[str], None]:
    """Makes this machine another one, with a cache of its own."""

    def become(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machines" / name))

    become("first")
    monkeypatch.setattr(buckets, "FRESH_SECONDS", 0.0)
    return become


@pytest.fixture
def memory(monkeypatch) -> Any:
    """The file system of memory://, empty, with a list of what was done; it may be told to fail."""
    fs = fsspec.filesystem("memory", use_listings_cache=False)
    fs.store.clear()
    fs.done, fs.failing = [], lambda name, path: False

    def wrapped(name: str, place: int) -> Any:
        original = getattr(type(fs), name)

        def call(*args: Any, **options: Any) -> Any:
            if fs.failing(name, args[place]):
                raise ConnectionError(f"no {name} today")
            fs.done.append((name, args[place].removeprefix("memory://")))
            return original(fs, *args, **options)

        return call

    for name, at in (
        ("put_file", 1),
        ("pipe_file", 0),
        ("rm_file", 0),
        ("get_file", 0),
        ("find", 0),
    ):
        monkeypatch.setattr(fs, name, wrapped(name, at), raising=False)
    monkeypatch.setattr(buckets, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(mirrors, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(mirrors, "LONGEST_PAUSE", 0.01)
    yield fs
    fs.store.clear()


def contents(folder: Path) -> dict[str, bytes]:
    result = {}
    for file in folder.rglob("*"):
        if file.is_file():
            result[file.relative_to(folder).as_posix()] = file.read_bytes()
    return result


def names(fs: Any, operation: str) -> list[str]:
    return [path for name, path in fs.done if name == operation]


# ---- addresses


def test_a_path_of_the_cache_says_its_address(tmp_path):
    for url in ("s3://bucket/a folder/model", "gs://b/runs/first", "memory://x/y", "file:///tmp/x"):
        assert address(cache_path(url, COPIES)) == address(cache_path(url, RUNS)) == url
        assert area_of(cache_path(url, RUNS)) == "runs" and cache_path(
            url + "/", RUNS
        ) == cache_path(url, RUNS)
    assert (
        address(tmp_path / "s3:" / "x") == str(tmp_path / "s3:" / "x") and area_of(tmp_path) == ""
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            "train base_output_directory=gs:/bucket/x",
            ["base_output_directory=gs:/bucket/x", "give gs://bucket/x"],
        ),
        ("train model=s3:/bucket/x", ["model.path=s3:/bucket/x", "give s3://bucket/x"]),
        (
            "train task=gsm8k task.path=zz://bucket/x",
            ["task.path=zz://bucket/x: zz:// is not known", "gs://, s3://"],
        ),
        ("groups s3://bucket/../other step=1", ["s3://bucket/../other", "without '..'"]),
        ("groups gs:/bucket/run step=1", ["run=gs:/bucket/run", "give gs://bucket/run"]),
        ("train publish.folder=s3://b/x", ["s3://b/x", "a local folder"]),
    ],
)
def test_addresses_that_name_nothing(capsys, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    refused(capsys, tmp_path, words.split(), *parts)


def test_a_missing_package_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    refused(
        capsys,
        tmp_path,
        ["train", "model=s3://bucket/model"],
        "s3:// is not installed",
        "pip install '.[s3]'",
    )


# ---- reading


def test_a_copy_is_fetched_once_and_follows_its_bucket(memory):
    memory.pipe(
        {
            "/b/model one/config.json": b"{}",
            "/b/model one/a.safetensors": b"1",
            "/b/model one/x/y": b"2",
        }
    )
    light = fetch("memory://b/model one", weights=False)
    assert contents(light) == {"config.json": b"{}", "x/y": b"2"}
    whole = fetch("memory://b/model one")
    assert whole == light and len(contents(whole)) == 3
    memory.done.clear()
    fetch("memory://b/model one")
    assert names(memory, "get_file") == []
    memory.pipe_file("/b/model one/config.json", b"[]")  # of the same size
    memory.rm_file("/b/model one/x/y")
    assert contents(fetch("memory://b/model one")) == {"config.json": b"[]", "a.safetensors": b"1"}
    assert names(memory, "get_file") == ["/b/model one/config.json"]
    assert fetch("memory://b/model one/config.json").read_bytes() == b"[]"


def test_an_address_that_may_be_empty_once_is_an_error_for_others(memory, monkeypatch):
    """A fetch that allows an empty address must not answer a later one that needs files."""
    monkeypatch.setattr(buckets, "FRESH_SECONDS", 60.0)
    url = "memory://b/nothing"
    assert not fetch(url, may_be_empty=True).exists()
    with pytest.raises(ShoalError, match="nothing"):
        fetch(url)


def test_what_changes_while_it_is_fetched_is_noticed(memory, monkeypatch):
    memory.pipe({"/b/m/config.json": b"{}", "/b/m/w": b"old"})
    original = memory.get_file

    def changed(path: str, to: str) -> None:
        original(path, to)
        memory.pipe_file("/b/m/w", b"new")

    monkeypatch.setattr(memory, "get_file", changed)
    with pytest.raises(ShoalError, match="memory://b/m: w changed while it was fetched"):
        fetch("memory://b/m")


def test_a_bucket_that_does_not_answer_is_asked_again(memory, monkeypatch):
    memory.pipe_file("/b/m/config.json", b"{}")
    failures = iter([True, True])
    memory.failing = lambda name, path: next(failures, False)
    assert contents(fetch("memory://b/m"))
    monkeypatch.setattr(buckets, "WAIT_SECONDS", 0.0)
    memory.failing = lambda name, path: True
    with pytest.raises(buckets.Unreachable, match="has not answered for 0 s"):
        find_input("memory://b/m", "model.path")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_large_file_has_two_parts_in_memory(s3, tmp_path, way):
    large, part = tmp_path / "large", buckets.PART_BYTES
    large.write_bytes(os.urandom(part // 4) * 16)
    fs, path = buckets.connect("s3://bucket/large")
    buckets.put(fs, large, path)  # clients are loaded
    tracemalloc.start()
    try:
        if way == "up":
            buckets.put(fs, large, path)
        else:
            fetch("s3://bucket/large")
        assert tracemalloc.get_traced_memory()[1] < 2 * part + (4 << 20)
    finally:
        tracemalloc.stop()
    assert fetch("s3://bucket/large").read_bytes() == large.read_bytes()


@pytest.mark.parametrize(
    "key",
    [
        "../../../../../../../../{tmp}/written",
        "/{tmp}/written",
        "a/../../written",
        "a//b",
        "./a",
        "a\\..\\b",
    ],
)
def test_a_key_that_leads_out_of_its_folder_is_refused(s3, tmp_path, key):
    """Whoever may write to a bucket would otherwise write any file of the machines that read it."""
    client = boto3.client("s3")
    name = key.format(tmp=str(tmp_path).strip("/"))
    folder = f"hostile-{hashlib.md5(key.encode()).hexdigest()}"
    for each in ("config.json", name):
        client.put_object(Bucket="bucket", Key=f"{folder}/m/{each}", Body=b"{}")
    for read in (
        fetch,
        lambda url: complete(cache_path(url, COPIES)),
        lambda url: check_new_folder(url, "to"),
    ):
        with pytest.raises(
            ShoalError,
            match=rf"{folder}/m names the file .*, which is refused: expected a relative",
        ):
            read(f"s3://bucket/{folder}/m")
    with pytest.raises(ShoalError, match="which is refused"):
        Work(f"s3://bucket/{folder}/m")
    assert sorted(os.listdir(tmp_path)) in ([], ["machines"])
    assert not [
        file
        for file in (tmp_path / "machines").rglob("*")
        if file.is_file() and file.name != MARKER
    ]


@pytest.mark.parametrize("name", ["../../written", "/written", "a//b", "a/./b", ""])
def test_a_manifest_that_names_another_file_is_refused(memory, name):
    memory.pipe(
        {
            "/b/run/config.yaml": b"{}",
            "/b/run/checkpoints/2/state/_METADATA": b"{}",
            "/b/written": b"x",
            "/b/run/.manifests/2.json": json.dumps({name: [1, "0"]}).encode(),
        }
    )
    run = fetch("memory://b/run", weights=False)
    with pytest.raises(
        ShoalError, match=r"b/run/.manifests/2.json names the file .*, which is refused"
    ):
        complete(run / "checkpoints" / "2")
    assert not list(run.parent.rglob("*written*"))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{'a': 1}",
        b'{"a": 1}',
        b'{"a": ["x", "y"]}',
        b"\xff",
        b'{"a": [1e999, "0"]}',
        b"[" * 100_000,
    ],
    ids=range(8),
)
def test_a_manifest_that_is_damaged_is_named(memory, text):
    memory.pipe(
        {
            "/b/run/config.yaml": b"{}",
            "/b/run/checkpoints/2/state/_METADATA": b"{}",
            "/b/run/.manifests/2.json": text,
        }
    )
    run = fetch("memory://b/run", weights=False)
    with pytest.raises(
        ShoalError, match=r"memory://b/run/.manifests/2.json is damaged .*choose another checkpoint"
    ):
        complete(run / "checkpoints" / "2")


def test_the_marks_of_folders_are_no_files(s3):
    """A console makes an object without content, whose key ends with a slash, where one asks for a
    folder."""
    client = boto3.client("s3")
    for key in ("marked/m/", "marked/m/sub/", "marked/m/sub/b", "marked/m/a"):
        client.put_object(Bucket="bucket", Key=key, Body=b"" if key.endswith("/") else b"x")
    assert contents(fetch("s3://bucket/marked/m")) == {"a": b"x", "sub/b": b"x"}
    client.put_object(Bucket="bucket", Key="marked/m/sub", Body=b"x")
    with pytest.raises(
        ShoalError, match="holds sub and sub/b: one name cannot be a file and a folder"
    ):
        fetch("s3://bucket/marked/m")


# ---- writing


def test_an_export_that_was_cut_is_not_taken_for_whole(memory, monkeypatch):
    monkeypatch.setattr(buckets, "WAIT_SECONDS", 0.0)
    for cut in range(7):
        memory.store.clear()
        to = check_new_folder("memory://b/out", "to")
        to.mkdir(parents=True)
        for name in ("config.json", "a.safetensors", "b.safetensors"):
            (to / name).write_text(name)
        count = iter(range(100))
        memory.failing = lambda name, path, count=count, cut=cut: (
            name not in ("find", "get_file") and next(count) >= cut
        )
        if cut < 5:
            with pytest.raises(ShoalError):
                buckets.deliver(to)
            memory.failing = lambda name, path: False
            assert (
                "/b/out/config.json" not in memory.store or "/b/out/b.safetensors" in memory.store
            )
            with pytest.raises(
                ShoalError, match="was not written to its end" if cut else "holds nothing"
            ):
                fetch("memory://b/out")
            check_new_folder("memory://b/out", "to")  # may be written again
        else:
            buckets.deliver(to)
            assert not to.exists() and len(contents(fetch("memory://b/out"))) == 3
            memory.failing = lambda name, path: False
            with pytest.raises(ShoalError, match="exists and is not empty"):
                check_new_folder("memory://b/out", "to")
    assert not [name for name in memory.store if name.endswith(INCOMPLETE)]


# ---- the lease


@pytest.mark.slow
def test_of_many_one_has_the_lease(s3):
    """Each tries at once to take a number that is free, and is told who has it."""
    results: list[Any] = []

    def take() -> None:
        try:
            results.append(Lease("s3://bucket/raced"))
        except ShoalError as error:
            results.append(str(error))

    for _ in range(3):
        results.clear()
        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [lease] = [one for one in results if isinstance(one, Lease)]
        for one in results:
            if one is not lease:
                assert f"in use by process {os.getpid()} on" in one
        lease.renew(lives=False)
    assert lease.numbers() == [3]


def of_another_machine(monkeypatch) -> None:
    def machine():
        return "another"

    monkeypatch.setattr(mirrors, "_machine", machine)


@pytest.mark.slow
def test_a_lease_ends_with_its_process_or_its_time(s3, monkeypatch):
    code = "import os; from shoal.runs.mirror import Lease; Lease('s3://bucket/left'); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    lease = Lease("s3://bucket/left")  # at once, since the process was of this machine
    of_another_machine(monkeypatch)
    with pytest.raises(
        ShoalError, match=r"whose lease ends at \d\d:\d\d:\d\d, in (60|59|58) s: wait for it"
    ):
        Lease("s3://bucket/left")
    monkeypatch.setattr(mirrors, "LEASE_SECONDS", 0.0)
    taken = Lease("s3://bucket/left")
    assert taken.number == lease.number + 1
    for act in (lease.check, lease.renew):
        with pytest.raises(Fenced, match="was taken over by process"):
            act()
    taken.renew()
    assert lease.fs.ls("bucket/left/.lock", detail=False) == [
        f"bucket/left/.lock/{taken.number:06d}"
    ]


@pytest.mark.parametrize("ahead", [-7200, -120, 120, 7200])
def test_no_clock_but_the_buckets_decides_how_old_a_lease_is(memory, monkeypatch, ahead):
    """Of machines whose clocks differ: a lease that lives is left alone, a dead one is taken after
    its time."""
    of_another_machine(monkeypatch)
    true_time = time.time

    def set_clock(seconds: float) -> None:
        def time():
            return true_time() + seconds

        monkeypatch.setattr(mirrors.time, "time", time)

    set_clock(ahead)
    first = Lease("memory://b/run")
    set_clock(-ahead)

    def machine():
        return "a third"

    monkeypatch.setattr(mirrors, "_machine", machine)
    with pytest.raises(ShoalError, match=r"is in use by process \d+ on .* in (60|59|58) s"):
        Lease("memory://b/run")
    memory.store["/b/run/.lock/000001"].created -= timedelta(seconds=61)
    assert Lease("memory://b/run").number == first.number + 1


@pytest.mark.parametrize("operation", ["pipe_file", "rm_file"])
def test_a_lost_answer_leaves_the_lease_with_its_process(memory, monkeypatch, operation):
    """What was asked is done, but the process sees a broken connection, and asks again."""
    Lease("memory://b/run").renew(lives=False)
    done = getattr(memory, operation)
    lost: list[str] = []

    def loses_the_answer(path: str, *args: Any, **options: Any) -> None:
        done(path, *args, **options)
        if path not in lost and "clock-" not in path:
            lost.append(path)
            raise ConnectionError("reset by peer")

    monkeypatch.setattr(memory, operation, loses_the_answer)
    lease = Lease("memory://b/run")
    assert lost and lease.number == 2 and lease.numbers() == [2]
    lease.renew()


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (
            '{"name": "process 7 on a", "id": "x", "machine": "m", "pid": 7, "start": "1", '
            '"until": 9}',
            "process 7 on a",
        ),
        ("", "a process that its lease does not name"),
        ("[]", "a process that its lease does not name"),
        ('{"id": "x", "pid": "7"}', "a process that its lease does not name"),
    ],
)
def test_a_lease_of_another_form_ends_by_its_age(memory, record, name):
    """As an earlier version wrote it, or a write that was cut off."""
    path = "/b/run/.lock/000001"
    memory.pipe_file(path, record.encode())
    with pytest.raises(
        ShoalError, match=f"is in use by {name}, whose lease ends at .* in (60|59|58) s"
    ):
        Lease("memory://b/run")
    memory.store[path].created -= timedelta(seconds=61)
    assert Lease("memory://b/run").number == 2


def test_a_lease_that_an_earlier_version_gave_back_is_free(memory):
    record = {
        "name": "process 7 on a",
        "id": "x",
        "machine": "m",
        "pid": 7,
        "start": "1",
        "until": 0,
    }
    memory.pipe_file("/b/run/.lock/000001", json.dumps(record).encode())
    assert Lease("memory://b/run").number == 2


def test_a_storage_that_says_no_times_holds_no_run(memory, monkeypatch):
    monkeypatch.setattr(buckets, "MODIFIED", ())
    with pytest.raises(ShoalError, match="does not say when an object was written"):
        Lease("memory://b/run")


# ---- a run that works


class Work:
    """What a run does to its folder, and the mirror of it."""

    def __init__(self, url: str = "memory://b/run", most_unsaved: int = 1) -> None:
        self.said: list[str] = []
        self.mirror = Mirror(cache_path(url, RUNS), most_unsaved, cast(Any, self))
        self.folder = self.mirror.folder

    def warning(self, text: str, key: str = "") -> None:
        self.said.append(text)

    note = warning

    def write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".tmp").write_text(text)
        file.with_suffix(".tmp").rename(file)

    def save(self, version: int, keep: int = 2) -> None:
        self.write(
            "metrics.jsonl", "".join(f'{{"step": {step}}}\n' for step in range(1, version + 1))
        )
        self.write(f".saving/{version}/state/d/array", f"weights {version}" * 100)
        self.write(f".saving/{version}/state/_METADATA", "{}")
        self.write(f".saving/{version}/extra/metadata", json.dumps({"version": version}))
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        (self.folder / ".saving" / str(version)).rename(self.folder / "checkpoints" / str(version))
        (self.folder / ".saving").rmdir()
        for old in sorted(map(int, os.listdir(self.folder / "checkpoints")))[:-keep]:
            shutil.rmtree(self.folder / "checkpoints" / str(old))
        self.mirror.saved(version)

    def kill(self) -> None:
        """As if the process were dead: no upload, no release."""
        self.mirror._closed.set()
        self.mirror._wake.set()
        for thread in self.mirror._threads:
            thread.join()


@pytest.fixture
def dead(monkeypatch) -> None:
    """All other processes have ended."""

    def seconds_left(holder, age):
        return 0.0

    monkeypatch.setattr(mirrors, "_seconds_left", seconds_left)


def fails_after(memory: Any, count: int) -> None:
    """Of what changes the bucket only so many operations are done."""
    left = iter(range(count))
    memory.failing = lambda name, path: (
        name in ("put_file", "pipe_file", "rm_file") and next(left, None) is None
    )


@pytest.mark.parametrize("count", range(1, 48, 3))
def test_cut_after_any_operation_the_bucket_holds_a_run(memory, machine, dead, count):
    """Its newest checkpoint is whole and has its metrics; what was being written is not seen."""
    fails_after(memory, count)
    work, saved = None, []
    with contextlib.suppress(ShoalError, ConnectionError):
        buckets.WAIT_SECONDS, before = 0.0, buckets.WAIT_SECONDS
        try:
            work = Work(most_unsaved=100)
        finally:
            buckets.WAIT_SECONDS = before
        work.write("config.yaml", "steps: 9\n")
        for version in (2, 4, 6, 8):
            work.save(version)
            saved.append(version)
            deadline = time.monotonic() + 0.2
            while (
                version not in work.mirror.whole
                and time.monotonic() < deadline
                and not work.mirror._silent_since
            ):
                time.sleep(0.001)
    if work:
        work.kill()
    memory.failing = lambda name, path: False
    machine("second")
    resumed = Work()
    if (resumed.folder / "checkpoints").is_dir():
        found = sorted(int(name) for name in os.listdir(resumed.folder / "checkpoints"))
    else:
        found = []
    assert set(found) <= set(saved)
    for version in found:
        complete(resumed.folder / "checkpoints" / str(version))
        assert (
            resumed.folder / f"checkpoints/{version}/state/d/array"
        ).read_text() == f"weights {version}" * 100
    if found:
        assert len((resumed.folder / "metrics.jsonl").read_text().splitlines()) >= found[-1]
        assert (resumed.folder / "config.yaml").is_file()
    resumed.write("config.yaml", "steps: 9\n")
    resumed.save(20)
    resumed.mirror.close()
    assert {
        path.split("/")[4] for path in memory.store if path.startswith("/b/run/checkpoints/")
    } <= {str(version) for version in resumed.mirror.whole}, "nothing half-written is left"


def test_a_manifest_comes_after_its_files_and_goes_before_them(memory):
    work = Work()
    work.write("config.yaml", "steps: 9\n")
    for version in (2, 4, 6):
        work.save(version)
        work.mirror.flush()
    work.mirror.close()
    done = []
    for name, path in memory.done:
        if "/.lock/" not in path:
            done.append((name, path.removeprefix("/b/run/")))
    for version in (2, 4, 6):
        at = done.index(("pipe_file", f".manifests/{version}.json"))
        before = [path for name, path in done[:at] if name == "put_file"]
        assert f"checkpoints/{version}/state/d/array" in before and "metrics.jsonl" in before
    at = done.index(("rm_file", ".manifests/2.json"))
    assert ("rm_file", "checkpoints/2/state/d/array") in done[at:] and (
        "pipe_file",
        ".manifests/6.json",
    ) in done[:at]
    assert sorted(work.mirror.whole) == [4, 6]


def test_the_settings_are_uploaded_first(memory, monkeypatch):
    """By them a folder in a bucket is known as a run; those of its segments come before them."""
    monkeypatch.setattr(mirrors, "PERIOD_SECONDS", 600.0)
    work = Work()
    work.mirror.flush()  # from here on nothing is uploaded until it closes
    for name in (
        "summary.json",
        "a.txt",
        "config.yaml",
        "config_4.yaml",
        "metrics.jsonl",
        "groups/step_1.parquet",
    ):
        work.write(name, "x")
    work.mirror.close()
    sent = [path.removeprefix("/b/run/") for path in names(memory, "put_file")]
    assert (
        sent[:2] == ["config_4.yaml", "config.yaml"]
        and sent[-1] == "summary.json"
        and len(sent) == 6
    )


def test_a_folder_that_wrote_last_goes_on_and_any_other_is_replaced(memory, machine, dead):
    work = Work()
    work.write("config.yaml", "steps: 9\n")
    work.save(2)
    work.mirror.flush()
    work.kill()
    work.write("later", "of steps that the bucket never saw")
    memory.failing = lambda name, path: name == "put_file"
    again = Work()
    assert (again.folder / "later").is_file()
    again.kill()
    memory.failing = lambda name, path: False
    machine("second")
    other = Work()
    assert not (other.folder / "later").exists() and (other.folder / "checkpoints" / "2").is_dir()
    other.write("theirs", "x")
    other.mirror.close()
    machine("first")
    memory.done.clear()
    back = Work()
    assert not (back.folder / "later").exists() and (back.folder / "theirs").is_file()
    back.mirror.close()


def test_training_goes_on_without_its_bucket_up_to_a_bound(memory, monkeypatch, dead):
    work = Work(most_unsaved=2)
    work.write("config.yaml", "steps: 9\n")
    work.save(1)
    work.mirror.flush()
    memory.failing = lambda name, path: name == "put_file"
    work.save(2)
    work.save(3)  # nothing waits for these
    while not work.mirror._silent_since:
        time.sleep(0.001)
    work.mirror.check()
    work.mirror.check()
    assert work.said == [
        "memory://b/run does not answer (no put_file today): training continues, and what it "
        f"writes is kept in {work.folder}"
    ]
    memory.failing = lambda name, path: False
    while work.mirror._silent_since:
        time.sleep(0.001)
    work.mirror.flush()
    work.mirror.check()
    assert work.said[1:] == ["memory://b/run answers again"] and 3 in work.mirror.whole
    memory.failing = lambda name, path: name == "put_file"
    monkeypatch.setattr(mirrors, "UNSAVED_SECONDS", 0.1)
    work.save(4)
    work.save(5)
    with pytest.raises(ShoalError, match=r"no put_file today.* is in \S*/runs/memory/b/run alone"):
        work.save(6)
    # Training does not continue now, and nothing says that it did.
    assert work.said[-1:] == [
        "memory://b/run does not answer (no put_file today): the run waits for it, at most 0 s, as "
        f"more than checkpoint.most_unsaved=2 checkpoints are in {work.folder} alone"
    ]
    with pytest.raises(ShoalError, match="has not answered"):
        work.mirror.check()
    work.mirror.close()
    assert sorted(os.listdir(work.folder / "checkpoints")) == ["5", "6"]
    memory.failing = lambda name, path: False
    again = Work()
    again.mirror.close()
    assert sorted(again.mirror.whole) == [5, 6]


def test_a_process_that_was_replaced_stops(memory, machine, dead, monkeypatch):
    monkeypatch.setattr(mirrors, "PERIOD_SECONDS", 0.01)
    work = Work()
    work.write("config.yaml", "steps: 9\n")
    machine("second")
    other = Work()
    with pytest.raises(Fenced, match="the run continues there"):
        work.save(2)
        work.mirror.flush()
    work.mirror.close()
    assert "/b/run/.manifests/2.json" not in memory.store
    other.mirror.close()


def test_a_file_of_a_checkpoint_that_is_another_is_not_read(memory, machine):
    work = Work()
    work.write("config.yaml", "steps: 9\n")
    work.save(2)
    work.mirror.close()
    memory.pipe_file("/b/run/checkpoints/2/state/d/array", b"w" * 900)
    run = fetch("memory://b/run", weights=False)
    assert not (run / "checkpoints/2/state/d").exists()
    with pytest.raises(
        ShoalError, match="state/d/array is not the file that the checkpoint's manifest names"
    ):
        complete(run / "checkpoints" / "2")


# ---- whole runs


@pytest.fixture(scope="module")
def whole(workshop: Workshop) -> Path:
    return workshop.train("whole", *WORDS)


@pytest.fixture(scope="module")
def stored(workshop: Workshop, whole: Path, s3: str, tmp_path_factory) -> str:
    """The address of a run in a bucket that was killed, and went on on another machine."""
    caches = tmp_path_factory.mktemp("caches")
    words = workshop.words(
        "first", *WORDS, "base_output_directory=s3://bucket/my runs", "checkpoint.most_unsaved=0"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(caches / "a")},
    ) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("step 5/6"):
                process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(caches / "b"))
        assert cli.main(words) == 0
    return "s3://bucket/my runs/first"


@pytest.mark.slow
def test_a_run_in_a_bucket_ends_as_one_on_disk(stored, whole, capsys):
    run = fetch(stored)
    complete(run / "checkpoints" / "6")
    assert_equal_ends(whole, run)
    assert "resumed from the checkpoint of step 4" in (run / "log.txt").read_text()
    assert json.loads((run / "summary.json").read_text())["run_folder"] == stored


@pytest.mark.system
def test_readers_take_its_address(stored, workshop, capsys, tmp_path):
    def ran(*words: str) -> str:
        assert cli.main(list(words)) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    assert "completion 0" in ran("groups", stored, "step=3", "group=0")
    assert not list(fetch(stored, weights=False).rglob("checkpoints/*/state/d/*"))
    assert "identical: sampled again bit for bit" in ran("replay", stored, "step=6", "group=0")
    assert "clocks aside" in ran("diff", stored, str(workshop.runs / "whole"))
    ran("view", stored, "to=s3://bucket/page.html")
    assert fetch("s3://bucket/page.html").stat().st_size > 100_000
    assert (
        load_run(stored).metrics["reward/mean"]
        and load_run("last", "s3://bucket/my runs").folder.name == "first"
    )
    ran("export", f"from={stored}", "to=s3://bucket/out/model")
    ran("export", f"from={workshop.runs / 'whole'}", f"to={tmp_path / 'model'}")
    exported, local = contents(fetch("s3://bucket/out/model")), contents(tmp_path / "model")
    # The cards differ in the commands of the two runs.
    assert exported.pop("README.md")[:60] == local.pop("README.md")[:60]
    assert exported == local
    assert "held_out" in ran("eval", f"model={stored}", "pass_k=0", "reward.workers=0")


@pytest.mark.system
def test_models_data_and_other_trees_are_read_from_buckets(s3, workshop, capsys, tmp_path):
    fs, _ = buckets.connect("s3://bucket")
    for name, folder in (("their model", workshop.model), ("data", workshop.folder / "data")):
        for file in folder.iterdir():
            fs.put_file(str(file), f"bucket/in/{name}/{file.name}")
    words = workshop.words(
        "from_bucket",
        "steps=1",
        "model=s3://bucket/in/their model",
        "train.evaluate_every=0",
        "task.path=s3://bucket/in/data/gsm8k_train.jsonl",
    )
    assert cli.main([*words, "--dry-run"]) == 0 and cli.main(words) == 0
    # of the file beside the one that was named
    assert "evaluation: 4 held_out" in capsys.readouterr().out
    for files in ("s3://bucket/in/data/*train.jsonl", "s3://bucket/in/data/gsm8k_train.jsonl"):
        words = workshop.words("from_files", "task.path=", f"task.files=[{files}]")
        assert cli.main([*words, "--dry-run"]) == 0
        task = TaskSection(name="gsm8k", files=(files,))
        assert (
            len(load_by_name(task, RewardSection()).train)
            == len(
                load_by_name(
                    TaskSection(name="gsm8k", path="s3://bucket/in/data/gsm8k_train.jsonl"),
                    RewardSection(),
                ).train
            )
            > 4
        )
    assert cli.main(["convert", f"from={workshop.model}", "to=s3://bucket/tree/0/items"]) == 0
    assert (
        cli.main(
            [
                "convert",
                "from=s3://bucket/tree/0/items",
                "format=huggingface",
                f"to={tmp_path / 'back'}",
                f"tokenizer={workshop.model}",
            ]
        )
        == 0
    )
    assert (tmp_path / "back" / "model.safetensors").stat().st_size


def test_a_sweep_writes_its_record_to_the_bucket(s3, workshop, capsys, machine, monkeypatch):
    from shoal.commands import multirun

    calls: list[Any] = []

    def run_process(words):
        return (calls.append(words), (0, False))[1]

    monkeypatch.setattr(multirun, "run_process", run_process)
    words = [
        *workshop.words("sweep", "base_output_directory=s3://bucket/sweeps", "seed=1,2"),
        "--multirun",
    ]
    assert cli.main(words) == 0
    assert [each[-2:] for each in calls] == [
        ["base_output_directory=s3://bucket/sweeps/sweep", f"run_name={number}"]
        for number in (0, 1)
    ]
    machine("second")
    record = json.loads(fetch("s3://bucket/sweeps/sweep/multirun.json").read_text())
    assert record["runs"][1]["folder"] == "s3://bucket/sweeps/sweep/1"
    assert cli.main([word.replace("seed=1,2", "seed=3,4") for word in words]) == 2
    assert "holds another sweep" in capsys.readouterr().err


@pytest.mark.system
def test_the_page_follows_a_run_in_a_bucket(stored):
    from shoal.commands.view.views import Viewer

    fs, path = buckets.connect(stored)
    text = fs.cat_file(f"{path}/metrics.jsonl")
    viewer = Viewer([stored])
    try:
        [one] = viewer.runs.values()
        viewer.refresh()
        before = one.curves.revision
        row = json.loads(text.splitlines()[-1]) | {"step": 7}
        fs.pipe_file(f"{path}/metrics.jsonl", text + json.dumps(row).encode() + b"\n")
        viewer.refresh()
        assert one.curves.revision != before
        assert not one.run.problems
    finally:
        fs.pipe_file(f"{path}/metrics.jsonl", text)
        viewer.close()


# ---- what a bucket refuses


class Expired(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(400)
        self.end_headers()
        self.wfile.write(
            b"<Error><Code>ExpiredToken</Code><Message>The provided token has "
            b"expired.</Message></Error>"
        )

    do_PUT = do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def test_a_bucket_that_is_not_there(s3, capsys, tmp_path):
    for words, key in (
        ("base_output_directory=s3://wrong-bucket/x", "base_output_directory"),
        ("base_output_directory=s3://wrong-bucket/x run_name=first", "base_output_directory"),
        ("task=gsm8k task.files=[s3://bucket/none-*.jsonl]", "task.files"),
        ("model=s3://wrong-bucket/m", "model.path"),
        ("task=gsm8k task.path=s3://bucket/nothing", "task.path"),
    ):
        for more in ([], ["--dry-run"]):
            refused(capsys, tmp_path, ["train", *words.split(), *more], f"{key}=s3://")


@pytest.mark.slow
def test_the_root_of_a_bucket_is_a_place_like_any_other(s3, capsys, tmp_path, machine):
    boto3.client("s3").create_bucket(Bucket="rooted")
    assert (
        check_base("s3://rooted") == check_base("s3://rooted/") == cache_path("s3://rooted", RUNS)
    )
    work = Work("s3://rooted")
    work.write("config.yaml", "steps: 9\n")
    work.save(2)
    work.mirror.close()
    machine("second")
    run = fetch("s3://rooted", weights=False)
    assert (run / "config.yaml").is_file() and find_named("s3://rooted", "checkpoints").is_dir()
    with pytest.raises(ShoalError, match="exists and is not empty"):
        check_new_folder("s3://rooted", "to")
    boto3.client("s3").create_bucket(Bucket="exported")
    to = check_new_folder("s3://exported", "to")
    to.mkdir(parents=True)
    (to / "config.json").write_text("{}")
    buckets.deliver(to)
    assert contents(fetch("s3://exported")) == {"config.json": b"{}"}


def test_a_request_that_cannot_be_made_is_not_waited_for(s3, memory, monkeypatch):
    """The client's reason stands in the second line of its error."""
    began = time.monotonic()
    with pytest.raises(
        ShoalError,
        match=r"base_output_directory=s3://Bad\$Name: no such request can be made "
        r"\(Parameter validation failed: Invalid bucket name \"Bad\$Name\"",
    ):
        check_base("s3://Bad$Name")
    assert time.monotonic() - began < buckets.WAIT_SECONDS / 2


def http_error(status: int) -> Exception:
    error = RuntimeError("an answer of gcsfs")
    vars(error)["code"] = str(status)
    return error


def s3_error(code: str, status: int = 0) -> Exception:
    error = OSError(errno.EINVAL, "an answer of s3fs")
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error.__cause__ = botocore.exceptions.ClientError(answer, "PutObject")
    return error


@pytest.mark.parametrize(
    ("error", "is_waited_for"),
    [
        (ConnectionError("reset"), True),
        (TimeoutError(), True),
        (OSError(errno.EIO, "broken"), True),
        (http_error(503), True),
        (http_error(429), True),
        (http_error(400), False),
        (http_error(412), False),
        (s3_error("InvalidBucketName"), False),
        (s3_error("BadDigest"), True),
        (s3_error("SlowDown"), True),
        (s3_error("PermanentRedirect", 301), False),
        (s3_error("AuthorizationHeaderMalformed", 400), False),
        (s3_error("EntityTooLarge", 400), False),
        (s3_error("RequestTimeout", 400), True),
        (s3_error("BadDigest", 400), True),
        (s3_error("TemporaryRedirect", 307), True),
        (s3_error("OperationAborted", 409), True),
        (s3_error("SlowDown", 503), True),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"), True),
        (botocore.exceptions.NoRegionError(), False),
        (ValueError("no number"), False),
        (KeyError("size"), False),
        (json.JSONDecodeError("a proxy's page", "<html>", 0), True),
        (OSError(errno.ENOSPC, "No space left"), False),
    ],
)
def test_what_is_waited_for(error, is_waited_for):
    assert bool(buckets.permanent_fault(error)) != is_waited_for


@pytest.mark.slow
def test_credentials_that_are_missing_or_have_expired(s3, capsys, tmp_path, monkeypatch):
    server = HTTPServer(("localhost", 0), Expired)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{server.server_port}")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        refused(
            capsys,
            tmp_path,
            ["train", "model=s3://bucket/m"],
            "model.path=s3://bucket/m",
            "have expired",
            "renew",
        )
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("HOME", str(tmp_path))
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        refused(
            capsys,
            tmp_path,
            ["train", "base_output_directory=s3://bucket/r"],
            "base_output_directory=s3://bucket/r",
            "no credentials that work",
            "AWS_PROFILE",
        )
    server.shutdown()
    server.server_close()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.slow
def test_a_bucket_that_may_only_be_read(capsys, tmp_path, memory, monkeypatch):
    def refuses(path: str, *_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(memory, "pipe_file", refuses)
    for words in (
        ["train", "base_output_directory=memory://b/runs", "run_name=first"],
        ["train", "base_output_directory=memory://b/runs", "--dry-run"],
        ["export", "from=tiny", "to=memory://b/out"],
        ["eval", "output=memory://b/answers.json"],
    ):
        refused(capsys, tmp_path, words, "=memory://b/", "access is refused (Access Denied)")


# ---- Google's


@pytest.mark.system
def test_gs_is_read_and_written_as_well(monkeypatch, machine, tmp_path):
    from gcp_storage_emulator.server import create_server

    server = create_server("localhost", 0, in_memory=True)
    server.start()
    try:
        if hasattr(server, "_api"):
            port = server._api._httpd.server_port
        else:
            port = server._httpd.server_port
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
        buckets.connect("gs://there/x")[0].mkdir("there")
        work = Work("gs://there/my run")
        work.write("config.yaml", "steps: 9\n")
        work.save(2)
        work.mirror.close()
        machine("second")
        fetch_into(cache_path("gs://there/my run", RUNS), weights=False)
        complete(cache_path("gs://there/my run/checkpoints/2", RUNS))
        assert (
            contents(cache_path("gs://there/my run", RUNS))["checkpoints/2/state/d/array"]
            == b"weights 2" * 100
        )
        data = write_data(tmp_path / "data")
        buckets.connect("gs://there")[0].put_file(str(data), "there/data.jsonl")
        assert find_input("gs://there/data.jsonl", "task.path").read_bytes() == data.read_bytes()
    finally:
        server.stop()
