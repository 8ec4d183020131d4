"""Weights of 4 bits in files: mxfp4 of the OCP Microscaling Formats specification 1.0, section 5.

    in files                                     read as
    NAME_blocks  uint8[E, out, in / 32, 16]      NAME[E, in, out], bfloat16
    NAME_scales  uint8[E, out, in / 32]

A block of 32 numbers has one scale s, which stands for 2^(s - 127). A byte has two numbers of 4
bits, the first in its low bits: a sign, two bits of exponent and one of mantissa. Their products
with the scale have two significant bits, so bfloat16 and float32 hold them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from shoal.weights.tensor_files import OutputTensor, StoredTensor

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of a weight's two tensors."""
BLOCK = 32
"""Numbers with one scale."""


def _products() -> np.ndarray:
    """Returns the two numbers of each byte times each scale, uint32[256 * 256]: entry 256 s + byte
    has the first number, a bfloat16, in its lower half, where a little-endian machine has it
    first."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    numbers = np.array([*magnitudes, *(-value for value in magnitudes)], np.float32)
    byte = np.arange(256)
    pairs = np.stack([numbers[byte & 15], numbers[byte >> 4]], axis=1)
    with np.errstate(over="ignore", invalid="ignore"):  # the largest scales
        factors = np.ldexp(np.float32(1), np.arange(256) - 127)
        products = factors[:, None, None] * pairs
    return np.ascontiguousarray(products.astype(jnp.bfloat16)).view(np.uint32).reshape(-1)


_PRODUCTS = _products()


def widened(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers of blocks uint8[..., n, 16] with scales uint8[..., n], bfloat16[..., 32
    n]."""
    entries = scales[..., None].astype(np.uint16) << 8 | blocks
    numbers = _PRODUCTS[entries].view(jnp.bfloat16)  # [..., n, 32]
    return numbers.reshape(*scales.shape[:-1], -1)


@dataclass(frozen=True)
class Mxfp4Tensor(StoredTensor):
    """A weight [E, in, out] of E experts, or [in, out] of one, that is stored in 4 bits. It is read
    as bfloat16. `file` and `offset` are those of the blocks."""

    blocks: StoredTensor
    scales: StoredTensor
    # The columns that are read: each `column_step`-th of the stored ones, from `first_column` on.
    first_column: int = 0
    column_step: int = 1

    @classmethod
    def of(cls, blocks: StoredTensor, scales: StoredTensor) -> Mxfp4Tensor:
        """Returns the weight of two tensors of fitting shapes."""
        *experts, columns, num_blocks = scales.shape
        return cls(
            file=blocks.file,
            name=blocks.name.removesuffix(BLOCKS),
            dtype="BF16",
            shape=(*experts, BLOCK * num_blocks, columns),
            offset=blocks.offset,
            blocks=blocks,
            scales=scales,
        )

    def part(self, number: int, shape: tuple[int, ...]) -> Mxfp4Tensor:
        """Returns the weight [in, out] of one expert."""
        blocks = self.blocks.part(number, self.blocks.shape[1:])
        scales = self.scales.part(number, self.scales.shape[1:])
        part = Mxfp4Tensor.of(blocks, scales)
        assert part.shape == shape
        return part

    def every_second_column(self, place: int) -> Mxfp4Tensor:
        """Returns every second column of one expert's weight, from column `place` on."""
        rows, columns = self.shape
        return replace(self, shape=(rows, columns // 2), first_column=place, column_step=2)

    @property
    def by_columns(self) -> Mxfp4Columns:
        """One expert's weight as files have it, one column after the other."""
        rows, columns = self.shape
        exchanged = (columns, rows)
        return Mxfp4Columns(self.file, self.name, self.dtype, exchanged, self.offset, self)

    def read(self, start: int, values: np.ndarray) -> None:
        """Fills `values`, bfloat16[rows, out] of one expert's weight, with the rows from row
        `start` on. All bytes of the expert are read: whoever wants a part reads `by_columns`."""
        columns = self.by_columns
        whole = np.empty(columns.shape, jnp.bfloat16)  # [out, in]
        columns.read(0, whole)
        values[...] = whole[:, start : start + len(values)].T

    def holds(self, tensor: OutputTensor, dtype: np.dtype) -> bool:
        """True if a tensor [E, in, out], written as `dtype`, would have exactly these values."""
        if tensor.shape != self.shape:
            return False
        num_rows, num_columns = self.shape[1:]
        whole = np.empty((num_rows, num_columns), jnp.bfloat16)  # of the expert last read
        last_read = -1
        for first, values in tensor.runs(dtype):
            # A run has rows of one expert.
            expert, row = divmod(first, num_rows)
            if expert != last_read:
                self.part(expert, whole.shape).read(0, whole)
                last_read = expert
            expected = whole[row : row + len(values)].astype(np.float32)
            found = values.reshape(expected.shape).astype(np.float32)
            if not np.array_equal(found, expected):
                return False
        return True

    def sample(self) -> bytes:
        return (
            f"{self.first_column} {self.column_step} ".encode()
            + self.blocks.sample()
            + self.scales.sample()
        )


@dataclass(frozen=True)
class Mxfp4Columns(StoredTensor):
    """The columns of one expert's weight as rows: [out, in]."""

    weight: Mxfp4Tensor

    def read(self, start: int, values: np.ndarray) -> None:
        """Fills `values`, bfloat16[columns, in], with the weight's columns from number `start` on.
        Columns that are left out in between are read, too."""
        num_columns = len(values)
        if not num_columns:  # the run of a device that comes after the last column
            return
        weight = self.weight
        first_stored = weight.first_column + start * weight.column_step
        num_stored = 1 + (num_columns - 1) * weight.column_step
        blocks = np.empty((num_stored, *weight.blocks.shape[1:]), np.uint8)
        scales = np.empty((num_stored, *weight.scales.shape[1:]), np.uint8)
        weight.blocks.read(first_stored, blocks)
        weight.scales.read(first_stored, scales)
        step = weight.column_step
        values[...] = widened(blocks[::step], scales[::step])

    def sample(self) -> bytes:
        return self.weight.sample()


def with_widened(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors by name, each pair of NAME_blocks and NAME_scales as an `Mxfp4Tensor`
    under NAME. Pairs of other shapes or types stay as they are."""
    tensors = dict(stored)
    for name, blocks in stored.items():
        whole = name.removesuffix(BLOCKS)
        scales = stored.get(whole + SCALES)
        if whole == name or scales is None:
            continue
        fits = len(scales.shape) == 3 and blocks.shape == (*scales.shape, BLOCK // 2)
        if fits and blocks.dtype == scales.dtype == "U8":
            del tensors[name], tensors[scales.name]
            tensors[whole] = Mxfp4Tensor.of(blocks, scales)
    return tensors
