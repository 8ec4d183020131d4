"""The order in which prompts are learnt from: a permutation by address, walked with a cursor; and their pass rates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.types import Address, Example, Group, Prompt, ShoalError

log = logging.getLogger(__name__)


class DataExhausted(ShoalError):
    """Too few prompts are left that are not retired."""


@dataclass(frozen=True)
class Prepared:
    """An example and its prompt as the model reads it, int32[Tp]."""

    example: Example
    prompt_ids: np.ndarray


@dataclass
class PassRates:
    """Of each prompt, how many of its completions passed, and which prompts are retired.

    A prompt whose pass rate is above `bound` is not drawn again; the others occur 2 - rate times an epoch in the mean,
    once at least. Rates act from the next epoch on: what an epoch draws is settled when it begins. `bound` 1: off.
    """

    bound: float = 1.0
    counts: dict[int, tuple[int, float]] = field(default_factory=dict)  # row -> completions drawn, passed
    settled: dict[int, float] = field(default_factory=dict)  # row -> rate when the epoch began

    def add(self, groups: Sequence[Group]) -> None:
        """Counts the valid completions: right ones where the task defines that, else the reward within [0, 1]."""
        for group in groups:
            passed = group.rewards.clip(0, 1) if group.correct is None else group.correct.astype(float)
            drawn, before = self.counts.get(group.example.row, (0, 0.0))
            self.counts[group.example.row] = (drawn + int(group.valid.sum()),
                                              before + float(passed[group.valid].sum()))

    def resolve_run(self) -> None:
        self.settled = {row: passed / drawn for row, (drawn, passed) in self.counts.items() if drawn}

    @property
    def active(self) -> bool:
        return self.bound < 1

    def retired(self) -> np.ndarray:
        """Rows that this epoch leaves out."""
        return np.array([row for row, rate in self.settled.items() if rate > self.bound], np.int64)

    def times(self, uniforms: np.ndarray) -> np.ndarray:
        """How often each row occurs in the epoch, int[rows]; uniforms in [0, 1), one a row."""
        times = np.ones(len(uniforms), np.int64)
        for row, rate in self.settled.items():
            times[row] = 0 if rate > self.bound else 1 + (uniforms[row] < 1 - rate)
        return times

    def record(self) -> list[dict[str, Any]]:
        """One entry a prompt that was drawn, in order of its row."""
        return [{"row": row, "drawn": drawn, "passed": passed, "rate": passed / drawn if drawn else None,
                 "retired": self.settled.get(row, 0.0) > self.bound}
                for row, (drawn, passed) in sorted(self.counts.items())]

    def state(self) -> dict[str, Any]:
        return {"counts": [[row, *count] for row, count in self.counts.items()],
                "settled": [[row, rate] for row, rate in self.settled.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.counts = {row: (drawn, passed) for row, drawn, passed in state["counts"]}
        self.settled = dict(state["settled"])


@dataclass
class PromptStream:
    """P different prompts a step, each epoch in another order.

    A prompt over `max_tokens` is dropped and counted in `dropped`, or an error: never cut.
    """

    examples: Sequence[Example]
    encode: Callable[[Prompt], np.ndarray]
    seed: int
    max_tokens: int
    long_prompts: str = "drop"
    rates: PassRates = field(default_factory=PassRates)
    epoch: int = 0
    cursor: int = 0  # within the epoch
    dropped: int = 0
    ended: tuple[float, int] | None = None  # the bound of the rates, and how many `next` could not find under it
    _order: tuple[int, np.ndarray] = field(default=(-1, np.empty(0, np.int64)), repr=False)

    def more(self, count: int, taken: Collection[int]) -> list[Prepared]:
        """Up to `count` more prompts for a step that has `taken` rows already: as many as one walk over the data finds.
        Where it finds none, the order stays where it was."""
        before, found = self.state(), {}
        try:
            for _ in range(len(self.examples)):
                row = self._next_row()
                if row not in found and row not in taken and (prepared := self._prepare(row)) is not None:
                    found[row] = prepared
                if len(found) == count:
                    break
        except DataExhausted:
            pass
        if not found:
            self.restore(before)
        return list(found.values())

    def next(self, count: int) -> list[Prepared]:
        """The next `count` prompts, no row twice. Raises `DataExhausted` where too few are left, and from then on."""
        if len(self.examples) < count:
            raise ShoalError(f"the data has {len(self.examples)} prompts, fewer than batch.prompts_per_step={count}: "
                             "lower it, or bring more data")
        if self.ended == (self.rates.bound, count):
            raise self._learnt(count)
        try:
            found = self._walk(count)
        except DataExhausted:
            self.ended = self.rates.bound, count
            raise
        self.ended = None
        return found

    def is_exhausted(self, count: int) -> bool:
        """Whether `next` will raise `DataExhausted`. Nothing is taken."""
        if not self.rates.active:
            return False
        before = self.state()
        try:
            self.next(count)
        except DataExhausted:
            return True
        finally:
            self.restore(before)
        return False

    def _walk(self, count: int) -> list[Prepared]:
        found: dict[int, Prepared] = {}
        looked = 0
        while len(found) < count:
            row = self._next_row()
            looked += 1
            if looked > 4 * len(self.examples) + count:
                if len(self.rates.retired()):
                    raise self._learnt(count)
                raise ShoalError(f"fewer than {count} prompts of the data have at most {self.max_tokens} tokens: "
                                 "raise sampling.max_prompt_tokens")
            if row not in found and (prepared := self._prepare(row)) is not None:
                found[row] = prepared
        return list(found.values())

    def _learnt(self, count: int) -> DataExhausted:
        return DataExhausted(f"{len(self.rates.retired())} prompts are retired (train.retire_above={self.rates.bound:g}), "
                      f"fewer than {count} are left: the data is learnt")

    def peek(self, count: int = 1, steps: int = 1) -> Prepared:
        """The first prompt that `next` will give. Nothing is taken, but the prompts of `steps` times `count` are looked
        at, so that what is wrong with them is met now."""
        before = self.state()
        looked = [self.next(count) for _ in range(max(1, steps))]
        self.restore(before)
        return looked[0][0]

    def of_row(self, row: int) -> Prepared:
        """One example by its row, outside the order."""
        if not 0 <= row < len(self.examples):
            raise ShoalError(f"row {row} is not in the data, which has {len(self.examples)} rows")
        prepared = prepare(self.examples[row], self.encode, self.max_tokens, "error")
        assert prepared is not None
        return prepared

    def state(self) -> dict[str, Any]:
        """All that resuming needs, as JSON holds it."""
        return {"epoch": self.epoch, "cursor": self.cursor, "dropped": self.dropped,
                "ended": list(self.ended) if self.ended else None, **self.rates.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.cursor, self.dropped = state["epoch"], state["cursor"], state["dropped"]
        ended = state.get("ended")  # older checkpoints have none
        self.ended = (ended[0], ended[1]) if ended else None
        self.rates.restore(state)
        self._order = (-1, np.empty(0, np.int64))

    def _next_row(self) -> int:
        if self.cursor >= len(self._order_of(self.epoch)):
            self.epoch, self.cursor = self.epoch + 1, 0
            self.rates.resolve_run()
            self._order_of(self.epoch)
        row = int(self._order[1][self.cursor])
        self.cursor += 1
        return row

    def _order_of(self, epoch: int) -> np.ndarray:
        """Rows of an epoch: each once, in an order of its own; with pass rates, by `PassRates.times`."""
        if self._order[0] != epoch:
            random = np.random.default_rng(Address(self.seed, "order", epoch, 0).key(0).tolist())
            order = random.permutation(len(self.examples))
            if self.rates.active:
                times = self.rates.times(random.random(len(self.examples)))
                again = order[times[order] > 1]
                order = np.concatenate([order[times[order] > 0], random.permutation(again)])
            if not len(order):
                raise DataExhausted(f"every prompt has a pass rate above train.retire_above={self.rates.bound:g}: the data is "
                             "learnt")
            self._order = (epoch, order)
        return self._order[1]

    def _prepare(self, row: int) -> Prepared | None:
        prepared = prepare(self.examples[row], self.encode, self.max_tokens, self.long_prompts)
        self.dropped += prepared is None
        return prepared


def prepare(example: Example, encode: Callable[[Prompt], np.ndarray], max_tokens: int,
            long_prompts: str) -> Prepared | None:
    """The example with its tokens; None where the prompt is too long and such prompts are dropped."""
    ids = encode(example.prompt)
    if 1 <= len(ids) <= max_tokens:
        return Prepared(example, ids)
    message = (f"the prompt of row {example.row} has {len(ids)} tokens, sampling.max_prompt_tokens is {max_tokens}")
    if long_prompts == "error":
        raise ShoalError(message + ": raise it, or set sampling.long_prompts=drop")
    log.debug("%s: dropped", message)
    return None
