"""The compiled steps of the trainer: `accumulate` adds a micro-batch's gradient, `apply` updates
the weights with the sum, `score` computes log-probs alone.

`accumulate` runs once for each micro-batch, `apply` once for each update: how many there are never
leads to another compilation.
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
from jax.sharding import NamedSharding, PartitionSpec

from shoal.algorithm.loss import Objective
from shoal.algorithm.value_loss import ValueObjective
from shoal.config.sections.optimizer import OptimizerSection
from shoal.mesh import PINNED_HOST, Program, Role, put
from shoal.mesh.programs import UPDATE_OPTIONS
from shoal.model.architecture import Architecture
from shoal.model.layers import stacked_again, stacked_blocks
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
    value_head_spec,
)
from shoal.model.transformer import Model
from shoal.records import Params, ShoalError
from shoal.trainer.batch import LearnerBatch, TeacherStates, TeacherTop
from shoal.trainer.loss import (
    batch_logprobs,
    batch_loss,
    batch_states,
    batch_top,
    batch_values,
    sum_shapes,
)
from shoal.trainer.optimizer import LossScale, learning_rate, make_optimizer, state_shardings

PROGRAMS_KEPT = 4
"""Sets of programs (for models and settings) that this process keeps: a second learner with the
settings of an earlier one compiles nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What an update changes and a checkpoint stores; and the frozen parameters, which no update
    changes and no checkpoint stores."""

    trainable: Params  # float32; None in the places of frozen parameters
    optimizer: Any
    updates: Any  # int32[]: number of updates applied, without skipped ones
    loss_scale: LossScale | None = None  # None unless the computation is in float16
    # In the type of the computation, None in the places of trained parameters. None if all are
    # trained.
    frozen: Params | None = None
    critic: TrainState | None = None  # the state of the critic that is trained with the policy

    @property
    def parameters(self) -> Params:
        """All parameters, trained and frozen, in one tree."""
        return joined(self.trainable, self.frozen)

    def with_frozen(self, frozen: Params | None, frozen_of_critic: Params | None) -> TrainState:
        """Returns the state with these frozen parameters, which no checkpoint stores: `frozen` of
        the policy, `frozen_of_critic` of the critic (not used without a critic)."""
        critic = self.critic
        if critic is not None:
            critic = replace(critic, frozen=frozen_of_critic)
        return replace(self, frozen=frozen, critic=critic)

    def to_trees(self) -> dict[str, Any]:
        """Returns what a checkpoint stores of the state, by name, without frozen parameters;
        `from_trees` is the inverse. The names are `trainable`, `optimizer`, `updates`, and
        `loss_scale` and `critic`, a dict of the same names, if there is one."""
        trees = {
            "trainable": self.trainable,
            "optimizer": self.optimizer,
            "updates": self.updates,
        }
        if self.loss_scale is not None:
            trees["loss_scale"] = self.loss_scale
        if self.critic is not None:
            trees["critic"] = self.critic.to_trees()
        return trees

    @classmethod
    def from_trees(cls, trees: Mapping[str, Any]) -> TrainState:
        """Returns the state without frozen parameters, which no checkpoint stores. `trees` is what
        `to_trees` returned."""
        own = dict(trees)
        if "critic" in own:
            own["critic"] = cls.from_trees(own["critic"])
        return cls(**own)


def is_intact(state: TrainState) -> bool:
    """True if no update has consumed (donated) any buffer of the state."""
    return not any(
        leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradientSum:
    """Sums over the micro-batches of one update so far."""

    gradient: Params  # sum of gradients, times the loss scale if there is one
    loss: Any
    sums: Any  # name -> (sum, count); with experts also those of `loss.expert_sums`
    maxima: Any  # name -> (largest, count)
    # [D, 1]: sum of gradients of the value head of a critic that shares the layers; None without
    value_head: Any = None


@dataclass(frozen=True)
class UpdateMetrics:
    """The metrics of one update."""

    loss: Any
    grad_norm: Any
    lr: Any
    # 1 if the gradient was not finite: parameters and moments were then left unchanged
    skipped: Any
    loss_scale: Any = None  # the scale that the gradient was computed with; None without one
    # 1 if the gradient overflowed though the loss did not, so that a smaller loss scale is tried
    # next.
    overflow: Any = 0


class Learner:
    """The trainer's compiled steps for one model and objective: those of the policy, or of a
    critic, whose model has a value head and whose objective is a `ValueObjective`.

    Parameters are not donated, because a sampler may hold them; the gradient's buffers are, and the
    new parameters are written into them.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective | ValueObjective,
        section: OptimizerSection,
        num_updates: int,
        seed: int = 0,
    ):
        """Makes the programs, or takes those that an earlier learner with the same settings made;
        nothing is compiled before a program's first call. `num_updates` is the number of updates of
        the whole run, at which the learning rate's decay ends. `seed` is for moments that are
        rounded to bfloat16 at random."""
        self.objective = objective
        # In a float32 computation the partitioner sums layers in float32, whatever `reduce_dtype`
        # asks for.
        reduce_dtype = jnp.float32
        if model.dtype != jnp.float32:
            reduce_dtype = getattr(jnp, section.reduce_dtype)
        model = replace(model, reduce_dtype=reduce_dtype)
        self.model = model
        # Settings that change no program are left out of the cache's key: else runs of other
        # lengths, or with other seeds, would compile the programs again.
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
        """Returns the state of a new run: these parameters, zero moments, and no updates. The state
        holds these same arrays, not copies. In float16 it also has the first loss scale."""
        a = self.model.architecture
        trainable = select(trained_specs(a), parameters)
        frozen = select(frozen_specs(a), parameters)
        # Put on the devices, because a host number has no sharding: the first `apply` would be
        # compiled for the number, the second once more for the array that the first returned.
        replicate = partial(put, sharding=self.model.role.replicated)
        updates = replicate(np.int32(0))
        scale = None
        if self.layout.loss_scale:
            scale = jax.tree.map(replicate, LossScale.first())
        optimizer = self.programs["init"](trainable)
        return TrainState(trainable, optimizer, updates, scale, frozen)

    def shapes(self) -> TrainState:
        """Returns the state that `init` makes, with shapes, types and shardings in place of arrays;
        nothing is allocated."""

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
        self,
        total: GradientSum | None,
        state: TrainState,
        batch: LearnerBatch,
        teacher: TeacherStates | TeacherTop | None = None,
    ) -> tuple[GradientSum, Any]:
        """Adds a micro-batch's gradient and metrics to `total` (None for the first one), which is
        donated. `state` is only read. Returns (the new sum, the log-probs of the micro-batch's
        tokens, float32[R, T]).

        `teacher`: a teacher's outputs for the micro-batch, on the trainer's devices; None unless
        the objective has a divergence from it. For a policy whose layers a critic shares, the sum
        also has the gradient of the critic's head; any other policy does not read the critic's
        targets in the batch."""
        # The first micro-batch adds to zeros: a separate program for it doubled the longest
        # compilation (5 s), and this buffer is the only one, as layers add their gradients to it in
        # place.
        if total is None:
            total = self.programs["zero"]()
        value_head = None
        if isinstance(self.objective, Objective):
            if self.objective.value_coef:
                assert state.critic is not None, "a critic that shares the layers has its state"
                value_head = state.critic.trainable.lm_head
            else:
                batch = batch.of_policy()
        on_device = put_batch(self.model, batch)
        return self.programs["accumulate"](
            total, state.trainable, state.frozen, on_device, state.loss_scale, teacher, value_head
        )

    def apply(self, state: TrainState, total: GradientSum) -> tuple[TrainState, UpdateMetrics]:
        """Makes one update with the optimizer, and returns the new state and the update's metrics.
        The buffers of the gradient in `total` and of the moments in `state` are donated. If the
        gradient is not finite, weights and moments of the new state are the old ones, and the
        metric `skipped` is 1. Metrics are arrays on the devices."""
        new_state, applied = self.programs["apply"](
            total.loss,
            state.trainable,
            state.updates,
            state.loss_scale,
            gradient=total.gradient,
            optimizer_state=state.optimizer,
        )
        new_state = replace(new_state, frozen=state.frozen, critic=state.critic)
        return new_state, UpdateMetrics(*applied)

    def score(self, parameters: Params, batch: LearnerBatch) -> jax.Array:
        """Returns the log-probs float32[R, T] of the batch's tokens under any parameters of this
        architecture, of a critic its values; 0 at prompts' tokens and at padding."""
        return self.programs["score"](parameters, put_batch(self.model, batch))


