"""Memory: available on a device, needed by a job, and the keys that reduce it when it is exhausted."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.config.keys import keys_of
from shoal.config.schema import Config
from shoal.config.values import get_value
from shoal.mesh import Role, Roles
from shoal.model.transformer import Architecture, Model, is_param_spec, param_specs, shardings
from shoal.report.findings import gib
from shoal.sampler.engine import Engine
from shoal.types import ShoalError

# ---- available


@dataclass(frozen=True)
class AvailableMemory:
    """Memory of one device. On CPU all devices share one memory: `sharing` of them."""

    total: int
    free: int
    where: str
    sharing: int = 1


def available_memory(devices: Iterable[Any]) -> AvailableMemory:
    """The smallest memory of a local device; on CPU the machine's, or its control group's limit."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        total, free = machine_memory()
        return AvailableMemory(total, free, "RAM of this machine", len(local))
    stats = [device.memory_stats() or {} for device in local]
    limits = [(s["bytes_limit"], s["bytes_limit"] - s.get("bytes_in_use", 0)) for s in stats if "bytes_limit" in s]
    total, free = min(limits, default=(0, 0))
    return AvailableMemory(total, free, local[0].device_kind)


def machine_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """(total, available) bytes of RAM, within the limit of the control group (versions 2 and 1)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    if (proc / "meminfo").is_file():
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE))
        total = int(found.get("MemTotal", total // 1024)) * 1024
        free = int(found.get("MemAvailable", found.get("MemFree", free // 1024))) * 1024
    for limit, used, cache in (("memory.max", "memory.current", "inactive_file"),
                               ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes",
                                "total_inactive_file")):
        most = _read_number(groups / limit)
        if most is not None:
            stat = (groups / limit).with_name("memory.stat")
            dropped = re.search(rf"^{cache} (\d+)$", stat.read_text() if stat.is_file() else "", re.MULTILINE)
            used_bytes = (_read_number(groups / used) or 0) - (int(dropped[1]) if dropped else 0)
            total, free = min(total, most), min(free, max(0, most - used_bytes))
    return total, free


def _read_number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


# ---- needed


class Program:
    """A jitted function that is compiled once a shape and reports the seconds and the memory this took."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[Any, Any] = {}
        self.seconds = 0.0  # spent compiling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = tuple((leaf.shape, str(np.dtype(leaf.dtype))) for leaf in jax.tree.leaves((args, kwargs)))
        if key not in self.compiled:
            started = time.perf_counter()
            self.compiled[key] = self.function.lower(*args, **kwargs).compile()
            self.seconds += time.perf_counter() - started
        return self.compiled[key](*args, **kwargs)

    @property
    def extra_bytes(self) -> int:
        """The most memory that a call needs on a device besides its arguments: temporaries, and results that overwrite
        none. 0 if the compiler does not report it."""
        found = [analysis for program in self.compiled.values() if (analysis := program.memory_analysis())]
        return max((one.temp_size_in_bytes + max(0, one.output_size_in_bytes - one.alias_size_in_bytes)
                    for one in found), default=0)


@dataclass
class MemoryBudget:
    """Bytes that a job needs on each device, by part: those needed all the time, and those of one phase."""

    always: dict[str, int] = field(default_factory=dict)
    sampling: dict[str, int] = field(default_factory=dict)
    update: dict[str, int] = field(default_factory=dict)

    @property
    def phases(self) -> dict[str, int]:
        always = sum(self.always.values())
        return {"sampling": always + sum(self.sampling.values()), "update": always + sum(self.update.values())}

    @property
    def phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def total(self) -> int:
        return self.phases[self.phase]

    @property
    def parts(self) -> dict[str, int]:
        """The parts of the phase that needs most, the largest first."""
        parts = {**self.always, **(self.update if self.phase == "update" else self.sampling)}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    def describe(self) -> str:
        return ", ".join(f"{name} {gib(size)}" for name, size in self.parts.items() if size)


