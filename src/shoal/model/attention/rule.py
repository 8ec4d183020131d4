"""The rule which keys a query reads: those at or before it in its own sequence, which is its prompt
and its completion up to itself; with a window the last of these.

`reads` is the rule for packed rows (training, scoring, prefill), `needed_blocks` and `full_blocks`
are the rule for blocks of these rows, and `cache_masks` is the rule for the caches of sampling. The
kernels of decoding have no masks: they take the lengths of prompts and of completions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

NO_PLACE = "a window compares tokens by their place in the sequence, and these have none"
"""Error of a window over `Tokens` whose `place` is None."""


class Tokens(NamedTuple):
    """Tokens of rows, or of the same part of each row, as `reads` compares them: int32[R, T]
    each. Only windows need `place`."""

    segment: jax.Array
    prompt: jax.Array
    position: jax.Array  # position in the row, not in the sequence
    # position in the sequence, from 0: a completion counts on after its prompt. None: not needed
    place: jax.Array | None = None

    @classmethod
    def of(cls, segment: jax.Array, prompt: jax.Array, place: jax.Array | None = None) -> Tokens:
        """Returns the tokens of whole rows."""
        position = jnp.broadcast_to(jnp.arange(segment.shape[1], dtype=jnp.int32), segment.shape)
        return cls(segment, prompt, position, place)

    def to_meet(self, axis: int) -> tuple[jax.Array, ...]:
        """Returns the arrays that are there, three or four, each with one more dimension at `axis`,
        along which it is broadcast against others."""
        return tuple(jnp.expand_dims(x, axis) for x in self if x is not None)


def reads(query: tuple[jax.Array, ...], key: tuple[jax.Array, ...], window: int = 0) -> jax.Array:
    """Returns a mask of bools which queries read which keys, each given as (segment, prompt,
    position), with a window also place, in shapes that broadcast. A query reads the keys at or
    before it in its own segment and in its prompt's; with a window, those of them that are less
    than so many places before it. Padding, segment 0, reads nothing."""
    own, prompt, position = query[:3]
    segment, _, key_position = key[:3]
    mask = ((segment == own) | (segment == prompt)) & (own > 0) & (key_position <= position)
    if window == 0:
        return mask
    if len(query) < 4 or len(key) < 4:
        raise ValueError(NO_PLACE)
    place = query[3]
    key_place = key[3]
    return mask & (place - key_place < window)


class BlockTokens(NamedTuple):
    """Tokens as N blocks of b tokens."""

    segment: jax.Array  # int32[N, b]
    prompt: jax.Array  # int32[N, b]
    first: jax.Array  # int32[N]: position in the row of a block's first token; the others follow it
    place: jax.Array | None = None  # int32[N, b]: position in the sequence; None: not needed

    @classmethod
    def of(cls, tokens: Tokens, block: int) -> BlockTokens:
        """Divides tokens [R, T] into blocks; each row is filled up with padding to whole blocks.
        Their segment is then 0."""
        place = tokens.place
        if place is not None:
            place = _filled(place, block).reshape(-1, block)
        return cls(
            segment=_filled(tokens.segment, block).reshape(-1, block),
            prompt=_filled(tokens.prompt, block).reshape(-1, block),
            first=tokens.position[:, ::block].reshape(-1),
            place=place,
        )

    def at(self, number: jax.Array) -> Tokens:
        """Returns the tokens of the block with this number, as arrays [b]. In a kernel, where the
        fields are references to memory, this loads them."""
        segment = self.segment[number]
        prompt = self.prompt[number]
        # Computed from the first one, so that a kernel need not hold positions next to the others.
        position = self.first[number] + jnp.arange(self.segment.shape[1])
        place = None if self.place is None else self.place[number]
        return Tokens(segment, prompt, position, place)

    @property
    def tokens(self) -> Tokens:
        """The tokens of all blocks, as arrays [N, b]."""
        position = self.first[:, None] + jnp.arange(self.segment.shape[1])
        return Tokens(self.segment, self.prompt, position, self.place)


class Blocks(NamedTuple):
    """Blocks of queries with the blocks of keys that each reads; or blocks of keys with the blocks
    of queries that read each. `own` are the former, `other` the latter."""

    own: BlockTokens  # the N blocks that have a list each
    other: BlockTokens  # the blocks that the lists refer to, by number over all rows
    # int32[N, number of other blocks in a row]: numbers of other blocks; only the first `counts` of
    # each list are needed
    lists: jax.Array
    counts: jax.Array  # int32[N]: length of each list
    # int32[N]: number of other blocks that are read in full, without a mask; they come first in a
    # list. None without `full_first`
    num_full: jax.Array | None = None


def blocks_of(
    query: Tokens,
    key: Tokens,
    block: int,
    of_keys: bool = False,
    full_first: bool = False,
    window: int = 0,
) -> Blocks:
    """Returns, for each block of queries, the list of the blocks of keys that it reads; with
    `of_keys`, for each block of keys the list of the blocks of queries that read it. `query` may be
    a part of each row; `key` are whole rows.

    With `full_first`, blocks of keys that are read in full come first in a list, and `num_full` of
    the result says how many they are; it cannot be combined with `of_keys`, which is not checked.
    `block` is the tokens of a block, of queries and of keys. `window` is that of `reads`.
    """
    is_needed = needed_blocks(query, key, block, window)
    if of_keys:
        is_needed = is_needed.mT
    rows, _, others = is_needed.shape
    # Sorting by this rank puts the needed blocks first, in order.
    rank = ~is_needed
    num_full = None
    if full_first:
        is_full = full_blocks(query, key, block, window)
        # -1 (full) comes before 0 (needed) and 1 (not needed)
        rank = jnp.where(is_full, -1, rank)
        num_full = is_full.sum(-1).reshape(-1)
    order_in_row = jnp.argsort(rank, axis=-1, stable=True).astype(jnp.int32)
    # Numbers of other blocks over all rows: each row has `others` of them.
    order = order_in_row + others * jnp.arange(rows)[:, None, None]
    own, other = (key, query) if of_keys else (query, key)
    return Blocks(
        own=BlockTokens.of(own, block),
        other=BlockTokens.of(other, block),
        lists=order.reshape(-1, others),
        counts=is_needed.sum(-1).reshape(-1),
        num_full=num_full,
    )


def needed_blocks(query: Tokens, key: Tokens, block: int, window: int = 0) -> jax.Array:
    """Returns bool[R, n, m]: False if no query of block n reads any key of block m, so that the
    pair need not be computed. n counts the blocks of queries of a row and m those of keys, from 0.
    Decided by positions and by segments, whose numbers rise along a row: a block has all segments
    from its first to its last. With a window (`reads`) also by the lowest place of the queries and
    the highest of the keys: blocks that lie wholly before it are left out. It may be True for a
    pair without a key to read."""

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

    def overlaps(first: jax.Array, last: jax.Array) -> jax.Array:
        """Returns bool[R, n, m]: True if the segments first[R, n] to last[R, n] overlap those of
        block m of keys."""
        return (key_first[:, None] <= last[..., None]) & (key_last[:, None] >= first[..., None])

    # Among the prompts of a block's tokens, only the first token's can begin before the block.
    has_own = overlaps(first, last)
    has_prompt = overlaps(prompt, prompt) & (prompt > 0)[..., None]
    if window > 0:
        lowest, _ = _place_span(query, block)
        _, key_highest = _place_span(key, block)
        # The highest place of a key is within the window of the query that looks back furthest.
        has_prompt &= lowest[..., None] - window < key_highest[:, None]
        # A key of a query's own segment is as many places before it as positions in the row; so
        # the first query of a block is compared with the last key.
        has_own &= position[..., None] - window < key_position[:, None] + block - 1
    # Some key of the block comes no later than the last query: the first key of the block does.
    return (has_own | has_prompt) & (key_position[:, None] < position[..., None] + block)


def full_blocks(query: Tokens, key: Tokens, block: int, window: int = 0) -> jax.Array:
    """Returns bool[R, n, m]: True if every query of block n reads every key of block m, and so
    needs no mask. It may be False for such a pair, which then gets a mask in vain. Found by
    segments: True only if all keys of the block are of one segment, which is the queries' own or
    their prompt; with a window, also by the block's lowest and highest place."""

    def common(numbers: jax.Array) -> jax.Array:
        """Returns the number that all tokens of a block have; 0, as for padding, if they differ."""
        numbers = _filled(numbers, block).reshape(len(numbers), -1, block)
        return jnp.where(numbers.min(-1) == numbers.max(-1), numbers[..., 0], 0)

    prompt_of_query = jnp.where(query.segment > 0, query.prompt, 0)
    # [R, n, 1] of queries against [R, 1, m] of keys.
    segment = common(query.segment)[..., None]
    prompt = common(prompt_of_query)[..., None]
    key_segment = common(key.segment)[:, None]
    is_read = (key_segment > 0) & ((key_segment == segment) | (key_segment == prompt))
    # The whole block of keys comes before the block of queries.
    is_full = is_read & (key.position[:, None, ::block] + block <= query.position[:, ::block, None])
    if window == 0:
        return is_full
    _, highest = _place_span(query, block)
    key_lowest, _ = _place_span(key, block)
    # The first key of the block is within the window of the last query.
    return is_full & (highest[..., None] - window < key_lowest[:, None])