def put_batch(model: Model, batch: LearnerBatch) -> LearnerBatch:
    """Puts the batch's arrays on the model's devices, split by rows; the temperature is on every
    device. Returns the new batch; the one that was passed is unchanged. ShoalError if a sequence is
    longer than those that the model is for (`check_lengths`)."""
    check_lengths(model, batch)
    temperature = put(batch.temperature, model.role.replicated)
    rows = model.role.put_rows(replace(batch, temperature=None))
    return replace(rows, temperature=temperature)


def check_lengths(model: Model, batch: LearnerBatch) -> None:
    """Raises ShoalError if a sequence of the batch is longer than a window that the model does
    without because no sequence should be longer (`Model.window_of`)."""
    left_out = []
    for layer in model.architecture.kinds:
        if layer.window and not model.window_of(layer):
            left_out.append(layer.window)
    if not left_out:
        return
    longest = 1 + int(np.max(batch.position))
    if longest > min(left_out):
        raise ShoalError(
            f"a prompt with its completion has {longest:,} tokens, and by "
            "sampling.max_prompt_tokens and sampling.max_completion_tokens at most "
            f"{model.longest_sequence:,}: the model is computed without its window of "
            f"{min(left_out):,} tokens; raise them to the lengths of the data",
            "sampling.max_completion_tokens",
        )


