"""Groups to batches of fixed shape: `LearnerBatch`, what enters the compiled update, and the way back.

A row holds one prompt and S slots, a slot one completion. Shapes come from a few buckets, rows are filled up with
empty ones, so that neither the number of groups nor their lengths compile anything anew.
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
    loss_mask: Any  # bool[R, S, C]: the model drew this token; only such tokens have loss, KL and entropy
    weight: Any  # float32[R, S, C]: of the token's loss; aggregation and denominator of the whole update are in it
    advantage: Any  # float32[R, S, C]
    sampler_logprobs: Any  # float32[R, S, C]: log-probs of the sampler
    old_logprobs: Any  # float32[R, S, C]: of the trainer before the first update on this batch
    ref_logprobs: Any  # float32[R, S, C]: of the reference
    temperature: Any  # float32[]
    support_ids: Any = None  # int32[R, S, C, K]: tokens that the sampler chose from, -1 for none; where it truncated


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

Place = tuple[int, int, int]
"""(row, slot, segment)"""

TokenValues = dict[Key, np.ndarray]
"""Values by token, float32[T] for each completion."""


@dataclass(frozen=True)
class MicroBatch:
    """A LearnerBatch of host arrays and where each (group, completion) lies in it."""

    arrays: LearnerBatch
    places: dict[Key, Place]

    def take(self, values: np.ndarray) -> TokenValues:
        """values[R, S, C] -> each completion's own, by (group, completion)."""
        found = {}
        for key, (row, slot, segment) in self.places.items():
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
    """The shape for an update on these groups: as many rows as `micro_tokens` a device allow, at least one a device.

    A group whose completions do not fit one row takes several; its prompt is then computed once a row.
    """
    prefix = bucket(max(len(g.prompt_ids) for g in groups))
    length = bucket(max((len(c) for g in groups for c in g.completions), default=1))
    slots = _even(group_size, max(1, (micro_tokens - prefix) // length))
    rows = -(-num_prompts * -(-group_size // slots) // row_shards)
    return Shape(_even(rows, max(1, micro_tokens // (prefix + slots * length))) * row_shards, prefix, slots, length)


def _even(count: int, most: int) -> int:
    """The size of equal parts, none above `most`, into which `count` falls with the least padding."""
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
    """Lays the groups numbered in `include` out in micro-batches of one shape.

    `advantages[P, G]`, `weights[P, G]` (of each token of a completion). Completions that are not valid are left out.
    `teacher_bonus` is added to the advantage of each token. `max_support`: K, places for the tokens that a truncating sampler
    chose from; 0 where it kept all. At least one micro-batch comes back: an update without rows applies a gradient of
    0.
    """
    rows: list[tuple[int, list[int]]] = []
    for number in include:
        group = groups[number]
        members = [i for i in range(group.size) if group.valid[i] and len(group.completions[i])]
        rows.extend((number, members[at : at + shape.slots]) for at in range(0, len(members), shape.slots))
    starts = range(0, max(1, len(rows)), shape.rows)
    batches = [_fill(groups, advantages, weights, shape, temperature, rows[at : at + shape.rows], max_support)
               for at in starts]
    for batch in batches:
        for values, target in ((old_logprobs, batch.arrays.old_logprobs), (ref_logprobs, batch.arrays.ref_logprobs), (teacher_bonus, batch.arrays.advantage)):
            for key, (row, slot, _) in batch.places.items() if values else ():
                assert values is not None
                target[row, slot, : len(values[key])] += values[key]  # old and ref are 0 so far
    return batches


def _fill(groups: Sequence[Group], advantages: np.ndarray, weights: np.ndarray, shape: Shape, temperature: float,
          rows: list[tuple[int, list[int]]], max_support: int) -> MicroBatch:
    grid = (shape.rows, shape.slots, shape.length)
    prefix, prefix_len = np.zeros((shape.rows, shape.prefix), np.int32), np.zeros(shape.rows, np.int32)
    slots, segment, loss_mask = np.zeros(grid, np.int32), np.zeros(grid, np.int32), np.zeros(grid, bool)
    weight, advantage, sampler_logprobs, old_logprobs, ref_logprobs = (np.zeros(grid, np.float32) for _ in range(5))
    support_ids = np.full((*grid, max_support), -1, np.int32) if max_support else None
    places: dict[Key, Place] = {}
    for row, (number, members) in enumerate(rows):
        group = groups[number]
        prefix[row, : len(group.prompt_ids)], prefix_len[row] = group.prompt_ids, len(group.prompt_ids)
        for slot, index in enumerate(members):
            completion: Completion = group.completions[index]
            at = (row, slot, slice(0, len(completion)))
            slots[at], segment[at], loss_mask[at] = completion.token_ids, 1, completion.loss_mask
            weight[at] = weights[number, index] * completion.loss_mask
            advantage[at], sampler_logprobs[at] = advantages[number, index], completion.logprobs
            if support_ids is not None:
                names = completion.extra["support_ids"]
                support_ids[(*at, slice(0, names.shape[1]))] = names
            places[number, index] = (row, slot, 1)
    arrays = LearnerBatch(prefix, prefix_len, slots, segment, loss_mask, weight, advantage, sampler_logprobs, old_logprobs, ref_logprobs,
                          np.float32(temperature), support_ids)
    return MicroBatch(arrays, places)
