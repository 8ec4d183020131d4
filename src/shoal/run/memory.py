"""Memory: what a job needs on a device, what is there, and what to do when it ran out."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.config.values import get_value
from shoal.config.keys import keys_of
from shoal.mesh import Role, Roles
from shoal.model.transformer import Architecture, Model, is_param_spec, param_specs, shardings
from shoal.report.findings import gib
from shoal.sampler.engine import Engine
from shoal.types import ShoalError

# ---- what is there


@dataclass(frozen=True)
class There:
    """Memory of a device: `total`, and `free` when it was asked. On CPU the devices share it: `shared` of them."""

    total: int
    free: int
    what: str
    shared: int = 1


def memory_there(devices: Iterable[Any]) -> There:
    """The least of the local devices' memory; on CPU the machine's, or what a control group leaves of it."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        total, free = machine_memory()
        return There(total, free, "RAM of this machine", len(local))
    stats = [device.memory_stats() or {} for device in local]
    limits = [(s["bytes_limit"], s["bytes_limit"] - s.get("bytes_in_use", 0)) for s in stats if "bytes_limit" in s]
    total, free = min(limits, default=(0, 0))
    return There(total, free, local[0].device_kind)


def machine_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """(total, available) bytes of RAM, the control group's limit respected."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    if (proc / "meminfo").is_file():
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE))
        total = int(found.get("MemTotal", total // 1024)) * 1024
        free = int(found.get("MemAvailable", found.get("MemFree", free // 1024))) * 1024
    for limit, used, cache in (("memory.max", "memory.current", "inactive_file"),
                               ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes",
                                "total_inactive_file")):
        most = _number(groups / limit)
        if most is not None:
            stat = (groups / limit).with_name("memory.stat")
            dropped = re.search(rf"^{cache} (\d+)$", stat.read_text() if stat.is_file() else "", re.MULTILINE)
            used_bytes = (_number(groups / used) or 0) - (int(dropped[1]) if dropped else 0)
            total, free = min(total, most), min(free, max(0, most - used_bytes))
    return total, free


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


# ---- what is needed


class Program:
    """A jitted function, compiled once for each shape (at its first call, or before by `prepare`), that tells what
    memory it takes."""

    def __init__(self, function: Any, name: str, seconds: Callable[[], float]) -> None:
        self.function, self.name, self.clock = function, name, seconds
        self.compiled: dict[Any, Any] = {}
        self.seconds = 0.0  # spent compiling, or waiting for it
        self.pending: Future[Any] | None = None

    def prepare(self, pool: Executor, *args: Any, **kwargs: Any) -> None:
        """Compiles in another thread, for these arrays or shapes."""
        self.pending = pool.submit(self._compile, args, kwargs)

    def _compile(self, args: Any, kwargs: Any) -> None:
        self.compiled[_shapes(args, kwargs)] = self.function.lower(*args, **kwargs).compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = self.clock()
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        key = _shapes(args, kwargs)
        if key not in self.compiled:
            self._compile(args, kwargs)
        self.seconds += self.clock() - started
        return self.compiled[key](*args, **kwargs)

    def extra_bytes(self) -> int:
        """The most that a call takes on a device beside its arguments; 0 where the compiler does not say."""
        return max((extra_bytes(compiled) for compiled in self.compiled.values()), default=0)


def _shapes(args: Any, kwargs: Any) -> Any:
    return tuple((tuple(leaf.shape), str(np.dtype(leaf.dtype))) for leaf in jax.tree.leaves((args, kwargs)))


def extra_bytes(compiled: Any) -> int:
    """Temporaries and results of a compiled program beside the arguments that it may overwrite, on one device."""
    found = compiled.memory_analysis()
    if found is None:
        return 0
    return found.temp_size_in_bytes + max(0, found.output_size_in_bytes - found.alias_size_in_bytes)


def bytes_on_a_device(shapes: Any, places: Any) -> int:
    """What a tree of arrays takes of each device that it lies on."""

    def of(leaf: Any, place: Any) -> int:
        return math.prod(place.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(of, shapes, places)))


def cache_bytes(engine: Engine) -> int:
    """Keys and values of prompts and completions that an engine holds on a device."""
    return bytes_on_a_device(jax.eval_shape(engine._make_slots), engine._layout)


def parameter_count(a: Architecture) -> int:
    return sum(math.prod(d.shape) for d in jax.tree.leaves(param_specs(a), is_leaf=is_param_spec))


@dataclass
class Need:
    """Bytes on each device, by part. Some parts are there all the time, others in one phase."""

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
        """Of the phase that needs most, the largest first."""
        parts = {**self.always, **(self.update if self.phase == "update" else self.sampling)}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    def text(self) -> str:
        return ", ".join(f"{name} {gib(size)}" for name, size in self.parts.items() if size)


def weights_on_a_device(a: Architecture, role: Role, dtype: Any) -> int:
    """Bytes of a model's parameters on one of a role's devices."""
    shapes = jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape, dtype), param_specs(a), is_leaf=is_param_spec)
    return bytes_on_a_device(shapes, shardings(a, role))


def static_need(model: Model, roles: Roles, reference: bool, engines: dict[str, Engine]) -> Need:
    """What is known without compiling anything: parameters, moments, gradient, caches (the largest engine's)."""
    a = model.architecture
    masters = weights_on_a_device(a, roles.trainer, jnp.float32)
    need = Need(always={"parameters": masters, "Adam's moments": 2 * masters})
    if reference:
        need.always["reference"] = masters
    if roles.sampler.mesh.size > 1 or model.dtype != jnp.float32:
        need.always["the sampler's copy"] = weights_on_a_device(a, roles.sampler, model.dtype)
    size, name = max((cache_bytes(engine), name) for name, engine in engines.items())
    need.sampling[f"KV caches ({name})"] = size
    need.update["gradient"] = masters
    return need


# ---- when it ran out

TRAINING_KEYS = ("batch.micro_tokens", "model.remat", "mesh.fsdp", "sampling.slots_per_device",
                 "sampling.max_completion_tokens", "sampling.max_prompt_tokens", "batch.group_size")
"""Keys that take memory away, the cheapest first: the first two change no result."""
SAMPLING_KEYS = ("batch", "sampling.max_completion_tokens", "sampling.max_prompt_tokens", "mesh.fsdp", "mesh.tensor",
                 "model.dtype")

_LESS = {"model.remat": "model.remat=full", "mesh.fsdp": "raise mesh.fsdp (more devices share the weights)",
         "mesh.tensor": "raise mesh.tensor (more devices share the weights)", "model.dtype": "model.dtype=bfloat16",
         "sampling.slots_per_device": "lower sampling.slots_per_device (0 is a whole step's)"}


def explain_out_of_memory(error: BaseException, config: Any) -> ShoalError | None:
    """Memory that ran out, of a device or of the machine, as one line with the keys to turn; None for other errors."""
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
                       for key in keys if key in known and not _is_spent(key, config))
    return ShoalError(f"memory ran out{what}. In this order: {advice}")


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError") and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower())


def _is_spent(key: str, config: Any) -> bool:
    """Whether turning the key would change nothing."""
    used = get_value(config, key)
    if key == "mesh.fsdp":
        return used == -1 or jax.device_count() <= config.mesh.data * used * config.mesh.tensor
    if key == "mesh.tensor":
        return jax.device_count() <= config.mesh.data * abs(config.mesh.fsdp) * used
    return (key, used) in (("model.remat", "full"), ("model.dtype", "bfloat16"))
