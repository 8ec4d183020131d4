"""DAPO's overlong penalty as a reward function: completions that come near the limit lose some of their reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
