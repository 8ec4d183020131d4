"""Packs groups into rows of tokens, and unpacks values by token.

A row is one stream of tokens: a prompt, completions of it, the next prompt, its completions, and
padding at the end. Rows have one length for a whole run, or a quarter, a sixteenth, ... of it where
an update has few tokens, and for what is left over at its end: the lengths of prompts and
completions compile nothing anew.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from shoal.records import Group


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LearnerBatch:
    """One micro-batch: R rows of T tokens. A segment is a prompt or a completion.

    >>> batch.segment[0]                     # a prompt of 2 tokens, two completions of it, padding
    array([1, 1, 2, 2, 2, 3, 3, 0])
    >>> batch.prompt[0]                      # whom each continues
    array([1, 1, 1, 1, 1, 1, 1, 0])
    >>> batch.position[0]
    array([0, 1, 2, 3, 4, 2, 3, 0])
    >>> batch.before[0]                      # a completion's first comes after the prompt's last
    array([0, 0, 1, 2, 3, 1, 5, 7])
    """

    tokens: Any  # int32[R, T]
    position: Any  # int32[R, T]: in its sequence, the prompt included
    # int32[R, T]: place in the row of the token before it in its sequence; its own where none is
    before: Any
    # int32[R, T]: 0 = padding, else the number of the token's prompt or completion in the row, from
    # 1
    segment: Any
    prompt: Any  # int32[R, T]: the segment of its prompt; of a prompt's token its own
    loss_mask: (
        Any  # bool[R, T]: the model sampled this token; only such tokens have loss, KL and entropy
    )
    # float32[R, T]: of the token's loss; it holds aggregation and denominator of the whole update
    weight: Any
    advantage: Any  # float32[R, T]
    sampler_logprobs: Any  # float32[R, T]: the sampler's
    old_logprobs: Any  # float32[R, T]: the trainer's before the first update on this batch
    ref_logprobs: Any  # float32[R, T]: the reference's
    temperature: Any  # float32[]
    support_ids: Any = (
        None  # int32[R, T, K]: tokens that a truncating sampler chose from, -1 fills up
    )


@dataclass(frozen=True)
class Shape:
    """Rows of a micro-batch, and the tokens of each."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


Key = tuple[int, int, int]
"""(group, completion, the first of its tokens): what follows one prompt"""

TokenValues = dict[tuple[int, int], np.ndarray]
"""Values by token, float32[T] for each (group, completion)."""


@dataclass(frozen=True)
class MicroBatch:
    """A LearnerBatch of host arrays that prompts and completions are added to, and where in it each
    completion is."""

    arrays: LearnerBatch
    used: list[int]  # tokens of each row so far
    positions: dict[Key, tuple[int, slice]] = field(
        default_factory=dict
    )  # the row of each, and its tokens there
    prompts: list[tuple[int, int]] = field(
        default_factory=list
    )  # tokens of each prompt, completions that follow it

    @classmethod
    def empty(cls, shape: Shape, temperature: float, max_support: int = 0) -> MicroBatch:
        grid = (shape.rows, shape.length)
        tokens, position, segment, prompt = (np.zeros(grid, np.int32) for _ in range(4))
        weight, advantage, sampler_logprobs, old_logprobs, ref_logprobs = (
            np.zeros(grid, np.float32) for _ in range(5)
        )
        return cls(
            LearnerBatch(
                tokens=tokens,
                position=position,
                before=np.tile(np.arange(shape.length, dtype=np.int32), (shape.rows, 1)),
                segment=segment,
                prompt=prompt,
                loss_mask=np.zeros(grid, bool),
                weight=weight,
                advantage=advantage,
                sampler_logprobs=sampler_logprobs,
                old_logprobs=old_logprobs,
                ref_logprobs=ref_logprobs,
                temperature=np.float32(temperature),
                support_ids=np.full((*grid, max_support), -1, np.int32) if max_support else None,
            ),
            [0] * shape.rows,
        )

    def add(self, row: int, prompt: np.ndarray, completions: Mapping[Key, np.ndarray]) -> None:
        """Adds a prompt and completions of it, token ids each, to a row."""
        batch, first = self.arrays, self.used[row]
        last, (number, _) = first + len(prompt) - 1, self._add(row, prompt, 0, first)
        for key, ids in completions.items():
            _, self.positions[key] = self._add(row, ids, len(prompt), last)
        batch.prompt[row, first : self.used[row]] = number
        self.prompts.append((len(prompt), len(completions)))

    def _add(
        self, row: int, ids: np.ndarray, position: int, before: int
    ) -> tuple[int, tuple[int, slice]]:
        """The number of a new segment in its row, and its place. `position` and `before` are those
        of its first token."""
        start, stop = self.used[row], self.used[row] + len(ids)
        place = (row, slice(start, stop))
        number = 1 + int(self.arrays.segment[row, start - 1]) if start else 1
        self.arrays.tokens[place], self.arrays.segment[place] = ids, number
        self.arrays.position[place] = np.arange(position, position + len(ids))
        self.arrays.before[place] -= 1  # each was its own
        self.arrays.before[row, start] = before
        self.used[row] = stop
        return number, place

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(self.used)


