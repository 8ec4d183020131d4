"""Decides which version of the weights each step samples from, and how many steps are requested
ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config.derived import ROUNDS
from shoal.config.sections.train import TrainSection
from shoal.records import Group

WAITED = 0.05
"""If the trainer waits for samples for more than this share of the time, more steps are requested
ahead."""


FEWEST = 3
"""That share is measured over at least so many steps, because lengths differ from step to step."""


PATIENCE = 10
"""Steps without such waits after which fewer steps are requested ahead; doubled each time that
fewer were too few."""


MOST_PATIENCE = 16 * PATIENCE


@dataclass(frozen=True)
class Schedule:
    """Which version each step samples from: n * floor(max(0, step - lag) / n), with n =
    `weight_sync_interval`.

    With `takes_newest` this is the oldest version on which a group of the step may start. If a
    resumed run's checkpoint does not hold that version, because the run had another schedule
    before, the next version that it holds is used instead.
    """

    lag: int = 0
    weight_sync_interval: int = 1
    takes_newest: bool = False
    restored_versions: tuple[int, ...] = ()
    """Versions that a resumed run began with, in order; the last is the checkpoint's own."""

    @property
    def max_staleness(self) -> int:
        """How many versions old a token may be when a step trains on it."""
        return self.lag + self.weight_sync_interval - 1

    def check(self, groups: Sequence[Group]) -> None:
        """Raises RuntimeError if a step's groups have tokens that are older than the bound, or from
        later weights than the step's own, whatever was requested and answered. A version's age is
        counted from the group's own step. Completions without a sampled token are skipped."""
        for group in groups:
            for completion in group.completions:
                if not completion.num_sampled:
                    continue
                versions = completion.sampled_versions
                oldest = group.step - int(versions.min())
                newest = group.step - int(versions.max())
                if newest < 0 or oldest > self.max_staleness:
                    raise RuntimeError(
                        f"step {group.step + 1} got tokens {newest} to {oldest} versions old, "
                        f"expected 0 to {self.max_staleness} (train.max_staleness): row "
                        f"{group.example.row}"
                    )

    def version(self, step: int) -> int:
        """Returns the version that a step samples from, by the formula of the class; with newest
        weights, the oldest version on which a group of the step may start."""
        interval = self.weight_sync_interval
        wanted = interval * (max(0, step - self.lag) // interval)
        # Rising order: the first that is new enough is the oldest such. A new run has none.
        for version in self.restored_versions:
            if version >= wanted:
                return version
        return wanted

    def keep_from(self, step: int) -> int:
        """Returns the oldest version that may be sampled from once a step begins: with
        `takes_newest` the version of the step's own number, else the one that the step samples
        from."""
        return step if self.takes_newest else self.version(step)

    def older_versions(self, version: int) -> list[int]:
        """Returns the versions before this one that the steps after it sample from, in order; []
        with `takes_newest`."""
        if self.takes_newest:
            return []
        return sorted(number for number in self._sampled_after(version) if number < version)

    def publishes(self, version: int) -> bool:
        """True if a step samples from this version."""
        return version in self._sampled_after(version)

    def _sampled_after(self, version: int) -> set[int]:
        """Returns all versions up to `version` that the steps after `version` updates sample from,
        and some later ones: those of as many steps as samples may be old."""
        return {self.version(step) for step in range(version, version + self.max_staleness + 1)}


class Lookahead:
    """How many steps are requested before their turn (`steps`). With newest weights these are as
    few as keep the trainer from waiting, so that samples are as fresh as full speed allows; with
    fixed versions, as many as the lag allows."""

    def __init__(self, schedule: Schedule) -> None:
        """Starts with 1 step ahead if the schedule takes the newest weights; else with as many as
        the lag allows, which `note` never changes."""
        self.adapts = schedule.takes_newest
        self.most = schedule.max_staleness
        self.steps = 1 if self.adapts else self.most
        self._patience = PATIENCE
        self._was_lowered = False
        self._measure(after=0)

    def note(self, waited: float, seconds: float) -> None:
        """Notes that the trainer waited for its groups for `waited` of a step's `seconds`, and
        adjusts `steps`; does nothing without newest weights. One more step is requested ahead once
        the trainer has waited for more than WAITED of the time, measured over FEWEST steps or more;
        one fewer after PATIENCE steps without such waits. Steps whose groups were requested before
        the last change are not measured. `steps` stays between 1 and the schedule's
        `max_staleness`."""
        if not self.adapts:
            return
        self._count += 1
        if self._count <= 0:  # this step's groups were requested before the last change
            return
        self._waited += waited
        self._seconds += seconds
        waits = self._waited > WAITED * self._seconds
        if waits and self._count >= FEWEST and self.steps < self.most:
            # The last change was one step fewer, which was too few: the next such change comes
            # later.
            if self._was_lowered:
                self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._was_lowered = False
            self.steps += 1
            self._measure(after=self.steps)
        elif self._count >= self._patience:
            # There is nothing to change.
            if waits or self.steps <= 1:
                self._measure(after=0)
                return
            self._was_lowered = True
            self.steps -= 1
            self._measure(after=self.steps)

    def _measure(self, after: int) -> None:
        """Starts a new measurement after `after` more steps, whose groups were requested before and
        have to be used up."""
        self._waited = 0.0
        self._seconds = 0.0
        self._count = -after


# ---- the settings' schedule, and the time of its steps


def schedule_of(t: TrainSection) -> Schedule:
    """Returns the schedule of the settings, for which `max_staleness = lag + weight_sync_interval -
    1`."""
    # The n - 1 steps between two publications are stale anyway; only what exceeds n - 1 is a lag.
    # -1 stands for weight_sync_interval - 1, the least that is possible.
    lag = 0 if t.max_staleness == -1 else t.max_staleness - (t.weight_sync_interval - 1)
    return Schedule(lag, t.weight_sync_interval, t.versions == "newest")


def step_seconds(schedule: Schedule, sampling: float, training: float, own_devices: bool) -> float:
    """Returns the mean seconds of a step in a long run.

    `sampling` and `training` are the seconds that a step needs for each. Sampling a step waits for
    the weights that the step is sampled from, training waits for the step's samples. Without
    `own_devices`, that is devices that only sample, the two take turns.

    >>> step_seconds(Schedule(lag=0), 3.0, 2.0, own_devices=True)
    5.0
    >>> step_seconds(Schedule(lag=1), 3.0, 2.0, own_devices=True)
    3.0
    """
    if not own_devices:
        return sampling + training
    sampled = 0.0  # when the newest step's groups were complete
    trained = [0.0]  # when each step's update has ended; the first entry is the start
    # the steps of each half of what is simulated
    steady = ROUNDS * schedule.weight_sync_interval
    for step in range(2 * steady):
        # A step is requested as early as its age allows, and sampled from the version that was
        # published for it.
        oldest_allowed = trained[max(0, step - schedule.max_staleness)]
        published = trained[schedule.version(step)]
        sampled = max(sampled, oldest_allowed, published) + sampling
        trained.append(max(trained[-1], sampled) + training)
    # The second half alone: the first steps do not wait as all later ones do.
    return (trained[-1] - trained[steady]) / steady
