"""Arrays assembled on devices from parts that are read on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding

from shoal.model import spread

Part = tuple[tuple[slice, ...], Callable[[], np.ndarray]]
"""A part's place in an array, and a function that reads it."""


def assemble(parts: Iterable[Part], sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The array of parts that are laid out as it is. A process reads those that its devices hold, each once."""
    dtype = np.dtype(dtype)
    if math.prod(shape) * dtype.itemsize <= spread.SMALL_BYTES:
        whole = np.empty(shape, dtype)
        for place, read in parts:
            whole[place] = read()
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])
    indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
    held = {device: [slice(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
            for device, index in indices.items()}
    moved = spread.carrier(dtype, sharding.mesh)
    arrays = {device: spread.zeros(sharding.shard_shape(shape), moved, SingleDeviceSharding(device)) for device in held}
    for place, read in parts:
        common = {device: [_overlap(*both) for both in zip(own, place, strict=True)] for device, own in held.items()}
        shared = {device: cuts for device, cuts in common.items() if all(cut.start < cut.stop for cut in cuts)}
        values = read() if shared else np.empty(0)
        for device, cuts in shared.items():
            within = tuple(slice(cut.start - whole.start, cut.stop - whole.start)
                           for cut, whole in zip(cuts, place, strict=True))
            starts = [cut.start - own.start for cut, own in zip(cuts, held[device], strict=True)]
            part = np.ascontiguousarray(values[within], dtype).view(moved)
            arrays[device] = _paste(arrays[device], jax.device_put(part, device), starts)
        jax.block_until_ready([arrays[device] for device in shared])
    whole = jax.make_array_from_single_device_arrays(shape, sharding, list(arrays.values()), dtype=moved)
    return spread.finished(whole, sharding, dtype)


def _overlap(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


@partial(jax.jit, donate_argnums=0)
def _paste(array: jax.Array, part: jax.Array, starts: list[Any]) -> jax.Array:
    return lax.dynamic_update_slice(array, part, starts)
