"""Safetensors files: read by the library, slice by slice, and written tensor by tensor.

Writing is done here because the library takes all tensors of a file at once, which would need a second copy of a small
model in memory, and 4 GB of a large one. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from shoal.types import ShoalError

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, of which slices can be read."""

    file: Path
    name: str
    dtype: str  # by the format's names, as in DTYPES
    shape: tuple[int, ...]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor, copied from the file."""
        # Opened for each read: the library maps the file, and pages that were read stay in memory while it is open.
        with safe_open(self.file, "np") as opened:
            return opened.get_slice(self.name)[index]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. ShoalError if the file is truncated or is something else."""
    try:
        with safe_open(file, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: StoredTensor(file, name, one.get_dtype(), tuple(one.get_shape()))
                    for name, one in slices.items()}
    except SafetensorError as error:
        text = str(error)
        if "not fully covered" in text or "invalid header length" in text:
            raise ShoalError(f"{file} is cut short ({file.stat().st_size} bytes). Download it again.") from error
        if "header too" in text:
            raise ShoalError(f"{file} is not a safetensors file ({file.stat().st_size} bytes). Download it again."
                             ) from error
        raise ShoalError(f"{file} has a damaged header ({text}). Download it again.") from error


class Writable(Protocol):
    """A tensor to be written."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def fetch(self, dtype: np.dtype) -> np.ndarray:
        """Its values, C-contiguous."""
        ...


def write_file(file: Path, tensors: Sequence[Writable], dtype: np.dtype) -> None:
    """Writes a file; each tensor is fetched when it is written."""
    kind = next(kind for kind, value in DTYPES.items() if value == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + dtype.itemsize * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            stream.write(tensor.fetch(dtype).view(np.uint8).data)
