"""Computes log-probs, entropies and divergences from hidden states, a chunk of tokens at a time, so
that logits of all tokens are never in memory.

For 64k tokens and a vocabulary of 152k they would take 37 GiB in float32, for the forward pass
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK_ELEMENTS = {"cpu": 2**25, "gpu": 2**28, "tpu": 5 * 2**25}
"""Logits that may be in memory at once on each device that rows are split over: 128 MiB of float32
on a CPU, 1 GiB on a GPU.

After every chunk the gradient of the head is read and written whole. By the TPU compiler's cycles
that took a sixth of an update of 8B with 2,048 tokens on a v6e in chunks of 261 tokens
(docs/LOG.md); by the GPU compiler's account of an H200 a micro-batch of 1.5B takes 536 ms with
chunks of 2^25 and 484 with these, in the same memory."""


def token_logprobs(
    hidden: Float[Array, "R T D"],
    targets: Int[Array, "R T"],
    temperature: Float[Array, ""],
    project: Callable[[jax.Array], jax.Array],
    chunk: int,
    support_ids: Int[Array, "R T K"] | None = None,
    entropy_gradient: bool = False,
    dense: bool = False,
    compare: Callable[[jax.Array, Any], jax.Array] | None = None,
    teacher: Any = None,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"], Float[Array, "R T"] | None]:
    """Returns (log-prob of the target, entropy of the distribution, divergence from a teacher) in
    nats at each position; None in place of the divergence without a teacher.

    hidden[r, t] is the state *before* the target; `project` turns [..., D] into float32 logits
    [..., V], which are divided by the temperature. `chunk` tokens of each row are computed at once;
    if there are several chunks, the backward pass computes each again. `support_ids` are the tokens
    that a truncating sampler chose from (filled up with -1): the distribution is then over these
    alone, or over the whole vocabulary at a position that has none. The entropy has a gradient only
    if `entropy_gradient` is set.

    `teacher` is a tree of arrays [R, T, ...], what is known of the teacher at each position.
    `compare(scores, of_teacher)` returns the divergence [R, t] of t tokens of each row from their
    logits [R, t, V], divided by the temperature, and from their part of this tree. It is over the
    whole vocabulary, whatever `support_ids` says.

    `dense` is for XLA on GPU. The gradient of the targets' logits is then computed for all logits,
    fused with that of the normaliser; a scatter between the two would make all logits pass through
    memory twice. And the entropy has no guards, because each of them is a constant as large as the
    logits, read in every chunk.
    """
    target_score = _picked if dense else _taken

    def of_chunk(
        inputs: tuple[jax.Array, jax.Array, jax.Array | None, Any],
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns log-probs, entropies and divergences of one chunk."""
        states, ids, support, of_teacher = inputs
        scores = project(states) / temperature
        target = target_score(scores, ids)
        # One normaliser serves the log-prob and the entropy, because both are of the same logits,
        # which exist only here.
        normaliser = jax.nn.logsumexp(scores, axis=-1)
        entropy = _entropy(scores - normaliser[..., None], entropy_gradient, guarded=not dense)
        if support is not None:
            kept = jnp.take_along_axis(scores, jnp.maximum(support, 0), axis=-1)
            normaliser, entropy = _over_support(
                kept, support, normaliser, entropy, entropy_gradient
            )
        divergence = None if compare is None else compare(scores, of_teacher)
        return target - normaliser, entropy, divergence

    return by_chunks(of_chunk, (hidden, targets, support_ids, teacher), chunk)


def by_chunks(function: Callable[[Any], Any], inputs: Any, chunk: int) -> Any:
    """Applies `function` to `chunk` tokens of each row at a time. `inputs` is a tree of arrays
    [R, T, ...], and `function` returns a tree of arrays [R, chunk, ...] of a part of it; the result
    is the same tree of [R, T, ...]. If there are several chunks, the backward pass computes each
    again."""
    rows, size = jax.tree.leaves(inputs)[0].shape[:2]
    count = -(-size // chunk)

    def split(x: jax.Array) -> jax.Array:
        """Splits rows into chunks, with padding at the end: [R, T, ...] -> [count, R, chunk,
        ...]."""
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, count * chunk - size)
        padded = jnp.pad(x, padding)
        return padded.reshape(rows, count, chunk, *x.shape[2:]).swapaxes(0, 1)

    chunks = jax.tree.map(split, inputs)
    # lax.map of one chunk would still compile a loop, and pad what needs no padding. The one
    # chunk's logits are kept: the backward pass begins with them, so they are in memory then
    # anyway.
    if count == 1:
        only_chunk = jax.tree.map(itemgetter(0), chunks)
        results = jax.tree.map(itemgetter(None), function(only_chunk))
    else:
        # Computed again in the backward pass, which would otherwise keep every chunk's logits, all
        # of [tokens, V]. A loop needs no barrier against common subexpressions; the barrier would
        # keep what `project` never reads.
        results = jax.lax.map(jax.checkpoint(function, prevent_cse=False), chunks)

    def join(x: jax.Array) -> jax.Array:
        """Joins chunks to rows again, without padding: [count, R, chunk, ...] -> [R, T, ...]."""
        return x.swapaxes(0, 1).reshape(rows, -1, *x.shape[3:])[:, :size]

    return jax.tree.map(join, results)


