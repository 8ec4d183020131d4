"""Scores groups of completions with reward functions while sampling continues.

    submit -> calls -> supervised workers (`workers/`) -> results -> ScoreColumn -> collect

If one call for several completions fails, each of these completions is called alone, which shows
which one is at fault; the others keep the values that they get alone. Once a call of a step has
timed out or died, the rest of that step is called one completion at a time. So a function that
hangs on everything costs at most one time limit for the first calls of a step, and then one limit
for each completion, `reward.workers` at a time: limit * (1 + P*G / workers); `RewardWatch` ends the
run earlier.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.config.sections.reward import RewardSection
from shoal.records import Example, Purpose, RewardFunction, ShoalError
from shoal.rewards.reward_call import (
    Batch,
    CallHandler,
    CallResult,
    EventLoopThread,
    TrainerState,
    pickled_batch,
)
from shoal.rewards.scores import (
    FunctionResults,
    Policy,
    RewardWatch,
    Scores,
    call_in_process,
    sum_scores,
)
from shoal.text import exact
from shoal.workers.pool import Limits, WorkerPool, WorkersLost
from shoal.workers.process import Header

FIRST_REPORT_SECONDS = 10.0
"""A wait for rewards is first reported on stderr after this time."""
REPORT_SECONDS = 30.0
"""The interval of all further reports of the same wait."""
GENEROUS = 2.0
"""A factor: if queued calls take this many times the longest time that their limits allow, the
supervisor counts as stuck."""
_GIB = 2**30


@dataclass(eq=False)
class _Job:
    """The groups of one `submit`, with the results of their calls so far."""

    ticket: Hashable
    batch: Batch
    policy: Policy
    results: dict[str, FunctionResults] = field(default_factory=dict)  # by function name
    # Function name -> numbers of its calls without a result.
    open: dict[str, set[int]] = field(default_factory=dict)
    done: bool = False


class RewardPool:
    """Scores groups with reward functions, in this process or in supervised worker processes.

    >>> pool.submit(4, [example], texts=[["5", "6"]], completion_ids=[[[7], [8]]], step=3)
    >>> pool.collect(wait=True)
    [(4, Scores(...))]

    Functions that come with a task (`RewardFunction.runs_in_process`) are called in this process;
    with `reward.workers=0` all functions are. The others run in processes that are forked from this
    one, so any function works, also a closure or one of a notebook; the pool is best made before
    JAX starts its threads. `async` functions run together on the event loop of one more worker
    process. A call that reaches `reward.timeout_seconds` or `reward.memory_gib` is ended together
    with its process and everything that this process started.

    Whoever makes a pool closes it, after all that submits to it: in a run the `Job`, not the fleet.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], section: RewardSection, max_steps: int = 0
    ) -> None:
        """Forks the supervisor of the workers, unless all functions are called in this process.
        `max_steps` is the number of steps of the run, which functions get in `trainer_state` (0:
        not known). ValueError without functions, or for two of the same name; ShoalError if workers
        are needed and this system cannot fork. Close the pool (`with`)."""
        names = [function.name for function in functions]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected one function or more, each of its own name; got {names}")
        self.functions = tuple(functions)
        self.section = section
        self.max_steps = max_steps
        self._remote: list[RewardFunction] = []  # called in workers
        self._here: list[RewardFunction] = []  # called in this process
        for function in functions:
            if function.runs_in_process or not section.workers:
                self._here.append(function)
            else:
                self._remote.append(function)
        self._loop = EventLoopThread()
        self._done: list[tuple[Hashable, Scores | ShoalError]] = []
        self._jobs: list[_Job] = []
        # Call number -> its job, its function, and the index of its completion (None: all of them).
        self._calls: dict[int, tuple[_Job, RewardFunction, int | None]] = {}
        self._next_call = 0
        # (function name, step) where a call timed out or died: this function is called for one
        # completion at a time in the rest of the step.
        self._hung: set[tuple[str, int]] = set()
        self.watch = RewardWatch(functions, section)
        self._workers: WorkerPool | None = None
        self._progress = time.monotonic()  # when the last reply to a call arrived
        if self._remote:
            if not hasattr(os, "fork"):
                raise ShoalError(
                    f"reward.workers={section.workers}: this system cannot fork processes; "
                    "reward.workers=0 calls reward functions in this one, without limits"
                )
            # Only pools with workers have limits.
            self._limits = Limits(
                section.workers, section.timeout_seconds, int(section.memory_gib * _GIB)
            )
            handler = CallHandler(self._remote, section.timeout_seconds)
            self._workers = WorkerPool(handler.call, self._limits, handler.call_async)

    def submit(
        self,
        ticket: Hashable,
        examples: Sequence[Example],
        texts: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[Sequence[int]]],
        step: int,
        on_error: Policy | None = None,
        trial: Sequence[str] = (),
        messages: Sequence[Any] = (),
        environments: Sequence[Any] = (),
        num_turns: Sequence[Any] = (),
        purpose: Purpose | None = None,
    ) -> None:
        """Queues P groups of G completions for scoring; `collect` returns their scores with the
        ticket. Calls the functions that run in this process before it returns, and does not wait
        for the workers.

        `step` is the number of steps that are done. `texts`, `completion_ids`, and for rollouts
        with turns `messages`, `environments` and `num_turns`, are [P][G]. `on_error` (`error`,
        `zero` or `skip`) replaces `reward.on_error` for these groups. `trial` is given if the
        completions are known answers that are scored before the run, and names what each completion
        of a group is, such as `right answer`. The first call that times out ends a trial; the
        values that are missing then are NaN. `purpose` is what a run sampled the completions for,
        for messages; None if no run did.

        Raises ShoalError if a column cannot be sent to another process, or if the workers have
        ended. An error of a function is raised by `collect`. ValueError if the groups are empty, of
        different sizes or in different numbers.
        """
        if self._remote and self._workers is None:
            raise ShoalError(
                "the reward workers have ended, so nothing more can be scored: start or resume the "
                "run again"
            )
        policy = on_error or self.section.on_error
        state = TrainerState.at(step, self.max_steps)
        batch = Batch.of(
            examples,
            [example.prompt for example in examples],
            texts,
            completion_ids,
            state,
            trial,
            messages,
            environments,
            num_turns,
            purpose,
        )
        job = _Job(ticket, batch, policy)
        self.watch.begin_wait()
        ends_job = functools.partial(self._ends_job, job)
        call_in_process(self._here, batch, self._loop, job.results, ends_job)
        # A result has ended the run: `collect` raises the error.
        if job.done:
            return
        if not self._remote:
            self._finish(job)
            return
        # The workers were idle: the time without progress counts from now.
        if not self._jobs:
            self._progress = time.monotonic()
        # Steps that are over are forgotten.
        self._hung = {(name, hung_step) for name, hung_step in self._hung if hung_step >= step}
        self._jobs.append(job)
        body = pickled_batch(batch)
        for function in self._remote:
            job.results[function.name] = FunctionResults()
            has_hung = (function.name, step) in self._hung
            if function.per_completion or (has_hung and len(batch) > 1):
                self._send_single_calls(job, function)
            else:
                self._send_call(job, function, None, body, function.awaits)

    def collect(self, wait: bool = False) -> list[tuple[Hashable, Scores]]:
        """Returns (ticket, scores) for each submission that is scored by now and was not returned
        before; [] if there is none. With `wait`, waits until at least one is scored, unless nothing
        is queued.

        Reports a long wait on stderr. After a KeyboardInterrupt during the wait, such as that of
        `StopSignal.raising_at_once`, the pool can only be closed. Raises a ShoalError that names
        function, step and example if a function failed and the policy is `error`, or if too many
        calls failed (`reward.max_failed_share`). Raises ShoalError if the workers' supervisor is
        stuck or has ended. If it raises the error of a submission, scores that were ready before
        that one are lost, and later ones are kept for the next call.
        """
        self._receive()
        if wait:
            self._wait()
        done, self._done = self._done, []
        scored: list[tuple[Hashable, Scores]] = []
        for number, (ticket, scores) in enumerate(done):
            if isinstance(scores, ShoalError):
                self._done = done[number + 1 :]
                raise scores
            scored.append((ticket, scores))
        return scored

    def close(self) -> None:
        """Ends the worker processes and everything that they started, within 2 s. A second call
        does nothing. Unscored submissions are forgotten. `submit` then raises ShoalError if
        functions are called in workers."""
        if self._workers is not None:
            self._workers.close()
        self._workers = None
        self._loop.close()
        self._jobs.clear()
        self._calls.clear()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- calls in workers

    def _send_call(
        self, job: _Job, function: RewardFunction, i: int | None, body: bytes, together: bool
    ) -> None:
        """Sends one call of a function to the workers: for completion `i` of the job, or for all
        its completions if `i` is None. `body` is the pickled batch. With `together` the call runs
        on the event loop that `async` calls share, else in a worker of its own. ShoalError, and the
        pool is closed, if the supervisor has ended or does not read."""
        assert self._workers is not None
        number = self._next_call
        self._next_call += 1
        self._calls[number] = job, function, i
        job.open.setdefault(function.name, set()).add(number)
        try:
            header = {"function": self._remote.index(function)}
            self._workers.submit(number, header, body, together)
        except WorkersLost as lost:
            raise self._close_and_make_error(lost, lost.seconds) from None

    def _send_single_calls(
        self, job: _Job, function: RewardFunction, together: bool = True
    ) -> None:
        """Sends one call for each completion of a job. Without `together` also `async` calls run in
        workers of their own. ShoalError if a value cannot be pickled or the supervisor has
        ended."""
        for i in range(len(job.batch)):
            body = pickled_batch(job.batch.single(i))
            self._send_call(job, function, i, body, together and function.awaits)

    def _cancel(self, calls: Sequence[int]) -> None:
        """Cancels those of the calls, by number, that no worker has begun. All others go on.
        ShoalError, and the pool is closed, if the supervisor has ended or does not read."""
        if calls and self._workers is not None:
            try:
                self._workers.cancel(calls)
            except WorkersLost as lost:
                raise self._close_and_make_error(lost, lost.seconds) from None

    def _enter_reply(self, number: int, reply: Header) -> None:
        """Enters the reply to call `number` in the results of its job, and finishes the job after
        its last open call. If a call for several completions failed or was cancelled, sends a call
        for each of them instead. Ignores replies to calls of jobs that are over. A call of a trial
        that timed out cancels the function's other calls."""
        job, function, i = self._calls.pop(number)
        open_calls = job.open[function.name]
        if job.done or number not in open_calls:
            return
        open_calls.discard(number)
        # True if an `async` call blocked the loop that others share and was made again by itself:
        # the calls that follow do not share a loop either.
        alone = reply.pop("alone", False)
        if reply["kind"] == "cancelled":
            self._send_single_calls(job, function)
            return
        result = CallResult(**reply)
        if result.kind in ("timed out", "died"):
            self._stop_batch_calls(function, job.batch.state.global_step)
        results = job.results[function.name]
        if i is None:
            results.batch_result = result
            if result.to_be_split(len(job.batch)):
                self._send_single_calls(job, function, together=not alone)
                return
        else:
            results.single_results[i] = result
        if self._ends_job(job, function, i, result):
            return
        if result.kind == "timed out" and job.batch.trial:
            self._cancel(list(open_calls))
            open_calls.clear()
        if not any(job.open.values()):
            self._finish(job)

    def _stop_batch_calls(self, hung: RewardFunction, step: int) -> None:
        """Called if a function hung or died in this step. For the rest of the step the function is
        called for one completion at a time: later jobs start so, and its calls for several
        completions that no worker has begun are cancelled."""
        if (hung.name, step) in self._hung:
            return
        self._hung.add((hung.name, step))
        to_cancel = []
        for number, (job, function, i) in self._calls.items():
            is_of_step = job.batch.state.global_step == step and not job.done
            is_of_several = i is None and len(job.batch) > 1
            if function is hung and is_of_step and is_of_several:
                to_cancel.append(number)
        self._cancel(to_cancel)

    def _ends_job(
        self, job: _Job, function: RewardFunction, i: int | None, result: CallResult
    ) -> bool:
        """Checks whether a call's result ends the run: by an error, or because too many calls
        failed, which `self.watch` counts. If so, ends the job with that error and returns True. `i`
        is the completion of the call, None for all. Results of a trial, and under the policy
        `error`, are not counted. The error itself is raised by `collect`."""
        self.watch.count_wait()
        if result.ends_run(job.policy):
            self._finish(job, ending=function)
        elif job.policy != "error" and not job.batch.trial:
            try:
                self.watch.add_result(function, job.batch, i, result)
            except ShoalError as error:
                self._drop(job)
                self._done.append((job.ticket, error))
        return job.done

    def _finish(self, job: _Job, ending: RewardFunction | None = None) -> None:
        """Ends a job: sums the results of all functions to `Scores` and queues these for `collect`.
        If the sum raises a ShoalError, queues that in place of the scores. `ending` is given if the
        result of this function ends the run: it alone is summed, which raises its error. Replies
        that come later are ignored."""
        self._drop(job)
        functions = self.functions if ending is None else (ending,)
        try:
            scores = sum_scores(
                functions, job.batch, job.results, job.policy, self.section.timeout_seconds
            )
            self.watch.add_scores(job.batch, scores)
        except ShoalError as error:
            scores = error
        self._done.append((job.ticket, scores))

    def _drop(self, job: _Job) -> None:
        """Marks a job as done, removes it from the queue and cancels its calls without a reply.
        Calls that a worker has begun go on; their replies are ignored."""
        job.done = True
        if job in self._jobs:
            self._jobs.remove(job)
        to_cancel: list[int] = []
        for open_calls in job.open.values():
            to_cancel += open_calls
        self._cancel(to_cancel)

    # -- waiting

    def _receive(self) -> None:
        """Enters the workers' replies that have arrived, without waiting."""
        if self._workers is None:
            return
        self.watch.begin_wait()
        try:
            replies = self._workers.receive()
        except WorkersLost as lost:
            raise self._close_and_make_error(lost, lost.seconds) from None
        self._enter_replies(replies)

    def _enter_replies(self, replies: Sequence[tuple[int, Header]]) -> None:
        """Enters (number of the call, reply) of the workers in their jobs, and sets the time of the
        last progress."""
        self.watch.count_wait()
        for number, reply in replies:
            self._progress = time.monotonic()
            self._enter_reply(number, {"kind": "", **reply})

    def _wait(self) -> None:
        """Waits until a job is done, or until none is queued, and enters the replies that arrive.
        Prints a line on stderr if that takes long. Raises ShoalError if the supervisor has ended,
        or sends nothing for much longer than the calls' limits allow."""
        start = time.monotonic()
        next_report = start + FIRST_REPORT_SECONDS
        while self._jobs and not self._done and self._workers is not None:
            now = time.monotonic()
            # Time in which nobody waited here does not count.
            deadline = max(self._progress, start) + self._most_seconds()
            if now >= deadline:
                raise self._close_and_make_error(WorkersLost(has_ended=False), now - start)
            if now >= next_report:
                next_report = now + REPORT_SECONDS
                print(
                    f"waiting for rewards for {int(now - start)} s: {self._describe_queue()}; "
                    f"reward.timeout_seconds={exact(self.section.timeout_seconds)} is the limit of "
                    "a call",
                    file=sys.stderr,
                    flush=True,
                )
            self.watch.begin_wait()
            try:
                replies = self._workers.wait(min(deadline, next_report) - now, since=start)
            except WorkersLost as lost:
                raise self._close_and_make_error(lost, time.monotonic() - start) from None
            self._enter_replies(replies)

    def _most_seconds(self) -> float:
        """Returns how many seconds all queued calls take if every call reaches its limit, times
        `GENEROUS`."""
        # By each function one call for all completions of a job, and one for each of them.
        num_calls = sum(1 + len(job.batch) for job in self._jobs) * len(self._remote)
        return GENEROUS * self._limits.most_seconds(num_calls)

    def _describe_queue(self) -> str:
        """Returns a text for messages: the functions called in workers, and how many completions
        are queued. Completions of jobs that are not done yet are queued."""
        names = ", ".join(function.name for function in self._remote)
        return f"completions with {names}: {sum(len(job.batch) for job in self._jobs)}"

    def _close_and_make_error(self, lost: WorkersLost, waited_seconds: float) -> ShoalError:
        """Closes the pool and returns the error that says whether the workers' supervisor has ended
        or is stuck. `waited_seconds` is for the message."""
        queue = self._describe_queue()
        self.close()
        if lost.has_ended:
            return ShoalError(
                "the process that starts reward workers has ended, killed from outside or because "
                "memory ran out; free some, or use fewer reward.workers"
            )
        return ShoalError(
            f"waited {waited_seconds:.0f} s for rewards ({queue}), but the process that starts "
            "reward workers is stopped or stuck; check what holds it, such as storage that does "
            "not answer, and start or resume the run again"
        )
