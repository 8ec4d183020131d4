"""The passes over tokens: what the tokens of each pass read of each other, for each kind of layer.

    PackedRows    rows of prompts and completions: training and scoring
    Prompts       prompts, which leave their keys or last states: prefill
    PrefillChunk  a chunk of long prompts, after the chunks before it: chunked prefill
    Slots         one token in each slot, after caches: decoding
    Context       tokens of context, such as a tool's answer, after a completion

`forward` and `block` take any of them, as the `AttentionPass` that they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from shoal.model.architecture import Layer
from shoal.model.attention.decode import (
    ContextAttention,
    PrefillChunkAttention,
    SlotAttention,
    SlotTokens,
)
from shoal.model.attention.selector import RowAttention, prompt_reads, row_attention, row_reads
from shoal.model.delta_net import chain_before
from shoal.model.recurrence import RowRecurrence, SequenceRecurrence, SlotRecurrence, step_of
from shoal.model.transformer import Model


@dataclass(frozen=True)
class PackedRows:
    """Rows of several sequences, in training and scoring. It leaves nothing."""

    model: Model
    # [R, T] each, those of a `LearnerBatch`; segment 0 is padding
    segment: jax.Array
    prompt: jax.Array
    reads: Any  # of `row_reads`
    chain: jax.Array | None  # of `chain_before`; None without delta nets

    @classmethod
    def of(
        cls,
        model: Model,
        segment: jax.Array,
        prompt: jax.Array,
        position: jax.Array,
        before: jax.Array,
    ) -> Self:
        """Finds what the tokens of rows [R, T] read. The arrays are those of a `LearnerBatch`."""
        reads = row_reads(model, segment, prompt, position)
        chain = None
        if model.architecture.delta_net:
            chain = chain_before(before, model.architecture.delta_net.conv_size - 1)
        return cls(model, segment, prompt, reads, chain)

    def attention(self, layer: Layer) -> RowAttention:
        return row_attention(self.model, layer, self.segment.shape, self.reads)

    def recurrence(self) -> RowRecurrence:
        return RowRecurrence(
            self.model.architecture.delta_net_sizes,
            self.model.role,
            self.segment,
            self.prompt,
            self.chain,
        )


@dataclass(frozen=True)
class Prompts:
    """Prompts that read themselves, in a prefill. Layers leave `PromptKeys` or a `State`."""

    model: Model
    length: jax.Array  # int32[R]
    size: int  # tokens of the padded prompts
    reads: Any  # of `prompt_reads`

    @classmethod
    def of(cls, model: Model, length: jax.Array, size: int) -> Self:
        """Finds what the tokens of prompts [R, `size`] of length[R] read."""
        return cls(model, length, size, prompt_reads(model, length, size))

    def attention(self, layer: Layer) -> RowAttention:
        shape = len(self.length), self.size
        return row_attention(self.model, layer, shape, self.reads, is_prefill=True)

    def recurrence(self) -> SequenceRecurrence:
        return SequenceRecurrence(
            self.model.architecture.delta_net_sizes, self.model.role, self.length
        )


@dataclass(frozen=True)
class PrefillChunk:
    """A chunk of prompts of length[R], in a prefill: `size` tokens of each, from position `start`
    on. Layers read and leave `PrefillChunkKeys` or a `State`."""

    model: Model
    length: jax.Array  # int32[R]
    start: jax.Array  # int32 scalar
    size: int
    block: int  # a divisor of `size`: how many queries attention computes at once

    def attention(self, layer: Layer) -> PrefillChunkAttention:
        return PrefillChunkAttention(self.model, layer, self.start, self.length.max(), self.block)

    def recurrence(self) -> SequenceRecurrence:
        count = jnp.clip(self.length - self.start, 0, self.size)
        return SequenceRecurrence(self.model.architecture.delta_net_sizes, self.model.role, count)


@dataclass(frozen=True)
class Slots:
    """One token in each of [N, W] slots, in decoding. Layers read and write their caches."""

    model: Model
    tokens: SlotTokens

    def attention(self, layer: Layer) -> SlotAttention:
        return SlotAttention(self.model, layer, self.tokens)

    def recurrence(self) -> SlotRecurrence:
        sizes = self.model.architecture.delta_net_sizes
        return SlotRecurrence(sizes, self.model.role, step_of(self.model), self.tokens.live)


@dataclass(frozen=True)
class Context:
    """Tokens of context after each of M completions. Layers read what `Cache.read_completions`
    returned, and leave what `Cache.write_completions` takes."""

    model: Model
    prefix_len: jax.Array  # int32[M]: lengths of the completions' prompts
    start: jax.Array  # int32[M]: tokens of the completion before the context
    count: jax.Array  # int32[M]: tokens of context; those behind them are padding

    def attention(self, layer: Layer) -> ContextAttention:
        return ContextAttention(self.model, layer, self.prefix_len, self.start)

    def recurrence(self) -> SequenceRecurrence:
        return SequenceRecurrence(
            self.model.architecture.delta_net_sizes, self.model.role, self.count
        )
