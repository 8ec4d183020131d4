"""Versions of the weights in files: whole or not at all, verified, written once, gone when nobody names them."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import FULLEST, QWEN3, random_parameters, roles

from shoal.model import tensor_file
from shoal.model.transformer import Model
from shoal.rollout import file_store
from shoal.rollout.file_store import FileStore, StoredFiles, in_memory
from shoal.rollout.publish import StoredChannel, StoredManifest
from shoal.types import ShoalError


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def channel(folder: Path, model: Model, trainer: Model | None = None) -> StoredChannel:
    return StoredChannel(trainer or model, {"far": model}, FileStore(folder))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder whose files are mapped, as in memory."""
    monkeypatch.setattr(file_store, "in_memory", lambda folder: True)
    return tmp_path


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [{}, {"data": 2, "tensor": 2}])
def test_a_sampler_of_another_type_and_layout_has_the_trainers_bits(folder, monkeypatch, dtype, shape):
    monkeypatch.setattr(tensor_file, "PART_BYTES", 1000)  # several threads write one tensor
    model = Model(FULLEST, roles(**shape).sampler, dtype)
    params = random_parameters(FULLEST)
    trainer = jax.device_put(params, jax.tree.map(
        lambda _: jax.sharding.NamedSharding(roles(2).trainer.mesh, jax.sharding.PartitionSpec()), params))
    made = channel(folder, model)
    manifest = made.publish(3, trainer)["far"]
    fetched = manifest.fetch()
    assert bits(fetched) == bits(jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    wanted = made.published_shapes()
    assert jax.tree.map(lambda a, b: a.sharding == b.sharding and a.dtype == b.dtype, fetched, wanted)
    assert bits(made.versions[3]) == bits(fetched) and list(made.versions) == [3] and 3 in made.versions
    made.publish(4, fetched)  # as a resumed run does
    assert bits(made.versions[4]) == bits(fetched)
    made.close()
    assert not list(folder.iterdir())


def test_weights_that_are_sampled_from_stay_though_newer_ones_are_published(folder):
    """JAX on CPU computes with mapped memory as it is: the trap, and that publication is out of it."""
    file = folder / "trap"
    file.write_bytes(np.zeros(4096, np.float32).tobytes())
    trapped = jax.device_put(np.memmap(file, np.float32, "r"))
    with open(file, "r+b") as stream:
        stream.write(np.ones(4096, np.float32).tobytes())
    assert np.asarray(trapped)[0] == 1.0, "JAX copies mapped memory now"

    model, params = Model(QWEN3, roles().sampler), random_parameters(QWEN3)
    made = channel(folder, model)
    first = made.publish(0, params)["far"]
    held, before = first.fetch(), bits(params)
    for version in (0, 1, 2):  # the first once more
        made.publish(version, jax.tree.map(lambda leaf, by=version: leaf + by + 1, params))
    made.release(lambda version: version == 2)
    assert bits(held) == before
    assert not first.exists
    with pytest.raises(LookupError, match="version 0 is not in"):
        first.fetch()
    assert [path.name[:6] for path in made.store.folder.iterdir() if path.is_dir()] == ["000002"]
    made.close()


def test_a_version_is_there_whole_or_not_at_all(folder, monkeypatch):
    model, params = Model(QWEN3, roles().sampler), random_parameters(QWEN3)
    made = channel(folder, model)

    def full(*args):
        (folder / "part").touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ShoalError, match=(
            f"publish.folder={folder} cannot be written: No space left on device; choose another place")):
        patch.setattr(file_store, "write_file", full)
        made.publish(1, params)
    assert not made.versions and [path.name for path in made.store.folder.iterdir()] == [".lock"]
    manifest = made.publish(1, params)["far"]
    assert manifest.exists and bits(manifest.fetch()) == bits(params)
    made.close()


def test_a_version_is_read_in_the_background(folder):
    model, params, gate = Model(QWEN3, roles().sampler), random_parameters(QWEN3), threading.Event()
    made = channel(folder, model)
    manifest = made.publish(1, params)["far"]

    class Slow:
        exists, version = True, 1

        def read(self, model: Model) -> Any:
            assert gate.wait(60)
            return manifest.stored.read(model)

    slow = StoredManifest(Slow(), model)  # type: ignore[arg-type]
    assert slow.fetch(wait=False) is None and slow.fetch(wait=False) is None
    gate.set()
    assert bits(slow.fetch()) == bits(params) == bits(manifest.fetch())
    made.release(lambda _: False)
    with pytest.raises(LookupError, match="version 1 is not in"):
        slow.fetch()
    made.close()


def test_weights_that_were_changed_are_not_sampled_from(folder):
    model, params = Model(QWEN3, roles().sampler), random_parameters(QWEN3)
    made = channel(folder, model)
    manifest = made.publish(1, params)["far"]
    file = manifest.stored.place / file_store.WEIGHTS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ShoalError, match=r"are not those that were published \(checksum of final_norm"):
        manifest.fetch()
    other = replace(QWEN3, hidden_size=64)
    with pytest.raises(ShoalError, match="are of another model than this sampler's"):
        StoredFiles(1, manifest.stored.place).read(Model(other, roles().sampler))
    made.close()


def test_checksums_differ_where_weights_do(folder):
    model, params = Model(QWEN3, roles().sampler), random_parameters(QWEN3)
    made = channel(folder, model)
    sums = []
    for version, by in ((0, 0.0), (1, 0.0), (2, 1e-3)):
        place = made.publish(version, jax.tree.map(lambda leaf, by=by: leaf + by, params))["far"].stored.place
        manifest = json.loads((place / file_store.MANIFEST).read_text())
        sums.append([one["checksum"] for one in manifest["tensors"].values()])
    assert sums[0] == sums[1] and all(a != b for a, b in zip(sums[1], sums[2], strict=True))
    assert manifest["version"] == 2 and manifest["dtype"] == "float32" and manifest["base"] is None
    made.close()


def test_a_folder_that_is_not_shared_or_takes_nothing_is_one_error(tmp_path):
    with pytest.raises(ShoalError, match=r"publish.folder=/no/where: the weights of version 7 were published there, "
                                         r"but \S+ finds no such folder: give one that trainer and samplers share"):
        StoredFiles(7, Path("/no/where/shoal-1/000007-1")).read(Model(QWEN3, roles().sampler))
    (tmp_path / "file").touch()
    with pytest.raises(ShoalError, match=f"publish.folder={tmp_path}/file/below cannot be written: Not a directory"):
        FileStore(tmp_path / "file" / "below")


def test_what_a_killed_trainer_left_is_removed(tmp_path):
    store, left = FileStore(tmp_path), tmp_path / "shoal-left"
    (left / "000001-1").mkdir(parents=True)
    (left / file_store.LOCK).touch()  # which nobody holds
    other = FileStore(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([store.folder, other.folder])
    store.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_which_folders_are_in_memory(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\nx {tmp_path}/nfs nfs rw 0 0\n")
    assert in_memory(tmp_path / "some" / "folder", mounts)
    assert not in_memory(tmp_path / "nfs" / "one", mounts) and not in_memory(Path("/usr"), mounts)
    assert not in_memory(tmp_path, tmp_path / "none")
