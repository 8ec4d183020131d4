"""A host as its fleet sees it: what it has, whether it makes progress, when it is made anew; and
what is no answer."""

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
"""How long a host that reads weights or compiles may not be heard of, and how long its first
compiled step may take."""
LEAST_SECONDS = 30.0
"""How long a host may always go without progress."""
MEDIANS = 20
"""As many medians of the time of a compiled step a host may go without progress."""
FEWEST_STEPS = 5
"""Compiled steps whose time says how fast a host is."""
MOST_PAUSE_SECONDS = 60.0
HEALTHY_STEPS = 20
"""Steps of training with answers of a host after which it may be made anew once more, up to what it
began with."""
EVALUATION_SHARE = 0.25
"""Of the completions that a host has, those of an evaluation while training waits for others: about
as many as it samples at once, since it has four times as many."""
ROUNDING = 1e-3
"""How far above 0 the log-prob of a certain token may be."""


@dataclass
class HostHealth:
    """One host. `restarts`: how often it may yet be made anew; with None it is this process's own,
    and a fault in it is one of the program."""

    name: str
    host: Host | None  # None between a loss and the restart
    restarts: int | None = None
    stall_seconds: float = 0.0  # 0 for auto: MEDIANS, at least LEAST_SECONDS
    given: dict[int, GroupRequest] = field(default_factory=dict)  # id -> the groups that it has
    acting: int = 0  # completions of these that wait for tools
    versions: set[int] = field(default_factory=set)  # whose manifests it was given
    retry_at: float = 0.0
    progress: HostProgress = field(default_factory=HostProgress)  # when it was last seen
    answered: int = 0  # tokens of its answers
    losses: int = 0  # that are not forgotten
    all_losses: int = 0
    refused: bool = False
    total: HostProgress = field(
        default_factory=HostProgress
    )  # of it and those before it, since it was last taken
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
        return (
            request.version in self.versions
            if request.exact
            else max(self.versions, default=-1) >= request.version
        )

    def completions(self, *purposes: Purpose) -> int:
        """Completions of some purposes that it has."""
        return sum(one.num_completions for one in self.given.values() if one.purpose in purposes)

    @property
    def samples(self) -> bool:
        """True if it has completions that do not wait for tools."""
        return self.completions(*Purpose) > self.acting

    def has_room(self, size: int, is_training: bool, is_shared: bool) -> bool:
        """True if it could take on a group of training, or of other purposes. Where both want it,
        training has all but EVALUATION_SHARE of it, and a larger group than such a share is taken
        on as the only one of its kind."""
        capacity = self.progress.capacity
        if self.host is None or capacity < 0:
            return False
        if not capacity:
            return True
        free = capacity - self.completions(*Purpose)
        if not is_shared:
            return free > 0
        own = self.completions(*(one for one in Purpose if (one is Purpose.TRAIN) == is_training))
        if not own and len(self.given) <= 1:
            # else, where one group fills the host, the other kind would wait for as long as more
            # come
            return True
        share = max(1, int(EVALUATION_SHARE * capacity))
        most = capacity - share if is_training else share
        return min(most - own, free) >= min(size, most)

    def step_seconds(self) -> float:
        """The time of a compiled step in the median; 0 where too few were seen."""
        return median(self._seconds) if len(self._seconds) >= FEWEST_STEPS else 0.0

    def look(self, now: float) -> None:
        """Notes what the host has done since it was last looked at."""
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
        if self.progress.reports > before.reports:
            self._heard_at = now
        if steps := self.progress.dispatches - before.dispatches:
            if before.dispatches:
                self._seconds.append((now - self._moved_at) / steps)
            self._moved_at = now
        elif before.preparing != self.progress.preparing or (
            self.progress.reports > before.reports if self.progress.preparing else not self.samples
        ):
            self._moved_at = now

    def answers(self, tokens: int) -> None:
        """Counts the tokens of an answer, of which the host may not have told yet."""
        self.answered += tokens
        uncounted = max(0, self.answered - self.progress.counters["tokens"])
        self.progress.counters["tokens"] += uncounted
        self.total.counters["tokens"] += uncounted

    def stalled_seconds(self, now: float) -> float:
        """How long the host has made no progress, where that is too long; else 0. While it compiles
        or reads weights, which may take any time, progress is that it is heard of; with
        `silence_seconds` it must be until it samples."""
        if not self.samples and not self.progress.preparing:
            return 0.0
        usual = max(LEAST_SECONDS, MEDIANS * median(self._seconds or [0.0]))
        prepares = self.progress.preparing or not self.progress.dispatches
        limit, idle = (
            self.stall_seconds or (FIRST_SECONDS if prepares else usual),
            now - self._moved_at,
        )
        if prepares and self.progress.silence_seconds and not self.stall_seconds:
            silent = now - max(self._heard_at, self._moved_at)
            limit, idle = (limit, idle) if idle > limit else (self.progress.silence_seconds, silent)
        return idle if idle > limit else 0.0

    def count_step(self) -> None:
        """Counts a step of training. After HEALTHY_STEPS with answers of this host a loss is
        forgotten: over weeks machines are taken away more often than `restarts` allows, and each
        time for another reason."""
        if self.host is None or self.restarts is None or self.answered <= self._answered_before:
            return
        self._answered_before = self.answered
        self._healthy_steps += 1
        if self._healthy_steps >= HEALTHY_STEPS and self.restarts < self._most_restarts:
            self.restarts += 1
            self.losses -= 1
            self._healthy_steps = 0

    def lose(self, now: float, refused: bool = False) -> int:
        """Takes the host out; how many tokens it sampled in vain, by what it told last. Its name is
        free for another after a pause, which doubles from loss to loss."""
        assert self.restarts is not None
        tokens = self.progress.counters["tokens"] - self.answered
        self.host, self.given, self.progress, self.answered = None, {}, HostProgress(), 0
        self.versions.clear()
        self._healthy_steps = self._answered_before = 0
        self.losses += 1
        self.all_losses += 1
        self.restarts -= 1
        self.refused = refused
        self.retry_at = now + min(2.0 ** (self.losses - 1), MOST_PAUSE_SECONDS)
        return tokens

    def begin(self, host: Host, now: float) -> None:
        """Puts a new host in."""
        self.host, self._moved_at, self._heard_at = host, now, now
        self._seconds.clear()

    @property
    def is_gone(self) -> bool:
        """True if the host was lost and no other comes."""
        return self.refused or (
            self.host is None and self.restarts is not None and self.restarts < 0
        )


