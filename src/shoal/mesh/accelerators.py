"""Makers' data about accelerators: memory, bandwidths, operations a second, links.

    ACCELERATORS["v5p"].hbm_bytes    memory that one device offers a program
    peak_flops("TPU v5p", "bfloat16")

A device is what JAX shows as one: a chip; for TPU7x half a chip.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.records import ShoalError

GPU_SHARE = 0.92
"""The share of a GPU's memory that a run takes; JAX by itself takes 0.75. The rest is for CUDA,
NCCL and cuBLAS."""


@dataclass(frozen=True)
class Accelerator:
    """The data of one kind of device; bandwidths are in bytes a second.

    TPU: `link` is one direction of one link of the torus, `dcn` a device's part of its host's
    network. GPU: `link` is one direction of all links of a device to the other devices of its
    machine together, `dcn` that to other machines.
    """

    kind: str  # a pattern of JAX's device_kind
    peaks: Mapping[str, float]  # operations a second by type, dense
    hbm_bytes: int = 0
    hbm: float = 0.0
    link: float = 0.0
    dcn: float = 0.0
    clock: float = 0.0  # cycles a second of the compiler's estimates
    torus: int = 0  # dimensions of a TPU's torus; 0: a GPU
    cores: int = 1  # of a chip, as counted in the maker's names of slices
    devices: int = 1  # that JAX shows for one chip
    largest: int = 0  # most chips of a slice
    target: Mapping[str, Any] | None = None  # for a GPU: what XLA's compiler has to know about it
    # Share of the peak that attention's kernels are assumed to reach. GPU: FlashAttention-2's, of
    # an A100 0.6 (arXiv 2307.08691), of an H100 0.35 (2407.08608); Shoal's own were measured on no
    # device. TPU: instructions that Mosaic schedules, of which there is one a cycle, for rows of
    # whole groups (docs/LOG.md).
    kernels: float = 0.5
    # seconds between two operations' launches by a GPU's host, which works ahead; assumed
    launch: float = 3e-6

    @property
    def is_tpu(self) -> bool:
        return self.torus > 0

    @property
    def usable_bytes(self) -> int:
        """The bytes of a device's memory that a program may take."""
        return self.hbm_bytes if self.is_tpu else int(GPU_SHARE * self.hbm_bytes)


_GIB = 1 << 30


def _rates(half: float, whole: float) -> Mapping[str, float]:
    """Returns the peaks of an NVIDIA GPU, whose tensor cores multiply both types of 16 bits equally
    fast. `half`: operations a second for bfloat16 and float16; `whole`: for float32."""
    return {"bfloat16": half, "float16": half, "float32": whole}


_A100 = _rates(312e12, 19.5e12)
_AMPERE = {
    "core_count": 108,
    "clock_rate_ghz": 1.41,
    "l2_cache_size": 40 << 20,
    "capability": 8,
    "shared_memory_per_core": 164 << 10,
}
_HOPPER = {
    "core_count": 132,
    "clock_rate_ghz": 1.98,
    "l2_cache_size": 50 << 20,
    "capability": 9,
    "shared_memory_per_core": 228 << 10,
}

ACCELERATORS: Mapping[str, Accelerator] = {
    # https://cloud.google.com/tpu/docs: the page of each version. Memory is what the compiler
    # grants a program of the chip's 32, 16, 95, 32 and 2 x 96 GiB. Clocks follow from the peak:
    # cores x matrix units x their multipliers x 2. The values without a name are the fields in
    # their order, from `kind` to `largest`; for a GPU from `kind` to `dcn`.
    "v4": Accelerator(
        "TPU v4",
        {"bfloat16": 275e12},
        int(30.75 * _GIB),
        1.228e12,
        50e9,
        6.25e9,
        1.05e9,
        3,
        2,
        1,
        2048,
        kernels=0.52,
    ),
    "v5e": Accelerator(
        "TPU (v5 lite|v5e)",
        {"bfloat16": 197e12},
        int(15.75 * _GIB),
        0.819e12,
        50e9,
        3.125e9,
        1.5e9,
        2,
        1,
        1,
        256,
        kernels=0.71,
    ),
    "v5p": Accelerator(
        "TPU (v5|v5p)",
        {"bfloat16": 459e12},
        int(95.74 * _GIB),
        2.765e12,
        100e9,
        6.25e9,
        1.75e9,
        3,
        2,
        1,
        8960,
        kernels=0.75,
    ),
    "v6e": Accelerator(
        "TPU (v6 lite|v6e)",
        {"bfloat16": 918e12},
        int(31.25 * _GIB),
        1.638e12,
        100e9,
        12.5e9,
        1.75e9,
        2,
        1,
        1,
        256,
        kernels=0.28,
    ),
    "tpu7x": Accelerator(
        "TPU ?7x?",
        {"bfloat16": 1153.5e12},
        int(94.75 * _GIB),
        3.69e12,
        100e9,
        6.25e9,
        2.2e9,
        3,
        2,
        2,
        9216,
    ),
    # NVIDIA's data sheets; float32 without TensorFloat-32, which JAX does not use here.
    "l4": Accelerator(
        "NVIDIA L4",
        _rates(121e12, 30.3e12),
        int(22.5 * _GIB),
        0.3e12,
        32e9,
        12.5e9,
        target=_AMPERE
        | {
            "core_count": 58,
            "clock_rate_ghz": 2.04,
            "l2_cache_size": 48 << 20,
            "shared_memory_per_core": 100 << 10,
        },
        kernels=0.6,
    ),
    "a100-40gb": Accelerator(
        r"NVIDIA A100\b.*\b40GB.*",
        _A100,
        40 * _GIB,
        1.555e12,
        300e9,
        25e9,
        target=_AMPERE,
        kernels=0.6,
    ),
    "a100": Accelerator(
        r"NVIDIA A100\b.*", _A100, 80 * _GIB, 2.039e12, 300e9, 25e9, target=_AMPERE, kernels=0.6
    ),
    "h100": Accelerator(
        r"NVIDIA H100\b.*",
        _rates(989e12, 67e12),
        80 * _GIB,
        3.35e12,
        450e9,
        50e9,
        target=_HOPPER,
        kernels=0.35,
    ),
    "h200": Accelerator(
        r"NVIDIA H200\b.*",
        _rates(989e12, 67e12),
        141 * 10**9,
        4.8e12,
        450e9,
        50e9,
        target=_HOPPER,
        kernels=0.35,
    ),
    "b200": Accelerator(
        r"NVIDIA B200\b.*",
        _rates(2250e12, 75e12),
        180 * 10**9,
        7.7e12,
        900e9,
        50e9,
        target={
            "core_count": 148,
            "clock_rate_ghz": 1.965,
            "l2_cache_size": 126 << 20,
            "capability": 10,
            "shared_memory_per_core": 228 << 10,
        },
        kernels=0.35,
    ),
}
"""Name in `topology=` -> the device."""

