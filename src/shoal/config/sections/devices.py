"""Settings of devices, of samplers in processes of their own, and of how samplers get the
weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.config.key import at_least, key, require

WEIGHTS_ON_DEVICES = (
    "model.path",
    "model.dtype",
    "model.quantise",
    "model.lora.rank",
    "teacher.path",
    "critic.path",
    "reward.functions",
    "algorithm.advantage",
    "algorithm.kl_coef",
    "algorithm.kl_metric",
    "algorithm.reference",
    "optimizer.offload",
    "optimizer.moments",
    "train.max_staleness",
    "train.weight_sync_interval",
    "train.versions",
    "sampler.kind",
    "sampler.quantise",
    "mesh.data",
    "mesh.fsdp",
    "mesh.dcn_data",
    "mesh.dcn_fsdp",
    "mesh.trainer",
    "mesh.sampler",
    "mesh.reference",
    "mesh.context",
    "mesh.expert",
    "mesh.tensor",
)
"""Keys that determine how many bytes of weights and moments each device holds, and so what is
decided from the memory that they leave (`decided_from`)."""


@dataclass(frozen=True)
class MeshSection:
    """The keys `mesh.*`: which devices and processes a job uses, and how they share the work."""

    data: int = key(1, stages=("sampling", "update", "evaluation"), on_resume="bits")
    """Data-parallel copies of the model, each with a part of a batch's rows."""
    fsdp: int = key(1, stages=("sampling", "update", "evaluation"), on_resume="bits")
    """Devices that share parameters, optimizer state and rows (FSDP); -1 for all that remain."""
    tensor: int = key(1, stages=("sampling", "update", "evaluation"), on_resume="bits")
    """Devices that share heads and feed-forward layers (tensor parallelism)."""
    context: int = key(1, stages=("sampling", "update", "evaluation"), on_resume="bits")
    """Devices that share the tokens of a row (context parallelism), and parameters as those of
    mesh.fsdp do: for rows whose activations do not fit one device."""
    expert: int = key(1, stages=("sampling", "update", "evaluation"), on_resume="bits")
    """Devices over which the experts of a layer are distributed; they share rows and other
    parameters as those of mesh.fsdp do (expert parallelism). Above 1, the number of devices of a
    sampler's replica must divide the number of experts, too."""
    trainer: str = key("", stages=("sampling", "update", "evaluation"), on_resume="bits")
    """Devices of the trainer: a fraction (0.5, or 1.0 for all), a count (2), or a list of numbers
    ([0,1]); empty for all. A fraction or count takes the first devices."""
    sampler: str = key("", stages=("sampling", "evaluation"), on_resume="bits")
    """Devices of the sampler, in the same forms: the trainer's, or others. A fraction or count
    takes the last devices. Empty for the trainer's."""
    reference: str = key("", stages=("update",), on_resume="bits")
    """Devices of the reference and of a teacher, in the same forms. Empty for the sampler's."""
    sampler_tensor: int = key(
        0,
        stages=("sampling", "evaluation"),
        on_resume="bits",
        decided_from=(
            *WEIGHTS_ON_DEVICES,
            "sampler.devices_per_worker",
            "devices of the sampler",
        ),
    )
    """Devices of one replica of the sampler, which share its weights; 0 for mesh.tensor, or more if
    a replica does not fit the memory of that many."""
    dcn_data: int = key(1, stages=("sampling", "update", "evaluation"), on_resume="bits")
    """Slices (or hosts) that each have a copy of the model, times mesh.data copies within each."""
    dcn_fsdp: int = key(1, stages=("sampling", "update", "evaluation"), on_resume="bits")
    """Slices (or hosts) that share parameters, times mesh.fsdp devices within each."""
    coordinator: str = key("", stages=())
    """In a run of several processes: HOST:PORT at which process 0 waits for the others. Slurm and
    TPU slices provide it."""
    processes: int = key(
        0,
        stages=(),
        undecided_because="each start takes it from Slurm or the TPU slice that it runs on",
    )
    """Number of processes, each with its own devices and started with the same command; 0 for one,
    or as Slurm or a TPU slice says."""
    process: int = key(-1, stages=(), undecided_because="it differs between the processes of a run")
    """Number of this process, from 0; process 0 writes the run folder. Slurm and TPU slices provide
    it."""
    pathways: bool = key(False, stages=())
    """Use the devices of all hosts from this one process, through Pathways' proxy at
    JAX_BACKEND_TARGET; as JAX_PLATFORMS=proxy does."""
    compiler_options: tuple[str, ...] = key(
        (), stages=("sampling", "update", "evaluation"), on_resume="bits"
    )
    """XLA's options for all programs, as NAME=VALUE; they override those that Shoal sets for the
    platform."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if an axis or a number of
        processes is out of its range, or a compiler option is not NAME=VALUE. The first fault found
        is raised. The axes are 1 or more, but fsdp may be -1; sampler_tensor and processes are 0 or
        more, process -1 or more."""
        for option in self.compiler_options:
            require("=" in option, "mesh.compiler_options", option, "NAME=VALUE")
        at_least(self, "mesh.", 0, "sampler_tensor", note="auto")
        at_least(self, "mesh.", 0, "processes", note="one")
        at_least(self, "mesh.", -1, "process", note="one process")
        at_least(self, "mesh.", 1, "dcn_data")
        at_least(self, "mesh.", 1, "dcn_fsdp")
        for name in ("data", "fsdp", "tensor", "context", "expert"):
            value = getattr(self, name)
            rest = ", or -1 for all devices that the other axes leave" if name == "fsdp" else ""
            require(
                value >= 1 or (rest != "" and value == -1),
                f"mesh.{name}",
                value,
                f"1 or more{rest}",
            )


