"""Flags compute what theirs compute: each system's own code was run on the inputs in `figures/`,
and its loss, advantages, gradients and schedule are compared with Shoal's under the same flags.

What differs is in DIFFERENCES of `docs/reference.py`, with the reason; DIFFERENT says which cases
show it. What asks for something that has no counterpart is in REFUSED.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from proof_data import Update, UpdateResult, by_shoal, layout
from scoring import score
from scripts import load

from shoal.algorithm.aggregation import token_weights
from shoal.config.choices import AGGREGATIONS as PARTS
from shoal.config.merge import compose
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.config.train import Config
from shoal.records import Example, ShoalError
from shoal.tasks.gsm8k import blank
from shoal.trainer.loss import make_objective
from shoal.trainer.step_table import step_advantages

FIGURES = Path(__file__).parent / "figures"
SYSTEMS = ("maxtext", "torchrl", "trl", "tunix", "verl")
DIFFERENCES = load("docs/reference.py").DIFFERENCES

BASE = {
    "maxtext": ["grpo_beta=0.04"],  # grpo.yml's; the recipe is the demo's
    "torchrl": ["train.entropy_coeff=0.0", "train.kl_to_inference_coeff=0.0"],
    "trl": [],
    # GRPOConfig's, not the file's
    "tunix": ["grpo_config.beta=0.04", "rollout_config.total_generation_steps=8"],
    "verl": [],
}
"""The settings under which a system's figures were taken, over its recipe."""

CLASSES = {
    "DAPOConfig": [
        "algorithm.clip_high=0.28",
        "algorithm.aggregation=token-mean",
        "algorithm.kl_coef=0",
    ],
    "DrGRPOConfig": [
        "algorithm.advantage=dr_grpo",
        "algorithm.aggregation=seq-mean-token-sum-norm",
    ],
}
"""Classes of settings that no command line of Tunix chooses, in our keys."""

ARGUMENTS = {
    "clip_epsilon": lambda x: [
        f"algorithm.clip_{side}={np.ravel(x)[i]}" for side, i in (("low", 0), ("high", -1))
    ],
    "aggregation": lambda x: [f"algorithm.aggregation={AGGREGATIONS[x]}"],
    "entropy_coeff": lambda x: [f"train.entropy_coeff={x}"],
    "kl_to_inference_coeff": lambda x: [f"train.kl_to_inference_coeff={x}"],
}
"""Arguments of TorchRL's losses that its recipe has no flag for, in our keys."""

AGGREGATIONS = {
    "token_mean": "token-mean",
    "prompt_mean": "seq-mean-token-mean",
    "none": "seq-mean-token-sum",
}


@cache
def recorded(system: str) -> dict[str, Any]:
    return json.loads((FIGURES / f"{system}.json").read_text())


@cache
def inputs(name: str) -> dict[str, Any]:
    sets = json.loads((FIGURES / "inputs.json").read_text())
    chosen = sets[name]
    return {**sets[chosen["same_as"]], **chosen} if "same_as" in chosen else chosen


def words_of(system: str, case: dict[str, Any]) -> list[str]:
    """The flags of a case as its user would type them, over the system's own defaults."""
    return [
        f"recipe={system}",
        *BASE[system],
        *CLASSES.get(case.get("config", ""), []),
        *_typed(system, case),
    ]


def _typed(system: str, case: dict[str, Any]) -> Iterator[str]:
    section = {
        "tunix": "agentic_grpo_config." if "agentic" in case["name"] else "grpo_config."
    }.get(system, "")
    for flag in [*recorded(system)["base_flags"], *case["flags"]]:
        name, _, text = flag.lstrip("+").partition("=")
        if name == "epsilon_high" and case.get("config") == "DAPOConfig":
            yield f"algorithm.clip_high={text}"
        elif not name.startswith("use_vllm") and 'enable": False' not in text:
            yield f"{section}{name}={text}"
    for name, value in case.get("arguments", {}).items():
        yield from ARGUMENTS.get(name, lambda value: [])(value)
    if system == "trl" and not uses_vllm(case):
        # the recipe's is what TRL does when vLLM draws
        yield "vllm_importance_sampling_correction=false"


def uses_vllm(case: dict[str, Any]) -> bool:
    return "use_vllm=True" in case["flags"]


