"""Checkpoints: bit for bit, from any mesh to any other; which are kept; where one is found."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.serialization import serialization
from orbax.checkpoint._src.serialization.limits import LimitInFlightBytes
from small import QWEN3, learner, roles
from small import random_parameters as fresh_parameters
from tiny_runs import by_path, same_bits

from shoal.config.train import Config
from shoal.job.compilations import CompilationCounter
from shoal.job.job import Job
from shoal.model.parameters import Parameters, shardings
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.trainer.step import TrainState
from shoal.weights import checksum as checksums
from shoal.weights.checkpoints import (
    Checkpoints,
    DamagedCheckpoint,
    find_checkpoint,
    largest_array,
    load_parameters,
    restore,
)
from shoal.weights.orbax import load_orbax, orbax_silenced
from shoal.weights.tensor_files import LazyArray


@functools.cache
def random_parameters(seed: int = 0) -> Parameters:
    return fresh_parameters(QWEN3, seed)


def state_on(mesh: tuple[int, int, int], seed: int = 0) -> TrainState:
    where = roles(*mesh)
    parameters = random_parameters(seed)
    return learner(QWEN3, where=where).init(
        jax.device_put(parameters, shardings(QWEN3, where.trainer))
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three versions saved from eight devices, two kept."""
    folder = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=2)
    for version in (2, 4, 10):
        checkpoints.save(
            version,
            state_on((1, 4, 2), seed=version),
            {"cursor": 3 * version, "source": {"pending": []}},
        )
    checkpoints.close()
    return folder


def test_the_newest_are_kept(run):
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["10", "4"]


def test_of_checkpoints_with_equal_scores_the_newer_is_better(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1, keep_best=1)
    manager = SimpleNamespace(all_steps=lambda: [5, 3, 4, 6])
    monkeypatch.setattr(checkpoints, "_manager", manager)
    # Version 2 has no checkpoint, 6 no score.
    assert checkpoints.ranked({2: 0.9, 3: 0.5, 4: 0.5, 5: 0.25}) == [5, 3, 4]
    assert checkpoints.ranked({}) == []


