"""Turns the rewards of a group into advantages: float64 on the host, before anything is packed.

Each estimator has a row in `shoal.config.choices`, and uses what it needs of these:

    estimator(rewards[P, G], valid[P, G], components=, weights=, lengths=, **settings)
        -> float64[P, G]

`valid` is False if a completion is missing or could not be scored: whatever its reward holds, NaN
included, it is left out of every mean and deviation, and its advantage is 0. A NaN where `valid` is
True is not hidden: it spreads over its group. `components[F, P, G]` are the values of the F reward
functions, NaN where one could not judge; `weights[F]` are their weights. `lengths[P, G]` are the
completions' numbers of sampled tokens. Settings are those that the row names:

    std_ddof      the variance divides by the number of values less this
    std_eps       added to a standard deviation; with std_eps_mode="max" the least deviation
    whiten_over   mean and deviation of the step count each completion once ("completions"), or
                  once for each of its tokens ("tokens", as in verl), which needs `lengths`

With `algorithm.credit` it is turns that have advantages, [P, G, K] for at most K turns:

    rewards of turns -> returns_to_go -> by_turn     among the completions that have a turn k
                                         by_state    among the turns that began in one state

A critic gives each time step of a completion (a token, or with credit by turn a turn) a value. Then
time steps have advantages, [N, K] for N completions of at most K steps:

    rewards and values of steps -> gae -> whitened
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

Rewards = Float[np.ndarray, "P G"]
Valid = Bool[np.ndarray, "P G"]
Lengths = Int[np.ndarray, "P G"]
TurnRewards = Float[np.ndarray, "P G K"]
Turns = Bool[np.ndarray, "P G K"]
States = Int[np.ndarray, "P G K"]
Steps = Float[np.ndarray, "N K"]


def nonzero_std(rewards: Rewards, valid: Valid) -> Bool[np.ndarray, "P"]:
    """True for each group that has two or more valid completions whose rewards are not all the
    same.

    The largest and the smallest reward are compared exactly: the computed deviation of equal
    rewards need not be 0 (0.1, 0.1, 0.1 have a mean that is not 0.1).
    """
    largest = np.where(valid, rewards, -np.inf).max(axis=1)
    smallest = np.where(valid, rewards, np.inf).min(axis=1)
    return (valid.sum(axis=1) >= 2) & ~(largest == smallest)


def has_variance(valid: Bool[np.ndarray, "G"], values: Float[np.ndarray, "N G"]) -> bool:
    """True if the valid completions of one group differ in any of N values, such as the reward and
    what each reward function gave. A NaN is not compared: two or more other values have to differ.

    Dynamic sampling replaces groups for which this is False: all right or all wrong, they have no
    gradient (DAPO, arXiv 2503.14476, eq. 11).
    """
    return bool(nonzero_std(values, valid & ~np.isnan(values)).any())


def grpo(
    rewards: Rewards,
    valid: Valid,
    *,
    std_ddof: int,
    std_eps: float,
    std_eps_mode: str = "add",
    **unread: object,
) -> Rewards:
    """Returns (r - mean) / (std + std_eps) within each group; with `std_eps_mode="max"` (r - mean)
    / max(std, std_eps). "add" and "max" are its only values.

    The variance divides by the number of valid completions less `std_ddof`. DeepSeekMath, arXiv
    2402.03300, section 4.1.2 (outcome supervision). A completion that is not valid gets 0, and no
    mean counts it. Equal rewards give exactly 0. `unread` are settings that other estimators read.
    """
    centred = _centred(rewards, valid)
    return centred / _divisor(_std(centred, valid, std_ddof, axis=1), std_eps, std_eps_mode)


def dr_grpo(rewards: Rewards, valid: Valid, **unread: object) -> Rewards:
    """Returns r - mean of the group, not divided by the deviation, which would give very easy and
    very hard prompts more weight. Dr. GRPO, arXiv 2503.20783, section 3.2. A completion that is not
    valid gets 0, and no mean counts it. Equal rewards give exactly 0."""
    return _centred(rewards, valid)


def rloo(rewards: Rewards, valid: Valid, **unread: object) -> Rewards:
    """Returns r - mean of the group's other valid completions. Kool et al., "Buy 4 REINFORCE
    Samples, Get a Baseline for Free!" (2019); for language models RLOO, arXiv 2402.14740. A
    completion that is not valid gets 0, and no mean counts it. Equal rewards give exactly 0."""
    # r minus the others' mean is (r - mean) n / (n - 1): computed by scaling, a group of equal
    # rewards stays exactly 0.
    number = valid.sum(axis=1, keepdims=True)
    # With one valid completion the difference is 0, whatever it is multiplied by.
    return _centred(rewards, valid) * (number / np.maximum(number - 1, 1))


def batch_std(
    rewards: Rewards,
    valid: Valid,
    *,
    std_ddof: int,
    std_eps: float,
    std_eps_mode: str = "add",
    **unread: object,
) -> Rewards:
    """Returns (r - mean of the group) / (std of all valid rewards of the step + std_eps). "Tricks
    or Traps", arXiv 2508.08221; TRL's scale_rewards="batch". A completion that is not valid gets 0,
    and no mean counts it. `std_eps_mode="max"` divides by max(std, std_eps); the variance divides
    by the number of values less `std_ddof`."""
    spread = _std(_centred_over(rewards, valid, axis=None), valid, std_ddof, axis=None)
    return _centred(rewards, valid) / _divisor(spread, std_eps, std_eps_mode)


def reinforce_pp(
    rewards: Rewards,
    valid: Valid,
    *,
    std_ddof: int,
    std_eps: float,
    std_eps_mode: str = "add",
    whiten_over: str = "completions",
    lengths: Lengths | None = None,
    **unread: object,
) -> Rewards:
    """Returns (r - mean) / (std + std_eps), with mean and std of all valid rewards of the step
    whatever their group. REINFORCE++, arXiv 2501.03262. A completion that is not valid gets 0, and
    no mean counts it. With `whiten_over="tokens"` each completion counts once for each of its
    tokens (`lengths`). The other settings are those of `grpo`."""
    if whiten_over != "tokens":
        lengths = None
    return _whitened(rewards, valid, lengths, std_ddof, std_eps, std_eps_mode)


def reinforce_pp_baseline(
    rewards: Rewards,
    valid: Valid,
    *,
    std_ddof: int,
    std_eps: float,
    std_eps_mode: str = "add",
    whiten_over: str = "completions",
    lengths: Lengths | None = None,
    **unread: object,
) -> Rewards:
    """Returns r - mean of the group, divided by (std + std_eps) of these differences over the whole
    step; over tokens, the step's mean is subtracted first. REINFORCE++-baseline, arXiv 2501.03262.
    A completion that is not valid gets 0, and no mean counts it. With `whiten_over="tokens"` each
    completion counts once for each of its tokens (`lengths`). The other settings are those of
    `grpo`."""
    centred = _centred(rewards, valid)
    if whiten_over != "tokens":
        lengths = None
    return _whitened_groups(centred, valid, lengths, std_ddof, std_eps, std_eps_mode)


def maxrl(rewards: Rewards, valid: Valid, **unread: object) -> Rewards:
    """Returns (r - mean) / mean of the group: with rewards 0 and 1 the mean gradient is that of a
    truncated log-likelihood of success. Defined for rewards of 0 or more, for which it is at most G
    - 1: a group with a reward below 0, or with none above 0, has advantage 0. MaxRL, arXiv
    2602.02710. A completion that is not valid gets 0, and no mean counts it."""
    # Near a mean of 0 the quotient has no bound: with a penalty below 0, (1, -0.99) would have
    # advantages of 199.
    number = np.maximum(valid.sum(axis=1, keepdims=True), 1)
    mean = np.where(valid, rewards, 0.0).sum(axis=1, keepdims=True) / number
    undefined = (mean <= 0) | (np.where(valid, rewards, 0.0) < 0).any(axis=1, keepdims=True)
    centred = _centred(rewards, valid)
    return np.divide(centred, mean, out=np.zeros_like(centred), where=~undefined)


def gdpo(
    rewards: Rewards,
    valid: Valid,
    *,
    std_ddof: int,
    std_eps: float,
    std_eps_mode: str = "add",
    components: Float[np.ndarray, "F P G"] | None = None,
    weights: Float[np.ndarray, "F"] | None = None,
    whiten_over: str = "completions",
    lengths: Lengths | None = None,
) -> Rewards:
    """Normalises each reward function's values within their groups as `grpo` does, adds them up by
    weight and divides the sum by its deviation over the step, as `reinforce_pp_baseline` does: a
    reward of large spread does not drown the others. Without `components`, the rewards are the only
    function. GDPO, arXiv 2601.05242. `components` are [F, P, G], NaN if a function could not judge:
    it then adds 0 for that completion; `weights` are 1 by default. Settings are those of
    `reinforce_pp_baseline`."""
    parts = rewards[None] if components is None else components
    scale = np.ones(len(parts)) if weights is None else weights
    total = np.zeros(rewards.shape)
    for part, weight in zip(parts, scale, strict=True):
        # A NaN must not count as 0: a completion that one function could not judge would then move
        # that function's mean for the others.
        judged = valid & ~np.isnan(part)
        total += weight * grpo(
            part, judged, std_ddof=std_ddof, std_eps=std_eps, std_eps_mode=std_eps_mode
        )
    if whiten_over != "tokens":
        lengths = None
    return _whitened_groups(total, valid, lengths, std_ddof, std_eps, std_eps_mode)


def none(rewards: Rewards, valid: Valid, **unread: object) -> Rewards:
    """Returns 0 everywhere: a teacher's log-probs are the only signal."""
    return np.zeros(rewards.shape)