@dataclass(frozen=True)
class Ours:
    """What Shoal computes under a case's flags."""

    config: Config
    advantages: np.ndarray
    update: Update
    got: UpdateResult

    def loss(self, rows: list[int] | None = None) -> tuple[float, np.ndarray, np.ndarray]:
        """The loss of an update with these completions, all without `rows`, and its gradients by
        log-probs and entropies, [P, G, C]."""
        a, valid = self.config.algorithm, self.update.valid
        counts = np.isin(
            np.arange(valid.size).reshape(valid.shape), range(valid.size) if rows is None else rows
        )
        weights = token_weights(
            PARTS[a.aggregation].load(),
            self.update.lengths,
            valid,
            counts,
            a.aggregation_tokens or self.config.sampling.max_completion_tokens,
        )
        gradients = np.zeros((2, *valid.shape, 6))
        for found, into in zip(self.got.gradients(weights), gradients, strict=True):
            for (p, g), own in found.items():
                into[p, g, : len(own)] = own
        return self.got.loss(weights), gradients[0], gradients[1]


def components_of(system: str, case: dict[str, Any]) -> tuple[np.ndarray, dict[str, float]]:
    """Each function's rewards, [F, P, G], NaN where a completion could not be judged; the
    functions' weights."""
    given = inputs(case["inputs"])
    rewards = {"own": case["rewards"]} if "rewards" in case else given["rewards"]
    parts = np.array(
        [[[np.nan if x is None else x for x in row] for row in rows] for rows in rewards.values()],
        float,
    )
    is_plain = (
        system == "tunix"
        or "rewards" in case
        or (
            any("estimator=gdpo" in flag for flag in case["flags"])
            and not any("gdpo_reward_weights" in flag for flag in case["flags"])
        )
    )
    return parts, dict(
        zip(rewards, np.ones(len(parts)) if is_plain else given["reward_weights"], strict=True)
    )


def by_flags(system: str, case: dict[str, Any]) -> Ours:
    config, _ = compose("train", words_of(system, case))
    a, given = config.algorithm, inputs(case["inputs"])
    groups = (-1, config.batch.group_size)  # neighbouring completions are a group
    parts, scale = components_of(system, case)
    parts = parts.reshape(len(parts), *groups)
    valid = np.asarray(~np.isnan(parts).all(axis=0))
    P, G = valid.shape
    summed = np.array(
        list(scale.values()) if system == "tunix" or "rewards" in case else given["reward_weights"]
    )
    rewards = np.where(valid, np.nansum(parts * summed[:, None, None], axis=0), np.nan)
    lengths, cut = (np.array(given[name]).reshape(groups) for name in ("lengths", "truncated"))
    old, lp, ref, sampler, entropy, mask = (
        np.array(given[name], float).reshape(P, G, -1)
        for name in (
            case.get("old", "old_logprobs"),
            "logprobs",
            "ref_logprobs",
            "sampler_logprobs",
            "entropies",
            "mask",
        )
    )
    sampler = old if system == "torchrl" else sampler  # it knows no others
    if a.kl_placement == "reward" and a.kl_coef:
        log_ratio = np.where(mask > 0, old - ref, 0.0)
        rewards = rewards - a.kl_coef * {
            "k1": log_ratio,
            "k2": log_ratio**2 / 2,
            "k3": np.clip(np.exp(-log_ratio) - 1 + log_ratio, -10, 10),
        }[a.kl].sum(-1)
    components = []
    for p in range(P):
        components.append({name: parts[f, p] for f, name in enumerate(scale)})
    advantages = step_advantages(a, rewards, valid, lengths, components, scale)
    rows = []
    for p in range(P):
        rows.append(
            [
                oracle.Completion(
                    lp[p, g, :n],
                    old[p, g, :n],
                    ref[p, g, :n],
                    np.ones(n, bool),
                    advantages[p, g],
                    sampler[p, g, :n],
                    p,
                )
                for g, n in enumerate(lengths[p])
            ]
        )
    entropies = []
    for p in range(P):
        entropies.append([entropy[p, g, :n] for g, n in enumerate(lengths[p])])
    update = Update(rows, entropies, valid, np.ones((P, G), bool), cut & a.mask_truncated)
    # only then, or for several updates, TRL keeps old log-probs
    use_old = (
        make_objective(a).use_old
        or "old" in case
        or system == "verl"
        or (uses_vllm(case) and a.correction != "none")
    )
    got = by_shoal(
        layout(update, dtype=np.float32, grid=(16, 6)), replace(make_objective(a), use_old=use_old)
    )
    return Ours(config, advantages, update, got)


