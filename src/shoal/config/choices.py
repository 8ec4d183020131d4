"""Registers of an algorithm's parts (advantages, losses, KL estimators and so on): for each name
that a user can set, the function and what else must be known of it.

    AlgorithmSection           reads the names that each key accepts, and the range of its bounds
    help, completion, checks   read the names, and which keys act on which part
    trainer                    calls `load`, and passes the settings that the function takes

Rows name functions as text, so nothing here imports JAX and `--help` and `--dry-run` stay quick."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A part of an algorithm: a function in `shoal.algorithm`, and the keys of section `algorithm`
    that it takes.

    >>> AGGREGATIONS["token-mean"].load()
    <function token_mean at ...>
    """

    function: str  # `module:function`; '' if nothing is computed
    reads: tuple[str, ...] = ()  # names of the keys in section `algorithm` that it takes

    def load(self) -> Callable[..., Any]:
        """Imports and returns the function."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)

    def settings(self, section: Any) -> dict[str, Any]:
        """Returns the values of the keys in `reads`, by name, from the section `algorithm`. Policy
        losses and advantages take them as keyword arguments."""
        return {key: getattr(section, key) for key in self.reads}


@dataclass(frozen=True)
class Advantage(Part):
    """An advantage estimator."""

    uses_rewards: bool = True  # False if it computes nothing from rewards
    # True if each reward function is normalised by itself, so that a KL in the reward would cancel
    by_function: bool = False
    of_positive: bool = False  # True if it is defined only for rewards of 0 or more
    of_data: bool = False  # True if completions are the data's own answers, not samples
    # True if advantages come from a critic's values of tokens, by `trainer.critic`; there is no
    # function of groups
    of_critic: bool = False


@dataclass(frozen=True)
class PolicyLoss(Part):
    """A policy loss. `ratio`: the level at which the ratio of probabilities is computed, as in
    `policy_log_ratio`."""

    ratio: str = "token"
    in_logarithms: bool = False  # True if clip_low bounds the log-ratio, so that it may exceed 1
    # True if all tokens of a completion share one gradient, so that a bonus by token is averaged
    one_gradient: bool = False


@dataclass(frozen=True)
class KL(Part):
    """A KL estimator, and whether it may be a term of the loss or a part of the reward."""

    in_loss: bool = True  # True if its gradient regularises when it is a term of the loss
    in_reward: bool = False  # True if it is unbiased when subtracted from the reward


@dataclass(frozen=True)
class Correction(Part):
    """An importance weight that corrects for differences between sampler and trainer."""

    floor: float = 0.0  # the lower bound of the weight if the user sets none
    to_sampler: bool = False  # True: no weight; the policy ratio is taken against the sampler

    def lower_bound(self, correction_floor: float) -> float:
        """Returns the lower bound of the weight: `correction_floor`, or if that is -1, `floor`."""
        return self.floor if correction_floor == -1 else correction_floor


@dataclass(frozen=True)
class Rejection(Part):
    """A divergence between trainer and sampler by which tokens are taken out of the loss;
    `function` estimates it."""

    level: str = "token"  # each token by itself, or a completion's seq_sum, seq_mean or seq_max

    def bounds(self, cap: float, floor: float) -> tuple[float, float]:
        """Returns the smallest and the largest value of the divergence with which a token is kept
        (-inf and inf: no bound). The estimator k1 is -log w, and `cap` and `floor` are bounds of
        the weight w: floor <= w <= cap; floor -1 means 1 / cap, floor 0 no bound. The other
        estimators have only the upper bound `cap`; for them `floor` is not read."""
        if not self.function.endswith(":k1"):
            return -math.inf, cap
        floor = 1 / cap if floor == -1 else floor
        return -math.log(cap), -math.log(floor) if floor else math.inf  # floor 0: no bound


_DEVIATION = ("std_ddof", "std_eps", "std_eps_mode")
_WHITENED = (*_DEVIATION, "whiten_over")
_CLIP = ("clip_low", "clip_high", "clip_dual")
_ADVANTAGE, _AGGREGATION = "shoal.algorithm.advantage", "shoal.algorithm.aggregation"
_LOSS = "shoal.algorithm.loss"

ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(f"{_ADVANTAGE}:grpo", _DEVIATION),
    "dr_grpo": Advantage(f"{_ADVANTAGE}:dr_grpo"),
    "rloo": Advantage(f"{_ADVANTAGE}:rloo"),
    "batch_std": Advantage(f"{_ADVANTAGE}:batch_std", _DEVIATION),
    "reinforce++": Advantage(f"{_ADVANTAGE}:reinforce_pp", _WHITENED),
    "reinforce++-baseline": Advantage(f"{_ADVANTAGE}:reinforce_pp_baseline", _WHITENED),
    "maxrl": Advantage(f"{_ADVANTAGE}:maxrl", of_positive=True),
    "gdpo": Advantage(f"{_ADVANTAGE}:gdpo", _WHITENED, by_function=True),
    "gae": Advantage("", ("lam", "lam_alpha", "whiten", *_DEVIATION), of_critic=True),
    "none": Advantage(f"{_ADVANTAGE}:none", uses_rewards=False),
    "sft": Advantage(f"{_ADVANTAGE}:sft", uses_rewards=False, of_data=True),
}
"""The values of `algorithm.advantage` that are estimators of Shoal's own."""

