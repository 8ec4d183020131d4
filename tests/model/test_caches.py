"""Every kind of cache gives back what was written: token by token, in contexts, and of rows that
were saved. The key of a token is the number of its position, so that keys tell which tokens are
read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import roles

from shoal.model.attention.caches import (
    NO_PAGE,
    PAGE,
    Cache,
    ChunkedCache,
    ContextSlots,
    KeyCache,
    NoCache,
    PagedCache,
    RingCache,
    StateCache,
)
from shoal.model.attention.decode import read_keys
from shoal.model.block import PromptKeys
from shoal.model.recurrence import State

ROWS, SIBLINGS = 3, 2
PAGES = jnp.array([[[4, 1], [NO_PAGE, NO_PAGE]], [[0, 3], [5, 2]], [[NO_PAGE] * 2] * 2])
"""The page table, [N, W, 2]."""


def zeros(*shape: int) -> jnp.ndarray:
    return jnp.zeros(shape, jnp.float32)


def keys(size: int) -> dict[str, Any]:
    """Of one head with two dimensions: prompts of up to 8 keys, completions of up to `size`."""
    of_row = zeros(ROWS, 1, 8, 2)
    of_slot = zeros(ROWS, SIBLINGS, 1, size, 2)
    return {"prefix_k": of_row, "prefix_v": of_row, "own_k": of_slot, "own_v": of_slot}


def chunks(size: int, number: int) -> ChunkedCache:
    """As `keys`, with completions in so many chunks of `size` positions."""
    of_row = zeros(ROWS, 1, 8, 2)
    own_k = [zeros(ROWS, SIBLINGS, 1, 2, size) for _ in range(number)]
    own_v = [zeros(ROWS, SIBLINGS, 1, size, 2) for _ in range(number)]
    return ChunkedCache(of_row, of_row, tuple(own_k), tuple(own_v))


CACHES: dict[str, Cache] = {
    "all keys": KeyCache(**keys(24)),
    "chunks": chunks(8, 3),
    "a ring": RingCache(**keys(16)),
    "pages": PagedCache(zeros(ROWS, 1, 8, 4), zeros(6, 1, PAGE, 4)),
    "states": StateCache(
        zeros(ROWS, 2, 3, 4),
        zeros(ROWS, 1, 5),
        zeros(ROWS, SIBLINGS, 2, 3, 4),
        zeros(ROWS, SIBLINGS, 1, 5),
    ),
    "none": NoCache(),
}
WITH_KEYS = ["all keys", "chunks", "a ring", "pages"]


def token(position: Any) -> jnp.ndarray:
    """The key, or the value, of tokens at these positions: [..., 1, 2]."""
    number = jnp.asarray(position, jnp.float32)
    return jnp.broadcast_to(number[..., None, None], (*number.shape, 1, 2))


def with_prompts(cache: Any, rows: list[int], length: list[int]) -> Any:
    """A prompt's keys are 100 more than their positions."""
    new: Any = PromptKeys(token(100 + np.tile(np.arange(12), (len(rows), 1))), token(0) * 0)
    if isinstance(cache, StateCache):
        state = jnp.asarray(length, jnp.float32)
        new = State(
            jnp.broadcast_to(state[:, None, None, None], (len(rows), 2, 3, 4)),
            jnp.broadcast_to(state[:, None, None], (len(rows), 1, 5)),
        )
    else:
        new = new._replace(v=-new.k)
    return cache.write_prompts(new, jnp.array(rows), jnp.array(length), roles().sampler)


SLOT = 1000 * (1 + jnp.arange(ROWS * SIBLINGS).reshape(ROWS, SIBLINGS))
"""Of each slot what is added to the keys of its tokens, [N, W]."""


def with_tokens(cache: Any, size: int) -> Any:
    """Each slot's first `size` tokens, one after the other."""
    for number in range(size):
        position = jnp.full((ROWS, SIBLINGS), number)
        new = token(position + SLOT)
        if isinstance(cache, PagedCache):
            live = jnp.ones((ROWS, SIBLINGS), bool)
            cache = cache.write_tokens(new, -new, position, live, PAGES)
        else:
            cache = cache.write_tokens(new, -new, position)
    return cache


def read(cache: Any, prefix_len: Any, position: Any, window: int) -> list[list[float]]:
    """The keys that the tokens at position[R, S] read, sorted, of each token."""
    found = []
    prompt, own = read_keys(cache, jnp.asarray(prefix_len), jnp.asarray(position), window)
    for row, slot in np.ndindex(*np.shape(position)):
        of_token = []
        for some in (prompt, *own):
            mask = np.asarray(some.mask)[row, min(slot, some.mask.shape[1] - 1)]
            k = np.asarray(some.k.swapaxes(-2, -1) if some.is_chunk else some.k)[row]
            k = k[slot] if k.ndim == 4 else k  # each slot's own
            of_token += k[0, mask, 0].tolist()
        found.append(sorted(of_token))
    return found


def expected(prefix_len: int, position: int, window: int, slot: int) -> list[float]:
    every = [*range(100, 100 + prefix_len), *range(slot, slot + position + 1)]
    return sorted(every[-window:] if window else every)


