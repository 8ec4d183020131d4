"""The compiled steps of the trainer: `accumulate` a micro-batch's gradient, `apply` the sum,
`score` log-probs.

`accumulate` runs once a micro-batch, `apply` once an update: their number never compiles anything
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shoal.algorithm.loss import Objective, metric_shapes
from shoal.config.sections.optimizer import OptimizerSection
from shoal.mesh import PINNED_HOST, Program, Role, put
from shoal.mesh.programs import UPDATE_OPTIONS
from shoal.model.architecture import Architecture
from shoal.model.parameters import (
    Block,
    Parameters,
    ParamSpec,
    frozen_specs,
    joined,
    param_shapes,
    select,
    shardings_of,
    trained_specs,
)
from shoal.model.transformer import Model
from shoal.records import Params
from shoal.trainer.batch import LearnerBatch
from shoal.trainer.loss import batch_logprobs, batch_loss
from shoal.trainer.optimizer import LossScale, learning_rate, make_optimizer, state_shardings

PROGRAMS_KEPT = 4
"""Sets of programs (models, settings) kept by this process: a second learner like an earlier one
compiles nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What an update changes and a checkpoint holds, and beside it the frozen parameters."""

    trainable: Params  # float32; None in place of frozen ones
    optimizer: Any
    updates: Any  # int32[]: updates applied; a skipped one does not count
    loss_scale: LossScale | None = None  # of a computation in float16
    # In the type of the computation, None in place of trained ones; None: all are trained.
    frozen: Params | None = None

    @property
    def parameters(self) -> Params:
        return joined(self.trainable, self.frozen)

    def to_trees(self) -> dict[str, Any]:
        """What a checkpoint holds of it, by name; `from_trees` is the inverse."""
        trees = {
            "trainable": self.trainable,
            "optimizer": self.optimizer,
            "updates": self.updates,
        }
        if self.loss_scale is not None:
            trees["loss_scale"] = self.loss_scale
        return trees

    @classmethod
    def from_trees(cls, trees: Mapping[str, Any]) -> TrainState:
        """The state, without frozen parameters, which no checkpoint holds."""
        return cls(**trees)


def is_intact(state: TrainState) -> bool:
    """True while no update has consumed the state's buffers."""
    return not any(
        leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradientSum:
    """Sums over the micro-batches of one update."""

    gradient: Params  # times the loss scale, if there is one
    loss: Any
    sums: Any  # name -> (sum, count)
    maxima: Any  # name -> (largest, count)


@dataclass(frozen=True)
class UpdateMetrics:
    """The metrics of one update."""

    loss: Any
    grad_norm: Any
    lr: Any
    skipped: Any  # 1 if the gradient was not finite: parameters and moments are then unchanged
    loss_scale: Any = None  # with which the gradient was computed; None without one
    # 1 if the gradient overflowed, but not the loss, so that a smaller loss scale is tried next.
    overflow: Any = 0


class Learner:
    """The trainer's compiled steps on one model and objective.

    Parameters are not donated, because a sampler may hold them; the gradient's buffers are, and the
    new parameters are written into them.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        section: OptimizerSection,
        num_updates: int,
        seed: int = 0,
    ):
        self.objective = objective
        # In a float32 computation the partitioner sums layers in float32, whatever is asked.
        reduce_dtype = jnp.float32
        if model.dtype != jnp.float32:
            reduce_dtype = getattr(jnp, section.reduce_dtype)
        model = replace(model, reduce_dtype=reduce_dtype)
        self.model = model
        # What changes no program is left out: runs of other lengths, or seeds, would compile them
        # again.
        schedule_updates = num_updates if section.schedule != "constant" else 0
        rounding_seed = seed if section.moments == "bfloat16" else 0
        self.optimizer, self.layout, init, apply = _optimizer_programs(
            model.architecture,
            model.role,
            section,
            schedule_updates,
            model.dtype == jnp.float16,
            rounding_seed,
        )
        zero, accumulate, score = _gradient_programs(model, objective)
        self.programs: dict[str, Callable] = {
            "init": init,
            "zero": zero,
            "accumulate": accumulate,
            "apply": apply,
            "score": score,
        }

    def init(self, parameters: Params) -> TrainState:
        a = self.model.architecture
        trainable = select(trained_specs(a), parameters)
        frozen = select(frozen_specs(a), parameters)
        # A host number has no sharding: the first `apply` would be compiled for it, the second for
        # the array returned.
        replicate = partial(put, sharding=self.model.role.replicated)
        updates = replicate(np.int32(0))
        scale = None
        if self.layout.loss_scale:
            scale = jax.tree.map(replicate, LossScale.first())
        optimizer = self.programs["init"](trainable)
        return TrainState(trainable, optimizer, updates, scale, frozen)

    def shapes(self) -> TrainState:
        """Shapes, types and layout of the state that `init` makes; nothing is allocated."""

        def with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        model = self.model
        parameters = _gradient_shapes(model.architecture)
        optimizer = jax.eval_shape(self.optimizer.init, parameters)
        updates = jax.ShapeDtypeStruct((), jnp.int32)
        scale = LossScale.first() if self.layout.loss_scale else None
        shapes = TrainState(parameters, optimizer, updates, scale)
        frozen = param_shapes(frozen_specs(model.architecture), model.role, model.dtype)
        return replace(jax.tree.map(with_sharding, shapes, self.layout), frozen=frozen)

    def accumulate(
        self, total: GradientSum | None, state: TrainState, batch: LearnerBatch
    ) -> tuple[GradientSum, Any]:
        """(the sum with a micro-batch's gradient and metrics added, its log-probs float32[R,
        T])."""
        # From zeros: a program of its own for the first micro-batch doubled the longest compilation
        # (5 s), and the buffer is the only one, as layers add to it where they stand.
        if total is None:
            total = self.programs["zero"]()
        on_device = put_batch(self.model, batch)
        return self.programs["accumulate"](
            total, state.trainable, state.frozen, on_device, state.loss_scale
        )

    def apply(self, state: TrainState, total: GradientSum) -> tuple[TrainState, UpdateMetrics]:
        """One update of the optimizer. The buffers of `total` and of the moments are donated."""
        new_state, applied = self.programs["apply"](
            total.loss,
            state.trainable,
            state.updates,
            state.loss_scale,
            gradient=total.gradient,
            moments=state.optimizer,
        )
        return replace(new_state, frozen=state.frozen), UpdateMetrics(*applied)

    def score(self, parameters: Params, batch: LearnerBatch) -> jax.Array:
        """Log-probs float32[R, T] of the batch's tokens under any parameters of this
        architecture."""
        return self.programs["score"](parameters, put_batch(self.model, batch))


def put_batch(model: Model, batch: LearnerBatch) -> LearnerBatch:
    temperature = put(batch.temperature, model.role.replicated)
    rows = model.role.put_rows(replace(batch, temperature=None))
    return replace(rows, temperature=temperature)


def _streams(section: OptimizerSection, role: Role) -> bool:
    """True if moments are fetched and updated a layer at a time."""
    # A CPU's own memory is the host's: in one piece the update is faster there, and bitwise the one
    # without offload.
    return section.offload and role.platform != "cpu"


@lru_cache(PROGRAMS_KEPT)
def _optimizer_programs(
    a: Architecture,
    role: Role,
    section: OptimizerSection,
    num_updates: int,
    scaled: bool,
    seed: int,
) -> tuple[optax.GradientTransformation, TrainState, Callable, Callable]:
    """The optimizer, the layout of the train state, and two programs: init and apply."""
    # By updates applied, not by steps: with several mini-batches a step moves the schedule several
    # times.
    rate = learning_rate(section, num_updates)
    by_layer = _streams(section, role)
    # One layer's parameters lack the specs' dimension for layers: there, shapes tell the matrices.
    weight_decay = _matrices
    if not by_layer:
        weight_decay = _map_specs(attrgetter("weight_decay"), a)
    optimizer = make_optimizer(section, rate, weight_decay, seed)
    split = shardings_of(trained_specs(a), role)
    everywhere = role.replicated
    moments = state_shardings(optimizer, _gradient_shapes(a), split, everywhere, section.offload)
    scale_layout = LossScale(everywhere, everywhere) if scaled else None
    layout = TrainState(split, moments, everywhere, scale_layout)
    offloads = PINNED_HOST in {sharding.memory_kind for sharding in jax.tree.leaves(moments)}
    apply = role.jit(
        partial(_apply, optimizer, rate, by_layer, offloads),
        donate_argnames=("gradient", "moments"),
        out_shardings=(layout, everywhere),
    )
    if section.offload:
        init = partial(_begin, role, optimizer, moments)
    else:
        init = role.jit(optimizer.init, out_shardings=moments)
    return optimizer, layout, init, apply


def _begin(
    role: Role, optimizer: optax.GradientTransformation, shardings: Any, parameters: Params
) -> Any:
    """The state of `optimizer.init`, which is all zeros, made one array at a time: a device might
    not hold all outputs of one program."""

    @cache
    def make(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Program:
        return role.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)

    def zeros(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        return make(shape.shape, shape.dtype, sharding)()

    return jax.tree.map(zeros, jax.eval_shape(optimizer.init, parameters), shardings)


@lru_cache(PROGRAMS_KEPT)
def _gradient_programs(model: Model, objective: Objective) -> tuple[Callable, Callable, Callable]:
    """Three programs: a gradient of zeros, its sum with a micro-batch's, log-probs alone."""
    # Log-probs keep the layout of rows where one process reads them.
    role = model.role
    everywhere = role.replicated
    split = shardings_of(trained_specs(model.architecture), role)
    sums = GradientSum(split, everywhere, everywhere, everywhere)
    zero = role.jit(
        partial(_zero, _gradient_shapes(model.architecture), objective), out_shardings=sums
    )
    accumulate = role.with_options(UPDATE_OPTIONS).jit(
        partial(_accumulate, model, objective),
        donate_argnums=0,
        out_shardings=(sums, role.host_layout),
    )
    # Scoring sums no gradients: one program, whatever their type is.
    scoring_model = replace(model, reduce_dtype=Model.reduce_dtype)
    score = score_program(scoring_model, objective.chunk_elements)
    return zero, accumulate, score


