"""The loss of one micro-batch: log-probs, policy loss, correction, KL and entropy, as one differentiable function.

    LearnerBatch -> forward -> token_logprobs -> policy loss x correction + KL - entropy -> sum(weight * token loss)

Weights hold aggregation and denominator of the whole update, so the losses of micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shoal.algorithm.correction import correction_weights
from shoal.algorithm.kl import k3, token_kl
from shoal.algorithm.logprobs import CHUNK_ELEMENTS, chunk_size, token_logprobs
from shoal.algorithm.policy_loss import policy_log_ratio, policy_loss
from shoal.config.algorithm_parts import CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES
from shoal.config.schema import AlgorithmSection
from shoal.model.segment_attention import segment_attention
from shoal.model.transformer import Model, forward, head_projection
from shoal.trainer.batch import LearnerBatch
from shoal.types import Params


@dataclass(frozen=True)
class Objective:
    """What an update minimises: static, a key of the compiled programs. Functions are those of their registries."""

    loss: Callable[..., Any]
    settings: tuple[tuple[str, Any], ...] = ()  # of the loss, by name
    ratio: str = "token"  # the level of the loss's ratio
    kl: Callable[..., Any] = k3
    kl_coef: float = 0.0  # of the term in the loss; a KL that is subtracted from the reward is not part of it
    use_old: bool = False  # the batch holds old_logprobs; else they are this update's own, and clipping never acts
    kl_clamps: tuple[float, float] = (0.0, 0.0)  # of input and value; 0 for none
    kl_weighted: bool = False
    entropy_coef: float = 0.0
    correction: Callable[..., Any] | None = None
    correction_level: str = "token"
    correction_bounds: tuple[float, float] = (1.0, 0.0)  # cap, floor
    chunk_elements: int = 0  # logits at once; 0: by device, see CHUNK_ELEMENTS

    @classmethod
    def of(cls, a: AlgorithmSection) -> Objective:
        loss, correction = POLICY_LOSSES[a.loss], CORRECTIONS[a.correction]
        return cls(
            loss=loss.load(),
            settings=tuple(loss.settings(a).items()),
            ratio=loss.ratio,
            kl=KL_ESTIMATORS[a.kl].load(),
            kl_coef=a.kl_coef if a.kl_placement == "loss" else 0.0,
            use_old=a.num_epochs * a.num_minibatches > 1,
            kl_clamps=(a.kl_clamp_input, a.kl_clamp_value),
            kl_weighted=a.kl_weighted,
            entropy_coef=a.entropy_coef,
            correction=correction.load() if correction.function else None,
            correction_level=a.correction_level,
            correction_bounds=(a.correction_cap, correction.lower_bound(a.correction_floor)),
        )


def batch_logprobs(model: Model, parameters: Params, batch: LearnerBatch, chunk_elements: int = 0,
                   entropy_gradient: bool = False) -> Any:
    """Log-probs and entropies of completions' tokens, float32[R, T] each, 0 elsewhere; a prompt is computed once for
    all completions that follow it in its row.

    A token's log-prob comes from the hidden state before it; for a completion's first token that is its prompt's last.
    """
    rows, size = batch.tokens.shape
    attention = segment_attention(model, batch.segment, batch.prompt)
    hidden, _ = forward(model, parameters, batch.tokens, batch.position, attention)
    before = jnp.take_along_axis(hidden, batch.before[..., None], axis=1)
    chunk = chunk_size(-(-rows // model.role.row_shards), size, model.architecture.vocab_size,
                       chunk_elements or CHUNK_ELEMENTS[model.role.platform])
    # Of all tokens: to leave chunks of prompts out by a condition costs a second gradient of the head (docs/LOG.md).
    values = token_logprobs(before, batch.tokens, batch.temperature, head_projection(model, parameters), chunk,
                            batch.support_ids, entropy_gradient)
    return tuple(jnp.where(batch.segment != batch.prompt, x, 0.0) for x in values)


def batch_loss(model: Model, objective: Objective, parameters: Params, batch: LearnerBatch) -> Any:
    """(loss, (sums, maxima, log-probs)): a micro-batch's part of the update's loss, and its metrics."""
    lp, entropy = batch_logprobs(model, parameters, batch, objective.chunk_elements, objective.entropy_coef > 0)
    token_loss, sums, maxima = token_losses(objective, lp, entropy, batch)
    return (batch.weight * token_loss).sum(), (sums, maxima, jax.lax.stop_gradient(lp))


def metric_shapes(o: Objective) -> tuple[Any, Any]:
    """Names and shapes of the sums and maxima that `token_losses` returns: they are named there alone."""
    real, whole, truth = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in (jnp.float32, jnp.int32, jnp.bool_))
    batch = LearnerBatch(tokens=whole, position=whole, before=whole, segment=whole, prompt=whole, loss_mask=truth,
                         weight=real, advantage=real, sampler_logprobs=real, old_logprobs=real, ref_logprobs=real,
                         temperature=None)
    return jax.eval_shape(partial(token_losses, o), real, real, batch)[1:]


def token_losses(o: Objective, lp: jax.Array, entropy: jax.Array, batch: LearnerBatch) -> Any:
    """(token loss float32[R, T], sums, maxima) from log-probs and entropies of [R, T]. Sums and maxima of 0 or
    more are (value, count) by metric.

    The token loss is the policy term, times its correction, plus KL, less entropy. Tokens of weight 0 (with
    `mask_truncated` those of truncated completions) count in the metrics of sampler and trainer's difference and in no
    other; completions without a reward are not in a batch at all.
    """
    # Weight 0 is not enough: a NaN of a masked token would survive the product with 0.
    mask = batch.loss_mask & (batch.weight > 0)
    # With one update a batch `old` equals lp to the bit: a forward pass of its own would compute nothing new.
    old_logprobs = batch.old_logprobs if o.use_old else jax.lax.stop_gradient(lp)
    count = mask.sum(dtype=jnp.float32)
    log_ratio = policy_log_ratio(o.ratio, lp, old_logprobs, mask, batch.segment)
    token_loss, sums = policy_loss(o.loss, log_ratio, lp, batch.advantage, mask, batch.segment, **dict(o.settings))
    sums["entropy"] = (jax.lax.stop_gradient(jnp.where(mask, entropy, 0.0)).sum(), count)
    if o.correction:
        weight = correction_weights(o.correction, o.correction_level, old_logprobs, batch.sampler_logprobs, mask,
                                    batch.segment, *o.correction_bounds)
        # The correction multiplies the policy term alone: KL and entropy are of the trainer's own distribution.
        token_loss = weight * token_loss
        sums["correction/weight"] = (weight.sum(), count)
        sums["correction/zero"] = ((mask & (weight == 0)).sum(dtype=jnp.float32), count)
    if o.kl_coef:
        kl = token_kl(o.kl, lp, batch.ref_logprobs, mask, *o.kl_clamps)
        sums["kl"] = (kl.sum(), count)
        if o.kl_weighted:
            kl *= jnp.exp(log_ratio)
        token_loss += o.kl_coef * kl
    if o.entropy_coef:
        token_loss -= o.entropy_coef * jnp.where(mask, entropy, 0.0)
    gap_sums, gap_maxima = _sampler_gap(old_logprobs, batch)
    return token_loss, sums | gap_sums, gap_maxima


def _sampler_gap(old_logprobs: jax.Array, batch: LearnerBatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """How far the trainer's log-probs are from the sampler's, over all tokens that the model sampled."""
    log_ratio = jnp.where(batch.loss_mask, old_logprobs - batch.sampler_logprobs, 0.0)
    difference, w = jnp.abs(log_ratio), jnp.where(batch.loss_mask, jnp.exp(log_ratio), 0.0)
    count = batch.loss_mask.sum(dtype=jnp.float32)
    sums = {
        "sampler_gap/logprob_mean": (difference.sum(), count),
        "sampler_gap/w": (w.sum(), count),
        "sampler_gap/w2": ((w * w).sum(), count),
    }
    return sums, {"sampler_gap/logprob_max": (difference.max(), count)}