@dataclass(frozen=True)
class SamplerKind:
    """What a `sampler.kind` allows: the values of publish.channel; and the name of the engine that
    samples, if that is another program than Shoal's own."""

    channels: tuple[str, ...]
    engine: str = ""


SAMPLER_KINDS = {
    "local": SamplerKind(("auto", "memory", "files")),
    "ray": SamplerKind(("auto", "files", "ray")),
    "vllm": SamplerKind(("auto", "files"), engine="vLLM"),
}
"""By the names of `sampler.kind`."""


@dataclass(frozen=True)
class SamplerSection:
    """The keys `sampler.*`: samplers in processes of their own."""

    kind: Literal["local", "ray", "vllm"] = key("local", stages=("sampling", "evaluation"))
    """Where completions are sampled: in this process (local), by workers in a Ray cluster (ray), or
    by vLLM servers (vllm)."""
    workers: int = key(1, stages=())
    """Samplers, each in a process of its own. ray: until the cluster has room, fewer do the work.
    vllm: servers to start here if vllm.urls names none."""
    devices_per_worker: int = key(1, stages=())
    """Devices of each worker. ray: mesh.sampler_tensor of them share a replica's weights; vllm: all
    of them do."""
    resources: tuple[str, ...] = key((), stages=())
    """ray: what a worker requests from Ray, as NAME=VALUE: [GPU=1,CPU=4]. Empty for
    devices_per_worker of the cluster's accelerators, or of its CPUs if it has none."""
    restarts: int = key(3, stages=())
    """How often each lost worker is restarted, with growing pauses. Every 20 steps with its answers
    earn one restart back."""
    stall_seconds: float = key(
        0.0,
        stages=(),
        undecided_because="it follows the compiled steps of each worker, which are timed all along",
    )
    """How long a worker that has work may make no progress before it is killed; 0 for 20 times the
    median of its compiled steps, at least 30. Reading weights and compiling may take any time, as
    long as its process answers."""
    quantise: Literal["none", "int8", "fp8"] = key("none", stages=("sampling", "evaluation"))
    """Type of the weights of the sampler's products: 8 bits per element and one scale per output
    channel, made at each publication, with half the memory and memory traffic of bfloat16. The
    model that samples is then not quite the trainer's, so algorithm.correction=auto is tis. For
    local samplers and Ray's workers."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is out of its
        range, or an entry of `resources` is not NAME=VALUE with a number. The first fault found is
        raised. workers and devices_per_worker are 1 or more, restarts and stall_seconds 0 or
        more."""
        at_least(self, "sampler.", 1, "workers", "devices_per_worker")
        at_least(self, "sampler.", 0, "restarts")
        at_least(self, "sampler.", 0, "stall_seconds", note="auto")
        for entry in self.resources:
            require(
                _is_amount(entry),
                "sampler.resources",
                entry,
                "NAME=VALUE with a number, such as GPU=1",
            )

    @property
    def is_remote(self) -> bool:
        """True if completions are sampled by workers with devices of their own, which this process
        does not have."""
        return self.kind != "local"

    @property
    def channels(self) -> tuple[str, ...]:
        """What publish.channel may be."""
        return SAMPLER_KINDS[self.kind].channels

    @property
    def engine(self) -> str:
        """The name of another engine that samples, such as vLLM; empty if it is Shoal's own."""
        return SAMPLER_KINDS[self.kind].engine

    @property
    def asked(self) -> Mapping[str, float]:
        """Returns `resources` as a mapping from names to amounts, `GPU=1` as {"GPU": 1.0}; of
        several entries of one name the last counts."""
        return {
            name: float(value)
            for name, _, value in (entry.partition("=") for entry in self.resources)
        }


