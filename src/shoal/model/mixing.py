"""The passes over tokens: what the tokens of each pass read of each other, for each kind of layer.

    row_mixing       packed rows of prompts and completions, in training and scoring
    prompt_mixing    prompts, whose keys or last states are the new caches: prefill
    piece_mixing     a piece of long prompts, after the pieces before it
    slot_mixing      one token in each slot, after caches: decoding
    context_mixing   tokens of context, such as a tool's answer, after a completion

`forward` and `block` take any of them as a `Mixing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shoal.model.architecture import DeltaNet, Layer
from shoal.model.attention import decode, selector
from shoal.model.block import Attention, Mixing, RecurrenceFn
from shoal.model.delta_net import chain_before
from shoal.model.recurrence import RowRecurrence, SequenceRecurrence, SlotRecurrence
from shoal.model.transformer import Model


@dataclass(frozen=True)
class _ByKind:
    """A `Mixing` made of two functions: of a kind of layer, and of the sizes of delta nets."""

    model: Model
    make_attention: Callable[[Layer], Attention]
    make_recurrence: Callable[[DeltaNet], RecurrenceFn]

    def attention(self, layer: Layer) -> Attention:
        """Returns the attention of a kind of layer."""
        return self.make_attention(layer)

    def recurrence(self, layer: Layer) -> RecurrenceFn:
        """Returns the recurrence of a kind of layer whose mixer is a delta net."""
        sizes = self.model.architecture.delta_net
        assert sizes is not None, "a pattern with delta nets has their sizes"
        return self.make_recurrence(sizes)


def row_mixing(model: Model, segment: jax.Array, prompt: jax.Array, position: jax.Array) -> Mixing:
    """Returns the `Mixing` of training and scoring, for rows of several sequences given by
    segment[R, T] (0 at padding), prompt[R, T] and position[R, T], which are those of a
    `LearnerBatch`. It returns no caches."""
    reads = selector.row_reads(model, segment, prompt, position)
    before = None
    if model.architecture.delta_net:
        before = chain_before(segment, prompt, model.architecture.delta_net.conv_size - 1)

    def attention(layer: Layer) -> Attention:
        return selector.row_attention(model, layer, segment.shape, reads)

    def recurrence(sizes: DeltaNet) -> RecurrenceFn:
        return RowRecurrence(sizes, model.role.platform, segment, prompt, before)

    return _ByKind(model, attention, recurrence)


def prompt_mixing(model: Model, length: jax.Array, size: int, reads: Any = ()) -> Mixing:
    """Returns the `Mixing` of a prefill: prompts [R, T] of length[R] read themselves, and their
    keys and values, or their last states, are the new caches. `size` is T. `reads` is what
    `selector.prompt_reads` returned, if an earlier program has computed it; the empty tuple means
    that it is computed here."""
    if not reads:
        reads = selector.prompt_reads(model, length, size)

    def attention(layer: Layer) -> Attention:
        return selector.row_attention(model, layer, (len(length), size), reads, is_prefill=True)

    def recurrence(sizes: DeltaNet) -> RecurrenceFn:
        return SequenceRecurrence(sizes, model.role.platform, length)

    return _ByKind(model, attention, recurrence)


def piece_mixing(
    model: Model, start: jax.Array, length: jax.Array, piece: int, block: int
) -> Mixing:
    """Returns the `Mixing` of a piece of prompts of length[R]: `piece` tokens of each, from
    position `start` on. `block` is as in `decode.PieceAttention`."""
    longest = length.max()

    def attention(layer: Layer) -> Attention:
        return decode.PieceAttention(model, layer, start, longest, block)

    def recurrence(sizes: DeltaNet) -> RecurrenceFn:
        count = jnp.clip(length - start, 0, piece)
        return SequenceRecurrence(sizes, model.role.platform, count)

    return _ByKind(model, attention, recurrence)


def slot_mixing(model: Model, slots: decode.SlotTokens) -> Mixing:
    """Returns the `Mixing` of decoding: one token for each of [N, W] slots."""

    def attention(layer: Layer) -> Attention:
        return decode.SlotAttention(model, layer, slots)

    def recurrence(sizes: DeltaNet) -> RecurrenceFn:
        return SlotRecurrence(sizes, model.role.platform, slots.live)

    return _ByKind(model, attention, recurrence)


def context_mixing(
    model: Model, prefix_len: jax.Array, start: jax.Array, count: jax.Array
) -> Mixing:
    """Returns the `Mixing` of C tokens of context for each of M completions, after start[M] tokens
    of the completion; the first count[M] are real."""

    def attention(layer: Layer) -> Attention:
        return decode.ContextAttention(model, layer, prefix_len, start)

    def recurrence(sizes: DeltaNet) -> RecurrenceFn:
        return SequenceRecurrence(sizes, model.role.platform, count)

    return _ByKind(model, attention, recurrence)