def differences(system: str, case: dict[str, Any]) -> list[str]:
    """Which of advantages, loss and gradients are not the system's."""
    ours, tables, found = by_flags(system, case), recorded(system)["tables"], []
    mask = np.array(inputs(case["inputs"])["mask"], bool)
    if "advantages" in case:
        theirs, own = np.array(tables[case["advantages"]], float), ours.advantages
        if theirs.size == own.size:
            own = own.reshape(theirs.shape)
        else:
            own = np.repeat(own.ravel(), mask.sum(-1).ravel())
        if "kept" in case:  # what is rejected has advantage 0 there
            own = np.repeat(own.ravel(), mask.sum(-1).ravel()) if own.size < mask.sum() else own
            if theirs.size < mask.sum():
                theirs = np.repeat(theirs.ravel(), mask.sum(-1).ravel())
            else:
                theirs = theirs
            own, theirs = (one * np.array(tables[case["kept"]]) for one in (own, theirs))
        found += [] if np.allclose(own, theirs, rtol=1e-5, atol=2e-6) else ["advantages"]
    for update in case.get("updates", [case]):
        rows = []
        for part in update.get("micro", [update]):
            for row in part.get("rows", []):
                rows.append(row)
        loss, *gradients = ours.loss(rows or None)
        found += [] if np.isclose(loss, update["loss"], rtol=1e-5, atol=2e-6) else ["loss"]
        for name, own in zip(("gradient", "gradient_entropies"), gradients, strict=True):
            theirs = np.ravel(tables[update[name]]) if name in update else 0.0
            is_same = np.allclose(own.reshape(mask.shape)[mask], theirs, rtol=1e-4, atol=2e-6)
            found += [] if is_same else [name]
    return found


UNNAMED = r"CISPOLoss-.*|kl_mask_threshold-.*|advantage-dynamic-sampling"
"""Cases of TorchRL's arguments that neither its recipe's flags nor a key of ours set."""


def cases(system: str, kind: str = "") -> list[dict[str, Any]]:
    """The cases with something of that kind; without one, those with a loss."""
    result = []
    for case in recorded(system)["cases"]:
        if (
            kind in case if kind else "updates" in case or {"loss", "gradient"} <= set(case)
        ) and not re.fullmatch(UNNAMED, case["name"]):
            result.append(case)
    return result


def named(system: str, name: str) -> dict[str, Any]:
    return next(case for case in recorded(system)["cases"] if case["name"] == name)


DIFFERENT: dict[str, str] = {
    "trl unscorable": r"unscorable-.*",
    "trl updates": r"two-updates-(dapo|cispo|kl|mask_truncated)",
    "trl means of means": r"(accumulate|two-updates)-(bnpo|entropy)|entropy-(grpo|dr_grpo|luspo)",
    "verl longest response": r"(vanilla|gspo|cispo|kl_loss|entropy|micro_batch-2)"
    r"-seq-mean-token-sum-norm",
    "verl clip_ratio": r"clip_ratio-alone",
    "verl rewards to go": r"kl_in_reward-reinforce_plus_plus",
    "verl means": r"kl_loss-(sapo|geo_mean)-.*|entropy-kl-sapo",
    "verl rejected rewards": r"rollout_rs-reinforce_plus_plus",
    "verl geo_mean": r"rollout_is-geo_mean|micro_batch-4-geo_mean",
    "tunix unscorable": r"unscorable-.*",
    "tunix micro-batches": r"micro-.-token-mean",
    "torchrl means": r"kl_to_ref-(0\.1|prompt)|kl_to_inference|kl-both|recipe-default|"
    r"aggregation-none",
    "torchrl KL in the reward": r"kl-in-reward",
}
"""A documented difference -> the cases that show it."""

NOT_SHOWN = {
    "verl long prompts",
    "verl gen_batch_size",
    "verl batch",
    "verl best@k",
    "verl test_freq",
    "verl rows in both files",
    "trl minibatches",
    "trl greedy evaluation",
    "trl long prompts",
    "trl max_staleness",
    "trl weights in flight",
    "verl staleness_threshold",
    "verl gigpo",
    "torchrl scale",
    "sampler ratios",
    "maxtext reward",
    "verl whitening",
    "verl clamp of the ratio",
    "trl warm-up",
    "verl rejected whitening",
    "verl rejected means",
    "verl weight decay",
    "trl sft newline",
    "trl pad row",
    "trl metrics of groups",
    "trl metric reward_std",
    "trl metric kl",
    "trl metric clip_ratio",
    "verl metric clipfrac",
    "verl critic adapter",
    "verl critic mean",
    "verl metric aggregation",
    "verl metric length",
}
"""Differences in what the figures hold equal: which completions an update has and how old they are,
whose log-probs are old, rewards; those of tiny deviations and of ratios beyond e^10, which they do
not reach; and those of metrics, of the learning rate and of what is decayed, which are no part of a
loss."""

REFUSED: dict[str, str] = {
    "trl": r".*vespo.*|(cispo|sapo)-sequence|delta-(1\.1|0\.9|sequence)|off_policy_mask-.*|"
    r".*top(_entropy)?(-.*)?",
    "verl": r"[a-z_]+-token-sum|gpg|dro|dppo_.*|adv-(opo|gpg|grpo_passk|rpp-gamma)|"
    r"kl_(loss|in_reward)-(abs|.*\+)|"
    r".*-normalize|bypass-reinforce.*",
    "tunix": r"agentic.*|dapo-overlong",
    "torchrl": r"",
    "maxtext": r"",
}
"""Cases whose flags have no counterpart."""


