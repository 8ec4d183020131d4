"""The settings of samplers in processes of their own, and of how they get the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.config.sections import at_least, require


@dataclass(frozen=True)
class SamplerSection:
    kind: Literal["local", "ray"] = "local"
    """Where completions are sampled: in this process (local), or by workers in a Ray cluster (ray)."""
    workers: int = 1
    """ray: samplers, each in a process of its own, that are wanted. Fewer do the work until the cluster has room."""
    devices_per_worker: int = 1
    """ray: devices of each worker; mesh.sampler_tensor of them share a replica's weights."""
    resources: tuple[str, ...] = ()
    """ray: what a worker asks Ray for, as NAME=VALUE: [GPU=1,CPU=4]. Empty for devices_per_worker of the cluster's
    accelerators, or of its CPUs where it has none."""
    restarts: int = 3
    """How often each worker that was lost is started anew, with growing pauses."""
    stall_seconds: float = 0.0
    """How long a worker that has work may make no progress before it is killed; 0 for 20 times the median of its
    compiled steps, at least 30. Reading weights and compiling may take any time, as long as its process answers."""

    def __post_init__(self) -> None:
        at_least(self, "sampler.", 1, "workers", "devices_per_worker")
        at_least(self, "sampler.", 0, "restarts")
        at_least(self, "sampler.", 0, "stall_seconds", note="auto")
        for entry in self.resources:
            require(_is_amount(entry), "sampler.resources", entry, "NAME=VALUE with a number, as GPU=1")

    @property
    def asked(self) -> Mapping[str, float]:
        """`resources` by name."""
        return {name: float(value) for name, _, value in (entry.partition("=") for entry in self.resources)}


def _is_amount(entry: str) -> bool:
    name, _, value = entry.partition("=")
    try:
        return bool(name) and 0 <= float(value) < math.inf
    except ValueError:
        return False


@dataclass(frozen=True)
class PublishSection:
    channel: Literal["auto", "memory", "files", "ray"] = "auto"
    """How samplers get new weights: the arrays themselves, copied from device to device (memory, of samplers in this
    process), files in publish.folder, or Ray's objects. auto: memory; of Ray's workers files where Ray was started here
    or publish.folder is given, else ray."""
    folder: str = ""
    """Folder of the files, which trainer and samplers share; empty for one in memory, /dev/shm, where it has room."""


@dataclass(frozen=True)
class RaySection:
    address: str = ""
    """The Ray cluster: auto (the one that runs on this machine) or HOST:PORT; empty to start one here, or for the
    cluster of a job that `ray job submit` started."""
    wait_seconds: float = 300.0
    """How long to wait for workers that the cluster has no room for: then the run goes on without them, or ends where
    there is none."""

    def __post_init__(self) -> None:
        require(self.wait_seconds > 0, "ray.wait_seconds", self.wait_seconds, "a number above 0")
