"""AdamW with warm-up, decay and clipping by global norm, and the sharding of its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shoal.config.schema import OptimizerSection
from shoal.types import Params


def learning_rate(section: OptimizerSection, num_updates: int) -> Callable[[Any], Any]:
    """Update number (from 0) -> learning rate: a linear warm-up, then constant or a decay towards 0.

    The first update already has 1/warmup_steps of the rate (torch's schedules start at 0), and the update after the
    last would have 0.
    """
    warmup, rest = section.warmup_steps, max(1, num_updates - section.warmup_steps)
    decay = {
        "constant": optax.constant_schedule(section.lr),
        "linear": optax.linear_schedule(section.lr, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(section.lr, rest),
    }[section.schedule]

    def rate(update: Any) -> Any:
        rising = section.lr * (update + 1) / max(1, warmup)
        return jnp.where(update < warmup, rising, decay(update - warmup))

    return rate


def make_optimizer(section: OptimizerSection, rate: Callable[[Any], Any],
                   weight_decay: Any) -> optax.GradientTransformation:
    """`weight_decay` is a tree of bools over the parameters: weight decay applies where it is True."""
    # A part that is left out leaves no state either, so 0 or not is part of a checkpoint's layout.
    parts = [optax.clip_by_global_norm(section.clip_grad_norm)] if section.clip_grad_norm else []
    adamw = optax.adamw(rate, section.beta1, section.beta2, section.eps, weight_decay=section.weight_decay,
                        mask=weight_decay)
    return optax.chain(*parts, adamw)


def state_shardings(optimizer: optax.GradientTransformation, shapes: Params, shardings: Params, other: Any) -> Any:
    """Shardings of the optimizer's state: moments as their parameters, counters as `other`."""
    # By optax's own map, not by shape: a counter and a scalar parameter, or two parameters, may have one shape.
    state = jax.eval_shape(optimizer.init, shapes)
    return optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, state, shardings, transform_non_params=lambda _: other)
