"""Caches of sampling, one for each layer: of a prompt once for its row, of a completion in its own
slot.

    KeyCache      keys and values of all tokens
    ChunkedCache  keys and values of all tokens; those of completions in a few arrays, for CPUs
    RingCache     keys and values of a window's last tokens
    PagedCache    keys and values of all tokens; those of completions in pages of a pool
    StateCache    the states of a delta net
    NoCache       nothing, because the layer reads the keys of another one

Each is a tree of arrays over N rows of W slots, with the methods of `Cache`. `empty` decides which
one a layer has. The steps of sampling use them so:

    prefill     `write_prompts`
    join        `copy_prompts`
    feed        `read_completions`; the layer appends the context; `write_completions`
    decode      the layer reads and writes it (`SlotAttention`, `SlotRecurrence`)
    swap_out    `read_rows`
    swap_in     `write_rows`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.mesh import Role
from shoal.model.architecture import Layer
from shoal.model.attention.rule import places, ring_places
from shoal.model.attention.selector import by_pages
from shoal.model.attention.softmax import largest_block
from shoal.model.block import PromptKeys
from shoal.model.recurrence import State, empty_state
from shoal.model.transformer import Model

KEY_BLOCK = 64
"""Sizes of caches are multiples of so many keys."""


PAGE = 128
"""Keys of a completion that one page holds. On TPUs, whose kernel reads pages, sizes of caches are
multiples of it."""


NO_PAGE = 2**31 - 1
"""A page number in a table that is past the end of any pool: nothing is written there."""


RING_SLACK = 128
"""Keys of a completion that a ring holds beyond its window. Tokens that were sampled after the end
of a turn, before the host saw that end, are dropped, but have been written: these are fewer (the
sampler asserts it), so the keys that they replaced lie before the window."""


CHUNK = 128
"""Keys of a completion that one array of a CPU's cache holds at least. Up to MOST_CHUNKS arrays, so
of long completions each holds more."""


MOST_CHUNKS = 4
"""Arrays that a CPU's cache of completions has at most in a layer. With 4 of 256 keys a CPU reads
1,024 keys as fast as with 8 of 128, and compiles 1.6 seconds less."""


MOST_SIBLINGS = 32
"""Most slots of a row on TPUs: the kernel holds a page of each in on-chip memory at once."""


def keys_at_once(platform: str, keys: int) -> int:
    """Returns the keys in one block of decoding's online softmax over a cache of `keys` keys. If
    one block holds all, it is read without a loop.

    By the TPU compiler's cycles a token of 70B (8 v5p chips, 512 keys) takes 14.9 ms without a loop
    and 16.5 with two blocks of 256. On CPU a loop copies each block, but does not read keys beyond
    the longest slot: there blocks are short.
    """
    if platform == "cpu":
        return KEY_BLOCK if keys <= 4 * KEY_BLOCK else 2 * KEY_BLOCK
    return 8 * KEY_BLOCK


def cache_size(tokens: int, platform: str, parts: int = 1) -> int:
    """Returns the capacity, in keys, of a cache that must hold at least `tokens` tokens.

    On a TPU: whole pages. Elsewhere: as few blocks of at most `keys_at_once` keys as possible, all
    of the same size, in each of `parts` parts (`Model.key_parts`).

    >>> cache_size(200, "cpu"), cache_size(320, "gpu")
    (256, 320)
    >>> cache_size(1600, "gpu"), cache_size(1600, "tpu")
    (1792, 1664)
    """
    if platform == "tpu" and parts == 1:
        return PAGE * -(-tokens // PAGE)
    # -(-a // b) is a / b rounded up, here and below.
    tokens_of_part = -(-tokens // parts)
    blocks = -(-tokens_of_part // keys_at_once(platform, tokens_of_part))
    # The tokens are divided equally over the blocks, in multiples of KEY_BLOCK.
    block = KEY_BLOCK * -(-tokens_of_part // (blocks * KEY_BLOCK))
    return parts * blocks * block


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContextSlots:
    """The completions that a feed computes context of, at most M, and how many tokens each has
    before it. A row past the end stands for no completion: nothing is written for it."""

    rows: Any  # int32[M]
    slots: Any  # int32[M]
    start: Any  # int32[M]: tokens of the completion before the context
    count: Any  # int32[M]: tokens of context; those behind them are padding
    pages: Any = None  # int32[M, T]: the page table of each; None if keys are not stored in pages


class Cache(ABC):
    """What one layer keeps of the tokens before: a tree of arrays, of prompts by row, of
    completions by row and slot.

    A further kind of cache is a class with these methods, which `empty` makes for its kind of
    layer. A row number past the end reads the last row, and writes nothing."""

    @property
    @abstractmethod
    def of_prompts(self) -> tuple[Any, ...]:
        """The arrays that each row has once, for its prompt."""

    @property
    @abstractmethod
    def of_slots(self) -> tuple[Any, ...]:
        """The arrays that each slot has for its completion."""

    @abstractmethod
    def shares_read(
        self, prompt_tokens: float, own_tokens: float, num_slots: int
    ) -> tuple[float, float]:
        """Returns the shares of `of_prompts` and of `of_slots` that a step of decoding reads, in
        which `num_slots` slots, all of them, are after prompts of `prompt_tokens` tokens and have
        `own_tokens` tokens of their own."""

    @abstractmethod
    def axes(self) -> Self:
        """Returns the logical axes of the arrays in the same tree: a tuple for each array. Rows
        come first, also of a pool of pages, and key or value heads are split."""

    @abstractmethod
    def write_prompts(self, new: Any, rows: jax.Array, length: jax.Array, role: Role) -> Self:
        """Writes what prompts of length[R] leave in the layer, `PromptKeys` or a `State`, to
        rows[R], where completions begin."""

    @abstractmethod
    def copy_prompts(self, sources: jax.Array, rows: jax.Array) -> Self:
        """Copies what prompts left from rows sources[M] to rows[M], where completions begin. The
        slots' own keys are not copied."""

    @abstractmethod
    def read_completions(self, at: ContextSlots) -> Any:
        """Returns what the layer reads of M completions to compute context after them: of keys a
        `KeyCache` or `RingCache` whose arrays have no dimension of slots, [M, K, T, A]; of a delta
        net the `State`."""

    @abstractmethod
    def write_completions(self, new: Any, at: ContextSlots) -> Self:
        """Writes the completions that `read_completions` returned, as the layer has made them
        `new`."""

    def read_rows(self, rows: jax.Array, pages: jax.Array | None) -> Self:
        """Returns a cache of rows[M] alone. pages[M, W, T] is their page table; None if keys are
        not stored in pages."""
        return jax.tree.map(lambda array: entries_at(array, rows), self)

    def write_rows(self, swapped: Any, rows: jax.Array, pages: jax.Array | None) -> Self:
        """Writes the M rows that `read_rows` returned to rows[M], and to pages[M, W, T]. A page
        past the end is dropped, too."""
        return jax.tree.map(partial(_put, (rows,)), self, swapped)

    def used_part(self, num_prompt: int, num_own: int) -> Self:
        """Returns the part of one swapped-out row, whose NumPy arrays have no dimension of rows,
        that a prompt of `num_prompt` tokens and completions of up to `num_own` have filled."""
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoCache(Cache):
    """The cache of a layer that reads the keys of another one: none."""

    @property
    def of_prompts(self) -> tuple[()]:
        return ()

    @property
    def of_slots(self) -> tuple[()]:
        return ()

    def shares_read(
        self, prompt_tokens: float, own_tokens: float, num_slots: int
    ) -> tuple[float, float]:
        return 0.0, 0.0

    def axes(self) -> Self:
        return self

    def write_prompts(self, new: Any, rows: jax.Array, length: jax.Array, role: Role) -> Self:
        return self

    def copy_prompts(self, sources: jax.Array, rows: jax.Array) -> Self:
        return self

    def read_completions(self, at: ContextSlots) -> Self:
        return self

    def write_completions(self, new: Any, at: ContextSlots) -> Self:
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateCache(Cache):
    """The states and tails of a delta net (`State`): after each row's prompt, and after the tokens
    so far of each slot's completion, which begins with its prompt's."""

    prefix_state: Any  # float32[N, Hv, dk, dv]
    prefix_tail: Any  # [N, conv_size - 1, C]
    own_state: Any  # float32[N, W, Hv, dk, dv]
    own_tail: Any  # [N, W, conv_size - 1, C]

    @property
    def of_prompts(self) -> tuple[Any, ...]:
        return self.prefix_state, self.prefix_tail

    @property
    def of_slots(self) -> tuple[Any, ...]:
        return self.own_state, self.own_tail

    def shares_read(
        self, prompt_tokens: float, own_tokens: float, num_slots: int
    ) -> tuple[float, float]:
        # The state after a prompt was copied to its completions.
        return 0.0, 1.0

    def axes(self) -> Self:
        return replace(
            self,
            prefix_state=_axes(self.prefix_state, heads_from_end=3),
            prefix_tail=_axes(self.prefix_tail),
            own_state=_axes(self.own_state, heads_from_end=3),
            own_tail=_axes(self.own_tail),
        )

    def write_prompts(self, new: State, rows: jax.Array, length: jax.Array, role: Role) -> Self:
        return self._begin(new, rows)

    def copy_prompts(self, sources: jax.Array, rows: jax.Array) -> Self:
        of_sources = State(self.prefix_state[sources], self.prefix_tail[sources])
        return self._begin(of_sources, rows)

    def _begin(self, new: State, rows: jax.Array) -> Self:
        """Writes the states after prompts to rows[R], for the prompt and for each of its
        completions, which begin with it."""

        def write_to_slots(old: jax.Array, new: jax.Array) -> jax.Array:
            of_slots = jnp.broadcast_to(new[:, None], (len(new), *old.shape[1:]))
            return _put((rows,), old, of_slots)

        return replace(
            self,
            prefix_state=_put((rows,), self.prefix_state, new.state),
            prefix_tail=_put((rows,), self.prefix_tail, new.tail),
            own_state=write_to_slots(self.own_state, new.state),
            own_tail=write_to_slots(self.own_tail, new.tail),
        )

    def read_completions(self, at: ContextSlots) -> State:
        # A completion that is computed from its first token on begins with its prompt's state.
        is_first = at.start == 0

        def of_completions(prefix: jax.Array, own: jax.Array) -> jax.Array:
            prompts = entries_at(prefix, at.rows)
            at_start = jnp.expand_dims(is_first, tuple(range(1, prompts.ndim)))
            return jnp.where(at_start, prompts, entries_at(own, at.rows, at.slots))

        return State(
            of_completions(self.prefix_state, self.own_state),
            of_completions(self.prefix_tail, self.own_tail),
        )

    def write_completions(self, new: State, at: ContextSlots) -> Self:
        index = at.rows, at.slots
        return replace(
            self,
            own_state=_put(index, self.own_state, new.state),
            own_tail=_put(index, self.own_tail, new.tail),
        )


