"""Files that are written whole, places that cannot be written, and what a dry run says of them."""

from __future__ import annotations

import gzip
import json
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shoal import ShoalError
from shoal.config.commands import ViewConfig
from shoal.files import atomic_write, check_base, scratch_folder
from shoal.findings import Findings
from shoal.job.dry_run import check_files
from shoal.mesh.topology import parse_topology, placeholder_devices
from shoal.plan.analysis import Compiled, _read_compiled


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    """As two runs that start at once under one folder, and both write `last`."""
    file, both = tmp_path / "last", threading.Barrier(2)
    faults: list[BaseException] = []

    def write(text: str) -> None:
        try:
            with atomic_write(file) as temporary:
                temporary.write_text(text)
                both.wait(10)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=[text]) for text in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and file.read_text() in ("first", "second")
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_an_error_is_not_waited_after(tmp_path):
    began = time.monotonic()
    with pytest.raises(ValueError, match="mine"), scratch_folder(tmp_path / "to") as folder:
        (folder / "file").touch()
        raise ValueError("mine")
    assert time.monotonic() - began < 0.5 and not list(tmp_path.iterdir())


def test_a_place_is_reported_by_its_own_name():
    with pytest.raises(ShoalError, match=r"base_output_directory=/proc/x cannot be written"):
        check_base("/proc/x")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b"{}", mtime=0)[:-4],
        gzip.compress(b"[1]", mtime=0),
        gzip.compress(b'{"text": ""}', mtime=0),
        gzip.compress(b"\xff", mtime=0),
    ],
)
def test_a_damaged_plan_cache_is_no_cache(tmp_path, content):
    file = tmp_path / "one.json.gz"
    assert _read_compiled(file) is None
    file.write_bytes(content)
    assert _read_compiled(file) is None
    whole = Compiled(text="HloModule", seconds=1.0)
    file.write_bytes(gzip.compress(json.dumps(asdict(whole)).encode()))
    assert _read_compiled(file) == replace(whole, largest=[])


def test_the_page_of_a_view_is_a_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ShoalError, match="is a folder: give the name of a file"):
        check_files(ViewConfig(("x",), to=str(tmp_path / "folder")), Findings())
    check_files(ViewConfig(("x",), to=str(Path(tmp_path) / "page.html")), Findings())


@pytest.mark.parametrize("name", ["v5p-64", "v6e:4x8@2", "tpu7x-8", "h100:2x8"])
def test_devices_without_a_compiler_are_of_their_kind(name):
    topology = parse_topology(name)
    devices = placeholder_devices(topology)
    assert len({device.process_index for device in devices}) == topology.num_hosts
    assert devices[0].device_kind and devices[0].memory_stats() is None
