"""The order of the training prompts: a seeded permutation for each epoch, or that of the data, read
with a cursor. Also their pass rates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.records import Example, Group, NoiseKey, ShoalError
from shoal.text import count as counted
from shoal.text import exact

Encode = Callable[[Example], np.ndarray]
"""Returns the token ids of an example's prompt, int32[T]."""


class DataExhausted(ShoalError):
    """Raised if too few prompts are left that are not retired: training ends here."""


@dataclass(frozen=True)
class TokenizedExample:
    """An example and the token ids of its prompt, int32[Tp]."""

    example: Example
    prompt_ids: np.ndarray


@dataclass
class PassRates:
    """A curriculum: how many completions of each prompt passed, and which prompts are retired.

    A prompt whose pass rate is above `bound` leaves training; the others occur 2 - rate times an
    epoch on average, and at least once, so hard prompts occur up to twice as often. Rates act from
    the next epoch on: an epoch's prompts are fixed when it begins. `bound` 1 turns the curriculum
    off.
    """

    bound: float = 1.0
    # Row -> (number of completions sampled, number that passed).
    counts: dict[int, tuple[int, float]] = field(default_factory=dict)
    at_epoch: dict[int, float] = field(default_factory=dict)  # row -> rate when the epoch began

    def add(self, groups: Sequence[Group]) -> None:
        """Counts the valid completions of groups. The right ones passed; without a verdict the
        reward, clipped to [0, 1], counts as the part that passed."""
        for group in groups:
            if group.correct is None:
                passed = group.rewards.clip(0, 1)
            else:
                passed = group.correct.astype(float)
            num_sampled = int(group.valid.sum())
            num_passed = float(passed[group.valid].sum())
            row = group.example.row
            sampled_before, passed_before = self.counts.get(row, (0, 0.0))
            self.counts[row] = (sampled_before + num_sampled, passed_before + num_passed)

    def begin_epoch(self) -> None:
        """Takes over the pass rates measured so far as those that decide, during the epoch that
        begins, how often each prompt occurs. They stay fixed until the next epoch, so that its
        order is known from its start."""
        # Fixed for an epoch: if the rates of its own steps acted, the order would depend on how far
        # ahead prompts are asked for.
        rates: dict[int, float] = {}
        for row, (sampled, passed) in self.counts.items():
            if sampled:
                rates[row] = passed / sampled
        self.at_epoch = rates

    @property
    def active(self) -> bool:
        """True if the curriculum is on."""
        return self.bound < 1

    def retired(self) -> np.ndarray:
        """Returns the rows that are left out of this epoch, because their rate at its beginning was
        above `bound`: int64, not sorted."""
        return np.array([row for row, rate in self.at_epoch.items() if rate > self.bound], np.int64)

    def times(self, uniforms: np.ndarray) -> np.ndarray:
        """Returns how often each row occurs in the epoch, int[rows], drawn with one uniform number
        in [0, 1) for each row. It is 0 for a retired row, 1 or 2 for any other; 1 for a row without
        a rate."""
        times = np.ones(len(uniforms), np.int64)
        for row, rate in self.at_epoch.items():
            if row >= len(times):  # a row of data that was longer before the run was resumed
                continue
            if rate > self.bound:
                times[row] = 0
            else:
                times[row] = 1 + (uniforms[row] < 1 - rate)
        return times

    def record(self) -> list[dict[str, Any]]:
        """Returns one entry for each prompt that was sampled, in the order of rows, for the file of
        pass rates. Its keys: row, drawn (number of completions), passed, rate (None if no
        completion was valid), retired (True if left out of this epoch)."""
        entries: list[dict[str, Any]] = []
        for row, (sampled, passed) in sorted(self.counts.items()):
            rate = passed / sampled if sampled else None
            retired = self.at_epoch.get(row, 0.0) > self.bound
            entry = {
                "row": row,
                "drawn": sampled,
                "passed": passed,
                "rate": rate,
                "retired": retired,
            }
            entries.append(entry)
        return entries

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores, as JSON values. The keys: counts, [row, number sampled,
        number that passed] each; at_epoch, [row, rate] each."""
        return {
            "counts": [[row, sampled, passed] for row, (sampled, passed) in self.counts.items()],
            "at_epoch": [[row, rate] for row, rate in self.at_epoch.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.counts = {row: (sampled, passed) for row, sampled, passed in state["counts"]}
        self.at_epoch = dict(state["at_epoch"])


@dataclass(frozen=True)
class _Position:
    """A position in the order of prompts, from which reading can go on again."""

    epoch: int
    cursor: int
    postponed: list[int]
    dropped: int
    at_epoch: dict[int, float]


@dataclass
class PromptStream:
    """The training prompts in order: P different ones a step, in another order each epoch, or with
    `shuffles` False in the data's.

    The order depends on the data, the seed and the pass rates alone, so a resumed run repeats it.
    The run owns the stream.

    At the border of two epochs a step may meet a row that it has already: the next step takes that
    row, so each epoch trains on all rows.

    A prompt of more than `max_tokens`, or one that `encode` refuses, is either dropped and counted
    in `dropped`, or with `long_prompts` "error" an error; it is never truncated.
    """

    examples: Sequence[Example]
    encode: Encode
    seed: int
    max_tokens: int
    long_prompts: str = "warn"
    rates: PassRates = field(default_factory=PassRates)
    epoch: int = 0
    cursor: int = 0  # number of rows read within the epoch
    # Rows that were passed over, which the next step takes first.
    postponed: list[int] = field(default_factory=list)
    dropped: int = 0
    refusal: str = ""  # why the chat template refused the prompt that it refused last; "" for none
    # (bound of the rates, `count`) for which `next` found the data exhausted; None if it is not.
    ended: tuple[float, int] | None = None
    shuffles: bool = True
    size_key: str = "batch.prompts_per_step"  # the key that says how many prompts a step has
    _order: tuple[int, np.ndarray] = field(default=(-1, np.empty(0, np.int64)), repr=False)

    def more(self, count: int, taken: Collection[int]) -> list[TokenizedExample]:
        """Returns up to `count` more prompts for a step that already has the rows `taken`,
        searching at most once through the data: fewer, or [], if no more are found. No row comes
        twice, and none of `taken`.

        If there are none, the cursor stays where it was.
        """
        before = self._position()
        # At most once: with the curriculum an epoch may consist of rows that are taken.
        prompts = self._read(count, len(self.examples), taken)
        if not prompts:
            self._return_to(before)
        return prompts

    def next(self, count: int) -> list[TokenizedExample]:
        """Returns the next `count` prompts, with no row twice, and moves the cursor. Raises
        `DataExhausted` if some prompts are retired and fewer than `count` others are left; then
        also at every later call with this `count`, unless the bound of the rates has changed.
        ShoalError if the data has fewer than `count` prompts, if too long or refused prompts leave
        fewer, or, with `long_prompts=error`, at the first such prompt."""
        if len(self.examples) < count:
            of_step = f"batch.prompts_per_step={count}"
            if self.size_key != "batch.prompts_per_step":
                of_step = f"the {count} of a step ({self.size_key} on all devices)"
            raise ShoalError(
                f"the data has {counted(len(self.examples), 'prompt')}, fewer than {of_step}: "
                "lower it, or add data",
                self.size_key,
            )
        # Checkpoints store this: a resumed run ends where this one did, unless the bound or the
        # step's size was changed.
        has_ended = self.ended == (self.rates.bound, count)
        prompts: list[TokenizedExample] = []
        if not has_ended:
            # The search ends after about four epochs, however few prompts there are.
            prompts = self._read(count, 4 * len(self.examples) + count)
        if len(prompts) == count:
            self.ended = None
            return prompts
        if not has_ended:  # rows of up to four epochs were passed over: each is kept once
            self.postponed = [prompt.example.row for prompt in prompts]
        num_retired = len(self.rates.retired())
        if num_retired:
            self.ended = (self.rates.bound, count)
            verb = "is" if num_retired == 1 else "are"
            raise DataExhausted(
                f"{counted(num_retired, 'prompt')} {verb} retired "
                f"(train.retire_above={exact(self.rates.bound)}), fewer than {count} are left"
            )
        few = f"fewer than {counted(count, 'prompt')} of the data"
        if self.refusal:
            raise ShoalError(
                f"{few} can be used; {self.refusal} (prompts of more than {self.max_tokens} "
                "tokens, sampling.max_prompt_tokens, are left out too)"
            )
        raise ShoalError(
            f"{few} have at most {self.max_tokens} tokens: raise sampling.max_prompt_tokens"
        )

    def _read(
        self, count: int, most_rows: int, taken: Collection[int] = ()
    ) -> list[TokenizedExample]:
        """Reads up to `count` prompts, with no row twice and none of `taken`: postponed ones first,
        then from at most `most_rows` rows after the cursor. Rows that are passed over are
        postponed."""
        by_row: dict[int, TokenizedExample] = {}
        waiting = self.postponed
        self.postponed = []
        num_read = 0
        while len(by_row) < count:
            if waiting:
                row = waiting.pop(0)
            elif num_read < most_rows:
                row = self._next_row()
                num_read += 1
            else:
                break
            # all prompts are retired
            if row is None:
                break
            if row in by_row or row in taken:
                self.postponed.append(row)
                continue
            prepared = self._prepare(row)
            if prepared is not None:
                by_row[row] = prepared
        self.postponed += waiting
        return list(by_row.values())

    def is_exhausted(self, count: int) -> bool:
        """True if `next` will raise `DataExhausted`; the cursor does not move. Always False without
        the curriculum. A ShoalError of `next` that is no `DataExhausted` passes through."""
        if not self.rates.active:
            return False
        try:
            self.peek(count)
        except DataExhausted:
            return True
        return False

    def peek(self, count: int = 1) -> TokenizedExample:
        """Returns the first of the `count` prompts that `next` will return; the cursor does not
        move. Raises what `next` raises."""
        before = self._position()
        ended = self.ended
        try:
            return self.next(count)[0]
        finally:
            self._return_to(before)
            self.ended = ended

    def check(self, count: int) -> None:
        """With `long_prompts=error`, raises ShoalError if a prompt among the first `count` of the
        present epoch, whatever was read of it, is too long or refused. With `drop` such a prompt
        only adds 1 to `dropped`. Each row is read at most once, even if `count` is several
        epochs."""
        for row in self._order_of(self.epoch)[:count]:
            self._prepare(int(row))

    def of_row(self, row: int) -> TokenizedExample:
        """Returns the example of one row with its token ids, without moving the cursor. ShoalError
        if the row does not exist, or its prompt is too long or refused, whatever `long_prompts`
        is."""
        if not 0 <= row < len(self.examples):
            raise ShoalError(
                f"row {row} is not in the data, which has {counted(len(self.examples), 'row')}"
            )
        # A row asked for by number was sampled before: dropping it silently would change a step
        # that is repeated.
        prepared = prepare(self.examples[row], self.encode, self.max_tokens, "error")
        assert prepared is not None
        return prepared

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must store, as JSON values. The keys: epoch, cursor, postponed,
        dropped, ended, and those of `PassRates.state`."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "postponed": list(self.postponed),
            "dropped": self.dropped,
            "ended": list(self.ended) if self.ended else None,
            **self.rates.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets the stream to a stored state. Postponed rows that the data no longer has are
        dropped."""
        self.rates.restore(state)
        self.ended = None
        if state["ended"]:
            bound, count = state["ended"]
            self.ended = (bound, count)
        # Older checkpoints have no postponed rows, and data that was replaced may have fewer rows.
        postponed = [row for row in state.get("postponed", []) if row < len(self.examples)]
        position = _Position(
            state["epoch"], state["cursor"], postponed, state["dropped"], self.rates.at_epoch
        )
        self._return_to(position)

    def _position(self) -> _Position:
        """Returns the position that reading is at."""
        return _Position(
            self.epoch, self.cursor, list(self.postponed), self.dropped, self.rates.at_epoch
        )

    def _return_to(self, position: _Position) -> None:
        """Sets the cursor and all that goes with it (epoch, order, postponed rows, `dropped`, and
        the rates that the epoch began with) back to a position noted earlier."""
        self.epoch = position.epoch
        self.cursor = position.cursor
        self.dropped = position.dropped
        self.postponed = list(position.postponed)
        self.rates.at_epoch = position.at_epoch
        # -1 is no epoch: the order is made again when it is next read, with the rates of
        # `at_epoch`.
        self._order = (-1, np.empty(0, np.int64))

    def _next_row(self) -> int | None:
        """Moves the cursor, and returns the next row; None if all prompts are retired, in which
        case the cursor moves all the same. Begins a new epoch at the end of one."""
        if self.cursor >= len(self._order_of(self.epoch)):
            self.epoch += 1
            self.cursor = 0
            self.rates.begin_epoch()
        order = self._order_of(self.epoch)
        self.cursor += 1
        if len(order) == 0:
            return None
        return int(order[self.cursor - 1])

    def _order_of(self, epoch: int) -> np.ndarray:
        """Returns the rows of an epoch in their order, random or that of the data: each once, or
        with the curriculum not at all, once or twice, by its pass rate. Only the epoch whose order
        was computed last is kept."""
        if self._order[0] != epoch:
            # The order follows from (seed, epoch) alone, so that a checkpoint stores two numbers
            # and not an order or a generator's state. The epoch takes the place of a step in the
            # key; its row and completion, 0, are not used.
            random = np.random.default_rng(NoiseKey(self.seed, "order", epoch, 0).key(0).tolist())
            order = random.permutation(len(self.examples))
            if not self.shuffles:
                order = np.arange(len(self.examples))
            if self.rates.active:
                times = self.rates.times(random.random(len(self.examples)))
                # Repeats come after the whole epoch, shuffled again: next to the first occurrence,
                # a step would skip the second.
                again = order[times[order] > 1]
                if self.shuffles:
                    again = random.permutation(again)
                order = np.concatenate([order[times[order] > 0], again])
            self._order = (epoch, order)
        return self._order[1]

    def _prepare(self, row: int) -> TokenizedExample | None:
        """Returns the example of a row with its token ids; None if it is dropped, because the
        prompt is too long or refused, which is counted in `dropped`. The reason of a refusal by the
        chat template is put into `refusal`. With `long_prompts=error` such a prompt raises
        ShoalError instead."""

        def refuse(reason: str) -> None:
            self.refusal = reason

        prepared = prepare(
            self.examples[row], self.encode, self.max_tokens, self.long_prompts, refuse
        )
        if prepared is None:
            self.dropped += 1
        return prepared


def prepare(
    example: Example,
    encode: Encode,
    max_tokens: int,
    long_prompts: str,
    refuse: Callable[[str], object] | None = None,
) -> TokenizedExample | None:
    """Returns the example with its prompt's token ids. If the prompt has no token, or more than
    `max_tokens`, the result is None, but with `long_prompts` "error" ShoalError is raised. A prompt
    that the chat template refuses raises ShoalError; but without "error", and with `refuse` given,
    `refuse` is called with the reason, and None is returned."""
    try:
        ids = encode(example)
    except ShoalError as error:
        if refuse is None:
            raise
        message = f"the prompt of row {example.row}: {error}"
        if long_prompts == "error":
            raise ShoalError(message) from error
        refuse(message)
        return None
    if 1 <= len(ids) <= max_tokens:
        return TokenizedExample(example, ids)
    if long_prompts == "error":
        raise ShoalError(
            f"the prompt of row {example.row} has {counted(len(ids), 'token')}, "
            f"sampling.max_prompt_tokens is {max_tokens}: raise it, or set "
            "sampling.long_prompts=drop"
        )
    return None