_OTHERS: Mapping[str, Mapping[str, float]] = {
    r"NVIDIA H100 PCIe": _rates(756e12, 51e12),
    r"NVIDIA H[12]00 NVL": _rates(835e12, 60e12),
}
"""Device kinds -> their peaks, which replace those of the matching entry of ACCELERATORS."""


def accelerator_of(device_kind: str) -> Accelerator | None:
    """Returns the accelerator with JAX's name `device_kind`; None if it is not known, like any CPU,
    or is a MIG slice of a GPU. The whole name must match; the first entry of ACCELERATORS that
    matches is returned."""
    if "MIG" in device_kind:  # a slice of a device: its share is not in the name
        return None
    for accelerator in ACCELERATORS.values():
        if re.fullmatch(accelerator.kind, device_kind):
            return accelerator
    return None


MEASURED = ("hbm", "launch", "bfloat16", "float32")
"""The figures that every calibration has; one of several devices has also `link`."""


def read_calibration(file: str, device_kind: str, known: Accelerator | None) -> dict[str, Any]:
    """Reads and checks the file that `benchmarks/accelerator.py --calibration` wrote: {"device":
    JAX's device_kind, "devices": their number, "jax": its version, "figures": {name: [median,
    least, most]}}. Returns that object, with its figures as lists of floats. A figure is named
    after a field of `Accelerator` or a type of its `peaks`. `known`: the entry of `device_kind` in
    ACCELERATORS; None if it has none. ShoalError if the file was measured on another device than
    `device_kind`, or does not have this form."""
    again = f"measure again with `python benchmarks/accelerator.py --calibration {file}`"
    try:
        calibration = json.loads(Path(file).read_text())
        figures = calibration["figures"]
        measured = {}
        # Each name once. Those of MEASURED must be there: a missing one is a KeyError.
        for name in dict.fromkeys((*MEASURED, *figures)):
            measured[name] = [float(value) for value in figures[name]]
        device = str(calibration["device"])
        # Read by `plan`: an entry that is missing is an error here.
        _ = int(calibration["devices"]), calibration["jax"]
    except KeyError as error:
        raise ShoalError(f"calibration={file} has no {error.args[0]}: {again}") from error
    except (OSError, ValueError, OverflowError, RecursionError, TypeError, AttributeError) as error:
        raise ShoalError(f"calibration={file} is not a calibration ({error}): {again}") from error
    unknown = set(measured) - {*MEASURED, "link"}
    if unknown:
        raise ShoalError(
            f"calibration={file} has {', '.join(sorted(unknown))}, which no plan knows: {again}"
        )
    for name, values in measured.items():
        if len(values) != 3 or not all(0 < value < math.inf for value in values):
            raise ShoalError(f"calibration={file}: {name} is not three positive numbers: {again}")
    if not re.fullmatch(known.kind if known else re.escape(device_kind), device):
        raise ShoalError(
            f"calibration={file} was measured on {device}, and the plan is for {device_kind}: give "
            "one that was measured there, or the topology of that device"
        )
    calibration["figures"] = measured
    return calibration


def calibrated(known: Accelerator | None, calibration: Mapping[str, Any]) -> Accelerator:
    """Returns the entry `known` with the measured medians in place of the maker's data, and with
    `kernels` adapted to the measured peak; other types of `peaks` keep the maker's figures. If
    `known` is None, a new entry from the measured figures alone. `calibration`: what
    `read_calibration` returned."""
    medians = {name: values[0] for name, values in calibration["figures"].items()}
    peaks = {"bfloat16": medians.pop("bfloat16"), "float32": medians.pop("float32")}
    if known is None:
        return Accelerator(re.escape(calibration["device"]), peaks, **medians)
    # What is assumed of kernels is a share of the maker's rate, not of the measured one.
    kernels = known.kernels * known.peaks["bfloat16"] / peaks["bfloat16"]
    return replace(known, peaks={**known.peaks, **peaks}, kernels=kernels, **medians)


def peak_flops(device_kind: str, dtype: Any) -> float | None:
    """Returns the floating point operations a second of one device in products of this type
    (`dtype`: a NumPy type or its name), by the maker's data; None if the device or the type is not
    known, and for MIG slices of GPUs.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    989000000000000.0
    """
    if "MIG" in device_kind:
        return None
    dtype_name = np.dtype(dtype).name
    for kind, peaks in _OTHERS.items():
        if re.fullmatch(kind, device_kind):
            return peaks.get(dtype_name)
    accelerator = accelerator_of(device_kind)
    return accelerator.peaks.get(dtype_name) if accelerator else None
