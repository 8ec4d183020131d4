"""The memory of rows: which pages of a pool hold the keys of which completions, and rows that wait
in the host's memory."""

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
    """KV-cache pages of N rows of W slots: each replica has as many, for its own rows.

    A page belongs to one slot or is free, and a row gets all that it asks for or none. The engine
    owns the pool; the scheduler reads what is free.

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
                f"{siblings} completions at their limit take {most} each"
            )
        self.table = np.full((rows, siblings, most), NO_PAGE, np.int32)
        self.held = np.zeros((rows, siblings), np.int32)
        self.free = [list(range(pages))[::-1] for _ in range(replicas)]

    def give(self, row: int, wanted: Sequence[int] | np.ndarray) -> bool:
        """The slots of a row have wanted[W] pages from now on; False, and nothing changes, where
        too few are free."""
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
        most = self.table.shape[2]
        pages = np.where(wanted > 0, np.minimum(wanted + 1, most), 0)
        return int(pages.sum())

    def spare(self, replica: int) -> int:
        """Free pages of a replica but for one more for each of its slots that may need it; may be
        negative."""
        held = self.held.reshape(len(self.free), -1)[replica]
        may_need_another = (held > 0) & (held < self.table.shape[2])
        return len(self.free[replica]) - int(may_need_another.sum())


Part = tuple[int, int]
"""A request and the part of its completions that a row holds."""


@dataclass
class ParkedRows:
    """Rows in the host's memory, by part: what the device held of them, of their keys as many as
    they have. A part is kept until it is taken or its request is forgotten. The engine owns it.

    `shapes`: of the rows that one program saves or restores. `key_parts`: devices over which
    positions are split."""

    shapes: DecodeState
    key_parts: int = 1
    # NumPy arrays without the dimension of rows.
    _saved: dict[Part, DecodeState] = field(default_factory=dict)
    _arriving: deque[tuple[dict[Part, int], DecodeState]] = field(default_factory=deque)

    def add(self, positions: dict[Part, int], saved: DecodeState) -> None:
        """Takes the rows that a step saves, at these positions of its arrays, once it has ended."""
        self._arriving.append((positions, saved))

    def bring_in(self, ids: Collection[int], wait: bool = False) -> None:
        """Copies what has been saved, of these requests, to the host; with `wait` also what is yet
        to be."""
        while self._arriving:
            positions, saved = self._arriving[0]
            if not wait and not jax.tree.leaves(saved)[0].is_ready():
                break
            self._arriving.popleft()
            rows = jax.device_get(saved)
            for part, position in positions.items():
                if part[0] in ids:
                    row = jax.tree.map(operator.itemgetter(position), rows)
                    self._saved[part] = self._used(row)

    def _used(self, row: DecodeState) -> DecodeState:
        """A copy of a row without the positions of its caches that hold no key: they are most of
        it."""
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

    def take(self, positions: Sequence[tuple[Part, int]]) -> DecodeState:
        """The saved rows at given positions of the arrays that they are restored from, on the
        device; kept no more."""
        rows = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.shapes)
        for part, position in positions:
            saved = jax.tree.leaves(self._saved.pop(part))
            for leaf, own in zip(jax.tree.leaves(rows), saved, strict=True):
                used = [slice(size) for size in own.shape]
                leaf[(position, *used)] = own
        shardings = jax.tree.map(operator.attrgetter("sharding"), self.shapes)
        return jax.device_put(rows, shardings)

    def forget(self, id: int) -> None:
        """Drops what is kept of a request."""
        parts = [part for part in self._saved if part[0] == id]
        for part in parts:
            del self._saved[part]
