"""How far the policy's distribution of the next token is from a teacher's, over the vocabulary: not
estimated from the token that was sampled, as `loss.token_kl` does.

    p = softmax(scores)          the policy, which has the gradient
    q = softmax(their scores)    the teacher
    m = beta q + (1 - beta) p

    beta = 0     KL(q || p), forward: the policy covers what the teacher does
    beta = 1     KL(p || q), reverse: the policy keeps to what the teacher does
    between      beta KL(q || m) + (1 - beta) KL(p || m), generalised Jensen-Shannon

Agarwal et al., "On-Policy Distillation of Language Models" (GKD), arXiv 2306.13649, section 2; beta
is that of TRL's GKDTrainer and DistillationTrainer. Between 0 and 1 the value is at most log 2, and
near both ends small: divided by beta, it goes to KL(q || p) as beta goes to 0.

Over the teacher's K likeliest tokens alone the same functions compare K + 1 buckets: each of these
tokens, and all others together (`bucket_scores`). Merging tokens never makes a divergence larger;
with K = V it is that of the whole vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

LEAST_REST = 1e-7
"""The least probability of all tokens together that a server does not name: the rounding of 1 in
float32, in which it gives the others."""

NO_SCORE = -1e9
"""The score of a token that is left out. Its probability is exactly 0, like that of -inf, but a
difference of two of them is a number."""


def divergence(
    scores: Float[Array, "*tokens V"], their_scores: Float[Array, "*tokens V"], beta: float
) -> Float[Array, "*tokens"]:
    """Returns the divergence of softmax(scores) from softmax(their_scores) in nats, for each token.

    Scores are logits divided by the temperature, or anything else that differs from log-probs by a
    constant; they must be finite. `beta` is a number from 0 to 1, see above. Only `scores` have a
    gradient. Where both are equal, value and gradient are exactly 0."""
    value: jax.Array = _divergence(scores, their_scores, beta)
    return value


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _divergence(scores: jax.Array, their_scores: jax.Array, beta: float) -> jax.Array:
    value, _ = _value_and_slope(scores, their_scores, beta)
    return value


def _value_and_slope(
    scores: jax.Array, their_scores: jax.Array, beta: float
) -> tuple[jax.Array, jax.Array]:
    """Returns (divergence[...], its derivative by each of scores[..., V])."""
    log_p = jax.nn.log_softmax(scores)
    log_q = jax.nn.log_softmax(their_scores)
    p = jnp.exp(log_p)
    q = jnp.exp(log_q)
    log_ratio = log_q - log_p
    if beta == 0:
        return (q * log_ratio).sum(-1), p - q
    if beta == 1:
        log_m_over_p = log_ratio
        value_of_q = 0.0
        weight = 1.0
    else:
        log_m_over_p, log_m_over_q = _log_mixture_ratios(log_ratio, beta)
        value_of_q = -(q * log_m_over_q).sum(-1)
        weight = 1.0 - beta
    # KL(p || m), with q in place of m if beta is 1.
    value_of_p = -(p * log_m_over_p).sum(-1)
    value = beta * value_of_q + weight * value_of_p
    # By p_i the derivative is weight * (log p_i - log m_i), up to a constant: what comes through m
    # cancels out. By the scores of a softmax its mean under p is taken off.
    slope = weight * p * (-log_m_over_p - value_of_p[..., None])
    return value, slope


def _log_mixture_ratios(log_ratio: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """Returns (log(m / p), log(m / q)) from log(q / p): exactly 0 where that is 0, without an
    overflow where it is large. By the larger of p and q, of which m has at least a share, the ratio
    is computed; the other differs from it by `log_ratio`."""
    over_p = jnp.log1p(beta * jnp.expm1(jnp.minimum(log_ratio, 0.0)))
    over_q = jnp.log1p((1.0 - beta) * jnp.expm1(-jnp.maximum(log_ratio, 0.0)))
    has_larger_q = log_ratio > 0
    log_m_over_p = jnp.where(has_larger_q, over_q + log_ratio, over_p)
    log_m_over_q = jnp.where(has_larger_q, over_q, over_p - log_ratio)
    return log_m_over_p, log_m_over_q


def _divergence_forward(
    scores: jax.Array, their_scores: jax.Array, beta: float
) -> tuple[jax.Array, jax.Array]:
    # Of all that the backward pass needs only the derivative itself is kept: one array of the size
    # of the scores, where autodiff would keep several.
    return _value_and_slope(scores, their_scores, beta)


def _divergence_backward(beta: float, slope: jax.Array, gradient: jax.Array) -> tuple:
    return gradient[..., None] * slope, None


_divergence.defvjp(_divergence_forward, _divergence_backward)


def bucket_scores(
    scores: Float[Array, "*tokens V"], ids: Int[Array, "*tokens K"]
) -> Float[Array, "*tokens K+1"]:
    """Returns the scores of the tokens `ids`, which must differ from each other, and of all other
    tokens together, the logarithm of the sum of their exponentials. The softmax of these K + 1
    scores has the probabilities that the softmax of all scores gives these tokens, and their rest.

    The rest is summed, not computed as 1 - the others, which in float32 would be rounding only
    where the tokens have nearly all of the probability."""
    kept = jnp.take_along_axis(scores, ids, axis=-1)
    others = jnp.put_along_axis(scores, ids, NO_SCORE, axis=-1, inplace=False)
    rest = jax.nn.logsumexp(others, axis=-1, keepdims=True)
    return jnp.concatenate([kept, rest], axis=-1)


def add_rest(logprobs: np.ndarray) -> np.ndarray:
    """Returns log-probs of K different tokens with that of all other tokens together after them,
    float32[..., K + 1], on the host. Log-probs that were rounded may leave nothing for the others,
    or less: these have LEAST_REST then."""
    rest = 1 - np.exp(logprobs.astype(np.float64)).sum(-1, keepdims=True)
    log_rest = np.log(np.maximum(rest, LEAST_REST))
    return np.concatenate([logprobs, log_rest], axis=-1).astype(np.float32)


def top_buckets(
    scores: Float[Array, "*tokens V"], k: int
) -> tuple[Int[Array, "*tokens K"], Float[Array, "*tokens K+1"]]:
    """Returns (ids of the `k` likeliest tokens, log-probs of these and of all others together)."""
    _, ids = jax.lax.top_k(scores, k)
    return ids, jax.nn.log_softmax(bucket_scores(scores, ids))
