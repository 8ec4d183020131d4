"""Tensors in safetensors files: reads them by rows, and writes them. Also arrays outside of any
device that are read when they are used, whole or in parts."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from shoal.files import sample_bytes
from shoal.records import ShoalError


@dataclass(frozen=True)
class LazyArray:
    """An array whose values are read again each time that they are used. `read(index)` returns the
    values of a part; `index` has a slice with numbers as bounds for each axis. The array is written
    in parts along `axes`; (): as a whole."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[tuple[slice, ...]], np.ndarray]
    axes: tuple[int, ...] = ()
    one_by_one: int | None = None
    """If set: on disk, a large array has separate pieces for each index of this axis."""

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
        whole = tuple(slice(0, size) for size in self.shape)
        return np.asarray(self.read(whole), dtype)


def grid(shape: Sequence[int], steps: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yields the parts into which an array of this shape is cut by `steps`, one step for each axis:
    each part as an index. The last axis changes fastest, like in memory. Parts at the end may be
    smaller; an axis of size 0 gives no parts.

    >>> list(grid((2, 3), (2, 2)))
    [(slice(0, 2, None), slice(0, 2, None)), (slice(0, 2, None), slice(2, 3, None))]
    """
    cuts_by_axis = []
    for size, step in zip(shape, steps, strict=True):
        starts = range(0, size, step)
        cuts_by_axis.append([slice(start, min(start + step, size)) for start in starts])
    return itertools.product(*cuts_by_axis)


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
"""Types by their names in the files that are written here for samplers: `DTYPES` and the 8-bit
ones."""


NAMED_DTYPES: Mapping[str, np.dtype] = {
    **OWN_DTYPES,
    "F64": np.dtype(np.float64),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Types that tensors are copied in from file to file."""


ALIGNMENT = 64
"""Bytes to which the first tensor in a written file is aligned: JAX on CPU uses mapped memory with
this alignment as it is."""


WRITERS = 4
"""Threads that write a file: filling new pages costs six times a copy, also in memory."""
PART_BYTES = 2**25
"""Bytes that one of these threads writes at a time."""


SAMPLERS = 16
"""Threads that read samples of tensors."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, whose rows can be read separately."""

    file: Path
    name: str
    dtype: str  # the format's name of the type, as in NAMED_DTYPES
    shape: tuple[int, ...]
    offset: int  # byte in the file at which the tensor begins

    def read(self, start: int, values: np.ndarray) -> None:
        """Fills `values`, an array of consecutive rows, with the tensor's rows from row `start` on,
        as many as the array has. The array must be contiguous and of the tensor's type. ShoalError,
        which names the byte, if the file ends early or cannot be read."""
        if not len(values):  # the run of a device that comes after the last row
            return
        position = self.offset + start * values[0].nbytes
        end = position + values.nbytes
        left = values.reshape(-1).view(np.uint8).data
        try:
            with open(self.file, "rb", buffering=0) as stream:
                stream.seek(position)
                while left:
                    count = stream.readinto(left)  # it may read less than asked
                    # The size was checked when the header was read, but a copy may still run, or a
                    # network disk lose a part.
                    if not count:
                        raise ShoalError(
                            f"{self.file} ends at byte {position}, within the tensor {self.name}: "
                            f"bytes up to {end} were expected. Download it again."
                        )
                    position += count
                    left = left[count:]
        except OSError as error:
            raise ShoalError(
                f"{self.file} cannot be read at byte {position}, in the tensor {self.name} "
                f"({error.strerror}): check the disk, then repeat the command."
            ) from error

    @property
    def by_columns(self) -> StoredTensor | None:
        """The matrix with rows and columns exchanged, if its file has one column after the other;
        None if it has one row after the other."""
        return None

    def part(self, number: int, shape: tuple[int, ...]) -> StoredTensor:
        """Returns part `number` of a tensor that consists of parts of this shape, one after the
        other."""
        size = NAMED_DTYPES[self.dtype].itemsize * math.prod(shape)
        return replace(self, shape=shape, offset=self.offset + number * size)

    def sample(self) -> bytes:
        """Returns the tensor's type and shape, and bytes from all over the tensor: enough to tell
        it from another model's. OSError if the file cannot be read."""
        size = NAMED_DTYPES[self.dtype].itemsize * math.prod(self.shape)
        return f"{self.dtype} {self.shape} ".encode() + sample_bytes(self.file, self.offset, size)


@dataclass(frozen=True)
class BlockScaledTensor(StoredTensor):
    """A matrix of 8-bit floats with a scale for each block of the matrix. It is read as float32:
    values times scales."""

    scales: StoredTensor
    block: tuple[int, int]  # rows and columns; the last ones may be smaller

    def read(self, start: int, values: np.ndarray) -> None:
        """Fills `values`, float32[rows, columns], with the rows from row `start` on: stored values
        times the scales of their blocks."""
        block_rows, block_columns = self.block
        num_rows = len(values)
        stored = np.empty(values.shape, OWN_DTYPES["F8_E4M3"])
        super().read(start, stored)
        first_block = start // block_rows
        last_block = -(-(start + num_rows) // block_rows)  # one past the last block
        scales_shape = (last_block - first_block, self.scales.shape[1])
        scales = np.empty(scales_shape, DTYPES[self.scales.dtype])
        self.scales.read(first_block, scales)
        # scales [row blocks, column blocks] -> by_row [rows, column blocks], only the rows that are
        # read -> by_element [rows, columns]
        by_row = scales.astype(np.float32).repeat(block_rows, 0)
        by_row = by_row[start - first_block * block_rows :][:num_rows]
        by_element = by_row.repeat(block_columns, 1)[:, : self.shape[1]]
        np.multiply(stored.astype(np.float32), by_element, out=values)

    def sample(self) -> bytes:
        stored = StoredTensor(self.file, self.name, "F8_E4M3", self.shape, self.offset)
        return stored.sample() + self.scales.sample()


def with_scales(
    stored: Mapping[str, StoredTensor], block: tuple[int, int]
) -> dict[str, StoredTensor]:
    """Returns the tensors by name, each 8-bit matrix NAME that has scales NAME_scale_inv as a
    `BlockScaledTensor`, and without these scales. `block` is (rows, columns) of a block with one
    scale. If scales have another shape or type, they and their matrix stay as they are."""
    scaled = dict(stored)
    for name, tensor in stored.items():
        scales = stored.get(f"{name}_scale_inv")
        if scales is None or tensor.dtype != "F8_E4M3" or scales.dtype not in DTYPES:
            continue
        # blocks along rows and columns, rounded up; not strict, because the tensor need not be a
        # matrix
        num_blocks = tuple(
            -(-size // part) for size, part in zip(tensor.shape, block, strict=False)
        )
        if scales.shape != num_blocks:
            continue
        scaled[name] = BlockScaledTensor(
            file=tensor.file,
            name=name,
            dtype="F32",
            shape=tensor.shape,
            offset=tensor.offset,
            scales=scales,
            block=block,
        )
        del scaled[scales.name]
    return scaled


@dataclass(frozen=True)
class StoredParameter:
    """A parameter in files: one tensor, or one for each index of its first dimensions, for example
    for each layer."""

    tensors: Sequence[StoredTensor]  # in the order of `ParamSpec.names_by_index`
    index_shape: tuple[int, ...] = ()  # sizes of the dimensions that number the tensors

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape in the order of files: `index_shape`, then a tensor's shape."""
        return self.index_shape + self.tensors[0].shape

    @property
    def dtype(self) -> np.dtype:
        """The type of the tensors; float32 if they have different types."""
        types = {DTYPES[tensor.dtype] for tensor in self.tensors}
        if len(types) > 1:
            return np.dtype(np.float32)  # float32 holds the values of each of them
        return types.pop()

    @property
    def by_columns(self) -> StoredParameter | None:
        """The parameter with the last two dimensions exchanged, if the files have one column of
        each tensor after the other; None if they have one row after the other."""
        exchanged = []
        for tensor in self.tensors:
            columns = tensor.by_columns
            if columns is None:
                return None
            exchanged.append(columns)
        return StoredParameter(exchanged, self.index_shape)

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Returns some rows of some tensors, in a new array of `dtype` with its dimensions in the
        order of `shape`. `index` has a slice for each dimension of `index_shape`, and one for the
        rows, each with its bounds as numbers; all columns are read."""
        which_tensors = tuple(index[:-1])
        rows = index[-1]
        # the places in `tensors` of those that are read, in an array like `index_shape`
        # (one number without dimensions, if the parameter is a single tensor)
        places = np.arange(len(self.tensors)).reshape(self.index_shape)[which_tensors]
        shape = list(places.shape)
        shape.append(rows.stop - rows.start)
        shape.extend(self.tensors[0].shape[1:])
        values = np.empty(shape, self.dtype)
        for position in np.ndindex(places.shape):
            tensor = self.tensors[int(places[position])]
            tensor_values = values[position]
            stored_dtype = DTYPES[tensor.dtype]
            if stored_dtype == values.dtype:
                tensor.read(rows.start, tensor_values)
                continue
            stored = np.empty(tensor_values.shape, stored_dtype)
            tensor.read(rows.start, stored)
            tensor_values[...] = stored
        return values


def digests(stored: Mapping[str, StoredParameter]) -> dict[str, str]:
    """Returns parameter name -> digest of its tensors' types and shapes, and of bytes from all over
    their values (`StoredTensor.sample`), which is much faster than reading all. ShoalError if a
    file cannot be read."""

    def digest(parameter: StoredParameter) -> str:
        """Returns the digest of one parameter."""
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
    """Returns the tensors of a safetensors file by name, without reading their values. ShoalError
    if the file is cut short, or is no safetensors file; OSError if there is no such file."""
    if file.exists() and not file.is_file():  # opening a pipe would wait for its writer for ever
        raise ShoalError(
            f"{file} is not a file but a pipe, a device or a folder. Put the weights there as a "
            "file."
        )
    try:
        # opened only for the checks that the library makes
        with safe_open(file, "np"):
            pass
    except SafetensorError as error:
        raise ShoalError(
            f"{file} is not a complete safetensors file: {file.stat().st_size:,} bytes, cut short "
            "or damaged. Download it again."
        ) from error
    # the length of the header (8 bytes), the header as JSON, the values of all tensors
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    data_offset = 8 + size
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        offset = data_offset + entry["data_offsets"][0]
        tensors[name] = StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), offset)
    return tensors


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written. `runs(dtype)` yields its rows in that type, in runs: (number of the
    first row, values of one or more rows). All runs have rows of one length, which need not be
    those of `shape`: [2, 3, 4] may be written as 6 rows of 4."""

    name: str
    shape: tuple[int, ...]
    runs: Callable[[np.dtype], Iterator[tuple[int, np.ndarray]]]
    dtype: np.dtype | None = None  # None: the type of the file


def write_file(file: Path, tensors: Sequence[OutputTensor], dtype: np.dtype) -> None:
    """Writes tensors to a safetensors file, in their order; an existing file is overwritten. The
    values of each run of rows are asked for only when they are written, and several threads write
    them. OSError if the file cannot be written; a part of it may then stay. `dtype` is for tensors
    without a type of their own; all types are among NAMED_DTYPES."""
    dtype_names = {value: name for name, value in NAMED_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts = []
    end = 0
    for tensor in tensors:
        tensor_dtype = tensor.dtype or dtype
        starts.append(end)
        end += tensor_dtype.itemsize * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": dtype_names[tensor_dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[-1], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # 8: the bytes of the header's length
    data_offset = 8 + len(text)
    with open(file, "wb") as stream, ThreadPoolExecutor(WRITERS) as pool:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.flush()
        for tensor, start in zip(tensors, starts, strict=True):
            tensor_dtype = tensor.dtype or dtype
            for row, values in tensor.runs(tensor_dtype):
                values = np.ascontiguousarray(values, tensor_dtype)
                data = values.reshape(-1).view(np.uint8).data
                position = data_offset + start + row * values[0].nbytes
                write = partial(_write_part, stream.fileno(), position, data)
                # list() waits for all parts, and raises the error of any.
                list(pool.map(write, range(0, len(data), PART_BYTES)))


def _write_part(descriptor: int, position: int, data: memoryview, first: int) -> None:
    """Writes a part of `data`, at most PART_BYTES from byte `first` on. `position`: the byte of the
    file at which `data` begins."""
    left = data[first : first + PART_BYTES]
    position += first
    while left:
        count = os.pwrite(descriptor, left, position)  # it may write less than asked
        left = left[count:]
        position += count
