"""Packs groups into rows of tokens, and unpacks values of tokens from rows.

A row is one stream of tokens: a prompt, completions of it, the next prompt, its completions, and
padding at the end. All rows of a run have one length; or a quarter, a sixteenth, ... of it if an
update has few tokens, and for what is left over at an update's end. So the lengths of prompts and
completions never lead to another compilation.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from shoal.records import Completion, Group, ShoalError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ValueTargets:
    """What a critic learns of a micro-batch, [R, T], or of one completion, [T]: of each token that
    begins a time step, the value of what is before it."""

    values: Any  # float32[R, T]: what it said before the first update on this batch
    returns: Any  # float32[R, T]: what it learns to say
    # float32[R, T]: factor of the loss, which includes the denominator of the whole update; 0
    # wherever no time step begins
    weight: Any

    @classmethod
    def empty(cls, shape: Shape) -> ValueTargets:
        """Returns targets of host arrays without any time step."""
        grid = (shape.rows, shape.length)
        return cls(
            values=np.zeros(grid, np.float32),
            returns=np.zeros(grid, np.float32),
            weight=np.zeros(grid, np.float32),
        )


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
    position: Any  # int32[R, T]: position in its sequence, which includes the prompt
    # int32[R, T]: index in the row of the token's predecessor in its sequence; its own index if it
    # has none
    before: Any
    # int32[R, T]: 0 = padding, else the number of the token's prompt or completion in the row,
    # counted from 1
    segment: Any
    prompt: Any  # int32[R, T]: the segment of its prompt; for a prompt's token its own segment
    # bool[R, T]: True if the model sampled the token; only such tokens have an advantage, KL and
    # entropy
    loss_mask: Any
    # float32[R, T]: factor of the token's loss, which includes aggregation and denominator of the
    # whole update; of context above 0 only if it is learned (algorithm.context_coef)
    weight: Any
    advantage: Any  # float32[R, T]
    sampler_logprobs: Any  # float32[R, T]: log-probs by the sampler
    # float32[R, T]: log-probs by the trainer before the first update on this batch
    old_logprobs: Any
    ref_logprobs: Any  # float32[R, T]: log-probs by the reference
    temperature: Any  # float32[]
    # int32[R, T, K]: the tokens that a truncating sampler chose from, filled up with -1; None if it
    # did not truncate
    support_ids: Any = None
    # int16[R, T, layers with experts, k]: the experts that the sampler sent each token to, which
    # the policy uses again; -1 where it chooses them itself. None: everywhere.
    experts: Any = None
    # `ValueTargets` of a critic; None: the batch is the policy's, or has no critic
    targets: Any = None
    # int32[R, T]: of rows with a teacher's own prompts, where in its row the teacher is before the
    # token that the policy's rows have here. None: the teacher reads the policy's rows.
    read_at: Any = None

    def of_policy(self) -> LearnerBatch:
        """Returns the batch as the policy learns it: without what a critic learns."""
        return replace(self, targets=None)

    def of_critic(self) -> LearnerBatch:
        """Returns the batch as a critic learns it that has layers of its own, and chooses its own
        experts: without what the sampler recorded."""
        return replace(self, support_ids=None, experts=None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TeacherStates:
    """What a teacher says of each token of a micro-batch, over its whole vocabulary: its hidden
    states, from which its head computes logits where they are needed, a few tokens at a time."""

    states: Any  # [R, T, D of the teacher]: its hidden state before each token
    head: Any  # `Parameters` with the teacher's head alone, on the trainer's devices
    model: Any = field(metadata={"static": True})  # the teacher's `Model`, on the trainer's role


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TeacherTop:
    """What a teacher says of each token of a micro-batch, of the tokens that it finds likeliest."""

    ids: Any  # int32[R, T, K]: these tokens
    logprobs: Any  # float32[R, T, K + 1]: log-probs of these, and of all others together


@dataclass(frozen=True)
class Shape:
    """The shape of a micro-batch: its rows, and the tokens of each row."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch, padding included."""
        return self.rows * self.length


