"""Environments after their rollouts, as reward functions get them, and their own rewards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from shoal.records import RewardFunction
from shoal.rewards.reward_call import unused
from shoal.workers.environments import EnvironmentKind
from shoal.workers.rollout_function import ROLLOUT


class EndedEnvironment:
    """What is left of an environment once its rollout has ended: its attributes, to be read, and
    its reward. Of one that failed, every attribute is None.

    >>> EndedEnvironment("Game", {"turns": 3}, reward=0.5).turns
    3
    """

    def __init__(
        self, kind: str = "", state: Mapping[str, Any] | None = None, reward: float | None = None
    ) -> None:
        """`kind`: its name in the mapping of environments; empty for one that failed."""
        vars(self).update(state or {}, _kind=kind, _reward=reward)

    def get_reward(self) -> float | None:
        return vars(self)["_reward"]

    @property
    def fields(self) -> dict[str, Any]:
        """What a rollout function returned beside tokens."""
        if self._kind != ROLLOUT:
            return {}
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __getattr__(self, name: str) -> None:
        if name.startswith("_") or vars(self)["_kind"]:
            raise AttributeError(
                f"the environment had no attribute {name!r} of plain values when its rollout ended"
            )


def environment_rewards(
    environments: Mapping[str, Callable[[], Any]], taken: Collection[str] = ()
) -> tuple[RewardFunction, ...]:
    """The `get_reward` of each environment that has one, as a reward of weight 1 with the name of
    the class."""
    rewards: list[RewardFunction] = []
    names = list(taken)
    for name, factory in environments.items():
        environment_type = EnvironmentKind.of(name, factory).type
        if hasattr(environment_type, "get_reward"):
            function_name = unused(environment_type.__name__, names)
            names.append(function_name)
            function = partial(_reward_of, name)
            rewards.append(RewardFunction(function_name, function, runs_in_process=True))
    return tuple(rewards)


def _reward_of(
    kind: str,
    completions: Sequence[Any],
    environments: Sequence[EndedEnvironment] = (),
    **columns: Any,
) -> list[float | None]:
    """None for the completions of another environment, and where there is none."""
    if not environments:
        return [None] * len(completions)
    rewards = []
    for environment in environments:
        is_of_kind = vars(environment)["_kind"] == kind
        rewards.append(environment.get_reward() if is_of_kind else None)
    return rewards
