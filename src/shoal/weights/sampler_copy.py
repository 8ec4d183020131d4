"""Turns the trainer's weights into the sampler's: one array at a time, in the sampler's type,
layout and devices, verified by checksum.

    trainer's array -> if the sampler's mesh has the same devices in another order, their parts are
                       exchanged
                    -> cast and laid out as the sampler has it, on the trainer's devices (one
                       program)
                    -> on the same devices: done; on others: copied part by part, without a detour
                       over the host

To a sampler in another process the weights go over the host: `to_host` here, `from_host` there.

Parameters may be a part of a model's, with None in place of the others: frozen ones are published
once, and each version then has the trained ones alone.
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
from shoal.model.layers import published_specs, split_layers, unstack_layers
from shoal.model.linear import Quantised, quantise
from shoal.model.parameters import ParamSpec, param_shapes, param_specs
from shoal.model.transformer import Model
from shoal.records import Params, ShoalError
from shoal.weights.checksum import array_checksum, host_checksum

PROGRAMS_KEPT = 64
"""Number of programs (each for one layout of an array) that this process keeps."""


def publish_to(model: Model, params: Params, delete_source: bool = False) -> Params:
    """Returns the sampler's parameters for `model`, made from the trainer's: quantised if the
    sampler is, in the sampler's type, layout and devices, and split into layers if the sampler
    reads each layer from its own arrays (`model.ffn_chunks` is not 0; else stacked). Parameters
    that are split into layers already are returned as they are. None stays None. RuntimeError if a
    copy's checksum differs. With `delete_source`, and only if they are split into layers, each
    array is deleted as soon as its copy is made, so that there are never two copies of all weights;
    arrays that were quantised before stay."""
    if isinstance(params.blocks, tuple):  # published before, and read from a checkpoint
        return params
    params = quantised(model, params)
    if not model.ffn_chunks:
        return place_parameters(model, params)
    placed = _placed(model, params, into_layers=True, delete_source=delete_source)
    return unstack_layers(model.architecture, placed)


def quantised(model: Model, params: Params) -> Params:
    """Returns the parameters with their kernels quantised to 8 bits, on the trainer's devices.
    Returns `params` itself if the sampler is not quantised; weights that are quantised already stay
    as they are. None stays None, but in place of a kernel it becomes Quantised(None, None)."""
    if not model.architecture.quantised:
        return params
    # `Quantised` is a node of two leaves, values and scale; here it counts as one leaf, because the
    # trainer has one array in its place.
    specs, structure = jax.tree.flatten(
        param_specs(model.architecture), is_leaf=lambda node: isinstance(node, Quantised)
    )
    converted = []
    for spec, weight in zip(specs, structure.flatten_up_to(params), strict=True):
        if not isinstance(spec, Quantised) or isinstance(weight, Quantised):
            converted.append(weight)
        elif weight is None:
            # in the result each kernel has two leaves
            converted.append(Quantised(None, None))
        else:
            converted.append(_quantise(weight, spec.values.dtype))
    return jax.tree.unflatten(structure, converted)


def place_parameters(model: Model, params: Params) -> Params:
    """Returns the parameters in the type, layout and devices of `model`: the same arrays where
    nothing changes, else copies. None stays None.

    Each copy is compared with its original by checksum, so that sampling from old or missing
    weights cannot go unnoticed. RuntimeError if they differ.
    """
    return _placed(model, params, into_layers=False)


def _placed(model: Model, params: Params, into_layers: bool, delete_source: bool = False) -> Params:
    """Returns the parameters for `model`; with `into_layers`, each stacked array is replaced by a
    tuple of its layers. None stays None. If nothing changes, `params` itself is returned. With
    `delete_source` each array of `params` in whose place there is another is deleted. RuntimeError
    if a copy's checksum differs."""
    specs, structure = jax.tree.flatten(param_specs(model.architecture))
    placed: list[Any] = []
    sums = []
    for number, (leaf, spec) in enumerate(zip(structure.flatten_up_to(params), specs, strict=True)):
        if leaf is None:
            placed.append(None)
            continue
        sharding = spec.sharding(model.role)
        dtype = published_dtype(model, spec)
        # The same array if nothing changes: a copy would cost a model's memory at each step.
        array = leaf
        if leaf.dtype != dtype or not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            array, expected = _publish(model, leaf, sharding, dtype, np.uint32(number))
            sums.append((expected, _checksum(model)(array, np.uint32(number))))
        # One array after the other, so that stacked layers and separate layers exist both for one
        # array only.
        if into_layers and spec.stacked:
            array = _layers(model, spec, model.ffn_chunks)(array)
        placed.append(array)
        if delete_source and array is not leaf:
            leaf.delete()
    # compared at the end, because `device_get` waits until all sums are computed
    for expected, copied in jax.device_get(sums):
        if expected != copied:
            raise RuntimeError(
                f"the {model.role.name}'s weights differ from the trainer's (checksums {copied:#x},"
                f" {expected:#x}): a copy between devices failed; resume the run from its newest "
                "checkpoint"
            )
    if not sums and not into_layers:
        return params
    return jax.tree.unflatten(structure, placed)


