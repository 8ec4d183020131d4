"""Scores a run's stored groups with other rewards, without a model, and compares the two.

    groups/step_* -> RewardPool -> rewards, advantages by the step's own settings -> compared with the stored ones

It finds the advantages that change their sign, and what is suspicious about the new reward.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.algorithm.advantage import nonzero_std
from shoal.config.schema import AlgorithmSection, Config, RewardSection
from shoal.report.groups import StoredGroup, read_file
from shoal.report.lines import json_ready
from shoal.rewards.functions import name_functions
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.run.task import find_functions, load_task, with_overlong
from shoal.runs.stored_run import StoredRun
from shoal.tasks.task import Task
from shoal.text import count
from shoal.trainer.step_table import step_advantages
from shoal.types import Example, Failure, Group, RewardFunction

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


# ---- scores


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
    scores: dict[Any, Scores] = {}

    def take(wait: bool) -> None:
        for ticket, found in pool.collect(wait=wait):
            scores[ticket] = found
            progress(len(scores), len(examples))

    for ticket in range(len(examples)):  # all before the first wait: remote rewards get many at once
        one = slice(ticket, ticket + 1)
        pool.submit(ticket, examples[one], texts[one], token_ids[one], step)
        take(wait=False)
    while len(scores) < len(examples):
        take(wait=True)
    in_order = [scores[ticket] for ticket in range(len(examples))]
    found = [Scored(own.rewards[0], {name: values[0] for name, values in own.components.items()}, own.valid[0])
             for own in in_order]
    return found, [failure for own in in_order for failure in own.failures]


# ---- the stored reward and the new one

NUM_SHOWN = 5
"""Groups and completions that are shown in full."""


@dataclass(frozen=True)
class Rescored:
    """A stored group with its stored and its new scores; arrays are [G]."""

    step: int
    number: int  # its place in the step's file
    group: Group
    rewards: np.ndarray
    components: dict[str, np.ndarray]
    valid: np.ndarray
    stored_advantages: np.ndarray | None
    by_settings: np.ndarray  # advantages of the stored rewards under the settings on file for its step
    advantages: np.ndarray

    @property
    def old_advantages(self) -> np.ndarray:
        """The advantages trained on; where none were stored, those by the settings."""
        return self.by_settings if self.stored_advantages is None else self.stored_advantages

    @property
    def settings_differ(self) -> bool:
        return not np.allclose(self.old_advantages, self.by_settings, rtol=1e-6, atol=1e-9, equal_nan=True)

    @property
    def nonzero_std(self) -> tuple[bool, bool]:
        """Whether the stored and the new rewards vary in the group."""
        old, new = (nonzero_std(rewards[None], valid[None])[0]
                    for rewards, valid in ((self.group.rewards, self.group.valid), (self.rewards, self.valid)))
        return bool(old), bool(new)

    @property
    def both(self) -> np.ndarray:
        """Completions that both rewards scored."""
        return self.valid & self.group.valid

    @property
    def flipped(self) -> np.ndarray:
        """Completions whose advantage is positive by one reward and negative by the other."""
        return self.both & (np.sign(self.advantages) * np.sign(self.old_advantages) < 0)

    def record(self) -> dict[str, Any]:
        return {
            "step": self.step, "group": self.number, "row": self.group.example.row,
            "old_rewards": self.group.rewards, "rewards": self.rewards, "components": self.components,
            "old_advantages": self.old_advantages, "advantages": self.advantages,
            "flipped": np.flatnonzero(self.flipped),
            "old_nonzero_std": self.nonzero_std[0], "nonzero_std": self.nonzero_std[1],
        }


@dataclass
class RewardComparison:
    """Sums over all steps, and a few numbers of each completion; the groups themselves are not kept."""

    skips_failures: bool  # reward.on_error=skip: a failed completion's score is NaN, as that of a None
    seconds: float = 0.0  # wall time: worker processes score at the same time
    num_groups: int = 0
    num_completions: int = 0
    unscorable: int = 0
    not_stored: int = 0  # groups without stored advantages
    other_settings: list[int] = field(default_factory=list)  # steps
    failed: Counter[str] = field(default_factory=Counter)  # `function: kind`
    first_failure: str | None = None
    skipped: Counter[str] = field(default_factory=Counter)  # by function
    unscored: Counter[str] = field(default_factory=Counter)  # by function, scores that are NaN
    varying: Counter[tuple[bool, bool]] = field(default_factory=Counter)  # groups whose old, new rewards vary
    within: list[float] = field(default_factory=list)  # rank correlations of groups
    flips: list[Rescored] = field(default_factory=list)  # the groups with the most
    best_of_lowest: list[tuple[float, float, dict[str, Any]]] = field(default_factory=list)  # old, new reward, place
    by_step: list[dict[str, Any]] = field(default_factory=list)
    _columns: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    def column(self, name: str) -> np.ndarray:
        """`old`, `new`: rewards of completions that both scored; `rewards`, `lengths`: of those the new one scored."""
        return _joined(self._columns[name])

    def add_failures(self, failures: Sequence[Failure]) -> None:
        self.failed.update(f"{one.function}: {one.kind}" for one in failures)
        if self.skips_failures:
            self.skipped.update(one.function for one in failures if one.completion is not None)
        if failures and self.first_failure is None:
            self.first_failure = failures[0].text

    def add(self, step: int, groups: Sequence[Rescored]) -> None:
        """Counts a step's groups."""
        old, new = _joined([g.group.rewards[g.both] for g in groups]), _joined([g.rewards[g.both] for g in groups])
        self._columns["old"].append(old)
        self._columns["new"].append(new)
        self.num_groups += len(groups)
        for g in groups:
            self._columns["rewards"].append(g.rewards[g.valid])
            self._columns["lengths"].append(np.array([len(c) for c in g.group.completions])[g.valid])
            self.num_completions += g.group.size
            self.unscorable += int((~g.valid).sum())
            self.unscored.update({name: int(np.isnan(values).sum()) for name, values in g.components.items()})
            self.varying[g.nonzero_std] += 1
            self.not_stored += g.stored_advantages is None
            correlation = rank_correlation(g.group.rewards[g.both], g.rewards[g.both])
            self.within += [] if correlation is None else [correlation]
        if any(g.settings_differ for g in groups):
            self.other_settings.append(step)
        flipped = [g for g in groups if g.flipped.any()]
        self.flips = sorted([*self.flips, *flipped], key=lambda g: -int(g.flipped.sum()))[:NUM_SHOWN]
        self._keep_best_of_lowest(groups)
        self.by_step.append({
            "step": step, "groups": len(groups), "completions_compared": len(old), "groups_with_flips": len(flipped),
            "advantages_flipped": sum(int(g.flipped.sum()) for g in groups), "old_reward_mean": _mean(old),
            "reward_mean": _mean(new)})

    def _keep_best_of_lowest(self, groups: Sequence[Rescored]) -> None:
        """Of the completions with the lowest stored reward so far, those that the new one scores highest."""
        found = [*self.best_of_lowest, *(
            (float(g.group.rewards[i]), float(g.rewards[i]),
             {"step": g.step, "group": g.number, "completion": int(i), "text": g.group.texts[i]})
            for g in groups for i in np.flatnonzero(g.both))]
        lowest = min((old for old, _, _ in found), default=0.0)
        found = [entry for entry in found if entry[0] == lowest]
        self.best_of_lowest = sorted(found, key=lambda entry: -entry[1])[:NUM_SHOWN]  # stable: by step, group

    @property
    def share_of_constant_groups(self) -> float:
        return (self.varying[False, False] + self.varying[True, False]) / self.num_groups

    def figures(self) -> dict[str, Any]:
        """Old and new side by side: flips, rank correlations (of all completions, the groups' mean), variance."""
        old, new, varying = self.column("old"), self.column("new"), self.varying
        flipped = sum(step["advantages_flipped"] for step in self.by_step)
        return {
            "reward_mean": [_mean(old), _mean(new)], "completions_compared": len(old),
            "advantages_flipped": flipped, "share_flipped": flipped / len(old) if len(old) else None,
            "groups_with_flips": sum(step["groups_with_flips"] for step in self.by_step),
            "rank_correlation": rank_correlation(old, new),
            "rank_correlation_within_groups": sum(self.within) / len(self.within) if self.within else None,
            "groups_that_gain_variance": varying[False, True], "groups_that_lose_variance": varying[True, False],
            "nonzero_std_groups": [varying[True, False] + varying[True, True],
                                   varying[False, True] + varying[True, True]],
        }

    def hacks(self) -> list[dict[str, Any]]:
        """Completions that the new reward scores above its median and the stored one scored lowest."""
        old, new = self.column("old"), self.column("new")
        if not len(old) or old.min() == old.max():
            return []
        median = np.median(new)
        return [{**place, "old_reward": before, "reward": after} for before, after, place in self.best_of_lowest
                if after > median]


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's rank correlation, ties sharing their mean rank; None where a or b is constant."""
    if len(a) < 2 or a.min() == a.max() or b.min() == b.max():
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
