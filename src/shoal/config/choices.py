"""The registry of an algorithm's parts: by the name that a user sets, a function and what else must
be known of it.

    AlgorithmSection           the names that each key accepts, and the range of its bounds
    help, completion, checks   names, and which keys act on which part
    trainer                    `load`, and the settings that the function takes

Rows name functions as text, so nothing here imports JAX: `--help` and `--dry-run` stay quick.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A function in `shoal.algorithm`, and the keys of `algorithm` that act on it.

    >>> AGGREGATIONS["token-mean"].load()
    <function token_mean at ...>
    """

    function: str  # `module:function`
    reads: tuple[str, ...] = ()

    def load(self) -> Callable[..., Any]:
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)

    def settings(self, section: Any) -> dict[str, Any]:
        """The values of the keys that it reads, by name: policy losses and advantages take them as
        keywords."""
        return {key: getattr(section, key) for key in self.reads}


@dataclass(frozen=True)
class Advantage(Part):
    """An advantage estimator."""

    uses_rewards: bool = True  # else the teacher is the only signal
    # normalises each reward function by itself, so a KL in the reward would cancel
    by_function: bool = False
    of_positive: bool = False  # defined for rewards of 0 or more only
    of_data: bool = False  # the completions are the data's own answers


@dataclass(frozen=True)
class PolicyLoss(Part):
    """A policy loss; `ratio` is a level of `policy_log_ratio`."""

    ratio: str = "token"
    in_logarithms: bool = False  # clip_low bounds the log-ratio, so it may exceed 1
    # all tokens of a completion have one gradient: a bonus by token is averaged
    one_gradient: bool = False


@dataclass(frozen=True)
class KL(Part):
    """A KL estimator, and where it may stand."""

    in_loss: bool = True  # as a term of the loss its gradient regularises
    in_reward: bool = False  # subtracted from the reward it is unbiased


@dataclass(frozen=True)
class Correction(Part):
    """An importance weight."""

    floor: float = 0.0  # its own lower bound
    to_sampler: bool = False  # in place of a weight, the policy's ratio is to the sampler

    def lower_bound(self, correction_floor: float) -> float:
        """The lower bound of the weight: `correction_floor`, or with -1 its own."""
        return self.floor if correction_floor == -1 else correction_floor


@dataclass(frozen=True)
class Rejection(Part):
    """A divergence of trainer and sampler that takes tokens out of the loss; `function` is an
    estimator of it."""

    level: str = "token"  # or what a completion's tokens become: seq_sum, seq_mean, seq_max

    def bounds(self, cap: float, floor: float) -> tuple[float, float]:
        """The least and largest value that keeps a token. k1 is -log w and is bounded by w: floor
        <= w <= cap, with floor -1 for 1 / cap; the others have no lower bound."""
        if not self.function.endswith(":k1"):
            return -math.inf, cap
        floor = 1 / cap if floor == -1 else floor
        return -math.log(cap), -math.log(floor) if floor else math.inf


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
    "none": Advantage(f"{_ADVANTAGE}:none", uses_rewards=False),
    "sft": Advantage(f"{_ADVANTAGE}:sft", uses_rewards=False, of_data=True),
}
"""By the names of `algorithm.advantage`."""

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(f"{_LOSS}:clipped", _CLIP),
    "gspo": PolicyLoss(f"{_LOSS}:clipped", _CLIP, ratio="sequence", one_gradient=True),
    "gspo-token": PolicyLoss(f"{_LOSS}:clipped", _CLIP, ratio="sequence-token"),
    "cispo": PolicyLoss(f"{_LOSS}:cispo", ("clip_low", "clip_high", "cispo_bound")),
    "gmpo": PolicyLoss(
        f"{_LOSS}:gmpo", ("clip_low", "clip_high"), in_logarithms=True, one_gradient=True
    ),
    "sapo": PolicyLoss(f"{_LOSS}:sapo", ("sapo_positive", "sapo_negative")),
    "reinforce": PolicyLoss(f"{_LOSS}:reinforce"),
}
"""By the names of `algorithm.loss`."""

RATIO_BOUNDS = (*_CLIP, "sapo_positive", "sapo_negative")
"""Numbers that change nothing where every ratio is 1: a run with one update a step warns of
them."""

KL_ESTIMATORS: dict[str, KL] = {
    "k1": KL(f"{_LOSS}:k1", in_loss=False, in_reward=True),
    "k2": KL(f"{_LOSS}:k2"),
    "k3": KL(f"{_LOSS}:k3"),
}
"""By the names of `algorithm.kl`."""

AGGREGATIONS: dict[str, Part] = {
    "token-mean": Part(f"{_AGGREGATION}:token_mean"),
    "seq-mean-token-mean": Part(f"{_AGGREGATION}:seq_mean_token_mean"),
    "seq-mean-token-sum": Part(f"{_AGGREGATION}:seq_mean_token_sum"),
    "seq-mean-token-sum-norm": Part(
        f"{_AGGREGATION}:seq_mean_token_sum_norm", ("aggregation_tokens",)
    ),
    "prompt-mean": Part(f"{_AGGREGATION}:prompt_mean"),
}
"""By the names of `algorithm.aggregation`."""

CORRECTIONS: dict[str, Correction] = {
    # one of the others, once it is known whether samples are of older weights
    "auto": Correction(""),
    "none": Correction(""),  # nothing is computed
    "tis": Correction(f"{_LOSS}:tis"),
    "mis": Correction(f"{_LOSS}:mis"),
    "icepop": Correction(f"{_LOSS}:mis", floor=0.5),  # arXiv 2510.18855: masked outside [0.5, cap]
    "direct": Correction("", to_sampler=True),
}
"""By the names of `algorithm.correction`."""


def _rejections() -> dict[str, Rejection]:
    rejections = {"none": Rejection("")}
    for level in ("token", "seq_sum", "seq_mean", "seq_max"):
        for kl, estimator in KL_ESTIMATORS.items():
            if (level, kl) != ("seq_max", "k1"):
                rejections[f"{level}_{kl}"] = Rejection(estimator.function, level=level)
    return rejections


REJECTIONS: dict[str, Rejection] = _rejections()
"""By the names of `algorithm.rejection`."""
