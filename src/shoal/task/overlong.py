"""DAPO's overlong penalty as a reward function: completions that come near the limit lose some of their reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shoal.config.schema import RewardSection
from shoal.task.reward import RewardFunction
from shoal.task.task import Task
from shoal.types import ShoalError

PENALTY = "overlong"
"""The reward function that `reward.overlong_buffer_tokens` adds."""


def overlong_punishment(max_tokens: int, buffer_tokens: int) -> Callable[..., list[float]]:
    """A reward function (TRL's convention) of completions' lengths in tokens: 0 up to `max_tokens - buffer_tokens`,
    then linearly down to -1 at `max_tokens`. DAPO, arXiv 2503.14476, eq. 13.

    >>> overlong_punishment(100, 20)(completion_ids=[[0] * 80, [0] * 90, [0] * 100])
    [0.0, -0.5, -1.0]
    """

    def overlong(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        start = max_tokens - buffer_tokens
        return [max(-1.0, min(0.0, (start - len(ids)) / buffer_tokens)) for ids in completion_ids]

    return overlong


def with_overlong(task: Task, reward: RewardSection, max_tokens: int) -> Task:
    """The task with the penalty beside its rewards, where `reward.overlong_buffer_tokens` asks for one."""
    buffer = max(1, max_tokens // 5) if reward.overlong_buffer_tokens == -1 else reward.overlong_buffer_tokens
    if not buffer:
        return task
    if buffer > max_tokens:
        raise ShoalError(f"reward.overlong_buffer_tokens={buffer}: expected at most sampling.max_completion_tokens "
                         f"({max_tokens}), of which it is the last part")
    if any(one.name == PENALTY for one in task.rewards):
        raise ShoalError("reward function 'overlong': reward.overlong_buffer_tokens adds one of this name; give yours "
                         "another, or leave that key at 0")
    penalty = RewardFunction(PENALTY, overlong_punishment(max_tokens, buffer), reward.overlong_penalty, own=True)
    return replace(task, rewards=(*task.rewards, penalty))
