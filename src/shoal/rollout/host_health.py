"""What a fleet knows of each of its hosts: the groups that the host has, its progress, its
restarts. Also the checks that show whether a host's answer is usable."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from shoal.protocols import GroupRequest, Host, HostProgress, SampleRequest
from shoal.records import Completion, Purpose
from shoal.report.timeline import Timeline

FIRST_SECONDS = 600.0
"""Longest time that a host which reads weights or compiles may send no report, and longest time
until its first compiled step has ended."""
LEAST_SECONDS = 30.0
"""Time without progress that is always allowed."""
MEDIANS = 20
"""Time without progress that is allowed, in multiples of the median time of a compiled step."""
FEWEST_STEPS = 5
"""Number of compiled steps after which a host's speed counts as known."""
MOST_PAUSE_SECONDS = 60.0
"""Longest pause between the loss of a host and its restart."""
HEALTHY_STEPS = 20
"""Number of training steps with answers from a host after which it may be restarted once more;
never more often than it was allowed at first."""
EVALUATION_SHARE = 0.25
"""Share of a host's completions that an evaluation may have while training's groups wait, too:
about as many as the host samples at once, since its capacity is four times that."""
ROUNDING = 1e-3
"""How far above 0 the log-prob of a certain token may be, because of rounding."""


