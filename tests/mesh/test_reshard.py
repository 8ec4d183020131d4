"""An array from one layout to another on eight devices: the same values, and no whole copy on the
way."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shoal.mesh.devices import as_mesh
from shoal.mesh.reshard import reshard

NAMES = ("data", "fsdp", "tensor")
SHAPE = (2, 32, 48)


def placed(sizes: tuple[int, ...], *spec: str | tuple[str, ...] | None) -> NamedSharding:
    names = NAMES if len(sizes) == 3 else ("data", "tensor")
    return NamedSharding(
        as_mesh(np.asarray(jax.devices()).reshape(sizes), names), PartitionSpec(*spec)
    )


CASES = {  # source, target, the largest part that may stand on a device, of the array
    "fsdp to replicas": (placed((1, 8, 1), None, "fsdp"), placed((8, 1)), 1),
    "fsdp to tensor, same dimension": (
        placed((1, 8, 1), None, "fsdp"),
        placed((2, 4), None, "tensor"),
        1,
    ),
    "fsdp to tensor, other dimension": (
        placed((1, 8, 1), None, None, "fsdp"),
        placed((2, 4), None, "tensor"),
        1 / 4,
    ),
    "tensor stays": (
        placed((1, 4, 2), None, "tensor", "fsdp"),
        placed((4, 2), None, "tensor"),
        1 / 2,
    ),
    "more tensor": (
        placed((1, 4, 2), None, "tensor", "fsdp"),
        placed((2, 4), None, "tensor"),
        1 / 4,
    ),
    "more tensor, other dimension": (
        placed((1, 4, 2), None, "fsdp", "tensor"),
        placed((1, 8), None, None, "tensor"),
        1 / 4,
    ),
    "less tensor": (
        placed((1, 2, 4), None, "fsdp", "tensor"),
        placed((4, 2), None, None, "tensor"),
        1 / 2,
    ),
    "copies of data": (
        placed((2, 4, 1), None, None, "fsdp"),
        placed((2, 4), None, "tensor"),
        1 / 4,
    ),
    "back to fsdp": (placed((2, 4), None, "tensor"), placed((1, 8, 1), None, None, "fsdp"), 1 / 4),
    "whole to split": (placed((8, 1, 1)), placed((2, 4), None, "tensor"), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_same_and_nothing_larger_than_a_part_stands(name):
    source, target, most = CASES[name]
    values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    program = jax.jit(lambda x: reshard(x, source, target), out_shardings=target)
    found = program(jax.device_put(values, source))
    assert found.sharding.is_equivalent_to(target, 3) and (np.asarray(found) == values).all()
    memory = (
        program.lower(jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=source))
        .compile()
        .memory_analysis()
    )
    assert memory is not None and memory.temp_size_in_bytes <= 2 * most * values.nbytes + 4096


def test_sizes_that_cut_each_other_are_left_to_the_partitioner():
    devices = np.asarray(jax.devices())[:6]
    source = NamedSharding(
        as_mesh(devices.reshape(1, 3, 2), NAMES), PartitionSpec(None, "tensor", "fsdp")
    )
    target = NamedSharding(
        as_mesh(devices.reshape(2, 3), ("data", "tensor")), PartitionSpec(None, None, "tensor")
    )
    values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    found = jax.jit(lambda x: reshard(x, source, target), out_shardings=target)(
        jax.device_put(values, source)
    )
    assert (np.asarray(found) == values).all()