def bytes_per_device(shapes: Any) -> int:
    """Bytes of a tree of shapes with shardings on each device that holds it."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
               for leaf in jax.tree.leaves(shapes))


def weight_bytes(a: Architecture, role: Role, dtype: Any) -> int:
    """Bytes of a model's parameters on one of a role's devices."""
    return bytes_per_device(jax.tree.map(
        lambda d, sharding: jax.ShapeDtypeStruct(d.shape, dtype, sharding=sharding),
        param_specs(a), shardings(a, role), is_leaf=is_param_spec))


def parameter_count(a: Architecture) -> int:
    return sum(math.prod(d.shape) for d in jax.tree.leaves(param_specs(a), is_leaf=is_param_spec))


def static_budget(model: Model, roles: Roles, reference: bool, teacher: Architecture | None,
                  engines: Mapping[str, Engine]) -> MemoryBudget:
    """The memory known before compilation: parameters, moments, gradient, KV caches (of the largest engine)."""
    a = model.architecture
    masters = weight_bytes(a, roles.trainer, jnp.float32)
    budget = MemoryBudget(always={"parameters": masters, "Adam's moments": 2 * masters})
    if reference:
        budget.always["reference"] = masters
    if teacher:
        budget.always["teacher"] = weight_bytes(teacher, roles.reference, model.dtype)
    if roles.sampler.mesh.size > 1 or model.dtype != jnp.float32:
        budget.always["the sampler's copy"] = weight_bytes(a, roles.sampler, model.dtype)
    size, name = max((bytes_per_device(engine.state_shapes()), name) for name, engine in engines.items())
    budget.sampling[f"KV caches ({name})"] = size
    budget.update["gradient"] = masters
    return budget


def suggest_saving(config: Config, budget: MemoryBudget, roles: Roles, num_devices: int) -> tuple[str, str]:
    """(text, key) of the change that saves most, by the largest part."""
    part, size = next(iter(budget.parts.items()))
    mesh, s, completions = roles.trainer.mesh.size, config.sampling, \
        config.batch.prompts_per_step * config.batch.group_size
    if part == "activations":
        row, micro = s.max_prompt_tokens + s.max_completion_tokens, config.batch.micro_tokens
        if micro > row:
            half = max(row, micro // 2)
            return f"batch.micro_tokens={half} (now {micro}) would take about {gib(size * (1 - half / micro))} less", \
                "batch.micro_tokens"
        if config.model.remat != "full":
            return f"model.remat=full (now {config.model.remat}) would take much less for activations", "model.remat"
        return "fewer sampling.max_completion_tokens would take less", "sampling.max_completion_tokens"
    if part.startswith("KV caches") or part == "sampler's temporaries":
        slots = s.slots_per_device or completions // mesh
        least = max(config.batch.group_size, config.pass_k)
        if slots > least:
            half = max(least, slots // 2)
            return f"sampling.slots_per_device={half} (now {slots}) would take about " \
                   f"{gib(size * (1 - half / slots))} less", "sampling.slots_per_device"
        return "a lower sampling.max_prompt_tokens or max_completion_tokens would take less", \
            "sampling.max_prompt_tokens"
    if part == "reference":
        return f"algorithm.kl_coef=0 keeps no reference: {gib(size)} less", "algorithm.kl_coef"
    if mesh < num_devices:
        weights = sum(budget.parts.get(name, 0) for name in ("parameters", "Adam's moments", "gradient"))
        return f"mesh.fsdp={num_devices} splits the weights over all devices of this machine: about " \
               f"{gib(weights * (1 - mesh / num_devices))} less on each", "mesh.fsdp"
    return "a smaller model, or more devices (mesh.fsdp)", "model.path"


# ---- exhausted

TRAINING_KEYS = ("batch.micro_tokens", "model.remat", "mesh.fsdp", "sampling.slots_per_device",
                 "sampling.max_completion_tokens", "sampling.max_prompt_tokens", "batch.group_size")
"""Keys that reduce the memory of training, the cheapest first: the first two change no result."""
SAMPLING_KEYS = ("batch", "sampling.max_completion_tokens", "sampling.max_prompt_tokens", "mesh.fsdp", "mesh.tensor",
                 "model.dtype")

_LESS = {"model.remat": "model.remat=full", "mesh.fsdp": "raise mesh.fsdp (more devices share the weights)",
         "mesh.tensor": "raise mesh.tensor (more devices share the weights)", "model.dtype": "model.dtype=bfloat16",
         "sampling.slots_per_device": "lower sampling.slots_per_device (0 is a whole step's)"}


def explain_out_of_memory(error: BaseException, config: Any) -> ShoalError | None:
    """An error in one line with the keys to change, if a device or the machine ran out of memory; else None."""
    seen: BaseException | None = error
    while seen is not None and not _is_out_of_memory(seen):
        seen = seen.__cause__ or seen.__context__
    if seen is None:
        return None
    asked = re.search(r"(?:allocat\w*|Attempting to reserve)\s+([\d.]+ ?(?:bytes|[KMGT]i?B|B)?)", str(seen))
    what = f" ({asked[1].strip()} more were asked for)" if asked else ""
    known = keys_of(type(config))
    keys = TRAINING_KEYS if "batch.micro_tokens" in known else SAMPLING_KEYS
    advice = "; ".join(f"{_LESS.get(key, f'lower {key}')}, now {get_value(config, key)}"
                       for key in keys if key in known and not _is_exhausted(key, config))
    return ShoalError(f"memory ran out{what}. In this order: {advice}")


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError") and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower())


def _is_exhausted(key: str, config: Any) -> bool:
    """True if the key cannot reduce memory further."""
    used = get_value(config, key)
    if key == "mesh.fsdp":
        return used == -1 or jax.device_count() <= config.mesh.data * used * config.mesh.tensor
    if key == "mesh.tensor":
        return jax.device_count() <= config.mesh.data * abs(config.mesh.fsdp) * used
    return (key, used) in (("model.remat", "full"), ("model.dtype", "bfloat16"))
