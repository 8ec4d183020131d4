"""Rows that are made when they are asked for, the same on every machine."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from random import Random
from typing import SupportsIndex, TypeVar, overload

from shoal.types import Example

T = TypeVar("T")

NUM_TRAIN = 1_000_000
NUM_HELD_OUT = 500  # where task.num_questions is 0
NUM_BUCKETS = 16  # problems in bucket 0 are held out
MAX_IDLE_DRAWS = 20_000  # draws without a new held-out problem after which there are taken to be no more


class MadeRows(Sequence[Example]):
    """`make(row)` for rows 0 to num_rows - 1."""

    def __init__(self, make: Callable[[int], Example], num_rows: int) -> None:
        self._make = make
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, index: SupportsIndex) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(self._num_rows))]
        row = operator.index(index)
        row += self._num_rows if row < 0 else 0
        if not 0 <= row < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        return self._make(row)


def stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def pick(rng: Random, items: Sequence[T]) -> T:
    """`Random.random` is the one method whose numbers Python promises to keep from version to version."""
    return items[int(rng.random() * len(items))]
