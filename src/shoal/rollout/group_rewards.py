"""Rewards of sampled groups: completions to texts, texts to the reward pool, scores to groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.rewards.pool import RewardPool
from shoal.rollout.group import make_group
from shoal.rollout.ledger import Entry, Ledger, Stage
from shoal.tasks.task import Task


@dataclass
class GroupRewards:
    """A group is submitted to the pool as soon as it is sampled, so that workers score it while others are sampled."""

    task: Task
    pool: RewardPool
    decode: Callable[[Sequence[int]], str]

    def submit(self, entry: Entry, ledger: Ledger) -> None:
        """Submits a sampled group; with reward.call=step its whole batch, once all of that is sampled."""
        entry.texts = [self.decode(one.token_ids.tolist()) for one in entry.completions]
        if not self.pool.by_step:
            self._submit(entry.id, [entry])
            return
        # TRL's convention: functions that compare the groups of a step need them together.
        batch = ledger.of_batch(entry.batch)
        if all(one.stage is Stage.SAMPLED for one in batch):
            self._submit(entry.batch, batch)

    def collect(self, ledger: Ledger, wait: bool = False) -> int:
        """Enters the scores that are there, with `wait` not before some are; how many groups were rewarded."""
        rewarded = 0
        for ticket, scores in self.pool.collect(wait=wait):
            assert isinstance(ticket, int)
            found = ledger.of_batch(ticket) if self.pool.by_step else [ledger.entries.get(ticket)]
            for position, entry in enumerate(found):
                if entry is not None and entry.stage is Stage.SAMPLED:  # else it was cancelled
                    group = make_group(self.task, entry.request, entry.completions, entry.texts, scores, position)
                    ledger.reward(entry, group, scores if position == 0 else None)
                    rewarded += 1
        return rewarded

    def _submit(self, ticket: int, entries: Sequence[Entry]) -> None:
        token_ids = [[one.token_ids.tolist() for one in entry.completions] for entry in entries]
        self.pool.submit(ticket, [entry.request.example for entry in entries], [entry.texts for entry in entries],
                         token_ids, entries[0].request.step)
