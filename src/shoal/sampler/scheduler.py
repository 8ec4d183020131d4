"""Decides what runs next: which waiting prompts enter which free groups. It handles numbers, never arrays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Admission:
    """One prefill: request ids, the groups they enter and the rows they take; all prompts fit `bucket` tokens."""

    bucket: int
    ids: tuple[int, ...]
    groups: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass
class Scheduler:
    """First come, first served, a bucket of prompt lengths at a time.

    Prompts enter together, `prefill_rows` at once. A prefill costs the same however many of its rows are used, so the
    scheduler waits until it can fill one, unless nothing else is left to run. Each replica has an equal part of the
    groups and of the rows, in order, and its rows enter its own groups.
    """

    num_groups: int
    prefill_rows: int
    replicas: int = 1
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (id, bucket)
    running: dict[int, int] = field(default_factory=dict)  # id -> group
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_groups))

    def submit(self, id: int, bucket: int) -> None:
        if id in self.running or any(id == other for other, _ in self.waiting):
            raise ValueError(f"request {id} was submitted already")
        self.waiting.append((id, bucket))

    def admit(self) -> Admission | None:
        """The next prefill, or None if decoding should continue."""
        wanted = min(self.prefill_rows, len(self.waiting))
        room = self._room()
        # A row can enter a group of its own replica alone: to wait until all are used would idle those that are ahead.
        enough = -(-wanted * (self.replicas + 1) // (2 * self.replicas))
        if wanted == 0 or not room or (len(room) < enough and self.running):
            return None
        # The first one's bucket, not the fullest: otherwise a rare length would wait to the end of the step.
        bucket = self.waiting[0][1]
        ids = [id for id, size in self.waiting if size == bucket][:len(room)]
        chosen = set(ids)
        self.waiting = deque(entry for entry in self.waiting if entry[0] not in chosen)
        rows, groups = zip(*room[:len(ids)], strict=True)
        self.free = [group for group in self.free if group not in groups]
        self.running.update(zip(ids, groups, strict=True))
        return Admission(bucket, tuple(ids), groups, rows)

    def _room(self) -> list[tuple[int, int]]:
        """The rows of a prefill that can be used, each with the free group that it enters."""
        groups, rows = self.num_groups // self.replicas, self.prefill_rows // self.replicas
        return [(replica * rows + number, group) for replica in range(self.replicas)
                for number, group in enumerate([g for g in self.free if g // groups == replica][:rows])]

    def finish(self, id: int) -> None:
        """Frees a request's group, or removes it from the queue."""
        if id in self.running:
            self.free.append(self.running.pop(id))
            # Lowest first: equal runs then use equal groups, which makes their traces comparable.
            self.free.sort()
        else:
            self.waiting = deque(entry for entry in self.waiting if entry[0] != id)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting
