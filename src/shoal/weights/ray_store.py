"""The store for hosts on other machines: each version's tensors are objects of Ray, which nodes
fetch from each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError

from shoal.model.parameters import ParamSpec
from shoal.model.transformer import Model
from shoal.protocols import Version
from shoal.records import Params, ShoalError
from shoal.weights.sampler_copy import named_leaves, named_specs, published_dtype, to_host
from shoal.weights.store import FROZEN, StoredVersion, WeightStore

FETCH_BYTES = 1 << 30
"""Bytes of tensors that a node fetches from another at once: fetched one by one, each tensor would
cost the network's delay."""


class RayStore(WeightStore):
    """Versions as objects of Ray, one for each tensor."""

    _frozen: RayVersion | None = None

    def put_frozen(self, params: Params) -> None:
        self._frozen = self._put_objects(FROZEN, params)

    def write(self, version: int, params: Params) -> Version:
        return replace(self._put_objects(version, params), frozen=self._frozen)

    def _put_objects(self, version: int, params: Params) -> RayVersion:
        """Puts the parameters that are not None into Ray's object store, one object a tensor, which
        holds the tensor's bytes, and returns them as a version without `frozen`. ShoalError if the
        store is full."""
        refs: dict[str, Any] = {}
        checksums: dict[str, int] = {}
        try:
            for name, values, array_sum in to_host(self.model, named_leaves(self.model, params)):
                refs[name] = ray.put(values.reshape(-1).view(np.uint8))  # bytes
                checksums[name] = int(array_sum)
        except ObjectStoreFullError as error:
            raise ShoalError(
                "publish.channel=ray: Ray's object store has no room for the weights: start Ray "
                "with a larger one (--object-store-memory), or set publish.channel=files"
            ) from error
        return RayVersion(version, refs, checksums)


@dataclass(frozen=True)
class RayVersion(StoredVersion):
    """A version in Ray's object store. The store keeps an object as long as any process refers to
    the object."""

    version: int
    refs: dict[str, Any]
    checksums: Mapping[str, int]
    frozen: StoredVersion | None = None

    @property
    def location(self) -> str:
        return "Ray's object store"

    @property
    def exists(self) -> bool:
        return bool(self.refs)

    def remove(self) -> None:
        self.refs.clear()

    def open(self, model: Model) -> Callable[[str], np.ndarray]:
        """Returns a function that reads a tensor by name. With a tensor that is not here yet, the
        next ones are fetched too, up to FETCH_BYTES together. LookupError if the version was
        removed."""
        refs = dict(self.refs)
        if not refs:
            raise LookupError(f"{self.title} is not in {self.location} any more")
        specs = named_specs(model)
        names = list(refs)
        fetched: dict[str, Any] = {}

        def read(name: str) -> np.ndarray:
            """Returns a tensor. If it was not fetched yet, fetches it with the next ones, in place
            of those that were fetched before."""
            nonlocal fetched
            if name not in fetched:
                batch = _first_bytes(model, specs, names[names.index(name) :], FETCH_BYTES)
                values = ray.get([refs[name] for name in batch])
                # in place of what was fetched before, so that the bytes in memory stay bounded
                fetched = dict(zip(batch, values, strict=True))
            spec = specs[name]
            return fetched[name].view(published_dtype(model, spec)).reshape(spec.shape)

        return read


def _first_bytes(
    model: Model, specs: Mapping[str, ParamSpec], names: Sequence[str], most: int
) -> list[str]:
    """Returns as many of the first names as have tensors of at most `most` bytes together; at least
    one name."""
    first: list[str] = []
    size = 0
    # a single tensor that is larger than `most` is taken too
    for name in names:
        size += math.prod(specs[name].shape) * published_dtype(model, specs[name]).itemsize
        if first and size > most:
            break
        first.append(name)
    return first