def _updates_by_layer(section: OptimizerSection, role: Role) -> bool:
    """True if moments are kept in the host's memory, and are fetched and updated one layer at a
    time."""
    # On CPU the device's memory is the host's: updating all layers at once is faster there, and
    # bitwise equal to an update without offload.
    return section.offload and role.platform != "cpu"


@lru_cache(PROGRAMS_KEPT)
def _optimizer_programs(
    a: Architecture,
    role: Role,
    section: OptimizerSection,
    num_updates: int,
    has_loss_scale: bool,
    seed: int,
) -> tuple[optax.GradientTransformation, TrainState, Callable, Callable]:
    """Returns the optimizer, the layout (shardings) of the train state, and two programs: init and
    apply. `num_updates` is where the learning rate's decay ends; `seed` is for random rounding.
    init is (trainable parameters) -> optimizer state; apply is `_apply` without its first four
    arguments (optimizer, rate, by_layer, offloads)."""
    # The schedule counts updates applied, not steps: with several mini-batches a step moves it
    # several times.
    rate = learning_rate(section, num_updates)
    by_layer = _updates_by_layer(section, role)
    has_decay = jax.tree.map(attrgetter("weight_decay"), trained_specs(a))

    def weight_decay(parameters: Params) -> Any:
        """Returns which parameters have weight decay: all, or those outside of layers, or those of
        one layer alone, whose tree has None in place of the others."""
        return select(parameters, has_decay)

    optimizer = make_optimizer(section, rate, weight_decay, seed)
    trained = shardings_of(trained_specs(a), role)
    replicated = role.replicated
    optimizer_layout = state_shardings(
        optimizer, _gradient_shapes(a), trained, replicated, section.offload
    )
    scale_layout = LossScale(replicated, replicated) if has_loss_scale else None
    layout = TrainState(trained, optimizer_layout, replicated, scale_layout)
    memory_kinds = {sharding.memory_kind for sharding in jax.tree.leaves(optimizer_layout)}
    offloads = PINNED_HOST in memory_kinds
    apply = role.jit(
        partial(_apply, optimizer, rate, by_layer, offloads),
        donate_argnames=("gradient", "optimizer_state"),
        out_shardings=(layout, replicated),
    )
    if section.offload:
        init = partial(_init_by_leaf, role, optimizer, optimizer_layout)
    else:
        init = role.jit(optimizer.init, out_shardings=optimizer_layout)
    return optimizer, layout, init, apply