@pytest.mark.parametrize("kind", WITH_KEYS)
@pytest.mark.parametrize(("start", "count"), [(3, 2), (9, 4), (21, 3)])
def test_context_reads_what_came_before_and_is_read_afterwards(kind, start, count):
    """Also in a ring of no more keys than the window that has been written over, and with padding
    behind the context, some of it past the end."""
    window = 16 if kind == "a ring" else 0
    cache = with_tokens(with_prompts(CACHES[kind], [1, 0], [5, 3]), start)
    at = ContextSlots(
        rows=jnp.array([1, 0]),
        slots=jnp.array([1, 0]),
        start=jnp.array([start, start]),
        count=jnp.array([count, count - 1]),
        pages=jnp.stack([PAGES[1, 1], PAGES[0, 0]]),
    )
    of_slot = SLOT[at.rows, at.slots]
    position = start + np.tile(np.arange(count + 2), (2, 1))  # [M, C]
    new = token(position + of_slot[:, None])
    extended = cache.read_completions(at).append(new, -new, at.start)
    found = read(extended, [5, 3], position, window)
    for number in range(count):
        of_first, of_second = found[number], found[count + 2 + number]
        assert of_first == expected(5, start + number, window, int(of_slot[0]))
        if number < count - 1:
            assert of_second == expected(3, start + number, window, int(of_slot[1]))
    cache = cache.write_completions(extended, at)
    # the last real token of each, read anew
    last = np.asarray(at.start + at.count - 1)[:, None]
    kept = cache.read_completions(at)
    assert read(kept, [5, 3], last, window) == [
        expected(5, last[0, 0], window, int(of_slot[0])),
        expected(3, last[1, 0], window, int(of_slot[1])),
    ]
    np.testing.assert_array_equal(kept.own_k, -kept.own_v)


@pytest.mark.parametrize("kind", CACHES)
def test_a_row_that_was_saved_is_the_same_in_another_row(kind):
    cache = with_prompts(CACHES[kind], [1], [5])
    pages = None
    if kind in WITH_KEYS:
        cache = with_tokens(cache, 10)
        pages = PAGES
    saved = cache.read_rows(jnp.array([1]), None if pages is None else pages[1:2])
    restored = CACHES[kind].write_rows(saved, jnp.array([2]), None if pages is None else pages[1:2])
    again = restored.read_rows(jnp.array([2]), None if pages is None else pages[1:2])
    for ours, theirs in zip(again.of_prompts, cache.of_prompts, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[1])
    for ours, theirs in zip(again.of_slots, saved.of_slots, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", CACHES)
def test_completions_that_join_begin_with_the_prompt_of_another_row(kind):
    cache = with_prompts(CACHES[kind], [1], [5]).copy_prompts(jnp.array([1]), jnp.array([2]))
    for array in cache.of_prompts:
        assert jnp.any(array[1])
        np.testing.assert_array_equal(array[2], array[1])
    if isinstance(cache, StateCache):
        np.testing.assert_array_equal(cache.own_state[2, 1], cache.prefix_state[1])


def test_a_completion_that_is_computed_again_begins_with_its_prompts_state():
    cache = with_prompts(CACHES["states"], [0, 1], [4, 5])
    assert isinstance(cache, StateCache)
    at = ContextSlots(*(jnp.array(values) for values in ([0, 1], [1, 0], [3, 3], [1, 1])))
    new = State(jnp.full((2, 2, 3, 4), 9.0), jnp.full((2, 1, 5), 9.0))
    cache = cache.write_completions(new, at)
    for start, found in ((3, [9.0, 9.0]), (0, [4.0, 5.0])):
        again = ContextSlots(at.rows, at.slots, jnp.full(2, start), at.count)
        assert cache.read_completions(again).state[:, 0, 0, 0].tolist() == found


@pytest.mark.parametrize("parts", [1, 2])
def test_of_a_saved_row_only_keys_that_were_written_are_kept(parts):
    """A device that has a part of the positions has a part of the row's keys."""
    row = KeyCache(zeros(2, 8, 3), zeros(2, 8, 3), zeros(2, 2, 9, 3), zeros(2, 2, 9, 3), parts)
    used = row.used_part(num_prompt=5, num_own=7)
    assert used.prefix_k.shape[1] == used.prefix_v.shape[1] == -(-5 // parts)
    assert used.own_k.shape[2] == used.own_v.shape[2] == -(-7 // parts)
    in_chunks = chunks(4, 3).read_rows(jnp.array([0]), None)
    used_row = jax.tree.map(lambda array: array[0], in_chunks).used_part(5, 7)
    assert [chunk.shape[-1] for chunk in used_row.own_k] == [4, 3, 0]
    assert [chunk.shape[-2] for chunk in used_row.own_v] == [4, 3, 0]
    paged = PagedCache(zeros(1, 8, 4), zeros(2, 3, 1, PAGE, 4))
    assert paged.used_part(5, PAGE + 1).own_kv.shape == (2, 2, 1, PAGE, 4)
