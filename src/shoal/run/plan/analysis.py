"""Compiles one program of a job and reads from it what it costs; keeps what the compiler said, by what it was asked.

The same program for the same devices and compiler is not compiled twice, whatever the job around it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import time
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from shoal.files import appearing
from shoal.mesh.accelerators import Accelerator
from shoal.run.cache import cache_folder
from shoal.run.plan.flops import jaxpr_flops
from shoal.run.plan.groups import device_groups, group_size
from shoal.run.plan.hlo import Costs, Module
from shoal.run.plan.job import Planned, PlannedJob
from shoal.run.plan.links import axes_of, bandwidth
from shoal.run.size import bytes_per_device

_COMPILERS = ("jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
MOST_SHOWN = 12
"""Rows of a table of sources or temporaries that are kept."""


def analyse(job: PlannedJob, name: str) -> dict[str, Any]:
    """What one program of the job costs on a device of its role, for JSON."""
    planned = job.programs()[name]
    traced = planned.program.trace(*planned.args, **planned.kwargs)
    compiled = _compiled(job, planned, traced.lower())
    flops, in_kernels = (jaxpr_flops(traced.jaxpr.jaxpr, planned.assumed_trips, of_kernels) / planned.role.mesh.size
                         for of_kernels in (False, True))
    arguments = bytes_per_device((planned.args, dict(planned.kwargs)))
    weights = planned.weights_read * bytes_per_device(planned.args)
    read = max(arguments, weights + planned.keys_read)
    found: dict[str, Any] = {
        "program": name, "layers": job.model.architecture.num_layers, "compiled_seconds": compiled["seconds"],
        "error": compiled["error"], "flops": flops,
        "floor_seconds": _floor_seconds(job, flops, read),
        "weights_seconds": _floor_seconds(job, 0.0, weights) if planned.keys_read else 0.0}
    if compiled["error"]:
        return found | {"extra_bytes": max(0, compiled["excess"] - arguments), "largest": compiled["largest"],
                        "collectives": [], "compute_seconds": 0.0, "transfer_seconds": 0.0, "sources": {},
                        "assumed": [], "memory": {}}
    memory, costs = compiled["memory"], Module(compiled["text"]).costs(planned.assumed_trips)
    rows = _collective_rows(job, planned, costs)
    rate = _rate(job.accelerator)
    return found | {
        # What a call needs besides its arguments: temporaries, and results that overwrite none.
        "extra_bytes": memory["temp"] + max(0, memory["output"] - memory["alias"]) + planned.batch_bytes,
        "memory": memory, "largest": costs.largest[:MOST_SHOWN], "collectives": rows,
        "compute_seconds": _compute_seconds(job, costs, in_kernels),
        "transfer_seconds": sum(row["seconds"] for row in rows),
        "sources": dict(sorted(((source, value / rate) for source, value in
                                (costs.cycles or costs.bytes).items()), key=lambda item: -item[1])[:MOST_SHOWN]),
        "assumed": costs.assumed}


def _floor_seconds(job: PlannedJob, flops: float, read: float) -> float:
    """The least that any program for this could take: its products at the peak rate, or what it reads at the
    memory's."""
    kind = job.accelerator
    if kind is None:
        return 0.0
    return max(flops / kind.peaks.get(job.model.dtype.name, math.inf), read / kind.hbm)


def _rate(kind: Accelerator | None) -> float:
    """Cycles (TPU) or bytes a second, for the seconds of a source."""
    return math.inf if kind is None else kind.clock if kind.is_tpu else kind.hbm


def _compute_seconds(job: PlannedJob, costs: Costs, in_kernels: float) -> float:
    """Without transfers between devices. TPU: the compiler's estimate of cycles; GPU: for each operation the longer of
    its memory traffic and its products; both: of kernels, into which no compiler's account looks, the operations at the
    peak rate. 0 where the device is not known."""
    kind = job.accelerator
    if kind is None:
        return 0.0
    peak = kind.peaks.get(job.model.dtype.name, math.inf)
    compiled = sum(costs.cycles.values()) / kind.clock if kind.is_tpu else sum(
        times * max(size / kind.hbm, flops / peak) for times, size, flops in costs.operations)
    return compiled + in_kernels / peak


