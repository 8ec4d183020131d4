"""Tensors in safetensors files, read by rows and written; arrays outside of any device that are
read when they are used, whole or a part at a time."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from shoal.files import sample_of
from shoal.records import ShoalError


@dataclass(frozen=True)
class LazyArray:
    """An array whose values are read each time that they are used. A large one is written in parts
    along `axes`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[tuple[slice, ...]], np.ndarray]
    axes: tuple[int, ...] = ()
    one_by_one: int | None = (
        None  # on disk, a large array has separate pieces for each index of this axis
    )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(tuple(slice(0, size) for size in self.shape)), dtype)


def grid(shape: Sequence[int], steps: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """The parts of an array in steps along its axes, in order."""
    ranges = [
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(shape, steps, strict=True)
    ]
    return itertools.product(*ranges)


DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}


OWN_DTYPES: Mapping[str, np.dtype] = {
    **DTYPES,
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
}
"""Those of the files that are written here for samplers, too."""


ALIGNMENT = 64
"""Of the first tensor in a file that is written, in bytes: JAX on CPU uses mapped memory aligned so
as it is."""


WRITERS, PART_BYTES = 4, 2**25
"""Threads that write, and bytes that one writes at a time: new pages cost six times a copy, also in
memory."""


SAMPLERS = 16
"""Threads that read samples of tensors."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, of which rows can be read."""

    file: Path
    name: str
    dtype: str  # by the format's names, as in DTYPES
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    def read(self, start: int, values: np.ndarray) -> None:
        """Fills `values` with rows from `start` on. ShoalError with the byte where the file cannot
        be read further."""
        if not len(values):  # the run of a device that comes after the last row
            return
        position = self.offset + start * values[0].nbytes
        end, left = position + values.nbytes, values.reshape(-1).view(np.uint8).data
        try:
            with open(self.file, "rb", buffering=0) as stream:
                stream.seek(position)
                while left:
                    count = stream.readinto(left)
                    # checked at the start, but a copy may still run, or a network disk lose a part
                    if not count:
                        raise ShoalError(
                            f"{self.file} ends at byte {position}, within the tensor {self.name}: "
                            f"bytes up to {end} were expected. Download it again."
                        )
                    position, left = position + count, left[count:]
        except OSError as error:
            raise ShoalError(
                f"{self.file} cannot be read at byte {position}, in the tensor {self.name} "
                f"({error.strerror}): check the disk, then repeat the command."
            ) from error

    def sample(self) -> bytes:
        """Type, shape and bytes from all over the tensor: those of another model differ."""
        size = OWN_DTYPES[self.dtype].itemsize * math.prod(self.shape)
        return f"{self.dtype} {self.shape} ".encode() + sample_of(self.file, self.offset, size)


@dataclass(frozen=True)
class BlockScaledTensor(StoredTensor):
    """A matrix of 8-bit floats with a scale for each block of it, read as their products in
    float32."""

    scales: StoredTensor
    block: tuple[int, int]  # rows and columns; the last ones may be smaller

    def read(self, start: int, values: np.ndarray) -> None:
        stored, (rows, columns) = np.empty(values.shape, OWN_DTYPES["F8_E4M3"]), self.block
        super().read(start, stored)
        first, last = start // rows, -(-(start + len(values)) // rows)
        scales = np.empty((last - first, self.scales.shape[1]), DTYPES[self.scales.dtype])
        self.scales.read(first, scales)
        scales = scales.astype(np.float32).repeat(rows, 0)[start - first * rows :][: len(values)]
        np.multiply(
            stored.astype(np.float32), scales.repeat(columns, 1)[:, : self.shape[1]], out=values
        )

    def sample(self) -> bytes:
        stored = StoredTensor(self.file, self.name, "F8_E4M3", self.shape, self.offset)
        return stored.sample() + self.scales.sample()


