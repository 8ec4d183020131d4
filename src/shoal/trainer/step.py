"""The jitted update: log-probs of a batch, `accumulate` its gradient, `apply` the sum; and the `Scorer`.

    LearnerBatch -> forward -> token_logprobs -> policy loss + KL -> sum(weight * token loss) -> gradient

`accumulate` runs once a micro-batch, `apply` once an update: their number never compiles anything anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shoal.algorithm.correction import CORRECTIONS, correction_weights
from shoal.algorithm.kl import KL_ESTIMATORS, token_kl
from shoal.algorithm.logprobs import CHUNK_ELEMENTS, chunk_size, token_logprobs
from shoal.algorithm.policy_loss import POLICY_LOSSES, Bounds, policy_log_ratio
from shoal.config.schema import AlgorithmSection, OptimizerSection
from shoal.mesh import Role
from shoal.model.attention import segment_index, shared_prefix_attention
from shoal.model.transformer import (
    Architecture,
    Model,
    ParamSpec,
    forward,
    is_param_spec,
    logits,
    param_specs,
    shardings,
)
from shoal.trainer.batch import LearnerBatch
from shoal.trainer.optimizer import learning_rate, make_optimizer, state_shardings
from shoal.types import Params

SUMS = ("clip/fraction", "clip/low", "clip/high", "ratio/mean", "entropy", "sampler_gap/logprob_mean", "sampler_gap/w",
        "sampler_gap/w2")
MAXIMA = ("sampler_gap/logprob_max",)
"""What a micro-batch tells beside its loss: (sum, count) pairs, with those of `Objective.sums`, and largest values."""

PROGRAMS_KEPT = 4
"""Learners of this process, other by model or settings, of which the next one like it traces and compiles nothing."""

MAX_IN_FLIGHT = 2
"""Compiled steps that may run undrained: more, with collectives, can deadlock simulated devices."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """`trainable` and `frozen` have the same structure; each parameter is in one of them, None in the other."""

    trainable: Params
    frozen: Params
    optimizer: Any
    updates: Any  # int32[]: updates applied; a skipped one does not count


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accumulated:
    """Sums over the micro-batches of one update."""

    gradient: Params
    loss: Any
    sums: Any  # name -> (sum, count)
    maxima: Any  # name -> number


@dataclass(frozen=True)
class Objective:
    """What is minimised: static, part of the compiled update. `use_old`: the batch's `old` are given, else they are
    this update's own log-probs under stop-gradient (one update a batch: clipping never acts). `kl_coef` is that of the
    loss; a divergence that is taken off the reward is none of it."""

    loss: str
    bounds: Bounds
    kl: str = "k3"
    kl_coef: float = 0.0
    use_old: bool = False
    kl_clamps: tuple[float, float] = (0.0, 0.0)  # of input and value; 0 for none
    kl_weighted: bool = False
    entropy_coef: float = 0.0
    correction: str = "none"
    correction_level: str = "token"
    correction_bounds: tuple[float, float] = (1.0, 0.0)  # cap, floor
    chunk_elements: int = CHUNK_ELEMENTS

    @classmethod
    def of(cls, a: AlgorithmSection) -> Objective:
        bounds = Bounds(a.clip_low, a.clip_high, a.clip_dual, a.cispo_bound, a.sapo_positive, a.sapo_negative)
        return cls(
            a.loss, bounds, a.kl, a.kl_coef if a.kl_placement == "loss" else 0.0, a.num_epochs * a.num_minibatches > 1,
            (a.kl_clamp_input, a.kl_clamp_value), a.kl_weighted, a.entropy_coef, a.correction, a.correction_level,
            (a.correction_cap, a.correction_floor))

    @property
    def functions(self) -> tuple[Callable | None, ...]:
        """What its names stand for in the registries."""
        return POLICY_LOSSES[self.loss], KL_ESTIMATORS[self.kl], CORRECTIONS.get(self.correction)

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the sums that a micro-batch tells."""
        corrected = ("correction/weight", "correction/zero") if self.correction != "none" else ()
        return (*SUMS, *(["kl"] if self.kl_coef else []), *corrected)


def is_intact(state: TrainState) -> bool:
    """True while no update has spent the state's buffers."""
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))


def assemble(trainable: Params, frozen: Params) -> Params:
    """The whole parameters from their two parts."""
    return jax.tree.map(lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda x: x is None)


