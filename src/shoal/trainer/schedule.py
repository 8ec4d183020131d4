"""Which version of the weights a step samples from, and when the sampler takes a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config.derived import ROUNDS
from shoal.config.sections.train import TrainSection
from shoal.records import Group

WAITED = 0.05
"""Share of the time that the trainer waits for samples, from which on more steps are requested
ahead."""


FEWEST = 3
"""Steps in which that share is measured at least: lengths differ from step to step."""


PATIENCE = 10
"""Steps without such waits after which fewer steps are requested ahead; twice as many each time
that was too few."""


MOST_PATIENCE = 16 * PATIENCE


@dataclass(frozen=True)
class Schedule:
    """Which version each step samples from: n * floor(max(0, step - lag) / n), with n =
    `weight_sync_interval`.

    With `newest` that is the oldest on which a group of the step may start. A version that a
    resumed run's checkpoint does not hold, since the run had another schedule before, gives way to
    the next one that it holds.
    """

    lag: int = 0
    weight_sync_interval: int = 1
    newest: bool = False
    held: tuple[int, ...] = ()
    """Versions that a resumed run began with, in order: the checkpoint's own is the last."""

    @property
    def max_staleness(self) -> int:
        """How many versions old a token may be when a step learns from it."""
        return self.lag + self.weight_sync_interval - 1

    def check(self, groups: Sequence[Group]) -> None:
        """RuntimeError where a step is to learn from tokens older than the bound, or of later
        weights than its own, whatever was requested and answered."""
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
        """The version that a step samples from."""
        interval = self.weight_sync_interval
        wanted = interval * (max(0, step - self.lag) // interval)
        for version in self.held:
            if version >= wanted:
                return version
        return wanted

    def keep_from(self, step: int) -> int:
        """The oldest version that may be sampled from once a step begins."""
        return step if self.newest else self.version(step)

    def older_versions(self, version: int) -> list[int]:
        """Versions before this one from which the steps that follow it sample."""
        if self.newest:
            return []
        return sorted(number for number in self._sampled_after(version) if number < version)

    def publishes(self, version: int) -> bool:
        """True if a step samples from this version."""
        return version in self._sampled_after(version)

    def _sampled_after(self, version: int) -> set[int]:
        """The versions that steps sample from after so many updates, but for later ones."""
        return {self.version(step) for step in range(version, version + self.max_staleness + 1)}


class Lookahead:
    """How many steps are requested before their turn: with newest weights as few as keep the
    trainer from waiting, so that samples are as fresh as full speed allows; of fixed versions, all
    that the lag allows."""

    def __init__(self, schedule: Schedule) -> None:
        self.adapts = schedule.newest
        self.most = schedule.max_staleness
        self.steps = 1 if self.adapts else self.most
        self._patience = PATIENCE
        self._was_lowered = False
        self._measure(after=0)

    def note(self, waited: float, seconds: float) -> None:
        """Adds how many of a step's seconds the trainer waited for its groups."""
        if not self.adapts:
            return
        self._count += 1
        if self._count <= 0:
            return
        self._waited += waited
        self._seconds += seconds
        waits = self._waited > WAITED * self._seconds
        if waits and self._count >= FEWEST and self.steps < self.most:
            if self._was_lowered:
                self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._was_lowered = False
            self.steps += 1
            self._measure(after=self.steps)
        elif self._count >= self._patience:
            if waits or self.steps <= 1:
                self._measure(after=0)
                return
            self._was_lowered = True
            self.steps -= 1
            self._measure(after=self.steps)

    def _measure(self, after: int) -> None:
        """Begins to measure once the groups of so many steps, which were requested before, are used
        up."""
        self._waited = 0.0
        self._seconds = 0.0
        self._count = -after


# ---- when


def schedule_of(t: TrainSection) -> Schedule:
    """The version that each step samples from: `max_staleness = lag + weight_sync_interval - 1`."""
    # The n - 1 steps between two publications are stale anyway; only what exceeds them is a lag.
    lag = 0 if t.max_staleness == -1 else t.max_staleness - (t.weight_sync_interval - 1)
    return Schedule(lag, t.weight_sync_interval, t.versions == "newest")


def step_seconds(schedule: Schedule, sampling: float, training: float, own_devices: bool) -> float:
    """Mean seconds of a step in a long run.

    Sampling waits for the weights that its step is sampled from, training for its step's samples.
    Where the sampler has no devices of its own, the two take turns.

    >>> step_seconds(Schedule(lag=0), 3.0, 2.0, own_devices=True)
    5.0
    >>> step_seconds(Schedule(lag=1), 3.0, 2.0, own_devices=True)
    3.0
    """
    if not own_devices:
        return sampling + training
    sampled = 0.0  # when the newest step's groups were complete
    trained = [0.0]  # when each step's update has ended; the first entry is the start
    steady = ROUNDS * schedule.weight_sync_interval
    for step in range(2 * steady):
        # Requested as early as its age allows, and answered by the version that was published for
        # it.
        oldest_allowed = trained[max(0, step - schedule.max_staleness)]
        published = trained[schedule.version(step)]
        sampled = max(sampled, oldest_allowed, published) + sampling
        trained.append(max(trained[-1], sampled) + training)
    return (trained[-1] - trained[steady]) / steady
