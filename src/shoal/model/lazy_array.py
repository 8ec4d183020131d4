"""Arrays outside of any device that are read when they are used: whole, or a part at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


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
