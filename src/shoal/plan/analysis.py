"""Compiles one program of a job and reads from it what it costs; keeps what the compiler said, by
what it was asked.

The same program for the same devices and compiler is not compiled twice, whatever the job around
it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.interpreters import partial_eval

from shoal.buckets import cache_folder
from shoal.budget.memory import bytes_per_device
from shoal.files import appearing
from shoal.job.fingerprint import package_version
from shoal.plan.hlo import Costs, Module
from shoal.plan.job import Planned, PlannedJob
from shoal.plan.transfers import transfer_rows

_COMPILERS = ("jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
MOST_SHOWN = 12
"""Rows of a table of sources or temporaries that are kept."""

ANSWER_SECONDS = 1e-5
"""Of a GPU, assumed: until its host has read whether a loop goes on."""


def analyse(job: PlannedJob, name: str) -> dict[str, Any]:
    """What one program of the job costs on a device of its role, for JSON."""
    planned = job.programs()[name]
    traced = planned.program.trace(*planned.args, **planned.kwargs)
    compiled = _compiled(job, planned, traced.lower())
    flops, in_kernels, floor = traced_costs(job, planned, traced)
    arguments = bytes_per_device((planned.args, dict(planned.kwargs)))
    found: dict[str, Any] = {
        "program": name,
        "layers": job.model.architecture.num_layers,
        "compiled_seconds": compiled["seconds"],
        "error": compiled["error"],
        "flops": flops,
        "floor_seconds": floor,
    }
    if compiled["error"]:
        return found | {
            "extra_bytes": max(0, compiled["excess"] - arguments),
            "largest": compiled["largest"],
            "collectives": [],
            "compute_seconds": 0.0,
            "transfer_seconds": 0.0,
            "sources": {},
            "launches": 0.0,
            "code_bytes": 0,
            "kernel_flops": in_kernels,
            "assumed": [],
            "memory": {},
        }
    kind = job.accelerator
    memory_rate = kind.hbm / kind.clock if kind and kind.is_tpu else 0.0
    memory, costs = (
        compiled["memory"],
        Module(compiled["text"]).costs(planned.assumed_trips, memory_rate),
    )
    rows = transfer_rows(costs.collectives, job.topology, kind, planned.role.mesh)
    # Cycles (TPU) or bytes a second, for the seconds of a source.
    rate = math.inf if kind is None else kind.clock if kind.is_tpu else kind.hbm
    return found | {
        # What a call needs besides its arguments: temporaries, and results that overwrite none.
        "extra_bytes": memory["temp"]
        + max(0, memory["output"] - memory["alias"])
        + planned.batch_bytes,
        "memory": memory,
        "largest": costs.largest[:MOST_SHOWN],
        "collectives": rows,
        "code_bytes": memory["code"],
        "compute_seconds": _compute_seconds(job, costs, in_kernels),
        "transfer_seconds": sum(row["seconds"] for row in rows),
        "launches": sum(times for times, *_ in costs.operations),
        "kernel_flops": in_kernels,
        "sources": dict(
            sorted(
                ((source, value / rate) for source, value in (costs.cycles or costs.bytes).items()),
                key=lambda item: -item[1],
            )[:MOST_SHOWN]
        ),
        "assumed": costs.assumed,
    }


def traced_costs(job: PlannedJob, planned: Planned, traced: Any) -> tuple[float, float, float]:
    """On a device, what is known before a program is compiled: (operations of products, those of
    them in kernels, the least seconds that it could take: the products at the peak rate, or what it
    reads at the memory's)."""
    # As a compiler does it: recomputation by a rule of our own (`gated_product`) traces a product
    # that nobody reads.
    jaxpr, _ = partial_eval.dce_jaxpr(
        traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.jaxpr.outvars), instantiate=True
    )
    flops, in_kernels = (
        jaxpr_flops(jaxpr, planned.assumed_trips, of_kernels) / planned.role.mesh.size
        for of_kernels in (False, True)
    )
    weights = planned.weights_read * (bytes_per_device(planned.args) - planned.looked_up)
    read = weights + (planned.keys_read or bytes_per_device(dict(planned.kwargs)))
    kind = job.accelerator
    if kind is None:
        return flops, in_kernels, 0.0
    return (
        flops,
        in_kernels,
        max(flops / kind.peaks.get(job.model.dtype.name, math.inf), read / kind.hbm),
    )


def _compute_seconds(job: PlannedJob, costs: Costs, in_kernels: float) -> float:
    """Without transfers between devices. TPU: the compiler's estimate of cycles, and the waits for
    copies; GPU, and where a TPU's compiler has none: for each operation the longest of its memory
    traffic, its products and (GPU) its launch; both: of kernels, into which no compiler's account
    looks, the operations at a share of the peak rate, if that is longer than their memory traffic.
    0 where the device is not known."""
    kind = job.accelerator
    if kind is None:
        return 0.0
    peak = kind.peaks.get(job.model.dtype.name, math.inf)
    operations, least = (costs.unknown, 0.0) if kind.is_tpu else (costs.operations, kind.launch)
    compiled = sum(
        times * max(size / kind.hbm, flops / peak, least) for times, size, flops in operations
    )
    beside = (
        sum(costs.cycles.values()) / kind.clock if kind.is_tpu else costs.awaited * ANSWER_SECONDS
    )
    return (
        compiled
        + beside
        + max(0.0, in_kernels / (kind.kernels * peak) - costs.in_kernels / kind.hbm)
    )


