"""Checkpoints whose layers are stacked otherwise than in the program that reads them: bit for bit,
moments included, and split over the devices."""

from __future__ import annotations

import io
import json
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import learner, roles
from tiny_runs import Workshop, by_path, metrics, same_bits

from shoal import cli
from shoal.job.fingerprint import compare_facts
from shoal.mesh import Roles
from shoal.model import architecture
from shoal.model.architecture import Adapter, Architecture, Layer, StackLayers
from shoal.model.layers import layers_of_stacks
from shoal.model.parameters import Parameters, ParamSpec, Stacks, param_specs, trained_specs
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.trainer.step import TrainState
from shoal.weights.checkpoints import Checkpoints, load_parameters, restore
from shoal.weights.checksum import BY_LAYER, same_weights, weights_text
from shoal.weights.tensor_files import LazyArray

ONE_KIND = Architecture(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=16,
    num_layers=5,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    tie_embeddings=True,
)
WINDOWS = replace(ONE_KIND, pattern=(Layer(window=4), Layer(window=4), Layer()))
"""In stacks of the layers (0, 1), (2,) and (3, 4)."""
STACKINGS: dict[str, StackLayers] = {
    "each layer alone": ((0,), (1,), (2,), (3,), (4,)),
    "every third": ((0, 3), (1, 4), (2,)),
    "out of order": ((0, 4), (2,), (1, 3)),
}


def stack(monkeypatch: pytest.MonkeyPatch, stacks: StackLayers) -> None:
    """Has the program stack layers like this."""

    def groups(kinds: Sequence[Any]) -> list[tuple[range, ...]]:
        found = []
        for numbers in stacks:
            stride = numbers[1] - numbers[0] if len(numbers) > 1 else 1
            found.append((range(numbers[0], numbers[-1] + 1, stride),))
        return found

    monkeypatch.setattr(architecture, "repeating_patterns", groups)
    forget_programs()


def forget_programs() -> None:
    """Programs are kept by architecture; in which stacks it has its layers is not compared."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shoal."):
            for member in vars(module).values():
                if hasattr(member, "cache_clear"):
                    member.cache_clear()


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    forget_programs()


def values_of(name: str, shape: Sequence[int]) -> np.ndarray:
    """Numbers that depend on a name alone: those of one layer, however it is stacked."""
    numbers = zlib.crc32(name.encode()) % 8191 + np.arange(np.prod(shape, dtype=int))
    return (numbers % 8191 / 8191 - 0.5).astype(np.float32).reshape(shape)


def filled(specs: Parameters, shapes: Parameters, label: str) -> Parameters:
    """Parameters, or moments, with `values_of` each tensor's name."""

    def fill(spec: ParamSpec, shape: Any) -> jax.Array:
        values = np.empty(spec.shape, np.float32)
        for index, name in spec.names_by_index.items():
            values[index] = values_of(f"{label} {name}", values[index].shape)
        return jax.device_put(values.astype(shape.dtype), shape.sharding)

    return jax.tree.map(fill, specs, shapes)


def state_of(a: Architecture, where: Roles | None = None) -> TrainState:
    """A state in the stacks of this program, in which each number tells whose it is."""
    shapes = learner(a, where=where).shapes()
    specs = trained_specs(a)
    label = 0

    def fill(node: Any) -> Any:
        nonlocal label
        label += 1
        if isinstance(node, Parameters):
            return filled(specs, node, f"part {label}")
        return jax.device_put(np.full(node.shape, label, node.dtype), node.sharding)

    def is_part(node: Any) -> bool:
        return isinstance(node, Parameters)

    trees = jax.tree.map(fill, shapes.to_trees(), is_leaf=is_part)
    return TrainState.from_trees(trees)


def saved(folder: Path, state: TrainState, published: Any = None) -> Path:
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1)
    checkpoints.save(3, state, {}, published)
    checkpoints.close()
    return folder


def fresh(a: Architecture) -> Architecture:
    """The same model, whose stacks are not yet found."""
    return replace(a)


