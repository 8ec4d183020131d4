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
        return {
            name: value
            for name, value in vars(self).items()
            if self._kind == ROLLOUT and not name.startswith("_")
        }

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
    found: dict[str, RewardFunction] = {}
    for name, factory in environments.items():
        made = EnvironmentKind.of(name, factory).type
        if hasattr(made, "get_reward"):
            called = unused(made.__name__, [*taken, *found])
            found[called] = RewardFunction(called, partial(_reward_of, name), runs_in_process=True)
    return tuple(found.values())


def _reward_of(
    kind: str,
    completions: Sequence[Any],
    environments: Sequence[EndedEnvironment] = (),
    **columns: Any,
) -> list[float | None]:
    """None for the completions of another environment, and where there is none."""
    return [one.get_reward() if vars(one)["_kind"] == kind else None for one in environments] or [
        None
    ] * len(completions)