@dataclass
class HostHealth:
    """What the fleet knows of one host of its own, and the groups that the host has. The fleet owns
    it, and it survives the host's restarts.

    `restarts`: how often the host may still be restarted; None for a host in this process, whose
    faults are errors of the program."""

    name: str
    host: Host | None  # None between the loss of the host and its restart
    restarts: int | None = None
    # longest time without progress; 0 for auto: MEDIANS, at least LEAST_SECONDS
    stall_seconds: float = 0.0
    # requests of the groups that the host has, by id
    assigned: dict[int, GroupRequest] = field(default_factory=dict)
    waiting_for_tools: int = 0  # completions of `assigned` that wait for tools or are over
    # versions of the weights that were announced to the host and are still stored
    versions: set[int] = field(default_factory=set)
    # `time.monotonic()` from which on the lost host may be restarted
    retry_at: float = 0.0
    # the host's figures when it was last asked
    progress: HostProgress = field(default_factory=HostProgress)
    answered: int = 0  # tokens that the host has answered with
    losses: int = 0  # losses of the host, less those that HEALTHY_STEPS have made up for
    # losses of the host since the run began; never lowered
    all_losses: int = 0
    refused: bool = False  # True if the host was lost by HostRefused: it is never restarted
    # counters and seconds of this host and of those before it under this name, since the fleet last
    # took them
    total: HostProgress = field(default_factory=HostProgress)
    timeline: Timeline = field(default_factory=Timeline)
    # `restarts` at first
    _most_restarts: int = field(init=False)
    # training steps with answers since the last loss, or since a restart was added
    _healthy_steps: int = 0
    _answered_before: int = 0  # `answered` when the last training step was taken
    # when the host last made progress, and last sent a report; both `time.monotonic()`
    _moved_at: float = field(default_factory=time.monotonic)
    _heard_at: float = field(default_factory=time.monotonic)
    # recent times of a compiled step
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=101))

    @property
    def in_process(self) -> bool:
        """True for a host in this process, which is trusted and never restarted."""
        return self.restarts is None

    def __post_init__(self) -> None:
        self._most_restarts = self.restarts or 0

    def may_start(self, request: GroupRequest) -> bool:
        """True if the host has been given weights that the request may start on: its very version
        if it is `exact`, else its version or a newer one. False if the host is lost."""
        if request.exact:
            return request.version in self.versions
        return max(self.versions, default=-1) >= request.version

    def num_completions(self, purpose: Purpose | None = None) -> int:
        """Returns how many completions the host has, of one purpose or (None) of all; also those
        that wait for tools or have ended in groups that go on."""
        total = 0
        for request in self.assigned.values():
            if purpose is None or request.purpose == purpose:
                total += request.num_completions
        return total

    @property
    def has_work(self) -> bool:
        """True if the host has completions to sample: assigned, and not waiting for tools."""
        return self.num_completions() > self.waiting_for_tools

    def has_room(self, size: int, is_training: bool, is_shared: bool) -> bool:
        """True if the host can take a group of `size` completions. False if the host is lost or its
        capacity is 0; always True if it has no limit of completions. `is_training`: the group is of
        training, not of another purpose. If nobody else wants the host, one free completion is
        enough for a group of any size.

        If both training and another purpose want the host (`is_shared`), training may use all of
        its capacity but EVALUATION_SHARE, and the others that share. A host that has no group of
        the purpose, and at most one of others, takes any group, even if it is full. Otherwise a
        group larger than its purpose's share needs all of the share free."""
        capacity = self.progress.capacity
        if self.host is None:
            return False
        if capacity is None:
            return True
        if capacity == 0:
            return False
        num_free = capacity - self.num_completions()
        if not is_shared:
            return num_free > 0
        num_training = self.num_completions(Purpose.TRAIN)
        num_of_purpose = num_training
        if not is_training:
            num_of_purpose = self.num_completions() - num_training
        # none of this purpose, and at most one group of the other
        if not num_of_purpose and len(self.assigned) <= 1:
            # Accept at least one group of each purpose: if one group fills the host, the other
            # purpose would wait for as long as more groups come.
            return True
        evaluation_limit = max(1, int(EVALUATION_SHARE * capacity))
        limit = evaluation_limit
        if is_training:
            limit = capacity - evaluation_limit
        # a group that is larger than the share needs all of the share free
        return min(limit - num_of_purpose, num_free) >= min(size, limit)

    def step_seconds(self) -> float:
        """Returns the median time of the host's compiled steps, in seconds; 0 if fewer than
        FEWEST_STEPS were timed since the host started."""
        if len(self._seconds) < FEWEST_STEPS:
            return 0.0
        return median(self._seconds)

    def update_progress(self, now: float) -> None:
        """Asks the host for its progress, adds what it has done since the last call to `total`, and
        notes whether it has moved on, for `stalled_seconds`. `now`: `time.monotonic()`. HostLost if
        the host cannot answer; AssertionError if it is lost already."""
        assert self.host is not None
        before = self.progress
        self.progress = self.host.progress()
        counters = self.progress.counters.copy()
        # a host need not count its tokens itself
        counters["tokens"] = max(counters["tokens"], self.answered)
        self.progress = replace(self.progress, counters=counters)
        for name, value in counters.items():
            self.total.counters[name] += value - before.counters[name]
        self.total.pause_seconds += self.progress.pause_seconds - before.pause_seconds
        busy_seconds = self.progress.busy_seconds - before.busy_seconds
        self.total.busy_seconds += busy_seconds
        self.timeline.add(self.name, "sample", busy_seconds)
        has_reported = self.progress.reports > before.reports
        if has_reported:
            self._heard_at = now
        num_steps = self.progress.dispatches - before.dispatches
        if num_steps:
            # the first step of all is not timed, because it may have compiled
            if before.dispatches:
                self._seconds.append((now - self._moved_at) / num_steps)
            self._moved_at = now
        elif before.preparing != self.progress.preparing:
            self._moved_at = now
        elif self.progress.preparing:
            # while it compiles or reads weights, a report is all the progress that it can show
            if has_reported:
                self._moved_at = now
        elif not self.has_work:
            # the time without work does not count as time without progress
            self._moved_at = now

    def count_answered(self, tokens: int) -> None:
        """Counts `tokens`, the number of sampled tokens of an answer. If the host's own counter
        `tokens` is lower than all its answers, because it does not count, raises that counter."""
        self.answered += tokens
        uncounted = max(0, self.answered - self.progress.counters["tokens"])
        self.progress.counters["tokens"] += uncounted
        self.total.counters["tokens"] += uncounted

    def stalled_seconds(self, now: float) -> float:
        """Returns for how many seconds the host has made no progress, if that is longer than
        allowed (`stall_seconds`, or if that is 0: MEDIANS x the median step and at least
        LEAST_SECONDS; FIRST_SECONDS while it prepares or has not sampled yet), else 0; 0 too if it
        has nothing to do. Progress is a compiled step; while the host compiles or reads weights,
        which may take long, each report counts as progress. If `progress.silence_seconds` is set, a
        host that prepares or has not sampled yet must report at least that often. `now`:
        `time.monotonic()`."""
        if not self.has_work and not self.progress.preparing:
            return 0.0
        idle = now - self._moved_at
        if self.stall_seconds:
            return idle if idle > self.stall_seconds else 0.0
        prepares = self.progress.preparing or not self.progress.dispatches
        if not prepares:
            limit = max(LEAST_SECONDS, MEDIANS * median(self._seconds or [0.0]))
            return idle if idle > limit else 0.0
        if idle > FIRST_SECONDS:
            return idle
        silence = now - max(self._heard_at, self._moved_at)
        if self.progress.silence_seconds and silence > self.progress.silence_seconds:
            return silence
        return 0.0

    def count_step(self) -> None:
        """Counts a training step, if the host has answered since the last one; does nothing for a
        lost host or one in this process. After every HEALTHY_STEPS such steps the host may be
        restarted once more, up to the number at first: over weeks machines are taken away more
        often than `restarts` allows, each time for another reason."""
        if self.host is None or self.restarts is None or self.answered <= self._answered_before:
            return
        self._answered_before = self.answered
        self._healthy_steps += 1
        if self._healthy_steps >= HEALTHY_STEPS and self.restarts < self._most_restarts:
            self.restarts += 1
            self.losses -= 1
            self._healthy_steps = 0

    def lose(self, now: float, refused: bool = False) -> int:
        """Notes that the host is lost, forgets its groups, uses up a restart, and sets the time of
        the restart, after a pause that doubles from loss to loss: 1, 2, 4, ... seconds, at most
        MOST_PAUSE_SECONDS. `refused`: never restart it. `now`: `time.monotonic()`. Returns how many
        tokens the host had sampled without answering with them. Must not be called for a host in
        this process."""
        assert self.restarts is not None
        # before the counters are reset
        tokens = self.progress.counters["tokens"] - self.answered
        self.host = None
        self.assigned = {}
        self.progress = HostProgress()
        self.answered = 0
        self.versions.clear()
        self._healthy_steps = 0
        self._answered_before = 0
        self.losses += 1
        self.all_losses += 1
        self.restarts -= 1
        self.refused = refused
        self.retry_at = now + min(2.0 ** (self.losses - 1), MOST_PAUSE_SECONDS)
        return tokens

    def restart_with(self, host: Host, now: float) -> None:
        """Replaces the lost host by a new one, whose progress is watched from `now`
        (`time.monotonic()`) on. Which versions it has is for the caller to note (`versions` is
        empty)."""
        self.host = host
        self._moved_at = now
        self._heard_at = now
        self._seconds.clear()

    @property
    def is_gone(self) -> bool:
        """True if the host is lost for good: refused, or lost with no restart left."""
        if self.refused:
            return True
        return self.host is None and self.restarts is not None and self.restarts < 0


