"""GSM8K's prompts and rewards by `reward.preset`: what a preset holds and is made with, and our own, `shoal`.

All that looks into a text is linear in its length. Gold numbers come without commas.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shoal.config.sections import REWARD_PRESETS
from shoal.tasks.graders.answer import (
    MAX_NUMBER_CHARS,
    completion_text,
    extract_answer,
    format_reward,
    parse_number,
    same_number,
    shown,
    well_formed,
)
from shoal.types import Messages, RewardFunction

SYSTEM_PROMPT = (
    "Solve the user's problem. Think step by step between <reasoning> and </reasoning>, "
    "then write only the final number between <answer> and </answer>."
)
Points = Callable[[str, str], float]


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
    """The preset of a name; its module is imported when it is used."""
    module, _, preset = REWARD_PRESETS[name].partition(":")
    return getattr(importlib.import_module(module), preset)


def answer_key(text: str | None) -> str | None:
    """An answer in one spelling, for maj@k: `$1,200.0` as `1200`; what is no number as it is.

    >>> answer_key("$1,200.0"), answer_key("twelve")
    ('1200', 'twelve')
    """
    number = parse_number(text) if text is None or len(text) <= MAX_NUMBER_CHARS else None
    return text if number is None else shown(Fraction(number))


def reward_of(name: str, points: Points, weight: float = 1.0) -> RewardFunction:
    """A function of (text, gold number) as one in TRL's convention, run in the caller's process."""

    def reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
        texts = [completion_text(completion) for completion in completions]
        return [float(points(text, gold)) for text, gold in zip(texts, answer, strict=True)]

    reward.__name__ = name
    return RewardFunction(name, reward, weight, runs_in_process=True)


def user_prompt(instructions: str, question: str) -> Messages:
    return [{"role": "user", "content": f"{instructions}\n\n{question}"}]


def system_prompt(instructions: str, question: str) -> Messages:
    return [{"role": "system", "content": instructions}, {"role": "user", "content": question}]


SHOAL = RewardPreset(
    lambda question: system_prompt(SYSTEM_PROMPT, question),
    (reward_of("correct", lambda text, gold: same_number(extract_answer(text), gold)),
     RewardFunction("format", format_reward, 0.1, runs_in_process=True)),
    extract_answer, well_formed, same_number)