def wrong_answer(
    request: SampleRequest, completions: Sequence[Completion], vocab_size: int, newest: int
) -> str:
    """What makes an answer unusable, as a host that is out of order gives it; "" if nothing does.
    `newest`: the newest version that was published."""
    indices = [one.index for one in completions]
    if not set(indices) <= set(range(request.num_completions)) or (
        not request.has_turns and indices != list(range(request.num_completions))
    ):
        return f"{len(completions)} completions in place of {request.num_completions}"
    for one in completions:
        size = len(one.token_ids)
        if not len(one.logprobs) == len(one.loss_mask) == len(one.versions) == size:
            return "arrays of different lengths"
        if not 1 <= size <= request.params.max_tokens:
            return f"a completion of {size} tokens, expected 1 to {request.params.max_tokens}"
        if one.token_ids.min() < 0 or one.token_ids.max() >= vocab_size:
            return f"a token that is not in the vocabulary of {vocab_size}"
        if not np.all(np.isfinite(one.logprobs) & (one.logprobs <= ROUNDING)):
            return "a log-prob that is not a finite number of at most 0"
    return wrong_versions(request, completions, newest)


def wrong_versions(request: SampleRequest, completions: Sequence[Completion], newest: int) -> str:
    """How tokens break the bound on their age; "" if none does."""
    for one in filter(len, completions):
        oldest, latest = int(one.versions.min()), int(one.versions.max())
        if request.exact and not oldest == latest == request.version:
            return (
                f"tokens of version {oldest if oldest != request.version else latest}, not "
                f"{request.version}"
            )
        if oldest < request.version or latest > newest:
            return (
                f"tokens of versions {oldest} to {latest}, expected {request.version} to {newest}"
            )
    return ""
