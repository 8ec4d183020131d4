"""The scores of groups: sums the weighted results of reward calls, treats failures as
`reward.on_error` says, and ends runs whose rewards cannot work because functions fail for
everything or judge nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from shoal.config.sections.reward import RewardSection
from shoal.records import Failure, Purpose, RewardFunction, ShoalError
from shoal.rewards.reward_call import (
    WRONG,
    Batch,
    CallResult,
    EventLoopThread,
    call,
    call_async,
    unused_name,
)
from shoal.text import count, exact

Policy = Literal["error", "zero", "skip"]
NUM_RECENT = 64
"""`reward.max_failed_share` is a share of this many latest completions of a function."""
HOPELESS_SECONDS = 180.0
"""If no call of a function has returned during this much waiting, the completions that were tried
by then, however few, decide whether too many failed."""
NUM_UNSCORED = 32
"""A run ends after this many consecutive groups without any score."""
ACCURACY = "acc"
"""Name under which a reward function logs whether an answer is right, 1 or 0 (verl's name)."""


@dataclass(frozen=True)
class Scores:
    """The rewards of P groups of G completions.

    >>> Scores(rewards=np.array([[1.1, 0.1]]), components={"correct": np.array([[1., 0.]]),
    ...        "format": np.array([[1., 1.]])}, valid=np.array([[True, True]]))
    """

    rewards: np.ndarray  # float64[P, G]: the weighted sum; NaN where not valid
    # Function name -> float64[P, G], before weights; NaN where the function returned None.
    components: Mapping[str, np.ndarray]
    # bool[P, G]: at least one function could judge, and none failed with `reward.on_error=skip`.
    valid: np.ndarray
    # [P][G]: float64[number of turns], the weighted sum by the turn that earned it; [] if no
    # function judged by turn.
    turn_rewards: list[list[np.ndarray]] = field(default_factory=list)
    # log_extra: column -> [P][G]
    extra: Mapping[str, list[list[Any]]] = field(default_factory=dict)
    # log_metric: name -> logged values
    metrics: Mapping[str, list[float]] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()


def with_failed_environments(scores: Scores, failures: Sequence[Failure], policy: Policy) -> Scores:
    """Returns the scores of one group (P = 1), changed for the completions whose environments
    failed. With the policy `zero` their reward is 0 and they are valid; with any other policy their
    reward is NaN and they are not valid. The components stay as they are. Adds all `failures` to
    the scores' own; a failure without a completion changes no reward."""
    failed = np.zeros((1, scores.valid.shape[1]), dtype=bool)
    for failure in failures:
        if failure.completion is not None:
            failed[0, failure.completion] = True
    reward_of_failed = 0.0 if policy == "zero" else np.nan
    turn_rewards = []
    for of_group in scores.turn_rewards:
        for index in np.flatnonzero(failed[0]):
            of_group = [*of_group]
            of_group[index] = np.full_like(of_group[index], reward_of_failed)
        turn_rewards.append(of_group)
    return replace(
        scores,
        rewards=np.where(failed, reward_of_failed, scores.rewards),
        turn_rewards=turn_rewards,
        valid=np.where(failed, policy == "zero", scores.valid),
        failures=(*scores.failures, *failures),
    )


def logged_verdicts(extra: Mapping[str, Sequence[Any]]) -> np.ndarray | None:
    """Returns bool[G]: for each completion of a group, whether a reward function logged 1 as its
    `acc`. A completion for which none was logged, because the function failed, is not right, and
    neither is one with a share, such as 0.5 for half of the tests passed. None if no function
    logged a number as `acc`. `extra`: column -> [G], what the functions logged."""
    values = extra.get(ACCURACY, ())
    if not any(isinstance(value, int | float) for value in values):
        return None
    return np.array([value == 1 for value in values])


def failure_lines(failures: Iterable[Failure]) -> list[str]:
    """Returns lines for a report: the text of the first failure of each function and kind
    ("raised", "timed out", ...), then a line for each with its number of completions. The texts are
    in the order of the failures, the lines with numbers sorted by function and kind. A failure
    without a completion counts as one. [] without failures."""
    lines = []
    counts: Counter[tuple[str, str]] = Counter()
    for failure in failures:
        function_and_kind = (failure.function, failure.kind)
        if function_and_kind not in counts:
            lines.append(failure.text)
        counts[function_and_kind] += 1
    for (name, kind), number in sorted(counts.items()):
        lines.append(f"reward function {name}: {kind} for {count(number, 'completion')}")
    return lines


def failure_counts(failures: Iterable[Failure]) -> dict[str, int]:
    """Returns how many completions functions failed for: the total as `failed`, and that of each
    function as `failed/{function}`. {} if none failed. Failures without a completion are not
    counted."""
    counts: Counter[str] = Counter()
    for failure in failures:
        if failure.completion is not None:
            counts[failure.function] += 1
    if not counts:
        return {}
    figures = {"failed": counts.total()}
    for name, number in counts.items():
        figures[f"failed/{name}"] = number
    return figures


# ---- calls in this process


@dataclass
class FunctionResults:
    """The results of one function's calls for one batch: that of the call for all completions, and
    those of calls for one completion, made if the first call failed or if the function takes one
    completion at a time."""

    batch_result: CallResult | None = None
    single_results: dict[int, CallResult] = field(default_factory=dict)


def call_in_process(
    functions: Sequence[RewardFunction],
    batch: Batch,
    loop: EventLoopThread,
    results: dict[str, FunctionResults],
    ends_job: Callable[[RewardFunction, int | None, CallResult], bool],
) -> None:
    """Calls functions in this process, `async` ones concurrently, and enters their results in
    `results`, by function name. Passes each result, with its function and completion (None: all),
    to `ends_job`, and stops if that returns True. A failed call for several completions is not
    passed: the function is called for each of them instead. The calls of `async` functions have all
    ended before the first result is passed. `results` lacks the functions after the one at which it
    stopped. `loop` awaits what they return. The calls have no time limit."""
    async_results = _results_of_async(functions, batch, loop)
    for function in functions:
        function_results = FunctionResults()
        results[function.name] = function_results
        if not function.per_completion:
            result = async_results.get((function.name, None))
            if result is None:
                result = call(function, batch, loop.run)
            function_results.batch_result = result
            if not result.to_be_split(len(batch)):
                if ends_job(function, None, result):
                    return
                continue
        for i in range(len(batch)):
            result = async_results.get((function.name, i))
            if result is None:
                result = call(function, batch.single(i), loop.run)
            function_results.single_results[i] = result
            if ends_job(function, i, result):
                return


def _results_of_async(
    functions: Sequence[RewardFunction], batch: Batch, loop: EventLoopThread
) -> dict[tuple[str, int | None], CallResult]:
    """Calls those of the functions that are `async`, all concurrently, and returns their results by
    (function name, index of the completion); the index is None for a call with all completions. {}
    if no function is `async`."""
    keys: list[tuple[str, int | None]] = []
    waiting: list[tuple[RewardFunction, Batch]] = []
    for function in functions:
        if not function.awaits:
            continue
        if not function.per_completion:
            keys.append((function.name, None))
            waiting.append((function, batch))
            continue
        for i in range(len(batch)):
            keys.append((function.name, i))
            waiting.append((function, batch.single(i)))
    if not waiting:
        return {}

    async def gather() -> list[CallResult]:
        coroutines = [call_async(function, part) for function, part in waiting]
        return await asyncio.gather(*coroutines)

    return dict(zip(keys, loop.run(gather()), strict=True))


# ---- scores from calls


def weighted_sum(weights: Sequence[float], values: np.ndarray) -> np.ndarray:
    """Returns the weighted sum over F functions for each completion: values[F, N] -> float64[N].
    NaN (a function could not judge) is left out; the sum is NaN if all functions have NaN. The
    weights are not normalized."""
    summed = np.einsum("f,fn->n", np.asarray(weights, np.float64), np.nan_to_num(values, nan=0.0))
    return np.where(np.isnan(values).all(axis=0), np.nan, summed)


def weighted_turns(
    weights: Sequence[float],
    values: np.ndarray,
    turns: Sequence[np.ndarray | None],
    num_turns: int,
) -> np.ndarray:
    """Returns the weighted sum over F functions for each turn of one completion, float64[number of
    turns]: of a function that judged by turn its rewards `turns[F]` (None: it did not), of the
    others their values[F] at the last turn. NaN (a function could not judge) is left out."""
    summed = np.zeros(num_turns)
    for weight, value, of_function in zip(weights, values, turns, strict=True):
        if of_function is not None:
            summed += weight * of_function
        elif num_turns and not np.isnan(value):
            summed[-1] += weight * value
    return summed


def sum_scores(
    functions: Sequence[RewardFunction],
    batch: Batch,
    results: Mapping[str, FunctionResults],
    on_error: Policy,
    limit_seconds: float = 0.0,
) -> Scores:
    """Returns the scores of a batch from the results of all calls, which `results` has by function
    name. Raises `ShoalError` for the first function that breaks its convention, or that fails under
    the policy `error`. `limit_seconds` is for messages. A reward is NaN and not valid if no
    function could judge the completion, or if one failed for it under the policy `skip`. If two
    functions log an extra column of the same name, the second gets a number added; their metrics of
    the same name are joined. Weights are those of the functions. KeyError if `results` lacks a
    function."""
    columns = []
    for function in functions:
        column = ScoreColumn(function, batch, on_error, limit_seconds)
        column.fill(results[function.name])
        columns.append(column)
    stacked = np.stack([column.values for column in columns])  # [F, P*G]
    skipped = np.any([column.skipped for column in columns], axis=0)
    valid = np.isfinite(stacked).any(axis=0) & ~skipped
    weights = [function.weight for function in functions]
    rewards = np.where(valid, weighted_sum(weights, stacked), np.nan)
    num_prompts, group_size = batch.shape
    turn_rewards: list[list[np.ndarray]] = []
    if any(column.turns for column in columns):
        num_turns = batch.num_turns or [1] * len(batch)
        by_completion = []
        for i in range(len(batch)):
            turns = [column.turns.get(i) for column in columns]
            summed = weighted_turns(weights, stacked[:, i], turns, num_turns[i])
            by_completion.append(np.where(valid[i], summed, np.nan))
        for p in range(num_prompts):
            turn_rewards.append(by_completion[p * group_size : (p + 1) * group_size])
    components: dict[str, np.ndarray] = {}
    extra: dict[str, list[list[Any]]] = {}
    metrics: dict[str, list[float]] = {}
    failures: list[Failure] = []
    for column in columns:
        for name, values in column.extra.items():
            groups = [values[p * group_size : (p + 1) * group_size] for p in range(num_prompts)]
            extra[unused_name(name, extra)] = groups
        for name, logged in column.metrics.items():
            metrics.setdefault(name, []).extend(logged)
        components[column.function.name] = column.values.reshape(batch.shape)
        failures += column.failures
    return Scores(
        rewards=rewards.reshape(batch.shape),
        components=components,
        valid=valid.reshape(batch.shape),
        turn_rewards=turn_rewards,
        extra=extra,
        metrics=metrics,
        failures=tuple(failures),
    )


class ScoreColumn:
    """The values of one function for all completions of a batch, with its failures and what it
    logged."""

    def __init__(
        self, function: RewardFunction, batch: Batch, on_error: Policy, limit_seconds: float
    ) -> None:
        """Makes the column with NaN as every value. `limit_seconds`: the time limit of a call, for
        messages."""
        self.function = function
        self.batch = batch
        self.on_error = on_error
        self.limit_seconds = limit_seconds
        self.values = np.full(len(batch), np.nan)
        # Index of a completion -> its rewards by turn, for those that were judged by turn.
        self.turns: dict[int, np.ndarray] = {}
        self.skipped = np.zeros(len(batch), dtype=bool)
        self.failures: list[Failure] = []
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def fill(self, results: FunctionResults) -> None:
        """Enters the results of all calls of the function: that of the call for all completions, or
        those of the calls for each if it failed. ShoalError for a broken convention, and for a
        failure under the policy `error`. If the call for all completions failed but no call for one
        did, adds one failure without a completion, and the values are those of the calls for each.
        Completions without a result stay NaN, and are not `skipped`."""
        batch_result = results.batch_result
        size = len(self.batch)
        if batch_result is not None and not batch_result.to_be_split(size):
            self.add(batch_result, range(size))
            return
        in_batch = f"in a batch of {size} that starts with {self.batch.describe(0)}"
        for i, result in sorted(results.single_results.items()):
            if batch_result is not None and result.kind == WRONG:
                raise ShoalError(
                    f"{self._head} {self._describe(batch_result)} {in_batch}; called for one "
                    f"completion it {result.text}"
                ) from batch_result.cause
            self.add(result, range(i, i + 1))
        if batch_result is not None and not self.failures:
            self._fail(None, batch_result, f"{in_batch}, though for no part of it alone")

    def add(self, result: CallResult, part: range) -> None:
        """Enters the result of one call, which was made for the completions `part` of the batch:
        all of them, or one. A failed call is entered as a failure of the first of them. ShoalError
        for a broken convention, and for a failure under the policy `error`. Each value in `bad` is
        entered as a failure of the kind "not a number"."""
        if result.kind == WRONG:
            raise ShoalError(f"{self._head} {result.text}") from result.cause
        if result.kind:
            self._fail(part.start, result, f"for {self.batch.describe(part.start)}")
            return
        values = [np.nan if value is None else value for value in result.values]
        self.values[part.start : part.stop] = values
        for i_of_call, rewards in enumerate(result.turns):
            if rewards is not None:
                self.turns[part.start + i_of_call] = np.array(rewards)
        for i_of_call, text in result.bad:
            i = part.start + i_of_call
            self._fail(
                i,
                CallResult(kind="not a number", text=text),
                f"for {self.batch.describe(i)}: expected {self._expected}",
            )
        for column, logged_values in result.extra.items():
            if column not in self.extra:
                self.extra[column] = [None] * len(self.batch)
            self.extra[column][part.start : part.stop] = logged_values
        for name, logged in result.metrics.items():
            self.metrics.setdefault(name, []).extend(logged)

    def _fail(self, i: int | None, result: CallResult, data_place: str) -> None:
        """Adds a failure for completion `i`. With the policy `zero` its value becomes 0; with
        `skip` its value becomes NaN and `skipped` True. None for `i`: the call for all completions
        failed; the failure then has the batch's first data row and no completion, and no value
        changes. ShoalError with the policy `error`. `data_place`, like `for data row 3, completion
        0`, ends the failure's sentence."""
        text = f"{self._head} {self._describe(result)} {data_place}"
        if result.where:
            text += f"; {result.where}"
        if self.on_error == "error":
            raise ShoalError(
                f"{text}. To continue despite failures: reward.on_error=zero or skip"
            ) from result.cause
        kind: Any = result.kind
        if i is None:
            row, _ = self.batch.rows[0]
            self.failures.append(Failure(self.function.name, row, None, kind, text))
            return
        row, index = self.batch.rows[i]
        self.failures.append(Failure(self.function.name, row, index, kind, text))
        self.values[i] = 0.0 if self.on_error == "zero" else np.nan
        self.skipped[i] = self.on_error == "skip"

    def _describe(self, result: CallResult) -> str:
        """Returns the verb phrase of a failed call: `raised ValueError: ...`. Its kind is "raised",
        "not a number", "died" or "timed out", else KeyError."""
        return {
            "raised": f"raised {result.text}",
            "not a number": f"returned {result.text}",
            "died": f"ended its process ({result.text})",
            "timed out": f"took longer than reward.timeout_seconds={exact(self.limit_seconds)}",
        }[result.kind]

    @property
    def _expected(self) -> str:
        """What the function may return for one completion, for messages."""
        terms = ["a finite number"]
        if self.function.follows_verl:
            terms.append("a dict with one as `score`")
        if self.batch.has_turns:
            terms.append("one for each turn")
        return f"{', '.join(terms)}, or None to abstain"

    @property
    def _head(self) -> str:
        """The subject of a message: `reward function 'f' in step 4`, for completions that a run
        sampled for its step 4. In place of the last words: `in the evaluation before training`,
        `after step 3` in a later one, `tried on known answers` in a trial, and `at the start` where
        no run samples (`shoal eval`)."""
        step = self.batch.state.global_step
        if self.batch.trial:
            when = "tried on known answers"
        elif self.batch.purpose is Purpose.TRAIN:
            when = f"in step {step + 1}"
        elif step:
            when = f"after step {step}"
        elif self.batch.purpose is Purpose.EVALUATE and self.batch.state.max_steps:
            when = "in the evaluation before training"
        else:
            when = "at the start"
        return f"reward function {self.function.name!r} {when}"


# ---- rewards that cannot work


class RewardWatch:
    """Watches the latest results and scores of a pool's functions, and raises ShoalError if the run
    is to end: too many calls fail, or no group gets a score. With `reward.max_failed_share=1` a run
    never ends for these reasons."""

    def __init__(self, functions: Sequence[RewardFunction], section: RewardSection) -> None:
        """Watches these functions, whose names are distinct. Of `section` it reads
        `max_failed_share` and `timeout_seconds`."""
        self.section = section
        # By function: whether it failed for each of the last completions.
        self._recent: dict[str, deque[bool]] = {}
        # By function: the value of `_waited` when a call last returned.
        self._returned: dict[str, float] = {}
        for function in functions:
            self._recent[function.name] = deque(maxlen=NUM_RECENT)
            self._returned[function.name] = 0.0
        self._first_failures: dict[str, str] = {}
        # Seconds waited in total, and when the current wait began.
        self._waited = self._since = 0.0
        self._unscored = 0
        self._unscored_in_trial = 0

    def begin_wait(self) -> None:
        """Starts the clock of a wait for results. The time before it, since the last wait, does not
        count."""
        self._since = time.monotonic()

    def count_wait(self) -> None:
        """Adds the time since the last `begin_wait` or `count_wait` to the time waited."""
        now = time.monotonic()
        self._waited += now - self._since
        self._since = now

    def add_result(
        self, function: RewardFunction, batch: Batch, i: int | None, result: CallResult
    ) -> None:
        """Counts the result of a call for completion `i` of a batch, or for all if `i` is None; a
        call that failed as a whole counts as one completion. ShoalError if the function failed for
        more than `reward.max_failed_share` of its last `NUM_RECENT` completions. Fewer completions
        decide too if no call of the function returned in `HOPELESS_SECONDS` of waiting."""
        completions = range(len(batch)) if i is None else range(i, i + 1)
        name = function.name
        recent = self._recent[name]
        if result.kind:
            recent.append(True)
        else:
            bad = {i_of_call for i_of_call, _ in result.bad}
            for i_of_call in range(len(completions)):
                recent.append(i_of_call in bad)
            self._returned[name] = self._waited
        if not result.failed:
            return
        # A column of this result alone, for the text of its failure.
        # "skip", since with "error" it would raise.
        column = ScoreColumn(function, batch, "skip", self.section.timeout_seconds)
        column.add(result, completions)
        self._first_failures.setdefault(name, column.failures[0].text)
        num_failed = sum(recent)
        allowed = self.section.max_failed_share
        silent_seconds = self._waited - self._returned[name]
        if num_failed > allowed * NUM_RECENT:
            raise self._error_of_failing(name, f" of {NUM_RECENT}")
        if silent_seconds >= HOPELESS_SECONDS and num_failed > allowed * len(recent):
            reason = f", and returned nothing in {silent_seconds:.0f} s of waiting"
            raise self._error_of_failing(name, reason)

    def check_end(self) -> None:
        """Raises ShoalError at the end of a run if too many completions failed, also in a run that
        is too short for `add_result` to decide."""
        for name, recent in self._recent.items():
            if sum(recent) > self.section.max_failed_share * len(recent):
                raise self._error_of_failing(name, ", at the end of the run")

    def _error_of_failing(self, name: str, reason: str) -> ShoalError:
        """Returns the error of a function that fails too often. `reason` ends its first
        sentence."""
        recent, allowed = self._recent[name], self.section.max_failed_share
        return ShoalError(
            f"reward function {name!r} failed for {sum(recent)} of the last {len(recent)} "
            f"completions, more than reward.max_failed_share={exact(allowed)}{reason}; the first: "
            f"{self._first_failures[name]}. Fix the function, or raise reward.max_failed_share "
            "(1: no limit)"
        )

    def add_scores(self, batch: Batch, scores: Scores) -> None:
        """Counts consecutive groups without any score, because every function returned None for
        every completion; ShoalError after `NUM_UNSCORED` of them, unless
        `reward.max_failed_share=1`. A group that lacks scores because of failures is not counted
        and does not end the count. In a trial each known answer counts like a group, but a trial by
        itself never ends the run."""
        # [number of groups, G]; in a trial [number of known answers, 1]
        groups = scores.valid.reshape(-1, 1) if batch.trial else scores.valid
        for is_valid in groups:
            if is_valid.any():
                self._unscored = 0
                self._unscored_in_trial = 0
            elif not scores.failures and batch.trial:
                self._unscored_in_trial += 1
            elif not scores.failures:
                self._unscored += 1
        # One group of the run without a score may still end it.
        counted_of_trial = min(self._unscored_in_trial, NUM_UNSCORED - 1)
        if batch.trial or self.section.max_failed_share == 1:
            return
        if self._unscored + counted_of_trial >= NUM_UNSCORED:
            names = ", ".join(scores.components)
            tried = ""
            if self._unscored_in_trial:
                tried = f"{count(self._unscored_in_trial, 'known answer')} tried before, and for "
            raise ShoalError(
                f"{names} returned None for {tried}every completion of "
                f"{count(self._unscored, 'group')} in a row, "
                f"the last for {batch.describe(len(batch) - 1)}: nothing can be learned; return a "
                "number for what can be judged, or set reward.max_failed_share=1 (no limit)"
            )