@dataclass(frozen=True)
class TokenKeys(Cache):
    """Keys and values of prompts by row and of completions by slot, which attention reads by their
    positions. The subclasses differ in how those of completions lie, and in which index a token
    has.

    Heads come before positions, as attention reads them: otherwise all keys would be transposed
    before each product."""

    prefix_k: Any  # [N, K, Tp, A]
    prefix_v: Any  # as prefix_k
    own_k: Any  # of completions, in the form of the subclass
    own_v: Any

    @property
    def of_prompts(self) -> tuple[Any, ...]:
        return self.prefix_k, self.prefix_v

    @abstractmethod
    def prefix_places(self, prefix_len: jax.Array, part: jax.Array | None = None) -> jax.Array:
        """Returns the position in its prompt, of prefix_len[N] tokens, of each of Tp keys:
        int32[Tp] or [N, 1, Tp]. Below 0 is no key. `part`: as in `SlotKeys.own_index`."""

    @abstractmethod
    def own_places(self, position: jax.Array, part: jax.Array | None = None) -> jax.Array:
        """Returns the position in its completion, whose last token is at position[N, W], of each of
        T keys: int32[T] or [N, W, T]. Below 0 is no key."""

    @abstractmethod
    def write_tokens(
        self, k: jax.Array, v: jax.Array, position: jax.Array, part: jax.Array | None = None
    ) -> Self:
        """Writes the key and value [N, W, K, A] of the token at position[N, W] of each slot."""

    def axes(self) -> Self:
        return jax.tree.map(partial(_axes, heads_from_end=3), self)

    def _write_first_keys(self, k: jax.Array, v: jax.Array, rows: jax.Array) -> Self:
        """Writes keys and values [R, T, K, A] to the first T indices of the prompts at rows[R].
        What is beyond the cache's size is padding of the prompts, and not written."""
        return replace(
            self,
            prefix_k=_put_first_keys(self.prefix_k, k, rows),
            prefix_v=_put_first_keys(self.prefix_v, v, rows),
        )

    def copy_prompts(self, sources: jax.Array, rows: jax.Array) -> Self:
        return replace(
            self,
            prefix_k=_put((rows,), self.prefix_k, self.prefix_k[sources]),
            prefix_v=_put((rows,), self.prefix_v, self.prefix_v[sources]),
        )