def with_scales(
    stored: Mapping[str, StoredTensor], block: tuple[int, int]
) -> dict[str, StoredTensor]:
    """The tensors of a file in which `NAME_scale_inv` holds the factors of the blocks of NAME."""
    found = dict(stored)
    for name, tensor in stored.items():
        scales = stored.get(f"{name}_scale_inv")
        if (
            scales
            and tensor.dtype == "F8_E4M3"
            and scales.dtype in DTYPES
            and scales.shape
            == tuple(-(-size // part) for size, part in zip(tensor.shape, block, strict=False))
        ):
            found[name] = BlockScaledTensor(
                tensor.file, name, "F32", tensor.shape, tensor.offset, scales, block
            )
            del found[scales.name]
    return found


@dataclass(frozen=True)
class StoredParameter:
    """A parameter in the files: one tensor, or one a layer."""

    tensors: Sequence[StoredTensor]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers (1 if it has none), rows, columns (1 for a vector)."""
        rows, columns = (*self.tensors[0].shape, 1)[:2]
        return len(self.tensors), rows, columns

    @property
    def dtype(self) -> np.dtype:
        types = {DTYPES[tensor.dtype] for tensor in self.tensors}
        return (
            types.pop() if len(types) == 1 else np.dtype(np.float32)
        )  # it holds the values of all of them

    def read(self, layers: slice, rows: slice) -> np.ndarray:
        """Some rows of some layers, [layers, rows, columns]."""
        chosen, (_, _, columns) = self.tensors[layers], self.shape
        values = np.empty((len(chosen), rows.stop - rows.start, columns), self.dtype)
        for tensor, part in zip(chosen, values, strict=True):
            stored = (
                part
                if DTYPES[tensor.dtype] == part.dtype
                else np.empty(part.shape, DTYPES[tensor.dtype])
            )
            tensor.read(rows.start, stored)
            part[...] = stored
        return values


def digests(stored: Mapping[str, StoredParameter]) -> dict[str, str]:
    """A digest of each parameter's `StoredTensor.sample`s, by name. ShoalError for a file that
    cannot be read."""

    def digest(parameter: StoredParameter) -> str:
        hashed = hashlib.blake2b(digest_size=8)
        for tensor in parameter.tensors:
            try:
                hashed.update(tensor.sample())
            except OSError as error:
                raise ShoalError(
                    f"{tensor.file} cannot be read in the tensor {tensor.name} ({error.strerror}): "
                    "check the disk, then repeat the command."
                ) from error
        return hashed.hexdigest()

    with ThreadPoolExecutor(SAMPLERS) as pool:  # each piece waits for the disk or the network
        return dict(zip(stored, pool.map(digest, stored.values()), strict=True))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. ShoalError if the file is truncated or is
    something else."""
    if file.exists() and not file.is_file():  # whoever opens a pipe waits for its writer for ever
        raise ShoalError(
            f"{file} is no file but a pipe, a device or a folder. Put the weights there."
        )
    try:
        with safe_open(file, "np"):
            pass
    except SafetensorError as error:
        raise ShoalError(
            f"{file} is no whole safetensors file: it has {file.stat().st_size:,} bytes and is cut "
            "short, damaged or something else. Download it again."
        ) from error
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    return {
        name: StoredTensor(
            file, name, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written: `runs` gives its rows in a type, in runs, each with the number of its
    first row."""

    name: str
    shape: tuple[int, ...]
    runs: Callable[[np.dtype], Iterator[tuple[int, np.ndarray]]]
    dtype: np.dtype | None = None  # None: that of its file


def write_file(file: Path, tensors: Sequence[OutputTensor], dtype: np.dtype) -> None:
    """Writes a file; each run of rows is fetched when it is written, its parts by several
    threads."""
    kinds = {value: kind for kind, value in OWN_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = [], 0
    for tensor in tensors:
        own = tensor.dtype or dtype
        starts.append(end)
        end += own.itemsize * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": kinds[own],
            "shape": list(tensor.shape),
            "data_offsets": [starts[-1], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with open(file, "wb") as stream, ThreadPoolExecutor(WRITERS) as pool:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.flush()
        for tensor, start in zip(tensors, starts, strict=True):
            own = tensor.dtype or dtype
            row_bytes = own.itemsize * math.prod(tensor.shape[1:])
            for row, values in tensor.runs(own):
                data = np.ascontiguousarray(values, own).reshape(-1).view(np.uint8).data
                write = partial(
                    _write_part, stream.fileno(), 8 + len(text) + start + row * row_bytes, data
                )
                list(pool.map(write, range(0, len(data), PART_BYTES)))


def _write_part(descriptor: int, position: int, data: memoryview, first: int) -> None:
    part, position = data[first : first + PART_BYTES], position + first
    while part:
        count = os.pwrite(descriptor, part, position)
        part, position = part[count:], position + count