def difference_of(system: str, name: str) -> str | None:
    """The documented difference that a case shows."""
    return next(
        (
            one
            for one, pattern in DIFFERENT.items()
            if one.partition(" ")[0] == system and re.fullmatch(pattern, name)
        ),
        None,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "name"), [(system, case["name"]) for system in SYSTEMS for case in cases(system)]
)
def test_flags_compute_what_theirs_compute(system, name):
    case = named(system, name)
    if re.fullmatch(REFUSED[system], name):
        with pytest.raises(ShoalError):
            compose("train", words_of(system, case))
        return
    is_different = difference_of(system, name)
    assert bool(differences(system, case)) == bool(is_different), (
        f"{words_of(system, case)}: {is_different}"
    )


def test_the_table_of_differences_is_the_one_that_figures_show():
    assert set(DIFFERENT) | NOT_SHOWN == set(DIFFERENCES) and not set(DIFFERENT) & NOT_SHOWN
    for name, pattern in DIFFERENT.items():
        assert any(re.fullmatch(pattern, case["name"]) for case in cases(name.partition(" ")[0])), (
            name
        )


@pytest.mark.parametrize(
    ("system", "name"),
    [(system, case["name"]) for system in SYSTEMS for case in cases(system, "error")],
)
def test_what_they_refuse_is_refused(system, name):
    case = named(system, name)
    if name in ALLOWED:
        compose("train", words_of(system, case))
        return
    with pytest.raises(ShoalError):
        compose("train", words_of(system, case))


ALLOWED = {
    "gdpo_v1": "verl's default trainer fails on it",
    "gdpo-nokeys": "the parts are the reward functions here",
    "dapo-beta": "a divergence is possible with any loss",
    "dapo-clip-reversed": "each bound stands for itself",
}
"""Errors of theirs that are none here, and why."""


@pytest.mark.parametrize("name", [case["name"] for case in cases("trl", "schedule")])
def test_updates_of_a_generation_are_as_many_as_trls(name):
    case = named("trl", name)
    theirs = case["schedule"]
    generations = theirs["generation_before_update"]
    updates = len(theirs["micro_batches_per_update"])
    if name in ("schedule-steps-2-accumulate-4", "schedule-steps-3-accumulate-2"):
        with pytest.raises(ShoalError, match="steps_per_generation"):
            compose("train", words_of("trl", case))
        return
    config, _ = compose("train", words_of("trl", case))
    a = config.algorithm
    batch = config.batch  # generation_batch_size counts all devices: one here
    assert (batch.prompts_per_device or batch.prompts_per_step) == theirs["prompts_per_generation"]
    assert a.num_epochs * a.num_minibatches == updates // len(generations)
    assert make_objective(a).use_old == theirs["keeps_old_logprobs"]


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("vllm_importance_sampling_clip_max=None", "correction_cap", np.inf),
        ("vllm_importance_sampling_clip_max=null", "correction_cap", np.inf),
        ("delta=None", "clip_dual", 0.0),
        ("scale_rewards=none", "advantage", "dr_grpo"),
        ("use_bias_correction_kl=false", "kl_weighted", False),
        ("epsilon_high=None", "clip_high", 0.2),
    ],
)
def test_what_trl_parses_means_the_same(typed, key, value):
    assert typed in {flag for case in cases("trl", "parsed") for flag in case["flags"]}
    assert getattr(compose("train", ["recipe=trl", typed])[0].algorithm, key) == value


def test_tunix_rewards_give_its_numbers():
    task = blank(TaskSection(name="gsm8k"), RewardSection(preset="tunix"))
    names = {
        "format": "match_format_exactly",
        "tags": "match_format_approximately",
        "answer": "check_answer",
        "number": "check_numbers",
    }
    [case] = cases("tunix", "strings")
    for name, one in case["strings"].items():
        example = Example(0, [{"role": "user", "content": "?"}], {"answer": str(one["answer"])})
        found = score(
            task.rewards, [example], [example.prompt], [[one["completion"]]], [[[1]]]
        ).components
        assert {theirs: found[ours][0, 0] for ours, theirs in names.items()} == {
            theirs: one[theirs] for theirs in names.values()
        }, name


if __name__ == "__main__":
    for system in SYSTEMS:
        for case in cases(system):
            try:
                found = differences(system, case)
            except ShoalError as error:
                found = [f"REFUSED {error}"]
            if bool(found) != bool(
                difference_of(system, case["name"]) or re.fullmatch(REFUSED[system], case["name"])
            ):
                print(system, case["name"], found)