@dataclass(frozen=True)
class SlotKeys(TokenKeys):
    """Each slot's keys and values in one array: what `KeyCache` and `RingCache` have in common."""

    own_k: Any  # [N, W, K, T, A]
    own_v: Any  # as own_k

    @property
    def of_slots(self) -> tuple[Any, ...]:
        return self.own_k, self.own_v

    @abstractmethod
    def own_index(self, position: jax.Array, part: jax.Array | None = None) -> jax.Array:
        """Returns the index among a slot's T keys of the token at position[..] of its completion.
        `part`: which part of the positions this device has, if they are split (`KeyCache.parts`);
        the index of a token of another part is T."""

    @abstractmethod
    def append(self, k: jax.Array, v: jax.Array, start: jax.Array) -> SlotKeys | ExtendedRing:
        """Appends keys and values [M, C, K, A] of context to M completions of start[M] tokens, in a
        cache that `read_completions` returned."""

    def write_tokens(
        self, k: jax.Array, v: jax.Array, position: jax.Array, part: jax.Array | None = None
    ) -> Self:
        index = self.own_index(position[..., None], part)
        # No index is checked: a position is always within its cache, or in another device's part.
        mode = "promise_in_bounds" if part is None else "drop"

        def write(keys: jax.Array, new: jax.Array) -> jax.Array:
            row, slot, head = jnp.indices(new.shape[:3], sparse=True)
            # XLA for TPU compiles a scatter to a loop over slots if two of them might coincide. If
            # all heads were written at once, XLA would transpose the whole cache at both ends of
            # every dispatch.
            return keys.at[row, slot, head, index].set(
                new, unique_indices=True, indices_are_sorted=True, mode=mode
            )

        return replace(self, own_k=write(self.own_k, k), own_v=write(self.own_v, v))

    def read_completions(self, at: ContextSlots) -> Self:
        return replace(
            self,
            prefix_k=entries_at(self.prefix_k, at.rows),
            prefix_v=entries_at(self.prefix_v, at.rows),
            own_k=entries_at(self.own_k, at.rows, at.slots),
            own_v=entries_at(self.own_v, at.rows, at.slots),
        )

    def _write_slots(self, k: jax.Array, v: jax.Array, at: ContextSlots) -> Self:
        """Writes the keys and values [M, K, T, A] of whole slots."""
        # Whole slots: to write the new keys alone, XLA for TPU copies the whole cache to another
        # layout and back.
        index = at.rows, at.slots
        return replace(self, own_k=_put(index, self.own_k, k), own_v=_put(index, self.own_v, v))

    def _first_keys(self, num_prompt: int, num_own: int) -> Self:
        """Returns the first keys of a swapped-out row."""
        return replace(
            self,
            prefix_k=self.prefix_k[:, :num_prompt],
            prefix_v=self.prefix_v[:, :num_prompt],
            own_k=self.own_k[:, :, :num_own],
            own_v=self.own_v[:, :, :num_own],
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyCache(SlotKeys):
    """Keys and values of all tokens. Position p is at index p.

    If a head is on several devices (`Model.key_parts_of`), its positions are split into `parts`,
    and K counts parts of heads: part p % parts holds position p, at index p // parts. So all parts
    grow alike."""

    parts: int = field(default=1, metadata={"static": True})

    def shares_read(
        self, prompt_tokens: float, own_tokens: float, num_slots: int
    ) -> tuple[float, float]:
        # [.., heads x parts, tokens / parts, A]
        num_prompt = self.prefix_k.shape[-2] * self.parts
        num_own = self.own_k.shape[-2] * self.parts
        return prompt_tokens / num_prompt, own_tokens / num_own

    def own_index(self, position: jax.Array, part: jax.Array | None = None) -> jax.Array:
        if part is None:
            return position
        past_end = self.own_k.shape[-2]
        return jnp.where(position % self.parts == part, position // self.parts, past_end)

    def prefix_places(self, prefix_len: jax.Array, part: jax.Array | None = None) -> jax.Array:
        return places(self.prefix_k.shape[-2], self.parts, part)

    def own_places(self, position: jax.Array, part: jax.Array | None = None) -> jax.Array:
        return places(self.own_k.shape[-2], self.parts, part)

    def write_prompts(
        self, new: PromptKeys, rows: jax.Array, length: jax.Array, role: Role
    ) -> Self:
        if self.parts > 1:
            heads = PartitionSpec(None, None, "tensor")
            select = partial(_select_part, self.parts)
            new = on_tensor_devices(role, select, (heads,), heads, new, parts=self.parts)
        return self._write_first_keys(new.k, new.v, rows)

    def append(self, k: jax.Array, v: jax.Array, start: jax.Array) -> KeyCache:
        """As `SlotKeys.append`. Padding of the context that would be past the end is dropped."""

        def append(own: jax.Array, new: jax.Array) -> jax.Array:
            new = new.swapaxes(1, 2).astype(own.dtype)  # [M, K, C, A]
            # A slice past the end would be moved back, over older keys. So it gets room there,
            # which is cut off again.
            longer = jnp.pad(own, ((0, 0), (0, 0), (0, new.shape[2]), (0, 0)))
            update = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=1))
            return update(longer, new, start)[:, :, : own.shape[2]]

        return replace(self, own_k=append(self.own_k, k), own_v=append(self.own_v, v))

    def write_completions(self, new: KeyCache, at: ContextSlots) -> Self:
        return self._write_slots(new.own_k, new.own_v, at)

    def used_part(self, num_prompt: int, num_own: int) -> Self:
        # Each part has every `parts`-th position: it is filled up to this share, rounded up.
        return self._first_keys(-(-num_prompt // self.parts), -(-num_own // self.parts))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkedCache(TokenKeys):
    """Keys and values of all tokens, as a CPU reads them fastest. Those of completions are in
    several arrays of C positions each: position p is at index p % C of array p // C. Keys lie
    transposed.

    XLA for CPU takes each of these arrays as an operand of a product where it is. Of one array for
    all positions it copies the part that is read first, and it transposes keys for their product
    with queries: 32 completions of 1,024 tokens take 2.5 times as long."""

    own_k: tuple[Any, ...]  # each [N, W, K, A, C]
    own_v: tuple[Any, ...]  # each [N, W, K, C, A]

    @property
    def of_slots(self) -> tuple[Any, ...]:
        return self.own_k + self.own_v

    @property
    def chunk_size(self) -> int:
        """C, the positions of a chunk."""
        return self.own_v[0].shape[-2]

    def shares_read(
        self, prompt_tokens: float, own_tokens: float, num_slots: int
    ) -> tuple[float, float]:
        num_own = self.chunk_size * len(self.own_v)
        return prompt_tokens / self.prefix_k.shape[-2], own_tokens / num_own

    def prefix_places(self, prefix_len: jax.Array, part: jax.Array | None = None) -> jax.Array:
        return places(self.prefix_k.shape[-2])

    def own_places(self, position: jax.Array, part: jax.Array | None = None) -> jax.Array:
        return places(self.chunk_size * len(self.own_v))

    def write_prompts(
        self, new: PromptKeys, rows: jax.Array, length: jax.Array, role: Role
    ) -> Self:
        return self._write_first_keys(new.k, new.v, rows)

    def write_tokens(
        self, k: jax.Array, v: jax.Array, position: jax.Array, part: jax.Array | None = None
    ) -> Self:
        row, slot, head = jnp.indices(k.shape[:3], sparse=True)
        own_k = []
        own_v = []
        for number, (chunk_k, chunk_v) in enumerate(zip(self.own_k, self.own_v, strict=True)):
            index = position[..., None] - number * self.chunk_size
            # What another chunk has is dropped. An index below 0 would count from the end.
            index = jnp.where(index < 0, self.chunk_size, index)
            of_token = chunk_k.at[row, slot, head, :, index]
            own_k.append(of_token.set(k, unique_indices=True, indices_are_sorted=True, mode="drop"))
            of_token = chunk_v.at[row, slot, head, index]
            own_v.append(of_token.set(v, unique_indices=True, indices_are_sorted=True, mode="drop"))
        return replace(self, own_k=tuple(own_k), own_v=tuple(own_v))

    def read_completions(self, at: ContextSlots) -> KeyCache:
        own_k = [entries_at(chunk, at.rows, at.slots).swapaxes(-2, -1) for chunk in self.own_k]
        own_v = [entries_at(chunk, at.rows, at.slots) for chunk in self.own_v]
        return KeyCache(
            entries_at(self.prefix_k, at.rows),
            entries_at(self.prefix_v, at.rows),
            jnp.concatenate(own_k, axis=-2),
            jnp.concatenate(own_v, axis=-2),
        )

    def write_completions(self, new: KeyCache, at: ContextSlots) -> Self:
        index = at.rows, at.slots
        own_k = jnp.split(new.own_k.swapaxes(-2, -1), len(self.own_k), axis=-1)
        own_v = jnp.split(new.own_v, len(self.own_v), axis=-2)
        put = partial(_put, index)
        return replace(
            self,
            own_k=tuple(map(put, self.own_k, own_k)),
            own_v=tuple(map(put, self.own_v, own_v)),
        )

    def used_part(self, num_prompt: int, num_own: int) -> Self:
        own_k = []
        own_v = []
        for number, (chunk_k, chunk_v) in enumerate(zip(self.own_k, self.own_v, strict=True)):
            # of a chunk behind the longest completion nothing
            num_used = max(num_own - number * self.chunk_size, 0)
            own_k.append(chunk_k[..., :num_used])
            own_v.append(chunk_v[..., :num_used, :])
        return replace(
            self,
            prefix_k=self.prefix_k[:, :num_prompt],
            prefix_v=self.prefix_v[:, :num_prompt],
            own_k=tuple(own_k),
            own_v=tuple(own_v),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RingCache(SlotKeys):
    """Keys and values of the last tokens, as a layer with a window reads them (`ring_size`).
    Position p is at index p % Tp of a prompt, p % T of a completion."""

    def shares_read(
        self, prompt_tokens: float, own_tokens: float, num_slots: int
    ) -> tuple[float, float]:
        # It may have room for fewer tokens, and is then read as a whole.
        of_prompts = prompt_tokens / self.prefix_k.shape[-2]
        of_slots = own_tokens / self.own_k.shape[-2]
        return min(1.0, of_prompts), min(1.0, of_slots)

    def own_index(self, position: jax.Array, part: jax.Array | None = None) -> jax.Array:
        return position % self.own_k.shape[-2]

    def prefix_places(self, prefix_len: jax.Array, part: jax.Array | None = None) -> jax.Array:
        return ring_places(prefix_len - 1, self.prefix_k.shape[-2])[:, None]

    def own_places(self, position: jax.Array, part: jax.Array | None = None) -> jax.Array:
        return ring_places(position, self.own_k.shape[-2])

    def write_prompts(
        self, new: PromptKeys, rows: jax.Array, length: jax.Array, role: Role
    ) -> Self:
        k, v = new
        size = self.prefix_k.shape[-2]
        if k.shape[1] > size:
            # The last keys of each prompt, at their indices in the ring.
            position = jnp.maximum(ring_places(length - 1, size), 0)[..., None, None]
            k = jnp.take_along_axis(k, position, axis=1)
            v = jnp.take_along_axis(v, position, axis=1)
        return self._write_first_keys(k, v, rows)

    def append(self, k: jax.Array, v: jax.Array, start: jax.Array) -> ExtendedRing:
        own_k = jnp.concatenate([self.own_k, k.swapaxes(1, 2)], axis=2)
        own_v = jnp.concatenate([self.own_v, v.swapaxes(1, 2)], axis=2)
        return ExtendedRing(self.prefix_k, self.prefix_v, own_k, own_v, num_new=k.shape[1])

    def write_completions(self, new: ExtendedRing, at: ContextSlots) -> Self:
        own_k, own_v = new.last_keys(at.start, at.count)
        return self._write_slots(own_k, own_v, at)

    def used_part(self, num_prompt: int, num_own: int) -> Self:
        return self._first_keys(num_prompt, num_own)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExtendedRing:
    """The rings of M completions with the keys of context behind them: in the ring, which may be
    shorter than the context, they would replace keys that the context reads."""

    prefix_k: Any  # [M, K, Tp, A]
    prefix_v: Any  # as prefix_k
    own_k: Any  # [M, K, T + C, A]
    own_v: Any  # as own_k
    num_new: int = field(metadata={"static": True})  # C

    @property
    def ring_size(self) -> int:
        """T, the keys of the ring."""
        return self.own_k.shape[2] - self.num_new

    def prefix_places(self, prefix_len: jax.Array, part: jax.Array | None = None) -> jax.Array:
        """As `SlotKeys.prefix_places`."""
        return ring_places(prefix_len - 1, self.prefix_k.shape[2])[:, None]

    def own_places(self, position: jax.Array, part: jax.Array | None = None) -> jax.Array:
        """Returns the position in its completion of each key, int32[M, 1, T + C]. position[M, C]
        are those of the context."""
        of_ring = ring_places(position[:, 0] - 1, self.ring_size)
        return jnp.concatenate([of_ring, position], axis=1)[:, None]

    def last_keys(self, start: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the rings' keys and values [M, K, T, A] after the first count[M] tokens of the
        context, which began at position start[M]: these replace the oldest keys."""
        place = ring_places(start + count - 1, self.ring_size)  # [M, T]
        is_new = (place >= start[:, None])[:, None, :, None]
        index = jnp.clip(place - start[:, None], 0, self.num_new - 1)[:, None, :, None]

        def last(both: jax.Array) -> jax.Array:
            ring, new = jnp.split(both, [self.ring_size], axis=2)
            return jnp.where(is_new, jnp.take_along_axis(new, index, axis=2), ring)

        return last(self.own_k), last(self.own_v)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache(Cache):
    """Keys and values of all tokens, next to each other, as the kernel for TPUs reads them. Those
    of completions are in pages of a pool that all slots share. A page table int32[N, W, T] on the
    host says which pages are whose (vLLM calls it the block table).

    Of swapped-out rows, which have no pool, `own_kv` is [N, W, T, K, PAGE, 2 A]."""

    prefix_kv: Any  # [N, K, Tp, 2 A]
    own_kv: Any  # [P, K, PAGE, 2 A]: P pages

    @property
    def of_prompts(self) -> tuple[Any, ...]:
        return (self.prefix_kv,)

    @property
    def of_slots(self) -> tuple[Any, ...]:
        return (self.own_kv,)

    def shares_read(
        self, prompt_tokens: float, own_tokens: float, num_slots: int
    ) -> tuple[float, float]:
        num_pages, _, page_tokens, _ = self.own_kv.shape
        of_one_slot = num_pages * page_tokens / num_slots  # a slot's share of the pool
        return prompt_tokens / self.prefix_kv.shape[2], own_tokens / of_one_slot

    def axes(self) -> Self:
        return jax.tree.map(partial(_axes, heads_from_end=3), self)

    def write_prompts(
        self, new: PromptKeys, rows: jax.Array, length: jax.Array, role: Role
    ) -> Self:
        both = jnp.concatenate(new, -1)
        return replace(self, prefix_kv=_put_first_keys(self.prefix_kv, both, rows))

    def copy_prompts(self, sources: jax.Array, rows: jax.Array) -> Self:
        return replace(self, prefix_kv=_put((rows,), self.prefix_kv, self.prefix_kv[sources]))

    def write_tokens(
        self, k: jax.Array, v: jax.Array, position: jax.Array, live: jax.Array, pages: jax.Array
    ) -> Self:
        """Writes the key and value [N, W, K, A] of the token at position[N, W] of each slot to its
        page; those of slots that are not live[N, W] are dropped. pages[N, W, T]: the page table."""
        # Slots that sample nothing write past the end, each to a different page: XLA compiles a
        # scatter whose indices might coincide to a loop.
        num_pages = len(self.own_kv)
        past_end = num_pages + jnp.arange(live.size, dtype=jnp.int32).reshape(live.shape)
        page = jnp.take_along_axis(pages, position[..., None] // PAGE, 2)
        page = jnp.where(live[..., None], page, past_end[..., None])
        new = jnp.concatenate([k, v], -1)
        own_kv = self.own_kv.at[page, jnp.arange(k.shape[2]), position[..., None] % PAGE].set(
            new, unique_indices=True, mode="drop"
        )
        return replace(self, own_kv=own_kv)

    def read_completions(self, at: ContextSlots) -> KeyCache:
        own = self._read_pages(at.pages).swapaxes(-4, -3)  # [M, K, T, PAGE, 2 A]
        own = jax.lax.collapse(own, own.ndim - 3, own.ndim - 1)  # [M, K, T x PAGE, 2 A]
        prefix_k, prefix_v = jnp.split(entries_at(self.prefix_kv, at.rows), 2, -1)
        own_k, own_v = jnp.split(own, 2, -1)
        return KeyCache(prefix_k, prefix_v, own_k, own_v)

    def write_completions(self, new: KeyCache, at: ContextSlots) -> Self:
        pages = in_pages(new.own_k, new.own_v)
        return replace(self, own_kv=_put(at.pages, self.own_kv, pages))

    def read_rows(self, rows: jax.Array, pages: jax.Array | None) -> Self:
        prefix_kv = entries_at(self.prefix_kv, rows)
        return replace(self, prefix_kv=prefix_kv, own_kv=self._read_pages(pages))

    def write_rows(self, swapped: Any, rows: jax.Array, pages: jax.Array | None) -> Self:
        return replace(
            self,
            prefix_kv=_put((rows,), self.prefix_kv, swapped.prefix_kv),
            own_kv=_put(pages, self.own_kv, swapped.own_kv),
        )

    def used_part(self, num_prompt: int, num_own: int) -> Self:
        num_pages = -(-num_own // PAGE)
        return replace(
            self, prefix_kv=self.prefix_kv[:, :num_prompt], own_kv=self.own_kv[:, :num_pages]
        )

    def _read_pages(self, pages: jax.Array | None) -> jax.Array:
        """Reads the pages with the numbers pages[..]; returns [.., K, PAGE, 2 A]. A number past the
        end, like NO_PAGE, reads the last page."""
        assert pages is not None, "a cache with pages has a table of them"

        def read_page(page: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(self.own_kv, page, keepdims=False)

        # One page after another: XLA for TPU reads all of a pool if it gathers pages of it.
        read = jax.lax.map(read_page, pages.reshape(-1))
        return read.reshape(pages.shape + self.own_kv.shape[1:])


class PrefillChunkKeys(NamedTuple):
    """Keys and values of prompts that are computed chunk by chunk (chunked prefill), of the chunks
    so far. The order is that of caches."""

    k: jax.Array  # [R, K, T, A]
    v: jax.Array  # as k

    @classmethod
    def of(cls, keys: PromptKeys) -> PrefillChunkKeys:
        """Returns keys of whole prompts in this order."""
        return cls(keys.k.swapaxes(1, 2), keys.v.swapaxes(1, 2))

    def write(self, k: jax.Array, v: jax.Array, start: jax.Array) -> PrefillChunkKeys:
        """Writes keys and values [R, C, K, A] of a chunk that begins at position `start`."""

        def write(before: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(before, new.swapaxes(1, 2), start, 2)

        return PrefillChunkKeys(write(self.k, k), write(self.v, v))

    def of_prompts(self) -> PromptKeys:
        """Returns the keys as a prefill of whole prompts leaves them."""
        return PromptKeys(self.k.swapaxes(1, 2), self.v.swapaxes(1, 2))


def empty(
    model: Model, rows: int, siblings: int, prefix: int, own: int, pages: int = 0
) -> tuple[Cache, ...]:
    """Returns one cache of zeros for each layer, for `rows` rows of `siblings` slots. `prefix` and
    `own` are how many keys of a prompt and of a slot it holds, over all parts of a head. If a kind
    of layer decodes by pages (`by_pages`), all slots share a pool of `pages` pages; with `pages` 0
    each slot has pages of its own, as swapped-out rows have."""
    # The dimensions in front of a page: of one pool, or of each slot's own pages.
    pool = (pages,) if pages else (rows, siblings, own // PAGE)
    caches: list[Cache] = []
    for layer in model.architecture.layers_in_order:
        if layer.keys_of is not None:
            caches.append(NoCache())
        elif layer.mixer == "delta_net":
            caches.append(_empty_states(model, rows, siblings))
        elif by_pages(model, layer):
            caches.append(_empty_pages(model, layer, rows, prefix, pool))
        else:
            caches.append(_empty_keys(model, layer, rows, siblings, prefix, own))
    return tuple(caches)


def keys_dtype(model: Model) -> Any:
    """Returns the type of keys and values in caches. It is that of the computation, except on a
    CPU: there the caches of a computation in bfloat16 hold the same values in float32. XLA for CPU
    cannot write a part of an array of bfloat16: for each token it would convert the whole cache to
    float32, and back."""
    return jnp.float32 if model.writes_float32 else model.dtype


def is_ring(model: Model, layer: Layer) -> bool:
    """True if a kind of layer keeps its keys in rings. A layer whose positions are split over
    devices keeps all of them."""
    return model.window_of(layer) > 0 and model.key_parts_of(layer) == 1


def ring_size(window: int, slack: int, size: int) -> int:
    """Returns the keys of a ring for a window, at most `size`, which has room for all keys."""
    return min(size, KEY_BLOCK * -(-(window + slack) // KEY_BLOCK))


def _empty_keys(
    model: Model, layer: Layer, rows: int, siblings: int, prefix: int, own: int
) -> KeyCache | ChunkedCache | RingCache:
    """Returns a cache of zeros of one layer with keys, without pages."""
    parts = model.key_parts_of(layer)
    prefix //= parts
    own //= parts
    if is_ring(model, layer):
        prefix = ring_size(layer.window, 0, prefix)
        own = ring_size(layer.window, RING_SLACK, own)
    heads = model.key_heads_of(layer)
    head_dim = model.architecture.head_dim_of(layer)
    of_row = (rows, heads, prefix, head_dim)
    dtype = keys_dtype(model)
    of_prompts = {
        "prefix_k": jnp.zeros(of_row, dtype),
        "prefix_v": jnp.zeros(of_row, dtype),
    }
    if model.role.platform == "cpu" and parts == 1 and not is_ring(model, layer):
        size = largest_block(own, max(CHUNK, own // MOST_CHUNKS))
        of_chunk = (rows, siblings, heads, size, head_dim)
        transposed = (rows, siblings, heads, head_dim, size)
        own_k = tuple(jnp.zeros(transposed, dtype) for _ in range(own // size))
        own_v = tuple(jnp.zeros(of_chunk, dtype) for _ in range(own // size))
        return ChunkedCache(**of_prompts, own_k=own_k, own_v=own_v)
    of_slots = (rows, siblings, heads, own, head_dim)
    arrays = {
        **of_prompts,
        "own_k": jnp.zeros(of_slots, dtype),
        "own_v": jnp.zeros(of_slots, dtype),
    }
    return RingCache(**arrays) if is_ring(model, layer) else KeyCache(**arrays, parts=parts)


def _empty_pages(
    model: Model, layer: Layer, rows: int, prefix: int, pool: tuple[int, ...]
) -> PagedCache:
    """Returns a cache of zeros of one layer whose own keys are in pages: `pool` are the dimensions
    in front of each page's."""
    heads = model.key_heads_of(layer)
    width = 2 * model.architecture.head_dim_of(layer)  # keys and values
    return PagedCache(
        prefix_kv=jnp.zeros((rows, heads, prefix, width), model.dtype),
        own_kv=jnp.zeros((*pool, heads, PAGE, width), model.dtype),
    )


def _empty_states(model: Model, rows: int, siblings: int) -> StateCache:
    """Returns a cache of zeros of one delta net."""
    sizes = model.architecture.delta_net_sizes
    of_rows = empty_state(sizes, (rows,), model.dtype)
    of_slots = empty_state(sizes, (rows, siblings), model.dtype)
    return StateCache(*of_rows, *of_slots)


def in_pages(k: jax.Array, v: jax.Array) -> jax.Array:
    """Converts keys and values [.., K, C, A] of slots to pages [.., C / PAGE, K, PAGE, 2 A]. C is a
    multiple of PAGE."""
    both = jnp.concatenate([k, v], -1)
    width = both.shape[-1]
    by_page = both.reshape((*both.shape[:-2], -1, PAGE, width))
    return by_page.swapaxes(-4, -3)


def entries_at(x: jax.Array, *indices: jax.Array) -> jax.Array:
    """Returns x[rows] for indices [M] of the first axis of x, or x[rows, slots] for those of the
    first two, as an array whose first axis is M, at least 1; an index past the end reads the last
    entry. Uses slices, because XLA for TPU reads all of x if it gathers rows of a cache."""
    rest = x.shape[len(indices) :]
    # [1, .., 1, rest]: one entry, which keeps the axes that the index selects from
    sizes = (1,) * len(indices) + rest
    slices = []
    for index in zip(*indices, strict=True):
        slices.append(jax.lax.dynamic_slice(x, index + (0,) * len(rest), sizes))
    return jnp.concatenate(slices).reshape(len(slices), *rest)


def _put(index: Any, old: jax.Array, new: jax.Array) -> jax.Array:
    """Writes entries of an array at an index; nothing at one past the end."""
    return old.at[index].set(new.astype(old.dtype), mode="drop")


def _put_first_keys(old: jax.Array, new: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes keys or values new[R, T, K, A] to the first T positions of old[N, K, Tp, A] at
    rows[R]; of a T beyond Tp the first Tp. Keys beyond T keep their old values."""
    # The buckets of prompts are 64 x 2^n and may exceed the caches, which are sized by
    # max_prompt_tokens.
    size = min(new.shape[1], old.shape[2])
    return old.at[rows, :, :size].set(new[:, :size].swapaxes(1, 2), mode="drop")


def _axes(array: Any, heads_from_end: int = 0) -> tuple[str | None, ...]:
    """Returns the logical axes of a cache's array, whose heads are so many dimensions from its
    end; 0: it has none that are split."""
    named: list[str | None] = ["rows"] + [None] * (array.ndim - 1)
    if heads_from_end:
        named[-heads_from_end] = "heads"
    return tuple(named)


def _select_part(parts: int, keys: Any, part: jax.Array) -> Any:
    """Returns, of keys and values [R, T, K, A] in a tree, the positions of one part: the number of
    the part is part[0], and position p belongs to part p % `parts`."""

    def positions_of_part(new: jax.Array) -> jax.Array:
        """Returns this part's positions of [R, T, K, A]: [R, T / parts rounded up, K, A]."""
        filled = jnp.pad(new, ((0, 0), (0, -new.shape[1] % parts), (0, 0), (0, 0)))
        rows, _, heads, head_dim = new.shape
        by_part = filled.reshape(rows, -1, parts, heads, head_dim)
        return jax.lax.dynamic_index_in_dim(by_part, part[0], 2, keepdims=False)

    return jax.tree.map(positions_of_part, keys)


def on_tensor_devices(
    role: Role, function: Callable, specs: tuple, out: Any, *args: Any, parts: int
) -> Any:
    """Calls a function of arrays on each device of `tensor`, and returns its results; `specs` and
    `out` say how `args` and the results are split. If a head's positions are split over devices
    (`parts`, see `Model.key_parts_of`, is above 1), the function gets one more argument: the number
    of the device's part, int32[1]."""
    mesh = role.mesh
    if parts > 1:
        # As many entries as devices, or more heads than devices: each device gets its heads' parts.
        part = jnp.arange(role.tensor) % parts
        specs += (PartitionSpec("tensor"),)
        args += (part,)
    # All axes that are not manual already: in kernels for TPUs there may be no axis that XLA could
    # split.
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=specs,
        out_specs=out,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(*args)
