"""The settings of devices."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config.sections import at_least, require


@dataclass(frozen=True)
class MeshSection:
    data: int = 1
    """Data-parallel copies of the model, each with a part of a batch's rows."""
    fsdp: int = 1
    """Devices that share parameters, optimizer state and rows (FSDP); -1 for all that remain."""
    tensor: int = 1
    """Devices that share heads and feed-forward layers (tensor parallelism)."""
    trainer: str = ""
    """Devices of the trainer: a fraction (0.5, or 1.0 for all), a count (2), or a list of numbers ([0,1]); empty for
    all. A fraction or count takes the first devices."""
    sampler: str = ""
    """Devices of the sampler, in the same forms: the trainer's, or others. A fraction or count takes the last devices.
    Empty for the trainer's."""
    reference: str = ""
    """Devices of the reference and of a teacher, in the same forms. Empty for the sampler's."""
    sampler_tensor: int = 0
    """Devices of one replica of the sampler, which share its weights; 0 for mesh.tensor, or more where a replica does
    not fit the memory of so few."""
    dcn_data: int = 1
    """Slices (or hosts) that each have a copy of the model, times mesh.data copies within each."""
    dcn_fsdp: int = 1
    """Slices (or hosts) that share parameters, times mesh.fsdp devices within each."""
    coordinator: str = ""
    """Of a run in several processes: HOST:PORT where process 0 waits for the others. Slurm and TPU slices give it."""
    processes: int = 0
    """Number of processes, each with its own devices and started with the same command; 0 for one, or as Slurm or a TPU
    slice says."""
    process: int = -1
    """Number of this process, from 0; process 0 writes the run folder. Slurm and TPU slices give it."""
    pathways: bool = False
    """Use the devices of all hosts from this one process, through Pathways' proxy at JAX_BACKEND_TARGET; as
    JAX_PLATFORMS=proxy does."""
    compiler_options: tuple[str, ...] = ()
    """XLA's options for all programs, as NAME=VALUE, over those that Shoal sets for the platform."""

    def __post_init__(self) -> None:
        for option in self.compiler_options:
            require("=" in option, "mesh.compiler_options", option, "NAME=VALUE")
        at_least(self, "mesh.", 0, "sampler_tensor", note="auto")
        at_least(self, "mesh.", 0, "processes", note="one")
        at_least(self, "mesh.", -1, "process", note="one process")
        at_least(self, "mesh.", 1, "dcn_data")
        at_least(self, "mesh.", 1, "dcn_fsdp")
        for name in ("data", "fsdp", "tensor"):
            value = getattr(self, name)
            rest = ", or -1 for all devices that mesh.data and mesh.tensor leave" if name == "fsdp" else ""
            require(value >= 1 or (rest != "" and value == -1), f"mesh.{name}", value, f"1 or more{rest}")
