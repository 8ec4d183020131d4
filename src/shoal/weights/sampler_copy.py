"""How the trainer's weights become the sampler's: an array at a time, to its type, layout and
devices, verified.

    trainer's array -> where the sampler's mesh has the same devices in another order, their parts
                       exchanged
                    -> cast and laid out as the sampler has it, on the trainer's devices (one
                       program)
                    -> the same devices: done; others: copied part by part, without a detour over
                       the host

To a sampler in another process they go over the host: `to_host` here, `from_host` there.

Parameters may be a part of a model's, with None in place of the others: frozen ones are published
once, each version then has the trained ones alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shoal.mesh import Program
from shoal.mesh.devices import as_mesh
from shoal.mesh.reshard import exchange_parts, in_order_of, reshard
from shoal.mesh.roles import view_of
from shoal.model.linear import Quantised, quantise
from shoal.model.parameters import (
    ParamSpec,
    param_shapes,
    param_specs,
    split_layers,
    unstack_layers,
)
from shoal.model.transformer import Model, published_specs
from shoal.records import Params, ShoalError
from shoal.weights.checksum import array_checksum, host_checksum

PROGRAMS_KEPT = 64
"""Programs (layouts of arrays) kept by this process."""


def publish_to(model: Model, params: Params, delete_source: bool = False) -> Params:
    """The sampler's parameters for `model`: those of `place_parameters`, with layers apart where it
    reads them so. `delete_source`: arrays of `params` that were copied are deleted one by one, else
    there are two of each."""
    if isinstance(params.blocks, tuple):  # published before, and read from a checkpoint
        return params
    params = quantised(model, params)
    if not model.pieces:
        return place_parameters(model, params)
    placed = _placed(model, params, is_apart=True, delete_source=delete_source)
    return unstack_layers(placed, model.architecture.num_layers)


def quantised(model: Model, params: Params) -> Params:
    """Parameters in 8 bits an element where the sampler has them and the trainer has not, on the
    trainer's devices."""
    if not model.architecture.quantised:
        return params
    weights, structure = jax.tree.flatten(
        param_specs(model.architecture), is_leaf=lambda x: isinstance(x, Quantised)
    )

    def convert(weight: Any, held: Any) -> Any:
        if not isinstance(weight, Quantised) or isinstance(held, Quantised):
            return held
        return Quantised(None, None) if held is None else _quantise(held, weight.values.dtype)

    return jax.tree.unflatten(structure, map(convert, weights, structure.flatten_up_to(params)))


def place_parameters(model: Model, params: Params) -> Params:
    """The parameters in the type, layout and devices of `model`: the arrays themselves where these
    are its own.

    What is copied is compared with the original by checksum, so that computing with old or missing
    weights cannot go unnoticed. RuntimeError where they differ.
    """
    return _placed(model, params, is_apart=False)


def _placed(model: Model, params: Params, is_apart: bool, delete_source: bool = False) -> Params:
    specs, structure = jax.tree.flatten(param_specs(model.architecture))
    published, sums = [], []
    for number, (leaf, spec) in enumerate(zip(structure.flatten_up_to(params), specs, strict=True)):
        if leaf is None:
            published.append(None)
            continue
        copy, sharding, dtype = leaf, spec.sharding(model.role), published_dtype(model, spec)
        # The array itself where nothing changes: a copy would cost a model's memory at each step.
        if leaf.dtype != dtype or not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            copy, expected = _publish(model, leaf, sharding, dtype, np.uint32(number))
            sums.append((expected, _checksum(model)(copy, np.uint32(number))))
        # One by one: of one array alone are there both the stacked layers and the layers apart.
        published.append(
            _layers(model, spec, model.pieces)(copy) if is_apart and spec.stacked else copy
        )
        if delete_source and published[-1] is not leaf:
            leaf.delete()
    for expected, found in jax.device_get(sums):
        if expected != found:
            raise RuntimeError(
                f"the {model.role.name}'s weights differ from the trainer's (checksums {found:#x}, "
                f"{expected:#x}): a copy between devices failed; resume the run from its newest "
                "checkpoint"
            )
    return jax.tree.unflatten(structure, published) if sums or is_apart else params


def shards_of(params: Params) -> list[dict[Any, jax.Array]]:
    """What each device of this process holds of each parameter, for `part_of`."""
    return [
        {shard.device: shard.data for shard in leaf.addressable_shards}
        for leaf in jax.tree.leaves(params)
    ]