def wrong_answer(
    request: SampleRequest, completions: Sequence[Completion], vocab_size: int, newest: int
) -> str:
    """Returns why a host's answer is unusable, as a text ("3 completions instead of 8"), or "" if
    the answer is right: all completions of the request (with turns any of them), in order of their
    index, with arrays of equal lengths, from 1 token to no more than allowed, ids in the
    vocabulary, finite log-probs and allowed versions. `newest`: the newest version that was
    published."""
    expected = list(range(request.num_completions))
    indices = [completion.index for completion in completions]
    is_complete = indices == expected
    if request.has_turns:  # any subset may come, because completions with turns come one by one
        is_complete = set(indices) <= set(expected)
    if not is_complete:
        return f"{len(completions)} completions instead of {request.num_completions}"
    for completion in completions:
        size = len(completion.token_ids)
        for array in (completion.logprobs, completion.loss_mask, completion.versions):
            if len(array) != size:
                return "arrays of different lengths"
        for array in completion.extra.values():
            if len(array) != size:
                return "arrays of different lengths"
        if not 1 <= size <= request.params.max_tokens:
            return f"a completion of {size} tokens, expected 1 to {request.params.max_tokens}"
        if completion.token_ids.min() < 0 or completion.token_ids.max() >= vocab_size:
            return f"a token that is not in the vocabulary of {vocab_size}"
        is_logprob = np.isfinite(completion.logprobs) & (completion.logprobs <= ROUNDING)
        if not np.all(is_logprob):
            return "a log-prob that is not a finite number of at most 0"
    return versions_fault(request, completions, newest)


def versions_fault(request: SampleRequest, completions: Sequence[Completion], newest: int) -> str:
    """Returns, as a text, how the versions of an answer's tokens break the request: with `exact`
    any version but the requested one, else a version older than requested or newer than `newest`.
    Returns "" if all versions are allowed; a completion without tokens has none."""
    for completion in completions:
        if not len(completion):
            continue
        oldest = int(completion.versions.min())
        latest = int(completion.versions.max())
        if request.exact and not oldest == latest == request.version:
            wrong_version = oldest if oldest != request.version else latest
            return f"tokens of version {wrong_version}, not {request.version}"
        if oldest < request.version or latest > newest:
            return (
                f"tokens of versions {oldest} to {latest}, expected {request.version} to {newest}"
            )
    return ""
