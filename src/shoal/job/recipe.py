"""The recipe of a job: what it has in common with it, and the weights that its run began with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.budget.memory import parameter_count
from shoal.job.fingerprint import machine
from shoal.records import Params
from shoal.runs.recipe import Followed, settings_apart

if TYPE_CHECKING:
    from shoal.job.job import Job


def follow(job: Job) -> Followed | None:
    """Returns the recipe of a training job with what is known to differ from it before weights are
    read; None if it follows none."""
    if job.recipe is None:
        return None
    return Followed(
        recipe=job.recipe,
        settings=settings_apart(job.recipe, job.requested),
        parameters=parameter_count(job.model_source.architecture.base),
        versions=machine(),
        weights=job.recipe.weights_here,
    )


def with_first_weights(
    followed: Followed, weights: Params | None, frozen: Params | None
) -> Followed:
    """Returns `followed` with the checksum of the weights that a run begins with: those under an
    adapter (`frozen`), because an adapter's own depend on the seed, else all of them. Unchanged if
    neither is there, as in a run that is resumed, and if it has no measured band of this model."""
    from shoal.weights.checksum import types_text, weights_text

    parameters = weights if frozen is None else frozen
    if parameters is None or followed.band is None:
        return followed
    text = f"{weights_text(parameters)} {types_text(parameters)}"
    return followed.with_weights(text)
