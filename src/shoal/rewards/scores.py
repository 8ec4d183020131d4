"""The scores of groups: results of calls weighed and summed, failures by the policy
`reward.on_error`, and rewards that cannot work: functions that fail for everything, or judge
nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from shoal.config.sections.reward import RewardSection
from shoal.records import Failure, RewardFunction, ShoalError
from shoal.rewards.reward_call import WRONG, Batch, CallResult, Loop, call, call_async, unused
from shoal.text import count, exact

Policy = Literal["error", "zero", "skip"]
NUM_RECENT = 64
"""Of so many last completions, `reward.max_failed_share` may fail."""
HOPELESS_SECONDS = 180.0
"""Of waiting in which no call returned; the completions tried by then, however few, are taken for
all."""
NUM_UNSCORED = 32
"""Groups in a row without any score after which a run ends."""


@dataclass(frozen=True)
class Scores:
    """The rewards of P groups of G completions.

    >>> Scores(rewards=np.array([[1.1, 0.1]]), components={"correct": np.array([[1., 0.]]),
    ...        "format": np.array([[1., 1.]])}, valid=np.array([[True, True]]))
    """

    rewards: np.ndarray  # float64[P, G]: the weighted sum; NaN where not valid
    components: Mapping[
        str, np.ndarray
    ]  # name -> float64[P, G], before weights; NaN where it returned None
    valid: (
        np.ndarray
    )  # bool[P, G]: at least one function could judge, and none failed with `reward.on_error=skip`
    extra: Mapping[str, list[list[Any]]] = field(
        default_factory=dict
    )  # log_extra: column -> [P][G]
    metrics: Mapping[str, list[float]] = field(
        default_factory=dict
    )  # log_metric: name -> logged values
    failures: tuple[Failure, ...] = ()


def with_failed(scores: Scores, failures: Sequence[Failure], policy: Policy) -> Scores:
    """The scores of one group where environments failed: reward 0, or not valid with `skip`."""
    failed = np.array(
        [[any(one.completion == i for one in failures) for i in range(scores.valid.shape[1])]]
    )
    return replace(
        scores,
        rewards=np.where(failed, 0.0 if policy == "zero" else np.nan, scores.rewards),
        valid=np.where(failed, policy == "zero", scores.valid),
        failures=(*scores.failures, *failures),
    )


def failure_lines(failures: Iterable[Failure]) -> list[str]:
    """The first example of each way in which a function failed, then the number of each."""
    failures = list(failures)
    first: dict[tuple[str, str], str] = {}
    for one in failures:
        first.setdefault((one.function, one.kind), one.text)
    counts = Counter((one.function, one.kind) for one in failures)
    return [
        *first.values(),
        *(
            f"reward function {name}: {kind} for {count(number, 'completion')}"
            for (name, kind), number in sorted(counts.items())
        ),
    ]


def failed_figures(failures: Iterable[Failure]) -> dict[str, int]:
    """For how many completions functions failed, `failed`, and each one, `failed/{function}`; none
    where none did."""
    counts = Counter(one.function for one in failures if one.completion is not None)
    return (
        {"failed": counts.total()} | {f"failed/{name}": count for name, count in counts.items()}
        if counts
        else {}
    )


# ---- calls in this process


@dataclass
class FunctionCalls:
    """The results of one function's calls for one batch: of all at once, and one by one where that
    failed."""

    whole: CallResult | None = None
    singles: dict[int, CallResult] = field(default_factory=dict)


def call_here(
    functions: Sequence[RewardFunction],
    batch: Batch,
    loop: Loop,
    calls: dict[str, FunctionCalls],
    decides: Callable[[RewardFunction, int | None, CallResult], bool],
) -> None:
    """Calls functions in this process, the `async` ones together, and fills `calls`, by name. No
    more calls are made once a result `decides`; it is not asked of a failed call of several
    completions, since each is called alone."""

    async def gather() -> list[CallResult]:
        return await asyncio.gather(*(call_async(one, part) for one, _, part in waiting))

    places = {one.name: [*range(len(batch))] if one.per_completion else [None] for one in functions}
    waiting = [
        (one, i, batch if i is None else batch.single(i))
        for one in functions
        if one.awaits
        for i in places[one.name]
    ]
    results = {
        (one.name, i): result
        for (one, i, _), result in zip(waiting, loop.run(gather()) if waiting else (), strict=True)
    }
    for one in functions:
        calls[one.name] = found = FunctionCalls()
        if not one.per_completion:
            found.whole = results.get((one.name, None)) or call(one, batch, loop.run)
            if not found.whole.to_be_split(len(batch)):
                if decides(one, None, found.whole):
                    return
                continue
        for i in range(len(batch)):
            found.singles[i] = result = results.get((one.name, i)) or call(
                one, batch.single(i), loop.run
            )
            if decides(one, i, result):
                return


# ---- scores from calls


def weighted_sum(weights: Sequence[float], values: np.ndarray) -> np.ndarray:
    """values[F, N] of F functions -> float64[N]: NaN, where one could not judge, is left out; NaN
    where all are."""
    summed = np.einsum("f,fn->n", np.asarray(weights, np.float64), np.nan_to_num(values, nan=0.0))
    return np.where(np.isnan(values).all(axis=0), np.nan, summed)


def sum_scores(
    functions: Sequence[RewardFunction],
    batch: Batch,
    calls: Mapping[str, FunctionCalls],
    on_error: Policy,
    limit_seconds: float = 0.0,
) -> Scores:
    """The weighted sum. Raises `ShoalError` for the first function that breaks its convention, or
    failed under the policy `error`."""
    columns = [
        ScoreColumn(one, batch, on_error, limit_seconds).fill(calls[one.name]) for one in functions
    ]
    stacked = np.stack([column.values for column in columns])  # [F, P*G]
    skipped = np.any([column.skipped for column in columns], axis=0)
    valid = np.isfinite(stacked).any(axis=0) & ~skipped
    rewards = np.where(valid, weighted_sum([one.weight for one in functions], stacked), np.nan)
    extra: dict[str, list[list[Any]]] = {}
    metrics: dict[str, list[float]] = {}
    num_prompts, group_size = batch.shape
    for column in columns:
        for name, values in column.extra.items():
            groups = [values[p * group_size : (p + 1) * group_size] for p in range(num_prompts)]
            extra[unused(name, extra)] = groups
        for name, logged in column.metrics.items():
            metrics.setdefault(name, []).extend(logged)
    return Scores(
        rewards.reshape(batch.shape),
        {column.one.name: column.values.reshape(batch.shape) for column in columns},
        valid.reshape(batch.shape),
        extra,
        metrics,
        tuple(failure for column in columns for failure in column.failures),
    )


class ScoreColumn:
    """One function's values for a batch."""

    def __init__(
        self, one: RewardFunction, batch: Batch, on_error: Policy, limit_seconds: float
    ) -> None:
        self.one, self.batch, self.on_error, self.limit_seconds = (
            one,
            batch,
            on_error,
            limit_seconds,
        )
        self.values = np.full(len(batch), np.nan)
        self.skipped = np.zeros(len(batch), dtype=bool)
        self.failures: list[Failure] = []
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def fill(self, calls: FunctionCalls) -> ScoreColumn:
        whole, size = calls.whole, len(self.batch)
        if whole is not None and not whole.to_be_split(size):
            self.add(whole, range(size))
            return self
        at = f"in a batch of {size} that starts with {self.batch.describe(0)}"
        for i, result in sorted(calls.singles.items()):
            if whole is not None and result.kind == WRONG:
                raise ShoalError(
                    f"{self._head} {self._describe(whole)} {at}; called for one completion it "
                    f"{result.text}"
                ) from whole.cause
            self.add(result, range(i, i + 1))
        if whole is not None and not self.failures:
            self._fail(None, whole, f"{at}, though for no part of it alone")
        return self

    def add(self, result: CallResult, part: range) -> None:
        """Enters the result of a call for a part of the batch."""
        if result.kind == WRONG:
            raise ShoalError(f"{self._head} {result.text}") from result.cause
        if result.kind:
            self._fail(part.start, result, f"for {self.batch.describe(part.start)}")
            return
        self.values[part.start : part.stop] = [
            np.nan if value is None else value for value in result.values
        ]
        for i, text in result.bad:
            self._fail(
                part.start + i,
                CallResult(kind="not a number", text=text),
                f"for {self.batch.describe(part.start + i)}: expected a finite number, or None "
                "where it cannot judge",
            )
        for column, values in result.extra.items():
            self.extra.setdefault(column, [None] * len(self.batch))[part.start : part.stop] = values
        for name, logged in result.metrics.items():
            self.metrics.setdefault(name, []).extend(logged)

    def _fail(self, i: int | None, result: CallResult, at: str) -> None:
        text = f"{self._head} {self._describe(result)} {at}" + (
            f"; {result.where}" if result.where else ""
        )
        if self.on_error == "error":
            raise ShoalError(
                f"{text}. To continue despite failures: reward.on_error=zero or skip"
            ) from result.cause
        row, index = self.batch.rows[i or 0]
        kind: Any = result.kind
        self.failures.append(Failure(self.one.name, row, None if i is None else index, kind, text))
        if i is not None:
            self.values[i] = 0.0 if self.on_error == "zero" else np.nan
            self.skipped[i] = self.on_error == "skip"

    def _describe(self, result: CallResult) -> str:
        return {
            "raised": f"raised {result.text}",
            "not a number": f"returned {result.text}",
            "died": f"ended its process ({result.text})",
            "timed out": f"took longer than reward.timeout_seconds={exact(self.limit_seconds)}",
        }[result.kind]

    @property
    def _head(self) -> str:
        step = self.batch.state.global_step
        when = (
            "tried on known answers"
            if self.batch.trial
            else f"after step {step}"
            if step
            else "at the start"
        )
        return f"reward function {self.one.name!r} {when}"