def _is_amount(entry: str) -> bool:
    """True if a text is NAME=VALUE with a name and a finite number of 0 or more."""
    name, _, value = entry.partition("=")
    try:
        return bool(name) and 0 <= float(value) < math.inf
    except ValueError:
        return False


@dataclass(frozen=True)
class PublishSection:
    """The keys `publish.*`: how samplers get new weights."""

    channel: Literal["auto", "memory", "files", "ray"] = key(
        "auto",
        stages=(),
        decided_from=("sampler.kind", "publish.folder", "Ray may span machines"),
    )
    """How samplers get new weights: the arrays themselves, copied from device to device (memory,
    for samplers in this process), files in publish.folder, or Ray's objects. auto: memory; files
    for vLLM; for Ray's workers files if Ray was started here or publish.folder is given, else
    ray."""
    folder: str = key("", stages=())
    """Folder of the files, which trainer and samplers share; empty for one in memory, /dev/shm, if
    it has room."""


@dataclass(frozen=True)
class RaySection:
    """The keys `ray.*`: the Ray cluster in which samplers are."""

    address: str = key("", stages=())
    """The Ray cluster: auto (the one that runs on this machine) or HOST:PORT; empty to start one
    here, or for the cluster of a job that `ray job submit` started."""
    wait_seconds: float = key(300.0, stages=())
    """How long to wait for workers that the cluster has no room for. The run then continues without
    them, or ends if there is no worker at all."""

    def __post_init__(self) -> None:
        require(self.wait_seconds > 0, "ray.wait_seconds", self.wait_seconds, "a number above 0")


@dataclass(frozen=True)
class VllmSection:
    """The keys `vllm.*`: servers of vLLM that sample."""

    urls: tuple[str, ...] = key((), stages=("sampling", "evaluation"))
    """Servers that run already, as [http://HOST:PORT], started with VLLM_SERVER_DEV_MODE=1,
    --enable-scale-out and --logprobs-mode=processed_logprobs; they must share publish.folder. Empty
    to start sampler.workers servers."""
    python: str = key("", stages=("sampling", "evaluation"))
    """Command of a Python that has vLLM, for servers that Shoal starts: /opt/vllm/bin/python, or
    with variables: `env CUDA_VISIBLE_DEVICES=1 /opt/vllm/bin/python`."""
    arguments: tuple[str, ...] = key((), stages=("sampling", "evaluation"))
    """Further arguments of these servers, such as [--max-num-seqs=64,--data-parallel-size=2]."""
    memory: float = key(
        0.0,
        stages=("sampling", "evaluation"),
        undecided_because="vLLM's own default holds, which its server does not report",
    )
    """Share of the trainer's GPU that each of these servers takes (vLLM's gpu_memory_utilization)
    while it samples; it sleeps while the trainer learns. For synchronous runs only. 0 for vLLM's
    default, on GPUs of their own."""
    tolerance: float = key(
        0.0, stages=(), decided_from=("sampler.kind", "model.dtype", "platform of the trainer")
    )
    """Largest difference between a server's and the trainer's log-prob of a token, measured after
    each load of weights; 0 for 1e-3 in float32 and 0.1 in other types."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if `memory` or `tolerance` is
        out of its range, or an address is not HTTP. The first fault found is raised. `memory` is 0
        to 1, `tolerance` 0 or more; an address begins with http:// or https://."""
        require(
            0 <= self.memory <= 1,
            "vllm.memory",
            self.memory,
            "a number from 0 (vLLM's default) to 1",
        )
        at_least(self, "vllm.", 0, "tolerance", note="auto")
        for url in self.urls:
            require(url.startswith(("http://", "https://")), "vllm.urls", url, "http://HOST:PORT")
