"""Memory: available on a device, needed by a job, and the keys that reduce it when it is exhausted."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shoal.config.keys import keys_of
from shoal.config.schema import Config
from shoal.config.values import get_value
from shoal.mesh import Role, Roles, memory_stats
from shoal.model.architecture import Architecture
from shoal.model.parameters import param_shapes, param_specs, reads_layers_apart, tensor_sizes
from shoal.model.transformer import Model
from shoal.report.findings import Finding, gib
from shoal.run.derived import MICRO_TOKENS, longest_sequence
from shoal.run.parts import make_learner, schedule_of
from shoal.sampler.engine import Engine
from shoal.types import ShoalError

FULL = 0.9
"""Share of the free memory above which a job is tight."""

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
    stats = [memory_stats(device) for device in local]
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
    """Bytes of a tree of shapes on each device that holds it; those without a sharding are whole."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)
               * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(shapes))


def weight_bytes(a: Architecture, role: Role, dtype: Any) -> int:
    """Bytes of a model's parameters on one of a role's devices."""
    return bytes_per_device(param_shapes(param_specs(a), role, dtype))


def parameter_count(a: Architecture) -> int:
    return sum(math.prod(d.shape) for d in jax.tree.leaves(param_specs(a)))


def held_bytes(config: Config, model: Model, roles: Roles, teacher: Architecture | None,
               engines: Mapping[str, Engine]) -> dict[str, MemoryBudget]:
    """What is known before compilation, by role, on each of its devices: parameters, moments, gradient, the sampler's
    copy, KV caches (of the largest engine), reference and teacher."""
    state = make_learner(config, model).shapes()
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.shape]  # not its counters
    trainer = MemoryBudget({"parameters": bytes_per_device(state.trainable),
                            "Adam's moments": bytes_per_device(moments)})
    trainer.update["gradient"] = trainer.always["parameters"]
    sampler, reference = MemoryBudget(), MemoryBudget()
    copied = copied_shapes(state.trainable, model.on(roles.sampler))
    own = bytes_per_device([own for _, own in copied])
    shared = bytes_per_device(state.trainable) - bytes_per_device([mine for mine, _ in copied])
    # Of arrays that are the trainer's own, only those of older versions take more.
    if size := max(held * own + older * shared for held, older in held_versions(config)):
        sampler.always["the sampler's copy"] = size
    size, name = max((bytes_per_device(engine.state_shapes()), name) for name, engine in engines.items())
    sampler.sampling[f"KV caches ({name})"] = size
    if config.algorithm.kl_coef > 0:
        reference.always["reference"] = weight_bytes(model.architecture, roles.reference, model.dtype)
    if teacher:
        reference.always["teacher"] = weight_bytes(teacher, roles.reference, model.dtype)
    return {"trainer": trainer, "sampler": sampler, "reference": reference}


def held_versions(config: Config) -> Iterator[tuple[int, int]]:
    """(published versions whose weights are held, those of them that are older than the trainer's) while each of some
    later steps samples and updates."""
    schedule = schedule_of(config.train)
    if schedule.newest:  # the version that is sampled from, and the next, which is there before it is loaded
        yield 2, 1
        return
    newest = schedule.weight_sync_interval * (schedule.lag + 1)
    held = list(filter(schedule.publishes, range(schedule.version(newest), newest + 1)))
    for step in range(newest, newest + schedule.weight_sync_interval):  # until the next is published
        yield len(held), sum(version < step for version in held)


def copied_shapes(parameters: Any, sampler: Model) -> list[tuple[Any, Any]]:
    """The trainer's and the sampler's shape of each array that the sampler does not read from the trainer's own."""
    specs = jax.tree.leaves(param_specs(sampler.architecture))
    found, is_apart = [], reads_layers_apart(sampler.role)
    for mine, spec in zip(jax.tree.leaves(parameters), specs, strict=True):
        own = param_shapes(spec, sampler.role, sampler.dtype)
        same = mine.dtype == own.dtype and mine.sharding.is_equivalent_to(own.sharding, len(mine.shape))
        if not same or (is_apart and spec.axes[0] == "layers"):
            found.append((mine, own))
    return found


