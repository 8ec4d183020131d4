"""The groups of a step as arrays, and their advantages by the settings of `algorithm`: of
completions, or of their turns (`algorithm.credit`). Does not load JAX, so that `shoal rescore`
starts fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.algorithm.advantage import by_state, by_turn, nonzero_std, returns_to_go
from shoal.config.choices import ADVANTAGES
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.records import Completion, Group, StopReason
from shoal.trainer.own_advantage import OwnAdvantage


@dataclass(frozen=True)
class StepTable:
    """The groups of a step as arrays, [P, G] each: P prompts, G completions."""

    rewards: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray  # number of tokens that the model sampled
    context_lengths: np.ndarray  # number of the others, which tools and environments said
    truncated: np.ndarray  # True if the completion reached the limit
    advantages: np.ndarray  # with credit by turn [P, G, K], for at most K turns
    # [P]: True where rewards differ; None with a critic, which learns from every group
    nonzero_std: np.ndarray | None
    turns: TurnTable | None = None  # with credit by turn

    @property
    def completion_advantages(self) -> np.ndarray:
        """The advantage of each completion [P, G]: with credit by turn the mean over its sampled
        tokens."""
        if self.turns is None:
            return self.advantages
        total = (self.advantages * self.turns.lengths).sum(axis=2)
        return total / np.maximum(self.turns.lengths.sum(axis=2), 1)

    @property
    def turn_advantages(self) -> list[list[np.ndarray]]:
        """The advantages of the turns of each group's completions, float64[number of turns]; []
        with credit by completion."""
        if self.turns is None:
            return []
        numbers = (self.turns.lengths > 0).sum(axis=2)  # [P, G]
        advantages = []
        for of_group, num_turns in zip(self.advantages, numbers, strict=True):
            pairs = zip(of_group, num_turns, strict=True)
            advantages.append([values[:number] for values, number in pairs])
        return advantages

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        a: AlgorithmSection,
        penalty: np.ndarray | None = None,
        own_advantage: OwnAdvantage | None = None,
    ) -> StepTable:
        """Makes the table of a step's groups, advantages included. `penalty[P, G]` is subtracted
        from the rewards before they become advantages; `gdpo` ignores it, since it reads the reward
        functions' own values. `own_advantage` is the function that `algorithm.advantage` names;
        None if that is an estimator. There must be at least one group. ShoalError if the function
        fails. Advantages that come from a critic's values are 0: `StepValues.table` has them."""
        rewards = np.stack([group.rewards for group in groups])
        valid = np.stack([group.valid for group in groups])
        components = [group.reward_components for group in groups]
        lengths = np.zeros(rewards.shape, np.int64)
        context_lengths = np.zeros(rewards.shape, np.int64)
        truncated = np.zeros(rewards.shape, bool)
        for row, group in enumerate(groups):
            for column, completion in enumerate(group.completions):
                lengths[row, column] = completion.num_sampled
                context_lengths[row, column] = len(completion) - completion.num_sampled
                truncated[row, column] = completion.stop_reason == StopReason.LENGTH
        weights = groups[0].reward_weights
        penalised = rewards
        if penalty is not None:
            penalised = rewards - penalty
        turns = None if a.credit == "completion" else TurnTable.of(groups, penalty)
        if own_advantage is not None:
            named = {name: np.stack([group[name] for group in components]) for name in weights}
            if turns is None:
                advantages = own_advantage(groups, penalised, valid, lengths, named)
            else:
                advantages = own_advantage(groups, turns.rewards, turns.turns, turns.lengths, named)
        elif a.has_critic:
            advantages = np.zeros(rewards.shape if turns is None else turns.rewards.shape)
        elif turns is None:
            advantages = step_advantages(
                a=a,
                rewards=penalised,
                valid=valid,
                lengths=lengths,
                components=components,
                weights=weights,
            )
        else:
            advantages = turn_advantages(a, penalised, valid, turns)
        different = nonzero_std(rewards, valid)
        return cls(
            rewards=rewards,
            valid=valid,
            lengths=lengths,
            context_lengths=context_lengths,
            truncated=truncated,
            advantages=advantages,
            nonzero_std=different,
            turns=turns,
        )


