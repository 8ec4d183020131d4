"""Flags compute what theirs compute: each system's own code was run on the inputs in `figures/`, and its loss,
advantages and gradients are compared with Shoal's under the same flags.

What differs is in DIFFERENT, with the reason; what a flag asks for that has no counterpart is refused, and in REFUSED.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from proof_data import Update, by_shoal, layout

from shoal.algorithm.aggregation import token_weights
from shoal.config.loading import compose
from shoal.trainer.step import Objective
from shoal.trainer.step_table import step_advantages
from shoal.types import ShoalError

FIGURES = Path(__file__).parent / "figures"
SYSTEMS = ("trl", "verl")
P, G, C = 4, 4, 6


@cache
def recorded(system: str) -> dict[str, Any]:
    return json.loads((FIGURES / f"{system}.json").read_text())


@cache
def inputs(name: str) -> dict[str, Any]:
    sets = json.loads((FIGURES / "inputs.json").read_text())
    chosen = sets[name]
    return {**sets[chosen["same_as"]], **chosen} if "same_as" in chosen else chosen


def words_of(system: str, case: dict[str, Any]) -> list[str]:
    """The flags, over the system's own defaults; without those that say who draws and how figures were taken."""
    flags = [flag.lstrip("+") for flag in [*recorded(system)["base_flags"], *case["flags"]]]
    others = ("use_vllm", "algorithm.gdpo_reward")
    words = [f"recipe={system}", *(flag for flag in flags if not flag.startswith(others))]
    if system == "trl" and not uses_vllm(case):
        words.append("vllm_importance_sampling_correction=false")  # the recipe's is what TRL does when vLLM draws
    return words


def uses_vllm(case: dict[str, Any]) -> bool:
    return "use_vllm=True" in case["flags"]


def by_flags(system: str, case: dict[str, Any]) -> tuple[float, np.ndarray, np.ndarray]:
    """Shoal's loss, advantages [P, G] and gradient [P, G, C] under a case's flags."""
    words = words_of(system, case)
    config, _ = compose("train", words)
    a, given = config.algorithm, inputs(case["inputs"])
    parts = np.array([[[np.nan if x is None else x for x in row] for row in rows]
                      for rows in given["rewards"].values()], np.float64)
    weighed = any("gdpo_reward_weights" in flag for flag in case["flags"])
    own = a.advantage == "gdpo" and system == "verl" and not weighed
    scale = dict(zip(given["rewards"], [1.0, 1.0] if own else given["reward_weights"], strict=True))
    valid = ~np.isnan(parts).all(axis=0)
    rewards = np.where(valid, np.nansum(parts * np.array(given["reward_weights"])[:, None, None], axis=0), np.nan)
    lengths, cut = np.array(given["lengths"]), np.array(given["truncated"]) & a.mask_truncated
    old, lp, ref, sampler, entropy = (np.array(given[name], np.float64) for name in (
        "old_logprobs", "logprobs", "ref_logprobs", "sampler_logprobs", "entropies"))
    with_weights = uses_vllm(case) and a.correction != "none"  # only then, or for several updates, TRL keeps old ones
    use_old = Objective.of(a).use_old or with_weights or system == "verl"
    if a.kl_placement == "reward" and a.kl_coef:
        log_ratio = np.where(np.array(given["mask"], bool), old - ref, 0.0)
        rewards = rewards - a.kl_coef * {"k1": log_ratio, "k2": log_ratio**2 / 2,
                                         "k3": np.clip(np.exp(-log_ratio) - 1 + log_ratio, -10, 10)}[a.kl].sum(-1)
    components = [{name: parts[f, p] for f, name in enumerate(scale)} for p in range(P)]
    advantages = step_advantages(a, rewards, valid, lengths, components, scale)
    rows = [[oracle.Completion(lp[p, g, :n], old[p, g, :n], ref[p, g, :n], np.ones(n, bool), advantages[p, g],
                               sampler[p, g, :n], p) for g, n in enumerate(lengths[p])] for p in range(P)]
    entropies = [[entropy[p, g, :n] for g, n in enumerate(lengths[p])] for p in range(P)]
    update = Update(rows, entropies, valid, np.ones((P, G), bool), cut)
    got = by_shoal(layout(update, dtype=np.float32, grid=(8, 2, C)), replace(Objective.of(a), use_old=use_old))
    weights = token_weights(a.aggregation, update.lengths, valid, np.ones((P, G), bool),
                            a.aggregation_tokens or config.sampling.max_completion_tokens)
    gradient = np.zeros((P, G, C))
    for (p, g), own in got.gradients(weights)[0].items():
        gradient[p, g, : len(own)] = own
    return got.loss(weights), advantages, gradient


