"""`recipe=` gives the other system's loss: each is written here once more in NumPy from that
system's own definition, on padded arrays [B, T] as it has them, and compared with Shoal's in value
and gradient. `algorithm=` composes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from proof_data import Update, by_shoal, layout

from shoal.algorithm.aggregation import token_weights
from shoal.checks.settings import algorithm_warnings
from shoal.config.choices import ADVANTAGES, AGGREGATIONS, POLICY_LOSSES
from shoal.config.foreign import front_end
from shoal.config.key import keys_of, leaves_of
from shoal.config.merge import compose
from shoal.config.preset_files import PRESETS, PRESETS_OF_SYSTEMS
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.train import Config
from shoal.records import ShoalError
from shoal.trainer.loss import make_objective
from shoal.trainer.step_table import step_advantages

RECIPES = sorted(file.stem for file in (PRESETS_OF_SYSTEMS / "recipe").glob("*.yaml"))
ALGORITHMS = sorted(file.stem for file in (PRESETS / "algorithm").glob("*.yaml"))
P, G, T = 3, 4, 6


@dataclass(frozen=True)
class Batch:
    """What every system computes its loss from: B = P x G rows, padded to T."""

    old_logprobs: np.ndarray
    sampler: np.ndarray
    ref_logprobs: np.ndarray
    entropy: np.ndarray
    mask: np.ndarray
    rewards: np.ndarray  # [B]
    beta: float
    lp: np.ndarray  # where stop-gradients stand

    @property
    def grouped(self) -> np.ndarray:
        return self.rewards.reshape(P, G)


def draw(seed: int, beta: float) -> Batch:
    rng = np.random.default_rng(seed)
    old_logprobs = -0.2 - rng.exponential(1.0, (P * G, T))
    lp, ref_logprobs, sampler = (
        old_logprobs + spread * rng.standard_normal(old_logprobs.shape)
        for spread in (0.3, 0.5, 0.3)
    )
    mask = np.arange(T) < rng.integers(1, T + 1, (P * G, 1))
    rewards = np.tile([0.0, 1.0, 1.0, 0.25], P) * np.repeat([1.0, 1.0, 3.0], G)
    return Batch(
        old_logprobs,
        sampler,
        ref_logprobs,
        rng.exponential(1.0, old_logprobs.shape),
        mask,
        rewards,
        beta,
        lp,
    )


Loss = Callable[[Batch, np.ndarray], Any]
"""(batch, log-probs[B, T], perhaps complex) -> the loss. Minima and clips of complex numbers go by
the real part."""


def clip(x: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.where(np.real(x) < low, low, np.where(np.real(x) > high, high, x))


def larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(np.real(a) >= np.real(b), a, b)


def trl(b: Batch, lp: np.ndarray) -> Any:
    """trl/trainer/grpo_trainer.py 1.16.0: scale_rewards "group", loss_type "dapo",
    use_bias_correction_kl, and vLLM's "sequence_mask" with clip_max 3."""
    deviation = b.grouped.std(axis=1, ddof=1, keepdims=True)
    advantage = ((b.grouped - b.grouped.mean(axis=1, keepdims=True)) / (deviation + 1e-4)).reshape(
        -1, 1
    )
    ratio = np.exp(lp - b.old_logprobs)
    per_token = larger(-ratio * advantage, -clip(ratio, 0.8, 1.2) * advantage)
    sequence = np.exp(((b.old_logprobs - b.sampler) * b.mask).sum(axis=1, keepdims=True))
    per_token = per_token * np.where(sequence > 3.0, 0.0, sequence)
    if b.beta:
        per_token = (
            per_token + b.beta * (np.exp(b.ref_logprobs - lp) - (b.ref_logprobs - lp) - 1) * ratio
        )
    return (per_token * b.mask).sum() / b.mask.sum()