def static_budget(config: Config, model: Model, roles: Roles, teacher: Architecture | None,
                  engines: Mapping[str, Engine]) -> MemoryBudget:
    """The memory known before compilation, of the device that needs most; roles on the same devices add up."""
    held, by_devices = held_bytes(config, model, roles, teacher, engines), {}
    for role, part in zip(roles.all, held.values(), strict=True):
        elsewhere = role is roles.sampler and config.sampler.kind == "ray"
        budget = by_devices.setdefault(frozenset(() if elsewhere else role.mesh.devices.flat), MemoryBudget())
        for when in ("always", "sampling", "update"):
            getattr(budget, when).update(getattr(part, when))
    return max(by_devices.values(), key=lambda budget: budget.total)


def judge_memory(config: Config, budget: MemoryBudget, available: AvailableMemory, sampler: Model,
                 bound: str = "at most") -> Finding:
    """Whether a job fits: what each device needs and has, and if that is tight, the change that saves most. `bound`:
    `at least` where activations are unknown."""
    total = budget.total * available.sharing
    shared = f" on each of {available.sharing} devices that share it" if available.sharing > 1 else ""
    text = f"{bound} {gib(budget.total)}{shared}, in the {budget.phase} phase ({budget.describe()})"
    if not available.free:
        return Finding("memory", "ok", f"{text}; the device does not report its memory")
    text += f"; {gib(available.free)} of {gib(available.total)} free ({available.where})"
    if total <= FULL * available.free:
        return Finding("memory", "ok", text)
    cure, key = suggest_saving(config, budget, total - FULL * available.free, jax.device_count(),
                               wider_replica(sampler.architecture, sampler.role))
    if total > available.free:
        return Finding("memory", "wrong", f"too little: {text}. {cure}", key)
    return Finding("memory", "warning", f"tight: {text}. {cure}", key)


def check_memory(config: Config, model: Model, roles: Roles, engines: Iterable[tuple[str, Engine]]) -> Finding:
    """Whether what is known before compilation fits; ShoalError if it exceeds all of a device's memory."""
    available, found = available_memory(roles.trainer.mesh.devices.flat), []
    for name, engine in engines:  # one by one: a huge one is not made
        budget = static_budget(config, model, roles, None, {name: engine})
        found.append((budget.total, judge_memory(config, budget, available, model.on(roles.sampler), "at least")))
        if found[-1][1].level == "wrong" and budget.total * available.sharing > available.total:
            raise ShoalError(found[-1][1].text)
    return max(found, key=lambda one: one[0])[1]


# ---- the keys that take less


@dataclass(frozen=True)
class Saving:
    """A key that can take less memory."""

    key: str
    parts: tuple[str, ...]  # of a MemoryBudget, that it makes smaller
    change: Callable[..., tuple[Any, Any] | None]
    """(configuration, number of devices, `wider_replica` if it is known) -> (new value, None for a lower one, inf for a
    higher one; the one now)"""