@lru_cache(PROGRAMS_KEPT)
def score_program(model: Model, chunk_elements: int) -> Program:
    """The program of log-probs alone: (parameters, batch) -> float32[R, T]."""
    return model.role.jit(
        partial(_score, model, chunk_elements), out_shardings=model.role.host_layout
    )


def _map_specs(read: Callable[[ParamSpec], Any], a: Architecture) -> Params:
    return jax.tree.map(read, trained_specs(a))


def _gradient_shapes(a: Architecture) -> Params:
    def shape_of(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32)

    return _map_specs(shape_of, a)


def _zero(shapes: Params, objective: Objective) -> GradientSum:
    sums, maxima = metric_shapes(objective)
    total = GradientSum(shapes, jax.ShapeDtypeStruct((), jnp.float32), sums, maxima)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), total)


def _accumulate(
    model: Model,
    objective: Objective,
    total: GradientSum,
    trainable: Params,
    frozen: Params | None,
    batch: LearnerBatch,
    scale: LossScale | None = None,
) -> tuple[GradientSum, jax.Array]:
    def loss(trainable: Params) -> Any:
        return batch_loss(model, objective, joined(trainable, frozen), batch)

    # The loss is the first output alone. Another system sums a whole record, metrics included: 1/8
    # of the gradient.
    backward: Any
    value, backward, (sums, maxima, lp) = jax.vjp(loss, trainable, has_aux=True)
    # The backward pass adds each layer's gradient to the sum's own buffer: stacked, they would be a
    # second gradient.
    layers = jax.tree.map(jax.new_ref, total.gradient.blocks)
    # The gradient is linear in this: scaled here, it is scaled all the way, and loss and metrics
    # are not.
    seed = jnp.ones_like(value) if scale is None else scale.value
    (rest,) = backward.with_refs(replace(total.gradient, blocks=layers))(seed)
    sum_outside = replace(total.gradient, blocks=None)
    gradient = jax.tree.map(jnp.add, sum_outside, replace(rest, blocks=None))
    value, sums = jax.tree.map(jnp.add, (total.loss, total.sums), (value, sums))
    maxima = jax.tree.map(jnp.maximum, total.maxima, maxima)
    gradient = replace(gradient, blocks=jax.tree.map(jax.freeze, layers))
    return GradientSum(gradient, value, sums, maxima), lp


