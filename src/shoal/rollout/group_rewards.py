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

    def ready(self, entry: Entry, ledger: Ledger) -> list[Entry]:
        """The groups to submit together now that this one is sampled: itself, or with reward.call=step its whole batch,
        once all of that is sampled."""
        if not self.pool.by_step:
            return [entry]
        # TRL's convention: functions that compare the groups of a step need them together.
        batch = ledger.of_batch(entry.batch)
        return batch if all(one.stage is Stage.SAMPLED for one in batch) else []

    def submit(self, entries: Sequence[Entry]) -> None:
        """Submits groups to the pool; functions that are called in this process are called here."""
        for entry in entries:
            entry.texts = [self.decode(one.token_ids.tolist()) for one in entry.completions]
        token_ids = [[one.token_ids.tolist() for one in entry.completions] for entry in entries]
        self.pool.submit(entries[0].batch if self.pool.by_step else entries[0].id,
                         [entry.request.example for entry in entries], [entry.texts for entry in entries], token_ids,
                         entries[0].request.step)

    def collect(self, wait: bool = False) -> list[tuple[Hashable, Scores]]:
        """The scores that are there, with `wait` not before some are."""
        return self.pool.collect(wait=wait)

    def enter(self, found: Sequence[tuple[Hashable, Scores]], ledger: Ledger) -> None:
        """Makes groups of what `collect` gave."""
        for ticket, scores in found:
            assert isinstance(ticket, int)
            entries = ledger.of_batch(ticket) if self.pool.by_step else [ledger.entries.get(ticket)]
            for position, entry in enumerate(entries):
                if entry is not None and entry.stage is Stage.SAMPLED:  # else it was cancelled
                    group = make_group(self.task, entry.request, entry.completions, entry.texts, scores, position)
                    ledger.reward(entry, group, scores if position == 0 else None)
