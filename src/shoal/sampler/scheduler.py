"""Decides what runs next: which waiting prompts enter which free rows. It handles numbers, never
arrays."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.model.attention.caches import KEY_BLOCK
from shoal.sampler.row_memory import PagePool

PREFILL_TOKENS = 2**16
"""Most tokens of one prefill, padding included, unless one prompt has more: they bound its
memory."""


class AdmittedPart(NamedTuple):
    """A part of a request's completions, as many as a row holds, that enters a row."""

    position: int  # in the batch of the compiled step
    id: int
    part: int  # from 0; the first enters with the prompt
    row: int
    source: int  # the row that holds the prompt's keys already; `row` itself for a first part


@dataclass(frozen=True)
class Admission:
    """One compiled step that fills rows: a prefill of prompts that fit `bucket` tokens, each with
    the first part of its completions; or, with bucket 0, further parts of requests whose prompts
    are in other rows, or parts that were in rows before and come `back`.

    Made by the scheduler, which counts its rows as running already; the engine starts it."""

    bucket: int
    entries: tuple[AdmittedPart, ...]
    back: bool = False


@dataclass
class Entering:
    """A request of which some parts have no row yet. Its prompt's keys stay in the row of its first
    part: if that is done with, the next part enters there."""

    part: int  # the next
    parts: int
    source: int
    is_source_free: bool = False


