"""AdamW with warm-up, decay and clipping by global norm, the sharding of its state, and the loss
scale of float16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shoal.config.sections.optimizer import OptimizerSection
from shoal.mesh import PINNED_HOST
from shoal.records import Params

FIRST_SCALE = 2.0**16
"""The loss scale of a run's first update."""
LARGEST_SCALE = 2.0**24
"""The largest loss scale: it keeps gradients that are 0 for long from raising the scale without
end."""
GROWTH_INTERVAL = 2000
"""After so many updates in a row without overflow, the loss scale is doubled."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The number by which the loss is multiplied before its gradient is computed in float16, whose
    smallest number is 6e-8: without it small parts are lost (Micikevicius et al. 2017, arXiv
    1710.03740). A power of two, so that it rounds nothing."""

    value: Any  # float32[]
    good: Any  # int32[]: updates in a row without overflow since the scale last changed

    @classmethod
    def first(cls) -> LossScale:
        return cls(np.float32(FIRST_SCALE), np.int32(0))

    def after(self, finite: jax.Array) -> LossScale:
        """Returns the scale of the next update; `finite` says whether the gradient of this update
        was finite. If it was not, the scale is halved, to 1 at least. After GROWTH_INTERVAL updates
        in a row in which it was, the scale is doubled, to LARGEST_SCALE at most."""
        good = jnp.where(finite, self.good + 1, 0)
        doubled = good >= GROWTH_INTERVAL
        value = self.value * jnp.where(finite, jnp.where(doubled, 2.0, 1.0), 0.5)
        return LossScale(jnp.clip(value, 1.0, LARGEST_SCALE), jnp.where(doubled, 0, good))


def learning_rate(section: OptimizerSection, num_updates: int) -> Callable[[Any], Any]:
    """Returns a function from an update's number (from 0) to its learning rate: a linear warm-up,
    then constant or a linear or cosine decay towards 0 at `num_updates`, the number of updates of
    the run.

    The first update already has 1/warmup_steps of the rate (torch's schedules start at 0), and with
    a decay the update after the last would have 0.
    """
    warmup = section.warmup_steps
    rest = max(1, num_updates - warmup)
    decay: Callable[[Any], Any]
    if section.schedule == "constant":
        decay = optax.constant_schedule(section.lr)
    elif section.schedule == "linear":
        decay = optax.linear_schedule(section.lr, 0.0, rest)
    else:
        decay = optax.cosine_decay_schedule(section.lr, rest)

    def rate(update: Any) -> Any:
        rising = section.lr * (update + 1) / max(1, warmup)
        return jnp.where(update < warmup, rising, decay(update - warmup))

    return rate


