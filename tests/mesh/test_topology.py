"""Names of machines that are not here, as their makers count."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import pytest

from shoal.mesh.accelerators import ACCELERATORS, accelerator_of
from shoal.mesh.topology import gpu_target, parse_topology, slice_names
from shoal.records import ShoalError

TPUS = [kind for kind, a in ACCELERATORS.items() if a.is_tpu]


@pytest.mark.parametrize(
    ("text", "shown", "devices"),
    [
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p-64", "v5p:2x4x4", 32),
        ("v5p-256", "v5p:4x4x8", 128),
        ("v5p:4x4x8", "v5p:4x4x8", 128),
        ("v5p-2048", "v5p:8x8x16", 1024),
        ("v5p-12288", "v5p:16x16x24", 6144),
        ("v5p-17920", "v5p:16x20x28", 8960),
        ("v4-8", "v4:2x2x1", 4),
        ("v4-4096", "v4:8x16x16", 2048),
        ("v5e-16", "v5e:4x4", 16),
        ("v5litepod-8", "v5e:2x4", 8),
        ("v6e-1", "v6e:1x1", 1),
        ("v6e-8", "v6e:2x4", 8),
        ("v6e-256", "v6e:16x16", 256),
        ("v6e:4x8@2", "v6e:4x8@2", 64),
        ("tpu7x-8", "tpu7x:2x2x1", 8),
        ("tpu7x-128", "tpu7x:4x4x4", 128),
        ("h100:8", "h100:1x8", 8),
        ("h200:8x8", "h200:8x8", 64),
        ("H200-1", "h200:1x1", 1),
        ("b200:2x8", "b200:2x8", 16),
        ("a100:4", "a100:1x4", 4),
        ("a100-40gb:8", "a100-40gb:1x8", 8),
        ("A100-40GB-4", "a100-40gb:1x4", 4),
    ],
)
def test_names_count_as_their_makers_do(text, shown, devices):
    topology = parse_topology(text)
    assert (str(topology), topology.num_devices) == (shown, devices)
    assert parse_topology(shown) == topology


@pytest.mark.parametrize("kind", TPUS)
def test_every_slice_has_its_chips_and_a_shape_of_whole_hosts(kind):
    a, names = ACCELERATORS[kind], list(slice_names(kind))
    assert len(names) == len(set(names)) >= 8
    for name in names:
        topology = parse_topology(name)
        assert (
            topology.num_chips
            == int(name.partition("-")[2]) // a.cores
            == math.prod(topology.shape)
        )
        assert parse_topology(str(topology)) == topology and len(topology.shape) == a.torus
        assert (
            topology.num_chips < 64 or a.torus == 2 or all(size % 4 == 0 for size in topology.shape)
        )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("v5p-250", "the nearest are v5p-128 or v5p-256 (v5p counts cores, two a chip)"),
        ("v5p-9", "v5p-8 or v5p-16"),
        ("v6e-12", "v6e-8 or v6e-16 (v6e counts chips)"),
        ("v5p:3x3x3", "the nearest are v5p:2x2x4 or v5p:2x4x4"),
        ("v6e:4x4x4", "2 dimensions"),
        ("v6f-8", "did you mean v6e-8?"),
        ("h300:8", "did you mean h100:8?"),
        ("h100:2x2x2", "h100:MACHINESxGPUS"),
        ("pod", "Kinds: v4, v5e, v5p"),
        ("h100:0", "h100:GPUS"),
        ("v6e-8@0", "v6e:4x8@2 (two slices)"),
        ("v5p-0", "the nearest are v5p-8 or v5p-16"),
    ],
)
def test_an_unknown_one_names_the_nearest(text, part):
    with pytest.raises(ShoalError, match="topology=") as raised:
        parse_topology(text)
    assert part in str(raised.value) and "\n" not in str(raised.value)


class Device(NamedTuple):
    id: int
    process_index: int


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("v5p-256", 32),
        ("v6e:4x8@2", 16),
        ("v6e-8", 1),
        ("v5e:2x4@2", 2),
        ("h200:8x8", 8),
        ("h200:8", 1),
    ],
)
def test_devices_of_a_topology_lie_on_hosts(text, hosts):
    topology = parse_topology(text)
    each = 4 if topology.accelerator.is_tpu else 1  # as the compilers' devices have it
    found = topology.hosts(
        [Device(number, number // each) for number in range(topology.num_devices)]
    )
    assert sorted(Counter(found.values()).values()) == [topology.num_devices // hosts] * hosts


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_the_table_is_complete(kind):
    a = ACCELERATORS[kind]
    assert (
        min(a.hbm_bytes, a.hbm, a.link, a.dcn, a.peaks["bfloat16"]) > 0 and a.dcn < a.link < a.hbm
    )
    assert (
        (a.clock > 0 and a.largest > 0)
        if a.is_tpu
        else f"memory_bandwidth: {int(a.hbm)}" in gpu_target(kind)
    )


@pytest.mark.parametrize(
    ("kind", "gib"),
    [
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100-PCIE-40GB", 40),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA A100 80GB PCIe", 80),
        ("NVIDIA H100 80GB HBM3", 80),
    ],
)
def test_memory_is_that_which_the_name_of_the_device_says(kind, gib):
    found = accelerator_of(kind)
    assert found is not None and found.hbm_bytes == gib << 30
