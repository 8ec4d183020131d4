"""A host as its fleet sees it: its groups, its progress, its restarts; and what makes an answer
unusable."""

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
"""How long a host that reads weights or compiles may be silent, and how long its first compiled
step may take."""
LEAST_SECONDS = 30.0
"""How long a host may always go without progress."""
MEDIANS = 20
"""As many medians of the time of a compiled step a host may go without progress."""
FEWEST_STEPS = 5
"""Compiled steps from which the speed of a host is known."""
MOST_PAUSE_SECONDS = 60.0
"""The longest pause between a loss and the restart."""
HEALTHY_STEPS = 20
"""Steps of training with answers of a host after which it may be restarted once more, up to the
number that it began with."""
EVALUATION_SHARE = 0.25
"""Of the completions that a host has, those of an evaluation while training waits for others: about
as many as it samples at once, since it has four times as many."""
ROUNDING = 1e-3
"""How far above 0 the log-prob of a certain token may be."""


@dataclass
class HostHealth:
    """Health of one host, and the groups that it has. `restarts`: how often it may still be
    restarted; with None it is this process's own, and a fault in it is one of the program."""

    name: str
    host: Host | None  # None between a loss and the restart
    restarts: int | None = None
    stall_seconds: float = 0.0  # 0 for auto: MEDIANS, at least LEAST_SECONDS
    given: dict[int, GroupRequest] = field(default_factory=dict)  # the groups that it has, by id
    acting: int = 0  # completions of these that wait for tools
    versions: set[int] = field(default_factory=set)  # that it was given
    retry_at: float = 0.0
    progress: HostProgress = field(default_factory=HostProgress)  # when it was last seen
    answered: int = 0  # tokens of its answers
    losses: int = 0  # that are not forgotten
    all_losses: int = 0
    refused: bool = False
    # counters and seconds of it and of the hosts before it, since the fleet last took them
    total: HostProgress = field(default_factory=HostProgress)
    timeline: Timeline = field(default_factory=Timeline)
    _most_restarts: int = field(init=False)
    _healthy_steps: int = 0
    _answered_before: int = 0  # tokens, when the last step of training was taken
    _moved_at: float = field(default_factory=time.monotonic)
    _heard_at: float = field(default_factory=time.monotonic)
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=101))  # of a compiled step

    def __post_init__(self) -> None:
        self._most_restarts = self.restarts or 0

    def may_start(self, request: GroupRequest) -> bool:
        """True if it was given the weights that the request may start on."""
        if request.exact:
            return request.version in self.versions
        return max(self.versions, default=-1) >= request.version

    def completions(self, purpose: Purpose | None = None) -> int:
        """How many completions it has, of a purpose or of all."""
        total = 0
        for request in self.given.values():
            if purpose is None or request.purpose == purpose:
                total += request.num_completions
        return total

    @property
    def samples(self) -> bool:
        """True if it has completions that do not wait for tools."""
        return self.completions() > self.acting

    def has_room(self, size: int, is_training: bool, is_shared: bool) -> bool:
        """True if it could get a group of `size` completions, of training or of other purposes.
        Where both want it (`is_shared`), training has all but EVALUATION_SHARE of it, and a group
        larger than that share is taken as the only one of its purpose."""
        capacity = self.progress.capacity
        if self.host is None or capacity < 0:
            return False
        if not capacity:
            return True
        num_free = capacity - self.completions()
        if not is_shared:
            return num_free > 0
        num_training = self.completions(Purpose.TRAIN)
        num_own = num_training
        if not is_training:
            num_own = self.completions() - num_training
        if not num_own and len(self.given) <= 1:
            # Else, where one group fills the host, the other purpose would wait for as long as more
            # come.
            return True
        evaluation_limit = max(1, int(EVALUATION_SHARE * capacity))
        limit = evaluation_limit
        if is_training:
            limit = capacity - evaluation_limit
        return min(limit - num_own, num_free) >= min(size, limit)

    def step_seconds(self) -> float:
        """The median time of a compiled step; 0 where too few were seen."""
        if len(self._seconds) < FEWEST_STEPS:
            return 0.0
        return median(self._seconds)

    def look(self, now: float) -> None:
        """Notes what the host has done since the last call."""
        assert self.host is not None
        before = self.progress
        self.progress = self.host.progress()
        counters = self.progress.counters.copy()
        counters["tokens"] = max(counters["tokens"], self.answered)  # a host need not count them
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
            if before.dispatches:
                self._seconds.append((now - self._moved_at) / num_steps)
            self._moved_at = now
        elif before.preparing != self.progress.preparing:
            self._moved_at = now
        elif self.progress.preparing:
            if has_reported:
                self._moved_at = now
        elif not self.samples:
            self._moved_at = now

    def answers(self, tokens: int) -> None:
        """Counts the tokens of an answer, some of which may be missing in the host's counters."""
        self.answered += tokens
        uncounted = max(0, self.answered - self.progress.counters["tokens"])
        self.progress.counters["tokens"] += uncounted
        self.total.counters["tokens"] += uncounted

    def stalled_seconds(self, now: float) -> float:
        """For how long the host has made no progress, where that is too long; else 0. While it
        compiles or reads weights, which may take any time, a report is progress; with
        `silence_seconds` it must report until it samples."""
        if not self.samples and not self.progress.preparing:
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
        """Counts a step of training. After HEALTHY_STEPS with answers of this host a loss is
        forgotten: over weeks machines are taken away more often than `restarts` allows, each time
        for another reason."""
        if self.host is None or self.restarts is None or self.answered <= self._answered_before:
            return
        self._answered_before = self.answered
        self._healthy_steps += 1
        if self._healthy_steps >= HEALTHY_STEPS and self.restarts < self._most_restarts:
            self.restarts += 1
            self.losses -= 1
            self._healthy_steps = 0

    def lose(self, now: float, refused: bool = False) -> int:
        """Takes the host out. Returns how many tokens it sampled in vain, by its last progress. The
        fleet may restart it after a pause, which doubles from loss to loss."""
        assert self.restarts is not None
        tokens = self.progress.counters["tokens"] - self.answered
        self.host = None
        self.given = {}
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

    def begin(self, host: Host, now: float) -> None:
        """Puts a new host in."""
        self.host = host
        self._moved_at = now
        self._heard_at = now
        self._seconds.clear()

    @property
    def is_gone(self) -> bool:
        """True if the host was lost and is not restarted any more."""
        if self.refused:
            return True
        return self.host is None and self.restarts is not None and self.restarts < 0


