"""Log-probs of given tokens from hidden states, some tokens at a time: [tokens, V] never stands in memory."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK_ELEMENTS = 2**25
"""Logits that may stand at once (128 MiB in float32), on each device that rows are split over."""


def token_logprobs(
    hidden: Float[Array, "R T D"],
    targets: Int[Array, "R T"],
    temperature: Float[Array, ""],
    project: Callable[[jax.Array], jax.Array],
    chunk: int,
    support_ids: Int[Array, "R T K"] | None = None,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """(log-prob of the target, entropy of the distribution) in nats at each place.

    hidden[r, t] is the state *before* the target; `project` turns [..., D] into float32 logits [..., V], which are
    divided by the temperature. `chunk` tokens of each row are computed at once, and again in the backward pass. With
    `kept`, the tokens that the sampler chose from at each place (-1: none), the distribution is over these alone; a
    place that keeps none is over all. The entropy carries a gradient only where `entropy_gradient` asks for it.
    """
    rows, size, _ = hidden.shape
    count = -(-size // chunk)

    def cut(x: jax.Array) -> jax.Array:
        """[R, T, ...] -> [count, R, chunk, ...]"""
        padded = jnp.pad(x, ((0, 0), (0, count * chunk - size), *((0, 0),) * (x.ndim - 2)))
        return padded.reshape(rows, count, chunk, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def some(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        states, wanted, *sets = inputs
        scores = project(states) / temperature
        chosen = jnp.take_along_axis(scores, wanted[..., None], axis=-1)[..., 0]
        normaliser = jax.nn.logsumexp(scores, axis=-1)
        entropy = _entropy(scores - normaliser[..., None], entropy_gradient)
        if sets:
            named = sets[0] >= 0
            narrowed = named.any(-1)
            among = jnp.take_along_axis(scores, jnp.maximum(sets[0], 0), axis=-1)
            among = jnp.where(named | ~narrowed[..., None], among, -jnp.inf)
            within = jax.nn.logsumexp(among, axis=-1)
            normaliser = jnp.where(narrowed, within, normaliser)
            entropy = jnp.where(narrowed, _entropy(among - within[..., None], entropy_gradient), entropy)
        return chosen - normaliser, entropy

    parts = tuple(map(cut, (hidden, targets) if support_ids is None else (hidden, targets, support_ids)))
    if count == 1:
        logprob, entropy = (x[None] for x in some(tuple(part[0] for part in parts)))
    else:
        logprob, entropy = jax.lax.map(some, parts)
    return tuple(x.swapaxes(0, 1).reshape(rows, -1)[:, :size] for x in (logprob, entropy))  # type: ignore[return-value]


def _entropy(logs: jax.Array, gradient: bool) -> jax.Array:
    """Of log-probs[..., V], -inf among them."""
    logs = logs if gradient else jax.lax.stop_gradient(logs)
    there = logs > -jnp.inf
    return -jnp.where(there, jnp.exp(logs) * jnp.where(there, logs, 0.0), 0.0).sum(-1)


def chunk_size(rows: int, size: int, vocabulary: int, budget: int = CHUNK_ELEMENTS) -> int:
    """Tokens of each of `rows` rows to compute at once, so that their logits stay within the budget; at least 8."""
    chunk = max(8, budget // (rows * vocabulary))
    return min(size, chunk)