Key = tuple[int, int, int]
"""(group, completion, index of its first token): a part of a completion that follows one prompt"""

TokenValues = dict[tuple[int, int], np.ndarray]
"""Values of tokens: float32[T] for each (group, completion)."""


@dataclass(frozen=True)
class MicroBatch:
    """A LearnerBatch of host arrays, to which prompts and completions are added, and the places of
    the completions in it."""

    arrays: LearnerBatch
    used: list[int]  # tokens in each row so far
    # Part of a completion -> (its row, the slice of its tokens there).
    positions: dict[Key, tuple[int, slice]] = field(default_factory=dict)
    # For each prompt: (its tokens, the number of completions that follow it).
    prompts: list[tuple[int, int]] = field(default_factory=list)
    teacher: str = ""  # name of the teacher of all its groups
    # the same completions in the same rows, after the teacher's own prompts; None: it has none
    teacher_rows: MicroBatch | None = None

    @classmethod
    def empty(
        cls,
        shape: Shape,
        temperature: float,
        max_support: int = 0,
        route_shape: tuple[int, int] | None = None,
    ) -> MicroBatch:
        """Returns a micro-batch that is all padding. `max_support` is the K of `support_ids`; 0 for
        none. `route_shape` is the (layers with experts, k) of `experts`; None for none."""
        grid = (shape.rows, shape.length)
        support_ids = None
        if max_support:
            support_ids = np.full((shape.rows, shape.length, max_support), -1, np.int32)
        experts = None
        if route_shape:
            experts = np.full((*grid, *route_shape), -1, np.int16)
        arrays = LearnerBatch(
            tokens=np.zeros(grid, np.int32),
            position=np.zeros(grid, np.int32),
            before=np.tile(np.arange(shape.length, dtype=np.int32), (shape.rows, 1)),
            segment=np.zeros(grid, np.int32),
            prompt=np.zeros(grid, np.int32),
            loss_mask=np.zeros(grid, bool),
            weight=np.zeros(grid, np.float32),
            advantage=np.zeros(grid, np.float32),
            sampler_logprobs=np.zeros(grid, np.float32),
            old_logprobs=np.zeros(grid, np.float32),
            ref_logprobs=np.zeros(grid, np.float32),
            temperature=np.float32(temperature),
            support_ids=support_ids,
            experts=experts,
        )
        return cls(arrays, [0] * shape.rows)

    def add(
        self,
        row: int,
        prompt: np.ndarray,
        completions: Mapping[Key, np.ndarray],
        prompt_experts: np.ndarray | None = None,
    ) -> None:
        """Adds a prompt and completions of it, each as token ids, to a row. The row must have room
        for all of them. Notes in `positions` where the tokens of each completion are, and counts
        the row's tokens in `used`. Of the arrays, only tokens, position, before, segment and prompt
        are set, and of the prompt's tokens the `prompt_experts`[Tp, layers, k], if there are
        any."""
        first_token = self.used[row]
        last_token = first_token + len(prompt) - 1
        segment, prompt_place = self._add(row, prompt, 0, first_token)
        if prompt_experts is not None:
            self.arrays.experts[prompt_place] = prompt_experts
        for key, ids in completions.items():
            _, self.positions[key] = self._add(row, ids, len(prompt), last_token)
        self.arrays.prompt[row, first_token : self.used[row]] = segment
        self.prompts.append((len(prompt), len(completions)))

    def _add(
        self, row: int, ids: np.ndarray, position: int, before: int
    ) -> tuple[int, tuple[int, slice]]:
        """Adds a segment to a row, and returns (its number in the row, counted from 1; where its
        tokens are, as (row, slice)). `position` and `before` are those of the segment's first
        token; each further token follows the one before it."""
        start = self.used[row]
        stop = start + len(ids)
        tokens = (row, slice(start, stop))
        segment = 1
        if start > 0:
            segment = 1 + int(self.arrays.segment[row, start - 1])
        self.arrays.tokens[tokens] = ids
        self.arrays.segment[tokens] = segment
        self.arrays.position[tokens] = np.arange(position, position + len(ids))
        self.arrays.before[tokens] -= 1  # until here each token's predecessor was itself
        self.arrays.before[row, start] = before
        self.used[row] = stop
        return segment, tokens

    def sequence(self, key: Key) -> tuple[np.ndarray, int]:
        """Returns (the token ids of a completion's part after those of its prompt, int32[N]; how
        many of them are the prompt's)."""
        row, columns = self.positions[key]
        arrays = self.arrays
        in_prompt = arrays.segment[row] == arrays.prompt[row, columns.start]
        prompt = arrays.tokens[row, in_prompt]
        return np.concatenate([prompt, arrays.tokens[row, columns]]), len(prompt)

    def with_own_routes(self) -> MicroBatch:
        """Returns the micro-batch for a model that chooses all experts itself."""
        return replace(self, arrays=replace(self.arrays, experts=None))

    def of_teacher(self) -> MicroBatch:
        """Returns the micro-batch as its teacher reads it: after prompts of its own, if it has
        any."""
        return (self.teacher_rows or self).with_own_routes()

    def read_by_teacher(self) -> None:
        """Sets `read_at` of `teacher_rows`, which must be there, from the places of completions in
        both."""
        theirs = self.teacher_rows
        assert theirs is not None, "the teacher has prompts of its own"
        for key, slots in self.positions.items():
            theirs.arrays.read_at[slots] = theirs.arrays.before[theirs.positions[key]]

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(self.used)