def _apply(
    optimizer: optax.GradientTransformationExtraArgs,
    rate: Any,
    by_layer: bool,
    offloads: bool,
    loss: jax.Array,
    trainable: Params,
    updates: jax.Array,
    scale: LossScale | None = None,
    *,
    gradient: Params,
    moments: Any,
) -> tuple[TrainState, Any]:
    if scale is not None:
        gradient = jax.tree.map(lambda g: g / scale.value, gradient)
    # The norm before clipping is the metric; one NaN or inf anywhere makes it not finite.
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(finite, new, old)

    def change(gradient: Any, moments: Any, parameters: Any, **more: Any) -> tuple[Any, Any]:
        if offloads:
            moments = _moved(moments, jax.memory.Space.Device)
        # Zeros in place of a gradient that is not finite keep NaN out of the optimizer, whose
        # result is then dropped.
        safe = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), gradient)
        step, new_moments = optimizer.update(safe, moments, parameters, number=updates, **more)
        new_moments = jax.tree.map(keep, new_moments, moments)
        new_parameters = jax.tree.map(keep, optax.apply_updates(parameters, step), parameters)
        if offloads:
            new_moments = _moved(new_moments, jax.memory.Space.Host)
        return new_parameters, new_moments

    if by_layer:
        change_layer = partial(change, norm=jnp.where(finite, norm, 0.0))
        new_trainable, new_moments = _change_by_layer(change_layer, gradient, moments, trainable)
    else:
        new_trainable, new_moments = change(gradient, moments, trainable)
    new_updates = updates + finite
    new_scale = None if scale is None else scale.after(finite)
    state = TrainState(new_trainable, new_moments, new_updates, new_scale)
    applied = (loss, norm, rate(updates), 1 - finite.astype(jnp.int32))
    if scale is None:
        return state, applied
    # A loss that is not finite, or a gradient that is not even unscaled, has another cause.
    overflow = ~finite & jnp.isfinite(loss) & (scale.value > 1)
    return state, (*applied, scale.value, overflow.astype(jnp.int32))


