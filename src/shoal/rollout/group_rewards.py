"""Rewards of sampled groups: completions to texts, texts to the reward pool, scores to groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.rollout.group import make_group
from shoal.rollout.ledger import Entry, Ledger, Stage
from shoal.tasks.task import Task


@dataclass
class GroupRewards:
    """A group is submitted to the pool as soon as it is sampled, so that workers score it while others are sampled."""

    task: Task
    pool: RewardPool
    decode: Callable[[Sequence[int]], str]

    def submit(self, entry: Entry) -> None:
        """Submits a sampled group to the pool; functions that are called in this process are called here."""
        entry.texts = [self.decode(one.token_ids.tolist()) for one in entry.completions]
        token_ids = [one.token_ids.tolist() for one in entry.completions]
        self.pool.submit(entry.id, [entry.request.example], [entry.texts], [token_ids], entry.request.step)

    def collect(self, wait: bool = False) -> list[tuple[Hashable, Scores]]:
        """The scores that are there, with `wait` not before some are."""
        return self.pool.collect(wait=wait)

    def enter(self, found: Sequence[tuple[Hashable, Scores]], ledger: Ledger) -> None:
        """Makes groups of what `collect` gave."""
        for ticket, scores in found:
            assert isinstance(ticket, int)
            entry = ledger.entries.get(ticket)
            if entry is not None and entry.stage is Stage.SAMPLED:  # else it was cancelled
                group = make_group(self.task, entry.request, entry.completions, entry.texts, scores)
                ledger.reward(entry, group, scores)
