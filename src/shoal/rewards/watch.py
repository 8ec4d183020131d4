"""Notices rewards that cannot work: functions that fail for everything, or judge nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from shoal.config.schema import RewardSection
from shoal.rewards.calls import Batch, CallResult
from shoal.rewards.scores import ScoreColumn, Scores
from shoal.types import RewardFunction, ShoalError

NUM_RECENT = 64
"""Of so many last completions, `reward.max_failed_share` may fail."""
HOPELESS_SECONDS = 180.0
"""Of waiting in which no call returned; the completions tried by then, however few, are taken for all."""
NUM_UNSCORED = 32
"""Groups in a row without any score after which a run ends."""


class RewardWatch:
    """What the last results and scores say about a pool's functions. ShoalError where the run is to end; never with
    `reward.max_failed_share=1`."""

    def __init__(self, functions: Sequence[RewardFunction], section: RewardSection) -> None:
        self.section = section
        self._recent = {one.name: deque[bool](maxlen=NUM_RECENT) for one in functions}  # whether it failed
        self._first_failures: dict[str, str] = {}
        self._waited = self._since = 0.0  # seconds waited, and when the wait under way began
        self._returned = dict.fromkeys(self._recent, 0.0)  # seconds waited when a call last returned
        self._unscored = 0

    def begin_wait(self) -> None:
        self._since = time.monotonic()

    def count_wait(self) -> None:
        now = time.monotonic()
        self._waited, self._since = self._waited + now - self._since, now

    def add_result(self, one: RewardFunction, batch: Batch, i: int | None, result: CallResult) -> None:
        """Counts a call: for completion `i`, or for all of the batch."""
        part = range(len(batch)) if i is None else range(i, i + 1)
        bad, recent, allowed = {place for place, _ in result.bad}, self._recent[one.name], self.section.max_failed_share
        recent.extend([True] if result.kind else [place in bad for place in range(len(part))])
        if not result.kind:
            self._returned[one.name] = self._waited
        if not result.failed:
            return
        column = ScoreColumn(one, batch, "skip", self.section.timeout_seconds)
        column.add(result, part)
        first = self._first_failures.setdefault(one.name, column.failures[0].text)
        failed, silent = sum(recent), self._waited - self._returned[one.name]
        if failed > allowed * NUM_RECENT:
            reason = f" of {NUM_RECENT}"
        elif silent >= HOPELESS_SECONDS and failed > allowed * len(recent):
            reason = f", and returned nothing in {silent:.0f} s of waiting"
        else:
            return
        raise ShoalError(f"reward function {one.name!r} failed for {failed} of the last {len(recent)} completions, "
                         f"more than reward.max_failed_share={allowed:g}{reason}; the first: {first}. Repair the "
                         "function, or raise reward.max_failed_share (1: no limit)")

    def add_scores(self, batch: Batch, scores: Scores) -> None:
        """Counts groups in a row for whose completions every function returned None. The known answers of a trial are
        as different as groups, but never enough alone."""
        for judged in scores.valid.reshape(-1, 1) if batch.trial else scores.valid:
            self._unscored = 0 if judged.any() else self._unscored + (not scores.failures)
        if batch.trial:
            self._unscored = min(self._unscored, NUM_UNSCORED - 1)
        elif self._unscored >= NUM_UNSCORED and self.section.max_failed_share < 1:
            names = ", ".join(scores.components)
            raise ShoalError(f"{names} returned None for every completion of {self._unscored} groups in a row, the "
                             f"last for {batch.describe(len(batch) - 1)}: nothing can be learned; return a number for "
                             "what can be judged, or set reward.max_failed_share=1 (no limit)")