def part_of(model: Model, shards: Sequence[Mapping[Any, jax.Array]]) -> Params:
    """Published parameters as arrays of the devices of `model`, which hold whole replicas; nothing
    is copied."""

    def part(wanted: jax.ShapeDtypeStruct, held: Mapping[Any, jax.Array]) -> jax.Array:
        place = wanted.sharding
        return jax.make_array_from_single_device_arrays(
            wanted.shape,
            place,
            [held[device] for device in place.addressable_devices_indices_map(wanted.shape)],
        )

    shapes, structure = jax.tree.flatten(published_shapes(model))
    return jax.tree.unflatten(structure, map(part, shapes, shards))


def published_shapes(model: Model) -> Params:
    """Shapes, type and layout of what `publish_to` returns."""
    return param_shapes(published_specs(model), model.role, model.dtype)


def named_specs(model: Model) -> dict[str, ParamSpec]:
    """The parameters by name, layers stacked, in the order of a tree of parameters."""
    specs = jax.tree_util.tree_leaves_with_path(param_specs(model.architecture))
    return {jax.tree_util.keystr(path, simple=True, separator="."): spec for path, spec in specs}


def published_dtype(model: Model, spec: ParamSpec) -> np.dtype:
    """The type in which the sampler has a parameter."""
    return np.dtype(jnp.dtype(spec.dtype or model.dtype))


def num_bytes(model: Model, trained: bool = True) -> int:
    """Bytes of what a version has in the sampler's type; else of what is published once."""
    return sum(
        math.prod(spec.shape) * published_dtype(model, spec).itemsize
        for spec in named_specs(model).values()
        if spec.trained is trained
    )


def named_leaves(model: Model, params: Params) -> dict[str, tuple[int, ParamSpec, Any]]:
    """The parameters that there are by name, as the sampler has them: number in a tree of all,
    spec, array."""
    leaves = jax.tree.structure(param_specs(model.architecture)).flatten_up_to(
        quantised(model, params)
    )
    numbered = enumerate(zip(named_specs(model).items(), leaves, strict=True))
    return {
        name: (number, spec, leaf) for number, ((name, spec), leaf) in numbered if leaf is not None
    }


def to_host(
    model: Model, leaves: Mapping[str, tuple[int, ParamSpec, Any]]
) -> Iterator[tuple[str, np.ndarray, jax.Array | int]]:
    """Name, values in the sampler's type, and checksum (computed meanwhile) of each of
    `named_leaves`, layers stacked. One at a time is on the host, and of one alone is there a copy
    on the trainer's devices."""
    for name, (number, spec, leaf) in leaves.items():
        dtype = published_dtype(model, spec)
        if isinstance(leaf, jax.Array):
            cast = jnp.asarray(leaf, dtype)
            sum = _sum(cast, np.uint32(number))
            yield name, np.asarray(cast), sum
        else:  # of a checkpoint's, read here: whole, it may have no room on a device
            values = np.asarray(leaf, dtype)
            yield name, values, host_checksum(values, number)


def from_host(
    model: Model,
    read: Callable[[str], np.ndarray],
    checksums: Mapping[str, int],
    place: str,
    frozen: MutableMapping[str, Any],
) -> Callable[[], Params]:
    """Brings what `to_host` gave to the devices of `model`; `read` gives a tensor by name, `place`
    says of where. `frozen` holds by name the parameters that an earlier call read and that no
    version changes.

    No program runs, so a sampler may go on meanwhile. What is returned gives the parameters, once;
    it raises ShoalError where one differs."""
    arrays = {
        name: jax.device_put(read(name), spec.sharding(model.role))
        for name, spec in named_specs(model).items()
        if name not in frozen
    }
    return partial(_verified, model, jax.block_until_ready(arrays), checksums, place, frozen)


def _verified(
    model: Model,
    held: dict[str, jax.Array],
    checksums: Mapping[str, int],
    place: str,
    frozen: MutableMapping[str, Any],
) -> Params:
    is_apart, specs, arrays, sums = model.pieces > 0, named_specs(model), {**frozen}, {}
    for number, (name, spec) in enumerate(specs.items()):
        if name in frozen:
            continue
        array = held.pop(
            name
        )  # of one alone are there both the stacked layers and the layers apart
        sums[name] = _checksum(model)(array, np.uint32(number))
        arrays[name] = (
            _layers(model, spec, model.pieces)(array) if is_apart and spec.stacked else array
        )
    for name, found in jax.device_get(sums).items():
        if checksums[name] != found:
            raise ShoalError(
                f"the weights in {place} are not those that were published (checksum of {name} "
                f"{found:#x}, expected {checksums[name]:#x}): something writes there, or a memory "
                "or disk is faulty; choose another publish.folder, and resume the run"
            )
    frozen.update({name: arrays[name] for name, spec in specs.items() if not spec.trained})
    params = jax.tree.unflatten(
        jax.tree.structure(param_specs(model.architecture)), [arrays[name] for name in specs]
    )
    return unstack_layers(params, model.architecture.num_layers) if is_apart else params


