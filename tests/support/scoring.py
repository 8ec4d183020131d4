"""Scores of given texts, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from shoal.config.sections.reward import RewardSection
from shoal.records import Example, Prompt, RewardFunction
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Policy, Scores


def score(
    functions: Sequence[RewardFunction],
    examples: Sequence[Example],
    prompts: Sequence[Prompt],
    texts: Any,
    completion_ids: Any,
    step: int = 0,
    max_steps: int = 0,
    on_error: Policy = "error",
) -> Scores:
    """The scores of texts[P][G], the completions of P prompts."""
    asked = []
    for example, prompt in zip(examples, prompts, strict=True):
        asked.append(replace(example, prompt=prompt))
    with closing(
        RewardPool(functions, RewardSection(workers=0, on_error=on_error), max_steps)
    ) as pool:
        pool.submit("given", asked, texts, completion_ids, step)
        [(_, scores)] = pool.collect(wait=True)
    return scores
