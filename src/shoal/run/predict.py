"""What a job would need with other values of its keys: described again, with the costs of its programs scaled from
those that were compiled. An estimate; a plan of the other job is the proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.schema import Config
from shoal.mesh.layout import AXES
from shoal.model.architecture import Architecture
from shoal.run.figures import Figures
from shoal.run.loading import planned_architecture
from shoal.run.size import activation_bytes, input_bytes
from shoal.sampler.programs import CHUNK

LATENCY = 1e-5
"""Seconds that a small collective takes whatever its size, of a GPU's NVLink or a TPU's links, roughly."""

NOTHING: Mapping[str, Any] = {
    "extra_bytes": 0, "error": "", "flops": 0.0, "floor_seconds": 0.0, "weights_seconds": 0.0, "compute_seconds": 0.0,
    "transfer_seconds": 0.0, "collectives": [], "largest": [], "sources": {}, "memory": {}}
"""A program of which nothing is known."""

UPDATE_WORK = {"none": 0.75, "dots": 0.75, "attention": 0.93, "full": 1.0}
"""Work of an update by model.remat, as a share of recomputing everything."""

_SUMS = ("all-reduce", "reduce-scatter")
_ROLES = {"prefill": "sampler", "join": "sampler", "decode": "sampler", "reference": "reference",
          "teacher": "reference"}


def predict(now: Figures, config: Config, job: Mapping[str, Any]) -> Figures:
    """The figures of a changed job, from those of the job as it is."""
    if not now.programs:
        return Figures(config, job, {})
    a = planned_architecture(config.model)
    before, after = _Sizes(now.config, now.job, a), _Sizes(config, job, a)
    return Figures(config, job, {name: _scaled(name, now.programs.get(name, NOTHING), before, after)
                                 for name in job["programs"]})


@dataclass(frozen=True)
class _Sizes:
    """What the costs of a job's programs go by."""

    config: Config
    job: Mapping[str, Any]
    architecture: Architecture

    def axis(self, role: str, name: str) -> int:
        return self.job["roles"][role]["mesh"].get(name, 1)

    def row_tokens(self, role: str) -> float:
        """Tokens of a micro-batch on a device whose rows are not split further."""
        return self.job["shape"]["tokens"] / (self.axis(role, "data") * self.axis(role, "fsdp"))

    @property
    def replica_slots(self) -> float:
        """Completions that a replica of the sampler draws at once."""
        return self.job["slots"] / self.axis("sampler", "data")

    def work(self, program: str) -> float:
        """What the computation of one call goes by."""
        role = _ROLES.get(program, "trainer")
        devices = len(self.job["roles"][role]["devices"])
        if program in ("prefill", "join"):
            return 1 / (devices * self.job["programs"][program]["runs"])
        if program == "decode":
            return self.job["slots"] / devices
        if program == "apply":
            return sum(self.job["held"]["trainer"]["always"].values())
        return 1.0 if program == "publish" else self.row_tokens(role) / self.axis(role, "tensor")

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept for the backward pass, besides each layer's input."""
        model = self.job["model"]
        remat = "dots" if model["remat"] == "none" else model["remat"]
        return activation_bytes(self.architecture, self.work("accumulate"), model["dtype"], remat)

    @property
    def itemsize(self) -> int:
        return 4 if self.job["model"]["dtype"] == "float32" else 2


def kept_bytes(job: Mapping[str, Any], a: Architecture) -> int:
    """What an update keeps for its backward pass, where nothing was compiled: each layer's input, and its products."""
    dtype = job["model"]["dtype"]
    sizes = _Sizes(Config(), job, a)
    layer = activation_bytes(a, sizes.work("accumulate"), dtype) // a.num_layers
    return input_bytes(a, sizes.row_tokens("trainer"), dtype) + (sizes.kept_bytes or layer)


