"""Memory of the engine's rows: which pages of a pool hold the keys of which completions, and the
rows that were saved to the host's memory."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from shoal.model.attention.caches import NO_PAGE, LayerCache
from shoal.sampler.programs import DecodeState


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
        """`pages_per_slot`: most pages of a slot. `pages`: pages of each replica. ValueError if
        they do not suffice for one row at its limit."""
        if pages < siblings * pages_per_slot:
            raise ValueError(
                f"a replica has {pages} pages, expected at least {siblings * pages_per_slot}: a "
                f"row's {siblings} completions at their limit take {pages_per_slot} each"
            )
        self.table = np.full((rows, siblings, pages_per_slot), NO_PAGE, np.int32)
        self.held = np.zeros((rows, siblings), np.int32)
        self.free = [list(range(pages))[::-1] for _ in range(replicas)]

    def give(self, row: int, wanted: Sequence[int] | np.ndarray) -> bool:
        """Gives the slots of a row exactly wanted[W] pages, by taking free pages or giving some
        back. Returns False, and changes nothing, if too few pages are free."""
        wanted = np.asarray(wanted)
        held = self.held[row].copy()
        free = self.free[self.replica_of(row)]
        if (wanted - held).sum() > len(free):
            return False
        for slot in np.flatnonzero(wanted < held):
            pages = self.table[row, slot, wanted[slot] : held[slot]]
            free.extend(pages[::-1].tolist())
            pages[:] = NO_PAGE
        for slot in np.flatnonzero(wanted > held):
            pages = [free.pop() for _ in range(wanted[slot] - held[slot])]
            self.table[row, slot, held[slot] : wanted[slot]] = pages
        self.held[row] = wanted
        return True

    def enter(self, row: int, wanted: np.ndarray) -> np.ndarray:
        """Gives a row its first pages, wanted[W] of them, and returns its part of `table`,
        int32[W, T]. RuntimeError if too few are free, since the scheduler has checked that."""
        if not self.give(row, wanted):
            raise RuntimeError(
                f"row {row} was entered without the {wanted.sum()} pages that it needs"
            )
        return self.table[row]

    def take_back(self, row: int) -> None:
        """Frees all pages of a row."""
        self.give(row, np.zeros_like(self.held[row]))

    def replica_of(self, row: int) -> int:
        """Returns the number of the replica that has a row."""
        return row * len(self.free) // len(self.held)

    def pages_to_enter(self, wanted: np.ndarray) -> int:
        """Returns how many pages must be free before a row that needs wanted[W] pages enters: for
        each slot one page more than it needs now, unless it is at its limit. Otherwise some row
        would soon have to be saved to make room for this one, and return, and be saved again."""
        most = self.table.shape[2]
        pages = np.where(wanted > 0, np.minimum(wanted + 1, most), 0)
        return int(pages.sum())

    def spare(self, replica: int) -> int:
        """Returns how many free pages a replica has beyond one more page for each of its slots that
        may need one; may be negative."""
        held = self.held.reshape(len(self.free), -1)[replica]
        may_need_another = (held > 0) & (held < self.table.shape[2])
        return len(self.free[replica]) - int(may_need_another.sum())


SubgroupKey = tuple[int, int]
"""(id of a request, number of one of its subgroups): what a row holds. See the scheduler's head."""


@dataclass
class ParkedRows:
    """Rows that were saved to the host's memory, by subgroup: all that the device held of them, but
    only as many keys as they have. A row is kept until it is taken or its request is forgotten. The
    engine owns it.

    `shapes`: shapes of the rows that one program saves or restores. `key_parts`: number of devices
    over which positions are split."""

    shapes: DecodeState
    key_parts: int = 1
    # saved rows, as NumPy arrays without the dimension of rows
    _saved: dict[SubgroupKey, DecodeState] = field(default_factory=dict)
    _arriving: deque[tuple[dict[SubgroupKey, int], DecodeState]] = field(default_factory=deque)

    def add(self, positions: dict[SubgroupKey, int], saved: DecodeState) -> None:
        """Notes which subgroups a step saves, and at which positions of its arrays; `bring_in`
        copies them once the step has ended."""
        self._arriving.append((positions, saved))

    def bring_in(self, ids: Collection[int], wait: bool = False) -> None:
        """Copies the rows of steps that save and have ended to the host's memory; with `wait`,
        waits for all such steps. Drops rows of requests that are not in `ids`, because they were
        cancelled meanwhile."""
        while self._arriving:
            positions, saved = self._arriving[0]
            if not wait and not jax.tree.leaves(saved)[0].is_ready():
                break
            self._arriving.popleft()
            rows = jax.device_get(saved)
            for key, position in positions.items():
                if key[0] in ids:
                    row = jax.tree.map(operator.itemgetter(position), rows)
                    self._saved[key] = self._used(row)

    def _used(self, row: DecodeState) -> DecodeState:
        """Returns a copy of a saved row without the positions of its caches that hold no key, which
        are most of the row."""
        num_prompt = -(-int(np.max(row.prefix_len)) // self.key_parts)
        num_own = -(-int(np.max(row.length)) // self.key_parts)

        def used_prefix(keys: np.ndarray) -> np.ndarray:
            return keys[:, :num_prompt]

        def used_own(keys: np.ndarray) -> np.ndarray:
            if keys.ndim == 5:  # by pages
                num_pages = -(-num_own // keys.shape[-2])
                return keys[:, :num_pages]
            return keys[:, :, :num_own]

        caches = []
        for cache in row.caches:
            prefix_k, prefix_v = jax.tree.map(used_prefix, (cache.prefix_k, cache.prefix_v))
            own_k, own_v = jax.tree.map(used_own, (cache.own_k, cache.own_v))
            caches.append(LayerCache(prefix_k, prefix_v, own_k, own_v))
        return jax.tree.map(np.copy, replace(row, caches=tuple(caches)))

    def take(self, positions: Sequence[tuple[SubgroupKey, int]]) -> DecodeState:
        """Returns saved rows as arrays on the device, for the program that restores them, and
        forgets them on the host. `positions`: pairs of a subgroup and its position in these
        arrays."""

        def zeros(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            return np.zeros(leaf.shape, leaf.dtype)

        rows = jax.tree.map(zeros, self.shapes)
        for key, position in positions:
            saved = jax.tree.leaves(self._saved.pop(key))
            for leaf, own in zip(jax.tree.leaves(rows), saved, strict=True):
                row = leaf[position, ...]  # a view, also if a row has a single number
                used = tuple(slice(size) for size in own.shape)
                row[used] = own
        shardings = jax.tree.map(operator.attrgetter("sharding"), self.shapes)
        return jax.device_put(rows, shardings)

    def forget(self, id: int) -> None:
        """Drops all saved rows of a request."""
        keys = [key for key in self._saved if key[0] == id]
        for key in keys:
            del self._saved[key]
