"""When a step's groups are asked for, and from which version of the weights."""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 5
"""Steps without a wait after which fewer steps ahead are asked for; twice as many each time that was too few."""
MOST_PATIENCE = 16 * PATIENCE
WAITED = 0.05
"""Share of a step's time that the trainer waits for samples, from which on more steps ahead are asked for."""


@dataclass(frozen=True)
class Schedule:
    """Which version each step samples from: n * floor(max(0, step - lag) / n), with n = `weight_sync_interval`.

    With `newest` that is the oldest on which a group of the step may start.
    """

    lag: int = 0
    weight_sync_interval: int = 1
    newest: bool = False
    ahead: int = 0  # with `newest`: steps asked for before their turn; 0 for as many as it takes, up to the lag

    def version(self, step: int) -> int:
        return self.weight_sync_interval * (max(0, step - self.lag) // self.weight_sync_interval)

    def keep_from(self, step: int) -> int:
        """The oldest version that may be sampled from once a step begins."""
        return step if self.newest else self.version(step)

    def older_versions(self, version: int) -> list[int]:
        """Versions before this one from which the steps that follow it sample."""
        if self.newest:
            return []
        steps = range(version, version + self.lag + self.weight_sync_interval)
        return sorted({self.version(step) for step in steps if self.version(step) < version})

    def publishes(self, version: int) -> bool:
        return version % self.weight_sync_interval == 0


class Lookahead:
    """How many steps are asked for before their turn: with newest weights as few as keep the trainer from waiting, so
    that samples are as fresh as full speed allows; of fixed versions, all that the lag allows."""

    def __init__(self, schedule: Schedule) -> None:
        self.adapts = schedule.newest and not schedule.ahead
        self.most = schedule.lag + schedule.weight_sync_interval - 1
        self.steps = 1 if self.adapts else schedule.ahead or self.most
        self._calm, self._patience, self._was_lowered = 0, PATIENCE, False

    def note(self, waited: float, seconds: float) -> None:
        """Takes in how many of a step's seconds the trainer waited for its groups."""
        if not self.adapts:
            return
        if waited > WAITED * seconds:
            if self._was_lowered:
                self._patience = min(2 * self._patience, MOST_PATIENCE)
            self.steps, self._calm, self._was_lowered = min(self.most, self.steps + 1), 0, False
            return
        self._calm += 1
        if self._calm >= self._patience and self.steps > 1:
            self.steps, self._calm, self._was_lowered = self.steps - 1, 0, True
