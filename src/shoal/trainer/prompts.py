"""The order in which prompts are learnt from: a permutation by address, walked with a cursor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.types import Address, Example, Prompt, ShoalError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """An example and its prompt as the model reads it, int32[Tp]."""

    example: Example
    prompt_ids: np.ndarray


@dataclass
class PromptStream:
    """P different prompts a step, each epoch in another order. `cursor` is all that resuming needs.

    A prompt over `max_tokens` is dropped and counted in `dropped`, or an error: never cut.
    """

    examples: Sequence[Example]
    encode: Callable[[Prompt], np.ndarray]
    seed: int
    max_tokens: int
    long_prompts: str = "drop"
    cursor: int = 0
    dropped: int = 0
    _epoch: tuple[int, np.ndarray] = field(default=(-1, np.empty(0, np.int64)), repr=False)

    def next(self, count: int) -> list[Prepared]:
        """The next `count` prompts, no row twice."""
        if len(self.examples) < count:
            raise ShoalError(f"the data has {len(self.examples)} prompts, fewer than batch.prompts_per_step={count}: "
                             "lower it, or bring more data")
        found: dict[int, Prepared] = {}
        looked = 0
        while len(found) < count:
            row = self._row(self.cursor)
            self.cursor += 1
            looked += 1
            if looked > 2 * len(self.examples) + count:
                raise ShoalError(f"fewer than {count} prompts of the data have at most {self.max_tokens} tokens: "
                                 "raise sampling.max_prompt_tokens")
            if row not in found and (prepared := self._prepare(row)) is not None:
                found[row] = prepared
        return list(found.values())

    def peek(self, count: int = 1, steps: int = 1) -> Prepared:
        """The first prompt that `next` will give. Nothing is taken, but the prompts of `steps` times `count` are looked
        at, so that what is wrong with them is met now."""
        cursor, dropped = self.cursor, self.dropped
        looked = [self.next(count) for _ in range(max(1, steps))]
        self.cursor, self.dropped = cursor, dropped
        return looked[0][0]

    def _row(self, cursor: int) -> int:
        epoch, place = divmod(cursor, len(self.examples))
        if self._epoch[0] != epoch:
            key = Address(self.seed, "order", epoch, 0).key(0)
            self._epoch = (epoch, np.random.default_rng(key.tolist()).permutation(len(self.examples)))
        return int(self._epoch[1][place])

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
