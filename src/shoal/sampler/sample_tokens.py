"""Samples the next token: maps one uniform number, which is a function of the token's address,
through the inverse of the cumulative distribution.

The inverse by blocks takes 1.2 ms for 16 rows of 152k tokens on two CPU cores; Gumbel noise for
each token takes 43 ms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shoal.mesh import Role
from shoal.records import SamplingParams

BLOCK = 512
"""Tokens of the vocabulary in one block: blocks are summed first, and then only one block is
searched."""
TPU_BLOCK = 128
"""BLOCK on TPUs: one row of their registers, so that logits whose number is a multiple of it are
neither padded nor moved."""


class SamplingArrays(NamedTuple):
    """The settings of `SamplingParams` that compiled programs read, as arrays: one value for each
    slot. A field has the name of its setting."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any

    def set(self, position: int | slice, params: SamplingParams) -> None:
        """Writes a request's settings into the arrays, which are NumPy's, at this position, a row's
        index or a slice of rows."""
        for name, column in zip(self._fields, self, strict=True):
            column[position] = getattr(params, name)


SAMPLING_TYPES = SamplingArrays(
    temperature=np.float32, top_k=np.int32, top_p=np.float32, min_p=np.float32
)
"""The data type of each array of `SamplingArrays`."""


def uniform(keys: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the uniform random number of each token: keys uint32[..., 2] of the completions'
    noise (`NoiseKey`), position int32[...] of the tokens after the prompt, from 0, -> float32[...]
    in (0, 1).

    Uses 23 bits of threefry, each number in the middle of its interval: never 0 or 1, and the same
    bits on every machine."""

    def bits_of(key: jax.Array, position: jax.Array) -> jax.Array:
        # Name the generator: jax_default_prng_impl may select another, with other numbers.
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.bits(folded, dtype=jnp.uint32)

    bits = jax.vmap(bits_of)(keys.reshape(-1, 2), position.reshape(-1)).reshape(position.shape)
    return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def sample_tokens(
    logits: jax.Array,
    params: SamplingArrays,
    uniforms: jax.Array,
    truncated: bool,
    max_support: int = 0,
    role: Role | None = None,
    width: int = BLOCK,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Samples one token per row: logits float32[N, V], everything else [N] -> (token int32[N],
    log-prob float32[N], support ids int32[N, K] or None).

    The log-prob is under the distribution that was sampled from, including temperature and
    truncation; that of a greedy token (temperature 0: the most likely, whatever `uniforms`) is at
    temperature 1, untruncated. `truncated` is static: without it no bounds are searched, so top_k,
    top_p and min_p must be off. `max_support` is K: truncation then keeps at most K tokens, and the
    support ids say which (-1 fills up; all -1 means that every token was kept); 0: the number is
    not limited, and the support ids are None. `uniforms`: random numbers in (0, 1); the same one
    gives the same token. `role`: splits V over its devices, None: V is whole. `width`: how many
    tokens of the vocabulary are searched at once."""
    greedy = params.temperature == 0.0
    # Greedy divides by 1: its log-probs are at temperature 1, and by 0 they would be NaN.
    scaled = logits / jnp.where(greedy, 1.0, params.temperature)[:, None]
    top = scaled.max(-1, keepdims=True)
    masses = jnp.exp(scaled - top)
    support_ids = None
    if truncated:
        masses = jnp.where(greedy[:, None] | sampling_support(masses, params), masses, 0.0)
    if max_support:
        truncates = ~greedy & ((params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0.0))
        largest, tokens = _most_likely(masses, min(max_support, masses.shape[-1]), role)
        # a token without mass is not kept, though it may be among the K largest
        support_ids = jnp.where(truncates[:, None] & (largest > 0), tokens, -1).astype(jnp.int32)
        # Among equal masses the first tokens are listed. This is a comparison, not a scatter, so
        # that the vocabulary stays split.
        least, last = largest[:, -1:], tokens[:, -1:]  # of the last token that is kept
        kept = (masses > least) | ((masses == least) & (jnp.arange(masses.shape[-1]) <= last))
        masses = jnp.where(kept | ~truncates[:, None], masses, 0.0)
    total = masses.sum(-1)
    # A greedy token is chosen by the logits, because two that differ may have equal masses. Not
    # with argmax: XLA for CPU takes three times as long.
    # The first of the largest: all others count as the last token of the vocabulary.
    most_likely = jnp.min(
        jnp.where(scaled == top, jnp.arange(scaled.shape[-1]), scaled.shape[-1] - 1), -1
    )
    token = jnp.where(greedy, most_likely, inverse(masses, uniforms, role, width)).astype(jnp.int32)
    score = jnp.take_along_axis(scaled, token[:, None], -1)[:, 0]
    return token, score - top[:, 0] - jnp.log(total), support_ids


def sampling_logprobs(logits: jax.Array, params: SamplingArrays) -> jax.Array:
    """Returns the log-probs float32[N, V] of all tokens, under the distribution from which
    `sample_tokens` samples: after temperature and truncation; greedy: at temperature 1,
    untruncated.

    Tokens that truncation leaves out get the log-prob that they would have next to those that are
    kept, not -inf, because an engine whose bounds differ in the last bit may keep one more. The
    bound K of `sample_tokens` (`max_support`) is not applied."""
    greedy = params.temperature == 0.0
    scaled = logits / jnp.where(greedy, 1.0, params.temperature)[:, None]
    masses = jnp.exp(scaled - scaled.max(-1, keepdims=True))
    kept = greedy[:, None] | sampling_support(masses, params)
    normaliser = jax.nn.logsumexp(jnp.where(kept, scaled, -jnp.inf), axis=-1, keepdims=True)
    return scaled - normaliser


def _most_likely(masses: jax.Array, count: int, role: Role | None) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` largest of masses[N, V] in each row, in descending order, and their
    tokens, both [N, count]. Of equal masses the first comes first. If `role` splits V over devices,
    each device finds its own largest, and only these are exchanged."""
    if role is None or role.tensor == 1:
        return jax.lax.top_k(masses, count)
    shard_size = masses.shape[-1] // role.tensor
    num_candidates = min(count, shard_size)  # of each device
    # Without shard_map the partitioner would gather the masses.
    split = PartitionSpec(None, "tensor")
    largest, tokens = jax.shard_map(
        partial(jax.lax.top_k, k=num_candidates),
        mesh=role.mesh,
        in_specs=split,
        out_specs=split,
        axis_names={"tensor"},
        check_vma=False,
    )(masses)
    # from indices within each device's shard to those of the whole vocabulary
    tokens += jnp.repeat(shard_size * jnp.arange(role.tensor), num_candidates)
    largest, index = jax.lax.top_k(role.constrain(largest, None, None), count)
    return largest, jnp.take_along_axis(role.constrain(tokens, None, None), index, -1)


def inverse(
    masses: jax.Array, uniforms: jax.Array, role: Role | None = None, width: int = BLOCK
) -> jax.Array:
    """Samples one token per row by inverting the cumulative distribution: returns the first token,
    int[N], at which the running sum of masses[N, V] (not normalised) exceeds uniforms[N] x their
    total.

    A token without mass is never returned: if rounding puts the target beyond the last sum, the
    result is the last token that has mass. V is searched in blocks of `width`. If `role` splits V,
    no block crosses devices: only the sums of blocks and the one block that is searched move
    between them. V is then a multiple of the number of devices."""
    n, size = masses.shape
    parts = 1 if role is None else role.tensor
    blocks = -(-size // (parts * width))  # in one part
    # [N, V] -> [N, parts, V / parts], each part padded to whole blocks -> [N, all blocks, width]
    masses = masses.reshape(n, parts, -1)
    masses = jnp.pad(masses, ((0, 0), (0, 0), (0, blocks * width - size // parts))).reshape(
        n, parts * blocks, width
    )
    totals = masses.sum(-1)  # [N, all blocks]
    if role is not None:
        totals = role.constrain(totals, None, None)
    sums = jnp.cumsum(totals, -1)
    target = uniforms * sums[:, -1]
    block = _first_above(totals, sums, target)
    inside = jnp.take_along_axis(masses, block[:, None, None], 1)[:, 0]
    before = jnp.where(
        block > 0, jnp.take_along_axis(sums, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0
    )
    # the block's first token: where its part begins, and how far into the part the block begins
    first = block // blocks * (size // parts) + block % blocks * width
    return first + _first_above(inside, jnp.cumsum(inside, -1), target - before)


def _first_above(masses: jax.Array, sums: jax.Array, target: jax.Array) -> jax.Array:
    """Returns, for each row, the index of the first entry with mass whose running sum is above the
    target; if there is none, of the last entry with mass. `masses` and their running `sums` are
    [N, M], `target` [N]."""
    # Compare masses too: a parallel cumsum rounds each entry in its own way, and may rise where
    # nothing is added.
    index = jnp.arange(masses.shape[-1])
    last = jnp.max(jnp.where(masses > 0, index, 0), -1, keepdims=True)
    return jnp.min(jnp.where((masses > 0) & (sums > target[:, None]), index, last), -1)


def sampling_support(masses: jax.Array, params: SamplingArrays) -> jax.Array:
    """Returns bool[N, V]: which tokens truncation keeps, by their masses[N, V] (probabilities up to
    a factor, at most 1 each).

    First the top_k most likely; of those the smallest set with top_p of their mass; of those the
    tokens at least min_p times as likely as the most likely one. All tokens that tie at a bound are
    kept."""
    # idle slots have all parameters 0, and would otherwise have a nucleus searched
    drawn = params.temperature > 0
    by_count, by_mass = drawn & (params.top_k > 0), drawn & (params.top_p < 1.0)

    def mass_from(bound: jax.Array) -> jax.Array:
        return jnp.where(masses >= bound[:, None], masses, 0.0).sum(-1)

    def has_top_k(bound: jax.Array) -> jax.Array:
        """bool[N]: True if at least top_k tokens have this mass or more."""
        return (masses >= bound[:, None]).sum(-1) >= params.top_k

    # The order of transformers' samplers: top-k, then top-p (arXiv 1904.09751), then min-p (arXiv
    # 2407.01082).
    least_of_top_k = _largest(has_top_k, by_count)  # float32[N], the least mass that is kept
    total = mass_from(least_of_top_k)

    def has_top_p(bound: jax.Array) -> jax.Array:
        """bool[N]: True if those of the top_k with this mass or more have top_p of their mass."""
        return mass_from(jnp.maximum(bound, least_of_top_k)) >= params.top_p * total

    least_of_top_p = _largest(has_top_p, by_mass)
    least_of_both = jnp.maximum(least_of_top_k, least_of_top_p)
    return masses >= jnp.maximum(least_of_both, params.min_p * masses.max(-1))[:, None]


def _largest(holds: Callable[[jax.Array], jax.Array], wanted: jax.Array) -> jax.Array:
    """Returns, for each of N rows, the largest float32 below 2 for which `holds` (float32[N] ->
    bool[N]) is true, provided that it is true for all smaller numbers; 0 for rows that are not
    wanted[N].

    Searches bit by bit, because positive floats are ordered like their bits: 30 sums over a
    vocabulary instead of sorting it, and of a split one only sums move. 64 rows of 152k take 0.24
    seconds of a CPU core, sorted they took 2.3. Rounding is monotone in what a sum leaves out, so
    the search is exact."""

    def value(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def narrow(turn: jax.Array, bits: jax.Array) -> jax.Array:
        """Sets the next lower bit (29 at first) in each row for which `holds` then is true."""
        more = bits | (jnp.uint32(2**29) >> turn.astype(jnp.uint32))
        return jnp.where(holds(value(more)), more, bits)

    turns = jnp.where(wanted.any(), 30, 0)
    return jnp.where(
        wanted, value(jax.lax.fori_loop(0, turns, narrow, jnp.zeros(len(wanted), jnp.uint32))), 0.0
    )
