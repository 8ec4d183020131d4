"""Scores groups of texts as a run does: each by itself, or all together with reward.call=step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.types import Example, Failure


@dataclass(frozen=True)
class Scored:
    """The scores of one group; arrays are [G], NaN where nothing could be scored."""

    rewards: np.ndarray
    components: dict[str, np.ndarray]  # by function, before weights
    valid: np.ndarray


def score_texts(pool: RewardPool, examples: Sequence[Example], texts: Sequence[Sequence[str]],
                token_ids: Sequence[Sequence[Sequence[int]]], step: int = 0,
                progress: Callable[[int, int], None] = lambda done, total: None
                ) -> tuple[list[Scored], list[Failure]]:
    """The scores of each group and all failures; `progress` is called with the calls done and their number."""
    everything = range(len(examples))
    batches = [everything] if pool.by_step else [range(n, n + 1) for n in everything]
    scores: dict[Any, Scores] = {}

    def take(wait: bool) -> None:
        for ticket, found in pool.collect(wait=wait):
            scores[ticket] = found
            progress(len(scores), len(batches))

    for ticket, batch in enumerate(batches):  # all before the first wait: remote rewards get many at once
        one = slice(batch.start, batch.stop)
        pool.submit(ticket, examples[one], texts[one], token_ids[one], step)
        take(wait=False)
    while len(scores) < len(batches):
        take(wait=True)
    found = [Scored(own.rewards[n], {name: values[n] for name, values in own.components.items()}, own.valid[n])
             for ticket, batch in enumerate(batches) for own in [scores[ticket]] for n in range(len(batch))]
    return found, [failure for ticket in range(len(batches)) for failure in scores[ticket].failures]
