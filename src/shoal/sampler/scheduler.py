"""Scheduler of the engine: decides which waiting prompts enter which free rows next. It uses
numbers only, never arrays.

A row has W slots. A request for G completions is divided into subgroups of W completions (the last
may have fewer), each sampled in one row. Subgroup 0 enters together with the prompt; the others
copy the prompt's keys from its row."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.model.attention.caches import KEY_BLOCK
from shoal.sampler.row_memory import PagePool, SubgroupKey

PREFILL_TOKENS = 2**16
"""Most tokens of one prefill, including padding, unless one prompt has more. This bounds the memory
of a prefill."""


class AdmittedSubgroup(NamedTuple):
    """A subgroup of a request, entering a row: as many of the request's completions as a row
    holds."""

    position: int  # index in the batch of the compiled step
    id: int
    subgroup: int  # number of the subgroup within the request, from 0
    row: int
    source: int  # row from which the prompt's keys are copied; equal to `row` for subgroup 0


@dataclass(frozen=True)
class Admission:
    """One compiled step that fills rows. Either a prefill of prompts that fit `bucket` tokens, each
    with its first subgroup; or a join (bucket 0): further subgroups of requests whose prompts are
    in other rows; or a swap in (bucket 0 and `is_swap_in`): subgroups that were swapped out to the
    host's memory and return.

    The scheduler makes it and counts its rows as running already; the engine then starts the
    step."""

    bucket: int
    entries: tuple[AdmittedSubgroup, ...]
    is_swap_in: bool = False


@dataclass
class Entering:
    """A request whose first subgroup has a row, while others still wait for one. The prompt's keys
    stay in the row of the first subgroup, even after that subgroup has ended; the next subgroup
    then enters that row."""

    next_subgroup: int  # number of the next subgroup to enter
    num_subgroups: int
    source: int  # row that holds the prompt's keys
    is_source_free: bool = False  # True once the subgroup in that row has ended


class WaitingRequest(NamedTuple):
    """A request of which nothing has entered a row yet."""

    id: int
    bucket: int  # length to which its prompt is padded: `prompt_bucket`
    num_subgroups: int


@dataclass
class Scheduler:
    """Queue of requests, and the owner of the engine's rows: which are free, and what runs in each.
    An engine has one scheduler and asks it for the next step. Equal calls give equal rows.

    Requests enter first come, first served, one bucket of prompt lengths at a time: `prefill_rows`
    at once, or fewer if their prefill would exceed `prefill_tokens`. All prompts longer than
    `prefill_chunk` share one program and are padded to `longest`. A prefill costs the same however
    many of its rows are used, so the scheduler waits until it can fill one, unless nothing else is
    left to run.

    A request that needs several rows gets further ones as soon as they are free, before another
    prompt enters. Each replica has an equal share of the rows and of every batch, in order; all
    rows of a request are in one replica."""

    num_rows: int
    prefill_rows: int
    join_rows: int = 1
    replicas: int = 1
    prefill_tokens: int = 1 << 62
    prefill_chunk: int = 1 << 62
    longest: int = 0
    # number of rows that one step swaps out or in
    swap_rows: int = 1
    # pool from which rows get their pages; None if keys are not stored in pages
    pool: PagePool | None = None
    row_pages: int = 0  # number of pages that must be spare before a new row is filled
    waiting: deque[WaitingRequest] = field(default_factory=deque)
    # requests whose first subgroup has a row, while others wait for one, by id, in the order of
    # their prefills
    entering: dict[int, Entering] = field(default_factory=dict)
    # swapped-out subgroups that have tokens to sample -> number of pages that must be spare before
    # they return; they return in this order
    returning: dict[SubgroupKey, int] = field(default_factory=dict)
    running: dict[int, SubgroupKey] = field(default_factory=dict)  # row -> what it holds
    free: list[int] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_rows))

    def submit(self, id: int, bucket: int, num_subgroups: int = 1) -> None:
        """Appends a request to the queue. `bucket`: length to which its prompt is padded.
        `num_subgroups`: how many rows its completions need. ValueError if a request of this id was
        submitted and is neither finished nor cancelled."""
        if id in self.ids:
            raise ValueError(f"request {id} was submitted already")
        self.ids.add(id)
        self.waiting.append(WaitingRequest(id, bucket, num_subgroups))

    def batch_rows(self, bucket: int) -> int:
        """Returns how many rows one step can fill, of all replicas together: a prefill of prompts
        of `bucket` tokens, or a join if `bucket` is 0. A prefill has an equal number in each
        replica, at least 1, even if one prompt exceeds `prefill_tokens`."""
        if not bucket:
            return self.join_rows
        most = min(self.prefill_rows, self.prefill_tokens // self.padded(bucket))
        return max(1, most // self.replicas) * self.replicas

    def padded(self, bucket: int) -> int:
        """Returns how many tokens a prompt of a bucket is padded to: the bucket itself, or
        `longest` if the bucket is larger than `prefill_chunk`."""
        return bucket if bucket <= self.prefill_chunk else self.longest

    def admit(self, busy: Collection[SubgroupKey] = ()) -> Admission | None:
        """Returns the next step that fills rows, or None if decoding should continue: swapped-out
        subgroups return first, then further subgroups join, then new prompts enter. The subgroups
        of the step leave the queue, and their rows count as running from now on: the caller must
        start it. Swapped-out subgroups in `busy` cannot return yet, because their tokens are still
        to be gathered. While one waits to return and rows are free, nothing new enters."""
        back = self._admit_returning(busy)
        if back is not None:
            return back
        if self.returning and self.free:
            # Pages are lacking, or the first to return is busy: nothing new may enter before it.
            return None
        return self._admit_joining() or self._admit_prompts()

    @property
    def num_lacking_rows(self) -> int:
        """How many more free rows (with pages) would be filled at once, by swapped-out subgroups,
        joining ones or prompts; 0 or less if no row is lacking. At most `num_rows` rows count as
        wanted."""
        wanted = len(self.returning)
        for entering in self.entering.values():
            wanted += entering.num_subgroups - entering.next_subgroup
        for request in self.waiting:
            wanted += request.num_subgroups
        # pages of the first subgroup to return, else those of a new row
        pages = next(iter(self.returning.values()), self.row_pages)
        return min(wanted, self.num_rows) - len(self._fillable_rows(self.num_rows, pages))

    def _admit_returning(self, busy: Collection[SubgroupKey]) -> Admission | None:
        """Returns the step that swaps subgroups in to free rows, in the order of `returning` up to
        the first that is in `busy`, and counts them as running; None if none is swapped out, the
        first is in `busy`, or no free row has pages for it."""
        take_position = self._position_and_page_taker(self.swap_rows)
        entries = []
        for row in list(self.free):
            if not self.returning:
                break
            first = next(iter(self.returning))
            if first in busy:
                break
            position = take_position(row, self.returning[first])
            if position is None:
                continue
            del self.returning[first]
            id, subgroup = first
            entries.append(AdmittedSubgroup(position, id, subgroup, row, row))
            self._enter(id, subgroup, row)
        if not entries:
            return None
        return Admission(0, tuple(entries), is_swap_in=True)

    def _admit_joining(self) -> Admission | None:
        """Returns the step that fills free rows with further subgroups of requests whose prompts
        have a row, and counts them as running; None if there is no such subgroup or row. Only rows
        of the prompt's replica are used."""
        take_position = self._position_and_page_taker(self.join_rows)
        entries = []
        for id, request in list(self.entering.items()):
            replica = self.replica_of(request.source)
            rows = [row for row in self.free if self.replica_of(row) == replica]
            if request.is_source_free:
                # reserved for this request, and so not among the free rows
                rows.insert(0, request.source)
            num_left = request.num_subgroups - request.next_subgroup
            for row in rows[:num_left]:
                position = take_position(row, self.row_pages)
                if position is None:
                    # no position of the step, or too few pages, are left for the prompt's replica
                    break
                entries.append(
                    AdmittedSubgroup(position, id, request.next_subgroup, row, request.source)
                )
                self._enter(id, request.next_subgroup, row)
                request.next_subgroup += 1
                request.is_source_free = False
            if request.next_subgroup == request.num_subgroups:
                del self.entering[id]
        if not entries:
            return None
        return Admission(0, tuple(entries))

    def _admit_prompts(self) -> Admission | None:
        """Returns the step that fills free rows with waiting prompts of the first one's bucket, and
        counts them as running; None if none waits, no row is free or, while other rows run, too few
        rows are free to be worth a prefill."""
        if not self.waiting:
            return None
        # Take the bucket of the first prompt, not the one with most prompts: otherwise a rare
        # length would wait until the end of the step.
        bucket = self.waiting[0].bucket
        rows = self.batch_rows(bucket)
        room = self._fillable_rows(rows)
        wanted = min(rows, len(self.waiting))
        # A replica fills only its own rows, and waiting until rows of all replicas are free would
        # idle those that are ahead.
        # All wanted rows with one replica, three quarters with two, towards half with many.
        least_rows = -(-wanted * (self.replicas + 1) // (2 * self.replicas))
        if not room:
            return None
        if self.running and len(room) < least_rows:
            return None
        of_bucket = [request for request in self.waiting if request.bucket == bucket]
        chosen = of_bucket[: len(room)]
        chosen_ids = {request.id for request in chosen}
        self.waiting = deque(request for request in self.waiting if request.id not in chosen_ids)
        entries = []
        # more rows may be free than prompts were chosen
        for (position, row), request in zip(room, chosen, strict=False):
            entries.append(AdmittedSubgroup(position, request.id, 0, row, row))
            self._enter(request.id, 0, row)
            if request.num_subgroups > 1:
                # 1: the next subgroup to enter
                self.entering[request.id] = Entering(1, request.num_subgroups, row)
        return Admission(bucket, tuple(entries))

    def interrupt_after(self) -> int:
        """Returns how many rows of a replica must end before a decode is interrupted, so that they
        can be filled with what waits; `num_rows`, which means never, if nothing waits."""
        if self.entering or self.returning:
            return self.join_rows // self.replicas
        if self.waiting:
            positions = self.batch_rows(self.waiting[0].bucket)
            wanted = min(positions, len(self.waiting)) - len(self._fillable_rows(positions))
            return max(1, -(-wanted // self.replicas))
        return self.num_rows

    def replica_of(self, row: int) -> int:
        """Returns the number, from 0, of the replica that has row `row`; rows count from 0 over all
        replicas."""
        return row // (self.num_rows // self.replicas)

    def position_taker(self, batch: int) -> Callable[[int], int | None]:
        """Returns a function row -> position, for filling a batch of `batch` positions, numbered
        from 0 over all replicas, of which each replica has an equal share, in order: each call
        takes and returns the next unused position of the row's replica, or returns None if the
        replica has none left."""
        per_replica = batch // self.replicas
        left = []
        for replica in range(self.replicas):
            left.append(iter(range(replica * per_replica, (replica + 1) * per_replica)))

        def take_position(row: int) -> int | None:
            """Takes the next position of the row's replica."""
            return next(left[self.replica_of(row)], None)

        return take_position

    def _position_and_page_taker(self, batch: int) -> Callable[[int, int], int | None]:
        """Returns a function (row, pages) -> position like that of `position_taker`, which also
        counts the pages that the rows need: it returns None, too, if the row's replica has fewer
        than `pages` left to spare."""
        take_position = self.position_taker(batch)
        # without a pool rows need 0 pages, and so many are spare
        spare = [0] * self.replicas
        if self.pool:
            spare = [self.pool.spare(replica) for replica in range(self.replicas)]

        def take_position_and_pages(row: int, pages: int) -> int | None:
            """Takes a position and `pages` pages of the row's replica; None if either is
            lacking."""
            replica = self.replica_of(row)
            if pages > spare[replica]:
                return None
            position = take_position(row)
            if position is not None:
                spare[replica] -= pages
            return position

        return take_position_and_pages

    def _fillable_rows(self, batch: int, pages: int | None = None) -> list[tuple[int, int]]:
        """Returns which free rows one batch of `batch` positions can fill, as a list of (position
        in the batch, row). A row is left out if its replica has no position left or fewer than
        `pages` spare pages (default: `row_pages`, those of a new row). Changes nothing."""
        if pages is None:
            pages = self.row_pages
        take_position = self._position_and_page_taker(batch)
        room = []
        for row in self.free:
            position = take_position(row, pages)
            if position is not None:
                room.append((position, row))
        return room

    def _enter(self, id: int, subgroup: int, row: int) -> None:
        """Notes that a subgroup runs in a row, which is no longer free. The row may be one that was
        reserved for the request, and so not in `free`."""
        if row in self.free:
            self.free.remove(row)
        self.running[row] = id, subgroup

    def release(self, row: int) -> None:
        """Frees row `row`, which must be running, once its completions have ended or were swapped
        out to the host's memory; also frees its pages. If further subgroups of the request have yet
        to copy the prompt's keys from the row, it is reserved for the next of them."""
        id, _ = self.running.pop(row)
        if self.pool:
            self.pool.take_back(row)
        request = self.entering.get(id)
        if request is not None and request.source == row:
            request.is_source_free = True
        else:
            # Rows are used lowest first: equal runs then use equal rows, which makes their traces
            # comparable.
            insort(self.free, row)

    def finish(self, id: int) -> None:
        """Forgets a request whose rows were all released. Does nothing if there is no such
        request."""
        self.ids.discard(id)

    def cancel(self, id: int) -> None:
        """Removes a request from the queue, frees all its rows and their pages, and forgets the
        request; does nothing if it does not have such a request."""
        request = self.entering.pop(id, None)
        if request is not None and request.is_source_free:
            # a reserved row is neither free nor running
            insort(self.free, request.source)
        rows = [row for row, (owner_id, _) in self.running.items() if owner_id == id]
        for row in rows:
            self.release(row)
        self.waiting = deque(request for request in self.waiting if request.id != id)
        self.returning = {key: pages for key, pages in self.returning.items() if key[0] != id}
        self.finish(id)

    @property
    def idle(self) -> bool:
        """True if no request is queued or running."""
        return not self.ids


def prompt_bucket(size: int) -> int:
    """Returns the length to which a prompt of `size` tokens is padded: the least KEY_BLOCK x 2^n
    that holds it, whatever the other prompts are."""
    bucket = KEY_BLOCK
    while bucket < size:
        bucket *= 2
    return bucket


def num_rows(slots: int, siblings: int, shards: int) -> int:
    """Returns how many rows of `siblings` slots an engine with `slots` slots has: as many as fit in
    `slots`, at least one, then rounded up to a multiple of `shards`."""
    return round_up(max(1, slots // siblings), shards)


def round_up(value: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