def _halved(key: str, least: Callable[[Any], int],
            auto: Callable[[Any], int] = lambda c: 0) -> Callable[..., tuple[int, int] | None]:
    def change(config: Any, *_: Any) -> tuple[int, int] | None:
        now = get_value(config, key) or auto(config)
        half = max(least(config), now // 2)
        return (half, now) if half < now else None

    return change


def _lower(key: str) -> Callable[..., tuple[None, Any]]:
    return lambda config, *_: (None, get_value(config, key))


def _more_devices(axis: str) -> Callable[..., tuple[int, int] | None]:
    def change(config: Any, count: int, *_: Any) -> tuple[int, int] | None:
        m = config.mesh
        now = getattr(m, axis)
        most = count // max(1, m.data * abs(m.fsdp) * m.tensor // abs(now))
        return (most, now) if 0 < now < most else None

    return change


def _wider_replicas(config: Any, count: int, sizes: tuple[int, int] | None = None) -> tuple[float, int] | None:
    now = config.mesh.sampler_tensor or config.mesh.tensor
    new, now = sizes or (math.inf if count > now else now, now)
    return (new, now) if new > now else None


def wider_replica(a: Architecture, role: Role) -> tuple[int, int]:
    """Devices of a replica of the sampler: all that a host has if the model can be divided so, else the next more that
    it can; and those of one now, which stand for both where there are no more."""
    host = min(Counter(device.process_index for device in role.mesh.devices.flat).values())
    wider = [size for size in tensor_sizes(a, role.local.mesh.size) if size > role.tensor]
    return max((size for size in wider if size <= host), default=min(wider, default=role.tensor)), role.tensor


_CACHES = ("KV caches", "sampler's temporaries")
_WEIGHTS = ("parameters", "Adam's moments", "gradient")

SAVINGS = (
    Saving("batch", (), _halved("batch", lambda c: getattr(c, "pass_k", 0) or getattr(c, "num_generations", 1))),
    Saving("batch.micro_tokens", ("activations",),
           _halved("batch.micro_tokens", longest_sequence, lambda _: MICRO_TOKENS)),
    Saving("model.remat", ("activations",), lambda c, *_: ("full", c.model.remat) if c.model.remat != "full" else None),
    Saving("algorithm.kl_coef", ("reference",),
           lambda c, *_: (0, c.algorithm.kl_coef) if c.algorithm.kl_coef else None),
    Saving("mesh.fsdp", (*_WEIGHTS, "reference", "teacher"), _more_devices("fsdp")),
    Saving("sampling.slots_per_device", _CACHES,
           _halved("sampling.slots_per_device", lambda c: max(c.batch.group_size, c.pass_k),
                   lambda c: c.batch.prompts_per_step * c.batch.group_size)),
    Saving("batch.group_size", _CACHES, _lower("batch.group_size")),
    Saving("sampling.max_completion_tokens", ("activations", *_CACHES), _lower("sampling.max_completion_tokens")),
    Saving("sampling.max_prompt_tokens", _CACHES, _lower("sampling.max_prompt_tokens")),
    Saving("mesh.sampler_tensor", ("the sampler's copy",), _wider_replicas),
    Saving("model.dtype", ("the sampler's copy",),
           lambda c, *_: ("bfloat16", c.model.dtype) if c.model.dtype != "bfloat16" else None),
)
"""Keys that take less memory, the cheapest first: the first three change no result."""

_OF_TRAINING = {"model.remat", "sampling.slots_per_device"}
"""Keys that commands which only sample have, and do not need."""


def suggest_saving(config: Config, budget: MemoryBudget, excess: float, devices: int,
                   replica: tuple[int, int] | None = None) -> tuple[str, str]:
    """(text, key) of the first change that makes the largest part smaller; the text names more if `excess` is more."""
    largest = next(iter(budget.parts)).partition(" (")[0]
    found = [(saving, changed) for saving in SAVINGS
             if largest in saving.parts and (changed := saving.change(config, devices, replica))]
    if not found:
        return "a smaller model, or more devices (mesh.fsdp)", "model.path"
    (saving, (new, now)), *others = found
    size = sum(size for name, size in budget.parts.items() if name.partition(" (")[0] in saving.parts)
    is_known = new not in (None, math.inf) and not isinstance(new, str)
    saved = size * (1 - min(new, now) / max(new, now)) if is_known else math.inf
    text = f"{_described(saving.key, (new, now))} would take {f'about {gib(saved)}' if is_known else 'much'} less"
    if saved < excess and others:
        text += "; then " + ", ".join(_described(other.key, changed) for other, changed in others)
    return text, saving.key


def _described(key: str, changed: tuple[Any, Any]) -> str:
    new, now = changed
    word = "a lower " if new is None else "a higher " if new == math.inf else ""
    return f"{word}{key}{'' if word else f'={new}'} (now {now})"


def savings_text(config: Any) -> str:
    """All changes that take less memory, of whatever command; how much is not known."""
    known = keys_of(type(config))
    keys = known if "batch.micro_tokens" in known else known.keys() - _OF_TRAINING
    return "; ".join(_described(saving.key, changed) for saving in SAVINGS
                     if saving.key in keys and (changed := saving.change(config, jax.device_count())))