def shards_of(params: Params) -> list[dict[Any, jax.Array]]:
    """Returns for each parameter that is not None, in the tree's order, a mapping from each device
    of this process to the part of the parameter there, as an array of that device. Nothing is
    copied."""
    shards = []
    for leaf in jax.tree.leaves(params):
        shards.append({shard.device: shard.data for shard in leaf.addressable_shards})
    return shards


def arrays_on(model: Model, shards: Sequence[Mapping[Any, jax.Array]]) -> Params:
    """Returns published parameters as arrays on the devices of `model`, which are some of the
    sampler's devices with whole replicas on them. Nothing is copied. `shards` is what `shards_of`
    returned for the parameters on all of the sampler's devices."""
    shapes, structure = jax.tree.flatten(published_shapes(model))
    arrays = []
    for wanted, by_device in zip(shapes, shards, strict=True):
        devices = wanted.sharding.addressable_devices_indices_map(wanted.shape)
        # the keys are the devices of `model`, in the order in which JAX expects the parts
        parts = [by_device[device] for device in devices]
        array = jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, parts)
        arrays.append(array)
    return jax.tree.unflatten(structure, arrays)


def published_shapes(model: Model) -> Params:
    """Returns shapes, types and shardings of what `publish_to` returns."""
    return param_shapes(published_specs(model), model.role, model.dtype)


def named_specs(model: Model) -> dict[str, ParamSpec]:
    """Returns the specs of all parameters by name ("blocks.q"), with layers stacked, in the order
    of the tree of parameters."""
    specs: dict[str, ParamSpec] = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(param_specs(model.architecture)):
        specs[jax.tree_util.keystr(path, simple=True, separator=".")] = spec
    return specs


def published_dtype(model: Model, spec: ParamSpec) -> np.dtype:
    """Returns the type in which the sampler has a parameter."""
    return np.dtype(jnp.dtype(spec.dtype or model.dtype))


def num_bytes(model: Model, trained: bool = True) -> int:
    """Returns the bytes of the trained parameters in the sampler's type, which each version has;
    with trained=False those of the frozen parameters, which are published once."""
    total = 0
    for spec in named_specs(model).values():
        if spec.trained is trained:
            total += math.prod(spec.shape) * published_dtype(model, spec).itemsize
    return total


def named_leaves(model: Model, params: Params) -> dict[str, tuple[int, ParamSpec, Any]]:
    """Returns name -> (number in the tree of all parameters, spec, array) for the parameters that
    are not None, in the tree's order, after quantising them if the sampler is quantised."""
    structure = jax.tree.structure(param_specs(model.architecture))
    leaves = structure.flatten_up_to(quantised(model, params))
    named: dict[str, tuple[int, ParamSpec, Any]] = {}
    specs = named_specs(model).items()
    for number, ((name, spec), leaf) in enumerate(zip(specs, leaves, strict=True)):
        if leaf is not None:
            named[name] = (number, spec, leaf)
    return named


def to_host(
    model: Model, leaves: Mapping[str, tuple[int, ParamSpec, Any]]
) -> Iterator[tuple[str, np.ndarray, jax.Array | int]]:
    """Yields (name, values in the sampler's type, checksum) for each of `named_leaves`, with layers
    stacked. Values are NumPy arrays, and one parameter at a time is copied: to the sampler's type
    on the trainer's devices, and from there to the host. The checksum may be an array that is still
    being computed."""
    for name, (number, spec, leaf) in leaves.items():
        dtype = published_dtype(model, spec)
        if isinstance(leaf, jax.Array):
            cast = jnp.asarray(leaf, dtype)
            array_sum = _sum(cast, np.uint32(number))
            yield name, np.asarray(cast), array_sum
        else:  # a checkpoint's array, read here: as a whole it might not fit a device
            values = np.asarray(leaf, dtype)
            yield name, values, host_checksum(values, number)


