"""How many steps are asked for ahead of their turn."""

from __future__ import annotations

import pytest

from shoal.trainer.schedule import MOST_PATIENCE, PATIENCE, Lookahead, Schedule


def play(lookahead: Lookahead, steps: int, needed: int) -> list[int]:
    """A trainer that waits in each step while fewer than `needed` are asked for ahead, else a
    little in every tenth. How many steps ahead were asked for, by step."""
    asked = []
    for step in range(steps):
        lookahead.note(0.3 if lookahead.steps < needed else 0.12 * (step % 10 == 3), 1.0)
        asked.append(lookahead.steps)
    return asked


@pytest.mark.parametrize("needed", [1, 2, 3, 4])
def test_as_few_steps_ahead_as_keep_the_trainer_from_waiting(needed):
    asked = play(Lookahead(Schedule(lag=4, takes_newest=True)), 400, needed)
    assert asked[0] == 1 and max(asked) == needed  # a single wait asks for no more
    assert asked[5 * needed] == needed  # found soon
    assert sum(asked[100:]) / 300 > needed - 0.2  # fewer are tried, more and more seldom


def test_more_than_the_bound_is_never_asked_for():
    lookahead = Lookahead(Schedule(lag=2, takes_newest=True))
    assert max(play(lookahead, 50, needed=9)) == 2 and play(lookahead, 50, needed=9) == [2] * 50


def test_fewer_are_asked_for_once_that_suffices():
    lookahead = Lookahead(Schedule(lag=4, takes_newest=True))
    play(lookahead, 40, needed=4)
    assert play(lookahead, 4 * MOST_PATIENCE + 8 * PATIENCE, needed=1)[-1] == 1


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [(Schedule(), 0), (Schedule(lag=3), 3), (Schedule(lag=1, weight_sync_interval=2), 2)],
)
def test_fixed_versions_are_asked_for_as_early_as_their_age_allows(schedule, steps):
    assert set(play(Lookahead(schedule), 60, needed=2)) == {steps}
