"""Environments after their rollouts, as reward functions get them, and the rewards that
environments give themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from shoal.records import RewardFunction
from shoal.rewards.reward_call import PaidTurns, unused_name
from shoal.workers.environments import EnvironmentKind
from shoal.workers.rollout_function import ROLLOUT


class EndedEnvironment:
    """What is kept of an environment after its rollout: its attributes as plain values, to be read,
    and its reward. If the environment failed, every attribute reads as None.

    >>> EndedEnvironment("Game", {"turns": 3}, reward=0.5).turns
    3
    """

    def __init__(
        self, kind: str = "", state: Mapping[str, Any] | None = None, reward: float | None = None
    ) -> None:
        """`kind`: the environment's name in the mapping of environments; "" if it failed. `state`:
        attribute -> plain value. `reward`: None if the environment gave none. The values of `state`
        are not copied."""
        vars(self).update(state or {}, _kind=kind, _reward=reward)

    def get_reward(self) -> float | None:
        return vars(self)["_reward"]

    @property
    def fields(self) -> dict[str, Any]:
        """The named values that a rollout function returned besides tokens; {} for any other
        environment."""
        if self._kind != ROLLOUT:
            return {}
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __getattr__(self, name: str) -> None:
        """Called for an attribute that was not kept. Returns None if the environment failed, so
        that a reward function can read any attribute. Else raises AttributeError, and always for a
        name that begins with `_`."""
        # pickle asks for private names before `_kind` is set, so they are refused first.
        if not name.startswith("_"):
            # `self._kind` would call this method again if it were not set.
            has_failed = vars(self)["_kind"] == ""
            if has_failed:
                return
        raise AttributeError(
            f"the environment had no attribute {name!r} of plain values when its rollout ended"
        )


def environment_rewards(
    environments: Mapping[str, Callable[[], Any]],
    taken: Collection[str] = (),
    by_turn: bool = False,
) -> tuple[RewardFunction, ...]:
    """Returns a reward function of weight 1 for each environment whose class has `get_reward`. The
    function returns what `get_reward` returned at the end of the rollout. It is named after the
    class, with a number added if the name is in `taken` or an earlier environment's. `environments`
    maps names to factories. A factory that is not a class is called once, to find the class. The
    functions run in the run's own process.

    With `by_turn` an environment without `get_reward` has a function too, and of a rollout whose
    environment paid turns the function returns `PaidTurns`: what each turn was paid, with the rest
    of what `get_reward` returned at the last turn."""
    rewards: list[RewardFunction] = []
    names = list(taken)
    for name, factory in environments.items():
        environment_type = EnvironmentKind.of(name, factory).type
        if by_turn or hasattr(environment_type, "get_reward"):
            function_name = unused_name(environment_type.__name__, names)
            names.append(function_name)
            function = partial(_reward_of, name, by_turn)
            rewards.append(RewardFunction(function_name, function, runs_in_process=True))
    return tuple(rewards)


def _reward_of(
    kind: str,
    by_turn: bool,
    completions: Sequence[Any],
    environments: Sequence[EndedEnvironment] = (),
    **columns: Any,
) -> list[float | PaidTurns | None]:
    """Returns the reward of each completion's environment, with `by_turn` by turn where it paid
    turns; None if that is not the environment named `kind`, or if there is none. With `kind` and
    `by_turn` bound by `partial` it is a reward function."""
    if not environments:
        return [None] * len(completions)
    rewards = []
    for completion, environment in zip(completions, environments, strict=True):
        reward = None
        if vars(environment)["_kind"] == kind:
            reward = environment.get_reward()
            paid = paid_by_turn(completion)
            if by_turn and paid is not None:
                reward = _with_rest(paid, reward)
        rewards.append(reward)
    return rewards


def paid_by_turn(completion: Any) -> list[float] | None:
    """Returns what an environment paid for each turn of a completion, 0 where it paid nothing; None
    if it paid for none. `completion`: messages; a text has no turns that were paid."""
    if isinstance(completion, str):
        return None
    turns = [message for message in completion if message["role"] == "assistant"]
    if not any("reward" in message for message in turns):
        return None
    return [message.get("reward", 0.0) for message in turns]


def _with_rest(paid: list[float], total: float | None) -> PaidTurns:
    """Returns the rewards of turns that add up to `total`, what the whole rollout earned: what was
    paid, with the rest at the last turn. `total` None: what was paid is all."""
    if total is None:
        return PaidTurns(paid, math.fsum(paid))
    return PaidTurns([*paid[:-1], total - math.fsum(paid[:-1])], total)
