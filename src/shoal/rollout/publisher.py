"""Publication: versions of the weights, where hosts fetch them when they like.

    MemoryPublisher   arrays on the sampler's devices, which are this process's
    FilePublisher     files, for hosts in other processes (file_publisher.py)
    ObjectPublisher   Ray's objects, for hosts on other machines (cluster.py)

A version appears whole or not at all, under a manifest; it is written once and goes when nobody may ask for it. The
trainer never waits for a host, nor a host for the trainer.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from shoal.model.lazy_array import LazyArray
from shoal.model.parameters import param_specs
from shoal.model.transformer import Model
from shoal.rollout.publication import (
    from_host,
    num_bytes,
    part_of,
    publish_to,
    published_shapes,
    shards_of,
    tensor_names,
)
from shoal.types import Manifest, Params


class Publisher(Protocol):
    """How the trainer's weights reach hosts. `model` is the sampler's, on all of its devices in this process."""

    @property
    def model(self) -> Model: ...
    @property
    def versions(self) -> Mapping[int, Params]:
        """The versions that were published and not released."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that the last publication copied or wrote."""
        ...

    def publish(self, version: int, params: Params) -> Manifest: ...
    def manifest(self, version: int) -> Manifest:
        """Where hosts fetch a version that exists."""
        ...

    def release(self, needed: Callable[[int], bool]) -> None:
        """Forgets the versions that are not needed; a host that samples from one keeps it."""
        ...

    def published_shapes(self) -> Params: ...
    def close(self) -> None: ...


@dataclass
class MemoryPublisher:
    """Versions as arrays on the sampler's devices. Weights are copied where the sampler has other devices, types or
    layouts (compared by checksum)."""

    model: Model
    versions: Mapping[int, Params] = field(default_factory=dict)
    num_bytes: int = 0
    _shards: Mapping[int, Any] = field(default_factory=dict)  # by version

    def publish(self, version: int, params: Params) -> Manifest:
        published, own = publish_to(self.model, params), set(map(id, jax.tree.leaves(params)))
        self.num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(published) if id(leaf) not in own)
        # By this thread: JAX fills an array's list of shards at the first look, and a host that looks meanwhile gets a
        # part of it. And into new tables: hosts and the fleet's thread read these meanwhile.
        self._shards = {**self._shards, version: shards_of(published)}
        self.versions = {**self.versions, version: published}
        return self.manifest(version)

    def manifest(self, version: int) -> Manifest:
        return MemoryManifest(version, self)

    def part(self, version: int, model: Model) -> Params:
        """The weights on the devices of a host, which hold whole replicas."""
        if version not in self.versions:
            raise LookupError(f"version {version} is not published any more")
        return self.versions[version] if model.role == self.model.role else part_of(model, self._shards[version])

    def release(self, needed: Callable[[int], bool]) -> None:
        self.versions = {version: params for version, params in self.versions.items() if needed(version)}
        self._shards = {version: self._shards[version] for version in self.versions}

    def published_shapes(self) -> Params:
        return published_shapes(self.model)

    def close(self) -> None:
        self.release(lambda version: False)


@dataclass(frozen=True)
class MemoryManifest:
    """A version of a `MemoryPublisher`."""

    version: int
    publisher: MemoryPublisher

    @property
    def exists(self) -> bool:
        return self.version in self.publisher.versions

    def read(self, model: Model) -> Future[Callable[[], Params]]:
        done: Future[Callable[[], Params]] = Future()
        done.set_result(lambda: self.publisher.part(self.version, model))
        return done


class StoredManifest(abc.ABC):
    """A version outside of any device, verified when it is read; it can be sent to another process."""

    version: int

    @property
    @abc.abstractmethod
    def exists(self) -> bool: ...

    @abc.abstractmethod
    def open(self, model: Model) -> tuple[Callable[[str], np.ndarray], Mapping[str, int], str]:
        """What reads a tensor by its name, their checksums, and where they are."""

    def read_now(self, model: Model) -> Callable[[], Params]:
        """Brings the weights to the devices of `model`; what is returned verifies them and gives them, once."""
        return from_host(model, *self.open(model))

    def forget(self) -> None:  # noqa: B027 - a file needs nothing
        """Lets go of what this process refers to."""

    def read(self, model: Model) -> Future[Callable[[], Params]]:
        # In the background nothing is computed: only the host's own thread dispatches programs to its devices.
        pool = ThreadPoolExecutor(1, "weights")
        reading = pool.submit(self.read_now, model)
        pool.shutdown(wait=False)
        return reading


class StoredPublisher(abc.ABC):
    """Versions outside of any device, from where a checkpoint reads them. `model` is the sampler's; hosts elsewhere
    have devices of their own."""

    model: Model

    def __init__(self, model: Model) -> None:
        self.model, self.stored = model, dict[int, StoredManifest]()

    @abc.abstractmethod
    def write(self, version: int, params: Params) -> StoredManifest: ...

    @abc.abstractmethod
    def remove(self, manifest: Any) -> None: ...

    @property
    def versions(self) -> Mapping[int, Params]:
        return StoredVersions(self.stored, self.model)

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.model)

    def publish(self, version: int, params: Params) -> Manifest:
        before, written = self.stored.get(version), self.write(version, params)
        self.stored = {**self.stored, version: written}
        if before is not None:
            self.remove(before)
        return written

    def manifest(self, version: int) -> Manifest:
        return self.stored[version]

    def release(self, needed: Callable[[int], bool]) -> None:
        before, self.stored = self.stored, {version: one for version, one in self.stored.items() if needed(version)}
        for version in before.keys() - self.stored:
            self.remove(before[version])

    def published_shapes(self) -> Params:
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, self.model.dtype),
                            param_specs(self.model.architecture))

    def close(self) -> None:
        self.stored = {}


@dataclass(frozen=True)
class StoredVersions(Mapping[int, Params]):
    """The versions of a `StoredPublisher` as `LazyArray`s. On devices, each of the trainer's would hold a replica's
    weights beside its own."""

    stored: Mapping[int, StoredManifest]
    model: Model

    def __getitem__(self, version: int) -> Params:
        read, _, _ = self.stored[version].open(self.model)
        arrays = [LazyArray(shape, np.dtype(self.model.dtype), lambda part, name=name: read(name)[part])
                  for name, shape in tensor_names(self.model).items()]
        return jax.tree.unflatten(jax.tree.structure(param_specs(self.model.architecture)), arrays)

    def __contains__(self, version: object) -> bool:
        return version in self.stored

    def __iter__(self) -> Iterator[int]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)