def _place_span(tokens: Tokens, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns the lowest and the highest place in the sequence of each block's tokens, int32[R, n]
    each; padding does not count. For a block of padding alone they are the largest int32 and
    -1."""
    place = tokens.place
    if place is None:
        raise ValueError(NO_PLACE)
    is_token = _filled(tokens.segment > 0, block).reshape(len(place), -1, block)
    place = _filled(place, block).reshape(is_token.shape)
    lowest = jnp.where(is_token, place, jnp.iinfo(jnp.int32).max).min(-1)
    highest = jnp.where(is_token, place, -1).max(-1)
    return lowest, highest


class Spans(NamedTuple):
    """Blocks of queries, n in a row, with the two spans of keys that hold what each reads: one of
    its prompt, and one of its own sequence up to the block's end."""

    query: Tokens  # int32[R, T]
    key: Tokens  # int32[R, S]: of whole rows
    first: jax.Array  # int32[R, n, 2]: position in the row of a span's first key
    end: jax.Array  # int32[R, n, 2]: position after its last key; `first` if it is empty


def spans_of(query: Tokens, key: Tokens, block: int, tile: int, window: int = 0) -> Spans:
    """Returns the two spans of keys that each block of `block` queries reads; `block` divides their
    number. `query` may be a part of each row; `key` are whole rows, in which the tokens of a
    segment follow each other. `window` is that of `reads`.

    Keys are read `tile` at a time: where one span over both takes no more tiles than the two, it
    takes their place, and the first is empty."""
    # The first query of a block decides. A sequence that begins within the block needs no keys
    # before the block's first, unless its prompt lies there, which is then the first query's own
    # segment or prompt.
    segment = query.segment[:, ::block]  # [R, n]
    prompt = query.prompt[:, ::block]
    position = query.position[:, ::block]
    first_own, _ = _span_of_segment(key, segment)
    end_own = position + block
    first_prompt, end_prompt = _span_of_segment(key, prompt)
    if window > 0:
        first_own = jnp.maximum(first_own, position - window + 1)
        lowest_place, _ = _place_span(query, block)
        # A prompt's key has its place in the sequence counted from the prompt's first key.
        first_prompt = jnp.maximum(first_prompt, first_prompt + lowest_place - window + 1)
        first_prompt = jnp.minimum(first_prompt, end_prompt)
    # For a block that begins in a prompt, the prompt is its own sequence.
    begins_in_prompt = prompt == segment
    first_prompt = jnp.where(begins_in_prompt, first_own, first_prompt)
    end_prompt = jnp.where(begins_in_prompt, first_own, end_prompt)

    def num_tiles(first: jax.Array, end: jax.Array) -> jax.Array:
        return -(-(end - first) // tile)  # rounded up

    tiles_apart = num_tiles(first_prompt, end_prompt) + num_tiles(first_own, end_own)
    first_of_both = jnp.minimum(first_prompt, first_own)
    is_joined = num_tiles(first_of_both, end_own) <= tiles_apart
    first_own = jnp.where(is_joined, first_of_both, first_own)
    end_prompt = jnp.where(is_joined, first_prompt, end_prompt)

    first = jnp.stack([first_prompt, first_own], -1)
    end = jnp.stack([end_prompt, end_own], -1)
    # Padding comes at a row's end and reads nothing.
    is_padding = (segment == 0)[..., None]
    return Spans(query, key, first, end=jnp.where(is_padding, first, end))


def _span_of_segment(key: Tokens, segment: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns, for each segment[R, n], the position in the row of its first key and the position
    after its last."""
    is_of_segment = key.segment[:, None] == segment[..., None]  # [R, n, S]
    first = is_of_segment.argmax(-1).astype(jnp.int32)
    count = is_of_segment.sum(-1, dtype=jnp.int32)
    return first, first + count


def cache_masks(
    prefix_len: jax.Array,
    position: jax.Array,
    prompt_place: jax.Array,
    own_place: jax.Array,
    window: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Returns which keys in caches each query reads: bool[R, 1 or S, Tp] for the keys of its row's
    prompt, bool[R, S, T] for the keys of its completion.

    A query is the token at position[R, S] of its completion, after a prompt of prefix_len[R]
    tokens. It reads the whole prompt, and its completion up to itself; with a window only the last
    `window` keys of these, its own included. `prompt_place`, [Tp] or [R, 1, Tp], are the positions
    in the prompt of the keys in a cache; `own_place`, [T] or [R, S, T], those in the completion. A
    place below 0 has no key. Without a window the first mask has size 1 in place of S, because all
    queries of a row read the same prompt.
    """
    # Only lengths and positions count: what an earlier prompt or completion left in a cache lies
    # beyond them.
    prompt_mask = prompt_place < prefix_len[:, None, None]
    own_mask = own_place <= position[..., None]
    if not window:
        return prompt_mask, own_mask
    # Positions in the completion: a prompt's are below 0.
    first_read = position[..., None] - window + 1
    in_window = prompt_place - prefix_len[:, None, None] >= first_read
    prompt_mask = prompt_mask & in_window & (prompt_place >= 0)
    return prompt_mask, own_mask & (own_place >= first_read) & (own_place >= 0)


def places(size: int, parts: int = 1, part: jax.Array | None = None) -> jax.Array:
    """Returns the position of each of `size` keys in a cache that keeps all of them, int32[size].
    `part` is None if it has all positions, else which of `parts` parts of the positions it has."""
    index = jnp.arange(size)
    # part p of n parts holds the positions p, n + p, 2 n + p, ...
    return index if part is None else parts * index + part


def ring_places(newest: jax.Array, size: int) -> jax.Array:
    """Returns the position of each key in a ring of `size` keys, which keeps position p at index p
    % size: int32[..., size] for newest[...], the last position that was written. A place below 0
    has no key.

    >>> ring_places(jnp.int32(5), 4).tolist(), ring_places(jnp.int32(1), 4).tolist()
    ([4, 5, 2, 3], [0, 1, -2, -1])
    """
    newest = newest[..., None]
    return newest - (newest - jnp.arange(size)) % size


def _filled(x: jax.Array, block: int) -> jax.Array:
    """Fills [R, T, ...] up with zeros, so that T is a multiple of `block`; unchanged if it is
    one."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % block)
    return jnp.pad(x, padding)