# ---- what the compiler said


def _compiled(job: PlannedJob, planned: Planned, lowered: Any) -> dict[str, Any]:
    """The compiled program's text and memory, from the disk if it was compiled before."""
    file = _folder() / f"{_key(job, planned, lowered.as_text())}.json.gz"
    stored = _read_compiled(file)
    if stored is not None:
        return stored
    started, found = (
        time.perf_counter(),
        {"error": "", "excess": 0, "largest": [], "text": "", "memory": {}},
    )
    try:
        compiled = planned.program.compile(*planned.args, **planned.kwargs)
        m = compiled.memory_analysis()
        found |= {
            "text": compiled.as_text(),
            "memory": {
                "arguments": m.argument_size_in_bytes,
                "output": m.output_size_in_bytes,
                "alias": m.alias_size_in_bytes,
                "temp": m.temp_size_in_bytes,
                "code": m.generated_code_size_in_bytes,
            },
        }
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found |= _exhausted(str(error))
    found["seconds"] = time.perf_counter() - started
    file.parent.mkdir(parents=True, exist_ok=True)
    with appearing(file) as temporary:
        temporary.write_bytes(gzip.compress(json.dumps(found).encode(), 6))
    return found


def _read_compiled(file: Path) -> dict[str, Any] | None:
    """What was kept of a compiled program; None where nothing was, or the file is damaged: it is
    then compiled again, and the file replaced."""
    try:
        found = json.loads(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    return (
        found
        if isinstance(found, dict) and {"error", "text", "memory", "seconds"} <= found.keys()
        else None
    )


def _exhausted(text: str) -> dict[str, Any]:
    """What the compiler says of a program that needs more memory than the device has: how much, and
    for what."""
    asked = re.search(r"(?:Used|requires?d?[^(]*\() ?([\d.]+)([KMGT])", text)
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    size = int(float(asked[1]) * (1 << units[asked[2]])) if asked else 0
    largest = [
        [int(float(n) * (1 << units[unit])), shape, operator]
        for n, unit, operator, shape in re.findall(
            r"Size: ([\d.]+)([KMGT])\s+(?:Operator: ([^\n]*)\s+)?Shape: (\S+)", text
        )
    ]
    return {"error": text.splitlines()[0][:300], "excess": size, "largest": largest[:MOST_SHOWN]}


def _folder() -> Path:
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_folder("jax")) / "plan"


def _key(job: PlannedJob, planned: Planned, text: str) -> str:
    versions = [
        "with code",
        *(f"{name} {package_version(name)}" for name in _COMPILERS),
    ]  # what is kept, and by whom
    device = planned.role.mesh.devices.flat[0]
    target = [
        str(job.topology or device.client.platform_version),
        device.device_kind,
        str([device.id for device in planned.role.mesh.devices.flat]),
    ]
    options = sorted(planned.program.compiler_options.items())
    return hashlib.sha256("\n".join([text, *target, *versions, str(options)]).encode()).hexdigest()


# ---- operations


def jaxpr_flops(jaxpr: Any, assumed_trips: Sequence[float] = (), of_kernels: bool = False) -> float:
    """Operations of a jaxpr's matrix products, two for each multiplication; with `of_kernels` of
    those in kernels. `assumed_trips`: of `while` loops, whose number of rounds a jaxpr does not
    say, the outermost first."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size = math.prod(equation.outvars[0].aval.shape) * math.prod(
                shape[n] for n in contracted
            )
            total += 0.0 if of_kernels else 2.0 * size
            continue
        times, trips = 1.0, assumed_trips
        if equation.primitive.name == "scan":
            times = float(equation.params["length"])
        elif equation.primitive.name == "while":
            times, trips = (assumed_trips[0], assumed_trips[1:]) if assumed_trips else (1.0, ())
        elif (
            equation.primitive.name == "pallas_call"
        ):  # says the cost of all blocks of keys, of which a share is read
            total += equation.params["cost_estimate"].flops * (assumed_trips or [0.5])[0]
            continue
        elif equation.primitive.name == "shard_map":  # its body is of one device
            mesh = equation.params["mesh"].shape
            times = float(math.prod(mesh[axis] for axis in equation.params["newly_manual_axes"]))
        inside = [jaxpr_flops(inner, trips, of_kernels) for inner in inner_jaxprs(equation.params)]
        total += times * (
            max(inside, default=0.0) if equation.primitive.name == "cond" else sum(inside)
        )
    return total


def inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns"):
                found.append(one)
            elif hasattr(one, "jaxpr") and hasattr(one.jaxpr, "eqns"):
                found.append(one.jaxpr)
    return found
