"""Memory of the engine's rows: which pages of a pool hold the keys of which completions, and the
rows that were swapped out to the host's memory."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from shoal.model.attention.caches import NO_PAGE
from shoal.sampler.decode_state import DecodeState


class PagePool:
    """KV-cache pages of N rows of W slots. Each replica has the same number of pages, for its own
    rows.

    A page belongs to one slot or is free, and a row gets all the pages that it asks for, or none.
    The engine owns the pool; the scheduler reads how many pages are free.

    `table`: int32[N, W, T], each slot's pages in the order of its keys, by their number within the
    replica, followed by NO_PAGE. `held`: int32[N, W], how many pages each slot has. `free`: numbers
    of the free pages of each replica.

    A page that is given back is free at once, even while the device runs steps that write to it:
    steps run in the order in which they were started, each has its own copy of the table, and a
    slot reads no key that it has not written."""

    def __init__(
        self, rows: int, siblings: int, pages_per_slot: int, pages: int, replicas: int = 1
    ) -> None:
        """Makes a pool whose pages are all free. `rows`: N, of all replicas together. `siblings`:
        W. `pages_per_slot`: T, most pages of a slot. `pages`: pages of each replica. ValueError if
        they do not suffice for one row at its limit."""
        if pages < siblings * pages_per_slot:
            raise ValueError(
                f"a replica has {pages} pages, expected at least {siblings * pages_per_slot}: a "
                f"row's {siblings} completions at their limit take {pages_per_slot} each"
            )
        self.table = np.full((rows, siblings, pages_per_slot), NO_PAGE, np.int32)
        self.held = np.zeros((rows, siblings), np.int32)
        # the lowest number last, so that `pop` takes it first
        self.free = [list(range(pages))[::-1] for _ in range(replicas)]

    def give(self, row: int, wanted: Sequence[int] | np.ndarray) -> bool:
        """Gives the slots of a row exactly wanted[W] pages, at most T each, by taking free pages of
        the row's replica or giving a slot's last pages back. Returns True if it did; False, and
        changes nothing, if too few pages are free."""
        wanted = np.asarray(wanted)
        held = self.held[row].copy()
        free = self.free[self.replica_of(row)]
        if (wanted - held).sum() > len(free):
            return False
        for slot in np.flatnonzero(wanted < held):
            pages = self.table[row, slot, wanted[slot] : held[slot]]
            free.extend(pages[::-1].tolist())
            # `pages` is a view: this clears their places in the table
            pages[:] = NO_PAGE
        for slot in np.flatnonzero(wanted > held):
            pages = [free.pop() for _ in range(wanted[slot] - held[slot])]
            self.table[row, slot, held[slot] : wanted[slot]] = pages
        self.held[row] = wanted
        return True

    def enter(self, row: int, wanted: np.ndarray) -> np.ndarray:
        """Gives a row its first pages, wanted[W] of them, and returns its part of `table`,
        int32[W, T], as a view. RuntimeError if too few are free: the scheduler should have checked
        that."""
        if not self.give(row, wanted):
            raise RuntimeError(
                f"row {row} was entered without the {wanted.sum()} pages that it needs"
            )
        return self.table[row]

    def take_back(self, row: int) -> None:
        """Frees all pages of a row."""
        self.give(row, np.zeros_like(self.held[row]))

    def replica_of(self, row: int) -> int:
        """Returns the number, from 0, of the replica that has row `row`; rows count from 0 over all
        replicas."""
        return row * len(self.free) // len(self.held)

    def pages_to_enter(self, wanted: np.ndarray) -> int:
        """Returns how many pages must be free before a row that needs wanted[W] pages enters: for
        each slot one page more than it needs now, unless it is at its limit. Otherwise some row
        would soon have to be swapped out to make room for this one, and return, and be swapped out
        again."""
        most = self.table.shape[2]
        pages = np.where(wanted > 0, np.minimum(wanted + 1, most), 0)
        return int(pages.sum())

    def spare(self, replica: int) -> int:
        """Returns how many free pages a replica has beyond a reserve of one page for each slot that
        has pages and is not at its limit; may be negative."""
        held = self.held.reshape(len(self.free), -1)[replica]
        may_need_another = (held > 0) & (held < self.table.shape[2])
        return len(self.free[replica]) - int(may_need_another.sum())


SubgroupKey = tuple[int, int]
"""(id of a request, number of one of its subgroups): what a row holds. See the scheduler's head."""


