"""When the reward of a run changed, and which figures of its evaluations can be compared since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shoal.config.commands import stages_of
from shoal.config.key import keys_of
from shoal.config.train import Config
from shoal.runs.lines import json_ready

ACCURACY_BY = "accuracy_by"
"""A text among an evaluation's figures: `reward` if a reward function says which answers are right;
absent if the task does."""

_FUNCTIONS = ("reward.functions",)
_OF_REWARD = ("mean_reward", "best_reward", "sampled_mean_reward")
_OF_VERDICTS = ("accuracy", "sampled_accuracy", "pass@", "maj@")


@dataclass(frozen=True)
class RewardChanges:
    """The versions at which a run was last resumed with another reward. Evaluations up to such a
    version cannot be compared with later ones, if the figure depends on what changed. 0: never."""

    reward: int = 0  # any setting that acts on rewards
    # reward.functions, which may say which answers are right; weights and penalties judge no answer
    functions: int = 0

    @classmethod
    def of_parts(cls, parts: Mapping[int, Mapping[str, Any]]) -> RewardChanges:
        """Returns the changes in a run that was resumed. `parts`: version at which a segment began
        -> its settings (dotted key -> value); a missing key has its default."""
        changes = cls()
        for earlier, later in pairwise(sorted(parts)):
            changes = changes.with_resume(later, parts[earlier], parts[later])
        return changes

    def with_resume(
        self, version: int, before: Mapping[str, Any], now: Mapping[str, Any]
    ) -> RewardChanges:
        """Returns the changes with those of a later resume, from `version`, which replaced the
        settings `before` by `now`."""
        reward = self.reward
        functions = self.functions
        if rewards_differ(before, now):
            reward = version
        if _differ(before, now, _FUNCTIONS):
            functions = version
        return RewardChanges(reward, functions)

    def before(self, version: int) -> RewardChanges:
        """Returns the changes at versions before this one; a later one counts as never."""
        return RewardChanges(
            reward=self.reward if self.reward < version else 0,
            functions=self.functions if self.functions < version else 0,
        )

    def comparable_since(self, name: str, figures: Mapping[str, Any]) -> int:
        """Returns the version after which evaluations have comparable values of the figure `name`;
        0 if all do. A reward, of all questions or of one source, depends on all settings of the
        reward; accuracy, pass@k and maj@k on its functions, if these say which answers are right.

        `figures`: those of the data set, which say who judges (ACCURACY_BY)."""
        if name.partition("/")[0] in _OF_REWARD:
            return self.reward
        if name.startswith(_OF_VERDICTS) and ACCURACY_BY in figures:
            return self.functions
        return 0

    def is_comparable(self, version: int, name: str, figures: Mapping[str, Any]) -> bool:
        """True if the figure `name` in the evaluation of `version` can be compared with that of the
        newest evaluation. `figures`: as in `comparable_since`."""
        since = self.comparable_since(name, figures)
        return since == 0 or version > since


NO_CHANGES = RewardChanges()


def rewards_differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if two settings of a run (dotted key -> value; a missing key has its default) differ in
    a key that acts on rewards."""
    return _differ(before, now, [name for name in keys_of(Config) if "rewards" in stages_of(name)])


def _differ(before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> bool:
    """True if two settings differ in one of the keys `names`."""
    keys = keys_of(Config)

    def values(settings: Mapping[str, Any]) -> Any:
        # A list in a file is a tuple in the schema.
        return json_ready({name: settings.get(name, keys[name].default) for name in names})

    return values(before) != values(now)