def from_host(
    model: Model,
    read: Callable[[str], np.ndarray],
    checksums: Mapping[str, int],
    location: str,
    frozen: MutableMapping[str, Any],
) -> Callable[[], Params]:
    """Puts what `to_host` yielded on the devices of `model`, and returns a function that verifies
    and returns the parameters, once; it raises ShoalError if a checksum differs.

    `read` returns a tensor by name, `checksums` has what each must have by name, `location` says in
    messages where it comes from. `frozen` holds by name the frozen parameters that an earlier call
    has read; those are not read again, and the returned function adds to it those that it lacks. No
    program runs, so a sampler may sample meanwhile."""
    arrays: dict[str, jax.Array] = {}
    for name, spec in named_specs(model).items():
        if name not in frozen:
            arrays[name] = jax.device_put(read(name), spec.sharding(model.role))
    jax.block_until_ready(arrays)
    return partial(_verified, model, arrays, checksums, location, frozen)


def _verified(
    model: Model,
    unverified: dict[str, jax.Array],
    checksums: Mapping[str, int],
    location: str,
    frozen: MutableMapping[str, Any],
) -> Params:
    """Returns all parameters as one tree, from `unverified` and `frozen`, after comparing the
    checksums of `unverified`, which is emptied; ShoalError if one differs. Adds frozen parameters
    that `frozen` lacks to it."""
    into_layers = model.ffn_chunks > 0
    specs = named_specs(model)
    arrays: dict[str, Any] = dict(frozen)
    sums: dict[str, jax.Array] = {}
    for number, (name, spec) in enumerate(specs.items()):
        if name in frozen:
            continue
        # Taken out of the mapping, so that stacked layers and separate layers exist both for one
        # array only.
        array = unverified.pop(name)
        sums[name] = _checksum(model)(array, np.uint32(number))
        if into_layers and spec.stacked:
            array = _layers(model, spec, model.ffn_chunks)(array)
        arrays[name] = array
    for name, array_sum in jax.device_get(sums).items():
        if checksums[name] != array_sum:
            raise ShoalError(
                f"the weights in {location} are not those that were published (checksum of {name} "
                f"{array_sum:#x}, expected {checksums[name]:#x}): something writes there, or a "
                "memory or disk is faulty; choose another publish.folder, and resume the run"
            )
    for name, spec in specs.items():
        if not spec.trained:
            frozen[name] = arrays[name]
    structure = jax.tree.structure(param_specs(model.architecture))
    params = jax.tree.unflatten(structure, [arrays[name] for name in specs])
    if not into_layers:
        return params
    return unstack_layers(model.architecture, params)