def unpack(batches: Iterable[MicroBatch], values: Iterable[np.ndarray]) -> TokenValues:
    """values[R, T] of each micro-batch -> the values of each completion's tokens, whatever prompts
    they follow."""
    found = {
        key: array[place]
        for batch, array in zip(batches, values, strict=True)
        for key, place in batch.positions.items()
    }
    whole: dict[tuple[int, int], list[np.ndarray]] = {}
    for key in sorted(found):
        whole.setdefault(key[:2], []).append(found[key])
    return {
        key: parts[0] if len(parts) == 1 else np.concatenate(parts) for key, parts in whole.items()
    }


NUM_SHAPES = 4
"""Shapes of micro-batches, each a program to compile; the smaller ones are for updates of few
tokens and for what is left over at an update's end."""


def row_unit(tokens: int) -> int:
    """What divides the length of a row of about so many tokens: attention works in blocks that
    divide it."""
    return min(256, 2 ** max(4, (tokens // 8).bit_length() - 1))


def row_shapes(
    longest: int,
    most: int,
    micro_tokens: int,
    row_shards: int,
    count: int = NUM_SHAPES,
    context: int = 1,
) -> tuple[Shape, ...]:
    """The shapes of micro-batches, the largest first: rows of `micro_tokens` a device, of a
    quarter, a sixteenth, ... of them. They depend on settings alone. `row_shards` parts of rows are
    on a device each, `context` of them a row.

    A row of the first holds `longest` tokens, a prompt with its completion, however few
    `micro_tokens` are. An update has at most `most` tokens, if it computes each prompt once; one
    micro-batch holds them where it may.
    """
    each = max(1, min(micro_tokens, -(-most // row_shards)))
    unit = row_unit(each)
    whole = max(min(-(-each // unit), micro_tokens // unit), -(-longest // (context * unit))) * unit
    lengths = {-(-whole // (16 * 4**number)) * 16: None for number in range(count)}
    return tuple(Shape(row_shards // context, length * context) for length in lengths)


def pack(
    groups: Sequence[Group],
    include: Iterable[int],
    advantages: np.ndarray,
    weights: np.ndarray,
    shapes: Sequence[Shape],
    temperature: float,
    old_logprobs: TokenValues | None = None,
    ref_logprobs: TokenValues | None = None,
    teacher_bonus: TokenValues | None = None,
    max_support: int = 0,
) -> list[MicroBatch]:
    """Packs the groups numbered in `include` into micro-batches of `shapes` (`row_shapes`).

    `advantages[P, G]` and `weights[P, G]` are those of each token of a completion. Completions that
    are not valid are left out. `teacher_bonus` is added to the advantage of each token.
    `max_support` is K, the number of tokens recorded for a truncating sampler; 0 if it kept all. At
    least one micro-batch is returned: an update without rows applies a gradient of 0.
    """
    sizes, prompts, places = {}, {}, dict[Key, slice]()
    for number in include:
        group = groups[number]
        for which, (prompt, followers) in enumerate(group.by_prompt()):
            # Completions without a reward have no advantage to learn from; an empty one has no
            # token.
            members = {
                (number, i, tokens.start): tokens
                for i, tokens in followers
                if group.valid[i] and tokens.stop > tokens.start
            }
            if members:
                sizes[number, which] = (
                    len(prompt),
                    {key: one.stop - one.start for key, one in members.items()},
                )
                prompts[number, which], places = prompt, places | members
    batches = []
    for shape, rows in in_batches(sizes, shapes):
        batch = MicroBatch.empty(shape, temperature, max_support)
        for row, content in enumerate(rows):
            for which, members in content.parts:
                batch.add(
                    row,
                    prompts[which],
                    {
                        key: groups[key[0]].completions[key[1]].token_ids[places[key]]
                        for key in members
                    },
                )
        batches.append(batch)
    for batch in batches:
        arrays = batch.arrays
        for part, place in batch.positions.items():
            key, tokens = part[:2], places[part]
            completion = groups[key[0]].completions[key[1]]
            loss_mask = completion.loss_mask[tokens]
            arrays.loss_mask[place], arrays.sampler_logprobs[place] = (
                loss_mask,
                completion.logprobs[tokens],
            )
            arrays.weight[place] = weights[key] * loss_mask
            arrays.advantage[place] = advantages[key]
            for values, array in (
                (old_logprobs, arrays.old_logprobs),
                (ref_logprobs, arrays.ref_logprobs),
                (teacher_bonus, arrays.advantage),
            ):
                if values:
                    array[place] += values[key][tokens]
            # The sampler's own set, not one recomputed from newer weights: that may leave the
            # sampled token out.
            if arrays.support_ids is not None:
                ids = completion.extra["support_ids"][tokens]
                arrays.support_ids[(*place, slice(0, ids.shape[1]))] = ids
    return batches


@dataclass
class Row:
    """What one row holds: completions of each of its prompts, by (prompt, numbers of
    completions)."""

    free: int
    parts: list[tuple[Any, list[Any]]] = field(default_factory=list)


class OpenRows:
    """Rows in the order that they were made, and an index of their free tokens: a search visits few
    of them."""

    def __init__(self, length: int):
        self.length = length
        self.rows: list[Row] = []
        self._by_free: list[tuple[int, int]] = []  # (free tokens, number of the row), sorted

    def add(self, number: int | None, group: Any, members: Iterable[Any], tokens: int) -> None:
        """Puts completions of a group into the row of this number, None for a new one."""
        if number is None:
            number = len(self.rows)
            self.rows.append(Row(self.length))
        else:
            del self._by_free[bisect_left(self._by_free, (self.rows[number].free, number))]
        row = self.rows[number]
        row.parts.append((group, sorted(members)))
        row.free -= tokens
        insort(self._by_free, (row.free, number))

    def tightest(self, tokens: int) -> int | None:
        """The row with the least room for so many tokens; None if none has."""
        found = bisect_left(self._by_free, (tokens, 0))
        return self._by_free[found][1] if found < len(self._by_free) else None

    def with_most_of(
        self, prompt: int, members: Mapping[Any, int]
    ) -> tuple[int | None, dict[Any, int]]:
        """The row that can take most tokens of a group's completions, and these: more than the
        prompt, which that row computes once more. None without such a row. Of equal rows the first
        is chosen."""
        best, chosen, most = (prompt, 1), {}, None
        stop, shortest = len(self._by_free), min(members.values())
        while stop:
            stop = bisect_left(self._by_free, (self._by_free[stop - 1][0], 0))
            free, number = self._by_free[
                stop
            ]  # the first row with so much room; the others would take the same
            if free - prompt < max(best[0], shortest):
                break
            taken = _that_fit(members, free - prompt)
            if (key := (sum(taken.values()), -number)) > best:
                best, chosen, most = key, taken, number
        return most, chosen


def fill_rows(sizes: Mapping[Any, tuple[int, Mapping[Any, int]]], length: int) -> list[Row]:
    """Rows of at most `length` tokens for groups: number, or what else is in an order -> (tokens of
    the prompt, tokens of each completion).

    Large groups first, each whole into the row that it leaves least room in (best fit decreasing).
    One that fits nowhere is divided, where a row has room for more of it than its prompt, which
    each row then computes once more.
    """
    rows = OpenRows(length)
    totals = {number: prompt + sum(members.values()) for number, (prompt, members) in sizes.items()}
    for number in sorted(sizes, key=lambda number: (-totals[number], number)):
        prompt, members = sizes[number]
        rest = dict(sorted(members.items(), key=lambda entry: (-entry[1], entry[0])))
        while rest:
            taken, row = rest, rows.tightest(prompt + sum(rest.values()))
            if row is None:
                row, taken = rows.with_most_of(prompt, rest)
            if row is None and not (taken := _that_fit(rest, length - prompt)):
                raise ValueError(
                    f"a prompt of {prompt} tokens with a completion of {min(rest.values())} does "
                    f"not fit "
                    f"rows of {length}"
                )
            rows.add(row, number, taken, prompt + sum(taken.values()))
            rest = {index: size for index, size in rest.items() if index not in taken}
    return rows.rows


def _that_fit(members: Mapping[Any, int], room: int) -> dict[Any, int]:
    """Those of a group's completions, in their order, that fit into so many tokens together."""
    taken: dict[Any, int] = {}
    for index, size in members.items():
        if size <= room:
            taken[index] = size
            room -= size
    return taken


LEAST_SAVED = 0.2
"""Share of an update's tokens that shorter rows must save: they are a program of their own to
compile."""

BATCH_TOKENS = 96
"""Tokens that could be computed in the time that a micro-batch more costs, on CPU."""

Batches = list[tuple[Shape, list[Row]]]


def in_batches(
    sizes: Mapping[Any, tuple[int, Mapping[Any, int]]], shapes: Sequence[Shape]
) -> Batches:
    """Rows for groups (`fill_rows`) by micro-batch, in the shapes that compute least."""
    longest = max((prompt + max(members.values()) for prompt, members in sizes.values()), default=0)

    least = sum(prompt + sum(members.values()) for prompt, members in sizes.values())

    def cost(batches: Batches) -> int:
        return sum(shape.tokens + BATCH_TOKENS for shape, _ in batches)

    chosen = _of_shape(fill_rows(sizes, shapes[0].length), shapes)
    for number, shape in enumerate(shapes[1:], 1):
        allowed = (1 - LEAST_SAVED) * cost(chosen)
        if shape.length >= longest and least <= allowed:
            other = _of_shape(fill_rows(sizes, shape.length), shapes[number:])
            chosen = other if cost(other) <= allowed else chosen
    return chosen


def _of_shape(rows: list[Row], shapes: Sequence[Shape]) -> Batches:
    """Rows in micro-batches of the first shape; the last one, of the emptiest rows, in the shortest
    that holds it."""
    rows = sorted(rows, key=lambda row: row.free)  # stable: equal rows stay in order
    whole = shapes[0]
    parts = [rows[start : start + whole.rows] for start in range(0, max(1, len(rows)), whole.rows)]
    used = max((whole.length - row.free for row in parts[-1]), default=0)
    shape = next(shape for shape in reversed(shapes) if shape.length >= used)
    if whole.tokens - shape.tokens < LEAST_SAVED * len(parts) * whole.tokens:
        shape = whole
    return [*((whole, part) for part in parts[:-1]), (shape, parts[-1])]