def batch_logprobs(model: Model, parameters: Params, batch: LearnerBatch, chunk_elements: int,
                   entropy_gradient: bool = False) -> Any:
    """(log-probs, entropy), float32[R, S, C] each; a row's prompt is computed once for all its slots.

    A token's value comes from the hidden state before it: the first of a segment reads the prompt's last.
    """
    rows, slots, size = batch.slots.shape
    prefix_size = batch.prefix.shape[1]
    index = segment_index(batch.segment)
    own_positions = (batch.prefix_len[:, None, None] + index).reshape(rows, -1)
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(prefix_size), batch.prefix.shape), own_positions], 1)
    tokens = jnp.concatenate([batch.prefix, batch.slots.reshape(rows, -1)], axis=1)
    attention = shared_prefix_attention(prefix_size, batch.prefix_len, batch.segment)
    hidden, _ = forward(model, parameters, tokens, positions, attention)
    last = jnp.maximum(batch.prefix_len - 1, 0)[:, None, None]
    last = jnp.take_along_axis(hidden[:, :prefix_size], last, axis=1)[:, :, None]  # [R, 1, 1, D]
    own = hidden[:, prefix_size:].reshape(rows, slots, size, -1)
    before = jnp.pad(own, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    before = jnp.where((index == 0)[..., None], last, before).reshape(rows, slots * size, -1)
    chunk = chunk_size(-(-rows // model.role.row_shards), slots * size, model.architecture.vocab_size, chunk_elements)
    project = partial(_project, model, parameters)
    support_ids = None if batch.support_ids is None else batch.support_ids.reshape(rows, slots * size, -1)
    both = token_logprobs(before, batch.slots.reshape(rows, -1), batch.temperature, project, chunk, support_ids,
                          entropy_gradient)
    return tuple(jnp.where(batch.segment > 0, x.reshape(rows, slots, size), 0.0) for x in both)


def _project(model: Model, parameters: Params, hidden: jax.Array) -> jax.Array:
    return model.role.constrain(logits(model, parameters, hidden), "rows", None, "vocab")


def batch_loss(model: Model, objective: Objective, parameters: Params, batch: LearnerBatch) -> Any:
    """(loss, (sums, maxima, log-probs)): the micro-batch's part of the update's loss, and its metrics."""
    o = objective
    lp, entropy = batch_logprobs(model, parameters, batch, o.chunk_elements, o.entropy_coef > 0)
    token_loss, sums, maxima = token_losses(o, lp, entropy, batch)
    return (batch.weight * token_loss).sum(), (sums, maxima, jax.lax.stop_gradient(lp))


def token_losses(o: Objective, lp: jax.Array, entropy: jax.Array, batch: LearnerBatch) -> Any:
    """(token loss float32[R, S, C], sums, maxima) from log-probs and entropies: policy term, times its correction, plus
    divergence, less entropy. Tokens of weight 0 (with `mask_truncated` those of completions that were cut) count in what
    sampler and trainer disagree on, and in no other metric; completions that could not be judged are not in a batch."""
    mask = batch.loss_mask & (batch.weight > 0)
    old_logprobs = batch.old_logprobs if o.use_old else jax.lax.stop_gradient(lp)
    count = mask.sum(dtype=jnp.float32)
    token_loss, policy = POLICY_LOSSES[o.loss](lp, old_logprobs, batch.advantage, mask, batch.segment, o.bounds)
    sums = {
        "clip/fraction": policy["clip_fraction"],
        "clip/low": policy["clip_low_fraction"],
        "clip/high": policy["clip_high_fraction"],
        "ratio/mean": policy["ratio"],
        "entropy": (jax.lax.stop_gradient(jnp.where(mask, entropy, 0.0)).sum(), count),
    }
    if o.correction != "none":
        weight = correction_weights(o.correction, o.correction_level, old_logprobs, batch.sampler_logprobs, mask, batch.segment,
                                    *o.correction_bounds)
        token_loss = weight * token_loss
        sums["correction/weight"] = (weight.sum(), count)
        sums["correction/zero"] = ((mask & (weight == 0)).sum(dtype=jnp.float32), count)
    if o.kl_coef:
        divergence = token_kl(o.kl, lp, batch.ref_logprobs, mask, *o.kl_clamps)
        sums["kl"] = (divergence.sum(), count)
        if o.kl_weighted:
            divergence *= jnp.exp(policy_log_ratio(o.loss, lp, old_logprobs, mask, batch.segment))
        token_loss += o.kl_coef * divergence
    if o.entropy_coef:
        token_loss -= o.entropy_coef * jnp.where(mask, entropy, 0.0)
    log_ratio, loss_mask = jnp.where(batch.loss_mask, old_logprobs - batch.sampler_logprobs, 0.0), batch.loss_mask.sum(dtype=jnp.float32)
    difference, w = jnp.abs(log_ratio), jnp.where(batch.loss_mask, jnp.exp(log_ratio), 0.0)
    sums["sampler_gap/logprob_mean"] = (difference.sum(), loss_mask)
    sums["sampler_gap/w"] = (w.sum(), loss_mask)
    sums["sampler_gap/w2"] = ((w * w).sum(), loss_mask)
    return token_loss, sums, {"sampler_gap/logprob_max": difference.max()}


@dataclass(frozen=True)
class Applied:
    """What one update did."""

    loss: Any
    grad_norm: Any
    lr: Any
    skipped: Any  # 1 where the gradient was not finite: parameters and moments stay as they were


class Learner:
    """The trainer's compiled steps. Parameters are not donated: a sampler may hold them. The gradient's buffers are,
    so that the new parameters need no further memory."""

    def __init__(self, model: Model, objective: Objective, section: OptimizerSection, num_updates: int):
        self.model, self.objective = model, objective
        self.optimizer, self.layout, init, apply = _optimizer_programs(
            model.architecture, model.role, section, num_updates)
        zero, accumulate, score = _gradient_programs(model, objective, objective.functions)
        self.programs: dict[str, Callable] = {
            "init": init, "zero": zero, "accumulate": accumulate, "apply": apply, "score": score}
        self._in_flight: deque[Any] = deque()

    def init(self, parameters: Params) -> TrainState:
        nothing = jax.tree.map(lambda _: None, parameters)
        updates = jax.device_put(np.int32(0), self.model.role.replicated)
        return TrainState(parameters, nothing, self.programs["init"](parameters), updates)

    def shapes(self) -> TrainState:
        """Shapes, types and layout of the state that `init` makes; nothing is allocated."""
        parameters = self.shapes_of_parameters()
        moments = jax.eval_shape(self.optimizer.init, parameters)
        put = partial(jax.tree.map, lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place))
        updates = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.model.role.replicated)
        return TrainState(parameters, self.layout.frozen, put(moments, self.layout.optimizer), updates)

    def shapes_of_parameters(self) -> Params:
        return jax.tree.map(
            lambda d, place: jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=place),
            param_specs(self.model.architecture), self.layout.trainable, is_leaf=is_param_spec)

    def accumulate(self, total: Accumulated | None, state: TrainState, batch: LearnerBatch) -> tuple[Accumulated, Any]:
        """Adds a micro-batch's gradient and metrics; also its log-probs, float32[R, S, C]."""
        before = self.programs["zero"]() if total is None else total
        self._make_room()
        after, lp = self.programs["accumulate"](before, state.trainable, state.frozen, put_batch(self.model, batch))
        self._in_flight.append(lp)
        return after, lp

    def apply(self, state: TrainState, total: Accumulated) -> tuple[TrainState, Applied]:
        """One update of the optimizer. `total` is spent."""
        rest = (total.loss, state.trainable, state.frozen, state.updates)
        self._make_room()
        state, applied = self.programs["apply"](*rest, gradient=total.gradient, moments=state.optimizer)
        self._in_flight.append(applied)
        return state, Applied(*applied)

    def score(self, parameters: Params, batch: LearnerBatch) -> jax.Array:
        """Log-probs float32[R, S, C] of the batch's tokens under any parameters of this architecture."""
        self._make_room()
        lp = self.programs["score"](parameters, put_batch(self.model, batch))
        self._in_flight.append(lp)
        return lp

    def _make_room(self) -> None:
        """Waits, before a step is dispatched, until fewer than MAX_IN_FLIGHT are undrained."""
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            jax.block_until_ready(self._in_flight.popleft())