def verl(b: Batch, lp: np.ndarray) -> Any:
    """verl/trainer/ppo/core_algos.py 0.9.1: grpo outcome advantage, the vanilla policy loss with
    clip_ratio_c 3, low_var_kl, token-mean."""
    scores = b.grouped - b.grouped.mean(axis=1, keepdims=True)
    advantage = (scores / (b.grouped.std(axis=1, ddof=1, keepdims=True) + 1e-6)).reshape(-1, 1)
    ratio = np.exp(clip(lp - b.old_logprobs, -20, 20))
    first = larger(-advantage * ratio, -advantage * clip(ratio, 0.8, 1.2))
    capped = -larger(-first, -(-advantage * 3.0 + 0 * ratio))
    policy = np.where(advantage < 0, capped, first)
    x = clip(b.ref_logprobs - lp, -20, 20)
    kl = clip(np.exp(x) - x - 1, -10, 10)
    return (policy * b.mask).sum() / b.mask.sum() + b.beta * (kl * b.mask).sum() / b.mask.sum()


def maxtext(b: Batch, lp: np.ndarray) -> Any:
    """src/maxtext/experimental/rl/grpo_trainer.py: population deviation with 1e-8, k3, means of
    means."""
    deviation = b.grouped.std(axis=1)
    advantage = (b.rewards - np.repeat(b.grouped.mean(axis=1), G)) / (
        np.repeat(deviation, G) + 1e-8
    )
    ratio = np.exp(lp - b.old_logprobs)
    tokens = larger(-ratio * advantage[:, None], -clip(ratio, 0.8, 1.2) * advantage[:, None])
    tokens = tokens + b.beta * (np.exp(b.ref_logprobs - lp) - (b.ref_logprobs - lp) - 1)
    return ((tokens * b.mask).sum(axis=1) / b.mask.sum(axis=1)).mean()


def tunix(b: Batch, lp: np.ndarray) -> Any:
    """tunix/rl/algo_core.py and tunix/rl/common.py 0.1.7: kl_loss_mode "kl",
    sequence-mean-token-mean."""
    deviation = np.repeat(b.grouped.std(axis=1, ddof=1), G)
    advantage = ((b.rewards - np.repeat(b.grouped.mean(axis=1), G)) / (deviation + 1e-6))[:, None]
    ratio = np.exp(clip(lp - b.old_logprobs, -20, 20))
    tokens = larger(-advantage * ratio, -advantage * clip(ratio, 0.8, 1.2))
    policy = ((tokens * b.mask).sum(axis=1) / b.mask.sum(axis=1)).sum() / len(b.rewards)
    kl = (((lp - b.ref_logprobs) * b.mask).sum(axis=1) / b.mask.sum(axis=1)).sum() / len(b.rewards)
    return policy + b.beta * kl


def torchrl(b: Batch, lp: np.ndarray) -> Any:
    """torchrl/objectives/llm/grpo.py: MCAdvantage with a least deviation of 1e-6, the ratio to the
    sampler, clip in logarithms, token_mean, k3 to the sampler of 0.01, entropy bonus. (Its own
    divergences are means over padding too, which Shoal does not follow.)"""
    assert not b.beta
    deviation = np.maximum(b.grouped.std(axis=1, ddof=1, keepdims=True), 1e-6)
    advantage = ((b.grouped - b.grouped.mean(axis=1, keepdims=True)) / deviation).reshape(-1, 1)
    log_weight = lp - b.sampler
    bounded = clip(log_weight, np.log1p(-0.2), np.log1p(0.2))
    objective = larger(-np.exp(log_weight) * advantage, -np.exp(bounded) * advantage)
    kl = np.exp(b.sampler - lp) - (b.sampler - lp) - 1
    return ((objective + 0.01 * kl - 1e-4 * b.entropy) * b.mask).sum() / b.mask.sum()


