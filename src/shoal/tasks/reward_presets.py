"""GSM8K's prompts and rewards by `reward.preset`: what a preset holds. One is imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from shoal.config.sections import REWARD_PRESETS
from shoal.types import Messages, RewardFunction


@dataclass(frozen=True)
class RewardPreset:
    """How a system puts a question and judges completions.

    `answer` finds what counts as the answer, None where the text has none; `right` tells whether it is the gold number,
    for accuracy.
    """

    prompt: Callable[[str], Messages]
    rewards: tuple[RewardFunction, ...]
    answer: Callable[[str], str | None]
    well_formed: Callable[[str], bool]
    right: Callable[[str | None, str], bool]


def load_reward_preset(name: str) -> RewardPreset:
    """The preset of a name."""
    module, _, preset = REWARD_PRESETS[name].partition(":")
    return getattr(importlib.import_module(module), preset)