OWN_ADVANTAGE = Advantage("")
"""The row of a user's function, `file.py:function` in place of an estimator's name. It is loaded by
`shoal.trainer.own_advantage`."""


def advantage_of(name: str) -> Advantage:
    """Returns the row of a value of `algorithm.advantage`: that of the estimator, or OWN_ADVANTAGE
    for the name of a function."""
    return OWN_ADVANTAGE if ":" in name else ADVANTAGES[name]


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(f"{_LOSS}:clipped", _CLIP),
    "gspo": PolicyLoss(f"{_LOSS}:clipped", _CLIP, ratio="sequence", one_gradient=True),
    "gspo-token": PolicyLoss(f"{_LOSS}:clipped", _CLIP, ratio="sequence-token"),
    "cispo": PolicyLoss(f"{_LOSS}:cispo", ("clip_low", "clip_high", "cispo_bound")),
    "gmpo": PolicyLoss(
        f"{_LOSS}:gmpo", ("clip_low", "clip_high"), in_logarithms=True, one_gradient=True
    ),
    "sapo": PolicyLoss(f"{_LOSS}:sapo", ("sapo_positive", "sapo_negative")),
    "dppo": PolicyLoss(f"{_LOSS}:dppo", ("clip_low", "clip_high")),
    "reinforce": PolicyLoss(f"{_LOSS}:reinforce"),
}
"""The values of `algorithm.loss`."""

RATIO_BOUNDS = (*_CLIP, "sapo_positive", "sapo_negative")
"""Keys that have no effect if every ratio is 1, as in a run with one update a step, which therefore
warns if they are set."""

KL_ESTIMATORS: dict[str, KL] = {
    "k1": KL(f"{_LOSS}:k1", in_loss=False, in_reward=True),
    "k2": KL(f"{_LOSS}:k2"),
    "k3": KL(f"{_LOSS}:k3"),
}
"""The values of `algorithm.kl`."""

AGGREGATIONS: dict[str, Part] = {
    "token-mean": Part(f"{_AGGREGATION}:token_mean"),
    "seq-mean-token-mean": Part(f"{_AGGREGATION}:seq_mean_token_mean"),
    "seq-mean-token-sum": Part(f"{_AGGREGATION}:seq_mean_token_sum"),
    "seq-mean-token-sum-norm": Part(
        f"{_AGGREGATION}:seq_mean_token_sum_norm", ("aggregation_tokens",)
    ),
    "prompt-mean": Part(f"{_AGGREGATION}:prompt_mean"),
}
"""The values of `algorithm.aggregation`."""

CORRECTIONS: dict[str, Correction] = {
    # replaced by `derived.correction_of`, which knows whether samples are of older weights
    "auto": Correction(""),
    "none": Correction(""),  # nothing is computed
    "tis": Correction(f"{_LOSS}:tis"),
    "mis": Correction(f"{_LOSS}:mis"),
    "icepop": Correction(f"{_LOSS}:mis", floor=0.5),  # arXiv 2510.18855: masked outside [0.5, cap]
    "direct": Correction("", to_sampler=True),
}
"""The values of `algorithm.correction`."""


def _rejections() -> dict[str, Rejection]:
    """Returns the values of `algorithm.rejection`: `none`, and `LEVEL_ESTIMATOR` for each level
    with each KL estimator, except seq_max_k1."""
    rejections = {"none": Rejection("")}
    for level in ("token", "seq_sum", "seq_mean", "seq_max"):
        for kl, estimator in KL_ESTIMATORS.items():
            if (level, kl) != ("seq_max", "k1"):
                rejections[f"{level}_{kl}"] = Rejection(estimator.function, level=level)
    return rejections


REJECTIONS: dict[str, Rejection] = _rejections()
"""The values of `algorithm.rejection`: each level with each estimator, except seq_max_k1."""