def wrong_answer(
    request: SampleRequest, completions: Sequence[Completion], vocab_size: int, newest: int
) -> str:
    """What makes an answer unusable, as a host that is out of order gives it; "" if nothing does.
    `newest`: the newest version that was published."""
    expected = list(range(request.num_completions))
    indices = [completion.index for completion in completions]
    is_complete = indices == expected
    if request.has_turns:  # completions come by themselves
        is_complete = set(indices) <= set(expected)
    if not is_complete:
        return f"{len(completions)} completions in place of {request.num_completions}"
    for completion in completions:
        size = len(completion.token_ids)
        for array in (completion.logprobs, completion.loss_mask, completion.versions):
            if len(array) != size:
                return "arrays of different lengths"
        if not 1 <= size <= request.params.max_tokens:
            return f"a completion of {size} tokens, expected 1 to {request.params.max_tokens}"
        if completion.token_ids.min() < 0 or completion.token_ids.max() >= vocab_size:
            return f"a token that is not in the vocabulary of {vocab_size}"
        is_logprob = np.isfinite(completion.logprobs) & (completion.logprobs <= ROUNDING)
        if not np.all(is_logprob):
            return "a log-prob that is not a finite number of at most 0"
    return wrong_versions(request, completions, newest)


def wrong_versions(request: SampleRequest, completions: Sequence[Completion], newest: int) -> str:
    """How tokens break the bound on their age; "" if none does."""
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
