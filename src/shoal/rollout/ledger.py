"""What became of each group that was asked for: an entry each, moved by one table of transitions.

    waiting -> running -> sampled -> rewarded -> handed over
       ^          |
       +---lost---+

Whatever hosts answer, in whatever order and however often, a group is handed over once, in the order asked.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.rewards.scores import Scores
from shoal.types import Completion, Group, GroupRequest, Purpose


class Stage(enum.StrEnum):
    WAITING = "waiting"  # for a host with room
    RUNNING = "running"  # at a host
    SAMPLED = "sampled"  # all completions are there
    REWARDED = "rewarded"  # rewards are there
    HANDED_OVER = "handed over"
    CANCELLED = "cancelled"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    # An answer may come when the group waits again: its host had been given up too early.
    Stage.WAITING: frozenset({Stage.RUNNING, Stage.SAMPLED, Stage.CANCELLED}),
    Stage.RUNNING: frozenset({Stage.WAITING, Stage.SAMPLED, Stage.CANCELLED}),
    Stage.SAMPLED: frozenset({Stage.REWARDED, Stage.CANCELLED}),
    Stage.REWARDED: frozenset({Stage.HANDED_OVER, Stage.CANCELLED}),
    Stage.HANDED_OVER: frozenset(),
    Stage.CANCELLED: frozenset(),
}


@dataclass(eq=False)
class PendingGroup:
    """A group that was asked for and not handed over yet."""

    id: int
    request: GroupRequest
    stage: Stage = Stage.WAITING
    attempt: int = 0  # how often it was given to a host
    host: str = ""  # that has it
    completions: Sequence[Completion] = ()
    texts: Sequence[str] = ()
    group: Group | None = None
    scores: Scores | None = None  # whose failures and figures count with this group

    def move(self, stage: Stage) -> None:
        """The only way from one stage to another."""
        if stage not in TRANSITIONS[self.stage]:
            raise RuntimeError(f"group {self.id} of {self.request.purpose} step {self.request.step} cannot become "
                               f"{stage}: it is {self.stage}")
        self.stage = stage


@dataclass
class Ledger:
    """All groups that were asked for and not handed over yet."""

    entries: dict[int, PendingGroup] = field(default_factory=dict)  # in the order asked
    next_id: int = 0
    duplicates: int = 0  # answers to groups that had been answered
    asked_again: int = 0  # groups whose host was lost

    def add(self, requests: Iterable[GroupRequest]) -> None:
        for request in requests:
            self.entries[self.next_id] = PendingGroup(self.next_id, request)
            self.next_id += 1

    def of(self, purpose: Purpose, step: int) -> list[PendingGroup]:
        """What a step asked for, in that order."""
        return [one for one in self.entries.values() if (one.request.purpose, one.request.step) == (purpose, step)]

    def waiting(self) -> list[PendingGroup]:
        """Groups that wait for a host, the oldest first."""
        return [one for one in self.entries.values() if one.stage is Stage.WAITING]

    def start(self, entry: PendingGroup, host: str) -> None:
        """A host gets the group."""
        entry.move(Stage.RUNNING)
        entry.host, entry.attempt = host, entry.attempt + 1

    def answer(self, id: int, completions: Sequence[Completion]) -> PendingGroup | None:
        """The entry that a host's answer is for; None if it has been answered, which is counted, or was cancelled."""
        entry = self.entries.get(id)
        if entry is None or entry.stage not in (Stage.WAITING, Stage.RUNNING):
            self.duplicates += id < self.next_id
            return None
        entry.move(Stage.SAMPLED)
        entry.completions = completions
        return entry

    def reward(self, entry: PendingGroup, group: Group, scores: Scores) -> None:
        entry.move(Stage.REWARDED)
        entry.group, entry.scores = group, scores

    def lose(self, host: str) -> list[PendingGroup]:
        """What a lost host had waits again, before what was asked for later."""
        lost = [one for one in self.entries.values() if one.stage is Stage.RUNNING and one.host == host]
        for one in lost:
            one.move(Stage.WAITING)
        self.asked_again += len(lost)
        return lost

    def hand_over(self, entries: Collection[PendingGroup]) -> list[Group]:
        groups = []
        for one in entries:
            one.move(Stage.HANDED_OVER)
            assert one.group is not None
            groups.append(one.group)
            del self.entries[one.id]
        return groups

    def cancel(self, purpose: Purpose, step: int) -> list[PendingGroup]:
        """Gives up what a step asked for; the entries that hosts still work on."""
        running = []
        for one in self.of(purpose, step):
            if one.stage is Stage.RUNNING:
                running.append(one)
            one.move(Stage.CANCELLED)
            del self.entries[one.id]
        return running

    def count(self, *stages: Stage) -> int:
        return sum(one.stage in stages for one in self.entries.values())


def whereabouts(entries: Sequence[PendingGroup], hosts: Mapping[str, str]) -> str:
    """Where groups are that somebody waits for. `hosts`: what to say of each host that has some."""
    places = Counter(f"at {hosts[one.host]}" if one.stage is Stage.RUNNING else str(one.stage) for one in entries)
    there = places.pop(str(Stage.REWARDED), 0)
    return ", ".join([f"{there} of {len(entries)} groups are there", *(
        f"{number} {place}" for place, number in places.items()), f"attempt {max(one.attempt for one in entries)}"])
