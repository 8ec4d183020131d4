"""Packs groups into batches of fixed shape, and unpacks values by token.

A row holds one prompt and S slots, a slot one completion. Sizes are rounded up to a few buckets and batches are filled
up with empty rows, so that neither the number of groups nor their lengths compile anything anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shoal.types import Completion, Group


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LearnerBatch:
    """One micro-batch: R rows, each a prompt of up to Tp tokens and S slots of up to C.

    >>> batch.prefix[0, :3], batch.prefix_len[0]      # right-padded
    (array([5, 8, 13]), 3)
    >>> batch.segment[0, 0]                           # slot 0 of row 0 holds a completion of 3 tokens
    array([1, 1, 1, 0])
    """

    prefix: Any  # int32[R, Tp]
    prefix_len: Any  # int32[R]
    slots: Any  # int32[R, S, C]
    segment: Any  # int32[R, S, C]: 0 = padding, else the number of the completion within its slot, from 1
    loss_mask: Any  # bool[R, S, C]: the model sampled this token; only such tokens have loss, KL and entropy
    weight: Any  # float32[R, S, C]: of the token's loss; it holds aggregation and denominator of the whole update
    advantage: Any  # float32[R, S, C]
    sampler_logprobs: Any  # float32[R, S, C]: the sampler's
    old_logprobs: Any  # float32[R, S, C]: the trainer's before the first update on this batch
    ref_logprobs: Any  # float32[R, S, C]: the reference's
    temperature: Any  # float32[]
    support_ids: Any = None  # int32[R, S, C, K]: tokens that a truncating sampler chose from, -1 fills up


@dataclass(frozen=True)
class Shape:
    """Shape of every micro-batch of an update."""

    rows: int
    prefix: int
    slots: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * (self.prefix + self.slots * self.length)


Key = tuple[int, int]
"""(group, completion)"""

Position = tuple[int, int, int]
"""(row, slot, segment)"""

TokenValues = dict[Key, np.ndarray]
"""Values by token, float32[T] for each (group, completion)."""


@dataclass(frozen=True)
class MicroBatch:
    """A LearnerBatch of host arrays, and the position of each (group, completion) in it."""

    arrays: LearnerBatch
    positions: dict[Key, Position]

    def unpack(self, values: np.ndarray) -> TokenValues:
        """values[R, S, C] -> the values of each completion's tokens."""
        found = {}
        for key, (row, slot, segment) in self.positions.items():
            found[key] = values[row, slot][np.asarray(self.arrays.segment)[row, slot] == segment]
        return found


def bucket(size: int, smallest: int = 16) -> int:
    """The least of 16, 24, 32, 48, 64, 96, ... that holds `size`: at most a third is padding."""
    top = smallest
    while top < size:
        top *= 2
    return top * 3 // 4 if top > smallest and size <= top * 3 // 4 else top


def choose_shape(groups: Sequence[Group], num_prompts: int, group_size: int, micro_tokens: int,
                 row_shards: int) -> Shape:
    """The shape for an update on these groups, by the buckets of the longest prompt and the longest completion."""
    # By the longest of this step: a bound by history would make a resumed run compile, and sum, differently.
    prefix = bucket(max(len(g.prompt_ids) for g in groups))
    length = bucket(max((len(c) for g in groups for c in g.completions), default=1))
    return shape_of(prefix, length, num_prompts, group_size, micro_tokens, row_shards)


