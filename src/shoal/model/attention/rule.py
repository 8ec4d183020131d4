"""The rule which tokens read which, as a mask and as lists of the blocks that are needed: a token
reads those at or before it in its own segment and in its prompt's segment."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """Tokens of rows, or of the same part of each row, as `reads` compares them: int32[R, T]
    each."""

    segment: jax.Array
    prompt: jax.Array
    position: jax.Array  # position in the row, not in the sequence

    @classmethod
    def of(cls, segment: jax.Array, prompt: jax.Array) -> Tokens:
        """Returns the tokens of whole rows."""
        return cls(
            segment,
            prompt,
            jnp.broadcast_to(jnp.arange(segment.shape[1], dtype=jnp.int32), segment.shape),
        )

    def to_meet(self, axis: int) -> tuple[jax.Array, ...]:
        """Returns the three arrays, each with one more dimension at `axis`, along which it is
        broadcast against others."""
        return tuple(jnp.expand_dims(x, axis) for x in self)


def reads(query: tuple[jax.Array, ...], key: tuple[jax.Array, ...]) -> jax.Array:
    """Returns a mask which queries read which keys, each given as (segment, prompt, position) in
    shapes that broadcast. A query reads the keys at or before it in its own segment and in its
    prompt's. Padding, segment 0, reads nothing."""
    own, prompt, position = query
    segment, _, key_position = key
    return ((segment == own) | (segment == prompt)) & (own > 0) & (key_position <= position)


class BlockTokens(NamedTuple):
    """Tokens as N blocks of b tokens."""

    segment: jax.Array  # int32[N, b]
    prompt: jax.Array  # int32[N, b]
    first: jax.Array  # int32[N]: position in the row of a block's first token; the others follow it

    @classmethod
    def of(cls, tokens: Tokens, block: int) -> BlockTokens:
        """Divides tokens [R, T] into blocks; each row is filled up with padding to whole blocks."""
        return cls(
            segment=_filled(tokens.segment, block).reshape(-1, block),
            prompt=_filled(tokens.prompt, block).reshape(-1, block),
            first=tokens.position[:, ::block].reshape(-1),
        )

    @property
    def tokens(self) -> Tokens:
        """The same tokens with the position of each, as arrays [N, b]."""
        position = self.first[:, None] + jnp.arange(self.segment.shape[1])
        return Tokens(self.segment, self.prompt, position)


class Blocks(NamedTuple):
    """Blocks of queries with the blocks of keys that each reads; or blocks of keys with the blocks
    of queries that read each. `own` are the former, `other` the latter."""

    own: BlockTokens  # the N blocks that have a list each
    other: BlockTokens  # the blocks that the lists refer to, by number over all rows
    # int32[N, number of other blocks in a row]: numbers of other blocks; only the first `counts` of
    # each list are needed
    lists: jax.Array
    counts: jax.Array  # int32[N]: length of each list
    # int32[N]: number of other blocks that are read whole, without a mask; they come first in a
    # list. None if not asked for
    whole: jax.Array | None = None


def blocks_of(
    query: Tokens, key: Tokens, block: int, of_keys: bool = False, whole_first: bool = False
) -> Blocks:
    """Lists for each block of queries the blocks of keys that it reads; with `of_keys`, for each
    block of keys the blocks of queries that read it. Queries may be a part of each row.
    `whole_first` puts the blocks that are read whole first; it is for lists of queries only."""
    is_needed = needed_blocks(query, key, block)
    if of_keys:
        is_needed = is_needed.mT
    rows, _, others = is_needed.shape
    # Sorting by this rank puts the needed blocks first, in order.
    rank = ~is_needed
    count_whole = None
    if whole_first:
        is_whole = whole_blocks(query, key, block)
        rank = jnp.where(is_whole, -1, rank)
        count_whole = is_whole.sum(-1).reshape(-1)
    order_in_row = jnp.argsort(rank, axis=-1, stable=True).astype(jnp.int32)
    order = order_in_row + others * jnp.arange(rows)[:, None, None]
    own, other = (key, query) if of_keys else (query, key)
    return Blocks(
        own=BlockTokens.of(own, block),
        other=BlockTokens.of(other, block),
        lists=order.reshape(-1, others),
        counts=is_needed.sum(-1).reshape(-1),
        whole=count_whole,
    )


def needed_blocks(query: Tokens, key: Tokens, block: int) -> jax.Array:
    """Returns bool[R, n, m]: True if any query of block n may read any key of block m. Decided by
    positions and by segments, whose numbers rise along a row: a block has all segments from its
    first to its last."""

    def span(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the lowest and the highest segment number in each block; 0, padding, does not
        count for the lowest."""
        numbers = _filled(numbers, block).reshape(len(numbers), -1, block)
        first = jnp.where(numbers > 0, numbers, jnp.iinfo(jnp.int32).max).min(-1)
        return first, numbers.max(-1)

    first, last = span(query.segment)
    key_first, key_last = span(key.segment)
    prompt = query.prompt[:, ::block]
    position = query.position[:, ::block]
    key_position = key.position[:, ::block]

    def meets(first: jax.Array, last: jax.Array) -> jax.Array:
        """Returns which spans of segments overlap the spans of which blocks of keys."""
        return (key_first[:, None] <= last[..., None]) & (key_last[:, None] >= first[..., None])

    # Among the prompts of a block's tokens, only the first token's can begin before the block.
    has_keys = meets(first, last) | (meets(prompt, prompt) & (prompt > 0)[..., None])
    return has_keys & (key_position[:, None] < position[..., None] + block)


def whole_blocks(query: Tokens, key: Tokens, block: int) -> jax.Array:
    """Returns bool[R, n, m]: True if every query of block n reads every key of block m, and so
    needs no mask. The keys are then all of one segment."""

    def only(numbers: jax.Array) -> jax.Array:
        """Returns the number that all tokens of a block have; 0, as for padding, if they differ."""
        numbers = _filled(numbers, block).reshape(len(numbers), -1, block)
        return jnp.where(numbers.min(-1) == numbers.max(-1), numbers[..., 0], 0)

    prompt_of_query = jnp.where(query.segment > 0, query.prompt, 0)
    own = only(query.segment)[..., None]
    prompt = only(prompt_of_query)[..., None]
    read = only(key.segment)[:, None]
    is_read = (read > 0) & ((own == read) | (prompt == read))
    return is_read & (key.position[:, None, ::block] + block <= query.position[:, ::block, None])


def _filled(x: jax.Array, block: int) -> jax.Array:
    """Fills [R, T, ...] up with zeros, so that T is a multiple of `block`."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % block)
    return jnp.pad(x, padding)
