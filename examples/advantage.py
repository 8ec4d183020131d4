"""Two advantages of your own: of completions, and of the turns of rollouts.

shoal train algorithm.advantage=examples/advantage.py:weighed
shoal train task=guess algorithm.credit=turn algorithm.advantage=examples/advantage.py:next_turns
"""

import numpy as np


def weighed(rewards, valid, rows, **others):
    """The reward minus the mean of its group, times the column `weight` of the data, if there is
    one.

    rewards[P, G] of P prompts with G completions, valid[P, G]: where there is a reward. rows: the
    columns of each prompt's row.
    """
    mean = np.nanmean(np.where(valid, rewards, np.nan), axis=1, keepdims=True)
    weights = [row.get("weight", 1.0) for row in rows]
    return (rewards - mean) * np.array(weights)[:, None]


def next_turns(rewards, valid, **others):
    """What a turn and the one behind it earned, minus the mean of the group's others at that turn.

    rewards[P, G, K] of turns, 0 where there is none; valid[P, G, K]: where there is a turn. A mean
    of the others, not of all, leaves the gradient's direction as it is.
    """
    earned = rewards.copy()
    earned[:, :, :-1] += rewards[:, :, 1:]
    earned *= valid
    others_earned = earned.sum(axis=1, keepdims=True) - earned
    num_others = valid.sum(axis=1, keepdims=True) - valid
    return np.where(valid, earned - others_earned / np.maximum(num_others, 1), 0.0)