def test_a_protected_version_outlives_newer_ones(tmp_path, monkeypatch):
    """The last good one, where what came after it is ruined."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    deleted: list[int] = []

    def all_steps():
        return [3, 4, 5]

    monkeypatch.setattr(
        checkpoints, "_manager", SimpleNamespace(all_steps=all_steps, delete=deleted.append)
    )
    checkpoints.protected = 3
    checkpoints._prune()
    assert deleted == [4]
    checkpoints.protected = None
    checkpoints._prune()
    assert deleted == [4, 3, 4]
    checkpoints.keep_last = 0  # all
    checkpoints._prune()
    assert deleted == [4, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        (1, 1, 1),
        (2, 2, 2),
        *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((1, 8, 1), (1, 4, 2))),
    ],
)
def test_parameters_come_back_bit_for_bit_on_another_mesh(run, mesh):
    role = roles(*mesh).trainer
    for version in (4, 10):
        read = load_parameters(run, version, QWEN3, role)
        assert same_bits(by_path(read), by_path(random_parameters(version)))
    for leaf, wanted in zip(
        jax.tree.leaves(read), jax.tree.leaves(shardings(QWEN3, role)), strict=True
    ):
        assert leaf.sharding == wanted
    assert mesh == (1, 1, 1) or not read.embed_tokens.sharding.is_fully_replicated


def test_what_else_is_saved(run):
    file = run / "checkpoints" / "10" / "extra" / "metadata"
    saved = json.loads(file.read_text())
    assert saved["cursor"] == 30 and saved["source"] == {"pending": []} and saved["published"] == []


@pytest.mark.slow
def test_a_checkpoint_with_other_versions_compiles_nothing(tmp_path):
    """Published weights of two versions, whose numbers differ from checkpoint to checkpoint."""
    checkpoints, state = Checkpoints(tmp_path / "checkpoints", keep_last=1), state_on((1, 1, 1))
    for version in (2, 5):
        counter = CompilationCounter()
        checkpoints.save(
            version, state, {}, {version - 1: state.trainable, version - 2: state.trainable}
        )
    assert counter.read() == 0
    checkpoints.close()


@pytest.mark.slow
def test_small_arrays_of_several_replicas_are_written_by_one_and_compile_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    state = state_on((2, 2, 2))
    counter = CompilationCounter()
    checkpoints.save(1, state, {})
    checkpoints.close()
    assert counter.read() <= 2  # checksums


def on_host(parameters: Parameters, used: list[int]) -> Parameters:
    """The parameters as a store of files has them; `used` gets the bytes of each that is
    read."""

    def lazy(leaf: jax.Array) -> LazyArray:
        values = np.asarray(leaf)

        def read(part: tuple[slice, ...]) -> np.ndarray:
            used.append(values[part].nbytes)
            return values[part]

        return LazyArray(leaf.shape, values.dtype, read)

    return jax.tree.map(lazy, parameters)


@pytest.mark.slow
def test_weights_outside_of_devices_are_saved_and_restored_there(tmp_path, monkeypatch):
    """One array at a time is on a device, for its checksum: a copy of the sampler's weights would
    not fit there."""
    one, parameters, held = learner(QWEN3), random_parameters(3), []
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(parameters)]

    def bytes_on_devices() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    plain = LazyArray.__array__

    def counted(array: LazyArray, *args) -> np.ndarray:
        held.append(bytes_on_devices())
        return plain(array, *args)

    monkeypatch.setattr(LazyArray, "__array__", counted)
    checkpoints, state = Checkpoints(tmp_path / "checkpoints", keep_last=1), state_on((1, 1, 1))
    read: list[int] = []
    before = bytes_on_devices()
    checkpoints.save(5, state, {}, {4: on_host(parameters, read)})
    checkpoints.close()
    assert sorted(read) == sorted(2 * sizes)  # for the checksum, and to be written
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), parameters)
    found = restore(tmp_path, 5, QWEN3, one.shapes(), shapes).published[4]
    assert len(held) == 2 * len(sizes) and max(held[: len(sizes)]) <= before + max(sizes)
    for leaf in jax.tree.leaves(found):
        assert isinstance(leaf, LazyArray)
    assert same_bits(by_path(found), by_path(parameters))
    flipped = tmp_path / "checkpoints" / "5" / "published"
    largest = max(
        (path for path in flipped.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    largest.write_bytes(
        bytes(byte ^ (place == 3000) for place, byte in enumerate(largest.read_bytes()))
    )
    with pytest.raises(DamagedCheckpoint, match="checkpoints/5 is damaged"):
        restore(tmp_path, 5, QWEN3, one.shapes(), shapes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_of_an_array_outside_of_devices_one_has_a_piece_at_a_time(monkeypatch, dtype):
    """With the checksum of the whole; positions that begin again in a later layer, as in a very
    large array, too."""
    on_device, part = [], checksums._array_sum

    def counted(piece, *args):
        on_device.append(piece.nbytes)
        return part(piece, *args)

    monkeypatch.setattr(checksums, "_array_sum", counted)
    monkeypatch.setattr(checksums, "PIECE_BYTES", 1000)
    for most in (2**32, 500):
        monkeypatch.setattr(checksums, "POSITIONS", most)
        for shape in ((), (3,), (1001,), (7, 5, 130), (5, 3, 1009)):
            shape = shape if most > 500 else (*shape, 2)  # compiled anew
            array = jax.random.normal(jax.random.key(1), shape).astype(dtype)
            on_device.clear()
            assert checksums.checksum([np.asarray(array)]) == int(
                checksums.array_checksum(array, jnp.uint32(0))
            )
            assert sum(on_device) == array.nbytes and max(on_device) <= 1000
            assert len(on_device) <= 1 or array.nbytes > 1000


@pytest.mark.slow
def test_one_device_to_eight(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    checkpoints.save(0, state_on((1, 1, 1)), {})
    checkpoints.close()
    read = load_parameters(tmp_path, 0, QWEN3, roles(1, 8).trainer)
    assert same_bits(by_path(read), by_path(random_parameters()))


def test_where_a_checkpoint_is_found(run, tmp_path, monkeypatch):
    # as numbers: 10 is after 4
    assert find_checkpoint(run) == find_checkpoint(run / "checkpoints") == (run, 10)
    assert find_checkpoint(run / "checkpoints" / "4") == (run, 4)
    assert find_checkpoint(tmp_path) is None and find_checkpoint(run) is not None
    # cut off while it was written
    (tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("steps: 3\n")  # a run before its first checkpoint
    for without in (tmp_path, tmp_path / "new"):
        with pytest.raises(
            ShoalError, match=rf"the run {without} has no checkpoint: wait for its first one"
        ):
            find_checkpoint(without)
    monkeypatch.chdir(run / "checkpoints")
    assert find_checkpoint(Path("4")) == (run, 4) and find_checkpoint(Path("..")) == (run, 10)


# Orbax drops reads that it had begun, whose event loop is closed by then.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_cannot_be_read_is_an_error(run, tmp_path):
    role = roles().trainer
    with pytest.raises(ShoalError, match=r"checkpoints/3 cannot be read .*choose another"):
        load_parameters(run, 3, QWEN3, role)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    checkpoints.save(1, state_on((1, 1, 1)), {})
    checkpoints.close()
    largest = max(
        (path for path in tmp_path.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    manifest = next(
        path for path in tmp_path.rglob("manifest.ocdbt") if path.parent.name == "state"
    )
    for file in (largest, manifest):
        whole = file.read_bytes()
        for damaged in (whole[: len(whole) // 2], b"{garbage" * 8 + whole[64:]):
            file.write_bytes(damaged)
            with (
                orbax_silenced(),
                pytest.raises(ShoalError, match="checkpoints/1 cannot be read") as error,
            ):
                load_parameters(tmp_path, 1, QWEN3, role)
            assert "{" not in str(error.value) and len(str(error.value)) < 200 + 2 * len(
                str(tmp_path)
            )
        file.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_with_a_flipped_bit_are_an_error(tmp_path, dtype):
    """Orbax notices some of them alone."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    checkpoints.save(1, state_on((1, 1, 1)), {})
    checkpoints.close()
    role = roles().trainer
    assert jax.tree.leaves(load_parameters(tmp_path, 1, QWEN3, role, dtype))[0].dtype == dtype
    largest = max(
        (path for path in tmp_path.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    whole, errors = largest.read_bytes(), 0
    for place in np.linspace(0, len(whole) - 1, 12).astype(int):
        largest.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            with orbax_silenced():
                read = load_parameters(tmp_path, 1, QWEN3, role, dtype)
        except ShoalError:
            errors += 1
        else:  # a moment's bit, or one that no array has
            wanted = jax.tree.map(lambda leaf: leaf.astype(dtype), random_parameters())
            assert same_bits(by_path(read), by_path(wanted)), place
    assert errors


def test_a_job_leaves_loggers_and_warnings_as_they_were(tmp_path):
    def seen():
        levels = [logging.getLogger(name).level for name in ("absl", "asyncio")]
        return [*levels, warnings.filters[:]]

    before = seen()
    with Job(Config(), Console()) as job:
        assert job.requested == Config() and all(
            now != then for now, then in zip(seen(), before, strict=True)
        )
        Checkpoints(tmp_path, keep_last=1).close()
    assert seen() == before


@pytest.mark.slow
def test_when_a_read_fails_all_others_have_ended(tmp_path, monkeypatch):
    """Those that Orbax dropped called back while the run went on, which then could wait for
    ever."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    checkpoints.save(1, state_on((1, 4, 2)), {})
    checkpoints.close()
    begun, ended, original = [], [], serialization.async_deserialize

    async def slow(*args, **options):
        number = len(begun)
        begun.append(number)
        if number == 0:
            ended.append(number)
            raise ValueError("this one is damaged")
        await asyncio.sleep(0.05)
        read = await original(*args, **options)
        ended.append(number)  # not in a `finally`: what is dropped and freed runs that too
        return read

    monkeypatch.setattr(serialization, "async_deserialize", slow)
    with orbax_silenced(), pytest.raises(DamagedCheckpoint, match="this one is damaged"):
        restore(tmp_path, 1, QWEN3, learner(QWEN3, where=roles(1, 4, 2)).shapes())
    assert len(begun) > 10 and sorted(ended) == begun
    with orbax_silenced(), pytest.raises(ShoalError, match="cannot be read"):
        begun.clear()
        ended.clear()
        load_parameters(tmp_path, 1, QWEN3, roles().trainer)
    assert len(begun) > 5 and sorted(ended) == begun


def test_a_call_to_a_closed_loop_of_orbax_is_dropped_whenever_it_comes_and_nothing_else(
    monkeypatch,
):
    seen = []

    def unraisablehook(unraisable):
        return seen.append(str(unraisable.exc_value))

    monkeypatch.setattr(sys, "unraisablehook", unraisablehook)
    load_orbax.__wrapped__()
    for text, owner in (
        ("Event loop is closed", None),
        ("Event loop is closed", print),
        ("another", None),
    ):
        sys.unraisablehook(SimpleNamespace(object=owner, exc_value=RuntimeError(text)))
    assert seen == ["Event loop is closed", "another"]


def test_a_number_that_was_not_saved_is_not_another(run):
    a, b = (by_path(load_parameters(run, version, QWEN3, roles().trainer)) for version in (4, 10))
    assert not same_bits(a, b) and all(np.isfinite(value).all() for value in a.values())


def test_on_a_cpu_few_arrays_are_written_at_once(tmp_path, monkeypatch):
    """All at once they are copied and compressed in memory: nearly a whole checkpoint more."""
    state, written, most = state_on((1, 1, 1)), 0, []
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(state)]
    largest = max(sizes)
    assert largest_array(learner(QWEN3).shapes()) == largest
    monkeypatch.setattr("shoal.weights.orbax.WRITTEN_BYTES", 1)
    monkeypatch.setattr("shoal.weights.orbax.GB", 1000)  # a thousandth of it is the least margin
    reserve, release = LimitInFlightBytes.wait_for_bytes, LimitInFlightBytes.release_bytes

    async def reserved(limit: Any, size: int) -> None:
        nonlocal written
        await reserve(limit, size)
        written += size
        most.append(written)

    async def released(limit: Any, size: int) -> None:
        nonlocal written
        written -= size
        await release(limit, size)

    monkeypatch.setattr(LimitInFlightBytes, "wait_for_bytes", reserved)
    monkeypatch.setattr(LimitInFlightBytes, "release_bytes", released)
    checkpoints = Checkpoints(
        tmp_path / "checkpoints", keep_last=1, in_background=False, largest_array=largest
    )
    checkpoints.save(1, state, {})
    checkpoints.close()
    assert sum(sizes) > 4 * largest >= 4 * max(most)
