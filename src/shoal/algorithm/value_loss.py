"""What a critic minimises: the squared difference of its values from returns, from a value at each
time step: a pure, differentiable function.

    value      what the critic now says of the step's state: the words before it
    old        what it said before the first update on this batch
    return     what it learns to say: advantage + old (`shoal.algorithm.advantage.gae`)
    loss       = 1/2 max((value - return)^2, (old + clip(value - old) - return)^2)
    total      = sum(weight x loss), with weights of a whole update, as in `loss`

PPO, arXiv 1707.06347, section 5, with the clipping of its first implementation, as in verl and TRL.
Arrays are [R, T]; where the weight is 0, loss and gradient are exactly 0, whatever the inputs hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shoal.algorithm.loss import Metrics, Tokens


@dataclass(frozen=True)
class ValueObjective:
    """What the updates of a critic minimise: static, because compiled programs are cached by it."""

    clip: float = 0.0  # how far an update may move a value with gain; 0: as far as it likes


def value_losses(
    o: ValueObjective, values: Tokens, *, old_values: Tokens, returns: Tokens, weight: Tokens
) -> tuple[Tokens, Metrics]:
    """Returns (loss of each time step, metrics). `weight` is 0 wherever no time step begins. Of the
    metrics `critic/vf_clipfrac` is the share of steps that the clipped term counts for, and has no
    gradient, `critic/vpred_mean` the mean value."""
    is_step = weight > 0
    # Masked before the maths, not only after: the derivative at infinity times 0 would be NaN.
    values = jnp.where(is_step, values, 0)
    returns = jnp.where(is_step, returns, 0)
    old_values = jnp.where(is_step, old_values, 0)
    losses = (values - returns) ** 2 / 2
    clipped = jnp.zeros_like(is_step)
    if o.clip:
        moved = jnp.clip(jax.lax.stop_gradient(values) - old_values, -o.clip, o.clip)
        bounded = (old_values + moved - returns) ** 2 / 2
        # Where both are equal the gradient is whole: jnp.maximum would halve it.
        clipped = bounded > losses
        losses = jnp.where(clipped, bounded, losses)
    count = is_step.sum(dtype=jnp.float32)
    sums: Metrics = {
        "critic/vf_clipfrac": (clipped.sum(dtype=jnp.float32), count),
        "critic/vpred_mean": (jax.lax.stop_gradient(values).sum(), count),
    }
    return losses, sums


def value_metric_shapes(o: ValueObjective) -> Any:
    """Returns names and shapes of the metrics that `value_losses` returns, as `metric_shapes` of
    `loss` does."""
    real = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    _, sums = jax.eval_shape(
        partial(value_losses, o), real, old_values=real, returns=real, weight=real
    )
    return sums
