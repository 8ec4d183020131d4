"""Versions of the weights in files: whole or not at all, verified, written once, gone when nobody
names them."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import FULLEST, QWEN3, random_parameters, roles

from shoal.mesh.devices import as_mesh
from shoal.model.transformer import Model
from shoal.records import ShoalError
from shoal.weights import checksum as checksums
from shoal.weights import store as weight_store
from shoal.weights import tensor_files
from shoal.weights.publish_folder import OWNER, file_system, remove_abandoned
from shoal.weights.sampler_copy import publish_to
from shoal.weights.store import FileStore, FileVersion, MemoryStore


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def fetch(manifest: Any, model: Model) -> Any:
    return manifest.read(model).result()()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder whose files are mapped, as in memory."""

    def file_system(folder, *_):
        return "tmpfs"

    monkeypatch.setattr(weight_store, "file_system", file_system)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [{}, {"data": 2, "tensor": 2}])
def test_a_sampler_of_another_type_and_layout_has_the_trainers_bits(
    folder, monkeypatch, dtype, shape
):
    monkeypatch.setattr(tensor_files, "PART_BYTES", 1000)  # several threads write one tensor
    model = Model(FULLEST, roles(**shape).sampler, dtype)
    params = random_parameters(FULLEST)
    trainer = jax.device_put(
        params,
        jax.tree.map(
            lambda _: jax.sharding.NamedSharding(
                roles(2).trainer.mesh, jax.sharding.PartitionSpec()
            ),
            params,
        ),
    )
    made = FileStore(folder, model)
    manifest = made.put(3, trainer)
    fetched = fetch(manifest, model)
    assert bits(fetched) == bits(jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    wanted = made.published_shapes()
    assert jax.tree.map(
        lambda a, b: a.sharding == b.sharding and a.dtype == b.dtype, fetched, wanted
    )
    assert bits(manifest.parameters(model)) == bits(fetched) and list(made.versions) == [3]
    made.put(4, fetched)  # as a resumed run does
    assert bits(made.versions[4].parameters(model)) == bits(fetched)
    made.close()
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_each_device_has_the_same_part_of_each_piece(folder, monkeypatch):
    """In memory and of files, layers apart and the feed-forward matrices in two pieces: nothing is
    exchanged for it."""
    monkeypatch.setattr(Model, "ffn_chunks", 2)
    model, params = Model(QWEN3, roles(tensor=2).sampler), random_parameters(QWEN3)
    held, read = (
        fetch(made(model).put(0, params), model)
        for made in (MemoryStore, partial(FileStore, folder))
    )
    assert jax.tree.structure(held) == jax.tree.structure(MemoryStore(model).published_shapes())
    assert bits(held) == bits(read)
    for number, block in enumerate(held.blocks):
        for whole, parts, axis in (
            (params.blocks.gate, block.gate, 1),
            (params.blocks.down, block.down, 0),
        ):
            for device, own in enumerate(np.split(np.asarray(whole[number]), 2, axis)):
                shards = []
                for part in parts:
                    shards.append(part.addressable_shards[device].data)
                assert np.concatenate(shards, axis).tobytes() == own.tobytes()
        assert np.asarray(block.q).tobytes() == np.asarray(params.blocks.q[number]).tobytes()
    # else a device had each array twice
    alone = publish_to(Model(QWEN3, roles().sampler), params, delete_source=True)
    assert params.blocks.q.is_deleted() and alone.embed_tokens is params.embed_tokens


@pytest.mark.slow
def test_weights_that_are_sampled_from_stay_though_newer_ones_are_published(folder):
    """JAX on CPU computes with mapped memory as it is: the trap, and that publication is out of
    it."""
    file = folder / "trap"
    file.write_bytes(np.zeros(4096, np.float32).tobytes())
    trapped = jax.device_put(np.memmap(file, np.float32, "r"))
    with open(file, "r+b") as stream:
        stream.write(np.ones(4096, np.float32).tobytes())
    assert np.asarray(trapped)[0] == 1.0, "JAX copies mapped memory now"

    model, params = Model(QWEN3, roles().sampler), random_parameters(QWEN3)
    made = FileStore(folder, model)
    first = made.put(0, params)
    held, before = fetch(first, model), bits(params)
    for version in (0, 1, 2):  # the first once more
        made.put(version, jax.tree.map(lambda leaf, by=version: leaf + by + 1, params))
    made.drop([0, 1])
    assert bits(held) == before
    assert not first.exists
    with pytest.raises(LookupError, match="version 0 is not in"):
        fetch(first, model)
    assert sorted(path.name[:6] for path in made.folder.iterdir()) == ["000002", OWNER[:6]]
    made.close()


def test_a_version_is_there_whole_or_not_at_all(folder, monkeypatch):
    model, params = Model(QWEN3, roles().sampler), random_parameters(QWEN3)
    made = FileStore(folder, model)

    def full(*args):
        (folder / "part").touch()
        raise OSError(28, "No space left on device")

    with (
        monkeypatch.context() as patch,
        pytest.raises(
            ShoalError,
            match=(
                f"publish.folder={folder} cannot be written: No space left on device; choose "
                "another place"
            ),
        ),
    ):
        patch.setattr(weight_store, "write_file", full)
        made.put(1, params)
    assert not made.versions and [path.name for path in made.folder.iterdir()] == [OWNER]
    manifest = made.put(1, params)
    assert manifest.exists and bits(fetch(manifest, model)) == bits(params)
    made.close()


def test_a_version_that_was_released_is_not_read(folder):
    model = Model(QWEN3, roles().sampler)
    made = FileStore(folder, model)
    manifest = made.put(1, random_parameters(QWEN3))
    made.drop(list(made.versions))
    assert not manifest.exists and not list(made.versions)
    with pytest.raises(LookupError, match="version 1 is not in"):
        fetch(manifest, model)
    made.close()


def test_weights_that_were_changed_are_not_sampled_from(folder):
    model, params = Model(QWEN3, roles().sampler), random_parameters(QWEN3)
    made = FileStore(folder, model)
    manifest = made.put(1, params)
    data = bytearray(manifest.path.read_bytes())
    data[-1] ^= 1
    manifest.path.write_bytes(data)
    with pytest.raises(
        ShoalError, match=r"are not those that were published \(checksum of final_norm"
    ):
        fetch(manifest, model)
    made.close()


def test_checksums_differ_where_weights_do(folder):
    model, params = Model(QWEN3, roles().sampler), random_parameters(QWEN3)
    made = FileStore(folder, model)
    sums = []
    for version, by in ((0, 0.0), (1, 0.0), (2, 1e-3)):
        sums.append(
            [
                *made.put(
                    version, jax.tree.map(lambda leaf, by=by: leaf + by, params)
                ).checksums.values()
            ]
        )
    assert sums[0] == sums[1] and all(a != b for a, b in zip(sums[1], sums[2], strict=True))
    made.close()


@pytest.mark.slow
def test_weights_of_a_checkpoint_are_published_with_a_piece_at_a_time_on_a_device(
    folder, monkeypatch
):
    """As a resumed run does it, whose older versions were read to the host; with the same
    checksums."""
    on_device, part = [], checksums._array_sum

    def counted(piece, *args):
        on_device.append(piece.nbytes)
        return part(piece, *args)

    monkeypatch.setattr(checksums, "_array_sum", counted)
    monkeypatch.setattr(checksums, "PIECE_BYTES", 5000)
    made, params = FileStore(folder, Model(QWEN3, roles().sampler)), random_parameters(QWEN3)
    one, other = made.put(0, params), made.put(1, jax.tree.map(np.asarray, params))
    assert one.checksums == other.checksums and bits(other.parameters(made.model)) == bits(params)
    assert sum(on_device) == sum(map(len, bits(params))) and max(on_device) <= 5000
    made.close()


def test_a_folder_that_is_not_shared_or_takes_nothing_is_one_error(tmp_path):
    with pytest.raises(
        ShoalError,
        match=r"publish.folder=/no/where: the weights of version 7 were published there, "
        r"but \S+ finds no such folder: give one that trainer and samplers share",
    ):
        FileVersion(7, Path("/no/where/shoal-1/000007-1"), {}).read_now(
            Model(QWEN3, roles().sampler), {}
        )
    (tmp_path / "file").touch()
    with pytest.raises(
        ShoalError, match=f"publish.folder={tmp_path}/file/below cannot be written: Not a directory"
    ):
        FileStore(tmp_path / "file" / "below", Model(QWEN3, roles().sampler))


def abandoned(parent: Path, name: str = "shoal-left", **changes: str) -> Path:
    """A folder as a store has it whose process was killed: marked, and locked by nobody."""
    made = FileStore(parent, Model(QWEN3, roles().sampler))
    left = parent / name
    left.mkdir()
    (left / "000001-1").mkdir()
    owner = json.loads((made.folder / OWNER).read_text())
    (left / OWNER).write_text(json.dumps({**owner, "folder": str(left), **changes}))
    made.close()
    return left


def test_what_a_killed_trainer_left_is_removed(tmp_path):
    model = Model(QWEN3, roles().sampler)
    one, left = FileStore(tmp_path, model), abandoned(tmp_path)
    other = FileStore(tmp_path, model)
    assert sorted(tmp_path.iterdir()) == sorted([one.folder, other.folder]) and not left.exists()
    one.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_folders_that_no_store_marked_stay(tmp_path):
    """A run folder, with a lock file that nobody holds; folders of other hosts; one that was
    copied, marker and all; markers that hold anything; and all of them where other hosts may
    write."""
    run = tmp_path / "shoal-runs" / "checkpoints"
    run.mkdir(parents=True)
    (tmp_path / "shoal-locked").mkdir()
    (tmp_path / "shoal-locked" / ".lock").touch()
    abandoned(tmp_path, "shoal-elsewhere", host="elsewhere")
    abandoned(tmp_path, "shoal-copy", folder=str(tmp_path / "shoal-other"))
    for number, text in enumerate(("", "[1]", "{", '{"program": "mine"}')):
        folder = tmp_path / f"shoal-{number}"
        folder.mkdir()
        (folder / OWNER).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    FileStore(tmp_path, Model(QWEN3, roles().sampler)).close()
    assert sorted(tmp_path.rglob("*")) == before

    mounts = tmp_path / "mounts"
    left = abandoned(tmp_path)
    for kind in ("nfs4", "lustre", "fuse.sshfs", "9p"):
        mounts.write_text(f"ext4 / ext4 rw 0 0\nserver {tmp_path} {kind} rw 0 0\n")
        remove_abandoned(tmp_path, mounts)
    remove_abandoned(tmp_path, tmp_path / "none")
    assert left.exists()
    mounts.write_text(f"server / nfs rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n")
    remove_abandoned(tmp_path, mounts)
    assert not left.exists() and run.exists()


@pytest.mark.slow
def test_parts_are_made_once_by_the_thread_that_publishes():
    """Hosts in threads read a version at once, which has new arrays: JAX fills an array's list of
    shards at the first look, without a lock."""
    model, interval = Model(QWEN3, roles(data=4).sampler), sys.getswitchinterval()
    hosts = []
    for replica in model.role.mesh.devices:
        hosts.append(
            model.on(replace(model.role, mesh=as_mesh(replica[None], model.role.mesh.axis_names)))
        )
    made, wrong = MemoryStore(model, in_parts=True), []
    params = random_parameters(QWEN3)

    def read(manifest: Any, host: Model, start: threading.Barrier) -> None:
        try:
            start.wait()
            fetch(manifest, host)
        except Exception as error:  # of a thread: shown by the test
            wrong.append(error)

    sys.setswitchinterval(1e-6)
    try:
        for version in range(60):
            manifest = made.put(version, jax.tree.map(lambda leaf: leaf + 1, params))
            start = threading.Barrier(4)
            threads = [
                threading.Thread(target=read, args=(manifest, host, start)) for host in hosts
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            made.drop(list(made.versions))
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_parts_are_made_only_where_hosts_have_parts(monkeypatch):
    model, params, looked = Model(QWEN3, roles().sampler), random_parameters(QWEN3), []
    monkeypatch.setattr(weight_store, "shards_of", looked.append)
    made = MemoryStore(model)
    given = fetch(made.put(0, params), model)
    assert not looked and all(
        map(lambda a, b: a is b, jax.tree.leaves(given), jax.tree.leaves(params))
    )


def test_which_file_system_a_folder_lies_in(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/vda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\nx {tmp_path}/nfs nfs rw 0 0\n"
    )
    assert file_system(tmp_path / "some" / "folder", mounts) == "tmpfs"
    assert (
        file_system(tmp_path / "nfs" / "one", mounts) == "nfs"
        and file_system(Path("/usr"), mounts) == "ext4"
    )
    assert file_system(tmp_path, tmp_path / "none") == ""
