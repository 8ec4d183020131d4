"""Devices: meshes, the roles that use them, the programs that roles compile, and what accelerators can do."""

from shoal.mesh.accelerators import peak_flops
from shoal.mesh.programs import MAX_IN_FLIGHT, Program
from shoal.mesh.roles import (
    Role,
    Roles,
    available_devices,
    devices_asked,
    listed_divisors,
    make_mesh,
    make_roles,
    shared_devices,
)

__all__ = ["MAX_IN_FLIGHT", "Program", "Role", "Roles", "available_devices", "devices_asked", "listed_divisors",
           "make_mesh", "make_roles", "peak_flops", "shared_devices"]
