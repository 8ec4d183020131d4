"""Devices: meshes, the roles that use them, the programs that roles compile, and data about
accelerators."""

from shoal.mesh.accelerators import accelerator_of, peak_flops
from shoal.mesh.devices import (
    PINNED_HOST,
    available_devices,
    devices_asked,
    has_host_memory,
    listed,
    listed_divisors,
    make_mesh,
    memory_stats,
    return_freed_memory,
    role_devices,
    uses_pathways,
)
from shoal.mesh.processes import World
from shoal.mesh.programs import MAX_IN_FLIGHT, Program, dispatching
from shoal.mesh.roles import Role, Roles, make_roles, put

__all__ = [
    "MAX_IN_FLIGHT",
    "PINNED_HOST",
    "Program",
    "Role",
    "Roles",
    "World",
    "accelerator_of",
    "available_devices",
    "devices_asked",
    "dispatching",
    "has_host_memory",
    "listed",
    "listed_divisors",
    "make_mesh",
    "make_roles",
    "memory_stats",
    "peak_flops",
    "put",
    "return_freed_memory",
    "role_devices",
    "uses_pathways",
]
