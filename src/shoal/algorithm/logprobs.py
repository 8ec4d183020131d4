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
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """(log-prob of the target, entropy of the distribution) in nats at each place; the entropy carries no gradient.

    hidden[r, t] is the state *before* the target; `project` turns [..., D] into float32 logits [..., V], which are
    divided by the temperature. `chunk` tokens of each row are computed at once, and again in the backward pass.
    """
    rows, size, width = hidden.shape
    count = -(-size // chunk)
    padded = count * chunk - size
    hidden = jnp.pad(hidden, ((0, 0), (0, padded), (0, 0))).reshape(rows, count, chunk, width)
    targets = jnp.pad(targets, ((0, 0), (0, padded))).reshape(rows, count, chunk)

    @jax.checkpoint
    def some(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, wanted = inputs
        logits = project(states) / temperature
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
        fixed = jax.lax.stop_gradient(logits - normaliser[..., None])
        return chosen - normaliser, -(jnp.exp(fixed) * fixed).sum(-1)

    if count == 1:
        logprob, entropy = (x[None] for x in some((hidden[:, 0], targets[:, 0])))
    else:
        logprob, entropy = jax.lax.map(some, (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))
    return tuple(x.swapaxes(0, 1).reshape(rows, -1)[:, :size] for x in (logprob, entropy))  # type: ignore[return-value]


def chunk_size(rows: int, size: int, vocabulary: int, budget: int = CHUNK_ELEMENTS) -> int:
    """Tokens of each of `rows` rows to compute at once, so that their logits stay within the budget; at least 8."""
    chunk = max(8, budget // (rows * vocabulary))
    return min(size, chunk)