@pytest.mark.slow
@pytest.mark.parametrize("stacking", STACKINGS)
def test_a_checkpoint_is_read_in_other_stacks(tmp_path, monkeypatch, stacking):
    a = fresh(WINDOWS)
    assert a.stack_layers == ((0, 1), (2,), (3, 4))
    run = saved(tmp_path, state_of(a))
    stack(monkeypatch, STACKINGS[stacking])
    a = fresh(WINDOWS)
    assert a.stack_layers == STACKINGS[stacking]
    expected = state_of(a)
    found = restore(run, 3, a, learner(a).shapes())
    assert found.extra["stacks"] == [[0, 1], [2], [3, 4]]
    assert jax.tree.structure(found.state) == jax.tree.structure(expected)
    assert same_bits(by_path(found.state), by_path(expected))
    weights = load_parameters(run, 3, a, roles().trainer)
    assert same_bits(by_path(weights), by_path(expected.trainable))


@pytest.mark.slow
def test_layers_of_one_kind_are_read_in_several_stacks_and_back(tmp_path, monkeypatch):
    a = fresh(ONE_KIND)
    in_one = state_of(a)
    assert not isinstance(in_one.trainable.blocks, Stacks)
    saved(tmp_path / "one", in_one)
    with monkeypatch.context() as patched:
        stack(patched, STACKINGS["every third"])
        b = fresh(ONE_KIND)
        in_several = state_of(b)
        saved(tmp_path / "several", in_several)
        found = restore(tmp_path / "one", 3, b, learner(b).shapes()).state
        assert same_bits(by_path(found), by_path(in_several))
    forget_programs()
    found = restore(tmp_path / "several", 3, a, learner(a).shapes()).state
    assert same_bits(by_path(found), by_path(in_one))


@pytest.mark.slow
def test_on_many_devices_no_array_becomes_whole(tmp_path, monkeypatch):
    where = roles(fsdp=4, tensor=2)
    run = saved(tmp_path, state_of(fresh(WINDOWS), where))
    stack(monkeypatch, STACKINGS["out of order"])
    a = fresh(WINDOWS)
    shapes = learner(a, where=where).shapes()
    made: list[jax.Array] = []
    original = jax.jit

    def watched(function: Any, **options: Any) -> Any:
        program = original(function, **options)

        def call(*args: Any) -> Any:
            result = program(*args)
            made.extend(jax.tree.leaves(result))
            return result

        return call

    monkeypatch.setattr("shoal.weights.restack.jax.jit", watched)
    found = restore(run, 3, a, shapes).state
    monkeypatch.undo()
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(shapes), strict=True):
        assert leaf.sharding == wanted.sharding
    split = [array for array in made if not array.sharding.is_fully_replicated]
    assert len(split) >= 2 * 3 * 7  # both new stacks, weights and moments, seven products
    for array in split:
        assert max(shard.data.nbytes for shard in array.addressable_shards) <= array.nbytes / 4
    stack(monkeypatch, STACKINGS["out of order"])
    assert same_bits(by_path(found), by_path(state_of(fresh(WINDOWS), where)))


@pytest.mark.parametrize("lazily", [False, True])
def test_weights_of_older_versions_are_restacked_too(tmp_path, monkeypatch, lazily):
    a = fresh(WINDOWS)
    state = state_of(a)
    run = saved(tmp_path, state, {2: state.trainable})
    stack(monkeypatch, STACKINGS["out of order"])
    a = fresh(WINDOWS)
    shapes = learner(a).shapes()
    wanted = shapes.trainable
    if lazily:
        wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), wanted)
    found = restore(run, 3, a, shapes, wanted).published[2]
    assert all(isinstance(leaf, LazyArray) == lazily for leaf in jax.tree.leaves(found))
    assert same_bits(by_path(found), by_path(state_of(a).trainable))
    if lazily:
        q = found.blocks.blocks[0].q
        part = q.read((slice(1, 2), slice(0, 8), slice(2, 3)))
        assert np.array_equal(part, np.asarray(q)[1:2, :, 2:3])


def test_an_adapter_is_read_in_other_stacks(tmp_path, monkeypatch):
    adapted = replace(WINDOWS, adapter=Adapter(2, 4.0, ("q_proj", "down_proj")))
    run = saved(tmp_path, state_of(fresh(adapted)))
    stack(monkeypatch, STACKINGS["each layer alone"])
    a = fresh(adapted)
    found = restore(run, 3, a, learner(a).shapes()).state
    assert same_bits(by_path(found), by_path(state_of(a)))


