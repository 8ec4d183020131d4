"""A group on its way: its request to the sampler, its texts to the reward pool, and the rewarded group at the end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.rollout.ledger import Ledger, PendingGroup, Stage
from shoal.tasks.task import Task
from shoal.types import Address, Completion, Group, GroupRequest, SampleRequest


def sample_request(request: GroupRequest, id: int, seed: int) -> SampleRequest:
    """The sampler's request for a group.

    Purpose, data set and greedy or sampled are part of the noise's address, with step and row: a prompt occurs once in
    each of them, so no two completions of a run share their noise.
    """
    # An evaluation's step is a version and may equal a training step: without the purpose both would share noise.
    purpose = f"{request.purpose}/{request.subset}/{'greedy' if request.params.temperature == 0 else 'sampled'}"
    address = Address(seed, purpose, request.step, request.example.row)
    return SampleRequest(id, request.prompt_ids, request.num_completions, address, request.params, request.purpose,
                         request.version, request.exact)


def make_group(task: Task, request: GroupRequest, completions: Sequence[Completion], texts: Sequence[str],
               scores: Scores, position: int = 0) -> Group:
    """A group from its completions, in order of their index, and their texts; its rewards are at `position` of
    `scores`."""
    correct = None
    # Judged apart from rewards: a weighted sum, or a reward of the user's own, says nothing about accuracy.
    if task.correct is not None:
        correct = np.array([bool(task.correct(text, request.example)) for text in texts])
    return Group(
        purpose=request.purpose,
        step=request.step,
        version=request.version if request.exact else min(int(one.versions.min()) for one in completions if len(one)),
        example=request.example,
        prompt_ids=request.prompt_ids,
        completions=tuple(completions),
        texts=tuple(texts),
        rewards=scores.rewards[position],
        reward_components={name: values[position] for name, values in scores.components.items()},
        valid=scores.valid[position],
        correct=correct,
        subset=request.subset,
        extra={name: column[position] for name, column in scores.extra.items()},
        reward_weights={one.name: one.weight for one in task.rewards},
    )


@dataclass
class GroupRewards:
    """A group is submitted to the pool as soon as it is sampled, so that workers score it while others are sampled."""

    task: Task
    pool: RewardPool
    decode: Callable[[Sequence[int]], str]

    def submit(self, entry: PendingGroup) -> None:
        """Submits a sampled group to the pool; functions that are called in this process are called here."""
        entry.texts = [self.decode(one.token_ids.tolist()) for one in entry.completions]
        token_ids = [one.token_ids.tolist() for one in entry.completions]
        self.pool.submit(entry.id, [entry.request.example], [entry.texts], [token_ids], entry.request.step)

    def enter(self, found: Sequence[tuple[Hashable, Scores]], ledger: Ledger) -> None:
        """Makes groups of the scores that the pool has given."""
        for ticket, scores in found:
            assert isinstance(ticket, int)
            entry = ledger.entries.get(ticket)
            if entry is not None and entry.stage is Stage.SAMPLED:  # else it was cancelled
                group = make_group(self.task, entry.request, entry.completions, entry.texts, scores)
                ledger.reward(entry, group, scores)
