"""Bytes of all processes, gathered by the devices' own collectives: over the links between hosts, each to each.

    process 0, devices 0 1: [a0 a1]   ->   device 0: [a0 b0]  device 1: [a1 b1]   ->   process 0: a0 a1, b0 b1
    process 1, devices 2 3: [b0 b1]   ->   device 2: [a0 b0]  device 3: [a1 b1]   ->   process 1: a0 a1, b0 b1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROUND_BYTES = 64 << 20
"""What a device holds of all processes at once."""
LEAST_BYTES = 1 << 14
"""Of a process on a device: sizes are powers of two from here on, so there are few programs."""


def gather_bytes(data: bytes, rows: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """The bytes of all processes, in their order: of `lengths`, and each with its `jax.process_index()` of `rows`.

    All processes call this at the same point in the order of their computations, with the same rows and lengths.
    """
    local, most = jax.local_device_count(), ROUND_BYTES // len(lengths)
    wanted = max(-(-max(lengths) // local), LEAST_BYTES)
    size = local << min((wanted - 1).bit_length(), max(most.bit_length() - 1, 0))
    padded = np.zeros(-(-max(lengths) // size) * size, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    gathered = [_gather()(padded[begin : begin + size]) for begin in range(0, len(padded), size)]
    return [b"".join(part[row] for part in gathered)[:length] for row, length in zip(rows, lengths, strict=True)]


@cache
def _gather() -> Callable[[np.ndarray], np.ndarray]:
    """A function of this process's bytes: (size,) -> (processes, size), by `jax.process_index()`."""
    processes = jax.process_count()
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(processes, -1), ("processes", "local"))
    by_process = NamedSharding(mesh, PartitionSpec("processes", "local"))
    # A device gathers a part of each process's bytes, so a host receives them once.
    exchange = jax.jit(lambda whole: whole, out_shardings=NamedSharding(mesh, PartitionSpec(None, "local")))

    def gather(part: np.ndarray) -> np.ndarray:
        whole = jax.make_array_from_process_local_data(by_process, part[None], (processes, part.size))
        shards = sorted(exchange(whole).addressable_shards, key=lambda shard: shard.index[1].start or 0)
        return np.concatenate([np.asarray(shard.data) for shard in shards], axis=1)

    return gather