def scalerl(b: Batch, lp: np.ndarray) -> Any:
    """arXiv 2510.13786: CISPO with eps_max 5 and the ratio to the policy that drew the sample,
    advantages over their deviation in the batch, prompt average."""
    assert not b.beta
    centred = (b.grouped - b.grouped.mean(axis=1, keepdims=True)).reshape(-1, 1)
    advantage = centred / (centred.std(ddof=1) + 1e-4)
    tokens = -np.minimum(np.exp(b.lp - b.sampler), 5.0) * advantage * lp
    by_prompt, lengths = (
        (x * b.mask).reshape(P, -1).sum(axis=1) for x in (tokens, np.ones_like(b.lp))
    )
    return (by_prompt / lengths).mean()


def prime_rl(b: Batch, lp: np.ndarray) -> Any:
    """src/prime_rl/trainer/rl/loss.py at 559b4477: default_loss_fn, the reward minus its group's
    mean. Groups without variance are taken out of both sums. (Its square of the log-ratio, weight
    0.001, is k3 with 0.002 here, which differs in third order.)"""
    assert not b.beta
    advantage = (b.grouped - b.grouped.mean(axis=1, keepdims=True)).reshape(-1, 1)
    log_ratio = lp - b.sampler
    grown = np.exp(b.lp) - np.exp(b.sampler)
    dropped = np.where(advantage > 0, grown > 0.2, grown < -0.2)
    policy = np.where(dropped, 0.0, advantage * np.exp(log_ratio))
    kl = np.exp(-log_ratio) + log_ratio - 1
    return ((-policy + 0.002 * kl) * b.mask).sum() / b.mask.sum()


SYSTEMS: dict[str, Loss] = {
    "trl": trl,
    "verl": verl,
    "maxtext": maxtext,
    "tunix": tunix,
    "torchrl": torchrl,
    "prime-rl": prime_rl,
    "scalerl": scalerl,
}
WITH_KL = ("trl", "verl", "maxtext", "tunix")
ONE_UPDATE = ("scalerl",)
"""Held as the recipe is, with one update a step; the others with several, where their bounds
act."""


def by_recipe(a: AlgorithmSection, b: Batch, use_old: bool = True) -> tuple[float, np.ndarray]:
    """Shoal's loss and its gradient, [B, T], with a recipe's settings, in float32. `use_old`: as if
    several updates were made; else as the settings say."""
    advantages = step_advantages(a, b.grouped, np.ones((P, G), bool), b.mask.sum(1).reshape(P, G))
    rows = []
    for i in range(P * G):
        rows.append(
            oracle.Completion(
                b.lp[i][b.mask[i]],
                b.old_logprobs[i][b.mask[i]],
                b.ref_logprobs[i][b.mask[i]],
                b.mask[i][b.mask[i]],
                advantages[i // G, i % G],
                b.sampler[i][b.mask[i]],
                i // G,
            )
        )
    grouped = [rows[p * G : (p + 1) * G] for p in range(P)]
    entropies = []
    for p in range(P):
        entropies.append([b.entropy[p * G + g][b.mask[p * G + g]] for g in range(G)])
    every = np.ones((P, G), bool)
    update = Update(grouped, entropies, every, every, ~every)
    objective = replace(make_objective(a), use_old=True) if use_old else make_objective(a)
    got = by_shoal(layout(update, per_row=2, dtype=np.float32), objective)
    weights = token_weights(
        AGGREGATIONS[a.aggregation].load(), update.lengths, every, every, a.aggregation_tokens or T
    )
    gradient = np.zeros((P * G, T))
    for (p, g), own in got.gradients(weights)[0].items():
        gradient[p * G + g, : len(own)] = own
    return got.loss(weights), gradient


@pytest.mark.parametrize(
    ("name", "beta"), [*((name, 0.0) for name in RECIPES), *((name, 0.04) for name in WITH_KL)]
)
def test_a_recipe_gives_that_systems_loss(name: str, beta: float):
    config, _ = compose("train", [f"recipe={name}", f"algorithm.kl_coef={beta}"])
    for seed in (1, 2):
        b = draw(seed, beta)
        value, gradient = by_recipe(config.algorithm, b, use_old=name not in ONE_UPDATE)
        want = SYSTEMS[name](b, b.lp)
        assert abs(want) > 1e-3 and value == pytest.approx(want, rel=1e-5, abs=1e-6)
        slope = oracle.derivative(lambda lp, b=b: SYSTEMS[name](b, lp), b.lp)
        assert (np.abs(slope) > 1e-4).sum() > 20
        np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)


