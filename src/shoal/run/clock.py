"""The time of a step, from how long its parts take and which of them wait for which."""

from __future__ import annotations

from shoal.trainer.schedule import Schedule

ROUNDS = 64
"""Publications after which a run is steady, and over which its steps are then averaged."""


def step_seconds(schedule: Schedule, sampling: float, training: float, own_devices: bool) -> float:
    """Mean seconds of a step in a long run.

    Sampling waits for the weights that its step is sampled from, training for its step's samples. Where the sampler has
    no devices of its own, the two take turns.

    >>> step_seconds(Schedule(lag=0), 3.0, 2.0, own_devices=True), step_seconds(Schedule(lag=1), 3.0, 2.0, True)
    (5.0, 3.0)
    """
    if not own_devices:
        return sampling + training
    sampled, trained = 0.0, [0.0]  # when each step's update has ended, the first entry being the start
    steady = ROUNDS * schedule.weight_sync_interval
    for step in range(2 * steady):
        # Asked for as early as its age allows, and answered by the version that was published for it.
        known = max(trained[max(0, step - schedule.max_staleness)], trained[schedule.version(step)])
        sampled = max(sampled, known) + sampling
        trained.append(max(trained[-1], sampled) + training)
    return (trained[-1] - trained[steady]) / steady