def shape_of(prefix: int, length: int, num_prompts: int, group_size: int, micro_tokens: int, row_shards: int) -> Shape:
    """The shape of micro-batches: as many rows as `micro_tokens` a device allows, at least one a device.

    A group whose completions do not fit one row gets several; its prompt is then computed once a row.
    """
    slots = _even(group_size, max(1, (micro_tokens - prefix) // length))
    rows = -(-num_prompts * -(-group_size // slots) // row_shards)
    return Shape(_even(rows, max(1, micro_tokens // (prefix + slots * length))) * row_shards, prefix, slots, length)


def _even(count: int, most: int) -> int:
    """The size, at most `most`, of equal parts of `count` with the least padding."""
    return -(-count // -(-count // most))


def pack(
    groups: Sequence[Group],
    include: Sequence[int],
    advantages: np.ndarray,
    weights: np.ndarray,
    shape: Shape,
    temperature: float,
    old_logprobs: TokenValues | None = None,
    ref_logprobs: TokenValues | None = None,
    teacher_bonus: TokenValues | None = None,
    max_support: int = 0,
) -> list[MicroBatch]:
    """Packs the groups numbered in `include` into micro-batches of one shape.

    `advantages[P, G]` and `weights[P, G]` are those of each token of a completion. Completions that are not valid are
    left out. `teacher_bonus` is added to the advantage of each token. `max_support` is K, the number of tokens recorded
    for a truncating sampler; 0 if it kept all. At least one micro-batch is returned: an update without rows applies a
    gradient of 0.
    """
    rows: list[tuple[int, list[int]]] = []
    for number in include:
        group = groups[number]
        # Completions without a reward have no advantage to learn from; an empty one has no token.
        members = [i for i in range(group.size) if group.valid[i] and len(group.completions[i])]
        rows.extend((number, members[start : start + shape.slots]) for start in range(0, len(members), shape.slots))
    batches = [_fill(groups, rows[start : start + shape.rows], shape, advantages=advantages, weights=weights,
                     temperature=temperature, max_support=max_support)
               for start in range(0, max(1, len(rows)), shape.rows)]
    for batch in batches:
        arrays = batch.arrays
        for key, (row, slot, _) in batch.positions.items():
            tokens = (row, slot, slice(0, len(groups[key[0]].completions[key[1]])))
            if old_logprobs:
                arrays.old_logprobs[tokens] = old_logprobs[key]
            if ref_logprobs:
                arrays.ref_logprobs[tokens] = ref_logprobs[key]
            if teacher_bonus:
                arrays.advantage[tokens] += teacher_bonus[key]
    return batches


def _fill(groups: Sequence[Group], rows: list[tuple[int, list[int]]], shape: Shape, *, advantages: np.ndarray,
          weights: np.ndarray, temperature: float, max_support: int) -> MicroBatch:
    grid = (shape.rows, shape.slots, shape.length)
    prefix, prefix_len = np.zeros((shape.rows, shape.prefix), np.int32), np.zeros(shape.rows, np.int32)
    slots, segment, loss_mask = np.zeros(grid, np.int32), np.zeros(grid, np.int32), np.zeros(grid, bool)
    weight, advantage, sampler_logprobs, old_logprobs, ref_logprobs = (np.zeros(grid, np.float32) for _ in range(5))
    support_ids = np.full((*grid, max_support), -1, np.int32) if max_support else None
    positions: dict[Key, Position] = {}
    for row, (number, members) in enumerate(rows):
        group = groups[number]
        prefix[row, : len(group.prompt_ids)], prefix_len[row] = group.prompt_ids, len(group.prompt_ids)
        for slot, index in enumerate(members):
            completion: Completion = group.completions[index]
            tokens = (row, slot, slice(0, len(completion)))
            slots[tokens], segment[tokens], loss_mask[tokens] = completion.token_ids, 1, completion.loss_mask
            weight[tokens] = weights[number, index] * completion.loss_mask
            advantage[tokens], sampler_logprobs[tokens] = advantages[number, index], completion.logprobs
            # The sampler's own set, not one recomputed from newer weights: that may leave the sampled token out.
            if support_ids is not None:
                ids = completion.extra["support_ids"]
                support_ids[(*tokens, slice(0, ids.shape[1]))] = ids
            positions[number, index] = (row, slot, 1)
    arrays = LearnerBatch(
        prefix=prefix, prefix_len=prefix_len, slots=slots, segment=segment, loss_mask=loss_mask, weight=weight,
        advantage=advantage, sampler_logprobs=sampler_logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
        temperature=np.float32(temperature), support_ids=support_ids)
    return MicroBatch(arrays, positions)