def sft(rewards: Rewards, valid: Valid, **unread: object) -> Rewards:
    """Returns 1 for each valid completion: with the loss `reinforce`, the data's answers are
    learned by their log-likelihood."""
    return valid.astype(np.float64)


def returns_to_go(rewards: TurnRewards, discount: float) -> TurnRewards:
    """Returns for each turn its reward and those of the later turns of its completion, of which the
    n-th next counts discount^n. Rewards after a completion's last turn must be 0."""
    returns = np.zeros(rewards.shape)
    following = np.zeros(rewards.shape[:2])  # the return of the turn behind
    for turn in reversed(range(rewards.shape[2])):
        following = rewards[:, :, turn] + discount * following
        returns[:, :, turn] = following
    return returns


def by_turn(
    returns: TurnRewards,
    turns: Turns,
    *,
    divided: bool,
    std_ddof: int = 1,
    std_eps: float = 0.0,
    std_eps_mode: str = "add",
    **unread: object,
) -> TurnRewards:
    """Returns the return-to-go of each turn, minus the mean return-to-go of the group's other
    completions at the same turn: of those that have such a turn, and 0 if there are none.

    `turns` is True for the turns that a valid completion has; elsewhere the advantage is 0. What is
    subtracted does not depend on the completion itself, so the policy gradient is that of the
    returns, without a bias, although completions stop at different turns. A mean that includes the
    completion would shrink its advantage by (n - 1) / n, differently at each turn.

    With `divided` all advantages of a group are divided by the root of their mean square, by the
    settings of `grpo`: this is no policy gradient, since the divisor depends on the completion. For
    completions of one turn it is `grpo`, and without `divided` it is `rloo`.
    """
    num_prompts, group_size, num_turns = returns.shape
    # A row for each turn of each group, as `rloo` compares the entries of a row.
    rows = np.moveaxis(returns, 2, 1).reshape(-1, group_size)
    has_turn = np.moveaxis(turns, 2, 1).reshape(-1, group_size)
    is_alone = has_turn & (has_turn.sum(axis=1, keepdims=True) == 1)
    differences = rloo(rows, has_turn) + np.where(is_alone, rows, 0.0)
    differences = np.moveaxis(differences.reshape(num_prompts, num_turns, group_size), 1, 2)
    if not divided:
        return differences
    flat = (num_prompts, group_size * num_turns)
    spread = _std(differences.reshape(flat), turns.reshape(flat), std_ddof, axis=1)
    return differences / _divisor(spread, std_eps, std_eps_mode)[:, :, None]


