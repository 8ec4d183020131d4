"""Which tokens read which: those at or before them of their own segment and of their prompt's. As a
mask, and as lists of the blocks that are needed."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """What the tokens of rows, or of a part of each, say about who reads whom: int32[R, T] each."""

    segment: jax.Array
    prompt: jax.Array
    position: jax.Array  # in the row

    @classmethod
    def of(cls, segment: jax.Array, prompt: jax.Array) -> Tokens:
        """Of whole rows."""
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
    (own, prompt, position), (segment, _, key_position) = query, key
    return ((segment == own) | (segment == prompt)) & (own > 0) & (key_position <= position)


class BlockTokens(NamedTuple):
    """Tokens as N blocks of b."""

    segment: jax.Array  # int32[N, b]
    prompt: jax.Array  # int32[N, b]
    first: jax.Array  # int32[N]: position in the row of a block's first token; the others follow it

    @classmethod
    def of(cls, tokens: Tokens, block: int) -> BlockTokens:
        """Of [R, T], filled up to whole blocks."""
        segment, prompt = (
            _filled(x, block).reshape(-1, block) for x in (tokens.segment, tokens.prompt)
        )
        return cls(segment, prompt, tokens.position[:, ::block].reshape(-1))

    @property
    def tokens(self) -> Tokens:
        return Tokens(
            self.segment, self.prompt, self.first[:, None] + jnp.arange(self.segment.shape[1])
        )


class Blocks(NamedTuple):
    """Blocks of queries, and the blocks of keys that each reads; or of keys, and the blocks of
    queries that read each."""

    own: BlockTokens  # N of them
    other: BlockTokens
    lists: (
        jax.Array
    )  # int32[N, others of a row]: numbers of other blocks, the first `counts` of them to be read
    counts: jax.Array  # int32[N]
    whole: jax.Array | None = (
        None  # int32[N]: how many of them are read whole, and come first; None: not asked for
    )


def blocks_of(
    query: Tokens, key: Tokens, block: int, of_keys: bool = False, whole_first: bool = False
) -> Blocks:
    """The blocks of rows' queries or of their keys. Queries may be a part of each row.
    `whole_first` is for queries."""
    is_needed = needed_blocks(query, key, block)
    is_needed = is_needed.mT if of_keys else is_needed
    rows, _, others = is_needed.shape
    whole = whole_blocks(query, key, block) if whole_first else None
    # Those that are needed first, in order.
    rank = ~is_needed if whole is None else jnp.where(whole, -1, ~is_needed)
    order = (
        jnp.argsort(rank, axis=-1, stable=True).astype(jnp.int32)
        + others * jnp.arange(rows)[:, None, None]
    )
    own, other = (
        BlockTokens.of(tokens, block) for tokens in ((key, query) if of_keys else (query, key))
    )
    return Blocks(
        own,
        other,
        order.reshape(-1, others),
        is_needed.sum(-1).reshape(-1),
        None if whole is None else whole.sum(-1).reshape(-1),
    )


def needed_blocks(query: Tokens, key: Tokens, block: int) -> jax.Array:
    """bool[R, n, m]: whether any query of a block may read any key of another one, by positions and
    by segments, whose numbers rise along a row: those of a block are all from the first to the
    last."""

    def span(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first and the last of each block; 0, padding, is nobody's."""
        numbers = _filled(numbers, block).reshape(len(numbers), -1, block)
        return jnp.where(numbers > 0, numbers, jnp.iinfo(jnp.int32).max).min(-1), numbers.max(-1)

    (first, last), (key_first, key_last) = span(query.segment), span(key.segment)
    prompt, position, key_position = (
        x[:, ::block] for x in (query.prompt, query.position, key.position)
    )

    def meets(first: jax.Array, last: jax.Array) -> jax.Array:
        return (key_first[:, None] <= last[..., None]) & (key_last[:, None] >= first[..., None])

    # Of the prompts of a block's tokens, the first token's alone may stand before the block.
    found = meets(first, last) | (meets(prompt, prompt) & (prompt > 0)[..., None])
    return found & (key_position[:, None] < position[..., None] + block)


def whole_blocks(query: Tokens, key: Tokens, block: int) -> jax.Array:
    """bool[R, n, m]: whether every query of a block reads every key of another one, which is of one
    segment."""

    def only(numbers: jax.Array) -> jax.Array:
        """The number that all tokens of a block have; 0, padding's, where they differ."""
        numbers = _filled(numbers, block).reshape(len(numbers), -1, block)
        return jnp.where(numbers.min(-1) == numbers.max(-1), numbers[..., 0], 0)

    own, prompt, read = (
        only(x) for x in (query.segment, jnp.where(query.segment > 0, query.prompt, 0), key.segment)
    )
    found = (read[:, None] > 0) & (
        (own[..., None] == read[:, None]) | (prompt[..., None] == read[:, None])
    )
    return found & (key.position[:, None, ::block] + block <= query.position[:, ::block, None])


def _filled(x: jax.Array, block: int) -> jax.Array:
    """[R, T, ...], filled up to whole blocks."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), *((0, 0),) * (x.ndim - 2)))