@dataclass
class SwappedRows:
    """Rows that were swapped out to the host's memory, by subgroup: all that the device held of
    them, but only as many keys as they have. A row is kept until it is taken or its request is
    forgotten. The engine owns it.

    `shapes`: shapes of the rows that one program swaps out or in."""

    shapes: DecodeState
    # rows in the host's memory, as NumPy arrays without the dimension of rows
    _on_host: dict[SubgroupKey, DecodeState] = field(default_factory=dict)
    _arriving: deque[tuple[dict[SubgroupKey, int], DecodeState]] = field(default_factory=deque)

    def add(self, positions: dict[SubgroupKey, int], swapped: DecodeState) -> None:
        """Notes which subgroups a step swaps out, and at which positions of the arrays in
        `swapped`, the step's result on the device; `copy_to_host` copies them once the step has
        ended."""
        self._arriving.append((positions, swapped))

    def copy_to_host(self, ids: Collection[int], wait: bool = False) -> None:
        """Copies the rows of those swap-out steps that have ended to the host's memory; with
        `wait`, waits until all have. `ids`: the requests in progress; rows of others, which were
        cancelled meanwhile, are dropped. Steps are taken in the order in which they were added."""
        while self._arriving:
            positions, swapped = self._arriving[0]
            # All arrays of a step become ready together, and later steps end later.
            if not wait and not jax.tree.leaves(swapped)[0].is_ready():
                break
            self._arriving.popleft()
            rows = jax.device_get(swapped)
            for key, position in positions.items():
                if key[0] in ids:
                    row = jax.tree.map(operator.itemgetter(position), rows)
                    self._on_host[key] = self._without_unused_keys(row)

    def _without_unused_keys(self, row: DecodeState) -> DecodeState:
        """Returns a copy of a swapped-out row, cut after the last key of its prompt and after the
        last key of its longest completion. The positions behind hold no key and are most of the
        row."""
        num_prompt = int(np.max(row.prefix_len))
        num_own = int(np.max(row.length))
        caches = [cache.used_part(num_prompt, num_own) for cache in row.caches]
        return jax.tree.map(np.copy, replace(row, caches=tuple(caches)))

    def take(self, positions: Sequence[tuple[SubgroupKey, int]]) -> DecodeState:
        """Returns swapped-out rows as arrays on the device, for the program that swaps them in, and
        forgets them on the host. `positions`: pairs of a subgroup and its position in these arrays,
        which have the form of `shapes`; all that no row fills is 0. KeyError if a subgroup is not
        swapped out, or its copy to the host has not ended."""

        def zeros(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            return np.zeros(leaf.shape, leaf.dtype)

        rows = jax.tree.map(zeros, self.shapes)
        for key, position in positions:
            swapped = jax.tree.leaves(self._on_host.pop(key))
            for leaf, swapped_leaf in zip(jax.tree.leaves(rows), swapped, strict=True):
                row = leaf[position, ...]  # a view, also if a row has a single number
                # the array on the host is shorter where it was cut: fill the beginning of each axis
                used = tuple(slice(size) for size in swapped_leaf.shape)
                row[used] = swapped_leaf
        shardings = jax.tree.map(operator.attrgetter("sharding"), self.shapes)
        return jax.device_put(rows, shardings)

    def forget(self, id: int) -> None:
        """Drops all swapped-out rows of a request. Rows that have not arrived yet are dropped
        later, by `copy_to_host`. Does nothing if there are none."""
        keys = [key for key in self._on_host if key[0] == id]
        for key in keys:
            del self._on_host[key]