def by_state(
    rewards: Rewards,
    valid: Valid,
    returns: TurnRewards,
    turns: Turns,
    states: States,
    estimator: Callable[..., np.ndarray],
    settings: Mapping[str, Any],
) -> TurnRewards:
    """Returns the advantage of each completion by its whole reward, plus that of each turn by its
    return-to-go among all turns of the group that began in the same state. Both are computed by
    `estimator` (such as `grpo`) with its `settings`. GiGPO, arXiv 2505.10978, eq. 3 to 8, with a
    weight of 1 for the second.

    `states` has the same number for turns of a group that began in the same state; a state that
    occurs once adds 0. `turns` is True for the turns that a valid completion has; elsewhere the
    advantage is 0. A state that a completion meets twice is compared with the completion's own
    later rewards, so this is no policy gradient.
    """
    of_states = np.zeros(returns.shape)
    for group in range(len(returns)):
        for state in np.unique(states[group][turns[group]]):
            members = turns[group] & (states[group] == state)  # [G, K]
            values = returns[group][members][None]  # as a group of their own
            of_state = estimator(values, np.ones(values.shape, bool), **settings)
            of_states[group][members] = of_state[0]
    of_completions = estimator(rewards, valid, **settings)
    return np.where(turns, of_completions[:, :, None] + of_states, 0.0)


