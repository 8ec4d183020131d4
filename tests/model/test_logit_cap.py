"""A bound of the logits, in each form in which log-probs are computed."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from small import GEMMA, roles

from shoal.algorithm.logprobs import sliced_logprobs, token_logprobs
from shoal.model.head import head_projection, head_slices, logits
from shoal.model.parameters import initialise
from shoal.model.transformer import Model


def test_a_cap_bounds_logits_in_chunks_and_in_slices_of_the_vocabulary():
    """In value and gradient; the last slice is filled up."""
    model = Model(GEMMA, roles().trainer)
    parameters = initialise(GEMMA, 0, model.role)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 12, GEMMA.hidden_size)), jnp.float32)
    head = jnp.asarray(rng.standard_normal((GEMMA.hidden_size, GEMMA.vocab_size)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, GEMMA.vocab_size, (2, 12)))
    weights = jnp.asarray(rng.standard_normal((2, 2, 12)), jnp.float32)

    plain = hidden @ parameters.embed_tokens.T
    capped = logits(model, parameters, hidden)
    np.testing.assert_allclose(capped, 6 * np.tanh(plain / 6), rtol=1e-5, atol=1e-5)

    def by_formula(hidden: jax.Array, head: jax.Array) -> Any:
        logprobs = jax.nn.log_softmax(6 * jnp.tanh(hidden @ head / 6) / 0.7)
        chosen = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
        return chosen, -(jnp.exp(logprobs) * logprobs).sum(-1)

    def by_chunks(hidden: jax.Array, head: jax.Array) -> Any:
        project = head_projection(model, head)
        return token_logprobs(hidden, targets, jnp.float32(0.7), project, 5, entropy_gradient=True)[
            :2
        ]

    def by_slices(hidden: jax.Array, head: jax.Array) -> Any:
        return sliced_logprobs(
            hidden,
            targets,
            jnp.float32(0.7),
            lambda one, states: head_projection(model, one)(states),
            head_slices(head, 40),
            GEMMA.vocab_size,
            entropy_gradient=True,
        )

    def loss(function: Any, hidden: jax.Array, head: jax.Array) -> jax.Array:
        return (jnp.stack(function(hidden, head)) * weights).sum()

    assert np.abs(hidden @ head).max() > 2 * GEMMA.logit_cap
    with jax.default_matmul_precision("highest"):
        expected = by_formula(hidden, head)
        gradients = jax.grad(partial(loss, by_formula), (0, 1))(hidden, head)
        for function in (by_chunks, by_slices):
            for ours, theirs in zip(function(hidden, head), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
            found = jax.grad(partial(loss, function), (0, 1))(hidden, head)
            for ours, theirs in zip(found, gradients, strict=True):
                assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