def test_the_data_reach_what_tells_systems_apart():
    """Tokens clipped on both sides, sequences over the cap, and no two systems with the same
    loss."""
    b = draw(1, 0.0)
    ratio = np.exp(b.lp - b.old_logprobs)[b.mask]
    assert (ratio < 0.8).sum() > 3 and (ratio > 1.2).sum() > 3
    sequence = np.exp(((b.old_logprobs - b.sampler) * b.mask).sum(axis=1))
    assert (sequence > 3).any() and (sequence < 3).any()
    losses = [SYSTEMS[name](b, b.lp) for name in RECIPES]
    different = np.abs(np.subtract.outer(losses, losses)) + np.eye(len(losses))
    assert different.min() > 1e-5 * np.abs(losses).max()


def test_verls_dual_clip_and_clamps_are_reached():
    b = draw(1, 0.04)
    b = replace(
        b,
        lp=b.lp + 12.0 * (np.arange(T) == 0),
        ref_logprobs=b.ref_logprobs - 15.0 * (np.arange(T) == 1),
    )
    config, _ = compose("train", ["recipe=verl", "algorithm.kl_coef=0.04"])
    value, gradient = by_recipe(config.algorithm, b)
    assert value == pytest.approx(verl(b, b.lp), rel=1e-5)
    np.testing.assert_allclose(
        gradient, oracle.derivative(lambda lp: verl(b, lp), b.lp), rtol=1e-4, atol=1e-6
    )


def test_scalerls_samples_are_weighed_against_the_sampler_up_to_5():
    """Samples up to 8 versions old: as the recipe is, with one update a step."""
    b = draw(1, 0.0)
    b = replace(b, sampler=b.sampler - 1.8 * (np.arange(T) % 2))
    ratio = np.exp(b.lp - b.sampler)[b.mask]
    assert (ratio > 5).sum() > 3 and (ratio < 0.8).sum() > 3
    config, _ = compose("train", ["recipe=scalerl"])
    assert (
        config.train.max_staleness == 8
        and config.algorithm.num_epochs * config.algorithm.num_minibatches == 1
    )
    value, gradient = by_recipe(config.algorithm, b, use_old=False)
    assert value == pytest.approx(scalerl(b, b.lp), rel=1e-5)
    np.testing.assert_allclose(
        gradient, oracle.derivative(lambda lp: scalerl(b, lp), b.lp), rtol=1e-4, atol=1e-6
    )


