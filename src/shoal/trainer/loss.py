"""The loss of one micro-batch, and log-probs alone: from a batch through the model to
`shoal.algorithm.loss`.

    LearnerBatch -> forward -> token_logprobs -> token_losses -> sum(weight * token loss)

Weights hold aggregation and denominator of the whole update, so the losses of micro-batches add up.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.algorithm.logprobs import CHUNK_ELEMENTS, chunk_size, sliced_logprobs, token_logprobs
from shoal.algorithm.loss import Objective, token_losses
from shoal.config.choices import CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, REJECTIONS
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.mesh import Role
from shoal.model.attention.selector import segment_attention
from shoal.model.head import head_projection, head_slices, logits, output_head
from shoal.model.transformer import Model, forward
from shoal.records import Params
from shoal.trainer.batch import LearnerBatch


def make_objective(a: AlgorithmSection) -> Objective:
    """What the settings minimise."""
    loss, correction, rejection = (
        POLICY_LOSSES[a.loss],
        CORRECTIONS[a.correction],
        REJECTIONS[a.rejection],
    )
    return Objective(
        loss=loss.load(),
        settings=tuple(loss.settings(a).items()),
        ratio=loss.ratio,
        kl=KL_ESTIMATORS[a.kl].load(),
        kl_metric=a.kl_metric and not a.kl_coef,
        kl_coef=a.kl_coef if a.kl_placement == "loss" else 0.0,
        kl_sampler_coef=a.kl_sampler_coef,
        to_sampler=correction.to_sampler,
        use_old=a.num_epochs * a.num_minibatches > 1,
        kl_clamps=(a.kl_clamp_input, a.kl_clamp_value),
        kl_weighted=a.kl_weighted,
        entropy_coef=a.entropy_coef,
        correction=correction.load() if correction.function else None,
        given=a.learns_from_data,
        correction_level=a.correction_level,
        correction_bounds=(a.correction_cap, correction.lower_bound(a.correction_floor)),
        rejection=rejection.load() if rejection.function else None,
        rejection_level=rejection.level,
        rejection_bounds=rejection.bounds(a.rejection_cap, a.rejection_floor),
    )


def batch_logprobs(
    model: Model,
    parameters: Params,
    batch: LearnerBatch,
    chunk_elements: int = 0,
    entropy_gradient: bool = False,
) -> Any:
    """Log-probs and entropies of completions' tokens, float32[R, T] each, 0 elsewhere; a prompt is
    computed once for all completions that follow it in its row.

    A token's log-prob comes from the hidden state before it; for a completion's first token that is
    its prompt's last.
    """
    role = model.role
    tokens, position, before, segment, prompt = map(
        role.split_rows, (batch.tokens, batch.position, batch.before, batch.segment, batch.prompt)
    )
    support = None if batch.support_ids is None else role.split_rows(batch.support_ids)
    hidden, _ = forward(
        model, parameters, tokens, position, segment_attention(model, segment, prompt)
    )
    rows, size = tokens.shape
    rows_here = -(-rows // role.row_shards)
    budget, head = chunk_elements or CHUNK_ELEMENTS[role.platform], output_head(parameters)
    chunk = chunk_size(rows_here, size, model.architecture.vocab_size, budget)
    # Of all tokens: to leave chunks of prompts out by a condition costs a second gradient of the
    # head (docs/LOG.md).
    inputs = _states_at(role, hidden, before), tokens, batch.temperature
    if role.platform == "tpu" and role.tensor == 1 and chunk < size:
        slices = head_slices(head, max(128, budget // (rows_here * size)))
        values = sliced_logprobs(
            *inputs,
            lambda head, hidden: head_projection(model, head)(hidden),
            slices,
            model.architecture.vocab_size,
            support,
            entropy_gradient,
        )
    else:
        values = token_logprobs(
            *inputs,
            head_projection(model, head),
            chunk,
            support,
            entropy_gradient,
            dense=role.platform == "gpu",
        )
    return tuple(jnp.where(batch.segment != batch.prompt, role.join_rows(x), 0.0) for x in values)


def next_token_logits(
    model: Model, parameters: Params, batch: LearnerBatch, positions: jax.Array
) -> jax.Array:
    """Logits float32[K, V] of what follows the tokens at positions[K] in the batch's first row."""
    role = model.role
    tokens, position, segment, prompt = map(
        role.split_rows, (batch.tokens, batch.position, batch.segment, batch.prompt)
    )
    hidden, _ = forward(
        model, parameters, tokens, position, segment_attention(model, segment, prompt)
    )
    states = role.join_rows(hidden)[0, positions]  # [K, D]
    return logits(model, parameters, states)


def _states_at(role: Role, hidden: jax.Array, place: jax.Array) -> jax.Array:
    """hidden[R, T, D] at the places [R, T] in its rows; where rows are split, they are whole for a
    moment."""

    def of_rows(hidden: jax.Array, place: jax.Array) -> jax.Array:
        if role.context > 1:
            hidden = jax.lax.all_gather(hidden, "context", axis=1, tiled=True)
        return jnp.take_along_axis(hidden, place[..., None], axis=1)

    if role.context == 1:
        return of_rows(hidden, place)
    rows = PartitionSpec(role.row_axes)
    return jax.shard_map(
        of_rows,
        mesh=role.mesh,
        in_specs=rows,
        out_specs=rows,
        axis_names=set(role.row_axes),
        check_vma=False,
    )(hidden, place)


def batch_loss(model: Model, objective: Objective, parameters: Params, batch: LearnerBatch) -> Any:
    """(loss, (sums, maxima, log-probs)): a micro-batch's part of the update's loss, and its
    metrics."""
    lp, entropy = batch_logprobs(
        model, parameters, batch, objective.chunk_elements, objective.entropy_coef > 0
    )
    token_loss, sums, maxima = token_losses(
        objective,
        lp,
        entropy,
        advantage=batch.advantage,
        weight=batch.weight,
        loss_mask=batch.loss_mask,
        segment=batch.segment,
        old_logprobs=batch.old_logprobs,
        sampler_logprobs=batch.sampler_logprobs,
        ref_logprobs=batch.ref_logprobs,
    )
    return (batch.weight * token_loss).sum(), (sums, maxima, jax.lax.stop_gradient(lp))
