"""Publication: versions of the weights, where hosts fetch them when they like.

A version appears whole or not at all, under a manifest; it is written once and goes when nobody may ask for it. The
trainer never waits for a host, nor a host for the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.model.transformer import Model
from shoal.rollout.publication import part_of, publish_to, published_shapes
from shoal.types import Manifest, Params


@dataclass
class MemoryChannel:
    """Versions as arrays on the sampler's devices, which are this process's.

    `model` is the sampler's, on all of its devices; `parts` the same on those of each host, which holds whole replicas.
    """

    model: Model
    parts: Mapping[str, Model]
    versions: dict[int, Params] = field(default_factory=dict)

    def publish(self, version: int, params: Params) -> dict[str, Manifest]:
        """Copies the weights where the sampler has other devices, types or layouts (compared by checksum); the manifest
        of each host."""
        self.versions[version] = publish_to(self.model, params)
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

    def fetch(self) -> Params:
        params = self.channel.versions[self.version]
        return params if self.model == self.channel.model else part_of(self.model, params)