@dataclass
class Scheduler:
    """Queue of requests, and the owner of the engine's rows: which are free, and what runs in each.

    First come, first served, a bucket of prompt lengths at a time. The engine holds the one
    scheduler, and asks it for the next step. Equal calls give equal rows.

    Prompts enter together, `prefill_rows` at once, or fewer of a bucket whose prefill would exceed
    `prefill_tokens`; as many of all buckets beyond `whole`, which share a program, as of the
    `longest` prompts. A prefill costs the same however many of its rows are used, so the scheduler
    waits until it can fill one, unless nothing else is left to run. A request that needs several
    rows takes further ones as soon as they are free, before another prompt enters. Each replica has
    an equal part of the rows and of every batch, in order; a request is of one replica.
    """

    num_rows: int
    prefill_rows: int
    join_rows: int = 1
    replicas: int = 1
    prefill_tokens: int = 1 << 62
    whole: int = 1 << 62
    longest: int = 0
    swap_rows: int = 1  # whose completions give way, or come back, at once
    pool: PagePool | None = None  # of which rows have pages
    row_pages: int = 0  # that have to be spare before a new row enters
    waiting: deque[tuple[int, int, int]] = field(default_factory=deque)  # (id, bucket, parts)
    # By id, in the order of their prefills.
    entering: dict[int, Entering] = field(default_factory=dict)
    # (id, part) that gave up their rows -> the pages that have to be spare before they come back,
    # in this order
    returning: dict[tuple[int, int], int] = field(default_factory=dict)
    running: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> (id, part)
    free: list[int] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_rows))

    def submit(self, id: int, bucket: int, parts: int = 1) -> None:
        if id in self.ids:
            raise ValueError(f"request {id} was submitted already")
        self.ids.add(id)
        self.waiting.append((id, bucket, parts))

    def batch_rows(self, bucket: int) -> int:
        """Positions of the batch of an admission."""
        if not bucket:
            return self.join_rows
        most = min(self.prefill_rows, self.prefill_tokens // self.padded(bucket))
        return max(1, most // self.replicas) * self.replicas

    def padded(self, bucket: int) -> int:
        """Tokens that a prompt of a bucket is padded to."""
        return bucket if bucket <= self.whole else self.longest

    def admit(self, busy: Collection[tuple[int, int]] = ()) -> Admission | None:
        """The next step that fills rows, or None if decoding should continue. Parts that are `busy`
        cannot return."""
        back = self._return(busy)
        if back is not None:
            return back
        if self.returning and self.free:
            return None  # pages are lacking: what is new does not go before what was in already
        return self._join() or self._prefill()

    @property
    def lacking(self) -> int:
        """Rows that could be filled beyond those that are free."""
        num_entering = sum(request.parts - request.part for request in self.entering.values())
        num_waiting = sum(parts for _, _, parts in self.waiting)
        wanted = len(self.returning) + num_entering + num_waiting
        pages = next(iter(self.returning.values()), self.row_pages)
        return min(wanted, self.num_rows) - len(self._room(self.num_rows, pages))

    def _return(self, busy: Collection[tuple[int, int]]) -> Admission | None:
        take = self._with_pages(self.swap_rows)
        entries = []
        for row in list(self.free):
            if not self.returning:
                break
            first = next(iter(self.returning))
            if first in busy:
                break
            position = take(row, self.returning[first])
            if position is None:
                continue
            del self.returning[first]
            id, part = first
            entries.append(AdmittedPart(position, id, part, row, row))
            self._enter(id, part, row)
        if not entries:
            return None
        return Admission(0, tuple(entries), back=True)

    def _join(self) -> Admission | None:
        take = self._with_pages(self.join_rows)
        entries = []
        for id, request in list(self.entering.items()):
            replica = self.replica_of(request.source)
            rows = [row for row in self.free if self.replica_of(row) == replica]
            if request.is_source_free:
                rows.insert(0, request.source)
            num_left = request.parts - request.part
            for row in rows[:num_left]:
                position = take(row, self.row_pages)
                if position is None:
                    break
                entries.append(AdmittedPart(position, id, request.part, row, request.source))
                self._enter(id, request.part, row)
                request.part += 1
                request.is_source_free = False
            if request.part == request.parts:
                del self.entering[id]
        if not entries:
            return None
        return Admission(0, tuple(entries))

    def _prefill(self) -> Admission | None:
        if not self.waiting:
            return None
        # The bucket of the first, not the fullest: otherwise a rare length would wait to the end of
        # the step.
        bucket = self.waiting[0][1]
        rows = self.batch_rows(bucket)
        room = self._room(rows)
        wanted = min(rows, len(self.waiting))
        # A prompt can enter a row of its own replica alone: to wait until all are used would idle
        # those that are ahead.
        enough = -(-wanted * (self.replicas + 1) // (2 * self.replicas))
        if not room:
            return None
        if self.running and len(room) < enough:
            return None
        of_bucket = [request for request in self.waiting if request[1] == bucket]
        chosen = of_bucket[: len(room)]
        chosen_ids = {id for id, _, _ in chosen}
        self.waiting = deque(request for request in self.waiting if request[0] not in chosen_ids)
        entries = []
        for (position, row), (id, _, parts) in zip(room, chosen, strict=False):
            entries.append(AdmittedPart(position, id, 0, row, row))
            self._enter(id, 0, row)
            if parts > 1:
                self.entering[id] = Entering(1, parts, row)
        return Admission(bucket, tuple(entries))

    def enough(self) -> int:
        """Rows of a replica that have to end before decoding is interrupted for what waits."""
        if self.entering or self.returning:
            return self.join_rows // self.replicas
        if self.waiting:
            positions = self.batch_rows(self.waiting[0][1])
            wanted = min(positions, len(self.waiting)) - len(self._room(positions))
            return max(1, -(-wanted // self.replicas))
        return self.num_rows

    def replica_of(self, row: int) -> int:
        return row // (self.num_rows // self.replicas)

    def positions(self, batch: int) -> Callable[[int], int | None]:
        """A function that takes the next position of a row's replica in a batch of so many; None if
        none is left."""
        per_replica = batch // self.replicas
        left = []
        for replica in range(self.replicas):
            left.append(iter(range(replica * per_replica, (replica + 1) * per_replica)))

        def take(row: int) -> int | None:
            return next(left[self.replica_of(row)], None)

        return take

    def _with_pages(self, batch: int) -> Callable[[int, int], int | None]:
        """As `positions`, for a row that enters with so many pages; None, too, where its replica
        has fewer to spare."""
        take = self.positions(batch)
        spare = [0] * self.replicas
        if self.pool:
            spare = [self.pool.spare(replica) for replica in range(self.replicas)]

        def take_with_pages(row: int, pages: int) -> int | None:
            replica = self.replica_of(row)
            if pages > spare[replica]:
                return None
            position = take(row)
            if position is not None:
                spare[replica] -= pages
            return position

        return take_with_pages

    def _room(self, batch: int, pages: int | None = None) -> list[tuple[int, int]]:
        """The positions of a batch that can be used, each with the free row that it fills; by
        default of new rows."""
        if pages is None:
            pages = self.row_pages
        take = self._with_pages(batch)
        room = []
        for row in self.free:
            position = take(row, pages)
            if position is not None:
                room.append((position, row))
        return room

    def _enter(self, id: int, part: int, row: int) -> None:
        if row in self.free:
            self.free.remove(row)
        self.running[row] = id, part

    def release(self, row: int) -> None:
        """Frees a row whose completions have ended, or that they give up while they wait."""
        id, _ = self.running.pop(row)
        if self.pool:
            self.pool.take_back(row)
        request = self.entering.get(id)
        if request is not None and request.source == row:
            request.is_source_free = True
        else:
            # Lowest first: equal runs then use equal rows, which makes their traces comparable.
            insort(self.free, row)

    def finish(self, id: int) -> None:
        """Forgets a request, all of whose rows were released."""
        self.ids.discard(id)

    def cancel(self, id: int) -> None:
        """Frees a request's rows, or removes it from the queue."""
        request = self.entering.pop(id, None)
        if request is not None and request.is_source_free:
            insort(self.free, request.source)
        rows = [row for row, (owner_id, _) in self.running.items() if owner_id == id]
        for row in rows:
            self.release(row)
        self.waiting = deque(request for request in self.waiting if request[0] != id)
        self.returning = {part: pages for part, pages in self.returning.items() if part[0] != id}
        self.finish(id)

    @property
    def idle(self) -> bool:
        return not self.ids


def prompt_bucket(size: int) -> int:
    """The padded length of a prompt: the least KEY_BLOCK x 2^n that holds it, whatever the other
    prompts are."""
    bucket = KEY_BLOCK
    while bucket < size:
        bucket *= 2
    return bucket


def num_rows(slots: int, siblings: int, shards: int) -> int:
    """Rows of an engine with so many slots: as many in each part that they are split into."""
    return round_up(max(1, slots // siblings), shards)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