@lru_cache(PROGRAMS_KEPT)
def publication_program(
    model: Model, source: NamedSharding, place: NamedSharding, dtype: Any
) -> Program:
    """The program that lays an array of the trainer's out for the sampler, in `dtype` on the
    trainer's devices, and gives its checksum.

    On other devices than the sampler's, each holds the part that a replica of as many devices would
    have there; on the same, `source` has them in the sampler's order (`in_order_of`).
    """
    role = view_of(model.role, list(np.asarray(source.mesh.devices).flat))
    target = NamedSharding(role.mesh, place.spec)

    def convert(array: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        cast = array.astype(dtype)
        return reshard(cast, source, target), array_checksum(cast, number)

    return role.jit(convert, out_shardings=(target, role.replicated))


_sum = jax.jit(array_checksum)
_quantise = jax.jit(quantise, static_argnums=1)


@lru_cache(PROGRAMS_KEPT)
def _exchange(model: Model, source: NamedSharding, ordered: NamedSharding) -> Program:
    return model.role.jit(lambda array: exchange_parts(array, source, ordered))


@lru_cache(PROGRAMS_KEPT)
def _checksum(model: Model) -> Program:
    return model.role.jit(array_checksum, out_shardings=model.role.replicated)


@lru_cache(PROGRAMS_KEPT)
def _layers(model: Model, spec: ParamSpec, pieces: int) -> Program:
    """The program that takes the layers of a stacked array apart."""
    apart = NamedSharding(model.role.mesh, PartitionSpec(*spec.sharding(model.role).spec[1:]))
    return model.role.jit(
        partial(split_layers, spec=spec, pieces=pieces, tensor=model.role.tensor),
        out_shardings=apart,
    )


def _publish(
    model: Model, leaf: jax.Array, place: NamedSharding, dtype: np.dtype, number: np.uint32
) -> tuple[jax.Array, jax.Array]:
    """(the sampler's array, the checksum of the trainer's in the sampler's type)."""
    source = leaf.sharding
    if not isinstance(source, NamedSharding):  # of one device, made without a mesh
        source = NamedSharding(
            as_mesh(np.asarray(list(leaf.devices())), ("data",)), PartitionSpec()
        )
    ordered = in_order_of(source, place)
    if ordered != source:
        parts = _exchange(model, source, ordered)(leaf).addressable_shards
        leaf = jax.make_array_from_single_device_arrays(
            leaf.shape, ordered, [part.data for part in parts]
        )
    laid_out, expected = publication_program(model, ordered, place, dtype)(leaf, number)
    if set(place.device_set) == set(laid_out.sharding.device_set):
        return laid_out, expected
    return _copied(laid_out, place), expected


def _copied(array: jax.Array, place: NamedSharding) -> jax.Array:
    """The array on other devices, each part from one that holds it, these in turn.

    By parts, not by `jax.device_put` of the whole: where no part has exactly the bounds that are
    wanted, that would gather the array on the host.
    """
    held: dict[tuple, list[Any]] = {}
    for shard in array.addressable_shards:
        held.setdefault(_bounds(shard.index, array.shape), []).append(shard.data)
    turns = {bounds: itertools.cycle(shards) for bounds, shards in held.items()}
    parts = []
    for device, index in place.addressable_devices_indices_map(array.shape).items():
        wanted = _bounds(index, array.shape)
        outer = next(
            bounds
            for bounds in turns
            if all(
                low <= first and last <= high
                for (low, high), (first, last) in zip(bounds, wanted, strict=True)
            )
        )
        data = next(turns[outer])
        if outer != wanted:
            data = data[
                tuple(
                    slice(first - low, last - low)
                    for (low, _), (first, last) in zip(outer, wanted, strict=True)
                )
            ]
        parts.append(jax.device_put(data, device))
    # Waited for: with all arrays under way at once, the trainer's devices would hold a whole
    # replica's weights.
    return jax.block_until_ready(
        jax.make_array_from_single_device_arrays(array.shape, place, parts)
    )


def _bounds(index: Any, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
