"""Rows whose completions wait, in the host's memory: others sample in their places meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from shoal.model.kv_cache import LayerCache
from shoal.sampler.programs import DecodeState

Part = tuple[int, int]
"""A request and the part of its completions that a row holds."""


@dataclass
class ParkedRows:
    """What the device held of rows, by part: of their keys as many as they have. `shapes`: of the
    rows that one program saves or restores. `key_parts`: devices over which positions are split."""

    shapes: DecodeState
    key_parts: int = 1
    _saved: dict[Part, DecodeState] = field(
        default_factory=dict
    )  # NumPy arrays without the dimension of rows
    _arriving: deque[tuple[dict[Part, int], DecodeState]] = field(default_factory=deque)

    def add(self, positions: dict[Part, int], saved: DecodeState) -> None:
        """Takes the rows that a step saves, at these positions of its arrays, once it has ended."""
        self._arriving.append((positions, saved))

    def bring_in(self, ids: Collection[int], wait: bool = False) -> None:
        """Copies what has been saved, of these requests, to the host; with `wait` also what is yet
        to be."""
        while self._arriving and (wait or jax.tree.leaves(self._arriving[0][1])[0].is_ready()):
            positions, saved = self._arriving.popleft()
            whole = jax.device_get(saved)
            for part, position in positions.items():
                if part[0] in ids:
                    self._saved[part] = self._used(
                        jax.tree.map(lambda leaf, at=position: leaf[at], whole)
                    )

    def _used(self, row: DecodeState) -> DecodeState:
        """A copy of a row without the positions of its caches that hold no key: they are most of
        it."""
        prompt, own = (
            -(-int(np.max(size)) // self.key_parts) for size in (row.prefix_len, row.length)
        )
        caches = tuple(
            LayerCache(
                *jax.tree.map(lambda x: x[:, :prompt], (one.prefix_k, one.prefix_v)),
                *jax.tree.map(
                    lambda x: (
                        x[:, : -(-own // x.shape[-2])] if x.ndim == 5 else x[:, :, :own]
                    ),  # pages, or keys
                    (one.own_k, one.own_v),
                ),
            )
            for one in row.caches
        )
        return jax.tree.map(np.copy, replace(row, caches=caches))

    def take(self, positions: Sequence[tuple[Part, int]]) -> DecodeState:
        """The saved rows at given positions of the arrays that they are restored from, on the
        device; kept no more."""
        whole = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.shapes)
        for part, position in positions:
            for leaf, own in zip(
                jax.tree.leaves(whole), jax.tree.leaves(self._saved.pop(part)), strict=True
            ):
                leaf[(position, *map(slice, own.shape))] = own
        return jax.device_put(whole, jax.tree.map(lambda leaf: leaf.sharding, self.shapes))

    def forget(self, id: int) -> None:
        """Drops what is kept of a request."""
        for part in [part for part in self._saved if part[0] == id]:
            del self._saved[part]