def differences(system: str, case: dict[str, Any]) -> list[str]:
    """Which of loss, advantages and gradient are not the system's."""
    loss, advantages, gradient = by_flags(system, case)
    mask = np.array(inputs(case["inputs"])["mask"], bool)
    found = []
    if not np.isclose(loss, case["loss"], rtol=1e-5, atol=2e-6):
        found.append("loss")
    tables = recorded(system)["tables"]
    theirs = np.array(tables[case["advantages"]], np.float64)
    if theirs.shape == advantages.shape and not np.allclose(advantages, theirs, rtol=1e-5, atol=1e-6):
        found.append("advantages")
    if not np.allclose(gradient[mask], np.ravel(tables[case["gradient"]]), rtol=1e-4, atol=2e-6):
        found.append("gradient")
    return found


def cases(system: str) -> list[dict[str, Any]]:
    return [case for case in recorded(system)["cases"] if {"loss", "advantages", "gradient"} <= set(case)]


DIFFERENT: dict[str, tuple[str, str]] = {
    "trl": (r"unscorable-.*|entropy-(grpo|dr_grpo|luspo)",
            "completions that nobody could judge stay in TRL's denominators; its entropy bonus is a mean over tokens "
            "whatever loss_type says"),
    "verl": (r"(vanilla|gspo|cispo|kl_loss|entropy|micro_batch-2)-seq-mean-token-sum-norm|clip_ratio-alone|"
             r"kl_in_reward-reinforce_plus_plus|kl_loss-(sapo|geo_mean)-.*|"
             r"entropy-kl-sapo|rollout_is-geo_mean|micro_batch-4-geo_mean",
             "without loss_scale_factor the divisor is a micro-batch's longest response, here max_response_length; "
             "clip_ratio alone has no effect beside verl's own two bounds; reinforce++ takes each token's remaining "
             "divergence off; sapo and geo_mean have another mean than the terms beside them, geo_mean one weight a "
             "completion, and a sum over micro-batches"),
}
"""System -> the cases whose numbers are not theirs, and why. `docs/migrating.md` says so, too."""

REFUSED: dict[str, str] = {
    "trl": r".*vespo.*|(cispo|sapo)-sequence|delta-(1\.1|0\.9|sequence)|off_policy_mask-.*|.*top(_entropy)?(-.*)?",
    "verl": r"[a-z_]+-token-sum|gpg|dro|dppo_.*|adv-(opo|gpg|grpo_passk|rpp-gamma)|kl_(loss|in_reward)-(abs|.*\+)|"
            r".*-normalize|"
            r"rollout_rs-.*|rollout_is-and-rs|bypass-.*",
}
"""Cases whose flags have no counterpart."""


@pytest.mark.parametrize(("system", "name"), [(system, case["name"]) for system in SYSTEMS for case in cases(system)])
def test_flags_compute_what_theirs_compute(system, name):
    [case] = [case for case in cases(system) if case["name"] == name]
    if re.fullmatch(REFUSED[system], name):
        with pytest.raises(ShoalError):
            compose("train", words_of(system, case))
        return
    is_different = re.fullmatch(DIFFERENT[system][0], name)
    assert bool(differences(system, case)) == bool(is_different), f"{words_of(system, case)}: {DIFFERENT[system][1]}"


@pytest.mark.parametrize(("system", "name"), [(system, case["name"]) for system in SYSTEMS
                                              for case in recorded(system)["cases"] if "error" in case])
def test_what_they_refuse_is_refused(system, name):
    [case] = [case for case in recorded(system)["cases"] if case["name"] == name]
    if name in ALLOWED:
        compose("train", words_of(system, case))
        return
    with pytest.raises(ShoalError):
        compose("train", words_of(system, case))


ALLOWED = {"gdpo_v1": "verl's default trainer fails on it", "gdpo-nokeys": "the parts are the reward functions here"}
"""Errors of theirs that are none here, and why."""


if __name__ == "__main__":
    for system in SYSTEMS:
        for case in cases(system):
            try:
                found = differences(system, case)
            except ShoalError as error:
                found = [f"REFUSED {error}"]
            if found:
                print(system, case["name"], found)