def _init_by_leaf(
    role: Role, optimizer: optax.GradientTransformation, shardings: Any, parameters: Params
) -> Any:
    """Makes the state that `optimizer.init` would return, one array at a time; all of its arrays
    are zeros. A device might not hold all outputs of one program. `shardings` say where each array
    is created. Of `parameters` only shapes and types are read."""

    @cache
    def make(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Program:
        return role.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)

    def zeros(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        return make(shape.shape, shape.dtype, sharding)()

    return jax.tree.map(zeros, jax.eval_shape(optimizer.init, parameters), shardings)


@lru_cache(PROGRAMS_KEPT)
def _gradient_programs(
    model: Model, objective: Objective | ValueObjective
) -> tuple[Callable, Callable, Callable]:
    """Returns three programs: one that makes a gradient sum of zeros, one that adds a micro-batch's
    gradient to a sum, one that computes log-probs alone. They are called as zero(), accumulate(sum,
    trainable, frozen, batch, loss scale, teacher, value head) and score(parameters, batch)."""
    # Log-probs keep the layout of rows if one process can read all of them.
    role = model.role
    replicated = role.replicated
    trained = shardings_of(trained_specs(model.architecture), role)
    sum_metrics, max_metrics = sum_shapes(model, objective)
    head_shape = None
    head_sharding = None
    if isinstance(objective, Objective) and objective.value_coef:
        spec = value_head_spec(model.architecture)
        head_shape = jax.ShapeDtypeStruct(spec.shape, jnp.float32)
        head_sharding = spec.sharding(role)
    shapes = GradientSum(
        gradient=_gradient_shapes(model.architecture),
        loss=jax.ShapeDtypeStruct((), jnp.float32),
        sums=sum_metrics,
        maxima=max_metrics,
        value_head=head_shape,
    )
    shardings = GradientSum(
        gradient=trained,
        loss=replicated,
        sums=replicated,
        maxima=replicated,
        value_head=head_sharding,
    )
    zero = role.jit(partial(_zero, shapes), out_shardings=shardings)
    accumulate = role.with_options(UPDATE_OPTIONS).jit(
        partial(_accumulate, model, objective),
        donate_argnums=0,
        out_shardings=(shardings, role.host_layout),
    )
    # Scoring sums no gradients, so one program serves every `reduce_dtype`.
    scoring_model = replace(model, reduce_dtype=Model.reduce_dtype)
    chunk_elements = 0
    if isinstance(objective, Objective):
        chunk_elements = objective.chunk_elements
    score = score_program(scoring_model, chunk_elements)
    return zero, accumulate, score


@lru_cache(PROGRAMS_KEPT)
def score_program(model: Model, chunk_elements: int) -> Program:
    """Returns the program that computes log-probs alone, or a critic's values, without entropies or
    a gradient: (parameters, batch) -> float32[R, T]."""
    return model.role.jit(
        partial(_score, model, chunk_elements), out_shardings=model.role.host_layout
    )


@lru_cache(PROGRAMS_KEPT)
def states_program(model: Model) -> Program:
    """Returns the program that computes a teacher's hidden states: (parameters, batch) ->
    `TeacherStates.states`."""
    return model.role.jit(partial(batch_states, model), out_shardings=_rows_layout(model.role))


@lru_cache(PROGRAMS_KEPT)
def top_program(model: Model, k: int, vocab_size: int) -> Program:
    """Returns the program that computes a teacher's likeliest tokens: (parameters, batch) ->
    (`TeacherTop.ids`, `TeacherTop.logprobs`). `k` of the first `vocab_size` tokens."""
    compute = partial(batch_top, model, k, vocab_size)
    return model.role.jit(compute, out_shardings=_rows_layout(model.role))


def _rows_layout(role: Role) -> NamedSharding:
    """Returns the sharding of arrays [R, T, ...] whose rows are split as those of a batch."""
    return NamedSharding(role.mesh, PartitionSpec(dict(role.rules)["batch"]))


def _gradient_shapes(a: Architecture) -> Params:
    """Returns the shapes of the gradient: float32, for trained parameters only."""

    def shape_of(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32)

    return jax.tree.map(shape_of, trained_specs(a))


def _zero(shapes: GradientSum) -> GradientSum:
    """Returns a `GradientSum` of zeros with these shapes and types. Compiled as the program with
    which an update's first micro-batch begins."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def _accumulate(
    model: Model,
    objective: Objective | ValueObjective,
    total: GradientSum,
    trainable: Params,
    frozen: Params | None,
    batch: LearnerBatch,
    scale: LossScale | None = None,
    teacher: TeacherStates | TeacherTop | None = None,
    value_head: jax.Array | None = None,
) -> tuple[GradientSum, jax.Array]:
    """Returns `total` plus the gradient and metrics of one micro-batch, and the log-probs of its
    tokens. Compiled as the program of `Learner.accumulate`. `scale` multiplies the gradient that is
    added, but neither loss nor metrics. `teacher` and `value_head` are what `batch_loss` takes."""

    def loss(trainable: Params, value_head: jax.Array | None) -> Any:
        parameters = joined(trainable, frozen)
        return batch_loss(model, objective, parameters, batch, teacher, value_head)

    # The loss alone is differentiated; the metrics are auxiliary. A system that differentiates a
    # whole record, metrics included, gets 1/8 of the gradient.
    backward: Any
    value, backward, (sums, maxima, lp) = jax.vjp(loss, trainable, value_head, has_aux=True)
    # The backward pass adds each layer's gradient to the sum's own buffer: returned as a stack, the
    # gradients of the layers would need the memory of a second gradient.
    layers = jax.tree.map(jax.new_ref, total.gradient.blocks)
    # The gradient is linear in this seed: scaled here, it is scaled through the whole backward
    # pass, while loss and metrics are not.
    seed = jnp.ones_like(value) if scale is None else scale.value
    # The gradients of layers have gone into `layers`: only those outside of layers are added here.
    accumulators = replace(total.gradient, blocks=layers)
    new_gradient, head_gradient = backward.with_refs(accumulators, total.value_head)(seed)
    sum_outside = replace(total.gradient, blocks=None)
    gradient = jax.tree.map(jnp.add, sum_outside, replace(new_gradient, blocks=None))
    value, sums = jax.tree.map(jnp.add, (total.loss, total.sums), (value, sums))
    maxima = jax.tree.map(jnp.maximum, total.maxima, maxima)
    gradient = replace(gradient, blocks=jax.tree.map(jax.freeze, layers))
    value_head_sum = jax.tree.map(jnp.add, total.value_head, head_gradient)
    return GradientSum(gradient, value, sums, maxima, value_head_sum), lp


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
    optimizer_state: Any,
) -> tuple[TrainState, Any]:
    """Makes one update of the weights. Returns the new state, without frozen parameters, and the
    values of `UpdateMetrics` in the order of its fields, without the last two if there is no loss
    scale. If the gradient is not finite, parameters and moments are unchanged. Compiled as the
    program of `Learner.apply`.

    `gradient` and `loss` are the sums over all micro-batches of the update; the loss is only passed
    on as a metric. `rate` maps the number of updates so far to the learning rate. With `by_layer`
    one layer is updated after the other; with `offloads` the moments are in the host's memory.
    """
    if scale is not None:
        gradient = jax.tree.map(lambda g: g / scale.value, gradient)
    # The metric is the norm before clipping; one NaN or inf anywhere makes it not finite.
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        """Returns `new`, or `old` if the gradient is not finite."""
        return jnp.where(finite, new, old)

    def keep_counter(new: Any, old: Any) -> Any:
        """Returns what `keep` does for a counter of the optimizer; new moments unchanged."""
        return new if _is_moment(new) else keep(new, old)

    # The norm of the whole gradient, by which each layer is clipped too. 0 if it is not finite: the
    # gradient is then replaced by zeros.
    safe_norm = jnp.where(finite, norm, 0.0)

    def change(gradient: Any, state: Any, parameters: Any, **more: Any) -> tuple[Any, Any]:
        """Returns (parameters, optimizer state) after one optimizer update; both unchanged if the
        gradient is not finite. The arguments may be of all parameters, or of one layer. Offloaded
        moments are fetched to the device, and the new ones are moved back to the host."""
        if offloads:
            state = _move_moments(state, jax.memory.Space.Device)
        # A gradient that is not finite is replaced by zeros, to keep NaN out of the optimizer; the
        # result is then dropped: that of moments by the optimizer itself (`scale_by_adam`).
        safe = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), gradient)
        step, new_state = optimizer.update(
            safe, state, parameters, norm=safe_norm, number=updates, finite=finite, **more
        )
        new_state = jax.tree.map(keep_counter, new_state, state, is_leaf=_is_moment)
        new_parameters = jax.tree.map(keep, optax.apply_updates(parameters, step), parameters)
        if offloads:
            new_state = _move_moments(new_state, jax.memory.Space.Host)
        return new_parameters, new_state

    if by_layer:
        new_trainable, new_optimizer_state = _change_by_layer(
            change, gradient, optimizer_state, trainable
        )
    else:
        new_trainable, new_optimizer_state = change(gradient, optimizer_state, trainable)
    # a skipped update is not counted
    new_updates = updates + finite
    new_scale = None if scale is None else scale.after(finite)
    state = TrainState(new_trainable, new_optimizer_state, new_updates, new_scale)
    applied = (loss, norm, rate(updates), 1 - finite.astype(jnp.int32))
    if scale is None:
        return state, applied
    # If the loss is not finite, or the gradient is not even without a scale, the cause is another
    # one.
    overflow = ~finite & jnp.isfinite(loss) & (scale.value > 1)
    return state, (*applied, scale.value, overflow.astype(jnp.int32))


def _change_by_layer(
    change: Callable[..., tuple[Any, Any]],
    gradient: Parameters,
    optimizer_state: Any,
    parameters: Parameters,
) -> tuple[Parameters, Any]:
    """Applies `change` to the parameters outside of layers, then to one layer after the other.
    Returns (parameters, optimizer state).

    New parameters are written over the gradient and new moments over the old ones, so that a device
    needs the moments of only one layer at a time. `change(gradient, optimizer state, parameters)`
    returns the new (parameters, optimizer state). It gets trees with None in place of all other
    parameters; for a layer also its index in its stack, `layer`."""

    def update_layer(
        stack: Block, layer: jax.Array, buffers: tuple[Block, list[Block]]
    ) -> tuple[Block, list[Block]]:
        """Returns the buffers (gradient, moments) of a stack of layers, whose parameters are
        `stack`, with this layer's new parameters and moments written over its gradient and
        moments."""

        def of_layer(stacked: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(stacked, index=layer, axis=0, keepdims=False)

        def put_layer(stacked: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(stacked, new, layer, 0)

        layer_gradient, layer_moments = jax.tree.map(of_layer, buffers)
        layer_parameters = jax.tree.map(of_layer, stack)
        # `optimizer_state` gives the form, like Adam's counter and two moments; the moments in it
        # are replaced by this layer's.
        new_parameters, new_state = change(
            _layers_only(layer_gradient),
            _replace_moments(optimizer_state, map(_layers_only, layer_moments)),
            _layers_only(layer_parameters),
            layer=layer,
        )
        new_moments = [moment.blocks for moment in _moments_of(new_state)]
        return jax.tree.map(put_layer, buffers, (new_parameters.blocks, new_moments))

    moments = _moments_of(optimizer_state)
    moments_outside = [replace(moment, blocks=None) for moment in moments]
    new_parameters, new_state = change(
        replace(gradient, blocks=None),
        _replace_moments(optimizer_state, moments_outside),
        replace(parameters, blocks=None),
    )
    gradient_stacks = stacked_blocks(gradient.blocks)
    stacks_by_moment = [stacked_blocks(moment.blocks) for moment in moments]
    new_stacks: list[Block] = []
    new_stacks_by_moment: list[list[Block]] = [[] for _ in moments]
    for index, stack in enumerate(stacked_blocks(parameters.blocks)):
        stack_moments = [stacks[index] for stacks in stacks_by_moment]
        buffers = gradient_stacks[index], stack_moments
        # All leaves have the layers in front, so their first dimensions are the same number.
        num_layers = 0  # if no parameter of the layers is trained
        leaves = jax.tree.leaves(buffers)
        if leaves:
            (num_layers,) = {leaf.shape[0] for leaf in leaves}
        new_stack, new_stack_moments = jax.lax.fori_loop(
            0, num_layers, partial(update_layer, stack), buffers
        )
        new_stacks.append(new_stack)
        for stacks, new in zip(new_stacks_by_moment, new_stack_moments, strict=True):
            stacks.append(new)
    new_moments = []
    for outside, stacks in zip(_moments_of(new_state), new_stacks_by_moment, strict=True):
        new_moments.append(replace(outside, blocks=stacked_again(parameters.blocks, stacks)))
    blocks = stacked_again(parameters.blocks, new_stacks)
    return replace(new_parameters, blocks=blocks), _replace_moments(new_state, new_moments)


def _is_moment(node: Any) -> bool:
    """True for a subtree of an optimizer's state that has the form of the parameters: a moment."""
    return isinstance(node, Parameters)


def _moments_of(optimizer_state: Any) -> list[Parameters]:
    """Returns the moments in an optimizer's state, for example the two of Adam."""
    nodes = jax.tree.leaves(optimizer_state, is_leaf=_is_moment)
    return [node for node in nodes if _is_moment(node)]


def _replace_moments(optimizer_state: Any, moments: Iterable[Parameters]) -> Any:
    """Returns the optimizer's state with other moments, in the order of `_moments_of`; there must
    be at least as many. All that is no moment, like a counter, stays."""
    new_moments = iter(moments)

    def new_node(node: Any) -> Any:
        return next(new_moments) if _is_moment(node) else node

    return jax.tree.map(new_node, optimizer_state, is_leaf=_is_moment)


def _layers_only(blocks: Block) -> Parameters:
    """Returns `Parameters` that hold layers only."""
    return Parameters(None, blocks, None)


def _move_moments(optimizer_state: Any, space: Any) -> Any:
    """Returns the optimizer's state with its moments in the memory `space` (a device's or the
    host's); its counters stay on the devices."""
    moved = [jax.device_put(moment, space) for moment in _moments_of(optimizer_state)]
    return _replace_moments(optimizer_state, moved)


def _score(model: Model, chunk_elements: int, parameters: Params, batch: LearnerBatch) -> jax.Array:
    """Returns the log-probs float32[R, T] of a batch's tokens, without entropies, or the values of
    a model with a value head; 0 at prompts' tokens and at padding. Compiled as the program of
    `Learner.score`."""
    if model.architecture.value_head:
        return batch_values(model, parameters, batch)
    logprobs, _ = batch_logprobs(model, parameters, batch, chunk_elements)
    return logprobs
