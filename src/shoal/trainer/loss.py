"""Computes the loss of one micro-batch, or log-probs alone: from a batch through the model to
`shoal.algorithm.loss`.

    LearnerBatch -> forward -> token_logprobs -> token_losses -> sum(weight * token loss)

Weights include aggregation and denominator of the whole update, so the losses of its micro-batches
add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.algorithm.divergence import bucket_scores, divergence, top_buckets
from shoal.algorithm.logprobs import (
    CHUNK_ELEMENTS,
    by_chunks,
    chunk_size,
    sliced_logprobs,
    token_logprobs,
)
from shoal.algorithm.loss import Objective, metric_shapes, token_losses
from shoal.algorithm.value_loss import ValueObjective, value_losses, value_metric_shapes
from shoal.config.choices import CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, REJECTIONS
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.critic import CriticSection
from shoal.config.sections.model import TeacherSection
from shoal.mesh import Role
from shoal.model.block import LayerAux, cast_weight
from shoal.model.experts import load
from shoal.model.head import head_projection, head_slices, logits, output_head
from shoal.model.linear import linear
from shoal.model.passes import PackedRows
from shoal.model.transformer import Model, forward
from shoal.records import Params
from shoal.trainer.batch import LearnerBatch, TeacherStates, TeacherTop


def make_objective(
    a: AlgorithmSection,
    teacher: TeacherSection | None = None,
    critic: CriticSection | None = None,
) -> Objective:
    """Returns what the settings of `algorithm`, `teacher` and `critic` minimise, as an `Objective`
    with its functions loaded."""
    loss = POLICY_LOSSES[a.loss]
    correction = CORRECTIONS[a.correction]
    rejection = REJECTIONS[a.rejection]
    teacher = teacher or TeacherSection()
    critic = critic or CriticSection()
    has_value_loss = a.has_critic and critic.shared
    return Objective(
        loss=loss.load(),
        settings=tuple(loss.settings(a).items()),
        ratio=loss.ratio,
        kl=KL_ESTIMATORS[a.kl].load(),
        # a KL with a coefficient is recorded anyway
        kl_metric=a.kl_metric and not a.kl_coef,
        kl_coef=a.kl_coef if a.kl_placement == "loss" else 0.0,
        kl_sampler_coef=a.kl_sampler_coef,
        to_sampler=correction.to_sampler,
        use_old=a.num_epochs * a.num_minibatches > 1,
        kl_clamps=(a.kl_clamp_input, a.kl_clamp_value),
        kl_weighted=a.kl_weighted,
        entropy_coef=a.entropy_coef,
        context_coef=a.context_coef,
        teacher_beta=teacher.beta if teacher.gives_distributions else None,
        teacher_coef=teacher.coef if teacher.gives_distributions else 0.0,
        value_coef=critic.coef if has_value_loss else 0.0,
        value_clip=critic.value_clip if has_value_loss else 0.0,
        correction=correction.load() if correction.function else None,
        learns_from_data=a.learns_from_data,
        correction_level=a.correction_level,
        correction_bounds=(a.correction_cap, correction.lower_bound(a.correction_floor)),
        rejection=rejection.load() if rejection.function else None,
        rejection_level=rejection.level,
        rejection_bounds=rejection.bounds(a.rejection_cap, a.rejection_floor),
    )


def hidden_states(
    model: Model, parameters: Params, batch: LearnerBatch
) -> tuple[jax.Array, jax.Array, tuple[LayerAux, ...]]:
    """Returns (hidden states [R, T, D], tokens [R, T], the aux of each layer) of a batch, all as
    the parts of rows that devices hold (`Role.split_rows`)."""
    role = model.role
    tokens = role.split_rows(batch.tokens)
    position = role.split_rows(batch.position)
    segment = role.split_rows(batch.segment)
    prompt = role.split_rows(batch.prompt)
    before = role.split_rows(batch.before)
    rows = PackedRows.of(model, segment, prompt, position, before)
    experts = None
    if batch.experts is not None:
        experts = _given_experts(model, role.split_rows(batch.experts))
    hidden, aux = forward(model, parameters, tokens, position, rows, experts=experts)
    return hidden, tokens, aux


def _given_experts(model: Model, experts: jax.Array) -> jax.Array:
    """Returns the experts that tokens are given, [R, T, layers with experts, k], as `LayerInputs`
    has them."""
    a = model.architecture
    by_layer = jnp.moveaxis(experts.astype(jnp.int32), 2, 0)
    if len(a.expert_layers) == a.num_layers:
        return by_layer
    given = jnp.full((a.num_layers, *by_layer.shape[1:]), -1)
    return given.at[jnp.array(a.expert_layers)].set(by_layer)


def batch_logprobs(
    model: Model,
    parameters: Params,
    batch: LearnerBatch,
    chunk_elements: int = 0,
    entropy_gradient: bool = False,
) -> Any:
    """Returns (log-probs, entropies) of the tokens of completions, float32[R, T] each, with 0 at
    all other tokens. A prompt is computed once for all completions that follow it in its row.

    A token's log-prob comes from the hidden state of the token before it; for a completion's first
    token that is its prompt's last. `chunk_elements` bounds the logits that exist at once (0: the
    platform's default). Entropies have a gradient only with `entropy_gradient`. If the batch has
    `support_ids`, the distributions are over these tokens alone.
    """
    outputs = _token_outputs(model, parameters, batch, chunk_elements, entropy_gradient)
    return outputs.logprobs, outputs.entropies


@dataclass(frozen=True)
class TokenOutputs:
    """What a forward pass gives of each token, float32[R, T]: 0 at prompts' tokens and at
    padding."""

    logprobs: jax.Array
    entropies: jax.Array
    divergences: jax.Array | None  # from a teacher
    values: jax.Array | None  # of a critic that shares the layers, see `batch_values`
    aux: tuple[LayerAux, ...]  # of each layer


def _token_outputs(
    model: Model,
    parameters: Params,
    batch: LearnerBatch,
    chunk_elements: int,
    entropy_gradient: bool,
    teacher: TeacherStates | TeacherTop | None = None,
    beta: float | None = None,
    value_head: jax.Array | None = None,
) -> TokenOutputs:
    """Returns what `batch_logprobs` returns, the divergences from the teacher if there is a `beta`,
    and the values if there is a `value_head`[D, 1]."""
    role = model.role
    hidden, tokens, aux = hidden_states(model, parameters, batch)
    before = role.split_rows(batch.before)
    support = None
    if batch.support_ids is not None:
        support = role.split_rows(batch.support_ids)
    rows, length = tokens.shape
    rows_per_device = -(-rows // role.row_shards)
    budget = chunk_elements or CHUNK_ELEMENTS[role.platform]
    head = output_head(parameters)
    vocab_size = model.architecture.vocab_size
    compare = None
    of_teacher = None
    if beta is not None:
        assert teacher is not None, "a divergence needs what a teacher says"
        compare, of_teacher = _comparison(role, teacher, beta, batch.temperature)
        # Logits of two models, or those of one with and without the likeliest tokens.
        budget //= 2
    chunk = chunk_size(rows_per_device, length, vocab_size, budget)
    # All tokens are computed, prompts' too: leaving out chunks of prompts by a condition costs a
    # second gradient of the head (docs/LOG.md).
    states = _states_at(role, hidden, before)
    divergences = None
    # On a TPU, if all tokens need several chunks: by slices of the vocabulary instead. A divergence
    # needs both models' normalisers before its sum begins, so it takes chunks of tokens.
    if role.platform == "tpu" and role.tensor == 1 and chunk < length and compare is None:

        def project(head_slice: Any, hidden: jax.Array) -> jax.Array:
            """Returns the logits of a slice of the vocabulary."""
            return head_projection(model, head_slice)(hidden)

        # Each slice has as many tokens of the vocabulary as the budget allows, but whole registers
        # of 128.
        slices = head_slices(head, max(128, budget // (rows_per_device * length)))
        logprobs, entropies = sliced_logprobs(
            hidden=states,
            targets=tokens,
            temperature=batch.temperature,
            project=project,
            slices=slices,
            vocabulary=vocab_size,
            support_ids=support,
            entropy_gradient=entropy_gradient,
        )
    else:
        logprobs, entropies, divergences = token_logprobs(
            hidden=states,
            targets=tokens,
            temperature=batch.temperature,
            project=head_projection(model, head),
            chunk=chunk,
            support_ids=support,
            entropy_gradient=entropy_gradient,
            dense=role.platform == "gpu",
            compare=compare,
            teacher=of_teacher,
        )

    def of_completions(values: jax.Array) -> jax.Array:
        """Returns values of rows with 0 at prompts' tokens and at padding."""
        return jnp.where(batch.segment != batch.prompt, role.join_rows(values), 0.0)

    if divergences is not None:
        divergences = of_completions(divergences)
    values = None
    if value_head is not None:
        values = _values_of(model, value_head, states, batch)
    return TokenOutputs(
        logprobs=of_completions(logprobs),
        entropies=of_completions(entropies),
        divergences=divergences,
        values=values,
        aux=aux,
    )


