"""Divergences from a teacher: by their definition in float64, by TRL's own figures, over buckets,
and in chunks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.algorithm.divergence import (
    LEAST_REST,
    add_rest,
    bucket_scores,
    divergence,
    top_buckets,
)
from shoal.algorithm.logprobs import token_logprobs

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
RECORD = json.loads((Path(__file__).parent / "trl_divergence.json").read_text())
"""What TRL computes, by benchmarks/divergence_record.py."""


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * (np.log(p) - np.log(q))).sum(-1)


def by_definition(scores: np.ndarray, their_scores: np.ndarray, beta: float) -> np.ndarray:
    p = softmax(scores)
    q = softmax(their_scores)
    if beta == 0:
        return kl(q, p)
    if beta == 1:
        return kl(p, q)
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def by_differences(function: Any, scores: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The derivative of sum(function(scores)) by each score."""
    gradient = np.zeros_like(scores)
    for place in np.ndindex(scores.shape):
        moved = np.zeros_like(scores)
        moved[place] = step
        difference = function(scores + moved) - function(scores - moved)
        gradient[place] = difference.sum() / (2 * step)
    return gradient


def both_scores(size: int = 11, spread: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return spread * rng.standard_normal((4, size)), spread * rng.standard_normal((4, size))


def value_and_gradient(function: Any, scores: Any) -> tuple[np.ndarray, np.ndarray]:
    value, backward = jax.vjp(function, scores)
    (gradient,) = backward(jnp.ones_like(value))
    return np.asarray(value), np.asarray(gradient)


@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_are_those_of_the_definition(beta):
    scores, their_scores = both_scores()
    expected = by_definition(scores, their_scores, beta)
    slope = by_differences(partial(by_definition, their_scores=their_scores, beta=beta), scores)
    value, gradient = value_and_gradient(
        lambda x: divergence(x, jnp.float32(their_scores), beta), jnp.float32(scores)
    )
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=2e-7)
    with jax.enable_x64(True):
        value, gradient = value_and_gradient(
            lambda x: divergence(x, jnp.asarray(their_scores), beta), jnp.asarray(scores)
        )
        np.testing.assert_allclose(value, expected, rtol=1e-13)
        np.testing.assert_allclose(gradient, slope, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_distributions_have_no_divergence_and_no_gradient(beta):
    """To the bit, in float32; a constant added to all scores changes no distribution."""
    scores, _ = both_scores(size=500, spread=20.0)
    value, gradient = value_and_gradient(
        lambda x: divergence(x, jnp.float32(scores), beta), jnp.float32(scores)
    )
    assert not value.any() and not gradient.any()
    moved, _ = value_and_gradient(
        lambda x: divergence(x, jnp.float32(scores) + 8.0, beta), jnp.float32(scores)
    )
    assert np.abs(moved).max() < 1e-5


@pytest.mark.parametrize("beta", BETAS)
def test_far_distributions_give_finite_numbers(beta):
    """Where one gives a token what the other gives exp(-400): both directions of KL are large, and
    Jensen-Shannon's is at most log 2."""
    scores = jnp.array([[200.0, -200.0, 0.0], [-200.0, 200.0, 0.0]])
    value, gradient = value_and_gradient(lambda x: divergence(x, scores[::-1], beta), scores)
    assert np.isfinite(value).all() and np.isfinite(gradient).all()
    expected = 400.0
    if 0 < beta < 1:
        expected = -beta * np.log(beta) - (1 - beta) * np.log(1 - beta)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("case", RECORD["vocabulary"], ids=lambda case: str(case["beta"]))
def test_trl_computes_the_same(case):
    """DistillationTrainer's function of hidden states and heads, value and gradient."""
    student = {name: np.array(x, np.float32) for name, x in RECORD["student"].items()}
    teacher = {name: np.array(x, np.float32) for name, x in RECORD["teacher"].items()}
    their_scores = teacher["hidden"] @ teacher["head"].T / RECORD["temperature"]

    def loss(hidden: jax.Array) -> jax.Array:
        scores = hidden @ student["head"].T / RECORD["temperature"]
        return divergence(scores, jnp.asarray(their_scores), case["beta"])

    value, gradient = value_and_gradient(loss, jnp.asarray(student["hidden"]))
    np.testing.assert_allclose(value, case["values"], rtol=2e-5)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=2e-4, atol=2e-6)