def unpack(batches: Iterable[MicroBatch], values: Iterable[np.ndarray]) -> TokenValues:
    """Returns the values of each completion's tokens, cut out of `values`, which has an array [R,
    T] for each micro-batch, in the same order. The inverse of what `pack` does with values by
    token. A completion that follows several prompts (its history was rewritten) was packed in
    parts, which are joined again."""
    by_key: dict[Key, np.ndarray] = {}
    for batch, array in zip(batches, values, strict=True):
        for key, tokens in batch.positions.items():
            by_key[key] = array[tokens]
    # The parts of a completion in the order of its tokens: keys end with the part's first token.
    parts_of: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
    for key in sorted(by_key):
        group, completion, _ = key
        parts_of[group, completion].append(by_key[key])
    whole: TokenValues = {}
    for completion_key, parts in parts_of.items():
        if len(parts) == 1:
            whole[completion_key] = parts[0]
        else:
            whole[completion_key] = np.concatenate(parts)
    return whole


NUM_SHAPES = 4
"""Most shapes of micro-batches of a run, each with a program to compile. The smaller ones are for
updates of few tokens and for what is left over at an update's end."""


def row_unit(tokens: int) -> int:
    """Returns the number that the length of a row must be a multiple of, for rows of about `tokens`
    tokens: attention works in blocks, and the length must consist of whole blocks. It is a power of
    2 from 16 to 256, about an eighth of the row."""
    # The largest power of 2 that is at most an eighth of `tokens`, within 16 and 256.
    return min(256, 2 ** max(4, (tokens // 8).bit_length() - 1))


def row_shapes(
    longest: int,
    most: int,
    micro_tokens: int,
    row_shards: int,
    count: int = NUM_SHAPES,
    context: int = 1,
) -> tuple[Shape, ...]:
    """Returns the shapes of micro-batches, the largest first: rows of `micro_tokens` tokens a
    device, then of a quarter, a sixteenth, ... of them, `count` shapes at most. They depend on
    settings alone.

    A micro-batch is split into `row_shards` parts, one on each device; a row consists of `context`
    such parts. Rows of the first shape hold `longest` tokens, a prompt with its completion, even if
    `micro_tokens` is smaller. `most` is the number of tokens of the largest update, if each prompt
    is computed once; one micro-batch holds them if `micro_tokens` allows.
    """
    # -(-a // b) is a / b rounded up, here and below.
    tokens_per_device = max(1, min(micro_tokens, -(-most // row_shards)))
    unit = row_unit(tokens_per_device)
    # In units: enough for the update's tokens, but not above `micro_tokens`, except that `longest`
    # must fit.
    units_filled = min(-(-tokens_per_device // unit), micro_tokens // unit)
    units_of_longest = -(-longest // (context * unit))
    largest = max(units_filled, units_of_longest) * unit
    shapes: list[Shape] = []
    for number in range(count):
        # largest / 4**number, rounded up to a multiple of 16
        length = -(-largest // (16 * 4**number)) * 16
        shape = Shape(row_shards // context, length * context)
        if shape not in shapes:
            shapes.append(shape)
    return tuple(shapes)


@dataclass(frozen=True)
class BatchLayout:
    """The layout of an update's micro-batches: what does not depend on the groups in them."""

    shapes: Sequence[Shape]  # the largest first
    temperature: float
    max_support: int = 0  # the most tokens that a truncating sampler recorded; 0 if it kept all
    # (layers with experts, k): the recorded experts of tokens are used again. None: the model
    # chooses them itself.
    route_shape: tuple[int, int] | None = None


@dataclass(frozen=True)
class TokenTerms:
    """What enters the loss of the tokens of some groups, besides what the sampler recorded."""

    # float[P, G], one number for all tokens of a completion; or [P, G, K], one for each of its
    # turns
    advantages: np.ndarray
    weights: np.ndarray  # of the same shape
    # float[P, G]: weights of the tokens that the model did not sample; None: they have none
    context_weights: np.ndarray | None = None
    old_logprobs: TokenValues | None = None  # None: 0
    ref_logprobs: TokenValues | None = None  # None: 0
    # These two are added to the advantage of each token.
    teacher_bonus: TokenValues | None = None
    token_advantages: TokenValues | None = None
    # what a critic learns of each (group, completion); None: there is no critic
    targets: Mapping[tuple[int, int], ValueTargets] | None = None


@dataclass(frozen=True)
class _Prompt:
    """A prompt of a group, and the completions or parts of completions that follow it."""

    token_ids: np.ndarray
    experts: np.ndarray | None  # recorded experts of its tokens
    completions: dict[Key, slice]  # of each part: where its tokens are in its completion

    @property
    def lengths(self) -> dict[Key, int]:
        """Tokens of each part."""
        return {key: tokens.stop - tokens.start for key, tokens in self.completions.items()}


PromptKey = tuple[int, int]
"""(group, prompt of the group)"""


def pack(
    groups: Sequence[Group],
    include: Iterable[int],
    terms: TokenTerms,
    layout: BatchLayout,
    teacher_prompts: Mapping[int, np.ndarray] | None = None,
) -> list[MicroBatch]:
    """Packs the groups numbered in `include`, from 0, into micro-batches, and returns these.

    Completions that are not valid, or have no tokens, are left out. If `layout.max_support` is
    above 0, each completion must have `extra["support_ids"]`; with `layout.route_shape`,
    `extra["experts"]` of that shape (ShoalError). `teacher_prompts` are the prompts that a teacher
    reads in place of the groups', by the group's number: each micro-batch then has `teacher_rows`,
    and the longer of the two prompts must fit. At least one micro-batch is returned: an update
    without rows applies a gradient of 0. Raises ValueError if a prompt with one of its completions
    fits no row of the first shape."""
    prompts = _prompts_to_pack(groups, include, layout.route_shape)
    sizes: dict[PromptKey, tuple[int, dict[Key, int]]] = {}
    for prompt_key, prompt in prompts.items():
        room = len(prompt.token_ids)
        if teacher_prompts is not None:
            group_index, _ = prompt_key
            room = max(room, len(teacher_prompts[group_index]))
        sizes[prompt_key] = (room, prompt.lengths)
    tokens_of: dict[Key, slice] = {}
    for prompt in prompts.values():
        tokens_of.update(prompt.completions)
    batches = []
    for shape, rows in split_into_micro_batches(sizes, layout.shapes):
        batch = _empty_batch(
            shape,
            layout,
            has_targets=terms.targets is not None,
            has_teacher_rows=teacher_prompts is not None,
        )
        for row, content in enumerate(rows):
            for prompt_key, keys in content.parts:
                completions: dict[Key, np.ndarray] = {}
                for key in keys:
                    group_index, completion_index, _ = key
                    completion = groups[group_index].completions[completion_index]
                    completions[key] = completion.token_ids[tokens_of[key]]
                prompt = prompts[prompt_key]
                batch.add(row, prompt.token_ids, completions, prompt.experts)
                if batch.teacher_rows is not None and teacher_prompts is not None:
                    group_index, _ = prompt_key
                    batch.teacher_rows.add(row, teacher_prompts[group_index], completions)
        if batch.teacher_rows is not None:
            batch.read_by_teacher()
        for key in batch.positions:
            group_index, completion_index, _ = key
            completion = groups[group_index].completions[completion_index]
            _set_terms(batch, key, completion, tokens_of[key], terms)
            _set_records(batch, key, completion, tokens_of[key])
        batches.append(batch)
    return batches


def _prompts_to_pack(
    groups: Sequence[Group], include: Iterable[int], route_shape: tuple[int, int] | None
) -> dict[PromptKey, _Prompt]:
    """Returns the prompts of the groups numbered in `include` with the completions to learn from;
    prompts without any are left out. ShoalError if `route_shape` is given, and a completion has no
    experts of that shape."""
    prompts: dict[PromptKey, _Prompt] = {}
    for group_index in include:
        group = groups[group_index]
        experts_of = group.experts_by_prompt() if route_shape else {}
        for prompt_index, (token_ids, followers) in enumerate(group.by_prompt()):
            completions: dict[Key, slice] = {}
            for completion_index, tokens in followers:
                # A completion without a reward has no advantage to learn from.
                if not group.valid[completion_index]:
                    continue
                if tokens.stop > tokens.start:
                    if route_shape:
                        _check_experts(group.completions[completion_index], route_shape)
                    completions[group_index, completion_index, tokens.start] = tokens
            if completions:
                prompts[group_index, prompt_index] = _Prompt(
                    token_ids, experts_of.get(token_ids.tobytes()), completions
                )
    return prompts


def _empty_batch(
    shape: Shape, layout: BatchLayout, has_targets: bool, has_teacher_rows: bool
) -> MicroBatch:
    """Returns a micro-batch that is all padding, with the arrays that an update needs."""
    batch = MicroBatch.empty(shape, layout.temperature, layout.max_support, layout.route_shape)
    if has_targets:
        arrays = replace(batch.arrays, targets=ValueTargets.empty(shape))
        batch = replace(batch, arrays=arrays)
    if has_teacher_rows:
        theirs = MicroBatch.empty(shape, layout.temperature, layout.max_support)
        arrays = replace(theirs.arrays, read_at=np.zeros_like(theirs.arrays.before))
        batch = replace(batch, teacher_rows=replace(theirs, arrays=arrays))
    return batch


def _set_terms(
    batch: MicroBatch, key: Key, completion: Completion, tokens: slice, terms: TokenTerms
) -> None:
    """Sets what enters the loss of some tokens of a completion, which `key` names in the batch."""
    arrays = batch.arrays
    slots = batch.positions[key]
    group_index, completion_index, _ = key
    completion_key = (group_index, completion_index)
    loss_mask = completion.loss_mask[tokens]
    weight = _by_token(terms.weights[completion_key], completion, tokens)
    arrays.weight[slots] = weight * loss_mask
    if terms.context_weights is not None:
        arrays.weight[slots] += terms.context_weights[completion_key] * ~loss_mask
    arrays.advantage[slots] = _by_token(terms.advantages[completion_key], completion, tokens)
    if terms.teacher_bonus:
        arrays.advantage[slots] += terms.teacher_bonus[completion_key][tokens]
    if terms.token_advantages:
        arrays.advantage[slots] += terms.token_advantages[completion_key][tokens]
    if terms.old_logprobs:
        arrays.old_logprobs[slots] = terms.old_logprobs[completion_key][tokens]
    if terms.ref_logprobs:
        arrays.ref_logprobs[slots] = terms.ref_logprobs[completion_key][tokens]
    if terms.targets:
        target = terms.targets[completion_key]
        arrays.targets.values[slots] = target.values[tokens]
        arrays.targets.returns[slots] = target.returns[tokens]
        arrays.targets.weight[slots] = target.weight[tokens]


def _set_records(batch: MicroBatch, key: Key, completion: Completion, tokens: slice) -> None:
    """Sets what the sampler recorded of some tokens of a completion, which `key` names in the
    batch."""
    arrays = batch.arrays
    row, columns = batch.positions[key]
    loss_mask = completion.loss_mask[tokens]
    arrays.loss_mask[row, columns] = loss_mask
    arrays.sampler_logprobs[row, columns] = completion.logprobs[tokens]
    if arrays.support_ids is not None:
        # The set that the sampler recorded, not one recomputed from newer weights, which may
        # leave the sampled token out. Context was chosen from no set.
        support_ids = completion.extra["support_ids"][tokens]
        support_ids = np.where(loss_mask[:, None], support_ids, -1)
        num_ids = support_ids.shape[1]
        arrays.support_ids[row, columns, :num_ids] = support_ids
        if batch.teacher_rows is not None:
            teacher_row, teacher_columns = batch.teacher_rows.positions[key]
            of_teacher = batch.teacher_rows.arrays.support_ids
            of_teacher[teacher_row, teacher_columns, :num_ids] = support_ids
    if arrays.experts is not None:
        # The last token was never computed by the sampler, and nothing reads its state.
        computed = slice(columns.start, columns.stop - 1)
        arrays.experts[row, computed] = completion.extra["experts"][tokens][:-1]


def _by_token(values: np.ndarray, completion: Completion, tokens: slice) -> np.ndarray:
    """Returns the values of some tokens of a completion. `values` is one number for all tokens,
    which is returned itself, or has a number for each turn; tokens of context then have 0."""
    if np.ndim(values) == 0:
        return values
    by_token = np.zeros(len(completion))
    # `values` are as many as the longest completion of the step has turns.
    for value, turn in zip(values, completion.turns, strict=False):
        by_token[turn] = value
    return by_token[tokens]


def _check_experts(completion: Completion, route_shape: tuple[int, int]) -> None:
    """Raises ShoalError unless the experts of a completion's tokens are recorded, (layers with
    experts, k) = `route_shape` of each."""
    experts = completion.extra.get("experts")
    if experts is None:
        raise ShoalError(
            "model.router_replay=on: a completion has no record of its tokens' experts, because "
            "it was sampled without model.router_replay, or by something else; give "
            "model.router_replay=off",
            "model.router_replay",
        )
    if experts.shape[1:] != route_shape:
        raise ShoalError(
            f"model.router_replay=on: (layers with experts, experts of a token) are "
            f"{experts.shape[1:]} in a completion, {route_shape} in the model: another model has "
            "sampled it",
            "model.router_replay",
        )


@dataclass
class Row:
    """The content of one row: `free` tokens, and for each prompt (key of the prompt, sorted keys of
    the completions that follow it there)."""

    free: int
    parts: list[tuple[Any, list[Any]]] = field(default_factory=list)


class OpenRows:
    """Rows in the order in which they were made, with an index by free tokens, so that a search
    visits few rows."""

    def __init__(self, length: int):
        self.length = length
        self.rows: list[Row] = []
        self._by_free: list[tuple[int, int]] = []  # (free tokens, number of the row), sorted

    def add(self, number: int | None, group: Any, members: Iterable[Any], tokens: int) -> None:
        """Puts some completions of a group, and the group's prompt before them, into the row of
        this number, counted from 0 (None: into a new row). The row must have as many free tokens;
        this is not checked. `group` is the key of the prompt. `tokens` is the sum of the prompt's
        and the completions' tokens."""
        if number is None:
            number = len(self.rows)
            self.rows.append(Row(self.length))
        else:
            # the row's entry with its free tokens until now
            del self._by_free[bisect_left(self._by_free, (self.rows[number].free, number))]
        row = self.rows[number]
        row.parts.append((group, sorted(members)))
        row.free -= tokens
        insort(self._by_free, (row.free, number))

    def tightest_row(self, tokens: int) -> int | None:
        """Returns the number of the row with the least free tokens that still has `tokens` of them;
        None if no row has. Of equal rows it is the first."""
        first = bisect_left(self._by_free, (tokens, 0))
        if first == len(self._by_free):
            return None
        _, number = self._by_free[first]
        return number

    def row_for_most_of(
        self, prompt: int, members: Mapping[Any, int]
    ) -> tuple[int | None, dict[Any, int]]:
        """Returns (number of the row that can take the most tokens of a group's completions, the
        completions that it can take with their lengths). `members` maps each completion of the
        group, of which there is at least one, to its length; `prompt` is the number of the prompt's
        tokens, which every row of a divided group computes once more. Returns (None, {}) if no row
        can take more completion tokens than the prompt has. Of equal rows the first is chosen."""
        best_row: int | None = None
        best_taken: dict[Any, int] = {}
        # (tokens taken, minus the row's number). The 1 is above every row's: a row must take more
        # tokens than the prompt has.
        best_rank = (prompt, 1)
        shortest = min(members.values())
        # From the rows with the most free tokens down.
        stop = len(self._by_free)
        while stop > 0:
            # The first row with so many free tokens; other rows with as many could take no more.
            most_free, _ = self._by_free[stop - 1]
            stop = bisect_left(self._by_free, (most_free, 0))
            free, number = self._by_free[stop]
            room = free - prompt
            most_taken, _ = best_rank
            # The rows that follow have less room: none can take more, or anything at all.
            if room < max(most_taken, shortest):
                break
            taken = _completions_that_fit(members, room)
            rank = (sum(taken.values()), -number)
            if rank > best_rank:
                best_row = number
                best_taken = taken
                best_rank = rank
        return best_row, best_taken


def fill_rows(sizes: Mapping[Any, tuple[int, Mapping[Any, int]]], length: int) -> list[Row]:
    """Returns rows of at most `length` tokens that hold all groups. `sizes` maps a group's number,
    or any other key that can be sorted, to (tokens of its prompt, completion -> its tokens); a
    group without completions is left out.

    Large groups come first, each whole into the row that it leaves the least free tokens in (best
    fit decreasing). A group that fits nowhere is divided if a row has free tokens for more of it
    than its prompt, which each of its rows then computes once more. Raises ValueError if a prompt
    with its shortest remaining completion does not fit an empty row.
    """
    rows = OpenRows(length)

    def largest_first(number: Any) -> tuple[int, Any]:
        prompt, members = sizes[number]
        return -(prompt + sum(members.values())), number

    def longest_first(member: tuple[Any, int]) -> tuple[int, Any]:
        index, size = member
        return -size, index

    for number in sorted(sizes, key=largest_first):
        prompt, members = sizes[number]
        rest = dict(sorted(members.items(), key=longest_first))
        while rest:
            taken = rest
            # First choice: the rest goes whole into the row that it fills best. Second: a part of
            # it into an open row. Third: as much as fits into a new row (`row` None).
            row = rows.tightest_row(prompt + sum(rest.values()))
            if row is None:
                row, taken = rows.row_for_most_of(prompt, rest)
            if row is None:
                taken = _completions_that_fit(rest, length - prompt)
                if not taken:
                    raise ValueError(
                        f"a prompt of {prompt} tokens with a completion of {min(rest.values())} "
                        f"does not fit rows of {length}"
                    )
            rows.add(row, number, taken, prompt + sum(taken.values()))
            rest = {index: size for index, size in rest.items() if index not in taken}
    return rows.rows


def _completions_that_fit(members: Mapping[Any, int], room: int) -> dict[Any, int]:
    """Returns the completions that fit into `room` tokens together, taken in their order; one that
    is longer than what is left is skipped. {} if none fits."""
    taken: dict[Any, int] = {}
    for index, size in members.items():
        if size <= room:
            taken[index] = size
            room -= size
    return taken


LEAST_SAVED = 0.2
"""Share of an update's tokens that shorter rows must save to be used: they need another program,
which must be compiled."""

BATCH_TOKENS = 96
"""Tokens that could be computed, on CPU, in the time that one more micro-batch costs."""

Batches = list[tuple[Shape, list[Row]]]


def split_into_micro_batches(
    sizes: Mapping[Any, tuple[int, Mapping[Any, int]]], shapes: Sequence[Shape]
) -> Batches:
    """Returns the micro-batches that hold all groups, each as (shape, its rows). Without groups it
    is one micro-batch without content. Tries rows of each of `shapes`, and keeps to the largest
    unless a smaller one saves at least LEAST_SAVED of the tokens to compute. `sizes` is that of
    `fill_rows`, but each group must have a completion. ValueError if a prompt with one of its
    completions does not fit a row of the first shape."""
    longest = 0  # tokens of a prompt with its longest completion
    least = 0  # tokens, if each prompt is computed once
    for prompt, members in sizes.values():
        longest = max(longest, prompt + max(members.values()))
        least += prompt + sum(members.values())

    def cost(batches: Batches) -> int:
        """Returns the cost of micro-batches: their tokens, padding included, plus `BATCH_TOKENS`
        for each."""
        return sum(shape.tokens + BATCH_TOKENS for shape, _ in batches)

    chosen = _batches_of_shape(fill_rows(sizes, shapes[0].length), shapes)
    for number, shape in enumerate(shapes[1:], 1):
        allowed = (1 - LEAST_SAVED) * cost(chosen)
        # Not tried if a completion would not fit, or rows even without padding save too little.
        if shape.length >= longest and least <= allowed:
            shorter = _batches_of_shape(fill_rows(sizes, shape.length), shapes[number:])
            if cost(shorter) <= allowed:
                chosen = shorter
    return chosen


def _batches_of_shape(rows: list[Row], shapes: Sequence[Shape]) -> Batches:
    """Divides rows into micro-batches of the first shape, the fullest rows first. The last
    micro-batch, which has the emptiest rows, gets the smallest of `shapes` that holds them, if that
    saves at least LEAST_SAVED of all tokens. Without rows one micro-batch without content is
    returned."""
    rows = sorted(rows, key=attrgetter("free"))  # stable: equal rows stay in order
    largest = shapes[0]
    batches: Batches = []
    # If there are no rows, one micro-batch without content is made.
    for start in range(0, max(1, len(rows)), largest.rows):
        batches.append((largest, rows[start : start + largest.rows]))
    _, last_rows = batches[-1]
    used = max((largest.length - row.free for row in last_rows), default=0)
    # Shapes come largest first, so the reverse meets the smallest that fits first.
    shortest = next(shape for shape in reversed(shapes) if shape.length >= used)
    saved = largest.tokens - shortest.tokens
    if saved >= LEAST_SAVED * len(batches) * largest.tokens:
        batches[-1] = (shortest, last_rows)
    return batches