@dataclass(frozen=True)
class ParameterScorer:
    """The `Scorer` on the trainer's own devices: the reference's parameters, or the trainer's before an update."""

    learner: Learner
    parameters: Params

    def score(self, batch: LearnerBatch) -> jax.Array:
        return self.learner.score(self.parameters, batch)


class ModelScorer:
    """The `Scorer` of another model with the same vocabulary: a teacher."""

    def __init__(self, model: Model, parameters: Params):
        self.model, self.parameters = model, parameters
        self._score = jax.jit(partial(_score, model, CHUNK_ELEMENTS))
        self._last: Any = None

    def score(self, batch: LearnerBatch) -> jax.Array:
        jax.block_until_ready(self._last)  # one in flight
        self._last = self._score(self.parameters, put_batch(self.model, batch))
        return self._last


def put_batch(model: Model, batch: LearnerBatch) -> LearnerBatch:
    temperature = jax.device_put(batch.temperature, model.role.replicated)
    return replace(model.role.put_rows(replace(batch, temperature=None)), temperature=temperature)


@lru_cache(PROGRAMS_KEPT)
def _optimizer_programs(a: Architecture, role: Role, section: OptimizerSection, num_updates: int) -> tuple[
        optax.GradientTransformation, TrainState, Callable, Callable]:
    """The optimizer, the layout of its state, and its two programs: init and apply."""
    rate = learning_rate(section, num_updates)
    optimizer = make_optimizer(section, rate, _of_declared(lambda d: d.weight_decay, a))
    split, everywhere = shardings(a, role), role.replicated
    moments = state_shardings(optimizer, _gradient_shapes(a), split, everywhere)
    layout = TrainState(split, jax.tree.map(lambda _: None, split), moments, everywhere)
    apply = jax.jit(partial(_apply, optimizer, rate), donate_argnames=("gradient", "moments"),
                    out_shardings=(layout, everywhere))
    return optimizer, layout, jax.jit(optimizer.init, out_shardings=moments), apply


