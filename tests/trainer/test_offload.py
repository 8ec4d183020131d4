"""Moments, and what layers store, in the host's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled_elsewhere
from small import FULLEST, ON_POLICY, QWEN3, batches, random_groups, relative, roles
from test_lora import adapted
from tiny_runs import by_path, same_bits

from shoal.budget.auto import trained_model
from shoal.budget.memory import bytes_per_device, weight_budget
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.config.sections.optimizer import OptimizerSection
from shoal.config.train import Config
from shoal.mesh import PINNED_HOST, has_host_memory, make_roles
from shoal.mesh.topology import parse_topology, placeholder_devices
from shoal.model.architecture import Architecture
from shoal.model.parameters import initialise
from shoal.model.transformer import Model
from shoal.records import ShoalError
from shoal.trainer import step
from shoal.trainer.step import Learner, TrainState, is_intact
from shoal.weights.checkpoints import Checkpoints, restore
from shoal.weights.source import ModelSource

GROUPS = random_groups(QWEN3, 3, 4, 20, 20)


def made(
    offload: bool,
    a: Architecture = QWEN3,
    dtype: Any = jnp.float32,
    fsdp: int = 1,
    tensor: int = 1,
    moments: Any = "float32",
) -> Learner:
    section = OptimizerSection(
        lr=1e-2,
        warmup_steps=0,
        weight_decay=0.1,
        clip_grad_norm=0.01,
        moments=moments,
        offload=offload,
    )
    return Learner(
        Model(a, roles(fsdp=fsdp, tensor=tensor).trainer, dtype), ON_POLICY, section, 10, seed=3
    )


def trained(one: Learner, updates: int = 2, state: TrainState | None = None) -> TrainState:
    role = one.model.role
    state = state or one.init(initialise(one.model.architecture, 1, role))
    for _ in range(updates):
        total = None
        for batch in batches(GROUPS, shards=role.row_shards):
            total, _ = one.accumulate(total, state, batch)
        assert total is not None
        state, _ = one.apply(state, total)
    return state


def moments_of(state: TrainState) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]


KINDS = [
    {},
    {"dtype": jnp.bfloat16, "moments": "bfloat16", "fsdp": 8},
    {"a": adapted(FULLEST)},
    {"a": replace(FULLEST, tie_embeddings=False), "dtype": jnp.bfloat16, "fsdp": 4, "tensor": 2},
]


@cache
def on_the_devices(number: int) -> TrainState:
    return trained(made(False, **KINDS[number]))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_the_updates_are_bitwise_those_of_moments_on_the_devices(number):
    there = made(True, **KINDS[number])
    first, second = on_the_devices(number), trained(there)
    assert same_bits(by_path(first), by_path(second))
    for leaf in jax.tree.leaves(second):
        assert leaf.sharding.memory_kind == (
            PINNED_HOST if any(leaf is one for one in moments_of(second)) else "device"
        )
    assert moments_of(second) and int(second.updates) == 2
    assert [leaf.sharding for leaf in jax.tree.leaves(there.shapes())] == [
        leaf.sharding for leaf in jax.tree.leaves(second)
    ]
    held = second.optimizer, first.optimizer
    assert bytes_per_device(held[0]) <= 16 < bytes_per_device(held[1])  # counters


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_an_update_a_layer_at_a_time_is_the_whole_ones(number, monkeypatch):
    """As accelerators do it. In bfloat16 it rounds by other bits."""
    kind, whole = KINDS[number], on_the_devices(number)

    def streams(section, role):
        return section.offload

    monkeypatch.setattr(step, "_updates_by_layer", streams)
    step._optimizer_programs.cache_clear()
    try:
        other = trained(made(True, **kind))
    finally:
        step._optimizer_programs.cache_clear()
    for (name, one), (_, two) in zip(by_path(whole).items(), by_path(other).items(), strict=True):
        one, two = (np.asarray(x, np.float64) for x in (one, two))
        bound = 2e-2 if kind.get("moments") else 1e-4 if kind.get("dtype") else 1e-6
        assert not one.any() or relative(two, one) < bound, name
    assert {leaf.sharding.memory_kind for leaf in moments_of(other)} == {PINNED_HOST}


@pytest.mark.slow
@pytest.mark.parametrize("by_layer", [False, True])
def test_an_overflow_changes_no_moment(by_layer, monkeypatch):
    def streams(section, role):
        return by_layer

    monkeypatch.setattr(step, "_updates_by_layer", streams)
    step._optimizer_programs.cache_clear()
    try:
        one = made(True, dtype=jnp.float16)
        state = trained(one)
        before = jax.tree.map(np.array, replace(state, loss_scale=None))
        (batch,) = batches(GROUPS)
        total, _ = one.accumulate(
            None, state, replace(batch, weight=batch.weight * np.float32(1e9))
        )
        after, applied = one.apply(state, total)
    finally:
        step._optimizer_programs.cache_clear()
    assert (
        int(applied.overflow) == int(applied.skipped) == 1 and state.loss_scale and after.loss_scale
    )
    assert float(after.loss_scale.value) == float(state.loss_scale.value) / 2
    assert same_bits(by_path(replace(after, loss_scale=None)), by_path(before))
    assert not is_intact(state) and is_intact(after)  # the moments were given away


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_moments_in_either_memory(tmp_path: Path):
    here, there = made(False, fsdp=4, tensor=2), made(True, fsdp=4, tensor=2)
    unbroken = trained(here, 4)
    for name, first, second in (
        ("to host", here, there),
        ("to device", there, here),
        ("host", there, there),
    ):
        checkpoints = Checkpoints(tmp_path / name / "checkpoints", keep_last=1)
        checkpoints.save(2, trained(first), {})
        checkpoints.close()
        found = restore(tmp_path / name, 2, second.model.architecture, second.shapes()).state
        assert {leaf.sharding.memory_kind for leaf in moments_of(found)} == {
            PINNED_HOST if second is there else "device"
        }
        assert same_bits(by_path(trained(second, 2, found)), by_path(unbroken)), name


def test_a_device_without_memory_of_its_host_is_refused():
    def without() -> list[Any]:
        return [SimpleNamespace(kind="device")]

    device = SimpleNamespace(addressable_memories=without, device_kind="toy", platform="cpu", id=0)
    where: Any = SimpleNamespace(
        trainer=SimpleNamespace(mesh=SimpleNamespace(devices=np.array([device])))
    )
    assert has_host_memory(jax.devices()[0]) and not has_host_memory(device)
    spec = ModelSource(Path(), QWEN3)
    for config, text in (
        (
            Config(optimizer=OptimizerSection(offload=True)),
            "optimizer.offload=true: .* optimizer.offload=false",
        ),
        (Config(model=ModelSection(remat="offload")), "model.remat=offload: .* model.remat=full"),
    ):
        with pytest.raises(ShoalError, match=text) as error:
            trained_model(config, spec, where)
        assert error.value.key == text.partition("=")[0] and "toy has no host memory" in str(
            error.value
        )


@pytest.mark.parametrize(("topology", "is_apart"), [("v6e-8", True), ("h200:8", True), ("", False)])
def test_the_table_of_sizes_has_the_moments_where_they_are(topology, is_apart):
    """On a CPU the host's memory is the device's."""
    devices = placeholder_devices(parse_topology(topology)) if topology else jax.devices()
    where = make_roles(MeshSection(fsdp=8), devices)
    here, there = (
        weight_budget(
            Config(optimizer=OptimizerSection(offload=offload), mesh=MeshSection(fsdp=8)),
            QWEN3,
            where,
            jnp.bfloat16,
            {},
        )
        for offload in (False, True)
    )
    held = here.held("trainer")
    moments = held["Adam's moments"]
    assert moments == 2 * held["parameters"] and not here.on_host()
    assert there.on_host() == ({"Adam's moments": moments} if is_apart else {})
    assert sum(held.values()) - sum(there.held("trainer").values()) == is_apart * moments


@pytest.mark.slow
def test_a_tpus_programs_have_what_is_offloaded_in_the_hosts_memory():
    here, there, kept, moved = json.loads(compiled_elsewhere("v6e-1", "host"))
    parameters = (here["argument"] - 16) // 4  # of masters, gradient and two moments on a device
    assert (
        here["host_argument"] == 0
        and there["host_argument"] == there["host_alias"] > 1.9 * parameters
    )
    assert there["argument"] < 2.1 * parameters and there["temp"] < 0.3 * parameters
    tokens, wide = 80, 128 * 32 * 2  # bytes of a token's arrays of the hidden size, of all layers
    assert kept["host_temp"] == 0 and moved["host_temp"] > 5 * tokens * wide  # q, k, v, x twice


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 4, "tensor": 2}])
def test_the_gradient_of_what_is_offloaded_is_that_of_what_is_kept(mesh):
    role = roles(**mesh).trainer
    (batch,) = batches(GROUPS, shards=role.row_shards)
    found = []
    for remat in ("attention", "offload"):
        one = Learner(Model(QWEN3, role, remat=remat), ON_POLICY, OptimizerSection(), 10)
        total, lp = one.accumulate(None, one.init(initialise(QWEN3, 1, role)), batch)
        found.append(
            [
                np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(total.gradient)]),
                np.asarray(lp),
            ]
        )
    (kept, lp), (moved, other) = found
    assert (lp == other).all() and relative(moved, kept) < 1e-6 and kept.any()
