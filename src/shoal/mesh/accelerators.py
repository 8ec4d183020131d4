"""What the makers say of accelerators: operations a second by type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_PEAKS: tuple[tuple[str, Mapping[str, float]], ...] = (
    (r"TPU v4", {"bfloat16": 275e12}),
    (r"TPU (v5 lite|v5e)", {"bfloat16": 197e12}),
    (r"TPU (v5|v5p)", {"bfloat16": 459e12}),
    (r"TPU (v6 lite|v6e)", {"bfloat16": 918e12}),
    (r"NVIDIA A100\b.*", {"bfloat16": 312e12, "float32": 19.5e12}),
    (r"NVIDIA H100 PCIe", {"bfloat16": 756e12, "float32": 51e12}),
    (r"NVIDIA H[12]00 NVL", {"bfloat16": 835e12, "float32": 60e12}),
    (r"NVIDIA H[12]00\b.*", {"bfloat16": 989e12, "float32": 67e12}),
    (r"NVIDIA B200\b.*", {"bfloat16": 2250e12, "float32": 75e12}),
    (r"NVIDIA L4", {"bfloat16": 121e12, "float32": 30.3e12}),
)
"""Device kind -> operations a second, as the makers state them for dense products; float32 without TensorFloat-32,
which JAX does not use here. TPUs have no stated rate for float32."""


def peak_flops(device_kind: str, dtype: Any) -> float | None:
    """Floating point operations a second of one device in products of this type; None if it is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    989000000000000.0
    """
    if "MIG" in device_kind:  # a slice of a device: its share of the peak is not in the name
        return None
    name = np.dtype(dtype).name
    return next((rates.get(name) for kind, rates in _PEAKS if re.fullmatch(kind, device_kind)), None)