def _comparison(
    role: Role, teacher: TeacherStates | TeacherTop, beta: float, temperature: jax.Array
) -> tuple[Callable[[jax.Array, Any], jax.Array], Any]:
    """Returns `compare` and `teacher` of `token_logprobs`: a function from the policy's logits of
    some tokens to their divergences, and the arrays that it reads besides, in parts of rows."""
    if isinstance(teacher, TeacherTop):

        def of_buckets(scores: jax.Array, of_teacher: tuple[jax.Array, jax.Array]) -> jax.Array:
            ids, logprobs = of_teacher
            return divergence(bucket_scores(scores, ids), logprobs, beta)

        return of_buckets, (role.split_rows(teacher.ids), role.split_rows(teacher.logprobs))

    # The head is gathered here, once for all chunks. It is never trained.
    project = head_projection(teacher.model, jax.lax.stop_gradient(output_head(teacher.head)))

    def of_vocabulary(scores: jax.Array, states: jax.Array) -> jax.Array:
        their_scores = project(states) / temperature
        # Models of a family have heads of different widths over one vocabulary: what is beyond it
        # is padding.
        width = min(scores.shape[-1], their_scores.shape[-1])
        return divergence(scores[..., :width], their_scores[..., :width], beta)

    return of_vocabulary, role.split_rows(teacher.states)