@dataclass(frozen=True)
class TurnTable:
    """The turns of a step's completions as arrays, [P, G, K] each: K is the number of turns of the
    completion that has most. What lies behind a completion's last turn is 0 and False."""

    rewards: np.ndarray  # the reward that each turn earned; 0 if the completion is not valid
    turns: np.ndarray  # True for the turns that a valid completion has
    lengths: np.ndarray  # number of tokens that the model sampled
    # the same number for turns of a group that began with the same words of the environment
    states: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[Group], penalty: np.ndarray | None = None) -> TurnTable:
        """Makes the table of a step's groups. Of completions whose reward is not by turn the last
        turn earned all. `penalty[P, G]` is subtracted from the last turn's reward."""
        most_turns = 1
        for group in groups:
            for completion in group.completions:
                most_turns = max(most_turns, len(completion.turns))
        shape = (len(groups), groups[0].size, most_turns)
        table = cls(
            rewards=np.zeros(shape),
            turns=np.zeros(shape, bool),
            lengths=np.zeros(shape, np.int64),
            states=np.zeros(shape, np.int64),
        )
        for row, group in enumerate(groups):
            numbers: dict[bytes, int] = {}  # of the states of this group
            for column, completion in enumerate(group.completions):
                num_turns = len(completion.turns)
                for turn, tokens in enumerate(completion.turns):
                    place = (row, column, turn)
                    state = words_before(completion, turn, group.prompt_of(column)).tobytes()
                    table.lengths[place] = tokens.stop - tokens.start
                    table.states[place] = numbers.setdefault(state, len(numbers))
                if not num_turns or not group.valid[column]:
                    continue
                table.turns[row, column, :num_turns] = True
                if group.turn_rewards:
                    table.rewards[row, column, :num_turns] = group.turn_rewards[column]
                else:
                    table.rewards[row, column, num_turns - 1] = group.rewards[column]
                if penalty is not None:
                    table.rewards[row, column, num_turns - 1] -= penalty[row, column]
        return table


def words_before(completion: Completion, turn: int, prompt_ids: np.ndarray) -> np.ndarray:
    """Returns the token ids of what the environment said last before a turn: the tokens between the
    turn before and this one; for the first turn of the completion, or of a branch, its prompt.
    `prompt_ids`: the completion's first prompt."""
    start = completion.turns[turn].start
    for branch in completion.branches:
        if branch.start == start:
            return branch.prompt_ids
    if turn == 0:
        return prompt_ids
    return completion.token_ids[completion.turns[turn - 1].stop : start]


def turn_advantages(
    a: AlgorithmSection, rewards: np.ndarray, valid: np.ndarray, turns: TurnTable
) -> np.ndarray:
    """Computes the advantage of each turn, float64[P, G, K], by `algorithm.credit`. `rewards[P, G]`
    are those of whole completions, which credit by state needs too."""
    estimator = ADVANTAGES[a.advantage]
    settings = estimator.settings(a)
    returns = returns_to_go(turns.rewards, a.discount)
    if a.credit == "turn":
        return by_turn(returns, turns.turns, divided=a.advantage == "grpo", **settings)
    return by_state(rewards, valid, returns, turns.turns, turns.states, estimator.load(), settings)


def step_advantages(
    a: AlgorithmSection,
    rewards: np.ndarray,
    valid: np.ndarray,
    lengths: np.ndarray,
    components: Sequence[Mapping[str, np.ndarray]] = (),
    weights: Mapping[str, float] | None = None,
) -> np.ndarray:
    """Computes advantages float64[P, G] from the rewards[P, G] of one step; `lengths[P, G]` are
    numbers of sampled tokens.

    `components` are each group's rewards by function and `weights` the functions' weights, for the
    estimator that normalises the functions separately (`gdpo`). If one of the two is empty, the
    estimator gets None for both; other estimators ignore them.
    """
    stacked = None  # [functions, P, G]
    function_weights = None
    if weights and components:
        by_function = []
        for name in weights:
            by_function.append([group[name] for group in components])
        stacked = np.array(by_function)
        function_weights = np.array(list(weights.values()))
    estimator = ADVANTAGES[a.advantage]
    advantages = estimator.load()
    return advantages(
        rewards,
        valid,
        components=stacked,
        weights=function_weights,
        lengths=lengths,
        **estimator.settings(a),
    )
