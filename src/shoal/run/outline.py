"""A job in figures, from the shapes of its arrays alone: what findings, advice and plans go by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.config.schema import Config
from shoal.mesh import Roles
from shoal.model.architecture import Architecture
from shoal.model.transformer import Model
from shoal.run.derived import for_devices
from shoal.run.engines import engine_states, num_hosts, training_places
from shoal.run.fitting import run_roles, teacher_architecture, trained_model
from shoal.run.loading import ModelSpec
from shoal.run.parts import micro_batch_shapes
from shoal.run.size import ROLES, available_memory, device_memory, job_sizes, parameter_count
from shoal.sampler.engine import num_rows

PROGRAMS: Mapping[str, str] = {"prefill": "sampler", "decode": "sampler", "accumulate": "trainer", "apply": "trainer"}
"""The programs that need most memory, and the roles that run them."""


def outline(config: Config, model: Model, roles: Roles, devices: Sequence[Any], a: Architecture | None = None,
            teacher: Architecture | None = None) -> dict[str, Any]:
    """What is known before anything is compiled, for JSON. `a`: the model that memory is reckoned with, if it is not
    that of `model`."""
    a, shape = a or model.architecture, micro_batch_shapes(config, roles.trainer.row_shards)[0]
    sizes = job_sizes(config, model.architecture, roles, model.dtype, teacher or teacher_architecture(config),
                      engine_states(config, model, roles, a))
    mine = list(roles.trainer.mesh.devices.flat)
    memory, places = device_memory(mine[0]), training_places(config, roles, a)
    if not memory:
        available = available_memory(mine)
        memory = available.total // available.sharing
    rows = num_rows(places.slots, places.siblings, roles.hosts[0].row_shards)
    return {
        "model": {"parameters": parameter_count(a), "layers": a.num_layers, "dtype": model.dtype.name,
                  "remat": model.remat},
        "roles": {name: {"mesh": {axis: size for axis, size in role.mesh.shape.items() if size > 1},
                         "devices": [device.id for device in role.mesh.devices.flat], "links": {}}
                  for name, role in zip(ROLES, roles.all, strict=True)},
        "machines": 1, "num_devices": len(devices), "held": sizes.held,
        "memory_bytes": memory, "peak_flops": None, "published_bytes": 0,
        "shape": {"rows": shape.rows, "length": shape.length, "tokens": shape.tokens},
        "slots": rows * places.siblings * num_hosts(roles), "prompts": config.batch.prompts_per_step,
        "micro_tokens": config.batch.micro_tokens,
        "programs": {name: {"runs": 1, "role": role} for name, role in PROGRAMS.items()},
    }


def outline_here(config: Config, a: Architecture, devices: Sequence[Any]) -> dict[str, Any]:
    """The outline of another job for a model on these devices. ShoalError for one that cannot be."""
    roles = run_roles(config, a, devices)
    config = for_devices(config, roles.trainer.mesh.size, roles.trainer.platform)
    return outline(config, trained_model(config, ModelSpec(Path(), a), roles), roles, devices)