def _taken(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the score of each id."""
    return jnp.take_along_axis(scores, ids[..., None], axis=-1)[..., 0]


@jax.custom_vjp
def _picked(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """Computes `_taken`, but its gradient is an array of all scores in place of a scatter."""
    return _taken(scores, ids)


def _picked_forward(scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple]:
    return _taken(scores, ids), (scores, ids)


def _picked_backward(kept: tuple, gradient: jax.Array) -> tuple:
    # Of the scores only the shape is read.
    scores, ids = kept
    token = jax.lax.broadcasted_iota(ids.dtype, scores.shape, scores.ndim - 1)
    return jnp.where(token == ids[..., None], gradient[..., None], 0.0), None


_picked.defvjp(_picked_forward, _picked_backward)


def sliced_logprobs(
    hidden: Float[Array, "R T D"],
    targets: Int[Array, "R T"],
    temperature: Float[Array, ""],
    project: Callable[[jax.Array, jax.Array], jax.Array],
    slices: Float[Array, "n D v"],
    vocabulary: int,
    support_ids: Int[Array, "R T K"] | None = None,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Returns the log-probs and entropies of `token_logprobs`, but computes all tokens at once,
    a slice of the vocabulary at a time: neither the head nor its gradient is ever whole on a
    device.

    `project(slice, hidden)` returns the float32 logits of a slice's v tokens; those from number
    `vocabulary` on are padding. All other parameters are those of `token_logprobs`.
    """
    width = slices.shape[-1]
    ids = targets[..., None]  # the tokens whose scores are wanted: the target first
    if support_ids is not None:
        ids = jnp.concatenate([ids, support_ids], -1)
    states = hidden.astype(jnp.float32)  # the type in which gradients from all slices are summed

    @partial(jax.checkpoint, prevent_cse=False)
    def add_slice(carry: tuple, inputs: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        """Adds a slice's logits to the running sums, and picks the wanted scores that are in the
        slice."""
        peak, total, weighted, picked = carry
        weights, start = inputs
        scores = project(weights, states.astype(hidden.dtype)) / temperature
        scores = jnp.where(start + jnp.arange(width) < vocabulary, scores, -jnp.inf)
        index = ids - start  # in the slice
        in_slice = jnp.take_along_axis(scores, jnp.clip(index, 0, width - 1), axis=-1)
        picked = jnp.where((index >= 0) & (index < width), in_slice, picked)
        # Sums of exp(score) and of exp(score) * score, both over exp(peak).
        new_peak = jnp.maximum(peak, jax.lax.stop_gradient(scores.max(-1)))
        scale = jnp.exp(peak - new_peak)
        weight = jnp.exp(scores - new_peak[..., None])
        moment = jnp.where(scores > -jnp.inf, weight * scores, 0.0)
        if not entropy_gradient:
            moment = jax.lax.stop_gradient(moment)
        total = total * scale + weight.sum(-1)
        weighted = weighted * scale + moment.sum(-1)
        return (new_peak, total, weighted, picked), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    # Scores not found yet are -inf, and stay so for an id of -1, which is in no slice.
    begin = (zeros - jnp.inf, zeros, zeros, jnp.full(ids.shape, -jnp.inf, jnp.float32))
    starts = jnp.arange(len(slices)) * width
    (peak, total, weighted, picked), _ = jax.lax.scan(add_slice, begin, (slices, starts))
    normaliser = peak + jnp.log(total)
    entropy = normaliser - weighted / total
    if not entropy_gradient:
        entropy = jax.lax.stop_gradient(entropy)
    target = picked[..., 0]
    if support_ids is not None:
        normaliser, entropy = _over_support(
            picked[..., 1:], support_ids, normaliser, entropy, entropy_gradient
        )
    return target - normaliser, entropy


def _over_support(
    kept: jax.Array, support: jax.Array, normaliser: jax.Array, entropy: jax.Array, gradient: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns (normaliser, entropy) of the distribution over the token ids support[..., K] alone.
    `kept` are the logits of these ids. An id of -1 is no token; at a position that has no other,
    the result is the `normaliser` and `entropy` that were passed, of the whole vocabulary."""
    used = support >= 0
    truncated = used.any(-1)
    kept = jnp.where(used | ~truncated[..., None], kept, -jnp.inf)
    over_kept = jax.nn.logsumexp(kept, axis=-1)
    normaliser = jnp.where(truncated, over_kept, normaliser)
    entropy_of_kept = _entropy(kept - over_kept[..., None], gradient)
    return normaliser, jnp.where(truncated, entropy_of_kept, entropy)


def _entropy(logs: jax.Array, gradient: bool, guarded: bool = True) -> jax.Array:
    """Returns the entropy of the distributions with log-probs[..., V], with a gradient only if
    `gradient` is set. A log-prob of -inf counts as 0 if `guarded`, else it gives NaN."""
    if not gradient:
        logs = jax.lax.stop_gradient(logs)
    if not guarded:
        return -(jnp.exp(logs) * logs).sum(-1)
    finite = logs > -jnp.inf
    return -jnp.where(finite, jnp.exp(logs) * jnp.where(finite, logs, 0.0), 0.0).sum(-1)


def chunk_size(rows: int, size: int, vocabulary: int, budget: int) -> int:
    """Returns how many tokens of each of `rows` rows to compute at once, of `size` tokens each, so
    that their logits stay within `budget` elements. A budget of fewer than 8 tokens counts as one
    of 8. The fewest chunks within the budget are made equal, because the last could otherwise be
    mostly padding."""
    count = -(-size // max(8, budget // (rows * vocabulary)))
    return -(-size // count)
