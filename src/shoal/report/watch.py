"""Warnings of how training goes: each is given once, with the key that helps; some say that the run
is hopeless.

`train.on_warning=stop` ends a run at any of them, so a warning about rewards, completions, updates
or accuracy belongs here: a row of RULES if a step's metrics show it, else a method of `Watch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.findings import Finding
from shoal.records import Failure, Group
from shoal.runs.metrics import ENVIRONMENT

STEPS_OF_CONSTANT_REWARD, COMPLETIONS_OF_CONSTANT_REWARD = 10, 64
"""After so many steps and completions with one and the same value a reward function is taken to be
constant."""
COMPLETIONS_OF_RARE_REWARD, RARE = 1000, 0.01
"""After so many completions a reward function that has given more than 0 to at most this share of
them is warned of."""


@dataclass(frozen=True)
class WarningRule:
    """A warning that is given once its sign has been seen `limit` times in a row."""

    name: str
    limit: int
    seen: Callable[
        [Mapping[str, float]], float
    ]  # a step's metrics -> how often; 0 starts the count again
    text: str  # what is wrong, what helps; `{limit}` is replaced
    key: str
    hopeless: bool = False


def _skipped(metrics: Mapping[str, float]) -> float:
    """Skipped updates, without those that a smaller loss scale is to solve: float16 begins with a
    few."""
    return metrics["update/skipped"] - metrics.get("update/overflows", 0)


RULES = (
    WarningRule(
        "no variance",
        5,
        lambda m: m.get("groups/nonzero_std") == 0,
        "for {limit} steps no group has had completions of different reward, so nothing has been "
        "learned: take easier or harder questions, a larger batch.group_size, a higher "
        "sampling.temperature, or a reward with more levels",
        "batch.group_size",
    ),
    WarningRule(
        "truncated",
        3,
        lambda m: m["completions/truncated"] > 0.5 and not m["update/skipped"],
        "for {limit} steps more than half of the completions have been cut off at "
        "sampling.max_completion_tokens, or at an agent's max_tokens for its last turn: raise it, "
        "or ask for shorter answers",
        "sampling.max_completion_tokens",
    ),
    WarningRule(
        "skipped",
        3,
        lambda m: _skipped(m) if m["update/count"] == 0 else 0,
        "{limit} updates in a row have been skipped, since their gradients were not finite: lower "
        "optimizer.lr",
        "optimizer.lr",
        hopeless=True,
    ),
    WarningRule(
        "old weights",
        1,
        lambda m: m["version/unchanged"] if m["update/count"] else 0,
        "an update was made, but the weights of before it were published (metric "
        "version/unchanged): completions are sampled from old weights, which is a fault of the "
        "program",
        "",
        hopeless=True,
    ),
    WarningRule(
        "one skipped",
        1,
        _skipped,
        "an update was skipped: its gradient was not finite (metric update/skipped)",
        "optimizer.lr",
    ),
    WarningRule(
        "unscorable",
        1,
        lambda m: m.get("groups/unscorable", 0),
        "some groups have fewer than two scorable completions (metric groups/unscorable)",
        "reward.functions",
    ),
)


@dataclass
class Watch:
    """Reads each step's metrics and groups, and each evaluation; returns what is to be warned of,
    each once."""

    in_a_row: dict[str, list[float]] = field(
        default_factory=dict
    )  # rule -> how often, and since which step
    given: set[str] = field(default_factory=set)  # warnings that were given already
    rewards: dict[str, list[float]] = field(
        default_factory=dict
    )  # function -> min, max, steps, completions, not 0

    def step(
        self, number: int, metrics: Mapping[str, float], groups: Sequence[Group]
    ) -> list[Finding]:
        """The warnings that step `number` (from 1) brings; `wrong` where training cannot
        recover."""
        found = []
        for rule in RULES:
            if not (seen := rule.seen(metrics)):
                self.in_a_row.pop(rule.name, None)
                continue
            count, first = self.in_a_row.get(rule.name, [0, number])
            self.in_a_row[rule.name] = [count + seen, first]
            if count + seen >= rule.limit:
                found += self._once(
                    rule.name, rule.text.format(limit=rule.limit), rule.key, rule.hopeless
                )
        for function in sorted({name for group in groups for name in group.reward_components}):
            found += self._reward(
                function, np.concatenate([g.reward_components[function] for g in groups])
            )
        return found

    def _reward(self, function: str, values: np.ndarray) -> list[Finding]:
        known = values[~np.isnan(values)]
        low, high, steps, count, other, *_ = [
            *self.rewards.get(function, [np.inf, -np.inf, 0, 0]),
            0,
        ]
        if known.size:
            low, high = min(low, float(known.min())), max(high, float(known.max()))
            steps, count, other = steps + 1, count + known.size, other + np.count_nonzero(known)
        self.rewards[function] = [low, high, steps, count, int(other)]
        if steps < STEPS_OF_CONSTANT_REWARD or count < COMPLETIONS_OF_CONSTANT_REWARD:
            return []
        given = ""
        if low == high:
            given = f"{low:g} to each of {count:,.0f} completions, so nothing"
        elif (
            low == 0 and count >= COMPLETIONS_OF_RARE_REWARD and other <= RARE * count
        ):  # not a penalty, below 0
            given = f"0 to {count - other:,.0f} of {count:,.0f} completions, so next to nothing"
        return (
            self._once(
                f"constant {function}",
                f"reward function {function} has given {given} is learned from it: check it (shoal "
                "rescore), or leave it out of reward.functions",
                "reward.functions",
            )
            if given
            else []
        )

    def failures(self, failures: Sequence[Failure]) -> list[Finding]:
        """Warns with the first example of each way in which a reward function, or an environment,
        failed."""
        return [
            finding
            for failure in failures
            for finding in self._once(
                f"failed {failure.function}: {failure.kind}",
                failure.text,
                "environment.on_error" if failure.function == ENVIRONMENT else "reward.on_error",
            )
        ]

    def evaluation(
        self, version: int, first: Mapping[str, Any], now: Mapping[str, Any]
    ) -> list[Finding]:
        """Warns where accuracy on a set has fallen below the 95% interval that it had before
        training; that of other questions, as in a quick evaluation, where its whole interval
        has."""
        low, (_, high) = (
            (first.get("accuracy_interval") or [None])[0],
            now.get("accuracy_interval") or (None, None),
        )
        accuracy = now.get("accuracy")
        most = accuracy if first.get("num_questions") == now.get("num_questions") else high
        if low is None or accuracy is None or most is None or most >= low:
            return []
        rises = now.get("mean_reward", 0) > first.get("mean_reward", math.inf)
        advice = (
            "the reward rose, so it is for something else: read completions, change "
            "reward.functions"
            if rises
            else "lower optimizer.lr, or set algorithm.kl_coef"
        )
        return self._once(
            "worse",
            f"after step {version} accuracy is {accuracy:.1%}, below the interval of before "
            f"training ({low:.1%} or more): {advice}",
            "reward.functions" if rises else "optimizer.lr",
        )

    def _once(self, name: str, text: str, key: str, hopeless: bool = False) -> list[Finding]:
        if name in self.given:
            return []
        if not hopeless:  # a run that was resumed ends again
            self.given.add(name)
        return [Finding("training", "wrong" if hopeless else "warning", text, key)]

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON."""
        return {
            "in_a_row": dict(self.in_a_row),
            "given": sorted(self.given),
            "rewards": dict(self.rewards),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self.given = dict(state["in_a_row"]), set(state["given"])
        self.rewards = {name: list(values) for name, values in state["rewards"].items()}