# ---- rewards that cannot work


class RewardWatch:
    """What the last results and scores say about a pool's functions. ShoalError where the run is to
    end; never with `reward.max_failed_share=1`."""

    def __init__(self, functions: Sequence[RewardFunction], section: RewardSection) -> None:
        self.section = section
        self._recent = {
            one.name: deque[bool](maxlen=NUM_RECENT) for one in functions
        }  # whether it failed
        self._first_failures: dict[str, str] = {}
        self._waited = self._since = 0.0  # seconds waited, and when the wait under way began
        self._returned = dict.fromkeys(
            self._recent, 0.0
        )  # seconds waited when a call last returned
        self._unscored = 0

    def begin_wait(self) -> None:
        self._since = time.monotonic()

    def count_wait(self) -> None:
        now = time.monotonic()
        self._waited, self._since = self._waited + now - self._since, now

    def add_result(
        self, one: RewardFunction, batch: Batch, i: int | None, result: CallResult
    ) -> None:
        """Counts a call: for completion `i`, or for all of the batch."""
        part = range(len(batch)) if i is None else range(i, i + 1)
        bad, recent, allowed = (
            {place for place, _ in result.bad},
            self._recent[one.name],
            self.section.max_failed_share,
        )
        recent.extend([True] if result.kind else [place in bad for place in range(len(part))])
        if not result.kind:
            self._returned[one.name] = self._waited
        if not result.failed:
            return
        column = ScoreColumn(one, batch, "skip", self.section.timeout_seconds)
        column.add(result, part)
        self._first_failures.setdefault(one.name, column.failures[0].text)
        failed, silent = sum(recent), self._waited - self._returned[one.name]
        if failed > allowed * NUM_RECENT:
            raise self._failed(one.name, f" of {NUM_RECENT}")
        if silent >= HOPELESS_SECONDS and failed > allowed * len(recent):
            raise self._failed(one.name, f", and returned nothing in {silent:.0f} s of waiting")

    def check_end(self) -> None:
        """ShoalError at the end of a run of fewer completions than decide within one."""
        for name, recent in self._recent.items():
            if sum(recent) > self.section.max_failed_share * len(recent):
                raise self._failed(name, ", at the end of the run")

    def _failed(self, name: str, reason: str) -> ShoalError:
        recent, allowed = self._recent[name], self.section.max_failed_share
        return ShoalError(
            f"reward function {name!r} failed for {sum(recent)} of the last {len(recent)} "
            f"completions, more than reward.max_failed_share={exact(allowed)}{reason}; the first: "
            f"{self._first_failures[name]}. Repair the function, or raise reward.max_failed_share "
            "(1: no limit)"
        )

    def add_scores(self, batch: Batch, scores: Scores) -> None:
        """Counts groups in a row for whose completions every function returned None. The known
        answers of a trial are as different as groups, but never enough alone."""
        for judged in scores.valid.reshape(-1, 1) if batch.trial else scores.valid:
            self._unscored = 0 if judged.any() else self._unscored + (not scores.failures)
        if batch.trial:
            self._unscored = min(self._unscored, NUM_UNSCORED - 1)
        elif self._unscored >= NUM_UNSCORED and self.section.max_failed_share < 1:
            names = ", ".join(scores.components)
            raise ShoalError(
                f"{names} returned None for every completion of {self._unscored} groups in a row, "
                f"the last for {batch.describe(len(batch) - 1)}: nothing can be learned; return a "
                "number for what can be judged, or set reward.max_failed_share=1 (no limit)"
            )
