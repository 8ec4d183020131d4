"""Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): how many groups to ask for, and which of them to learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.types import Group

MOST_AHEAD = 3
"""At most so many times the groups of a step are asked for before anything of it is known."""


def beyond(wanted: int, useful_share: float) -> int:
    """Groups to ask for beyond `wanted` where that is before the step's turn: as many as it takes at the share of the
    newest step learnt by then. A further round would have to be waited for."""
    return min(MOST_AHEAD * wanted, -int(-wanted // max(useful_share, 1e-9))) - wanted


def missing(groups: Sequence[Group], wanted: int, is_useful: Callable[[Group], bool]) -> int:
    """Further groups to ask for, 0 once there are enough: as many as the share of useful groups so far asks for, so
    that one more round mostly suffices."""
    useful = sum(map(is_useful, groups))
    return min(wanted, -(-max(0, wanted - useful) * len(groups) // max(useful, 1)))


def divide(groups: Sequence[Group], wanted: int,
           is_useful: Callable[[Group], bool]) -> tuple[list[Group], list[Group]]:
    """(the groups of the step, those that are discarded): useful ones first, in the order of the prompts, since the
    choice must not depend on which finished first."""
    order = sorted(range(len(groups)), key=lambda n: (not is_useful(groups[n]), n))
    chosen = sorted(order[:wanted])
    return [groups[n] for n in chosen], [group for n, group in enumerate(groups) if n not in chosen]
