"""The safetensors file: a length, a JSON header, then the bytes of every tensor.

Read and written here, not by the safetensors library, so that one slice of one tensor at a time is in memory, in
every type that it stores. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from shoal.types import ShoalError

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file: where its bytes lie."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def view(self) -> np.ndarray:
        """The tensor, mapped from the file; pages that are looked at are in memory as long as the view lives."""
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.offset, self.shape)


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name. ShoalError where the file is cut short or is something else."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > _MAX_HEADER_BYTES:
            raise ShoalError(f"{file} is not a safetensors file ({size} bytes). Download it again.")
        raw = stream.read(length)
    if len(raw) < length:
        raise ShoalError(f"{file} is cut short: {size} bytes, its header alone needs {8 + length}. Download it again.")
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        stored = {
            name: Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        }
        for entry in header.values():
            start, end = entry["data_offsets"]
            if entry["dtype"] in DTYPES and end - start != DTYPES[entry["dtype"]].itemsize * math.prod(entry["shape"]):
                raise ValueError("a tensor's bytes do not make up its shape")
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ShoalError(f"{file} has a damaged header. Download it again.") from error
    if size < end:
        raise ShoalError(f"{file} is cut short: {size} bytes, its header promises {end}. Download it again.")
    return stored


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
    """Writes a file, tensor by tensor; each is fetched when its turn comes (the library wants all at once)."""
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