def gae(
    rewards: Steps, values: Steps, discount: float, lam: float | Float[np.ndarray, "N"]
) -> Steps:
    """Returns the generalised advantage estimate of each time step: with the value V of a step,
    that of the next V' (0 after the last) and `discount` d,

        delta = r + d V' - V        advantage = sum over this and the later steps, of which the n-th
                                    next counts (d lam)^n, of delta

    Schulman et al. 2016, arXiv 1506.02438, eq. 16. With `lam` 1 it is the return from the step on,
    minus V; with 0 it is delta. What lies behind a completion's last step must be 0 in both arrays,
    and has advantage 0. Advantage + V is what a critic learns to say of the step.
    """
    advantages = np.zeros(rewards.shape)
    next_value = np.zeros(len(rewards))
    next_advantage = np.zeros(len(rewards))
    for step in reversed(range(rewards.shape[1])):
        delta = rewards[:, step] + discount * next_value - values[:, step]
        next_advantage = delta + discount * lam * next_advantage
        next_value = values[:, step]
        advantages[:, step] = next_advantage
    return advantages


def length_adaptive_lambda(num_steps: Int[np.ndarray, "N"], alpha: float) -> Float[np.ndarray, "N"]:
    """Returns 1 - 1 / (alpha l) for completions of l time steps, 0 where that is below 0: the
    weights of later deltas sum up to about alpha l, so that the estimate of a long completion
    reaches as far, relative to its length, as that of a short one. VAPO, arXiv 2504.05118, section
    4.2."""
    return np.maximum(0.0, 1 - 1 / (alpha * np.maximum(num_steps, 1)))