def in_double() -> tuple[Any, Any]:
    """(hidden states and head of the record's student, the teacher's scores), inside enable_x64."""
    student = {name: jnp.array(x) for name, x in RECORD["student"].items()}
    teacher = {name: jnp.array(x) for name, x in RECORD["teacher"].items()}
    return student, teacher["hidden"] @ teacher["head"].T / RECORD["temperature"]


@pytest.mark.parametrize("case", RECORD["buckets"], ids=lambda case: str(case["beta"]))
def test_trl_computes_the_same_over_likeliest_tokens(case):
    with jax.enable_x64(True):
        student, their_scores = in_double()
        ids, logprobs = top_buckets(their_scores, RECORD["top_k"])

        def loss(hidden: jax.Array) -> jax.Array:
            scores = hidden @ student["head"].T / RECORD["temperature"]
            return divergence(bucket_scores(scores, ids), logprobs, case["beta"])

        value, gradient = value_and_gradient(loss, student["hidden"])
        np.testing.assert_allclose(value, case["values"], rtol=1e-9)
        np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", RECORD["gold"], ids=lambda case: str(case["beta"]))
def test_trls_gold_computes_the_same_for_equal_tokenizers(case):
    with jax.enable_x64(True):
        student, their_scores = in_double()

        def loss(hidden: jax.Array) -> jax.Array:
            scores = hidden @ student["head"].T / RECORD["temperature"]
            return divergence(scores, their_scores, case["beta"])

        value, gradient = value_and_gradient(loss, student["hidden"])
        np.testing.assert_allclose(value, case["values"], rtol=1e-9)
        np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-7, atol=1e-9)


def test_trls_minillm_has_the_mean_of_the_reverse_divergence_in_its_loss():
    expected = RECORD["minillm"]
    with jax.enable_x64(True):
        student, their_scores = in_double()

        def loss(hidden: jax.Array) -> jax.Array:
            scores = hidden @ student["head"].T / RECORD["temperature"]
            return divergence(scores, their_scores, 1.0).mean()

        value, gradient = value_and_gradient(loss, student["hidden"])
        assert value == pytest.approx(expected["values"], rel=1e-9)
        np.testing.assert_allclose(gradient, expected["gradient"], rtol=1e-7, atol=1e-9)


