"""Which pages of a pool hold the keys of which completions, where decoding reads keys by pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.model.kv_cache import NO_PAGE


class PagePool:
    """The pages of N rows of W slots: each replica has as many, for its own rows.

    `table`: int32[N, W, T], a slot's pages in the order of its keys, by their number within the
    replica, then NO_PAGE.

    What is given back is free at once, also while the device runs steps that write to it: steps run
    in the order in which they were started, each has a table of its own, and a slot reads no key
    that it has not written.
    """

    def __init__(self, rows: int, siblings: int, most: int, pages: int, replicas: int = 1) -> None:
        if pages < siblings * most:
            raise ValueError(
                f"a replica has {pages} pages, expected at least {siblings * most}: a row's "
                f"{siblings} "
                f"completions at their limit take {most} each"
            )
        self.table = np.full((rows, siblings, most), NO_PAGE, np.int32)
        self.held = np.zeros((rows, siblings), np.int32)
        self.free = [list(range(pages))[::-1] for _ in range(replicas)]

    def give(self, row: int, wanted: Sequence[int] | np.ndarray) -> bool:
        """The slots of a row have wanted[W] pages from now on; False, and nothing changes, where
        too few are free."""
        wanted, held, free = (
            np.asarray(wanted),
            self.held[row].copy(),
            self.free[self.replica_of(row)],
        )
        if (wanted - held).sum() > len(free):
            return False
        for slot in np.flatnonzero(wanted < held):
            pages = self.table[row, slot, wanted[slot] : held[slot]]
            free.extend(pages[::-1].tolist())
            pages[:] = NO_PAGE
        for slot in np.flatnonzero(wanted > held):
            self.table[row, slot, held[slot] : wanted[slot]] = [
                free.pop() for _ in range(wanted[slot] - held[slot])
            ]
        self.held[row] = wanted
        return True

    def enter(self, row: int, wanted: np.ndarray) -> np.ndarray:
        """The pages int32[W, T] of a row that enters, for which there must be enough."""
        if not self.give(row, wanted):
            raise RuntimeError(
                f"row {row} was entered without the {wanted.sum()} pages that it needs"
            )
        return self.table[row]

    def take_back(self, row: int) -> None:
        """A row's pages are free."""
        self.give(row, np.zeros_like(self.held[row]))

    def replica_of(self, row: int) -> int:
        return row * len(self.free) // len(self.held)

    def with_next(self, wanted: np.ndarray) -> int:
        """Pages that have to be free before a row with wanted[W] enters: one more for each slot
        that may need it. Else some row would soon give way for it, and come back, and give way
        again."""
        return int(np.where(wanted > 0, np.minimum(wanted + 1, self.table.shape[2]), 0).sum())

    def spare(self, replica: int) -> int:
        """Free pages of a replica but for one more for each of its slots that may need it; may be
        negative."""
        held = self.held.reshape(len(self.free), -1)[replica]
        return len(self.free[replica]) - int(((held > 0) & (held < self.table.shape[2])).sum())
