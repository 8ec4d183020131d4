"""The one online softmax that all forms of attention share, and products in float32.

Keys come in blocks. For each query three things are carried from block to block (`RunningSoftmax`):
the largest score, the sum of weights and the weighted sum of values; the last two are scaled down
whenever a larger score comes (Milakov and Gimelshein 2018, arXiv 1805.02867). A form of attention
decides what a block is, which keys are masked, and the base of the powers: e on CPU, 2 in kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
"""log2(e). GPUs compute powers of two: in kernels scores, and their log-sum-exp, are exponents in
base 2."""


LOWEST = -1e30
"""Score of a masked key, instead of minus infinity: for a query without any key, -inf minus -inf
would be NaN."""


NO_KEY = LOWEST / 2
"""Start value of the largest score, if a query may have no key at all. It is so far above LOWEST
that masked keys have weight 0."""


Power = Callable[[jax.Array], jax.Array]
"""The base raised to an array of exponents: `jnp.exp`, `jnp.exp2`, or a device's own function."""


class Scoring(NamedTuple):
    """How a layer scores keys. It is static: numbers known when a program is compiled."""

    cap: float = 0.0  # soft cap c: scores become c * tanh(score / c); 0: none
    window: int = 0  # a query reads at most so many keys, its own included; 0: all


PLAIN = Scoring()
"""Scores without cap or window."""


def kernel_fault_of(scoring: Scoring, sinks: bool) -> str:
    """Returns why the kernels for GPUs and TPUs, of rows and of decoding, cannot compute a layer's
    attention; "" if they can. `sinks` is whether the layer has sinks."""
    wanted = {
        "windows": scoring.window > 0,
        "soft caps": scoring.cap > 0,
        "sinks": sinks,
    }
    missing = [f"no {name}" for name, is_wanted in wanted.items() if is_wanted]
    return f"the kernels have {' and '.join(missing)}" if missing else ""


class RunningSoftmax(NamedTuple):
    """The state of the softmax of some queries over the keys that were added so far.

    `top` and `total` have one number for each query, with one more dimension of size 1 in place of
    the keys' if a kernel keeps it; `out` has the queries' dimensions and A.
    """

    top: jax.Array  # the largest score
    total: jax.Array  # the sum of weights, base ** (score - top)
    out: jax.Array  # the sum of weights times values


def start(sum_shape: tuple[int, ...], out_shape: tuple[int, ...], top: float) -> RunningSoftmax:
    """Returns the state of queries before their first key: `sum_shape` is the shape of `top` and
    `total`, `out_shape` that of `out`. `top` is the first largest score: NO_KEY, or LOWEST if each
    query has a key."""
    return RunningSoftmax(
        top=jnp.full(sum_shape, top, jnp.float32),
        total=jnp.zeros(sum_shape, jnp.float32),
        out=jnp.zeros(out_shape, jnp.float32),
    )


def add_block(
    running: RunningSoftmax,
    scores: jax.Array,
    weigh_values: Callable[[jax.Array], jax.Array],
    power: Power,
) -> RunningSoftmax:
    """Adds a block of keys with scores[queries, keys], in which masked keys have LOWEST. Returns
    the new state.

    `weigh_values(weights)` returns the product of float32 weights[queries, keys] with the block's
    values. A wholly masked block changes no bit of a query that has a key.
    """
    top = raise_top(running.top, scores)
    weights = power(scores - _against(scores, top))
    return accumulate(running, top, weights, weigh_values(weights), power)


def raise_top(top: jax.Array, scores: jax.Array, keys_axis: int = -1) -> jax.Array:
    """Returns the largest score of each query, a block's scores included: the first half of
    `add_block`."""
    # A kernel's sums keep the keys' dimension, with size 1.
    keeps_dimension = top.ndim == scores.ndim
    return jnp.maximum(top, scores.max(keys_axis, keepdims=keeps_dimension))


def accumulate(
    running: RunningSoftmax,
    top: jax.Array,
    weights: jax.Array,
    weighted_values: jax.Array,
    power: Power,
    keys_axis: int = -1,
) -> RunningSoftmax:
    """Adds a block's weights, and `weighted_values`, the product of weights and values; both are
    relative to the new `top`: the second half of `add_block`. Returns the new state. `keys_axis` is
    the dimension of `weights` that counts keys."""
    keeps_dimension = top.ndim == weights.ndim
    shrink = power(running.top - top)
    total = running.total * shrink + weights.sum(keys_axis, keepdims=keeps_dimension)
    out = running.out * _against(running.out, shrink) + weighted_values
    return RunningSoftmax(top, total, out)


def add_sinks(running: RunningSoftmax, sinks: jax.Array, power: Power) -> RunningSoftmax:
    """Adds sinks, scores without a key or a value: they enter the sum of weights alone. `sinks`
    broadcast against `top`. Returns the new state. To be called once for each query; a query
    without any key gives 0 with sinks, too (gpt-oss, OpenAI 2025, arXiv 2508.10925)."""
    top = jnp.maximum(running.top, sinks)
    weights = power(sinks - top)[..., None]  # a block of one key
    no_values = jnp.zeros((), jnp.float32)
    return accumulate(running, top, weights, no_values, power)


def attention_of(running: RunningSoftmax) -> jax.Array:
    """Returns the weighted mean of values after the last block. Each query must have had a key, or
    its result means nothing."""
    return running.out / _against(running.out, running.total)


def finish(
    running: RunningSoftmax, log: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns (weighted mean of values, log-sum-exp) after the last block; `log` must have the base
    of the powers. A query without any key gets 0, and the first `top` as its log-sum-exp, which
    leads to no NaN."""
    total = jnp.where(running.total == 0.0, 1.0, running.total)
    return running.out / _against(running.out, total), running.top + log(total)


def _against(array: jax.Array, by_query: jax.Array) -> jax.Array:
    """Returns one number for each query, in a shape that broadcasts against `array`, which has one
    more dimension."""
    return by_query if by_query.ndim == array.ndim else by_query[..., None]


def masked(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the scores, with LOWEST where the mask is False."""
    return jnp.where(mask, scores, LOWEST)


def capped(scores: jax.Array, cap: float) -> jax.Array:
    """Returns cap * tanh(scores / cap); the scores themselves if `cap` is 0 (Gemma 2, arXiv
    2408.00118, section 2)."""
    return cap * jnp.tanh(scores / cap) if cap else scores


def before_cap(d_capped: jax.Array, capped_scores: jax.Array, cap: float) -> jax.Array:
    """Returns the gradient of scores before `capped`, from that of its result `capped_scores`."""
    return d_capped * (1.0 - jnp.square(capped_scores / cap)) if cap else d_capped


def by_key_head(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Scales queries by 1/sqrt(A) and groups their heads by key head: [..., H, A] -> [..., K, H //
    K, A]. H // K consecutive query heads belong to one key head."""
    head_dim = q.shape[-1]
    q = q * jnp.asarray(head_dim**-0.5, q.dtype)
    return q.reshape((*q.shape[:-2], num_kv_heads, -1, head_dim))


def einsum32(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes `jnp.einsum` with a float32 result, whatever the type of the arrays. Both are read
    in their own type."""
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


def product32(a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes the product of two matrices in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def largest_block(size: int, most: int) -> int:
    """Returns the largest divisor of `size` up to `most`; ValueError if `most` is below 1.

    >>> largest_block(384, 256), largest_block(1792, 256)
    (192, 256)
    """
    for block in range(min(size, most), 0, -1):
        if size % block == 0:
            return block
    raise ValueError(f"no block of at most {most} of {size}")