# ---- what the compiler said


def _compiled(job: PlannedJob, planned: Planned, lowered: Any) -> dict[str, Any]:
    """The compiled program's text and memory, from the disk if it was compiled before."""
    file = _folder() / f"{_key(job, planned, lowered.as_text())}.json.gz"
    if file.is_file():
        return json.loads(gzip.decompress(file.read_bytes()))
    started, found = time.perf_counter(), {"error": "", "excess": 0, "largest": [], "text": "", "memory": {}}
    try:
        compiled = planned.program.compile(*planned.args, **planned.kwargs)
        m = compiled.memory_analysis()
        found |= {"text": compiled.as_text(), "memory": {
            "arguments": m.argument_size_in_bytes, "output": m.output_size_in_bytes, "alias": m.alias_size_in_bytes,
            "temp": m.temp_size_in_bytes}}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found |= _exhausted(str(error))
    found["seconds"] = time.perf_counter() - started
    file.parent.mkdir(parents=True, exist_ok=True)
    with appearing(file) as temporary:
        temporary.write_bytes(gzip.compress(json.dumps(found).encode(), 6))
    return found


def _exhausted(text: str) -> dict[str, Any]:
    """What the compiler says of a program that needs more memory than the device has: how much, and for what."""
    asked = re.search(r"(?:Used|requires?d?[^(]*\() ?([\d.]+)([KMGT])", text)
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    size = int(float(asked[1]) * (1 << units[asked[2]])) if asked else 0
    largest = [[int(float(n) * (1 << units[unit])), shape, operator] for n, unit, operator, shape in re.findall(
        r"Size: ([\d.]+)([KMGT])\s+(?:Operator: ([^\n]*)\s+)?Shape: (\S+)", text)]
    return {"error": text.splitlines()[0][:300], "excess": size, "largest": largest[:MOST_SHOWN]}


def _folder() -> Path:
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_folder()) / "plan"


def _key(job: PlannedJob, planned: Planned, text: str) -> str:
    versions = [f"{name} {metadata.version(name)}" for name in _COMPILERS if _is_installed(name)]
    device = planned.role.mesh.devices.flat[0]
    target = [str(job.topology or device.client.platform_version), device.device_kind,
              str([device.id for device in planned.role.mesh.devices.flat])]
    options = sorted(planned.program.compiler_options.items())
    return hashlib.sha256("\n".join([text, *target, *versions, str(options)]).encode()).hexdigest()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


# ---- what moves between devices


def _collective_rows(job: PlannedJob, planned: Planned, costs: Costs) -> list[dict[str, Any]]:
    """Collectives by kind, mesh axes and source, with bytes of the whole arrays, and seconds by the links."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = defaultdict(lambda: {"times": 0.0, "bytes": 0.0, "seconds": 0.0})
    places: dict[str, tuple[str, float, int]] = {}
    for one in costs.collectives:
        if one.groups not in places:
            group, mesh = (device_groups(one.groups) or [[]])[0], planned.role.mesh
            known = group if group and max(group) < mesh.size else []
            places[one.groups] = (axes_of(mesh, known), bandwidth(job.topology, job.accelerator, mesh, known),
                                  group_size(one.groups))
        axes, rate, size = places[one.groups]
        row = rows[one.kind, axes, one.source]
        row["times"] += one.times
        row["bytes"] += one.total
        row["seconds"] += _moved(one.kind, one.total, size) / rate
    found = [{"kind": kind, "axis": axes, "source": source, **row} for (kind, axes, source), row in rows.items()]
    return sorted(found, key=lambda row: -row["bytes"])


def _moved(kind: str, size: float, devices: int) -> float:
    """Bytes that a device receives."""
    share = (devices - 1) / devices
    return {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share) * size