@lru_cache(PROGRAMS_KEPT)
def publication_program(
    model: Model, source: NamedSharding, target: NamedSharding, dtype: Any
) -> Program:
    """Returns the compiled program (array, its number in the tree of parameters) -> (array,
    checksum), which casts one of the trainer's arrays to `dtype` and lays it out as the sampler has
    it, still on the trainer's devices. `source`: the sharding of the array; `target`: the
    sampler's.

    If the sampler has other devices, each of the trainer's gets the part that a replica on as many
    devices would have there; if it has the same ones, `source` must have them in the sampler's
    order (`in_order_of`).
    """
    role = view_of(model.role, list(np.asarray(source.mesh.devices).flat))
    on_source = NamedSharding(role.mesh, target.spec)

    def convert(array: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (the array as the sampler has it, the checksum of its values)."""
        cast = array.astype(dtype)
        return reshard(cast, source, on_source), array_checksum(cast, number)

    return role.jit(convert, out_shardings=(on_source, role.replicated))


_sum = jax.jit(array_checksum)
_quantise = jax.jit(quantise, static_argnums=1)


@lru_cache(PROGRAMS_KEPT)
def _exchange(model: Model, source: NamedSharding, ordered: NamedSharding) -> Program:
    """Returns the program that takes an array with the sharding `source`, and exchanges parts
    between its devices, so that each holds what it has in the sharding `ordered`."""
    return model.role.jit(lambda array: exchange_parts(array, source, ordered))


@lru_cache(PROGRAMS_KEPT)
def _checksum(model: Model) -> Program:
    """Returns the program (array, its number) -> checksum, which runs on the model's devices."""
    return model.role.jit(array_checksum, out_shardings=model.role.replicated)


@lru_cache(PROGRAMS_KEPT)
def _layers(model: Model, spec: ParamSpec, num_chunks: int) -> Program:
    """Returns the compiled program that splits a stacked array into a tuple of its layers. If
    `num_chunks` is more than 1, each layer of a feed-forward matrix is again a tuple, of that many
    parts of the matrix. `spec`: that of the stacked array."""
    layer_axes = spec.sharding(model.role).spec[1:]  # without the axis of layers
    apart = NamedSharding(model.role.mesh, PartitionSpec(*layer_axes))
    split = partial(split_layers, spec=spec, num_chunks=num_chunks, tensor=model.role.tensor)
    return model.role.jit(split, out_shardings=apart)


def _publish(
    model: Model, leaf: jax.Array, target: NamedSharding, dtype: np.dtype, number: np.uint32
) -> tuple[jax.Array, jax.Array]:
    """Copies one of the trainer's arrays to the sampler's layout, type and devices. `target`: the
    sampler's sharding; `number`: the array's number in the tree. Returns (the sampler's array, the
    checksum that the array must have, computed before it was copied)."""
    source = leaf.sharding
    if not isinstance(source, NamedSharding):  # an array of one device, made without a mesh
        one_device = as_mesh(np.asarray(list(leaf.devices())), ("data",))
        source = NamedSharding(one_device, PartitionSpec())
    ordered = in_order_of(source, target)
    # the same devices in another order
    if ordered != source:
        parts = _exchange(model, source, ordered)(leaf).addressable_shards
        leaf = jax.make_array_from_single_device_arrays(
            leaf.shape, ordered, [part.data for part in parts]
        )
    laid_out, expected = publication_program(model, ordered, target, dtype)(leaf, number)
    # the sampler has the trainer's devices: nothing is left to copy
    if set(target.device_set) == set(laid_out.sharding.device_set):
        return laid_out, expected
    return _copied(laid_out, target), expected


def _copied(array: jax.Array, target: NamedSharding) -> jax.Array:
    """Returns a copy of the array on other devices, those of `target`, and waits for it. Each part
    is copied from a device that holds it; if several do, they take turns.

    It is copied by parts, because `jax.device_put` of the whole would gather the array on the host
    if no part has exactly the wanted bounds.
    """
    shards: dict[tuple, list[Any]] = {}
    for shard in array.addressable_shards:
        shards.setdefault(_bounds(shard.index, array.shape), []).append(shard.data)
    # bounds of a part -> the devices' copies of the part, in turn and without end
    in_turn = {bounds: itertools.cycle(copies) for bounds, copies in shards.items()}
    parts = []
    for device, index in target.addressable_devices_indices_map(array.shape).items():
        wanted = _bounds(index, array.shape)
        # A part of `array` contains what the device needs, by how it was laid out: find that part.
        outer = wanted
        for bounds in in_turn:
            if _contains(bounds, wanted):
                outer = bounds
                break
        data = next(in_turn[outer])
        if outer != wanted:
            cuts = []
            for (low, _), (first, last) in zip(outer, wanted, strict=True):
                # `last` is one past the end, like the stop of a slice
                cuts.append(slice(first - low, last - low))
            data = data[tuple(cuts)]
        parts.append(jax.device_put(data, device))
    copy = jax.make_array_from_single_device_arrays(array.shape, target, parts)
    # Waits for the copy: with all arrays in transfer at once, the trainer's devices would hold a
    # whole replica's weights.
    return jax.block_until_ready(copy)


def _bounds(index: Any, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns (first, last + 1) of each axis of an index."""
    return tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))


def _contains(outer: Sequence[tuple[int, int]], inner: Sequence[tuple[int, int]]) -> bool:
    """True if the bounds `inner` lie within the bounds `outer`."""
    for (outer_first, outer_last), (first, last) in zip(outer, inner, strict=True):
        if first < outer_first or last > outer_last:
            return False
    return True
