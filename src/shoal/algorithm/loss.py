"""The loss of GRPO and its kin for each token, from log-probs and advantages: pure,
differentiable functions.

    ratio       = exp(lp - old)                                     policy_log_ratio: of a token,
                                                                    or a completion
    policy loss = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)   `clipped`, or another below
    w           = exp(sg(old - sampler)), truncated or masked       correction_weights
    mask        = tokens that are not too far from the sampler      kept_tokens
    token loss  = w x policy loss + kl_coef x KL(lp, ref) - entropy_coef x entropy
                  + kl_sampler_coef x k3(lp, sampler) + teacher_coef x divergence
                  of context (what tools and environments said): -context_coef x lp
    loss        = sum(weight x token loss)                          weights of a whole update:
                                                                    `aggregation`
                  + value_coef x loss of the critic's values        if the critic shares the
                                                                    policy's layers: `value_loss`
    objective   = sum(weight x w x policy loss)                     a metric: the loss without KL
                                                                    and entropy

`lp` are the log-probs of the policy that is trained; `old` those of the trainer before the first
update on this batch; `sampler` those that the tokens were sampled with; `ref` those of the
reference; A is the completion's advantage (`advantage`); the divergence is that of the whole
distribution from a teacher's (`divergence`). If a batch gets one update only, `old` is
lp itself without gradient: every ratio is 1, and clipping never acts.

Arrays are [R, T], in nats: rows of prompts and completions. `mask` is True at tokens that the model
sampled; `segment` numbers the prompts and completions within a row from 1, 0 is padding. Where the
mask is False, every term and its gradient are exactly 0, whatever the inputs hold; only context
with a weight has its cross-entropy, with `context_coef`. Where it is True, nothing is guarded: a
log-prob that is not finite shows in the loss.

Policy losses, KL estimators and corrections have rows in `shoal.config.choices`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Metrics: TypeAlias = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
"""Name -> (sum, count): the metric is sum / count, after sums and counts of all micro-batches have
been added."""

Tokens = Float[Array, "R T"]
Mask = Bool[Array, "R T"]
Segments = Int[Array, "R T"]


@dataclass(frozen=True)
class Objective:
    """Terms and settings of what an update minimises: static, because compiled programs are cached
    by it."""

    loss: Callable[..., Any]  # the policy loss, for example `clipped`
    kl: Callable[..., Any]  # the KL estimator, for example `k3`
    settings: tuple[tuple[str, Any], ...] = ()  # settings of the loss, by name
    # "token", "sequence" or "sequence-token"
    ratio: str = "token"  # level of the loss's ratio, see `policy_log_ratio`
    kl_metric: bool = False  # True: KL is only a metric, and the batch has ref_logprobs
    # coefficient of the KL in the loss; a KL that is subtracted from the reward is not included
    kl_coef: float = 0.0
    kl_sampler_coef: float = 0.0
    # True: the ratio is to the log-probs that the tokens were sampled with
    to_sampler: bool = False
    # True: the batch has old_logprobs; else they are those of this update itself, and clipping
    # never acts
    use_old: bool = False
    # limits of the estimator's input and of its value; 0: no limit
    kl_clamps: tuple[float, float] = (0.0, 0.0)
    # True: the loss has each token's KL times the policy's ratio; the metric has it without
    kl_weighted: bool = False
    entropy_coef: float = 0.0
    context_coef: float = 0.0  # of the cross-entropy of tokens that the model did not sample
    correction: Callable[..., Any] | None = None
    # "token", "sequence" or "geometric", see `correction_weights`
    correction_level: str = "token"
    correction_bounds: tuple[float, float] = (1.0, 0.0)  # (cap, floor)
    # for example `k1`; None: nothing is rejected
    rejection: Callable[..., Any] | None = None
    # "token", "seq_sum", "seq_mean" or "seq_max", see `kept_tokens`
    rejection_level: str = "token"
    # bounds of the estimate within which tokens are kept
    rejection_bounds: tuple[float, float] = (-float("inf"), float("inf"))
    # from 0 to 1, see `divergence`; None: there is no divergence from a teacher
    teacher_beta: float | None = None
    teacher_coef: float = 0.0
    # of the loss of a critic's values (`value_loss`); 0: no critic shares the policy's layers
    value_coef: float = 0.0
    value_clip: float = 0.0  # see `ValueObjective`
    # True: the tokens are the data's, and no sampler has log-probs of them
    learns_from_data: bool = False
    chunk_elements: int = 0  # most logits at once; 0: by device, see CHUNK_ELEMENTS


def token_losses(
    o: Objective,
    lp: Tokens,
    entropy: Tokens,
    *,
    advantage: Tokens,
    weight: Tokens,
    loss_mask: Mask,
    segment: Segments,
    old_logprobs: Tokens,
    sampler_logprobs: Tokens,
    ref_logprobs: Tokens,
    divergence: Tokens | None = None,
) -> tuple[Tokens, Metrics, Metrics]:
    """Returns (token losses, sums, maxima) of a micro-batch. `sums` maps the name of a metric to
    (sum, count), `maxima` to (largest value, count); no such value is below 0.

    `weight` is each token's weight in the sum over an update (`aggregation`): of what is returned,
    only the metric `objective` is multiplied by it. Tokens of weight 0 (with `mask_truncated` those
    of truncated completions) count only in the metrics of the difference between sampler and
    trainer; completions without a reward are not in a batch at all. Outside `loss_mask` only
    context that is learned has a weight. `divergence` is that from a teacher, None if the objective
    has none.
    """
    # The mask is needed besides the weight 0, because a NaN of a masked token would survive the
    # product with 0.
    sampled = loss_mask & (weight > 0)
    # without a rejection the same tokens
    mask = sampled
    # With one update a batch `old` equals lp to the bit: a separate forward pass would compute
    # nothing new.
    if not o.use_old:
        old_logprobs = jax.lax.stop_gradient(lp)
    if o.learns_from_data:
        sampler_logprobs = old_logprobs
    if o.rejection:
        least, most = o.rejection_bounds
        mask = kept_tokens(
            o.rejection,
            o.rejection_level,
            old_logprobs,
            sampler_logprobs,
            sampled,
            segment,
            least,
            most,
        )
    count = mask.sum(dtype=jnp.float32)
    ratio_to = sampler_logprobs if o.to_sampler else old_logprobs
    log_ratio = policy_log_ratio(o.ratio, lp, ratio_to, mask, segment)
    token_loss, sums = policy_loss(
        o.loss, log_ratio, lp, advantage, mask, segment, **dict(o.settings)
    )
    sums["entropy"] = (jax.lax.stop_gradient(jnp.where(mask, entropy, 0.0)).sum(), count)
    if o.correction:
        cap, floor = o.correction_bounds
        w = correction_weights(
            o.correction,
            o.correction_level,
            old_logprobs,
            sampler_logprobs,
            sampled,
            segment,
            cap,
            floor,
        )
        # rejected tokens have no weight either
        w = jnp.where(mask, w, 0)
        # The correction multiplies the policy term alone, because KL and entropy are of the
        # trainer's own distribution.
        token_loss = w * token_loss
        sums["correction/weight"] = (w.sum(), count)
        sums["correction/zero"] = ((mask & (w == 0)).sum(dtype=jnp.float32), count)
    if o.rejection:
        sums["correction/rejected"] = (
            (sampled & ~mask).sum(dtype=jnp.float32),
            sampled.sum(dtype=jnp.float32),
        )
    # Only the sum of this metric is used, summed over an update's micro-batches; its count is not a
    # divisor.
    sums["objective"] = (jax.lax.stop_gradient(weight * token_loss).sum(), count)
    if o.kl_coef or o.kl_metric:
        clamp_input, clamp_value = o.kl_clamps
        kl = token_kl(o.kl, lp, ref_logprobs, mask, clamp_input, clamp_value)
        sums["kl"] = (kl.sum(), count)
        if o.kl_coef:
            if o.kl_weighted:
                kl = kl * jnp.exp(log_ratio)
            token_loss += o.kl_coef * kl
    if o.kl_sampler_coef:
        kl = token_kl(k3, lp, sampler_logprobs, mask)
        sums["sampler_gap/kl"] = (kl.sum(), count)
        token_loss += o.kl_sampler_coef * kl
    if divergence is not None:
        from_teacher = jnp.where(mask, divergence, 0.0)
        sums["teacher/divergence"] = (from_teacher.sum(), count)
        token_loss += o.teacher_coef * from_teacher
    if o.entropy_coef:
        token_loss -= o.entropy_coef * jnp.where(mask, entropy, 0.0)
    if o.context_coef:
        # The environment's words, learned as in pre-training: ECHO, arXiv 2605.24517.
        context = ~loss_mask & (weight > 0)
        nll = -jnp.where(context, lp, 0.0)
        num_context = context.sum(dtype=jnp.float32)
        sums["context/nll"] = (jax.lax.stop_gradient(nll).sum(), num_context)
        token_loss += o.context_coef * nll
    gap_sums, gap_maxima = sampler_gap(old_logprobs, sampler_logprobs, loss_mask)
    return token_loss, sums | gap_sums, gap_maxima


# ---- the ratio, and policy losses of it


def policy_log_ratio(
    level: str, lp: Tokens, old_logprobs: Tokens, mask: Mask, segment: Segments
) -> Tokens:
    """Returns the logarithm of the ratio of policy and old policy; with the level `token` it is 0
    outside the mask, with the others it need not be.

    `token`: lp - old. `sequence`: the mean of that over the completion's sampled tokens, GSPO,
    arXiv 2507.18071, eqs. 5 to 7. `sequence-token`: the same value, but with the gradient of the
    token alone: sg(mean) + lp - sg(lp), GSPO-token, eqs. 13 and 14.
    """
    # Masked before the maths, not only after: the derivative of exp at infinity times 0 would be
    # NaN.
    lp = jnp.where(mask, lp, 0)
    old_logprobs = jnp.where(mask, old_logprobs, 0)
    if level == "token":
        return lp - old_logprobs
    mean = segment_mean(lp - old_logprobs, segment, mask)
    if level == "sequence":
        return mean
    return lp - jax.lax.stop_gradient(lp) + jax.lax.stop_gradient(mean)


def policy_loss(
    loss: Callable[..., Any],
    log_ratio: Tokens,
    lp: Tokens,
    advantage: Tokens,
    mask: Mask,
    segment: Segments,
    **settings: Any,
) -> tuple[Tokens, Metrics]:
    """Returns the token losses by one of the functions below, and the metrics of its bounds:
    `clip/fraction`, `clip/low`, `clip/high` and `ratio/mean`.

    Each of them takes (log_ratio, lp, advantage, mask, segment) and its settings, and returns
    (token losses, True where the lower bound is active, True where the upper bound is active).
    Outside the mask `lp` and `advantage` are 0, and what it returns is dropped.
    """
    lp = jnp.where(mask, lp, 0)
    advantage = jnp.where(mask, advantage, 0)
    token_loss, low, high = loss(log_ratio, lp, advantage, mask, segment, **settings)
    low = mask & low
    high = mask & high
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio))
    count = mask.sum(dtype=ratio.dtype)
    values = {
        "clip/fraction": low | high,
        "clip/low": low,
        "clip/high": high,
        "ratio/mean": jnp.where(mask, ratio, 0),
    }
    metrics: Metrics = {}
    for name, value in values.items():
        metrics[name] = (value.sum(dtype=ratio.dtype), count)
    return jnp.where(mask, token_loss, 0), metrics


def clipped(
    log_ratio: Tokens,
    lp: Tokens,
    advantage: Tokens,
    mask: Mask,
    segment: Segments,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> tuple[Tokens, Mask, Mask]:
    """Returns -min(ratio A, clip(ratio, 1 - low, 1 + high) A): the loss of GRPO with the token's
    ratio, of GSPO with the completion's.

    PPO, arXiv 1707.06347, eq. 7, as in GRPO: DeepSeekMath, arXiv 2402.03300, eq. 3 (without its KL
    term, which is `kl`). With high > low it is the clip-higher of DAPO, arXiv 2503.14476, eq. 10.
    GSPO's paper clips at 3e-4 below and 4e-4 above: a completion's ratio moves far less than a
    token's does. With `clip_dual` c, the loss is at most -c A where A < 0: arXiv 1912.09729, eq. 5;
    0 turns it off.

    Where the clipped loss is strictly above the unclipped one its gradient is 0; at a tie the
    gradient is whole. Both masks say where a bound is active: the lower one, and the upper one or
    `clip_dual`.
    """
    # Not jnp.minimum and jnp.clip: at a tie, the common case of ratio 1, both would halve the
    # gradient.
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    constant = -jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage
    unclipped = -ratio * advantage
    active = constant > unclipped
    high = active & (ratio > 1)
    low = active & (ratio < 1)
    if clip_dual:
        loss = jnp.where(active, constant, unclipped)
        capped = (advantage < 0) & (loss > -clip_dual * advantage)
        constant = jnp.where(capped, -clip_dual * advantage, constant)
        active = active | capped
        high = high | capped
    # Where a bound is active the exponent is 0, so that a ratio of inf leaves no NaN in the
    # gradient.
    live = -jnp.exp(jnp.where(active, 0, log_ratio)) * advantage
    return jnp.where(active, constant, live), low, high


def cispo(
    log_ratio: Tokens,
    lp: Tokens,
    advantage: Tokens,
    mask: Mask,
    segment: Segments,
    *,
    clip_low: float,
    clip_high: float,
    cispo_bound: str,
) -> tuple[Tokens, Mask, Mask]:
    """Returns -sg(bounded ratio) A lp: the weight is bounded, and no token loses its gradient.
    MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5.

    `cispo_bound`: `paper`, at most 1 + high; `absolute`, at most high (TRL); `both`, also at least
    1 - low (verl). The masks say where the lower and the upper bound changed the weight.
    """
    # Without the stop-gradient the bounded tokens would have no gradient at all: the fault of a
    # port that clips the ratio and forgets the log-prob.
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    upper = clip_high if cispo_bound == "absolute" else 1 + clip_high
    lower = 1 - clip_low if cispo_bound == "both" else None
    weight = jnp.clip(ratio, lower, upper)
    return -weight * advantage * lp, weight > ratio, weight < ratio


def reinforce(
    log_ratio: Tokens, lp: Tokens, advantage: Tokens, mask: Mask, segment: Segments
) -> tuple[Tokens, Mask, Mask]:
    """Returns -A lp, without a ratio or a bound: Williams 1992, doi 10.1007/BF00992696, section 4.
    If A is 1 it is the negative log-likelihood, the loss of supervised fine-tuning. Both masks of
    bounds are False everywhere."""
    never = jnp.zeros_like(mask)
    return -advantage * lp, never, never


def gmpo(
    log_ratio: Tokens,
    lp: Tokens,
    advantage: Tokens,
    mask: Mask,
    segment: Segments,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tokens, Mask, Mask]:
    """Returns -A times the geometric mean, over a completion, of its tokens' clipped ratios; the
    gradient goes through those not clipped.

    Ratios are clipped in logarithms, from above at `clip_high` where A > 0, from below at
    -`clip_low` where A < 0; the paper has 0.4 for both. Every token has its completion's loss.
    GMPO, arXiv 2507.20673. The masks say which ratios were clipped from below and from above.
    """
    # The bounds are decided by the value without gradient: a clipped term must not have a gradient.
    value = jax.lax.stop_gradient(log_ratio)
    above = (advantage > 0) & (value > clip_high)
    below = (advantage < 0) & (value < -clip_low)
    clipped = jnp.where(above, clip_high, jnp.where(below, -clip_low, log_ratio))
    return -advantage * jnp.exp(segment_mean(clipped, segment, mask)), below, above


def sapo(
    log_ratio: Tokens,
    lp: Tokens,
    advantage: Tokens,
    mask: Mask,
    segment: Segments,
    *,
    sapo_positive: float,
    sapo_negative: float,
) -> tuple[Tokens, Mask, Mask]:
    """Returns -(4 / tau) sigmoid(tau (ratio - 1)) A, with tau `sapo_positive` for an advantage
    above 0, else `sapo_negative`: in place of a clip, a gate that closes smoothly on both sides.
    SAPO, arXiv 2511.20347. Both masks of bounds are False everywhere."""
    # Above exp(88) the ratio is inf in float32, and its slope times that of the closed gate, 0,
    # would be NaN.
    ratio = jnp.exp(jnp.minimum(log_ratio, 80.0))
    tau = jnp.where(advantage > 0, sapo_positive, sapo_negative)
    never = jnp.zeros_like(mask)
    return -4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantage, never, never


def dppo(
    log_ratio: Tokens,
    lp: Tokens,
    advantage: Tokens,
    mask: Mask,
    segment: Segments,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tokens, Mask, Mask]:
    """Returns -ratio A of the tokens whose probability is near its old one, and 0 for the others.

    Dropped are tokens whose probability has grown by more than `clip_high` where A > 0, and has
    fallen by more than `clip_low` where A < 0. A ratio says little about a rare token: its
    probability may double and still be next to nothing. DPPO with the total variation of a token
    against all others, arXiv 2602.04879, as prime-rl has it. The masks say which tokens were
    dropped by the lower and by the upper bound.
    """
    probability = jnp.exp(jax.lax.stop_gradient(lp))
    old_probability = jnp.exp(jax.lax.stop_gradient(lp - log_ratio))
    grown = probability - old_probability
    high = (advantage > 0) & (grown > clip_high)
    low = (advantage < 0) & (grown < -clip_low)
    dropped = low | high
    # The exponent is 0 where a token is dropped, so that a ratio of inf leaves no NaN.
    ratio = jnp.exp(jnp.where(dropped, 0, log_ratio))
    return jnp.where(dropped, 0, -ratio * advantage), low, high


# ---- KL(policy || reference), estimated from the sampled tokens: functions of log_ratio = ref - lp
# J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html


def token_kl(
    estimator: Callable[[Array], Array],
    lp: Float[Array, "*tokens"],
    ref_logprobs: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    clamp_input: float = 0.0,
    clamp_value: float = 0.0,
) -> Float[Array, "*tokens"]:
    """Returns the estimate of KL, `estimator(ref - lp)`, where `mask` is True; elsewhere value and
    gradient are exactly 0, whatever the inputs hold.

    `clamp_input` limits |ref - lp| and `clamp_value` the size of the estimate (verl: 20 and 10); 0
    sets no limit. Beyond a limit the gradient is 0.
    """
    # Each side is masked before the difference: -inf minus -inf at padding would be NaN, and 0 *
    # NaN stays NaN.
    log_ratio = jnp.where(mask, ref_logprobs, 0) - jnp.where(mask, lp, 0)
    if clamp_input:
        log_ratio = jnp.clip(log_ratio, -clamp_input, clamp_input)
    value = estimator(log_ratio)
    if clamp_value:
        value = jnp.clip(value, -clamp_value, clamp_value)
    return jnp.where(mask, value, 0)


def k1(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Returns lp - ref: unbiased, of either sign. Subtracted from the reward it regularises; as a
    term of the loss its on-policy gradient is zero in expectation."""
    return -log_ratio