def make_optimizer(
    section: OptimizerSection, rate: Callable[[Any], Any], weight_decay: Any, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Returns AdamW with the settings' clipping and type of moments. `rate` is what `learning_rate`
    returned.

    `weight_decay` is a tree of bools over the parameters, or a function that makes that tree from
    parameters: weight decay applies where it is True. `seed` is for the random rounding of
    `optimizer.moments=bfloat16`, whose update needs the extra argument `number`, the update's
    number. An update of only some parameters needs the extra argument `norm`, the norm of the whole
    gradient; an update of one layer also `layer`, its number. With the extra argument `finite`
    False an update leaves the moments as they are.
    """
    # A part that is left out has no state, so whether a setting is 0 is part of a checkpoint's
    # layout.
    parts = []
    # 0: no clipping
    if section.clip_grad_norm:
        parts.append(clip_by_norm(section.clip_grad_norm))
    # The parts of `optax.adamw`, and like there a chain of their own.
    adamw = optax.chain(
        scale_by_adam(section.beta1, section.beta2, section.eps),
        optax.add_decayed_weights(section.weight_decay, weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    parts.append(adamw)
    optimizer = optax.with_extra_args_support(optax.chain(*parts))
    if section.moments == "bfloat16":
        return rounded(optimizer, seed)
    return optimizer


def clip_by_norm(most: float) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that scales a gradient down to the norm `most`, like
    `optax.clip_by_global_norm`. Its extra argument `norm` replaces the norm of the gradient that is
    passed: an update of one layer passes the norm of the whole gradient."""

    def update(
        gradient: Any, state: Any, parameters: Any = None, *, norm: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        """Scales the gradient down if its norm, or the given one, exceeds the limit. Returns
        (gradient, state), the state as it was passed."""
        if norm is None:
            norm = optax.tree.norm(gradient)

        def clip(g: jax.Array) -> jax.Array:
            return jnp.where(norm < most, g, g / norm * most)

        return jax.tree.map(clip, gradient), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore


def scale_by_adam(beta1: float, beta2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Returns `optax.scale_by_adam` (Kingma and Ba 2015, arXiv 1412.6980), with a state of the same
    form, which an update leaves as it is if its extra argument `finite` is False.

    The result is computed from the moments that are returned. Were they chosen outside of the
    update, it would be computed from others, and XLA for CPU would first copy the gradient and the
    moments, over which it writes."""
    adam = optax.scale_by_adam(beta1, beta2, eps)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        finite: jax.Array | bool = True,
        **_: Any,
    ) -> tuple[Any, optax.ScaleByAdamState]:
        """Updates the moments. Returns (the direction in which parameters fall, the new
        state)."""
        new_state = adam.update(updates, state)[1]

        def keep(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old)

        kept: Any = jax.tree.map(keep, new_state, state)
        count = optax.safe_increment(state.count)
        mean = optax.tree.bias_correction(kept.mu, beta1, count)
        variance = optax.tree.bias_correction(kept.nu, beta2, count)

        def step(mean: jax.Array, variance: jax.Array) -> jax.Array:
            return mean / (jnp.sqrt(variance) + eps)

        return jax.tree.map(step, mean, variance), kept

    return optax.GradientTransformationExtraArgs(adam.init, update)


def rounded(
    optimizer: optax.GradientTransformationExtraArgs, seed: int
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer whose moments are bfloat16 between its updates, and float32 within them.

    Rounded to the nearest value, a moment that changes by less than 1/256 of itself would stand
    still: the second moment's decay of 0.999 would never lower it. Rounded at random, its mean is
    right. An update needs the extra argument `number`, the update's number, and takes `layer`, a
    layer's: with `seed` they decide the random bits. All other extra arguments go to `optimizer`.
    """

    def map_moments(function: Callable[[jax.Array], jax.Array], state: Any) -> Any:
        return optax.tree_utils.tree_map_params(optimizer, function, state)

    def narrow(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.bfloat16)

    def widen(moment: jax.Array) -> jax.Array:
        return moment.astype(jnp.float32)

    def init(parameters: Any) -> Any:
        # Moments get the type of the parameters that they are made for.
        return optimizer.init(jax.tree.map(narrow, parameters))

    def update(
        gradient: Any,
        state: Any,
        parameters: Any = None,
        *,
        number: Any,
        layer: Any = None,
        **more: Any,
    ) -> tuple[Any, Any]:
        """Updates with moments widened to float32, and rounds the new moments at random. Returns
        (the change of the parameters, the new state)."""
        change, state = optimizer.update(gradient, map_moments(widen, state), parameters, **more)
        key = jax.random.fold_in(jax.random.key(seed), number)
        if layer is not None:
            key = jax.random.fold_in(key, layer)
        leaf_numbers = count()

        def round_leaf(moment: jax.Array) -> jax.Array:
            return round_at_random(moment, jax.random.fold_in(key, next(leaf_numbers)))

        return change, map_moments(round_leaf, state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def round_at_random(values: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16: to one of the two values next to each number, with the
    probabilities for which the mean is that number."""
    # bfloat16 is the upper 16 bits of float32: random bits added to the lower ones carry with the
    # right probability.
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    bits = (jax.lax.bitcast_convert_type(values, jnp.uint32) + noise) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)


def state_shardings(
    optimizer: optax.GradientTransformation,
    shapes: Params,
    shardings: Params,
    other: Any,
    offload: bool = False,
) -> Any:
    """Returns the shardings of the optimizer's state: moments like their parameters, with `offload`
    in the host's memory; counters like `other`. `shapes` and `shardings` are those of the
    parameters."""

    def of_moment(_: Any, sharding: Any) -> Any:
        if offload:
            return sharding.with_memory_kind(PINNED_HOST)
        return sharding

    def of_counter(_: Any) -> Any:
        return other

    # By optax's own map, not by shape, because a counter and a scalar parameter, or two parameters,
    # may have the same shape.
    state = jax.eval_shape(optimizer.init, shapes)
    return optax.tree_utils.tree_map_params(
        optimizer, of_moment, state, shardings, transform_non_params=of_counter
    )
