"""Picks the next token: one uniform number from the token's address, through the inverse of the distribution."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 512
"""Tokens of the vocabulary whose masses are summed first; the inverse then looks into one block only."""


class SamplingArrays(NamedTuple):
    """How to choose, for each slot [..]: temperature (0 = greedy) and truncation, as in `SamplingParams`."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


def uniform(keys: jax.Array, position: jax.Array) -> jax.Array:
    """The uniform of each address: keys uint32[..., 2], position int32[...] after the prompt -> float32 in (0, 1).

    23 bits of threefry, centred in their cells: the same bits on every machine."""

    def one(key: jax.Array, place: jax.Array) -> jax.Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), place)
        return jax.random.bits(folded, dtype=jnp.uint32)

    bits = jax.vmap(one)(keys.reshape(-1, 2), position.reshape(-1)).reshape(position.shape)
    return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def sample_tokens(logits: jax.Array, how: SamplingArrays, uniforms: jax.Array, truncated: bool,
           max_support: int = 0) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """logits float32[N, V], everything else [N] -> (token int32[N], its log-prob float32[N], kept int32[N, K]).

    The log-prob is under the distribution that was sampled from: temperature and truncation included. Greedy: the
    likeliest token, its log-prob at temperature 1, untruncated. `truncated` is static: without it nothing is sorted.
    `max_support` is K: truncation then keeps at most so many, and tells which (-1 fills up; all -1: every token was
    kept); 0: it tells nothing.
    """
    greedy = how.temperature == 0.0
    scaled = logits / jnp.where(greedy, 1.0, how.temperature)[:, None]
    masses = jnp.exp(scaled - scaled.max(-1, keepdims=True))
    names = None
    if truncated:
        masses = jnp.where(greedy[:, None] | support_ids(masses, how), masses, 0.0)
    if max_support:
        cuts = ~greedy & ((how.top_k > 0) | (how.top_p < 1.0) | (how.min_p > 0.0))
        largest, names = jax.lax.top_k(masses, min(max_support, masses.shape[-1]))
        names = jnp.where(cuts[:, None] & (largest > 0), names, -1).astype(jnp.int32)
        places = jnp.arange(len(masses))[:, None], jnp.where(names < 0, masses.shape[-1], names)
        only = jnp.zeros_like(masses).at[places].set(largest, mode="drop")
        masses = jnp.where(cuts[:, None], only, masses)
    total = masses.sum(-1)
    token = jnp.where(greedy, jnp.argmax(logits, -1), inverse(masses, uniforms)).astype(jnp.int32)
    top = scaled.max(-1)
    drawn = jnp.take_along_axis(scaled, token[:, None], -1)[:, 0]
    return token, drawn - top - jnp.log(total), names


def inverse(masses: jax.Array, uniforms: jax.Array) -> jax.Array:
    """The token at which the running sum of masses[N, V] (not normalised) passes uniforms[N] x their total.

    Never a token without mass: where rounding leaves the target beyond the last sum, the last token with mass."""
    n, size = masses.shape
    blocks = -(-size // BLOCK)
    masses = jnp.pad(masses, ((0, 0), (0, blocks * BLOCK - size))).reshape(n, blocks, BLOCK)
    totals = masses.sum(-1)
    sums = jnp.cumsum(totals, -1)
    target = uniforms * sums[:, -1]
    block = _first_above(totals, sums, target)
    inside = jnp.take_along_axis(masses, block[:, None, None], 1)[:, 0]
    before = jnp.where(block > 0, jnp.take_along_axis(sums, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0)
    return block * BLOCK + _first_above(inside, jnp.cumsum(inside, -1), target - before)


def _first_above(masses: jax.Array, sums: jax.Array, target: jax.Array) -> jax.Array:
    """Index of the first entry with mass whose running sum is above the target, else of the last one with mass.

    Masses are looked at too: a parallel sum is rounded differently from place to place and may step up where nothing
    is added, or down."""
    index = jnp.arange(masses.shape[-1])
    last = jnp.max(jnp.where(masses > 0, index, 0), -1, keepdims=True)
    return jnp.min(jnp.where((masses > 0) & (sums > target[:, None]), index, last), -1)


def support_ids(masses: jax.Array, how: SamplingArrays) -> jax.Array:
    """Which tokens stay, bool[N, V]: first the top_k likeliest, of those the smallest set with top_p of their mass,
    of those the ones at least min_p times as likely as the likeliest. Equals at the edge stay together."""
    size = masses.shape[-1]
    ordered = -jnp.sort(-masses, axis=-1)
    count = jnp.where(how.top_k > 0, jnp.minimum(how.top_k, size), size)
    smallest = jnp.take_along_axis(ordered, count[:, None] - 1, -1)
    ordered = jnp.where(ordered >= smallest, ordered, 0.0)
    before = jnp.cumsum(ordered, -1) - ordered  # mass of the likelier ones
    share = how.top_p[:, None]  # at 1 nothing is cut, not even what a rounded sum no longer sees
    inside = (before < share * ordered.sum(-1, keepdims=True)) | (share >= 1.0)
    nucleus = jnp.min(jnp.where(inside & (ordered > 0), ordered, jnp.inf), -1, keepdims=True)
    return (masses >= smallest) & (masses >= nucleus) & (masses >= how.min_p[:, None] * ordered[:, :1])