PPO = {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 0.0}
PAPERS: dict[str, dict[str, Any]] = {
    # MiniMax-M1: eps_low of no effect, no number for eps_high, no divergence; 16 rounds of
    # off-policy updates.
    "cispo": {
        "advantage": "grpo",
        "loss": "cispo",
        **PPO,
        "cispo_bound": "paper",
        "aggregation": "token-mean",
        "kl_coef": 0.0,
        "num_minibatches": 16,
    },
    # DAPO, section 4.1: 512 prompts in mini-batches of 512 of their 8,192 completions, 0.2 and
    # 0.28.
    "dapo": {
        "advantage": "grpo",
        "loss": "grpo",
        **PPO,
        "clip_high": 0.28,
        "aggregation": "token-mean",
        "kl_coef": 0.0,
        "dynamic_sampling": True,
        "zero_std_groups": "exclude",
        "num_minibatches": 16,
    },
    "dr_grpo": {
        "advantage": "dr_grpo",
        "loss": "grpo",
        **PPO,
        "aggregation": "seq-mean-token-sum-norm",
        "kl_coef": 0.0,
    },
    "gdpo": {"advantage": "gdpo"},
    # GiGPO, appendix E: gamma 0.95, KL coefficient 0.01.
    "gigpo": {
        "advantage": "grpo",
        "credit": "state",
        "discount": 0.95,
        "loss": "grpo",
        **PPO,
        "kl": "k3",
        "kl_coef": 0.01,
        "kl_placement": "loss",
    },
    # GMPO: (e^-0.4, e^0.4); eight updates a step.
    "gmpo": {
        "advantage": "grpo",
        "loss": "gmpo",
        **PPO,
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregation": "seq-mean-token-mean",
        "num_minibatches": 8,
        "kl_coef": 0.0,
    },
    # DeepSeekMath, section 4.2: coefficient 0.04, a single update after each exploration.
    "grpo": {
        "advantage": "grpo",
        "loss": "grpo",
        **PPO,
        "aggregation": "seq-mean-token-mean",
        "kl": "k3",
        "kl_coef": 0.04,
        "kl_placement": "loss",
        "num_epochs": 1,
        "num_minibatches": 1,
    },
    # GSPO, section 5.1: 3e-4 and 4e-4, each batch in four mini-batches.
    **{
        name: {
            "advantage": "grpo",
            "loss": name,
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "clip_dual": 0.0,
            "aggregation": "seq-mean-token-mean",
            "kl_coef": 0.0,
            "num_minibatches": 4,
        }
        for name in ("gspo", "gspo-token")
    },
    # LUSPO: GSPO with sums over tokens in place of means.
    "luspo": {
        "advantage": "grpo",
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "clip_dual": 0.0,
        "aggregation": "seq-mean-token-sum",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
    "lite_ppo": {"advantage": "batch_std", "loss": "grpo", **PPO, "aggregation": "token-mean"},
    "maxrl": {"advantage": "maxrl"},
    "reinforce++": {
        "advantage": "reinforce++",
        "loss": "grpo",
        **PPO,
        "kl": "k1",
        "kl_placement": "reward",
    },
    # PPO, section 6.1: clip 0.2, lambda 0.95. There 32 mini-batches of 64 of 2,048 steps; 4 as
    # TRL and verl usually have.
    "ppo": {
        "advantage": "gae",
        "lam": 0.95,
        "whiten": True,
        "loss": "grpo",
        **PPO,
        "aggregation": "token-mean",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
    "reinforce++-baseline": {
        "advantage": "reinforce++-baseline",
        "loss": "grpo",
        **PPO,
        "kl": "k2",
        "kl_placement": "loss",
    },
    "rloo": {
        "advantage": "rloo",
        "loss": "grpo",
        **PPO,
        "aggregation": "seq-mean-token-sum",
        "kl": "k1",
        "kl_placement": "reward",
        "num_epochs": 1,
        "num_minibatches": 1,
    },
    # SAPO, section 5: 1.0 and 1.05, four mini-batches.
    "sapo": {
        "advantage": "grpo",
        "loss": "sapo",
        "clip_dual": 0.0,
        "sapo_positive": 1.0,
        "sapo_negative": 1.05,
        "aggregation": "seq-mean-token-mean",
        "num_minibatches": 4,
    },
    "sft": {"advantage": "sft", "loss": "reinforce", "aggregation": "token-mean", "kl_coef": 0.0},
}
"""What each paper sets, of the keys that the loss reads; where it names no clip range, Shoal's
own."""


def test_each_algorithm_sets_what_its_paper_does():
    import yaml

    assert sorted(PAPERS) == ALGORITHMS
    for name, paper in PAPERS.items():
        values = yaml.safe_load(
            (PRESETS / "algorithm" / f"{name}.yaml").read_text(encoding="utf-8")
        )
        assert values.pop("algorithm") == paper, name
        if name == "sft":  # which is no paper's: the rest is what differs from training on samples
            assert values.pop("batch") == {"group_size": 1} and values.pop("optimizer") == {
                "lr": 2e-5
            }
            assert {*values} == {"task", "sampling", "train"}
            continue
        # DAPO, section 4.1: a cache of 4,096 tokens after 16,384, a fifth of all 20,480.
        if name == "dapo":
            penalty = {"reward": {"overlong_buffer_tokens": -1, "overlong_penalty": 1.0}}
        else:
            penalty = {}
        assert values == penalty, name
        settings = compose("train", [f"algorithm={name}"])[0].algorithm
        assert {key: getattr(settings, key) for key in paper} == paper


RECIPE_KEYS = (
    "advantage",
    "std_ddof",
    "std_eps",
    "std_eps_mode",
    "loss",
    "clip_low",
    "clip_high",
    "clip_dual",
    "cispo_bound",
    "kl",
    "kl_coef",
    "kl_placement",
    "kl_clamp_input",
    "kl_clamp_value",
    "kl_weighted",
    "entropy_coef",
    "aggregation",
    "correction",
    "correction_level",
    "correction_cap",
    "mask_truncated",
    "zero_std_groups",
    "num_epochs",
    "num_minibatches",
)
OWN = (0.2, 0.2, 0.0, "paper")
NO_KL = ("k3", 0.0, "loss", 0.0, 0.0, False)
ALONE = ("none", "token", 2.0, False, "include", 1)
DEFAULTS_OF: dict[str, tuple[Any, ...]] = {
    "trl": (
        "grpo",
        1,
        1e-4,
        "add",
        "grpo",
        0.2,
        0.2,
        0.0,
        "absolute",
        "k3",
        0.0,
        "loss",
        0.0,
        0.0,
        True,
        0.0,
        "token-mean",
        "mis",
        "sequence",
        3.0,
        False,
        "include",
        1,
        1,
    ),
    # 1,024 prompts in mini-batches of 256
    "verl": (
        "grpo",
        1,
        1e-6,
        "add",
        "grpo",
        0.2,
        0.2,
        3.0,
        "both",
        "k3",
        0.0,
        "loss",
        20.0,
        10.0,
        False,
        0.0,
        "token-mean",
        *ALONE,
        4,
    ),
    "maxtext": (
        "grpo",
        0,
        1e-8,
        "add",
        "grpo",
        *OWN,
        "k3",
        0.08,
        "loss",
        0.0,
        0.0,
        False,
        0.0,
        "seq-mean-token-mean",
        *ALONE,
        1,
    ),
    "tunix": (
        "grpo",
        1,
        1e-6,
        "add",
        "grpo",
        *OWN,
        "k1",
        0.08,
        "loss",
        0.0,
        0.0,
        False,
        0.0,
        "seq-mean-token-mean",
        *ALONE,
        1,
    ),
    "torchrl": (
        "grpo",
        1,
        1e-6,
        "max",
        "grpo",
        *OWN,
        *NO_KL,
        1e-4,
        "token-mean",
        "direct",
        *ALONE[1:],
        1,
    ),
    "prime-rl": (
        "dr_grpo",
        1,
        1e-4,
        "add",
        "dppo",
        *OWN,
        *NO_KL,
        0.0,
        "token-mean",
        "direct",
        *ALONE[1:-2],
        "exclude",
        1,
        1,
    ),
    "scalerl": (
        "reinforce++-baseline",
        1,
        1e-4,
        "add",
        "cispo",
        0.2,
        5.0,
        0.0,
        "absolute",
        *NO_KL,
        0.0,
        "prompt-mean",
        "tis",
        "token",
        5.0,
        False,
        "exclude",
        1,
        1,
    ),
}
"""Each system's defaults, of the keys that the loss reads."""


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_sets_what_its_system_does(name: str):
    config, _ = compose("train", [f"recipe={name}"])
    want = dict(zip(RECIPE_KEYS, DEFAULTS_OF[name], strict=True))
    assert {key: getattr(config.algorithm, key) for key in RECIPE_KEYS} == want


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_algorithm_over_a_recipe_has_its_own_bounds(recipe: str):
    """A bound of the recipe's loss means another thing to the algorithm's."""
    bounds = ("clip_low", "clip_high", "clip_dual", "cispo_bound")
    for name, paper in PAPERS.items():
        mixed = compose(
            "train", [f"recipe={recipe}", f"algorithm={name}", "batch.prompts_per_step=1024"]
        )[0]
        alone = compose("train", [f"algorithm={name}"])[0].algorithm
        reads = {"cispo": bounds, "sapo": ("clip_dual",), "reinforce": ()}.get(
            paper.get("loss", ""), bounds[:3]
        )
        for key in reads if "loss" in paper else ():
            assert getattr(mixed.algorithm, key) == getattr(alone, key), f"{name}: {key}"
        assert not [text for _, text in algorithm_warnings(mixed) if "clip" in text], name


def test_every_recipe_and_algorithm_is_proven_or_named():
    assert set(SYSTEMS) == set(RECIPES)
    sections = []
    for name in ALGORITHMS:
        sections.append(compose("train", [f"algorithm={name}"])[0].algorithm)
    # The loss of a system that is no paper's algorithm here is in its recipe.
    recipes = [compose("train", [f"recipe={name}"])[0].algorithm for name in RECIPES]
    assert {a.loss for a in (*sections, *recipes)} == set(POLICY_LOSSES)
    assert {a.advantage for a in sections} == set(ADVANTAGES) - {"none"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_head_calls_nothing_missing_that_works(name: str):
    text = (PRESETS_OF_SYSTEMS / "recipe" / f"{name}.yaml").read_text(encoding="utf-8")
    head = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    missing = re.sub(
        r"\([^()]*\)", "", head.partition("No counterpart here:")[2].partition(". ")[0]
    )
    flags = {
        known.rpartition(".")[2]
        for known, (flag, *_) in front_end().flags_of(Config).items()
        if flag.keys and "steps" not in flag.keys and not flag.meaning.startswith("only ")
    }
    assert (
        not flags & set(re.findall(r"[a-z_]{4,}", missing))
        and "sequence-mean-token-scale" not in missing
    )


@pytest.mark.parametrize("folder", ["recipe", "algorithm"])
def test_each_file_has_a_head_and_holds_keys_alone(folder: str):
    import yaml

    for file in sorted(
        ({"recipe": PRESETS_OF_SYSTEMS, "algorithm": PRESETS}[folder] / folder).glob("*.yaml")
    ):
        text = file.read_text(encoding="utf-8")
        assert text.startswith("# ") and max(map(len, text.splitlines())) <= 120
        values = yaml.safe_load(text)
        names = {name for name, _ in leaves_of(Config, values)}
        theirs = set(front_end().flags_of(Config)) if folder == "recipe" else set()
        assert names and not names - set(keys_of(Config)) - theirs, file.name
        if folder == "algorithm" and file.stem != "sft":
            assert {"algorithm"} <= set(values) <= {"algorithm", "reward"} and "arXiv" in text


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo"])
def test_ones_own_keys_lie_over_an_algorithm(name: str):
    config, resolved = compose(
        "train", [f"algorithm={name}", "algorithm.clip_high=0.5", "algorithm.num_minibatches=2"]
    )
    assert (config.algorithm.clip_high, config.algorithm.num_minibatches) == (0.5, 2)
    assert config.algorithm.loss == {"dapo": "grpo"}.get(name, name)
    assert any(f"algorithm={name}" in note for note in resolved.notes)


def test_an_algorithm_lies_over_a_recipe():
    config, _ = compose("train", ["recipe=verl", "algorithm=gspo"])
    assert config.algorithm.loss == "gspo" and config.algorithm.clip_high == 4e-4
    assert config.optimizer.weight_decay == 0.01 and config.algorithm.clip_dual == 0.0


def test_an_unknown_recipe_names_the_ones_there_are():
    with pytest.raises(ShoalError, match="maxtext, prime-rl, scalerl, torchrl, trl, tunix, verl"):
        compose("train", ["recipe=ver"])


def test_presets_are_in_the_package():
    assert Path(PRESETS_OF_SYSTEMS, "recipe", "trl.yaml").is_file() and len(ALGORITHMS) >= 12
