"""Compiles one program of a job and computes its cost from what the compiler reports. These reports
are kept on disk.

The same program for the same devices and compiler is not compiled twice, whatever job it belongs
to.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.interpreters import partial_eval

from shoal.buckets import cache_folder
from shoal.budget.budget import ProgramCost
from shoal.budget.memory import bytes_per_device
from shoal.files import atomic_write
from shoal.job.fingerprint import package_version
from shoal.mesh.accelerators import Accelerator
from shoal.plan.hlo import Costs, Module
from shoal.plan.job import Planned, PlannedJob
from shoal.plan.transfers import transfer_rows

_COMPILERS = ("jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}

MOST_SHOWN = 12
"""Most rows that are kept of a table of sources or temporaries."""

ANSWER_SECONDS = 1e-5
"""Seconds, assumed, until the host of a GPU has read whether a loop goes on."""

_KERNELS_OF_ATTENTION = ("forward_kernel", "query_kernel", "key_kernel", "decode_kernel")
"""The names of our kernels that skip blocks of keys. Others, such as JAX's for experts on TPUs,
which have no name, compute all that they declare."""


def analyse(job: PlannedJob, name: str) -> ProgramCost:
    """Compiles one program of a job, or reads the compiler's report from disk, and returns what one
    run of the program costs on a device of its role. `name`: a key of `job.programs()`; KeyError
    for another. Seconds are 0 if the kind of devices is unknown. If the compiler refuses the
    program because memory does not suffice, the cost has only the FLOPs and seconds that are known
    without compiling, an `error`, the bytes that the program needs besides its arguments
    (`extra_bytes`), and its largest arrays. Any other error of the compiler is raised."""
    planned = job.programs()[name]
    traced = planned.program.trace(*planned.args, **planned.kwargs)
    compiled = _compiled(job, planned, traced.lower())
    flops, kernel_flops, floor_seconds = traced_costs(job, planned, traced)
    cost = ProgramCost(
        program=name,
        layers=job.model.architecture.num_layers,
        compiled_seconds=compiled.seconds,
        error=compiled.error,
        flops=flops,
        floor_seconds=floor_seconds,
        kernel_flops=kernel_flops,
    )
    if compiled.error:
        arguments = bytes_per_device((planned.args, dict(planned.kwargs)))
        excess = max(0, compiled.excess - arguments)
        return replace(cost, extra_bytes=excess, largest=compiled.largest)
    accelerator = job.accelerator
    memory_rate = 0.0
    if accelerator and accelerator.is_tpu:
        memory_rate = accelerator.hbm / accelerator.clock  # bytes a cycle
    costs = Module(compiled.text).costs(
        planned.assumed_trips, memory_rate, planned.kernel_share or 1.0
    )
    collectives = transfer_rows(costs.collectives, job.topology, accelerator, planned.role.mesh)
    memory = compiled.memory
    results = max(0, memory["output"] - memory["alias"])  # those not written over arguments
    return replace(
        cost,
        extra_bytes=memory["temp"] + results + planned.batch_bytes,
        memory=memory,
        largest=costs.largest[:MOST_SHOWN],
        collectives=collectives,
        code_bytes=memory["code"],
        compute_seconds=_compute_seconds(job, costs, kernel_flops),
        transfer_seconds=sum(row.seconds for row in collectives),
        launches=sum(operation.times for operation in costs.operations),
        sources=_longest_sources(costs, accelerator),
        assumed=costs.assumed,
    )


def _longest_sources(costs: Costs, accelerator: Accelerator | None) -> dict[str, float]:
    """Returns source (line of code and operation) -> seconds that its operations take on a device
    in one run, the MOST_SHOWN longest, longest first. The seconds follow from the cycles that a
    TPU's compiler estimates, else from the bytes that the operations read and write; 0 if the
    device is unknown."""
    rate = math.inf  # cycles or bytes a second
    if accelerator is not None:
        rate = accelerator.clock if accelerator.is_tpu else accelerator.hbm
    by_source = costs.cycles or costs.bytes  # cycles are known for TPUs alone
    longest = sorted(by_source.items(), key=lambda item: -item[1] / rate)
    return {source: amount / rate for source, amount in longest[:MOST_SHOWN]}


def traced_costs(job: PlannedJob, planned: Planned, traced: Any) -> tuple[float, float, float]:
    """Returns what is known of a program before it is compiled, for one device: (FLOPs of its
    matrix products, how many of these are in kernels, the least seconds that one run could take).
    The seconds are those of the products at the peak rate or of reading the arguments from memory
    (weights as often as `weights_read` says, without those that are `unread`), whichever take
    longer; 0 if the device is unknown. `traced`: the program as JAX traced it with its
    arguments."""
    # Removes dead code, as a compiler does: our own rule for recomputation (`gated_product`)
    # traces a product that nothing reads. All outputs are kept, and all inputs.
    full_jaxpr = traced.jaxpr.jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(
        full_jaxpr, [True] * len(full_jaxpr.outvars), instantiate=True
    )
    devices = planned.role.mesh.size
    # A kernel of unknown share reads half of all pairs of blocks, as one token reads those before.
    count = partial(
        jaxpr_flops, jaxpr, planned.assumed_trips, kernel_share=planned.kernel_share or 0.5
    )
    flops = count() / devices
    kernel_flops = count(of_kernels=True) / devices
    accelerator = job.accelerator
    if accelerator is None:
        return flops, kernel_flops, 0.0
    weights = planned.weights_read * (bytes_per_device(planned.args) - planned.unread)
    # 0: unknown; then the arguments by name are read once
    keys = planned.keys_read or bytes_per_device(dict(planned.kwargs))
    peak = accelerator.peaks.get(job.model.dtype.name, math.inf)
    return flops, kernel_flops, max(flops / peak, (weights + keys) / accelerator.hbm)


def _compute_seconds(job: PlannedJob, costs: Costs, kernel_flops: float) -> float:
    """Returns the seconds of a program without transfers between devices; 0 if the device is
    unknown.

    On a TPU: the compiler's estimate of cycles, and the waits for copies. On a GPU, and for
    operations without such an estimate: for each operation the longest of its memory traffic, its
    products and (GPU) its launch. On both: for kernels, which no compiler looks into, their FLOPs
    at a share of the peak rate, as far as that takes longer than their memory traffic.
    """
    accelerator = job.accelerator
    if accelerator is None:
        return 0.0
    peak = accelerator.peaks.get(job.model.dtype.name, math.inf)
    if accelerator.is_tpu:
        operations = costs.unknown
        least = 0.0
        other_seconds = sum(costs.cycles.values()) / accelerator.clock
    else:
        operations = costs.operations
        least = accelerator.launch
        other_seconds = costs.awaited * ANSWER_SECONDS
    operation_seconds = 0.0
    for operation in operations:
        seconds = max(operation.bytes / accelerator.hbm, operation.flops / peak, least)
        operation_seconds += operation.times * seconds
    kernel_seconds = (
        kernel_flops / (accelerator.kernels * peak) - costs.in_kernels / accelerator.hbm
    )
    return operation_seconds + other_seconds + max(0.0, kernel_seconds)


# ---- what the compiler said


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of a program, or why it made nothing; kept on disk as JSON."""

    error: str = ""
    excess: int = 0  # bytes that a program needs which was refused for lack of memory
    largest: Sequence[Any] = ()  # its largest arrays: [bytes, shape, operator]
    text: str = ""  # optimised HLO
    memory: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def _compiled(job: PlannedJob, planned: Planned, lowered: Any) -> Compiled:
    """Compiles a program and returns the compiler's report; from disk if it was compiled before.
    `lowered`: the program as JAX lowered it, from whose text the name of the report's file follows.
    A program that was refused for lack of memory also has a report (with `error`), which is kept
    too; any other error is raised. A new report is written to disk. `seconds` is how long the
    compiler took, also in a report from disk."""
    file = _folder() / f"{_key(job, planned, lowered.as_text())}.json.gz"
    stored = _read_compiled(file)
    if stored is not None:
        return stored
    started = time.perf_counter()
    try:
        program = planned.program.compile(*planned.args, **planned.kwargs)
        analysis = program.memory_analysis()
        compiled = Compiled(
            text=program.as_text(),
            memory={
                "arguments": analysis.argument_size_in_bytes,
                "output": analysis.output_size_in_bytes,
                "alias": analysis.alias_size_in_bytes,
                "temp": analysis.temp_size_in_bytes,
                "code": analysis.generated_code_size_in_bytes,
            },
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        compiled = _exhausted(str(error))
    compiled = replace(compiled, seconds=time.perf_counter() - started)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as temporary:
        temporary.write_bytes(gzip.compress(json.dumps(asdict(compiled)).encode(), 6))
    return compiled


def _read_compiled(file: Path) -> Compiled | None:
    """Reads a compiler's report. None if there is no such file, or if it is damaged or of another
    version; the program is then compiled again, and the file replaced."""
    try:
        stored = json.loads(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    names = {field.name for field in fields(Compiled)}
    if not isinstance(stored, dict) or stored.keys() != names:
        return None
    return Compiled(**stored)


def _exhausted(text: str) -> Compiled:
    """Parses the compiler's message about a program that needs more memory than the device has.
    Returns a report with its first line as `error` (at most 300 characters); as `excess` all bytes
    that the program needs, 0 if the message does not say them; and its largest arrays, in the
    message's order and at most MOST_SHOWN, as [bytes, shape, operator], "" for an operator that is
    not named."""
    size = re.search(r"(?:Used|requires?d?[^(]*\() ?([\d.]+)([KMGT])", text)
    excess = 0
    if size:
        excess = _bytes(size[1], size[2])
    largest = []
    for number, unit, operator, shape in re.findall(
        r"Size: ([\d.]+)([KMGT])\s+(?:Operator: ([^\n]*)\s+)?Shape: (\S+)", text
    ):
        largest.append([_bytes(number, unit), shape, operator])
    first_line = text.splitlines()[0]
    return Compiled(error=first_line[:300], excess=excess, largest=largest[:MOST_SHOWN])


def _bytes(number: str, unit: str) -> int:
    """Returns the bytes that a number like `1.5` with a unit like `G` stands for."""
    return int(float(number) * (1 << _UNITS[unit]))


def _folder() -> Path:
    """Returns the folder in which compilers' reports are kept."""
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_folder("jax")) / "plan"


def _key(job: PlannedJob, planned: Planned, text: str) -> str:
    """Returns a hash, in hexadecimal digits, of everything that a compiled program depends on: its
    lowered `text`, the devices and their numbers, the topology (or the platform of devices here),
    the compilers' versions and its compiler options."""
    device = planned.role.mesh.devices.flat[0]
    numbers = [device.id for device in planned.role.mesh.devices.flat]
    parts = [
        text,
        str(job.topology or device.client.platform_version),
        device.device_kind,
        str(numbers),
        "with code",  # names the form of what is kept: another text makes old reports unused
    ]
    for compiler in _COMPILERS:
        parts.append(f"{compiler} {package_version(compiler)}")
    parts.append(str(sorted(planned.program.compiler_options.items())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# ---- operations


def jaxpr_flops(
    jaxpr: Any,
    assumed_trips: Sequence[float] = (),
    of_kernels: bool = False,
    kernel_share: float = 0.5,
) -> float:
    """Returns the FLOPs of a jaxpr's matrix products, two for each multiplication, for all devices
    together. They include those that kernels declare; with `of_kernels`, they are only those of
    kernels.
    `assumed_trips`: rounds of `while` loops, whose number a jaxpr does not say, the outermost
    first; without it a loop counts as one round. `kernel_share`: the share of its declared cost
    that a kernel of attention computes. Of a condition the branch with most FLOPs counts."""
    read = {id(variable) for variable in jaxpr.outvars}
    for equation in jaxpr.eqns:
        read.update(id(variable) for variable in equation.invars)
    total = 0.0
    for equation in jaxpr.eqns:
        primitive = equation.primitive.name
        if primitive == "dot_general":
            if not of_kernels:
                total += _product_flops(equation)
            continue
        if primitive == "ragged_dot_general":
            # On TPUs XLA computes it by a kernel, about which it says no more than about ours.
            total += _product_flops(equation)
            continue
        if primitive == "pallas_call":
            if not any(id(variable) in read for variable in equation.outvars):
                continue  # dead code that JAX does not remove, but compilers do
            declared = equation.params["cost_estimate"].flops
            if equation.params["name"] in _KERNELS_OF_ATTENTION:
                # Declared is the cost of all blocks of keys, of which the kernel reads a share.
                declared *= kernel_share
            total += declared
            continue
        times = 1.0
        trips = assumed_trips
        if primitive == "scan":
            times = float(equation.params["length"])
        elif primitive == "while" and assumed_trips:
            times = assumed_trips[0]
            trips = assumed_trips[1:]
        elif primitive == "shard_map":  # its body computes the part of one device
            mesh = equation.params["mesh"].shape
            times = float(math.prod(mesh[axis] for axis in equation.params["newly_manual_axes"]))
        inside = []
        for inner in inner_jaxprs(equation.params):
            inside.append(jaxpr_flops(inner, trips, of_kernels, kernel_share))
        if primitive == "cond":  # only one of its branches runs
            total += times * max(inside, default=0.0)
        else:
            total += times * sum(inside)
    return total


def _product_flops(equation: Any) -> float:
    """Returns the FLOPs of an equation `dot_general`: two for each element of the result and each
    index of the contracted dimensions of the left operand. Of a `ragged_dot_general`, products of
    rows with the matrices of their groups, those in which each row is in one group."""
    result = equation.outvars[0].aval.shape
    shape = equation.invars[0].aval.shape
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
    else:
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        if set(numbers.lhs_ragged_dimensions) <= set(contracted):
            # A matrix for each group, of the rows of this group alone.
            result = result[1:]
    return 2.0 * math.prod(result) * math.prod(shape[dim] for dim in contracted)


def inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    """Returns the jaxprs among an equation's parameters, such as the body of a loop or the branches
    of a condition, in the order of the parameters; for a closed jaxpr the one inside. Looks into
    lists and tuples, but not into the jaxprs that it returns."""
    jaxprs = []
    for value in params.values():
        candidates = value if isinstance(value, tuple | list) else (value,)
        for candidate in candidates:
            if hasattr(candidate, "eqns"):
                jaxprs.append(candidate)
            elif hasattr(candidate, "jaxpr") and hasattr(candidate.jaxpr, "eqns"):
                jaxprs.append(candidate.jaxpr)
    return jaxprs