def _scaled(name: str, one: Mapping[str, Any], before: _Sizes, after: _Sizes) -> dict[str, Any]:
    """The costs of a program after a change. Temporaries and computation go by what a device computes; in decoding the
    weights are read at every token besides."""
    work = after.work(name) / before.work(name) if name in before.job["programs"] else 1.0
    extra, read = one["extra_bytes"] * work, one["weights_seconds"]  # of the floor and of what it computes
    weights = read * before.axis("sampler", "tensor") / after.axis("sampler", "tensor")
    compute, floor = (weights + max(0.0, one[kind] - read) * work for kind in ("compute_seconds", "floor_seconds"))
    if name == "accumulate":
        # What `tensor` does not split, as a layer's input, is most of it.
        inputs = after.row_tokens("trainer") / before.row_tokens("trainer")
        extra = max(0.0, one["extra_bytes"] - before.kept_bytes) * inputs + after.kept_bytes
        if before.job["model"]["remat"] != after.job["model"]["remat"]:
            compute *= UPDATE_WORK[after.job["model"]["remat"]] / UPDATE_WORK[before.job["model"]["remat"]]
    rows = [_moved(name, row, before, after) for row in one["collectives"]]
    rows += [_opened(name, axis, before, after) for axis in AXES if _opens(name, axis, before, after)]
    return {**one, "error": "", "extra_bytes": round(extra), "compute_seconds": compute, "floor_seconds": floor,
            "weights_seconds": weights,
            "flops": one["flops"] * work, "collectives": rows, "transfer_seconds": sum(row["seconds"] for row in rows)}


def _share(size: float) -> float:
    """Of an array that `size` devices hold in parts, what each receives to have it whole."""
    return (size - 1) / size


def _moved(name: str, row: Mapping[str, Any], before: _Sizes, after: _Sizes) -> dict[str, Any]:
    """A collective after a change: of weights and gradients it goes by their parts, of activations by tokens."""
    role, axes = _ROLES.get(name, "trainer"), [axis for axis in row["axis"].split("+") if axis in AXES]
    if not axes or name == "publish":
        return dict(row)
    sizes = [1.0, 1.0]
    for number, one in enumerate((before, after)):
        for axis in axes:
            sizes[number] *= one.axis(role, axis)
    scale = _share(sizes[1]) / _share(sizes[0]) if sizes[0] > 1 else 1.0
    if axes == ["tensor"]:
        scale *= after.replica_slots / before.replica_slots if role == "sampler" else \
            after.row_tokens(role) / before.row_tokens(role)
    elif role != "sampler":
        scale *= before.axis(role, "tensor") / after.axis(role, "tensor")
        if name == "accumulate" and row["kind"] in _SUMS:
            kinds = {"float32": 4, "bfloat16": 2}
            scale *= kinds[after.config.optimizer.reduce_dtype] / kinds[before.config.optimizer.reduce_dtype]
    rates = [min((one.job["roles"][role]["links"].get(axis, 0.0) for axis in axes), default=0.0)
             for one in (before, after)]
    faster = rates[0] / rates[1] if all(rates) else 1.0
    return {**row, "bytes": row["bytes"] * scale, "seconds": row["seconds"] * scale * faster}


def _opens(name: str, axis: str, before: _Sizes, after: _Sizes) -> bool:
    role = _ROLES.get(name, "trainer")
    return name not in ("publish", "apply") and before.axis(role, axis) == 1 and after.axis(role, axis) > 1 and (
        role != "sampler" or axis == "tensor")


def _opened(name: str, axis: str, before: _Sizes, after: _Sizes) -> dict[str, Any]:
    """The collectives of an axis that had one device before, by what the model's sharding makes necessary."""
    role, a = _ROLES.get(name, "trainer"), after.architecture
    count, link = after.axis(role, axis), after.job["roles"][role]["links"].get(axis) or float("inf")
    parameters, tensor = after.job["model"]["parameters"], after.axis(role, "tensor")
    is_update = name == "accumulate"
    if axis == "tensor":  # two sums of activations a layer: forward, computed again, backward
        tokens = after.replica_slots * CHUNK if name == "decode" else after.row_tokens(role)
        passes = 2 * a.num_layers * ((3 if after.job["model"]["remat"] == "full" else 2) if is_update else 1)
        size, factor, times = tokens * a.hidden_size * after.itemsize * passes, 2.0, passes
        times *= CHUNK if name == "decode" else 1
    elif axis == "fsdp":  # weights gathered, forward and backward, gradients summed
        size = parameters / tensor * (after.itemsize * (2 if is_update else 1) + 4 * is_update)
        factor, times = 1.0, 3 * a.num_layers
    else:  # gradients summed by all that hold the same part
        size, factor, times = 4 * is_update * parameters / tensor / after.axis(role, "fsdp"), 2.0, 3 * a.num_layers
    seconds = factor * size * _share(count) / link + LATENCY * times * bool(size)
    return {"kind": "all-reduce" if factor == 2 else "all-gather", "axis": axis, "source": "", "times": times,
            "bytes": size, "seconds": seconds}