@pytest.mark.parametrize("stacking", [None, "every third"])
def test_a_checkpoint_of_an_earlier_version_does_not_name_its_stacks(
    tmp_path, monkeypatch, stacking
):
    """`golden/windows_checkpoint.zip` is `saved(folder, state_of(WINDOWS))` of the last version
    that did not write them. Whoever changes `repeating_patterns` keeps this one for them."""
    golden = Path(__file__).parent / "golden" / "windows_checkpoint.zip"
    with zipfile.ZipFile(golden) as archive:
        archive.extractall(tmp_path)
    extra = json.loads((tmp_path / "checkpoints" / "3" / "extra" / "metadata").read_text())
    assert "stacks" not in extra
    if stacking:
        stack(monkeypatch, STACKINGS[stacking])
    a = fresh(WINDOWS)
    expected = state_of(a)
    found = restore(tmp_path, 3, a, learner(a).shapes()).state
    assert same_bits(by_path(found), by_path(expected))
    weights = load_parameters(tmp_path, 3, a, roles().trainer)
    assert same_bits(by_path(weights), by_path(expected.trainable))


def test_a_checkpoint_of_other_layers_is_of_another_model(tmp_path):
    run = saved(tmp_path, state_of(fresh(WINDOWS)))
    deeper = replace(WINDOWS, num_layers=6)
    with pytest.raises(ShoalError, match="was saved with another model or optimizer"):
        restore(run, 3, deeper, learner(deeper).shapes())
    with pytest.raises(ShoalError, match="checkpoints/3 cannot be read"):
        load_parameters(run, 3, deeper, roles().trainer)


def test_the_checksum_of_frozen_weights_does_not_depend_on_stacks(monkeypatch):
    def weights(a: Architecture) -> Parameters:
        shapes = learner(a).shapes().trainable
        return filled(param_specs(a), shapes, "weights")

    first = weights(fresh(WINDOWS))
    text = weights_text(first)
    assert text.endswith(BY_LAYER) and not weights_text(weights(ONE_KIND)).endswith(BY_LAYER)
    on_host = jax.tree.map(np.asarray, first)
    assert weights_text(on_host) == text
    exchanged = jax.tree.map(lambda leaf: leaf[::-1], first.blocks)
    assert weights_text(replace(first, blocks=exchanged)) != text
    for stacks in STACKINGS.values():
        stack(monkeypatch, stacks)
        others = weights(fresh(WINDOWS))
        assert layers_of_stacks(others.blocks) == stacks
        assert weights_text(others) == text
    assert same_weights(text, text) is True
    assert same_weights(text, f"0x00000000{BY_LAYER}") is False
    assert same_weights(text, "0x00000000") is None


def test_weights_of_an_earlier_versions_fingerprint_are_not_compared():
    written = io.StringIO()
    facts = {"machine": {}, "data": "4 rows", "training_rows": "4 rows", "rewards": {}}
    saved_facts = facts | {"base": "0x1"}
    compare_facts(saved_facts, facts | {"base": f"0x2{BY_LAYER}"}, Console(written))
    assert "its checkpoint is from an earlier version" in " ".join(written.getvalue().split())


@pytest.mark.slow
def test_a_run_goes_on_in_other_stacks(tmp_path, monkeypatch, capsys):
    """With frozen weights, which the checkpoint names by checksum, and a reference."""
    workshop = Workshop(tmp_path, "gemma3", num_hidden_layers=5)
    words = ("model.lora.rank=2", "algorithm.kl_coef=0.05", "optimizer.moments=float32")
    whole = workshop.train("whole", "steps=3", *words)
    cut = workshop.train("cut", "steps=2", *words)
    stack(monkeypatch, STACKINGS["each layer alone"])
    assert cli.main(["train", f"resume={cut}", "steps=3"]) == 0
    assert "is not checked" not in capsys.readouterr().err
    for ours, theirs in zip(metrics(cut), metrics(whole), strict=True):
        for name in ("loss", "grad_norm", "kl", "reward/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
    assert jnp.isfinite(metrics(cut)[-1]["loss"])