def _change_by_layer(
    change: Callable[..., tuple[Any, Any]],
    gradient: Parameters,
    moments: Any,
    parameters: Parameters,
) -> tuple[Parameters, Any]:
    """`change` of the parameters outside of layers, then of one layer after the other, in the place
    of its gradient and its moments: of these a device needs one layer's."""

    def update_layer(
        layer: jax.Array, buffers: tuple[Block, list[Block]]
    ) -> tuple[Block, list[Block]]:
        """The buffers (gradient, moments) of all layers, where this layer's now hold its new
        parameters and moments."""

        def of_layer(stacked: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(stacked, index=layer, axis=0, keepdims=False)

        def put_layer(stacked: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(stacked, new, layer, 0)

        layer_gradient, layer_moments = jax.tree.map(of_layer, buffers)
        layer_parameters = jax.tree.map(of_layer, parameters.blocks)
        new_parameters, new_state = change(
            _alone(layer_gradient),
            _with_parts(moments, map(_alone, layer_moments)),
            _alone(layer_parameters),
            layer=layer,
        )
        new_moments = [part.blocks for part in _parts(new_state)]
        return jax.tree.map(put_layer, buffers, (new_parameters.blocks, new_moments))

    moments_outside = [replace(part, blocks=None) for part in _parts(moments)]
    new_parameters, new_state = change(
        replace(gradient, blocks=None),
        _with_parts(moments, moments_outside),
        replace(parameters, blocks=None),
    )
    buffers = (gradient.blocks, [part.blocks for part in _parts(moments)])
    num_layers = 0
    leaves = jax.tree.leaves(buffers)
    if leaves:
        (num_layers,) = {leaf.shape[0] for leaf in leaves}
    blocks, block_moments = jax.lax.fori_loop(0, num_layers, update_layer, buffers)
    new_parts = []
    for part, block in zip(_parts(new_state), block_moments, strict=True):
        new_parts.append(replace(part, blocks=block))
    return replace(new_parameters, blocks=blocks), _with_parts(new_state, new_parts)


def _is_part(node: Any) -> bool:
    return isinstance(node, Parameters)


def _parts(moments: Any) -> list[Parameters]:
    """The trees of an optimizer's state that have the parameters' form."""
    return [node for node in jax.tree.leaves(moments, is_leaf=_is_part) if _is_part(node)]


def _with_parts(moments: Any, parts: Iterable[Parameters]) -> Any:
    """The optimizer's state with `parts` in place of its own, in the order of `_parts`."""
    new_parts = iter(parts)

    def new_node(node: Any) -> Any:
        return next(new_parts) if _is_part(node) else node

    return jax.tree.map(new_node, moments, is_leaf=_is_part)


def _alone(blocks: Block) -> Parameters:
    return Parameters(None, blocks, None)


def _matrices(parameters: Any) -> Any:
    """What has weight decay, of parameters without a dimension for layers."""
    return jax.tree.map(lambda leaf: leaf.ndim == 2, parameters)


def _moved(moments: Any, space: Any) -> Any:
    """The state with its moments in another memory; its counters stay on the devices."""
    moved = [jax.device_put(part, space) for part in _parts(moments)]
    return _with_parts(moments, moved)


def _score(model: Model, chunk_elements: int, parameters: Params, batch: LearnerBatch) -> jax.Array:
    logprobs, _ = batch_logprobs(model, parameters, batch, chunk_elements)
    return logprobs
