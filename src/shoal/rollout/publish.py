"""Publication: versions of the weights, where hosts fetch them when they like.

    MemoryChannel    arrays on the sampler's devices, which are this process's
    StoredChannel    tensors outside of any device, for hosts in other processes: files, or Ray's objects

A version appears whole or not at all, under a manifest; it is written once and goes when nobody may ask for it. The
trainer never waits for a host, nor a host for the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from shoal.model.transformer import Model
from shoal.rollout.publication import num_bytes, part_of, publish_to, published_shapes
from shoal.types import Manifest, Params


class Channel(Protocol):
    """How the trainer's weights reach hosts."""

    @property
    def model(self) -> Model: ...
    @property
    def versions(self) -> Mapping[int, Params]: ...
    @property
    def num_bytes(self) -> int:
        """Bytes that the last publication copied or wrote."""
        ...

    def manifest(self, version: int, host: str) -> Manifest: ...
    def publish(self, version: int, params: Params) -> dict[str, Manifest]: ...
    def release(self, needed: Callable[[int], bool]) -> None: ...
    def published_shapes(self) -> Params: ...
    def close(self) -> None: ...


@dataclass
class MemoryChannel:
    """Versions as arrays on the sampler's devices, which are this process's.

    `model` is the sampler's, on all of its devices; `parts` the same on those of each host, which holds whole replicas.
    """

    model: Model
    parts: Mapping[str, Model]
    versions: dict[int, Params] = field(default_factory=dict)
    num_bytes: int = 0

    def publish(self, version: int, params: Params) -> dict[str, Manifest]:
        """Copies the weights where the sampler has other devices, types or layouts (compared by checksum); the manifest
        of each host."""
        published, given = publish_to(self.model, params), set(map(id, jax.tree.leaves(params)))
        self.versions[version] = published
        self.num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(published) if id(leaf) not in given)
        return {name: self.manifest(version, name) for name in self.parts}

    def manifest(self, version: int, host: str) -> Manifest:
        """Where a host fetches a version that exists."""
        return MemoryManifest(version, self, self.parts[host])

    def release(self, needed: Callable[[int], bool]) -> None:
        """Forgets the versions that are not needed; a host that samples from one keeps it."""
        self.versions = {version: params for version, params in self.versions.items() if needed(version)}

    def published_shapes(self) -> Params:
        return published_shapes(self.model)

    def close(self) -> None:
        self.versions.clear()


@dataclass(frozen=True)
class MemoryManifest:
    """The arrays of one host among those of a `MemoryChannel`."""

    version: int
    channel: MemoryChannel
    model: Model

    @property
    def exists(self) -> bool:
        return self.version in self.channel.versions

    def fetch(self, wait: bool = True) -> Params:
        params = self.channel.versions[self.version]
        return params if self.model == self.channel.model else part_of(self.model, params)


class Stored(Protocol):
    """A version outside of any device. It holds no weights and can be sent to another process."""

    @property
    def version(self) -> int: ...
    @property
    def exists(self) -> bool: ...
    def read(self, model: Model) -> Callable[[], Params]:
        """Brings the weights to the devices of `model`; what is returned verifies them and gives them, once.
        LookupError once the version is gone."""
        ...

    def forget(self) -> None:
        """Lets go of what this process refers to."""
        ...


class Store(Protocol):
    """Writes versions."""

    def write(self, version: int, model: Model, params: Params) -> Stored: ...
    def remove(self, stored: Any) -> None: ...
    def close(self) -> None: ...


@dataclass
class StoredChannel:
    """Versions in a store. `model` is the sampler's, on devices of this process, where a checkpoint reads them;
    `parts` that of each host here, and of one elsewhere anything: it has its own."""

    model: Model
    parts: Mapping[str, Model]
    store: Store
    stored: dict[int, Stored] = field(default_factory=dict)

    @property
    def versions(self) -> Mapping[int, Params]:
        return StoredVersions(self.stored, self.model)

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.model)

    def publish(self, version: int, params: Params) -> dict[str, Manifest]:
        before, self.stored = self.stored.get(version), self.stored | {version: self.store.write(version, self.model,
                                                                                                 params)}
        if before is not None:
            self.store.remove(before)
        return {name: self.manifest(version, name) for name in self.parts}

    def manifest(self, version: int, host: str) -> Manifest:
        return StoredManifest(self.stored[version], self.parts[host])

    def release(self, needed: Callable[[int], bool]) -> None:
        for version in [version for version in self.stored if not needed(version)]:
            self.store.remove(self.stored.pop(version))

    def published_shapes(self) -> Params:
        return published_shapes(self.model)

    def close(self) -> None:
        self.stored.clear()
        self.store.close()


@dataclass(frozen=True)
class StoredVersions(Mapping[int, Params]):
    """The versions of a `StoredChannel`, each read when it is asked for."""

    stored: Mapping[int, Stored]
    model: Model

    def __getitem__(self, version: int) -> Params:
        return self.stored[version].read(self.model)()

    def __contains__(self, version: object) -> bool:
        return version in self.stored

    def __iter__(self) -> Iterator[int]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


@dataclass
class StoredManifest:
    """A stored version, and the devices that a host fetches it to."""

    stored: Stored
    model: Model
    _reading: Future[Callable[[], Params]] | None = None

    @property
    def exists(self) -> bool:
        return self.stored.exists

    def fetch(self, wait: bool = True) -> Params | None:
        # In the background nothing is computed: programs of two threads may reach several devices in different orders,
        # and then wait for each other.
        if self._reading is None:
            pool = ThreadPoolExecutor(1, "weights")
            self._reading = pool.submit(self.stored.read, self.model)
            pool.shutdown(wait=False)
        if not wait and not self._reading.done():
            return None
        reading, self._reading = self._reading, None
        return reading.result()()