def k2(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Returns (lp - ref)^2 / 2: biased, but as a term of the loss its on-policy gradient is that of
    the true KL."""
    # The score function's part of KL's gradient is E[(lp - ref) grad lp]: exactly this value's own
    # derivative.
    return log_ratio**2 / 2


def k3(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Returns exp(ref - lp) - (ref - lp) - 1: unbiased, never negative, 0 with gradient 0 where
    both agree.

    DeepSeekMath, arXiv 2402.03300, eq. 4.
    """
    # Near 0, where policy and reference are for most of a run, exp(x) - 1 in float32 would be
    # rounding only.
    return jnp.expm1(log_ratio) - log_ratio


# ---- importance weights for what separates sampler and trainer: functions of
# w = exp(old - sampler)


def correction_weights(
    bounded: Callable[[Array, float, float], Array],
    level: str,
    old_logprobs: Float[Array, "R T"],
    sampler_logprobs: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
    segment: Int[Array, "R T"],
    cap: float,
    floor: float,
) -> Float[Array, "R T"]:
    """Returns the importance weight of each token where `mask` is True, 0 elsewhere: the ratio of
    the trainer's probability to the sampler's, bounded by `bounded(ratio, cap, floor)`, which is
    `tis` or `mis`.

    `level`: `token`, the token's own ratio; `sequence`, the product over the sampled tokens of its
    completion; `geometric`, their geometric mean (GSPO's ratio, which does not grow with length).
    """
    log_ratio = sampler_log_ratio(old_logprobs, sampler_logprobs, mask)
    # TRL calls its `sequence_*` modes what `sequence` is here, the product; papers on GSPO mean
    # `geometric`.
    if level == "sequence":
        log_ratio = segment_sum(log_ratio, segment)
    elif level == "geometric":
        log_ratio = segment_mean(log_ratio, segment, mask)
    # Completions that a correction drops still count in every denominator, as in verl and TRL.
    return jnp.where(mask, bounded(jnp.exp(log_ratio), cap, floor), 0)


def kept_tokens(
    estimator: Callable[[Array], Array],
    level: str,
    old_logprobs: Tokens,
    sampler_logprobs: Tokens,
    mask: Mask,
    segment: Segments,
    least: float,
    most: float,
) -> Mask:
    """Returns `mask` without the tokens for which the estimated divergence of trainer and sampler
    is outside of [least, most]; a NaN is not outside. `estimator` is a KL estimator, for example
    `k1`.

    `level`: `token`, each token is kept or not by its own estimate; `seq_sum`, `seq_mean` and
    `seq_max`, by the sum, mean or maximum over its completion's sampled tokens, so that completions
    are kept or not as a whole. J. Liu et al., "When Speed Kills Stability" (2025); verl's
    rollout_rs.
    """
    value = estimator(sampler_log_ratio(old_logprobs, sampler_logprobs, mask))
    if level == "seq_mean":
        value = segment_mean(value, segment, mask)
    elif level != "token":
        # Outside the mask the estimate is 0: it adds nothing to a sum, and is no maximum, because
        # k2 and k3 are 0 or more.
        reduce = jax.ops.segment_max if level == "seq_max" else jax.ops.segment_sum
        value = segment_sum(value, segment, reduce)
    # A NaN is not rejected, so that it shows in the loss.
    return mask & ~((value < least) | (value > most))


def sampler_log_ratio(old_logprobs: Tokens, sampler_logprobs: Tokens, mask: Mask) -> Tokens:
    """Returns old - sampler without a gradient, 0 outside the mask."""
    return jax.lax.stop_gradient(
        jnp.where(mask, old_logprobs, 0) - jnp.where(mask, sampler_logprobs, 0)
    )


def tis(w: Float[Array, "*tokens"], cap: float, floor: float) -> Float[Array, "*tokens"]:
    """Returns w clipped to [floor, cap]: truncated importance sampling. F. Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); the lower bound is
    TRL's."""
    return jnp.clip(w, floor, cap)


def mis(w: Float[Array, "*tokens"], cap: float, floor: float) -> Float[Array, "*tokens"]:
    """Returns w where floor <= w <= cap, else 0: masked importance sampling. J. Liu et al., "When
    Speed Kills Stability" (2025), without a floor; with one it is IcePop, in "Every Step Evolves",
    arXiv 2510.18855."""
    return jnp.where((w >= floor) & (w <= cap), w, 0)


# ---- sums over the segments of a row, and metrics


def segment_sum(
    x: Float[Array, "*rows T"],
    segment: Int[Array, "*rows T"],
    reduce: Callable[..., Array] = jax.ops.segment_sum,
) -> Float[Array, "*rows T"]:
    """Returns at each token the sum of `x` over the token's segment, in x's type; with
    `reduce=jax.ops.segment_max` the maximum. Segment numbers are from 0 to T. Tokens of number 0,
    padding, get the sum of all padding."""

    def in_row(x: jax.Array, segment: jax.Array) -> jax.Array:
        # Number 0, padding, has its own bucket, whose sum nobody reads.
        return reduce(x, segment, num_segments=segment.shape[0] + 1)[segment]

    # Not by a matrix of which token belongs to which segment: it would be T x T, 64 MiB for each
    # row at 4,096 tokens.
    return jnp.vectorize(in_row, signature="(t),(t)->(t)")(x, segment)


def segment_mean(
    x: Float[Array, "*rows T"], segment: Int[Array, "*rows T"], mask: Bool[Array, "*rows T"]
) -> Float[Array, "*rows T"]:
    """Returns at each token (masked-out ones too) the mean of `x` over the tokens of its segment
    where `mask` is True; 0 if there are none."""
    total = segment_sum(jnp.where(mask, x, 0), segment)
    return total / jnp.maximum(segment_sum(mask.astype(x.dtype), segment), 1)


def sampler_gap(
    old_logprobs: Tokens, sampler_logprobs: Tokens, loss_mask: Mask
) -> tuple[Metrics, Metrics]:
    """Returns (sums, maxima): metrics of how far the trainer's log-probs are from the sampler's,
    over all sampled tokens. They are the mean and the maximum of |old - sampler|, and the means of
    w = exp(old - sampler) and of its square. Their names are `sampler_gap/logprob_mean`,
    `sampler_gap/logprob_max`, `sampler_gap/w` and `sampler_gap/w2`."""
    log_ratio = jnp.where(loss_mask, old_logprobs - sampler_logprobs, 0.0)
    difference = jnp.abs(log_ratio)
    w = jnp.where(loss_mask, jnp.exp(log_ratio), 0.0)
    count = loss_mask.sum(dtype=jnp.float32)
    sums = {
        "sampler_gap/logprob_mean": (difference.sum(), count),
        "sampler_gap/w": (w.sum(), count),
        "sampler_gap/w2": ((w * w).sum(), count),
    }
    return sums, {"sampler_gap/logprob_max": (difference.max(), count)}


def metric_shapes(o: Objective) -> tuple[Any, Any]:
    """Returns names and shapes of the sums and maxima that `token_losses` returns, by tracing it,
    because their names are written there alone. Both map a name to two ShapeDtypeStructs, of its
    value and its count."""
    real = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    _, sums, maxima = jax.eval_shape(
        partial(token_losses, o),
        lp=real,
        entropy=real,
        advantage=real,
        weight=real,
        loss_mask=jax.ShapeDtypeStruct((1, 1), jnp.bool_),
        segment=jax.ShapeDtypeStruct((1, 1), jnp.int32),
        old_logprobs=real,
        sampler_logprobs=real,
        ref_logprobs=real,
        divergence=None if o.teacher_beta is None else real,
    )
    return sums, maxima
