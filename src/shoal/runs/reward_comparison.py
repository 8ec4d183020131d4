"""Two rewards of the same completions compared: the stored one and a new one, over the groups of many steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.algorithm.advantage import nonzero_std
from shoal.types import Failure, Group

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