def merged(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Scores of the tokens `ids` and of all others together, as logarithms of probabilities."""
    p = softmax(scores)
    kept = np.take_along_axis(p, ids, -1)
    others = np.where(np.arange(p.shape[-1]) == ids[..., None], 1, 0).sum(-2) == 0
    return np.log(np.concatenate([kept, (p * others).sum(-1, keepdims=True)], -1))


@pytest.mark.parametrize("beta", BETAS)
def test_over_likeliest_tokens_all_others_are_one(beta):
    scores, their_scores = both_scores(size=30)
    ids, logprobs = top_buckets(jnp.float32(their_scores), 5)
    np.testing.assert_array_equal(ids, np.argsort(-their_scores)[:, :5])
    np.testing.assert_allclose(logprobs, merged(their_scores, np.asarray(ids)), atol=1e-5)

    def definition(scores: np.ndarray) -> np.ndarray:
        buckets = merged(scores, np.asarray(ids))
        return by_definition(buckets, merged(their_scores, np.asarray(ids)), beta)

    value, gradient = value_and_gradient(
        lambda x: divergence(bucket_scores(x, ids), logprobs, beta), jnp.float32(scores)
    )
    np.testing.assert_allclose(value, definition(scores), rtol=5e-6)
    np.testing.assert_allclose(gradient, by_differences(definition, scores), rtol=2e-5, atol=1e-6)
    assert (value < by_definition(scores, their_scores, beta)).all()  # less than of all tokens


@pytest.mark.parametrize("beta", BETAS)
def test_all_tokens_as_the_likeliest_are_the_whole_vocabulary(beta):
    scores, their_scores = (jnp.float32(x) for x in both_scores(size=30))
    whole = value_and_gradient(lambda x: divergence(x, their_scores, beta), scores)
    ids, logprobs = top_buckets(their_scores, 30)
    by_buckets = value_and_gradient(
        lambda x: divergence(bucket_scores(x, ids), logprobs, beta), scores
    )
    for ours, theirs in zip(by_buckets, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_rest_that_is_far_below_rounding_is_known_exactly():
    """1 - the others would be 0 in float32, and its logarithm -inf."""
    scores = np.array([[30.0, 29.0, 0.0, -1.0]])
    ids, logprobs = top_buckets(jnp.float32(scores), 2)
    expected = merged(scores, np.asarray(ids))
    assert expected[0, -1] < np.log(2.0**-24)
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6)


def test_the_samples_estimate_is_the_reverse_divergence_in_expectation():
    """What `teacher.divergence=sampled` adds to the advantage is log q - log p of the sampled
    token. Over all tokens that could be sampled, weighted by their probabilities, its gradient is
    that of the whole vocabulary with beta 1."""
    with jax.enable_x64(True):
        scores, their_scores = (jnp.asarray(x) for x in both_scores())
        bonus = jax.nn.log_softmax(their_scores) - jax.nn.log_softmax(scores)

        def policy_term(scores: jax.Array) -> jax.Array:
            lp = jax.nn.log_softmax(scores)
            return -(jax.lax.stop_gradient(jnp.exp(lp) * bonus) * lp).sum(-1)

        _, sampled = value_and_gradient(policy_term, scores)
        _, whole = value_and_gradient(lambda x: divergence(x, their_scores, 1.0), scores)
        np.testing.assert_allclose(sampled, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk", [5, 12])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_chunks_have_the_divergence_of_all_tokens(beta, chunk):
    """Values and gradients of hidden states and head; the last chunk is partly filled up."""
    rng = np.random.default_rng(1)
    hidden, their_hidden = rng.standard_normal((2, 2, 12, 8), np.float32)
    head, their_head = rng.standard_normal((2, 8, 60), np.float32)
    targets = jnp.asarray(rng.integers(0, 60, (2, 12)))
    weight = jnp.asarray(rng.standard_normal((2, 12), np.float32))

    def compare(scores: jax.Array, states: jax.Array) -> jax.Array:
        return divergence(scores, states @ their_head / 0.7, beta)

    def by_chunks(hidden: jax.Array, head: jax.Array) -> jax.Array:
        lp, _, values = token_logprobs(
            hidden,
            targets,
            jnp.float32(0.7),
            lambda x: x @ head,
            chunk,
            compare=compare,
            teacher=jnp.asarray(their_hidden),
        )
        assert values is not None
        return (weight * (lp + values)).sum()

    def at_once(hidden: jax.Array, head: jax.Array) -> jax.Array:
        scores = hidden @ head / 0.7
        lp = jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], -1)[..., 0]
        return (weight * (lp + divergence(scores, their_hidden @ their_head / 0.7, beta))).sum()

    inputs = jnp.asarray(hidden), jnp.asarray(head)
    ours = jax.value_and_grad(by_chunks, (0, 1))(*inputs)
    theirs = jax.value_and_grad(at_once, (0, 1))(*inputs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_the_rest_of_named_tokens_is_what_they_leave():
    scores, _ = both_scores()
    ids, expected = top_buckets(jnp.float32(scores), 4)
    named = np.log(np.take_along_axis(softmax(scores), np.asarray(ids), -1)).astype(np.float32)
    with_rest = add_rest(named)
    np.testing.assert_allclose(with_rest, expected, atol=2e-6)
    assert with_rest.dtype == np.float32
    # Rounded up, they leave less than nothing.
    rounded = add_rest(np.log(np.float32([[0.75, 0.2501]])))
    assert rounded[0, 2] == pytest.approx(np.log(LEAST_REST))
