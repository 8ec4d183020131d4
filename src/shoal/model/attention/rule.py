"""Which tokens read which: those at or before them of their own segment and of their prompt's. As a
mask, and as lists of the blocks that are needed."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """Tokens of rows, or of a part of each, as `reads` sees them: int32[R, T] each."""

    segment: jax.Array
    prompt: jax.Array
    position: jax.Array  # in the row

    @classmethod
    def of(cls, segment: jax.Array, prompt: jax.Array) -> Tokens:
        """The tokens of whole rows."""
        return cls(
            segment,
            prompt,
            jnp.broadcast_to(jnp.arange(segment.shape[1], dtype=jnp.int32), segment.shape),
        )

    def to_meet(self, axis: int) -> tuple[jax.Array, ...]:
        """Each array with one more dimension, along which it meets others."""
        return tuple(jnp.expand_dims(x, axis) for x in self)


def reads(query: tuple[jax.Array, ...], key: tuple[jax.Array, ...]) -> jax.Array:
    """Which queries of a row read which keys, from (segment, prompt, position) of both, ready to
    meet: the tokens at or before them of their own segment and of their prompt's. Padding, segment
    0, reads nothing."""
    own, prompt, position = query
    segment, _, key_position = key
    return ((segment == own) | (segment == prompt)) & (own > 0) & (key_position <= position)


class BlockTokens(NamedTuple):
    """Tokens as N blocks of b."""

    segment: jax.Array  # int32[N, b]
    prompt: jax.Array  # int32[N, b]
    first: jax.Array  # int32[N]: position in the row of a block's first token; the others follow it

    @classmethod
    def of(cls, tokens: Tokens, block: int) -> BlockTokens:
        """Tokens [R, T] by blocks, filled up to whole ones."""
        return cls(
            segment=_filled(tokens.segment, block).reshape(-1, block),
            prompt=_filled(tokens.prompt, block).reshape(-1, block),
            first=tokens.position[:, ::block].reshape(-1),
        )

    @property
    def tokens(self) -> Tokens:
        position = self.first[:, None] + jnp.arange(self.segment.shape[1])
        return Tokens(self.segment, self.prompt, position)


class Blocks(NamedTuple):
    """Blocks of queries, and the blocks of keys that each reads; or of keys, and the blocks of
    queries that read each."""

    own: BlockTokens  # N of them
    other: BlockTokens
    # int32[N, others of a row]: numbers of other blocks, the first `counts` of them to be read
    lists: jax.Array
    counts: jax.Array  # int32[N]
    # int32[N]: how many of them are read whole, and come first; None: not asked for
    whole: jax.Array | None = None


def blocks_of(
    query: Tokens, key: Tokens, block: int, of_keys: bool = False, whole_first: bool = False
) -> Blocks:
    """The blocks of rows' queries or of their keys. Queries may be a part of each row.
    `whole_first` is for queries."""
    is_needed = needed_blocks(query, key, block)
    if of_keys:
        is_needed = is_needed.mT
    rows, _, others = is_needed.shape
    # Those that are needed first, in order.
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
    """bool[R, n, m]: whether any query of a block may read any key of another one, by positions and
    by segments, whose numbers rise along a row: those of a block are all from the first to the
    last."""

    def span(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first and the last of each block; 0, padding, is nobody's."""
        numbers = _filled(numbers, block).reshape(len(numbers), -1, block)
        first = jnp.where(numbers > 0, numbers, jnp.iinfo(jnp.int32).max).min(-1)
        return first, numbers.max(-1)

    first, last = span(query.segment)
    key_first, key_last = span(key.segment)
    prompt = query.prompt[:, ::block]
    position = query.position[:, ::block]
    key_position = key.position[:, ::block]

    def meets(first: jax.Array, last: jax.Array) -> jax.Array:
        return (key_first[:, None] <= last[..., None]) & (key_last[:, None] >= first[..., None])

    # Of the prompts of a block's tokens, the first token's alone may stand before the block.
    has_keys = meets(first, last) | (meets(prompt, prompt) & (prompt > 0)[..., None])
    return has_keys & (key_position[:, None] < position[..., None] + block)


def whole_blocks(query: Tokens, key: Tokens, block: int) -> jax.Array:
    """bool[R, n, m]: whether every query of a block reads every key of another one, which is of one
    segment."""

    def only(numbers: jax.Array) -> jax.Array:
        """The number that all tokens of a block have; 0, padding's, where they differ."""
        numbers = _filled(numbers, block).reshape(len(numbers), -1, block)
        return jnp.where(numbers.min(-1) == numbers.max(-1), numbers[..., 0], 0)

    prompt_of_query = jnp.where(query.segment > 0, query.prompt, 0)
    own = only(query.segment)[..., None]
    prompt = only(prompt_of_query)[..., None]
    read = only(key.segment)[:, None]
    is_read = (read > 0) & ((own == read) | (prompt == read))
    return is_read & (key.position[:, None, ::block] + block <= query.position[:, ::block, None])


def _filled(x: jax.Array, block: int) -> jax.Array:
    """[R, T, ...], filled up to whole blocks."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % block)
    return jnp.pad(x, padding)