def whitened(
    advantages: Steps,
    lengths: Int[np.ndarray, "N K"],
    *,
    std_ddof: int = 1,
    std_eps: float = 0.0,
    std_eps_mode: str = "add",
    **unread: object,
) -> Steps:
    """Returns (A - mean) / (std + std_eps), over all time steps of the training step, each of which
    counts `lengths` times, as many tokens as it has; 0 where that is 0. Exactly 0 if all are the
    same. This is no policy gradient, since mean and deviation depend on the samples."""
    present = lengths > 0
    return _whitened(advantages, present, lengths, std_ddof, std_eps, std_eps_mode)


def _centred(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Returns r - mean of the group; exactly 0 in a group that is not `nonzero_std`."""
    return _centred_over(rewards, valid & nonzero_std(rewards, valid)[:, None], axis=1)


def _centred_over(values: np.ndarray, counts: np.ndarray, axis: int | None) -> np.ndarray:
    """Returns x - mean, for a mean in which each x counts `counts` times (bools or whole numbers);
    0 where that is 0, whatever x is. The mean is of each group with axis 1, of all groups together
    with None."""
    # Masked before the product: 0 times the NaN of an invalid sibling is NaN.
    kept = np.where(counts, values, 0.0).astype(np.float64)
    total = (counts * kept).sum(axis=axis, keepdims=True)
    mean = total / np.maximum(counts.sum(axis=axis, keepdims=True), 1)
    return np.where(counts, kept - mean, 0.0)


def _std(centred: np.ndarray, counts: np.ndarray, ddof: int, axis: int | None) -> np.ndarray:
    """Returns the standard deviation of centred values that each count `counts` times: of each
    group with axis 1, of all groups together with None. The variance divides by their number less
    `ddof`, by 1 at least."""
    number = counts.sum(axis=axis, keepdims=True)
    total = (counts * centred**2).sum(axis=axis, keepdims=True)
    return np.sqrt(total / np.maximum(number - ddof, 1))


def _divisor(std: np.ndarray, eps: float, eps_mode: str) -> np.ndarray:
    """Returns what to divide by: std + eps, or max(std, eps) with `eps_mode="max"` (its other value
    is "add"); 1 where that is 0, since then every numerator is 0 too."""
    # TRL, verl and Tunix add (1e-4, 1e-6, 1e-6); TorchRL takes the maximum. With G=2 and rewards 0
    # and 1 the ddof matters more: 0.707 with ddof 1, 1.0 with ddof 0 (MaxText).
    size = np.maximum(std, eps) if eps_mode == "max" else std + eps
    return np.where(size == 0, 1.0, size)


def _whitened(
    values: np.ndarray,
    valid: np.ndarray,
    lengths: np.ndarray | None,
    ddof: int,
    eps: float,
    eps_mode: str,
) -> np.ndarray:
    """Returns (x - mean) / (std + eps), with mean and std of the step's valid completions, each
    counted once; or `lengths` times if that is given. Exactly 0 if all x are the same."""
    counts = valid if lengths is None else np.where(valid, lengths, 0)
    # All completions of the step as one group.
    if not nonzero_std(values.reshape(1, -1), (counts > 0).reshape(1, -1))[0]:
        return np.zeros(values.shape)
    centred = _centred_over(values, counts, axis=None)
    return centred / _divisor(_std(centred, counts, ddof, axis=None), eps, eps_mode)


def _whitened_groups(
    values: np.ndarray,
    valid: np.ndarray,
    lengths: np.ndarray | None,
    ddof: int,
    eps: float,
    eps_mode: str,
) -> np.ndarray:
    """Returns what `_whitened` does, for values whose mean is 0 within each group.

    If each completion counts once (no `lengths`), the mean over the step is then 0 too, and is not
    subtracted: rounding would turn a group's exact zeros into small numbers, and such a group would
    then be computed for nothing. Invalid completions must have the value 0.
    """
    if lengths is not None:
        return _whitened(values, valid, lengths, ddof, eps, eps_mode)
    spread = _std(_centred_over(values, valid, axis=None), valid, ddof, axis=None)
    return values / _divisor(spread, eps, eps_mode)
