"""Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): how many groups to request, and which of them
to train on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from shoal.algorithm.advantage import has_variance
from shoal.config.choices import advantage_of
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.records import Group, ShoalError
from shoal.rewards.scores import ACCURACY, weighted_sum

COMPUTED = ("correct", "score", "reward")
"""Values of `algorithm.dynamic_sampling_by` that name no number which a reward function logged."""

MOST_AHEAD = 3
"""Before any group of a step is known, at most so many times the step's groups are requested."""


def num_extra(wanted: int, useful_share: float) -> int:
    """Returns how many groups to request beyond `wanted`, if a step's groups are requested before
    its turn: as many as are likely to be needed if the newest share of useful groups holds. Later a
    further round would have to be waited for. At most (MOST_AHEAD - 1) * `wanted`; 0 if all groups
    were useful."""
    expected = -int(-wanted // max(useful_share, 1e-9))  # rounded up
    return min(MOST_AHEAD * wanted, expected) - wanted


def num_missing(groups: Sequence[Group], wanted: int, is_useful: Callable[[Group], bool]) -> int:
    """Returns how many further groups to request, at most `wanted`; 0 once there are `wanted`
    useful ones. Assumes that the share of useful groups stays what it was so far: with 8 wanted and
    6 of 8 groups useful, 3 more are requested, since 2 of them are likely to be useful."""
    num_useful = sum(map(is_useful, groups))
    num_lacking = max(0, wanted - num_useful)
    expected = -(-num_lacking * len(groups) // max(num_useful, 1))  # rounded up
    return min(wanted, expected)


def select(
    groups: Sequence[Group], wanted: int, is_useful: Callable[[Group], bool]
) -> tuple[list[Group], list[Group]]:
    """Chooses `wanted` groups to train on, and returns (these, the discarded others), both in the
    order of their prompts. Useful groups are chosen first, and if there are too few, others fill
    up; if there are fewer than `wanted` groups, all are chosen. The choice does not depend on which
    group finished first."""
    useful = []
    others = []
    for number, group in enumerate(groups):
        if is_useful(group):
            useful.append(number)
        else:
            others.append(number)
    chosen = set((useful + others)[:wanted])
    of_the_step = []
    discarded = []
    for number, group in enumerate(groups):
        if number in chosen:
            of_the_step.append(group)
        else:
            discarded.append(group)
    return of_the_step, discarded


def too_few_text(
    step: int,
    groups: Sequence[Group],
    wanted: int,
    is_useful: Callable[[Group], bool],
    a: AlgorithmSection,
) -> str:
    """Returns the error for a step (from 0) of whose sampled `groups` fewer than `wanted` are
    useful: how many are, why no more were sampled, and which keys help."""
    num_useful = sum(map(is_useful, groups))
    if len(groups) < (1 + a.max_sampling_rounds) * wanted:
        reason = "no other prompt of the data is left"
    else:
        reason = f"algorithm.max_sampling_rounds={a.max_sampling_rounds} allows no more"
    return (
        f"step {step + 1}: dynamic sampling keeps {num_useful} of {len(groups)} groups, fewer than "
        f"the {wanted} of a step, and {reason}: the completions of the others do not differ in "
        f"algorithm.dynamic_sampling_by={a.dynamic_sampling_by}. Their questions may be too hard "
        "or too easy; change the data, raise algorithm.max_sampling_rounds, or train on such "
        "groups with algorithm.on_too_few_groups=fill"
    )


def has_signal(group: Group, a: AlgorithmSection, penalty: str = "") -> bool:
    """True if dynamic sampling keeps the group, because its completions differ in what
    `dynamic_sampling_by` names.

    correct: the `acc` that a reward function logged; without one the task's verdict of right or
    wrong; without that, as `score`.
    score: the reward without the function called `penalty`.
    reward: the whole reward.
    Any other name: the number that a reward function logged under it. ShoalError if the group has
    none, or if it is no number.

    If the advantage normalises each reward function separately, a difference in a single function
    that has a weight is enough for `score` and `reward`.
    """
    by = a.dynamic_sampling_by
    has_accuracy = any(value is not None for value in group.extra.get(ACCURACY, ()))
    if by == "correct" and has_accuracy:
        by = ACCURACY
    if by == "correct" and group.correct is not None:
        return has_variance(group.valid, group.correct[None].astype(float))
    if by not in COMPUTED:
        return has_variance(group.valid, _logged_numbers(group, by)[None])
    left_out = "" if by == "reward" else penalty
    weights = []
    rows = []
    for name, component in group.reward_components.items():
        if name != left_out:
            weights.append(group.reward_weights.get(name, 1.0))
            rows.append(component)
    values = np.array(rows).reshape(len(rows), len(group.rewards))  # also of no function
    # Without the penalty the reward is added up again from the other functions.
    reward = weighted_sum(weights, values) if left_out else group.rewards
    compared = [reward]
    if advantage_of(a.advantage).by_function:
        for weight, of_function in zip(weights, values, strict=True):
            if weight:
                compared.append(of_function)
    return has_variance(group.valid, np.stack(compared))


def check_logged(by: str, logged: Collection[str]) -> None:
    """Raises ShoalError if `by`, a value of `algorithm.dynamic_sampling_by`, names a number that is
    not among those that reward functions logged."""
    if by not in COMPUTED and by not in logged:
        raise ShoalError(
            f"algorithm.dynamic_sampling_by={by}: no reward function gives a number of that name "
            f"(given: {', '.join(logged) or 'none'}); let one return it in its dict with `score` "
            f"(verl) or pass it to log_extra (TRL), or set one of {', '.join(COMPUTED)}",
            "algorithm.dynamic_sampling_by",
        )


def _logged_numbers(group: Group, name: str) -> np.ndarray:
    """Returns the numbers that a reward function logged under a name, float64[G]; NaN where it
    logged none. ShoalError if the group has no such column, or if an entry is no number."""
    check_logged(name, group.extra)
    numbers = np.full(len(group.rewards), np.nan)
    for index, value in enumerate(group.extra[name]):
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise ShoalError(
                f"algorithm.dynamic_sampling_by={name}: a reward function logged {value!r:.60} as "
                f"{name}, which is no number",
                "algorithm.dynamic_sampling_by",
            )
        numbers[index] = value
    return numbers