def batch_states(model: Model, parameters: Params, batch: LearnerBatch) -> jax.Array:
    """Returns the hidden state before each token of a batch, [R, T, D] in the type of the
    computation. `head_projection` makes logits of it. With `read_at` the tokens are those of the
    policy's rows."""
    hidden, _, _ = hidden_states(model, parameters, batch)
    states = _states_at(model.role, hidden, _teacher_index(model.role, batch))
    return model.role.join_rows(states).astype(model.dtype)


def batch_top(
    model: Model, k: int, vocab_size: int, parameters: Params, batch: LearnerBatch
) -> tuple[jax.Array, jax.Array]:
    """Returns (ids int32[R, T, k] of the likeliest tokens at each token of a batch, log-probs
    float32[R, T, k + 1] of these and of all others together), divided by the batch's temperature.
    Of the head's columns only the first `vocab_size` are tokens. With `read_at` the tokens are
    those of the policy's rows."""
    role = model.role
    hidden, _, _ = hidden_states(model, parameters, batch)
    states = _states_at(role, hidden, _teacher_index(role, batch))
    project = head_projection(model, output_head(parameters))
    rows, length, _ = states.shape
    rows_per_device = -(-rows // role.row_shards)
    # `top_k` sorts copies of the logits with their ids. No gradient of the head is summed here, so
    # small chunks cost little.
    budget = CHUNK_ELEMENTS[role.platform] // 8
    chunk = chunk_size(rows_per_device, length, model.architecture.vocab_size, budget)

    def of_chunk(states: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = project(states) / batch.temperature
        return top_buckets(scores[..., :vocab_size], k)

    ids, logprobs = by_chunks(of_chunk, states, chunk)
    return role.join_rows(ids), role.join_rows(logprobs)


def _teacher_index(role: Role, batch: LearnerBatch) -> jax.Array:
    """Returns where in its row a teacher is before each token that it speaks of, [R, T], in the
    parts of rows that devices hold."""
    index = batch.before if batch.read_at is None else batch.read_at
    return role.split_rows(index)


def next_token_logits(
    model: Model, parameters: Params, batch: LearnerBatch, positions: jax.Array
) -> jax.Array:
    """Returns the logits float32[K, V] of what follows the tokens at positions[K] in the batch's
    first row. They are not divided by the temperature."""
    hidden, _, _ = hidden_states(model, parameters, batch)
    states = model.role.join_rows(hidden)[0, positions]  # [K, D]
    return logits(model, parameters, states)


def _states_at(role: Role, hidden: jax.Array, index: jax.Array) -> jax.Array:
    """Returns hidden[R, T, D] at the indices [R, T] within each row; rows that are split over
    devices are gathered first."""

    def of_rows(hidden: jax.Array, index: jax.Array) -> jax.Array:
        if role.context > 1:
            hidden = jax.lax.all_gather(hidden, "context", axis=1, tiled=True)
        return jnp.take_along_axis(hidden, index[..., None], axis=1)

    if role.context == 1:
        return of_rows(hidden, index)
    rows = PartitionSpec(role.row_axes)
    return jax.shard_map(
        of_rows,
        mesh=role.mesh,
        in_specs=rows,
        out_specs=rows,
        axis_names=set(role.row_axes),
        check_vma=False,
    )(hidden, index)


LOAD, REROUTED = "experts/load", "experts/rerouted"
"""Names, among the sums of a micro-batch, of the experts' loads and of how many of the experts that
tokens were given the trainer would not have chosen."""


def expert_shapes(model: Model) -> dict[str, Any]:
    """Returns the shapes of what `expert_sums` adds to the sums of a micro-batch, by name; empty
    without experts."""
    a = model.architecture
    if a.experts is None:
        return {}
    loads = jax.ShapeDtypeStruct((len(a.expert_layers), a.experts.num_experts), jnp.float32)
    count = jax.ShapeDtypeStruct((), jnp.float32)
    return {LOAD: (loads, count), REROUTED: (count, count)}


def expert_sums(model: Model, batch: LearnerBatch, aux: Sequence[LayerAux]) -> dict[str, Any]:
    """Returns LOAD -> (how many tokens each expert has, float32[layers with experts, E]; the number
    of tokens) and REROUTED -> (how many given experts the router would not have chosen; how many
    were given). Prompts' tokens count once, padding does not. Empty without experts."""
    sizes = model.architecture.experts
    if sizes is None:
        return {}
    is_token = model.role.split_rows(batch.segment) > 0
    loads = []
    rerouted = jnp.zeros(())
    for of_layer in aux:
        if of_layer.experts is not None:
            loads.append(load(of_layer.experts, is_token, sizes.num_experts))
        if of_layer.rerouted is not None:
            rerouted = rerouted + of_layer.rerouted.sum(dtype=jnp.float32)
    num_given = jnp.zeros(())
    if batch.experts is not None:
        num_given = (batch.experts >= 0).sum(dtype=jnp.float32)
    num_tokens = is_token.sum(dtype=jnp.float32)
    return {LOAD: (jnp.stack(loads), num_tokens), REROUTED: (rerouted, num_given)}


def batch_values(model: Model, parameters: Params, batch: LearnerBatch) -> jax.Array:
    """Returns a critic's values of completions' tokens, float32[R, T]: of what is before each
    token, before it was sampled; 0 at prompts' tokens and at padding. A prompt is computed once for
    all completions that follow it in its row."""
    role = model.role
    hidden, _, _ = hidden_states(model, parameters, batch)
    states = _states_at(role, hidden, role.split_rows(batch.before))
    return _values_of(model, output_head(parameters), states, batch)


def _values_of(
    model: Model, value_head: jax.Array, states: jax.Array, batch: LearnerBatch
) -> jax.Array:
    """Returns the values float32[R, T] that a `value_head`[D, 1] has of the hidden states[R, T, D]
    before the tokens of a batch, which are the parts of rows that devices hold; 0 at prompts'
    tokens and at padding."""
    head = cast_weight(model, value_head, ("embed", None))
    values = linear(head, states.astype(model.dtype), jnp.float32)[..., 0]
    return jnp.where(batch.segment != batch.prompt, model.role.join_rows(values), 0.0)


VALUES = "values"
"""Name, among the sums of a micro-batch, of (loss, metrics) of a critic that shares the policy's
layers."""


def sum_shapes(model: Model, objective: Objective | ValueObjective) -> tuple[Any, Any]:
    """Returns names and shapes of the sums and maxima that `batch_loss` returns, as `metric_shapes`
    does."""
    if isinstance(objective, ValueObjective):
        return value_metric_shapes(objective), {}
    sums, maxima = metric_shapes(objective)
    sums |= expert_shapes(model)
    if objective.value_coef:
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        sums[VALUES] = loss, value_metric_shapes(ValueObjective(objective.value_clip))
    return sums, maxima


def batch_loss(
    model: Model,
    objective: Objective | ValueObjective,
    parameters: Params,
    batch: LearnerBatch,
    teacher: TeacherStates | TeacherTop | None = None,
    value_head: jax.Array | None = None,
) -> Any:
    """Returns (loss, (sums, maxima, log-probs)) of a micro-batch: its part of the update's loss,
    its metrics (name -> (sum, count) and name -> (largest, count)), and its tokens' log-probs
    float32[R, T] without gradient; of a critic, whose objective is a `ValueObjective`, values in
    place of log-probs. `teacher` is what the objective's divergence is from; None if it has none.
    `value_head`[D, 1] is that of a critic that shares the layers, whose loss is then added; None if
    the objective's `value_coef` is 0."""
    if isinstance(objective, ValueObjective):
        values = batch_values(model, parameters, batch)
        loss, sums = _loss_of_values(objective, values, batch)
        return loss, (sums, {}, jax.lax.stop_gradient(values))
    outputs = _token_outputs(
        model,
        parameters,
        batch,
        objective.chunk_elements,
        objective.entropy_coef > 0,
        teacher,
        objective.teacher_beta,
        value_head,
    )
    token_loss, sums, maxima = token_losses(
        objective,
        outputs.logprobs,
        outputs.entropies,
        advantage=batch.advantage,
        weight=batch.weight,
        loss_mask=batch.loss_mask,
        segment=batch.segment,
        old_logprobs=batch.old_logprobs,
        sampler_logprobs=batch.sampler_logprobs,
        ref_logprobs=batch.ref_logprobs,
        divergence=outputs.divergences,
    )
    sums |= expert_sums(model, batch, outputs.aux)
    loss = (batch.weight * token_loss).sum()
    if outputs.values is not None:
        value_objective = ValueObjective(objective.value_clip)
        value_loss, value_sums = _loss_of_values(value_objective, outputs.values, batch)
        sums[VALUES] = jax.lax.stop_gradient(value_loss), value_sums
        loss += objective.value_coef * value_loss
    return loss, (sums, maxima, jax.lax.stop_gradient(outputs.logprobs))


def _loss_of_values(
    objective: ValueObjective, values: jax.Array, batch: LearnerBatch
) -> tuple[jax.Array, Any]:
    """Returns (the part that a micro-batch has of the update's loss of its values[R, T], its
    metrics)."""
    targets = batch.targets
    losses, sums = value_losses(
        objective,
        values,
        old_values=targets.values,
        returns=targets.returns,
        weight=targets.weight,
    )
    return (targets.weight * losses).sum(), sums