@lru_cache(PROGRAMS_KEPT)
def _gradient_programs(model: Model, objective: Objective, functions: tuple) -> tuple[Callable, Callable, Callable]:
    """A gradient of zeros, the sum with a micro-batch's, log-probs alone. `functions`: those of the objective; others
    under the same names make other programs."""
    everywhere = model.role.replicated
    sums = Accumulated(shardings(model.architecture, model.role), everywhere, everywhere, everywhere)
    zero = jax.jit(partial(_zero, _gradient_shapes(model.architecture), objective), out_shardings=sums)
    accumulate = jax.jit(partial(_accumulate, model, objective), donate_argnums=0, out_shardings=(sums, None))
    return zero, accumulate, jax.jit(partial(_score, model, objective.chunk_elements))


def _of_declared(read: Callable[[ParamSpec], Any], a: Architecture) -> Params:
    return jax.tree.map(read, param_specs(a), is_leaf=is_param_spec)


def _gradient_shapes(a: Architecture) -> Params:
    return _of_declared(lambda d: jax.ShapeDtypeStruct(d.shape, jnp.float32), a)


def _zero(shapes: Params, objective: Objective) -> Accumulated:
    def pair() -> tuple[jax.Array, jax.Array]:
        return jnp.float32(0), jnp.float32(0)

    gradient = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    maxima = {name: jnp.float32(0) for name in MAXIMA}
    return Accumulated(gradient, jnp.float32(0), {name: pair() for name in objective.sums}, maxima)


def _accumulate(model: Model, objective: Objective, total: Accumulated, trainable: Params, frozen: Params,
                batch: LearnerBatch) -> tuple[Accumulated, jax.Array]:
    def loss(trainable: Params) -> Any:
        return batch_loss(model, objective, assemble(trainable, frozen), batch)

    (value, (sums, maxima, lp)), gradient = jax.value_and_grad(loss, has_aux=True)(trainable)
    new = Accumulated(gradient, value, sums, maxima)
    added = jax.tree.map(jnp.add, replace(total, maxima=None), replace(new, maxima=None))
    return replace(added, maxima=jax.tree.map(jnp.maximum, total.maxima, maxima)), lp


def _apply(optimizer: optax.GradientTransformation, rate: Any, loss: jax.Array, trainable: Params, frozen: Params,
           updates: jax.Array, *, gradient: Params, moments: Any) -> tuple[TrainState, Any]:
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)
    safe = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), gradient)
    change, new_moments = optimizer.update(safe, moments, trainable)
    new = optax.apply_updates(trainable, change)

    def keep(new: jax.Array, old_logprobs: jax.Array) -> jax.Array:
        return jnp.where(finite, new, old_logprobs)

    state = TrainState(jax.tree.map(keep, new, trainable), frozen, jax.tree.map(keep, new_moments, moments),
                       updates + finite)
    return state, (loss, norm, rate(updates), 1 - finite.astype(jnp.int32))


def _score(model: Model, chunk_elements: int, parameters: Params, batch: LearnerBatch) -> jax.Array:
    return batch_logprobs(model, parameters, batch, chunk_elements)[0]
