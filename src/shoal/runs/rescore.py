"""Scores a run's stored groups with other rewards, without a model, and compares the two.

    groups/step_* -> RewardPool -> rewards, advantages by the step's own settings -> compared with the stored ones

It finds the advantages that change their sign, and what is suspicious about the new reward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from shoal.config.schema import AlgorithmSection, Config, RewardSection
from shoal.report.groups import StoredGroup, read_file
from shoal.report.lines import json_ready
from shoal.rewards.functions import name_functions
from shoal.rewards.pool import RewardPool
from shoal.run.task import find_functions, load_task, with_overlong
from shoal.runs.reward_comparison import Rescored, RewardComparison, rank_correlation
from shoal.runs.scoring import score_texts
from shoal.runs.stored_run import StoredRun
from shoal.tasks.task import Task
from shoal.text import count
from shoal.trainer.step_table import step_advantages
from shoal.types import RewardFunction

MANY_CONSTANT_GROUPS, STRONG_LENGTH_CORRELATION, SLOW_SECONDS = 0.5, 0.5, 1.0
"""A share of groups, a rank correlation and seconds a completion, each warned of when exceeded."""


def score_again(run: StoredRun, reward: RewardSection, step: int = 0) -> dict[str, Any]:
    """Scores stored training groups with `reward.functions` (by default the task's own), a step at a time.

    Only numbers are kept of a step, so a run of any length fits into memory; of the one `step`, if given, `groups` are
    in full."""
    files = run.require_groups()
    if step and step not in files:
        run.groups(step)  # raises: it lists the steps that exist
    functions = reward_functions(reward, run.config)
    comparison, groups = RewardComparison(skips_failures=reward.on_error == "skip"), []
    with closing(RewardPool(functions, reward, run.config.steps)) as pool:
        for number in [step] if step else files:
            algorithm = run.config_at(number - 1).algorithm
            rescored = rescore_step(read_file(files[number]), number, pool, algorithm, comparison)
            comparison.add(number, rescored)
            groups += [group.record() for group in rescored] if step else []
    return json_ready({
        "run": str(run.path), "finished": run.is_finished, "steps": [step] if step else list(files),
        "num_groups": comparison.num_groups, "num_completions": comparison.num_completions,
        "functions": {one.name: one.weight for one in functions}, "comparison": comparison.figures(),
        "lint": lint_reward(comparison), "hacks": comparison.hacks(),
        "flips": [group.record() for group in comparison.flips], "by_step": comparison.by_step,
        "other_settings": comparison.other_settings, "advantages_not_stored": comparison.not_stored,
        "groups": groups if step else None,
    })


def reward_functions(reward: RewardSection, run: Config) -> tuple[RewardFunction, ...]:
    """The functions given, else the task's own; with the run's overlong penalty, unless another is given."""
    if reward.functions:
        found = name_functions(find_functions(reward.functions), reward.weights)
    else:
        found = load_task(run.task, reward).rewards
    penalty = reward if reward.overlong_buffer_tokens else run.reward
    return with_overlong(Task(run.task.name, (), {}, found), penalty, run.sampling.max_completion_tokens).rewards


def rescore_step(stored: Sequence[StoredGroup], step: int, pool: RewardPool, algorithm: AlgorithmSection,
                 comparison: RewardComparison) -> list[Rescored]:
    """A step's groups in order; functions are called a group or a step at a time, as in a run."""
    groups = [entry.group for entry in stored]
    started = time.perf_counter()
    scored, failures = score_texts(pool, [group.example for group in groups], [group.texts for group in groups],
                                   [[c.token_ids.tolist() for c in group.completions] for group in groups],
                                   groups[0].step)
    comparison.seconds += time.perf_counter() - started
    comparison.add_failures(failures)
    rewards, valid = np.stack([one.rewards for one in scored]), np.stack([one.valid for one in scored])
    components = [one.components for one in scored]
    weights = {one.name: one.weight for one in pool.functions}
    lengths = np.array([[int(c.loss_mask.sum()) for c in group.completions] for group in groups])
    new = step_advantages(algorithm, rewards, valid, lengths, components, weights)
    by_settings = step_advantages(
        algorithm, np.stack([group.rewards for group in groups]), np.stack([group.valid for group in groups]), lengths,
        [group.reward_components for group in groups], groups[0].reward_weights)
    return [Rescored(step, n, entry.group, rewards[n], components[n], valid[n], entry.advantages, by_settings[n],
                     new[n]) for n, entry in enumerate(stored)]


def lint_reward(comparison: RewardComparison) -> dict[str, Any]:
    """The new reward's distribution, cost and failures, and `warnings` about them."""
    rewards, found = comparison.column("rewards"), comparison
    figures = {
        "mean": float(rewards.mean()) if len(rewards) else None,
        "std": float(rewards.std()) if len(rewards) else None,
        "min": float(rewards.min()) if len(rewards) else None, "max": float(rewards.max()) if len(rewards) else None,
        "num_distinct": len(np.unique(rewards)), "share_of_constant_groups": found.share_of_constant_groups,
        "seconds_per_completion": found.seconds / found.num_completions,
        "correlation_with_length": rank_correlation(found.column("lengths"), rewards),
        "none": {name: count - found.skipped[name] for name, count in found.unscored.items()},
        "failed": dict(found.failed), "first_failure": found.first_failure, "unscorable": found.unscorable,
    }
    return figures | {"warnings": list(_warnings(figures))}


def _warnings(found: dict[str, Any]) -> Iterator[str]:
    if found["num_distinct"] <= 1:
        yield "every completion has the same reward: it gives no training signal"
    elif found["share_of_constant_groups"] > MANY_CONSTANT_GROUPS:
        yield (f"{found['share_of_constant_groups']:.0%} of the groups have one reward for all their completions: "
               "they give no training signal")
    length = found["correlation_with_length"]
    if length is not None and abs(length) > STRONG_LENGTH_CORRELATION:
        yield (f"it correlates with length (rank correlation {length:+.2f}): training may yield "
               f"{'longer' if length > 0 else 'shorter'} completions, and little else")
    if found["seconds_per_completion"] > SLOW_SECONDS:
        yield f"it takes {found['seconds_per_completion']:.1f} s a completion: sampling will wait for it"
    for name, number in found["none"].items():
        if number:
            yield (f"{name} returned None for {count(number, 'completion')}: the other functions alone score them, "
                   "or they are left out")
    if found["failed"]:
        kinds = ", ".join(f"{what}: {number}" for what, number in found["failed"].items())
        yield f"it failed ({kinds}): {found['first_failure']}"
